"""Public scales and matrices for `PrivateGradient(..., precondition=...)`."""

from privgrad.gradient.transform import Preconditioner, Transform
from privgrad.precondition.input_maps import inputs
from privgrad.precondition.moments import public_adagrad, public_adam, public_rmsprop, raw_ideal_rmsprop
from privgrad.precondition.scales import fixed

__all__ = [
    "Preconditioner",
    "Transform",
    "fixed",
    "inputs",
    "public_adagrad",
    "public_adam",
    "public_rmsprop",
    "raw_ideal_rmsprop",
]
