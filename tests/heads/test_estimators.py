"""The estimators under scikit-learn's own checks, and what they refuse."""

import pickle
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import privgrad as pg

sklearn = pytest.importorskip("sklearn", minversion="1.6")  # with expected_failed_checks

from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from privgrad.features import Scaled, Splines  # noqa: E402
from privgrad.heads.sklearn import PrivateLinearRegression, PrivateLogisticRegression  # noqa: E402

FACTS: dict[str, Any] = {"target_epsilon": 10.0, "delta": 1e-3, "num_examples": 10, "feature_bounds": (-10, 10)}
CLASSIFIER = PrivateLogisticRegression(classes=[0, 1, 2], steps=30, **FACTS)
REGRESSOR = PrivateLinearRegression(label_bounds=(-4, 4), steps=30, **FACTS)

_NOISE = "two trainings have different noise"
OF_NOISE = {
    "check_fit_idempotent": _NOISE,
    "check_supervised_y_2d": _NOISE,
    "check_regressors_int": _NOISE,
    "check_regressor_data_not_an_array": _NOISE,
    "check_classifier_data_not_an_array": _NOISE,
}
_CLASSES = "classes are a public argument, and the check has other ones in y"
OF_CLASSES = {
    "check_dtype_object": _CLASSES,
    "check_classifiers_classes": _CLASSES,
    "check_classifiers_train": _CLASSES,
    "check_decision_proba_consistency": _CLASSES,
}


def failed(estimator: Any, expected: dict[str, str]) -> dict[str, Any]:
    """The checks that fail without being expected to, with what they raised."""
    found = check_estimator(estimator, expected_failed_checks=expected, on_fail=None, on_skip=None)
    assert len(found) > 50
    return {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*this object was fitted before")
@pytest.mark.parametrize("estimator", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_scikit_learns_checks(estimator: Any):
    assert failed(estimator, OF_NOISE | OF_CLASSES) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*this object was fitted before")
@pytest.mark.parametrize("estimator", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_the_checks_of_equal_trainings_pass_under_a_research_seed(estimator: Any):
    seeded = type(estimator)(**estimator.get_params() | {"seed": 0})
    assert failed(seeded, OF_CLASSES) == {}


def people(count: int = 400) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ages and incomes, and who votes: the old and the rich."""
    random = np.random.default_rng(0)
    rows = np.stack([random.uniform(18, 90, count), random.uniform(0, 200_000, count)], axis=1)
    return rows, np.where(rows[:, 0] / 72 + rows[:, 1] / 200_000 > 1.25, "yes", "no")


BOUNDS = ([18, 0], [90, 200_000])


def test_classes_by_name_in_a_pipeline_and_saved(tmp_path: Path):
    rows, votes = people()
    model = PrivateLogisticRegression(
        classes=["yes", "no"], target_epsilon=5.0, delta=1e-3, num_examples=400, feature_bounds=BOUNDS, steps=100
    )
    fitted = make_pipeline(FunctionTransformer(), model).fit(rows, votes)
    assert fitted.score(rows, votes) > 0.85
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.head_.epsilon <= 5.0
    likely = model.predict_proba(rows)[:, 1] > 0.5
    assert np.array_equal(np.where(likely, "yes", "no"), model.predict(rows))
    assert np.array_equal(model.decision_function(rows) > 0, likely)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(rows), model.predict(rows))
    model.head_.save(tmp_path)  # with its bounds and classes
    loaded = pg.Head.load(tmp_path)
    assert loaded.classes is not None
    found = [loaded.classes[k] for k in loaded.predict(rows.astype(np.float32)).tolist()]
    assert found == model.predict(rows).tolist()


def test_numbers_within_public_bounds():
    rows, _ = people()
    income = rows[:, 0] * 1000 + 500 * np.random.default_rng(1).normal(size=len(rows))
    model = PrivateLinearRegression(
        label_bounds=(0, 100_000), target_epsilon=5.0, delta=1e-3, num_examples=400, feature_bounds=BOUNDS, steps=200
    ).fit(rows, income)
    assert model.score(rows, income) > 0.9
    assert model.predict(100 * rows).min() >= 0
    assert model.predict(100 * rows).max() <= 100_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ["yes"]}, r"y to be among classes \['yes'\], got 'no', a str"),
        ({"classes": ["yes", "perhaps"]}, r"y to be among classes \['perhaps', 'yes'\], got 'no', a str"),
        ({"target_epsilon": None}, "target_epsilon to be given, got None"),
        ({"num_examples": None}, "num_examples to be given, got None"),
        ({"feature_bounds": ([18, 0, 0], [90, 1, 1])}, r"rows to have shape \(n, 3\)"),
        ({"feature_bounds": (1, 0)}, "low and high to be finite, and low < high"),
    ],
)
def test_refused(changes: Any, message: str):
    rows, votes = people()
    facts: dict[str, Any] = {
        "classes": ["yes", "no"],
        "target_epsilon": 5.0,
        "delta": 1e-3,
        "num_examples": 400,
    } | changes
    for given in (votes, votes.astype(object)):
        with pytest.raises(pg.PrivacyError, match=message):
            PrivateLogisticRegression(**facts).fit(rows, given)


@pytest.mark.parametrize("bounds", [[(-5, 5)] * 20, ([18, 0, 0], [90, 1]), 90])
def test_bounds_that_are_no_pair_raise_at_once(bounds: Any):
    rows, votes = people()
    facts: dict[str, Any] = {"classes": ["yes", "no"], "target_epsilon": 5.0, "delta": 1e-3, "num_examples": 400}
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        PrivateLogisticRegression(**facts, feature_bounds=bounds).fit(rows, votes)


def test_missing_values_and_texts_are_refused_without_a_value_or_private_advice():
    pd = pytest.importorskip("pandas")
    rows, votes = people()
    facts: dict[str, Any] = {"target_epsilon": 5.0, "delta": 1e-3, "num_examples": 400, "steps": 2}
    classifier = PrivateLogisticRegression(classes=["yes", "no"], feature_bounds=BOUNDS, **facts)
    gaps = rows.copy()
    gaps[7, 1] = np.nan
    named, jobs = pd.DataFrame(gaps, columns=["age", "income"]), np.array(["clerk"] * 400)
    is_public = "fill in a public constant, or declare the column in privgrad.data.table, where missing = 'category'"
    cases = [
        (gaps, f"X to be finite, got NaN or inf in column 1; {is_public}"),
        (named, f"X to be finite, got NaN or inf in column 'income'; {is_public}"),
        (named.assign(age=jobs), "X to be numbers, got text in column 'age'; give numbers by a public code"),
        (named.assign(income=pd.Categorical(jobs)), "X to be numbers, got text in column 'income'; give numbers"),
        (named.assign(age=jobs).to_numpy(), "X to be numbers, got text in column 0"),
        (np.stack([jobs, jobs], axis=1), "X to be numbers, got text in column 0"),
        (named.assign(age=pd.Timestamp("2026-01-31")), "X to be numbers, got a date or an object in column 'age'"),
        (pd.DataFrame({"in": [pd.Timestamp("2026-01-31")] * 400}), "X to be numbers, got a date or an object"),
    ]
    fitted = PrivateLogisticRegression(classes=["yes", "no"], feature_bounds=BOUNDS, **facts).fit(rows, votes)
    for given, message in cases:
        calls: list[Any] = [partial(classifier.fit, given, votes)]
        calls += [partial(fitted.predict, given)] if isinstance(given, np.ndarray) else []
        for call in calls:
            with pytest.raises(pg.PrivacyError, match=message) as caught:
                call()
            assert "clerk" not in "".join(traceback.format_exception(caught.value))
    regression = PrivateLinearRegression(label_bounds=(0, 1), feature_bounds=BOUNDS, **facts)
    with pytest.raises(pg.PrivacyError, match="y to be numbers, got text") as caught:
        regression.fit(rows, jobs)
    assert "clerk" not in "".join(traceback.format_exception(caught.value))


def test_a_single_raw_column_needs_bounds():
    ages = people()[0][:, :1]
    facts: dict[str, Any] = {"classes": [0, 1], "target_epsilon": 50.0, "delta": 1e-3, "num_examples": 400}
    with pytest.raises(pg.PrivacyError, match="feature_bounds to be given for a single column, got None; give public"):
        PrivateLogisticRegression(**facts).fit(ages, (ages[:, 0] > 50).astype(int))
    bounded = PrivateLogisticRegression(**facts, feature_bounds=(18, 90)).fit(ages, (ages[:, 0] > 50).astype(int))
    assert bounded.score(ages, ages[:, 0] > 50) > 0.95


def test_bounds_that_are_the_smallest_or_largest_values_are_named(tmp_path: Path):
    rows, votes = people()
    income = rows[:, 0] * 1000 + 0.4321
    facts: dict[str, Any] = {"target_epsilon": 5.0, "delta": 1e-3, "num_examples": 400, "steps": 2}
    lows, highs = rows.min(0), rows.max(0)
    for bounds, ends in (((lows, BOUNDS[1]), "lows"), ((BOUNDS[0], highs), "highs"), ((0, highs.max()), "highs")):
        classifier = PrivateLogisticRegression(classes=["yes", "no"], feature_bounds=bounds, **facts)
        with pytest.warns(UserWarning, match=f"the {ends} of feature_bounds: this is the .*est value of"):
            classifier.fit(rows, votes)
    for bounds, end in (((income.min(), 1e5), "low"), ((0, income.max()), "high")):
        regression = PrivateLinearRegression(label_bounds=bounds, feature_bounds=BOUNDS, **facts)
        with pytest.warns(UserWarning, match=f"fit_head: the {end} of bounds: this is the") as caught:
            regression.fit(rows, income)
        assert not any(".4321" in str(one.message) for one in caught)
    regression = PrivateLinearRegression(label_bounds=(0, 95_000), feature_bounds=([10, 0], [99, 250_000]), **facts)
    assert "bounds as declared by the user" in regression.fit(rows, income).head_.privacy["side_information"]


def test_a_second_training_of_an_object_is_counted_or_warned_of(tmp_path: Path):
    rows, votes = people()
    facts: dict[str, Any] = {"classes": ["yes", "no"], "delta": 1e-3, "num_examples": 400, "steps": 2}
    model = PrivateLogisticRegression(target_epsilon=1.0, **facts).fit(rows, votes)
    with pytest.warns(UserWarning, match="this object was fitted before. Both trainings are releases"):
        model.fit(rows, votes)
    resumed = PrivateLogisticRegression(target_epsilon=1.0, output_dir=tmp_path / "one", **facts).fit(rows, votes)
    weight = resumed.head_.model.linear.weight
    with pytest.warns(UserWarning, match="holds a finished training. Its head is returned"):
        assert resumed.fit(rows, votes).head_.model.linear.weight.equal(weight)
    budget = pg.Budget(
        tmp_path / "budget.jsonl", total_epsilon=2.0, delta=1e-3, num_examples=400, privacy_unit="example"
    )
    counted = PrivateLogisticRegression(target_epsilon=0.5, budget=budget, output_dir=tmp_path / "two", **facts)
    counted.fit(rows, votes).set_params(output_dir=tmp_path / "three").fit(rows, votes)
    assert len(budget.commitments) == 2


def test_nothing_that_decides_privacy_has_a_default():
    for kind, name in ((PrivateLogisticRegression, "classes"), (PrivateLinearRegression, "label_bounds")):
        for missing in (name, "target_epsilon", "delta", "num_examples"):
            facts: dict[str, Any] = {name: (0, 1), "target_epsilon": 1.0, "delta": 1e-3, "num_examples": 10}
            del facts[missing]
            make: Any = kind
            with pytest.raises(TypeError, match=f"'{missing}'"):
                make(**facts)


def test_columns_become_hat_codes_where_the_rows_are_many_enough():
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (400, 2))
    facts: dict[str, Any] = {"target_epsilon": 50.0, "delta": 1e-3, "feature_bounds": (-1, 1), "steps": 40}
    # No line tells the middle from both ends.
    classes = (np.abs(rows[:, 0]) > 0.5).astype(int)
    for count, kind, least in ((400, Splines, 0.85), (99, Scaled, 0.0)):
        model = PrivateLogisticRegression(classes=[0, 1], num_examples=count, **facts).fit(rows, classes)
        assert type(model.head_.extractor) is kind
        assert model.score(rows, classes) > least
        assert model.head_.privacy["side_information"].startswith("features: bounds as declared")
