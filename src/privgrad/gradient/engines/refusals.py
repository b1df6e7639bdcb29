"""The errors of the fast engine, for models from which it cannot take per-example gradients.

The files of the fast engine call it: `capture`, `factored`, `layer_call`, `layouts`, `passes`, `self_check` and
`vmapped_unit`. The privacy guarantee rests on their checks, which decide when to refuse a model, and not on this file.
"""

from typing import cast

from privgrad.errors import UnsupportedModuleError, expected

REMEDY = "use engine='vmap'"


class CallSequenceChangedError(Exception):
    """The units were called in a different sequence than when the layouts were learned.

    `capture`, `layer_call`, `layouts` and `vmapped_unit` raise it. `factored` and `self_check` catch it.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def misplaced(path: str, got: str) -> UnsupportedModuleError:
    """Return the error for a unit whose tensors do not hold examples in dimension 0."""
    remedy = f"keep examples in dimension 0 (batch_first=True), or {REMEDY}"
    return refused(f"the tensors of '{path}'", "to hold examples in dimension 0", got, remedy)


def written_to(parameters: str) -> UnsupportedModuleError:
    """Return the error for a forward pass that writes to parameters, given their names."""
    remedy = "do not write to parameters in training; the model now holds private values: load it again"
    return refused("parameters", "not to be written by the forward pass", parameters, remedy)


def refused(name: str, condition: str, got: object, remedy: str) -> UnsupportedModuleError:
    """Return an UnsupportedModuleError in the name of PrivateGradient."""
    return cast(
        UnsupportedModuleError, expected("PrivateGradient", name, condition, got, remedy, UnsupportedModuleError)
    )
