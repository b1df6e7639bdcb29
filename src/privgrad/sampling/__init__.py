"""Which examples a step uses: Poisson sampling by secret random numbers, and how the drawn examples are loaded."""

from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.datasets import ask_about_rows
from privgrad.sampling.draws import BatchSampler

__all__ = ["BatchSampler", "ClassRates", "ask_about_rows"]
