"""The command `privgrad budget`, which shows the commitments of a data set's budget and the rest."""

from pathlib import Path
from typing import Annotated, Any

import typer

from privgrad.accounting.accountant import epsilon, rounded_up
from privgrad.cli.console import STDOUT, AsJson, note, print_json, print_table
from privgrad.ledger.budget import Budget


def budget(
    path: Annotated[Path, typer.Argument(help="File of the budget, such as budget.jsonl.")], as_json: AsJson = False
) -> None:
    """Show the commitments of a data set's budget, the people who made them, and the rest.

    Each row has the epsilon of one commitment alone. The total is not their sum.
    """
    found = Budget(path)
    rows: list[dict[str, Any]] = [
        {"name": one.name, "by": one.by, "date": one.date, "releases": one.count}
        | {"epsilon": epsilon(one.releases, delta=found.delta)}
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
        note("some commitments have a research seed: predictable noise gives no privacy")
    if as_json:
        print_json({**answer, "commitments": rows})
        return
    total = rounded_up(found.total_epsilon)
    shown = [row | {"epsilon alone": rounded_up(row["epsilon"], 4)} for row in rows]
    title = f"Budget: epsilon {total} at delta = {rounded_up(found.delta)}"
    print_table(title, shown, left=("name", "by", "date"), right=("releases", "epsilon alone"))
    STDOUT.print(f"spent: epsilon {rounded_up(answer['spent'], 4)} of {total}", highlight=False)
    if len(rows) > 1:
        STDOUT.print(
            f"The first commitment alone cost {shown[0]['epsilon alone']}. Those after it may depend on its results, "
            "so all of them are counted by a Renyi filter, which is less tight. "
            f"Quote epsilon {total}, the budget.",
            highlight=False,
        )
    if answer["left_for_one_release"] == 0:
        STDOUT.print("left: nothing")
        return
    left = f"about {answer['left_for_one_release']:.4g}"
    STDOUT.print(f"left: one more Gaussian release of epsilon {left}. Epsilons do not simply add up", highlight=False)
