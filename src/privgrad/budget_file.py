"""The lines of a budget's file: its numbers first, then commitments, notes of begun ledgers, and released values.

`budget` calls this file, and `cli.statement` asks `is_budget`. The privacy guarantee of a budget rests on this file: a
commitment that was read as a cheaper one would leave room that is not there.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, cast, get_args

from privgrad.errors import expected, require_choice, require_delta, require_integer, require_positive
from privgrad.mechanisms import Release, Selection, Split, each_group, mechanisms_of
from privgrad.types import PrivacyUnit

_LONGEST_FIRST_LINE = 1 << 16


def is_budget(path: Path) -> bool:
    """Return whether a file is a budget, by its first line. `cli.statement` asks it; no privacy rests on the answer."""
    try:
        with path.open("rb") as file:
            first: Any = json.loads(file.readline(_LONGEST_FIRST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "budget" in first


@dataclass(frozen=True)
class Commitment:
    """The most that a training, or one other release, may cost.

    Attributes:
        name: unique in the budget.
        releases: all releases that it may make.
        by: the person who committed it.
        date: when, in UTC, as YYYY-MM-DD.
        ledger: the absolute path of the ledger that the releases are charged to; None if it was not given.
        is_seeded: whether a research seed makes the noise predictable.
        released: the kind, shape and bound of a single release by `releases`; "" for trainings.
    """

    name: str
    releases: tuple[Release | Selection | Split, ...]
    by: str
    date: str
    ledger: str | None = None
    is_seeded: bool = False
    released: str = ""

    @property
    def count(self) -> int:
        """The number of releases; a selection counts as one. `cli.budget` shows it."""
        return sum(release.count for own in (_flat(one) for one in self.releases) for release in own)

    @property
    def words(self) -> str:
        """The commitment in words, for errors."""
        said = ", ".join(map(_worded, self.releases))
        return f"{self.released or 'trainings'} with {said}" + (f" on ledger {self.ledger}" if self.ledger else "")

    @property
    def terms(self) -> tuple[Any, ...]:
        """Return the parts that a second commitment of the same name must share. `Budget` compares them."""
        found = [mechanisms_of("Budget", own) for own in each_group("Budget", self.releases)]
        return found, self.ledger, self.is_seeded, self.released


@dataclass
class BudgetState:
    """The content of a budget's file.

    Attributes:
        facts: the numbers of the budget.
        commitments: by name.
        values: the released values, by the name of their commitment.
        begun: names of the commitments whose ledger has its first line.
        head: the checksum of the last line.
    """

    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    commitments: dict[str, Commitment] = field(default_factory=dict[str, Commitment])
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    begun: set[str] = field(default_factory=set[str])
    head: str = ""

    def accept(self, number: int, line: Mapping[str, Any]) -> None:
        """Read one line. `LedgerFile` calls this for each line when it opens the file."""
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


def line_of(commitment: Commitment) -> dict[str, Any]:
    """Return a commitment as a line of the file holds it."""
    return {
        "draw": commitment.name,
        "releases": list(map(_plain, commitment.releases)),
        "by": commitment.by,
        "date": commitment.date,
        "ledger": commitment.ledger,
        "is_seeded": commitment.is_seeded,
        "released": commitment.released,
    }


def _commitment_of(line: Mapping[str, Any]) -> Commitment:
    """Return the commitment that `line_of` wrote.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: it is none. `LedgerFile` turns them into a PrivacyError.
    """
    releases = tuple(map(_release_of, line["releases"]))
    _require(any(mechanisms_of("Budget", own) for own in each_group("Budget", releases)), "at least one release")
    texts = line["draw"], line["by"], line["released"], line["date"]
    _require(all(isinstance(text, str) for text in texts) and line["draw"], "a name and texts")
    date.fromisoformat(line["date"])
    _require(line["ledger"] is None or isinstance(line["ledger"], str), "the path of a ledger")
    _require(isinstance(line["is_seeded"], bool), "true or false")
    terms = line["by"], line["date"], line["ledger"], line["is_seeded"], line["released"]
    return Commitment(line["draw"], releases, *terms)


def _require(is_so: Any, content: str) -> None:
    """Raise ValueError unless a line holds what it should."""
    if not is_so:
        raise ValueError(f"the line does not hold {content}")


def _flat(release: Release | Selection | Split) -> list[Release | Selection]:
    """Return the releases of all groups of a Split, or the release itself."""
    return [one for group in release.groups for one in group] if isinstance(release, Split) else [release]


def _worded(release: Release | Selection | Split) -> str:
    """Return a release in words; only a single one has its numbers."""
    if not isinstance(release, Release):
        return "a selection" if isinstance(release, Selection) else "groups of people"
    return f"{release.count} x sigma {release.noise_multiplier:g} at rate {release.sample_rate:g}"


def _plain(release: Release | Selection | Split) -> Any:
    """Return a release as JSON: a Release as a list of its numbers; an infinite shape of a Selection is null."""
    if isinstance(release, Release):
        plain: list[Any] = [release.noise_multiplier, release.sample_rate, release.scheme, release.count]
        return plain if release.scheme != "truncated" else [*plain, release.max_batch_size, release.num_examples]
    if isinstance(release, Split):
        return {"groups": [list(map(_plain, group)) for group in release.groups]}
    shape = None if release.shape == float("inf") else release.shape
    inner = list(map(_plain, release.releases))
    return {"best_of": inner, "mean": release.mean, "shape": shape, "count": release.count}


def _release_of(plain: Any) -> Release | Selection | Split:
    """Return the release that `_plain` wrote."""
    if "groups" in plain:
        return Split(tuple(tuple(map(_single_of, group)) for group in plain["groups"]))
    return _single_of(plain)


def _single_of(plain: Any) -> Release | Selection:
    """Return a release that is no Split."""
    if isinstance(plain, list):
        return Release(*cast("list[Any]", plain))
    shape = float("inf") if plain["shape"] is None else plain["shape"]
    return Selection(tuple(Release(*one) for one in plain["best_of"]), plain["mean"], shape, plain["count"])


def require_facts(facts: Mapping[str, Any]) -> None:
    """Raise PrivacyError unless the numbers of a budget are in their ranges. `Budget` calls it."""
    require_positive("Budget", "total_epsilon", facts["total_epsilon"], "give a total, usually from 1 to 10")
    require_delta("Budget", facts["delta"])
    require_integer("Budget", "num_examples", facts["num_examples"], 1)
    require_choice("Budget", "privacy_unit", facts["privacy_unit"], get_args(PrivacyUnit))
    if facts["delta"] > 1 / facts["num_examples"]:
        condition, remedy = f"to be at most 1 / num_examples = {1 / facts['num_examples']:g}", "give a smaller delta"
        raise expected("Budget", "delta", condition, facts["delta"], remedy)
