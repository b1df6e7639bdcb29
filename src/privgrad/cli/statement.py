"""The command `privgrad statement`: a privacy statement on ledgers, as text, HTML or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from privgrad.cli.console import STDOUT, AsJson, print_json
from privgrad.statement.saved import opened, statement_of


def statement(
    ledger: Annotated[
        list[Path], typer.Argument(help="Ledger files of trainings on the same data set, or the file of its budget.")
    ],
    delta: Annotated[float | None, typer.Option(help="Delta, in (0, 1). Default: the one in the ledgers.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the statement to this HTML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a privacy statement for people who decide about data."""
    found = statement_of("privgrad statement", [opened(path) for path in ledger], delta)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.to_html())
    if as_json:
        sections = [{"heading": part.heading, "sentences": list(part.sentences)} for part in found.sections]
        print_json({"statement": sections, **found.numbers})
        return
    STDOUT.print(str(found), highlight=False, markup=False)
