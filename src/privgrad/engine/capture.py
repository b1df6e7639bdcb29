"""Record a forward pass: the calls of units and of torch functions, and where gradients are needed.

The new forward of a unit computes the same output from detached parameters, and records the inputs and the graph's edge
at the output. All other parameters reach torch functions as they are; each such call is computed by a rule or from a
copy of the parameter for each example. A use that is not seen keeps the graph of its parameters, and `passes` refuses
losses that depend on these.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from privgrad.engine.factors.displacement import Displacements, displacement_of
from privgrad.engine.factors.parametrized import JacobianNorms
from privgrad.engine.layers.base import Rule
from privgrad.engine.layers.functional import READERS, Product, faster
from privgrad.engine.layouts import CallRecord, Calls, Layout, joined, require_rows, set_apart, side_by_side, split
from privgrad.engine.shared_values import (
    FunctionCalls,
    Inputs,
    SharedValues,
    filled,
    for_each,
    for_one_example,
    name_of,
    tensors_in,
)
from privgrad.engine.units import LayerCall, Tap, Tapped, Unit, VmappedUnit, units, weights_of
from privgrad.errors import PrivacyError, UnsupportedModuleError
from privgrad.gradient.autograd_graph import nodes
from privgrad.gradient.factor import Dense, Factor
from privgrad.gradient.functional import Structure, replaced_in, version_of
from privgrad.gradient.refusals import (
    REMEDY,
    CallSequenceChangedError,
    buffers_written,
    first_line,
    misplaced,
    refused,
    written_to,
)
from privgrad.processes import Gathered

_AUTOGRAD: Any = torch.autograd
_FORWARD_AD: Any = forward_ad
_NONE: dict[str, str] = {}


class Capture:
    """A context in which a forward pass is recorded, and computed so that gradients per example can be taken."""

    def __init__(
        self,
        structure: Structure,  # of the model as it is now
        layouts: Calls | None,  # of all calls, in order; None while they are being learned
        size: int,
        whole: frozenset[str],  # the paths of the modules that are computed by vmap
        displacements: Displacements | None = None,
        *,
        curved: bool = False,  # whether to record what Hessian products need
        norms: JacobianNorms | None = None,
        earlier: CallRecord | None = None,  # the first pass that learns layouts, in the second one
        sees_all: bool = False,  # whether to see functions between all calls of units
    ) -> None:
        self.size = size
        self.structure, self._units = structure, structure.once(units, whole)
        self._displacements = displacements
        self._norms = JacobianNorms() if norms is None else norms
        self._curved = curved
        self.taps: list[Tap] = []  # where gradients are needed, in the order of the forward pass
        self._functions_of = dict[int, dict[str, str]]()  # by the id of a parameter: see Tap.functions
        self.record = CallRecord(layouts, size, earlier)
        self._forwards: list[tuple[dict[str, Any], Any]] = []  # the attributes of a unit, and its own forward if any
        self._buffers = [(held, name, held[name]) for _, held, name in structure.buffers]
        self._copied = {id(x): x.clone() for _, _, x in self._buffers}
        self._parameters = [(name, p, p._version) for name, p in structure.parameters]
        self._shared = SharedValues(structure.by_id, self._copies)
        recorded = self.record.functions if layouts is None and earlier is None else None
        gaps = None if layouts is None or sees_all else layouts.gaps
        self.functions = FunctionCalls(self._shared, self._function, recorded, gaps)
        self._stack = ExitStack()

    def __enter__(self) -> "Capture":
        """Replace the forwards of all units, and the buffers by copies, until the exit."""
        with ExitStack() as stack:
            # Compiled code ignores replaced forwards.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(self._put_back, torch.backends.mha.get_fastpath_enabled(), _AUTOGRAD._engine_run_backward)
            # Attention's kernel for inference ignores them too, and cannot be differentiated.
            torch.backends.mha.set_fastpath_enabled(False)
            _AUTOGRAD._engine_run_backward = partial(self._backward, _AUTOGRAD._engine_run_backward)
            # Training needs no key-value cache, and a layer that fills one would hand one example's values to the next.
            for config in self.structure.once(_configurations):
                if getattr(config, "use_cache", None) is True:
                    stack.callback(setattr, config, "use_cache", True)
                    config.use_cache = False
            if self._buffers:
                stack.enter_context(replaced_in(self._buffers, self._copied))
            for unit in self._units:
                own = vars(unit.module)
                self._forwards.append((own, own.get("forward")))
                own["forward"] = partial(self._call, unit, unit.module.forward)
            self.functions.begin()
            self._stack = stack.pop_all()
        return self

    def _put_back(self, fast_path: bool, run: Any) -> None:
        """Put back all that `__enter__` replaced, besides what has a context of its own."""
        self.functions.end()
        for own, forward in self._forwards:
            if forward is not None:
                own["forward"] = forward
            else:  # it is the method of the class
                own.pop("forward", None)
        _AUTOGRAD._engine_run_backward = run
        torch.backends.mha.set_fastpath_enabled(fast_path)

    def __exit__(self, kind: object, *exception: object) -> None:
        with self._stack:
            if kind is None:
                self.functions.end()
                self._require_unwritten()  # the backward pass may have written, too
        # They refer to this object. A cycle of references would keep the pass in memory until garbage collection.
        del self._shared, self.functions

    def finish(self) -> None:
        """End the recording after the forward pass, and refuse a pass that wrote to parameters or buffers."""
        self.record.finish()
        self._require_unwritten()
        self.functions.see_all()  # last: the mode would see each look at a version

    def _require_unwritten(self) -> None:
        if written := [name for name, parameter, version in self._parameters if parameter._version != version]:
            raise written_to(", ".join(written))
        copies = [(name, held.get(name), self._copied[id(x)]) for held, name, x in self._buffers]
        if changed := [name for name, now, copy in copies if now is not copy or copy._version]:
            raise buffers_written("buffers", changed)

    # Fault: a penalty on the gradient by the inputs. It depends on a weight through the backward pass too, which no tap
    #     sees; the rest of the gradient would be right, so a small penalty would be left out in silence.
    # Cost: one attribute for a pass; a walk of the graph for each call of autograd by the model or the loss.
    # Refuses wrongly: a gradient with respect to something that the layers do not influence.
    def _backward(
        self, run: Any, outputs: Any, grads: Any, keep: Any, create_graph: bool, inputs: Any, *rest: Any, **options: Any
    ) -> Any:
        """Compute a gradient that the model or the loss asks for; refuse it if it must be differentiated in a layer."""
        if create_graph and not self.record.is_finished:
            ends = {x.node if isinstance(x, GradientEdge) else x.grad_fn for x in inputs}
            taps = {tap.edge.node for tap in self.taps if not tap.tapped.is_copy}
            if any(id(x) in self.structure.by_id for x in inputs) or not taps.isdisjoint(nodes(outputs, ends)):
                raise _differentiated()
        return run(outputs, grads, keep, create_graph, inputs, *rest, **options)

    def _learn_unit(self, path: str, tensors: Sequence[Tensor], output: Any) -> Any:
        """Record a call of a unit while layouts are learned, and add a result that all examples share."""
        outputs = tensors_in(output)
        if (layout := self.record.learn_unit(path, tensors, outputs)) is not None:
            for x, examples in zip(outputs, layout[len(tensors) :], strict=True):
                if examples is None:
                    self._shared.add(x, path, None)
        return output

    def _tap(
        self, path: str, tensor: Tensor, factors: Any, inputs: Sequence[Tensor] = (), *, copied: Any = None, **hvp: Any
    ) -> Tensor:
        """Record the tensor's place in the graph; return the tensor with which the forward pass must continue."""
        node = tensor.grad_fn
        if node is not None and tensor._is_view():
            # An in-place operation on a view would remove its edge from the graph.
            tensor = cast(Tensor, torch.ops.aten._unsafe_view(tensor, tensor.shape))
            node = tensor.grad_fn
        if self.record.is_finished or not tensor.requires_grad:
            return tensor
        if copied is None and _FORWARD_AD._current_level >= 0:
            raise _differentiated()
        # Nodes of C++ keep their graph alive; for others, and for leaves, torch makes the edge.
        if node is None or isinstance(node, BackwardCFunction):
            edge = get_gradient_edge(tensor)
        else:
            edge = GradientEdge(node, tensor.output_nr)
        functions = _NONE if copied is None else self._functions_of.setdefault(id(copied), {})
        versions = [(x, x._version) for x in inputs]
        tapped = Tapped(path, copied is not None, functions, tensor.shape)
        self.taps.append(Tap(tapped, edge, tensor.dtype, tensor.device, factors, versions, **hvp))
        return tensor

    def _copies(self, path: str, parameter: Tensor) -> Tensor:
        own, displacement = parameter.detach(), displacement_of(parameter, self._displacements)
        copies = own.expand(self.size, *own.shape) if displacement is None else displacement.added_to(own)

        def factors(grads_BP: Tensor) -> dict[Tensor, Factor]:
            return {parameter: Dense(grads_BP)}

        def delta(displacements: Displacements) -> Tensor | None:
            moved = displacement_of(parameter, displacements)
            return None if moved is None else moved.dense()

        return self._tap(path, copies.requires_grad_(), factors, delta=delta, copied=parameter)

    def _call(self, unit: Unit, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of a unit; one with a rule, but not exactly one argument, by the functions that it calls."""
        if unit.rule is not None and len(args) + len(kwargs) != 1:
            return original(*args, **kwargs)
        before = self.functions.suspend()
        try:
            if unit.is_whole:
                output = self._by_vmap(unit, original, args, kwargs)
            elif unit.forward is not None:
                output = self._by_taps(unit, unit.forward, args, kwargs)
            else:
                (x,) = args or kwargs.values()
                output = self._by_rule_of(unit, original, x)
        except BaseException:
            self.functions.is_paused = before
            raise
        self.functions.resume(before)
        return output

    def _by_rule_of(self, unit: Unit, original: Any, x: Tensor) -> Tensor:
        """Compute a unit by its rule, or record the call while layouts are learned."""
        path = unit.path
        if self.record.is_learning:
            return self._learn_unit(path, [x], original(x))
        layout = self.record.enter(path, [x])
        if not any(layout):
            return self._once(unit, original, x)
        if (examples := layout[0]) is None:
            raise misplaced(path, "an input without examples")
        x = x if examples.is_plain else require_rows(path, x, examples, self.size)
        output = self._by_rule(path, cast(Rule, unit.rule), unit.module, weights_of(unit), x)
        return output if examples.is_plain else set_apart(path, output, examples, self.size)

    def _once(self, unit: Unit, original: Any, x: Tensor) -> Tensor:
        """Compute a unit whose input all examples share, and add its output to the shared values."""
        output: Tensor = original(x)  # with the graph of the parameters, so that a use that is not seen is refused

        def copies() -> Tensor:
            own = self._shared.copies(x) if x in self._shared else x.expand(self.size, *x.shape)
            is_one = x.dim() == 0 or (x.dim() == 1 and x.is_floating_point())  # without dimension 0 for rows
            rows = own if is_one else own.flatten(0, 1)
            found = self._by_rule(unit.path, cast(Rule, unit.rule), unit.module, weights_of(unit), rows)
            return found.view(self.size, *output.shape)

        self._shared.add(output, unit.path, copies, [x])
        return output

    def _by_rule(self, path: str, rule: Rule, layer: Any, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute one call by a layer's rule from detached weights, and add a tap at the output."""
        call = LayerCall(path, rule, layer, weights, x, self._norms, curved=self._curved)
        output = call.forward(self._displacements)
        if not self._curved:
            return self._tap(path, output, call.factors, [call.x])
        source = call.x if call.x.requires_grad else None
        return self._tap(path, output, call.factors, [call.x], delta=call.delta, source=source, curved=True)

    def _by_taps(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute a unit by a forward that passes the output of each linear map through a tap."""
        path, module, tensors = unit.path, unit.module, tensors_in([args, kwargs])
        if any(isinstance(x, PackedSequence) for x in (*args, *kwargs.values())):
            remedy = f"pad sequences and select the last position with a mask, or {REMEDY}"
            raise refused(f"the input of '{path}'", "to be a tensor", "a PackedSequence", remedy)
        if any(x in self._shared for x in tensors):
            raise misplaced(path, "a value that all examples share")
        if self.record.is_learning:
            output = forward(module, _untapped, *args, **kwargs)
            self.record.learn_unit(path, tensors, tensors_in(output))
            return output
        layout, count = self.record.enter(path, tensors), len(tensors)
        if any(examples is not None and examples.views > 1 for examples in layout):
            own = zip(tensors, layout[:count], strict=True)
            found = {id(x): x if at is None else side_by_side(path, x, at, self.size) for x, at in own}
            args, kwargs = filled((args, kwargs), (found[id(x)] for x in tensors))  # equal tensors stay equal objects
        moves = {} if self._displacements is None else {"displacements": self._displacements}
        output = forward(module, partial(self._tap, path), *args, **kwargs, **moves)
        each = zip(tensors_in(output), layout[count:], strict=True)
        outputs = [x if at is None else set_apart(path, x, at, self.size) for x, at in each]
        # Contiguous, as in _by_vmap: dropout draws in the order of memory, and BAM's second pass needs equal draws.
        return filled(output, map(Tensor.contiguous, outputs))

    def _by_vmap(self, unit: Unit, original: Any, args: Any, kwargs: Any) -> Any:
        """Compute a unit with a separate copy of its parameters for each example, and add taps at the copies."""
        path, module = unit.path, unit.module
        if absent := [name for name, p in module.named_parameters() if isinstance(p, Gathered) and not p.is_here]:
            remedy = "call fully_shard for this module and for none in it, or give all processes a whole model"
            raise refused(f"'{path}'", "to have its parameters in one block", f"{absent[0]!r} in another", remedy)
        call = VmappedUnit(path, module, original, (args, kwargs))
        if self.record.is_learning:
            return self._learn_unit(path, call.tensors, call.plain())
        layout, count = self.record.enter(path, call.tensors), len(call.tensors)
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        copies = {name: self._copies(path, parameter) for name, parameter in own.items()}
        produced = call.output(copies, self._inputs(path, call.tensors, layout), self.size)
        if len(produced) != len(layout) - count:
            raise CallSequenceChangedError(path)
        plain = tensors_in(call.plain()) if None in layout[count:] else produced
        outputs: list[Tensor] = []
        for own_rows, once, examples in zip(produced, plain, layout[count:], strict=True):
            if examples is None:
                self._shared.add(once, path, lambda rows=own_rows: rows)
            outputs.append(once if examples is None else joined(path, own_rows, examples))
        return call.rebuilt(outputs)

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a call of a torch function that has a shared value among its arguments."""
        tensors = tensors_in((args, kwargs) if kwargs else args)
        unit = next(self._shared.unit(x) for x in tensors if x in self._shared)
        path = f"{unit}[{name_of(func)}]"
        if self.record.is_learning:
            if any(isinstance(x, Gathered) and not x.is_here for x in tensors):
                remedy = "call fully_shard for no module in the one that reads it, or give all processes a whole model"
                raise refused(f"'{path}'", "to read parameters of its own block", "one of another block", remedy)
            index = self.functions.count - 1
            output = func(*args, **kwargs)
            outputs = tensors_in(output)
            layout = self.record.learn_function(path, name_of(func), index, tensors, outputs)
            if layout and not any(layout):
                for x in outputs:
                    self._shared.add(x, unit, None)
            return output
        layout = self.record.enter(path, tensors)
        if any(layout):
            return self._for_each(path, func, args, kwargs, tensors, layout)
        first, version = tensors[0], version_of(tensors[0])  # an operation in place returns its first tensor
        output = func(*args, **kwargs)

        def copies(before: Tensor | None = None) -> list[Tensor]:
            # `before`: the copies of the first input, where the function changes it in place.
            first = [] if before is None else [(before.clone(), 0)]
            others = self._inputs(path, tensors[len(first) :], layout[len(first) :])
            return self._mapped(path, func, args, kwargs, [*first, *others])[0]

        if layout and output is first and first in self._shared and version_of(first) != version:
            self._shared.rewrite(first, version, lambda before: copies(before)[0], tensors[1:])
        elif layout:
            once = cache(copies)
            for index, x in enumerate(tensors_in(output)):
                self._shared.add(x, unit, lambda index=index: once()[index], tensors)
        return output

    def _for_each(self, path: str, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], layout: Layout) -> Any:
        """Compute a function of shared values and examples by a rule, or else by vmap from copies of these values."""
        growing = [(x, examples) for x, examples in zip(tensors, layout, strict=False) if examples is not None]
        read = READERS.get(func)
        product = None if read is None else read(*args, **kwargs)
        if product is not None and len(growing) == 1 and growing[0][0] is product.x and self._takes(product):
            x, examples = growing[0]
            if examples.dim == 0:
                x = require_rows(path, x, examples, self.size)
                output = self._by_rule(path, product.rule, product.layer, product.weights, x)
                return set_apart(path, output, examples, self.size)
        shared = [x for x in tensors if x in self._shared]
        for parameter in frozenset[int]().union(*map(self._shared.sources, shared)):
            self._functions_of.setdefault(parameter, {})[name_of(func)] = faster(func, args, shared)
        outs = layout[len(tensors) :]
        if not growing:
            args = for_one_example(func, args, *cast("Any", outs[0])[:2])
        produced, result = self._mapped(path, func, args, kwargs, self._inputs(path, tensors, layout))
        if len(produced) != len(outs):
            raise CallSequenceChangedError(path)
        return filled(result, (joined(path, x, cast("Any", at)) for x, at in zip(produced, outs, strict=True)))

    def _mapped(self, path: str, func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[list[Tensor], Any]:
        """Return `for_each`, and refuse the function if it fails."""
        try:
            return for_each(func, args, kwargs, inputs)
        except (PrivacyError, CallSequenceChangedError):
            raise
        except Exception as error:
            if self.record.is_finished:  # torch ends the second run of a checkpointed part by an exception
                raise
            unit = path.partition("[")[0]
            name = f"the function '{name_of(func)}' with parameters of '{unit}'"
            raise refused(name, "to run on one example", first_line(error), REMEDY, unit=unit) from error

    def _inputs(self, path: str, tensors: Sequence[Tensor], layout: Layout) -> list[tuple[Tensor, int | None]]:
        """Return tensors with their examples in dimension 0, and that dimension; None if all examples share one."""
        found: list[tuple[Tensor, int | None]] = []
        for x, examples in zip(tensors, layout, strict=False):
            if examples is not None:
                found.append((split(path, x, examples, self.size), 0))
            else:
                found.append((self._shared.copies(x), 0) if x in self._shared else (x, None))
        return found

    def _takes(self, product: Product) -> bool:
        """Return whether a call can be computed by its rule: from weights, and not from copies of computed weights."""
        moves = self._displacements is not None or self._curved
        trained = [w for w in product.weights.values() if w.requires_grad or w in self._shared]
        return all(self._shared.sources(w) == frozenset([id(w)]) if moves else w in self._shared for w in trained)


def _configurations(structure: Structure) -> list[Any]:
    """Return the distinct objects that modules hold as `config`."""
    found: list[Any] = [now.get("config") for _, now, _ in structure.attributes]
    return list({id(config): config for config in found if config is not None}.values())


def _differentiated() -> UnsupportedModuleError:
    name, condition = "a derivative within the loss", "not to pass through layers"
    return refused(name, condition, "torch.autograd.grad(create_graph=True) or the like", REMEDY, unit="")


def _untapped(tensor: Tensor, _: object) -> Tensor:
    return tensor
