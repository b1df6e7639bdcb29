"""Kinds "bias" and "runtime": what is measured along a training leaves it alone, and is what is shown."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import privgrad as pg
from privgrad_lab.calls import Call
from privgrad_lab.load_spec import check_spec
from privgrad_lab.papers.probes import _shown, clipping_bias, runtime
from privgrad_lab.papers.reproduce import prepared, reproduce
from privgrad_lab.records import Record, read_records
from privgrad_lab.report import figures
from privgrad_lab.spec import Spec

pytestmark = pytest.mark.usefixtures("by_rdp")


def smoke(name: str) -> tuple[Spec, dict[str, Any]]:
    raw = prepared(name, smoke=True)
    probe = raw.pop("probe")
    return check_spec({key: value for key, value in raw.items() if key not in ("kind", "stands_in_for")}, name), probe


def key_of(record: Record) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("method", "seed", "step", "batch_size", "gradients"))


@pytest.fixture(scope="module")
def figure5(by_rdp: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("fig5")
    return reproduce("bam/fig5", out, smoke=True, progress=False)[0], out


def test_every_record_keeps_the_identities(figure5: tuple[dict[str, Any], Path]):
    records = read_records(figure5[1])
    methods = {(record["method"], record["gradients"]) for record in records}
    assert methods == {("DP-SGD", "plain"), *((name, at) for name in ("DP-SAT", "BAM") for at in ("plain", "own"))}
    for record in records:
        along, across, norm = (record[f"raw_{key}"] for key in ("along", "across", "norm"))
        assert record["raw_bias"] <= record["raw_bound"] + 1e-6
        assert record["raw_bias"] == pytest.approx(math.hypot((along - 1) * norm, across), rel=1e-4)
        assert record["raw_cosine"] == pytest.approx(along * norm / math.hypot(along * norm, across), rel=1e-4)


def test_until_its_first_release_sat_is_sgd(figure5: tuple[dict[str, Any], Path]):
    records = {key_of(record): record for record in read_records(figure5[1])}
    for size in (8, 64):
        sgd, sat = (records[method, 0, 1, size, "plain"] for method in ("DP-SGD", "DP-SAT"))
        assert sgd | {"method": ""} == sat | {"method": ""}


def test_what_is_shown_is_the_mean_over_the_steps(figure5: tuple[dict[str, Any], Path]):
    found, out = figure5
    assert list(found) == ["batch_size=8", "batch_size=64"]
    wanted = [
        record["raw_bias"]
        for record in read_records(out)
        if (record["method"], record["batch_size"], record["gradients"]) == ("BAM", 64, "own")
    ]
    assert len(wanted) == 2
    assert found["batch_size=64"]["BAM, own"] == {"raw_bias": {"mean": pytest.approx(fmean(wanted)), "std": None}}
    assert "NOT PRIVATE" in (out / "table.txt").read_text()
    assert (out / "curves.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("numbers", "label"),
    [
        (["raw_ascent", "raw_released"], "cosine, NOT PRIVATE"),
        (["raw_bias"], "|clipped g - g|, NOT PRIVATE"),
        (["seconds"], "seconds per step"),
    ],
)
def test_the_plot_says_what_its_numbers_are(
    numbers: list[str], label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "png", lambda draw: drawn.append(draw()) or b"")
    curves = {("BAM", number): {0: {1: [0.2, 0.4], 2: [0.1, 0.1]}} for number in numbers}
    _shown(curves, "step", "title", "caption", tmp_path)
    (ax,) = drawn[0].axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", label)
    assert len(drawn[0].legends) == len(numbers) - 1
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


@pytest.mark.slow
def test_looking_changes_no_training_and_an_interrupted_one_is_gone_on_with(
    figure5: tuple[dict[str, Any], Path], tmp_path: Path
):
    spec, probe = smoke("bam/fig5")
    clipping_bias(spec, probe | {"at": [2]}, tmp_path / "once", progress=False)
    records = read_records(figure5[1])
    assert read_records(tmp_path / "once") == [record for record in records if record["step"] == 2]
    clipping_bias(spec, probe, tmp_path / "cut", progress=False)
    path = tmp_path / "cut" / "runs.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"BAM"' not in line]
    path.write_text("".join(lines))
    clipping_bias(spec, probe, tmp_path / "cut", progress=False)
    assert read_records(tmp_path / "cut") == records


def test_time_is_taken_of_every_method_depth_and_trial(tmp_path: Path):
    threads, small = torch.get_num_threads(), torch.full((), 1e-40)
    found, _ = reproduce("bam/fig3", tmp_path, smoke=True, progress=False)
    assert torch.get_num_threads() == threads
    assert small * 1 > 0  # numbers this small are taken as zero during the measurement only
    records = read_records(tmp_path)
    assert len(records) == 2 * 2 * 4
    assert all(len(record["seconds"]) == 2 and min(record["seconds"]) > 0 for record in records)
    assert list(found) == ["depth=1", "depth=3"]
    trials = [fmean(r["seconds"]) for r in records if (r["method"], r["depth"]) == ("BAM, exact", 3)]
    assert found["depth=3"]["BAM, exact"]["seconds"]["mean"] == pytest.approx(fmean(trials))
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(line for line in lines if json.loads(line)["depth"] == 1))
    again, _ = reproduce("bam/fig3", tmp_path, smoke=True, progress=False)
    assert again["depth=1"] == found["depth=1"]
    assert again["depth=3"].keys() == found["depth=3"].keys()


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    spec, probe = smoke("bam/fig2")
    tuned = spec.methods[0].model_copy(update={"optimizer": Call(use="SGD")})
    with pytest.raises(pg.PrivacyError, match="one lr"):
        clipping_bias(spec.model_copy(update={"methods": [tuned]}), probe, tmp_path / "tuned", progress=False)
    spec, probe = smoke("bam/fig3")
    with pytest.raises(ValueError, match="islice"):  # more trials than steps
        runtime(spec, probe | {"trials": 4}, tmp_path / "runtime", progress=False)
