"""The architectures of the experiments."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from privgrad.errors import expected

Activation = Literal["tanh", "relu", "leaky_relu"]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}


class GlobalAverage(nn.Module):
    """Mean over the two spatial dimensions: (B, C, H, W) -> (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def cnn5(*, in_channels: int, num_classes: int, activation: Activation = "tanh") -> nn.Sequential:
    """Five convolutions with no normalisation, (B, in_channels, H, W) -> logits (B, num_classes).

    28x28 and 32x32 both end on 3x3. 411,466 parameters for 3x32x32 and 10 classes; 410,890 for one channel.

    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their published CNN for CIFAR-10. Deviation: torch's default initialisation.
    """
    make_activation = _activation(activation)
    widths = (32, 64, 128)
    layers: list[nn.Module] = []
    previous = in_channels
    for index, width in enumerate(widths):
        padding = 0 if index == 0 else 1
        layers += [nn.Conv2d(previous, width, 3, padding=padding), make_activation(), nn.MaxPool2d(2)]
        previous = width
    layers += [nn.Conv2d(128, 256, 3, padding=1), make_activation()]
    layers += [nn.Conv2d(256, num_classes, 3, padding=1), GlobalAverage()]
    return nn.Sequential(*layers)


def linear(*, in_features: int, num_classes: int) -> nn.Sequential:
    """Softmax regression without bias, from zero, on flattened input, (B, ...) -> logits (B, num_classes)."""
    layer = nn.Linear(in_features, num_classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(*, in_features: int, hidden: int, num_classes: int, activation: Activation = "tanh") -> nn.Sequential:
    """One hidden layer on flattened input, (B, ...) -> logits (B, num_classes)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_features, hidden),
        _activation(activation)(),
        nn.Linear(hidden, num_classes),
    )


def _activation(name: str) -> Callable[[], nn.Module]:
    if name not in _ACTIVATIONS:
        raise expected("models", "activation", f"to be one of {', '.join(_ACTIVATIONS)}", repr(name), "choose one")
    return _ACTIVATIONS[name]
