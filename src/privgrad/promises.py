"""The promises of ledgers, compared before their costs are added up or stated.

`statement` and `cli.privacy` call it. The privacy guarantee does not rest on this file, but the truth of a statement
does: an epsilon of one training says nothing if the training was chosen among others.
"""

from collections.abc import Iterable, Sequence

from privgrad.errors import expected
from privgrad.ledger import Ledger


def require_no_budget(function: str, ledgers: Iterable[Ledger]) -> None:
    """Raise PrivacyError if a budget holds the releases of a ledger.

    `statement` and `privgrad epsilon` call it. Tuning may have chosen this training, and the epsilon of a chosen
    training alone is no guarantee. That of the budget is one.
    """
    for ledger in ledgers:
        if ledger.commitment is not None:
            got = f"{ledger.path or 'a ledger'}, which is part of {ledger.commitment!r} in the budget {ledger.budget}"
            remedy = f"run `privgrad statement` on the budget's file, {ledger.budget}: its epsilon covers all parts"
            raise expected(function, "each ledger", "to be without a budget", got, remedy)


def require_one_promise(function: str, ledgers: Iterable[Ledger]) -> str:
    """Return the privacy unit that all ledgers protect. `statement` and `privgrad epsilon` call it before they add up.

    Raises:
        PrivacyError: there is no ledger, one has no plan yet, they differ in the unit or the neighboring relation, or
            two of them charge one draw.
    """
    ledgers = list(ledgers)
    facts = [ledger.plan_facts for ledger in ledgers]
    if not facts or not all(facts):
        remedy = "give ledger.jsonl of a training that has begun"
        raise expected(function, "ledgers", "to hold a plan each", f"{len(facts)} ledgers", remedy)
    promises = {f"{fact['neighboring_relation']} {fact.get('privacy_unit', 'example')}" for fact in facts}
    if len(promises) > 1:
        got, remedy = " and ".join(sorted(promises)), "give the ledgers of each unit separately"
        raise expected(function, "ledgers", "to protect the same unit", got, remedy)
    _require_own_draws(function, ledgers)
    return str(facts[0].get("privacy_unit", "example"))


def _require_own_draws(function: str, ledgers: Sequence[Ledger]) -> None:
    """Raise PrivacyError if two ledgers charge one draw: their costs do not add up as those of separate draws do."""
    seen = set[str]()
    for ledger in ledgers:
        if shared := seen & ledger.draws:
            remedy = "draw batches of its own for each training; one draw for two gradients costs more than both"
            raise expected(function, "ledgers", "to share no draw", f"{len(shared)} draws in two ledgers", remedy)
        seen |= ledger.draws


def recorded_delta(function: str, ledgers: Iterable[Ledger]) -> float:
    """Return the delta that all ledgers record. `statement` and `privgrad epsilon` call it where none is given.

    Raises:
        PrivacyError: a ledger records none, or they record different ones.
    """
    recorded = {ledger.plan_facts.get("delta") for ledger in ledgers}
    if len(recorded) == 1 and (only := recorded.pop()) is not None:
        return float(only)
    got = ", ".join(sorted(map(str, recorded))) or "no delta"
    raise expected(function, "delta", "to be recorded and equal in all ledgers", got, "give delta")
