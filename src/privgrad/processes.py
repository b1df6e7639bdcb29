"""The interface to the processes that train one model together, and its version for a single process.

PrivateGradient, PublicGradient, `sampling` and `fit` call the interface. `integrations.distributed` implements it for
several processes. The privacy guarantee rests on it, except on `shard_like` and `gather_state`. These two move only
public or released values.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from privgrad.errors import described, expected
from privgrad.types import NoisyGradient

T = TypeVar("T")


class Processes:
    """A single process. The subclass `integrations.distributed.Distributed` implements several processes.

    PrivateGradient, `plan.batches` and `fit` (with TrainingRun) call these methods. PublicGradient calls `unsharded`
    and `shard_like`. Each example belongs to one process, and only this process computes and clips its gradient. The
    first process sums the results of all, draws the noise, keeps the ledger and broadcasts the released gradient. The
    guarantee rests on this: there is one sum, one noise and one ledger.

    Attributes:
        rank: index of this process; 0 is the first process.
        count: number of processes.
    """

    rank = 0
    count = 1

    def all_succeed(self, *, step: int = 0) -> AbstractContextManager[None]:
        """Return a context for this process's part of a step. It ends once the parts of all processes have succeeded.

        Args:
            step: index of the step; must be equal in all processes.
        Raises:
            PrivacyError: a different process failed, or is at a different step. An error of this process's own part is
                raised as it is.
        """
        del step
        return nullcontext()

    def reduce(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sum the values over all processes, by name. PRIVATE. Only the first process gets a meaningful result.

        Args:
            values: values with the same names, shapes and dtypes in all processes. Their memory may be overwritten.
        """
        return values

    def broadcast(self, gradient: NoisyGradient) -> NoisyGradient:
        """Return the first process's gradient in all processes.

        The memory of the gradients of the other processes may be overwritten.
        """
        return gradient

    def broadcast_object(self, value: T) -> T:
        """Return the first process's value: plain numbers, strings, bytes, tensors, and containers of these."""
        return value

    def begin(self, model: nn.Module) -> None:
        """Copy the weights and buffers of the first process to all processes."""
        del model

    def unsharded(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which the model is not sharded: plain parameters, complete in each process."""
        del model
        return nullcontext()

    def shard_like(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Shard complete values like the tensors of the same names. Values of a different shape stay complete."""
        del like
        return values

    def gather_state(self, state: T) -> T:
        """Return a state of dicts, lists and tensors with every sharded tensor gathered. All processes must call it."""
        return state


ALONE = Processes()


def require_all_processes(function: str, processes: Processes) -> None:
    """Raise PrivacyError if torch.distributed has several processes but `processes` is a single one.

    PrivateGradient and `sampling` call it. Otherwise each process would draw its own noise for its own sum. A
    mean of their gradients would then cost more privacy than any of their ledgers records.
    """
    if not isinstance(processes, Processes):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = "leave it out, or give privgrad.integrations.distributed.Distributed()"
        raise expected(function, "processes", "to be a Processes object", described(processes), remedy)
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if processes.count == 1 and is_initialized and (count := torch.distributed.get_world_size()) > 1:
        remedy = "pass processes=privgrad.integrations.distributed.Distributed()"
        condition = f"to be all {count} processes of torch.distributed"
        raise expected(function, "processes", condition, "1 process", remedy)
