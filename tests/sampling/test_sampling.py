"""Poisson sampling measured: rate, independence, and twins with another rate or scheme that must fail."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan, seed_of

EXAMPLES, STEPS = 400, 1000


def inclusion(plan: pg.PrivacyPlan) -> np.ndarray:
    """1 where the step's batch has the example, shape (steps, examples)."""
    table = np.zeros((plan.steps, EXAMPLES))
    for batch in plan.batches(TensorDataset(torch.arange(EXAMPLES))):
        table[batch.sampling.step, batch.examples[0].numpy()] = 1
        assert batch.size == len(batch.examples[0])
    return table


def is_poisson(table: np.ndarray, rate: float) -> bool:
    """Mean, spread of batch sizes and of examples' counts, and correlation of neighbors, each at about 1e-5."""
    steps, examples = table.shape
    total = stats.binomtest(int(table.sum()), table.size, rate).pvalue > 1e-5

    def spread(counts: np.ndarray, trials: int) -> bool:
        statistic = ((counts - trials * rate) ** 2).sum() / (trials * rate * (1 - rate))
        low, high = stats.chi2.ppf([5e-6, 1 - 5e-6], len(counts))
        return bool(low < statistic < high)

    apart = all(
        abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / a.size**0.5
        for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]))
    )
    return bool(total) and spread(table.sum(1), examples) and spread(table.sum(0), steps) and apart


def drawn(**changed: object) -> np.ndarray:
    numbers = {"sample_rate": 0.1, "expected_batch_size": 40, "num_examples": EXAMPLES, "steps": STEPS}
    return inclusion(make_plan(**(numbers | changed)))


def test_batches_are_poisson_samples_at_the_plans_rate():
    assert is_poisson(drawn(seed=seed_of(2)), 0.1)
    assert is_poisson(drawn(), 0.1)


TWINS: dict[str, Callable[[], np.ndarray]] = {
    "a tenth less": lambda: drawn(seed=seed_of(2), sample_rate=0.09, expected_batch_size=36),
    "a tenth more": lambda: drawn(seed=seed_of(2), sample_rate=0.11, expected_batch_size=44),
    "epochs": lambda: drawn(seed=seed_of(2), sampling="epochs"),
    "one draw for ever": lambda: np.repeat(drawn(seed=seed_of(2), steps=1), STEPS, axis=0),
}


@pytest.mark.parametrize("name", TWINS)
def test_the_measurement_rejects_other_samplings(name: str):
    assert not is_poisson(TWINS[name](), 0.1)


def test_rate_one_is_the_whole_data_set_every_time():
    assert drawn(sample_rate=1.0, expected_batch_size=EXAMPLES, steps=5).all()


def test_every_iteration_without_a_seed_is_new_and_with_one_the_same():
    assert not np.array_equal(drawn(steps=3), drawn(steps=3))
    assert np.array_equal(drawn(steps=3, seed=seed_of(1)), drawn(steps=3, seed=seed_of(1)))
    assert not np.array_equal(drawn(steps=3, seed=seed_of(1)), drawn(steps=3, seed=seed_of(2)))
