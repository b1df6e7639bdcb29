"""The values that a model computes once for all examples, and the torch functions that use them.

Such values are its parameters, and what follows from them alone, such as a table of relative positions. Where one meets
the examples, each example gets its own copy, and the gradients at the copies are the per-example gradients. Copy i must
depend on example i, the model and public numbers only, and in `for_each` no example's values may reach another example.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.batching_rules import OF_ALL
from privgrad.gradient.functional import batched, unseen_by_checkpoints, version_of
from privgrad.gradient.refusals import REMEDY, CallSequenceChangedError, refused

Inputs = Sequence[tuple[Tensor, int | None]]  # tensors, each with the dimension of its examples; None: they share it


@dataclass
class _Value:
    tensor: Tensor
    version: int
    trained: bool
    unit: str
    compute: Callable[[], Tensor] | None  # its copies; None for a parameter, and while layouts are being learned
    inputs: Sequence[tuple[Tensor, int]] = ()  # what it was computed from, with the versions
    copies: Tensor | None = None
    sources: frozenset[int] = frozenset()  # the ids of the parameters among these


class SharedValues:
    """The shared values of one forward pass, which keep the graph of their parameters: `passes` refuses unseen uses."""

    def __init__(
        self, parameters: Mapping[int, tuple[str, Tensor]], copies_of: Callable[[str, Tensor], Tensor]
    ) -> None:
        self._copies_of = copies_of
        self._values: dict[int, _Value | tuple[str, Tensor]] = {**parameters}  # a parameter that was not met yet

    def _value(self, tensor: object) -> _Value:
        value = self._values[id(tensor)]
        if type(value) is tuple:
            name, p = value
            unit, sources = name.rpartition(".")[0], frozenset([id(p)])
            self._values[id(p)] = value = _Value(p, p._version, True, unit, None, sources=sources)
        return cast(_Value, value)

    def __contains__(self, tensor: object) -> bool:
        if id(tensor) not in self._values:  # the values are kept, so no other object has such an id
            return False
        value = self._value(tensor)
        # The forward of an autograd.Function is seen, but not its backward: its result has a graph only afterwards.
        return value.tensor.requires_grad == value.trained

    def unit(self, tensor: Tensor) -> str:
        """Return the path of the module to blame for a value: the owner of its first parameter."""
        return self._value(tensor).unit

    def sources(self, tensor: Tensor) -> frozenset[int]:
        """Return the ids of the parameters that a value was computed from; none if it is no shared value."""
        return self._value(tensor).sources if tensor in self else frozenset()

    def add(
        self, tensor: Tensor, unit: str, compute: Callable[[], Tensor] | None, inputs: Sequence[Tensor] = ()
    ) -> None:
        """Add a value that was computed from shared values and from constants alone; a known value stays as it is."""
        # `compute` returns its copies, shape (B, *value). It runs at the first use, in the modes of the present.
        if tensor not in self:
            device, grad = tensor.device.type, torch.is_grad_enabled()
            dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

            def in_the_same_modes(compute: Callable[[], Tensor]) -> Tensor:
                with unseen_by_checkpoints(), torch.set_grad_enabled(grad), torch.autocast(device, dtype, enabled):
                    return compute()

            versions = [(x, version_of(x)) for x in inputs]
            sources = frozenset[int]().union(*map(self.sources, inputs))
            own = None if compute is None else partial(in_the_same_modes, compute)
            value = _Value(tensor, tensor._version, tensor.requires_grad, unit, own, versions, sources=sources)
            self._values[id(tensor)] = value

    def rewrite(
        self, tensor: Tensor, version: int, compute: Callable[[Tensor], Tensor], inputs: Sequence[Tensor] = ()
    ) -> None:
        """Follow an operation in place on a value of this version; `compute` returns new copies from those before."""
        before = self._value(tensor)
        if before.version == version:  # else another operation changed it, through a view
            del self._values[id(tensor)]
            self.add(tensor, before.unit, lambda: compute(self._computed(before)), inputs)
            self._value(tensor).sources |= before.sources

    def copies(self, tensor: Tensor) -> Tensor:
        """Return one copy of a value for each example, shape (B, *value); refuse a value that was written to."""
        value = self._value(tensor)
        if value.version != tensor._version:
            raise _written_to(value.unit)
        return self._computed(value)

    def _computed(self, value: _Value) -> Tensor:
        """Return the copies of a value as it was when it was added."""
        if value.copies is None:
            if any(version_of(x) != version for x, version in value.inputs):
                raise _written_to(value.unit)
            compute = value.compute
            value.copies = self._copies_of(value.unit, value.tensor) if compute is None else compute()
        return value.copies


def _written_to(unit: str) -> UnsupportedModuleError:
    # The write was through a view, or after the value was read.
    name, remedy = f"what '{unit}' computes once", f"work on a copy, or {REMEDY}"
    return refused(name, "not to be changed in place", "an in-place write", remedy, unit=unit)


# Functions that read no values, so that shared values need no copies there. Their calls are not recorded.
_METADATA = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "names", "itemsize"),
    *("is_cuda", "is_cpu", "is_sparse", "is_meta", "is_mps", "is_quantized", "is_nested", "_version", "nbytes"),
    *("size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "dim_order", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "data_ptr", "untyped_storage"),
    *("__len__", "__hash__", "__repr__", "__format__", "_is_view", "new_zeros", "new_ones", "new_empty", "new_full"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
}


class Additive(TorchFunctionMode):
    """A mode that refuses hooks and operations on memory while a unit's weights are computed from its parameters."""

    # The gradients of all examples are added up at these weights: a hook would see this sum, and need not be additive.

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OF_ALL:
            raise _of_all(self._path, func)
        return func(*args, **(kwargs or {}))


_SEQUENCES, _NUMBERS = frozenset((tuple, list)), frozenset((int, float, bool, str, type(None), torch.Size))
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_NONE = frozenset[int]()


class FunctionsHiddenError(CallSequenceChangedError):
    """Functions with shared values may be called where the mode is not on."""


def _depth() -> int:
    """Return the number of modes that see functions."""
    return int(_C._len_torch_function_stack())


class Call(NamedTuple):
    """A call: the function's name or the unit's path, and the shapes of the tensors in its arguments and result."""

    name: str
    shapes: tuple[torch.Size, ...]


class FunctionCalls(TorchFunctionMode):
    """A mode that passes calls with a shared value to `take`, and uses its result; or only records all calls.

    A mode costs more than the calls of a small model. So it is on only between those calls of units where functions
    with shared values were met, `gaps`: the numbers of calls of units before them. None: between all calls.
    """

    def __init__(
        self,
        shared: SharedValues,
        take: Callable[[Any, Any, Any], Any],
        record: list[Call] | None,
        gaps: frozenset[int] | None,
    ) -> None:
        super().__init__()
        self._shared, self._take, self._record, self.gaps = shared, take, record, gaps
        self.count, self.is_paused = 0, False
        self._units, self._depth, self._is_computing = 0, 0, False

    def begin(self) -> None:
        """Begin to see functions, now or later."""
        self._depth = _depth()
        self._switch_on()

    def _switch_on(self) -> None:
        """Switch the mode on if functions are expected before the next unit."""
        # torch takes a mode off the stack while it computes a function, and checkpoints put back the stack they met.
        if self._is_computing or (self.gaps is not None and self._units not in self.gaps):
            return
        depth = _depth()
        if not any(_C._get_function_stack_at(place) is self for place in range(depth)):
            if depth != self._depth:  # within a mode of the model's own, which must end first
                raise FunctionsHiddenError("")
            self.__enter__()

    def suspend(self) -> bool:
        """Let all calls pass until `resume`, for a unit whose parameters the engine handles itself."""
        before, self.is_paused = self.is_paused, True
        if self.gaps != _NONE:
            self.end()
        return before

    def resume(self, before: bool) -> None:
        """Continue after a unit; `before` is what `suspend` returned."""
        self.is_paused = before
        self._units += 1
        if not before:
            self._switch_on()

    def see_all(self) -> None:
        """Be on between all calls from now on, if any function is expected: parts may be computed again."""
        if self.gaps != _NONE:
            self.gaps = None
            self._switch_on()

    def end(self) -> None:
        """Switch the mode off, unless another one has begun since."""
        depth = _depth()
        if depth > 0 and _C._get_function_stack_at(depth - 1) is self:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self._is_computing = self._is_computing, True
        try:
            return self._computed(func, types, args, kwargs or {})
        finally:
            self._is_computing = before

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.is_paused or (name := name_of(func)) in _METADATA:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self._computed(torch.unbind, types, args, kwargs))
        self.count += 1
        if func in OF_ALL and args[0] in self._shared:
            raise _of_all(self._shared.unit(args[0]), func)
        if self._record is not None:
            output = func(*args, **kwargs)
            self._record.append(Call(name, tuple(x.shape for x in tensors_in([args, kwargs, output]))))
            return output
        if self._has_shared(args) or (kwargs and self._has_shared(kwargs.values())):
            return self._take(func, args, kwargs)
        return func(*args, **kwargs)

    def _has_shared(self, arguments: Any) -> bool:
        """Return whether a shared value is among the arguments, or in tuples and lists among them."""
        for argument in arguments:
            if argument in self._shared:
                return True
            if isinstance(argument, tuple | list) and self._has_shared(argument):
                return True
        return False


def _of_all(unit: str, func: Any) -> UnsupportedModuleError:
    name, condition = f"what '{unit}' computes once", "to have no hooks, and no operations on memory"
    return refused(name, condition, name_of(func), f"leave them out, or {REMEDY}", unit=unit)


def name_of(func: Any) -> str:
    """Return the name of a torch function or of a tensor's attribute."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    # torch's trees take 60 calls of Python for the arguments of a function.
    if isinstance(tree, Tensor):
        return [tree]
    kind = tree.__class__
    found = list[Tensor]()
    if kind is not dict and kind not in _SEQUENCES:
        return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    for part in tree.values() if kind is dict else tree:
        if part.__class__ in _NUMBERS:
            continue
        if isinstance(part, Tensor):
            found.append(part)
        else:
            found += tensors_in(part)
    return found


def filled(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """Return nested containers with these tensors in place of their own."""
    if isinstance(tree, Tensor):
        return next(tensors)
    kind = tree.__class__
    if kind in _NUMBERS:
        return tree
    if kind in _SEQUENCES:
        return kind([filled(part, tensors) for part in tree])
    if kind is dict:
        return {key: filled(part, tensors) for key, part in tree.items()}
    leaves, structure = tree_flatten(tree)
    return tree_unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def for_each(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[list[Tensor], Any]:
    """Compute a function for each example, by broadcasting if its inputs broadcast, else by vmap.

    Return the tensors in the result, with the examples in dimension 0; and the result itself.
    """
    found: Any = None

    def call(*tensors: Tensor) -> list[Tensor]:
        nonlocal found
        own_args, own_kwargs = filled((args, kwargs), iter(tensors))
        found = func(*own_args, **own_kwargs)
        # It returns nothing, but vmap needs a result.
        return [own_args[0]] if func is Tensor.__setitem__ else tensors_in(found)

    if func in _BROADCAST:
        dims = max(x.dim() - (dim is not None) for x, dim in inputs)
        produced = call(
            *(x if dim is None else x.view(len(x), *[1] * (dims + 1 - x.dim()), *x.shape[1:]) for x, dim in inputs)
        )
    else:
        with unseen_by_checkpoints():
            produced = batched(call, tuple(dim for _, dim in inputs))(*(tensor for tensor, _ in inputs))
    return ([] if func is Tensor.__setitem__ else produced), found


def for_one_example(func: Any, args: Any, dim: int, rows: int) -> Any:
    """Return the arguments of a call that repeats a tensor, changed to those of one example, of so many rows."""
    if name_of(func) not in ("expand", "broadcast_to", "repeat", "tile"):
        return args
    sizes = list(args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:])
    own = args[0].shape[dim - len(sizes)] if len(sizes) - dim <= args[0].dim() else 1
    sizes[dim] = rows if name_of(func) in ("expand", "broadcast_to") else rows // own
    return (args[0], sizes)


# Functions whose inputs broadcast, so that a further dimension in front keeps examples apart.
_BROADCAST = {
    *(Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add, Tensor.add_, torch.add),
    *(Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__, Tensor.sub, Tensor.sub_, torch.sub),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul, Tensor.mul_, torch.mul),
    *(Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__itruediv__, Tensor.div, Tensor.div_, torch.div),
    *(torch.where, Tensor.where, F.scaled_dot_product_attention),
}
