"""The library's errors, and the validators that raise them.

Every message reads `<function>: expected <name> <condition>, got <value>; <what to do>.`
"""

import math
from numbers import Integral, Real


class PrivacyError(ValueError):
    """An argument, value or file that would make the stated guarantee false or meaningless."""


class UnsupportedModuleError(PrivacyError):
    """A model, or a part of it, whose per-example gradients cannot be bounded; names the module path."""


class BudgetExceededError(PrivacyError):
    """A release past the steps that the plan paid for. Raised before anything is released."""


class SamplingError(PrivacyError):
    """A batch whose sampling facts are missing, or contradict the plan."""


def expected(
    function: str,
    name: str,
    condition: str,
    got: object,
    remedy: str,
    error: type[PrivacyError] = PrivacyError,
) -> PrivacyError:
    """Build (not raise) an error with the house's message."""
    try:
        told = f"{got}"
    except ValueError:
        told = "a number of more digits than Python writes out"
    return error(f"{function}: expected {name} {condition}, got {told}; {remedy}.")


def require_positive(function: str, name: str, value: float, remedy: str) -> None:
    """Raise PrivacyError unless value is a positive finite number."""
    if not (_is_finite(value) and value > 0):
        raise expected(function, name, "to be a positive finite number", value, remedy)


def require_nonnegative(function: str, name: str, value: float, remedy: str) -> None:
    """Raise PrivacyError unless value is a finite number >= 0."""
    if not (_is_finite(value) and value >= 0):
        raise expected(function, name, "to be a finite number >= 0", value, remedy)


def _is_finite(value: object) -> bool:
    """Whether value is a number that floating point can hold: an integer of 400 digits is none."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def require_rate(function: str, value: float) -> None:
    """Raise PrivacyError unless value is a probability in (0, 1]."""
    if not (isinstance(value, Real) and 0 < value <= 1):
        raise expected(
            function,
            "sample_rate",
            "in (0, 1]",
            value,
            "give expected_batch_size / num_examples; 1.0 is the full batch",
        )


def require_delta(function: str, value: float) -> None:
    """Raise PrivacyError unless value is in (0, 1)."""
    if not (isinstance(value, Real) and 0 < value < 1):
        raise expected(function, "delta", "in (0, 1)", value, "1e-5, and at most 1 / num_examples, is usual")


def require_integer(function: str, name: str, value: object, minimum: int) -> None:
    """Raise PrivacyError unless value is an integer (no float, no bool) of at least minimum."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise expected(function, name, f"to be an integer >= {minimum}", value, "give a whole number")
