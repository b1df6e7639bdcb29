"""Files of commit 3b053914 are read, resumed and extended: nothing that a user has kept becomes unreadable.

tests/old_files/write.py wrote them. Do not write them again with another commit: a new format gets files of its own.
"""

import fcntl
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import privgrad as pg
from old_files import write as old
from privgrad import features

FILES = Path(old.__file__).parent
TOLD: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
SEEDED = [name for name in old.TRAININGS if name in TOLD["ends"]]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def fixed() -> Iterator[Path]:
    """The folder in which budgets expect what they have paid for; one test of this machine at a time has it."""
    with Path(f"{old.FIXED}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(old.FIXED, ignore_errors=True)
        old.FIXED.mkdir()
        yield old.FIXED
        shutil.rmtree(old.FIXED)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes a private step fails."""

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(pg.PrivateGradient, "__call__", refuse)


def copied(name: str, to: Path) -> Path:
    """Copy a file or folder; the same place in `to`."""
    place = to / name
    place.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if (FILES / name).is_dir() else shutil.copy)(FILES / name, place)
    return place


def near(found: Any, told: Any) -> bool:
    """Whether numbers are the recorded ones, up to the rounding of another machine."""
    found, told = (torch.as_tensor(value, dtype=torch.float64) for value in (found, told))
    return found.shape == told.shape and torch.allclose(found, told, rtol=1e-4, atol=1e-5)


def ends_as_told(model: nn.Module, name: str) -> bool:
    told = TOLD["ends"][name]["weights"]
    return all(near(value, told[key]) for key, value in model.state_dict().items())


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_there_is_a_file_of_each_kind_and_a_recorded_number_for_it():
    assert {str(path.relative_to(FILES)) for path in old.ledgers()} == TOLD["ledgers"].keys()
    assert {path.name for path in (FILES / "fit").iterdir()} == set(old.TRAININGS)
    assert {path.name for path in (FILES / "extractors").iterdir()} == old.extractors().keys()
    assert sum(path.stat().st_size for path in FILES.rglob("*") if path.is_file() and path.suffix != ".pyc") < 500_000


def test_every_ledger_has_its_recorded_epsilon(tmp_path: Path):
    for name, told in TOLD["ledgers"].items():
        ledger = pg.Ledger(copied(name, tmp_path), read_only=True)
        assert (ledger.releases, ledger.head) == (told["releases"], told["head"]), name
        for accountant in ("rdp", "pld"):
            if accountant in told:
                assert near(ledger.epsilon(delta=old.DELTA, accountant=accountant), told[accountant]), name


@pytest.mark.usefixtures("by_rdp_here")
def test_a_truncated_ledger_has_an_epsilon(tmp_path: Path):
    ledger = pg.Ledger(copied("fit/truncated/ledger.jsonl", tmp_path), read_only=True)
    assert 0 < ledger.epsilon(delta=old.DELTA) < 10


def test_the_command_line_reads_ledgers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = copied("fit/sgd/ledger.jsonl", tmp_path)
    old.command("epsilon", f"{path}", "--delta", f"{old.DELTA}", "--json")
    assert near(last_json(capsys)["epsilon_pld"], TOLD["ledgers"]["fit/sgd/ledger.jsonl"]["pld"])
    old.command("statement", f"{path}", "--delta", f"{old.DELTA}", "--json")
    assert last_json(capsys)["releases"] == old.STOP


@pytest.mark.usefixtures("by_rdp_here")
@pytest.mark.parametrize("name", old.TRAININGS)
def test_a_training_resumes_and_ends_as_an_uninterrupted_one(tmp_path: Path, name: str):
    model, result = old.train(copied(f"fit/{name}", tmp_path), name)
    assert (result.updates, result.ledger.releases) == (old.STEPS, old.STEPS)
    assert [row["step"] for row in result.curve] == [old.STOP, old.STEPS]
    assert name.startswith("private") or ends_as_told(result.averaged or model, name)


@pytest.mark.usefixtures("by_rdp_here")
def test_a_training_that_was_stopped_early_stays_complete(tmp_path: Path, no_training: None):
    result = old.train_until_it_stops(copied("early-stop", tmp_path))
    assert (result.stopped, result.updates, result.ledger.releases) == (True, 6, old.STEPS)


def test_a_loop_of_ones_own_resumes(tmp_path: Path):
    model, private_grad = old.own_loop(copied("own-loop", tmp_path))
    assert private_grad.ledger.releases == old.STEPS
    assert ends_as_told(model, "own-loop")


@pytest.mark.parametrize("kind", old.RELEASES)
def test_a_release_returns_its_recorded_values(tmp_path: Path, kind: str):
    path = copied(f"releases/{kind}.jsonl", tmp_path)
    with pytest.warns(UserWarning, match="was released before"):
        assert old.release(kind, ledger=path, delta=old.DELTA).tolist() == TOLD[f"release {kind}"]


@pytest.mark.usefixtures("by_rdp_here")
def test_a_budget_shows_what_is_left_and_takes_one_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, told = copied("budget", tmp_path) / "budget.jsonl", TOLD["budget"]
    budget = pg.Budget(path)
    assert (budget.head, [one.name for one in budget.commitments]) == (told["head"], told["names"])
    assert near(budget.spent(), told["spent"])
    old.command("budget", f"{path}", "--json")
    shown = last_json(capsys)
    assert near(shown["left_for_one_release"], told["left"])
    for kind in old.RELEASES:
        assert old.release(kind, budget=budget, name=kind).tolist() == TOLD[f"budget {kind}"]
    assert budget.head == told["head"]
    plan = old.make_plan(noise_multiplier=9.0)
    budget.commit("one more", [plan.release_of(plan.steps)])
    again = pg.Budget(path)
    assert again.commitments[-1].name == "one more"
    assert budget.total_epsilon > again.spent() > told["spent"]


@pytest.mark.usefixtures("by_rdp_here")
def test_a_training_of_a_budget_resumes(fixed: Path):
    copied("budget", fixed)
    budget, result = old.budget_training(fixed / "budget")
    assert (result.updates, result.ledger.releases, result.ledger.commitment) == (old.STEPS, old.STEPS, "training")
    assert budget.head == TOLD["budget"]["head"]


@pytest.mark.usefixtures("by_rdp_here")
def test_a_saved_model_is_loaded_and_replaced(tmp_path: Path):
    folder, model = copied("saved/model", tmp_path), old.make_model()
    said = pg.load(model, folder)
    assert said.numbers["releases"] == old.STEPS
    assert old.weights(model) == TOLD["saved"]
    ledger = copied("fit/private/ledger.jsonl", tmp_path)
    pg.save(model, folder, ledger=ledger, post_processing="a test", overwrite=True)
    assert pg.load(old.make_model(), folder).numbers["releases"] == old.STOP


@pytest.mark.parametrize("name", sorted(path.name for path in (FILES / "heads").iterdir()))
def test_a_head_predicts_the_recorded_numbers(tmp_path: Path, name: str):
    folder, told = copied(f"heads/{name}", tmp_path), TOLD[f"head {name}"]
    head = pg.Head.load(folder, modules={"small": old.frozen()} if name == "frozen" else None)
    rows = old.asked_of(name)
    assert near(head(rows).detach(), told["outputs"])
    assert near(head.predict(rows), told["predicted"])
    assert head.epsilon == told["epsilon"]
    head.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/head.json").read_text()) == json.loads((folder / "head.json").read_text())


@pytest.mark.parametrize("name", sorted(path.name for path in (FILES / "extractors").iterdir()))
def test_an_extractor_is_loaded_and_has_the_digest_of_a_new_one(tmp_path: Path, name: str):
    modules = {"small": old.frozen()} if name.startswith("frozen") else None
    made = features.load_extractor(copied(f"extractors/{name}", tmp_path), modules=modules)
    assert near(made(old.rows_of(name)), TOLD[f"extractor {name}"])
    new = old.extractors()[name]
    assert near(new(old.rows_of(name)), TOLD[f"extractor {name}"])
    if name in ("scaled", "hog", "tfidf", "frozen"):  # others have drawn or computed numbers
        assert made.digest() == new.digest()


@pytest.mark.parametrize("name", ["whole", "half"])
def test_cached_features_are_used_and_completed(tmp_path: Path, name: str):
    folder, rows = copied(f"cached/{name}", tmp_path), old.make_data().tensors[0]
    extractor = features.load_extractor(copied("extractors/fourier", tmp_path))
    before = (folder / "blocks.jsonl").read_text()
    assert near(features.cache(extractor, rows, folder, progress=False), TOLD["cached"])
    after = (folder / "blocks.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 4


def test_a_calibration_finds_the_same_noise():
    assert near(old.calibrated(), TOLD["calibrated"])


def test_pickles_are_loaded(tmp_path: Path):
    folder, inputs = copied("pickles", tmp_path), old.make_data().tensors[0]
    head = pickle.loads((folder / "head.pickle").read_bytes())
    assert near(head(old.asked_of("class")).detach(), TOLD["head class"]["outputs"])
    plan = pickle.loads((folder / "plan.pickle").read_bytes())
    assert plan == old.make_plan(correlation=pg.noise.Banded(2, (1.0, 0.5)))
    estimator = pickle.loads((folder / "estimator.pickle").read_bytes())
    assert near(estimator.predict_proba(inputs.numpy()), TOLD["estimator"])
    module = torch.load(folder / "module.pt", weights_only=False)
    assert near(module(inputs).detach(), old.make_head_model()(inputs).detach())


@pytest.mark.usefixtures("by_rdp_here", "without_rendering", "no_training")
def test_a_complete_folder_of_train_trains_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(tmp_path, "whole", capsys)


@pytest.mark.usefixtures("by_rdp_here", "without_rendering")
def test_a_folder_of_train_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(tmp_path, "half", capsys)


def trained(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    copied("visits.csv", tmp_path)
    folder = copied(f"train/{name}", tmp_path)
    old.command("train", f"{copied('visits.toml', tmp_path)}", "--out", f"{folder}", "--json")
    (row,) = last_json(capsys)["methods"]
    (record,) = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    assert record["updates"] == old.STEPS
    assert record["epsilon"] == row["epsilon"]
    (ledger,) = folder.rglob("ledger.jsonl")
    assert pg.Ledger(ledger, read_only=True).releases == old.STEPS


@pytest.mark.usefixtures("by_rdp_here", "without_rendering", "no_training")
@pytest.mark.parametrize("kind", [*old.COMPARISONS, "named"])
def test_a_complete_comparison_trains_no_more(fixed: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    compared(fixed, monkeypatch, kind, "whole")


@pytest.mark.usefixtures("by_rdp_here", "without_rendering")
@pytest.mark.parametrize("kind", old.COMPARISONS)
def test_a_comparison_resumes(fixed: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    compared(fixed, monkeypatch, kind, "half")


def compared(fixed: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.chdir(copied("visits.csv", fixed).parent)
    folder = copied(f"compare/{kind}-{name}", fixed)
    old_lines = [path.read_text() for path in folder.glob("runs.jsonl")]
    heads = {path: pg.Ledger(path, read_only=True).head for path in folder.rglob("ledger.jsonl")}
    found, told = old.compare(kind, folder), TOLD[f"compare {kind}"]
    assert found.keys() == told.keys()
    assert all(pg.Ledger(path, read_only=True).went_through(head) for path, head in heads.items())
    if kind in ("research", "named"):
        assert near(found["total_epsilon"], told["total_epsilon"])
        for row, of_old in zip(found["methods"], told["methods"], strict=True):
            assert row["method"] == of_old["method"]
            assert near(row["test_loss_mean"], of_old["test_loss_mean"])
    else:
        assert found["epsilon"] == told["epsilon"]
        assert torch.load(found["model"], weights_only=True)
        assert pg.Budget(folder / "budget.jsonl").commitments[0].ledger == f"{folder}"
    if name == "whole":
        assert [(folder / "runs.jsonl").read_text()] == old_lines


def test_lightning_resumes(tmp_path: Path):
    pytest.importorskip("lightning")
    folder = copied("bridges/lightning", tmp_path)
    model, private_grad = old.lightning(folder, ckpt_path=folder / "checkpoint.ckpt")
    assert private_grad.ledger.releases == old.STEPS
    assert ends_as_told(model, "lightning")


def test_hugging_face_resumes(tmp_path: Path):
    pytest.importorskip("accelerate")
    model, private_grad = old.hugging_face(copied("bridges/huggingface", tmp_path), resume_from_checkpoint=True)
    assert private_grad.ledger.releases == old.STEPS
    assert ends_as_told(model, "huggingface")


def test_flower_resumes(tmp_path: Path):
    pytest.importorskip("flwr")
    model, private_grad = old.flower(copied("bridges/flower", tmp_path), old.STEPS - old.STOP)
    assert private_grad.ledger.releases == old.STEPS
    assert ends_as_told(model, "flower")
