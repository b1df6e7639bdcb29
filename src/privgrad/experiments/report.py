"""Records of trainings -> a terminal table, two plots and one self-contained web page."""

import base64
import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from importlib import resources
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table
from rich.text import Text

from privgrad.errors import expected

Record = Mapping[str, Any]

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
_DASH = "–"


def summarize(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Reduce the records to one row a method, in first-seen order.

    Computes: mean and standard deviation (ddof = 1) over the final runs. A mean is None unless every final
    run has the number: a mean over the rest would flatter a method that diverged. So is epsilon.

    Args:
        records: one mapping a training run, phase "tuning" or "final".
    Returns:
        Rows with the keys method; lr (None if the final runs differ in it); lr_at_edge (None unless more than
        one lr was tuned); seeds (number of final runs); test_accuracy_mean, test_accuracy_std,
        test_loss_mean, test_loss_std (std is None with one seed); epsilon (max); sampling ("fixed" if any
        run was); fraction_floored and seconds (means, or None).
    Privacy:
        NOT private for the held-out examples that accuracy and loss were measured on.
    """
    return [_summary_row(method, runs) for method, runs in _by_method(records).items()]


def _summary_row(method: str, runs: Sequence[Record]) -> dict[str, Any]:
    finals = _phase(runs, "final")
    schemes = {run.get("sampling") for run in runs}
    rates, grid = ({run["lr"] for run in _phase(runs, phase)} for phase in ("final", "tuning"))
    lr = rates.pop() if len(rates) == 1 else None
    accuracy, loss = _numbers(finals, "test_accuracy"), _numbers(finals, "test_loss")
    return {
        "method": method,
        "lr": lr,
        "lr_at_edge": (lr <= min(grid) or lr >= max(grid)) if len(grid) > 1 and lr is not None else None,
        "seeds": len(finals),
        "test_accuracy_mean": _mean(accuracy),
        "test_accuracy_std": _std(accuracy),
        "test_loss_mean": _mean(loss),
        "test_loss_std": _std(loss),
        # NaN counts as worse than any number.
        "epsilon": max(_numbers(finals, "epsilon"), key=lambda value: (math.isnan(value), value), default=None),
        "sampling": "fixed" if "fixed" in schemes else (schemes.pop() if len(schemes) == 1 else None),
        "fraction_floored": _mean(_numbers(finals, "fraction_floored")),
        "seconds": _mean(_numbers(finals, "seconds")),
        "updates": _mean(_numbers(finals, "updates")),
    }


def summary_table(records: Iterable[Record]) -> Table:
    """Lay the rows of summarize out for a terminal.

    Args:
        records: one mapping a training run.
    Returns:
        A rich table, one row a method.
    Privacy:
        NOT private for the held-out examples that accuracy and loss were measured on.
    """
    table = Table(caption="± one standard deviation over seeds. Measured on test examples, without privacy for those.")
    # Not wrapped: on a narrow terminal the name would be the first column to vanish.
    table.add_column("method", no_wrap=True)
    for name in ("accuracy", "loss", "ε", "lr", "seeds", "floored"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in map(_row_texts, summarize(records)):
        epsilon = row["epsilon"] + (" ⚠ not covered" if row["uncovered"] else "")
        lr = row["lr"] + (" ⚠ edge" if row["lr_at_edge"] else "")
        cells = (row["method"], row["accuracy"], row["loss"], epsilon, lr, row["seeds"], row["floored"])
        # Text, not str: a method's name must not be read as markup.
        table.add_row(*map(Text, cells))
    return table


def write_report(records: Iterable[Record], context: Mapping[str, Any], folder: str | Path) -> Path:
    """Write index.html, accuracy.png and, if learning rates were tuned, learning_rate.png.

    Args:
        records: one mapping a training run; at least one with phase "final".
        context: title, command, data, plan, total_epsilon, machine, versions, specification; each may be missing.
        folder: where to write; made if it does not exist. Earlier reports in it are replaced.
    Returns:
        Path of index.html, which holds its plots and needs no other file.
    Raises:
        PrivacyError: there is no final run.
    Privacy:
        States the guarantee of the runs. The accuracies in it are NOT private for the held-out examples.
    """
    # The plan speaks for a run that does not say how it was sampled; if either says fixed, it was fixed.
    plan = context.get("plan") or {}
    first, last = {"sampling": plan.get("sampling")}, {"sampling": "fixed"} if plan.get("sampling") == "fixed" else {}
    records = [{**first, **record, **last} for record in records]
    if not _phase(records, "final"):
        condition, remedy = 'to hold a run with phase "final"', "run the chosen learning rate on the test set"
        raise expected("write_report", "records", condition, f"{len(records)} without one", remedy)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = summarize(records)
    draws: dict[str, Callable[..., Figure]] = {"accuracy": _accuracy_figure}
    if any(len({run["lr"] for run in runs}) > 1 for runs in _by_method(_phase(records, "tuning")).values()):
        draws["learning_rate"] = _learning_rate_figure
    pngs = {name: [_png(draw, records, narrow) for narrow in (False, True)] for name, draw in draws.items()}
    # A plot left by an earlier report into this folder would show other runs.
    (folder / "learning_rate.png").unlink(missing_ok=True)
    for name, (wide, _) in pngs.items():
        (folder / f"{name}.png").write_bytes(wide)
    page = _template().render(
        context=context,
        plan=plan,
        headline=_headline(rows),
        rows=[_row_texts(row) for row in rows],
        images={name: [base64.b64encode(png).decode() for png in pair] for name, pair in pngs.items()},
        privacy=_privacy(records, rows),
        lost=[r for r in _phase(records, "final") if (r.get("updates") or plan.get("steps")) != plan.get("steps")],
        optimizers={str(record["method"]): record.get("optimizer") for record in records},
    )
    (folder / "index.html").write_text(page, encoding="utf-8")
    return folder / "index.html"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(epsilon=_epsilon_text, short=_short)
    source = resources.files("privgrad.experiments").joinpath("report.html.j2")
    return environment.from_string(source.read_text("utf-8"))


def _by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record["method"]), []).append(record)
    return groups


def _phase(records: Iterable[Record], phase: str) -> list[Record]:
    return [record for record in records if record.get("phase") == phase]


def _numbers(runs: Sequence[Record], key: str) -> list[float]:
    """Values of one key, or nothing at all if a run lacks it."""
    values = [run.get(key) for run in runs]
    return [] if None in values else [float(value) for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    # A diverged run has no spread to speak of; statistics would raise on it.
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the best mean accuracy, and claim no more than the spread over seeds allows."""
    ranked = sorted((r for r in rows if _is_finite(r["test_accuracy_mean"])), key=lambda r: -r["test_accuracy_mean"])
    if not ranked:
        return "No method has a test accuracy for all of its final runs, so none is best."
    best, *rest = ranked
    seeds = "one seed" if best["seeds"] == 1 else f"{best['seeds']} seeds"
    figures = f"{_row_texts(best)['accuracy']} over {seeds}"
    if not rest:
        return f"{best['method']} reaches a test accuracy of {figures}; there is no other method to compare it with."
    lead = f"{best['method']} has the best mean test accuracy, {figures}"
    second = rest[0]["method"]
    gaps = [best["test_accuracy_mean"] - row["test_accuracy_mean"] for row in rest]
    if best["test_accuracy_std"] is None or rest[0]["test_accuracy_std"] is None:
        return f"{lead}; with one seed, {100 * gaps[0]:.1f} points more than {second} may be chance."
    stds = [max(best["test_accuracy_std"], row["test_accuracy_std"] or 0.0) for row in rest]
    close = [row["method"] for row, gap, std in zip(rest, gaps, stds, strict=True) if gap <= std]
    if close:
        return f"{lead}: within one standard deviation of {' and '.join(close)}, not a clear winner."
    return (
        f"{lead}: {100 * gaps[0]:.1f} points more than {second}, which is larger than the spread over "
        f"seeds (one standard deviation is at most {100 * stds[0]:.1f} points)."
    )


def _row_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of summarize as it is shown, both in the terminal and on the page."""
    return {
        "method": row["method"],
        "accuracy": _spread_text(row["test_accuracy_mean"], row["test_accuracy_std"], 100, ".1f", " %"),
        "loss": _spread_text(row["test_loss_mean"], row["test_loss_std"], 1, ".3f", ""),
        "epsilon": _epsilon_text(row["epsilon"]) if row["seeds"] else _DASH,
        "uncovered": row["sampling"] == "fixed",
        "lr": f"{row['lr']:g}" if row["lr"] is not None else ("several" if row["seeds"] else _DASH),
        "lr_at_edge": bool(row["lr_at_edge"]),
        "seeds": str(row["seeds"]),
        "floored": f"{100 * row['fraction_floored']:.0f} %" if _is_finite(row["fraction_floored"]) else _DASH,
        "seconds": f"{row['seconds']:.1f}" if _is_finite(row["seconds"]) else _DASH,
    }


def _spread_text(mean: float | None, std: float | None, scale: float, form: str, unit: str) -> str:
    if mean is None or not math.isfinite(mean):
        return _DASH if mean is None else "not finite"
    text = f"{scale * mean:{form}}{unit}"
    return text if std is None else f"{text} ± {scale * std:{form}}"


def _epsilon_text(epsilon: float | None) -> str:
    """Epsilon rounded up, never down, to two decimals (two digits if it is below 0.1)."""
    if epsilon is None or not math.isfinite(epsilon):
        return "not private"
    if epsilon > 1e6:
        return "over 1000000"
    exact = Decimal(repr(float(epsilon)))
    places = min(-2, exact.adjusted() - 1) if exact else -2
    return f"{exact.quantize(Decimal(1).scaleb(places), ROUND_CEILING):f}"


def _short(value: Any) -> str:
    """A setting as text: 1e-05 as 1e-5, floats to six digits, what is missing named so."""
    if value is None or isinstance(value, jinja2.Undefined):
        return "not recorded"
    return f"{value:.6g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def _privacy(records: Sequence[Record], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of the privacy statement that must be computed from the records."""
    epsilon = _summary_row("all", records)["epsilon"]
    fixed = [row["method"] for row in rows if row["sampling"] == "fixed"]
    budgets = {row["epsilon"] for row in rows if row["seeds"]}
    return {
        "epsilon": epsilon,
        "factor": f"{math.exp(epsilon):,.3g}" if epsilon is not None and epsilon < 15 else None,
        "delta": max(_numbers(_phase(records, "final"), "delta"), default=None),
        "fixed": ", ".join(fixed),
        # Runs of one plan differ in epsilon by nothing or by rounding.
        "unequal": len(budgets) > 1 and (None in budgets or not all(e <= 1.01 * min(budgets) for e in budgets)),
        "fewest_seeds": min(row["seeds"] for row in rows if row["seeds"]),
        "all_poisson": all(row["sampling"] == "poisson" for row in rows),
        "runs": len(records),
        "nonfinite": sum(int(record.get("raw_nonfinite_examples") or 0) for record in records),
    }


def _tuned(records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Per method its (learning rate, mean validation accuracy) in ascending order, diverged runs left out."""
    result = {}
    for method, runs in _by_method(_phase(records, "tuning")).items():
        found: dict[float, list[float]] = {}
        for run in runs:
            if _is_finite(run.get("validation_accuracy")):
                found.setdefault(run["lr"], []).append(run["validation_accuracy"])
        result[method] = [(lr, statistics.fmean(values)) for lr, values in sorted(found.items())]
    return result


def _curve(runs: Sequence[Record]) -> list[tuple[float, float, float, float]]:
    """Epsilon, mean accuracy, and the band of one standard deviation, at every step that all runs recorded."""
    curves = [
        {p["step"]: p for p in run.get("curve") or () if _is_finite(p.get("epsilon")) and _is_finite(p.get("accuracy"))}
        for run in runs
    ]
    points = []
    for step in sorted(set.intersection(*map(set, curves))):
        values = [curve[step]["accuracy"] for curve in curves]
        mean, std = statistics.fmean(values), _std(values) or 0.0
        epsilon = max(curve[step]["epsilon"] for curve in curves)
        points.append((epsilon, mean, max(0.0, mean - std), min(1.0, mean + std)))
    return points


def _looks(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Colour, marker and label of every method: the same in all plots."""
    styles = zip(cycle(_COLORS), cycle(_MARKERS), _by_method(records), strict=False)
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


def _accuracy_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Curves beside (narrow: above) the final accuracies."""
    looks, finals = _looks(records), _by_method(_phase(records, "final"))
    extra = 0.3 * max(0, len(finals) - 6)
    figure = Figure(figsize=(4.8, 7 + extra) if narrow else (10.4, 4 + extra))
    left, right = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, width_ratios=[5, 4])
    for row, (method, runs) in enumerate(finals.items()):
        _draw_curve(left, row, runs, looks[method])
        _draw_seeds(right, row, runs, looks[method])
    if not left.lines:
        left.text(0.5, 0.5, "no curve was recorded", ha="center", transform=left.transAxes)
    left.set(title="During training", xlabel="privacy spent, ε", ylabel="test accuracy")
    left.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    right.set(title="After the last step", xlabel="test accuracy", ylim=(len(finals) - 0.4, -0.6))
    right.set_yticks(range(len(finals)), [looks[method]["label"] for method in finals])
    right.locator_params(axis="x", nbins=4)
    right.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    _legend(figure, left)
    return figure


def _draw_curve(ax: Axes, row: int, runs: Sequence[Record], look: Mapping[str, Any]) -> None:
    """The mean over seeds as a line, one standard deviation as a band."""
    points = _curve(runs)
    if points:
        epsilons, means, low, high = zip(*points, strict=True)
        # Methods that reach the same accuracy hide each other's markers unless these are staggered.
        every = max(1, len(points) // 5)
        ax.plot(epsilons, means, **look, markevery=(row % every, every))
        ax.fill_between(epsilons, low, high, color=look["color"], alpha=0.16, linewidth=0)


def _draw_seeds(ax: Axes, row: int, runs: Sequence[Record], look: Mapping[str, Any]) -> None:
    """Every seed as a point, spread out over the height of its row, and a bar at the mean."""
    values = [run["test_accuracy"] for run in runs if _is_finite(run.get("test_accuracy"))]
    heights = [row + 0.4 * (i + 0.5) / len(values) - 0.2 for i in range(len(values))]
    ax.scatter(values, heights, color=look["color"], marker=look["marker"], s=44, edgecolor="white", zorder=3)
    # A mean over the seeds that did not diverge would flatter, as in summarize.
    if 1 < len(values) == len(runs):
        ax.vlines(statistics.fmean(values), row - 0.34, row + 0.34, color=look["color"], linewidth=3)


def _learning_rate_figure(records: Sequence[Record], *, narrow: bool = False) -> Figure:
    """Validation accuracy against learning rate, the chosen rate ringed."""
    looks, tuned = _looks(records), _tuned(records)
    figure = Figure(figsize=(4.8 if narrow else 7.2, 4))
    ax = figure.subplots()
    ax.set(title="Tuning", xlabel="learning rate", ylabel="validation accuracy")
    ax.set_xscale("log")
    chosen = {row["method"]: row["lr"] for row in summarize(records)}
    for method, points in tuned.items():
        ax.plot([x for x, _ in points], [y for _, y in points], **looks[method])
        ring = {lr: accuracy for lr, accuracy in points if lr == chosen[method]}
        ax.scatter(list(ring), list(ring.values()), s=190, facecolor="none", edgecolor="#222222", linewidth=1.4)
    rates = sorted({lr for points in tuned.values() for lr, _ in points})
    if len(rates) <= 7:
        ax.minorticks_off()
        ax.set_xticks(rates, [f"{lr:g}" for lr in rates])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    _legend(figure, ax)
    return figure


def _png(draw: Callable[..., Figure], records: Sequence[Record], narrow: bool) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        # A method's name in a script that the font lacks shows as boxes; the page still has it right.
        warnings.filterwarnings("ignore", message="Glyph")
        draw(records, narrow=narrow).savefig(buffer, format="png", dpi=170)
    return buffer.getvalue()
