"""What `benchmarks.zoo` and `benchmarks.gpu` measure of one architecture or workload, in a process of its own."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Built, build, peak_memory, seconds_in_turn, set_precision, steady_peak
from benchmarks.methods import OURS, Setup, SkipError
from benchmarks.run import machine
from tests.zoo.architectures import ARCHITECTURES, REAL, make
from tests.zoo.exactness import KINDS, computed_by_example, differences

Row = dict[str, Any]
STEPS, CHECKED = 1_000, 10  # of a training, and how many of them the engine checks: the 1st, 2nd, 4th, ... 512th
MEMORY = ("plain", "captured", "opacus-ghost")  # methods whose memory is measured beside that of the ordinary step
FIRST = 4  # calls before the rounds: the 1st, 2nd and 4th are checked


@dataclass(frozen=True)
class Architecture(Setup):
    """An architecture at its real size, under one setting; `name` is its name in tests/zoo."""

    @property
    def batch_size(self) -> int:
        return self.examples or REAL.batch

    @cached_property
    def case(self) -> Any:
        return make(self.name, replace(REAL, batch=self.batch_size), torch.float32, self.device)

    def model(self) -> nn.Module:
        return make(self.name, replace(REAL, batch=self.batch_size), torch.float32, self.device).model

    @cached_property
    def batch(self) -> Any:
        return self.case.examples

    def losses(self, model: Any, batch: Any) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bf16"):
            return self.case.losses(model, batch)


def measure(setup: Architecture, methods: Iterable[str], rounds: int, limit: float) -> Iterator[Row]:
    """Yield the rows of `timed`, each with what `inspect` finds."""
    found = inspect(setup.name)
    for row in timed(setup, methods, rounds, limit):
        yield row | found


def timed(setup: Setup, methods: Iterable[str], rounds: int, limit: float) -> Iterator[Row]:
    """Yield one row again and again, each time with more of it filled in.

    Args:
        setup: an architecture or a workload.
        methods: what is measured beside the ordinary step.
        rounds: in which all methods take turns.
        limit: seconds for the process that measures the memory of one method.
    """
    clock = "processor" if setup.device == "cpu" else "wall"
    set_precision(setup.dtype)
    built = {"ordinary": build(setup, "ordinary", clock=clock)}
    row: Row = {
        "name": setup.name, "batch_size": setup.batch_size, "device": setup.device, "precision": setup.dtype,
        "parameters": sum(p.numel() for p in setup.model().parameters() if p.requires_grad), "clock": clock,
        "failed": {}, "machine": machine(setup), "date": date.today().isoformat(),
    }  # fmt: skip
    yield row
    for method in methods:
        try:
            built[method] = build(setup, method, steps=FIRST if method in OURS else 2, clock=clock)
        except SkipError as reason:
            row["failed"][method] = str(reason)
        yield row
    row["first_seconds"] = {method: round(found.seconds[0], 6) for method, found in built.items()}
    steps = {method: found.step for method, found in built.items()}
    seconds = seconds_in_turn(steps, setup, repetitions=rounds, clock=clock)
    row["seconds"] = {method: round(median(values), 6) for method, values in seconds.items()}
    usual = row["seconds"]["ordinary"]
    row["ratio"] = {method: round(value / usual, 3) for method, value in row["seconds"].items()}
    row["checks"] = {method: _checks(built[method], row["seconds"][method], usual) for method in built.keys() & OURS}
    yield row
    if setup.device == "cuda":
        row["steady_peak_mb"] = {method: round(steady_peak(setup, step), 1) for method, step in steps.items()}
        yield row
    del built, steps
    row["peak_mb"] = {}
    for method in ("ordinary", *(method for method in seconds if method in MEMORY)):
        try:
            found = peak_memory(setup, method, threads=torch.get_num_threads(), limit=limit)
            row["peak_mb"][method] = round(found["peak"], 1)
        except SkipError as reason:
            row["failed"][f"memory of {method}"] = str(reason)
        yield row


def inspect(name: str) -> Row:
    """Compare the tiny model with single examples, and list what the engine computes for each example by itself.

    Returns:
        `exact`: the largest relative error by kind of gradient, or the message of a refusal; `by_example`: number of
        modules by class; `share_by_example`: of the trainable parameters.
    """
    warnings.simplefilter("ignore")
    found: Row = {"exact": {}}
    for kind in KINDS if name in ARCHITECTURES else ():  # the others have BatchNorm: single examples are another model
        try:
            found["exact"][kind] = max(differences(make(name), make(name), kind).values())
        except Exception as error:  # the table says how
            found["exact"][kind] = f"{type(error).__name__}: {error}"
    try:
        found["by_example"], found["share_by_example"] = computed_by_example(make(name))
    except Exception:  # it is refused, as the lines above say
        found["by_example"], found["share_by_example"] = {}, 0.0
    return found


def _checks(built: Built, step: float, ordinary: float) -> Row:
    """Return what the checks of the engine cost, in ordinary steps, and as a share of the time of many steps."""
    first, checked = built.seconds[0], median([built.seconds[1], built.seconds[3]])
    extra = first - step + (CHECKED - 1) * (checked - step)
    return {
        "first": round(first / ordinary, 2),
        "checked": round(checked / ordinary, 2),
        "share": round(max(0.0, extra) / (STEPS * step), 5),
    }
