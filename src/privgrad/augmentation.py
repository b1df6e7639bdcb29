"""Several views of each example, whose mean gradient is clipped as one."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_integer
from privgrad.gradient.module_state import require_losses
from privgrad.types import LossFunction, count_examples, map_examples

Flip = Literal["horizontal", "vertical"]


def multiplicity(loss_fn: LossFunction, augment: Callable[[Any], Any], *, views: int) -> LossFunction:
    """The mean loss over K randomly changed views of each example: augmentation multiplicity.

    Each example's gradient is then the mean over its views, and is clipped as one: the sensitivity stays C.
    A perturbation sees the same views in both passes. In evaluation mode nothing is changed.

    Args:
        loss_fn: (model, examples) -> losses, shape (B,).
        augment: examples -> the same, changed at random, each by itself; draws from torch's global stream.
        views: K >= 1; 1 is loss_fn itself, without any change.
    Returns:
        What PrivateGradient takes as loss_fn. The model sees K rows an example, one after the other.
    Raises:
        PrivacyError: views is no integer >= 1.
    Reference:
        De et al. 2022 (arXiv 2204.13650).
    """
    require_integer("multiplicity", "views", views, 1)

    def losses(model: nn.Module, examples: Any) -> Tensor:
        rows = map_examples(partial(torch.repeat_interleave, repeats=views, dim=0), examples)
        rows = augment(rows) if model.training else rows
        size = count_examples(examples)
        return require_losses(loss_fn(model, rows), size * views).view(size, views).mean(1)

    return losses if views > 1 else loss_fn


def shift_and_flip(images: Tensor, *, pixels: int = 4, flip: Flip = "horizontal", probability: float = 0.5) -> Tensor:
    """Images moved by a few pixels, and mirrored: each of the two at random, for each image by itself.

    What comes in from outside is mirrored at the edge, the edge included.

    Args:
        images: shape (B, C, H, W).
        pixels: the largest shift up, down, left or right; below H and W.
        flip: along which direction.
        probability: of a shift, and of a flip, in [0, 1].
    Returns:
        The same shape.
    Raises:
        PrivacyError: an unknown direction, or a number out of range.
    Reference:
        De et al. 2022 shift and flip horizontally; the paper on BAM does each with probability 0.5, and says vertical.
    """
    if images.dim() != 4:
        got, remedy = f"shape {tuple(images.shape)}", "give a batch of images"
        raise expected("shift_and_flip", "images", "of shape (B, C, H, W)", got, remedy)
    size, _, height, width = images.shape
    require_integer("shift_and_flip", "pixels", pixels, 0)
    if pixels >= min(height, width) or not 0 <= probability <= 1 or flip not in get_args(Flip):
        got = f"{pixels}, {probability}, {flip!r}"
        condition = f"to be below {min(height, width)}, in [0, 1], and horizontal or vertical"
        raise expected(
            "shift_and_flip", "pixels, probability and flip", condition, got, "4, 0.5 and 'horizontal' are usual"
        )

    def drawn() -> Tensor:
        return torch.rand(size, 1, device=images.device) < probability

    moved, mirrored = drawn(), drawn()
    offsets = torch.randint(-pixels, pixels + 1, (2, size, 1), device=images.device) * moved
    places = [torch.arange(n, device=images.device) + by for n, by in zip((height, width), offsets, strict=True)]
    rows, columns = (_mirrored(place, n) for place, n in zip(places, (height, width), strict=True))
    if flip == "horizontal":
        columns = torch.where(mirrored, columns.flip(1), columns)
    else:
        rows = torch.where(mirrored, rows.flip(1), rows)
    image = torch.arange(size, device=images.device)[:, None, None]
    return images[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _mirrored(place: Tensor, size: int) -> Tensor:
    """Places outside [0, size), mirrored at the edge, the edge included."""
    place = torch.where(place < 0, -1 - place, place)
    return torch.where(place >= size, 2 * size - 1 - place, place)
