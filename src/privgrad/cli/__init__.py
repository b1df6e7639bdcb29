"""The command line: it parses the arguments, calls the library and prints the results."""

import importlib
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import nn

from privgrad import accounting
from privgrad import audit as auditing
from privgrad.accounting import Accountant, Release
from privgrad.errors import PrivacyError, expected
from privgrad.experiments import runner
from privgrad.experiments.audit_spec import games_of
from privgrad.experiments.spec import Spec, load_spec
from privgrad.gradient.validation import find_problems
from privgrad.ledger import Ledger

app = typer.Typer(
    help="Differentially private training for PyTorch that corrects the bias in private gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The experiment; examples/ has some.")]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for report, ledgers and checkpoints. Default: runs/<name of SPEC or ITEM>."),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Move an existing folder aside and start again, instead of resuming.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, on the last line.")]
Delta = Annotated[float, typer.Option(help="Delta, in (0, 1); at most 1 / num_examples.")]
SampleRate = Annotated[float | None, typer.Option(help="Poisson sampling rate q, in (0, 1].")]
Steps = Annotated[int | None, typer.Option(help="Number of steps T.")]
NoiseMultiplier = Annotated[float | None, typer.Option(help="Noise multiplier sigma.")]


def _tell_version(wanted: bool) -> None:
    if wanted:
        _out.print(f"privgrad {metadata.version('privgrad')}", highlight=False)
        raise typer.Exit


@app.callback()
def privgrad(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options that come before a command."""


@app.command()
def train(
    spec: SpecPath,
    out: OutFolder = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Research seed: makes the run reproducible and NOT private. Default: the system's entropy."),
    ] = None,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Train one method privately; write ledger, checkpoints and a report. Run it again to resume."""
    loaded, folder = _prepare(spec, out, restart)
    with _stoppable():
        records = runner.train(loaded, folder, seed=seed, progress=not as_json)
    _report(loaded, records, folder, as_json=as_json)


@app.command()
def compare(spec: SpecPath, out: OutFolder = None, restart: Restart = False, as_json: AsJson = False) -> None:
    """Train several methods under one budget, tuned on one grid, over several seeds. Run it again to resume."""
    loaded, folder = _prepare(spec, out, restart)
    with _stoppable():
        records = runner.compare(loaded, folder, progress=not as_json)
    _report(loaded, records, folder, as_json=as_json)


@app.command()
def reproduce(
    item: Annotated[
        str | None, typer.Argument(metavar="PAPER/ITEM", help="The table or figure. Without it, list all of them.")
    ] = None,
    out: OutFolder = None,
    data: Annotated[Path | None, typer.Option(help="The paper's own data, where the default is a stand-in.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a tiny version (seconds to minutes); its numbers mean nothing.")
    ] = False,
    so_far: Annotated[bool, typer.Option("--so-far", help="Run nothing; show the results so far.")] = False,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or figure of a paper and show it next to the paper's numbers. Run it again to resume."""
    from privgrad.papers import reproduce as papers

    if item is None:
        _out.print("\n".join(papers.items()))
        return
    folder = Path("runs") / item.replace("/", "-") if out is None else out
    if smoke and out is None:
        folder = folder.with_name(f"{folder.name}-smoke")
    if restart and so_far:
        remedy = "leave one out: --so-far shows the results so far, and --restart moves them aside"
        got = "--so-far and --restart"
        raise expected("privgrad reproduce", "--so-far or --restart", "to be given alone", got, remedy)
    if restart and (aside := runner.restart(folder)):
        _err.print(f"moved {folder} to {aside}")
    with _stoppable():
        found, table = papers.reproduce(
            item, folder, data=data, smoke=smoke, so_far=so_far, progress=not as_json, command=_command()
        )
    if as_json:
        print(json.dumps(_finite(found)))  # noqa: T201
        return
    _out.print(table)
    _out.print(f"Records: {folder}")


@app.command()
def epsilon(
    delta: Delta,
    ledger: Annotated[
        list[Path] | None,
        typer.Argument(help="Ledger files; several are also composed. Or give the three numbers instead."),
    ] = None,
    noise_multiplier: NoiseMultiplier = None,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    as_json: AsJson = False,
) -> None:
    """Compute the epsilon that the releases in ledgers have cost, or that a plan would cost.

    The cost of a ledger is recomputed from its file alone.
    """
    answer: dict[str, Any] = {"delta": delta}
    if ledger and noise_multiplier is sample_rate is steps is None:
        records = {path: Ledger(path, read_only=True) for path in ledger}
        found = {path: _cost(record, delta, f"{path}: " if ledger[1:] else "") for path, record in records.items()}
        answer |= _together(records, found, delta) if ledger[1:] else found[ledger[0]]
    elif not ledger and noise_multiplier is not None and sample_rate is not None and steps is not None:
        answer |= {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
        answer |= _epsilons_of(Release(noise_multiplier, sample_rate, count=steps), delta)
    else:
        options = {"--noise-multiplier": noise_multiplier, "--sample-rate": sample_rate, "--steps": steps}
        given = ["LEDGER"] * bool(ledger) + [name for name, value in options.items() if value is not None]
        condition = f"to be either LEDGER or {', '.join(options)}"
        remedy = "give a ledger, or --noise-multiplier, --sample-rate and --steps"
        raise expected("privgrad epsilon", "the arguments", condition, ", ".join(given) or "no arguments", remedy)
    if answer.get("covered_by_accountant") is False:
        _tell(
            "note",
            "yellow",
            "batches of fixed size: epsilon is computed as if they were Poisson, and no accountant covers that",
        )
    if "ledgers" in answer and not as_json:
        _out.print(_ledger_table(answer))
    else:
        _show(answer, as_json)


@app.command()
def calibrate(
    target_epsilon: Annotated[float, typer.Option(help="The largest epsilon allowed.")],
    delta: Delta,
    sample_rate: Annotated[
        float,
        typer.Option(help="Poisson sampling rate q, in (0, 1]: expected batch size / examples, or cohort / users."),
    ],
    steps: Steps = None,
    noise_multiplier: NoiseMultiplier = None,
    as_json: AsJson = False,
) -> None:
    """Compute the noise multiplier for a number of steps, or the number of steps for a noise multiplier."""
    if (steps is None) == (noise_multiplier is None):
        got = f"--steps {steps} and --noise-multiplier {noise_multiplier}"
        remedy = "give the one that you know; the command computes the other"
        raise expected("privgrad calibrate", "one of --steps and --noise-multiplier", "to be given", got, remedy)
    budget: dict[str, Any] = {"target_epsilon": target_epsilon, "delta": delta, "sample_rate": sample_rate}
    if noise_multiplier is None:
        assert steps is not None
        noise_multiplier = accounting.calibrate_noise_multiplier(**budget, steps=steps)
    else:
        steps = accounting.steps_for_budget(**budget, noise_multiplier=noise_multiplier)
    answer = budget | {"noise_multiplier": noise_multiplier, "steps": steps}
    _show(answer | _epsilons_of(Release(noise_multiplier, sample_rate, count=steps), delta), as_json)


@app.command()
def audit(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC.toml", help="Experiment: audit one step of its methods, on its data.")
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="Claimed epsilon; may be repeated. Default: 1, 3, 8; with a SPEC, from its noise."),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Audit only this method; may be repeated.")] = None,
    trials: Annotated[int, typer.Option(help="Number of guesses about one step.")] = 60_000,
    confidence: Annotated[float, typer.Option(help="Probability that all bounds hold together.")] = 0.95,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for audits.jsonl and audits.md.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the library's methods and bound epsilon from below. Exit code 1 if a bound exceeds its claim.

    NOT private with a SPEC: the output is computed from the data of the SPEC.
    """
    if spec is None:
        count, found = auditing.rows(method, epsilon or (1.0, 3.0, 8.0), trials=trials, confidence=confidence)
    else:
        games = games_of(load_spec(spec), method, epsilon)
        count, each = len(games), 1 - (1 - confidence) / len(games)
        found = (auditing.distinguish(game, trials=trials, confidence=each) for game in games)
    about = (
        f"Claims at one delta; all bounds hold together with probability {confidence:g}. "
        "A sixth of the runs chooses thresholds."
    )
    if spec is not None:
        about = f"NOT private: computed from the data of {spec.name}. Each claim is for one step at rate 1. {about}"
    done = _audited(count, found, out, about)
    passed = all(one.passed for one in done)
    if as_json:
        rows = [one.as_record() for one in done]
        print(json.dumps(_finite({"passed": passed, "confidence": confidence, "audits": rows})))  # noqa: T201
    else:
        _out.print(_audit_table(done, about))
    raise typer.Exit(0 if passed else 1)


@app.command()
def doctor(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function (or class) that returns the model.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the modules that block private training, with a remedy for each. Exit code 1 if there are any."""
    problems = find_problems(_make(factory))
    if as_json:
        print(json.dumps({"problems": [asdict(problem) for problem in problems]}))  # noqa: T201
    elif not problems:
        _out.print("Nothing in the structure of this model blocks private training.")
    else:
        table = Table(title=f"Problems that block private training: {len(problems)}")
        for name in ("module", "type", "problem", "remedy"):
            table.add_column(name, overflow="fold")
        for problem in problems:
            table.add_row(problem.path or "(the model)", problem.module, problem.what, problem.remedy)
        _out.print(table)
    raise typer.Exit(1 if problems else 0)


def main() -> None:
    """Run the command line. Report bad input in one line and exit with code 2."""
    warnings.showwarning = _show_warning
    _note.cache_clear()
    try:
        app()
    except PrivacyError as error:
        _tell("error", "red", error)
        sys.exit(2)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _note(str(message))


@cache
def _note(message: str) -> None:
    """Print a note once, although every training builds a plan and every plan warns."""
    _tell("note", "yellow", message)


def _tell(kind: str, color: str, message: object) -> None:
    """Print one line on stderr. It is text, not markup, because messages quote user input."""
    _err.print(Text.assemble((f"{kind}: ", color), str(message)), soft_wrap=True)


@contextmanager
def _stoppable(
    go_on: str = "run the same command again, without --restart, to resume",
) -> Generator[None]:
    """Let SIGINT and SIGTERM end a training in order, and print how to resume.

    `fit` saves its state when it is interrupted.
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        _tell("stopped", "yellow", go_on)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare(spec: Path, out: Path | None, restart: bool) -> tuple[Spec, Path]:
    loaded = load_spec(spec)
    folder = Path("runs") / spec.stem if out is None else out
    if restart and (aside := runner.restart(folder)):
        _err.print(f"moved {folder} to {aside}")
    return loaded, folder


def _report(spec: Spec, records: list[runner.Record], folder: Path, *, as_json: bool) -> None:
    # matplotlib is an optional extra and slow to import, so only commands that draw import it.
    from privgrad.experiments.records import in_phase, summarize
    from privgrad.experiments.report.metadata import metadata_of
    from privgrad.experiments.report.page import summary_table, total_text, write_report

    said = metadata_of(spec, records, folder, command=_command())
    index = write_report(records, said, folder)
    if as_json:
        print(json.dumps(_finite({"report": str(index), "methods": summarize(records)})))  # noqa: T201
        return
    _out.print(summary_table(records))
    if said["total_epsilon"] is not None:
        _out.print(Text(total_text(said["total_epsilon"], tuned=bool(in_phase(records, "tuning")))))
    _out.print(f"Report: {index}")


def _audited(count: int, found: Iterator[auditing.Audit], out: Path | None, about: str) -> list[auditing.Audit]:
    """Return all audits; write each to disk as soon as it is done."""
    if out is not None and out.exists() and not out.is_dir():
        raise expected("privgrad audit", "--out", "to be a folder", f"the file {out}", "give a folder")
    run = {"command": _command(), "date": f"{date.today()}", "machine": f"{os.cpu_count()} cores"}
    head = f"{run['date']}, `{run['command']}`. {about}\n\n"
    done: list[auditing.Audit] = []
    with _stoppable("finished audits are in the folder of --out, if it was given"), Progress(console=_err) as bar:
        task = bar.add_task("", total=count)
        for one in found:
            done.append(one)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                with (out / "audits.jsonl").open("w" if len(done) == 1 else "a") as file:
                    file.write(json.dumps(_finite(one.as_record() | run)) + "\n")
                (out / "audits.md").write_text(head + _markdown(done))
            bar.update(task, advance=1, description=one.name)
    return done


_AUDIT_COLUMNS = ("audited", "claim", "bound", "of", "assuming", "any", "trials", "passed")


def _audit_cells(one: auditing.Audit) -> list[str]:
    share = f"{one.bound / one.claim:.0%}" if one.claim else "–"
    assumed = next((kind for kind in one.bounds if kind not in ("any", "one run")), "nothing")
    numbers = [f"{one.claim:.3f}", f"{one.bound:.2f}", share, assumed, f"{one.bounds.get('any', one.bound):.2f}"]
    return [one.name, *numbers, f"{one.trials:,}", "yes" if one.passed else "NO"]


def _audit_table(done: list[auditing.Audit], about: str) -> Table:
    table = Table(title="Lower bounds on epsilon", caption=about)
    for name in _AUDIT_COLUMNS:
        table.add_column(name)
    for one in done:
        table.add_row(*map(Text, _audit_cells(one)))
    return table


def _markdown(done: list[auditing.Audit]) -> str:
    head, rule = "| " + " | ".join(_AUDIT_COLUMNS) + " |", "|---" * len(_AUDIT_COLUMNS) + "|"
    return "\n".join([head, rule, *("| " + " | ".join(_audit_cells(one)) + " |" for one in done)]) + "\n"


def _command() -> str:
    return "privgrad " + " ".join(sys.argv[1:])


def _epsilons(cost: Callable[[Accountant], float]) -> dict[str, float]:
    return {f"epsilon_{kind}": cost(kind) for kind in get_args(Accountant)}


def _epsilons_of(release: Release, delta: float) -> dict[str, float]:
    return _epsilons(lambda kind: accounting.epsilon([release], delta=delta, accountant=kind))


def _cost(ledger: Ledger, delta: float, place: str) -> dict[str, Any]:
    """Return the facts and the epsilons of one ledger, and print the notes on it."""
    facts = ledger.plan_facts
    covered = facts["sampling"] == "poisson"
    for note in _notes(ledger):
        _tell("note", "yellow", place + note)
    if delta > 1 / facts["num_examples"]:
        whole = "user" if facts.get("privacy_unit") == "user" else "record"
        _tell(
            "note",
            "yellow",
            f"{place}delta is above 1 / num_examples: even publishing one whole {whole} would be allowed",
        )
    costs = _epsilons(lambda kind: ledger.epsilon(delta=delta, accountant=kind, assume_poisson=not covered))
    return {"releases": ledger.releases, "covered_by_accountant": covered, **facts, **costs}


def _together(records: dict[Path, Ledger], found: dict[Path, dict[str, Any]], delta: float) -> dict[str, Any]:
    """Return the cost of each ledger, and of all their releases composed.

    The composed epsilon is at most the sum of the single ones.
    """
    promises = {
        f"{facts['neighboring_relation']} {facts.get('privacy_unit', 'example')}"
        for facts in (ledger.plan_facts for ledger in records.values())
    }
    if len(promises) > 1:
        got = " and ".join(sorted(promises))
        raise expected(
            "privgrad epsilon", "ledgers", "to protect the same unit", got, "give the ledgers of each unit separately"
        )
    covered = all(one["covered_by_accountant"] for one in found.values())
    charged = [release for ledger in records.values() for release in ledger.charged]
    return {
        "ledgers": [{"ledger": str(path), **one} for path, one in found.items()],
        "releases": sum(one["releases"] for one in found.values()),
        "covered_by_accountant": covered,
        **_epsilons(lambda kind: accounting.epsilon(charged, delta=delta, accountant=kind, assume_poisson=not covered)),
    }


def _ledger_table(answer: dict[str, Any]) -> Table:
    table = Table(title=f"At delta = {answer['delta']:g}", caption="Together: all releases composed.")
    table.add_column("ledger", overflow="fold")
    costs = [f"epsilon_{kind}" for kind in get_args(Accountant)]
    for name in ("releases", *costs):
        table.add_column(name.replace("_", " "), justify="right")
    for row in (*answer["ledgers"], {"ledger": "together", **answer}):
        table.add_row(Text(row["ledger"]), str(row["releases"]), *(f"{row[cost]:.6g}" for cost in costs))
    return table


def _notes(ledger: Ledger) -> Iterator[str]:
    """Yield the facts about a ledger that its numbers do not show."""
    if ledger.plan_facts.get("privacy_unit") == "user":
        yield "the privacy unit is a user with all their examples: read example as user, batch as cohort, step as round"
    if ledger.seeded_releases:
        yield f"{ledger.seeded_releases} releases were drawn under a research seed: predictable noise gives no privacy"
    if not ledger.releases:
        yield "nothing was charged to this ledger: if a model was trained in this folder, its ledger is missing"
    if ledger.was_cut_off:
        yield "the last line was cut off while it was written: nothing was released for it, so it is not counted"


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(_finite(answer)))  # noqa: T201
        return
    table = Table(show_header=False)
    for name, value in answer.items():
        table.add_row(name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
    _out.print(table)


def _finite(value: Any) -> Any:
    """Replace each number that is not finite by null, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make(factory: str) -> nn.Module:
    module_name, separator, name = factory.partition(":")
    remedy = "give package.module:function, importable from the current folder"
    if not separator or not name or not all(module_name.split(".")):
        raise expected("privgrad doctor", "factory", "to be MODULE:FACTORY", repr(factory), remedy)
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise expected("privgrad doctor", "factory", "to be importable", error, remedy) from error
    try:
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    except TypeError as error:
        remedy = "give a function that needs no arguments"
        raise expected("privgrad doctor", "factory", "to return a model", error, remedy) from error
    if not isinstance(model, nn.Module):
        raise expected("privgrad doctor", "factory", "to return an nn.Module", type(model).__name__, "return the model")
    return model
