"""Run a private comparison: tuning, scores and the final training within one total epsilon.

`privgrad compare` and `privgrad.compare` call it for a spec with privacy.total_epsilon. The privacy guarantee of the
total rests on this file, and on `prices`: everything is committed to a budget before the first training, and only what
the budget holds leaves the folder raw/.
"""

import json
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from privgrad.budget import Budget
from privgrad.data import DataSet
from privgrad.errors import BudgetExceededError, PrivacyError, expected
from privgrad.experiments.featuring import own, save_head
from privgrad.experiments.folder import Record, append, describe, read_records
from privgrad.experiments.measures import unit_scores, unit_values
from privgrad.experiments.metrics import interval, intervals_of, metrics_of
from privgrad.experiments.one_training import Run, facts_of, find_record, prepare
from privgrad.experiments.prices import Price, candidates_of, price, public_count
from privgrad.experiments.records import rate_text
from privgrad.experiments.runner import open_folder
from privgrad.experiments.spec import Candidate, MethodTable, Spec
from privgrad.experiments.tuner import candidate_of
from privgrad.progress import bars
from privgrad.releases import release_mean
from privgrad.repetitions import draw_repetitions
from privgrad.training import fit

_NAME = "commitment.txt"  # the name of the folder's commitment, and the files of releases that were begun


def at_noise(spec: Spec, noise_multiplier: float) -> Spec:
    """Return the spec of single trainings with this noise, in place of a total epsilon. The report calls it too."""
    privacy = {"total_epsilon": None, "budget": None, "noise_multiplier": noise_multiplier}
    return spec.model_copy(update={"privacy": spec.privacy.model_copy(update=privacy)})


def compare(spec: Spec, out: Path, *, progress: bool = True) -> list[Record]:
    """Tune and train within privacy.total_epsilon; the noise comes from the operating system's entropy.

    Args:
        spec: an experiment with privacy.total_epsilon.
        out: folder for budget, ledgers, model, records and report. A second call resumes an interrupted comparison.
        progress: show the current training.
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
    cost = price(spec)
    final = at_noise(spec, cost.noise_multiplier)
    is_new = not (out / "spec.json").exists()
    data = open_folder(final, out, describe(spec))
    try:
        _require_scores(spec, data)
        commit(spec, cost, out)
    except PrivacyError:
        for name in ("spec.json", _NAME) if is_new else ():  # a corrected spec may take the folder
            (out / name).unlink(missing_ok=True)
        raise
    with bars(shown=progress) as bar:
        if cost.way == "select":
            _select(final, cost, data, out, bar)
        else:
            method, candidate = candidates_of(spec)[0]
            if cost.way == "trials":
                method, candidate = _best_of_trials(spec, cost, data, out, bar)
            _train_last(final, Run(method, candidate, None, "final"), cost, data, out, bar)
    return read_records(out)


def commit(spec: Spec, cost: Price, out: Path) -> Budget:
    """Write all releases of a comparison to its budget, before anything is trained, and return the budget.

    A comparison that resumes has committed the same releases already; then nothing is written.

    Privacy:
        The folder's commitment has a random name, which the folder keeps: a comparison that begins again in a new
        folder pays again, and a copied folder is refused. `_require_kept` refuses a folder that has lost ledgers.
    """
    table = spec.privacy
    shared = table.budget is not None
    budget = Budget(
        Path(table.budget).expanduser() if table.budget is not None else out / "budget.jsonl",
        total_epsilon=None if shared else table.total_epsilon,
        delta=table.delta,
        num_examples=None if shared else table.num_examples,
        privacy_unit=table.privacy_unit,
    )
    budget.require_covered("compare", table.num_examples, table.privacy_unit)
    try:
        budget.commit(_name_of(out), cost.releases, place=f"{out.absolute()}")
    except BudgetExceededError as error:
        condition = f"to fit into the budget: epsilon {budget.spent():.4g} of {budget.total_epsilon:g} is committed"
        remedy = f"lower it: epsilon {budget.left():.3g} is left for a single release, and less for a training"
        raise expected(
            "compare", "privacy.total_epsilon", condition, table.total_epsilon, remedy, BudgetExceededError
        ) from error
    return budget


def _require_kept(out: Path, path: Path) -> None:
    """Raise PrivacyError if a file whose releases were begun is lost: they would be made again, and not be charged."""
    if not path.exists() and f"{path.relative_to(out)}" in (out / _NAME).read_text().splitlines()[1:]:
        remedy = "restore it, or compare in a new folder, which is charged again"
        raise expected("compare", f"{path}", "to be kept", "a missing file", remedy)


def _mark(out: Path, path: Path) -> None:
    """Note durably that a file of this comparison exists, before its first release leaves."""
    name = f"{path.relative_to(out)}"
    if name in (out / _NAME).read_text().splitlines()[1:]:
        return
    with (out / _NAME).open("a") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())


def _name_of(out: Path) -> str:
    """Return the name of the folder's commitment; the first call writes it to the folder."""
    path = out / _NAME
    if not path.exists():
        complete = path.with_suffix(".new")
        complete.write_text(f"{out.name} {secrets.token_hex(8)}\n")
        os.replace(complete, path)
    return path.read_text().splitlines()[0]


def _require_scores(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the data hold people for the scores of candidates, and other ones for the test.

    Privacy:
        A test result has no noise, so no training people may be among the test people.
        People who are held out pay for scores alone. So a rule about each person must decide who is held out.
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


def _best_of_trials(spec: Spec, cost: Price, data: DataSet, out: Path, bar: Progress) -> tuple[MethodTable, Candidate]:
    """Train every candidate once with the noise of trials, and return the one with the best noisy score."""
    assert cost.trial_noise is not None
    trial = at_noise(spec, cost.trial_noise)
    candidates = candidates_of(spec)
    task = bar.add_task("trials", total=len(candidates), note="")
    for method, candidate in candidates:
        run = Run(method, candidate, None, "tuning")
        bar.update(task, note=f"{method.name}  {rate_text(candidate)}")
        if find_record(read_records(out), run) is None:
            append(out, [_train_scored(trial, run, cost, data, out, out / "runs" / run.name, bar)[0]])
        bar.advance(task)
    trials = [record for record in read_records(out) if record["phase"] == "tuning"]
    best = max(trials, key=lambda record: record["validation_accuracy"])
    return next(pair for pair in candidates if (pair[0].name, pair[1]) == (best["method"], candidate_of(best)))


def _select(spec: Spec, cost: Price, data: DataSet, out: Path, bar: Progress) -> None:
    """Train a secret, random number of random candidates; release the best one and its score."""
    if any(record["phase"] == "final" for record in read_records(out)):
        return
    assert spec.tuning is not None
    raw, candidates = out / "raw", candidates_of(spec)
    _require_kept(out, raw / "selection.json")
    chosen = _secret_choice(raw / "selection.json", spec, len(candidates))
    _mark(out, raw / "selection.json")
    bar.add_task("selection", total=None, completed=0, note="of a secret number of trainings")
    tried: list[tuple[float, int, Record, nn.Module]] = []
    for number, index in enumerate(chosen):
        method, candidate = candidates[index]
        run = Run(method, candidate, None, "final")
        record, model = _train_scored(spec, run, cost, data, out, raw / "runs" / str(number), bar)
        tried.append((record["validation_accuracy"], -number, record, model))
    _, place, record, model = max(tried, key=lambda one: one[:2])
    folder = out / "runs" / record["folder"]
    # Without the times of the files, which show the place of the winner.
    shutil.copytree(raw / "runs" / str(-place), folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    method = next(one for one in spec.methods if one.name == record["method"])
    _publish(spec, method, record | {"epsilon": cost.epsilon}, model, data, out)


def _secret_choice(path: Path, spec: Spec, count: int) -> list[int]:
    """Return the candidates of "select", by index: a random number of independent draws, from system entropy.

    The first call writes them to a file under raw/, so that a resumed comparison keeps them. NOT private.
    """
    if path.exists():
        return json.loads(path.read_text())
    assert spec.tuning is not None
    number = draw_repetitions(spec.tuning.mean_runs, spec.tuning.shape)
    chosen = [secrets.randbelow(count) for _ in range(number)]
    path.parent.mkdir(parents=True, exist_ok=True)
    complete = path.with_suffix(f".{os.getpid()}")
    complete.write_text(json.dumps(chosen))
    with suppress(FileExistsError):  # another process was first
        os.link(complete, path)
    return json.loads(path.read_text())


def _train_scored(
    spec: Spec, run: Run, cost: Price, data: DataSet, out: Path, folder: Path, bar: Progress
) -> tuple[Record, nn.Module]:
    """Train once, and return the record with the score that chooses, and the model.

    The score of people gets noise and is charged to a ledger of its own, next to that of the training.
    """
    assert spec.tuning is not None
    record, model = _train(spec, run, data, out, folder, bar)
    _, data = own(spec, run.method, data)
    people = {"training": data.train, "held-out": data.validation, "public": data.public}[spec.tuning.score_on]
    assert people is not None
    values = unit_scores(model, people, data, spec.tuning.by)
    if cost.score_noise is None:
        return record | {"validation_accuracy": values.mean().item(), "score_noise_std": 0.0}, model
    count, ledger = public_count(spec), folder / "score" / "ledger.jsonl"
    _require_kept(out, ledger)
    score = release_mean(
        values.unsqueeze(1),
        bound=1.0,
        noise_multiplier=cost.score_noise,
        num_examples=count,
        delta=spec.privacy.delta,
        privacy_unit=spec.privacy.privacy_unit,
        ledger=ledger,
    ).item()
    _mark(out, ledger)
    measured = {"measured_on": spec.tuning.score_on, "validation_accuracy": score}
    return record | measured | {"score_noise_std": cost.score_noise / count}, model


def _train(spec: Spec, run: Run, data: DataSet, out: Path, folder: Path, bar: Progress) -> tuple[Record, nn.Module]:
    """Train once without any evaluation, and return the record and the model that is to be measured."""
    spec, data = own(spec, run.method, data)
    made = prepare(spec, run, data)
    if not math.isfinite(made.private_grad.epsilon(steps=1)):
        remedy = "leave the method out, or give it side information that is public"
        raise expected("compare", f"method {run.method.name!r}", "to have a finite epsilon", math.inf, remedy)
    folder.mkdir(parents=True, exist_ok=True)
    _require_kept(out, folder / "ledger.jsonl")
    made.private_grad.record_in(folder / "ledger.jsonl")
    try:
        _mark(out, folder / "ledger.jsonl")
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
        "measured_on": "test",
        "curve": [],
        # Exact sizes of parts may be private.
        "data": f"{data.name}: {made.plan.num_examples:,} training {_units(spec)} or more, the public count",
    }
    return record, result.averaged or made.model


def _units(spec: Spec) -> str:
    return "persons" if spec.privacy.privacy_unit == "user" else "examples"


def _train_last(spec: Spec, run: Run, cost: Price, data: DataSet, out: Path, bar: Progress) -> None:
    """Train the chosen candidate, measure it on the test set, and write its record and its weights."""
    if find_record(read_records(out), run) is None:
        record, model = _train(spec, run, data, out, out / "runs" / run.name, bar)
        _publish(spec, run.method, record | {"epsilon": cost.epsilon}, model, data, out)


def _publish(spec: Spec, method: MethodTable, record: Record, model: nn.Module, data: DataSet, out: Path) -> None:
    """Measure the final model on the test set, write its weights, and then its record."""
    spec, data = own(spec, method, data)
    facts = {name: record[name] for name in ("epsilon", "delta", "side_information")}
    made = {"head": save_head(model, data, out / "head", facts)}
    torch.save(model.state_dict(), out / "model.pt")
    append(out, [record | _tested(spec, model, data) | made])


def _tested(spec: Spec, model: nn.Module, data: DataSet) -> Record:
    """Measure the final model on the test set, each person once. NOT private for the people in it."""
    (losses,), names = unit_values(model, data.test, data, ["loss"]), spec.run.metrics
    found: Record = {"test_loss": losses.mean().item(), "test_accuracy": None, "test_units": len(losses)}
    if data.score is not None:
        values = unit_scores(model, data.test, data)
        found |= {"test_accuracy": values.mean().item(), "interval": interval(values)}
    if names:
        known = {} if data.score is None else {data.score: found["test_accuracy"]}
        found["metrics"] = metrics_of(model, data.test, data, names, known)
        found["intervals"] = intervals_of(model, data.test, data, names)
    return found


def outcome_of(spec: Spec, records: Sequence[Record], out: Path) -> dict[str, Any]:
    """Return the result of a private comparison by name, for `--json` and for Python."""
    cost, last = price(spec), next(record for record in records if record["phase"] == "final")
    budget = commit(spec, cost, out)
    trials = [
        {"method": r["method"], "noise_step": r["noise_step"], "own": r["own"], "score": r["validation_accuracy"]}
        for r in records
        if r["phase"] == "tuning"
    ]
    return {
        "method": last["method"],
        "noise_step": last["noise_step"],
        "own": last["own"],
        "accuracy": last["test_accuracy"],
        "interval": last.get("interval"),
        "loss": last["test_loss"],
        "metrics": last.get("metrics") or {},
        "intervals": last.get("intervals") or {},
        "epsilon": cost.epsilon,
        "delta": spec.privacy.delta,
        "privacy_unit": spec.privacy.privacy_unit,
        "way": cost.way,
        "score": last.get("validation_accuracy"),
        "trials": trials,
        "budget": str(budget.path),
        "budget_spent": budget.spent(),
        "model": str(out / "model.pt"),
    }
