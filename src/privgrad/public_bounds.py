"""The check that finds a bound which was copied from the private data.

`releases`, `heads`, `estimators` and `data.table` call it. The privacy guarantee rests on bounds that are known without
the data. It does not rest on this file, which finds a common mistake only.
"""

from torch import Tensor

from privgrad.errors import expected

_DIGITS = 3  # of a bound that a person may have chosen
_ROUNDED = 2e-7  # relative difference of a bound and its first digits; bounds may be float32
_EQUAL = 1e-6  # relative difference of a bound and a value, or the norm of a row, that count as equal
_SHARE, _ROWS = 0.05, 10  # of rows that reach a public bound to which the data were clipped or scaled
_BLOCK = 4096  # rows that are compared at once


def is_typed(bound: float) -> bool:
    """Return whether a bound, or its square, has at most 3 significant digits, so that a person may have chosen it."""
    return any(abs(one - float(f"{one:.{_DIGITS}g}")) <= _ROUNDED * abs(one) for one in (bound, bound**2))


def require_public_bound(
    function: str, name: str, bound: Tensor, rows: Tensor, *, is_low: bool = False, of: str = "value"
) -> None:
    """Raise PrivacyError if a bound of many digits is the extreme value of the data, and few rows have it.

    A bound that 10 rows reach, or a twentieth of the rows and at least 2, passes: the data were probably clipped or
    scaled to it.

    Args:
        function: the name for errors.
        name: of the bound, for errors.
        bound: one number, shape (), or one per column, (columns,).
        rows: the private values without NaN, (n, columns). Columns with the same bound are compared as one.
        is_low: whether the bound is compared with the smallest value, in place of the largest.
        of: the kind of the values, for errors.
    """
    bounds = bound.detach().cpu().double().expand(rows.shape[1])
    chosen = [value for value in map(float, set(bounds.numpy())) if not is_typed(value)]
    if not chosen or not len(rows):
        return
    extremes = (rows.amin(0) if is_low else rows.amax(0)).cpu().double()
    enough = max(2, min(_ROWS, _SHARE * len(rows)))
    for value in chosen:
        columns = bounds == value
        if bool(_are_equal(extremes[columns], value).any()) and _count(rows, columns, value) < enough:
            remedy = "round it outwards to two digits, to a number that is known without the data"
            got = f"the {'smallest' if is_low else 'largest'} {of} of the data, with all its digits"
            raise expected(function, name, "to be public", got, remedy)


def _are_equal(values: Tensor, bound: float) -> Tensor:
    """Return which values equal a bound, apart from rounding."""
    return (values - bound).abs() <= _EQUAL * abs(bound)


def _count(rows: Tensor, columns: Tensor, bound: float) -> int:
    """Return how many rows have a bound in one of these columns, by a mask of shape (columns,)."""
    own = columns.to(rows.device)
    parts = (rows[start : start + _BLOCK, own].double() for start in range(0, len(rows), _BLOCK))
    return sum(int(_are_equal(part, bound).any(1).sum()) for part in parts)
