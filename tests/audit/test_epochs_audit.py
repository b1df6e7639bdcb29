"""Attacks on epochs by the pair of distributions that dominates them: bounds stay within the claim, unless planted."""

from collections.abc import Callable

import numpy as np
import pytest

from conftest import seed_of
from privgrad.accounting import epsilon
from privgrad.accounting.mechanisms import Release
from privgrad.audit.bounds import clopper_pearson, epsilon_of_rates
from privgrad.rng import RandomSource, Stream
from privgrad.sampling.epochs import EpochKeys, rows_in_step

SIGMA, STEPS, EPOCHS, RUNS, DELTA = 2.0, 4, 16, 40_000, 1e-3


def bound_of(streams: Callable[[int], Stream], score: Callable[[np.ndarray], np.ndarray]) -> float:
    """The epsilon that an attack shows: each row is a run of its own, because rows are drawn alone."""
    drawn = np.zeros((RUNS, EPOCHS, STEPS))
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            drawn[rows_in_step(streams(epoch), STEPS, 1, step, 0, RUNS), epoch, step] = 1.0
    rng = np.random.default_rng(seed_of(4))
    present, absent = (score(one + SIGMA * rng.standard_normal(drawn.shape)) for one in (drawn, np.zeros_like(drawn)))
    half, best = RUNS // 2, 0.0
    thresholds = np.quantile(absent[:half], [0.5, 0.9, 0.97, 0.99, 0.997, 0.999])

    def shown(at: slice, threshold: float, confidence: float) -> float:
        false = clopper_pearson((absent[at] >= threshold).sum(), half, confidence)
        missed = clopper_pearson((present[at] < threshold).sum(), half, confidence)
        return float(epsilon_of_rates(false, missed, DELTA))

    best = max(thresholds, key=lambda one: shown(slice(half), one, 0.975))
    return shown(slice(half, None), best, 0.975)


def of_epochs(x: np.ndarray) -> np.ndarray:
    return np.log(np.exp((x - 0.5) / SIGMA**2).mean(2)).sum(1)


def of_one_permutation(x: np.ndarray) -> np.ndarray:
    return np.log(np.exp(((x - 0.5) / SIGMA**2).sum(1)).mean(1))


def claim() -> float:
    return epsilon([Release(SIGMA, 1 / STEPS, "epochs", STEPS * EPOCHS, epoch_steps=STEPS)], delta=DELTA)


def test_the_best_attack_on_epochs_stays_within_the_claim_and_comes_near():
    keys = EpochKeys(RandomSource())
    assert 0.6 * claim() <= bound_of(keys.stream, of_epochs) <= claim()


def test_a_sampler_that_uses_one_permutation_in_all_epochs_is_caught():
    stream = EpochKeys(RandomSource()).stream(0)
    assert bound_of(lambda _: stream, of_one_permutation) > claim()


@pytest.mark.parametrize("score", [of_epochs, of_one_permutation])
def test_the_attack_finds_nothing_where_nothing_is(score: Callable[[np.ndarray], np.ndarray]):
    keys = EpochKeys(RandomSource())

    def nothing(x: np.ndarray) -> np.ndarray:
        return score(np.random.default_rng(len(x)).standard_normal(x.shape))

    assert bound_of(keys.stream, nothing) < 0.1
