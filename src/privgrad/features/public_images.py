"""Synthetic images made of random numbers: public rows for the statistics of features.

Users and `experiments` call these functions. No private image, and no image of any data set, enters them. The privacy
guarantee rests on this.
"""

import math
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.errors import expected, require_integer
from privgrad.features.extractor import Public

_CHUNK = 1000  # images drawn at a time, to limit memory


def silhouettes(n: int, size: int = 28, *, channels: Literal[1, 3] = 1, seed: int = 0) -> Public:
    """Return synthetic silhouettes: textured superellipses on black, for pictures of single objects.

    Each image has one to three shapes |x / a|^p + |y / b|^p <= 1, with random axes, exponents, places and turns. They
    are filled with gray levels of smoothed noise.

    Args:
        n: number of images, >= 1.
        size: height and width in pixels, >= 4.
        channels: 1 for gray, 3 for color.
        seed: of the random numbers. They are public, so a fixed seed is safe here.
    Returns:
        Public rows, float32 (n, channels, size, size), in [0, 1].
    Raises:
        PrivacyError: a number is out of its range.
    """
    _require("silhouettes", n, size, channels)
    generator = torch.Generator().manual_seed(seed)
    parts = [_silhouettes(min(_CHUNK, n - start), size, channels, generator) for start in range(0, n, _CHUNK)]
    return Public(torch.cat(parts), f"{n:,} synthetic silhouettes (seed {seed})")


def pink_noise(n: int, size: int = 28, *, channels: Literal[1, 3] = 1, seed: int = 0) -> Public:
    """Return pink noise: images whose amplitude falls with 1 / frequency, as in natural photographs.

    Args:
        n: as in silhouettes.
        size: as in silhouettes.
        channels: as in silhouettes; the channels share half of their variance.
        seed: as in silhouettes.
    Returns:
        Public rows, float32 (n, channels, size, size), in [0, 1].
    Raises:
        PrivacyError: a number is out of its range.
    """
    _require("pink_noise", n, size, channels)
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for start in range(0, n, _CHUNK):
        count = min(_CHUNK, n - start)
        waves = _pink(count * channels, size, generator).view(count, channels, size, size)
        if channels == 3:
            waves = (waves + _pink(count, size, generator)[:, None]) / math.sqrt(2)
        contrast = 0.1 + 0.2 * torch.rand(count, 1, 1, 1, generator=generator)
        light = 0.3 + 0.4 * torch.rand(count, 1, 1, 1, generator=generator)
        parts.append((light + contrast * waves).clamp(0, 1))
    return Public(torch.cat(parts), f"{n:,} images of pink noise (seed {seed})")


def _require(where: str, n: int, size: int, channels: int) -> None:
    require_integer(where, "n", n, 1)
    require_integer(where, "size", size, 4)
    if channels not in (1, 3):
        raise expected(where, "channels", "to be 1 or 3", channels, "give 1 for gray, 3 for color")


def _pink(count: int, size: int, generator: torch.Generator, power: float = 1.0) -> Tensor:
    """Return noise with amplitude frequency ** -power, mean 0 and deviation 1 per image, (count, size, size)."""
    rows, columns = cast(Tensor, torch.fft.fftfreq(size)), cast(Tensor, torch.fft.rfftfreq(size))
    frequency = rows[:, None].square() + columns.square()
    amplitude = torch.where(frequency > 0, frequency.clamp(min=1e-12) ** (-power / 2), 0.0)
    spectrum = cast(Tensor, torch.fft.rfft2(torch.randn(count, size, size, generator=generator)))
    waves = cast(Tensor, torch.fft.irfft2(spectrum * amplitude, s=(size, size)))
    return waves / waves.std(dim=(1, 2), keepdim=True)


def _silhouettes(count: int, size: int, channels: int, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    line = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    images = torch.zeros(count, channels, size, size)
    shapes = torch.randint(1, 4, (count, 1, 1, 1), generator=generator)
    for index in range(3):
        spread, largest = (0.15, 0.95) if index == 0 else (0.6, 0.6)
        turn = uniform(-math.pi, math.pi, 1, 1) * (uniform(0, 1, 1, 1) < 0.5)
        dx, dy = x - uniform(-spread, spread, 1, 1), y - uniform(-spread, spread, 1, 1)
        u, v = dx * turn.cos() + dy * turn.sin(), dy * turn.cos() - dx * turn.sin()
        a, b = uniform(0.12, largest, 1, 1), uniform(0.12, largest, 1, 1)
        p = torch.exp(uniform(math.log(0.8), math.log(8.0), 1, 1))
        radius = ((u / a).abs() ** p + (v / b).abs() ** p) ** (1 / p)
        edge = 2 / size / torch.minimum(a, b)  # about one pixel wide
        mask = ((1 - radius) / edge + 0.5).clamp(0, 1)[:, None]
        level = uniform(0.15, 1.0, 1, 1, 1)
        tint = (1 + uniform(-0.4, 0.4, channels, 1, 1)) if channels == 3 else 1.0
        smooth = _pink(count, size, generator, 1.0)[:, None] * uniform(0.0, 0.3, 1, 1, 1)
        fine = torch.randn(count, 1, size, size, generator=generator)
        fine = F.avg_pool2d(fine, 3, 1, 1) * 3 * uniform(0.0, 0.15, 1, 1, 1)
        filled = ((level + smooth + fine) * tint).clamp(0, 1)
        mask = mask * (shapes > index)
        images = images * (1 - mask) + filled * mask
    return images
