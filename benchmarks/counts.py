"""Count kernels, reads, calls and bytes of private steps over the ordinary one: `python -m benchmarks.counts`.

The ordinary step is forward, backward and Adam by foreach, as torch takes it on a GPU. privgrad takes its paths for a
GPU, on CPU tensors. `counting` says what is counted, and `counted` has the models.
"""

import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

import privgrad
from benchmarks.counted import COUNTED, is_known, setup_of
from benchmarks.counting import Counts, as_counted, calls_of, operations_of
from benchmarks.measure import METHODS, build
from benchmarks.methods import OURS, Setup, SkipError
from benchmarks.peers import PEERS, installed

Row = dict[str, Any]
Bars = Mapping[str, Mapping[str, float]]
Which = Literal["first", "checked", "steady"]
THRESHOLDS = Path(__file__).with_name("thresholds.toml")
# Steps before the one that is counted. The engine checks its calls 1, 2, 4, 8 ...; 4 and 16 more thoroughly.
BEFORE: dict[Which, int] = {"first": 0, "checked": 3, "steady": 4}
RATIOS = ("kernels", "calls", "allocated", "peak")
GROWING = ("kernels", "reads", "calls")


def count(setup: Setup, method: str, which: Which = "steady", *, device_paths: bool = True) -> Counts:
    """Count one step of a method.

    The counts are the same each time, except on the paths for the CPU: there a few calls depend on the noise.

    Raises:
        SkipError: the method cannot take this model.
    """
    counts, before = Counts(), BEFORE[which] if method in OURS else 2
    with as_counted(device_paths=device_paths):
        step = build(setup, method, steps=before).step
        operations_of(step, counts)
        if which != "steady" and method in OURS:  # the next step is another one
            step = build(setup, method, steps=before).step
        calls_of(step, counts)
    return counts


def rows_of(
    name: str, methods: Sequence[str], which: Which, examples: int | None, *, device_paths: bool, growth: bool = False
) -> Iterator[tuple[Row, Counts]]:
    """Yield one row for each method, the ordinary step first, with what was counted.

    With `growth`, a row also has by what factor kernels, reads or calls grow most for a batch of twice the size.
    """
    setup = setup_of(name, examples)
    ordinary = Counts()
    for method in ("ordinary", *methods):
        counts, ratio, skipped = Counts(), dict[str, float](), None
        try:
            counts = count(setup, method, which, device_paths=device_paths)
            ordinary = counts if method == "ordinary" else ordinary
            ratio = {what: round(_over(counts, ordinary, what), 3) for what in RATIOS}
            if growth and method in OURS:
                twice = count(setup_of(name, 2 * setup.batch_size), method, which, device_paths=device_paths)
                ratio["growth"] = round(max(_over(twice, counts, what) for what in GROWING), 3)
        except SkipError as reason:
            skipped = str(reason)
        numbers = {} if skipped else {key: value for key, value in vars(counts).items() if isinstance(value, int)}
        row = {"model": name, "method": method, "batch_size": setup.batch_size, "step": which}
        row |= {"paths": "device" if device_paths else "cpu", **numbers, "ratio": ratio, "skipped": skipped}
        yield row, counts


def _over(counts: Counts, ordinary: Counts, what: str) -> float:
    return getattr(counts, what) / max(1, getattr(ordinary, what))


def bars_of(name: str, bars: Bars) -> dict[str, float]:
    """What a plain step of a model may count: its own line, and for what it leaves out the line "all"."""
    return {**bars.get("all", {}), **bars.get(name, {})}


def missed(row: Row, bars: Bars) -> list[str]:
    """What of a plain step is above its bar, or was not counted, in words."""
    if row["skipped"]:
        return [f"{row['model']}: not counted: {row['skipped']}"]
    over: list[str] = []
    for what, bar in bars_of(row["model"], bars).items():
        value = row["reads"] if what == "reads" else row["ratio"][what]
        if value > bar:
            over.append(f"{row['model']}: {what} {value:g}, at most {bar:g}")
    return over


def versions() -> Row:
    """The commit of privgrad's source, or what COMMIT says where git is not, and versions."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    folder, commit = Path(privgrad.__file__).parent, os.environ.get("COMMIT")
    with suppress(OSError):
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        commit = commit or found.stdout.strip() or None
    return {"commit": commit, "torch": torch.__version__, "python": platform.python_version()}


def table(rows: Sequence[Row], bars: Bars) -> Table:
    """One line for each model and method; of steady plain steps, what is above its bar stands in red."""
    heads = ("kernels", "x", "reads", "calls", "x", "new MB", "x", "peak MB", "x")
    result = Table("model (batch)", "method", *heads, title="A step, and over the ordinary one with foreach Adam")
    for row in rows:
        name = f"{row['model']} ({row['batch_size']})" if row["method"] == "ordinary" else ""
        if row["skipped"]:
            result.add_row(name, row["method"], *["–"] * len(heads), style="dim")
            continue
        held = row["method"] == "plain" and row["step"] == "steady"
        bar = bars_of(row["model"], bars) if held else dict[str, float]()
        ratio = {what: "" if row["method"] == "ordinary" else f"{value:.2f}" for what, value in row["ratio"].items()}
        cells = {what: ratio[what] for what in ("kernels", "calls")} | {"reads": str(row["reads"])}
        for what in cells.keys() & bar.keys():
            if (row["reads"] if what == "reads" else row["ratio"][what]) > bar[what]:
                cells[what] = f"[red]{cells[what]}[/]"
        memory = [text for what in ("allocated", "peak") for text in (f"{row[what] / 2**20:.1f}", ratio[what])]
        numbers = str(row["kernels"]), cells["kernels"], cells["reads"], str(row["calls"]), cells["calls"]
        result.add_row(name, row["method"], *numbers, *memory)
    return result


def show_lines(console: Console, row: Row, counts: Counts, most: int) -> None:
    """Print the lines and functions that count most."""
    console.print(f"\n{row['model']}, {row['method']}, {row['step']} step", style="bold")
    for what, places in counts.lines.items():
        console.print(f"{getattr(counts, what)} {what}")
        for place, found in sorted(places.items(), key=lambda item: (-item[1].total(), item[0]))[:most]:
            operations = ", ".join(f"{name} {times}" for name, times in found.most_common(4))
            console.print(f"  {found.total():6} {place}  ({operations})", markup=False, highlight=False, soft_wrap=True)
    for what, functions in counts.functions.items():
        console.print(f"{counts.calls} calls, {what}")
        for name, times in sorted(functions.items(), key=lambda item: (-item[1], item[0]))[:most]:
            console.print(f"  {times:6} {name}", markup=False, highlight=False, soft_wrap=True)


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Name, repeatable; zoo:NAME: of tests/zoo. Default: 21.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Name, repeatable. Default: plain, preconditioned, opacus-ghost if it is installed."),
    ] = None,
    step: Annotated[str, typer.Option(help="first, checked or steady.")] = "steady",
    batch_size: Annotated[int | None, typer.Option(help="Default: 32, or 8 where a model computes much.")] = None,
    cpu_paths: Annotated[
        bool, typer.Option("--cpu-paths", help="The engine's paths for the CPU, not for a GPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write rows to this JSONL file.")] = None,
    lines: Annotated[int, typer.Option(help="Of each private step, print so many lines and functions.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 if a plain step is above a bar.")] = False,
    threshold_file: Annotated[Path, typer.Option(help="TOML with a table [counts].", exists=True)] = THRESHOLDS,
) -> None:
    """Count private steps over the ordinary step with foreach Adam; with --check, hold plain ones to their bars."""
    names = model or list(COUNTED)
    for name in names:
        if not is_known(name):
            raise typer.BadParameter(f"{name} is none of {', '.join(COUNTED)}, and no architecture as zoo:NAME")
    ghost = [name for name in PEERS if name == "opacus-ghost" and name in installed()]
    methods = method or (["plain"] if check else ["plain", "preconditioned", *ghost])
    if unknown := [name for name in methods if name not in METHODS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: none of {', '.join(METHODS)}")
    if check and (step != "steady" or cpu_paths or "plain" not in methods):
        raise typer.BadParameter("--check holds steady plain steps on the paths for a GPU")
    if step not in BEFORE:
        raise typer.BadParameter(f"{step} is none of {', '.join(BEFORE)}")
    torch.set_num_threads(1)
    bars: Bars = tomllib.loads(threshold_file.read_text())["counts"]
    console, found, facts = Console(width=None if sys.stdout.isatty() else 110), list[Row](), versions()
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
    above: list[str] = []
    for name in names:
        growth = "growth" in bars_of(name, bars) and step == "steady"
        for row, counts in rows_of(name, methods, step, batch_size, device_paths=not cpu_paths, growth=growth):
            row |= facts
            found.append(row)
            above += missed(row, bars) if row["method"] == "plain" and step == "steady" else []
            if as_json:
                typer.echo(json.dumps(row))
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if lines and row["method"] in OURS and not row["skipped"]:
                show_lines(console, row, counts, lines)
    if not as_json:
        console.print(table(found, bars))
        for row in found:
            if row["skipped"]:
                console.print(f"{row['model']}, {row['method']}: {row['skipped']}", style="dim", markup=False)
    if check:
        for text in above:
            sys.stderr.write(f"{text}\n")
        sys.stderr.write(f"{len(above)} of the counts of {len(names)} models are above their bars\n")
        if above:
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
