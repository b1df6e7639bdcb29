"""Check the numbers of a plan, alone and together, and compute those of a plan that simulates it in smaller batches.

`PrivacyPlan` calls `require_numbers` when it is made, and its methods call the other functions. The privacy guarantee
rests on `require_numbers` and `is_infinite`: noise, draws and charges follow numbers that they have checked. It does
not rest on the rest of this file: no number of a plan that simulates another one can make its epsilon finite.
"""

import math
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from privgrad.correlation import Banded
from privgrad.errors import (
    described,
    expected,
    require_choice,
    require_delta,
    require_integer,
    require_max_grad_norm,
    require_nonnegative,
    require_positive,
    require_rate,
)
from privgrad.rounding import rounded_up
from privgrad.types import PrivacyUnit, SamplingScheme

if TYPE_CHECKING:
    from privgrad.plan import PrivacyPlan


def require_numbers(plan: "PrivacyPlan") -> None:
    """Raise PrivacyError unless every number of a plan is in its range and no two contradict each other.

    Warns of a delta that allows a mechanism to publish a whole record.
    """
    function = "PrivacyPlan"
    require_rate(function, plan.sample_rate)
    require_integer(function, "steps", plan.steps, 1)
    require_integer(function, "expected_batch_size", plan.expected_batch_size, 1)
    require_integer(function, "num_examples", plan.num_examples, 1)
    require_nonnegative(function, "noise_multiplier", plan.noise_multiplier, "give sigma, or use for_budget")
    if not (plan.noise_multiplier == 0 and is_infinite(plan.max_grad_norm)):
        require_max_grad_norm(function, plan.max_grad_norm, plan.noise_multiplier)
    if abs(plan.sample_rate * plan.num_examples - plan.expected_batch_size) > 1:
        raise expected(
            function,
            "expected_batch_size",
            f"to be sample_rate * num_examples = {plan.sample_rate * plan.num_examples:g}",
            plan.expected_batch_size,
            "correct one of the three",
        )
    require_integer(function, "group_size", plan.group_size, 1)
    if plan.expected_batch_size % plan.group_size:
        condition = f"to divide expected_batch_size = {plan.expected_batch_size}"
        raise expected(function, "group_size", condition, plan.group_size, "change one of the two")
    if not isinstance(plan.noise_on_grid, bool) or (plan.noise_on_grid and plan.noise_multiplier == 0):  # pyright: ignore[reportUnnecessaryIsInstance]
        condition = "to be True or False, and to be False if noise_multiplier is 0"
        remedy = "set noise_on_grid=False: there is nothing to hide without noise"
        raise expected(function, "noise_on_grid", condition, plan.noise_on_grid, remedy)
    require_choice(function, "privacy_unit", plan.privacy_unit, get_args(PrivacyUnit))
    if plan.privacy_unit == "user" and plan.group_size > 1:
        remedy = "set group_size=1: all examples of a user are clipped as one anyway"
        raise expected(function, "group_size", "to be 1 for privacy_unit 'user'", plan.group_size, remedy)
    require_choice(function, "sampling", plan.sampling, get_args(SamplingScheme))
    if plan.sampling == "truncated":
        require_truncation(function, plan.max_batch_size, plan.expected_batch_size, plan.num_examples)
        if plan.group_size > 1:
            remedy = "draw Poisson batches for groups of examples"
            raise expected(function, "group_size", "to be 1 for truncated batches", plan.group_size, remedy)
    elif plan.max_batch_size is not None:
        condition, remedy = "to be None without truncation", 'give sampling="truncated"'
        raise expected(function, "max_batch_size", condition, plan.max_batch_size, remedy)
    if plan.correlation is not None:
        _require_correlation(function, plan, plan.correlation)
    if plan.seed is not None:
        require_integer(function, "seed", plan.seed, -math.inf)
    if plan.target_epsilon is not None:
        remedy = "give the epsilon that the noise was calibrated for, or None"
        require_positive(function, "target_epsilon", plan.target_epsilon, remedy)
    if plan.delta is not None:
        require_delta(function, plan.delta)
        if plan.delta > 1 / plan.num_examples and plan.simulates is None:
            count, whole = ("num_users", "user") if plan.privacy_unit == "user" else ("num_examples", "record")
            warnings.warn(
                f"delta = {rounded_up(plan.delta)} is above 1 / {count} = {1 / plan.num_examples:.3g}: such a delta "
                f"allows a mechanism that publishes one whole {whole}; lower delta",
                stacklevel=4,
            )
    if plan.simulates is not None:
        _require_scaled(plan, plan.simulates)


def _require_correlation(function: str, plan: "PrivacyPlan", correlation: object) -> None:
    """Raise PrivacyError unless noise with memory suits the other numbers of a plan."""
    if not isinstance(correlation, Banded):
        remedy = "give privgrad.noise.Banded(bands=8), or None"
        raise expected(function, "correlation", "to be Banded or None", described(correlation), remedy)
    require_poisson(function, plan.sampling)
    require_bands(function, correlation.bands, plan.steps, math.floor(plan.num_examples / plan.expected_batch_size))


def require_poisson(function: str, sampling: object) -> None:
    """Raise PrivacyError unless batches are drawn as noise with memory needs. `PrivacyPlan.for_budget` calls it too."""
    if sampling != "poisson":
        condition, remedy = "to be 'poisson' for noise with memory", "draw Poisson batches, or leave correlation out"
        raise expected(function, "sampling", condition, repr(sampling), remedy)


def require_bands(function: str, bands: int, steps: int, batches: int) -> None:
    """Raise PrivacyError unless so many groups can take turns. `band_choice` calls it too.

    Args:
        function: the name of the caller, for the error.
        bands: the number of groups.
        steps: of the plan.
        batches: the number of batches that the data fill.
    """
    most = min(steps, batches)
    if bands > most:
        remedy = f"give Banded(bands={most}) or fewer"
        if most < 2:
            remedy = "leave correlation out: the batches are too large"
        condition = f"to be at most {most} (steps, and num_examples / expected_batch_size)"
        raise expected(function, "bands", condition, bands, remedy)


def require_truncation(function: str, max_batch_size: object, expected_batch_size: int, num_examples: int) -> None:
    """Raise PrivacyError unless a largest batch size suits the expected one. `PrivacyPlan.for_budget` calls it too."""
    usual = min(num_examples, _usual_most(expected_batch_size))
    got = described(max_batch_size)
    is_whole = isinstance(max_batch_size, int | np.integer) and not isinstance(max_batch_size, bool)
    size = int(cast("int", max_batch_size)) if is_whole else 0  # also a numpy scalar
    if not expected_batch_size <= size <= num_examples:
        condition = f"from expected_batch_size to num_examples ({expected_batch_size} to {num_examples})"
        remedy = f"give max_batch_size={usual}, say"
        raise expected(function, "max_batch_size", condition, got, remedy)


def warn_of_cuts(expected_batch_size: int, max_batch_size: int, num_examples: int) -> None:
    """Warn of truncation that costs more than 2 % of noise, as measured at B + 4 sqrt(B). `for_budget` calls it."""
    if max_batch_size < min(num_examples, expected_batch_size + 4 * math.sqrt(expected_batch_size)):
        warnings.warn(
            f"max_batch_size = {max_batch_size} cuts many batches of {expected_batch_size} expected examples, and the "
            f"noise is the larger for it; {min(num_examples, _usual_most(expected_batch_size))} costs next to nothing",
            stacklevel=3,
        )


def _usual_most(expected_batch_size: int) -> int:
    """Return a largest batch size that truncates almost no batch: B plus six standard deviations."""
    return math.ceil(expected_batch_size + 6 * math.sqrt(expected_batch_size))


def is_infinite(value: object) -> bool:
    """Return whether value is positive infinity."""
    return isinstance(value, float) and value == math.inf


def scaled_numbers(plan: "PrivacyPlan", factor: float, num_examples: int) -> dict[str, Any]:
    """Return the fields in which a plan that simulates `plan` differs from it.

    Args:
        plan: the plan to simulate.
        factor: as in PrivacyPlan.scaled.
        num_examples: as in PrivacyPlan.scaled, a number.
    Raises:
        PrivacyError: as in PrivacyPlan.scaled.
    """
    function, size, groups = "PrivacyPlan.scaled", plan.expected_batch_size, plan.group_size
    if plan.simulates is not None:
        got = f"batches of {size} that simulate batches of {plan.simulates.expected_batch_size}"
        remedy = "scale the simulated plan: plan.simulates.scaled(factor)"
        raise expected(function, "the plan", "to simulate no plan", got, remedy)
    if isinstance(factor, bool) or not isinstance(factor, Real) or not 0 < factor <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = "give the share of the batch size to keep, such as 1 / 16"
        raise expected(function, "factor", "to be in (0, 1]", described(factor), remedy)
    share = float(factor)
    left = round(size * share)
    if left < 1 or left % groups or not math.isclose(left, size * share, rel_tol=1e-9):
        condition = "to be a whole number >= 1" + (f" that group_size = {groups} divides" if groups > 1 else "")
        got, remedy = f"{size} * {share:.6g} = {size * share:.6g}", _working_factors(plan.divisor, share)
        raise expected(function, "expected_batch_size * factor", condition, got, remedy)
    require_integer(function, "num_examples", num_examples, 1)
    if left > num_examples:
        got, remedy = f"{left} of {num_examples}", "give a smaller factor, or more examples"
        raise expected(function, "expected_batch_size * factor", "to be at most num_examples", got, remedy)
    return _numbers_at(plan, left, num_examples)


def _numbers_at(plan: "PrivacyPlan", batch_size: int, num_examples: int) -> dict[str, Any]:
    """Return the fields of the plan with this batch size that simulates `plan` on a number of examples."""
    share = batch_size / plan.expected_batch_size
    same = num_examples == plan.num_examples
    return {
        "expected_batch_size": batch_size,
        "num_examples": num_examples,
        "sample_rate": plan.sample_rate * share if same else batch_size / num_examples,
        "noise_multiplier": plan.noise_multiplier * share,
        "max_batch_size": None
        if plan.max_batch_size is None
        else min(num_examples, math.ceil(plan.max_batch_size * share)),
        "target_epsilon": None,
        "simulates": plan,
    }


def _working_factors(contributions: int, factor: float) -> str:
    """Return, for an error, a remedy with up to four factors 1 / K near `factor` that the plan can be scaled by.

    Args:
        contributions: the expected number of contributions to a batch.
        factor: the factor that does not fit.
    """
    if contributions == 1:
        return "plan with a larger expected_batch_size"
    whole = [k for k in range(2, min(contributions, 4096) + 1) if contributions % k == 0] or [contributions]
    near = sorted(sorted(whole, key=lambda k: abs(math.log(k * factor)))[:4])
    return f"give a factor such as {', '.join(f'1/{k}' for k in near)}"


def _require_scaled(plan: "PrivacyPlan", simulated: object) -> None:
    """Raise PrivacyError unless `simulated` is a plan, and `plan` has the numbers that `scaled` gives."""
    function = "PrivacyPlan"
    if not isinstance(simulated, type(plan)) or simulated.simulates is not None:
        remedy = "leave it out: plan.scaled(factor) sets it"
        raise expected(function, "simulates", "to be a plan that simulates no plan", described(simulated), remedy)
    batch_size = min(plan.expected_batch_size, simulated.expected_batch_size)
    follows = vars(simulated) | _numbers_at(simulated, batch_size, plan.num_examples)
    differing = [name for name, value in follows.items() if vars(plan)[name] != value]
    if differing:
        condition = f"to follow from the simulated plan ({', '.join(f'{n} {follows[n]}' for n in differing)})"
        remedy = "change the simulated plan and scale it again: replace(plan.simulates, ...).scaled(factor)"
        got = ", ".join(f"{name} {getattr(plan, name)}" for name in differing)
        raise expected(function, "the numbers", condition, got, remedy)


def require_part(function: str, part: str, size: int, whole: str, count: int) -> None:
    """Raise PrivacyError, with the argument names of the caller, unless the part is at most the whole."""
    if size > count:
        raise expected(function, part, f"to be at most {whole} = {count}", size, "correct one of the two")


def require_user_numbers(
    num_users: int,
    expected_cohort_size: int,
    rounds: int,
    max_update_norm: float,
    target_epsilon: float | None,
    noise_multiplier: float | None,
) -> None:
    """Raise PrivacyError unless the numbers of `PrivacyPlan.for_users` are right, under the names that it gives them.

    The plan checks them again, under its own names.
    """
    if (target_epsilon is None) == (noise_multiplier is None):
        got = f"target_epsilon {target_epsilon} and noise_multiplier {noise_multiplier}"
        remedy = "give one of the two, and leave the other out"
        name = "exactly one of target_epsilon and noise_multiplier"
        raise expected("for_users", name, "to be given", got, remedy)
    require_integer("for_users", "expected_cohort_size", expected_cohort_size, 1)
    require_integer("for_users", "num_users", num_users, 1)
    require_integer("for_users", "rounds", rounds, 1)
    if not (isinstance(noise_multiplier, int | float) and noise_multiplier == 0 and is_infinite(max_update_norm)):
        require_positive("for_users", "max_update_norm", max_update_norm, "give the bound on a user's update")
    require_part("for_users", "expected_cohort_size", expected_cohort_size, "num_users", num_users)
