"""Optimizers for released gradients: real torch optimizers, pure post-processing."""

from privgrad.optim.adaptive import AdagradBC, AdamBC, AdamWBC, NAdamBC, RMSpropBC
from privgrad.optim.base import SGD, Adagrad, Adam, AdamW, MomentumSGD, NAdam, PrivateOptimizer, RMSprop, Yogi
from privgrad.optim.debias import debias, default_floor
from privgrad.optim.public_data import AdamPub, MirrorDescent, RMSpropPub

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradBC",
    "Adam",
    "AdamBC",
    "AdamPub",
    "AdamW",
    "AdamWBC",
    "MirrorDescent",
    "MomentumSGD",
    "NAdam",
    "NAdamBC",
    "PrivateOptimizer",
    "RMSprop",
    "RMSpropBC",
    "RMSpropPub",
    "Yogi",
    "debias",
    "default_floor",
]
