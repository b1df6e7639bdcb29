"""Poisson and fixed-size sampling: draws a Batch with a public record of how it was drawn.

`PrivacyPlan` calls `batches` and `BatchSampler`; `loading` loads what they draw. The privacy guarantee rests on this
file: the sample rate that draws a batch is the one that the ledger charges. It does not rest on `_other_container`,
`_is_column` and `ask_about_rows`, which find mistakes of usage.
"""

import hashlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from privgrad.class_rates import ClassRates
from privgrad.errors import SamplingError, described, expected, require_callable, require_integer
from privgrad.loading import Draw, Examples, load, require_loading
from privgrad.processes import ALONE, Processes, require_all_processes
from privgrad.reading import Collate, warn_of_generators
from privgrad.rng import RandomSource, Stream
from privgrad.types import Batch, PrivacyUnit, Sampling, SamplingScheme

_COMPARED = 8  # number of data set items that processes compare
_MANY_ROWS = 2.0  # rows per declared person from which a person may have several
_REPEATS = 20  # number of equal readings after which the items count as not random


def batches(
    sampler: "BatchSampler", *, num_workers: int = 0, prefetch_factor: int | None = None, pin_memory: bool = False
) -> Generator[Batch]:
    """Return an iterator over the batches of a sampler, loaded by torch's DataLoader.

    `PrivacyPlan.batches` calls this.

    Args:
        sampler: draws the batches, and holds the data set.
        num_workers: number of worker processes that load batches, each a whole batch; 0 loads in this process. The
            draws are made in this process and are the same for any number.
        prefetch_factor: number of batches that each worker loads in advance; None is torch's default, 2.
        pin_memory: copy batches to pinned memory, for a faster `Batch.to(device, non_blocking=True)`.
    Returns:
        An iterator of Batch, whose `close()` ends the workers. Examples have leading dimension `size`, which may be 0.
        Batches that hold a whole TensorDataset may share memory. A batch that was loaded in advance and not taken has
        cost nothing.
    Raises:
        PrivacyError: raised by the call: an option is out of range.
        SamplingError: raised by the iterator: collate does not return one row per example, or its rows depend on other
            examples; an example cannot be loaded; or a worker process died.
    Privacy:
        As BatchSampler. Workers get the indices and the keys of single steps.
    """
    require_loading("plan.batches", num_workers, prefetch_factor, pin_memory)
    return load(
        sampler.dataset,
        sampler,
        seed=sampler.worker_seed,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
    )


class BatchSampler(Sampler[Draw]):
    """A torch sampler of the draws of steps start, start + 1, ..., steps - 1.

    `PrivacyPlan.sampler` makes it with the plan's numbers. For a DataLoader of the user's own:
    `DataLoader(sampler.dataset, sampler=sampler, batch_size=None, ...)`, whose items are batches.

    Args:
        dataset: a map-style data set, with len() and integer indexing. Each example is a tensor, or a tuple, list or
            dict of values that default_collate takes. A ClassRates has a rate for each class.
        scheme: "poisson": every example is in a batch with probability sample_rate, independently of all else; a
            batch may be empty. "truncated": of such a sample with more than max_batch_size examples, as many at random;
            each batch is padded to that size. "fixed": the next expected_batch_size examples of a shuffled pass; the
            remainder of each pass is dropped.
        sample_rate: q in (0, 1]; with bands, of the people in the group of a step.
        expected_batch_size: B, public.
        num_examples: the public count; the data set must hold at least this many examples.
        steps: T.
        start: first step, for a resumed run. With bands and without a seed it is a multiple of them, because another
            sampler has other groups.
        source: the source of the random streams that draw the batches and seed random augmentation.
        collate: turns a non-empty list of examples into the batch's examples; default_collate if None. Each row must
            depend on its own example only: pad to a public length, not to the longest example of the batch. It must
            not be random.
        processes: the processes that train together. With several, process r of k draws among the examples r, r + k,
            r + 2k, ... Under a research seed, their batches together are the batch that a single process would draw.
            All processes must make this call, with the same data in the same order. The call compares the length and a
            few random items, unless the items themselves are random.
        privacy_unit: the plan's. For "user", each item must hold all data of one person.
        bands: b, the number of groups that take turns: each example is in one of them, drawn at random, and step t
            draws from group t mod b; see noise.Banded. 1: all examples are one group.
        max_batch_size: for "truncated", the number of rows of each batch. The data set must then have
            num_examples examples, or one less: epsilon depends on how often a batch is truncated.
    Raises:
        SamplingError: the data set has no length, no examples, fewer than num_examples, or too many for "truncated";
            batches are not Poisson in several processes or with ClassRates; start is no multiple of bands; or the data
            set differs from the one of the first process.
    Attributes:
        dataset: the data set of batches that a DataLoader needs.
        worker_seed: a seed for a DataLoader's worker processes.
        groups: with bands, the group of each example, shape (n,). PRIVATE: `audit.methods` reads it.
    Privacy:
        Under "poisson" the actual rate is at most sample_rate, and less than 2**-63 below it, or that times the
        example's rate of ClassRates. With bands, no example is in two batches that are fewer than b steps apart, and
        its group depends on no data. Draws come from a cryptographic stream. Without a seed each process has a
        stream of its own entropy. With a seed all processes share one stream, and each uses the words of its own
        examples. No accountant here covers "fixed". A second iteration makes the same draws, and the ledger refuses
        them.
    """

    def __init__(
        self,
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
        privacy_unit: PrivacyUnit = "example",
        bands: int = 1,
        max_batch_size: int | None = None,
    ) -> None:
        require_all_processes("plan.batches", processes)
        require_integer("plan.batches", "start", start, 0)
        if source.seed is None and start % bands and start < steps:
            condition, remedy = f"to be a multiple of {bands} for noise with memory", "give start=ledger.next_step"
            raise expected("plan.batches", "start", condition, start, remedy, SamplingError)
        if collate is not None:
            require_callable("plan.batches", "collate", collate, "give a function of a list of examples")
        with processes.all_succeed():
            _require_samplable(dataset, num_examples, scheme, processes)
        warn_of_generators(dataset.dataset if isinstance(dataset, ClassRates) else dataset)
        self._relative = dataset.relative if isinstance(dataset, ClassRates) else None
        self.dataset = Examples(dataset.dataset if isinstance(dataset, ClassRates) else dataset, collate)
        self._count = len(cast("Sequence[Any]", dataset))
        ask_about_rows(dataset, num_examples, privacy_unit)
        if processes.count > 1:
            _require_same_data(self.dataset.take, self._count, processes)
        self._steps = range(start, steps)
        self._stream, self._keys = source.stream("sampling"), source.stream("augmentation")
        self._scheme: SamplingScheme = scheme
        self._rate, self._size = sample_rate, expected_batch_size
        self._seed, self._rank, self._processes = source.seed, processes.rank, processes.count
        self._bands, self._largest = bands, max_batch_size
        self._of = num_examples if scheme == "truncated" else None
        self._truncating = source.stream("truncation")
        groups = source.stream("bands").uint64(0, self._count) if bands > 1 else np.zeros(0, np.uint64)
        self.groups = (groups % np.uint64(bands)).astype(np.uint16)
        self.worker_seed = int(source.stream("workers").uint64(start, processes.count)[processes.rank])

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Draw]:
        return map(self._draw, self._steps)

    def _draw(self, step: int) -> Draw:
        """Return the draw of a step."""
        if self._scheme == "poisson":
            if self._relative is None:
                chosen = _poisson(self._stream, step, self._rate, self._count)
            else:
                chosen = _poisson_each(self._stream, step, self._rate * self._relative)
            if self._bands > 1:
                chosen = chosen[self.groups[chosen] == step % self._bands]
            chosen = chosen[chosen % self._processes == self._rank]
        elif self._scheme == "truncated":
            chosen = _poisson(self._stream, step, self._rate, self._count)
            order = np.argsort(self._truncating.uint64(step, len(chosen)), kind="stable")
            chosen = np.sort(chosen[order[: self._largest]])
        else:
            chosen = _fixed(self._stream, step, self._size, self._count)
        facts = (self._scheme, self._rate, self._size, step, self._stream.public_id, self._seed)
        key = self._keys.uint64(step, 4 * self._processes)[4 * self._rank : 4 * self._rank + 4].tobytes()
        return Draw(chosen, key, Sampling(*facts, self._rank, self._processes, self._bands, self._largest, self._of))


def _require_samplable(
    dataset: Dataset[Any] | Sequence[Any], num_examples: int, scheme: SamplingScheme, processes: Processes
) -> None:
    """Raise SamplingError unless the scheme can sample the data set, and it holds num_examples examples."""
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
        raise refusal("to hold at least one example", "0 examples", "check its path")
    if len(data) < num_examples - (scheme == "truncated"):
        remedy = (
            "correct num_examples, the public count from which sample rate and batch size follow, or simulate the plan "
            f"on fewer public examples: plan.scaled(factor, num_examples={len(data)})"
        )
        if isinstance(dataset, tuple | list) and all(isinstance(column, Tensor | np.ndarray | list) for column in data):
            remedy = "pass torch.utils.data.TensorDataset(*map(torch.as_tensor, data)) if these are columns of a table"
        raise refusal(f"to hold at least {num_examples} examples", f"{len(data)} examples", remedy)
    if scheme == "truncated" and len(data) > num_examples:
        remedy = "correct num_examples: the cost of truncation depends on it"
        raise refusal(f"to hold at most {num_examples} examples for truncated batches", f"{len(data)}", remedy)
    if scheme != "poisson" and processes.count > 1:
        condition, remedy = "to be 'poisson' in several processes", "draw Poisson batches, or train in one process"
        raise expected(function, "sampling", condition, repr(scheme), remedy, SamplingError)
    if scheme != "poisson" and isinstance(dataset, ClassRates):
        condition, remedy = "to be 'poisson' for ClassRates", "draw Poisson batches: others have no rates"
        raise expected(function, "sampling", condition, repr(scheme), remedy, SamplingError)


def ask_about_rows(dataset: object, num_examples: int, privacy_unit: PrivacyUnit) -> None:
    """Warn if a data set has many more items than the plan declares people. The warning is NOT private.

    `fit` and the bridges call it as soon as they have the data, before anything is spent. All calls warn from one line,
    so that Python prints the same warning once.
    """
    count = len(dataset) if privacy_unit == "user" and isinstance(dataset, Sized) else 0
    if count > _MANY_ROWS * num_examples:
        warnings.warn(
            f"NOT PRIVATE: the plan declares {num_examples:,} people, and the data set has more than {_MANY_ROWS:g} "
            "times as many rows. Does each row hold all data of one person? If a person has several rows, group them "
            "first, for example by privgrad.data.by_user. Otherwise num_examples is far below the number of persons, "
            "and the model gets more noise than it needs: raise it if a public number allows.",
            stacklevel=1,
        )


def _other_container(dataset: object) -> tuple[str, str] | None:
    """Return a description of a container that is not a map-style data set, and the remedy; None for anything else.

    pandas and polars are recognized by the names of their modules, so that neither has to be imported.
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
    if library == "privgrad" and hasattr(dataset, "train"):
        return f"a {kind} of privgrad", "pass its .train"
    if library in ("pandas", "polars") and kind == "DataFrame":
        dropped = "data.drop(columns='label')" if library == "pandas" else "data.drop('label')"
        inputs = f"torch.tensor({dropped}.to_numpy(), dtype=torch.float32)"
        line = f"{tensors}({inputs}, torch.tensor(data['label'].to_numpy()))"
        return f"a {library} DataFrame", f"pass {line}, where 'label' is the column to predict"
    if library in ("pandas", "polars") and kind == "Series":
        return f"a {library} Series", f"pass {tensors}(torch.tensor(data.to_numpy())), with labels as a second tensor"
    if isinstance(dataset, Mapping):
        parts = cast("Mapping[object, object]", dataset)
        if all(hasattr(part, "__getitem__") and not _is_column(part) for part in parts.values()) and parts:
            name = next(iter(parts))
            return f"a {kind} of data sets", f"pass one of them: data[{name!r}]"
        if 0 not in parts:
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
    """Return whether a part of a mapping is a column of values rather than a data set."""
    library = type(part).__module__.partition(".")[0]
    return isinstance(part, list | tuple | str | np.ndarray | Tensor) or library in ("pandas", "polars")


def _require_same_data(take: Callable[[np.ndarray], Any], count: int, processes: Processes) -> None:
    """Raise SamplingError in a process whose data set differs from the one of the first process.

    Compares the length and a few random items. The index of an example decides which process it belongs to. If the
    order differed between processes, two of them could clip and sum the same example, which doubles its contribution.
    """
    condition = "to be the same in every process"
    remedy = "give each process the same data set in the same order: shuffle it with one shared seed"
    indices = np.random.default_rng().integers(count, size=_COMPARED).tolist()
    first_count, indices = processes.broadcast_object([count, indices])

    with processes.all_succeed():
        if count != first_count:
            got = f"{count} examples in process {processes.rank} and {first_count} in process 0"
            raise expected("plan.batches", "dataset", condition, got, remedy, SamplingError)
        own = _digest(take(np.array(indices)))
    first = processes.broadcast_object(own)
    with processes.all_succeed():
        # A data set with random items differs even between two readings in one process.
        if own != first and all(_digest(take(np.array(indices))) == own for _ in range(_REPEATS)):
            got = f"process {processes.rank} with examples that differ from those of process 0"
            raise expected("plan.batches", "dataset", condition, got, remedy, SamplingError)


def _digest(examples: Any) -> str:
    """Return a hash of a batch's content. PRIVATE: use it only to compare processes."""
    state = hashlib.sha256()
    for leaf in tree_flatten(examples)[0]:
        if isinstance(leaf, Tensor):
            state.update(leaf.detach().cpu().flatten().view(torch.uint8).numpy().data)
        else:
            state.update(repr(leaf).encode())
    return state.hexdigest()


def _poisson(stream: Stream, step: int, sample_rate: float, count: int) -> np.ndarray:
    """Return the indices of the examples drawn, each independently with probability sample_rate."""
    if sample_rate == 1:
        return np.arange(count)
    threshold = np.uint64(int(sample_rate * 2.0**64))
    return np.flatnonzero(stream.uint64(step, count) < threshold)


def _poisson_each(stream: Stream, step: int, rates: np.ndarray) -> np.ndarray:
    """Return the indices of the examples drawn, each independently with its rate in `rates`, shape (count,)."""
    thresholds = np.minimum(rates * 2.0**64, np.nextafter(2.0**64, 0)).astype(np.uint64)
    return np.flatnonzero((stream.uint64(step, len(rates)) < thresholds) | (rates == 1))


def _fixed(stream: Stream, step: int, size: int, count: int) -> np.ndarray:
    """Return the next `size` indices of a shuffled pass; no accountant covers this scheme."""
    if size > count:
        condition = f"to be at most {count}, the size of the data set"
        raise expected("plan.batches", "expected_batch_size", condition, size, "lower it", SamplingError)
    shuffle, position = divmod(step, count // size)
    order = np.argsort(stream.uint64(shuffle, count), kind="stable")
    return order[position * size : (position + 1) * size]
