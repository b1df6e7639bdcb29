"""Searches for the noise or the number of steps that meets a target.

`accounting` calls them, and checks what they return. The privacy guarantee does not rest on this file: every report
computes epsilon from the noise that was used.
"""

import math
from collections.abc import Callable

_TOLERANCE = 1e-3  # largest relative distance of a calibrated epsilon below its target
_LARGEST_NOISE_MULTIPLIER = 1e7
_SMALLEST_NOISE_MULTIPLIER = 1e-2


def noise_within(cost: Callable[[float, str], float], target: float) -> float | None:
    """Find a sigma whose cost is at most the target, close to the smallest one; None if no sigma meets the target.

    `accounting.calibrate`, `accounting.calibrate_noise_multiplier` and `Budget.calibrate` call it.

    Args:
        cost: (sigma, accountant) -> epsilon, falling in sigma. The accountants are "coarse rdp", "coarse pld" and
            "pld"; the target is met by the last.
        target: > 0.
    """
    # Each search is closer to the accountant of the result, and takes longer for one sigma, than the one before.
    found, slope, root = 1.0, -1.0, None
    for accountant in ("coarse rdp", "coarse pld", "pld"):
        root = _root(cost, accountant, target, found, slope)
        found, slope = root or (found, slope)
    return None if root is None else found


def _root(
    cost: Callable[[float, str], float], accountant: str, target: float, start: float, slope: float
) -> tuple[float, float] | None:
    """Find a sigma whose cost is at most the target, and at most _TOLERANCE below it if the cost is continuous.

    A secant search for log cost over log sigma, which is nearly linear, between the largest sigma known to cost too
    much and the smallest one known not to. `noise_within` calls it.

    Args:
        cost: as in noise_within.
        accountant: its second argument.
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
        found = cost(sigma, accountant)
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


def last_within(is_within: Callable[[int], bool], start: int) -> int:
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
