"""Measure workloads: `python -m benchmarks.run --workload W2 --engine factored --json`."""

import gc
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.measure import METHODS, build, peak_memory, seconds_in_turn, set_precision
from benchmarks.methods import OURS, Setup, SkipError, Step
from benchmarks.peers import PEERS, installed, versions
from benchmarks.workloads import WORKLOADS

Row = dict[str, Any]


def machine(setup: Setup) -> Row:
    """What the figures depend on."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": os.environ.get("OMP_WAIT_POLICY"),
        "gpu": torch.cuda.get_device_name() if setup.device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),  # above 1 or so, other work has disturbed the figures
    }


def measure(
    setup: Setup,
    methods: Sequence[str],
    *,
    repetitions: int,
    memory: bool,
    limit: float,
    clock: str,
    tell: Callable[[str], None],
) -> Iterator[Row]:
    """One row for each method, the ordinary step first; a row of a method that cannot run says why.

    Memory comes first, in processes that can be stopped: a method that passes the limit there is not timed.
    """
    steps: dict[str, Step] = {}
    skipped: dict[str, str] = {}
    peaks: dict[str, Row] = {}
    for method in methods if memory else []:
        tell(f"{setup.name}: memory of {method}")
        try:
            peaks[method] = peak_memory(setup, method, threads=torch.get_num_threads(), limit=limit)
        except SkipError as reason:
            skipped[method] = str(reason)
    for method in methods:
        if method in skipped:
            continue
        tell(f"{setup.name}: building {method}")
        try:
            steps[method] = build(setup, method).step
        except SkipError as reason:
            skipped[method] = str(reason)
    tell(f"{setup.name}: timing {', '.join(steps)}")
    seconds = seconds_in_turn(steps, setup, repetitions=repetitions, clock=clock)
    steps.clear()
    gc.collect()
    for method in methods:
        row: Row = {
            "workload": setup.name,
            "method": method,
            "engine": None if method not in OURS else "vmap" if method.startswith("vmap") else setup.engine,
            "batch_size": setup.batch_size,
            "microbatch_size": setup.microbatch_size if method in OURS else None,
            "device": setup.device,
            "dtype": setup.dtype,
            "clock": clock,
            "versions": {} if method == "ordinary" else versions(method),
            "ratio": None,
            "peak_memory_ratio": None,
        }
        if method in seconds:
            row |= _times(seconds[method], seconds["ordinary"])
        if method in peaks:
            row |= {f"{name}_mb": round(value, 2) for name, value in peaks[method].items()}
            if "ordinary" in peaks:
                row["peak_memory_ratio"] = round(peaks[method]["peak"] / peaks["ordinary"]["peak"], 3)
        yield row | {"skipped": skipped.get(method), "date": date.today().isoformat(), "machine": machine(setup)}


def _times(seconds: list[float], ordinary: list[float]) -> Row:
    """Medians; the fastest, which other work on the machine disturbs less; quartiles of the ratio within a round."""
    ordinary = ordinary[: len(seconds)]
    low, _, high = quantiles([mine / its for mine, its in zip(seconds, ordinary, strict=True)], n=4)
    return {
        "ratio": round(median(seconds) / median(ordinary), 3),
        "ratio_of_fastest": round(min(seconds) / min(ordinary), 3),
        "spread": [round(low, 3), round(high, 3)],
        "seconds": round(median(seconds), 6),
        "seconds_fastest": round(min(seconds), 6),
        "repetitions": len(seconds),
    }


def table(rows: Sequence[Row], field: str, title: str) -> Table:
    """Workloads down, methods across."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "ordinary"))
    result = Table("", "ordinary", *methods, title=title)
    for name in dict.fromkeys(row["workload"] for row in rows):
        cells = {row["method"]: row for row in rows if row["workload"] == name}
        result.add_row(name, _ordinary(cells.get("ordinary", {}), field), *(_cell(cells, m, field) for m in methods))
    return result


def _ordinary(row: Row, field: str) -> str:
    if field == "ratio":
        return f"{row['seconds'] * 1000:.1f} ms" if row.get("seconds") else "–"
    return f"{row['peak_mb']:.0f} MiB" if row.get("peak_mb") else "–"


def _cell(cells: dict[str, Row], method: str, field: str) -> str:
    value = cells.get(method, {}).get(field)
    return "–" if value is None else f"{value:.2f}"


def markdown(rows: Sequence[Row]) -> str:
    """The two tables, the reasons for what is missing, and the machine."""
    titles = {"ratio": "Time over the ordinary step", "peak_memory_ratio": "Peak memory over the ordinary step"}
    parts: list[str] = []
    for field, title in titles.items():
        grid = table(rows, field, title)
        lines = [list(column.cells) for column in grid.columns]
        heads = [str(column.header) for column in grid.columns]
        body = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in zip(*lines, strict=True)]
        parts += [f"## {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *body, ""]
    parts += ["## Not measured", ""]
    parts += [f"- {row['workload']}, {row['method']}: {row['skipped']}" for row in rows if row["skipped"]]
    facts = ", ".join(f"{name} {value}" for name, value in rows[0]["machine"].items() if value)
    return "\n".join([*parts, "", f"{rows[0]['date']}; {facts}; {rows[0]['device']}, {rows[0]['dtype']}.", ""])


def main(
    workload: Annotated[list[str] | None, typer.Option(help="Name, repeatable; default: all.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Name, repeatable; default: plain, preconditioned.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All of privgrad's methods and all installed peers.")
    ] = False,
    peers: Annotated[bool, typer.Option("--peers", help="The default, privgrad's vmap and all peers.")] = False,
    engine: Annotated[Literal["factored", "vmap"], typer.Option(help="privgrad's engine.")] = "factored",
    microbatch_size: Annotated[int | None, typer.Option(help="privgrad's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Fewer examples than the workload's own.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cpu",
    dtype: Annotated[
        Literal["float32", "tf32", "bf16"],
        typer.Option(help="tf32: products of float32 on a GPU; bf16: forward pass under autocast."),
    ] = "float32",
    threads: Annotated[int, typer.Option(help="Of torch on CPU; 0: all cores.")] = 0,
    repetitions: Annotated[int, typer.Option(help="Rounds at least; 3 for a step above 5 s.")] = 10,
    clock: Annotated[
        Literal["wall", "processor"], typer.Option(help="processor: time of this process, on a busy machine.")
    ] = "wall",
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    time_limit: Annotated[
        float, typer.Option(help="Seconds for two steps in a process that measures memory; a slower method is skipped.")
    ] = 300.0,
    memory_limit: Annotated[float, typer.Option(help="GiB of per-sample gradients above which to skip.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write rows to this JSONL file, tables beside it as .md.")] = None,
    resume: Annotated[bool, typer.Option("--continue", help="Keep the workloads that the file of --out has.")] = False,
) -> None:
    """Time and memory of a private step over an ordinary one."""
    names, wanted = workload or list(WORKLOADS), method or ["plain", "preconditioned"]
    if everything:
        wanted = [*OURS, *installed()]
    elif peers:
        wanted = [*wanted, "vmap", *PEERS]  # a row says which peer is not installed
    for name, known in [*((n, WORKLOADS) for n in names), *((m, METHODS) for m in wanted)]:
        if name not in known:
            raise typer.BadParameter(f"{name} is none of {', '.join(known)}")
    torch.set_num_threads(threads or os.cpu_count() or 1)
    set_precision(dtype)
    rows: list[Row] = []
    if resume and out and out.exists():
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        names = [name for name in names if name not in {row["workload"] for row in rows}]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        for name in names:
            setup = Setup(name, device, dtype, engine, microbatch_size, memory_limit, batch_size)
            for row in measure(
                setup,
                list(dict.fromkeys(["ordinary", *wanted])),
                repetitions=repetitions,
                memory=memory,
                limit=time_limit,
                clock=clock,
                tell=lambda text: progress.update(task, description=text),
            ):
                rows.append(row)
                if as_json:
                    typer.echo(json.dumps(row))
            if out:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text("".join(json.dumps(row) + "\n" for row in rows))
                out.with_suffix(".md").write_text(markdown(rows))
    if not as_json:
        console = Console()
        console.print(table(rows, "ratio", "Time over the ordinary step"))
        if memory:
            console.print(table(rows, "peak_memory_ratio", "Peak memory over the ordinary step"))
        for row in rows:
            if row["skipped"]:
                console.print(f"{row['workload']}, {row['method']}: {row['skipped']}", style="dim", markup=False)


if __name__ == "__main__":
    typer.run(main)
