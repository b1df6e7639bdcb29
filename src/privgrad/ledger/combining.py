"""The promises of ledgers, compared before their costs are added up or stated."""

from collections.abc import Iterable

from privgrad.errors import expected
from privgrad.ledger.ledger import Ledger


def require_no_budget(function: str, ledgers: Iterable[Ledger]) -> None:
    """Raise PrivacyError if a budget holds the releases of a ledger."""
    # Tuning may have chosen this training, and the epsilon of a chosen training alone is no guarantee.
    for ledger in ledgers:
        if ledger.commitment is not None:
            got = f"{ledger.path or 'a ledger'}, which is part of {ledger.commitment!r} in the budget {ledger.budget}"
            remedy = f"run `privgrad statement` on the budget's file, {ledger.budget}: its epsilon covers all parts"
            raise expected(function, "each ledger", "to be without a budget", got, remedy)


def require_one_promise(function: str, ledgers: Iterable[Ledger]) -> str:
    """Return the privacy unit that all ledgers protect; raise PrivacyError unless there is one, and no shared draw."""
    ledgers = list(ledgers)
    facts = [ledger.plan_facts for ledger in ledgers]
    if not facts or not all(facts):
        remedy = "give ledger.jsonl of a training that has begun"
        raise expected(function, "ledgers", "to hold a plan each", f"{len(facts)} ledgers", remedy)
    promises = {f"{fact['neighboring_relation']} {fact.get('privacy_unit', 'example')}" for fact in facts}
    if len(promises) > 1:
        got = " and ".join(sorted(promises))
        raise expected(function, "ledgers", "to protect the same unit", got, "give the ledgers of each unit separately")
    draws = [ledger.draws for ledger in ledgers]
    if shared := sum(map(len, draws)) - len(set[str]().union(*draws)):
        remedy = "draw batches of its own for each training; one draw for two gradients costs more than both"
        raise expected(function, "ledgers", "to share no draw", f"{shared} draws in two ledgers", remedy)
    return str(facts[0].get("privacy_unit", "example"))


def recorded_delta(function: str, ledgers: Iterable[Ledger]) -> float:
    """Return the delta that all ledgers record; raise PrivacyError if one records none, or another one."""
    recorded = {ledger.plan_facts.get("delta") for ledger in ledgers}
    if len(recorded) == 1 and (only := recorded.pop()) is not None:
        return float(only)
    got = ", ".join(sorted(map(str, recorded))) or "no delta"
    raise expected(function, "delta", "to be recorded and equal in all ledgers", got, "give delta")
