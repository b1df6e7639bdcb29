"""A bridge to Lightning: a strategy whose step is the private step, with Lightning's automatic optimization."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from torchmetrics import Metric

from privgrad.errors import expected
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import ledgers_of, note_loaded
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.datasets import ask_about_rows
from privgrad.sampling.loading import Collate
from privgrad.training.checkpoint import few
from privgrad.training.external_loop import (
    Conflict,
    ExternalLoopStep,
    changed_values,
    evaluated_rows,
    refuse,
    undeclared_selection,
    unknown_options,
)
from privgrad.training.run import StopData, charge_unused
from privgrad.types import Batch

_KEY = "privgrad"  # of the private step's state, in a checkpoint
_TRAINED = "privgrad_trained"  # of the trainings behind its weights
_LOG_ELSEWHERE = "log in validation_step, of public or held-out data"


class PrivateStrategy(SingleDeviceStrategy):
    """A strategy for lightning.pytorch.Trainer in which every update uses one released gradient.

        strategy = PrivateStrategy(plan, ledger="runs/mine/ledger.jsonl")
        trainer = Trainer(strategy=strategy, max_steps=plan.steps)
        trainer.fit(module, strategy.batches(train_set), val_loader)

    The module's `training_step` returns one loss per example, shape (B,). It logs nothing and updates no metric: its
    losses are private. Its `configure_optimizers` returns one optimizer of privgrad.optim over self.named_parameters(),
    and schedulers if needed. An epoch is 1 / sample_rate steps. Callbacks, validation, loggers, checkpoints and
    `ckpt_path` work as in Lightning. Hooks that run before `training_step` see the private batch: they must not log or
    keep anything of it. Training hooks may log public numbers. Means over an epoch weigh steps equally, unless a
    `batch_size` is given.

    Args:
        plan: the public numbers; the Trainer's max_steps must be plan.steps.
        device: the device to train on; None takes the GPU if there is one.
        ledger: path of the ledger's file, which resuming needs; None keeps the ledger in memory.
        selection_data: where the evaluations come from that choose the model: "public" or "released", as in
            privgrad.EarlyStopping. Required with EarlyStopping, and with a ModelCheckpoint that monitors a metric.
        private_options: options of PrivateGradient by name: perturb, precondition, clip, engine, microbatch_size,
            memory_mb, compile, norm_bins, adaptive_clip and filter.
    Raises:
        PrivacyError: (in fit) the Trainer or the module would change the private step, or train without it.
    Privacy:
        The guarantee of PrivateGradient. Checkpoints hold post-processing of released values only, and no keys. If
        EarlyStopping ends the training, the unused steps are charged too, as `training.run.charge_unused` explains.
    Attributes:
        private_grad: the PrivateGradient of the current or last fit; `private_grad.ledger` records all releases.
    """

    private_grad: PrivateGradient

    def __init__(
        self,
        plan: PrivacyPlan,
        *,
        device: str | torch.device | None = None,
        ledger: str | os.PathLike[str] | None = None,
        selection_data: StopData | None = None,
        private_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._plan, self._ledger, self._selection_data = plan, ledger, selection_data
        self._train_sets: list[object] = []
        self._held_out: object = None  # the loaders that were compared with them
        self._in_memory = Ledger()  # shared by all fits, so that a second fit counts the releases of the first
        refuse("PrivateStrategy", unknown_options(private_options))
        self._options = dict(private_options or {})
        self._metrics: list[tuple[str, Metric]] = []  # of the module
        self._further: tuple[Any, ...] = ()  # arguments of the module's training_step, besides the batch

    @property
    def _trainer(self) -> Trainer:
        return cast(LightningModule, self.lightning_module).trainer

    def batches(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        collate: Collate | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> "Epochs":
        """Return the plan's batches, to pass to `fit` in place of a training data loader; see plan.batches."""
        loading = {"num_workers": num_workers, "prefetch_factor": prefetch_factor, "pin_memory": pin_memory}
        ask_about_rows(dataset, self._plan.num_examples, self._plan.privacy_unit)
        self._train_sets.append(dataset)
        self._held_out = None
        return Epochs(self, dataset, collate, loading)

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does; before a fit, check the options and make the PrivateGradient."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = cast(LightningModule, self.lightning_module)
        held: Sequence[object] = cast("Any", trainer).callbacks
        ways = ["EarlyStopping"] * any(isinstance(one, EarlyStopping) for one in held)
        saved = {one.monitor for one in held if isinstance(one, ModelCheckpoint)}
        if saved - {None, "step", "epoch"}:  # by a step or an epoch, it keeps the last ones
            ways.append("ModelCheckpoint(monitor=...)")
        refuse(
            "PrivateStrategy",
            _conflicts(trainer, module, self._plan, self.optimizers),
            undeclared_selection(self._selection_data, ways, "these callbacks"),
        )
        # Lightning would weigh the means of training hooks over an epoch by private batch sizes. A Trainer keeps its
        # strategy, so nothing is undone.
        results = cast(Any, trainer.fit_loop.epoch_loop)._results
        results.log = partial(_log_equally, results.log)
        self.private_grad = PrivateGradient(
            module,
            self._losses,
            self._plan,
            ledger=self._in_memory if self._ledger is None else self._ledger,
            **self._options,
        )
        self.private_step = ExternalLoopStep("PrivateStrategy", module, self.private_grad, self.optimizers[0])
        parts: dict[str, object] = dict(cast(Any, module).named_modules())
        self._metrics = [(name, part) for name, part in parts.items() if isinstance(part, Metric)]
        self._resumed = False

    def on_train_start(self) -> None:
        """Refuse a new training that would continue a ledger with releases, and one that evaluates its own rows."""
        self._require_held_out(self._trainer.val_dataloaders)
        if not self._resumed:
            self.private_step.require_unspent()

    def on_train_end(self) -> None:
        """Charge the steps that EarlyStopping left unused, and check that training has moved every parameter."""
        callbacks: list[object] = cast("Any", self._trainer).callbacks
        if self._trainer.should_stop and any(isinstance(one, EarlyStopping) for one in callbacks):
            charge_unused(self.private_grad)  # also if another callback ended it: too much, never too little
        self.private_step.require_moved()

    def teardown(self) -> None:
        """Clean up as Lightning does, and close the ledger's file."""
        super().teardown()
        if hasattr(self, "private_grad") and self._ledger is not None:
            self.private_grad.ledger.close()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch as Lightning does; a Batch keeps the record of its draw."""
        if not isinstance(batch, Batch):
            return super().batch_to_device(batch, device, dataloader_idx)
        return replace(batch, examples=super().batch_to_device(batch.examples, device, dataloader_idx))

    def training_step(self, batch: Batch, *further: Any) -> Tensor:
        """Release one gradient. The loss stays private: the returned value is always nan."""
        self._further = further
        if (steps := self._trainer.max_steps) != self._plan.steps:
            condition, remedy = f"to stay at the plan's {self._plan.steps}", "leave out searches for a learning rate"
            raise expected("PrivateStrategy", "max_steps of the Trainer", condition, steps, remedy)
        with self.precision_plugin.train_step_context():
            self.private_step.release(batch)
        remedy = "log public numbers, such as the learning rate: batches and their sizes are private"
        object.__setattr__(batch, "examples", _Closed("the batch after training_step", remedy))
        object.__setattr__(batch, "size", None)
        return torch.full((), torch.nan, device=self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return closure_loss  # the gradient has been released

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer with the gradient that `training_step` released."""

        def released() -> Any:
            closure()
            return self.private_step.take()

        return super().optimizer_step(optimizer, released, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as Lightning does, with the state of the private step."""
        if "optimizer_states" in checkpoint and hasattr(self, "private_step"):  # else it cannot be resumed
            checkpoint[_KEY] = self.private_step.state_dict()
        trainings = [
            f"noise multiplier {one.plan_facts['noise_multiplier']:.4g}, sampling rate "
            f"{one.plan_facts['sample_rate']:.4g} and {one.releases:,} releases"
            for one in ledgers_of(cast(LightningModule, self.lightning_module))
        ]
        checkpoint[_TRAINED] = " and at ".join(trainings)  # an epsilon would take seconds
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume the private step and the optimizer; ExternalLoopStep refuses a checkpoint of another ledger."""
        if _KEY not in checkpoint:
            got, remedy = f"the keys {', '.join(checkpoint)}", "give ckpt_path of a run under PrivateStrategy"
            raise expected("PrivateStrategy", "the checkpoint", f"to hold the key {_KEY!r}", got, remedy)
        self.private_step.load_state_dict(checkpoint[_KEY], updates=checkpoint["global_step"])
        self._resumed = True
        super().load_optimizer_state_dict(checkpoint)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._require_held_out(self._trainer.val_dataloaders)
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._require_held_out(self._trainer.test_dataloaders)
        return super().test_step(*args, **kwargs)

    def _require_held_out(self, loaders: Any) -> None:
        """Raise PrivacyError if loaders evaluate the training data: loggers and checkpoints hold exact results."""
        if loaders is self._held_out:
            return
        evaluated = [getattr(loader, "dataset", loader) for loader in tree_leaves(loaders)]
        refuse("PrivateStrategy", evaluated_rows("evaluation data", evaluated, self._train_sets))
        self._held_out = loaders

    def _losses(self, module: Any, examples: Any) -> Tensor:
        """Return one loss per example, from the module's own training_step, which may log and measure nothing."""
        trainer = module.trainer
        loggers, hook = trainer.loggers, module._current_fx_name
        trainer.loggers = [_Closed("a logger in training_step", _LOG_ELSEWHERE)]
        module.log = module.log_dict = _Closed("self.log in training_step", _LOG_ELSEWHERE)
        module._current_fx_name = None  # otherwise super().log refuses as well
        before = [metric.update_count for _, metric in self._metrics]
        try:
            losses = module.training_step(examples, *self._further)
        finally:
            trainer.loggers = loggers
            module._current_fx_name = hook
            del module.log, module.log_dict
        # The update will be undone. Without an error, a hook would log the empty metric's 0.0 as if it was measured.
        for (name, metric), count in zip(self._metrics, before, strict=True):
            if metric.update_count != count:
                remedy = "update a metric in validation_step, with public or held-out data"
                raise expected("PrivateStrategy", "training_step", "to update no metric", f"self.{name}", remedy)
        return losses


class Epochs:
    """The plan's batches in the form of a data loader: each iteration is one epoch."""

    def __init__(
        self, strategy: PrivateStrategy, dataset: Any, collate: Collate | None, loading: Mapping[str, Any]
    ) -> None:
        self._strategy, self._dataset, self._collate, self._loading = strategy, dataset, collate, loading

    def __len__(self) -> int:
        return self._strategy.private_step.epoch_steps

    def __iter__(self) -> Iterator[Batch]:
        trainer = cast(LightningModule, self._strategy.lightning_module).trainer
        step = self._strategy.private_step
        updates = trainer.global_step
        yield from step.batches(self._dataset, updates=updates, collate=self._collate, **self._loading)
        if step.is_spent:
            trainer.should_stop = True  # an interruption lost steps, so max_steps is never reached
            trainer.fit_loop.epoch_loop.min_steps = None  # nor min_steps

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the strategy stores the position. Lightning resumes only a loader that has this method."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def _load_and_note(load_state: Any, cls: type, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint as Lightning does, and note what the weights went through."""
    loaded = load_state(cls, checkpoint, *args, **kwargs)
    if isinstance(loaded, LightningModule) and (said := checkpoint.get(_TRAINED)):
        note_loaded(loaded, said)
    return loaded


# No hook would do: a module that overrides on_load_checkpoint need not call Lightning's own.
cast(Any, saving)._load_state = partial(_load_and_note, cast(Any, saving)._load_state)

_MEMORY = "private_options={'microbatch_size': 16} limits memory"
# Callbacks that would spend steps of the plan, or log what depends on the private batches.
_REFUSED: dict[type, str] = {
    LearningRateFinder: "its steps would be charged; give optimizers of privgrad a noise_step",
    BatchSizeFinder: f"the plan decides the batch size, and {_MEMORY}",
    GradientAccumulationScheduler: f"the plan decides the batch size, and {_MEMORY}",
    ModelPruning: "it renames parameters; prune the trained model",
    SpikeDetection: "the losses that it watches are private; clipping limits each example's effect",
    ThroughputMonitor: "it logs the sizes of private batches",
    DeviceStatsMonitor: "the memory that it logs depends on the sizes of private batches",
    Timer: "the time of a step depends on the size of its private batch, and max_time would end the training by it",
}


# Hooks of modules and callbacks that would be skipped, or would change the released gradient's noise.
_REFUSED_HOOKS: dict[str, str] = {
    "configure_gradient_clipping": "the plan's max_grad_norm clips each example, and its noise must stay as it is",
    "backward": "the private step computes the gradient; change the loss in training_step",
    "on_before_backward": "the loss is private; public numbers can be logged in on_train_batch_end",
    "on_after_backward": "parameters hold no gradient; public numbers can be logged in on_train_batch_end",
}


class _Closed:
    """Take the place of what a hook must not use: each use raises PrivacyError."""

    def __init__(self, name: str, remedy: str) -> None:
        vars(self).update(_said=(name, remedy))

    def _refuse(self, *args: Any, **kwargs: Any) -> Never:
        name, remedy = vars(self)["_said"]
        raise expected("PrivateStrategy", name, "to stay unused", "a use of it", remedy)

    __call__ = __getattr__ = __getitem__ = __iter__ = __len__ = _refuse


def _log_equally(log: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
    log(*args, batch_size=1 if batch_size is None else batch_size, **kwargs)


def _conflicts(trainer: Any, module: LightningModule, plan: PrivacyPlan, optimizers: list[Any]) -> Iterator[Conflict]:
    """Yield what would bypass or change the private step: the guarantee would be lost silently."""
    # The requested devices are stored only here: Trainer.num_devices reports the strategy's single device.
    connector = getattr(trainer, "_accelerator_connector", None)
    requested: Any = getattr(connector, "_devices_flag", 1)
    devices = requested if isinstance(requested, int) else len(requested)
    for name, count in (("devices", devices), ("num_nodes", getattr(connector, "_num_nodes_flag", 1))):
        if count != 1:
            yield Conflict(f"{name}={count}", f"set {name}=1, or use fit with PrivateGradient(processes=...)")
    if trainer.fast_dev_run:
        remedy = "leave it out, and try dataclasses.replace(plan, steps=2) with max_steps=2 and limit_val_batches=2"
        yield Conflict(f"fast_dev_run={trainer.fast_dev_run}, which sets max_steps", remedy)
        return
    for one, base in ((module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)):
        for name, why in _REFUSED_HOOKS.items():
            if hasattr(base, name) and is_overridden(name, one, base):
                yield Conflict(f"{type(one).__name__}.{name}", f"override no {name}: {why}")
    for callback in trainer.callbacks:
        for kind, why in _REFUSED.items():
            if isinstance(callback, kind):
                yield Conflict(f"a {kind.__name__}", f"leave it out: {why}")
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        remedy = "give CosineAnnealingLR, say: with a metric, exact results would decide the next steps"
        yield Conflict("ReduceLROnPlateau", remedy)
    yield from changed_values(
        trainer,
        {
            "max_steps": (plan.steps, "the plan decides the steps"),
            "accumulate_grad_batches": (1, f"the plan decides the batches; {_MEMORY}"),
            # It would clip the noise too, and the optimizer would no longer know its size.
            "gradient_clip_val": (None, "the plan's max_grad_norm clips each example"),
            "limit_train_batches": (1.0, "the plan decides the batches"),
            "overfit_batches": (0.0, "the plan decides the batches"),
        },
    )
    if isinstance(trainer.limit_train_batches, int) and trainer.limit_train_batches == 1:
        yield Conflict("limit_train_batches=1, which is one batch", "set limit_train_batches=1.0, which is all")
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs * plan.epoch_steps < plan.steps:
        yield Conflict(f"max_epochs={trainer.max_epochs}", "set max_epochs=-1: the plan decides the steps")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield Conflict(f"precision={trainer.precision!r}, which scales gradients", "take 'bf16-mixed'")
    elif type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        yield Conflict(f"precision={trainer.precision!r}, which changes batches", "take '32-true' or 'bf16-mixed'")
    if not module.automatic_optimization or len(optimizers) != 1:
        got = f"{len(optimizers)} optimizers" if module.automatic_optimization else "manual optimization"
        yield Conflict(got, "use automatic optimization with one optimizer, or write a loop with PrivateGradient")
    elif any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):
        held = {id(parameter) for group in optimizers[0].param_groups for parameter in group["params"]}
        left = [name for name, parameter in module.named_parameters() if id(parameter) not in held]
        if left:  # the callback does not name what it unfreezes
            remedy = "give it all named parameters, those that the callback unfreezes as the last param group"
            yield Conflict(f"BaseFinetuning with an optimizer without {few(left)}", remedy)
