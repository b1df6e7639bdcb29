"""How far the default noise step of a private head is from the best one, on tables of people.

`python -m benchmarks.heads` appends a line to results/heads/runs.jsonl for each training; `--show` prints the means.
The tasks are the incomes of Adult (classes), and the ages and working hours in the same table (numbers). No training
has a seed. Results are measured on test people, and are NOT private for these.
"""

import csv
import json
import statistics
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

import privgrad as pg
from privgrad.features import Bins, OneHot, join
from privgrad.training.defaults import head_noise_step

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples" / "recipes" / "adult.toml"  # has the public bins and categories
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the default noise step
BOUNDS = {"age": (17.0, 90.0), "hours-per-week": (1.0, 99.0)}
Decay = Literal["constant", "cosine"]


def table(label: str) -> tuple[Tensor, Tensor]:
    """Codes of all columns but the label, and the label."""
    declared = tomllib.loads(RECIPE.read_text())["data"]
    with Path(declared["file"]).expanduser().open(newline="") as file:
        people = list(csv.DictReader(file, skipinitialspace=True))
    blocks: list[Tensor] = []
    for name, column in declared["columns"].items():
        if name == label or column["kind"] == "ignore":
            continue
        values = [person[name].strip() for person in people]
        if column["kind"] == "number":
            blocks.append(Bins(tuple(column["edges"]))([float(value) for value in values]))
        else:
            blocks.append(OneHot(tuple(column["values"]))(values))
    own = [person[label].strip() for person in people]
    return join(*blocks), torch.tensor([float(value) if label in BOUNDS else float(value == ">50K") for value in own])


def trained(label: str, epsilon: float, decay: Decay, factor: float) -> dict[str, Any]:
    """Train once, and return the record."""
    rows, labels = table(label)
    tested = torch.arange(len(rows)) % 4 == 3
    is_number = label in BOUNDS
    target: dict[str, Any] = {"bounds": BOUNDS[label]} if is_number else {"num_classes": 2}
    step, began = factor * head_noise_step(decay, of_numbers=is_number), time.process_time()
    head = pg.fit_head(
        rows[~tested],
        labels[~tested] if is_number else labels[~tested].long(),
        **target,
        source="public bins and categories",
        target_epsilon=epsilon,
        delta=1e-6,
        num_examples=24_000,
        noise_step=step,
        schedule=decay,
        progress=False,
    )
    guesses, truth = head.predict(rows[tested]), labels[tested]
    if is_number:
        score = 1 - float((guesses - truth).square().mean() / truth.var(correction=0))
    else:
        score = float((guesses == truth).double().mean())
    return {
        "task": label,
        "epsilon": epsilon,
        "decay": decay,
        "factor": factor,
        "noise_step": step,
        "R2" if is_number else "accuracy": score,
        "cpu_seconds": round(time.process_time() - began, 1),
        "seed": None,
    }


def show(path: Path) -> None:
    """Print mean and spread by task, epsilon, decay and factor."""
    found = defaultdict[tuple[Any, ...], list[float]](list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        key = tuple(record[name] for name in ("task", "epsilon", "decay", "factor", "noise_step"))
        found[key].append(record.get("R2", record.get("accuracy")))
    for key, values in sorted(found.items()):
        spread = statistics.stdev(values) if values[1:] else 0.0
        typer.echo(f"{' '.join(map(str, key))}: {statistics.mean(values):.4f} ± {spread:.4f} ({len(values)})")


def main(
    task: Annotated[list[str], typer.Option(help="loan, age or hours-per-week")] = ["loan", "age", "hours-per-week"],  # noqa: B006
    epsilon: Annotated[list[float], typer.Option(help="privacy of a training")] = [1.0],  # noqa: B006
    runs: Annotated[int, typer.Option(help="trainings of each")] = 3,
    shown: Annotated[bool, typer.Option("--show", help="print the records so far, and train nothing")] = False,
    out: Annotated[Path, typer.Option(help="file of the records")] = ROOT / "results/heads/runs.jsonl",
) -> None:
    """Train heads, and append the records."""
    if shown:
        show(out)
        return
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    decays: tuple[Decay, ...] = ("constant", "cosine")
    for name in task:
        for budget in epsilon:
            for decay in decays:
                for factor in FACTORS:
                    for _ in range(runs):
                        with out.open("a") as file:
                            file.write(json.dumps(trained(name, budget, decay, factor)) + "\n")


if __name__ == "__main__":
    typer.run(main)
