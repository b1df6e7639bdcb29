"""Many processes, launched by torchrun: data parallel, with whole models or sharded ones (FSDP2).

Import this module before init_process_group: it imports torch.distributed.fsdp, which after that call would hold on to
the group, so that destroy_process_group could not end the group's threads.
"""

import atexit
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from privgrad.errors import PrivacyError, UnsupportedModuleError, expected
from privgrad.processes import Processes
from privgrad.types import NoisyGradient

_any = cast(Any, dist)  # whose collectives are typed in part
_LAST_SECONDS = 0.1  # that gloo's threads get for what they have left to do
T = TypeVar("T")


class Distributed(Processes):
    """The processes of torch.distributed: pass one to PrivateGradient and plan.batches, or to fit.

    The model is a plain module, equal in all processes, or one that fully_shard has sharded; no part of it is in
    DistributedDataParallel, whose gradients were not private, or FullyShardedDataParallel (FSDP1). A sharded model is
    gathered for the length of a private step: its parameters lie whole in memory then, released gradients and the
    optimizer's state never do.

    Args:
        group: of torch.distributed, of all processes: for another backend than the default group's; None is that.
    Raises:
        PrivacyError: torch.distributed has not been initialized, or the group leaves processes out: each group would
            add a noise and keep a ledger of its own.
    Privacy:
        As one process: each example is clipped by the process it belongs to, and the first adds one noise of the
        plan's size to the sum over all. Its ledger is the record. The processes trust each other: what they exchange
        before the noise is private.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            remedy = "call torch.distributed.init_process_group() first, and start with torchrun"
            raise expected("Distributed", "torch.distributed", "to be initialized", "no process group", remedy)
        world, size = dist.get_world_size(), dist.get_world_size(group)
        if size != world:
            got = f"{size} of {world}" if size > 0 else "one without this process"
            remedy = "leave group out, and start as many processes as train together"
            raise expected("Distributed", "group", "to be of all processes", got, remedy)
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0) if group is not None else 0
        on_gpu = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        if not on_gpu:
            _let_gloo_finish()

    def run_on_all(self, work: Callable[[], T], *, step: int = 0) -> T:
        try:
            result = work()
        except BaseException:
            self._tell(failed=True, step=step)
            raise
        if self._tell(failed=False, step=step):
            remedy = "look at its error; nothing was released"
            raise expected("PrivateGradient", "each process", "to take this step", "a failure in another", remedy)
        return result

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        local = {name: value.contiguous() for name, value in values.items()}
        _each(lambda value: _any.reduce(value, self._first, group=self._group, async_op=True), local.values())
        return local

    def broadcast(self, gradient: NoisyGradient) -> NoisyGradient:
        values = {name: value.contiguous() for name, value in gradient.values.items()}
        std = torch.tensor([cast(float, gradient.noise_std)], dtype=torch.float64, device=self._device)
        self._spread([*values.values(), std])
        return NoisyGradient(values, noise_std=float(std))

    def broadcast_object(self, value: T) -> T:
        held = [value]
        with _answered():
            dist.broadcast_object_list(held, self._first, group=self._group, device=self._device)
        return held[0]

    def begin(self, model: nn.Module) -> None:
        for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
            if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
                remedy = "pass its .module: the processes' sums are added up before the noise; fully_shard it to shard"
                condition, got = "to be plain, or sharded by fully_shard", f"{type(module).__name__} at '{path}'"
                raise expected("PrivateGradient", "model", condition, got, remedy, UnsupportedModuleError)
        tensors = [*model.parameters(), *model.buffers()]
        self._spread([tensor.detach() for tensor in tensors if not isinstance(tensor, DTensor)])

    @contextmanager
    def unsharded(self, model: nn.Module) -> Generator[None]:
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        with _answered():
            for module in sharded:
                module.unshard()
        # FSDP's class and hooks would gather and shard in the midst of functorch's transforms, which cannot bear it.
        kept = [(module, type(module), dict(_hooks_of(module))) for module in sharded]
        for module, kind, hooks in kept:
            cast(Any, module).__class__ = kind.__mro__[2]
            for key, (held, _) in hooks.items():
                del held[key]
        try:
            yield
        finally:
            for module, kind, hooks in kept:
                cast(Any, module).__class__ = kind
                for key, (held, hook) in hooks.items():
                    held[key] = hook
                    held.move_to_end(key, last=False)
                module.reshard()

    def shard_like(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: _placed(value, like[name]) if name in like else value for name, value in values.items()}

    def gather_state(self, state: T) -> T:
        with _answered():
            return cast(T, tree_map(_whole, state))

    def _tell(self, *, failed: bool, step: int) -> bool:
        """Whether any process failed.

        Raises:
            PrivacyError: they take different steps.
        """
        told = torch.tensor([int(failed), step, -step], device=self._device)
        with _answered():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        any_failed, last, first = cast("list[int]", told.tolist())
        if last != -first and not any_failed:
            remedy = "give each the same plan, and the batches of plan.batches in their order"
            raise expected("PrivateGradient", "the processes", "to take the same step", f"{-first} to {last}", remedy)
        return bool(any_failed)

    def _spread(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors with the first process'."""
        _each(lambda tensor: _any.broadcast(tensor, self._first, group=self._group, async_op=True), tensors)


@cache
def _let_gloo_finish() -> None:
    """Wait a moment when the interpreter ends, once per process.

    A thread of gloo that frees its last tensor needs the interpreter. Once that is being taken down, the process ends
    with SIGABRT instead: everything is saved by then, but torchrun reports a failure. Sleeping lets the thread finish.
    """
    atexit.register(time.sleep, _LAST_SECONDS)


@contextmanager
def _answered() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        got = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "start the run again: it goes on from its checkpoint and ledger"
        raise expected("Distributed", "every process", "to answer", got, remedy, PrivacyError) from error


def _each(collective: Callable[[Tensor], Any], tensors: Iterable[Tensor]) -> None:
    """Begin a collective for each tensor, then wait for all."""
    with _answered():
        for work in [collective(tensor) for tensor in tensors]:
            work.wait()


def _hooks_of(module: nn.Module) -> dict[int, tuple[Any, Any]]:
    """FSDP's own hooks around the forward pass: by key, where they are held, and they themselves."""
    any_module = cast(Any, module)
    state, holders = any_module._get_fsdp_state(), (any_module._forward_pre_hooks, any_module._forward_hooks)
    return {
        key: (held, hook) for held in holders for key, hook in held.items() if getattr(hook, "__self__", None) is state
    }


def _whole(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def _placed(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or getattr(value, "shape", None) != like.shape:
        return value  # a step's number, beside moments
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
