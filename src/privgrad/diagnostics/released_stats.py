"""Statistics of released gradients that show whether noise or clipping hurts a training more.

Users and `experiments.one_training` make a ReleasedStats. The privacy guarantee does not rest on this file, which uses
released values only.
"""

import math
from collections.abc import Mapping

from rich.table import Table

from privgrad.diagnostics.moments import watch_from
from privgrad.errors import described, expected
from privgrad.private_gradient import PrivateGradient
from privgrad.types import NoisyGradient


class ReleasedStats:
    """Means over a training of what its released gradients show. Post-processing.

    Args:
        private_grad: observed from now on; None if you call `observe` with each gradient.
    Attributes:
        steps: number of observed steps.
    Privacy:
        Released gradients and their distributions of norms are the only input. So the results cost no further epsilon,
        and are as private as these gradients: where their epsilon is infinite, nothing is.
    """

    def __init__(self, private_grad: PrivateGradient | None = None) -> None:
        self.steps = self._with_distribution = 0
        self._clip_fraction = self._clip_variance = 0.0
        self._bounds = (math.inf, 0.0)  # the smallest and the largest C
        self._noise: dict[str, float] = {}  # squared lengths, summed over steps
        self._released: dict[str, float] = {}
        watch_from(private_grad, lambda raw: self.observe(raw.released))

    def __repr__(self) -> str:
        found = ", ".join(f"{name}={value:.3g}" for name, value in self.summary().items())
        return f"ReleasedStats(steps={self.steps}, {found})"

    def observe(self, gradient: NoisyGradient) -> None:
        """Add one released gradient, as PrivateGradient returned it without a filter.

        Raises:
            PrivacyError: it is not a NoisyGradient, or it was filtered.
        """
        if not isinstance(gradient, NoisyGradient):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "give the return value of PrivateGradient"
            raise expected("ReleasedStats.observe", "gradient", "to be a NoisyGradient", described(gradient), remedy)
        if gradient.is_filtered:  # a mean of gradients has a signal and a noise of its own
            condition, got = "to be as released, without a filter", f"noise_gain = {gradient.noise_gain:.3g}"
            remedy = "make ReleasedStats(private_grad): it observes the gradients before the filter of PrivateGradient"
            raise expected("ReleasedStats.observe", "gradient", condition, got, remedy)
        self.steps += 1
        if (norms := gradient.norm_distribution) is not None:
            self._with_distribution += 1
            self._clip_fraction += norms.clip_fraction
            self._clip_variance += norms.clip_fraction_std**2
            self._bounds = min(self._bounds[0], norms.max_grad_norm), max(self._bounds[1], norms.max_grad_norm)
        for name, value in gradient.items():
            self._noise[name] = self._noise.get(name, 0.0) + gradient.noise_variance_of(name)
            self._released[name] = self._released.get(name, 0.0) + float(value.double().square().sum())

    def summary(self) -> dict[str, float]:
        """Return the statistics over all steps.

        Returns:
            "clip_fraction": the mean share of gradients that clipping shortened; "clip_fraction_std": the standard
            deviation of its noise; "lowest_max_grad_norm" and "highest_max_grad_norm": the smallest and the largest C.
            These are nan without distributions of norms. "signal_to_noise": the estimated length of the clipped mean
            over that of its noise; "noise_share": the share of the released second moment that is noise. nan before the
            first step.
        """
        count = self._with_distribution
        share = _share(sum(self._noise.values()), sum(self._released.values()))
        return {
            "clip_fraction": self._clip_fraction / count if count else math.nan,
            "clip_fraction_std": math.sqrt(self._clip_variance) / count if count else math.nan,
            "lowest_max_grad_norm": self._bounds[0] if count else math.nan,
            "highest_max_grad_norm": self._bounds[1] if count else math.nan,
            "signal_to_noise": _signal_to_noise(share),
            "noise_share": share,
        }

    def table(self) -> Table:
        """Return the statistics of each parameter as a table for a user's terminal, as private as the gradients."""
        table = Table("parameter", "signal / noise", "noise in the second moment")
        for name, noise in self._noise.items():
            share = _share(noise, self._released[name])
            table.add_row(name, f"{_signal_to_noise(share):.3g}", f"{share:.1%}")
        return table

    def verdict(self) -> str:
        """Return the summary in plain language, for users. It may be published where the gradients may."""
        return released_verdict(self.summary())


def _share(noise: float, released: float) -> float:
    """Return the share of noise in a sum of squares; nan for an empty sum."""
    return noise / released if released else math.nan


def _signal_to_noise(share: float) -> float:
    """Return the estimated length of the signal over that of the noise, from the share of noise."""
    return math.sqrt(max(0.0, 1 / share - 1)) if share else math.inf


def released_verdict(found: Mapping[str, float]) -> str:
    """Return the result of `ReleasedStats.summary` in plain language. `experiments.report.page` calls it too."""
    clipped, ratio = found["clip_fraction"], found["signal_to_noise"]
    if math.isnan(found["noise_share"]):
        return "No gradient has been observed yet."
    # The share counts as small or large only if its noise cannot explain it; older records have no deviation and no C.
    doubt, lowest = 2 * found.get("clip_fraction_std", 0.0), found.get("lowest_max_grad_norm", math.nan)
    highest, sentences = found.get("highest_max_grad_norm", math.nan), list[str]()
    if not math.isnan(clipped):
        sentences.append(f"Clipping shortened about {min(max(clipped, 0.0), 1.0):.0%} of the gradients.")
    if moved := lowest < highest:
        sentences.append(f"C moved between {lowest:.3g} and {highest:.3g}.")
    if math.isinf(ratio):
        return " ".join([*sentences, "There is no noise, so nothing of this is private."])
    sentences.append(f"The signal is about {ratio:.2g} times as long as the noise.")
    return " ".join([*sentences, advice(ratio, clipped, doubt, moved=moved)])


def advice(ratio: float, clipped: float, doubt: float = 0.0, *, moved: bool = False) -> str:
    """Return whether noise or clipping hurts, and the remedy. `gradient_stats` calls it too.

    At a fixed noise step, a smaller C loses nothing until nearly all gradients are clipped (docs/tuning.md). So this
    does not count how much of their length is left.

    Args:
        ratio: the length of the signal over that of the noise.
        clipped: the share of gradients that clipping shortened; nan if it is unknown.
        doubt: the largest error of this share that its noise explains.
        moved: whether C changed during the training.
    """
    if ratio >= 1 and clipped - doubt > 0.95:
        larger = "an adaptive_clip that clips fewer gradients" if moved else "a larger max_grad_norm"
        return f"Noise does not dominate, and nearly all gradients are clipped: on unequal classes, try {larger}."
    if ratio < 1 and clipped + doubt < 0.1 and not moved:
        return "Noise hurts, and the bound is loose: try a smaller max_grad_norm, or clip.TargetFraction()."
    if ratio < 1:
        return "Noise hurts: try a larger batch, fewer steps, or fewer trainable parameters."
    return "Neither dominates."
