"""How the gradient of each parameter is computed: by a rule, from copies, or with a module that is taken whole.

`passes` calls `use_of` for each tap, and `factored` calls `completed` for `Factored.uses`. Users read it in an
`explanation.Explanation`. The privacy guarantee does not rest on this file.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from privgrad.gradient.engines.refusals import Reason
from privgrad.gradient.engines.taps import Tap


@dataclass(frozen=True)
class Use:
    """How the gradient of a parameter is computed.

    Attributes:
        way: "rule"; "copies", from copies of the parameter; or "whole", with a module that is taken whole.
        unit: the path of that module, or of the module that owns the parameter; empty for a rule.
        why: the functions that need copies, or why a module is taken whole.
        remedy: what would be faster; empty if nothing is known.
        floats: the size of a copy; 0 if there is none.
        is_cheap: whether copies are a small part of what the engine holds for each example.
    """

    way: str
    unit: str = ""
    why: str = ""
    remedy: str = ""
    floats: int = 0
    is_cheap: bool = False


_RULE = Use("rule")
_CHEAP = 0.1  # a share of the floats that a step holds for each example


def use_of(tap: Tap, vmapped_units: Collection[str], other: Use | None) -> Use:
    """Return how a tap computes gradients.

    Args:
        tap: one of the parameter's taps.
        vmapped_units: paths of the modules that are taken whole.
        other: the use by the parameter's other taps so far. The slower way counts.
    """
    if not tap.is_copy:
        return other or _RULE
    if tap.path in vmapped_units:
        return Use("whole", tap.path)
    if other is not None and other.way == "whole":
        return other
    remedies = dict.fromkeys(tap.functions.values())
    remedy = "" if "" in remedies else ", ".join(remedies)
    return Use("copies", tap.path, ", ".join(tap.functions), remedy, tap.zeros[:1].numel())


def completed(uses: Mapping[str, Use], reasons: Mapping[str, Reason], floats: int) -> dict[str, Use]:
    """Return the uses with all their attributes.

    Args:
        uses: by the parameter's name, as `use_of` returns them.
        reasons: why a module is taken whole, by its path.
        floats: the number of floats that the last pass held for each example.
    """

    def complete(use: Use) -> Use:
        if use.way != "whole":
            return replace(use, is_cheap=use.floats <= _CHEAP * floats)
        why, remedy = reasons.get(use.unit, Reason("", ""))
        return replace(use, why=why, remedy=remedy)

    return {name: complete(use) for name, use in uses.items()}
