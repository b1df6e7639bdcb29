"""Golden values, and calibration that errs on the safe side."""

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

import privgrad as pg
from privgrad.accounting import composition
from privgrad.accounting.accountant import (
    Release,
    Selection,
    attack_advantage,
    attack_success,
    calibrate,
    calibrate_noise_multiplier,
    calibrate_to_attack,
    epsilon,
    gaussian_dp,
    steps_for_budget,
)
from privgrad.noise import Banded
from reference.calibration import smallest_sigma

# sample rate, sigma, steps, delta, RDP epsilon: SPEC's computed values (E1, 4.5.5, E4, E8, E3, 13.1, ENGINE).
RDP_GOLDEN = [
    (2048 / 50_000, 1.0, 552, 1e-5, 7.02),
    (256 / 549_367, 0.4, 10_730, 1 / 2146, 6.99),
    (256 / 549_367, 0.4, 10_730, 1e-5, 10.1),
    (64 / 24_750, 1.0, 12_375, 1 / 24_750, 1.52),
    (1.0, 10.0, 1795, 1e-5, 28.0),
    (1.0, 5.0, 448, 1e-5, 28.0),
    (8 / 1000, 0.7, 2250, 1e-3, 4.13),
    (20 / 400, 0.3, 20, 1 / 400, 25.5),
    (20 / 400, 0.3, 40, 1 / 400, 38.1),
    (0.01, 1.0, 10_000, 1e-5, 6.713),
    (4096 / 50_000, 10.1, 915, 1e-5, 1.0),  # claim D23: the paper on BAM gives epsilons, and no noise
    (4096 / 50_000, 5.43, 915, 1e-5, 2.0),
    (4096 / 50_000, 1.52, 915, 1e-5, 10.0),
]
PLD_GOLDEN = [
    (2048 / 50_000, 1.0, 552, 1e-5, 6.35),
    (64 / 24_750, 1.0, 12_375, 1 / 24_750, 1.37),
    (8 / 1000, 0.7, 2250, 1e-3, 3.42),
    (20 / 400, 0.3, 20, 1 / 400, 19.1),
    (0.01, 1.0, 10_000, 1e-5, 6.188),
]


def cost(q: float, sigma: float, steps: int, delta: float, accountant: str = "pld") -> float:
    return epsilon([Release(sigma, q, count=steps)], delta=delta, accountant=accountant)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "golden"), RDP_GOLDEN)
def test_rdp_golden_values(q: float, sigma: float, steps: int, delta: float, golden: float):
    assert cost(q, sigma, steps, delta, "rdp") == pytest.approx(golden, rel=0.005)


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "golden"), PLD_GOLDEN)
def test_pld_golden_values(q: float, sigma: float, steps: int, delta: float, golden: float):
    found = cost(q, sigma, steps, delta)
    assert found == pytest.approx(golden, rel=0.005)
    assert found <= cost(q, sigma, steps, delta, "rdp")


def test_against_the_closed_form_of_the_gaussian_mechanism():
    """One full-batch release: delta(eps) = Phi(1/(2s) - eps s) - e^eps Phi(-1/(2s) - eps s) (Balle, Wang 2018)."""
    for sigma in (0.5, 1.0, 4.0):
        found = cost(1.0, sigma, 1, 1e-5)

        def delta_of(eps: float, s: float = sigma) -> float:
            return float(norm.cdf(0.5 / s - eps * s) - math.exp(eps) * norm.cdf(-0.5 / s - eps * s))

        assert delta_of(found) <= 1e-5 * (1 + 1e-9)
        assert delta_of(found * 0.995) > 1e-5


BUDGETS = [
    (3.0, 1e-5, 0.01, 1000),
    (1e-3, 1e-5, 0.01, 100),
    (0.5, 1e-5, 1.0, 1),
    (100.0, 1e-5, 0.5, 10),
    (1000.0, 1e-5, 1.0, 1),
    pytest.param(1.0, 1e-5, 1e-7, 10, marks=pytest.mark.slow),
    (3.0, 1e-5, 240 / 1197, 200),
]


@pytest.mark.parametrize(("target", "delta", "q", "steps"), BUDGETS)
def test_calibration_ends_on_the_safe_side(target: float, delta: float, q: float, steps: int):
    sigma = calibrate_noise_multiplier(target_epsilon=target, delta=delta, sample_rate=q, steps=steps)
    assert cost(q, sigma, steps, delta) <= target
    assert sigma < 0.02 or cost(q, sigma, steps, delta) >= 0.998 * target


@pytest.mark.slow
@given(st.floats(0.3, 20.0), st.floats(0.001, 1.0), st.integers(1, 300))
@settings(deadline=None, max_examples=20, derandomize=True)
def test_calibration_is_safe_anywhere(target: float, q: float, steps: int):
    sigma = calibrate_noise_multiplier(target_epsilon=target, delta=1e-6, sample_rate=q, steps=steps)
    assert cost(q, sigma, steps, 1e-6) <= target


@given(st.floats(1e-3, 1e3), st.floats(1e-7, 1.0), st.integers(1, 10**4), st.floats(0.2, 1.0), st.floats(1e-6, 0.3))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_the_search_ends_on_the_safe_side(target: float, q: float, steps: int, tighter: float, grid: float):
    """With costs that take no time: PLD is tighter than RDP by some factor, and rounded up to some grid."""
    grid *= target

    def fast(mechanisms: tuple[Release, ...], delta: float, accountant: str) -> float:
        (one,) = mechanisms
        mean = one.sample_rate * math.sqrt(one.count) / one.noise_multiplier
        by_rdp = mean**2 / 2 + mean * math.sqrt(2 * math.log(1 / delta))
        return by_rdp if accountant == "rdp" else min(by_rdp, grid * math.ceil(tighter * by_rdp / grid))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "epsilon_of", fast)
        sigma = calibrate_noise_multiplier(target_epsilon=target, delta=1e-6, sample_rate=q, steps=steps)
        assert (found := cost(q, sigma, steps, 1e-6)) <= target
        assert sigma < 0.1 or found >= 0.998 * target - grid


@pytest.mark.parametrize(
    ("target", "q", "steps", "besides"),
    [pytest.param(3.0, 0.2, 50, [Release(4.0, 1.0)], marks=pytest.mark.slow), (8.0, 1.0, 2, [])],
)
def test_calibration_finds_what_bisection_finds(target: float, q: float, steps: int, besides: list[Release]):
    sigma = calibrate_noise_multiplier(target_epsilon=target, delta=1e-5, sample_rate=q, steps=steps, besides=besides)
    slowly = smallest_sigma(target, 1e-5, q, steps, besides)
    found, best = (epsilon([Release(s, q, count=steps), *besides], delta=1e-5) for s in (sigma, slowly))
    assert 0.998 * target <= found <= target
    assert best == pytest.approx(found, rel=2e-3)


def test_releases_that_already_cost_the_target_leave_nothing():
    with pytest.raises(pg.PrivacyError, match="the epsilon of the releases in besides"):
        calibrate_noise_multiplier(
            target_epsilon=1.0, delta=1e-5, sample_rate=0.1, steps=10, besides=[Release(0.5, 1.0)]
        )


def test_steps_for_budget_is_the_largest_that_fits():
    steps = steps_for_budget(target_epsilon=0.5, delta=1e-5, sample_rate=0.02, noise_multiplier=3.0)
    assert cost(0.02, 3.0, steps, 1e-5) <= 0.5 < cost(0.02, 3.0, steps + 1, 1e-5)
    with pytest.raises(pg.PrivacyError, match="one step"):
        steps_for_budget(target_epsilon=0.01, delta=1e-5, sample_rate=1.0, noise_multiplier=1.0)


def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise():
    for accountant in ("pld", "rdp"):
        by_steps = [cost(0.02, 2.0, steps, 1e-5, accountant) for steps in (10, 100, 1000)]
        by_rate = [cost(q, 2.0, 100, 1e-5, accountant) for q in (0.001, 0.02, 0.1, 1.0)]
        by_noise = [cost(0.02, sigma, 100, 1e-5, accountant) for sigma in (4.0, 2.0, 1.0)]
        for row in (by_steps, by_rate, by_noise):
            assert (np.diff(row) > 0).all()


def test_no_release_costs_nothing_and_no_noise_costs_everything():
    assert epsilon([], delta=1e-5) == 0.0
    assert cost(0.1, 1.0, 0, 1e-5) == 0.0
    assert cost(0.1, 0.0, 1, 1e-5) == math.inf


def test_releases_compose_in_any_order():
    a, b = Release(1.0, 0.01, count=100), Release(2.0, 0.1, count=50)
    both = epsilon([a, b], delta=1e-5)
    assert both == epsilon([b, a], delta=1e-5)
    assert both == epsilon([a, Release(2.0, 0.1, count=20), Release(2.0, 0.1, count=30)], delta=1e-5)
    assert both > max(epsilon([a], delta=1e-5), epsilon([b], delta=1e-5))


@pytest.mark.parametrize(("rate", "rows"), [(0.1, 1), (0.1, 3), (1.0, 2)])
def test_the_rows_of_a_person_cost_what_their_mixture_does(rate: float, rows: int):
    releases, chances = [Release(16.0, rate, count=100)], binom.pmf(range(rows + 1), rows, rate)
    event = MixtureOfGaussiansDpEvent(16.0, range(rows + 1), chances.tolist())
    direct = PLDAccountant(value_discretization_interval=1e-4).compose(event, 100).get_epsilon(1e-5)
    assert epsilon(releases, delta=1e-5, rows_per_person=rows) == pytest.approx(direct, rel=1e-3)


@pytest.mark.parametrize(
    "options", [{"accountant": "rdp"}, {"scheme": "truncated"}, {"scheme": "epochs"}, {"selected": True}, {"rows": 0}]
)
def test_rows_of_a_person_are_refused_where_no_proof_covers_them(options: dict[str, Any]):
    kinds = {"max_batch_size": 20, "num_examples": 100, "epoch_steps": 10}
    scheme = options.get("scheme", "poisson")
    release = Release(2.0, 0.1, scheme, 20, **kinds) if scheme != "poisson" else Release(2.0, 0.1, count=20)
    found = Selection((release,), 2.0, 1.0) if "selected" in options else release
    with pytest.raises(pg.PrivacyError, match="rows_per_person"):
        epsilon(
            [found], delta=1e-5, accountant=options.get("accountant", "pld"), rows_per_person=options.get("rows", 2)
        )


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(3.44, 0.1365, 300), (9.4, 0.328, 2000), (2.0, 1.0, 5)])
def test_mu_and_its_regret_are_those_of_gdpnum(sigma: float, rate: float, steps: int):
    """At small rates, gdpnum 0.1.2 finds attacks with fewer hits than false alarms, so it is no reference there."""
    gdpnum = pytest.importorskip("gdpnum", reason="needs gdpnum")
    mu, regret = gdpnum.dpsgd.get_mu_and_regret_for_dpsgd(noise_multiplier=sigma, sample_rate=rate, num_steps=steps)
    found = gaussian_dp([Release(sigma, rate, count=steps)])
    assert found == (pytest.approx(mu, rel=0.01), pytest.approx(regret, abs=1e-4))


# By riskcal 1.5.1: the noise at which an attack with 1 % false positives has 5 % true positives, and that at which the
# advantage is 0.1, on a grid of 1e-4 with a tolerance of 1e-5.
BY_RISKCAL = [(0.01, 1000, 0.77723, 1.42248), (0.1, 300, 2.65873, 6.91770), (1.0, 20, 6.56212, 17.79449)]


@pytest.mark.parametrize(("rate", "steps", "by_success", "by_advantage"), BY_RISKCAL)
def test_noise_for_an_attack_is_that_of_riskcal(rate: float, steps: int, by_success: float, by_advantage: float):
    def releases(sigma: float) -> list[Release]:
        return [Release(sigma, rate, count=steps)]

    success = calibrate_to_attack(releases, target_success=0.05, false_positive_rate=0.01)
    advantage = calibrate_to_attack(releases, target_advantage=0.1)
    assert (success, advantage) == (pytest.approx(by_success, rel=1e-3), pytest.approx(by_advantage, rel=1e-3))
    assert attack_success(releases(success), false_positive_rate=0.01) <= 0.05
    assert attack_advantage(releases(advantage)) <= 0.1


# By riskcal 1.5.1: true positive rates at these false positive rates, and the advantage, on a grid of 1e-4.
FALSE_POSITIVES = (0.001, 0.01, 0.1, 0.5)
RISKS = {
    (1.0, 0.01, 1000): (0.004014, 0.0291, 0.194179, 0.658566, 0.161018),
    (0.7, 0.004, 2000): (0.005105, 0.033912, 0.207474, 0.671544, 0.17396),
    (1.5, 0.002, 10_000): (0.001617, 0.01477, 0.128948, 0.559429, 0.059594),
    (2.0, 0.1, 300): (0.015693, 0.08103, 0.356878, 0.818592, 0.348848),
    (3.0, 1.0, 20): (0.054852, 0.20168, 0.582838, 0.931981, 0.543943),
}


@pytest.mark.parametrize("plan", RISKS, ids=str)
def test_risks_are_those_of_riskcal(plan: tuple[float, float, int]):
    sigma, rate, steps = plan
    releases = [Release(sigma, rate, count=steps)]
    found = [attack_success(releases, false_positive_rate=alpha) for alpha in FALSE_POSITIVES]
    assert [*found, attack_advantage(releases)] == pytest.approx(RISKS[plan], abs=1e-3)


@pytest.mark.parametrize("plan", RISKS, ids=str)
def test_the_table_of_risks_is_by_riskcal(plan: tuple[float, float, int]):
    dpsgd = pytest.importorskip("riskcal.calibration.dpsgd", reason="needs riskcal")
    missed = dpsgd.get_beta_for_dpsgd(*plan, np.array(FALSE_POSITIVES))
    assert [*(1 - missed), dpsgd.get_advantage_for_dpsgd(*plan)] == pytest.approx(RISKS[plan], abs=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"correlation": Banded(4)},
        {"sampling": "truncated", "max_batch_size": 90},
        pytest.param({"sampling": "epochs", "batch_size": 500, "steps": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_for_an_attack_keeps_its_bound(kind: dict[str, Any]):
    options: dict[str, Any] = {
        "delta": 1e-5,
        "max_grad_norm": 1.0,
        "num_examples": 1000,
        "batch_size": 50,
        "steps": 100,
    }
    plan = pg.PrivacyPlan.for_budget(**(options | kind), target_success=0.1, false_positive_rate=0.01)
    assert 0.0998 < plan.attack_success(false_positive_rate=0.01) <= 0.1
    assert plan.target_epsilon is None
    assert math.isfinite(plan.epsilon())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({}, "exactly one of target_epsilon and target_success and target_advantage"),
        ({"target_epsilon": 1.0, "target_advantage": 0.1}, "exactly one of"),
        ({"target_success": 0.1}, "false_positive_rate to be in"),
        ({"target_success": 0.1, "false_positive_rate": 0.2}, r"target_success to be in \(0.2, 1\)"),
        ({"target_advantage": 1.0}, r"target_advantage to be in \(0, 1\)"),
        ({"target_advantage": 0.1, "false_positive_rate": 0.2}, "false_positive_rate to be None"),
        ({"target_epsilon": 1.0, "false_positive_rate": 0.2}, "false_positive_rate to be None"),
    ],
)
def test_a_plan_has_one_target(target: dict[str, Any], words: str):
    with pytest.raises(pg.PrivacyError, match=words):
        pg.PrivacyPlan.for_budget(delta=1e-5, max_grad_norm=1.0, num_examples=100, batch_size=10, steps=5, **target)


def test_mu_of_gaussian_releases_is_exact_and_infinite_without_noise():
    mu, regret = gaussian_dp([Release(2.0, 1.0, count=4), Release(1.0, 1.0)])
    assert mu == pytest.approx(math.sqrt(2), rel=1e-3)
    assert regret < 1e-4
    assert gaussian_dp([]) == (0.0, 0.0)
    assert gaussian_dp([Release(0.0, 0.1)])[0] == math.inf


@pytest.mark.parametrize("rate", [1e-7, 1e-5, 1e-3, 0.1])
def test_no_attack_on_mu_has_fewer_hits_than_one_on_the_releases(rate: float):
    releases = [Release(0.7, 0.004, count=2000)]
    mu, regret = gaussian_dp(releases)
    hits = attack_success(releases, false_positive_rate=rate)
    assert hits <= norm.cdf(mu - norm.isf(rate)) * (1 + 1e-6)
    assert regret > 0.01


def test_shuffled_batches_cost_infinitely_much():
    """They are in ledgers of other libraries, and in old ones."""
    shuffled = [Release(1.0, 0.01, "fixed", 100)]
    assert epsilon(shuffled, delta=1e-5) == epsilon(shuffled, delta=1e-5, accountant="rdp") == math.inf
    with pytest.raises(pg.PrivacyError, match="target_epsilon to be within reach"):
        calibrate(lambda sigma: [Release(sigma, 0.01, "fixed", 100)], target_epsilon=3.0, delta=1e-5)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, math.nan, "0.1"])
def test_a_false_positive_rate_out_of_range_is_refused(rate: Any):
    with pytest.raises(pg.PrivacyError, match=r"false_positive_rate to be in \(0, 1\)"):
        attack_success([Release(1.0, 0.01)], false_positive_rate=rate)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_delta_out_of_range_is_refused(delta: float):
    with pytest.raises(pg.PrivacyError, match="delta"):
        epsilon([], delta=delta)
    with pytest.raises(pg.PrivacyError, match="delta"):
        calibrate_noise_multiplier(target_epsilon=1.0, delta=delta, sample_rate=0.1, steps=1)


def test_extreme_noise_is_infinite_or_nothing_but_no_traceback():
    assert cost(0.1, 1e-6, 10, 1e-5) > 1e9
    assert cost(0.1, 1e160, 10, 1e-5) >= 0.0
    assert cost(0.1, 1e-200, 1, 1e-5) == math.inf
    assert cost(5e-324, 1.0, 1, 1e-5) >= 0.0
    sigma = calibrate_noise_multiplier(target_epsilon=1e-4, delta=1e-12, sample_rate=1.0, steps=1)
    assert cost(1.0, sigma, 1, 1e-12) <= 1e-4


def test_rounding_makes_nothing_free():
    """How likely some release is beyond a point, with an example (a little likelier) and without, bounds epsilon."""
    sigma, q, steps, delta = 0.5, 1e-15, 10**12, 1e-15
    at_least = 0.0
    for point in np.linspace(0.0, 4.0, 30):
        absent, present = norm.sf(point / sigma), norm.sf((point - 1) / sigma)
        without = -math.expm1(steps * math.log1p(-absent))
        more = (1 - without) * -math.expm1(steps * math.log1p(-q * (present - absent) / (1 - absent)))
        if more > delta:
            at_least = max(at_least, math.log1p((more - delta) / without))
    assert 0 < at_least <= cost(q, sigma, steps, delta, "rdp") < 10


def test_a_target_that_cannot_be_met_is_refused():
    with pytest.raises(pg.PrivacyError, match="target_epsilon to be within reach"):
        calibrate_noise_multiplier(target_epsilon=1e-12, delta=1e-12, sample_rate=1.0, steps=1)
    with pytest.raises(pg.PrivacyError, match="accountant"):
        cost(0.1, 1.0, 1, 1e-5, "prv")


def test_attacks_are_bounded_without_overflow_at_a_huge_epsilon():
    found = attack_success([Release(0.057, 0.1, count=10)], false_positive_rate=0.01)
    assert 1 - 0.9**10 < found < 1  # who is in no batch cannot be found
