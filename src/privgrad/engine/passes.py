"""The forward and backward passes of the fast engine: from examples to factors, with the layouts of an audit."""

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from privgrad.engine.capture import Capture
from privgrad.engine.factors.displacement import Displacements
from privgrad.engine.factors.outer import Outer
from privgrad.engine.factors.parametrized import JacobianNorms, Pulled
from privgrad.engine.factors.weight_standardization import StandardizedWeight
from privgrad.engine.layers.base import find_rule, require_unwritten, takes_displacements
from privgrad.engine.layouts import CallRecord, Calls, LayoutCache
from privgrad.engine.shared_values import FunctionsHiddenError
from privgrad.engine.units import HvpTerms, Tap, Tapped, units, use_of
from privgrad.errors import PrivacyError
from privgrad.gradient.autograd_graph import (
    AccumulateGrad,
    gradients_at,
    own_function_of,
    refuse_reentrant,
    refusing_in_place,
)
from privgrad.gradient.contribution import Use
from privgrad.gradient.factor import Dense, Factor, added_up, at_least_float32
from privgrad.gradient.functional import Structure, differentiable, preserved, require_losses, streams_kept
from privgrad.gradient.reference import shares
from privgrad.gradient.refusals import REMEDY, CallSequenceChangedError, first_line, hidden, misplaced, refused, unseen
from privgrad.processes import is_on_processor, without_autocast
from privgrad.types import LossFunction, count_examples, map_examples

_TOGETHER = 1 << 24  # floats of output gradients per pass, at least; larger models get more
_FEW = 1 << 22  # floats of output gradients that are never split in two passes, however small the model is
_ON_DEVICE = 1 << 26  # both of these numbers on a device other than the CPU, where a pass costs a fixed time


class MemoryPlan:
    """The number of examples per pass, so that their data stay near the processor's caches or within a limit.

    `floats` is the number of floats of output gradients per example.
    """

    def __init__(self, structure: Structure, memory_mb: float | None) -> None:
        self._structure = structure
        # Half of the limit (None: a multiple of the model's size) is for output gradients, half for gradients that are
        # kept from the norms to the sum. In floats, for each half.
        self._room = None if memory_mb is None else int(memory_mb * 2**20) // 8

    def examples(self, usual_size: int, floats: int) -> int:
        """Return the number of examples per pass. A batch of `usual_size`, which is public, has nearly equal parts."""
        together, few, size = self._limits()
        most = max(1, together // max(1, floats))
        if self._room is None and usual_size * floats > max(few, 12 * size):
            # Inputs and output gradients of all layers are in memory together. Two parts keep the peak near that of
            # ordinary training.
            most = min(most, -(-usual_size // 2))
        return -(-usual_size // -(-usual_size // most))

    def displaced_examples(self, size: int, floats: int, written: int, *, exact: bool) -> int:
        """Return the number per pass, at most `size`, where each writes out so many moved parameters. Public."""
        together, few, trained = self._limits()
        if exact and size * floats > max(few, 2 * trained):
            # The graph of the backward pass needs about as much memory as the graph of the forward pass.
            size = -(-size // 2)
        # Twice: the weights themselves, and their gradients.
        return max(1, min(size, together // max(1, 2 * written)))

    def room(self, floats: int) -> int:
        """Return how many floats of written-out gradients per example may be kept from the norms to the sum."""
        return floats // 4 if self._room is None else min(floats, self._room)

    def _limits(self) -> tuple[int, int, int]:
        """Return three numbers of floats: to hold for one pass, never to split in two passes, and trainable values."""
        size, on_processor = self._structure.once(_size_and_place)
        together, few = (_TOGETHER, _FEW) if on_processor else (_ON_DEVICE, _ON_DEVICE)
        return max(together, 4 * size) if self._room is None else self._room, few, size


def _size_and_place(structure: Structure) -> tuple[int, bool]:
    """Return the number of trained values, and whether they are on the CPU: a model is on one device."""
    size = sum(int(parameter.numel()) for parameter in structure.trained.values())
    return size, all(is_on_processor(parameter) for _, parameter in structure.parameters[:1])


class Backward:
    """The gradients of the summed losses at taps and at their sources, with a graph for a second pass."""

    def __init__(self, losses: Tensor, taps: Sequence[Tap]) -> None:
        sources = [get_gradient_edge(tap.source) for tap in taps if tap.source is not None]
        found = iter(gradients_at([*(tap.edge for tap in taps), *sources], [losses.sum()], create_graph=True))
        self.taps = taps
        self.grads = [next(found) for _ in taps]  # None for a tap that the losses do not reach
        self.of_sources = [None if tap.source is None else next(found) for tap in taps]
        self.detached = [None if grad is None else grad.detach() for grad in self.grads]


def curvature(first: Backward, displacements: Displacements) -> tuple[list[Tensor | None], list[HvpTerms | None]]:
    """Compute the gradients at the taps with the Hessian's terms added, and the other terms for the weight gradients.

    Computes: let b be the gradient at a tap's output, x its source and v_i the displacement of example i.
    Then phi = sum <b, delta(x)> equals <g_i, v_i> for each example, and its gradient is H_i v_i. A layer's weight
    enters phi twice: in the forward pass, which gives the pair (x, d phi / d output), and in the backward pass, which
    gives the pair (d phi / d (gradient of x), b).
    """
    # Only the gradient of phi is needed: <delta, d b> + <b, d delta>.
    ends: list[Tensor] = []
    others: list[Tensor] = []
    for tap, grad in zip(first.taps, first.grads, strict=True):
        delta = tap.delta(displacements) if tap.delta and grad is not None else None
        if delta is not None:
            pair = cast(Tensor, grad), delta.expand_as(cast(Tensor, grad))
            for end, other in (pair, pair[::-1]):
                if end.requires_grad:
                    ends.append(end)
                    others.append(other.detach().to(end.dtype))
    inner = [get_gradient_edge(grad) for grad in first.of_sources if grad is not None and grad.requires_grad]
    edges = [*(tap.edge for tap in first.taps), *inner]
    # Without ends, the losses are linear in all outputs: only the computation of weights has curvature.
    added = gradients_at(edges, ends, others) if ends else [None] * len(edges)
    rest = iter(added[len(first.taps) :])
    total, terms = list[Tensor | None](), list[HvpTerms | None]()
    for tap, grad, add, back in zip(first.taps, first.detached, added, first.of_sources, strict=False):
        curved = next(rest) if back is not None and back.requires_grad else None
        terms.append(HvpTerms(grad, curved, displacements) if tap.curved and grad is not None else None)
        total.append(grad if grad is None or add is None else grad + add)
    return total, terms


_TOLERANCE, _TOLERANCE_HALF = 0.005, 0.05

Found = tuple[dict[str, Factor], Displacements | None]  # the factors, and the displacements of the parameters


@dataclass(frozen=True)
class Point:
    """The point at which each example's gradient is computed. The default is the current weights."""

    radius: float | None = None  # the distance from the weights, along the example's own gradient
    exact: bool = False  # whether to compute the Hessian's product with that displacement, instead of displacing
    along: Mapping[str, Factor] | None = None  # a displacement by parameter name, one row per example
    share: float = 0.0  # what multiplies `along`

    @property
    def is_displaced(self) -> bool:
        return self.radius is not None or self.along is not None

    def doubled(self) -> "Point":
        along = {name: Dense(factor.dense().double()) for name, factor in (self.along or {}).items()}
        return replace(self, along=along or None)


class Passes:
    """The passes over one model and loss. The forwards of the model are replaced during a pass only."""

    def __init__(self, structure: Structure, loss_fn: LossFunction, memory: MemoryPlan) -> None:
        self.structure, self.model = structure, structure.model
        self.loss_fn = loss_fn
        self._memory = memory
        self.norms = JacobianNorms()
        self.layouts = LayoutCache()
        # By id of a parameter from which a weight is computed; the displacement of one without is written out.
        self.closed_forms = dict[int, bool]()
        # Of the last pass: whether any output gradient is in half precision, and their floats per example; the number
        # of examples, if some tensor had another dimension of that size, else 0.
        self.half, self.floats, self.ambiguous = False, 0, 0
        self._sees_all = False  # whether functions are seen between all calls of units: slow, but they differed
        self.losses: Tensor | None = None  # of the last pass; private
        self._ones = torch.ones(0)  # as many as the largest pass had losses
        # The taps, each with a parameter's name, and the size of the weight whose gradients it writes out, or 0.
        self._used = list[tuple[Tapped, str, int]]()

    def copied(self) -> "Passes":
        """Return passes with the same layouts, and with what they keep between passes in other places."""
        copied = Passes(self.structure.follow(), self.loss_fn, self._memory)
        copied.layouts, copied.closed_forms, copied._sees_all = self.layouts, self.closed_forms, self._sees_all
        return copied

    @property
    def uses(self) -> dict[str, Use]:
        """How the last pass computed the gradient of each parameter."""
        found, vmapped = dict[str, Use](), self.layouts.current.vmapped_units
        for tapped, name, floats in self._used:
            found[name] = use_of(tapped, vmapped, found.get(name), floats)
        return found

    @property
    def tolerance(self) -> float:
        """The relative tolerance of a check: it allows for a ReLU at its kink, and for half precision if used."""
        return _TOLERANCE_HALF if self.half else _TOLERANCE

    def compute(self, examples: Any, point: Point, *, is_first: bool = False) -> Found:
        """Return the gradients at a point as factors, and the displacements of the parameters."""
        if point.radius is not None and point.exact:
            return self._curved(examples, point.radius)
        displacements = self._displacements(examples, point)
        known = self.layouts.current
        calls, units = (known.calls, known.vmapped_units) if displacements is None else known.displaced[False]
        capture = self._capture(calls, examples, units, displacements)
        try:
            with self._forward(capture, examples, is_first=is_first) as losses:
                edges = [tap.edge for tap in capture.taps]
                if not edges or not losses.requires_grad:
                    return {}, displacements
                # Checkpointed parts recompute in here. A gradient is None if the loss does not depend on an output.
                with refusing_in_place():
                    grads = gradients_at(edges, [losses], [self._ones_like(losses)])
        except Exception as error:
            # Right after `learn`, the same losses have succeeded with the unchanged layers.
            failed = is_first and not capture.record.is_finished
            if failed and (refusal := self._refusal([path for path, _ in capture.record.entered], error)) is not None:
                raise refusal from error
            raise
        return self._collected(losses, capture, grads), displacements

    def _ones_like(self, losses: Tensor) -> Tensor:
        ones, (size,) = self._ones, losses.shape
        if ones.shape[0] < size or ones.dtype != losses.dtype or ones.device != losses.device:
            self._ones = ones = torch.ones_like(losses)
        return ones[:size]

    def inputs(self, examples: Any) -> dict[str, Factor]:
        """Return factors with the inputs of each layer, and zeros as gradients of its outputs; errors as `compute`."""
        known = self.layouts.current
        capture = self._capture(known.calls, examples, known.vmapped_units)
        with self._forward(capture, examples) as losses:
            return self._collected(losses, capture, [tap.zeros for tap in capture.taps], room=0)

    def learn(self, few: Any) -> None:
        self.layouts.current.calls = self._learned(few, self.layouts.current.vmapped_units)

    def learn_displaced(self, few: Any, *, exact: bool) -> None:
        vmapped = self.layouts.current.vmapped_units
        vmapped = vmapped | {
            unit.path
            for unit in self.structure.follow().once(units, frozenset(vmapped))
            if not self._displaces_cheaply(unit.module, exact)
        }
        self.layouts.current.displaced[exact] = self._learned(few, vmapped), vmapped

    def displacements_of(self, first: Mapping[str, Factor], radius: float) -> Displacements:
        """Return the displacements radius g_i / |g_i|, where |g_i| is the norm over all parameters."""
        if not first:  # no example reaches a trainable parameter
            return Displacements({}, torch.zeros(0))
        parameters = self.structure.trained
        # Write out gradients that were pulled through a parametrization: they are needed more than once.
        first = {name: f.written_out() if isinstance(f, Pulled) else f for name, f in first.items()}
        share_B, moving_B = shares([factor.norms() for factor in first.values()], radius)
        share_B = share_B.to(torch.promote_types(next(iter(parameters.values())).dtype, torch.float32))
        if not bool(moving_B.all()):
            first = {name: factor.mask(moving_B) for name, factor in first.items()}
        return Displacements({id(parameters[name]): factor for name, factor in first.items()}, share_B)

    def written_per_example(self, *, exact: bool) -> int:
        """Return the number of parameters of which a pass with displaced parameters writes out one copy per example."""
        each = [
            unit.module
            for unit in self.structure.follow().once(units)
            if parametrize.is_parametrized(unit.module) or not self._displaces_cheaply(unit.module, exact)
        ]
        parameters = [p for unit in each for p in unit.parameters() if p.requires_grad]
        return sum(p.numel() for p in parameters if not self.closed_forms.get(id(p), False))

    def _refusal(self, paths: Sequence[str], error: Exception) -> PrivacyError | None:
        """Return the refusal of a unit among these calls, for a forward pass that fails because of its new forward."""
        if not paths or isinstance(error, PrivacyError | CallSequenceChangedError):
            return None
        got = first_line(error)
        # The usual cause: an output that a layer computes once for all examples has one row per example here.
        if (shared := self.shared(len(paths))) is not None:
            condition = "to be broadcast over the examples, not repeated"
            return refused(f"the shared output of '{shared}'", condition, got, REMEDY, unit=shared)
        condition = "to have the output of the unchanged layer"
        return refused(f"the layer '{paths[-1]}'", condition, got, REMEDY, unit=paths[-1])

    def shared(self, before: int | None = None) -> str | None:
        """Return the last unit among the first `before` calls that computes a value for all examples, for errors."""
        calls = (self.layouts.current.calls or ())[:before]
        # A layout lists inputs, then outputs; () is unattributed. "unit[function]" is a call that errors cannot name.
        shared = (path for path, layout, _ in reversed(calls) if layout and None in (layout[0], layout[-1]))
        return next((path for path in shared if "[" not in path), None)

    def _displacements(self, examples: Any, point: Point) -> Displacements | None:
        """Return the displacement of each example's parameters at a point that is not `exact`; None at the weights."""
        if point.along is not None:
            parameters, rows = self.structure.follow().trained, next(iter(point.along.values())).examples
            share_B = next(iter(parameters.values())).new_full((rows,), point.share)
            along = {id(parameters[name]): factor for name, factor in point.along.items()}
            return Displacements(along, at_least_float32(share_B))
        if point.radius is None:
            return None
        with streams_kept():  # both passes have the same random draws
            first, _ = self.compute(examples, Point())
        return self.displacements_of(first, point.radius)

    def _curved(self, examples: Any, radius: float) -> tuple[dict[str, Factor], Displacements]:
        """Return the gradients plus their Hessians' products with the displacements, in one forward pass."""
        calls, vmapped = self.layouts.current.displaced[True]
        capture = self._capture(calls, examples, vmapped, curved=True)
        with differentiable(twice=True), self._forward(capture, examples) as losses:
            if not capture.taps or not losses.requires_grad:
                return {}, Displacements({}, torch.zeros(0))
            first = Backward(losses, capture.taps)
            found = self._collected(losses, capture, first.detached)
            if not found:
                return {}, Displacements({}, torch.zeros(0))
            along = self.displacements_of(found, radius)
            grads, terms = curvature(first, along)
        return self._collected(losses, capture, grads, terms), along

    def _capture(
        self,
        calls: Calls | None,
        examples: Any,
        whole: Collection[str],
        displacements: Displacements | None = None,
        *,
        curved: bool = False,
        earlier: CallRecord | None = None,
    ) -> Capture:
        """Return a capture of the next pass, from the structure of the model as it is now."""
        return Capture(
            self.structure.follow(),
            calls,
            count_examples(examples),
            frozenset(whole),
            displacements,
            curved=curved,
            norms=self.norms,
            earlier=earlier,
            sees_all=self._sees_all,
        )

    @contextmanager
    def _forward(self, capture: Capture, examples: Any, *, is_first: bool = False) -> Generator[Tensor]:
        """Yield the losses of a forward pass; the capture stays open until the graph has been used."""
        with torch.enable_grad(), preserved(self.structure), capture:
            try:
                losses = require_losses(self.loss_fn(self.model, examples), capture.size)
                _require_seen(losses, capture, sees_all=capture.functions.gaps is None or is_first)
            except FunctionsHiddenError:
                self._sees_all = True
                raise
            capture.finish()
            self.ambiguous = capture.size if capture.record.is_ambiguous else 0
            self.losses = losses.detach()
            yield losses

    def _collected(
        self,
        losses: Tensor,
        capture: Capture,
        grads: Sequence[Tensor | None],
        terms: Sequence[HvpTerms | None] | None = None,
        *,
        room: int | None = None,
    ) -> dict[str, Factor]:
        """Return the factors by parameter name, from the gradients at the taps and the terms of Hessian products."""
        # Gradients that are written out for their norms are kept for the sum, up to `room` floats per example.
        own, size, self._used = capture.structure.by_id, len(losses), list[tuple[Tapped, str, int]]()
        given = [grad for grad in grads if grad is not None]
        self.half = any(grad.itemsize < 4 for grad in given)
        self.floats = sum(math.prod(grad.shape) for grad in given) // size
        found = dict[str, list[Factor]]()
        room = self._memory.room(self.floats) if room is None else room
        with torch.no_grad(), without_autocast([losses.device.type]):
            for index, (tap, grad) in enumerate(zip(capture.taps, grads, strict=True)):
                for tensor, version in tap.inputs:
                    if tensor._version != version:
                        require_unwritten(tap.tapped.path, tensor, version)
                if grad is None and tap.tapped.is_copy:
                    grad = tap.zeros  # no example of this batch uses the parameter, such as an expert's
                if grad is None:
                    continue
                more = terms[index] if terms else None
                for parameter, factor in (tap.factors(grad, more) if more else tap.factors(grad)).items():
                    name, _ = own[id(parameter)]
                    self._used.append((tap.tapped, name, factor.writes if isinstance(factor, Pulled) else 0))
                    if factor.examples == 0:  # the unit was called on no rows
                        factor = Dense(parameter.detach().new_zeros(()).expand(size, *parameter.shape))
                    if factor.examples != size:
                        if factor.examples % size != 0:
                            raise misplaced(tap.tapped.path, "rows that are no multiple of the number of examples")
                        factor = factor.merge(factor.examples // size)
                    if type(factor) is Outer:  # kept if no larger than the gradient at the tap
                        factor.keeps = factor.shape.numel() * size <= grad.numel()
                    if factor.worth_keeping and (numbers := factor.shape.numel()) <= room:
                        factor, room = factor.written_out(), room - numbers
                    if name in found:
                        found[name].append(factor)
                    else:
                        found[name] = [factor]
            return {name: parts[0] if len(parts) == 1 else _added_up(parts) for name, parts in found.items()}

    def _learned(self, few: Any, vmapped: set[str]) -> Calls:
        """Return the layouts of all calls, learned from two batch sizes: a dimension that grows holds the examples."""

        def recorded(batch: Any, earlier: CallRecord | None = None) -> CallRecord:
            capture = self._capture(None, batch, vmapped, earlier=earlier)
            with torch.enable_grad(), streams_kept(), preserved(self.structure), capture:
                self.loss_fn(self.model, batch)
                capture.finish()
            return capture.record

        def replaced(leaf: Tensor, *, by: Callable[[Tensor], Tensor]) -> Tensor:  # all but the first and the last
            return torch.cat([leaf[:1], *[by(leaf[:1])] * (len(leaf) - 2), leaf[-1:]])

        # The larger batch repeats an example: some models choose a layer's arguments by the values in the batch.
        more = map_examples(lambda leaf: torch.cat([leaf, leaf[:1]]), few)
        record = recorded(more, first := recorded(few))
        if record.has_several_rows:
            others = list[CallRecord]()
            # The first example in all places, and zeros: one of them may equal what it replaces.
            for by in (Tensor.clone, torch.zeros_like):
                try:
                    others.append(recorded(map_examples(partial(replaced, by=by), more), first))
                except Exception:  # the calls depend on the values, or the model does not take zeros
                    continue
            record.find_views(others)
        return Calls(record.learned)

    def _displaces_cheaply(self, unit: nn.Module, exact: bool) -> bool:
        """Return whether the unit's rule computes the effect of displaced parameters without a copy per example."""
        if not exact and takes_displacements(unit):
            return True
        rule = find_rule(unit)
        if rule is None or not rule.has_delta:
            return False
        if not exact or not parametrize.is_parametrized(unit):
            return not exact or rule.is_bilinear
        computed = cast("Mapping[str, nn.Module]", unit.parametrizations)
        originals = [getattr(own, "original", None) for own in computed.values() if StandardizedWeight.of(own)]
        return len(originals) == len(computed) and all(id(original) in self.closed_forms for original in originals)


def _added_up(parts: list[Factor]) -> Factor:
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) > 1:  # all at once: a loop over time would copy the positions of its start at each step
        parts = [Outer.joined(outers), *(part for part in parts if not isinstance(part, Outer))]
    return added_up(parts)


def _require_seen(losses: Tensor, capture: Capture, *, sees_all: bool) -> None:
    """Raise an error if the graph of the losses reaches a parameter: the capture, which detaches all, missed a use."""
    graph = refuse_reentrant(losses)
    leaves = {id(losses), *(id(node.variable) for node in graph if node.__class__ is AccumulateGrad)}
    if not leaves.isdisjoint(capture.structure.by_id):
        key, name = next((key, name) for key, (name, _) in capture.structure.by_id.items() if key in leaves)
        unit = name.rpartition(".")[0]
        if not sees_all:  # no earlier batch called a function with parameters there
            raise FunctionsHiddenError(unit)
        if function := own_function_of(key, graph):
            raise hidden(name, function)
        raise unseen(name, capture.record.unattributed(unit))
