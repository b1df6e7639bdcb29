"""Statistics of released gradients that show whether noise or clipping hurts a training more.

Users and `experiments.one_training` make a ReleasedStats. The privacy guarantee does not rest on this file, which uses
released values only.
"""

import math
from collections.abc import Mapping

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
        self._clip_fraction = self._noise = self._released = 0.0
        watch_from(private_grad, lambda raw: self.observe(raw.released))

    def observe(self, gradient: NoisyGradient) -> None:
        """Add one released gradient, as PrivateGradient returned it (not one that was filtered).

        Raises:
            PrivacyError: it is not a NoisyGradient.
        """
        if not isinstance(gradient, NoisyGradient):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "give the return value of PrivateGradient"
            raise expected("ReleasedStats.observe", "gradient", "to be a NoisyGradient", described(gradient), remedy)
        self.steps += 1
        if gradient.norm_distribution is not None:
            self._with_distribution += 1
            self._clip_fraction += gradient.norm_distribution.clip_fraction
        for name, value in gradient.items():
            self._noise += gradient.noise_variance_of(name)
            self._released += float(value.double().square().sum())

    def summary(self) -> dict[str, float]:
        """Return the statistics over all steps.

        Returns:
            "clip_fraction": the mean share of gradients that clipping shortened (nan without distributions of norms);
            "signal_to_noise": the estimated length of the clipped mean over that of its noise; "noise_share": the share
            of the released second moment that is noise. nan before the first step.
        """
        share = self._noise / self._released if self._released else math.nan
        return {
            "clip_fraction": self._clip_fraction / self._with_distribution if self._with_distribution else math.nan,
            "signal_to_noise": math.sqrt(max(0.0, 1 / share - 1)) if share else math.inf,
            "noise_share": share,
        }

    def verdict(self) -> str:
        """Return the summary in plain language, for users. It may be published where the gradients may."""
        return released_verdict(self.summary())


def released_verdict(found: Mapping[str, float]) -> str:
    """Return the result of `ReleasedStats.summary` in plain language. `experiments.report.page` calls it too."""
    clipped, ratio = found["clip_fraction"], found["signal_to_noise"]
    if math.isnan(found["noise_share"]):
        return "No gradient has been observed yet."
    sentences = [] if math.isnan(clipped) else [f"Clipping shortened about {min(max(clipped, 0.0), 1.0):.0%} of them."]
    if math.isinf(ratio):
        return " ".join([*sentences, "There is no noise, so nothing of this is private."])
    sentences.append(f"The signal is about {ratio:.2g} times as long as the noise.")
    if ratio >= 1 and clipped > 0.95:
        sentences.append("Clipping hurts more than noise: try a larger max_grad_norm.")
    elif ratio < 1 and clipped < 0.1:
        sentences.append("Noise hurts, and the bound is loose: try a smaller max_grad_norm, or clip.TargetFraction().")
    elif ratio < 1:
        sentences.append("Noise hurts: try a larger batch, fewer steps, or fewer trainable parameters.")
    else:
        sentences.append("Neither dominates.")
    return " ".join(sentences)
