"""Detect whether a layer changes an argument, such as a cache, during its forward pass.

`capture` and `vmapped_unit` record the arguments before the pass. Afterwards `vmapped_unit.require_unchanged` calls
`Watched.changed` and refuses such layers: if one example's pass fills an argument, the next example reads it. The
privacy guarantee rests on this file, because the isolation of examples does.
"""

import types
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, Enum)
_FIXED = (*_PLAIN, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, nn.Module, torch.Generator)
_MOST = 10_000  # most objects to examine per argument


class Watched:
    """A record of the contents of some objects, to detect later changes.

    Args:
        leaves: arguments of a layer. Tensors, numbers, functions and modules among them are skipped.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        self._before = [(leaf, _reached(leaf)) for leaf in leaves if not isinstance(leaf, (Tensor, *_FIXED))]

    def changed(self) -> str | None:
        """Return the class name of the first argument whose contents have changed; None if none has."""
        for leaf, reached in self._before:
            if not all(_same(_parts(holder), parts) for holder, parts in reached):
                return type(leaf).__name__
        return None


def _reached(leaf: Any) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """List (holder, its parts) for all objects that can be reached from a leaf."""
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
    """List the contents of a holder as (key, value); for a tensor, its version, which counts writes."""
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
    """Return whether two lists of `_parts` hold the same objects or equal plain values, in the same order."""

    def alike(one: Any, other: Any) -> bool:
        return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)

    return len(now) == len(before) and all(
        alike(a[0], b[0]) and alike(a[1], b[1]) for a, b in zip(now, before, strict=True)
    )
