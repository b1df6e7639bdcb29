"""The library's errors, and the functions that check arguments and raise them.

Every message reads `<function>: expected <name> <condition>, got <value>; <remedy>.` A remedy that only repeats the
condition is left out. See `expected`.
"""

import difflib
import math
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

SUGGESTED = (  # a remedy for a resumed run with other numbers
    "numbers of pg.suggest change with the first weights: type them, or call torch.manual_seed before the model is made"
)
_SMALLEST_NORM = 1e-10  # of a clipping norm: float32 must hold the squares of gradients of this size
_LARGEST_NOISE_STD = 1e15  # float32 can hold its square
# Names that users give for an option that is spelled differently, by the name without hyphens and underscores.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "gpu": ("cuda",),  # by its spelling alone, "gpu" is nearest to "cpu"
    **dict.fromkeys(("learningrate", "stepsize"), ("lr",)),
    **dict.fromkeys(("width", "units", "hiddensize", "hiddendim", "hiddenunits"), ("hidden",)),
    **dict.fromkeys(("layers", "numlayers", "hiddenlayers"), ("depth",)),
    **dict.fromkeys(("batch", "batchsize"), ("expected_batch_size", "batch_size")),
    **dict.fromkeys(("epsilon", "eps"), ("target_epsilon", "eps")),
    **dict.fromkeys(("sigma", "noise"), ("noise_multiplier",)),
    **dict.fromkeys(("c", "clip", "clipping", "clipnorm", "clippingnorm", "maxnorm"), ("max_grad_norm",)),
    **dict.fromkeys(("epochs", "iterations", "maxsteps"), ("steps",)),
    "numepochs": ("epochs", "steps"),
    **dict.fromkeys(("n", "numsamples", "datasetsize"), ("num_examples",)),
}


class PrivacyError(ValueError):
    """An argument, value or file that would make the stated guarantee false or meaningless."""


class UnsupportedModuleError(PrivacyError):
    """A model or a module whose per-example gradients cannot be bounded. The message names the module's path."""


class BudgetExceededError(PrivacyError):
    """A release beyond the plan's number of steps. Raised before anything is released."""


class SamplingError(PrivacyError):
    """A batch whose sampling facts are missing or contradict the plan, or a data set that cannot be sampled."""


def expected(
    function: str, name: str, condition: str, got: object, remedy: str = "", error: type[PrivacyError] = PrivacyError
) -> PrivacyError:
    """Return an error with the library's standard message; the caller raises it.

    Args:
        function: public name of the function or class that the user called.
        name: the argument or quantity that is wrong, in the user's words.
        condition: the condition that it must meet, such as "to be in (0, 1]" or "of shape (B,)".
        got: the actual value, of the kind that the condition names: a number, a name, a type, a shape or an index.
            Compute it if it is not at hand. Never a pronoun or a filler such as "another", "others", "more" or
            "none". Use `described` where the type of the value may be the mistake.
        remedy: one imperative sentence that repairs the call as written, without a capital letter and a period. None
            where the condition says it already.
        error: its class.
    """
    message = f"{function}: expected {name} {condition}, got {got}{'; ' if remedy else ''}{remedy}"
    return error(message if message.endswith("?") else f"{message}.")


def described(value: object) -> str:
    """Return a value, cut after 60 characters, with its type unless it is None, a bool or a number: "'1', a str"."""
    if value is None or isinstance(value, bool | int | float):
        return f"{value}"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:60] + '...'}, a {type(value).__name__}"


def did_you_mean(name: object, choices: Sequence[str], remedy: str = "") -> str:
    """Return the remedy, preceded by "did you mean 'x'?" if a choice is a synonym of the name or is spelled like it."""
    by_lower = {choice.lower(): choice for choice in choices}
    typed = f"{name}".lower()
    synonyms = _SYNONYMS.get(typed.replace("-", "").replace("_", ""), ())
    near = [synonym for synonym in synonyms if synonym in by_lower] or difflib.get_close_matches(typed, by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}? {remedy[:1].upper()}{remedy[1:]}".rstrip() if near else remedy


def file_problem(path: str | os.PathLike[str]) -> str | None:
    """Return why no content can be read from a path, for example "does not exist"; None if it can be read."""
    place = Path(path)
    if not os.fspath(path):
        return "is an empty path"
    if place.is_dir():
        return "is a folder"
    if not place.exists():
        return f"does not exist (looked in {Path.cwd()})" if not place.is_absolute() else "does not exist"
    return "is empty" if place.is_file() and place.stat().st_size == 0 else None


@contextmanager
def readable(function: str, name: str, condition: str, remedy: str) -> Generator[None]:
    """Turn any exception of the block into a PrivacyError, unless it is one: a damaged file can raise anything."""
    try:
        yield
    except PrivacyError:
        raise
    except Exception as error:
        told = f"{error}".splitlines() or ["no message"]
        raise expected(function, name, condition, f"{type(error).__name__}: {told[0]}", remedy) from error


def require_positive(function: str, name: str, value: float, remedy: str = "") -> None:
    """Raise PrivacyError unless value is a positive finite number."""
    if not (_is_finite(value) and value > 0):
        raise expected(function, name, "to be a positive finite number", described(value), remedy)


def require_max_grad_norm(function: str, value: float, noise_multiplier: float) -> None:
    """Raise PrivacyError unless a clipping norm, of a plan or of one step, is within `limits_of_norm`."""
    remedy = "give the clip norm C; for smaller gradients, whose squares float32 rounds to 0, rescale the loss"
    require_in(function, "max_grad_norm", value, f"[{_SMALLEST_NORM}, inf)", remedy)
    require_in(function, "noise_multiplier * max_grad_norm", noise_multiplier * value, f"[0, {_LARGEST_NOISE_STD:g}]")


def limits_of_norm(noise_multiplier: float) -> tuple[float, float]:
    """Return the smallest and the largest clipping norm with which float32 computes."""
    return _SMALLEST_NORM, _LARGEST_NOISE_STD / noise_multiplier if noise_multiplier > 0 else math.inf


def require_nonnegative(function: str, name: str, value: float, remedy: str = "") -> None:
    """Raise PrivacyError unless value is a finite number >= 0."""
    if not (_is_finite(value) and value >= 0):
        raise expected(function, name, "to be a finite number >= 0", described(value), remedy)


def _is_finite(value: object) -> bool:
    """Return whether value is a number that floating point can hold; True and an integer of 400 digits are not."""
    if type(value) is float:
        return math.isfinite(value)
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def require_in(
    function: str, name: str, value: object, interval: str, remedy: str = "", *, is_pair: bool = False
) -> None:
    """Raise PrivacyError unless value is a number in an interval such as "(0, 1]", or a pair of such numbers."""
    low, high = map(float, interval[1:-1].split(", "))
    ends = low if interval[0] == "[" else None, high if interval[-1] == "]" else None
    numbers: Any = value if is_pair and type(value) in (tuple, list) else [value]
    valid = [_is_finite(number) and (low < number < high or number in ends) for number in numbers]
    if valid != [True] * (1 + is_pair):
        raise expected(function, name, f"to be {'two numbers ' * is_pair}in {interval}", described(value), remedy)


def require_rate(function: str, value: float) -> None:
    """Raise PrivacyError unless value is a probability in (0, 1]."""
    require_in(function, "sample_rate", value, "(0, 1]", "give expected_batch_size / num_examples; 1.0: the full batch")


def require_delta(function: str, value: float) -> None:
    """Raise PrivacyError unless value is in (0, 1)."""
    require_in(function, "delta", value, "(0, 1)", "give at most 1 / num_examples, such as 1e-5")


def require_integer(function: str, name: str, value: object, minimum: float) -> None:
    """Raise PrivacyError unless value is an integer >= minimum and below 1e308, or any integer for -math.inf."""
    if type(value) is int and minimum <= value < 1e308:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        condition = "to be an integer" + (f" >= {minimum}" if minimum > -math.inf else "")
        raise expected(function, name, condition, described(value))
    if minimum > -math.inf and not _is_finite(value):
        raise expected(function, name, "to be an integer below 1e308", described(value))


def require_choice(function: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise PrivacyError unless value is one of the choices; the message suggests the nearest one."""
    if not (isinstance(value, str) and value in choices):
        quoted = [repr(choice) for choice in choices]
        condition = f"to be {', '.join(quoted[:-1])} or {quoted[-1]}" if quoted[1:] else f"to be {quoted[0]}"
        got = repr(value) if isinstance(value, str) else described(value)
        raise expected(function, name, condition, got, did_you_mean(value, choices))


def require_callable(function: str, name: str, value: object, remedy: str = "") -> None:
    """Raise PrivacyError unless value is callable."""
    if not callable(value):
        raise expected(function, name, "to be a function", described(value), remedy)
