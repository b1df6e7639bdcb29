"""The facts of a statement: public numbers of ledgers, of a budget, or of the records of a report."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from privgrad.accounting.accountant import attack_success, epsilon, gaussian_dp
from privgrad.accounting.mechanisms import Release, Selection, Split, each_group, releases_in
from privgrad.errors import expected, require_delta
from privgrad.ledger.budget import Budget, Commitment
from privgrad.ledger.ledger import Ledger
from privgrad.types import PRIVATE_MOMENT, SHUFFLED

_FALSE_POSITIVES = 0.01  # share of outsiders whom the attacker takes for members
_RATES = [point * point / 2500 for point in range(1, 50)]  # of the trade-off curve: closer together where it is steep
# Methods whose proof only their authors are known to have read: by the fact of a plan, those on which epsilon rests;
# and those that only use released gradients.
_DECIDING = {"epoch_steps": "Epochs (random allocation)", "noise_memory": "Noise with memory"}
_USING = ("DiSK", "MicroAdam", "Muon", "MuonBC")
_SOFTWARE = ("privgrad", "dp-accounting", "torch")  # it computes the numbers
_FOR_TEXT = ("plans", "stops", "commitments", "has_changed", "is_each", "trainings")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The public facts that a statement, a report and a card say. None: not known, or not for this kind of record."""

    epsilon: float  # of all that is stated together; with `is_each`, the largest of several trainings, each alone
    epsilon_rdp: float | None = None
    total_epsilon: float | None = None  # of a budget, as `spent`
    spent: float | None = None
    delta: float
    attack_success: float | None = None  # the largest share of members that an attacker finds at false_positive_rate
    false_positive_rate: float = _FALSE_POSITIVES
    trade_off: Sequence[Sequence[float]] | None = None  # false positive rates, and the attack success at each
    mu: float | None = None  # of Gaussian differential privacy, with its regret, as accounting.gaussian_dp
    mu_regret: float | None = None
    releases: int
    seeded_releases: int = 0
    covered_by_accountant: bool | None = True
    privacy_unit: str
    user: str | None = None  # what a user is, if no person
    num_examples: int | None = None
    at_least: bool | None = None  # whether there may be more units than num_examples
    groups_of_people: bool | None = None  # whether some releases are from separate groups of people
    digests: Sequence[str | None] | None = None  # of the ledgers, or of the budget; None for a ledger in memory
    file: str | None = None
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    versions: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in _SOFTWARE})
    # Each ledger's record of its plan, with `made`, its releases, `unused`, and `participations`, the most of one unit.
    plans: Sequence[Mapping[str, Any]] = ()
    trainings: int = 1  # the number of plans that are stated together; those that were made at once count as one
    stops: Sequence[tuple[int, int]] = ()  # planned and released steps of each ledger that has fewer than planned
    has_changed: bool = False  # whether a number of planned steps changed
    is_each: bool = False
    commitments: Sequence[tuple[Commitment, float]] = ()  # of a budget, each with its epsilon alone

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers by name, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None and name not in _FOR_TEXT}

    @property
    def one(self) -> str:
        """The word for a unit of privacy."""
        return (self.user or "person") if self.privacy_unit == "user" else "row"

    @property
    def many(self) -> str:
        """The word for several units of privacy."""
        return "people" if self.one == "person" else f"{self.one}s"

    @property
    def is_finite(self) -> bool:
        """Whether anything was released, at a finite epsilon."""
        return self.releases > 0 and math.isfinite(self.epsilon)

    @property
    def exceptions(self) -> list[str]:
        """The reasons why epsilon is no guarantee: "simulation", "canaries", "seed", "moment", "fixed", "delta"."""
        sources = " ".join(str(plan.get("side_information")) for plan in self.plans)
        counts_moment = any(plan.get("released") == "second moment" for plan in self.plans)
        found = {
            "simulation": any(plan.get("simulates") is not None for plan in self.plans),
            "canaries": any(plan.get("canaries") for plan in self.plans),
            "seed": self.seeded_releases > 0 or any(plan.get("research_seed") for plan in self.plans),
            "moment": PRIVATE_MOMENT in sources and not counts_moment,
            "fixed": self.covered_by_accountant is False,
            "delta": self.num_examples is not None and self.delta > 1 / self.num_examples,
        }
        return [name for name, is_so in found.items() if is_so]

    @property
    def is_guarantee(self) -> bool:
        """Whether epsilon protects, unless `stops` or `has_changed` followed from results."""
        return math.isfinite(self.epsilon) and not self.exceptions

    @property
    def unreviewed(self) -> dict[str, bool]:
        """The methods whose proof nobody is known to have reviewed independently, and whether epsilon rests on it."""
        found = dict[str, bool]()
        for plan in self.plans:
            words = re.findall(r"\w+", f"{plan.get('perturbation')} {plan.get('optimizers')}")
            found |= dict.fromkeys((name for fact, name in _DECIDING.items() if plan.get(fact)), True)
            found |= dict.fromkeys((name for name in _USING if name in words), False)
        groups = (own for one, _ in self.commitments for own in each_group("statement", one.releases))
        committed = [release for own in groups for release in releases_in(own)]
        has_epochs = any(one.scheme == "epochs" for one in committed)
        return found | ({_DECIDING["epoch_steps"]: True} if has_epochs else {})

    @property
    def gradients(self) -> int:
        """The number of gradients that ledgers hold, without sums of data."""
        return sum(plan["made"] for plan in self.plans if "released" not in plan)

    @property
    def unused(self) -> int:
        """The number of steps that are charged although results had stopped the training."""
        return sum(plan.get("unused", 0) for plan in self.plans)

    @property
    def max_rows(self) -> int | None:
        """How many rows of a person the trainings used, at most; None if that of one is not known."""
        held = [plan.get("max_rows") for plan in self.plans if "released" not in plan]
        return max(filter(None, held), default=None) if all(held) else None

    @property
    def is_on_grid(self) -> bool:
        """Whether all noise is known to lie on a grid."""
        return bool(self.plans) and all(plan.get("noise_on_grid") for plan in self.plans)

    @property
    def sources(self) -> list[str]:
        """The other data that the trainings used, as declared, each on one line."""
        given = [str(plan["side_information"]).split() for plan in self.plans if plan.get("side_information")]
        return list(dict.fromkeys(map(" ".join, given)))  # a line of its own would look like ours


def ledger_facts(
    ledgers: Sequence[Ledger], delta: float | None, *, function: str = "statement", bounds_attacks: bool = True
) -> Facts:
    """Return the facts of all releases of ledgers together; arguments and errors are those of `statement`."""
    unit = require_one_promise(function, ledgers)
    require_no_budget(function, ledgers)
    if delta is None:
        recorded = {ledger.plan_facts.get("delta") for ledger in ledgers}
        if len(recorded) != 1 or (delta := recorded.pop()) is None:
            got = ", ".join(sorted(map(str, recorded))) or "no delta"
            raise expected(function, "delta", "to be recorded and equal in all ledgers", got, "give delta")
    require_delta(function, delta)
    plans: list[dict[str, Any]] = [
        {
            **one.plan_facts,
            "made": one.releases - one.unused,
            "unused": one.unused,
            "participations": one.participations,
            "optimizers": one.optimizers,
        }
        for one in ledgers
    ]
    charged = [release for ledger in ledgers for release in ledger.charged]
    return Facts(
        epsilon=epsilon(charged, delta=delta, accountant="pld"),
        epsilon_rdp=epsilon(charged, delta=delta, accountant="rdp"),
        delta=delta,
        **(_of_attacks(charged) if bounds_attacks else {}),
        releases=sum(ledger.releases for ledger in ledgers),
        seeded_releases=sum(ledger.seeded_releases for ledger in ledgers),
        covered_by_accountant=all(plan["sampling"] != SHUFFLED for plan in plans),
        privacy_unit=unit,
        user=plans[0].get("user"),
        num_examples=min(int(plan["num_examples"]) for plan in plans),
        at_least=all(plan["sampling"] != "truncated" for plan in plans),
        digests=[ledger.head for ledger in ledgers],
        file="each ledger",
        plans=plans,
        **doubts(ledgers),
    )


def _of_attacks(charged: Sequence[Release]) -> dict[str, Any]:
    """Return the facts on attacks against all releases together."""
    mu, regret = gaussian_dp(charged)
    return {
        "attack_success": attack_success(charged, false_positive_rate=_FALSE_POSITIVES),
        "trade_off": [[rate, attack_success(charged, false_positive_rate=rate)] for rate in _RATES],
        "mu": mu,
        "mu_regret": regret,
    }


def require_no_budget(function: str, ledgers: Iterable[Ledger]) -> None:
    """Raise PrivacyError if a budget holds the releases of a ledger."""
    # Tuning may have chosen this training, and the epsilon of a chosen training alone is no guarantee.
    for ledger in ledgers:
        if ledger.commitment is not None:
            got = f"{ledger.path or 'a ledger'}, which is part of {ledger.commitment!r} in the budget {ledger.budget}"
            remedy = f"run `privgrad statement` on the budget's file, {ledger.budget}: its epsilon covers all parts"
            raise expected(function, "each ledger", "to be without a budget", got, remedy)


def require_one_promise(function: str, ledgers: Sequence[Ledger]) -> str:
    """Return the privacy unit that all ledgers protect; raise PrivacyError unless there is one, and no shared draw."""
    facts = [ledger.plan_facts for ledger in ledgers]
    if not facts or not all(facts):
        remedy = "give ledger.jsonl of a training that has begun"
        raise expected(function, "ledgers", "to hold a plan each", f"{len(facts)} ledgers", remedy)
    units = [f"{fact.get('privacy_unit', 'example')} {fact.get('user', '')}".strip() for fact in facts]
    promises = {f"{fact['neighboring_relation']} {unit}" for fact, unit in zip(facts, units, strict=True)}
    if len(promises) > 1:
        got = " and ".join(sorted(promises))
        raise expected(function, "ledgers", "to protect the same unit", got, "give the ledgers of each unit separately")
    draws = [ledger.draws for ledger in ledgers]
    if shared := sum(map(len, draws)) - len(set[str]().union(*draws)):
        remedy = "draw batches of its own for each training; one draw for two gradients costs more than both"
        raise expected(function, "ledgers", "to share no draw", f"{shared} draws in two ledgers", remedy)
    return str(facts[0].get("privacy_unit", "example"))


def doubts(ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """Return the facts of ledgers that must not have followed from results, so that epsilon is a guarantee."""
    # In epochs, participations are the steps of all epochs that were begun, and so of those that were charged.
    planned = [(max(one.planned_steps, default=0), one.releases, one.participations) for one in ledgers]
    return {
        "trainings": len(ledgers),
        "stops": sorted({(steps, made) for steps, made, charged in planned if max(made, charged) < steps}),
        "has_changed": any(one.planned_steps[1:] for one in ledgers),
    }


def budget_facts(budget: Budget) -> Facts:
    """Return the facts of everything that is committed in a budget, whether it was released already or not."""
    held, spent, delta = budget.commitments, budget.spent(), budget.delta
    # Several commitments may depend on results: then the cap is the guarantee, because it was fixed beforehand.
    size = max(spent, budget.total_epsilon if held[1:] else 0.0)

    def success(alpha: float) -> float:
        """Bound attacks by epsilon and delta alone: the profile by PLD needs plans that were fixed beforehand."""
        return min(1.0, math.exp(min(size, 700.0)) * alpha + delta, 1 - math.exp(-size) * (1 - delta - alpha))

    return Facts(
        epsilon=size,
        total_epsilon=budget.total_epsilon,
        spent=spent,
        delta=delta,
        attack_success=success(_FALSE_POSITIVES),
        trade_off=[[rate, success(rate)] for rate in _RATES],
        releases=len(held),
        seeded_releases=sum(one.is_seeded for one in held),
        privacy_unit=budget.privacy_unit,
        num_examples=budget.num_examples,
        groups_of_people=any(isinstance(release, Split) for one in held for release in one.releases),
        digests=[budget.head],
        file=budget.path.name,
        commitments=[(one, epsilon(one.releases, delta=delta)) for one in held],
    )


def has_random_runs(one: Commitment) -> bool:
    """Return whether a commitment holds a random number of runs, which PLD does not cover."""
    return any(isinstance(each, Selection) for group in each_group("statement", one.releases) for each in group)


def words_of(one: Commitment) -> str:
    """Return the name of a commitment, and what it may release."""
    first, *others = one.releases
    if one.released:  # "sum [2, 3], bound 1.0"
        kind, _, shape = one.released.partition(" [")
        count = math.prod(map(int, filter(None, shape.partition("]")[0].split(", "))))
        what = f"a noisy {kind} with {count:,} value{'s' * (count != 1)}"
    elif has_random_runs(one):
        what = "the best of several trainings, and its score"
    elif others or not isinstance(first, Release):
        what = "trainings that were compared, and their scores"
    else:
        what = f"a training with up to {first.count:,} noisy gradients"
    path = Path(one.name)  # the start of a path tells of the machine
    return f"{'/'.join(path.parts[-2:]) if path.is_absolute() else ' '.join(one.name.split())}: {what}"


def released_beside(plan: Mapping[str, Any]) -> str | None:
    """Return what each gradient was released with, by a plan's `norm_statistic`; None if it was released alone."""
    kinds = {
        "Slots": "noisy shares of gradients by length",
        "Count": "a noisy count of gradients within the clipping norm",
        "Histogram": "a noisy histogram of the gradients' norms",
    }
    recorded = str(plan.get("norm_statistic") or "")
    return f"{kinds.get(recorded.partition('(')[0], 'noisy numbers on their norms')}, {recorded}" if recorded else None
