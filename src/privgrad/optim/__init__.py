"""Optimizers for released gradients: real torch optimizers, pure post-processing."""

from privgrad.optim.adam import AdamBC
from privgrad.optim.base import SGD, Adagrad, Adam, NAdam, PrivateOptimizer, RMSprop
from privgrad.optim.debias import debias, default_floor

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamBC",
    "NAdam",
    "PrivateOptimizer",
    "RMSprop",
    "debias",
    "default_floor",
]
