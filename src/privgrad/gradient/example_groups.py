"""Means over groups of examples, which are clipped as one: the "microbatches" of some papers."""

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.gradient.factors.base import Factor
from privgrad.types import map_examples


def group_of(words: np.ndarray, groups: int) -> Tensor:
    """The group of each example, shape (B,), in [0, groups): uniform, each example's by itself.

    Args:
        words: independent uniform 64-bit integers, one an example.
        groups: how many there are; some may get no example.
    Privacy:
        By itself, so that an example added or removed leaves all others where they are, and one group changes. Groups
        of neighbors in the batch would move everyone behind it, and all their groups.
    """
    return torch.from_numpy((words % np.uint64(groups)).astype(np.int64))


def group_means(
    engine: Callable[[Any], Mapping[str, Factor]], examples: Any, group_B: Tensor, at_once: int
) -> Iterator[dict[str, Factor]]:
    """Mean gradient of each group that has examples.

    Args:
        engine: examples -> their gradients by parameter name.
        examples: tensors with leading dimension B >= 1.
        group_B: the group of each, integer, shape (B,).
        at_once: how many examples the engine takes at once; at least one group.
    Yields:
        By parameter name, one row a group; groups of one size after the other.
    """
    order_B = torch.argsort(group_B, stable=True)
    size_B = torch.bincount(group_B)[group_B[order_B]]  # how many share each one's group
    for size in cast("list[int]", size_B.unique().tolist()):
        of_size = order_B[size_B == size]
        for start in range(0, len(of_size), most := max(1, at_once // size) * size):
            chosen = of_size[start : start + most]
            chunk = engine(map_examples(itemgetter(chosen), examples))
            yield {name: factor.merge(size) * (1 / size) for name, factor in chunk.items()}
