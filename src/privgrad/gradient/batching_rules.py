"""Operations that torch's vmap computes wrongly or not at all, written so that each example keeps to itself.

Tests compare each with single examples.
"""

# ruff: noqa: A002, torch's names

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Compute F.embedding; torch's rule omits the gradient of the padding row for the first example only."""
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
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Compute torch.embedding by `_embedding`; here a negative padding_idx means no padding."""
    padding = padding_idx if padding_idx >= 0 else None
    return _embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """Compute torch.index_fill; torch's rule gives one example's value to all examples if they share `input`."""
    if not isinstance(value, Tensor) or input.dim() == 0:
        return torch.index_fill(input, dim, index, float(value) if isinstance(value, Tensor) else value)
    chosen = torch.zeros(input.shape[dim], dtype=torch.bool, device=input.device).index_fill(0, index, True)
    places = [1] * input.dim()
    places[dim] = -1
    return torch.where(chosen.view(places), value.to(input.dtype), input)


def _index_fill_(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return input.copy_(_index_fill(input, dim, index, value))


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Compute torch.index_select; torch's rule drops the dimension if there is only one index."""
    return torch.index_select(input, dim, index.reshape(-1))


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """Compute torch.select_scatter; torch's rule multiplies the gradient of `src` by the size of the dimension."""
    start = index % input.shape[dim]
    return torch.slice_scatter(input, src.unsqueeze(dim), dim, start, start + 1)


def _roll(input: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """Compute torch.roll; torch's rule moves values between examples if each example is a number."""
    return input.clone() if input.dim() == 0 else torch.roll(input, shifts, dims)  # pyright: ignore[reportArgumentType]


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Compute F.prelu; torch's rule gives the second derivative a wrong shape if all examples share `input`."""
    slopes = weight.reshape(-1, *[1] * (input.dim() - 2)) if input.dim() > 1 else weight.reshape(-1)[0]
    return torch.where(input > 0, input, slopes * input)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.bilinear by a matrix product; torch's rule is right, but its backward pass is twenty times slower."""
    outputs, inputs, others = weight.shape
    mapped = input1 @ weight.permute(1, 0, 2).reshape(inputs, outputs * others)
    output = (mapped.view(*mapped.shape[:-1], outputs, others) * input2.unsqueeze(-2)).sum(-1)
    return output if bias is None else output + bias


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
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
TORCH_WEIGHT_NORM: Any = vars(torch)["_weight_norm"]
MENDED: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    **dict.fromkeys((torch.embedding, _ATEN.embedding, _ATEN.embedding.default), _torch_embedding),
    **dict.fromkeys((torch.index_fill, Tensor.index_fill), _index_fill),
    Tensor.index_fill_: _index_fill_,
    **dict.fromkeys((torch.index_select, Tensor.index_select), _index_select),
    **dict.fromkeys((torch.select_scatter, Tensor.select_scatter), _select_scatter),
    **dict.fromkeys((torch.roll, Tensor.roll), _roll),
    torch.bilinear: _bilinear,
    **dict.fromkeys((torch.prelu, Tensor.prelu), _prelu),
    TORCH_WEIGHT_NORM: weight_norm,
}
if hasattr(F, "linear_cross_entropy"):
    MENDED[F.linear_cross_entropy] = _linear_cross_entropy
# Under vmap, these functions reach the memory or the gradients of several examples. `engine.shared_values` refuses
# them for values that all examples share, too: torch's batched backward pass is wrong, and a hook would see a sum.
_NAMES = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_", "set_")
_PACKETS: list[Any] = [getattr(_ATEN, name) for name in _NAMES if hasattr(_ATEN, name)]
OF_ALL: set[Any] = {
    Tensor.register_hook,
    *(getattr(owner, name) for owner in (torch, Tensor) for name in _NAMES if hasattr(owner, name)),
    *_PACKETS,
    *(getattr(packet, name) for packet in _PACKETS for name in packet.overloads()),
}
