"""Costs that take long to compute, in the user's cache."""

import functools
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

from privgrad.accounting.calibration import cache
from privgrad.accounting.mechanisms import Mechanism, releases_in
from privgrad.progress import waiting

C = TypeVar("C", bound=Callable[..., Any])


def kept(compute: C) -> C:
    """Keep in the user's cache what a function finds for epochs, in a file for each call: one takes up to a minute.

    Files of another version of this code or of its libraries are not read. One that is damaged, or cannot be written,
    counts as none.
    """

    @functools.wraps(compute)
    def read(mechanisms: tuple[Mechanism, ...], *others: Any) -> Any:
        if "coarse rdp" in others or all(one.scheme != "epochs" for one in releases_in(mechanisms)):
            return compute(mechanisms, *others)
        asked = repr((compute.__name__, mechanisms, others, _version()))
        try:
            file = cache("epochs") / f"{_digest(asked)}.json"
        except RuntimeError:  # a user without a home
            return compute(mechanisms, *others)
        with suppress(OSError, ValueError):
            digest, text = file.read_text().split("\n")
            if digest == _digest(text):
                return json.loads(text)[1]
        with waiting("computing a cost of epochs: up to some minutes, once"):
            found = compute(mechanisms, *others)
        text = json.dumps([asked, found])
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"{file.stem}.{os.getpid()}")
            new.write_text(f"{_digest(text)}\n{text}")
            new.replace(file)
        return found

    return cast(C, read)


@functools.cache
def _version() -> list[str]:
    """Return what the cost of epochs depends on besides its arguments."""
    own = [Path(__file__).with_name(name).read_text() for name in ("composition.py", "allocation.py")]
    return [_digest("".join(own)), *map(metadata.version, ("PLD_accounting", "dp_accounting", "numpy", "scipy"))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
