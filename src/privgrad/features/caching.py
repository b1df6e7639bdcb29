"""Features on disk: computed block by block, resumed after an interruption, and memory-mapped.

The folder holds features of private rows, so it is as private as the rows.
"""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from privgrad.errors import expected, readable, require_choice, require_integer
from privgrad.features.extractor import Copies, Extractor, Rows
from privgrad.progress import bars
from privgrad.sampling.loading import require_alike

_FORMAT = 1  # of the folder
_HEADER, _BLOCKS, _FEATURES = "cache.json", "blocks.jsonl", "features.npy"
_DTYPES = {torch.float32: "float32", torch.float16: "float16"}
_REMEDY = "delete the folder to compute the features again, or give another folder"


def cache(
    extractor: Extractor,
    rows: Rows | Dataset[Any],
    folder: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    block: int = 512,
    progress: bool = True,
) -> Tensor:
    """Return the features of rows, computed once and then read from a folder.

    An interruption loses at most one block: the same call resumes. A finished folder is checked, not computed again.

    Args:
        extractor: an extractor.
        rows: shape (n, ...), texts, or a data set of rows, or of tuples that begin with a row.
        folder: created if needed. Its files are readable by their owner only. None: nothing is stored.
        dtype: float32, or float16 for half the space.
        block: number of rows between two writes, >= 1. A folder keeps its own.
        progress: whether to show a progress bar.
    Returns:
        The features, (n, width). With a folder they are memory-mapped; changes to them do not reach the file.
    Raises:
        PrivacyError: the folder has features of another extractor, of other rows or of another dtype; it is damaged,
            has another version, or is being written by another process. Or most of the rows are public rows of the
            extractor.
    Privacy:
        The features are private. Labels are not stored. Rows are compared with the public rows of the extractor, so
        that statistics of private rows are not mistaken for public ones. Only exact copies are found.
    """
    require_integer("cache", "block", block, 1)
    require_choice("cache", "dtype", _DTYPES.get(dtype, str(dtype)), tuple(_DTYPES.values()))
    data = rows.tensors[0] if isinstance(rows, TensorDataset) else rows
    count = len(cast("Any", data))
    require_integer("cache", "the number of rows", count, 1)
    copies = Copies(extractor, count)
    return cached(extractor, data, folder, dtype=dtype, block=block, progress=progress, copies=copies)


def cached(
    extractor: Extractor,
    data: Any,
    folder: str | os.PathLike[str] | None,
    *,
    dtype: torch.dtype,
    block: int = 512,
    progress: bool = True,
    copies: Copies | None = None,
) -> Tensor:
    """Return features as `cache` does; rows are compared with public ones by `copies`, and public rows by none."""
    count = len(data)
    opened = nullcontext() if folder is None else _opened(Path(folder), extractor, count, dtype)
    with bars(shown=progress) as shown, opened as store:
        task = shown.add_task("features", total=count, note="")
        size = block if store is None else store.block or block
        made: list[Tensor] = []
        for index, start in enumerate(range(0, count, size)):
            part = _slice(data, start, start + size)
            if copies is not None and (shared := copies.add(part)):
                condition = f"to share at most {shared - 1} rows with the public rows of the extractor"
                remedy = "compute statistics on public rows, or call the extractor for the features of public rows"
                raise expected("cache", "rows", condition, f"at least {shared}", remedy)  # the number is private
            if store is None:
                made.append(_features(extractor, part, start, dtype))
            elif not store.holds(index, start, digest := _digest(part)):
                store.add(index, start, size, digest, _features(extractor, part, start, dtype).numpy())
            shown.advance(task, len(part))
        return torch.cat(made) if store is None else store.features()


class _Folder:
    """The files of a cache: a header, a line for each finished block, and the features."""

    def __init__(self, place: Path, log: IO[str], facts: dict[str, Any]) -> None:
        self.place, self.log, self.facts = place, log, facts
        self.block = 0  # rows of a block; 0 without a header
        self.lines: dict[int, dict[str, Any]] = {}
        self.values: Any = None
        if (place / _HEADER).exists():
            self._open()
        elif (place / _FEATURES).exists():
            raise expected("cache", f"{place}", "to be a cache or an empty folder", f"{_FEATURES} without {_HEADER}")

    def _open(self) -> None:
        with self._undamaged(_HEADER):
            header: dict[str, Any] = json.loads((self.place / _HEADER).read_text(encoding="utf-8"))
        for name, value in {"format": _FORMAT, **self.facts}.items():
            if header.get(name) != value:
                condition = f"to be {header.get(name)}, as in {self.place}"
                raise expected("cache", f"the {name.replace('rows', 'number of rows')}", condition, value, _REMEDY)
        self.block = int(header["block"])
        self.log.seek(0)
        content = self.log.read()
        finished = content[: content.rfind("\n") + 1]
        with self._undamaged(_BLOCKS):
            for line in finished.splitlines():
                found = json.loads(line)
                self.lines[found["block"]] = {"data": found["data"], "features": found["features"]}
        # The process may have ended while it wrote a line; that block is computed again.
        self.log.truncate(len(finished.encode()))
        self._map(int(header["width"]), create=not self.lines)

    def _map(self, width: int, *, create: bool) -> None:
        path, shape = self.place / _FEATURES, (int(self.facts["rows"]), width)
        with self._undamaged(_FEATURES):
            if create:
                path.touch(mode=0o600)  # the features are as private as the data
                np.lib.format.open_memmap(path, mode="w+", dtype=self.facts["dtype"], shape=shape)
            self.values = np.load(path, mmap_mode="r+", allow_pickle=False)

    def holds(self, index: int, start: int, digest: str) -> bool:
        """Return whether a block is finished; raise PrivacyError if its rows or its features have changed."""
        if (line := self.lines.get(index)) is None:
            return False
        if line["data"] != digest:
            condition = f"to be those of {self.place}"
            raise expected("cache", f"rows {start} and following", condition, f"rows of digest {digest}", _REMEDY)
        if line["features"] != _checksum(self.values[start : start + self.block]):
            got = f"changed bytes from row {start}"
            raise expected("cache", f"{self.place / _FEATURES}", "to be undamaged", got, _REMEDY)
        return True

    def add(self, index: int, start: int, size: int, digest: str, features: np.ndarray) -> None:
        if not self.block:  # the first block that is written
            header = {"format": _FORMAT, **self.facts, "width": features.shape[1], "block": size}
            partial = self.place / f"{_HEADER}.partial"
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.place / _HEADER)
            self.block = size
            self._map(features.shape[1], create=True)
        self.values[start : start + len(features)] = features
        self.values.flush()
        self.log.write(json.dumps({"block": index, "data": digest, "features": _checksum(features)}) + "\n")
        self.log.flush()
        os.fsync(self.log.fileno())

    def features(self) -> Tensor:
        """Return all features, memory-mapped; changes stay in memory."""
        return torch.from_numpy(np.load(self.place / _FEATURES, mmap_mode="c", allow_pickle=False))

    def _undamaged(self, name: str) -> AbstractContextManager[None]:
        return readable("cache", f"{self.place / name}", "to be undamaged", _REMEDY)


@contextmanager
def _opened(place: Path, extractor: Extractor, count: int, dtype: torch.dtype) -> Generator[_Folder]:
    """Open a folder, which is created if needed, for this process only."""
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    (place / _BLOCKS).touch(mode=0o600)  # hashes of rows, and their number
    with (place / _BLOCKS).open("a+", encoding="utf-8") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "wait for the other process, or give another folder"
            raise expected("cache", str(place), "to have no other writer", "a running process", remedy) from error
        yield _Folder(place, log, {"extractor": extractor.digest(), "rows": count, "dtype": _DTYPES[dtype]})


def _slice(data: Any, start: int, stop: int) -> Rows:
    if not isinstance(data, Dataset):
        return data[start:stop]
    given = cast("Any", data)
    items = (given[index] for index in range(start, min(stop, len(given))))
    rows: list[Any] = [item[0] if isinstance(item, tuple | list) else item for item in items]
    if not isinstance(rows[0], Tensor):
        return rows
    require_alike("cache", rows)  # one float among bytes would turn all of them into floats
    return torch.stack(rows)


def _features(extractor: Extractor, rows: Rows, start: int, dtype: torch.dtype) -> Tensor:
    made: Tensor = extractor(rows, first=start).cpu().to(dtype)
    if not bool(made.isfinite().all()):
        raise expected("cache", "dtype", "to hold all features", f"{dtype}, which overflows", "use dtype=torch.float32")
    return made


def _digest(rows: Rows) -> str:
    if not isinstance(rows, Tensor):
        return hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()
    digest = hashlib.sha256(f"{rows.dtype} {tuple(rows.shape)} ".encode())
    digest.update(rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checksum(features: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(features).data)
