"""ClassRates: classes at public rates, charged at the largest; and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_plan
from privgrad.processes import Processes

COUNT = 4_000
LABELS = (torch.arange(COUNT) % 10 == 0).long()  # 400 of 4,000 examples are in class 1
DATA = TensorDataset(torch.arange(COUNT, dtype=torch.float32)[:, None], LABELS)


def plan_of(**changed: Any) -> pg.PrivacyPlan:
    numbers = {"sample_rate": 0.25, "expected_batch_size": COUNT // 4, "num_examples": COUNT, "steps": 40}
    return make_plan(**(numbers | changed))


def drawn(plan: pg.PrivacyPlan, dataset: Any, **options: Any) -> list[np.ndarray]:
    return [batch.examples[0][:, 0].long().numpy() for batch in plan.batches(dataset, **options)]


@pytest.mark.parametrize("rates", [[0.2, 1.0], [1.0, 0.0], [0.5, 1.0]])
@pytest.mark.parametrize("sample_rate", [0.25, 1.0])
def test_each_class_is_drawn_at_its_rate_times_the_plans(rates: list[float], sample_rate: float):
    plan = plan_of(sample_rate=sample_rate, expected_batch_size=int(COUNT * sample_rate), seed=None)
    counts = np.zeros(2)
    for chosen in drawn(plan, pg.ClassRates(DATA, LABELS, rates)):
        counts += np.bincount(LABELS[chosen], minlength=2)
    for label, rate in enumerate(rates):
        draws, probability = plan.steps * int(torch.eq(LABELS, label).sum()), sample_rate * rate
        assert abs(counts[label] - draws * probability) <= 5 * np.sqrt(draws * probability * (1 - probability))


def test_the_draws_are_the_plans_thinned_by_one_coin_each():
    """The proof of ClassRates: every example that is drawn is one that the plan draws, and class 1 is all of these."""
    plan = plan_of(seed=3)
    plain, rated = drawn(plan, DATA), drawn(plan, pg.ClassRates(DATA, LABELS, [0.3, 1.0]))
    for whole, part in zip(plain, rated, strict=True):
        assert set(part) < set(whole)
        assert np.array_equal(whole[LABELS[whole] == 1], part[LABELS[part] == 1])


class _Rank(Processes):
    """One of two processes, as far as a draw needs them."""

    count = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_several_processes_draw_what_one_does():
    plan, rated = plan_of(seed=3, steps=3), pg.ClassRates(DATA, LABELS, [0.3, 1.0])
    parts = [drawn(plan, rated, processes=_Rank(rank)) for rank in range(2)]
    for whole, *pieces in zip(drawn(plan, rated), *parts, strict=True):
        assert np.array_equal(whole, np.sort(np.concatenate(pieces)))


def test_fit_charges_the_largest_rate_and_refuses_to_resume_at_other_rates(tmp_path: Path):
    def trained(rates: list[float]) -> pg.FitResult:
        model = torch.nn.Linear(1, 2)
        plan = plan_of(steps=2, delta=1e-5, seed=None)
        optimizer = pg.optim.SGD(model.named_parameters(), noise_step=0.01)
        private_grad = pg.PrivateGradient(model, loss_fn, plan)
        rated = pg.ClassRates(DATA, LABELS, rates)
        return pg.fit(private_grad, optimizer, rated, output_dir=tmp_path, progress=False)

    assert trained([0.1, 1.0]).ledger.epsilon(delta=1e-5) == plan_of(steps=2).epsilon(delta=1e-5)
    with pytest.raises(pg.PrivacyError, match="class rates"):
        trained([0.2, 1.0])


@pytest.mark.parametrize(
    ("labels", "rates", "message"),
    [
        (LABELS, [0.1, 0.5], r"rates to be in \[0, 1\], the largest of them 1, got \[0.1, 0.5\]"),
        (LABELS, [0.1, 1.5], r"in \[0, 1\]"),
        (LABELS, [-0.1, 1.0], r"in \[0, 1\]"),
        (LABELS, [float("nan"), 1.0], r"in \[0, 1\]"),
        (LABELS, "often", "could not convert"),
        (LABELS, [1.0], "labels to be from 0 to 0"),
        (LABELS[:-1], [0.1, 1.0], "to be one for each example"),
        (torch.stack([LABELS] * 2, 1), [0.1, 1.0], "a person with several labels has no class"),
        (LABELS.float(), [0.1, 1.0], "Cannot cast array data"),
        (["a"] * COUNT, [0.1, 1.0], "too many dimensions 'str'"),
    ],
)
def test_numbers_out_of_range_are_refused(labels: Any, rates: Any, message: str):
    with pytest.raises((ValueError, TypeError), match=message):  # SamplingError is a ValueError
        pg.ClassRates(DATA, labels, rates)


def test_rates_from_the_counts_of_the_data_warn_where_they_can_be_recognized():
    labels = torch.arange(COUNT) % 7 // 3  # 0 and 1 three times in seven, 2 once
    labels[:11] = 1
    counts = torch.bincount(labels).double()
    for rates in (counts.min() / counts, (counts.min() / counts).sqrt(), (700 / counts).clamp(max=1)):
        with pytest.warns(UserWarning, match="rates: these make the classes of this data set equally frequent"):
            pg.ClassRates(DATA, labels, rates.tolist())
    pg.ClassRates(DATA, labels, [0.333, 0.333, 1.0])
    pg.ClassRates(DATA, (torch.arange(COUNT) % 5 == 0).long(), [0.25, 1.0])  # typed; it happens to fit


def test_epochs_have_no_rates():
    with pytest.raises(pg.SamplingError, match="'poisson' for ClassRates"):
        plan_of(sampling="epochs").batches(pg.ClassRates(DATA, LABELS, [0.1, 1.0]))
