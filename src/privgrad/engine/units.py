"""The units of a model, whose calls the fast engine computes itself: by a layer's rule, or by vmap.

Row i of the factors of a `LayerCall` must depend on example i only. In a `VmappedUnit`, no attribute and no argument
may carry one example's values to another example. A parameter that is in no unit, or in two, is used by functions (see
`capture`) or refused.
"""

import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from privgrad.engine.factors.conv import FEW, Convolution
from privgrad.engine.factors.displacement import Displacements, PerSampleWeight
from privgrad.engine.factors.outer import SMALL
from privgrad.engine.factors.parametrized import Jacobian, JacobianNorms, Pulled, SharedSums
from privgrad.engine.factors.weight_standardization import MovedStandardizedWeight, StandardizedWeight
from privgrad.engine.layers.base import Rule, Weights, add_to, find_forward, find_rule, is_built_in, require_unwritten
from privgrad.engine.shared_values import Additive, filled, tensors_in
from privgrad.errors import PrivacyError
from privgrad.gradient.autograd_graph import has_batched_rules, is_additive, sources
from privgrad.gradient.contribution import Use
from privgrad.gradient.factor import Factor
from privgrad.gradient.functional import (
    Mended,
    Structure,
    batched,
    own_parameters,
    preserved,
    unseen_by_checkpoints,
    version_of,
    weight_hooks,
)
from privgrad.gradient.refusals import REMEDY, CallSequenceChangedError, first_line, refused
from privgrad.processes import is_on_processor


class Tapped(NamedTuple):
    """The facts about a tap that outlive its pass."""

    path: str  # the unit's
    is_copy: bool  # whether the tap leads to copies of a parameter; their gradients are zero if no loss uses it
    functions: Mapping[str, str]  # the functions that need these copies, each with what would be faster
    shape: torch.Size  # of the gradient at the edge


@dataclass
class Tap:
    """A place in the graph where a gradient is computed, with the function from it to gradients of parameters."""

    tapped: Tapped
    edge: GradientEdge  # where the gradient is computed
    dtype: torch.dtype
    device: torch.device
    # gradient at the edge -> factors by parameter; if `curved`, HvpTerms are its second argument
    factors: Callable[..., Mapping[Tensor, Factor]]
    inputs: list[tuple[Tensor, int]]  # the tensors that `factors` uses, with their versions, to detect in-place writes
    # for Hessian products: displacements of the parameters -> their effect on this tensor, to first order
    delta: Callable[[Displacements], Tensor | None] | None = None
    source: Tensor | None = None  # for Hessian products: the unit's input, if gradients flow to it
    curved: bool = False  # whether the parameters' Hessian product needs HvpTerms, besides the gradient at the edge

    @property
    def zeros(self) -> Tensor:
        """A gradient of zeros at the edge; it takes no memory."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.tapped.shape)


@dataclass(frozen=True)
class HvpTerms:
    """The terms that a Hessian-vector product adds to a layer's gradients, besides the gradient at its output."""

    first: Tensor  # the gradient at the output, without the Hessian's part
    source: Tensor | None  # what multiplies `first` in the weight gradient, if anything does
    displacements: Displacements  # of the parameters: the vectors of the product


_RULE = Use("rule")
_COMPUTED = Use(
    "rule",
    why="weights are computed from them, and each example's gradient of such a weight is written out",
    remedy="apply them to the inputs one after another where the computation allows it, as F.linear(F.linear(x, a), b)",
)


def use_of(tap: Tapped, vmapped_units: Collection[str], other: Use | None, floats: int) -> Use:
    """Return how a tap computes gradients, or the parameter's other taps so far if their way is slower.

    `floats`: the size of a computed weight whose gradients a rule writes out, else 0.
    """
    if not tap.is_copy:
        return replace(_COMPUTED, floats=floats) if floats and other in (None, _RULE) else other or _RULE
    if tap.path in vmapped_units:
        return Use("whole", tap.path)
    if other is not None and other.way == "whole":
        return other
    remedies = dict.fromkeys(tap.functions.values())
    remedy = "" if "" in remedies else ", ".join(remedies)
    return Use("copies", tap.path, ", ".join(tap.functions), remedy, tap.shape[1:].numel())


@dataclass(frozen=True)
class Unit:
    """A module whose forward is replaced during a pass, as far as the structure of the model decides about it."""

    path: str
    module: nn.Module
    is_whole: bool  # whether it is computed by vmap
    forward: Callable[..., Any] | None  # its forward with taps, if it has one
    rule: Rule | None  # if neither, its rule
    weights: tuple[str, ...] | None  # the names of those that the rule knows; None if one is computed in each call


def units(structure: Structure, whole: frozenset[str] = frozenset()) -> list[Unit]:
    """Return the units, each once: modules with a rule or a forward, and those that are taken whole."""
    model = structure.model
    seen = {id(part) for path in whole for part in [*model.get_submodule(path).modules()][1:]}
    return list(_units(model, "", whole, seen))


def _units(model: nn.Module, path: str, whole: Collection[str], seen: set[int]) -> Iterator[Unit]:
    if id(model) in seen:
        return
    seen.add(id(model))
    is_parametrized = parametrize.is_parametrized(model)
    has_own = is_parametrized or any(p.requires_grad for p in own_parameters(model).values())
    forward = find_forward(model)
    rule = find_rule(model) if forward is None and has_own and path not in whole else None
    if path in whole or forward is not None or rule is not None:
        if any(p.requires_grad for p in model.parameters()):
            weights = None if rule is None or is_parametrized else _plain_weights(model, rule)
            yield Unit(path, model, path in whole, forward, rule, weights)
        return
    for name, child in model.named_children():
        yield from _units(child, f"{path}.{name}" if path else name, whole, seen)


def _plain_weights(module: nn.Module, rule: Rule) -> tuple[str, ...] | None:
    """Return the names of the weights that a rule knows; None if a hook computes one before each call."""
    own = vars(module)["_parameters"]
    if any(getattr(module, name, None) is not own.get(name) for name in rule.parameters):
        return None
    return tuple(name for name in rule.parameters if own.get(name) is not None)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, Enum)
_FIXED = (*_PLAIN, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, nn.Module, torch.Generator)
_MOST = 10_000  # most objects to examine


class Watched:
    """The contents of a call's arguments: what one example's pass fills, as a cache, the next one would read."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        # The class of the argument, each object that can be reached from it, and its parts.
        self._held, seen = list[tuple[str, Any, list[Any]]](), set[int]()
        waiting = [(type(leaf).__name__, leaf) for leaf in leaves if not isinstance(leaf, (Tensor, *_FIXED))]
        for kind, holder in islice(waiting, _MOST):  # it grows
            if id(holder) not in seen:
                seen.add(id(holder))
                self._held.append((kind, holder, parts := _parts(holder)))
                waiting += [(kind, part) for part in parts if not isinstance(part, _FIXED)]

    def changed(self) -> str | None:
        """Return the class name of the first argument whose contents have changed; None if none has."""
        return next((kind for kind, holder, parts in self._held if not _same(_parts(holder), parts)), None)


def _parts(holder: Any) -> list[Any]:
    """List the attributes, keys and items of an object; for a tensor, its version, which counts writes."""
    if isinstance(holder, Tensor):
        return [version_of(holder)]
    parts: list[Any] = [*chain.from_iterable(getattr(holder, "__dict__", {}).items())]
    slots = (name for kind in type(holder).__mro__ for name in vars(kind).get("__slots__", ()))
    parts += [getattr(holder, name, None) for name in slots]
    if isinstance(holder, Mapping):
        parts += chain.from_iterable(cast("Mapping[Any, Any]", holder).items())
    elif isinstance(holder, list | tuple | set | frozenset | deque):
        parts += cast("Iterable[Any]", holder)
    return parts


def _same(now: list[Any], before: list[Any]) -> bool:
    """Return whether two lists of parts hold the same objects or equal plain values, in the same order."""
    return len(now) == len(before) and all(
        one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)
        for one, other in zip(now, before, strict=True)
    )


class VmappedUnit:
    """One call of a unit by vmap. The gradients at each example's copy of the parameters are its gradients."""

    def __init__(self, path: str, module: nn.Module, forward: Any, arguments: Any) -> None:
        self._path = path
        self._module = module
        self._forward = forward
        self._arguments = arguments
        self.tensors = tensors_in(arguments)
        self._watched = Watched(tree_leaves(arguments))
        # Parameters and buffers are replaced by copies meanwhile.
        self._kept = Structure(module, path, but=("_parameters", "_buffers"))
        self._unit = _Unit(module, forward)
        self._frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        self._found: Any = None  # the last output

    def plain(self) -> Any:
        """Return the output for all examples together, without per-example gradients."""
        args, kwargs = self._arguments
        output = self._forward(*args, **kwargs)
        require_unchanged(self._path, self._watched)
        return output

    def output(self, copies: Mapping[str, Tensor], inputs: Sequence[tuple[Tensor, int | None]], size: int) -> Any:
        """Return the tensors in the output, examples first, from copies of the trained parameters, (B, *P)."""
        # Dropout draws in the order of memory, and BAM's second pass needs equal draws.
        tensors, dims = [x.contiguous() for x, _ in inputs], [dim for _, dim in inputs]
        versions = [x._version for x in tensors]
        try:
            with self._isolated(), unseen_by_checkpoints():
                produced = batched(self._single, (0, *dims), module=self._module)(copies, *tensors)
        except Exception:  # an operation without a rule in vmap
            require_unchanged(self._path, self._watched)
            for x, version in zip(tensors, versions, strict=True):
                require_unwritten(self._path, x, version)
            produced = self._one_by_one(copies, tensors, dims, size)
        require_unchanged(self._path, self._watched)
        return produced

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        return filled(self._found, iter(tensors))

    def _single(self, parameters: Mapping[str, Tensor], *inputs: Tensor) -> list[Tensor]:
        """Return the tensors in one example's output, and note its structure."""
        args, kwargs = filled(self._arguments, iter(inputs))
        state = {f"module.{name}": p for name, p in (*parameters.items(), *self._frozen.items())}
        self._found = functional_call(self._unit, state, args, kwargs)
        return tensors_in(self._found)

    def _one_by_one(
        self, copies: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Sequence[int | None], size: int
    ) -> list[Tensor]:
        rows: list[list[Tensor]] = []
        for i in range(size):
            own = [x if dim is None else x[i].clone() for x, dim in zip(inputs, dims, strict=True)]
            try:
                with Mended(several=False), self._isolated():  # sparse gradients of single examples cannot be stacked
                    rows.append(self._single({name: p[i].clone() for name, p in copies.items()}, *own))
            except PrivacyError:
                raise
            except Exception as error:
                condition, got = "to run on one example", first_line(error)
                raise refused(f"'{self._path}'", condition, got, REMEDY, unit=self._path) from error
            require_unchanged(self._path, self._watched)
        if len({len(row) for row in rows}) != 1:  # the outputs differ in their number of tensors
            raise CallSequenceChangedError(self._path) from None
        return [torch.stack(row) for row in zip(*rows, strict=True)]

    def _isolated(self) -> AbstractContextManager[None]:
        """Undo changes of attributes: they hold one example's values, which must not reach others in the loop."""
        return preserved(self._kept)


class _Unit(nn.Module):
    """A module with a given forward, so that functional_call can replace its parameters around that forward."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module = module
        self._forward = forward
        self._computed = weight_hooks(vars(module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # torch's old weight_norm and spectral_norm compute a weight in a hook; here again, from replaced parameters.
        before = {name: getattr(self.module, name) for name in self._computed}
        try:
            for hook in self._computed.values():
                hook(self.module, args)
            return self._forward(*args, **kwargs)
        finally:
            for name, weight in before.items():
                setattr(self.module, name, weight)


def require_unchanged(path: str, watched: Watched) -> None:
    """Raise UnsupportedModuleError if a unit changed an argument: examples could then read each other's values."""
    if (kind := watched.changed()) is not None:
        remedy = f"call it without (model.config.use_cache = False for a cache of transformers), or {REMEDY}"
        condition, got = "to stay unchanged during its forward", f"a changed {kind}"
        raise refused(f"the arguments of '{path}'", condition, got, remedy, unit=path)


class LayerCall:
    """One call of a layer, or of a function with its options, by a rule with detached weights.

    It refers neither to its output nor to the `Capture` that made it: a cycle would keep the pass in memory.
    """

    def __init__(
        self, path: str, rule: Rule, layer: Any, weights: Weights, x: Tensor, norms: JacobianNorms, *, curved: bool
    ) -> None:
        self._path = path
        self._layer = layer
        self._weights = weights
        self._norms = norms
        self._curved = curved
        self._detached = dict[str, Tensor]()
        for name, weight in weights.items():
            self._detached[name] = weight.detach()
            if weight.requires_grad:
                self._detached[name].requires_grad_()
        self._parametrizations, self._standardized = dict[str, Any](), dict[str, StandardizedWeight]()
        if isinstance(layer, nn.Module) and "parametrizations" in vars(layer)["_modules"]:
            computed = cast(nn.ModuleDict, layer.parametrizations).items()
            self._parametrizations = {name: own for name, own in computed if name in weights}
            known = {name: StandardizedWeight.of(own) for name, own in self._parametrizations.items()}
            self._standardized = {name: weight for name, weight in known.items() if weight is not None}
        # By name, the weights that a parametrization computes from each example's displaced parameters.
        self._per_sample: dict[str, PerSampleWeight | MovedStandardizedWeight] = {}
        self._output: Tensor | None = None  # a copy, of a layer of few positions whose weight is standardized
        self._rule, self.x = rule.bilinear(layer, x) if curved else (rule, x)
        if curved and self.x.requires_grad:
            self.x = cast(Tensor, torch.ops.aten._unsafe_view(self.x, self.x.shape))  # a node for this layer only

    def forward(self, displacements: Displacements | None) -> Tensor:
        """Return the output, at each example's own parameters if these are displaced."""
        if displacements is not None:
            for name, parametrization in self._parametrizations.items():
                trained = {n: p for n, p in parametrization.named_parameters() if p.requires_grad}
                if own := displacements.of(trained):
                    known = self._standardized[name].moved(own) if name in self._standardized else None
                    self._per_sample[name] = known or PerSampleWeight(parametrization, own, self._weights[name])
            moved = displacements.of(self._weights)
            moved |= {name: weight.displacement() for name, weight in self._per_sample.items()}
            if moved:
                return self._rule.moved(self._layer, self._detached, moved, self.x)
        output = self._rule.forward(self._layer, self._detached, self.x)
        is_exact = "bias" not in self._weights and output.itemsize >= 4 and is_built_in(type(self._rule))
        if self._standardized and is_exact and output.shape[2:].numel() <= FEW and is_on_processor(output):
            self._output = output.detach().clone()
        return output

    def factors(self, grad: Tensor, terms: HvpTerms | None = None) -> dict[Tensor, Factor]:
        """Return the factors of the trained parameters, also of those from which a weight is computed."""
        x, found = self.x.detach(), dict[Tensor, Factor]()
        for name, weight in self._weights.items():
            if not weight.requires_grad:
                continue
            plain = terms is None and weight.grad_fn is None and name not in self._per_sample
            if plain and not (found and weight in found):
                found[weight] = self._factor(name, x, grad)
            else:
                add_to(found, self._of_weight(name, weight, x, grad, terms))
        return found

    def delta(self, displacements: Displacements) -> Tensor | None:
        """Return the change of the output when each example's parameters move, to first order; None if none moves."""
        found = displacements.of(self._weights)
        for name, own in self._standardized.items():
            if own_displacements := displacements.of(own.own):
                if not own.knows(own_displacements):  # the layer has more calls than for earlier examples
                    raise CallSequenceChangedError(self._path)
                found[name] = own.tangent(own_displacements)
        return self._rule.delta(self._layer, found, self.x) if found else None

    def _of_weight(
        self, name: str, weight: Tensor, x: Tensor, grad: Tensor, terms: HvpTerms | None
    ) -> Mapping[Tensor, Factor]:
        """Return the factors of the parameters from which a weight is computed; of the weight itself if it is one."""
        factor, more = self._factor(name, x, grad), None
        if terms is not None and terms.source is not None and name == "weight":
            more = self._rule.factor(self._layer, name, self._detached, terms.source, terms.first)
        if name in self._per_sample:
            return self._per_sample[name].pull(factor)
        standardized = self._standardized.get(name)
        if standardized is not None and terms is not None:
            return standardized.curved(factor, more, terms.displacements.of(standardized.own))
        if standardized is not None and (self._curved or standardized.takes(factor)):
            # The products of rows of the weight with their gradients are those of outputs with theirs: no convolution.
            is_own = isinstance(factor, Convolution) and factor.b is grad  # that of a transposed one has them exchanged
            known = (self._output * grad).flatten(2).sum(2) if is_own and self._output is not None else None
            return standardized.pull(factor, known)
        total = factor if more is None else factor + more
        if weight.grad_fn is None:
            return {weight: total}
        return _pulled(total, weight, self._norms, (self._path, name), standardized)

    def _factor(self, name: str, x: Tensor, grad: Tensor) -> Factor:
        """Return what the rule returns for a weight; refuse a user's rule that returns anything but its gradients."""
        if is_built_in(type(self._rule)):
            return self._rule.factor(self._layer, name, self._detached, x, grad)
        rule, shape = f"{type(self._rule).__name__}.factor for '{self._path}'", tuple(self._weights[name].shape)
        condition = f"to return a Factor with the gradients of {name!r}, shape (B, *{shape})"
        try:
            with torch.no_grad():  # as its docstring promises; a number may be read from a weight
                weights = {own: weight.detach() for own, weight in self._detached.items()}
                found = cast("object", self._rule.factor(self._layer, name, weights, x, grad))
        except Exception as error:
            raise refused(rule, condition, f"{type(error).__name__}: {error}".rstrip("."), "") from error
        if not isinstance(found, Factor) or (found.examples, tuple(found.shape)) != (len(grad), shape):
            got = f"shape {(found.examples, *found.shape)}" if isinstance(found, Factor) else type(found).__name__
            raise refused(rule, condition, got, "")
        return found


def weights_of(unit: Unit) -> dict[str, Tensor]:
    """Return the weights that a unit's rule knows, by name; a parametrization may compute one, see `Additive`."""
    module, own = unit.module, vars(unit.module)["_parameters"]
    if unit.weights is not None:
        return {name: own[name] for name in unit.weights}
    with Additive(unit.path) if parametrize.is_parametrized(module) else nullcontext():
        read = {name: cast("Tensor | None", getattr(module, name, None)) for name in cast(Rule, unit.rule).parameters}
    return {name: weight for name, weight in read.items() if weight is not None}


def _pulled(
    factor: Factor, weight: Tensor, norms: JacobianNorms, key: tuple[str, str], known: StandardizedWeight | None
) -> dict[Tensor, Factor]:
    """Return the factors of the parameters from which a weight is computed, given the factor of the weight."""
    leaves = known.trained if known is not None else list({id(leaf): leaf for leaf in sources([weight])}.values())
    # One backward pass for the sum of all examples is right only if it is additive and rounds little.
    apart = any(x.itemsize < 4 or x._backward_hooks for x in (weight, *leaves))
    apart = apart or not (known is not None or is_additive(weight))
    is_small = weight.numel() <= SMALL and not is_on_processor(weight)
    is_small = is_small and (known is not None or has_batched_rules(weight))
    sums, found = SharedSums(factor), dict[Tensor, Factor]()
    for leaf in leaves:
        place = (*key, id(leaf))
        rows = known.rows_of if known is not None else None if is_small else partial(norms.rows, place)
        jacobian = Jacobian(weight, leaf, partial(norms.of, place), None if apart else rows)
        found[leaf] = Pulled(factor, jacobian, apart=apart or is_small, sums=sums)
    return found
