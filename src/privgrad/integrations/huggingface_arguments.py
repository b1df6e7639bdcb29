"""The arguments of a PrivateTrainer: those that follow from the plan, and one error for all that contradict it."""

import copy
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from privgrad.errors import require_positive
from privgrad.integrations.huggingface_models import head_of, pooler_of
from privgrad.optim import AdamWBC, PrivateOptimizer
from privgrad.plan import PrivacyPlan
from privgrad.training.external_loop import (
    PRIVATE_OPTIONS,
    Conflict,
    changed_values,
    evaluated_rows,
    undeclared_selection,
    unknown_options,
)

NOISE_STEP = 0.0025  # for pretrained layers; docs/choosing.md gives the evidence for layers and poolers
ADAPTER_NOISE_STEP = 0.015  # for adapters; docs/integrations.md gives the evidence
POOLER_NOISE_STEP = 0.025  # for a pooler on a frozen encoder
HEAD_NOISE_STEP = 0.06  # for the head of a classifier, which usually begins with random weights
STARTED_NOISE_STEP = 0.01  # for a head that begins with the weights of a private one
EPOCH_STEPS = 10  # of a training without a plan; MAX_GRAD_NORM too
MAX_GRAD_NORM = 0.1
_KIND = {True: "noise_step", False: "learning_rate"}
_LOG = logging.getLogger("privgrad")
_LONGEST = ("True", "longest", "PaddingStrategy.LONGEST")
_IN_PLACE_OF = {
    "model_init": "model",
    "compute_loss_func": "loss_fn, which returns one loss per example,",
    "optimizer_cls_and_kwargs": "optimizers",
}
_BATCHES = "leave it out: the plan draws the batches (data_collator changes rows, pg.ClassRates the rates of classes)"
# A subclass may not redefine these: they would not be called, or would see or change the private step.
_NOT_REDEFINED = {
    "get_train_dataloader": _BATCHES,
    "get_batch_samples": _BATCHES,
    "_get_train_sampler": _BATCHES,
    "training_step": "give loss_fn for the loss, and a TrainerCallback for what else a step does",
    "floating_point_ops": "leave it out: the number would reveal the size of a batch",
    "set_initial_training_values": "leave it out: the plan decides the steps",
    "create_optimizer_and_scheduler": "redefine create_optimizer or create_scheduler in its place",
    "get_optimizer_cls_and_kwargs": "redefine create_optimizer in its place",
    "call_model_init": "give model in place of model_init",
    "_inner_training_loop": "leave it out, or write a loop with pg.PrivateGradient, as docs/guide.md does",
}
_BY_METRIC = {"reduce_lr_on_plateau": "ReduceLROnPlateau", "greedy": "GreedyLR"}  # schedulers that follow evaluations


def tell(message: str) -> None:
    """Log a normal fact at INFO, or write it to stderr where nobody has chosen a level, which would hide it."""
    if _LOG.level or _LOG.isEnabledFor(logging.INFO):
        _LOG.info(f"PrivateTrainer: {message}")
    else:
        sys.stderr.write(f"PrivateTrainer: {message}\n")


def sizes(args: TrainingArguments, num_examples: int) -> dict[str, Any]:
    """Return the numbers of a plan that decide no epsilon: those that were typed, and measured ones for the others."""
    size = max(1, num_examples // EPOCH_STEPS)
    size = size if _is_default(args, "per_device_train_batch_size") else args.per_device_train_batch_size
    epochs = math.ceil(args.num_train_epochs * num_examples / size)
    return {
        "expected_batch_size": size,
        "steps": epochs if _is_default(args, "max_steps") else args.max_steps,
        "max_grad_norm": MAX_GRAD_NORM if _is_default(args, "max_grad_norm") else args.max_grad_norm,
    }


def settled(args: TrainingArguments, plan: PrivacyPlan) -> TrainingArguments:
    """Return a copy of the arguments, in which the plan's numbers replace the defaults of transformers."""
    made = copy.copy(args)
    planned = {"max_steps": plan.steps, "per_device_train_batch_size": plan.expected_batch_size, "max_grad_norm": 0.0}
    for name, value in planned.items():
        if _is_default(args, name):
            setattr(made, name, value)
    # The Trainer's own clipping would shorten the noise too, and the optimizer would no longer know its size.
    if args.max_grad_norm in (None, plan.max_grad_norm):
        made.max_grad_norm = 0.0
    return made


def log_replaced(args: TrainingArguments, plan: PrivacyPlan) -> None:
    """Log the defaults of transformers that the plan replaces, because a user may have typed them."""
    epochs, size, norm = args.num_train_epochs, args.per_device_train_batch_size, args.max_grad_norm
    found: list[str] = []
    if _is_default(args, "max_steps") and not _is_planned(epochs, plan):
        found.append(f"steps={plan.steps} ({plan.steps * _rate(plan):.4g} epochs), not num_train_epochs={epochs:g}")
    if size != plan.expected_batch_size:
        found.append(f"expected_batch_size={plan.expected_batch_size}, not per_device_train_batch_size={size}")
    if norm not in (None, 0.0, plan.max_grad_norm):
        own = f"max_grad_norm={plan.max_grad_norm:g} for each {_unit(plan)}"
        found.append(f"{own}, not max_grad_norm={norm:g} of the arguments")
    if found:
        tell(f"the plan decides: {'; '.join(found)}.")


def epoch_conflicts(args: TrainingArguments, plan: PrivacyPlan) -> Iterator[Conflict]:
    """Yield a conflict if a number of epochs was given that is not the plan's number of steps."""
    epochs, rate = args.num_train_epochs, _rate(plan)
    is_given = _is_default(args, "max_steps") and not _is_default(args, "num_train_epochs")
    if is_given and not _is_planned(epochs, plan):
        remedy = f"leave out num_train_epochs, or plan for steps={max(1, round(epochs / rate))}"
        yield Conflict(f"num_train_epochs={epochs!r} (the plan has {plan.steps * rate:.4g})", remedy)


def _rate(plan: PrivacyPlan) -> float:
    """Return the share of an epoch in a step, of the plan itself or of the one that it simulates."""
    own = plan if plan.simulates is None else plan.simulates
    return own.sample_rate / own.participations


def _unit(plan: PrivacyPlan) -> str:
    return "person" if plan.privacy_unit == "user" else "example"


def _is_planned(epochs: float, plan: PrivacyPlan) -> bool:
    """Return whether so many epochs are the plan's number of steps."""
    return abs(epochs / _rate(plan) - plan.steps) < 1


def step_conflicts(args: TrainingArguments, plan: PrivacyPlan) -> Iterator[Conflict]:
    """Yield the settled arguments of the Trainer that would change the private step, or reveal private numbers."""
    part = plan.expected_batch_size // max(1, args.gradient_accumulation_steps)
    smaller = max(1, min(args.per_device_train_batch_size, part))
    memory = f"to save memory, give private_options={{'microbatch_size': {smaller}}}"
    several = "several devices need fit with PrivateGradient(processes=Distributed())"
    smoothed = f"label_smoothing={args.label_smoothing_factor:g}"
    yield from changed_values(
        args,
        {
            "max_steps": (plan.steps, "the plan decides the number of steps"),
            "per_device_train_batch_size": (plan.expected_batch_size, memory),
            "max_grad_norm": (0.0, f"the plan clips each {_unit(plan)} to {plan.max_grad_norm:g}"),
            "gradient_accumulation_steps": (
                1,
                f"the plan's batch is one step, of per_device_train_batch_size; {memory}",
            ),
            "train_sampling_strategy": ("random", ""),
            "auto_find_batch_size": (False, memory),
            "ignore_data_skip": (False, ""),
            "label_smoothing_factor": (0.0, f"loss_fn may have F.cross_entropy(..., reduction='none', {smoothed})"),
            "neftune_noise_alpha": (None, "privgrad has nothing in its place"),
            "adam_epsilon": (1e-8, "AdamWBC has debias_floor in its place: give it in optimizers"),
            "torch_compile": (False, "private_options={'compile': True} compiles the private step"),
            "use_liger_kernel": (False, "its kernels have no gradients of single examples"),
            "torch_empty_cache_steps": (None, memory),
            "dataloader_multiprocessing_context": (None, "call torch.multiprocessing.set_start_method in its place"),
            # It may save between a release and its update, which would be lost.
            "enable_jit_checkpoint": (False, "a killed run resumes from its last checkpoint: set save_steps"),
            "include_num_input_tokens_seen": ("no", ""),
            "skip_memory_metrics": (True, ""),  # peak memory reveals the size of the largest batch
            "debug": ([], ""),  # it prints private activations when one of them is not finite
            "fp16": (False, "for mixed precision, set bf16=True"),
            "deepspeed": (None, several),
            "fsdp": (None, several),
            "parallelism_config": (None, several),
        },
    )
    counts: dict[str, Any] = {"world_size": args.world_size, "n_gpu": args.n_gpu}  # these are no arguments
    for name, count in counts.items():
        if count > 1:
            yield Conflict(f"{name}={count}", f"start one process with CUDA_VISIBLE_DEVICES=0; {several}")


def option_conflicts(
    trainer: type[Trainer],
    known: tuple[type[Trainer], ...],
    loss_fn: object,
    data_collator: object,
    private_options: Mapping[str, Any] | None,
    trainer_options: Mapping[str, Any],
) -> Iterator[Conflict]:
    """Yield arguments of PrivateTrainer (`known[0]`), and methods of its subclass, that would bypass the private step.

    The other `known` classes are bases of the subclass that add nothing to the private step.
    """
    own = known[0]
    allowed = {base for kind in known for base in kind.__mro__}  # Trainer among them
    others = [base for base in trainer.__mro__ if issubclass(base, Trainer) and not issubclass(base, own)]
    if other := next((base for base in others if base not in allowed), None):
        remedy = f"derive from PrivateTrainer alone: {other.__name__} may log or count private examples"
        remedy += ", or take PrivateSFTTrainer or PrivateDPOTrainer of privgrad.integrations.trl"
        yield Conflict(f"the base class {other.__name__}", remedy)
    else:
        remedy = "give loss_fn too: (model, batch) -> losses of shape (B,) (compute_loss is for evaluation only)"
        refused = _NOT_REDEFINED | ({"compute_loss": remedy} if loss_fn is None else {})
        for name, instead in refused.items():
            if getattr(trainer, name, None) is not getattr(own, name, None):
                yield Conflict(f"{trainer.__name__}.{name}", instead)
    for name, instead in _IN_PLACE_OF.items():
        if trainer_options.get(name) is not None:
            kind = type(trainer_options[name]).__name__
            yield Conflict(f"{name} (a {kind})", f"give {instead} in place of {name}")
    for name in filter(trainer_options.__contains__, PRIVATE_OPTIONS):
        yield Conflict(f"{name}, an option of PrivateGradient", f"give private_options={{{name!r}: ...}}")
    yield from unknown_options(private_options)
    yield from collator_conflicts(data_collator)


def collator_conflicts(data_collator: object) -> Iterator[Conflict]:
    """Yield a conflict if a collator pads to the longest example of a batch, whose length is private."""
    padding = getattr(data_collator, "padding", None)
    if str(padding) in _LONGEST:
        remedy = "give the data_collator padding='max_length' and a public max_length: examples must not affect others"
        yield Conflict(f"a data_collator with padding={padding!r}", remedy)


def selection_conflicts(
    args: TrainingArguments, callbacks: Iterable[object], optimizers: Iterable[object], selection_data: object
) -> Iterator[Conflict]:
    """Yield a conflict if evaluations of undeclared data would choose the model, or the rate of its next steps."""
    kinds = [one if isinstance(one, type) else type(one) for one in callbacks]  # a Trainer takes classes too
    selects = ["EarlyStoppingCallback"] if any(issubclass(kind, EarlyStoppingCallback) for kind in kinds) else []
    selects += ["load_best_model_at_end"] if args.load_best_model_at_end else []
    selects += ["save_strategy='best'"] if args.save_strategy == "best" else []
    names = {kind.__name__ for one in optimizers for kind in type(one).__mro__}
    selects += [name for kind, name in _BY_METRIC.items() if name in names or args.lr_scheduler_type == kind]
    removable = "EarlyStoppingCallback, load_best_model_at_end, save_strategy='best', ReduceLROnPlateau and GreedyLR"
    return undeclared_selection(selection_data, selects, removable)


def evaluation_conflicts(train_dataset: object, eval_dataset: object, name: str = "eval_dataset") -> Iterator[Conflict]:
    """Yield a conflict if the training data would be evaluated."""
    given = cast("dict[str, object]", eval_dataset) if isinstance(eval_dataset, dict) else {"": eval_dataset}
    return evaluated_rows(name, given.values(), [train_dataset])


def optimizer_conflicts(
    args: TrainingArguments, plan: PrivacyPlan, optimizers: tuple[object, object], noise_step: float | None
) -> Iterator[Conflict]:
    """Yield what prevents the Trainer from having one private optimizer with one rate."""
    optimizer, scheduler = optimizers
    given = None if _is_default(args, "learning_rate") else args.learning_rate
    if isinstance(optimizer, PrivateOptimizer):
        if noise_step is not None:
            yield Conflict(f"noise_step={noise_step!r} next to optimizers", "leave out one of the two")
        if given is not None and given not in [group["lr"] for group in optimizer.param_groups]:
            yield Conflict(f"learning_rate={given!r} next to optimizers", "leave out one of the two")
        return
    if optimizer is not None or scheduler is not None:
        got = f"optimizers=({', '.join('None' if one is None else type(one).__name__ for one in optimizers)})"
        remedy = "give optimizers=(pg.optim.AdamBC(model.named_parameters(), noise_step=...), None) or noise_step=..."
        yield Conflict(got, remedy)
        return
    if given is not None and noise_step is not None:
        got = f"learning_rate={given!r} next to noise_step={noise_step!r}"
        yield Conflict(got, "leave out learning_rate or noise_step")
    if plan.noise_multiplier == 0 and given is None:
        yield Conflict("a plan with noise_multiplier=0", "set learning_rate: there is no noise step")
    kind = str(getattr(args.optim, "value", args.optim))
    if not kind.startswith("adamw_torch"):
        yield Conflict(f"optim={kind!r}", "give optimizers=(an optimizer of pg.optim, None) in place of optim")


def rate_conflicts(optimizer: Any, noise_step: float | None) -> Iterator[Conflict]:
    """Yield a conflict if the optimizer of a subclass does not use the noise step that was given."""
    if noise_step is not None and noise_step not in [group["lr"] for group in optimizer.param_groups]:
        yield Conflict(f"noise_step={noise_step!r} next to create_optimizer", "leave out one of the two")


def make_optimizer(
    model: nn.Module,
    args: TrainingArguments,
    plan: PrivacyPlan,
    noise_step: float | None,
    decayed: Iterable[str],
    *,
    is_started: bool,
) -> AdamWBC:
    """Return AdamWBC with the betas, the weight decay (of the parameters `decayed`) and the rate of the arguments.

    `is_started` tells whether the head of the model begins with the weights of a private head.
    """
    named, decays = list(model.named_parameters()), set(decayed)
    parts: dict[str | None, set[str]] = {None: {name for name, _ in named}}  # groups with names have their own rates
    rates: dict[str | None, dict[str, Any]] = {None: {"noise_step": noise_step}}
    if noise_step is not None:
        require_positive("PrivateTrainer", "noise_step", noise_step, "give 0.0025, or 0.01 for random weights")
    elif not _is_default(args, "learning_rate"):
        rates = {None: {"lr": args.learning_rate}}
    else:  # each part has the default noise step of its kind
        parts = {"head": head_of(model), "pooler": pooler_of(model)}
        parts["layers"] = {name for name, _ in named}.difference(*parts.values())
        of_head = STARTED_NOISE_STEP if is_started else HEAD_NOISE_STEP
        of_layers = ADAPTER_NOISE_STEP if hasattr(model, "peft_config") else NOISE_STEP
        own = {"layers": of_layers, "pooler": POOLER_NOISE_STEP, "head": of_head}
        rates = {part: {"noise_step": own[part]} for part in own}
    groups: list[dict[str, Any]] = []
    for part, rate in rates.items():
        for has_decay, decay in ((True, args.weight_decay), (False, 0.0)):
            held = [(name, p) for name, p in named if name in parts[part] and (name in decays) is has_decay]
            label = {} if part is None else {"name": part}
            groups += [{"params": held, "weight_decay": decay, **rate, **label}] if held else []
    made = AdamWBC(groups, betas=(args.adam_beta1, args.adam_beta2), **next(iter(rates.values())))
    if noise_step is None:
        _log_rates(made, args, plan)
    return made


def rates_by_name(optimizer: PrivateOptimizer, key: str = "lr") -> dict[str, float]:
    """Return the current rate of each part: "learning_rate", or "noise_step_head" for a group with the name head."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        if any(parameter.requires_grad for parameter in group["params"]):
            name = "_".join(filter(None, (_KIND[group["lr_is_noise_step"]], group.get("name"))))
            found.setdefault(name, float(group.get(key, group["lr"])))
    return found


def _log_rates(made: AdamWBC, args: TrainingArguments, plan: PrivacyPlan) -> None:
    """Log the rate of the default optimizer, which was not given as a noise step."""
    if _is_default(args, "learning_rate"):
        rates = ", ".join(f"{name.replace('_', ' ')} {rate:g}" for name, rate in rates_by_name(made).items())
        rest = f"learning_rate={args.learning_rate:g}, a default, counts as not set"
        tell(f"{rates}. Random weights need about {HEAD_NOISE_STEP:g}. {rest}.")
        return
    for group in made.param_groups:
        group["noise_std"], group["noise_gain"] = plan.noise_std, plan.noise_gain  # about as the first step sets them
    tell(
        f"learning_rate {args.learning_rate:g} is noise step {made.noise_step:.2g} under this plan; without it the "
        f"noise step is {HEAD_NOISE_STEP:g} for the head of a classifier, {POOLER_NOISE_STEP:g} for the pooler of a "
        f"frozen encoder, {ADAPTER_NOISE_STEP:g} for adapters, and {NOISE_STEP:g} for other layers. A model with a "
        "much smaller one hardly trains: leave learning_rate out, or give noise_step."
    )


def _is_default(args: TrainingArguments, name: str) -> bool:
    """Return whether an argument has the value that its class gives it if it is left out."""
    return any(field.name == name and field.default == getattr(args, name) for field in fields(args))
