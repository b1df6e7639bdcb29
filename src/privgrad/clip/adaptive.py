"""Rules that choose the clipping norm C of each step from released values, for `PrivateGradient(..., adaptive_clip=)`.

At each step it clips to `max_grad_norm`, releases the rule's statistic with the gradient, and gives the released
distribution to `update`.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch

from privgrad.clip.norm_statistics import Count, Histogram, NormBins, NormStatistic, chosen_slots
from privgrad.errors import expected, limits_of_norm, require_in, require_integer, require_positive
from privgrad.types import NormDistribution

_WIDEST = 1e6  # C stays within this factor of its start, and within the limits of a plan
_SHARE_STD = 0.01  # of "auto": C follows the share of each single step
_CERTAIN = 3.0  # standard deviations: smaller shares of DC-SGD's histogram count as 0
# Of DC-SGD, in units of C: the edges of its histogram, one norm in each bin, and the candidates for C.
_EDGES = tuple(2.0**power for power in range(-4, 5))
_MIDDLES = tuple(2.0 ** (power - 0.5) for power in range(-4, 6))
_CANDIDATES = tuple(2.0 ** (power / 3) for power in range(-12, 13))


class AdaptiveClip:
    """The base class of rules for C. A rule starts at the plan's `max_grad_norm`.

    Attributes:
        max_grad_norm: C of the next step, from released values alone: nothing checks this in a rule of yours. Within a
            factor of 1e6 of the plan's, and within the limits of any plan's C, beyond which PrivateGradient refuses it.
        statistic: what is released with each gradient.
    """

    max_grad_norm: float
    statistic: NormStatistic
    _limits: tuple[float, float]
    is_public = True
    _takes_bins = True

    def __repr__(self) -> str:
        """Return a text that the ledger and checkpoints record; a resumed run must have the same."""
        return f"{type(self).__name__}()"

    def begun(
        self, *, max_grad_norm: float, noise_multiplier: float, divisor: int, norm_bins: NormBins, size: int
    ) -> "AdaptiveClip":
        """Return a copy with fresh state for one PrivateGradient.

        Args:
            max_grad_norm: C of the first step.
            noise_multiplier: sigma; twice that with groups of examples, whose sums have a sensitivity of 2C.
            divisor: the public expected number of contributions.
            norm_bins: as given to PrivateGradient.
            size: number of trainable parameters.
        Raises:
            PrivacyError: C is infinite, or the numbers do not fit the rule.
        """
        if math.isinf(max_grad_norm):
            raise expected(type(self).__name__, "the plan's max_grad_norm", "to be finite", max_grad_norm)
        if norm_bins is not None and not self._takes_bins:
            raise expected("PrivateGradient", "norm_bins", "to be None for a rule with its own release", norm_bins)
        begun = copy.copy(self)
        least, most = limits_of_norm(noise_multiplier)
        begun.max_grad_norm = float(max_grad_norm)
        begun._limits = max(max_grad_norm / _WIDEST, least), max(max_grad_norm, min(max_grad_norm * _WIDEST, most))
        begun.statistic = self._statistic(max_grad_norm, noise_multiplier, divisor, norm_bins)
        begun._begin(noise_multiplier, divisor, size)
        return begun

    def _begin(self, noise_multiplier: float, divisor: int, size: int) -> None:
        """Set the state of a subclass for a new PrivateGradient, after C and the statistic."""

    def update(self, distribution: NormDistribution) -> None:
        """Choose C of the next step. Post-processing."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return C, for a checkpoint."""
        return {"max_grad_norm": float(self.max_grad_norm)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the C of a state.

        Raises:
            PrivacyError: C is beyond the limits, so this rule has not saved it.
        """
        least, most = self._limits
        require_in(type(self).__name__, "max_grad_norm", state["max_grad_norm"], f"[{least!r}, {most!r}]")
        self.max_grad_norm = float(state["max_grad_norm"])

    def _statistic(self, max_grad_norm: float, noise_multiplier: float, divisor: int, bins: NormBins) -> NormStatistic:
        raise NotImplementedError

    def _multiply(self, factor: float) -> None:
        """Multiply C by a factor, within the limits."""
        least, most = self._limits
        self.max_grad_norm = min(max(self.max_grad_norm * factor, least), most)


class TargetFraction(AdaptiveClip):
    """A rule that moves C towards a share of clipped gradients, in the first steps. It costs no privacy and no noise.

    Computes: C exp(rate (f - target)) in the first steps, where f is the private share of clipped gradients. Then C
        stays, whether or not f is the target. If C followed f to the end, it would follow the gradients of well learned
        examples towards 0.

    Args:
        target: the share, in (0, 1).
        rate: > 0. A step multiplies C by exp(-rate target) to exp(rate (1 - target)). With the defaults, C falls by at
            most 31 % and rises by at most 13 %.
        steps: the number of steps in which C moves, >= 1; None: all. Steps that an interruption lost do not count.
    Raises:
        PrivacyError: a number is out of its range.
    Privacy:
        The share comes from slots that are part of the Gaussian release (see `norm_statistics.Slots`). C is
        post-processing.
    Reference:
        SlaClip (ICML 2026); the geometric update is that of Andrew et al. 2021 (arXiv 1905.03871). Deviation: C stays
        after `steps`.
    """

    def __init__(self, target: float = 0.75, *, rate: float = 0.5, steps: int | None = 50) -> None:
        require_in("TargetFraction", "target", target, "(0, 1)", "clip.Automatic() normalizes every gradient")
        require_positive("TargetFraction", "rate", rate)
        if steps is not None:
            require_integer("TargetFraction", "steps", steps, 1)
        self._target, self._rate, self._steps = float(target), float(rate), steps

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target:g}, rate={self._rate:g}, steps={self._steps})"

    def _begin(self, noise_multiplier: float, divisor: int, size: int) -> None:
        self._taken = 0

    def _statistic(self, max_grad_norm: float, noise_multiplier: float, divisor: int, bins: NormBins) -> NormStatistic:
        noise_std = noise_multiplier * max_grad_norm / divisor
        return chosen_slots("auto" if bins is None else bins, max_grad_norm, noise_std, _SHARE_STD)

    def update(self, distribution: NormDistribution) -> None:
        if self._steps is not None and self._taken >= self._steps:
            return
        self._taken += 1
        fraction = min(max(distribution.clip_fraction, 0.0), 1.0)
        self._multiply(math.exp(self._rate * (fraction - self._target)))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_integer(type(self).__name__, "taken", state["taken"], 0)
        super().load_state_dict(state)
        self._taken = state["taken"]


class Quantile(AdaptiveClip):
    """A rule that moves C to a quantile of the norms by a noisy count of its own. It makes the gradient noisier.

    Computes: C exp(-rate (b - quantile)), where b is the noisy share of gradients within C. It is the baseline for
    TargetFraction, which needs no count.

    Args:
        quantile: the target share of gradients that are not clipped, in (0, 1); 1 - target of TargetFraction.
        rate: > 0.
        count_std: the standard deviation of the noise of the count, in gradients; above sigma / 2. None is the
            expected number of gradients / 20, and at least sigma.
    Raises:
        PrivacyError: a number is out of its range; in PrivateGradient, count_std is at most sigma / 2.
    Privacy:
        Count and gradient are one Gaussian release with the plan's sigma (see `norm_statistics.Count`). The noise of
        the gradient grows by 1 / sqrt(1 - (sigma / (2 count_std))^2).
    Reference:
        Andrew et al. 2021 (arXiv 1905.03871).
    """

    _takes_bins = False

    def __init__(self, quantile: float = 0.25, *, rate: float = 0.2, count_std: float | None = None) -> None:
        require_in("Quantile", "quantile", quantile, "(0, 1)", "clip.Automatic() normalizes every gradient")
        require_positive("Quantile", "rate", rate)
        if count_std is not None:
            require_positive("Quantile", "count_std", count_std)
        self._quantile, self._rate, self._count_std = float(quantile), float(rate), count_std

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._quantile:g}, rate={self._rate:g}, count_std={self._count_std})"

    def _statistic(self, max_grad_norm: float, noise_multiplier: float, divisor: int, bins: NormBins) -> NormStatistic:
        count_std = max(divisor / 20, noise_multiplier) if self._count_std is None else self._count_std
        left = 1 - (noise_multiplier / (2 * count_std)) ** 2
        if left <= 0:
            raise expected("Quantile", "count_std", f"to be above sigma / 2 = {noise_multiplier / 2:.3g}", count_std)
        weight = noise_multiplier / count_std / math.sqrt(left)
        return Count(weight or 1.0)

    def update(self, distribution: NormDistribution) -> None:
        within = min(max(float(distribution.shares[0]), 0.0), 1.0)
        self._multiply(math.exp(-self._rate * (within - self._quantile)))


class SquaredError(AdaptiveClip):
    """A rule that chooses C by the squared error of the released gradient. It makes the gradient noisier.

    Computes: the C that minimizes sigma^2 C^2 d / B^2 + mean of max(|g| - C, 0)^2, among multiples of the last C from
    1/16 to 16. The mean is over a noisy histogram of the norms, with a release of its own.

    Args:
        weight: w > 0 of the histogram (see `norm_statistics.Histogram`). The noise of the gradient grows by
            sqrt(1 + w^2): 2 % with the default.
    Raises:
        PrivacyError: weight is not positive.
    Privacy:
        Histogram and gradient are one Gaussian release with the plan's sigma.
    Reference:
        DC-SGD-E (arXiv 2503.22988).
    """

    _takes_bins = False

    def __init__(self, weight: float = 0.2) -> None:
        require_positive("SquaredError", "weight", weight)
        self._weight = float(weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(weight={self._weight:g})"

    def _begin(self, noise_multiplier: float, divisor: int, size: int) -> None:
        self._noise_per_norm = self.statistic.sensitivity(1.0) * noise_multiplier * math.sqrt(size) / divisor

    def _statistic(self, max_grad_norm: float, noise_multiplier: float, divisor: int, bins: NormBins) -> NormStatistic:
        return Histogram(_EDGES, self._weight)

    def update(self, distribution: NormDistribution) -> None:
        shares = distribution.shares.flip(0).diff(prepend=distribution.shares.new_zeros(1))
        # A few examples of noise in the last bins would outweigh all others, because errors are squared.
        shares = torch.where(shares > _CERTAIN * distribution.noise_std[-1], shares, 0.0)
        if not bool(shares.any()):
            return

        def error(bound: float) -> float:
            clipped = sum(float(p) * max(n - bound, 0.0) ** 2 for p, n in zip(shares, _MIDDLES, strict=True))
            return (self._noise_per_norm * bound) ** 2 + clipped

        self._multiply(min(_CANDIDATES, key=error))
