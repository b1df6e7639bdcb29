"""A statement on a training for people who decide about data: whose data, which protection, and what is not covered.

A reader may act on these, so each sentence must be true.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from privgrad.accounting.accountant import attack_success, epsilon, rounded_up
from privgrad.accounting.mechanisms import Release, Selection, Split, each_group
from privgrad.errors import require_delta
from privgrad.ledger.budget import Budget, Commitment
from privgrad.ledger.combining import recorded_delta, require_no_budget, require_one_promise
from privgrad.ledger.ledger import Ledger
from privgrad.types import COVERED, PRIVATE_MOMENT

_FALSE_POSITIVES = 0.01  # share of outsiders whom the attacker takes for members
_SOFTWARE = ("privgrad", "dp-accounting", "torch")  # it computes the numbers
_NOT_COVERED = (
    "Computations on the data before these releases, such as a vocabulary, a scaling or chosen features.",
    "Releases, trainings and tuning that are not recorded here. Later ones from the same data raise epsilon.",
    "The people whose data were used to evaluate the model without noise.",
    "Numbers that were chosen with these data in view, such as the clipping norm or the number of steps.",
    "The duration of a computation, its memory and its messages. Checkpoints hold durations.",
    "The data from which others made pretrained weights or features. These may hold data of the same people.",
    "The low-order bits of numbers, unless the noise lies on a grid. The noise of most trainings does not.",
)


@dataclass(frozen=True)
class Section:
    """A part of a statement: a heading, and sentences."""

    heading: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Statement:
    """A result of `statement`. `str(statement)` is the text.

    Attributes:
        sections: the text by section.
        numbers: the numbers of the text by name: epsilon (PLD), epsilon_rdp, delta, attack_success, releases and so on.
    """

    sections: tuple[Section, ...]
    numbers: dict[str, Any]

    def __str__(self) -> str:
        """Return the statement as text."""
        parts = (f"{part.heading}\n" + "\n".join(f"- {line}" for line in part.sentences) for part in self.sections)
        return "\n\n".join(("PRIVACY STATEMENT", *parts))

    def to_html(self) -> str:
        """Return the statement as a page of its own, which loads nothing from elsewhere."""
        parts: list[str] = []
        for part in self.sections:
            lines = "".join(f"<li>{html.escape(line)}</li>" for line in part.sentences)
            parts.append(f"<h2>{html.escape(part.heading)}</h2><ul>{lines}</ul>")
        style = ":root{color-scheme:light dark}body{font:16px/1.5 sans-serif;max-width:42em;margin:2em auto;"
        style += "padding:0 1em}li{margin:.4em 0}"
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Privacy statement</title>'
            f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
            f"<body><h1>Privacy statement</h1>{''.join(parts)}</body></html>\n"
        )


def statement(ledgers: Sequence[Ledger], *, delta: float | None = None) -> Statement:
    """Return a statement on all releases of one or several ledgers together.

    Args:
        ledgers: ledgers of trainings on the same data set, which protect the same unit.
        delta: in (0, 1). None: the delta that the ledgers record.
    Returns:
        Statement.
    Raises:
        PrivacyError: there is no ledger, the ledgers protect different units, no delta is known, or a budget holds the
            releases of a ledger. Its statement is `budget_statement`.
    Privacy:
        It holds public numbers only.
    """
    unit = require_one_promise("statement", ledgers)
    require_no_budget("statement", ledgers)
    plans = [ledger.plan_facts for ledger in ledgers]
    if delta is None:
        delta = recorded_delta("statement", ledgers)
    require_delta("statement", delta)
    is_covered = all(plan["sampling"] in COVERED for plan in plans)
    charged = [release for ledger in ledgers for release in ledger.charged]
    facts = _Facts(
        epsilon=epsilon(charged, delta=delta, accountant="pld", assume_poisson=not is_covered),
        epsilon_rdp=epsilon(charged, delta=delta, accountant="rdp", assume_poisson=not is_covered),
        delta=delta,
        attack_success=attack_success(charged, false_positive_rate=_FALSE_POSITIVES, assume_poisson=not is_covered),
        releases=sum(ledger.releases for ledger in ledgers),
        seeded_releases=sum(ledger.seeded_releases for ledger in ledgers),
        covered_by_accountant=is_covered,
        privacy_unit=unit,
        num_examples=min(int(plan["num_examples"]) for plan in plans),
        at_least=all(plan["sampling"] != "truncated" for plan in plans),
        digests=[ledger.head for ledger in ledgers],
        file="each ledger",
    )
    return Statement(_sections(facts, plans, _computed(facts, ledgers)), facts.numbers)


def budget_statement(budget: Budget) -> Statement:
    """Return a statement on everything that is committed in a budget, whether it was released already or not.

    Privacy:
        It holds public numbers only.
    """
    held, spent, delta = budget.commitments, budget.spent(), budget.delta
    # Several commitments may depend on results: then the cap is the guarantee, because it was fixed beforehand.
    size = max(spent, budget.total_epsilon if held[1:] else 0.0)
    # Of epsilon and delta alone: the profile by PLD needs plans that were fixed beforehand.
    alpha = _FALSE_POSITIVES
    success = min(1.0, math.exp(min(size, 700.0)) * alpha + delta, 1 - math.exp(-size) * (1 - delta - alpha))
    facts = _Facts(
        epsilon=size,
        total_epsilon=budget.total_epsilon,
        spent=spent,
        delta=delta,
        attack_success=success,
        releases=len(held),
        seeded_releases=sum(one.is_seeded for one in held),
        covered_by_accountant=True,
        privacy_unit=budget.privacy_unit,
        num_examples=budget.num_examples,
        groups_of_people=any(isinstance(release, Split) for one in held for release in one.releases),
        digests=[budget.head],
        file=budget.path.name,
    )
    cap = rounded_up(budget.total_epsilon)
    computed = [f"The data set has a budget: epsilon = {cap} for everything together."]
    if not held:
        computed.append("Nothing is committed yet.")
    elif len(held) == 1:
        computed.append(f"Its only commitment costs epsilon = {rounded_up(spent, 4)}.")
    else:
        computed.append(f"Its {len(held)} commitments cost epsilon = {rounded_up(spent, 4)} together.")
    computed.append("A commitment counts all releases that it may make, also those that were not made.")
    if len(held) == 1:
        kinds = {type(one) for group in each_group("statement", held[0].releases) for one in group}
        by = "RDP, because a number of runs is random" if Selection in kinds else "PLD"
        computed += [
            f"Quote this number. It was planned before any result, so the tightest accountant ({by}) holds.",
            f"With a second commitment, quote the budget, epsilon = {cap}.",
        ]
    elif held:
        computed += [
            f"Quote epsilon = {cap}, the budget. It holds even if a later commitment was chosen after a look at "
            "earlier results (a Renyi filter).",
            "The smaller number holds if all of them were planned before the first result.",
        ]
    computed += [_commitment_text(one, delta) for one in held]
    return Statement(_sections(facts, (), computed), facts.numbers)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """The numbers of a statement; None where ledgers, or a budget, have none. `Statement.numbers` has the others."""

    epsilon: float
    epsilon_rdp: float | None = None
    total_epsilon: float | None = None  # of a budget
    spent: float | None = None
    delta: float
    attack_success: float
    false_positive_rate: float = _FALSE_POSITIVES
    releases: int
    seeded_releases: int
    covered_by_accountant: bool
    privacy_unit: str
    num_examples: int
    at_least: bool | None = None  # whether there may be more examples than num_examples
    groups_of_people: bool | None = None
    digests: list[str | None]
    file: str
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    versions: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in _SOFTWARE})

    @property
    def numbers(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def one(self) -> str:  # the word for a unit of privacy
        return "person" if self.privacy_unit == "user" else "row"

    @property
    def many(self) -> str:
        return "people" if self.privacy_unit == "user" else "rows"


def _commitment_text(one: Commitment, delta: float) -> str:
    """Return what one commitment of a budget may release, its cost if it were alone, and who made it."""
    first, *others = one.releases
    if one.released:  # "sum [2, 3], bound 1.0"
        kind, _, shape = one.released.partition(" [")
        count = math.prod(map(int, filter(None, shape.partition("]")[0].split(", "))))
        what = f"a noisy {kind} with {count:,} value{'s' * (count != 1)}"
    elif others or not isinstance(first, Release):
        what = "trainings that were compared, and their scores"
    else:
        what = f"a training with up to {first.count:,} noisy gradients"
    path = Path(one.name)
    name = "/".join(path.parts[-2:]) if path.is_absolute() else " ".join(one.name.split())
    alone = rounded_up(epsilon(one.releases, delta=delta), 4)
    return f"{name}: {what}, by {one.by} on {one.date}. Alone it costs epsilon = {alone}."


def _sections(facts: _Facts, plans: Sequence[dict[str, Any]], computed: Sequence[str]) -> tuple[Section, ...]:
    given = (str(plan["side_information"]) for plan in plans if plan.get("side_information"))
    sources = dict.fromkeys(" ".join(source.split()) for source in given)  # a line of its own would look like ours
    versions = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    digests = ", ".join(head or "in memory, without a file" for head in facts.digests)
    attackers = (
        "The protection holds against anyone who sees all results: the trained models, and the noisy gradients, sums "
        "and scores.",
        f"It holds whatever else this person knows, even if it is all data but one {facts.one}.",
        "It does not hold against someone who can read the data or the memory of the training machine.",
    )
    record = (
        f"Checksum of the last line of {facts.file}: {digests}.",
        f"Date and versions of this statement: {facts.date}; {versions}.",
    )
    declared = (f"Other data that the training used, as declared: {source}." for source in sources)
    return (
        Section("In short", _in_short(facts, plans)),
        Section("People and data", _whose_data(facts)),
        Section("Attackers", attackers),
        Section("Meaning", _meaning(facts)),
        Section("Computation", tuple(computed)),
        Section("Not covered", (*_NOT_COVERED, *declared)),
        Section("Record", record),
    )


def _in_short(facts: _Facts, plans: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the result, with each reason for which it is no guarantee."""
    eps = f"epsilon = {rounded_up(facts.epsilon, 3)} and delta = {rounded_up(facts.delta)}"
    reasons: list[str] = []
    if any(plan.get("simulates") is not None for plan in plans):
        reasons.append("The training simulates another one in smaller batches, which protects nobody.")
    if any(plan.get("research_seed") for plan in plans) or facts.seeded_releases:
        reasons.append("A seed produced the noise. Anyone who knows the seed can remove the noise.")
    sources = " ".join(str(plan.get("side_information")) for plan in plans)
    if PRIVATE_MOMENT in sources and all(plan.get("released") != "second moment" for plan in plans):
        reasons.append("The features whiten by a private second moment, whose release is not counted here.")
    if not facts.covered_by_accountant:
        reasons.append("The batches had a fixed size. The computation holds for random sizes only (Poisson sampling).")
    if not facts.releases:
        return ("Nothing has been released from the data yet.", *reasons)
    if not math.isfinite(facts.epsilon):
        return ("These releases protect nobody: their epsilon is infinite.", *reasons)
    if facts.delta > 1 / facts.num_examples:
        reasons.append(
            f"This delta is above 1 / {facts.num_examples:,}. So large a delta would allow a method that publishes "
            f"all data of one {facts.one}. Choose one that is far smaller."
        )
    if reasons:
        return (f"These releases would satisfy differential privacy with {eps}, except for the following.", *reasons)
    return (f"The {facts.many} whose data these results use are protected by differential privacy with {eps}.",)


def _whose_data(facts: _Facts) -> tuple[str, ...]:
    one, many = facts.one, facts.many
    exactness = ", or one less." if facts.at_least is False else " or more. The true number is secret."
    unit = ": one entry of the data set, such as a line of a table, an image or a text."
    repeated = "A person with several rows is protected less: each row counts by itself."
    if facts.privacy_unit == "user":
        unit = " with all data of this person."
        repeated = "All data of a person must be in one row of the prepared data. The software cannot check this."
    groups = (
        f"Some releases are from separate groups of {many}, such as noisy scores on held-out {many}.",
        f"Each group is charged for its own releases. So held-out {many} have the same protection.",
    )
    return (
        f"The data set was declared to have {facts.num_examples:,} {many}{exactness}",
        f"The unit of protection is one {one}{unit}",
        f"The protection compares the results with those on data in which one {one} was added or removed.",
        *(groups if facts.groups_of_people else ()),
        repeated,
    )


def _meaning(facts: _Facts) -> tuple[str, ...]:
    one, many, wrong = facts.one, facts.many, facts.false_positive_rate
    of_budget = (
        "For a budget, it follows from epsilon and delta alone, whatever is released.",
        "So it is higher than that of a single release with the same epsilon, whose noise is known.",
    )
    return (
        f"Suppose an attacker wants to find out whether a given {one} was in the data.",
        f"Suppose the attacker is wrong for {wrong:.0%} of the {many} that were not.",
        f"Then the attacker is right for at most {rounded_up(100 * facts.attack_success, 3)}% of the {many} that were.",
        f"A guess, without the model, is right for {wrong:.0%}.",
        "This bound holds for every attack on what is covered. It is computed from the noise, not from an experiment.",
        *(of_budget if facts.total_epsilon is not None else ()),
        f"Any result is at most e^epsilon times as likely with the {one} as without, plus delta = "
        f"{rounded_up(facts.delta)}.",
    )


def _computed(facts: _Facts, ledgers: Sequence[Ledger]) -> list[str]:
    """Return which epsilon of ledgers to quote, and the numbers that it follows from."""
    plans = [ledger.plan_facts for ledger in ledgers]
    others = [plan["released"] for plan in plans if "released" in plan]
    lines: list[str] = []
    if len(others) < len(plans):
        gradients = sum(ledger.releases for ledger in ledgers if "released" not in ledger.plan_facts)
        lines.append(f"The training released {gradients:,} noisy gradients.")
    lines += [f"A noisy {kind} of the data was released." for kind in others]
    lines.append(f"Quote epsilon = {rounded_up(facts.epsilon, 4)}. It is computed by privacy loss distributions (PLD).")
    assert facts.epsilon_rdp is not None
    if facts.epsilon_rdp < math.inf or facts.epsilon == math.inf:
        by_rdp = rounded_up(facts.epsilon_rdp, 4)
        lines.append(f"The RDP accountant gives {by_rdp}. It is a looser bound on the same quantity.")
    else:
        lines.append("The RDP accountant does not cover truncated batches.")
    lines += if_planned(ledgers)
    for ledger, plan in zip(ledgers, plans, strict=True):
        generator = plan.get("noise_generator", "an unknown generator")
        moved = f", moved by {plan['adaptive_clip']}" if plan.get("adaptive_clip") else ""
        lines.append(
            f"Noise multiplier {plan['noise_multiplier']:.4g}, clipping norm {plan['max_grad_norm']:.4g}{moved}, "
            f"sampling rate {plan['sample_rate']:.4g}, noise from {generator}."
        )
        if (memory := plan.get("noise_memory")) is not None:
            lines += [
                f"The noise has memory: each person was in one of {memory['bands']} secret groups, which took turns.",
                "The sampling rate is that of the people in the group of a step.",
                f"So a person took part in at most {ledger.participations:,} of the gradients.",
            ]
        if plan["sampling"] == "truncated":
            lines.append(
                f"Batches held at most {plan['max_batch_size']:,} people. The cost assumes that the declared number in "
                "the data set is exact."
            )
        if (beside := released_beside(plan)) is not None:
            lines.append(f"Each gradient was released with {beside}. Gradient and numbers share the noise multiplier.")
    return lines


def if_planned(ledgers: Sequence[Ledger]) -> list[str]:
    """Return what must not have followed from results, so that epsilon is a guarantee, where a ledger leaves doubt."""
    lines = [
        f"Of {max(one.planned_steps):,} planned steps, {one.releases:,} are released. If results decided when to stop, "
        "the number here is no guarantee."
        for one in ledgers
        if one.releases < max(one.planned_steps, default=0)
    ]
    if ledgers[1:] or any(one.planned_steps[1:] for one in ledgers):
        planned = "the plans of all ledgers were" if ledgers[1:] else "the number of steps, which changed, was"
        lines += [
            f"The PLD number holds if {planned} fixed beforehand.",
            "If a later plan was chosen after a look at earlier results, no number here is a guarantee.",
            "A budget for the data set keeps such a sequence under one cap, which is the guarantee.",
        ]
    return lines


def public_facts(ledger: Ledger) -> dict[str, Any]:
    """Return the numbers of a ledger's plan, without the name of a commitment, which may be a path of the machine."""
    return {name: fact for name, fact in ledger.plan_facts.items() if name != "commitment"}


def released_beside(fact: Mapping[str, Any]) -> str | None:
    """Return what each gradient was released with, by a ledger's `norm_statistic`; None if it was released alone."""
    recorded = fact.get("norm_statistic")
    if not recorded:
        return None
    kinds = {
        "Slots": "noisy shares of gradients by length",
        "Count": "a noisy count of gradients within C",
        "Histogram": "a noisy histogram of the gradients' norms",
    }
    kind = str(recorded).partition("(")[0]
    return f"{kinds.get(kind, 'noisy numbers on their norms')}, {recorded}"
