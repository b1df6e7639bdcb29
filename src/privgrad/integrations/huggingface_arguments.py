"""The arguments of a PrivateTrainer: those that follow from the plan, and one error for all that contradict it."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, cast

from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.utils import logging

from privgrad.checks.data import share_rows
from privgrad.errors import expected, require_positive
from privgrad.integrations.huggingface_models import head_of, pooler_of
from privgrad.optim import AdamWBC, PrivateOptimizer
from privgrad.plan import PrivacyPlan
from privgrad.training.external_loop import PRIVATE_OPTIONS, undeclared_selection, unknown_options

NOISE_STEP = 0.0025  # for pretrained layers and adapters; docs/integrations.md gives the evidence
POOLER_NOISE_STEP = 0.025  # for a pooler on a frozen encoder; docs/choosing.md gives the evidence
HEAD_NOISE_STEP = 0.06  # for the head of a classifier, which usually begins with random weights
_KIND = {True: "noise_step", False: "learning_rate"}
_LOG = logging.get_logger(__name__)
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


class Conflict(NamedTuple):
    """An argument that contradicts the plan: its value, and what to do about it."""

    got: str
    remedy: str


def refuse(*conflicts: Iterable[Conflict]) -> None:
    """Raise one PrivacyError that names all conflicts and their remedies, if there are any."""
    if found := [one for some in conflicts for one in some]:
        got = ", ".join(one.got for one in found)
        remedy = "; ".join(one.remedy for one in found)
        raise expected("PrivateTrainer", "arguments", "to leave the private step to the plan", got, remedy)


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
        _LOG.warning(f"PrivateTrainer: the plan decides: {'; '.join(found)}.")


def epoch_conflicts(args: TrainingArguments, plan: PrivacyPlan) -> list[Conflict]:
    """Return a conflict if a number of epochs was given that is not the plan's number of steps."""
    epochs, rate = args.num_train_epochs, _rate(plan)
    if not _is_default(args, "max_steps") or _is_default(args, "num_train_epochs") or _is_planned(epochs, plan):
        return []
    remedy = f"leave out num_train_epochs, or plan for steps={max(1, round(epochs / rate))}"
    return [Conflict(f"num_train_epochs={epochs!r} (the plan has {plan.steps * rate:.4g})", remedy)]


def _rate(plan: PrivacyPlan) -> float:
    """Return the share of the private examples in a step, of the plan itself or of the one that it simulates."""
    return (plan if plan.simulates is None else plan.simulates).sample_rate


def _unit(plan: PrivacyPlan) -> str:
    return "person" if plan.privacy_unit == "user" else "example"


def _is_planned(epochs: float, plan: PrivacyPlan) -> bool:
    """Return whether so many epochs are the plan's number of steps."""
    return abs(epochs / _rate(plan) - plan.steps) < 1


def step_conflicts(args: TrainingArguments, plan: PrivacyPlan) -> list[Conflict]:
    """Return the settled arguments of the Trainer that would change the private step, or reveal private numbers."""
    required: dict[str, Any] = {
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.expected_batch_size,
        "max_grad_norm": 0.0,
        "gradient_accumulation_steps": 1,
        "train_sampling_strategy": "random",
        "auto_find_batch_size": False,
        "ignore_data_skip": False,
        "label_smoothing_factor": 0.0,
        "neftune_noise_alpha": None,
        "adam_epsilon": 1e-8,
        "torch_compile": False,
        "use_liger_kernel": False,
        "torch_empty_cache_steps": None,
        "dataloader_multiprocessing_context": None,
        "enable_jit_checkpoint": False,  # it may save between a release and its update, which would be lost
        "include_num_input_tokens_seen": "no",
        "skip_memory_metrics": True,  # peak memory reveals the size of the largest batch
        "debug": [],  # it prints private activations when one of them is not finite
        "fp16": False,
        "world_size": 1,
        "n_gpu": min(args.n_gpu, 1),
        "deepspeed": None,
        "fsdp": None,
        "parallelism_config": None,
    }
    part = plan.expected_batch_size // max(1, args.gradient_accumulation_steps)
    smaller = max(1, min(args.per_device_train_batch_size, part))
    memory = f"to save memory, give private_options={{'microbatch_size': {smaller}}}"
    several = "several devices need fit with PrivateGradient(processes=Distributed())"
    smoothed = f"label_smoothing={args.label_smoothing_factor:g}"
    reasons = {
        "max_steps": "the plan decides the number of steps",
        "per_device_train_batch_size": memory,
        "max_grad_norm": f"the plan clips each {_unit(plan)} to {plan.max_grad_norm:g}",
        "gradient_accumulation_steps": f"the plan's batch is one step; {memory}",
        "auto_find_batch_size": memory,
        "torch_empty_cache_steps": memory,
        "label_smoothing_factor": f"loss_fn may have F.cross_entropy(..., reduction='none', {smoothed})",
        "neftune_noise_alpha": "privgrad has nothing in its place",
        "adam_epsilon": "AdamWBC has debias_floor in its place: give it in optimizers",
        "torch_compile": "the private step is not compiled",
        "use_liger_kernel": "its kernels have no gradients of single examples",
        "dataloader_multiprocessing_context": "call torch.multiprocessing.set_start_method in its place",
        "enable_jit_checkpoint": "a killed run resumes from its last checkpoint: set save_steps",
        "fp16": "for mixed precision, set bf16=True",
        **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), several),
    }
    started = f"start one process with CUDA_VISIBLE_DEVICES=0; {several}"  # for what is no argument
    found: list[Conflict] = []
    for name, value in required.items():
        given = getattr(args, name, value)
        if given != value and (given or value):  # what is false is off
            remedy = f"set {name}={value!r}" + (f" ({reasons[name]})" if name in reasons else "")
            found.append(Conflict(f"{name}={given!r}", started if name in ("world_size", "n_gpu") else remedy))
    return found


def option_conflicts(
    trainer: type[Trainer],
    own: type[Trainer],
    loss_fn: object,
    data_collator: object,
    private_options: Mapping[str, Any] | None,
    trainer_options: Mapping[str, Any],
) -> list[Conflict]:
    """Return arguments of PrivateTrainer (`own`), and methods of its subclass, that would bypass the private step."""
    found: list[Conflict] = []
    others = [base for base in trainer.__mro__ if issubclass(base, Trainer) and not issubclass(base, own)]
    if (other := others[0]) is not Trainer:
        remedy = f"derive from PrivateTrainer alone: {other.__name__} may log or count private examples"
        found.append(Conflict(f"the base class {other.__name__}", remedy))
    else:
        remedy = "give loss_fn too: (model, batch) -> losses of shape (B,) (compute_loss is for evaluation only)"
        refused = _NOT_REDEFINED | ({"compute_loss": remedy} if loss_fn is None else {})
        changed = [name for name in refused if getattr(trainer, name, None) is not getattr(own, name, None)]
        found += [Conflict(f"{trainer.__name__}.{name}", refused[name]) for name in changed]
    for name, instead in _IN_PLACE_OF.items():
        if trainer_options.get(name) is not None:
            kind = type(trainer_options[name]).__name__
            found.append(Conflict(f"{name} (a {kind})", f"give {instead} in place of {name}"))
    for name in filter(trainer_options.__contains__, PRIVATE_OPTIONS):
        found.append(Conflict(f"{name}, an option of PrivateGradient", f"give private_options={{{name!r}: ...}}"))
    if unknown := unknown_options(private_options):
        remedy = f"give private_options among {', '.join(PRIVATE_OPTIONS)}"
        found.append(Conflict(f"private_options with {', '.join(unknown)}", remedy))
    return found + collator_conflicts(data_collator)


def collator_conflicts(data_collator: object) -> list[Conflict]:
    """Return a conflict if a collator pads to the longest example of a batch, whose length is private."""
    padding = getattr(data_collator, "padding", None)
    if str(padding) not in _LONGEST:
        return []
    remedy = "give the data_collator padding='max_length' and a public max_length: examples must not affect each other"
    return [Conflict(f"a data_collator with padding={padding!r}", remedy)]


def selection_conflicts(
    args: TrainingArguments, callbacks: Iterable[object], optimizers: object, selection_data: object
) -> list[Conflict]:
    """Return a conflict if evaluations of undeclared data would choose the model, or the rate of its next steps."""
    kinds = [one if isinstance(one, type) else type(one) for one in callbacks]  # a Trainer takes classes too
    selects = ["EarlyStoppingCallback"] if any(issubclass(kind, EarlyStoppingCallback) for kind in kinds) else []
    selects += ["load_best_model_at_end"] if args.load_best_model_at_end else []
    selects += ["save_strategy='best'"] if args.save_strategy == "best" else []
    given = cast("tuple[object, ...]", optimizers) if isinstance(optimizers, tuple) else ()
    names = {kind.__name__ for one in given for kind in type(one).__mro__}
    selects += [name for kind, name in _BY_METRIC.items() if name in names or args.lr_scheduler_type == kind]
    removable = "EarlyStoppingCallback, load_best_model_at_end, save_strategy='best', ReduceLROnPlateau and GreedyLR"
    wrong = undeclared_selection(selection_data, selects, removable)
    return [] if wrong is None else [Conflict(*wrong)]


def evaluation_conflicts(train_dataset: object, eval_dataset: object, name: str = "eval_dataset") -> list[Conflict]:
    """Return a conflict if the training data would be evaluated: the Trainer logs exact results."""
    given = cast("dict[str, object]", eval_dataset) if isinstance(eval_dataset, dict) else {"": eval_dataset}
    if not any(share_rows(one, train_dataset) for one in given.values()):
        return []
    return [Conflict(f"{name} with rows of the train_dataset", "evaluate other data: results have no noise")]


def optimizer_conflicts(
    args: TrainingArguments, plan: PrivacyPlan, optimizers: object, noise_step: float | None
) -> list[Conflict]:
    """Return what prevents the Trainer from having one private optimizer with one rate."""
    pair = cast("tuple[object, ...]", optimizers) if isinstance(optimizers, tuple) else (optimizers,)
    if len(pair) != 2 or not (pair == (None, None) or isinstance(pair[0], PrivateOptimizer)):
        got = f"optimizers=({', '.join('None' if one is None else type(one).__name__ for one in pair)})"
        remedy = "give optimizers=(pg.optim.AdamBC(model.named_parameters(), noise_step=...), None) or noise_step=..."
        return [Conflict(got, remedy)]
    found: list[Conflict] = []
    given = None if _is_default(args, "learning_rate") else args.learning_rate
    if isinstance(optimizer := pair[0], PrivateOptimizer):
        if noise_step is not None:
            found.append(Conflict(f"noise_step={noise_step!r} next to optimizers", "leave out one of the two"))
        if given is not None and given not in [group["lr"] for group in optimizer.param_groups]:
            found.append(Conflict(f"learning_rate={given!r} next to optimizers", "leave out one of the two"))
        return found
    if given is not None and noise_step is not None:
        got = f"learning_rate={given!r} next to noise_step={noise_step!r}"
        found.append(Conflict(got, "leave out learning_rate or noise_step"))
    if plan.noise_multiplier == 0 and given is None:
        found.append(Conflict("a plan with noise_multiplier=0", "set learning_rate: there is no noise step"))
    kind = str(getattr(args.optim, "value", args.optim))
    if not kind.startswith("adamw_torch"):
        found.append(Conflict(f"optim={kind!r}", "give optimizers=(an optimizer of pg.optim, None) in place of optim"))
    return found


def rate_conflicts(optimizer: Any, noise_step: float | None) -> list[Conflict]:
    """Return a conflict if the optimizer of a subclass does not use the noise step that was given."""
    if noise_step is None or noise_step in [group["lr"] for group in optimizer.param_groups]:
        return []
    return [Conflict(f"noise_step={noise_step!r} next to create_optimizer", "leave out one of the two")]


def make_optimizer(
    model: nn.Module, args: TrainingArguments, plan: PrivacyPlan, noise_step: float | None, decayed: Iterable[str]
) -> AdamWBC:
    """Return AdamWBC with the betas, the weight decay (of the parameters `decayed`) and the rate of the arguments.

    Without a noise step and a learning rate, each part of the model has the default noise step of its kind.
    """
    named, decays = list(model.named_parameters()), set(decayed)
    parts: dict[str | None, set[str]] = {None: {name for name, _ in named}}  # groups with names have their own rates
    rates: dict[str | None, dict[str, float]] = {None: {"noise_step": NOISE_STEP if noise_step is None else noise_step}}
    if noise_step is not None:
        require_positive("PrivateTrainer", "noise_step", noise_step, "give 0.0025, or 0.01 for random weights")
    elif not _is_default(args, "learning_rate"):
        rates = {None: {"lr": args.learning_rate}}
    else:
        parts = {"head": head_of(model), "pooler": pooler_of(model)}
        parts["layers"] = {name for name, _ in named}.difference(*parts.values())
        own = {"layers": NOISE_STEP, "pooler": POOLER_NOISE_STEP, "head": HEAD_NOISE_STEP}
        rates = {part: {"noise_step": own[part]} for part in own}
    groups: list[dict[str, Any]] = []
    for part, rate in rates.items():
        for has_decay, decay in ((True, args.weight_decay), (False, 0.0)):
            held = [(name, p) for name, p in named if name in parts[part] and (name in decays) is has_decay]
            label = {} if part is None else {"name": part}
            groups += [{"params": held, "weight_decay": decay, **rate, **label}] if held else []
    (first, *_) = rates.values()
    made = AdamWBC(groups, betas=(args.adam_beta1, args.adam_beta2), **cast("dict[str, Any]", first))
    if noise_step is None:
        _log_rates(made, args, plan)
    return made


def rates_by_name(optimizer: PrivateOptimizer, key: str = "lr") -> dict[str, float]:
    """Return the current rate of each part: "learning_rate", or "noise_step_head" for a group with the name head.

    The key "initial_lr" gives the rates at the peak of the schedule.
    """
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
        _LOG.warning(
            f"PrivateTrainer: {rates}. These are guesses for pretrained models: give noise_step, and try several on "
            f"public data. Random weights need more. learning_rate={args.learning_rate:g} is the default of "
            "transformers and counts as not set."
        )
        return
    for group in made.param_groups:
        group["noise_std"], group["noise_gain"] = plan.noise_std, plan.noise_gain  # about as the first step sets them
    _LOG.warning(
        f"PrivateTrainer: learning_rate {args.learning_rate:g} is noise step {made.noise_step:.2g} under this plan; "
        f"without it the noise step is {HEAD_NOISE_STEP:g} for the head of a classifier, {POOLER_NOISE_STEP:g} for the "
        f"pooler of a frozen encoder, and {NOISE_STEP:g} for other layers. A model with a much smaller one hardly "
        "trains: leave learning_rate out, or give noise_step."
    )


def _is_default(args: TrainingArguments, name: str) -> bool:
    """Return whether an argument has the value that its class gives it if it is left out."""
    return any(field.name == name and field.default == getattr(args, name) for field in fields(args))
