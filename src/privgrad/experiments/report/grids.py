"""Put into words what the grids of a comparison show about each method: a mark for the terminal, text for the page.

`report.texts`, `report.page` and `report.figures` call it. The privacy guarantee does not rest on this file: it reads
the records of finished trainings. Its words are NOT private for the examples on which tuning measured.
"""

from collections.abc import Sequence

from privgrad.experiments.records import Record, by_method, in_phase, is_by_noise, numbers, tuned_by
from privgrad.experiments.tuner import Verdict, grid_text, judge

_BY = {"validation_accuracy": "accuracy", "validation_loss": "loss", "raw_train_loss": "train_loss"}
EDGE, OPEN, PLATEAU = "⚠ edge", "⚠ open end", "plateau"
MEANINGS = {
    EDGE: "the chosen value is the smallest or the largest one tried; a better one may lie outside.",
    OPEN: "the seeds do not show that both ends of the grid are worse.",
    PLATEAU: "rates next to the chosen one are as good, within the spread over seeds.",
}


def verdicts(records: Sequence[Record]) -> dict[str, Verdict]:
    """Return what the grid of each tuned method shows; empty unless some method was tuned over noise steps.

    Older comparisons, over learning rates alone, have one seed in tuning and therefore no spread to judge by.
    """
    tuning, key = in_phase(records, "tuning"), tuned_by(records)
    if not any(map(is_by_noise, tuning)):
        return {}
    return {name: judge(runs, name, _BY[key]) for name, runs in by_method(tuning).items() if numbers(runs, key)}


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


def words(records: Sequence[Record], method: str, verdict: Verdict) -> str:
    """Return a verdict in words: "inside 0.01 to 0.3; plateau 0.03 to 0.1", say."""
    if verdict.leads_at is None:
        return grid_text(records, method, _BY[tuned_by(records)])
    end = {"low": "lower", "high": "upper"}[verdict.leads_at]
    return f"best at the {end} edge of {verdict.rates[0]:g} to {verdict.rates[-1]:g}"
