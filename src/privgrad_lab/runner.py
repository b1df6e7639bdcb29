"""Run the trainings of a Spec and record each as one JSON line; an interrupted comparison resumes where it stopped.

No epsilon covers a choice by training loss.
"""

import fcntl
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import quote

import torch
from rich.progress import Progress
from torch import nn

from privgrad import optim
from privgrad.data import DataSet
from privgrad.diagnostics import RawRecorder, ReleasedStats
from privgrad.errors import expected
from privgrad.heads.head import declared, privacy_of
from privgrad.optim.debiased import Debiased
from privgrad.plan import PrivacyPlan
from privgrad.plugins import optional
from privgrad.private_gradient import PrivateGradient, RawStep
from privgrad.progress import bars, note
from privgrad.training.fitting import fit
from privgrad.training.run import FitResult
from privgrad_lab import build
from privgrad_lab import records as recorded
from privgrad_lab.featuring import own, save_head
from privgrad_lab.metrics import constants, intervals_of, measure, metrics_of, reported, unit_values
from privgrad_lab.records import Record, candidate_of
from privgrad_lab.spec import Candidate, MethodTable, Spec
from privgrad_lab.tuner import at_rate, best_candidate, beyond_edge, measurement_of, wider

Phase = Literal["tuning", "final"]


@dataclass(frozen=True)
class Run:
    """One training of a comparison: a method with its tuned values, a seed and a phase."""

    method: MethodTable
    candidate: Candidate
    seed: int | None
    phase: Phase
    secret: int | None = None  # the number of a training of which nothing is published unless it is the best

    def folder(self, out: Path) -> Path:
        """Return the folder of the run's ledger and checkpoint."""
        if self.secret is not None:
            return out / "raw" / "runs" / f"{self.secret}"
        former = out / "runs" / f"{self.name}-seed{self.seed}"  # its name in earlier versions, without a seed
        return former if former.exists() else out / "runs" / self.name

    @property
    def name(self) -> str:
        """The name of the run's folder, if that is not secret."""
        norm = "" if self.method.max_grad_norm is None else f"-C{self.candidate.max_grad_norm:g}"
        radius = "" if self.candidate.radius is None else f"-r{self.candidate.radius:g}"
        local = "" if self.candidate.local_lr is None else f"-local{self.candidate.local_lr:g}"
        name, own = (quote(text, safe=" ,;+=()") for text in (self.method.name, recorded.own_text(self.candidate.own)))
        own = own and f"-{own}"  # quoted, so that no two runs share a folder
        seed = "" if self.seed is None else f"-seed{self.seed}"
        return f"{name}{norm}-{recorded.rate_text(self.candidate)}{radius}{local}{own}-{self.phase}{seed}"


def find_record(records: Sequence[Record], run: Run) -> Record | None:
    """Return the record of a run, or None if there is none yet."""
    wanted = (run.method.name, run.candidate, run.seed, run.phase)
    return next((r for r in records if (r["method"], candidate_of(r), r["seed"], r["phase"]) == wanted), None)


class Prepared(NamedTuple):
    """The parts of one training, ready for `fit`."""

    model: nn.Module
    plan: PrivacyPlan
    private_grad: PrivateGradient
    optimizer: optim.PrivateOptimizer
    method: MethodTable  # with the candidate's values of `tune`
    released: ReleasedStats | None  # if the method has a private distribution of norms


def prepare(spec: Spec, run: Run, data: DataSet) -> Prepared:
    """Make model, plan, optimizer and PrivateGradient of a run from public examples at most; nothing is charged."""
    if run.seed is not None:
        torch.manual_seed(run.seed)
    else:
        torch.seed()  # the first weights of a private run depend on nothing that came before
    model = build.make_model(spec, data)
    plan = spec.plan(run.seed, run.method, run.candidate.max_grad_norm, tuning=run.phase == "tuning")
    method = run.method.at(run.candidate)
    public = build.public_gradient(method, model, data)
    build.warm_start(method, model, data)
    optimizer = method.make(model.named_parameters(), public=public, steps=plan.steps)
    made = build.preconditioner(method.precondition, public, model, data)
    # First weights, preconditioner or optimizer depend on the public examples; a preconditioner names them by itself.
    sources = [public and public.source, data.extractor and declared(data.extractor)]
    others = [source for source in sources if source and source != (made and made.source)]
    parts = method.parts(spec.privacy.privacy_unit) | {"precondition": made}
    private_grad = build.private_gradient(spec, model, plan, data, side_information="; ".join(others) or None, **parts)
    has_distribution = method.norm_bins is not None or method.adaptive_clip is not None
    released = ReleasedStats(private_grad) if has_distribution else None
    return Prepared(model, plan, private_grad, optimizer, method, released)


def facts_of(run: Run, made: Prepared, data: DataSet, result: FitResult) -> Record:
    """Return the part of a run's record that every kind of comparison has: settings, privacy and speed."""
    plan = made.plan
    assert plan.delta is not None
    return {
        "method": run.method.name,
        "non_private": run.method.non_private,
        **made.method.facts(),
        "bands": plan.bands,
        **run.candidate._asdict(),
        "noise_step": _noise_step(run, made.optimizer),
        "seed": run.seed,
        "phase": run.phase,
        "epsilon": result.ledger.epsilon(delta=plan.delta),
        "simulates_epsilon": made.private_grad.simulated_epsilon,
        "delta": plan.delta,
        "sampling": plan.sampling,
        "score": data.score,
        "device": next(made.model.parameters()).device.type,
        "side_information": made.private_grad.ledger.plan_facts["side_information"],
        "released": None if made.released is None else made.released.summary(),
        "fraction_floored": made.optimizer.fraction_floored() if isinstance(made.optimizer, Debiased) else None,
        "updates": result.updates,
        "seconds": result.seconds,  # times depend on the data; a private comparison leaves them out
        "examples_per_second": result.examples_per_second,
    }


def _noise_step(run: Run, optimizer: optim.PrivateOptimizer) -> float | None:
    """Return the noise step of a training's peak rate; None for one without it, and without noise."""
    if run.candidate.noise_step is not None:
        return run.candidate.noise_step
    if run.method.assumed_noise_std is not None:
        return None
    for group in optimizer.param_groups:  # the training is over, and a schedule may have lowered the rate
        group["lr"] = run.candidate.lr
    step = optimizer.noise_step
    return float(f"{step:.4g}") if step > 0 else None


class Payer(Protocol):
    """A payer for the trainings in a folder: it opens their ledgers, and decides what is measured and kept of them."""

    out: Path

    def spec_of(self, run: Run) -> Spec: ...  # with the noise of the run

    def train(self, spec: Spec, run: Run, data: DataSet, made: Prepared, fitted: Callable[..., FitResult]) -> Record:
        """Call `fitted`, which is `fit` of a run and takes further options of it, and return the run's record."""
        ...

    def claim(self, run: Run) -> AbstractContextManager[bool]:
        """Say whether no other process is at work on a run; until the end of the context, none will be."""
        ...

    def keep(self, run: Run, record: Record) -> None:
        """Write the record of a run, unless it must stay hidden."""


def carry_out(
    batches: Iterable[Sequence[Run]],
    payer: Payer,
    data: DataSet,
    progress: bool | Progress,
    watch: Callable[[Run], None] = lambda run: None,
) -> None:
    """Do each run that has no record yet. A chooser yields runs that need not wait for each other.

    It sees the records of its earlier runs. Processes may share a folder: each does the runs that no other is doing.
    `watch` gets each run before it starts.
    """

    def is_done(run: Run) -> bool:
        return find_record(recorded.read_records(payer.out), run) is not None

    for batch in batches:
        records = recorded.read_records(payer.out)
        waiting = [run for run in batch if find_record(records, run) is None]
        while waiting:
            for run in waiting.copy():
                with payer.claim(run) as is_free:
                    if is_free:
                        waiting.remove(run)
                        if not is_done(run):
                            watch(run)
                            payer.keep(run, _train_one(payer.spec_of(run), run, data, payer, progress))
                            bar = bars(shown=progress)
                            if bar.tasks and run.secret is None and not bar.console.is_terminal:
                                note(bar, f"trained {run.name}")  # a file shows no bars
            if waiting:
                time.sleep(1)


def _train_one(spec: Spec, run: Run, data: DataSet, payer: Payer, progress: bool | Progress) -> Record:
    spec, data = own(spec, run.method, data)
    made = prepare(spec, run, data)
    fitted = partial(
        fit,
        made.private_grad,
        made.optimizer,
        data.train,
        scheduler=spec.schedule_of(run.method),
        ema_decay=spec.run.ema_decay,
        output_dir=run.folder(payer.out),
        progress=progress,
    )
    with warnings.catch_warnings(), build.autocast(spec):
        if made.plan.privacy_unit == "user":  # `build.make_data` has checked that a row holds all data of one person
            warnings.filterwarnings("ignore", "NOT PRIVATE: the plan declares")
        return payer.train(spec, run, data, made, fitted)


class Free:
    """A payer with a ledger for each training, which measures on validation or test examples along the training."""

    def __init__(self, spec: Spec, out: Path, **also: str | None) -> None:
        self._spec, self.out, self._also = spec, out, also  # `also` are facts for each record

    def spec_of(self, run: Run) -> Spec:
        return self._spec

    @contextmanager
    def claim(self, run: Run) -> Generator[bool]:
        folder = run.folder(self.out)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "claim").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with its process
            except BlockingIOError:
                yield False
            else:
                yield True

    def keep(self, run: Run, record: Record) -> None:
        recorded.append(self.out, [record | self._also])

    def train(self, spec: Spec, run: Run, data: DataSet, made: Prepared, fitted: Callable[..., FitResult]) -> Record:
        plan, folder = made.plan, run.folder(self.out)
        by_train_loss = spec.tuning is not None and spec.tuning.by == "train_loss"
        if by_train_loss and run.phase == "final" and spec.tuning_scale == 1:
            # Then tuning is the same training with the same measurements.
            tuned = find_record(recorded.read_records(self.out), replace(run, phase="tuning"))
            if tuned is not None:
                return tuned | {"phase": "final"}
        validated = run.phase == "tuning" and not by_train_loss
        # If tuning uses the training loss, a tuning run may later serve as a final run: it needs the diagnostics too.
        recorder = RawRecorder(made.optimizer) if spec.run.diagnose and not validated else None
        if recorder is not None:
            made.private_grad.register_raw_observer(recorder.observe)
        clipped = _ClipFraction(plan.steps)
        if plan.seed is not None and not run.method.non_private:
            made.private_grad.register_raw_observer(clipped.observe)
        board = None
        if spec.run.tensorboard:
            remedy = "pip install 'privgrad[tensorboard]', or set run.tensorboard = false"
            library = optional("experiments", "tensorboard", "privgrad.integrations.tensorboard", remedy)
            names = {} if data.score is None else {"accuracy": data.score}
            board = library.TensorBoard(folder / "tensorboard", names=names)

        def evaluate(model: nn.Module) -> dict[str, Any]:
            measured = measure(model, data.validation if validated else data.test, data)
            measured |= {} if recorder is None else recorder.row()
            return measured if plan.seed is not None else self._without_raw(run, made, measured)

        result = fitted(evaluate=evaluate, num_evaluations=spec.run.num_evaluations, on_evaluate=board)
        if board is not None:
            board.close()
        model, last = result.averaged or made.model, result.curve[-1]
        part = "validation" if validated else "test"
        record: Record = facts_of(run, made, data, result) | {
            "measured_on": data.measured_on,
            **dict.fromkeys(("test_accuracy", "test_loss", "validation_accuracy", "validation_loss")),
            **{f"{part}_{name}": last[name] for name in ("accuracy", "loss", "absolute_error") if name in last},
            **({} if validated else constants(data.test, data)),
            **({} if clipped.fraction is None else {"raw_clip_fraction": clipped.fraction}),
            # Histograms are kept of the last evaluation only.
            "curve": [{k: v for k, v in row.items() if k != "raw_moments"} for row in result.curve[:-1]] + [last],
            "data": build.sizes_text(spec.data, data, plan),
        }
        if validated:
            assert spec.tuning is not None
            by, key = spec.tuning.by, measurement_of(spec.tuning.by)
            if key not in record:
                record[key] = metrics_of(model, data.validation, data, [by], {})[by]
        elif names := reported(spec, data):
            known = {} if data.score is None else {data.score: record["test_accuracy"]}
            record["metrics"] = metrics_of(model, data.test, data, names, known)
        if plan.seed is None and not validated and (name := recorded.leading([record])) != "test_loss":
            name = data.score if name == "test_accuracy" else name
            record["test_interval"] = intervals_of(model, data.test, data, [f"{name}"])[f"{name}"]
        if run.phase == "final":
            place = (self.out if run.seed is None else folder) / "head"
            record["head"] = save_head(model, data, place, privacy_of(plan, result.ledger), result)
        if by_train_loss and plan.seed is not None:  # not private; only a comparison, which has seeds, tunes by it
            record["raw_train_loss"] = float(unit_values(model, data.train, data, ["loss"], by_label=True)[0].mean())
        return record

    def _without_raw(self, run: Run, made: Prepared, measured: dict[str, Any]) -> dict[str, Any]:
        """Return what a private run may show; write what was computed before the noise to a secret file."""
        raw = {name: value for name, value in measured.items() if name.startswith("raw_")}
        if raw:
            path = self.out / "raw" / f"{run.name}.jsonl"
            recorded.make_secret(path.parent)
            with path.open("a") as file:
                file.write(json.dumps({"step": made.private_grad.ledger.releases} | raw) + "\n")
        return {name: value for name, value in measured.items() if not name.startswith("raw_")}


class _ClipFraction:
    """The share of examples whose gradient was clipped in the last tenth of the steps. NOT private."""

    def __init__(self, steps: int) -> None:
        self._first, self._clipped = steps - math.ceil(steps / 10), list[bool]()

    @property
    def fraction(self) -> float | None:
        """The share; None before such a step, and without examples."""
        return recorded.mean(self._clipped)

    def observe(self, raw: RawStep) -> None:
        if raw.step >= self._first:
            self._clipped += (raw.clipping.raw_factors < 1).tolist()


def train(spec: Spec, out: Path, *, seed: int | None = None, progress: bool | Progress = True) -> list[Record]:
    """Train the only method of a spec, and return its record, which is also in out/runs.jsonl.

    Without a research seed, the noise comes from the operating system's entropy. A second call resumes an interrupted
    training. `progress` shows a bar; or `notes_only()` says only where a training resumes.
    """
    spec.plan(None)  # it refuses a total epsilon
    if len(spec.methods) != 1 or spec.is_tuned(spec.methods[0]):
        got, remedy = [method.name for method in spec.methods], "keep one in the file, or run `privgrad compare`"
        raise expected("train", "methods", "to be exactly one, with one lr and one max_grad_norm", got, remedy)
    run = Run(spec.methods[0], spec.grid(spec.methods[0])[0], seed, "final")
    recorded.require_same(out, recorded.describe(spec))
    if others := {record["seed"] for record in recorded.read_records(out)} - {seed}:
        condition, remedy = f"to hold runs of seed {seed}", "choose another --out"
        raise expected("train", f"{out}", condition, f"seed {others.pop()}", remedy)
    data = open_folder(spec, out)
    if find_record(recorded.read_records(out), run) is not None:
        note(bars(shown=progress), f"already complete: the training in {out}; a new one needs another folder")
    carry_out([[run]], Free(spec, out), data, progress)
    return recorded.arranged(spec, recorded.read_records(out))


def compare(
    spec: Spec,
    out: Path,
    *,
    progress: bool | Progress = True,
    begin: Callable[[DataSet], None] | None = None,
    jobs: int = 1,
) -> list[Record]:
    """Train every method under one budget: tune each method, then train it with every seed.

    The records are in the order of the methods; out/runs.jsonl has that of the runs. Each training has its own ledger.
    `begin` gets the data before the first training. `jobs` processes train at once, and each needs the memory of one.
    """
    data, tuning = open_folder(spec, out), spec.tuning
    if any(record["seed"] is None for record in recorded.read_records(out)):  # a private run, without a research seed
        got = "a run of `privgrad train`"
        raise expected("compare", f"{out}", "to hold runs of a comparison", got, "choose another --out")
    if begin is not None:
        begin(data)
    with bars(shown=progress) as bar:
        payer = Free(spec, out, tuned_by=None if tuning is None else measurement_of(tuning.by))
        research = Research(spec, payer, bar)
        with _helpers(spec, out, jobs - 1):
            carry_out(research.runs(), payer, data, bar, research.watch)
            research.show()
    return recorded.arranged(spec, recorded.read_records(out))


@contextmanager
def _helpers(spec: Spec, out: Path, count: int) -> Generator[None]:
    """Let further processes do runs of the same folder. If one ends early, the others do what it leaves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // (count + 1)))
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
    helpers = [
        context.Process(target=_help, args=(spec, out, torch.get_num_threads()), daemon=True) for _ in range(count)
    ]
    for helper in helpers:
        helper.start()
    try:
        yield
    finally:
        for helper in helpers:
            helper.terminate()
            helper.join()
        torch.set_num_threads(threads)


def _help(spec: Spec, out: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # the first process says the same
    compare(spec, out, progress=False)


class Research:
    """The chooser of a comparison for research: it tunes each method, and then trains it with every seed."""

    def __init__(self, spec: Spec, payer: Free, bar: Progress) -> None:
        self._spec, self._payer, self._bar = spec, payer, bar
        self._seeds = [] if spec.tuning is None else spec.tuning.seeds
        self._by = "accuracy" if spec.tuning is None else spec.tuning.by
        self._tried: set[tuple[str, Candidate]] = set()
        tuned = [method for method in spec.methods if spec.is_tuned(method)]
        planned = sum(len(spec.grid(method)) for method in tuned) * len(self._seeds)
        self._total, self._planned = planned + len(spec.methods) * len(spec.run.seeds), set[str]()
        self._task = bar.add_task("runs", total=self._total, note="")
        if done := len(recorded.read_records(payer.out)):
            note(bar, f"already complete: {done:,} trainings in {payer.out}")

    def runs(self) -> Iterator[list[Run]]:
        """Yield the runs that tune the methods that share a grid, then those of each other one, and the final runs."""
        spec, extend = self._spec, self._spec.tuning is not None and self._spec.tuning.extend
        fair = [method for method in spec.methods if spec.is_tuned(method) and spec.shares_grid(method)]
        yield from self._together((method, spec.grid(method)) for method in fair)
        while fair and extend and (rates := wider(self._seen(), [m.name for m in fair], self._by)) is not None:
            more = [
                (method, [at_rate(candidate, rates[method.name]) for candidate in spec.grid(method)]) for method in fair
            ]
            yield from self._together(more)
        for method in spec.methods:
            best = spec.grid(method)[0]
            if spec.is_tuned(method) and method not in fair:
                yield from self._together([(method, spec.grid(method))])
                grows = extend and not method.has_fixed_rate
                while grows and (beyond := beyond_edge(self._seen(), method.name, self._by)) is not None:
                    yield from self._together([(method, [beyond])])
            if spec.is_tuned(method):
                best = best_candidate(self._seen(), method.name, self._by)
            yield from self._together([(method, [best])], "final")

    def _together(
        self, tried: Iterable[tuple[MethodTable, Iterable[Candidate]]], phase: Phase = "tuning"
    ) -> Iterator[list[Run]]:
        pairs = [(method, candidate) for method, candidates in tried for candidate in dict.fromkeys(candidates)]
        self._tried |= {(method.name, candidate) for method, candidate in pairs}
        seeds = self._spec.run.seeds if phase == "final" else self._seeds
        batch = [Run(method, candidate, seed, phase) for method, candidate in pairs for seed in seeds]
        self._planned |= {run.name for run in batch}
        yield batch

    def watch(self, run: Run) -> None:
        """Show which run comes next, and how many are done, by any process."""
        text = f"{run.phase}  {run.method.name}  {recorded.rate_text(run.candidate)}  seed {run.seed}"
        self._bar.update(self._task, note=text)
        self.show()

    def show(self) -> None:
        """Show how many runs are done, by any process."""
        done = len(recorded.read_records(self._payer.out))
        self._bar.update(self._task, completed=done, total=max(self._total, len(self._planned)))

    def _seen(self) -> list[Record]:
        """Return the records that an uninterrupted comparison has here, so that a resumed one chooses alike."""
        records = recorded.read_records(self._payer.out)
        return [record for record in records if (record["method"], candidate_of(record)) in self._tried]


def open_folder(spec: Spec, out: Path, description: str | None = None) -> DataSet:
    """Load and check the data, then claim the folder for the spec. Nothing is written before every check has passed."""
    text = description or recorded.describe(spec)  # of spec.json
    recorded.require_same(out, text)  # before the data are loaded
    data = checked_data(spec)
    recorded.claim(out, text)
    return data


def checked_data(spec: Spec) -> DataSet:
    """Load the data, and check that the models, the features and the plan suit them."""
    build.device_of(spec)
    spec.plan(None, tuning=True)  # its refusals and warnings come before the data are loaded
    data = build.make_data(spec)
    for method in spec.methods:
        build.require_model(*own(spec, method, data))
    return data
