"""Read a model's parameters and state, or replace them for a while and then restore them.

The engines, the checks of `validation` and the perturbations use this.

The privacy guarantee rests on `preserved`, with its helpers at the end, and on `replaced`: no value of private examples
stays on the modules or in the parameters. It rests on `require_losses` too, which refuses a mean over the batch. It
does not rest on the other functions.
"""

import operator
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from privgrad.errors import expected
from privgrad.global_streams import numpy_and_python_kept
from privgrad.types import LossFunction

_CONTAINERS = (dict, list, set, deque)
_EXAMINED = (*_CONTAINERS, tuple)
# Containers that the engines, or torch's own layers, keep: the engines refuse passes that write to what is in them.
_REGISTERED = ("_parameters", "_buffers", "_modules", "_flat_weights")
_SCALARS = frozenset((int, float, bool, str, type(None)))
_SIMPLE = _SCALARS | {dict, OrderedDict, tuple, list, set}  # types of attributes that are no tensors, to skip them fast


_ABSENT = object()


class BoundLoss(nn.Module):
    """A module of a model and its loss_fn, so that parameters can be replaced wherever loss_fn uses them.

    `engines.vmap` and `probes` call it to compute losses, through torch's functional_call. The privacy guarantee does
    not rest on it: the engines keep examples apart, and clipping bounds the influence of each.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, examples: Any) -> Tensor:
        return self.loss_fn(self.model, examples)


def require_losses(losses: object, size: int) -> Tensor:
    """Return losses if they are a tensor of shape (size,); raise PrivacyError otherwise.

    The engines, `probes`, `public_gradient`, `local_training` and `augmentation` call it on the result of a loss_fn.
    """
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        remedy = "return one loss per example, for instance with reduction='none', averaged over all but dimension 0"
        if isinstance(losses, Tensor) and losses.dim() == 0:
            remedy = "return one loss per example: set reduction='none', and take no mean or sum over dimension 0"
        raise expected("loss_fn", "losses", f"of shape ({size},), one loss for each of {size} examples", got, remedy)
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name; a tied parameter once, under its first name.

    PrivateGradient, `federated`, `diagnostics.bias`, the engines and other files of `privgrad.gradient` call it.
    """
    return {name: parameter for name, parameter in named_parameters(model) if parameter.requires_grad}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what `model.named_parameters()` yields, in a fraction of its time.

    `trainable` and the engines call it several times per step.
    """
    seen = set[int]()
    for path, module in named_modules(model):
        for name, parameter in own_parameters(module).items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def named_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield what `model.named_modules(prefix=path)` yields, in a fraction of its time.

    `preserved`, `named_parameters`, `validation`, `spectral_norm` and `engines.capture` call it in each step.
    """
    seen, waiting = set[int](), [(path, model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = cast("dict[str, nn.Module | None]", vars(module)["_modules"])
        below = [(f"{path}.{name}" if path else name, child) for name, child in children.items() if child is not None]
        waiting += reversed(below)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by their own names, without those of its children.

    `engines.units`, `layers.base` and `validation` call it too: `named_parameters(recurse=False)` takes longer.
    """
    own = cast("dict[str, nn.Parameter | None]", vars(module)["_parameters"])
    return {name: parameter for name, parameter in own.items() if parameter is not None}


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed the global random streams of torch, numpy and Python, and restore their states afterwards.

    The checks of `validation`, `randomness`, `probes` and `engines.self_check` call it, so that equal examples give
    equal results. `public_gradient` and the transforms of `PrivateGradient` call it for draws that depend on no private
    example. The draws of the model have `secret_draws`.
    """
    with streams_kept():
        # Without an accelerator, torch.manual_seed queues calls for one forever: memory would grow at every step.
        (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


@contextmanager
def streams_kept() -> Generator[None]:
    """Restore the states of the global random streams of torch, numpy and Python afterwards.

    `seeded` and `secret_draws` call it.
    """
    with numpy_and_python_kept():
        if torch.accelerator.is_available():
            with torch.random.fork_rng():
                yield
            return
        state = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Set evaluation mode (no dropout), and restore each module's own mode afterwards.

    `fit` and `experiments.measures` call it to evaluate a model, and `randomness` to check one.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def replaced(values: Mapping[nn.Parameter, Tensor]) -> Generator[None]:
    """Give parameters these values, and put their own tensors back afterwards, also after an exception.

    `perturb` calls it for a point that all examples share.
    """
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, held in before.items():
            parameter.data = held


@contextmanager
def preserved(model: nn.Module, path: str = "", *, but: Iterable[str] = ()) -> Generator[None]:
    """Undo the changes that a forward or backward pass makes to the modules, and warn about them.

    It restores attributes that were set, containers that were filled, and tensors and numpy arrays that were written
    to, in attributes and in containers at any depth. It also restores the `.grad` of these tensors. `probes` and both
    engines call it around each pass.

    Args:
        model: the module; its submodules are included.
        path: the module's path, for the warning.
        but: names of attributes whose contents are not examined.

    Privacy:
        State that private examples leave on a module is private. It could change the gradient of another example, or
        end in a checkpoint. With the changes undone, every example sees the model in its original state. State
        elsewhere (globals, closures, objects of your own classes) is out of reach.
    """
    before = [
        (path, vars(module), dict(vars(module)), *_contents(vars(module), but))
        for path, module in named_modules(model, path)
    ]
    copies: dict[int, Tensor] = {}
    leaves = list[Tensor]()
    for _, now, attributes, _, values in before:
        for name, value in attributes.items():
            if type(value) not in _SIMPLE and isinstance(value, Tensor):
                now[name] = copies[id(value)] = value.clone()
                leaves.append(value)
        leaves += [value for _, value, _ in values if isinstance(value, Tensor)]
    grads = [(leaf, leaf.grad) for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    for leaf, _ in grads:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, held in grads:
            leaf.grad = held
        changed: list[str] = []
        for path, now, attributes, contents, values in before:
            names = list[str]()
            if not (_same(now, attributes) and _same(now.values(), attributes.values())):
                names += now.keys() - attributes.keys()
                names += [name for name, value in attributes.items() if now.get(name, _ABSENT) is not value]
            for name, container, held in contents:
                if (held or container) and not _identical(_held(container), held):
                    _refill(container, held)
                    names.append(name)
            names += [name for name, value, copy in values if restore(value, copy)]
            for name in dict.fromkeys(names):
                copy = copies.get(id(attributes.get(name)))
                untouched = copy is not None and now.get(name) is copy and copy._version == 0
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]
                # Names with an underscore are torch's own bookkeeping, such as a GRU's list of its weights.
                if not untouched and not name.startswith("_") and name not in weight_hooks(now):
                    changed.append(f"{path}.{name}" if path else name)
        if changed:
            warnings.warn(
                f"the forward pass changed {', '.join(sorted(changed)[:5])} of the model; values from private examples "
                "are private, so the change was undone",
                stacklevel=3,
            )


def weight_hooks(attributes: Mapping[str, Any]) -> dict[str, WeightNorm | SpectralNorm]:
    """Return a module's hooks of torch's old weight_norm and spectral_norm, by the name of the weight that each sets.

    `preserved` and `engines.vmapped_unit` call it.

    Args:
        attributes: the module's attributes, from `vars(module)`.
    """
    hooks = attributes.get("_forward_pre_hooks", {}).values()
    return {hook.name: hook for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)}


def _contents(
    attributes: dict[str, Any], but: Iterable[str]
) -> tuple[list[tuple[str, Any, tuple[Any, ...]]], list[tuple[str, Any, Any]]]:
    """List what a forward pass could change inside the attributes.

    Returns:
        (attribute, container, contents) for every list, dict, set or deque, nested ones too; and (attribute, value,
        copy) for every numpy array, and every tensor in these containers and in tuples.
    """
    found, values, waiting = list[tuple[str, Any, tuple[Any, ...]]](), list[tuple[str, Any]](), list[tuple[str, Any]]()
    for name, value in attributes.items():
        if type(value) in _SCALARS:
            continue
        if isinstance(value, np.ndarray):
            values.append((name, cast(object, value)))
        elif isinstance(value, _EXAMINED) and name not in but:
            container = cast("Collection[Any]", value)
            if not container:
                found.append((name, container, ()))
            elif not _is_plain(container):
                waiting.append((name, container))
    seen = set[int]()
    while waiting:
        name, container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        if not isinstance(container, tuple):
            found.append((name, container, _held(container)))
        if name in _REGISTERED:
            continue
        inner = list(cast("Iterable[Any]", container.values() if isinstance(container, dict) else container))
        waiting += [(name, value) for value in inner if isinstance(value, _EXAMINED)]
        values += [(name, value) for value in inner if isinstance(value, Tensor | np.ndarray)]
    return found, [(name, value, _copied(value)) for name, value in values]


def _is_plain(container: Any) -> bool:
    """Return whether a container is a tuple of numbers and texts, such as the size of a kernel."""
    return isinstance(container, tuple) and _SCALARS.issuperset(map(type, cast("tuple[Any, ...]", container)))


def _copied(value: Any) -> Any:
    """Return a copy of a tensor or numpy array, without a graph."""
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def restore(value: Any, copy: Any) -> bool:
    """Give a tensor or numpy array the values of its copy, and return whether it had others.

    `preserved` and `engines.self_check` call it. It compares values: writes by `.data` or numpy leave no other trace. A
    tensor without storage has none.
    """
    if isinstance(value, np.ndarray):
        if value.shape == copy.shape and value.tobytes() == copy.tobytes():
            return False
        value[...] = copy
        return True
    if value.is_meta:
        return False
    now, then = (x.detach().to_dense() for x in (value, copy))
    if now.shape == then.shape and bool(((now == then) | ((now != now) & (then != then))).all()):
        return False
    if now.shape == then.shape and value.layout is torch.strided:
        value.data.copy_(copy)
    else:
        value.data = copy
    if value.grad_fn is not None and not value._is_view():
        value.detach_()  # a write that autograd recorded would keep the pass in memory
    return True


def _held(container: Any) -> tuple[Any, ...]:
    """Return the objects in a container; for a dict, its pairs of key and value."""
    if not len(container):
        return ()
    return tuple(cast("Iterable[Any]", container.items() if hasattr(container, "items") else container))


def _refill(container: Any, held: tuple[Any, ...]) -> None:
    """Replace the objects in a container by those that `_held` returned."""
    container.clear()
    if isinstance(container, list | deque):
        container.extend(held)
    else:
        container.update(held)


def _same(one: Collection[object], other: Collection[object]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two containers hold the same objects; items of dicts are pairs, compared part by part."""
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(map(operator.is_, a, b)))
        for a, b in zip(one, other, strict=True)
    )
