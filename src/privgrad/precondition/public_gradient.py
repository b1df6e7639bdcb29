"""The mean gradient on public data, at the model's current weights."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate  # pyright: ignore[reportUnknownVariableType]

from privgrad.errors import expected, require_in, require_integer
from privgrad.gradient.functional import require_losses, seeded, trainable
from privgrad.processes import ALONE, Processes
from privgrad.types import Batch, LossFunction, count_examples, map_examples


def require_public(function: str, examples: object, source: object) -> None:
    """Raise PrivacyError for a private batch, or for public examples without a source."""
    if isinstance(examples, Batch):
        raise expected(function, "examples", "to be public", "a batch of a privacy plan")
    if not isinstance(source, str) or not source:
        raise expected(function, "source", "to be a text that describes the examples", repr(source))


class PublicGradient:
    """The mean gradients on batches of public examples, as side information for AdaDPS and other methods.

    Args:
        model: the module that is trained.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: the public examples: a map-style data set, or tensors in the structure that loss_fn takes, with
            leading dimension P >= 1. They are never clipped, noised or charged: no private example may be among them.
        source: a short description of the examples, and why they are public; recorded.
        batch_size: the number of examples per batch, from 1 to P; None means all P.
        seed: >= 0; it decides the order of the examples, and random draws of the model.
        processes: the processes that train a sharded model together; all compute the same gradients.
    Raises:
        PrivacyError: `examples` is a private batch, there are no examples, or a number is out of range. `fit` and the
            bridges also refuse rows of the private data set itself. They cannot find copies.
    Attributes:
        given: the examples as they were given.
        examples: in the structure that the loss takes.
    Privacy:
        The gradients depend on public data and released weights only, so they are post-processing.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        examples: Any,
        *,
        source: str,
        batch_size: int | None = None,
        seed: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        require_public("PublicGradient", examples, source)
        require_integer("PublicGradient", "seed", seed, 0)
        self.given = examples
        if isinstance(examples, TensorDataset):
            examples = tuple(examples.tensors)
        elif isinstance(examples, Dataset):
            data = cast("Sequence[Any]", examples)
            examples = default_collate([data[index] for index in range(len(data))])
        self.examples = examples
        count = count_examples(self.examples)
        self._batch_size = count if batch_size is None else batch_size
        require_integer("PublicGradient", "the number of examples", count, 1)
        require_in("PublicGradient", "batch_size", self._batch_size, f"[1, {count}]")
        self.model, self.source = model, source
        self._loss_fn, self._count, self._seed = loss_fn, count, seed
        self._processes = processes

    def __call__(self, step: int) -> dict[str, Tensor]:
        """Return the mean gradient on the batch of a step, of a pass in random order without an incomplete batch."""
        passed, place = divmod(step, self._count // self._batch_size)
        return self._gradient(self._order(passed)[place * self._batch_size :][: self._batch_size], step)

    def one_pass(self, passed: int) -> Iterator[dict[str, Tensor]]:
        """Yield the mean gradients of all batches of one pass, at the current weights; the last may be smaller."""
        order = self._order(passed)
        for start in range(0, self._count, self._batch_size):
            yield self._gradient(order[start : start + self._batch_size], passed)

    def __repr__(self) -> str:
        """Return the text that the preconditioner's text, and so a checkpoint, contains."""
        return f"PublicGradient({self.source}; {self._count} examples, {self._batch_size} at once, seed {self._seed})"

    def _order(self, passed: int) -> Tensor:
        if self._batch_size == self._count:
            return torch.arange(self._count)
        return torch.randperm(self._count, generator=torch.Generator().manual_seed(self._seed + passed))

    def _gradient(self, chosen: Tensor, step: int) -> dict[str, Tensor]:
        """Return the mean gradient on the chosen examples, sharded as the model is."""
        examples = self.examples
        if len(chosen) < self._count:
            examples = map_examples(itemgetter(chosen), examples)
        with self._processes.opened(self.model):
            parameters = trainable(self.model)
            with torch.enable_grad(), seeded(self._seed + step):
                loss = require_losses(self._loss_fn(self.model, examples), len(chosen)).mean()
                weights = list(parameters.values())
                grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            for name, grad in zip(parameters, grads, strict=True):
                if grad.numel() and not all(torch.isfinite(end) for end in torch.aminmax(grad)):  # in one pass
                    raise expected("PublicGradient", f"the public gradient of {name!r}", "to be finite", "inf or nan")
        return dict(self._processes.shard_like(dict(zip(parameters, grads, strict=True)), trainable(self.model)))
