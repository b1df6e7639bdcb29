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
    """Show what a data set's budget was spent on, and by whom."""
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
    title = f"Budget: epsilon {total} at delta = {rounded_up(found.delta)}"
    print_table(rows, title=title, caption="Epsilon is that of each commitment alone." if rows else None)
    lines = [f"spent: epsilon {rounded_up(answer['spent'], 4)} of {total}"]
    if len(rows) > 1:
        lines.append(
            "Later commitments may depend on results of earlier ones, so all of them are counted by a Renyi filter, "
            f"which is less tight. Quote epsilon {total}, the budget."
        )
    left = answer["left_for_one_release"]
    more = f"one more Gaussian release of epsilon about {left:.4g}. Epsilons do not simply add up."
    STDOUT.print("\n".join([*lines, f"left: {more if left else 'nothing'}"]), highlight=False)
