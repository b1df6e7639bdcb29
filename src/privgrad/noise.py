"""ClippedSum -> NoisyGradient: the only place where noise for a release is drawn."""

import torch
from torch import Tensor

from privgrad.errors import require_integer, require_nonnegative
from privgrad.rng import Stream
from privgrad.types import ClippedSum, NoisyGradient


def add_noise(
    clipped: ClippedSum, *, noise_multiplier: float, expected_batch_size: int, stream: Stream, step: int
) -> NoisyGradient:
    """Add one Gaussian draw to a clipped sum, then divide by the public expected batch size.

    Computes: (S + sigma * sensitivity * z) / B with z ~ N(0, I), one independent coordinate of z for every
    coordinate of S; noise_std = sigma * sensitivity / B.

    Args:
        clipped: S and its sensitivity.
        noise_multiplier: sigma >= 0. 0 adds nothing, and protects nobody.
        expected_batch_size: B >= 1, public; not the number of examples drawn.
        stream: the noise stream. No other mechanism may draw from it.
        step: index of this release; a step must never serve two different sums.
    Returns:
        NoisyGradient with the sum's names, shapes and dtypes.
    Raises:
        PrivacyError: a number out of its range.
    Privacy:
        The Gaussian mechanism of multiplier sigma on a sum of that sensitivity (add or remove one unit). Drawn in
        float64 by a cryptographic stream; attacks on floating-point rounding are not covered.
    Reference:
        Abadi et al. 2016 (arXiv 1607.00133), algorithm 1; B is the expected, not the realised, batch size.
    """
    function = "add_noise"
    require_nonnegative(function, "noise_multiplier", noise_multiplier, "give sigma")
    require_integer(function, "expected_batch_size", expected_batch_size, 1)
    std_of_sum = noise_multiplier * clipped.sensitivity if noise_multiplier > 0 else 0.0
    require_nonnegative(function, "noise_multiplier * sensitivity", std_of_sum, "bound max_grad_norm")

    values: dict[str, Tensor] = dict(clipped.values)
    if std_of_sum > 0:
        draws = stream.normal(step, sum(value.numel() for value in values.values()))
        start = 0
        for name, value in values.items():
            noise = draws[start : start + value.numel()].view(value.shape).to(value.device)
            values[name] = torch.add(value, noise.to(value.dtype), alpha=std_of_sum)
            start += value.numel()
    return NoisyGradient(
        {name: value / expected_batch_size for name, value in values.items()},
        noise_std=std_of_sum / expected_batch_size,
    )
