"""Find bounds and scales that come from the private data, and public examples that are private rows."""

import warnings
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.checks.model_and_loss import listed
from privgrad.sampling.datasets import origins

_DIGITS = 3  # of a bound that a person may have chosen
_ROUNDED = 2e-7  # relative difference of a bound and its first digits; bounds may be float32
_EQUAL = 1e-6  # relative difference of a bound and a value, or the norm of a row, that count as equal
_SHARE, _ROWS = 0.05, 10  # of rows that reach a public bound to which the data were clipped or scaled
_BLOCK = 4096  # rows that are compared at once
_COLUMNS = 4  # of a table, any of which tells: with all, wide tables would take long


# Fault: `bound=x.max()`, a range or a scaler that was fitted on the private rows; it publishes one person's value.
# Cost: one pass over the rows if a bound has many digits, and another if it is their extreme.
# Warns wrongly: a public range of many digits whose end a few rows reach, such as [1900, 2023] or [0, 65535]; hence it
#     does not refuse.
def warn_of_private_bound(
    function: str, name: str, bound: Tensor, rows: Tensor, *, is_low: bool = False, of: str = "value"
) -> None:
    """Warn if a bound of many digits, one or one per column of `rows` without NaN, is the extreme of a few rows."""
    bounds = bound.detach().cpu().double().expand(rows.shape[1])
    chosen = [value for value in map(float, set(bounds.numpy())) if not is_typed(value)]
    if not chosen or not len(rows):
        return
    extremes = (rows.amin(0) if is_low else rows.amax(0)).cpu().double()
    # If this many rows reach a bound, the data were probably clipped or scaled to it.
    enough = max(2, min(_ROWS, _SHARE * len(rows)))
    for value in chosen:
        columns = bounds == value
        if not bool(_are_equal(extremes[columns], value).any()):
            continue
        own = columns.to(rows.device)
        parts = (rows[start : start + _BLOCK, own].double() for start in range(0, len(rows), _BLOCK))
        if sum(int(_are_equal(part, value).any(1).sum()) for part in parts) < enough:
            warnings.warn(
                f"NOT PRIVATE: {function}: {name}: this is the {'smallest' if is_low else 'largest'} {of} of the data, "
                "with all its digits. If it was taken from the data, it publishes one person's value: round it "
                "outwards to two digits. If it was known without the data, such as 65535, it is right",
                stacklevel=1,  # all calls warn from one line, so that Python prints the same warning once
            )


# Fault: bounds in another unit, or one pair of bounds for ages and incomes: the columns say nothing, in silence.
# Cost: one pass over the rows.
# Warns wrongly: a column with few rare large values, whose other values lie in a hundredth of its bounds.
def warn_of_bounds_of_another_size(function: str, low: Tensor, high: Tensor, rows: Tensor) -> None:
    """Warn of columns that lie mostly outside of their bounds, or within a hundredth of them. `rows` has no NaN."""
    if not len(rows):
        return
    places = (rows.double() - low) / (high - low)
    is_outside = ((places < 0) | (places > 1)).double().mean(0) > 0.5
    spread = places.amax(0) - places.amin(0)
    is_suspect = is_outside | ((spread > 0) & (spread < 0.01))
    if suspects := [f"{place}" for place, one in enumerate(is_suspect.numpy()) if one]:
        warnings.warn(
            f"NOT PRIVATE: {function}: columns {listed(suspects)} (from 0) lie mostly outside of their bounds, or "
            "within a hundredth of them, so the model hardly sees them. Give bounds in the unit of each column: (lows, "
            "highs)",
            stacklevel=1,
        )


# Fault: a StandardScaler, MinMaxScaler or PCA that was fitted on the rows of the training.
# Cost: one pass over the rows.
# Warns wrongly: public shares of many digits with ends 0 and 1, such as pixels over 255; hence it does not refuse.
def warn_of_fitted_scale(function: str, columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Warn of columns with mean 0 and deviation 1, or with ends 0 and 1, on these very rows. NaN does not count."""
    if suspects := _scaled(columns):
        warnings.warn(
            f"NOT PRIVATE: {function}: {listed(suspects)}: mean 0 and deviation 1, or ends exactly 0 and 1, on these "
            "very rows, as from a scaler that was fitted on them. No epsilon covers its constants. Use "
            "PublicScaler(bounds) or constants from public data in its place. If they are public, this is right",
            stacklevel=1,
        )


def _scaled(columns: Mapping[str, np.ndarray[Any, Any]]) -> list[str]:
    """Return the names of the columns that look scaled on these very rows."""
    suspects, centered = list[str](), list[str]()
    for name, column in columns.items():
        values = column[np.isfinite(column)].astype(float)
        if not len(values) or np.array_equal(values, values.round(_DIGITS)):
            continue  # codes and counts may have such a mean, or such ends, by chance
        spread, low, high = values.std(), values.min(), values.max()
        if abs(values.mean()) <= _EQUAL * spread:
            centered.append(name)
            # pandas divides by n - 1 for the deviation
            suspects += [name] if abs(spread - 1) <= max(1e-5, 1 / len(values)) else []
        elif abs(low) <= _EQUAL and abs(high - 1) <= _EQUAL:
            suspects.append(name)
    return centered if len(centered) == len(columns) else suspects  # all: by PCA, or without a scale


def is_typed(bound: float) -> bool:
    """Return whether a bound, or its square, has at most 3 significant digits, so that a person may have chosen it."""
    return any(abs(one - float(f"{one:.{_DIGITS}g}")) <= _ROUNDED * abs(one) for one in (bound, bound**2))


def _are_equal(values: Tensor, bound: float) -> Tensor:
    return (values - bound).abs() <= _EQUAL * abs(bound)


# Fault: public examples or validation data that are a Subset of the private data set, as a random_split makes them.
# Cost: it compares addresses, and reads no row.
# Refuses wrongly: no case is known. It cannot see copies.
def share_rows(one: object, other: object) -> bool:
    """Return whether two data sets have a row in common, as far as objects and memory tell."""
    # A row in several tensors is common if the widest of them are. Tensors that are expanded from one row do not count.
    if one is None or other is None:
        return False
    for (base, rows), (other_base, other_rows) in product(origins(one), origins(other)):
        if base is other_base:
            if rows is None or other_rows is None or bool(torch.isin(rows, other_rows).any()):
                return True
        else:
            own, others = _places(base, rows), _places(other_base, other_rows)
            if _among(own[0], others[1]) or _among(others[0], own[1]):
                return True
    return False


def _among(places: list[Tensor], known: list[Tensor]) -> bool:
    """Return whether some row has all its places among those that are known."""
    if not places or not known:
        return False
    every = torch.cat([part.flatten() for part in known])
    found = [(torch.isin(part, every) & (part != 0)).any(0) for part in places]
    return bool(torch.stack(found).all(0).any())


def _places(data: object, rows: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each part of the rows where it lies, shape (k, rows): k places, or 0 for none of its own."""
    # The first list has only the widest tensors, those of the records: labels may be copied, and an index be shared.
    if isinstance(data, list):
        objects = cast("list[object]", data)
        # Python may keep one object for all equal numbers, and for equal short texts.
        shared = [x is None or isinstance(x, int) or (isinstance(x, str | bytes) and len(x) < 2) for x in objects]
        widest = every = [torch.tensor([[0 if own else id(x) for x, own in zip(objects, shared, strict=True)]])]
    elif any(kind.__module__ == "datasets.arrow_dataset" for kind in type(data).__mro__):
        widest = every = _table_places(data)
    else:
        tensors = list(_tensors(data.tensors if isinstance(data, TensorDataset) else data))
        tensors = [leaf for leaf in tensors if len(leaf) == len(tensors[0])]
        sizes = [leaf[0].numel() * leaf.element_size() for leaf in tensors]
        steps = [torch.arange(len(leaf)) * leaf.stride(0) * leaf.element_size() for leaf in tensors]
        every = [(leaf.data_ptr() + step)[None] for leaf, step in zip(tensors, steps, strict=True)]
        widest = [part for part, size in zip(every, sizes, strict=True) if size == max(sizes)]
    chosen = slice(None) if rows is None else rows
    one, other = ([part[:, chosen] for part in found if part.numel() > 0] for found in (widest, every))
    return one, other


def _tensors(data: object) -> Iterator[Tensor]:
    """Yield the tensors of a structure that hold all rows in memory of their own; nothing for any other data set."""
    if isinstance(data, tuple | Mapping):
        parts = cast("Mapping[Any, object]", data).values() if isinstance(data, Mapping) else cast(Any, data)
        for part in parts:
            yield from _tensors(part)
    elif isinstance(data, Tensor) and data.layout == torch.strided and data.dim() > 0 and data.numel() > 0:
        yield from () if data.stride(0) == 0 else (data,)  # 0: expanded from one row


def _table_places(data: Any) -> list[Tensor]:
    """Return the places of a datasets.Dataset: the bits before each of its rows in the memory of a column."""
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
