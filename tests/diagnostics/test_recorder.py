"""Diagnostics along a training, from the gradient to the page: what they say is so, and they change nothing."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.diagnostics import RawRecorder
from privgrad.private_gradient import RawStep
from privgrad_lab.load_spec import check_spec
from privgrad_lab.records import diagnosed, diagnosis, histograms
from privgrad_lab.report import figures
from privgrad_lab.report.metadata import metadata_of
from privgrad_lab.report.page import write_report
from privgrad_lab.runner import Run, _ClipFraction, compare, train
from privgrad_lab.spec import Spec

SPEC: dict[str, Any] = {
    "title": "a test",
    "data": {"use": "digits", "validation": 240},
    "model": {"use": "mlp", "hidden": 8},
    "privacy": {
        "target_epsilon": 1.0,
        "delta": 1e-5,
        "max_grad_norm": 1.0,
        "num_examples": 1197,
        "expected_batch_size": 120,
        "steps": 6,
    },
    "methods": [
        {"name": "DP-SGD", "optimizer": {"use": "SGD", "lr": 0.5}},
        {"name": "DP-Adam", "optimizer": {"use": "Adam", "lr": 0.01}},
        {"name": "DP-AdamBC", "optimizer": "AdamBC"},
    ],
    "tuning": {"lr": [0.01, 0.1], "seeds": [9]},
    "run": {"seeds": [0, 1], "num_evaluations": 3},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, by_rdp: None) -> dict[bool, tuple[Path, list[dict[str, Any]]]]:
    """The same comparison, with diagnostics and without."""
    found: dict[bool, tuple[Path, list[dict[str, Any]]]] = {}
    for diagnose in (False, True):
        out = tmp_path_factory.mktemp(f"diagnose-{diagnose}")
        spec = check_spec(SPEC | {"run": SPEC["run"] | {"diagnose": diagnose}}, "test")
        found[diagnose] = out, compare(spec, out, progress=False)
    return found


def test_released_gradients_are_the_same_to_the_last_bit(both: dict[bool, tuple[Path, list[dict[str, Any]]]]):
    """Under a research seed, ledgers keep a hash of each gradient."""
    ledgers = {on: sorted(out.glob("runs/*/ledger.jsonl")) for on, (out, _) in both.items()}
    assert [p.parent.name for p in ledgers[True]] == [p.parent.name for p in ledgers[False]]
    digests = {
        on: [json.loads(line).get("digest") for path in paths for line in path.read_text().splitlines()]
        for on, paths in ledgers.items()
    }
    assert digests[True] == digests[False]
    assert sum(digest is not None for digest in digests[True]) == 6 * len(ledgers[True]) == 6 * 8


def test_only_who_asks_gets_what_is_not_private_and_records_stay_small(
    both: dict[bool, tuple[Path, list[dict[str, Any]]]],
):
    (_, plain), (watched_at, watched) = both[False], both[True]
    measured = [key for run in plain for row in (run, *run["curve"]) for key in row if key.startswith("raw_")]
    assert measured == ["raw_clip_fraction"] * len(plain)  # under a research seed, once per training
    for one, other in zip(plain, watched, strict=True):
        stripped = [{k: v for k, v in row.items() if k in one["curve"][0]} for row in other["curve"]]
        assert stripped == one["curve"]
        assert all(("raw_layers" in row) == (other["phase"] == "final") for row in other["curve"])
        assert len(json.dumps(other)) < 8000
        kept = [index for index, row in enumerate(other["curve"]) if "raw_moments" in row]
        assert kept == ([2] if other["phase"] == "final" and other["method"] != "DP-SGD" else [])
    assert len(watched) == 8
    assert (watched_at / "runs.jsonl").exists()


def one_method(method: str = "DP-SGD", *, norm: float = 1.0, diagnose: bool = False, **options: Any) -> Spec:
    """The experiment with one method and one rate."""
    changed = next(table for table in SPEC["methods"] if table["name"] == method) | {"max_grad_norm": norm} | options
    run = {"num_evaluations": 3, "diagnose": diagnose}
    return check_spec({k: v for k, v in SPEC.items() if k != "tuning"} | {"methods": [changed], "run": run}, "test")


def keys_in(value: Any) -> set[str]:
    """Every key of nested tables and lists."""
    if isinstance(value, dict):
        return {str(key) for key in value} | {key for inner in value.values() for key in keys_in(inner)}
    return {key for inner in value for key in keys_in(inner)} if isinstance(value, list | tuple) else set()


def saved_by(out: Path) -> tuple[str, set[str]]:
    """The text of runs.jsonl and the ledger, and every key of the checkpoint."""
    (ledger,), (checkpoint,) = out.glob("runs/*/ledger.jsonl"), out.glob("runs/*/checkpoint.pt")
    keys = keys_in(torch.load(checkpoint, weights_only=False))
    assert "curve" in keys
    return (out / "runs.jsonl").read_text() + ledger.read_text(), keys


def test_the_share_clipped_is_recorded(tmp_path: Path, by_rdp: None):
    (record,) = train(one_method(norm=1e6), tmp_path / "large", seed=0, progress=False)
    assert record["raw_clip_fraction"] == 0.0
    (record,) = train(one_method(norm=1e-6), tmp_path / "small", seed=0, progress=False)  # warnings are errors here
    assert record["raw_clip_fraction"] == 1.0
    (record,) = train(one_method(norm=1e6, non_private=True), tmp_path / "none", seed=0, progress=False)
    assert "raw_clip_fraction" not in record


@pytest.mark.parametrize("diagnose", [False, True])
def test_a_private_run_keeps_what_came_before_its_noise_apart(diagnose: bool, tmp_path: Path, by_rdp: None):
    spec = one_method("DP-Adam", norm=1e6, diagnose=diagnose)  # and no warning of the clip fraction
    (record,) = train(spec, tmp_path, progress=False)
    text, keys = saved_by(tmp_path)
    assert record["seed"] is None
    assert "raw_" not in text.replace("raw_nonfinite_examples", "")
    assert {key for key in keys if key.startswith("raw_")} <= {"raw_nonfinite_examples"}
    assert (tmp_path / "raw").exists() == diagnose
    if diagnose:
        name = Run(spec.methods[0], spec.grid(spec.methods[0])[0], None, "final").name
        assert [path.name for path in (tmp_path / "raw").iterdir()] == [f"{name}.jsonl"]
        rows = [json.loads(line) for line in (tmp_path / "raw" / f"{name}.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [row["step"] for row in record["curve"]] == [2, 4, 6]
        assert all({"raw_clip_fraction", "raw_layers", "raw_moments"} <= row.keys() for row in rows)


def test_a_run_under_a_research_seed_has_its_diagnostics_in_its_curve(tmp_path: Path, by_rdp: None):
    spec = one_method("DP-Adam", norm=0.01, diagnose=True)
    (record,) = train(spec, tmp_path, seed=0, progress=False)
    assert all("raw_layers" in row for row in record["curve"])
    assert record["raw_clip_fraction"] == 1.0
    assert "raw_layers" in saved_by(tmp_path)[1]
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize(("steps", "counted"), [(25, [22, 23, 24]), (20, [18, 19]), (6, [5]), (1, [0])])
def test_the_clip_fraction_is_that_of_the_last_tenth_of_the_steps(steps: int, counted: list[int]):
    """Every example of one step is clipped, and none of the other ones: the share counts examples."""
    plan = make_plan(steps=steps, seed=2)
    seen: list[RawStep] = []
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    private_grad.register_raw_observer(lambda raw: seen.append(copy.deepcopy(raw)))
    for batch in plan.batches(make_data()):
        private_grad(batch)
    sizes = [len(raw.clipping.raw_factors) for raw in seen]
    for clipped in range(steps):
        found = _ClipFraction(steps)
        assert found.fraction is None
        for raw in seen:
            raw.clipping.raw_factors[:] = 0.5 if raw.step == clipped else 1.0
            found.observe(raw)
        total = sum(sizes[step] for step in counted)
        assert found.fraction == pytest.approx(sizes[clipped] / total if clipped in counted else 0.0)


def test_a_noise_step_has_the_diagnostics_of_its_learning_rate(tmp_path: Path, by_rdp: None):
    """Moments are in units of the noise, whichever rate was given."""
    found = []
    for rate in ({"lr": 0.02}, {"noise_step": 0.02}):
        optimizer = {"use": "AdamBC", "debias_floor": 1.0} | rate
        spec = one_method("DP-AdamBC", norm=0.1, diagnose=True, optimizer=optimizer)
        found += train(spec, tmp_path / next(iter(rate)), seed=0, progress=False)
    by_lr, by_step = found
    assert by_lr["noise_step"] == pytest.approx(by_step["noise_step"], rel=1e-3)
    assert (by_lr["lr"], by_step["lr"]) == (0.02, None)
    for one, other in zip(by_lr["curve"], by_step["curve"], strict=True):
        assert one["raw_clip_fraction"] == pytest.approx(other["raw_clip_fraction"], rel=1e-2)
        assert one["raw_signal_to_noise"] == pytest.approx(other["raw_signal_to_noise"], rel=1e-2)
    one, other = (record["curve"][-1]["raw_moments"] for record in found)
    assert one.keys() == other.keys()
    for kind in one:
        assert sum(abs(a - b) for a, b in zip(one[kind], other[kind], strict=True)) <= 0.02 * sum(one[kind])


def test_rows_are_what_they_say():
    """By hand, over the steps since the row before; moments over all steps."""
    model, plan = make_model(torch.float64), make_plan(seed=3, steps=5, max_grad_norm=0.5)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    diary = RawRecorder(optimizer)
    assert diary.row() == {}
    seen: list[RawStep] = []
    private_grad.register_raw_observer(diary.observe)
    private_grad.register_raw_observer(lambda raw: seen.append(copy.deepcopy(raw)))
    for index, batch in enumerate(plan.batches(make_data(dtype=torch.float64))):
        optimizer.step(grad=private_grad(batch))
        if index == 2:
            diary.row()
    row = diary.row()
    last, noise_std = seen[3:], plan.noise_multiplier * plan.max_grad_norm / plan.expected_batch_size
    factors = torch.cat([raw.clipping.raw_factors for raw in last])
    assert row["raw_clip_fraction"] == pytest.approx(float((factors < 1).double().mean()), rel=1e-3)
    assert list(row["raw_layers"]) == ["0", "2"]
    for name, layer in row["raw_layers"].items():
        own = [key for key in last[0].raw_mean if key.startswith(name)]
        signal = sum(float(raw.raw_mean[key].square().sum()) for raw in last for key in own)
        size = sum(last[0].raw_mean[key].numel() for key in own)
        noise = len(last) * size * noise_std**2
        assert layer["raw_signal_to_noise"] == pytest.approx(math.sqrt(signal / noise), rel=1e-3)
        counts = [optimizer.floored()[key] for key in own]
        assert layer["fraction_floored"] == pytest.approx(sum(c[0] for c in counts) / size, rel=1e-3)
    moments = row["raw_moments"]
    edges = torch.tensor(moments["edges"], dtype=torch.float64)
    assert len(edges) - 1 < 50
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert all(sum(moments[kind]) == sum(sizes) for kind in ("raw_clean", "noisy", "debiased"))
    noise_var = 1 - optimizer.defaults["betas"][1] ** 5
    squares = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()])
    ratios = (squares / (noise_var * noise_std**2)).clamp(edges[0], edges[-1])
    assert moments["noisy"] == torch.histogram(ratios, edges).hist.long().tolist()
    floored = optimizer.fraction_floored() * sum(sizes)
    assert max(moments["debiased"]) >= floored  # all that is on the floor is in one bin
    assert diary.row() == {}  # since the last, no step


def test_the_sums_of_coordinates_on_the_floor_are_the_fraction():
    model, plan = make_model(), make_plan(seed=1, steps=4)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    for kind in (pg.optim.AdamBC, pg.optim.RMSpropBC, pg.optim.AdagradBC):
        optimizer = kind(model.named_parameters(), lr=0.0)
        assert optimizer.floored() == {}
        assert math.isnan(optimizer.fraction_floored())
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.0)
    for batch in plan.batches(make_data()):
        optimizer.step(grad=private_grad(batch))
    floored = optimizer.floored()
    assert {name: count for name, (_, count) in floored.items()} == {n: p.numel() for n, p in model.named_parameters()}
    total = sum(count for _, count in floored.values())
    assert optimizer.fraction_floored() == sum(on_floor for on_floor, _ in floored.values()) / total > 0


ENDS = {
    "DP-SGD": "",
    "DP-Adam": "is noise; AdamBC subtracts it (docs/choosing.md says when that helped).",
    "DP-AdamBC": "was noise variance, which the optimizer subtracts.",
}


def test_the_page_tells_plots_and_tags_them(
    both: dict[bool, tuple[Path, list[dict[str, Any]]]], tmp_path: Path, request: pytest.FixtureRequest
):
    for on, (out, records) in both.items():
        spec = check_spec(SPEC | {"run": SPEC["run"] | {"diagnose": on}}, "test")
        page = write_report(records, metadata_of(spec, records, out, command=""), tmp_path).read_text()
        assert ("Diagnostics were requested" in page) is on
        assert ('id="diagnostics">Diagnostics <span class="tag">NOT PRIVATE</span>' in page) is on
        assert all((tmp_path / f"{name}.png").exists() is on for name in ("diagnosis", "moments"))
        assert page.count("<img") == page.count('alt="') == (5 if on else 3)
        assert ("(computed from released numbers: covered by ε). Lines" in page) is on
        assert ("DP-AdamBC:</b> Clipping shortened" in page) is on
        said = dict(re.findall(r"<li><b>(\S+):</b> (Clipping .*?)</li>", page))
        ends = {method: text.partition(" of its second moment ")[2] for method, text in said.items()}
        assert ends == (ENDS if on else {})
        assert "DP-SGD" not in said or "second moment" not in said["DP-SGD"]
    request.getfixturevalue("without_rendering")
    fixed = [record | {"sampling": "fixed"} for record in both[True][1]]
    told = metadata_of(check_spec(SPEC, "test"), fixed, both[True][0], command="")
    page = write_report(fixed, told, tmp_path).read_text()
    assert "(computed from released numbers). Lines" in page
    records = both[True][1]
    found = diagnosis(diagnosed(records)["DP-AdamBC"])
    assert 0 <= found["raw_clip_fraction"] <= 1
    shares = histograms(diagnosed(records)["DP-AdamBC"])
    assert sum(shares["noisy"]) == pytest.approx(1)
    assert "debiased" not in histograms(diagnosed(records)["DP-Adam"])
    assert histograms(diagnosed(records)["DP-SGD"]) == {}


@pytest.mark.parametrize("narrow", [False, True])
def test_odd_diaries_are_drawn_too(narrow: bool):
    """Many layers, no noise, steps lost, one method."""
    layer = {"raw_signal_to_noise": None, "noise_share": None}
    numbers = {"raw_clip_fraction": None, "raw_kept": None, "raw_signal_to_noise": None, "noise_share": None}
    row = {"step": 5, "epsilon": None, **numbers, "raw_layers": {f"block.{i}.mlp": layer for i in range(30)}}
    record: dict[str, Any] = {"method": "M", "phase": "final", "curve": [{"step": 1, "epsilon": None}, row]}
    figure = figures.diagnosis_figure([record], narrow=narrow)
    assert len(figure.axes) == 2
    told = copy.deepcopy(record)
    for index, one in enumerate(told["curve"][-1]["raw_layers"].values()):
        one |= {"raw_signal_to_noise": 0.1 + index, "fraction_floored": 0.5}
    figure = figures.diagnosis_figure([record, told | {"method": "other"}], narrow=narrow)
    assert len(figure.axes) == 5
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == 7
    assert labels[0] == "layer block.0.mlp"
    assert labels[-1] == "layer block.29.mlp"
    assert figures.png(lambda: figure).startswith(b"\x89PNG")
