"""Trainings of a TOML in mixed precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from privgrad_lab import runner
from privgrad_lab.load_spec import check_spec
from privgrad_lab.metrics import measure
from privgrad_lab.records import describe
from privgrad_lab.spec import Spec

RAW: dict[str, Any] = {
    "title": "digits",
    "data": {"use": "digits", "validation": 100},
    "model": {"use": "mlp", "hidden": 16},
    "privacy": {
        "noise_multiplier": 1.0,
        "delta": 1e-4,
        "max_grad_norm": 1.0,
        "num_examples": 1337,
        "expected_batch_size": 64,
        "steps": 4,
    },
    "methods": [{"name": "DP-SGD", "optimizer": {"use": "SGD", "lr": 2.0}}],
}


def spec_of(**run: Any) -> Spec:
    return check_spec(RAW | {"run": {"num_evaluations": 1} | run}, "test.toml")


def test_a_training_in_mixed_precision_is_that_under_autocast_by_hand(tmp_path: Path):
    """By hand, each step has a context of its own: a context around all steps would keep the first weights."""
    spec = spec_of(autocast="bfloat16")
    (record,) = runner.train(spec, tmp_path / "mixed", seed=3, progress=False)
    data = runner.checked_data(spec)
    made = runner.prepare(spec, runner.Run(spec.methods[0], spec.grid(spec.methods[0])[0], 3, "final"), data)
    for batch in made.plan.batches(data.train):
        with torch.autocast("cpu", torch.bfloat16):
            released = made.private_grad(batch)
        assert all(gradient.dtype == torch.float32 for gradient in released.values())
        made.optimizer.step(grad=released)
    with torch.autocast("cpu", torch.bfloat16):
        measured = measure(made.model, data.test, data)
    assert record["test_loss"] == measured["loss"] != measure(made.model, data.test, data)["loss"]
    (plain,) = runner.train(spec_of(), tmp_path / "plain", seed=3, progress=False)
    assert record["test_loss"] != plain["test_loss"]
    assert record["test_loss"] == pytest.approx(plain["test_loss"], rel=0.05)


def test_precision_belongs_to_an_experiment(tmp_path: Path):
    runner.train(spec_of(), tmp_path, seed=0, progress=False)
    assert "autocast" not in describe(spec_of())
    with pytest.raises(pg.PrivacyError, match="a different run"):
        runner.train(spec_of(autocast="bfloat16"), tmp_path, seed=0, progress=False)
