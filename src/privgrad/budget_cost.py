"""The cost of the commitments of a budget together, and the noise of one more training that uses what is left.

`Budget` calls it. The privacy guarantee of a budget rests on `cost_of`.
"""

from collections.abc import Sequence

from privgrad import accounting
from privgrad.budget_file import Commitment
from privgrad.calibration_search import noise_within
from privgrad.mechanisms import Release
from privgrad.privacy_filter import filter_epsilon


def cost_of(commitments: Sequence[Commitment], *, delta: float, total_epsilon: float) -> float:
    """Return the epsilon of commitments together, in their order.

    Args:
        commitments: those of a budget, the first one first.
        delta: of the budget.
        total_epsilon: its cap.
    Privacy:
        A single commitment was fixed before any result, so the smaller of PLD and filter holds. If only PLD lets it in,
        nothing is admitted after it.
    """
    if not commitments:
        return 0.0
    first, releases = commitments[0].releases, [release for one in commitments for release in one.releases]
    found = filter_epsilon(releases, first=first, delta=delta, total_epsilon=total_epsilon)
    return found if commitments[1:] else min(found, accounting.epsilon(first, delta=delta))


def noise_left(
    commitments: Sequence[Commitment], sample_rate: float, steps: int, *, delta: float, total_epsilon: float
) -> float | None:
    """Return the noise multiplier of a training that uses all that commitments leave of a cap; None if there is none.

    The guarantee does not rest on it: `Budget.commit` computes the cost again.
    """

    def cost(sigma: float, accountant: str) -> float:
        one = Release(sigma, sample_rate, count=steps)
        if not commitments and accountant != "pld":  # faster: the last search starts where the one before ended
            return accounting.epsilon([one], delta=delta, accountant="rdp")
        return cost_of([*commitments, Commitment("", (one,), "", "")], delta=delta, total_epsilon=total_epsilon)

    return noise_within(cost, total_epsilon)
