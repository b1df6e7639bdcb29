"""The privacy cost of releases. `composition` computes it, by dp_accounting.

Every epsilon is an upper bound for neighboring data sets that differ by adding or removing one unit, by RDP (Mironov
et al. 2019) or PLD (discretized pessimistically). Nothing here reads data.

`Ledger` and `PrivacyPlan` call `epsilon`; so do users, audits, the reports of experiments and `cli.privacy`. The
privacy guarantee rests on this file, because it computes every epsilon that privgrad reports. It does not rest on
`steps_for_budget`.
"""

import json
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Literal, get_args

from privgrad import calibration_cache
from privgrad.calibration_search import last_within, noise_within
from privgrad.errors import (
    described,
    expected,
    require_callable,
    require_choice,
    require_delta,
    require_integer,
    require_positive,
    require_rate,
)
from privgrad.mechanisms import Release, Repeated, Selection, Split, each_group, mechanisms_of
from privgrad.rounding import rounded_up

Accountant = Literal["pld", "rdp"]


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
    from privgrad.composition import epsilon_of

    require_delta("epsilon", delta)
    require_choice("epsilon", "accountant", accountant, get_args(Accountant))
    found = [mechanisms_of("epsilon", own, assume_poisson=assume_poisson) for own in each_group("epsilon", releases)]
    return max(epsilon_of(mechanisms, float(delta), accountant) for mechanisms in found)


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
    from privgrad.composition import attack_success_of

    function, alpha = "attack_success", false_positive_rate
    if not (isinstance(alpha, Real) and 0 < alpha < 1):
        raise expected(
            function, "false_positive_rate", "to be in (0, 1)", described(alpha), "give a share such as 0.01"
        )
    found = [mechanisms_of(function, own, assume_poisson=assume_poisson) for own in each_group(function, releases)]
    return max(attack_success_of(mechanisms, alpha) for mechanisms in found)


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
        SamplingError: a release of `besides` is from fixed-size batches.
    Privacy:
        Always errs on the safe side: the epsilon of the returned sigma has been checked when it was found.
    """
    from privgrad.composition import epsilon_of

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
    if others and (spent := epsilon_of(others, float(delta), "pld")) >= target_epsilon:
        condition = f"to be above {rounded_up(spent)}, the epsilon of the releases in besides"
        raise expected(function, "target_epsilon", condition, target_epsilon, "raise it, or leave some of these out")

    def cost(noise_multiplier: float, accountant: str) -> float:
        own = (noise_multiplier, float(sample_rate), steps)
        together = sorted((own, *others), key=lambda mechanism: (isinstance(mechanism, Repeated), mechanism))
        return epsilon_of(tuple(together), float(delta), accountant)

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
        SamplingError: a release is from fixed-size batches.
    Privacy:
        Always errs on the safe side: the epsilon of the returned sigma has been checked when it was found.
    """
    from privgrad.composition import epsilon_of

    require_callable("calibrate", "releases_at", releases_at, "give a function sigma -> [Release(sigma, rate, ...)]")
    require_positive("calibrate", "target_epsilon", target_epsilon, "give a target, usually from 1 to 10")
    require_delta("calibrate", delta)

    def cost(noise_multiplier: float, accountant: str) -> float:
        return epsilon_of(mechanisms_of("calibrate", releases_at(noise_multiplier)), float(delta), accountant)

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
            f"to be at least {rounded_up(one_step)}, the epsilon of one step",
            target_epsilon,
            "raise it or noise_multiplier, or lower sample_rate",
        )
    most = last_within(lambda steps: cost(steps, "rdp") <= target_epsilon, 1)
    return last_within(lambda steps: cost(steps, "pld") <= target_epsilon, most)
