"""The units of a model: the modules whose calls the fast engine computes itself, with their parameters.

All other parameters reach torch functions. The privacy guarantee does not rest on this file: a parameter that is in no
unit, or in two, is used by functions or refused.
"""

from collections.abc import Collection, Iterator

from torch import nn
from torch.nn.utils import parametrize

from privgrad.gradient.layers.base import find_forward, find_rule
from privgrad.gradient.module_state import named_parameters, own_parameters


def units(model: nn.Module, whole: Collection[str] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units with their paths: modules with a rule or a forward of their own, and those that are taken whole.

    Each unit is yielded once. No module within a unit is a unit elsewhere. `capture` and `passes` call it.

    Args:
        model: the module.
        whole: paths of modules that are taken whole, and of other units.
    """
    seen = {id(part) for path in whole for part in [*model.get_submodule(path).modules()][1:]}
    yield from _units(model, "", whole, seen)


def _units(model: nn.Module, path: str, whole: Collection[str], seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units within a module that were not seen; see `units`."""
    if id(model) in seen:
        return
    seen.add(id(model))
    if path in whole or find_forward(model) is not None or (_owns(model) and find_rule(model) is not None):
        if any(p.requires_grad for _, p in named_parameters(model)):
            yield path, model
        return
    for name, child in model.named_children():
        yield from _units(child, f"{path}.{name}" if path else name, whole, seen)


def _owns(module: nn.Module) -> bool:
    """Return whether a module has trainable parameters of its own, or weights computed from such."""
    return any(p.requires_grad for p in own_parameters(module).values()) or parametrize.is_parametrized(module)
