"""The command that attacks methods and bounds their epsilon from below.

typer calls `audit` for `privgrad audit`. The privacy guarantee does not rest on this file.
"""

import os
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from privgrad import audit as auditing
from privgrad.cli.console import STDERR, STDOUT, AsJson, command_line, print_json, stoppable, to_json
from privgrad.errors import expected
from privgrad.experiments.audit_spec import games_of
from privgrad.experiments.load_spec import load_spec


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
        print_json({"passed": passed, "confidence": confidence, "audits": rows})
    else:
        STDOUT.print(_audit_table(done, about))
    raise typer.Exit(0 if passed else 1)


def _audited(count: int, found: Iterator[auditing.Audit], out: Path | None, about: str) -> list[auditing.Audit]:
    """Return all audits; write each to disk as soon as it is done."""
    if out is not None and out.exists() and not out.is_dir():
        raise expected("privgrad audit", "--out", "to be a folder", f"the file {out}", "give a folder")
    run = {"command": command_line(), "date": f"{date.today()}", "machine": f"{os.cpu_count()} cores"}
    head = f"{run['date']}, `{run['command']}`. {about}\n\n"
    done: list[auditing.Audit] = []
    kept = "finished audits are in the folder of --out, if it was given"
    with stoppable(lambda: kept), Progress(console=STDERR) as bar:
        task = bar.add_task("", total=count)
        for one in found:
            done.append(one)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                with (out / "audits.jsonl").open("w" if len(done) == 1 else "a") as file:
                    file.write(to_json(one.as_record() | run) + "\n")
                (out / "audits.md").write_text(head + _markdown(done))
            bar.update(task, advance=1, description=one.name)
    return done


_AUDIT_COLUMNS = ("audited", "claim", "bound", "of", "assuming", "any", "trials", "passed")


def _audit_cells(one: auditing.Audit) -> list[str]:
    """Return one audit as text, with one cell for each of `_AUDIT_COLUMNS`."""
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
