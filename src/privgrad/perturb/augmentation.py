"""Augmentation multiplicity: the mean gradient over several views of each example is clipped as one gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import require_choice, require_in, require_integer
from privgrad.gradient.functional import require_losses
from privgrad.types import LossFunction, count_examples, map_examples

Flip = Literal["horizontal", "vertical"]


def multiplicity(loss_fn: LossFunction, augment: Callable[[Any], Any], *, views: int) -> LossFunction:
    """Return a loss function that averages the loss over K augmented views of each example.

    Each per-example gradient is then the mean over the views of the example, and is clipped as one gradient.
    Perturbations (BAM, SAT) use the same views in both passes. In evaluation mode the views are not augmented.

    Args:
        loss_fn: (model, examples) -> losses, shape (B,).
        augment: examples -> examples of the same structure, each changed at random and independently of the others.
            It must draw from torch's global generator.
        views: K >= 1; 1 returns loss_fn itself, without augmentation.
    Returns:
        A loss_fn for PrivateGradient. The model gets K rows per example; the rows of one example are consecutive.
    Raises:
        PrivacyError: views is not an integer >= 1.
    Privacy:
        The sensitivity remains C, if augment changes each example independently of the others.
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


def shift_and_flip(
    images: Tensor, *, pixels: int = 4, flip: Flip | None = "horizontal", probability: float = 0.5
) -> Tensor:
    """Shift images by a few pixels and flip them, at random and independently for each image.

    Pixels from outside the image are mirrored at its edge, the edge included. It serves as `augment` of `multiplicity`.

    Args:
        images: shape (B, C, H, W).
        pixels: the largest shift up, down, left or right; below H and W.
        flip: direction of the flip; None only shifts, for images that have a fixed side, such as shoes or digits.
        probability: probability of a shift, and independently of a flip, in [0, 1].
    Returns:
        The changed images, shape (B, C, H, W).
    Raises:
        PrivacyError: the direction is unknown, or a number is out of its range.
    Reference:
        De et al. 2022 shift and flip horizontally. The BAM paper does each with probability 0.5 and flips vertically.
    """
    size, _, height, width = images.shape
    require_in("shift_and_flip", "pixels", pixels, f"[0, {min(height, width)})")
    require_in("shift_and_flip", "probability", probability, "[0, 1]")
    if flip is not None:
        require_choice("shift_and_flip", "flip", flip, get_args(Flip))

    moved, mirrored = (torch.rand(size, 1, device=images.device) < probability for _ in range(2))
    offsets = torch.randint(-pixels, pixels + 1, (2, size, 1), device=images.device) * moved
    found: list[Tensor] = []
    for n, by in zip((height, width), offsets, strict=True):
        position = torch.arange(n, device=images.device) + by
        position = torch.where(position < 0, -1 - position, position)  # mirrored at the edge, the edge included
        found.append(torch.where(position >= n, 2 * n - 1 - position, position))
    rows, columns = found
    if flip == "horizontal":
        columns = torch.where(mirrored, columns.flip(1), columns)
    elif flip == "vertical":
        rows = torch.where(mirrored, rows.flip(1), rows)
    image = torch.arange(size, device=images.device)[:, None, None]
    return images[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
