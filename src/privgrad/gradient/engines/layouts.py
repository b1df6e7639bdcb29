"""Find the dimension in which each tensor of a layer's call holds the examples, and rearrange tensors by it.

The privacy guarantee of the fast engine rests on this: a row must be attributed to its own example. The dimension is
learned from two batches of different sizes, and a tensor is refused if it has no such dimension.

`capture` calls the functions below.
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


# The dimension of the examples in each tensor of a call; None for a tensor that all examples share. The layout () of a
# function's call says that its result cannot be attributed to examples.
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


def attributed(one: Call, other: Call, sizes: tuple[int, int], inputs: int) -> Layout:
    """Return the layout of a function's call, as `find_layout`; () if the result cannot be attributed to examples.

    Args:
        one: as in `find_layout`.
        other: as in `find_layout`.
        sizes: as in `find_layout`.
        inputs: the number of tensors among the arguments.
    """
    try:
        layout = find_layout(one, other, sizes)
    except UnsupportedModuleError:
        return ()
    mixes = any(layout) and None in layout[inputs:]
    return () if mixes else layout


def require_rows(path: str, x: Tensor, examples: ExampleDim, size: int) -> Tensor:
    """Return x, whose dimension 0 holds the examples."""
    if examples.dim != 0:
        raise misplaced(path, f"dimension {examples.dim}")
    if len(x) != size * examples.rows:
        raise CallSequenceChangedError(path)
    return x


def split(path: str, x: Tensor, examples: ExampleDim, size: int) -> Tensor:
    """Return (..., B rows, ...) as (B, ..., rows, ...)."""
    dim, rows = examples
    if x.dim() <= dim or x.shape[dim] != size * rows:
        raise CallSequenceChangedError(path)
    return x.view(*x.shape[:dim], size, rows, *x.shape[dim + 1 :]).movedim(dim, 0)


def joined(path: str, x: Tensor, examples: ExampleDim) -> Tensor:
    """Return (B, ..., rows, ...) as (..., B rows, ...), as the module itself would return it."""
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
