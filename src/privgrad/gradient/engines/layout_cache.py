"""The layouts that the fast engine has learned, by the shapes of the examples from which it learned them.

`passes` reads and fills the current layouts, and so do `factored` and `self_check`. `factored.Factored` calls the
methods of `LayoutCache`. The privacy guarantee of the fast engine rests on this file: by these layouts a pass
attributes each row to its example.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from privgrad.gradient.engines.layouts import Call, Layout


class Calls(list[tuple[str, Layout]]):
    """Path and layout of each call, in order.

    Attributes:
        shapes: the shapes of the tensors that each call was learned from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, ...]] = []

    def learn(self, call: Call, layout: Layout) -> None:
        """Add a call with its layout."""
        self.append((call.path, layout))
        self.shapes.append(call.shapes)


@dataclass
class Layouts:
    """The calls of a model's units in one forward pass, with the place of the examples in each tensor.

    Attributes:
        calls: path and layout of each call, in order; None before an audit.
        vmapped_units: paths of units that are computed by vmap.
        displaced: the same two for displaced parameters, by whether Hessian products are computed.
        reached: names of the parameters with gradients.
    """

    calls: Calls | None = None
    vmapped_units: set[str] = field(default_factory=set[str])
    displaced: dict[bool, tuple[Calls, set[str]]] = field(default_factory=dict[bool, tuple[Calls, set[str]]])
    reached: set[str] = field(default_factory=set[str])

    def copied(self) -> "Layouts":
        """Return a copy with sets and dicts of its own."""
        return replace(
            self, vmapped_units=set(self.vmapped_units), displaced=dict(self.displaced), reached=set(self.reached)
        )


class LayoutCache:
    """The current layouts, and those of earlier audits.

    A loop may be longer for longer examples. The engine then switches to the layouts of examples of the same shapes.

    Attributes:
        current: the layouts that the next pass uses.
    """

    def __init__(self) -> None:
        self.current = Layouts()
        self._known = dict[Any, Layouts]()
        self._changed = set[Any]()  # shapes for which the calls differed from the current layouts

    def take_whole(self, path: str) -> None:
        """Forget all layouts, and compute a module by vmap from now on."""
        self.current = Layouts(vmapped_units=self.current.vmapped_units | {path})
        self._known.clear()
        self._changed.clear()

    def remember(self, examples: Any) -> None:
        """Keep the current layouts for examples of these shapes."""
        self._known[shapes_of(examples)] = self.current.copied()

    def note_change(self, examples: Any) -> None:
        """Note that examples of these shapes need other layouts than the current ones, and switch to them if known."""
        self._changed.add(shapes_of(examples))
        self.recall(examples)

    def recall(self, examples: Any) -> None:
        """Switch to the layouts of examples of these shapes, if such examples needed other layouts before."""
        shapes = shapes_of(examples)
        if shapes in self._changed and (known := self._known.get(shapes)) is not None:
            found = known.copied()
            found.displaced = self.current.displaced | found.displaced
            self.current = found


def shapes_of(examples: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of one example's tensors."""
    return tuple(cast(Tensor, leaf).shape[1:] for leaf in tree_leaves(examples))
