"""Draw docs/img/accuracy.svg, the picture of README.md, from results/images/runs.jsonl.

Each point is the mean test accuracy of the recorded trainings of one set of images, at one epsilon. The file has its
own background and colors for light and dark windows, so that it is readable anywhere.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PICTURE = ROOT / "results/images/runs.jsonl", ROOT / "docs/img/accuracy.svg"
SET = "mnist"
EPSILONS = {0.5: "0.5", 1.0: "1", 3.0: "3"}  # and what is shown
LINES = {"recipe": "recipe", "network": "defaults", "opacus-cnn": "Opacus' example"}  # method -> what is shown
NOT_PRIVATE = "linear-recipe"
WIDTH, HEIGHT = 460, 350  # so narrow that text is readable on a phone
LEFT, RIGHT, TOP, BOTTOM = 62, 440, 44, 250
LOWEST, HIGHEST = 60, 100  # percent

STYLE = """
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1f2933 }
.back { fill: #ffffff } .grid { stroke: #d5dbe1 } .none { stroke: #52606d; stroke-dasharray: 6 5 }
polyline { fill: none; stroke-width: 3 }
.recipe { stroke: #00796b } .defaults { stroke: #b45309 } .opacus { stroke: #6d5bd0 }
.dot { stroke: none } .dot.recipe { fill: #00796b } .dot.defaults { fill: #b45309 } .dot.opacus { fill: #6d5bd0 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .back { fill: #1b2027 } .grid { stroke: #3a4450 } .none { stroke: #9aa5b1 }
  .recipe { stroke: #4db6ac } .defaults { stroke: #f0a35e } .opacus { stroke: #a99cf0 }
  .dot { stroke: none } .dot.recipe { fill: #4db6ac } .dot.defaults { fill: #f0a35e } .dot.opacus { fill: #a99cf0 }
}"""


def means(records: list[dict[str, Any]]) -> dict[tuple[str, float | None], float]:
    """Return the mean accuracy in percent of each method and epsilon that the set has records of."""
    found: dict[tuple[str, float | None], list[float]] = {}
    for one in records:
        if one["set"] == SET:
            found.setdefault((one["method"], one["epsilon"]), []).append(100 * one["accuracy"])
    return {key: statistics.mean(values) for key, values in found.items()}


def y_of(percent: float) -> float:
    """Return where a percentage is drawn."""
    return BOTTOM - (percent - LOWEST) / (HIGHEST - LOWEST) * (BOTTOM - TOP)


def x_of(place: int) -> float:
    """Return where an epsilon is drawn."""
    return LEFT + 30 + place * (RIGHT - LEFT - 60) / (len(EPSILONS) - 1)


def marker(kind: str, x: float, y: float) -> str:
    """Return a disk, a square or a diamond, so that the lines differ without color."""
    if kind == "recipe":
        return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "opacus" else ""
    return f'<rect class="dot {kind}" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"{turn}/>'


def shapes(found: dict[tuple[str, float | None], float]) -> Iterator[str]:
    """Yield the picture's elements, back to front."""
    yield f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    yield '<text x="16" y="26">test accuracy; the numbers below are at epsilon 3</text>'
    for percent in range(LOWEST, HIGHEST + 1, 10):
        y = y_of(percent)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 10}" y="{y + 5:.1f}" text-anchor="end">{percent} %</text>'
    for place, name in enumerate(EPSILONS.values()):
        label = f"epsilon {name}"
        yield f'<text x="{x_of(place):.1f}" y="{BOTTOM + 26}" text-anchor="middle">{label}</text>'
    y = y_of(found[NOT_PRIVATE, None])
    yield f'<line class="none" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke-width="2.5"/>'
    yield '<line class="none" x1="16" x2="36" y1="305" y2="305" stroke-width="2.5"/>'
    yield f'<text x="44" y="310">no privacy {found[NOT_PRIVATE, None]:.1f} %</text>'
    for (method, name), (left, below) in zip(LINES.items(), ((26, 333), (236, 305), (236, 333)), strict=True):
        kind = name.split("'")[0].lower()
        points = [(x_of(place), y_of(found[method, epsilon])) for place, epsilon in enumerate(EPSILONS)]
        yield f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        for point in (*points, (left, below)):
            yield marker(kind, *point)
        yield f'<text x="{left + 18}" y="{below + 5}">{name} {found[method, max(EPSILONS)]:.1f} %</text>'


def picture(records: list[dict[str, Any]]) -> str:
    """Return the picture of the records, as SVG."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    body = "\n".join(shapes(means(records)))
    title = "<title>Test accuracy against epsilon on MNIST</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{title}\n<style>{STYLE}\n</style>'
    return f"{head}\n{body}\n</svg>\n"


def read() -> list[dict[str, Any]]:
    """Return the records of all sets."""
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


if __name__ == "__main__":
    PICTURE.write_text(picture(read()))
