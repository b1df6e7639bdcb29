"""Records of trainings -> plots."""

import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from operator import methodcaller
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from privgrad.experiments.records import (
    Record,
    by_method,
    curve,
    groups_of,
    in_phase,
    is_finite,
    is_scored,
    measured_on,
    summarize,
    tuned,
    tuned_by,
)

# Okabe-Ito without its yellow, too pale on white. Seven colours and eight markers: 56 distinct pairs.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Everything that a user's own matplotlibrc could spoil, and our taste.
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "text.usetex": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
}


def _looks(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Colour, marker and label of every method: the same in all plots."""
    styles = zip(cycle(_COLORS), cycle(_MARKERS), by_method(records), strict=False)
    return {name: {"color": color, "marker": marker, "label": _label(name)} for color, marker, name in styles}


def _label(method: str) -> str:
    """A name that matplotlib neither reads as mathematics, nor hides for its leading underscore."""
    short = textwrap.shorten(method, 60, placeholder="…") or "…"
    return textwrap.fill(short, 24).replace("$", r"\$").replace("_", " _", 1 if short[0] == "_" else 0)


def _legend(figure: Figure, ax: Axes) -> None:
    """A legend below the plots, for which the figure grows: many methods must not squeeze the axes."""
    handles, labels = ax.get_legend_handles_labels()
    if len(handles) > 1:
        lines = [line for label in labels for line in label.splitlines()]
        columns = max(1, int(figure.get_figwidth() / (0.7 + 0.09 * max(map(len, lines)))))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(lines) / columns))


def accuracy_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Curves beside (narrow: above) the final accuracies; losses where there are no accuracies."""
    scored, on = is_scored(records), measured_on(records)
    number = "accuracy" if scored else "loss"
    label = f"{on} {number}" + (" (NOT PRIVATE)" if on == "training" else "")
    looks, finals = _looks(records), by_method(in_phase(records, "final"))
    extra = 0.3 * max(0, len(finals) - 6)
    figure = Figure(figsize=(4.8, 7 + extra) if narrow else (10.4, 4 + extra))
    left, right = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, width_ratios=[5, 4])
    for row, (method, runs) in enumerate(finals.items()):
        _draw_curve(left, row, runs, looks[method], methodcaller("get", number))
        _draw_seeds(right, row, runs, looks[method], f"test_{number}")
    if not left.lines:
        left.text(0.5, 0.5, "no curve was recorded", ha="center", transform=left.transAxes)
    left.set(title="During training", xlabel="privacy spent, ε", ylabel=label)
    right.set(title="After the last step", xlabel=label, ylim=(len(finals) - 0.4, -0.6))
    right.set_yticks(range(len(finals)), [looks[method]["label"] for method in finals])
    right.locator_params(axis="x", nbins=4)
    if scored:
        left.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        right.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    _legend(figure, left)
    return figure


def _draw_curve(
    ax: Axes,
    row: int,
    runs: Sequence[Record],
    look: Mapping[str, Any],
    measured: Callable[[Record], float | None] = methodcaller("get", "accuracy"),
) -> None:
    """The mean over seeds as a line, one standard deviation as a band."""
    points = curve(runs, measured)
    if points:
        epsilons, means, low, high = zip(*points, strict=True)
        # Methods that reach the same accuracy hide each other's markers unless these are staggered.
        every = max(1, len(points) // 5)
        ax.plot(epsilons, means, **look, markevery=(row % every, every))
        ax.fill_between(epsilons, low, high, color=look["color"], alpha=0.16, linewidth=0)


def groups_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Loss and accuracy during training, overall and by how frequent a class is; at most four groups."""
    looks, finals, groups = _looks(records), by_method(in_phase(records, "final")), groups_of(records)
    shown = sorted({round(i * (len(groups) - 1) / 3) for i in range(4)}) if len(groups) > 4 else range(len(groups))
    columns: list[tuple[str, int | None]] = [("all examples", None)]
    columns += [(_group_title(groups[index]), index) for index in shown]
    figure = Figure(figsize=(4.8, 2.3 * len(columns)) if narrow else (2.7 * len(columns), 5))
    axes = figure.subplots(len(columns), 2) if narrow else figure.subplots(2, len(columns)).T
    for (title, index), pair in zip(columns, axes, strict=True):
        for ax, number in zip(pair, ("loss", "accuracy"), strict=True):

            def measured(point: Record, number: str = number, index: int | None = index) -> float | None:
                return point.get(number) if index is None else point["raw_groups"][index][number]

            for row, (method, runs) in enumerate(finals.items()):
                _draw_curve(ax, row, runs, looks[method], measured)
            ax.set_title(title, fontsize=9)
            ax.set(ylabel=number, xlabel="ε")
            if number == "accuracy":
                ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
                ax.set_ylim(max(ax.get_ylim()[0], -0.05), min(ax.get_ylim()[1], 1.05))
    figure.suptitle("On training examples: NOT PRIVATE", fontsize=9, ha="right", x=0.99)
    _legend(figure, axes[0][0])
    return figure


def _group_title(group: Mapping[str, float]) -> str:
    sizes = f"{group['from']:g}" if group["from"] == group["to"] else f"{group['from']:g} to {group['to']:g}"
    return f"{group['classes']:g} × {sizes} examples"


def _draw_seeds(ax: Axes, row: int, runs: Sequence[Record], look: Mapping[str, Any], key: str) -> None:
    """Every seed as a point, spread out over the height of its row, and a bar at the mean."""
    values = [run[key] for run in runs if is_finite(run.get(key))]
    heights = [row + 0.4 * (i + 0.5) / len(values) - 0.2 for i in range(len(values))]
    ax.scatter(values, heights, color=look["color"], marker=look["marker"], s=44, edgecolor="white", zorder=3)
    # A mean over the seeds that did not diverge would flatter, as in summarize.
    if 1 < len(values) == len(runs):
        ax.vlines(statistics.fmean(values), row - 0.34, row + 0.34, color=look["color"], linewidth=3)


def learning_rate_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """What tuning looked at against learning rate, the chosen rate ringed."""
    looks, found, by = _looks(records), tuned(records), tuned_by(records)
    figure = Figure(figsize=(4.8 if narrow else 7.2, 4))
    ax = figure.subplots()
    ax.set(
        title="Tuning",
        xlabel="learning rate",
        ylabel=by.replace("raw_train_loss", "training loss (NOT PRIVATE)").replace("_", " "),
    )
    ax.set_xscale("log")
    chosen = {row["method"]: row["lr"] for row in summarize(records)}
    for method, points in found.items():
        ax.plot([x for x, _ in points], [y for _, y in points], **looks[method])
        ring = {lr: value for lr, value in points if lr == chosen[method]}
        ax.scatter(list(ring), list(ring.values()), s=190, facecolor="none", edgecolor="#222222", linewidth=1.4)
    rates = sorted({lr for points in found.values() for lr, _ in points})
    if len(rates) <= 7:
        ax.minorticks_off()
        ax.set_xticks(rates, [f"{lr:g}" for lr in rates])
    if by == "validation_accuracy":
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    _legend(figure, ax)
    return figure


def histograms_figure(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """One panel beside the other: how many coordinates have which value, with and without noise."""
    figure = Figure(figsize=(4.2 * len(panels), 3.6))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, counts) in zip(axes, panels.items(), strict=True):
        for color, (name, values) in zip(_COLORS, ((k, v) for k, v in counts.items() if k != "edges"), strict=False):
            ax.stairs(values, counts["edges"], color=color, label=name, linewidth=1.6)
        ax.set(title=title, yscale="log", ylabel="coordinates")
        ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
        ax.legend(frameon=False)
    figure.suptitle("NOT PRIVATE", fontsize=9, ha="right", x=0.99)
    return figure


def cosines_figure(matrices: Mapping[int, Tensor]) -> Figure:
    """One panel a step: cosines between the gradients of all pairs of examples, sorted by class."""
    figure = Figure(figsize=(3.6 * len(matrices) + 0.6, 3.8))
    axes = figure.subplots(1, len(matrices), squeeze=False)[0]
    image = None
    for ax, (t, matrix) in zip(axes, matrices.items(), strict=True):
        image = ax.imshow(matrix.numpy(), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        ax.set(title=f"step {t}", xticks=[], yticks=[], xlabel="examples, by class")
        ax.grid(visible=False)
    if image is not None:
        figure.colorbar(image, ax=list(axes), label="cosine (NOT PRIVATE)")
    return figure


def curves_figure(
    curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]],
    *,
    xlabel: str = "step",
    ylabel: str = "loss",
    xscale: str = "linear",
    yscale: str = "linear",
) -> Figure:
    """By method every trial thin, their mean thick; all trials of a method have the same x."""
    figure = Figure(figsize=(6.4, 4))
    ax = figure.subplots()
    for color, (method, trials) in zip(_COLORS, curves.items(), strict=False):
        for trial in trials:
            ax.plot(*zip(*trial, strict=True), color=color, alpha=0.25, linewidth=1)
        steps = [step for step, _ in trials[0]]
        means = [statistics.fmean(losses) for losses in zip(*([y for _, y in t] for t in trials), strict=True)]
        ax.plot(steps, means, color=color, linewidth=2.2, label=_label(method))
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale)
    _legend(figure, ax)
    return figure


def png(draw: Callable[[], Figure]) -> bytes:
    """What draw makes, in the house's style."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        # A method's name in a script that the font lacks shows as boxes; the page still has it right.
        warnings.filterwarnings("ignore", message="Glyph")
        draw().savefig(buffer, format="png", dpi=170)
    return buffer.getvalue()
