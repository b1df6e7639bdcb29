"""The training loop `fit`, its checkpoints and schedules, and what the loops of other frameworks share."""

from privgrad.training.fitting import fit
from privgrad.training.run import FitResult

__all__ = ["FitResult", "fit"]
