"""Rules for calls of torch functions with parameters among their arguments: linear maps, lookups, norms.

A reader takes the arguments of a function, under torch's names, and returns the call as a `Product`.
"""

# ruff: noqa: A002, torch's names

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.engine.layers.base import Rule
from privgrad.engine.layers.conv import FunctionalConvolution
from privgrad.engine.layers.embedding import Embedding
from privgrad.engine.layers.linear import Linear, TransposedLinear
from privgrad.engine.layers.normalization import GroupNorm, LayerNorm, RMSNorm

Maybe = Tensor | None


@dataclass(frozen=True)
class Product:
    """One call of a torch function for which there is a rule."""

    rule: Rule
    layer: Any  # the options of the call, which the rule takes in place of a layer
    weights: dict[str, Tensor]  # the weight and the bias that were passed, by name
    x: Tensor  # the input


def faster(func: Any, args: Any, shared: Sequence[Tensor]) -> str:
    """Return how to write a call with `shared` arguments as one with a rule; empty if that is not known."""
    name, weight = getattr(func, "__name__", ""), shared[0]
    if name == "addmm":
        return "use F.linear"
    others = [x for x in args if isinstance(x, Tensor) and x is not weight]
    if weight.dim() != 2 or len(others) != 1:
        return ""
    (x,) = others
    if name == "__getitem__":
        return "use F.embedding" if x.dtype in (torch.int32, torch.int64) else ""
    if name == "einsum" and isinstance(args[0], str):
        return "use F.linear" if _is_linear(args[0], swapped=args[1] is weight) else ""
    if name in ("mul", "__mul__", "__rmul__") and 1 not in weight.shape and x.dim() > 2 and 1 in x.shape[-2:]:
        return "use F.linear if a dimension is summed afterwards"
    return ""


def _is_linear(equation: str, *, swapped: bool) -> bool:
    """Return whether an einsum of a tensor and a matrix sums over one dimension of the matrix, which may be first."""
    given, _, result = equation.replace(" ", "").partition("->")
    one, _, other = given.partition(",")
    matrix, x = map(set, (one, other) if swapped else (other, one))
    summed, new = (matrix & x) - set(result), matrix - x
    return len(matrix) == 2 and len(summed) == len(new) == 1 and new <= set(result)


def _linear(input: Tensor, weight: Tensor, bias: Maybe = None) -> Product | None:
    """Return the product of a call of F.linear; None for a vector as weight, or a bias that is broadcast."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    stored = _transposed(weight)
    rule = Linear() if stored is None else TransposedLinear()
    return Product(rule, None, _named(weight if stored is None else stored, bias), input)


def _matmul(input: Tensor, other: Tensor) -> Product | None:
    """Return the product of x @ weight with a matrix; None for any other product."""
    if not isinstance(other, Tensor) or other.dim() != 2 or input.dim() < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        return None
    stored = _transposed(other)
    rule = TransposedLinear() if stored is None else Linear()
    return Product(rule, None, {"weight": other if stored is None else stored}, input)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Maybe = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Product | None:
    """Return the product of a convolution; None if its padding is a string or its input has no batch dimension."""
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    layer = SimpleNamespace(
        kernel_size=tuple(weight.shape[2:]),
        stride=_sizes(stride, dims),
        padding=_sizes(padding, dims),
        dilation=_sizes(dilation, dims),
        groups=groups,
        padding_mode="zeros",
    )
    return Product(FunctionalConvolution(), layer, _named(weight, bias), input)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Product | None:
    """Return the product of a call of F.embedding; None if it has options without a rule."""
    if max_norm is not None or scale_grad_by_freq or input.dim() == 0:
        return None
    size, width = weight.shape
    padding = padding_idx % size if padding_idx is not None and -size <= padding_idx < size else padding_idx
    layer = SimpleNamespace(num_embeddings=size, embedding_dim=width, padding_idx=padding)
    return Product(Embedding(), layer, {"weight": weight}, input)


# The last argument of this and of `_group_norm` says whether cuDNN may compute them.
def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Maybe = None, bias: Maybe = None, eps: Any = 1e-5, *_: Any, **__: Any
) -> Product:
    layer = SimpleNamespace(normalized_shape=tuple(normalized_shape), eps=eps)
    return Product(LayerNorm(), layer, _named(weight, bias), input)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Maybe = None, eps: float | None = None) -> Product:
    layer = SimpleNamespace(normalized_shape=tuple(normalized_shape), eps=eps)
    return Product(RMSNorm(), layer, _named(weight, None), input)


def _group_norm(
    input: Tensor, num_groups: int, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *_: Any, **__: Any
) -> Product:
    layer = SimpleNamespace(num_groups=num_groups, eps=eps)
    return Product(GroupNorm(), layer, _named(weight, bias), input)


def _named(weight: Maybe, bias: Maybe) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in (("weight", weight), ("bias", bias)) if tensor is not None}


def _transposed(weight: Tensor) -> Tensor | None:
    """Return the leaf whose transpose `weight` is; None if it is anything else. The leaf has no graph to go through."""
    graph = weight.grad_fn
    if graph is None or graph.name() not in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
        return None
    leaf = getattr(graph.next_functions[0][0], "variable", None)
    if leaf is None or leaf.shape != weight.shape[::-1] or leaf.stride() != weight.stride()[::-1]:
        return None
    return leaf if leaf.data_ptr() == weight.data_ptr() else None


def _sizes(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


# From the arguments of a torch function to its product; None if there is no rule for them.
READERS: dict[Any, Callable[..., Product | None]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    F.embedding: _embedding,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolution),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer_norm),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    **dict.fromkeys((F.group_norm, torch.group_norm), _group_norm),
}
