"""The activations that the models offer, by name.

`convolutional` and `fully_connected` call it. The privacy guarantee does not rest on this file.
"""

from collections.abc import Callable
from typing import Literal

from torch import nn

from privgrad.errors import expected

Activation = Literal["tanh", "relu", "leaky_relu"]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}


def activation_named(name: str) -> Callable[[], nn.Module]:
    """Return the activation with this name; raise PrivacyError if there is none."""
    if name not in _ACTIVATIONS:
        raise expected("models", "activation", f"to be one of {', '.join(_ACTIVATIONS)}", repr(name), "choose one")
    return _ACTIVATIONS[name]
