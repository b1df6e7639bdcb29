"""Random groups of examples, whose means are clipped in place of single gradients: a plan with group_size above 1."""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.gradient.factor import Factor
from privgrad.types import map_examples


def group_of(words: np.ndarray, groups: int) -> Tensor:
    """Return the group of each example, shape (B,), drawn uniformly from [0, groups).

    Args:
        words: independent uniform 64-bit integers, one per example.
        groups: the number of groups; some may get no example.
    Privacy:
        The guarantee rests on this: the group of an example does not depend on the other examples. If one example is
        added or removed, all others keep their groups, so only one group changes. If groups were consecutive slices
        of the batch, all later examples would move, and all their groups would change.
    """
    return torch.from_numpy((words % np.uint64(groups)).astype(np.int64))


def split_by_group(examples: Any, group_B: Tensor, at_once: int) -> Iterator[tuple[int, Any]]:
    """Yield (size of each group, examples), in parts of whole groups of equal size, smallest size first.

    The examples of a group are next to each other. A part has at most `at_once` examples, or is one group.
    """
    order_B = torch.argsort(group_B, stable=True)
    size_B = torch.bincount(group_B)[group_B[order_B]]  # size of each example's group
    for size in cast("list[int]", size_B.unique().tolist()):
        of_size = order_B[size_B == size]
        for start in range(0, len(of_size), most := max(1, at_once // size) * size):
            yield size, map_examples(itemgetter(of_size[start : start + most]), examples)


def group_means(gradients: Mapping[str, Factor], size: int) -> dict[str, Factor]:
    """Return the mean gradient of each group of `size` successive examples, one row per group."""
    return {name: factor.merge(size) * (1 / size) for name, factor in gradients.items()}
