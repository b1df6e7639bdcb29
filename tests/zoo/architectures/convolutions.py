"""Convolutional networks as people write them."""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from .cases import Maker, Size, built, plain_images, state_losses, vectors

CLASSES = 5


class Gamma(nn.Module):
    """Multiplies each channel by a learned number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class WrappedBlock(nn.Module):
    """A block of ConvNeXt whose gamma is in a module of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = Gamma(width)

    def forward(self, x: Tensor) -> Tensor:
        states = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale(self.down(F.gelu(self.up(states)))).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A block of ConvNeXt that has its gamma itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        states = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(states)))).permute(0, 3, 1, 2)


def _conv_next(block: Callable[[int], nn.Module], size: Size) -> nn.Module:
    blocks = (block(size.width) for _ in range(size.layers))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(size.width), nn.Linear(size.width, CLASSES))
    return nn.Sequential(nn.Conv2d(3, size.width, size.patch, size.patch), *blocks, *head)


class SqueezedBlock(nn.Module):
    """A residual block with GroupNorm, whose channels are weighted by their averages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.GroupNorm(2, width), nn.GroupNorm(2, width)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, width // 4, 1),
            nn.ReLU(),
            nn.Conv2d(width // 4, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        states = self.last(self.second(self.norm(self.first(x)).relu()))
        return (x + states * self.squeeze(states)).relu()


def _squeezed(size: Size) -> nn.Module:
    width = size.width // 4
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), *(SqueezedBlock(width) for _ in range(size.layers)), *head)


class UNet(nn.Module):
    """Two resolutions, joined by a transposed convolution and by a connection across."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width // 4
        self.down, self.up = self._pair(3, width), self._pair(2 * width, width)
        self.deep = self._pair(width, 2 * width)
        self.wider, self.head = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(width, 2, 1)

    @staticmethod
    def _pair(wide: int, width: int) -> nn.Sequential:
        layers = ((nn.Conv2d(n, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU()) for n in (wide, width))
        return nn.Sequential(*(layer for pair in layers for layer in pair))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.wider(self.deep(F.max_pool2d(fine, 2)))
        return self.head(self.up(torch.cat([fine, coarse], 1)))


class CausalBlock(nn.Module):
    """Two dilated convolutions of the past, and a connection past them."""

    def __init__(self, width: int, dilation: int, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.first, self.second = (norm(nn.Conv1d(width, width, 3, dilation=dilation)) for _ in range(2))
        self.between, self.last = nn.PReLU(), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.second(self.pad(self.between(self.first(self.pad(x))))))


def _of_series(norm: Callable[[nn.Module], nn.Module], size: Size) -> nn.Module:
    width = size.width // 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm is deprecated
        blocks = (CausalBlock(width, 2**index, norm) for index in range(size.layers))
        return nn.Sequential(nn.Conv1d(4, width, 1), *blocks, nn.Conv1d(width, 2, 1))


def _series(size: Size) -> dict[str, Tensor]:
    return vectors(size, 4, size.time)


CONVOLUTIONS: dict[str, Maker] = {
    "hand_convnext_gamma": built(lambda size: _conv_next(Block, size), plain_images, state_losses),
    "hand_convnext_wrapped": built(lambda size: _conv_next(WrappedBlock, size), plain_images, state_losses),
    "hand_se_resnet_gn": built(_squeezed, plain_images, state_losses),
    "hand_unet": built(UNet, plain_images, state_losses),
    "hand_tcn_weight_norm": built(lambda size: _of_series(parametrizations.weight_norm, size), _series, state_losses),
    "hand_tcn_old_weight_norm": built(lambda size: _of_series(weight_norm, size), _series, state_losses),
}
