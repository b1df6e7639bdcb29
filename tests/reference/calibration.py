"""Calibration by bisection, the slow way: the smallest sigma by PLD to 1e-3, from a quarter up."""

from collections.abc import Sequence

from privgrad.accounting.accountant import Release, epsilon


def smallest_sigma(target: float, delta: float, rate: float, steps: int, besides: Sequence[Release] = ()) -> float:
    def is_safe(sigma: float) -> bool:
        return epsilon([Release(sigma, rate, count=steps), *besides], delta=delta) <= target

    low, high = 0.25, 0.25
    while not is_safe(high):
        low, high = high, 2 * high
    while high / low > 1 + 1e-3 and not is_safe(low):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_safe(middle) else (middle, high)
    return high
