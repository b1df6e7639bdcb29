"""Epochs: the law of the draws, the key of the running epoch, and a resume with and without it."""

import base64
import json
import stat
import zipfile
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan, seed_of
from privgrad.processes import Processes
from privgrad.rng import RandomSource
from privgrad.sampling.epochs import EpochKeys, rows_in_step
from privgrad.statement.model_card import write_privacy
from privgrad.training import FitResult

ROWS = 32


def plan_of(**changed: object) -> pg.PrivacyPlan:
    numbers = {"sampling": "epochs", "sample_rate": 1 / 4, "steps": 12, "num_examples": ROWS, "expected_batch_size": 8}
    return make_plan(**(numbers | changed))


def rows_of(batch: pg.Batch) -> list[int]:
    return batch.examples[0][:, 0].long().tolist() if batch.size else []


def numbered() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(float(ROWS))[:, None])


def steps_of_rows(key: int, rows: int, steps: int, chosen: int) -> np.ndarray:
    """Return whether each row is in each step, shape (rows, steps)."""
    stream, found = RandomSource(seed_of(key)).stream("epochs"), np.zeros((rows, steps), bool)
    for step in range(steps):
        found[rows_in_step(stream, steps, chosen, step, 0, rows), step] = True
    return found


@pytest.mark.parametrize(("rate", "times"), [(1 / 4, 1), (2 / 4, 2), (3 / 4, 3), (1.0, 4)])
def test_each_example_is_in_so_many_steps_of_each_epoch(rate: float, times: int):
    plan = plan_of(sample_rate=rate, expected_batch_size=round(rate * ROWS), participations=times)
    batches = [rows_of(batch) for batch in plan.batches(numbered())]
    for epoch in range(3):
        counted = Counter(row for batch in batches[4 * epoch : 4 * epoch + 4] for row in batch)
        assert counted == dict.fromkeys(range(ROWS), times)
        assert all(len(set(batch)) == len(batch) for batch in batches)
    assert rate == 1 or batches[:4] != batches[4:8]


@pytest.mark.filterwarnings("ignore:a fixed seed")
@pytest.mark.parametrize(("steps", "chosen"), [(5, 1), (5, 2), (6, 3)])
def test_every_set_of_steps_is_as_likely(steps: int, chosen: int):
    count = 60_000
    found = steps_of_rows(1, count, steps, chosen)
    sets = Counter(tuple(np.flatnonzero(row).tolist()) for row in found)
    possible = list(combinations(range(steps), chosen))
    assert set(sets) == set(possible)
    expected = count / len(possible)
    distance = sum((sets[each] - expected) ** 2 / expected for each in possible)
    assert distance < chi2.isf(1e-6, len(possible) - 1)


def test_each_row_is_drawn_alone():
    """So the number of rows in a step is binomial, and other rows do not move one."""
    stream = RandomSource().stream("epochs")
    sizes = [len(rows_in_step(RandomSource().stream("epochs"), 4, 1, 0, 0, ROWS)) for _ in range(2000)]
    assert np.var(sizes) == pytest.approx(ROWS * 3 / 16, rel=0.25)
    for rows in (ROWS - 1, ROWS):
        assert set(rows_in_step(stream, 4, 1, 2, 0, rows)) >= set(rows_in_step(stream, 4, 1, 2, 0, ROWS - 1))


@pytest.mark.filterwarnings("ignore:a fixed seed")
def test_two_examples_are_independent():
    first, second = np.split(np.argmax(steps_of_rows(2, 120_000, 4, 1), axis=1), 2)
    table = np.bincount(4 * first + second, minlength=16)
    assert ((table - 3750) ** 2 / 3750).sum() < chi2.isf(1e-6, 15)


@pytest.mark.filterwarnings("ignore:a fixed seed")
@pytest.mark.parametrize("chosen", [1, 3])
@pytest.mark.parametrize("cut", [1, 10, 17])
def test_any_part_of_the_rows_can_be_drawn_alone(chosen: int, cut: int):
    stream = RandomSource(seed_of(3)).stream("epochs")
    for step in range(7):
        parts = [rows_in_step(stream, 7, chosen, step, *ends) for ends in ((0, cut), (cut, 40))]
        assert np.array_equal(np.concatenate(parts), rows_in_step(stream, 7, chosen, step, 0, 40))


def test_a_resume_continues_within_the_epoch_by_its_key(tmp_path: Path):
    data, plan, key = numbered(), plan_of(), tmp_path / "key"
    batches = plan.batches(data, epoch_key=key)
    drawn = [next(batches) for _ in range(6)]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    later = list(plan.batches(data, start=6, epoch_key=key))
    assert [batch.sampling.step for batch in later] == list(range(6, 12))
    second = Counter(row for batch in [*drawn[4:], *later[:2]] for row in rows_of(batch))
    assert second == dict.fromkeys(range(ROWS), 1)
    assert {batch.sampling.stream for batch in drawn[4:]} == {batch.sampling.stream for batch in later[:2]}
    assert len({batch.sampling.stream for batch in [*drawn, *later]}) == 3


def test_a_key_is_deleted_with_the_charge_of_the_last_step_of_its_epoch(tmp_path: Path):
    """Also in a loop that never asks for a batch after the last."""
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan_of(), ledger=tmp_path / "ledger.jsonl")
    key = private_grad.ledger.epoch_key
    assert key is not None
    batches = plan_of().batches(make_data(ROWS), epoch_key=key)
    held = list[list[str]]()
    for _ in range(12):
        private_grad(next(batches))
        held.append(list(json.loads(key.read_text())[-1]) if key.exists() else [])
    assert held == [[epoch] if epoch else [] for epoch in ("0", "0", "0", "", "1", "1", "1", "", "2", "2", "2", "")]


def test_workers_that_load_the_next_epoch_leave_the_key_of_this_one(tmp_path: Path):
    plan, path = plan_of(), tmp_path / "ledger.jsonl"
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path)
    key, data = private_grad.ledger.epoch_key, make_data(ROWS)
    assert key is not None
    batches = plan.batches(data, epoch_key=key, num_workers=1, prefetch_factor=4)
    for _ in range(2):
        private_grad(next(batches))
    assert list(json.loads(key.read_text())[-1]) == ["0", "1"]
    batches.close()
    assert [batch.sampling.step for batch in plan.batches(data, start=2, epoch_key=key)] == list(range(2, 12))


def test_the_key_of_another_training_draws_no_epoch(tmp_path: Path):
    key = tmp_path / "key"
    old = next(plan_of().batches(numbered(), epoch_key=key)).sampling.stream
    assert next(plan_of().batches(numbered(), epoch_key=key)).sampling.stream != old


@pytest.mark.parametrize("damage", ["none", "another epoch", "gone"])
def test_without_the_key_a_resume_begins_the_next_epoch_and_the_old_one_is_paid_for(tmp_path: Path, damage: str):
    plan, key, path = plan_of(), tmp_path / "key", tmp_path / "ledger.jsonl"
    model, data = make_model(), make_data(ROWS)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=path)
    for batch, _ in zip(plan.batches(data, epoch_key=key), range(5), strict=False):
        private_grad(batch)
    assert private_grad.ledger.participations == 8
    private_grad.ledger.close()
    if damage == "gone":
        key.unlink()
    elif damage == "another epoch":
        key.write_text(json.dumps([ROWS, "", "", {"0": bytes(32).hex()}]))
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=path)
    assert private_grad.ledger.next_step == 5
    if damage == "none":
        left = list(plan.batches(data, start=5, epoch_key=key))
    else:
        with pytest.warns(UserWarning, match=r"continues at step 8.*stays charged"):
            left = list(plan.batches(data, start=5, epoch_key=key))
    assert [batch.sampling.step for batch in left] == list(range(5 if damage == "none" else 8, 12))
    for batch in left:
        private_grad(batch)
    assert private_grad.ledger.participations == 12


def test_data_that_grow_within_an_epoch_are_refused(tmp_path: Path):
    """A row that gets the number of another one could be in two steps of the epoch."""
    plan, key = plan_of(), tmp_path / "key"
    batches = plan.batches(numbered(), epoch_key=key)
    for _ in range(4):
        next(batches)
    more = torch.utils.data.TensorDataset(torch.arange(ROWS + 1.0)[:, None])
    plan.batches(more, start=4, epoch_key=key)  # between epochs, they may grow
    next(batches)
    with pytest.raises(
        pg.PrivacyError, match="to have the same rows as when its epoch began, got others; give the same"
    ):
        plan.batches(more, start=5, epoch_key=key)
    key.unlink()
    with pytest.warns(UserWarning, match="continues at step 8"):
        left = list(plan.batches(more, start=5, epoch_key=key))
    assert sorted(row for batch in left for row in rows_of(batch)) == list(range(ROWS + 1))


@pytest.mark.parametrize("order", ["shuffled", "moved", "random items"])
def test_rows_that_change_their_numbers_within_an_epoch_are_refused(tmp_path: Path, order: str):
    class Noisy(torch.utils.data.TensorDataset):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, ...]:
            return tuple(column + torch.rand(1) for column in super().__getitem__(index))

    rows, key, plan = torch.arange(float(ROWS))[:, None], tmp_path / "key", plan_of()
    make = Noisy if order == "random items" else torch.utils.data.TensorDataset
    next(plan.batches(make(rows), epoch_key=key))
    plan.batches(make(rows), start=1, epoch_key=key)
    others = make(rows.roll(1, 0) if order == "moved" else rows[torch.randperm(ROWS)])
    if order == "random items":  # no reading of them tells
        plan.batches(others, start=1, epoch_key=key)
        return
    with pytest.raises(pg.PrivacyError, match=r"in the same order; or, to continue with the next epoch, delete .*key"):
        plan.batches(others, start=1, epoch_key=key)
    with pytest.warns(UserWarning, match="continues at step 8"):
        plan.batches(others, start=5, epoch_key=key)


def test_a_damaged_key_is_one_clear_error(tmp_path: Path):
    key = tmp_path / "key"
    key.write_text("4 not a key")
    with pytest.raises(pg.PrivacyError, match=r"the key of an epoch, .*; delete it"):
        plan_of().batches(numbered(), epoch_key=key)


@pytest.mark.filterwarnings("ignore:a fixed seed")
def test_a_seeded_plan_draws_the_same_from_any_step(tmp_path: Path):
    plan = plan_of(seed=3)
    whole = [rows_of(batch) for batch in plan.batches(numbered())]
    assert [rows_of(batch) for batch in plan.batches(numbered(), start=5, epoch_key=tmp_path / "key")] == whole[5:]
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 10}, "expected steps to be whole epochs of 4 steps, got 10; give 12"),
        ({"sample_rate": 0.26}, "expected sample_rate to be 1 / t"),
        ({"participations": 0}, "participations"),
        ({"participations": 5}, "expected"),
        ({"sampling": "poisson", "participations": 2}, "participations to be 1 unless"),
    ],
)
def test_epochs_that_are_no_whole_ones_are_refused(changed: dict[str, object], message: str):
    with pytest.raises(pg.PrivacyError, match=message):
        plan_of(**changed)


def test_a_training_pays_for_each_epoch_that_it_begins():
    plan = plan_of(delta=1e-5)
    by_steps = [plan.epsilon(steps=steps) for steps in range(1, 13)]
    assert by_steps == sorted(by_steps)
    assert len(set(by_steps)) == 3
    assert by_steps[3] == by_steps[0]
    assert by_steps[4] == by_steps[7] > by_steps[3]


class StoppedError(Exception):
    pass


def fitted(folder: Path, plan: pg.PrivacyPlan, *, dies_at: int | None = None, stop: object = None) -> FitResult:
    """Fit, and die before a step's gradient is computed."""

    def dying(model: torch.nn.Module, batch: object) -> torch.Tensor:
        if dies_at is not None and private_grad.ledger.releases >= dies_at:
            raise StoppedError
        return loss_fn(model, batch)  # pyright: ignore[reportArgumentType]

    model = make_model()
    private_grad = pg.PrivateGradient(model, dying, plan, ledger=folder / "ledger.jsonl")
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    options: dict[str, Any] = {"evaluate": lambda _: {"loss": 1.0}, "stop": stop, "num_evaluations": 6} if stop else {}
    try:
        return pg.fit(private_grad, optimizer, make_data(ROWS), output_dir=folder, progress=False, **options)
    finally:
        private_grad.ledger.close()


def test_fit_resumes_within_an_epoch_and_keeps_the_key_in_its_folder(tmp_path: Path):
    plan = plan_of(delta=1e-3)
    with pytest.raises(StoppedError):
        fitted(tmp_path, plan, dies_at=6)
    key = tmp_path / "_ledger.jsonl.epoch"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    result = fitted(tmp_path, plan)
    assert (result.updates, result.ledger.releases, result.ledger.participations) == (12, 12, 12)
    assert not key.exists()


def test_fit_without_the_key_goes_on_with_the_next_epoch(tmp_path: Path):
    plan = plan_of(delta=1e-3)
    with pytest.raises(StoppedError):
        fitted(tmp_path, plan, dies_at=6)
    (tmp_path / "_ledger.jsonl.epoch").unlink()
    told = "left out: the key of the epoch before step 8 is not here: this run ends with 10 updates of 12"
    with pytest.warns(UserWarning, match=f"2 steps had no checkpoint, or are {told}"):
        result = fitted(tmp_path, plan)
    assert (result.updates, result.ledger.releases, result.ledger.participations) == (10, 10, 12)


def test_a_training_that_results_stopped_is_charged_whole_and_leaves_no_key(tmp_path: Path):
    stop = pg.EarlyStopping(monitor="loss", mode="min", patience=1, data="public")
    result = fitted(tmp_path, plan_of(delta=1e-3), stop=stop)
    assert result.stopped
    assert result.ledger.participations == 12
    assert not list(tmp_path.glob("*.epoch"))


def test_nothing_that_saves_or_publishes_has_the_key(tmp_path: Path):
    plan = plan_of(delta=1e-3)
    with pytest.raises(StoppedError):
        fitted(tmp_path / "run", plan, dies_at=6)
    file = tmp_path / "run" / "_ledger.jsonl.epoch"
    (key,) = json.loads(file.read_text())[-1].values()
    ledger, model = tmp_path / "run" / "ledger.jsonl", make_model()
    said = pg.save(model, tmp_path / "saved", ledger=ledger, post_processing="new weights")
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=ledger)
    write_privacy(tmp_path, private_grad, "SGD", {}, 6)
    torch.save(private_grad.state_dict(), tmp_path / "state.pt")
    (tmp_path / "statement.html").write_text(said.to_html())
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {"checkpoint.pt", "ledger.jsonl", "model.safetensors", "statement.json", "README.md"} <= {
        p.name for p in files
    }
    assert holders(tmp_path, key) == {file}


def holders(folder: Path, key: str) -> set[Path]:
    """The files below a folder that hold a key, in one of its forms or in a compressed archive."""
    forms = [key.encode(), bytes.fromhex(key), base64.b64encode(bytes.fromhex(key))[:40]]
    found = set[Path]()
    for path in folder.rglob("*"):
        if path.is_file():
            content = [path.read_bytes()]
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    content += map(archive.read, archive.namelist())
            if any(form in part for form in forms for part in content):
                found.add(path)
    return found


class Rank(Processes):
    """One of two processes; `sent` holds what the first one sends."""

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self._rank, self._sent = rank, sent

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def count(self) -> int:
        return 2

    def broadcast_object(self, value: Any) -> Any:
        if self._rank == 0:
            self._sent.append(value)
        return self._sent[-1]


def test_all_processes_draw_one_epoch_and_the_first_keeps_its_key(tmp_path: Path):
    sent = list[Any]()
    key = tmp_path / "key"
    keys = [EpochKeys(RandomSource(), key, Rank(rank, sent), rows=ROWS) for rank in (0, 1)]
    draws = [[rows_in_step(each.stream(1), 4, 1, step, 0, ROWS).tolist() for step in range(4)] for each in keys]
    assert draws[0] == draws[1]
    keys[1].keep(1)
    assert not key.exists()
    keys[0].keep(1)
    resumed = [EpochKeys(RandomSource(), key, Rank(rank, sent), rows=ROWS) for rank in (0, 1)]
    assert [each.first_step(6, 4) for each in resumed] == [6, 6]
    again = [[rows_in_step(each.stream(1), 4, 1, step, 0, ROWS).tolist() for step in range(4)] for each in resumed]
    assert again == draws
