"""The durable record of every release: what was charged can be recomputed from the file alone.

One JSON object a line: first the plan's public numbers, then one line for each release. A line is on disk before
the gradient that it pays for leaves the oracle, so a process killed at any moment has charged at least what it
released.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privgrad.accounting import Accountant, Release, epsilon
from privgrad.errors import BudgetExceededError, PrivacyError, expected

_VERSION = 1


class Ledger:
    """Counts releases, and their epsilon; in memory, or in a file that survives the process.

    Args:
        path: file to append to, made if absent; None keeps the record in memory.
        read_only: only look: takes no lock, and refuses every charge.
    Raises:
        PrivacyError: the file is not a ledger, is damaged, or another process is writing to it.
    Privacy:
        Holds public numbers and, under a research seed, hashes of released gradients: safe to publish.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self.plan_facts: dict[str, Any] = {}
        self._read_only = read_only
        self._counts: dict[Release, int] = {}
        self._digests: dict[int, str] = {}
        self._descriptor: int | None = None
        self._size = 0
        if self.path is not None:
            self._open(self.path)

    @property
    def releases(self) -> int:
        """How many releases have been charged."""
        return sum(self._counts.values())

    def epsilon(self, *, delta: float, accountant: Accountant = "pld", assume_poisson: bool = False) -> float:
        """Epsilon of everything charged so far; see accounting.epsilon."""
        charged = [Release(r.noise_multiplier, r.sample_rate, r.scheme, count) for r, count in self._counts.items()]
        return epsilon(charged, delta=delta, accountant=accountant, assume_poisson=assume_poisson)

    def bind(self, plan_facts: Mapping[str, Any]) -> None:
        """Write the plan's public numbers to a new ledger; require that an old one holds the same.

        Raises:
            PrivacyError: the ledger was kept under other numbers.
        """
        if not self.plan_facts:
            self._append({"ledger_version": _VERSION, "plan": dict(plan_facts)})
            self.plan_facts = dict(plan_facts)
            return
        differing = [name for name, value in plan_facts.items() if self.plan_facts.get(name) != value]
        if differing:
            raise expected(
                "Ledger.bind",
                f"the plan's {', '.join(differing)}",
                f"to be as recorded ({', '.join(str(self.plan_facts.get(name)) for name in differing)})",
                ", ".join(str(plan_facts[name]) for name in differing),
                "keep the plan, or start a new ledger and add the two epsilons up",
            )

    def charge(self, release: Release, *, step: int, limit: int, digest: str | None = None) -> None:
        """Record one release, durably, before it leaves.

        Args:
            release: its noise multiplier, rate and scheme; count must be 1.
            step: its index in the run.
            limit: number of releases the plan pays for.
            digest: hash of the released values, known only under a research seed. A step that is already charged
                with the same digest is the very same release, recomputed after a resume: it costs nothing again.
        Raises:
            BudgetExceededError: the limit has been reached; nothing was charged.
            PrivacyError: the line could not be written; nothing was charged, and nothing may be released.
        Privacy:
            When this returns, the charge is on disk (fsync), or in memory if the ledger has no path.
        """
        if digest is not None and self._digests.get(step) == digest:
            return
        if self.releases >= limit:
            raise expected(
                "Ledger.charge",
                "releases",
                f"to stay within the plan's {limit} steps",
                f"{self.releases} charged and one more asked for",
                "stop here, or make a plan with more steps and pay for it",
                BudgetExceededError,
            )
        line: dict[str, Any] = {
            "step": step,
            "noise_multiplier": release.noise_multiplier,
            "sample_rate": release.sample_rate,
            "scheme": release.scheme,
        }
        if digest is not None:
            line["digest"] = digest
        self._append(line)
        self._count(line)

    def close(self) -> None:
        """Release the file and its lock. The ledger still answers, but takes no more charges."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._read_only = True

    def _count(self, line: Mapping[str, Any]) -> None:
        release = Release(line["noise_multiplier"], line["sample_rate"], line["scheme"])
        self._counts[release] = self._counts.get(release, 0) + 1
        if "digest" in line:
            self._digests[line["step"]] = line["digest"]

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
        data = (json.dumps(line) + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            # What may have been written in part must not look like a charge, nor spoil the next line.
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                self.close()
            raise expected(
                "Ledger.charge",
                f"{self.path}",
                "to take one more line",
                error.strerror,
                "free space, then resume; nothing was charged and nothing released",
            ) from error
        self._size += len(data)

    def _open(self, path: Path) -> None:
        if not self._read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._descriptor)
                self._descriptor = None
                raise expected(
                    "Ledger",
                    "path",
                    "to have one writer",
                    f"{path}, in use",
                    "let the other process end first",
                ) from error
        try:
            self._read(path)
        except BaseException:
            self.close()
            raise
        # A last line without its end was cut off while being written: its gradient never left the oracle.
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, self._size)

    def _read(self, path: Path) -> None:
        def damaged(number: int, why: str) -> PrivacyError:
            return expected(
                "Ledger", f"line {number} of {path}", "to be a ledger's", why, "restore the file from a copy"
            )

        try:
            data = path.read_bytes()
        except OSError as error:
            raise expected("Ledger", "path", "to be a readable file", path, "give a ledger's path") from error
        complete = data[: data.rfind(b"\n") + 1]
        self._size = len(complete)
        for number, raw in enumerate(complete.splitlines(), start=1):
            try:
                line = json.loads(raw)
                if number == 1:
                    if line["ledger_version"] != _VERSION:
                        raise damaged(1, f"version {line['ledger_version']}, not {_VERSION}")
                    self.plan_facts = dict(line["plan"])
                else:
                    self._count(line)
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, PrivacyError):
                    raise
                raise damaged(number, raw[:60].decode(errors="replace")) from error
        if not self.plan_facts and self._read_only:
            raise damaged(1, "an empty file")
