"""Run a private comparison: tuning, scores and the final training within one total epsilon."""

import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from privgrad.accounting.accountant import epsilon, rounded_up
from privgrad.accounting.mechanisms import Release, Selection, Split
from privgrad.accounting.selection import draw_repetitions
from privgrad.data import DataSet
from privgrad.errors import BudgetExceededError, PrivacyError, expected
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Ledger
from privgrad.progress import bars
from privgrad.releases import release_mean
from privgrad.training.fitting import fit
from privgrad_lab.build import sizes_text
from privgrad_lab.featuring import own, save_head
from privgrad_lab.metrics import constants, interval, intervals_of, metrics_of, unit_scores, unit_values
from privgrad_lab.prices import Price, candidates_of, price, public_count, tunes_norm
from privgrad_lab.records import (
    Record,
    append,
    candidate_of,
    claim,
    describe,
    make_secret,
    rate_text,
    read_records,
    require_same,
)
from privgrad_lab.runner import Run, checked_data, facts_of, find_record, prepare, rows_are_units
from privgrad_lab.spec import Candidate, MethodTable, Spec

NAME = "commitment.txt"  # the name of the folder's commitment, and the files of releases that were begun
_SELECTION = "selection.txt"  # in raw/: the secret choice of candidates, and the files of their releases
_MOST_NOISE = 100.0  # times the noise of the spec: a comparison with more would learn nothing


class PaidFolder:
    """The folder of one private comparison, whose releases are committed.

    Attributes:
        out: the folder.
        budget: holds all releases of the comparison.
        name: of the commitment: title, folder and a random number, kept in the folder.
    Privacy:
        When the constructor returns, all releases are committed. A comparison that resumes has committed the same
        releases already; then nothing is written. One that begins again in a new folder pays again, and a copied
        folder is refused.
    """

    def __init__(self, spec: Spec, cost: Price, out: Path) -> None:
        table = spec.privacy
        self.out = out
        if (shared := shared_budget(spec)) is None:
            self.budget = Budget(
                out / "budget.jsonl",
                total_epsilon=table.total_epsilon,
                delta=table.delta,
                num_examples=table.num_examples,
                privacy_unit=table.privacy_unit,
            )
        else:
            self.budget = shared
        if not (path := out / NAME).exists():
            complete = path.with_suffix(".new")
            complete.write_text(f"{' '.join(spec.title.split())} (folder {out.name}, {secrets.token_hex(8)})\n")
            os.replace(complete, path)
        self.name = path.read_text().splitlines()[0]
        try:
            self.budget.commit(self.name, cost.releases, place=f"{out.absolute()}")
        except BudgetExceededError as error:
            raise _too_much(spec, cost, self.budget) from error

    @property
    def selection(self) -> Path:
        """The file of the secret choice of candidates. NOT private."""
        return self.out / "raw" / _SELECTION

    def ledger(self, path: Path, release: Release) -> Ledger:
        """Open the ledger of one training or score, which accepts the given releases only.

        Its first line names the commitment, so that `privgrad statement` refers to the budget.
        """
        self.require_kept(path)
        ledger = Ledger(path)
        try:
            ledger.limit_to(release, self.name, self.budget.path.name)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def require_kept(self, path: Path) -> None:
        """Raise PrivacyError if a marked file is lost or empty: its releases would be made again, uncharged."""
        is_there = path.exists() and path.stat().st_size > 0
        if not is_there and f"{path.relative_to(self.out)}" in self._marks(path):
            remedy = "restore it, or compare in a new folder, which is charged again"
            got = "an empty file" if path.exists() else "a missing file"
            raise expected("compare", f"{path}", "to be kept", got, remedy)

    def mark(self, path: Path) -> None:
        """Note durably that a file of this comparison has its first line, before its first release leaves.

        Privacy:
            The names of files in raw/ show how many trainings a selection has, so they are noted in raw/ too.
        """
        name = f"{path.relative_to(self.out)}"
        if name in self._marks(path):
            return
        with self._marked_in(path).open("a") as file:
            file.write(f"{name}\n")
            file.flush()
            os.fsync(file.fileno())

    def hide_times(self) -> None:
        """Give all files and folders outside of raw/ the time of midnight before the commitment.

        Privacy:
            The times of files would show the duration of the comparison, and with it the number of trainings of a
            selection. The day of the commitment is in the budget.
        """
        day = next(one.date for one in self.budget.commitments if one.name == self.name)
        then = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        for folder, folders, files in os.walk(self.out, topdown=True):
            folders[:] = [name for name in folders if Path(folder, name) != self.out / "raw"]
            for place in (folder, *(os.path.join(folder, name) for name in files)):
                os.utime(place, (then, then))

    def _marked_in(self, path: Path) -> Path:
        """Return the file that notes whether `path` was begun."""
        is_secret = path != self.selection and path.is_relative_to(self.out / "raw")
        return self.selection if is_secret else self.out / NAME

    def _marks(self, path: Path) -> list[str]:
        """Return the names that are noted where that of `path` would be."""
        return self._marked_in(path).read_text().splitlines()[1:]


def shared_budget(spec: Spec) -> Budget | None:
    """Return the budget that a spec shares with other releases; None if it has none. Nothing is committed."""
    table = spec.privacy
    if table.budget is None:
        return None
    path = spec.data.home / Path(table.budget).expanduser()
    found = Budget(path, delta=table.delta, privacy_unit=table.privacy_unit)
    found.require_covered("compare", table.num_examples, table.privacy_unit)
    return found


def largest_total(cost: Price, budget: Budget) -> float:
    """Return a total_epsilon that fits into a budget, close to the largest one; 0 if none fits."""

    # The price falls with the total because all releases get more noise by the same factor.
    def noisier(factor: float) -> tuple[Release | Selection | Split, ...]:
        return tuple(_noisier(release, factor) for release in cost.releases)

    def fits(factor: float) -> bool:
        return budget.spent(besides=noisier(factor)) <= budget.total_epsilon

    if not fits(_MOST_NOISE):
        return 0.0
    low, high = 1.0, _MOST_NOISE
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    total = 0.99 * epsilon(noisier(high), delta=budget.delta)
    digits = 2 - math.floor(math.log10(total))
    return math.floor(total * 10**digits) / 10**digits


def _noisier(release: Release | Selection | Split, factor: float) -> Any:
    """Return a release with all noise multipliers times a factor."""
    if isinstance(release, Release):
        return replace(release, noise_multiplier=release.noise_multiplier * factor)
    if isinstance(release, Selection):
        return replace(release, releases=tuple(_noisier(one, factor) for one in release.releases))
    return replace(release, groups=tuple(tuple(_noisier(one, factor) for one in group) for group in release.groups))


def _too_much(spec: Spec, cost: Price, budget: Budget) -> PrivacyError:
    """Return the error for a comparison that does not fit into a shared budget."""
    spent, cap = rounded_up(budget.spent(), 4), rounded_up(budget.total_epsilon)
    condition = f"to fit into the budget: epsilon {spent} of {cap} is committed"
    most = largest_total(cost, budget)
    remedy = f"lower it to {most:g}" if most else "use new data: no training of these steps fits any more"
    if budget.commitments:
        remedy += "; a further commitment costs more than the difference, as docs/budget.md explains"
    got = spec.privacy.total_epsilon
    return expected("compare", "privacy.total_epsilon", condition, got, remedy, BudgetExceededError)


def at_noise(spec: Spec, noise_multiplier: float) -> Spec:
    """Return the spec of single trainings with this noise, in place of a total epsilon."""
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
        shared = shared_budget(spec)  # it must have room for one more comparison before a folder moves
        if shared is not None and shared.spent(besides=cost.releases) > shared.total_epsilon:
            raise _too_much(spec, cost, shared)
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
            run = Run(method, candidate, None, "final")
            if find_record(read_records(out), run) is None:
                record, model = _train(final, run, data, place, out / "runs" / run.name, bar)
                _publish(final, method, record | {"epsilon": cost.epsilon}, model, data, place)
    return read_records(out)


def check(spec: Spec) -> DataSet:
    """Load the data, and raise the errors that `compare` raises before it commits anything. Nothing is written."""
    if spec.privacy.delta > 1 / spec.privacy.num_examples:  # the budget would refuse it after the data are loaded
        condition = f"to be at most 1 / num_examples = {1 / spec.privacy.num_examples:.3g}"
        raise expected("compare", "privacy.delta", condition, spec.privacy.delta, "give a smaller delta")
    data = checked_data(at_noise(spec, 1.0))  # its checks hold for any noise
    _require_scores(spec, data)
    return data


def _require_scores(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the data hold people for the scores of candidates, and other ones for the test."""
    # A test result has no noise, so no training people may be among the test people.
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
    # Held-out people pay for scores alone, so a rule about each person by itself must choose them: a part of fixed size
    # would change with every person who comes or goes.
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
    # Files with a time of their own: that of the chosen training would show when it ran.
    shutil.copytree(raw / "runs" / str(-number), folder, dirs_exist_ok=True, copy_function=shutil.copy)
    method = next(one for one in spec.methods if one.name == record["method"])
    _publish(spec, method, record | {"epsilon": cost.epsilon}, model, data, place)


def _secret_choice(path: Path, spec: Spec, count: int) -> list[int]:
    """Return the candidates of "select", by index: a random number of independent draws, from system entropy."""
    # A file under raw/ holds them, NOT private, so that a resumed comparison keeps them.
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
    """Train once, and return the record with the score that chooses, and the model."""
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
    # The score of people gets noise and is charged to a ledger of its own, next to that of the training.
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
    if not math.isfinite(made.private_grad.epsilon(steps=1, assume_poisson=True)):
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
    """Return the result of a private comparison by name."""
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
        **{name: last.get(name) for name in ("interval", "most_frequent_class", "class_shares_loss")},
        "loss": last["test_loss"],
        **{name: last.get(name) or {} for name in ("metrics", "intervals")},
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
