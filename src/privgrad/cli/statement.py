"""The command `privgrad statement`: a privacy statement on ledgers, as text, HTML or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from privgrad.cli.console import STDOUT, AsJson, print_json
from privgrad.statement.saved import opened, statement_of
from privgrad.statement.text import About


def statement(
    ledger: Annotated[
        list[Path], typer.Argument(help="Ledger files of trainings on the same data set, or the file of its budget.")
    ],
    delta: Annotated[float | None, typer.Option(help="Delta, in (0, 1). Default: the one in the ledgers.")] = None,
    title: Annotated[str, typer.Option(help="Title of the statement.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "",
    purpose: Annotated[str, typer.Option(help="Purpose of the model.")] = "",
    data: Annotated[str, typer.Option(help="Name of the data set.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Also write the statement to this HTML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say in sentences what is protected, and what is not.

    The statement is for people who decide about data. Title, model, purpose and data set are printed as declared.
    """
    about = About(title, model, purpose, data)
    found = statement_of("privgrad statement", [opened(path) for path in ledger], delta, about)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.to_html(), encoding="utf-8")
    if as_json:
        sections = [{"heading": part.heading, "sentences": list(part.sentences)} for part in found.sections]
        print_json({"head": found.head, "statement": sections, **found.numbers})
        return
    # A file gets the lines as they are; a terminal breaks them between words.
    STDOUT.print(str(found), highlight=False, markup=False, soft_wrap=not STDOUT.is_terminal)
