"""Optimizers for released gradients: real torch optimizers, pure post-processing.

The privacy guarantee does not rest on this package, with one exception: `PrivateOptimizer.step` moves parameters by
released gradients only.
"""

from privgrad.optim.adaptive import AdagradBC, AdamBC, AdamWBC, NAdamBC, RMSpropBC
from privgrad.optim.base import PrivateOptimizer
from privgrad.optim.debias import debias, noise_floor
from privgrad.optim.matrix import Muon, MuonBC
from privgrad.optim.public_data import AdamPub, MirrorDescent, RMSpropPub
from privgrad.optim.sparse import MicroAdam
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
]

# By the name that a TOML file gives; audits attack each of them.
OPTIMIZERS: dict[str, type[PrivateOptimizer]] = {
    "SGD": SGD,
    "MomentumSGD": MomentumSGD,
    "Adam": Adam,
    "AdamBC": AdamBC,
    "AdamW": AdamW,
    "AdamWBC": AdamWBC,
    "NAdam": NAdam,
    "NAdamBC": NAdamBC,
    "RMSprop": RMSprop,
    "RMSpropBC": RMSpropBC,
    "Adagrad": Adagrad,
    "AdagradBC": AdagradBC,
    "RMSpropPub": RMSpropPub,
    "AdamPub": AdamPub,
    "MirrorDescent": MirrorDescent,
    "Yogi": Yogi,
    "Muon": Muon,
    "MuonBC": MuonBC,
    "MicroAdam": MicroAdam,
}
