"""Small public fixtures: a plan, a model, data, a loss."""

import functools
import gc
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.accounting import accountant as accounting
from privgrad.accounting import composition, on_disk
from privgrad.accounting.mechanisms import Mechanism
from privgrad.clip import clipping
from privgrad.clip.clipping import RawClipping
from privgrad.gradient.factor import Factor
from privgrad.types import ClippedSum

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model that is not here is a reason to skip, not to wait
_TEST_SEED = int(os.environ.get("PRIVGRAD_TEST_SEED", "0"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays. No collection of garbage looks at it: each took half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@contextmanager
def using_threads(count: int) -> Generator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seed_of(number: int) -> int:
    """A statistical test's own seed; another one for every PRIVGRAD_TEST_SEED, which is 0 unless it is set."""
    return 1000 * _TEST_SEED + number


def make_plan(**changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {
        "sample_rate": 0.25,
        "steps": 10,
        "expected_batch_size": 8,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "num_examples": 32,
    }
    return pg.PrivacyPlan(**(numbers | changed))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def make_data(count: int = 32, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 5, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def first_batch(plan: pg.PrivacyPlan, data: TensorDataset) -> pg.Batch:
    """The first batch of the plan that holds an example."""
    return next(batch for batch in plan.batches(data) if batch.size > 0)


@pytest.fixture(autouse=True, scope="session")
def costs_are_computed() -> Iterator[None]:
    """No cost is read from the user's cache, nor written to it: some are of planted faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_disk, "cache", Path(os.devnull).joinpath)
        yield


def account_by_rdp(patch: pytest.MonkeyPatch) -> None:
    """For tests that are not about epsilon: by RDP alone, at a few orders. It takes milliseconds, and PLD seconds.

    What is found so is kept apart from what the library keeps, which other tests of this process read.
    """
    real = composition.epsilon_of.__wrapped__

    @functools.cache
    def fast(mechanisms: tuple[Mechanism, ...], delta: float, _: accounting.Accountant) -> float:
        sampled = all(getattr(mechanism, "scheme", "poisson") == "poisson" for mechanism in mechanisms)
        return real(mechanisms, delta, "rdp" if sampled else "coarse rdp")  # "rdp" covers Poisson samples alone

    patch.setattr(composition, "RDP_ORDERS", (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256))
    patch.setattr(composition, "epsilon_of", fast)


@pytest.fixture(scope="module")
def by_rdp() -> Iterator[None]:
    """account_by_rdp for all tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        account_by_rdp(patch)
        yield


@pytest.fixture
def by_rdp_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """account_by_rdp for one test."""
    account_by_rdp(monkeypatch)


@pytest.fixture
def without_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about a report's plots: they are made, and not rendered, which takes most of its time."""

    from privgrad_lab.report import figures

    def made(draw: Callable[[], Any]) -> bytes:
        draw()
        return bytes(24)

    monkeypatch.setattr(figures, "png", made)
    monkeypatch.setattr(figures, "svg", made)


@pytest.fixture
def plan() -> Callable[..., pg.PrivacyPlan]:
    return make_plan


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real browser, for the pages that are written for one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


def forking() -> ForkServerContext:
    """Processes forked from one that has imported what they need, so that none takes seconds to begin.

    That one process serves all tests of this one. Python 3.11 does not tell it where the tests' modules are.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distributed_job", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def clipped_sum(chunks: Iterable[Mapping[str, Factor]], **options: Any) -> tuple[ClippedSum, RawClipping]:
    """Clip and add all chunks."""
    accumulator = clipping.ClippingAccumulator(**options)
    for chunk in chunks:
        accumulator.add(chunk)
    return accumulator.result()
