"""The durable record of every release: what was charged can be recomputed from the file alone.

One JSON object a line: first the plan's public numbers, then one line for each release. A line is on disk before
the gradient that it pays for leaves the private_grad, so a process killed at any moment has charged at least what it
released.

Each line ends with a checksum of itself and of the checksum before it, so that a line changed, removed, added or moved
is refused on opening. Two things the file alone cannot tell. Cut back at the end of a line, it is the ledger of a
shorter run: keep a copy, or the checkpoint, which is refused beside a ledger that lacks what it has seen. And the
checksum finds accidents and careless edits; it is no signature: whoever computes it anew for all that follows passes.
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
_LONGEST_LINE = 1 << 20  # bytes: what is no ledger shall not fill the memory
_PATIENCE = 0.1  # seconds to wait for the lock
_FIRST, _LATER, _SEAL = b'{"ledger_version": ', b'{"draw": ', b', "checksum": "'


def is_in_use(path: Path) -> bool:
    """Whether someone writes to the ledger of that path now."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Ledger:
    """Counts releases, and their epsilon; in memory, or in a file that survives the process.

    Threads may share one. No second holder may charge to it: it can be neither copied nor pickled, and a fork may only
    look.

    Args:
        path: file to append to, made if absent; None keeps the record in memory.
        read_only: only look: takes no lock, and refuses every charge.
    Raises:
        PrivacyError: the file is not a ledger, is damaged or of another version, cannot be written, or another process
            is writing to it.
    Attributes:
        was_cut_off: whether the file ended in a line that was never finished, for which nothing was released.
    Privacy:
        Holds public numbers and, under a research seed, hashes of released gradients: safe to publish.
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
        """What has been charged, as accounting.epsilon takes it."""
        return [Release(r.noise_multiplier, r.sample_rate, r.scheme, count) for r, count in self._counts.items()]

    @property
    def releases(self) -> int:
        """How many releases have been charged."""
        return sum(self._counts.values())

    @property
    def seeded_releases(self) -> int:
        """How many releases were drawn under a research seed: whoever knows it can take their noise away."""
        return sum(digest is not None for digest in self._draws.values())

    @property
    def head(self) -> str:
        """Checksum of the last line, and with it of all before; "" without a file."""
        return self._head

    def went_through(self, head: str) -> bool:
        """Whether `head` was once this ledger's: whether it begins with the very lines that had it."""
        return head in self._heads

    def epsilon(self, *, delta: float, accountant: Accountant = "pld", assume_poisson: bool = False) -> float:
        """Epsilon of everything charged so far; see accounting.epsilon."""
        return epsilon(self.charged, delta=delta, accountant=accountant, assume_poisson=assume_poisson)

    def bind(self, plan_facts: Mapping[str, Any]) -> None:
        """Write the plan's public numbers to a new ledger; require that an old one holds the same.

        Raises:
            PrivacyError: the ledger was kept under other numbers.
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
        """Raise what `charge` would raise, before the work is done.

        Args:
            draw: as in charge.
            limit: as in charge.
            repeatable: whether a draw that is already charged may be recomputed, as under a research seed.
        """
        with self._one_at_a_time():
            is_known, spent = draw in self._draws, self.releases
        if is_known:
            if not repeatable:
                remedy = "draw a new one: the accounting counts each draw once"
                got = f"draw {draw} again"
                raise expected("PrivateGradient", "batch", "to be used once", got, remedy, SamplingError)
        elif spent >= limit:
            raise expected(
                "Ledger.charge",
                "releases",
                f"to stay within the plan's {limit} steps",
                f"{spent} charged and one more asked for",
                "stop here, or make a plan with more steps and pay for it; to go on with a run that was interrupted, "
                "load its model and draw plan.batches(..., start=private_grad.ledger.releases)",
                BudgetExceededError,
            )

    def charge(self, release: Release, *, draw: str, limit: int, digest: str | None = None) -> None:
        """Record one release, durably, before it leaves.

        Args:
            release: one release under the plan that the ledger is bound to.
            draw: name of the random draw that chose its examples; a draw is charged for once, and serves once.
            limit: number of releases the plan pays for.
            digest: hash of the released values, given only under a research seed. A draw that is already charged
                with the same digest is the very same release, recomputed after a resume: it costs nothing again.
        Raises:
            BudgetExceededError: the limit has been reached.
            SamplingError: the draw has served another release.
            PrivacyError: not a release of this ledger's plan, or the line could not be written.
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
                raise expected("Ledger.charge", "release", "to count once", release, "charge each release by itself")
            self._append(line)
            self._count(release, line)

    @property
    def is_open(self) -> bool:
        """Whether this ledger holds its file, to write to it."""
        return self._descriptor is not None

    def close(self) -> None:
        """Release the file and its lock. The ledger still answers, but takes no more charges."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._read_only = True

    def __reduce__(self) -> str:
        remedy = "pass the ledger itself, or open its file with read_only=True"
        raise expected("Ledger", "a ledger", "to have one holder", "a request to copy it", remedy)

    @contextmanager
    def _one_at_a_time(self) -> Generator[None]:
        """From what is looked up to what is written, no other thread comes between; nor does a fork charge."""
        if this_process() != self._process:
            remedy = "open one in the process that charges: neither would know of the other's releases"
            raise expected("Ledger", "a ledger", "to be charged in its own process", "a charge in a fork", remedy)
        with self._turn:
            yield

    def _checked(self, line: Mapping[str, Any]) -> Release:
        """The release that a line tells of, which must be one of the plan's."""
        plan = self.plan_facts
        release = Release(line["noise_multiplier"], line["sample_rate"], line["scheme"])
        if release != Release(plan["noise_multiplier"], plan["sample_rate"], plan["sampling"]):
            raise expected("Ledger", "each release", "to be of the ledger's plan", release, "restore the file")
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
                "a closed or read-only one",
                "open it anew",
            )
        if self._descriptor is None:
            return
        self._require_in_place(self._descriptor)
        try:
            sealed, head = _sealed(self._head, json.dumps(line).encode())
        except TypeError as error:
            remedy = "give the plan plain numbers: float(...), int(...)"
            raise expected("Ledger.bind", "what is recorded", "to be plain numbers", error, remedy) from error
        data = sealed + b"\n"
        if len(data) > _LONGEST_LINE:
            remedy = "shorten what describes the run"
            raise expected("Ledger.charge", "a line", f"of at most {_LONGEST_LINE} bytes", len(data), remedy)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
            self._end_at(self._size + len(data), head)
        except BaseException as error:
            # What may have been written in part must not look like a charge, nor spoil the next line.
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
        """Raise PrivacyError unless the file is still where it was opened, and ends where this writer left it."""
        held, got = os.fstat(descriptor), "another file there"
        try:
            in_place = self.path is not None and os.path.samestat(held, os.stat(self.path))
        except OSError as error:
            in_place, got = False, error.strerror
        if in_place and held.st_size != self._size:
            in_place, got = False, f"{held.st_size} bytes, not {self._size}"
        if not in_place:
            remedy = "put it back as it was, then resume; nothing was charged and nothing released"
            raise expected("Ledger.charge", f"{self.path}", "to be left to its one writer", got, remedy)

    def _end_at(self, size: int, head: str) -> None:
        self._size, self._head = size, head
        self._heads.add(head)

    def _open(self, path: Path) -> None:
        condition = "to be a readable file" if self._read_only else "to be a file that takes more lines"
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for
                got = f"the folder {path}" if path.is_dir() else f"{path}, no file that keeps what it is given"
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
                os.fsync(directory)  # a new file's name is durable only with its folder
                os.close(directory)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            got = f"{path} ({error.strerror})"
            raise expected("Ledger", "path", condition, got, "give a ledger's path") from error

    def _lock(self, descriptor: int, path: Path) -> None:
        """Become the file's one writer, or raise PrivacyError. Retry: a look (`is_in_use`) holds a lock, too."""
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
                got = f"{path}, in use by another training"
                raise expected("Ledger", "path", "to have one writer", got, remedy) from error

    def _end_last_line(self, descriptor: int) -> None:
        """Remove a last line that was cut off, end one that only lacks its end."""
        os.ftruncate(descriptor, self._size)
        if self._size and os.pread(descriptor, 1, self._size - 1) != b"\n":
            self._size += os.write(descriptor, b"\n")

    def _read(self, path: Path) -> None:
        def damaged(number: int, raw: bytes, condition: str) -> PrivacyError:
            got = repr(raw[:60].decode(errors="replace"))
            remedy = "restore the file from a copy"
            if number > 1:
                remedy += f" that has all its lines; without one, at least {self.releases} releases were made, and at"
                remedy += " most the plan's steps: start a new ledger and add the epsilon of all steps"
            elif not raw.startswith(_FIRST):
                remedy = f"give a ledger's path, or {remedy}"
            return expected("Ledger", f"line {number} of {path}", condition, got, remedy)

        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
                if _is_cut_off(raw, _FIRST if number == 1 else _LATER):
                    self.was_cut_off = True
                    break  # so its gradient never left the private_grad
                line, body = _parsed(raw), raw.removesuffix(b"\n")
                if number == 1 and "ledger_version" in line and line["ledger_version"] != _VERSION:
                    name, got = f"line 1 of {path}", f"version {str(line['ledger_version'])[:20]}"
                    remedy = "go on with the privgrad that wrote it, or start a new one and add the two epsilons up"
                    raise expected("Ledger", name, f"to be of a ledger of version {_VERSION}", got, remedy)
                sealed, head = _sealed(self._head, body.rpartition(_SEAL)[0] + b"}")
                if sealed != body:
                    raise damaged(number, raw, "to match its checksum and to follow the line before it")
                try:
                    if number == 1:
                        self.plan_facts = _checked_plan(line["plan"])
                    else:
                        self._count(self._checked(line), line)
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    raise damaged(number, raw, "to be a ledger's") from error
                self._end_at(self._size + len(raw), head)
        if not self.plan_facts and self._read_only:
            raise damaged(1, b"", "to be a ledger's")


def _sealed(head: str, body: bytes) -> tuple[bytes, str]:
    """A line, of the JSON object `body`, with its checksum after one of checksum `head`; and that checksum."""
    checksum = hashlib.blake2b(head.encode() + body, digest_size=8, person=b"privgrad-ledger").hexdigest()
    return body[:-1] + _SEAL + checksum.encode() + b'"}', checksum


def _is_cut_off(raw: bytes, begins: bytes) -> bool:
    """Whether a line ends before its object does, as one that was being written when the process was killed."""
    if raw.endswith(b"\n") or len(raw) == _LONGEST_LINE or raw[: len(begins)] != begins[: len(raw)]:
        return False
    try:
        json.JSONDecoder().raw_decode(raw.decode("latin-1"))
    except ValueError:
        return True
    except RecursionError:
        return False
    return False  # whole: all that may lack is the end of the line


def _parsed(raw: bytes) -> dict[str, Any]:
    """The object of a line; empty if it is none."""
    try:
        line: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", line) if isinstance(line, dict) else {}


def _checked_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's numbers, of which those that epsilon needs must be such."""
    require_nonnegative("Ledger", "noise_multiplier", plan["noise_multiplier"], "restore the file")
    require_rate("Ledger", plan["sample_rate"])
    require_integer("Ledger", "num_examples", plan["num_examples"], 1)
    if plan["sampling"] not in get_args(SamplingScheme):
        raise expected("Ledger", "sampling", "to be 'poisson' or 'fixed'", plan["sampling"], "restore the file")
    return dict(plan)
