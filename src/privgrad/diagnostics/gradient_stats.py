"""Statistics over a training that show whether noise or clipping hurts it more.

Users and `papers.moments` register it on a PrivateGradient; `diagnostics.recorder` feeds it for experiments. The
privacy guarantee does not rest on this file.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from rich.table import Table

from privgrad.diagnostics.moments import watch_from
from privgrad.diagnostics.released_stats import advice
from privgrad.private_gradient import PrivateGradient, RawStep


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
        self._signal: dict[str, float] = {}  # squared lengths, summed over steps
        self._noise: dict[str, float] = {}
        self._released: dict[str, float] = {}
        watch_from(private_grad, self.observe)

    def observe(self, raw: RawStep) -> None:
        """Add one step to the sums. `PrivateGradient` calls it at each step, or `RawRecorder.observe` does."""
        self.steps += 1
        norms_B, factors_B = raw.clipping.raw_norms, raw.clipping.raw_factors
        self._examples += len(norms_B)
        self._clipped += int((factors_B < 1).sum())
        self._norms += float(norms_B.sum())
        self._kept += float(raw.clipping.raw_lengths.sum())
        for name, clean in raw.raw_mean.items():
            for sums, value in (
                (self._signal, clean.double().square().sum()),
                (self._noise, raw.released.noise_variance_of(name)),
                (self._released, raw.released[name].double().square().sum()),
            ):
                sums[name] = sums.get(name, 0.0) + float(value)

    def layers(self, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return the statistics of each parameter.

        Each row has "name"; "raw_signal_to_noise", the length of the clipped mean divided by the length of its noise
        (NOT private); "noise_share", the share of the released second moment that is noise (post-processing).
        `RawRecorder.row` and `table` call it.

        Args:
            whole: put the parameters of one module together.
        """
        squares = (self._signal, self._noise, self._released)
        signal, noise, released = (by_module(square) if whole else square for square in squares)
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

        Users, `RawRecorder.row` and `papers.moments` call it.

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


SecondMoment = Literal["unknown", "none", "biased", "debiased"]

_OF_NOISE: dict[SecondMoment, str] = {
    "unknown": "of the released second moment is noise: Adam would divide by its root, AdamBC subtracts it.",
    "biased": "of its second moment is noise; AdamBC subtracts it (docs/choosing.md says when that helped).",
    "debiased": "of its second moment was noise variance, which the optimizer subtracts.",
}


def verdict(found: Mapping[str, float], second_moment: SecondMoment = "unknown") -> str:
    """Return the result of `RawGradientStats.summary` in plain language.

    The text is as private as these numbers: NOT private. `experiments.report.page` calls it too.

    Args:
        found: the numbers.
        second_moment: the second moment of released gradients whose root divides the optimizer's step: "none",
            "biased" by the noise, "debiased", or "unknown".
    """
    if math.isnan(found["raw_clip_fraction"]):
        return "No example has been observed yet."
    sentences = [
        f"Clipping shortened {found['raw_clip_fraction']:.0%} of the gradients and left {found['raw_kept']:.0%} "
        f"of their length; "
        + (
            f"the signal is {found['raw_signal_to_noise']:.2g} times as long as the noise."
            if math.isfinite(found["raw_signal_to_noise"])
            else "there is no noise."
        ),
    ]
    sentences.append(advice(found["raw_signal_to_noise"], found["raw_clip_fraction"]))
    if found["noise_share"] > 0.5 and second_moment != "none":
        sentences.append(f"{min(found['noise_share'], 1.0):.0%} {_OF_NOISE[second_moment]}")
    return " ".join(sentences)


def by_module(values: Mapping[str, float]) -> dict[str, float]:
    """Return the sum over the parameters of each module; its name is the part before a parameter's last dot.

    `diagnostics.recorder` calls it too.
    """
    sums: dict[str, float] = {}
    for name, value in values.items():
        module = name.rpartition(".")[0] or name
        sums[module] = sums.get(module, 0.0) + value
    return sums


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; nan for 0 / 0, and inf for any other division by 0."""
    if whole == 0:
        return math.nan if part == 0 else math.inf
    return part / whole
