"""Processes that train one model together, and threads that share the work of one process.

With one process all methods of `Processes` are identities. `training.distributed` implements them for several. The
helpers for threads work on blocks that stay in cache, on as many threads as torch uses or on one thread.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import repeat
from pathlib import Path
from threading import Thread, local
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from privgrad.errors import expected
from privgrad.types import NoisyGradient, Place

T = TypeVar("T")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_NUMBERS_A_THREAD = 1 << 19
# Numbers per block: small enough that the data of eight operators stays in cache, large enough for torch's threads.
BLOCK = 1 << 18
AT_ONCE = 1 << 24  # numbers to compute with at once on other devices than the CPU: more take as long as a part of them
on_lists: Any = torch  # for its operators on lists of tensors, which the types do not know
_PROCESSORS = frozenset({"cpu"})  # types of devices; tests take the paths of others by an empty set


class _Recorded(local):
    on = False


_recorded = _Recorded()
_SOFT = 1  # omp_pause_soft of omp.h
# Ends the waiting threads of the OpenMP that torch is linked to. A build without it has none; nor has a fork, which
# would wait for them.
_pauses: list[Callable[[int], object]] = [
    getattr(ctypes.CDLL(torch._C.__file__), "omp_pause_resource_all", lambda _: None)  # pyright: ignore
]
os.register_at_fork(after_in_child=_pauses.clear)


class Gathered(nn.Parameter):
    """A parameter of a sharded model, within a step. It is whole while its block computes, and NaN otherwise."""

    number = -1  # which of the sharded parameters it is
    is_here = False  # whether its values are in memory

    def __deepcopy__(self, memo: object) -> "Gathered":
        raise expected("PrivateGradient", "a check in double precision", "to have the whole model", "a sharded model")


class Sums(Protocol):
    """The sums of sharded parameters over all processes; each process holds its shards."""

    def __contains__(self, name: object) -> bool: ...
    def add(self, name: str, total: Tensor) -> None: ...
    def result(self, name: str) -> tuple[Tensor, Place]: ...


class Attempt:
    """A context for one attempt at a process's part of a step, which `changed` ends: all then begin again.

    Attributes:
        is_whole: whether all processes have succeeded.
    """

    def __init__(self, changed: type[Exception]) -> None:
        self._changed, self.is_whole = changed, False

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.is_whole = kind is None
        return kind is not None and issubclass(kind, self._changed)


class Processes:
    """A single process. The subclass `training.distributed.Distributed` implements several processes.

    Each example belongs to one process, and only this process computes and clips its gradient. The first process sums
    the results of all, draws the noise, keeps the ledger and broadcasts the released gradient. So there is one sum, one
    noise and one ledger. Of a sharded parameter, each process has a shard of the sum, and draws the noise of that.

    Attributes:
        rank: index of this process; 0 is the first process.
        count: number of processes.
    """

    rank = 0
    count = 1

    def all_succeed(self, *, step: int = 0, weights: Sequence[float] = ()) -> AbstractContextManager[None]:
        """Return a context for this process's part of a step. It ends once the parts of all processes have succeeded.

        It raises PrivacyError if another process failed, is at another step, or has other weights (`fingerprint`).
        """
        return _NOTHING

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sum the values over all processes, by name, in the first one. PRIVATE. Their memory may be overwritten."""
        return values

    def broadcast(self, gradient: NoisyGradient) -> NoisyGradient:
        """Return the first process's gradient in all processes. The memory of the others' may be overwritten."""
        return gradient

    def broadcast_object(self, value: T) -> T:
        """Return the first process's value: plain numbers, strings, bytes, tensors, and containers of these."""
        return value

    def gather_objects(self, value: T) -> list[T]:
        """Return the value of each process, in all of them; as `broadcast_object`."""
        return [value]

    def begin(self, model: nn.Module) -> None:
        """Copy the weights and buffers of the first process to all processes."""

    def fingerprint(self, model: nn.Module) -> Sequence[float]:
        """Return a few numbers that agree in all processes as long as all update the model alike."""
        return ()

    def opened(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context for computing with the model, in which each sharded parameter is a `Gathered` one."""
        return _NOTHING

    def is_sharded(self, model: nn.Module) -> bool:
        """Return whether a step gathers parameters of the model block by block."""
        return False

    def attempt(self, changed: type[Exception]) -> Attempt:
        """Return a context for one attempt at the sum of this process's examples. All processes must enter it."""
        return Attempt(changed)

    def sums(self, like: Mapping[str, Tensor], expected_size: int) -> Sums | None:
        """Begin the sums of an attempt; None if no parameter is sharded. Arguments as for ClippingAccumulator."""
        return None

    def as_shards(self, values: Mapping[str, Tensor], places: Mapping[str, Place]) -> Mapping[str, Tensor]:
        """Return values with those that have a place as the shards that they are (DTensor)."""
        return values

    def shard_like(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Shard complete values like the tensors of the same names. Values of a different shape stay complete."""
        return values

    def gather_state(self, state: T) -> T:
        """Return a state of dicts, lists and tensors with every sharded tensor gathered. All processes must call it."""
        return state

    def save_shards(self, shards: Mapping[str, Tensor], folder: Path) -> Any:
        """Write sharded tensors to a folder, each process its own shards; return torch's description of the folder."""
        raise NotImplementedError


_NOTHING = nullcontext()
ALONE = Processes()


def require_all_processes(function: str, processes: Processes) -> None:
    """Raise PrivacyError if torch.distributed has several processes but `processes` is a single one."""
    # Each would draw its own noise for its own sum. A mean of their gradients would cost more than any ledger records.
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if processes.count == 1 and is_initialized and (count := torch.distributed.get_world_size()) > 1:
        remedy = "pass processes=privgrad.training.distributed.Distributed()"
        raise expected(function, "processes", f"to be all {count} processes of torch.distributed", "1 process", remedy)


def in_threads(work: Callable[[Iterable[T]], None], blocks: Sequence[T], *, numbers: int) -> None:
    """Process all blocks, with as many threads as torch uses: each thread takes the next block until none is left.

    `work` is called once per thread, and may reuse buffers between blocks. Which thread takes which block is random.
    Few `numbers`, of all blocks together, start no thread.
    """
    queue = deque(blocks)
    threads = min(threads_for(numbers), len(queue))
    if threads <= 1:
        work(queue)
        return
    # After an operation, torch's threads spin for milliseconds, on the processors that these need. To end them and to
    # start them again, which torch does, takes 0.05 ms.
    for pause in _pauses:
        pause(_SOFT)
    # One pool per call, which takes 0.1 ms to start. A permanent pool would not survive a fork. Without `one_thread`,
    # torch would start threads of its own in each of these.
    with one_thread(), ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(work, _taken(queue)) for _ in range(threads - 1)]
        work(_taken(queue))
        for other in others:
            other.result()


def threads_for(numbers: int) -> int:
    """Return the number of threads for an elementwise computation: as many as torch uses, and one for few numbers."""
    return max(min(torch.get_num_threads(), numbers // _NUMBERS_A_THREAD), 1)


def _taken(queue: deque[T]) -> Iterator[T]:
    """Yield blocks from the left end of a queue that the threads share, until it is empty."""
    with suppress(IndexError):
        while True:
            yield queue.popleft()


class meanwhile:  # noqa: N801, it is called as a function is
    """Do `work` in a thread while the block runs. The block ends after both, and raises the error of either.

    Few `numbers`, which the block computes, start no thread: `work` then comes first. An interrupt may end the wait. So
    `work` must hold a lock on what it changes, as a charge does on its ledger.
    """

    def __init__(self, work: Callable[[], object], *, numbers: int) -> None:
        self._work, self._done = work, Future[object]() if numbers >= _NUMBERS_A_THREAD else None

    def __enter__(self) -> None:
        if self._done is None:
            self._work()
        else:  # takes half as long as a pool; a permanent one would not survive a fork
            Thread(target=self._run, args=(self._done,)).start()

    def _run(self, done: Future[object]) -> None:
        try:
            done.set_result(self._work())
        except BaseException as error:
            done.set_exception(error)

    def __exit__(self, *_: object) -> None:
        if self._done is not None:
            self._done.result()


def keep_freed_memory(*, unless: bool = False) -> None:
    """Let glibc keep up to 1 GiB of freed memory, unless the environment sets its thresholds."""
    # By default it returns the heap's free end, and page faults take 2 to 6 % of a step of a few million parameters.
    # `unless`: blocks of a sharded model come and go between objects that stay; kept memory would hold several models.
    mallopt = None if unless or sys.platform != "linux" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc accepts; larger blocks are always returned
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def one_thread() -> Generator[None]:
    """Let torch use only one thread, which is faster for small matrix products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_on_processor(x: Tensor) -> bool:
    """Return whether a tensor is on the CPU. Elsewhere few large kernels are faster, even if they compute more."""
    return is_slow(x) and not _recorded.on


def is_slow(x: Tensor) -> bool:
    """Return whether arithmetic takes longer than starting it, where a tensor is: also in a recording on the CPU."""
    return x.device.type in _PROCESSORS


def without_autocast(kinds: Iterable[str]) -> AbstractContextManager[object]:
    """Return a context without autocast on these types of devices; to switch it off takes 30 calls, to ask one."""
    stack = ExitStack()
    for kind in filter(torch.is_autocast_enabled, kinds):
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@contextmanager
def recorded() -> Generator[None]:
    """Let this thread compute as on another device than the CPU: without reads, so that it can be recorded."""
    _recorded.on = True
    try:
        yield
    finally:
        _recorded.on = False


def blocks(*values: float | Tensor | None, most: int | None = None) -> Iterable[tuple[Any, ...]]:
    """Split tensors into aligned blocks, which stay in cache, and repeat other values: one tuple for each block.

    A block has at most `most` numbers. None: BLOCK on the CPU, and any number elsewhere. The tensors are not split if
    they are sharded, not contiguous or of different shapes.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    first = tensors[0]
    if most is None:
        most = BLOCK if all(map(is_on_processor, tensors)) else first.numel()
    if first.numel() <= most or any(
        not t.is_contiguous() or t.shape != first.shape or is_traceable_wrapper_subclass(t) for t in tensors
    ):
        return [values]
    parts: list[Iterable[Any]] = [v.view(-1).split(most) if isinstance(v, Tensor) else repeat(v) for v in values]
    return zip(*parts, strict=False)
