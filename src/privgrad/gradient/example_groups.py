"""Average the gradients of groups of examples, so that each mean is clipped as one vector.

PrivateGradient uses this for `group_size` > 1. Some papers call the groups "microbatches".
"""

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.gradient.factors.base import Factor
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


def group_means(
    engine: Callable[[Any], Mapping[str, Factor]], examples: Any, group_B: Tensor, at_once: int
) -> Iterator[dict[str, Factor]]:
    """Yield the mean gradient of each group that has examples.

    Each example is in exactly one group. PrivateGradient clips each mean, so one example changes one clipped vector.

    Args:
        engine: examples -> their gradients by parameter name.
        examples: tensors with leading dimension B >= 1.
        group_B: the group of each example, integer, shape (B,).
        at_once: the number of examples that the engine computes at once; one whole group is computed in any case.
    Yields:
        Factors by parameter name, with one row per group. Groups of equal size come together, smallest size first.
    """
    order_B = torch.argsort(group_B, stable=True)
    size_B = torch.bincount(group_B)[group_B[order_B]]  # size of each example's group
    for size in cast("list[int]", size_B.unique().tolist()):
        of_size = order_B[size_B == size]
        for start in range(0, len(of_size), most := max(1, at_once // size) * size):
            chosen = of_size[start : start + most]
            chunk = engine(map_examples(itemgetter(chosen), examples))
            yield {name: factor.merge(size) * (1 / size) for name, factor in chunk.items()}
