"""Whether two data sets have rows in common: the same data set, parts of it, or rows in the same memory.

`fit` and the bridges call it for public data and for evaluation data. The privacy guarantee does not rest on it: it
finds a forgotten split, but no copies of rows.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from privgrad.class_rates import ClassRates

_COLUMNS = 4  # of a table, any of which tells: with all, wide tables would take long


def share_rows(one: object, other: object) -> bool:
    """Return whether two data sets have a row in common, as far as objects and memory tell.

    A row in several tensors is common if the widest of them are. Tensors that are expanded from one row do not count.

    Args:
        one: a data set, a list of rows, or tensors in any structure. It looks through Subset, ConcatDataset and
            ClassRates, and at the tables of datasets.Dataset.
        other: as `one`.
    """
    if one is None or other is None:
        return False
    if isinstance(one, ConcatDataset):
        return any(share_rows(part, other) for part in cast("list[object]", one.datasets))
    if isinstance(other, ConcatDataset):
        return share_rows(cast(object, other), one)
    (base, rows), (other_base, other_rows) = _origin(one), _origin(other)
    if base is other_base:
        return rows is None or other_rows is None or bool(torch.isin(rows, other_rows).any())
    own, others = _places(base, rows), _places(other_base, other_rows)
    return _among(own[0], others[1]) or _among(others[0], own[1])


def _among(places: list[Tensor], known: list[Tensor]) -> bool:
    """Return whether some row has all its places among those that are known."""
    if not places or not known:
        return False
    every = torch.cat([part.flatten() for part in known])
    found = [(torch.isin(part, every) & (part != 0)).any(0) for part in places]
    return bool(torch.stack(found).all(0).any())


def _origin(data: object) -> tuple[object, Tensor | None]:
    """Return the data set below the wrappers, and the selected rows; None for all rows."""
    rows: Tensor | None = None
    while isinstance(data, Subset | ClassRates):
        if isinstance(data, Subset):
            own = torch.as_tensor(list(data.indices), dtype=torch.int64)
            rows = own if rows is None else own[rows]
        data = cast(object, data.dataset)
    return data, rows


def _places(data: object, rows: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each part of the rows where it lies, shape (k, rows): k places, or 0 for none of its own.

    The first list has the tensors with the widest rows only, which are those of the records: labels may be copied, and
    an index of rows may be shared. The second list has all.
    """
    if isinstance(data, list):
        every = [torch.tensor([[0 if _is_interned(row) else id(row) for row in cast("list[object]", data)]])]
        widest = every
    elif any(kind.__module__ == "datasets.arrow_dataset" for kind in type(data).__mro__):
        widest = every = _table_places(data)
    else:
        tensors = list(_tensors(data.tensors if isinstance(data, TensorDataset) else data))
        tensors = [leaf for leaf in tensors if len(leaf) == len(tensors[0])]
        sizes = [leaf[0].numel() * leaf.element_size() for leaf in tensors]
        every = [
            (leaf.data_ptr() + torch.arange(len(leaf)) * leaf.stride(0) * leaf.element_size())[None] for leaf in tensors
        ]
        widest = [part for part, size in zip(every, sizes, strict=True) if size == max(sizes)]
    one, other = (
        [part if rows is None else part[:, rows] for part in found if part.numel() > 0] for found in (widest, every)
    )
    return one, other


def _is_interned(row: object) -> bool:
    """Return whether Python may keep one object for all equal rows."""
    return row is None or isinstance(row, int) or (isinstance(row, str | bytes) and len(row) < 2)


def _tensors(data: object) -> Iterator[Tensor]:
    """Yield the tensors of a structure that hold all rows in memory of their own; nothing for any other data set."""
    if isinstance(data, tuple | Mapping):
        parts = cast("Mapping[Any, object]", data).values() if isinstance(data, Mapping) else cast(Any, data)
        for part in parts:
            yield from _tensors(part)
    elif isinstance(data, Tensor) and data.layout == torch.strided and data.dim() > 0 and data.numel() > 0:
        yield from () if data.stride(0) == 0 else (data,)  # 0: expanded from one row


def _table_places(data: Any) -> list[Tensor]:
    """Return the places of a datasets.Dataset: those of its table's columns, at the rows that it selects.

    A place counts the bits before the row in the memory of its column.
    """
    columns: list[Tensor] = []
    for column in islice(data.data.columns, _COLUMNS):
        parts = [torch.zeros(0, dtype=torch.int64)]
        for chunk in column.chunks:
            address = next((buffer.address for buffer in chunk.buffers() if buffer is not None), None)
            own = torch.arange(len(chunk))
            parts.append(torch.zeros_like(own) if address is None else 8 * address + chunk.offset + own)
        columns.append(torch.cat(parts))
    if not columns:
        return []
    places, selected = torch.stack(columns), data._indices
    return [places if selected is None else places[:, torch.tensor(selected.column(0).to_numpy().astype("int64"))]]
