"""L2 norms for clipping: fast, and accurate also for many or tiny entries; and sums, masks and blocks of tensors.

The factors of this folder call these functions. The rules in `privgrad.gradient.layers` also call `at_least_float32`,
`examples_per_block` and `sum_over`. `gradient.clipping` also calls `examples_per_block`. `engines.passes` and
`gradient.moments` also call `at_least_float32`.

The privacy guarantee rests on the norms: a norm that is too small lets an example add more than the bound. It also
rests on the other functions, except `examples_per_block`: norms and sums are computed with them.

Shape suffixes: B examples, P a parameter's shape.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from privgrad.threads import AT_ONCE, is_on_processor

_BLOCK = 1024  # float32 entries per block; the norms of blocks are joined in float64
_CACHED = 1 << 20  # floats of scratch memory that stay in a core's cache while they are scaled and summed
CANCELED = 1e-3  # a squared norm from inner products below this share of its terms is computed again, from dense g_i
TINY = 1e-15  # the square of a norm below this loses digits in float32
_LOST = 1e-12  # a norm from float32 squares that is a smaller share of its bound is computed again


def examples_per_block(floats: int, like: Tensor | None = None) -> int:
    """Return how many examples of `floats` numbers to write out together, at least one.

    On the CPU they stay in a core's cache.

    Args:
        floats: per example.
        like: a tensor on the same device; None: the CPU.
    """
    most = _CACHED if like is None or is_on_processor(like) else AT_ONCE
    return max(1, most // max(1, floats))


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    wide_enough = tensor.dtype in (torch.float32, torch.float64)
    return tensor if wide_enough else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def masked(x: Tensor, kept_B: Tensor) -> Tensor:
    """Return x with zeros for every example that is not kept."""
    return torch.where(kept_B.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


def lost_to_underflow(norm_B: Tensor, bound_B: Tensor) -> list[int]:
    """Return the indices of norms that may be wrong because squares underflow or overflow in float32.

    Such a norm is a tiny share of its bound, or is not finite although its bound is.
    """
    lost_B = (norm_B < _LOST * bound_B) | ~torch.isfinite(norm_B)
    return cast("list[int]", (lost_B & torch.isfinite(bound_B)).nonzero()[:, 0].tolist())


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x with each row divided by its largest absolute entry, and these entries in float64."""
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_ones(len(x), 1)
    largest = torch.where(largest > 0, largest, 1.0)
    return x / largest, largest[:, 0].double()


def float64_norms(x: Tensor) -> Tensor:
    """Return the norm over the last dimension, summed in float64.

    Nothing overflows, underflows or is lost in the sum.
    """
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64))


def native_norms(x: Tensor) -> Tensor:
    """Return the norm over the last dimension, in the precision of x."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1))


def position_norms(x: Tensor) -> Tensor:
    """Return the norm over the last dimension in float64, correct also where float32 squares under- or overflow.

    On the CPU, only norms that are tiny or not finite are summed in float64; the others are `native_norms`. The number
    of examples, the first dimension, must not decide: the bounds of all others would be rounded differently.
    """
    if not is_on_processor(x):
        parts = cast("tuple[Tensor, ...]", x.split(examples_per_block(x[:1].numel(), x)))
        return torch.cat([float64_norms(part) for part in parts])
    norms = native_norms(x).double()
    lost = (norms < TINY) | ~torch.isfinite(norms)
    if bool(lost.any()):
        norms[lost] = float64_norms(x[lost])
    return norms


def sum_over(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension, in an order that does not depend on the rest of the batch.

    torch adds up a tensor in its memory order. If positions come before examples in memory, the grouping of an
    example's positions depends on its column and on the batch size. A contiguous copy prevents this.
    """
    return x.contiguous().sum(dim)


def norms_of(grads_BP: Tensor, inverse_scales: Tensor | None = None) -> Tensor:
    """Return the norm of each example's gradient, shape (B,), float64.

    Short sums are computed in float32 and joined in float64. One long float32 sum understates the norm of a gradient
    with many small entries, by 2 % at 1e8 parameters. A float64 copy of the gradients would cost half as much time as
    computing them.

    Args:
        grads_BP: the gradients, shape (B, *P).
        inverse_scales: multiplied with each gradient first, shape P; None is 1.
    """
    if inverse_scales is not None:
        grads_BP = grads_BP * inverse_scales
    grads_BP = grads_BP.reshape(len(grads_BP), grads_BP.shape[1:].numel())
    if not is_on_processor(grads_BP) and grads_BP.shape[1] < _BLOCK:  # this takes less time than to look at the norms
        return float64_norms(grads_BP)
    norm_B = _blockwise_norms(grads_BP)
    # Squares of entries below 1e-19 vanish in float32: compute the norms of such rows again.
    if len(norm_B) > 0 and float(norm_B.min()) < TINY:
        tiny = (norm_B < TINY).nonzero()[:, 0]
        norm_B[tiny] = float64_norms(grads_BP[tiny])
    return norm_B


def norms_of_parts(parts: Iterable[Tensor], inverse_scales: Tensor | None = None) -> Tensor:
    """Return the norms of gradients that come in parts of the examples, none larger than the first.

    They are those of `norms_of`. The products with the scales are written to the same memory, part after part, since
    new memory takes as long to allocate as to fill. The gradients may belong to others and are never written to.
    """
    if inverse_scales is None:
        return torch.cat([norms_of(grads_BP) for grads_BP in parts])
    found, scratch = list[Tensor](), None
    for grads_BP in parts:
        # Do not hold the product of a huge gradient while the next is computed. Elsewhere, new memory costs nothing.
        if grads_BP.numel() > _CACHED or not is_on_processor(grads_BP):
            found.append(norms_of(grads_BP, inverse_scales))
            continue
        if scratch is None:
            dtype = torch.result_type(grads_BP, inverse_scales)
            scratch = torch.empty(grads_BP.shape, dtype=dtype, device=grads_BP.device)
        with torch.no_grad():  # torch refuses to write into given memory where it records a graph
            scaled_BP = torch.mul(grads_BP, inverse_scales, out=scratch[: len(grads_BP)])
        found.append(norms_of(scaled_BP))
    return torch.cat(found)


def canceled(square_B: Tensor, terms_B: Tensor) -> Tensor:
    """Return whether each squared norm is so small a share of its terms that rounding may hide it, shape (B,)."""
    return square_B < CANCELED * terms_B.square()


def largest_scale(inverse_scales: Tensor | None) -> float:
    """Return the largest of the inverse scales, or 1 if there are none."""
    return 1.0 if inverse_scales is None or not inverse_scales.numel() else float(inverse_scales.max())


def merged(x: Tensor, parts: int) -> Tensor:
    """Join the positions of every `parts` neighboring rows: (B parts, T, D) -> (B, parts T, D)."""
    return x.reshape(len(x) // parts, parts * x.shape[1], x.shape[2])


def flattened(grads_BP: Tensor) -> Tensor:
    """Return one row per example, shape (B, number of entries of P), also for parameters without dimensions."""
    return grads_BP.reshape(len(grads_BP), grads_BP.shape[1:].numel())


def added_up(tensors: list[Tensor]) -> Tensor:
    """Return the sum of the tensors."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _blockwise_norms(grads_BP: Tensor) -> Tensor:
    """Return the norm of each row, float64: blocks are summed in the rows' own precision and joined in float64."""
    count = grads_BP.shape[1] // _BLOCK
    if count == 0:
        return native_norms(grads_BP).double()
    blocks = grads_BP[:, : count * _BLOCK].reshape(len(grads_BP), count, _BLOCK)
    parts = [native_norms(blocks), native_norms(grads_BP[:, count * _BLOCK :])[:, None]]
    return float64_norms(torch.cat(parts, dim=1))
