"""The number of examples per pass, and what is kept in memory, do not depend on the number that was drawn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.clip.clipping import ClippingAccumulator
from privgrad.engine.factors import parametrized as jacobian


def passes_of(
    private_grad: pg.PrivateGradient, data: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ...]]:
    """Return the number of examples and the kinds of factors of each pass of one step, as clipping receives them."""
    found: list[Any] = []
    add = ClippingAccumulator.add

    def noted(self: ClippingAccumulator, chunk: Any, padded: int | None = None) -> None:
        found.append((next(iter(chunk.values())).examples, *(type(factor).__name__ for factor in chunk.values())))
        add(self, chunk, padded)

    with monkeypatch.context() as patch:
        patch.setattr(ClippingAccumulator, "add", noted)
        private_grad(next(iter(private_grad.plan.batches(data))))
    return found


def whole(size: int, **changed: Any) -> pg.PrivacyPlan:
    """Return a plan that expects `size` examples, and draws all of a larger data set."""
    return make_plan(sample_rate=1.0, expected_batch_size=size, num_examples=size, **changed)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "vmap": {"engine": "vmap"},
    "little memory": {"memory_mb": 1e-3},
    "vmap with little memory": {"engine": "vmap", "memory_mb": 1e-3},
    "BAM": {"perturb": pg.perturb.BAM(0.1), "memory_mb": 1e-3},
    "exact BAM": {"perturb": pg.perturb.BAM(0.1, mode="exact"), "memory_mb": 2e-3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_all_passes_but_the_last_have_a_size_that_does_not_follow_the_drawn_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    sizes = set[int]()
    for drawn in (24, 25, 31, 47, 48, 49, 64):
        private_grad = pg.PrivateGradient(make_model(), loss_fn, whole(24), **OPTIONS[name])
        *first, last = passes_of(private_grad, make_data(drawn), monkeypatch)
        assert sum(passed[0] for passed in (*first, last)) == drawn
        sizes |= {passed[0] for passed in first}
        assert all(last[0] <= passed[0] for passed in first)
    assert len(sizes) == 1


@pytest.mark.filterwarnings("ignore:NOT PRIVATE. the plan declares")
def test_users_are_split_by_the_expected_cohort(monkeypatch: pytest.MonkeyPatch):
    plan = pg.PrivacyPlan.for_users(
        num_users=10, expected_cohort_size=10, rounds=1, noise_multiplier=1.0, max_update_norm=1.0, delta=1e-3
    )
    for drawn in (10, 11, 29):
        inputs, labels = make_data(drawn).tensors
        users = TensorDataset(inputs[:, None], labels[:, None], torch.ones(drawn, dtype=torch.long))
        perturb = pg.federated.LocalUpdate(0.1, batch_size=1)
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, perturb=perturb)
        *first, last = (passed[0] for passed in passes_of(private_grad, users, monkeypatch))
        assert set(first) <= {10}
        assert last <= 10


def test_a_user_of_an_earlier_step_does_not_decide_how_later_users_are_split(monkeypatch: pytest.MonkeyPatch):
    """A user with more examples trains in wider mini-batches, of which the engine learns anew."""
    plan = pg.PrivacyPlan.for_users(
        num_users=10, expected_cohort_size=10, rounds=2, noise_multiplier=1.0, max_update_norm=1.0, delta=1e-3
    )
    sizes, inputs = list[Any](), torch.randn(12, 8, 1)
    for extra in (1, 3):
        model, perturb = nn.Linear(1, 30, bias=False), pg.federated.LocalUpdate(0.1, batch_size=8)
        private_grad = pg.PrivateGradient(model, lambda m, x: m(x[0]).sum(1), plan, perturb=perturb, memory_mb=0.0145)
        for counts in ([1] * 11 + [extra], [1] * 12):
            passes_of(private_grad, TensorDataset(inputs, torch.tensor(counts)), monkeypatch)
            sizes.append(private_grad._engine.microbatch_size((inputs, torch.tensor(counts)), 10))
    assert sizes[0] == 5
    assert len(set(sizes)) == 1


def test_the_number_of_passes_does_not_decide_when_the_norm_of_a_jacobian_is_measured(monkeypatch: pytest.MonkeyPatch):
    """A weight that is computed has a norm that grows with the training; all passes of a step have the same."""
    measured: list[list[int]] = []
    measure = jacobian.Jacobian.measured_norm

    for extra in (0, 1):
        model = parametrizations.weight_norm(nn.Linear(5, 3))
        private_grad = pg.PrivateGradient(model, loss_fn, whole(8, steps=70))
        steps, step = list[int](), 0

        def noted(self: jacobian.Jacobian, start: Tensor) -> float:
            steps.append(step)  # noqa: B023
            return measure(self, start)

        monkeypatch.setattr(jacobian.Jacobian, "measured_norm", noted)
        for step in range(70):
            data = make_data(8 + extra if step == 1 else 8)
            private_grad(next(iter(private_grad.plan.batches(data))))
        measured.append(steps)
    assert measured[0] == measured[1]
    assert {step for step in measured[0] if step > 0} == {32, 64}


def test_an_ordinary_batch_needs_no_pass_of_its_own_for_its_last_examples():
    plan = make_plan(sample_rate=0.01, expected_batch_size=100, num_examples=10_000)
    assert plan.usual_batch_size() == 130
    assert plan.usual_batch_size(processes=4) == 40
    assert make_plan(sample_rate=1.0, expected_batch_size=32).usual_batch_size() == 32
    sizes = [batch.size for batch in make_plan(**vars(plan) | {"steps": 500, "seed": 0}).batches(make_data(10_000))]
    assert sum(size > 130 for size in sizes) <= 5


def test_the_number_of_examples_in_a_pass_does_not_decide_what_is_kept(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.Flatten())
    kinds = set[Any]()
    for drawn in (50, 51, 99, 100):
        private_grad = pg.PrivateGradient(model, lambda m, x: m(x[0]).sum(1), whole(50), memory_mb=0.11)
        passes = passes_of(private_grad, TensorDataset(torch.randn(drawn, 4, 3, 3)), monkeypatch)
        kinds |= {passed[1:] for passed in passes}
    assert len(kinds) == 1


def row_of(share: float) -> tuple[Tensor, ...]:
    """Return an example whose gradient in Linear(2, 880) has norm `share`."""
    return (torch.full((1, 2), share / 1760**0.5),)


def word_of(share: float) -> tuple[Tensor, ...]:
    """Return an example whose gradient in Embedding(2, 416) has norm `share`."""
    return torch.zeros(1, dtype=torch.long), torch.full((1,), share / 416**0.5)


ALIKE: dict[str, tuple[Callable[[], nn.Module], int, int, Callable[[float], tuple[Tensor, ...]], float]] = {
    "Linear": (lambda: nn.Linear(2, 880, bias=False), 4700, 4766, row_of, 0.94),
    "Embedding": (lambda: nn.Embedding(2, 416), 9990, 10_082, word_of, 0.9999),
}


def linear_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).sum(1) * (batch[1] if len(batch) > 1 else 1)


@pytest.mark.parametrize("name", ALIKE)
def test_equal_examples_round_alike_when_one_more_would_have_split_the_pass(name: str):
    """With passes by the drawn size and long sums in float32, the last example here moved the sum by 2.43 C."""
    make, expected, drawn, one, share = ALIKE[name]
    model, sums = make(), list[Tensor]()
    for last in (None, 1.0, -1.0):
        rows = [tensor.expand(drawn, *tensor.shape[1:]) for tensor in one(share)]
        if last is not None:
            rows = [torch.cat(pair) for pair in zip(rows, one(last), strict=True)]
        private_grad = pg.PrivateGradient(model, linear_loss, whole(expected))
        seen: list[Any] = []
        private_grad.register_raw_observer(seen.append)
        private_grad(next(iter(private_grad.plan.batches(TensorDataset(*rows)))))
        sums.append(torch.cat([mean.double().flatten() for mean in seen[0].raw_mean.values()]) * expected)
    for other in sums[1:]:
        assert float((other - sums[0]).norm()) <= 1.005
