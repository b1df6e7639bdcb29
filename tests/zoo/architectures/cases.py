"""Examples, losses and sizes that the architectures share."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers: Any = importlib.import_module("transformers")
Losses = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Size:
    """How large a model and its batch are.

    Attributes:
        batch: number of examples.
        time: number of tokens of a text, or steps of a series.
        words: number of different tokens.
        width: of the states between layers.
        heads: number of attention heads.
        hidden: width inside of a feed-forward layer.
        layers: number of layers.
        image: height and width of an image.
        patch: height and width of a patch.
    """

    batch: int
    time: int
    words: int
    width: int
    heads: int
    hidden: int
    layers: int
    image: int
    patch: int


TINY = Size(batch=5, time=8, words=40, width=16, heads=2, hidden=24, layers=2, image=8, patch=4)
REAL = Size(batch=32, time=64, words=1000, width=256, heads=4, hidden=1024, layers=4, image=64, patch=8)


@dataclass(frozen=True)
class Case:
    """A model in training mode, its examples, and its losses.

    Attributes:
        model: the model.
        examples: tensors by name, one row for each example.
        losses: (model, examples) -> one loss per example.
    """

    model: nn.Module
    examples: dict[str, Tensor]
    losses: Losses


Maker = Callable[[Size], Case]


def tokens(size: Size) -> dict[str, Tensor]:
    """Texts with padding at the right, as token numbers, their mask and labels; -100 at the padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, size.words, (size.batch, size.time), generator=generator)
    lengths = torch.tensor([8, 5, 6, 3, 8]).repeat(-(-size.batch // 5))[: size.batch, None] * size.time // 8
    mask = (torch.arange(size.time) < lengths).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def unmasked(size: Size) -> dict[str, Tensor]:
    """Texts and labels without a mask."""
    return {name: value for name, value in tokens(size).items() if name != "attention_mask"}


def images(size: Size) -> dict[str, Tensor]:
    """Random images of three channels."""
    shape = (size.batch, 3, size.image, size.image)
    return {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)}


def plain_images(size: Size) -> dict[str, Tensor]:
    """The same, for a model that takes one positional argument."""
    return {"x": images(size)["pixel_values"]}


def vectors(size: Size, *shape: int) -> dict[str, Tensor]:
    """Random numbers of this shape for each example."""
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn((size.batch, *shape), generator=generator, dtype=torch.float64)}


def integers(size: Size, *shape: int) -> dict[str, Tensor]:
    """Random token numbers of this shape for each example."""
    generator = torch.Generator().manual_seed(4)
    return {"x": torch.randint(1, size.words, (size.batch, *shape), generator=generator)}


def token_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each token, averaged over the tokens of each example that have a label."""
    logits = model(**{name: value for name, value in examples.items() if name != "labels"}).logits
    return _over_labels(logits, examples["labels"])


def sequence_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of a decoder that reads the labels."""
    return _over_labels(model(**examples).logits, examples["labels"])


def _over_labels(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / (labels != -100).sum(1)


def state_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """A smooth number from all entries of each example's last states, of its logits, or of its plain output."""
    found = model(*examples.values()) if next(iter(examples)) == "x" else model(**examples)
    for name in ("last_hidden_state", "logits"):
        found = getattr(found, name, found)
    return smooth(found)


def pooled_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """The same from each example's pooled states."""
    return smooth(model(**examples).pooler_output)


def smooth(output: Tensor) -> Tensor:
    """A smooth number from all entries of each example's output."""
    rows = output.flatten(1)
    weights = torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return (rows * weights).sum(1).sin() + rows.square().mean(1)


def moved(case: Case, dtype: torch.dtype, device: str) -> Case:
    """Move each parameter a little, so that none is at zero; freeze those that the losses do not reach.

    Args:
        case: a new model in single precision, and its examples.
        dtype: precision of the result's parameters and of its examples.
        device: of the result.
    """
    model = case.model.to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model = model.to(device)
    examples = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in case.examples.items()}
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.random.fork_rng():
        total = case.losses(model, {name: value[:5] for name, value in examples.items()}).sum()
    # torch types the result as if allow_unused did not exist.
    grads = cast("tuple[Tensor | None, ...]", torch.autograd.grad(total, list(named.values()), allow_unused=True))
    for parameter, grad in zip(named.values(), grads, strict=True):
        parameter.requires_grad_(grad is not None)
    return Case(model, examples, case.losses)


def built(model: Callable[[Size], nn.Module], examples: Callable[[Size], dict[str, Tensor]], losses: Losses) -> Maker:
    """Make a model of a size, its examples and its losses."""
    return lambda size: Case(model(size), examples(size), losses)


def hugging_face(kind: str, config: str, size: Size, examples: dict[str, Tensor], losses: Losses, **own: Any) -> Case:
    """Make a model of transformers from a configuration, without dropout.

    Args:
        kind: name of the model's class.
        config: name of its configuration's class.
        size: of the model.
        examples: tensors by name.
        losses: one loss per example.
        **own: the configuration's own arguments, which take precedence over the usual ones of this size.
    """
    usual: dict[str, Any] = {
        "vocab_size": size.words, "hidden_size": size.width, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "intermediate_size": size.hidden, "max_position_embeddings": 2 * size.time,
        "image_size": size.image, "patch_size": size.patch, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    }  # fmt: skip
    found = getattr(transformers, config)
    fields = {name for base in found.__mro__ for name in getattr(base, "__annotations__", {})}
    names = {**{name: name for name in fields}, **found.attribute_map}
    options = {name: value for name, value in usual.items() if name in names and names[name] not in own}
    options |= {name: 0.0 for name in fields if "drop" in name} | own
    return Case(getattr(transformers, kind)(found(**options)), examples, losses)
