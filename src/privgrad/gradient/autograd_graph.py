"""Functions that read the graph that autograd records.

If `is_additive` were wrong, the norm of an example could differ from its share of the sum.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import CheckpointError

from privgrad.gradient.refusals import refused

# The class of the nodes of leaves.
_made: Any = torch.ones((), requires_grad=True).expand(1).grad_fn
AccumulateGrad: Any = _made.next_functions[0][0].__class__
# Those that tests compare with single gradients.
_BATCHED = {"torch::autograd::AccumulateGrad"} | {
    f"{name}Backward"
    for name in (
        *("Add", "Clone", "Div", "Expand", "LinalgVectorNorm", "Mean", "Mul", "NativeLayerNorm", "Norm", "Pow"),
        *("ReshapeAlias", "Rsqrt", "Sqrt", "Std", "StdMean", "Sub", "Sum", "UnsafeView", "Var", "VarMean", "View"),
    )
}


class refusing_in_place:  # noqa: N801, it is called as a function is
    """Raise UnsupportedModuleError where autograd needs a tensor that was changed, or cannot compute it again."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, CheckpointError):
            condition, remedy = "to compute the same again in the backward pass", "switch it off for this training"
            raise refused("gradient checkpointing", condition, type(error).__name__, remedy) from error
        if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
            condition, remedy = "not to be changed in place", "work on a copy, as ordinary training requires too"
            raise refused("a tensor that autograd needs", condition, "an in-place write", remedy) from error


def gradients_at(
    edges: Sequence[GradientEdge | Tensor],
    outputs: Sequence[Tensor],
    along: Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
    keep_graph: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of sum <output, along> at edges or leaves; None where the outputs do not depend on one."""
    # torch.autograd.grad would switch off the modes that see functions, also where a checkpointed part runs again.
    along = [torch.ones_like(output) for output in outputs] if along is None else along
    run, ends, keep = cast(Any, _engine_run_backward), tuple(edges), create_graph or keep_graph
    return list(run(tuple(outputs), tuple(along), keep, create_graph, ends, True, accumulate_grad=False))


def gradients_and_curvature(
    loss: Tensor, leaves: Sequence[Tensor], along: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Return the gradients of a loss at leaves, plus the Hessian's product with `along`; None there means zero."""
    curved = any(move is not None for move in along)
    found = gradients_at(leaves, [loss], create_graph=curved)
    grads = tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found, strict=True))
    if not curved:
        return grads
    phi = torch.stack([(grad * move).sum() for grad, move in zip(grads, along, strict=True) if move is not None]).sum()
    if not phi.requires_grad:
        return grads
    more = gradients_at(leaves, [phi])
    return tuple(grad if add is None else grad + add for grad, add in zip(grads, more, strict=True))


def sources(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaf tensors with requires_grad from which `tensors` are computed; a leaf yields itself."""
    yield from (tensor for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad)
    yield from (node.variable for node in nodes(tensors) if node.__class__ is AccumulateGrad)


def is_additive(tensor: Tensor) -> bool:
    """Return whether the backward pass of a sum of gradients gives the sum of theirs, in the precision of the sum."""
    return not any(
        isinstance(node, BackwardCFunction)
        or type(node).__name__ == "CppFunction"  # the type of every function that torch does not know by name
        or node.name().startswith("ToCopy")  # precisions are converted, as under autocast
        for node in nodes([tensor])
    )


def has_batched_rules(tensor: Tensor) -> bool:
    """Return whether vmap computes the backward pass of every operation behind a tensor for many gradients at once."""
    return all(node.name().rstrip("01234") in _BATCHED for node in nodes([tensor]))


def nodes(tensors: Sequence[Tensor], ends: Collection[Any] = ()) -> list[Any]:
    """Return the nodes of the graph that computes `tensors`, in a fixed order; `ends` and what is behind are not."""
    # By level, because a loop over 500 nodes would take a millisecond in each step.
    seen: dict[Any, None] = dict.fromkeys([None, *ends])
    left_out, level = len(seen), dict[Any, None]()
    level |= {tensor.grad_fn: None for tensor in tensors if tensor.grad_fn not in seen}
    while level:
        seen |= level
        level = {edge[0]: None for node in level for edge in node.next_functions if edge[0] not in seen}
    return list(seen)[left_out:]


def own_function_of(parameter: int, graph: Collection[Any]) -> str:
    """Return the name of the autograd.Function that takes the parameter with this id; empty if none does."""
    own = (node for node in graph if isinstance(node, BackwardCFunction))
    takes = (node for node in own if any(id(getattr(x, "variable", None)) == parameter for x, _ in node.next_functions))
    return next((type(node).__name__.removesuffix("Backward") for node in takes), "")


def refuse_reentrant(loss: Tensor) -> list[Any]:
    """Raise UnsupportedModuleError if a loss is computed by re-entrant gradient checkpointing; return its nodes."""
    # Its backward pass writes gradients of parameters to `.grad`: these would be neither clipped nor noised.
    found = nodes([loss])
    if "CheckpointFunctionBackward" in {node.__class__.__name__ for node in found}:
        remedy = "pass use_reentrant=False, in transformers by gradient_checkpointing_kwargs={'use_reentrant': False}"
        raise refused("gradient checkpointing", "not to be re-entrant", "use_reentrant=True", remedy)
    return found
