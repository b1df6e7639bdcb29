"""A bridge to Opacus: privgrad's optimizers under its engine, and its parameters as a PrivacyPlan.

Opacus' releases are noted on the parameters that they move, so that `ledgers_of` counts them in any later training.
"""

import inspect
import math
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from privgrad.accounting.mechanisms import Release
from privgrad.errors import SamplingError, expected
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import forget_training, note_training
from privgrad.optim import PrivateOptimizer
from privgrad.plan import PrivacyPlan
from privgrad.types import SHUFFLED, NoisyGradient

_KNOWN = (
    DPOptimizer,
    DPPerLayerOptimizer,
    DPOptimizerFastGradientClipping,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
)

_connected = WeakKeyDictionary[PrivateOptimizer, RemovableHandle]()
# By optimizer inside of Opacus', the records of its releases: one for each noise and rate, which Opacus may schedule.
_recorded = WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[float, float], Ledger]]()


def connect(optimizer: Any) -> Any:
    """Give the privgrad optimizer inside an Opacus optimizer the scale of the noise at every step.

        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
        model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, ...)
        connect(optimizer)  # the training loop stays the same

    The noise's standard deviation is sigma C divided by Opacus' divisor. The divisor is expected_batch_size times the
    number of accumulated batches times the number of processes, or 1 if loss_reduction is "sum". It is read again at
    each step, so Opacus' schedulers may change noise and clipping norm. Without `connect`, the privgrad optimizer
    refuses to step.

    Args:
        optimizer: the optimizer that make_private returns. Flat and per-layer clipping, hooks and ghost clipping, one
            process or DDP are supported.
    Returns:
        The same optimizer.
    Raises:
        PrivacyError: the optimizer is of another kind: adaptive clipping, FSDP, or not wrapped by Opacus. Later, in
            step: a gradient holds no noise of Opacus.
    Privacy:
        The guarantee is Opacus' own: its sampling, clipping, noise and accounting are unchanged. The values that are
        read (noise multiplier, clipping norm, divisor) are public. `ledgers_of(model)` has Opacus' releases.
    """
    if type(optimizer) not in _KNOWN:
        got, remedy = type(optimizer).__name__, "pass what make_private returns, with clipping='flat' or 'per_layer'"
        raise expected("connect", "optimizer", "to be an Opacus optimizer of known noise", got, remedy)
    inner = optimizer.original_optimizer
    if not isinstance(inner, PrivateOptimizer):
        remedy = "give make_private an optimizer of privgrad.optim, created from model.named_parameters()"
        raise expected("connect", "the inner optimizer", "to be of privgrad.optim", type(inner).__name__, remedy)

    def give(within: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return (within,), {"grad": _released(optimizer)}

    _record(optimizer, None)
    if inner in _connected:  # two hooks would both use one noised sum, and the second would refuse it
        _connected[inner].remove()
    _connected[inner] = inner.register_step_pre_hook(give)
    return optimizer


def plan_of(
    optimizer: Any, data_loader: Any, *, num_examples: int, epochs: int, delta: float, seed: int | None = None
) -> PrivacyPlan:
    """Return the PrivacyPlan of an Opacus script, read from the objects that make_private returned.

    With the plan, a privgrad loop can replace the script's loop.

    Args:
        optimizer: from make_private; flat clipping, one process.
        data_loader: from make_private; Poisson sampling.
        num_examples: the public size of the data set. Opacus takes it from the data.
        epochs: as in the script; the plan's steps are epochs times the loader's length.
        delta: as in PrivacyPlan.
        seed: as in PrivacyPlan.
    Raises:
        PrivacyError: the script's numbers do not agree with num_examples, or a plan cannot describe its mechanism.
    Privacy:
        Sample rate, noise, clipping norm and divisor are the script's, so epsilon is the same. They are read once: the
        plan is wrong for a script whose schedulers change noise or clipping norm. `ledgers_of(model)` has the releases
        that Opacus makes with this optimizer, before and after.
    """
    if type(optimizer) not in (DPOptimizer, DPOptimizerFastGradientClipping) or optimizer.loss_reduction != "mean":
        got = f"{type(optimizer).__name__} with loss_reduction {getattr(optimizer, 'loss_reduction', None)!r}"
        condition = "to be a flat Opacus optimizer of one process with loss_reduction 'mean'"
        raise expected("plan_of", "optimizer", condition, got, "create a PrivacyPlan by hand")
    if not isinstance(data_loader, DPDataLoader):
        got, remedy = type(data_loader).__name__, 'give make_private poisson_sampling=True, or plan sampling="epochs"'
        raise expected("plan_of", "data_loader", "to be a DPDataLoader", got, remedy, SamplingError)
    plan = PrivacyPlan(
        sample_rate=data_loader.sample_rate,
        steps=epochs * len(data_loader),
        expected_batch_size=optimizer.expected_batch_size,
        noise_multiplier=optimizer.noise_multiplier,
        max_grad_norm=optimizer.max_grad_norm,
        num_examples=num_examples,
        delta=delta,
        seed=seed,
    )
    _record(optimizer, plan)
    return plan


def _record(optimizer: Any, plan: PrivacyPlan | None) -> None:
    """Note the releases of Opacus so far on the parameters that they moved, and each later one."""
    # Without a plan, the records hold no delta, and no claim of Poisson sampling, which only a loader shows.
    inner: torch.optim.Optimizer = optimizer.original_optimizer

    def note(*_: Any) -> None:
        # `make_private` attaches a closure, which holds the accountant. It has counted a step before the step is made.
        hook, ledgers = optimizer.step_hook, _recorded[inner]
        accountant = inspect.getclosurevars(hook).nonlocals.get("self") if inspect.isfunction(hook) else None
        parameters = nn.ParameterList(p for group in inner.param_groups for p in group["params"])
        counts = Counter[tuple[float, float]]()
        for noise, rate, steps in getattr(accountant, "history", ()):
            counts[noise, rate] += steps
        for (noise, rate), steps in counts.items():
            own = plan if plan and (noise, rate) == (plan.noise_multiplier, plan.sample_rate) else None
            before = ledgers.get((noise, rate))
            if before is None or (own and before.plan_facts["sampling"] != own.sampling):
                if before is not None:
                    forget_training(parameters, before)
                ledgers[noise, rate] = Ledger()
                facts = (own or _plan_of_steps(optimizer, noise, rate, steps)).public_facts
                ledgers[noise, rate].bind(facts if own else facts | {"sampling": SHUFFLED})
            ledger = ledgers[noise, rate]
            for step in range(ledger.releases, steps):
                kind = Release(noise, rate, ledger.plan_facts["sampling"])
                ledger.charge(kind, draw=f"opacus {id(ledger)}:{step}", limit=steps)  # ledgers share no draw
            note_training(parameters, ledger)

    if inner not in _recorded:
        _recorded[inner] = {}
        inner.register_step_post_hook(note)
    note()


def _plan_of_steps(optimizer: Any, noise: float, rate: float, steps: int) -> PrivacyPlan:
    """Return the numbers of steps that Opacus has made, as far as its optimizer knows them."""
    size = _divisor(optimizer)
    return PrivacyPlan(
        sample_rate=rate,
        steps=steps,
        expected_batch_size=max(1, round(size)),
        noise_multiplier=noise,
        max_grad_norm=float(optimizer.max_grad_norm),
        num_examples=math.floor(size / rate),
    )


def _divisor(optimizer: Any) -> float:
    """Return the expected number of examples of a step, over all its batches and processes."""
    return optimizer.expected_batch_size * optimizer.accumulated_iterations * getattr(optimizer, "world_size", 1)


def _released(optimizer: Any) -> NoisyGradient:
    """Return the noised gradient that Opacus stored in .grad, with the scale of its noise, and mark it as used."""
    divisor = _divisor(optimizer) if optimizer.loss_reduction == "mean" else 1.0
    values: dict[str, Tensor] = {}
    sums: list[Any] = []  # marked at the end: an error in between must not use them up
    for group in optimizer.original_optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.requires_grad:
                values[name] = _noised(optimizer, name, parameter)
                sums.append(parameter.summed_grad)
    for summed in sums:
        summed._served = True
    return NoisyGradient(values, noise_std=float(optimizer.noise_multiplier * optimizer.max_grad_norm) / divisor)


def _noised(optimizer: Any, name: str, parameter: Any) -> Tensor:
    """Return a parameter's .grad, or raise PrivacyError if it does not hold new noise of Opacus."""
    summed = getattr(parameter, "summed_grad", None)
    faults = {
        "no gradient": parameter.grad is None,
        "no sum of Opacus": summed is None,
        "a sum that an earlier step used": hasattr(summed, "_served"),  # it does not describe the present .grad
        # Opacus marks a sum after it added the noise; with several processes, only the first adds noise.
        "a sum without noise": not hasattr(summed, "_processed") and getattr(optimizer, "rank", 0) == 0,
    }
    if got := next((fault for fault, is_so in faults.items() if is_so), None):
        remedy = "step Opacus' optimizer, after a backward pass through its module"
        raise expected("connect", f"the gradient of {name!r}", "to hold Opacus' noise", got, remedy)
    return parameter.grad
