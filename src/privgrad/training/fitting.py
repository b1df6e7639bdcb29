"""fit(): a training loop with evaluation, progress, checkpoints and resume. It adds nothing to the privacy cost."""

import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from privgrad.accounting.accountant import two_decimals_up
from privgrad.errors import expected, require_callable, require_in, require_integer
from privgrad.gradient.functional import evaluating
from privgrad.optim import PrivateOptimizer
from privgrad.optim.contrib import require_separate
from privgrad.private_gradient import PrivateGradient
from privgrad.progress import bars, note
from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.datasets import ask_about_rows
from privgrad.sampling.loading import Collate
from privgrad.training.checkpoint import NEW_FOLDER, settings_of
from privgrad.training.run import EarlyStopping, FitResult, TrainingRun, require_optimizer
from privgrad.training.schedule import Decay, Schedule

_EPSILON_SECONDS = 5.0  # the progress bar computes epsilon once in this time
Evaluate = Callable[[nn.Module], Mapping[str, float]]


def fit(
    private_grad: PrivateGradient,
    optimizer: PrivateOptimizer,
    train_set: Dataset[Any] | Sequence[Any],
    *,
    scheduler: LRScheduler | Schedule | Decay | None = None,
    collate: Collate | None = None,
    ema_decay: float | None = None,
    evaluate: Evaluate | None = None,
    num_evaluations: int = 10,
    on_evaluate: Callable[[Mapping[str, Any]], object] | None = None,
    stop: EarlyStopping | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    save_seconds: float = 60.0,
    progress: bool | Progress = True,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    pin_memory: bool = False,
    rows: range | None = None,
) -> FitResult:
    """Train for the plan's steps; with `output_dir`, run it again after any interruption, and it resumes.

    Args:
        private_grad: holds the model, which is trained in place, the loss, the plan and the ledger. With several
            processes (see training.distributed) each calls `fit` alike, with the same arguments.
        optimizer: from privgrad.optim, over the model's named_parameters().
        train_set: the private examples; see plan.batches.
        scheduler: a Schedule, or its decay alone: "linear", say. Or any torch scheduler of `optimizer` that is stepped
            without a metric: OneCycleLR(optimizer, max_lr=..., total_steps=plan.steps), say. It is stepped once per
            step. None keeps the learning rate.
        collate: as in plan.batches.
        ema_decay: decay, in [0, 1), of an exponential moving average of the weights after each update. The average is
            evaluated in their place and returned with the model; 0.999 averages about the last thousand. After t
            updates the decay is at most (1 + t) / (10 + t), so that the first weights are soon forgotten. None: no
            average.
        evaluate: model -> numbers by name, called in evaluation mode; tried once before anything is spent. Give it
            public or held-out data: its numbers are published as they are. Those of the first process count.
        num_evaluations: how many times to evaluate, evenly spread, the last after the last step.
        on_evaluate: called with each new row of the curve, in the first process: integrations.tensorboard, say.
        stop: an EarlyStopping, which ends the training once a number of `evaluate` has stopped improving. The unused
            steps are charged too.
        output_dir: the folder of checkpoint.pt, and of ledger.jsonl unless `private_grad` records in a file already.
            None saves nothing.
        save_seconds: a killed process loses at most this much training. An exception inside an update (in a hook of the
            optimizer, or in the scheduler) loses as much; any other exception loses none in a single process. Steps
            that were released and lost stay charged. The run then ends with fewer updates, and warns. Under a
            research seed, lost steps are computed again, identically, and cost nothing again.
        progress: show a progress bar and notes on standard error; or the bars (privgrad.progress) to add it to.
        num_workers: as in plan.batches, like the next two.
        prefetch_factor: as in plan.batches.
        pin_memory: as in plan.batches.
        rows: as in plan.batches, for data in parts.
    Returns:
        FitResult.
    Raises:
        PrivacyError: bad input, or a folder whose files are damaged or belong to another run.
        BudgetExceededError: every step is spent, and none of the results was saved.
    Privacy:
        As PrivateGradient. The checkpoint holds the model, the optimizer, the scheduler and the curve: post-processing,
        no keys. If `evaluate` returns raw_ numbers (RawRecorder), the curve and the checkpoint hold them: do not
        publish these.

    A model that is in evaluation mode as a whole is put into training mode. Layers that are in evaluation mode by
    themselves, as frozen ones may be, stay so.

    The first process writes ledger and checkpoint. Of a sharded model, each process writes its shards to a folder next
    to these. Another number of processes can resume. Under a research seed, if steps were lost, only the same number
    can: the lost steps must be computed identically.
    """
    model, plan, processes = private_grad.model, private_grad.plan, private_grad.processes
    optimizer = require_optimizer("fit", private_grad, optimizer)
    require_separate("fit", train_set, optimizer, private_grad.precondition)
    ask_about_rows(train_set, plan.num_examples, plan.privacy_unit)
    scheduler = _scheduler_of(scheduler, optimizer, plan.steps)
    if on_evaluate is not None:
        require_callable("fit", "on_evaluate", on_evaluate)
    require_integer("fit", "num_evaluations", num_evaluations, 0)
    if not save_seconds >= 0:  # NaN would never save
        raise expected("fit", "save_seconds", "to be >= 0", save_seconds)
    averaged = None if ema_decay is None else _average_of(model, ema_decay)
    checkpoint = None if output_dir is None else Path(output_dir) / "checkpoint.pt"
    settings = private_grad.settings | {  # a run that resumes must share these
        **settings_of("optimizer", optimizer, optimizer.settings),
        **settings_of("scheduler", scheduler, {} if scheduler is None else scheduler.state_dict()),
        "ema_decay": repr(None if ema_decay is None else float(ema_decay)),
        **({"class rates": repr(train_set.rates)} if isinstance(train_set, ClassRates) else {}),
    }
    given = {"output_dir": output_dir, "evaluate": evaluate}
    own = {name: "None" if value is None else "given" for name, value in given.items()}
    own |= {"num_evaluations": repr(num_evaluations), "stop": repr(stop), **settings}
    first = processes.broadcast_object(own)
    with processes.all_succeed():
        for name in (name for name in {**first, **own} if first.get(name) != own.get(name)):
            condition = f"to be the same in all processes ({first.get(name)})"
            raise expected("fit", name, condition, own.get(name), "call fit with the same arguments in each")
    with _recording_beside(private_grad, checkpoint):
        result = FitResult(ledger=private_grad.ledger, averaged=None if averaged is None else averaged.module)
        if not model.training:
            model.train()
        run = TrainingRun(private_grad, averaged, optimizer, scheduler, stop, result, checkpoint, settings)
        evaluated = model if result.averaged is None else result.averaged
        evaluations = _Evaluations(private_grad, evaluated, evaluate, num_evaluations, on_evaluate)
        tried = None if evaluate is None else evaluations.row(0)  # a mistake must show before a step is paid for
        if stop is not None:
            stop.require(tried)
        start = run.resume()
        batches = plan.batches(
            train_set,
            start=start,
            collate=collate,
            processes=processes,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            epoch_key=private_grad.ledger.epoch_key,
            rows=rows,
        )
        run.save()  # after all refusals: a later call must warn of lost steps again
        try:
            shown = progress if processes.rank == 0 else False
            with closing(batches), _progress_bar(private_grad, start, shown) as advance:
                if not run.is_to_stop:
                    evaluations.add_if_due(result, start)  # an evaluation that an interruption cut short
                while not run.is_to_stop and (batch := next(batches, None)) is not None:
                    run.update(batch)
                    evaluations.add_if_due(result, batch.sampling.step + 1)
                    advance(result)
                    run.save(at_least_after=save_seconds)
        except BaseException as error:
            run.save_after(error)
            raise
        return run.finish()


@dataclass
class _Evaluations:
    """The evaluations of one training, spread evenly, the last after the last step."""

    private_grad: PrivateGradient
    model: nn.Module
    evaluate: Evaluate | None
    count: int
    on_evaluate: Callable[[Mapping[str, Any]], object] | None

    def __post_init__(self) -> None:
        self.due = {round(self.private_grad.plan.steps * (k + 1) / self.count) for k in range(self.count)}

    def add_if_due(self, result: FitResult, step: int) -> None:
        """Add a row to the curve after `step` steps, unless none is due or a resumed curve has it."""
        if self.evaluate is None or step not in self.due or any(row["step"] == step for row in result.curve):
            return
        result.curve.append(self.row(step))
        if self.on_evaluate is not None and self.private_grad.processes.rank == 0:
            self.on_evaluate(result.curve[-1])

    def row(self, step: int) -> dict[str, Any]:
        """Return one row of the curve: the step, the epsilon spent, and the numbers that `evaluate` returns."""
        assert self.evaluate is not None
        with evaluating(self.model), torch.no_grad():
            numbers: Mapping[str, Any] = self.evaluate(self.model)
        if own := sorted({"step", "epsilon"} & numbers.keys()):
            raise expected("fit", "evaluate", "to return other names than step and epsilon", ", ".join(own))
        row: dict[str, Any] = {"step": step, "epsilon": _spent(self.private_grad, step)}
        for name, value in numbers.items():
            # A checkpoint can hold plain numbers, but no numpy numbers, and JSON no tensors either.
            is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
            row[name] = value.item() if is_number else value
        return self.private_grad.processes.broadcast_object(row)  # all must stop at the same step


def _spent(private_grad: PrivateGradient, steps: int) -> float | None:
    """Return the epsilon of a number of steps; None without a delta, or for batches that no accountant covers."""
    plan = private_grad.plan
    return private_grad.epsilon(steps=steps) if plan.delta is not None else None


def _scheduler_of(
    scheduler: LRScheduler | Schedule | Decay | None, optimizer: PrivateOptimizer, steps: int
) -> LRScheduler | None:
    """Return the scheduler of a training; raise PrivacyError unless it can be stepped after every step of the plan."""
    if scheduler is None:
        return None
    if isinstance(scheduler, str | Schedule):
        return (Schedule(scheduler) if isinstance(scheduler, str) else scheduler).of(optimizer, steps)
    if isinstance(scheduler, ReduceLROnPlateau):
        remedy = "give one without a metric, such as CosineAnnealingLR(optimizer, T_max=plan.steps), or write the loop"
        raise expected("fit", "scheduler", "to need no metric", "ReduceLROnPlateau", remedy)
    if scheduler.optimizer is not optimizer:
        got = f"the scheduler of a different {type(scheduler.optimizer).__name__}"
        raise expected("fit", "scheduler", "to be of the same optimizer", got)
    lasts = getattr(scheduler, "total_steps", steps)  # OneCycleLR raises after so many steps
    if lasts < steps - 1:
        condition, remedy = f"to last for all {steps} steps", "give it total_steps=plan.steps"
        raise expected("fit", "scheduler", condition, f"total_steps = {lasts}", remedy)
    return scheduler


def _average_of(model: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of the model that will hold the moving average of its weights."""
    require_in("fit", "ema_decay", decay, "[0, 1)", "0.999 is usual for long trainings")
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        remedy = "train without it, or give whole models to Distributed"
        raise expected("fit", "ema_decay", "to be of a whole model", "a sharded model", remedy)

    def averaged(average: Tensor, weight: Tensor, updates: Tensor | int) -> Tensor:
        made = int(updates)
        return average.lerp(weight, 1 - min(decay, (1 + made) / (10 + made)))

    return AveragedModel(model, avg_fn=averaged)


@contextmanager
def _recording_beside(private_grad: PrivateGradient, checkpoint: Path | None) -> Generator[None]:
    """Record in ledger.jsonl, next to the checkpoint, during the block, unless another file is chosen or open."""
    # All attempts have this one ledger, so that none of their releases is forgotten. Only the first process has a file.
    ledger, opens = private_grad.ledger, False
    if checkpoint is not None:
        path = checkpoint.with_name("ledger.jsonl").absolute()
        with private_grad.processes.all_succeed():  # if the first process refuses a file, the others must not wait
            opens = private_grad.processes.rank == 0 and ledger.path in (None, path) and not ledger.is_open
            if opens and checkpoint.exists() and not path.exists():
                remedy = f"put it back, or {NEW_FOLDER}"
                raise expected("fit", f"{path}", "to exist next to its checkpoint", "a missing file", remedy)
            if opens:
                private_grad.record_in(path)
    try:
        private_grad.ledger.follow_first(private_grad.processes)
        yield
    finally:
        if opens:
            private_grad.ledger.close()


@contextmanager
def _progress_bar(
    private_grad: PrivateGradient, start: int, progress: bool | Progress
) -> Generator[Callable[[FitResult], None]]:
    """Show a progress bar, or a task in a given one: epsilon, speed and the first number of the last evaluation."""
    plan, bar = private_grad.plan, bars(shown=progress)
    unit = "people" if plan.privacy_unit == "user" else "examples"
    task = bar.add_task("steps", total=plan.steps, completed=start, note="")
    live = bar.console.is_terminal and not bar.disable
    spent: float | None = None
    began, step, covered, warned = time.monotonic(), start, start, False

    def advance(result: FitResult) -> None:
        nonlocal spent, step, covered, warned
        step += 1
        if result.raw_nonfinite_examples and not warned:
            warned = True
            note(bar, f"NOT PRIVATE: gradients of step {step:,} are not finite (NaN or inf) and count as zero")
        last: dict[str, Any] = result.curve[-1] if result.curve else {}
        if live and step > covered:
            # Accounting takes time. This computes the epsilon of a later step, which is an upper bound for now.
            pace = (step - start) / (time.monotonic() - began)
            covered = min(plan.steps, step + int(_EPSILON_SECONDS * pace))
            spent = _spent(private_grad, covered)
        elif not live and last.get("step") == step:
            spent = last["epsilon"]
        cost = _epsilon_note(private_grad, spent)
        rate = f"{result.examples_per_second:,.0f} {unit}/s"
        numbers = (f"{k} {v:.3g}" for k, v in last.items() if k not in ("step", "epsilon") and isinstance(v, float))
        # A line has 80 columns. The words about a simulation take the room of the speed.
        parts = (cost, "" if "simulates" in cost else rate, next(numbers, ""))
        bar.update(task, advance=1, note="  ".join(filter(None, parts)))

    done = f"{start:,} of {plan.steps:,} steps"
    if 0 < start < plan.steps:
        note(bar, f"resuming after {done}")
    elif start and bar is not progress:  # a comparison says by itself what is complete
        note(bar, f"already complete: {done}")
    try:
        with nullcontext() if bar is progress else bar:
            yield advance
    finally:
        if bar is progress:
            bar.remove_task(task)


def _epsilon_note(private_grad: PrivateGradient, spent: float | None) -> str:
    """Return the epsilon spent, for the progress bar; rounded up, never down."""
    if spent is None:
        return ""
    if spent < math.inf:
        return f"ε ≤ {two_decimals_up(spent)}"
    simulated = private_grad.simulated_epsilon
    if simulated is None or math.isinf(simulated):
        return "no ε"
    return f"ε = ∞ (simulates {two_decimals_up(simulated)})"
