"""Public scales for `PrivateGradient(..., precondition=...)`. Their code: privgrad.gradient.precondition."""

from privgrad.gradient.precondition import (
    Preconditioner,
    Transform,
    fixed,
    public_adagrad,
    public_adam,
    public_rmsprop,
    raw_ideal_rmsprop,
)

__all__ = [
    "Preconditioner",
    "Transform",
    "fixed",
    "public_adagrad",
    "public_adam",
    "public_rmsprop",
    "raw_ideal_rmsprop",
]
