"""Private linear models with the interface of scikit-learn. Their privacy guarantee is that of `fit_head`.

Four habits of scikit-learn are not private, and void the guarantee: a scaler or vectorizer that is fitted on the same
rows; GridSearchCV and other choices by a score on them; cross-validation, which trains several times; and refitting.
Give each training its own part of one Budget.
"""

# scikit-learn has no types.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from privgrad.checks.data import warn_of_private_bound
from privgrad.errors import described, expected
from privgrad.features import Extractor, Scaled, Splines
from privgrad.heads import fit_head
from privgrad.ledger.budget import Budget
from privgrad.training.schedule import Decay

KNOTS = 16  # of each column
Array = np.ndarray[Any, Any]
Bounds = tuple[Any, Any]

_FILL = (
    "fill in a public constant, or declare the column in privgrad.data.table, where missing = 'category' gives missing "
    "values a code, and train by fit_head"
)
_CODE = (
    "give numbers by a public code, or declare the column with kind = 'category' in privgrad.data.table, and train by "
    "fit_head"
)


@dataclass(kw_only=True, eq=False, repr=False)
class _Private(BaseEstimator):
    """The arguments, the training and the outputs that both estimators share."""

    target_epsilon: float | None
    delta: float | None
    num_examples: int | None
    feature_bounds: Bounds | None = None
    steps: int | None = None
    expected_batch_size: int | None = None
    max_grad_norm: float | None = None
    noise_step: float | None = None
    schedule: Decay = "cosine"
    budget: Budget | None = None
    output_dir: str | os.PathLike[str] | None = None
    seed: int | None = None

    def _fit_head(self, X: Array, labels: Array, **target: Any) -> None:  # noqa: N803
        """Train the head on the rows of X; warn of a second training that no budget counts."""
        folder = self.output_dir
        is_counted = self.budget is not None or (folder is not None and (Path(folder) / "ledger.jsonl").exists())
        if hasattr(self, "head_") and not is_counted:
            warnings.warn(
                f"{type(self).__name__}.fit: this object was fitted before. Both trainings are releases, whose costs "
                "add up; head_.epsilon is the cost of the last one. Give budget and output_dir to keep the total",
                stacklevel=3,
            )
        features, extractor = self._features(X)
        self.head_ = fit_head(
            features,
            labels,
            **target,
            **{one.name: getattr(self, one.name) for one in fields(_Private) if one.name != "feature_bounds"},
            extractor=extractor,
            source="the columns of X as given" if extractor is None else None,
            progress=False,
        )

    def _features(self, X: Array) -> tuple[torch.Tensor, Extractor | None]:  # noqa: N803
        """Return the features of the rows of X, and the extractor that made them; None for rows as given."""
        function, rows = type(self).__name__, _tensor(X)
        if self.feature_bounds is None and X.shape[1] == 1:
            remedy = "give public bounds (low, high): without them, only the sign of each number counts"
            raise expected(function, "feature_bounds", "to be given for a single column", None, remedy)
        if self.feature_bounds is None:
            return rows, None
        low, high = self.feature_bounds
        count = self.num_examples if self.budget is None else self.num_examples or self.budget.num_examples
        # A small data set has too few rows for the weights of many codes.
        has_enough = count is not None and KNOTS * X.shape[1] <= count / 10
        extractor = Splines(low, high, KNOTS) if has_enough else Scaled(low, high)
        features = extractor(rows)
        for name in ("low", "high"):
            bound, of = extractor.get_buffer(name), "value of a column"
            warn_of_private_bound(function, f"the {name}s of feature_bounds", bound, rows, is_low=name == "low", of=of)
        return features, extractor

    def _outputs(self, X: Any) -> torch.Tensor:  # noqa: N803
        """Return the outputs of the fitted head for rows of as many columns as in training."""
        check_is_fitted(self)
        return self.head_(_tensor(_checked(self, X, reset=False)))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLogisticRegression(ClassifierMixin, _Private):
    """Logistic regression with differential privacy, for rows that are one person each.

    Args:
        classes: the public classes, in any order. They are not taken from y: a class that one person has alone would
            identify this person.
        target_epsilon: as in fit_head; None with a budget uses all that is left.
        delta: as in fit_head; None with a budget.
        num_examples: as in fit_head; in cross-validation, of the rows in the training part of a fold. None with a
            budget.
        feature_bounds: public (low, high), as in a codebook: one pair of numbers for all columns, or a list of the lows
            and a list of the highs, one per column. Columns become hat codes with 16 knots (`features.Splines`), if
            num_examples is at least 160 times their number. Otherwise they are moved to [-1, 1], and a constant is
            added (`features.Scaled`). Give bounds for raw columns, such as age and income. One pair for columns of very
            different size flattens the small ones. None: the rows of X are features that were prepared without the
            data, such as embeddings, of at least 2 columns. Each row is divided by its norm, and there is no constant.
        steps, expected_batch_size, max_grad_norm, noise_step, schedule: as in fit_head.
        budget: as in fit_head; it needs output_dir.
        output_dir: as in fit_head; a second `fit` with the same folder resumes, and does not train again. Without it, a
            second `fit` is a second release, with a warning.
        seed: a research seed, which voids the privacy guarantee. None for the operating system's entropy.
    Attributes:
        classes_: the classes, sorted.
        head_: the Head; `head_.save(folder)` writes it, and `head_.epsilon` is the cost.
    Privacy:
        As fit_head. See the module for habits of scikit-learn that void it.
    """

    classes: Sequence[Any]

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on rows X, (n, width), and their classes y, (n,).

        Raises:
            PrivacyError: X has a value that is not finite or is text, a class of y is not among `classes`, X has one
                column and no feature_bounds, or fit_head refuses; nothing was spent.
        """
        rows, named = _checked(self, X, y, ensure_min_samples=2)
        check_classification_targets(named)
        self.classes_ = np.unique(np.asarray(self.classes))
        known = np.isin(named, self.classes_)
        if not known.all():
            condition, got = f"to be among classes {self.classes_.tolist()}", described(named[~known].tolist()[0])
            raise expected("fit", "y", condition, got, "add it to classes if it is public, or leave its rows out")
        labels: Array = np.searchsorted(self.classes_, named).astype(np.int64)
        self._fit_head(rows, labels, classes=self.classes_.tolist())
        return self

    def decision_function(self, X: Any) -> Array:  # noqa: N803
        """Return the scores of the classes, (n, classes); for two classes their difference, (n,)."""
        scores: Array = self._outputs(X).numpy()
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the likeliest class of each row, (n,)."""
        likeliest = self._outputs(X).argmax(1).numpy()
        return self.classes_[likeliest]

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return the probability of each class, (n, classes), in the order of classes_."""
        return self._outputs(X).double().softmax(1).numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearRegression(RegressorMixin, _Private):
    """Linear regression of a bounded number with differential privacy, for rows that are one person each.

    Clipping bounds the pull of each row: the loss is then about that of Huber, between mean and median regression.

    Args:
        label_bounds: the public smallest and largest label, known without y. Labels outside of them count as the
            nearest one.
        target_epsilon, delta, num_examples, feature_bounds, steps, expected_batch_size, max_grad_norm, noise_step,
            schedule, budget, output_dir, seed: as in PrivateLogisticRegression.
    Attributes:
        head_: the Head.
    Privacy:
        As PrivateLogisticRegression.
    """

    label_bounds: tuple[float, float]

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on rows X, (n, width), and their numbers y, (n,).

        Raises:
            PrivacyError: as in PrivateLogisticRegression; nothing was spent.
        """
        rows, numbers = _checked(self, X, y, y_numeric=True, ensure_min_samples=2)
        self._fit_head(rows, numbers, bounds=self.label_bounds)
        return self

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the number of each row, (n,), within label_bounds."""
        outputs = self._outputs(X)
        return self.head_.target.decoded(outputs).double().numpy()


def _checked(estimator: BaseEstimator, X: Any, *y: Any, **options: Any) -> Any:  # noqa: N803
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
    finite = np.isfinite(rows).all(axis=0)
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


def _tensor(rows: Array) -> torch.Tensor:
    return torch.from_numpy(np.require(rows, np.float32, ["C", "W"]))  # torch warns of arrays that cannot be written
