"""A bridge to TensorBoard: the evaluations of a training as scalars."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch.utils.tensorboard import SummaryWriter

_NOT_PRIVATE = "NOT_PRIVATE"  # TensorBoard allows no spaces in tags


class TensorBoard:
    """A writer of each evaluation of `fit`: `pg.fit(..., on_evaluate=TensorBoard("runs/mine"))`. Close it afterwards.

    Numbers computed before the noise have names that begin with raw_; they are written under the tag NOT_PRIVATE.

    Args:
        folder: folder for the event files; `tensorboard --logdir` shows all files below a folder.
        names: new names for some of the numbers, by their old names.
    """

    def __init__(self, folder: str | os.PathLike[str], *, names: Mapping[str, str] | None = None) -> None:
        self._writer = SummaryWriter(str(folder))
        self._names = dict(names or {})

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of one evaluation by name; a number in a nested table has its path as name."""
        for path, value in _numbers(row):
            name = "/".join([self._names.get(path[0], path[0]), *path[1:]])
            is_raw = any(part.startswith("raw_") for part in path)
            self._writer.add_scalar(f"{_NOT_PRIVATE}/{name}" if is_raw else name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _numbers(row: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield each finite number of a row, or of a table within it, with the names that lead to it."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(cast("Mapping[str, Any]", value), (*path, name))
        elif isinstance(value, int | float) and name != "step" and math.isfinite(value):
            yield (*path, name), float(value)
