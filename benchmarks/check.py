"""Hold measured ratios against thresholds.toml: `python -m benchmarks.check FILE.jsonl`."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import WORKLOADS

COMPARED = ("plain", "inputs", "inputs-refreshed")
EVERY = 100  # the default of precondition.inputs
THRESHOLDS = Path(__file__).with_name("thresholds.toml")


def cells(
    rows: list[dict[str, Any]], thresholds: dict[str, Any]
) -> Iterator[tuple[str, str, str, float | None, float]]:
    """(workload, method, what, measured or None, allowed) for every cell that has a threshold."""
    measured = {(row["workload"], row["method"]): row for row in rows}
    for method, allowed in thresholds["time"].items():
        for workload in WORKLOADS:
            row = measured.get((workload, method), {})
            yield workload, method, "time", row.get("ratio"), allowed[workload.partition("-")[0]]
            yield workload, method, "memory", row.get("peak_memory_ratio"), thresholds["memory"]
    for workload, allowed in thresholds["over_plain"].items():
        yield workload, "inputs", "over plain", over_plain(measured, workload), allowed


def over_plain(measured: Mapping[tuple[str, str], dict[str, Any]], workload: str) -> float | None:
    """Time of a step with preconditioned inputs over a plain one, with new matrices in one step of EVERY."""
    plain, kept, refreshed = (measured.get((workload, method), {}).get("seconds") for method in COMPARED)
    if plain is None or kept is None or refreshed is None:
        return None
    return (kept + (refreshed - kept) / EVERY) / plain


def main(
    file: Annotated[Path, typer.Argument(help="What benchmarks.run --out wrote.", exists=True)],
    engine: Annotated[str, typer.Option(help="Of which the rows are held to it.")] = "factored",
    partial: Annotated[bool, typer.Option(help="Let cells that were not measured pass.")] = False,
) -> None:
    """Exit with status 1 if a ratio is above its threshold, or was not measured."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row for row in rows if row["engine"] == engine]
    table = Table("workload", "method", "", "ratio", "allowed", "")
    missed = 0
    for workload, method, what, value, allowed in cells(rows, tomllib.loads(THRESHOLDS.read_text())):
        if value is None and partial:
            continue
        passed = value is not None and value <= allowed
        missed += not passed
        verdict = "pass" if passed else "not measured" if value is None else "MISSED"
        table.add_row(workload, method, what, "–" if value is None else f"{value:.2f}", f"{allowed:g}", verdict)
    console = Console()
    console.print(table)
    console.print(f"{missed} of {table.row_count} cells missed")
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
