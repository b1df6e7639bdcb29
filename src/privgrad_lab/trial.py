"""An estimate of what trainings will take on this machine, from three steps of each kind of method."""

import resource
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from privgrad.data import DataSet
from privgrad_lab import build
from privgrad_lab.featuring import own
from privgrad_lab.metrics import unit_values
from privgrad_lab.records import Record
from privgrad_lab.runner import Phase, Run, prepare
from privgrad_lab.spec import MethodTable, Spec

_FIRST = 16  # examples in the first steps
_PATIENCE = 2.0  # seconds for the last step, which is as large as they allow
_EVALUATED = 64


class Estimate(NamedTuple):
    """Trainings that are left of a spec, and what they will take."""

    trainings: int
    seconds: float
    gigabytes: float
    device: str
    cores: int

    def text(self, price_per_hour: float | None = None) -> str:
        """Return the estimate in words, with its cost in money where an hour of the machine has a price."""
        hours = self.seconds / 3600
        time = f"{hours:,.1f} hours" if hours >= 1 else f"{self.seconds / 60:,.1f} minutes"
        place = "a GPU" if self.device == "cuda" else f"{self.cores} core{'s' if self.cores > 1 else ''}"
        spent = f" ({hours * self.cores:,.2f} core hours)" if self.device == "cpu" and self.cores > 1 else ""
        cost = "" if price_per_hour is None else f", and cost {hours * price_per_hour:,.2f}"
        kind = "memory of the GPU" if self.device == "cuda" else "memory"
        left = f"{self.trainings:,} training{'s' if self.trainings > 1 else ''}"
        return f"About {time} of {place}{spent}, {self.gigabytes:.1f} GB of {kind}{cost}, for {left}, by a trial."


class _Times(NamedTuple):
    slope: float
    last: float  # seconds of the last step
    size: int
    evaluation: float  # seconds of each evaluated example
    gigabytes: float

    def step(self, size: float) -> float:
        return max(0.0, self.last + self.slope * (size - self.size))


def estimate(spec: Spec, data: DataSet, records: Sequence[Record] = (), *, tunes: bool = True) -> Estimate | None:
    """Return what the trainings of a spec without a record will take; None if there is none.

    Methods with the same parts are tried once. The steps charge no ledger of a training, and change none: each has
    a model and random streams of its own. Grids that are extended and reports are not foretold. `tunes` is false for
    a spec whose methods are trained only.
    """
    times, seconds, most, trainings = dict[str, _Times](), 0.0, 0.0, 0
    for method in spec.methods:
        counts: dict[Phase, int] = {"tuning": 0, "final": len(spec.run.seeds)}
        if tunes and spec.tuning is not None and spec.is_tuned(method):
            counts["tuning"] = len(spec.grid(method)) * len(spec.tuning.seeds)
        for phase, count in counts.items():
            done = sum(record["method"] == method.name and record["phase"] == phase for record in records)
            if (left := count - done) <= 0:
                continue
            kind = f"{method.model} {method.features} {method.local} {method.non_private} {method.group_size} "
            kind += " ".join(f"{part} {table.use} {table.options.get('mode')}" for part, table in method.calls.items())
            if kind not in times:
                times[kind] = _tried(spec, method, data)
            found, plan = times[kind], spec.plan(0, method, tuning=phase == "tuning")
            part = data.validation if phase == "tuning" and len(data.validation) else data.test
            rows = len(part) + (len(data.train) if data.frequency_edges is not None else 0)
            each = plan.steps * found.step(plan.expected_batch_size)
            seconds += left * (each + spec.run.num_evaluations * rows * found.evaluation)
            most, trainings = max(most, found.gigabytes), trainings + left
    cores = 1 if build.device_of(spec) == "cuda" else torch.get_num_threads()
    return Estimate(trainings, seconds, most, build.device_of(spec), cores) if trainings else None


def _tried(spec: Spec, method: MethodTable, data: DataSet) -> _Times:
    """Time steps of a plan of small batches, with a fresh model, and an evaluation."""
    spec, data = own(spec, method, data)
    is_gpu = build.device_of(spec) == "cuda"

    def now() -> float:
        if is_gpu:
            torch.cuda.synchronize()
        return perf_counter()

    devices = range(torch.cuda.device_count()) if is_gpu else ()
    with warnings.catch_warnings(), torch.random.fork_rng(devices), build.autocast(spec):
        warnings.simplefilter("ignore")
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        plain = method.model_copy(update={"warm_start": None, "bands": None})
        made = prepare(spec, Run(plain, spec.grid(method)[0], 0, "final"), data)
        whole, group = made.plan.expected_batch_size, made.plan.group_size
        sizes, seconds = [min(_FIRST * group, whole)] * 2, list[float]()
        while len(seconds) < 3:
            size = sizes[min(len(seconds), 2)]
            small = replace(
                made.plan,
                sample_rate=size / len(data.train),
                expected_batch_size=size,
                steps=1,
                sampling="poisson",
                max_batch_size=None,
                simulates=None,
                target_epsilon=None,
            )
            private_grad = made.private_grad.beside(plan=small)
            start = now()
            for batch in small.batches(data.train):
                made.optimizer.step(grad=private_grad(batch))
            seconds.append(now() - start)
            if len(seconds) == 2:
                sizes.append(max(size, min(whole, int(size * _PATIENCE / seconds[1]) // group * group)))
        part = TensorDataset(*data.test[:_EVALUATED])
        start = now()
        unit_values(made.model, part, data, ["loss"])
        evaluation = (now() - start) / len(part)
        # Of the process, on a CPU; macOS counts bytes.
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        used = torch.cuda.max_memory_allocated() if is_gpu else used
    grown = sizes[2] - sizes[1]
    slope = max(0.0, seconds[2] - seconds[1]) / grown if grown else 0.0
    return _Times(slope, seconds[2], sizes[2], evaluation, used / 1e9)
