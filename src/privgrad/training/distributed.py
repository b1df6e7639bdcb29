"""Data-parallel training in several processes, launched by torchrun, with whole or sharded models (FSDP2).

Import this module before init_process_group. It imports torch.distributed.fsdp. Imported after that call, fsdp would
keep a reference to the group, and destroy_process_group could not end the group's threads.
"""

import atexit
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from privgrad.errors import PrivacyError, UnsupportedModuleError, expected
from privgrad.gradient.functional import named_modules
from privgrad.processes import Attempt, Gathered, Processes, Sums
from privgrad.training.shards import DONE, Shards, answered, resharded
from privgrad.types import NoisyGradient, Place

_any = cast(Any, dist)  # torch types its collectives only in part
_LAST_SECONDS = 0.1  # for gloo's threads to finish at exit
_LOOKS = 8  # weights to compare in each step
# More than rounding, where one process puts averaged weights in and takes them out again; less than most updates.
_SAME = 1e-5
_AGAIN, _FAILED = DONE - 1, DONE - 2  # how a process ends an attempt at its part of a step
T = TypeVar("T")


class _Attempt(Attempt):
    def __init__(self, changed: type[Exception], rest: Callable[[int], Sequence[int]]) -> None:
        super().__init__(changed)
        self._rest = rest

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> bool:
        is_changed = super().__exit__(kind, *exception)
        ended = self._rest(DONE if kind is None else _AGAIN if is_changed else _FAILED)
        if _FAILED in ended and (kind is None or is_changed):
            raise _failed_elsewhere()
        self.is_whole = all(end == DONE for end in ended)
        return is_changed


def _failed_elsewhere() -> PrivacyError:
    got, remedy = "an exception in at least one of the others", "read its traceback; nothing was released"
    return expected("PrivateGradient", "each process", "to finish without an error", got, remedy)


class Distributed(Processes):
    """The processes of torch.distributed: pass one to PrivateGradient and plan.batches, or to fit.

    The model is a plain module, equal in all processes, or a module sharded by fully_shard. No part of it may be
    wrapped in DistributedDataParallel, which would exchange gradients without noise, or in FullyShardedDataParallel
    (FSDP1). A sharded model is gathered block by block, see `training.shards`. Released gradients and the optimizer's
    state are sharded as it is.

    The methods are those of `processes.Processes`, which describes them.

    Args:
        group: a process group that holds every process; use it for a backend other than the default group's. None is
            the default group.
    Raises:
        ValueError: torch.distributed has not been initialized.
        PrivacyError: the group leaves processes out. Each group would then add its own noise and keep its own ledger.
    Privacy:
        The same as in one process. Each example is clipped by the process that holds it. The first process adds one
        noise of the plan's size to the sum over all processes, and keeps the ledger. For a sharded model it gives all
        processes its secret key, and each adds its shard of that noise. The processes must trust each other: the values
        that they exchange before the noise is added are private, and so is the key.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.count != (world := dist.get_world_size()):
            got = f"{self.count} of {world} processes" if self.rank >= 0 else f"a group without rank {dist.get_rank()}"
            remedy = "leave group out, and start exactly the processes that train together"
            raise expected("Distributed", "group", "to hold every process", got, remedy)
        self._first = dist.get_global_rank(group, 0) if group is not None else 0
        on_gpu = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        if not on_gpu:
            _let_gloo_finish()
        self._shards: Shards | None = None  # of the last model
        self._whole = WeakSet[nn.Module]()  # models that were not sharded at first

    @contextmanager
    def all_succeed(self, *, step: int = 0, weights: Sequence[float] = ()) -> Generator[None]:
        try:
            yield
        except BaseException:
            self._any_failed(failed=True, step=step, weights=weights)
            raise
        if self._any_failed(failed=False, step=step, weights=weights):
            raise _failed_elsewhere()

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        local = {name: value.contiguous() for name, value in values.items()}
        whole = [value for name, value in local.items() if name not in self._sums]
        _each(lambda value: _any.reduce(value, self._first, group=self._group, async_op=True), whole)
        return local

    def broadcast(self, gradient: NoisyGradient) -> NoisyGradient:
        values = {name: value.contiguous() for name, value in gradient.items()}
        std = torch.tensor([cast(float, gradient.noise_std)], dtype=torch.float64, device=self._device)
        self._spread([*(value for name, value in values.items() if name not in self._sums), std])
        return replace(gradient, tensors=values, noise_std=float(std))

    def broadcast_object(self, value: T) -> T:
        held = [value]
        with answered():
            dist.broadcast_object_list(held, self._first, group=self._group, device=self._device)
        return held[0]

    def gather_objects(self, value: T) -> list[T]:
        held: list[Any] = [None] * self.count
        with answered():
            dist.all_gather_object(held, value, group=self._group)
        return held

    def begin(self, model: nn.Module) -> None:
        """Refuse wrapped and different models, and casts; then copy the first process's whole weights to all."""
        blocks = [path for path, module in named_modules(model) if isinstance(module, FSDPModule)]

        def described(name: str, x: Tensor) -> str:
            above = [path for path in blocks if path in ("", name) or name.startswith(f"{path}.")]
            kind = f"sharded by '{max(above, key=len)}'" if isinstance(x, DTensor) and above else "not sharded"
            trained = "trained" if x.requires_grad else "not trained"
            return f"{x.dtype} of shape {tuple(x.shape)}, {trained}, {kind}"

        own = {name: described(name, x) for name, x in (*model.named_parameters(), *model.named_buffers())}
        first = self.broadcast_object(own)
        with self.all_succeed():
            for path, module in named_modules(model):
                if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
                    condition, got = "to be plain or sharded by fully_shard", f"{type(module).__name__} at '{path}'"
                    remedy = "pass its .module, sharded by fully_shard if it is too large for one device"
                    raise expected("PrivateGradient", "model", condition, got, remedy, UnsupportedModuleError)
                # privgrad computes without FSDP's hooks, which would cast in the forward pass.
                policy = cast(Any, module)._get_fsdp_state()._mp_policy if isinstance(module, FSDPModule) else None
                for name in ("param_dtype", "output_dtype") if policy else ():
                    dtype = getattr(policy, name)
                    if dtype is not None and {parameter.dtype for parameter in module.parameters()} != {dtype}:
                        condition, got = "to be the dtype of the parameters", f"{dtype} at '{path}'"
                        remedy = f"leave it out, and compute the loss under torch.autocast(device, {dtype})"
                        raise expected("PrivateGradient", f"MixedPrecisionPolicy's {name}", condition, got, remedy)
            for name in sorted(n for n in {**first, **own} if first.get(n) != own.get(n)):
                condition = f"to be {first.get(name, 'absent')}, as in the first process"
                remedy = "build the same model in every process, and freeze the same parameters"
                raise expected("PrivateGradient", name, condition, own.get(name, "absent"), remedy)
        if self.is_sharded(model):
            self._shards = Shards(model, self._group, self._device)
            self._whole.discard(model)
        else:
            self._whole.add(model)
        tensors = [*model.parameters(), *model.buffers()]
        self._spread([tensor.detach() for tensor in tensors if not isinstance(tensor, DTensor)])

    def fingerprint(self, model: nn.Module) -> list[float]:
        """Return how often the shards were changed in place, and a few weights that are whole."""
        trained = [p for p in model.parameters() if p.requires_grad and p.numel() > 0]
        whole = [p.detach() for p in trained if not isinstance(p, DTensor)]
        changes = sum(p._version for p in trained if isinstance(p, DTensor))
        looks = [p[(0,) * p.ndim].to(self._device, torch.float64) for p in whole[:: 1 + len(whole) // _LOOKS]]
        return [changes, *torch.stack(looks).nan_to_num().tolist()] if looks else [changes]

    def opened(self, model: nn.Module) -> AbstractContextManager[object]:
        if not self.is_sharded(model):
            return nullcontext()
        if model in self._whole:
            raise expected(
                "PrivateGradient", "fully_shard", "to be called before it and the optimizer are made", "later"
            )
        if self._shards is None or not self._shards.are_of(model):
            self._shards = Shards(model, self._group, self._device)
        return self._shards.opened()

    def is_sharded(self, model: nn.Module) -> bool:
        return any(isinstance(parameter, DTensor | Gathered) for parameter in resharded(model).parameters())

    def attempt(self, changed: type[Exception]) -> Attempt:
        return _Attempt(changed, self._rest)

    def sums(self, like: Mapping[str, Tensor], expected_size: int) -> Sums | None:
        return cast(Shards, self._shards).begin_sums(like, expected_size) if self._is_open else None

    def as_shards(self, values: Mapping[str, Tensor], places: Mapping[str, Place]) -> Mapping[str, Tensor]:
        return cast(Shards, self._shards).as_shards(values, places) if places else values

    def shard_like(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: _placed(value, like[name]) if name in like else value for name, value in values.items()}

    def gather_state(self, state: T) -> T:
        def whole(leaf: Any) -> Any:
            return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf

        with answered():
            return cast(T, tree_map(whole, state))

    def save_shards(self, shards: Mapping[str, Tensor], folder: Path) -> Any:
        failed = dict[int, Any]()
        with answered():
            try:
                writer = FileSystemWriter(folder)
                return cast(Any, checkpoint).save(dict(shards), storage_writer=writer, process_group=self._group)
            except CheckpointException as error:  # of the disk, with the traceback of each process
                failed = error.failures
        raise next(iter(failed.values()))[0]

    @property
    def _is_open(self) -> bool:
        return self._shards is not None and self._shards.is_open

    @property
    def _sums(self) -> Collection[str]:
        """The names of the sharded values."""
        return self._shards.names if self._shards is not None and self._is_open else ()

    def _rest(self, end: int) -> Sequence[int]:
        """Serve the other processes until all rest, and return how the attempt ended in each."""
        if self._shards is None or not self._is_open:
            return (end,)
        return self._shards.rest(end)

    def _any_failed(self, *, failed: bool, step: int, weights: Sequence[float]) -> bool:
        """Return whether any process failed; raise PrivacyError if their steps or their weights differ."""
        self._rest(DONE)
        own = [failed, step, *weights, *[0.0] * (1 + _LOOKS - len(weights))]
        signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)  # the smallest is minus the largest of the negative
        shared = (signs * torch.tensor(own, dtype=torch.float64)).to(self._device)
        with answered():
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = cast("list[list[float]]", (signs * shared.cpu()).tolist())
        any_failed, last, changes, *most = largest
        _, first, unchanged, *least = smallest
        if any_failed:
            return True
        if last != first:
            got, remedy = f"steps {first:.0f} to {last:.0f}", "give each process the batches of plan.batches in order"
            raise expected("PrivateGradient", "the processes", "to take the same step", got, remedy)
        apart = max(high - low for high, low in zip(most, least, strict=True))
        if changes != unchanged or apart > _SAME * max(map(abs, most + least)):
            remedy = "call optimizer.step, scheduler.step and load_state_dict in all processes, not for `rank == 0`"
            got = f"a difference of {apart:.2g}" if apart > 0 else f"{unchanged:.0f} to {changes:.0f} updates of shards"
            raise expected("PrivateGradient", "the weights", "to be the same in all processes", got, remedy)
        return False

    def _spread(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors with the values of the first process."""
        _each(lambda tensor: _any.broadcast(tensor, self._first, group=self._group, async_op=True), tensors)


@cache
def _let_gloo_finish() -> None:
    """Register a short sleep at the interpreter's exit, once per process."""
    # A gloo thread needs the interpreter to free its last tensor. If the interpreter is shutting down, the process ends
    # with SIGABRT: everything is saved by then, but torchrun reports a failure. The sleep lets the thread finish.
    atexit.register(time.sleep, _LAST_SECONDS)


def _each(collective: Callable[[Tensor], Any], tensors: Iterable[Tensor]) -> None:
    with answered():
        for work in [collective(tensor) for tensor in tensors]:
            work.wait()


def _placed(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor) or getattr(value, "shape", None) != like.shape:
        return value  # the step counter, for example, in an optimizer state whose moments are sharded
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
