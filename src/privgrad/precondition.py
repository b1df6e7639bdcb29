"""Public scales and matrices for `PrivateGradient(..., precondition=...)`.

Their code: `precondition`, `moments` and `input_maps` of gradient/. Privacy rests on it: scales and matrices must not
depend on private data, unless `is_public` is False.
"""

from privgrad.gradient.input_maps import inputs
from privgrad.gradient.moments import public_adagrad, public_adam, public_rmsprop, raw_ideal_rmsprop
from privgrad.gradient.precondition import Preconditioner, Transform, fixed

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
