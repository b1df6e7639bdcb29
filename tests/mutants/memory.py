"""Faults of noise with memory (its recursion, its groups, and its price), and of truncated batches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import privgrad as pg
from mutants.mutant import Mutant, Patch, everywhere
from privgrad import plan as plan_base
from privgrad.accounting import mechanisms
from privgrad.accounting.mechanisms import Participations
from privgrad.clip.clipping import ClippingAccumulator
from privgrad.noise import banded as correlation
from privgrad.noise import gaussian as noise
from privgrad.noise.banded import Recursion
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling import draws as sampling
from privgrad.sampling.loading import Examples

COVARIANCE = "test_noise_memory.test_the_covariance_is_that_of_the_factor"
GROUPS = "test_noise_memory.test_a_person_is_drawn_from_one_group_by_poisson"
PRICE = "test_banded.test_a_person_pays_for_the_steps_of_one_group"


def z_reused(patch: Patch) -> None:
    """Each two steps have one z."""
    real = noise._release_on_cpu

    def wrong(values: Any, add: Any, stream: Any, step: int, *rest: Any) -> None:
        real(values, add, stream, step // 2 * 2, *rest)

    patch.setattr(noise, "_release_on_cpu", wrong)


def one_draw_for_a_group(patch: Patch) -> None:
    """On other devices, parameters that are drawn at once get the same numbers."""
    real = noise._add_on_device

    def wrong(values: Any, noises: Any, **numbers: Any) -> None:
        first = noises[0].flatten()
        real(values, [n if n.numel() > first.numel() else first[: n.numel()].view(n.shape) for n in noises], **numbers)

    everywhere(patch, real, wrong)


def past_forgotten(patch: Patch) -> None:
    patch.setattr(Recursion, "moved", lambda *_: None)


def sensitivity_of_longer_coefficients(patch: Patch) -> None:
    patch.setattr(correlation, "_checked", lambda coefficients, bands: tuple(coefficients))


def groups_drawn(planted: Callable[[int, int], int]) -> Callable[[Patch], None]:
    """Plants another group for each step, (step, bands) -> group."""

    def plant(patch: Patch) -> None:
        real: Any = sampling.BatchSampler._draw

        def wrong(self: Any, step: int) -> Any:
            drawn = real(self, planted(step, self._bands))
            return type(drawn)(drawn.indices, drawn.key, real(self, step).sampling)

        patch.setattr(sampling.BatchSampler, "_draw", wrong)

    return plant


def groups_per_step(patch: Patch) -> None:
    """Every step has groups of its own."""
    real: Any = sampling.BatchSampler._draw

    def wrong(self: Any, step: int) -> Any:
        groups = self._stream.uint64(1000 + step, len(self.groups)) % np.uint64(self._bands)
        self.groups = groups.astype(np.uint16)
        return real(self, step)

    patch.setattr(sampling.BatchSampler, "_draw", wrong)


def rate_of_all(patch: Patch) -> None:
    """The ledger charges the rate at which a person is drawn on average."""
    patch.setattr(plan_base.PrivacyPlan, "group_rate", property(lambda self: self.sample_rate))


def one_count_for_all_streams(patch: Patch) -> None:
    real = Participations._parts
    patch.setattr(Participations, "_parts", lambda self, draw: ("", real(self, draw)[1]))


def old_noise_with_new_groups(patch: Patch) -> None:
    real: Any = PrivateGradient._begin_noise

    def wrong(self: Any, drawn: Any) -> Any:
        if self._recursion is not None:
            self._drawn_by = drawn.stream
        return real(self, drawn)

    patch.setattr(PrivateGradient, "_begin_noise", wrong)


def padding_counted(patch: Patch) -> None:
    real = ClippingAccumulator.add
    patch.setattr(ClippingAccumulator, "add", lambda self, chunk, padded=None: real(self, chunk))


def first_ones_kept(patch: Patch) -> None:
    """Of a sample that is too large, the first examples of the data set are kept."""
    patch.setattr(sampling.np, "argsort", lambda values, **_: np.arange(len(values)))


def whole_by_length(patch: Patch) -> None:
    """A batch that padding makes as long as the data set is taken for the data set."""
    real: Any = Examples._rows

    def wrong(self: Any, tensors: Any, chosen: Any) -> Any:
        return tensors if len(chosen) == len(tensors[0]) else real(self, tensors, chosen)

    patch.setattr(Examples, "_rows", wrong)


def truncation_free(patch: Patch) -> None:
    """Truncated batches cost what Poisson samples do."""
    real = mechanisms._sums

    def wrong(function: str, releases: Any) -> Any:
        return real(function, [replace(one, scheme="poisson") for one in releases])

    patch.setattr(mechanisms, "_sums", wrong)


PADDED = {"engine": "factored", "clip": pg.clip.Flat(), "microbatch_size": None}
TRUNCATION = [
    Mutant("padding that counts", padding_counted, "test_truncated.test_padding_counts_for_nothing", PADDED),
    Mutant(
        "truncation to the first examples of the data",
        first_ones_kept,
        "test_truncated.test_draws_are_poisson_samples_of_which_random_ones_are_kept",
    ),
    Mutant(
        "the first rows in place of the drawn ones, where padding makes a batch as long as the data",
        whole_by_length,
        "test_truncated.test_a_batch_holds_the_drawn_examples_also_where_padding_makes_it_as_long_as_the_data",
        {"largest": 32},
    ),
    Mutant("truncation for free", truncation_free, "test_truncated.test_plan_ledger_and_file_have_one_price"),
]
MEMORY = [
    Mutant("z that two steps share", z_reused, COVARIANCE, {"changed": {}}),
    Mutant(
        "parameters drawn at once that share their noise",
        one_draw_for_a_group,
        "test_noise.test_parameters_that_other_devices_draw_at_once_have_noise_of_their_own",
    ),
    Mutant("noise whose past is forgotten", past_forgotten, COVARIANCE, {"changed": {}}),
    Mutant(
        "coefficients longer than the sensitivity",
        sensitivity_of_longer_coefficients,
        "test_banded.test_longer_coefficients_are_divided_by_their_norm",
    ),
    Mutant("a group that is drawn twice in its turn", groups_drawn(lambda t, b: t // 2), GROUPS, {"bands": 2}),
    Mutant("new groups in each step", groups_per_step, GROUPS, {"bands": 5}),
    Mutant("the average rate charged", rate_of_all, PRICE),
    Mutant(
        "old and new groups counted as one group", one_count_for_all_streams, "test_banded.test_new_groups_count_again"
    ),
    Mutant("old noise for new groups", old_noise_with_new_groups, "test_banded.test_new_groups_have_new_noise"),
]
