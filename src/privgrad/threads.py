"""Work on blocks that stay in cache, on as many threads as torch uses; and work on one thread."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

T = TypeVar("T")

_NUMBERS_A_THREAD = 1 << 19
# Numbers in a block: what eight operators read and write stays in cache, and is still worth torch's own threads.
_BLOCK = 1 << 18


def in_threads(work: Callable[[Iterable[T]], None], blocks: Sequence[T], *, numbers: int) -> None:
    """Let each thread take block after block until none is left.

    For work outside torch's operators, which bring threads of their own. Returns, or raises what a thread raised, when
    all have ended.

    Args:
        work: called once a thread, with the blocks that fall to it; may keep buffers from one to the next. Which
            those are is chance: the result must not depend on it.
        blocks: each falls to one thread.
        numbers: how many they hold together; few are not worth a thread.
    """
    queue = deque(blocks)
    threads = min(torch.get_num_threads(), len(queue), numbers // _NUMBERS_A_THREAD)
    if threads <= 1:
        work(queue)
        return
    # A pool for each call: one that lasted would not survive a fork, and to start it takes a tenth of a millisecond.
    with ThreadPoolExecutor(threads) as pool:
        for ended in [pool.submit(work, _taken(queue)) for _ in range(threads)]:
            ended.result()


def _taken(queue: deque[T]) -> Iterator[T]:
    with suppress(IndexError):
        while True:
            yield queue.popleft()


@contextmanager
def one_thread() -> Generator[None]:
    """Let torch use one thread: small products lose more by waiting for each other than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def blocks(*values: float | Tensor | None) -> Iterable[tuple[Any, ...]]:
    """The tensors in aligned blocks, each with the numbers. Whole if short, sharded, laid out otherwise or on no CPU.

    For elementwise work of several operators: what one wrote, the next finds in cache.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    first = tensors[0]
    if first.numel() <= _BLOCK or any(
        not t.is_contiguous() or t.shape != first.shape or t.device.type != "cpu" or is_traceable_wrapper_subclass(t)
        for t in tensors
    ):
        return [values]
    parts: list[Iterable[Any]] = [v.view(-1).split(_BLOCK) if isinstance(v, Tensor) else repeat(v) for v in values]
    return zip(*parts, strict=False)
