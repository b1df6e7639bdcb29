"""Contributions for `PrivateGradient(..., perturb=...)`: what each example adds to the sum before it is clipped.

Privacy rests on `contribution` and `perturb` of gradient/.
"""

from privgrad.gradient.contribution import Contribution, SampleGradient
from privgrad.gradient.perturb import BAM, SAT, DiSK, RawSAM

__all__ = ["BAM", "SAT", "Contribution", "DiSK", "RawSAM", "SampleGradient"]
