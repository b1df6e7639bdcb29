"""Accuracy by epochs and by Poisson samples at one epsilon: `python -m benchmarks.epochs --task sections --batch 250`.

Each is a comparison of its own, of one method: three noise steps or more, which a mean over validation examples
decides between, and three seeds on the test examples. Both schemes have the same plan and the same noise steps, and
noise that is calibrated for each. Their records are appended to results/epochs/runs.jsonl, unless it holds them. A
comparison that was interrupted resumes. `--show` prints the table of docs/choosing-evidence.md.
"""

import json
import shutil
import tomllib
import warnings
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal, cast

import torch
import typer

import privgrad as pg
from privgrad_lab.load_spec import check_spec
from privgrad_lab.runner import compare

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "results/epochs/runs.jsonl"
SCHEMES: tuple[Literal["poisson", "epochs"], ...] = ("poisson", "epochs")
KEPT = """method noise_step max_grad_norm seed phase epsilon delta updates seconds raw_clip_fraction
validation_accuracy validation_loss test_accuracy test_loss score data"""
MOMENTUM: dict[str, Any] = {"name": "DP-SGD", "optimizer": {"use": "SGD", "momentum": 0.9}}
Tables = dict[str, Any]
Record = dict[str, Any]

# The tables of each experiment, its batch sizes with their number of epochs, and the noise steps to try.
TASKS: dict[str, tuple[Tables, dict[int, int], list[float]]] = {
    "clothing": (
        {
            "data": {"use": "fashion-mnist", "validation": 5000},
            "model": {"use": "mlp", "hidden": 64},
            "privacy": {"target_epsilon": 3.0, "delta": 1e-5, "max_grad_norm": 0.1, "num_examples": 55_000},
        },
        {250: 4, 1000: 8, 5500: 10},
        [0.004, 0.01, 0.025],
    ),
    "sections": (
        {
            "data": {"use": "debian-sections", "validation": 2000, "limit": 47_000},
            "model": {"use": "bag-of-words"},
            "privacy": {"target_epsilon": 3.0, "delta": 1e-5, "max_grad_norm": 0.03, "num_examples": 45_000},
        },
        {250: 2, 1000: 8, 4500: 10},
        [0.1, 0.25, 0.6],
    ),
    "tags": (
        {
            "data": {"use": "debian-tags", "validation": 1500, "public": 160, "other_public": 160, "limit": 16_000},
            "model": {"use": "bag-of-words"},
            "privacy": {"target_epsilon": 3.0, "delta": 6.9e-5, "max_grad_norm": 0.03, "num_examples": 14_340},
        },
        {239: 2, 956: 12, 2868: 10},
        [0.1, 0.25, 0.6],
    ),
    "Adult": (
        {
            "data": tomllib.loads((ROOT / "examples/recipes/adult.toml").read_text())["data"]
            | {"validation_share": 0.1},
            "model": {"use": "head"},
            "privacy": {"target_epsilon": 1.0, "delta": 1e-6, "num_examples": 21_900, "max_grad_norm": 0.1},
            "run": {"schedule": "cosine"},
        },
        {219: 3, 1095: 10, 4380: 30},
        [0.15, 0.4, 1.1, 3.0],
    ),
    "autoencoder": (
        {
            "data": {"use": "fashion-mnist", "standardize": False, "reconstruct": True, "validation": 5000},
            "model": {"use": "autoencoder"},
            "privacy": {"target_epsilon": 0.79, "delta": 1.8e-5, "max_grad_norm": 0.01, "num_examples": 55_000},
            "methods": [{"name": "DP-SGD", "optimizer": {"use": "SGD", "momentum": 0.5}}],
            "tuning": {"by": "loss", "simulate": 5},
            "run": {"schedule": "linear"},
        },
        {250: 2, 1000: 4, 2750: 5},
        [0.01, 0.016, 0.025],
    ),
}


def read() -> list[Record]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


def of(records: list[Record], task: str, batch: int, scheme: str) -> list[Record]:
    wanted = (task, batch, scheme)
    return [record for record in records if (record["task"], record["batch"], record["scheme"]) == wanted]


def measured(task: str, batch: int, scheme: Literal["poisson", "epochs"], out: Path) -> list[Record]:
    """Run one comparison in a folder, and return its records."""
    tables, epochs_of, steps = TASKS[task]
    epochs, numbers = epochs_of[batch], tables["privacy"]
    privacy: Tables = {**numbers, "expected_batch_size": batch, "steps": numbers["num_examples"] // batch * epochs}
    found = pg.PrivacyPlan.for_budget(
        target_epsilon=privacy.pop("target_epsilon"),
        delta=privacy["delta"],
        max_grad_norm=privacy["max_grad_norm"],
        num_examples=privacy["num_examples"],
        batch_size=batch,
        steps=privacy["steps"],
        sampling=scheme,
    )
    privacy |= {"noise_multiplier": found.noise_multiplier, "sampling": scheme}
    given: Tables = {"methods": [MOMENTUM]} | tables | {"title": f"{task}, {batch}, {scheme}", "privacy": privacy}
    given["tuning"] = {"noise_steps": steps, "seeds": [100, 101], "extend": True} | given.get("tuning", {})
    given["run"] = {"seeds": [0, 1, 2], "num_evaluations": 1} | given.get("run", {})
    facts: Record = {"task": task, "batch": batch, "scheme": scheme, "epochs": epochs}
    facts |= {"noise_multiplier": found.noise_multiplier}
    made = compare(check_spec(given, ROOT / "epochs"), out, progress=False)
    return [facts | {key: one[key] for key in KEPT.split() if one.get(key) is not None} for one in made]


def cell(finals: list[Record]) -> str:
    """Return mean and standard deviation over the seeds as text."""
    scored = "test_accuracy" in finals[0]
    values = [100 * one["test_accuracy"] if scored else one["test_loss"] for one in finals]
    return f"{fmean(values):.2f} % ± {stdev(values):.2f}" if scored else f"{fmean(values):.4f} ± {stdev(values):.4f}"


def table() -> str:
    """Return the rows of docs/choosing-evidence.md: what both schemes have a record of."""
    records, lines = read(), list[str]()
    for task, (_, sizes, _) in TASKS.items():
        for batch, epochs in sizes.items():
            both = [of(records, task, batch, scheme) for scheme in SCHEMES]
            if all(both):
                poisson, ours = (found[0]["noise_multiplier"] for found in both)
                finals = [[one for one in found if one["phase"] == "final"] for found in both]
                cells = [task, f"{batch:,}", str(epochs), f"{100 * (1 - ours / poisson):.1f} %", *map(cell, finals)]
                cells.append(" / ".join(f"{found[0]['noise_step']:g}" for found in finals))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    task: Annotated[list[str], typer.Option(help=f"{', '.join(TASKS)}; repeat it for several")] = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="batch size; by default, all of the task")] = [],  # noqa: B006
    sampling: Annotated[list[str], typer.Option(help="poisson or epochs")] = list(SCHEMES),  # noqa: B006
    show: Annotated[bool, typer.Option(help="print the table")] = False,
) -> None:
    """Run the comparisons that the records lack."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    for name in task:
        for size in batch or TASKS[name][1]:
            for scheme in sampling:
                if not of(read(), name, size, scheme):
                    out = ROOT / f"runs/epochs/{name}-{size}-{scheme}"
                    made = measured(name, size, cast(Literal["poisson", "epochs"], scheme), out)
                    RECORDS.parent.mkdir(exist_ok=True)
                    with RECORDS.open("a") as file:
                        file.writelines(json.dumps(record) + "\n" for record in made)
                    shutil.rmtree(out)  # with its checkpoints
    if show:
        typer.echo(table())


if __name__ == "__main__":
    typer.run(main)
