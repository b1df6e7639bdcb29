"""The cost of a head: its own training, and later private trainings of its weights.

`Head` calls it. The privacy guarantee does not rest on this file, but the truth of the numbers of a saved head does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from privgrad.errors import PrivacyError, expected
from privgrad.ledger import Ledger
from privgrad.lineage import covers, ledgers_of
from privgrad.statement import Section, Statement, statement


def cost_of(
    model: nn.Module, privacy: Mapping[str, Any], ledgers: Iterable[Ledger]
) -> tuple[dict[str, Any], Sequence[Ledger]]:
    """Return the public facts of all trainings of a head, and their ledgers, as far as this process knows them.

    Args:
        model: of the head.
        privacy: the facts of the training that made the head.
        ledgers: of that training; none if another process made the head.
    Returns:
        The facts as they are, if nothing trained the head later. Otherwise epsilon covers all trainings, and `further`
        has the facts of the later ones.
    Raises:
        PrivacyError: the head was trained later, and no statement covers all of its trainings.
    """
    own = [ledger for ledger in ledgers if ledger.releases]
    further = [ledger for ledger in ledgers_of(model) if not any(covers(one, ledger) for one in own)]
    if not further:
        return dict(privacy), own
    numbers, cause = None, None
    try:
        numbers = statement([*own, *further], delta=privacy.get("delta")).numbers if own else None
    except PrivacyError as error:  # for different units, or within a budget
        cause = error
    if numbers is None:
        count, releases = len(further), sum(one.releases for one in further)
        got = f"{count} later training{'s' * (count > 1)} with {releases} release{'s' * (releases > 1)}"
        remedy = "call privgrad.save(head.model, folder, ledger=...) with the ledgers of all trainings, or their budget"
        remedy += "; for trainings of different units, save a copy of the head from before the later one"
        raise expected("Head", "the head", "to have had no training that it cannot count", got, remedy) from cause
    is_guarantee = numbers["covered_by_accountant"] and math.isfinite(numbers["epsilon"])
    epsilon = numbers["epsilon"] if is_guarantee else None
    later = [{**public_facts(ledger), "ledger": ledger.head} for ledger in further]
    return {**privacy, "epsilon": epsilon, "further": later}, [*own, *further]


def statement_beside(ledgers: Sequence[Ledger], delta: float | None) -> Statement | None:
    """Return the statement on the trainings of a head, for its folder.

    None if there is none: this process did not train the head, a budget holds its training, or its plan has no delta.
    """
    if not ledgers or delta is None or any(one.budget for one in ledgers):
        return None
    said = statement(ledgers, delta=delta)
    weights = Section("Weights", ("The process that trained the head with this record saved its weights.",))
    return replace(said, sections=(*said.sections, weights))


def public_facts(ledger: Ledger) -> dict[str, Any]:
    """Return the numbers of a ledger's plan, without the name of a commitment, which may be a path of the machine."""
    return {name: fact for name, fact in ledger.plan_facts.items() if name != "commitment"}
