"""Run a private comparison: tuning, scores and the final training within one total epsilon.

`privgrad compare` and `privgrad.compare` call it for a spec with privacy.total_epsilon. The privacy guarantee of the
total rests on this file, on `prices` and on `paid_folder`: everything is committed to a budget before the first
training, and only what the budget holds leaves the folder raw/. A checkpoint also holds the training's duration.
"""

import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from privgrad.data import DataSet
from privgrad.errors import PrivacyError, expected
from privgrad.experiments.featuring import own, save_head
from privgrad.experiments.folder import Record, append, claim, describe, make_secret, read_records, require_same
from privgrad.experiments.measures import constants, unit_scores, unit_values
from privgrad.experiments.metrics import interval, intervals_of, metrics_of
from privgrad.experiments.one_training import Run, facts_of, find_record, prepare, rows_are_units
from privgrad.experiments.paid_folder import NAME, PaidFolder, require_room
from privgrad.experiments.prices import Price, candidates_of, price, public_count, tunes_norm
from privgrad.experiments.records import rate_text
from privgrad.experiments.runner import checked_data
from privgrad.experiments.sources import sizes_text
from privgrad.experiments.spec import Candidate, MethodTable, Spec
from privgrad.experiments.tuner import candidate_of
from privgrad.mechanisms import Release
from privgrad.progress import bars
from privgrad.releases import release_mean
from privgrad.repetitions import draw_repetitions
from privgrad.training import fit


def at_noise(spec: Spec, noise_multiplier: float) -> Spec:
    """Return the spec of single trainings with this noise, in place of a total epsilon. The report calls it too."""
    privacy = {"total_epsilon": None, "budget": None, "noise_multiplier": noise_multiplier}
    return spec.model_copy(update={"privacy": spec.privacy.model_copy(update=privacy)})


def compare(
    spec: Spec,
    out: Path,
    *,
    progress: bool | Progress = True,
    announce: Callable[[], None] | None = None,
    restart: Callable[[], None] | None = None,
) -> list[Record]:
    """Tune and train within privacy.total_epsilon; the noise comes from the operating system's entropy.

    Args:
        spec: an experiment with privacy.total_epsilon.
        out: folder for budget, ledgers, model, records and report. A second call resumes an interrupted comparison.
        progress: show the current training; or as in `runner.train`.
        announce: called once the data are checked, before anything is committed.
        restart: moves an old folder aside; called once the data are checked and the shared budget has room.
    Returns:
        The records that were paid for, also in out/runs.jsonl: those of trials, with noisy scores, and the final one.
        With "select" it is the final one alone.
    Raises:
        BudgetExceededError: the shared budget has less left than the total.
        PrivacyError: the data or the model do not suit the spec, or `out` holds another comparison.
    Privacy:
        All releases are committed to the budget before the first training. The folder raw/ holds what no epsilon
        covers: with "select", the number of trainings, their scores and models. Do not publish it. The duration of
        the comparison depends on that number too.
    """
    if restart is None:
        require_same(out, describe(spec))  # before the data are loaded
    data, cost = check(spec), price(spec)
    if restart is not None:
        require_room(spec, cost)
        restart()
    was_there, is_new = out.exists(), not (out / "spec.json").exists()
    claim(out, describe(spec))
    try:
        if announce is not None:
            announce()
        place = PaidFolder(spec, cost, out)
    except PrivacyError:
        for name in ("spec.json", NAME) if is_new else ():  # a corrected spec may take the folder
            (out / name).unlink(missing_ok=True)
        if not was_there:
            with suppress(OSError):  # it is not empty
                out.rmdir()
        raise
    final = at_noise(spec, cost.noise_multiplier)
    with bars(shown=progress) as bar:
        if cost.way == "select":
            _select(final, cost, data, place, bar)
        else:
            method, candidate = candidates_of(spec)[0]
            if cost.way == "trials":
                method, candidate = _best_of_trials(spec, cost, data, place, bar)
            _train_last(final, Run(method, candidate, None, "final"), cost, data, place, bar)
    return read_records(out)


def check(spec: Spec) -> DataSet:
    """Load the data, and raise the errors that `compare` raises before it commits anything. Nothing is written.

    `privgrad compare --dry-run` calls it.
    """
    if spec.privacy.delta > 1 / spec.privacy.num_examples:  # the budget would refuse it after the data are loaded
        condition = f"to be at most 1 / num_examples = {1 / spec.privacy.num_examples:.3g}"
        raise expected("compare", "privacy.delta", condition, spec.privacy.delta, "give a smaller delta")
    data = checked_data(at_noise(spec, 1.0))  # its checks hold for any noise
    _require_scores(spec, data)
    return data


def _require_scores(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the data hold people for the scores of candidates, and other ones for the test.

    Privacy:
        A test result has no noise, so no training people may be among the test people.
        Held-out people pay for scores alone. A rule about each person by itself must therefore choose them.
        A part of fixed size would change with every person who comes or goes.
    """
    if data.measured_on == "training":
        remedy = "give data a test part of its own, or compare with target_epsilon for research"
        raise expected("compare", "the test part", "to be apart from the training part", data.name, remedy)
    score_on, held_out = "" if spec.tuning is None else spec.tuning.score_on, len(data.validation)
    if score_on and data.score is None and spec.tuning is not None and spec.tuning.by == "accuracy":
        remedy = 'leave [tuning] out, and give one noise_step; or give target_epsilon and by = "loss" for research'
        raise expected("compare", "data.score", "to be accuracy or recall for paid tuning", None, remedy)
    if score_on == "public" and data.public is None:
        remedy = 'set it to the number of public examples, or score_on = "training"'
        raise expected("compare", "data.public", 'to be positive for score_on = "public"', 0, remedy)
    if score_on == "held-out" and data.split == "unit" and not held_out:
        remedy = 'set it in [data], such as validation_share = 0.2, or score_on = "training"'
        raise expected("compare", "data.validation_share", 'to be positive for score_on = "held-out"', 0, remedy)
    if score_on == "held-out" and data.split != "unit":
        remedy = 'give [data] file and validation_share, or score_on = "training"'
        condition = "to be held out by a rule for each person"
        raise expected("compare", "the validation part", condition, f"{data.name}, split by {data.split}", remedy)
    if held_out and score_on != "held-out":
        remedy = "leave it out: scores are measured on the training people, with noise, or on public examples"
        if data.split == "unit":
            remedy += '; or set score_on = "held-out"'
        raise expected("compare", "the validation part", "to be empty with total_epsilon", "examples in it", remedy)


def _best_of_trials(
    spec: Spec, cost: Price, data: DataSet, place: PaidFolder, bar: Progress
) -> tuple[MethodTable, Candidate]:
    """Train every candidate once with the noise of trials, and return the one with the best noisy score."""
    assert cost.trial_noise is not None
    trial, out = at_noise(spec, cost.trial_noise), place.out
    candidates = candidates_of(spec)
    task = bar.add_task("trials", total=len(candidates), note="")
    for method, candidate in candidates:
        run = Run(method, candidate, None, "tuning")
        norm = f"  C{candidate.max_grad_norm:g}" if tunes_norm(spec) else ""
        bar.update(task, note=f"{method.name}{norm}  {rate_text(candidate)}")
        if find_record(read_records(out), run) is None:
            append(out, [_train_scored(trial, run, cost, data, place, out / "runs" / run.name, bar)[0]])
        bar.advance(task)
    trials = [record for record in read_records(out) if record["phase"] == "tuning"]
    best = max(trials, key=lambda record: record["tuning_score"])
    return next(pair for pair in candidates if (pair[0].name, pair[1]) == (best["method"], candidate_of(best)))


def _select(spec: Spec, cost: Price, data: DataSet, place: PaidFolder, bar: Progress) -> None:
    """Train a secret, random number of random candidates; release the best one and its score."""
    out = place.out
    if any(record["phase"] == "final" for record in read_records(out)):
        return
    assert spec.tuning is not None
    raw, candidates = out / "raw", candidates_of(spec)
    place.require_kept(place.selection)
    chosen = _secret_choice(place.selection, spec, len(candidates))
    place.mark(place.selection)
    bar.add_task("selection", total=None, completed=0, note="of a secret number of trainings")
    tried: list[tuple[float, int, Record, nn.Module]] = []
    for number, index in enumerate(chosen):
        method, candidate = candidates[index]
        run = Run(method, candidate, None, "final")
        record, model = _train_scored(spec, run, cost, data, place, raw / "runs" / str(number), bar)
        tried.append((record["tuning_score"], -number, record, model))
    _, number, record, model = max(tried, key=lambda one: one[:2])
    folder = out / "runs" / record["folder"]
    shutil.copytree(raw / "runs" / str(-number), folder, dirs_exist_ok=True, copy_function=_copied)
    method = next(one for one in spec.methods if one.name == record["method"])
    _publish(spec, method, record | {"epsilon": cost.epsilon}, model, data, place)


def _copied(source: str, target: str) -> None:
    """Copy a file with its mode, and with a time of its own."""
    shutil.copyfile(source, target)
    shutil.copymode(source, target)


def _secret_choice(path: Path, spec: Spec, count: int) -> list[int]:
    """Return the candidates of "select", by index: a random number of independent draws, from system entropy.

    The first call writes them to the first line of a file under raw/, so that a resumed comparison keeps them. NOT
    private.
    """
    if path.exists():
        return json.loads(path.read_text().splitlines()[0])
    assert spec.tuning is not None
    number = draw_repetitions(spec.tuning.mean_runs, spec.tuning.shape)
    chosen = [secrets.randbelow(count) for _ in range(number)]
    make_secret(path.parent)  # the number of trainings is secret, and so are the scores of those not chosen
    complete = path.with_suffix(f".{os.getpid()}")
    complete.write_text(f"{json.dumps(chosen)}\n")
    with suppress(FileExistsError):  # another process was first
        os.link(complete, path)
    complete.unlink()
    return json.loads(path.read_text().splitlines()[0])


def _train_scored(
    spec: Spec, run: Run, cost: Price, data: DataSet, place: PaidFolder, folder: Path, bar: Progress
) -> tuple[Record, nn.Module]:
    """Train once, and return the record with the score that chooses, and the model.

    The score of people gets noise and is charged to a ledger of its own, next to that of the training.
    """
    assert spec.tuning is not None
    record, model = _train(spec, run, data, place, folder, bar)
    _, data = own(spec, run.method, data)
    people = {"training": data.train, "held-out": data.validation, "public": data.public}[spec.tuning.score_on]
    assert people is not None
    by = spec.tuning.by
    values = unit_scores(model, people, data, by)
    name = {"accuracy": data.score, "squared_error": "1 - squared_error"}.get(by, by)
    record |= {"tuning_score_by": name, "tuning_score_on": spec.tuning.score_on}
    if cost.score_noise is None:
        return record | {"tuning_score": values.mean().item(), "score_noise_std": 0.0}, model
    count, path = public_count(spec), folder / "score" / "ledger.jsonl"
    with closing(place.ledger(path, Release(cost.score_noise, 1.0))) as ledger, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NOT PRIVATE")  # each row is a unit, and their public count may be lower
        warnings.filterwarnings("ignore", ".* was released before")  # by this training, before an interruption
        score = release_mean(
            values.unsqueeze(1),
            bound=1.0,
            noise_multiplier=cost.score_noise,
            num_examples=count,
            delta=spec.privacy.delta,
            privacy_unit=spec.privacy.privacy_unit,
            ledger=ledger,
        ).item()
    place.mark(path)
    return record | {"tuning_score": score, "score_noise_std": cost.score_noise / count}, model


def _train(
    spec: Spec, run: Run, data: DataSet, place: PaidFolder, folder: Path, bar: Progress
) -> tuple[Record, nn.Module]:
    """Train once without any evaluation, and return the record and the model that is to be measured."""
    spec, data = own(spec, run.method, data)
    made = prepare(spec, run, data)
    if not math.isfinite(made.private_grad.epsilon(steps=1)):
        remedy = "leave the method out, or give it side information that is public"
        raise expected("compare", f"method {run.method.name!r}", "to have a finite epsilon", math.inf, remedy)
    path, plan = folder / "ledger.jsonl", made.plan
    release = plan.release_of(plan.steps)
    made.private_grad.record_in(place.ledger(path, release))
    try:
        place.mark(path)
        with rows_are_units(plan.privacy_unit):
            result = fit(
                made.private_grad,
                made.optimizer,
                data.train,
                scheduler=spec.schedule_of(run.method),
                ema_decay=spec.run.ema_decay,
                output_dir=folder,
                progress=bar,
            )
    finally:
        made.private_grad.ledger.close()
    facts = facts_of(run, made, data, result)
    # Times depend on the data, and no epsilon covers them.
    record = {name: value for name, value in facts.items() if name not in ("seconds", "examples_per_second")} | {
        "folder": run.name,
        "curve": [],
        "data": sizes_text(spec.data, data, plan),
    }
    return record, result.averaged or made.model


def _train_last(spec: Spec, run: Run, cost: Price, data: DataSet, place: PaidFolder, bar: Progress) -> None:
    """Train the chosen candidate, measure it on the test set, and write its record and its weights."""
    out = place.out
    if find_record(read_records(out), run) is None:
        record, model = _train(spec, run, data, place, out / "runs" / run.name, bar)
        _publish(spec, run.method, record | {"epsilon": cost.epsilon}, model, data, place)


def _publish(
    spec: Spec, method: MethodTable, record: Record, model: nn.Module, data: DataSet, place: PaidFolder
) -> None:
    """Measure the final model on the test set, write its weights, and then its record."""
    out = place.out
    spec, data = own(spec, method, data)
    facts: dict[str, Any] = {name: record[name] for name in ("epsilon", "delta", "side_information")}
    facts |= {"privacy_unit": spec.privacy.privacy_unit, "num_examples": spec.privacy.num_examples}
    facts |= {"budget": place.budget.path.name, "total_epsilon": place.budget.total_epsilon}
    made = {"head": save_head(model, data, out / "head", facts)}
    torch.save(model.state_dict(), out / "model.pt")
    append(out, [record | _tested(spec, model, data) | made])


def _tested(spec: Spec, model: nn.Module, data: DataSet) -> Record:
    """Measure the final model on the test set, each person once. NOT private for the people in it."""
    (losses,), names = unit_values(model, data.test, data, ["loss"]), spec.run.metrics
    found: Record = {"measured_on": "test", "test_loss": losses.mean().item(), "test_accuracy": None}
    found["test_units"] = len(losses)
    if data.score is not None:
        values = unit_scores(model, data.test, data)
        found |= {"test_accuracy": values.mean().item(), "interval": interval(values)}
        found |= constants(data.test, data)
    if names:
        known = {} if data.score is None else {data.score: found["test_accuracy"]}
        found["metrics"] = metrics_of(model, data.test, data, names, known)
        found["intervals"] = intervals_of(model, data.test, data, names)
    return found


def outcome_of(spec: Spec, cost: Price, records: Sequence[Record], place: PaidFolder) -> dict[str, Any]:
    """Return the result of a private comparison by name, for `--json` and for Python."""
    last = next(record for record in records if record["phase"] == "final")
    chosen = ("method", "max_grad_norm", "noise_step", "own")
    trials = [
        {name: record[name] for name in chosen} | {"score": record["tuning_score"]}
        for record in records
        if record["phase"] == "tuning"
    ]
    return {
        **{name: last[name] for name in chosen},
        "accuracy": last["test_accuracy"],
        "interval": last.get("interval"),
        "most_frequent_class": last.get("most_frequent_class"),
        "class_shares_loss": last.get("class_shares_loss"),
        "loss": last["test_loss"],
        "metrics": last.get("metrics") or {},
        "intervals": last.get("intervals") or {},
        "epsilon": cost.epsilon,
        "delta": spec.privacy.delta,
        "privacy_unit": spec.privacy.privacy_unit,
        "way": cost.way,
        "score": last.get("tuning_score"),
        "trials": trials,
        "budget": str(place.budget.path),
        "budget_spent": place.budget.spent(),
        "model": str(place.out / "model.pt"),
        "head": last.get("head"),
    }
