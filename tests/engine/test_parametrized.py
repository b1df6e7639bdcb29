"""Weights that a parametrization computes: what a closed form, or half precision, could hide from the clipping."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_perturb import moved_one_by_one
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn
from torch.nn.utils import parametrize

from conftest import clipped_sum
from privgrad.clip.clipping import Flat
from privgrad.engine import passes
from privgrad.engine.capture import Capture
from privgrad.engine.factored import Factored
from privgrad.engine.factors.conv import Convolution
from privgrad.engine.factors.weight_standardization import Projected, WeightStandardization
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.factor import Dense
from privgrad.gradient.reference import Vmap
from privgrad.models import ws_conv2d

ORIGINAL = "parametrizations.weight.original"


def products(model: nn.Module, examples: Any) -> Tensor:
    """Losses that are linear in the output."""
    return (model(examples[0]) * examples[1]).flatten(1).sum(1)


@pytest.mark.parametrize("mode", ["plain", "sam", "exact"])
def test_places_whose_squares_underflow_are_not_hidden_by_standardization(mode: str):
    torch.manual_seed(0)
    layer = ws_conv2d(128, 128, 1, bias=False, gain=False)
    x, y = torch.randn(16, 128, 1, 2), torch.randn(16, 128, 1, 2) * 0.25 / 128
    x[..., 0], y[..., 0] = x[..., 0] * 1e-25, y[..., 0] * 1e25
    share = torch.linspace(0.05, 0.2, 16).sqrt()[:, None, None]  # at some, the other place outweighs what is lost
    x[..., 1], y[..., 1] = x[..., 1] * share, y[..., 1] * share
    engine = Factored(layer, products)
    found = engine((x, y)) if mode == "plain" else engine.moved((x, y), 0.02, exact=mode == "exact")
    factor = found[ORIGINAL]
    torch.testing.assert_close(factor.norms(), factor.dense().double().flatten(1).norm(dim=1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_norms_are_of_what_is_summed_however_far_rows_are_from_zero(offset: float):
    """In float32 the rows of such weights are not quite of mean 0 and variance 1."""
    torch.manual_seed(0)
    layer = ws_conv2d(64, 64, 3, padding=1)
    layer.get_parameter(ORIGINAL).data += offset
    engine, examples = Factored(layer, products), (torch.randn(3, 64, 2, 2), torch.randn(3, 64, 2, 2))
    for found in (
        engine(examples),
        engine.moved(examples, 0.02, exact=False),
        engine.moved(examples, 0.02, exact=True),
    ):
        factor = found[ORIGINAL]
        torch.testing.assert_close(factor.norms(), factor.dense().double().flatten(1).norm(dim=1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("gain", "bias", "calls"), [(None, False, 0), (1.0, False, 0), (0.0, False, 1), (1.0, True, 1)]
)
def test_products_of_rows_with_gradients_are_those_of_outputs(
    gain: float | None, bias: bool, calls: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Where a gain is zero the outputs do not tell, and a bias is in them."""
    torch.manual_seed(0)
    layer = ws_conv2d(64, 64, 3, padding=1, bias=bias, gain=gain is not None).to(dtype)
    if gain is not None:
        gains = layer.get_parameter("parametrizations.weight.0.gain").data
        gains[: 1 if gain == 0 else None] *= gain
    seen, real = list[Tensor](), Convolution.row_products

    def noted(self: Convolution, rows: Tensor) -> Tensor:
        seen.append(rows)
        return real(self, rows)

    examples = torch.randn(5, 64, 2, 2, dtype=dtype), torch.randn(5, 64, 2, 2, dtype=dtype)
    model = nn.Sequential(layer, nn.ReLU(inplace=True))
    engine = Factored(model, products)
    engine(examples)
    monkeypatch.setattr(Convolution, "row_products", noted)
    found, expected = engine(examples), Vmap(model, products)(examples)
    assert len(seen) == calls
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for name, factor in found.items():
        norm_B = expected[name].dense().double().flatten(1).norm(dim=1)
        torch.testing.assert_close(factor.norms(), norm_B, rtol=tolerance, atol=tolerance * float(norm_B.max()))


class Again(nn.Module):
    """Calls a layer once for small images, twice for larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 64, 1), ws_conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(torch.tanh(self.first(x))))
        return torch.tanh(self.layer(x)) if x.shape[2] > 2 else x


@pytest.mark.parametrize("sizes", [(2, 2, 3, 3, 2), (3, 2, 3, 2, 2)])
def test_exact_bam_learns_when_a_standardized_layer_is_called_more_often(sizes: tuple[int, ...]):
    torch.manual_seed(0)
    model = Again().double()
    engine, plain = Factored(model, products), Vmap(model, products)
    for size in sizes:
        examples = tuple(torch.randn(3, n, size, size, dtype=torch.float64) for n in (3, 64))
        found, wanted = (e.moved(examples, 0.05, exact=True) for e in (engine, plain))
        for name, factor in wanted.items():
            torch.testing.assert_close(found[name].dense(), factor.dense(), rtol=1e-8, atol=1e-10)


def test_exact_bam_bends_standardized_weights_though_the_loss_is_linear():
    torch.manual_seed(0)
    layer = ws_conv2d(64, 64, 3, bias=False).double()
    examples = torch.randn(3, 64, 4, 4).double(), torch.randn(3, 64, 2, 2).double()
    found, wanted = (engine(layer, products).moved(examples, 0.02, exact=True) for engine in (Factored, Vmap))
    for name, factor in wanted.items():
        torch.testing.assert_close(found[name].dense(), factor.dense(), rtol=1e-8, atol=1e-10)


def doubled(layer: Any) -> None:
    step = layer.parametrizations.weight[0]
    step.forward = lambda weight: 2 * WeightStandardization.forward(step, weight)


def hooked(layer: Any) -> None:
    layer.parametrizations.weight[0].register_forward_hook(lambda _, __, weight: 2 * weight)


@pytest.mark.parametrize("change", [doubled, hooked])
def test_a_changed_standardization_is_not_taken_for_the_known_one(change: Any):
    torch.manual_seed(0)
    layer = ws_conv2d(64, 64, 3, bias=False, gain=False).double()
    change(layer)
    examples = torch.randn(3, 64, 4, 4).double(), torch.randn(3, 64, 2, 2).double()
    found, wanted = (engine(layer, products)(examples)[ORIGINAL] for engine in (Factored, Vmap))
    assert not isinstance(found, Projected)
    torch.testing.assert_close(found.dense(), wanted.dense(), rtol=1e-8, atol=1e-10)


class LowRank(nn.Module):
    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(0.1 * torch.randn(outputs, 4)), nn.Parameter(0.1 * torch.randn(4, inputs))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def test_one_example_more_moves_the_sum_by_at_most_c_under_autocast():
    """Sums that are pulled back through half precision at once would be rounded by as much as they are large."""
    torch.manual_seed(0)
    layer = nn.Linear(432, 64).requires_grad_(False)
    model = parametrize.register_parametrization(layer, "weight", LowRank(64, 432))
    x, bound = torch.rand(1024, 432), 0.01

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.long), reduction="none")

    def summed(x: Tensor) -> dict[str, Tensor]:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        total, _ = clipped_sum([Factored(model, losses)(x)], like=parameters, clip=Flat(), max_grad_norm=bound)
        return dict(total.values)

    all_of_them, but_one = summed(x), summed(x[:-1])
    moved = sum(float((all_of_them[name] - but_one[name]).double().square().sum()) for name in but_one) ** 0.5
    assert moved <= bound * (1 + 1e-3)


@pytest.mark.parametrize("mode", ["plain", "sam", "exact"])
def test_a_pass_is_freed_without_the_collector_of_cycles(monkeypatch: pytest.MonkeyPatch, mode: str):
    """What a pass holds of all layers would else stay through the next one."""
    alive: list[weakref.ref[Capture]] = []

    class Watched(Capture):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            alive.append(weakref.ref(self))

    model = nn.Sequential(ws_conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.Tanh(), nn.Conv2d(64, 64, 1))
    engine, examples = Factored(model, products), (torch.randn(3, 64, 2, 2), torch.randn(3, 64, 2, 2))

    def take() -> None:
        if mode == "plain":
            engine(examples)
        else:
            engine.moved(examples, 0.02, exact=mode == "exact")

    take()
    take()
    monkeypatch.setattr(passes, "Capture", Watched)
    gc.collect()
    gc.disable()
    try:
        take()
        assert alive
        assert not [capture for capture in alive if capture() is not None]
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("engine", [Factored, Vmap])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(5, 4), lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3))]
)
def test_the_old_weight_norm_computes_again_from_parameters_that_move(make: Callable[[], nn.Module], engine: Any):
    torch.manual_seed(0)
    layer = make()
    nn.utils.weight_norm(layer[1] if isinstance(layer, nn.Sequential) else layer)
    model, x = nn.Sequential(layer, nn.Tanh()).double(), torch.randn(6, 5, dtype=torch.float64)
    computed = engine(model, losses_of)
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(computed(x)[name], rows, 1e-8)
    for exact in (False, True):
        found = computed.moved(x, 0.3, exact=exact)
        for name, rows in moved_one_by_one(model, x, 0.3, exact=exact).items():
            assert_equal_to_loop(found[name], rows, 1e-8)


def test_gradients_of_a_computed_weight_that_are_written_out_for_their_norms_are_kept():
    """Each is then one term of the sum: no parts, and no second pull by J^T."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 3, padding=1).double()
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    examples = torch.randn(4, 3, 16, 16).double(), torch.randn(4, 8, 16, 16).double()
    found, wanted = Factored(layer, products)(examples)[ORIGINAL], Vmap(layer, products)(examples)[ORIGINAL]
    assert isinstance(found, Dense)
    torch.testing.assert_close(found.dense(), wanted.dense(), rtol=1e-8, atol=1e-10)


class Positive(torch.autograd.Function):
    """The identity, which lets positive gradients pass: those of a sum are not the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].relu()


class Computed(nn.Module):
    """A weight whose backward pass is not additive, or reads memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.row = how, nn.Parameter(torch.randn(3))

    def forward(self, weight: Tensor) -> Tensor:
        if self.how == "memory":
            return torch.as_strided_scatter(weight, self.row, (3,), (1,), 3)
        weight = weight * self.row.exp()
        if self.how == "function":
            return Positive.apply(weight)
        if weight.requires_grad:
            weight.register_hook(torch.relu)
        return weight


class ByHand(nn.Module):
    """The same without a parametrization."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.computed, self.weight = Computed(how), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.computed(self.weight))


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("how", ["function", "memory", "hook"])
def test_each_example_has_its_own_backward_pass_where_a_sum_of_gradients_has_another(how: str, by_hand: bool):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False)
    computed = parametrize.register_parametrization(layer, "weight", Computed(how), unsafe=True)
    model, x = (ByHand(how) if by_hand else computed).double(), torch.randn(6, 3, dtype=torch.float64)
    if how == "hook":  # vmap hides that a gradient is needed, so the hook is left out there
        with pytest.raises(UnsupportedModuleError, match="match the gradients of single examples"):
            Factored(model, losses_of)(x)
        return
    found = Factored(model, losses_of)(x)
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-9)
