"""Gaussian releases of sums over privacy units: a sum, a mean, a histogram, a second moment.

Users call them before a training, for example to fill in missing values or to scale. The privacy guarantee rests on
this file: each function bounds one unit's part. `release_record` adds the noise, and records charge and values.
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.budget import Budget
from privgrad.errors import described, expected, require_integer, require_positive
from privgrad.ledger import Ledger
from privgrad.public_bounds import is_typed, require_public_bound
from privgrad.release_record import Planned, Where, release_once
from privgrad.types import PrivacyUnit

Rows = Tensor | np.ndarray | Sequence[Any]

_CHUNK = 4096  # rows that are added up in one call of torch; few enough that rounding stays far below the noise's grid
_MOST_ROWS = 1 << 29
_NOT_FINITE = "not finite and count as zero"
_OFTEN = 0.05  # share of rows above the bound that may be an error
_ROUNDED = 1.001  # times the bound: rows of norm 1 may be longer by rounding
_SEVERAL = 1.5  # rows per unit that may be an error
_LARGEST = 1e100  # bound, and one over the smallest: squares and quotients stay far inside of float64


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
        bound: from 1e-100 to 1e100, public: the largest norm of a row, over all its values, chosen without the data.
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
        PrivacyError: an argument is out of its range, `bound` looks like the largest norm or number of the rows, or the
            ledger was written for another release.
    Privacy:
        The Gaussian mechanism with noise multiplier sigma: one more unit, or one fewer, moves the sum by `bound` at
        most. It costs as much as Release(sigma, 1.0). The noise is on the grid of `noise.grid_of`, with at most 1/500
        more noise, so low-order bits show nothing of the data. The rounding of norms and sums is below 1e-12 n bound
        and stays within the grid's reserve of bound / 1024. Number of rows, duration and memory are not protected.
    Reference:
        Dwork, Roth 2014, appendix A; on floating-point noise, Mironov 2012.
    """
    where = Where(delta, ledger, budget, name, seed)
    return _of_rows("sum", rows, bound, noise_multiplier, num_examples, privacy_unit, where)


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
    where = Where(delta, ledger, budget, name, seed)
    return _of_rows("mean", rows, bound, noise_multiplier, num_examples, privacy_unit, where) / num_examples


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
            _warn_of_lost(function, bins == num_bins, f"in no bin from 0 to {num_bins - 1} and do not count")
            _warn_of_count(function, len(values), num_examples)
            return torch.bincount(bins, minlength=num_bins + 1)[:num_bins].double()

    else:
        _require_bound(function, bound)
        values, shape = _rows(function, rows)
        if shape != (num_bins,):
            got = f"(n, {', '.join(map(str, shape))})"
            raise expected(function, "rows", f"of shape (n, {num_bins})", got, "give the counts of each unit")
        _require_public(function, bound, values)

        def count() -> Tensor:
            _warn_of_rows(function, values, bound, num_examples)
            return _sum(values, bound)

    sensitivity = 1.0 if bound is None else float(bound)
    planned = Planned("histogram", sensitivity, noise_multiplier, num_examples, privacy_unit, (num_bins,), num_bins)
    return release_once(planned, count, Where(delta, ledger, budget, name, seed))


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
    _require_bound(function, bound)
    values, shape = _rows(function, rows)
    if len(shape) != 1:
        got = f"(n, {', '.join(map(str, shape))})" if shape else "(n,)"
        raise expected(function, "rows", "of shape (n, d)", got, "flatten each unit's values to one row")
    _require_public(function, bound, values)
    (d,) = shape
    size = d * (d + 1) // 2

    def moment() -> Tensor:
        _warn_of_rows(function, values, bound, num_examples)
        total = _sum(values, bound, lambda part: part.T @ part).reshape(d, d)
        return total[tuple(torch.triu_indices(d, d))] * _off_diagonal(d)

    planned = Planned("second moment", float(bound) ** 2, noise_multiplier, num_examples, privacy_unit, (d, d), size)
    flat = release_once(planned, moment, Where(delta, ledger, budget, name, seed))
    upper, scale = torch.triu_indices(d, d), _off_diagonal(d)
    result = torch.empty(d, d, dtype=torch.float64)
    result[upper[0], upper[1]] = flat / scale
    result[upper[1], upper[0]] = flat / scale
    return result


def _of_rows(
    kind: str,
    rows: Rows,
    bound: float,
    noise_multiplier: float,
    num_examples: int,
    privacy_unit: PrivacyUnit,
    where: Where,
) -> Tensor:
    """Release the sum of one row per unit, as `release_sum` describes it."""
    function = f"release_{kind}"
    _require_bound(function, bound)
    values, shape = _rows(function, rows)
    _require_public(function, bound, values)

    def total() -> Tensor:
        _warn_of_rows(function, values, bound, num_examples)
        return _sum(values, bound)

    planned = Planned(kind, float(bound), noise_multiplier, num_examples, privacy_unit, shape, math.prod(shape))
    return release_once(planned, total, where).reshape(shape)


def _warn_of_lost(function: str, lost: Tensor, fate: str) -> None:
    """Warn of rows that a release leaves out, by a mask of shape (n,). NOT private: the warning is printed only."""
    if count := int(lost.sum()):
        warnings.warn(f"NOT PRIVATE: {function}: {count:,} of {len(lost):,} rows are {fate}", stacklevel=6)


def _warn_of_rows(function: str, values: Tensor, bound: float, num_examples: int) -> None:
    """Warn of rows that count as zero, of many rows above the bound, and of too many rows. NOT private."""
    parts = cast("tuple[Tensor, ...]", values.split(_CHUNK))
    norms = torch.cat([_norms(part / bound)[:, 0] for part in parts])
    finite = norms.isfinite()
    _warn_of_lost(function, ~finite, _NOT_FINITE)
    long = finite & (norms > _ROUNDED)
    if float(long.sum()) > _OFTEN * len(values):
        _warn_of_lost(
            function, long, f"longer than bound = {bound:g} and are scaled down. Check the units of the values"
        )
    _warn_of_count(function, len(values), num_examples)


def _warn_of_count(function: str, rows: int, num_examples: int) -> None:
    """Warn of more rows than there should be units: a unit with several rows would not be protected. NOT private."""
    if rows > _SEVERAL * num_examples:
        warnings.warn(
            f"NOT PRIVATE: {function}: {rows:,} rows are given for num_examples = {num_examples:,}. All data of a unit "
            "must be in one row: add up the rows of each unit first, or raise num_examples",
            stacklevel=6,
        )


def _require_bound(function: str, bound: float) -> None:
    """Raise PrivacyError unless the largest norm of a row is a number with which float64 can compute."""
    require_positive(function, "bound", bound, "give the largest norm of a row, chosen without the data")
    if not 1 / _LARGEST <= bound <= _LARGEST:
        condition = f"to be from {1 / _LARGEST:g} to {_LARGEST:g}"
        raise expected(function, "bound", condition, bound, "express the values and the bound in another unit")


def _require_public(function: str, bound: float, values: Tensor) -> None:
    """Raise PrivacyError if a bound of many digits is the largest norm, or the largest number, of the rows."""
    if is_typed(bound):
        return
    norms = torch.cat([_norms(part / bound) for part in cast("tuple[Tensor, ...]", values.split(_CHUNK))])
    counted, largest = norms.isfinite(), torch.tensor(float(bound))
    require_public_bound(function, "bound", largest, torch.where(counted, norms * bound, 0.0), of="norm of a row")
    require_public_bound(function, "bound", largest, torch.where(counted, values.abs(), 0.0), of="number")


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


def _norms(rows: Tensor) -> Tensor:
    """Return the norm of each row, (n, 1)."""
    return cast(Tensor, torch.linalg.vector_norm(rows, dim=1, keepdim=True))


def _clipped(rows: Tensor, bound: float) -> Tensor:
    """Return the rows, scaled down to norm `bound` at most; zeros for a row with a value that is not finite.

    Privacy:
        The sensitivity of every release here rests on this function: each row depends on one unit alone.
    """
    rows = rows / bound
    norms = _norms(rows)
    scaled = rows * (bound / norms.clamp(min=1.0))
    # A norm that is infinite although all values are finite gives zero, too.
    return torch.where(norms.isfinite(), scaled, 0.0)
