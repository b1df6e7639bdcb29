"""A forward of nn.MultiheadAttention that computes the same and exposes the outputs of its projections.

The module passes its weights to one functional, so no hook sees the projections' outputs. Here each output goes through
a tap. Parameters enter detached: their gradients come from the factors of the taps alone.

Shape suffixes: B examples, H heads, T queries, S keys, E embedding, D = E / H, O outputs of a projection.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.engine.factors.displacement import Displacement, Displacements, displacement_of
from privgrad.engine.factors.outer import RowRanges
from privgrad.engine.layers.base import (
    Tap,
    applied,
    is_trained,
    of_linear_maps,
    register_forward,
    require_unwritten,
    tapped,
    values_of,
)
from privgrad.errors import UnsupportedModuleError, expected
from privgrad.gradient.factor import Dense, Factor
from privgrad.gradient.functional import version_of

_NAME = "MultiheadAttention"


@register_forward(nn.MultiheadAttention)
def attention_forward(
    module: nn.MultiheadAttention,
    tap: Tap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    displacements: Displacements | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute module(query, key, value, ...) with a tap at the output of each projection.

    NOT private: each example's gradients depend on that example, the weights and its own dropout draws alone.
    """
    if query.is_nested or query.dim() != 3:
        got = "a nested tensor" if query.is_nested else f"a tensor of shape {tuple(query.shape)}"
        remedy = "give a batch of padded sequences, of size 1 for a single one"
        raise expected(_NAME, "query", "to be a tensor of 3 dimensions", got, remedy, UnsupportedModuleError)
    # torch refuses is_causal without a mask, and masks of other shapes, when the loss is tried with its own forward.
    q_BTE, k_BSE, v_BSE = _projected(module, tap, displacements, query, key, value)
    shape = (len(q_BTE), module.num_heads, q_BTE.shape[1], k_BSE.shape[1])
    mask = _merged(attn_mask, key_padding_mask, shape, query.dtype)
    # In this case torch, too, uses is_causal and not the mask.
    hint = is_causal and key_padding_mask is None and not need_weights
    if module.bias_k is not None and module.bias_v is not None:
        k_BSE = torch.cat([k_BSE, _repeated(tap, displacements, module.bias_k, len(k_BSE))], 1)
        v_BSE = torch.cat([v_BSE, _repeated(tap, displacements, module.bias_v, len(v_BSE))], 1)
    if module.add_zero_attn:
        k_BSE, v_BSE = F.pad(k_BSE, (0, 0, 0, 1)), F.pad(v_BSE, (0, 0, 0, 1))
    if mask is not None:  # every query may attend to the appended keys
        mask = F.pad(mask, (0, k_BSE.shape[1] - mask.shape[3]))
    sizes = cast(int, module.num_heads), cast(int, module.head_dim)
    q_BHTD, k_BHSD, v_BHSD = (x.reshape(*x.shape[:2], *sizes).transpose(1, 2) for x in (q_BTE, k_BSE, v_BSE))
    dropout, weights = module.dropout if module.training else 0.0, None
    if need_weights:
        scores_BHTS = (q_BHTD * q_BHTD.shape[3] ** -0.5) @ k_BHSD.transpose(2, 3)
        weights = F.dropout(torch.softmax(scores_BHTS if mask is None else scores_BHTS + mask, -1), dropout)
        mixed_BHTD = weights @ v_BHSD
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        used = None if hint else mask
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, used, dropout, is_causal=hint)
    mixed, out = mixed_BHTD.transpose(1, 2).flatten(2), module.out_proj
    output = _linear(tap, displacements, mixed, out.weight, out.bias, {})
    return output if module.batch_first else output.transpose(0, 1), weights


def _projected(module: nn.MultiheadAttention, tap: Tap, moves: Displacements | None, *roles: Tensor) -> list[Tensor]:
    """Return queries, keys and values, each of shape (B, length, E); roles of one tensor share a product and a tap."""
    query, key, value = roles
    weight, bias = cast("Tensor | None", module.in_proj_weight), cast("Tensor | None", module.in_proj_bias)
    packed = [own for own in (weight, bias) if own is not None]
    groups = [(0, 1), (1, 2), (2, 3)]
    if weight is not None and key is value:
        groups = [(0, 3)] if query is key else [(0, 1), (1, 3)]
    found: list[Tensor] = []
    for first, end in groups:
        part = slice(first * module.embed_dim, end * module.embed_dim)
        rows = {} if end - first == 3 else dict.fromkeys(packed, part)
        inputs = roles[first] if module.batch_first else roles[first].transpose(0, 1)
        own = getattr(module, f"{'qkv'[first]}_proj_weight") if weight is None else weight
        found += _linear(tap, moves, inputs, own, bias, rows).chunk(end - first, 2)
    return found


def _linear(
    tap: Tap, moves: Displacements | None, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Mapping[Tensor, slice]
) -> Tensor:
    """Return x weight^T + bias, passed through the tap; of parameters in `rows`, with these rows only."""
    version = version_of(x)

    def values(own: Tensor) -> Tensor:
        return own.detach()[rows[own]] if own in rows else own.detach()

    def factors(grad_BTO: Tensor) -> dict[Tensor, Factor]:
        require_unwritten(_NAME, x, version)
        found = of_linear_maps([(weight, bias, x.detach())], grad_BTO)
        return {own: RowRanges([(rows[own].start, f)], own.shape) if own in rows else f for own, f in found.items()}

    output = F.linear(x, values(weight), None if bias is None else values(bias))
    if (of_weight := displacement_of(weight, moves)) is not None:
        if weight in rows:
            of_weight = Displacement(Dense(of_weight.dense()[:, rows[weight]]), torch.ones_like(of_weight.share))
        output = output + applied(of_weight, x).to(output.dtype)
    if bias is not None and (of_bias := displacement_of(bias, moves)) is not None:
        moved_BO = of_bias.for_rows(x)[:, rows.get(bias, slice(None))]
        output = output + moved_BO[:, None].to(output.dtype)
    return tapped(tap, output, factors)


def _repeated(tap: Tap, displacements: Displacements | None, bias: Tensor, size: int) -> Tensor:
    """Return a key or value that is a parameter, repeated for every example and tapped: shape (B, 1, E)."""

    def factors(grad_B1E: Tensor) -> dict[Tensor, Factor]:
        return {bias: Dense(grad_B1E.unsqueeze(1))} if is_trained(bias) else {}

    own = values_of(bias, displacements, size)
    return tapped(tap, own.expand(size, 1, -1) if own.dim() == 3 else own[:, 0], factors)


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """Return both masks as one tensor that is added to the scores, of a shape that broadcasts to (B, H, T, S)."""
    size, heads, length, keys = shape
    of_attention: Any = {(length, keys): (1, 1, length, keys), (size * heads, length, keys): shape}
    of_padding: Any = {(size, keys): (size, 1, 1, keys)}
    merged: Tensor | None = None
    for mask, shapes in ((attn_mask, of_attention), (key_padding_mask, of_padding)):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
        mask = mask.reshape(shapes[tuple(mask.shape)])
        merged = mask if merged is None else merged + mask
    return merged
