"""The success of attacks, from the privacy profile of releases. It is imported when a first one is computed."""

import math

import numpy as np
from scipy.stats import norm

from privgrad.accounting.composition import LEAST, POINTS, profile_of
from privgrad.accounting.mechanisms import Mechanism


def advantage_of(mechanisms: tuple[Mechanism, ...]) -> float:
    """Compute `accounting.attack_advantage` of one group of people: the delta at epsilon 0."""
    if not mechanisms:
        return 0.0
    found = profile_of(mechanisms)
    return 1.0 if found is None else min(1.0, float(found[1][0]))


def attack_success_of(mechanisms: tuple[Mechanism, ...], alpha: np.ndarray) -> np.ndarray:
    """Compute `accounting.attack_success` of one group of people at several false positive rates."""
    if not mechanisms:
        return alpha
    if (found := profile_of(mechanisms)) is None:
        return np.ones_like(alpha)
    epsilons, deltas = (each[:, None] for each in found)
    bounds = np.minimum(np.exp(epsilons) * alpha + deltas, 1 - np.exp(-epsilons) * (1 - deltas - alpha))
    return np.maximum(alpha, np.minimum(bounds.min(0), 1.0))


def gaussian_of(mechanisms: tuple[Mechanism, ...]) -> tuple[float, float]:
    """Compute `accounting.gaussian_dp` of one group of people."""
    if not mechanisms:
        return 0.0, 0.0
    if (found := profile_of(mechanisms)) is None:
        return math.inf, 0.0
    slopes, deltas = np.exp(found[0]), found[1]
    false = -np.diff(deltas) / np.diff(slopes)  # error rates where two of the lines meet that bound those of attacks
    missed = 1 - deltas[:-1] - slopes[:-1] * false
    is_seen = (false > LEAST) & (missed < 1 - false - LEAST)
    mu = float(np.max(norm.isf(false[is_seen]) + norm.isf(missed[is_seen]), initial=0.0))
    rates = np.linspace(0.0, 1.0, POINTS)

    def is_near(shift: float) -> bool:
        """Return whether both errors of any attack are at most those under mu, if they are lowered by the shift."""
        missed = 1 - attack_success_of(mechanisms, np.minimum(rates + shift, 1.0))
        return bool((missed - shift <= norm.cdf(norm.isf(rates) - mu)).all())

    low, high = 0.0, 1.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if is_near(middle) else (middle, high)
    return mu, high
