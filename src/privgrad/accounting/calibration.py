"""Search for the noise or the number of steps that meets a target, and keep what was found in the user's cache.

Each entry's epsilon is computed again before it is used, because anyone may have written the file.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

from privgrad.errors import expected, require_positive

T = TypeVar("T")
_METHOD = 1  # of calibration; another number lets older entries lie
_TOLERANCE = 1e-3  # largest relative distance of a calibrated epsilon below its target
_LARGEST_NOISE_MULTIPLIER = 1e7
_SMALLEST_NOISE_MULTIPLIER = 1e-2


def cache(name: str) -> Path:
    """Return a folder in the user's cache: ${XDG_CACHE_HOME:-~/.cache}/privgrad/<name>."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "privgrad" / name


def folder() -> Path:
    """Return the folder of noise multipliers in the user's cache."""
    return cache("noise")


def key_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a noise multiplier depends on: the numbers, the method and the accountant's version."""
    return {**numbers, "method": _METHOD, "dp_accounting": version("dp-accounting")}


def found(key: Mapping[str, Any]) -> float | None:
    """Return the noise multiplier that was kept for a key; None if there is none, or if its file is damaged."""
    try:
        held: Any = json.loads(_path(key).read_text())
        sigma = held["noise_multiplier"]
        is_whole = held["key"] == dict(key) and held["checksum"] == _digest([dict(key), sigma])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sigma if is_whole and isinstance(sigma, float) and 0 < sigma < math.inf else None


def keep(key: Mapping[str, Any], noise_multiplier: float) -> None:
    """Keep the noise multiplier of a key. A folder that cannot be written to is left alone."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete: several processes may calibrate at once.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            held = {"key": dict(key), "noise_multiplier": noise_multiplier}
            file.write(json.dumps({**held, "checksum": _digest([dict(key), noise_multiplier])}))
        os.replace(file.name, path)
    except OSError:
        return


def _path(key: Mapping[str, Any]) -> Path:
    return folder() / f"{_digest(key)}.json"


def _digest(value: object) -> str:
    """Return a hash of plain data, by which `found` knows a damaged entry."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


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
    """Find a sigma whose cost is at most the target, and at most _TOLERANCE below it if the cost is continuous.

    A secant search for log cost over log sigma, which is nearly linear, between the largest sigma known to cost too
    much and the smallest one known not to. `slope` is a guess, < 0; the last one is returned, too.
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
