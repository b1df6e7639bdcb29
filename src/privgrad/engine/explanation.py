"""explain(): say what prevents private training, how each gradient is computed, what is slow, and what a step costs."""

import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median, quantiles
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.profiler import ProfilerActivity, profile

from privgrad.checks.model_and_loss import Problem, check_loss, find_problems
from privgrad.clip.clipping import ClippingAccumulator, Flat
from privgrad.engine.factored import Factored
from privgrad.errors import expected, require_choice
from privgrad.gradient.contribution import OwnExamples, Use
from privgrad.gradient.functional import advanced, preserved, require_losses, seeded, trainable
from privgrad.gradient.probes import unused_parameters
from privgrad.gradient.reference import Vmap
from privgrad.types import LossFunction, count_examples, part_of

_ROUNDS = range(5, 25)  # steps of each kind, of which the median counts; more if they are short
_SECONDS = 1.0  # enough for all of them
_SHORT = 0.01  # seconds of a step that is mostly Python's overhead
_FEW = 0.01  # a share of all parameters, trained and frozen, that is cheap to copy
_NAMES = 4  # names that are written out
_WIDE = 1.5  # a ratio of two quartiles that is worth a note
REMEDY_OF_UNUSED = "privgrad.freeze_unused, or give examples that reach them"
_NEXT = (
    "nothing in the model's structure prevents private training; explain(model, loss_fn, public_batch) tries examples"
)
WAYS = {"rule": "by a rule", "copies": "by a copy for each example", "whole": "each example by itself"}


@dataclass(frozen=True)
class Part:
    """How the gradients of some parameters of one module are computed."""

    path: str  # the path of the module that owns them, or that is taken whole; empty for the model itself
    kind: str  # its class
    way: str  # "rule", fast; "copies", from a copy of the parameters for each example; "whole": see `WAYS`
    share: float  # of all trainable values, in (0, 1]
    why: str = ""  # the functions that need copies, why a module is taken whole, or why a rule is slow; else empty
    remedy: str = ""  # what would be faster; empty if nothing is known or little is to gain
    parameters: tuple[str, ...] = ()  # their names
    is_cheap: bool = False  # whether the copies are a small part of what a step holds for each example


@dataclass(frozen=True)
class Explanation:
    """How a model's per-example gradients are computed, and at what cost.

    Attributes:
        parts: the modules with trainable parameters, the slowest way first; empty if examples were not tried.
        unused: names of the trainable parameters that the loss does not reach; `freeze_unused` freezes them.
        seconds: the median over some steps of each kind on the given batch: "ordinary" (forward and backward) and
            "private" (clipping too), both without noise and optimizer; empty if they were not measured.
        ratios: the lower and the upper quartile of the ratio of a private step to the ordinary one next to it.
        problems: all in the model's structure that prevents private training: path, class, what, remedy.
        peak_mb: the memory that these two hold at most, besides the model and the batch, in MiB.
        examples: the number of examples of that batch.
    """

    parts: list[Part]
    unused: list[str] = field(default_factory=list[str])
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_mb: Mapping[str, float] = field(default_factory=dict[str, float])
    examples: int = 0
    ratios: tuple[float, float] = (1.0, 1.0)
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def slow(self) -> list[Part]:
        """The parts without a rule, or with one that is slow."""
        return [part for part in self.parts if part.way != "rule" or part.why]

    def __str__(self) -> str:
        places = dict[tuple[str, str, str], list[str]]()
        for one in self.problems:
            places.setdefault((one.module, one.what, one.remedy), []).append(one.path or "the model")
        rows = [f"- {', '.join(paths)}: {kind} {what}; {do}" for (kind, what, do), paths in places.items()]
        for row in self.rows():
            remedy = f"; {row['remedy']}" if row["remedy"] else ""
            rows.append(f"- {row['names']}, {row['share']}: {row['computed']}: {row['why']}{remedy}")
        return "\n".join([*rows, *self.lines()])

    def rows(self) -> list[dict[str, str]]:
        """Return the slow parts as rows of a table, with equal parts in one row."""
        groups = dict[tuple[str, ...], list[Part]]()
        for part in self.slow:
            computed = WAYS[part.way] + (", cheap" if part.is_cheap else "")
            why = part.why.replace(f"'{part.path}'", "") if part.way == "whole" else part.why
            groups.setdefault((computed, why, part.remedy), []).append(part)
        return [
            {
                "names": _names_of(parts),
                "type": ", ".join(dict.fromkeys(part.kind for part in parts)),
                "share": f"{sum(part.share for part in parts):.1%}",
                "computed": computed,
                "why": parts[0].why,
                "remedy": remedy,
            }
            for (computed, _, remedy), parts in groups.items()
        ]

    def lines(self) -> list[str]:
        """Return the sums over all parts as lines of text: shares, unused parameters, time and memory."""
        if not self.parts:
            found = len({problem.path for problem in self.problems})
            return [f"{found} modules prevent private training" if found else _NEXT]
        lines = list[str]()
        for way, words in WAYS.items():
            share = sum(part.share for part in self.parts if part.way == way)
            if share > 0:
                lines.append(f"{share:.1%} of the parameters {words}")
        if self.unused:
            lines.append(f"not used by the loss ({REMEDY_OF_UNUSED}): {', '.join(self.unused)}")
        lines.append("this holds for examples like these: others may reach other parameters, or be computed otherwise")
        if self.seconds:
            one, other = self.seconds["ordinary"], self.seconds["private"]
            least, most = self.ratios
            spread = f" ({least:.2g} to {most:.2g})" if most > _WIDE * least else ""
            lines.append(
                f"a step of {self.examples} examples, without noise and optimizer: {_milliseconds(other)}; an ordinary "
                f"step takes {_milliseconds(one)}, so the ratio is {other / one:.2g}{spread}"
            )
            if one < _SHORT:
                overhead = "below 10 ms, much of the time is Python's overhead"
                lines.append(f"{overhead}: this number is smaller for a larger model or batch")
            if recurrent := {part.kind for part in self.parts if part.way == "rule"} & {"LSTM", "GRU", "RNN"}:
                lines.append(f"{', '.join(sorted(recurrent))}: privgrad's own forward pass replaces torch's faster one")
        if self.peak_mb:
            one, other = self.peak_mb["ordinary"], self.peak_mb["private"]
            lines.append(f"memory besides the model: {other:.2g} MiB, an ordinary step {one:.2g} MiB")
        return lines


def _names_of(parts: list[Part]) -> str:
    noun = "parameters"
    names = [name for part in parts for name in part.parameters]
    if parts[0].way == "whole":
        noun = "modules"
        names = [f"'{part.path}'" if part.path else "the whole model" for part in parts]
    return ", ".join(names) if len(names) <= _NAMES else f"{', '.join(names[:2])} and {len(names) - 2} more {noun}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < _SHORT else f"{1000 * seconds:.0f} ms"


def explain(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    public_batch: Any = None,
    *,
    engine: Literal["factored", "vmap"] = "factored",
) -> Explanation:
    """List what prevents private training; if nothing does, say how each gradient would be computed.

    `explain(model)` lists all layers that private training refuses. With public examples, it tries a step. It measures
    an ordinary and a private step too, both without noise and optimizer, and takes some seconds. The answer holds for
    examples like these. Others may reach other parameters, or need other layers.

    Args:
        model: the module, in the mode that it will be trained in. It is not changed.
        loss_fn: (model, examples) -> losses, shape (B,). Give it with public_batch, or neither.
        public_batch: public examples, as loss_fn takes them, with leading dimension B >= 1; best as many as a step has.
        engine: as in PrivateGradient.
    Returns:
        See `Explanation`; `print` shows it. If the model's structure has problems, it holds these alone.
    Raises:
        PrivacyError: public_batch is a batch of a plan or holds no examples, or PrivateGradient would refuse the loss.
            A parameter that the loss does not reach is no error here.
    Privacy:
        It uses the model and public examples only.
    """
    require_choice("explain", "engine", engine, ("factored", "vmap"))
    if (loss_fn is None) != (public_batch is None):
        missing = "loss_fn" if loss_fn is None else "public_batch"
        raise expected("explain", missing, "to be given", None, "give loss_fn and public_batch, or the model alone")
    problems = find_problems(model)
    if problems or loss_fn is None:
        return Explanation([], problems=problems)
    unused = unused_parameters("explain", model, loss_fn, public_batch)
    own = trainable(model)
    for name in unused:
        own[name].requires_grad_(False)
    try:
        loss_fn = OwnExamples(loss_fn)
        check_loss(model, loss_fn, public_batch)
        computes = Factored(model, loss_fn) if engine == "factored" else Vmap(model, loss_fn)
        steps = _steps(computes, model, loss_fn, public_batch)
        with seeded(0), advanced(model, keep=False):
            for step in (*steps.values(), *steps.values()):  # the engine checks the first, second, fourth ... step
                step()
            seconds, ratios = _seconds(steps)
            devices = {parameter.device for parameter in own.values()}
            peak_mb = {name: _peak_of(step, devices) for name, step in steps.items()}
        parts = parts_of(model, computes.uses())
    finally:
        for name in unused:
            own[name].requires_grad_(True)
    return Explanation(parts, unused, seconds, peak_mb, count_examples(public_batch), ratios)


def parts_of(model: nn.Module, uses: Mapping[str, Use]) -> list[Part]:
    """Return the parts of an explanation, the slowest way first."""
    own, names = trainable(model), dict[tuple[str, Use], list[str]]()
    few = _FEW * sum(p.numel() for p in model.parameters())
    for name, use in uses.items():
        path = use.unit if use.way == "whole" else name.rpartition(".")[0]
        is_cheap = use.way == "copies" and (use.is_cheap or use.floats <= few)
        names.setdefault((path, replace(use, floats=0, is_cheap=is_cheap)), []).append(name)
    total = sum(p.numel() for p in own.values())
    found = list[Part]()
    for (path, use), those in names.items():
        module, share = model.get_submodule(path), sum(own[name].numel() for name in those) / total
        why, remedy = use.why, "" if use.is_cheap else use.remedy
        if why and (made := _makers_of_weights(module)):
            why, remedy = f"{why}; {made} computes the weights", "" if use.is_cheap else f"leave out {made}"
        found.append(Part(path, type(module).__name__, use.way, share, why, remedy, tuple(those), use.is_cheap))
    return sorted(found, key=lambda part: (list(WAYS).index(part.way), not part.is_cheap, part.share), reverse=True)


def _makers_of_weights(module: nn.Module) -> str:
    """Return what computes weights of a module from others, such as "WeightNorm"; "" if nothing of torch does."""
    is_list = isinstance(module, ParametrizationList)
    own: Iterable[Any] = [module] if is_list else getattr(module, "parametrizations", {}).values()
    hooks: Iterable[Any] = vars(module)["_forward_pre_hooks"].values()
    made = [type(one).__name__ for several in own for one in several]
    made += [type(hook).__name__ for hook in hooks if hasattr(hook, "compute_weight")]
    return " and ".join(dict.fromkeys(name.strip("_") for name in made))


def _steps(
    engine: Factored | Vmap, model: nn.Module, loss_fn: LossFunction, examples: Any
) -> dict[str, Callable[[], None]]:
    own, size = trainable(model), count_examples(examples)

    def ordinary() -> None:
        with torch.enable_grad(), preserved(model):
            losses = require_losses(loss_fn(model, examples), size)
            torch.autograd.grad(losses.mean(), list(own.values()))

    def private() -> None:
        few = engine.microbatch_size(examples, size)
        clipped = ClippingAccumulator(like=own, clip=Flat(), max_grad_norm=1.0, expected_size=size)
        for start in range(0, size, few):
            clipped.add(engine(part_of(examples, slice(start, start + few))))
        clipped.result()

    return {"ordinary": ordinary, "private": private}


def _seconds(steps: Mapping[str, Callable[[], None]]) -> tuple[dict[str, float], tuple[float, float]]:
    """Return the median time of each step, in turns; and the quartiles of the ratio within a turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + _SECONDS
    for turn in range(_ROUNDS.stop):
        if turn >= _ROUNDS.start and time.perf_counter() > end:
            break
        for name, step in steps.items():
            _wait()
            start = time.perf_counter()
            step()
            _wait()
            found[name].append(time.perf_counter() - start)
    ratios = [other / one for one, other in zip(found["ordinary"], found["private"], strict=True)]
    least, _, most = quantiles(ratios, method="inclusive")
    return {name: median(values) for name, values in found.items()}, (least, most)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _peak_of(step: Callable[[], None], devices: Collection[torch.device]) -> float:
    """Return the most memory that a step holds besides what it was given, in MiB; with GPUs, theirs alone."""
    if gpus := [device for device in devices if device.type == "cuda"]:
        before = 0
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
            before += torch.cuda.memory_allocated(gpu)
        step()
        return (sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) - before) / 2**20
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)  # else, old torch warns
    with _without_output():
        recorder.start()
    try:
        step()
    finally:
        with _without_output():
            recorder.stop()
    events: Any = recorder.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate((size for _, size in changes), initial=0)) / 2**20


@contextmanager
def _without_output() -> Generator[None]:
    """Discard what the profiler writes about itself to the process's standard error."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
