"""Modules without a rule whose parameters enter by F.linear, F.embedding or F.conv: exact, only where that holds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_rules import assert_equal_to_loop, floats, losses_of, one_by_one
from torch import Tensor, nn

import privgrad as pg
from privgrad.engine import capture
from privgrad.engine import units as vmapped_unit
from privgrad.engine.factored import Factored
from privgrad.gradient.factor import Dense
from privgrad.gradient.functional import batched


class StandardizedConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(input, (self.weight - mean) * torch.rsqrt(variance + 1e-4), self.bias)


class LowRank(nn.Module):
    """A frozen weight with a trainable low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5), requires_grad=False), nn.Parameter(torch.randn(4))
        self.down, self.up = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.up @ self.down, self.bias)


class RawAttention(nn.Module):
    """Three projections from one parameter, and a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.out = nn.Parameter(torch.randn(12, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, part) for part in self.projections.chunk(3))
        return self.out(F.scaled_dot_product_attention(q, k, v))


class Functional(nn.Module):
    """A convolution by function, used twice, its bias alone trainable in the second place."""

    def __init__(self, function: Callable[..., Tensor], dims: int, **options: object) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.weight, self.bias = nn.Parameter(torch.randn(4, 2, *[3] * dims)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x, self.weight, self.bias, **self.options)
        return y + self.function(x, self.weight.detach(), bias=self.bias, **self.options)


class Gated(nn.Module):
    """A linear map, and a parameter that enters elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.gate


class TimeFirstInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.transpose(0, 1), self.weight).transpose(0, 1)


class Positions(nn.Module):
    """The linear map of something that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Buffer(torch.randn(3, 6)), nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ F.linear(self.table, self.weight)


class DependsOnExamples(nn.Module):
    """The weight is made of the parameter and of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(5, 5), nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return torch.stack([F.linear(row, self.weight * row) for row in h])


class Scaled(nn.Module):
    """A child with a parameter of its own inside the function's input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 5)), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class ScaledWords(nn.Embedding):
    """Gemma's and BART's words, and OPT's positions: a table that is scaled, or read at an offset."""

    def __init__(self, offset: int, *, scaled: bool, padding_idx: int | None = None) -> None:
        super().__init__(9, 4, padding_idx)
        self.offset, self.factor = offset, nn.Buffer(torch.tensor(2.0 if scaled else 1.0))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        ids = (3 * input).abs().long().clamp(max=6)
        return super().forward(ids + self.offset) * self.factor


class ComputedWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding((3 * x).abs().long().clamp(max=6), self.weight.tanh(), padding_idx=2)


class Shared(nn.Embedding):
    """Reads the same rows for all examples."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return input + super().forward(torch.arange(3)) * 2.0


BY_PRODUCTS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "standardized convolution": (lambda: StandardizedConv2d(3, 4, 3, stride=2), floats(3, 6, 6)),
    "low rank": (LowRank, floats(5)),
    "low rank, sequence": (LowRank, floats(3, 5)),
    "attention": (RawAttention, floats(3, 4)),
    "scaled words": (lambda: ScaledWords(0, scaled=True, padding_idx=1), floats(5)),
    "padding at the end": (lambda: ScaledWords(0, scaled=True, padding_idx=-5), floats(5)),
    "words at an offset": (lambda: ScaledWords(2, scaled=False), floats(5)),
    "a computed table": (ComputedWords, floats(5)),
    "conv1d": (lambda: Functional(F.conv1d, 1, stride=[2], groups=2), floats(4, 9)),
    "conv2d": (lambda: Functional(F.conv2d, 2, padding=(1, 0), dilation=2), floats(2, 6, 7)),
    "conv3d": (lambda: Functional(F.conv3d, 3), floats(2, 4, 3, 4)),
    "shared input": (Positions, floats(3)),
    "a child with a norm": (Scaled, floats(3, 5)),
}
BY_COPIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "an elementwise parameter too": (Gated, floats(5)),
    "time first inside": (TimeFirstInside, floats(3, 5)),
    "rows for all examples": (lambda: Shared(9, 4), floats(3, 4)),
    "padding by name": (lambda: Functional(F.conv2d, 2, padding="same"), floats(2, 5, 5)),
}
WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "weights of examples": (DependsOnExamples, floats(5))
}
ALL = BY_PRODUCTS | BY_COPIES | WHOLE
pytestmark = [
    pytest.mark.filterwarnings("ignore:vmap cannot batch this model"),
    pytest.mark.filterwarnings("ignore:PrivateGradient computes"),
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), pytest.param(torch.float32, 2e-5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ALL)
def test_equal_to_single_examples(name: str, dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    make, inputs = ALL[name]
    model, x = nn.Sequential(nn.Identity(), make()).to(dtype), inputs(7).to(dtype)
    factors, rows = Factored(model, losses_of)(x), one_by_one(model, x)
    assert factors.keys() == rows.keys()
    for parameter, factor in factors.items():
        assert_equal_to_loop(factor, rows[parameter], tolerance)


@pytest.mark.parametrize("name", ALL)
def test_taken_whole_or_copied_only_where_it_must_be(name: str, monkeypatch: pytest.MonkeyPatch):
    whole: list[object] = []
    copied: list[object] = []
    original = capture.Capture._copies
    monkeypatch.setattr(capture.Capture, "_copies", lambda *given: _counted(copied, original, *given))
    monkeypatch.setattr(vmapped_unit, "batched", partial(_counted, whole, batched))
    make, inputs = ALL[name]
    Factored(make().double(), losses_of)(inputs(7))
    assert bool(whole) == (name in WHOLE)
    assert bool(copied) == (name not in BY_PRODUCTS)


def _counted(calls: list[object], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    calls.append(args)
    return function(*args, **kwargs)


def test_a_weight_made_of_the_whole_batch_is_refused():
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * x.detach().square().mean(0).rsqrt())

    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        Factored(Whitened().double(), losses_of)(floats(5)(7))


def test_a_module_may_take_another_path_in_a_later_batch():
    class Sometimes(nn.Module):
        scaled = False

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)
            return y * self.weight.sum() if self.scaled else y

    model, x = Sometimes().double(), floats(5)(7)
    engine = Factored(model, losses_of)
    for _ in range(4):
        assert type(engine(x)["weight"]) is not Dense
    model.scaled = True
    found = engine(x)["weight"]  # the fifth call: not audited
    assert_equal_to_loop(found, one_by_one(model, x)["weight"], 1e-10)
