"""The folders that the library keeps in the user's cache.

`calibration_cache`, `pretrained` and the loaders of `data` call it. The privacy guarantee does not rest on this file.
"""

import os
from pathlib import Path


def cache(name: str) -> Path:
    """Return a folder in the user's cache: ${XDG_CACHE_HOME:-~/.cache}/privgrad/<name>."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "privgrad" / name
