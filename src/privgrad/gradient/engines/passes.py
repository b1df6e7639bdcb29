"""The forward and backward passes of the fast engine: from examples to factors, with layouts that an audit has learned.

A pass trusts its layouts. `factored.Factored` decides when to learn and check them. It calls the methods of `Passes`
and `Point`; `self_check` calls `Passes.compute` and `Passes.learn` too.

The privacy guarantee of the fast engine rests on this file: row i of every factor must depend on example i, the model
and public numbers only. Two methods are not part of it: `_require_runs` and `shared` explain an error.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.errors import PrivacyError
from privgrad.gradient.autograd_graph import gradients_at, refuse_reentrant, refusing_in_place, sources
from privgrad.gradient.batching import differentiable
from privgrad.gradient.engines.call_record import CallRecord
from privgrad.gradient.engines.capture import Capture
from privgrad.gradient.engines.hvp import backward, curvature
from privgrad.gradient.engines.layout_cache import Calls, LayoutCache
from privgrad.gradient.engines.memory import MemoryPlan
from privgrad.gradient.engines.refusals import REMEDY, CallSequenceChangedError, misplaced, refused, unseen
from privgrad.gradient.engines.taps import HvpTerms, Tap
from privgrad.gradient.engines.units import units
from privgrad.gradient.engines.uses import Use, use_of
from privgrad.gradient.engines.vmap import shares
from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.factors.jacobian import JacobianNorms, Pulled
from privgrad.gradient.factors.norms import at_least_float32
from privgrad.gradient.factors.outer import Outer
from privgrad.gradient.factors.weight_standardization import StandardizedWeight
from privgrad.gradient.layers.base import find_rule, takes_displacements
from privgrad.gradient.module_state import preserved, require_losses, trainable
from privgrad.types import LossFunction, count_examples, map_examples

_TOLERANCE, _TOLERANCE_HALF = 0.005, 0.05


@dataclass(frozen=True)
class Point:
    """The point at which each example's gradient is computed. The default is the current weights.

    Attributes:
        radius: the distance from the weights, along the example's own gradient; None: no such displacement.
        exact: whether to compute the Hessian's product with that displacement, instead of displacing.
        along: factors of a displacement by parameter name, one row per example; None: no such displacement.
        share: the number that multiplies `along`.
    """

    radius: float | None = None
    exact: bool = False
    along: Mapping[str, Factor] | None = None
    share: float = 0.0

    @property
    def is_displaced(self) -> bool:
        """Whether the point differs from the weights."""
        return self.radius is not None or self.along is not None

    def doubled(self) -> "Point":
        """Return the point in double precision."""
        along = {name: Dense(factor.dense().double()) for name, factor in (self.along or {}).items()}
        return replace(self, along=along or None)


class Passes:
    """The passes over one model and loss.

    Args:
        model: the module. Its forwards are replaced during a pass only.
        loss_fn: (model, examples) -> losses, shape (B,).
        memory: says how many written-out gradients to keep.
    Attributes:
        layouts: where the tensors of each call hold the examples.
        pulled: by id of a parameter from which a weight is computed, whether its displacement is not written out.
        ambiguous: the number of examples in the last pass, if some tensor had another dimension of that size; else 0.
        half: whether any output gradient of the last pass is in half precision.
        floats: the number of floats of output gradients per example in the last pass.
        norms: the norms of the Jacobians of computed weights.
        uses: how the gradient of each parameter was computed in the last pass.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, memory: MemoryPlan) -> None:
        self._model, self._loss_fn, self._memory = model, loss_fn, memory
        self.norms = JacobianNorms()
        self.layouts = LayoutCache()
        self.pulled = dict[int, bool]()
        self.half, self.floats, self.ambiguous = False, 0, 0
        self.uses = dict[str, Use]()

    @property
    def tolerance(self) -> float:
        """The relative tolerance of a check: it allows for a ReLU at its kink, and for half precision if used."""
        return _TOLERANCE_HALF if self.half else _TOLERANCE

    def compute(self, examples: Any, point: Point) -> tuple[dict[str, Factor], Displacements | None]:
        """Return the gradients at a point as factors, and the displacements of the parameters.

        Raises:
            CallSequenceChangedError: the model makes other calls than the current layouts have.
        """
        if point.radius is not None and point.exact:
            return self._curved(examples, point.radius)
        displacements = self._displacements(examples, point)
        known = self.layouts.current
        calls, units = (known.calls, known.vmapped_units) if displacements is None else known.displaced[False]
        capture = Capture(self._model, calls, count_examples(examples), units, displacements, norms=self.norms)
        with self._forward(capture, examples) as losses:
            edges = [tap.edge for tap in capture.taps]
            if not edges or not losses.requires_grad:
                return {}, displacements
            # Checkpointed parts recompute in here. A gradient is None if the loss does not depend on a unit's output.
            with refusing_in_place():
                grads = gradients_at(edges, [losses.sum()])
        return self._collected(losses, capture, grads), displacements

    def inputs(self, examples: Any) -> dict[str, Factor]:
        """Return factors that hold the inputs of each layer, with zeros in place of the gradients of its outputs.

        Raises:
            CallSequenceChangedError: as `compute`.
        """
        known = self.layouts.current
        capture = Capture(self._model, known.calls, count_examples(examples), known.vmapped_units, norms=self.norms)
        with self._forward(capture, examples) as losses:
            return self._collected(losses, capture, [tap.zeros for tap in capture.taps], room=0)

    def learn(self, few: Any) -> None:
        """Learn the layouts of a pass at the weights from a few examples."""
        self.layouts.current.calls = self._learned(few, self.layouts.current.vmapped_units)

    def learn_displaced(self, few: Any, *, exact: bool) -> None:
        """Learn the layouts of a pass with displaced parameters."""
        vmapped = self.layouts.current.vmapped_units
        vmapped = vmapped | {p for p, unit in units(self._model, vmapped) if not self._displaces_cheaply(unit, exact)}
        self.layouts.current.displaced[exact] = self._learned(few, vmapped), vmapped

    def displacements_of(self, first: Mapping[str, Factor], radius: float) -> Displacements:
        """Return the displacements radius g_i / |g_i|, where |g_i| is the norm over all parameters."""
        if not first:  # no example reaches a trainable parameter
            return Displacements({}, torch.zeros(0))
        parameters = trainable(self._model)
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
            unit
            for _, unit in units(self._model)
            if parametrize.is_parametrized(unit) or not self._displaces_cheaply(unit, exact)
        ]
        parameters = [p for unit in each for p in unit.parameters() if p.requires_grad]
        return sum(p.numel() for p in parameters if not self.pulled.get(id(p), False))

    def compute_first(self, few: Any) -> dict[str, Factor]:
        """Return the factors at the weights, right after `learn`.

        Raises:
            UnsupportedModuleError: as `_forward`; and if the losses fail because the engine replaces forwards.
        """
        try:
            return self.compute(few, Point())[0]
        except (PrivacyError, CallSequenceChangedError):
            raise
        except Exception:
            self._require_runs(few)
            raise

    def _require_runs(self, few: Any) -> None:
        """Raise UnsupportedModuleError if the losses fail because the engine replaces the forwards of units.

        The same losses have succeeded with the unchanged layers. The usual cause is an output that a layer computes
        once for all examples, and that has one row per example here.
        """
        known = self.layouts.current
        capture = Capture(self._model, known.calls or Calls(), count_examples(few), known.vmapped_units)
        try:
            with self._forward(capture, few):
                return
        except (PrivacyError, CallSequenceChangedError):
            raise
        except Exception as error:
            got = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            if (shared := self.shared(len(capture.record.paths))) is not None:
                condition = "to be broadcast over the examples, not repeated"
                raise refused(f"the shared output of '{shared}'", condition, got, REMEDY, unit=shared) from error
            if capture.record.paths:
                last = capture.record.paths[-1]
                condition = "to have the output of the unchanged layer"
                raise refused(f"the layer '{last}'", condition, got, REMEDY, unit=last) from error

    def shared(self, before: int | None = None) -> str | None:
        """Return the last unit that computes a value for all examples at once; None if there is none.

        Args:
            before: the number of calls to look at; None: all of them.
        """
        calls = list(self.layouts.current.calls or Calls())[:before]
        shared = (path for path, layout in reversed(calls) if layout and None in (layout[0], layout[-1]))
        return next((path for path in shared if "[" not in path), None)

    def _displacements(self, examples: Any, point: Point) -> Displacements | None:
        """Return the displacement of each example's parameters at a point that is not `exact`; None at the weights."""
        if point.along is not None:
            parameters, rows = trainable(self._model), next(iter(point.along.values())).examples
            share_B = next(iter(parameters.values())).new_full((rows,), point.share)
            along = {id(parameters[name]): factor for name, factor in point.along.items()}
            return Displacements(along, at_least_float32(share_B))
        if point.radius is None:
            return None
        with torch.random.fork_rng():  # both passes have the same random draws
            first, _ = self.compute(examples, Point())
        return self.displacements_of(first, point.radius)

    def _curved(self, examples: Any, radius: float) -> tuple[dict[str, Factor], Displacements]:
        """Return the gradients plus their Hessians' products with the displacements, in one forward pass."""
        calls, vmapped = self.layouts.current.displaced[True]
        capture = Capture(self._model, calls, count_examples(examples), vmapped, curved=True, norms=self.norms)
        with differentiable(twice=True), self._forward(capture, examples) as losses:
            if not capture.taps or not losses.requires_grad:
                return {}, Displacements({}, torch.zeros(0))
            first = backward(losses, capture.taps)
            found = self._collected(losses, capture, first.detached)
            if not found:
                return {}, Displacements({}, torch.zeros(0))
            along = self.displacements_of(found, radius)
            grads, terms = curvature(first, along)
        return self._collected(losses, capture, grads, terms), along

    @contextmanager
    def _forward(self, capture: Capture, examples: Any) -> Generator[Tensor]:
        """Yield the losses of a forward pass; the capture stays open until the graph has been used."""
        with torch.enable_grad(), preserved(self._model), capture:
            losses = require_losses(self._loss_fn(self._model, examples), capture.size)
            capture.finish()
            self.ambiguous = capture.size if capture.record.is_ambiguous else 0
            refuse_reentrant(losses)
            _require_seen(losses, capture)
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
        """Return the factors by parameter name, from the gradients at the taps and the terms of Hessian products.

        Gradients that are written out for their norms are kept for the sum, up to `room` floats per example; None: as
        the memory plan says. Those of linear maps are kept if they are no larger than the gradient at their tap.
        """
        names, size = {id(parameter): name for name, parameter in capture.trained.items()}, len(losses)
        self.half = any(grad is not None and grad.itemsize < 4 for grad in grads)
        self.floats = sum(int(grad.numel()) for grad in grads if grad is not None) // size
        factors: dict[str, Factor] = {}
        self.uses = uses = dict[str, Use]()
        vmapped = self.layouts.current.vmapped_units
        room = self._memory.room(self.floats) if room is None else room
        with torch.autocast(losses.device.type, enabled=False):
            for index, (tap, grad) in enumerate(zip(capture.taps, grads, strict=True)):
                _require_unwritten(tap)
                if grad is None and tap.is_copy:
                    grad = tap.zeros  # no example of this batch uses the parameter, such as an expert's
                if grad is None:
                    continue
                own = terms[index] if terms else None
                for parameter, factor in (tap.factors(grad, own) if own else tap.factors(grad)).items():
                    name = names[id(parameter)]
                    uses[name] = use_of(tap, vmapped, uses.get(name))
                    if factor.examples == 0:  # the unit was called on no rows
                        factor = Dense(parameter.detach().new_zeros(()).expand(size, *parameter.shape))
                    if factor.examples != size:
                        if factor.examples % size != 0:
                            raise misplaced(tap.path, "rows that are no multiple of the number of examples")
                        factor = factor.merge(factor.examples // size)
                    if isinstance(factor, Outer):
                        factor.keeps = parameter.numel() <= grad.numel() // size
                    if factor.worth_keeping and parameter.numel() <= room:
                        factor, room = factor.written_out(), room - int(parameter.numel())
                    factors[name] = factors[name] + factor if name in factors else factor
        return factors

    def _learned(self, few: Any, vmapped: set[str]) -> Calls:
        """Return the layouts of all calls, learned from two batch sizes: a dimension that grows holds the examples.

        The larger batch repeats an example, so both batches hold the same values. Some models choose a layer's
        arguments by these values.
        """

        def recorded(batch: Any, earlier: CallRecord | None = None) -> CallRecord:
            capture = Capture(self._model, None, count_examples(batch), vmapped, earlier=earlier)
            with torch.enable_grad(), torch.random.fork_rng(), preserved(self._model), capture:
                self._loss_fn(self._model, batch)
                capture.finish()
            return capture.record

        return recorded(few, recorded(map_examples(lambda leaf: torch.cat([leaf, leaf[:1]]), few))).learned

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
        return len(originals) == len(computed) and all(id(original) in self.pulled for original in originals)


def _require_unwritten(tap: Tap) -> None:
    """Raise UnsupportedModuleError if a tensor that the tap's factors need was written to since its call."""
    for tensor, version in tap.inputs:
        if tensor._version != version:
            got, remedy = (
                f"{tensor._version - version} in-place writes",
                "work on a copy, as ordinary training requires too",
            )
            raise refused(f"the input of '{tap.path}'", "not to be changed in place", got, remedy)


def _require_seen(losses: Tensor, capture: Capture) -> None:
    """Raise an error if the graph of the losses reaches a parameter: the capture has not seen some use of it.

    Units and copies are computed from detached parameters.

    Raises:
        CallSequenceChangedError: the calls of functions were not seen, because no earlier batch needed that.
        UnsupportedModuleError: a use mixes examples, or is a function that torch does not show.
    """
    names = {id(parameter): name for name, parameter in capture.trained.items()}
    for source in sources([losses]):
        name = names.get(id(source))
        if name is not None:
            unit = name.rpartition(".")[0]
            if not capture.record.needs_functions:
                raise CallSequenceChangedError(unit)
            raise unseen(name, capture.record.unattributed(unit))
