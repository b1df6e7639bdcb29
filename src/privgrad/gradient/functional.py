"""Read a model's parameters and state, replace them for a while, or compute with copies of them."""

import math
import operator
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import chain, repeat
from numbers import Number
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from privgrad.errors import PrivacyError, expected
from privgrad.gradient.autograd_graph import gradients_and_curvature
from privgrad.gradient.batching_rules import MENDED, OF_ALL, TORCH_WEIGHT_NORM, weight_norm
from privgrad.gradient.refusals import written_to
from privgrad.processes import Gathered, is_on_processor
from privgrad.rng import numpy_and_python_kept
from privgrad.types import LossFunction, count_examples

Result = TypeVar("Result")

_NOTE = "privgrad called it with a few examples, or with part of a batch; batches have any size from 0."
_COMPARED, _BYTES = 2**17, 4096  # largest sizes: of a buffer, and of an array, compared at each step
_SAMPLED = 1024  # most numbers of a frozen parameter that are compared


def advanced(model: "nn.Module | Structure", *, keep: bool) -> AbstractContextManager[None]:
    """Advance the vectors of all spectral norms in training mode, and hold all vectors until the exit.

    Computes: for each weight W, a parameter, what one training forward pass computes:
        u = W v / |W v|, v = W^T u / |W^T u| (the old spectral_norm: v first), `n_power_iterations` times.
    So a layer that is called twice, a second pass and a recomputed part all use the same vectors. With `keep`, the new
    vectors stay. Otherwise, and after an exception, the old ones are put back.
    """
    structure = structure_of(model)
    return _advanced(structure, keep) if structure.once(spectral_norms) else nullcontext()


@contextmanager
def _advanced(structure: "Structure", keep: bool) -> Generator[None]:
    found = structure.once(spectral_norms)
    iterations = [norm.n_power_iterations for norm, _, _ in found]
    before = [(vector, vector.clone()) for _, _, vectors in found for vector in vectors]
    done = False
    try:
        with torch.no_grad():
            for norm, of, _ in found:
                if isinstance(norm, SpectralNorm):
                    norm.compute_weight(of, do_power_iteration=of.training)
                else:
                    norm(of.original)
        for norm, _, _ in found:
            norm.n_power_iterations = 0
        structure.follow()
        yield
        done = keep
    finally:
        for (norm, _, _), count in zip(found, iterations, strict=True):
            norm.n_power_iterations = count
        for vector, held in () if done else before:
            vector.copy_(held)


def spectral_norms(structure: "Structure") -> list[tuple[Any, Any, tuple[Tensor, Tensor]]]:
    """Return each spectral norm of a parameter, the module that holds the parameter, and the two vectors."""
    found = list[tuple[Any, Any, tuple[Tensor, Tensor]]]()
    for _, module in structure.modules:
        if isinstance(module, parametrize.ParametrizationList):
            norm = module[0]  # a later one sees what the earlier ones computed
            original = vars(module)["_parameters"].get("original")
            if type(norm) is _SpectralNorm and original is not None and original.dim() > 1:
                found.append((norm, module, (norm.get_buffer("_u"), norm.get_buffer("_v"))))
        for hook in cast("Mapping[int, Any]", vars(module)["_forward_pre_hooks"]).values():
            if type(hook) is SpectralNorm and vars(module)["_parameters"].get(f"{hook.name}_orig") is not None:
                vectors = module.get_buffer(f"{hook.name}_u"), module.get_buffer(f"{hook.name}_v")
                found.append((hook, module, vectors))
    return found


class Mended(TorchFunctionMode):
    """A mode in which the operations of `MENDED` keep examples apart under vmap.

    With `several` examples at once, operations on memory and hooks are refused.

    Privacy:
        The guarantee rests on this: a wrong batching rule gives one example the gradient, or the value, of another
        example. tests/gradient/test_batching.py compares the rules with a loop over examples. torch gives each example
        another draw from a generator of the model's own, whose numbers are known: such draws are refused.
    """

    def __init__(self, *, several: bool) -> None:
        super().__init__()
        self._several = several

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._several and func in OF_ALL:
            raise RuntimeError(f"{func.__name__} reaches all examples under vmap")
        refuse_own_generators(args, kwargs or {})
        mended = MENDED.get(func)
        return (func if mended is None else mended)(*args, **(kwargs or {}))


def batched(function: Callable[..., Any], in_dims: Any = 0, *, module: nn.Module | None = None) -> Callable[..., Any]:
    """Return `vmap(function, in_dims)` with separate random draws for each example, and with correct batching rules."""
    parts = [] if module is None else [part for _, part in named_modules(module)]
    attributes = chain(parts, *(vars(part).values() for part in parts))
    if any(map(isinstance, attributes, repeat((torch.jit.ScriptModule, torch.jit.ScriptFunction)))):
        raise RuntimeError("TorchScript uses batching rules that cannot be replaced")

    def mended(*inputs: Any) -> Any:
        with Mended(several=True):
            return function(*inputs)

    def call(*inputs: Any) -> Any:
        with warnings.catch_warnings():
            # Operations that vmap computes in a loop are correct, but slow.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            return vmap(mended, in_dims=in_dims, randomness="different")(*inputs)

    return call


def refuse_own_generators(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PrivacyError if a torch function draws from a generator that is not global: its state is not secret."""
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
    if any(one not in (torch.default_generator, *torch.cuda.default_generators) for one in given):
        raise known_draws("a torch.Generator")


def known_draws(got: str) -> PrivacyError:
    """Return the error for a forward pass whose random numbers can be known."""
    remedy = (
        "leave torch.manual_seed out of the forward pass and of loss_fn, and generators and the seeds of numpy and "
        "Python too; draw what all examples share once, in __init__, and keep it as a buffer"
    )
    return expected("loss_fn", "random draws", "to follow torch's global random stream", got, remedy)


@contextmanager
def differentiable(*, twice: bool) -> Generator[None]:
    """Compute operations in a way that can be differentiated twice, if `twice` is set."""
    # Fused attention has no second derivative. That of torch._weight_norm is wrong: it takes the norm of v as constant.
    if not twice:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), _TwiceDifferentiable():
        yield


class _TwiceDifferentiable(TorchFunctionMode):
    """A mode that computes torch._weight_norm by `batching_rules.weight_norm`; torch calls it for each operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (weight_norm if func is TORCH_WEIGHT_NORM else func)(*args, **(kwargs or {}))


def unseen_by_checkpoints() -> saved_tensors_hooks:
    """Keep saved tensors out of a checkpoint: it cannot compute operations under vmap again."""
    return saved_tensors_hooks(Tensor.detach, lambda x: x)


CONTAINERS: Any = (dict, list, tuple, set, deque)
# Containers that the engines, or torch's own layers, keep: the engines refuse passes that write to what is in them.
_REGISTERED = ("_parameters", "_buffers", "_modules", "_flat_weights")
SCALARS = frozenset((int, float, bool, str, type(None)))
VALUES: Any = (Number, str, bytes, range, frozenset, np.generic)  # what is equal to another by its value
_USUAL = frozenset((dict, OrderedDict, list, set, tuple))  # types of containers, to pass over empty ones fast
TENSORS: Any = (Tensor, np.ndarray)
ABSENT = object()


class BoundLoss(nn.Module):
    """A module of a model and its loss_fn, so that parameters can be replaced wherever loss_fn uses them."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, examples: Any) -> Tensor:
        return self.loss_fn(self.model, examples)


def require_losses(losses: object, size: int) -> Tensor:
    """Return losses if they are a tensor of shape (size,); raise PrivacyError otherwise."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = type(losses).__name__
        if isinstance(losses, Tensor):  # the number of examples is private
            sizes = ["B" if length == size > 1 else str(length) for length in losses.shape]
            got = f"shape ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
        remedy = "return one loss per example: set reduction='none', and average over all dimensions but the first"
        raise expected("loss_fn", "losses", "of shape (B,), one loss for each of B examples", got, remedy)
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name; a tied parameter once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def named_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield what `model.named_modules(prefix=path)` yields, in a fraction of its time."""
    seen, waiting = set[int](), [(path, model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = cast("dict[str, nn.Module | None]", vars(module).get("_modules", {}))  # a traced module has none
        below = [(f"{path}.{name}" if path else name, child) for name, child in children.items() if child is not None]
        waiting += reversed(below)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by their own names, without those of its children."""
    own = cast("dict[str, nn.Parameter | None]", vars(module)["_parameters"])
    return {name: parameter for name, parameter in own.items() if parameter is not None}


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed the global random streams of torch, numpy and Python, and restore their states afterwards."""
    with streams_kept():
        # Without an accelerator, torch.manual_seed queues calls for one forever: memory would grow at every step.
        (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


class streams_kept(numpy_and_python_kept):  # noqa: N801, it is called as a function is
    """Restore the states of the global random streams of torch, numpy and Python afterwards."""

    def __enter__(self) -> None:
        super().__enter__()
        self._of_torch, self._of_devices = torch.default_generator.get_state(), None
        if torch.accelerator.is_available():
            self._of_devices = torch.random.fork_rng()
            self._of_devices.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._of_devices is not None:
            self._of_devices.__exit__(None, None, None)
        torch.default_generator.set_state(self._of_torch)
        super().__exit__()


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Set evaluation mode (no dropout), and restore each module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def replaced(values: Mapping[nn.Parameter, Tensor]) -> Generator[None]:
    """Give parameters these values, and put their own tensors back afterwards, also after an exception."""
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, held in before.items():
            parameter.data = held


class Structure:
    """The modules, parameters and buffers of a model, what they hold, and what follows from that alone.

    A step finds out nothing about the model that an earlier step knows: `follow` compares what the modules hold now
    with what they held when the model was read, and reads it again if anything differs. It sees
    - the attributes of each module, its class, and the code of its forward;
    - what is in the containers of these attributes at any depth: submodules, parameters, buffers, hooks;
    - type, shape, device and hooks of each parameter, and whether it is trained.

    All is compared by identity, so that nothing is computed. It sees no writes to tensors, and no attributes of other
    objects: for these see `checks.configuration` and `checks.variables`.
    """

    def __init__(self, model: nn.Module, path: str = "", *, but: Collection[str] = ()) -> None:
        self.model, self._path, self._but = model, path, but
        self._read()

    def _read(self) -> None:
        self._known = dict[Any, Any]()
        self.modules = list(named_modules(self.model, self._path))
        self.attributes = [(path, vars(module), dict(vars(module))) for path, module in self.modules]
        self._contents, self.tensors = Contents(), list[tuple[dict[str, Any], str]]()
        named, self.buffers = dict[int, tuple[str, nn.Parameter]](), list[tuple[str, dict[str, Any], str]]()
        for path, now, attributes in self.attributes:
            prefix = f"{path}." if path else ""
            for name, value in attributes.items():
                kind = type(value)  # pyright: ignore[reportUnknownVariableType]
                if kind in SCALARS or (kind in _USUAL and name in self._but):
                    continue
                if kind in _USUAL and (not value or name in _REGISTERED):
                    self._contents.containers.append(((path, name), value, held_in(value)))
                elif isinstance(value, Tensor):
                    self.tensors.append((now, name))
                else:
                    self._contents.read([((path, name), value)])
            for name, parameter in attributes.get("_parameters", {}).items():
                if parameter is not None:
                    named.setdefault(id(parameter), (f"{prefix}{name}", parameter))
            held = attributes.get("_buffers", {})
            self.buffers += [(f"{prefix}{name}", held, name) for name, buffer in held.items() if buffer is not None]
        self.inside = [(label, value) for label, value, _ in self._contents.copies]  # tensors in containers
        self._contents.copies.clear()  # each pass makes its own
        self.parameters = list(named.values())
        self.by_id = {key: own for key, own in named.items() if own[1].requires_grad}  # names and trained parameters
        self.trained = dict(self.by_id.values())
        self._shaped: list[Any] = [parameter for _, parameter in self.parameters if not is_lazy(parameter)]
        self._parts = [module for _, module in self.modules]
        self._kinds: list[Any] = list(set(map(type, self._parts)))
        held = [container for _, container, _ in self._contents.containers]
        self._empty = [one for one in held if not one]
        self._dicts = [now for _, now, _ in self.attributes] + [one for one in held if one and isinstance(one, dict)]
        self._others = [one for one in held if one]  # of a dict, these are the keys
        self._holds, self._has = self._held(), self._key()

    def _held(self) -> list[object]:
        """Return all objects in attributes and containers, in order."""
        values = cast("Iterable[Iterable[object]]", map(cast(Any, dict).values, self._dicts))
        return list(chain.from_iterable((*values, *self._others)))

    def _key(self) -> list[object]:
        """Return what else is compared: classes, their forwards, and what parameters are."""
        of_parameters = [
            (x.requires_grad, x.dtype, x.shape, x.device, x._backward_hooks, x._post_accumulate_grad_hooks)
            for x in self._shaped
        ]
        forwards = [getattr(getattr(kind, "forward", None), "__code__", kind) for kind in self._kinds]
        return [*map(type, self._parts), *forwards, *of_parameters]

    def is_same(self) -> bool:
        """Return whether attributes and containers hold the same objects as when the model was read."""
        return not any(self._empty) and same(self._held(), self._holds)

    def follow(self) -> "Structure":
        """Read the model again if its modules hold anything else than before; return this structure."""
        if not (self.is_same() and self._key() == self._has):
            self._read()
        return self

    def once(self, found: "Callable[..., Result]", *arguments: Any) -> "Result":
        """Return found(self, *arguments), which is computed once, until the structure changes."""
        key = found, arguments
        if key not in self._known:
            self._known[key] = found(self, *arguments)
        return self._known[key]

    def undo(self) -> set[tuple[str, str]]:
        """Put back what attributes and containers held; return the paths and names of the attributes that differed."""
        changed = self._contents.undo()
        for path, now, attributes in self.attributes:
            if not (same(now, attributes) and same(now.values(), attributes.values())):
                both = now.keys() | attributes.keys()
                names = {name for name in both if now.get(name, ABSENT) is not attributes.get(name, ABSENT)}
                changed |= {(path, name) for name in names - weight_hooks(now).keys()}
                now.clear()
                now.update(attributes)
        return changed


Model = nn.Module | Structure  # a structure must be that of now


def structure_of(model: Model) -> Structure:
    """Return the structure of a model."""
    return model if isinstance(model, Structure) else Structure(model)


class preserved:  # noqa: N801, it is called as a function is
    """Undo the changes that a forward or backward pass makes to the modules and to `.grad`, and warn about them.

    It sees attributes, and containers, tensors and arrays in them at any depth. A structure must be that of now.

    Privacy:
        State that private examples leave on a module could change the gradient of another example, or end in a
        checkpoint. For state elsewhere (globals, closures, objects of your own classes) see `checks.variables`.
    """

    def __init__(self, model: nn.Module | Structure) -> None:
        self._structure, self._copies = structure_of(model), list[tuple[dict[str, Any], str, Tensor, Tensor]]()

    def __enter__(self) -> None:
        self._inside = [(label, value, copy_of(value)) for label, value in self._structure.inside]
        for now, name in self._structure.tensors:
            value = now[name]
            now[name] = copy = value.clone()
            self._copies.append((now, name, value, copy))
        leaves = [value for _, _, value, _ in self._copies]
        self._grads = _take_grads(leaves + [x for _, x, _ in self._inside if isinstance(x, Tensor)])

    def __exit__(self, *_: object) -> None:
        _give_grads(self._grads)
        for now, name, value, copy in self._copies:
            if now.get(name) is copy and copy._version == 0:
                now[name] = value
        found = {label for label, value, copy in self._inside if restore(value, copy)}
        if not self._structure.is_same():
            found |= self._structure.undo()
        # Names with an underscore are torch's own bookkeeping, such as a GRU's list of its weights.
        changed = [f"{path}.{name}" if path else name for path, name in found if not name.startswith("_")]
        if changed:
            warnings.warn(
                f"the forward pass changed {', '.join(sorted(changed)[:5])} of the model; values from private examples "
                "are private, so the change was undone",
                stacklevel=2,
            )


def _take_grads(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the leaves with their `.grad`, which is None from now on."""
    grads = [(x, x.grad) for x in tensors if x.is_leaf]
    for x, _ in grads:
        x.grad = None
    return grads


def _give_grads(grads: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    for x, held in grads:
        x.grad = held


def weight_hooks(attributes: Mapping[str, Any]) -> dict[str, WeightNorm | SpectralNorm]:
    """Return the hooks of torch's old weight_norm and spectral_norm in `vars(module)`, by the weight that each sets."""
    hooks = attributes.get("_forward_pre_hooks", {}).values()
    return {hook.name: hook for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)}


class Contents:
    """The contents of containers, tensors and arrays at one time, at any depth."""

    def __init__(self) -> None:
        self.containers = list[tuple[Any, Any, tuple[Any, ...]]]()  # the label of each, itself, and what it held
        self.copies = list[tuple[Any, Any, Any]]()  # the label of each tensor or array, itself, and a copy
        self.seen = set[int]()

    def read(self, found: Iterable[tuple[Any, Any]]) -> None:
        """Note values with their labels, and all that is inside."""
        waiting = list(found)
        for label, value in waiting:  # it grows
            waiting += self.inside(label, value)

    def inside(self, label: Any, value: Any) -> Iterable[tuple[Any, Any]]:
        """Note a value, and return the labels and the values that it holds."""
        if isinstance(value, TENSORS):
            self.copies.append((label, value, copy_of(value)))
        elif isinstance(value, CONTAINERS) and id(value) not in self.seen:
            self.seen.add(id(value))
            if not isinstance(value, tuple):
                self.containers.append((label, value, held_in(value)))
            parts = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
            return [(label, part) for part in parts if type(part) not in SCALARS]
        return ()

    def undo(self, but: Collection[Any] = ()) -> set[Any]:
        """Restore what differs, except under the labels in `but`; return the labels of what differed."""
        found = set[Any]()
        for label, container, held in self.containers:
            if (held or container) and label not in but and not same(held_in(container), held):
                container.clear()
                if isinstance(container, list | deque):
                    container.extend(held)
                else:
                    container.update(zip(held[::2], held[1::2], strict=True) if isinstance(container, dict) else held)
                found.add(label)
        return found | {label for label, value, copy in self.copies if label not in but and restore(value, copy)}


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor, without its graph, or of a numpy array."""
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; tensors and arrays by their entries, where NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.is_meta:
            return True
        now, then = (x.detach().to_dense() for x in (one, other))
        same = now.shape == then.shape and now.dtype == then.dtype
        return same and (torch.equal(now, then) or bool(((now == then) | ((now != now) & (then != then))).all()))
    if type(one) is not type(other) or one is other:
        return one is other
    if isinstance(one, TENSORS):
        one, other = ((x.shape, x.tobytes()) for x in cast("list[Any]", [one, other]))
    return bool(one == other)


def restore(value: Any, copy: Any) -> bool:
    """Give a tensor or numpy array the values of its copy, and return whether it had others."""
    if equal(value, copy):
        return False
    if isinstance(value, np.ndarray):
        value[...] = copy
        return True
    if value.layout is torch.strided and (value.shape, value.dtype) == (copy.shape, copy.dtype):
        value.data.copy_(copy)
    else:
        value.data = copy
    if value.grad_fn is not None and not value._is_view():
        value.detach_()  # a write that autograd recorded would keep the pass in memory
    return True


def held_in(container: Any) -> tuple[Any, ...]:
    """Return the objects in a container; for a dict, its keys and values in turn."""
    is_dict = isinstance(container, dict)
    return tuple(chain.from_iterable(cast("dict[Any, Any]", container).items()) if is_dict else container)


def same(one: Collection[object], other: Collection[object]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def version_of(x: Any) -> Any:
    """Return autograd's count of in-place writes; of an array its bytes, or those of some places of a large one."""
    if isinstance(x, Tensor):
        return 0 if x.is_inference() else x._version
    return x.tobytes() if x.nbytes <= _BYTES else x.flat[:: 1 + x.nbytes // _BYTES].tobytes()


class Bits:
    """The bits of parameters at one time: all of trained and small ones; of a large frozen one, _SAMPLED places.

    With `sums`, of a large frozen one the sums of its runs and of its columns instead, which read all of it. Of what
    has no bits, autograd's count of writes.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], *, sums: bool = False) -> None:
        own, self._sums = list(parameters), sums
        self._held = [(name, x, self._seen(x).clone()) for name, x in own if _has_bits(x)]
        self._others = [(name, x, version_of(x)) for name, x in own if not _has_bits(x)]

    def _seen(self, x: Tensor, *, whole: bool = False) -> Tensor:
        x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        # As integers, so that NaN equals itself.
        bits = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        if whole or x.requires_grad or bits.numel() <= _SAMPLED:
            return bits
        if not self._sums:
            return bits.take(_places(bits.numel(), bits.device))
        flat = bits.reshape(-1)
        rows = flat[: len(flat) // _SAMPLED * _SAMPLED]
        views = rows.view(_SAMPLED, -1), rows.view(-1, _SAMPLED).t(), flat[len(rows) :, None]
        return torch.cat([view.sum(1, dtype=torch.int64) for view in views])

    def undo(self) -> list[str]:
        """Return the names of those that were written to, by one read; put back those whose bits are all held."""
        others = [name for name, x, version in self._others if version_of(x) != version]
        if not self._held:
            return others
        differ = list[Tensor]()
        for _, x, held in self._held:
            now = self._seen(x)
            same = now.shape == held.shape
            differ.append(now.ne(held).any() if same else held.new_ones((), dtype=torch.bool))
        found = cast("list[bool]", torch.stack([one.to(differ[0].device) for one in differ]).tolist())
        written = [own for own, flag in zip(self._held, found, strict=True) if flag]
        for _, x, held in written:
            if (bits := self._seen(x.data, whole=True)).shape == held.shape:
                bits.copy_(held)
        return [*(name for name, _, _ in written), *others]


def _has_bits(x: Tensor) -> bool:
    """Return whether the bits of a tensor can be read: not of sparse or quantized ones, views, or torchao's types."""
    is_plain = cast(Any, type(x)).__torch_dispatch__ is cast(Any, Tensor).__torch_dispatch__
    return is_plain and x.layout is torch.strided and not (x.is_meta or x.is_quantized or x.is_conj() or x.is_neg())


@lru_cache(maxsize=64)
def _places(size: int, device: torch.device) -> Tensor:
    # Multiples of the golden ratio are spread evenly, and in step with no length of a row.
    spread = torch.arange(_SAMPLED, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2) % 1
    return (spread * size).long().to(device)


class parameters_kept:  # noqa: N801, it is called as a function is
    """Undo what a step's passes leave on parameters and buffers, and refuse writes to what is not trained.

    loss_fn may call backward itself, which leaves raw gradients in `.grad`. Autograd counts no write by `.data` or
    numpy, so values of frozen parameters and of buffers are compared: on the CPU, `Bits` of each frozen parameter, and
    each buffer of up to 131,072 numbers. Checked steps compare sums of frozen parameters, on any device. Other
    buffers are refused after a write that autograd counts, but keep the written values. Passes compute with copies of
    buffers, but an object of the user may hold one.
    """

    def __init__(self, model: nn.Module | Structure) -> None:
        self._structure = structure_of(model)

    def __enter__(self) -> None:
        structure = self._structure
        buffers = [(name, holder[own]) for name, holder, own in structure.buffers]
        own = (one for one in structure.parameters if not isinstance(one[1], Gathered))
        self._frozen = Bits(one for one in own if not one[1].requires_grad and is_on_processor(one[1]))
        self._own = Contents()
        self._own.read((name, x) for name, x in buffers if _is_compared(x))
        self._others = [(name, x, version_of(x)) for name, x in buffers if not _is_compared(x)]
        self._grads = _take_grads([x for _, x in (*structure.parameters, *buffers)])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _give_grads(self._grads)
        written = self._frozen.undo()
        changed = self._own.undo() | {name for name, x, version in self._others if version_of(x) != version}
        # The write may be the cause of a refusal.
        if (written or changed) and (kind is None or issubclass(kind, PrivacyError)):
            raise written_to(", ".join(sorted(written or changed)), "parameters" if written else "buffers")


def _is_compared(x: Tensor) -> bool:
    return is_on_processor(x) and x.numel() <= _COMPARED


def gradients(
    model: Model,
    loss_fn: LossFunction,
    examples: Any,
    *,
    along: Mapping[str, Tensor] | None = None,
    exact: bool = False,
    copied: bool = True,
    seed: int | None = 0,
) -> dict[str, Tensor]:
    """Return the gradient of the summed losses by parameter name; zero for unreached parameters. NOT private."""
    # `along` and `exact` are as in `reference.per_sample_gradients`. Unless parameters are `copied`, a forward pass
    # that writes to them does harm.
    structure, moves = structure_of(model), along or {}
    own = structure.trained
    points = {} if exact else {name: own[name].detach() + by.to(own[name].dtype) for name, by in moves.items()}
    with torch.enable_grad(), differentiable(twice=exact):
        # Displaced parameters need no copy: they are new tensors of this function.
        parameters = {
            name: (points[name] if name in points else p.detach().clone() if copied else p.detach()).requires_grad_()
            for name, p in own.items()
        }

        def differentiated(losses: Tensor) -> dict[str, Tensor]:
            if not losses.requires_grad:  # no example reaches a trainable parameter, such as that of an expert
                return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
            curved = [moves.get(name) if exact else None for name in parameters]
            grads = gradients_and_curvature(losses.sum(), list(parameters.values()), curved)
            # Embeddings with sparse=True have sparse gradients.
            return {name: grad.detach().to_dense() for name, grad in zip(parameters, grads, strict=True)}

        return losses_on_copies(structure, loss_fn, examples, differentiated, parameters, seed=seed, copied=copied)


def losses_on_copies(
    model: Model,
    loss_fn: LossFunction,
    examples: Any,
    result: Callable[[Tensor], Any] = Tensor.detach,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    seed: int | None = 0,
    copied: bool = True,
) -> Any:
    """Return the losses, or a function of them, computed with copies of trained parameters and of buffers.

    `parameters` replace some, by name. A `seed` of None continues torch's streams. A backward pass belongs in `result`:
    it may run code of the modules, such as hooks, which needs the copies.
    """
    structure, given = structure_of(model), parameters or {}
    copies = {id(p): given[name] for name, p in structure.parameters if name in given}
    places = list[tuple[dict[str, Any], str, Tensor]]()
    for _, now, _ in structure.attributes:
        for kind in ("_parameters", "_buffers"):
            owner = now[kind]
            is_parameter = kind == "_parameters"
            for name, x in owner.items():
                # Frozen parameters stay: they may be most of a model, and of types that hold more than numbers.
                # Sharded ones stay too, because their values come and go.
                stays = isinstance(x, Gathered) or (is_parameter and x is not None and not x.requires_grad)
                if x is None or (stays and id(x) not in copies):
                    continue
                places.append((owner, name, x))
                if id(x) not in copies:
                    copy = x.detach().clone() if copied or not is_parameter else x.detach()
                    # With gradients, because the forward pass may hook the gradients of its values.
                    copies[id(x)] = copy.requires_grad_(is_parameter)
    # Compiled code has no graph that can be differentiated twice.
    draws = nullcontext() if seed is None else seeded(seed)
    with draws, preserved(structure), torch.compiler.set_stance("force_eager"), replaced_in(places, copies):
        try:
            return result(require_losses(loss_fn(structure.model, examples), count_examples(examples)))
        except Exception as error:
            if not isinstance(error, PrivacyError) and _NOTE not in getattr(error, "__notes__", ()):
                error.add_note(_NOTE)
            raise


@contextmanager
def replaced_in(places: Iterable[tuple[dict[str, Any], str, Tensor]], copies: Mapping[int, Tensor]) -> Generator[None]:
    """Put copies in the places of parameters and buffers, by their ids; a fraction of the time of functional_call."""
    try:
        for owner, name, x in places:
            owner[name] = copies[id(x)]
        yield
    finally:
        for owner, name, x in places:
            owner[name] = x
