"""Private models with the interface of scikit-learn, of numbers and of tables. Their guarantee is that of `fit_head`.

Four habits of scikit-learn are not private, and void the guarantee: a scaler or vectorizer that is fitted on the same
rows; GridSearchCV and other choices by a score on them; cross-validation, which trains several times; and refitting.
Give each training its own part of one Budget.
"""

# scikit-learn has no types.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from rich import get_console
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from privgrad.accounting.accountant import rounded_up
from privgrad.checks.data import warn_of_private_bound
from privgrad.data.read_rows import Frame, records_of
from privgrad.data.schema import knots_of, with_knots
from privgrad.data.table import table, width_of
from privgrad.errors import described, expected, readable
from privgrad.features import Extractor, Scaled, Splines
from privgrad.heads import fit_head
from privgrad.ledger.budget import Budget
from privgrad.training.defaults import table_hidden
from privgrad.training.schedule import Decay

__all__ = [
    "PrivateLinearRegression",
    "PrivateLogisticRegression",
    "PrivateTabularClassifier",
    "PrivateTabularRegressor",
]

Array = np.ndarray[Any, Any]
Bounds = tuple[Any, Any]
Table = Frame | Mapping[str, Sequence[Any]]
_LABEL = "the labels"  # the column of labels without a name
_CODED = ("number", "category", "date", "days_between")  # kinds of columns whose missing values have a code

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
    """The arguments and the training that all estimators share."""

    target_epsilon: float | None
    delta: float | None
    num_examples: int | None
    steps: int | None = None
    expected_batch_size: int | None = None
    max_grad_norm: float | None = None
    noise_step: float | None = None
    schedule: Decay = "cosine"
    budget: Budget | None = None
    output_dir: str | os.PathLike[str] | None = None
    seed: int | None = None

    def _train(self, features: torch.Tensor, labels: Any, **options: Any) -> None:
        """Train the head; warn of a second training that no budget counts."""
        folder = self.output_dir
        is_counted = self.budget is not None or (folder is not None and (Path(folder) / "ledger.jsonl").exists())
        if hasattr(self, "head_") and not is_counted:
            warnings.warn(
                f"{type(self).__name__}.fit: this object was fitted before. Both trainings are releases, whose costs "
                "add up; head_.epsilon is the cost of the last one. Give budget and output_dir to keep the total",
                stacklevel=4,
            )
        own = {one.name: getattr(self, one.name) for one in fields(_Private)}
        self.head_ = fit_head(features, labels, **own, **options, progress=False)

    @property
    def _count(self) -> int:  # of examples; fit_head refuses 0
        return self.num_examples or (0 if self.budget is None else self.budget.num_examples)


@dataclass(kw_only=True, eq=False, repr=False)
class _Linear(_Private):
    """The features and the outputs of both linear models."""

    feature_bounds: Bounds | None = None

    def _fit_head(self, X: Array, labels: Array, **target: Any) -> None:  # noqa: N803
        features, extractor = self._features(X)
        source = "the columns of X as given" if extractor is None else None
        self._train(features, labels, **target, extractor=extractor, source=source)

    def _features(self, X: Array) -> tuple[torch.Tensor, Extractor | None]:  # noqa: N803
        """Return the features of the rows of X, and the extractor that made them; None for rows as given."""
        function, rows = type(self).__name__, _tensor(X)
        if self.feature_bounds is None and X.shape[1] == 1:
            remedy = "give public bounds (low, high): without them, only the sign of each number counts"
            raise expected(function, "feature_bounds", "to be given for a single column", None, remedy)
        if self.feature_bounds is None:
            return rows, None
        low, high = self.feature_bounds
        # A small data set has too few rows for the weights of many codes.
        knots = knots_of(self._count, X.shape[1])
        has_enough = knots * X.shape[1] <= self._count / 10
        extractor = Splines(low, high, knots) if has_enough else Scaled(low, high)
        features = extractor(rows)
        for name in ("low", "high"):
            bound, of = extractor.get_buffer(name), "value of a column"
            warn_of_private_bound(function, f"the {name}s of feature_bounds", bound, rows, is_low=name == "low", of=of)
        return features, extractor

    def _outputs(self, X: Any) -> torch.Tensor:  # noqa: N803
        """Return the outputs of the fitted head for rows of as many columns as in training."""
        check_is_fitted(self)
        return self.head_(_tensor(_checked(self, X, reset=False)))


class _Classifier(ClassifierMixin):
    """The predictions of both classifiers."""

    classes_: Array
    _outputs: Callable[[Any], torch.Tensor]

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the likeliest class of each row, (n,). A table may be a list of rows by column name, too."""
        return self.classes_[self._outputs(X).argmax(1).numpy()]

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return the probability of each class, (n, classes), in the order of classes_."""
        return self._outputs(X).double().softmax(1).numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLogisticRegression(_Classifier, _Linear):
    """Logistic regression with differential privacy, for rows that are one person each.

    Args:
        classes: the public classes, in any order. They are not taken from y: a class that one person has alone would
            identify this person.
        target_epsilon: as in fit_head; None with a budget uses all that is left.
        delta: as in fit_head; None with a budget.
        num_examples: as in fit_head; in cross-validation, of the rows in the training part of a fold. None with a
            budget.
        feature_bounds: public (low, high), as in a codebook: one pair of numbers for all columns, or a list of the lows
            and a list of the highs, one per column. Columns become hat codes (`features.Splines`), with 16 knots, with
            5 if num_examples is below 10,000, or with 2 if it is also below 25 for each column. If that makes more codes than
            num_examples / 10, columns are moved
            to [-1, 1] in their place, and a constant is added (`features.Scaled`). Give bounds for raw columns, such as
            age and income. One pair for columns of very different size flattens the small ones. None: the rows of X
            are features that were prepared without the data, such as embeddings, of at least 2 columns. Each row is
            divided by its norm, and there is no constant.
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


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearRegression(RegressorMixin, _Linear):
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


@dataclass(kw_only=True, eq=False, repr=False)
class _Tabular(_Private):
    """The declaration, the training and the outputs of both models of a table."""

    columns: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str]
    unit: str
    max_rows: int | None = None
    hidden: int | None = None
    verbose: bool = True

    def _fit_table(self, X: Table, y: Any, **target: Any) -> None:  # noqa: N803
        """Train a head on the codes of X, and tell what was chosen."""
        function = type(self).__name__
        cells, label = _by_name(function, X), f"{y if isinstance(y, str) else getattr(y, 'name', None) or _LABEL}"
        if not isinstance(y, str):
            if getattr(y, "ndim", 1) != 1 or not hasattr(y, "__len__"):
                got = described(y) if not hasattr(y, "shape") else f"shape {tuple(y.shape)}"
                raise expected(function, "y", "to be the labels, (n,), or the name of their column", got)
            cells |= {label: y}
        unit = {"unit": self.unit, "max_rows": self.max_rows}
        data = table(cells, columns=self._declared(function), label=label, **unit, **target)
        assert data.schema is not None
        bounds, width = data.schema.bounds, width_of(data.schema)
        hidden, why = self.hidden, "as given"
        if hidden is None:
            # Not what a budget has left: that differs when a training resumes.
            total = self.target_epsilon or (0.0 if self.budget is None else self.budget.total_epsilon)
            hidden, why = table_hidden(self._count, total, of_numbers=bounds is not None)
        of_target = {"num_classes": data.num_classes} if bounds is None else {"bounds": bounds}
        source = "codes of the declared columns"
        options = {"classes": data.classes, "schema": data.schema, "source": source, "hidden": hidden}
        self._train(*data.train.tensors, **of_target, **options)
        plan, epsilon = self.head_.privacy, self.head_.epsilon
        assert self.head_.result is not None
        steps = self.head_.result.ledger.releases
        self.choices_ = (
            f"{width} codes of {len(data.schema.columns)} columns",
            f"a linear model{f' with {hidden} hidden units' if hidden else ''}, {why}",
            f"{steps:,} steps, {plan['expected_batch_size']:,} of {plan['num_examples']:,} in each on average",
            f"clipping norm {plan['max_grad_norm']:g} and noise multiplier {plan['noise_multiplier']:.4g}",
            f"epsilon {rounded_up(epsilon, 4)} at delta {rounded_up(plan['delta'])}",
        )
        if self.verbose:
            get_console().print(f"{function}: {'; '.join(self.choices_)}", highlight=False, markup=False)

    def _declared(self, function: str) -> Any:
        """Return the columns, also of a TOML file, with what they leave open: knots, and codes of missing values."""
        found: Any = self.columns
        if isinstance(found, str | os.PathLike):
            with readable(function, f"columns, {found},", "to be a TOML with a table for each column", "correct it"):
                found = tomllib.loads(Path(found).read_text(encoding="utf-8"))
        if not isinstance(found, Mapping):
            return found  # `table` refuses it
        made = with_knots({f"{name}": one for name, one in found.items()}, self._count)
        is_coded = {name for name, one in made.items() if isinstance(one, Mapping) and one.get("kind") in _CODED}
        return {name: {"missing": "category", **one} if name in is_coded else one for name, one in made.items()}

    def _outputs(self, X: Any) -> torch.Tensor:  # noqa: N803
        """Return the outputs for a table, or for a list of rows by column name."""
        check_is_fitted(self)
        is_rows = isinstance(X, list) or (isinstance(X, Mapping) and not any(map(_is_column, X.values())))
        return self.head_(X if is_rows else records_of(_by_name(type(self).__name__, X)))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateTabularClassifier(_Classifier, _Tabular):
    """Classes from the columns of a table, with differential privacy: a declaration and one epsilon, and no tuning.

    Computes: codes of the declared columns (`data.table`), and a model on them (`fit_head`) that a public rule chooses:
        a linear one, with a layer of hidden units for a number if num_examples times epsilon is
        at least 40,000. `choices_` says what it chose.

    Args:
        columns: the declaration of each input column, as in `data.table`, or the path of a TOML file with a table for
            each column. Take ranges and values from a codebook, not from the rows. Numbers have 16 knots, 5 if
            num_examples is below 10,000, or 2 if it is also below 25 for each number, unless a column names its own.
            Missing values get a code, unless it has
            missing = "error". Columns that are not declared are not read.
        classes: the public classes, in any order. They are not taken from y.
        unit: "row" protects each row by itself. The name of a column that identifies a person protects all rows of a
            person together, and needs max_rows.
        max_rows: for persons: the most rows of a person, a public number. Later rows are not used.
        hidden: number of hidden units, 0 for a linear model; None: the rule chooses.
        verbose: whether `fit` prints what was chosen.
        target_epsilon, delta, num_examples, steps, expected_batch_size, max_grad_norm, noise_step, schedule, budget,
            output_dir, seed: as in PrivateLogisticRegression; num_examples counts persons if they are the unit.
    Attributes:
        classes_: the classes, sorted.
        choices_: what was chosen, one text each. All of it is public.
        head_: the Head, which takes rows by column name; `head_.save(folder)` writes it, for `privgrad predict`.
    Privacy:
        As fit_head. See the module for habits of scikit-learn that void it.
    """

    classes: Sequence[Any]

    def fit(self, X: Table, y: Any) -> Self:  # noqa: N803
        """Train on a table, a DataFrame or columns by name, and the classes of its rows: (n,), or the column's name.

        Raises:
            PrivacyError: the declaration is incomplete, a value does not fit it, or fit_head refuses; nothing was
                spent.
        """
        self.classes_ = np.unique(np.asarray(self.classes))
        self._fit_table(X, y, classes=self.classes_.tolist())
        return self


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateTabularRegressor(RegressorMixin, _Tabular):
    """A bounded number from the columns of a table, with differential privacy: as PrivateTabularClassifier.

    Args:
        label_bounds: the public smallest and largest label, known without y. Labels outside of them count as the
            nearest one.
        columns, unit, max_rows, hidden, verbose, target_epsilon, delta, num_examples, steps, expected_batch_size,
            max_grad_norm, noise_step, schedule, budget, output_dir, seed: as in PrivateTabularClassifier.
    Attributes:
        choices_, head_: as in PrivateTabularClassifier.
    Privacy:
        As PrivateTabularClassifier.
    """

    label_bounds: tuple[float, float]

    def fit(self, X: Table, y: Any) -> Self:  # noqa: N803
        """Train on a table and the numbers of its rows: (n,), or the column's name.

        Raises:
            PrivacyError: as in PrivateTabularClassifier; nothing was spent.
        """
        self._fit_table(X, y, bounds=self.label_bounds)
        return self

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the number of each row, (n,), within label_bounds."""
        return self.head_.target.decoded(self._outputs(X)).double().numpy()


def _by_name(function: str, X: Any) -> dict[str, Any]:  # noqa: N803
    """Return the columns of a table by name; raise PrivacyError unless each has a name of its own."""
    names: list[Any] = list(X if isinstance(X, Mapping) else getattr(X, "column_names", getattr(X, "columns", ())))
    texts = [f"{name}" for name in names]
    if not names or len(set(texts)) < len(texts):
        again = next((name for name in texts if texts.count(name) > 1), None)
        got = type(X).__name__ if again is None else f"two columns {again!r}"
        remedy = "give a DataFrame, or a dict of columns" if again is None else "rename one"
        raise expected(function, "X", "to have columns by name", got, remedy)
    return {text: X[name] for text, name in zip(texts, names, strict=True)}


def _is_column(values: Any) -> bool:
    return hasattr(values, "__len__") and not isinstance(values, str | bytes)


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
