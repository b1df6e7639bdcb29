"""Norms that clipping can go by: summed without losing what is small, and cheap.

Shape suffixes: B examples, P a parameter's shape.
"""

from typing import cast

import torch
from torch import Tensor

_BLOCK = 1024  # float32 entries summed before they are joined in float64
_CACHED = 1 << 20  # floats of scratch that stay in a core's cache while they are scaled and summed
TINY = 1e-15  # the square of a norm below this loses digits in float32
_HIDDEN = 1e-12  # below this share of its bound, a norm from squares in float32 is measured again


def examples_per_block(floats: int) -> int:
    """How many examples of that many floats stay in a core's cache together, at least one."""
    return max(1, _CACHED // max(1, floats))


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32, or wider if it was."""
    wide_enough = tensor.dtype in (torch.float32, torch.float64)
    return tensor if wide_enough else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def masked(x: Tensor, kept_B: Tensor) -> Tensor:
    """x with zeros for every example that is not kept."""
    return torch.where(kept_B.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


def lost_to_underflow(norm_B: Tensor, bound_B: Tensor) -> list[int]:
    """Which norms are so small a share of their bound, or not finite, that squares in float32 may have hidden them."""
    lost_B = (norm_B < _HIDDEN * bound_B) | ~torch.isfinite(norm_B)
    return cast("list[int]", (lost_B & torch.isfinite(bound_B)).nonzero()[:, 0].tolist())


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x over its largest entry in each row, that entry in float64)."""
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_ones(len(x), 1)
    largest = torch.where(largest > 0, largest, 1.0)
    return x / largest, largest[:, 0].double()


def float64_norms(x: Tensor) -> Tensor:
    """Norm over the last dimension, summed in float64: nothing overflows, underflows or is lost in the sum."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64))


def native_norms(x: Tensor) -> Tensor:
    """Norm over the last dimension, in its own precision."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1))


def position_norms(x: Tensor) -> Tensor:
    """As short_norms, in float64, and right where squares in float32 under- or overflow."""
    norms = native_norms(x).double()
    lost = (norms < TINY) | ~torch.isfinite(norms)
    if bool(lost.any()):
        norms[lost] = float64_norms(x[lost])
    return norms


def sum_over(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension, in the same order for each example whatever the batch.

    torch adds up a tensor in the order in which it lies in memory. Where positions come before examples, an example's
    column decides how its positions are grouped, and so does the size of the batch.
    """
    return x.contiguous().sum(dim)


def norms_of(grads_BP: Tensor, inverse_scales: Tensor | None = None) -> Tensor:
    """Norm of each example's gradient, shape (B,), float64.

    Short float32 sums, joined in float64: one long float32 sum understates the norm of a gradient with many small
    entries, by 2 % at 1e8 parameters, and a float64 copy of the gradients costs half of their computation.
    """
    if inverse_scales is not None:
        grads_BP = grads_BP * inverse_scales
    grads_BP = grads_BP.reshape(len(grads_BP), grads_BP.shape[1:].numel())
    norm_B = _blockwise_norms(grads_BP)
    # Squares of entries below 1e-19 vanish in float32: rows of such once more.
    if len(norm_B) > 0 and float(norm_B.min()) < TINY:
        tiny = (norm_B < TINY).nonzero()[:, 0]
        norm_B[tiny] = float64_norms(grads_BP[tiny])
    return norm_B


def _blockwise_norms(grads_BP: Tensor) -> Tensor:
    whole = grads_BP.shape[1] // _BLOCK
    if whole == 0:
        return native_norms(grads_BP).double()
    blocks = grads_BP[:, : whole * _BLOCK].reshape(len(grads_BP), whole, _BLOCK)
    parts = [native_norms(blocks), native_norms(grads_BP[:, whole * _BLOCK :])[:, None]]
    return float64_norms(torch.cat(parts, dim=1))
