"""The command line as a user meets it: real processes, real files."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from conftest import make_plan
from privgrad import data
from privgrad.accounting.accountant import Release, epsilon, rounded_up
from privgrad.cli import main
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Ledger
from privgrad_lab.load_spec import load_spec
from privgrad_lab.report.texts import epsilon_text

pytest.importorskip("sklearn")

SPEC = """
title = "test"
[data]
use = "digits"
validation = 240
[model]
use = "mlp"
hidden = 8
[privacy]
target_epsilon = 1.0
delta = 1e-5
max_grad_norm = 1.0
num_examples = 1197
expected_batch_size = 120
steps = 6
[[methods]]
name = "DP-SGD"
optimizer = { use = "SGD", momentum = 0.5 }
[[methods]]
name = "DP-AdamBC"
optimizer = "AdamBC"
[tuning]
lr = [0.01, 0.1]
seeds = [9]
[run]
seeds = [0, 1]
num_evaluations = 2
"""
# The same without a target, which takes seconds to calibrate to, in every process anew.
SIGMA = SPEC.replace("target_epsilon = 1.0", "noise_multiplier = 4.0")
ONE = SPEC.replace('[[methods]]\nname = "DP-SGD"\noptimizer = { use = "SGD", momentum = 0.5 }\n', "").replace(
    'optimizer = "AdamBC"', 'optimizer = { use = "AdamBC", lr = 0.01 }'
)
OLD_FILES = Path(__file__).parents[1] / "old_files" / "experiments"


def privgrad(*arguments: Any, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a process of its own."""
    script = Path(sys.executable).with_name("privgrad")
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        [str(script), *map(str, arguments)], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done


class Here:
    """Run the same entry point in this process: importing torch anew for every line would take minutes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.monkeypatch, self.capsys, self.folder = monkeypatch, capsys, folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        monkeypatch.setattr(sys, "path", list(sys.path))

    def __call__(self, *arguments: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
        self.monkeypatch.setattr(sys, "argv", ["privgrad", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = self.capsys.readouterr()
        assert ended.value.code == code, shown.err + shown.out
        return subprocess.CompletedProcess(sys.argv, code, shown.out, shown.err)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Here:
    return Here(monkeypatch, capsys, tmp_path)


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def test_help_everywhere(here: Here, tmp_path: Path):
    for command in ("train", "compare", "epsilon", "calibrate", "doctor"):
        assert command in here("--help").stdout
        assert "--json" in here(command, "--help").stdout


@pytest.mark.usefixtures("without_rendering")  # in this process; the command's own renders
def test_compare_tunes_reports_and_goes_on(here: Here, tmp_path: Path):
    (tmp_path / "s.toml").write_text(SIGMA)
    done = privgrad("compare", "s.toml", "--out", "out", folder=tmp_path)
    assert "DP-SGD" in done.stdout
    assert "DP-AdamBC" in done.stdout
    assert "research only" in done.stderr
    assert "These 8 trainings used the same data: together they cost ε = " in " ".join(done.stdout.split())
    assert "8/8" in done.stderr
    # The note, the bars' end, and a line for each training: where nobody looks on, no flood of lines.
    assert len(done.stderr.splitlines()) == 10
    records = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    assert [record["phase"] for record in records] == (["tuning"] * 2 + ["final"] * 2) * 2
    assert all(0 < record["epsilon"] <= 1.0 for record in records)
    assert all((record["test_accuracy"] is None) == (record["phase"] == "tuning") for record in records)
    best = {
        name: max((r for r in records if r["method"] == name), key=lambda r: r["validation_accuracy"] or 0)["lr"]
        for name in ("DP-SGD", "DP-AdamBC")
    }
    assert all(r["lr"] == best[r["method"]] for r in records if r["phase"] == "final")
    page = (tmp_path / "out/index.html").read_text()
    assert "DP-AdamBC" in page
    assert (tmp_path / "out/accuracy.png").read_bytes().startswith(b"\x89PNG")

    # A run lost from the record is looked up again in its folder; the others are left alone.
    lines = (tmp_path / "out/runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out/runs.jsonl").write_text("".join(lines[:-1]))
    again = last_json(here("compare", "s.toml", "--out", "out", "--json"))
    assert {row["method"] for row in again["methods"]} == {"DP-SGD", "DP-AdamBC"}
    regained = json.loads((tmp_path / "out/runs.jsonl").read_text().splitlines()[-1])
    assert regained["test_accuracy"] == records[-1]["test_accuracy"]

    (tmp_path / "s.toml").write_text(SIGMA.replace("steps = 6", "steps = 7"))
    refused = here("compare", "s.toml", "--out", "out", code=2)
    assert "--restart" in refused.stderr
    moved = here("compare", "s.toml", "--out", "out", "--restart")
    assert "out-1" in moved.stderr
    assert (tmp_path / "out-1/runs.jsonl").exists()


@pytest.mark.usefixtures("without_rendering")
@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_methods_with_a_moving_c_and_a_filter_are_tuned_and_reported(here: Here, tmp_path: Path):
    parts = """
adaptive_clip = { use = "TargetFraction", target = [0.5] }
filter = { use = "DiSK", weight = [0.4, 0.8] }
"""
    (tmp_path / "s.toml").write_text(SIGMA.replace("momentum = 0.5 }", f"momentum = 0.5 }}{parts}"))
    here("compare", "s.toml", "--out", "out")
    records = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    ours = [record for record in records if record["method"] == "DP-SGD"]
    assert [r["filter"]["options"]["weight"] for r in ours if r["phase"] == "tuning"] == [0.4, 0.8, 0.4, 0.8]
    assert ours[-1]["adaptive_clip"] == {"rule": "TargetFraction", "options": {"target": 0.5}}
    assert 0 < ours[-1]["released"]["noise_share"] < 1.5
    folder = next(run for run in (tmp_path / "out/runs").iterdir() if "DP-SGD" in run.name)
    steps = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()[1:]]
    assert len({step["max_grad_norm"] for step in steps}) > 1
    page = (tmp_path / "out/index.html").read_text()
    assert "Noise or clipping?" in page
    words = " ".join(page.split())
    assert "clipping norm 1, moved by TargetFraction(0.5, rate=0.5, steps=50)" in words
    assert "<td>DiSK(0." in words
    assert "ahead of the weights (DiSK)" in words
    assert "shortened about" in words
    assert "% of the gradients." in words
    assert words.split("Settings")[1].count("AES-256-CTR, Box-Muller in float32") == 1
    assert "as private as the trained model" in words


@pytest.mark.usefixtures("without_rendering")
@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_the_verdict_on_a_grid_of_noise_steps_is_in_json(here: Here, tmp_path: Path):
    grid = SIGMA.replace("lr = [0.01, 0.1]", "noise_steps = [0.01, 0.1]").replace("seeds = [9]", "seeds = [8, 9]")
    (tmp_path / "s.toml").write_text(grid.replace("seeds = [0, 1]", "seeds = [0]"))
    rows = last_json(here("compare", "s.toml", "--json"))["methods"]
    assert len(rows) == 2
    assert all(str(row["grid"]).endswith("0.01 to 0.1") for row in rows)


@pytest.mark.usefixtures("without_rendering")
def test_train_epsilon_and_calibrate_agree(here: Here, tmp_path: Path):
    (tmp_path / "one.toml").write_text(ONE)
    done = here("train", "one.toml", "--json")
    assert "research" not in done.stderr
    (row,) = last_json(done)["methods"]
    (ledger,) = (tmp_path / "runs/one").rglob("ledger.jsonl")
    told = last_json(here("epsilon", ledger, "--delta", "1e-5", "--json"))
    assert told["releases"] == 6
    assert told["epsilon_pld"] == row["epsilon"] <= 1.0
    assert told["epsilon_pld"] <= told["epsilon_rdp"]
    rate = 120 / 1197
    numbers = ("--delta", "1e-5", "--sample-rate", rate, "--json")
    found = last_json(here("calibrate", "--target-epsilon", 1, "--steps", 6, *numbers))
    assert found["noise_multiplier"] == told["noise_multiplier"]
    by_epochs = ("--epochs", 0.6, "--batch-size", 120, "--num-examples", 1197, "--delta", "1e-5", "--json")
    assert last_json(here("calibrate", "--target-epsilon", 1, *by_epochs)) == found
    for wrong, message in (
        (("--steps", 6), "one of steps and epochs"),
        (("--sample-rate", 0.1), "either --sample-rate"),
    ):
        assert message in here("calibrate", "--target-epsilon", 1, *by_epochs, *wrong, code=2).stderr
    sigma = ("--noise-multiplier", found["noise_multiplier"])
    assert last_json(here("calibrate", "--target-epsilon", 1, *sigma, *numbers))["steps"] == 6
    by_numbers = last_json(here("epsilon", *sigma, "--steps", 6, *numbers))
    assert by_numbers["epsilon_pld"] == told["epsilon_pld"]
    assert "6" in here("epsilon", ledger, "--delta", "1e-5").stdout
    assert "fixed research seed" not in (tmp_path / "runs/one/index.html").read_text()


def test_a_folder_in_which_something_trains_is_not_moved_aside(here: Here, tmp_path: Path):
    (tmp_path / "one.toml").write_text(ONE)
    ledger = Ledger(tmp_path / "runs/one/runs/a/ledger.jsonl")
    assert "to be unlocked" in here("train", "one.toml", "--restart", code=2).stderr
    ledger.close()
    (tmp_path / "one.toml").write_text(ONE.replace("num_examples = 1197", "num_examples = 1437"))  # ends after the move
    assert "runs/one-1" in here("train", "one.toml", "--restart", code=2).stderr


def test_epsilon_tells_what_its_number_does_not(here: Here, tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.bind(make_plan(delta=1e-5).public_facts)
    assert "nothing was charged" in here("epsilon", path, "--delta", "1e-5").stderr
    ledger.charge(Release(1.0, 0.25), draw="a", limit=9)
    (told,) = here("epsilon", path, "--delta", "1e-5").stderr.splitlines()
    assert told.startswith("note: Of 9 planned steps, 1 are released. If results decided when to stop, the number here")
    ledger.charge(Release(1.0, 0.25), draw="b", limit=9, digest="0")
    assert (
        "A seed produced the noise. Anyone who knows the seed can remove the noise."
        in here("epsilon", path, "--delta", "1e-5").stderr
    )
    ledger.close()
    assert last_json(here("epsilon", path, "--json"))["delta"] == 1e-5
    assert (
        "delta to be in (0, 1), got None"
        in here(*("epsilon", "--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 3), code=2).stderr
    )
    path.write_bytes(path.read_bytes()[:-5])
    assert "cut off" in here("epsilon", path, "--delta", "1e-5").stderr
    assert "ledger.jsonl in a run's folder" in here("epsilon", tmp_path, "--delta", "1e-5", code=2).stderr
    simulation = Ledger(tmp_path / "simulation.jsonl")
    simulation.bind(make_plan().scaled(1 / 2).public_facts)
    simulation.charge(Release(0.0, 0.125), draw="a", limit=9)
    told = here("epsilon", "simulation.jsonl", "--delta", "1e-5")
    assert "These releases protect nobody: their epsilon is infinite." in told.stderr
    assert "The training simulates another one in smaller batches, which protects nobody." in told.stderr
    assert "inf" in told.stdout
    (tmp_path / "notes.txt").write_text("my notes")
    assert "give a ledger's path" in here("epsilon", "notes.txt", "--delta", "1e-5", code=2).stderr


def test_epsilon_of_several_ledgers_is_composed(here: Here, tmp_path: Path):
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "of users.jsonl")]
    for path, sigma, unit in zip(paths, (1.0, 2.0, 2.0), ("example", "example", "user"), strict=True):
        ledger = Ledger(path)
        ledger.bind({**make_plan(noise_multiplier=sigma).public_facts, "privacy_unit": unit})
        for draw in "xyz":
            ledger.charge(Release(sigma, 0.25), draw=draw, limit=9)
        ledger.close()
    told = last_json(here("epsilon", *paths[:2], "--delta", "1e-5", "--json"))
    each = [last_json(here("epsilon", path, "--delta", "1e-5", "--json")) for path in paths[:2]]
    assert [row | {"delta": 1e-5} for row in told["ledgers"]] == [
        {"ledger": str(path), **row} for path, row in zip(paths, each, strict=False)
    ]
    for kind in ("pld", "rdp"):
        alone = [row[f"epsilon_{kind}"] for row in each]
        assert max(alone) < told[f"epsilon_{kind}"] < sum(alone)
    releases = [Release(1.0, 0.25, count=3), Release(2.0, 0.25, count=3)]
    assert told["epsilon_pld"] == epsilon(releases, delta=1e-5)
    assert told["releases"] == 6
    shown = here("epsilon", "a.jsonl", "b.jsonl", "--delta", "1e-5").stdout
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("│")] == [
        "a.jsonl",
        "b.jsonl",
        "together",
    ]
    assert "to protect the same unit" in here("epsilon", *paths, "--delta", "1e-5", code=2).stderr


def test_shuffled_batches_are_refused_with_epochs_named(here: Here, tmp_path: Path):
    (tmp_path / "one.toml").write_text(ONE.replace("steps = 6", 'steps = 6\nsampling = "fixed"'))
    assert "epochs" in here("train", "one.toml", "--seed", 3, code=2).stderr


@pytest.mark.usefixtures("without_rendering")
def test_a_private_training_keeps_what_was_measured_on_training_examples_apart(here: Here, tmp_path: Path):
    (tmp_path / "heavy.toml").write_text(
        """
title = "test"
[data]
use = "heavy-tail"
groups = 3
log_size = 5
[model]
use = "linear"
[privacy]
noise_multiplier = 2.0
delta = 1e-3
max_grad_norm = 0.1
num_examples = 96
expected_batch_size = 24
steps = 4
[[methods]]
name = "SGD"
optimizer = { use = "SGD", noise_step = 0.02 }
[tuning]
seeds = [0]
by = "train_loss"
[run]
num_evaluations = 1
"""
    )
    here("train", "heavy.toml", "--out", "private")
    here("train", "heavy.toml", "--out", "seeded", "--seed", "1")
    private, seeded = ((tmp_path / name / "runs.jsonl").read_text() for name in ("private", "seeded"))
    assert "raw_" not in private
    assert "raw_groups" in seeded
    assert "raw_train_loss" in seeded
    (checkpoint,) = (tmp_path / "private").rglob("checkpoint.pt")
    assert b"raw_groups" not in checkpoint.read_bytes()
    (raw,) = (tmp_path / "private" / "raw").iterdir()
    assert "raw_groups" in raw.read_text()
    assert raw.parent.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("without_rendering")
def test_raw_counts_are_announced_and_not_saved(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def spoilt(*, validation: int = 0) -> data.DataSet:
        loaded = data.digits(validation=validation)
        loaded.train.tensors[0][:] = float("nan")
        return loaded

    monkeypatch.setitem(data.LOADERS, "digits", spoilt)
    (tmp_path / "one.toml").write_text(ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert "gradients were not finite" in here("train", "one.toml").stderr
    assert "raw_" not in (tmp_path / "runs/one/runs.jsonl").read_text()


@pytest.mark.usefixtures("without_rendering")
def test_a_simulation_is_never_reported_with_a_finite_epsilon(here: Here, tmp_path: Path):
    whole = ONE.replace("target_epsilon = 1.0", "noise_multiplier = 4.0")
    (tmp_path / "one.toml").write_text(whole.replace("steps = 6", "steps = 6\nsimulate = 4"))
    done = here("train", "one.toml")
    cost = make_plan(
        sample_rate=120 / 1197, expected_batch_size=120, num_examples=1197, noise_multiplier=4.0, steps=6, delta=1e-5
    ).epsilon()
    shown = epsilon_text(cost)
    words = " ".join(done.stdout.split())
    assert f"∞ (simulates {shown})" in words
    assert "∞ (simulates ε): the mean gradients have the noise of a plan" in words
    assert "they have no finite ε: they simulate a plan in smaller batches." in words
    (record,) = (json.loads(line) for line in (tmp_path / "runs/one/runs.jsonl").read_text().splitlines())
    assert (record["epsilon"], record["simulates_epsilon"]) == (math.inf, cost)
    assert all(row["epsilon"] == math.inf for row in record["curve"])
    (path,) = (tmp_path / "runs/one").rglob("ledger.jsonl")
    ledger = Ledger(path, read_only=True)
    assert ledger.epsilon(delta=1e-5) == math.inf
    assert ledger.plan_facts["expected_batch_size"] == 30
    page = (tmp_path / "runs/one/index.html").read_text()
    assert f"<td>∞ (simulates {shown})</td>" in page
    assert "These releases protect nobody: their epsilon is infinite." in " ".join(page.split())
    assert "(30 in place of 120 on average)" in page
    assert "satisfies" not in page
    assert "loss against steps" in page
    table = last_json(here("train", "one.toml", "--json"))["methods"][0]
    assert (table["epsilon"], table["simulates_epsilon"]) == (None, cost)
    (tmp_path / "one.toml").write_text(whole)
    assert "a different privacy" in here("train", "one.toml", code=2).stderr


def test_a_comparison_goes_on_after_what_is_shown_has_changed(here: Here, tmp_path: Path):
    one = SIGMA.replace("lr = [0.01, 0.1]", "lr = [0.1]").replace(
        "seeds = [0, 1]", 'seeds = [0, 1]\nmetrics = ["squared_error", "recall@2"]'
    )
    head, first, second = re.split(r"(?=\[\[methods)|(?=\[tuning)", one)[:3]
    rest = one.removeprefix(head + first + second)
    (tmp_path / "one.toml").write_text(one)
    before = last_json(here("compare", "one.toml", "--json"))["methods"]
    assert [row["method"] for row in before] == ["DP-SGD", "DP-AdamBC"]
    lines = (tmp_path / "runs/one/runs.jsonl").read_text()
    other = (head.replace('"test"', '"Another title"') + second + first + rest).replace(
        '["squared_error", "recall@2"]', '["recall@2", "squared_error"]\ntensorboard = false'
    )
    (tmp_path / "one.toml").write_text(other)
    after = last_json(here("compare", "one.toml", "--json"))["methods"]
    assert (tmp_path / "runs/one/runs.jsonl").read_text() == lines
    assert [row["method"] for row in after] == ["DP-AdamBC", "DP-SGD"]
    assert (before[1]["difference"]["to"], after[1]["difference"]["to"]) == ("DP-SGD", "DP-AdamBC")
    assert set(before[1]["differences"]) == {"squared_error", "recall@2", "test_accuracy", "test_loss"}
    means = [rows[1]["differences"]["recall@2"]["mean"] for rows in (before, after)]
    assert means[0] == pytest.approx(-means[1])
    assert after[1]["difference"] == after[1]["differences"]["recall@2"]  # which is named first now
    assert "Another title" in (tmp_path / "runs/one/index.html").read_text()
    (tmp_path / "one.toml").write_text(other.replace("steps = 6", "steps = 7"))
    assert "a different privacy" in here("compare", "one.toml", code=2).stderr


BAD_SPECS = {
    "unknown option, nearest named": (
        "expected_batch_size = 120",
        "expected_batch_siz = 120",
        "did you mean 'expected",
    ),
    "unknown table": ("[tuning]", "[tunning]", "did you mean 'tuning'"),
    "unknown optimizer option": ("momentum = 0.5", "momentun = 0.5", "did you mean 'momentum'"),
    "unknown optimizer": ('"AdamBC"', '"AdamCB"', "AdamBC"),
    "no default for privacy": ("max_grad_norm = 1.0\n", "", "privacy.max_grad_norm"),
    "wrong type": ("steps = 6", 'steps = "6"', "privacy.steps"),
    "not TOML": ("[data]", "[data", "TOML"),
    "negative C": ("max_grad_norm = 1.0", "max_grad_norm = -1.0", "max_grad_norm"),
    "delta above 1": ("delta = 1e-5", "delta = 1.5", "delta"),
    "wrong count": ("num_examples = 1197", "num_examples = 1437", "1197"),
    "nothing to tune on": ("validation = 240", "validation = 0", "validation"),
    "target out of reach": ("target_epsilon = 1.0", "target_epsilon = -1.0", "target_epsilon"),
    "options that do not fit": ("momentum = 0.5", "nesterov = true", "methods.DP-SGD.optimizer: SGD: expected"),
    "missing value": ("delta = 1e-5\n", "", "got None"),
    "a model for larger images": ('use = "mlp"\nhidden = 8', 'use = "cnn-small"', "inputs of shape (1, 8, 8)"),
    "a model for images of one size": ('use = "mlp"\nhidden = 8', 'use = "cnn2"', "size = 28"),
    "a simulation that does not divide": ("steps = 6", "steps = 6\nsimulate = 7", "got 120 * 0.142857 = 17.1429"),
    "a share to simulate": ("steps = 6", "steps = 6\nsimulate = 0.25", "privacy.simulate to be valid"),
    "tuning by a simulation that does not divide": (
        "seeds = [9]",
        "seeds = [9]\nsimulate = 7",
        "got 120 * 0.142857 = 17.1429",
    ),
    "nothing to simulate": ("steps = 6", "steps = 6\nsimulate = 0", "privacy.simulate to be valid"),
    "a name twice": ('name = "DP-SGD"', 'name = "DP-AdamBC"', "different names"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_bad_specs_end_in_one_line_and_train_nothing(here: Here, tmp_path: Path, name: str):
    old, new, message = BAD_SPECS[name]
    assert old in SPEC
    (tmp_path / "s.toml").write_text(SPEC.replace(old, new))
    done = here("compare", "s.toml", "--out", "out", code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()  # the corrected file may use the same folder


def test_an_unknown_option_before_a_command_is_still_named(here: Here):
    assert "No such option" in here("--report", code=2).stderr


def test_what_users_wrote_is_not_read_as_markup(here: Here, tmp_path: Path):
    assert "[/a].toml" in here("train", "[/a].toml", code=2).stderr
    (tmp_path / "s.toml").write_text(
        ONE.replace(", lr = 0.01", "").replace("[tuning]\nlr = [0.01, 0.1]\nseeds = [9]", "")
    )
    assert "[tuning]" in here("train", "s.toml", code=2).stderr


def test_seeds_are_kept_apart(here: Here, tmp_path: Path):
    (tmp_path / "one.toml").write_text(ONE)
    seeded = last_json(here("train", "one.toml", "--seed", 3, "--json"))
    assert seeded["research_seeds"] == [3]
    told = here("train", "one.toml", "--seed", 3).stdout  # it trains no more, and still says so
    assert "protects nobody" in " ".join(told.split())
    assert "--out" in here("train", "one.toml", code=2).stderr
    shown = "".join(here("train", "one.toml", "--out", "private").stdout.split("\n"))
    weights = torch.load(re.findall(r'torch.load\("([^"]*)"\)\["model"\]', shown)[0])["model"]
    assert [tuple(value.shape) for value in weights.values()][-1] == (10,)
    private = last_json(here("train", "one.toml", "--out", "private", "--json"))
    assert private["research_seeds"] == []
    assert private["total_epsilon"] == pytest.approx(private["methods"][0]["epsilon"])
    assert "a run of `privgrad train`" in here("compare", "one.toml", "--out", "private", code=2).stderr


@pytest.mark.usefixtures("without_rendering")
@pytest.mark.parametrize("stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_training_saves_and_says_how_to_go_on(here: Here, tmp_path: Path, stop: signal.Signals):
    """A signal to a real process; the next run makes the rest of the updates."""
    (tmp_path / "one.toml").write_text(
        ONE.replace("steps = 6", "steps = 400").replace("target_epsilon = 1.0", "noise_multiplier = 4.0")
    )
    process = started(tmp_path)
    ledger = tmp_path / "runs/one/runs/DP-AdamBC-lr0.01-final/ledger.jsonl"
    while not ledger.exists() or len(ledger.read_bytes()) < 2000:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(stop)
    told = process.communicate(timeout=60)[1]
    assert told.endswith("stopped: the state is saved; run the same command again, without --restart, to resume\n")
    assert "Traceback" not in told
    assert process.returncode == 130
    resumed = here("train", "one.toml")
    assert "resuming after " in resumed.stderr
    done = here("train", "one.toml")
    assert "already complete: the training in runs/one; a new one needs another folder" in done.stderr
    done = here("train", "one.toml", "--json")
    assert "already complete: the training in runs/one" in done.stderr  # also where no bar is shown
    assert last_json(done)["methods"][0]["updates"] == 400  # what the signal came amid was finished, and saved


def started(folder: Path) -> subprocess.Popen[str]:
    """A real process that trains, with the usual meaning of Ctrl-C, which a process in the background lacks."""
    command = [str(Path(sys.executable).with_name("privgrad")), "train", "one.toml"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_before_a_training_ends_in_one_line(tmp_path: Path):
    """While a command reads its arguments and data, there is nothing to save."""
    os.mkfifo(tmp_path / "one.toml")  # to read it waits for a writer
    process = started(tmp_path)
    writer = os.open(tmp_path / "one.toml", os.O_WRONLY)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "stopped: run the same command again\n"
    assert process.returncode == 130
    os.close(writer)


def test_an_interruption_before_the_first_step_says_that_nothing_was_spent(here: Here, tmp_path: Path):
    (tmp_path / "slow.py").write_text(
        "import os\nfrom privgrad import data\n\ndef digits(validation=0):\n"
        "    os.kill(os.getpid(), 2)\n    return data.digits()\n"
    )
    (tmp_path / "one.toml").write_text(ONE.replace('use = "digits"', 'use = "slow:digits"', 1))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    try:
        told = here("train", "one.toml", code=130).stderr
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == "stopped: before the first training; nothing was spent. Run the same command again\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("default")
def test_cheap_settings_are_checked_before_the_data_are_loaded(here: Here, tmp_path: Path):
    (tmp_path / "one.toml").write_text(ONE)
    here("train", "one.toml")
    lost = 'use = "gone:digits"'
    (tmp_path / "gone.py").write_text("def digits(validation=0):\n    raise RuntimeError('loaded')\n")
    (tmp_path / "one.toml").write_text(ONE.replace('use = "digits"', lost, 1).replace("delta = ", "delta = 0.5 #"))
    told = here("train", "one.toml", code=2).stderr
    assert "runs of a spec with a different" in told
    assert "loaded" not in told
    (tmp_path / "one.toml").write_text((tmp_path / "one.toml").read_text().replace("0.5 #", "0.4 #"))  # a new warning
    told = here("train", "one.toml", "--out", "other", code=2).stderr
    assert told.index("delta = 0.4 is above") < told.index("loaded")


@pytest.mark.usefixtures("without_rendering")
def test_an_experiment_is_trained_by_epochs(here: Here, tmp_path: Path):
    changed = ONE.replace("target_epsilon = 1.0", "noise_multiplier = 4.0").replace("steps = 6", "steps = 20")
    text = changed.replace("steps = 20", 'steps = 20\nsampling = "epochs"')
    (tmp_path / "one.toml").write_text(text)
    (row,) = last_json(here("train", "one.toml", "--json"))["methods"]
    (ledger,) = (tmp_path / "runs/one").rglob("ledger.jsonl")
    told = last_json(here("epsilon", ledger, "--delta", "1e-5", "--json"))
    assert (told["sampling"], told["epoch_steps"], told["releases"]) == ("epochs", 10, 20)
    assert row["epsilon"] == told["epsilon_pld"]
    assert not list((tmp_path / "runs").rglob("*.epoch"))
    assert "of the 10 steps of each epoch" in " ".join(here("statement", ledger).stdout.split())
    for old, new, message in (
        ("steps = 20", "steps = 15", "steps to be whole epochs of 10 steps, got 15; give 20"),
        ("steps = 20", "steps = 20\nparticipations = 30", "whole epochs of 299 steps, got 20; give 299"),
        ('"epochs"', '"fixed"', "sampling"),
    ):
        (tmp_path / "wrong.toml").write_text(text.replace(old, new))
        assert message in here("train", "wrong.toml", code=2).stderr
    assert not (tmp_path / "runs/wrong").exists()


def test_a_toml_takes_epochs_and_a_batch_size_as_for_budget_does(tmp_path: Path):
    as_steps = "expected_batch_size = 120\nsteps = 6"

    def plan_of(line: str) -> pg.PrivacyPlan:
        (tmp_path / "one.toml").write_text(
            ONE.replace(as_steps, line).replace("target_epsilon = 1.0", "noise_multiplier = 4.0")
        )
        return load_spec(tmp_path / "one.toml").plan(None)

    assert as_steps in ONE
    told = plan_of('batch_size = 256\nepochs = 3\nsampling = "epochs"')
    assert (told.steps, told.sample_rate) == (3 * 5, 1 / 5)
    assert abs(told.expected_batch_size - 1_197 / 5) < 1
    assert plan_of("batch_size = 120\nepochs = 2").steps == 20
    for line, message in (
        ("batch_size = 120\nepochs = 2\nsteps = 20", "'privacy.epochs'"),
        ("batch_size = 120\nepochs = 'two'", "epochs to be a positive finite number"),
        ('batch_size = 120\nepochs = 2\nparticipations = 0\nsampling = "epochs"', "epochs"),
    ):
        with pytest.raises(pg.PrivacyError, match=message):
            plan_of(line)


def test_epochs_are_calibrated_for(here: Here):
    numbers = ("--delta", "1e-5", "--sampling", "epochs", "--json")
    sizes = ("--batch-size", 100, "--num-examples", 610, "--participations", 2)
    found = last_json(here("calibrate", "--target-epsilon", 2, "--epochs", 3, *sizes, *numbers))
    assert (found["sample_rate"], found["epoch_steps"], found["steps"]) == (2 / 12, 12, 36)
    assert 1.99 <= found["epsilon_pld"] <= 2
    sigma = ("--noise-multiplier", found["noise_multiplier"])
    assert last_json(here("calibrate", "--target-epsilon", 2, *sigma, *sizes, *numbers))["steps"] == 36
    rate = ("--sample-rate", 0.16667, "--participations", 2)
    told = last_json(here("epsilon", *sigma, *rate, "--steps", 30, *numbers))
    assert told["epsilon_pld"] == found["epsilon_pld"]  # the last epoch is charged as a whole one
    for wrong, message in (
        (("--steps", 30, *sizes, *numbers), "expected steps to be whole epochs of 12 steps, got 30; give 36"),
        (("--steps", 36, *sizes, "--delta", "1e-5"), "--participations to be 1 unless --sampling is epochs"),
    ):
        assert message in here("calibrate", "--target-epsilon", 2, *wrong, code=2).stderr


def test_train_takes_one_method(here: Here, tmp_path: Path):
    (tmp_path / "s.toml").write_text(SPEC)
    assert "privgrad compare" in here("train", "s.toml", code=2).stderr
    assert "readable" in here("train", "absent.toml", code=2).stderr


def test_bad_numbers_end_in_one_line(here: Here, tmp_path: Path):
    for arguments in (
        ("epsilon", "--delta", "2", "--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1),
        ("epsilon", "--delta", "1e-5", "--noise-multiplier", 1),
        ("epsilon", "absent.jsonl", "--delta", "1e-5"),
        ("calibrate", "--target-epsilon", 1, "--delta", "1e-5", "--sample-rate", 0.1),
        ("calibrate", "--target-epsilon", 1, "--delta", "1e-5", "--sample-rate", 1.1, "--steps", 1),
    ):
        assert here(*arguments, code=2).stderr.startswith("error:")


def test_doctor_names_paths_and_remedies(here: Here, tmp_path: Path):
    (tmp_path / "zoo.py").write_text(
        "from torch import nn\n"
        "def ill():\n"
        "    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.LazyLinear(3))\n"
        "def well():\n"
        "    return nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))\n"
        "word = 3\n"
        "def needy(width):\n"
        "    return nn.Linear(width, width)\n"
    )
    shown = here("doctor", "zoo:ill", code=1).stdout
    assert "1.0" in shown
    assert "GroupNorm" in shown
    told = last_json(here("doctor", "zoo:ill", "--json", code=1))
    assert [problem["path"] for problem in told["problems"]] == ["1.0", "2"]
    assert "Nothing" in here("doctor", "zoo:well").stdout
    assert last_json(here("doctor", "zoo:well", "--json")) == {"problems": []}
    for wrong in ("zoo", "zoo:absent", "absent:ill", "zoo:word", "zoo:needy"):
        assert "factory" in here("doctor", wrong, code=2).stderr


def test_doctor_prints_an_old_file_in_the_new_spelling(here: Here, tmp_path: Path):
    old, new = (OLD_FILES / f"every_key{end}.toml" for end in ("", "_new"))
    assert here("doctor", f"{old}", "--rewrite").stdout == new.read_text()
    assert "spelling" in here("doctor", "--help").stdout
    assert f"doctor {old} --rewrite" in here("train", f"{old}", code=2).stderr.replace("\n", "")
    assert "TOML" in here("doctor", "zoo:ill", "--rewrite", code=2).stderr


def test_doctor_tries_a_public_batch(here: Here, tmp_path: Path):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(4, 3), nn.PReLU(3))\n"
        "def losses(model, x):\n"
        "    return model(x).square().sum(1)\n"
        "def public():\n"
        "    return losses, torch.randn(6, 4)\n"
        "def coupled():\n"
        "    return lambda model, x: losses(model, x - x.mean(0)), torch.randn(6, 4)\n"
        "def alone():\n"
        "    return torch.randn(6, 4)\n"
        "class Unused(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 3)\n"
        "        self.pooler = nn.Linear(3, 3)\n"
        "def fails():\n"
        "    raise KeyError('no file')\n"
        "def needy(size):\n"
        "    return public()\n"
        "def data_set():\n"
        "    return losses, torch.utils.data.TensorDataset(torch.randn(6, 4))\n"
        "def examples():\n"
        "    return losses, [(torch.randn(4),)] * 6\n"
        "def wrong_shape():\n"
        "    return losses, torch.randn(6, 5)\n"
        "def number():\n"
        "    return losses, torch.tensor(3.0)\n"
        "def empty():\n"
        "    return losses, torch.randn(0, 4)\n"
    )
    shown = here("doctor", "net:model", "--batch", "net:public").stdout
    for word in ("PReLU", "prelu", "by a copy for each example", "by a rule", "a step of 6 examples", "MiB"):
        assert word in shown
    found = last_json(here("doctor", "net:model", "--batch", "net:public", "--json"))["explanation"]
    assert [part["way"] for part in found["parts"]] == ["copies", "rule"]
    assert "own example" in here("doctor", "net:model", "--batch", "net:coupled", code=2).stderr
    by_vmap = last_json(here("doctor", "net:model", "--batch", "net:public", "--json", "--engine", "vmap"))
    assert [part["why"] for part in by_vmap["explanation"]["parts"]] == ["engine='vmap'"]
    assert (
        "did you mean 'vmap'" in here("doctor", "net:model", "--batch", "net:public", "--engine", "vma", code=2).stderr
    )
    shown = here("doctor", "net:Unused", "--batch", "net:public", code=1).stdout
    assert "Nothing" not in shown
    assert "a step of 6 examples" in shown
    (problem,) = last_json(here("doctor", "net:Unused", "--batch", "net:public", "--json", code=1))["problems"]
    assert (problem["path"], problem["module"]) == ("pooler", "Linear")
    assert "weight, bias" in problem["what"]
    assert "privgrad.freeze_unused" in problem["remedy"]
    names = ("absent", "alone", "fails", "needy", "data_set", "examples", "wrong_shape", "number", "empty")
    for wrong in ("net", *(f"net:{name}" for name in names)):
        failed = here("doctor", "net:model", "--batch", wrong, "--json", code=2)
        assert len(failed.stderr.splitlines()) == 1
        assert last_json(failed)["error"] in failed.stderr


LONG = "a-folder-with-a-rather-long-name/of-an-experiment/that-somebody-made/ledger.jsonl"


@pytest.mark.usefixtures("without_rendering", "by_rdp_here")
@pytest.mark.filterwarnings("ignore")
def test_no_number_is_cut_on_a_terminal_of_80_columns(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number, path in enumerate((tmp_path / LONG, tmp_path / f"b-{LONG}")):
        path.parent.mkdir(parents=True)
        plan = make_plan(noise_multiplier=1.2345678, num_examples=1_234_567, sample_rate=8 / 1_234_567, delta=1e-9)
        ledger = Ledger(path)
        ledger.bind(plan.public_facts)
        for draw in range(3):
            ledger.charge(plan.release, draw=f"{number} {draw}", limit=9)
        ledger.close()
    budget = Budget("budget.jsonl", total_epsilon=7.654321, delta=1e-9, num_examples=10**7, privacy_unit="user")
    for name in ("a training with a name that is longer than the others", "b"):
        budget.commit(name, [Release(123.4567, 0.0123456, count=12_345)], by="Ann-Sophie Somebody-Something")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(4, 3), nn.PReLU(3))\n"
        "def public():\n    return (lambda model, x: model(x).square().sum(1)), torch.randn(6, 4)\n"
    )
    rows = [f"{age},{'ab'[age % 2]}" for age in range(120, 10_120)]
    (tmp_path / "t.csv").write_text("\n".join(["age,again", *rows]))
    (tmp_path / "t.toml").write_text(
        '[data]\nfile = "t.csv"\nlabel = "again"\nclasses = ["a", "b"]\nunit = "row"\n'
        '[data.columns]\nage = { kind = "number", range = [0, 100] }\n'
    )
    (tmp_path / "one.toml").write_text(ONE.replace("target_epsilon = 1.0", "noise_multiplier = 4.0"))
    (tmp_path / "s.toml").write_text(SIGMA)
    numbers = ("--noise-multiplier", 1.2345678, "--sample-rate", 0.00123456, "--steps", 12_345, "--delta", "1e-9")
    monkeypatch.setenv("COLUMNS", "80")
    shown = {
        "epsilon": here("epsilon", LONG),
        "epsilons": here("epsilon", LONG, f"b-{LONG}"),
        "epsilon of numbers": here("epsilon", *numbers),
        "calibrate": here("calibrate", "--target-epsilon", 1.234567, *numbers[2:]),
        "statement": here("statement", LONG),
        "budget": here("budget", "budget.jsonl"),
        "doctor": here("doctor", "net:model", "--batch", "net:public"),
        "doctor of data": here("doctor", "t.toml"),
        "train": here("train", "one.toml"),
        "compare": here("compare", "s.toml"),
        "audit": here("audit", "--method", "AdamBC", "--epsilon", 3, "--trials", 600),
        "data": here("data"),
    }
    for command, done in shown.items():
        assert "…" not in done.stdout, command
        lines = [line for line in done.stdout.splitlines() if line[:1] in "│┃┏┡├└┌"]
        assert all(len(line) <= 80 for line in lines), command
    told = {name: last_json(here(*arguments, "--json")) for name, arguments in JSON_OF.items()}
    for name, values in told.items():
        for value in values.values():
            if isinstance(value, float):
                assert rounded_up(value) in shown[name].stdout, (name, value)
    assert "12,345" in shown["budget"].stdout
    assert f"{told['epsilons']['releases']}" in shown["epsilons"].stdout


STEPS = ("--steps", 12_345, "--delta", "1e-9")
JSON_OF: dict[str, tuple[Any, ...]] = {
    "epsilon": ("epsilon", LONG),
    "epsilons": ("epsilon", LONG, f"b-{LONG}"),
    "calibrate": ("calibrate", "--target-epsilon", 1.234567, "--sample-rate", 0.00123456, *STEPS),
}


def test_the_help_groups_commands_and_has_one_line_for_each(here: Here, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = here("--help").stdout.splitlines()
    commands = [line.split()[1] for line in lines if re.match(r"│ [a-z]", line)]
    known = "doctor calibrate data train compare reproduce predict epsilon statement budget audit"
    assert sorted(commands) == sorted(known.split())
    assert not [line for line in lines if re.match(r"│   +\S", line)]  # none goes on in a second line
    [example] = [line.split()[-1] for line in lines if "$ privgrad train" in line]
    spec = tomllib.loads(Path(__file__).parents[2].joinpath(example).read_text())
    assert len(spec.get("methods", [])) < 2  # train takes one method
    told = here("doctor", "--help").stdout.splitlines()
    assert any("say how each gradient is computed" in line for line in told)  # lines of a paragraph are joined
    for group in ("Before a training", "Training", "After a training"):
        assert any(f"─ {group} ─" in line for line in lines)
