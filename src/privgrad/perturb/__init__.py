"""Contributions for `PrivateGradient(..., perturb=...)`: what each example adds to the sum before it is clipped."""

from privgrad.gradient.contribution import Contribution, SampleGradient
from privgrad.perturb.points import BAM, SAT, DiSK, RawSAM

__all__ = ["BAM", "SAT", "Contribution", "DiSK", "RawSAM", "SampleGradient"]
