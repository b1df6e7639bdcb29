"""Rows of scikit-learn: how they are checked, and transformers for pipelines that learn nothing from them."""

# scikit-learn has no types.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import (
    _check_feature_names_in,  # pyright: ignore[reportPrivateUsage]
    check_is_fitted,
    validate_data,
)

from privgrad.checks.data import warn_of_bounds_of_another_size, warn_of_fitted_scale, warn_of_private_bound
from privgrad.errors import described, expected
from privgrad.features.columns import Bins

Array = np.ndarray[Any, Any]
Bounds = tuple[Any, Any]

_FILL = (
    "fill in a public constant, by SimpleImputer(strategy='constant', fill_value=0) after PublicScaler, or give the "
    "table to PrivateTabularClassifier, where missing values have a code"
)
_CODE = (
    "code the column by OneHotEncoder(categories=[[...]]) with its public values, or give the table to "
    "PrivateTabularClassifier with the column declared as kind = 'category'"
)


@dataclass(eq=False, repr=False)
class PublicScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """A scaler that moves columns from public bounds to [-1, 1]. `fit` learns nothing.

    Args:
        bounds: public (low, high), as in a codebook: one pair of numbers for all columns, or a list of the lows and a
            list of the highs, one per column. A number outside of its bounds counts as the nearest one. NaN stays NaN;
            SimpleImputer(strategy="constant", fill_value=0) after it fills in the middle.
    Privacy:
        Each row of the result depends on that row and the bounds alone. `fit` warns of bounds that are extremes of the
        data, and of columns that were scaled on these very rows.
    """

    bounds: Bounds | None = None

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803
        """Check rows X, (n, width), and the bounds.

        Raises:
            PrivacyError: X has an infinite value or a text, or the bounds do not fit it.
        """
        rows = checked(self, X, ensure_all_finite="allow-nan")
        names = getattr(self, "feature_names_in_", range(rows.shape[1]))
        warn_of_fitted_scale("PublicScaler", {f"column {name}": rows[:, k] for k, name in enumerate(names)})
        low, high, values = (torch.from_numpy(np.array(one, dtype=float)) for one in (*self._ends(rows.shape[1]), rows))
        values = torch.where(values.isnan(), values.nanmedian(0).values.nan_to_num(), values)
        for name, ends in (("low", low), ("high", high)):
            is_low = name == "low"
            warn_of_private_bound("PublicScaler", f"the {name}s of bounds", ends, values, is_low=is_low, of=_OF_COLUMN)
        warn_of_bounds_of_another_size("PublicScaler", low, high, values)
        return self

    def transform(self, X: Any) -> Array:  # noqa: N803
        """Return the moved rows, (n, width)."""
        check_is_fitted(self)
        rows = checked(self, X, reset=False, ensure_all_finite="allow-nan")
        low, high = self._ends(rows.shape[1])
        return np.clip((2 * rows - low - high) / (high - low), -1, 1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _ends(self, width: int) -> tuple[Array, Array]:
        """Return the low and the high of each column."""
        try:
            low, high = (np.broadcast_to(np.asarray(ends, dtype=float), width) for ends in self.bounds or ())
        except (TypeError, ValueError):
            low = high = np.zeros(0)
        if not len(low) or not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
            condition = f"to be public (low, high), numbers or {width} of each, finite and low < high"
            raise expected("PublicScaler", "bounds", condition, described(self.bounds))
        return low, high


@dataclass(eq=False, repr=False)
class PublicBins(TransformerMixin, BaseEstimator):
    """One-hot codes of numbers in bins between public edges. `fit` learns nothing.

    Args:
        edges: public, as in a codebook: at least three increasing numbers for all columns, or a list of them for each
            column. A number outside of them is in the first or the last bin.
    Privacy:
        Each row of the result depends on that row and the edges alone. Quantiles of the data are not public edges.
    """

    edges: Sequence[Any] | None = None

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803
        """Check rows X, (n, width), and the edges.

        Raises:
            PrivacyError: X has a value that is not finite or is text, or the edges do not fit it.
        """
        self._bins(checked(self, X).shape[1])
        return self

    def transform(self, X: Any) -> Array:  # noqa: N803
        """Return the codes of all columns side by side, (n, codes)."""
        check_is_fitted(self)
        rows = checked(self, X, reset=False)
        codes = [bins(torch.from_numpy(np.array(column, dtype=float))) for bins, column in self._of(rows.T)]
        return torch.cat(codes, dim=1).double().numpy()

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Return a name for each code, such as "age_18_30"."""
        named = self._of(_check_feature_names_in(self, input_features))
        pairs = [(name, bins.edges[k], bins.edges[k + 1]) for bins, name in named for k in range(bins.width)]
        return np.array([f"{name}_{low:g}_{high:g}" for name, low, high in pairs], dtype=object)

    def _of(self, columns: Any) -> list[tuple[Bins, Any]]:
        return list(zip(self._bins(len(columns)), columns, strict=True))

    def _bins(self, width: int) -> list[Bins]:
        """Return the bins of each column."""
        edges = [] if self.edges is None else list(self.edges)
        each = edges if edges and np.ndim(edges[0]) else [edges] * width
        if len(each) != width:
            raise expected("PublicBins", "edges", f"to be one list, or {width}, one per column", f"{len(each)} lists")
        return [Bins(tuple(own)) for own in each]


_OF_COLUMN = "value of a column"


def checked(estimator: BaseEstimator, X: Any, *y: Any, ensure_all_finite: bool | str = True, **options: Any) -> Any:  # noqa: N803
    """Return X, or X and y, as `validate_data` does. No error shows a value, or advises a private step."""
    validated: Any = validate_data
    function = type(estimator).__name__
    try:
        found = validated(estimator, X, *y, ensure_all_finite=False, **options)
        rows, *named = found if y else (found,)
        if rows.dtype.kind in "mM":  # as numbers, they would be nanoseconds
            raise TypeError("The DType is one of dates")
        rows = np.asarray(rows, dtype=None if rows.dtype.kind in "biuf" else np.float64)
        named = [np.asarray(one, dtype=np.float64) if options.get("y_numeric") else one for one in named]
    except (ValueError, TypeError) as error:
        if not f"{error}".startswith(("could not convert", "dtype='numeric'", "The DType ")):
            raise
        got = f"{column[1]} in {_named(X, column[0])}" if (column := _of_text(X)) else "text"
        of_y = column is None and not f"{error}".startswith(("dtype", "The DType "))
        raise expected(function, "y" if of_y else "X", "to be numbers", got, "" if of_y else _CODE) from None
    finite = (np.isfinite(rows) if ensure_all_finite is True else ~np.isinf(rows)).all(axis=0)
    if not finite.all():
        raise expected(function, "X", "to be finite", f"NaN or inf in {_named(X, int(finite.argmin()))}", _FILL)
    return (rows, *named) if y else rows


def _of_text(X: Any) -> tuple[int, str] | None:  # noqa: N803
    """Return the first column with a text that is no number, or with a date, and which of the two; else None."""
    for column, values in enumerate(np.asarray(X, dtype=object).T):
        try:
            values.astype(np.float64)
        except (ValueError, TypeError) as error:
            return column, "text" if isinstance(error, ValueError) else "a date or an object"
    return None


def _named(X: Any, column: int) -> str:  # noqa: N803
    """Return a column for errors: its name in a table, or its number from 0."""
    return f"column {X.columns[column]!r}" if hasattr(X, "columns") else f"column {column}"
