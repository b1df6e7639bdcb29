"""Models of a table: from a data frame to predictions, with hidden units, saved and loaded, and what they refuse."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privgrad as pg
from privgrad.data import table
from privgrad.data.schema import knots_of
from privgrad.training.defaults import head_confidence, head_max_grad_norm, head_noise_step, table_hidden

pytest.importorskip("sklearn")
pd = pytest.importorskip("pandas")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_diabetes  # noqa: E402
from sklearn.metrics import get_scorer, mean_poisson_deviance  # noqa: E402

from privgrad.estimators import PrivateTabularClassifier, PrivateTabularRegressor  # noqa: E402

COLUMNS: dict[str, Any] = {
    "age": {"kind": "number", "range": [18, 90]},
    "job": {"kind": "category", "values": ["none", "nurse", "pilot"], "other": True},
    "since": {"kind": "date", "as": ["month", "weekday"]},
}
CODED = {name: {"missing": "category", **own} for name, own in COLUMNS.items()}
pytestmark = pytest.mark.filterwarnings("ignore:NOT PRIVATE. column .person.")  # of rows by themselves
BUDGET: dict[str, Any] = {"target_epsilon": 5.0, "delta": 1e-3, "num_examples": 600}
FACTS: dict[str, Any] = {"unit": "row"} | BUDGET


def people(count: int = 600) -> Any:
    """Ages, jobs and dates with gaps, who left, and what they earn; one in a hundred died."""
    random = np.random.default_rng(0)
    age = random.uniform(18, 90, count)
    jobs: Any = ["nurse", "pilot", "cook", None]
    frame = pd.DataFrame({"age": age, "job": random.choice(jobs, count)})
    frame["since"] = pd.to_datetime("2020-01-01") + pd.to_timedelta(random.integers(0, 900, count), unit="D")
    frame["left"] = np.where(age > 55, "left", "stayed")
    frame.loc[frame.index % 100 == 7, "left"] = "died"
    frame["income"] = 1000 * age + 20_000 * (frame["job"] == "pilot")
    frame.loc[frame.index % 9 == 0, "age"] = None
    frame.loc[frame.index % 11 == 0, "since"] = pd.NaT
    frame["person"] = frame.index // 2
    return frame


def classifier(**options: Any) -> PrivateTabularClassifier:
    own: dict[str, Any] = {"columns": COLUMNS, "classes": ["stayed", "left", "died"]}
    return PrivateTabularClassifier(**own | FACTS | options)


def test_from_a_frame_to_predictions_and_a_saved_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    frame = people()
    model = classifier().fit(frame, frame["left"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(choice in told for choice in model.choices_)
    assert "32 codes of 3 columns; a linear model" in told
    assert model.score(frame, frame["left"]) > 0.8
    likely = model.predict_proba(frame)
    assert likely.shape == (600, 3)
    assert np.allclose(likely.sum(1), 1)
    assert np.array_equal(model.classes_[likely.argmax(1)], model.predict(frame))
    model.head_.save(tmp_path / "head")
    loaded = pg.Head.load(tmp_path / "head")
    assert loaded.classes is not None
    assert [loaded.classes[k] for k in loaded.predict(frame).tolist()] == model.predict(frame).tolist()


@pytest.mark.filterwarnings("ignore:.*seed")
def test_rows_and_columns_and_a_codebook_say_the_same(tmp_path: Path):
    frame = people()
    book = tmp_path / "codebook.toml"
    book.write_text(
        '[age]\nkind = "number"\nrange = [18, 90]\n[job]\nkind = "category"\nvalues = ["none", "nurse", "pilot"]\n'
        'other = true\n[since]\nkind = "date"\nas = ["month", "weekday"]\n'
    )
    by_name, by_book = (
        classifier(seed=0, steps=5, verbose=False, columns=columns).fit(frame.drop(columns="left"), labels)
        for columns, labels in ((COLUMNS, frame["left"]), (f"{book}", frame["left"].tolist()))
    )
    wanted = by_name.predict_proba(frame)
    assert np.array_equal(by_book.predict_proba(frame), wanted)
    assert np.array_equal(by_name.predict_proba(frame.to_dict("list")), wanted)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert np.array_equal(by_name.predict_proba(rows), wanted)


def test_persons_are_protected_with_all_of_their_rows():
    frame = people()
    options: dict[str, Any] = {"unit": "person", "max_rows": 2, "num_examples": 300}
    model = classifier(**options, steps=5, verbose=False).fit(frame, "left")
    assert model.head_.privacy["privacy_unit"] == "user"
    assert model.predict(frame).shape == (600,)


@pytest.mark.parametrize("hidden", [None, 8])
def test_numbers_of_real_people(tmp_path: Path, hidden: int | None):
    loaded: Any = load_diabetes(as_frame=True, scaled=False)
    frame = loaded.frame
    columns = {name: {"kind": "number", "range": ends} for name, ends in {"bmi": [15, 50], "bp": [50, 150]}.items()}
    options: dict[str, Any] = {"columns": columns, "label_bounds": (0, 400), "hidden": hidden, "verbose": False}
    options |= FACTS | {"target_epsilon": 20.0, "num_examples": 442}
    model = PrivateTabularRegressor(**options)
    predicted = model.fit(frame, "target").predict(frame)
    assert model.score(frame, frame["target"]) > 0.2
    assert ((predicted >= 0) & (predicted <= 400)).all()
    assert model.head_.model.hidden == (hidden or 0)
    model.head_.save(tmp_path)
    assert torch.equal(pg.Head.load(tmp_path).predict(frame).double(), torch.from_numpy(predicted))
    copied: Any = clone(model)
    assert copied.get_params()["columns"] == columns


def test_counts_and_a_pair_of_columns_that_act_together(tmp_path: Path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"age": random.uniform(0, 15, 4000), "sex": random.choice(["f", "m"], 4000)})
    rates = np.exp(np.where(frame["sex"] == "f", frame["age"], 15 - frame["age"]) / 6 - 0.5)
    frame["visits"] = random.poisson(rates)
    columns = {"age": {"kind": "number", "range": [0, 15]}, "sex": {"kind": "category", "values": ["f", "m"]}}
    options: dict[str, Any] = {"columns": columns, "label_bounds": (0, 25), "counts": True, "verbose": False}
    options |= FACTS | {"target_epsilon": 3.0, "delta": 1e-5, "num_examples": 4000}
    alone = PrivateTabularRegressor(**options).fit(frame, "visits").predict(frame)
    with pytest.warns(UserWarning, match="2 trainings on 4,000 examples"):
        model = PrivateTabularRegressor(**options, interactions=[["age", "sex"]]).fit(frame, "visits")
    rates_of_model, mean = model.predict(frame), np.full(4000, frame["visits"].mean())
    best, pair, single, none = (
        mean_poisson_deviance(frame["visits"], rate) for rate in (rates, rates_of_model, alone, mean)
    )
    assert none - single < 0.2 * (none - best)  # the two together decide
    assert none - pair > 0.8 * (none - best)
    model.head_.save(tmp_path)
    assert torch.equal(pg.Head.load(tmp_path).predict(frame).double(), torch.from_numpy(rates_of_model))


def test_hidden_units_learn_what_no_linear_model_of_codes_does():
    signs = torch.tensor(np.random.default_rng(0).choice([0.0, 1.0], size=(1000, 2)))
    codes = torch.cat([signs, 1 - signs], dim=1).float()
    labels = (signs[:, 0] == signs[:, 1]).long()
    facts: dict[str, Any] = {"target_epsilon": 20.0, "delta": 1e-4, "num_examples": 1000, "progress": False}
    right = [
        (
            pg.fit_head(codes, labels, num_classes=2, source="no data", hidden=k, **facts).predict(codes) == labels
        ).float()
        for k in (0, 16)
    ]
    assert right[0].mean() < 0.85
    assert right[1].mean() > 0.95


def test_the_rules_follow_from_public_numbers():
    assert table_hidden(39_999, 1.0, of_numbers=True)[0] == table_hidden(100_000, 3.0, of_numbers=False)[0] == 0
    assert table_hidden(20_000, 2.0, of_numbers=True)[0] == 32
    assert [knots_of(10_000, 500), knots_of(9_999, 399), knots_of(9_999, 400)] == [16, 5, 2]
    plan = pg.PrivacyPlan.for_budget(**BUDGET, max_grad_norm=1.0, expected_batch_size=50, steps=100)
    assert [head_max_grad_norm(plan, 10, of_numbers=one, hidden=4) for one in (True, False)] == [0.3, 3.0]
    assert head_noise_step("constant", of_numbers=False, hidden=4) == pytest.approx(0.018)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": None}, "unit to be"),
        ({"unit": "person"}, "max_rows to be a whole number"),
        ({"num_examples": None}, "num_examples to be given"),
        ({"target_epsilon": None}, "target_epsilon to be given"),
        ({"num_examples": 600.0}, "num_examples to be an integer"),
        ({"classes": ["stayed", "left"]}, "'died'"),
        ({"classes": None}, "classes to be given"),
        ({"hidden": -1}, "hidden to be"),
        ({"columns": {"age": {"kind": "number"}}}, "range"),
        ({"columns": {"wage": {"kind": "number", "range": [0, 1]}}}, "'wage'"),
        ({"columns": {"age": {"kind": "number", "rnge": [18, 90]}}}, "'rnge'"),
        ({"columns": COLUMNS | {"left": {"kind": "category", "values": ["died"]}}}, "because it is the label"),
        ({"columns": None}, "columns to be given"),
        ({"columns": "no such file.toml"}, "to be a TOML with a table for each column"),
        ({"columns": {"age": {"kind": "number", "range": [18, 90], "missing": "error"}}}, "row 1, column 'age'"),
    ],
)
def test_refused_before_anything_is_spent(changes: dict[str, Any], message: str):
    frame = people()
    with pytest.raises(pg.PrivacyError, match=message):
        classifier(**changes).fit(frame, frame["left"])


def test_a_range_that_misses_rows_and_a_second_training_are_told():
    frame = people()
    narrow = COLUMNS | {"age": {"kind": "number", "range": [18, 50]}}
    with pytest.warns(UserWarning, match="NOT PRIVATE: .* values in column 'age'"):
        classifier(columns=narrow, steps=3, verbose=False).fit(frame, "left")
    model = classifier(steps=3, verbose=False).fit(frame, "left")
    with pytest.warns(UserWarning, match="PrivateTabularClassifier.fit: .* trainings on 600 examples without a budget"):
        model.fit(frame, "left")


def names_twice(frame: Any) -> Any:
    return pd.concat([frame, frame[["age"]]], axis=1)


@pytest.mark.parametrize(
    ("of_x", "of_y", "message"),
    [
        (pd.DataFrame.to_numpy, None, "X to have columns by name, got ndarray"),
        (names_twice, None, "got two columns 'age'"),
        (None, lambda frame: frame[["left"]], r"y to be the labels, .*, got shape \(600, 1\)"),
        (None, lambda frame: None, "y to be the labels"),
        (None, lambda frame: frame["left"][:5], "to have one length"),
        (lambda frame: frame.assign(age=None), lambda frame: "gone", "'gone'"),
    ],
)
def test_other_tables_and_labels_are_refused(of_x: Any, of_y: Any, message: str):
    frame = people()
    with pytest.raises(pg.PrivacyError, match=message):
        classifier().fit(of_x(frame) if of_x else frame, of_y(frame) if of_y else frame["left"])


def test_a_column_without_a_value_and_one_row():
    frame = people().assign(age=None)
    model = classifier(steps=3, verbose=False).fit(frame, "left")
    row = {"age": 30, "job": "pilot", "since": None}
    assert np.array_equal(model.predict_proba(row), model.predict_proba([row]))
    with pytest.raises(pg.PrivacyError, match="X to have columns by name"):
        model.predict(frame.to_numpy())


def test_scorers_see_the_classes_in_order():
    frame = people()
    binary = frame["age"].fillna(40) > 55
    model = classifier(classes=[True, False], steps=50, verbose=False).fit(frame, binary.tolist())
    assert model.classes_.tolist() == [False, True]
    assert get_scorer("roc_auc")(model, frame, binary) > 0.9


@pytest.mark.filterwarnings("ignore")  # of a research seed, and of values outside of ranges
@pytest.mark.parametrize(("classes", "share"), [(["stayed", "left"], 1 / (1 + 0.4 * math.log(2**0.5 / 0.3))), (3, 1)])
def test_outputs_for_two_classes_of_a_table_make_up_for_clipping(classes: Any, share: float):
    names: list[str] = classes if isinstance(classes, list) else ["stayed", "left", "died"]
    frame = people()
    data = table(frame[frame["left"].isin(names)], columns=CODED, label="left", classes=names, unit="row")
    codes, labels = data.train.tensors
    facts: dict[str, Any] = BUDGET | {"seed": 0, "steps": 3, "max_grad_norm": 0.3, "progress": False}
    facts |= {"num_classes": len(names), "source": "codes"}
    first, second = (pg.fit_head(codes.float(), labels, schema=one, **facts) for one in (None, data.schema))
    torch.testing.assert_close(second.model.linear.weight, share * first.model.linear.weight)


def test_a_c_that_clips_nothing_changes_no_confidence():
    assert head_confidence(1.5) == 1 > head_confidence(1.0) > head_confidence(0.3) > 0
