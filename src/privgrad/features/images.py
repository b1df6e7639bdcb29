"""Features of images that need no pretrained model: patches, oriented gradients, scattering."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.errors import expected, require_integer
from privgrad.features.extractor import Extractor, Public, eigen, marks_of, public_rows
from privgrad.plugins import optional

_CHUNK = 1000  # images drawn at a time, to limit memory
_PATCHES = 100_000  # of public images, for the statistics of patches
_THRESHOLD = 0.25  # of the response to a filter
_CAP = 0.4  # of a normalized gradient


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
    images = _drawn("silhouettes", _silhouettes, n, size, channels, seed)
    return Public(images, f"{n:,} synthetic silhouettes (seed {seed})")


def pink_noise(n: int, size: int = 28, *, channels: Literal[1, 3] = 1, seed: int = 0) -> Public:
    """Return pink noise: images whose amplitude falls with 1 / frequency, as in natural photographs.

    Arguments, result and errors are as in `silhouettes`; the channels share half of their variance.
    """
    return Public(_drawn("pink_noise", _noise, n, size, channels, seed), f"{n:,} images of pink noise (seed {seed})")


def _drawn(where: str, draw: Callable[..., Tensor], n: int, size: int, channels: int, seed: int) -> Tensor:
    require_integer(where, "n", n, 1)
    require_integer(where, "size", size, 4)
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([draw(min(_CHUNK, n - start), size, channels, generator) for start in range(0, n, _CHUNK)])


def _noise(count: int, size: int, channels: int, generator: torch.Generator) -> Tensor:
    waves = _pink(count * channels, size, generator).view(count, channels, size, size)
    if channels == 3:
        waves = (waves + _pink(count, size, generator)[:, None]) / math.sqrt(2)
    contrast = 0.1 + 0.2 * torch.rand(count, 1, 1, 1, generator=generator)
    light = 0.3 + 0.4 * torch.rand(count, 1, 1, 1, generator=generator)
    return (light + contrast * waves).clamp(0, 1)


def _pink(count: int, size: int, generator: torch.Generator, power: float = 1.0) -> Tensor:
    """Return noise with amplitude frequency ** -power, mean 0 and deviation 1 per image, (count, size, size)."""
    fft: Any = torch.fft
    frequency: Tensor = fft.fftfreq(size)[:, None].square() + fft.rfftfreq(size).square()
    amplitude = torch.where(frequency > 0, frequency.clamp(min=1e-12) ** (-power / 2), 0.0)
    spectrum = fft.rfft2(torch.randn(count, size, size, generator=generator))
    waves: Tensor = fft.irfft2(spectrum * amplitude, s=(size, size))
    return waves / waves.std(dim=(1, 2), keepdim=True)


def _silhouettes(count: int, size: int, channels: int, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    line = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    images = torch.zeros(count, channels, size, size)
    shapes = torch.randint(1, 4, (count, 1, 1, 1), generator=generator)
    for index in range(3):  # the shapes of an image, each over those before it
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


class Patches(Extractor):
    """Responses to filters, which are random patches of public images: 2 * filters * places^2 numbers per image.

    Each patch of the image is normalized (mean 0, divided by sqrt(variance + 0.01)) and whitened. Its products with the
    filters count above a threshold, for either sign. They are averaged over a grid of places, and square roots follow.

    Args:
        public: images in [0, 1], (n, channels, height, width), with their source.
        size: height and width of a patch in pixels, >= 2.
        filters: number of filters, >= 1.
        places: number of places along each side, >= 1.
        seed: of the choice of patches, which is public.
        source: where bare public images come from.
    Raises:
        PrivacyError: a number is out of its range, or the images are no images in [0, 1].
    Reference:
        Coates, Ng 2011 (the importance of encoding versus training); Thiry et al. 2021.
    """

    options: ClassVar[tuple[str, ...]] = ("size", "filters", "places")

    def __init__(
        self,
        public: Public | Tensor,
        *,
        size: int = 6,
        filters: int = 128,
        places: int = 4,
        seed: int = 0,
        source: str | None = None,
    ) -> None:
        for name, value, least in (("size", size, 2), ("filters", filters, 1), ("places", places, 1)):
            require_integer("Patches", name, value, least)
        given = public_rows("Patches", public, source)
        images = require_images("Patches", given.rows)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(images), (_PATCHES,), generator=generator)
        tops = torch.randint(images.shape[2] - size + 1, (_PATCHES,), generator=generator)
        lefts = torch.randint(images.shape[3] - size + 1, (_PATCHES,), generator=generator)
        windows = images.unfold(2, size, 1).unfold(3, size, 1)
        patches = windows[rows, :, tops, lefts].flatten(1)
        patches = patches - patches.mean(1, keepdim=True)
        patches = patches * (patches.square().mean(1, keepdim=True) + 0.01).rsqrt()
        mean = patches.mean(0)
        values, vectors = eigen((patches - mean).T @ (patches - mean) / len(patches))
        whiten = (vectors * (values + 0.1).rsqrt()) @ vectors.T
        chosen = torch.randperm(len(patches), generator=generator)[:filters]
        directions = F.normalize((patches[chosen] - mean) @ whiten, dim=1) @ whiten
        # A filter of sum 0 ignores the mean of a patch, so that one convolution computes all products.
        kernel = directions - directions.mean(1, keepdim=True)
        super().__init__(
            given.source,
            kernel=kernel.view(filters, images.shape[1], size, size).float(),
            shift=(directions @ mean).float(),
            marks=marks_of(given.rows),
        )
        self.size, self.filters, self.places = size, filters, places

    def features(self, rows: Any) -> Tensor:
        images = require_images(type(self).__name__, rows)
        kernel: Tensor = self.get_buffer("kernel")
        mean = F.avg_pool2d(images, self.size, 1).mean(1, keepdim=True)
        square = F.avg_pool2d(images.square(), self.size, 1).mean(1, keepdim=True)
        scale = ((square - mean.square()).clamp(min=0) + 0.01).rsqrt()
        response = F.conv2d(images, kernel) * scale - self.get_buffer("shift").view(-1, 1, 1)
        signs = (F.relu(response - _THRESHOLD), F.relu(-response - _THRESHOLD))
        return torch.cat([F.adaptive_avg_pool2d(sign, self.places).flatten(1) for sign in signs], dim=1).sqrt()


class Hog(Extractor):
    """Histograms of oriented gradients over grids of cells: orientations * sum(places^2) numbers per image.

    Each pixel's gradient is divided among the two nearest of the signed orientations. Histograms of cells are divided
    by the energy of the surrounding 3 x 3 cells, and capped; square roots follow.

    Attributes:
        places: numbers of cells along each side, one for each grid.
        orientations: number of signed orientations.
    Reference:
        Dalal, Triggs 2005.
    """

    options: ClassVar[tuple[str, ...]] = ("places", "orientations")

    def __init__(self, *, places: tuple[int, ...] = (7, 4), orientations: int = 12) -> None:
        """Keep the settings; raise PrivacyError unless all places are >= 1, and orientations >= 2."""
        require_integer("Hog", "orientations", orientations, 2)
        for place in places:
            require_integer("Hog", "places", place, 1)
        super().__init__("no data")
        self.places, self.orientations = list(places), orientations

    def features(self, rows: Any) -> Tensor:
        images = require_images(type(self).__name__, rows)
        padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
        dx = (padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]).flatten(0, 1)
        dy = (padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]).flatten(0, 1)
        angle = torch.atan2(dy, dx) * (self.orientations / (2 * math.pi)) % self.orientations
        size = (dx.square() + dy.square()).sqrt()
        centers = torch.arange(self.orientations, device=images.device).view(-1, 1, 1)
        apart = (angle[:, None] - centers).abs()
        share = F.relu(1 - torch.minimum(apart, self.orientations - apart))
        count, channels, *pixels = images.shape
        votes = (share * size[:, None]).view(count, channels, self.orientations, *pixels).sum(1)
        grids: list[Tensor] = []
        for places in self.places:
            cells = F.adaptive_avg_pool2d(votes, places)
            energy = F.avg_pool2d(cells.square().sum(1, keepdim=True), 3, 1, 1) * 9
            grids.append((cells / (energy.sqrt() + 0.05)).clamp(max=_CAP).sqrt().flatten(1))
        return torch.cat(grids, dim=1)


class Scattering(Extractor):
    """Wavelet scattering of two orders: averages of |image * wavelet|, and of |of these * wavelet|.

    It needs `pip install 'privgrad[scattering]'`. Square roots of the averages are normalized in groups of three
    channels, as GroupNorm does. With two scales and eight angles: 81 channels of (height / 4) * (width / 4) numbers.

    Attributes:
        scales: number of scales; averages are over 2^scales pixels.
        angles: number of angles of the wavelets.
    Reference:
        Bruna, Mallat 2013; Tramer, Boneh 2021 (private linear models on scattering).
    """

    options: ClassVar[tuple[str, ...]] = ("scales", "angles")

    def __init__(self, *, scales: int = 2, angles: int = 8) -> None:
        """Keep the settings; raise PrivacyError unless both are >= 1, and kymatio is installed."""
        require_integer("Scattering", "scales", scales, 1)
        require_integer("Scattering", "angles", angles, 1)
        _kymatio()
        super().__init__("no data")
        self.scales, self.angles = scales, angles

    def features(self, rows: Any) -> Tensor:
        images = require_images(type(self).__name__, rows)
        transform = _wavelets(self.scales, self.angles, tuple(images.shape[2:]), images.device)
        averages: Tensor = transform(images.contiguous())
        channels = averages.flatten(1, 2).clamp(min=0).sqrt()
        return F.group_norm(channels, max(1, channels.shape[1] // 3)).flatten(1)


def require_images(where: str, rows: Any) -> Tensor:
    """Return rows as float32 images; raise PrivacyError unless they are images in [0, 1], or bytes."""
    if rows.ndim != 4 or rows.shape[1] not in (1, 3):
        condition = "to be images with 1 or 3 channels, (n, channels, height, width)"
        raise expected(where, "rows", condition, f"shape {tuple(rows.shape)}")
    images = rows.float() / 255 if rows.dtype == torch.uint8 else rows.float()
    if torch.compiler.is_exporting():  # an exported program cannot raise this error
        return images
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        remedy = "load pixels with standardize=False, or scale them to [0, 1]"
        raise expected(where, "pixels", "to be in [0, 1]", f"{low:.3g} to {high:.3g}", remedy)
    return images


def _kymatio() -> Any:
    module = "kymatio.scattering2d.frontend.torch_frontend"  # kymatio.torch also loads what fails with scipy >= 1.17
    return optional("Scattering", "kymatio", module, "pip install 'privgrad[scattering]'").ScatteringTorch2D


@functools.lru_cache(maxsize=8)
def _wavelets(scales: int, angles: int, shape: tuple[int, ...], device: torch.device) -> Any:
    """Return kymatio's transform of images of one size, whose only constants are wavelets."""
    return _kymatio()(J=scales, shape=shape, L=angles).to(device)
