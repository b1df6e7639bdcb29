"""The errors of the engines, for models from which they cannot take per-example gradients."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from privgrad.errors import UnsupportedModuleError, expected

REMEDY = "use engine='vmap'"
_OF_LISTS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack"})


class Reason(NamedTuple):
    """Why a unit was refused: a condition as a sentence, and a remedy that keeps the engine; empty if none is known."""

    condition: str
    remedy: str


class UnitRefusedError(UnsupportedModuleError):
    """A refusal of one unit, whose parent may be taken whole instead; the reason names no value."""

    unit, reason = "", Reason("", "")


class CallSequenceChangedError(Exception):
    """The units were called in a different sequence than when the layouts were learned."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class StepChangedError(Exception):
    """The engine now computes otherwise than it computed earlier examples of the step, which must start again."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message without its period, or the error's class."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def misplaced(path: str, got: str, *, elsewhere: bool = False) -> UnsupportedModuleError:
    """Return the error for a unit whose tensors do not hold examples in dimension 0, but perhaps in another one."""
    remedy = f"call it on all examples, in dimension 0 (batch_first=True), or {REMEDY}" if elsewhere else REMEDY
    return refused(f"the tensors of '{path}'", "to hold examples in dimension 0", got, remedy, unit=path)


def calls_changed(error: CallSequenceChangedError) -> UnitRefusedError:
    """Return the error for users when the sequence of calls differs with every known layout."""
    condition, got = "not to depend on the examples", f"different calls at '{error.path}'"
    remedy = f"call each layer on all examples, or {REMEDY}"
    return cast(UnitRefusedError, refused("the calls of layers", condition, got, remedy, unit=error.path))


def unseen(parameter: str, functions: Sequence[str]) -> UnsupportedModuleError:
    """Return the error for a use of a parameter, in functions of torch or in one that it does not show."""
    name = f"the uses of parameter {parameter!r}" + (f" in {', '.join(functions)}" if functions else "")
    remedy = "use it in torch functions of one example each, or register a rule for your module that uses it"
    if functions:
        lists = _OF_LISTS.issuperset(functions)
        remedy = "use expand or repeat instead" if lists else "use it in functions of one example each"
    got, unit = "a use that cannot be attributed to examples", parameter.rpartition(".")[0]
    return refused(name, "to keep examples apart", got, f"{remedy}, or {REMEDY}", unit=unit)


def hidden(parameter: str, function: str) -> UnsupportedModuleError:
    """Return the error for a parameter in an autograd.Function, whose backward pass the engine does not see."""
    remedy = (
        "register a rule for the module that calls it, or write it in torch functions (a straight-through gradient as "
        f"w + (rounded - w).detach()), or {REMEDY}"
    )
    name, unit = f"parameter {parameter!r}", parameter.rpartition(".")[0]
    return refused(name, "not to be used in an autograd.Function", function, remedy, unit=unit)


def written_to(names: str, kind: str = "parameters") -> UnsupportedModuleError:
    """Return the error for a forward pass that writes to tensors of this kind, given their names."""
    remedy = f"do not write to {kind} in training; the model now holds private values: load it again"
    return refused(kind, "not to be written by the forward pass", names, remedy)


def buffers_written(kind: str, names: Sequence[str]) -> UnsupportedModuleError:
    """Return the error for a forward pass that writes to tensors of this kind, buffers among them."""
    remedy = (
        f"do not write to {kind} in training, because the written values are private; call .eval() on the module that "
        "writes, or use torch's spectral_norm, directly on a parameter, instead of a power iteration of yours"
    )
    return refused(kind, "not to be written by the forward pass", ", ".join(names), remedy)


def refused(name: str, condition: str, got: object, remedy: str, *, unit: str | None = None) -> UnsupportedModuleError:
    """Return an UnsupportedModuleError in the name of PrivateGradient; a UnitRefusedError if a unit is given."""
    kind = UnsupportedModuleError if unit is None else UnitRefusedError
    error = cast(UnsupportedModuleError, expected("PrivateGradient", name, condition, got, remedy, kind))
    if isinstance(error, UnitRefusedError):
        must = f"must {condition.removeprefix('to ')}" if condition.startswith("to ") else condition
        must = must.replace("not to ", "must not ", 1) if must.startswith("not to ") else must
        error.unit = unit or ""
        kept = remedy.removeprefix(f"{REMEDY}; or ").removesuffix(REMEDY).removesuffix(", or ")
        error.reason = Reason(f"{name} {must}", kept)
    return error
