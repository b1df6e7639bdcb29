"""Run the trainings of a Spec and record each as one JSON line; an interrupted comparison resumes where it stopped.

`privgrad train` and `compare` call it. `papers` calls `compare`, and the functions for folders and records.

The privacy guarantee rests on `fit`. In this file it rests on `_train_one` only: model and optimizer may use private
examples through `fit` alone. No epsilon covers a choice by training loss.
"""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from torch import nn

from privgrad.data import DataSet
from privgrad.diagnostics import RawRecorder
from privgrad.errors import expected
from privgrad.experiments.build import make_data, require_model
from privgrad.experiments.featuring import own, save_head
from privgrad.experiments.folder import Record, append, claim, describe, make_secret, read_records, require_same
from privgrad.experiments.measures import constants, measure, outcomes, unit_scores
from privgrad.experiments.metrics import interval, metrics_of
from privgrad.experiments.one_training import Phase, Prepared, Run, facts_of, find_record, prepare, rows_are_units
from privgrad.experiments.records import FEW_CLIPPED, rate_text
from privgrad.experiments.sources import sizes_text
from privgrad.experiments.spec import Candidate, MethodTable, Spec
from privgrad.experiments.tuner import at_rate, best_candidate, beyond_edge, candidate_of, measurement_of, wider
from privgrad.heads.head import privacy_of
from privgrad.private_gradient import RawStep
from privgrad.progress import bars, note
from privgrad.training import fit
from privgrad.training_run import FitResult

if TYPE_CHECKING:
    from privgrad.integrations.tensorboard import TensorBoard


def train(spec: Spec, out: Path, *, seed: int | None = None, progress: bool | Progress = True) -> list[Record]:
    """Train the only method of a spec; by default the noise comes from the operating system's entropy.

    `privgrad train` calls it.

    Args:
        spec: a spec with exactly one method that has one lr and one clipping norm.
        out: folder for the ledger, the checkpoint and runs.jsonl. A second call resumes an interrupted training.
        seed: a research seed, or None.
        progress: show a progress bar; or `notes_only()`, to say only where a training resumes.
    Returns:
        One record, which is also written to out/runs.jsonl.
    Raises:
        PrivacyError: the spec has several methods, a grid or a total epsilon, or `out` holds runs of another spec or
            seed.
    Privacy:
        `fit` charges each release to the run's ledger. The measurements in the record are NOT private for the examples
        that they are measured on.
    """
    if (total := spec.privacy.total_epsilon) is not None:
        remedy = "run `privgrad compare`, which spends it on tuning and training; or give target_epsilon in its place"
        raise expected("train", "privacy.total_epsilon", "to be absent", total, remedy)
    if len(spec.methods) != 1 or spec.is_tuned(spec.methods[0]):
        remedy = "keep one in the file, or run `privgrad compare`"
        got = [method.name for method in spec.methods]
        raise expected("train", "methods", "to be exactly one, with one lr and one max_grad_norm", got, remedy)
    run = Run(spec.methods[0], spec.grid(spec.methods[0])[0], seed, "final")
    require_same(out, describe(spec))
    others = {record["seed"] for record in read_records(out)} - {seed}
    if others:
        remedy = "choose another --out: each seed is an experiment of its own"
        raise expected("train", f"{out}", f"to hold runs of seed {seed}", f"seed {others.pop()}", remedy)
    data = open_folder(spec, out)
    if find_record(read_records(out), run) is None:
        append(out, [_train_one(spec, run, data, out, progress=progress)])
    else:
        note(bars(shown=progress), f"already complete: the training in {out}; a new one needs another folder")
    return read_records(out)


def compare(spec: Spec, out: Path, *, progress: bool | Progress = True) -> list[Record]:
    """Train every method under one budget: tune each method, then train it with every seed.

    Tuning compares candidates by validation score or loss, or by training loss (see TuningTable). With
    `tuning.noise_steps`, all private methods are tuned over one grid, with the same number of trainings (see
    `tuner.wider`). Each training has its own ledger; metadata_of adds up the cost of all.

    `privgrad compare` and `papers.reproduce` call it.

    Args:
        spec: the methods, the grids and the seeds.
        out: as in train.
        progress: show the number of the current run, and the progress of that run; or as in train.
    Returns:
        All records in the order of their runs; they are also written to out/runs.jsonl.
    Raises:
        PrivacyError: the data or the model do not suit the spec, or `out` holds runs of another spec or of `train`.
    """
    data, tuning = open_folder(spec, out), spec.tuning
    if any(record["seed"] is None for record in read_records(out)):
        remedy = "choose another --out: a comparison has research seeds, and would mix with the private run"
        raise expected("compare", f"{out}", "to hold runs of a comparison", "a run of `privgrad train`", remedy)
    if tuning is not None and tuning.by == "accuracy" and data.score is None:
        got = "'accuracy' of data without a score"
        raise expected("compare", "tuning.by", "to be measured", got, 'set by = "loss"')
    seeds, by, extend = (tuning.seeds, tuning.by, tuning.extend) if tuning else ([], "accuracy", False)
    tuned = [method for method in spec.methods if spec.is_tuned(method)]
    fair = [method for method in tuned if spec.shares_grid(method)]
    tried: set[tuple[str, Candidate]] = set()
    with bars(shown=progress) as bar:
        planned = sum(len(spec.grid(method)) for method in tuned) * len(seeds)
        task = bar.add_task("runs", total=planned + len(spec.methods) * len(spec.run.seeds), note="")
        if done := len(read_records(out)):
            note(bar, f"already complete: {done:,} trainings in {out}")

        def do(method: MethodTable, candidate: Candidate, seeds: Sequence[int], phase: Phase) -> None:
            tried.add((method.name, candidate))
            for run in (Run(method, candidate, seed, phase) for seed in seeds):
                bar.update(task, note=f"{phase}  {method.name}  {rate_text(candidate)}  seed {run.seed}")
                if find_record(read_records(out), run) is None:
                    record = _tuned_already(spec, run, out) or _train_one(spec, run, data, out, progress=bar)
                    append(out, [record | {"tuned_by": measurement_of(by) if tuning else None}])
                bar.advance(task)

        def seen() -> list[Record]:
            """Return the records that an uninterrupted comparison has here, so that a resumed one chooses alike."""
            return [record for record in read_records(out) if (record["method"], candidate_of(record)) in tried]

        def tune(method: MethodTable, candidates: Iterable[Candidate], *, more: bool = False) -> None:
            for candidate in candidates:
                if more:  # than the bar has planned
                    bar.update(task, total=(bar.tasks[task].total or 0) + len(seeds))
                do(method, candidate, seeds, "tuning")

        for method in fair:
            tune(method, spec.grid(method))
        names = [method.name for method in fair]
        while fair and extend and (rates := wider(seen(), names, by)) is not None:
            for method in fair:
                tune(method, dict.fromkeys(at_rate(c, rates[method.name]) for c in spec.grid(method)), more=True)
        for method in spec.methods:
            if method in tuned and method not in fair:
                tune(method, spec.grid(method))
                grows = extend and not method.has_fixed_rate
                while grows and (candidate := beyond_edge(seen(), method.name, by)) is not None:
                    tune(method, [candidate], more=True)
            best = best_candidate(seen(), method.name, by) if method in tuned else spec.grid(method)[0]
            do(method, best, spec.run.seeds, "final")
    return read_records(out)


def _train_one(spec: Spec, run: Run, data: DataSet, out: Path, *, progress: bool | Progress) -> Record:
    """Do one run with `fit`, in its own folder, and return its record."""
    folder = out / "runs" / run.name
    spec, data = own(spec, run.method, data)
    made = prepare(spec, run, data)
    plan, private_grad, optimizer = made.plan, made.private_grad, made.optimizer
    by_train_loss = spec.tuning is not None and spec.tuning.by == "train_loss"
    validated = run.phase == "tuning" and not by_train_loss
    # If tuning uses the training loss, a tuning run may later serve as a final run: it needs the diagnostics too.
    recorder = RawRecorder(optimizer) if spec.run.diagnose and not validated else None
    board = _tensorboard(folder, data) if spec.run.tensorboard else None
    clipped = _ClipFraction(plan.steps)

    def evaluate(model: nn.Module) -> dict[str, Any]:
        measured = measure(model, data.validation if validated else data.test, data)
        raw = {name: value for name, value in measured.items() if name.startswith("raw_")}
        raw |= {} if recorder is None else recorder.row()
        if raw and plan.seed is None:  # a private run keeps what was computed before the noise apart
            _append_raw(out, run, {"step": private_grad.ledger.releases} | raw)
            return {name: value for name, value in measured.items() if name not in raw}
        return measured | raw

    if recorder is not None:
        private_grad.register_raw_observer(recorder.observe)
    if plan.seed is not None and not run.method.non_private:
        private_grad.register_raw_observer(clipped.observe)
    with rows_are_units(plan.privacy_unit):
        result = fit(
            private_grad,
            optimizer,
            data.train,
            scheduler=spec.schedule_of(run.method),
            evaluate=evaluate,
            num_evaluations=spec.run.num_evaluations,
            on_evaluate=board,
            ema_decay=spec.run.ema_decay,
            output_dir=folder,
            progress=progress,
        )
    if board is not None:
        board.close()
    _warn_of_raw(run, clipped.fraction)
    record = _record(spec, run, made, data, result, clipped.fraction, validated=validated)
    if plan.seed is None and data.score is not None and not validated:
        record["test_interval"] = interval(unit_scores(result.averaged or made.model, data.test, data))
    record |= _metrics(spec, result.averaged or made.model, data, record, validated=validated)
    if run.phase == "final":
        record["head"] = save_head(
            result.averaged or made.model, data, folder / "head", privacy_of(plan, result.ledger), result
        )
    if by_train_loss and plan.seed is not None:  # not private; only a comparison, which has seeds, tunes by it
        record["raw_train_loss"] = float(outcomes(result.averaged or made.model, data.train, data)[0].mean())
    return record


def _warn_of_raw(run: Run, clip_fraction: float | None) -> None:
    """Warn of a share that was counted before the noise. NOT private: a private run prints it and saves none."""
    if clip_fraction is not None and clip_fraction < FEW_CLIPPED and run.phase == "final":
        warnings.warn(
            f"NOT PRIVATE: {run.method.name} clipped {clip_fraction:.0%} of the gradients in the last tenth of its "
            f"steps. The noise is made for norms that do not occur: lower max_grad_norm",
            stacklevel=3,
        )


class _ClipFraction:
    """The share of examples whose gradient was clipped in the last tenth of the steps. NOT private.

    Attributes:
        fraction: the share; None before such a step, and without examples.
    """

    def __init__(self, steps: int) -> None:
        self._from, self._clipped, self._examples = steps - math.ceil(steps / 10), 0, 0

    @property
    def fraction(self) -> float | None:
        return self._clipped / self._examples if self._examples else None

    def observe(self, raw: RawStep) -> None:
        """Count one step. `PrivateGradient` calls it at each step."""
        if raw.step >= self._from:
            self._clipped += int((raw.clipping.raw_factors < 1).sum())
            self._examples += len(raw.clipping.raw_factors)


def _append_raw(out: Path, run: Run, row: Mapping[str, Any]) -> None:
    """Append statistics from before the noise to a file of the folder raw/. NOT private: do not publish it."""
    path = out / "raw" / f"{run.name}.jsonl"
    make_secret(path.parent)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _tensorboard(folder: Path, data: DataSet) -> "TensorBoard":
    """Return a TensorBoard writer; it is imported only here, because it is an optional extra."""
    try:
        from privgrad.integrations.tensorboard import TensorBoard
    except ImportError as error:
        remedy = "pip install 'privgrad[tensorboard]', or set run.tensorboard = false"
        raise expected("experiments", "tensorboard", "to be installed", error, remedy) from error
    return TensorBoard(folder / "tensorboard", names={} if data.score is None else {"accuracy": data.score})


def _tuned_already(spec: Spec, run: Run, out: Path) -> Record | None:
    """Return the record of an equal tuning run as a final record, or None.

    If tuning uses the training loss, a tuning run and a final run are the same training with the same measurements.
    """
    if run.phase == "tuning" or spec.tuning is None or spec.tuning.by != "train_loss" or spec.tuning_scale > 1:
        return None
    record = find_record(read_records(out), replace(run, phase="tuning"))
    return None if record is None else record | {"phase": "final"}


def _record(
    spec: Spec,
    run: Run,
    made: Prepared,
    data: DataSet,
    result: FitResult,
    clip_fraction: float | None,
    *,
    validated: bool,
) -> Record:
    """Return the record of one run, a line of runs.jsonl."""
    last = result.curve[-1]
    return facts_of(run, made, data, result) | {
        "measured_on": data.measured_on,
        "test_accuracy": None if validated else last.get("accuracy"),
        "test_loss": None if validated else last["loss"],
        **({} if validated else constants(data.test, data)),
        "validation_accuracy": last.get("accuracy") if validated else None,
        "validation_loss": last["loss"] if validated else None,
        **({} if clip_fraction is None else {"raw_clip_fraction": clip_fraction}),
        # Histograms are kept of the last evaluation only.
        "curve": [{k: v for k, v in row.items() if k != "raw_moments"} for row in result.curve[:-1]] + [last],
        "data": sizes_text(spec.data, data, made.plan),
    }


def _metrics(spec: Spec, model: nn.Module, data: DataSet, record: Record, *, validated: bool) -> Record:
    """Return the metrics of run.metrics on the test part, or the criterion of [tuning] on the validation part."""
    if not validated:
        known = {} if data.score is None else {data.score: record["test_accuracy"]}
        return {"metrics": metrics_of(model, data.test, data, spec.run.metrics, known)} if spec.run.metrics else {}
    assert spec.tuning is not None
    by, key = spec.tuning.by, measurement_of(spec.tuning.by)
    return {} if key in record else {key: metrics_of(model, data.validation, data, [by], {})[by]}


def open_folder(spec: Spec, out: Path, description: str | None = None) -> DataSet:
    """Load and check the data, then claim the folder for the spec.

    Nothing is written before every check has passed. `papers.clipping_bias` and `papers.moments` also call it.

    Args:
        spec: the experiment.
        out: the folder.
        description: text of the folder's spec.json; None takes `describe`.
    """
    text = description or describe(spec)
    require_same(out, text)  # before the data are loaded, which may take minutes
    data = checked_data(spec)
    claim(out, text)
    return data


def checked_data(spec: Spec) -> DataSet:
    """Load the data, and check that the models, the features and the plan suit them. `paid_runner` also calls it."""
    plan = spec.plan(None)  # its refusals and warnings come before the data are loaded
    if spec.tuning_scale > 1:
        plan.scaled(1 / spec.tuning_scale)
    data = make_data(spec)
    for method in spec.methods:
        require_model(*own(spec, method, data))
    return data
