"""Clipping rules for `PrivateGradient(..., clip=...)`. Privacy rests on privgrad.gradient.clipping."""

from privgrad.gradient.clipping import Automatic, Clipping, Flat, PerLayer

__all__ = ["Automatic", "Clipping", "Flat", "PerLayer"]
