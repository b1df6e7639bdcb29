"""Points for `PrivateGradient(..., perturb=...)`. Privacy rests on privgrad.gradient.perturb."""

from privgrad.gradient.perturb import BAM, SAT, Perturbation, RawSAM

__all__ = ["BAM", "SAT", "Perturbation", "RawSAM"]
