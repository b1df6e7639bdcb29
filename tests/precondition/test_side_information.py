"""Scales from counts, against the formulas written out; and methods of an experiment that use them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array, csr_matrix
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad import data
from privgrad.precondition.counts import by_rank, frequencies, tfidf
from privgrad_lab.build import make_data, with_other_public
from privgrad_lab.load_spec import check_spec
from privgrad_lab.report.metadata import metadata_of
from privgrad_lab.report.page import write_report
from privgrad_lab.runner import compare

COUNTS = torch.tensor([0, 500, 100, 10, 1, 0])


def test_frequencies_are_the_papers_formula():
    scales = frequencies(COUNTS, parameter="w", dim=1, source="test", provenance="public data", cap=1e3, division=50.0)
    f = (COUNTS.numpy() + 0.1) / 611 + 1e-10
    r = np.minimum(1e3, f.max() / f) / 50
    assert scales["w"].shape == (1, 6)
    np.testing.assert_allclose(scales["w"][0].numpy(), 1 / r, rtol=1e-12)
    assert (scales.provenance, scales.source) == ("public data", "test")
    assert frequencies(COUNTS, parameter="w", dim=0, source="test", provenance="public data")["w"].shape == (6, 1)


def test_a_power_of_frequencies_shrinks_the_ratios():
    def scales(**options: Any) -> Any:
        return frequencies(
            COUNTS, parameter="w", dim=1, source="test", provenance="public data", cap=1e3, division=50.0, **options
        )["w"][0].numpy()

    f = (COUNTS.numpy() + 0.1) / 611 + 1e-10
    for power in (0.1, 0.5):
        np.testing.assert_allclose(scales(power=power), 50 / np.minimum(1e3, f.max() / f) ** power, rtol=1e-12)
    np.testing.assert_allclose(scales(power=0.0), np.full(6, 50.0))
    np.testing.assert_array_equal(scales(power=1.0), scales())


def test_by_rank_has_two_levels():
    scales = by_rank(COUNTS, parameter="w", dim=1, source="test", provenance="public data", frequent=2, multiplier=20.0)
    torch.testing.assert_close(scales["w"][0], torch.tensor([0.05, 1, 1, 0.05, 0.05, 0.05]).double())


def test_by_rank_needs_as_many_features_as_are_frequent():
    assert by_rank(COUNTS, parameter="w", dim=1, source="test", provenance="public data", frequent=6)["w"].tolist() == [
        [1.0] * 6
    ]
    with pytest.raises(pg.PrivacyError, match=r"frequent to be in \[1, 6\]"):
        by_rank(COUNTS, parameter="w", dim=1, source="test", provenance="public data")


@pytest.mark.parametrize("kind", ["dense", "sparse", "matrix", "tensor", "torch coo", "torch csc"])
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support")
def test_tfidf_sums_over_documents(kind: str):
    weights = np.array([[0.0, 0.5, 0.2], [0.0, 0.25, 0.0]])
    kinds: dict[str, Any] = {
        "dense": weights,
        "sparse": csr_array(weights),
        "matrix": csr_matrix(weights),
        "tensor": torch.from_numpy(weights),
        "torch coo": torch.from_numpy(weights).to_sparse_coo(),
        "torch csc": torch.from_numpy(weights).to_sparse_csc(),
    }
    given = kinds[kind]
    scales = tfidf(given, parameter="w", dim=0, source="test", provenance="public data", special=(0,))
    np.testing.assert_allclose(scales["w"][:, 0].numpy(), [100, 1 / 7.5, 1 / 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "special", "message"),
    [
        (np.ones(3), (), "to be a matrix"),
        (np.array([[1.0, -1.0], [1.0, 2.0]]), (), "weights to be finite and >= 0"),
        (csr_array(np.array([[1.0, math.nan]])), (), "weights to be finite and >= 0"),
        (np.zeros((2, 3)), (), "weights .* not all 0"),
        (np.ones((2, 3)), (99,), r"special to be in \[0, 2\], got 99"),
        (np.ones((2, 3)), (-1,), r"special to be in \[0, 2\], got -1"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, special: tuple[int, ...], message: str):
    with pytest.raises(pg.PrivacyError, match=f"^tfidf: expected .*{message}"):
        tfidf(weights, parameter="w", dim=0, source="test", provenance="public data", special=special)


def test_with_scikit_learns_weights():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    weights = text.TfidfVectorizer().fit_transform(["a rare word", "another word", "word by word"])
    scales = tfidf(weights, parameter="weight", dim=1, source="three documents", provenance="public data")
    model = torch.nn.Linear(weights.shape[1], 2)
    plan = pg.PrivacyPlan(
        sample_rate=1.0, steps=1, expected_batch_size=3, noise_multiplier=1.0, max_grad_norm=1.0, num_examples=3
    )

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=pg.precondition.fixed(scales))
    dense = torch.from_numpy(weights.toarray()).float()
    (batch,) = plan.batches(torch.utils.data.TensorDataset(dense, torch.tensor([0, 1, 0])))
    assert private_grad(batch)["weight"].shape == (2, weights.shape[1])
    assert private_grad.ledger.plan_facts["side_information"] == "public data: three documents"


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        (torch.tensor([-1, 2]), {}, "counts"),
        (torch.tensor([0, 0]), {}, "counts"),
        (torch.tensor([1.0, math.nan]), {}, "counts"),
        (torch.ones(2, 2), {}, "counts"),
        (torch.ones(0), {}, "counts"),
        (COUNTS, {"cap": 0.5}, "cap"),
        (COUNTS, {"division": 0.0}, "division"),
        (COUNTS, {"power": -0.1}, r"frequencies: expected power to be in \[0, 1\], got -0.1"),
        (COUNTS, {"power": 1.1}, "power"),
        (COUNTS, {"power": math.nan}, "power"),
        (COUNTS, {"dim": 2}, "dim"),
        (COUNTS, {"provenance": "hearsay"}, "provenance"),
        (COUNTS, {"source": ""}, "provenance"),
    ],
)
def test_counts_out_of_range_are_refused(counts: torch.Tensor, options: dict[str, Any], message: str):
    given: dict[str, Any] = {"parameter": "w", "dim": 1, "source": "test", "provenance": "public data"} | options
    with pytest.raises(pg.PrivacyError, match=message):
        frequencies(counts, **given)


METHODS: list[dict[str, Any]] = [
    {"name": "tuned in both", "optimizer": {"use": "SGD", "lr": [0.5, 1.0]}, "max_grad_norm": [0.5, 2.0]},
    {"name": "AdaDPS", "optimizer": {"use": "SGD", "lr": 0.1}, "precondition": {"use": "public_rmsprop"}},
    {"name": "pass", "optimizer": {"use": "AdamBC", "lr": 0.1}}
    | {"precondition": {"use": "public_adam", "schedule": "epoch"}, "public": {"batch_size": 5}},
    {"name": "R-Pub", "optimizer": {"use": "RMSpropPub", "lr": 0.1, "eps": 1e-3}},
    {"name": "PDA", "optimizer": {"use": "MirrorDescent", "lr": 0.1}},
    {"name": "warm", "optimizer": {"use": "SGD", "lr": 0.1}, "warm_start": {"lr": 0.5, "epochs": 20, "batch_size": 10}},
    {"name": "ideal", "optimizer": {"use": "SGD", "lr": 0.1}, "precondition": {"use": "raw_ideal_rmsprop"}},
    {"name": "without privacy", "optimizer": {"use": "SGD", "lr": 0.1}, "non_private": True},
]


def other_digits(**_: Any) -> data.DataSet:
    """Images of the digits' shape that are none of them."""
    images = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    examples = TensorDataset(images, torch.zeros(40, dtype=torch.int64))
    return data.DataSet("others", examples, examples, examples, 10, (1, 8, 8))


@pytest.mark.filterwarnings("ignore:NOT PRIVATE. (plain|other) clipped")  # in two steps, gradients stay small
def test_what_is_reconstructed_is_compared_by_loss(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(data.LOADERS, "mnist", other_digits)
    raw: dict[str, Any] = {
        "title": "test",
        "data": {"use": "digits", "standardize": False, "reconstruct": True, "validation": 200, "public": 37}
        | {"elsewhere": {"use": "mnist"}},
        "model": {"use": "autoencoder"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "num_examples": 1200}
        | {"expected_batch_size": 60, "steps": 2},
        "methods": [
            {"name": "plain", "optimizer": {"use": "SGD", "lr": [0.1, 1.0]}, "max_grad_norm": [0.1, 1.0]},
            {
                "name": "other",
                "optimizer": {"use": "SGD", "lr": 0.1},
                "max_grad_norm": 3.0,
                "precondition": {"use": "public_rmsprop"},
            }
            | {"public": {"other": True, "examples": 20, "batch_size": 10}},
        ],
        "tuning": {"seeds": [0], "by": "loss"},
        "run": {"num_evaluations": 1},
    }
    spec = check_spec(raw, "test.toml")
    records = compare(spec, tmp_path, progress=False)
    tuning = [record for record in records if record["phase"] == "tuning"]
    best = min(tuning, key=lambda record: record["validation_loss"])
    plain, other = (record for record in records if record["phase"] == "final")
    assert (plain["max_grad_norm"], plain["lr"]) == (best["max_grad_norm"], best["lr"])
    assert other["side_information"] == "public data: 20 examples from elsewhere"
    assert all(record["test_accuracy"] is None for record in records)
    page = write_report(records, metadata_of(spec, records, tmp_path, command=""), tmp_path)
    assert "has the lowest mean test loss" in page.read_text()
    assert "(plain), 3 (other)" in page.read_text()
    raw["tuning"]["by"] = "accuracy"
    with pytest.raises(
        pg.PrivacyError, match=r"tuning\.by to suit data with no classes, got 'accuracy'; choose loss or"
    ):
        compare(check_spec(raw, "test.toml"), tmp_path / "new", progress=False)
    raw["tuning"]["by"] = "loss"
    del raw["data"]["elsewhere"]
    with pytest.raises(pg.PrivacyError, match=r"data\.elsewhere, other_public or amazon to be given"):
        compare(check_spec(raw, "test.toml"), tmp_path / "newer", progress=False)
    raw["methods"][1]["public"] = {"examples": 38}
    with pytest.raises(pg.PrivacyError, match="at most 37"):
        compare(check_spec(raw, "test.toml"), tmp_path / "newest", progress=False)


def test_methods_with_side_information_run_side_by_side(tmp_path: Any):
    raw: dict[str, Any] = {
        "title": "test",
        "data": {"use": "digits", "validation": 200, "public": 37},
        "model": {"use": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "num_examples": 1200}
        | {"expected_batch_size": 120, "steps": 3},
        "methods": METHODS,
        "tuning": {"seeds": [0]},
        "run": {"seeds": [0, 1], "num_evaluations": 1},
    }
    records = compare(check_spec(raw, "test"), tmp_path, progress=False)
    tuning = {(r["max_grad_norm"], r["lr"]): r["validation_accuracy"] for r in records if r["phase"] == "tuning"}
    assert set(tuning) == {(0.5, 0.5), (0.5, 1.0), (2.0, 0.5), (2.0, 1.0)}
    finals = {r["method"]: r for r in records if r["phase"] == "final"}
    chosen = (finals["tuned in both"]["max_grad_norm"], finals["tuned in both"]["lr"])
    assert tuning[chosen] == max(tuning.values())
    assert {name for name, r in finals.items() if r["epsilon"] == math.inf} == {"ideal", "without privacy"}
    assert "37 public" in finals["PDA"]["data"]
    assert finals["warm"]["test_accuracy"] > 0.3
    del raw["data"]["public"]
    raw["privacy"]["num_examples"] = 1237
    with pytest.raises(pg.PrivacyError, match=r"data\.public"):
        make_data(check_spec(raw, "test"))


def digits_spec(method: dict[str, Any], **tables: Any) -> dict[str, Any]:
    plain = {"name": "P", "optimizer": {"use": "SGD", "lr": 0.1}}
    return {
        "title": "test",
        "data": {"use": "digits", "validation": 200, "public": 37} | tables.get("data", {}),
        "model": {"use": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "num_examples": 1200}
        | {"expected_batch_size": 120, "steps": 2},
        "methods": [plain, plain | {"name": "Q"} | method],
        "run": {"num_evaluations": 1},
    }


def scaled_by(rule: str, **options: Any) -> dict[str, Any]:
    return {"precondition": {"use": rule, **options}}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (scaled_by("public_rmsprop", epss=1e-3), "did you mean 'eps'"),
        (scaled_by("public_rmsprop", gradient=1), "methods.Q.precondition.gradient"),
        (scaled_by("raw_ideal_rmsprop", schedule="step"), "precondition.schedule"),
        (scaled_by("frequencies", dim=1), "precondition.dim"),
        (scaled_by("frequencies", parameter="weight"), "precondition.parameter"),
        (scaled_by("frequencies", source="hearsay"), "precondition.source"),
        (scaled_by("frequencies", provenance="public data"), "precondition.provenance"),
        (scaled_by("frequencies", cap="much"), "methods.Q.precondition.cap to be valid .*number"),
        (scaled_by("public_adam", betas=[2.0, 0.9]), "methods.Q.precondition: precondition.public_adam: expected"),
        ({"public": {"examples": 10}}, r"methods.Q.public to be absent .*, got .*10"),
        ({"public": {"examples": 10}} | scaled_by("frequencies"), r"methods.Q.public to be absent"),
        ({"optimizer": {"use": "SGD", "lr": [0.1, 0.5]}}, r"expected \[tuning\] to be given"),
        ({"max_grad_norm": [0.1, 0.5]}, r"expected \[tuning\] to be given"),
        ({"optimizer": "SGD"}, r"methods.Q.optimizer to have a rate, .*; give it an lr, or a noise_step, or add"),
        ({"optimizer": "Yogi"}, r"methods.Q.optimizer to have a rate, .*; give it an lr, or a list: it has no"),
        ({"adaptive_clip": {"use": "TargetFraction", "targt": 0.5}}, "did you mean 'target'"),
        ({"adaptive_clip": {"use": "TargetFraction", "target": 1.5}}, r"target to be in \(0, 1\)"),
        ({"adaptive_clip": "TargetFraction", "non_private": True}, "adaptive_clip to be absent for non_private"),
        ({"clip": "Automatic", "non_private": True}, "clip to be absent for non_private, got Automatic"),
        ({"clip": "Automatic", "adaptive_clip": "TargetFraction"}, "^methods.Q: PrivateGradient: expected clip"),
        ({"filter": "EMA"}, "methods.Q.filter.weight to be given, got None; add it"),
        ({"filter": {"use": "EMAA", "weight": 0.3}}, "methods.Q.filter.use to be one of .*; did you mean 'EMA'"),
        ({"filter": {"use": "LinearFilter", "b": [1.0, -1.0]}}, "to differ from 0"),
        (
            {"filter": {"use": "DiSK", "weight": 0.5}, "perturb": {"use": "SAT", "radius": 0.1}},
            "the only point of the gradients",
        ),
        ({"norm_bins": 0}, "methods.Q.norm_bins to be an integer from 1 to 1024"),
        ({"norm_bins": "Auto"}, "methods.Q.norm_bins to be .* or 'auto', got 'Auto'"),
        ({"norm_bins": True}, "methods.Q.norm_bins to be an integer"),
        ({"norm_bins": 5, "non_private": True}, "methods.Q.norm_bins to be absent for non_private, got 5"),
        ({"adaptive_clip": {"use": "TargetFraction", "target": [0.5, 0.75]}}, r"expected \[tuning\] to be given"),
        ({"perturb": {"use": "DiSK", "weight": 0.7}}, "^methods.Q: .*DiSK"),
        (scaled_by("public_rmsprop", noise_ep=[1.0, 10.0]), r"precondition.noise_ep'.*did you mean 'noise_eps'"),
    ],
)
def test_methods_that_would_be_others_than_they_say_are_refused(method: dict[str, Any], message: str):
    with pytest.raises(pg.PrivacyError, match=message):
        check_spec(digits_spec(method), "test")


def test_private_examples_are_not_public_ones_from_elsewhere(monkeypatch: pytest.MonkeyPatch):
    again = check_spec(digits_spec({}, data={"elsewhere": {"use": "digits", "standardize": True}}), "test")
    with pytest.raises(pg.PrivacyError, match=r"elsewhere to share at most .* use data.public to count some"):
        make_data(again)
    under_another_name = check_spec(digits_spec({}, data={"elsewhere": {"use": "mnist"}}), "test")
    monkeypatch.setitem(data.LOADERS, "mnist", data.digits)
    with pytest.raises(pg.PrivacyError, match=r"elsewhere to share at most .* inputs with the training examples"):
        make_data(under_another_name)
    monkeypatch.setitem(data.LOADERS, "mnist", other_digits)
    assert len(make_data(under_another_name).other_public or ()) == 40


def test_a_few_equal_examples_are_no_reason_to_refuse_public_ones():
    def of(rows: torch.Tensor) -> data.DataSet:
        examples = TensorDataset(rows, torch.zeros(len(rows), dtype=torch.int64))
        return data.DataSet("rows", examples, examples, examples, 2, (3,))

    private, empty = torch.rand(20, 3), torch.zeros(5, 3)
    other = of(torch.cat([torch.rand(4, 3), empty]))
    assert with_other_public(of(torch.cat([private, empty])), other).other_public is other.train
    for leak in (torch.cat([torch.rand(4, 3), private[:5]]), torch.cat([torch.rand(100, 3), private])):
        with pytest.raises(pg.PrivacyError, match="elsewhere"):
            with_other_public(of(private), of(leak))


def test_the_report_tells_groups_by_method(tmp_path: Any):
    spec = check_spec(digits_spec({"group_size": 4}), "test")
    records = compare(spec, tmp_path, progress=False)
    told = metadata_of(spec, records, tmp_path, command="")
    assert told["plan"]["group_size"] == "1 (P), 4 (Q)"
    page = write_report(records, told, tmp_path).read_text()
    assert "Gradients of 1 (P), 4 (Q) " in page
    assert "relative to twice the clipping norm" in page
    spec = check_spec(digits_spec({}), "test")
    told = metadata_of(spec, records, tmp_path, command="")
    assert told["plan"]["group_size"] == "1"
    assert "twice the clipping norm" not in write_report(records, told, tmp_path).read_text()


@pytest.mark.parametrize("function", [frequencies, by_rank, tfidf])
def test_provenance_has_no_default(function: Any):
    with pytest.raises(TypeError, match="'provenance'"):
        function(COUNTS, parameter="w", dim=1, source="test")
