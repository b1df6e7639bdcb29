"""Items of the papers: found, run small, set beside the paper, gone on with."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import privgrad as pg
from privgrad.cli import app
from privgrad.experiments.reproduce import items, reproduce
from privgrad.experiments.runs import best_lr

RUNNER = CliRunner()


@pytest.mark.parametrize("name", items())
def test_every_item_runs_small(name: str, tmp_path: Path):
    answer = RUNNER.invoke(app, ["reproduce", name, "--smoke", "--json", "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "out" / "table.json").read_text())
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    again = RUNNER.invoke(app, ["reproduce", name, "--smoke", "--out", str(tmp_path / "out")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "runs.jsonl").read_text().splitlines() == lines


def test_an_unknown_item_is_refused_with_the_list(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="dp-adam/table1"):
        reproduce("dp-adam/table9", tmp_path)
    assert RUNNER.invoke(app, ["reproduce"]).stdout.split() == items()


def test_noise_moments_beside_the_paper(tmp_path: Path):
    found, table = reproduce("dp-adam/table1", tmp_path, smoke=True, progress=False)
    last = found["t=20000"]
    assert last["divisor"] == 255
    assert last["min"] < last["q1"] < last["median"] < last["q3"] < last["max"]
    assert last["difference"]["mean"] == pytest.approx(last["mean"] / 2.461e-8 - 1)
    assert found["t=20000, divisor 256"]["mean"] < last["mean"]
    assert table.row_count == 6


def test_the_grid_grows_until_its_best_is_inside(tmp_path: Path):
    found, _ = reproduce("heavy-tail/fig2", tmp_path, smoke=True, progress=False)
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    for method, row in found.items():
        tried = row["lrs_tried"]
        assert row["lr"] == best_lr(records, method, "train_loss")
        assert len(tried) == 16 or min(tried) < row["lr"] < max(tried)
        assert set(row["groups"]) == {"16", "8", "4"}
