"""Loading in worker processes: the same draws, the law of the draws, augmentation, and failures."""

import os
import pickle
import random
import signal
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sampling import is_poisson
from torch.utils.data import DataLoader, Dataset, TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan

# Workers wait for files, not for a core: more workers than cores are what data like this need.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),  # without an accelerator
]


class Indices(Dataset[torch.Tensor]):
    """Items that tell their index, after a wait, and what the worker's random numbers were."""

    def __init__(self, count: int = 32, wait: float = 0.0) -> None:
        self.count, self.wait = count, wait

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait)
        return torch.tensor([index])


class Augmented(Indices):
    """Items with one random number of each of the three global generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


def states() -> tuple[Any, ...]:
    """The states of torch's, Python's and numpy's global generators."""
    keys: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), keys[1].tolist()


def drawn(batches: Any) -> list[list[float]]:
    return [batch.examples.flatten().tolist() for batch in batches]


def test_workers_load_what_this_process_would_load_and_in_its_order():
    plan = make_plan(seed=3)
    here = list(plan.batches(Indices()))
    there = list(plan.batches(Indices(wait=0.005), num_workers=2, prefetch_factor=3))
    assert drawn(here) == drawn(there)
    assert [batch.sampling for batch in here] == [batch.sampling for batch in there]
    assert all(batch.size == len(batch.examples) for batch in there)


def test_batches_through_four_workers_are_poisson_samples():
    plan = make_plan(sample_rate=0.1, expected_batch_size=40, num_examples=400, steps=500)
    table = np.zeros((plan.steps, 400))
    for batch in plan.batches(Indices(400), num_workers=4):
        table[batch.sampling.step, batch.examples[:, 0].numpy()] = 1
    assert is_poisson(table, 0.1)
    assert not is_poisson(table, 0.11)
    assert not is_poisson(np.roll(np.repeat(table[::2], 2, axis=0), 1), 0.1)  # each batch twice, as by two workers


def test_empty_batches_come_from_workers():
    plan = make_plan(sample_rate=1e-9, expected_batch_size=1, steps=3)
    batches = list(plan.batches(Indices(), num_workers=1))
    assert [batch.examples.shape for batch in batches] == 3 * [(0, 1)]
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in plan.batches(make_data(), num_workers=1):
        assert private_grad(batch)["0.weight"].shape == (4, 5)


def test_whole_batches_from_a_worker_share_no_memory():
    """What is written to one batch does not reach the next."""
    x, y = make_data(8).tensors
    plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8, steps=3)
    for batch in plan.batches(TensorDataset(x, y), num_workers=1):
        assert torch.equal(batch.examples[0], x)
        batch.examples[0].zero_()


def test_a_resumed_run_counts_the_batches_that_were_used_not_those_that_were_loaded(tmp_path: Path):
    whole = train(None, num_workers=0)

    def stop(model: Any) -> dict[str, float]:
        if torch.equal(next(model.parameters()), first):
            return {}
        raise KeyboardInterrupt

    first = next(make_model().parameters()).detach().clone()
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tmp_path, num_workers=2, prefetch_factor=4, evaluate=stop)
    assert caught.value.__notes__ == [
        f"fit: saved after 4 of 8 steps in {tmp_path}; run the same program again to resume."
    ]
    resumed = train(tmp_path, num_workers=2)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == 8


def train(folder: Path | None, **options: Any) -> torch.nn.Module:
    """Eight steps with a research seed, evaluated after four."""
    model, plan = make_model(), make_plan(steps=8, seed=5)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    options = {"progress": False, "num_evaluations": 2, "output_dir": folder} | options
    pg.fit(private_grad, optimizer, [make_data()[index] for index in range(32)], **options)
    return model


def test_random_augmentation_is_the_same_in_any_process_and_after_a_resume():
    plan = make_plan(seed=3)
    before = states()
    here = drawn(plan.batches(Augmented()))
    assert states() == before
    torch.manual_seed(99)
    assert drawn(plan.batches(Augmented(), num_workers=3)) == here
    assert drawn(plan.batches(Augmented(), num_workers=2, start=4)) == here[4:]
    numbers = np.concatenate([np.reshape(batch, (-1, 4))[:, 1:] for batch in here])
    assert len(np.unique(numbers)) == numbers.size  # no step, example or generator repeats another's


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_of_a_private_run_has_no_predictable_seed(workers: int):
    """torch would derive the seeds of workers from its global generator, which many programs seed with a constant."""

    def numbers() -> np.ndarray:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=2)
        return np.array(drawn(plan.batches(Augmented(), num_workers=workers))).reshape(-1, 4)[:, 1:]

    assert np.intersect1d(numbers(), numbers()).size < 5  # of 192; one equal pair by chance in 500 float32 tests


def test_random_augmentation_in_collate_is_refused_for_what_it_is():
    def flipped(items: list[Any]) -> torch.Tensor:
        return torch.stack([item.flip(0) if torch.rand(()) < 0.5 else item for item in items])

    def shifted(items: list[Any]) -> torch.Tensor:
        return torch.stack(items) - torch.stack(items).max()

    data = [torch.tensor([float(index), -1.0, float("nan")]) for index in range(32)]
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=30)
    with pytest.raises(pg.SamplingError, match=r"rows that change from call to call; augment in __getitem__"):
        list(plan.batches(data, collate=flipped))
    with pytest.raises(pg.SamplingError, match="rows that depend on other examples"):
        list(plan.batches([item[:2] for item in data], collate=shifted))
    assert len(list(plan.batches(data, collate=torch.stack))) == 30  # NaN is equal to itself here


class Scaled:
    """A collate with an own scaler."""

    def __init__(self, *, public: Any = None) -> None:
        self.mean, self.calls, self.cache = public, 0, dict[float, float]()

    def __call__(self, items: list[Any]) -> torch.Tensor:
        x = torch.stack(items)
        if self.mean is None:
            self.mean = x.mean(0)
        self.calls += 1
        self.cache.update({float(value): float(value) for value in x[:, 0]})
        return x - self.mean


def keeping_a_maximum() -> Callable[[list[Any]], torch.Tensor]:
    most = torch.zeros(3)

    def scaled(items: list[Any]) -> torch.Tensor:
        nonlocal most
        most = torch.maximum(most, torch.stack(items).amax(0))
        return torch.stack(items) / most

    return scaled


def growing_vocabulary(known: dict[float, int]) -> Callable[[list[Any]], torch.Tensor]:
    def numbered(items: list[Any]) -> torch.Tensor:
        return torch.tensor([[known.setdefault(float(word), len(known)) for word in item] for item in items])

    return numbered


KEEP: dict[str, tuple[Callable[[], Any], str]] = {
    "scaler": (Scaled, "calls that set collate.calls, collate.mean"),
    "maximum": (keeping_a_maximum, "calls that set most"),
    "vocabulary": (lambda: growing_vocabulary({}), "calls that set known"),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KEEP)
def test_a_collate_that_keeps_what_it_meets_is_refused(kind: str, workers: int):
    data = [torch.tensor([index + 1.0, -1.0, index / 2]) for index in range(32)]
    made, words = KEEP[kind]
    if workers and kind != "scaler":
        pytest.skip("a closure cannot be sent to a worker")
    with pytest.raises(pg.SamplingError, match=f"to keep no statistic of private examples, got {words}.*public data"):
        list(make_plan(steps=2).batches(data, collate=made(), num_workers=workers))


def test_a_collate_of_public_numbers_may_count_and_cache():
    data = [torch.tensor([index + 1.0, -1.0, index / 2]) for index in range(32)]
    known = {float(x): i for i, x in enumerate(torch.stack(data).unique())}
    for collate in (Scaled(public=torch.ones(3)), growing_vocabulary(known)):
        assert len(list(make_plan(steps=3).batches(data, collate=collate))) == 3


def test_a_data_loader_of_the_users_own_yields_the_plans_batches():
    plan = make_plan(seed=3)
    sampler = plan.sampler(Augmented(), start=2)
    options: dict[str, Any] = {"sampler": sampler, "batch_size": None, "num_workers": 2, "persistent_workers": True}
    loader = DataLoader(sampler.dataset, **options)
    assert len(loader) == 8
    assert drawn(loader) == drawn(plan.batches(Augmented()))[2:]
    private = make_plan()
    sampler = private.sampler(make_data())
    private_grad = pg.PrivateGradient(make_model(), loss_fn, private)
    loader = DataLoader(sampler.dataset, sampler=sampler, batch_size=None)
    first = next(iter(loader))
    private_grad(first)
    with pytest.raises(pg.SamplingError, match="already charged"):
        private_grad(next(iter(loader)))  # a second pass repeats the draws
    with pytest.raises(AttributeError, match=r"indices|key"):
        next(iter(DataLoader(sampler.dataset, sampler=range(3), batch_size=None)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"prefetch_factor": 4}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor to be an integer >= 1, got 0"),
    ],
)
def test_options_of_loading_are_checked_before_anything_is_released(
    options: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        make_plan().batches(make_data(), **options)
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "out", **options)
    assert pg.Ledger(tmp_path / "out" / "ledger.jsonl").releases == 0


def test_a_batch_moves_with_its_record():
    (batch,) = make_plan(steps=1, seed=1).batches(make_data(), pin_memory=True, num_workers=1)
    moved = batch.to("meta", non_blocking=True)
    assert [leaf.device.type for leaf in moved.examples] == ["meta", "meta"]
    assert (moved.size, moved.sampling) == (batch.size, batch.sampling)
    assert moved.examples[0].shape == batch.examples[0].shape


class Failing(Indices):
    """Data that do something bad when they are read in a worker: `how`, at the index 7, once torch has started all."""

    def __init__(self, how: Callable[[], None]) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            time.sleep(0.2)
            self.how()
        return super().__getitem__(index)


def no_file() -> None:
    raise FileNotFoundError("scan-7.png\nis gone")


def no_index() -> None:
    raise IndexError("7")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def left() -> None:
    os._exit(3)


FAILURES = [
    (no_file, r"dataset to load each example, also at index 7, got FileNotFoundError: scan-7\.png is gone; repla"),
    (no_index, r"dataset to load each example, also at index 7, got IndexError: 7; .* integers from 0"),
    # torch notices a dead worker by its signal or, on a busy machine, by a look at all workers.
    (killed, r"every worker to live .* got DataLoader worker .* (is killed by signal: Killed|exited .*); take few"),
    (left, r"every worker to live .* got DataLoader worker .* exited unexpectedly.*; take few"),
]


@pytest.mark.parametrize(("how", "message"), FAILURES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_failure_in_a_worker_is_one_clear_error(how: Callable[[], None], message: str):
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=3)
    with pytest.raises(pg.SamplingError) as caught:
        list(plan.batches(Failing(how), num_workers=2))
    assert "\n" not in str(caught.value)
    caught.match(rf"^plan\.batches: expected {message}.*\.(\n|$)")  # a note may follow
    if how in (no_file, no_index):
        with pytest.raises(pg.SamplingError, match=rf"^plan\.batches: expected {message}.*\.$"):
            list(plan.batches(Failing(how)))
    if how is no_file:
        assert "in no_file" in caught.value.__notes__[0]  # the worker's traceback


def no_rows(items: list[torch.Tensor]) -> torch.Tensor:
    raise RuntimeError("no room")


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        ({"x": torch.zeros(2), "weight": 1.0}, {"x": torch.zeros(2)}),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2), "weight": 1.0}),
        ((torch.zeros(2, dtype=torch.uint8), 1), (torch.zeros(2), 1)),
        ((torch.zeros(2), 1), (torch.zeros(2), 1.5)),
        ((torch.zeros(2), True), (torch.zeros(2), 1)),
        ([torch.zeros(2), 1], [torch.zeros(2), 1, 2]),
        ((np.zeros(2), 1), (np.zeros(2, np.float32), 1)),
    ],
)
@pytest.mark.parametrize("place", [0, 3])
def test_one_example_of_another_form_cannot_change_the_rows_of_the_others(usual: Any, other: Any, place: int):
    examples = [usual] * 8
    examples[place] = other
    plan = make_plan(sample_rate=1.0, num_examples=8, expected_batch_size=8, steps=1)
    with pytest.raises(pg.SamplingError, match="examples of the same keys, types, dtypes and shapes"):
        list(plan.batches(examples))
    (batch,) = plan.batches([usual] * 8)
    assert batch.size == 8


def test_a_failure_of_collate_in_a_worker_is_named():
    with pytest.raises(pg.SamplingError, match=r"each batch to be collated, got RuntimeError: no room"):
        list(make_plan(steps=1).batches(Indices(), collate=no_rows, num_workers=1))


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_cannot_be_sent_to_workers_is_named():
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
            next(make_plan().batches(Failing(lambda: None), num_workers=1))
        assert drawn(make_plan(seed=3, steps=2).batches(Indices(), num_workers=1))
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def test_a_worker_that_dies_during_a_step_does_not_lose_the_step(tmp_path: Path):
    """torch's signal handler would raise inside the step: charged, and not applied."""
    before = signal.getsignal(signal.SIGCHLD)
    model, plan = make_model(), make_plan(steps=8)
    private_grad, steps, others = pg.PrivateGradient(model, loss_fn, plan), [], set(active_children())

    def kill_a_worker(raw: Any) -> None:
        steps.append(raw.step)
        if raw.step == 2:
            for child in set(active_children()) - others:
                child.kill()
                time.sleep(0.1)  # the signals arrive here

    private_grad.register_raw_observer(kill_a_worker)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(
        (RuntimeError, pg.SamplingError), match=r"DataLoader worker .* (killed by signal: Killed|exited unexpectedly)"
    ) as caught:
        pg.fit(private_grad, optimizer, make_data(), num_workers=2, output_dir=tmp_path, progress=False)
    done = private_grad.ledger.releases  # on a busy machine, the signal arrives a step or two later
    assert 3 <= done < 8
    assert caught.value.__notes__ == [
        f"fit: saved after {done} of 8 steps in {tmp_path}; run the same program again to resume."
    ]
    assert steps == list(range(done))
    assert signal.getsignal(signal.SIGCHLD) in (before, torch_handler())


def torch_handler() -> Any:
    """The handler that torch leaves in place once it has started a worker."""
    iterator = iter(DataLoader(make_data(), num_workers=1))
    handler = signal.getsignal(signal.SIGCHLD)
    list(iterator)
    return handler


def test_workers_of_a_killed_training_do_not_keep_its_ledger_locked(tmp_path: Path):
    ledger = pg.Ledger(tmp_path / "ledger.jsonl")
    ready, done = os.pipe(), os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(ready[1], b"1")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    ledger.close()  # as the end of the process would
    pg.Ledger(tmp_path / "ledger.jsonl").close()
    os.write(done[1], b"1")
    os.waitpid(worker, 0)
    for end in (*ready, *done):
        os.close(end)
