"""Clipping rules for `PrivateGradient(..., clip=...)`, and rules for C of each step for its `adaptive_clip`.

Privacy rests on privgrad.gradient: clipping, norm_statistics and adaptive_clip.
"""

from privgrad.gradient.adaptive_clip import AdaptiveClip, Quantile, SquaredError, TargetFraction
from privgrad.gradient.clipping import Automatic, Clipping, Flat, PerLayer

__all__ = ["AdaptiveClip", "Automatic", "Clipping", "Flat", "PerLayer", "Quantile", "SquaredError", "TargetFraction"]
