"""The processes that train one model together: what a private step asks of them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from privgrad.errors import described, expected
from privgrad.types import NoisyGradient

T = TypeVar("T")


class Processes:
    """One process by itself; `integrations.distributed.Distributed` is several.

    Each example belongs to one process, which alone takes and clips its gradient. The sums of all processes meet in the
    first, which alone draws the noise and keeps the ledger; what it releases goes to all.

    Attributes:
        rank: of this process, from 0: the first.
        count: how many there are.
    """

    rank = 0
    count = 1

    def run_on_all(self, work: Callable[[], T], *, step: int = 0) -> T:
        """What this process' work gives, once the work of all has ended well, in the same step.

        Raises:
            PrivacyError: another process failed, or takes another step. And whatever this one's work raised.
        """
        del step
        return work()

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sums over the processes, by name; in the first process only, elsewhere of no meaning. PRIVATE.

        Args:
            values: of equal names, shapes and dtypes everywhere; their memory may be used.
        """
        return values

    def broadcast(self, gradient: NoisyGradient) -> NoisyGradient:
        """What the first process releases, in all. The memory of the others' values may be used."""
        return gradient

    def broadcast_object(self, value: T) -> T:
        """The first process' value: plain numbers, strings, tensors, and lists and dicts of these."""
        return value

    def begin(self, model: nn.Module) -> None:
        """Give all processes the first one's weights and buffers."""
        del model

    def unsharded(self, model: nn.Module) -> AbstractContextManager[object]:
        """The model as if it were not sharded: plain parameters, whole in each process."""
        del model
        return nullcontext()

    def shard_like(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole values, sharded as the tensors of those names are; what is not shaped like them stays as it is."""
        del like
        return values

    def gather_state(self, state: T) -> T:
        """A state of dicts, lists and tensors with every sharded tensor gathered; asked of all processes at once."""
        return state


ALONE = Processes()


def require_told(function: str, processes: Processes) -> None:
    """Raise PrivacyError in one of several processes that has not been told of the others.

    Each would draw its own noise for its own sum, and a mean of their gradients would cost more than any ledger says.
    """
    if not isinstance(processes, Processes):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = "leave it out, or give privgrad.integrations.distributed.Distributed()"
        raise expected(function, "processes", "to be those that train together", described(processes), remedy)
    torch_knows = torch.distributed.is_available() and torch.distributed.is_initialized()
    if processes.count == 1 and torch_knows and torch.distributed.get_world_size() > 1:
        remedy = "pass processes=privgrad.integrations.distributed.Distributed()"
        raise expected(function, "processes", "to be told of the others that torch.distributed knows", "none", remedy)
