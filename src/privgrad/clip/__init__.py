"""Clipping rules for `PrivateGradient(..., clip=...)`, and rules for C of each step for its `adaptive_clip`."""

from privgrad.clip.adaptive import AdaptiveClip, Quantile, SquaredError, TargetFraction
from privgrad.clip.clipping import Clipping, Flat
from privgrad.clip.rules import Automatic, PerLayer

__all__ = ["AdaptiveClip", "Automatic", "Clipping", "Flat", "PerLayer", "Quantile", "SquaredError", "TargetFraction"]
