"""The fast engine: one forward and one backward for all examples, gradients kept factored.

While a loss is computed, every unit (the smallest module that owns trainable parameters) has its forward replaced: it
computes the same from stand-ins of its parameters, and notes inputs and the graph's edge at its output. One backward
then asks for the gradients at those edges only, so that no weight gradient is ever computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vmap
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_unflatten

from privgrad.errors import UnsupportedModuleError, expected
from privgrad.gradient.adapters import find_adapter
from privgrad.gradient.checks import evaluating, gradients
from privgrad.gradient.engines import LossFunction, preserved, require_losses, trainable
from privgrad.gradient.factors import Dense, Factor, Pulled
from privgrad.gradient.products import Product, Products, sources
from privgrad.gradient.rules import Rule, find_rule
from privgrad.types import count_examples, map_examples

_TOGETHER = 1 << 23  # floats of output gradients that are worth a pass of their own
_KEPT = 1 << 24  # floats of per-example gradients that are kept from their norms to the sum
_PROBED = 3  # examples of the audit
_VMAP = "use engine='vmap'"

# Where the examples are in each tensor, in order: (dimension, rows an example); None: the same for all examples.
Layout = tuple[tuple[int, int] | None, ...]


@dataclass
class Tap:
    """A place in the graph whose gradient is asked for, and what it says of the parameters."""

    path: str
    edge: GradientEdge
    factors: Callable[[Tensor], Mapping[Tensor, Factor]]
    inputs: list[tuple[Tensor, int]]  # with their version when they were used


@dataclass(frozen=True)
class Call:
    """One call of a unit: where, and the shapes of the tensors in and out of it."""

    path: str
    shapes: tuple[torch.Size, ...]


class Hooks:
    """Per-example gradients of a model by factors.

    Args:
        model: the module; never changed, its forwards are replaced during a call only.
        loss_fn: (model, examples) -> losses, shape (B,).
        memory_mb: MiB for what each example needs of its own, half of it for output gradients, half for gradients
            that are kept from their norms to the sum; at least one example is taken. None: see the constants above.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, memory_mb: float | None = None) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._room = None if memory_mb is None else int(memory_mb * 2**20) // 8  # floats, for each half
        self._layouts: list[tuple[str, Layout]] | None = None
        self._whole = set[str]()  # units without a rule that are taken by vmap
        self._floats = 0  # of output gradients, an example

    def __call__(self, examples: Any) -> dict[str, Factor]:
        """Gradient of each example's own loss, factored, by parameter name.

        Args:
            examples: with leading dimension B >= 1.
        Returns:
            One factor for every trainable parameter that the loss reaches.
        Raises:
            UnsupportedModuleError: a parameter is used outside of a unit, or examples are not kept apart; by name.
        Privacy:
            NOT private. The examples share one forward pass: that each keeps to itself is checked on the first batch
            (and when the sequence of calls changes) on a few of its examples, not proven.
        """
        if self._layouts is None:
            self.audit(examples)
        try:
            return self._factors(examples)
        except _OtherCallsError:
            # Loops may be longer for longer sequences; what depends on the data otherwise is refused.
            self.audit(examples)
        try:
            return self._factors(examples)
        except _OtherCallsError as error:
            raise _refused("the calls of layers", "not to depend on the examples", error.path, _VMAP) from None

    def microbatch_size(self, examples: Any) -> int:
        """How many examples to take at once: their gradients stay near the caches, and well above the parameters."""
        if self._layouts is None:
            self.audit(examples)
        parameters = sum(int(p.numel()) for p in trainable(self._model).values())
        room = max(_TOGETHER, 4 * parameters) if self._room is None else self._room
        size, most = count_examples(examples), max(1, room // max(1, self._floats))
        return -(-size // -(-size // most))

    def audit(self, examples: Any) -> None:
        """Learn where the examples are in each layer's tensors; check gradients of a few against single examples.

        Raises:
            UnsupportedModuleError: they differ, or a parameter is used outside of a unit.
        """
        few = _few(examples)
        self._layouts = self._learn_layouts(few)
        with evaluating(self._model):
            found = self._factors(few)
            singles = [
                gradients(self._model, self._loss_fn, map_examples(itemgetter(slice(i, i + 1)), few))
                for i in range(_PROBED)
            ]
        whole_B = torch.tensor([sum(float(g.double().square().sum()) for g in single.values()) for single in singles])
        for name in trainable(self._model):
            wanted = torch.stack([single[name] for single in singles]).flatten(1).double()
            got = found[name].dense().flatten(1) if name in found else torch.zeros_like(wanted)
            error_B, wanted_B = (got - wanted).square().sum(1).sqrt(), wanted.square().sum(1).sqrt()
            # Wide enough for bfloat16 and for a ReLU at its kink; a mix of examples is off by much more.
            if bool((error_B > 0.05 * wanted_B + 0.005 * whole_B.sqrt().to(error_B)).any()):
                self._layouts = None
                remedy = f"keep examples in dimension 0 (batch_first=True) and apart in every layer, or {_VMAP}"
                raise _refused(f"the gradient of {name!r}", "to be that of single examples", "another", remedy)

    def _learn_layouts(self, few: Any) -> list[tuple[str, Layout]]:
        """Compare two batch sizes: a dimension that grows with the batch holds examples."""
        sizes, captures = (_PROBED, _PROBED - 1), list[_Capture]()
        for size in sizes:
            captures.append(capture := _Capture(self._model, None, size, self._whole))
            with torch.enable_grad(), torch.random.fork_rng(), preserved(self._model), capture:
                self._loss_fn(self._model, map_examples(itemgetter(slice(0, size)), few))
                capture.finish()
        more, fewer = (capture.calls for capture in captures)
        if [call.path for call in more] != [call.path for call in fewer]:
            raise _refused("the calls of layers", "not to depend on the examples", "a change", _VMAP)
        pairs = list(zip(more, fewer, strict=True))
        mixing = {unit for unit in captures[0].by_products if any(_mixes(unit, *pair, sizes) for pair in pairs)}
        if mixing:
            self._whole |= mixing
            return self._learn_layouts(few)
        return [(one.path, _layout(one, other, sizes)) for one, other in pairs]

    def _factors(self, examples: Any) -> dict[str, Factor]:
        size = count_examples(examples)
        capture = _Capture(self._model, self._layouts, size, self._whole)
        parameters = trainable(self._model)
        with torch.enable_grad(), preserved(self._model), capture:
            losses = require_losses(self._loss_fn(self._model, examples), size)
            capture.finish()
            _require_inside_units(losses, parameters)
            edges = [tap.edge for tap in capture.taps]
            if not edges or not losses.requires_grad:
                return {}
            # Checkpointed parts compute again in here. None where the loss does not depend on a unit's output.
            grads = cast("Sequence[Tensor | None]", torch.autograd.grad(losses.sum(), edges, allow_unused=True))
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._floats = sum(int(grad.numel()) for grad in grads if grad is not None) // size
        factors: dict[str, Factor] = {}
        room = _KEPT if self._room is None else self._room
        with torch.autocast(losses.device.type, enabled=False):
            for tap, grad in zip(capture.taps, grads, strict=True):
                for tensor, version in tap.inputs:
                    if tensor._version != version:
                        got, remedy = "a change", "work on a copy, as ordinary training requires too"
                        raise _refused(f"the input of '{tap.path}'", "not to be changed in place", got, remedy)
                if grad is None:
                    continue
                for parameter, factor in tap.factors(grad).items():
                    name = names[id(parameter)]
                    if factor.examples != size:
                        if factor.examples % size != 0:
                            raise _misplaced(tap.path)
                        factor = factor.merge(factor.examples // size)
                    floats = size * int(parameter.numel())
                    if factor.worth_keeping and floats <= room:
                        factor, room = factor.written_out(), room - floats
                    factors[name] = factors[name] + factor if name in factors else factor
        return factors


class _OtherCallsError(Exception):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _Capture:
    """Replaces the units' forwards while it is open, and notes what passes through them."""

    def __init__(self, model: nn.Module, layouts: list[tuple[str, Layout]] | None, size: int, whole: set[str]) -> None:
        self._model, self._layouts, self._size, self._whole = model, layouts, size, whole
        self.by_products = set[str]()
        self.taps: list[Tap] = []
        self.calls: list[Call] = []
        self._finished = False
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "_Capture":
        # Compiled code knows nothing of replaced forwards.
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in self._model.modules():
            buffers = vars(module)["_buffers"]
            for name, buffer in buffers.items():
                if buffer is not None:
                    self._stack.callback(buffers.__setitem__, name, buffer)
                    buffers[name] = buffer.clone()
                    self._buffers.append((buffers, name, buffers[name]))
        for path, module in _units(self._model):
            original = module.forward
            self._stack.callback(_restore, module, vars(module).get("forward"))
            adapter, rule = find_adapter(module), find_rule(module)
            if adapter is not None:
                forward = partial(self._adapted, path, module, adapter)
            elif rule is not None:
                forward = partial(self._ruled, path, module, rule, original)
            else:
                forward = partial(self._generic, path, module, original)
            vars(module)["forward"] = forward
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def finish(self) -> None:
        """The forward pass is over: check it, and note nothing from here on."""
        self._finished = True
        changed = [name for buffers, name, copy in self._buffers if buffers.get(name) is not copy or copy._version]
        if changed:
            remedy = "do not write to buffers in training, for what is written there is private"
            raise _refused("buffers", "not to be written", ", ".join(changed), remedy)
        if self._layouts is not None and len(self.calls) != len(self._layouts):
            raise _OtherCallsError(self._layouts[len(self.calls)][0])

    def _enter(self, path: str) -> Layout | None:
        """The layout of the next call; None while layouts are learned."""
        if self._layouts is None:
            return None
        if self._finished:
            return next(layout for known, layout in self._layouts if known == path)
        index = len(self.calls)
        if index >= len(self._layouts) or self._layouts[index][0] != path:
            raise _OtherCallsError(path)
        return self._layouts[index][1]

    def _note(self, path: str, tensors: Sequence[Tensor]) -> None:
        if not self._finished:
            self.calls.append(Call(path, tuple(tensor.shape for tensor in tensors)))

    def _tap(
        self,
        path: str,
        tensor: Tensor,
        factors: Callable[[Tensor], Mapping[Tensor, Factor]],
        *,
        inputs: Sequence[Tensor],
    ) -> None:
        versions = [(x, x._version) for x in inputs]
        if not self._finished and tensor.requires_grad:
            self.taps.append(Tap(path, get_gradient_edge(tensor), factors, versions))

    def _ruled(self, path: str, module: nn.Module, rule: Rule, original: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1:
            return self._generic(path, module, original, *args, **kwargs)
        (x,) = (*args, *kwargs.values())
        read = {name: cast("Tensor | None", getattr(module, name, None)) for name in rule.parameters}
        weights = {name: weight for name, weight in read.items() if weight is not None}
        return self._by_rule(path, rule, module, weights, x)

    def _by_rule(self, path: str, rule: Rule, layer: Any, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """One call of a rule: the weights replaced by stand-ins, the output tapped."""
        layout = self._enter(path)
        stand_ins = {name: weight.detach().requires_grad_(weight.requires_grad) for name, weight in weights.items()}
        if layout is not None:
            x = self._with_examples(path, x, layout[0])
            if layout[0] is not None and layout[0][0] != 0:
                raise _misplaced(path)
        output = rule.forward(layer, stand_ins, x)
        self._note(path, [x, output])
        if layout is None:
            return output

        def factors(grad: Tensor) -> dict[Tensor, Factor]:
            found: dict[Tensor, Factor] = {}
            for name, weight in weights.items():
                if not weight.requires_grad:
                    continue
                factor = rule.factor(layer, name, stand_ins, x.detach(), grad)
                for parameter in {id(source): source for source in sources([weight])}.values():
                    part = factor if parameter is weight else Pulled(factor, weight, parameter)
                    found[parameter] = found[parameter] + part if parameter in found else part
            return found

        self._tap(path, output, factors, inputs=[x])
        return output

    def _adapted(self, path: str, module: nn.Module, adapter: Any, *args: Any, **kwargs: Any) -> Any:
        layout = self._enter(path)
        self._note(path, [])
        if layout is None:
            return adapter(module, _ignore, *args, **kwargs)
        return adapter(module, partial(self._tap, path, inputs=()), *args, **kwargs)

    def _generic(self, path: str, module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A unit without a rule: by its linear maps and convolutions, or, if they are not all, under vmap."""
        if path not in self._whole:
            start = len(self.calls)
            output = self._by_products_of(path, module, original, *args, **kwargs)
            if self._layouts is not None or path in self.by_products:
                return output
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
        """The unit with its own copy of the parameters for every example."""
        layout = self._enter(path)
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if layout is None:
            output = original(*args, **kwargs)
            self._note(path, [*tensors, *_tensors(output)])
            return output
        places = layout[: len(tensors)]
        mapped = [self._split(path, x, place) for x, place in zip(tensors, places, strict=True)]
        dims = tuple(None if place is None else place[0] for place in places)
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        copies = {name: p.detach().expand(self._size, *p.shape).requires_grad_() for name, p in own.items()}
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

        try:
            produced = vmap(single, in_dims=(0, *dims), randomness="different")(copies, *mapped)
        except RuntimeError:  # an operation that vmap has no rule for
            rows = [
                single(
                    {name: p[i] for name, p in copies.items()},
                    *(x if dim is None else x.select(dim, i) for x, dim in zip(mapped, dims, strict=True)),
                )
                for i in range(self._size)
            ]
            produced = [torch.stack(row) for row in zip(*rows, strict=True)]
        joined = map(partial(_joined, path), produced, layout[len(tensors) :])
        output = tree_unflatten([next(joined) if isinstance(leaf, Tensor) else leaf for leaf in found[0]], found[1])
        self._note(path, [*tensors, *_tensors(output)])
        for name, parameter in own.items():
            self._tap(path, copies[name], partial(_written_out, parameter), inputs=[])
        return output

    def _with_examples(self, path: str, x: Tensor, place: tuple[int, int] | None) -> Tensor:
        """What is the same for all examples is repeated in dimension 0, as a view."""
        if place is None:
            x = x[0] if x.dim() > 0 and len(x) == 1 else x
            return x.expand(self._size, *x.shape)
        dim, parts = place
        if x.shape[dim] != self._size * parts:
            raise _OtherCallsError(path)
        return x

    def _split(self, path: str, x: Tensor, place: tuple[int, int] | None) -> Tensor:
        """(..., B parts, ...) -> (..., B, parts, ...)."""
        if place is None:
            return x
        dim, parts = place
        whole = self._with_examples(path, x, place)
        return whole.reshape(*x.shape[:dim], self._size, parts, *x.shape[dim + 1 :])


class _Unit(nn.Module):
    """A module with a given forward, so that its parameters can be swapped around that."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _units(model: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules that own trainable parameters, by path; each once."""
    seen = set() if seen is None else seen
    if id(model) in seen or not any(p.requires_grad for p in model.parameters()):
        return
    seen.add(id(model))
    owns = any(p.requires_grad for p in model.parameters(recurse=False))
    if owns or find_adapter(model) is not None or parametrize.is_parametrized(model):
        yield path, model
        return
    for name, child in model.named_children():
        yield from _units(child, f"{path}.{name}" if path else name, seen)


def _ignore(*tap: object) -> None:
    """Stands for a tap while layouts are learned."""


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def _written_out(parameter: Tensor, grads_BP: Tensor) -> dict[Tensor, Factor]:
    return {parameter: Dense(grads_BP)}


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def _joined(path: str, x: Tensor, place: tuple[int, int] | None) -> Tensor:
    """From (B, ..., parts, ...) to (..., B parts, ...), as the module itself would return it."""
    if place is None:
        return x.flatten(0, 1) if x.dim() > 1 and x.shape[1] == 1 else x
    dim, parts = place
    if x.dim() < dim + 2 or x.shape[dim + 1] != parts:
        raise _misplaced(path)
    return x.movedim(0, dim).flatten(dim, dim + 1)


def _layout(one: Call, other: Call, sizes: tuple[int, int]) -> Layout:
    if [len(shape) for shape in one.shapes] != [len(shape) for shape in other.shapes]:
        raise _refused(f"the calls of '{one.path}'", "not to depend on the examples", "a change", _VMAP)
    return tuple(_place(one.path, *shapes, sizes) for shapes in zip(one.shapes, other.shapes, strict=True))


def _mixes(unit: str, one: Call, other: Call, sizes: tuple[int, int]) -> bool:
    """Whether this is a linear map or convolution of the unit that does not keep examples in dimension 0."""
    if not one.path.startswith(f"{unit}["):
        return False
    try:
        return any(place is None or place[0] != 0 for place in _layout(one, other, sizes))
    except UnsupportedModuleError:
        return True


def _place(path: str, more: torch.Size, fewer: torch.Size, sizes: tuple[int, int]) -> tuple[int, int] | None:
    """The dimension that grows with the batch, and rows an example; None for what does not grow."""
    growing = [dim for dim in range(len(more)) if more[dim] != fewer[dim]]
    if not growing:
        return None
    dim = growing[0]
    if len(growing) > 1 or more[dim] * sizes[1] != fewer[dim] * sizes[0] or more[dim] % sizes[0] != 0:
        raise _misplaced(path)
    return dim, more[dim] // sizes[0]


def _misplaced(path: str) -> UnsupportedModuleError:
    remedy = f"keep examples in dimension 0 (batch_first=True), or {_VMAP}"
    return _refused(f"the tensors of '{path}'", "to hold examples in dimension 0", "another layout", remedy)


def _few(examples: Any) -> Any:
    """The first examples; repeated, or filled up with zeros, where there are too few."""
    size = count_examples(examples)
    few = map_examples(itemgetter(slice(0, _PROBED)), examples)
    return few if size >= _PROBED else map_examples(partial(_filled, missing=_PROBED - size), few)


def _filled(leaf: Tensor, *, missing: int) -> Tensor:
    return torch.cat([leaf, leaf.new_zeros(missing, *leaf.shape[1:])])


def _require_inside_units(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
    """Units compute from stand-ins: a parameter that the graph still reaches is used outside of one."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for source in sources([losses]):
        name = names.get(id(source))
        if name is not None:
            remedy = f"use it in its own module's forward only, or {_VMAP}"
            raise _refused(f"parameter {name!r}", "to be used by its own module only", "a use elsewhere", remedy)


def _refused(name: str, condition: str, got: object, remedy: str) -> UnsupportedModuleError:
    return cast(
        UnsupportedModuleError, expected("PrivateGradient", name, condition, got, remedy, UnsupportedModuleError)
    )
