"""Choose the best candidate of a tuned method, and the next ones to try beyond the edge of a grid.

The choice is NOT private for the examples on which the candidates were measured.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from privgrad_lab.records import Record, is_cost, results
from privgrad_lab.spec import Candidate

_MOST_RATES = 16  # rates of one method, at which a growing grid stops


@dataclass(frozen=True)
class Verdict:
    """A judgment of one method's grid of rates. Costs are minus the accuracy, or the loss."""

    best: Candidate
    rates: tuple[float, ...]  # that were tried: noise steps, or learning rates, in ascending order
    low: float  # from here to `high`, the cost of a rate is larger than the best one by at most the spread
    high: float
    spread: float  # over seeds, of one training's cost, pooled over the better half of the candidates
    lead_low: float  # how much worse the smallest rate is than the best one
    lead_high: float  # how much worse the largest rate is

    @property
    def is_inside(self) -> bool:
        """Whether both ends of the grid are worse than the best rate by more than the spread."""
        return self.lead_low > self.spread and self.lead_high > self.spread

    @property
    def leads_at(self) -> str | None:
        """The edge of the grid, "low" or "high", that holds the best rate and leads by more than the spread."""
        if len(self.rates) < 2 or self.low != self.high:
            return None
        return {self.rates[0]: "low", self.rates[-1]: "high"}.get(_rate(self.best))

    @property
    def text(self) -> str:
        """The verdict in words: "inside 0.01 to 0.3; plateau 0.03 to 0.1", say."""
        if len(self.rates) < 2:
            return "one value tried"
        ends = f"{self.rates[0]:g} to {self.rates[-1]:g}"
        if self.leads_at is not None:
            return f"best at the {'lower' if self.leads_at == 'low' else 'upper'} edge of {ends}"
        place = f"inside {ends}" if self.is_inside else f"not shown to be inside {ends}"
        return place + (f"; plateau {self.low:g} to {self.high:g}" if self.low != self.high else "")


def measurement_of(by: str) -> str:
    """Return the key of records that holds the criterion of [tuning]."""
    return "raw_train_loss" if by == "train_loss" else f"validation_{by}"


def best_candidate(records: Sequence[Record], method: str, by: str) -> Candidate:
    """Return the candidate with the best mean over tuning seeds of the criterion `by` of [tuning]."""
    return _best(_means(_costs(records, method, by)))


def judge(records: Sequence[Record], method: str, by: str) -> Verdict:
    """Return what a method's grid shows, each rate with its best other values. `by` is as in `best_candidate`."""
    costs = _costs(records, method, by)
    means = _means(costs)
    by_rate: dict[float, float] = {}
    for candidate, cost in means.items():
        by_rate[_rate(candidate)] = min(by_rate.get(_rate(candidate), math.inf), cost)
    # The spread over seeds is pooled over the better half of the candidates; it is nan with one seed.
    ranked = sorted(costs, key=lambda candidate: means[candidate])
    better = [costs[candidate] for candidate in ranked[: (len(ranked) + 1) // 2] if math.isfinite(means[candidate])]
    variances = [statistics.variance(values) for values in better if len(values) > 1]
    spread = math.sqrt(statistics.fmean(variances)) if variances else math.nan
    best, rates = _best(means), sorted(by_rate)
    leads = [by_rate[rate] - by_rate[_rate(best)] for rate in rates]
    # The plateau reaches from the best rate to the last one, on either side, that is level with it.
    low = high = rates.index(_rate(best))
    while low > 0 and leads[low - 1] <= spread:
        low -= 1
    while high < len(rates) - 1 and leads[high + 1] <= spread:
        high += 1
    return Verdict(best, tuple(rates), rates[low], rates[high], spread, leads[0], leads[-1])


def wider(records: Sequence[Record], methods: Sequence[str], by: str) -> dict[str, float] | None:
    """Return one more rate for each method of a fair comparison, or None if no grid needs one.

    A grid needs one if its best rate is at an edge and leads by more than the seeds' spread.
    """
    # All methods get one more rate, so that all have the same number of trainings: those that share a grid of noise
    # steps the same one, every other method one beyond its own best edge.
    verdicts = {name: judge(records, name, by) for name in methods}
    leads = {name: verdict.leads_at for name, verdict in verdicts.items()}
    if not any(leads.values()) or any(len(verdict.rates) >= _MOST_RATES for verdict in verdicts.values()):
        return None
    nearer = {name: "low" if verdict.lead_low < verdict.lead_high else "high" for name, verdict in verdicts.items()}
    shared = [name for name, verdict in verdicts.items() if verdict.best.noise_step is not None]
    votes = [leads[name] for name in shared if leads[name]] or [nearer[name] for name in shared]
    common = max(("low", "high"), key=votes.count)
    sides = {name: common if name in shared else leads[name] or nearer[name] for name in methods}
    return {name: _beyond(verdicts[name].rates, side) for name, side in sides.items()}


def beyond_edge(records: Sequence[Record], method: str, by: str) -> Candidate | None:
    """Return the candidate half a power of ten beyond the best one, if the best lr is at the edge of its grid.

    The grid holds the rates that were tried with the best candidate's other values.
    """
    costs = _means(_costs(records, method, by))
    best = _best(costs)
    tried = {_rate(other): cost for other, cost in costs.items() if at_rate(other, _rate(best)) == best}
    diverged = math.isinf(costs[best])  # then every candidate diverged: try a smaller rate
    level = not diverged and list(tried.values()).count(costs[best]) > 1
    if len(tried) >= _MOST_RATES or _rate(best) not in (min(tried), max(tried)) or level:
        return None
    factor = 10**0.5 if _rate(best) == max(tried) and not diverged else 10**-0.5
    return at_rate(best, float(f"{_rate(best) * factor:.2g}"))


def at_rate(candidate: Candidate, rate: float) -> Candidate:
    """Return the candidate at another rate, of the same kind."""
    return candidate._replace(lr=rate) if candidate.noise_step is None else candidate._replace(noise_step=rate)


def _rate(candidate: Candidate) -> float:
    rate = candidate.lr if candidate.noise_step is None else candidate.noise_step
    assert rate is not None
    return rate


def _beyond(rates: Sequence[float], side: str) -> float:
    ratios = [high / low for low, high in itertools.pairwise(rates)] or [10**0.5]
    factor = ratios[0 if side == "low" else -1]
    beyond = rates[0] / factor if side == "low" else rates[-1] * factor
    rounded = float(f"{beyond:.2g}")
    return beyond if rates[0] <= rounded <= rates[-1] else rounded


def _means(costs: dict[Candidate, list[float]]) -> dict[Candidate, float]:
    return {candidate: statistics.fmean(values) for candidate, values in costs.items()}


def _best(means: dict[Candidate, float]) -> Candidate:

    def order(candidate: Candidate) -> list[tuple[str, Any]]:
        values = [*candidate[:-1], *(value for _, value in candidate.own)]
        return [("" if isinstance(value, int | float) else type(value).__name__, value) for value in values]

    return min(means, key=lambda candidate: (means[candidate], order(candidate)))


def _costs(records: Sequence[Record], method: str, by: str) -> dict[Candidate, list[float]]:
    """Return the costs that tuning minimizes, by candidate and seed: the loss or error, or minus the score."""
    key = measurement_of(by)
    sign = 1.0 if is_cost(key) else -1.0
    found = results((record for record in records if record["method"] == method), key)
    # A run that diverged costs most.
    return {c: [sign * value if math.isfinite(value) else math.inf for value in found[c]] for c in found}
