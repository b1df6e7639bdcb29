"""Trainings as users start them: an example, or a process that a signal may end."""

import os
import random
import runpy
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from conftest import account_by_rdp, seed_of
from privgrad.accounting import accountant as accounting


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The main function of a script in examples/, with a noise multiplier that needs no search, by RDP."""
    monkeypatch.setattr(accounting, "calibrate_noise_multiplier", lambda **_: 2.0)
    account_by_rdp(monkeypatch)
    return runpy.run_path(str(Path(__file__).parent.parent / "examples" / f"{name}.py"))["main"]


def how_it_ended(work: Callable[[], object]) -> int:
    """Run `work` in a copy of this process; its exit code, negative for a signal, as subprocess has it."""
    return os.waitstatus_to_exitcode(os.waitpid(started(work), 0)[1])


def kill_again_and_again(train: Callable[[], object], folder: Path, kills: int) -> None:
    """Start a training and SIGKILL it a random moment after a few releases, that often; compare after each.

    What was charged is read from folder/ledger.jsonl, what was released from a file that the children append to.
    """
    noted, waits, charged = folder.with_name("released"), random.Random(seed_of(0)), 0
    noted.touch()

    def noting_releases() -> None:
        descriptor, original = os.open(noted, os.O_WRONLY | os.O_APPEND), pg.PrivateGradient.__call__

        def noting(self: pg.PrivateGradient, batch: pg.Batch) -> pg.NoisyGradient:
            gradient = original(self, batch)
            os.write(descriptor, f"{batch.sampling.step}\n".encode())
            time.sleep(0.005)  # so that it is killed amid training, however busy the machine is
            return gradient

        pg.PrivateGradient.__call__ = noting  # pyright: ignore[reportAttributeAccessIssue]
        train()

    for _ in range(kills):
        before, child = noted.read_text().count("\n"), started(noting_releases)
        enough, deadline = before + waits.randrange(8, 12), time.monotonic() + 60
        while noted.read_text().count("\n") < enough and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(waits.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "it ended before it was killed"
        ledger = pg.Ledger(folder / "ledger.jsonl", read_only=True)
        # Under a seed a step that is computed again is the same release: distinct steps are what is to be paid for.
        assert ledger.releases >= max(charged, len(set(noted.read_text().split()))) > before // 2
        charged = ledger.releases


def started(work: Callable[[], object]) -> int:
    """The process that does `work`, a copy of this one."""
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # the threads of a pool are not copied: whoever waits for them waits for ever
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child
