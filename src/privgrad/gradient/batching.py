"""Run vmap over examples, and replace the operations whose batching rule or second derivative in torch is wrong.

`engines.vmap`, `engines.vmapped_unit` and `factors.displacement` call `batched` to map over examples. `vmapped_unit`
also uses `Mended` by itself. The privacy guarantee rests on this file, except `without_vmap_warnings` and
`differentiable`: see `Mended`.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from privgrad.errors import PrivacyError, expected


class Mended(TorchFunctionMode):
    """A mode in which the operations of `_MENDED` keep examples apart under vmap; torch calls it for each operation.

    Args:
        several: whether several examples are computed at once. Operations on memory and hooks are then refused.
    Privacy:
        The guarantee rests on this: a wrong batching rule gives one example the gradient, or the value, of another
        example. tests/contract/test_batching.py compares the rules with a loop over examples. torch gives each example
        another draw from a generator of the model's own, whose numbers are known: such draws are refused.
    """

    def __init__(self, *, several: bool) -> None:
        super().__init__()
        self._several = several

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._several and func in OF_ALL:
            raise RuntimeError(f"{func.__name__} reaches all examples under vmap")
        refuse_own_generators(args, kwargs or {})
        mended = _MENDED.get(func)
        return (func if mended is None else mended)(*args, **(kwargs or {}))


def batched(function: Callable[..., Any], in_dims: Any = 0, *, module: nn.Module | None = None) -> Callable[..., Any]:
    """Return `vmap(function, in_dims)` with separate random draws for each example, and with correct batching rules.

    Args:
        function: takes the inputs of one example.
        in_dims: the argument of vmap.
        module: the module that `function` calls, if there is one.
    Raises:
        RuntimeError: an operation has no batching rule, reads memory by its layout, or adds a hook; or the module is
            TorchScript: a mode cannot replace its operations.
    """
    if module is not None and _is_scripted(module):
        raise RuntimeError("TorchScript uses batching rules that cannot be replaced")

    def mended(*inputs: Any) -> Any:
        with Mended(several=True):
            return function(*inputs)

    def call(*inputs: Any) -> Any:
        with without_vmap_warnings():
            return vmap(mended, in_dims=in_dims, randomness="different")(*inputs)

    return call


def refuse_own_generators(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PrivacyError if a torch function draws from a generator other than torch's global ones.

    Only the global ones have secret states. `Mended` and `randomness` call it for each function.

    Args:
        args: the arguments of the function.
        kwargs: its arguments by name.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator) and value not in _global_generators():
            raise known_draws("a torch.Generator")


def _global_generators() -> tuple[torch.Generator, ...]:
    """Return torch's global generators, on the CPU and on CUDA devices."""
    return torch.default_generator, *torch.cuda.default_generators


def known_draws(got: str) -> PrivacyError:
    """Return the error for a forward pass whose random numbers can be known. `randomness` calls it too."""
    remedy = (
        "leave torch.manual_seed out of the forward pass and of loss_fn, and generators and the seeds of numpy and "
        "Python too; draw what all examples share once, in __init__, and keep it as a buffer"
    )
    return expected("loss_fn", "random draws", "to follow torch's global random stream", got, remedy)


@contextmanager
def differentiable(*, twice: bool) -> Generator[None]:
    """Compute operations in a way that can be differentiated twice, if `twice` is set.

    Fused attention has no second derivative. That of torch._weight_norm is wrong: it takes the norm of v as constant.
    `engines.passes`, `engines.vmap` and `probes` call it.
    """
    if not twice:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), _TwiceDifferentiable():
        yield


class _TwiceDifferentiable(TorchFunctionMode):
    """A mode that computes torch._weight_norm by `_weight_norm`; torch calls it for each operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_weight_norm if func is _TORCH_WEIGHT_NORM else func)(*args, **(kwargs or {}))


@contextmanager
def unseen_by_checkpoints() -> Generator[None]:
    """Keep saved tensors out of a checkpoint: it cannot compute operations under vmap again.

    The files `function_calls`, `shared_values` and `vmapped_unit` of `engines` call it.
    """
    with saved_tensors_hooks(Tensor.detach, lambda x: x):
        yield


def _is_scripted(module: nn.Module) -> bool:
    """Return whether a module, a submodule or one of their attributes is TorchScript."""
    kinds = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
    return any(
        isinstance(part, kinds) or any(isinstance(value, kinds) for value in vars(part).values())
        for part in module.modules()
    )


@contextmanager
def without_vmap_warnings() -> Generator[None]:
    """Silence torch's warning about operations that vmap computes in a loop: they are correct, but slow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


def _embedding(
    input: Tensor,  # noqa: A002, torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Compute F.embedding; torch's rule omits the gradient of the padding row for the first example only.

    The gradient is dense. For a sparse gradient, torch's rule fails in the backward pass.
    """
    del sparse
    size = weight.shape[0]
    # Here -1 is the last row, as in F.embedding. In torch.embedding it means no padding.
    if padding_idx is not None and not -size <= padding_idx < size:
        raise RuntimeError("padding_idx must be within the rows of weight")
    rows = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % size)[..., None], rows.detach(), rows)


def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Compute torch.embedding by `_embedding`; here a negative padding_idx means no padding."""
    padding = padding_idx if padding_idx >= 0 else None
    return _embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _index_fill(
    input: Tensor,  # noqa: A002, torch's name
    dim: int,
    index: Tensor,
    value: Any,
) -> Tensor:
    """Compute torch.index_fill; torch's rule gives one example's value to all examples if they share `input`."""
    if not isinstance(value, Tensor) or input.dim() == 0:
        return torch.index_fill(input, dim, index, float(value) if isinstance(value, Tensor) else value)
    chosen = torch.zeros(input.shape[dim], dtype=torch.bool, device=input.device).index_fill(0, index, True)
    places = [1] * input.dim()
    places[dim] = -1
    return torch.where(chosen.view(places), value.to(input.dtype), input)


def _index_fill_(
    input: Tensor,  # noqa: A002, torch's name
    dim: int,
    index: Tensor,
    value: Any,
) -> Tensor:
    """Compute torch.Tensor.index_fill_ by `_index_fill`."""
    return input.copy_(_index_fill(input, dim, index, value))


def _index_select(
    input: Tensor,  # noqa: A002, torch's name
    dim: int,
    index: Tensor,
) -> Tensor:
    """Compute torch.index_select; torch's rule drops the dimension if there is only one index."""
    return torch.index_select(input, dim, index.reshape(-1))


def _select_scatter(
    input: Tensor,  # noqa: A002, torch's name
    src: Tensor,
    dim: int,
    index: int,
) -> Tensor:
    """Compute torch.select_scatter; torch's rule multiplies the gradient of `src` by the size of the dimension."""
    start = index % input.shape[dim]
    return torch.slice_scatter(input, src.unsqueeze(dim), dim, start, start + 1)


def _roll(
    input: Tensor,  # noqa: A002, torch's name
    shifts: int | Sequence[int],
    dims: int | Sequence[int] = (),
) -> Tensor:
    """Compute torch.roll; torch's rule moves values between examples if each example is a number."""
    return input.clone() if input.dim() == 0 else torch.roll(input, shifts, dims)  # pyright: ignore[reportArgumentType]


def _prelu(
    input: Tensor,  # noqa: A002, torch's name
    weight: Tensor,
) -> Tensor:
    """Compute F.prelu; torch's rule gives the second derivative a wrong shape if all examples share `input`."""
    slopes = weight.reshape(-1, *[1] * (input.dim() - 2)) if input.dim() > 1 else weight.reshape(-1)[0]
    return torch.where(input > 0, input, slopes * input)


def _bilinear(
    input1: Tensor,  # torch's name
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute F.bilinear by a matrix product; torch's rule is right, but its backward pass is twenty times slower."""
    outputs, inputs, others = weight.shape
    mapped = input1 @ weight.permute(1, 0, 2).reshape(inputs, outputs * others)
    output = (mapped.view(*mapped.shape[:-1], outputs, others) * input2.unsqueeze(-2)).sum(-1)
    return output if bias is None else output + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Compute torch._weight_norm by its formula; torch has no rule, and its second derivative is wrong."""
    if not 0 <= dim < v.dim():  # -1: one norm for all of v
        return v * (g / cast(Tensor, torch.linalg.vector_norm(v)))
    rows, shape = v.movedim(dim, 0).reshape(v.shape[dim], -1), [1] * v.dim()
    shape[dim] = -1
    return v * (g / cast(Tensor, torch.linalg.vector_norm(rows, dim=1)).view(shape))


def _linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    """Compute F.linear_cross_entropy in one piece; in chunks, it checks for gradients while vmap hides them."""
    del options
    return F.linear_cross_entropy(*args, **kwargs)


_ATEN: Any = torch.ops.aten
_TORCH_WEIGHT_NORM: Any = vars(torch)["_weight_norm"]
_MENDED: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    _ATEN.embedding: _torch_embedding,
    _ATEN.embedding.default: _torch_embedding,
    torch.index_fill: _index_fill,
    Tensor.index_fill: _index_fill,
    Tensor.index_fill_: _index_fill_,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
    torch.roll: _roll,
    Tensor.roll: _roll,
    torch.bilinear: _bilinear,
    torch.prelu: _prelu,
    Tensor.prelu: _prelu,
    _TORCH_WEIGHT_NORM: _weight_norm,
}
if hasattr(F, "linear_cross_entropy"):
    _MENDED[F.linear_cross_entropy] = _linear_cross_entropy
# Under vmap, these functions reach the memory or the gradients of several examples. `engines.function_calls` refuses
# them for values that all examples share, too: torch's batched backward pass is wrong, and a hook would see a sum.
_NAMES = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_", "set_")
_PACKETS: list[Any] = [getattr(_ATEN, name) for name in _NAMES if hasattr(_ATEN, name)]
OF_ALL: set[Any] = {
    Tensor.register_hook,
    *(getattr(owner, name) for owner in (torch, Tensor) for name in _NAMES if hasattr(owner, name)),
    *_PACKETS,
    *(getattr(packet, name) for packet in _PACKETS for name in packet.overloads()),
}
