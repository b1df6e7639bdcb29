"""Points for `PrivateGradient(..., perturb=...)`. Privacy rests on privgrad.gradient.perturb."""

from privgrad.gradient.contribution import Contribution, SampleGradient
from privgrad.gradient.perturb import BAM, SAT, DiSK, RawSAM

__all__ = ["BAM", "SAT", "Contribution", "DiSK", "RawSAM", "SampleGradient"]
