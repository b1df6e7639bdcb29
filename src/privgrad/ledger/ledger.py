"""The durable record of every release. The epsilon spent can be computed from the file alone.

The file holds one JSON object per line: first the plan's public numbers, then one line per release. PrivateGradient
writes a line to disk before it returns the gradient that the line pays for. A process killed at any moment has
therefore charged at least as much as it released. `file` describes how changed lines are found.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from privgrad.accounting.accountant import Accountant, epsilon
from privgrad.accounting.mechanisms import BegunEpochs, Participations, Release, require_epochs
from privgrad.errors import (
    SUGGESTED,
    BudgetExceededError,
    SamplingError,
    expected,
    require_choice,
    require_integer,
    require_nonnegative,
    require_rate,
)
from privgrad.ledger.file import TWO_LEDGERS, VERSION, LedgerFile, not_open
from privgrad.processes import Processes
from privgrad.rng import this_process
from privgrad.types import SHUFFLED, SamplingScheme

# A ledger knows this of its releases, wherever it keeps them.
_RECORD = ["plan_facts", "_hold", "_kind", "_bands", "_participations", "_draws", "_values", "_steps", "_optimizers"]
_KEEP = f"keep the plan, or {TWO_LEDGERS}"
UNUSED = "unused "  # begins the names of draws that are charged without a release
_DRAW_ON = "draw plan.batches(..., start=private_grad.ledger.next_step)"
_REMEDIES = {  # by the first of these facts that differs; `_KEEP` for all others
    "simulates": "train in a new folder: a simulation (PrivacyPlan.scaled) has a ledger of its own",
    "noise_multiplier": f"{_KEEP}; for more steps, PrivacyPlan(noise_multiplier={{sigma}}, steps=..., ...) keeps the "
    "noise (the noise follows from target_epsilon, delta, steps, sample_rate and correlation: was one changed?)",
    "max_grad_norm": f"{_KEEP}; {SUGGESTED}",
    "adaptive_clip": f"give the same adaptive_clip as when the ledger began, or {TWO_LEDGERS}",
    "norm_statistic": f"give the same norm_bins as when the ledger began, or {TWO_LEDGERS}",
}


@dataclass(frozen=True)
class Hold:
    """A ledger's part of a budget. The first line of the ledger records it for all later holders."""

    name: str  # of the commitment in the budget
    release: Release  # the kind of all releases; its count is the most that the ledger accepts
    budget: str = field(compare=False)  # the name of the budget's file
    # What the plan must state in `bind`, besides the numbers of the release.
    plan_facts: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    # `bind` calls it once the first line is on disk, before any release. Called again, it does nothing.
    on_begin: Callable[[], None] | None = field(default=None, compare=False)


class Ledger:
    """A record of releases and their epsilon, in memory or in a file that survives the process.

    Threads may share a ledger. It has one holder: it cannot be copied or pickled, and a forked process can read its
    counts but cannot charge.

    Args:
        path: file to append to, created if absent; None keeps the record in memory.
        read_only: open the file for reading only. Takes no lock and refuses every charge.
    Raises:
        PrivacyError: the file is not a ledger, is damaged, has a different version, cannot be written, or is locked by
            a running training.
    Privacy:
        The epsilon of a run is computed from its lines. It holds public numbers, released values and, under a research
        seed, hashes of released gradients: safe to publish.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self.plan_facts: dict[str, Any] = {}
        self._refuses = read_only
        self._kind: Release | None = None  # of all releases, because they follow one plan
        self._bands = 1
        self._participations = Participations(self._bands)
        self._draws: dict[str, str | None] = {}
        self._values: dict[str, list[float]] = {}
        self._steps: list[int] = []
        self._optimizers: list[str] = []
        self.optimizer: str | None = None  # that takes the releases; the next charge records it
        self._hold: Hold | None = None
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
        """Whether the file ended in an unfinished line. Nothing was released for that line."""
        return self._file is not None and self._file.was_cut_off

    @property
    def charged(self) -> list[Release]:
        """The releases charged so far in which one person may have taken part, as accounting.epsilon takes them."""
        return [] if self._kind is None else [replace(self._kind, count=self.participations)]

    @property
    def releases(self) -> int:
        """The number of releases charged so far."""
        return len(self._draws)

    @property
    def participations(self) -> int:
        """The number of releases in which one person may have taken part, at most: all of them without memory."""
        return self._participations.count

    @property
    def next_step(self) -> int:
        """The step at which a training resumes: the number of draws charged so far.

        For noise with memory, it is the first multiple of its bands after the last step: the noise and the groups begin
        again there, and a person takes part as often as in a training without an interruption. In epochs, it is the
        step after the last one.
        """
        is_plain = self._bands == 1 and not isinstance(self._participations, BegunEpochs)
        return self.releases if is_plain else self._participations.next_step

    @property
    def epoch_key(self) -> Path | None:
        """The file in which `plan.batches` may keep the key of the running epoch; None for a ledger in memory.

        Anyone who has the key knows which examples each step of this epoch uses: do not publish or copy the file.
        """
        # The Hugging Face Trainer leaves names that begin so out of what it uploads.
        return None if self.path is None else self.path.with_name(f"_{self.path.name}.epoch")

    @property
    def planned_steps(self) -> tuple[int, ...]:
        """The plan's number of steps at the first release, and each other one later."""
        return tuple(self._steps)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The optimizer at the first release that one was known for, and each other one later."""
        return tuple(self._optimizers)

    @property
    def seeded_releases(self) -> int:
        """The number of releases drawn under a research seed. Anyone who knows the seed can remove their noise."""
        return sum(digest is not None for digest in self._draws.values())

    @property
    def head(self) -> str:
        """The checksum of the last line, which depends on all lines before it; "" without a file."""
        return "" if self._file is None else self._file.head

    def went_through(self, head: str) -> bool:
        """Return whether `head` was once the head of this ledger: the checksum of one of its lines."""
        return self._file is not None and self._file.went_through(head)

    def epsilon(self, *, delta: float, accountant: Accountant = "pld") -> float:
        """Compute the epsilon of all releases charged so far; arguments and errors are as in `accounting.epsilon`."""
        return epsilon(self.charged, delta=delta, accountant=accountant)

    @property
    def draws(self) -> set[str]:
        """The names of the draws of batches that were not made under a research seed."""
        return {draw for draw, digest in self._draws.items() if digest is None and ":" in draw}

    @property
    def unused(self) -> int:
        """How many of the releases were charged alone: results had stopped the training before they were made."""
        return sum(draw.startswith(UNUSED) for draw in self._draws)

    @property
    def values(self) -> dict[str, list[float]]:
        """The values that the functions of `releases` recorded, by draw, to be read back after an interruption."""
        return {draw: list(values) for draw, values in self._values.items()}

    @property
    def commitment(self) -> str | None:
        """The name under which a budget holds all releases of this ledger; None without a budget."""
        return None if self._hold is None else self._hold.name

    @property
    def budget(self) -> str:
        """The name of the budget's file; "" without a budget."""
        return "" if self._hold is None else self._hold.budget

    def limit_to(self, hold: Hold) -> None:
        """Accept only the releases that a budget holds, from now on.

        Raises:
            PrivacyError: the ledger was begun without this commitment, or has another one.
        Privacy:
            A limit cannot be raised. A plan with more steps ends at it.
        """
        with self._one_at_a_time():
            held = self._hold
            if held != hold and (held is not None or self.plan_facts):
                got = "a ledger without a commitment" if held is None else f"{held.name}, {held.release}"
                remedy = "resume the committed plan, or give a new ledger: more steps need a commitment of their own"
                raise expected("Budget.open_ledger", "ledger", f"to hold {hold.name}, {hold.release}", got, remedy)
            if held is None or hold.on_begin is not None:
                self._hold = hold

    def bind(self, plan_facts: Mapping[str, Any]) -> None:
        """Write the plan's public numbers to a new ledger, or require that an old ledger holds the same numbers.

        Raises:
            PrivacyError: the ledger was written under a different plan, or a value is not one that JSON can hold.
        """
        with self._one_at_a_time():
            hold = self._hold
            if hold is not None:
                _require_committed(hold, plan_facts)
            if self.plan_facts:
                _require_same_plan(self.plan_facts, plan_facts)
            else:
                facts = dict(plan_facts)
                if hold is not None:
                    facts["commitment"] = {"name": hold.name, "releases": hold.release.count, "budget": hold.budget}
                self._append({"ledger_version": VERSION, "plan": facts})
                self._begin(facts)
                self._hold = hold  # with `on_begin`, until that has succeeded
            if hold is not None and hold.on_begin is not None:
                hold.on_begin()
                self._hold = replace(hold, on_begin=None)

    def follow_first(self, processes: Processes) -> None:
        """Take over the record of the first process, from which all processes then count alike. Each must call it.

        Raises:
            PrivacyError: the ledger of another process has a file, or releases that the first process does not know.
        """
        first = processes.broadcast_object({name: getattr(self, name) for name in _RECORD})
        with processes.all_succeed():
            if processes.rank == 0:
                return
            if self.path is not None or self.releases > len(first["_draws"]):
                got = f"process {processes.rank} with {self.releases} releases in {self.path or 'memory'}"
                raise expected("PrivateGradient", "ledger", "to be given to the first process only", got)
            vars(self).update(first)

    def admit(self, draw: str, *, limit: int, repeatable: bool) -> None:
        """Raise the error that `charge` would raise, before the gradient of the step is computed.

        The arguments are as in `charge`, except `repeatable`: whether a draw that is already charged may be computed
        again, as under a research seed.

        Raises:
            BudgetExceededError: the limit has been reached.
            SamplingError: the draw is already charged, and is not repeatable.
        """
        with self._one_at_a_time():
            is_known = draw in self._draws
            participations = self._participations.after(draw)
        if is_known:
            if repeatable:
                return
            remedy = f"take the next batch of the iterator; to continue with a new one, {_DRAW_ON}"
            got = f"draw {draw}, which is already charged"
            raise expected("PrivateGradient", "batch", "to be used once", got, remedy, SamplingError)
        most = self._participations.most(limit)
        limited = f"the plan's {limit} steps" + (f", {most} of each person" if self._bands > 1 else "")
        if self._hold is not None and self._hold.release.count < most:
            most = self._hold.release.count
            limited = f"the {most} releases that the budget holds for {self._hold.name}"
        if participations > most:
            remedy = "stop here, or make a plan with more steps, at a higher epsilon; to resume an interrupted run, "
            remedy += f"load its model and {_DRAW_ON}"
            condition = f"to be at most {limited}"
            raise expected("Ledger.charge", "releases", condition, participations, remedy, BudgetExceededError)

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
        """Record one release durably.

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
        found = {"digest": digest, "values": None if values is None else list(values), "max_grad_norm": max_grad_norm}
        line |= {name: value for name, value in found.items() if value is not None}
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
            if self.optimizer is not None and self._optimizers[-1:] != [self.optimizer]:
                line["optimizer"] = self.optimizer
            if self._checked(line) != release:
                raise expected("Ledger.charge", "release", "to be one of the ledger's plan, of count 1", release)
            # Line before count: an interrupt between them leaves one line more than memory. Epsilon after reopening
            # counts lines (participations), so it is never less than what was released.
            self._append(line)
            self._count(release, line)

    @property
    def is_open(self) -> bool:
        """Whether this ledger holds its file, to write to it."""
        return self._file is not None and self._file.is_open

    def close(self) -> None:
        """Close the file and release its lock. The ledger can still be read, but refuses further charges."""
        if self._file is not None and self._file.is_open:
            with self._turn:  # after a charge that another thread is writing
                self._file.close()
        self._refuses = True

    def __reduce__(self) -> str:
        """Refuse copies and pickles: a copy would not know of the releases charged to the original."""
        remedy = "pass the ledger itself, or open its file with read_only=True"
        raise expected("Ledger", "a ledger", "to have one holder", "a copy or a pickle", remedy)

    def _one_at_a_time(self) -> AbstractContextManager[object]:
        """Return the ledger's lock, to be held from lookup to write, so that no other thread charges in between."""
        if this_process() != self._process:
            remedy = "open a ledger in the process that charges: neither would know of the other's releases"
            condition = f"to stay in process {self._process[0]}"
            raise expected("Ledger", "a ledger", condition, f"fork {os.getpid()}", remedy)
        return self._turn

    def _checked(self, line: Mapping[str, Any]) -> Release:
        """Return the release that a line records; raise PrivacyError if its numbers are not those of the plan."""
        release, planned = release_of(self.plan_facts, line), release_of(self.plan_facts)
        if release != planned:
            raise expected("Ledger", "each release", f"to be {planned}, as in the ledger's plan", release)
        return release

    def _begin(self, plan_facts: dict[str, Any]) -> None:
        """Take the facts of a plan, before any release is counted, and the hold that its first line records."""
        self.plan_facts = plan_facts
        self._bands = bands_of(plan_facts)
        steps = plan_facts.get("epoch_steps")
        self._participations = Participations(self._bands) if steps is None else BegunEpochs(steps)
        if (held := plan_facts.get("commitment")) is not None:
            require_integer("Ledger", "commitment", held["releases"], 1)
            most = replace(release_of(plan_facts), count=held["releases"])
            self._hold = Hold(str(held["name"]), most, str(held["budget"]))

    def _count(self, release: Release, line: Mapping[str, Any]) -> None:
        self._kind = release
        self._participations.add(line["draw"])
        self._draws[line["draw"]] = line.get("digest")
        if "steps" in line:
            self._steps.append(int(line["steps"]))
        if "optimizer" in line:
            self._optimizers.append(str(line["optimizer"]))
        if "values" in line:
            self._values[line["draw"]] = [float(value) for value in line["values"]]

    def _accept(self, number: int, line: Mapping[str, Any]) -> None:
        """Read the plan's numbers from the first line of the file, and a release from each later line."""
        if number == 1:
            self._begin(_require_plan(line["plan"]))
        elif not isinstance(line["draw"], str):
            raise TypeError(f"a draw is a text, got {line['draw']!r}")
        else:
            self._count(self._checked(line), line)

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line to the file, if there is one, or raise PrivacyError if this ledger takes no more lines."""
        if self._file is not None:
            self._file.append(line)
        elif self._refuses:
            raise not_open()


def bands_of(facts: Mapping[str, Any]) -> int:
    """Return the number of groups of people that take turns; 1 with independent noise."""
    memory: Mapping[str, Any] | None = facts.get("noise_memory")
    return 1 if memory is None else memory["bands"]


def release_of(facts: Mapping[str, Any], line: Mapping[str, Any] | None = None) -> Release:
    """Return the release of one line; without a line, that of the plan."""
    found: Mapping[str, Any] = {**facts, "scheme": facts["sampling"]} if line is None else line
    release = Release(found["noise_multiplier"], found["sample_rate"], found["scheme"])
    if release.scheme == "epochs":
        return replace(release, epoch_steps=facts["epoch_steps"])
    if release.scheme != "truncated":
        return release
    return replace(release, max_batch_size=facts["max_batch_size"], num_examples=facts["num_examples"])


def _require_same_plan(held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise PrivacyError if a ledger holds other facts than those given."""
    base: dict[str, Any] = {"user": "person"}
    held, given = base | dict(held), base | {"max_rows": None, "rows_by": None} | dict(given)
    new = {"max_rows", "rows_by"} - held.keys()  # which older files lack
    differing = [name for name in given if held.get(name) != given[name] and name not in new]
    if not differing:
        return
    first = next((name for name in _REMEDIES if name in differing), "")
    remedy = _REMEDIES.get(first, _KEEP).format(sigma=held.get("noise_multiplier"))
    if first in ("adaptive_clip", "norm_statistic"):  # what else differs follows from it
        differing = [first]
    if "noise_memory" in differing and (memory := held.get("noise_memory")) is not None:
        numbers = ", ".join(f"{value:g}" for value in memory["coefficients"])
        remedy += f"; correlation=Banded({memory['bands']}, ({numbers})) keeps its memory, for more steps too"
    old = ", ".join(str(held.get(name)) for name in differing)
    got = ", ".join(str(given.get(name)) for name in differing)
    raise expected("Ledger.bind", f"the plan's {', '.join(differing)}", f"to be as recorded ({old})", got, remedy)


def _require_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's numbers as a dict; raise PrivacyError if one that epsilon needs is invalid."""
    require_nonnegative("Ledger", "noise_multiplier", plan["noise_multiplier"], "restore the file")
    require_rate("Ledger", plan["sample_rate"])
    require_integer("Ledger", "num_examples", plan["num_examples"], 1)
    if (memory := plan.get("noise_memory")) is not None:
        require_integer("Ledger", "bands", memory["bands"], 2)
    require_choice("Ledger", "sampling", plan["sampling"], (*get_args(SamplingScheme), SHUFFLED))
    if plan["sampling"] == "truncated":
        require_integer("Ledger", "max_batch_size", plan["max_batch_size"], 1)
    if plan["sampling"] == "epochs":
        require_epochs("Ledger", plan["sample_rate"], plan["epoch_steps"])
    return dict(plan)


def _require_committed(hold: Hold, plan_facts: Mapping[str, Any]) -> None:
    """Raise PrivacyError if a plan is not the one that a budget holds for its ledger."""
    kind = hold.release
    numbers = {"noise_multiplier": kind.noise_multiplier, "sample_rate": kind.sample_rate, "sampling": kind.scheme}
    # A hold that was read from the first line needs no other facts: the line holds all of the committed plan.
    for fact, value in {**numbers, **hold.plan_facts}.items():
        if plan_facts.get(fact) != value:
            condition = f"to be {value!r}, as committed for {hold.name}"
            remedy = "train under the plan that was given to Budget.open_ledger, without parts that are NOT private"
            raise expected("Ledger.bind", f"{fact} of the plan", condition, repr(plan_facts.get(fact)), remedy)
