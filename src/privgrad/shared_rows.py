"""Whether two data sets have rows in common: the same data set, parts of it, or tensors in the same memory.

`fit` and the bridges call it for public data and for evaluation data. The privacy guarantee does not rest on it: it
finds a forgotten split, but no copies of rows.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from privgrad.class_rates import ClassRates


def share_rows(one: object, other: object) -> bool:
    """Return whether two data sets have a row in common, as far as objects and memory tell.

    Args:
        one: a data set, or tensors in any structure. It looks through Subset, ConcatDataset and ClassRates.
        other: as `one`.
    """
    if one is None or other is None:
        return False
    if isinstance(one, ConcatDataset):
        return any(share_rows(part, other) for part in cast("list[object]", one.datasets))
    if isinstance(other, ConcatDataset):
        return share_rows(cast(object, other), one)
    (place, rows), (other_place, other_rows) = _origin(one), _origin(other)
    if place != other_place:
        return False
    return rows is None or other_rows is None or bool(torch.isin(rows, other_rows).any())


def _origin(data: object) -> tuple[object, Tensor | None]:
    """Return what holds the rows, and their places in it; None for all places."""
    rows: Tensor | None = None
    while isinstance(data, Subset | ClassRates):
        if isinstance(data, Subset):
            own = torch.as_tensor(list(data.indices), dtype=torch.int64)
            rows = own if rows is None else own[rows]
        data = cast(object, data.dataset)
    if (leaf := _first_tensor(data)) is None:
        return id(data), rows
    rows = torch.arange(len(leaf)) if rows is None else rows
    return ("memory", leaf.untyped_storage().data_ptr()), leaf.data_ptr() + rows * leaf.stride(0) * leaf.element_size()


def _first_tensor(data: object) -> Tensor | None:
    """Return the first tensor of a structure that holds all rows; None for any other data set."""
    found: Any = data.tensors if isinstance(data, TensorDataset) else data
    while isinstance(found, tuple | Mapping) and found:
        parts = cast("Mapping[Any, Any]", found).values() if isinstance(found, Mapping) else cast(Any, found)
        found = next(iter(parts))
    return found if isinstance(found, Tensor) and found.dim() > 0 and len(found) > 0 else None
