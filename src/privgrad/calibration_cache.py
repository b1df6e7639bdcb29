"""A cache of calibrated noise multipliers in the user's own cache folder, so that no calibration is computed twice.

Only `accounting.calibrate_noise_multiplier` calls it. The privacy guarantee does not rest on this file: plan and ledger
compute epsilon from the noise multiplier that was used. A wrong number here would miss a target, and every report would
show the epsilon that it costs.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from privgrad.user_cache import cache

_METHOD = 1  # of calibration; another number lets older entries lie


def folder() -> Path:
    """Return the cache's folder: ${XDG_CACHE_HOME:-~/.cache}/privgrad/noise."""
    return cache("noise")


def key_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a noise multiplier depends on: the numbers, the method and the accountant's version."""
    return {**numbers, "method": _METHOD, "dp_accounting": version("dp-accounting")}


def found(key: Mapping[str, Any]) -> float | None:
    """Return the noise multiplier that was kept for a key; None if there is none, or if its file is damaged."""
    try:
        held: Any = json.loads(_path(key).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(held, dict):
        return None
    kept = cast("dict[str, Any]", held)
    sigma = kept.get("noise_multiplier") if kept.get("key") == dict(key) else None
    if kept.get("checksum") != _checksum(key, sigma):
        return None
    return sigma if isinstance(sigma, float) and 0 < sigma < math.inf else None


def keep(key: Mapping[str, Any], noise_multiplier: float) -> None:
    """Keep the noise multiplier of a key. A folder that cannot be written to is left alone."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete: several processes may calibrate at once.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            held = {"key": dict(key), "noise_multiplier": noise_multiplier}
            file.write(json.dumps({**held, "checksum": _checksum(key, noise_multiplier)}))
        os.replace(file.name, path)
    except OSError:
        return


def _checksum(key: Mapping[str, Any], noise_multiplier: object) -> str:
    """Return a hash of an entry, by which `found` knows a damaged one."""
    text = json.dumps([dict(key), noise_multiplier], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _path(key: Mapping[str, Any]) -> Path:
    """Return the file of a key."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    return folder() / f"{digest}.json"
