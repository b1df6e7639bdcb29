"""Read the graph that autograd records."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def sources(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that require gradients and that these are computed from; themselves, if they are not computed."""
    yield from (tensor for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad)
    yield from (node.variable for node in nodes(tensors) if hasattr(node, "variable"))


def casts(tensor: Tensor) -> bool:
    """Whether a tensor is computed by way of another precision, as under autocast."""
    return any(node.name().startswith("ToCopy") for node in nodes([tensor]))


def nodes(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Yield those of the graph that these are computed by, each once."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(edge[0] for edge in node.next_functions)
