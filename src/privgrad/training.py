"""fit(): the training loop, with evaluation, progress, checkpoint and resume."""

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from privgrad.checkpoint import OtherRunError, damage_refused, read_checkpoint, require_resumable, write_checkpoint
from privgrad.errors import (
    BudgetExceededError,
    described,
    expected,
    require_callable,
    require_integer,
    require_nonnegative,
    require_path,
)
from privgrad.gradient.clipping import Clipping
from privgrad.gradient.perturb import Perturbation
from privgrad.gradient.precondition import Preconditioner
from privgrad.gradient.validation import evaluating
from privgrad.ledger import Ledger
from privgrad.optim import PrivateOptimizer
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient, RawStep, require_model
from privgrad.processes import ALONE, Processes, require_told
from privgrad.progress import bars
from privgrad.sampling import Collate
from privgrad.types import Batch, LossFunction

_CHECKPOINT_VERSION = 3
_EPSILON_SECONDS = 5.0  # for so long a shown epsilon is good
Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass
class FitResult:
    """What a run leaves besides the trained model.

    Attributes:
        curve: one row an evaluation: "step" (updates made), "epsilon" (spent by then; None if the plan has no
            delta) and what `evaluate` returned.
        updates: optimizer steps made. Below plan.steps if earlier attempts spent steps whose results were lost.
        seconds: training time, evaluation left out.
        examples_per_second: from the public expected batch size.
        raw_nonfinite_examples: examples of this process whose gradients were not finite and counted as zero. NOT
            private.
        ledger: the record of what was released.
        averaged: a copy of the model with averaged weights, if asked for.
    """

    curve: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    updates: int = 0
    seconds: float = 0.0
    examples_per_second: float = math.nan
    raw_nonfinite_examples: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    averaged: nn.Module | None = None


def fit(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: PrivateOptimizer,
    plan: PrivacyPlan,
    train_set: Dataset[Any] | Sequence[Any],
    *,
    perturb: Perturbation | None = None,
    precondition: Preconditioner | None = None,
    clip: Clipping | None = None,
    engine: Literal["factored", "vmap"] = "factored",
    microbatch_size: int | None = None,
    memory_mb: float | None = None,
    collate: Collate | None = None,
    average: float | None = None,
    evaluate: Evaluate | None = None,
    evaluations: int = 10,
    on_evaluation: Callable[[Mapping[str, Any]], object] | None = None,
    raw_observers: Sequence[Callable[[RawStep], None]] = (),
    folder: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 60.0,
    progress: bool | Progress = True,
    processes: Processes | None = None,
) -> FitResult:
    """Train for the plan's steps; with a folder, durably: run it again after any interruption, and it goes on.

    Args:
        model: trained in place, in the mode it is in.
        loss_fn: (model, examples) -> losses, shape (B,).
        optimizer: from privgrad.optim, over model.named_parameters().
        plan: the public numbers.
        train_set: the private examples; see plan.batches.
        perturb, precondition, clip, engine, microbatch_size, memory_mb: as in PrivateGradient.
        collate: as in plan.batches.
        average: decay, in [0, 1), of an exponential moving average of the weights after each update, which is then
            evaluated in their place and returned beside the model; 0.999 averages about the last thousand. After t
            updates at most (1 + t) / (10 + t), so that the first weights are soon forgotten. None: no average.
        evaluate: model -> numbers by name, called in evaluation mode; tried once before anything is spent. Give it
            public or held-out data: what it returns is published as it is.
        evaluations: how many times to evaluate, evenly spread, the last after the last step.
        on_evaluation: called with each new row of the curve, in the first process: integrations.tensorboard, say.
        raw_observers: functions that are given each step before its noise; see diagnostics. NOT private.
        folder: where ledger.jsonl and checkpoint.pt live; None keeps nothing.
        checkpoint_seconds: at most this much training is lost by a killed process (an exception loses none, unless in
            several processes). What was released and lost stays charged; the run then ends with fewer updates, and
            says so. Under a research seed lost steps are computed again, identically, and cost nothing again.
        progress: show a progress bar on standard error; or the bars (privgrad.progress) to put it under.
        processes: that train together; see integrations.distributed. Each calls fit alike, `evaluate` included. The
            first keeps ledger and checkpoint, with whole tensors: another number of processes may go on from them.
            Under a research seed, if steps were lost, only the same number: they have to come out the same.
    Returns:
        FitResult.
    Raises:
        PrivacyError: bad input, or a folder whose files are damaged or belong to another run.
        BudgetExceededError: every step is spent, and nothing that came of them was saved.
    Privacy:
        As PrivateGradient; the checkpoint holds the model, the optimizer and the curve: post-processing, no keys.
        If `evaluate` returns raw_ numbers (RawRecorder), the curve and the checkpoint hold them: do not publish these.
    """
    require_integer("fit", "evaluations", evaluations, 0)
    require_model("fit", model)
    for name, value in (("evaluate", evaluate), ("on_evaluation", on_evaluation)):
        if value is not None:
            require_callable("fit", name, value, "give a function, or leave it out")
    observers = raw_observers if isinstance(raw_observers, Sequence) else [raw_observers]  # pyright: ignore[reportUnnecessaryIsInstance]
    for observer in observers:
        require_callable("fit", "each of raw_observers", observer, "give a list of functions of a RawStep")
    if folder is not None:
        require_path("fit", "folder", folder, "give a folder's path, or leave it out to keep nothing")
        if Path(folder).exists() and not Path(folder).is_dir():
            raise expected("fit", "folder", "to be a folder", f"{folder}, which is a file", "give a folder's path")
    if checkpoint_seconds != math.inf:
        require_nonnegative("fit", "checkpoint_seconds", checkpoint_seconds, "60 is usual")
    if average is not None and not (isinstance(average, int | float) and 0 <= average < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise expected(
            "fit", "average", "to be in [0, 1)", described(average), "0.999 is usual for a thousand steps or more"
        )
    if not isinstance(optimizer, PrivateOptimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        got, remedy = type(optimizer).__name__, "take one of privgrad.optim, or write the loop and use grad.assign"
        raise expected("fit", "optimizer", "to be one for released gradients", got, remedy)
    own, updated = set(model.parameters()), {p for group in optimizer.param_groups for p in group["params"]}
    if not updated <= own:
        remedy = "make it from the same model's named_parameters()"
        raise expected("fit", "optimizer", "to update the model that is trained", "parameters of another", remedy)
    processes = ALONE if processes is None else processes
    require_told("fit", processes)
    checkpoint = None if folder is None else Path(folder) / "checkpoint.pt"
    ledger = _ledger_beside(checkpoint) if checkpoint is not None and processes.rank == 0 else Ledger()
    try:
        private_grad = PrivateGradient(
            model,
            loss_fn,
            plan,
            perturb=perturb,
            precondition=precondition,
            clip=clip,
            engine=engine,
            microbatch_size=microbatch_size,
            memory_mb=memory_mb,
            ledger=ledger,
            processes=processes,
        )
        settings = {
            "perturb": "None" if perturb is None else perturb.described(plan.steps),
            "precondition": repr(precondition),
            "clip": repr(clip),
            "optimizer": type(optimizer).__name__,
            "options": repr(optimizer.defaults),
            "average": repr(average),
        }
        averaged = None
        if average is not None:
            if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
                remedy = "train without it, or give whole models to Distributed"
                raise expected("fit", "average", "to be of a whole model", "a sharded one", remedy)
            averaged = AveragedModel(model, avg_fn=partial(_averaged, average))
        result = FitResult(ledger=ledger, averaged=None if averaged is None else averaged.module)
        private_grad.raw_observers += raw_observers
        run = _Run(model, averaged, optimizer, private_grad, result, checkpoint, settings, processes)
        evaluated = model if result.averaged is None else result.averaged
        if evaluate is not None:
            _evaluate(evaluated, evaluate, private_grad, 0)
        start = run.resume()
        batches = plan.batches(train_set, start=start, collate=collate, processes=processes)
        evaluate_at = {round(plan.steps * (k + 1) / evaluations) for k in range(evaluations)}

        def evaluate_if_due(step: int) -> None:
            missing = all(row["step"] != step for row in run.result.curve)
            if evaluate is not None and step in evaluate_at and missing:
                run.result.curve.append(_evaluate(evaluated, evaluate, private_grad, step))
                if on_evaluation is not None and processes.rank == 0:
                    on_evaluation(run.result.curve[-1])

        try:
            with _progress_bar(private_grad, start, progress if processes.rank == 0 else False) as advance:
                evaluate_if_due(start)  # an evaluation that an interruption cut short
                for batch in batches:
                    run.update(batch)
                    evaluate_if_due(batch.sampling.step + 1)
                    advance(run.result)
                    run.save(at_least_after=checkpoint_seconds)
        except BaseException:
            # What has reached one process may not have reached the others, who would have to gather the state.
            if run.is_consistent and processes.count == 1:
                run.save()
            raise
        run.save()
        return run.result
    finally:
        ledger.close()


def _ledger_beside(checkpoint: Path) -> Ledger:
    path = checkpoint.with_name("ledger.jsonl")
    if checkpoint.exists() and not path.exists():
        remedy = "put it back, or train in a new folder and add the two epsilons up"
        raise expected("fit", f"{path}", "beside its checkpoint", "no such file", remedy)
    return Ledger(path)


@dataclass
class _Run:
    """The parts of a run that a checkpoint keeps together."""

    model: nn.Module
    averaged: AveragedModel | None
    optimizer: PrivateOptimizer
    private_grad: PrivateGradient
    result: FitResult
    checkpoint: Path | None
    settings: dict[str, str]
    processes: Processes
    saved_at: float = 0.0
    start: int = 0
    made: int = 0

    def resume(self) -> int:
        """Load the checkpoint, or make the first one; return the first step to do."""
        state = self.processes.broadcast_object(self.processes.run_on_all(self._stored))
        if state is not None:
            with damage_refused("fit", self.checkpoint):
                self._load(state)
        if self.private_grad.plan.seed is None:
            self._go_on_after_lost_steps(self.processes.broadcast_object(self.result.ledger.releases))
        self.start = self.private_grad.state_dict()["step"]
        self.save()
        return self.start

    def _go_on_after_lost_steps(self, spent: int) -> None:
        """Steps that were released and then lost are spent; without a seed they cannot be drawn again."""
        plan = self.private_grad.plan
        lost = spent - self.private_grad.state_dict()["step"]
        if spent >= plan.steps and self.result.updates == 0:
            got = f"{spent} charged and none of their results saved"
            remedy = "train in a new folder and add the two epsilons up"
            raise expected("fit", "steps", f"to be left of {plan.steps}", got, remedy, BudgetExceededError)
        if lost > 0:
            warnings.warn(
                f"{lost} charged steps had no checkpoint, and stay spent: this run ends with "
                f"{self.result.updates + max(0, plan.steps - spent)} updates of {plan.steps}",
                stacklevel=4,
            )
        self.private_grad.load_state_dict(self.private_grad.state_dict() | {"step": spent})

    def update(self, batch: Batch) -> None:
        """One private step, whole: a signal in its midst would leave nothing that could be saved."""
        began, result = time.perf_counter(), self.result
        with _signals_wait():
            self.optimizer.step(grad=self.private_grad(batch))
            if self.averaged is not None:
                self.averaged.update_parameters(self.model)
            self.made += 1
            result.updates += 1
            result.seconds += time.perf_counter() - began
        result.raw_nonfinite_examples = self.private_grad.raw_nonfinite_examples
        self._measure_speed()

    def _measure_speed(self) -> None:
        if self.result.seconds > 0:
            examples = self.result.updates * self.private_grad.plan.expected_batch_size
            self.result.examples_per_second = examples / self.result.seconds

    @property
    def is_consistent(self) -> bool:
        """Whether every released gradient has also moved the model: not so amid an update."""
        return self.private_grad.state_dict()["step"] == self.start + self.made

    def save(self, *, at_least_after: float = 0.0) -> None:
        """Write the checkpoint, atomically, unless the last one is younger than that many seconds."""
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

    def _stored(self) -> dict[str, Any] | None:
        """What the first process finds in the checkpoint, if there is one: checked to be of this run, and whole."""
        ledger = self.result.ledger
        if self.processes.rank > 0 or self.checkpoint is None:
            return None
        if not self.checkpoint.exists():
            if ledger.releases:
                condition, remedy = f"beside its ledger of {ledger.releases} releases", "restore it, or"
                remedy += " train in a new folder and add the two epsilons up"
                raise expected("fit", f"{self.checkpoint}", condition, "no such file", remedy)
            return None
        with damage_refused("fit", self.checkpoint):
            state = read_checkpoint(self.checkpoint)
            seed, settings = self.private_grad.plan.seed, self.settings
            require_resumable(state, version=_CHECKPOINT_VERSION, seed=seed, settings=settings, ledger=ledger)
            return state
        return None

    def _load(self, state: Mapping[str, Any]) -> None:
        place, optimizer = self.processes.shard_like, state["optimizer"]
        own = self.model.state_dict()
        for name in sorted(own.keys() | state["model"].keys()):
            shapes = [tuple(held[name].shape) if name in held else None for held in (state["model"], own)]
            if shapes[0] != shapes[1]:
                raise OtherRunError(f"model with {name} of shape {shapes[0]}, now {shapes[1]}")
        self.model.load_state_dict(place(state["model"], own))
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        parameters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        held: dict[int, dict[str, Tensor]] = optimizer["state"]
        of_parameters = {i: place(own, dict.fromkeys(own, parameters[i])) for i, own in held.items()}
        self.optimizer.load_state_dict({**optimizer, "state": of_parameters})
        self.private_grad.load_state_dict(state["private_grad"])
        self.result.curve = [{"step": row["step"], **row} for row in state["curve"]]
        self.result.updates = int(state["updates"])
        self.result.seconds = float(state["seconds"])
        self._measure_speed()


def _averaged(decay: float, averaged: Tensor, weight: Tensor, updates: Tensor | int) -> Tensor:
    made = int(updates)
    return averaged.lerp(weight, 1 - min(decay, (1 + made) / (10 + made)))


@contextmanager
def _signals_wait() -> Generator[None]:
    """SIGINT and SIGTERM take effect after the block; a second one at once."""
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


def _evaluate(model: nn.Module, evaluate: Evaluate, private_grad: PrivateGradient, step: int) -> dict[str, Any]:
    with evaluating(model), torch.no_grad():
        measured = evaluate(model)
    if not isinstance(measured, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        got = type(measured).__name__
        raise expected("fit", "evaluate", "to return numbers by name", got, 'return {"accuracy": ...}, say')
    # Plain numbers: a checkpoint holds neither numpy's nor tensors of one.
    plain: dict[str, Any] = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in measured.items()
    }
    epsilon = None if private_grad.plan.delta is None else private_grad.epsilon(steps=step)
    return {"step": step, "epsilon": epsilon, **plain}


@contextmanager
def _progress_bar(
    private_grad: PrivateGradient, start: int, progress: bool | Progress
) -> Generator[Callable[[FitResult], None]]:
    """A bar of its own, or one task more among others': epsilon, speed, and the last evaluation's first number."""
    plan = private_grad.plan
    bar = progress if isinstance(progress, Progress) else bars(shown=progress)
    of_users = plan.privacy_unit == "user"
    task = bar.add_task("rounds" if of_users else "steps", total=plan.steps, completed=start, note="")
    live = bar.console.is_terminal and not bar.disable and plan.delta is not None
    spent: float | None = None
    began, step, covered = time.monotonic(), start, start

    def advance(result: FitResult) -> None:
        nonlocal spent, step, covered
        step += 1
        last: dict[str, Any] = result.curve[-1] if result.curve else {}
        if live and step > covered:
            # An accountant takes its time: epsilon of where the training will be in a while, and so an upper bound.
            pace = (step - start) / (time.monotonic() - began)
            covered = min(plan.steps, step + int(_EPSILON_SECONDS * pace))
            spent = private_grad.epsilon(steps=covered)
        elif not live and last.get("step") == step:
            spent = last["epsilon"]
        # Rounded up, never down.
        told = "" if spent is None else f"ε ≤ {math.ceil(100 * spent) / 100:.2f}  " if spent < math.inf else "no ε  "
        numbers = (f"  {k} {v:.3g}" for k, v in last.items() if k not in ("step", "epsilon") and isinstance(v, float))
        rate = f"{result.examples_per_second:,.0f} {'users' if of_users else 'examples'}/s"
        bar.update(task, advance=1, note=f"{told}{rate}{next(numbers, '')}")

    try:
        with nullcontext() if bar is progress else bar:
            yield advance
    finally:
        if bar is progress:
            bar.remove_task(task)
