"""The errors of the fast engine, for models from which it cannot take per-example gradients.

The files of the fast engine call it: `capture`, `climb`, `factored`, `layer_call`, `layouts`, `passes`, `self_check`
and `vmapped_unit`. The privacy guarantee rests on their checks, which decide when to refuse a model, and not on this
file.
"""

from typing import cast

from privgrad.errors import UnsupportedModuleError, expected

REMEDY = "use engine='vmap'"


class UnitRefusedError(UnsupportedModuleError):
    """A refusal of one unit, whose parent may be taken whole instead.

    `refused` makes it. `climb` catches it.

    Attributes:
        unit: the path of the unit.
        reason: what was expected of it, without any value.
    """

    unit = reason = ""


class CallSequenceChangedError(Exception):
    """The units were called in a different sequence than when the layouts were learned.

    `capture`, `layer_call`, `layouts` and `vmapped_unit` raise it. `climb`, `factored` and `self_check` catch it.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def misplaced(path: str, got: str) -> UnsupportedModuleError:
    """Return the error for a unit whose tensors do not hold examples in dimension 0."""
    remedy = f"keep examples in dimension 0 (batch_first=True), or {REMEDY}"
    return refused(f"the tensors of '{path}'", "to hold examples in dimension 0", got, remedy, unit=path)


def calls_changed(error: CallSequenceChangedError) -> UnitRefusedError:
    """Return the error for users when the sequence of calls differs with every known layout."""
    condition, got = "not to depend on the examples", f"different calls at '{error.path}'"
    return cast(UnitRefusedError, refused("the calls of layers", condition, got, REMEDY, unit=error.path))


def written_to(parameters: str) -> UnsupportedModuleError:
    """Return the error for a forward pass that writes to parameters, given their names."""
    remedy = "do not write to parameters in training; the model now holds private values: load it again"
    return refused("parameters", "not to be written by the forward pass", parameters, remedy)


def refused(name: str, condition: str, got: object, remedy: str, *, unit: str | None = None) -> UnsupportedModuleError:
    """Return an UnsupportedModuleError in the name of PrivateGradient; a UnitRefusedError if a unit is given."""
    kind = UnsupportedModuleError if unit is None else UnitRefusedError
    error = cast(UnsupportedModuleError, expected("PrivateGradient", name, condition, got, remedy, kind))
    if isinstance(error, UnitRefusedError):
        error.unit, error.reason = unit or "", f"{name} {condition}"
    return error
