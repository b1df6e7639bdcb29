"""PlanBase: the fields of a PrivacyPlan, and the numbers that follow from them.

`plan` derives PrivacyPlan from it. The privacy guarantee rests on this file: the sampler draws at `group_rate`, and the
ledger charges `release`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from privgrad.accounting import Release
from privgrad.correlation import Banded
from privgrad.noise import std_of_noise
from privgrad.participations import most_participations, rate_in_group
from privgrad.types import COVERED, PrivacyUnit, SamplingScheme

_SCALED = ("expected_batch_size", "sample_rate", "noise_multiplier")  # recorded of the plan that a training simulates


@dataclass(frozen=True, kw_only=True)
class PlanBase:
    """The fields of a PrivacyPlan, which documents them, and the numbers that follow from them."""

    sample_rate: float
    steps: int
    expected_batch_size: int
    noise_multiplier: float
    max_grad_norm: float
    num_examples: int
    delta: float | None = None
    target_epsilon: float | None = None
    sampling: SamplingScheme = "poisson"
    max_batch_size: int | None = None
    seed: int | None = None
    group_size: int = 1
    noise_on_grid: bool = False
    privacy_unit: PrivacyUnit = "example"
    correlation: Banded | None = None
    simulates: "PlanBase | None" = None

    neighboring_relation: ClassVar[str] = "add or remove one"

    @property
    def divisor(self) -> int:
        """The public divisor of a clipped sum: the expected number of contributions, B / k.

        PrivateGradient gives it to `noise.add_noise`.
        """
        return self.expected_batch_size // self.group_size

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise in one coordinate of the released mean gradient: sigma C / B.

        With group_size k > 1 it is sigma 2C / (B / k). It equals `noise_std` of the released gradients, except that
        `noise_on_grid` adds at most 1/500 to these. With a correlation it is that of the last step, and earlier ones
        have less. Users compare plans by it.
        """
        sensitivity = self.max_grad_norm if self.group_size == 1 else 2 * self.max_grad_norm
        independent = std_of_noise(self.noise_multiplier, sensitivity, self.divisor)
        return independent if self.correlation is None else independent * self.correlation.std(self.steps - 1)

    @property
    def noise_gain(self) -> float:
        """The noise of a long sum of gradients over that of independent noise with `noise_std`; 1 without correlation.

        `integrations.huggingface_arguments` reads it.
        """
        correlation = self.correlation
        return 1.0 if correlation is None else correlation.sum_std / correlation.std(self.steps - 1)

    @property
    def bands(self) -> int:
        """The number of groups of people that take turns; 1 without correlation. PrivateGradient reads it."""
        return 1 if self.correlation is None else self.correlation.bands

    @property
    def group_rate(self) -> float:
        """The probability that a person of the group of a step is in its batch: bands times the sample rate.

        The sampler draws by this number, and the ledger charges it.
        """
        return rate_in_group(self.sample_rate, self.bands)

    def usual_batch_size(self, processes: int = 1) -> int:
        """Return a number of examples that few batches exceed: B plus three standard deviations.

        PrivateGradient splits batches by this number, because the size of the drawn batch is private.

        Args:
            processes: the number of processes that share each batch; the result is for one of them.
        """
        if self.max_batch_size is not None:
            return self.max_batch_size
        expected = self.expected_batch_size / processes
        spread = 3 * math.sqrt(expected * (1 - self.sample_rate)) if self.sampling == "poisson" else 0.0
        return math.ceil(expected + spread)

    @property
    def is_covered(self) -> bool:
        """Whether the accountant covers the way batches are drawn.

        `experiments.one_training` reads it to label the epsilon of a run. The guarantee does not rest on it.
        """
        return self.sampling in COVERED

    @property
    def epoch_steps(self) -> int:
        """The number of steps that draw each example once on average. A plan that simulates another has its number.

        PrivateGradient and `integrations.external_loop` read it. The guarantee does not rest on it.
        """
        plan = self if self.simulates is None else self.simulates
        return max(1, round(1 / plan.sample_rate))

    @property
    def release(self) -> Release:
        """The release that one step charges to the ledger; one without noise if the plan simulates another.

        PrivateGradient reads it.
        """
        charged = self.noise_multiplier if self.simulates is None else 0.0
        if self.max_batch_size is None:
            return Release(charged, self.group_rate, self.sampling)
        return Release(charged, self.group_rate, self.sampling, 1, self.max_batch_size, self.num_examples)

    def release_of(self, steps: int) -> Release:
        """Return the releases in which one person may take part in so many steps. Budgets commit those of all steps."""
        return replace(self.release, count=most_participations(steps, self.bands))

    @property
    def public_facts(self) -> dict[str, Any]:
        """The numbers that `Ledger.bind` records. The number of steps is absent, because it may grow later.

        PrivateGradient adds its own facts and gives all to the ledger. If the plan simulates another, noise_multiplier
        is 0, so that every epsilon of the ledger is infinite, and `simulates` has the numbers of the simulated plan.
        """
        simulated = self.simulates
        return {
            "sampling": self.sampling,
            "sample_rate": self.group_rate,
            "expected_batch_size": self.expected_batch_size,
            "max_batch_size": self.max_batch_size,
            "noise_multiplier": self.release.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "num_examples": self.num_examples,
            "delta": self.delta,
            "group_size": self.group_size,
            "noise_on_grid": self.noise_on_grid,
            "neighboring_relation": self.neighboring_relation,
            "privacy_unit": self.privacy_unit,
            "noise_memory": None
            if self.correlation is None
            else {"bands": self.bands, "coefficients": list(self.correlation.chosen)},
            "simulates": None if simulated is None else {name: getattr(simulated, name) for name in _SCALED},
        }
