"""Commands that run the trainings of an experiment.

typer calls `train` and `compare` for the commands of these names. They call `experiments.runner` and
`experiments.report`. The privacy guarantee does not rest on this file.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from privgrad.cli.console import STDERR, STDOUT, AsJson, command_line, print_json, stoppable
from privgrad.experiments import runner
from privgrad.experiments.folder import Record
from privgrad.experiments.folder import restart as put_aside
from privgrad.experiments.load_spec import load_spec
from privgrad.experiments.spec import Spec

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The experiment; examples/ has some.")]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for report, ledgers and checkpoints. Default: runs/<name of SPEC or ITEM>."),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Move an existing folder aside and start again, instead of resuming.")
]


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
    with stoppable():
        records = runner.train(loaded, folder, seed=seed, progress=not as_json)
    _report(loaded, records, folder, as_json=as_json)


def compare(spec: SpecPath, out: OutFolder = None, restart: Restart = False, as_json: AsJson = False) -> None:
    """Train several methods under one budget, tuned on one grid, over several seeds. Run it again to resume."""
    loaded, folder = _prepare(spec, out, restart)
    with stoppable():
        records = runner.compare(loaded, folder, progress=not as_json)
    _report(loaded, records, folder, as_json=as_json)


def move_aside(folder: Path) -> None:
    """Move an existing folder aside and print its new path; `cli.reproduce` calls it too."""
    if aside := put_aside(folder):
        STDERR.print(f"moved {folder} to {aside}")


def _prepare(spec: Path, out: Path | None, restart: bool) -> tuple[Spec, Path]:
    """Read the spec, choose the folder of its trainings, and with `restart` move an existing folder aside.

    A folder that is moved aside keeps its ledgers. Their cost adds to that of the new trainings.
    """
    loaded = load_spec(spec)
    folder = Path("runs") / spec.stem if out is None else out
    if restart:
        move_aside(folder)
    return loaded, folder


def _report(spec: Spec, records: list[Record], folder: Path, *, as_json: bool) -> None:
    """Write the report of all trainings in the folder, and print its summary or, with `as_json`, its numbers."""
    # matplotlib is an optional extra and slow to import, so only commands that draw import it.
    from privgrad.experiments.records import in_phase, summarize
    from privgrad.experiments.report.grids import verdicts, words
    from privgrad.experiments.report.metadata import metadata_of
    from privgrad.experiments.report.page import write_report
    from privgrad.experiments.report.terminal import summary_table
    from privgrad.experiments.report.texts import total_text

    metadata = metadata_of(spec, records, folder, command=command_line())
    index = write_report(records, metadata, folder)
    if as_json:
        grids = {name: words(verdict) for name, verdict in verdicts(records).items()}
        rows = [row | {"grid": grids.get(row["method"])} for row in summarize(records)]
        seeds = sorted({record["seed"] for record in records if record["seed"] is not None})
        total = metadata["total_epsilon"] and metadata["total_epsilon"]["value"]
        print_json({"report": str(index), "methods": rows, "research_seeds": seeds, "total_epsilon": total})
        return
    STDOUT.print(summary_table(records))
    if any(record["seed"] is not None for record in records):
        STDOUT.print("Research seeds: the noise is predictable, and protects nobody.")
    if metadata["total_epsilon"] is not None:
        STDOUT.print(Text(total_text(metadata["total_epsilon"], tuned=bool(in_phase(records, "tuning")))))
    STDOUT.print(f"Report: {index}")
