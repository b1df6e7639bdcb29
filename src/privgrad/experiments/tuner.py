"""Choose the best candidate of a tuned method, and the next one to try beyond the edge of its grid.

Only `runner` and the metadata of reports call it. The privacy guarantee does not rest on this file. The choice is NOT
private for the examples on which the candidates were measured.
"""

import math
from collections.abc import Sequence

from privgrad.experiments.records import Record
from privgrad.experiments.spec import Candidate

_COSTS = {"accuracy": "validation_accuracy", "loss": "validation_loss", "train_loss": "raw_train_loss"}
_MOST_RATES = 16  # learning rates of one method, at which a growing grid stops


def best_candidate(records: Sequence[Record], method: str, by: str) -> Candidate:
    """Return the candidate with the best mean over tuning seeds; of equal ones, the smallest.

    `by` is "accuracy", "loss" (both on validation examples) or "train_loss". `runner.compare` calls it.
    """
    costs = _tuning_costs(records, method, by)
    return min(costs, key=lambda candidate: (costs[candidate], candidate))


def beyond_edge(records: Sequence[Record], method: str, by: str) -> Candidate | None:
    """Return the candidate half a power of ten beyond the best one, if the best lr is at the edge of its grid.

    The grid holds the rates that were tried with the best candidate's other values. The result is None if the best is
    inside the grid, if another rate was equally good, or if _MOST_RATES were tried. `runner.compare` calls it.
    """
    costs, best = _tuning_costs(records, method, by), best_candidate(records, method, by)
    tried = {other.lr: cost for other, cost in costs.items() if other._replace(lr=best.lr) == best}
    diverged = math.isinf(costs[best])  # then every candidate diverged: try a smaller rate
    level = not diverged and list(tried.values()).count(costs[best]) > 1
    if len(tried) >= _MOST_RATES or best.lr not in (min(tried), max(tried)) or level:
        return None
    factor = 10**0.5 if best.lr == max(tried) and not diverged else 10**-0.5
    return best._replace(lr=float(f"{best.lr * factor:.2g}"))


def _tuning_costs(records: Sequence[Record], method: str, by: str) -> dict[Candidate, float]:
    """Return the cost that tuning minimizes, by candidate: the mean over seeds of the loss, or of minus the score."""
    found: dict[Candidate, list[float]] = {}
    for record in records:
        if record["method"] == method and record["phase"] == "tuning":
            cost = -record[_COSTS[by]] if by == "accuracy" else record[_COSTS[by]]
            found.setdefault(candidate_of(record), []).append(cost if math.isfinite(cost) else math.inf)
    return {candidate: sum(costs) / len(costs) for candidate, costs in found.items()}


def candidate_of(record: Record) -> Candidate:
    """Return the tuned values of one run. `runner` and `report.metadata` also call it."""
    return Candidate(record["max_grad_norm"], record["lr"], record.get("radius"), record.get("local_lr"))
