"""Gaussian releases of sums over privacy units: a sum, a mean, a histogram, a second moment.

Each release has one draw, its noise, and one line of a ledger or a budget, which holds the released values. A second
call under the same name returns these values.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.accounting.mechanisms import Release
from privgrad.checks.data import is_typed, warn_of_private_bound
from privgrad.errors import expected, require_choice, require_delta, require_in, require_integer, require_positive
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Hold, Ledger
from privgrad.noise.gaussian import add_noise, grid_of, noise_generator
from privgrad.rng import RandomSource
from privgrad.types import ClippedSum, PrivacyUnit

_DRAW = "release"  # the one draw of a release's ledger
_MOST_VALUES = 1 << 19  # of a release: a line of a ledger holds as many
_CHUNK = 4096  # rows that are added up in one call of torch; few enough that rounding stays far below the noise's grid
_MOST_ROWS = 1 << 29
_OFTEN = 0.05  # share of rows above the bound that may be an error
_ROUNDED = 1.001  # times the bound: rows of norm 1 may be longer by rounding
_SEVERAL = 1.5  # rows per unit that may be an error
_BOUNDS = "[1e-100, 1e100]"  # squares and quotients stay far inside of float64
Rows = Tensor | np.ndarray | Sequence[Any]


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
        PrivacyError: an argument is out of its range, or the ledger was written for another release.
    Privacy:
        The Gaussian mechanism with noise multiplier sigma: one more unit, or one fewer, moves the sum by `bound` at
        most. It costs as much as Release(sigma, 1.0). The noise is on the grid of `noise.grid_of`, with at most 1/500
        more noise, so low-order bits show nothing of the data. The rounding of norms and sums is below 1e-12 n bound
        and stays within the grid's reserve of bound / 1024. Number of rows, duration and memory are not protected.
    Reference:
        Dwork, Roth 2014, appendix A; on floating-point noise, Mironov 2012.
    """
    shape, total = _summed("release_sum", rows, bound, num_examples)
    planned = _Planned("sum", float(bound), noise_multiplier, num_examples, privacy_unit, shape, math.prod(shape))
    return _release_once(planned, total, _Where(delta, ledger, budget, name, seed)).reshape(shape)


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

    Arguments and errors are as in `release_sum`, except `num_examples`, the public divisor: the true number of rows
    stays private. Subtract a public center from the rows, if one is known: then a smaller bound suffices.

    Returns:
        A float64 tensor of the shape of one row. Its noise has standard deviation sigma bound / num_examples.
    Privacy:
        As release_sum; the division is post-processing.
    """
    shape, total = _summed("release_mean", rows, bound, num_examples)
    planned = _Planned("mean", float(bound), noise_multiplier, num_examples, privacy_unit, shape, math.prod(shape))
    values = _release_once(planned, total, _Where(delta, ledger, budget, name, seed)).reshape(shape)
    return values / float(num_examples)  # torch divides by no integer above 2^63


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

    Arguments and errors are as in `release_sum`, except:

    - `rows`: shape (n,), the bin of each unit, an integer from 0 to num_bins - 1; a unit with another value is in no
      bin. With `bound`: shape (n, num_bins), the counts of each unit;
    - `num_bins`: public;
    - `noise_multiplier`: sigma > 0, noise standard deviation over sensitivity;
    - `bound`: None: each unit is in at most one bin. A number: the largest norm of a unit's counts.

    Returns:
        A float64 tensor of shape (num_bins,). Counts may be negative and are not whole numbers.
    Privacy:
        As release_sum, with sensitivity `bound`, or 1: one unit changes one count by 1. The bins must be public.
    """
    function = "release_histogram"
    require_integer(function, "num_bins", num_bins, 1)
    wanted = (num_bins,) if bound is not None else ()
    if bound is None:
        values, shape = _rows(function, rows)
        bins = torch.where((values >= 0) & (values < num_bins) & (values == values.floor()), values, num_bins)
        bins = bins.nan_to_num(num_bins).long().flatten()

        def count() -> Tensor:
            lost = {f"in no bin from 0 to {num_bins - 1} and do not count": bins == num_bins}
            _warn_of_rows(function, lost, len(values), num_examples)
            return torch.bincount(bins, minlength=num_bins + 1)[:num_bins].double()

    else:
        shape, count = _summed(function, rows, bound, num_examples)
    if shape != wanted:
        remedy = "give one bin a unit, or bound= and the counts of each unit"
        raise expected(function, "rows", f"of shape {_shown(wanted)}", _shown(shape), remedy)
    sensitivity = 1.0 if bound is None else float(bound)
    planned = _Planned("histogram", sensitivity, noise_multiplier, num_examples, privacy_unit, (num_bins,), num_bins)
    return _release_once(planned, count, _Where(delta, ledger, budget, name, seed))


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

    Arguments and errors are as in `release_sum`, except `rows`, of shape (n, d), and `noise_multiplier`: sigma > 0,
    noise standard deviation over bound^2. Divide the result by `num_examples` for the mean.

    Returns:
        A symmetric float64 tensor of shape (d, d). It may have negative eigenvalues.
    Privacy:
        As release_sum, with sensitivity bound^2. The release is the vector of the diagonal and of sqrt(2) times the
        entries above it. For x x^T its norm is |x|^2, so one unit moves it by bound^2 at most. To divide by sqrt(2) and
        to mirror the entries is post-processing.
    Reference:
        Dwork, Talwar, Thakurta, Zhang 2014 (Analyze Gauss), which adds noise of the full size off the diagonal, too.
    """
    function = "release_second_moment"
    shape, moment = _summed(function, rows, bound, num_examples, _moment)
    if len(shape) != 1:
        raise expected(function, "rows", "of shape (n, d)", _shown(shape), "flatten each unit's values to one row")
    (d,) = shape
    upper = torch.triu_indices(d, d)
    size, square = d * (d + 1) // 2, float(bound) ** 2
    planned = _Planned("second moment", square, noise_multiplier, num_examples, privacy_unit, (d, d), size)
    flat = _release_once(planned, moment, _Where(delta, ledger, budget, name, seed)) / _off_diagonal(upper)
    result = torch.empty(d, d, dtype=torch.float64)
    result[upper[0], upper[1]] = flat
    result[upper[1], upper[0]] = flat
    return result


def _summed(
    function: str, rows: Rows, bound: float, num_examples: int, exact: Callable[[Tensor, float], Tensor] | None = None
) -> tuple[tuple[int, ...], Callable[[], Tensor]]:
    """Return the shape of one row, and a function that warns of odd rows and returns their `exact` sum: PRIVATE."""
    # A number that somebody typed: a tensor would be computed from the data.
    require_in(function, "bound", bound, _BOUNDS, "give the largest norm of a row, chosen without the data")
    values, shape = _rows(function, rows)
    norms = torch.cat([_norms(part / bound) for part in cast("tuple[Tensor, ...]", values.split(_CHUNK))])
    counted = norms.isfinite()
    if not is_typed(bound):
        largest = torch.tensor(float(bound))
        warn_of_private_bound(function, "bound", largest, torch.where(counted, norms * bound, 0.0), of="norm of a row")
        warn_of_private_bound(function, "bound", largest, torch.where(counted, values.abs(), 0.0), of="number")

    def total() -> Tensor:
        lost, long = {"not finite and count as zero": ~counted}, counted & (norms > _ROUNDED)
        if float(long.sum()) > _OFTEN * len(values):
            lost[f"longer than bound = {bound:g} and are scaled down. Check the units of the values"] = long
        _warn_of_rows(function, lost, len(values), num_examples)
        return _sum(values, bound) if exact is None else exact(values, bound)

    return shape, total


def _moment(values: Tensor, bound: float) -> Tensor:
    """Return the diagonal of the sum of x x^T over clipped rows x, and sqrt(2) times the entries above it: PRIVATE."""
    upper = torch.triu_indices(values.shape[1], values.shape[1])
    total = _sum(values, bound, lambda part: part.T @ part).reshape(values.shape[1], values.shape[1])
    return total[upper[0], upper[1]] * _off_diagonal(upper)


def _off_diagonal(upper: Tensor) -> Tensor:
    """Return sqrt(2) for each entry above the diagonal and 1 for each on it, in the order of torch.triu_indices."""
    return torch.where(upper[0] == upper[1], 1.0, math.sqrt(2.0)).double()


# Fault: a bound in another unit than the values, bins that count from 1, one row per visit and not per person.
# Cost: one pass over the rows. Warns wrongly where so much clipping is meant, or num_examples is far too small.
def _warn_of_rows(function: str, lost: Mapping[str, Tensor], rows: int, num_examples: int) -> None:
    """Warn of rows by their fate, and of too many rows. NOT private: the counts are printed, and nowhere recorded."""
    counts = {fate: int(mask.sum()) for fate, mask in lost.items()}
    said = [f"{count:,} of {rows:,} rows are {fate}" for fate, count in counts.items() if count]
    if rows > _SEVERAL * num_examples:
        said.append(
            f"{rows:,} rows are given for num_examples = {num_examples:,}. All data of a unit must be in one row: add "
            "up the rows of each unit first, or raise num_examples"
        )
    for text in said:
        warnings.warn(f"NOT PRIVATE: {function}: {text}", stacklevel=5)  # the line of the user's call


def _rows(function: str, rows: Rows) -> tuple[Tensor, tuple[int, ...]]:
    """Return rows as float64, shape (n, values), and the shape of one row."""
    values = torch.as_tensor(rows).detach().cpu().double()
    if values.dim() == 0 or 0 in values.shape[1:]:
        remedy = "give one row per unit; without units, a tensor of shape (0, d)"
        raise expected(function, "rows", "of shape (n, ...)", tuple(values.shape), remedy)
    if len(values) > _MOST_ROWS:  # more rounding than the grid reserves; the exact number is private
        remedy = "release several sums of disjoint parts, under one commitment"
        raise expected(function, "rows", f"to be at most {_MOST_ROWS}", f"at least {_MOST_ROWS + 1}", remedy)
    return values.reshape(len(values), math.prod(values.shape[1:])), tuple(values.shape[1:])


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(['n', *map(str, shape)])}{'' if shape else ','})"


def _sum(values: Tensor, bound: float, product: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the exact sum of the clipped rows, flat: PRIVATE. With `product`, the sum of its results over chunks."""
    total = torch.zeros(values.shape[1] ** (1 if product is None else 2), dtype=torch.float64)
    # The chunks are added with compensation, so that the error of rounding does not grow with their number.
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
    """Return the rows, scaled down to norm `bound` at most; zeros for a row with a value that is not finite."""
    # The sensitivity of every release follows from this: each row depends on one unit alone.
    rows = rows / bound
    norms = _norms(rows)
    scaled = rows * (bound / norms.clamp(min=1.0))
    # A norm that is infinite although all values are finite gives zero, too.
    return torch.where(norms.isfinite(), scaled, 0.0)


@dataclass(frozen=True)
class _Planned:
    """The public numbers of a release."""

    kind: str  # "sum", "mean", "histogram" or "second moment"
    sensitivity: float  # the most by which one unit moves the released vector
    noise_multiplier: float
    num_examples: int
    privacy_unit: str
    shape: tuple[int, ...]  # of the result
    size: int  # the number of released values

    @property
    def function(self) -> str:
        return f"release_{self.kind.replace(' ', '_')}"

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
class _Where:
    """The places that record a release, and its seed; the arguments of release_sum by these names."""

    delta: float | None
    ledger: Ledger | str | os.PathLike[str] | None
    budget: Budget | None
    name: str | None
    seed: int | None


def _require_valid(planned: _Planned, where: _Where) -> None:
    """Raise PrivacyError unless all numbers are in range, and a record is given: nothing fails after the commitment."""
    function, budget, sigma = planned.function, where.budget, planned.noise_multiplier
    require_positive(function, "noise_multiplier", sigma)
    require_integer(function, "num_examples", planned.num_examples, 1)
    require_choice(function, "privacy_unit", planned.privacy_unit, ("example", "user"))
    if planned.size > _MOST_VALUES:
        remedy = "release fewer values at once, each part under a name of its own"
        raise expected(function, "released values", f"to be at most {_MOST_VALUES}", planned.size, remedy)
    grid_of(ClippedSum({"sum": torch.empty(planned.size, device="meta")}, planned.sensitivity), sigma)
    if where.ledger is None and budget is None:
        raise expected(function, "ledger or budget", "to be given", None)
    if (budget is None) != (where.name is None):
        raise expected(function, "name", "to be given with a budget", f"name {where.name!r} and budget {budget}")
    if budget is not None:
        budget.require_covered(function, planned.num_examples, planned.privacy_unit)
    if where.delta is not None:
        require_delta(function, where.delta)
    if where.seed is not None:
        require_integer(function, "seed", where.seed, -math.inf)


def _release_once(planned: _Planned, compute: Callable[[], Tensor], where: _Where) -> Tensor:
    """Charge and record a release, or find it recorded, and return its values, flat; `compute` gives the exact ones.

    The commitment comes first, then noise, then the record in the budget, then charge and values in one line of the
    ledger. The values are returned after all of these. A process that dies before the first record of values has shown
    nothing, so its successor may draw other noise; afterwards its successor finds the values.
    """
    _require_valid(planned, where)
    function, budget, seed, ledger = planned.function, where.budget, where.seed, where.ledger
    name = cast(str, where.name)  # of a release with a budget
    delta = budget.delta if budget is not None and where.delta is None else where.delta
    sigma, facts, found = float(planned.noise_multiplier), planned.facts, None
    release = Release(sigma, 1.0)
    own = ledger if ledger is None or isinstance(ledger, Ledger) else Ledger(ledger)
    try:
        if own is not None:
            if budget is not None:
                own.limit_to(Hold(name, release, budget.path.name))
            own.bind({**facts, "delta": delta, "research_seed": seed is not None})
            found = own.values.get(_DRAW)
        if budget is not None:
            what = f"{planned.kind} {facts['shape']}, bound {facts['max_grad_norm']!r}"
            budget.commit_release(name, release, released=what, is_seeded=seed is not None)
            found = budget.released(name) or found
        is_recorded = found is not None
        if found is None:
            exact = ClippedSum({"sum": compute()}, planned.sensitivity)
            stream = RandomSource(seed).stream(f"{function} {name}")  # of its own: a later call draws other noise
            noisy = add_noise(exact, noise_multiplier=sigma, divisor=1, stream=stream, step=0, on_grid=True)
            found = [float(value) for value in noisy["sum"].numpy()]
        if budget is not None:
            found = budget.record(name, found)
        if is_recorded:
            record, other = "the release of this ledger" if own is None or own.path is None else f"{own.path}", "ledger"
            if budget is not None:
                record, other = f"{name!r} of {budget.path}", "name"
            warnings.warn(
                f"{function}: {record} was released before; its recorded value is returned, whatever the rows are now. "
                f"For a new release, which is charged again, give another {other}",
                stacklevel=3,  # the line of the user's call
            )
        if own is not None and _DRAW not in own.values:
            digest = None if seed is None else hashlib.sha256(np.array(found).tobytes()).hexdigest()[:32]
            own.charge(release, draw=_DRAW, limit=1, digest=digest, values=found)
    finally:
        if own is not None and own is not ledger:
            own.close()
    return torch.tensor(found, dtype=torch.float64)
