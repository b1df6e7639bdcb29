"""Numbers of a report as text, for the terminal and for the web page.

`report.terminal`, `report.page` and the command line call it. The privacy guarantee does not rest on this file: it only
states the guarantee.
"""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any

from privgrad.experiments.records import is_finite

_EDGES = (("learning rate", "lr"), ("clipping norm", "norm"), ("radius", "radius"), ("local lr", "local_lr"))
_DASH = "–"
SIMULATED = "∞ (simulates ε): the mean gradients have the noise of a plan of this ε, in smaller batches; NOT private."


def row_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of `summarize` as texts, for the terminal and for the page."""
    others = {"C": row["max_grad_norm"] if row["norm_at_edge"] is not None else None}
    others |= {name: row[key] for name, key in _EDGES[2:]}
    return {
        "method": row["method"],
        "accuracy": _spread_text(row["test_accuracy_mean"], row["test_accuracy_std"], 100, ".1f", " %"),
        "loss": _spread_text(row["test_loss_mean"], row["test_loss_std"], 1, ".3f", ""),
        "epsilon": _cost_text(row) if row["seeds"] else _DASH,
        "uncovered": row["sampling"] == "fixed",
        "lr": f"{row['lr']:g}" if row["lr"] is not None else ("several" if row["seeds"] else _DASH),
        "others": [f"{name} {value:g}" for name, value in others.items() if value is not None],
        "at_edge": " and ".join(name for name, key in _EDGES if row[f"{key}_at_edge"]),
        "seeds": str(row["seeds"]),
        "floored": f"{100 * row['fraction_floored']:.0f} %" if is_finite(row["fraction_floored"]) else _DASH,
        "seconds": f"{row['seconds']:.1f}" if is_finite(row["seconds"]) else _DASH,
    }


def _spread_text(mean: float | None, std: float | None, scale: float, form: str, unit: str) -> str:
    """Return a mean with its standard deviation, if there is one, as text."""
    if mean is None or not math.isfinite(mean):
        return _DASH if mean is None else "not finite"
    text = f"{scale * mean:{form}}{unit}"
    return text if std is None else f"{text} ± {scale * std:{form}}"


def _cost_text(row: Mapping[str, Any]) -> str:
    """Return the epsilon of a row as text, with that of the simulated plan if its runs are simulations."""
    if is_finite(row["simulates_epsilon"]):
        return f"∞ (simulates {epsilon_text(row['simulates_epsilon'])})"
    return epsilon_text(row["epsilon"])


def epsilon_text(epsilon: float | None) -> str:
    """Return epsilon rounded up, never down, to two decimals (two digits if it is below 0.1).

    `report.page` also calls it, as a filter of its template.
    """
    if epsilon is None or not math.isfinite(epsilon):
        return "not private"
    if epsilon > 1e6:
        return "over 1000000"
    exact = Decimal(repr(float(epsilon)))
    places = min(-2, exact.adjusted() - 1) if exact else -2
    return f"{exact.quantize(Decimal(1).scaleb(places), ROUND_CEILING):f}"


def total_text(total: Mapping[str, Any], *, tuned: bool) -> str:
    """Describe the total cost of all trainings on the same data in one or two sentences.

    `report.page` shows it; `privgrad train` and `compare` print it.

    Args:
        total: "value" (epsilon; None if there is none), "runs" (the number of trainings), "covered" (whether the
            accountant covers the sampling), "by_training_loss" (whether tuning used training losses without noise),
            "simulated" (whether the trainings simulate a plan in smaller batches).
        tuned: whether some of the trainings were tuning runs.
    """
    runs, cost = total["runs"], epsilon_text(total["value"])
    if cost == "not private":
        why = ": they simulate a plan in smaller batches" if total.get("simulated") else ""
        return f"{runs} trainings used the same data; together they have no finite ε{why}."
    given = "" if total.get("covered", True) else " if batches had been Poisson samples, which they were not"
    if runs == 1:
        return f"This training alone used the data: it cost ε = {cost}{given}."
    tuning = ", tuning included" if tuned else ""
    save = ", except the choice of learning rates: training losses without noise chose them, and no ε covers that"
    return (
        f"These {runs} trainings used the same data: together they cost ε = {cost}{tuning}{given}. This, not the ε of "
        f"one training, is the price of everything reported here{save if total.get('by_training_loss') else ''}."
    )
