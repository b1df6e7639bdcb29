"""Run a private comparison: tuning, scores and the final training within one total epsilon."""

import json
import math
import os
import secrets
import shutil
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from privgrad.accounting.accountant import epsilon, rounded_up
from privgrad.accounting.mechanisms import Release, Selection
from privgrad.accounting.selection import draw_repetitions
from privgrad.data import DataSet
from privgrad.errors import BudgetExceededError, PrivacyError, expected
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Hold, Ledger
from privgrad.progress import bars
from privgrad.releases import release_mean
from privgrad.training.run import FitResult
from privgrad_lab import records as recorded
from privgrad_lab.build import sizes_text
from privgrad_lab.featuring import own, save_head
from privgrad_lab.metrics import constants, intervals_of, metrics_of, reported, scored_by, unit_scores, unit_values
from privgrad_lab.prices import Price, Way, candidates_of, price, public_count, tunes_norm
from privgrad_lab.records import Record, candidate_of, in_phase, read_records
from privgrad_lab.runner import Prepared, Run, carry_out, checked_data, facts_of
from privgrad_lab.spec import Spec

NAME = "commitment.txt"  # the name of the folder's commitment, and the files of releases that were begun
_MOST_POWER = 464  # 1.01**464 is 100: a comparison with 100 times the noise of the spec would learn nothing


class PaidFolder:
    """The folder of one private comparison, and the payer of its trainings, whose releases are committed to a budget.

    Privacy:
        When the constructor returns, all releases are committed. A comparison that resumes has committed the same
        releases already; then nothing is written. One that begins again in a new folder pays again, and a copied
        folder is refused.
    """

    def __init__(self, spec: Spec, cost: Price, out: Path) -> None:
        table = spec.privacy
        self._spec, self._cost, self.out = spec, cost, out
        self.selection = out / "raw" / "selection.txt"  # the secret choice of candidates, and its files. NOT private
        self.trained: list[tuple[Run, Record, nn.Module]] = []  # the final ones so far, of which one is published
        self.budget = shared_budget(spec) or Budget(
            out / "budget.jsonl",
            total_epsilon=table.total_epsilon,
            delta=table.delta,
            num_examples=table.num_examples,
            privacy_unit=table.privacy_unit,
        )
        if not (path := out / NAME).exists():
            complete = path.with_suffix(".new")
            complete.write_text(f"{' '.join(spec.title.split())} (folder {out.name}, {secrets.token_hex(8)})\n")
            os.replace(complete, path)
        self.name = path.read_text().splitlines()[0]  # of the commitment: title, folder and a random number
        try:
            self.budget.commit(self.name, cost.releases, place=f"{out.absolute()}")
        except BudgetExceededError as error:
            raise _too_much(spec, cost, self.budget) from error

    def spec_of(self, run: Run) -> Spec:
        noise = self._cost.noise_multiplier if run.phase == "final" else self._cost.trial_noise
        assert noise is not None
        return self._spec.with_noise(noise)

    def claim(self, run: Run) -> AbstractContextManager[bool]:
        return nullcontext(True)  # its choices are secret, and made by one process

    def keep(self, run: Run, record: Record) -> None:
        if run.phase == "tuning":  # of the final runs, `publish` keeps one
            recorded.append(self.out, [record])

    def train(self, spec: Spec, run: Run, data: DataSet, made: Prepared, fitted: Callable[..., FitResult]) -> Record:
        """Train once without any evaluation, in a ledger of the commitment, and score the model if it is a candidate.

        The record of a secret run is NOT private.
        """
        if not math.isfinite(made.private_grad.epsilon(steps=1)):
            raise expected("compare", f"method {run.method.name!r}", "to have a finite epsilon", math.inf)
        path, plan = run.folder(self.out) / "ledger.jsonl", made.plan
        made.private_grad.record_in(self.ledger(path, plan.release_of(plan.steps)))
        try:
            self.mark(path)
            result = fitted()
        finally:
            made.private_grad.ledger.close()
        record = facts_of(run, made, data, result)
        for name in ("seconds", "examples_per_second"):  # times depend on the data, and no epsilon covers them
            del record[name]
        record |= {"folder": run.name, "curve": [], "data": sizes_text(spec.data, data, plan)}
        model = result.averaged or made.model
        if run.phase == "tuning" or run.secret is not None:
            record |= self._scored(spec, run, model, data)
        if run.phase == "final":
            self.trained.append((run, record, model))
        return record

    def _scored(self, spec: Spec, run: Run, model: nn.Module, data: DataSet) -> Record:
        assert spec.tuning is not None
        people = {"training": data.train, "held-out": data.validation, "public": data.public}[spec.tuning.score_on]
        assert people is not None
        by, noise = scored_by(spec.tuning.by, data), self._cost.score_noise
        values = unit_scores(model, people, data, by)
        about: Record = {"tuning_score_by": f"1 - {by}" if by.endswith("error") else by}
        about |= {"tuning_score_on": spec.tuning.score_on}
        if noise is None:
            return about | {"tuning_score": values.mean().item(), "score_noise_std": 0.0}
        # The score of people gets noise and is charged to a ledger of its own, next to that of the training.
        count, path = public_count(spec), run.folder(self.out) / "score" / "ledger.jsonl"
        with closing(self.ledger(path, Release(noise, 1.0))) as ledger, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "NOT PRIVATE")  # each row is a unit, and their public count may be lower
            warnings.filterwarnings("ignore", ".* was released before")  # by this training, before an interruption
            score = release_mean(
                values.unsqueeze(1),
                bound=1.0,
                noise_multiplier=noise,
                num_examples=count,
                delta=spec.privacy.delta,
                privacy_unit=spec.privacy.privacy_unit,
                ledger=ledger,
            ).item()
        self.mark(path)
        return about | {"tuning_score": score, "score_noise_std": noise / count}

    def publish(self, data: DataSet) -> None:
        """Publish the final training, or of the secret ones the first of those with the best score."""
        run, best, model = max(self.trained, key=lambda one: one[1].get("tuning_score", 0.0))
        if run.secret is not None:
            # Files with a time of their own: that of the chosen training would show when it ran.
            shown = replace(run, secret=None).folder(self.out)
            shutil.copytree(run.folder(self.out), shown, dirs_exist_ok=True, copy_function=shutil.copy)
        record, out = best | {"epsilon": self._cost.epsilon}, self.out
        spec, data = own(self.spec_of(run), run.method, data)
        facts: dict[str, Any] = {name: record[name] for name in ("epsilon", "delta", "side_information")}
        facts |= {"privacy_unit": spec.privacy.privacy_unit, "num_examples": spec.privacy.num_examples}
        facts |= {"budget": self.budget.path.name, "total_epsilon": self.budget.total_epsilon}
        made = {"head": save_head(model, data, out / "head", facts)}
        torch.save(model.state_dict(), out / "model.pt")
        recorded.append(out, [record | _tested(spec, model, data) | made])

    def ledger(self, path: Path, release: Release) -> Ledger:
        """Open the ledger of one training or score, which names the commitment and accepts the given releases only."""
        self.require_kept(path)
        ledger = Ledger(path)
        try:
            ledger.limit_to(Hold(self.name, release, self.budget.path.name))
        except BaseException:
            ledger.close()
            raise
        return ledger

    def require_kept(self, path: Path) -> None:
        """Raise PrivacyError if a marked file is lost or empty: its releases would be made again, uncharged."""
        is_there = path.exists() and path.stat().st_size > 0
        if not is_there and f"{path.relative_to(self.out)}" in self._marks(path)[1]:
            got = "an empty file" if path.exists() else "a missing file"
            raise expected("compare", f"{path}", "to be kept", got, "restore it, or compare in a new folder")

    def mark(self, path: Path) -> None:
        """Note durably that a file of this comparison has its first line, before its first release leaves."""
        name = f"{path.relative_to(self.out)}"
        marks, known = self._marks(path)
        if name not in known:
            with marks.open("a") as file:
                file.write(f"{name}\n")
                file.flush()
                os.fsync(file.fileno())

    def hide_times(self) -> None:
        """Give all files and folders outside of raw/ the time of midnight before the commitment."""
        # The times of files would show the duration of the comparison, and with it the number of trainings of a
        # selection. The day of the commitment is in the budget.
        day = next(one.date for one in self.budget.commitments if one.name == self.name)
        then = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        for place in (self.out, *self.out.rglob("*")):
            if not place.is_relative_to(self.out / "raw"):
                os.utime(place, (then, then))

    def _marks(self, path: Path) -> tuple[Path, list[str]]:
        """Return the file that would note that `path` was begun, and the names that it holds."""
        # The names of files in raw/ show how many trainings a selection has, so they are noted in raw/ too.
        is_secret = path != self.selection and path.is_relative_to(self.out / "raw")
        file = self.selection if is_secret else self.out / NAME
        return file, file.read_text().splitlines()[1:]


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
    def fits(factor: float) -> bool:
        return budget.spent(besides=_noisier(cost.releases, factor)) <= budget.total_epsilon

    factors = [1.01**power for power in range(_MOST_POWER)]
    if (first := bisect_left(factors, True, key=fits)) == len(factors):
        return 0.0
    total = 0.99 * epsilon(_noisier(cost.releases, factors[first]), delta=budget.delta)
    digits = 2 - math.floor(math.log10(total))
    return math.floor(total * 10**digits) / 10**digits


def _noisier(release: Any, factor: float) -> Any:
    if isinstance(release, tuple):
        return tuple(_noisier(one, factor) for one in release)
    if isinstance(release, Release):
        return replace(release, noise_multiplier=release.noise_multiplier * factor)
    if isinstance(release, Selection):
        return replace(release, releases=_noisier(release.releases, factor))
    return replace(release, groups=_noisier(release.groups, factor))


def _too_much(spec: Spec, cost: Price, budget: Budget) -> PrivacyError:
    spent, cap = rounded_up(budget.spent(), 4), rounded_up(budget.total_epsilon)
    condition = f"to fit into the budget: epsilon {spent} of {cap} is committed"
    most = largest_total(cost, budget)
    remedy = f"lower it to {most:g}" if most else "use new data: no training of these steps fits any more"
    if budget.commitments:
        remedy += "; a further commitment costs more than the difference, as docs/budget.md explains"
    got = spec.privacy.total_epsilon
    return expected("compare", "privacy.total_epsilon", condition, got, remedy, BudgetExceededError)


def compare(
    spec: Spec,
    out: Path,
    *,
    progress: bool | Progress = True,
    announce: Callable[[], None] | None = None,
    restart: Callable[[], None] | None = None,
) -> list[Record]:
    """Tune and train within privacy.total_epsilon; the noise comes from the operating system's entropy.

    A second call resumes an interrupted comparison. The result are the records that were paid for, also in
    out/runs.jsonl: those of trials, with noisy scores, and the final one. With "select" it is the final one alone.
    `announce` is called once the data are checked, before anything is committed. `restart` moves an old folder aside;
    it is called once the data are checked and the shared budget has room.

    Privacy:
        All releases are committed to the budget before the first training. The folder raw/ holds what no epsilon
        covers: with "select", the number of trainings, their scores and models. Do not publish it. The duration of
        the comparison depends on that number too.
    """
    if restart is None:
        recorded.require_same(out, recorded.describe(spec))  # before the data are loaded
    data, cost = check(spec), price(spec)
    if restart is not None:
        shared = shared_budget(spec)  # it must have room for one more comparison before a folder moves
        if shared is not None and shared.spent(besides=cost.releases) > shared.total_epsilon:
            raise _too_much(spec, cost, shared)
        restart()
    was_there, is_new = out.exists(), not (out / "spec.json").exists()
    recorded.claim(out, recorded.describe(spec))
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
    if not in_phase(read_records(out), "final"):
        with bars(shown=progress) as bar:
            carry_out(([run] for run in _CHOOSERS[cost.way](spec, place, bar)), place, data, bar)
            place.publish(data)
    return read_records(out)


def check(spec: Spec) -> DataSet:
    """Load the data, and raise the errors that `compare` raises before it commits anything. Nothing is written."""
    if spec.privacy.delta > 1 / spec.privacy.num_examples:  # the budget would refuse it after the data are loaded
        condition = f"to be at most 1 / num_examples = {1 / spec.privacy.num_examples:.3g}"
        raise expected("compare", "privacy.delta", condition, spec.privacy.delta)
    data = checked_data(spec.with_noise(1.0))  # its checks hold for any noise
    # A test result has no noise, so no training people may be among the test people.
    if data.measured_on == "training":
        raise expected("compare", "the test part", "to be apart from the training part", data.name)
    score_on, held_out = "" if spec.tuning is None else spec.tuning.score_on, len(data.validation)
    if score_on == "public" and data.public is None:
        raise expected("compare", "data.public", 'to be positive for score_on = "public"', 0)
    # Held-out people pay for scores alone, so a rule about each person by itself must choose them: a part of fixed size
    # would change with every person who comes or goes.
    if score_on == "held-out" and not (held_out and data.split == "unit"):
        remedy = 'give [data] file and validation_share, such as 0.2, or score_on = "training"'
        got = f"{data.name}, split by {data.split}" if held_out else "an empty part"
        raise expected("compare", "the validation part", "to be held out by a rule for each person", got, remedy)
    if held_out and score_on != "held-out":
        condition, remedy = "to be empty unless it pays for scores", 'leave it out, or set score_on = "held-out"'
        raise expected("compare", "the validation part", condition, "examples in it", remedy)
    return data


def _trials(spec: Spec, place: PaidFolder, bar: Progress) -> Iterator[Run]:
    candidates = candidates_of(spec)
    task = bar.add_task("trials", total=len(candidates), note="")
    for method, candidate in candidates:
        norm = f"  C{candidate.max_grad_norm:g}" if tunes_norm(spec) else ""
        bar.update(task, note=f"{method.name}{norm}  {recorded.rate_text(candidate)}")
        yield Run(method, candidate, None, "tuning")
        bar.advance(task)
    best = max(in_phase(read_records(place.out), "tuning"), key=lambda record: record["tuning_score"])
    chosen = next(pair for pair in candidates if (pair[0].name, pair[1]) == (best["method"], candidate_of(best)))
    yield Run(*chosen, None, "final")


def _select(spec: Spec, place: PaidFolder, bar: Progress) -> Iterator[Run]:
    candidates = candidates_of(spec)
    place.require_kept(place.selection)
    chosen = _secret_choice(place.selection, spec, len(candidates))
    place.mark(place.selection)
    bar.add_task("selection", total=None, completed=0, note="of a secret number of trainings")
    for number, index in enumerate(chosen):
        yield Run(*candidates[index], None, "final", secret=number)


_CHOOSERS: dict[Way, Callable[[Spec, PaidFolder, Progress], Iterator[Run]]] = {
    "none": lambda spec, *_: iter([Run(*candidates_of(spec)[0], None, "final")]),
    "trials": _trials,
    "select": _select,
}


def _secret_choice(path: Path, spec: Spec, count: int) -> list[int]:
    """Return the candidates of "select", by index: a random number of independent draws, from system entropy."""
    # A file under raw/ holds them, NOT private, so that a resumed comparison keeps them.
    if not path.exists():
        assert spec.tuning is not None
        number = draw_repetitions(spec.tuning.mean_runs, spec.tuning.shape)
        chosen = [secrets.randbelow(count) for _ in range(number)]
        recorded.make_secret(path.parent)  # the number of trainings is secret, and so are the other scores
        complete = path.with_suffix(f".{os.getpid()}")
        complete.write_text(f"{json.dumps(chosen)}\n")
        with suppress(FileExistsError):  # another process was first
            os.link(complete, path)
        complete.unlink()
    return json.loads(path.read_text().splitlines()[0])


def _tested(spec: Spec, model: nn.Module, data: DataSet) -> Record:
    """Measure the final model on the test set, each person once. NOT private for the people in it."""
    (losses,), names = unit_values(model, data.test, data, ["loss"]), reported(spec, data)
    found: Record = {"measured_on": "test", "test_loss": losses.mean().item(), "test_accuracy": None}
    measured = list(dict.fromkeys([*filter(None, [data.score]), *names]))
    values = metrics_of(model, data.test, data, measured, {})
    ends = intervals_of(model, data.test, data, measured)
    if data.score is not None:
        found |= {"test_accuracy": values[data.score], "interval": ends[data.score]} | constants(data.test, data)
    if names:
        found |= {"metrics": {name: values[name] for name in names}, "intervals": {name: ends[name] for name in names}}
    return found


def outcome_of(spec: Spec, cost: Price, records: Sequence[Record], place: PaidFolder) -> dict[str, Any]:
    """Return the result of a private comparison by name."""
    last = next(record for record in records if record["phase"] == "final")
    chosen, tried = ("method", "max_grad_norm", "noise_step", "own"), in_phase(records, "tuning")
    trials = [{name: record[name] for name in chosen} | {"score": record["tuning_score"]} for record in tried]
    return {
        **{name: last[name] for name in chosen},
        "r2" if last["score"] == "r2" else "accuracy": last["test_accuracy"],
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
