"""Truncated Poisson batches: their draws, their padding, which counts for nothing, and their price."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan, seed_of
from privgrad.accounting.accountant import Release, Selection, attack_success, calibrate, epsilon
from privgrad.private_gradient import RawStep
from privgrad.statement.text import statement

LARGEST = 9


def truncated(**changed: Any) -> pg.PrivacyPlan:
    return make_plan(**({"sampling": "truncated", "max_batch_size": LARGEST, "steps": 40} | changed))


def test_every_batch_has_the_same_shape():
    sizes = list[int]()
    for batch in truncated(seed=1).batches(make_data()):
        inputs, labels = batch.examples
        assert (inputs.shape, labels.shape) == ((LARGEST, 5), (LARGEST,))
        assert batch.size <= LARGEST
        sizes.append(batch.size)
    assert len(set(sizes)) > 3
    assert max(sizes) == LARGEST


def test_draws_are_poisson_samples_of_which_random_ones_are_kept():
    count, rate, largest, steps = 40, 0.25, 10, 4000
    plan = make_plan(
        sampling="truncated",
        max_batch_size=largest,
        steps=steps,
        num_examples=count,
        expected_batch_size=10,
        sample_rate=rate,
        seed=seed_of(21),
    )
    drawn, sizes = np.zeros(count), np.zeros(steps, dtype=int)
    for step, batch in enumerate(plan.batches(TensorDataset(torch.arange(count)))):
        kept = batch.examples[0][: batch.size].numpy()
        assert len(set(kept.tolist())) == batch.size
        drawn[kept] += 1
        sizes[step] = batch.size
    law: Any = stats.binom(count, rate)
    expected = [law.pmf(size) for size in range(largest)] + [law.sf(largest - 1)]
    assert stats.chisquare(np.bincount(sizes, minlength=largest + 1), steps * np.array(expected)).pvalue > 1e-4
    mean = sizes.sum() / count
    assert stats.chisquare(drawn, np.full(count, mean)).pvalue > 1e-4


@pytest.mark.parametrize("largest", [8, 31, 32])
def test_a_batch_holds_the_drawn_examples_also_where_padding_makes_it_as_long_as_the_data(largest: int):
    data = TensorDataset(torch.arange(32))
    sampler = truncated(max_batch_size=largest).sampler(data)
    for draw in sampler:
        batch = sampler.dataset[draw]
        assert len(batch.examples[0]) == largest
        assert batch.examples[0][: batch.size].tolist() == draw.indices.tolist()
        assert set(batch.examples[0].tolist()) <= {*draw.indices.tolist()} or not batch.size


class Widened(nn.Module):
    """A model whose gradient is not finite at examples of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x / x.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("microbatch_size", [None, 4])
@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.Automatic(), pg.clip.PerLayer({"linear": 1.0})])
def test_padding_counts_for_nothing(engine: Any, clip: Any, microbatch_size: int | None):
    """Sums, norms and shares are those of the examples that were drawn."""
    model, seen, plan = Widened(), list[RawStep](), truncated(seed=3, steps=12)
    private_grad = pg.PrivateGradient(
        model, loss_fn, plan, engine=engine, clip=clip, microbatch_size=microbatch_size, norm_bins=4
    )
    private_grad.register_raw_observer(seen.append)
    for batch in plan.batches(make_data()):
        private_grad(batch)
        drawn = tuple(part[: batch.size] for part in batch.examples)
        sums: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        norms = list[float]()
        for row in range(batch.size):
            loss = loss_fn(model, tuple(part[row : row + 1] for part in drawn)).sum()
            gradient = dict(zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True))
            norms.append(math.sqrt(sum(float(value.square().sum()) for value in gradient.values())))
            factor = 1 / (norms[-1] + 0.01) if isinstance(clip, pg.clip.Automatic) else min(1.0, 1 / norms[-1])
            sums = {name: value + factor * gradient[name] for name, value in sums.items()}
        raw = seen[-1]
        torch.testing.assert_close(raw.clipping.raw_norms, torch.tensor(norms, dtype=torch.float64), rtol=1e-4, atol=0)
        for name, value in sums.items():
            torch.testing.assert_close(raw.raw_mean[name], value / plan.divisor, rtol=1e-4, atol=1e-6)
        assert raw.raw_shares is not None
        assert float(raw.raw_shares.max()) <= batch.size / plan.divisor + 1e-9
    assert private_grad.raw_nonfinite_examples == 0


def test_an_empty_batch_is_padding_alone():
    plan = truncated(seed=3, sample_rate=0.04, expected_batch_size=1, max_batch_size=3)
    seen = list[RawStep]()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    private_grad.register_raw_observer(seen.append)
    sizes = list[int]()
    for batch in plan.batches(make_data()):
        private_grad(batch)
        sizes.append(batch.size)
        if batch.size == 0:
            assert all(not value.any() for value in seen[-1].raw_mean.values())
            assert len(seen[-1].clipping.raw_norms) == 0
    assert 0 in sizes


def test_plan_ledger_and_file_have_one_price(tmp_path: Path):
    plan = truncated(delta=1e-3)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=tmp_path / "ledger.jsonl")
    for batch in plan.batches(make_data()):
        private_grad(batch)
    wanted = Release(1.0, 0.25, "truncated", 40, LARGEST, 32)
    assert private_grad.ledger.charged == [wanted]
    private_grad.ledger.close()
    read = pg.Ledger(tmp_path / "ledger.jsonl", read_only=True)
    assert read.charged == [wanted]
    assert read.epsilon(delta=1e-3) == plan.epsilon() == epsilon([wanted], delta=1e-3)
    assert plan.epsilon() > make_plan(steps=40, delta=1e-3).epsilon()
    assert read.epsilon(delta=1e-3, accountant="rdp") == math.inf


def test_truncation_beside_a_selection_has_no_finite_epsilon():
    """PLD does not cover a Selection, and RDP does not cover truncation."""
    chosen, cut = Selection((Release(50.0, 0.001, count=10),), 2.0, 1.0), Release(0.8, 0.1, "truncated", 30, 8, 80)
    assert epsilon([chosen], delta=1e-6) < 1
    for releases in ([cut, chosen], [Selection((cut,), 2.0, 1.0)]):
        assert epsilon(releases, delta=1e-6) == math.inf
        assert attack_success(releases, false_positive_rate=0.01) == 1.0
    with pytest.raises(pg.PrivacyError, match="to be within reach"):
        calibrate(lambda sigma: [Release(sigma, 0.1, "truncated", 30, 8, 80), chosen], target_epsilon=3.0, delta=1e-6)


def test_a_calibrated_plan_meets_its_target():
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0,
        delta=1e-5,
        max_grad_norm=1.0,
        num_examples=1000,
        expected_batch_size=100,
        steps=50,
        sampling="truncated",
        max_batch_size=160,
    )
    assert 2.99 < plan.epsilon() <= 3.0
    assert plan.usual_batch_size() == 160


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_batch_size": None}, "max_batch_size=25"),
        ({"max_batch_size": 7}, "from expected_batch_size to num_examples"),
        ({"max_batch_size": 33}, "from expected_batch_size to num_examples"),
        ({"max_batch_size": 8.0}, "from expected_batch_size to num_examples"),
        ({"sampling": "poisson"}, 'to be None unless sampling is "truncated"'),
        ({"group_size": 2}, "to be 1 for privacy_unit 'user' and for truncated batches"),
        ({"correlation": pg.noise.Banded(2)}, "to be 'poisson' for noise with memory"),
    ],
)
def test_plans_that_do_not_suit_are_refused(changed: dict[str, Any], words: str):
    with pytest.raises(pg.PrivacyError, match=words):
        truncated(**changed)


def test_memory_in_truncated_batches_is_refused_before_anything_is_calibrated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("privgrad.plan._calibrated", lambda *_: pytest.fail("calibrated"))
    numbers: dict[str, Any] = {"target_epsilon": 3.0, "delta": 1e-6, "max_grad_norm": 1.0, "num_examples": 1000}
    with pytest.raises(pg.PrivacyError, match="for_budget: expected sampling to be 'poisson' for noise with memory"):
        pg.PrivacyPlan.for_budget(
            **numbers, expected_batch_size=100, steps=50, sampling="truncated", max_batch_size=160, correlation="auto"
        )


def test_a_truncation_that_costs_noise_is_told():
    numbers: dict[str, Any] = {"target_epsilon": 3.0, "delta": 1e-6, "max_grad_norm": 1.0, "num_examples": 1000}
    numbers |= {"expected_batch_size": 100, "steps": 50, "sampling": "truncated"}
    with pytest.warns(UserWarning, match="max_batch_size = 110 cuts many batches of 100 .* 160 costs next to nothing"):
        cut = pg.PrivacyPlan.for_budget(**numbers, max_batch_size=110)
    assert cut.noise_multiplier > 1.02 * pg.PrivacyPlan.for_budget(**numbers, max_batch_size=160).noise_multiplier


def test_the_data_must_have_the_declared_size():
    """Or one less: a person more or less is what the guarantee is about."""
    with pytest.raises(
        pg.SamplingError, match="num_examples = 32 or one fewer for truncated batches, got a different number"
    ):
        truncated().sampler(make_data(33))
    with pytest.raises(pg.SamplingError, match="or one fewer for truncated"):
        truncated().sampler(make_data(30))
    assert len(truncated().sampler(make_data(31))) == 40


def test_a_batch_of_another_size_is_refused():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, truncated())
    with pytest.raises(pg.SamplingError, match="drawn by the plan's max_batch_size"):
        private_grad(next(truncated(max_batch_size=10).batches(make_data())))
    small = truncated(num_examples=29)  # at the same rate the cost is another one, because it depends on the size
    with pytest.raises(pg.SamplingError, match="drawn by the plan's num_examples"):
        private_grad(next(small.batches(make_data(29))))
    batch = next(truncated().batches(make_data()))
    cut = pg.Batch(tuple(part[:-1] for part in batch.examples), batch.size, batch.sampling)
    with pytest.raises(pg.SamplingError, match="one row per example"):
        private_grad(cut)


def test_a_simulation_on_fewer_examples_has_at_most_so_many_rows():
    plan = truncated(max_batch_size=32)
    assert plan.scaled(1 / 2, num_examples=10).max_batch_size == 10


def test_local_training_is_refused():
    plan = truncated(privacy_unit="user")
    with pytest.raises(pg.PrivacyError, match="sampling to be 'poisson' for LocalUpdate"):
        pg.PrivateGradient(make_model(), loss_fn, plan, perturb=pg.federated.LocalUpdate(0.1, batch_size=2))


def test_a_budget_refuses_truncation(tmp_path: Path):
    budget = pg.Budget(tmp_path / "b.jsonl", total_epsilon=3.0, delta=1e-3, num_examples=32, privacy_unit="example")
    with pytest.raises(pg.PrivacyError, match="sampling 'truncated'"):
        budget.open_ledger(tmp_path / "ledger.jsonl", truncated(), by="a")


def test_what_a_model_costs_the_statement_says():
    plan = truncated(delta=1e-3)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in plan.batches(make_data()):
        private_grad(batch)
    text = str(statement([private_grad.ledger]))
    assert "Batches held at most 9 rows. Epsilon holds only if the declared number is right." in text
    assert "declared to have 32 rows, or one less." in text
    assert "The other bound (RDP) does not cover truncated batches." in text
    assert "two bounds" not in text
