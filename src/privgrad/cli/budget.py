"""The command `privgrad budget`, which shows the commitments of a data set's budget and the rest.

typer calls `budget`. It prints what `privgrad.budget` computes. The privacy guarantee does not rest on this file.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from privgrad.accounting import epsilon
from privgrad.budget import Budget
from privgrad.cli.console import STDOUT, AsJson, print_json, tell
from privgrad.rounding import rounded_up


def budget(
    path: Annotated[Path, typer.Argument(help="File of the budget, such as budget.jsonl.")],
    as_json: AsJson = False,
) -> None:
    """Show the commitments of a data set's budget, the people who made them, and the rest.

    Each row has the epsilon of one commitment alone. The total is not their sum.
    """
    found = Budget(path)
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "by": one.by,
            "date": one.date,
            "releases": one.count,
            "epsilon": epsilon(one.releases, delta=found.delta),
        }
        for one in found.commitments
    ]
    answer: dict[str, Any] = {
        "total_epsilon": found.total_epsilon,
        "delta": found.delta,
        "num_examples": found.num_examples,
        "privacy_unit": found.privacy_unit,
        "spent": found.spent(),
        "left_for_one_release": found.left(),
    }
    if any(one.is_seeded for one in found.commitments):
        tell("note", "yellow", "some commitments have a research seed: predictable noise gives no privacy")
    if as_json:
        print_json({**answer, "commitments": rows})
        return
    total = rounded_up(found.total_epsilon)
    table = Table(title=f"Budget: epsilon {total} at delta = {rounded_up(found.delta)}")
    for heading in ("name", "by", "date"):
        table.add_column(heading, overflow="fold")
    for heading in ("releases", "epsilon alone"):
        table.add_column(heading, justify="right")
    for row in rows:
        texts = (Text(str(row[cell])) for cell in ("name", "by", "date"))
        table.add_row(*texts, str(row["releases"]), rounded_up(row["epsilon"], 4))
    STDOUT.print(table)
    STDOUT.print(f"spent: epsilon {rounded_up(answer['spent'], 4)} of {total}", highlight=False)
    if len(rows) > 1:
        first = rounded_up(rows[0]["epsilon"], 4)
        STDOUT.print(
            f"The first commitment alone cost {first}. Those after it may depend on its results, so all of them are "
            "counted by a Renyi filter, which is less tight. "
            f"Quote epsilon {total}, the budget.",
            highlight=False,
        )
    if answer["left_for_one_release"] == 0:
        STDOUT.print("left: nothing")
        return
    left = f"about {answer['left_for_one_release']:.4g}"
    STDOUT.print(f"left: one more Gaussian release of epsilon {left}. Epsilons do not simply add up", highlight=False)
