"""PrivacyPlan: the public numbers of a training run, fixed before it starts."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
from torch.utils.data import Dataset

from privgrad import accounting
from privgrad.accounting import Accountant, Release
from privgrad.errors import (
    expected,
    require_choice,
    require_delta,
    require_integer,
    require_nonnegative,
    require_positive,
    require_rate,
)
from privgrad.processes import ALONE, Processes
from privgrad.rng import RandomSource
from privgrad.sampling import Collate, batches
from privgrad.types import Batch, PrivacyUnit, SamplingScheme

_LARGEST_NOISE_STD = 1e15  # whose square float32 holds, with room to spare


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Everything that decides privacy, typed once.

    Args:
        sample_rate: q in (0, 1], the probability that an example is in a batch; 1.0 is the full batch.
        steps: T >= 1, the number of releases paid for.
        expected_batch_size: B >= 1, the public divisor of the clipped sum: sample_rate * num_examples, rounded.
        noise_multiplier: sigma >= 0, noise standard deviation over sensitivity. 0 adds no noise and reports
            epsilon = inf.
        max_grad_norm: C >= 1e-10, the bound on one example's gradient. Infinite only with noise_multiplier 0.
        num_examples: n >= 1, the public size of the data set.
        delta: in (0, 1), or None if it is only given when epsilon is asked for.
        target_epsilon: what the noise was calibrated for, or None.
        sampling: "poisson", or "fixed" for shuffled batches of one size, whose epsilon no accountant covers.
        seed: None for the operating system's entropy. An integer makes a run repeatable and its noise
            predictable: for research only.
        group_size: k >= 1, a divisor of B: examples whose mean gradient is clipped as one. For research on methods
            that do so ("microbatches"): with k > 1 the sensitivity is 2C and the divisor B / k, so that one example's
            noise is 2k times as large.
        noise_on_grid: add the noise on a public grid, so that the low-order bits of what is released tell nothing of
            the data (see noise.add_noise). On the CPU only; at most a five-hundredth more noise. False adds it to the
            floating-point numbers as they are.
        privacy_unit: whose presence is hidden. "example", or "user": all examples of one person or device together
            (see federated). Every "example" above is then a user: n users, B the expected cohort, T rounds, C the
            bound on one user's update.
    Raises:
        PrivacyError: a number out of its range, or rate, batch size and data set size that contradict each other.
    Privacy:
        Holds public numbers only. Neighboring data sets differ by adding or removing one example, or with privacy
        unit "user" all of one user's; whatever the group size.
    """

    sample_rate: float
    steps: int
    expected_batch_size: int
    noise_multiplier: float
    max_grad_norm: float
    num_examples: int
    delta: float | None = None
    target_epsilon: float | None = None
    sampling: SamplingScheme = "poisson"
    seed: int | None = None
    group_size: int = 1
    noise_on_grid: bool = False
    privacy_unit: PrivacyUnit = "example"

    neighboring_relation = "add or remove one"

    def __post_init__(self) -> None:
        function = "PrivacyPlan"
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # which neither a ledger nor a checkpoint could hold
                object.__setattr__(self, name, value.item())
        require_rate(function, self.sample_rate)
        require_integer(function, "steps", self.steps, 1)
        require_integer(function, "expected_batch_size", self.expected_batch_size, 1)
        require_integer(function, "num_examples", self.num_examples, 1)
        require_nonnegative(function, "noise_multiplier", self.noise_multiplier, "give sigma, or use for_budget")
        if not (self.noise_multiplier == 0 and _is_infinite(self.max_grad_norm)):
            require_positive(function, "max_grad_norm", self.max_grad_norm, "give the clip norm C")
        if self.max_grad_norm < 1e-10:
            remedy = "rescale the loss: squares of such gradients vanish in float32, and with them the bound"
            raise expected(function, "max_grad_norm", "to be at least 1e-10", self.max_grad_norm, remedy)
        if self.noise_multiplier > 0 and self.noise_multiplier * self.max_grad_norm > _LARGEST_NOISE_STD:
            got, remedy = self.noise_multiplier * self.max_grad_norm, "lower one of the two"
            raise expected(
                function, "noise_multiplier * max_grad_norm", f"to be at most {_LARGEST_NOISE_STD:g}", got, remedy
            )
        if abs(self.sample_rate * self.num_examples - self.expected_batch_size) > 1:
            raise expected(
                function,
                "expected_batch_size",
                f"to be sample_rate * num_examples = {self.sample_rate * self.num_examples:g}",
                self.expected_batch_size,
                "correct one of the three",
            )
        require_integer(function, "group_size", self.group_size, 1)
        if self.expected_batch_size % self.group_size:
            condition = f"to divide expected_batch_size = {self.expected_batch_size}"
            raise expected(function, "group_size", condition, self.group_size, "change one of the two")
        if not isinstance(self.noise_on_grid, bool) or (self.noise_on_grid and self.noise_multiplier == 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            condition, remedy = "to be True or False, and False without noise", "there is nothing to hide without noise"
            raise expected(function, "noise_on_grid", condition, self.noise_on_grid, remedy)
        require_choice(function, "privacy_unit", self.privacy_unit, get_args(PrivacyUnit))
        if self.privacy_unit == "user" and self.group_size > 1:
            remedy = "each user's examples are clipped as one already"
            raise expected(function, "group_size", "to be 1 for users", self.group_size, remedy)
        require_choice(function, "sampling", self.sampling, get_args(SamplingScheme))
        if self.seed is not None:
            require_integer(function, "seed", self.seed, -math.inf)
        if self.target_epsilon is not None:
            require_positive(function, "target_epsilon", self.target_epsilon, "it is what noise was calibrated for")
        if self.delta is not None:
            require_delta(function, self.delta)
            if self.delta > 1 / self.num_examples:
                count, whole = ("num_users", "user") if self.privacy_unit == "user" else ("num_examples", "record")
                warnings.warn(
                    f"delta = {self.delta:g} is above 1 / {count} = {1 / self.num_examples:.3g}: a mechanism "
                    f"that publishes one whole {whole} would pass; lower delta",
                    stacklevel=3,
                )

    @classmethod
    def for_budget(
        cls,
        *,
        target_epsilon: float,
        delta: float,
        max_grad_norm: float,
        num_examples: int,
        expected_batch_size: int,
        steps: int,
        sampling: SamplingScheme = "poisson",
        seed: int | None = None,
        group_size: int = 1,
        noise_on_grid: bool = False,
        privacy_unit: PrivacyUnit = "example",
    ) -> "PrivacyPlan":
        """The plan whose steps together cost at most target_epsilon, by PLD.

        Args:
            target_epsilon: > 0.
            delta, max_grad_norm, num_examples, expected_batch_size, steps: as in PrivacyPlan.
            sampling, seed, group_size, noise_on_grid, privacy_unit: as in PrivacyPlan.
        Returns:
            A plan with sample_rate = expected_batch_size / num_examples and the calibrated noise_multiplier.
        Raises:
            PrivacyError: a number out of its range, or a target that cannot be met.
        Privacy:
            Calibrated on the safe side. With sampling="fixed", calibrated as if Poisson: a label, no guarantee.
        """
        require_integer("for_budget", "expected_batch_size", expected_batch_size, 1)
        require_integer("for_budget", "num_examples", num_examples, 1)
        _require_part("for_budget", "expected_batch_size", expected_batch_size, "num_examples", num_examples)
        sample_rate = expected_batch_size / num_examples
        return cls(
            sample_rate=sample_rate,
            steps=steps,
            expected_batch_size=expected_batch_size,
            noise_multiplier=accounting.calibrate_noise_multiplier(
                target_epsilon=target_epsilon, delta=delta, sample_rate=sample_rate, steps=steps
            ),
            max_grad_norm=max_grad_norm,
            num_examples=num_examples,
            delta=delta,
            target_epsilon=target_epsilon,
            sampling=sampling,
            seed=seed,
            group_size=group_size,
            noise_on_grid=noise_on_grid,
            privacy_unit=privacy_unit,
        )

    @classmethod
    def for_users(
        cls,
        *,
        num_users: int,
        expected_cohort_size: int,
        rounds: int,
        max_update_norm: float,
        delta: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        sampling: SamplingScheme = "poisson",
        seed: int | None = None,
        noise_on_grid: bool = False,
    ) -> "PrivacyPlan":
        """The plan of a federated training, in its own words: privacy for users, rounds of cohorts.

        Args:
            num_users: n >= 1, public.
            expected_cohort_size: K >= 1, the public divisor. Each user is in a round's cohort with probability
                sample_rate = K / n, independently of all else.
            rounds: T >= 1.
            max_update_norm: C, the bound on one user's whole update.
            delta: in (0, 1); at most 1 / num_users.
            target_epsilon, noise_multiplier: exactly one of the two.
            sampling, seed, noise_on_grid: as in PrivacyPlan.
        Returns:
            A plan with privacy_unit "user".
        Raises:
            PrivacyError: a number out of its range; both or neither of target_epsilon and noise_multiplier.
        Privacy:
            As for_budget, between data sets that differ by all the data of one user.
        """
        if (target_epsilon is None) == (noise_multiplier is None):
            got = "neither" if target_epsilon is None else "both"
            remedy = "give what the training may cost, or sigma"
            raise expected("for_users", "target_epsilon or noise_multiplier", "to be given", got, remedy)
        require_integer("for_users", "expected_cohort_size", expected_cohort_size, 1)
        require_integer("for_users", "num_users", num_users, 1)
        require_integer("for_users", "rounds", rounds, 1)
        if not (isinstance(noise_multiplier, int | float) and noise_multiplier == 0 and _is_infinite(max_update_norm)):
            require_positive("for_users", "max_update_norm", max_update_norm, "give the bound on a user's update")
        _require_part("for_users", "expected_cohort_size", expected_cohort_size, "num_users", num_users)
        numbers: dict[str, Any] = {
            "steps": rounds,
            "expected_batch_size": expected_cohort_size,
            "max_grad_norm": max_update_norm,
            "num_examples": num_users,
            "delta": delta,
            "sampling": sampling,
            "seed": seed,
            "noise_on_grid": noise_on_grid,
            "privacy_unit": "user",
        }
        if target_epsilon is not None:
            return cls.for_budget(target_epsilon=target_epsilon, **numbers)
        sample_rate = expected_cohort_size / num_users
        return cls(sample_rate=sample_rate, noise_multiplier=cast(float, noise_multiplier), **numbers)

    @property
    def divisor(self) -> int:
        """What clipped sums are divided by: the expected number of contributions, B / k."""
        return self.expected_batch_size // self.group_size

    @property
    def is_covered(self) -> bool:
        """Whether the accountant covers the way batches are drawn."""
        return self.sampling == "poisson"

    @property
    def release(self) -> Release:
        """What one step charges."""
        return Release(self.noise_multiplier, self.sample_rate, self.sampling)

    @property
    def public_facts(self) -> dict[str, Any]:
        """The numbers that a ledger of this plan is kept under. More steps may be added later; these stay."""
        return {
            "sampling": self.sampling,
            "sample_rate": self.sample_rate,
            "expected_batch_size": self.expected_batch_size,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "num_examples": self.num_examples,
            "group_size": self.group_size,
            "noise_on_grid": self.noise_on_grid,
            "neighboring_relation": self.neighboring_relation,
            "privacy_unit": self.privacy_unit,
        }

    def epsilon(self, *, delta: float | None = None, steps: int | None = None, accountant: Accountant = "pld") -> float:
        """Epsilon that `steps` of the plan's steps (default: all) will cost; as if Poisson when sampling is fixed.

        Raises:
            PrivacyError: neither the plan nor the call has a delta.
        """
        delta = self.delta if delta is None else delta
        if delta is None:
            raise expected("PrivacyPlan.epsilon", "delta", "to be given", None, "pass delta=1e-5, say")
        steps = self.steps if steps is None else steps
        release = Release(self.noise_multiplier, self.sample_rate, count=steps)
        return accounting.epsilon([release], delta=delta, accountant=accountant)

    def batches(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        start: int = 0,
        collate: Collate | None = None,
        processes: Processes = ALONE,
    ) -> Iterator[Batch]:
        """The batches of steps start to steps - 1, drawn as the plan says; see sampling.batches."""
        return batches(
            dataset,
            scheme=self.sampling,
            sample_rate=self.sample_rate,
            expected_batch_size=self.expected_batch_size,
            num_examples=self.num_examples,
            steps=self.steps,
            start=start,
            source=RandomSource(self.seed),
            collate=collate,
            processes=processes,
        )


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and value == math.inf


def _require_part(function: str, part: str, size: int, whole: str, count: int) -> None:
    """Raise PrivacyError, in the names that were typed, unless the part is at most the whole."""
    if size > count:
        raise expected(function, part, f"to be at most {whole} = {count}", size, "correct one of the two")
