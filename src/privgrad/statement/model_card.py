"""The privacy part of a saved model: a section and metadata in its README.md, and the statement as statement.txt.

Readers may act on them, so a number that protects nobody is not called epsilon.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCard

from privgrad.accounting.accountant import rounded_up
from privgrad.errors import PrivacyError
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import covers, ledgers_of, loaded_into, said_of_loaded
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.statement.text import Section, Statement, if_planned, released_beside, statement

_START, _END = "<!-- privgrad -->", "<!-- end of privgrad -->"
_STATEMENT = "statement.txt"
_TAGS = ("differential-privacy", "privgrad")
_OF_PLAN = ("neighboring_relation", "sampling", "sample_rate", "max_batch_size", "expected_batch_size", "num_examples")


def write_privacy(
    folder: Path, private_grad: PrivateGradient, optimizer: str, rates: Mapping[str, float], updates: int
) -> None:
    """Write the privacy of a training, and of all others of its model, to the folder of the model.

    README.md is created if absent. If it exists, the section of an earlier call is replaced, and the rest is kept,
    except for the lines of the Trainer's own draft that name an optimizer and a learning rate. `rates` are at the peak
    of the schedule. `updates` are fewer than the released gradients if an interruption lost some, or if the weights of
    an earlier step were loaded.
    """
    plan, own = private_grad.plan, private_grad.ledger
    ledgers = [own, *(other for other in ledgers_of(private_grad.model) if not covers(own, other))]
    path = folder / "README.md"
    found = _statement_of(plan, ledgers)
    empty = f"---\n{{}}\n---\n\n# {folder.resolve().name}\n"  # without metadata, ModelCard would warn
    card = ModelCard(path.read_text(encoding="utf-8") if path.exists() else empty)
    rate = ", ".join([optimizer, *(f"{name.replace('_', ' ')} {value:g}" for name, value in rates.items())])
    content = re.sub(rf"\n*{_START}.*?{_END}", "", card.content, flags=re.DOTALL)
    content = re.sub(r"(?m)^- learning_rate: .*\n", "", content)
    content = re.sub(r"(?m)^- optimizer: .*$", f"- optimizer: {rate}", content)
    card = ModelCard(f"{content.rstrip()}\n\n{_section(private_grad, ledgers, found, rate, updates)}\n")
    tags = cast("list[str]", card.data.get("tags") or [])
    card.data["tags"] = list(dict.fromkeys([*tags, *_TAGS]))
    earlier = "; ".join(said_of_loaded(private_grad.model))
    card.data["privacy"] = _facts(plan, ledgers, found) | {"updates": updates}
    card.data["privacy"] |= {"earlier_trainings": earlier} if earlier else {}
    path.write_text(str(card), encoding="utf-8")
    if found is not None:
        begun = (Section("Earlier trainings", tuple(lines)),) if (lines := loaded_into(private_grad.model)) else ()
        text = replace(found, sections=(*found.sections, *begun))
        (folder / _STATEMENT).write_text(f"{text}\n", encoding="utf-8")
    elif ledgers[1:] and own.commitment is None:  # an earlier call may have stated fewer trainings
        (folder / _STATEMENT).unlink(missing_ok=True)


def _statement_of(plan: PrivacyPlan, ledgers: Sequence[Ledger]) -> Statement | None:
    """Return the statement on all trainings of a model; None without a delta, with a budget, or for several units."""
    if plan.delta is None or any(ledger.commitment is not None for ledger in ledgers):
        return None
    try:
        return statement(ledgers, delta=plan.delta)
    except PrivacyError:
        if not ledgers[1:]:
            raise
        return None


def _epsilon_of(found: Statement | None, ledgers: Sequence[Ledger]) -> float | None:
    """Return the epsilon of a statement; None without a statement, or if its epsilon is no guarantee."""
    if found is None:
        return None
    numbers, facts = found.numbers, [ledger.plan_facts for ledger in ledgers]
    is_repeatable = numbers["seeded_releases"] > 0 or any(fact.get("research_seed") for fact in facts)
    is_simulation = any(fact.get("simulates") is not None for fact in facts)
    is_sound = numbers["covered_by_accountant"] and math.isfinite(numbers["epsilon"])
    return numbers["epsilon"] if is_sound and not is_simulation and not is_repeatable else None


def _facts(plan: PrivacyPlan, ledgers: Sequence[Ledger], found: Statement | None) -> dict[str, Any]:
    """Return the metadata: epsilon only if it is a guarantee, and the numbers of the plan."""
    ledger, *others = ledgers
    facts: dict[str, Any] = {}
    if (epsilon := _epsilon_of(found, ledgers)) is not None:
        facts |= {"epsilon": epsilon, "delta": plan.delta}
    if others:
        facts |= {"other_trainings": len(others), "other_released_gradients": sum(one.releases for one in others)}
    return facts | {
        "unit": plan.privacy_unit,
        "released_gradients": ledger.releases,
        "planned_gradients": plan.steps,
        **{name: fact for name, fact in plan.public_facts.items() if name in _OF_PLAN},
        "bands": plan.bands,
        "noise_multiplier": plan.noise_multiplier,
        "max_grad_norm": plan.max_grad_norm,
        "research_seed": plan.seed is not None,
        "ledger_digest": ledger.head,
    }


def _guarantee(private_grad: PrivateGradient, ledgers: Sequence[Ledger], found: Statement | None) -> list[str]:
    """Return sentences on what is protected, and on loaded weights; without a statement, how to get one."""
    begun = loaded_into(private_grad.model)
    if found is not None:
        caveats = [*if_planned(ledgers), *begun]
        return [*found.sections[0].sentences, *caveats, f"[{_STATEMENT}]({_STATEMENT}) says what this means."]
    ledger, *others = ledgers
    if ledger.commitment is not None:
        lines = ["The training is part of a budget. Run `privgrad statement` on the budget's file for its epsilon."]
    elif private_grad.plan.delta is None:
        lines = ["The plan has no delta. `privgrad statement ledger.jsonl --delta 1e-5` computes epsilon."]
    else:
        lines = ["The private trainings of this model have no statement in common."]
    lines += begun
    if others:
        uncounted = "No number here counts the other private trainings of this model."
        lines.append(f"{uncounted} Run `privgrad statement` on their ledgers too.")
    return lines


def _section(
    private_grad: PrivateGradient, ledgers: Sequence[Ledger], found: Statement | None, rate: str, updates: int
) -> str:
    """Return the section of the README: what is protected, and the numbers that it follows from."""
    ledger, *others = ledgers
    plan, epsilon = private_grad.plan, _epsilon_of(found, ledgers)
    lines = _guarantee(private_grad, ledgers, found)
    lines.append("Results on evaluation data in this card have no noise. Epsilon does not cover these data.")
    rule = ledger.plan_facts.get("adaptive_clip")
    one, many = ("person", "people") if plan.privacy_unit == "user" else ("row", "rows")
    exactness = " or more" if plan.max_batch_size is None else " or one less"
    turns = f", in {plan.bands} groups that take turns (noise with memory)" if plan.bands > 1 else ""
    turns += f", at most {plan.max_batch_size:,}" if plan.max_batch_size is not None else ""
    lost = ledger.releases - updates
    of_lost = f"; {lost:,} released gradients were lost in an interruption, came later or went unused"
    of_others = f"{len(others):,}, with {sum(other.releases for other in others):,} noisy gradients"
    rows = {
        **({} if epsilon is None else {"epsilon": rounded_up(epsilon, 4)}),
        **({} if plan.delta is None else {"delta": rounded_up(plan.delta)}),
        "unit of protection": f"one {one}",
        f"{many} in the data": f"{plan.num_examples:,}{exactness}, as declared",
        "noisy gradients": f"{ledger.releases:,} released, {plan.steps:,} planned",
        **({"other private trainings of the model": of_others} if others else {}),
        "updates of the model": f"{updates:,}" + (of_lost if lost > 0 else ""),
        "expected batch size": f"{plan.expected_batch_size:,}",
        "sampling": f"{plan.sampling}, rate {plan.group_rate:.4g}{turns}",
        "noise multiplier": f"{plan.noise_multiplier:.4g}",
        "clipping norm": f"{plan.max_grad_norm:.4g}" + (f", moved by {rule}" if rule else ""),
        **({"released with each gradient": beside} if (beside := released_beside(ledger.plan_facts)) else {}),
        "optimizer": rate,
        "digest of the ledger": f"`{ledger.head}`",
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    return "\n".join([_START, "## Privacy", "", *(f"- {line}" for line in lines), "", table, "", _END])
