"""Seconds of steps taken in turn, and the peak memory of one step in a process of its own."""

import ctypes
import gc
import json
import os
import pkgutil
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.methods import OURS, PERIODS, Setup, SkipError, Step, compiled, ordinary
from benchmarks.peers import PEERS

METHODS: dict[str, Callable[[Setup], Step]] = {"ordinary": ordinary, "ordinary-compiled": compiled, **OURS, **PEERS}
SLOW = 5.0  # seconds above which a step is repeated three times only
SHORT = 0.5  # seconds below which an untimed step goes before each timed one, as in a training


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


class Built(NamedTuple):
    """A method that has taken its first steps.

    Attributes:
        step: takes one more.
        seconds: of each of the first steps.
        warnings: texts of the warnings that it gave.
    """

    step: Step
    seconds: list[float]
    warnings: list[str]


def build(setup: Setup, method: str, *, steps: int = 2, clock: str = "wall") -> Built:
    """The method after its first steps.

    Raises:
        SkipError: the method cannot take this workload.
    """
    seconds: list[float] = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            step = METHODS[method](setup)
            for _ in range(steps):
                seconds.append(_seconds(step, setup, clock))
        except SkipError:
            raise
        except Exception as error:  # a peer may fail in any way; the table says how
            first_line = (str(error).strip() or "no message").splitlines()[0]
            raise SkipError(f"{type(error).__name__}: {first_line[:600]}") from error
    return Built(step, seconds, [str(warning.message) for warning in given])


def _seconds(step: Step, setup: Setup, clock: str, count: int = 1) -> float:
    """The mean of `count` steps in a row."""
    setup.synchronize()
    before = CLOCKS[clock]()
    for _ in range(count):
        step()
    setup.synchronize()
    return (CLOCKS[clock]() - before) / count


def seconds_in_turn(
    steps: Mapping[str, Step], setup: Setup, *, repetitions: int, clock: str = "wall"
) -> dict[str, list[float]]:
    """Time every method's step, one after the other, round after round.

    A method that comes after one with gigabytes of gradients finds cold caches and pages, which no training does: short
    steps are preceded by one that is not timed. A method that does a part of its work in some steps only takes as many
    steps in its turn as one of its periods has, and their mean counts: see `PERIODS`.

    Args:
        steps: warm steps by method.
        setup: what they were built from.
        repetitions: rounds at least; more if the steps are short, fewer for a method that is slower than SLOW.
        clock: "processor" counts the time of this process only, of all its threads: other work disturbs it less.
    Returns:
        Seconds of a step in each turn, by method.
    """
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    start = time.perf_counter()
    while (rounds := len(seconds["ordinary"])) < repetitions or (
        rounds < 5 * repetitions and time.perf_counter() - start < 5
    ):
        for method, step in steps.items():
            if rounds >= 3 and median(seconds[method]) > SLOW:
                continue
            if not seconds[method] or seconds[method][-1] < SHORT:
                step()
            seconds[method].append(_seconds(step, setup, clock, PERIODS.get(method, 1)))
    return seconds


def peak_memory(setup: Setup, method: str, *, threads: int, limit: float) -> dict[str, float]:
    """Measure the memory of one step.

    On CPU, in a new process: resident memory, which the kernel counts. The process builds model, optimizer and data,
    takes a step, gives back what the allocator holds without need, and starts the kernel's count of the peak anew;
    then takes the second step. The allocator is told to give back every freed block above 128 KiB at once, so that the
    count is of memory in use, not of the allocator's history. On a GPU torch counts its tensors, in this process.

    Returns:
        MiB: `peak` of the second step above the state between steps; `kept`, what the first step added to that state:
        the optimizer's moments, buffers kept for the next step, and libraries loaded on the way.
    Raises:
        SkipError: the method cannot take this workload, or its process failed or took more than `limit` seconds.
    """
    if setup.device == "cuda":
        return _measure_memory(setup, method)
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(2**17),
        "MALLOC_TRIM_THRESHOLD_": str(2**17),
        "OMP_NUM_THREADS": str(threads),
    }
    kind = f"{type(setup).__module__}:{type(setup).__qualname__}"
    command = [sys.executable, "-m", "benchmarks.measure", method, str(threads), kind, json.dumps(asdict(setup))]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise SkipError(f"two steps took more than {limit:g} s") from error
    if child.returncode != 0:
        last_line = (child.stderr.strip() or "no message").splitlines()[-1]
        raise SkipError(last_line.removeprefix("benchmarks.methods.SkipError: ")[:200])
    return json.loads(child.stdout.splitlines()[-1])


def _measure_memory(setup: Setup, method: str) -> dict[str, float]:
    _ = setup.batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step = METHODS[method](setup)
            built = _memory(setup)
            step()
            warm = _memory(setup)
            _start_peak(setup)
            step()
        except SkipError:
            raise
        except Exception as error:  # as in `build`
            raise SkipError(f"{type(error).__name__}: {error}"[:600]) from error
    return {"peak": (_peak(setup) - warm) / 2**20, "kept": (warm - built) / 2**20}


def steady_peak(setup: Setup, step: Step) -> float:
    """MiB that a further step of a method takes on a GPU, above the state between steps."""
    before = _memory(setup)
    _start_peak(setup)
    step()
    return (_peak(setup) - before) / 2**20


def set_precision(dtype: str) -> None:
    """Allow TensorFloat-32 on a GPU for "tf32" only; torch would always allow it to convolutions."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def _memory(setup: Setup) -> int:
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _start_peak(setup: Setup) -> None:
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(setup: Setup) -> int:
    if setup.device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(field: str) -> int:
    """A field of the kernel's account of this process, in bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    _, _method, _threads, _kind, _setup = sys.argv
    torch.set_num_threads(int(_threads))
    _made: Setup = pkgutil.resolve_name(_kind)(**json.loads(_setup))
    sys.stdout.write(json.dumps(_measure_memory(_made, _method)) + "\n")
