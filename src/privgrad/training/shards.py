"""Private steps of a sharded model: no process holds all weights, a whole sum or a whole noise.

fully_shard (FSDP2) is data parallel. Each process computes whole examples, so norms and clip factors are local, and no
norm travels. In a step each sharded parameter is a `Gathered` one: a plain parameter, always the same object, whose
memory comes before its block computes, forward or backward, and goes after it. So the engine sees a plain model.

FSDP's own hooks gather in lockstep: all processes must compute the same passes. Ours do not. Poisson batches differ in
size and may be empty, and checks, retries and errors come in one process alone. So ours take the places of FSDP's, and
no process acts without a meeting:
- A process that needs a block, or has the sum of a parameter, asks. One that has nothing to do rests, and meets on.
- Each meeting tells all processes what all ask. They serve the first in order: all take part in it. Others ask again.
- Each meeting serves a process or ends the part of the step, so nobody waits forever. Equal passes are in step: one
  that is ahead waits until the others ask the same.

Sums: once the norms are known, clipping adds up one parameter at a time. Its sum is reduce-scattered at once; who has
no examples for it gives zeros. If a process must compute again (`StepChangedError`), all do, from zero.
Noise: all processes draw from the key of the first process. A sum's coordinates are numbered over the whole model, and
each process keeps those of its shard (`types.Place`). So the noise is that of one process, cut: none is shared or
skipped, on any number of processes. Other devices than the CPU have a generator for each process.
Charge: the first process charges before any process returns its shard.
A parameter that is used in two blocks stays in memory for the step, as the parameters of the root do.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from privgrad.clip.clipping import sum_dtype
from privgrad.errors import UnsupportedModuleError, expected, readable
from privgrad.gradient.functional import named_modules, weight_hooks
from privgrad.processes import Gathered
from privgrad.types import Place, map_examples

# Version 2.13 of torch gave these functions new names.
_any = cast(Any, dist)
_all_gather: Any = getattr(dist, "all_gather_single", None) or _any.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or _any.reduce_scatter_tensor

_torch: Any = cast(Any, torch)._C
DONE = -1  # what a process says that wants nothing more of a part of a step; others may say lower numbers
_LARGE = 1 << 18  # numbers of a parameter that is gathered in place; smaller ones of a block are gathered together


class Part:
    """A sharded parameter: its shard in this process, and the memory that holds all of it for a while."""

    def __init__(self, name: str, shard: DTensor, group: dist.ProcessGroup | None) -> None:
        self.name, self.number, self.shard, self._group = name, -1, shard, group
        self.rank, self.processes = dist.get_rank(group), dist.get_world_size(group)
        rows, *rest = shard.shape
        self.rows = -(-rows // self.processes)  # of each process; the last ones may have fewer, or none
        self.whole = torch.empty(self.rows * self.processes, *rest, dtype=shard.dtype, device=shard.device)
        self._bytes = self.whole.untyped_storage().nbytes()
        nothing = torch.full((), float("nan") if shard.is_floating_point() else 0, dtype=shard.dtype)
        self._nothing = nothing.to(shard.device).expand(shard.shape)
        self.gathered = Gathered(self._nothing, requires_grad=shard.requires_grad)
        self.owners: list[dict[str, Any]] = []  # the `_parameters` of modules, with the name in each
        self.names: list[str] = []
        self.whole.untyped_storage().resize_(0)

    @property
    def place(self) -> Place:
        """Where this process's shard is among the numbers of the parameter."""
        rows = self.shard.shape[0]
        return Place(min(self.rank * self.rows, rows) * (self.shard.numel() // max(1, rows)), self.shard.numel())

    def own(self) -> Tensor:
        """Return this process's shard, flat. Collectives take parts of one size, so the last ones are padded."""
        shard = self.shard.to_local()
        if len(shard) < self.rows:
            shard = torch.cat([shard, shard.new_zeros(self.rows - len(shard), *shard.shape[1:])])
        return shard.reshape(-1)

    def room(self) -> Tensor:
        """Return memory for the shards of all processes, flat; the graph of the forward pass has this storage."""
        self.whole.untyped_storage().resize_(self._bytes)
        return self.whole.view(-1)

    def hold(self, shards: Tensor) -> None:
        """Hold the shards of all processes, one in each row."""
        if shards.data_ptr() != self.room().data_ptr():
            self.whole.view(shards.shape).copy_(shards)
        self.gathered.data = self.whole[: self.shard.shape[0]]
        self.gathered.is_here = True

    def forget(self) -> None:
        """Free the memory of the whole parameter. A read outside of its block then gives NaN."""
        self.gathered.data = self._nothing
        self.gathered.is_here = False
        self.whole.untyped_storage().resize_(0)

    def scattered(self, total: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return this process's shard of the sum over all processes; None means zeros."""
        own = self.whole.new_empty(self.rows, *self.whole.shape[1:], dtype=dtype)
        if total is None or len(total) < len(self.whole):
            padded = torch.zeros(self.whole.shape, dtype=dtype, device=own.device)
            total = padded if total is None else torch.cat([total.to(dtype), padded[len(total) :]])
        _reduce_scatter(own, total.to(dtype).contiguous(), group=self._group)
        return own[: len(self.shard.to_local())]


class _Block:
    """The parameters that are gathered together, before their module computes."""

    def __init__(self, shards: "Shards", number: int) -> None:
        self._shards, self.number, self.parts = shards, number, list[Part]()
        self.is_here, self.open = False, 0  # in how many backward passes it is

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Do what comes before the forward of the block's module; the root stays gathered."""
        if self.number:
            self._shards.enter(self, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Do what comes after it."""
        return self._shards.leave(self, output) if self.number else output

    def fetch(self, group: dist.ProcessGroup | None, *, keep: bool) -> None:
        """Gather the shards of all processes; keep them, or only give this process's own."""
        self.is_here = self.is_here or keep
        for parts in self._together():
            each = [part.own() for part in parts]
            own = torch.cat(each) if len(parts) > 1 else each[0]
            room = parts[0].room() if keep and len(parts) == 1 else own.new_empty(parts[0].processes * len(own))
            _all_gather(room, own, group=group)
            shards = room.view(-1, len(own))
            for part, own in zip(parts if keep else (), each, strict=False):
                part.hold(shards[:, : len(own)])
                shards = shards[:, len(own) :]

    def _together(self) -> Iterable[list[Part]]:
        """Return the parts in lists, each for one collective: those that are large, and the others by dtype."""
        large = [[part] for part in self.parts if part.shard.numel() > _LARGE]
        small = dict[torch.dtype, list[Part]]()
        for part in self.parts:
            if part.shard.numel() <= _LARGE:
                small.setdefault(part.shard.dtype, []).append(part)
        return [*large, *small.values()]


class _Call:
    """A forward call of a block: it opens the block when its backward pass begins, and closes it when that has ended.

    The gradients of all inputs are known only after the gradients of all that is between.
    """

    def __init__(self, shards: "Shards", block: _Block, inputs: int) -> None:
        self._shards, self._block, self._left, self._is_open = shards, block, inputs, False

    def begin(self, _: Tensor) -> None:
        if not self._is_open:
            self._is_open = True
            self._block.open += 1
            self._shards.gather(self._block)

    def end(self, _: Tensor) -> None:
        self._left -= 1
        if self._left == 0 and self._is_open:
            self._block.open -= 1
            if self._block.open <= 0:
                self._shards.free(self._block)


class Sums:
    """The sums of the sharded parameters in one attempt at a step, each process with its shard."""

    def __init__(self, shards: "Shards", like: Mapping[str, Tensor], expected_size: int) -> None:
        self._shards = shards
        self.names = {name: p.number for name, p in like.items() if isinstance(p, Gathered)}
        self._dtypes = {number: sum_dtype(like[name], expected_size) for name, number in self.names.items()}
        self._held = dict[int, Tensor]()  # by the number of the part

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def add(self, name: str, total: Tensor) -> None:
        """Add this process's sum of one parameter to those of all."""
        self._shards.give(self.names[name], total)

    def serve(self, number: int, total: Tensor | None) -> None:
        """Add the sums that all processes have of a parameter now."""
        own = self._shards.parts[number].scattered(total, self._dtypes[number])
        # As `clipping._Sums.join`: what is added to a total is added in float64.
        held = self._held.get(number)
        self._held[number] = own if held is None else held.double().add_(own)

    def result(self, name: str) -> tuple[Tensor, Place]:
        """Return the shard of a sum, and its place."""
        number = self.names[name]
        part, dtype = self._shards.parts[number], self._dtypes[number]
        own = self._held.pop(number, None)
        if own is None:  # no example of any process reaches it
            own = torch.zeros(part.shard.to_local().shape, dtype=dtype, device=part.shard.device)
        return own.to(dtype), part.place


def answered() -> AbstractContextManager[None]:
    """Return a context that turns errors of the network into one that says what to do."""
    remedy = "start the run again: it resumes from its checkpoint and ledger"
    return readable("Distributed", "every process", "to answer", remedy)


def resharded(model: nn.Module) -> nn.Module:
    """Return the model, sharded again where an evaluation has left parameters whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


class Shards:
    """A model that fully_shard has split over all processes, and the meetings of these."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.model, self._group, self._device = model, group, device
        self.count = dist.get_world_size(group)
        self._modules: list[tuple[str, Any]] = [
            pair for pair in named_modules(model) if isinstance(pair[1], FSDPModule)
        ]
        for condition, got, remedy in self._problems():
            name = "the sharded model"
            raise expected("PrivateGradient", name, condition, got, remedy, UnsupportedModuleError)
        self.root = _Block(self, 0)
        self.blocks = [self.root]
        self.parts: list[Part] = []
        self._find()
        self._kept = list[Callable[[], None]]()
        # Kept, because the engine notices other hooks than before.
        self._hooks = {path: (block.before, block.after) for path, block in self._by_path.items()}
        self._running = list[tuple[_Block, _Call | None]]()
        self.sums: Sums | None = None
        self.is_open = False

    def _problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield what cannot be computed exactly from shards: the condition, what there is instead, and the remedy."""
        below = tuple(f"{path}." if path else "" for path, _ in self._modules)
        ranks = list(range(self.count)) if self._group is None else dist.get_process_group_ranks(self._group)
        whole, seen = "give Distributed a whole model", dict[object, str]()
        for path, module in self._modules:
            state = module._get_fsdp_state()
            own = cast("dict[str, Any]", vars(module))
            codes: dict[str, Any] = {n: x.__func__.__code__ for n, x in own.items() if isinstance(x, MethodType)}
            for name in (n for n, code in codes.items() if code.co_qualname.startswith("register_fsdp_forward_method")):
                remedy = "call the module itself, or give all processes a whole model"
                yield "to have no method of register_fsdp_forward_method", f"'{path}.{name}'", remedy
            if len(state._modules) > 1:
                condition, remedy = (
                    "to have one module in each call of fully_shard",
                    "call it for each module by itself",
                )
                yield condition, f"a list with '{path}'", remedy
            for known in _parameters_of(state):
                if known in seen:
                    got, remedy = f"one in '{seen[known]}' and '{path}'", "call fully_shard for a module that has both"
                    yield "to have no weight in two blocks", got, remedy
                seen[known] = path
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            mesh, placements = parameter.device_mesh, parameter.placements
            if not name.startswith(below):
                yield "to be sharded by fully_shard alone", f"'{name}' without it, as tensor parallel places it", whole
            elif mesh.ndim != 1 or mesh.mesh.tolist() != ranks or [type(one) for one in placements] != [Shard]:
                got = f"'{name}' on a mesh of shape {tuple(mesh.mesh.shape)} by {placements}"
                remedy = (
                    f"use no tensor parallel or hybrid shards: init_device_mesh(device, ({self.count},)), or {whole}"
                )
                yield "to be split over all processes in one dimension", got, remedy
            elif cast(Any, placements[0]).dim != 0:
                yield "to be split along dimension 0", f"'{name}' by {placements}", "give no shard_placement_fn"
            if parameter.device.type != self._device.type:
                place, remedy = f"'{name}' on {parameter.device}", f"give no offload_policy, or {whole}"
                yield f"to have its shards on {self._device.type}", place, remedy
        for path, module in named_modules(self.model):
            if parametrize.is_parametrized(module) or weight_hooks(vars(module)):
                computed = "(weight_norm, spectral_norm, parametrizations)"
                yield f"to hold its weights, and not to compute them {computed}", f"'{path}'", whole

    def _find(self) -> None:
        """Find the block of each parameter: that of all its uses, or the root."""
        paths = [path for path, _ in self._modules if path]
        self._by_path = {path: _Block(self, number) for number, path in enumerate(paths, 1)}
        self.blocks += self._by_path.values()
        if any(module is self.model for _, module in self._modules):
            self._by_path[""] = self.root
        found, home = dict[int, Part](), dict[int, _Block]()
        for path, module in cast("Any", self.model).named_modules(remove_duplicate=False):
            above = [one for one in paths if path == one or path.startswith(f"{one}.")]
            block = self._by_path[max(above, key=len)] if above else self.root
            own = cast("dict[str, Any]", vars(module)["_parameters"])
            for name, parameter in own.items():
                if not isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in found:
                    found[id(parameter)] = Part(f"{path}.{name}" if path else name, parameter, self._group)
                    home[id(parameter)] = block
                part = found[id(parameter)]
                if home[id(parameter)] is not block:
                    home[id(parameter)] = self.root
                if not any(
                    own is owner and name == other for owner, other in zip(part.owners, part.names, strict=True)
                ):
                    part.owners.append(own)
                    part.names.append(name)
        self.parts = list(found.values())
        for number, (key, part) in enumerate(found.items()):
            part.number = part.gathered.number = number
            home[key].parts.append(part)

    def are_of(self, model: nn.Module) -> bool:
        """Return whether they are the shards that the model holds now."""
        pairs = ((part, pair) for part in self.parts for pair in zip(part.owners, part.names, strict=True))
        return model is self.model and (self.is_open or all(own.get(name) is p.shard for p, (own, name) in pairs))

    def begin_sums(self, like: Mapping[str, Tensor], expected_size: int) -> Sums:
        """Begin the sums of an attempt; those of an earlier one are forgotten."""
        self.sums = Sums(self, like, expected_size)
        return self.sums

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters whose sums are shards."""
        return () if self.sums is None else self.sums.names

    def as_shards(self, values: Mapping[str, Tensor], places: Mapping[str, Place]) -> Mapping[str, Tensor]:
        """Return the values that have a place as shards like those of the parameters."""
        own, found = cast(Sums, self.sums).names, dict(values)
        for name in places:
            like = self.parts[own[name]].shard
            shape: dict[str, Any] = {"shape": like.shape, "stride": like.stride()}
            found[name] = DTensor.from_local(values[name], like.device_mesh, like.placements, run_check=False, **shape)
        return found

    @contextmanager
    def opened(self) -> Generator[None]:
        """Put plain parameters in place of the shards, and our hooks in place of FSDP's."""
        if self.is_open:  # a gradient of public examples within a step
            yield
            return
        for path, module in self._modules:
            kind, state = cast(Any, type(module)), module._get_fsdp_state()
            mine = self._hooks[path]
            for held, hook in zip((module._forward_pre_hooks, module._forward_hooks), mine, strict=True):
                hooks = cast("dict[int, Any]", held)
                for key, theirs in list(hooks.items()):
                    if getattr(theirs, "__self__", None) is state:
                        hooks[key] = hook
                        self._kept.append(lambda hooks=hooks, key=key, theirs=theirs: hooks.update({key: theirs}))
            self._kept.append(lambda module=module, kind=kind: setattr(module, "__class__", kind))
            module.__class__ = kind.__mro__[2]  # the engine knows layers by their types
        for part in self.parts:
            part.gathered.requires_grad_(part.shard.requires_grad)
            for own, name in zip(part.owners, part.names, strict=True):
                own[name] = part.gathered
        self.is_open = True
        try:
            self._serve(0, keep=True)
            yield
        finally:
            try:
                self.rest(DONE)
            finally:
                self.is_open, self.sums = False, None
                self._free_all()
                self.root.is_here = False
                for part in self.root.parts:
                    part.forget()
                for part in self.parts:
                    for own, name in zip(part.owners, part.names, strict=True):
                        own[name] = part.shard
                for undo in self._kept:
                    undo()
                self._kept.clear()

    def enter(self, block: _Block, given: Any) -> None:
        """Gather a block before its module computes; in a backward pass, a checkpointed part is computed again."""
        call, is_again = None, _in_backward()
        with _torch.DisableTorchFunction():
            if not is_again:
                for other in self.blocks[1:]:
                    if other is not block and not self._computes(other):
                        self.free(other)
            self.gather(block)
            if torch.is_grad_enabled() and not is_again:
                inputs = {id(x): x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad}
                call = _Call(self, block, len(inputs))
                for x in inputs.values():
                    x.register_hook(call.end)
        self._running.append((block, call))

    def leave(self, block: _Block, output: Any) -> Any:
        """Free a block after its module has computed; return the output, whose gradient gathers it again."""
        call = None
        while self._running:
            last, call = self._running.pop()
            if last is block:  # others have failed in it
                break
        if _in_backward():
            return output
        if call is not None:
            with _torch.DisableTorchFunction():
                output = map_examples(partial(_hooked, call.begin), output)
        if not self._computes(block):
            self.free(block)
        return output

    def _computes(self, block: _Block) -> bool:
        return any(block is one for one, _ in self._running)

    def gather(self, block: _Block) -> None:
        """Have the parameters of a block in memory."""
        if not block.is_here:
            self._ask(block.number, None)

    def free(self, block: _Block) -> None:
        if block.is_here and block is not self.root:
            block.is_here = False
            for part in block.parts:
                part.forget()

    def _free_all(self) -> None:
        self._running.clear()
        for block in self.blocks[1:]:
            block.open = 0
            self.free(block)

    def give(self, number: int, total: Tensor) -> None:
        """Add this process's sum of a parameter."""
        self._ask(len(self.blocks) + number, total)

    def rest(self, code: int) -> list[int]:
        """Serve the others until all rest; return the code of each process."""
        self._free_all()
        while True:
            asked = self._meet(code)
            if all(one < 0 for one in asked):
                return asked
            self._serve(min(one for one in asked if one >= 0), keep=False)

    def _ask(self, wanted: int, total: Tensor | None) -> None:
        """Meet until what this process wants was served."""
        while True:
            first = min(one for one in self._meet(wanted) if one >= 0)
            self._serve(first, keep=first == wanted, total=total if first == wanted else None)
            if first == wanted:
                return

    def _meet(self, code: int) -> list[int]:
        """Tell all processes what this one wants, and return what each wants."""
        asked = torch.empty(self.count, dtype=torch.int64, device=self._device)
        mine = torch.tensor([code], dtype=torch.int64, device=self._device)
        with torch.no_grad(), answered():
            _all_gather(asked, mine, group=self._group)
        return cast("list[int]", asked.tolist())

    def _serve(self, wanted: int, *, keep: bool, total: Tensor | None = None) -> None:
        """Take part in what a process wants: the weights of a block, or the sum of a parameter."""
        with torch.no_grad(), answered():
            if wanted < len(self.blocks):
                block = self.blocks[wanted]
                block.fetch(self._group, keep=keep)
            else:
                cast(Sums, self.sums).serve(wanted - len(self.blocks), total)


def _parameters_of(state: Any) -> list[object]:
    """Return what identifies the parameters that fully_shard was given; fully_shard has untied those in two blocks."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.13 has one
    found = [getattr(one, "_orig_param_uid", None) for group in groups if group for one in group.fsdp_params]
    return [uid for uid in found if uid is not None]  # older versions do not have it


def _in_backward() -> bool:
    return _torch._current_graph_task_id() != -1


def _hooked(hook: Callable[[Tensor], None], x: Any) -> Any:
    """Return a tensor whose gradient calls a hook first; an operation in place on a view would remove it."""
    if isinstance(x, Tensor) and x.requires_grad:
        x = cast(Tensor, torch.ops.aten._unsafe_view(x, x.shape)) if x._is_view() else x
        x.register_hook(hook)
    return x
