"""Describe the verdicts on the grids of a comparison: a mark for the terminal, text for the page.

`report.texts`, `report.page` and `report.figures` call it. The privacy guarantee does not rest on this file: it reads
the records of finished trainings. Its words are NOT private for the examples on which tuning measured.
"""

from collections.abc import Sequence

from privgrad.experiments.records import Record, by_method, in_phase, is_by_noise, numbers, tuned_by
from privgrad.experiments.tuner import Verdict, judge

EDGE, OPEN, PLATEAU = "⚠ edge", "⚠ open end", "plateau"
MEANINGS = {
    EDGE: "the chosen value is the smallest or the largest one tried; a better one may lie outside.",
    OPEN: "the seeds do not show that both ends of the grid are worse.",
    PLATEAU: "rates next to the chosen one are as good, within the spread over seeds.",
}


def verdicts(records: Sequence[Record]) -> dict[str, Verdict]:
    """Return the verdict on the grid of each tuned method; empty unless some method was tuned over noise steps.

    Older comparisons, over learning rates alone, have one seed in tuning and therefore no spread to judge by.
    """
    tuning, key = in_phase(records, "tuning"), tuned_by(records)
    if not any(map(is_by_noise, tuning)):
        return {}
    by = "train_loss" if key == "raw_train_loss" else key.removeprefix("validation_")
    return {name: judge(runs, name, by) for name, runs in by_method(tuning).items() if numbers(runs, key)}


def judged(records: Sequence[Record], rate: str) -> dict[str, Verdict]:
    """Return the verdicts on grids of at least two rates of one kind: "noise_step" or "lr"."""
    kinds = {True: "lr", False: "noise_step"}
    found = verdicts(records).items()
    return {name: v for name, v in found if len(v.rates) > 1 and kinds[v.best.noise_step is None] == rate}


def mark(verdict: Verdict) -> str:
    """Return the short mark of a verdict, a key of MEANINGS; empty if there is nothing to note."""
    if len(verdict.rates) < 2:
        return ""
    if verdict.leads_at is not None:
        return EDGE
    if not verdict.is_inside:
        return OPEN
    return PLATEAU if verdict.low != verdict.high else ""


def words(verdict: Verdict) -> str:
    """Return a verdict in words, as `Verdict.text`, but with the edge that holds the best rate."""
    if verdict.leads_at is None:
        return verdict.text
    end = {"low": "lower", "high": "upper"}[verdict.leads_at]
    return f"best at the {end} edge of {verdict.rates[0]:g} to {verdict.rates[-1]:g}"
