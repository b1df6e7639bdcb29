"""Records of trainings -> the numbers that tables and plots show."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any

Record = Mapping[str, Any]
SOMETIMES_TUNED = ("radius", "local_lr")  # besides the learning rate and the clipping norm


def summarize(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Reduce the records to one row a method, in first-seen order.

    Computes: mean and standard deviation (ddof = 1) over the final runs. A mean is None unless every final
    run has the number: a mean over the rest would flatter a method that diverged. So is epsilon.

    Args:
        records: one mapping a training run, phase "tuning" or "final".
    Returns:
        Rows with the keys method; max_grad_norm, lr, radius and local_lr (None if the final runs differ in it);
        lr_at_edge, norm_at_edge, radius_at_edge and local_lr_at_edge (None unless more than one was tuned);
        seeds (number of final runs); test_accuracy_mean, test_accuracy_std, test_loss_mean, test_loss_std (std is None
        with one seed); epsilon (max); sampling ("fixed" if any run was); fraction_floored and seconds (means, or None).
    Privacy:
        NOT private for the held-out examples that accuracy and loss were measured on.
    """
    return [summary_row(method, runs) for method, runs in by_method(records).items()]


def summary_row(method: str, runs: Sequence[Record]) -> dict[str, Any]:
    finals = in_phase(runs, "final")
    schemes = {run.get("sampling") for run in runs}
    norm, lr = (_only(run.get(key) for run in finals) for key in ("max_grad_norm", "lr"))
    tuning, others = in_phase(runs, "tuning"), dict[str, Any]()
    for key in SOMETIMES_TUNED:
        others[key] = _only(run.get(key) for run in finals)
        others[f"{key}_at_edge"] = _at_edge(others[key], {run[key] for run in tuning if run.get(key) is not None})
    norms: set[float] = {run["max_grad_norm"] for run in tuning if run.get("max_grad_norm") is not None}
    rates: set[float] = {run["lr"] for run in tuning if run.get("max_grad_norm") == norm}
    accuracy, loss = numbers(finals, "test_accuracy"), numbers(finals, "test_loss")
    return {
        "method": method,
        "max_grad_norm": norm,
        "lr": lr,
        **others,
        "lr_at_edge": _at_edge(lr, rates),
        "norm_at_edge": _at_edge(norm, norms),
        "seeds": len(finals),
        "test_accuracy_mean": mean(accuracy),
        "test_accuracy_std": std(accuracy),
        "test_loss_mean": mean(loss),
        "test_loss_std": std(loss),
        # NaN counts as worse than any number.
        "epsilon": max(numbers(finals, "epsilon"), key=lambda value: (math.isnan(value), value), default=None),
        "sampling": "fixed" if "fixed" in schemes else (schemes.pop() if len(schemes) == 1 else None),
        "fraction_floored": mean(numbers(finals, "fraction_floored")),
        "seconds": mean(numbers(finals, "seconds")),
        "updates": mean(numbers(finals, "updates")),
    }


def measured_on(records: Iterable[Record]) -> str:
    """Which examples accuracy and loss are of: "test", or "training", and then NOT private."""
    return "training" if any(record.get("measured_on") == "training" for record in records) else "test"


def _only(values: Iterable[float | None]) -> float | None:
    """The one value that all have, if they do."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _at_edge(chosen: float | None, tried: set[float]) -> bool | None:
    return chosen in (min(tried), max(tried)) if chosen is not None and len(tried) > 1 else None


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record["method"]), []).append(record)
    return groups


def in_phase(records: Iterable[Record], phase: str) -> list[Record]:
    return [record for record in records if record.get("phase") == phase]


def numbers(runs: Sequence[Record], key: str) -> list[float]:
    """Values of one key, or nothing at all if a run lacks it."""
    values = [run.get(key) for run in runs]
    return [] if None in values else [float(value) for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def std(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    # A diverged run has no spread to speak of; statistics would raise on it.
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def tuned_by(records: Sequence[Record]) -> str:
    """The measurement that learning rates were chosen by."""
    tuning = in_phase(records, "tuning")
    keys = ("raw_train_loss", "validation_accuracy", "validation_loss")
    return next((key for key in keys if any(r.get(key) is not None for r in tuning)), "validation_accuracy")


def is_scored(records: Sequence[Record]) -> bool:
    """Whether runs have an accuracy, or another score; else they are compared by loss."""
    return any(record.get("test_accuracy") is not None for record in in_phase(records, "final"))


def tuned(records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Per method its (learning rate, mean of `tuned_by`) in ascending order, with all else that is tuned as it was
    chosen; diverged runs left out.
    """
    result, key = {}, tuned_by(records)
    keys = ("max_grad_norm", *SOMETIMES_TUNED)
    chosen = {row["method"]: [row[other] for other in keys] for row in summarize(records) if row["seeds"]}
    for method, runs in by_method(in_phase(records, "tuning")).items():
        found: dict[float, list[float]] = {}
        for run in runs:
            other = [run.get(key) for key in keys]
            if is_finite(run.get(key)) and chosen.get(method, other) == other:
                found.setdefault(run["lr"], []).append(run[key])
        result[method] = [(lr, statistics.fmean(values)) for lr, values in sorted(found.items())]
    return result


def curve(
    runs: Sequence[Record], measured: Callable[[Record], float | None] = methodcaller("get", "accuracy")
) -> list[tuple[float, float, float, float]]:
    """Epsilon, mean of a measurement, and mean -/+ one standard deviation, at every step that all runs recorded."""
    curves = [
        {p["step"]: p for p in run.get("curve") or () if is_finite(p.get("epsilon")) and is_finite(measured(p))}
        for run in runs
    ]
    points = []
    for step in sorted(set.intersection(*map(set, curves))):
        values = [float(measured(curve[step]) or 0.0) for curve in curves]
        middle, spread = statistics.fmean(values), std(values) or 0.0
        epsilon = max(curve[step]["epsilon"] for curve in curves)
        points.append((epsilon, middle, max(0.0, middle - spread), middle + spread))
    return points


def groups_of(records: Sequence[Record]) -> list[Mapping[str, float]]:
    """The groups of classes by frequency that the runs were measured on; none if they were not."""
    points = (point for record in records for point in (record.get("curve") or ())[-1:])
    return next((point["raw_groups"] for point in points if "raw_groups" in point), [])
