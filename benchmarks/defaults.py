"""Accuracy of trainings by `privgrad.suggest`, and of the same trainings at multiples of the suggested noise step.

`python -m benchmarks.defaults --task sections --factor 1 --factor 2` appends a line to results/defaults/runs.jsonl for
each training that the file does not hold yet. docs/choosing-evidence.md has the table. Losses and accuracies are
measured on test examples (for the toy, on training examples) and are NOT private for these.
"""

import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks.table_methods import budget, decoded, labeled
from benchmarks.table_sets import load
from benchmarks.tables import metrics as metrics_of
from privgrad.types import LossFunction
from privgrad_lab import build, metrics
from privgrad_lab.load_spec import check_spec, load_spec
from privgrad_lab.papers.reproduce import prepared
from privgrad_lab.papers.toy_regression import Toy, losses, plan_of, problem, start
from privgrad_lab.spec import Spec

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = 256  # examples of the public batch, at most
ADULT = {
    "data": {"use": "adult", "validation": 2421},
    "model": {"use": "linear"},
    "privacy": {
        "target_epsilon": 1.0,
        "delta": 1e-6,
        "num_examples": 22_000,
        "expected_batch_size": 4096,
        "steps": 300,
    },
}


@dataclass(frozen=True)
class Task:
    """What a training needs, and how its model is measured."""

    train: TensorDataset
    public_batch: Any
    loss_fn: LossFunction
    plan: Callable[[int], pg.PrivacyPlan]  # of a seed
    model: Callable[[int], nn.Module]  # of a seed
    measure: Callable[[nn.Module], dict[str, float]]


def of_spec(spec: Spec) -> Task:
    data = build.make_data(spec)
    public = data.public if data.public is not None and len(data.public) else data.validation
    assert public is not None

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build.make_model(spec, data)

    return Task(
        data.train,
        tuple(values[:PUBLIC] for values in public.tensors),
        metrics.losses_for(data),
        spec.plan,
        model,
        lambda trained: metrics.measure(trained, data.test, data),
    )


def of_tables(tables: dict[str, Any], **privacy: Any) -> Task:
    """Return a task from the tables of an experiment; its methods, grids and schedule are left out."""
    kept = {key: tables[key] for key in ("data", "model")}
    kept |= {"privacy": {"max_grad_norm": 1.0} | tables["privacy"] | privacy}
    method = {"name": "defaults", "optimizer": {"use": "SGD", "noise_step": 1.0}}
    return of_spec(check_spec(kept | {"title": "defaults", "methods": [method]}, "defaults"))


def of_toy() -> Task:
    item = Toy(**prepared("adadps/toy"))
    x, y, _ = problem(item)
    # Features that are drawn anew are public: the frequencies are common knowledge. C needs the targets, too.
    other, targets, _ = problem(item, seed=1)
    return Task(
        TensorDataset(x, y),
        (other[:PUBLIC], targets[:PUBLIC]),
        losses,
        lambda seed: plan_of(item, seed),
        lambda seed: start(item, seed),
        lambda model: {"loss": losses(model, (x, y)).mean().item()},
    )


def of_table(name: str, *widths: int, act: type[nn.Module] = nn.ReLU) -> Task:
    """Return a network with hidden layers of these widths on the codes of a table; public rows are drawn evenly."""
    table = load(name)
    outputs = table.target.outputs

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        sizes = [table.codes["train"].shape[1], *widths]
        hidden = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), act())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs))

    def measure(trained: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            made = decoded(table, trained(table.codes["test"]))
        if table.target.kind == "number":
            made = made.clip(table.target.low, table.target.high)
        found = metrics_of(table, made)
        score = next(found[score] for score in ("r2", "auc", "accuracy") if score in found)
        return {"loss": found.get("log_loss", found.get("mae", math.nan)), "accuracy": score}

    def plan(seed: int) -> pg.PrivacyPlan:
        numbers = budget(table, 3.0, seed)
        size = min(2048, numbers["num_examples"])
        return pg.PrivacyPlan.for_budget(max_grad_norm=1.0, expected_batch_size=size, steps=800, **numbers)

    rows = table.public_batch(PUBLIC, 0)
    return Task(labeled(table, table.codes), rows, table.target.losses, plan, model, measure)


TASKS: dict[str, Callable[[], Task]] = {
    "storms": lambda: of_table("storms", 64),
    "HMDA": lambda: of_table("HMDA", 64, 64),
    "credit": lambda: of_table("credit_data", 32, act=nn.Tanh),
    "churn": lambda: of_table("wa_churn", 64),
    "stops": lambda: of_table("MplsStops", 64, 64),
    "Chile": lambda: of_table("Chile", 64),
    "diamonds": lambda: of_table("diamonds", 64),
    "hotels": lambda: of_table("hotel_rates", 64, 64),
    "pensions": lambda: of_table("k401ksubs", 32, act=nn.Tanh),
    # The rule had not seen these.
    "insurance": lambda: of_table("HealthInsurance", 64),
    "deaths": lambda: of_table("rotterdam", 64, 64),
    "wages": lambda: of_table("SLID", 64),
    "colleges": lambda: of_table("twoyear", 32, act=nn.Tanh),
    "tags3": lambda: of_tables(prepared("adadps/stackoverflow")),
    "tags1": lambda: of_tables(prepared("adadps/stackoverflow-eps1")),
    "sections": lambda: of_tables(prepared("heavy-tail/sections")),
    "autoencoder": lambda: of_tables(prepared("adadps/autoencoder")),
    "digits": lambda: of_spec(load_spec(ROOT / "examples/digits.toml")),
    "toy": of_toy,
    "adult": lambda: of_tables(ADULT),
    "tweets": lambda: of_tables(
        prepared("adadps/imdb-linear"), target_epsilon=3.0, expected_batch_size=1024, steps=300
    ),
}


def trained(task: Task, factor: float, seed: int) -> dict[str, Any]:
    """Train with the suggested settings, at a multiple of the noise step, and return the record."""
    began, model = time.time(), task.model(seed)
    found = pg.suggest(model, task.plan(seed), public_batch=task.public_batch, loss_fn=task.loss_fn)
    private_grad = pg.PrivateGradient(model, task.loss_fn, found.plan, clip=found.clip)
    step = found.noise_step * factor
    optimizer = pg.optim.SGD(model.named_parameters(), noise_step=step, momentum=found.momentum)
    pg.fit(private_grad, optimizer, task.train, scheduler=found.schedule, progress=False)
    measured = task.measure(model)
    return {
        "factor": factor,
        "noise_step": step,
        "C": found.plan.max_grad_norm,
        "input_norm": max(found.input_norms.values()),
        "seed": seed,
        "loss": measured["loss"],
        "accuracy": measured.get("accuracy"),
        "seconds": time.time() - began,
        "epsilon": found.plan.epsilon(),
        "schedule": found.schedule.decay,
    }


def networks() -> str:
    """Rows of docs/choosing-evidence.md: the scores of networks at multiples of the suggested noise step."""
    held = [json.loads(line) for line in (ROOT / "results/defaults/networks.jsonl").read_text().splitlines()]
    lines: list[str] = []
    for name in dict.fromkeys(one["task"] for one in held):
        own = {one["factor"]: one for one in held if one["task"] == name}
        scores = [f"{own[factor]['accuracy']:.3f}".replace("0.", ".", 1) for factor in sorted(own)]
        lines.append(f"| {name} | {own[1.0]['noise_step']:g} | {' | '.join(scores)} |")
    return "\n".join(lines)


def main(
    task: Annotated[list[str], typer.Option(help=f"{', '.join(TASKS)}; repeat it for several")],
    factor: Annotated[list[float], typer.Option(help="multiple of the suggested noise step")] = [1.0],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="research seed")] = [0, 1, 2],  # noqa: B006
    out: Annotated[Path, typer.Option(help="file of the records")] = ROOT / "results/defaults/runs.jsonl",
) -> None:
    """Train with the defaults, and append the records."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    for name in task:
        held = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        done = {(record["task"], record["factor"], record["seed"]) for record in held}
        missing = [(f, s) for f in factor for s in seed if (name, f, s) not in done]
        made = TASKS[name]() if missing else None
        for f, s in missing:
            assert made is not None
            record = {"task": name} | trained(made, f, s)
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            typer.echo(json.dumps(record))


if __name__ == "__main__":
    typer.run(main)
