"""The durable record of every release. The epsilon spent can be computed from the file alone.

The file holds one JSON object per line: first the plan's public numbers, then one line per release. PrivateGradient
writes a line to disk before it returns the gradient that the line pays for. A process killed at any moment has
therefore charged at least as much as it released.

Each line ends with a checksum of the line and of the checksum before it. A ledger with a changed, removed, added or
moved line is therefore refused when it is opened. The file alone cannot show two things:

- If it is cut back at the end of a line, it is a valid ledger of a shorter run. Keep a copy of it, or the checkpoint:
  a checkpoint is refused if its ledger lacks lines that the checkpoint has seen.
- The checksum finds accidents and careless edits, but is not a signature. Anyone can edit a line and compute all
  checksums after it again.
"""

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

from privgrad.accounting import Accountant, Release, epsilon
from privgrad.errors import (
    BudgetExceededError,
    PrivacyError,
    SamplingError,
    expected,
    file_problem,
    require_integer,
    require_nonnegative,
    require_path,
    require_rate,
)
from privgrad.rng import this_process
from privgrad.types import SamplingScheme

_VERSION = 2
_LONGEST_LINE = 1 << 20  # bytes; a file that is not a ledger must not fill the memory
_PATIENCE = 0.1  # seconds to wait for the lock
_FIRST, _LATER, _SEAL = b'{"ledger_version": ', b'{"draw": ', b', "checksum": "'


def is_in_use(path: Path) -> bool:
    """Return whether a writer has locked the ledger at this path now."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Ledger:
    """A record of releases and their epsilon, in memory or in a file that survives the process.

    PrivateGradient charges each release to it. Threads may share a ledger. It has one holder: it cannot be copied or
    pickled, and a forked process can read its counts but cannot charge.

    Args:
        path: file to append to, created if absent; None keeps the record in memory.
        read_only: open the file for reading only. Takes no lock and refuses every charge.
    Raises:
        PrivacyError: the file is not a ledger, is damaged, has a different version, cannot be written, or is locked by
            a running training.
    Attributes:
        was_cut_off: whether the file ended in an unfinished line. Nothing was released for that line.
    Privacy:
        The guarantee rests on it: the epsilon of a run is computed from its lines. It holds public numbers and, under
        a research seed, hashes of released gradients: safe to publish.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        if path is not None:
            require_path("Ledger", "path", path, "give ledger.jsonl in a run's folder")
        self.path = None if path is None else Path(path).absolute()
        self.plan_facts: dict[str, Any] = {}
        self.was_cut_off = False
        self._read_only = read_only
        self._counts: dict[Release, int] = {}
        self._draws: dict[str, str | None] = {}
        self._descriptor: int | None = None
        self._size = 0
        self._head = ""
        self._heads: set[str] = set()
        self._turn = threading.RLock()
        self._process = this_process()
        if self.path is not None:
            self._open(self.path)

    @property
    def charged(self) -> list[Release]:
        """The releases charged so far, in the form that accounting.epsilon takes."""
        return [Release(r.noise_multiplier, r.sample_rate, r.scheme, count) for r, count in self._counts.items()]

    @property
    def releases(self) -> int:
        """The number of releases charged so far."""
        return sum(self._counts.values())

    @property
    def seeded_releases(self) -> int:
        """The number of releases drawn under a research seed. Anyone who knows the seed can remove their noise."""
        return sum(digest is not None for digest in self._draws.values())

    @property
    def head(self) -> str:
        """The checksum of the last line, which depends on all lines before it; "" without a file."""
        return self._head

    def went_through(self, head: str) -> bool:
        """Return whether `head` was once the head of this ledger, that is, the checksum of one of its lines.

        A checkpoint stores the head of its ledger. On resume, `require_resumable` calls this to refuse a checkpoint
        whose ledger is a different one or has lost lines.
        """
        return head in self._heads

    def epsilon(self, *, delta: float, accountant: Accountant = "pld", assume_poisson: bool = False) -> float:
        """Compute the epsilon of all releases charged so far; see accounting.epsilon.

        Args:
            delta: in (0, 1).
            accountant: as in accounting.epsilon.
            assume_poisson: as in accounting.epsilon.
        """
        return epsilon(self.charged, delta=delta, accountant=accountant, assume_poisson=assume_poisson)

    def bind(self, plan_facts: Mapping[str, Any]) -> None:
        """Write the plan's public numbers to a new ledger, or require that an old ledger holds the same numbers.

        PrivateGradient calls this once, before its first release.

        Raises:
            PrivacyError: the ledger was written under a different plan, or a value is not one that JSON can hold.
        """
        with self._one_at_a_time():
            if not self.plan_facts:
                self._append({"ledger_version": _VERSION, "plan": dict(plan_facts)})
                self.plan_facts = dict(plan_facts)
                return
        differing = [name for name, value in plan_facts.items() if self.plan_facts.get(name) != value]
        if differing:
            remedy = "keep the plan, or start a new ledger and add the two epsilons up"
            if "noise_multiplier" in differing:
                sigma = self.plan_facts.get("noise_multiplier")
                remedy += f"; for more steps, PrivacyPlan(noise_multiplier={sigma}, steps=..., ...) keeps the noise"
            raise expected(
                "Ledger.bind",
                f"the plan's {', '.join(differing)}",
                f"to be as recorded ({', '.join(str(self.plan_facts.get(name)) for name in differing)})",
                ", ".join(str(plan_facts[name]) for name in differing),
                remedy,
            )

    def admit(self, draw: str, *, limit: int, repeatable: bool) -> None:
        """Raise the error that `charge` would raise, before the gradient of the step is computed.

        Args:
            draw: as in charge.
            limit: as in charge.
            repeatable: whether a draw that is already charged may be computed again, as under a research seed.
        Raises:
            BudgetExceededError: the limit has been reached.
            SamplingError: the draw is already charged, and is not repeatable.
        """
        with self._one_at_a_time():
            is_known, spent = draw in self._draws, self.releases
        if is_known:
            if not repeatable:
                remedy = "draw a new batch: the accounting counts each draw once"
                got = f"draw {draw}, which is already charged"
                raise expected("PrivateGradient", "batch", "to be used once", got, remedy, SamplingError)
        elif spent >= limit:
            raise expected(
                "Ledger.charge",
                "releases",
                f"to be at most the plan's {limit} steps",
                spent + 1,
                "stop here, or make a plan with more steps, at a higher epsilon; to resume a run that was interrupted, "
                "load its model and draw plan.batches(..., start=private_grad.ledger.releases)",
                BudgetExceededError,
            )

    def charge(self, release: Release, *, draw: str, limit: int, digest: str | None = None) -> None:
        """Record one release durably. PrivateGradient calls this before it returns the gradient.

        Args:
            release: one release under the plan that the ledger is bound to.
            draw: name of the random draw that chose its examples. Each draw can be charged and released only once.
            limit: the plan's number of steps.
            digest: hash of the released values, given only under a research seed. If the draw is already charged with
                the same digest, this is the same release, computed again after a resume. It is not charged again.
        Raises:
            BudgetExceededError: the limit has been reached.
            SamplingError: the draw was already charged, with a different digest or with none.
            PrivacyError: the release does not belong to the ledger's plan, or the line could not be written.
        Privacy:
            When this returns, the charge is on disk (fsync), or in memory if the ledger has no path. When it raises,
            nothing was charged, and nothing may be released.
        """
        line: dict[str, Any] = {
            "draw": draw,
            "noise_multiplier": release.noise_multiplier,
            "sample_rate": release.sample_rate,
            "scheme": release.scheme,
        }
        if digest is not None:
            line["digest"] = digest
        with self._one_at_a_time():
            if digest is not None and self._draws.get(draw) == digest:
                return
            self.admit(draw, limit=limit, repeatable=False)
            if self._checked(line) != release:
                raise expected("Ledger.charge", "release", "to have count 1", release, "charge each release separately")
            self._append(line)
            self._count(release, line)

    @property
    def is_open(self) -> bool:
        """Whether this ledger holds its file, to write to it."""
        return self._descriptor is not None

    def close(self) -> None:
        """Close the file and release its lock. The ledger can still be read, but refuses further charges."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._read_only = True

    def __reduce__(self) -> str:
        remedy = "pass the ledger itself, or open its file with read_only=True"
        raise expected("Ledger", "a ledger", "to have one holder", "a copy or a pickle", remedy)

    @contextmanager
    def _one_at_a_time(self) -> Generator[None]:
        """Hold the ledger's lock from lookup to write, so that no other thread charges in between.

        Raises:
            PrivacyError: this process is a fork of the one that opened the ledger.
        """
        if this_process() != self._process:
            remedy = "open a ledger in the process that charges: neither would know of the other's releases"
            condition = f"to be charged by process {self._process[0]}, which opened it"
            raise expected("Ledger", "a ledger", condition, f"process {os.getpid()}, its fork", remedy)
        with self._turn:
            yield

    def _checked(self, line: Mapping[str, Any]) -> Release:
        """Return the release that a line records.

        Raises:
            PrivacyError: its numbers are not those of the ledger's plan.
        """
        plan = self.plan_facts
        release = Release(line["noise_multiplier"], line["sample_rate"], line["scheme"])
        if release != Release(plan["noise_multiplier"], plan["sample_rate"], plan["sampling"]):
            condition = "to have the noise multiplier, sample rate and sampling of the ledger's plan"
            raise expected("Ledger", "each release", condition, release, "restore the file")
        return release

    def _count(self, release: Release, line: Mapping[str, Any]) -> None:
        self._counts[release] = self._counts.get(release, 0) + 1
        self._draws[line["draw"]] = line.get("digest")

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._read_only:
            raise expected(
                "Ledger.charge",
                "ledger",
                "to be open for writing",
                "a closed or read-only ledger",
                "open its file again with Ledger(path)",
            )
        if self._descriptor is None:
            return
        self._require_in_place(self._descriptor)
        try:
            sealed, head = _sealed(self._head, json.dumps(line).encode())
        except TypeError as error:
            remedy = "give the plan plain numbers: float(...), int(...)"
            raise expected("Ledger.bind", "recorded values", "to be plain numbers", error, remedy) from error
        data = sealed + b"\n"
        if len(data) > _LONGEST_LINE:
            remedy = "shorten the descriptions in the plan's facts, such as the source of scales"
            raise expected("Ledger.charge", "a line", f"of at most {_LONGEST_LINE} bytes", len(data), remedy)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
            self._end_at(self._size + len(data), head)
        except BaseException as error:
            # A line written in part must not look like a charge, and must not damage the next line.
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                self.close()
            if not isinstance(error, OSError):
                raise
            raise expected(
                "Ledger.charge",
                f"{self.path}",
                "to take one more line",
                error.strerror,
                "free space, then resume; nothing was charged and nothing released",
            ) from error

    def _require_in_place(self, descriptor: int) -> None:
        """Raise PrivacyError unless the opened file is still at its path and has the size that this writer left."""
        held, got = os.fstat(descriptor), "a different file at this path"
        try:
            in_place = self.path is not None and os.path.samestat(held, os.stat(self.path))
        except OSError as error:
            in_place, got = False, error.strerror
        if in_place and held.st_size != self._size:
            in_place, got = False, f"{held.st_size} bytes, not {self._size}"
        if not in_place:
            remedy = "restore the file as it was, then resume; nothing was charged and nothing released"
            raise expected("Ledger.charge", f"{self.path}", "to be left to its one writer", got, remedy)

    def _end_at(self, size: int, head: str) -> None:
        self._size, self._head = size, head
        self._heads.add(head)

    def _open(self, path: Path) -> None:
        condition = "to be a readable file" if self._read_only else "to be a writable file"
        try:
            if path.exists() and not path.is_file():  # to open a pipe would block
                got = f"the folder {path}" if path.is_dir() else f"{path}, which is not a regular file"
                raise expected("Ledger", "path", condition, got, "give a ledger's path: ledger.jsonl in a run's folder")
            if self._read_only and (problem := file_problem(path)):
                remedy = "give a ledger's path: ledger.jsonl in a run's folder"
                raise expected("Ledger", "path", condition, f"{path}, which {problem}", remedy)
            if not self._read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                self._lock(self._descriptor, path)
            self._read(path)
            if self._descriptor is not None:
                self._end_last_line(self._descriptor)
                directory = os.open(path.parent, os.O_RDONLY)
                os.fsync(directory)  # the name of a new file is durable only once its folder is on disk
                os.close(directory)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            got = f"{path} ({error.strerror})"
            raise expected("Ledger", "path", condition, got, "give a ledger's path") from error

    def _lock(self, descriptor: int, path: Path) -> None:
        """Lock the file for this writer, or raise PrivacyError.

        Retries for a short time, because `is_in_use` also holds a lock while it checks.
        """
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if isinstance(error, BlockingIOError) and time.monotonic() < until:
                    time.sleep(_PATIENCE / 100)
                    continue
                remedy = "wait until it ends, or close() its ledger if it is in this process"
                got = f"{path}, which a running training has locked"
                raise expected("Ledger", "path", "to have one writer", got, remedy) from error

    def _end_last_line(self, descriptor: int) -> None:
        """Remove an unfinished last line, or add the newline that a complete last line lacks."""
        os.ftruncate(descriptor, self._size)
        if self._size and os.pread(descriptor, 1, self._size - 1) != b"\n":
            self._size += os.write(descriptor, b"\n")

    def _read(self, path: Path) -> None:
        def damaged(number: int, raw: bytes, condition: str) -> PrivacyError:
            got = repr(raw[:60].decode(errors="replace"))
            remedy = "restore the file from a copy"
            if number > 1:
                remedy += f" that has all its lines; without a copy, at least {self.releases} releases were made, and"
                remedy += " at most the plan's steps: start a new ledger and add the epsilon of all steps"
            elif not raw.startswith(_FIRST):
                remedy = f"give a ledger's path, or {remedy}"
            return expected("Ledger", f"line {number} of {path}", condition, got, remedy)

        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
                if _is_cut_off(raw, _FIRST if number == 1 else _LATER):
                    self.was_cut_off = True
                    break  # the line was never finished, so its gradient was never released
                line, body = _parsed(raw), raw.removesuffix(b"\n")
                if number == 1 and "ledger_version" in line and line["ledger_version"] != _VERSION:
                    name, got = f"line 1 of {path}", f"version {str(line['ledger_version'])[:20]}"
                    remedy = "resume with the privgrad that wrote it, or start a new ledger and add the two epsilons up"
                    raise expected("Ledger", name, f"to have ledger version {_VERSION}", got, remedy)
                sealed, head = _sealed(self._head, body.rpartition(_SEAL)[0] + b"}")
                if sealed != body:
                    raise damaged(number, raw, "to match its checksum and to follow the line before it")
                try:
                    if number == 1:
                        self.plan_facts = _checked_plan(line["plan"])
                    else:
                        self._count(self._checked(line), line)
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    raise damaged(number, raw, "to be a line of a ledger") from error
                self._end_at(self._size + len(raw), head)
        if not self.plan_facts and self._read_only:
            raise damaged(1, b"", "to be a line of a ledger")


def _sealed(head: str, body: bytes) -> tuple[bytes, str]:
    """Return the JSON object `body` with its checksum added, and that checksum, which also covers `head`."""
    checksum = hashlib.blake2b(head.encode() + body, digest_size=8, person=b"privgrad-ledger").hexdigest()
    return body[:-1] + _SEAL + checksum.encode() + b'"}', checksum


def _is_cut_off(raw: bytes, begins: bytes) -> bool:
    """Return whether a line ends before its JSON object does: the process was killed while it wrote the line.

    `begins` is the text that every line of this kind begins with.
    """
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


def _checked_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's numbers as a dict.

    Raises:
        PrivacyError: a number that epsilon needs is invalid.
    """
    require_nonnegative("Ledger", "noise_multiplier", plan["noise_multiplier"], "restore the file")
    require_rate("Ledger", plan["sample_rate"])
    require_integer("Ledger", "num_examples", plan["num_examples"], 1)
    if plan["sampling"] not in get_args(SamplingScheme):
        raise expected("Ledger", "sampling", "to be 'poisson' or 'fixed'", plan["sampling"], "restore the file")
    return dict(plan)
