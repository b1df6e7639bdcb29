"""Checks that find mistakes and prove nothing: losses that mix examples, models that draw, bounds copied from data."""

from typing import Any

from torch import nn

from privgrad.checks.model_and_loss import check_loss, configuration, require_supported
from privgrad.checks.randomness import share_draws
from privgrad.checks.state import require_no_memory
from privgrad.checks.variables import State
from privgrad.gradient.probes import few_of
from privgrad.ledger.lineage import note_base, note_training, warn_if_trained
from privgrad.types import LossFunction

__all__ = [
    "State",
    "check_loss",
    "configuration",
    "note_base",
    "note_training",
    "require_no_memory",
    "require_supported",
    "share_draws",
    "try_batch",
    "warn_if_trained",
]


def try_batch(model: nn.Module, loss_fn: LossFunction, examples: Any, *, together: bool) -> bool:
    """Try the loss on a few examples of a batch, and return whether the examples share random numbers.

    `together`: whether the engine computes examples in one forward pass.
    """
    randomness = check_loss(model, loss_fn, examples)
    return together and randomness.draws and share_draws(model, loss_fn, few_of(examples, fill=False))
