"""The summary of an experiment as a table for a terminal of 80 columns.

`privgrad train` and `compare` print it. The privacy guarantee does not rest on this file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from privgrad.experiments.records import Record, measured_on, score_of, simulated_epsilon, summarize
from privgrad.experiments.report.grids import MEANINGS
from privgrad.experiments.report.texts import SIMULATED, constants_text, method_texts, rate_title, trainings_text

_LEAST_ROOM = 16  # for the names of methods, if they are as long; with less room, other columns become narrower


def summary_table(records: Iterable[Record]) -> Table:
    """Return the rows of `summarize` as a table for a terminal of 80 columns.

    Args:
        records: one mapping per training run.
    Returns:
        A rich table with one row per method. The number of seeds is in the caption, if it is the same for all.
    Privacy:
        NOT private for the examples on which accuracy and loss were measured, and for the share clipped.
    """
    records = list(records)
    rows, texts = summarize(records), method_texts(records)
    title, score = rate_title(rows), score_of(records)
    columns = {
        "method": [row["method"] for row in texts],
        score: [row["accuracy"] for row in texts],
        "loss": [row["loss"] for row in texts],
        "metrics": ["\n".join(f"{k} {v}" for k, v in row["metrics"].items() if k != score) for row in texts],
        "ε": [row["epsilon"] + ("\n⚠ not covered" if row["uncovered"] else "") for row in texts],
        title: ["\n".join([row["rate"], *row["others"], *row["own"], *row["marks"]]) for row in texts],
        "seeds": [row["seeds"] for row in texts],
        "clipped": [row["clipped"] + ("\n⚠ low" if row["few_clipped"] else "") for row in texts],
        "floored": [row["floored"] for row in texts],
    }
    if len({row["seeds"] for row in rows}) == 1:
        del columns["seeds"]
    for name in ("clipped", "floored", "metrics"):
        if set(columns[name]) <= {"–", ""}:
            del columns[name]
    columns = _narrowed(columns, title)
    widths, for_names = _widths(columns)
    longest = max((len(name) for name in columns["method"]), default=0)
    # Text, not str: rich must not read a method's name as markup.
    caption = Text(_caption(records, rows, texts), style="table.caption")
    table = Table(caption=caption, caption_justify="left")
    table.add_column("method", width=max(min(longest, for_names), len("method")), overflow="fold")
    for name, width in zip(list(columns)[1:], widths, strict=True):
        table.add_column(name, justify="right", width=width)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _narrowed(columns: dict[str, list[str]], title: str) -> dict[str, list[str]]:
    """Return the columns, with numbers on more lines as long as there is too little room for the names of methods."""
    longest = max((len(name) for name in columns["method"]), default=0)

    def fits() -> bool:
        return _widths(columns)[1] >= min(longest, _LEAST_ROOM)

    if not fits() and {"clipped", "floored"} <= columns.keys():  # one below the other
        both = zip(columns.pop("clipped"), columns.pop("floored"), strict=True)
        columns["clipped\nfloored"] = [
            re.sub(r"\n(⚠) low", r" \1", clipped) + f"\n{floored}" for clipped, floored in both
        ]
    if not fits():
        for name in list(columns)[1:]:
            if name not in (title, "metrics"):
                columns[name] = [
                    re.sub(r" (?=±|\()|(?<=not|ver) |(?<=simulates) ", "\n", cell) for cell in columns[name]
                ]
    for name in filter(columns.__contains__, ("metrics", title)):
        while not fits():  # a metric or a tuned value below its name, the longest first
            lines = [line for cell in columns[name] for line in cell.split("\n") if re.match(r"[\w@]+ ", line)]
            if not lines:
                break
            widest = max(lines, key=len)
            columns[name] = [
                "\n".join(line.replace(" ", "\n", 1) if line == widest else line for line in cell.split("\n"))
                for cell in columns[name]
            ]
    return columns


def _widths(columns: Mapping[str, Sequence[str]]) -> tuple[list[int], int]:
    """Return the widths of all columns after the first, and the width that 80 columns leave for the first."""
    lines = [[line for cell in (name, *cells) for line in cell.split("\n")] for name, cells in columns.items()]
    widths = [max(map(len, column)) for column in lines[1:]]
    return widths, 80 - sum(widths) - 3 * len(columns) - 1


def _caption(records: Sequence[Record], rows: Sequence[Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines below the table: the measurement, the marks that occur, and the number of trainings."""
    counts = {row["seeds"] for row in rows}
    one = "One seed." if any(record.get("seed") is not None for record in records) else "One training."
    over = {0: "", 1: one} if len(counts) == 1 else {}
    seeds = over.get(next(iter(counts), 0), f"± one standard deviation over {_seeds(counts)}.")
    lines = [f"{seeds} Measured on {measured_on(records)} examples, without privacy for these."]
    lines += filter(None, [constants_text(records)])
    if simulated_epsilon(records) is not None:
        lines.append(SIMULATED)
    if any(row["rate"] == "noise_step" for row in rows):
        lines.append("u: noise step.")
    if any(row["clipped"] != "–" for row in texts):
        low = "; ⚠: below 10 %, lower C" if any(row["few_clipped"] for row in texts) else ""
        lines.append(f"clipped: share of gradients longer than C in the last tenth of the steps, NOT private{low}.")
    used = {mark for row in texts for mark in row["marks"]}
    lines += [f"{mark}: {meaning}" for mark, meaning in MEANINGS.items() if mark in used]
    return "\n".join([*lines, *filter(None, [trainings_text(rows)])]).strip()


def _seeds(counts: set[int]) -> str:
    """Return the number of seeds, if it is the same for all methods."""
    return f"{next(iter(counts))} seeds" if len(counts) == 1 else "seeds"
