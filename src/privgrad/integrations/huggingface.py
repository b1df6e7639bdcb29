"""A bridge to Hugging Face: a Trainer whose step is the private step. Models with PEFT adapters train like others."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments, default_data_collator
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from transformers.utils.import_utils import is_peft_available

from privgrad.accounting.accountant import epsilon, rounded_up
from privgrad.errors import PrivacyError, SamplingError, expected
from privgrad.integrations import huggingface_arguments as arguments
from privgrad.integrations import huggingface_models as models
from privgrad.integrations import huggingface_start as start
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import note_folder
from privgrad.optim import PrivateOptimizer
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.datasets import ask_about_rows
from privgrad.sampling.loading import Collate
from privgrad.statement.model_card import write_privacy
from privgrad.training.checkpoint import damage_refused, read_checkpoint, write_checkpoint
from privgrad.training.external_loop import Conflict, ExternalLoopStep, refuse
from privgrad.training.run import StopData, charge_unused
from privgrad.types import Batch, PrivacyUnit

_STATE = "privgrad.pt"  # the state of the private step, in the folder of a checkpoint
_LEDGER = ContextVar[Ledger | None]("_LEDGER", default=None)  # of the training that runs, whose checkpoints are its own


if is_peft_available():
    from peft import PeftModel

    _load = cast(Any, PeftModel).load_adapter

    @wraps(_load)
    def _load_adapter(model: nn.Module, model_id: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        result = _load(model, model_id, *args, **options)
        note_folder(model, model_id, _LEDGER.get())  # PEFT keeps no trace of the folder
        return result

    cast(Any, PeftModel).load_adapter = _load_adapter


class PrivateTrainer(Trainer):
    """A transformers.Trainer that trains with the plan's batches, released gradients and a ledger.

    Schedulers, callbacks, evaluation, logging, saving and resuming are the Trainer's. An epoch is 1 / sample_rate
    steps. The loss on private examples is never logged. `epsilon` is logged with each evaluation and at the end.
    A subclass may redefine the Trainer's methods, except those that draw batches or make the private step: these are
    refused by name. `create_optimizer` is called once, in the constructor.

    Args:
        model: a transformers model, with or without PEFT adapters, or any module that takes a batch's columns by name.
        args: TrainingArguments. Steps, batch size and clipping norm are the plan's: leave them out, or give the same
            numbers. An explicit num_train_epochs must be the plan's steps times its sample_rate. One error lists all
            arguments that contradict the plan. A default of transformers counts as not set, also if you typed it; a
            line of the log says which ones the plan replaces, and by which of its numbers.
        plan: the public numbers. Give it, or the next three.
        target_epsilon: > 0, what the training may cost. The batch is then that of `args`, if you typed it, or a tenth
            of num_examples; the steps are those of num_train_epochs or max_steps; and the clipping norm is 0.1, unless
            you typed another max_grad_norm.
        delta: in (0, 1), at most 1 / num_examples.
        num_examples: the public number of examples, at most the true one. With a larger one, epsilon holds as it is
            stated, and batches are smaller than planned; if it is more than twice the true one, a warning says so.
        head_first: with target_epsilon, for texts of several classes: a private head is trained first, on the states
            of the model as it was given. It takes half of epsilon, has a ledger in output_dir/head, and the classifier
            starts from its weights. False: all of epsilon goes to the fine-tuning.
        train_dataset: the private examples, map-style: dicts of columns.
        noise_step: u > 0, the noise step of the default optimizer; see optimizers.
        optimizers: an optimizer of privgrad.optim over model.named_parameters(), and a scheduler; None takes the
            scheduler of `args`. Without an optimizer, it is AdamWBC with the betas and the weight decay of `args`, and
            with noise_step or the learning_rate of `args`. If neither is set, the noise step is 0.0025, which suits
            pretrained layers, 0.025 for the pooler of a frozen encoder, 0.06 for the head of a classifier, and 0.01 for
            one that starts from a private head. A learning_rate of 5e-5, transformers' default, counts as not set.
        loss_fn: (model, batch) -> losses, shape (B,), where batch is the collated dict. None takes the loss of
            transformers, for each example by itself: of classes, several labels or numbers, for texts and images; of
            tokens (the mean over an example's own ones); of spans of answers. The loss of an evaluation is its mean
            over the rows; for persons (privacy_unit="user") it is the model's own.
        data_collator: as in the Trainer, but it must pad to a public length. None stacks the columns.
        selection_data: where the evaluations come from that choose the model: "public" or "released", as in
            EarlyStopping. Required with EarlyStoppingCallback, load_best_model_at_end and save_strategy="best".
        private_options: options of PrivateGradient by name: perturb, precondition, clip, engine, microbatch_size,
            memory_mb, compile, norm_bins, adaptive_clip and filter.
        trainer_options: the Trainer's other arguments.
    Raises:
        PrivacyError: an argument contradicts the plan, would change the private step, or would reveal private
            information.
    Privacy:
        The guarantee of PrivateGradient; the ledger is args.output_dir/ledger.jsonl. It does not cover the evaluation
        data: what `evaluate` and callbacks publish about these has no noise. If EarlyStoppingCallback ends the
        training, the unused steps are charged too, as `training.run.charge_unused` explains.
    Attributes:
        private_grad: the PrivateGradient; `private_grad.ledger` records all releases.
        private_step: the ExternalLoopStep that connects it to the Trainer's loop.
        ledgers: of this training, and of the head that it starts from, if there is one: `pg.save` takes them.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        plan: PrivacyPlan | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        num_examples: int | None = None,
        head_first: bool = True,
        train_dataset: Any,
        noise_step: float | None = None,
        optimizers: tuple[PrivateOptimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        loss_fn: models.Losses | None = None,
        data_collator: Any = None,
        selection_data: StopData | None = None,
        private_options: Mapping[str, Any] | None = None,
        **trainer_options: Any,
    ) -> None:
        self._layer: start.Layer | None = None
        self._head_plan: PrivacyPlan | None = None
        self._head_ledger: Ledger | None = None
        if plan is None:
            numbers = start.Numbers(**_given(target_epsilon=target_epsilon, delta=delta, num_examples=num_examples))
            has_head = head_first and loss_fn is None and not isinstance(train_dataset, ClassRates)
            self._layer = start.last_layer(model) if has_head else None
            plan, self._head_plan = start.planned(numbers, self._layer, **arguments.sizes(args, numbers.num_examples))
            plan = replace(plan, privacy_unit=self._privacy_unit)
        elif target_epsilon is not None or delta is not None or num_examples is not None:
            got = f"plan next to {target_epsilon}, {delta} and {num_examples}"
            raise expected("PrivateTrainer", "plan", "to replace target_epsilon, delta and num_examples", got)
        settled = arguments.settled(args, plan)
        callbacks = trainer_options.get("callbacks") or ()
        refuse(
            "PrivateTrainer",
            arguments.epoch_conflicts(args, plan),
            arguments.step_conflicts(settled, plan),
            self._host_conflicts(settled, plan),
            arguments.optimizer_conflicts(args, plan, optimizers, noise_step),
            arguments.selection_conflicts(args, callbacks, optimizers, selection_data),
            arguments.evaluation_conflicts(train_dataset, trainer_options.get("eval_dataset")),
            arguments.option_conflicts(
                type(self), (PrivateTrainer, *self._hosts), loss_fn, data_collator, private_options, trainer_options
            ),
        )
        arguments.log_replaced(args, plan)
        self._noise_step, self._plan = noise_step, plan
        self._losses = self._default_losses(model) if loss_fn is None else loss_fn
        self._own_loss = loss_fn is None or plan.privacy_unit == "user"  # a row of evaluation data is no person
        self._selection_data = selection_data
        super().__init__(
            model=cast(Any, model),
            args=settled,
            train_dataset=train_dataset,
            optimizers=cast(Any, optimizers),
            data_collator=self._default_collator if data_collator is None else data_collator,
            **trainer_options,
        )
        model = cast(nn.Module, self.model)  # TRL loads models by name, and adds adapters
        self._make_ready(model)
        ask_about_rows(self._examples()[0], plan.num_examples, plan.privacy_unit)
        self.optimizer = self.create_optimizer() or self.optimizer  # a subclass may return nothing
        refuse("PrivateTrainer", arguments.rate_conflicts(self.optimizer, noise_step))
        # The Trainer calls it again when training begins, and a subclass may make another one each time.
        self.create_optimizer = lambda model=None: self.optimizer
        self.private_grad = PrivateGradient(
            model,
            self._losses,
            plan,
            ledger=Path(cast(str, args.output_dir)) / "ledger.jsonl",
            **(private_options or {}),
        )
        self.private_step = ExternalLoopStep("PrivateTrainer", model, self.private_grad, self.optimizer)
        self._updates_of_best: int | None = None  # of the weights that load_best_model_at_end has loaded
        # By itself, TensorBoard's callback chooses its folder when training begins. An evaluation before that would
        # make it write all events up to the end of training to `runs/` in the working directory.
        for callback in cast("list[Any]", self.callback_handler.callbacks):
            if isinstance(callback, TensorBoardCallback) and getattr(callback, "logging_dir", "") is None:
                folder = Path(cast(str, self.args.output_dir)) / "runs" / time.strftime("%b%d_%H-%M-%S")
                callback.logging_dir = str(folder)

    _hosts: ClassVar[tuple[type[Trainer], ...]] = ()  # bases of a subclass whose methods suit the private step
    _default_collator: ClassVar[Any] = staticmethod(default_data_collator)
    _privacy_unit: PrivacyUnit = "example"  # of a training without a plan

    def _default_losses(self, model: nn.Module) -> models.Losses:
        """Return the loss of each example, for a training without loss_fn."""
        return models.losses_of(model)

    def _host_conflicts(self, args: Any, plan: PrivacyPlan) -> Iterable[Conflict]:
        """Return the conflicts of arguments that only a subclass has; it may settle them."""
        return ()

    def _make_ready(self, model: nn.Module) -> None:
        """Change or refuse the model and the data that the constructor of a base class has prepared."""

    def _examples(self) -> tuple[Any, Collate]:
        """Return the data set whose items are the plan's examples, and what makes a batch's columns of them."""
        return cast(Any, self.train_dataset), self._train_collate()

    def _train_collate(self) -> Collate:
        """Return the function that makes the columns of a training batch, with one row per example."""
        return _Columns(cast("Collate", self._get_collator_with_removed_columns(self.data_collator, "training")))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer. The first call makes the default one, unless `optimizers` has one."""
        if cast(object, self.optimizer) is None:
            trained = cast(nn.Module, self.model if model is None else model)
            decayed = self.get_decay_parameter_names(trained) if self.args.weight_decay else ()
            self.optimizer = arguments.make_optimizer(
                trained, self.args, self._plan, self._noise_step, decayed, is_started=self._layer is not None
            )
        return self.optimizer

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the plan's batches, one epoch per iteration."""
        return DataLoader(_Epoch(self, *self._examples()), batch_size=None)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return the next batches, as the Trainer does, without counting a batch's private tokens."""
        return list(islice(epoch_iterator, num_batches)), None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Release one gradient. The loss stays private: the returned value is always zero."""
        model.train()
        with self.compute_loss_context_manager():
            self.private_step.release(replace(inputs, examples=self._prepare_inputs(inputs.examples)))
        if self._layer is not None and self._head_ledger is not None:  # after the first release, which warns of others
            start.note_head(self.private_step.model, self._layer, self._head_ledger)
        if self.private_step.is_spent:
            self.state.max_steps = self.state.global_step + 1  # fewer than planned if an interruption lost steps
        return torch.zeros((), device=self.args.device)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train as the Trainer does; resuming takes the last complete checkpoint and continues its ledger."""
        refuse(  # they may have changed since
            "PrivateTrainer",
            arguments.step_conflicts(self.args, self.private_grad.plan),
            arguments.collator_conflicts(self.data_collator),
            self._selection_conflicts(),
            arguments.evaluation_conflicts(cast(Any, self.train_dataset), cast(Any, self.eval_dataset)),
        )
        if self._plan.privacy_unit == "user":
            models.require_single_texts(self.eval_dataset)
        if self._losses is models.classification_losses:
            are_collated = self.data_collator is not default_data_collator
            models.require_labels(self.private_step.model, self.train_dataset, are_collated=are_collated)
        if not self.private_grad.ledger.is_open:
            self.private_grad.record_in(cast(Path, self.private_grad.ledger.path))
        try:
            if resume_from_checkpoint is True:
                resume_from_checkpoint = _last_checkpoint(Path(cast(str, self.args.output_dir)))
            of_head = self._head_folder / "ledger.jsonl"
            if self._head_plan is not None and (resume_from_checkpoint or of_head.is_file()):
                self._head_ledger = Ledger(of_head, read_only=True)
            if resume_from_checkpoint:
                folder = Path(resume_from_checkpoint)
                with damage_refused("PrivateTrainer", folder / _STATE):
                    state = read_checkpoint(folder / _STATE)
                updates = TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step
                self.private_step.load_state_dict(state, updates=updates)
            else:
                is_known = self.private_grad.ledger.releases and self._plan.delta is not None
                cost = f", which cost epsilon = {rounded_up(self.epsilon, 4)}" if is_known else ""
                self.private_step.require_unspent(cost)
            self._updates_of_best = None
            self._say_and_start(is_resumed=bool(resume_from_checkpoint))
            giving = self.private_step.optimizer.register_step_pre_hook(
                lambda optimizer, args, kwargs: ((optimizer,), {"grad": self.private_step.take()})
            )
            running = _LEDGER.set(self.private_grad.ledger)
            try:
                output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            finally:
                _LEDGER.reset(running)
                giving.remove()  # the next trainer may have the same optimizer
            self._charge_stop()
            self.private_step.require_moved()
        finally:
            self.private_grad.ledger.close()  # now another trainer may resume it
        public = {name: value for name, value in output.metrics.items() if name != "train_loss"}
        return TrainOutput(output.global_step, cast(Any, None), public)

    @property
    def ledgers(self) -> list[Ledger]:
        """The ledger of the head that the training starts from, if there is one, and that of the training."""
        return [*([] if self._head_ledger is None else [self._head_ledger]), self.private_grad.ledger]

    @property
    def epsilon(self) -> float:
        """The cost of the training so far, with its head, at the plan's delta; PrivacyError without one."""
        delta = self.private_grad.plan.delta
        if delta is None:
            raise expected("PrivateTrainer.epsilon", "the plan", "to have a delta", None, "give delta to PrivacyPlan")
        return epsilon([one for ledger in self.ledgers for one in ledger.charged], delta=delta)

    def _say_and_start(self, *, is_resumed: bool) -> None:
        """Log what a head would bring, and train one first if it was planned."""
        model, head = self.private_step.model, models.head_of(self.private_step.model)
        own = [parameter for name, parameter in model.named_parameters() if name not in head]
        if head and not all(parameter.requires_grad for parameter in own):
            told = "pg.fit_head on stored states of the encoder is often as accurate, and trains in seconds"
            arguments.tell(f"{told}: docs/hugging-face.md shows it.")
        arguments.tell("steps 1, 2, 4, 8, ... are slower. They compare some gradients with single examples.")
        if self._layer is not None and self._head_plan is not None and not is_resumed:
            arguments.tell("a private head on the states of all examples comes first, for half of epsilon.")
            collate, folder = self._train_collate(), self._head_folder
            self._head_ledger = start.start_from_head(
                model, self._layer, self.train_dataset, collate, self._head_plan, folder
            )

    @property
    def _head_folder(self) -> Path:
        return Path(cast(str, self.args.output_dir)) / "head"

    def _selection_conflicts(self) -> Iterator[Conflict]:
        optimizers = (self.optimizer, cast(object, self.lr_scheduler))
        callbacks = cast("list[object]", self.callback_handler.callbacks)
        return arguments.selection_conflicts(self.args, callbacks, optimizers, self._selection_data)

    def _charge_stop(self) -> None:
        """Charge the unused steps if EarlyStoppingCallback has ended the training; a second call changes nothing."""
        for one in cast("list[object]", self.callback_handler.callbacks):
            is_rule = isinstance(one, EarlyStoppingCallback)
            if is_rule and one.early_stopping_patience_counter >= one.early_stopping_patience:
                charge_unused(self.private_grad)

    def evaluation_loop(self, dataloader: DataLoader[Any], description: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does; refuse rows of the training data."""
        name = "test_dataset" if description == "Prediction" else "eval_dataset"
        data = getattr(dataloader, "dataset", None)
        rows = arguments.evaluation_conflicts(cast(Any, self.train_dataset), data, name)
        refuse("PrivateTrainer", rows, self._selection_conflicts())  # a scheduler may have been created since
        return super().evaluation_loop(dataloader, description, *args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of an evaluation: the mean of loss_fn over the rows if it was given, or the model's own."""
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if self._own_loss:
            return found
        loss = self._losses(model, inputs).mean()
        return (loss, found[1]) if isinstance(found, tuple) else loss

    def _get_learning_rate(self) -> float:
        """Return the learning rate that the Trainer logs, and keep the rates of all groups for `log`."""
        self._rates = arguments.rates_by_name(self.private_step.optimizer)
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, without the loss on private examples; add epsilon at evaluations and at the end."""
        public = {name: value for name, value in logs.items() if name not in ("loss", "train_loss", "grad_norm")}
        if "learning_rate" in public:  # the Trainer's name for the rate of the first group, also for a noise step
            del public["learning_rate"]
            public |= self._rates
        if "train_runtime" in logs:  # the Trainer's last line, which tells the epsilon of all that counts
            self._charge_stop()
        private_grad, rare = self.private_grad, any(name.endswith("_runtime") for name in logs)
        if rare and private_grad.ledger.releases and self.is_in_train and private_grad.plan.delta is not None:
            public["epsilon"] = self.epsilon  # may take seconds
        super().log(public, start_time)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the plan's public count for the training data, and the Trainer's count for other data."""
        if isinstance(dataloader.dataset, _Epoch):
            return self.private_grad.plan.num_examples
        return super().num_examples(dataloader)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return zero: the true number would reveal the size of a batch."""
        return 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the Trainer does, with the privacy of all its trainings in README.md and statement.txt."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call:  # in a checkpoint, the computation of epsilon would cost time at each save
            self._write_privacy(self.args.output_dir if output_dir is None else output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model as the Trainer does, without training_args.bin: it has paths, and no loading needs it."""
        super()._save(output_dir, state_dict)
        (Path(cast(str, output_dir or self.args.output_dir)) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's draft of README.md to output_dir, with the privacy of the training."""
        history = self.state.log_history
        self.state.log_history = [{name: one[name] for name in one if name != "epsilon"} for one in history]
        try:
            super().create_model_card(*args, **kwargs)  # epsilon is no result on evaluation data
        finally:
            self.state.log_history = history
        self._write_privacy(self.args.output_dir)  # before `push_to_hub` uploads the folder

    def _write_privacy(self, folder: str | None) -> None:
        """Add the privacy of the training to the README.md of a folder."""
        step, private_grad = self.private_step, self.private_grad
        name, rates = type(step.optimizer).__name__, arguments.rates_by_name(step.optimizer, "initial_lr")
        made = self.state.global_step or private_grad.ledger.releases  # 0: this process has not trained
        updates = made if self._updates_of_best is None else self._updates_of_best
        write_privacy(Path(cast(str, folder)), private_grad, name, rates, updates, self.ledgers)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint as the Trainer does, with the state of the private step."""
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # trainer_state.json holds durations
        if not self.args.save_only_model:
            write_checkpoint(self.private_step.state_dict(), folder / _STATE)  # the Trainer's last file completes it
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state under a research seed only: it would reveal how many examples were augmented."""
        if self.private_grad.plan.seed is not None:
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        """Load the best weights at the end of training, as the Trainer does, once each parameter has moved."""
        self.private_step.require_moved()  # the best weights may be those that this process started with
        super()._load_best_model()
        self._updates_of_best = self.state.best_global_step


class _Columns:
    """The collated columns as a dict. Worker processes that are not forked must unpickle it."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        try:
            return dict(self._collate(items))
        except ValueError as error:
            if isinstance(error, PrivacyError):
                raise
            remedy = "pad each one: tokenizer(texts, padding='max_length', truncation=True, max_length=...)"
            condition = "to have columns of one public length"
            raise expected("PrivateTrainer", "the examples", condition, error, remedy, SamplingError) from error


class _Epoch(IterableDataset[Any]):
    """The batches of one epoch."""

    def __init__(self, trainer: PrivateTrainer, dataset: Any, collate: Collate) -> None:
        self._trainer, self._dataset, self._collate, self._is_first = trainer, dataset, collate, True

    def __len__(self) -> int:
        return self._trainer.private_step.epoch_steps

    def __iter__(self) -> Iterator[Batch | None]:
        updates, step = self._trainer.state.global_step, self._trainer.private_step
        if step.is_spent:  # an interruption lost steps, so max_steps is never reached
            self._trainer.control.should_training_stop = True
        if self._is_first:
            self._is_first = False
            # A resumed Trainer skips the first batches of its first epoch: their gradients were released.
            yield from [None] * (updates % step.epoch_steps)
        args = self._trainer.args
        loading = {
            "num_workers": args.dataloader_num_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
        }
        yield from step.batches(self._dataset, updates=updates, collate=self._collate, **loading)


def _given(**numbers: float | None) -> dict[str, Any]:
    """Return the numbers that replace a plan; raise PrivacyError if one is missing."""
    if missing := [name for name, value in numbers.items() if value is None]:
        remedy = f"give {', '.join(numbers)}, or plan=pg.PrivacyPlan.for_budget(...): they decide the privacy"
        raise expected("PrivateTrainer", ", ".join(missing), "to be given without a plan", None, remedy)
    return numbers


def _last_checkpoint(folder: Path) -> str:
    paths = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    for path in sorted(paths, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        try:
            TrainerState.load_from_json(str(path / "trainer_state.json"))
        except (OSError, ValueError, TypeError):
            continue  # the process was killed while it wrote
        if (path / _STATE).exists():
            return str(path)
    remedy = "train without resume_from_checkpoint"
    if spent := Ledger(folder / "ledger.jsonl", read_only=True).releases:
        remedy += f" in another output_dir, and add up both epsilons and both deltas: {spent} steps were released here "
        remedy += "before a checkpoint was complete. A smaller save_steps loses fewer"
    got = f"{len(paths)} incomplete ones in {folder}" if paths else f"0 in {folder}"
    raise expected("PrivateTrainer", "resume_from_checkpoint", "to find a complete checkpoint", got, remedy)
