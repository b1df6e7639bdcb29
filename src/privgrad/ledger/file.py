"""The file of a ledger: one JSON object per line, written to disk before the call returns, and locked by its writer.

Each line ends with a checksum of the line and of the checksum before it. A file with a changed, removed, added or
moved line is therefore refused when it is opened. The file alone cannot show two things:

- If it is cut back at the end of a line, it is a valid ledger of a shorter run. Keep a copy of it, or the checkpoint:
  a checkpoint is refused if its ledger lacks lines that the checkpoint has seen.
- The checksum finds accidents and careless edits, but is not a signature. Anyone can edit a line and compute all
  checksums after it again.

The lock is `flock` on the file itself. It ends with its process, leaves no second file, and lets everybody read. No
portable library keeps this on Windows: there, a locked byte cannot be read through any other handle. filelock and
portalocker lock the first bytes, so a ledger could not be read during its training. privgrad is not imported there.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast
from weakref import WeakSet

from privgrad.errors import PrivacyError, expected, file_problem

VERSION = 3
TWO_LEDGERS = "start a new ledger and add up both epsilons and both deltas"  # a remedy
_LONGEST_LINE = 1 << 24  # bytes; a file that is not a ledger must not fill the memory
_WAIT = 0.1  # seconds to wait for the lock
_FIRST, _LATER, _SEAL = b'{"ledger_version": ', b'{"draw": ', b', "checksum": "'

Kind = Literal["ledger", "budget"]
Accept = Callable[[int, Mapping[str, Any]], None]
_KEYS: dict[Kind, str] = {"ledger": "plan", "budget": "budget"}  # of the first line


def is_in_use(path: Path) -> bool:
    """Return whether a writer has locked the ledger at this path now."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class LedgerFile:
    """The lines of a ledger on disk, which `accept` reads, and the lock of their writer, awaited `patience` seconds."""

    def __init__(
        self, kind: Kind, path: Path, *, read_only: bool, accept: Accept, patience: float = _WAIT, create: bool = True
    ) -> None:
        self._kind, self.path, self._patience, self._create = kind, path, patience, create
        self.head = ""  # the checksum of the last line, which depends on all lines before it; "" for an empty file
        self.was_cut_off = False  # whether the file ended in an unfinished line
        self._heads: set[str] = set()
        self._size = 0
        self._descriptor: int | None = None
        self._open(accept, read_only=read_only)
        _held.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the file is held for writing."""
        return self._descriptor is not None

    def went_through(self, head: str) -> bool:
        """Return whether `head` is the checksum of one of the lines."""
        return head in self._heads

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line durably, or raise PrivacyError and leave the file as it was."""
        if self._descriptor is None:
            raise not_open()
        self._require_in_place(self._descriptor)
        try:
            sealed, head = _sealed(self.head, json.dumps(line).encode())
        except TypeError as error:
            remedy = "give the plan plain numbers: float(...), int(...)"
            raise expected("Ledger.bind", "recorded values", "to be plain numbers", error, remedy) from error
        data = sealed + b"\n"
        if len(data) > _LONGEST_LINE:
            remedy = "shorten the descriptions in the plan's facts, such as a source, or release fewer values"
            raise expected("Ledger.charge", "a line", f"of at most {_LONGEST_LINE} bytes", len(data), remedy)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            _to_disk(self._descriptor)
            self._end_at(self._size + len(data), head)
        except BaseException as error:
            # A line written in part must not look like a charge, and must not damage the next line.
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                self.close()
            if not isinstance(error, OSError):
                raise
            remedy = "free space, then resume; nothing was charged and nothing released"
            raise expected("Ledger.charge", f"{self.path}", "to take one more line", error.strerror, remedy) from error

    def _require_in_place(self, descriptor: int) -> None:
        """Raise PrivacyError unless the opened file is still at its path and has the size that this writer left."""
        held, got = os.fstat(descriptor), None
        try:
            if not os.path.samestat(held, os.stat(self.path)):
                got = "a different file at this path"
            elif held.st_size != self._size:
                got = f"{held.st_size} bytes, not {self._size}"
        except OSError as error:
            got = error.strerror or f"{error}"
        if got is not None:
            remedy = "restore the file as it was, then resume; nothing was charged and nothing released"
            raise expected("Ledger.charge", f"{self.path}", "to be left to its one writer", got, remedy)

    def _end_at(self, size: int, head: str) -> None:
        self._size = size
        self.head = head
        self._heads.add(head)

    def _open(self, accept: Accept, *, read_only: bool) -> None:
        """Open and lock the file, and read its lines; close it again if any of this fails."""
        path = self.path
        condition = "to be a readable file" if read_only else "to be a writable file"
        try:
            problem = file_problem(path)
            if (problem and read_only) or (path.exists() and not path.is_file()):  # to open a pipe would block
                got = f"{path}, which {problem or 'is not a regular file'}"
                raise expected("Ledger", "path", condition, got, "give a ledger's path: ledger.jsonl in a run's folder")
            if not read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
                created = os.O_CREAT if self._create else 0
                self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | created, 0o644)
                _lock(self._descriptor, path, self._patience)
            self._read(accept, read_only=read_only)
            if self._descriptor is not None:
                os.ftruncate(self._descriptor, self._size)  # without an unfinished last line
                if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":
                    self._size += os.write(self._descriptor, b"\n")
                directory = os.open(path.parent, os.O_RDONLY)
                _to_disk(directory)  # the name of a new file is durable only once its folder is on disk
                os.close(directory)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise expected("Ledger", "path", condition, f"{path} ({error.strerror})", "give a ledger's path") from error

    def _read(self, accept: Accept, *, read_only: bool) -> None:
        """Check each line of the file and pass it to `accept`; an unfinished last line is left out."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
                if _is_cut_off(raw, _FIRST if number == 1 else _LATER):
                    self.was_cut_off = True
                    break  # the line was never finished, so its gradient was never released
                line, body = _parsed(raw), raw.removesuffix(b"\n")
                if number == 1 and "ledger_version" in line and line["ledger_version"] != VERSION:
                    got = f"version {str(line['ledger_version'])[:20]}"
                    remedy = f"resume with the privgrad that wrote it, or {TWO_LEDGERS}"
                    raise expected("Ledger", f"line 1 of {self.path}", f"to have ledger version {VERSION}", got, remedy)
                sealed, head = _sealed(self.head, body.rpartition(_SEAL)[0] + b"}")
                if sealed != body:
                    raise self._damaged(number, raw, "to match its checksum and to follow the line before it")
                try:
                    accept(number, line)
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                    raise self._damaged(number, raw, f"to be a line of a {self._kind}") from error
                self._end_at(self._size + len(raw), head)
        if not self._size and read_only:
            raise self._damaged(1, b"", f"to be a line of a {self._kind}")

    def _damaged(self, number: int, raw: bytes, condition: str) -> PrivacyError:
        """Return the error for a line that is not valid; the caller raises it."""
        function, name = self._kind.capitalize(), f"line {number} of {self.path}"
        remedy = "restore the file from a copy"
        other: Kind = "budget" if self._kind == "ledger" else "ledger"
        if number == 1 and _KEYS[other] in _parsed(raw):
            remedy = f"give a {self._kind}'s path; {other.capitalize()}(path) reads this file"
            return expected(function, name, condition, f"a line of a {other}", remedy)
        if number > 1 and self._kind == "budget":
            remedy += " that has all its lines; without a copy, what was committed is not known"
        elif number > 1:
            remedy += f" that has all its lines; without a copy, at least {number - 2} releases were made, and"
            remedy += " at most the plan's steps: start a new ledger, and add the epsilon and the delta of all steps"
        elif not raw.startswith(_FIRST):
            remedy = f"give a {self._kind}'s path, or {remedy}"
        return expected(function, name, condition, repr(raw[:60].decode(errors="replace")), remedy)


_held: WeakSet[LedgerFile] = WeakSet()


def _let_go() -> None:
    """Close every file in a fork, such as a worker that loads data. It would keep the lock of a killed parent."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go)


def _lock(descriptor: int, path: Path, patience: float) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            # Again for a short time: `is_in_use` also holds a lock while it checks.
            if isinstance(error, BlockingIOError) and time.monotonic() < until:
                time.sleep(_WAIT / 100)
                continue
            remedy = "wait until it ends, or close() its ledger if it is in this process"
            got = f"{path}, which a running training has locked"
            raise expected("Ledger", "path", "to have one writer", got, remedy) from error


def _to_disk(descriptor: int) -> None:
    """Return when a file or a folder is on disk, also on macOS, whose fsync leaves the content in the drive's cache."""
    os.fsync(descriptor)
    full: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        return
    try:
        fcntl.fcntl(descriptor, full)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):  # a file system without it; fsync succeeded
            raise


def not_open() -> PrivacyError:
    """Return the error for a line that a closed or read-only ledger cannot take; the caller raises it."""
    remedy = "open its file again with Ledger(path)"
    return expected("Ledger.charge", "ledger", "to be open for writing", "a closed or read-only ledger", remedy)


def _sealed(head: str, body: bytes) -> tuple[bytes, str]:
    """Return the JSON object `body` with its checksum added, and that checksum, which also covers `head`."""
    checksum = hashlib.blake2b(head.encode() + body, digest_size=8, person=b"privgrad-ledger").hexdigest()
    return body[:-1] + _SEAL + checksum.encode() + b'"}', checksum


def _is_cut_off(raw: bytes, begins: bytes) -> bool:
    """Return whether a line, which begins as `begins`, ends before its JSON object: its writer was killed meanwhile."""
    if raw.endswith(b"\n") or len(raw) == _LONGEST_LINE or raw[: len(begins)] != begins[: len(raw)]:
        return False
    try:
        json.JSONDecoder().raw_decode(raw.decode("latin-1"))
    except ValueError:
        return True
    except RecursionError:
        return False
    return False  # complete: at most the newline is missing


def _parsed(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a line, or an empty dict if the line holds no JSON object."""
    try:
        line: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", line) if isinstance(line, dict) else {}
