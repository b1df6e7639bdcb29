"""Write the tables of docs/papers/ from the records in results/: `python scripts/record_tables.py`.

A line `<!-- results: FOLDER -->` stands above each table that this script writes: the final trainings of a comparison,
best first, beside the paper's numbers. `<!-- results: FOLDER groups -->` adds the accuracy of each group of classes,
and `losses` in its place the loss. "floored" is the share of DP-AdamBC's coordinates that are on the floor.
`<!-- results: bias-map TASK -->` stands above a table of `benchmarks.bias_map`, and `<!-- results: bias made -->` or
`tests` above one of the comparisons in results/bias, `bias-plain` without a kind. A table ends at the next empty line.
"""

import json
import re
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import bias_map  # noqa: E402

PAGES, RECORDS = ROOT / "docs/papers", ROOT / "results"
PLACE = re.compile(r"(<!-- results: ([\w-]+)(?: (\w+))? -->\n\n?)(?:\|.*\n)*")
Row = dict[str, Any]


def finals(folder: Path) -> dict[str, list[Row]]:
    """The final trainings of a folder, by method."""
    found: dict[str, list[Row]] = {}
    for line in (folder / "runs.jsonl").read_text().splitlines():
        if (run := json.loads(line))["phase"] == "final":
            found.setdefault(run["method"], []).append(run)
    return found


def spread(values: list[float], percent: bool) -> str:
    """Mean and standard deviation, in percent or with three digits."""
    scale, unit = (100, " %") if percent else (1, "")
    mean, std = fmean(values) * scale, stdev(values) * scale if len(values) > 1 else None
    if percent:
        return f"{mean:.1f}{unit}" + ("" if std is None else f" ± {std:.1f}")
    digits = 4 if mean < 0.1 else 3 if mean < 1 else 2
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def value_text(value: Any) -> str:
    return f"({', '.join(map(value_text, value))})" if isinstance(value, list) else f"{value:g}"


def choice(run: Row) -> str:
    """The noise step or rate of a training, and its method's own values."""
    rate = f"u {run['noise_step']:.2g}" if run.get("noise_step") else f"rate {run['lr']:g}"
    own = [f"{name.rpartition('.')[2]} {value_text(value)}" for name, value in run.get("own") or ()]
    radius = [] if run.get("radius") is None else [f"radius {run['radius']:g}"]
    return ", ".join([rate, *radius, *own])


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}".replace("%", " %")


def shown(value: float | None, percent: bool) -> str:
    return "–" if value is None else f"{100 * value:.1f} %" if percent else f"{value:.4g}"


def table(folder: Path, groups: str) -> str:
    """One comparison as a table of Markdown, with what is given for groups of classes."""
    runs = finals(folder)
    paper = json.loads((folder / "spec.json").read_text()).get("paper", {})
    scored = next(iter(runs.values()))[0]["test_accuracy"] is not None
    key = "test_accuracy" if scored else "test_loss"
    order = sorted(runs, key=lambda name: fmean(run[key] for run in runs[name]) * (-1 if scored else 1))
    theirs = {name: paper.get(name, {}).get("all", {}).get(key.removeprefix("test_")) for name in runs}
    clipped = {
        name: [r["raw_clip_fraction"] for r in runs[name] if r.get("raw_clip_fraction") is not None] for name in runs
    }
    measured = next(iter(runs.values()))[0]
    score = (measured.get("score") or "accuracy") if scored else "loss"
    kinds = measured["curve"][-1].get("raw_groups", []) if groups else []
    names = [f"{g['classes']:g} of {g['from']:g}" + ("" if g["to"] == g["from"] else f" to {g['to']:g}") for g in kinds]
    floored = {
        name: [r["fraction_floored"] for r in runs[name] if r.get("fraction_floored") is not None] for name in runs
    }
    headers = ["method", "choice", "clipped", *(["floored"] if any(floored.values()) else []), score]
    if any(value is not None for value in theirs.values()):
        headers.append("paper")
    lines = ["| " + " | ".join([*headers, *names]) + " |", "|" + "---|" * (len(headers) + len(names))]
    for name in order:
        cells = [name, choice(runs[name][0]), share(fmean(clipped[name]) if clipped[name] else None)]
        if "floored" in headers:
            cells.append(share(fmean(floored[name])) if floored[name] else "")
        cells.append(spread([run[key] for run in runs[name]], scored))
        if "paper" in headers:
            cells.append(shown(theirs[name], scored))
        for index, group in enumerate(kinds):
            values = [run["curve"][-1]["raw_groups"][index][groups] for run in runs[name]]
            number, percent = paper.get(name, {}).get(f"{group['from']:g}", {}).get(groups), groups == "accuracy"
            theirs_too = "" if number is None else f" ({100 * number if percent else number:.3g})"
            cells.append(spread(values, percent) + theirs_too)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def side_by_side(folder: Path, kind: str | None) -> str:
    """The comparisons in a folder: accuracy, noise step or rate, and the share of coordinates on the floor."""
    folders = [path.parent for path in sorted(folder.glob("*/runs.jsonl"))]
    found = {
        one.name: finals(one) for one in folders if kind is None or one.name.startswith("test-") == (kind == "tests")
    }
    lines = [f"| method | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    for method in next(iter(found.values())):
        cells: list[str] = []
        for runs in (own[method] for own in found.values()):
            floored = [run["fraction_floored"] for run in runs if run["fraction_floored"] is not None]
            detail = [choice(runs[0]), *([share(fmean(floored))] if floored else [])]
            cells.append(f"{spread([run['test_accuracy'] for run in runs], True)} ({', '.join(detail)})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """A page with its tables written anew."""

    def written(match: re.Match[str]) -> str:
        folder = RECORDS / match[2]
        if folder.name == "bias-map":
            records = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
            return match[1] + bias_map.table(match[3], records)
        if folder.name in ("bias", "bias-plain"):
            return match[1] + side_by_side(folder, match[3])
        return match[1] + table(folder, {"groups": "accuracy", "losses": "loss"}.get(match[3], ""))

    return PLACE.sub(written, text)


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
