"""Trainings as users start them: an example, or a process that a signal may end."""

import os
import runpy
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privgrad import accounting


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The main function of a script in examples/, with a noise multiplier that needs no search."""
    monkeypatch.setattr(accounting, "calibrate_noise_multiplier", lambda **_: 2.0)
    return runpy.run_path(str(Path(__file__).parent.parent / "examples" / f"{name}.py"))["main"]


def how_it_ended(work: Callable[[], object]) -> int:
    """Run `work` in a copy of this process; its exit code, negative for a signal, as subprocess has it."""
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
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
