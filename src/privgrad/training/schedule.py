"""Schedule: the learning rate over the steps of a training, with an optional warm-up."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from privgrad.errors import require_choice, require_in, require_integer

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A schedule of the learning rate: a linear warm-up to its peak, then a decay to zero at the end of the training.

    The peak is the learning rate that the optimizer was made with. Each param group keeps its own peak.

    Computes, for T steps and W = round(warmup T), the factor of step s = 0, 1, ..., T - 1:
        (s + 1) / (W + 1) during the warm-up, s < W; then, with t = s - W and R = T - W: 1 (constant), 1 - t / R
        (linear) or (1 + cos(pi t / R)) / 2 (cosine).

    Args:
        decay: "constant", "linear" or "cosine".
        warmup: in [0, 1), the share of the steps in which the rate rises.
    Raises:
        PrivacyError: the decay is unknown, or the warm-up is out of its range.
    """

    decay: Decay = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        require_choice("Schedule", "decay", self.decay, get_args(Decay))
        require_in("Schedule", "warmup", self.warmup, "[0, 1)", "give a share of the steps")
        object.__setattr__(self, "warmup", float(self.warmup))  # a checkpoint cannot hold numpy scalars

    def of(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        """Return a scheduler that sets the rate of the first step now, and that of the next one at each `step`.

        Args:
            optimizer: from privgrad.optim or torch.optim.
            steps: T >= 1, the number of steps of the training.
        Returns:
            A LambdaLR. Its state is plain numbers and the name of the decay, so a checkpoint can hold it.
        Raises:
            PrivacyError: steps is not a whole number >= 1.
        """
        require_integer("Schedule.of", "steps", steps, 1)
        warm = min(round(self.warmup * steps), steps - 1)
        return LambdaLR(optimizer, _Factor(self.decay, warm, int(steps)))


@dataclass
class _Factor:
    """The factor of the learning rate, by step. LambdaLR calls it, and keeps its attributes in checkpoints."""

    decay: Decay
    warmup_steps: int
    steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        share = min(1.0, (step - self.warmup_steps) / (self.steps - self.warmup_steps))
        return {"constant": 1.0, "linear": 1.0 - share, "cosine": (1.0 + math.cos(math.pi * share)) / 2}[self.decay]
