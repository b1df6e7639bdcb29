"""explain(): say how the gradient of each parameter is computed, what is slow, and what a step costs.

Users call it with public examples, and `privgrad doctor` does. `PrivateGradient.explain` makes the same `Explanation`
from the steps so far. The privacy guarantee does not rest on this file: it reads the model and public examples only.
"""

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from privgrad.errors import expected, require_callable
from privgrad.gradient.clipping import ClippingAccumulator, Flat
from privgrad.gradient.engines.factored import Factored
from privgrad.gradient.engines.uses import Use
from privgrad.gradient.module_state import preserved, require_losses, seeded, trainable
from privgrad.gradient.probes import losses_on_copies
from privgrad.gradient.validation import check_loss, require_supported
from privgrad.types import Batch, LossFunction, count_examples, part_of

_ROUNDS = 5  # steps of each kind, of which the median counts
_MANY = 0.01  # a share of the values that is worth a faster way
WAYS = {"rule": "by a rule", "copies": "by a copy for each example", "whole": "each example by itself"}


@dataclass(frozen=True)
class Part:
    """How the gradients of one module's own parameters are computed.

    Attributes:
        path: the module's path; empty for the model itself.
        kind: its class.
        way: "rule", fast; "copies", from a copy of the parameters for each example; "whole", a whole module is computed
            for each example by itself.
        share: its share of all trainable values, in (0, 1].
        why: the functions that need copies, or the reason why a module is taken whole; empty for a rule.
        remedy: what would be faster; empty if nothing would or little is to gain.
    """

    path: str
    kind: str
    way: str
    share: float
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Explanation:
    """How a model's per-example gradients are computed, and at what cost.

    Attributes:
        parts: the modules with trainable parameters, the slowest way first.
        unused: names of the trainable parameters that the loss does not reach; `freeze_unused` freezes them.
        seconds: of an "ordinary" step (forward and backward) and of a "private" one (clipping too) on the given batch;
            empty if they were not measured.
        peak_mb: the memory that these two hold at most, besides the model and the batch, in MiB.
        examples: the number of examples of that batch.
    """

    parts: list[Part]
    unused: list[str] = field(default_factory=list[str])
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_mb: Mapping[str, float] = field(default_factory=dict[str, float])
    examples: int = 0

    @property
    def slow(self) -> list[Part]:
        """The parts without a rule."""
        return [part for part in self.parts if part.way != "rule"]

    def __str__(self) -> str:
        """Return some lines of text."""
        slow = list[str]()
        for part in self.slow:
            remedy = f"; {part.remedy}" if part.remedy else ""
            name = f"{part.path or '(the model)'}, {part.kind}, {part.share:.1%}"
            slow.append(f"- {name}: {WAYS[part.way]}: {part.why}{remedy}")
        return "\n".join([*slow, *self.lines()])

    def lines(self) -> list[str]:
        """Return the sums over all parts as lines of text: shares, unused parameters, time and memory."""
        lines = list[str]()
        for way, words in WAYS.items():
            share = sum(part.share for part in self.parts if part.way == way)
            if share > 0:
                lines.append(f"{share:.1%} of the parameters {words}")
        if self.unused:
            lines.append(f"not used by the loss (privgrad.freeze_unused): {', '.join(self.unused)}")
        if self.seconds:
            one, other = self.seconds["ordinary"], self.seconds["private"]
            lines.append(
                f"a step of {self.examples} examples: {other:.3g} s, {other / one:.2f} of an ordinary one ({one:.3g} s)"
            )
        if self.peak_mb:
            one, other = self.peak_mb["ordinary"], self.peak_mb["private"]
            lines.append(f"memory besides the model: {other:.0f} MiB, an ordinary step {one:.0f} MiB")
        return lines


def explain(model: nn.Module, loss_fn: LossFunction, public_batch: Any) -> Explanation:
    """Say how the gradient of each parameter would be computed, by a step on some public examples.

    It measures an ordinary and a private step too, without noise and optimizer, and takes some seconds.

    Args:
        model: the module, in the mode that it will be trained in. It is not changed.
        loss_fn: (model, examples) -> losses, shape (B,).
        public_batch: public examples, as loss_fn takes them, with leading dimension B >= 1; best as many as a step has.
    Returns:
        See `Explanation`; `print` shows it.
    Raises:
        PrivacyError: public_batch is a batch of a plan, or PrivateGradient would refuse the model or the loss. A
            parameter that the loss does not reach is no error here.
    Privacy:
        It uses the model and public examples only.
    """
    require_callable("explain", "loss_fn", loss_fn, "give (model, examples) -> losses of shape (B,)")
    if isinstance(public_batch, Batch):
        got, remedy = "a batch of a privacy plan", "give public examples, since the cost is shown without noise"
        raise expected("explain", "public_batch", "to be public", got, remedy)
    require_supported(model)
    unused = _unused(model, loss_fn, public_batch)
    own = trainable(model)
    for name in unused:
        own[name].requires_grad_(False)
    try:
        check_loss(model, loss_fn, public_batch)
        engine = Factored(model, loss_fn)
        steps = _steps(engine, model, loss_fn, public_batch)
        with seeded(0):
            steps["private"]()
            seconds, peak_mb = _seconds(steps), {name: _peak_of(step) for name, step in steps.items()}
        parts = parts_of(model, engine.uses())
    finally:
        for name in unused:
            own[name].requires_grad_(True)
    return Explanation(parts, unused, seconds, peak_mb, count_examples(public_batch))


def parts_of(model: nn.Module, uses: Mapping[str, Use]) -> list[Part]:
    """Return the parts of an explanation, the slowest way first; PrivateGradient calls it too."""
    own, parts = trainable(model), dict[tuple[str, str, str], float]()
    total = sum(p.numel() for p in own.values())
    for name, use in uses.items():
        key = (name.rpartition(".")[0], use.way, use.why)
        parts[key] = parts.get(key, 0.0) + own[name].numel() / total
    found = [
        Part(path, type(model.get_submodule(path)).__name__, way, share, why, _remedy_of(way, share))
        for (path, way, why), share in parts.items()
    ]
    return sorted(found, key=lambda part: (list(WAYS).index(part.way), part.share), reverse=True)


def _remedy_of(way: str, share: float) -> str:
    """Return what would be faster than a way, if there is enough to gain."""
    if way == "rule" or share < _MANY:
        return ""
    if way == "copies":
        return "use it in F.linear, x @ weight, F.embedding, a convolution or a normalization instead"
    return "change that, or register a rule for the module (register_rule)"


def _unused(model: nn.Module, loss_fn: LossFunction, examples: Any) -> list[str]:
    """Return the names of trainable parameters that the losses do not reach."""
    parameters = {name: p.detach().clone().requires_grad_() for name, p in trainable(model).items()}
    losses = losses_on_copies(model, loss_fn, examples, parameters)
    if not losses.requires_grad:
        return []
    grads: Any = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    return [name for name, grad in zip(parameters, grads, strict=True) if grad is None]


def _steps(engine: Factored, model: nn.Module, loss_fn: LossFunction, examples: Any) -> dict[str, Callable[[], None]]:
    """Return an ordinary and a private step, without noise and optimizer."""
    own, size = trainable(model), count_examples(examples)

    def ordinary() -> None:
        with torch.enable_grad(), preserved(model):
            losses = require_losses(loss_fn(model, examples), size)
            torch.autograd.grad(losses.mean(), list(own.values()))

    def private() -> None:
        few = engine.microbatch_size(examples, size)
        clipped = ClippingAccumulator(
            like=own, clip=Flat(), max_grad_norm=1.0, inverse_scales={}, grouped=False, expected_size=size
        )
        for start in range(0, size, few):
            clipped.add(engine(part_of(examples, slice(start, start + few))))
        clipped.result()

    return {"ordinary": ordinary, "private": private}


def _seconds(steps: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median time of each step, in turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            _finish()
            start = time.perf_counter()
            step()
            _finish()
            found[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in found.items()}


def _finish() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _peak_of(step: Callable[[], None]) -> float:
    """Return the most memory that a step holds at a time besides what it was given, in MiB, as torch counts it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
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
