"""The summary of an experiment as a table for a terminal of 80 columns.

`privgrad train` and `compare` print it. The privacy guarantee does not rest on this file.
"""

import re
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from privgrad.experiments.records import Record, measured_on, score_of, simulated_epsilon, summarize
from privgrad.experiments.report.texts import SIMULATED, row_texts


def summary_table(records: Iterable[Record]) -> Table:
    """Return the rows of `summarize` as a table for a terminal of 80 columns.

    Args:
        records: one mapping per training run.
    Returns:
        A rich table with one row per method.
    Privacy:
        NOT private for the examples on which accuracy and loss were measured.
    """
    records = list(records)
    measured = f"Measured on {measured_on(records)} examples, without privacy for these."
    simulated = "" if simulated_epsilon(records) is None else f" {SIMULATED}"
    table = Table(caption=f"± one standard deviation over seeds. {measured}{simulated}")
    names = ["method", score_of(records), "loss", "ε", "lr", "seeds", "floored"]
    rows: list[list[str]] = []
    for row in map(row_texts, summarize(records)):
        epsilon = row["epsilon"] + ("\n⚠ not covered" if row["uncovered"] else "")
        chosen = "\n".join([row["lr"], *row["others"], *(["⚠ edge"] if row["at_edge"] else [])])
        rows.append([row["method"], row["accuracy"], row["loss"], epsilon, chosen, row["seeds"], row["floored"]])
    longest = max((len(name) for name, *_ in rows), default=0)
    if _widths(names, rows)[1] < min(longest, 16):  # too little room for the names: put numbers on two lines
        for row in rows:
            row[1:] = [re.sub(r" (?=±|\()|(?<=not|ver) |(?<=simulates) ", "\n", cell) for cell in row[1:]]
    columns, for_names = _widths(names, rows)
    table.add_column(names[0], width=max(min(longest, for_names), len(names[0])), overflow="fold")
    for name, width in zip(names[1:], columns, strict=True):
        table.add_column(name, justify="right", width=width)
    for cells in rows:
        # Text, not str: rich must not read a method's name as markup.
        table.add_row(*map(Text, cells))
    return table


def _widths(names: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[int], int]:
    """Return the widths of all columns after the first, and the width that 80 columns leave for the first."""
    columns = list(zip(names, *rows, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns[1:]]
    return widths, 80 - sum(widths) - 3 * len(names) - 1
