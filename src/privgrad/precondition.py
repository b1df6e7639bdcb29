"""Public scales for `PrivateGradient(..., precondition=...)`. Their code: `precondition` and `moments` of gradient/."""

from privgrad.gradient.moments import public_adagrad, public_adam, public_rmsprop, raw_ideal_rmsprop
from privgrad.gradient.precondition import Preconditioner, Transform, fixed

__all__ = [
    "Preconditioner",
    "Transform",
    "fixed",
    "public_adagrad",
    "public_adam",
    "public_rmsprop",
    "raw_ideal_rmsprop",
]
