"""The noise and the record of a Gaussian release of `releases`: what is charged, where, and that it happens once.

`releases` calls `release_once`. The privacy guarantee rests on this file: it adds the noise, and records charge and
values before it returns them.

A release is charged once. Called again with the same ledger, or with the same name in the same budget, a function of
`releases` returns the recorded values and draws nothing, even if the data have changed. A warning says so.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privgrad.budget import Budget
from privgrad.errors import described, expected, require_choice, require_delta, require_integer, require_positive
from privgrad.ledger import Ledger
from privgrad.mechanisms import Release
from privgrad.noise import add_noise, grid_of, noise_generator
from privgrad.rng import RandomSource
from privgrad.types import ClippedSum

_DRAW = "release"  # the one draw of a release's ledger
_MOST_VALUES = 1 << 19  # of a release: a line of a ledger holds as many
_MOST_EXAMPLES = 1 << 53  # float64 holds all integers up to here


@dataclass(frozen=True)
class Planned:
    """The public numbers of a release.

    Attributes:
        kind: "sum", "mean", "histogram" or "second moment".
        sensitivity: the most by which one unit moves the released vector.
        noise_multiplier, num_examples, privacy_unit: as in `releases.release_sum`.
        shape: of the result.
        size: the number of released values.
    """

    kind: str
    sensitivity: float
    noise_multiplier: float
    num_examples: int
    privacy_unit: str
    shape: tuple[int, ...]
    size: int

    @property
    def function(self) -> str:
        """The public function that makes this release."""
        return f"release_{self.kind.replace(' ', '_')}"

    def require_valid(self) -> None:
        """Raise PrivacyError unless every number is in its range, so that nothing fails after the commitment."""
        function = self.function
        remedy = "give sigma: without noise nothing is private"
        require_positive(function, "noise_multiplier", self.noise_multiplier, remedy)
        require_integer(function, "num_examples", self.num_examples, 1)
        if self.num_examples > _MOST_EXAMPLES:
            condition, remedy = f"to be at most {_MOST_EXAMPLES}", "give the public number of units"
            raise expected(function, "num_examples", condition, self.num_examples, remedy)
        require_choice(function, "privacy_unit", self.privacy_unit, ("example", "user"))
        if self.size > _MOST_VALUES:
            remedy = "release fewer values at once, each part under a name of its own"
            raise expected(function, "released values", f"to be at most {_MOST_VALUES}", self.size, remedy)
        grid_of(ClippedSum({"sum": torch.empty(self.size, device="meta")}, self.sensitivity), self.noise_multiplier)

    @property
    def facts(self) -> dict[str, Any]:
        """The public numbers, under the names that a plan's ledger has."""
        return {
            "released": self.kind,
            "shape": list(self.shape),
            "sampling": "poisson",
            "sample_rate": 1.0,
            "expected_batch_size": int(self.num_examples),
            "noise_multiplier": float(self.noise_multiplier),
            "max_grad_norm": float(self.sensitivity),
            "num_examples": int(self.num_examples),
            "group_size": 1,
            "noise_on_grid": True,
            "neighboring_relation": "add or remove one",
            "privacy_unit": self.privacy_unit,
            "simulates": None,
            "side_information": None,
            "perturbation": None,
            "noise_generator": noise_generator([torch.empty(0, dtype=torch.float64)], on_grid=True),
        }


@dataclass(frozen=True)
class Where:
    """The places that record a release, and its seed; the arguments of `releases.release_sum` by these names."""

    delta: float | None
    ledger: Ledger | str | os.PathLike[str] | None
    budget: Budget | None
    name: str | None
    seed: int | None

    def require_valid(self, planned: Planned) -> None:
        """Raise PrivacyError unless a ledger or a budget records the release, and the budget covers its unit."""
        function, budget = planned.function, self.budget
        if self.ledger is None and budget is None:
            remedy = "give ledger='sum.jsonl', or budget and name"
            raise expected(function, "ledger or budget", "to be given", None, remedy)
        if budget is not None and not isinstance(budget, Budget):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise expected(function, "budget", "to be a Budget", described(budget), "give Budget('budget.jsonl')")
        if (budget is None) != (self.name is None):
            remedy = "give name= with budget=, and only there"
            raise expected(
                function, "name", "to be given with a budget", f"name {self.name!r} and budget {budget}", remedy
            )
        if budget is not None:
            budget.require_covered(function, planned.num_examples, planned.privacy_unit)
        if self.delta is not None:
            require_delta(function, self.delta)
        if self.seed is not None:
            require_integer(function, "seed", self.seed, -math.inf)


def release_once(planned: Planned, compute: Callable[[], Tensor], where: Where) -> Tensor:
    """Charge and record a release, or find it recorded, and return its values, flat.

    Args:
        planned: its public numbers.
        compute: returns the exact values, flat: PRIVATE.
        where: a ledger, a budget or both.
    Returns:
        A float64 tensor of shape (planned.size,).
    Raises:
        BudgetExceededError: the budget has no room. Nothing was charged or released.
        PrivacyError: a number is out of its range, or the ledger was written for another release.
    Privacy:
        The commitment comes first, then noise, then the record in the budget, then charge and values in one line of
        the ledger. The values are returned after all of these. A process that dies before the first record of values
        has shown nothing, so its successor may draw other noise; afterwards its successor finds the values.
    """
    planned.require_valid()
    where.require_valid(planned)
    function, budget, name, seed = planned.function, where.budget, where.name, where.seed
    delta = budget.delta if budget is not None and where.delta is None else where.delta
    release, facts = Release(float(planned.noise_multiplier), 1.0), planned.facts
    is_given = isinstance(where.ledger, Ledger)
    own = where.ledger if isinstance(where.ledger, Ledger) else None if where.ledger is None else Ledger(where.ledger)
    try:
        if own is not None:
            if budget is not None and name is not None:
                own.limit_to(release, name, budget.path.name)
            own.bind({**facts, "delta": delta, "research_seed": seed is not None})
        if budget is not None and name is not None:
            what = f"{planned.kind} {facts['shape']}, bound {facts['max_grad_norm']!r}"
            budget.commit_release(name, release, released=what, is_seeded=seed is not None)
        found = None if own is None else own.values.get(_DRAW)
        if budget is not None and name is not None:
            found = budget.released(name) or found
        is_recorded = found is not None
        if found is None:
            found = _noisy(compute(), planned, f"{function} {name}", seed)
        if budget is not None and name is not None:
            found = budget.record(name, found)
        if len(found) != planned.size:
            remedy = "give each release a ledger and a name of its own"
            raise expected(function, "the recorded values", f"to be {planned.size} numbers", len(found), remedy)
        if is_recorded:
            _say_that_it_is_recorded(function, where, own)
        if own is not None and _DRAW not in own.values:
            digest = None if seed is None else hashlib.sha256(np.array(found).tobytes()).hexdigest()[:32]
            own.charge(release, draw=_DRAW, limit=1, digest=digest, values=found)
    finally:
        if own is not None and not is_given:
            own.close()
    return torch.tensor(found, dtype=torch.float64)


def _say_that_it_is_recorded(function: str, where: Where, own: Ledger | None) -> None:
    """Warn that a release returns a recorded value, which other rows do not change."""
    path = None if own is None else own.path
    record = f"{path}" if path is not None else "the release of this ledger"
    other = "ledger"
    if where.budget is not None:
        record, other = f"{where.name!r} of {where.budget.path}", "name"
    warnings.warn(
        f"{function}: {record} was released before; its recorded value is returned, whatever the rows are now. For a "
        f"new release, which is charged again, give another {other}",
        stacklevel=5 if function in ("release_sum", "release_mean") else 4,  # the line of the user's call
    )


def _noisy(total: Tensor, planned: Planned, name: str, seed: int | None) -> list[float]:
    """Return a sum with Gaussian noise on the grid. Each call draws from a stream of its own."""
    noisy = add_noise(
        ClippedSum({"sum": total}, planned.sensitivity),
        noise_multiplier=float(planned.noise_multiplier),
        divisor=1,
        stream=RandomSource(seed).stream(name),
        step=0,
        on_grid=True,
    )
    return [float(value) for value in noisy["sum"].numpy()]
