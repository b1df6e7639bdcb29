"""Optimizers for released gradients: real torch optimizers, pure post-processing."""

from privgrad.optim.adaptive import AdagradBC, AdamBC, AdamWBC, NAdamBC, RMSpropBC
from privgrad.optim.base import PrivateOptimizer, widened
from privgrad.optim.contrib import AdamPub, MicroAdam, MirrorDescent, RMSpropPub
from privgrad.optim.debiased import debias, noise_floor
from privgrad.optim.matrix import Muon, MuonBC
from privgrad.optim.standard import SGD, Adagrad, Adam, AdamW, MomentumSGD, NAdam, RMSprop, Yogi

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "AdagradBC",
    "Adam",
    "AdamBC",
    "AdamPub",
    "AdamW",
    "AdamWBC",
    "MicroAdam",
    "MirrorDescent",
    "MomentumSGD",
    "Muon",
    "MuonBC",
    "NAdam",
    "NAdamBC",
    "PrivateOptimizer",
    "RMSprop",
    "RMSpropBC",
    "RMSpropPub",
    "Yogi",
    "debias",
    "noise_floor",
    "widened",
]

# By the name that a TOML file gives; audits attack each of them.
OPTIMIZERS: dict[str, type[PrivateOptimizer]] = {
    kind.__name__: kind
    for kind in (
        *(SGD, MomentumSGD, Adam, AdamBC, AdamW, AdamWBC, NAdam, NAdamBC, RMSprop, RMSpropBC, Adagrad, AdagradBC),
        *(RMSpropPub, AdamPub, MirrorDescent, Yogi, Muon, MuonBC, MicroAdam),
    )
}
