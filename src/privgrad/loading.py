"""Load the examples of a draw: in this process, or in worker processes of torch's DataLoader.

`sampling` draws, and calls this file to read and collate what was drawn. The privacy guarantee rests on `Examples`: a
batch holds the drawn examples and no others, each row of it depends on one example, and random augmentation follows a
key that nobody knows. It does not rest on the rest of this file, which runs workers and explains their failures.
"""

import pickle
import signal
import threading
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    TensorDataset,
    get_worker_info,
)

from privgrad.errors import PrivacyError, SamplingError, described, expected, require_integer
from privgrad.global_streams import numpy_and_python_kept, set_states
from privgrad.reading import Collate, default_collated, item, require_rows, summary
from privgrad.types import Batch, Sampling, map_examples


@dataclass(frozen=True)
class Draw:
    """The indices of one step's examples, before they are loaded. PRIVATE, except for `sampling`.

    `sampling.BatchSampler` makes it, in the main process. It travels to a worker of a DataLoader.

    Attributes:
        indices: of the drawn examples, shape (size,), int64.
        key: 32 bytes for random augmentation of this step. Secret, unless the plan has a research seed.
        sampling: the public record of the draw.
    """

    indices: np.ndarray
    key: bytes
    sampling: Sampling


class Examples(Dataset[Batch]):
    """A data set whose index is a Draw, and whose items are batches. Give it to a DataLoader with batch_size=None.

    Torch's, numpy's and Python's global random numbers follow the draw's own key while its examples are read and
    collated, and have their former state afterwards. Random augmentation is therefore the same in every process, and
    after a resume. `sampling.BatchSampler` makes it, and DataLoaders call it.

    Args:
        dataset: as in sampling.BatchSampler.
        collate: as in sampling.BatchSampler.
    Privacy:
        Random augmentation must not depend on which other examples were drawn. With a secret key it does not: to
        anyone else, each example gets random numbers of its own. The key gives each generator its whole state, because
        seeds of 32 bits could be tried.
    """

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], collate: Collate | None) -> None:
        self._data, self._collate = cast("Sequence[Any]", dataset), collate
        # Not for subclasses: their indexing may hide or change columns.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None
        self._whole: list[Tensor] = []
        self._versions: list[int] = []

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw.

        Raises:
            SamplingError: the index is not a Draw; the data set refuses an index; or collate does not return one row
                per example, or its rows depend on other examples or change from call to call.
        """
        if not isinstance(draw, Draw):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = (
                "make DataLoader(sampler.dataset, sampler=sampler, batch_size=None) with sampler=plan.sampler(data)"
            )
            raise expected("plan.sampler", "each index", "to be a draw", described(draw), remedy, SamplingError)
        chosen = draw.indices
        if (rows := draw.sampling.max_batch_size) is not None:  # padding: copies of an example, which count for nothing
            copied = chosen[:1] if len(chosen) else np.zeros(1, np.int64)
            chosen = np.concatenate([chosen, np.repeat(copied, rows - len(chosen))])
        if self._tensors is not None:
            return Batch(self.take(chosen), len(draw.indices), draw.sampling)
        with _keyed(draw.key):
            return Batch(self.take(chosen), len(draw.indices), draw.sampling)

    def take(self, chosen: np.ndarray) -> Any:
        """Return the chosen examples, collated, without a seed. `sampling` also compares processes with it.

        Args:
            chosen: int64, shape (size,); the size may be 0.
        """
        if self._tensors is not None:
            return self._rows(self._tensors, torch.from_numpy(chosen))
        collate = default_collated if self._collate is None else self._collate
        if len(chosen) == 0:
            # Example 0 gives the structure, dtypes and shapes; its content is dropped.
            return map_examples(lambda leaf: leaf[:0], collate([item(self._data, 0)]))
        items = [item(self._data, int(index)) for index in chosen]
        examples = collate(items)
        if self._collate is not None:
            require_rows(self._collate, items, examples)
        return examples

    def _rows(self, tensors: tuple[Tensor, ...], chosen: Tensor) -> tuple[Tensor, ...]:
        """Return rows of the tensors.

        Batches of all rows in their order share one copy. A new copy is made after a write to it or to the data set. A
        worker shares no copy: its batches lie in memory that the main process may write to unnoticed.

        Privacy:
            The rows must be the chosen ones. A padded batch can have as many rows as the data set, and hold others.
        """
        is_whole = len(chosen) == len(tensors[0]) and bool(chosen.equal(torch.arange(len(chosen))))
        if not is_whole or get_worker_info() or any(tensor.is_inference() for tensor in tensors):
            return tuple(tensor[chosen] for tensor in tensors)
        if not self._whole or [tensor._version for tensor in (*tensors, *self._whole)] != self._versions:
            self._whole = [tensor.clone() for tensor in tensors]
            self._versions = [tensor._version for tensor in (*tensors, *self._whole)]
        return tuple(self._whole)


def require_loading(function: str, num_workers: object, prefetch_factor: object, pin_memory: object) -> None:
    """Raise PrivacyError unless a DataLoader takes these options. `sampling.batches` calls it."""
    require_integer(function, "num_workers", num_workers, 0)
    if prefetch_factor is not None:
        require_integer(function, "prefetch_factor", prefetch_factor, 1)
        if num_workers == 0:
            condition, remedy = "to be None without workers", "give num_workers too, such as num_workers=4"
            raise expected(function, "prefetch_factor", condition, prefetch_factor, remedy)
    if not isinstance(pin_memory, bool):
        raise expected(function, "pin_memory", "to be True or False", described(pin_memory), "give one of the two")


def load(
    dataset: Examples,
    draws: Sampler[Draw],
    *,
    seed: int,
    num_workers: int,
    prefetch_factor: int | None,
    pin_memory: bool,
) -> Generator[Batch]:
    """Return an iterator over the batches of the draws, in their order. `sampling.batches` calls it.

    Args:
        dataset: loads them.
        draws: yields them; the main process iterates over it.
        seed: of the workers. torch would take it from its global random numbers, and so change these.
        num_workers: as in sampling.batches.
        prefetch_factor: as in sampling.batches.
        pin_memory: as in sampling.batches.
    """
    loader: DataLoader[Any] = DataLoader(
        _Reported(dataset) if num_workers else dataset,
        batch_size=None,
        sampler=cast("Any", draws),
        collate_fn=_unchanged,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(seed),
    )
    return _from_workers(loader) if num_workers else (batch for batch in loader)


def _unchanged(batch: Any) -> Any:
    """Return a batch as it is; workers call it by its name."""
    return batch


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


@dataclass(frozen=True)
class _Failure:
    """An exception in a worker, as it travels to the main process.

    Attributes:
        error: its class if it is an error of this library, which is raised again as it is; None for any other.
        message: its text, with its class if `error` is None.
        where: its traceback in the worker.
    """

    error: type[PrivacyError] | None
    message: str
    where: str

    def exception(self) -> Exception:
        """Return the exception that the main process raises."""
        remedy = "correct collate; the traceback above shows where"
        raised = (self.error or SamplingError)(self.message)
        if self.error is None:
            raised = expected("plan.batches", "each batch", "to be collated", self.message, remedy, SamplingError)
        raised.__cause__ = RuntimeError(f"in a worker process:\n{self.where}")
        return raised


class _Reported(Dataset[Batch | _Failure]):
    """Examples for a worker: an exception is returned, because torch would raise it with a text of its own."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __getitem__(self, draw: Draw) -> Batch | _Failure:
        """Return the batch of a draw, or the exception that loading it raised."""
        try:
            return self._examples[draw]
        except PrivacyError as error:
            return _Failure(type(error), f"{error}", traceback.format_exc())
        except Exception as error:
            return _Failure(None, summary(error), traceback.format_exc())


def _from_workers(loader: DataLoader[Any]) -> Generator[Batch]:
    """Yield the batches that the workers load. `close()` ends the workers.

    Raises:
        SamplingError: an example cannot be loaded, a worker died, or a worker cannot be started.
    """
    others = active_children()
    batches = None
    try:
        batches = _started(loader)
        with _Watch([child for child in active_children() if child not in others]).installed() as watch:
            while True:
                with watch.waiting():
                    batch = next(batches, None)
                if isinstance(batch, _Failure):
                    raise batch.exception()
                if batch is None:
                    return
                yield batch
    except RuntimeError as error:  # of torch: exceptions of the data set arrive as _Failure
        raise _explained(error) from error.__cause__
    finally:
        # At once: a later garbage collection would take 5 s for each worker. torch has no public function for it.
        getattr(batches, "_shutdown_workers", int)()


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers; raise SamplingError if what they need cannot be sent to them."""
    try:
        return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        remedy = "define them at the top level of a module, without lambda"
        condition, got = "to be picklable for worker processes", f"{error}".rstrip(".")
        raise expected("plan.batches", "dataset and collate", condition, got, remedy, SamplingError) from error


def _explained(error: BaseException) -> BaseException:
    """Return torch's error for a dead worker as one of this library; return any other error as it is."""
    first = error
    while isinstance(first.__cause__, RuntimeError):  # the first one knows the signal or the exit code
        first = first.__cause__
    got = f"{first}".strip().split(". ")[0].rstrip(".")
    if not got.startswith("DataLoader worker"):
        return error
    remedy = (
        "take fewer workers or a lower prefetch_factor if memory ran out; with num_workers=0, an error of the data set "
        "shows itself"
    )
    return expected("plan.batches", "every worker", "to live until the last batch", got, remedy, SamplingError)


@dataclass
class _Watch:
    """A wrapper of torch's signal handler for dead workers: it raises only while a batch is awaited.

    torch's own handler raises at once. In the middle of a private step this would lose a gradient that is charged.

    Attributes:
        workers: the worker processes.
        died: what torch's handler raised during a step.
    """

    workers: list[BaseProcess]
    died: list[RuntimeError] = field(default_factory=list[RuntimeError])
    _awaited: bool = False

    @contextmanager
    def installed(self) -> "Generator[_Watch]":
        """Wrap torch's handler until the end of the block. Does nothing outside the main thread."""
        theirs = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
        if not callable(theirs) or threading.current_thread() is not threading.main_thread():
            yield self
            return

        def ours(number: int, frame: FrameType | None) -> None:
            try:
                theirs(number, frame)
            except RuntimeError as error:
                is_own = any(f"(pid {worker.pid})" in str(error) for worker in self.workers)
                if self._awaited or not is_own:
                    raise
                self.died.append(error)

        signal.signal(signal.SIGCHLD, ours)
        try:
            yield self
        finally:
            # A loader that was started later may have wrapped this one; a generator may end in any thread.
            is_last = signal.getsignal(signal.SIGCHLD) is ours
            if is_last and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, theirs)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Let the handler raise during the block; raise first what it did not raise before."""
        self._awaited = True
        try:
            if self.died:
                raise self.died[0]
            yield
        finally:
            self._awaited = False
