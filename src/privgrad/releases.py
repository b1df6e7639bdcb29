"""Gaussian releases of sums over privacy units: a sum, a mean, a histogram, a second moment.

Users call them before a training, for example to fill in missing values or to scale. The privacy guarantee rests on
this file: each function bounds one unit's part, adds noise, and records charge and values before it returns them.

A release is charged once. Called again with the same ledger, or with the same name in the same budget, a function
returns the recorded values and draws nothing, even if the data have changed.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.budget import Budget
from privgrad.errors import described, expected, require_choice, require_delta, require_integer, require_positive
from privgrad.ledger import Ledger
from privgrad.mechanisms import Release
from privgrad.noise import add_noise, noise_generator
from privgrad.rng import RandomSource
from privgrad.types import ClippedSum, PrivacyUnit

Rows = Tensor | np.ndarray | Sequence[Any]

_CHUNK = 4096  # rows that are added up in one call of torch; few enough that rounding stays far below the noise's grid
_MOST_ROWS = 1 << 29
_DRAW = "release"  # the one draw of a release's ledger


def release_sum(
    rows: Rows,
    *,
    bound: float,
    noise_multiplier: float,
    num_examples: int,
    privacy_unit: PrivacyUnit = "example",
    delta: float | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    budget: Budget | None = None,
    name: str | None = None,
    seed: int | None = None,
) -> Tensor:
    """Release the sum of one row per unit, each scaled down to norm `bound` at most, with Gaussian noise.

    Computes: sum_i x_i min(1, bound / |x_i|) + sigma bound z, in float64, with z ~ N(0, I) on a public grid.

    Args:
        rows: shape (n, ...), ONE row per privacy unit. A row with a value that is not finite counts as zero.
        bound: > 0, public: the largest norm of a row, over all its values.
        noise_multiplier: sigma > 0, noise standard deviation over bound.
        num_examples: the public number of units. It is recorded; n itself is private and may differ.
        privacy_unit: the unit that a row belongs to, "example" or "user".
        delta: in (0, 1), recorded for later statements. None: the budget's, if there is one.
        ledger: path of a ledger of its own, or that Ledger. Each release needs another file.
        budget: a Budget, which must have room. Give a ledger, a budget, or both.
        name: of the commitment; with a budget only, and needed there.
        seed: None for the operating system's entropy. An integer is for research only, and voids the privacy guarantee.
    Returns:
        A float64 tensor of the shape of one row.
    Raises:
        BudgetExceededError: the budget has no room. Nothing was charged or released.
        PrivacyError: an argument is out of its range, or the ledger was written for another release.
    Privacy:
        The Gaussian mechanism with noise multiplier sigma: one more unit, or one fewer, moves the sum by `bound` at
        most. It costs as much as Release(sigma, 1.0). The noise is on the grid of `noise.grid_of`, with at most 1/500
        more noise, so low-order bits show nothing of the data. The rounding of norms and sums is below 1e-12 n bound
        and stays within the grid's reserve of bound / 1024. Number of rows, duration and memory are not protected.
    Reference:
        Dwork, Roth 2014, appendix A; on floating-point noise, Mironov 2012.
    """
    require_positive("release_sum", "bound", bound, "give the largest norm of a row, chosen without the data")
    values, shape = _rows("release_sum", rows)
    facts = _facts("sum", bound, noise_multiplier, num_examples, privacy_unit, shape)
    flat = _release(
        "release_sum", lambda: _sum(values, bound), bound, facts, delta, ledger, budget, name, seed, math.prod(shape)
    )
    return flat.reshape(shape)


def release_mean(
    rows: Rows,
    *,
    bound: float,
    noise_multiplier: float,
    num_examples: int,
    privacy_unit: PrivacyUnit = "example",
    delta: float | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    budget: Budget | None = None,
    name: str | None = None,
    seed: int | None = None,
) -> Tensor:
    """Release the mean of one row per unit: `release_sum` divided by the public number of units.

    Args:
        rows: as in release_sum. Subtract a public center first, if one is known: then a smaller bound suffices.
        bound: as in release_sum.
        noise_multiplier: as in release_sum.
        num_examples: the public divisor. The true number of rows stays private.
        privacy_unit: as in release_sum.
        delta: as in release_sum.
        ledger: as in release_sum.
        budget: as in release_sum.
        name: as in release_sum.
        seed: as in release_sum.
    Returns:
        A float64 tensor of the shape of one row. Its noise has standard deviation sigma bound / num_examples.
    Raises:
        BudgetExceededError, PrivacyError: as in release_sum.
    Privacy:
        As release_sum; the division is post-processing.
    """
    require_positive("release_mean", "bound", bound, "give the largest norm of a row, chosen without the data")
    values, shape = _rows("release_mean", rows)
    facts = _facts("mean", bound, noise_multiplier, num_examples, privacy_unit, shape)
    flat = _release(
        "release_mean", lambda: _sum(values, bound), bound, facts, delta, ledger, budget, name, seed, math.prod(shape)
    )
    return flat.reshape(shape) / num_examples


def release_histogram(
    rows: Rows,
    *,
    num_bins: int,
    noise_multiplier: float,
    num_examples: int,
    bound: float | None = None,
    privacy_unit: PrivacyUnit = "example",
    delta: float | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    budget: Budget | None = None,
    name: str | None = None,
    seed: int | None = None,
) -> Tensor:
    """Release how many units are in each bin, with Gaussian noise.

    Args:
        rows: shape (n,), the bin of each unit, an integer from 0 to num_bins - 1; a unit with another value is in no
            bin. With `bound`: shape (n, num_bins), the counts of each unit.
        num_bins: public.
        noise_multiplier: sigma > 0, noise standard deviation over sensitivity.
        num_examples: as in release_sum.
        bound: None: each unit is in at most one bin. A number: the largest norm of a unit's counts, as in release_sum.
        privacy_unit: as in release_sum.
        delta: as in release_sum.
        ledger: as in release_sum.
        budget: as in release_sum.
        name: as in release_sum.
        seed: as in release_sum.
    Returns:
        A float64 tensor of shape (num_bins,). Counts may be negative and are not whole numbers.
    Raises:
        BudgetExceededError, PrivacyError: as in release_sum.
    Privacy:
        As release_sum, with sensitivity `bound`, or 1: one unit changes one count by 1. The bins must be public.
    """
    function = "release_histogram"
    require_integer(function, "num_bins", num_bins, 1)
    if bound is None:
        values, shape = _rows(function, rows)
        if shape:
            raise expected(
                function, "rows", "of shape (n,)", f"(n, {', '.join(map(str, shape))})", "give one bin a unit"
            )
        bins = torch.where((values >= 0) & (values < num_bins) & (values == values.floor()), values, num_bins)
        bins = bins.nan_to_num(num_bins).long().flatten()

        def count() -> Tensor:
            return torch.bincount(bins, minlength=num_bins + 1)[:num_bins].double()

    else:
        require_positive(function, "bound", bound, "give the largest norm of a unit's counts")
        values, shape = _rows(function, rows)
        if shape != (num_bins,):
            got = f"(n, {', '.join(map(str, shape))})"
            raise expected(function, "rows", f"of shape (n, {num_bins})", got, "give the counts of each unit")

        def count() -> Tensor:
            return _sum(values, bound)

    facts = _facts("histogram", bound or 1.0, noise_multiplier, num_examples, privacy_unit, (num_bins,))
    return _release(function, count, bound or 1.0, facts, delta, ledger, budget, name, seed, num_bins)


def release_second_moment(
    rows: Rows,
    *,
    bound: float,
    noise_multiplier: float,
    num_examples: int,
    privacy_unit: PrivacyUnit = "example",
    delta: float | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    budget: Budget | None = None,
    name: str | None = None,
    seed: int | None = None,
) -> Tensor:
    """Release the sum of x x^T over one row x per unit, each scaled down to norm `bound` at most, with Gaussian noise.

    Computes: S + N with S = sum_i x_i x_i^T. N is symmetric. On the diagonal its standard deviation is sigma bound^2,
        off the diagonal sigma bound^2 / sqrt(2), and entries on and above the diagonal are independent.

    Args:
        rows: shape (n, d), ONE row per privacy unit. A row with a value that is not finite counts as zero.
        bound: as in release_sum.
        noise_multiplier: sigma > 0, noise standard deviation over bound^2.
        num_examples: as in release_sum. Divide the result by it for the mean.
        privacy_unit: as in release_sum.
        delta: as in release_sum.
        ledger: as in release_sum.
        budget: as in release_sum.
        name: as in release_sum.
        seed: as in release_sum.
    Returns:
        A symmetric float64 tensor of shape (d, d). It may have negative eigenvalues.
    Raises:
        BudgetExceededError, PrivacyError: as in release_sum.
    Privacy:
        As release_sum, with sensitivity bound^2. The release is the vector of the diagonal and of sqrt(2) times the
        entries above it. For x x^T its norm is |x|^2, so one unit moves it by bound^2 at most. To divide by sqrt(2) and
        to mirror the entries is post-processing.
    Reference:
        Dwork, Talwar, Thakurta, Zhang 2014 (Analyze Gauss), which adds noise of the full size off the diagonal, too.
    """
    function = "release_second_moment"
    require_positive(function, "bound", bound, "give the largest norm of a row, chosen without the data")
    values, shape = _rows(function, rows)
    if len(shape) != 1:
        got = f"(n, {', '.join(map(str, shape))})" if shape else "(n,)"
        raise expected(function, "rows", "of shape (n, d)", got, "flatten each unit's values to one row")
    (d,) = shape
    upper, scale = torch.triu_indices(d, d), _off_diagonal(d)

    def moment() -> Tensor:
        total = _sum(values, bound, lambda part: part.T @ part)
        return total.reshape(d, d)[upper[0], upper[1]] * scale

    facts = _facts("second moment", bound**2, noise_multiplier, num_examples, privacy_unit, (d, d))
    flat = _release(function, moment, bound**2, facts, delta, ledger, budget, name, seed, len(scale))
    result = torch.empty(d, d, dtype=torch.float64)
    result[upper[0], upper[1]] = flat / scale
    result[upper[1], upper[0]] = flat / scale
    return result


def _off_diagonal(d: int) -> Tensor:
    """Return sqrt(2) for each entry above the diagonal and 1 for each on it, in the order of torch.triu_indices."""
    upper = torch.triu_indices(d, d)
    return torch.where(upper[0] == upper[1], 1.0, math.sqrt(2.0)).double()


def _rows(function: str, rows: Rows) -> tuple[Tensor, tuple[int, ...]]:
    """Return rows as float64, shape (n, values), and the shape of one row."""
    try:
        values = torch.as_tensor(rows).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "give a tensor or an array with one row per unit"
        raise expected(function, "rows", "to be numbers", described(rows)[:60], remedy) from error
    if values.dim() == 0 or 0 in values.shape[1:]:
        remedy = "give one row per unit; without units, a tensor of shape (0, d)"
        raise expected(function, "rows", "of shape (n, ...)", tuple(values.shape), remedy)
    if len(values) > _MOST_ROWS:
        remedy = "release several sums of disjoint parts, under one commitment"
        raise expected(function, "rows", f"to be at most {_MOST_ROWS}", f"at least {_MOST_ROWS + 1}", remedy)
    return values.reshape(len(values), math.prod(values.shape[1:])), tuple(values.shape[1:])


def _sum(values: Tensor, bound: float, product: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the exact sum of the clipped rows, flat: PRIVATE. With `product`, the sum of its results over chunks.

    The chunks are added with compensation, so that the error of rounding does not grow with their number.
    """
    total = torch.zeros(values.shape[1] ** (1 if product is None else 2), dtype=torch.float64)
    lost = torch.zeros_like(total)
    for start in range(0, len(values), _CHUNK):
        rows = _clipped(values[start : start + _CHUNK], bound)
        part = rows.sum(0) if product is None else product(rows).flatten()
        grown = total + part
        back = grown - total
        lost += (total - (grown - back)) + (part - back)
        total = grown
    return total + lost


def _clipped(rows: Tensor, bound: float) -> Tensor:
    """Return the rows, scaled down to norm `bound` at most; zeros for a row with a value that is not finite.

    Privacy:
        The sensitivity of every release here rests on this function: each row depends on one unit alone.
    """
    rows = rows / bound
    norms = cast(Tensor, torch.linalg.vector_norm(rows, dim=1, keepdim=True))
    scaled = rows * (bound / norms.clamp(min=1.0))
    # A norm that is infinite although all values are finite gives zero, too.
    return torch.where(norms.isfinite(), scaled, 0.0)


def _facts(
    kind: str, sensitivity: float, noise_multiplier: float, num_examples: int, privacy_unit: str, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return the public numbers of a release, under the names that a plan's ledger has."""
    function = f"release_{kind.replace(' ', '_')}"
    require_positive(function, "noise_multiplier", noise_multiplier, "give sigma: without noise nothing is private")
    require_integer(function, "num_examples", num_examples, 1)
    require_choice(function, "privacy_unit", privacy_unit, ("example", "user"))
    return {
        "released": kind,
        "shape": list(shape),
        "sampling": "poisson",
        "sample_rate": 1.0,
        "expected_batch_size": int(num_examples),
        "noise_multiplier": float(noise_multiplier),
        "max_grad_norm": float(sensitivity),
        "num_examples": int(num_examples),
        "group_size": 1,
        "noise_on_grid": True,
        "neighboring_relation": "add or remove one",
        "privacy_unit": privacy_unit,
        "simulates": None,
        "side_information": None,
        "perturbation": None,
        "noise_generator": noise_generator([torch.empty(0, dtype=torch.float64)], on_grid=True),
    }


def _release(
    function: str,
    compute: Callable[[], Tensor],
    sensitivity: float,
    facts: Mapping[str, Any],
    delta: float | None,
    ledger: Ledger | str | os.PathLike[str] | None,
    budget: Budget | None,
    name: str | None,
    seed: int | None,
    size: int,
) -> Tensor:
    """Charge and record a release, or find it recorded, and return its values, flat.

    Privacy:
        The commitment comes first, then noise, then the record in the budget, then charge and values in one line of
        the ledger. The values are returned after all of these. A process that dies before the first record of values
        has shown nothing, so its successor may draw other noise; afterwards its successor finds the values.
    """
    if ledger is None and budget is None:
        raise expected(function, "ledger or budget", "to be given", None, "give ledger='sum.jsonl', or budget and name")
    if (budget is None) != (name is None):
        remedy = "give name= with budget=, and only there"
        raise expected(function, "name", "to be given with a budget", f"name {name!r} and budget {budget}", remedy)
    if budget is not None:
        budget.require_covered(function, facts["num_examples"], facts["privacy_unit"])
        delta = budget.delta if delta is None else delta
    if delta is not None:
        require_delta(function, delta)
    release = Release(facts["noise_multiplier"], 1.0)
    is_given = isinstance(ledger, Ledger)
    own = ledger if isinstance(ledger, Ledger) else None if ledger is None else Ledger(ledger)
    try:
        if own is not None:
            own.bind({**facts, "delta": delta, "research_seed": seed is not None})
        if budget is not None and name is not None:
            what = f"{facts['released']} {facts['shape']}, bound {facts['max_grad_norm']!r}"
            budget.commit_release(name, release, released=what, is_seeded=seed is not None)
        found = None if own is None else own.values.get(_DRAW)
        if budget is not None and name is not None:
            found = budget.released(name) or found
        if found is None:
            found = _noisy(compute(), sensitivity, release.noise_multiplier, f"{function} {name}", seed)
        if budget is not None and name is not None:
            found = budget.record(name, found)
        if len(found) != size:
            remedy = "give each release a ledger and a name of its own"
            raise expected(function, "the recorded values", f"to be {size} numbers", len(found), remedy)
        if own is not None and _DRAW not in own.values:
            digest = None if seed is None else hashlib.sha256(np.array(found).tobytes()).hexdigest()[:32]
            own.charge(release, draw=_DRAW, limit=1, digest=digest, values=found)
    finally:
        if own is not None and not is_given:
            own.close()
    return torch.tensor(found, dtype=torch.float64)


def _noisy(total: Tensor, sensitivity: float, noise_multiplier: float, name: str, seed: int | None) -> list[float]:
    """Return a sum with Gaussian noise on the grid. Each call draws from a stream of its own."""
    noisy = add_noise(
        ClippedSum({"sum": total}, sensitivity),
        noise_multiplier=noise_multiplier,
        divisor=1,
        stream=RandomSource(seed).stream(name),
        step=0,
        on_grid=True,
    )
    return [float(value) for value in noisy["sum"].numpy()]
