"""One run of `fit`: its private steps, its checkpoint, and how it resumes.

`fit` makes one TrainingRun, calls its methods and returns its FitResult. `experiments.runner` and users read the
FitResult. The privacy guarantee rests on PrivateGradient and, in this file, on `_stored` only. `_stored` refuses a
checkpoint with steps that its ledger has not charged.
"""

import math
import signal
import threading
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from privgrad.checkpoint import OtherRunError, damage_refused, read_checkpoint, require_resumable, write_checkpoint
from privgrad.early_stopping import charge_unused
from privgrad.errors import BudgetExceededError, expected
from privgrad.gradient.module_state import trainable
from privgrad.ledger import Ledger
from privgrad.lineage import note_training
from privgrad.optim import PrivateOptimizer
from privgrad.private_gradient import PrivateGradient
from privgrad.processes import Processes
from privgrad.types import Batch

_CHECKPOINT_VERSION = 5


@dataclass
class FitResult:
    """The results of a run, besides the trained model.

    Attributes:
        curve: one row per evaluation: "step" (the number of steps), "epsilon" (spent until then; None if the plan has
            no delta), and the numbers that `evaluate` returned.
        updates: the number of optimizer steps. Below plan.steps if earlier attempts lost steps that stay charged.
        seconds: the training time without evaluation.
        examples_per_second: computed from the public expected batch size.
        raw_nonfinite_examples: the number of this process' examples whose gradients were not finite, and counted as
            zero. NOT private.
        ledger: the record of all releases.
        averaged: a copy of the model with averaged weights, if `ema_decay` was given.
        stopped: whether EarlyStopping ended the training; its unused steps are charged.
    """

    curve: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    updates: int = 0
    seconds: float = 0.0
    examples_per_second: float = math.nan
    raw_nonfinite_examples: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    averaged: nn.Module | None = None
    stopped: bool = False


@dataclass
class TrainingRun:
    """The state of a run that its checkpoint holds."""

    private_grad: PrivateGradient
    averaged: AveragedModel | None
    optimizer: PrivateOptimizer
    scheduler: LRScheduler | None
    result: FitResult
    checkpoint: Path | None
    settings: dict[str, str]
    saved_at: float = 0.0
    start: int = 0
    made: int = 0

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.private_grad.model

    @property
    def processes(self) -> Processes:
        """The processes that train together."""
        return self.private_grad.processes

    def resume(self) -> int:
        """Load the checkpoint, or write the first one; return the index of the next step."""
        if self.averaged is not None:
            note_training(self.averaged.module, self.result.ledger)
        with self.processes.all_succeed():
            stored = self._stored()
        state = self.processes.broadcast_object(stored)
        if state is not None:
            with damage_refused("fit", self.checkpoint):
                self._load(state)
        if self.private_grad.plan.seed is None:
            self._go_on_after_lost_steps(self.processes.broadcast_object(self.result.ledger.next_step))
        self.start = self.private_grad.state_dict()["step"]
        self.save()
        return self.start

    def _go_on_after_lost_steps(self, spent: int) -> None:
        """Skip the steps that the ledger has charged but the checkpoint does not hold.

        `resume` calls this at every start without a research seed. The noise of lost steps cannot be drawn again. This
        moves the step index and the schedule of the learning rate past them. Noise with memory begins again at a
        multiple of its bands, so that up to bands - 1 steps are left out.

        Args:
            spent: `Ledger.next_step`.
        Raises:
            BudgetExceededError: all steps are charged, and no update was saved.
        Privacy:
            The guarantee does not rest on this: the ledger refuses a release beyond the plan's steps by itself.
        """
        plan = self.private_grad.plan
        spent = min(spent, plan.steps)
        lost = spent - self.private_grad.state_dict()["step"]
        if spent >= plan.steps and self.result.updates == 0:
            got = f"{spent} charged and none of their results saved"
            remedy = "train in a new folder and add up both epsilons and both deltas"
            if lost == 0:
                got = f"all {spent} taken by private_grad before this call"
                remedy = "use the model as it is, or make a plan with more steps, at a higher epsilon"
            elif self.checkpoint is None:
                remedy = "give this training a ledger of its own and add up both epsilons and both deltas; "
                remedy += "a pg.Budget caps both together"
            raise expected("fit", "steps", f"to be left of {plan.steps}", got, remedy, BudgetExceededError)
        if lost > 0:
            reason = "charged steps had no checkpoint, and stay spent"
            if plan.correlation is not None:
                reason = "steps had no checkpoint, or are left out because noise with memory begins again"
            warnings.warn(
                f"{lost} {reason}: this run ends with "
                f"{self.result.updates + max(0, plan.steps - spent)} updates of {plan.steps}",
                stacklevel=4,
            )
        self.private_grad.load_state_dict(self.private_grad.state_dict() | {"step": spent})
        if self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch misses the optimizer's steps, which were lost
                for _ in range(spent - self.scheduler.last_epoch):  # also past earlier calls without a checkpoint
                    self.scheduler.step()

    def update(self, batch: Batch) -> None:
        """Take one private step. Signals wait until its end, so that a checkpoint of it can be written."""
        began, result = time.perf_counter(), self.result
        with _signals_wait():
            self.optimizer.step(grad=self.private_grad(batch))
            if self.averaged is not None:
                self.averaged.update_parameters(self.model)
                note_training(self.averaged.module, result.ledger, trainable(self.model))
            if self.scheduler is not None and self.made + self.start + 1 < self.private_grad.plan.steps:
                self.scheduler.step()  # for the next update; there is none after the last
            self.made += 1
            result.updates += 1
            result.seconds += time.perf_counter() - began
        result.raw_nonfinite_examples = self.private_grad.raw_nonfinite_examples
        self._measure_speed()

    def _measure_speed(self) -> None:
        """Compute the speed from the updates and the seconds so far."""
        if self.result.seconds > 0:
            examples = self.result.updates * self.private_grad.plan.expected_batch_size
            self.result.examples_per_second = examples / self.result.seconds

    @property
    def is_consistent(self) -> bool:
        """Whether every released gradient has moved the model. It is False during an update."""
        return self.private_grad.state_dict()["step"] == self.start + self.made

    def save(self, *, at_least_after: float = 0.0) -> None:
        """Write the checkpoint, atomically, unless the last one is younger than `at_least_after` seconds."""
        if self.checkpoint is None or not self.processes.broadcast_object(
            time.monotonic() - self.saved_at >= at_least_after
        ):
            return
        state: dict[str, Any] = {
            "version": _CHECKPOINT_VERSION,
            "seed": self.private_grad.plan.seed,
            "settings": self.settings,
            "model": self.model.state_dict(),
            "averaged": None if self.averaged is None else self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "private_grad": self.private_grad.state_dict(),
            "ledger": self.result.ledger.head,
            "curve": self.result.curve,
            "updates": self.result.updates,
            "seconds": self.result.seconds,
        }
        state = self.processes.gather_state(state)
        if self.processes.rank == 0:
            write_checkpoint(state, self.checkpoint)
        self.saved_at = time.monotonic()

    def save_after(self, error: BaseException) -> None:
        """Write the checkpoint after an exception, if it can be written, and say so in a note of the exception."""
        # An exception in one process may not have reached the others, which would have to gather the state.
        if not self.is_consistent or self.processes.count > 1 or self.checkpoint is None:
            return
        self.save()
        steps = f"{self.start + self.made:,} of {self.private_grad.plan.steps:,} steps"
        error.add_note(f"fit: saved after {steps} in {self.checkpoint.parent}; run the same program again to resume.")

    def end_early(self, step: int) -> None:
        """End the training by results after this number of steps, and charge the unused ones."""
        self.result.stopped = step < self.private_grad.plan.steps
        charge_unused(self.private_grad)

    def finish(self) -> FitResult:
        """Write the last checkpoint, and return the result. Warn of examples without finite gradients: NOT private."""
        self.save()
        if count := self.result.raw_nonfinite_examples:
            warnings.warn(
                f"NOT PRIVATE: {count} gradients were not finite and counted as zero; do not publish their number",
                stacklevel=3,
            )
        return self.result

    def _stored(self) -> dict[str, Any] | None:
        """Return the content of the checkpoint in the first process, if there is one, after it was verified."""
        ledger = self.result.ledger
        if self.processes.rank > 0 or self.checkpoint is None:
            return None
        if not self.checkpoint.exists():
            if ledger.releases:
                condition = f"to exist next to its ledger of {ledger.releases} releases"
                remedy = "restore it, or train in a new folder and add up both epsilons and both deltas"
                raise expected("fit", f"{self.checkpoint}", condition, "a missing file", remedy)
            return None
        with damage_refused("fit", self.checkpoint):
            state = read_checkpoint(self.checkpoint)
            seed, settings = self.private_grad.plan.seed, self.settings
            require_resumable(state, version=_CHECKPOINT_VERSION, seed=seed, settings=settings, ledger=ledger)
            return state
        return None

    def _load(self, state: Mapping[str, Any]) -> None:
        """Restore the run from the content of a checkpoint; raise OtherRunError if the model has other shapes."""
        place, optimizer = self.processes.shard_like, state["optimizer"]
        own = self.model.state_dict()
        for name in sorted(own.keys() | state["model"].keys()):
            shapes = [tuple(held[name].shape) if name in held else None for held in (state["model"], own)]
            if shapes[0] != shapes[1]:
                told = ["no such tensor" if shape is None else f"shape {shape}" for shape in shapes]
                raise OtherRunError(f"{told[0]} for {name!r} of the model, now {told[1]}")
        self.model.load_state_dict(place(state["model"], own))
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        parameters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        held: dict[int, dict[str, Tensor]] = optimizer["state"]
        of_parameters = {i: place(own, dict.fromkeys(own, parameters[i])) for i, own in held.items()}
        self.optimizer.load_state_dict({**optimizer, "state": of_parameters})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.private_grad.load_state_dict(state["private_grad"])
        self.result.curve = [{"step": row["step"], **row} for row in state["curve"]]
        self.result.updates = int(state["updates"])
        self.result.seconds = float(state["seconds"])
        self._measure_speed()


@contextmanager
def _signals_wait() -> Generator[None]:
    """Delay SIGINT and SIGTERM to the end of the block; a second signal takes effect at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting:
            raise KeyboardInterrupt
        waiting.append((number, frame))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, wait)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in waiting:
        handlers[signal.Signals(number)](number, frame)
