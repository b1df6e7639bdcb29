"""Poisson and fixed-size sampling -> Batch, with its own sampling facts.

The rate that draws the batch is the field that the accountant is charged with.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from privgrad.errors import SamplingError, described, expected, require_callable, require_integer
from privgrad.processes import ALONE, Processes, require_told
from privgrad.rng import RandomSource, Stream
from privgrad.types import Batch, Sampling, SamplingScheme, count_examples, map_examples

Collate = Callable[[list[Any]], Any]

_COMPARED = 8  # items of the data set, between processes
_REPEATS = 20  # of reading them, before a data set counts as one that does not change by chance


def batches(
    dataset: Dataset[Any] | Sequence[Any],
    *,
    scheme: SamplingScheme,
    sample_rate: float,
    expected_batch_size: int,
    num_examples: int,
    steps: int,
    start: int = 0,
    source: RandomSource,
    collate: Collate | None = None,
    processes: Processes = ALONE,
) -> Iterator[Batch]:
    """Yield the batches of steps start, start + 1, ..., steps - 1.

    Args:
        dataset: map-style: len() and integer indexing. Each example is a tensor or a tuple, list or dict of what
            default_collate takes.
        scheme: "poisson": every example is in a batch with probability sample_rate, independently of all else; a
            batch may be empty. "fixed": expected_batch_size examples of a shuffled pass, the rest of a pass
            dropped.
        sample_rate: q in (0, 1].
        expected_batch_size: B, public.
        num_examples: the public count; the data set must hold at least as many.
        steps: T.
        start: first step, for a resumed run.
        source: where the draws come from.
        collate: turns a non-empty list of examples into the batch's examples; default_collate if None. Each row is to
            depend on its own example only: pad to a public length, not to the batch's longest.
        processes: that train together: of several, each draws among its own examples, every so many-th of the data
            set. Under a research seed their batches together are the one that a single process would draw. All make
            this call, with the same data in the same order: its length and a few items, chosen anew in each call, are
            compared, unless items change by themselves.
    Returns:
        An iterator of Batch; examples have leading dimension `size`, 0 included. Batches that hold a whole
        TensorDataset may share memory.
    Raises:
        SamplingError: no length or no examples, fewer examples than num_examples, fixed batches in several processes,
            or a data set that is not the first process' (raised by the call itself); a collate whose rows are not one
            an example, or depend on their companions (raised by the iterator).
    Privacy:
        Under "poisson" the rate is at most sample_rate, by less than 2**-63, and drawn from a cryptographic stream: one
        a process, of its own entropy; under a seed one for all, of which each takes the words of its own examples.
        "fixed" is covered by no accountant here.
    """
    require_told("plan.batches", processes)
    require_integer("plan.batches", "start", start, 0)
    if collate is not None:
        require_callable("plan.batches", "collate", collate, "give a function of a list of examples")
    processes.run_on_all(lambda: _require_samplable(dataset, num_examples, scheme, processes))
    data, take = cast(Sequence[Any], dataset), _taker(dataset, collate)
    if processes.count > 1:
        _require_same_data(take, len(data), processes)
    stream = source.stream("sampling")
    rank, count = processes.rank, processes.count

    def draws() -> Iterator[Batch]:
        for step in range(start, steps):
            if scheme == "poisson":
                chosen = _poisson(stream, step, sample_rate, len(data))
                chosen = chosen[chosen % count == rank]
            else:
                chosen = _fixed(stream, step, expected_batch_size, len(data))
            sampling = Sampling(
                scheme, sample_rate, expected_batch_size, step, stream.public_id, source.seed, rank, count
            )
            yield Batch(take(chosen), len(chosen), sampling)

    return draws()


def _require_samplable(
    dataset: Dataset[Any] | Sequence[Any], num_examples: int, scheme: SamplingScheme, processes: Processes
) -> None:
    function = "plan.batches"

    def refusal(condition: str, got: str, remedy: str) -> Exception:
        return expected(function, "dataset", condition, got, remedy, SamplingError)

    if problem := _other_container(dataset):
        raise refusal("to have a length, and an example at each index below it", *problem)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        remedy = "wrap the data in a map-style data set: a stream cannot be sampled at a known rate"
        raise refusal("to have a length", type(dataset).__name__, remedy)
    data = cast(Sequence[Any], dataset)
    if len(data) == 0:
        raise refusal("to hold examples", "none", "check its path")
    if len(data) < num_examples:
        remedy = "correct num_examples, the public count that rate and batch size rest on"
        if isinstance(dataset, tuple | list) and all(isinstance(column, Tensor | np.ndarray | list) for column in data):
            remedy = "pass torch.utils.data.TensorDataset(*map(torch.as_tensor, data)) if these are columns of a table"
        raise refusal(f"to hold {num_examples} examples", f"only {len(data)}", remedy)
    if scheme == "fixed" and processes.count > 1:
        remedy = "draw Poisson batches, or train in one process"
        raise expected(function, "sampling", "to be 'poisson' in several processes", "'fixed'", remedy, SamplingError)


def _other_container(dataset: object) -> tuple[str, str] | None:
    """Say what a container of data is that is no map-style data set, and how to make one of it; None for all else.

    pandas and polars are recognized by the names of their modules: neither is imported.
    """
    kind, library = type(dataset).__name__, type(dataset).__module__.partition(".")[0]
    tensors = "torch.utils.data.TensorDataset"
    if isinstance(dataset, DataLoader):
        return "a DataLoader", "pass its .dataset: batches are drawn here"
    if isinstance(dataset, IterableDataset):
        return f"an IterableDataset ({kind})", "write __len__ and __getitem__: a stream has no known sampling rate"
    if isinstance(dataset, str | bytes | Path):
        return described(f"{dataset}"), f"read the file, and pass {tensors}(inputs, labels)"
    if isinstance(dataset, type):
        return f"the class {dataset.__name__}", f"pass an instance: {dataset.__name__}(...)"
    if library in ("pandas", "polars") and kind == "DataFrame":
        dropped = "data.drop(columns='label')" if library == "pandas" else "data.drop('label')"
        inputs = f"torch.tensor({dropped}.to_numpy(), dtype=torch.float32)"
        line = f"{tensors}({inputs}, torch.tensor(data['label'].to_numpy()))"
        return f"a {library} DataFrame", f"pass {line}, where 'label' is the column to predict"
    if library in ("pandas", "polars") and kind == "Series":
        return f"a {library} Series", f"pass {tensors}(torch.tensor(data.to_numpy())), with labels as a second tensor"
    if isinstance(dataset, Mapping):
        held = cast("Mapping[object, object]", dataset)
        if all(hasattr(part, "__getitem__") and not _is_column(part) for part in held.values()) and held:
            name = next(iter(held))
            return f"a {kind} of data sets", f"pass one of them: data[{name!r}]"
        if 0 not in held:
            line = f"{tensors}(*map(torch.as_tensor, data.values()))"
            return f"a {kind} of columns", f"pass {line}, which gives the columns in this order"
    if isinstance(dataset, np.ndarray | Tensor) and dataset.ndim == 0:
        return "an array without rows", f"pass {tensors}(inputs, labels)"
    if isinstance(dataset, np.ndarray) and dataset.dtype.names is not None:
        fields = list(cast("tuple[str, ...]", dataset.dtype.names))
        line = f"{tensors}(*(torch.tensor(data[name].copy()) for name in {fields}))"
        return f"a numpy array of fields {', '.join(fields)}", f"pass {line}"
    if isinstance(dataset, np.ndarray) and dataset.dtype.kind not in "biuf":
        line = f"{tensors}(torch.tensor(data.astype('float32')))"
        return f"a numpy array of dtype {dataset.dtype}", f"pass {line}, once all in it are numbers"
    return None


def _is_column(part: object) -> bool:
    """Whether it is a column of values, rather than a data set."""
    library = type(part).__module__.partition(".")[0]
    return isinstance(part, list | tuple | str | np.ndarray | Tensor) or library in ("pandas", "polars")


def _require_same_data(take: Callable[[Tensor], Any], count: int, processes: Processes) -> None:
    """Raise SamplingError in a process whose data set is not the first one's, by its length and a few of its items.

    An example belongs to the process that its place in the data set names: at another place in each, it would be
    clipped and summed twice.
    """
    condition, remedy = "to be the first process'", "give each the same data set in the same order: shuffle by a seed"
    places = np.random.default_rng().integers(count, size=_COMPARED).tolist()
    first_count, places = processes.broadcast_object([count, places])

    def digest() -> str:
        if count != first_count:
            got = f"{count} examples for its {first_count}"
            raise expected("plan.batches", "dataset", condition, got, remedy, SamplingError)
        return _digest(take(torch.tensor(places)))

    mine = processes.run_on_all(digest)
    first = processes.broadcast_object(mine)

    def require() -> None:
        # A data set that changes its items by chance is never the same, not even here.
        if mine != first and all(digest() == mine for _ in range(_REPEATS)):
            raise expected("plan.batches", "dataset", condition, "other examples in places", remedy, SamplingError)

    processes.run_on_all(require)


def _digest(examples: Any) -> str:
    """Hash of a batch's content. PRIVATE: for comparison between processes only."""
    state = hashlib.sha256()
    for leaf in tree_flatten(examples)[0]:
        if isinstance(leaf, Tensor):
            state.update(leaf.detach().cpu().flatten().view(torch.uint8).numpy().data)
        else:
            state.update(repr(leaf).encode())
    return state.hexdigest()


def _poisson(stream: Stream, step: int, sample_rate: float, count: int) -> Tensor:
    if sample_rate == 1:
        return torch.arange(count)
    threshold = np.uint64(int(sample_rate * 2.0**64))
    return torch.from_numpy(np.flatnonzero(stream.uint64(step, count) < threshold))


def _fixed(stream: Stream, step: int, size: int, count: int) -> Tensor:
    if size > count:
        got = f"{size} of {count} examples"
        raise expected("plan.batches", "expected_batch_size", "to fit", got, "lower it", SamplingError)
    shuffle, position = divmod(step, count // size)
    order = np.argsort(stream.uint64(shuffle, count), kind="stable")
    return torch.from_numpy(order[position * size : (position + 1) * size])


def _taker(dataset: Dataset[Any] | Sequence[Any], collate: Collate | None) -> Callable[[Tensor], Any]:
    """A function from indices to collated examples that also serves an empty selection."""
    # Not for subclasses: theirs may be an indexing that hides or changes columns.
    if type(dataset) is TensorDataset and collate is None:
        return _tensor_taker(dataset.tensors)
    data = cast(Sequence[Any], dataset)
    collate_list = cast(Collate, default_collate) if collate is None else collate

    def take(chosen: Tensor) -> Any:
        if len(chosen) == 0:
            # One example lends the structure, dtypes and shapes; none of its content is kept.
            return map_examples(lambda leaf: leaf[:0], collate_list([_item(data, 0)]))
        items = [_item(data, int(index)) for index in chosen]
        examples = _collated(collate_list, items) if collate is None else collate_list(items)
        if collate is not None:
            _require_rows(collate, items, examples)
        return examples

    return take


def _item(data: Sequence[Any], index: int) -> Any:
    try:
        return data[index]
    except (KeyError, IndexError, NotImplementedError) as error:
        condition, got = "to have an example at each index below its length", f"{type(error).__name__} at {index}"
        remedy = "write __getitem__ for integers from 0, or pass torch.utils.data.TensorDataset(inputs, labels)"
        raise expected("plan.batches", "dataset", condition, got, remedy, SamplingError) from error


def _collated(collate: Collate, items: list[Any]) -> Any:
    """Return what torch's default_collate makes of items, or say what it cannot make tensors of."""
    try:
        return collate(items)
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        remedy = "turn each example into tensors of one shape in the data set, or give collate="
        raise expected(
            "plan.batches", "dataset", "to hold tensors and numbers", reason, remedy, SamplingError
        ) from error


def _tensor_taker(tensors: tuple[Tensor, ...]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """As _taker; batches that hold everything share one copy until someone writes to it, or to the data set."""
    whole: list[Tensor] = []
    versions: list[int] = []

    def take(chosen: Tensor) -> tuple[Tensor, ...]:
        if len(chosen) < len(tensors[0]) or any(tensor.is_inference() for tensor in tensors):
            return tuple(tensor[chosen] for tensor in tensors)
        if not whole or [tensor._version for tensor in (*tensors, *whole)] != versions:
            whole[:] = [tensor.clone() for tensor in tensors]
            versions[:] = [tensor._version for tensor in (*tensors, *whole)]
        return tuple(whole)

    return take


def _require_rows(collate: Collate, items: list[Any], examples: Any) -> None:
    """One row an example, and the first rows as if their examples had been collated alone."""
    remedy = "treat each example by itself: pad to a public length, not to the longest of the batch"

    def refusal(condition: str, got: str) -> SamplingError:
        return SamplingError(f"plan.batches: expected collate {condition}, got {got}; {remedy}.")

    if count_examples(examples) != len(items):
        raise refusal("to give one row an example", "another number of rows")
    for index, item in enumerate(items[:2]):
        together, _ = tree_flatten(map_examples(itemgetter(index), examples))
        alone, _ = tree_flatten(map_examples(itemgetter(0), collate([item])))
        same = len(together) == len(alone) and all(map(torch.equal, together, alone))
        if not same:
            raise refusal("to give rows that depend on their own example only", "rows that change with the others")
