"""PrivacyPlan: the public numbers of a training run, fixed before it starts.

Users, `experiments`, audits, `papers.toy_regression` and `integrations.opacus` make one plan per training.
PrivateGradient, `fit` and the bridges read it. The privacy guarantee rests on this file: noise, draws and charges
follow the plan. `plan_numbers` checks the numbers.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from torch.utils.data import Dataset

from privgrad import accounting
from privgrad.accounting import Accountant, Release, Selection
from privgrad.band_choice import Budgeted, calibrated
from privgrad.correlation import Banded
from privgrad.errors import expected, require_integer
from privgrad.plan_base import PlanBase
from privgrad.plan_numbers import (
    require_numbers,
    require_part,
    require_poisson,
    require_truncation,
    require_user_numbers,
    scaled_numbers,
    warn_of_cuts,
)
from privgrad.processes import ALONE, Processes
from privgrad.rng import RandomSource
from privgrad.sampling import BatchSampler, Collate, batches
from privgrad.types import Batch, PrivacyUnit, SamplingScheme


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(PlanBase):
    """All public numbers that decide the privacy of a training run, fixed before it starts.

    PrivateGradient, `fit` and the ledger read their numbers from the plan. The guarantee rests on these numbers and on
    the checks of `plan_numbers`.

    Args:
        sample_rate: q in (0, 1], the probability that an example is in a batch; 1.0 is the full batch.
        steps: T >= 1, the largest number of releases.
        expected_batch_size: B >= 1, the public divisor of the clipped sum: sample_rate * num_examples, rounded.
        noise_multiplier: sigma >= 0, noise standard deviation over sensitivity. 0 adds no noise and gives
            epsilon = inf.
        max_grad_norm: C >= 1e-10, the bound on one example's gradient. Infinite only with noise_multiplier 0.
        num_examples: n >= 1, the public size of the data set.
        delta: in (0, 1). None: pass it to each call of `epsilon` instead.
        target_epsilon: the epsilon that the noise was calibrated for, or None. A record only.
        sampling: "poisson"; "truncated" for Poisson samples of at most max_batch_size examples, padded to that size; or
            "fixed" for shuffled batches of one size. No accountant covers "fixed".
        max_batch_size: for "truncated" only: the number of rows of each batch, public. ceil(B + 6 sqrt(B)) costs next
            to nothing; less costs more noise.
        seed: None for the operating system's entropy. An integer makes the run reproducible and its noise
            predictable, which voids the privacy guarantee: for research only.
        group_size: k >= 1, a divisor of B. The mean gradient of each k examples is clipped as one gradient. For
            research on methods that do this ("microbatches"). With k > 1 the sensitivity is 2C and the divisor is
            B / k, so the noise in the averaged gradient is 2k times as large.
        noise_on_grid: add the noise on a public grid. Then the low-order bits of a release reveal nothing about the
            data (see noise.add_noise). On the CPU only; it adds at most 1/500 more noise. False adds the noise to
            the floating-point sum directly.
        privacy_unit: the unit whose presence is hidden: "example"; or "user", all examples of one person or device
            together (see federated). With "user", read "user" for every "example" above: n users, B the expected
            cohort size, T rounds, C the bound on one user's update.
        correlation: noise.Banded(bands) for noise that partly cancels over the steps, for batches that are a small
            part of the data; None for independent noise. Step t then draws from one of `bands` groups of people, at
            `bands` times the sample rate.
        simulates: the plan that this one simulates in smaller batches, or None. `scaled` sets it; do not set it by
            hand. With it, epsilon is infinite.
    Raises:
        PrivacyError: a number is out of its range, or sample_rate, expected_batch_size and num_examples contradict
            each other.
    Privacy:
        Holds public numbers only. Neighboring data sets differ by adding or removing one example or, with privacy
        unit "user", all examples of one user. The group size does not change this relation.
    """

    simulates: "PrivacyPlan | None" = None

    def __post_init__(self) -> None:
        """Check all numbers, alone and together, before any of them is used."""
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # ledgers and checkpoints cannot hold numpy scalars
                object.__setattr__(self, name, value.item())
        require_numbers(self)
        if self.correlation is not None:
            object.__setattr__(self, "correlation", self.correlation.for_steps(self.steps))

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
        max_batch_size: int | None = None,
        seed: int | None = None,
        group_size: int = 1,
        noise_on_grid: bool = False,
        privacy_unit: PrivacyUnit = "example",
        correlation: Banded | Literal["auto"] | None = None,
        besides: Iterable[Release | Selection] = (),
    ) -> "PrivacyPlan":
        """Return a plan whose steps together cost at most target_epsilon, by PLD accounting.

        Users and `experiments.spec` call it.

        Args:
            target_epsilon: > 0, the epsilon that all steps together may cost.
            delta: in (0, 1); above 1 / num_examples, the plan warns.
            max_grad_norm: as in PrivacyPlan.
            num_examples: as in PrivacyPlan.
            expected_batch_size: as in PrivacyPlan; at most num_examples.
            steps: as in PrivacyPlan.
            sampling: as in PrivacyPlan.
            max_batch_size: as in PrivacyPlan.
            seed: as in PrivacyPlan.
            group_size: as in PrivacyPlan.
            noise_on_grid: as in PrivacyPlan.
            privacy_unit: as in PrivacyPlan.
            correlation: as in PrivacyPlan; or "auto" for the number of bands with the smallest error of the prefix sums
                at this epsilon, or None if no number gains 1 %. `plan.correlation` says what it gains.
            besides: other releases from the same data that share target_epsilon, such as `Ledger.charged` of a mean
                that was released before.
        Returns:
            A plan with sample_rate = expected_batch_size / num_examples and the calibrated noise_multiplier.
        Raises:
            PrivacyError: a number is out of its range, or no noise multiplier meets the target.
        Privacy:
            Calibrated on the safe side: the epsilon of the returned noise multiplier has been checked. With
            sampling="fixed" the noise is calibrated as if batches were Poisson samples. The epsilon is then a label,
            not a guarantee.
        """
        require_integer("for_budget", "steps", steps, 1)
        require_integer("for_budget", "expected_batch_size", expected_batch_size, 1)
        require_integer("for_budget", "num_examples", num_examples, 1)
        require_part("for_budget", "expected_batch_size", expected_batch_size, "num_examples", num_examples)
        sample_rate = expected_batch_size / num_examples
        if correlation is not None:
            require_poisson("for_budget", sampling)
        truncation = None
        if sampling == "truncated":
            require_truncation("for_budget", max_batch_size, expected_batch_size, num_examples)
            truncation = (int(cast(int, max_batch_size)), num_examples)
            warn_of_cuts(expected_batch_size, *truncation)
        budget = Budgeted(target_epsilon, delta, sample_rate, steps, tuple(besides), truncation)
        correlation, noise_multiplier = calibrated(correlation, budget)
        return cls(
            sample_rate=sample_rate,
            steps=steps,
            expected_batch_size=expected_batch_size,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            num_examples=num_examples,
            delta=delta,
            target_epsilon=target_epsilon,
            sampling=sampling,
            max_batch_size=max_batch_size,
            seed=seed,
            group_size=group_size,
            noise_on_grid=noise_on_grid,
            privacy_unit=privacy_unit,
            correlation=correlation,
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
        correlation: Banded | None = None,
        besides: Iterable[Release | Selection] = (),
    ) -> "PrivacyPlan":
        """Return the plan of a federated training, in the terms of federated learning: users, cohorts and rounds.

        Users call it; its plans are for perturb=LocalUpdate(...) and for `integrations.flower`.

        Args:
            num_users: n >= 1, public.
            expected_cohort_size: K >= 1, the public divisor. Each user is in a round's cohort with probability
                sample_rate = K / n, independently of all else.
            rounds: T >= 1, the number of releases.
            max_update_norm: C, the bound on one user's whole update.
            delta: in (0, 1); at most 1 / num_users, better a tenth of it, as docs/federated.md explains.
            target_epsilon: the epsilon that all rounds together may cost. Give this or noise_multiplier, not both.
            noise_multiplier: sigma, as in PrivacyPlan.
            sampling: as in PrivacyPlan.
            seed: as in PrivacyPlan.
            noise_on_grid: as in PrivacyPlan.
            correlation: as in PrivacyPlan.
            besides: as in for_budget, about the same users; with target_epsilon only.
        Returns:
            A plan with privacy_unit "user".
        Raises:
            PrivacyError: a number is out of its range, or target_epsilon and noise_multiplier are both given or both
                missing.
        Privacy:
            As for_budget, for data sets that differ by all the data of one user.
        """
        require_user_numbers(num_users, expected_cohort_size, rounds, max_update_norm, target_epsilon, noise_multiplier)
        numbers: dict[str, Any] = {
            "steps": rounds,
            "expected_batch_size": expected_cohort_size,
            "max_grad_norm": max_update_norm,
            "num_examples": num_users,
            "delta": delta,
            "sampling": sampling,
            "seed": seed,
            "noise_on_grid": noise_on_grid,
            "correlation": correlation,
            "privacy_unit": "user",
        }
        if sampling == "truncated":
            remedy = 'give PrivacyPlan.for_budget(privacy_unit="user", max_batch_size=...) if each row is a person'
            raise expected("for_users", "sampling", "to be 'poisson' or 'fixed'", repr(sampling), remedy)
        if target_epsilon is not None:
            return cls.for_budget(target_epsilon=target_epsilon, besides=besides, **numbers)
        sample_rate = expected_cohort_size / num_users
        return cls(sample_rate=sample_rate, noise_multiplier=cast(float, noise_multiplier), **numbers)

    def scaled(self, factor: float, *, num_examples: int | None = None) -> "PrivacyPlan":
        """Return a plan that simulates this one in smaller batches. It is NOT private: its epsilon is infinite.

        Its expected batch size, sample rate and noise multiplier are those of this plan times `factor`. The mean
        gradient then has the same noise (`noise_std`). A step takes as little as `factor` of the time, if the batch
        decides its time. The mean itself varies more, because it is taken over fewer examples. For tuning on public
        data, and for research. Users and `experiments.spec` call it.

        Args:
            factor: in (0, 1], such as 1 / 16. The scaled batch size must be a whole number that group_size divides.
                1 returns this plan, unless num_examples is another number.
            num_examples: the number of examples to train on, if the public data are smaller; None for this plan's. The
                sample rate follows from it.
        Returns:
            A plan with `simulates` set to this plan, and without target_epsilon.
        Raises:
            PrivacyError: factor or num_examples does not fit, or this plan simulates another one.
        Privacy:
            NOT private. Each release of the returned plan is charged as a release without noise.
        Reference:
            Sander, Stock, Sablayrolles 2023 (arXiv 2210.03403), which tune at a constant sigma / B.
        """
        count = self.num_examples if num_examples is None else num_examples
        numbers = scaled_numbers(self, factor, count)
        return self if factor == 1 and count == self.num_examples else replace(self, **numbers)

    def epsilon(self, *, delta: float | None = None, steps: int | None = None, accountant: Accountant = "pld") -> float:
        """Compute the epsilon that a number of the plan's steps costs.

        Users and `PrivateGradient.epsilon` call it.

        Args:
            delta: in (0, 1). None: the plan's.
            steps: >= 0. None: all steps of the plan.
            accountant: as in accounting.epsilon.
        Returns:
            Epsilon >= 0; infinite if the plan simulates another one.
        Raises:
            PrivacyError: neither the plan nor the call has a delta, or a number is out of its range.
        Privacy:
            An upper bound for Poisson sampling. With sampling "fixed" the number is computed as if batches were
            Poisson samples: a label, not a guarantee.
        """
        delta, steps = self.delta if delta is None else delta, self.steps if steps is None else steps
        if delta is None:
            raise expected("PrivacyPlan.epsilon", "delta", "to be given", None, "pass delta, such as delta=1e-5")
        release = self.release_of(steps)
        if not self.is_covered:
            release = replace(release, scheme="poisson")
        return accounting.epsilon([release], delta=delta, accountant=accountant)

    def batches(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        start: int = 0,
        collate: Collate | None = None,
        processes: Processes = ALONE,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> Generator[Batch]:
        """Return an iterator over the batches of steps start to steps - 1, drawn as the plan specifies.

        Users, `fit`, the bridges, `audit.methods` and papers call it.

        Args:
            dataset: as in sampling.BatchSampler.
            start: first step, for a resumed run.
            collate: as in sampling.BatchSampler.
            processes: as in sampling.BatchSampler.
            num_workers: as in sampling.batches. The workers live until the last step.
            prefetch_factor: as in sampling.batches.
            pin_memory: as in sampling.batches.
        Raises:
            PrivacyError: an option of loading is out of range.
            SamplingError: see sampling.batches and sampling.BatchSampler.
        Privacy:
            Uses the sample rate that the ledger charges; see sampling.BatchSampler.
        """
        sampler = self.sampler(dataset, start=start, collate=collate, processes=processes)
        return batches(sampler, num_workers=num_workers, prefetch_factor=prefetch_factor, pin_memory=pin_memory)

    def sampler(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        start: int = 0,
        collate: Collate | None = None,
        processes: Processes = ALONE,
    ) -> BatchSampler:
        """Return a sampler of the plan's draws, for a DataLoader of your own.

        For users: `DataLoader(sampler.dataset, sampler=sampler, batch_size=None, ...)` yields what `batches` yields.

        Args, Raises, Privacy: as `batches`, without the options of loading.
        """
        return BatchSampler(
            dataset,
            scheme=self.sampling,
            sample_rate=self.group_rate,
            expected_batch_size=self.expected_batch_size,
            num_examples=self.num_examples,
            steps=self.steps,
            start=start,
            source=RandomSource(self.seed),
            collate=collate,
            processes=processes,
            privacy_unit=self.privacy_unit,
            bands=self.bands,
            max_batch_size=self.max_batch_size,
        )
