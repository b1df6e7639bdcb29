"""Faults of the statistics of norms that share a release with the gradient, and of the rules that move C by them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mutants.mutant import Mutant, Patch, everywhere, plant_sum
from privgrad import private_gradient
from privgrad.clip import clipping, norm_statistics
from privgrad.clip.norm_statistics import Count, NormStatistic, Slots
from privgrad.private_gradient import PrivateGradient
from privgrad.types import ClippedSum, NoisyGradient


def slots_too_high(patch: Patch) -> None:
    """The last slot holds more than its height."""
    real = Slots.rows

    def planted(self: Slots, norms: Tensor, lengths: Tensor, max_grad_norm: float) -> Tensor:
        rows_BK = real(self, norms, lengths, max_grad_norm)
        return torch.cat([rows_BK[:, :-1], 1.5 * rows_BK[:, -1:]], dim=1)

    statistics_unchecked(patch)
    patch.setattr(Slots, "rows", planted)


def rows_left_out(patch: Patch) -> None:
    """A part of a batch without any gradient counts no examples."""
    patch.setattr(private_gradient, "without_gradient", lambda rows, parameters: {})


def slots_of_one_group(patch: Patch) -> None:
    """The length of a contribution is that of its first group of parameters."""

    def planted(factors: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> Tensor:
        first = next(iter(factors))
        return factors[first].double() * norms[first]

    patch.setattr(clipping, "_lengths", planted)


def slots_of_the_norm_before_clipping(patch: Patch) -> None:
    """A clipped gradient has no slot below C; one that counts by its norm before the scales has."""
    real = Slots.rows

    def planted(self: Slots, norms: Tensor, lengths: Tensor, max_grad_norm: float) -> Tensor:
        return real(self, norms, norms / 2, max_grad_norm)

    statistics_unchecked(patch)
    patch.setattr(Slots, "rows", planted)


def bins_with_steps(patch: Patch) -> None:
    """A norm is in one bin, whatever rounding makes of one at an edge."""

    def planted(norms: Tensor, edges: Any) -> Tensor:
        return (norms.double()[:, None] <= torch.tensor(edges, dtype=torch.float64)).double()

    patch.setattr(norm_statistics, "_below", planted)


def statistics_unchecked(patch: Patch) -> None:
    """Rows are added up as they come, and the stated sensitivity is that of the noise."""

    def planted(own: NormStatistic, norms: Tensor, lengths: Tensor, max_grad_norm: float) -> tuple[Tensor, float]:
        return own.rows(norms, lengths, max_grad_norm), own.sensitivity(max_grad_norm)

    everywhere(patch, norm_statistics.rows_and_sensitivity, planted)


def count_for_free(patch: Patch) -> None:
    def planted(self: Count, max_grad_norm: float) -> float:
        del self
        return max_grad_norm

    statistics_unchecked(patch)  # the library itself would refuse it
    patch.setattr(Count, "sensitivity", planted)


def groups_at_c(real: Any, chunks: Any, **options: Any) -> tuple[ClippedSum, Any]:
    """With a statistic, groups have the sensitivity of examples."""
    return real(chunks, **options | {"grouped": False})


def noise_of_the_first_c(patch: Patch) -> None:
    """C moves, and the noise stays."""
    real = PrivateGradient._clipped_sum

    def planted(self: PrivateGradient, *args: Any) -> Any:
        clipped, raw = real(self, *args)
        return replace(clipped, sensitivity=self.plan.max_grad_norm), raw

    patch.setattr(PrivateGradient, "_clipped_sum", planted)


def c_from_raw_shares(patch: Patch) -> None:
    """C follows the shares before their noise."""
    real = PrivateGradient._with_distribution

    def planted(self: PrivateGradient, gradient: NoisyGradient, raw_mean: Tensor | None) -> Any:
        rule, self._adaptive = self._adaptive, None
        found, raw_shares = real(self, gradient, raw_mean)
        self._adaptive = rule
        if rule is not None and raw_shares is not None and found.norm_distribution is not None:
            rule.update(replace(found.norm_distribution, shares=raw_shares))
        return found, raw_shares

    patch.setattr(PrivateGradient, "_with_distribution", planted)


_JOINT = "test_norm_statistics.test_gradient_and_statistic_together_move_by_at_most_the_sensitivity"
NORMS = [
    Mutant("a slot that is too high", slots_too_high, _JOINT, {"clip": "flat", "statistic": "3 slots"}),
    Mutant(
        "slots that forget a group of parameters",
        slots_of_one_group,
        _JOINT,
        {"clip": "per layer", "statistic": "59 slots"},
    ),
    Mutant(
        "slots that forget examples without a gradient",
        rows_left_out,
        "test_experts.test_batches_that_reach_no_trained_parameter_have_no_gradient",
        {"parts": "plain", "engine": "factored", "microbatch_size": None},
    ),
    Mutant(
        "slots of a norm that is not that of the contribution",
        slots_of_the_norm_before_clipping,
        _JOINT,
        {"clip": "flat", "statistic": "3 slots"},
    ),
    Mutant(
        "a norm at an edge in one bin, as it happens to be rounded",
        bins_with_steps,
        "test_norm_statistics.test_a_norm_that_is_rounded_otherwise_hardly_moves_a_statistic",
        {"statistic": "histogram"},
    ),
    Mutant(
        "a statistic of a user's that is not checked",
        statistics_unchecked,
        "test_norm_statistics.test_a_statistic_of_the_users_that_breaks_its_bound_releases_nothing",
        lambda module: {
            "statistic": module.WithoutNoise(8, lambda rows, _: rows),
            "words": "sensitivity to be at least",
        },
    ),
    Mutant("a count that raises no sensitivity", count_for_free, _JOINT, {"clip": "flat", "statistic": "count"}),
    Mutant(
        "groups at the sensitivity of examples, with slots",
        lambda patch: plant_sum(patch, groups_at_c),
        "test_norm_statistics.test_one_group_in_place_of_another_moves_both_by_at_most_the_sensitivity",
        {"statistic": "3 slots"},
    ),
    Mutant(
        "a C that moves, and noise that stays",
        noise_of_the_first_c,
        "test_adaptive_clip.test_c_reaches_the_quantile_from_any_start",
        {"kind": "slots", "target": 0.75, "start": 1e-3},
    ),
    Mutant(
        "a C that follows the shares before their noise",
        c_from_raw_shares,
        "test_adaptive_clip.test_c_is_a_function_of_what_was_released",
    ),
]
