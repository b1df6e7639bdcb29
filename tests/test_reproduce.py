"""Items of the papers: found, run small, set beside the paper, gone on with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import privgrad as pg
from privgrad.cli import app
from privgrad.data import LOADERS
from privgrad.experiments.records import in_phase
from privgrad.experiments.reproduce import items, reproduce
from privgrad.experiments.runs import best_candidate
from privgrad.experiments.spec import encoder_folder

RUNNER = CliRunner()


# What items read that may not be here.
NEEDS: dict[str, Callable[[], Any]] = {
    "adadps/stackoverflow": lambda: LOADERS["debian-tags"](limit=300),
    "adadps/stackoverflow-eps1": lambda: LOADERS["debian-tags"](limit=300),
    "dp-adam/fig1-text": lambda: encoder_folder("sentence-transformers/all-MiniLM-L6-v2"),
    "heavy-tail/barcode": lambda: LOADERS["fashion-mnist"](),
    "heavy-tail/lm": lambda: LOADERS["brown"](),
    "heavy-tail/sections": lambda: LOADERS["debian-sections"](limit=300),
}


@pytest.mark.parametrize("name", items())
def test_every_item_runs_small(name: str, tmp_path: Path):
    try:
        NEEDS.get(name, lambda: None)()
    except pg.PrivacyError as absent:
        pytest.skip(str(absent))
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
    found, table = reproduce("heavy-tail/fig2", tmp_path, smoke=True, progress=False)
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    for method, row in found.items():
        tried = row["lrs_tried"]
        assert row["lr"] == best_candidate(records, method, "train_loss")[1]
        assert len(tried) == 16 or min(tried) < row["lr"] < max(tried)
        assert set(row["groups"]) == {"all", "16", "8", "4"}
        # Tuning by training loss has already done seed 0 of the chosen rate.
        runs = [record for record in records if (record["method"], record["lr"]) == (method, row["lr"])]
        tuning, final = (in_phase(runs, phase) for phase in ("tuning", "final"))
        assert final == [dict(tuning[0]) | {"phase": "final"}]
    shown = tmp_path / "table.txt"
    assert "DP-AdamBC" in shown.read_text()
    assert table.row_count == 16
    assert all((tmp_path / name).stat().st_size > 0 for name in ("index.html", "groups.png", "learning_rate.png"))


def test_an_interrupted_item_is_shown_as_far_as_it_is(tmp_path: Path):
    reproduce("heavy-tail/fig2", tmp_path, smoke=True, progress=False)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"DP-Adam"' in line)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:last]))
    found, table = reproduce("heavy-tail/fig2", tmp_path, smoke=True, so_far=True, progress=False)
    assert [row["seeds"] for row in found.values()] == [1, 1, 0, 0]
    assert found["DP-Adam"]["lrs_tried"]
    assert found["DP-AdamBC"]["lrs_tried"] == []
    assert "2 of 4 final runs were done" in str(table.caption)
    with pytest.raises(pg.PrivacyError, match="so-far"):
        reproduce("dp-adam/table1", tmp_path, smoke=True, so_far=True)
    with pytest.raises(pg.PrivacyError, match="makes its own data"):
        reproduce("heavy-tail/fig2", tmp_path, smoke=True, data=tmp_path)
