"""Training of private linear heads: `fit_head` checks the rows, makes the plan, and calls `fit`."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.accounting.accountant import Release
from privgrad.accounting.calibration import one_of
from privgrad.checks.data import warn_of_private_bound
from privgrad.data.dataset import NO_LABEL
from privgrad.data.schema import Schema
from privgrad.errors import expected, require_integer
from privgrad.features.extractor import SHARED, Extractor, first_infinite
from privgrad.features.whitened import Scaled
from privgrad.gradient.contribution import SampleGradient
from privgrad.heads.head import Head, Target, declared, privacy_of, require_declared
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Ledger
from privgrad.models import UnitLinear
from privgrad.optim import SGD
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.loading import Data
from privgrad.training.defaults import head_confidence, head_max_grad_norm, head_noise_step
from privgrad.training.fitting import fit
from privgrad.training.schedule import Decay, Schedule
from privgrad.types import PrivacyUnit

# Defaults of what does not decide epsilon. docs/choosing-evidence.md reports how they were measured.
STEPS, HIDDEN_STEPS = 300, 1000
MAX_GRAD_NORM = 0.1  # where a rule does not know the number of weights yet
LARGEST_BATCH = 8192
MOMENTUM = 0.9
_BLOCK = 4096  # rows that are checked at once


def fit_head(
    features: Tensor | np.ndarray[Any, Any],
    labels: Tensor | np.ndarray[Any, Any],
    *,
    num_classes: int | None = None,
    bounds: tuple[float, float] | None = None,
    counts: bool = False,
    classes: Sequence[Any] | None = None,
    schema: Schema | None = None,
    weights: Tensor | np.ndarray[Any, Any] | None = None,
    extractor: Extractor | None = None,
    source: str | None = None,
    plan: PrivacyPlan | None = None,
    target_epsilon: float | None = None,
    delta: float | None = None,
    num_examples: int | None = None,
    privacy_unit: PrivacyUnit | None = None,
    budget: Budget | None = None,
    steps: int | None = None,
    expected_batch_size: int | None = None,
    max_grad_norm: float | None = None,
    noise_step: float | None = None,
    schedule: Schedule | Decay = "cosine",
    momentum: float = MOMENTUM,
    hidden: int = 0,
    output_dir: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    progress: bool | Progress = True,
) -> Head:
    """Train a private head on features, by SGD: a linear one, from zero. It needs no tuning.

    Args:
        features: finite, shape (n, width), of any floating dtype; a memory-mapped array is not copied. Each row is
            divided by its norm. For persons, (n, rows, width): each entry holds all rows of one person.
        labels: for classes, integers from 0 to num_classes - 1, (n,). For tags, (n, num_classes), 1 for each tag that
            applies; one-hot classes count as tags. For numbers, (n,); numbers outside of `bounds` count as the nearest
            bound. For persons, classes or numbers (n, rows); -100 or NaN for rows that a person does not have.
        num_classes: the public number of classes or tags. Give this, classes or bounds.
        bounds: the public smallest and largest number, for regression, known without the labels.
        counts: whether numbers are counts, with bounds from 0: the loss is then that of Poisson regression, and the
            head predicts rates.
        classes: the public names of the classes or tags 0, 1, ..., such as `DataSet.classes`. `Head.save` writes them.
        schema: `DataSet.schema`, if the features are codes of a table. The head then takes rows by column name.
        weights: from 0 to 1, (n,), for examples: each is drawn at its weight times the plan's rate, at the same epsilon
            (`ClassRates`). Each must follow from its own example and public numbers alone.
        extractor: made the features, and is saved with the head.
        source: where the constants of the features come from, without an extractor: "no data", say. Recorded.
        plan: the privacy plan. Give it, or the next three numbers.
        target_epsilon: > 0, what the training may cost.
        delta: in (0, 1); above 1 / num_examples, the plan warns, and a budget refuses it.
        num_examples: the public number of examples, or of persons.
        privacy_unit: "example" or "user". None: "user" for persons with rows, else "example".
        budget: a Budget to commit the training in; it needs output_dir. delta and num_examples default to those of the
            budget. Without plan and target_epsilon, the training uses all that is left.
        steps: None is 300, 1,000 with a hidden layer, or the number of the plan.
        expected_batch_size: None is min(num_examples, 8,192), or the number of the plan.
        max_grad_norm: None is 0.1, 0.3 or 1, by the plan's noise and the number of weights
            (docs/choosing-evidence.md), or the number of the plan. With hidden units: 0.3 for numbers, else 3.
        noise_step: at the peak of the schedule. None is the default of `privgrad.training.defaults` for the schedule.
        schedule: of the rate: a Schedule, or its decay.
        momentum: in [0, 1).
        hidden: >= 0. Above 0, a hidden layer of so many units is added to the linear one (`models.UnitLinear`), for
            tables whose columns act together. steps, max_grad_norm and noise_step then have other defaults, and the
            initial weights of the layer come from torch's global generator.
        output_dir: the folder of ledger and checkpoint, as in `fit`: the same call resumes an interrupted training.
        seed: None for the operating system's entropy. A research seed voids the privacy guarantee.
        progress: as in `fit`.
    Returns:
        Head, with the result of `fit`. For two classes on codes of a table, its outputs are smaller than those of the
        training, to make up for the confidence that clipping adds (docs/choosing-evidence.md).
    Raises:
        PrivacyError: arguments are missing, contradict each other, or do not fit the data; nothing was spent.
        TypeError: features or labels are neither a tensor nor an array of numbers.
        BudgetExceededError: the budget has not enough left; nothing was committed.
    Privacy:
        As PrivateGradient, if the features of a row depend on that row and on public numbers only. Features that were
        chosen, centered or scaled with private rows are a release that no epsilon covers. Features that an extractor
        returned for its own public rows are refused; a copy or a part of them is not recognized.
    Reference:
        Tramer, Boneh 2021 (arXiv 2011.11660), with the noise step of docs/choosing-evidence.md.
    """
    rows, given = _tensor(features), _tensor(labels)
    count = len(classes) if num_classes is None and classes is not None else num_classes
    target = _target(rows, given, count, bounds, counts=counts)
    require_declared("fit_head", target, classes, schema if extractor is None else None, rows.shape[-1])
    for start in range(0, len(rows), _BLOCK):
        if (row := first_infinite(rows[start : start + _BLOCK])) is not None:
            raise expected("fit_head", "features", "to be finite", f"inf or NaN in row {start + row}")
    if shared := getattr(rows, SHARED, 0):
        condition = f"to be of rows that share at most {shared - 1} with the public rows of the extractor"
        remedy = "compute the extractor's statistics, or its vocabulary, on public rows"
        raise expected("fit_head", "features", condition, f"at least {shared}", remedy)  # the number is private
    unit = privacy_unit or (plan.privacy_unit if plan is not None else "user" if rows.ndim == 3 else "example")
    if rows.ndim == 3 and unit != "user":
        remedy = "plan for 'user', or give features of shape (n, width)"
        raise expected("fit_head", "privacy_unit", "to be 'user' for rows of persons", repr(unit), remedy)
    one_of("fit_head", extractor=None if extractor is None else type(extractor).__name__, source=source)
    require_integer("fit_head", "hidden", hidden, 0)
    of_target: dict[str, Any] = {"of_numbers": target.kind == "number", "hidden": hidden}
    numbers = {"steps": steps, "expected_batch_size": expected_batch_size, "max_grad_norm": max_grad_norm}
    own = {"target_epsilon": target_epsilon, "delta": delta, "num_examples": num_examples, "seed": seed}
    place = None if output_dir is None else Path(output_dir).absolute() / "ledger.jsonl"
    if plan is None:
        numbers["steps"] = steps if steps is not None else HIDDEN_STEPS if hidden else STEPS
        plan = _plan(numbers, own, unit, budget, place)
        if max_grad_norm is None:
            size = rows.shape[-1] * target.outputs
            of_norm = of_target | (
                {"of_numbers": False} if counts else {}
            )  # an error is of any size, as a logit's slope
            plan = replace(plan, max_grad_norm=head_max_grad_norm(plan, size, **of_norm))
    elif both := sorted(name for name, value in (numbers | own).items() if value is not None):
        raise expected("fit_head", "plan", "to replace the numbers", f"plan and {', '.join(both)}")
    curve = Schedule(schedule) if isinstance(schedule, str) else schedule
    step = head_noise_step(curve.decay, **of_target) if noise_step is None else noise_step
    model = UnitLinear(rows.shape[-1], target.outputs, hidden=hidden).to(rows.device)
    optimizer = SGD(model.named_parameters(), noise_step=step, momentum=momentum)
    data: Data = TensorDataset(rows, target.prepared(given).to(rows.device))
    if weights is not None:
        rates, places = np.unique(np.asarray(weights, dtype=float), return_inverse=True)
        data = ClassRates(data, places, [*rates, 1.0])
    plan.batches(data)  # refuses what it cannot sample before anything is committed
    ledger, done = None, 0
    if budget is not None:
        if place is None:
            raise expected("fit_head", "output_dir", "to be given with a budget", None)
        place.parent.mkdir(parents=True, exist_ok=True)
        ledger = budget.open_ledger(place, plan)
        done = ledger.next_step
    elif place is not None and place.exists() and place.stat().st_size:
        done = Ledger(place, read_only=True).next_step
    origin = f"features: {source}" if extractor is None else declared(extractor)
    own_gradient = SampleGradient(unit, rows.shape[1] if rows.ndim == 3 else None)
    try:
        private_grad = PrivateGradient(
            model, target.losses, plan, perturb=own_gradient, ledger=ledger, side_information=origin
        )
        result = fit(private_grad, optimizer, data, scheduler=curve, output_dir=output_dir, progress=progress)
    finally:
        if ledger is not None:
            ledger.close()
    if done >= plan.steps:
        told = f"fit_head: {output_dir} holds a finished training. Its head is returned, and the given rows are not "
        warnings.warn(f"{told}used: give another folder to train on other rows", stacklevel=2)
    of_table = isinstance(extractor, Scaled) or (extractor is None and schema is not None)
    if of_table and target.kind == "class" and target.outputs == 2 and not hidden:
        with torch.no_grad():
            model.linear.weight.mul_(head_confidence(plan.max_grad_norm))
    privacy = privacy_of(plan, result.ledger)
    return Head(model, target, extractor, privacy=privacy, classes=classes, schema=schema, result=result)


def _tensor(values: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Return an array as a tensor that shares its memory."""
    if isinstance(values, Tensor):
        return values
    with warnings.catch_warnings(action="ignore"):  # of a file that is open for reading: nothing here writes to it
        return torch.from_numpy(values)


def _target(
    rows: Tensor, labels: Tensor, num_classes: int | None, bounds: tuple[float, float] | None, *, counts: bool
) -> Target:
    """Return the kind of the labels; raise PrivacyError unless they fit the features and the public facts."""
    if not rows.is_floating_point() or rows.ndim not in (2, 3):
        got = f"{rows.dtype} of shape {tuple(rows.shape)}"
        condition = "to be floating point, of shape (n, width), or (n, rows, width) for persons"
        raise expected("fit_head", "features", condition, got)
    one_of("fit_head", num_classes=num_classes, bounds=bounds)
    is_tags = num_classes is not None and rows.ndim == labels.ndim == 2 and (num_classes == 1 or labels.shape[1] != 1)
    shape = tuple(rows.shape[:-1]) if not is_tags else (len(rows), num_classes)
    if tuple(labels.shape) != shape:
        remedy = "give labels[..., 0]" if tuple(labels.shape) == (*shape, 1) else ""
        raise expected("fit_head", "labels", f"to have shape {shape}", tuple(labels.shape), remedy)
    if rows.ndim == 2 and labels.is_floating_point() and (row := first_infinite(labels[:, None])) is not None:
        raise expected("fit_head", "labels", "to be finite", f"inf or NaN in row {row}")
    if bounds is not None or counts:
        low, high = bounds or (math.nan, math.nan)
        if not (-math.inf < low < high < math.inf and (low >= 0 or not counts)):
            least = ", from 0 or above for counts" if counts else ""
            raise expected("fit_head", "bounds", f"to be finite, and low < high{least}", bounds)
        target = Target("number", 1, float(low), float(high), counts)
        numbers = torch.where(labels.isnan(), target.middle, labels.double()).reshape(len(labels), -1)
        warn_of_private_bound("fit_head", "the low of bounds", torch.tensor(target.low), numbers, is_low=True)
        warn_of_private_bound("fit_head", "the high of bounds", torch.tensor(target.high), numbers)
        return target
    assert num_classes is not None
    require_integer("fit_head", "num_classes", num_classes, 1 if is_tags else 2)
    if is_tags:
        return Target("tags", int(num_classes))
    known = (labels >= 0) & (labels < num_classes) | ((labels == NO_LABEL) & (rows.ndim == 3))
    if labels.is_floating_point() or not bool(known.all()):
        got = f"{labels.dtype}" if labels.is_floating_point() else f"the label {int(labels[~known][0])}"
        remedy = "give bounds for numbers, or map the classes"
        raise expected("fit_head", "labels", f"to be integers from 0 to {num_classes - 1}", got, remedy)
    return Target("class", int(num_classes))


def _plan(
    numbers: Mapping[str, Any], own: Mapping[str, Any], unit: PrivacyUnit, budget: Budget | None, place: Path | None
) -> PrivacyPlan:
    """Return the plan of the `numbers` that have defaults, and its `own`, or the budget's, which decide the privacy."""
    given = dict(own)
    if budget is not None:
        shared = {"delta": budget.delta, "num_examples": budget.num_examples}
        given |= {name: value for name, value in shared.items() if given[name] is None}
    missing = [name for name in ("target_epsilon", "delta", "num_examples") if given[name] is None]
    if missing and not (budget is not None and missing == ["target_epsilon"]):
        remedy = "give all three, a plan, or a budget: they decide the privacy"
        raise expected("fit_head", ", ".join(missing), "to be given", None, remedy)
    require_integer("fit_head", "num_examples", given["num_examples"], 1)
    size = min(given["num_examples"], LARGEST_BATCH)
    defaults = {"expected_batch_size": size, "max_grad_norm": 1.0}  # epsilon does not depend on it
    chosen: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in numbers.items()}
    if budget is None or given["target_epsilon"] is not None:
        return PrivacyPlan.for_budget(**chosen, **given, privacy_unit=unit)
    rate = chosen["expected_batch_size"] / given["num_examples"]
    # A training that resumes has the noise of its commitment.
    before = [one.releases[0] for one in budget.commitments if one.name == f"{place}"]
    held = [release.noise_multiplier for release in before if isinstance(release, Release)]
    noise = held[0] if held else budget.calibrate(sample_rate=rate, steps=chosen["steps"])
    del given["target_epsilon"]
    return PrivacyPlan(**chosen, **given, sample_rate=rate, noise_multiplier=noise, privacy_unit=unit)
