"""How far a level method is behind the best of several by chance: `python -m benchmarks.chance --kept FOLDER`.

It keeps predictions of test rows in a folder, and trains what is missing there. Each set and epsilon appends a line to
results/tables/chance.jsonl, and `--table` prints what there is. A draw takes the test rows with replacement, the same
ones for all methods, and seeds, whose spread it enlarges for the few that there are. Every mean is moved to equality.
So the draw's best is ahead by chance alone. "level" is the share of draws in which the table model is behind it by more
than the limit: a point, or 3 % of R2. "p" is the share in which it is at least as far behind as it was measured. Two
further lines tell in how many sets a level method is behind by more, at one epsilon or both.
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
from benchmarks.untuned import SEEDS

OUT = Path(__file__).resolve().parents[1] / "results/tables/chance.jsonl"
OURS = "privgrad-tabular"
DRAWS = 2000
FEW = 4  # the best of a set, which need not take long


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


def kept(folder: Path, table: Table, method: str, epsilon: float, seed: int) -> Array:
    """Return the predictions of a training, which a file of the folder holds or gets."""
    file = folder / f"{table.name}-{method}-{epsilon:g}-{seed}.npy"
    if not file.exists():
        np.save(file, predicted(method, table, epsilon, seed).astype(np.float32))
    return np.load(file).astype(float)


def drawn(folder: Path, table: Table, epsilon: float, weights: Array, chosen: Array) -> tuple[dict[str, Any], Array]:
    """Return the record of a set, and by how much each draw's best is ahead of the table model: (2, draws).

    The first row has all methods, and the second the best few.
    """
    classes = table.target.outputs if table.target.kind == "class" else 1
    methods = [name for name, of in METHODS.items() if of.private and of.applies(classes)]
    found = np.array(
        [[scores(table, kept(folder, table, name, epsilon, seed), weights) for seed in SEEDS] for name in methods]
    )  # (methods, seeds, draws), of which the first draw has each row once
    means = found[:, :, 0].mean(1)
    own, best = methods.index(OURS), int(means.argmax())
    of_rows = found.mean(1) - means[:, None]
    enlarged = np.sqrt(len(SEEDS) / (len(SEEDS) - 1))
    of_seeds = np.stack([found[:, places, 0].mean(1) for places in chosen], axis=1) - means[:, None]
    moved = (of_rows + enlarged * of_seeds)[:, 1:]
    few = sorted({own, *np.argsort(-means)[:FEW].tolist()})
    ahead = np.stack([moved.max(0) - moved[own], moved[few].max(0) - moved[own]])
    metric = "r2" if table.target.kind == "number" else "auc" if classes == 2 else "accuracy"
    limit = 0.03 * abs(means[best]) if metric == "r2" else 0.01
    gap = float(means[best] - means[own])
    record = {"set": table.name, "epsilon": epsilon, "metric": metric, "test_rows": len(table.labels["test"])}
    record |= {"best": methods[best], "gap": round(gap, 5), "limit": round(float(limit), 5), "methods": len(methods)}
    for name, values in zip(("", "_few"), ahead, strict=True):
        record[f"level{name}"] = round(float((values > limit).mean()), 4)
        record[f"p{name}"] = round(float((values >= gap).mean()), 4)
    return record, ahead > limit


def measured(half: Half, folder: Path) -> list[dict[str, Any]]:
    """Return the record of each set and epsilon of a half, and of the number of sets."""
    generator = np.random.default_rng(0)
    records: list[dict[str, Any]] = []
    behind: list[Array] = []
    for name in (name for name, own in halves().items() if own == half):
        table = load(name)
        rows = len(table.labels["test"])
        weights = np.vstack([np.ones(rows), generator.multinomial(rows, np.full(rows, 1 / rows), size=DRAWS)])
        of_set = np.zeros((2, DRAWS), dtype=bool)
        for epsilon in EPSILONS:
            chosen = generator.integers(len(SEEDS), size=(DRAWS + 1, len(SEEDS)))
            record, own = drawn(folder, table, epsilon, weights, chosen)
            records.append({"half": half, **record})
            of_set |= own
        behind.append(of_set)
    for which, counts in zip(("all", FEW), np.sum(behind, axis=0), strict=True):
        low, middle, high = np.quantile(counts, (0.05, 0.5, 0.95)).tolist()
        found = {"set": None, "half": half, "methods": which, "sets": len(behind), "mean": round(counts.mean(), 2)}
        records.append(found | {"low": low, "median": middle, "high": high, "draws": DRAWS})
    return records


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
    table: Annotated[bool, typer.Option("--table", help="print what there is, and train nothing")] = False,
) -> None:
    if table:
        typer.echo(table_of([one for one in read(OUT) if one["half"] == half]))
        return
    torch.set_num_threads(1)
    kept.mkdir(parents=True, exist_ok=True)
    with OUT.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in measured(half, kept))


if __name__ == "__main__":
    typer.run(main)
