"""Record the inputs of a model's units during a forward pass, and the places in the graph where gradients are needed.

A unit is the smallest module that owns trainable parameters. `Capture` replaces the forward of every unit. The new
forward computes the same output from copies of the parameters without their graph, and records the inputs and the
graph's edge at the output. `hooks.Hooks` then computes per-example gradients from these records.

The privacy guarantee of the fast engine rests on this file: it must attribute each row of a tensor to its example. It
refuses tensors for which it cannot, and `self_check` compares some results with autograd.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from privgrad.errors import PrivacyError, UnsupportedModuleError, expected
from privgrad.gradient.autograd_graph import casts, sources
from privgrad.gradient.batching import Mended, batched
from privgrad.gradient.engines.arguments import Watched
from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.factors.displacement import Displacements, PerSampleWeight
from privgrad.gradient.factors.jacobian import Jacobian, JacobianNorms, Pulled
from privgrad.gradient.factors.weight_standardization import MovedStandardizedWeight, StandardizedWeight
from privgrad.gradient.layers.base import Rule, find_forward, find_rule
from privgrad.gradient.layers.functional import Product, Products
from privgrad.gradient.module_state import preserved, weight_norms

REMEDY = "use engine='vmap'"

# Where each tensor of a call holds the examples, in order: (dimension, rows per example); None if examples share it.
Layout = tuple[tuple[int, int] | None, ...]


@dataclass
class Tap:
    """A place in the graph where a gradient is computed, with the function from it to gradients of parameters.

    Attributes:
        path: the unit's path, for messages.
        edge: the graph's edge whose gradient is computed.
        factors: gradient at the edge -> factors by parameter; if `bent`, HvpTerms are its second argument.
        inputs: the tensors that `factors` uses, with their versions at that time, to detect in-place writes.
        delta: displacements of the parameters -> their effect on this tensor, to first order; for Hessian products.
        source: the unit's input, if gradients flow to it; for Hessian products.
        bent: whether the parameters' Hessian product needs HvpTerms, besides the gradient at the edge.
    """

    path: str
    edge: GradientEdge
    factors: Callable[..., Mapping[Tensor, Factor]]
    inputs: list[tuple[Tensor, int]]
    delta: Callable[[Displacements], Tensor | None] | None = None
    source: Tensor | None = None
    bent: bool = False


@dataclass(frozen=True)
class HvpTerms:
    """The terms that a Hessian-vector product adds to a layer's gradients, besides the gradient at its output.

    Attributes:
        first: the gradient at the output, without the Hessian's part.
        source: the Hessian-vector term that multiplies `first` in the weight gradient, or None.
        moves: the displacements of the parameters, the vectors of the product.
    """

    first: Tensor
    source: Tensor | None
    moves: Displacements


@dataclass(frozen=True)
class Call:
    """One call of a unit: its path, and the shapes of its input and output tensors."""

    path: str
    shapes: tuple[torch.Size, ...]


class CallSequenceChangedError(Exception):
    """The units were called in a different sequence than when the layouts were learned; Hooks catches it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Capture:
    """A context in which the units' forwards are replaced, and their inputs and output edges recorded.

    Args:
        model: the module.
        layouts: the learned layout of each call, in order; None while they are being learned.
        size: the number of examples.
        whole: paths of units that are computed by vmap; `_generic` adds to it.
        moves: displacements of each example's parameters, if gradients are evaluated there.
        curved: whether to record what Hessian products need.
        norms: measured norms of Jacobians, kept from call to call.
    Attributes:
        taps: the places where gradients are needed, in the order of the forward pass.
        calls: the calls of units, in order.
        by_products: paths of units without a rule that consist of linear maps and convolutions.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: list[tuple[str, Layout]] | None,
        size: int,
        whole: set[str],
        moves: Displacements | None = None,
        *,
        curved: bool = False,
        norms: JacobianNorms | None = None,
    ) -> None:
        self._model, self._layouts, self.size, self._whole, self._moves = model, layouts, size, whole, moves
        self._norms = JacobianNorms() if norms is None else norms
        self._curved = curved
        self.by_products = set[str]()
        self.taps: list[Tap] = []
        self.calls: list[Call] = []
        self._finished = False
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self._parameters = [(name, p, p._version) for name, p in model.named_parameters()]
        self._stack = ExitStack()

    def __enter__(self) -> "Capture":
        # Compiled code ignores replaced forwards.
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Attention's kernel for inference ignores them too, and cannot be differentiated.
        self._stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        for module in self._model.modules():
            buffers = vars(module)["_buffers"]
            for name, buffer in buffers.items():
                if buffer is not None:
                    self._stack.callback(buffers.__setitem__, name, buffer)
                    buffers[name] = buffer.clone()
                    self._buffers.append((buffers, name, buffers[name]))
        for path, module in units(self._model):
            original = module.forward
            self._stack.callback(_restore, module, vars(module).get("forward"))
            with_taps, rule = find_forward(module), find_rule(module)
            if path in self._whole:
                forward = partial(self._by_vmap, path, module, original)
            elif with_taps is not None:
                forward = partial(self._tapped, path, module, with_taps)
            elif rule is not None:
                forward = partial(self._ruled, path, module, rule, original)
            else:
                forward = partial(self._generic, path, module, original)
            vars(module)["forward"] = forward
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def finish(self) -> None:
        """End the recording after the forward pass, and check that pass.

        Raises:
            UnsupportedModuleError: the pass wrote to parameters or buffers.
            CallSequenceChangedError: it made fewer calls than there are layouts.
        """
        self._finished = True
        written = [name for name, parameter, version in self._parameters if parameter._version != version]
        if written:
            raise written_to(", ".join(written))
        changed = [name for buffers, name, copy in self._buffers if buffers.get(name) is not copy or copy._version]
        if changed:
            remedy = (
                "do not write to buffers in training, because the written values are private; if they depend on "
                f"parameters only, like spectral_norm's vectors, {REMEDY}, or call .eval() on the module"
            )
            raise refused("buffers", "not to be written", ", ".join(changed), remedy)
        if self._layouts is not None and len(self.calls) != len(self._layouts):
            raise CallSequenceChangedError(self._layouts[len(self.calls)][0])

    def _enter(self, path: str) -> Layout | None:
        """Return the layout of the next call; None while layouts are being learned."""
        if self._layouts is None:
            return None
        if self._finished:
            return next(layout for known, layout in self._layouts if known == path)
        index = len(self.calls)
        if index >= len(self._layouts) or self._layouts[index][0] != path:
            raise CallSequenceChangedError(path)
        return self._layouts[index][1]

    def _note(self, path: str, tensors: Sequence[Tensor]) -> None:
        if not self._finished:
            self.calls.append(Call(path, tuple(tensor.shape for tensor in tensors)))

    def _tap(
        self,
        path: str,
        tensor: Tensor,
        factors: Callable[..., Mapping[Tensor, Factor]],
        *,
        inputs: Sequence[Tensor],
        delta: Callable[[Displacements], Tensor | None] | None = None,
        source: Tensor | None = None,
        bent: bool = False,
    ) -> Tensor:
        """Record the tensor's place in the graph; return the tensor with which the forward pass must continue."""
        tensor, versions = _own(tensor), [(x, x._version) for x in inputs]
        if not self._finished and tensor.requires_grad:
            self.taps.append(Tap(path, get_gradient_edge(tensor), factors, versions, delta, source, bent))
        return tensor

    def _ruled(self, path: str, module: nn.Module, rule: Rule, original: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1:
            return self._generic(path, module, original, *args, **kwargs)
        (x,) = (*args, *kwargs.values())
        read = {name: cast("Tensor | None", getattr(module, name, None)) for name in rule.parameters}
        weights = {name: weight for name, weight in read.items() if weight is not None}
        return self._by_rule(path, rule, module, weights, x)

    def _by_rule(
        self,
        path: str,
        rule: Rule,
        layer: Any,
        weights: Mapping[str, Tensor],
        x: Tensor,
    ) -> Tensor:
        """Compute one call by a layer's rule from detached weights, and add a tap at the output."""
        standardized = _standardized(layer, weights)
        each = self._each(layer, weights, standardized) if self._moves else {}
        layout = self._enter(path)
        detached = {name: weight.detach().requires_grad_(weight.requires_grad) for name, weight in weights.items()}
        if layout is not None:
            x = self._with_examples(path, x, layout[0])
            if layout[0] is not None and layout[0][0] != 0:
                raise misplaced(path, f"dimension {layout[0][0]}")
        if self._curved:
            rule, x = rule.bilinear(layer, x)
        moves = self._moves.of(weights) | {name: own.move() for name, own in each.items()} if self._moves else {}
        if self._curved and x.requires_grad:
            x = cast(Tensor, torch.ops.aten._unsafe_view(x, x.shape))  # a node of the graph for this layer only
        output = rule.moved(layer, detached, moves, x) if moves else rule.forward(layer, detached, x)
        self._note(path, [x, output])
        if layout is None:
            return output

        # The functions below must not refer to self: a cycle would keep the pass in memory until garbage collection.
        curved, norms = self._curved, self._norms

        def factors(grad: Tensor, terms: HvpTerms | None = None) -> dict[Tensor, Factor]:
            found: dict[Tensor, Factor] = {}
            for name, weight in weights.items():
                if not weight.requires_grad:
                    continue
                factor, more = rule.factor(layer, name, detached, x.detach(), grad), None
                if not isinstance(factor, Factor):  # pyright: ignore[reportUnnecessaryIsInstance]
                    got, remedy = type(factor).__name__, "return Dense, Outer or another factor of privgrad.gradient"
                    raise refused(f"factor of the rule for '{path}'", "to return a Factor", got, remedy)
                if terms is not None and terms.source is not None and name == "weight":
                    more = rule.factor(layer, name, detached, terms.source, terms.first)
                known = standardized.get(name)
                if name in each:
                    parts = each[name].pull(factor)
                elif known is not None and terms is not None:
                    parts = known.bent(factor, more, terms.moves.of(known.own))
                elif known is not None and (curved or known.takes(factor)):
                    parts = known.pull(factor)
                else:
                    norm_of = partial(_norm_of, norms, (path, name), known)
                    parts = _pulled(factor if more is None else factor + more, weight, norm_of)
                for parameter, part in parts.items():
                    found[parameter] = found[parameter] + part if parameter in found else part
            return found

        def delta(moves: Displacements) -> Tensor | None:
            found = moves.of(weights)
            for name, own in standardized.items():
                if own_moves := moves.of(own.own):
                    if not own.knows(own_moves):  # the layer has more calls than for earlier examples
                        raise CallSequenceChangedError(path)
                    found[name] = own.tangent(own_moves)
            return rule.delta(layer, found, x) if found else None

        if not self._curved:
            return self._tap(path, output, factors, inputs=[x])
        source = x if x.requires_grad else None
        return self._tap(path, output, factors, inputs=[x], delta=delta, source=source, bent=True)

    def _each(
        self, layer: Any, weights: Mapping[str, Tensor], standardized: Mapping[str, StandardizedWeight]
    ) -> dict[str, PerSampleWeight | MovedStandardizedWeight]:
        """Return, by name, the per-example weights that a parametrization computes from displaced parameters."""
        found: dict[str, PerSampleWeight | MovedStandardizedWeight] = {}
        for name, parametrization in _parametrizations(layer).items():
            moves = cast(Displacements, self._moves).of(
                {n: p for n, p in parametrization.named_parameters() if p.requires_grad}
            )
            if name in weights and moves:
                known = standardized[name].moved(moves) if name in standardized else None
                found[name] = known or PerSampleWeight(parametrization, moves, weights[name])
        return found

    def _tapped(self, path: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        layout = self._enter(path)
        self._note(path, [])
        tap: Any = _ignore if layout is None else partial(self._tap, path, inputs=())
        # Contiguous, as in _by_vmap: dropout draws in the order of memory, and BAM's second pass needs equal draws.
        return tree_map_only(Tensor, Tensor.contiguous, forward(module, tap, *args, **kwargs))

    def _generic(self, path: str, module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a unit without a rule by its linear maps and convolutions, or by vmap if it has other operations."""
        if path not in self._whole:
            learning = self._layouts is None
            start, watched = len(self.calls), Watched(tree_flatten((args, kwargs))[0] if learning else [])
            output = self._by_products_of(path, module, original, *args, **kwargs)
            if not learning or path in self.by_products:
                return output
            _require_unchanged(path, watched)
            del self.calls[start:]
            self._whole.add(path)
        return self._by_vmap(path, module, original, *args, **kwargs)

    def _by_products_of(self, path: str, module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        own = [parameter for parameter in module.parameters() if parameter.requires_grad]
        numbers = count()

        def take(product: Product) -> Tensor:
            return self._by_rule(f"{path}[{next(numbers)}]", product.rule, product.layer, product.weights, product.x)

        with Products(own, take):
            output = original(*args, **kwargs)
        if next(numbers) > 0 and not {id(p) for p in own} & {id(source) for source in sources(_tensors(output))}:
            self.by_products.add(path)
        return output

    def _by_vmap(self, path: str, module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a unit with a separate copy of its parameters for each example, and add taps at the copies."""
        layout = self._enter(path)
        leaves, structure = tree_flatten((args, kwargs))
        tensors, watched = [leaf for leaf in leaves if isinstance(leaf, Tensor)], Watched(leaves)
        if layout is None:
            output = original(*args, **kwargs)
            _require_unchanged(path, watched)
            self._note(path, [*tensors, *_tensors(output)])
            return output
        if len(layout) < len(tensors):
            raise CallSequenceChangedError(path)
        places = layout[: len(tensors)]
        mapped = [self._split(path, x, place) for x, place in zip(tensors, places, strict=True)]
        dims = tuple(None if place is None else 0 for place in places)
        versions = [x._version for x in mapped]
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        moves = self._moves.of(own) if self._moves else {}
        copies = {name: p.detach().expand(self.size, *p.shape) for name, p in own.items()}
        copies |= {name: move.added_to(own[name].detach()) for name, move in moves.items()}
        copies = {name: copy.requires_grad_() for name, copy in copies.items()}
        rest = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        unit = _Unit(module, original)
        found: Any = None

        def single(parameters: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
            nonlocal found
            remaining = iter(inputs)
            filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            call_args, call_kwargs = tree_unflatten(filled, structure)
            state = {f"module.{name}": p for name, p in (parameters | rest).items()}
            found = tree_flatten(functional_call(unit, state, call_args, call_kwargs))
            return [leaf for leaf in found[0] if isinstance(leaf, Tensor)]

        # Undo changes of attributes: they hold one example's values under vmap, and must not reach others in the loop.
        isolated = partial(preserved, module, path, but=("_parameters", "_buffers"))
        try:
            with isolated():
                produced = batched(single, (0, *dims), module=module)(copies, *mapped)
        except Exception:  # an operation without a rule in vmap
            _require_unchanged(path, watched)
            if writes := sum(x._version - version for x, version in zip(mapped, versions, strict=True)):
                condition, remedy = "not to be changed in place", f"work on a copy, or {REMEDY}"
                raise refused(f"the input of '{path}'", condition, f"{writes} in-place writes", remedy) from None
            rows: list[list[Tensor]] = []
            for i in range(self.size):
                inputs = [x if dim is None else x[i] for x, dim in zip(mapped, dims, strict=True)]
                try:
                    with Mended(), isolated():  # Mended: sparse gradients of single examples cannot be stacked either
                        rows.append(single({name: p[i] for name, p in copies.items()}, *inputs))
                except PrivacyError:
                    raise
                except Exception as error:
                    got = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                    raise refused(f"'{path}'", "to run on one example", got, REMEDY) from error
                _require_unchanged(path, watched)
            if len({len(row) for row in rows}) != 1:
                raise CallSequenceChangedError(path) from None
            produced = [torch.stack(row) for row in zip(*rows, strict=True)]
        _require_unchanged(path, watched)
        if len(produced) != len(layout) - len(tensors):
            raise CallSequenceChangedError(path)
        joined = map(partial(_joined, path), produced, layout[len(tensors) :])
        output = tree_unflatten([next(joined) if isinstance(leaf, Tensor) else leaf for leaf in found[0]], found[1])
        self._note(path, [*tensors, *_tensors(output)])
        for name, parameter in own.items():
            delta = partial(_move_of, parameter)
            self._tap(path, copies[name], partial(_written_out, parameter), inputs=[], delta=delta)
        return output

    def _with_examples(self, path: str, x: Tensor, place: tuple[int, int] | None) -> Tensor:
        """Return x; if all examples share it, expanded to one row per example in dimension 0, without a copy."""
        if place is None:
            x = x[0] if x.dim() > 0 and len(x) == 1 else x
            return x.expand(self.size, *x.shape)
        dim, parts = place
        if x.shape[dim] != self.size * parts:
            raise CallSequenceChangedError(path)
        return x

    def _split(self, path: str, x: Tensor, place: tuple[int, int] | None) -> Tensor:
        """Return (..., B parts, ...) as (B, ..., parts, ...), with the memory layout of each example alone."""
        if place is None:
            return x
        dim, parts = place
        whole = self._with_examples(path, x, place)
        return whole.reshape(*x.shape[:dim], self.size, parts, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()


class _Unit(nn.Module):
    """A module with a given forward, so that functional_call can replace its parameters around that forward.

    The old torch.nn.utils.weight_norm computes a weight in a hook before the forward. Here its hook computes the
    weight again, from the replaced parameters.
    """

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module = module
        self._forward = forward
        self._computed = weight_norms(vars(module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = {name: getattr(self.module, name) for name in self._computed}
        try:
            for name, hook in self._computed.items():
                setattr(self.module, name, hook.compute_weight(self.module))
            return self._forward(*args, **kwargs)
        finally:
            for name, weight in before.items():
                setattr(self.module, name, weight)


def units(model: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units, the smallest modules that own trainable parameters, with their paths; each unit once."""
    seen = set() if seen is None else seen
    if id(model) in seen or not any(p.requires_grad for p in model.parameters()):
        return
    seen.add(id(model))
    owns = any(p.requires_grad for p in model.parameters(recurse=False))
    if owns or find_forward(model) is not None or parametrize.is_parametrized(model):
        yield path, model
        return
    for name, child in model.named_children():
        yield from units(child, f"{path}.{name}" if path else name, seen)


def _parametrizations(layer: Any) -> Mapping[str, nn.Module]:
    """Return a layer's parametrizations, by the name of the weight that each computes."""
    is_parametrized = isinstance(layer, nn.Module) and parametrize.is_parametrized(layer)
    return dict(cast(nn.ModuleDict, layer.parametrizations).items()) if is_parametrized else {}


def _standardized(layer: Any, weights: Mapping[str, Tensor]) -> dict[str, StandardizedWeight]:
    """Return, by name, the weights that weight standardization computes."""
    known = {name: StandardizedWeight.of(own) for name, own in _parametrizations(layer).items() if name in weights}
    return {name: weight for name, weight in known.items() if weight is not None}


def _ignore(tensor: Tensor, *_: object) -> Tensor:
    """Return the tensor; this replaces a tap while layouts are being learned."""
    return tensor


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor, as a non-view: an in-place operation on a view would remove its edge from the graph."""
    is_view = tensor.grad_fn is not None and tensor._is_view()
    return cast(Tensor, torch.ops.aten._unsafe_view(tensor, tensor.shape)) if is_view else tensor


def _require_unchanged(path: str, watched: Watched) -> None:
    """Raise UnsupportedModuleError if a unit changed an argument: examples could then read each other's values."""
    kind = watched.changed()
    if kind is not None:
        remedy = f"call it without (model.config.use_cache = False for a cache of transformers), or {REMEDY}"
        raise refused(f"the arguments of '{path}'", "to stay unchanged during its forward", f"a changed {kind}", remedy)


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def _norm_of(norms: JacobianNorms, key: tuple[str, str], known: StandardizedWeight | None, jacobian: Jacobian) -> float:
    """Return a bound on the norm of a weight's Jacobian: in closed form for weight standardization, else measured."""
    if known is not None:
        return known.stretch(jacobian.parameter)
    return norms.of((*key, id(jacobian.parameter)), jacobian)


def _pulled(factor: Factor, weight: Tensor, norm_of: Callable[[Jacobian], float]) -> dict[Tensor, Factor]:
    """Return the factors of the parameters from which a weight is computed; of the weight itself if it is one."""
    leaves = {id(source): source for source in sources([weight])}.values()
    if weight.grad_fn is None:
        return dict.fromkeys(leaves, factor)
    apart = casts(weight) or any(leaf.itemsize < 4 for leaf in (weight, *leaves))
    return {leaf: Pulled(factor, Jacobian(weight, leaf, norm_of), apart=apart) for leaf in leaves}


def _move_of(parameter: Tensor, moves: Displacements) -> Tensor | None:
    move = moves.of({"": parameter}).get("")
    return None if move is None else move.dense()


def _written_out(parameter: Tensor, grads_BP: Tensor) -> dict[Tensor, Factor]:
    return {parameter: Dense(grads_BP)}


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def _joined(path: str, x: Tensor, place: tuple[int, int] | None) -> Tensor:
    """Return (B, ..., parts, ...) as (..., B parts, ...), as the module itself would return it."""
    if place is None:
        return x.flatten(0, 1) if x.dim() > 1 and x.shape[1] == 1 else x
    dim, parts = place
    if x.dim() < dim + 2 or x.shape[dim + 1] != parts:
        raise misplaced(path, f"an output of shape {tuple(x.shape[1:])} per example")
    return x.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def find_layout(one: Call, other: Call, sizes: tuple[int, int]) -> Layout:
    """Return the layout of a call, found by comparing it with the same call for another number of examples.

    Args:
        one: the call with sizes[0] examples.
        other: the call with sizes[1] examples.
        sizes: two different numbers of examples.
    Raises:
        UnsupportedModuleError: the calls differ in more than the size of one dimension per tensor.
    """
    dims, other_dims = [len(shape) for shape in one.shapes], [len(shape) for shape in other.shapes]
    if dims != other_dims:
        got = f"tensors of {dims} dimensions with {sizes[0]} examples, {other_dims} with {sizes[1]}"
        raise refused(f"the calls of '{one.path}'", "not to depend on the examples", got, REMEDY)
    return tuple(_place(one.path, *shapes, sizes) for shapes in zip(one.shapes, other.shapes, strict=True))


def mixes(unit: str, one: Call, other: Call, sizes: tuple[int, int]) -> bool:
    """Return whether a call is a linear map or convolution inside `unit` with examples outside of dimension 0."""
    if not one.path.startswith(f"{unit}["):
        return False
    try:
        return any(place is None or place[0] != 0 for place in find_layout(one, other, sizes))
    except UnsupportedModuleError:
        return True


def _place(path: str, more: torch.Size, fewer: torch.Size, sizes: tuple[int, int]) -> tuple[int, int] | None:
    """Return (the dimension that grows with the batch, rows per example); None if no dimension grows."""
    growing = [dim for dim in range(len(more)) if more[dim] != fewer[dim]]
    if not growing:
        return None
    dim = growing[0]
    if len(growing) > 1 or more[dim] * sizes[1] != fewer[dim] * sizes[0] or more[dim] % sizes[0] != 0:
        got = f"shape {tuple(more)} with {sizes[0]} examples, {tuple(fewer)} with {sizes[1]}"
        raise misplaced(path, got)
    return dim, more[dim] // sizes[0]


def misplaced(path: str, got: str) -> UnsupportedModuleError:
    """Return the error for a unit whose tensors do not hold examples in dimension 0."""
    remedy = f"keep examples in dimension 0 (batch_first=True), or {REMEDY}"
    return refused(f"the tensors of '{path}'", "to hold examples in dimension 0", got, remedy)


def written_to(parameters: str) -> UnsupportedModuleError:
    """Return the error for a forward pass that writes to parameters, given their names."""
    remedy = "do not write to parameters in training; the model now holds private values: load it again"
    return refused("parameters", "not to be written by the forward pass", parameters, remedy)


def refused(name: str, condition: str, got: object, remedy: str) -> UnsupportedModuleError:
    """Return an UnsupportedModuleError in the name of PrivateGradient."""
    return cast(
        UnsupportedModuleError, expected("PrivateGradient", name, condition, got, remedy, UnsupportedModuleError)
    )
