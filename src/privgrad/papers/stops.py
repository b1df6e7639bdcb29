"""Trainings that stop after given steps, so that an item can measure them.

`clipping_bias` and `moments` call it. The privacy guarantee rests on PrivateGradient, which computes each step, and not
on this file.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from privgrad.data import DataSet
from privgrad.errors import expected
from privgrad.experiments.build import make_model
from privgrad.experiments.measures import losses_for
from privgrad.experiments.spec import MethodTable, Spec
from privgrad.optim import PrivateOptimizer
from privgrad.private_gradient import PrivateGradient
from privgrad.types import NoisyGradient


def begin(
    spec: Spec, method: MethodTable, seed: int, data: DataSet
) -> tuple[nn.Module, PrivateGradient, PrivateOptimizer]:
    """Return model, PrivateGradient and optimizer of a training before its first step, without side information.

    `clipping_bias` also calls it, to time each step.

    Raises:
        PrivacyError: the method has a grid that is not tuned yet.
    """
    if spec.is_tuned(method):
        condition = "to have one lr, one max_grad_norm and one radius"
        got = f"{len(spec.grid(method))} candidates"
        raise expected("reproduce", method.name, condition, got, "correct the item's file")
    candidate = spec.grid(method)[0]
    method = method.with_own(candidate)
    torch.manual_seed(seed)
    model = make_model(spec, data)
    private_grad = PrivateGradient(
        model,
        losses_for(data),
        spec.plan(seed, method, candidate.max_grad_norm),
        perturb=method.perturbation(candidate),
        engine=spec.run.engine,
        memory_mb=spec.run.memory_mb,
    )
    return model, private_grad, method.make(model.named_parameters(), candidate)


class Stop(NamedTuple):
    """The state of a training after `step` steps; `released` is the last released gradient, None before the first."""

    step: int
    model: nn.Module
    private_grad: PrivateGradient
    released: NoisyGradient | None


def stops(
    spec: Spec, method: MethodTable, seed: int, at: Sequence[int], data: DataSet, tick: Callable[[], object]
) -> Iterator[Stop]:
    """Train one method, and yield a Stop after each number of steps in `at`; 0 is before the first step.

    Calls `tick` after each step. `clipping_bias` and `moments` measure at the stops.

    Raises:
        PrivacyError: a stop is outside of the plan's steps, or the method has a grid that is not tuned yet.
    """
    if not 0 <= min(at) <= max(at) <= spec.privacy.steps:
        condition = f"to be within the {spec.privacy.steps} steps"
        raise expected("reproduce", "probe.at", condition, list(at), "correct the item's file")
    model, private_grad, optimizer = begin(spec, method, seed, data)
    if 0 in at:
        yield Stop(0, model, private_grad, None)
    for step, batch in enumerate(private_grad.plan.batches(data.train), start=1):
        released = private_grad(batch)
        optimizer.step(grad=released)
        tick()
        if step in at:
            yield Stop(step, model, private_grad, released)


def describe_probe(spec: Spec, probe: Mapping[str, Any]) -> str:
    """Return the text of spec.json for an item with a [probe] table: the measurements along its trainings.

    `clipping_bias` and `moments` give it to `open_folder`.
    """
    described = spec.model_dump(mode="json", exclude_defaults=True) | {"probe": dict(probe)}
    return json.dumps(described, indent=1, ensure_ascii=False)
