"""The secret number of runs of which only the best is released ("repeat and select").

Charge a `Selection` with the same mean and shape before the first run.
"""

import math

from privgrad.accounting.mechanisms import require_law
from privgrad.rng import RandomSource


def draw_repetitions(mean: float, shape: float, source: RandomSource | None = None, *, step: int = 0) -> int:
    """Draw the number of runs K of a Selection, whose mean and shape it takes.

    Computes: the smallest k with P(K <= k) >= u, for a uniform u of 64 bits.

    K >= 1, or K >= 0 for the Poisson law. With K = 0 nothing is run and nothing is released. The same source and step
    give the same K. Without a source it takes the operating system's entropy; with a research seed, everyone knows K.

    Privacy:
        K is secret, and so is everything that shows it, such as the duration. A resumed comparison keeps its K: to draw
        again after a look at results would change the law.
    Reference:
        Papernot, Steinke 2022 (arXiv 2110.03620), definition 1 and section 3.4.
    """
    require_law("draw_repetitions", mean, shape)
    uniform = (int((source or RandomSource()).stream("repetitions").uint64(step, 1)[0]) + 0.5) * 2.0**-64
    k, log_probability = _first(mean, shape)
    stop = halting_exponent(mean, shape) if shape < math.inf else 0.0
    total = math.exp(log_probability)
    # Rounding may leave the total just below u. Then the draw ends where the rest of the law is below 2^-64.
    while total < uniform and not (k > mean and log_probability < -60.0):
        # log P(K = k + 1) - log P(K = k)
        if shape == math.inf:
            log_probability += math.log(mean / (k + 1))
        elif stop == 0:
            log_probability = -math.inf
        else:
            log_probability += math.log(-math.expm1(-stop)) + math.log((k + shape) / (k + 1))
        k += 1
        total += math.exp(log_probability)
    return k


def halting_exponent(mean: float, shape: float) -> float:
    """Return -log(gamma) for a law of finite shape >= 0 and mean >= 1; gamma is the paper's halting parameter.

    Computes: the root x of shape (e^x - 1) / (1 - e^(-shape x)) = mean, with the limit (e^x - 1) / x for shape 0. The
    left side is the mean by definition 1 of the paper, and grows with x from 1.

    Privacy:
        x is rounded down, which is the safe side: the mean of the law is then at most the given one, within 1e-12, and
        `accounting` charges for the given mean, and for a gamma that is not larger.
    """
    if mean == 1:
        return 0.0
    low, high = 0.0, 1.0
    while _mean_of(high, shape) < mean:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _mean_of(middle, shape) <= mean else (low, middle)
    return low


def _mean_of(exponent: float, shape: float) -> float:
    """Return the mean of K for a halting exponent and a finite shape."""
    if exponent > 700:
        return math.inf
    scale = exponent if shape == 0 else -math.expm1(-shape * exponent) / shape
    return math.expm1(exponent) / scale if scale > 0 else 1.0


def _first(mean: float, shape: float) -> tuple[int, float]:
    """Return the smallest possible K, and the logarithm of its probability."""
    if shape == math.inf:
        return 0, -mean
    exponent = halting_exponent(mean, shape)
    if exponent == 0:
        return 1, 0.0
    log_stay = math.log(-math.expm1(-exponent))  # log(1 - gamma)
    if shape == 0:
        return 1, log_stay - math.log(exponent)
    grown = shape * exponent
    log_scale = grown + math.log(-math.expm1(-grown))  # log(gamma^-shape - 1)
    return 1, log_stay + math.log(shape) - log_scale
