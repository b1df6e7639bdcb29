"""Rules for calls of F.linear, F.embedding and F.conv1d to 3d, in modules that have no rule of their own.

`engines.capture` opens `Products` around the forward of such a module. torch then passes each call of a torch function
to `__torch_function__`. The privacy guarantee of the fast engine rests on this file: a product must have the rule and
the options of its call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from privgrad.gradient.autograd_graph import sources
from privgrad.gradient.layers.base import Rule
from privgrad.gradient.layers.conv import FunctionalConvolution
from privgrad.gradient.layers.embedding import Embedding
from privgrad.gradient.layers.linear import Linear


@dataclass(frozen=True)
class Product:
    """One call of F.linear, F.embedding or F.conv1d to 3d.

    Attributes:
        rule: the rule for the call.
        layer: the options of the call, which the rule takes in place of a layer.
        weights: the weight and the bias that were passed, by name.
        x: the input.
    """

    rule: Rule
    layer: Any
    weights: dict[str, Tensor]
    x: Tensor


class Products(TorchFunctionMode):
    """A mode that passes calls of these functions to `take`, and uses its result in place of theirs.

    It takes a call only if its weights are computed from the given parameters alone. `engines.capture` opens it around
    the forward of a module without a rule.

    Args:
        parameters: parameters of the module whose forward runs.
        take: function from a product to the result of the call.
    """

    def __init__(self, parameters: Sequence[Tensor], take: Callable[[Product], Tensor]) -> None:
        super().__init__()
        self._own = {id(parameter) for parameter in parameters}
        self._take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what `take` makes of a call with a rule and own weights; else call the function itself."""
        read = _READERS.get(func)
        product = read(*args, **(kwargs or {})) if read is not None else None
        if product is None or not self._made_of_parameters(list(product.weights.values())):
            return func(*args, **(kwargs or {}))
        return self._take(product)

    def _made_of_parameters(self, weights: Sequence[Tensor]) -> bool:
        """Return whether some weight is trained, and all such weights are computed from the given parameters alone."""
        trained = [weight for weight in weights if weight.requires_grad]
        return bool(trained) and all(id(leaf) in self._own for leaf in sources(trained))


def _weights(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product:  # noqa: A002, torch's name
    """Return the product of a call of F.linear with these arguments."""
    return Product(Linear(), None, _weights(weight, bias), input)


def _convolution(
    input: Tensor,  # noqa: A002, torch's name
    weight: Tensor,
    bias: Tensor | None = None,
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
    return Product(FunctionalConvolution(), layer, _weights(weight, bias), input)


def _embedding(
    input: Tensor,  # noqa: A002, torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Product | None:
    """Return the product of a call of F.embedding; None if it has options without a rule."""
    del norm_type, sparse
    if max_norm is not None or scale_grad_by_freq or input.dim() == 0:
        return None
    size, width = weight.shape
    padding = padding_idx % size if padding_idx is not None and -size <= padding_idx < size else padding_idx
    layer = SimpleNamespace(num_embeddings=size, embedding_dim=width, padding_idx=padding)
    return Product(Embedding(), layer, {"weight": weight}, input)


def _sizes(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return one number for each dimension, by torch's convention."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


_READERS: dict[Any, Callable[..., Product | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
}
