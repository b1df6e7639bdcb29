"""Give each pass over a batch the examples as they were, also if the loss writes to them.

PrivateGradient and `explanation` wrap a loss_fn in `OwnExamples`, and `engines.self_check` counts writes by `version`.
The privacy guarantee rests on it: a check that reads the batch again may not change the examples that are clipped.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from privgrad.errors import expected
from privgrad.types import LossFunction, map_examples


class OwnExamples:
    """A loss_fn that gives the user's loss_fn copies of the examples if it writes to them, as `x.div_(255)` does.

    Args:
        loss_fn: (model, examples) -> losses, shape (B,).
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn, self._writes, self._tries = loss_fn, False, False

    def __call__(self, model: nn.Module, examples: Any) -> Tensor:
        """Return the losses.

        Raises:
            PrivacyError: the loss wrote to the examples, and did not when it was tried.
        """
        if self._writes:
            return self._loss_fn(model, map_examples(torch.clone, examples))
        leaves = [leaf for leaf in tree_leaves(examples) if isinstance(leaf, Tensor)]
        before = list(map(version, leaves))
        losses = self._loss_fn(model, examples)
        if any(map(operator.ne, before, map(version, leaves))):
            self._writes = True
            if not self._tries:
                got, remedy = "a write in place", "write to a copy, such as x = x / 255 or labels = labels.clone()"
                raise expected("loss_fn", "examples", "to stay as they are", got, remedy)
        return losses

    def tried(self, model: nn.Module, examples: Any) -> Tensor:
        """Return the losses, and notice whether the loss writes to examples. `check_loss` gives it copies of a few."""
        self._tries = True
        try:
            return self(model, examples)
        finally:
            self._tries = False


def version(x: Tensor) -> int:
    """Return autograd's count of in-place writes; 0 for a tensor of inference mode, which has none."""
    return 0 if x.is_inference() else x._version
