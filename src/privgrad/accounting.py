"""The privacy cost of releases. Only this file imports dp_accounting.

Every epsilon is an upper bound for neighboring data sets that differ by adding or removing one unit, by RDP (Mironov
et al. 2019) or PLD (discretized pessimistically). Nothing here reads data.

`Ledger` and `PrivacyPlan` call `epsilon`; so do users, audits, the reports of experiments and `cli.privacy`. The
privacy guarantee rests on this file, because it computes every epsilon that privgrad reports. It does not rest on
`steps_for_budget`.
"""

import functools
import json
import logging
import math
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import dp_accounting
import numpy as np
from dp_accounting import dp_event, pld, rdp
from dp_accounting.rdp import rdp_privacy_accountant

from privgrad import calibration_cache
from privgrad.calibration_search import last_within, noise_within
from privgrad.errors import (
    expected,
    require_callable,
    require_choice,
    require_delta,
    require_integer,
    require_positive,
    require_rate,
)
from privgrad.mechanisms import Mechanism, Release, Repeated, Selection, Split, Truncated, each_group, mechanisms_of

Accountant = Literal["pld", "rdp"]

_RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(11, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
)
_COARSE_ORDERS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


def epsilon(
    releases: Iterable[Release | Selection | Split],
    *,
    delta: float,
    accountant: Accountant = "pld",
    assume_poisson: bool = False,
) -> float:
    """Compute the epsilon of all releases together, at the given delta.

    Args:
        releases: the releases; their order does not matter. With a Split, the result is the largest epsilon over the
            groups that a person may be in.
        delta: in (0, 1).
        accountant: "pld" (tighter) or "rdp". "pld" returns the smaller of both epsilons, because both are valid. With a
            Selection it returns that of RDP, because PLD does not cover Selections. RDP does not cover truncated
            samples: it gives infinity, and so do these together with a Selection.
        assume_poisson: account for fixed-size batches as if they were Poisson samples. The number is then a label
            for comparison with the literature, not a guarantee.
    Returns:
        Epsilon >= 0; infinity if any release had no noise, or if no finite bound can be computed.
    Raises:
        PrivacyError: a number is out of its range, or the accountant is unknown.
        SamplingError: a release is from fixed-size batches, which no accountant here covers.
    Privacy:
        An upper bound for T-fold adaptive composition of Poisson-subsampled Gaussians, truncated or not, add or remove
        one unit. Their noise and number were fixed beforehand. Where later ones were chosen after a look at results,
        `privacy_filter.filter_epsilon` is the bound.
    Reference:
        Mironov, Talwar, Zhang 2019 (arXiv 1908.10530); Doroshenko et al. 2022 (arXiv 2207.04380); on Selections,
        Papernot, Steinke 2022 (arXiv 2110.03620).
    """
    require_delta("epsilon", delta)
    require_choice("epsilon", "accountant", accountant, get_args(Accountant))
    found = [mechanisms_of("epsilon", own, assume_poisson=assume_poisson) for own in each_group("epsilon", releases)]
    return max(_epsilon(mechanisms, float(delta), accountant) for mechanisms in found)


def attack_success(
    releases: Iterable[Release | Selection | Split], *, false_positive_rate: float, assume_poisson: bool = False
) -> float:
    """Bound the success of every attack that tells from the releases whether one unit was in the data.

    `statement` calls it; users can.

    Computes: the minimum over epsilon of e**epsilon * alpha + delta(epsilon) and 1 - e**-epsilon (1 - delta(epsilon) -
        alpha), where alpha is the false positive rate and delta(epsilon) the privacy profile by PLD, or by RDP with a
        Selection.

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
    function, alpha = "attack_success", false_positive_rate
    require_rate(function, alpha)
    found = [mechanisms_of(function, own, assume_poisson=assume_poisson) for own in each_group(function, releases)]
    return max(_attack_success(mechanisms, alpha) for mechanisms in found)


def _attack_success(mechanisms: tuple[Mechanism, ...], alpha: float) -> float:
    """Compute `attack_success` of one group of people."""
    if not mechanisms:
        return alpha
    if _lacks_noise(mechanisms):
        return 1.0
    by_pld = pld.PLDAccountant(value_discretization_interval=1e-3)
    by_rdp = rdp.RdpAccountant(_RDP_ORDERS)
    has_selection = any(isinstance(mechanism, Repeated) for mechanism in mechanisms)
    if has_selection and _is_truncated(mechanisms):
        return 1.0
    if not math.isfinite(_compose(by_rdp if has_selection else by_pld, mechanisms, 1e-6)):
        return 1.0
    costs: list[float] = _safe_costs(by_rdp, mechanisms).tolist() if has_selection else []
    bound = 1.0
    for eps in np.linspace(0.0, 12.0, 121):
        delta = float(
            rdp_privacy_accountant.compute_delta(_RDP_ORDERS, costs, eps)[0] if has_selection else by_pld.get_delta(eps)
        )
        bound = min(bound, math.exp(eps) * alpha + delta, 1 - math.exp(-eps) * (1 - delta - alpha))
    return max(alpha, bound)


@functools.lru_cache(maxsize=4096)
def _epsilon(mechanisms: tuple[Mechanism, ...], delta: float, accountant: str) -> float:
    """Compute the epsilon of releases, as `mechanisms_of` returns them; cached.

    Besides the accountants of `epsilon`, it has "coarse rdp" and "coarse pld": faster and looser.
    """
    if not mechanisms:
        return 0.0
    if _lacks_noise(mechanisms):
        return math.inf
    is_coarse = accountant.startswith("coarse")
    orders = _COARSE_ORDERS if is_coarse else _RDP_ORDERS
    truncated = _is_truncated(mechanisms)
    if truncated and (accountant == "rdp" or any(isinstance(mechanism, Repeated) for mechanism in mechanisms)):
        return math.inf  # RDP does not cover truncation, and PLD does not cover a Selection
    # Without the truncation, RDP is not a bound: it only guides the search, and the interval of PLD.
    covered = tuple(one.untruncated if isinstance(one, Truncated) else one for one in mechanisms)
    by_rdp = _compose(rdp.RdpAccountant(orders), covered, delta)
    if accountant.endswith("rdp") or any(isinstance(mechanism, Repeated) for mechanism in mechanisms):
        return by_rdp
    # An interval of 1e-4 is accurate enough up to epsilon 20. Above, the interval grows with epsilon to bound memory.
    finest = 1e-3 if is_coarse else 1e-4
    interval = finest * max(1.0, by_rdp / 20) if math.isfinite(by_rdp) else 1e-2
    by_pld = _compose(pld.PLDAccountant(value_discretization_interval=interval), mechanisms, delta)
    return by_pld if truncated else min(by_rdp, by_pld)


def _compose(
    accountant: "rdp.RdpAccountant | pld.PLDAccountant",
    mechanisms: tuple[Mechanism, ...],
    delta: float,
) -> float:
    """Return the epsilon of all mechanisms by one accountant; infinity if its arithmetic gives no bound."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_worth_telling)
    try:
        for mechanism in mechanisms:
            accountant.compose(_event(mechanism), mechanism[-1])
        if isinstance(accountant, rdp.RdpAccountant):
            costs = _safe_costs(accountant, mechanisms)
            if (costs != accountant.rdp).any():
                return max(0.0, float(rdp.compute_epsilon(accountant.orders.tolist(), costs.tolist(), delta)[0]))
        found = float(accountant.get_epsilon(delta))
        return math.inf if math.isnan(found) else max(0.0, found)
    except (ArithmeticError, ValueError):
        return math.inf  # beyond the accountant's arithmetic: no bound
    finally:
        logger.removeFilter(_is_worth_telling)


def renyi_costs(mechanisms: tuple[Mechanism, ...]) -> dict[float, float]:
    """Return order -> RDP of releases, as `mechanisms_of` returns them. `privacy_filter` calls it.

    An RDP is infinite if a release has no noise, or if the accountant's arithmetic gives no bound. Each kind of release
    is computed once and kept, so that one more commitment of a budget costs little time.
    """
    each = [_renyi_costs(mechanism, _RDP_ORDERS) for mechanism in mechanisms]
    together = np.sum(each, axis=0) if each else np.zeros(len(_RDP_ORDERS))
    return dict(zip(_RDP_ORDERS, together.tolist(), strict=True))


@functools.lru_cache(maxsize=4096)
def _renyi_costs(mechanism: Mechanism, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Return the RDP of one kind of release by order, as in `renyi_costs`; cached."""
    accountant = rdp.RdpAccountant(orders)
    if _is_truncated((mechanism,)):
        return (math.inf,) * len(orders)
    if _lacks_noise((mechanism,)) or not math.isfinite(_compose(accountant, (mechanism,), 1e-6)):
        return (math.inf,) * len(orders)
    return tuple(_safe_costs(accountant, (mechanism,)).tolist())


def epsilon_at(order: float, cost: float, delta: float) -> float:
    """Return the epsilon at delta of a mechanism with this RDP of this order. `privacy_filter` calls it."""
    return max(0.0, float(rdp.compute_epsilon([order], [cost], delta)[0]))


def _event(mechanism: Mechanism) -> dp_accounting.DpEvent:
    """Return one of the releases, not its count, in dp_accounting's form."""
    if isinstance(mechanism, Repeated):
        events = [dp_accounting.SelfComposedDpEvent(_event(one), one[-1]) for one in mechanism.mechanisms]
        # Rounding may lower the RDP of one run. It is added here, because the selection multiplies it.
        rounding = dp_accounting.ZCDpEvent(rho=_rounding_rate(mechanism.mechanisms))
        run = dp_accounting.ComposedDpEvent([*events, rounding])
        return dp_event.RepeatAndSelectDpEvent(run, mechanism.mean, mechanism.shape)
    if isinstance(mechanism, Truncated):
        sigma, rate, largest, examples, _ = mechanism
        return dp_event.TruncatedSubsampledGaussianDpEvent(examples, rate, largest, sigma)
    noise_multiplier, sample_rate, _ = mechanism
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    return event if sample_rate == 1 else dp_accounting.PoissonSampledDpEvent(sample_rate, event)


def _safe_costs(accountant: rdp.RdpAccountant, mechanisms: Iterable[Mechanism]) -> np.ndarray:
    """Return the RDP of each order, or a little more if rounding may have brought one of them to zero or below.

    An RDP of zero or below would make its order cost nothing.
    """
    costs = accountant.rdp
    rounding = accountant.orders * _rounding_rate(mechanisms)
    return np.maximum(costs, 0.0) + rounding if (costs < rounding).any() else costs


def _rounding_rate(mechanisms: Iterable[Mechanism]) -> float:
    """Return by how much rounding may lower the RDP of an order, divided by the order.

    Under sampling the RDP is a sum of terms that nearly cancel. The largest term is order * sample_rate, with a
    relative error of 2^-39. This matters at rates below about 1e-10. `_event` adds that of a Selection itself.
    """
    plain = (mechanism for mechanism in mechanisms if not isinstance(mechanism, Repeated))
    return 2.0**-36 * sum(one[1] * one[-1] for one in plain if one[1] < 1)


def _lacks_noise(mechanisms: Iterable[Mechanism]) -> bool:
    """Return whether a release has no noise, or so little that its square underflows to 0."""
    return any(
        _lacks_noise(mechanism.mechanisms) if isinstance(mechanism, Repeated) else mechanism[0] < 1e-100
        for mechanism in mechanisms
    )


def _is_truncated(mechanisms: Iterable[Mechanism]) -> bool:
    """Return whether a release is from truncated batches, also one in a Selection."""
    return any(
        _is_truncated(mechanism.mechanisms) if isinstance(mechanism, Repeated) else isinstance(mechanism, Truncated)
        for mechanism in mechanisms
    )


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Return False for dp_accounting's log message that it excluded an RDP order, which only loosens the bound.

    `logging` calls it for each message. No epsilon depends on it.
    """
    return "Excluding this order" not in record.getMessage()


def calibrate_noise_multiplier(
    *, target_epsilon: float, delta: float, sample_rate: float, steps: int, besides: Iterable[Release | Selection] = ()
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
    others = mechanisms_of(function, besides)
    numbers = {"target_epsilon": float(target_epsilon), "delta": float(delta), "sample_rate": float(sample_rate)}
    plain = json.loads(json.dumps(others))  # lists, as the cache's file has them
    key = calibration_cache.key_of({**numbers, "steps": int(steps), "besides": plain})
    if (kept := calibration_cache.found(key)) is not None:
        return kept
    if others and (spent := _epsilon(others, float(delta), "pld")) >= target_epsilon:
        condition = f"to be above {spent:.6g}, the epsilon of the releases in besides"
        raise expected(function, "target_epsilon", condition, target_epsilon, "raise it, or leave some of these out")

    def cost(noise_multiplier: float, accountant: str) -> float:
        own = (noise_multiplier, float(sample_rate), steps)
        together = sorted((own, *others), key=lambda mechanism: (isinstance(mechanism, Repeated), mechanism))
        return _epsilon(tuple(together), float(delta), accountant)

    found = noise_within(cost, target_epsilon)
    if found is None:
        remedy = "raise it, lower sample_rate or steps, or allow a larger delta"
        raise expected(function, "target_epsilon", "to be within reach", target_epsilon, remedy)
    calibration_cache.keep(key, found)
    return found


def calibrate(
    releases_at: Callable[[float], Iterable[Release | Selection]], *, target_epsilon: float, delta: float
) -> float:
    """Find a noise multiplier, close to the smallest one, for any set of releases that depends on it.

    Users call it where a training is not all, such as for trials, scores and a final run under one target.

    Computes: as calibrate_noise_multiplier, without its cache.

    Args:
        releases_at: sigma -> all releases, which cost less for a larger sigma.
        target_epsilon: > 0.
        delta: in (0, 1).
    Returns:
        sigma with epsilon(releases_at(sigma)) <= target_epsilon by PLD, or by RDP with a Selection. Epsilon is within
        0.1 percent of the target, unless sigma is near 0.01, the smallest sigma that is tried.
    Raises:
        PrivacyError: a number is out of its range, or no sigma meets the target. A Selection costs something even with
            infinite noise, because the number of its runs is random.
    Privacy:
        Always errs on the safe side: the epsilon of the returned sigma has been checked when it was found.
    """
    require_callable("calibrate", "releases_at", releases_at, "give a function sigma -> [Release(sigma, rate, ...)]")
    require_positive("calibrate", "target_epsilon", target_epsilon, "give a target, usually from 1 to 10")
    require_delta("calibrate", delta)

    def cost(noise_multiplier: float, accountant: str) -> float:
        return _epsilon(mechanisms_of("calibrate", releases_at(noise_multiplier)), float(delta), accountant)

    found = noise_within(cost, target_epsilon)
    if found is None:
        remedy = "raise it, plan fewer releases, or allow a larger delta"
        raise expected("calibrate", "target_epsilon", "to be within reach", target_epsilon, remedy)
    return found


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
    most = last_within(lambda steps: cost(steps, "rdp") <= target_epsilon, 1)
    return last_within(lambda steps: cost(steps, "pld") <= target_epsilon, most)
