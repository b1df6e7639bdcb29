"""Find the dimension in which each tensor of a layer's call holds the examples, and rearrange tensors by it.

The privacy guarantee of the fast engine rests on this: a row must be attributed to its own example. The dimension is
learned from two batches of different sizes, and a tensor is refused if it has no such dimension.

`passes` calls `find_layout` and `mixes`, `capture` calls `with_examples`, and `vmapped_unit` calls `split` and
`joined`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.engines.refusals import REMEDY, CallSequenceChangedError, misplaced, refused


class ExampleDim(NamedTuple):
    """The dimension of a tensor that holds the examples, in order, and the number of rows per example."""

    dim: int
    rows: int


# The dimension of the examples in each tensor of a call; None for a tensor that all examples share.
Layout = tuple[ExampleDim | None, ...]


@dataclass(frozen=True)
class Call:
    """One call of a unit: its path, and the shapes of its input and output tensors."""

    path: str
    shapes: tuple[torch.Size, ...]


def find_layout(one: Call, other: Call, sizes: tuple[int, int]) -> Layout:
    """Return the layout of a call, found by comparing it with the same call for another number of examples.

    Args:
        one: the call with sizes[0] examples.
        other: the call with sizes[1] examples.
        sizes: two different numbers of examples.
    Raises:
        UnsupportedModuleError: the calls differ in more than the size of one dimension per tensor.
    """
    dims, other_dims = [len(shape) for shape in one.shapes], [len(shape) for shape in other.shapes]
    if dims != other_dims:
        got = f"tensors of {dims} dimensions with {sizes[0]} examples, {other_dims} with {sizes[1]}"
        raise refused(f"the calls of '{one.path}'", "not to depend on the examples", got, REMEDY, unit=one.path)
    return tuple(_example_dim(one.path, *shapes, sizes) for shapes in zip(one.shapes, other.shapes, strict=True))


def mixes(unit: str, one: Call, other: Call, sizes: tuple[int, int]) -> bool:
    """Return whether a call is a linear map or convolution inside `unit` with examples outside of dimension 0."""
    if not one.path.startswith(f"{unit}["):
        return False
    try:
        return any(examples is None or examples.dim != 0 for examples in find_layout(one, other, sizes))
    except UnsupportedModuleError:
        return True


def with_examples(path: str, x: Tensor, examples: ExampleDim | None, size: int) -> Tensor:
    """Return x; if all examples share it, expanded to one row per example in dimension 0, without a copy."""
    if examples is None:
        x = x[0] if x.dim() > 0 and len(x) == 1 else x
        return x.expand(size, *x.shape)
    if x.shape[examples.dim] != size * examples.rows:
        raise CallSequenceChangedError(path)
    return x


def split(path: str, x: Tensor, examples: ExampleDim | None, size: int) -> Tensor:
    """Return (..., B rows, ...) as (B, ..., rows, ...), with the memory layout of each example alone."""
    if examples is None:
        return x
    dim, rows = examples
    if x.shape[dim] != size * rows:
        raise CallSequenceChangedError(path)
    return x.reshape(*x.shape[:dim], size, rows, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()


def joined(path: str, x: Tensor, examples: ExampleDim | None) -> Tensor:
    """Return (B, ..., rows, ...) as (..., B rows, ...), as the module itself would return it."""
    if examples is None:
        return x.flatten(0, 1) if x.dim() > 1 and x.shape[1] == 1 else x
    dim, rows = examples
    if x.dim() < dim + 2 or x.shape[dim + 1] != rows:
        raise misplaced(path, f"an output of shape {tuple(x.shape[1:])} per example")
    return x.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _example_dim(path: str, more: torch.Size, fewer: torch.Size, sizes: tuple[int, int]) -> ExampleDim | None:
    """Return the dimension that grows with the batch; None if no dimension grows."""
    growing = [dim for dim in range(len(more)) if more[dim] != fewer[dim]]
    if not growing:
        return None
    dim = growing[0]
    if len(growing) > 1 or more[dim] * sizes[1] != fewer[dim] * sizes[0] or more[dim] % sizes[0] != 0:
        got = f"shape {tuple(more)} with {sizes[0]} examples, {tuple(fewer)} with {sizes[1]}"
        raise misplaced(path, got)
    return ExampleDim(dim, more[dim] // sizes[0])
