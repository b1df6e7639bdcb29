"""Plots of records of trainings, and of the measurements of papers along single trainings."""

import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, pairwise
from operator import methodcaller
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation
from torch import Tensor

from privgrad_lab import records as recorded
from privgrad_lab.records import Record
from privgrad_lab.report.texts import TUNED_TITLES, group_title, judged, tuned_by_text
from privgrad_lab.tuner import Verdict

Look = Mapping[str, Any]  # color, marker and label
Measured = Callable[[Record], float | None]  # a number of a point of a curve

# Okabe-Ito without its yellow, which is too pale on white. Seven colors and eight markers give 56 distinct pairs.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MOST_LAYERS = 7
WIDE, NARROW = 7.6, 3.7  # inches: at the widths of the page and of a phone, an inch is nearly 100 pixels
# The settings that a user's matplotlibrc could break, and the style of our plots.
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "text.usetex": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "privgrad",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
}

_FONTS = b"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def _percent(share: float, position: float | None = None) -> str:
    return f"{100 * share:.4g} %"


def _looks(names: Iterable[str], before: str = "") -> dict[str, dict[str, Any]]:
    styles = zip(cycle(COLORS), cycle(_MARKERS), names, strict=False)
    return {
        name: {"color": color, "marker": marker, "label": method_label(before + name)} for color, marker, name in styles
    }


def method_label(method: str) -> str:
    """Return a label that matplotlib neither reads as mathematics nor hides because of a leading underscore."""
    short = textwrap.shorten(method, 60, placeholder="…") or "…"
    return textwrap.fill(short, 24).replace("$", r"\$").replace("_", " _", 1 if short[0] == "_" else 0)


def add_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Add the longest legend of the plots below them, and make the figure taller, so that the axes keep their size."""
    handles, labels = max((ax.get_legend_handles_labels() for ax in axes), key=lambda pair: len(pair[0]))
    if len(handles) > 1:
        lines = [line for label in labels for line in label.splitlines()]
        columns = max(1, int(figure.get_figwidth() / (0.7 + 0.09 * max(map(len, lines)))))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(lines) / columns))


def _measured(records: Sequence[Record]) -> dict[str, str]:
    score, finals = recorded.score_of(records), recorded.in_phase(records, "final")
    shown = {"accuracy": score} if any(run.get("test_accuracy") is not None for run in finals) else {}
    return shown | ({"absolute_error": "mean absolute error"} if score == "R2" else {"loss": "loss"})


def accuracy_figure(records: Sequence[Record], *, narrow: bool = False, at_end: bool = False) -> Figure:
    """Plot score (if there is one) and loss, or mean absolute error, along training, or of each seed `at_end`."""
    looks, finals = _looks(recorded.by_method(records)), recorded.by_method(recorded.in_phase(records, "final"))
    shown, lines = _measured(records), sum(1 + looks[method]["label"].count("\n") for method in finals)
    height, rows = 0.9 + 0.28 * lines if at_end else 2.9, len(shown) if narrow else 1
    on = recorded.measured_on(records)
    figure = Figure(figsize=(NARROW if narrow else WIDE, height * rows))
    axes = figure.subplots(rows, len(shown) // rows, squeeze=False).flatten()
    for ax, (number, name) in zip(axes, shown.items(), strict=True):
        label = f"{on} {name}{' (NOT PRIVATE)' * (on == 'training')}"
        for row, (method, runs) in enumerate(finals.items()):
            if at_end:
                _draw_seeds(ax, row, runs, looks[method], f"test_{number}")
                continue
            _draw_curve(ax, row, runs, looks[method], methodcaller("get", number), _along(records))
            if runs[0].get("non_private") and (ends := recorded.numbers(runs, f"test_{number}")):  # spends no epsilon
                look = {"color": looks[method]["color"], "label": looks[method]["label"]}
                ax.axhline(statistics.fmean(ends), **look, linestyle="--", zorder=1)
        if at_end:
            ax.set(title="At the end, every seed", xlabel=label, ylim=(len(finals) - 0.4, -0.6))
            names = [looks[method]["label"] for method in finals] if narrow or ax is axes[0] else []
            ax.set_yticks(range(len(finals)), names or [""] * len(finals))
            ax.locator_params(axis="x", nbins=4)
        else:
            along = {"epsilon": "privacy spent, ε", "step": "step"}[_along(records)]
            ax.set(title=f"{name[0].upper()}{name[1:]} during training", xlabel=along, ylabel=label)
        if number == "accuracy" and name != "R2":
            (ax.xaxis if at_end else ax.yaxis).set_major_formatter(_percent)
        drawn = [float(y) for line in ax.lines for y in np.asarray(line.get_ydata())]
        if number == "loss" and not at_end and drawn and min(drawn) > 0 and max(drawn) > 20 * min(drawn):
            ax.set_yscale("log")
        if number == "accuracy" and not at_end:
            ax.set_ylim(top=min(ax.get_ylim()[1], 1.005))  # no tick above 100 %
    if not at_end:
        add_legend(figure, axes[:1])
    return figure


def _along(records: Sequence[Record]) -> str:
    finals = recorded.in_phase(records, "final")
    return "epsilon" if any(recorded.is_finite(run.get("epsilon")) for run in finals) else "step"


def _draw_curve(ax: Axes, row: int, runs: Sequence[Record], look: Look, measured: Measured, along: str) -> None:
    points = recorded.curve(runs, measured, along=along)
    if points:
        places, means, low, high = zip(*points, strict=True)
        # Staggered, so that methods with equal accuracy do not hide each other's markers.
        every = max(1, len(points) // 5)
        ax.plot(places, means, **look, markevery=(row % every, every))
        ax.fill_between(places, low, high, color=look["color"], alpha=0.16, linewidth=0)


def groups_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Plot loss and accuracy during training, overall and by class frequency, for at most four groups."""
    looks, groups = _looks(recorded.by_method(records)), recorded.groups_of(records)
    finals = recorded.by_method(recorded.in_phase(records, "final"))
    shown = sorted({round(i * (len(groups) - 1) / 3) for i in range(4)}) if len(groups) > 4 else range(len(groups))
    columns: list[tuple[str, int | None]] = [("all examples", None)]
    columns += [(group_title(groups[index]), index) for index in shown]
    figure = Figure(figsize=(NARROW if narrow else WIDE, 2.3 * len(columns) * (1 + narrow)))
    axes = figure.subplots(len(columns) * (1 + narrow), 2 - narrow).reshape(len(columns), 2)
    for (title, index), pair in zip(columns, axes, strict=True):
        for ax, number in zip(pair, ("loss", "accuracy"), strict=True):
            measured = partial(_of_group, number, index)
            for row, (method, runs) in enumerate(finals.items()):
                _draw_curve(ax, row, runs, looks[method], measured, _along(records))
            ax.set_title(title, fontsize=9)
            ax.set(ylabel=number, xlabel={"epsilon": "ε", "step": "step"}[_along(records)])
            if number == "accuracy":
                ax.yaxis.set_major_formatter(_percent)
                ax.set_ylim(max(ax.get_ylim()[0], -0.05), min(ax.get_ylim()[1], 1.05))
    _warn(figure, "On training examples: NOT PRIVATE")
    add_legend(figure, axes[0][:1])
    return figure


def _of_group(number: str, index: int | None, point: Record) -> float | None:
    return point.get(number) if index is None else point["raw_groups"][index][number]


def _draw_seeds(ax: Axes, row: int, runs: Sequence[Record], look: Look, key: str) -> None:
    values = [run[key] for run in runs if recorded.is_finite(run.get(key))]
    heights = [row + 0.4 * (i + 0.5) / len(values) - 0.2 for i in range(len(values))]
    ax.scatter(values, heights, color=look["color"], marker=look["marker"], s=44, edgecolor="white", zorder=3)
    # As in summarize, a mean over only those seeds that did not diverge would flatter the method.
    if 1 < len(values) == len(runs):
        ax.vlines(statistics.fmean(values), row - 0.34, row + 0.34, color=look["color"], linewidth=3)


def tuning_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Plot the measurement that tuning compared against each tuned quantity; rings mark the chosen values."""
    looks, names = _looks(recorded.by_method(records)), recorded.tuned_names(records)
    found = {name: judged(records, name) for name in names}
    lines = {name: sum(1 + looks[m]["label"].count("\n") for m in shown) for name, shown in found.items()}
    heights = [height for name in names for height in ([3.4, 0.6 + 0.28 * lines[name]] if found[name] else [3.4])]
    figure = Figure(figsize=(NARROW if narrow else WIDE, sum(heights) + 0.4))
    axes = iter(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).flatten())
    for name in names:
        _draw_tuned(above := next(axes), name, records, looks)
        if found[name]:
            _draw_plateaus(next(axes), found[name], looks, above)
    add_legend(figure, figure.axes[:1])
    return figure


def _draw_tuned(ax: Axes, name: str, records: Sequence[Record], looks: Mapping[str, Look]) -> None:
    chosen = {row["method"]: row[name] for row in recorded.summarize(records)}
    by, title, drawn = recorded.tuned_by(records), TUNED_TITLES[name], recorded.tuned_seeds(records, name)
    ax.set(title=title[0].upper() + title[1:], xlabel=title, ylabel=tuned_by_text(records))
    values = sorted({x for points in drawn.values() for x, _ in points})
    is_log = min(values) > 0
    gaps = [math.log(high / low) if is_log else high - low for low, high in pairwise(values)]
    for index, (method, points) in enumerate(drawn.items()):
        ax.plot([x for x, _ in points], [statistics.fmean(ys) for _, ys in points], **looks[method])
        # Next to the mean, so that the seeds of all methods are visible.
        aside = 0.25 * min(gaps, default=0.0) * ((index + 1) / (len(drawn) + 1) - 0.5)
        seeds = [(x * math.exp(aside) if is_log else x + aside, y) for x, ys in points for y in ys if len(ys) > 1]
        look = {"color": looks[method]["color"], "marker": looks[method]["marker"]}
        ax.scatter([x for x, _ in seeds], [y for _, y in seeds], **look, s=16, alpha=0.6, linewidth=0)
        ring = {x: statistics.fmean(ys) for x, ys in points if x == chosen[method]}
        ax.scatter(list(ring), list(ring.values()), s=190, facecolor="none", edgecolor="#222222", linewidth=1.4)
    _mark_tried(ax, values)
    if by == "validation_accuracy" and recorded.score_of(records) != "R2":
        ax.yaxis.set_major_formatter(_percent)


def _draw_plateaus(ax: Axes, found: Mapping[str, Verdict], looks: Mapping[str, Look], above: Axes) -> None:
    """Draw by method the rates that are level with the best one, and an arrow at each end that may be as good."""
    for row, (method, verdict) in enumerate(found.items()):
        color, best = looks[method]["color"], verdict.best.noise_step or verdict.best.lr or math.nan
        ax.plot(verdict.rates, [row] * len(verdict.rates), color="#999999", marker="|", linestyle="none")
        ax.plot([verdict.low, verdict.high], [row, row], color=color, linewidth=8, alpha=0.45, solid_capstyle="round")
        ax.plot([best], [row], color=color, marker=looks[method]["marker"], linestyle="none")
        ends = ((verdict.rates[0], verdict.lead_low, "<", -9), (verdict.rates[-1], verdict.lead_high, ">", 9))
        for end, lead, arrow, aside in ends:
            if not lead > verdict.spread:  # also for a spread that is nan
                place = ax.transData + ScaledTranslation(aside / 72, 0, ax.figure.dpi_scale_trans)
                ax.plot([end], [row], color="#222222", marker=arrow, linestyle="none", markersize=6, transform=place)
    ax.set(title="As good as the best", ylim=(len(found) - 0.4, -0.6))
    ax.set_yticks(range(len(found)), [looks[method]["label"] for method in found])
    _mark_tried(ax, sorted({rate for verdict in found.values() for rate in verdict.rates}))
    ax.set_xlim(above.get_xlim())


def _mark_tried(ax: Axes, values: Sequence[float]) -> None:
    if values[0] > 0:
        ax.set_xscale("log")
    if len(values) <= 7:
        ax.minorticks_off()
        ax.set_xticks(values, [f"{x:g}" for x in values])
    elif values[0] > 0:
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3) if values[-1] <= 1000 * values[0] else (1,)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())


def diagnosis_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Plot diagnostics over the steps: the share clipped, and by layer signal / noise and the share on the floor."""
    shown = recorded.diagnosed(records)
    layers = list(dict.fromkeys(name for runs in shown.values() for name in _last_layers(runs)))
    if len(layers) > _MOST_LAYERS:  # show evenly spaced layers, from the first to the last
        layers = [layers[round(i * (len(layers) - 1) / (_MOST_LAYERS - 1))] for i in range(_MOST_LAYERS)]
    looks = _looks(layers, "layer ")
    panels = {method: list(_PANELS) for method in shown}
    for method, runs in shown.items():
        if not any("fraction_floored" in layer for layer in _last_layers(runs).values()):  # no debiased optimizer
            panels[method].remove("fraction_floored")
    columns = 1 if narrow else max(map(len, panels.values()))
    rows = sum(map(len, panels.values())) if narrow else len(panels)
    figure = Figure(figsize=(NARROW if narrow else WIDE, 2.3 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    places = iter(grid.flatten())
    compared: list[Axes] = []
    for row, (method, numbers) in enumerate(panels.items()):
        for number, ax in zip(numbers, places if narrow else grid[row], strict=False):
            _draw_diagnosis(ax, shown[method], number, looks)
            ax.set_title(f"{method_label(method)}: {_PANELS[number]}", fontsize=9)
            compared += [ax] if number == "raw_signal_to_noise" and len(ax.lines) > 1 else []
        if not narrow:
            for ax in grid[row][len(numbers) :]:
                ax.remove()
    low, high = ([ends[i] for ends in (ax.get_ylim() for ax in compared)] for i in (0, 1))
    for ax in compared:
        ax.set_ylim(min(low), max(high))
    _warn(figure)
    add_legend(figure, figure.axes)
    return figure


_PANELS = {"raw_clip_fraction": "clipped", "raw_signal_to_noise": "signal / noise", "fraction_floored": "on the floor"}


def _draw_diagnosis(ax: Axes, runs: Sequence[Record], number: str, looks: Mapping[str, Look]) -> None:
    ax.set_xlabel("round" if recorded.trains_locally(runs[0]) else "step")
    if number == "raw_clip_fraction":
        whole = {"color": "#555555", "marker": "o", "label": "all layers"}
        _draw_curve(ax, 0, runs, whole, methodcaller("get", number), "step")

    def of_layer(name: str, point: Record) -> float | None:
        return point.get("raw_layers", {}).get(name, {}).get(number)

    for index, (name, look) in enumerate(looks.items() if number != "raw_clip_fraction" else ()):
        _draw_curve(ax, index, runs, look, partial(of_layer, name), "step")
    if number == "raw_signal_to_noise":
        if ax.lines:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
        ax.axhline(1, color="#999999", linewidth=1, linestyle="--", zorder=0)
    else:
        ax.yaxis.set_major_formatter(_percent)
        ax.set_ylim(-0.05, 1.05)


def _last_layers(runs: Sequence[Record]) -> Mapping[str, Mapping[str, float | None]]:
    return next(row["raw_layers"] for row in reversed(runs[0]["curve"]) if "raw_layers" in row)


_KINDS = {
    "raw_clean": ("without the noise (NOT PRIVATE)", "#59616b", ":"),
    "noisy": ("as released", "#D55E00", "-"),
    "debiased": ("noise variance subtracted (debiased)", "#0072B2", "-"),
}


def moments_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Plot histograms of the second moments after the last step, by method, in units of the noise's variance."""
    found = {method: recorded.histograms(runs) for method, runs in recorded.diagnosed(records).items()}
    shown = {method: counts for method, counts in found.items() if counts}
    columns = 1 if narrow else min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(NARROW if narrow else WIDE, 2.9 * rows + 0.3))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, (method, found) in zip(axes, shown.items(), strict=False):
        for kind, (label, color, line) in _KINDS.items():
            if kind in found:
                # Values beyond the outermost edges are counted in the outermost bins.
                ax.stairs(found[kind], found["edges"], color=color, linestyle=line, label=label, linewidth=1.8)
        ax.axvline(1, color="#999999", linewidth=1, linestyle="--", zorder=0)
        ax.set(title=method_label(method), xscale="log", ylabel="coordinates")
        ax.set_xlabel("second moment / variance of the noise")
        ax.yaxis.set_major_formatter(_percent)
    for ax in axes[len(shown) :]:
        ax.remove()
    _warn(figure)
    add_legend(figure, axes[: len(shown)])
    return figure


def _warn(figure: Figure, text: str = "NOT PRIVATE") -> None:
    figure.suptitle(text, fontsize=9, ha="right", x=0.99)


def svg(draw: Callable[[], Figure]) -> bytes:
    """Return the figure that `draw` makes as an SVG file, whose text is in the font of the reader's system."""
    return png(draw, form="svg").replace(b"'DejaVu Sans'", _FONTS)


def png(draw: Callable[[], Figure], form: str = "png") -> bytes:
    """Return the figure that `draw` makes as a file, in the style of our plots."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        # A method's name in a script that the font lacks is drawn as boxes; the page shows it correctly.
        warnings.filterwarnings("ignore", message="Glyph")
        more: dict[str, Any] = {"metadata": {"Date": None}, "transparent": True} if form == "svg" else {"dpi": 170}
        draw().savefig(buffer, format=form, **more)
    return buffer.getvalue()


def histograms_figure(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Plot histograms over the coordinates in panels side by side, with and without noise."""
    figure = Figure(figsize=(4.2 * len(panels), 3.6))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, counts) in zip(axes, panels.items(), strict=True):
        for color, (name, values) in zip(COLORS, ((k, v) for k, v in counts.items() if k != "edges"), strict=False):
            ax.stairs(values, counts["edges"], color=color, label=name, linewidth=1.6)
        ax.set(title=title, yscale="log", ylabel="coordinates")
        ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
        ax.legend(frameon=False)
    _warn(figure)
    return figure


def cosines_figure(matrices: Mapping[int, Tensor]) -> Figure:
    """Plot one matrix per step: the cosines between the gradients of all pairs of examples, sorted by class."""
    figure = Figure(figsize=(3.6 * len(matrices) + 0.6, 3.8))
    axes = figure.subplots(1, len(matrices), squeeze=False)[0]
    for ax, (t, matrix) in zip(axes, matrices.items(), strict=True):
        ax.imshow(matrix.numpy(), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        ax.set(title=f"step {t}", xticks=[], yticks=[], xlabel="examples, by class")
        ax.grid(visible=False)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="cosine (NOT PRIVATE)")
    return figure


def curves_figure(curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]], **look: str) -> Figure:
    """Plot each trial as a thin line, and the mean over trials as a thick one, by method; `look` is for `Axes.set`."""
    figure = Figure(figsize=(6.4, 4))
    ax = figure.subplots()
    for color, (method, trials) in zip(COLORS, curves.items(), strict=False):
        for trial in trials:
            ax.plot(*zip(*trial, strict=True), color=color, alpha=0.25, linewidth=1)
        steps = [step for step, _ in trials[0]]
        means = [statistics.fmean(losses) for losses in zip(*([y for _, y in t] for t in trials), strict=True)]
        ax.plot(steps, means, color=color, linewidth=2.2, label=method_label(method))
    ax.set(**({"xlabel": "step", "ylabel": "loss"} | look))
    if ax.get_xscale() == "linear":
        ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    add_legend(figure, [ax])
    return figure
