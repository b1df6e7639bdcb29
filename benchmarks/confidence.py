"""Probabilities of two classes with and without the factor for clipping: `python -m benchmarks.confidence`.

Each training of the table model appends a line to results/tables/confidence.jsonl, with the log loss and the
calibration error of both, and is not run again. The third round of tables judges the factor, and DP-EBM runs
there, too. `--half` names the others, which were in view. Trainings with seeds are NOT private.
"""

from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer

from benchmarks.accuracy.run import read
from benchmarks.table_methods import predicted
from benchmarks.table_sets import DECLARED, Array, Half, Table, halves, load
from benchmarks.tables import metrics
from benchmarks.untuned import DELTA, Run, train_missing
from privgrad.heads import fitting
from privgrad.training.defaults import head_confidence

OUT = Path(__file__).resolve().parents[1] / "results/tables/confidence.jsonl"
EPSILONS = (3.0, 1.0, 0.3)
SEEDS = (0, 1)
METHODS = ("privgrad-tabular", "dp-ebm")


def scores(table: Table, made: Array, max_grad_norm: float | None) -> dict[str, Any]:
    """Return the scores of probabilities, and of those without the factor, if a C is given."""
    found = metrics(table, made.copy())
    if max_grad_norm is not None:
        before = np.exp(np.log(made.clip(1e-12)) / head_confidence(max_grad_norm))
        own = metrics(table, before / before.sum(1, keepdims=True))
        found |= {"max_grad_norm": max_grad_norm, "log_loss_before": own["log_loss"], "ece_before": own["ece"]}
    return {name: round(float(value), 5) for name, value in found.items()}


def record(run: Run, half: Half, table: Table) -> dict[str, Any]:
    """Train, and return the record."""
    with patch.object(fitting, "head_confidence", wraps=head_confidence) as factor:
        made = predicted(run.method, table, run.epsilon or 0.0, run.seed)
    norm = factor.call_args.args[0] if factor.called else None
    sizes = {"train_rows": len(table.labels["train"]), "test_rows": len(table.labels["test"])}
    return {**run._asdict(), "half": half, "delta": DELTA, **scores(table, made, norm), **sizes}


def table_of(half: Half | None = None) -> str:
    """Rows of docs/choosing-evidence.md: means by set at epsilon 3, 1 and 0.3: without the factor, with it, DP-EBM."""
    held = [one for one in read(OUT) if half in (None, one["half"])]
    lines: list[str] = []
    for name in dict.fromkeys(one["set"] for one in held):
        cells: list[str] = []
        for method, metric in (
            ("privgrad-tabular", "log_loss_before"),
            ("privgrad-tabular", "log_loss"),
            ("dp-ebm", "log_loss"),
            ("privgrad-tabular", "ece_before"),
            ("privgrad-tabular", "ece"),
        ):
            own = [one for one in held if (one["set"], one["method"]) == (name, method)]
            by_epsilon = ([one[metric] for one in own if one["epsilon"] == epsilon] for epsilon in EPSILONS)
            shown = [f"{np.mean(values):.3f}".replace("0.", ".", 1) for values in by_epsilon if values]
            cells.append(" / ".join(shown) or "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    half: Annotated[Half, typer.Option()] = "third",
    listed: Annotated[bool, typer.Option("--list", help="print what is missing, and train nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="print the means of what there is, and train nothing")] = False,
) -> None:
    if table:
        typer.echo(table_of(half))
        return
    torch.set_num_threads(1)
    two = [name for name, own in DECLARED.items() if own.get("classes", "").count("|") == 1]
    names = [name for name in two if halves()[name] == half]
    epsilons = EPSILONS if half == "third" else EPSILONS[:2]
    methods = METHODS if half == "third" else METHODS[:1]  # results/tables/runs.jsonl has DP-EBM on the others
    wanted = [
        Run(name, method, epsilon, seed)
        for seed in SEEDS
        for name in names
        for method in methods
        for epsilon in epsilons
    ]
    train_missing(wanted, OUT, load, lambda run, loaded: record(run, half, loaded), listed)


if __name__ == "__main__":
    typer.run(main)
