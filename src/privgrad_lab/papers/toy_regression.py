"""Items of kind "toy": linear regression with rare features, with and without privacy, with and without scales.

The private methods are tuned over one grid of noise steps.
"""

import json
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any, cast

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad import precondition
from privgrad.accounting.accountant import two_decimals_up
from privgrad.gradient.transform import Scales
from privgrad.optim import SGD
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.processes import one_thread
from privgrad_lab.records import Record, append, claim, read_records
from privgrad_lab.tuner import judge

_POINTS = 60  # per curve
_PRIVATE = ("DP-SGD", "AdaDPS")
Curve = list[tuple[int, float]]
Found = tuple[dict[str, Any], Table]  # the numbers of an item by name, and the same as a table
Toy = SimpleNamespace  # the keys of an item's file; `private` and `nonprivate` are settings of methods


@one_thread()
def toy_regression(raw: Mapping[str, Any], out: Path, *, progress: bool) -> Found:
    """Tune the private methods, train every method in every trial, and compare the losses with the expected ones.

    A second call resumes after the last finished training. The losses are NOT private.
    """
    item = Toy(**raw)
    claim(out, json.dumps(raw, indent=1))
    x, y, scales = problem(item)

    def train(method: str, phase: str, step: float, trial: int) -> None:
        """Train one private run that is not in the records."""
        key = {"method": method, "phase": phase, "seed": trial, "noise_step": step}
        bar.update(task, description=f"{method}, noise step {step:g}", refresh=True)
        if not any(key.items() <= record.items() for record in read_records(out)):
            curve = _private(item, method, step, trial, x, y, scales)
            rest = {"max_grad_norm": item.private["max_grad_norm"], "lr": None}
            append(out, [{**key, **rest, "raw_train_loss": curve[-1][1], "curve": curve}])
        bar.advance(task)

    tuning = len(item.private["noise_steps"]) * len(item.private["tuning_seeds"])
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("", total=len(_PRIVATE) * (tuning + item.trials) + len(item.nonprivate["lr"]))
        for method in _PRIVATE:
            for step, seed in product(item.private["noise_steps"], item.private["tuning_seeds"]):
                train(method, "tuning", step, seed)
            chosen = judge(read_records(out), method, "train_loss").best.noise_step
            assert chosen is not None
            for trial in range(item.trials):
                train(method, "final", chosen, trial)
        for method in item.nonprivate["lr"]:
            bar.update(task, description=method, refresh=True)
            if not any(record["method"] == method for record in read_records(out)):
                curves = _nonprivate(item, method, x, y, scales)
                rest = {"method": method, "phase": "final", "lr": item.nonprivate["lr"][method]}
                append(out, [rest | {"seed": t, "raw_train_loss": c[-1][1], "curve": c} for t, c in enumerate(curves)])
            bar.advance(task)
    return _result(item, out, read_records(out))


def _result(item: Toy, out: Path, records: list[Record]) -> Found:
    from privgrad_lab.report.figures import curves_figure, png

    methods = [*_PRIVATE, *item.nonprivate["lr"]]
    final = {m: [r for r in records if r["method"] == m and r["phase"] == "final"] for m in methods}
    curves = {m: [r["curve"] for r in runs] for m, runs in final.items()}
    for name, shown in (("private", _PRIVATE), ("nonprivate", item.nonprivate["lr"])):
        (out / f"{name}.png").write_bytes(png(partial(curves_figure, {m: curves[m] for m in shown}, yscale="log")))
    table = Table("method", "final loss", "expected", "noise step", "grid", title=item.title)
    table.caption = (
        f"Training loss (NOT PRIVATE), mean ± standard deviation over {item.trials} trials; one private training: "
        f"epsilon {two_decimals_up(plan_of(item, 0).epsilon())}."
    )
    found: dict[str, Any] = {}
    for method in methods:
        losses, target = [r["raw_train_loss"] for r in final[method]], item.expected[method]
        found[method] = {"mean": mean(losses), "sd": stdev(losses)}
        spread = f" ± {target['sd']:.2g}" if "sd" in target else ""
        grid = ["–", "–"]
        if method in _PRIVATE:
            verdict = judge(records, method, "train_loss")
            found[method] |= {"noise_step": verdict.best.noise_step, "grid": verdict.text}
            grid = [f"{verdict.best.noise_step:g}", verdict.text]
        table.add_row(method, f"{mean(losses):.3g} ± {stdev(losses):.1g}", f"{target['mean']:.3g}{spread}", *grid)
    return found, table


def problem(item: Toy, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (n, d), targets (n,), and the scales A (d,): the magnitudes, assumed to be public knowledge."""
    generator = torch.Generator().manual_seed(seed)
    often = torch.arange(item.features) < item.frequent
    x = (torch.rand(item.examples, item.features, generator=generator) < torch.where(often, 0.9, 0.01)).float()
    truth = torch.where(often, 0.01, 1.0)
    y = x @ truth + 0.01 * torch.randn(item.examples, generator=generator)
    return x, y, torch.where(often, 1.0, 0.01) + 1e-3


def plan_of(item: Toy, trial: int) -> PrivacyPlan:
    """Return the plan of one private trial; the trial's number is its research seed."""
    settings = {name: value for name, value in item.private.items() if name not in ("noise_steps", "tuning_seeds")}
    rate = item.batch_size / item.examples
    counts = {"expected_batch_size": item.batch_size, "num_examples": item.examples}
    return PrivacyPlan(**settings, **counts, sample_rate=rate, seed=trial)


def start(item: Toy, trial: int) -> nn.Linear:
    """Return a trial's initial model; all methods start from the same one."""
    model = nn.Linear(item.features, 1, bias=False)
    nn.init.normal_(model.weight, std=0.1, generator=torch.Generator().manual_seed(trial))
    return model


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each example, shape (B,)."""
    return (model(batch[0])[:, 0] - batch[1]).square() / 2


def _private(item: Toy, method: str, step: float, trial: int, x: Tensor, y: Tensor, scales: Tensor) -> Curve:
    known = Scales({"weight": scales[None]}, provenance="common knowledge", source="how frequent each feature is")
    made = precondition.fixed(known) if method == "AdaDPS" else None
    model, plan = start(item, trial), plan_of(item, trial)
    private_grad = PrivateGradient(model, losses, plan, precondition=made)
    optimizer = SGD(model.named_parameters(), noise_step=step)
    curve = [(0, _loss(model.weight, x, y)[0])]
    for number, batch in enumerate(plan.batches(TensorDataset(x, y)), start=1):
        optimizer.step(grad=private_grad(batch))
        if number % max(1, plan.steps // _POINTS) == 0 or number == plan.steps:
            curve.append((number, _loss(model.weight, x, y)[0]))
    return curve


def _nonprivate(item: Toy, method: Any, x: Tensor, y: Tensor, scales: Tensor) -> list[Curve]:
    weights = torch.cat([start(item, trial).weight.detach() for trial in range(item.trials)])
    lr = item.nonprivate["lr"][method] / (scales if method == "AdaS" else torch.ones_like(scales))
    generator, steps = torch.Generator().manual_seed(0), item.nonprivate["steps"]
    curves: list[Curve] = [[(0, loss)] for loss in _loss(weights, x, y)]
    for step in range(1, steps + 1):
        chosen = torch.randint(0, item.examples, (item.trials, item.batch_size), generator=generator)
        part = x[chosen]
        # The gradient is written out by hand, because nothing is clipped.
        residual = (part @ weights[:, :, None])[..., 0] - y[chosen]
        weights -= lr * (residual[:, None] @ part)[:, 0] / item.batch_size
        if step % max(1, steps // _POINTS) == 0 or step == steps:
            for curve, loss in zip(curves, _loss(weights, x, y), strict=True):
                curve.append((step, loss))
    return curves


@torch.no_grad()
def _loss(weights: Tensor, x: Tensor, y: Tensor) -> list[float]:
    return cast("list[float]", ((weights @ x.T - y).square().mean(1) / 2).tolist())
