"""Statistics over a training that show whether noise or clipping hurts it more, before the noise and after it."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from rich.table import Table

from privgrad.errors import expected
from privgrad.private_gradient import PrivateGradient, RawStep
from privgrad.types import NoisyGradient


class RawGradientStats:
    """The sums, over a training, of the effect of clipping and noise on the gradient. NOT private.

    Args:
        private_grad: observed from now on; None if you register `observe` on it later.
    Attributes:
        steps: number of observed steps.
    """

    def __init__(self, private_grad: PrivateGradient | None = None) -> None:
        self.steps = 0
        self._examples = self._clipped = 0
        self._norms = self._kept = 0.0
        self._signal = defaultdict[str, float](float)  # squared lengths, summed over steps
        self._noise = defaultdict[str, float](float)
        self._released = defaultdict[str, float](float)
        if private_grad is not None:
            private_grad.register_raw_observer(self.observe)

    def observe(self, raw: RawStep) -> None:
        """Add one step to the sums."""
        self.steps += 1
        norms_B, factors_B = raw.clipping.raw_norms, raw.clipping.raw_factors
        self._examples += len(norms_B)
        self._clipped += int((factors_B < 1).sum())
        self._norms += float(norms_B.sum())
        self._kept += float(raw.clipping.raw_lengths.sum())
        for name, clean in raw.raw_mean.items():
            self._signal[name] += float(clean.double().square().sum())
            self._noise[name] += raw.released.noise_variance_of(name)
            self._released[name] += float(raw.released[name].double().square().sum())

    def layers(self, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return the statistics of each parameter, or with `whole` of each module.

        Each row has "name"; "raw_signal_to_noise", the length of the clipped mean divided by the length of its noise
        (NOT private); "noise_share", the share of the released second moment that is noise (post-processing).
        """
        squares: list[Mapping[str, float]] = [self._signal, self._noise, self._released]
        signal, noise, released = map(by_module, squares) if whole else squares
        return [
            {
                "name": name,
                "raw_signal_to_noise": math.sqrt(_ratio(signal[name], noise[name])),
                "noise_share": _ratio(noise[name], released[name]),
            }
            for name in signal
        ]

    def summary(self) -> dict[str, float]:
        """Return the statistics over all steps. NOT private.

        Returns:
            "raw_clip_fraction": the share of examples whose gradient was shortened; "raw_kept": the length of the
            contributions divided by the length of the gradients (1: clipping removed nothing); "raw_signal_to_noise";
            "noise_share", about 1 where Adam's denominator is only noise. nan before the first example.
        """
        return {
            "raw_clip_fraction": _ratio(self._clipped, self._examples),
            "raw_kept": _ratio(self._kept, self._norms),
            "raw_signal_to_noise": math.sqrt(_ratio(sum(self._signal.values()), sum(self._noise.values()))),
            "noise_share": _ratio(sum(self._noise.values()), sum(self._released.values())),
        }

    def verdict(self) -> str:
        """Return the summary in plain language, for users. NOT private."""
        return f"NOT PRIVATE. {verdict(self.summary())}"

    def table(self) -> Table:
        """Return the statistics of each parameter as a table for a user's terminal. NOT private."""
        table = Table("parameter", "signal / noise", "noise in the second moment", title="NOT PRIVATE")
        for row in self.layers():
            table.add_row(row["name"], f"{row['raw_signal_to_noise']:.3g}", f"{row['noise_share']:.1%}")
        return table


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
        self._noise = defaultdict[str, float](float)  # squared lengths, summed over steps
        self._released = defaultdict[str, float](float)
        if private_grad is not None:
            private_grad.register_raw_observer(lambda raw: self.observe(raw.released))

    def __repr__(self) -> str:
        found = ", ".join(f"{name}={value:.3g}" for name, value in self.summary().items())
        return f"ReleasedStats(steps={self.steps}, {found})"

    def observe(self, gradient: NoisyGradient) -> None:
        """Add one released gradient, as PrivateGradient returned it without a filter.

        Raises:
            PrivacyError: it was filtered.
        """
        if gradient.is_filtered:  # a mean of gradients has a signal and a noise of its own
            got, remedy = f"noise_gain = {gradient.noise_gain:.3g}", "make ReleasedStats(private_grad)"
            raise expected("ReleasedStats.observe", "gradient", "to be as released, without a filter", got, remedy)
        self.steps += 1
        if (norms := gradient.norm_distribution) is not None:
            self._with_distribution += 1
            self._clip_fraction += norms.clip_fraction
            self._clip_variance += norms.clip_fraction_std**2
            self._bounds = min(self._bounds[0], norms.max_grad_norm), max(self._bounds[1], norms.max_grad_norm)
        for name, value in gradient.items():
            self._noise[name] += gradient.noise_variance_of(name)
            self._released[name] += float(value.double().square().sum())

    def summary(self) -> dict[str, float]:
        """Return the statistics over all steps.

        Returns:
            "clip_fraction": the mean share of gradients that clipping shortened; "clip_fraction_std": the standard
            deviation of its noise; "lowest_max_grad_norm" and "highest_max_grad_norm": the smallest and the largest C.
            These are nan without distributions of norms. "signal_to_noise": the estimated length of the clipped mean
            over that of its noise; "noise_share": the share of the released second moment that is noise. nan before the
            first step.
        """
        count = self._with_distribution or math.nan  # nan also makes nan of all that is divided by it
        lowest, highest = self._bounds if self._with_distribution else (math.nan, math.nan)
        share = _ratio(sum(self._noise.values()), sum(self._released.values()))
        return {
            "clip_fraction": self._clip_fraction / count,
            "clip_fraction_std": math.sqrt(self._clip_variance) / count,
            "lowest_max_grad_norm": lowest,
            "highest_max_grad_norm": highest,
            "signal_to_noise": _signal_to_noise(share),
            "noise_share": share,
        }

    def table(self) -> Table:
        """Return the statistics of each parameter as a table for a user's terminal, as private as the gradients."""
        table = Table("parameter", "signal / noise", "noise in the second moment")
        for name, noise in self._noise.items():
            share = _ratio(noise, self._released[name])
            table.add_row(name, f"{_signal_to_noise(share):.3g}", f"{share:.1%}")
        return table

    def verdict(self) -> str:
        """Return the summary in plain language, for users. It may be published where the gradients may."""
        return released_verdict(self.summary())


SecondMoment = Literal["unknown", "none", "biased", "debiased"]
_OF_NOISE: dict[SecondMoment, str] = {
    "unknown": "of the released second moment is noise: Adam would divide by its root, AdamBC subtracts it.",
    "biased": "of its second moment is noise; AdamBC subtracts it (docs/choosing.md says when that helped).",
    "debiased": "of its second moment was noise variance, which the optimizer subtracts.",
}


def verdict(found: Mapping[str, float], second_moment: SecondMoment = "unknown") -> str:
    """Return the result of `RawGradientStats.summary` in plain language. NOT private, as these numbers."""
    if math.isnan(found["raw_clip_fraction"]):
        return "No example has been observed yet."
    ratio = found["raw_signal_to_noise"]
    times = f"the signal is {ratio:.2g} times as long as the noise."
    of_noise = times if math.isfinite(ratio) else "there is no noise."
    sentences = [
        f"Clipping shortened {found['raw_clip_fraction']:.0%} of the gradients and left {found['raw_kept']:.0%} of "
        f"their length; {of_noise}",
        advice(ratio, found["raw_clip_fraction"]),
    ]
    if found["noise_share"] > 0.5 and second_moment != "none":
        sentences.append(f"{min(found['noise_share'], 1.0):.0%} {_OF_NOISE[second_moment]}")
    return " ".join(sentences)


def released_verdict(found: Mapping[str, float]) -> str:
    """Return the result of `ReleasedStats.summary` in plain language."""
    clipped, ratio = found["clip_fraction"], found["signal_to_noise"]
    if math.isnan(found["noise_share"]):
        return "No gradient has been observed yet."
    # The share counts as small or large only if its noise cannot explain it; older records have no deviation and no C.
    doubt = 2 * found.get("clip_fraction_std", 0.0)
    lowest, highest = (found.get(f"{end}_max_grad_norm", math.nan) for end in ("lowest", "highest"))
    sentences: list[str] = []
    if not math.isnan(clipped):
        sentences.append(f"Clipping shortened about {min(max(clipped, 0.0), 1.0):.0%} of the gradients.")
    if moved := lowest < highest:
        sentences.append(f"C moved between {lowest:.3g} and {highest:.3g}.")
    if math.isinf(ratio):
        return " ".join([*sentences, "There is no noise, so nothing of this is private."])
    sentences.append(f"The signal is about {ratio:.2g} times as long as the noise.")
    return " ".join([*sentences, advice(ratio, clipped, doubt, moved=moved)])


def advice(ratio: float, clipped: float, doubt: float = 0.0, *, moved: bool = False) -> str:
    """Return whether noise or clipping hurts, and the remedy; `doubt` is about `clipped`, and `moved` about C."""
    # At a fixed noise step, a smaller C loses nothing until nearly all gradients are clipped
    # (docs/tuning-evidence.md). So this does not count how much of their length is left.
    if ratio >= 1 and clipped - doubt > 0.95:
        larger = "an adaptive_clip that clips fewer gradients" if moved else "a larger max_grad_norm"
        return f"Noise does not dominate, and nearly all gradients are clipped: on unequal classes, try {larger}."
    if ratio < 1 and clipped + doubt < 0.1 and not moved:
        return "Noise hurts, and the bound is loose: try a smaller max_grad_norm, or clip.TargetFraction()."
    if ratio < 1:
        return "Noise hurts: try a larger batch, fewer steps, or fewer trainable parameters."
    return "Neither dominates."


def by_module(values: Mapping[str, float]) -> dict[str, float]:
    """Return the sum over the parameters of each module; its name is the part before a parameter's last dot."""
    sums = defaultdict[str, float](float)
    for name, value in values.items():
        sums[name.rpartition(".")[0] or name] += value
    return sums


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; nan for 0 / 0, and inf for any other division by 0."""
    return part / whole if whole else math.inf if part else math.nan


def _signal_to_noise(share: float) -> float:
    """Return the estimated length of the signal over that of the noise."""
    return math.sqrt(max(0.0, 1 / share - 1)) if share else math.inf
