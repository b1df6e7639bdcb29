"""Checks of the paper on BAM, on a small network for digits. All are measured before the noise: NOT private."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import privgrad as pg
from benchmarks.claims.shared import (
    FOLDER,
    LEVELS,
    STEPS,
    Check,
    Stop,
    Values,
    last,
    rank_correlation,
    scores,
    task_of,
    training,
)
from benchmarks.defaults import ROOT
from privgrad.diagnostics import raw_clipping_bias
from privgrad.gradient.contribution import Contribution

NORM = 0.1  # C, which nearly all gradients exceed at first, and most at the end
STEP = 0.025
SHARP = 0.05  # the radius at which sharpness is measured
STOPS = (50, 100, 200)
NORMS = ("0.01", "0.03", "0.1", "0.3", "1", "3", "10")
METHODS: dict[str, Callable[[], Contribution | None]] = {
    "DP-SGD": lambda: None,
    "DP-SAT, radius 0.086": partial(pg.perturb.SAT, 0.086),
    "BAM, radius 0.02": partial(pg.perturb.BAM, 0.02),
    "BAM, radius 0.08": partial(pg.perturb.BAM, 0.08),
    "SAM (NOT private), radius 0.086": partial(pg.perturb.RawSAM, 0.086),
}


def probed(model: nn.Module, norm: float, rows: Sequence[Tensor]) -> Values:
    """Return the bias of clipping on these rows, at the weights, and the mean norm of a gradient."""
    digits = task_of("digits")
    found = raw_clipping_bias(model, digits.loss_fn, tuple(rows), max_grad_norm=norm)
    everything = raw_clipping_bias(model, digits.loss_fn, tuple(rows), max_grad_norm=1e-9)
    return found | {"mean norm": everything["raw_bound"]}


def training_loss(model: nn.Module) -> float:
    digits = task_of("digits")
    with torch.no_grad():
        return float(digits.loss_fn(model, digits.train.tensors).mean())


@cache
def halfway(seed: int) -> Stop:
    """Return a training after half of its steps."""
    return next(training(task_of("digits"), "DP-GDM", STEP, seed, at=(100,), max_grad_norm=NORM))


def variance(case: str, _: float, seed: int) -> Values:
    """D2: bias and noise of the release by C, at one checkpoint, over the length of the mean gradient g."""
    digits, stop = task_of("digits"), halfway(seed)
    found = probed(stop.model, float(case), digits.train.tensors)
    plan = replace(stop.plan, max_grad_norm=float(case))
    count = sum(parameter.numel() for parameter in stop.model.parameters())
    noise, g = plan.noise_std * count**0.5, found["raw_norm"]
    clipped = ((found["raw_along"] * g) ** 2 + found["raw_across"] ** 2) ** 0.5
    return {
        "|g|": g,
        "bias / |g|": found["raw_bias"] / g,
        "noise / |g|": noise / g,
        "bias / noise": found["raw_bias"] / noise,
        "cosine of the clipped mean with g": found["raw_cosine"],
        "cosine of the release with g": found["raw_along"] * g / (clipped**2 + noise**2) ** 0.5,
    }


def recorded(case: str, _: float, seed: int) -> Values:
    """D2, D8: bias, clipped mean and noise at a step of the trainings of bam/fig2, from their records."""
    method, step = case.split(", step ")
    lines = (ROOT / "results/bam-fig2/runs.jsonl").read_text().splitlines()
    key = (method, seed, int(step), "plain")
    (found,) = [r for r in map(json.loads, lines) if (r["method"], r["seed"], r["step"], r["gradients"]) == key]
    g, bias = found["raw_norm"], found["raw_bias"]
    clipped = ((found["raw_along"] * g) ** 2 + found["raw_across"] ** 2) ** 0.5
    noise = 0.832 / 512 * 26_010**0.5  # sigma C / B for each parameter of the small CNN
    return {
        "|g|": g,
        "bias": bias,
        "bias / |g|": bias / g,
        "length of the clipped mean": clipped,
        "length of the noise": noise,
        "cosine of the clipped mean with g": found["raw_cosine"],
        "cosine of the release with g": found["raw_along"] * g / (clipped**2 + noise**2) ** 0.5,
    }


def crossing(curve: Sequence[tuple[float, float]], level: float) -> float:
    """Return the bias where the loss first falls to a level, between two stops."""
    for (loss, bias), (following, other) in pairwise(curve):
        if following <= level < loss:
            return bias + (other - bias) * (loss - level) / (loss - following)
    return math.nan


def at_equal_loss(case: str, _: float, seed: int) -> Values:
    """D8: the bias at the end, and at equal training losses."""
    digits, method = task_of("digits"), case.partition(" at ")[0].partition(" with ")[0]
    step = STEP * (0.4 if "a smaller step" in case else 1.0)
    decay = 0.005 if "weight decay" in case else 0.0
    options: dict[str, Any] = {"perturb": METHODS[method](), "decay": decay, "max_grad_norm": NORM}
    curve, result = list[tuple[float, float]](), Values()
    for stop in training(digits, "DP-GDM", step, seed, at=range(1, 201, 10), **options):
        found = probed(stop.model, NORM, [row[:512] for row in digits.train.tensors])
        curve.append((training_loss(stop.model), found["raw_bias"]))
        result = scores(digits, stop.model)
    equal = {f"bias at loss {level:g}": crossing(curve, level) for level in LEVELS}
    return {"final loss": curve[-1][0], "final bias": curve[-1][1], **equal} | result


def without_bias(case: str, step: float, seed: int) -> Values:
    """D15: the same noise with and without clipping. Without clipping it is NOT private."""
    digits = task_of("digits")
    norm = float(case.rpartition(" ")[2])
    changed: dict[str, Any] = {"max_grad_norm": norm}
    if case.startswith("not clipped"):
        changed = {"max_grad_norm": 1e4, "noise_multiplier": digits.plan(seed).noise_multiplier * norm / 1e4}
    return scores(digits, last(training(digits, "DP-GDM", step, seed, schedule="cosine", **changed)).model)


def batches(case: str, step: float, seed: int) -> Values:
    """D18, D19: trainings of 40 passes by batch size; the bias is probed on as many examples, and on 960."""
    digits = task_of("digits")
    size, noise = case.split(", ")
    plan, batch = digits.plan(seed), int(size)
    steps = 40 * plan.num_examples // batch
    numbers: dict[str, Any] = {"num_examples": plan.num_examples, "expected_batch_size": batch, "steps": steps}
    if noise == "equal epsilon":
        own = pg.PrivacyPlan.for_budget(target_epsilon=3.0, delta=1e-5, max_grad_norm=NORM, **numbers)
        multiplier = own.noise_multiplier
    else:
        multiplier = plan.noise_multiplier * batch / plan.expected_batch_size
    changed: dict[str, Any] = {
        "noise_multiplier": multiplier,
        "expected_batch_size": batch,
        "sample_rate": batch / plan.num_examples,
        "steps": steps,
        "max_grad_norm": NORM,
    }
    found, result = list[Values](), Values()
    at = [steps * part // 5 for part in range(1, 6)]
    rows = digits.train.tensors
    for stop in training(digits, "DP-GDM", step, seed, at=at, **changed):
        order = torch.randperm(len(rows[1]), generator=torch.Generator().manual_seed(stop.step))
        own, whole = (probed(stop.model, NORM, [row[order[:count]] for row in rows]) for count in (batch, 960))
        found.append(
            {
                "bias, own batch size": own["raw_bias"],
                "bias, 960 examples": whole["raw_bias"],
                "cosine, own batch size": own["raw_cosine"],
                "cosine, 960 examples": whole["raw_cosine"],
            }
        )
        result = {"training loss": training_loss(stop.model)} | scores(digits, stop.model)
    means = {key: sum(values[key] for values in found) / len(found) for key in found[0]}
    return means | result


def ascent(model: nn.Module) -> float:
    """Return how much the training loss grows at a distance SHARP along the mean gradient."""
    digits = task_of("digits")
    parameters = list(model.parameters())
    loss = digits.loss_fn(model, digits.train.tensors).mean()
    gradients = torch.autograd.grad(loss, parameters)
    length = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()

    def move(distance: float) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=distance / float(length))

    move(SHARP)
    higher = training_loss(model)
    move(-SHARP)
    return higher - float(loss)


def largest_eigenvalue(model: nn.Module) -> float:
    """Return the largest eigenvalue of the Hessian of the training loss, by 20 power iterations."""
    digits = task_of("digits")
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(digits.loss_fn(model, digits.train.tensors).mean(), parameters, create_graph=True)
    g = torch.cat([gradient.flatten() for gradient in gradients])
    vector = torch.randn(len(g), generator=torch.Generator().manual_seed(0))
    value = 0.0
    for _ in range(20):
        vector = vector / vector.norm()
        product = torch.autograd.grad(g @ vector, parameters, retain_graph=True)
        image = torch.cat([part.flatten() for part in product])
        value, vector = float(vector @ image), image
    return value


@cache
def checkpoints(method: str, seed: int) -> dict[int, Values]:
    """Return by step: the bias, the norms and the sharpness along one training."""
    digits, found = task_of("digits"), dict[int, Values]()
    options: dict[str, Any] = {"perturb": METHODS[method](), "max_grad_norm": NORM}
    for stop in training(digits, "DP-GDM", STEP, seed, at=STOPS, **options):
        own = probed(stop.model, NORM, digits.train.tensors)
        found[stop.step] = {
            "bias": own["raw_bias"],
            "bound on the bias": own["raw_bound"],
            "mean norm": own["mean norm"],
            "norm of the mean": own["raw_norm"],
            "loss": training_loss(stop.model),
            "ascent": ascent(stop.model),
            "largest eigenvalue": largest_eigenvalue(stop.model),
        }
    return found


def sharpness(case: str, _: float, seed: int) -> Values:
    """D4, D20: norms and sharpness at one step of a training."""
    method, number = case.split(", step ")
    return checkpoints(method, seed)[int(number)]


def causes(case: str, _: float, seed: int) -> Values:
    """D22: rank correlations of the bias, over the records of the check "sharpness"."""
    lines = (FOLDER / "sharpness.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["seed"] == seed]
    if case != "all steps":
        records = [r for r in records if r["case"].endswith(f", {case}")]
    bias = torch.tensor([r["bias"] for r in records])
    names = ("mean norm", "bound on the bias", "norm of the mean", "loss", "ascent", "largest eigenvalue")
    return {name: rank_correlation(torch.tensor([r[name] for r in records]), bias) for name in names}


def directions(case: str, rate: float, seed: int) -> Values:
    """D21: full batches without noise, along parts of the clipped mean s = a g + c. NOT private."""
    digits = task_of("digits")
    model = digits.model(seed)
    plan = digits.plan(seed)
    plan = replace(
        plan,
        target_epsilon=None,
        max_grad_norm=NORM,
        sample_rate=1.0,
        expected_batch_size=plan.num_examples,
        noise_multiplier=0.0,
    )
    same = math.nan
    private_grad = pg.PrivateGradient(model, digits.loss_fn, plan)
    for batch in plan.batches(digits.train):
        clipped = private_grad(batch)
        parameters = dict(model.named_parameters())
        loss = digits.loss_fn(model, digits.train.tensors).mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        g = torch.cat([value.flatten() for value in gradients])
        s = torch.cat([clipped[name].flatten() for name in parameters])
        a = float(s @ g / (g @ g))
        c = s - a * g
        same = abs(1 - a) * float(g.norm()) / float(c.norm())  # of one size with the bias in magnitude
        step = {"g": g, "a g": a * g, "g + c": g + c, "g + c, of one size": g + same * c, "a g + c": s}[case]
        with torch.no_grad():
            for parameter, part in zip(
                parameters.values(), step.split([p.numel() for p in parameters.values()]), strict=True
            ):
                parameter.sub_(part.view_as(parameter), alpha=rate)
    return {"training loss": training_loss(model), "bias in direction / magnitude": 1 / same} | scores(digits, model)


EQUAL = (*METHODS, "DP-SGD at a smaller step", "DP-SGD with weight decay")
SIZES = tuple(f"{size}, equal {what}" for what in ("epsilon", "noise") for size in (60, 240, 960))
CHECKS = {
    "variance": Check("D2", variance, NORMS),
    "recorded-bias": Check(
        "D2, D8",
        recorded,
        tuple(f"{method}, step {step}" for method in ("DP-SGD", "DP-SAT", "BAM") for step in (1, 100, 500)),
    ),
    "equal-loss": Check("D8", at_equal_loss, EQUAL),
    "without-bias": Check(
        "D15",
        without_bias,
        ("C = 0.1", "not clipped, noise of C = 0.1", "C = 0.3", "not clipped, noise of C = 0.3"),
        (0.004, *STEPS),
        best="validation loss",
        compared="test accuracy",
        group=2,
    ),
    "batches": Check("D18, D19", batches, SIZES, (STEP,)),
    "sharpness": Check("D4, D20", sharpness, tuple(f"{method}, step {step}" for method in METHODS for step in STOPS)),
    "causes": Check("D22", causes, (*(f"step {step}" for step in STOPS), "all steps")),
    "directions": Check(
        "D21", directions, ("g", "a g", "g + c", "g + c, of one size", "a g + c"), (0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        best="training loss",
    ),
}  # fmt: skip
