"""Lightning: a strategy whose step is the private step. Automatic optimization stays as it is."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import Dataset

from privgrad.errors import PrivacyError, SamplingError, expected
from privgrad.gradient.clipping import Clipping
from privgrad.gradient.perturb import Perturbation
from privgrad.gradient.precondition import Preconditioner
from privgrad.integrations.external_loop import ExternalLoopStep
from privgrad.ledger import Ledger
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling import Collate
from privgrad.types import Batch

_KEY = "privgrad"


class PrivateStrategy(SingleDeviceStrategy):
    """A strategy for lightning.pytorch.Trainer under which every update is by one released gradient.

        strategy = PrivateStrategy(plan, ledger="runs/mine/ledger.jsonl")
        trainer = Trainer(strategy=strategy, max_steps=plan.steps)
        trainer.fit(module, strategy.batches(train_set), val_loader)

    The module's `training_step` returns one loss an example, shape (B,), and logs nothing: its losses are private. Its
    `configure_optimizers` returns one optimizer of privgrad.optim over self.named_parameters(), and schedulers. An
    epoch is 1 / sample_rate steps. Callbacks, validation, loggers, checkpoints and `ckpt_path` are Lightning's.

    Args:
        plan: the public numbers; the Trainer's max_steps is plan.steps.
        device: to train on; None takes the GPU if there is one.
        ledger: path of the record, without which no run is resumed; None keeps it in memory.
        perturb, precondition, clip, engine, microbatch_size, memory_mb: as in PrivateGradient.
    Raises:
        PrivacyError: (in fit) the Trainer or the module would change the private step, or train without it.
    Privacy:
        As PrivateGradient. Checkpoints hold post-processing only, and no keys.
    Attributes:
        private_grad: of the current fit or the last; `private_grad.ledger` is the record.
    """

    private_grad: PrivateGradient

    def __init__(
        self,
        plan: PrivacyPlan,
        *,
        device: str | torch.device | None = None,
        ledger: str | os.PathLike[str] | None = None,
        perturb: Perturbation | None = None,
        precondition: Preconditioner | None = None,
        clip: Clipping | None = None,
        engine: Literal["factored", "vmap"] = "factored",
        microbatch_size: int | None = None,
        memory_mb: float | None = None,
    ) -> None:
        super().__init__(device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._plan, self._ledger = plan, ledger
        self._in_memory = Ledger()  # of all fits: what the first released, the second must not forget
        self._options: dict[str, Any] = {
            "perturb": perturb,
            "precondition": precondition,
            "clip": clip,
            "engine": engine,
            "microbatch_size": microbatch_size,
            "memory_mb": memory_mb,
        }
        self._further: tuple[Any, ...] = ()
        self._resumed = False

    def batches(self, dataset: Dataset[Any] | Sequence[Any], *, collate: Collate | None = None) -> "Epochs":
        """What `fit` takes in place of a training data loader; arguments as in plan.batches."""
        return Epochs(self, dataset, collate)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = cast(LightningModule, self.lightning_module)
        _require_options(trainer, module, self._plan, self.optimizers)
        self.private_grad = PrivateGradient(
            module,
            self._losses,
            self._plan,
            ledger=self._in_memory if self._ledger is None else Ledger(self._ledger),
            **self._options,
        )
        self.private_step = ExternalLoopStep(
            "PrivateStrategy", module, self.private_grad, self.optimizers[0], clip=self._options["clip"]
        )
        self._resumed = False

    def on_train_start(self) -> None:
        if not self._resumed:
            self.private_step.require_unspent()

    def on_train_end(self) -> None:
        self.private_step.require_moved()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "private_grad") and self._ledger is not None:
            self.private_grad.ledger.close()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if not isinstance(batch, Batch):
            return super().batch_to_device(batch, device, dataloader_idx)
        return replace(batch, examples=super().batch_to_device(batch.examples, device, dataloader_idx))

    def training_step(self, batch: Batch, *further: Any) -> Tensor:
        """Release one gradient. The loss stays private: nan tells nothing."""
        if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "give trainer.fit the training data as strategy.batches(train_set)"
            raise expected("PrivateStrategy", "batch", "to be a Batch", type(batch).__name__, remedy, SamplingError)
        self._further = further
        with self.precision_plugin.train_step_context():
            self.private_step.release(batch)
        return torch.full((), torch.nan, device=self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return closure_loss  # the gradient has been released

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        def released() -> Any:
            closure()
            return self.private_step.take()

        return super().optimizer_step(optimizer, released, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint:  # without which nothing goes on
            checkpoint[_KEY] = self.private_step.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if _KEY not in checkpoint:
            remedy = "give ckpt_path of a run under PrivateStrategy"
            raise expected("PrivateStrategy", "the checkpoint", "to be of a private run", "another", remedy)
        self.private_step.load_state_dict(checkpoint[_KEY], updates=checkpoint["global_step"])
        self._resumed = True
        super().load_optimizer_state_dict(checkpoint)

    def _losses(self, module: Any, examples: Any) -> Tensor:
        module.log = module.log_dict = _refuse_to_log
        hook, module._current_fx_name = module._current_fx_name, None  # without which super().log refuses, too
        try:
            return module.training_step(examples, *self._further)
        finally:
            module._current_fx_name = hook
            del module.log, module.log_dict


class Epochs:
    """The plan's batches, for Lightning: an epoch each time it is iterated over."""

    def __init__(self, strategy: PrivateStrategy, dataset: Any, collate: Collate | None) -> None:
        self._strategy, self._dataset, self._collate = strategy, dataset, collate

    def __len__(self) -> int:
        return self._strategy.private_step.epoch_steps

    def __iter__(self) -> Iterator[Batch]:
        trainer = cast(LightningModule, self._strategy.lightning_module).trainer
        step = self._strategy.private_step
        yield from step.batches(self._dataset, updates=trainer.global_step, collate=self._collate)
        if step.private_grad.state_dict()["step"] >= step.private_grad.plan.steps:
            trainer.should_stop = True  # steps of an earlier attempt were lost: max_steps is not reached

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where to go on, the strategy knows. (Without it Lightning takes this for no resumable loader.)"""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""


def _refuse_to_log(*args: Any, **kwargs: Any) -> None:
    remedy = "log in validation_step, of public or held-out data"
    raise expected("PrivateStrategy", "training_step", "to log nothing", "a call of self.log", remedy, PrivacyError)


def _require_options(trainer: Trainer, module: LightningModule, plan: PrivacyPlan, optimizers: list[Any]) -> None:
    """Raise PrivacyError that lists every option that the private step cannot honor."""
    # What was asked for stands nowhere else: Trainer.num_devices tells the strategy's one.
    asked: Any = getattr(getattr(trainer, "_accelerator_connector", None), "_devices_flag", 1)
    devices = asked if isinstance(asked, int) else len(asked)
    if devices != 1:
        remedy = "set devices=1, or use fit(processes=...)"
        raise expected("PrivateStrategy", "the Trainer", "to train on one device", f"devices={devices}", remedy)
    required: dict[str, Any] = {
        "max_steps": plan.steps,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,  # would clip the noise too, so that the optimizer knows its size no more
        "limit_train_batches": 1.0,
        "overfit_batches": 0.0,
    }
    wrong = {name: value for name, value in required.items() if getattr(trainer, name) != value}
    if wrong:
        got = ", ".join(f"{name}={getattr(trainer, name)!r}" for name in wrong)
        remedy = f"set {', '.join(f'{name}={value!r}' for name, value in wrong.items())}"
        raise expected("PrivateStrategy", "the Trainer", "to leave the private step to the plan", got, remedy)
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise expected("PrivateStrategy", "precision", "to scale no gradients", "a scaler", "take 'bf16-mixed'")
    if type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        remedy = "take '32-true' or 'bf16-mixed'"
        raise expected("PrivateStrategy", "precision", "to leave batches as they are", trainer.precision, remedy)
    if not module.automatic_optimization or len(optimizers) != 1:
        got = f"{len(optimizers)} optimizers" if module.automatic_optimization else "manual optimization"
        remedy = "write the loop by hand with PrivateGradient for anything else"
        raise expected("PrivateStrategy", "the module", "to optimize automatically, by one optimizer", got, remedy)
