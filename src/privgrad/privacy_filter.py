"""The cost of releases that are chosen one after the other, each after a look at the results before it.

`Budget` calls `filter_epsilon`. The privacy guarantee of a budget rests on this file.
"""

import math
from collections.abc import Iterable

from privgrad.errors import require_delta, require_positive
from privgrad.mechanisms import Release, Selection, Split, mechanisms_of

_MAIN_SHARE = 0.8  # of delta, for the order that suits the first releases
_OTHER_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def filter_epsilon(
    releases: Iterable[Release | Selection | Split],
    *,
    first: Iterable[Release | Selection | Split],
    delta: float,
    total_epsilon: float,
) -> float:
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
        PrivacyError, SamplingError: as accounting.epsilon.
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
    from privgrad.composition import epsilon_at

    require_delta("filter_epsilon", delta)
    require_positive("filter_epsilon", "total_epsilon", total_epsilon, "give a total, usually from 1 to 10")
    costs = _costs(releases)
    shares = _shares(_costs(first), float(delta), float(total_epsilon))
    return min(epsilon_at(order, costs[order], share) for order, share in shares)


def _costs(releases: Iterable[Release | Selection | Split]) -> dict[float, float]:
    """Return order -> RDP of the releases, each Split as its dearest group of this order.

    The time grows with the number of releases, not with the number of combinations of groups.
    """
    from privgrad.composition import renyi_costs

    given = list(releases) if isinstance(releases, Iterable) else [releases]  # pyright: ignore[reportUnnecessaryIsInstance]
    plain = (release for release in given if not isinstance(release, Split))
    costs = renyi_costs(mechanisms_of("filter_epsilon", plain))
    for split in (release for release in given if isinstance(release, Split)):
        groups = [renyi_costs(mechanisms_of("filter_epsilon", group)) for group in split.groups]
        costs = {order: cost + max(group[order] for group in groups) for order, cost in costs.items()}
    return costs


def _shares(costs: dict[float, float], delta: float, total_epsilon: float) -> tuple[tuple[float, float], ...]:
    """Return the orders that count, each with its share of delta. Neither depends on a result.

    Args:
        costs: order -> RDP of the first releases.
        delta: of the cap.
        total_epsilon: the cap.
    """

    def times(order: float) -> float:
        """Return how often the first releases would fit into the cap, by this order alone."""
        room = total_epsilon - math.log1p(-1 / order) + math.log(_MAIN_SHARE * delta * order) / (order - 1)
        return room / costs[order] if costs[order] > 0 else room

    main = max(costs, key=times)
    others = [order for order in _OTHER_ORDERS if order != main and order in costs]
    share = (1 - _MAIN_SHARE) * delta / len(others)
    return (main, _MAIN_SHARE * delta), *((float(order), share) for order in others)
