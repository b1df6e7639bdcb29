"""PrivateGridSearchCV: choose among settings within one epsilon."""

# scikit-learn has no types.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone, is_classifier
from sklearn.model_selection import ParameterGrid
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from privgrad.accounting.accountant import calibrate_noise_multiplier, rounded_up
from privgrad.accounting.accountant import epsilon as epsilon_of
from privgrad.accounting.mechanisms import Release
from privgrad.errors import described, expected
from privgrad.ledger.budget import Budget
from privgrad.releases import release_mean

_TRIALS, _SCORES = 0.1, 0.05  # of the squared inverse noise of the total; the rest is for the final training
_OWN = ("target_epsilon", "delta", "num_examples", "budget", "output_dir", "seed")  # what the search decides
_SEARCHES: dict[Path, Budget] = {}  # of this process, by folder
Values = Callable[[Any, Any, Any], Any]


def _last(model: Any) -> Any:
    """Return an estimator, or that at the end of a pipeline."""
    return model[-1] if isinstance(model, Pipeline) else model


# Fault: a second search, in another folder: each states its own total alone.
# Cost: the budgets of earlier searches are read. Warns wrongly: equally many other people; it sees one process only.
def _warn_of_searches(function: str, folder: Path, budget: Budget) -> None:
    """Warn of what this search and earlier ones on as many rows or persons may spend together."""
    facts = (budget.num_examples, budget.privacy_unit)
    before = [
        one for place, one in _SEARCHES.items() if place != folder and (one.num_examples, one.privacy_unit) == facts
    ]
    _SEARCHES[folder] = budget
    if totals := [one.total_epsilon for one in before if one.path.exists() and one.commitments]:
        total, count = rounded_up(math.fsum([*totals, budget.total_epsilon]), 4), len(totals) + 1
        warnings.warn(
            f"{function}: {count} searches on {budget.num_examples:,} examples in this process. If they are of the "
            f"same people, they may spend epsilon {total} at delta {rounded_up(count * budget.delta)} together",
            stacklevel=3,
        )


def _delegated(name: str) -> Any:
    """Return a method of the best estimator, which the search has if the estimator has it."""

    def call(self: Any, X: Any) -> Any:  # noqa: N803
        check_is_fitted(self, "best_estimator_")
        return getattr(self.best_estimator_, name)(X)

    def has(self: Any) -> bool:
        return hasattr(self.estimator, name)

    call.__name__, call.__doc__ = name, f"Return `best_estimator_.{name}(X)`."
    return available_if(has)(call)


@dataclass(eq=False, repr=False)
class PrivateGridSearchCV(MetaEstimatorMixin, BaseEstimator):
    """The best of a few settings of an estimator, all trainings and scores within one epsilon.

    Computes: one training of each candidate with much noise, and its score on the rows of the training with noise; then
        one training of the best candidate with all that is left. The trainings before the last one have a tenth of the
        total together, in squared inverse noise, and the scores a twentieth. There are no folds: each would be one more
        training, and a model with differential privacy can hardly fit its rows by heart.

    Args:
        estimator: one of this module, or a Pipeline that ends in one. The search replaces its target_epsilon, delta,
            num_examples, budget and output_dir.
        param_grid: as in GridSearchCV, of few candidates: more of them have more noise each.
        total_epsilon: > 0, of all together.
        delta: in (0, 1), at most 1 / num_examples.
        num_examples: the public number of rows, or of persons.
        output_dir: the folder of the budget, budget.jsonl, and of all trainings. The same call resumes there, and
            spends nothing twice. Other data need another folder.
        scoring: None: for classes 1 minus half the squared error of the probabilities (Brier), which counts calibration
            too; for numbers 1 minus the error as a share of label_bounds. Or a function (estimator, X, y) -> one value
            for each row, which follows from that row alone and is cut to [0, 1].
    Attributes:
        best_estimator_, best_params_, best_index_: of the candidate with the best score. The estimator is refitted.
        best_score_, cv_results_: noisy scores, "mean_test_score", of the trainings with much noise, and "params".
        epsilon_: the total.
        budget_: the Budget: `privgrad statement budget.jsonl`, or `budget_statement(budget_)`, says what is promised.
    Privacy:
        Everything is committed to one Budget, so all of it together has the total epsilon. Transformers in a Pipeline
        must learn nothing from the rows.
    Reference:
        Panda et al. 2022 (arXiv 2212.04486), on trials with much noise. docs/choosing-evidence.md measures them.
    """

    estimator: Any = None
    param_grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]] | None = None
    _: KW_ONLY
    total_epsilon: float | None = None
    delta: float | None = None
    num_examples: int | None = None
    output_dir: str | os.PathLike[str] | None = None
    scoring: Values | None = None

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Choose, and train the best candidate on all rows.

        Raises:
            PrivacyError: an argument is missing, or decides the privacy of a candidate; an estimator refuses;
                or output_dir holds a search among other candidates, of another estimator, or on other columns.
            BudgetExceededError: the folder's budget has too little left.
        """
        function = "PrivateGridSearchCV"
        given = self.get_params(deep=False)
        if missing := [name for name, value in given.items() if value is None and name != "scoring"]:
            raise expected(function, ", ".join(missing), "to be given", None)
        if not hasattr(_last(self.estimator), "budget"):
            remedy = "give one of privgrad.estimators, or a Pipeline that ends in one"
            raise expected(function, "estimator", "to be private", type(_last(self.estimator)).__name__, remedy)
        if self.scoring is not None and not callable(self.scoring):
            remedy = "leave it out, or give a function (estimator, X, y) that returns one value for each row"
            raise expected(function, "scoring", "to be a mean over rows", described(self.scoring), remedy)
        prefix = f"{self.estimator.steps[-1][0]}__" if isinstance(self.estimator, Pipeline) else ""
        candidates: list[dict[str, Any]] = list(ParameterGrid(self.param_grid))
        own = {f"{prefix}{name}" for name in _OWN}
        if taken := {name for one in candidates for name in one} & own:
            raise expected(function, "param_grid", "to leave alone what decides epsilon", sorted(taken))
        unit = getattr(_last(self.estimator), "unit", "row")
        facts: dict[str, Any] = {
            "num_examples": self.num_examples,
            "privacy_unit": "example" if unit == "row" else "user",
        }
        folder, total = Path(given["output_dir"]), given["total_epsilon"]
        folder.mkdir(parents=True, exist_ok=True)
        budget = Budget(folder / "budget.jsonl", total_epsilon=total, delta=self.delta, **facts)
        if budget.commitments:
            warnings.warn(
                f"{function}: {folder} holds a search. Its finished trainings are returned, and the given rows are "
                "not used for them: give another folder to search on other rows",
                stacklevel=2,
            )

        def trained(name: str, settings: Mapping[str, Any], epsilon: float | None) -> Any:
            shared = {"target_epsilon": epsilon, "delta": None, "num_examples": None, "budget": budget}
            place = {f"{prefix}{key}": value for key, value in (shared | {"output_dir": folder / name}).items()}
            model: Any = clone(self.estimator)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fit_head: .* holds a finished training")
                return model.set_params(**settings).set_params(**place).fit(X, y)

        names = [hashlib.sha256(repr(sorted(one.items())).encode()).hexdigest()[:12] for one in candidates]
        # Whatever makes another model: settings and columns. The addresses of functions differ between processes.
        settings_of = {name: repr(value) for name, value in self.estimator.get_params().items()}
        columns = list(getattr(X, "columns", [np.shape(X)[1:]]))
        held = re.sub(r" at 0x\w+", "", f"{sorted(names)}\n{settings_of}\n{columns}")
        place = folder / "search.txt"
        if budget.commitments and place.exists() and place.read_text() != held:
            condition = f"to be those of the search in {folder}"
            remedy = "give another output_dir, which spends another total_epsilon"
            raise expected(function, "estimator, param_grid and columns", condition, f"{candidates}"[:100], remedy)
        place.write_text(held)
        _warn_of_searches(function, folder.absolute(), budget)
        scores = list[float]()
        # The noise of a single release of the total, times what leaves each release its share.
        sigma = calibrate_noise_multiplier(target_epsilon=total, delta=budget.delta, sample_rate=1.0, steps=1)
        of_trial, of_score = (sigma * math.sqrt(len(candidates) / share) for share in (_TRIALS, _SCORES))
        trial = epsilon_of([Release(of_trial, 1.0)], delta=budget.delta)
        for name, settings in zip(names, candidates, strict=True) if len(candidates) > 1 else ():
            values = self._values(trained(f"candidate-{name}", settings, trial), X, y, unit)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "release_mean: .* was released before")
                score = release_mean(
                    values, bound=1.0, noise_multiplier=of_score, budget=budget, name=f"score-{name}", **facts
                )
            scores.append(float(score))
        scores = scores or [math.nan]  # a single candidate needs none
        self.best_index_ = int(np.argmax(scores))
        self.best_params_, self.best_score_ = candidates[self.best_index_], scores[self.best_index_]
        self.cv_results_ = {"params": candidates, "mean_test_score": np.array(scores)}
        self.budget_, self.epsilon_ = budget, budget.total_epsilon
        self.best_estimator_ = trained("best", self.best_params_, None)
        return self

    def _values(self, model: Any, X: Any, y: Any, unit: str) -> Any:  # noqa: N803
        """Return one value in [0, 1] for each row, or the mean over the rows of each person."""
        labels = np.asarray(X[y] if isinstance(y, str) else y)
        if self.scoring is not None:
            values = self.scoring(model, X, y)
        elif is_classifier(model):
            errors = model.predict_proba(X) - (labels[:, None] == model.classes_)
            values = 1 - np.square(errors).sum(1) / 2
        else:
            target = _last(model).head_.target
            values = 1 - np.abs(np.clip(labels, target.low, target.high) - model.predict(X)) / (2 * target.half)
        values = np.clip(np.asarray(values, dtype=float), 0, 1)
        if unit == "row":
            return values
        people = np.unique(np.asarray(X[unit]), return_inverse=True)[1]
        return np.bincount(people, values) / np.bincount(people)

    @property
    def classes_(self) -> Any:
        """The classes of the best estimator."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.classes_

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return `best_estimator_.score(X, y)`, without noise: of people whom no epsilon here covers."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.score(X, y)

    predict = _delegated("predict")
    predict_proba = _delegated("predict_proba")
    decision_function = _delegated("decision_function")

    def __sklearn_tags__(self) -> Any:
        tags, own = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.estimator_type, tags.classifier_tags, tags.regressor_tags = (
            own.estimator_type,
            own.classifier_tags,
            own.regressor_tags,
        )
        return tags
