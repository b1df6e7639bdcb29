"""Private examples whose numbers are hard on floating point, and losses of one example each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sensitivity.grammar import WORDS, Draw, Drawn, Shape

# The last two tensors of a batch are y, shaped like the flat output, and one number c an example.
Examples = tuple[Tensor, ...]
LARGEST = 1e18


def _flat(output: Tensor) -> Tensor:
    return output.reshape(len(output), -1)


def _squared(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return (out - y).square().sum(1)


def _cross_entropy(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    if out.shape[1] == 1:
        return F.softplus(-out[:, 0] * y[:, 0].sign())
    return F.cross_entropy(out, y.argmax(1), reduction="none")


def _smooth(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return F.softplus(out * y).sum(1)


def _waves(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return torch.tanh(out + y).sum(1) * c


def _linear(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return (out * y).sum(1)


def _weighted(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return (out - y).sum(1) * c


def _huber(out: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return F.smooth_l1_loss(out, y, reduction="none").sum(1)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "squared error": _squared,
    "cross entropy": _cross_entropy,
    "softplus": _smooth,
    "tanh times c": _waves,
    "linear": _linear,
    "linear times c": _weighted,
    "Huber": _huber,
}


def loss_of(name: str) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of that name: (model, examples) -> losses, shape (B,)."""
    by_output = LOSSES[name]

    def loss_fn(model: nn.Module, examples: Examples) -> Tensor:
        *inputs, y, c = examples
        return by_output(_flat(model(*inputs)), y, c)

    return loss_fn


PROFILES = ("plain", "canceling", "extreme", "padded", "aligned", "crowd")
TOUCHES = ("outlier", "repeated", "zero rows", "nonfinite rows")


def tame(drawn: Drawn, count: int) -> Examples:
    """Return ordinary examples, without padding: what a first batch might hold."""
    tensors = [_tame(kind, (count, *shape)) for kind, shape in drawn.inputs]
    return (*tensors, torch.randn(count, torch.Size(drawn.output).numel()), torch.randn(count))


def _tame(kind: str, shape: Shape) -> Tensor:
    if kind == "ids":
        return torch.randint(1, WORDS, shape)
    values = torch.randn(shape)
    if kind == "sparse":
        values[:, 0] = torch.randint(0, WORDS, shape[:1] + shape[2:]).float()
    return values


def draw_examples(
    draw: Draw, drawn: Drawn, count: int, profile: str, microbatch: int | None, bound: float
) -> tuple[Examples, int]:
    """Draw a batch of a profile, with touches; and the place of the row that is unlike the others.

    Args:
        draw: the choices.
        drawn: the model that the examples are for.
        count: of examples.
        profile: one of PROFILES.
        microbatch: examples that are taken at once; None if the engine chooses.
        bound: C times the smallest of the scales; what data built around a threshold go by.
    """
    rng, outputs = draw.rng, torch.Size(drawn.output).numel()
    inputs = [_tame(kind, (count, *shape)) for kind, shape in drawn.inputs]
    y, c = torch.randn(count, outputs), torch.randn(count)
    floats = [index for index, (kind, _) in enumerate(drawn.inputs) if kind != "ids"]
    if profile == "plain":
        for index in floats:
            _values(drawn, inputs, index).mul_(draw.power(-3, 3))
        y, c = y * draw.power(-3, 3), c * draw.power(-3, 3)
    elif profile in ("canceling", "crowd"):
        _cancel(draw, drawn, inputs, y, bound)
    elif profile == "extreme":
        _stretch(draw, drawn, inputs, y, c, bound)
    elif profile == "aligned":
        _align(draw, drawn, inputs)
        y, c = y * draw.power(-2, 5), c * draw.power(-2, 5)
    elif profile == "padded":
        _pad(draw, drawn, inputs, microbatch)
        y = y * draw.power(-1, 2)
    special = rng.choice((0, count - 1, rng.randrange(count)))
    touches = TOUCHES if profile != "crowd" else ("repeated", "repeated", "zero rows")
    for touch in TOUCHES:
        if draw.chance(0.15 if touch != "nonfinite rows" else 0.06) and touch in touches:
            draw.used.append(touch)
            _touch(draw, drawn, touch, inputs, y, c, special)
    return (*inputs, y, c), special


def _values(drawn: Drawn, inputs: Sequence[Tensor], index: int) -> Tensor:
    """Return a view of an input's floats: of packed sparse rows, the values and not the columns."""
    return inputs[index][:, 1] if drawn.inputs[index][0] == "sparse" else inputs[index]


def _cancel(draw: Draw, drawn: Drawn, inputs: list[Tensor], y: Tensor, bound: float) -> None:
    """Make terms of an example's places cancel: 1e2 to 1e6 C and their opposite, with small ones in between.

    The signs change from place to place in the input or in y. Ids repeat: one row of a table is looked up again and
    again.
    """
    rng, count = draw.rng, len(y)
    places = drawn.output[0] if len(drawn.output) > 1 else 1
    in_y, alike = draw.chance(0.6) and places > 1, draw.chance(0.3)
    noise, middle = (draw.chance(0.3 if draw.small else 0.6) * draw.power(-9, -3) for _ in range(2))
    size = rng.choice((1.0, draw.power(-3, 3)))
    large = bound * (draw.power(3, 4.5) if draw.small else draw.power(2, 6)) / size

    def each(shape: Shape) -> Tensor:
        drawn = torch.rand(shape) + 0.5 if draw.chance(0.7) else torch.randn(shape)
        return torch.ones(shape) if alike and draw.chance(0.5) else drawn

    for index, (kind, shape) in enumerate(drawn.inputs):
        if kind == "ids":
            inputs[index][:] = inputs[index][:, :1]
            continue
        x = _values(drawn, inputs, index)
        # The same along one dimension, which holds the places or the channels.
        dim = 1 if kind == "sparse" or len(shape) == 1 or draw.chance(0.6) else len(shape)
        if x.dim() > 1:
            one = each((count, *[1 if d == dim else n for d, n in enumerate(x.shape) if d > 0]))
            x.copy_(size * one.expand_as(x) * (1 + noise * torch.randn(x.shape)))
            if not in_y:
                x.mul_(_signs(x.shape[dim], middle).view([-1 if d == dim else 1 for d in range(x.dim())]))
    by_place = y.view(count, places, -1)
    one = each((count, 1, by_place.shape[2]))
    by_place.copy_(large * one * (1 + noise * torch.randn(by_place.shape)))
    if in_y:
        by_place.mul_(_signs(places, middle)[:, None])
    if draw.chance(0.2):
        y.mul_((-1.0) ** torch.arange(count)[:, None])


def _signs(count: int, middle: float) -> Tensor:
    """Return signs whose sum is small: 1, -1, 1, ...; of an odd count, one in the middle is a small number."""
    signs = (-1.0) ** torch.arange(count)
    if count % 2 and count > 1:
        signs[count // 2 :] *= -1
        signs[count // 2] = middle
        signs[-1] -= signs.sum().round()
    return signs


def _stretch(draw: Draw, drawn: Drawn, inputs: list[Tensor], y: Tensor, c: Tensor, bound: float) -> None:
    """Give entries, rows or tensors magnitudes from 1e-18 to 1e18; or products of 1e43 to 2e45 C."""
    way = draw.rng.choice(("entries", "rows", "tensors", "products", "products", "products"))
    large = draw.power(15, 18)
    for x in (*(_values(drawn, inputs, i) for i, (kind, _) in enumerate(drawn.inputs) if kind != "ids"), y, c):
        if way == "entries":
            x.mul_(10.0 ** (torch.rand(x.shape) * 36 - 18))
        elif way == "rows":
            x.mul_(10.0 ** (torch.rand(len(x)).view(-1, *[1] * (x.dim() - 1)) * 36 - 18))
        elif way == "tensors":
            x.mul_(draw.power(-18, 18))
        else:
            x.mul_(min(1e18, bound * draw.power(43, 45.3) / large) if x is y or x is c else large)
        x.clamp_(-LARGEST, LARGEST)


def _align(draw: Draw, drawn: Drawn, inputs: list[Tensor]) -> None:
    """Point inputs along a row of a parameter: what a projection takes out of a gradient is then nearly all."""
    rows = [p.detach().reshape(-1, p.shape[-1]) for p in drawn.model.parameters() if p.dim() > 1]
    for index, (kind, _) in enumerate(drawn.inputs):
        if kind == "ids":
            continue
        x = _values(drawn, inputs, index)
        fitting = [each for each in rows if each.shape[-1] == x.shape[-1] and bool(each.norm() > 0)]
        if fitting:
            row = draw.rng.choice(fitting)[0].float()
            row = row / row.norm().clamp(min=1e-30)
            x.copy_(draw.power(0, 5) * (row + draw.power(-9, -1) * draw.chance(0.7) * torch.randn(x.shape)))


def _pad(draw: Draw, drawn: Drawn, inputs: list[Tensor], microbatch: int | None) -> None:
    """Pad most rows, sometimes all but the first rows of each microbatch, which audits look at."""
    count = len(inputs[0])
    step = microbatch or count
    spared = (torch.arange(count) % step) < draw.rng.choice((0, 1, 4))
    for index, (kind, shape) in enumerate(drawn.inputs):
        if kind == "ids":
            long = torch.randint(0, shape[0], (count,)) if draw.chance(0.5) else torch.zeros(count, dtype=torch.long)
            padding = torch.arange(shape[0])[None] >= long[:, None]
            inputs[index][padding & ~spared[:, None]] = 0
        else:
            x = _values(drawn, inputs, index)
            x[~spared] *= (torch.rand(x[~spared].shape) < 0.3).to(x)


def _touch(draw: Draw, drawn: Drawn, touch: str, inputs: list[Tensor], y: Tensor, c: Tensor, special: int) -> None:
    """Change rows: one becomes an outlier, all become one, some become zero or are not finite."""
    values = [_values(drawn, inputs, i) for i, (kind, _) in enumerate(drawn.inputs) if kind != "ids"]
    if touch == "repeated":
        for x in (*inputs, y, c):
            x[:] = x[:1].clone() if draw.chance(0.8) else x
    elif touch == "zero rows":
        rows = torch.rand(len(y)) < 0.3
        for x in (*values, y, c):
            x[rows] = 0.0 if draw.chance(0.7) else x[rows]
    elif touch == "outlier":
        for x in (*values, y, c):
            if draw.chance(0.5):
                x[special] = (x[special] * draw.power(1, 12)).clamp(-LARGEST, LARGEST)
    else:
        rows = torch.rand(len(y)) < 0.2
        rows[special] |= draw.chance(0.5)
        for x in (*values, y, c):
            if draw.chance(0.4):
                x[rows] = draw.rng.choice((torch.nan, torch.inf, -torch.inf))


def doubled(examples: Examples) -> Examples:
    """Return the same examples in float64."""
    return tuple(x.double() if x.is_floating_point() else x for x in examples)


def without(examples: Examples, place: int) -> Examples:
    """Return the examples without the one at a place."""
    return tuple(torch.cat([x[:place], x[place + 1 :]]) for x in examples)
