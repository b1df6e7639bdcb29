"""Load the examples of a draw: in this process, or in worker processes of torch's DataLoader."""

import math
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from operator import itemgetter
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info  # pyright: ignore[reportUnknownVariableType]

from privgrad.errors import PrivacyError, SamplingError, described, expected, require_integer
from privgrad.rng import numpy_and_python_kept, set_states
from privgrad.types import Batch, Sampling, count_examples, map_examples, named_leaves

Collate = Callable[[list[Any]], Any]
Data = Dataset[Any] | Sequence[Any]  # map-style

_SAMPLED, _SECONDS = 512, 0.25  # the most items, and seconds, that are loaded to find the extremes
_DRAWN = "leave it out: each step draws every example with the public rate of the plan"
_HABITS = {  # arguments of a DataLoader that plan.batches does not take, with the remedy
    **dict.fromkeys(("shuffle", "drop_last", "batch_sampler"), _DRAWN),
    "batch_size": "give expected_batch_size to the plan: batches have random sizes around it",
    "sampler": f"{_DRAWN}; for rates of classes, give ClassRates(dataset, labels, rates)",
    "worker_init_fn": "leave it out: each worker has secret seeds",
    "generator": "leave it out, or give the plan a research seed: PrivacyPlan(seed=...)",
    "persistent_workers": "leave it out: workers live until the last step",
}
_REPEATS = 20  # number of calls after which rows that differ count as random


def refuse_habits(options: Mapping[str, object]) -> None:
    """Raise PrivacyError for an argument of a DataLoader, with what to do instead; TypeError for an unknown one."""
    for name, value in options.items():
        if name not in _HABITS:
            raise TypeError(f"PrivacyPlan.batches() got an unexpected keyword argument {name!r}")
        raise expected("plan.batches", name, "to be left out", described(value), _HABITS[name])


def unusable(name: str, condition: str, got: object, remedy: str = "") -> PrivacyError:
    """Return the error for a data set that cannot be sampled, or a batch that cannot be loaded."""
    return expected("plan.batches", name, condition, got, remedy, SamplingError)


def item(data: Sequence[Any], index: int) -> Any:
    """Return one example; raise SamplingError if the data set raises an exception."""
    try:
        return data[index]
    except PrivacyError:
        raise
    except Exception as error:  # whatever a data set of the user raises
        remedy = "replace or remove this example, or correct __getitem__, which takes integers from 0"
        raise unusable("dataset", f"to load each example, also at index {index}", summary(error), remedy) from error


def summary(error: Exception) -> str:
    """Return the class and the text of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(f'{error}'.split()).rstrip('.')[:300]}"


def default_collated(items: list[Any]) -> Any:
    """Collate items by torch's default_collate, or raise SamplingError where it would fail or mix examples up."""
    require_alike("plan.batches", items, SamplingError)
    first = items[0]
    if is_dataclass(first) and not isinstance(first, type):
        parts = {each.name: default_collated([getattr(one, each.name) for one in items]) for each in fields(first)}
        return type(first)(**parts)
    # default_collate would return one tensor for each place in a list, in place of one row for each example. Only an
    # example as a whole may be a list of numbers, whose places are then as those of a tuple.
    parts = tuple(cast("list[Any]", first)) if isinstance(first, list) else first
    for name, part in named_leaves("example", parts, _is_list_of_numbers):
        if part is None or isinstance(part, str | bytes | list):
            remedy = f'turn {name} into a tensor in the data set (by with_format("torch") of datasets), or leave it out'
            raise unusable(name, "to be a tensor or a number", type(cast(object, part)).__name__, remedy)
    try:
        return cast(Collate, default_collate)(items)
    except (TypeError, RuntimeError) as error:
        got = f"examples of type {type(items[0]).__name__}: {str(error).splitlines()[0].rstrip('.')}"
        remedy = "turn each example into tensors of one shape in the data set, or give collate="
        raise unusable("dataset", "to hold tensors and numbers", got, remedy) from error


def _is_list_of_numbers(part: object) -> bool:
    return isinstance(part, list) and all(isinstance(one, Real) for one in cast("list[object]", part))


def require_alike(function: str, items: Iterable[Any], error: type[PrivacyError] = PrivacyError) -> None:
    """Raise an error unless all items have the same keys, types, dtypes and shapes."""
    # default_collate takes the keys from the first item of a batch, and torch turns all into floats if one is a float.
    # So one person's item would change the rows of others.
    rows = iter(items)
    first = next(rows, None)
    form = _form(first)
    for one in rows:
        if _form(one) != form:
            known, own = (dict(named_leaves("example", item)) for item in (first, one))
            differing = (name for name in known if name in own and _form(known[name]) != _form(own[name]))
            got = f"two kinds of {next(differing, 'structure')}"
            condition = "to have examples of the same keys, types, dtypes and shapes"
            remedy = "convert all to one form in the data set: pad to a public length, and fill in what is missing"
            raise expected(function, "dataset", condition, got, remedy, error)


def _form(value: object) -> object:
    """Return what of an example decides how a batch with it is collated: all but the numbers and texts themselves."""
    if isinstance(value, Tensor | np.ndarray):
        array = cast(Any, value)
        return str(array.dtype), tuple(map(int, array.shape))
    if isinstance(value, Mapping):
        held = cast("Mapping[object, object]", value)
        return {key: _form(part) for key, part in held.items()}
    if isinstance(value, list | tuple):
        return type(cast(object, value)), [_form(part) for part in cast("Sequence[object]", value)]
    return type(value)


def require_rows(collate: Collate, items: list[Any], examples: Any) -> None:
    """Raise SamplingError unless collate returned one row per example, each independent of the other examples."""
    if count_examples(examples) != len(items):  # both numbers are private
        raise unusable("collate", "to return one row per example", "a different number of rows")
    for index, item in enumerate(items[:2]):  # a check, not a proof
        alone = row_of(collate([item]), 0)
        if same_row(row_of(examples, index), alone):
            continue
        got, remedy = "rows that depend on other examples", "pad to a public length, not to the longest of the batch"
        if not all(same_row(row_of(collate([item]), 0), alone) for _ in range(_REPEATS)):
            remedy = "augment in __getitem__, from that item alone, or by augmentation.multiplicity with views >= 2"
            got = "rows that change from call to call"
        raise unusable("collate", "to return rows that depend on their own example only", got, remedy)


def _size(example: Any) -> int:
    parts = [part for _, part in named_leaves("", example)]
    sized = (len(part) if isinstance(part, str | bytes) else getattr(part, "shape", (1,)) for part in parts)
    return sum(size if isinstance(size, int) else math.prod(size) for size in sized)


def row_of(examples: Any, index: int) -> list[Any]:
    """Return the leaves of one row."""
    return tree_leaves(map_examples(itemgetter(index), examples))


def same_row(one: list[Any], other: list[Any]) -> bool:
    """Return whether two rows have equal tensors; NaN equals NaN."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True)
class Draw:
    """The indices of one step's examples, before they are loaded. PRIVATE, except for `sampling`."""

    indices: np.ndarray  # shape (size,), int64
    key: bytes  # 32 bytes for random augmentation of this step; secret, unless the plan has a research seed
    sampling: Sampling


class Examples(Dataset[Batch]):
    """A data set whose index is a Draw, and whose items are batches. Give it to a DataLoader with batch_size=None.

    Global random numbers follow the draw's own key while its examples are read and collated. Random augmentation is
    therefore the same in every process, and after a resume.

    Privacy:
        Random augmentation must not depend on which other examples were drawn. The random numbers of an example follow
        its place in the batch, and how many numbers the examples before it took. They are secret and alike at all
        places, so to anyone else each example has numbers of its own: docs/mathematics.md, section 0. The key gives
        each generator 256 secret bits or more, because seeds of 32 bits could be tried.
    """

    require_no_memory: ClassVar[Any]  # of privgrad.checks, on which nothing here stands

    def __init__(self, dataset: Data, collate: Collate | None) -> None:
        self._data, self._collate = cast("Sequence[Any]", dataset), collate
        # Not for subclasses: their indexing may hide or change columns.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None
        self._tried = self._tensors is not None  # whose rows are alike
        self._whole: list[Tensor] = []
        self._versions: list[int] = []

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw; errors are as in `batches`."""
        if not self._tried:
            self._tried = True
            with _keyed(draw.key):
                self._try_extremes(draw.key)
        chosen = draw.indices
        if (rows := draw.sampling.max_batch_size) is not None:  # padding: copies of an example, which count for nothing
            copied = chosen[:1] if len(chosen) else np.zeros(1, np.int64)
            chosen = np.concatenate([chosen, np.repeat(copied, rows - len(chosen))])
        with nullcontext() if self._tensors is not None else _keyed(draw.key):  # tensors draw no random numbers
            return Batch(self.take(chosen), len(draw.indices), draw.sampling)

    # Fault: a collate that pads to the longest of the batch, where nearly all are cut to one length. Pairs of other
    #     lengths then come late, after releases were paid for (cases/holes/collate_fails_late.py).
    # Cost: it loads up to 512 items at random, for at most 0.25 s, before the first batch. Of several workers, only
    #     the first one does. The main process reads none then: a file that it opens would be shared with the workers.
    # Refuses what a batch with the two items would be refused for. It cannot see lengths that no sampled item has.
    def _try_extremes(self, key: bytes) -> None:
        """Collate the smallest and the largest of a few items; SamplingError if their rows depend on each other."""
        worker, end = get_worker_info(), time.monotonic() + _SECONDS
        if worker is not None and worker.id > 0:
            return
        sizes: list[tuple[int, int]] = []
        try:
            drawn = np.random.default_rng(list(key)).integers(len(self._data), size=_SAMPLED)
            for index in map(int, drawn):
                sizes.append((_size(self._data[index]), index))
                if time.monotonic() > end:
                    break
            pair = np.array([min(sizes)[1], max(sizes)[1]])
            if self._collate is not None:
                self.require_no_memory(self._collate, [item(self._data, int(index)) for index in pair])
            self.take(pair)
        except PrivacyError:
            raise
        except Exception:  # the batch that needs this item raises it, with its text
            return

    def take(self, chosen: np.ndarray) -> Any:
        """Return the chosen examples, collated, without a seed; `chosen` is int64, shape (size,), perhaps empty."""
        if self._tensors is not None:
            return self._rows(self._tensors, torch.from_numpy(chosen))
        collate = default_collated if self._collate is None else self._collate
        if len(chosen) == 0:
            # Example 0 gives the structure, dtypes and shapes, which all examples share; its content is dropped.
            return map_examples(lambda leaf: leaf[:0], collate([item(self._data, 0)]))
        items = [item(self._data, int(index)) for index in chosen]
        examples = collate(items)
        if self._collate is not None:
            require_rows(self._collate, items, examples)
        return examples

    def _rows(self, tensors: tuple[Tensor, ...], chosen: Tensor) -> tuple[Tensor, ...]:
        """Return rows of the tensors. Batches of all rows share one copy, which is made again after a write to it."""
        # A worker shares no copy: its batches lie in memory that the main process may write to unnoticed.
        # The number alone does not decide: a padded batch can have as many rows as the data set, and hold others.
        is_whole = len(chosen) == len(tensors[0]) and bool(chosen.equal(torch.arange(len(chosen))))
        if not is_whole or get_worker_info() or any(tensor.is_inference() for tensor in tensors):
            return tuple(tensor[chosen] for tensor in tensors)
        if not self._whole or [tensor._version for tensor in (*tensors, *self._whole)] != self._versions:
            self._whole = [tensor.clone() for tensor in tensors]
            self._versions = [tensor._version for tensor in (*tensors, *self._whole)]
        return tuple(self._whole)


def batches(
    sampler: Any, *, num_workers: int = 0, prefetch_factor: int | None = None, pin_memory: bool = False
) -> Generator[Batch]:
    """Return an iterator over the batches of a sampler, loaded by torch's DataLoader.

    Args:
        sampler: a BatchSampler.
        num_workers: number of worker processes that load batches, each a whole batch; 0 loads in this process. The
            draws are made in this process and are the same for any number.
        prefetch_factor: number of batches that each worker loads in advance; None is torch's default, 2.
        pin_memory: copy batches to pinned memory, for a faster `Batch.to(device, non_blocking=True)`.
    Returns:
        An iterator of Batch, whose `close()` ends the workers. Examples have leading dimension `size`, which may be 0.
        Batches that hold a whole TensorDataset may share memory. A batch that was loaded in advance and not taken has
        cost nothing. Leave a batch out only by a rule that does not look at it: to skip empty batches, for example,
        would release which draws were empty.
    Raises:
        PrivacyError, ValueError: raised by the call: an option is out of range.
        SamplingError: raised by the iterator: collate does not return one row per example, or its rows depend on other
            examples; an example cannot be loaded; or a worker process died.
    Privacy:
        As BatchSampler. Workers get the indices and the keys of single steps.
    """
    if prefetch_factor is not None:  # torch takes 0, and then yields no batches
        require_integer("plan.batches", "prefetch_factor", prefetch_factor, 1)
    dataset = sampler.dataset
    loader: DataLoader[Any] = DataLoader(
        _Reported(dataset) if num_workers else dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        # torch would take the workers' seed from its global random numbers, and so change these.
        generator=torch.Generator().manual_seed(sampler.worker_seed),
    )
    return _from_workers(loader) if num_workers else (batch for batch in loader)


@contextmanager
def _keyed(key: bytes) -> Generator[None]:
    """Give the global random numbers of torch (on the CPU), numpy and Python states from a key, and restore them."""
    before = torch.default_generator.get_state()
    with numpy_and_python_kept():
        try:
            set_states(key)
            yield
        finally:
            torch.default_generator.set_state(before)


class _Reported(Dataset[Batch | PrivacyError]):
    """Examples for a worker: an exception is returned, because torch would raise it with a text of its own."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __getitem__(self, draw: Draw) -> Batch | PrivacyError:
        try:
            return self._examples[draw]
        except Exception as error:
            is_ours = isinstance(error, PrivacyError)
            told = error if is_ours else unusable("each batch", "to be collated", summary(error))
            told.add_note(f"in a worker process:\n{traceback.format_exc()}")  # it would not travel as a cause
            return told


def _from_workers(loader: DataLoader[Any]) -> Generator[Batch]:
    """Yield the batches that the workers load; raise SamplingError if one cannot. `close()` ends the workers."""
    batches = None
    try:
        batches = iter(loader)
        for batch in batches:
            if isinstance(batch, PrivacyError):
                raise batch
            yield batch
    except RuntimeError as error:  # of torch: exceptions of the data set arrive as PrivacyError
        raise _explained(error) from error.__cause__
    finally:
        # At once: a later garbage collection would take 5 s for each worker. torch has no public function for it.
        getattr(batches, "_shutdown_workers", int)()


def _explained(error: BaseException) -> BaseException:
    """Return torch's error for a dead worker as one of this library; return any other error as it is."""
    first = error
    while isinstance(first.__cause__, RuntimeError):  # the first one knows the signal or the exit code
        first = first.__cause__
    got = f"{first}".strip().split(". ")[0].rstrip(".")
    if not got.startswith("DataLoader worker"):
        return error
    remedy = "take fewer workers or a lower prefetch_factor; with num_workers=0, an error of the data set shows itself"
    return unusable("every worker", "to live until the last batch", got, remedy)
