"""Read and collate the examples of a data set, and explain what a data set of the user does wrong.

`loading` calls it in this process and in workers; `sampling` calls `warn_of_generators`. The privacy guarantee rests on
`require_rows`: each row of a batch depends on one example.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from numbers import Real
from operator import itemgetter
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from privgrad.errors import PrivacyError, SamplingError, expected
from privgrad.types import count_examples, map_examples

Collate = Callable[[list[Any]], Any]

_REPEATS = 20  # number of calls after which rows that differ count as random
_SEARCHED = 1_000  # the most objects of a data set, and items of a container, that are searched for a generator
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def warn_of_generators(dataset: object) -> None:
    """Warn of a random generator that a data set holds, for instance in an attribute of its transform.

    Every worker has a copy of it that repeats the same numbers, and its seed may be known. Attributes, containers and
    closures are searched, in breadth, up to 1,000 objects.
    """
    held: list[tuple[str, object]] = [("dataset", dataset)]
    seen = {id(dataset)}
    for path, one in held:
        if isinstance(one, _GENERATORS) and not isinstance(one, random.SystemRandom):
            warnings.warn(
                f"{path} is a random generator: its numbers repeat in every worker and after a resume, and its seed "
                "may be known. Augment with torch.rand, numpy.random or random in its place",
                stacklevel=5,
            )
            continue
        for name, value in _parts_of(one):
            if id(value) not in seen and len(held) < _SEARCHED and type(value) not in _PLAIN:
                seen.add(id(value))
                held.append((f"{path}{name}", value))


def _parts_of(one: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that an object holds, each with the text that follows the object's path."""
    if isinstance(one, dict | list | tuple):
        values = cast("Iterable[object]", one.values() if isinstance(one, dict) else one)
        yield from (("[...]", value) for value in islice(values, _SEARCHED))
    elif isinstance(one, FunctionType):
        cells = zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)
        yield from ((f"'s {name}", cell.cell_contents) for name, cell in cells if cell != CellType())
    elif isinstance(one, MethodType):
        yield "", one.__self__
    elif isinstance(one, partial):
        yield from (("'s argument", value) for value in (one.func, *one.args, *one.keywords.values()))
    elif not isinstance(one, ModuleType | type | Tensor | np.ndarray) and hasattr(one, "__dict__"):
        yield from ((f".{name}", value) for name, value in vars(one).items())


def item(data: Sequence[Any], index: int) -> Any:
    """Return one example; raise SamplingError if the data set refuses the index, or raises another exception."""
    try:
        return data[index]
    except PrivacyError:
        raise
    except (KeyError, IndexError, NotImplementedError) as error:
        condition, got = "to have an example at each index below its length", f"{type(error).__name__} at {index}"
        remedy = "write __getitem__ for integers from 0, or pass torch.utils.data.TensorDataset(inputs, labels)"
        raise expected("plan.batches", "dataset", condition, got, remedy, SamplingError) from error
    except Exception as error:  # whatever a data set of the user raises
        remedy = "replace or remove this example, or correct __getitem__; the traceback above shows where"
        condition = f"to load every example, also that at index {index}"
        raise expected("plan.batches", "dataset", condition, summary(error), remedy, SamplingError) from error


def summary(error: Exception) -> str:
    """Return the class and the text of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(f'{error}'.split()).rstrip('.')[:300]}"


def default_collated(items: list[Any]) -> Any:
    """Collate items by torch's default_collate.

    Raises:
        SamplingError: default_collate cannot turn the items into tensors, an item holds a list of numbers, or they
            differ in form (`require_alike`).
    """
    require_alike("plan.batches", items, SamplingError)
    _refuse_lists("example", items[0])
    try:
        return cast(Collate, default_collate)(items)
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        reason = f"examples of type {type(items[0]).__name__}: {reason}"
        remedy = "turn each example into tensors of one shape in the data set, or give collate="
        raise expected(
            "plan.batches", "dataset", "to hold tensors and numbers", reason, remedy, SamplingError
        ) from error


def _refuse_lists(path: str, example: Any) -> None:
    """Raise SamplingError if a part of an example is a list of numbers.

    default_collate would return one tensor for each place in the list, in place of one row for each example.
    """
    if isinstance(example, Mapping):
        parts = list(cast("Mapping[object, Any]", example).items())
    else:
        parts = list(enumerate(cast("Sequence[Any]", example))) if isinstance(example, list | tuple) else []
    for key, part in parts:
        name = f"{path}[{key!r}]"
        if isinstance(part, list) and all(isinstance(one, Real) for one in cast("list[object]", part)):
            remedy = f"turn {name} into a tensor in the data set, for instance by torch.tensor"
            raise expected(
                "plan.batches", name, "to be a tensor or a number", "a list of numbers", remedy, SamplingError
            )
        _refuse_lists(name, part)


def require_alike(function: str, items: Iterable[Any], error: type[PrivacyError] = PrivacyError) -> None:
    """Raise an error unless all items have the same keys, types, dtypes and shapes.

    `default_collated` and `features.caching` call it. The guarantee rests on it: default_collate takes the keys from
    the first item of a batch, and torch turns all into floats if one is a float. So one person's item would change the
    rows of others.

    Args:
        function: named in the error.
        items: the examples of a batch.
        error: the class of the error.
    """
    first: object = None
    for index, one in enumerate(items):
        form = _form(one)
        if index == 0:
            first = form
        elif form != first:
            condition, got = "to have examples of the same keys, types, dtypes and shapes", "two kinds"
            remedy = "convert all to one form in the data set: pad to a public length, and fill in what is missing"
            raise expected(function, "dataset", condition, got, remedy, error)


def _form(value: object) -> object:
    """Return what of an example decides how a batch with it is collated: all but the numbers and texts themselves."""
    if isinstance(value, Tensor | np.ndarray):
        array = cast(Any, value)
        return str(array.dtype), tuple(map(int, array.shape))
    if isinstance(value, Mapping):
        held = cast("Mapping[object, object]", value)
        return {key: _form(part) for key, part in held.items()}
    if isinstance(value, list | tuple):
        return type(cast(object, value)), [_form(part) for part in cast("Sequence[object]", value)]
    return type(value)


def require_rows(collate: Collate, items: list[Any], examples: Any) -> None:
    """Raise SamplingError unless collate returned one row per example, each independent of the other examples.

    The guarantee rests on this independence. Only the first two rows are compared with their examples collated alone.
    """

    def refusal(condition: str, got: str, remedy: str) -> SamplingError:
        return SamplingError(f"plan.batches: expected collate {condition}, got {got}; {remedy}.")

    def row(examples: Any, index: int) -> list[Any]:
        return tree_leaves(map_examples(itemgetter(index), examples))

    remedy = "collate each example independently: pad to a public length, not to the longest of the batch"
    if count_examples(examples) != len(items):
        got = "a different number of rows"  # both numbers are private
        raise refusal("to return one row per example", got, remedy)
    for index, item in enumerate(items[:2]):
        alone = row(collate([item]), 0)
        if _same(row(examples, index), alone):
            continue
        if not all(_same(row(collate([item]), 0), alone) for _ in range(_REPEATS)):
            remedy = "augment in __getitem__, from that item alone, or by augmentation.multiplicity with views >= 2"
            raise refusal("to return the same row for the same example", "rows that change from call to call", remedy)
        got = "rows that depend on other examples"
        raise refusal("to return rows that depend on their own example only", got, remedy)


def _same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two rows have equal tensors; NaN equals NaN."""

    def equal(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())

    return len(one) == len(other) and all(map(equal, one, other))
