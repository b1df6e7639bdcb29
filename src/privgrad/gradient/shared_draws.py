"""Find random draws that all examples of a microbatch share, such as the one that skips a layer.

PrivateGradient calls `share_draws` before the first batch. The privacy guarantee rests on it where a batch comes in
several microbatches. One example more then moves others from one microbatch to the next, and so to another draw.
"""

from collections.abc import Collection
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from privgrad.global_streams import numpy_and_python_states
from privgrad.gradient.module_state import seeded
from privgrad.gradient.probes import losses_on_copies
from privgrad.gradient.randomness import torch_states
from privgrad.types import LossFunction, map_examples


def share_draws(model: nn.Module, loss_fn: LossFunction, few: Any) -> bool:
    """Return whether the losses depend on random numbers that the examples share.

    Their number is the same for a few examples and for twice as many. Two more passes then put 0 and 1 in their place,
    because a draw may decide nothing: BART draws a number for each layer also if its layerdrop is 0. Shared numbers of
    numpy and Python count as such in any case.

    Args:
        model: the model, in the mode in which it trains.
        loss_fn: (model, examples) -> losses, shape (B,).
        few: a few examples.
    """
    own, more = _Draws(), _Draws()
    _losses(model, loss_fn, few, own)
    if not own.sizes and own.others is None:  # there are no draws, as in most models
        return False
    _losses(model, loss_fn, map_examples(lambda leaf: torch.cat([leaf, leaf]), few), more)
    if own.others is not None and own.others == more.others:
        return True
    shared = [place for place, sizes in enumerate(zip_longest(own.sizes, more.sizes)) if sizes[0] == sizes[1]]
    if not shared:
        return False
    low, high = (_losses(model, loss_fn, few, _Draws(shared, number)) for number in (0.0, 1.0))
    return not torch.equal(low, high)


def _losses(model: nn.Module, loss_fn: LossFunction, examples: Any, draws: "_Draws") -> Tensor:
    """Return the losses of a pass under a fixed seed, in which a mode notes or replaces the draws."""
    with seeded(0):
        before = numpy_and_python_states()
        with draws:
            losses = losses_on_copies(model, loss_fn, examples, seed=None)
        after = numpy_and_python_states()
        draws.others = None if after == before else after
    return losses


class _Draws(TorchFunctionMode):
    """A mode that notes how many numbers each function draws, and can replace what some of them return.

    Args:
        places: of the calls to replace, among all calls that draw.
        number: what their tensors are filled with.
    Attributes:
        sizes: the number of elements that each call returned.
        others: the last states of numpy's and Python's random streams; None if nothing was drawn from them.
    """

    def __init__(self, places: Collection[int] = (), number: float = 0.0) -> None:
        super().__init__()
        self._places, self._number = places, number
        self.sizes, self.others = list[int](), cast(Any, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function; torch calls this for each function under the mode."""
        before = torch_states()
        result = func(*args, **(kwargs or {}))
        if torch.equal(before, torch_states()):
            return result
        place, drawn = len(self.sizes), cast(Any, result[0] if isinstance(result, tuple) else result)
        self.sizes.append(drawn.numel() if isinstance(drawn, Tensor) else 1)
        if place not in self._places or not isinstance(result, Tensor):
            return cast(Any, result)
        is_in_place = bool(args) and result is args[0]
        return result.fill_(self._number) if is_in_place else torch.full_like(result, self._number)
