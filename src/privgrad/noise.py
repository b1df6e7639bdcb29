"""ClippedSum -> NoisyGradient: the only place where noise for a release is drawn."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import require_integer, require_nonnegative
from privgrad.rng import BLOCK, Stream
from privgrad.threads import in_threads
from privgrad.types import ClippedSum, NoisyGradient


def add_noise(
    clipped: ClippedSum, *, noise_multiplier: float, divisor: int, stream: Stream, step: int
) -> NoisyGradient:
    """Add one Gaussian draw to a clipped sum, then divide by a public number.

    Computes: (S + sigma * sensitivity * z) / B with z ~ N(0, I), one independent coordinate of z for every
    coordinate of S; noise_std = sigma * sensitivity / B.

    Args:
        clipped: S and its sensitivity. Its tensors become the gradient's: it is not to be used again, neither after
            an exception, which may leave part of it noised.
        noise_multiplier: sigma >= 0. 0 adds nothing, and protects nobody.
        divisor: B >= 1, public: the expected number of contributions, not the number drawn.
        stream: the noise stream. No other mechanism may draw from it.
        step: index of this release; a step must never serve two different sums.
    Returns:
        NoisyGradient with the sum's names, shapes and dtypes.
    Raises:
        PrivacyError: a number out of its range.
    Privacy:
        The Gaussian mechanism of multiplier sigma on a sum of that sensitivity (add or remove one unit). Drawn in
        the sum's own precision by a cryptographic stream; on other devices than the CPU by torch's generator there,
        which is not cryptographic (see Stream.generator). Attacks on floating-point rounding are not covered.
    Reference:
        Abadi et al. 2016 (arXiv 1607.00133), algorithm 1; B is the expected, not the realised, batch size.
    """
    function = "add_noise"
    require_nonnegative(function, "noise_multiplier", noise_multiplier, "give sigma")
    require_integer(function, "divisor", divisor, 1)
    std_of_sum = noise_multiplier * clipped.sensitivity if noise_multiplier > 0 else 0.0
    require_nonnegative(function, "noise_multiplier * sensitivity", std_of_sum, "bound max_grad_norm")

    # In place: memory that is fresh at each step would cost as much as half of the noise.
    values = {name: value.detach().contiguous() for name, value in clipped.values.items()}
    if std_of_sum == 0:
        for value in values.values():
            value.div_(divisor)
    else:
        for device in sorted({value.device for value in values.values()}, key=str):
            release = _release_on_cpu if device.type == "cpu" else _release_on_device
            there = [value for value in values.values() if value.device == device]
            release(there, std_of_sum, divisor, stream, step)
    return NoisyGradient(values, noise_std=std_of_sum / divisor)


def _release_on_cpu(values: list[Tensor], std_of_sum: float, divisor: int, stream: Stream, step: int) -> None:
    """Noise and divide block by block, so that no draw is ever in memory as a whole."""

    def work(blocks: Iterable[tuple[int, list[np.ndarray]]]) -> None:
        draw = {dtype: stream.normal_blocks(step, dtype) for dtype in dtypes}
        for block, pieces in blocks:
            noise = draw[pieces[0].dtype](block, sum(piece.size for piece in pieces))
            noise *= std_of_sum
            for piece in pieces:
                piece += noise[: piece.size]
                piece /= divisor
                noise = noise[piece.size :]

    blocks = _blocks(values)
    dtypes = {pieces[0].dtype for pieces in blocks}
    in_threads(work, list(enumerate(blocks)), numbers=sum(value.numel() for value in values))


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
