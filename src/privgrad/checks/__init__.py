"""Checks that find mistakes and prove nothing: losses that mix examples, models that draw, bounds copied from data."""

from dataclasses import replace
from typing import Any

from torch import nn

from privgrad.checks.model_and_loss import check_loss, configuration, require_supported
from privgrad.checks.randomness import Randomness, share_draws
from privgrad.checks.state import require_no_memory, require_no_memory_in_collate
from privgrad.checks.variables import State
from privgrad.gradient.probes import few_of, four_of
from privgrad.ledger.lineage import moves_of, note_base, note_moves, note_training, warn_if_trained
from privgrad.types import LossFunction

__all__ = [
    "State",
    "check_loss",
    "configuration",
    "moves_of",
    "note_base",
    "note_moves",
    "note_training",
    "require_no_memory",
    "require_no_memory_in_collate",
    "require_supported",
    "share_draws",
    "try_batch",
    "warn_if_trained",
]


def try_batch(model: nn.Module, loss_fn: LossFunction, examples: Any, *, together: bool) -> Randomness:
    """Try the loss on a few examples of a batch, and return its random draws.

    `together`: whether the engine computes examples in one forward pass, in which they may share draws.
    """
    randomness = check_loss(model, loss_fn, examples)
    shared = False
    if together and randomness.draws:
        few = four_of(few_of(examples, fill=False))
        shared = share_draws(model, loss_fn, few, randomness.seen)
    return replace(randomness, shared=shared, seen=None)
