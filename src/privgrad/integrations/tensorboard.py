"""TensorBoard: a training's evaluations as scalars."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch.utils.tensorboard import SummaryWriter

_NOT_PRIVATE = "NOT_PRIVATE"  # TensorBoard allows no spaces in tags


class TensorBoard:
    """Writes each evaluation of `fit`, as it is made: `pg.fit(..., on_evaluation=TensorBoard("runs/mine"))`.

    What was computed before the noise, whose names begin with raw_, stands under the tag NOT_PRIVATE.

    Args:
        folder: where event files go; `tensorboard --logdir` shows all that lie below a folder.
        names: other names for some of the numbers.
    """

    def __init__(self, folder: str | os.PathLike[str], *, names: Mapping[str, str] | None = None) -> None:
        self._writer = SummaryWriter(str(folder))
        self._names = dict(names or {})

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Write one row of a curve: its numbers, by their names; numbers within tables by their paths."""
        for path, value in _numbers(row):
            name = "/".join([self._names.get(path[0], path[0]), *path[1:]])
            is_raw = any(part.startswith("raw_") for part in path)
            self._writer.add_scalar(f"{_NOT_PRIVATE}/{name}" if is_raw else name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._writer.close()


def _numbers(row: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(cast("Mapping[str, Any]", value), (*path, name))
        elif isinstance(value, int | float) and name != "step" and math.isfinite(value):
            yield (*path, name), float(value)
