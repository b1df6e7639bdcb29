"""When does AdamBC differ from SGD and Adam? A map over the size of the noise.

`python -m benchmarks.bias_map --task toy` trains a task with its noise divided by 1, 4, 16 and 64, as if that many
times more people took part at the same epsilon. Each method has its noise step searched again, by factors of 2.5 until
the best one is inside, with two seeds; three other seeds train the best one. Each training appends a line to
results/bias-map/runs.jsonl, and `--show` prints the tables of docs/papers/bias.md. Losses and accuracies are NOT
private for the examples that they are measured on. Nor are the shares of coordinates above the noise, which are
computed before the noise.
"""

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import privgrad as pg
from benchmarks.defaults import ROOT, TASKS, Task, of_tables
from privgrad.diagnostics import RawMoments
from privgrad.training.schedule import Decay
from privgrad_lab.papers.reproduce import prepared

Make = Callable[..., pg.optim.PrivateOptimizer]
RECORDS = ROOT / "results/bias-map/runs.jsonl"
DIVISORS = (1, 4, 16, 64)
RATIO = 2.5  # of neighboring noise steps
MOST = 12  # noise steps of one method
TUNING, FINAL = (100, 101), (0, 1, 2)
SHARES = (0.03, 0.1, 1.0, 10.0)  # second moment of the clipped mean, in variances of the noise


@dataclass(frozen=True)
class Setting:
    """A task with its C, schedule, criterion, and the noise step from which the first search starts."""

    task: Callable[[], Task]
    max_grad_norm: float
    noise_step: float
    by: str = "loss"
    schedule: Decay = "constant"


CLASSES = {  # a small copy of heavy-tail/fig2: 31 classes of 128 to 8 examples
    "data": {"use": "heavy-tail", "groups": 5, "log_size": 7},
    "model": {"use": "linear"},
    "privacy": {"noise_multiplier": 10.0, "delta": 1e-5, "num_examples": 640, "expected_batch_size": 640, "steps": 600},
}
SETTINGS = {
    "toy": Setting(TASKS["toy"], 0.5, 0.005),
    "classes": Setting(lambda: of_tables(CLASSES), 1.0, 0.005),
    "digits": Setting(TASKS["digits"], 0.1, 0.025, "accuracy", "cosine"),
    "tags": Setting(TASKS["tags3"], 0.03, 0.25, "accuracy"),
    "sections": Setting(TASKS["sections"], 0.03, 0.25, "accuracy"),
    "tweets": Setting(TASKS["tweets"], 0.05, 0.25, "accuracy"),
    "adult": Setting(TASKS["adult"], 0.1, 0.1, "accuracy"),
    "autoencoder": Setting(TASKS["autoencoder"], 0.01, 0.013, "loss", "linear"),
    "clothing": Setting(lambda: of_tables(prepared("dp-adam/fig1-image")), 0.1, 0.005, "accuracy"),
}


def made(kind: Make, **options: Any) -> Make:
    return lambda parameters, step: kind(parameters, noise_step=step, **options)


METHODS: dict[str, Make] = {  # of named parameters and a noise step
    "SGD": made(pg.optim.SGD, momentum=0.9),
    "Adam": made(pg.optim.Adam, eps=1e-8),
    **{f"AdamBC, floor {floor:g}": made(pg.optim.AdamBC, debias_floor=floor) for floor in (0.04, 0.25, 1.0, 4.0)},
}


def train(setting: Setting, task: Task, divisor: int, method: str, step: float, seed: int) -> dict[str, Any]:
    """Train once, and return the record."""
    began, model, plan = time.time(), task.model(seed), task.plan(seed)
    noise = plan.noise_multiplier / divisor
    plan = replace(plan, noise_multiplier=noise, max_grad_norm=setting.max_grad_norm, target_epsilon=None)
    private_grad = pg.PrivateGradient(model, task.loss_fn, plan)
    moments = RawMoments(private_grad) if method == "SGD" and seed == FINAL[0] else None
    optimizer = METHODS[method](model.named_parameters(), step)
    pg.fit(private_grad, optimizer, task.train, scheduler=pg.Schedule(setting.schedule), progress=False)
    measured = task.measure(model)
    record: dict[str, Any] = {
        "divisor": divisor,
        "method": method,
        "noise_step": step,
        "seed": seed,
        "noise_multiplier": noise,
        "loss": measured["loss"],
        "accuracy": measured.get("accuracy"),
        "groups": measured.get("raw_groups"),
        "seconds": time.time() - began,
    }
    if moments is not None:
        over = moments.over_noise()["raw_clean"].double()
        record["raw_shares"] = {f"{bound:g}": float((over > bound).double().mean()) for bound in SHARES}
        every = len(over) // 1_000_000 + 1
        record["raw_quantiles"] = [float(torch.quantile(over[::every], q)) for q in (0.1, 0.5, 0.9)]
    return record


def cost(setting: Setting, record: dict[str, Any]) -> float:
    value = record["loss"] if setting.by == "loss" else -record["accuracy"]
    return value if math.isfinite(value) else math.inf


def search(setting: Setting, trained: Callable[[float, int], dict[str, Any]], start: float) -> float:
    """Return the best noise step: neighbors are tried until the best one has worse ones on both sides."""
    found: dict[float, float] = {}

    def value(power: int) -> float:
        step = float(f"{start * RATIO**power:.2g}")
        if power not in found:
            found[power] = statistics.fmean(cost(setting, trained(step, seed)) for seed in TUNING)
        return found[power]

    low, high = -1, 1
    for power in (low, 0, high):
        value(power)
    while len(found) < MOST:
        best = min(found, key=lambda power: found[power])
        if best == low:
            low -= 1
            value(low)
        elif best == high:
            high += 1
            value(high)
        else:
            break
    return float(f"{start * RATIO ** min(found, key=lambda power: found[power]):.2g}")


class Trainings:
    """The trainings of one task: those of a file, and new ones, which are appended to it."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.setting, self._out = name, SETTINGS[name], out
        self._task: Task | None = None
        held = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        self._done = {(r["divisor"], r["method"], r["noise_step"], r["seed"]): r for r in held if r["task"] == name}

    def get(self, divisor: int, method: str, step: float, seed: int) -> dict[str, Any]:
        """Return the record of a training, which may have to be run first."""
        key = (divisor, method, step, seed)
        if key not in self._done:
            self._task = self._task or self.setting.task()
            self._done[key] = {"task": self.name} | train(self.setting, self._task, divisor, method, step, seed)
            with self._out.open("a") as file:
                file.write(json.dumps(self._done[key]) + "\n")
        return self._done[key]


def run(name: str, divisors: Sequence[int], chosen: Sequence[str], out: Path) -> None:
    """Search and train methods of a task."""
    trainings = Trainings(name, out)
    for method in chosen:
        start = trainings.setting.noise_step
        for divisor in divisors:
            start = search(trainings.setting, partial(trainings.get, divisor, method), start)
            values = [abs(cost(trainings.setting, trainings.get(divisor, method, start, seed))) for seed in FINAL]
            typer.echo(f"{name} / {divisor} {method}: u {start:g}, {statistics.fmean(values):.4g} {values}")


def table(name: str, records: Sequence[dict[str, Any]]) -> str:
    """Return a task's table in Markdown: mean and spread of each method, and the shares of coordinates.

    scripts/record_tables.py also calls it.
    """
    rows, setting = [record for record in records if record["task"] == name], SETTINGS[name]
    divisors = sorted({record["divisor"] for record in rows})
    lines = [f"| noise divided by | {' | '.join(map(str, divisors))} |", "|---|" + "---|" * len(divisors)]

    def add(title: str, cells: Iterable[str]) -> None:
        lines.append(f"| {title} | {' | '.join(cells)} |")

    for method in METHODS:
        cells: list[str] = []
        for divisor in divisors:
            finals = [r for r in rows if (r["method"], r["divisor"]) == (method, divisor) and r["seed"] in FINAL]
            cells.append(text(setting, [abs(cost(setting, record)) for record in finals]))
        add(method, cells)
    shares = {record["divisor"]: record["raw_shares"] for record in rows if "raw_shares" in record}
    for bound in SHARES[1:]:
        add(f"share above {bound:g}", (f"{100 * shares[divisor][f'{bound:g}']:.0f} %" for divisor in divisors))
    return "\n".join(lines) + "\n"


def text(setting: Setting, values: Sequence[float]) -> str:
    """Return mean and spread: an accuracy in percent, or a loss."""
    if not values:
        return "–"
    mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan
    if setting.by == "accuracy":
        return f"{100 * mean:.1f} % ± {100 * spread:.1f}"
    digits = max(0, 2 - math.floor(math.log10(mean)))
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def main(
    task: Annotated[list[str], typer.Option(help=f"{', '.join(SETTINGS)}; repeat it for several")] = [],  # noqa: B006
    divisor: Annotated[list[int], typer.Option(help="of the noise")] = list(DIVISORS),  # noqa: B006
    method: Annotated[list[str], typer.Option(help=f"{', '.join(METHODS)}")] = list(METHODS),  # noqa: B006
    shares: Annotated[bool, typer.Option(help="only the shares of coordinates, by one training of SGD")] = False,
    out: Annotated[Path, typer.Option(help="file of the records")] = RECORDS,
    show_tables: Annotated[bool, typer.Option("--show", help="print the tables")] = False,
) -> None:
    """Search, train and append the records; or print the tables."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in task:
        if shares:
            found = Trainings(name, out).get(1, "SGD", SETTINGS[name].noise_step, FINAL[0])
            typer.echo(f"{name}: {found['raw_shares']}")
        else:
            run(name, divisor, method, out)
    if show_tables:
        records = [json.loads(line) for line in out.read_text().splitlines()]
        for name in dict.fromkeys(record["task"] for record in records):
            typer.echo(f"{name}\n\n{table(name, records)}")


if __name__ == "__main__":
    typer.run(main)
