"""Repeat and select: its cost against dp_accounting's event trees, and the law of the number of runs."""

import math
from itertools import pairwise
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from dp_accounting.rdp import rdp_privacy_accountant
from scipy.special import gammaln
from scipy.stats import chisquare

import privgrad as pg
from privgrad.accounting import accountant as privacy_filter
from privgrad.accounting import composition
from privgrad.accounting.accountant import (
    Release,
    Selection,
    Split,
    attack_success,
    calibrate,
    calibrate_noise_multiplier,
    epsilon,
    filter_epsilon,
)
from privgrad.accounting.selection import draw_repetitions, halting_exponent
from privgrad.rng import RandomSource

RUN = (Release(3.44, 0.1365, count=300), Release(20.0, 1.0))
SHORT = (Release(1.1, 0.01, count=500),)
LAWS = [(1, 1), (8, 0), (8, 1), (8, math.inf), (3, 0.5), (2.5, 4), (30, 0), (100, 1)]
MIXED = [
    *([Selection(run, mean, shape)] for run in (RUN, SHORT) for mean, shape in LAWS),
    [Selection(RUN, 4, 1), Release(30.0, 1.0, count=3)],
    [Selection(SHORT, 4, 0, count=2), *RUN, Release(5.0, 0.2, count=10)],
    [Selection(RUN, 2, 1), Selection(SHORT, 5, math.inf), Release(8.0, 1.0)],
    list(RUN),
    [Release(2.0, 0.05, count=100), Release(4.0, 1.0), Release(2.0, 0.05, count=50)],
    [Release(0.7, 0.008, count=2250)],
]


def tree(release: Release | Selection) -> dp_accounting.DpEvent:
    """The event of a release, built by hand."""
    if isinstance(release, Selection):
        run = dp_accounting.ComposedDpEvent([tree(one) for one in release.releases])
        event = dp_event.RepeatAndSelectDpEvent(run, release.mean, release.shape)
    else:
        event = dp_accounting.GaussianDpEvent(release.noise_multiplier)
        if release.sample_rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(release.sample_rate, event)
    return dp_accounting.SelfComposedDpEvent(event, release.count)


@pytest.mark.parametrize("releases", MIXED)
def test_totals_are_those_of_event_trees(releases: list[Release | Selection]):
    accountant = rdp.RdpAccountant(composition.RDP_ORDERS)
    for release in releases:
        accountant.compose(tree(release))
    wanted = float(accountant.get_epsilon(1e-5))
    assert epsilon(releases, delta=1e-5, accountant="rdp") == pytest.approx(wanted, rel=1e-3)
    has_selection = any(isinstance(release, Selection) for release in releases)
    by_pld = epsilon(releases, delta=1e-5)
    assert by_pld == epsilon(releases, delta=1e-5, accountant="rdp") if has_selection else by_pld < wanted
    assert filter_epsilon(releases, first=releases, delta=1e-5, total_epsilon=wanted) >= wanted * (1 - 1e-9)
    assert filter_epsilon(releases, first=releases, delta=1e-5, total_epsilon=wanted) <= 1.06 * wanted + 0.05


@pytest.mark.parametrize("sigma", [0.8, 5.0, 80.0])
@pytest.mark.parametrize("total", [0.5, 3.0])
def test_the_orders_of_a_filter_share_delta(sigma: float, total: float):
    """The proof adds up one delta per order. For a Gaussian, RDP of order a is a / (2 sigma^2), and epsilon by hand."""
    costs = {order: order / (2 * sigma**2) for order in composition.RDP_ORDERS}
    shares = privacy_filter._shares(costs, 1e-5, total)
    assert sum(delta for _, delta in shares) <= 1e-5 * (1 + 1e-12)
    assert len({order for order, _ in shares}) == len(shares) >= 10
    found = filter_epsilon([Release(sigma, 1.0)], first=[Release(sigma, 1.0)], delta=1e-5, total_epsilon=total)
    by_hand = [costs[a] + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, delta in shares]
    assert found == pytest.approx(max(0.0, min(by_hand)))


def test_the_best_of_several_runs_costs_less_than_all_and_more_than_one():
    one, several = epsilon(RUN, delta=1e-5), epsilon([Selection(RUN, 8, 0)], delta=1e-5)
    assert one < several < epsilon([*RUN] * 8, delta=1e-5)
    alpha = 0.01
    assert attack_success(RUN, false_positive_rate=alpha) < attack_success(
        [Selection((Release(30.0, 1.0),), 2, 0), *RUN], false_positive_rate=alpha
    )


def test_a_selection_without_noise_in_one_run_costs_infinity():
    selection = Selection((Release(1.0, 0.1), Release(0.0, 1.0)), 2, 1)
    assert epsilon([selection], delta=1e-5) == math.inf
    assert attack_success([selection], false_positive_rate=0.01) == 1.0
    assert filter_epsilon([selection], first=[], delta=1e-5, total_epsilon=1.0) == math.inf


def test_the_rounding_of_tiny_rates_is_added_before_the_selection():
    tiny = (Release(1.0, 1e-13, count=10**6),)
    assert epsilon([Selection(tiny, 8, 0)], delta=1e-5) > epsilon([Selection((), 8, 0)], delta=1e-5)


@pytest.mark.parametrize(("mean", "shape"), [(0.5, 1), (math.inf, 1), (math.nan, 1), (2, -0.5), (2, math.nan)])
def test_laws_out_of_range_are_refused(mean: float, shape: float):
    with pytest.raises(pg.PrivacyError, match=r"expected (mean|shape)"):
        epsilon([Selection(RUN, mean, shape)], delta=1e-5)
    with pytest.raises(pg.PrivacyError, match=r"expected (mean|shape)"):
        draw_repetitions(mean, shape, RandomSource())


def test_a_selection_of_selections_is_refused():
    with pytest.raises(AttributeError, match="noise_multiplier"):
        epsilon([Selection((Selection(RUN, 2, 1),), 2, 1)], delta=1e-5)  # pyright: ignore[reportArgumentType]


def test_calibration_of_any_releases_ends_on_the_safe_side():
    def releases_at(sigma: float) -> list[Release | Selection]:
        return [Selection((Release(sigma, 0.1365, count=300),), 8, 0), Release(50.0, 1.0)]

    sigma = calibrate(releases_at, target_epsilon=3.0, delta=1e-5)
    found = epsilon(releases_at(sigma), delta=1e-5)
    assert 3.0 * (1 - 1e-3) <= found <= 3.0
    alone = calibrate(lambda s: [Release(s, 0.1, count=100)], target_epsilon=2.0, delta=1e-5)
    assert alone == calibrate_noise_multiplier(target_epsilon=2.0, delta=1e-5, sample_rate=0.1, steps=100)
    with pytest.raises(pg.PrivacyError, match="within reach"):
        calibrate(lambda s: [Selection((Release(s, 1.0),), 1000, 1)], target_epsilon=0.001, delta=1e-5)


def test_a_selection_can_share_a_target_with_a_training():
    besides = [Selection((Release(30.0, 0.1, count=30),), 4, 1)]
    numbers: dict[str, Any] = {"target_epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.1}
    sigma = calibrate_noise_multiplier(**numbers, steps=50, besides=besides)
    assert 2.99 <= epsilon([Release(sigma, 0.1, count=50), *besides], delta=1e-5) <= 3.0
    assert sigma > calibrate_noise_multiplier(**numbers, steps=50)


@pytest.mark.parametrize(("mean", "shape"), [law for law in LAWS if law[1] < math.inf])
def test_the_halting_parameter_is_that_of_the_accountant(mean: float, shape: float):
    gamma = rdp_privacy_accountant._gamma_truncated_negative_binomial(shape, mean)
    assert math.exp(-halting_exponent(mean, shape)) == pytest.approx(gamma, rel=1e-8)
    assert math.exp(-halting_exponent(mean, shape)) >= gamma  # the accountant charges for more runs


def law_of(mean: float, shape: float, k: np.ndarray) -> np.ndarray:
    """P(K = k) by definition 1 of Papernot and Steinke, or of the Poisson law."""
    if shape == math.inf:
        return np.exp(k * math.log(mean) - mean - gammaln(k + 1.0))
    gamma = rdp_privacy_accountant._gamma_truncated_negative_binomial(shape, mean)
    with np.errstate(divide="ignore"):
        if shape == 0:
            found = (1 - gamma) ** k / (np.maximum(k, 1) * math.log(1 / gamma))
        else:
            rising = np.exp(gammaln(k + shape) - gammaln(shape) - gammaln(k + 1.0))
            found = (1 - gamma) ** k / (gamma**-shape - 1) * rising
    return np.where(k == 0, 0.0, found)


@pytest.mark.parametrize(
    ("mean", "shape"),
    [
        (8, 0),
        (8, math.inf),
        (2.5, 4),
        *(pytest.param(*law, marks=pytest.mark.slow) for law in ((8, 1), (3, 0.5), (1.5, 1))),
    ],
)
@pytest.mark.filterwarnings("ignore:a fixed seed")
def test_the_number_of_runs_has_its_law(mean: float, shape: float):
    source, count = RandomSource(seed=5), 5_000
    drawn = np.array([draw_repetitions(mean, shape, source, step=step) for step in range(count)])
    assert drawn.min() >= (0 if shape == math.inf else 1)
    assert drawn.mean() == pytest.approx(mean, rel=0.05)
    wanted = count * law_of(mean, shape, np.arange(100_000))
    edges = [0]
    for k in range(len(wanted)):
        if wanted[edges[-1] : k + 1].sum() >= 20 and wanted[k + 1 :].sum() >= 20:
            edges.append(k + 1)
    edges.append(len(wanted))
    bins = [(((drawn >= a) & (drawn < b)).sum(), wanted[a:b].sum()) for a, b in pairwise(edges)]
    observed, expected = np.array(bins).T
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


def test_one_run_is_always_one():
    assert {draw_repetitions(1, shape, RandomSource()) for shape in (0, 0.5, 1, 3)} == {1}


def test_the_number_of_runs_differs_from_call_to_call():
    assert len({draw_repetitions(1000, 1, RandomSource()) for _ in range(20)}) > 5
    assert draw_repetitions(1e4, 1e6, RandomSource()) == pytest.approx(1e4, rel=0.1)
    assert draw_repetitions(1e4, math.inf, RandomSource()) == pytest.approx(1e4, rel=0.1)


def test_releases_from_a_generator_are_counted_each_time():
    one = Release(4.0, 0.05, count=100)
    given: Any = (release for release in [one])
    of_generator, plain = Selection(given, 4.0, 1.0), Selection((one,), 4.0, 1.0)
    assert of_generator == plain
    assert epsilon([of_generator], delta=1e-5) == epsilon([of_generator], delta=1e-5) == epsilon([plain], delta=1e-5)
    groups: Any = (group for group in [[one], []])
    assert Split(groups).groups == ((one,), ())
