"""A statement on a training for people who decide about data: whose data, which protection, and what is not covered.

Users and `cli.statement` call `statement` for ledgers and `budget_statement` for a budget. The privacy guarantee does
not rest on this file: it puts the numbers of ledgers and of `accounting` into sentences. A reader may act on these,
so each one must be true.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from privgrad.accounting import attack_success, epsilon
from privgrad.budget import Budget
from privgrad.budget_file import Commitment
from privgrad.errors import require_delta
from privgrad.ledger import Ledger
from privgrad.ledger_facts import released_beside
from privgrad.mechanisms import Release, Selection, Split, each_group
from privgrad.promises import recorded_delta, require_no_budget, require_one_promise
from privgrad.rounding import rounded_up
from privgrad.types import COVERED, PRIVATE_MOMENT

_FALSE_POSITIVES = 0.01  # share of outsiders whom the attacker takes for members
_BOUND_OF_A_BUDGET = (
    "For a budget, it follows from epsilon and delta alone, whatever is released.",
    "So it is higher than that of a single release with the same epsilon, whose noise is known.",
)
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
        style = (
            ":root{color-scheme:light dark}"
            "body{font:16px/1.5 sans-serif;max-width:42em;margin:2em auto;padding:0 1em}li{margin:.4em 0}"
        )
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
    facts = [ledger.plan_facts for ledger in ledgers]
    if delta is None:
        delta = recorded_delta("statement", ledgers)
    require_delta("statement", delta)
    is_covered = all(fact["sampling"] in COVERED for fact in facts)
    charged = [release for ledger in ledgers for release in ledger.charged]
    by_pld, by_rdp = (
        epsilon(charged, delta=delta, accountant=kind, assume_poisson=not is_covered) for kind in ("pld", "rdp")
    )
    numbers: dict[str, Any] = {
        "epsilon": by_pld,
        "epsilon_rdp": by_rdp,
        "delta": delta,
        "attack_success": attack_success(charged, false_positive_rate=_FALSE_POSITIVES, assume_poisson=not is_covered),
        "false_positive_rate": _FALSE_POSITIVES,
        "releases": sum(ledger.releases for ledger in ledgers),
        "seeded_releases": sum(ledger.seeded_releases for ledger in ledgers),
        "covered_by_accountant": is_covered,
        "privacy_unit": unit,
        "num_examples": min(int(fact["num_examples"]) for fact in facts),
        "at_least": all(fact["sampling"] != "truncated" for fact in facts),
        "digests": [ledger.head for ledger in ledgers],
        "file": "each ledger",
        "date": _today(),
        "versions": _versions(),
    }
    return Statement(_sections(numbers, facts, _computed(numbers, ledgers)), numbers)


def budget_statement(budget: Budget) -> Statement:
    """Return a statement on everything that is committed in a budget, whether it was released already or not.

    `cli.statement` calls it; users can.

    Privacy:
        It holds public numbers only.
    """
    held, spent, delta = budget.commitments, budget.spent(), budget.delta
    kinds = {type(release) for one in held for group in each_group("statement", one.releases) for release in group}
    # Several commitments may depend on results: then the cap is the guarantee, because it was fixed beforehand.
    size, alpha = max(spent, budget.total_epsilon if held[1:] else 0.0), _FALSE_POSITIVES
    numbers: dict[str, Any] = {
        "epsilon": size,
        "total_epsilon": budget.total_epsilon,
        "spent": spent,
        "delta": delta,
        # Of epsilon and delta alone: the profile by PLD needs plans that were fixed beforehand.
        "attack_success": min(
            1.0, math.exp(min(size, 700.0)) * alpha + delta, 1 - math.exp(-size) * (1 - delta - alpha)
        ),
        "false_positive_rate": alpha,
        "releases": len(held),
        "seeded_releases": sum(one.is_seeded for one in held),
        "covered_by_accountant": True,
        "privacy_unit": budget.privacy_unit,
        "num_examples": budget.num_examples,
        "groups_of_people": any(isinstance(release, Split) for one in held for release in one.releases),
        "digests": [budget.head],
        "file": budget.path.name,
        "date": _today(),
        "versions": _versions(),
    }
    cap = rounded_up(budget.total_epsilon)
    cost, quoted = "Nothing is committed yet.", tuple[str, ...]()
    if len(held) == 1:
        by = "RDP, because a number of runs is random" if Selection in kinds else "PLD"
        cost = f"Its only commitment costs epsilon = {rounded_up(spent, 4)}."
        quoted = (
            f"Quote this number. It was planned before any result, so the tightest accountant ({by}) holds.",
            f"With a second commitment, quote the budget, epsilon = {cap}.",
        )
    elif held:
        cost = f"Its {len(held)} commitments cost epsilon = {rounded_up(spent, 4)} together."
        quoted = (
            f"Quote epsilon = {cap}, the budget. It holds even if a later commitment was chosen after a "
            "look at earlier results (a Renyi filter).",
            "The smaller number holds if all of them were planned before the first result.",
        )
    computed = (
        f"The data set has a budget: epsilon = {cap} for everything together.",
        cost,
        "A commitment counts all releases that it may make, also those that were not made.",
        *quoted,
        *(_commitment_text(one, budget.delta) for one in held),
    )
    return Statement(_sections(numbers, (), computed), numbers)


def _commitment_text(one: Commitment, delta: float) -> str:
    """Return what one commitment of a budget may release, its cost if it were alone, and who made it."""
    (first, *others), alone = one.releases, epsilon(one.releases, delta=delta)
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
    return f"{name}: {what}, by {one.by} on {one.date}. Alone it costs epsilon = {rounded_up(alone, 4)}."


def _today() -> str:
    """Return the date in UTC, as YYYY-MM-DD."""
    return datetime.now(UTC).date().isoformat()


def _versions() -> dict[str, str]:
    """Return the versions that computed the numbers."""
    return {name: version(name) for name in ("privgrad", "dp-accounting", "torch")}


def _sections(
    numbers: dict[str, Any], facts: Sequence[dict[str, Any]], computed: tuple[str, ...]
) -> tuple[Section, ...]:
    """Return the statement's text."""
    is_user = numbers["privacy_unit"] == "user"
    one, many = ("person", "people") if is_user else ("row", "rows")
    return (
        Section("In short", _in_short(numbers, facts, one, many)),
        Section("People and data", _whose_data(numbers, one, many, is_user=is_user)),
        Section(
            "Attackers",
            (
                "The protection holds against anyone who sees all results: the trained models, and the noisy "
                "gradients, sums and scores.",
                f"It holds whatever else this person knows, even if it is all data but one {one}.",
                "It does not hold against someone who can read the data or the memory of the training machine.",
            ),
        ),
        Section("Meaning", _meaning(numbers, one, many)),
        Section("Computation", computed),
        Section("Not covered", (*_NOT_COVERED, *_sources(facts))),
        Section("Record", _record(numbers)),
    )


def _in_short(numbers: dict[str, Any], facts: Sequence[dict[str, Any]], one: str, many: str) -> tuple[str, ...]:
    """Return the result, with each reason for which it is none."""
    size = numbers["epsilon"]
    eps = f"epsilon = {rounded_up(size, 3)} and delta = {rounded_up(numbers['delta'])}"
    reasons: list[str] = []
    if any(fact.get("simulates") is not None for fact in facts):
        reasons.append("The training simulates another one in smaller batches, which protects nobody.")
    if any(fact.get("research_seed") for fact in facts) or numbers["seeded_releases"]:
        reasons.append("A seed produced the noise. Anyone who knows the seed can remove the noise.")
    sources = " ".join(str(fact.get("side_information")) for fact in facts)
    if PRIVATE_MOMENT in sources and all(fact.get("released") != "second moment" for fact in facts):
        reasons.append("The features whiten by a private second moment, whose release is not counted here.")
    if not numbers["covered_by_accountant"]:
        reasons.append("The batches had a fixed size. The computation holds for random sizes only (Poisson sampling).")
    if not numbers["releases"]:
        return ("Nothing has been released from the data yet.", *reasons)
    if not math.isfinite(size):
        return ("These releases protect nobody: their epsilon is infinite.", *reasons)
    reasons += _warning_of_delta(numbers, one)
    if reasons:
        return (f"These releases would satisfy differential privacy with {eps}, except for the following.", *reasons)
    return (f"The {many} whose data these results use are protected by differential privacy with {eps}.",)


def _whose_data(numbers: dict[str, Any], one: str, many: str, *, is_user: bool) -> tuple[str, ...]:
    """Return what is protected."""
    lines = [
        f"The data set was declared to have {numbers['num_examples']:,} {many}"
        + (" or more. The true number is secret." if numbers.get("at_least", True) else ", or one less."),
        f"The unit of protection is one {one}"
        + (
            " with all data of this person."
            if is_user
            else ": one entry of the data set, such as a line of a table, an image or a text."
        ),
        f"The protection compares the results with those on data in which one {one} was added or removed.",
    ]
    if numbers.get("groups_of_people"):
        lines += [
            f"Some releases are from separate groups of {many}, such as noisy scores on held-out {many}.",
            f"Each group is charged for its own releases. So held-out {many} have the same protection.",
        ]
    if not is_user:
        lines.append("A person with several rows is protected less: each row counts by itself.")
    else:
        lines.append("All data of a person must be in one row of the prepared data. The software cannot check this.")
    return tuple(lines)


def _meaning(numbers: dict[str, Any], one: str, many: str) -> tuple[str, ...]:
    """Return what epsilon and delta mean for an attack."""
    success, wrong = numbers["attack_success"], numbers["false_positive_rate"]
    budget = "total_epsilon" in numbers
    return (
        f"Suppose an attacker wants to find out whether a given {one} was in the data.",
        f"Suppose the attacker is wrong for {wrong:.0%} of the {many} that were not.",
        f"Then the attacker is right for at most {rounded_up(100 * success, 3)}% of the {many} that were.",
        f"A guess, without the model, is right for {wrong:.0%}.",
        "This bound holds for every attack on what is covered. It is computed from the noise, not from an experiment.",
        *(_BOUND_OF_A_BUDGET if budget else ()),
        f"Any result is at most e^epsilon times as likely with the {one} as without, plus delta = "
        f"{rounded_up(numbers['delta'])}.",
    )


def _warning_of_delta(numbers: dict[str, Any], one: str) -> tuple[str, ...]:
    """Return what is wrong with a delta above 1 / n; nothing for a smaller one."""
    if numbers["delta"] <= 1 / numbers["num_examples"]:
        return ()
    return (
        f"This delta is above 1 / {numbers['num_examples']:,}. So large a delta would allow a method that publishes "
        f"all data of one {one}. Choose one that is far smaller.",
    )


def _computed(numbers: dict[str, Any], ledgers: Sequence[Ledger]) -> tuple[str, ...]:
    """Return which epsilon to quote, and the numbers that it follows from."""
    facts = [ledger.plan_facts for ledger in ledgers]
    others = [fact["released"] for fact in facts if "released" in fact]
    gradients = sum(ledger.releases for ledger in ledgers if "released" not in ledger.plan_facts)
    lines = [
        *([f"The training released {gradients:,} noisy gradients."] if len(others) < len(facts) else []),
        *(f"A noisy {kind} of the data was released." for kind in others),
        f"Quote epsilon = {rounded_up(numbers['epsilon'], 4)}. It is computed by privacy loss distributions (PLD).",
        f"The RDP accountant gives {rounded_up(numbers['epsilon_rdp'], 4)}. It is a looser bound on the same quantity."
        if numbers["epsilon_rdp"] < math.inf or numbers["epsilon"] == math.inf
        else "The RDP accountant does not cover truncated batches.",
    ]
    lines += _if_planned(ledgers)
    for ledger, fact in zip(ledgers, facts, strict=True):
        generator = fact.get("noise_generator", "an unknown generator")
        moved = f", moved by {fact['adaptive_clip']}" if fact.get("adaptive_clip") else ""
        lines.append(
            f"Noise multiplier {fact['noise_multiplier']:.4g}, clipping norm {fact['max_grad_norm']:.4g}{moved}, "
            f"sampling rate {fact['sample_rate']:.4g}, noise from {generator}."
        )
        lines += _drawn(fact, ledger)
        if (beside := released_beside(fact)) is not None:
            lines.append(f"Each gradient was released with {beside}. Gradient and numbers share the noise multiplier.")
    return tuple(lines)


def _if_planned(ledgers: Sequence[Ledger]) -> list[str]:
    """Return what must not have followed from results, so that epsilon is a guarantee, where a ledger leaves doubt."""
    ended = [one for one in ledgers if one.releases < max(one.planned_steps, default=0)]
    lines = [
        f"Of {max(one.planned_steps):,} planned steps, {one.releases:,} are released. If results decided when to stop, "
        "the number here is no guarantee."
        for one in ended
    ]
    if ledgers[1:] or any(one.planned_steps[1:] for one in ledgers):
        planned = "the plans of all ledgers were" if ledgers[1:] else "the number of steps, which changed, was"
        lines += [
            f"The PLD number holds if {planned} fixed beforehand.",
            "If a later plan was chosen after a look at earlier results, no number here is a guarantee.",
            "A budget for the data set keeps such a sequence under one cap, which is the guarantee.",
        ]
    return lines


def _drawn(fact: Mapping[str, Any], ledger: Ledger) -> list[str]:
    """Return how batches were drawn, and noise was made, where it is not by Poisson and independently."""
    lines = list[str]()
    if (memory := fact.get("noise_memory")) is not None:
        lines += [
            f"The noise has memory: each person was in one of {memory['bands']} secret groups, which took turns.",
            "The sampling rate is that of the people in the group of a step.",
            f"So a person took part in at most {ledger.participations:,} of the gradients.",
        ]
    if fact["sampling"] == "truncated":
        lines.append(
            f"Batches held at most {fact['max_batch_size']:,} people. The cost assumes that the declared number in the "
            "data set is exact."
        )
    return lines


def _sources(facts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the side information that was declared to be public."""
    given = (str(fact["side_information"]) for fact in facts if fact.get("side_information"))
    named = dict.fromkeys(" ".join(source.split()) for source in given)  # a line of its own would look like ours
    return tuple(f"Other data that the training used, as declared: {source}." for source in named)


def _record(numbers: dict[str, Any]) -> tuple[str, ...]:
    """Return the versions, and the checksums that identify the ledgers."""
    versions = ", ".join(f"{name} {number}" for name, number in numbers["versions"].items())
    digests = ", ".join(head or "in memory, without a file" for head in numbers["digests"])
    return (
        f"Checksum of the last line of {numbers['file']}: {digests}.",
        f"Date and versions of this statement: {numbers['date']}; {versions}.",
    )
