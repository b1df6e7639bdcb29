"""A budget for a data set: one cap over all trainings and other releases from the same data, in a shared file."""

import getpass
import json
import math
import os
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Releases, filter_epsilon, rounded_up
from privgrad.accounting.calibration import noise_within
from privgrad.accounting.mechanisms import Release, Selection, Split, each_group, mechanisms_of
from privgrad.errors import (
    BudgetExceededError,
    expected,
    require_choice,
    require_delta,
    require_integer,
    require_positive,
    require_rate,
)
from privgrad.ledger.file import VERSION, LedgerFile
from privgrad.ledger.ledger import Hold, Ledger
from privgrad.plan import PrivacyPlan
from privgrad.types import PrivacyUnit

_LONGEST_FIRST_LINE = 1 << 16
_RELEASED = re.compile(r"[a-z ]+ \[(\d+(, \d+)*)?\], bound .+")  # such as "sum [2, 3], bound 1.0"
_PATIENCE = 30.0  # seconds to wait for another process that commits


@dataclass(frozen=True)
class Commitment:
    """The most that a training, or one other release, may cost."""

    name: str  # unique in the budget
    releases: tuple[Release | Selection | Split, ...]  # all that it may make
    by: str  # the person who committed it
    date: str  # in UTC, as YYYY-MM-DD
    ledger: str | None = None  # the absolute path of the ledger that the releases are charged to, if it was given
    is_seeded: bool = False  # whether a research seed makes the noise predictable
    released: str = ""  # the kind, shape and bound of a single release by `releases`; "" for trainings

    @property
    def count(self) -> int:
        """The number of releases; a selection counts as one."""
        groups = [own for one in self.releases for own in (one.groups if isinstance(one, Split) else ((one,),))]
        return sum(release.count for own in groups for release in own)

    @property
    def words(self) -> str:
        """The commitment in words, for errors."""
        said = ", ".join(map(_worded, self.releases))
        return f"{self.released or 'trainings'} with {said}" + (f" on ledger {self.ledger}" if self.ledger else "")

    @property
    def terms(self) -> tuple[Any, ...]:
        """The parts that a second commitment of the same name must share."""
        found = [mechanisms_of("Budget", own) for own in each_group("Budget", self.releases)]
        return found, self.ledger, self.is_seeded, self.released


class Budget:
    """A cap on the epsilon of everything that is released from one data set, kept in a file.

    A commitment is written before a training starts, and holds all releases that the training may make. It stays if the
    training ends early. So the ledgers of all trainings together never cost more than the cap.

    Args:
        path: the file, created if absent. Processes and people may share it.
        total_epsilon: > 0, the cap. A new file needs it, and the three numbers below.
        delta: in (0, 1), at most 1 / num_examples.
        num_examples: the public number of units when the budget begins. Units may join later: a later plan then has
            more examples and its own sample rate. Choose delta for the largest number that you expect, because a plan
            with more than 1 / delta examples is refused. All commitments count for every unit, also for late ones.
        privacy_unit: "example" or "user". All commitments are for this unit.
    Raises:
        PrivacyError: the file is damaged or holds other numbers, or a new file lacks a number.
    Privacy:
        Everything that was committed satisfies (total_epsilon, delta) differential privacy, also if each commitment was
        chosen after a look at the results of those before it (`filter_epsilon`). A single commitment was fixed before
        any result, so its epsilon is the smaller of this number and that of PLD. The guarantee needs every release from
        the data to be committed, and two different trainings never to share a name.
        The file holds public numbers, names of people and released values only.
    Reference:
        Feldman, Zrnic 2021 (arXiv 2008.11193); Lecuyer 2021 (arXiv 2103.01379).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        total_epsilon: float | None = None,
        delta: float | None = None,
        num_examples: int | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._head = ""  # the checksum of the last line that this object has seen
        given: dict[str, Any] = {
            "total_epsilon": total_epsilon,
            "delta": delta,
            "num_examples": num_examples,
            "privacy_unit": privacy_unit,
        }
        if None not in given.values():
            require_facts(given)
            with self._opened(create=True) as (file, state):
                if not state.facts:
                    file.append({"ledger_version": VERSION, "budget": given})
        elif not self.path.exists():
            missing = ", ".join(name for name, value in given.items() if value is None)
            remedy = "give all four for a new budget, or the path of an existing one"
            raise expected("Budget", missing, f"to be given, because {self.path} does not exist", None, remedy)
        self._facts = self._read().facts
        differing = [name for name, value in given.items() if value is not None and self._facts[name] != value]
        if differing:
            condition = f"to be as recorded ({', '.join(str(self._facts[name]) for name in differing)})"
            got = ", ".join(str(given[name]) for name in differing)
            remedy = "give the recorded one: a second budget for the same data would break the cap"
            raise expected("Budget", ", ".join(differing), condition, got, remedy)

    def __repr__(self) -> str:
        return f"Budget({str(self.path)!r}, total_epsilon={self.total_epsilon}, delta={self.delta})"

    @property
    def total_epsilon(self) -> float:
        """The cap."""
        return float(self._facts["total_epsilon"])

    @property
    def delta(self) -> float:
        """Delta of the cap."""
        return float(self._facts["delta"])

    @property
    def num_examples(self) -> int:
        """The number of units when the budget began."""
        return int(self._facts["num_examples"])

    @property
    def privacy_unit(self) -> PrivacyUnit:
        """The unit that all commitments protect."""
        return self._facts["privacy_unit"]

    @property
    def commitments(self) -> tuple[Commitment, ...]:
        """All commitments so far, in their order."""
        return tuple(self._read().commitments.values())

    @property
    def head(self) -> str:
        """The checksum of the file's last line, which depends on all lines before it."""
        return self._read().head

    def spent(self, *, besides: Releases = ()) -> float:
        """Return the epsilon of all commitments so far, at most total_epsilon.

        Args:
            besides: releases of one more commitment. The result is above total_epsilon if `commit` would refuse them.

        With several commitments that depended on results, the guarantee is total_epsilon, which was fixed beforehand.
        This number would be the guarantee if all of them had been planned before the first result.
        """
        further = tuple(besides)
        return self._cost([*self.commitments, *([Commitment("", further, "", "")] if further else [])])

    def calibrate(self, *, sample_rate: float, steps: int) -> float:
        """Find the noise multiplier of a training that uses all that is left.

        Args:
            sample_rate: q in (0, 1].
            steps: T >= 1. Fewer, or a larger sigma, leave something for later.
        Returns:
            sigma, close to the smallest one that `commit` accepts.
        Raises:
            BudgetExceededError: no noise is large enough.
        """
        require_rate("Budget.calibrate", sample_rate)
        require_integer("Budget.calibrate", "steps", steps, 1)
        if (found := self._noise_left(sample_rate, steps)) is None:
            remedy = "train on public data, or on new data"
            if len(self.commitments) == 1:  # see docs/budget.md
                remedy += "; next time, leave a tenth of epsilon to a second commitment, or commit both as one"
            condition, got = "to leave epsilon for another commitment", f"{rounded_up(self.spent())} that is spent"
            raise expected("Budget.calibrate", "the budget", condition, got, remedy, BudgetExceededError)
        return found

    def left(self, *, sample_rate: float = 1.0, steps: int = 1) -> float:
        """Return the largest epsilon that one more training may have; by default, one more Gaussian release.

        Epsilons do not add up. The result is usually more than total_epsilon - spent(). The arguments are as in
        `calibrate`.
        """
        sigma = self._noise_left(sample_rate, steps)
        release = Release(sigma or 0.0, sample_rate, count=steps)
        return 0.0 if sigma is None else accounting.epsilon([release], delta=self.delta)

    def commit(self, name: str, releases: Releases, *, by: str | None = None, place: str | None = None) -> None:
        """Write down the most that a training may cost, before it starts.

        Args:
            name: unique in the budget. The same name with the same releases is the same training, which resumes: it is
                not committed again.
            releases: all releases that it may make.
            by: the person who commits. None: the user of the operating system.
            place: where the training keeps its ledgers. The same name with another place is refused: a copy of a
                folder would make the releases again.
        Raises:
            BudgetExceededError: the total would exceed the cap. Nothing was written.
            PrivacyError: the name was committed with other releases, or the file could not be written.
            SamplingError: a release is from fixed-size batches.
        Privacy:
            When this returns, the commitment is on disk (fsync).
        """
        self._commit(Commitment(name, tuple(releases), *_signed(by), place))

    def commit_release(self, name: str, release: Release, *, released: str, is_seeded: bool) -> None:
        """Commit a single release. The same name with another kind, shape or bound (`released`) is refused."""
        self._commit(Commitment(name, (release,), *_signed(None), None, is_seeded, released))

    def open_ledger(
        self, path: str | os.PathLike[str], plan: PrivacyPlan, *, name: str | None = None, by: str | None = None
    ) -> Ledger:
        """Commit all steps of a plan, and open the ledger of its training.

        Args:
            path: of a new ledger, or of the one that this training has written.
            plan: its steps are committed as they are; a later plan with more steps ends at their number.
            name: of the commitment. None: the absolute path of the ledger.
            by: as in commit.
        Returns:
            A Ledger to give to PrivateGradient. It accepts the plan's releases only, and at most the plan's steps.
        Raises:
            BudgetExceededError: the total would exceed the cap. Nothing was written.
            PrivacyError: the plan protects another unit, has more than 1 / delta examples, simulates, or does
                not draw Poisson batches; or the name was committed for another ledger, or its ledger is missing.
        Privacy:
            One commitment pays for one ledger. If that file is lost, its releases are unknown, so a training that
            begins again needs a new commitment. Continue a training that stopped before its first step by this method,
            not by `Ledger(path)`: the first step notes in the budget that the ledger has begun.
        """
        function = "Budget.open_ledger"
        self.require_covered(function, plan.num_examples, plan.privacy_unit)
        if plan.sampling != "poisson":  # the filter of a budget adds up RDP, which is known for no other batches
            raise expected(function, "plan", "to draw Poisson batches", f"sampling {plan.sampling!r}")
        place = Path(path).absolute()
        release = plan.release_of(plan.steps)
        wanted = Commitment(name or str(place), (release,), *_signed(by), str(place), plan.seed is not None)
        was_there, state = place.exists(), self._read()
        lost = "restore the ledger, or train under a new name: the lost releases stay committed"
        condition = f"to hold the ledger of {wanted.name}"
        if not was_there and wanted.name in state.commitments:
            raise expected(function, "path", condition, f"{place}, which is absent", lost)
        ledger = Ledger(place)
        try:
            if not ledger.plan_facts and wanted.name in state.begun:
                raise expected(function, "path", condition, f"{place}, which is empty", lost)
            facts = {**plan.public_facts, "research_seed": plan.seed is not None}
            facts = {fact: facts[fact] for fact in facts.keys() - {"delta", "max_grad_norm", "noise_multiplier"}}
            begun = partial(self._note_begun, wanted.name)
            ledger.limit_to(Hold(wanted.name, release, self.path.name, facts, begun))
            self._commit(wanted)
        except BaseException:
            ledger.close()
            if not was_there:
                place.unlink(missing_ok=True)
            raise
        return ledger

    def require_covered(self, function: str, num_examples: int, privacy_unit: str) -> None:
        """Raise PrivacyError unless a release protects the budget's unit, among at most 1 / delta units."""
        if privacy_unit != self.privacy_unit:
            condition = f"to be {self.privacy_unit!r}, as in the budget"
            remedy = f"give privacy_unit={self.privacy_unit!r} if one row holds all data of one {self.privacy_unit}"
            raise expected(function, "privacy_unit", condition, repr(privacy_unit), remedy)
        if self.delta > 1 / num_examples:
            condition = f"to be at most {1 / self.delta:.6g}, 1 / delta of the budget"
            remedy = "release from fewer units, or choose a smaller delta for the next data set's budget"
            raise expected(function, "num_examples", condition, num_examples, remedy)

    def released(self, name: str) -> list[float] | None:
        """Return the values that `record` has written for a commitment; None if there are none."""
        return self._read().values.get(name)

    def record(self, name: str, values: Sequence[float]) -> list[float]:
        """Write the released values of a commitment, and return them; if some are there already, return those.

        So two processes that release under one name return the same values.

        Raises:
            PrivacyError: the name is not committed, or the file could not be written.
        """
        with self._opened() as (file, state):
            if name not in state.commitments:
                raise expected("Budget.record", "name", "to be committed", repr(name), "commit it before release")
            if name not in state.values:
                _append("Budget.record", file, state, {"draw": name, "values": list(values)})
            return state.values[name]

    def _note_begun(self, name: str) -> None:
        """Note durably that the ledger of a commitment has its first line. An empty file is then a lost ledger."""
        with self._opened() as (file, state):
            if name not in state.begun:
                file.append({"draw": name, "begun": True})

    def _commit(self, wanted: Commitment) -> None:
        """Write a commitment, unless it is there already."""
        if not wanted.name:
            raise expected("Budget.commit", "name", "to be a text", repr(wanted.name))
        if not any(mechanisms_of("Budget.commit", own) for own in each_group("Budget.commit", wanted.releases)):
            raise expected("Budget.commit", "releases", "to be at least one", 0, "give [plan's release] with its count")
        with self._opened() as (file, state):
            if (same := state.commitments.get(wanted.name)) is not None:
                if same.terms != wanted.terms:
                    condition = f"to be new in the budget, or to be for {same.words}, as before"
                    remedy = "choose another name, or give what it was committed for"
                    raise expected("Budget.commit", "name", condition, f"{wanted.name} for {wanted.words}", remedy)
                return
            before = list(state.commitments.values())
            cost = self._cost([*before, wanted])
            if not cost <= self.total_epsilon:
                remedy = "plan with more noise or fewer steps: budget.calibrate(sample_rate=..., steps=...) has it"
                name = f"the epsilon of all commitments with {wanted.name}"
                condition = f"to be at most {rounded_up(self.total_epsilon)}"
                got = f"{rounded_up(cost)} ({rounded_up(self._cost(before))} without it)"
                raise expected("Budget.commit", name, condition, got, remedy, BudgetExceededError)
            _append("Budget.commit", file, state, _line_of(wanted))

    def _noise_left(self, sample_rate: float, steps: int) -> float | None:
        """Return the noise multiplier of a training that uses all that is left; None if there is none."""
        commitments = self.commitments

        def cost(sigma: float, accountant: str) -> float:
            one = Release(sigma, sample_rate, count=steps)
            if not commitments and accountant != "pld":  # faster: the last search starts where the one before ended
                return accounting.epsilon([one], delta=self.delta, accountant="rdp")
            return self._cost([*commitments, Commitment("", (one,), "", "")])

        return noise_within(cost, self.total_epsilon)

    def _cost(self, commitments: Sequence[Commitment]) -> float:
        return cost_of(commitments, delta=self.delta, total_epsilon=self.total_epsilon)

    @contextmanager
    def _opened(self, *, create: bool = False) -> "Generator[tuple[LedgerFile, BudgetState]]":
        """Open the file for writing, and lock it until it is closed."""
        state = BudgetState()
        file = LedgerFile("budget", self.path, read_only=False, accept=state.accept, patience=_PATIENCE, create=create)
        with closing(file):
            self._require_same_file(file)
            yield file, state
            self._head = file.head

    def _read(self) -> "BudgetState":
        state = BudgetState()
        file = LedgerFile("budget", self.path, read_only=True, accept=state.accept)
        self._require_same_file(file)
        state.head = self._head = file.head
        return state

    def _require_same_file(self, file: LedgerFile) -> None:
        """Raise PrivacyError unless the file holds the last line that this object has seen."""
        if self._head and not file.went_through(self._head):  # an older copy would forget commitments that were made
            remedy, got = "restore the file from its newest copy", f"the last line {file.head or None}"
            raise expected("Budget", f"{self.path}", "to hold all lines that it held before", got, remedy)


def _append(function: str, file: LedgerFile, state: "BudgetState", line: Mapping[str, Any]) -> None:
    """Write a line that can be read again: after a name such as 7, nobody could open the budget any more."""
    try:
        state.accept(2, json.loads(json.dumps(line)))
    except (ValueError, TypeError) as error:
        raise expected(function, "all arguments", "to be texts and finite numbers", error) from error
    file.append(line)


def _signed(by: str | None) -> tuple[str, str]:
    """Return who commits, and the date in UTC."""
    try:
        person = by or getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        person = "unknown"
    return person, datetime.now(UTC).date().isoformat()


def is_budget(path: Path) -> bool:
    """Return whether a file is a budget, by its first line."""
    try:
        with path.open("rb") as file:
            first: Any = json.loads(file.readline(_LONGEST_FIRST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "budget" in first


@dataclass
class BudgetState:
    """The content of a budget's file."""

    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # the numbers of the budget
    commitments: dict[str, Commitment] = field(default_factory=dict[str, Commitment])  # by name
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # by the name of their commitment
    begun: set[str] = field(default_factory=set[str])  # names of the commitments whose ledger has its first line
    head: str = ""  # the checksum of the last line

    def accept(self, number: int, line: Mapping[str, Any]) -> None:
        """Read one line."""
        if number == 1:
            require_facts(line["budget"])
            self.facts.update(line["budget"])
            return
        name = line["draw"]
        if "releases" in line:
            _require(name not in self.commitments, "a name that is new in the budget")
            self.commitments[name] = _commitment_of(line)
            return
        _require(name in self.commitments, "the name of a commitment")
        if "begun" in line:
            self.begun.add(name)
        else:
            _require(name not in self.values, "values that are recorded once")
            values = [float(value) for value in line["values"]]
            _require(all(map(math.isfinite, values)), "finite values")
            self.values[name] = values


def _line_of(commitment: Commitment) -> dict[str, Any]:
    """Return a commitment as a line of the file holds it: its attributes, in their order."""
    facts = vars(commitment) | {"releases": list(map(_plain, commitment.releases))}
    return {"draw": facts.pop("name"), **facts}


def _commitment_of(line: Mapping[str, Any]) -> Commitment:
    """Return the commitment that `_line_of` wrote; `LedgerFile` turns errors in it into a PrivacyError."""
    releases = tuple(map(_release_of, line["releases"]))
    _require(any(mechanisms_of("Budget", own) for own in each_group("Budget", releases)), "at least one release")
    texts = line["draw"], line["by"], line["released"], line["date"]
    _require(all(isinstance(text, str) for text in texts) and line["draw"], "a name and texts")
    date.fromisoformat(line["date"])
    _require(not line["released"] or _RELEASED.fullmatch(line["released"]), "the kind, shape and bound of a release")
    _require(line["ledger"] is None or isinstance(line["ledger"], str), "the path of a ledger")
    _require(isinstance(line["is_seeded"], bool), "true or false")
    others = {name: line[name] for name in ("by", "date", "ledger", "is_seeded", "released")}
    return Commitment(line["draw"], releases, **others)


def _require(is_so: Any, content: str) -> None:
    """Raise ValueError unless a line holds what it should."""
    if not is_so:
        raise ValueError(f"the line does not hold {content}")


def _worded(release: Release | Selection | Split) -> str:
    """Return a release in words; only a single one has its numbers."""
    if not isinstance(release, Release):
        return "a selection" if isinstance(release, Selection) else "groups of people"
    return f"{release.count} x sigma {release.noise_multiplier:g} at rate {release.sample_rate:g}"


def _plain(release: Release | Selection | Split) -> Any:
    """Return a release as JSON: a Release as a list of its numbers; an infinite shape of a Selection is null."""
    if isinstance(release, Release):
        plain: list[Any] = [release.noise_multiplier, release.sample_rate, release.scheme, release.count]
        more = [release.max_batch_size, release.num_examples, release.epoch_steps]
        return {"truncated": [*plain, *more[:2]], "epochs": [*plain, *more]}.get(release.scheme, plain)
    if isinstance(release, Split):
        return {"groups": [list(map(_plain, group)) for group in release.groups]}
    shape = None if release.shape == float("inf") else release.shape
    inner = list(map(_plain, release.releases))
    return {"best_of": inner, "mean": release.mean, "shape": shape, "count": release.count}


def _release_of(plain: Any) -> Any:
    """Return the release that `_plain` wrote."""
    if isinstance(plain, list):
        return Release(*cast("list[Any]", plain))
    if "groups" in plain:
        return Split(tuple(tuple(map(_release_of, group)) for group in plain["groups"]))
    shape = float("inf") if plain["shape"] is None else plain["shape"]
    return Selection(tuple(Release(*one) for one in plain["best_of"]), plain["mean"], shape, plain["count"])


def require_facts(facts: Mapping[str, Any]) -> None:
    """Raise PrivacyError unless the numbers of a budget are in their ranges."""
    require_positive("Budget", "total_epsilon", facts["total_epsilon"], "give a total, usually from 1 to 10")
    require_delta("Budget", facts["delta"])
    require_integer("Budget", "num_examples", facts["num_examples"], 1)
    require_choice("Budget", "privacy_unit", facts["privacy_unit"], get_args(PrivacyUnit))
    if facts["delta"] > 1 / facts["num_examples"]:
        condition = f"to be at most 1 / num_examples = {1 / facts['num_examples']:g}"
        raise expected("Budget", "delta", condition, facts["delta"])


def cost_of(commitments: Sequence[Commitment], *, delta: float, total_epsilon: float) -> float:
    """Return the epsilon of a budget's commitments together, the first one first."""
    if not commitments:
        return 0.0
    first = commitments[0].releases
    releases = [release for one in commitments for release in one.releases]
    found = filter_epsilon(releases, first=first, delta=delta, total_epsilon=total_epsilon)
    if commitments[1:]:
        return found
    # A single commitment was fixed before any result, so the smaller of PLD and filter holds. If only PLD lets it in,
    # nothing is admitted after it.
    return min(found, accounting.epsilon(first, delta=delta))
