"""How the gradient of each parameter is computed: by a rule, from copies, or with a module that is taken whole.

`passes` calls `use_of` for each tap, and `factored` calls `with_reasons` for `Factored.uses`. Users read it in an
`explanation.Explanation`. The privacy guarantee does not rest on this file.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from privgrad.gradient.engines.layouts import Layout
from privgrad.gradient.engines.taps import Tap


@dataclass(frozen=True)
class Use:
    """How the gradient of a parameter is computed.

    Attributes:
        way: "rule"; "copies", from copies of the parameter; or "whole", with a module that is taken whole.
        unit: the path of that module, or of the module that owns the parameter; empty for a rule.
        why: the functions that need copies, or why a module is taken whole.
    """

    way: str
    unit: str = ""
    why: str = ""


_RULE = Use("rule")


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
    return other if other is not None and other.way == "whole" else Use("copies", tap.path)


def with_reasons(
    uses: Mapping[str, Use], calls: Sequence[tuple[str, Layout]], reasons: Mapping[str, str]
) -> dict[str, Use]:
    """Return the uses with their reasons.

    Args:
        uses: by the parameter's name.
        calls: the learned calls; those of functions name what needs copies.
        reasons: why a module is taken whole, by its path.
    """
    functions = dict[str, dict[str, None]]()
    for path, layout in calls:
        unit, _, function = path.partition("[")
        if function and any(layout):
            functions.setdefault(unit, {})[function.rstrip("]")] = None
    copied = {unit: ", ".join(names) for unit, names in functions.items()}
    whys = {"whole": reasons, "copies": copied, "rule": {}}
    return {name: replace(use, why=whys[use.way].get(use.unit, "")) for name, use in uses.items()}
