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
    """Return the group of each example, shape (B,), uniform in [0, groups), from an independent word of its own.

    Privacy:
        The guarantee rests on this: the group of an example does not depend on the other examples. If one example is
        added or removed, all others keep their groups, so only one group changes. If groups were consecutive slices
        of the batch, all later examples would move, and all their groups would change.
    """
    return torch.from_numpy((words % np.uint64(groups)).astype(np.int64))


def split_by_group(examples: Any, group_B: Tensor, at_once: int) -> Iterator[tuple[int, Any]]:
    """Yield (size, examples): whole groups of equal size, each in one piece; `at_once` examples, or one group."""
    order_B = torch.argsort(group_B, stable=True)
    size_B = torch.bincount(group_B)[group_B[order_B]]  # size of each example's group
    for size in cast("list[int]", size_B.unique().tolist()):
        of_size = order_B[size_B == size]
        for start in range(0, len(of_size), most := max(1, at_once // size) * size):
            yield size, map_examples(itemgetter(of_size[start : start + most]), examples)


def group_means(gradients: Mapping[str, Factor], size: int) -> dict[str, Factor]:
    """Return the mean gradient of each group of `size` successive examples, one row per group."""
    return {name: factor.merge(size) * (1 / size) for name, factor in gradients.items()}
