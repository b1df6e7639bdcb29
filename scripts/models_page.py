"""Write docs/models.md from the records in results/zoo/: `python scripts/models_page.py`.

Each file there is the output of one run of `python -m benchmarks.zoo --out results/zoo/NAME.jsonl`. The first file by
name has the tables of errors and refusals; every file has a table of times and memory.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RECORDS = ROOT / "docs/models.md", ROOT / "results/zoo"
Row = dict[str, Any]
METHODS = {"plain": "plain", "preconditioned": "preconditioned", "bam": "BAM", "opacus-ghost": "Opacus"}
INTRODUCTION = """# Models

<!-- `python scripts/models_page.py` writes this page from results/zoo/. Do not edit it. -->

This page lists architectures, and the cost of a private step for each. Those of transformers and timm are built from
configurations, with random weights. `tests/zoo` has the others, written as people write them.

- **Exact.** At a tiny size and in double precision, the released gradient without noise is compared with a loop over
  single examples: plain, with preconditioning and with BAM. The table shows the largest relative error.
- **Ordinary.** Milliseconds of an ordinary step: forward pass, backward pass and torch's Adam. Examples come in batches
  of 32. Models have four layers of width 256. Texts have 64 tokens, and images have 8 x 8 patches of 8 x 8 pixels.
  Below about 10 ms, the overhead of Python decides the ratios.
- **Plain, preconditioned, BAM, Opacus.** The time of a private step over the time of an ordinary step. Opacus is
  version 1.6.0 with ghost clipping. A dash means that it cannot take the model. A table has columns for what was
  measured only.
- **Checks.** The engine checks the first, second, fourth, eighth batch, and so on. The table shows the time of the
  first step and of a later step with a check, in ordinary steps. The next column is the share that all ten checks add
  to 1,000 plain steps.
- **Memory.** The peak of a step over the peak of an ordinary step.
- **By example.** Modules that the engine computes for each example by itself, with their share of the parameters. They
  are exact, but slow. [engines.md](engines.md) gives the reasons.

`python -m benchmarks.zoo --out results/zoo/NAME.jsonl` measures, and `python scripts/models_page.py` writes this page.
The records are in [results/zoo/](../results/zoo/).
"""

ADAPTERS = """## LoRA on routed experts

peft stacks the adapters of all experts, and of the router. In each forward pass it makes the experts' parameter a
parametrization, and removes it again. Both write to the parameter, with the values that it has. privgrad refuses every
write to a parameter: it cannot tell such a write from one of an example's values without a copy of all experts. So
`target_modules="all-linear"` is refused for Mixtral, OLMoE and Qwen3-MoE. Name linear layers, such as
`target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]`. This is exact, with preconditioning and with BAM too.
"""


def read(path: Path) -> list[Row]:
    """The rows of one file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def accepted(row: Row) -> bool:
    return "plain" in row.get("ratio", {})


def page(files: dict[str, list[Row]]) -> str:
    """The page, from rows by name of the file."""
    parts = [INTRODUCTION]
    for name, rows in files.items():
        parts += [f"## {title(rows)}\n", summary(rows) + "\n", table(rows), f"Records: `{name}`.\n"]
    refused = list(refusals(next(iter(files.values()))))
    parts += ["## Refused\n", *(f"- {line}" for line in refused), ""] if refused else []
    parts.append(ADAPTERS)
    return "\n".join(parts)


def title(rows: list[Row]) -> str:
    """Device and precision of a run."""
    first = next(row for row in rows if "machine" in row)
    device = first["machine"]["gpu"] or f"{first['machine']['cpu']}, one thread"
    return f"{device}, {first['precision']}, {first['date']}"


def summary(rows: list[Row]) -> str:
    """Medians and the worst."""
    taken = [row for row in rows if accepted(row)]
    lines = [f"{len(taken)} of {len(rows)} architectures are accepted."]
    for method, name in METHODS.items():
        values = {row["name"]: row["ratio"][method] for row in taken if method in row["ratio"]}
        if values:
            worst = max(values, key=lambda each: values[each])
            lines.append(
                f"{name[0].upper()}{name[1:]}: median {median(values.values()):.2f} of {len(values)}, "
                f"worst {values[worst]:.2f} ({worst})."
            )
    peaks = {row["name"]: memory(row, "plain") for row in taken if memory(row, "plain")}
    if peaks:
        worst = max(peaks, key=lambda each: peaks[each])
        lines.append(f"Memory, plain: median {median(peaks.values()):.2f}, worst {peaks[worst]:.2f} ({worst}).")
    shares = [row["checks"]["plain"]["share"] for row in taken]
    if shares:
        lines.append(f"Checks in 1,000 steps: median {percent(median(shares))}, worst {percent(max(shares))}.")
    return "\n".join(f"- {line}" for line in lines)


def percent(share: float, decimals: int = 1) -> str:
    return f"{100 * share:.{decimals}f} %"


def memory(row: Row, method: str) -> float:
    """Peak memory over that of the ordinary step; 0 if it was not measured."""
    peaks = row.get("peak_mb", {})
    return peaks[method] / peaks["ordinary"] if method in peaks and peaks.get("ordinary") else 0.0


def table(rows: list[Row]) -> str:
    """One line for each architecture."""
    tried = [method for method in METHODS if any(method in (*row.get("ratio", {}), *row["failed"]) for row in rows)]
    peers = ["memory, Opacus"] if "opacus-ghost" in tried else []
    names = [METHODS[method] for method in tried]
    heads = ["", "exact", "ordinary", *names, "first, checked step", "checks", "memory", *peers, "by example"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    lines += ["| " + " | ".join(cells(row, tried)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cells(row: Row, tried: list[str]) -> list[str]:
    """The line of one architecture, for the methods that were tried."""

    def ratio(method: str) -> str:
        if method in row.get("ratio", {}):
            return f"{row['ratio'][method]:.2f}"
        return "–" if method in row["failed"] else "not measured"

    ratios = [ratio(method) for method in tried]
    checks = row.get("checks", {}).get("plain")
    steps = f"{checks['first']:.1f}, {checks['checked']:.1f}" if checks else "–"
    share = percent(checks["share"]) if checks else "–"
    held = [method for method in ("plain", "opacus-ghost") if method in tried]
    peaks = [f"{memory(row, method):.2f}" if memory(row, method) else "–" for method in held]
    usual = f"{1000 * row['seconds']['ordinary']:.0f}" if "seconds" in row else "–"
    return [row["name"], exact(row), usual, *ratios, steps, share, *peaks, by_example(row)]


def exact(row: Row) -> str:
    """The largest relative error over all kinds of gradients."""
    errors = row.get("exact", {}).values()
    if not accepted(row):
        return "stopped" if "stopped" in row and "ratio" not in row else "refused"
    if any(isinstance(error, str) for error in errors):
        return "refused: " + ", ".join(kind for kind, error in row["exact"].items() if isinstance(error, str))
    return f"{max(errors):.0e}" if errors else "–"


def by_example(row: Row) -> str:
    """Classes of the modules, each with its number, and their share of the parameters."""
    counts = row.get("by_example", {})
    names = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{names} ({percent(row['share_by_example'], 0)})" if names else ""


def refusals(rows: list[Row]) -> Iterator[str]:
    """What privgrad says of each architecture that it does not take."""
    for row in rows:
        reason = row["failed"].get("plain")
        if reason:
            yield f"{row['name']}: `{' '.join(reason.split()).replace('`', '')}`"
        elif "stopped" in row and not accepted(row):
            yield f"{row['name']}: the measurement stopped {row['stopped']}."


def main() -> None:
    """Write the page."""
    files = {path.name: read(path) for path in sorted(RECORDS.glob("*.jsonl"))}
    if not files:
        sys.exit("models_page: expected files in results/zoo, got none; run python -m benchmarks.zoo first.")
    PAGE.write_text(page(files), encoding="utf-8")


if __name__ == "__main__":
    main()
