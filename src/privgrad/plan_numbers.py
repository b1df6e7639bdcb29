"""Check the numbers of a plan, alone and together.

`PrivacyPlan` calls `require_numbers` when it is made. The privacy guarantee rests on this file: noise, draws and
charges follow numbers that it has checked.
"""

import math
import warnings
from typing import TYPE_CHECKING, get_args

from privgrad.errors import (
    expected,
    require_choice,
    require_delta,
    require_integer,
    require_nonnegative,
    require_positive,
    require_rate,
)
from privgrad.types import PrivacyUnit, SamplingScheme

if TYPE_CHECKING:
    from privgrad.plan import PrivacyPlan

_LARGEST_NOISE_STD = 1e15  # float32 can hold its square


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
        require_positive(function, "max_grad_norm", plan.max_grad_norm, "give the clip norm C")
    if plan.max_grad_norm < 1e-10:
        remedy = "rescale the loss: float32 rounds the squares of such small gradients to 0, which breaks the bound"
        raise expected(function, "max_grad_norm", "to be at least 1e-10", plan.max_grad_norm, remedy)
    if plan.noise_multiplier > 0 and plan.noise_multiplier * plan.max_grad_norm > _LARGEST_NOISE_STD:
        got, remedy = plan.noise_multiplier * plan.max_grad_norm, "lower one of the two"
        raise expected(
            function, "noise_multiplier * max_grad_norm", f"to be at most {_LARGEST_NOISE_STD:g}", got, remedy
        )
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
    if plan.seed is not None:
        require_integer(function, "seed", plan.seed, -math.inf)
    if plan.target_epsilon is not None:
        remedy = "give the epsilon that the noise was calibrated for, or None"
        require_positive(function, "target_epsilon", plan.target_epsilon, remedy)
    if plan.delta is not None:
        require_delta(function, plan.delta)
        if plan.delta > 1 / plan.num_examples:
            count, whole = ("num_users", "user") if plan.privacy_unit == "user" else ("num_examples", "record")
            warnings.warn(
                f"delta = {plan.delta:g} is above 1 / {count} = {1 / plan.num_examples:.3g}: such a delta allows "
                f"a mechanism that publishes one whole {whole}; lower delta",
                stacklevel=4,
            )


def is_infinite(value: object) -> bool:
    """Return whether value is positive infinity. `plan` also calls it."""
    return isinstance(value, float) and value == math.inf
