"""Private models with the interface of scikit-learn, of numbers and of tables. Their guarantee is that of `fit_head`.

Four habits of scikit-learn are not private, and void the guarantee: a scaler or vectorizer that is fitted on the same
rows (`PublicScaler` and `PublicBins` take its place); GridSearchCV and other choices by a score on them
(`PrivateGridSearchCV` pays for them); cross-validation, which trains several times; and refitting. Give each training
its own part of one Budget. Without one, the second training of a process on so many examples warns of the total.
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
from sklearn.utils.validation import _check_sample_weight, check_is_fitted  # pyright: ignore[reportPrivateUsage]

from privgrad.accounting.accountant import epsilon, rounded_up
from privgrad.accounting.mechanisms import Release
from privgrad.checks.data import warn_of_bounds_of_another_size, warn_of_fitted_scale, warn_of_private_bound
from privgrad.data.read_rows import Frame, records_of
from privgrad.data.schema import knots_of, with_knots
from privgrad.data.table import table, width_of
from privgrad.errors import described, expected, readable
from privgrad.features import Extractor, Scaled, Splines
from privgrad.heads import fit_head
from privgrad.heads.search import PrivateGridSearchCV
from privgrad.heads.transformers import Array, Bounds, PublicBins, PublicScaler, checked
from privgrad.ledger.budget import Budget
from privgrad.training.defaults import table_hidden
from privgrad.training.schedule import Decay

__all__ = [
    "PrivateGridSearchCV",
    "PrivateLinearRegression",
    "PrivateLogisticRegression",
    "PrivateTabularClassifier",
    "PrivateTabularRegressor",
    "PublicBins",
    "PublicScaler",
]

Table = Frame | Mapping[str, Sequence[Any]]
_LABEL = "the labels"  # the column of labels without a name
_CODED = ("number", "category", "date", "days_between")  # kinds of columns whose missing values have a code
_OPEN = "to be given"  # the default of feature_bounds, which `fit` refuses
_UNCOUNTED: dict[tuple[int, str], list[Release]] = {}  # releases of trainings without a budget, by number and unit


@dataclass(kw_only=True, eq=False, repr=False)
class _Private(BaseEstimator):
    """The arguments and the training that all estimators share."""

    target_epsilon: float | None = None
    delta: float | None = None
    num_examples: int | None = None
    steps: int | None = None
    expected_batch_size: int | None = None
    max_grad_norm: float | None = None
    noise_step: float | None = None
    schedule: Decay = "cosine"
    budget: Budget | None = None
    output_dir: str | os.PathLike[str] | None = None
    seed: int | None = None

    @property
    def epsilon_(self) -> float:
        """The cost of the last training, at its delta: `head_.epsilon`."""
        check_is_fitted(self, "head_")
        return self.head_.epsilon

    def _require(self, *names: str) -> None:
        """Raise PrivacyError unless these public facts are given, and those that decide epsilon."""
        facts = ("target_epsilon", "delta", "num_examples") if self.budget is None else ()
        if missing := [name for name in (*names, *facts) if getattr(self, name) is None]:
            remedy = "they are choices, or public facts as in a codebook; do not take them from the rows"
            remedy += '; unit is "row", or the column that identifies a person' if "unit" in missing else ""
            raise expected(type(self).__name__, ", ".join(missing), "to be given", None, remedy)

    def _train(self, features: torch.Tensor, labels: Any, **options: Any) -> None:
        """Train the head; warn of further trainings that no budget counts."""
        folder = self.output_dir
        is_counted = self.budget is not None or (folder is not None and (Path(folder) / "ledger.jsonl").exists())
        own = {one.name: getattr(self, one.name) for one in fields(_Private)}
        self.head_ = fit_head(features, labels, **own, **options, progress=False)
        assert self.head_.result is not None
        ledger, plan = self.head_.result.ledger, self.head_.privacy
        self.n_iter_ = ledger.releases
        if is_counted or self.seed is not None:
            return
        before = _UNCOUNTED.setdefault((plan["num_examples"], plan["privacy_unit"]), [])
        before += ledger.charged
        # Fault: cross_val_score, GridSearchCV or a second `fit`: several trainings, of which head_.epsilon counts one.
        # Cost: an epsilon by RDP, which also holds if later trainings were chosen after a look at earlier ones.
        # Warns wrongly: trainings on equally many other people; hence it does not refuse. It sees one process only.
        if len(before) > 1:
            total = rounded_up(epsilon(before, delta=plan["delta"], accountant="rdp"), 4)
            warnings.warn(
                f"{type(self).__name__}.fit: {len(before)} trainings on {self._count:,} examples without a budget "
                f"in this process. If they are of the same people, their costs add up to epsilon {total} at delta "
                f"{rounded_up(plan['delta'])}, and epsilon_ counts the last one alone. To choose settings, use "
                "PrivateGridSearchCV; to train again, give each training a part of one budget, and a new output_dir",
                stacklevel=4,
            )

    @property
    def _count(self) -> int:  # of examples; fit_head refuses 0
        return self.num_examples or (0 if self.budget is None else self.budget.num_examples)


@dataclass(kw_only=True, eq=False, repr=False)
class _Linear(_Private):
    """The features and the outputs of both linear models."""

    feature_bounds: Bounds | str | None = _OPEN

    @property
    def coef_(self) -> Array:
        """The weights of the columns, or of their codes."""
        return self._weights(slice(None, -1) if type(self.head_.extractor) is Scaled else slice(None))

    @property
    def intercept_(self) -> Any:
        """The weight of the constant; without one, 0 for classes and the middle of label_bounds for numbers."""
        has_one = type(self.head_.extractor) is Scaled
        found = self._weights(-1) if has_one else np.zeros_like(self._weights(0))
        return found + self.head_.target.middle if isinstance(self, RegressorMixin) else found

    def _weights(self, columns: Any) -> Array:
        """Return the weights of some features: of each class, of two classes their difference, or of the number."""
        check_is_fitted(self, "head_")
        weights: Array = self.head_.model.linear.weight.detach().double().cpu().numpy()[:, columns]
        if isinstance(self, RegressorMixin):
            return self.head_.target.half * weights[0]
        return weights[1:] - weights[:1] if len(weights) == 2 else weights

    def _fit_head(self, X: Array, labels: Array, weights: Array | None, **target: Any) -> None:  # noqa: N803
        names = getattr(self, "feature_names_in_", range(X.shape[1]))
        warn_of_fitted_scale(type(self).__name__, {f"column {name}": X[:, k] for k, name in enumerate(names)})
        features, extractor = self._features(X)
        source = "the columns of X as given" if extractor is None else None
        self._train(features, labels, **target, weights=weights, extractor=extractor, source=source)

    def _features(self, X: Array) -> tuple[torch.Tensor, Extractor | None]:  # noqa: N803
        """Return the features of the rows of X, and the extractor that made them; None for rows as given."""
        function, rows = type(self).__name__, _tensor(X)
        if isinstance(self.feature_bounds, str):
            remedy = (
                "give public bounds (low, high) of raw columns, or None for rows that need none, such as embeddings"
            )
            raise expected(function, "feature_bounds", "to be given", None, remedy)
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
        warn_of_bounds_of_another_size(function, extractor.get_buffer("low"), extractor.get_buffer("high"), rows)
        return features, extractor

    def _outputs(self, X: Any) -> torch.Tensor:  # noqa: N803
        """Return the outputs of the fitted head for rows of as many columns as in training."""
        check_is_fitted(self, "head_")
        return self.head_(_tensor(checked(self, X, reset=False)))


class _Classifier(ClassifierMixin):
    """The class weights and the predictions of both classifiers."""

    class_weight: Any
    classes_: Array
    _outputs: Callable[[Any], torch.Tensor]

    def _rates(self) -> Array | None:
        """Return the rate of each class, the largest one 1; None without class_weight."""
        function, given = type(self).__name__, self.class_weight
        if given is None:
            return None
        if not isinstance(given, Mapping):
            remedy = "give such as {0: 1, 1: 5}, from public numbers or release_histogram: the shares in y are private"
            raise expected(function, "class_weight", "to be a dict of weights", described(given), remedy)
        classes = self.classes_.tolist()
        weights = np.array([given.get(name, 1) for name in classes], dtype=float)
        if not given.keys() <= {*classes} or not (weights >= 0).all() or not 0 < weights.max() < np.inf:
            condition = f"to have classes among {classes}, and weights that are finite and >= 0, one of them above 0"
            raise expected(function, "class_weight", condition, described(dict(given)))
        return weights / weights.max()

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the likeliest class of each row, (n,). A table may be a list of rows by column name, too."""
        likely = self._outputs(X).argmax(1).numpy()
        return self.classes_[likely]

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
            5 if num_examples is below 10,000, or with 2 if it is also below 25 for each column. If that makes more
            codes than num_examples / 10, columns are moved to [-1, 1] in their place, and a constant is added
            (`features.Scaled`). Give bounds for raw columns, such as age and income. One pair for columns of very
            different size flattens the small ones. None: the rows of X are features that were prepared without the
            data, such as embeddings or one-hot codes, of at least 2 columns. Each row is divided by its norm, and there
            is no constant. There is no default: raw columns without bounds would give the most frequent class.
        class_weight: public weights by class, such as {"no": 1, "yes": 5}; a class without one has weight 1. Each
            example is drawn at the rate of its weight over the largest, which keeps epsilon (`ClassRates`). Not
            "balanced", which reads the private shares of the classes. Probabilities are those of the weighted classes.
        steps, expected_batch_size, max_grad_norm, noise_step, schedule: as in fit_head.
        budget: as in fit_head; it needs output_dir.
        output_dir: as in fit_head; a second `fit` with the same folder resumes, and does not train again. Without it, a
            second `fit` is a second release, with a warning.
        seed: a research seed, which voids the privacy guarantee. None for the operating system's entropy.
    Attributes:
        classes_: the classes, sorted.
        coef_: the weights of the columns, (1, width) for two classes, else (classes, width). With hat codes, width
            counts knots: those of the first column from its low to its high, then those of the next one.
        intercept_: the weight of the constant, (1,) or (classes,), or 0. Scores are as in scikit-learn, divided by the
            norm of the row of features.
        n_iter_: the number of steps.
        epsilon_: the cost of the last training, at `delta`.
        head_: the Head; `head_.save(folder)` writes it.
    Privacy:
        As fit_head. See the module for habits of scikit-learn that void it.
    """

    classes: Sequence[Any] | None = None
    class_weight: Mapping[Any, float] | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on rows X, (n, width), and their classes y, (n,).

        Args:
            X: finite numbers.
            y: the classes.
            sample_weight: from 0 to 1, (n,): each row is drawn at its weight times the plan's rate, which keeps epsilon
                (`ClassRates`). Each must follow from its own row and public numbers alone. Only their ratios count.
        Raises:
            PrivacyError: a public fact is missing, X has a value that is not finite or is text, a class of y is not
                among `classes`, X has one column and no feature_bounds, a weight is out of its range, or fit_head
                refuses; nothing was spent.
        """
        self._require("classes")
        rows, named = checked(self, X, y, ensure_min_samples=2)
        check_classification_targets(named)
        self.classes_ = np.unique(np.asarray(self.classes))
        known = np.isin(named, self.classes_)
        if not known.all():
            condition, got = f"to be among classes {self.classes_.tolist()}", described(named[~known].tolist()[0])
            raise expected("fit", "y", condition, got, "add it to classes if it is public, or leave its rows out")
        labels: Array = np.searchsorted(self.classes_, named).astype(np.int64)
        weights, rates = _weights_of(self, sample_weight, rows), self._rates()
        if rates is not None:
            weights = rates[labels] * (1 if weights is None else weights)
        self._fit_head(rows, labels, weights, classes=self.classes_.tolist())
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
        coef_, intercept_: as in PrivateLogisticRegression, (width,) and a number, in the unit of the labels.
        n_iter_, epsilon_, head_: as in PrivateLogisticRegression.
    Privacy:
        As PrivateLogisticRegression.
    """

    label_bounds: tuple[float, float] | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on rows X, (n, width), and their numbers y, (n,); `sample_weight` is as in PrivateLogisticRegression.

        Raises:
            PrivacyError: as in PrivateLogisticRegression; nothing was spent.
        """
        self._require("label_bounds")
        rows, numbers = checked(self, X, y, y_numeric=True, ensure_min_samples=2)
        self._fit_head(rows, numbers, _weights_of(self, sample_weight, rows), bounds=self.label_bounds)
        return self

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the number of each row, (n,), within label_bounds."""
        outputs = self._outputs(X)
        return self.head_.target.decoded(outputs).double().numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class _Tabular(_Private):
    """The declaration, the training and the outputs of both models of a table."""

    columns: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None
    interactions: Sequence[Sequence[str]] = ()
    unit: str | None = None
    max_rows: int | None = None
    hidden: int | None = None
    verbose: bool = True

    def _fit_table(self, X: Table, y: Any, rates: Array | None = None, **target: Any) -> None:  # noqa: N803
        """Train a head on the codes of X, and tell what was chosen."""
        function, unit = type(self).__name__, {"unit": self.unit, "max_rows": self.max_rows}
        declared = {"columns": self._declared(function), "interactions": self.interactions}
        cells, label = _by_name(function, X), f"{y if isinstance(y, str) else getattr(y, 'name', None) or _LABEL}"
        if not isinstance(y, str):
            if getattr(y, "ndim", 1) != 1 or not hasattr(y, "__len__"):
                got = described(y) if not hasattr(y, "shape") else f"shape {tuple(y.shape)}"
                raise expected(function, "y", "to be the labels, (n,), or the name of their column", got)
            cells |= {label: y}
        floats = {name: np.asarray(own) for name, own in cells.items() if getattr(own, "dtype", None) in (float, "f4")}
        warn_of_fitted_scale(function, {f"column {name}": own for name, own in floats.items() if name != label})
        data = table(cells, **declared, label=label, **unit, **target)
        assert data.schema is not None
        bounds, width = data.schema.bounds, width_of(data.schema)
        hidden, why = self.hidden, "as given"
        if hidden is None:
            # Not what a budget has left: that differs when a training resumes.
            total = self.target_epsilon or (0.0 if self.budget is None else self.budget.total_epsilon)
            hidden, why = table_hidden(self._count, total, of_numbers=bounds is not None)
        of_target = {"num_classes": data.num_classes} if bounds is None else {"bounds": bounds}
        source = "codes of the declared columns"
        options = {
            "counts": data.schema.counts,
            "classes": data.classes,
            "schema": data.schema,
            "source": source,
            "hidden": hidden,
        }
        codes, labels = data.train.tensors
        if rates is not None and labels.ndim > 1:
            raise expected(function, "class_weight", "to be None for persons, whose rows may differ in class", "a dict")
        weights = None if rates is None else rates[labels.numpy()]
        self._train(codes, labels, **of_target, **options, weights=weights)
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
        check_is_fitted(self, "head_")
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
        interactions: pairs of columns that act together, as in `data.table`.
        classes: the public classes, in any order. They are not taken from y.
        class_weight: as in PrivateLogisticRegression, for unit = "row".
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
        n_iter_, epsilon_: as in PrivateLogisticRegression.
        head_: the Head, which takes rows by column name; `head_.save(folder)` writes it, for `privgrad predict`.
    Privacy:
        As fit_head. See the module for habits of scikit-learn that void it.
    """

    classes: Sequence[Any] | None = None
    class_weight: Mapping[Any, float] | None = None

    def fit(self, X: Table, y: Any) -> Self:  # noqa: N803
        """Train on a table, a DataFrame or columns by name, and the classes of its rows: (n,), or the column's name.

        Raises:
            PrivacyError: the declaration is incomplete, a value does not fit it, or fit_head refuses; nothing was
                spent.
        """
        self._require("columns", "classes", "unit")
        self.classes_ = np.unique(np.asarray(self.classes))
        self._fit_table(X, y, self._rates(), classes=self.classes_.tolist())
        return self


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateTabularRegressor(RegressorMixin, _Tabular):
    """A bounded number from the columns of a table, with differential privacy: as PrivateTabularClassifier.

    Args:
        label_bounds: the public smallest and largest label, known without y. Labels outside of them count as the
            nearest one.
        counts: whether labels are counts, with label_bounds from 0: the loss is then that of Poisson regression, and
            predictions are rates.
        columns, interactions, unit, max_rows, hidden, verbose, target_epsilon, delta, num_examples, steps,
            expected_batch_size, max_grad_norm, noise_step, schedule, budget, output_dir, seed: as in
            PrivateTabularClassifier.
    Attributes:
        choices_, n_iter_, epsilon_, head_: as in PrivateTabularClassifier.
    Privacy:
        As PrivateTabularClassifier.
    """

    label_bounds: tuple[float, float] | None = None
    counts: bool = False

    def fit(self, X: Table, y: Any) -> Self:  # noqa: N803
        """Train on a table and the numbers of its rows: (n,), or the column's name.

        Raises:
            PrivacyError: as in PrivateTabularClassifier; nothing was spent.
        """
        self._require("columns", "label_bounds", "unit")
        self._fit_table(X, y, bounds=self.label_bounds, counts=self.counts)
        return self

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the number of each row, or the rate of its count, (n,), within label_bounds."""
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


def _weights_of(estimator: Any, sample_weight: Any, rows: Array) -> Array | None:
    """Return the weights of rows; raise PrivacyError unless they are from 0 to 1."""
    if sample_weight is None:
        return None
    weights: Array = _check_sample_weight(sample_weight, rows, dtype=np.float64)
    if not ((weights >= 0) & (weights <= 1)).all():
        got, remedy = "a weight outside", "divide them by the largest that a row can have, a public number"
        raise expected(type(estimator).__name__, "sample_weight", "to be from 0 to 1", got, remedy)
    return weights


def _tensor(rows: Array) -> torch.Tensor:
    return torch.from_numpy(np.require(rows, np.float32, ["C", "W"]))  # torch warns of arrays that cannot be written
