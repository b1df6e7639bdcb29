"""Trainings of a TOML on a device, and in mixed precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from privgrad_lab import build, runner
from privgrad_lab.load_spec import check_spec
from privgrad_lab.metrics import measure
from privgrad_lab.papers.reproduce import _WHOLE, _load, items, reproduce
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


def test_a_folder_goes_on_with_another_device(tmp_path: Path):
    comparison = spec_of(device="cpu", seeds=[0])
    (record,) = runner.compare(comparison, tmp_path, progress=False)
    assert record["device"] == "cpu"
    assert runner.compare(spec_of(device="auto", seeds=[0]), tmp_path, progress=False) == [record]
    with pytest.raises(pg.PrivacyError, match="a different run"):
        runner.compare(spec_of(device="auto", seeds=[1]), tmp_path, progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_here_is_refused_before_the_data_are_loaded(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match=r"run\.device to be a device that torch finds, got 'cuda'; choose auto"):
        reproduce("heavy-tail/fig2", tmp_path / "new", smoke=True, device="cuda")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [name for name in items() if _load(name).get("kind", "") not in ("table", *_WHOLE)])
def test_every_item_takes_a_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where the item's file has none; those of a table are other items."""
    seen: list[str] = []

    def device_of(spec: Spec) -> str:
        seen.append(spec.run.device)
        raise NotImplementedError

    monkeypatch.setattr(build, "device_of", device_of)
    for device in ("auto", "cuda"):
        with pytest.raises(NotImplementedError):
            reproduce(name, tmp_path / device, device=device)
    with pytest.raises(NotImplementedError):
        reproduce(name, tmp_path / "default")
    assert seen == ["auto", "cuda", "auto"]
    assert "device" not in _load(name).get("run", {})
