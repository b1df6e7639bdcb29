"""Measure the rows of docs/performance.md on a GPU, each in a process of its own, within a time for all of them.

`gpu_steps.sh`, `gpu_bf16.sh` and `gpu_real.sh` call it. A file that exists is continued, except for rows that were not
reached. A row that passes its time limit keeps what was measured until then.
"""

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.architectures import Architecture, Row, timed
from benchmarks.counts import versions
from benchmarks.methods import Setup
from benchmarks.real_sizes import REAL_SIZES, RealSize
from benchmarks.workloads import WORKLOADS
from benchmarks.zoo import measured
from tests.zoo.architectures import ARCHITECTURES

ROWS = (*WORKLOADS, "bert", "gpt2", "llama", "timm_vit", "resnet_groupnorm")
METHODS = ("plain", "captured", "opacus-ghost")
LEAST = 10.0  # seconds for a row that is begun


def setup_of(name: str, device: str, precision: str, examples: int | None) -> Setup:
    kind = Setup if name in WORKLOADS else RealSize if name in REAL_SIZES else Architecture
    return kind(name, device, precision, examples=examples)


def main(
    out: Annotated[Path, typer.Option(help="JSONL file.")],
    names: Annotated[str, typer.Option(help="Rows with commas between.")] = ",".join(ROWS),
    methods: Annotated[str, typer.Option(help="With commas between, beside the ordinary step.")] = ",".join(METHODS),
    precision: Annotated[
        Literal["float32", "tf32", "bf16"], typer.Option(help="bf16: forward pass under autocast.")
    ] = "float32",
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cuda",
    rounds: Annotated[int, typer.Option(help="At least; up to five times as many of short steps.")] = 4,
    batch_size: Annotated[int | None, typer.Option(help="Default: that of the row.")] = None,
    row_seconds: Annotated[float, typer.Option(help="For one row.")] = 40.0,
    end: Annotated[float | None, typer.Option(help="Unix time at which the last row ends. Default: never.")] = None,
) -> None:
    """Time, first steps, checks and memory of private steps, and of ordinary ones."""
    chosen = names.split(",")
    if unknown := [name for name in chosen if name not in (*ROWS, *REAL_SIZES, *ARCHITECTURES)]:
        raise typer.BadParameter(f"{', '.join(unknown)}: none of {', '.join(ROWS)}, and no architecture")
    os.environ["OMP_NUM_THREADS"] = "1"
    # The processes of the rows are forked from one that has imported everything, and has not touched the GPU.
    multiprocessing.set_forkserver_preload(["benchmarks.zoo", "benchmarks.peers"])
    out.parent.mkdir(parents=True, exist_ok=True)
    before = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else list[Row]()
    before = [row for row in before if row.get("stopped") != "not reached"]
    out.write_text("".join(json.dumps(row) + "\n" for row in before))
    held = {row["name"] for row in before}
    facts = versions()
    for name in chosen:
        if name in held:
            continue
        left = row_seconds if end is None else min(row_seconds, end - time.time())
        row: Row = {"name": name, "failed": {}, "stopped": "not reached"}
        if name not in (*WORKLOADS, *REAL_SIZES, *ARCHITECTURES):  # a model of timm, where timm is not installed
            row["stopped"] = "not installed"
        elif left >= LEAST:
            setup = setup_of(name, device, precision, batch_size)
            row = measured(setup, methods.split(","), rounds, left, measure=timed, start="forkserver")
        with out.open("a") as file:
            file.write(json.dumps(row | {"precision": precision} | facts) + "\n")
        typer.echo(f"{name}, {precision}: {row.get('ratio')} {row['failed'] or ''} {row.get('stopped', '')}")


if __name__ == "__main__":
    typer.run(main)
