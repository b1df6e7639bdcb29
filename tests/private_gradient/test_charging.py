"""When a step is charged: once nothing refuses any more, and on disk before a gradient leaves, however it ends."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan
from privgrad import processes
from privgrad.clip import clipping
from privgrad.ledger import file as module
from privgrad.noise import gaussian
from scripts import how_it_ended

Patch = pytest.MonkeyPatch
PLACES: dict[str, tuple[Any, str]] = {
    "the loss": (torch.nn.functional, "cross_entropy"),
    "the sum": (clipping.ClippingAccumulator, "result"),
    "the line": (os, "write"),
    "the disk": (os, "fsync"),
    "the noise": (gaussian, "_release_on_cpu"),
    "the way out": (pg.filters.EMA, "moved_on"),
}


@pytest.fixture(autouse=True)
def a_thread_for_few_numbers_too(monkeypatch: Patch) -> None:
    monkeypatch.setattr(processes, "_NUMBERS_A_THREAD", 1)


def oracle(path: Path | None, seed: int | None = None) -> pg.PrivateGradient:
    plan, ema = make_plan(seed=seed), pg.filters.EMA(0.5)
    return pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path, filter=ema)


def lines(path: Path) -> int:
    """How many releases a reader finds charged."""
    return pg.Ledger(path, read_only=True).releases


def plant(patch: Patch, place: str, work: Callable[[], object]) -> None:
    """Do something first wherever a step comes by this place."""
    module, name = PLACES[place]
    real = getattr(module, name)
    patch.setattr(module, name, lambda *given, **options: (work(), real(*given, **options))[1])


def raised(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("place", PLACES)
def test_killed_at_any_place_it_has_charged_what_left_and_goes_on(
    tmp_path: Path, monkeypatch: Patch, place: str, seed: int | None
):
    path, noted = tmp_path / "ledger.jsonl", tmp_path / "released"
    noted.touch()

    def train() -> None:
        private_grad = oracle(path, seed)
        with noted.open("ab", buffering=0) as file:
            for batch in private_grad.plan.batches(make_data(), start=private_grad.ledger.next_step):
                private_grad(batch)
                file.write(b".")
        private_grad.ledger.close()

    def kill() -> None:
        if noted.stat().st_size == 2:
            while place == "the noise" and seed is None and lines(path) < 3:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    def train_and_die() -> None:
        plant(monkeypatch, place, kill)
        train()

    assert how_it_ended(train_and_die) == -signal.SIGKILL
    uncharged = {"the loss", "the sum", "the line"} | ({"the noise"} if seed is not None else set())
    assert noted.stat().st_size == 2
    assert lines(path) == 2 + (place not in uncharged)
    train()
    assert lines(path) == 10
    assert noted.stat().st_size == 10 - (place not in uncharged)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("place", ["the loss", "the sum", "the noise", "the way out"])
@pytest.mark.parametrize("error", [pg.PrivacyError("refused"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_a_step_that_fails_before_its_noise_leaves_no_line(
    tmp_path: Path, monkeypatch: Patch, place: str, error: BaseException, seed: int | None
):
    """From the noise on it stays charged: values with part of their noise were in memory."""
    path = tmp_path / "ledger.jsonl"
    private_grad = oracle(path, seed)
    batches = (batch for batch in private_grad.plan.batches(make_data()) if batch.size > 0)
    private_grad(next(batches))
    with monkeypatch.context() as patched:
        plant(patched, place, raised(error))
        with pytest.raises(type(error)):
            private_grad(next(batches))
    charged = 1 + (place == "the way out" or (place == "the noise" and seed is None))
    assert lines(path) == private_grad.ledger.releases == charged
    private_grad(next(batches))
    assert lines(path) == private_grad.ledger.releases == charged + 1


@pytest.mark.parametrize("noise_fails", [False, True])
@pytest.mark.parametrize("place", ["the line", "the disk"])
def test_without_its_line_on_disk_no_gradient_leaves(tmp_path: Path, monkeypatch: Patch, place: str, noise_fails: bool):
    path, left = tmp_path / "ledger.jsonl", list[str]()
    private_grad = oracle(path)
    batches = private_grad.plan.batches(make_data())
    private_grad(next(batches))
    private_grad.register_raw_observer(lambda step: left.append("observed"))
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        plant(patched, place, raised(OSError(28, "No space left on device")))
        plant(patched, "the way out", lambda: left.append("filtered"))
        if noise_fails:
            plant(patched, "the noise", raised(MemoryError()))
        with pytest.raises(pg.PrivacyError, match=r"No space left .* nothing was charged and nothing released") as told:
            private_grad(next(batches))
    assert isinstance(told.value.__context__, MemoryError if noise_fails else OSError)
    assert left == []
    assert path.read_bytes() == before
    assert private_grad.ledger.releases == private_grad.state_dict()["step"] == 1
    private_grad(next(batches))
    assert lines(path) == private_grad.ledger.releases == 2


@pytest.mark.parametrize("seed", [None, 1])
def test_the_line_goes_to_disk_while_noise_is_drawn_and_before_the_gradient_leaves(
    tmp_path: Path, monkeypatch: Patch, seed: int | None
):
    """Under a seed after the noise: the line then names the release."""
    private_grad, events = oracle(tmp_path / "ledger.jsonl", seed), list[str]()
    begun, drawn = threading.Event(), threading.Event()

    def disk() -> None:
        begun.set()
        assert drawn.wait(60)
        time.sleep(0.05)
        events.append("on disk")

    def noise() -> None:
        assert begun.wait(60) if seed is None else not begun.is_set()
        events.append("noise")
        drawn.set()

    plant(monkeypatch, "the disk", disk)
    plant(monkeypatch, "the noise", noise)
    plant(monkeypatch, "the way out", lambda: events.append("left"))
    private_grad.register_raw_observer(lambda step: events.append("observed"))
    private_grad(first_batch(private_grad.plan, make_data()))
    assert events == ["noise", "on disk", "observed", "left"]


@pytest.mark.parametrize("then", ["the next step", "a close"])
def test_an_interrupt_while_the_line_is_written_leaves_it_whole(tmp_path: Path, monkeypatch: Patch, then: str):
    """Whoever uses the ledger next waits for it."""
    path = tmp_path / "ledger.jsonl"

    def train() -> None:
        private_grad = oracle(path)
        batches = private_grad.plan.batches(make_data())

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        with monkeypatch.context() as patched:
            plant(patched, "the disk", interrupt)
            with pytest.raises(KeyboardInterrupt):
                private_grad(next(batches))
            if then == "the next step":
                patched.undo()
                private_grad(next(batches))
            else:
                private_grad.ledger.close()
                assert not module.is_in_use(path)
        assert lines(path) == private_grad.ledger.releases == 1 + (then == "the next step")

    assert how_it_ended(train) == 0


def test_noise_that_is_refused_leaves_no_line(tmp_path: Path):
    path, model = tmp_path / "ledger.jsonl", make_model()
    model[0].requires_grad_(False)
    private_grad = pg.PrivateGradient(model, loss_fn, make_plan(correlation=pg.noise.Banded(2)), ledger=path)
    batches = private_grad.plan.batches(make_data())
    private_grad(next(batches))
    model[0].requires_grad_(True)
    with pytest.raises(pg.PrivacyError, match="to stay the same while noise has memory"):
        private_grad(next(batches))
    assert lines(path) == 1


@pytest.mark.parametrize("kind", ["two models", "one model"])
def test_steps_that_share_a_ledger_write_whole_lines_in_turns(tmp_path: Path, monkeypatch: Patch, kind: str):
    path, seen = tmp_path / "ledger.jsonl", list[int]()
    ledger, model = pg.Ledger(path), make_model()
    own = [model, model if kind == "one model" else make_model()]
    plan, lock = make_plan(steps=20), threading.Lock()
    oracles = [pg.PrivateGradient(each, loss_fn, plan, ledger=ledger) for each in own]
    plant(monkeypatch, "the disk", lambda: time.sleep(0.002))
    autograd: Any = torch.autograd
    before = autograd._engine_run_backward, torch.backends.mha.get_fastpath_enabled()

    def train(private_grad: pg.PrivateGradient) -> None:
        for batch, _ in zip(plan.batches(make_data()), range(10), strict=False):
            private_grad(batch)
            with lock:
                seen.append(lines(path))
                assert seen[-1] >= len(seen)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, oracles))
    assert lines(path) == ledger.releases == len(seen) == 20
    assert (autograd._engine_run_backward, torch.backends.mha.get_fastpath_enabled()) == before  # no step left its own


@pytest.mark.parametrize("in_memory", [False, True])
def test_few_numbers_and_a_ledger_in_memory_start_no_thread(tmp_path: Path, monkeypatch: Patch, in_memory: bool):
    private_grad, charged = oracle(None if in_memory else tmp_path / "ledger.jsonl"), list[int]()
    if not in_memory:
        monkeypatch.undo()
    batch = first_batch(private_grad.plan, make_data())
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread"))
    plant(monkeypatch, "the noise", lambda: charged.append(private_grad.ledger.releases))
    private_grad(batch)
    assert charged == [1]
