"""Checks of the data set that a sampler draws from. They find mistakes; the draws do not depend on them."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from privgrad.errors import described
from privgrad.processes import Processes
from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.loading import unusable
from privgrad.types import PrivacyUnit

_COMPARED = 8  # number of data set items that processes compare
_REPEATS = 20  # number of equal readings after which the items count as not random
_MANY_ROWS = 2.0  # rows per declared person from which a person may have several


def ask_about_rows(dataset: object, num_examples: int, privacy_unit: PrivacyUnit) -> None:
    """Warn if a data set has many more items than the plan declares people. The warning is NOT private."""
    count = len(dataset) if privacy_unit == "user" and isinstance(dataset, Sized) else 0
    if count > _MANY_ROWS * num_examples:
        warnings.warn(
            f"NOT PRIVATE: the plan declares {num_examples:,} people, and the data set has more than {_MANY_ROWS:g} "
            "times as many rows. Does each row hold all data of one person? If a person has several rows, group them "
            "first, for example by privgrad.data.by_user. Otherwise num_examples is far below the number of persons, "
            "and the model gets more noise than it needs: raise it if a public number allows.",
            stacklevel=1,  # all calls warn from one line, so that Python prints the same warning once
        )


# Fault: oversampled rows (the indices of a WeightedRandomSampler), of which each copy is clipped by itself.
# Cost: it sorts the indices of each Subset once; it reads no row.
# Warns wrongly: no case is known. It cannot see copies of rows, or repeats behind a data set of the user's own.
def warn_of_repeats(dataset: Any) -> None:
    """Warn if rows of a data set are several times in a Subset or a ConcatDataset. The warning is NOT private."""
    if not isinstance(dataset, Subset | ConcatDataset | ClassRates):
        return
    found: dict[int, list[Tensor]] = {}
    for base, rows in origins(dataset):
        found.setdefault(id(base), []).append(torch.arange(len(base)) if rows is None else rows)
    if any(len(cast(Tensor, rows.unique())) < len(rows) for rows in map(torch.cat, found.values())):
        warnings.warn(
            "NOT PRIVATE: a Subset or a ConcatDataset holds some rows several times. Each copy is clipped by itself: "
            "epsilon holds for one copy, and not for a person. Hold each row once, and draw frequent classes less "
            "often by ClassRates",
            stacklevel=1,
        )


def origins(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each data set below Subset, ConcatDataset and ClassRates, with its selected rows; None for all rows."""
    if isinstance(data, ClassRates):
        yield from origins(data.dataset)
    elif isinstance(data, ConcatDataset):
        for part in cast("list[Any]", data.datasets):
            yield from origins(part)
    elif isinstance(data, Subset):
        chosen = torch.as_tensor(list(data.indices), dtype=torch.int64)
        below, start = list(origins(data.dataset)), 0
        for base, rows in below:
            own = chosen
            if len(below) > 1:
                count = len(base if rows is None else rows)
                own = chosen[(chosen >= start) & (chosen < start + count)] - start
                start += count
            yield base, own if rows is None else rows[own]
    else:
        yield data, None


def other_container(dataset: Any) -> tuple[str, str] | None:
    """Return a description of what is not a map-style data set, and the remedy; None for anything else."""
    # pandas and polars are recognized by the names of their modules, so that neither has to be imported.
    kind, library = type(dataset).__name__, type(dataset).__module__.partition(".")[0]
    tensors = "torch.utils.data.TensorDataset"
    if isinstance(dataset, DataLoader):
        return "a DataLoader", "pass its .dataset: batches are drawn here"
    if isinstance(dataset, IterableDataset):
        return f"an IterableDataset ({kind})", "write __len__ and __getitem__: a stream has no known sampling rate"
    if isinstance(dataset, str | bytes | Path):
        return described(f"{dataset}"), f"read the file, and pass {tensors}(inputs, labels)"
    if library in ("pandas", "polars"):
        return f"a {library} {kind}", f"pass {tensors}(torch.tensor(data.to_numpy())), with labels as a second tensor"
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return kind, "wrap the data in a map-style data set: a stream cannot be sampled at a known rate"
    if isinstance(dataset, Mapping) and 0 not in dataset:
        columns = f"{tensors}(*map(torch.as_tensor, data.values()))"
        return f"a {kind}", f"take one of its data sets, or, if it holds columns, pass {columns}"
    return None


def all_rows(take: Callable[[np.ndarray], Any], rows: range, processes: Processes, *, is_whole: bool) -> int:
    """Return the number of all rows; raise SamplingError unless each process has the whole data, or a part of its own.

    A row in two parts, or two rows of one number, would cost more than is charged.
    """
    with processes.all_succeed():
        digest = "" if is_whole else _digest(take(np.arange(min(len(rows), _COMPARED))))
    parts = sorted(processes.gather_objects((rows.start, rows.stop, is_whole, digest)))
    with processes.all_succeed():
        is_shared = any(one[1] > other[0] for one, other in pairwise(parts)) or len({e[3] for e in parts}) < len(parts)
        if len({each[2] for each in parts}) > 1 or (is_shared and not is_whole):
            remedy = "give each process a part of its own, and number the rows of all parts one after the other"
            raise unusable("rows", "to be given in all processes or in none, and no row to two", "others", remedy)
    if is_whole:
        require_same_data(take, len(rows), processes)
    return max(each[1] for each in parts)


def content_of(take: Callable[[np.ndarray], Any], rows: range, count: int, processes: Processes, salt: str) -> str:
    """Return a digest of a few of `count` rows and their numbers, which follow from the salt; "" if rows are random.

    PRIVATE. All processes must make this call; it does not depend on which of them has which rows.
    """
    numbers = np.random.default_rng(list(salt.encode())).integers(count, size=_COMPARED).tolist()
    with processes.all_succeed():
        one, again = ({n: _digest(take(np.array([n - rows.start]))) for n in numbers if n in rows} for _ in range(2))
    held = processes.gather_objects((one, one == again))
    found = sorted({pair for each, _ in held for pair in each.items()})
    return hashlib.sha256(repr((salt, found)).encode()).hexdigest() if all(is_same for _, is_same in held) else ""


def require_same_data(take: Callable[[np.ndarray], Any], count: int, processes: Processes) -> None:
    """Raise SamplingError in a process whose length or whose few random items differ from the first process's."""
    # The index of an example decides which process it belongs to. If the order differed between processes, two of them
    # could clip and sum the same example, which doubles its contribution.
    condition, remedy = "to be the same, in the same order, in every process", "shuffle it with one shared seed"
    indices = np.random.default_rng().integers(count, size=_COMPARED).tolist()
    first_count, indices = processes.broadcast_object([count, indices])
    with processes.all_succeed():
        if count != first_count:
            got = f"another number of examples in process {processes.rank} than in process 0"
            raise unusable("dataset", condition, got, remedy)
        own = _digest(take(np.array(indices)))
    first = processes.broadcast_object(own)
    with processes.all_succeed():
        # A data set with random items differs even between two readings in one process.
        if own != first and all(_digest(take(np.array(indices))) == own for _ in range(_REPEATS)):
            got = f"examples in process {processes.rank} that differ from those of process 0"
            raise unusable("dataset", condition, got, remedy)


def _digest(examples: Any) -> str:
    """Return a hash of a batch's content. PRIVATE: use it only to compare processes."""
    state = hashlib.sha256()
    for leaf in tree_flatten(examples)[0]:
        if isinstance(leaf, Tensor):
            state.update(leaf.detach().cpu().flatten().view(torch.uint8).numpy().data)
        else:
            state.update(repr(leaf).encode())
    return state.hexdigest()
