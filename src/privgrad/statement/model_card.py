"""The privacy part of a saved model: a section and metadata in its README.md, and the statement as statement.txt.

Readers may act on them, so a number that protects nobody is not called epsilon.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from torch import nn

from privgrad.accounting.accountant import rounded_up
from privgrad.errors import PrivacyError
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import covers, ledgers_of, loaded_into, said_of_loaded
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.statement.facts import Facts, ledger_facts, released_beside
from privgrad.statement.text import Section, Statement, written

_START, _END = "<!-- privgrad -->", "<!-- end of privgrad -->"
_STATEMENT = "statement.txt"
_TAGS = ("differential-privacy", "privgrad")
_OF_PLAN = (
    "neighboring_relation",
    "sampling",
    "sample_rate",
    "max_batch_size",
    "epoch_steps",
    "expected_batch_size",
    "num_examples",
)


def write_privacy(
    folder: Path,
    private_grad: PrivateGradient,
    optimizer: str,
    rates: Mapping[str, float],
    updates: int,
    together: Sequence[Ledger] = (),
) -> None:
    """Write the privacy of a training, and of all others of its model, to the folder of the model.

    README.md keeps all but an earlier section, and the optimizer and rate of the Trainer's draft. `rates` are at the
    peak of the schedule. `updates` count those behind the weights: some released gradients may be lost or come later.
    The plans of the ledgers `together` were made at once, before any result.
    """
    plan, own = private_grad.plan, private_grad.ledger
    ledgers = [own, *(other for other in ledgers_of(private_grad.model) if not covers(own, other))]
    path = folder / "README.md"
    found = _facts_of(plan, ledgers)
    if found is not None:
        found = replace(found, trainings=1 + sum(one not in together for one in ledgers[1:]))
    said = None if found is None else written(found)
    empty = f"---\n{{}}\n---\n\n# {folder.resolve().name}\n"  # without metadata, ModelCard would warn
    card = ModelCard(path.read_text(encoding="utf-8") if path.exists() else empty)
    rate = ", ".join([optimizer, *(f"{name.replace('_', ' ')} {value:g}" for name, value in rates.items())])
    content = re.sub(rf"\n*{_START}.*?{_END}", "", card.content, flags=re.DOTALL)
    content = re.sub(r"(?m)^- learning_rate: .*\n", "", content)
    content = re.sub(r"(?m)^- optimizer: .*$", f"- optimizer: {rate}", content)
    begun = loaded_into(private_grad.model)
    lines = _guarantee(plan, ledgers, said, begun)
    numbers = _numbers(private_grad.model, plan, ledgers, found, updates)
    rows = {name.replace("_", " "): _shown(value) for name, value in (numbers | {"optimizer": rate}).items()}
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    section = "\n".join([_START, "## Privacy", "", *(f"- {line}" for line in lines), "", table, "", _END])
    card = ModelCard(f"{content.rstrip()}\n\n{section}\n")
    card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or []), *_TAGS]))
    card.data["privacy"] = numbers
    path.write_text(str(card), encoding="utf-8")
    if said is not None:
        more = (Section("Earlier trainings", tuple(begun)),) if begun else ()
        text = replace(said, sections=(*said.sections, *more))
        (folder / _STATEMENT).write_text(f"{text}\n", encoding="utf-8")
    elif ledgers[1:] and own.commitment is None:  # an earlier call may have stated fewer trainings
        (folder / _STATEMENT).unlink(missing_ok=True)


def _facts_of(plan: PrivacyPlan, ledgers: Sequence[Ledger]) -> Facts | None:
    """Return the facts of all trainings of a model; None without a delta, with a budget, or for several units."""
    if plan.delta is None or any(ledger.commitment is not None for ledger in ledgers):
        return None
    try:
        return ledger_facts(ledgers, plan.delta)
    except PrivacyError:
        if not ledgers[1:]:
            raise
        return None


def _numbers(
    model: nn.Module, plan: PrivacyPlan, ledgers: Sequence[Ledger], found: Facts | None, updates: int
) -> dict[str, Any]:
    """Return the numbers of the metadata and the table: those of the plan, and epsilon only if it is a guarantee."""
    ledger, *others = ledgers
    facts: dict[str, Any] = {
        "epsilon": float(rounded_up(found.epsilon)) if found is not None and found.is_guarantee else None,
        "delta": plan.delta,
        "other_trainings": len(others) or None,
        "other_released_gradients": sum(one.releases for one in others) if others else None,
        "unit": plan.privacy_unit,
        "released_gradients": ledger.releases,
        "planned_gradients": plan.steps,
        "updates": updates,
        **{name: fact for name, fact in plan.public_facts.items() if name in _OF_PLAN},
        "bands": plan.bands,
        "noise_multiplier": plan.noise_multiplier,
        "max_grad_norm": plan.max_grad_norm,
        "max_grad_norm_moved_by": ledger.plan_facts.get("adaptive_clip"),
        "released_with_each_gradient": released_beside(ledger.plan_facts),
        "earlier_trainings": "; ".join(said_of_loaded(model)) or None,
        "research_seed": plan.seed is not None,
        "ledger_digest": ledger.head,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _guarantee(plan: PrivacyPlan, ledgers: Sequence[Ledger], said: Statement | None, begun: Sequence[str]) -> list[str]:
    """Return what is protected, by the statement; without one, how to get it."""
    ledger, *others = ledgers
    if said is not None:
        lines = [*said.sections[0].sentences, *begun, f"[{_STATEMENT}]({_STATEMENT}) says what this means."]
    elif ledger.commitment is not None:
        budget = "The training is part of a budget. Run `privgrad statement` on the budget's file for its epsilon."
        lines = [budget, *begun]
    elif plan.delta is None:
        lines = ["The plan has no delta. `privgrad statement ledger.jsonl --delta 1e-5` computes epsilon.", *begun]
    else:
        lines = ["The private trainings of this model have no statement in common.", *begun]
    if said is None and others:
        uncounted = "No number here counts the other private trainings of this model."
        lines.append(f"{uncounted} Run `privgrad statement` on their ledgers too.")
    return [*lines, "Results on evaluation data in this card have no noise. Epsilon does not cover these data."]


def _shown(value: object) -> str:
    """Return a number for the table; a float as an upper bound, as epsilon is."""
    return rounded_up(value, 4) if isinstance(value, float) else f"{value:,}" if type(value) is int else f"{value}"
