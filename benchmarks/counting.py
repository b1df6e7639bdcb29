"""Count what one step does, without a clock: kernels, reads, calls and bytes. Neither load nor speed changes them.

- Kernels: an estimate of what a GPU would start for the operations that torch dispatches. See `kernels_of`.
- Reads: results that Python waits for, such as `.item()`, `tolist`, `nonzero` and a boolean index.
- Calls: of Python and C functions in the thread that takes the step.
- Bytes: of new storages, all together, and the most that are alive at once.

Work on the host's own numbers, which stay on the host beside a GPU, does not count: random states, step counters.
Copies from the host to a GPU are not seen.
"""

import gc
import math
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import privgrad
from privgrad import processes
from privgrad.noise import gaussian
from privgrad.rng import Stream

ROOT = f"{Path(privgrad.__file__).parent}/"
HOST = ("rng.py", "gradient/secret_draws.py")  # what they compute stays on the host

_VIEWS = (
    "alias as_strided chunk detach detach_ diagonal empty empty_like empty_strided expand imag is_same_size lift_fresh "
    "movedim narrow new_empty new_empty_strided permute promote_types real _reshape_alias resize_ result_type select "
    "set_ slice split split_with_sizes squeeze squeeze_ sym_numel sym_size t t_ transpose transpose_ unbind unfold "
    "unsqueeze unsqueeze_ _unsafe_view view view_as"
)
FREE = frozenset(_VIEWS.split())
SEVERAL = {
    "cumsum": 2,
    "embedding_dense_backward": 6,  # sorts the rows
    "mkldnn_rnn_layer": 8,  # one call of cuDNN
    "mkldnn_rnn_layer_backward": 20,
    "native_group_norm": 2,
    "nonzero": 3,
    "sort": 2,
    "topk": 2,
}
_WAITED = "equal _local_scalar_dense masked_select nonzero repeat_interleave unique_consecutive unique_dim _unique2"
READS = frozenset(_WAITED.split())
INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_SAME = Stream(bytes(32))
TENSORS_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # of torch's foreach kernels, by number of lists
NUMBERS_A_CHUNK, CHUNKS_A_LAUNCH = 65536, 320


def kernels_of(name: str, args: tuple[Any, ...]) -> int:
    """Estimate how many kernels a GPU would start for an operation.

    None for views and new memory. A foreach operation starts one for so many tensors and chunks. Most others start one.
    """
    if name in FREE:
        return 0
    if name.startswith(("_foreach", "_fused")):
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
        if not lists:
            return 1
        depth = len(lists) + (not name.endswith("_"))
        chunks = sum(math.ceil(tensor.numel() / NUMBERS_A_CHUNK) for tensor in lists[0])
        return max(1, *map(math.ceil, (len(lists[0]) / TENSORS_A_LAUNCH.get(depth, 30), chunks / CHUNKS_A_LAUNCH)))
    if name == "convolution_backward":
        return sum(map(bool, args[10]))
    if name == "native_group_norm_backward":
        return 4 if args[9][1] else 2
    if name == "native_layer_norm_backward":
        return 3 if args[-1][1] else 1
    if name.startswith(("index_put", "_index_put")) and len(args) > 3 and args[3]:
        return 6  # adds up, in the order of sorted rows
    if "scaled_dot_product" in name and "backward" in name:
        return 3
    return SEVERAL.get(name, 1)


def is_read(name: str, args: tuple[Any, ...]) -> bool:
    """Whether Python must wait for the result of an operation, because shapes or numbers depend on it."""
    if name in INDEXED:
        masks = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
        filled = len(masks) == 1 and len(args) > 2 and args[2].numel() == 1  # torch fills by the mask
        return bool(masks) and not filled
    return name in READS


@dataclass
class Counts:
    """What a step did.

    Attributes:
        operations: that torch dispatched.
        kernels: that a GPU would start for them.
        reads: of results.
        calls: of Python and C functions.
        allocated: bytes of all new storages.
        peak: bytes of new storages that were alive at once.
        lines: kernels and reads by line of privgrad's source, each with the operations.
        functions: calls by called function, and calls within each function of privgrad.
    """

    operations: int = 0
    kernels: int = 0
    reads: int = 0
    calls: int = 0
    allocated: int = 0
    peak: int = 0
    lines: dict[str, dict[str, Counter[str]]] = field(default_factory=lambda: {"kernels": {}, "reads": {}})
    functions: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])

    def note(self, what: str, count: int, place: str, name: str) -> None:
        """Add to the kernels or reads of a line."""
        if count:
            setattr(self, what, getattr(self, what) + count)
            self.lines[what].setdefault(place, Counter())[name] += count


class Operations(TorchDispatchMode):
    """Counts operations, and what they allocate."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self._alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        place = _place()
        if not _is_on_host(place, args):
            self.counts.operations += 1
            self.counts.note("kernels", kernels_of(name, args), place, name)
            self.counts.note("reads", int(is_read(name, args)), place, name)
        self._allocate(out, (args, kwargs))
        return out

    def _allocate(self, out: Any, given: Any) -> None:
        held = {_storage(leaf)._cdata for leaf in _tensors(given)}
        for storage in map(_storage, _tensors(out)):
            if storage._cdata not in held:
                held.add(storage._cdata)
                size = storage.nbytes()
                self.counts.allocated += size
                self._alive += size
                self.counts.peak = max(self.counts.peak, self._alive)
                weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._alive -= size


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


def _place() -> str:
    """The innermost line of privgrad that is running; else that of an optimizer or of Opacus; else of the model."""
    frame: FrameType | None = sys._getframe(2)
    other = ""
    while frame is not None:
        path, line = frame.f_code.co_filename, f"{frame.f_lineno} {frame.f_code.co_name}"
        if path.startswith(ROOT):
            return f"{path.removeprefix(ROOT)}:{line}"
        for library in ("torch/optim", "opacus"):
            if not other and (found := path.rpartition(f"/site-packages/{library}/"))[1]:
                other = f"{library}/{found[2]}:{line}"
        frame = frame.f_back
    return other or "the model"


def _is_on_host(place: str, args: tuple[Any, ...]) -> bool:
    if place.startswith(HOST):
        return True
    return place.startswith("torch/optim/") and all(tensor.dim() == 0 for tensor in _tensors(args))  # counters of steps


@contextmanager
def _reads_noted(counts: Counts) -> Generator[None]:
    """Count what copies a tensor to the host, which torch does not dispatch for tensors that are there."""

    is_open = False  # torch calls the wrapper again where a TorchFunctionMode is active

    def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_open
            if is_open or _is_on_host(place := _place(), (tensor,)):
                return own(tensor, *args, **kwargs)
            counts.note("reads", 1, place, name)
            is_open = True
            try:
                return own(tensor, *args, **kwargs)
            finally:
                is_open = False

        return read

    with (
        patch.object(Tensor, "tolist", noting("tolist", Tensor.tolist)),
        patch.object(Tensor, "cpu", noting("cpu", Tensor.cpu)),
    ):
        yield


class Calls:
    """Counts the calls of functions in this thread."""

    def __init__(self) -> None:
        self.total = 0
        self._called, self._within = Counter[Any](), Counter[CodeType]()
        self._open = list[tuple[CodeType, int]]()
        self._depth = Counter[CodeType]()

    def take(self, step: Callable[[], object]) -> None:
        sys.setprofile(self._note)
        try:
            step()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call":
            self.total += 1
            self._called[code] += 1
            self._open.append((code, self.total))
            self._depth[code] += 1
        elif event == "c_call":
            self.total += 1
            self._called[f"{argument.__module__ or ''}.{argument.__qualname__} (C)".lstrip(".")] += 1
        elif event == "return" and self._open:
            _, before = self._open.pop()
            self._depth[code] -= 1
            if self._depth[code] == 0:  # of a function that calls itself, the outermost call counts
                self._within[code] += self.total - before

    def functions(self) -> dict[str, Counter[str]]:
        """The calls of each function, and the calls within each function of privgrad, by name."""
        own = {code: count for code, count in self._within.items() if code.co_filename.startswith(ROOT)}
        return {"called": _by_name(self._called), "calls within": _by_name(own)}


def _by_name(counts: Any) -> Counter[str]:
    named = Counter[str]()
    for key, count in counts.items():
        named[_name(key) if isinstance(key, CodeType) else key] += count
    return named


def _name(code: CodeType) -> str:
    path = code.co_filename
    if path.startswith(ROOT):
        path = path.removeprefix(ROOT)
    elif "/site-packages/" in path:
        path = path.rpartition("/site-packages/")[2]
    else:  # of Python itself
        path = Path(path).name
    return f"{path}:{code.co_firstlineno} {code.co_qualname}"


def operations_of(step: Callable[[], object], counts: Counts) -> None:
    """Take a step, and count all but its calls."""
    with _quiet(), _reads_noted(counts), Operations(counts):
        step()


def calls_of(step: Callable[[], object], counts: Counts) -> None:
    """Take a step, and count its calls."""
    calls = Calls()
    with _quiet():
        calls.take(step)
    counts.calls, counts.functions = calls.total, calls.functions()


@contextmanager
def _quiet() -> Generator[None]:
    """Collect no garbage, which would call finalizers, and show no warnings."""
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()


class ForeachAdam(torch.optim.Adam):
    """Adam as torch takes it by default on a GPU. On the CPU it would loop over parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, foreach=True, **options)


@contextmanager
def as_counted(*, device_paths: bool = True) -> Generator[None]:
    """Build and take steps as they are counted: Adam by foreach, and on CPU tensors the paths for other devices."""
    with patch.object(torch.optim, "Adam", ForeachAdam):
        if not device_paths:
            yield
            return
        with (
            patch.object(processes, "_PROCESSORS", frozenset[str]()),
            patch.object(gaussian, "_release_on_cpu", _release_as_elsewhere),
            patch.object(Tensor, "is_cpu", False),
        ):
            yield


def _release_as_elsewhere(
    values: Any, add: Any, stream: Any, step: int, recursion: Any, on_grid: bool, places: Any
) -> None:
    """Draw the noise as on a GPU, by a generator of the CPU; the same noise each time, which decides later counts."""
    if on_grid:
        raise ValueError("noise on a grid is drawn on the CPU only")
    numbers: dict[str, Any] = add.keywords if isinstance(add, partial) else {"std": 0.0, "divisor": 1}
    gaussian._release_on_device(values, _SAME, step, recursion, is_last=isinstance(add, partial), **numbers)
