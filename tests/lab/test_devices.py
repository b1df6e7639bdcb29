"""Trainings of a TOML on a device, and in mixed precision."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data_sparse import write_tweets
from typer.testing import CliRunner

import privgrad as pg
from privgrad.cli import app
from privgrad_lab import build, runner
from privgrad_lab.load_spec import check_spec
from privgrad_lab.metrics import measure
from privgrad_lab.papers.reproduce import _WHOLE, items, keys_of, reproduce
from privgrad_lab.records import describe, read_records
from privgrad_lab.spec import Spec
from privgrad_lab.trial import Estimate, estimate

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


@pytest.mark.parametrize("name", [name for name in items() if keys_of(name).get("kind", "") not in ("table", *_WHOLE)])
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
    assert "device" not in keys_of(name).get("run", {})


def test_a_trial_foretells_the_trainings_that_are_left_and_changes_none(tmp_path: Path):
    """Also where methods take points of their own, or have no privacy, and where tuning simulates."""
    raw = RAW | {
        "methods": [
            {"name": "DP-SGD", "optimizer": {"use": "SGD", "lr": [1.0, 2.0]}},
            {"name": "BAM", "optimizer": {"use": "SGD", "lr": 2.0}, "perturb": {"use": "BAM", "radius": 0.02}},
            {"name": "SGD", "optimizer": {"use": "SGD", "lr": 2.0}, "non_private": True},
        ],
        "tuning": {"seeds": [100, 101], "simulate": 4, "by": "loss"},
        "run": {"num_evaluations": 1, "seeds": [0, 1]},
    }
    spec = check_spec(raw, "test.toml")
    told: list[Estimate] = []
    plain = runner.compare(spec, tmp_path / "plain", progress=False)

    def begin(data: Any) -> None:
        random = torch.get_rng_state()
        found = estimate(spec, data, read_records(tmp_path / "tried"))
        assert torch.equal(torch.get_rng_state(), random)
        told.extend([] if found is None else [found])

    tried = runner.compare(spec, tmp_path / "tried", progress=False, begin=begin)
    for records in (plain, tried):
        for record in records:
            for name in ("seconds", "examples_per_second"):
                del record[name]
    assert tried == plain
    plain_ledgers, ledgers = (len(list(tmp_path.glob(f"{one}/runs/*/ledger.jsonl"))) for one in ("plain", "tried"))
    assert ledgers == plain_ledgers == 10
    assert [one.trainings for one in told] == [2 * 2 + 3 * 2]
    assert 0 < told[0].seconds < 600
    assert told[0].gigabytes > 0.05
    assert told[0].text(price_per_hour=3600 / told[0].seconds).count("cost 1.00, for 10 trainings") == 1
    runner.compare(spec, tmp_path / "tried", progress=False, begin=begin)
    assert len(told) == 1  # nothing is left


def test_the_time_of_more_trainings_is_larger():
    """Half of the trainings, with the times of one trial."""
    spec = spec_of(seeds=[0, 1, 2, 3])
    data = runner.checked_data(spec)
    few, many = (estimate(spec_of(seeds=seeds), data) for seeds in ([0], list(range(1000))))
    assert few is not None
    assert many is not None
    assert many.seconds > 10 * few.seconds


@pytest.mark.parametrize("name", ["adadps/features", "heavy-tail/fig1", "adadps/toy"])
def test_a_dry_run_of_an_item_writes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tweets(tmp_path / "cache" / "privgrad" / "tweets", rows=600)
    command = ["reproduce", name, "--smoke", "--dry-run", "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, [*command, "--price-per-hour", "2"])
    assert answer.exit_code == 0, answer.output
    assert not (tmp_path / "out").exists()
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert ("no trainings" in answer.stdout) == (found == {})
    assert [line.partition(":")[0] for line in answer.stdout.splitlines()] == (list(found) or [name])
    if name == "heavy-tail/fig1":
        assert found[name]["trainings"] == 1
