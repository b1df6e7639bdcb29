"""Checkpoints of sharded trainings: other numbers of processes, damage, and what is never gathered."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_shards import WIDTH, changed, resumed, shards_of, trained, untrained
from test_distributed import started
from torch import Tensor

import privgrad as pg
from privgrad.processes import ALONE
from privgrad.training.checkpoint import read_checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, jobs = tmp_path_factory.mktemp("saved"), ["saving", "refused"]
    started(2, folder, *jobs)
    return {"folder": folder} | {job: torch.load(folder / f"{job}.pt") for job in jobs}


@pytest.mark.parametrize(
    "counts",
    [(2, 1, 3), pytest.param((4, 2, 1, 4), marks=pytest.mark.slow), pytest.param((1, 3), marks=pytest.mark.slow)],
)
def test_another_number_of_processes_resumes_with_the_same_state(tmp_path: Path, counts: tuple[int, ...]):
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "steps").write_text(f"{2 * len(counts)}")
    alone = resumed(ALONE, tmp_path / "alone")
    for turn, count in enumerate(counts, 1):
        (tmp_path / "steps").write_text(f"{2 * turn}")
        started(count, tmp_path, "resumed")
        assert len(list((tmp_path / "run").iterdir())) == (3 if count > 1 else 2), "stale shards"
    ends: dict[str, Tensor] = torch.load(tmp_path / "resumed.pt")
    for name, value in alone.items():
        torch.testing.assert_close(ends[name], value, rtol=1e-6, atol=1e-8)
    assert pg.Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True).releases == 2 * len(counts)


def test_no_process_gathers_a_parameter_to_save_it(found: dict[str, Any]):
    assert len(found["saving"]) >= 3
    assert max(found["saving"]) < WIDTH * WIDTH / 2


TOLD = {
    "a byte": ("the bytes of", 2),
    "a file": ("No such file", 2),
    "the folder": ("No such file", 2),
    "shards of another run": ("the bytes of", 2),
    "a checkpoint of another run": ("of a different run", 2),
    "other shapes": ("shape of '0.bias' (300,), now (301,)", 2),
    "a folder for each process": ("output_dir to be the same folder for all processes", 0),
    "a full disk": ("OSError: No space left on device", 2),
    "undamaged": ("nothing", 4),
    "after a full disk": ("nothing", 4),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_damaged_or_foreign_checkpoint_is_refused_in_all_processes(found: dict[str, Any], case: str):
    words, releases = TOLD[case]
    told = [said[case] for said in found["refused"]]
    assert any(words in text for text, _ in told), told
    assert all(words in text or "an exception in at least one of the others" in text for text, _ in told), told
    assert [count for _, count in told] == [releases] * len(told)


def test_whole_weights_are_published_with_the_record_of_their_shards(found: dict[str, Any], tmp_path: Path):
    run, copy = found["folder"] / "first", tmp_path / "copy"
    shutil.copytree(run, copy)
    published = untrained()
    published.load_state_dict(trained(ALONE, copy, steps=2, seed=None).state_dict())  # gathered by one process
    said = str(pg.save(published, tmp_path / "published", ledger=run / "ledger.jsonl", delta=1e-5))
    assert "The weights are those of the checkpoint that was written with this record." in said
    with torch.no_grad():
        published[2].get_parameter("weight")[7, 3] += 1
    with pytest.raises(pg.PrivacyError, match="model to have the weights of"):
        pg.save(published, tmp_path / "changed", ledger=run / "ledger.jsonl", delta=1e-5)


class Harm:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_shards_cannot_run_code(tmp_path: Path):
    """torch's own description of a folder is a pickle. It is not read; the one in the checkpoint holds plain data."""
    (tmp_path / "steps").write_text("2")
    started(2, tmp_path, "resumed")
    run, mark = tmp_path / "run", tmp_path / "harm"
    (shards_of(run) / ".metadata").write_bytes(pickle.dumps(Harm(mark)))
    trained(ALONE, run, steps=2)
    assert not mark.exists()


def test_a_description_cannot_run_code(tmp_path: Path):
    (tmp_path / "steps").write_text("2")
    started(2, tmp_path, "resumed")
    run, mark = tmp_path / "run", tmp_path / "harm"
    state = read_checkpoint(run / "checkpoint.pt")
    torch.save(Harm(mark), tmp_path / "described")
    state["shards"]["described"] = (tmp_path / "described").read_bytes()
    write_checkpoint(state, run / "checkpoint.pt")
    with pytest.raises(pg.PrivacyError, match=r"checkpoint.*[wW]eights.only"):
        trained(ALONE, run, steps=4)
    assert not mark.exists()


def test_changed_shards_are_refused_by_one_process_too(tmp_path: Path):
    (tmp_path / "steps").write_text("2")
    started(2, tmp_path, "resumed")
    changed(shards_of(tmp_path / "run") / "__1_0.distcp")
    with pytest.raises(pg.PrivacyError, match=r"complete checkpoint of this run, got ValueError: the bytes of"):
        trained(ALONE, tmp_path / "run", steps=4)
    assert pg.Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True).releases == 2
