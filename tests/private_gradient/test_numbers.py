"""Numbers at the ends of what floats hold: contributions stay within C, what leaves is finite, noise has its size."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.clip.clipping import Clipping
from privgrad.engine.factors.outer import Outer
from privgrad.gradient.factor import norms_of

ENGINES = ("factored", "vmap")
CLIPPINGS = [pg.clip.Flat(), pg.clip.PerLayer({"first": 1.0, "second": 2.0}), pg.clip.Automatic()]
# Of an example's gradient. Squares of the last that are finite are no float32; 1e-40 is no normal one.
SIZES = [0.0, 1e-40, 1e-30, 1e-12, 1e12, 1e30, math.inf, -math.inf, math.nan]


class Two(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x.flip(1))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Its gradient is as large as the second tensor says."""
    x, size = batch
    return model(x).float().sum(1) * size


def half_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return losses(model, batch)


def clipped_sum(sizes: list[float], max_grad_norm: float, loss: Any = losses, **options: Any) -> Tensor:
    count = len(sizes)
    numbers = {"sample_rate": 1.0, "expected_batch_size": count, "num_examples": count, "noise_multiplier": 0.0}
    plan = make_plan(max_grad_norm=max_grad_norm, **numbers)
    torch.manual_seed(0)
    model, x = Two(), torch.randn(count, 5)
    private_grad = pg.PrivateGradient(model, loss, plan, **options)
    released = private_grad(next(plan.batches(TensorDataset(x, torch.tensor(sizes)))))
    assert all(value.dtype == torch.float32 for value in released.values())
    return count * torch.cat([value.flatten().double() for value in released.values()])


@pytest.mark.parametrize("clip", CLIPPINGS, ids=repr)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("max_grad_norm", "loss"), [(1e-6, losses), (1.0, half_losses), (1e6, losses)], ids=["tiny C", "bfloat16", "huge C"]
)
def test_an_example_of_any_size_moves_the_sum_by_at_most_c(
    max_grad_norm: float, loss: Any, engine: Any, clip: Clipping
):
    """Six ordinary examples and one that is not; a sum of seven terms of length C rounds by 1e-6 C."""
    without = clipped_sum([1.0] * 6 + [0.0], max_grad_norm, loss, engine=engine, clip=clip)
    assert without.norm() > 0
    for size in SIZES:
        found = clipped_sum([1.0] * 6 + [size], max_grad_norm, loss, engine=engine, clip=clip)
        assert bool(found.isfinite().all())
        assert (found - without).norm() <= max_grad_norm * (1 + 1e-5)


@pytest.mark.parametrize("clip", CLIPPINGS, ids=repr)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_large_and_finite_contributes_c_and_what_is_not_nothing(engine: Any, clip: Clipping):
    def length(size: float) -> float:
        return float(clipped_sum([0.0, 0.0, 0.0, size], 1.0, engine=engine, clip=clip).norm())

    assert length(1e12) == pytest.approx(1.0, rel=1e-5)
    assert [length(size) for size in (0.0, math.inf, math.nan)] == [0.0, 0.0, 0.0]
    assert length(1e-30) <= 1e-27


@pytest.mark.parametrize("max_grad_norm", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("loss", [losses, half_losses])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_zero_are_hidden_by_the_whole_noise(engine: Any, loss: Any, max_grad_norm: float):
    """The noise alone, of 6,144 numbers: its mean square is within 6 standard errors (11 %) of (sigma C / B)^2."""
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, max_grad_norm=max_grad_norm, noise_multiplier=1.3)
    model, nothing = Two(512), TensorDataset(torch.ones(32, 5), torch.zeros(32))
    released = pg.PrivateGradient(model, loss, plan, engine=engine)(next(plan.batches(nothing)))
    std = 1.3 * max_grad_norm / 32
    assert released.noise_std == pytest.approx(std)
    z = torch.cat([value.flatten().double() for value in released.values()]) / std
    assert abs(float(z.square().mean()) - 1) < 6 * (2 / len(z)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("positions", "outputs", "inputs"), [(7, 5, 3), (3, 1024, 300), (2, 1100, 1000)])
def test_norms_written_to_the_same_memory_are_those_of_each_gradient(
    positions: int, outputs: int, inputs: int, dtype: torch.dtype
):
    a_TBI, b_TBO = torch.randn(positions, 8, inputs, dtype=dtype), torch.randn(positions, 8, outputs, dtype=dtype)
    b_TBO[:, 1] *= 1e-22  # its squares underflow
    outer = Outer(a_TBI.transpose(0, 1), b_TBO.transpose(0, 1))
    dense = outer.written_out()
    kept = [tensor.clone() for tensor in (outer.a_BTI, outer.b_BTO, dense.grads_BP)]
    scales = torch.rand(outputs, inputs) + 0.5
    for inverse_scales in (scales, scales.double(), scales.bfloat16()):
        alone = torch.cat([norms_of(gradient[None], inverse_scales) for gradient in dense.grads_BP])
        wanted_B = (kept[2].double() * inverse_scales.double()).flatten(1).norm(dim=1)
        for factor in (outer, dense):
            assert torch.equal(factor.norms(inverse_scales), alone)
        torch.testing.assert_close(alone, wanted_B, rtol=1e-6, atol=0.0)
    assert all(map(torch.equal, kept, (outer.a_BTI, outer.b_BTO, dense.grads_BP)))
