"""Opacus: our optimizers under its engine, and its numbers as a plan of ours."""

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from opacus.data_loader import DPDataLoader
from opacus.optimizers import (
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from privgrad.errors import SamplingError, expected
from privgrad.optim import PrivateOptimizer
from privgrad.plan import PrivacyPlan
from privgrad.types import NoisyGradient

_KNOWN = (
    DPOptimizer,
    DPPerLayerOptimizer,
    DPOptimizerFastGradientClipping,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
)

_connected = WeakKeyDictionary[PrivateOptimizer, RemovableHandle]()


def connect(optimizer: Any) -> Any:
    """Tell the optimizer within Opacus', one of privgrad.optim, what it must know of the noise at every step.

        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
        model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, ...)
        connect(optimizer)  # and the loop stays as it is

    The noise's standard deviation is sigma C over what Opacus divides by: expected_batch_size times the batches that
    were accumulated times the processes, or 1 where loss_reduction is "sum". It is read anew at each step, so that
    Opacus' schedulers of noise and clip norm may change it. Unconnected, the optimizer within refuses to step.

    Args:
        optimizer: what make_private returns. Flat and per-layer clipping, hooks and ghost, one process or DDP.
    Returns:
        The same optimizer.
    Raises:
        PrivacyError: another kind of optimizer: adaptive clipping, FSDP, or what Opacus has not wrapped. Later, in
            step: gradients to which Opacus has not added its noise.
    Privacy:
        Opacus' own: its sampling, clipping, noise and accounting are untouched, and what is read is public.
    """
    if type(optimizer) not in _KNOWN:
        remedy = "pass what make_private returns, with clipping='flat' or 'per_layer'"
        raise expected(
            "connect", "optimizer", "to be one of Opacus' whose noise is known", type(optimizer).__name__, remedy
        )
    inner = optimizer.original_optimizer
    if not isinstance(inner, PrivateOptimizer):
        remedy = "give make_private one of privgrad.optim, made of model.named_parameters()"
        raise expected("connect", "the optimizer within", "to be of privgrad.optim", type(inner).__name__, remedy)

    def give(within: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return (within,), {"grad": _released(optimizer)}

    if inner in _connected:  # before: what has served one would not serve the other
        _connected[inner].remove()
    _connected[inner] = inner.register_step_pre_hook(give)
    return optimizer


def plan_of(
    optimizer: Any, data_loader: Any, *, num_examples: int, epochs: int, delta: float, seed: int | None = None
) -> PrivacyPlan:
    """The plan of a script for Opacus, read from what its make_private returned: one line, and the loop can be ours.

    Args:
        optimizer, data_loader: what make_private returns; flat clipping, one process, Poisson sampling.
        num_examples: the public size of the data set. Opacus reads it off the data.
        epochs: as in the script; steps are as many times the loader's length.
        delta, seed: as in PrivacyPlan.
    Raises:
        PrivacyError: numbers that differ from num_examples, or a mechanism that the plan has no number for.
    Privacy:
        Rate, noise, clip norm and divisor stay the script's, so that epsilon does; as they are now, so not of a script
        whose schedulers change noise or clip norm.
    """
    if type(optimizer) not in (DPOptimizer, DPOptimizerFastGradientClipping) or optimizer.loss_reduction != "mean":
        got = f"{type(optimizer).__name__}, {getattr(optimizer, 'loss_reduction', None)}"
        remedy = "make a PrivacyPlan by hand"
        raise expected("plan_of", "optimizer", "to be Opacus', flat, of one process, and to average", got, remedy)
    if not isinstance(data_loader, DPDataLoader):
        remedy = "make the plan of a script with poisson_sampling=True: no accountant covers another"
        raise expected(
            "plan_of", "data_loader", "to be DPDataLoader", type(data_loader).__name__, remedy, SamplingError
        )
    return PrivacyPlan(
        sample_rate=data_loader.sample_rate,
        steps=epochs * len(data_loader),
        expected_batch_size=cast(int, optimizer.expected_batch_size),
        noise_multiplier=optimizer.noise_multiplier,
        max_grad_norm=cast(float, optimizer.max_grad_norm),
        num_examples=num_examples,
        delta=delta,
        seed=seed,
    )


def _released(optimizer: Any) -> NoisyGradient:
    """What Opacus has left in .grad, once, and the size of the noise in it."""
    divisor = 1.0
    if optimizer.loss_reduction == "mean":
        processes = getattr(optimizer, "world_size", 1)
        divisor = float(optimizer.expected_batch_size) * optimizer.accumulated_iterations * processes
    values: dict[str, Tensor] = {}
    sums: list[Any] = []
    for group in optimizer.original_optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.requires_grad:
                values[name] = _noised(optimizer, name, parameter)
                sums.append(parameter.summed_grad)
    for summed in sums:
        summed._served = True
    return NoisyGradient(values, noise_std=float(optimizer.noise_multiplier * optimizer.max_grad_norm) / divisor)


def _noised(optimizer: Any, name: str, parameter: nn.Parameter) -> Tensor:
    # Opacus marks a sum once it has added the noise to it; of several processes, only the first adds any. A sum that
    # has served says nothing of what is in .grad since.
    summed = getattr(parameter, "summed_grad", None)
    marked = hasattr(summed, "_processed") or getattr(optimizer, "rank", 0) > 0
    if parameter.grad is None or summed is None or not marked or hasattr(summed, "_served"):
        remedy = "step Opacus' optimizer, after a backward pass through its module"
        raise expected("connect", f"the gradient of {name!r}", "to hold Opacus' noise", "none of it", remedy)
    return parameter.grad
