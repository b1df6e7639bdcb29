"""Epochs: each example is in k of the t steps of an epoch, which are drawn for it alone, from a key of the epoch.

The key of the running epoch may be kept in a file, so that an interrupted training resumes within the epoch.
Anyone who reads it knows which examples the steps of this epoch use. It is deleted when the epoch has been drawn.
"""

import os
import warnings
from pathlib import Path

import numpy as np

from privgrad.accounting.mechanisms import whole_epochs
from privgrad.errors import readable
from privgrad.processes import ALONE, Processes
from privgrad.rng import RandomSource, Stream
from privgrad.sampling.loading import unusable

_SIZE = 32  # bytes of a key
_SAME = "give the same rows, or delete the file of the key to continue with the next epoch"


def rows_in_step(stream: Stream, steps: int, chosen: int, position: int, first: int, last: int) -> np.ndarray:
    """Return the rows from `first` to `last` - 1 that a step of an epoch uses, given its position among the t steps.

    Each row has `chosen` of the `steps` positions, uniformly: the probability of a set is off by less than a share of
    t 2^-64. The words of a row belong to its number, so any part of the rows can be drawn alone.
    """
    words = stream.uint64(0, chosen * (last - first), chosen * first).reshape(-1, chosen)
    taken = np.empty_like(words)
    for j in range(chosen):  # Floyd's: in place of a taken position, the one that has just become possible
        top = np.uint64(steps - chosen + j)
        drawn = words[:, j] % (top + np.uint64(1))
        taken[:, j] = np.where((taken[:, :j] == drawn[:, None]).any(1), top, drawn)
    return first + np.flatnonzero((taken == position).any(1))


def read_key(file: Path) -> tuple[int, int, bytes]:
    """Return the epoch of a file, its number of rows and its key; -1 without a file. PrivacyError if damaged."""
    if not file.exists():
        return -1, 0, b""
    with readable("plan.batches", f"the key of an epoch, {file},", "to be readable", "delete it"):
        epoch, rows, key = file.read_text().split()
        return int(epoch), int(rows), bytes.fromhex(key)


class EpochKeys:
    """The streams that draw epochs: one for each, from a key that is new at each start, unless a file still holds it.

    Args:
        source: of new keys, which are those of the first process in all of them. Each process must make this call.
        file: keeps the key of the epoch that was begun last, readable for its owner alone (mode 0600). None: no file,
            so that an interrupted training continues with the next epoch. A research seed needs none.
        rows: for a file, the number of rows of all processes. Within an epoch it must stay: a row that gets the number
            of another one may be in more steps than are charged.
    """

    def __init__(
        self, source: RandomSource, file: Path | None = None, processes: Processes = ALONE, *, rows: int = 0
    ) -> None:
        self._file = file if processes.rank == 0 and source.seed is None else None
        with processes.all_succeed():  # the file may be damaged
            held = (-1, 0, b"") if self._file is None else read_key(self._file)
        key, self._held = processes.broadcast_object((source.stream("epochs").shared_key, held))
        self._keys, self._is_seeded, self._rows = Stream(key), source.seed is not None, rows
        self._epoch, self._stream, self._kept = -1, self._keys, -1

    def stream(self, epoch: int) -> Stream:
        """Return the stream of an epoch."""
        if epoch != self._epoch:
            self._epoch, self._stream = epoch, Stream(self._key(epoch))
        return self._stream

    def keep(self, epoch: int) -> None:
        """Keep the key of an epoch in the file from now on."""
        if epoch != self._kept:
            self._write(epoch, self._key(epoch))
            self._kept = epoch

    def first_step(self, step: int, steps: int) -> int:
        """Return where a training resumes after `step` steps: there, or at the next epoch without its key."""
        epoch, rows, _ = self._held
        has_key = epoch == step // steps
        if has_key and rows != self._rows:
            if step % steps:
                raise unusable(
                    "dataset", "to have as many rows as when its epoch began", "another number", _SAME
                )  # it is private
            self._held = -1, 0, b""  # nothing was released in this epoch
        first = step if self._is_seeded or has_key else whole_epochs(step, steps)
        if first > step:
            warnings.warn(
                f"the training continues at step {first}, where the next epoch begins: the key of the epoch that was "
                f"interrupted at step {step} is not here. The whole epoch stays charged; epoch_key=ledger.epoch_key "
                "keeps the key",
                stacklevel=4,
            )
        return first

    def forget(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _key(self, epoch: int) -> bytes:
        held, _, key = self._held
        return key if held == epoch else self._keys.key(epoch, _SIZE)

    def _write(self, epoch: int, key: bytes) -> None:
        if self._file is not None:
            new = self._file.with_name(f"{self._file.name}.new")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{epoch} {self._rows} {key.hex()}")
            new.replace(self._file)
