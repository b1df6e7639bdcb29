"""Labels that are numbers: from a TOML through the command line to a head, its score, report, rows and statement."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import privgrad as pg
from privgrad.cli import app
from privgrad.data import DataSet, table
from privgrad.data.schema import schema_of
from privgrad.heads.head import Target
from privgrad_lab import paid_runner, runner
from privgrad_lab.build import make_data
from privgrad_lab.load_spec import check_spec, load_spec
from privgrad_lab.metrics import intervals_of, losses_for, measure, metrics_of, unit_scores

pytest.importorskip("sklearn")
from sklearn import datasets, metrics

COLUMNS: dict[str, Any] = {
    "age": {"kind": "number", "range": [18, 90], "knots": 4},
    "sex": {"kind": "category", "values": [1, 2]},
    "bmi": {"kind": "number", "range": [15, 45], "knots": 4},
    "bp": {"kind": "number", "range": [60, 140], "bins": 4},
}
TABLE: dict[str, Any] = {
    "file": "diabetes.csv",
    "unit": "row",
    "row_id": "id",
    "label": "progression",
    "bounds": [0, 350],
    "test_share": 0.25,
    "columns": COLUMNS,
}
PRIVACY: dict[str, Any] = {"target_epsilon": 8.0, "delta": 1e-4, "num_examples": 300, "steps": 40}
TABLES: dict[str, Any] = {
    "title": "Diabetes",
    "data": TABLE,
    "model": {"use": "head"},
    "privacy": PRIVACY,
    "run": {"num_evaluations": 2},
}
TOML = """
title = "Diabetes"

[data]
file = "diabetes.csv"
unit = "row"
row_id = "id"
label = "progression"
bounds = [0, 350]
test_share = 0.25

[data.columns]
age = { kind = "number", range = [18, 90], knots = 4 }
sex = { kind = "category", values = [1, 2] }
bmi = { kind = "number", range = [15, 45], knots = 4 }
bp = { kind = "number", range = [60, 140], bins = 4 }

[model]
use = "head"

[privacy]
target_epsilon = 8.0
delta = 1e-4
num_examples = 300
steps = 40
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with scikit-learn's diabetes as a CSV, and the TOML of its head."""
    place = tmp_path_factory.mktemp("diabetes")
    loaded: Any = datasets.load_diabetes(scaled=False)
    with (place / "diabetes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *loaded.feature_names, "progression"])
        rows = zip(loaded.data.tolist(), loaded.target.tolist(), strict=True)
        writer.writerows([number, *row, label] for number, (row, label) in enumerate(rows))
    (place / "diabetes.toml").write_text(TOML)
    return place


def command(*words: object, code: int = 0) -> str:
    """Return what a command printed, as one line of words."""
    found = CliRunner().invoke(app, [f"{word}" for word in words])
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


def checked(folder: Path, **changes: Any) -> Any:
    tables = {name: changes.get(name, table) for name, table in {**TABLES, **changes}.items()}
    return check_spec({name: one for name, one in tables.items() if one is not None}, folder / "diabetes.toml")


def test_from_a_file_to_the_predictions_of_new_rows(folder: Path, tmp_path: Path):
    told = command("doctor", folder / "diabetes.toml")
    assert "442 rows, with a number as label" in told
    assert "num_examples = 300 suits the training part" in told
    out = tmp_path / "out"
    answer = json.loads(command("train", folder / "diabetes.toml", "--out", out, "--json").splitlines()[-1])
    assert answer["epsilon"] <= 8.0
    assert "accuracy" not in answer
    head = pg.Head.load(answer["head"])
    inputs, labels = make_data(load_spec(folder / "diabetes.toml")).test.tensors
    assert answer["r2"] == pytest.approx(metrics.r2_score(labels, head.predict(inputs)))
    assert answer["absolute_error"] == pytest.approx(metrics.mean_absolute_error(labels, head.predict(inputs)))
    page = " ".join((out / "index.html").read_text().split())
    for words in (
        "A private model with R2 ",
        "95 % interval",
        "Test mean absolute error",
        "R2 and mean absolute error ag",
    ):
        assert words in page
    assert "ccurac" not in page
    (record,) = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    low, high = record["test_interval"]
    assert low < answer["r2"] < high
    assert {"accuracy", "absolute_error", "loss"} <= record["curve"][-1].keys()
    assert "differential privacy" in (Path(answer["head"]) / "statement.txt").read_text()
    command("predict", answer["head"], folder / "diabetes.csv", "--out", tmp_path / "scores.csv", "--keep", "id")
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"{k}" for k in range(442)]
    assert list(rows[0]) == ["id", "prediction"]
    assert all(0 <= float(row["prediction"]) <= 350 for row in rows)


def test_the_terminal_shows_both_numbers(folder: Path, tmp_path: Path):
    told = command("train", folder / "diabetes.toml", "--out", tmp_path / "out")
    assert "R2" in told
    assert "mean absolute error" in told
    assert "ccurac" not in told
    assert "class" not in told


def test_a_head_of_a_toml_is_that_of_fit_head(folder: Path, tmp_path: Path):
    (record,) = runner.train(checked(folder), tmp_path / "out", seed=3, progress=False)
    own = make_data(checked(folder))
    head = pg.fit_head(
        *own.train.tensors, bounds=(0, 350), schema=own.schema, source="ranges", seed=3, progress=False, **PRIVACY
    )
    saved = pg.Head.load(record["head"])
    assert torch.equal(saved.model.linear.weight, head.model.linear.weight)
    assert saved.target == head.target
    assert saved.schema == head.schema
    assert saved.epsilon == head.epsilon


def test_defaults_of_a_head_are_those_of_fit_head(folder: Path):
    spec = checked(folder)
    (method,) = spec.methods
    assert (method.noise_step, spec.privacy.max_grad_norm, spec.privacy.expected_batch_size) == (0.04, 0.1, 300)
    assert checked(folder, privacy=PRIVACY | {"max_grad_norm": 0.7}).privacy.max_grad_norm == 0.7
    many = PRIVACY | {"num_examples": 200_000, "delta": 1e-6}
    assert checked(folder, privacy=many).privacy.max_grad_norm == 0.3  # its mean gradients have little noise
    total = {name: value for name, value in PRIVACY.items() if name != "target_epsilon"} | {"total_epsilon": 8.0}
    assert checked(folder, privacy=total).privacy.max_grad_norm == 0.1


@pytest.mark.parametrize("way", ["trials", "select"])
def test_tuning_and_training_within_a_total(way: str, folder: Path, tmp_path: Path):
    text = TOML.replace("target_epsilon", "total_epsilon")
    text += f'\n[tuning]\nway = "{way}"\nnoise_steps = [0.02, 0.04]\n'
    path, out = folder / f"{way}.toml", tmp_path / "out"
    path.write_text(text)
    assert "Nothing was written" in command("compare", path, "--dry-run")
    told = command("compare", path, "--out", out)
    assert "A private model with R2 " in told
    assert "; mean absolute error" in told
    assert told.count("95 % interval") == 2
    records = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert len(records) == (3 if way == "trials" else 1)
    assert {record["tuning_score_by"] for record in records if "tuning_score" in record} == {"1 - absolute_error"}
    page = " ".join((out / "index.html").read_text().split())
    assert "1 minus the absolute error" in page
    assert "Intervals of R2 are from a bootstrap" in page
    assert "ccurac" not in page
    final = records[-1]
    ends = final["intervals"]["absolute_error"]
    assert ends[0] < final["metrics"]["absolute_error"] < ends[1]
    assert final["interval"] == final["intervals"]["r2"]
    assert final["epsilon"] <= 8.0
    budget = command("statement", out / "budget.jsonl")
    assert "differential privacy" in budget
    command("predict", out / "head", folder / "diabetes.csv", "--out", tmp_path / "scores.csv")
    answer = json.loads(command("compare", path, "--out", out, "--json").splitlines()[-1])  # it is complete
    assert "accuracy" not in answer
    assert answer["r2"] == final["test_accuracy"]
    assert answer["interval"] == final["interval"]


def test_research_tunes_by_r2_and_by_the_error(folder: Path, tmp_path: Path):
    methods = [
        {"name": "net", "optimizer": {"use": "SGD", "noise_step": [0.005, 0.02]}, "model": {"use": "mlp", "hidden": 4}},
        {"name": "head", "optimizer": {"use": "SGD", "noise_step": 0.04}},
    ]
    own, few = TABLE | {"validation_share": 0.25}, PRIVACY | {"num_examples": 200, "steps": 10}
    for by, best in (({}, max), ({"by": "absolute_error"}, min)):
        spec = checked(folder, methods=methods, data=own, tuning={"seeds": [0], **by}, privacy=few)
        records = runner.compare(spec, tmp_path / f"{len(by)}", progress=False)
        tuning = [record for record in records if record["phase"] == "tuning"]
        key = f"validation_{by.get('by', 'accuracy')}"
        assert all(math.isfinite(record[key]) for record in tuning)
        chosen = next(record for record in records if (record["method"], record["phase"]) == ("net", "final"))
        assert best(tuning, key=lambda record: record[key])["noise_step"] == chosen["noise_step"]
        assert [record.get("head") is None for record in records if record["phase"] == "final"] == [True, False]


def test_a_count_has_rates_and_the_deviance_of_poisson(folder: Path, tmp_path: Path):
    toml = folder / "counts.toml"
    toml.write_text(TOML.replace("bounds =", 'counts = true\ninteractions = [["age", "sex"]]\nbounds ='))
    spec = load_spec(toml)
    assert "with a number as label" in command("doctor", toml)
    answer = json.loads(command("train", toml, "--out", tmp_path / "out", "--json").splitlines()[-1])
    head = pg.Head.load(answer["head"])
    inputs, labels = make_data(spec).test.tensors
    rates = head.predict(inputs)
    assert head.target == Target("number", 1, 0.0, 350.0, counts=True)
    torch.testing.assert_close(rates, 351**0.5 * head(inputs)[:, 0].exp())
    deviance = metrics.mean_poisson_deviance(labels, rates)
    assert answer["sklearn.metrics:mean_poisson_deviance"] == pytest.approx(deviance)
    assert answer["absolute_error"] == pytest.approx(metrics.mean_absolute_error(labels, rates))
    constant = metrics.mean_poisson_deviance(labels, torch.full_like(labels, labels.mean().item()))
    record = json.loads((tmp_path / "out/runs.jsonl").read_text().splitlines()[-1])
    assert record["mean_deviance"] == pytest.approx(constant)
    own: Any = {"bounds": (0, 350), "counts": True, "source": "no data", "progress": False}
    by_hand = pg.fit_head(*make_data(spec).train.tensors, **own, **PRIVACY)
    assert by_hand.privacy["max_grad_norm"] == spec.privacy.max_grad_norm


class Given(nn.Module):
    """A model that returns its inputs; a parameter tells where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1))

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs + 0 * self.at


def numbers(outputs: Tensor, labels: Tensor, *, by_person: bool = False) -> tuple[TensorDataset, DataSet]:
    """Return rows whose outputs are given, and a data set of numbers from 0 to 10 with them."""
    examples = TensorDataset(outputs, labels)
    columns = {"x": {"kind": "number", "range": [0, 1]}}
    schema = schema_of("test", columns=columns, label="y", classes=None, bounds=[0, 10], unit="row")
    shape = tuple(outputs.shape[1 + by_person :])
    return examples, DataSet(
        "n", examples, examples, examples, 1, shape, score="r2", schema=schema, by_person=by_person
    )


def test_a_paid_score_is_in_0_to_1_and_of_one_row_only():
    outputs = torch.tensor([-1.0, 0.0, 1.0, 50.0, -50.0, 0.5, math.nan])[:, None]
    labels = torch.tensor([0.0, 5.0, 0.0, 1e9, -1e9, 10.0, 3.0])
    examples, data = numbers(outputs, labels)
    scores = unit_scores(Given(), examples, data)
    assert scores.tolist() == [1, 1, 0, 0, 0, 0.75, 0]
    for row, score in enumerate(scores):
        alone, own = numbers(outputs[row : row + 1], labels[row : row + 1])
        assert unit_scores(Given(), alone, own).item() == score


def test_each_person_counts_once_in_the_error_and_each_row_in_r2():
    outputs = torch.tensor([[-0.8, 0.0, 0.7], [0.6, 0.1, 0.0]])[:, :, None]
    labels = torch.tensor([[2.0, 5.0, 8.0], [9.0, math.nan, math.nan]])
    examples, data = numbers(outputs, labels, by_person=True)
    found = metrics_of(Given(), examples, data, ["r2", "absolute_error"], {})
    guesses = [1.0, 5.0, 8.5, 8.0]
    assert found["r2"] == pytest.approx(metrics.r2_score([2, 5, 8, 9], guesses))
    assert found["absolute_error"] == pytest.approx(((1 + 0 + 0.5) / 3 + 1) / 2)
    assert unit_scores(Given(), examples, data).tolist() == pytest.approx([0.95, 0.9])
    target = Target("number", 1, 0.0, 10.0)
    losses = losses_for(data)(Given(), (outputs, labels))
    assert torch.equal(losses, target.losses(Given(), (outputs, target.prepared(labels))))
    measured = measure(Given(), examples, data)
    assert measured["loss"] == pytest.approx(losses.mean().item())
    assert measured["accuracy"] == found["r2"]


def test_intervals_hold_the_value_and_unbounded_errors_have_no_upper_end():
    generator = torch.Generator().manual_seed(0)
    labels = 10 * torch.rand(200, generator=generator)
    examples, data = numbers(((labels - 5) / 5 + torch.randn(200, generator=generator) / 5)[:, None], labels)
    found = metrics_of(Given(), examples, data, ["r2", "absolute_error"], {})
    for name, ends in intervals_of(Given(), examples, data, list(found)).items():
        assert ends is not None
        assert ends[0] < found[name] < ends[1]


def test_patients_with_several_visits_are_one_unit(tmp_path: Path):
    with (tmp_path / "visits.csv").open("w", newline="") as file:
        rows = [[f"p{k // 2}", k % 80, (7 * k) % 30] for k in range(200)]
        csv.writer(file).writerows([["patient", "age", "days"], *rows])
    data = {"file": "visits.csv", "unit": "patient", "max_rows": 3, "label": "days", "bounds": [0, 30]}
    data |= {"test_share": 0.25, "columns": {"age": {"kind": "number", "range": [0, 80], "knots": 3}}}
    privacy = PRIVACY | {"privacy_unit": "user", "num_examples": 60, "delta": 1e-3, "steps": 5}
    network = {"name": "net", "optimizer": {"use": "SGD", "noise_step": 0.02}, "model": {"use": "mlp", "hidden": 2}}
    for methods in (None, [network]):
        spec = checked(tmp_path, data=data, privacy=privacy, methods=methods)
        (record,) = runner.train(spec, tmp_path / f"{methods is None}", progress=False)
        assert math.isfinite(record["metrics"]["r2"])


TUNING: dict[str, Any] = {"way": "trials", "noise_steps": [0.02, 0.04]}
TOTAL: dict[str, Any] = {"total_epsilon": 8.0, "delta": 1e-4, "num_examples": 300, "steps": 5}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": TABLE | {"classes": [0, 1]}}, r"classes to be absent next to bounds"),
    ({"data": {k: v for k, v in TABLE.items() if k != "bounds"}}, r"classes to be given.* give bounds = \[low, high\]"),
    ({"data": TABLE | {"bounds": [350, 0]}}, r"bounds to be \[low, high\] of finite numbers"),
    ({"data": TABLE | {"bounds": "0 to 350"}}, r"data.bounds to be valid"),
    ({"run": {"metrics": ["accuracy"]}}, r"run.metrics to suit data with a number per label, got 'accuracy'; .* r2 or"),
    ({"run": {"metrics": ["rsquared"]}}, r"run.metrics to be one of .*r2, absolute_error"),
    ({"tuning": TUNING | {"by": "accuracy"}, "privacy": TOTAL}, r"tuning.by to suit .*; choose absolute_error\."),
    ({"tuning": TUNING | {"by": "r2"}, "privacy": TOTAL}, r'tuning.by to be "accuracy", .*"absolute_error"'),
    ({"tuning": TUNING | {"by": "squared_error"}, "privacy": TOTAL}, r"tuning.by to suit data with a number"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_wrong_file_is_one_clear_error_before_anything_is_spent(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
):
    begin = paid_runner.compare if "total_epsilon" in changes.get("privacy", {}) else runner.train
    with pytest.raises(pg.PrivacyError, match=message) as caught:
        begin(checked(folder, **changes), tmp_path / "out", progress=False)
    assert "\n" not in f"{caught.value}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("high", "row 3, column 'y' of own.csv to be a number, got 'high'"),
        ("NaN", "row 3, column 'y' of own.csv to have a value, got 'NaN'"),
        ("", "row 3, column 'y' of own.csv to have a value, got ''"),
        ("inf", "row 3, column 'y' of own.csv to be a number, got 'inf'"),
    ],
)
def test_a_label_that_is_no_number_is_refused_and_found(value: str, message: str, tmp_path: Path):
    rows = [f"{k},{k % 7}" for k in range(40)]
    rows[2] = f"2,{value}"
    (tmp_path / "own.csv").write_text("\n".join(["x,y", *rows]))
    data = {"file": "own.csv", "unit": "row", "label": "y", "bounds": [0, 7], "test_share": 0.25}
    data |= {"columns": {"x": {"kind": "number", "range": [0, 40]}}}
    spec = checked(tmp_path, data=data, privacy=PRIVACY | {"num_examples": 20, "delta": 1e-3})
    with pytest.raises(pg.PrivacyError, match=message):
        runner.train(spec, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_test_part_of_one_label_has_no_r2(tmp_path: Path):
    data = {"file": "own.csv", "unit": "row", "label": "y", "bounds": [0, 7], "test_share": 0.25}
    data |= {"columns": {"x": {"kind": "number", "range": [0, 40]}}}
    (tmp_path / "own.csv").write_text("\n".join(["x,y", *(f"{k},3" for k in range(40))]))
    with pytest.raises(pg.PrivacyError, match=r"the test part of own\.csv to have two different labels for r2, got 1"):
        make_data(checked(tmp_path, data=data, privacy=PRIVACY | {"num_examples": 20, "delta": 1e-3}))


def test_doctor_notes_what_needs_a_decision(tmp_path: Path):
    (tmp_path / "own.toml").write_text(
        '[data]\nfile = "own.csv"\nunit = "row"\nlabel = "y"\nbounds = [0.0, 5.30517]\ntest_share = 0.25\n'
        '[data.columns]\nx = { kind = "number", range = [0, 10] }\nc = { kind = "number", range = [0, 5] }\n'
    )
    rows = [*(f"{k},3,{k / 10 if k else 5.30517}" for k in range(40)), "3,3,-2"]
    (tmp_path / "own.csv").write_text("\n".join(["x,c,y", *rows]))
    found = {
        (one["column"], one["what"].partition(":")[0]): one
        for one in json.loads(command("doctor", tmp_path / "own.toml", "--json"))["raw_findings"]["own.csv"]
    }
    assert found["x", "half of the rows or more are outside of 0 to 10"]["count"] == 29
    assert found["y", "outside of 0 to 5.30517"]["rows"] == [41]
    assert found["c", "constant"]["count"] == 41
    assert "round it outwards" in found["y", "the high of bounds"]["remedy"]
    told = command("doctor", tmp_path / "own.toml")
    assert "NOT PRIVATE: 41 rows, with a number as label" in told


def test_bounds_that_seem_to_be_of_the_data_warn():
    own: dict[str, Any] = {"label": "y", "unit": "row", "columns": {"x": {"kind": "number", "range": [0, 9]}}}
    with pytest.warns(UserWarning, match="NOT PRIVATE: table: the high of bounds: this is the largest value"):
        table({"x": [1, 2, 3], "y": [1.0, 2.0, 3.14159]}, bounds=(0, 3.14159), **own)
