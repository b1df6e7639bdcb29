"""ClippedSum -> NoisyGradient: the only place where noise for a release is drawn."""

import math
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import expected, require_integer, require_nonnegative, require_positive
from privgrad.rng import BLOCK, Stream
from privgrad.threads import in_threads
from privgrad.types import ClippedSum, NoisyGradient

_ROUNDING = 2.0**-10  # of the sensitivity: room on the grid for the rounding of norms and sums, and as much for its own
_FAR = 2.0**51  # grid points from zero: beyond them float64 would not add integers exactly


def noise_generator(values: Iterable[Tensor], *, on_grid: bool = False) -> str:
    """What draws the noise of such values, in the words that records and reports tell it in.

    Args:
        values: parameters, or sums of their gradients; only their devices and dtypes are looked at.
        on_grid: as in add_noise.
    Raises:
        PrivacyError: noise on a grid is asked for elsewhere than on the CPU.
    """
    names: set[str] = set()
    for value in values:
        if value.device.type != "cpu":
            if on_grid:
                remedy = "move the model to the CPU, or plan without noise_on_grid"
                raise expected("add_noise", "values", "to be on the CPU for noise on a grid", value.device, remedy)
            names.add(f"torch's generator on {value.device.type} (Philox): not cryptographic")
        elif on_grid:
            names.add("AES-256-CTR, Box-Muller in float64, on a grid")
        else:
            dtype = torch.promote_types(value.dtype, torch.float32)
            names.add(f"AES-256-CTR, Box-Muller in {str(dtype).removeprefix('torch.')}")
    return "; ".join(sorted(names))


def add_noise(
    clipped: ClippedSum, *, noise_multiplier: float, divisor: int, stream: Stream, step: int, on_grid: bool = False
) -> NoisyGradient:
    """Add one Gaussian draw to a clipped sum, then divide by a public number.

    Computes: (S + sigma C z) / B with z ~ N(0, I), one independent coordinate of z for every coordinate of S, and C
    the sum's sensitivity; noise_std = sigma C / B. On a grid: (round(S / g) + round(sigma C' z / g)) g / B, where
    round is to the nearest integer, and g and C' are those of `grid_of`; noise_std = sigma C' / B.

    Args:
        clipped: S and its sensitivity. Its tensors become the gradient's: it is not to be used again, neither after
            an exception, which may leave part of it noised.
        noise_multiplier: sigma >= 0. 0 adds nothing, and protects nobody.
        divisor: B >= 1, public: the expected number of contributions, not the number drawn.
        stream: the noise stream. No other mechanism may draw from it.
        step: index of this release; a step must never serve two different sums.
        on_grid: round sum and noise to a public grid, and add them there. On the CPU, with sigma > 0.
    Returns:
        NoisyGradient with the sum's names, shapes and dtypes.
    Raises:
        PrivacyError: a number out of its range; a grid elsewhere than on the CPU, or without noise.
    Privacy:
        The Gaussian mechanism of multiplier sigma on a sum of that sensitivity (add or remove one unit). Drawn in
        the sum's own precision by a cryptographic stream; on other devices than the CPU by torch's generator there,
        which is not cryptographic (see Stream.generator). Off the grid, the values that can come out depend on the
        sum, and their low-order bits tell of it. On it, what leaves is a function of integers n + N, where n is the
        rounded sum and N has the same distribution whatever the data. Were z exact, this would be post-processing of
        the Gaussian mechanism on n g, which one unit moves by at most C'. z is Box-Muller in float64, with errors of
        about 1e-15: this changes the probability of a value of N by a factor of about 1 +- 1e-12 sqrt(d) max(sigma, 1)
        for d coordinates (an estimate, no proof), and N ends at 11.5 standard deviations.
    Reference:
        Abadi et al. 2016 (arXiv 1607.00133), algorithm 1; B is the expected, not the realized, batch size. On the
        leak of floating-point noise: Mironov 2012; Haney et al. 2022 (arXiv 2207.13793).
    """
    function = "add_noise"
    require_nonnegative(function, "noise_multiplier", noise_multiplier, "give sigma")
    require_integer(function, "divisor", divisor, 1)
    sensitivity, grid = clipped.sensitivity, None
    if on_grid:
        noise_generator(clipped.values.values(), on_grid=True)
        grid, sensitivity = grid_of(clipped, noise_multiplier)
    std_of_sum = noise_multiplier * sensitivity if noise_multiplier > 0 else 0.0
    require_nonnegative(function, "noise_multiplier * sensitivity", std_of_sum, "bound max_grad_norm")

    # In place: memory that is fresh at each step would cost as much as half of the noise.
    values = {name: value.detach().contiguous() for name, value in clipped.values.items()}
    if std_of_sum == 0:
        for value in values.values():
            value.div_(divisor)
    else:
        for device in sorted({value.device for value in values.values()}, key=str):
            there = [value for value in values.values() if value.device == device]
            if device.type == "cpu":
                add = _add if grid is None else partial(_add_on_grid, grid=grid)
                _release_on_cpu(there, partial(add, std=std_of_sum, divisor=divisor), stream, step, on_grid)
            else:
                _release_on_device(there, std_of_sum, divisor, stream, step)
    return NoisyGradient(values, noise_std=std_of_sum / divisor)


def grid_of(clipped: ClippedSum, noise_multiplier: float) -> tuple[float, float]:
    """The grid for a sum, and how far one unit moves the sum when it is rounded to it.

    Computes: g, the power of two in (x / 2, x] for x = C min(sigma, 1) / (1024 sqrt(d)), where C is the sensitivity
    and d the number of coordinates; and C' = C (1 + 1/1024) + g sqrt(d), at most C (1 + 2/1024). Rounding moves each
    coordinate of two neighboring sums by up to g / 2; the first 1/1024 is for what floating-point norms and sums may
    exceed C by.

    Args:
        clipped: the sum; only its sensitivity and its shapes are looked at, both public.
        noise_multiplier: sigma > 0.
    Returns:
        g and C', in gradient units.
    Raises:
        PrivacyError: no noise, or an infinite sensitivity.
    """
    require_positive("grid_of", "noise_multiplier", noise_multiplier, "there is nothing to hide without noise")
    require_positive("grid_of", "sensitivity", clipped.sensitivity, "bound max_grad_norm")
    root = math.sqrt(sum(value.numel() for value in clipped.values.values()) or 1)
    _, exponent = math.frexp(_ROUNDING * clipped.sensitivity * min(noise_multiplier, 1.0) / root)
    grid = math.ldexp(1.0, exponent - 1)
    return grid, clipped.sensitivity * (1 + _ROUNDING) + grid * root


def _release_on_cpu(
    values: list[Tensor], add: Callable[[np.ndarray, np.ndarray], None], stream: Stream, step: int, on_grid: bool
) -> None:
    """Draw and add block by block, so that no draw is ever in memory as a whole.

    Args:
        add: (part of the sum, as many standard normals) -> None: writes the release over the part; may use the
            normals' memory.
    """

    def work(blocks: Iterable[tuple[int, list[np.ndarray]]]) -> None:
        draw = {dtype: stream.normal_blocks(step, np.float64 if on_grid else dtype, dense=on_grid) for dtype in dtypes}
        for block, pieces in blocks:
            normals = draw[pieces[0].dtype](block, sum(piece.size for piece in pieces))
            for piece in pieces:
                add(piece, normals[: piece.size])
                normals = normals[piece.size :]

    blocks = _blocks(values)
    dtypes = {pieces[0].dtype for pieces in blocks}
    in_threads(work, list(enumerate(blocks)), numbers=sum(value.numel() for value in values))


def _add(piece: np.ndarray, normals: np.ndarray, *, std: float, divisor: int) -> None:
    normals *= std
    piece += normals
    piece /= divisor


def _add_on_grid(piece: np.ndarray, normals: np.ndarray, *, std: float, divisor: int, grid: float) -> None:
    """Integers added to integers; what follows is a function of their sum."""
    normals *= std / grid
    np.rint(normals, out=normals)
    piece /= grid  # exactly: it is a power of two
    np.rint(piece, out=piece)
    np.clip(piece, -_FAR, _FAR, out=piece)  # no two sums move apart by it
    normals += piece
    normals /= divisor / grid
    piece[:] = normals


def _blocks(values: list[Tensor]) -> list[list[np.ndarray]]:
    """The values' own memory, in order, in blocks: at most BLOCK numbers, of one dtype, of as many tensors as fit."""
    blocks: list[list[np.ndarray]] = []
    room = 0
    for value in values:
        flat = value.view(-1).numpy()
        if blocks and blocks[-1][0].dtype != flat.dtype:
            room = 0
        while flat.size:
            if room == 0:
                blocks.append([])
                room = BLOCK
            blocks[-1].append(flat[:room])
            flat, room = flat[room:], max(room - flat.size, 0)
    return blocks


def _release_on_device(values: list[Tensor], std_of_sum: float, divisor: int, stream: Stream, step: int) -> None:
    generator = stream.generator(step, values[0].device)
    for value in values:
        noise = torch.randn(value.shape, dtype=value.dtype, device=value.device, generator=generator)
        value.add_(noise, alpha=std_of_sum).div_(divisor)
