"""Arguments that a layer may fill while it runs, a cache for one: neither tensors nor containers of tensors."""

import types
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, Enum)
_FIXED = (*_PLAIN, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, nn.Module, torch.Generator)
_MOST = 10_000  # objects to look into


class Watched:
    """What some objects hold, and whether that has changed since.

    Args:
        leaves: arguments of a layer. Tensors, numbers, functions and modules among them are passed over.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        self._before = [(leaf, _reached(leaf)) for leaf in leaves if not isinstance(leaf, (Tensor, *_FIXED))]

    def changed(self) -> str | None:
        """Return the class of the first argument that holds other things now; None if there is none."""
        for leaf, reached in self._before:
            if not all(_same(_parts(holder), parts) for holder, parts in reached):
                return type(leaf).__name__
        return None


def _reached(leaf: Any) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """List (holder, its parts) for all that can be reached from a leaf."""
    found: list[tuple[Any, list[tuple[Any, Any]]]] = []
    waiting, seen = [leaf], {id(leaf)}
    while waiting and len(found) < _MOST:
        holder = waiting.pop()
        found.append((holder, parts := _parts(holder)))
        for _, part in parts:
            if not isinstance(part, _FIXED) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return found


def _parts(holder: Any) -> list[tuple[Any, Any]]:
    """List what a holder consists of, by key; of a tensor, how often it was written."""
    if isinstance(holder, Tensor):
        return [("version", 0 if holder.is_inference() else holder._version)]
    parts: list[tuple[Any, Any]] = list(getattr(holder, "__dict__", {}).items())
    for kind in type(holder).__mro__:
        slots = cast("Iterable[str]", vars(kind).get("__slots__", ()))
        parts += [(name, getattr(holder, name, None)) for name in slots if isinstance(slots, tuple | list)]
    if isinstance(holder, Mapping):
        parts += list(cast("Mapping[Any, Any]", holder).items())
    elif isinstance(holder, list | tuple | set | frozenset | deque):
        parts += [("item", item) for item in cast("Iterable[Any]", holder)]
    return parts


def _same(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    def alike(one: Any, other: Any) -> bool:
        return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)

    return len(now) == len(before) and all(
        alike(a[0], b[0]) and alike(a[1], b[1]) for a, b in zip(now, before, strict=True)
    )
