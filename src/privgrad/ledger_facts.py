"""The facts of a plan in the first line of a ledger: whether they are numbers, and whether they are another plan's.

`Ledger` and `statement` call this file. The privacy guarantee rests on it: epsilon is computed from these numbers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from privgrad.errors import SUGGESTED, expected, require_integer, require_nonnegative, require_rate
from privgrad.mechanisms import Release
from privgrad.types import SamplingScheme

# Facts that are no numbers of the plan: the argument of PrivateGradient by fact, and what follows from these.
_PARTS = {"adaptive_clip": "adaptive_clip", "norm_statistic": "norm_bins"}
_DERIVED = {"noise_generator"}


def bands_of(facts: Mapping[str, Any]) -> int:
    """Return the number of groups of people that take turns; 1 with independent noise."""
    memory: Mapping[str, Any] | None = facts.get("noise_memory")
    return 1 if memory is None else memory["bands"]


def release_of(facts: Mapping[str, Any], line: Mapping[str, Any] | None = None) -> Release:
    """Return the release of one line; without a line, that of the plan."""
    found: Mapping[str, Any] = {**facts, "scheme": facts["sampling"]} if line is None else line
    release = Release(found["noise_multiplier"], found["sample_rate"], found["scheme"])
    if release.scheme == "truncated":
        largest, examples = facts["max_batch_size"], facts["num_examples"]
        return replace(release, max_batch_size=largest, num_examples=examples)
    return release


def released_beside(fact: Mapping[str, Any]) -> str | None:
    """Return what each gradient was released with, by a ledger's `norm_statistic`; None if it was released alone.

    `statement` and `integrations.model_card` call it.
    """
    recorded = fact.get("norm_statistic")
    if not recorded:
        return None
    kinds = {"Slots": "noisy shares of gradients by length", "Count": "a noisy count of gradients within C"}
    kinds["Histogram"] = "a noisy histogram of the gradients' norms"
    kind = str(recorded).partition("(")[0]
    return f"{kinds.get(kind, 'noisy numbers on their norms')}, {recorded}"


def other_plan(held: Mapping[str, Any], given: Mapping[str, Any]) -> Exception | None:
    """Return the error for a ledger that holds other facts than those given; None if they agree."""
    differing = [name for name, value in given.items() if held.get(name) != value]
    if (part := next(filter(differing.__contains__, _PARTS), None)) and not {*differing} - _PARTS.keys() - _DERIVED:
        name, old, new = _PARTS[part], held.get(part), given[part]
        remedy = f"give the same {name} as when the ledger began, or start a new ledger and add up both epsilons"
        remedy += " and both deltas"
        return expected("Ledger.bind", f"{name} of PrivateGradient", f"to be as recorded ({old})", new, remedy)
    if differing:
        remedy = "keep the plan, or start a new ledger and add up both epsilons and both deltas"
        if "simulates" in differing:
            remedy = "train in a new folder: a simulation (PrivacyPlan.scaled) has a ledger of its own"
        elif "noise_multiplier" in differing:
            sigma = held.get("noise_multiplier")
            remedy += f"; for more steps, PrivacyPlan(noise_multiplier={sigma}, steps=..., ...) keeps the noise"
            remedy += " (the noise follows from target_epsilon, delta, steps, sample_rate and correlation: "
            remedy += "was one changed?)"
        elif "max_grad_norm" in differing:
            remedy += f"; {SUGGESTED}"
        if "noise_memory" in differing and (memory := held.get("noise_memory")) is not None:
            numbers = ", ".join(f"{value:g}" for value in memory["coefficients"])
            remedy += f"; correlation=Banded({memory['bands']}, ({numbers})) keeps its memory, for more steps too"
        sides = (held, given)
        old, new = (", ".join(str(facts.get(name)) for name in differing) for facts in sides)
        name = f"the plan's {', '.join(differing)}"
        return expected("Ledger.bind", name, f"to be as recorded ({old})", new, remedy)
    return None


def checked_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's numbers as a dict.

    Raises:
        PrivacyError: a number that epsilon needs is invalid.
    """
    require_nonnegative("Ledger", "noise_multiplier", plan["noise_multiplier"], "restore the file")
    require_rate("Ledger", plan["sample_rate"])
    require_integer("Ledger", "num_examples", plan["num_examples"], 1)
    if (memory := plan.get("noise_memory")) is not None:
        require_integer("Ledger", "bands", memory["bands"], 2)
    if plan["sampling"] not in get_args(SamplingScheme):
        condition = f"to be one of {', '.join(get_args(SamplingScheme))}"
        raise expected("Ledger", "sampling", condition, plan["sampling"], "restore the file")
    if plan["sampling"] == "truncated":
        require_integer("Ledger", "max_batch_size", plan["max_batch_size"], 1)
    return dict(plan)


def require_committed(name: str, kind: Release, planned: Mapping[str, Any], plan_facts: Mapping[str, Any]) -> None:
    """Raise PrivacyError if a plan is not the one that a budget holds for its ledger. `Ledger.bind` calls it.

    Args:
        name: of the commitment.
        kind: the committed releases.
        planned: facts of the committed plan; {} after the ledger has its first line, which holds all of them.
        plan_facts: of the plan.
    """
    numbers = tuple(plan_facts.get(fact) for fact in ("noise_multiplier", "sample_rate", "sampling"))
    remedy = "train under the plan that was given to Budget.open_ledger, without parts that are NOT private"
    if numbers != (kind.noise_multiplier, kind.sample_rate, kind.scheme):
        condition = f"to have the numbers committed for {name} ({kind.noise_multiplier}, {kind.sample_rate})"
        raise expected("Ledger.bind", "noise multiplier and sample rate", condition, numbers[:2], remedy)
    for fact, value in planned.items():
        if plan_facts.get(fact) != value:
            condition, got = f"to be {value!r}, as committed for {name}", repr(plan_facts.get(fact))
            raise expected("Ledger.bind", f"{fact} of the plan", condition, got, remedy)
