"""Accuracy of all libraries at equal epsilon and delta: `python -m benchmarks.accuracy.run`, or `make bench-accuracy`.

Each training is a process in the environment of its library, on one thread. It appends a line to
results/peers/accuracy.jsonl. A training that the file holds is not run again, so the command goes on after a stop.
`--list` says what is missing. With `--gpu`, JAX-Privacy and Opacus train on a GPU if the packages in their
environments can. Scores are measured on test examples. Trainings with seeds are NOT private.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks import environments

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results/peers/accuracy.jsonl"
DATA = environments.FOLDER / "data"
SEEDS = (0, 1, 2)
ALL = ("adult", "fashion-mnist", "tags", "sections")
# The variants of each library, and the tasks to which they apply. A script says what each variant is.
PLAN: dict[str, dict[str, tuple[str, ...]]] = {
    "privgrad": {"recipe": ALL, "example": ALL},
    "opacus": {"example": ALL, "readme": ("adult",), "features": ALL, "recipe": ALL},
    "jax-privacy": {"example": ALL, "features": ALL, "recipe": ALL},
    "dp-ebm": {"example": ("adult",), "features": ("adult",)},
    "diffprivlib": {"example": ("adult",), "naive-bayes": ("adult",), "features": ("adult",)},
}
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
NO_GPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


class Run(NamedTuple):
    """One training."""

    task: str
    library: str
    variant: str
    seed: int


def planned() -> Iterator[Run]:
    """All trainings, the cheap tasks first."""
    for task in ALL:
        for library, variants in PLAN.items():
            for variant, tasks in variants.items():
                yield from (Run(task, library, variant, seed) for seed in SEEDS if task in tasks)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(record: dict[str, Any]) -> Run:
    return Run(*(record[name] for name in Run._fields))


def trained(run: Run, gpu: bool = False) -> dict[str, Any]:
    """Train in a process of its own, and return the record.

    Raises:
        RuntimeError: the process failed; the message ends as its output does.
    """
    ours = run.library == "privgrad"
    python = sys.executable if ours else str(environments.python_of(run.library))
    places = [ROOT / "src", ROOT] if ours else [ROOT]
    module = f"benchmarks.accuracy.with_{run.library.replace('-', '_')}"
    command = [python, "-m", module, str(DATA / run.task), run.variant, str(run.seed)]
    variables = os.environ | ONE_THREAD | ({} if gpu else NO_GPU) | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(run[:3])} failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**run._asdict(), **result, "date": date.today().isoformat(), "cpu": cpu(), "threads": 1}


def cpu() -> str:
    """The name of the processor."""
    known = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", known.read_text()) if known.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def prepare(task: str, library: str) -> str | None:
    """Make the environment and export the task, unless they are there; return a reason if that fails."""
    if library != "privgrad":
        try:
            environments.make(library)
        except subprocess.CalledProcessError:
            return f"the packages of {library} do not install here"
    if not (DATA / task / "facts.json").exists():
        export = [sys.executable, "-m", "benchmarks.accuracy.export", task, "--folder", str(DATA)]
        if subprocess.run(export, cwd=ROOT).returncode:
            return f"the data of {task} are not here; its recipe in examples/recipes says how to get them"
    return None


def main(
    task: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ALL)}; default: all")] = None,
    library: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PLAN)}; default: all")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="default: 0, 1 and 2")] = None,
    listed: Annotated[bool, typer.Option("--list", help="print what is missing, and train nothing")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="let JAX-Privacy and Opacus use a GPU")] = False,
    out: Annotated[Path, typer.Option(help="the file that records are added to")] = OUT,
) -> None:
    for given, known in ((task, ALL), (library, PLAN), (seed, SEEDS)):
        for name in given or ():
            if name not in known:
                raise typer.BadParameter(f"{name} is none of {', '.join(map(str, known))}")
    held = {key_of(record) for record in read(out)}
    missing = [
        run
        for run in planned()
        if run not in held
        and run.task in (task or ALL)
        and run.library in (library or PLAN)
        and run.seed in (seed or SEEDS)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    reasons: dict[tuple[str, str], str | None] = {}
    failed = False
    for run in missing:
        if listed:
            typer.echo(" ".join(map(str, run)))
            continue
        place = (run.task, run.library)
        if place not in reasons:
            reasons[place] = prepare(*place)
            if reasons[place]:
                typer.echo(f"NOT RUN: {run.library} on {run.task}: {reasons[place]}", err=True)
        if reasons[place]:
            failed = True
            continue
        try:
            record = trained(run, gpu)
        except RuntimeError as error:
            typer.echo(f"FAILED: {error}", err=True)
            failed = True
            continue
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        typer.echo(json.dumps(record))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
