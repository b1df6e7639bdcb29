"""Record the calls of a model's units during a forward pass, and the places in the graph where gradients are needed.

A unit is the smallest module that owns trainable parameters. `Capture` replaces the forward of every unit. The new
forward computes the same output from copies of the parameters without their graph, and records the inputs and the
graph's edge at the output. `passes.Passes` makes a `Capture` for each forward pass, and computes per-example gradients
from its records. The model calls the new forwards.

The privacy guarantee of the fast engine rests on this file: it must attribute each row of a tensor to its example. It
refuses tensors for which it cannot (see `layouts`), and `self_check` compares some results with autograd.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_map_only

from privgrad.gradient.autograd_graph import sources
from privgrad.gradient.engines.arguments import Watched
from privgrad.gradient.engines.layer_call import LayerCall
from privgrad.gradient.engines.layouts import Call, Layout, with_examples
from privgrad.gradient.engines.refusals import REMEDY, CallSequenceChangedError, misplaced, refused, written_to
from privgrad.gradient.engines.taps import Tap
from privgrad.gradient.engines.vmapped_unit import VmappedUnit, copies_of, require_unchanged
from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.factors.jacobian import JacobianNorms
from privgrad.gradient.layers.base import Rule, find_forward, find_rule
from privgrad.gradient.layers.functional import Product, Products


class Capture:
    """A context in which the units' forwards are replaced, and their inputs and output edges recorded.

    Args:
        model: the module.
        layouts: the learned layout of each call, in order; None while they are being learned.
        size: the number of examples.
        vmapped_units: paths of units that are computed by vmap; learning adds units to it.
        displacements: of each example's parameters, if gradients are evaluated there.
        curved: whether to record what Hessian products need.
        norms: measured norms of Jacobians, kept from call to call.
    Attributes:
        taps: where gradients are needed, in the order of the forward pass.
        calls: the calls of units, in order.
        by_products: paths of units without a rule that consist of linear maps and convolutions.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: list[tuple[str, Layout]] | None,
        size: int,
        vmapped_units: set[str],
        displacements: Displacements | None = None,
        *,
        curved: bool = False,
        norms: JacobianNorms | None = None,
    ) -> None:
        self._model, self._layouts, self.size, self._displacements = model, layouts, size, displacements
        self._vmapped_units = vmapped_units
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
        """Replace the forwards of all units, and the buffers by copies, until the exit."""
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
        for config in _cached_configs(self._model):
            self._stack.callback(setattr, config, "use_cache", True)
            config.use_cache = False
        for path, module in units(self._model, self._vmapped_units):
            original = module.forward
            self._stack.callback(_restore, module, vars(module).get("forward"))
            replacement, rule = find_forward(module), find_rule(module)
            if path in self._vmapped_units:
                forward = partial(self._by_vmap, path, module, original)
            elif replacement is not None:
                forward = partial(self._by_taps, path, module, replacement)
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

        `passes` calls it. Later calls of units, in a checkpointed part that recomputes, are not recorded.

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
        """Record a call of a unit, with the shapes of its tensors."""
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
        curved: bool = False,
    ) -> Tensor:
        """Record the tensor's place in the graph; return the tensor with which the forward pass must continue."""
        tensor, versions = _own(tensor), [(x, x._version) for x in inputs]
        if not self._finished and tensor.requires_grad:
            edge, zeros = get_gradient_edge(tensor), tensor.new_zeros(()).expand(tensor.shape)
            self.taps.append(Tap(path, edge, zeros, factors, versions, delta, source, curved))
        return tensor

    def _ruled(self, path: str, module: nn.Module, rule: Rule, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a unit with a rule; as one without a rule if it has not exactly one argument."""
        if len(args) + len(kwargs) != 1:
            return self._generic(path, module, original, *args, **kwargs)
        (x,) = (*args, *kwargs.values())
        read = {name: cast("Tensor | None", getattr(module, name, None)) for name in rule.parameters}
        weights = {name: weight for name, weight in read.items() if weight is not None}
        return self._by_rule(path, rule, module, weights, x)

    def _by_rule(self, path: str, rule: Rule, layer: Any, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute one call by a layer's rule from detached weights, and add a tap at the output."""
        layout = self._enter(path)
        if layout is not None:
            examples = layout[0]
            x = with_examples(path, x, examples, self.size)
            if examples is not None and examples.dim != 0:
                raise misplaced(path, f"dimension {examples.dim}")
        call = LayerCall(path, rule, layer, weights, x, self._norms, curved=self._curved)
        output = call.forward(self._displacements)
        self._note(path, [call.x, output])
        if layout is None:
            return output
        if not self._curved:
            return self._tap(path, output, call.factors, inputs=[call.x])
        source = call.x if call.x.requires_grad else None
        return self._tap(path, output, call.factors, inputs=[call.x], delta=call.delta, source=source, curved=True)

    def _by_taps(self, path: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a unit by a forward that passes the output of each linear map through a tap."""
        layout = self._enter(path)
        self._note(path, [])
        tap: Any = _ignore if layout is None else partial(self._tap, path, inputs=())
        # Contiguous, as in _by_vmap: dropout draws in the order of memory, and BAM's second pass needs equal draws.
        return tree_map_only(Tensor, Tensor.contiguous, forward(module, tap, *args, **kwargs))

    def _generic(self, path: str, module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a unit without a rule by its linear maps and convolutions, or by vmap if it has other operations."""
        if path not in self._vmapped_units:
            learning = self._layouts is None
            start, watched = len(self.calls), Watched(tree_flatten((args, kwargs))[0] if learning else [])
            output = self._by_products_of(path, module, original, *args, **kwargs)
            if not learning or path in self.by_products:
                return output
            require_unchanged(path, watched)
            del self.calls[start:]
            self._vmapped_units.add(path)
        return self._by_vmap(path, module, original, *args, **kwargs)

    def _by_products_of(self, path: str, module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a unit by rules for its linear maps and convolutions; note it if it uses its weights only there."""
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
        layout, call = self._enter(path), VmappedUnit(path, module, original, (args, kwargs))
        if layout is None:
            output = call.plain()
            self._note(path, [*call.tensors, *_tensors(output)])
            return output
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        copies = copies_of(own, self.size, self._displacements)
        output = call.output(copies, layout, self.size)
        self._note(path, [*call.tensors, *_tensors(output)])
        for name, parameter in own.items():
            delta = partial(_displacement_of, parameter)
            self._tap(path, copies[name], partial(_written_out, parameter), inputs=[], delta=delta)
        return output


def units(model: nn.Module, whole: Collection[str] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units, the smallest modules that own trainable parameters, with their paths; each unit once.

    A module that is taken whole is one unit, and no module within it is a unit elsewhere. `passes` calls it too.

    Args:
        model: the module.
        whole: paths of modules that are taken whole, and of other units.
    """
    seen = {id(part) for path in whole for part in [*model.get_submodule(path).modules()][1:]}
    yield from _units(model, "", whole, seen)


def _units(model: nn.Module, path: str, whole: Collection[str], seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units within a module that were not seen; see `units`."""
    if id(model) in seen or not any(p.requires_grad for p in model.parameters()):
        return
    seen.add(id(model))
    owns = any(p.requires_grad for p in model.parameters(recurse=False))
    if owns or path in whole or find_forward(model) is not None or parametrize.is_parametrized(model):
        yield path, model
        return
    for name, child in model.named_children():
        yield from _units(child, f"{path}.{name}" if path else name, whole, seen)


def _cached_configs(model: nn.Module) -> list[Any]:
    """Return the configurations of transformers in a model that ask for a key-value cache.

    Training needs no cache, and a layer that fills one would hand one example's values to the next.
    """
    found = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    return [config for config in found.values() if getattr(config, "use_cache", None) is True]


def _ignore(tensor: Tensor, *_: object) -> Tensor:
    """Return the tensor; this replaces a tap while layouts are being learned."""
    return tensor


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor, as a non-view: an in-place operation on a view would remove its edge from the graph."""
    is_view = tensor.grad_fn is not None and tensor._is_view()
    return cast(Tensor, torch.ops.aten._unsafe_view(tensor, tensor.shape)) if is_view else tensor


def _restore(module: nn.Module, forward: Any) -> None:
    """Put a module's own attribute `forward` back, or remove it if there was none."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def _displacement_of(parameter: Tensor, displacements: Displacements) -> Tensor | None:
    """Return each example's displacement of a parameter, shape (B, *P); None if it does not move."""
    displacement = displacements.of({"": parameter}).get("")
    return None if displacement is None else displacement.dense()


def _written_out(parameter: Tensor, grads_BP: Tensor) -> dict[Tensor, Factor]:
    """Return the factor of a parameter whose gradients are written out."""
    return {parameter: Dense(grads_BP)}


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors in an output, in order."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
