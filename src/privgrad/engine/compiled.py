"""Compute chunks of one shape by a compiled function: forward and backward pass, norms, factors, sums and flags.

The function is what `Factored` and clipping compute, recorded once as a graph of torch's operations and compiled by
`torch.compile`. The graph is kept as long as the structure of the model and the shapes of the examples stay the same.

Privacy:
    It is recorded from tensors without values, so that no example can end up in the graph. It has no branches: what
    would read a value cannot be recorded. The graph is compared with the engine when it is new, and wherever the engine
    checks itself. An example with a flag is computed by the engine; all others are computed as before. Where the engine
    computes a whole chunk, it rounds differently: docs/rounding.md.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from privgrad.clip.clipping import ClippingAccumulator, Tried
from privgrad.engine.factored import Factored
from privgrad.engine.passes import Point
from privgrad.errors import expected
from privgrad.gradient.factor import Factors
from privgrad.gradient.functional import Structure, spectral_norms
from privgrad.gradient.refusals import first_line
from privgrad.gradient.secret_draws import as_recorded
from privgrad.processes import recorded
from privgrad.types import leaves_of, map_examples

_BACKEND = "inductor"
_TRIES = 8  # comparisons with the engine before a function is given up
_MOST = 4  # recordings in one training: each takes up to minutes


class Function:
    """A compiled function of the tensors of a chunk, the mask of those that count, and the scales."""

    def __init__(self, run: Callable[..., list[Tensor]], names: Sequence[str]) -> None:
        self._run, self._names = run, names
        self.is_compared, self.tries = False, 0  # with the engine, so that it may be used

    def __call__(self, *inputs: Tensor) -> Tried:
        with torch.no_grad(), as_recorded():
            found = self._run(*inputs)
        if inputs[0].is_cuda:  # the next replay writes to the same memory
            found = [x.clone() for x in found]
        return Tried(dict(zip(self._names, found, strict=False)), *found[len(self._names) :])


class Compiled:
    """The chunks of a training, by compiled functions as far as they can be recorded, and by the engine otherwise."""

    def __init__(self, engine: Factored, structure: Structure, state: Any) -> None:
        self._engine, self._structure = engine, structure
        self._state = state  # a `checks.State`: what the loss reads besides the model; a graph reads it only once
        self._read, self._changes = list[tuple[Any, Any]](), 0
        self._recordings = 0

    def __call__(self, examples: Any, accumulator: ClippingAccumulator, padded: int | None = None) -> Factors | None:
        """Add the clipped gradients of some examples; or return them, as the engine does, for the caller to add.

        The last `padded` rows are padding, as for `ClippingAccumulator.add`.
        """
        engine, leaves = self._engine, leaves_of(examples)
        is_due = engine.begin(examples)
        if self._recordings > _MOST or not all(type(leaf) is Tensor for leaf in leaves):
            return engine(examples, has_begun=True)
        inputs = [*leaves, accumulator.counted(len(leaves[0]), padded), *accumulator.inverse_scales.values()]
        if any(place.get() is not value for place, value in self._read):  # such as another function in a closure
            self._read, self._changes = self._state.held(), self._changes + 1
        changes = self._changes, self._state.changes, tree_structure(examples)
        functions, key = self._structure.once(_functions), (*changes, *_key(inputs, accumulator))
        function = functions.get(key)
        if function is None and (is_due or key in functions):
            return engine(examples, has_begun=True)
        set_back = engine.kept_draws()  # all that compute these examples draw the same masks of dropout
        if function is None:  # the engine has seen such examples, and knows their layouts
            function = functions[key] = self._recorded(examples, inputs, accumulator)
            set_back()
        if function is None:
            return engine(examples, has_begun=True)
        try:
            tried = function(*inputs)
        except Exception as error:  # torch compiles again where a setting of its own has changed
            functions[key] = self._without(f"torch could not compile it again: {first_line(error)}")
            set_back()
            return engine(examples, has_begun=True)
        if is_due or not function.is_compared:
            set_back()
            chunk = engine(examples, has_begun=True)
            plain = accumulator.tried(chunk, inputs[len(leaves)], accumulator.inverse_scales)
            if not bool((tried.flags | plain.flags).any()):
                # Fault: a graph that no longer is the loss, because what the loss reads has changed unseen. If the
                #     function were dropped, private examples would decide when all others move to the new loss.
                # Cost: a second pass at each check. Refuses wrongly: gradients that rounding moves far.
                is_right = not _differ(tried, plain, engine.tolerance, accumulator.max_grad_norm)
                if function.is_compared and not is_right:
                    got = "gradients that differ from these"
                    remedy = "make another PrivateGradient when what the loss reads changes, or leave out compile=True"
                    raise expected("PrivateGradient", "loss_fn", "to compute what was compiled", got, remedy)
                function.is_compared = is_right
            if not function.is_compared:
                function.tries += 1
                if function.tries == _TRIES:
                    functions[key] = self._without("gradients are too large, or it differs from the engine")
                return chunk
        flagged = tried.flags.nonzero()[:, 0]
        if len(flagged) == 0:
            accumulator.take(tried, padded)
            return None
        set_back()
        if len(flagged) == len(tried.flags):
            return engine(examples, has_begun=True)
        # Others are computed as if these examples were not there: in their places stands one of the others.
        other = tried.flags.logical_not().nonzero()[0]
        own = [leaf.index_copy(0, flagged, leaf[other.expand_as(flagged)]) for leaf in leaves]
        inputs[: len(leaves) + 1] = [*own, inputs[len(leaves)] & ~tried.flags]
        tried = function(*inputs)
        apart = engine(map_examples(lambda leaf: leaf[flagged], examples), has_begun=True)
        accumulator.take(tried, padded, (flagged, apart))
        return None

    def _recorded(self, examples: Any, inputs: Sequence[Tensor], accumulator: ClippingAccumulator) -> Function | None:
        """Return the compiled function of a chunk; None, with a warning, if there can be none."""
        self._recordings += 1
        self._read = self._state.held()
        passes, names = self._engine.recordable(examples), list[str]()
        if self._structure.once(spectral_norms):
            passes = "spectral norms advance in each step"
        if self._state.counters:
            passes = f"passes count {', '.join(self._state.counters)}"
        if self._recordings > _MOST:
            passes = "what it computes changes again and again"
        if isinstance(passes, str):
            self._recordings = _MOST + 1  # no later step is tried
            return self._without(passes)

        def region(*inputs: Tensor) -> list[Tensor]:
            values = iter(inputs)
            own = map_examples(lambda _: next(values), examples)
            counted_B, *scales = values
            chunk, _ = passes.compute(own, Point())
            tried = accumulator.tried(chunk, counted_B, dict(zip(accumulator.inverse_scales, scales, strict=True)))
            names[:] = tried.sums
            return [*tried.sums.values(), *tried[1:]]

        from torch._subclasses.fake_tensor import DataDependentOutputException  # these take a second to import
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.graph import CodeGen

        try:
            with recorded():
                graph = make_fx(region, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
            graph.graph.set_codegen(CodeGen())  # without trees, which dynamo does not trace
            graph.recompile()
            options: Any = {"fallback_random": True, "triton.cudagraphs": inputs[0].is_cuda}
            # Else the norms come from numbers that are not rounded as those of the sums are.
            options["emulate_precision_casts"] = True
            options = options if _BACKEND == "inductor" else None
            run = torch.compile(graph, fullgraph=True, dynamic=False, backend=_BACKEND, options=options)
            function = Function(cast("Callable[..., list[Tensor]]", run), names)
            function(*inputs)
        except Exception as error:
            cause = first_line(getattr(error, "inner_exception", error))  # of torch's compiler
            if "data-dependent" in cause or isinstance(error, DataDependentOutputException):
                return self._without(
                    "the model or the loss reads values of tensors, as `.item()` or `if x.max() > 0` do"
                )
            return self._without(f"torch could not compile it: {cause}")
        return function

    def _without(self, why: str) -> None:
        warnings.warn(f"PrivateGradient computes without a compiled function: {why}", stacklevel=4)


def _functions(_: Structure) -> dict[Any, Function | None]:
    return {}


def _key(inputs: Sequence[Tensor], accumulator: ClippingAccumulator) -> tuple[object, ...]:
    """Return what decides the graph besides the structure of the model."""
    device = inputs[0].device.type
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_default_dtype()
    return *((x.shape, x.dtype, x.device) for x in inputs), *accumulator.inverse_scales, *autocast


def _differ(one: Tried, other: Tried, tolerance: float, max_grad_norm: float) -> bool:
    """Return whether the norms of examples or the sums differ by more than the tolerance, relative to their size."""
    # Rounding moves the gradients of losses near zero far, but by little of C: the noise hides it.
    if one.sums.keys() != other.sums.keys():
        return True
    length, norm_B = max(_norm(other.raw_lengths), max_grad_norm), other.raw_norms
    gap = math.hypot(*(_norm(x.double() - other.sums[name]) for name, x in one.sums.items()))
    near_B = (one.raw_norms - norm_B).abs() <= tolerance * norm_B.clamp(min=tolerance * length)
    return gap > tolerance * length or not bool(near_B.all())


def _norm(x: Tensor) -> float:
    return float(cast(Tensor, torch.linalg.vector_norm(x)))
