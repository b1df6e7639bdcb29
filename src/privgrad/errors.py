"""The library's errors, and the validators that raise them.

Every message reads `<function>: expected <name> <condition>, got <value>; <what to do>.`
"""

import difflib
import math
import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import cast

_ALIASES = {"gpu": "cuda"}  # which the spelling alone would take for "cpu"


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
    return error(f"{function}: expected {name} {condition}, got {_text(got)}; {remedy}.")


def described(value: object) -> str:
    """Describe a wrong value so that its type is seen where the value alone would look right: "1" and 1."""
    if value is None or isinstance(value, bool | int | float):
        return _text(value)
    try:
        text = " ".join(repr(value).split())
    except ValueError:
        text = "a number of more digits than Python writes out"
    return f"{text if len(text) <= 60 else text[:60] + '...'}, a {type(value).__name__}"


def did_you_mean(name: object, choices: Sequence[str], remedy: str) -> str:
    """Return the remedy, after "did you mean 'x'?" where a choice is near the name."""
    by_lower = {choice.lower(): choice for choice in choices}
    wanted = f"{name}".lower()
    near = [_ALIASES[wanted]] if _ALIASES.get(wanted) in by_lower else difflib.get_close_matches(wanted, by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}? {remedy[0].upper()}{remedy[1:]}" if near else remedy


def file_problem(path: str | os.PathLike[str]) -> str | None:
    """Say why nothing can be read from a path: " does not exist", for instance; None if something can."""
    place = Path(path)
    if not os.fspath(path):
        return "is an empty path"
    if place.is_dir():
        return "is a folder"
    if not place.exists():
        return f"does not exist (looked in {Path.cwd()})" if not place.is_absolute() else "does not exist"
    return "is empty" if place.is_file() and place.stat().st_size == 0 else None


def _text(value: object) -> str:
    try:
        return f"{value}"
    except ValueError:
        return "a number of more digits than Python writes out"


def require_positive(function: str, name: str, value: float, remedy: str) -> None:
    """Raise PrivacyError unless value is a positive finite number."""
    if not (_is_finite(value) and value > 0):
        raise expected(function, name, "to be a positive finite number", described(value), remedy)


def require_nonnegative(function: str, name: str, value: float, remedy: str) -> None:
    """Raise PrivacyError unless value is a finite number >= 0."""
    if not (_is_finite(value) and value >= 0):
        raise expected(function, name, "to be a finite number >= 0", described(value), remedy)


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
            described(value),
            "give expected_batch_size / num_examples; 1.0 is the full batch",
        )


def require_delta(function: str, value: float) -> None:
    """Raise PrivacyError unless value is in (0, 1)."""
    if not (isinstance(value, Real) and 0 < value < 1):
        raise expected(function, "delta", "in (0, 1)", described(value), "1e-5, and at most 1 / num_examples, is usual")


def require_integer(function: str, name: str, value: object, minimum: float) -> None:
    """Raise PrivacyError unless value is an integer (no float, no bool) of at least minimum."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        condition = "to be an integer" + (f" >= {minimum}" if minimum > -math.inf else "")
        raise expected(function, name, condition, described(value), "give a whole number")
    if minimum > -math.inf and not _is_finite(value):
        raise expected(function, name, "to be an integer below 1e308", described(value), "give a smaller number")


def require_choice(function: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise PrivacyError unless value is one of the choices; name the nearest one."""
    if not (isinstance(value, str) and value in choices):
        said = [repr(choice) for choice in choices]
        condition = f"to be {', '.join(said[:-1])} or {said[-1]}" if said[1:] else f"to be {said[0]}"
        got = repr(value) if isinstance(value, str) else described(value)
        raise expected(function, name, condition, got, did_you_mean(value, choices, "choose one"))


def require_callable(function: str, name: str, value: object, remedy: str) -> None:
    """Raise PrivacyError unless value can be called."""
    if not callable(value):
        raise expected(function, name, "to be a function", described(value), remedy)


def require_path(function: str, name: str, value: object, remedy: str) -> None:
    """Raise PrivacyError unless value is a path: a string that is not empty, or an os.PathLike."""
    held: object = value
    path = os.fspath(cast("str | os.PathLike[str]", held)) if isinstance(held, str | os.PathLike) else ""
    if not path or "\0" in path:
        raise expected(function, name, "to be a path", described(value), remedy)
