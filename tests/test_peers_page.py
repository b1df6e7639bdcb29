"""The benchmark of other libraries: each script at a tiny size, what is run again, and the page from the records."""

import importlib
import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.accuracy import run
from benchmarks.accuracy.task import Task, record, save
from pages import ROOT

ROWS = {"train": 60, "test": 20}
RECIPE = {"batch_size": 30, "steps": 3, "clip": 0.1, "noise_step": 0.15, "schedule": "cosine", "momentum": 0.9}
COLUMNS = [
    {"name": "age", "kind": "number", "edges": [0, 30, 60, 90]},
    {"name": "job", "kind": "category", "values": ["a", "b", "c"]},
]
# The libraries, and the package without which a script cannot run.
LIBRARIES = {
    "privgrad": "privgrad",
    "opacus": "opacus",
    "jax-privacy": "jax_privacy",
    "dp-ebm": "interpret",
    "diffprivlib": "diffprivlib",
}


def tiny(folder: Path, task: str) -> Task:
    """Write a task with random rows."""
    rng = np.random.default_rng(0)
    kind = {"adult": "table", "fashion-mnist": "images"}.get(task, "texts")
    outputs = 2 if task == "adult" else 10
    facts: dict[str, Any] = {"task": task, "kind": kind, "metric": "recall@5" if task == "tags" else "accuracy"}
    facts |= {"num_classes": outputs, "epsilon": 3.0, "delta": 1e-3, "num_examples": 60, "recipe": RECIPE}
    arrays: dict[str, Any] = {}
    for part, rows in ROWS.items():
        arrays[f"features_{part}"] = rng.normal(size=(rows, 6)).astype(np.float16)
        labels = rng.integers(0, outputs, rows)
        arrays[f"labels_{part}"] = np.eye(outputs, dtype=np.uint8)[labels] if task == "tags" else labels
        if kind == "table":
            ages, jobs = rng.integers(0, 90, rows), rng.integers(0, 3, rows)
            arrays[f"values_{part}"] = np.stack([ages, jobs], axis=1).astype(float)
        elif kind == "images":
            arrays[f"pixels_{part}"] = rng.integers(0, 256, (rows, 28, 28)).astype(np.uint8)
        else:
            arrays[f"tokens_{part}"] = rng.integers(0, 50, (rows, 8)).astype(np.int32)
            arrays[f"words-rows_{part}"] = np.arange(rows)
            arrays[f"words-columns_{part}"] = rng.integers(0, 12, rows)
            arrays[f"words-values_{part}"] = np.ones(rows, np.float32)
    facts |= {"columns": COLUMNS} if kind == "table" else {"tokens": 50, "words": 12} if kind == "texts" else {}
    save(folder, facts, arrays)
    return Task(folder)


# These take 4 to 20 s; another task of each script runs.
_LONG = {
    ("privgrad", "example", "fashion-mnist"),
    *(("opacus", "recipe", task) for task in ("adult", "tags", "fashion-mnist")),
}
CASES = [
    pytest.param(library, variant, task, marks=[pytest.mark.slow] if (library, variant, task) in _LONG else [])
    for library, variants in run.PLAN.items()
    for variant, tasks in variants.items()
    for task in tasks
]


@pytest.mark.filterwarnings("ignore")  # of the other libraries
@pytest.mark.parametrize(("library", "variant", "task"), CASES)
def test_a_script_trains_at_the_epsilon_of_the_task(tmp_path: Path, library: str, variant: str, task: str):
    pytest.importorskip(LIBRARIES[library], reason=f"{library} is not installed here: its script is not tested")
    script = importlib.import_module(f"benchmarks.accuracy.with_{library.replace('-', '_')}")
    made = tiny(tmp_path, task)
    packages = [name for name in script.PACKAGES if name != "privgrad"]
    result = record(made, variant, 0, script.trained, packages)
    assert 0 <= result["score"] <= 1
    assert 0 < result["epsilon"] <= made.epsilon * (1 + 1e-6)
    assert result["delta"] in (made.delta, 0.0)
    assert (result["train_rows"], result["test_rows"]) == (60, 20)
    json.dumps(result)


def test_all_scores_are_of_outputs(tmp_path: Path):
    task, tags = tiny(tmp_path / "a", "sections"), tiny(tmp_path / "b", "tags")
    right = np.eye(10)[task.labels("test")]
    assert task.score(right) == 1.0
    assert task.score(-right) == 0.0
    assert tags.score(tags.labels("test").astype(float)) == 1.0
    assert tags.targets("train").sum(1) == pytest.approx(1.0)


def test_a_table_is_coded_by_public_numbers(tmp_path: Path):
    task = tiny(tmp_path, "adult")
    (age, job), codes, bins = task.part("values", "test")[0], task.codes("test")[0], task.bins("test")[0]
    assert codes == pytest.approx([age / 90, *np.eye(3)[int(job)]])
    assert bins.tolist() == [age // 30, job]


def test_a_recorded_training_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[run.Run] = []

    def trained(one: run.Run, gpu: bool) -> dict[str, Any]:
        ran.append(one)
        if one.library == "dp-ebm" and one.seed == 1:
            raise RuntimeError("stopped")
        return {**one._asdict(), "score": 0.5}

    monkeypatch.setattr(run, "trained", trained)
    monkeypatch.setattr(run, "prepare", lambda task, library: "no network" if library == "opacus" else None)
    out, arguments = tmp_path / "records.jsonl", ["--task", "adult"]
    app = run.typer.Typer()
    app.command()(run.main)
    first = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert first.exit_code == 1
    assert "NOT RUN: opacus on adult: no network" in first.output
    assert first.output.count("FAILED") == 2
    wanted = [one for one in run.planned() if one.task == "adult" and one.library != "opacus"]
    assert ran == wanted
    ran.clear()
    CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert {(one.library, one.seed) for one in ran} == {("dp-ebm", 1)}


@pytest.mark.parametrize("gpu", [False, True])
def test_a_training_sees_a_gpu_only_where_asked(monkeypatch: pytest.MonkeyPatch, gpu: bool):
    seen: dict[str, str] = {}

    def process(command: list[str], *, env: dict[str, str], **rest: Any) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, stdout='a line before\n{"score": 0.5, "gpu": null}\n')

    for name in run.NO_GPU:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run.subprocess, "run", process)
    one = run.Run("tags", "jax-privacy", "recipe", 0)
    assert run.key_of(run.trained(one, gpu)) == one
    assert seen.items() >= run.ONE_THREAD.items()
    assert (seen.items() >= run.NO_GPU.items()) != gpu
    assert run.NO_GPU.keys().isdisjoint(seen) == gpu


def test_times_are_those_of_processors():
    time = runpy.run_path(str(ROOT / "scripts/peers_page.py"))["time"]
    slow, fast = {"cpu_seconds": 10.0}, {"cpu_seconds": 1.0, "gpu": "NVIDIA H200"}
    assert time([slow, {"cpu_seconds": 20.0, "gpu": None}]) == "15.0 s"
    assert time([slow, fast, fast]) == "10.0 s (1 of 3 seeds)"
    assert time([fast, fast]) == "on a GPU"


def test_the_page_on_other_libraries_is_written_from_the_records():
    written = runpy.run_path(str(ROOT / "scripts/peers_page.py"))
    records = [run.read(ROOT / "results/peers" / f"{name}.jsonl") for name in ("accuracy", "steps")]
    assert (ROOT / "docs/peers.md").read_text() == written["page"](*records)
    assert {run.key_of(one) for one in records[0]} <= set(run.planned())
    assert set(written["VARIANTS"]) == {(name, variant) for name, each in run.PLAN.items() for variant in each}


def test_recorded_trainings_have_the_epsilon_of_their_task():
    targets = {"adult": (1.0, 1e-6), "fashion-mnist": (3.0, 1e-5), "tags": (3.0, 6.97e-5), "sections": (3.0, 1e-5)}
    records = run.read(ROOT / "results/peers/accuracy.jsonl")
    assert len({run.key_of(one) for one in records}) == len(records)
    for one in records:
        epsilon, delta = targets[one["task"]]
        assert 0.95 * epsilon <= one["epsilon"] <= epsilon + 1e-6, one
        assert one["delta"] in (delta, 0.0)


def test_all_records_of_a_task_have_the_same_rows():
    records = run.read(ROOT / "results/peers/accuracy.jsonl")
    rows = {(one["task"], one["train_rows"], one["test_rows"]) for one in records}
    assert len(rows) == len({task for task, _, _ in rows})
