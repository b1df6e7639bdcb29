"""What a check is, and the trainings that checks share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import privgrad as pg
from benchmarks.bias_map import CLASSES, made
from benchmarks.defaults import ROOT, TASKS, Task, of_tables
from privgrad.gradient.contribution import Contribution
from privgrad.private_gradient import RawStep

FOLDER = ROOT / "results/claims"
STEPS = (0.01, 0.025, 0.06)  # noise steps on digits; the best one of each method is inside
CLASS_STEPS = (0.0025, 0.007, 0.02)  # noise steps on the small copy of the heavy tail
LEVELS = (1.0, 0.5, 0.3)  # losses at which biases are compared
Values = dict[str, float]


@dataclass(frozen=True)
class Check:
    """A check: what it measures in each case, at each noise step and with each seed.

    `best` names the value that chooses the noise step of a case: the smallest mean. `compared` is compared by seed with
    the first case of the group, a number of cases that follow each other.
    """

    claims: str
    measure: Callable[[str, float, int], Values]
    cases: Sequence[str]
    noise_steps: Sequence[float] = (0.0,)  # 0: the check has none
    seeds: Sequence[int] = (0, 1, 2)
    best: str = ""
    compared: str = ""
    group: int = 0


OPTIMIZERS = {
    "DP-GD": made(pg.optim.SGD),
    "DP-GDM": made(pg.optim.SGD, momentum=0.9),
    "DP-Adam": made(pg.optim.Adam),
    "DP-Adam, betas .5 .75": made(pg.optim.Adam, betas=(0.5, 0.75)),
    "DP-Adam, betas .9 .99": made(pg.optim.Adam, betas=(0.9, 0.99)),
    "DP-Adam, betas .99 .9999": made(pg.optim.Adam, betas=(0.99, 0.9999)),
    "DP-AdamBC, floor 0.041": made(pg.optim.AdamBC, debias_floor=0.041),
    "DP-AdamBC, floor 1": made(pg.optim.AdamBC, debias_floor=1.0),
    "DP-AdamBC, floor 4": made(pg.optim.AdamBC, debias_floor=4.0),
}


class Stop(NamedTuple):
    """A training after `step` steps, with the gradient that was released last."""

    step: int
    model: nn.Module
    released: pg.NoisyGradient
    plan: pg.PrivacyPlan


def training(
    task: Task,
    method: str,
    noise_step: float,
    seed: int,
    *,
    at: Iterable[int] = (),
    schedule: str = "constant",
    perturb: Contribution | None = None,
    observe: Iterable[Callable[[RawStep], None]] = (),
    decay: float = 0.0,
    **changed: Any,
) -> Iterator[Stop]:
    """Train, and yield the model after each number of steps in `at`, and after the last one."""
    model, stops = task.model(seed), set(at)
    plan = replace(task.plan(seed), target_epsilon=None, **changed)
    private_grad = pg.PrivateGradient(model, task.loss_fn, plan, perturb=perturb)
    for observer in observe:
        private_grad.register_raw_observer(observer)
    optimizer = OPTIMIZERS[method](model.named_parameters(), noise_step)
    scheduler: Any = pg.Schedule(schedule).of(optimizer, plan.steps)  # pyright: ignore[reportArgumentType]
    for step, batch in enumerate(plan.batches(task.train), start=1):
        released = private_grad(batch)
        optimizer.step(grad=released)
        scheduler.step()
        if decay:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 - decay)
        if step in stops or step == plan.steps:
            yield Stop(step, model, released, plan)


def last(stops: Iterator[Stop]) -> Stop:
    *_, stop = stops
    return stop


@cache
def task_of(name: str) -> Task:
    """Return a task: digits, or the small copy of the heavy tail with the paper's number of steps."""
    if name == "classes":
        return of_tables(CLASSES, steps=1795)
    return TASKS[name]()


def accuracy(model: nn.Module, rows: Sequence[Tensor]) -> float:
    with torch.no_grad():
        return float((model(rows[0]).argmax(1) == rows[1]).double().mean())


def scores(task: Task, model: nn.Module) -> Values:
    """Return the loss on the validation examples, which chooses noise steps, and the accuracy on test examples."""
    with torch.no_grad():
        validation = float(task.loss_fn(model, task.public_batch).mean())
    return {"validation loss": validation, "test accuracy": task.measure(model)["accuracy"]}


def slope(values: Tensor, of: Tensor) -> float:
    """Return the exponent of a power law between two positive vectors, by least squares of logarithms."""
    x, y = of.double().log(), values.double().log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's correlation."""
    found: Any = spearmanr(one.double().numpy(), other.double().numpy())
    return float(found.statistic)
