"""The durable record of every release. The epsilon spent can be computed from the file alone.

The file holds one JSON object per line: first the plan's public numbers, then one line per release. PrivateGradient
writes a line to disk before it returns the gradient that the line pays for. A process killed at any moment has
therefore charged at least as much as it released. `ledger_file` describes how changed lines are found. The privacy
guarantee rests on this file.
"""

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from privgrad.accounting import Accountant, Release, epsilon
from privgrad.errors import BudgetExceededError, SamplingError, expected, require_integer, require_path
from privgrad.ledger_facts import bands_of, checked_plan, other_plan, release_of, require_committed
from privgrad.ledger_file import VERSION, LedgerFile, not_open
from privgrad.participations import Participations, most_participations
from privgrad.rng import this_process


class Ledger:
    """A record of releases and their epsilon, in memory or in a file that survives the process.

    PrivateGradient charges each release to it. `fit`, `training_run`, `checkpoint` and the bridges read it to resume.
    `cli.privacy` and `experiments` read it to report. Users can open one. Threads may share a ledger. It has one
    holder: it cannot be copied or pickled, and a forked process can read its counts but cannot charge.

    Args:
        path: file to append to, created if absent; None keeps the record in memory.
        read_only: open the file for reading only. Takes no lock and refuses every charge.
    Raises:
        PrivacyError: the file is not a ledger, is damaged, has a different version, cannot be written, or is locked by
            a running training.
    Privacy:
        The guarantee rests on it: the epsilon of a run is computed from its lines. It holds public numbers, released
        values and, under a research seed, hashes of released gradients: safe to publish. `was_cut_off` and
        `seeded_releases` only inform.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        if path is not None:
            require_path("Ledger", "path", path, "give ledger.jsonl in a run's folder")
        self.plan_facts: dict[str, Any] = {}
        self._refuses = read_only
        self._kind: Release | None = None  # of all releases, because they follow one plan
        self._bands = 1
        self._participations = Participations(self._bands)
        self._draws: dict[str, str | None] = {}
        self._values: dict[str, list[float]] = {}
        self._steps: list[int] = []
        self._committed: tuple[str, Release] | None = None
        self._budget = ""
        self._planned: dict[str, Any] = {}  # facts of the committed plan
        self._on_begin: Callable[[], None] | None = None
        self._turn = threading.RLock()
        self._process = this_process()
        # The file passes its lines to `_accept`, so it is opened last.
        self._file: LedgerFile | None = None
        if path is not None:
            self._file = LedgerFile("ledger", Path(path).absolute(), read_only=read_only, accept=self._accept)

    @property
    def path(self) -> Path | None:
        """The absolute path of the file; None if the record is in memory."""
        return None if self._file is None else self._file.path

    @property
    def was_cut_off(self) -> bool:
        """Whether the file ended in an unfinished line. Nothing was released for that line.

        `cli.privacy` warns of it.
        """
        return self._file is not None and self._file.was_cut_off

    @property
    def charged(self) -> list[Release]:
        """The releases charged so far in which one person may have taken part, as accounting.epsilon takes them.

        `cli.privacy` and `experiments.report.metadata` add up those of several ledgers.
        """
        return [] if self._kind is None else [replace(self._kind, count=self.participations)]

    @property
    def releases(self) -> int:
        """The number of releases charged so far."""
        return len(self._draws)

    @property
    def participations(self) -> int:
        """The number of releases in which one person may have taken part, at most: all of them without memory.

        `statement` and `cli.privacy` show it.
        """
        return self._participations.count

    @property
    def next_step(self) -> int:
        """The step at which a training resumes: the number of releases so far.

        For noise with memory, it is the first multiple of its bands after the last step: the noise and the groups begin
        again there, and a person takes part as often as in a training without an interruption.
        """
        return self.releases if self._bands == 1 else self._participations.next_step

    @property
    def planned_steps(self) -> tuple[int, ...]:
        """The plan's number of steps at the first release, and each other one later. `statement` says what it means."""
        return tuple(self._steps)

    @property
    def seeded_releases(self) -> int:
        """The number of releases drawn under a research seed. Anyone who knows the seed can remove their noise.

        `cli.privacy` warns of them.
        """
        return sum(digest is not None for digest in self._draws.values())

    @property
    def head(self) -> str:
        """The checksum of the last line, which depends on all lines before it; "" without a file.

        `training_run` and `integrations.external_loop` store it in checkpoints.
        """
        return "" if self._file is None else self._file.head

    def went_through(self, head: str) -> bool:
        """Return whether `head` was once the head of this ledger, that is, the checksum of one of its lines.

        A checkpoint stores the head of its ledger. On resume, `require_resumable` calls this to refuse a checkpoint
        whose ledger is a different one or has lost lines.
        """
        return self._file is not None and self._file.went_through(head)

    def epsilon(self, *, delta: float, accountant: Accountant = "pld", assume_poisson: bool = False) -> float:
        """Compute the epsilon of all releases charged so far; see accounting.epsilon.

        Args:
            delta: in (0, 1).
            accountant: as in accounting.epsilon.
            assume_poisson: as in accounting.epsilon.
        """
        return epsilon(self.charged, delta=delta, accountant=accountant, assume_poisson=assume_poisson)

    @property
    def draws(self) -> set[str]:
        """The names of the draws of batches that were not made under a research seed. `promises` compares them."""
        return {draw for draw, digest in self._draws.items() if digest is None and ":" in draw}

    @property
    def values(self) -> dict[str, list[float]]:
        """The values that the functions of `releases` recorded, by draw, to be read back after an interruption."""
        return {draw: list(values) for draw, values in self._values.items()}

    @property
    def commitment(self) -> str | None:
        """The name under which a budget holds all releases of this ledger; None without a budget."""
        return None if self._committed is None else self._committed[0]

    @property
    def budget(self) -> str:
        """The name of the budget's file; "" without a budget. `promises` names it in its error."""
        return self._budget

    def limit_to(
        self,
        release: Release,
        commitment: str,
        budget: str,
        on_begin: Callable[[], None] | None = None,
        plan_facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Accept only this kind of release, and at most `release.count` of them, from now on.

        `Budget.open_ledger`, `release_record` and `experiments.paid_folder` call it. The first line of the file holds
        the limit for all later holders. `promises.require_no_budget` reads there that a budget counts these releases.

        Args:
            release: the committed kind and count.
            commitment: the name in the budget.
            budget: the name of the budget's file.
            on_begin: called once, before the first line is written.
            plan_facts: what the plan must state in `bind`. None: the release alone.
        Raises:
            PrivacyError: the ledger was begun without this commitment, or has another one.
        Privacy:
            A limit cannot be raised. A plan with more steps ends at it.
        """
        with self._one_at_a_time():
            if not self.plan_facts:
                self._committed = self._committed or (commitment, release)
                self._budget, self._on_begin, self._planned = budget, on_begin, dict(plan_facts or {})
            if self._committed != (commitment, release):
                held = self._committed or "a ledger without a commitment"
                remedy = "resume the committed plan, or give a new ledger: more steps need a commitment of their own"
                raise expected("Budget.open_ledger", "ledger", f"to hold {commitment}, {release}", held, remedy)

    def bind(self, plan_facts: Mapping[str, Any]) -> None:
        """Write the plan's public numbers to a new ledger, or require that an old ledger holds the same numbers.

        PrivateGradient calls this once, before its first release.

        Raises:
            PrivacyError: the ledger was written under a different plan, or a value is not one that JSON can hold.
        """
        with self._one_at_a_time():
            if self._committed is not None:
                require_committed(*self._committed, self._planned, plan_facts)
            if not self.plan_facts:
                facts = dict(plan_facts)
                if self._committed is not None:
                    name, held = self._committed
                    facts["commitment"] = {"name": name, "releases": held.count, "budget": self._budget}
                if self._on_begin is not None:
                    self._on_begin()
                self._append({"ledger_version": VERSION, "plan": facts})
                self._begin(facts)
                return
        if (other := other_plan(self.plan_facts, plan_facts)) is not None:
            raise other

    def admit(self, draw: str, *, limit: int, repeatable: bool) -> None:
        """Raise the error that `charge` would raise, before the gradient of the step is computed.

        PrivateGradient calls this for each batch.

        Args:
            draw: as in charge.
            limit: as in charge.
            repeatable: whether a draw that is already charged may be computed again, as under a research seed.
        Raises:
            BudgetExceededError: the limit has been reached.
            SamplingError: the draw is already charged, and is not repeatable.
        """
        with self._one_at_a_time():
            is_known, spent = draw in self._draws, self._participations.after(draw) - 1
        steps, limit = limit, most_participations(limit, self._bands)
        limited = f"the plan's {steps} steps" + (f", {limit} of each person" if self._bands > 1 else "")
        if self._committed is not None and (most := self._committed[1].count) < limit:
            limit, limited = most, f"the {most} releases that the budget holds for {self._committed[0]}"
        if is_known:
            if not repeatable:
                remedy = (
                    "take the next batch of the iterator; to continue with a new iterator, draw plan.batches(..., "
                    "start=private_grad.ledger.next_step)"
                )
                got = f"draw {draw}, which is already charged"
                raise expected("PrivateGradient", "batch", "to be used once", got, remedy, SamplingError)
        elif spent >= limit:
            raise expected(
                "Ledger.charge",
                "releases",
                f"to be at most {limited}",
                spent + 1,
                "stop here, or make a plan with more steps, at a higher epsilon; to resume a run that was interrupted, "
                "load its model and draw plan.batches(..., start=private_grad.ledger.next_step)",
                BudgetExceededError,
            )

    def charge(
        self,
        release: Release,
        *,
        draw: str,
        limit: int,
        digest: str | None = None,
        values: Sequence[float] | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """Record one release durably. PrivateGradient and `releases` call this before they return it.

        Args:
            release: one release under the plan that the ledger is bound to.
            draw: name of the random draw that chose its examples. Each draw can be charged and released only once.
            limit: the plan's number of steps.
            digest: hash of the released values, given only under a research seed. If the draw is already charged with
                the same digest, this is the same release, computed again after a resume. It is not charged again.
            values: the released values, to be read back from `values`. They are written with the charge, in one line: a
                process that is killed has written both or neither.
            max_grad_norm: C of this release, if C changes. For readers; epsilon does not depend on it.
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
        if values is not None:
            line["values"] = list(values)
        if max_grad_norm is not None:
            line["max_grad_norm"] = max_grad_norm
        with self._one_at_a_time():
            if digest is not None and (before := self._draws.get(draw)) is not None:
                if before == digest:
                    return
                got = f"draw {draw}, which is already charged with other values"
                remedy = "take the next batch; or resume with the code and machine that began, or in a new folder"
                raise expected("Ledger.charge", "a seeded draw", "to repeat its values", got, remedy, SamplingError)
            self.admit(draw, limit=limit, repeatable=False)
            if self._steps[-1:] != [limit]:
                line["steps"] = limit
            if self._checked(line) != release:
                raise expected("Ledger.charge", "release", "to have count 1", release, "charge each release separately")
            self._append(line)
            self._count(release, line)

    @property
    def is_open(self) -> bool:
        """Whether this ledger holds its file, to write to it. `fit` reads it to decide whether to open a file."""
        return self._file is not None and self._file.is_open

    def close(self) -> None:
        """Close the file and release its lock. The ledger can still be read, but refuses further charges.

        `fit`, `PrivateGradient.record_in`, `integrations.lightning` and users call it.
        """
        if self._file is not None:
            self._file.close()
        self._refuses = True

    def __reduce__(self) -> str:
        """Refuse copies and pickles: a copy would not know of the releases charged to the original."""
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
        release = release_of(self.plan_facts, line)
        if release != release_of(self.plan_facts):
            condition = "to have the noise multiplier, sample rate and sampling of the ledger's plan"
            raise expected("Ledger", "each release", condition, release, "restore the file")
        return release

    def _begin(self, plan_facts: dict[str, Any]) -> None:
        """Take the facts of a plan, before any release is counted."""
        self.plan_facts = plan_facts
        self._bands = bands_of(plan_facts)
        self._participations = Participations(self._bands)

    def _count(self, release: Release, line: Mapping[str, Any]) -> None:
        """Add one release and its draw to the counts in memory."""
        self._kind = release
        self._participations.add(line["draw"])
        self._draws[line["draw"]] = line.get("digest")
        if "steps" in line:
            self._steps.append(int(line["steps"]))
        if "values" in line:
            self._values[line["draw"]] = [float(value) for value in line["values"]]

    def _accept(self, number: int, line: Mapping[str, Any]) -> None:
        """Read the plan's numbers from the first line of the file, and a release from each later line.

        `LedgerFile` calls this for each line when it opens the file.
        """
        if number == 1:
            plan = checked_plan(line["plan"])
            self._begin(plan)
            if (committed := plan.get("commitment")) is not None:
                require_integer("Ledger", "commitment", committed["releases"], 1)
                kind = replace(release_of(plan), count=committed["releases"])
                self._committed, self._budget = (str(committed["name"]), kind), str(committed["budget"])
        else:
            self._count(self._checked(line), line)

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line to the file, if there is one, or raise PrivacyError if this ledger takes no more lines."""
        if self._file is not None:
            self._file.append(line)
        elif self._refuses:
            raise not_open()
