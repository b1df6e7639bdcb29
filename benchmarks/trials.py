"""Do small trials find the noise step of a full training? They have the noise of `way = "trials"` with five candidates.

`python -m benchmarks.trials --task digits` trains at five noise steps, with the noise of a trial and with that of the
full training. It appends a line to results/private-tuning/runs.jsonl for each training that the file lacks.
`--show` prints, by task, the noise step that each choice finds. docs/choosing-evidence.md has the table. Scores are NOT
private here: the noise of a paid score is added when the table is made, many times, to show how often it misleads.
"""

import json
import math
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import privgrad as pg
from benchmarks.defaults import ROOT, TASKS, Task
from privgrad.accounting import accountant as accounting

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the suggested noise step
SHARE_OF_TRIALS, SHARE_OF_SCORES = 0.1, 0.05  # as in privgrad_lab.prices
RECORDS = ROOT / "results/private-tuning/runs.jsonl"


def trained(task: Task, factor: float, seed: int, *, trial: bool) -> dict[str, Any]:
    """Train at one noise step, with the noise of a trial or of the full training, and return the record."""
    began, model = time.time(), task.model(seed)
    found = pg.suggest(model, task.plan(seed), public_batch=task.public_batch, loss_fn=task.loss_fn)
    ratio = math.sqrt(len(FACTORS) / SHARE_OF_TRIALS) if trial else 1.0
    sigma = found.plan.noise_multiplier * ratio
    plan = replace(found.plan, noise_multiplier=sigma, target_epsilon=None)
    step = found.noise_step * factor
    optimizer = pg.optim.SGD(model.named_parameters(), noise_step=step, momentum=found.momentum)
    pg.fit(
        pg.PrivateGradient(model, task.loss_fn, plan, clip=found.clip),
        optimizer,
        task.train,
        scheduler=found.schedule,
        progress=False,
    )
    measured = task.measure(model)
    delta = found.plan.delta
    assert delta is not None
    alone = accounting.calibrate_noise_multiplier(
        target_epsilon=found.plan.epsilon(), delta=delta, sample_rate=1.0, steps=1
    )
    return {
        "trial": trial,
        "factor": factor,
        "noise_step": step,
        "noise_multiplier": sigma,
        "score_noise_std": alone * math.sqrt(len(FACTORS) / SHARE_OF_SCORES) / plan.num_examples,
        "seed": seed,
        "accuracy": measured.get("accuracy"),
        "epsilon": plan.epsilon(),
        "seconds": time.time() - began,
    }


def table(records: list[dict[str, Any]], draws: int = 1000) -> list[dict[str, Any]]:
    """Return, by task, the best noise step of full trainings, and how often a trial's choice is within a factor of 2.

    A choice takes one seed's trials, each with a score's noise; it is repeated with other noise and over all seeds.
    """
    rows: list[dict[str, Any]] = []
    stream = torch.Generator().manual_seed(0)
    for name in dict.fromkeys(record["task"] for record in records):
        mine = [record for record in records if record["task"] == name]
        full: dict[float, list[float]] = {}
        for record in mine:
            if not record["trial"]:
                full.setdefault(record["factor"], []).append(record["accuracy"])
        means = {factor: statistics.fmean(values) for factor, values in full.items()}
        best = max(means, key=lambda factor: means[factor])
        seeds = {record["seed"] for record in mine if record["trial"]}
        chosen: dict[float, int] = dict.fromkeys(FACTORS, 0)
        for seed in seeds:
            trials = {r["factor"]: r for r in mine if r["trial"] and r["seed"] == seed}
            noise = torch.randn(draws, len(FACTORS), generator=stream, dtype=torch.float64)
            scores = torch.tensor([trials[f]["accuracy"] for f in FACTORS], dtype=torch.float64)
            picks = (scores + noise * trials[FACTORS[0]]["score_noise_std"]).argmax(1)
            for index, factor in enumerate(FACTORS):
                chosen[factor] += int((picks == index).sum())
        total = sum(chosen.values())
        near = sum(count for factor, count in chosen.items() if 0.5 <= factor / best <= 2)
        rows.append(
            {
                "task": name,
                "best": next(r["noise_step"] for r in mine if r["factor"] == best),
                "best_accuracy": means[best],
                "within_2": near / total,
                "expected_accuracy": sum(means[f] * count for f, count in chosen.items()) / total,
                "chosen": {f"{f:g}": count / total for f, count in chosen.items()},
                "score_noise_std": mine[0]["score_noise_std"],
            }
        )
    return rows


def main(
    task: Annotated[list[str] | None, typer.Option(help=f"{', '.join(TASKS)}; repeat it for several")] = None,
    seed: Annotated[list[int], typer.Option(help="research seed")] = [0, 1, 2],  # noqa: B006
    out: Annotated[Path, typer.Option(help="file of the records")] = RECORDS,
    show: Annotated[bool, typer.Option(help="print the table of the records")] = False,
) -> None:
    """Train, append the records, and print the table if asked."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    for name in task or []:
        held = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        done = {(r["task"], r["factor"], r["seed"], r["trial"]) for r in held}
        missing = [(f, s, t) for t in (True, False) for s in seed for f in FACTORS if (name, f, s, t) not in done]
        made = TASKS[name]() if missing else None
        out.parent.mkdir(parents=True, exist_ok=True)
        for f, s, t in missing:
            assert made is not None
            record = {"task": name, **trained(made, f, s, trial=t)}
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    if show:
        for row in table([json.loads(line) for line in out.read_text().splitlines()]):
            print(json.dumps(row))  # noqa: T201


if __name__ == "__main__":
    typer.run(main)
