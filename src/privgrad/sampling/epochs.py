"""Epochs: each example is in k of the t steps of an epoch, which are drawn for it alone, from a key of the epoch.

The key of the running epoch may be kept in a file, so that an interrupted training resumes within the epoch.
Anyone who reads it knows which examples the steps of this epoch use. It is deleted when all of these are charged.
"""

import json
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from privgrad.accounting.mechanisms import whole_epochs
from privgrad.errors import readable
from privgrad.processes import ALONE, Processes
from privgrad.rng import RandomSource, Stream
from privgrad.sampling.loading import unusable

_SIZE = 32  # bytes of a key
_SAME = "give the same rows in the same order; or, to continue with the next epoch, delete"


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


class _Held(NamedTuple):
    """The content of a file: the number of rows, a digest of some of them with its salt, and the keys by epoch."""

    rows: int
    salt: str
    content: str
    keys: Mapping[int, str]

    def write(self, file: Path) -> None:
        new = file.with_name(f"{file.name}.new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as target:
            json.dump(self, target)
        new.replace(file)


def _read(file: Path | None) -> _Held:
    """Return what a file holds, nothing without a file; raise PrivacyError if it is damaged."""
    if file is None or not file.exists():
        return _Held(0, "", "", {})
    with readable("plan.batches", f"the key of an epoch, {file},", "to be readable", "delete it"):
        rows, salt, content, keys = json.loads(file.read_text())
        held = {int(epoch): bytes.fromhex(key).hex() for epoch, key in keys.items()}
        return _Held(int(rows), f"{salt}", f"{content}", held)


def has_key(file: Path | None, epoch: int) -> bool:
    """Return whether a file holds the key of an epoch; raise PrivacyError if it is damaged."""
    return epoch in _read(file).keys


def forget_epochs(file: Path, before: int) -> None:
    """Delete the keys of the epochs before a number, and the file if it holds no others."""
    held = _read(file)
    left = {epoch: key for epoch, key in held.keys.items() if epoch >= before}
    if left:
        held._replace(keys=left).write(file)
    else:
        file.unlink(missing_ok=True)


class EpochKeys:
    """The streams that draw epochs: one for each, from a key that is new at each start, unless a file still holds it.

    Args:
        source: of new keys, which are those of the first process in all of them. Each process must make this call.
        file: keeps the keys of epochs that are not charged whole yet, readable for its owner alone (mode 0600). None:
            no file, so that an interrupted training continues with the next epoch. A research seed needs none.
        rows: for a file, the number of rows of all processes.
        content: for a file, (salt) -> a digest of a few rows by their numbers, or "" for rows that are random. Within
            an epoch, rows must stay: one that gets the number of another may be in more steps than are charged.
    """

    def __init__(
        self,
        source: RandomSource,
        file: Path | None = None,
        processes: Processes = ALONE,
        *,
        rows: int = 0,
        content: Callable[[str], str] = lambda salt: "",
    ) -> None:
        self._path, self._file = file, file if processes.rank == 0 and source.seed is None else None
        with processes.all_succeed():  # the file may be damaged
            held = _read(self._file)
        own = source.stream("epochs").shared_key, held, self._file is not None, secrets.token_hex(16)
        key, self._held, is_kept, salt = processes.broadcast_object(own)
        salt = self._held.salt or salt
        self._own = _Held(rows, salt, content(salt) if is_kept else "", {})
        self._keys, self._is_seeded = Stream(key), source.seed is not None
        self._epoch, self._stream, self._kept = -1, self._keys, set[int]()

    def stream(self, epoch: int) -> Stream:
        """Return the stream of an epoch."""
        if epoch != self._epoch:
            self._epoch, self._stream = epoch, Stream(self._key(epoch))
        return self._stream

    def keep(self, epoch: int) -> None:
        """Keep the key of an epoch in the file from now on, until `forget_epochs`."""
        if self._file is not None and epoch not in self._kept:
            # Worker processes load batches of the next epoch, so the file also keeps the key of the one before.
            kept = {number: key for number, key in _read(self._file).keys.items() if number in self._kept}
            self._own._replace(keys={**kept, epoch: self._key(epoch).hex()}).write(self._file)
            self._kept.add(epoch)

    def first_step(self, step: int, steps: int) -> int:
        """Return where a training resumes after `step` steps: there, or at the next epoch without its key."""
        epoch, is_within = step // steps, step % steps > 0
        has_key = epoch in self._held.keys
        if has_key and is_within:
            before, now = self._held, self._own
            if before.rows != now.rows or (before.content and now.content != before.content):  # it is private
                raise unusable(
                    "dataset", "to have the same rows as when its epoch began", "others", f"{_SAME} {self._path}"
                )
        # Nothing was released in an epoch that begins here, and a key of it may be that of another training.
        self._held = self._held._replace(keys={epoch: self._held.keys[epoch]} if has_key and is_within else {})
        first = step if self._is_seeded or has_key else whole_epochs(step, steps)
        if first > step:
            warnings.warn(
                f"the training continues at step {first}, where the next epoch begins: the key of the epoch that was "
                f"interrupted at step {step} is not here. The whole epoch stays charged; epoch_key=ledger.epoch_key "
                "keeps the key",
                stacklevel=4,
            )
        return first

    def _key(self, epoch: int) -> bytes:
        held = self._held.keys.get(epoch)
        return self._keys.key(epoch, _SIZE) if held is None else bytes.fromhex(held)
