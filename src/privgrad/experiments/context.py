"""What a report says besides the records: data, plan, total cost, specification, machine."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from privgrad.accounting import epsilon
from privgrad.experiments.runs import Record, Run, candidate_of
from privgrad.experiments.spec import MethodTable, Spec
from privgrad.ledger import Ledger


def context(spec: Spec, records: Sequence[Record], out: Path, *, command: str) -> dict[str, Any]:
    """What a report says besides the records; the total is that of every ledger in the folder."""
    plan = spec.plan(None)
    seeds = sorted({record["seed"] for record in records if record["seed"] is not None})
    norms = {str(r["method"]): f"{r['max_grad_norm']:g}" for r in records if r["phase"] == "final"}
    groups = {m.name: str(1 if m.non_private else m.group_size) for m in spec.methods}
    ledgers = {p.parent.name: Ledger(p, read_only=True) for p in sorted(out.glob("runs/*/ledger.jsonl"))}
    drawn_by = {str(ledger.plan_facts["noise_generator"]) for ledger in ledgers.values()}
    return {
        "title": spec.title,
        "command": command,
        "data": records[0]["data"],
        "plan": asdict(plan)
        | {
            "seed": ", ".join(map(str, seeds)) or None,
            "max_grad_norm": _by_method(norms) or plan.max_grad_norm,
            "group_size": _by_method(groups),
            "perturbation": _by_method({m.name: _place(m) for m in spec.methods}),
            "noise_generator": "; ".join(sorted(drawn_by)) or None,
            "views": spec.run.views,
            "average": spec.run.average or "none",
            "neighboring_relation": plan.neighboring_relation,
            "privacy_unit": plan.privacy_unit,
        },
        "total_epsilon": _total_epsilon(spec, records, ledgers),
        "specification": spec.model_dump_json(indent=1, exclude_defaults=True),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _place(method: MethodTable) -> str:
    """Where a method takes its gradients; of users, what each contributes."""
    if method.local is not None:
        epochs = "an epoch" if method.local.epochs == 1 else f"{method.local.epochs} epochs"
        return f"w minus its weights after {epochs} of SGD on its own examples, in batches of {method.local.batch_size}"
    if method.perturb is None:
        return "at the weights"
    if method.perturb.rule == "RawSAM":
        return "along the private batch's own mean gradient, NOT private (RawSAM)"
    return f"at moved weights ({' '.join(filter(None, (method.perturb.rule, method.perturb.mode)))})"


def _by_method(told: Mapping[str, str]) -> str:
    """The value that all methods share, or each method's own."""
    if len(set(told.values())) > 1:
        return ", ".join(f"{value} ({method})" for method, value in told.items())
    return next(iter(told.values()), "")


def _total_epsilon(spec: Spec, records: Sequence[Record], ledgers: Mapping[str, Ledger]) -> dict[str, Any] | None:
    """What all trainings of a folder cost together, by their ledgers; None where a record's is not there."""
    methods = {method.name: method for method in spec.methods}
    for record in records:
        run = Run(methods[record["method"]], candidate_of(record), record["seed"], record["phase"])
        tuned = replace(run, phase="tuning")  # a final run that was done in tuning has no folder of its own
        if not {run.name, tuned.name} & ledgers.keys():
            return None
    releases = [release for ledger in ledgers.values() for release in ledger.charged]
    covered = spec.privacy.sampling == "poisson"
    return {
        "value": epsilon(releases, delta=spec.privacy.delta, assume_poisson=not covered),
        "runs": len(ledgers),
        "covered": covered,
        "by_training_loss": spec.tuning is not None and spec.tuning.by == "train_loss",
    }
