"""Jacobians of computed weights in closed form: right where they are found, and found only where they are right."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from privgrad.engine.factored import Factored
from privgrad.engine.factors.conv import Convolution, Geometry
from privgrad.engine.factors.outer import Outer
from privgrad.engine.factors.parametrized import Jacobian, JacobianNorms, Pulled, RowMap
from privgrad.gradient.autograd_graph import has_batched_rules
from privgrad.gradient.factor import Factor

SHAPE = (5, 3, 3, 2)


def standardized(v: Tensor) -> Tensor:
    variance, mean = torch.var_mean(v, dim=(1, 2, 3), keepdim=True, unbiased=False)
    return (v - mean) / torch.sqrt(variance + 1e-2)


def by_batch_norm(v: Tensor) -> Tensor:
    rows = v.reshape(1, len(v), -1)
    return F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-2).reshape_as(v)


def of_length_one(v: Tensor) -> Tensor:
    return v / v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


def jacobian_of(weight: Callable[..., Tensor], *leaves: Tensor) -> list[Jacobian]:
    """The Jacobian with respect to each leaf, whose closed form is looked for."""
    computed, norms = weight(*leaves), JacobianNorms()

    def rows(jacobian: Jacobian) -> RowMap | None:
        return norms.rows(id(jacobian), jacobian)

    return [Jacobian(computed, leaf, 1.0, rows) for leaf in leaves]


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


KNOWN: dict[str, Callable[..., Tensor]] = {
    "standardized": standardized,
    "by batch norm": by_batch_norm,
    "times a number": lambda v: 0.3 * v,
    "of length one": of_length_one,
    "of length one and mean zero": lambda v: of_length_one(v - v.mean((1, 2, 3), keepdim=True)),
    "standardized, with gains": lambda v, gain: gain * standardized(v),
    "of a length that is learned": lambda v, gain: of_length_one(v) * gain,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_closed_form_gives_the_products_and_the_norm_of_the_jacobian(name: str):
    torch.manual_seed(0)
    leaves = [leaf(*SHAPE), leaf(5, 1, 1, 1)][: 1 + name.endswith(("gains", "learned"))]
    for jacobian in jacobian_of(KNOWN[name], *leaves):
        assert jacobian.rows is not None
        h = torch.randn(4, *SHAPE, dtype=torch.float64)
        torch.testing.assert_close(jacobian.pull(h, batched=True), jacobian.product(h, batched=True))
        unit = torch.eye(h[0].numel(), dtype=torch.float64).view(-1, *SHAPE)
        largest = torch.linalg.matrix_norm(jacobian.product(unit, batched=True).flatten(1), 2)
        torch.testing.assert_close(torch.as_tensor(jacobian.norm, dtype=torch.float64), largest)


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "each entry by itself": torch.tanh,
    "a mask": lambda v: v * (torch.arange(v.numel()).view_as(v) % 3 > 0),
    "rows mixed": lambda v: v + 0.1 * v.flip(0),
    "entries mixed": lambda v: v.flip(1),
    "rows mixed, one entry apart": lambda v: v + v.flatten(1).roll((1, -1), (0, 1)).view_as(v),
    "rows mixed, one entry apart the other way": lambda v: v + v.flatten(1).roll((1, 1), (0, 1)).view_as(v),
    "all rows by one norm": lambda v: v / v.norm(),
    "a part along another row": lambda v: v + (v * torch.linspace(0, 1, 18).view(3, 3, 2)).sum((1, 2, 3), True) * v[0],
    "along itself, of another row": lambda v: (
        v + (v.flip(1) * v.detach()).sum((1, 2, 3), keepdim=True) * 0.1 * v.detach()
    ),
}


@pytest.mark.parametrize("name", [*KNOWN, *OTHER, "by layer norm"])
def test_products_for_many_gradients_equal_those_for_one(name: str):
    torch.manual_seed(0)
    weight = (KNOWN | OTHER).get(name, lambda v: F.layer_norm(v, SHAPE[1:]))
    leaves = [leaf(*SHAPE), leaf(5, 1, 1, 1)][: 1 + name.endswith(("gains", "learned"))]
    h = torch.randn(4, *SHAPE, dtype=torch.float64)
    for jacobian in jacobian_of(weight, *leaves):
        assert has_batched_rules(jacobian.weight) or name not in ("by layer norm", "standardized, with gains")
        alone = torch.stack([jacobian.product(each) for each in h])
        torch.testing.assert_close(jacobian.product(h, batched=True), alone, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", OTHER)
def test_no_closed_form_is_found_for_another_jacobian(name: str):
    torch.manual_seed(0)
    (jacobian,) = jacobian_of(OTHER[name], leaf(*SHAPE))
    assert jacobian.rows is None
    h = torch.randn(2, *SHAPE, dtype=torch.float64)
    assert torch.equal(jacobian.pull(h, batched=True), jacobian.product(h, batched=True))


def convolution(size: int, channels: int, rows: int, dtype: torch.dtype) -> Factor:
    x, b = torch.randn(6, channels, size, size, dtype=dtype), torch.randn(6, rows, size, size, dtype=dtype)
    return Convolution(x, b, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1))


def linear(positions: int, channels: int, rows: int, dtype: torch.dtype) -> Factor:
    return Outer(torch.randn(6, positions, channels, dtype=dtype), torch.randn(6, positions, rows, dtype=dtype))


GRADIENTS: dict[str, tuple[Callable[..., Factor], int]] = {
    "few positions": (convolution, 2),
    "many positions": (convolution, 9),
    "linear, few positions": (linear, 2),
    "linear, many positions": (linear, 60),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_norms_from_sums_over_rows_are_those_of_what_is_summed(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    make, size = GRADIENTS[name]
    inner = make(size, 16, 32, dtype)
    v, tolerance = leaf(*inner.shape, dtype=dtype), 1e-10 if dtype == torch.float64 else 1e-5
    computed = F.layer_norm(v.flatten(1), [v[0].numel()]).view_as(v)
    norms = JacobianNorms()
    pulled = Pulled(inner, Jacobian(computed, v, 1.0, lambda own: norms.rows(0, own)), apart=False)
    assert pulled.jacobian.rows is not None
    wanted = pulled.dense().double()
    torch.testing.assert_close(pulled.norms(), wanted.flatten(1).norm(dim=1), rtol=tolerance, atol=0)
    weights = torch.rand(6, dtype=dtype)
    summed = torch.einsum("b,b...->...", weights.double(), wanted)
    torch.testing.assert_close(pulled.weighted_sum(weights).double(), summed, rtol=1e-3, atol=10 * tolerance)


@pytest.mark.parametrize("size", [2, 9], ids=["few positions", "many positions"])
def test_norms_of_gradients_that_the_jacobian_nearly_removes_are_computed_from_themselves(size: int):
    """Gradients along the rows of a weight of length one vanish; the rest would drown in the rounding of the sums."""
    torch.manual_seed(0)
    x, b = torch.randn(1, 16, size, size).expand(4, -1, -1, -1), torch.randn(1, 32, size, size).expand(4, -1, -1, -1)
    same = Convolution(x, b, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1))
    v = same.dense()[0].requires_grad_()
    pulled = Pulled(same, Jacobian(of_length_one(v), v, 1.0, lambda own: JacobianNorms().rows(0, own)), apart=False)
    assert pulled.jacobian.rows is not None
    # All that is left is rounding. Sums of squares would leave a thousand times as much.
    torch.testing.assert_close(pulled.norms(), pulled.dense().double().flatten(1).norm(dim=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [2, 9], ids=["few positions", "many positions"])
def test_norms_of_zero_tiny_and_huge_gradients_are_those_of_gradients_that_are_written_out(size: int):
    torch.manual_seed(0)
    share = torch.tensor([1.0, 0.0, 1e-25, 1e25]).view(4, 1, 1, 1)
    x, b = torch.randn(4, 16, size, size), torch.randn(4, 32, size, size) * share
    v = leaf(32, 16, 3, 3, dtype=torch.float32)
    inner = Convolution(x, b, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1))
    pulled = Pulled(inner, Jacobian(of_length_one(v), v, 1.0, lambda own: JacobianNorms().rows(0, own)), apart=False)
    wanted = pulled.dense().double().flatten(1).norm(dim=1)
    torch.testing.assert_close(pulled.norms()[:3], wanted[:3], rtol=1e-5, atol=0)
    assert not torch.isfinite(pulled.norms()[3]) or pulled.norms()[3] >= wanted[3] * (1 - 1e-5)


def test_a_closed_form_is_not_reused_for_another_weight_of_the_same_step():
    torch.manual_seed(0)
    v, norms = leaf(*SHAPE), JacobianNorms()
    norms.begin_step()
    for share in (1.0, 0.5, 0.5):
        jacobian = Jacobian(share * v, v, 1.0, lambda own: norms.rows(0, own))
        h = torch.randn(1, *SHAPE, dtype=torch.float64)
        torch.testing.assert_close(jacobian.pull(h, batched=True), share * h)


class Shifted(nn.Linear):
    """Computes its bias too, which has no rows."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return F.linear(input, 2 * self.weight, torch.tanh(self.bias))


class Standardized(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return F.conv2d(input, standardized(self.weight), self.bias, self.stride, self.padding)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "standardized, many positions": (lambda: Standardized(3, 4, 3), (3, 7, 7)),
    "standardized, few positions": (lambda: Standardized(16, 32, 3, padding=1), (16, 2, 2)),
    "weight_norm": (lambda: weight_norm(nn.Conv1d(6, 4, 3, dilation=2)), (6, 9)),
    "weight_norm, transposed": (lambda: weight_norm(nn.ConvTranspose1d(6, 4, 4, stride=2)), (6, 9)),
    "computed bias": (lambda: Shifted(20, 6), (20,)),
    "weight_norm, linear": (lambda: weight_norm(nn.Linear(20, 6)), (3, 20)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_closed_forms_equal_a_loop_over_single_examples(name: str):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model = nn.Sequential(make(), nn.Tanh(), nn.Flatten()).double()
    x, engine = torch.randn(5, *shape, dtype=torch.float64), Factored(model, losses_of)
    rows = one_by_one(model, x)
    for _ in range(3):  # the second and the third step find the closed form again, and verify it no more
        engine.begin_step()
        for parameter, factor in engine(x).items():
            assert_equal_to_loop(factor, rows[parameter], 1e-8)
