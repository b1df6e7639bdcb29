"""One run of `fit`: its private steps, its checkpoint, how it resumes, and how it stops early."""

import math
import secrets
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from privgrad.accounting.mechanisms import first_step_of_new_groups, whole_epochs
from privgrad.errors import (
    BudgetExceededError,
    described,
    expected,
    require_choice,
    require_integer,
    require_nonnegative,
)
from privgrad.gradient.functional import trainable
from privgrad.ledger.ledger import UNUSED, Ledger, release_of
from privgrad.ledger.lineage import note_training
from privgrad.optim import PrivateOptimizer
from privgrad.optim.contrib import require_named_source
from privgrad.private_gradient import PrivateGradient
from privgrad.processes import Processes
from privgrad.sampling.epochs import has_key
from privgrad.training.checkpoint import (
    NEW_FOLDER,
    damage_refused,
    few,
    read_checkpoint,
    require_resumable,
    require_same,
    write_checkpoint,
)
from privgrad.types import Batch

StopData = Literal["public", "released"]
Mode = Literal["min", "max"]
_CHECKPOINT_VERSION = 5


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """A rule that ends `fit` once an evaluated number has stopped improving.

    It does not lower epsilon: `fit` charges the unused steps too. The noise was calibrated for all steps, and an early
    stop cannot exchange it for less noise. If fewer steps suffice, plan fewer: the same epsilon then has less noise.

    Args:
        monitor: the name of a number that `evaluate` returns.
        patience: >= 1, the evaluations in a row without an improvement after which training stops.
        mode: "min" if smaller numbers are better, "max" if larger ones are.
        data: where the number comes from. "public": from examples of people who need no protection, or synthetic ones.
            "released": from private examples with noise, by `release_mean` say, at a price in a ledger or budget of its
            own. There is no other choice: a stop by an exact score of private people would be a release without noise.
        min_delta: >= 0, the change that counts as an improvement.
    Raises:
        PrivacyError: an argument is out of its range.
    Privacy:
        The stop is post-processing of released gradients, and of public or released numbers. Anyone who knows the
        rule could apply it to the whole training afterwards, so the guarantee is that of all planned steps. It is not
        that of the steps taken, because their number depends on the releases. `data` is your statement; nothing can
        check it.
    Reference:
        Rogers, Roth, Ullman, Vadhan 2016 (arXiv 1605.08294): a cost that stops by results needs an odometer.
    """

    monitor: str
    patience: int
    mode: Mode
    data: StopData
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        require_integer("EarlyStopping", "patience", self.patience, 1)
        require_choice("EarlyStopping", "mode", self.mode, get_args(Mode))
        require_nonnegative("EarlyStopping", "min_delta", self.min_delta)
        if self.data not in get_args(StopData):
            remedy = 'evaluate on public examples; or release a noisy score (release_mean) and give data="released"; '
            remedy += "or pay for tuning (docs/private-tuning.md)"
            raise expected("EarlyStopping", "data", "to be 'public' or 'released'", repr(self.data), remedy)
        if self.monitor.startswith("raw_"):
            remedy = "monitor a number of public examples: raw_ numbers are private"
            raise expected("EarlyStopping", "monitor", "to name a number without raw_", self.monitor, remedy)

    def is_due(self, curve: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the last `patience` evaluations of a curve have not improved on the best one before them."""
        sign = 1.0 if self.mode == "min" else -1.0
        best, since = math.inf, 0
        for row in curve:
            value = sign * float(row[self.monitor])
            since = 0 if value < best - self.min_delta else since + 1  # NaN is no improvement
            best = value if since == 0 else best
        return since >= self.patience

    def require(self, row: Mapping[str, Any] | None) -> None:
        """Raise PrivacyError unless a row of the curve has the number. None: there is no `evaluate`."""
        value = None if row is None else row.get(self.monitor)
        if isinstance(value, bool) or not isinstance(value, int | float):
            names = ", ".join(name for name in row or () if name not in ("step", "epsilon"))
            remedy = f"return it from evaluate, or monitor one of {names or 'its numbers'}"
            raise expected("fit", f"evaluate's {self.monitor!r}", "to be a number for stop", described(value), remedy)


def charge_unused(private_grad: PrivateGradient) -> None:
    """Charge all steps that the plan has left, without a release: their epsilon covers a stop by results."""
    plan, ledger = private_grad.plan, private_grad.ledger
    if plan.seed is not None:  # such a run has no guarantee
        return
    release = release_of(ledger.plan_facts)
    stream = secrets.token_hex(4)  # no two ledgers share a draw
    if ledger.epoch_key is not None:
        ledger.epoch_key.unlink(missing_ok=True)
    for step in range(whole_epochs(ledger.next_step, release.epoch_steps or 1), plan.steps):
        try:
            ledger.charge(release, draw=f"{UNUSED}{stream}:{step}", limit=plan.steps)
        except BudgetExceededError:  # more samplers than planned have used up what each person may cost
            return
    private_grad.load_state_dict(private_grad.state_dict() | {"step": plan.steps})


def skip_lost_steps(private_grad: PrivateGradient, updates: int) -> None:
    """Skip the steps that the ledger has charged but no checkpoint holds, and warn, after so many updates."""
    plan = private_grad.plan
    if plan.seed is not None:  # they are computed again; without a seed, their noise cannot be drawn again
        return
    spent = first_step(private_grad, private_grad.ledger.next_step)
    lost = spent - private_grad.state_dict()["step"]
    if lost > 0:
        reason = "charged steps had no checkpoint, and stay spent"
        if plan.correlation is not None:  # it begins again at a multiple of its bands
            reason = "steps had no checkpoint, or are left out because noise with memory begins again"
        if plan.sampling == "epochs" and spent > private_grad.ledger.next_step:
            reason = f"steps had no checkpoint, or are left out: the key of the epoch before step {spent} is not here"
        left = updates + plan.steps - spent
        warnings.warn(f"{lost} {reason}: this run ends with {left} updates of {plan.steps}", stacklevel=5)
    private_grad.load_state_dict(private_grad.state_dict() | {"step": spent})


def first_step(private_grad: PrivateGradient, step: int) -> int:
    """Return where a new sampler may resume after a step: where groups of people or, without its key, epochs begin."""
    plan, ledger = private_grad.plan, private_grad.ledger
    if plan.seed is None and plan.sampling == "epochs":
        with private_grad.processes.all_succeed():  # the file may be damaged
            is_kept = has_key(ledger.epoch_key, step // plan.epoch_steps)
        if not private_grad.processes.broadcast_object(is_kept):
            step = whole_epochs(step, plan.epoch_steps)
    elif plan.seed is None:
        step = first_step_of_new_groups(step, plan.bands)
    return min(step, plan.steps)


def require_optimizer(function: str, private_grad: PrivateGradient, optimizer: object) -> PrivateOptimizer:
    """Return the optimizer; raise PrivacyError unless it moves the model by its released gradients, and all of it."""
    if not isinstance(optimizer, PrivateOptimizer):
        remedy = "create it from privgrad.optim with model.named_parameters(), or write the loop and use grad.assign"
        raise expected(function, "optimizer", "to take released gradients", type(optimizer).__name__, remedy)
    own = dict(private_grad.model.named_parameters())
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    foreign = len(held - {id(parameter) for parameter in own.values()})
    missing = [name for name, parameter in own.items() if parameter.requires_grad and id(parameter) not in held]
    if foreign or missing:
        got = f"an optimizer without {few(missing)}" if missing else f"{foreign} parameters of other modules"
        remedy = "create the optimizer from this model, after adapters are added to it, or freeze what it leaves out"
        raise expected(function, "optimizer", "to hold every trainable parameter, and no others", got, remedy)
    require_named_source(function, optimizer, private_grad.ledger.plan_facts["side_information"] or "")
    private_grad.ledger.optimizer = type(optimizer).__name__
    return optimizer


@dataclass
class FitResult:
    """The results of a run, besides the trained model.

    Attributes:
        curve: one row per evaluation: "step" (the number of steps), "epsilon" (spent until then; None if the plan has
            no delta, or batches of fixed size), and the numbers that `evaluate` returned.
        updates: the number of optimizer steps. Below plan.steps if earlier attempts lost steps that stay charged.
        seconds: the training time without evaluation.
        raw_nonfinite_examples: the number of this process' examples whose gradients were not finite, and counted as
            zero. NOT private.
        ledger: the record of all releases.
        averaged: a copy of the model with averaged weights, if `ema_decay` was given.
        stopped: whether EarlyStopping ended the training; its unused steps are charged.
    """

    curve: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    updates: int = 0
    seconds: float = 0.0
    raw_nonfinite_examples: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    averaged: nn.Module | None = None
    stopped: bool = False

    @property
    def examples_per_second(self) -> float:
        """The speed, computed from the public expected batch size; nan before the first step."""
        examples = self.updates * self.ledger.plan_facts.get("expected_batch_size", 0)
        return examples / self.seconds if self.seconds > 0 else math.nan


@dataclass
class TrainingRun:
    """The state of a run that its checkpoint holds."""

    private_grad: PrivateGradient
    averaged: AveragedModel | None
    optimizer: PrivateOptimizer
    scheduler: LRScheduler | None
    stop: EarlyStopping | None
    result: FitResult
    checkpoint: Path | None
    settings: dict[str, str]
    saved_at: float = 0.0
    start: int = 0
    made: int = 0

    def __post_init__(self) -> None:
        self.model: nn.Module = self.private_grad.model
        self.processes: Processes = self.private_grad.processes

    @property
    def is_to_stop(self) -> bool:  # by the evaluations so far
        return self.stop is not None and self.stop.is_due(self.result.curve)

    def resume(self) -> int:
        """Load the checkpoint, if there is one; return the index of the next step."""
        if self.averaged is not None:
            note_training(self.averaged.module, self.result.ledger)
        with self.processes.all_succeed():
            stored = self._stored()
        state = self.processes.broadcast_object(stored)
        if state is not None:
            with damage_refused("fit", self.checkpoint):
                self._load(state)
        if self.private_grad.plan.seed is None:
            self._go_on_after_lost_steps()
        self.start = self.private_grad.state_dict()["step"]
        return self.start

    def _go_on_after_lost_steps(self) -> None:
        plan = self.private_grad.plan
        if self.result.ledger.next_step >= plan.steps and self.result.updates == 0:
            got, remedy = f"{plan.steps} charged and none of their results saved", NEW_FOLDER
            if self.private_grad.state_dict()["step"] == plan.steps:
                got = f"all {plan.steps} taken by private_grad before this call"
                remedy = "use the model as it is, or make a plan with more steps, at a higher epsilon"
            elif self.checkpoint is None:
                remedy = "give this training a ledger of its own and add up epsilons and deltas, or use a pg.Budget"
            raise expected("fit", "steps", f"to be left of {plan.steps}", got, remedy, BudgetExceededError)
        skip_lost_steps(self.private_grad, self.result.updates)
        if self.scheduler is not None:
            with warnings.catch_warnings(action="ignore"):  # torch misses the optimizer's steps, which were lost
                step = self.private_grad.state_dict()["step"]
                for _ in range(step - self.scheduler.last_epoch):  # also past earlier calls without a checkpoint
                    self.scheduler.step()

    def update(self, batch: Batch) -> None:
        """Take one private step. Signals wait until its end, so that a checkpoint of it can be written."""
        began = time.perf_counter()
        result = self.result
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

    @property
    def is_consistent(self) -> bool:  # every released gradient has moved the model; False during an update
        return self.private_grad.state_dict()["step"] == self.start + self.made

    def save(self, *, at_least_after: float = 0.0) -> None:
        """Write the checkpoint, atomically, unless the last one is younger than `at_least_after` seconds."""
        is_due = time.monotonic() - self.saved_at >= at_least_after
        if self.checkpoint is None or not self.processes.broadcast_object(is_due):
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
        if self.processes.is_sharded(self.model):
            state = _shard_files().write(state, self.checkpoint, self.processes)
        with self.processes.all_succeed():
            if self.processes.rank == 0:
                write_checkpoint(state, self.checkpoint)
                for folder in self.checkpoint.parent.glob(f"{self.checkpoint.stem}-shards-*"):  # of earlier checkpoints
                    if folder.name != state.get("shards", {}).get("folder"):
                        shutil.rmtree(folder, ignore_errors=True)
        self.saved_at = time.monotonic()

    def save_after(self, error: BaseException) -> None:
        """Write the checkpoint after an exception, if it can be written, and say so in a note of the exception."""
        # An exception in one process may not have reached the others, which would have to gather the state.
        if not self.is_consistent or self.processes.count > 1 or self.checkpoint is None:
            return
        self.save()
        steps = f"{self.start + self.made:,} of {self.private_grad.plan.steps:,} steps"
        error.add_note(f"fit: saved after {steps} in {self.checkpoint.parent}; run the same program again to resume.")

    def finish(self) -> FitResult:
        """Charge what an early stop left, write the last checkpoint, and warn of gradients that were not finite."""
        if self.is_to_stop:
            self.result.stopped = self.result.curve[-1]["step"] < self.private_grad.plan.steps
            charge_unused(self.private_grad)
        self.save()
        if count := self.result.raw_nonfinite_examples:
            told = f"NOT PRIVATE: {count} gradients were not finite and counted as zero; do not publish their number"
            warnings.warn(told, stacklevel=3)
        return self.result

    def _stored(self) -> dict[str, Any] | None:
        """Return the content of the checkpoint in the first process, if there is one, after it was verified."""
        ledger = self.result.ledger
        if self.processes.rank > 0 or self.checkpoint is None:
            return None
        if not self.checkpoint.exists():
            if ledger.releases:
                condition = f"to exist next to its ledger of {ledger.releases} releases"
                raise expected("fit", f"{self.checkpoint}", condition, "a missing file", f"restore it, or {NEW_FOLDER}")
            return None
        with damage_refused("fit", self.checkpoint):
            state = read_checkpoint(self.checkpoint)
            run: dict[str, Any] = {"seed": self.private_grad.plan.seed, "settings": self.settings, "ledger": ledger}
            require_resumable("fit", self.checkpoint, state, version=_CHECKPOINT_VERSION, **run)
            return state

    def _load(self, state: Mapping[str, Any]) -> None:
        """Restore the run from the content of a checkpoint; raise PrivacyError if the model has other shapes."""
        place = self.processes.shard_like
        if "shards" in state and self.checkpoint is not None:
            with self.processes.all_succeed():
                state = _shard_files().read(state, self.checkpoint, self.model, self.processes)
        own = self.model.state_dict()
        shapes = [{f"shape of {n!r}": tuple(held[n].shape) for n in sorted(held)} for held in (state["model"], own)]
        require_same("fit", self.checkpoint, *shapes)
        self.model.load_state_dict(place(state["model"], own))
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        parameters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        held: dict[int, dict[str, Tensor]] = state["optimizer"]["state"]
        of_parameters = {i: place(values, dict.fromkeys(values, parameters[i])) for i, values in held.items()}
        self.optimizer.load_state_dict({**state["optimizer"], "state": of_parameters})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        private = dict(state["private_grad"])
        if "filter" in private:
            states = {n: [place({n: v}, own)[n] for v in values] for n, values in private["filter"]["states"].items()}
            private["filter"] = {**private["filter"], "states": states}
        self.private_grad.load_state_dict(private)
        self.result.curve = [{"step": row["step"], **row} for row in state["curve"]]
        self.result.updates = int(state["updates"])
        self.result.seconds = float(state["seconds"])


def _shard_files() -> Any:
    from privgrad.training import shard_files  # takes as long to import as all else

    return shard_files


@contextmanager
def _signals_wait() -> Generator[None]:
    """Delay SIGINT, SIGTERM and SIGCHLD to the end of the block; a second one of the first two takes effect at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD and any(earlier != signal.SIGCHLD for earlier, _ in waiting):
            raise KeyboardInterrupt
        waiting.append((number, frame))

    delayed = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)  # torch's handler of the last raises if a worker died
    handlers = {number: handler for number in delayed if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, wait)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in waiting:
        handlers[signal.Signals(number)](number, frame)
