"""See each call of a torch function in a forward pass, and compute one for each example by vmap.

`capture` opens `FunctionCalls` around a forward pass, and calls the functions below. `layer_call` opens `Additive`. The
privacy guarantee of the fast engine rests on `for_each`: in it, no example's values may reach another example. It also
rests on the refusals of both modes.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.batching import OF_ALL, batched, unseen_by_checkpoints
from privgrad.gradient.engines.refusals import REMEDY, refused
from privgrad.gradient.engines.shared_values import SharedValues

# Functions that read no values, so that shared values need no copies there. Their calls are not recorded.
_METADATA = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "names",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_meta",
        "is_mps",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "element_size",
        "get_device",
        "data_ptr",
        "dim_order",
        "__len__",
        "__hash__",
        "__repr__",
        "__format__",
        "_version",
        "_is_view",
        "untyped_storage",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
    )
)


class Additive(TorchFunctionMode):
    """A mode that refuses hooks and operations on memory while a unit's weights are computed from its parameters.

    The rule of the unit adds up the gradients of all examples at these weights. A hook would see this sum, and need not
    be additive.

    Args:
        path: the unit's path.
    Raises:
        UnitRefusedError: at such a call. The unit is then taken whole, and computed for each example.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OF_ALL:
            raise _of_all(self._path, func)
        return func(*args, **(kwargs or {}))


class Called(NamedTuple):
    """A call of a function: its name, and the shapes of the tensors in its arguments and in its result."""

    name: str
    shapes: tuple[torch.Size, ...]


class FunctionCalls(TorchFunctionMode):
    """A mode that passes calls with a shared value among their arguments to `take`, and uses its result.

    Args:
        shared: the shared values of the pass.
        take: function, args, kwargs -> the result of the call.
        record: a list for all calls, which are not passed to `take` then; None: no record.
    Attributes:
        count: the number of calls so far, of any function but those of `_METADATA`.
    """

    def __init__(self, shared: SharedValues, take: Callable[[Any, Any, Any], Any], record: list[Called] | None) -> None:
        super().__init__()
        self._shared, self._take, self._record = shared, take, record
        self.count, self._is_paused = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `take` if there is a shared value among the arguments, else the function itself."""
        kwargs = kwargs or {}
        if self._is_paused or (name := name_of(func)) in _METADATA:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args, kwargs))
        self.count += 1
        if func in OF_ALL and args[0] in self._shared:
            raise _of_all(self._shared.unit(args[0]), func)
        if self._record is not None:
            output = func(*args, **kwargs)
            self._record.append(Called(name, shapes_of([args, kwargs, output])))
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

    @contextmanager
    def paused(self) -> Generator[None]:
        """Let all calls pass, for a unit whose parameters the engine handles itself."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before


def _of_all(unit: str, func: Any) -> UnsupportedModuleError:
    """Return the error for a hook or an operation on memory, of a value that all examples share."""
    name, condition = f"what '{unit}' computes once", "to have no hooks, and no operations on memory"
    return refused(name, condition, name_of(func), f"leave them out, or {REMEDY}", unit=unit)


def name_of(func: Any) -> str:
    """Return the name of a torch function or of a tensor's attribute."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def shapes_of(tree: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors in nested containers, in order."""
    return tuple(tensor.shape for tensor in tensors_in(tree))


def for_each(
    func: Any, args: Any, kwargs: Any, inputs: Sequence[tuple[Tensor, int | None]]
) -> tuple[list[Tensor], Any]:
    """Compute a function for each example, by broadcasting if its inputs broadcast, else by vmap.

    Args:
        func: the function.
        args: its arguments; `inputs` replaces the tensors among them, in order.
        kwargs: the same.
        inputs: pairs of a tensor and the dimension of its examples, 0; None: the same for each example.
    Returns:
        The tensors in the result, each with the examples in dimension 0; and a function that puts tensors in their
        place in the result.
    """
    leaves, structure = tree_flatten((args, kwargs))
    found: Any = None

    def call(*tensors: Tensor) -> list[Tensor]:
        nonlocal found
        remaining = iter(tensors)
        filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        own_args, own_kwargs = tree_unflatten(filled, structure)
        found = tree_flatten(func(*own_args, **own_kwargs))
        if func is Tensor.__setitem__:  # it returns nothing, but vmap needs a result
            return [own_args[0]]
        return [leaf for leaf in found[0] if isinstance(leaf, Tensor)]

    if func in _BROADCAST:
        dims = max(x.dim() - (dim is not None) for x, dim in inputs)
        produced = call(
            *(x if dim is None else x.view(len(x), *[1] * (dims + 1 - x.dim()), *x.shape[1:]) for x, dim in inputs)
        )
    else:
        with unseen_by_checkpoints():
            produced = batched(call, tuple(dim for _, dim in inputs))(*(tensor for tensor, _ in inputs))

    def rebuilt(tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in found[0]], found[1])

    return ([] if func is Tensor.__setitem__ else produced), rebuilt


def for_one_example(func: Any, args: Any, dim: int, rows: int) -> Any:
    """Return the arguments of a call that repeats a tensor for the examples, changed to one example's.

    Args:
        func: the function.
        args: its positional arguments.
        dim: the dimension of the result that holds the examples.
        rows: the number of rows that an example has there.
    """
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
