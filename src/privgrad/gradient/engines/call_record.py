"""The calls of a forward pass, in order, with the dimension that holds the examples in each tensor of a call.

`capture` makes a `CallRecord` for each pass, and calls its methods. `passes` reads what was learned. The privacy
guarantee of the fast engine rests on this file: a pass attributes each row to its example by these layouts.

Layouts are learned from two passes. The first has one more example than the second, and records the calls of all units
and functions. The second compares its own calls with these.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from privgrad.errors import PrivacyError
from privgrad.gradient.engines.function_calls import Called
from privgrad.gradient.engines.layout_cache import Calls
from privgrad.gradient.engines.layouts import Call, ExampleDim, Layout, attributed, find_layout
from privgrad.gradient.engines.refusals import REMEDY, CallSequenceChangedError, refused

_SORTED = ("grouped_mm", "_grouped_mm")  # their rows are sorted by content: those of an expert are neighbors


class CallRecord:
    """The calls of one forward pass.

    Args:
        layouts: path and layout of each call, in order; None while they are being learned.
        size: the number of examples.
        earlier: the record of the first pass that learns, in the second one; else None.
    Attributes:
        learned: path and layout of each call, after the second pass that learns.
        paths: the paths of the calls so far, if layouts are known.
        functions: all calls of functions, in the first pass that learns.
        is_finished: whether the forward pass has ended; later calls belong to parts that are computed again.
        is_ambiguous: whether some tensor has another dimension as large as that of the examples. By its sizes, the
            examples could be in either.
    """

    def __init__(self, layouts: Calls | None, size: int, earlier: "CallRecord | None" = None) -> None:
        self._layouts, self._size, self._earlier = layouts, size, earlier
        self.learned, self.paths, self.functions = Calls(), list[str](), list[Called]()
        self.is_finished = self.is_ambiguous = False
        self._units = list[Call]()
        self._by_shapes = dict[Any, Layout | None]()

    @property
    def is_learning(self) -> bool:
        """Whether layouts are being learned."""
        return self._layouts is None

    @property
    def needs_functions(self) -> bool:
        """Whether calls of functions are recorded; not if no call that was learned needs it."""
        return self._layouts is None or any(None in layout or "[" in path for path, layout in self._layouts)

    def enter(self, path: str, tensors: Sequence[Tensor]) -> Layout:
        """Return the layout of the next call, given the tensors among its arguments.

        Raises:
            CallSequenceChangedError: another call was learned at this place, or tensors of other sizes: a tensor
                without a dimension of examples may hold chosen rows of theirs, whose number depends on the batch.
        """
        key = path, tuple(x.shape for x in tensors)
        if self.is_finished:
            found = self._by_shapes.get(key)
            if found is None:
                raise CallSequenceChangedError(path)
            return found
        index, layouts = len(self.paths), self._layouts or Calls()
        if index >= len(layouts) or layouts[index][0] != path or 0 < len(layouts[index][1]) < len(tensors):
            raise CallSequenceChangedError(path)
        layout = layouts[index][1]
        if not all(map(self._fits, tensors, layout, layouts.shapes[index])):
            raise CallSequenceChangedError(path)
        if self._by_shapes.setdefault(key, layout) != layout:
            self._by_shapes[key] = None  # no way to know which of the two is computed again
        self.paths.append(path)
        return layout

    def _fits(self, x: Tensor, examples: ExampleDim | None, learned: torch.Size) -> bool:
        """Return whether a tensor has as many rows per example as it was learned with, or its shape if it has none."""
        if examples is None:
            return x.shape == learned
        rows = self._size * examples.rows
        self.is_ambiguous |= x.shape.count(rows) > 1
        return x.dim() == len(learned) and x.shape[examples.dim] == rows

    def learn_unit(self, path: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Layout | None:
        """Record a call of a unit, and return its layout; None in the first pass.

        Raises:
            UnsupportedModuleError: the first pass had another call here, or tensors that cannot be compared.
        """
        call = Call(path, tuple(x.shape for x in [*inputs, *outputs]))
        self._units.append(call)
        if self._earlier is None:
            return None
        index, before = len(self._units) - 1, self._earlier._units
        if index >= len(before) or before[index].path != path:
            raise self._others(before[index].path if index < len(before) else "no call", path)
        layout = find_layout(before[index], call, (self._earlier._size, self._size))
        self.learned.learn(call, layout)
        return layout

    def learn_function(
        self, path: str, name: str, index: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Layout:
        """Record a call of a function in the second pass, and return its layout; () if it cannot be attributed.

        Args:
            path: path of a unit, with the function's name in brackets.
            name: the function's name.
            index: the number of calls of any function before this one.
            inputs: the tensors among its arguments.
            outputs: the tensors in its result.
        """
        earlier, layout = self._earlier, Layout()
        known = earlier.functions[index].name if earlier is not None and index < len(earlier.functions) else None
        other = Call(path, tuple(x.shape for x in [*inputs, *outputs]))
        if earlier is not None and known == name and name not in _SORTED:
            one = Call(path, earlier.functions[index].shapes)
            layout = attributed(one, other, (earlier._size, self._size), len(inputs))
        self.learned.learn(other, layout)
        return layout

    def unattributed(self, unit: str) -> list[str]:
        """Return the functions with shared values of a unit whose results could not be attributed to examples."""
        names = [path for path, layout in self._layouts or () if path.startswith(f"{unit}[") and not layout]
        return list(dict.fromkeys(path.removeprefix(f"{unit}[").removesuffix("]") for path in names))

    def finish(self) -> None:
        """End the record after the forward pass.

        Raises:
            CallSequenceChangedError: it made fewer calls than there are layouts.
            UnsupportedModuleError: the first pass that learns made more calls of units.
        """
        self.is_finished = True
        if self._layouts is not None and len(self.paths) != len(self._layouts):
            raise CallSequenceChangedError(self._layouts[len(self.paths)][0])
        if self._earlier is not None and len(self._units) != len(self._earlier._units):
            raise self._others(self._earlier._units[len(self._units)].path, "no call")

    def _others(self, with_more: str, with_fewer: str) -> PrivacyError:
        """Return the error for a model whose units are called in another order with one more example."""
        pairs = ((with_more, self._size + 1), (with_fewer, self._size))
        got = " and ".join(f"{path!r} with {size} examples" for path, size in pairs)
        unit = with_fewer if with_more == "no call" else with_more
        remedy = f"call each layer on all examples, or {REMEDY}"
        return refused("the calls of layers", "not to depend on the examples", got, remedy, unit=unit)
