"""PrivacyPlan: the public numbers of a training run, fixed before it starts.

One step draws each example with probability q, clips each gradient to norm C, adds noise of standard deviation sigma C
to the sum, and divides by B. T such steps cost `PrivacyPlan.epsilon`. The sampler, the noise and the ledger all read
these numbers from one plan, so that what is charged is what was drawn.
"""

import math
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Accountant, calibrate, calibrate_to_attack, rounded_up
from privgrad.accounting.calibration import one_of, steps_of
from privgrad.accounting.mechanisms import (
    Release,
    most_participations,
    rate_in_group,
    require_whole_epochs,
    whole_epochs,
)
from privgrad.errors import (
    described,
    expected,
    require_choice,
    require_delta,
    require_in,
    require_integer,
    require_max_grad_norm,
    require_nonnegative,
    require_positive,
    require_rate,
)
from privgrad.noise.banded import Banded
from privgrad.noise.gaussian import std_of_noise
from privgrad.processes import ALONE, Processes
from privgrad.rng import RandomSource
from privgrad.sampling.draws import BatchSampler
from privgrad.sampling.loading import Collate, Data, batches, refuse_habits
from privgrad.types import SHUFFLED, Batch, PrivacyUnit, SamplingScheme, User

_SCALED = ("expected_batch_size", "sample_rate", "noise_multiplier")  # recorded of the plan that a training simulates
_CANDIDATES = (2, 4, 8, 16, 32, 64)  # numbers of bands that "auto" tries
_WORTH = 0.99  # largest relative error for which "auto" takes noise with memory


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """All public numbers that decide the privacy of a training run, fixed before it starts.

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
        sampling: "poisson"; "truncated" for Poisson samples of at most max_batch_size examples, padded to that size;
            or "epochs" for epochs of t steps, where each example is in `participations` of them, drawn for it alone.
        max_batch_size: for "truncated" only: the number of rows of each batch, public. ceil(B + 6 sqrt(B)) costs next
            to nothing; less costs more noise.
        participations: for "epochs" only: k >= 1, the number of steps of an epoch that each example is in. An epoch has
            t = k / sample_rate steps, and the plan a whole number of epochs.
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
        user: what a user is, in the words of the statement: "person", "device" or "site", such as a hospital.
        simulates: the plan that this one simulates in smaller batches, or None. `scaled` sets it; do not set it by
            hand. With it, epsilon is infinite.
    Raises:
        PrivacyError: a number is out of its range, or sample_rate, expected_batch_size and num_examples contradict
            each other.
    Privacy:
        Holds public numbers only. Neighboring data sets differ by adding or removing one example or, with privacy
        unit "user", all examples of one user. The group size does not change this relation.
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
    max_batch_size: int | None = None
    participations: int = 1
    seed: int | None = None
    group_size: int = 1
    noise_on_grid: bool = False
    privacy_unit: PrivacyUnit = "example"
    correlation: Banded | None = None
    user: User = "person"
    simulates: "PrivacyPlan | None" = None

    neighboring_relation: ClassVar[str] = "add or remove one"

    def __post_init__(self) -> None:
        """Check all numbers, alone and together, and warn of a delta that allows to publish a whole record."""
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # ledgers and checkpoints cannot hold numpy scalars
                object.__setattr__(self, name, value.item())
        function = "PrivacyPlan"
        require_rate(function, self.sample_rate)
        require_integer(function, "steps", self.steps, 1)
        require_integer(function, "expected_batch_size", self.expected_batch_size, 1)
        require_integer(function, "num_examples", self.num_examples, 1)
        require_nonnegative(function, "noise_multiplier", self.noise_multiplier, "give sigma, or use for_budget")
        if not (self.noise_multiplier == 0 and self.max_grad_norm == math.inf):
            require_max_grad_norm(function, self.max_grad_norm, self.noise_multiplier)
        require_integer(function, "group_size", self.group_size, 1)
        mean = self.sample_rate * self.num_examples
        # Privacy does not need it: q is drawn and charged, and B only divides. It finds a typo.
        if size_of(self.expected_batch_size, mean, self.group_size) != self.expected_batch_size:
            condition = f"to be sample_rate * num_examples = {mean:g}"
            raise expected(function, "expected_batch_size", condition, self.expected_batch_size)
        if self.expected_batch_size % self.group_size:
            condition = f"to divide expected_batch_size = {self.expected_batch_size}"
            raise expected(function, "group_size", condition, self.group_size)
        if self.noise_on_grid not in (True, False):  # the text "no" would mean yes
            raise expected(function, "noise_on_grid", "to be True or False", described(self.noise_on_grid))
        if self.noise_on_grid and self.noise_multiplier == 0:
            raise expected(function, "noise_on_grid", "to be False if noise_multiplier is 0", True)
        require_choice(function, "privacy_unit", self.privacy_unit, get_args(PrivacyUnit))
        require_choice(function, "user", self.user, get_args(User) if self.privacy_unit == "user" else ("person",))
        _require_scheme(function, self.sampling)
        # All examples of a user are clipped as one anyway.
        self._require_epochs()
        if self.group_size > 1 and (self.privacy_unit == "user" or self.sampling == "truncated"):
            condition = "to be 1 for privacy_unit 'user' and for truncated batches"
            raise expected(function, "group_size", condition, self.group_size)
        if self.sampling == "truncated":
            _require_truncation(function, self.max_batch_size, self.expected_batch_size, self.num_examples)
        elif self.max_batch_size is not None:
            raise expected(function, "max_batch_size", 'to be None unless sampling is "truncated"', self.max_batch_size)
        if self.correlation is not None:
            _require_poisson(function, self.sampling)
            _require_bands(function, self.correlation.bands, self.steps, self.num_examples / self.expected_batch_size)
            object.__setattr__(self, "correlation", self.correlation.for_steps(self.steps))
        if self.seed is not None:
            require_integer(function, "seed", self.seed, -math.inf)
        if self.target_epsilon is not None:
            require_positive(function, "target_epsilon", self.target_epsilon, "give the calibrated epsilon, or None")
        if self.delta is not None:
            require_delta(function, self.delta)
            if self.delta > 1 / self.num_examples and self.simulates is None:
                count, whole = ("num_users", "user") if self.privacy_unit == "user" else ("num_examples", "record")
                warnings.warn(
                    f"delta = {rounded_up(self.delta)} is above 1 / {count} = {1 / self.num_examples:.3g}: such a "
                    f"delta allows a mechanism that publishes one whole {whole}; lower delta",
                    stacklevel=3,
                )
        if self.simulates is not None:
            _require_scaled(self, self.simulates)

    def _require_epochs(self) -> None:
        """Raise PrivacyError unless the plan has whole epochs, or no number of participations."""
        function, chosen = "PrivacyPlan", self.participations
        require_integer(function, "participations", chosen, 1)
        if self.sampling != "epochs":
            if chosen != 1:
                raise expected(function, "participations", 'to be 1 unless sampling is "epochs"', chosen)
            return
        steps = self.epoch_steps
        if not math.isclose(self.sample_rate, chosen / steps, rel_tol=1e-12):
            remedy = f"give {chosen / steps!r}, for epochs of {steps} steps, or use for_budget"
            condition = f"to be {chosen} / t for a whole number of steps t"
            raise expected(function, "sample_rate", condition, self.sample_rate, remedy)
        require_whole_epochs(function, self.steps, steps)

    @classmethod
    def for_budget(
        cls,
        *,
        delta: float,
        max_grad_norm: float,
        num_examples: int,
        target_epsilon: float | None = None,
        target_success: float | None = None,
        false_positive_rate: float | None = None,
        target_advantage: float | None = None,
        expected_batch_size: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        epochs: float | None = None,
        sampling: SamplingScheme = "poisson",
        max_batch_size: int | None = None,
        participations: int = 1,
        seed: int | None = None,
        group_size: int = 1,
        noise_on_grid: bool = False,
        privacy_unit: PrivacyUnit = "example",
        correlation: Banded | Literal["auto"] | None = None,
    ) -> "PrivacyPlan":
        """Return a plan whose steps together cost at most target_epsilon, by PLD accounting.

        Or give what an attacker may find out in its place: `target_success=0.05, false_positive_rate=0.01` says that an
        attacker who takes 1 % of the absent examples for present ones finds at most 5 % of the present ones.

        The arguments are as in PrivacyPlan, except:

        - `target_epsilon`: > 0, the epsilon that all steps together may cost;
        - `target_success` with `false_positive_rate`, or `target_advantage`, in the place of target_epsilon: the most
          that `accounting.attack_success` or `accounting.attack_advantage` may be. Epsilon follows from the noise;
        - `delta`: in (0, 1); above 1 / num_examples, the plan warns;
        - `expected_batch_size`, or `batch_size` by another name: at most num_examples;
        - `steps`; or `epochs`, > 0, for ceil(epochs * participations / sample_rate) steps;
        - `correlation`: also "auto" for the number of bands with the smallest error of the prefix sums at this epsilon,
          or None if no number gains 1 %. `plan.correlation` says what it gains.

        Returns:
            A plan with sample_rate = expected_batch_size / num_examples, or for "epochs" the nearest k / t of whole
            steps t, whose mean is then the expected_batch_size; and the calibrated noise_multiplier, which is at least
            0.01: a target that allows less noise is not used up.
        Raises:
            PrivacyError: a number is out of its range, or no noise multiplier meets the target.
        Privacy:
            Calibrated on the safe side: the epsilon of the returned noise multiplier has been checked.
        """
        function = "for_budget"
        of_attack = {"target_success": target_success, "target_advantage": target_advantage}
        one_of(function, target_epsilon=target_epsilon, **of_attack)
        if target_epsilon is not None and false_positive_rate is not None:
            raise expected(function, "false_positive_rate", "to be None with target_epsilon", false_positive_rate)
        require_delta(function, delta)
        expected_batch_size = one_of(function, expected_batch_size=expected_batch_size, batch_size=batch_size)
        name = "expected_batch_size" if batch_size is None else "batch_size"
        require_integer(function, name, expected_batch_size, 1)
        require_integer(function, "num_examples", num_examples, 1)
        _require_part(function, name, expected_batch_size, "num_examples", num_examples)
        _require_scheme(function, sampling)
        require_integer(function, "participations", participations, 1)
        sample_rate = sample_rate_of(expected_batch_size, num_examples, sampling, participations)
        expected_batch_size = size_of(expected_batch_size, sample_rate * num_examples, group_size)
        steps = steps_of(function, steps, epochs, sample_rate / participations)
        require_integer(function, "steps", steps, 1)
        epoch_steps = round(participations / sample_rate) if sampling == "epochs" else None
        if epoch_steps is not None:  # before the search, which takes minutes
            require_whole_epochs(function, steps, epoch_steps)
        if correlation is not None:
            _require_poisson(function, sampling)
        largest = None
        if sampling == "truncated":
            largest = _require_truncation(function, max_batch_size, expected_batch_size, num_examples)
            # Truncation at B + 4 sqrt(B) costs 2 % of noise, as measured.
            if largest < min(num_examples, expected_batch_size + 4 * math.sqrt(expected_batch_size)):
                warnings.warn(
                    f"max_batch_size = {largest} cuts many batches of {expected_batch_size} expected examples, and the "
                    f"noise is the larger for it; {_usual_most(expected_batch_size, num_examples)} costs next to "
                    "nothing",
                    stacklevel=2,
                )

        def sigma_for(bands: int) -> float:
            """Return sigma for a number of bands: ceil(T / b) draws of each person at the rate b q."""
            own = Release(0.0, rate_in_group(sample_rate, bands), count=most_participations(steps, bands))
            if largest is not None:
                own = replace(own, scheme="truncated", max_batch_size=largest, num_examples=num_examples)
            if epoch_steps is not None:
                own = replace(own, scheme="epochs", epoch_steps=epoch_steps)

            def releases_at(sigma: float) -> list[Release]:
                return [replace(own, noise_multiplier=sigma)]

            if target_epsilon is None:
                return calibrate_to_attack(releases_at, false_positive_rate=false_positive_rate, **of_attack)
            return calibrate(releases_at, target_epsilon=target_epsilon, delta=delta)

        correlation, noise_multiplier = _calibrated(correlation, sigma_for, sample_rate, steps)
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
            participations=participations,
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
        user: User = "person",
    ) -> "PrivacyPlan":
        """Return the plan of a federated training, in the terms of federated learning: users, cohorts and rounds.

        It is for perturb=LocalUpdate(...) and `integrations.flower`. The arguments are as in PrivacyPlan, except:

        - `num_users`: n >= 1, public;
        - `expected_cohort_size`: K >= 1, the public divisor. Each user is in a round's cohort with probability
          sample_rate = K / n, independently of all else;
        - `rounds`: T >= 1, the number of releases;
        - `max_update_norm`: C, the bound on one user's whole update;
        - `delta`: in (0, 1); at most 1 / num_users, better a tenth of it, as docs/federated.md explains;
        - `target_epsilon`: the epsilon that all rounds together may cost. Give this or noise_multiplier, not both;
        - `user`: "person", "device" or "site", such as a hospital: what the statement says is protected.

        Returns:
            A plan with privacy_unit "user".
        Raises:
            PrivacyError: a number is out of its range, or target_epsilon and noise_multiplier are both given or both
                missing.
        Privacy:
            As for_budget, for data sets that differ by all the data of one user.
        """
        # The plan checks these numbers again, and max_update_norm, under its own names.
        function = "for_users"
        one_of(function, target_epsilon=target_epsilon, noise_multiplier=noise_multiplier)
        require_integer(function, "expected_cohort_size", expected_cohort_size, 1)
        require_integer(function, "num_users", num_users, 1)
        require_integer(function, "rounds", rounds, 1)
        _require_part(function, "expected_cohort_size", expected_cohort_size, "num_users", num_users)
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
        if target_epsilon is not None:
            return replace(cls.for_budget(target_epsilon=target_epsilon, **numbers), user=user)
        assert noise_multiplier is not None
        sample_rate = sample_rate_of(expected_cohort_size, num_users, sampling)
        numbers["expected_batch_size"] = size_of(expected_cohort_size, sample_rate * num_users)
        return cls(sample_rate=sample_rate, noise_multiplier=noise_multiplier, user=user, **numbers)

    def scaled(self, factor: float, *, num_examples: int | None = None) -> "PrivacyPlan":
        """Return a plan that simulates this one in smaller batches. It is NOT private: its epsilon is infinite.

        Its expected batch size, sample rate and noise multiplier are those of this plan times `factor`. The mean
        gradient then has the same noise (`noise_std`). A step takes as little as `factor` of the time, if the batch
        decides its time. The mean itself varies more, because it is taken over fewer examples. For tuning on public
        data, and for research.

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
        function, size, groups = "PrivacyPlan.scaled", self.expected_batch_size, self.group_size
        if self.simulates is not None:
            got = f"batches of {size} that simulate batches of {self.simulates.expected_batch_size}"
            raise expected(function, "the plan", "to simulate no plan", got, "call plan.simulates.scaled(factor)")
        require_in(function, "factor", factor, "(0, 1]", "give a share, such as 1 / 16")
        share = float(factor)
        left = round(size * share)
        name = "expected_batch_size * factor"
        if left < 1 or left % groups or not math.isclose(left, size * share, rel_tol=1e-9):
            condition = "to be a whole number >= 1" + (f" that group_size = {groups} divides" if groups > 1 else "")
            got = f"{size} * {share:.6g} = {size * share:.6g}"
            raise expected(function, name, condition, got)
        require_integer(function, "num_examples", count, 1)
        _require_part(function, name, left, "num_examples", count)
        is_same = factor == 1 and count == self.num_examples
        return self if is_same else replace(self, **_numbers_at(self, left, count))

    def epsilon(
        self,
        *,
        delta: float | None = None,
        steps: int | None = None,
        accountant: Accountant = "pld",
        rows_per_person: int = 1,
    ) -> float:
        """Compute the epsilon that a number of the plan's steps costs.

        Args:
            delta: in (0, 1). None: the plan's.
            steps: >= 0. None: all steps of the plan.
            accountant: as in accounting.epsilon.
            rows_per_person: as in accounting.epsilon.
        Returns:
            Epsilon >= 0; infinite if the plan simulates another one.
        Raises:
            PrivacyError: neither the plan nor the call has a delta, or a number is out of its range.
        Privacy:
            An upper bound for the plan's sampling.
        """
        delta = self.delta if delta is None else delta
        if delta is None:
            raise expected("PrivacyPlan.epsilon", "delta", "to be given", None, "pass delta, such as delta=1e-5")
        release = self.release_of(self.steps if steps is None else steps)
        options: dict[str, Any] = {"accountant": accountant, "rows_per_person": rows_per_person}
        return accounting.epsilon([release], delta=delta, **options)

    def attack_success(self, *, false_positive_rate: float) -> float:
        """Bound the success of every attack on all steps, as `accounting.attack_success`, whose arguments it takes."""
        return accounting.attack_success([self.release_of(self.steps)], false_positive_rate=false_positive_rate)

    def batches(
        self,
        dataset: Data,
        *,
        start: int = 0,
        collate: Collate | None = None,
        processes: Processes = ALONE,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        collate_fn: Collate | None = None,
        epoch_key: Path | None = None,
        rows: range | None = None,
        **habits: Any,
    ) -> Generator[Batch]:
        """Return an iterator over the batches of steps start to steps - 1, drawn as the plan specifies.

        The arguments are as in sampling.BatchSampler, except those of loading (`num_workers`, `prefetch_factor` and
        `pin_memory`), which are as in sampling.batches. Workers live until the last step. `collate_fn` is another name
        of `collate`. Other arguments of a DataLoader, such as `shuffle`, are refused with what to do instead.

        Raises:
            PrivacyError, SamplingError: see sampling.batches and sampling.BatchSampler.
        Privacy:
            Uses the sample rate that the ledger charges; see sampling.BatchSampler.
        """
        refuse_habits(habits)
        if collate_fn is not None:
            collate = one_of("plan.batches", collate=collate, collate_fn=collate_fn)
        own: dict[str, Any] = {"processes": processes, "epoch_key": epoch_key, "rows": rows}
        sampler = self.sampler(dataset, start=start, collate=collate, **own)
        return batches(sampler, num_workers=num_workers, prefetch_factor=prefetch_factor, pin_memory=pin_memory)

    def sampler(
        self,
        dataset: Data,
        *,
        start: int = 0,
        collate: Collate | None = None,
        processes: Processes = ALONE,
        epoch_key: Path | None = None,
        rows: range | None = None,
    ) -> BatchSampler:
        """Return a sampler of the plan's draws, for a DataLoader of your own.

        For users: `DataLoader(sampler.dataset, sampler=sampler, batch_size=None, ...)` yields what `batches` yields.

        Args, Raises, Privacy: as `batches`, without the options of loading.
        """
        return BatchSampler(
            dataset,
            scheme=self.sampling,
            sample_rate=self.group_rate,  # the rate that `release` charges
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
            epoch_steps=self.release.epoch_steps,
            epoch_key=epoch_key,
            rows=rows,
        )

    @property
    def divisor(self) -> int:
        """The public divisor of a clipped sum: the expected number of contributions, B / k."""
        return self.expected_batch_size // self.group_size

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise in one coordinate of the released mean gradient: sigma C / B.

        With group_size k > 1 it is sigma 2C / (B / k). It equals `noise_std` of the released gradients, except that
        `noise_on_grid` adds at most 1/500 to these. With a correlation it is that of the last step, and earlier ones
        have less.
        """
        # With groups, one example may reverse the mean gradient of its group: the accumulator states 2C, too.
        sensitivity = self.max_grad_norm if self.group_size == 1 else 2 * self.max_grad_norm
        independent = std_of_noise(self.noise_multiplier, sensitivity, self.divisor)
        return independent if self.correlation is None else independent * self.correlation.std(self.steps - 1)

    @property
    def noise_gain(self) -> float:
        """The noise of a long sum over that of independent noise with `noise_std`; 1 without correlation."""
        return 1.0 if self.correlation is None else self.correlation.sum_std / self.correlation.std(self.steps - 1)

    @property
    def bands(self) -> int:
        """The number of groups of people that take turns; 1 without correlation."""
        return 1 if self.correlation is None else self.correlation.bands

    @property
    def group_rate(self) -> float:
        """The probability that a person of the group of a step is in its batch: bands times the sample rate.

        The sampler draws by this number, and the ledger charges it.
        """
        return rate_in_group(self.sample_rate, self.bands)

    def usual_batch_size(self, processes: int = 1) -> int:
        """Return a number of examples that few batches exceed: B plus three standard deviations.

        Batches are split by this number, because the size of the drawn batch is private.

        Args:
            processes: the number of processes that share each batch; the result is for one of them.
        """
        if self.max_batch_size is not None:
            return self.max_batch_size
        expected = self.expected_batch_size / processes
        return math.ceil(expected + 3 * math.sqrt(expected * (1 - self.sample_rate)))

    @property
    def epoch_steps(self) -> int:
        """The number of steps that draw each example `participations` times on average, or exactly with "epochs".

        A plan that simulates another has its number.
        """
        plan = self if self.simulates is None else self.simulates
        return max(1, round(plan.participations / plan.sample_rate))

    @property
    def release(self) -> Release:
        """The release that one step charges to the ledger; one without noise if the plan simulates another."""
        charged = self.noise_multiplier if self.simulates is None else 0.0  # then every epsilon is infinite
        examples = None if self.max_batch_size is None else self.num_examples
        epoch = self.epoch_steps if self.sampling == "epochs" else None
        return Release(charged, self.group_rate, self.sampling, 1, self.max_batch_size, examples, epoch)

    def release_of(self, steps: int) -> Release:
        """Return the releases in which one person may take part in so many steps, or in the epochs that they begin."""
        epoch = self.release.epoch_steps
        count = most_participations(steps, self.bands) if epoch is None else whole_epochs(steps, epoch)
        return replace(self.release, count=count)

    @property
    def public_facts(self) -> dict[str, Any]:
        """The numbers that `Ledger.bind` records. The number of steps is absent, because it may grow later.

        If the plan simulates another, noise_multiplier is 0, so that every epsilon of the ledger is infinite, and
        `simulates` has the numbers of the simulated plan.
        """
        simulated, memory = self.simulates, None
        if self.correlation is not None:
            memory = {"bands": self.correlation.bands, "coefficients": list(self.correlation.chosen)}
        return {
            "sampling": self.sampling,
            "sample_rate": self.group_rate,
            "expected_batch_size": self.expected_batch_size,
            "max_batch_size": self.max_batch_size,
            "epoch_steps": self.release.epoch_steps,
            "noise_multiplier": self.release.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "num_examples": self.num_examples,
            "delta": self.delta,
            "group_size": self.group_size,
            "noise_on_grid": self.noise_on_grid,
            "neighboring_relation": self.neighboring_relation,
            "privacy_unit": self.privacy_unit,
            "noise_memory": memory,
            "simulates": None if simulated is None else {name: getattr(simulated, name) for name in _SCALED},
            **({} if self.user == "person" else {"user": self.user}),
        }


def sample_rate_of(batch_size: float, num_examples: int, sampling: SamplingScheme, participations: int = 1) -> float:
    """Return the sample rate q of a batch size; for "epochs", the nearest one of which an epoch has whole steps."""
    rate = batch_size / num_examples
    return participations / max(participations, round(participations / rate)) if sampling == "epochs" else rate


def _require_scheme(function: str, sampling: str) -> None:
    """Raise PrivacyError unless batches are drawn as an accountant covers."""
    if sampling in (SHUFFLED, "shuffled", "shuffle"):
        remedy = 'give sampling="epochs": each example is in one step of each epoch, and batches vary in size'
        raise expected(function, "sampling", "to have an accountant", repr(sampling), remedy)
    require_choice(function, "sampling", sampling, get_args(SamplingScheme))


def size_of(size: int, mean: float, group_size: int = 1) -> int:
    """Return an expected batch size that is near the mean of those that are drawn; else this mean, in whole groups."""
    return size if abs(mean - size) <= max(1, group_size / 2) else group_size * max(1, round(mean / group_size))


def _require_poisson(function: str, sampling: object) -> None:
    """Raise PrivacyError unless batches are drawn as noise with memory needs."""
    if sampling != "poisson":
        remedy = "draw Poisson batches, or leave correlation out"
        raise expected(function, "sampling", "to be 'poisson' for noise with memory", repr(sampling), remedy)


def _require_bands(function: str, bands: int, steps: int, batches_in_data: float) -> None:
    """Raise PrivacyError unless so many groups of people can take turns, each large enough to fill a batch."""
    most = min(steps, math.floor(batches_in_data))
    if bands > most:
        condition = f"to be at most {most} (steps, and num_examples / expected_batch_size)"
        raise expected(function, "bands", condition, bands, "" if most > 1 else "leave correlation out")


def _require_truncation(function: str, max_batch_size: object, expected_batch_size: int, num_examples: int) -> int:
    """Return a largest batch size as an integer; raise PrivacyError unless it suits the expected one."""
    size = 0 if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, Integral) else int(max_batch_size)
    if not expected_batch_size <= size <= num_examples:
        condition = f"from expected_batch_size to num_examples ({expected_batch_size} to {num_examples})"
        remedy = f"give max_batch_size={_usual_most(expected_batch_size, num_examples)}, say"
        raise expected(function, "max_batch_size", condition, described(max_batch_size), remedy)
    return size


def _usual_most(expected_batch_size: int, num_examples: int) -> int:
    """Return a largest batch size that truncates almost no batch: B plus six standard deviations, at most n."""
    return min(num_examples, math.ceil(expected_batch_size + 6 * math.sqrt(expected_batch_size)))


def _require_part(function: str, part: str, size: int, whole: str, count: int) -> None:
    """Raise PrivacyError unless the part is at most the whole."""
    if size > count:
        raise expected(function, part, f"to be at most {whole} = {count}", size)


def _numbers_at(plan: PrivacyPlan, batch_size: int, num_examples: int) -> dict[str, Any]:
    """Return the fields of the plan with this batch size that simulates `plan` on a number of examples."""
    share = batch_size / plan.expected_batch_size
    same = num_examples == plan.num_examples
    largest = plan.max_batch_size
    return {
        "expected_batch_size": batch_size,
        "num_examples": num_examples,
        "sample_rate": plan.sample_rate * share if same else batch_size / num_examples,
        "noise_multiplier": plan.noise_multiplier * share,  # sigma C / B stays
        "max_batch_size": None if largest is None else min(num_examples, math.ceil(largest * share)),
        "target_epsilon": None,
        "sampling": "poisson" if plan.sampling == "epochs" else plan.sampling,
        "participations": 1,
        "simulates": plan,
    }


def _require_scaled(plan: PrivacyPlan, simulated: object) -> None:
    """Raise PrivacyError unless `simulated` is a plan, and `plan` has the numbers that `scaled` gives."""
    if not isinstance(simulated, type(plan)) or simulated.simulates is not None:
        raise expected("PrivacyPlan", "simulates", "to be a plan that simulates no plan", described(simulated))
    batch_size = min(plan.expected_batch_size, simulated.expected_batch_size)
    follows = vars(simulated) | _numbers_at(simulated, batch_size, plan.num_examples)
    for name, value in follows.items():
        if vars(plan)[name] != value:
            remedy = "change the simulated plan and scale it again: replace(plan.simulates, ...).scaled(factor)"
            raise expected("PrivacyPlan", name, f"to be {value}, as of the simulated plan", vars(plan)[name], remedy)


def _calibrated(
    correlation: Banded | Literal["auto"] | None, sigma_for: Callable[[int], float], sample_rate: float, steps: int
) -> tuple[Banded | None, float]:
    """Return the correlation with its coefficients and its `relative_error`, and sigma; errors as for_budget."""
    smallest, correlations = math.inf, list[Banded]()
    if isinstance(correlation, Banded):
        _require_bands("for_budget", correlation.bands, steps, 1 / sample_rate)
        correlations = [correlation]
    elif correlation is not None:
        require_choice("for_budget", "correlation", correlation, ["auto"])
        smallest = _WORTH
        correlations = [Banded(bands) for bands in _CANDIDATES if bands * sample_rate <= 1 and bands <= steps]
    independent = sigma_for(1)
    best: tuple[Banded | None, float] = None, independent
    usual = independent * math.sqrt((steps + 1) / 2)
    for each in correlations:
        chosen, sigma = each.for_steps(steps), sigma_for(each.bands)
        error = sigma * chosen.prefix_error(steps) / usual
        if error < smallest:
            best, smallest = (replace(chosen, relative_error=error), sigma), error
    return best
