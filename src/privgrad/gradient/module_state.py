"""Read a model's parameters and state, or replace them for a while and restore them."""

import operator
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.weight_norm import WeightNorm

from privgrad.errors import expected
from privgrad.types import LossFunction

_CONTAINERS = (dict, list, set, deque)


_ABSENT = object()


class BoundLoss(nn.Module):
    """loss_fn with its model as one module, so that parameters can be swapped wherever loss_fn uses them."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, examples: Any) -> Tensor:
        return self.loss_fn(self.model, examples)


def require_losses(losses: object, size: int) -> Tensor:
    """Return losses if they are a tensor of shape (size,); raise PrivacyError otherwise."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        remedy = "return one loss per example, for instance with reduction='none', averaged over all but dimension 0"
        raise expected("loss_fn", "losses", f"of shape ({size},)", got, remedy)
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; a tied parameter once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """torch's global random streams seeded; afterwards they are as they were."""
    with torch.random.fork_rng():
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:
            # torch.manual_seed queues calls for devices that will never come: a little more memory at every step.
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def differentiable(*, twice: bool) -> Generator[None]:
    """Attention by kernels that can be differentiated twice, if that is wanted: the fused ones cannot."""
    if not twice:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def replaced(values: Mapping[nn.Parameter, Tensor]) -> Generator[None]:
    """Parameters with other values; what they held is put back, untouched, whatever happens."""
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
    """Undo what a forward pass leaves on the modules: attributes set anew, tensors written, containers refilled.

    Warns of it.

    Args:
        model: the module, with all below it.
        path: its own, to name it by.
        but: names of attributes that are not looked into.

    Privacy:
        What private examples leave behind is private, and would let one example touch another's gradient, or end in
        a checkpoint. Undone, each meets the model as it was. State elsewhere (globals, closures, objects of classes of
        your own) is out of reach.
    """
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules(prefix=path))
    before = [(path, vars(module), dict(vars(module)), _contents(vars(module), but)) for path, module in modules]
    copies: dict[int, Tensor] = {}
    for _, now, attributes, _ in before:
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                now[name] = copies[id(value)] = value.clone()
    try:
        yield
    finally:
        changed: list[str] = []
        for path, now, attributes, contents in before:
            names = list(now.keys() - attributes.keys())
            names += [name for name, value in attributes.items() if now.get(name, _ABSENT) is not value]
            for name, container, held in contents:
                if not _identical(_held(container), held):
                    _refill(container, held)
                    names.append(name)
            for name in dict.fromkeys(names):
                copy = copies.get(id(attributes.get(name)))
                untouched = copy is not None and now.get(name) is copy and copy._version == 0
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]
                # Underscores: torch's own bookkeeping, such as a GRU's list of its weights.
                if not untouched and not name.startswith("_") and name not in weight_norms(now):
                    changed.append(f"{path}.{name}" if path else name)
        if changed:
            warnings.warn(
                f"the forward pass changed {', '.join(sorted(changed)[:5])} of the model; what private examples leave "
                "there is private, so it was undone",
                stacklevel=3,
            )


def weight_norms(attributes: Mapping[str, Any]) -> dict[str, WeightNorm]:
    """Return the hooks of the old torch.nn.utils.weight_norm, by the weight that they compute before each forward.

    Args:
        attributes: of a module.
    """
    hooks = [hook for hook in attributes.get("_forward_pre_hooks", {}).values() if isinstance(hook, WeightNorm)]
    return {hook.name: hook for hook in hooks}


def _contents(attributes: dict[str, Any], but: Iterable[str]) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """(attribute, container, what it holds) for every list, dict, set or deque among the attributes and inside them."""
    found: list[tuple[str, Any, tuple[Any, ...]]] = []
    seen = set[int]()
    looked = [(name, value) for name, value in attributes.items() if name not in but]
    waiting: list[tuple[str, Any]] = [(name, value) for name, value in looked if isinstance(value, _CONTAINERS)]
    while waiting:
        name, container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        found.append((name, container, held := _held(container)))
        if not held:
            continue
        inner = cast("Iterable[Any]", container.values() if hasattr(container, "values") else container)
        waiting += [(name, value) for value in inner if isinstance(value, _CONTAINERS)]
    return found


def _held(container: Any) -> tuple[Any, ...]:
    if not len(container):
        return ()
    return tuple(cast("Iterable[Any]", container.items() if hasattr(container, "items") else container))


def _refill(container: Any, held: tuple[Any, ...]) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(held)
    else:
        container.update(held)


def _identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two containers hold the very same things: items of dicts are pairs, compared by part."""
    if not one and not other:  # as most are
        return True
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(map(operator.is_, a, b)))
        for a, b in zip(one, other, strict=True)
    )
