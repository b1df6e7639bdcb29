"""Search for the noise or the number of steps that meets a target."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from privgrad.errors import expected, require_positive

T = TypeVar("T")
_TOLERANCE = 1e-3  # largest relative distance of a calibrated epsilon below its target
_LARGEST_NOISE_MULTIPLIER = 1e7
_SMALLEST_NOISE_MULTIPLIER = 1e-2


def cache(name: str) -> Path:
    """Return a folder in the user's cache: ${XDG_CACHE_HOME:-~/.cache}/privgrad/<name>."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "privgrad" / name


def noise_within(cost: Callable[[float, str], float], target: float) -> float | None:
    """Find a sigma with cost(sigma, accountant) <= target, close to the smallest one; None if no sigma meets it."""
    # Each search is closer to the accountant of the result, "pld", and takes longer for one sigma, than the one before.
    found, slope, root = 1.0, -1.0, None
    for accountant in ("coarse rdp", "coarse pld", "pld"):
        root = _root(cost, accountant, target, found, slope)
        found, slope = root or (found, slope)
    return None if root is None else found


def _root(
    cost: Callable[[float, str], float], accountant: str, target: float, start: float, slope: float
) -> tuple[float, float] | None:
    """Find a sigma whose cost is at most the target, and at most _TOLERANCE below it if the cost is continuous."""
    # A secant search for log cost over log sigma, which is nearly linear, between the largest sigma known to cost too
    # much and the smallest one known not to. `slope` is a guess, < 0; the last one is returned, too.
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
    """Return the largest integer >= start for which is_within holds, or one above 1e9 for which it holds."""
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


def steps_of(function: str, steps: int | None, epochs: float | None, sample_rate: float) -> int:
    """Return the number of steps, or that of a number of epochs; raise PrivacyError unless one of the two is given."""
    given = one_of(function, steps=steps, epochs=epochs)
    if epochs is None:
        return cast(int, given)
    require_positive(function, "epochs", epochs)
    return math.ceil(epochs / sample_rate - 1e-9)  # 3 / 0.1 is 30.000000000000004 in some roundings


def one_of(function: str, **given: T | None) -> T:
    """Return the one value that is given; raise PrivacyError for two or none."""
    values = [value for value in given.values() if value is not None]
    if len(values) != 1:
        got = ", ".join(f"{name} {value}" for name, value in given.items())
        raise expected(function, f"exactly one of {' and '.join(given)}", "to be given", got)
    return values[0]
