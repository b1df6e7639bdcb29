"""How far a level method is behind the best of several by chance: `python -m benchmarks.chance --kept FOLDER`.

It keeps predictions of test rows in a folder, and trains what is missing there, with the first seed. Each set and
epsilon appends a line to results/tables/chance.jsonl, and `--table` prints what there is. To save time, it takes the
best few methods of a set by results/tables/runs.jsonl, and a slow network only if it is the best. With more methods,
the best would be further ahead by chance. A draw takes the test rows with replacement, the same ones for all methods,
and the recorded seeds, whose spread it enlarges for the few that there are. Every mean is moved to equality. So the
draw's best is ahead by chance alone. "level" is the share of draws in which the table model is behind it by more than
the limit: a point, or 3 % of R2. "p" is the share in which it is at least as far behind as it was measured. A last line
tells in how many sets a level method is behind by more, at one epsilon or both.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.accuracy.run import read
from benchmarks.table_methods import METHODS, predicted
from benchmarks.table_sets import Array, Half, Table, halves, load
from benchmarks.tables import EPSILONS
from benchmarks.tables import OUT as RUNS
from benchmarks.untuned import SEEDS

OUT = Path(__file__).resolve().parents[1] / "results/tables/chance.jsonl"
OURS = "privgrad-tabular"
DRAWS = 2000
FEW = 4  # the best of a set
SLOW = ("privgrad-network", "opacus-mlp")


def auc(made: Array, labels: Array, weights: Array) -> Array:
    """Return the area under the curve of probabilities (n,) for each row of weights (draws, n)."""
    order = np.argsort(made)
    starts = np.flatnonzero(np.r_[True, np.diff(made[order]) > 0])
    ours, others = (np.add.reduceat(weights[:, order] * (labels[order] == one), starts, axis=1) for one in (1, 0))
    return (ours * (np.cumsum(others, 1) - others / 2)).sum(1) / (ours.sum(1) * others.sum(1))


def r2(made: Array, labels: Array, weights: Array) -> Array:
    middle = (weights @ labels / weights.sum(1))[:, None]
    return 1 - weights @ (made - labels) ** 2 / (weights * (labels - middle) ** 2).sum(1)


def scores(table: Table, made: Array, weights: Array) -> Array:
    """Return the score of predictions for each row of weights (draws, n): R2, AUC of two classes, or accuracy."""
    labels = table.labels["test"]
    if table.target.kind == "number":
        return r2(made, labels, weights)
    if made.shape[1] == 2:
        return auc(made[:, 1], labels, weights)
    return weights @ (made.argmax(1) == labels) / weights.sum(1)


def kept(folder: Path, table: Table, method: str, epsilon: float) -> Array:
    """Return the predictions of the first seed's training, which a file of the folder holds or gets."""
    file = folder / f"{table.name}-{method}-{epsilon:g}-{SEEDS[0]}.npy"
    if not file.exists():
        np.save(file, predicted(method, table, epsilon, SEEDS[0]).astype(np.float32))
    return np.load(file).astype(float)


def best_of(table: Table, epsilon: float) -> tuple[str, dict[str, list[float]]]:
    """Return the metric of a set, and the scores by seed of its best methods, with that of a table first."""
    own = [one for one in read(RUNS) if (one["set"], one["epsilon"]) == (table.name, epsilon)]
    metric = next(one for one in ("r2", "auc", "accuracy") if one in own[0])
    values = {name: [one[metric] for one in own if one["method"] == name] for name in METHODS}
    order = sorted((name for name in METHODS if values[name]), key=lambda name: -np.mean(values[name]))
    few = [name for place, name in enumerate(order) if place == 0 or name not in SLOW][:FEW]
    return metric, {name: values[name] for name in (OURS, *few)}


def drawn(folder: Path, table: Table, epsilon: float, weights: Array, chosen: Array) -> tuple[dict[str, Any], Array]:
    """Return the record of a set, and whether each draw's best is ahead of the table model by more than the limit."""
    metric, by_seed = best_of(table, epsilon)
    of_rows = np.stack([scores(table, kept(folder, table, name, epsilon), weights) for name in by_seed])
    of_rows = of_rows[:, 1:] - of_rows[:, :1]  # the first draw has each row once
    found = np.array(list(by_seed.values()))  # (methods, seeds)
    means = found.mean(1)
    enlarged = np.sqrt(len(SEEDS) / (len(SEEDS) - 1))
    moved = of_rows + enlarged * (found[:, chosen].mean(2) - means[:, None])
    methods = list(by_seed)
    ahead, gap = moved.max(0) - moved[0], float(means.max() - means[0])
    limit = 0.03 * abs(means.max()) if metric == "r2" else 0.01
    record = {"set": table.name, "epsilon": epsilon, "metric": metric, "test_rows": len(table.labels["test"])}
    record |= {"best": methods[int(means.argmax())], "gap": round(gap, 5), "limit": round(float(limit), 5)}
    record |= {"level": round(float((ahead > limit).mean()), 4), "p": round(float((ahead >= gap).mean()), 4)}
    return record, ahead > limit


def measured(half: Half, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Return the record of each set and epsilon, and of the number of sets."""
    generator = np.random.default_rng(0)
    records: list[dict[str, Any]] = []
    behind: list[Array] = []
    for name in names:
        table = load(name)
        rows = len(table.labels["test"])
        weights = np.vstack([np.ones(rows), generator.multinomial(rows, np.full(rows, 1 / rows), size=DRAWS)])
        of_set = np.zeros(DRAWS, dtype=bool)
        for epsilon in EPSILONS:
            chosen = generator.integers(len(SEEDS), size=(DRAWS, len(SEEDS)))
            record, own = drawn(folder, table, epsilon, weights, chosen)
            records.append({"half": half, **record})
            of_set |= own
        behind.append(of_set)
    counts = np.sum(behind, axis=0)
    low, middle, high = np.quantile(counts, (0.05, 0.5, 0.95)).tolist()
    found = {"half": half, "set": None, "sets": len(behind), "mean": round(float(counts.mean()), 2)}
    return [*records, found | {"low": low, "median": middle, "high": high, "draws": DRAWS}]


def table_of(records: list[dict[str, Any]]) -> str:
    """Rows of docs/choosing-evidence.md: sets in which the table model is behind by more than the limit."""
    lines: list[str] = []
    for name, group in itertools.groupby((one for one in records if one["set"]), lambda one: one["set"]):
        own = list(group)
        if not any(one["gap"] > one["limit"] for one in own):
            continue
        cells = [f"{one['best'].removeprefix('privgrad-')}" for one in own]
        best = cells[0] if cells[0] == cells[1] else " / ".join(cells)
        shown = (f"{one['gap']:.3f}".replace("0.", ".", 1) for one in own)
        level, p = (" / ".join(f"{one[of]:.0%}".replace("%", " %") for one in own) for of in ("level", "p"))
        lines.append(f"| {name} | {own[0]['test_rows']:,} | {best} | {' / '.join(shown)} | {level} | {p} |")
    return "\n".join(lines)


def main(
    kept: Annotated[Path, typer.Option(help="a folder for the predictions")] = Path("kept"),
    half: Annotated[Half, typer.Option()] = "second",
    set_: Annotated[list[str] | None, typer.Option("--set", help="default: all of the half")] = None,
    table: Annotated[bool, typer.Option("--table", help="print what there is, and train nothing")] = False,
) -> None:
    if table:
        typer.echo(table_of([one for one in read(OUT) if one["half"] == half]))
        return
    torch.set_num_threads(1)
    names = [name for name, own in halves().items() if own == half and name in (set_ or [name])]
    kept.mkdir(parents=True, exist_ok=True)
    with OUT.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in measured(half, kept, names))


if __name__ == "__main__":
    typer.run(main)
