"""What float32 leaves of sums: the change that one example makes, in large batches and through computed weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import privgrad as pg
from conftest import make_plan
from privgrad.gradient.clipping import clipped_sum, sum_dtype
from privgrad.gradient.factors import Factor, Jacobian, JacobianNorms, Outer
from privgrad.models import ws_conv2d
from privgrad.noise import noise_generator


def change(size: int, chunk: int, index: int) -> float:
    """How far the sum of `size` contributions of norm 1 moves when one comes, less what that one is."""
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(size + 1, 1, 3, generator=generator) + 0.5
    b = torch.rand(size + 1, 1, 2, generator=generator) + 0.5
    like, sums = {"p": torch.zeros(2, 3)}, list[Tensor]()
    for kept in (torch.ones(size + 1, dtype=torch.bool), torch.arange(size + 1) != index):
        parts = zip(a[kept].split(chunk), b[kept].split(chunk), strict=True)
        chunks: list[dict[str, Factor]] = [{"p": Outer(*part)} for part in parts]
        found, _ = clipped_sum(chunks, like=like, clip=pg.clip.Flat(), max_grad_norm=1e-3, expected_size=size)
        sums.append(found.values["p"].double())
    one = b[index].double().T @ a[index].double()
    return float((sums[0] - sums[1] - 1e-3 * one / one.norm()).norm()) / 1e-3


@pytest.mark.parametrize(("size", "chunk"), [(9_000, 9_000), (9_000, 100), (20_000, 20_000), (200_000, 7_000)])
def test_a_change_of_one_example_is_right_to_a_thousandth_of_c_however_large_the_batch(size: int, chunk: int):
    assert max(change(size, chunk, index) for index in (0, size // 3, size)) < 1e-3


def test_many_expected_contributions_are_summed_and_noised_in_float64_and_released_in_float32():
    weight = nn.Parameter(torch.zeros(2, 3))
    assert sum_dtype(weight, 10_000) == torch.float32
    assert sum_dtype(weight, 10_001) == torch.float64
    assert sum_dtype(weight.bfloat16(), 1) == torch.float32
    for size, dtype in ((10_000, torch.float32), (10_001, torch.float64)):
        plan = make_plan(sample_rate=1.0, expected_batch_size=size, num_examples=size)
        oracle, seen = pg.PrivateGradient(nn.Linear(1, 1), lambda m, x: m(x[0])[:, 0], plan), list[torch.dtype]()
        oracle.raw_observers.append(lambda step, seen=seen: seen.extend(v.dtype for v in step.raw_mean.values()))
        gradient = oracle(next(iter(plan.batches(torch.utils.data.TensorDataset(torch.ones(size, 1))))))
        assert set(seen) == {dtype}
        assert {value.dtype for value in gradient.values.values()} == {torch.float32}
        facts = oracle.ledger.plan_facts["noise_generator"]
        assert facts == noise_generator([torch.zeros(1, dtype=dtype)])


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * weight.tanh()


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(7, 5)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 5)),
    "times": lambda: nn.utils.parametrize.register_parametrization(nn.Linear(6, 4), "weight", Times(1e4)),
    "standardized": lambda: ws_conv2d(3, 4, 3, gain=True, bias=False),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_the_norm_of_a_jacobian_is_bounded_and_not_by_far(name: str):
    torch.manual_seed(0)
    layer = COMPUTED[name]().double()
    weight: Any = layer.weight
    for parameter in layer.get_submodule("parametrizations").parameters():
        rows = [
            torch.autograd.grad(weight, parameter, along.view_as(weight), retain_graph=True)[0].flatten()
            for along in torch.eye(weight.numel(), dtype=torch.float64)
        ]
        exact = float(torch.linalg.matrix_norm(torch.stack(rows), 2))
        found = Jacobian(weight, parameter, 0.0).measured_norm(torch.randn(weight.shape))
        assert exact <= found <= 2.01 * exact


def test_the_norm_of_a_jacobian_is_measured_again_after_a_while():
    norms, parameter = JacobianNorms(), torch.ones(3, requires_grad=True)
    found = [norms.of("key", Jacobian(1 / scale * parameter, parameter, 0.0)) for scale in range(1, 41)]
    assert found[:32] == pytest.approx([2.0] * 32)
    assert found[32:] == pytest.approx([2 / 33] * 8)


def test_the_norm_of_a_jacobian_that_grows_is_measured_again_at_once():
    norms, parameter = JacobianNorms(), torch.ones(3, requires_grad=True)
    found = [norms.of("key", Jacobian(gate * parameter, parameter, 0.0)) for gate in (0.0, 0.0, 1e-3, 1.0, 1.1, 40.0)]
    assert found == pytest.approx([0.0, 0.0, 2e-3, 2.0, 2.0, 80.0])


class Gate(nn.Module):
    """A public warm-up: the weight is 0 until the gate opens."""

    def __init__(self):
        super().__init__()
        self.gate = 0.0

    def forward(self, weight: Tensor) -> Tensor:
        return self.gate * weight


def test_a_gate_that_opens_after_the_first_step_lets_no_example_add_more_than_c():
    examples = 200
    torch.manual_seed(0)
    gate = Gate()
    model = nn.utils.parametrize.register_parametrization(nn.Linear(8, 4, bias=False), "weight", gate)
    large = (1e6 * torch.randn(examples, 1, 8)).round()
    cancelling = torch.cat([large, (torch.randn(examples, 1, 8) > 0) * 2.0 - 1 - large], 1)

    def sum_of(count: int) -> Tensor:
        gate.gate = 0.0
        plan = one_step_plan(examples - 1, steps=2)
        private_grad = PrivateGradient(model, lambda m, x: m(x[0]).flatten(1).sum(1), plan)
        seen: list[Any] = []
        private_grad.raw_observers.append(seen.append)
        for batch in plan.batches(TensorDataset(cancelling[:count])):
            private_grad(batch)
            gate.gate = 1.0
        return torch.cat([mean.flatten() for mean in seen[-1].raw_mean.values()]) * (examples - 1)

    assert float((sum_of(examples) - sum_of(examples - 1)).norm()) <= 1.005

