"""Numbers of a report as text, for the terminal and for the web page.

`report.terminal`, `report.page` and the command line call it. The privacy guarantee does not rest on this file: it only
states the guarantee.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from privgrad.experiments.metrics import title
from privgrad.experiments.records import FEW_CLIPPED, Record, in_phase, is_finite, summarize
from privgrad.experiments.report.grids import EDGE, OPEN, mark, verdicts, words
from privgrad.rounding import two_decimals_up

_EDGES = (("learning rate", "lr"), ("clipping norm", "norm"), ("radius", "radius"), ("local lr", "local_lr"))
_DASH = "–"
SIMULATED = "∞ (simulates ε): the mean gradients have the noise of a plan of this ε, in smaller batches; NOT private."

TUNED_TITLES = {
    "noise_step": "noise step u",
    "lr": "learning rate",
    "max_grad_norm": "clipping norm C",
    "radius": "radius",
    "local_lr": "local learning rate",
}


def method_texts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rows of `summarize` as texts, with the verdicts on grids, for the terminal and for the page."""
    rows, found = summarize(records), verdicts(records)
    is_mixed = len({row["rate"] for row in rows}) > 1
    texts: list[dict[str, Any]] = []
    for row in rows:
        verdict, text = found.get(row["method"]), row_texts(row, names_rate=is_mixed)
        if verdict is not None:
            others = " and ".join(name for name, key in _EDGES[1:] if row[f"{key}_at_edge"])
            marks = dict.fromkeys(filter(None, (mark(verdict), EDGE if others else "")))
            text |= {"at_edge": others, "marks": list(marks), "grid": words(verdict)}
            text["grid_warns"] = mark(verdict) in (EDGE, OPEN)
        texts.append(text)
    return texts


def rate_title(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how the rates of `summarize` rows were given: "u" (noise step), "lr", or "rate" if both occur."""
    kinds = {{"noise_step": "u", "lr": "lr"}[row["rate"]] for row in rows}
    return kinds.pop() if len(kinds) == 1 else "rate"


def row_texts(row: Mapping[str, Any], *, names_rate: bool = False) -> dict[str, Any]:
    """Return one row of `summarize` as texts; with `names_rate`, the rate with its name. `report.page` calls it too."""
    others = {"C": row["max_grad_norm"] if row["norm_at_edge"] is not None else None}
    others |= {name: row[key] for name, key in _EDGES[2:]} | {"bands": row["bands"] if row["bands"] != 1 else None}
    rate, measured = row[row["rate"]], row["noise_step"] if row["rate"] == "lr" else None
    name = f"{rate_title([row])} " if names_rate else ""
    at_edge = " and ".join(name for name, key in _EDGES if row[f"{key}_at_edge"])
    return {
        "method": row["method"],
        "accuracy": _spread_text(row["test_accuracy_mean"], row["test_accuracy_std"], 100, ".1f", " %"),
        "loss": _spread_text(row["test_loss_mean"], row["test_loss_std"], 1, ".3f", ""),
        "metrics": {
            title(name): _spread_text(found["mean"], found["std"], 1, ".3f", "")
            for name, found in row["metrics"].items()
        },
        "epsilon": _cost_text(row) if row["seeds"] else _DASH,
        "uncovered": row["sampling"] == "fixed",
        "rate": f"{name}{rate:g}" if rate is not None else ("several" if row["seeds"] else _DASH),
        "measured": "" if measured is None else f"u {measured:.2g}, measured",
        "others": [f"{name} {value:g}" for name, value in others.items() if value is not None],
        "own": row["own"].split(", ") if row["own"] else [],
        "at_edge": at_edge,
        "marks": [EDGE] if at_edge else [],
        "grid": "",
        "grid_warns": False,
        "seeds": str(row["seeds"]),
        "clipped": _share_text(row["raw_clip_fraction"]),
        "few_clipped": row["raw_least_clipped"] is not None and row["raw_least_clipped"] < FEW_CLIPPED,
        "floored": _share_text(row["fraction_floored"]),
        "seconds": f"{row['seconds']:.1f}" if is_finite(row["seconds"]) else _DASH,
    }


def _share_text(share: float | None) -> str:
    """Return a share in percent as text; a small one with a decimal, so that it is not rounded up to FEW_CLIPPED."""
    if share is None or not math.isfinite(share):
        return _DASH
    return f"{100 * share:.1f} %" if 0 < share < FEW_CLIPPED else f"{100 * share:.0f} %"


def group_title(group: Mapping[str, float]) -> str:
    """Return the title of a group of classes: their number, and the number of examples of each.

    `report.figures` calls it.
    """
    sizes = f"{group['from']:g}" if group["from"] == group["to"] else f"{group['from']:g} to {group['to']:g}"
    return f"{group['classes']:g} × {sizes} examples"


def trainings_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of trainings, and each method's, of the rows of `summarize`; empty for a single training.

    `report.terminal` and `report.page` call it.
    """
    counts = {row["method"]: row["trainings"] for row in rows}
    total = f"{sum(counts.values())} trainings"
    total += ", tuning included" if any(row["tuning_trainings"] for row in rows) else ""
    if sum(counts.values()) < 2 or len(counts) == 1:
        return "" if sum(counts.values()) < 2 else f"{total}."
    if len(set(counts.values())) == 1:
        return f"{total}: {next(iter(counts.values()))} for each method."
    if len(counts) <= 4:
        return f"{total}, not equally many: {', '.join(f'{count} ({name})' for name, count in counts.items())}."
    return f"{total}, not equally many: between {min(counts.values())} and {max(counts.values())} for each method."


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
    return two_decimals_up(epsilon)


def total_text(total: Mapping[str, Any], *, tuned: bool) -> str:
    """Describe the total cost of all trainings on the same data in one or two sentences.

    `report.page` shows it; `privgrad train` and `compare` print it.

    Args:
        total: "value" (epsilon; None if there is none), "runs" (the number of trainings), "covered" (whether the
            accountant covers the sampling), "by_training_loss" (whether tuning used training losses without noise),
            "simulated" (the trainings that simulate the plan in smaller batches: "all", those of "tuning", or None).
        tuned: whether some of the trainings were tuning runs.
    """
    runs, cost = total["runs"], epsilon_text(total["value"])
    if cost == "not private":
        simulated = {"all": "they simulate a plan", "tuning": "tuning simulates the plan"}.get(
            total.get("simulated") or ""
        )
        why = f": {simulated} in smaller batches" if simulated else ""
        return f"{runs} trainings used the same data; together they have no finite ε{why}."
    given = "" if total.get("covered", True) else " if batches had been Poisson samples, which they were not"
    if runs == 1:
        return f"Only this training is counted here: it cost ε = {cost}{given}."
    tuning = ", tuning included" if tuned else ""
    save = ", except the choice of learning rates: training losses without noise chose them, and no ε covers that"
    return (
        f"These {runs} trainings used the same data: together they cost ε = {cost}{tuning}{given}. This, not the ε of "
        f"one training, is the price of everything reported here{save if total.get('by_training_loss') else ''}."
    )


def constants_text(records: Sequence[Record]) -> str:
    """Return what models without inputs would reach, in one or two sentences; "" if that is not recorded."""
    finals = in_phase(records, "final")
    shares = {share for record in finals if (share := record.get("most_frequent_class")) is not None}
    texts = [f"The most frequent class alone would have {100 * shares.pop():.1f} %."] if len(shares) == 1 else []
    for constant in sorted({record["class_shares_loss"] for record in finals if "class_shares_loss" in record})[:1]:
        worse = {record["method"] for record in finals if (record["test_loss"] or 0.0) > constant}
        several = len({record["method"] for record in finals}) > 1
        texts += [losses_text(constant, sorted(worse) if several else [])] if worse else []
    return " ".join(texts)


def losses_text(constant: float, methods: Sequence[str] = ()) -> str:
    """Return a sentence for a test loss above that of constant probabilities. `report.paid` also calls it.

    Args:
        constant: the loss of a model whose probabilities are always the shares of the classes.
        methods: the names of the methods whose loss is larger; none if there is only one.
    """
    of = f" of {', '.join(methods)}" if methods else ""
    return (
        f"The class shares alone would have a smaller loss, {constant:.3f}: the probabilities{of} are far off, even if "
        "they rank well. For a head, try max_grad_norm = 1 (docs/before-training.md, Probabilities)."
    )
