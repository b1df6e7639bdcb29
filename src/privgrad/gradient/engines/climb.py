"""Choose the module that is taken whole when a unit is refused: the climb from a unit to the root of the model.

`factored.Factored` calls `Climb`. A unit is refused if its per-example gradients do not follow from its own inputs.
Causes are a value that is computed once for all examples and then reshaped, examples outside of dimension 0, and rows
that are routed by their content. The unit is then computed by vmap, and if that is refused, its parent is one unit by
vmap, and so on. Each time, the model is learned and checked again. If the root is refused too, the whole loss of each
example is computed by itself, by `engines.vmap`.

The privacy guarantee does not rest on which module is chosen, because a climb cannot hide a dependence. Inside of a
module that is taken whole, each example runs by itself, so no example can reach another one there. Outside of it, all
checks run again, on the same rows: a dependence there still changes the gradients of the compared rows, and is refused.
At the top, each example's loss is computed from a batch of one. After a climb, the checks also compare losses: so a
model that mixes examples in a module that is taken whole is refused too, although its gradients would be apart.

The bound on rounding rests on `begin_step`: after the first step, no example may change how later sums are computed.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from privgrad.gradient.engines.layout_cache import LayoutCache
from privgrad.gradient.engines.passes import Point
from privgrad.gradient.engines.refusals import CallSequenceChangedError, Reason, UnitRefusedError, calls_changed
from privgrad.gradient.engines.vmap import Vmap
from privgrad.gradient.factors.base import Factor
from privgrad.types import LossFunction


class Climb:
    """The climbs of one engine.

    Args:
        model: the module.
        loss_fn: (model, examples) -> losses, shape (B,).
        layouts: the layouts of the engine; they hold the paths of the modules that are computed by vmap.
    Attributes:
        any: whether some module is taken whole.
        reached_loss: whether even the root was refused, so that `of_losses` computes the gradients.
        reasons: why a unit was refused, by the path of the module that was taken whole because of it.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, layouts: LayoutCache) -> None:
        self._model, self._layouts, self._alone = model, layouts, Vmap(model, loss_fn)
        self.any = self.reached_loss = False
        self._is_open, self._is_accepted = True, False
        self.reasons = dict[str, Reason]()
        self._new = list[str]()  # the modules of the climbs so far, until an attempt is accepted

    def begin_step(self) -> None:
        """Allow no more climbs if an earlier step was computed."""
        self._is_open = not self._is_accepted

    def reopen(self) -> None:
        """Allow climbs in the next step; for a model whose configuration has changed."""
        self._is_open, self._is_accepted = True, False

    @contextmanager
    def attempt(self) -> Generator[None]:
        """Run one attempt. If it refuses a unit, take that unit or a module above whole; the caller then tries again.

        Raises:
            UnsupportedModuleError: the attempt refuses the model for another reason, or no climb is allowed.
        """
        try:
            yield
        except (UnitRefusedError, CallSequenceChangedError) as error:
            refusal = error if isinstance(error, UnitRefusedError) else calls_changed(error)
            if self.reached_loss or not self._is_open:
                raise refusal from None
            self._new.append(self._take(refusal.unit))
            self.any, self.reasons[self._new[-1]] = True, refusal.reason
        else:
            if self._new:
                _warn_of(self._new, self.reasons[self._new[-1]].condition)
            self._new, self._is_accepted = [], True

    def of_losses(self, examples: Any, point: Point) -> dict[str, Factor]:
        """Return the gradient of each example's loss, computed from a batch of one."""
        if point.along is not None:
            return self._alone.at(examples, point.along, point.share)
        if point.radius is None:
            return self._alone(examples)
        return self._alone.moved(examples, point.radius, exact=point.exact)

    def _take(self, unit: str) -> str:
        """Take a refused unit whole, or the next module above it, and return its path; above the root, take the loss.

        If the unit or a module that contains it is computed by vmap already, take the next module above that one.

        Args:
            unit: the path of a module, or of a call inside of it, such as "body[0]".
        """
        path, taken = unit.partition("[")[0], self._layouts.current.vmapped_units
        holding = [other for other in taken if other == path or _is_above(other, path)]
        if not holding:
            self._layouts.take_whole(path)
            return path
        path = min(holding, key=len)
        while path:
            path = path.rpartition(".")[0]
            if type(self._model.get_submodule(path)).forward is not nn.Module.forward:  # a ModuleList has none
                self._layouts.take_whole(path)
                return path
        self.reached_loss = True
        return ""


def _warn_of(taken: Sequence[str], reason: str) -> None:
    """Warn that modules are taken whole and slow, with the reason of the last climb. No value of the examples is in it.

    Args:
        taken: their paths, in the order of the climbs.
        reason: why the last unit was refused.
    """
    last = [path for path in taken if not any(_is_above(other, path) for other in taken)]
    names = ", ".join(f"'{path}'" if path else "the whole model" for path in dict.fromkeys(last[:3]))
    more = f" and {len(last) - 3} more" if len(last) > 3 else ""
    warnings.warn(
        f"PrivateGradient computes {names}{more} for each example by itself: this is right, but slow. For the "
        f"fast engine, {reason}",
        stacklevel=5,
    )


def _is_above(one: str, other: str) -> bool:
    """Return whether the module at `one` contains the module at `other`."""
    return one != other and (one == "" or other.startswith(f"{one}."))
