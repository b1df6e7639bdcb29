"""Metrics by name and by function: their values, their intervals, where they are shown, and what is refused."""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.data import DataSet
from privgrad.data.dataset import NO_LABEL
from privgrad.errors import PrivacyError
from privgrad_lab import metrics, paid_runner, runner
from privgrad_lab.build import make_data, make_model
from privgrad_lab.comparison import report_of
from privgrad_lab.load_spec import check_spec
from privgrad_lab.metrics import intervals_of, measure, metrics_of, title, unit_scores
from privgrad_lab.report.texts import summary_table
from privgrad_lab.spec import Spec

sklearn = pytest.importorskip("sklearn.metrics")

MODULE = """
import torch
from privgrad.data import DataSet
from torch.utils.data import TensorDataset

def share(labels, logits):
    return (logits.argmax(1) == labels).double().mean()

def error(labels, outputs):
    return (labels - outputs).square().mean()

def fails(labels, logits):
    raise KeyError("column")

def text(labels, logits):
    return "high"

def infinite(labels, logits):
    return float("inf")

def several(labels, logits):
    return logits.sum(1)

number = 3

def one_class() -> DataSet:
    train = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    test = TensorDataset(torch.randn(9, 3), torch.ones(9, dtype=torch.int64))
    return DataSet("mine", train, test, test, 2, (3,))

def own_test() -> DataSet:
    whole = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    return DataSet("mine", whole, TensorDataset(*whole[:0]), whole, 2, (3,))
"""
ALL = ["accuracy", "auc", "f1", "recall@3", "squared_error", "metrics_module:share"]
PRIVACY: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "max_grad_norm": 1.0,
    "num_examples": 1337,
    "expected_batch_size": 128,
    "steps": 3,
}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory holds functions of the user."""
    (tmp_path / "metrics_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "metrics_module", raising=False)


def spec_of(**changes: Any) -> Spec:
    raw: dict[str, Any] = {
        "title": "metrics",
        "data": {"use": "digits", "validation": 100},
        "model": {"use": "linear"},
        "privacy": PRIVACY,
        "methods": [{"name": "DP-SGD", "optimizer": {"use": "SGD", "noise_step": 0.05}}],
        "run": {"metrics": ALL, "num_evaluations": 1},
    }
    return check_spec(raw | changes, "spec.toml")


def paid_spec(names: list[str], tuning: dict[str, Any] | None = None, **data: Any) -> Spec:
    privacy = {k: v for k, v in PRIVACY.items() if k != "noise_multiplier"} | {"total_epsilon": 4.0}
    methods = [{"name": "DP-SGD", "optimizer": {"use": "SGD", "noise_step": [0.02, 0.1] if tuning else 0.05}}]
    held = data or {"use": "digits", "public": 100}
    given = {"tuning": tuning} if tuning else {}
    return spec_of(privacy=privacy, data=held, methods=methods, run={"metrics": names}, **given)


class Given(nn.Module):
    """A model whose outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


def given(logits: torch.Tensor, labels: torch.Tensor, **facts: Any) -> tuple[TensorDataset, DataSet]:
    """Examples whose outputs are `logits`, and their data set."""
    examples = TensorDataset(logits, labels)
    classes = logits.shape[-1]
    return examples, DataSet("given", examples, examples, examples, classes, tuple(logits.shape[1:]), **facts)


@pytest.mark.parametrize("classes", [2, 5])
def test_values_are_those_of_scikit_learn(classes: int):
    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(classes, (300,), generator=generator)
    logits = torch.randn(300, classes, generator=generator) + nn.functional.one_hot(labels, classes)
    examples, data = given(logits, labels)
    names = [name for name in ALL if classes > 3 or name != "recall@3"]
    found = metrics_of(Given(), examples, data, names, {})
    assert list(found) == names
    chances, right = logits.double().softmax(1).numpy(), labels.numpy()
    wanted = {
        "accuracy": sklearn.accuracy_score(right, chances.argmax(1)),
        "auc": sklearn.roc_auc_score(right, chances[:, 1] if classes == 2 else chances, multi_class="ovr"),
        "f1": sklearn.f1_score(right, chances.argmax(1), average="binary" if classes == 2 else "macro"),
        "recall@3": sklearn.top_k_accuracy_score(right, chances, k=3) if classes > 3 else None,
        "squared_error": float(((chances - np.eye(classes)[right]) ** 2).sum(1).mean() / 2),
        "metrics_module:share": sklearn.accuracy_score(right, chances.argmax(1)),
    }
    assert found == {name: pytest.approx(wanted[name], abs=1e-6) for name in names}
    if classes == 2:
        assert found["squared_error"] == pytest.approx(sklearn.brier_score_loss(right, chances[:, 1]), abs=1e-6)


def test_auc_is_the_mean_over_the_classes_that_occur():
    labels = torch.tensor([0, 0, 1, 1, 1])
    logits = torch.tensor([[3.0, 1, 0], [0, 2, 1], [1, 3, 0], [2, 1, 5], [0, 1, 0]])
    chances = logits.double().softmax(1).numpy()
    each = [sklearn.roc_auc_score(labels == k, chances[:, k]) for k in (0, 1)]
    assert each[0] != each[1]
    examples, data = given(logits, labels)
    assert metrics_of(Given(), examples, data, ["auc"], {})["auc"] == pytest.approx(np.mean(each))


def test_a_person_counts_once_in_means_and_each_row_counts_in_auc():
    labels = torch.tensor([[1, 0, 1], [1, NO_LABEL, NO_LABEL], [0, 0, NO_LABEL]])
    logits = torch.tensor([[[0.0, 2], [1, 0], [3, 0]], [[0, 1], [9, 9], [9, 9]], [[0, 4], [2, 0], [9, 9]]])
    examples, data = given(logits, labels, by_person=True)
    found = metrics_of(Given(), examples, data, ["accuracy", "squared_error", "auc", "metrics_module:share"], {})
    assert found["accuracy"] == pytest.approx((2 / 3 + 1 + 1 / 2) / 3)
    assert found["metrics_module:share"] == pytest.approx(4 / 6)
    held = labels != NO_LABEL
    margin = (logits[..., 1] - logits[..., 0])[held]
    assert found["auc"] == pytest.approx(sklearn.roc_auc_score(labels[held], margin))
    errors = [(margin[k].sigmoid() - labels[held][k]).square().item() for k in range(6)]
    assert found["squared_error"] == pytest.approx((np.mean(errors[:3]) + errors[3] + np.mean(errors[4:])) / 3)
    assert measure(Given(), examples, data)["accuracy"] == pytest.approx(found["accuracy"])
    scores = unit_scores(Given(), examples, data, "squared_error")
    assert scores.mean().item() == pytest.approx(1 - found["squared_error"])


@pytest.mark.usefixtures("by_rdp_here")
def test_a_function_of_reconstructions_gets_vectors(tmp_path: Path):
    privacy = PRIVACY | {"max_grad_norm": 0.01}
    metrics = ["squared_error", "metrics_module:error"]
    spec = spec_of(**RECONSTRUCT, privacy=privacy, run={"metrics": metrics})
    (record,) = runner.compare(spec, tmp_path / "out", progress=False)
    assert record["metrics"] == dict.fromkeys(metrics, pytest.approx(record["test_loss"]))
    assert 0 < record["metrics"]["metrics_module:error"] < 1


def test_tags_and_reconstructions():
    tags = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
    logits = torch.tensor([[4.0, 3, 2, 1], [4, 1, 3, 2], [1, 2, 3, 4]])
    examples, data = given(logits, tags, score="recall@5")
    found = metrics_of(Given(), examples, data, ["recall@1", "recall@2"], {})
    assert found == {"recall@1": pytest.approx(0.5 / 3), "recall@2": pytest.approx((0.5 + 1) / 3)}
    outputs = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 1], [5, 5, 5, 5]])
    examples, data = given(outputs, torch.zeros(3, 4), score=None)
    errors = torch.tensor([7.5, 0.25, 25])
    mean, half = errors.mean().item(), 1.96 * errors.std().item() / 3**0.5
    assert metrics_of(Given(), examples, data, ["squared_error"], {})["squared_error"] == pytest.approx(mean)
    assert unit_scores(Given(), examples, data, "squared_error").tolist() == [0, 0.75, 0]
    low, high = intervals_of(Given(), examples, data, ["squared_error"])["squared_error"] or []
    assert (low, high) == pytest.approx((max(0, mean - half), mean + half))


def test_paid_scores_are_between_zero_and_one_and_of_one_person():
    logits, labels = torch.randn(6, 4), torch.arange(6) % 4
    logits[2] = math.nan
    logits[4] *= 1e30
    examples, data = given(logits, labels)
    for by in ("accuracy", "recall@2", "squared_error"):
        scores = unit_scores(Given(), examples, data, by)
        assert scores.dtype == torch.float64
        assert 0 <= scores.min() <= scores.max() <= 1
        for row in range(6):
            alone, own = given(logits[row : row + 1], labels[row : row + 1])
            assert unit_scores(Given(), alone, own, by).item() == scores[row].item()


def test_outputs_that_are_not_finite_have_no_metric():
    examples, data = given(torch.tensor([[math.nan, 1.0], [0, 1.0]]), torch.tensor([0, 1]))
    found = metrics_of(Given(), examples, data, ["auc", "f1", "squared_error", "metrics_module:share"], {})
    assert all(map(math.isnan, found.values()))


def test_the_bootstrap_of_a_mean_is_near_its_own_interval():
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(2, (400,), generator=generator)
    logits = torch.randn(400, 2, generator=generator) + nn.functional.one_hot(labels, 2)
    examples, data = given(logits, labels)
    found = intervals_of(Given(), examples, data, ["metrics_module:share", "accuracy", "auc"])
    own, resampled = found["accuracy"], found["metrics_module:share"]
    assert own == pytest.approx(resampled, abs=0.012)
    low, high = found["auc"] or []
    assert low < metrics_of(Given(), examples, data, ["auc"], {})["auc"] < high
    assert 0.04 < high - low < 0.12  # Hanley and McNeil 1982 give 0.09 for 200 and 200 examples and this auc


def test_the_bootstrap_draws_whole_persons():
    """Persons whose rows are all alike: 20 rows each give the interval of 30 persons, not that of 600 rows."""
    right = torch.arange(30) % 3 > 0
    labels = torch.ones(30, 20, dtype=torch.int64)
    logits = torch.stack([torch.zeros(30), right.float() - 0.5], 1)[:, None].expand(30, 20, 2).contiguous()
    examples, data = given(logits, labels, by_person=True)
    low, high = intervals_of(Given(), examples, data, ["metrics_module:share"])["metrics_module:share"] or []
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(2 / 9 / 30), rel=0.2)


def test_a_metric_that_is_undefined_for_a_draw_has_no_interval():
    examples, data = given(torch.randn(8, 2), torch.tensor([1, 0, 0, 0, 0, 0, 0, 0]))
    assert intervals_of(Given(), examples, data, ["auc"]) == {"auc": None}


def test_a_perfect_result_does_not_claim_certainty():
    labels = torch.arange(20) % 2
    examples, data = given(nn.functional.one_hot(labels, 2).float(), labels)
    found = intervals_of(Given(), examples, data, ["accuracy", "auc"])
    assert found["accuracy"] == pytest.approx([0.839, 1.0], abs=1e-3)  # Wilson's
    assert found["auc"] is None


def test_research_records_tables_and_pages_show_the_metrics(tmp_path: Path):
    spec, out = spec_of(), tmp_path / "out"
    (record,) = runner.compare(spec, out, progress=False)
    assert list(record["metrics"]) == ALL
    assert record["metrics"]["accuracy"] == record["test_accuracy"]
    assert record["metrics"]["metrics_module:share"] == pytest.approx(record["test_accuracy"])
    assert json.loads((out / "runs.jsonl").read_text())["metrics"] == record["metrics"]
    answer, _ = report_of(spec, [record], out, command="")
    assert answer["methods"][0]["metrics"]["auc"] == {"mean": record["metrics"]["auc"], "std": None}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table([record]))
    shown, page = console.export_text(), (out / "index.html").read_text()
    for name in ("auc", "f1", "recall@3", "squared_error"):
        assert f"{title(name)} {record['metrics'][name]:.3f}" in shown
        assert f'<th scope="col">Test {title(name)}</th>' in page
        assert f"<td>{record['metrics'][name]:.3f}</td>" in page
    assert "Test share" in page


@pytest.mark.parametrize(
    ("by", "best"), [("auc", max), pytest.param("recall@2", max, marks=pytest.mark.slow), ("squared_error", min)]
)
def test_research_tunes_by_a_named_metric(by: str, best: Any, tmp_path: Path):
    methods = [{"name": "DP-SGD", "optimizer": {"use": "SGD", "noise_step": [0.001, 0.05, 5.0]}}]
    spec = spec_of(methods=methods, tuning={"seeds": [0], "by": by}, run={"num_evaluations": 1})
    records = runner.compare(spec, tmp_path / "out", progress=False)
    tuning, (final,) = records[:3], records[3:]
    values = {record["noise_step"]: record[f"validation_{by}"] for record in tuning}
    assert len(set(values.values())) == 3
    assert values[final["noise_step"]] == best(values.values())
    assert {record["tuned_by"] for record in records} == {f"validation_{by}"}
    page = report_of(spec, records, tmp_path / "out", command="")[0]["report"]
    assert f"Validation {by.replace('_', ' ')} in tuning against noise step u" in Path(page).read_text()


@pytest.mark.usefixtures("by_rdp_here")
def test_a_private_comparison_reports_metrics_with_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "_RESAMPLES", 50)
    tuning = {"way": "trials", "score_on": "public", "by": "recall@3"}
    outcome = pg.compare(paid_tables(paid_spec(ALL, tuning)), out=tmp_path / "out", progress=False)
    assert list(outcome["metrics"]) == list(outcome["intervals"]) == ALL
    assert outcome["metrics"]["accuracy"] == outcome["accuracy"]
    assert outcome["intervals"]["accuracy"] == outcome["interval"]
    for name, (low, high) in outcome["intervals"].items():
        assert low < outcome["metrics"][name] < high
    page = (tmp_path / "out" / "index.html").read_text()
    assert f"AUC {outcome['metrics']['auc']:.3f} (95 % interval " in page
    assert "Intervals of AUC, f1, share are from a bootstrap of the test set." in page
    assert pg.compare(paid_tables(paid_spec(ALL, tuning)), out=tmp_path / "out", progress=False) == outcome


def paid_tables(spec: Spec) -> dict[str, Any]:
    return spec.model_dump(exclude_defaults=True)


@pytest.mark.parametrize("by", ["recall@3", "squared_error"])
@pytest.mark.usefixtures("by_rdp_here")
def test_a_paid_score_is_that_of_the_named_metric(by: str, tmp_path: Path):
    tuning = {"way": "select", "score_on": "public", "by": by, "mean_runs": 2.0}
    spec = paid_spec([], tuning)
    (final,) = paid_runner.compare(spec, tmp_path / "out", progress=False)
    data = make_data(spec)
    model = make_model(spec, data)
    model.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    assert data.public is not None
    found = metrics_of(model, data.public, data, [by], {})[by]
    assert final["tuning_score"] == pytest.approx(1 - found if by == "squared_error" else found)
    assert final["tuning_score_by"] == ("1 - squared_error" if by == "squared_error" else by)
    assert (final["tuning_score_on"], final["measured_on"]) == ("public", "test")
    assert final["tuning_score"] != pytest.approx(unit_scores(model, data.public, data).mean().item(), abs=1e-3)


# What is wrong with the metrics: changes of the spec, and the error.
RECONSTRUCT = {"data": {"use": "digits", "validation": 100, "reconstruct": True}, "model": {"use": "autoencoder"}}
ONE_CLASS = {
    "data": {"use": "metrics_module:one_class"},
    "privacy": PRIVACY | {"num_examples": 40, "expected_batch_size": 10},
}
TUNED = {"methods": [{"name": "DP-SGD", "optimizer": {"use": "SGD", "noise_step": [0.1, 0.2]}}]}
WRONG: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["acuracy"], "run.metrics to be one of accuracy, auc, .* got 'acuracy'; did you mean 'accuracy'"),
    ({}, ["recall@0"], "run.metrics to be one of .* got 'recall@0'"),
    ({}, ["recall@k"], "run.metrics to be one of .* got 'recall@k'"),
    ({}, ["a function"], "run.metrics to be one of .* got 'a function'"),
    ({}, ["auc", "auc"], "run.metrics to have different names, got 'auc'"),
    ({}, ["metrics_module:shares"], "run.metrics to name a function of metrics_module, got 'shares'; did you mean"),
    ({}, ["metrics_modul:share"], "run.metrics to name a module in .*ModuleNotFoundError"),
    ({}, ["metrics_module:number"], "run.metrics to name a function of metrics_module, got 'number'"),
    ({}, ["metrics_module:fails"], "run.metrics to run, got KeyError: 'column'; correct metrics_module:fails"),
    ({}, ["metrics_module:text"], "metrics_module:text to return a finite number, got 'high', a str"),
    ({}, ["metrics_module:infinite"], "metrics_module:infinite to return a finite number, got inf"),
    ({}, ["metrics_module:several"], "metrics_module:several to return a finite number, got tensor"),
    (RECONSTRUCT, ["auc"], "run.metrics to suit data with no classes, got 'auc'; choose squared_error or a function"),
    (RECONSTRUCT, ["accuracy"], "run.metrics to suit data with no classes, got 'accuracy'"),
    (ONE_CLASS, ["auc"], "test part of mine to have two different labels for auc, got 1"),
    (TUNED | {"tuning": {"seeds": [0], "by": "acc"}}, [], "tuning.by to be one of accuracy|loss, train_loss"),
    (
        TUNED | {"tuning": {"seeds": [0], "by": "metrics_module:share"}},
        [],
        "tuning.by to be one of .*; choose one; a f",
    ),
    (
        ONE_CLASS | TUNED | {"tuning": {"seeds": [0], "by": "auc"}},
        [],
        "validation part of mine to have two different labels for auc, got 1|test part of mine",
    ),
]


@pytest.mark.parametrize(("changes", "names", "message"), WRONG)
def test_a_wrong_metric_is_one_clear_error_before_anything_is_trained(
    changes: dict[str, Any], names: list[str], message: str, tmp_path: Path
):
    with pytest.raises(PrivacyError, match=message) as caught:
        runner.compare(spec_of(**changes, run={"metrics": names}), tmp_path / "out", progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("by", ["auc", "f1", "loss", "metrics_module:share"])
def test_a_score_without_a_bound_per_person_cannot_be_paid_for(by: str):
    message = 'tuning.by to be "accuracy", "recall@k", "absolute_error" or "squared_error" with total_epsilon'
    with pytest.raises(PrivacyError, match=message if ":" not in by else "tuning.by to be one of") as caught:
        paid_spec([], {"way": "trials", "by": by})
    assert ("in run.metrics" in str(caught.value)) == (by != "loss")


def test_a_private_comparison_does_not_test_on_its_training_people(tmp_path: Path):
    few = {"num_examples": 40, "expected_batch_size": 10}
    tables = paid_tables(paid_spec([], use="metrics_module:own_test"))
    spec = check_spec(tables | {"privacy": tables["privacy"] | few}, "spec.toml")
    with pytest.raises(PrivacyError, match="test part to be apart from the training part"):
        paid_runner.compare(spec, tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "spec.json").exists()
