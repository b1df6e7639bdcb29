"""The command `privgrad statement`: a privacy statement on ledgers, as text, HTML or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from privgrad.cli.console import STDOUT, AsJson, print_json
from privgrad.errors import PrivacyError, expected
from privgrad.ledger.budget import Budget, is_budget
from privgrad.ledger.ledger import Ledger
from privgrad.statement import text as statements


def statement(
    ledger: Annotated[
        list[Path], typer.Argument(help="Ledger files of trainings on the same data set, or the file of its budget.")
    ],
    delta: Annotated[float | None, typer.Option(help="Delta, in (0, 1). Default: the one in the ledgers.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the statement to this HTML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a privacy statement for people who decide about data."""
    if any(map(is_budget, ledger)):
        if ledger[1:] or delta is not None:
            raise _not_alone(ledger, delta)
        found = statements.budget_statement(Budget(ledger[0]))
    else:
        found = statements.statement([Ledger(path, read_only=True) for path in ledger], delta=delta)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.to_html())
    if as_json:
        sections = [{"heading": part.heading, "sentences": list(part.sentences)} for part in found.sections]
        print_json({"statement": sections, **found.numbers})
        return
    STDOUT.print(str(found), highlight=False, markup=False)


def _not_alone(files: list[Path], delta: float | None) -> PrivacyError:
    """Return the error for a budget that is given with ledgers or a delta."""
    if len(files) > 1 and all(map(is_budget, files)):
        remedy = "give each budget alone. For people in several budgets, their epsilons add up, and their deltas too"
        return expected("privgrad statement", "the files", "to be one budget", f"{len(files)} budgets", remedy)
    outside = [path for path in files if not is_budget(path) and Ledger(path, read_only=True).commitment is None]
    if outside:
        condition, got = "to be a ledger of the budget", "a ledger without a budget"
        remedy = "give each file alone: each statement holds for the people of its file. For people in both, the "
        remedy += "epsilons add up, and the deltas too"
        return expected("privgrad statement", f"{outside[0]}", condition, got, remedy)
    got, remedy = f"{len(files)} files and delta {delta}", "give the budget's file alone: it covers all of its ledgers"
    return expected("privgrad statement", "a budget", "to be given alone", got, remedy)
