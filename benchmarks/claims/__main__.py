"""Run checks of the papers' claims: `python -m benchmarks.claims --check correction --check betas`.

Each measurement appends a line to results/claims/CHECK.jsonl, unless the file holds it. `--show` prints a table for
each file. Every method of a check gets the same noise steps. The best one is chosen by the mean over all seeds of the
value that the check names; the table has all of them. Measurements on training examples, and before the noise, are NOT
private.
"""

import json
import math
import time
import warnings
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer

from benchmarks.claims import adam, bias, scales
from benchmarks.claims.shared import FOLDER, Check

CHECKS: dict[str, Check] = adam.CHECKS | scales.CHECKS | bias.CHECKS
KEYS = ("case", "noise_step", "seed")
Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(name: str, out: Path) -> None:
    """Measure what the file of a check lacks."""
    check, path = CHECKS[name], out / f"{name}.jsonl"
    done = {tuple(record[key] for key in KEYS) for record in read(path)}
    for case in check.cases:
        for step in check.noise_steps:
            for seed in check.seeds:
                if (case, step, seed) in done:
                    continue
                began = time.process_time()
                values = {key: float(f"{value:.6g}") for key, value in check.measure(case, step, seed).items()}
                record = {"case": case, "noise_step": step, "seed": seed, **values}
                record["cpu_seconds"] = round(time.process_time() - began, 1)
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                typer.echo(json.dumps(record))


def cell(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 and max(values) > min(values) else ""
    return f"{fmean(values):.4g}{spread}"


def best_steps(check: Check, records: list[Record]) -> dict[str, float]:
    """Return the noise step of each case with the smallest mean of the value that chooses it."""
    means: dict[str, dict[float, float]] = {}
    for case in check.cases:
        for step in check.noise_steps:
            found = [r[check.best] for r in records if (r["case"], r["noise_step"]) == (case, step)]
            if found and all(math.isfinite(value) for value in found):
                means.setdefault(case, {})[step] = fmean(found)
    return {case: min(own, key=lambda step: own[step]) for case, own in means.items()}


def comparison(check: Check, records: list[Record], chosen: dict[str, float]) -> list[str]:
    """Return the differences to the first case of each group, by seed, each at its best noise step."""
    lines: list[str] = []
    cases = [case for case in check.cases if case in chosen]
    for index, case in enumerate(cases):
        first = cases[index - index % check.group] if check.group else cases[0]
        if case == first:
            continue
        own, other = (
            {r["seed"]: r[check.compared] for r in records if (r["case"], r["noise_step"]) == (one, chosen[one])}
            for one in (case, first)
        )
        differences = [own[seed] - other[seed] for seed in own.keys() & other.keys()]
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else math.nan
        lines.append(
            f"{case} minus {first}, {check.compared}: {fmean(differences):.4g} ± {error:.2g} (standard error, "
            f"{len(differences)} seeds)"
        )
    return lines


def table(name: str, records: list[Record]) -> str:
    """Return the records of a check as a table of Markdown: mean and standard deviation over seeds."""
    check = CHECKS[name]
    chosen = best_steps(check, records) if check.best else {}
    values = [key for key in records[0] if key not in (*KEYS, "cpu_seconds")]
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        groups.setdefault((record["case"], record["noise_step"]), []).append(record)
    order = [(case, step) for case in check.cases for step in check.noise_steps if (case, step) in groups]

    def named(case: str, step: float) -> str:
        mark = ", best" if chosen.get(case) == step and len(check.noise_steps) > 1 else ""
        return case if len(check.noise_steps) == 1 else f"{case}, u {step:g}{mark}"

    rows = [["", *values]]
    rows += [[named(*key), *(cell([r[value] for r in groups[key]]) for value in values)] for key in order]
    if len(order) < len(values):
        rows = [list(column) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    title = f"### {name} ({check.claims})"
    return "\n".join([title, "", *lines, "", *(comparison(check, records, chosen) if check.compared else []), ""])


def main(
    check: Annotated[list[str], typer.Option(help=f"{', '.join(CHECKS)}; repeat it for several")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="folder of the records")] = FOLDER,
    show: Annotated[bool, typer.Option(help="print the tables of all records")] = False,
) -> None:
    """Measure, append the records, and print the tables if asked."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    out.mkdir(parents=True, exist_ok=True)
    for name in check:
        run(name, out)
    if show:
        for name in CHECKS:
            if records := read(out / f"{name}.jsonl"):
                typer.echo(table(name, records))


if __name__ == "__main__":
    typer.run(main)
