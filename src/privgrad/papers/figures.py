"""Plots of the measurements along single trainings: histograms, cosines and curves over trials.

`moments` calls `histograms_figure` and `cosines_figure`; `clipping_bias` and `toy_regression` call `curves_figure`. The
privacy guarantee does not rest on this file.
"""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from privgrad.experiments.report.figures import COLORS, add_legend, method_label


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
    figure.suptitle("NOT PRIVATE", fontsize=9, ha="right", x=0.99)
    return figure


def cosines_figure(matrices: Mapping[int, Tensor]) -> Figure:
    """Plot one matrix per step: the cosines between the gradients of all pairs of examples, sorted by class."""
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
    """Plot each trial as a thin line and the mean over trials as a thick line, by method.

    All trials of a method have the same x values.
    """
    figure = Figure(figsize=(6.4, 4))
    ax = figure.subplots()
    for color, (method, trials) in zip(COLORS, curves.items(), strict=False):
        for trial in trials:
            ax.plot(*zip(*trial, strict=True), color=color, alpha=0.25, linewidth=1)
        steps = [step for step, _ in trials[0]]
        means = [statistics.fmean(losses) for losses in zip(*([y for _, y in t] for t in trials), strict=True)]
        ax.plot(steps, means, color=color, linewidth=2.2, label=method_label(method))
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale)
    if xscale == "linear":
        ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    add_legend(figure, ax)
    return figure
