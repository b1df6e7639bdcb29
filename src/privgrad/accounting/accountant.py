"""The privacy cost of releases. `composition` computes it, by dp_accounting.

Every epsilon is an upper bound for neighboring data sets that differ by adding or removing one unit, by RDP (Mironov
et al. 2019) or PLD (discretized pessimistically). Nothing here reads data.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import Literal, get_args

import numpy as np

from privgrad.accounting.calibration import last_within, noise_within, one_of
from privgrad.accounting.mechanisms import Release, Selection, Split, each_group, mechanisms_of, require_whole_epochs
from privgrad.errors import (
    expected,
    require_choice,
    require_delta,
    require_in,
    require_integer,
    require_positive,
    require_rate,
)

Accountant = Literal["pld", "rdp"]
Releases = Iterable[Release | Selection | Split]
_MAIN_SHARE = 0.8  # of delta, for the order that suits the first releases
_OTHER_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def epsilon(releases: Releases, *, delta: float, accountant: Accountant = "pld", rows_per_person: int = 1) -> float:
    """Compute the epsilon of all releases together, at the given delta.

    Args:
        releases: the releases; their order does not matter. With a Split, the result is the largest epsilon over the
            groups that a person may be in.
        delta: in (0, 1).
        accountant: "pld" (tighter) or "rdp". "pld" returns the smaller of both epsilons, because both are valid. With a
            Selection it returns that of RDP, because PLD does not cover Selections. RDP does not cover truncated
            samples: it gives infinity, and so do these together with a Selection.
        rows_per_person: k >= 1, for a person with up to k rows, each of which is drawn by itself. With k > 1, for
            Poisson samples and by "pld" only.
    Returns:
        Epsilon >= 0; infinite if a release had no noise or was of shuffled batches, or if no finite bound can be
        computed.
    Raises:
        PrivacyError: a number is out of its range, or the accountant is unknown.
    Privacy:
        An upper bound for T-fold adaptive composition of Poisson-subsampled Gaussians, truncated or not, add or remove
        one unit. Their noise and number were fixed beforehand. Where later ones were chosen after a look at results,
        `filter_epsilon` is the bound.
    Reference:
        Mironov, Talwar, Zhang 2019 (arXiv 1908.10530); Doroshenko et al. 2022 (arXiv 2207.04380); on Selections,
        Papernot, Steinke 2022 (arXiv 2110.03620).
    """
    from privgrad.accounting.composition import epsilon_of, epsilon_of_rows

    require_delta("epsilon", delta)
    require_integer("epsilon", "rows_per_person", rows_per_person, 1)
    require_choice("epsilon", "accountant", accountant, get_args(Accountant))
    found = [mechanisms_of("epsilon", own) for own in each_group("epsilon", releases)]
    if rows_per_person == 1:
        return max(epsilon_of(mechanisms, float(delta), accountant) for mechanisms in found)
    plain = [[one for one in own if isinstance(one, Release) and one.scheme == "poisson"] for own in found]
    if accountant != "pld" or any(len(own) < len(given) for own, given in zip(plain, found, strict=True)):
        remedy = "sum up the rows of each person, and make the person the unit"
        condition = "to be 1 unless all batches are Poisson samples, accounted by PLD"
        raise expected("epsilon", "rows_per_person", condition, rows_per_person, remedy)
    return max(epsilon_of_rows(tuple(own), float(delta), rows_per_person) for own in plain)


def attack_success(releases: Releases, *, false_positive_rate: float) -> float:
    """Bound the success of every attack that tells from the releases whether one unit was in the data.

    Computes: the minimum over epsilon of e**epsilon * alpha + delta(epsilon) and 1 - e**-epsilon (1 - delta(epsilon) -
        alpha), where alpha is the false positive rate and delta(epsilon) the privacy profile by PLD, or by RDP with a
        Selection.

    Args:
        releases: as in epsilon.
        false_positive_rate: alpha in (0, 1), the share of absent units that the attack takes for present ones.
    Returns:
        The largest possible share of present units that the attack finds, in [alpha, 1]; 1 if no bound can be computed.
    Raises:
        PrivacyError: as epsilon.
    Privacy:
        An upper bound, because each point of the profile bounds both error rates.
    Reference:
        Kairouz, Oh, Viswanath 2015 (arXiv 1311.0776).
    """
    from privgrad.accounting.attacks import attack_success_of

    function, alpha = "attack_success", false_positive_rate
    require_in(function, "false_positive_rate", alpha, "(0, 1)")
    found = [mechanisms_of(function, own) for own in each_group(function, releases)]
    return max(float(attack_success_of(mechanisms, np.array([alpha]))[0]) for mechanisms in found)


def attack_advantage(releases: Releases) -> float:
    """Bound the advantage of every attack that tells from the releases whether one unit was in the data.

    Computes: delta(0) of the privacy profile, the total variation distance.

    Args:
        releases: as in epsilon.
    Returns:
        The largest possible difference, in [0, 1], of the share of present units that an attack finds and the share of
        absent units that it takes for present ones; 1 if no bound can be computed.
    Raises:
        PrivacyError: as epsilon.
    Privacy:
        An upper bound, at all false positive rates.
    Reference:
        Kulynych et al. 2024 (arXiv 2407.02191).
    """
    from privgrad.accounting.attacks import advantage_of

    function = "attack_advantage"
    return max(advantage_of(mechanisms_of(function, own)) for own in each_group(function, releases))


def gaussian_dp(releases: Releases) -> tuple[float, float]:
    """Compute the mu of Gaussian differential privacy that all releases together have, and how near it is.

    Computes: the smallest mu such that no attack has smaller error rates than against one Gaussian release with noise
        multiplier 1 / mu, where they are above 1e-10; and the regret, the smallest amount by which both error rates of
        any attack must be lowered until they are at most those that mu allows.

    Args:
        releases: as in epsilon.
    Returns:
        mu >= 0, infinite if epsilon is; and the regret in [0, 1], with which mu describes the releases well if it is
        at most 0.01.
    Raises:
        PrivacyError: as epsilon.
    Privacy:
        mu is an upper bound, except for attacks with a false positive rate below 1e-10.
    Reference:
        Dong, Roth, Su 2022 (arXiv 1905.02383); Gomez et al. 2026 (arXiv 2503.10945).
    """
    from privgrad.accounting.attacks import gaussian_of

    function = "gaussian_dp"
    found = [gaussian_of(mechanisms_of(function, own)) for own in each_group(function, releases)]
    return max(found)


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    epoch_steps: int | None = None,
    besides: Iterable[Release | Selection] = (),
) -> float:
    """Find a noise multiplier, close to the smallest one, whose releases cost at most the target.

    Computes: the root of epsilon(sigma) - target, by RDP at a few orders, from there by PLD on a coarse grid, and from
        there by PLD, ending above the root.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sample_rate: q in (0, 1].
        steps: T >= 1.
        epoch_steps: t for epochs of so many steps, which are sample_rate * t times each example; None for Poisson
            samples.
        besides: other releases from the same data, which share the target.
    Returns:
        sigma with epsilon(sigma) <= target_epsilon by PLD, for the steps and `besides` together. Epsilon is within 0.1
        percent of the target, unless sigma is near 0.01, the smallest sigma that is tried.
    Raises:
        PrivacyError: a number is out of its range, or no sigma meets the target.
    Privacy:
        Always errs on the safe side: the epsilon of the returned sigma has been checked.
    """
    function, others = "calibrate_noise_multiplier", list(besides)
    require_positive(function, "target_epsilon", target_epsilon)
    require_delta(function, delta)
    require_rate(function, sample_rate)
    require_integer(function, "steps", steps, 1)
    if others and (spent := epsilon(others, delta=delta)) >= target_epsilon:
        condition = f"to be above {rounded_up(spent)}, the epsilon of the releases in besides"
        raise expected(function, "target_epsilon", condition, target_epsilon)
    own = _release(1.0, float(sample_rate), steps, epoch_steps)
    return calibrate(
        lambda sigma: [replace(own, noise_multiplier=sigma), *others], target_epsilon=target_epsilon, delta=delta
    )


def calibrate(
    releases_at: Callable[[float], Iterable[Release | Selection]], *, target_epsilon: float, delta: float
) -> float:
    """Find a noise multiplier, close to the smallest one, for any set of releases that depends on it.

    Computes: as calibrate_noise_multiplier.

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
        Always errs on the safe side: the epsilon of the returned sigma has been checked.
    """
    from privgrad.accounting.composition import epsilon_of

    require_positive("calibrate", "target_epsilon", target_epsilon)
    require_delta("calibrate", delta)

    def cost(noise_multiplier: float, accountant: str) -> float:
        return epsilon_of(mechanisms_of("calibrate", releases_at(noise_multiplier)), float(delta), accountant)

    if (found := noise_within(cost, target_epsilon)) is None:
        raise expected("calibrate", "target_epsilon", "to be within reach", target_epsilon)
    return found


def calibrate_to_attack(
    releases_at: Callable[[float], Iterable[Release | Selection]],
    *,
    target_success: float | None = None,
    false_positive_rate: float | None = None,
    target_advantage: float | None = None,
) -> float:
    """Find a noise multiplier, close to the smallest one, for a bound on the success of all attacks.

    Computes: as calibrate, the root of attack_success(sigma) - false_positive_rate, or of attack_advantage(sigma).

    Args:
        releases_at: as in calibrate.
        target_success: the largest share of present units that an attack may find, in (false_positive_rate, 1).
        false_positive_rate: with target_success, as in attack_success.
        target_advantage: in (0, 1), as attack_advantage, in the place of the other two.
    Returns:
        sigma. The success less the false positive rate, or the advantage, is at most its target, and within 0.1 percent
        of it, unless sigma is near 0.01, the smallest sigma that is tried.
    Raises:
        PrivacyError: a number is out of its range, or missing, or no sigma meets the target.
    Privacy:
        Always errs on the safe side: the bound of the returned sigma has been checked.
    Reference:
        Kulynych et al. 2024 (arXiv 2407.02191).
    """
    from privgrad.accounting.composition import untruncated

    function = "calibrate_to_attack"
    target = one_of(function, target_success=target_success, target_advantage=target_advantage)
    rate = false_positive_rate
    if target_success is None:
        if rate is not None:
            raise expected(function, "false_positive_rate", "to be None without target_success", rate)
        require_in(function, "target_advantage", target, "(0, 1)")
    else:
        require_in(function, "false_positive_rate", rate, "(0, 1)")
        require_in(function, "target_success", target, f"({rate}, 1)")

    def cost(noise_multiplier: float, accountant: str) -> float:
        releases = mechanisms_of(function, releases_at(noise_multiplier))
        if accountant == "coarse rdp":  # it only begins the search
            releases = tuple(map(untruncated, releases))
        if rate is None:
            return attack_advantage(releases)
        return attack_success(releases, false_positive_rate=rate) - rate

    if (found := noise_within(cost, target - (rate or 0.0))) is None:
        raise expected(function, "the target", "to be within reach", target)
    return found


def steps_for_budget(
    *, target_epsilon: float, delta: float, sample_rate: float, noise_multiplier: float, epoch_steps: int | None = None
) -> int:
    """Find the largest number of steps whose cost, by PLD, is at most the target.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sample_rate: q in (0, 1].
        noise_multiplier: sigma > 0.
        epoch_steps: as in calibrate_noise_multiplier.
    Returns:
        T >= 1, whole epochs with epoch_steps.
    Raises:
        PrivacyError: a number is out of its range, or one step alone, or one epoch, costs more than the target.
    Privacy:
        Errs on the safe side: the epsilon of the returned T has been checked, and epsilon grows with T.
    """
    function = "steps_for_budget"
    require_positive(function, "target_epsilon", target_epsilon)
    require_positive(function, "noise_multiplier", noise_multiplier)

    size = epoch_steps or 1

    def is_within(count: int, accountant: Accountant = "pld") -> bool:
        own = _release(noise_multiplier, sample_rate, count * size, epoch_steps)
        return epsilon([own], delta=delta, accountant=accountant) <= target_epsilon

    one, name = _release(noise_multiplier, sample_rate, size, epoch_steps), "step" if epoch_steps is None else "epoch"
    if (cost := epsilon([one], delta=delta)) > target_epsilon:
        condition = f"to be at least {rounded_up(cost)}, the epsilon of one {name}"
        raise expected(function, "target_epsilon", condition, target_epsilon)
    # RDP is faster, and does not cover epochs.
    most = last_within(lambda count: is_within(count, "rdp"), 1) if epoch_steps is None else 1
    return size * last_within(is_within, most)


def _release(noise_multiplier: float, sample_rate: float, steps: int, epoch_steps: int | None) -> Release:
    """Return the release of so many Poisson samples, or of whole epochs."""
    if epoch_steps is None:
        return Release(noise_multiplier, sample_rate, count=steps)
    require_whole_epochs("accounting", steps, epoch_steps)
    return Release(noise_multiplier, sample_rate, "epochs", count=steps, epoch_steps=epoch_steps)


def filter_epsilon(releases: Releases, *, first: Releases, delta: float, total_epsilon: float) -> float:
    """Compute the epsilon of releases whose noise and number were chosen one after the other, under a cap.

    Computes: the minimum over a few orders a of the epsilon that the RDP of order a gives at delta_a. The delta_a add
        up to delta. 8/10 are for the order at which the first releases would fit into the cap most often. The other
        orders share the rest. For a Split, each order counts the group that costs the most at this order.

    Args:
        releases: all releases so far, with those that would come next.
        first: the releases among them that were chosen before any result was seen.
        delta: in (0, 1).
        total_epsilon: the cap, > 0, fixed before the first release.
    Returns:
        Epsilon >= 0. If it is at most the cap, the releases are admitted, and the cap is the guarantee. For releases
        like the first it is about 1 to 3 percent above epsilon(accountant="rdp") near the cap. It is further above
        for other releases, and far below the cap.
    Raises:
        PrivacyError: as accounting.epsilon.
    Privacy:
        All releases together satisfy (total_epsilon, delta) differential privacy, if each is made only where
        this number stays at most the cap. Proof: let B_a be the RDP of order a that gives total_epsilon at
        delta_a. For one fixed order, adaptively chosen RDP adds up: a filter that stops before the sum exceeds
        B_a has RDP B_a (Feldman and Zrnic, theorem 3.1; releases may overlap in time, arXiv 2309.05901). Let E
        be a set of outcomes, and E_a those whose first order with a sum within B_a is a. In E_a the filter of
        order a alone would never have stopped, because sums only grow. So P(E_a) is at most e^total_epsilon
        P'(E_a) + delta_a, and the sum over a gives the claim. Orders and delta_a depend on the cap and on
        `first` alone, so they are fixed before any result. A person is in one group of each Split, and at each order
        pays at most what is counted there: the claim holds for every person.
        The minimum over all orders at the full delta, as in accounting.epsilon, is proven for releases that were fixed
        beforehand. Here the best order would depend on results, which is not covered by the theorem.
    Reference:
        Feldman, Zrnic 2021 (arXiv 2008.11193); Lecuyer 2021 (arXiv 2103.01379). Filters by whole privacy profiles are
        not free in general: arXiv 2602.15815.
    """
    from privgrad.accounting.composition import epsilon_at

    require_delta("filter_epsilon", delta)
    require_positive("filter_epsilon", "total_epsilon", total_epsilon)
    costs = _costs(releases)
    shares = _shares(_costs(first), float(delta), float(total_epsilon))
    return min(epsilon_at(order, costs[order], share) for order, share in shares)


def _costs(releases: Releases) -> dict[float, float]:
    """Return order -> RDP of the releases, each Split as its dearest group of this order."""
    from privgrad.accounting.composition import renyi_costs

    given = list(releases)
    plain = (release for release in given if not isinstance(release, Split))
    costs = renyi_costs(mechanisms_of("filter_epsilon", plain))
    # One Split after the other: the time does not grow with the number of combinations of groups.
    for split in (release for release in given if isinstance(release, Split)):
        groups = [renyi_costs(mechanisms_of("filter_epsilon", group)) for group in split.groups]
        costs = {order: cost + max(group[order] for group in groups) for order, cost in costs.items()}
    return costs


def _shares(costs: dict[float, float], delta: float, total_epsilon: float) -> tuple[tuple[float, float], ...]:
    """Return the orders that count, each with its share of delta, given order -> RDP of the first releases."""

    def times(order: float) -> float:
        """Return how often the first releases would fit into the cap, by this order alone."""
        # The RDP that gives total_epsilon: dp_accounting's conversion (Canonne et al. 2020, proposition 12), reversed.
        room = total_epsilon - math.log1p(-1 / order) + math.log(_MAIN_SHARE * delta * order) / (order - 1)
        return room / costs[order] if costs[order] > 0 else room

    main = max(costs, key=times)
    others = [order for order in _OTHER_ORDERS if order != main and order in costs]
    share = (1 - _MAIN_SHARE) * delta / len(others)
    return (main, _MAIN_SHARE * delta), *((float(order), share) for order in others)


def rounded_up(bound: float, digits: int = 6) -> str:
    """Return an upper bound with at most this many significant digits, rounded up, never down."""
    if not math.isfinite(bound):
        return f"{bound:g}"
    exact = Decimal(repr(float(bound)))
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(exact)):.{digits}g}"


def two_decimals_up(bound: float) -> str:
    """Return an upper bound with two decimals, or with two significant digits below 0.1; rounded up, never down."""
    exact = Decimal(repr(float(bound)))
    places = min(-2, exact.adjusted() - 1) if exact else -2
    return f"{exact.quantize(Decimal(1).scaleb(places), ROUND_CEILING):f}"
