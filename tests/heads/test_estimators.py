"""The estimators under scikit-learn's own checks, and what they refuse."""

import pickle
import re
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privgrad as pg

sklearn = pytest.importorskip("sklearn", minversion="1.6")  # with expected_failed_checks

from sklearn import base  # noqa: E402
from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, OneHotEncoder, PowerTransformer, StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator, check_parameters_default_constructible  # noqa: E402

from privgrad.accounting.accountant import epsilon  # noqa: E402
from privgrad.estimators import (  # noqa: E402
    PrivateGridSearchCV,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateTabularClassifier,
    PrivateTabularRegressor,
    PublicBins,
    PublicScaler,
)
from privgrad.features import Scaled, Splines  # noqa: E402
from privgrad.heads import sklearn as module  # noqa: E402
from privgrad.statement import budget_statement  # noqa: E402

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
_WEIGHTS = "weights are from 0 to 1, and the check has larger ones"
OF_WEIGHTS = {
    "check_sample_weights_pandas_series": _WEIGHTS,
    "check_sample_weights_not_an_array": _WEIGHTS,
    "check_sample_weights_list": _WEIGHTS,
    "check_sample_weights_not_overwritten": _WEIGHTS,
    "check_sample_weight_equivalence_on_dense_data": _WEIGHTS,
    "check_classifiers_one_label_sample_weights": "a class is not left out for the weights of its rows",
    "check_all_zero_sample_weights_error": "whether all weights are 0 is private: such a training draws no row",
    "check_class_weight_classifiers": "the check has class_weight = 'balanced', which reads private shares",
    "check_class_weight_balanced_classifiers": "the check has class_weight = 'balanced', which reads private shares",
}


clone: Any = base.clone  # scikit-learn has no types


def test_the_page_lists_the_checks_that_fail():
    page = (Path(__file__).parents[2] / "docs/api/heads.md").read_text()
    expected = {*OF_NOISE, *OF_CLASSES, *OF_WEIGHTS}
    assert set(re.findall(r"`(check_\w+)`", page)) - {"check_estimator"} == expected


def failed(estimator: Any, expected: dict[str, str]) -> dict[str, Any]:
    """The checks that fail without being expected to, with what they raised."""
    found = check_estimator(estimator, expected_failed_checks=expected, on_fail=None, on_skip=None)
    assert len(found) > 40
    return {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:NOT PRIVATE.* on these very rows")  # some checks standardize them
@pytest.mark.parametrize("estimator", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_scikit_learns_checks(estimator: Any):
    assert failed(estimator, OF_NOISE | OF_CLASSES | OF_WEIGHTS) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:NOT PRIVATE.* on these very rows")  # some checks standardize them
@pytest.mark.parametrize("estimator", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_the_checks_of_equal_trainings_pass_under_a_research_seed(estimator: Any):
    seeded = type(estimator)(**estimator.get_params() | {"seed": 0})
    assert failed(seeded, OF_CLASSES | OF_WEIGHTS) == {}


@pytest.mark.filterwarnings("ignore:NOT PRIVATE.* lie mostly outside")
@pytest.mark.filterwarnings("ignore:NOT PRIVATE.* on these very rows")  # some checks standardize them
@pytest.mark.parametrize("transformer", [PublicScaler((-10, 10)), PublicBins((-1, 0, 1))], ids=["scaler", "bins"])
def test_scikit_learns_checks_of_transformers(transformer: Any):
    assert failed(transformer, {}) == {}


@pytest.mark.parametrize("name", module.__all__)
def test_each_is_made_without_arguments_and_asks_for_them_at_fit(name: str):
    kind = getattr(module, name)
    if name == "PrivateGridSearchCV":
        kind()
    else:
        check_parameters_default_constructible(name, kind())
    rows = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(pg.PrivacyError, match=f"{name.removeprefix('Public')}: expected .* to be "):
        clone(kind()).fit(rows, rows[:, 0] > 0)


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
        ({}, r"feature_bounds to be given, got None; give public bounds .*, or None for rows that need none"),
        ({"class_weight": "balanced"}, "class_weight to be a dict of weights, got 'balanced'"),
        ({"class_weight": {"maybe": 2}}, r"class_weight to have classes among \['no', 'yes'\]"),
        ({"class_weight": {"yes": -1}}, "class_weight to have classes .* weights that are finite and >= 0"),
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
    facts: dict[str, Any] = {"classes": ["yes", "no"], "target_epsilon": 5.0, "delta": 1e-3, "num_examples": 400}
    if changes and "feature_bounds" not in changes:
        facts["feature_bounds"] = BOUNDS
    facts |= changes
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
    is_public = r"fill in a public constant, by SimpleImputer\(strategy='constant', fill_value=0\) after PublicScaler"
    cases = [
        (gaps, f"X to be finite, got NaN or inf in column 1; {is_public}"),
        (named, f"X to be finite, got NaN or inf in column 'income'; {is_public}"),
        (named.assign(age=jobs), "X to be numbers, got text in column 'age'; code the column by OneHotEncoder"),
        (named.assign(income=pd.Categorical(jobs)), "X to be numbers, got text in column 'income'; code the"),
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
        PrivateLogisticRegression(**facts, feature_bounds=None).fit(ages, (ages[:, 0] > 50).astype(int))
    bounded = PrivateLogisticRegression(**facts, feature_bounds=(18, 90)).fit(ages, (ages[:, 0] > 50).astype(int))
    assert bounded.score(ages, ages[:, 0] > 50) > 0.95


@pytest.mark.filterwarnings("ignore:NOT PRIVATE.* lie mostly outside")
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


def test_trainings_without_a_budget_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_UNCOUNTED", {})
    rows, votes = people()
    facts: dict[str, Any] = {"classes": ["yes", "no"], "delta": 1e-3, "num_examples": 400, "steps": 2}
    facts |= {"feature_bounds": BOUNDS}
    model = PrivateLogisticRegression(target_epsilon=1.0, **facts).fit(rows, votes)
    with pytest.warns(UserWarning, match="PrivateLogisticRegression.fit: 2 trainings on 400 examples") as caught:
        other = clone(model).fit(rows, votes)
    fits: list[Any] = [model, other]
    releases = [one for fitted in fits for one in fitted.head_.result.ledger.charged]
    total = epsilon(releases, delta=1e-3, accountant="rdp")
    told = float(f"{caught[0].message}".split("add up to epsilon ")[1].split()[0])
    assert total <= told <= 1.001 * total
    assert total > 1.2 * other.epsilon_
    with pytest.warns(UserWarning, match="PrivateLogisticRegression.fit: [345] trainings on 400 examples") as caught:
        cross_val_score(model, rows, votes, cv=3)
    assert len(caught) == 3
    with pytest.warns(UserWarning, match="trainings on 400 examples") as caught:
        GridSearchCV(model, {"noise_step": [0.1, 0.2]}, cv=2).fit(rows, votes)
    assert len(caught) == 5
    assert "10 trainings" not in f"{caught[3].message}"
    assert "10 trainings" in f"{caught[4].message}"
    # Trainings on another number of people, with a research seed, in a budget, or resumed.
    clone(model).set_params(num_examples=401).fit(rows, votes)
    budget = pg.Budget(
        tmp_path / "budget.jsonl", total_epsilon=2.0, delta=1e-3, num_examples=400, privacy_unit="example"
    )
    counted = PrivateLogisticRegression(target_epsilon=0.5, budget=budget, output_dir=tmp_path / "two", **facts)
    counted.fit(rows, votes).set_params(output_dir=tmp_path / "three").fit(rows, votes)
    assert len(budget.commitments) == 2
    clone(model).set_params(seed=0).fit(rows, votes)
    monkeypatch.setattr(module, "_UNCOUNTED", {})
    resumed = PrivateLogisticRegression(target_epsilon=1.0, output_dir=tmp_path / "one", **facts).fit(rows, votes)
    weight = resumed.head_.model.linear.weight
    with pytest.warns(UserWarning, match="holds a finished training. Its head is returned"):
        assert resumed.fit(rows, votes).head_.model.linear.weight.equal(weight)


def as_pandas_scales(rows: Any) -> Any:
    return (rows - rows.mean(0)) / rows.std(0, ddof=1)


@pytest.mark.filterwarnings("ignore:NOT PRIVATE.* lie mostly outside")
@pytest.mark.parametrize(
    "scaler",
    [StandardScaler(), MinMaxScaler(), PowerTransformer(), PCA(2), FunctionTransformer(as_pandas_scales)],
    ids=lambda scaler: type(scaler).__name__,
)
def test_scales_of_the_very_rows_are_noticed(scaler: Any):
    rows, votes = people()
    facts: dict[str, Any] = {"target_epsilon": 1.0, "delta": 1e-3, "num_examples": 400, "steps": 1}
    facts |= {"feature_bounds": (-3, 3)}
    is_noticed = "column 0, column 1: mean 0 and deviation 1, or ends exactly 0 and 1, on these very rows"
    classifier = PrivateLogisticRegression(classes=["yes", "no"], **facts)
    with pytest.warns(UserWarning, match=f"NOT PRIVATE: PrivateLogisticRegression: {is_noticed}"):
        make_pipeline(scaler, classifier).fit(rows, votes)
    regression = PrivateLinearRegression(label_bounds=(18, 90), **facts)
    with pytest.warns(UserWarning, match=f"NOT PRIVATE: PrivateLinearRegression: {is_noticed}"):
        make_pipeline(scaler, regression).fit(rows, rows[:, 0])
    others = clone(scaler).fit(rows[:200])  # public rows, say; the last scaler has no constants
    if not isinstance(scaler, FunctionTransformer):
        make_pipeline(FunctionTransformer(others.transform), classifier).fit(rows[200:], votes[200:])


@pytest.mark.filterwarnings("ignore:NOT PRIVATE.* lie mostly outside")
def test_public_scales_codes_and_raw_columns_are_not_taken_for_scaled_ones():
    pd = pytest.importorskip("pandas")
    rows, votes = people()
    rows = np.stack([*rows.T, np.arange(400) % 2, np.arange(400) % 3 / 2], axis=1)  # two codes with ends 0 and 1
    facts: dict[str, Any] = {"classes": ["yes", "no"], "target_epsilon": 1.0, "delta": 1e-3, "num_examples": 400}
    model = PrivateLogisticRegression(**facts, feature_bounds=(-1, 1), steps=1)
    model.fit(rows, votes)
    make_pipeline(PublicScaler(([18, 0, 0, 0], [90, 200_000, 1, 1])), model).fit(rows, votes)
    make_pipeline(PublicBins([-1, 0.5, 50, 100_000]), model).fit(rows, votes)
    columns = {"age": {"kind": "number", "range": [-4, 4]}}
    table = PrivateTabularClassifier(columns=columns, unit="row", verbose=False, steps=1, **facts)
    with pytest.warns(UserWarning, match="NOT PRIVATE: PrivateTabularClassifier: column age: mean 0 and deviation 1"):
        table.fit(pd.DataFrame({"age": as_pandas_scales(rows[:, 0])}), votes)


def test_columns_of_public_codes_in_a_pipeline_with_names():
    pd = pytest.importorskip("pandas")
    rows, votes = people()
    frame = pd.DataFrame(rows, columns=["age", "income"]).assign(job=["clerk", "nurse"] * 200)
    jobs: Any = [["clerk", "nurse", "pilot"]]
    numbers = PublicBins([[18, 30, 45, 60, 90], np.linspace(0, 200_000, 9)])
    codes = ColumnTransformer(
        [("numbers", numbers, ["age", "income"]), ("job", OneHotEncoder(categories=jobs, sparse_output=False), ["job"])]
    )
    facts: dict[str, Any] = {"classes": ["yes", "no"], "target_epsilon": 20.0, "delta": 1e-3, "num_examples": 400}
    fitted: Any = make_pipeline(codes, PrivateLogisticRegression(**facts, feature_bounds=None)).fit(frame, votes)
    assert fitted.score(frame, votes) > 0.8
    names = fitted[:-1].get_feature_names_out().tolist()
    assert len(names) == 15
    assert names[0] == "numbers__age_18_30"
    weights = dict(zip(names, fitted[-1].coef_[0].tolist(), strict=True))
    assert weights["numbers__age_60_90"] > weights["numbers__age_18_30"]


def test_bounds_and_edges_that_do_not_fit_are_refused_and_extremes_are_told():
    rows, _ = people()
    for bounds in (None, 3, (0, 0), ([0, 0, 0], [1, 1, 1]), (0, np.inf), ("a", "b"), (0, 1, 2)):
        with pytest.raises(pg.PrivacyError, match=r"PublicScaler: expected bounds to be public \(low, high\)"):
            PublicScaler(bounds).fit(rows)  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match="PublicScaler: the highs of bounds: this is the largest value of a column"):
        PublicScaler((0, rows.max(0))).fit(rows)
    moved = PublicScaler(BOUNDS).fit(rows).transform([[18, 300_000], [54, 100_000]])
    assert moved.tolist() == [[-1, 1], [0, 0]]
    for edges, message in (
        (None, "edges to be at least three"),
        ([0, 1], "edges to be at least three"),
        ([[0, 1, 2]] * 3, "edges to be one list, or 2, one per column, got 3 lists"),
    ):
        with pytest.raises(pg.PrivacyError, match=message):
            PublicBins(edges).fit(rows)
    assert PublicBins([[18, 50, 90], [0, 1, 2, 3]]).fit(rows).transform([[20, 2], [99, -5]]).tolist() == [
        [1, 0, 0, 0, 1],
        [0, 1, 1, 0, 0],
    ]


@pytest.mark.parametrize(("count", "bounds"), [(400, BOUNDS), (99, BOUNDS), (400, None)])
def test_coefficients_are_those_of_the_scores(count: int, bounds: Any):
    rows, votes = people()
    facts: dict[str, Any] = {"target_epsilon": 20.0, "delta": 1e-3, "num_examples": count, "feature_bounds": bounds}
    classifier = PrivateLogisticRegression(classes=["yes", "no"], steps=20, **facts).fit(rows, votes)
    regression = PrivateLinearRegression(label_bounds=(18, 90), steps=20, **facts).fit(rows, rows[:, 0])
    outputs = 54 + 36 * regression.head_(rows.astype(np.float32))[:, 0].numpy()  # not cut to the bounds
    for model, middle, wanted in ((classifier, 0, classifier.decision_function(rows)), (regression, 54, outputs)):
        codes, norms = rows, np.linalg.norm(rows, axis=1)
        if type(model.head_.extractor) is Splines:
            codes, norms = model.head_.extractor(torch.from_numpy(rows)).numpy(), 1
        elif bounds is not None:
            codes = PublicScaler(BOUNDS).fit(rows).transform(rows)
            norms = np.sqrt(1 + (codes**2).sum(1))  # with the constant
        assert model.coef_.shape == ((1,) if model is classifier else ()) + (codes.shape[1],)
        found = middle + ((codes @ model.coef_.T).reshape(-1) + model.intercept_ - middle) / norms
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert model.n_iter_ == 20
        assert model.epsilon_ == model.head_.epsilon


def test_weights_of_classes_and_rows_move_what_is_drawn():
    rows, votes = people()
    facts: dict[str, Any] = {"classes": ["yes", "no"], "target_epsilon": 50.0, "delta": 1e-3, "num_examples": 400}
    model = PrivateLogisticRegression(**facts, feature_bounds=BOUNDS, steps=60)
    usual = model.fit(rows, votes).predict_proba(rows)[:, 1].mean()
    weighted = clone(model).set_params(class_weight={"yes": 1, "no": 0.2}).fit(rows, votes)
    by_row = clone(model).fit(rows, votes, sample_weight=np.where(votes == "yes", 1, 0.2))
    only = clone(model).set_params(class_weight={"no": 0}).fit(rows, votes)
    for one in (weighted, by_row):
        assert usual + 0.02 < one.predict_proba(rows)[:, 1].mean() < only.predict_proba(rows)[:, 1].mean()
        assert one.epsilon_ <= 50
    three = clone(model).set_params(classes=[0, 1, 2], class_weight={2: 4}, steps=3).fit(rows, np.arange(400) % 3)
    assert three.coef_.shape == (3, 10)
    for weight in (1.5, -1.0):
        with pytest.raises(pg.PrivacyError, match="sample_weight to be from 0 to 1, got a weight outside; divide them"):
            clone(model).fit(rows, votes, sample_weight=np.full(400, weight))


@pytest.mark.filterwarnings("ignore:NOT PRIVATE. column")  # of persons
def test_weights_of_the_classes_of_a_table():
    pd = pytest.importorskip("pandas")
    rows, votes = people()
    frame = pd.DataFrame({"age": rows[:, 0], "person": np.arange(400) // 2, "vote": votes})
    facts: dict[str, Any] = {"classes": ["yes", "no"], "target_epsilon": 50.0, "delta": 1e-3, "num_examples": 400}
    facts |= {"columns": {"age": {"kind": "number", "range": [18, 90]}}, "verbose": False, "steps": 60}
    usual, weighted = (
        PrivateTabularClassifier(unit="row", class_weight=weight, **facts).fit(frame, "vote").predict_proba(frame)[:, 1]
        for weight in (None, {"no": 0.2})
    )
    assert weighted.mean() > usual.mean() + 0.05
    persons = PrivateTabularClassifier(unit="person", max_rows=2, class_weight={"no": 0.2}, **facts)
    with pytest.raises(pg.PrivacyError, match="class_weight to be None for persons, whose rows may differ in class"):
        persons.fit(frame, "vote")


SEARCH: dict[str, Any] = {"total_epsilon": 4.0, "delta": 1e-3, "num_examples": 400}


def test_a_search_pays_for_all_trainings_and_scores_within_its_total(tmp_path: Path):
    rows, votes = people()
    grid = {"model__steps": [1, 100], "model__noise_step": [0.15]}
    model = PrivateLogisticRegression(classes=["yes", "no"], feature_bounds=(-1, 1), target_epsilon=9.0)
    pipeline = Pipeline([("scaler", PublicScaler(BOUNDS)), ("model", model)])
    search: Any = PrivateGridSearchCV(pipeline, grid, output_dir=tmp_path, **SEARCH)
    assert base.is_classifier(search)
    search.fit(rows, votes)
    assert search.best_params_ == {"model__steps": 100, "model__noise_step": 0.15}
    assert search.best_index_ == search.cv_results_["mean_test_score"].argmax()
    assert search.score(rows, votes) > 0.9
    assert np.array_equal(search.classes_[search.predict_proba(rows).argmax(1)], search.predict(rows))
    assert search.decision_function(rows).shape == (400,)
    assert model.target_epsilon == 9.0
    # Two trials, two scores and the final training, as their own ledgers and the budget say.
    ledgers = [pg.Ledger(path, read_only=True) for path in tmp_path.rglob("ledger.jsonl")]
    releases = [one for ledger in ledgers for one in ledger.charged]
    committed = [one for commitment in search.budget_.commitments for one in commitment.releases]
    assert len(releases) == 3
    assert len(committed) == 5
    assert sorted(one.count for one in committed) == [1, 1, 1, 100, 100]
    assert all(one in committed for one in releases)
    assert epsilon(committed, delta=1e-3) <= search.budget_.spent() <= search.epsilon_ == 4.0
    assert epsilon(releases, delta=1e-3) > 0.6 * 4.0  # most is left to the final training
    assert "epsilon = 4" in f"{budget_statement(search.budget_)}"
    assert np.array_equal(pickle.loads(pickle.dumps(search)).predict(rows), search.predict(rows))
    with pytest.warns(UserWarning, match="PrivateGridSearchCV: .* holds a search. Its finished") as caught:
        again = clone(search).fit(rows, votes)
    assert len(caught) == 1
    assert np.array_equal(again.predict_proba(rows), search.predict_proba(rows))
    assert len(search.budget_.commitments) == 5


@pytest.mark.filterwarnings("ignore:.*holds a search")
@pytest.mark.filterwarnings("ignore:PrivateGridSearchCV. . searches on")
def test_a_search_among_numbers_of_persons_and_by_a_score_of_ones_own(tmp_path: Path):
    pd = pytest.importorskip("pandas")
    rows, _ = people()
    frame = pd.DataFrame({"age": rows[:, 0], "person": np.arange(400) // 2, "wage": 1000 * rows[:, 0]})
    columns = {"age": {"kind": "number", "range": [18, 90]}}
    table = PrivateTabularRegressor(
        columns=columns, unit="person", max_rows=2, label_bounds=(0, 100_000), verbose=False, hidden=0
    )
    persons: dict[str, Any] = SEARCH | {"num_examples": 200}
    search: Any = PrivateGridSearchCV(table, {"steps": [1, 60]}, output_dir=tmp_path / "a", **persons)
    search.fit(frame, "wage")
    assert search.budget_.privacy_unit == "user"
    assert search.best_params_ == {"steps": 60}
    assert not hasattr(search, "predict_proba")
    assert abs(search.predict(frame) - frame["wage"]).mean() < 20_000
    # Of equal candidates, one's own score decides.
    own: Any = PrivateGridSearchCV(
        table,
        {"steps": [1, 2]},
        output_dir=tmp_path / "b",
        scoring=lambda model, rows, _: np.full(len(rows), float(model.steps == 1)),
        **persons,
    )
    assert own.fit(frame, frame["wage"]).best_params_ == {"steps": 1}
    single: Any = PrivateGridSearchCV(table, {"steps": [2]}, output_dir=tmp_path / "c", **persons).fit(frame, "wage")
    assert len(single.budget_.commitments) == 1
    refused: list[tuple[Any, Any, str]] = [
        ({"delta": [0.1]}, None, r"param_grid to leave alone what decides epsilon, got \['delta'\]"),
        ({"steps": [1]}, "roc_auc", "scoring to be a mean over rows, got 'roc_auc'"),
    ]
    for grid, scoring, message in refused:
        with pytest.raises(pg.PrivacyError, match=message):
            PrivateGridSearchCV(table, grid, output_dir=tmp_path / "d", scoring=scoring, **persons).fit(frame, "wage")
    with pytest.raises(
        pg.PrivacyError, match=r"param_grid and columns to be those of the search in .* got \[\{'steps': 3"
    ):
        PrivateGridSearchCV(table, {"steps": [3, 4]}, output_dir=tmp_path / "c", **persons).fit(frame, "wage")
    wrong: Any = PrivateGridSearchCV(table, {"stepz": [2]}, output_dir=tmp_path / "e", **persons)
    for grid in ({"stepz": [2]}, {"steps": ["many"]}):  # nothing is spent, and another grid may follow
        with pytest.raises((ValueError, pg.PrivacyError), match=r"stepz|steps to be"):
            wrong.set_params(param_grid=grid).fit(frame, "wage")
    other = clone(table).set_params(label_bounds=(0, 90_000))  # old weights would get the new bounds
    with pytest.raises(pg.PrivacyError, match="estimator, param_grid and columns to be those of the search"):
        PrivateGridSearchCV(other, {"steps": [2]}, output_dir=tmp_path / "c", **persons).fit(frame, "wage")
    with pytest.warns(UserWarning, match="3 searches on 200 examples .* they may spend epsilon 12 at delta 0.003"):
        single.set_params(output_dir=tmp_path / "a", param_grid={"steps": [1, 60]}).fit(frame, "wage")


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


def test_bounds_in_another_unit_are_noticed():
    rows = np.stack([np.linspace(20, 80, 50), np.linspace(15_000, 90_000, 50), np.zeros(50)], axis=1)
    with pytest.warns(UserWarning, match=r"NOT PRIVATE: PublicScaler: columns 0 \(from 0\) lie mostly outside"):
        PublicScaler((0, 100_000)).fit(rows)
    with pytest.warns(UserWarning, match=r"columns 1 \(from 0\)"):
        PublicScaler(([0, 0, 0], [100, 100, 1])).fit(rows)
    with warnings.catch_warnings(action="error"):
        PublicScaler(([0, 0, 0], [100, 100_000, 1])).fit(rows)


def test_a_scaler_notices_columns_that_were_scaled_before_and_keeps_missing_values():
    rows, _ = people()
    with pytest.warns(UserWarning, match="PublicScaler: column 0, column 1: mean 0 and deviation 1"):
        PublicScaler(bounds=(-3, 3)).fit(StandardScaler().fit_transform(rows))
    rows[3, 0] = np.nan
    scaler = PublicScaler(bounds=BOUNDS).fit(rows)
    found = scaler.transform(rows)
    assert np.argwhere(np.isnan(found)).tolist() == [[3, 0]]
    rows[3, 0] = np.inf
    with pytest.raises(pg.PrivacyError, match="X to be finite"):
        scaler.transform(rows)
