"""The privacy cost of releases. Only this file imports dp_accounting.

Every epsilon is an upper bound for neighboring data sets that differ by adding or removing one unit, by RDP (Mironov
et al. 2019) or PLD (discretized pessimistically). Nothing here reads data.

`Ledger` and `PrivacyPlan` call `epsilon`; so do users, audits, the reports of experiments and `cli.privacy`. The
privacy guarantee rests on this file, because it computes every epsilon that privgrad reports. It does not rest on
`steps_for_budget` and its helper `_last_within`.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from privgrad import calibration_cache
from privgrad.errors import (
    SamplingError,
    described,
    expected,
    require_choice,
    require_delta,
    require_integer,
    require_nonnegative,
    require_positive,
    require_rate,
)
from privgrad.types import SamplingScheme

Accountant = Literal["pld", "rdp"]

_RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(11, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
)
_COARSE_ORDERS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
_TOLERANCE = 1e-3  # largest relative distance of a calibrated epsilon below its target
_LARGEST_NOISE_MULTIPLIER = 1e7
_SMALLEST_NOISE_MULTIPLIER = 1e-2


@dataclass(frozen=True)
class Release:
    """A kind of release, and the number of times that it happened.

    `Ledger`, `PrivacyPlan`, audits, `cli.privacy` and users make it.

    Attributes:
        noise_multiplier: sigma, noise standard deviation over sensitivity. >= 0.
        sample_rate: q in (0, 1].
        scheme: how the batches were drawn.
        count: number of releases, >= 0.
    """

    noise_multiplier: float
    sample_rate: float
    scheme: SamplingScheme = "poisson"
    count: int = 1


def epsilon(
    releases: Iterable[Release],
    *,
    delta: float,
    accountant: Accountant = "pld",
    assume_poisson: bool = False,
) -> float:
    """Compute the epsilon of all releases together, at the given delta.

    Args:
        releases: the releases; their order does not matter.
        delta: in (0, 1).
        accountant: "pld" (tighter) or "rdp". "pld" returns the smaller of both epsilons, because both are valid.
        assume_poisson: account for fixed-size batches as if they were Poisson samples. The number is then a label
            for comparison with the literature, not a guarantee.
    Returns:
        Epsilon >= 0; infinity if any release had no noise, or if no finite bound can be computed.
    Raises:
        PrivacyError: a number is out of its range, or the accountant is unknown.
        SamplingError: a release is from fixed-size batches, which no accountant here covers.
    Privacy:
        An upper bound for T-fold adaptive composition of Poisson-subsampled Gaussians, add or remove one unit.
    Reference:
        Mironov, Talwar, Zhang 2019 (arXiv 1908.10530); Doroshenko et al. 2022 (arXiv 2207.04380).
    """
    require_delta("epsilon", delta)
    require_choice("epsilon", "accountant", accountant, get_args(Accountant))
    mechanisms = _mechanisms("epsilon", releases, assume_poisson=assume_poisson)
    return _epsilon(mechanisms, float(delta), accountant)


def attack_success(releases: Iterable[Release], *, false_positive_rate: float, assume_poisson: bool = False) -> float:
    """Bound the success of every attack that tells from the releases whether one unit was in the data.

    `statement` calls it; users can.

    Computes: the minimum over epsilon of e**epsilon * alpha + delta(epsilon) and 1 - e**-epsilon (1 - delta(epsilon) -
        alpha), where alpha is the false positive rate and delta(epsilon) the privacy profile by PLD.

    Args:
        releases: as in epsilon.
        false_positive_rate: alpha in (0, 1), the share of absent units that the attack takes for present ones.
        assume_poisson: as in epsilon.
    Returns:
        The largest possible share of present units that the attack finds, in [alpha, 1]; 1 if no bound can be computed.
    Raises:
        PrivacyError, SamplingError: as epsilon.
    Privacy:
        An upper bound, because each point of the profile bounds both error rates.
    Reference:
        Kairouz, Oh, Viswanath 2015 (arXiv 1311.0776).
    """
    alpha = false_positive_rate
    require_rate("attack_success", alpha)
    mechanisms = _mechanisms("attack_success", releases, assume_poisson=assume_poisson)
    if not mechanisms:
        return alpha
    if any(noise_multiplier < 1e-100 for noise_multiplier, _, _ in mechanisms):
        return 1.0
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    if not math.isfinite(_compose(accountant, mechanisms, 1e-6)):
        return 1.0
    bound = 1.0
    for eps in np.linspace(0.0, 12.0, 121):
        delta = float(accountant.get_delta(eps))
        bound = min(bound, math.exp(eps) * alpha + delta, 1 - math.exp(-eps) * (1 - delta - alpha))
    return max(alpha, bound)


def _mechanisms(
    function: str, releases: Iterable[Release], *, assume_poisson: bool = False
) -> tuple[tuple[float, float, int], ...]:
    """Return the releases as (noise multiplier, sample rate, count), equal ones added up, in ascending order.

    Raises:
        PrivacyError, SamplingError: as `epsilon`.
    """
    counts: dict[tuple[float, float], int] = {}
    for release in releases if isinstance(releases, Iterable) else [releases]:  # pyright: ignore[reportUnnecessaryIsInstance]
        if not isinstance(release, Release):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "give a list: [Release(noise_multiplier, sample_rate, count=steps)]"
            raise expected(function, "releases", "to be a list of Release", described(release), remedy)
        if release.scheme != "poisson" and not assume_poisson:
            raise expected(
                function,
                "batches",
                "to be Poisson samples",
                f"scheme {release.scheme!r}, which is not covered by the accountant",
                "draw Poisson samples, or pass assume_poisson=True for a number that is only a label",
                SamplingError,
            )
        require_nonnegative(function, "noise_multiplier", release.noise_multiplier, "give sigma")
        require_rate(function, release.sample_rate)
        require_integer(function, "count", release.count, 0)
        key = (float(release.noise_multiplier), float(release.sample_rate))
        counts[key] = counts.get(key, 0) + release.count
    return tuple(sorted((*key, count) for key, count in counts.items() if count > 0))


@functools.lru_cache(maxsize=4096)
def _epsilon(mechanisms: tuple[tuple[float, float, int], ...], delta: float, accountant: str) -> float:
    """Compute the epsilon of releases, each given as (noise multiplier, sample rate, count); cached.

    Besides the accountants of `epsilon`, it has "coarse rdp" and "coarse pld": faster and looser.
    """
    if not mechanisms:
        return 0.0
    if any(noise_multiplier < 1e-100 for noise_multiplier, _, _ in mechanisms):
        return math.inf  # no noise, or so little that its square underflows to 0
    is_coarse = accountant.startswith("coarse")
    orders = _COARSE_ORDERS if is_coarse else _RDP_ORDERS
    by_rdp = _compose(rdp.RdpAccountant(orders), mechanisms, delta)
    if accountant.endswith("rdp"):
        return by_rdp
    # An interval of 1e-4 is accurate enough up to epsilon 20. Above, the interval grows with epsilon to bound memory.
    finest = 1e-3 if is_coarse else 1e-4
    interval = finest * max(1.0, by_rdp / 20) if math.isfinite(by_rdp) else 1e-2
    by_pld = _compose(pld.PLDAccountant(value_discretization_interval=interval), mechanisms, delta)
    return min(by_rdp, by_pld)


def _compose(
    accountant: "rdp.RdpAccountant | pld.PLDAccountant",
    mechanisms: tuple[tuple[float, float, int], ...],
    delta: float,
) -> float:
    """Return the epsilon of all mechanisms by one accountant; infinity if its arithmetic gives no bound."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_worth_telling)
    try:
        for noise_multiplier, sample_rate, count in mechanisms:
            event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise_multiplier)
            if sample_rate < 1:
                event = dp_accounting.PoissonSampledDpEvent(sample_rate, event)
            accountant.compose(event, count)
        if isinstance(accountant, rdp.RdpAccountant):
            costs = accountant.rdp
            rounding = _rounding(mechanisms, accountant.orders)
            if (costs < rounding).any():  # an RDP rounded to zero or below would make an order cost nothing
                costs = np.maximum(costs, 0.0) + rounding
                return max(0.0, float(rdp.compute_epsilon(accountant.orders.tolist(), costs.tolist(), delta)[0]))
        found = float(accountant.get_epsilon(delta))
        return math.inf if math.isnan(found) else max(0.0, found)
    except (ArithmeticError, ValueError):
        return math.inf  # beyond the accountant's arithmetic: no bound
    finally:
        logger.removeFilter(_is_worth_telling)


def _rounding(mechanisms: Iterable[tuple[float, float, int]], orders: np.ndarray) -> np.ndarray:
    """Return by how much rounding may lower the RDP of each order.

    Under sampling the RDP is a sum of terms that nearly cancel. The largest term is order * sample_rate, with a
    relative error of 2^-39. This matters at rates below about 1e-10.
    """
    return 2.0**-36 * orders * sum(rate * count for _, rate, count in mechanisms if rate < 1)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Return False for dp_accounting's log message that it excluded an RDP order, which only loosens the bound.

    `logging` calls it for each message. No epsilon depends on it.
    """
    return "Excluding this order" not in record.getMessage()


def calibrate_noise_multiplier(
    *, target_epsilon: float, delta: float, sample_rate: float, steps: int, besides: Iterable[Release] = ()
) -> float:
    """Find a noise multiplier, close to the smallest one, whose releases cost at most the target.

    `PrivacyPlan.for_budget`, `cli.privacy` and audits call it; users can.

    Computes: the root of epsilon(sigma) - target, by RDP at a few orders, from there by PLD on a coarse grid, and from
        there by PLD, ending above the root.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sample_rate: q in (0, 1].
        steps: T >= 1.
        besides: other releases from the same data, which share the target.
    Returns:
        sigma with epsilon(sigma) <= target_epsilon by PLD, for the steps and `besides` together. Epsilon is within 0.1
        percent of the target, unless sigma is near 0.01, the smallest sigma that is tried. A second call with the same
        numbers takes sigma from `calibration_cache`.
    Raises:
        PrivacyError: a number is out of its range, or no sigma meets the target.
    Privacy:
        Always errs on the safe side: the epsilon of the returned sigma has been checked when it was found.
    """
    function = "calibrate_noise_multiplier"
    require_positive(function, "target_epsilon", target_epsilon, "give a target, usually from 1 to 10")
    require_delta(function, delta)
    require_rate(function, sample_rate)
    require_integer(function, "steps", steps, 1)

    others = _mechanisms(function, besides)
    numbers = {"target_epsilon": float(target_epsilon), "delta": float(delta), "sample_rate": float(sample_rate)}
    key = calibration_cache.key_of({**numbers, "steps": int(steps), "besides": [list(other) for other in others]})
    if (kept := calibration_cache.found(key)) is not None:
        return kept

    def cost(noise_multiplier: float, accountant: str) -> float:
        own = (noise_multiplier, float(sample_rate), steps)
        return _epsilon(tuple(sorted((own, *others))), float(delta), accountant)

    remedy = "raise it, lower sample_rate or steps, or allow a larger delta"
    if others and (spent := _epsilon(others, float(delta), "pld")) >= target_epsilon:
        condition = f"to be above {spent:.6g}, the epsilon of the releases in besides"
        raise expected(function, "target_epsilon", condition, target_epsilon, "raise it, or leave some of these out")
    # Each search is closer to the accountant of the result, and takes longer for one sigma, than the one before.
    found, slope = 1.0, -1.0
    for accountant in ("coarse rdp", "coarse pld", "pld"):
        root = _root(functools.partial(cost, accountant=accountant), target_epsilon, found, slope)
        if root is None and accountant == "pld":
            raise expected(function, "target_epsilon", "to be within reach", target_epsilon, remedy)
        found, slope = root or (found, slope)
    calibration_cache.keep(key, found)
    return found


def _root(cost: Callable[[float], float], target: float, start: float, slope: float) -> tuple[float, float] | None:
    """Find a sigma whose cost is at most the target, and at most _TOLERANCE below it if the cost is continuous.

    A secant search for log cost over log sigma, which is nearly linear, between the largest sigma known to cost too
    much and the smallest one known not to. `calibrate_noise_multiplier` calls it.

    Args:
        cost: sigma -> epsilon, falling.
        target: > 0.
        start: the first sigma to try.
        slope: of log cost over log sigma there, < 0; any guess will do.
    Returns:
        sigma, with cost(sigma) <= target by a call of cost, and the last slope; None if no sigma meets the target. Near
        _SMALLEST_NOISE_MULTIPLIER the cost may be far below the target.
    """
    aim, widest = math.log(target * (1 - _TOLERANCE / 2)), math.log(4)
    safe, unsafe, before = math.inf, 0.0, None
    sigma = max(start, _SMALLEST_NOISE_MULTIPLIER)
    while sigma <= _LARGEST_NOISE_MULTIPLIER:
        found = cost(sigma)
        if found <= target:
            safe = min(safe, sigma)
            if found >= target * (1 - _TOLERANCE) or sigma == _SMALLEST_NOISE_MULTIPLIER:
                return sigma, slope
        else:
            unsafe = max(unsafe, sigma)
        if safe <= unsafe * (1 + _TOLERANCE / 4):
            return safe, slope
        here = math.log(sigma), math.log(min(max(found, 1e-12), 1e12))
        if before is not None:
            slope = min((here[1] - before[1]) / (here[0] - before[0]), -0.1)
        low = math.log(unsafe) if unsafe else here[0] - widest
        high = math.log(safe) if math.isfinite(safe) else here[0] + widest
        step = here[0] + (aim - here[1]) / slope
        if not low < step < high:
            bounded = unsafe and math.isfinite(safe)
            step = (low + high) / 2 if bounded else min(max(step, low), high)
        before, sigma = here, max(math.exp(step), _SMALLEST_NOISE_MULTIPLIER)
    return None


def steps_for_budget(*, target_epsilon: float, delta: float, sample_rate: float, noise_multiplier: float) -> int:
    """Find the largest number of steps whose cost, by PLD, is at most the target.

    `cli.privacy` calls it for `privgrad calibrate`; users can. The guarantee of a training does not rest on it: plan
    and ledger compute epsilon from the number of steps.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sample_rate: q in (0, 1].
        noise_multiplier: sigma > 0.
    Returns:
        T >= 1.
    Raises:
        PrivacyError: a number is out of its range, or one step alone costs more than the target.
    Privacy:
        Errs on the safe side: the epsilon of the returned T has been checked, and epsilon grows with T.
    """
    function = "steps_for_budget"
    require_positive(function, "target_epsilon", target_epsilon, "give a target, usually from 1 to 10")
    remedy = "give a positive sigma: without noise no step is private"
    require_positive(function, "noise_multiplier", noise_multiplier, remedy)

    def cost(steps: int, accountant: Accountant) -> float:
        return epsilon([Release(noise_multiplier, sample_rate, count=steps)], delta=delta, accountant=accountant)

    if (one_step := cost(1, "pld")) > target_epsilon:
        raise expected(
            function,
            "target_epsilon",
            f"to be at least {one_step:.6g}, the epsilon of one step",
            target_epsilon,
            "raise it or noise_multiplier, or lower sample_rate",
        )
    most = _last_within(lambda steps: cost(steps, "rdp") <= target_epsilon, 1)
    return _last_within(lambda steps: cost(steps, "pld") <= target_epsilon, most)


def _last_within(is_within: Callable[[int], bool], start: int) -> int:
    """Return the largest integer >= start for which is_within holds, or one above 1e9 for which it holds.

    is_within must hold at start and must not hold again after it first fails.
    """
    within, step = start, max(1, start // 8)
    while is_within(within + step):
        within, step = within + step, 2 * step
        if within > 10**9:
            return within
    beyond = within + step
    while beyond - within > 1:
        middle = (within + beyond) // 2
        within, beyond = (middle, beyond) if is_within(middle) else (within, middle)
    return within
