"""Measure the architectures of tests/zoo at a real size: `python -m benchmarks.zoo --out results/zoo/cpu.jsonl`.

Each architecture has a process of its own with a time limit. A file that exists is continued: delete it to start again.
`scripts/models_page.py` makes docs/models.md of the results.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.architectures import Architecture, Row, measure
from benchmarks.methods import Setup
from tests.zoo.architectures import ARCHITECTURES, WITH_BATCH_NORM

METHODS = ("plain", "preconditioned", "bam", "opacus-ghost")


Measure = Callable[[Any, list[str], int, float], Iterator[Row]]


def send_rows(
    sender: Connection, setup: Setup, methods: list[str], rounds: int, limit: float, measure: Measure
) -> None:
    """Run in a new process: measure, and send the row after each part."""
    os.setsid()  # so that it can be stopped with the processes that it starts
    torch.set_num_threads(1)
    for row in measure(setup, methods, rounds, limit / 4):
        sender.send(row)


def measured(
    setup: Setup, methods: list[str], rounds: int, limit: float, *, measure: Measure = measure, start: str = "spawn"
) -> Row:
    """The row of one architecture, or as much of it as its process reaches within so many seconds."""
    context: Any = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_rows, args=(sender, setup, methods, rounds, limit, measure))
    process.start()
    sender.close()
    row: Row = {"name": setup.name, "failed": {}}
    end = time.monotonic() + limit
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            row = receiver.recv()
        row["stopped"] = f"after {limit:g} s"
    except EOFError:  # the process has ended
        process.join()
        if process.exitcode:
            row["stopped"] = f"its process ended with code {process.exitcode}"
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return row


def main(
    out: Annotated[Path, typer.Option(help="JSONL file; architectures that it has are not measured again.")],
    names: Annotated[str, typer.Option(help="Names with commas between; default: all.")] = "",
    methods: Annotated[str, typer.Option(help="Names with commas between, beside the ordinary step.")] = ",".join(
        METHODS
    ),
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cpu",
    precision: Annotated[
        Literal["float32", "tf32", "bf16"], typer.Option(help="bf16: forward pass under autocast.")
    ] = "float32",
    rounds: Annotated[int, typer.Option(help="At least; more of short steps.")] = 3,
    batch_size: Annotated[int | None, typer.Option(help="Default: that of the real size.")] = None,
    engine: Annotated[str, typer.Option(help="privgrad's.")] = "factored",
    time_limit: Annotated[float, typer.Option(help="Seconds for one architecture.")] = 900.0,
) -> None:
    """Time and memory of a private step over an ordinary one, for each architecture."""
    known = ARCHITECTURES | WITH_BATCH_NORM
    chosen = names.split(",") if names else list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: none of {', '.join(known)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    held = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set[str]()
    for name in chosen:
        if name in held:
            continue
        setup = Architecture(name, device, precision, engine, examples=batch_size)
        row = measured(setup, methods.split(","), rounds, time_limit)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        typer.echo(f"{name}: {row.get('ratio') or row['failed'] or row.get('stopped')}")


if __name__ == "__main__":
    typer.run(main)
