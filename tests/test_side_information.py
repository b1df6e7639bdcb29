"""Scales from counts, against the formulas written out; and methods of an experiment that use them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

import privgrad as pg
from privgrad.experiments.report import write_report
from privgrad.experiments.runs import compare, context
from privgrad.experiments.spec import check_spec
from privgrad.side_information import by_rank, frequencies, tfidf

COUNTS = torch.tensor([0, 500, 100, 10, 1, 0])


def test_frequencies_are_the_papers_formula():
    scales = frequencies(COUNTS, parameter="w", dim=1, source="test", cap=1e3, division=50.0)
    f = (COUNTS.numpy() + 0.1) / 611 + 1e-10
    r = np.minimum(1e3, f.max() / f) / 50
    assert scales["w"].shape == (1, 6)
    np.testing.assert_allclose(scales["w"][0].numpy(), 1 / r, rtol=1e-12)
    assert (scales.provenance, scales.source) == ("public data", "test")
    assert frequencies(COUNTS, parameter="w", dim=0, source="test")["w"].shape == (6, 1)


def test_by_rank_has_two_levels():
    scales = by_rank(COUNTS, parameter="w", dim=1, source="test", frequent=2, multiplier=20.0)
    torch.testing.assert_close(scales["w"][0], torch.tensor([0.05, 1, 1, 0.05, 0.05, 0.05]).double())


@pytest.mark.parametrize("kind", ["dense", "sparse", "tensor"])
def test_tfidf_sums_over_documents(kind: str):
    weights = np.array([[0.0, 0.5, 0.2], [0.0, 0.25, 0.0]])
    given: Any = {"dense": weights, "sparse": csr_matrix(weights), "tensor": torch.from_numpy(weights)}[kind]
    scales = tfidf(given, parameter="w", dim=0, source="test", special=(0,))
    np.testing.assert_allclose(scales["w"][:, 0].numpy(), [100, 1 / 7.5, 1 / 2], rtol=1e-6)


def test_with_scikit_learns_weights():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    weights = text.TfidfVectorizer().fit_transform(["a rare word", "another word", "word by word"])
    scales = tfidf(weights, parameter="weight", dim=1, source="three documents")
    model = torch.nn.Linear(weights.shape[1], 2)
    plan = pg.PrivacyPlan(
        sample_rate=1.0, steps=1, expected_batch_size=3, noise_multiplier=1.0, max_grad_norm=1.0, num_examples=3
    )

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    oracle = pg.PrivateGradient(model, loss_fn, plan, precondition=pg.precondition.fixed(scales))
    dense = torch.from_numpy(weights.toarray()).float()
    (batch,) = plan.batches(torch.utils.data.TensorDataset(dense, torch.tensor([0, 1, 0])))
    assert oracle(batch).values["weight"].shape == (2, weights.shape[1])
    assert oracle.ledger.plan_facts["side_information"] == "public data: three documents"


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        (torch.tensor([-1, 2]), {}, "counts"),
        (torch.tensor([0, 0]), {}, "counts"),
        (torch.tensor([1.0, math.nan]), {}, "counts"),
        (torch.ones(2, 2), {}, "counts"),
        (COUNTS, {"cap": 0.5}, "cap"),
        (COUNTS, {"division": 0.0}, "division"),
        (COUNTS, {"dim": 2}, "dim"),
        (COUNTS, {"provenance": "hearsay"}, "provenance"),
        (COUNTS, {"source": ""}, "provenance"),
    ],
)
def test_counts_out_of_range_are_refused(counts: torch.Tensor, options: dict[str, Any], message: str):
    given: dict[str, Any] = {"parameter": "w", "dim": 1, "source": "test"} | options
    with pytest.raises(pg.PrivacyError, match=message):
        frequencies(counts, **given)


METHODS: list[dict[str, Any]] = [
    {"name": "tuned in both", "optimizer": "SGD", "lr": [0.5, 1.0], "max_grad_norm": [0.5, 2.0]},
    {"name": "AdaDPS", "optimizer": "SGD", "lr": 0.1, "precondition": {"rule": "public_rmsprop"}},
    {"name": "pass", "optimizer": "AdamBC", "lr": 0.1}
    | {"precondition": {"rule": "public_adam", "options": {"schedule": "epoch"}}, "public": {"batch_size": 5}},
    {"name": "R-Pub", "optimizer": "RMSpropPub", "lr": 0.1, "options": {"epsilon": 1e-3}},
    {"name": "PDA", "optimizer": "MirrorDescent", "lr": 0.1},
    {"name": "warm", "optimizer": "SGD", "lr": 0.1, "warm_start": {"lr": 0.5, "epochs": 20, "batch_size": 10}},
    {"name": "ideal", "optimizer": "SGD", "lr": 0.1, "precondition": {"rule": "raw_ideal_rmsprop"}},
    {"name": "without privacy", "optimizer": "SGD", "lr": 0.1, "non_private": True},
]


def test_what_is_reconstructed_is_compared_by_loss(tmp_path: Any):
    raw: dict[str, Any] = {
        "title": "test",
        "data": {"name": "digits", "standardise": False, "reconstruct": True, "validation": 200, "public": 37}
        | {"elsewhere": {"name": "digits", "standardise": False}},
        "model": {"name": "autoencoder"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "num_examples": 1200}
        | {"expected_batch_size": 60, "steps": 2},
        "methods": [
            {"name": "plain", "optimizer": "SGD", "max_grad_norm": [0.1, 1.0], "lr": [0.1, 1.0]},
            {
                "name": "other",
                "optimizer": "SGD",
                "lr": 0.1,
                "max_grad_norm": 3.0,
                "precondition": {"rule": "public_rmsprop"},
            }
            | {"public": {"other": True, "examples": 20, "batch_size": 10}},
        ],
        "tuning": {"seeds": [0], "by": "loss"},
        "run": {"evaluations": 1},
    }
    spec = check_spec(raw, "test.toml")
    records = compare(spec, tmp_path, progress=False)
    tuning = [record for record in records if record["phase"] == "tuning"]
    best = min(tuning, key=lambda record: record["validation_loss"])
    plain, other = (record for record in records if record["phase"] == "final")
    assert (plain["max_grad_norm"], plain["lr"]) == (best["max_grad_norm"], best["lr"])
    assert other["side_information"] == "public data: 20 examples from elsewhere"
    assert all(record["test_accuracy"] is None for record in records)
    page = write_report(records, context(spec, records, tmp_path, command=""), tmp_path)
    assert "has the lowest mean test loss" in page.read_text()
    assert "(plain), 3 (other)" in page.read_text()
    del raw["data"]["elsewhere"]
    with pytest.raises(pg.PrivacyError, match="other public data"):
        compare(check_spec(raw, "test.toml"), tmp_path / "new", progress=False)
    raw["methods"][1]["public"] = {"examples": 38}
    with pytest.raises(pg.PrivacyError, match="at most 37"):
        compare(check_spec(raw, "test.toml"), tmp_path / "new", progress=False)


def test_methods_with_side_information_run_side_by_side(tmp_path: Any):
    raw: dict[str, Any] = {
        "title": "test",
        "data": {"name": "digits", "validation": 200, "public": 37},
        "model": {"name": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "num_examples": 1200}
        | {"expected_batch_size": 120, "steps": 3},
        "methods": METHODS,
        "tuning": {"seeds": [0]},
        "run": {"seeds": [0, 1], "evaluations": 1},
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
    with pytest.raises(pg.PrivacyError, match=r"data.public"):
        check_spec(raw, "test")
