"""The noise multiplier of a plan, and the number of bands of its noise, for a target epsilon.

`PrivacyPlan.for_budget` calls it. The privacy guarantee rests on `calibrated`: the noise multiplier that it returns has
been checked for the rate and the number of draws that a person has with so many bands.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from privgrad.accounting import calibrate, calibrate_noise_multiplier
from privgrad.correlation import Banded
from privgrad.errors import described, expected
from privgrad.mechanisms import Release, Selection
from privgrad.participations import most_participations, rate_in_group
from privgrad.plan_numbers import require_bands

_CANDIDATES = (2, 4, 8, 16, 32, 64)
_WORTH = 0.99  # largest relative error for which "auto" takes noise with memory


@dataclass(frozen=True)
class Budgeted:
    """The numbers of a plan for a target epsilon.

    Attributes:
        target_epsilon: as in PrivacyPlan.for_budget, like the next one.
        delta: in (0, 1).
        sample_rate: q of independent noise, B / n.
        steps: T.
        besides: as in PrivacyPlan.for_budget.
        truncation: the largest batch size and the number of examples, for truncated samples.
    """

    target_epsilon: float
    delta: float
    sample_rate: float
    steps: int
    besides: tuple[Release | Selection, ...]
    truncation: tuple[int, int] | None = None

    def noise_multiplier(self, bands: int) -> float:
        """Return sigma for a number of bands: ceil(T / b) draws of each person at the rate b q."""
        if self.truncation is not None:

            def releases(sigma: float) -> list[Release | Selection]:
                assert self.truncation is not None
                return [Release(sigma, self.sample_rate, "truncated", self.steps, *self.truncation), *self.besides]

            return calibrate(releases, target_epsilon=self.target_epsilon, delta=self.delta)
        return calibrate_noise_multiplier(
            target_epsilon=self.target_epsilon,
            delta=self.delta,
            sample_rate=rate_in_group(self.sample_rate, bands),
            steps=most_participations(self.steps, bands),
            besides=self.besides,
        )


def calibrated(correlation: Banded | Literal["auto"] | None, budget: Budgeted) -> tuple[Banded | None, float]:
    """Return the correlation with its coefficients and its `relative_error`, and the noise multiplier.

    Args:
        correlation: as in PrivacyPlan.for_budget.
        budget: the numbers of the plan.
    Raises:
        PrivacyError: correlation is neither Banded, "auto" nor None; or no noise multiplier meets the target.
    """
    if correlation is not None and correlation != "auto" and not isinstance(correlation, Banded):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = 'give privgrad.noise.Banded(bands=8), "auto" or None'
        raise expected("for_budget", "correlation", "to be a correlation of the noise", described(correlation), remedy)
    if isinstance(correlation, Banded):
        require_bands("for_budget", correlation.bands, budget.steps, math.floor(1 / budget.sample_rate))
    independent = budget.noise_multiplier(1)
    if correlation is None:
        return None, independent
    if correlation == "auto":
        fitting = (b for b in _CANDIDATES if b * budget.sample_rate <= 1 and b <= budget.steps)
        correlations = [Banded(bands) for bands in fitting]
    else:
        correlations = [correlation]
    usual = independent * math.sqrt((budget.steps + 1) / 2)
    best: tuple[Banded | None, float] = None, independent
    smallest = _WORTH if correlation == "auto" else math.inf
    for each in correlations:
        chosen, sigma = each.for_steps(budget.steps), budget.noise_multiplier(each.bands)
        error = sigma * chosen.prefix_error(budget.steps) / usual
        if error < smallest:
            best, smallest = (replace(chosen, relative_error=error), sigma), error
    return best
