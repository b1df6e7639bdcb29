"""Models of images: convolutional networks, and the autoencoder of AdaDPS."""

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from privgrad.models.layers import Activation, activation_named, ws_conv2d


def cnn5(*, in_channels: int, num_classes: int, activation: Activation = "tanh") -> nn.Sequential:
    """Return five convolutions without normalization, (B, in_channels, H, W) -> logits (B, num_classes).

    Inputs of 28x28 and of 32x32 both end on 3x3. 411,466 parameters for 3x32x32 and 10 classes, 410,890 for one
    channel.

    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their published CNN for CIFAR-10. Deviation: torch's default initialization.
    """
    make_activation = activation_named(activation)
    layers: list[nn.Module] = []
    for index, (previous, width) in enumerate(pairwise((in_channels, 32, 64, 128))):
        padding = 0 if index == 0 else 1
        layers += [nn.Conv2d(previous, width, 3, padding=padding), make_activation(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(128, 256, 3, padding=1), make_activation()]
    layers += [nn.Conv2d(256, num_classes, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def cnn2(*, in_channels: int, num_classes: int) -> nn.Sequential:
    """Return two convolutions and a linear layer, (B, in_channels, 28, 28) -> logits (B, num_classes).

    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), their CNN for Barcode MNIST. 1,698,262 parameters for 330 classes.
    """
    layers = [nn.Conv2d(in_channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 100, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4900, num_classes))


def cnn_small(*, in_channels: int, num_classes: int, activation: Activation = "tanh") -> nn.Sequential:
    """Return two convolutions and two linear layers, (B, in_channels, 28, 28) -> logits (B, num_classes).

    Reference:
        The model of Papernot et al. 2021 (tempered sigmoids): 26,010 parameters for one channel and 10 classes.
    """
    make_activation = activation_named(activation)
    layers = [nn.Conv2d(in_channels, 16, 8, stride=2, padding=3), make_activation(), nn.MaxPool2d(2, 1)]
    layers += [nn.Conv2d(16, 32, 4, stride=2), make_activation(), nn.MaxPool2d(2, 1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(512, 32), make_activation(), nn.Linear(32, num_classes))


class Residual(nn.Sequential):
    """A residual connection: x + f(x), where f is the sequence of modules."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return input + cast(Tensor, super().forward(input))


def resnet9(*, in_channels: int, num_classes: int, width: int = 64) -> nn.Sequential:
    """Return a ResNet-9 with standardized weights, GroupNorm and Mish.

    It maps (B, in_channels, H, W) -> logits (B, num_classes).

    Args:
        in_channels: channels of the images, 28x28 or larger.
        num_classes: number of labels.
        width: width of the first layer: 16, 48 or a multiple of 32; 64 gives 2,447,946 parameters for 3 channels and 10
            classes.
    Reference:
        The paper on BAM trains a ResNet-9 but does not describe it. This one is the model of Klause et al. 2022 (arXiv
        2203.00324), from the same institute, without their scale norm.
    """

    def block(n_in: int, n_out: int) -> list[nn.Module]:
        conv = ws_conv2d(n_in, n_out, 3, padding=1, bias=False, gain=False)
        return [conv, nn.GroupNorm(min(32, n_out // 2), n_out), nn.Mish()]

    def pair(channels: int) -> Residual:
        return Residual(*block(channels, channels), *block(channels, channels))

    layers = [*block(in_channels, width), *block(width, 2 * width), nn.MaxPool2d(2), pair(2 * width)]
    layers += [*block(2 * width, 4 * width), nn.MaxPool2d(2)]
    layers += [*block(4 * width, 4 * width), nn.MaxPool2d(2), pair(4 * width)]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, num_classes))


class _WideBlock(nn.Module):
    """A pre-activation block; its shortcut is the identity, or one convolution where the shape changes."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()

        def conv(n_in: int, kernel: int, stride: int) -> list[nn.Module]:
            layer = ws_conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2)
            return [nn.ReLU(), nn.GroupNorm(min(16, n_in), n_in), layer]

        self.main = nn.Sequential(*conv(n_in, 3, stride), *conv(n_out, 3, 1))
        self.shortcut = nn.Sequential(*(conv(n_in, 1, stride) if (n_in, stride) != (n_out, 1) else ()))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.shortcut(x)


def wide_resnet(*, in_channels: int, num_classes: int, blocks: int = 2, widen: int = 4) -> nn.Sequential:
    """Return a wide residual network with standardized weights and GroupNorm.

    It maps (B, in_channels, H, W) -> logits (B, num_classes).

    Args:
        in_channels: channels of the images.
        num_classes: number of labels.
        blocks: of each of three widths. 2 and widen = 4 are WRN-16-4: 2,753,818 parameters for 3 channels and 10
            classes.
        widen: factor of the widths 16, 32, 64.
    Reference:
        De et al. 2022 (arXiv 2204.13650).
    """
    layers: list[nn.Module] = [ws_conv2d(in_channels, 16, 3, padding=1)]
    widths = [16, *(base * widen for base in (16, 32, 64))]
    for stride, (previous, width) in zip((1, 2, 2), pairwise(widths), strict=True):
        layers += [_WideBlock(previous, width, stride), *(_WideBlock(width, width, 1) for _ in range(blocks - 1))]
    head = [nn.ReLU(), nn.GroupNorm(16, widths[-1]), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(widths[-1], num_classes))


def autoencoder(*, in_features: int) -> nn.Sequential:
    """Return an autoencoder with a code of 30 numbers, (B, ...) -> (B, in_features) in (0, 1).

    Every layer except the code ends in a sigmoid.

    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963): 784-1000-500-250-30 and back, 2,837,314 parameters.
    """
    widths = [in_features, 1000, 500, 250, 30, 250, 500, 1000, in_features]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out)] if fan_out == 30 else [nn.Linear(fan_in, fan_out), nn.Sigmoid()]
    return nn.Sequential(*layers)
