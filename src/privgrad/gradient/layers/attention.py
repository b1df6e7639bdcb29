"""A forward of nn.MultiheadAttention that computes the same and exposes the outputs of its projections.

The module passes its weights to one functional, so no hook sees the projections' outputs. Here each output goes through
a tap. Parameters enter detached: their gradients come from the taps' contributions alone. `adapters` makes factors of
the contributions.

Shape suffixes: B examples, H heads, T queries, S keys, E embedding, D = E / H, O outputs of a projection.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.errors import UnsupportedModuleError, expected

Contribution = tuple[str, str, Tensor | None, Tensor] | tuple[str, str, Tensor | None, Tensor, slice]
Contributions = Callable[[Tensor], list[Contribution]]
Tap = Callable[[Tensor, Contributions], Tensor]

_Rows = tuple[Tensor | None, str, slice | None]  # rows of a parameter, its name, and which rows if not all

_NAME = "MultiheadAttention"


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
) -> tuple[Tensor, Tensor | None]:
    """Compute module(query, key, value, ...) with a tap at the output of each projection.

    Args:
        module: the attention layer, with any of its options.
        tap: (tensor, contributions) -> the tensor to use from then on. contributions(gradient of the tensor) lists
            (parameter, "outer", a, b), a (B, T, in), b (B, T, out): the gradient of example i is sum_t b_it a_it^T;
            (parameter, "bias", None, b): it is sum_t b_it; (parameter, "dense", None, g): it is g_i. A fifth entry, a
            slice, gives the rows of the parameter that the entry is for; other taps contribute the other rows.
        query: shape (B, length, features), or (length, B, features) without batch_first.
        key: the same. A tensor that is used in several roles has one projection and one tap.
        value: the same.
        key_padding_mask: as in torch.
        need_weights: as in torch.
        attn_mask: as in torch.
        average_attn_weights: as in torch.
        is_causal: as in torch.
    Returns:
        The output, and the attention weights or None, as torch returns them.
    Raises:
        UnsupportedModuleError: the inputs are nested, or have no batch dimension.
        PrivacyError: a mask has a wrong shape or dtype, or is missing.
    Privacy:
        NOT private. Each example's contributions depend on that example, the weights and its own dropout draws alone.
    """
    if query.is_nested or query.dim() != 3:
        got = "a nested tensor" if query.is_nested else f"a tensor of shape {tuple(query.shape)}"
        remedy = "give a batch of padded sequences, of size 1 for a single one"
        raise expected(_NAME, "query", "to be a tensor of 3 dimensions", got, remedy, UnsupportedModuleError)
    if is_causal and attn_mask is None:
        remedy = "give the causal mask, since is_causal only describes attn_mask"
        raise expected(_NAME, "attn_mask", "to be a tensor where is_causal is set", None, remedy)
    q_BTE, k_BSE, v_BSE = _projected(module, tap, query, key, value)
    size, length, width = q_BTE.shape
    heads = cast(int, module.num_heads)
    head_dim = width // heads
    mask = _merged(attn_mask, key_padding_mask, (size, heads, length, k_BSE.shape[1]), query.dtype)
    # In this case torch, too, uses is_causal and not the mask.
    hint = is_causal and key_padding_mask is None and not need_weights
    if module.bias_k is not None and module.bias_v is not None:
        k_BSE = torch.cat([k_BSE, _repeated(tap, module.bias_k, "bias_k", size)], 1)
        v_BSE = torch.cat([v_BSE, _repeated(tap, module.bias_v, "bias_v", size)], 1)
    if module.add_zero_attn:
        k_BSE, v_BSE = F.pad(k_BSE, (0, 0, 0, 1)), F.pad(v_BSE, (0, 0, 0, 1))
    if mask is not None:  # every query may attend to the appended keys
        mask = F.pad(mask, (0, k_BSE.shape[1] - mask.shape[3]))
    q_BHTD, k_BHSD, v_BHSD = _heads(q_BTE, heads), _heads(k_BSE, heads), _heads(v_BSE, heads)
    dropout, weights = module.dropout if module.training else 0.0, None
    if need_weights:
        scores = (q_BHTD * head_dim**-0.5) @ k_BHSD.transpose(2, 3)
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
        mixed_BHTD = weights @ v_BHSD
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        kept = None if hint else mask
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, kept, dropout, is_causal=hint)
    mixed_BTE = mixed_BHTD.transpose(1, 2).flatten(2)
    out = module.out_proj
    output = _linear(tap, mixed_BTE, (out.weight, "out_proj.weight", None), (out.bias, "out_proj.bias", None))
    return output if module.batch_first else output.transpose(0, 1), weights


def _heads(tensor: Tensor, heads: int) -> Tensor:
    """Reshape (B, T, E) to (B, H, T, D)."""
    size, length, width = tensor.shape
    return tensor.reshape(size, length, heads, width // heads).transpose(1, 2)


def _projected(module: nn.MultiheadAttention, tap: Tap, *roles: Tensor) -> list[Tensor]:
    """Return queries, keys and values, each of shape (B, length, E).

    Roles that share their tensor share a product and a tap.
    """
    query, key, value = roles
    packed, bias = cast("Tensor | None", module.in_proj_weight), cast("Tensor | None", module.in_proj_bias)
    groups = [(0, 1), (1, 2), (2, 3)]
    if packed is not None and key is value:
        groups = [(0, 3)] if query is key else [(0, 1), (1, 3)]
    found: list[Tensor] = []
    for first, end in groups:
        rows = slice(first * module.embed_dim, end * module.embed_dim)
        name = f"{'qkv'[first]}_proj_weight"
        part = None if end - first == 3 else rows
        weights: _Rows = (
            (getattr(module, name), name, None) if packed is None else (packed[rows], "in_proj_weight", part)
        )
        biases: _Rows = (None if bias is None else bias[rows], "in_proj_bias", part)
        inputs = roles[first] if module.batch_first else roles[first].transpose(0, 1)
        found += _linear(tap, inputs, weights, biases).chunk(end - first, 2)
    return found


def _linear(tap: Tap, inputs: Tensor, weights: _Rows, biases: _Rows) -> Tensor:
    """Return inputs weight^T + bias, passed through the tap."""
    (weight, weight_name, weight_rows), (bias, bias_name, bias_rows) = weights, biases
    version = 0 if inputs.is_inference() else inputs._version  # pyright: ignore[reportPrivateUsage]

    def contributions(grad_BTO: Tensor) -> list[Contribution]:
        if (current := inputs._version) != version:  # pyright: ignore[reportPrivateUsage]
            condition, got = f"to be unchanged since the forward pass (version {version})", f"version {current}"
            remedy = "use an operation that is not in place"  # torch's own backward pass refuses such a change, too
            raise expected(_NAME, "inputs", condition, got, remedy, UnsupportedModuleError)
        found = [_entry(weight_name, "outer", inputs.detach(), grad_BTO, weight_rows)]
        return found if bias is None else [*found, _entry(bias_name, "bias", None, grad_BTO, bias_rows)]

    detached = None if bias is None else bias.detach()
    return _tapped(tap, F.linear(inputs, cast("Tensor", weight).detach(), detached), contributions)


def _entry(name: str, kind: str, a: Tensor | None, b: Tensor, rows: slice | None) -> Contribution:
    return (name, kind, a, b) if rows is None else (name, kind, a, b, rows)


def _repeated(tap: Tap, bias: Tensor, name: str, size: int) -> Tensor:
    """Return a key or value that is a parameter, repeated for every example and tapped: shape (B, 1, E)."""
    return _tapped(tap, bias.detach().expand(size, 1, -1), lambda grad: [(name, "dense", None, grad.unsqueeze(1))])


def _tapped(tap: Tap, tensor: Tensor, contributions: Contributions) -> Tensor:
    if torch.is_grad_enabled() and not tensor.requires_grad:  # its inputs do not require gradients
        tensor.requires_grad_()
    return tap(tensor, contributions)


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """Return both masks as one tensor that is added to the scores, of a shape that broadcasts to (B, H, T, S)."""
    size, heads, length, keys = shape
    shapes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {
        "attn_mask": {(length, keys): (1, 1, length, keys), (size * heads, length, keys): shape},
        "key_padding_mask": {(size, keys): (size, 1, 1, keys)},
    }
    merged: Tensor | None = None
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is None:
            continue
        if tuple(mask.shape) not in shapes[name] or not (mask.dtype == torch.bool or mask.is_floating_point()):
            condition = f"to be of shape {' or '.join(map(str, shapes[name]))}, and boolean or floating point"
            got = f"shape {tuple(mask.shape)} and {mask.dtype}"
            raise expected(_NAME, name, condition, got, "give a mask of this shape and such a dtype")
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
        mask = mask.reshape(shapes[name][tuple(mask.shape)])
        merged = mask if merged is None else merged + mask
    return merged
