"""Find the dimension in which each tensor of a layer's call holds the examples, and rearrange tensors by it.

That dimension is learned from two batches of different sizes, and a tensor is refused if it has none.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from privgrad.engine.shared_values import Call
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.refusals import REMEDY, CallSequenceChangedError, calls_changed, misplaced, refused
from privgrad.types import leaves_of


class ExampleDim(NamedTuple):
    """The dimension of a tensor that holds the examples, in order, and the number of rows per example."""

    dim: int
    rows: int
    views: int = 1  # groups of an example's rows that are apart: cat([a, b]) has all rows of a first

    @property
    def is_plain(self) -> bool:
        """Whether the examples are in dimension 0, with the rows of each side by side."""
        return self.dim == 0 and self.views == 1


# The dimension of the examples in each tensor of a call; None for a tensor that all examples share. The layout () of a
# function's call says that its result cannot be attributed to examples.
Layout = tuple[ExampleDim | None, ...]


def find_layout(one: Call, other: Call, sizes: tuple[int, int]) -> Layout:
    """Return the layout of a call, or refuse it, from the same call with sizes[0] and with sizes[1] examples."""
    dims, other_dims = [len(shape) for shape in one.shapes], [len(shape) for shape in other.shapes]
    if dims != other_dims:
        got = f"tensors of {dims} dimensions with {sizes[0]} examples, {other_dims} with {sizes[1]}"
        raise refused(f"the calls of '{one.name}'", "not to depend on the examples", got, REMEDY, unit=one.name)
    return tuple(_example_dim(one.name, *shapes, sizes) for shapes in zip(one.shapes, other.shapes, strict=True))


def require_rows(path: str, x: Tensor, examples: ExampleDim, size: int) -> Tensor:
    """Return x, whose dimension 0 holds the examples, with the rows of each example side by side."""
    if examples.dim != 0:
        raise misplaced(path, f"dimension {examples.dim}", elsewhere=True)
    if len(x) != size * examples.rows:
        raise CallSequenceChangedError(path)
    return side_by_side(path, x, examples, size)


def side_by_side(path: str, x: Tensor, examples: ExampleDim, size: int) -> Tensor:
    """Return x with the rows of each example side by side, whose views are apart in x."""
    return x if examples.views == 1 else joined(path, split(path, x, examples, size), examples._replace(views=1))


def set_apart(path: str, x: Tensor, examples: ExampleDim, size: int) -> Tensor:
    """Undo `side_by_side`."""
    return x if examples.views == 1 else joined(path, split(path, x, examples._replace(views=1), size), examples)


def split(path: str, x: Tensor, examples: ExampleDim, size: int) -> Tensor:
    """Return (..., B rows, ...) as (B, ..., rows, ...)."""
    dim, rows, views = examples
    if x.dim() <= dim or x.shape[dim] != size * rows:
        raise CallSequenceChangedError(path)
    if views == 1:
        return x.view(*x.shape[:dim], size, rows, *x.shape[dim + 1 :]).movedim(dim, 0)
    shape = (*x.shape[:dim], views, size, rows // views, *x.shape[dim + 1 :])
    return x.view(shape).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def joined(path: str, x: Tensor, examples: ExampleDim) -> Tensor:
    """Return (B, ..., rows, ...) as (..., B rows, ...), as the module itself would return it."""
    dim, rows, views = examples
    if x.dim() < dim + 2 or x.shape[dim + 1] != rows:
        raise misplaced(path, f"an output of shape {tuple(x.shape[1:])} per example")
    if views == 1:
        return x.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    apart = x.view(*x.shape[: dim + 1], views, rows // views, *x.shape[dim + 2 :])
    return apart.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def _example_dim(path: str, more: torch.Size, fewer: torch.Size, sizes: tuple[int, int]) -> ExampleDim | None:
    """Return the dimension that grows with the batch; None if no dimension grows."""
    growing = [dim for dim in range(len(more)) if more[dim] != fewer[dim]]
    if not growing:
        return None
    dim = growing[0]
    if len(growing) > 1 or more[dim] * sizes[1] != fewer[dim] * sizes[0] or more[dim] % sizes[0] != 0:
        raise misplaced(path, f"shape {tuple(more)} with {sizes[0]} examples, {tuple(fewer)} with {sizes[1]}")
    return ExampleDim(dim, more[dim] // sizes[0])


def _views(x: Tensor, replaced: Sequence[Tensor | None], examples: ExampleDim, size: int) -> list[int]:
    """Return into how many views the rows of an example may be apart: see `CallRecord.find_views`."""

    def is_kept(y: Tensor, views: int) -> bool:
        one, two = (split("", z, examples._replace(views=views), size)[[0, -1]] for z in (x, y))
        return bool(torch.isclose(one, two, rtol=1e-4, atol=1e-6, equal_nan=True).all())

    divisors = [views for views in range(1, examples.rows + 1) if examples.rows % views == 0]
    return [views for views in divisors if all(is_kept(y, views) for y in replaced if y is not None)]


class LearnedCall(NamedTuple):
    """A call with its layout, and the shapes of the tensors that this was learned from."""

    path: str
    layout: Layout
    shapes: tuple[torch.Size, ...]


class Calls(tuple[LearnedCall, ...]):
    """The learned calls of one forward pass, in order."""

    @cached_property
    def gaps(self) -> frozenset[int]:
        """How many calls of units come before each call of a function."""
        units, found = 0, set[int]()
        for call in self:
            if "[" in call.path:
                found.add(units)
            else:
                units += 1
        return frozenset(found)


@dataclass
class Layouts:
    """The calls of a model's units in one forward pass, with the place of the examples in each tensor."""

    calls: Calls | None = None  # None before an audit
    vmapped_units: set[str] = field(default_factory=set[str])  # paths of units that are computed by vmap
    # the same two for displaced parameters, by whether Hessian products are computed
    displaced: dict[bool, tuple[Calls, set[str]]] = field(default_factory=dict[bool, tuple[Calls, set[str]]])
    reached: set[str] = field(default_factory=set[str])  # names of the parameters with gradients

    def copied(self) -> "Layouts":
        displaced, reached = dict(self.displaced), set(self.reached)
        return replace(self, vmapped_units=set(self.vmapped_units), displaced=displaced, reached=reached)


class LayoutCache:
    """The current layouts, and those of earlier audits, because a loop may be longer for longer examples."""

    def __init__(self) -> None:
        self.current = Layouts()  # the next pass uses them
        self._known = dict[Any, Layouts]()
        self._changed = set[Any]()  # shapes for which the calls differed from the current layouts

    def take_whole(self, path: str) -> None:
        self.current = Layouts(vmapped_units=self.current.vmapped_units | {path})
        self._known.clear()
        self._changed.clear()

    def remember(self, examples: Any) -> None:
        self._known[example_shapes(examples)] = self.current.copied()

    def note_change(self, examples: Any) -> None:
        """Note that examples of these shapes need other layouts than the current ones, and switch to them if known."""
        self._changed.add(example_shapes(examples))
        self.recall(examples)

    def recall(self, examples: Any) -> None:
        """Switch to the layouts of examples of these shapes, if such examples needed other layouts before."""
        if not self._changed or (shapes := example_shapes(examples)) not in self._changed:
            return
        if (known := self._known.get(shapes)) is not None:
            found = known.copied()
            found.displaced = self.current.displaced | found.displaced
            self.current = found


def example_shapes(examples: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of one example's tensors."""
    return tuple(cast(Tensor, leaf).shape[1:] for leaf in leaves_of(examples))


_SORTED = ("grouped_mm", "_grouped_mm")  # their rows are sorted by content: those of an expert are neighbors


class CallRecord:
    """The calls of one forward pass."""

    def __init__(self, layouts: Calls | None, size: int, earlier: "CallRecord | None" = None) -> None:
        self._layouts, self._size, self._earlier = layouts, size, earlier
        self.is_learning = layouts is None
        self.learned = list[LearnedCall]()  # after the second pass that learns
        self.functions = list[Call]()  # all calls of functions, in the first pass that learns
        self.is_finished = False  # later calls belong to parts that are computed again
        self.is_ambiguous = False  # whether some tensor has another dimension as large as that of the examples
        self._units = list[Call]()
        self._rows = list[list[Tensor | None]]()  # for each learned call, the tensors with several rows per example
        self.entered = list[tuple[str, Any]]()  # the calls so far, if layouts are known, with the shapes of tensors
        self._by_shapes: dict[Any, Layout | None] | None = None

    def enter(self, path: str, tensors: Sequence[Tensor]) -> Layout:
        """Return the layout of the next call; refuse one that was not learned at this place with such tensors."""
        shapes = tuple([x.shape for x in tensors])
        if self.is_finished:
            if self._by_shapes is None:
                self._by_shapes = self._found_by_shapes()
            if (found := self._by_shapes.get((path, shapes))) is None:
                raise CallSequenceChangedError(path)
            return found
        index, layouts = len(self.entered), self._layouts or ()
        if index >= len(layouts):
            raise CallSequenceChangedError(path)
        learned_path, layout, learned_shapes = layouts[index]
        if learned_path != path or 0 < len(layout) < len(shapes):
            raise CallSequenceChangedError(path)
        for shape, examples, learned in zip(shapes, layout, learned_shapes, strict=False):
            # A tensor without examples of another size may hold chosen rows, whose number depends on the batch.
            fits = shape == learned
            if examples is not None:
                rows = self._size * examples.rows
                self.is_ambiguous |= shape.count(rows) > 1
                fits = len(shape) == len(learned) and shape[examples.dim] == rows
            if not fits:
                raise CallSequenceChangedError(path)
        self.entered.append((path, shapes))
        return layout

    def _found_by_shapes(self) -> dict[Any, Layout | None]:
        """Return the layouts of all calls by path and shapes, for parts that are computed again."""
        found = dict[Any, Layout | None]()
        for key, call in zip(self.entered, self._layouts or (), strict=False):
            if found.setdefault(key, call.layout) != call.layout:
                found[key] = None  # no way to know which of the two is computed again
        return found

    def learn_unit(self, path: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Layout | None:
        """Record a call of a unit, and return its layout; None in the first pass."""
        call = Call(path, tuple(x.shape for x in [*inputs, *outputs]))
        self._units.append(call)
        if self._earlier is None:
            return None
        index, before = len(self._units) - 1, self._earlier._units
        other = before[index].name if index < len(before) else None
        if other != path:
            raise calls_changed(CallSequenceChangedError(path if other is None else other))
        layout = find_layout(before[index], call, (self._earlier._size, self._size))
        self._learn(call, layout, [*inputs, *outputs])
        return layout

    def learn_function(
        self, path: str, name: str, index: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Layout:
        """Record a function's call in the second pass, after `index` others; return its layout, () if it has none."""
        earlier, layout = self._earlier, Layout()
        known = earlier.functions[index].name if earlier is not None and index < len(earlier.functions) else None
        other = Call(path, tuple(x.shape for x in [*inputs, *outputs]))
        if earlier is not None and known == name and name not in _SORTED:
            one = Call(path, earlier.functions[index].shapes)
            with suppress(UnsupportedModuleError):
                layout = find_layout(one, other, (earlier._size, self._size))
            # If examples go in and a result has no dimension for them, it mixes them.
            if any(layout) and None in layout[len(inputs) :]:
                layout = Layout()
        self._learn(other, layout, [*inputs, *outputs])
        return layout

    def _learn(self, call: Call, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self.learned.append(LearnedCall(call.name, layout, call.shapes))
        pairs = zip(tensors, layout, strict=False)
        self._rows.append([x.detach().clone() if own and own.rows > 1 else None for x, own in pairs])

    @property
    def has_several_rows(self) -> bool:
        return any(x is not None for rows in self._rows for x in rows)

    def find_views(self, others: "Sequence[CallRecord]") -> None:
        """Find which rows of each learned tensor belong to one example, and refuse a call where this is not clear."""
        # The last example equals the first. In `others`, the same passes, those between them are replaced, so the rows
        # that stay show the order.
        # If the calls depend on the examples, a later pass notices.
        calls = [call[:2] for call in self.learned]
        others = [other for other in others if [call[:2] for call in other.learned] == calls]
        found = dict[tuple[int, int], list[int]]()  # possible views, by the place of the call and of the tensor in it
        clear = dict[int, int]()  # the views of tensors for which one order fits, by the number of rows
        for index, (path, layout) in enumerate(calls):
            for place, (examples, x) in enumerate(zip(layout, self._rows[index], strict=False)):
                if examples is not None and x is not None:
                    replaced = [other._rows[index][place] for other in others]
                    found[index, place] = options = _views(x, replaced, examples, self._size)
                    if not options:
                        raise misplaced(path, "rows in another order")
                    if len(options) == 1:
                        clear[examples.rows] = options[0]
        for (index, place), options in found.items():
            layout = self.learned[index].layout
            examples = cast(ExampleDim, layout[place])
            # Where examples are equal by chance, several orders fit: take that of other tensors of the model.
            views = options[0] if len(options) == 1 else clear.get(examples.rows, 1)
            layout = (*layout[:place], examples._replace(views=views), *layout[place + 1 :])
            self.learned[index] = self.learned[index]._replace(layout=layout)

    def unattributed(self, unit: str) -> list[str]:
        """Return the functions with shared values of a unit whose results could not be attributed to examples."""
        names = [call.path for call in self._layouts or () if call.path.startswith(f"{unit}[") and not call.layout]
        return list(dict.fromkeys(path.removeprefix(f"{unit}[").removesuffix("]") for path in names))

    def finish(self) -> None:
        """End the record after the forward pass, and refuse it if it made fewer calls than were learned."""
        self.is_finished = True
        if self._layouts is not None and len(self.entered) != len(self._layouts):
            raise CallSequenceChangedError(self._layouts[len(self.entered)].path)
        if self._earlier is not None and len(self._units) != len(self._earlier._units):
            raise calls_changed(CallSequenceChangedError(self._earlier._units[len(self._units)].name))
