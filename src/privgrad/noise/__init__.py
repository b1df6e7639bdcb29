"""Gaussian noise on the clipped sum: independent in each step, or correlated in bands of steps."""

from privgrad.noise.banded import Banded

__all__ = ["Banded"]
