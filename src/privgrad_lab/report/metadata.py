"""The facts of a report apart from the records: data, plan, total privacy cost, specification and machine."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from privgrad.accounting.accountant import epsilon
from privgrad.ledger.ledger import Ledger
from privgrad.perturb import DiSK
from privgrad.plan import PrivacyPlan
from privgrad.statement.facts import doubts
from privgrad.training.schedule import Schedule
from privgrad_lab.records import Record, candidate_of
from privgrad_lab.runner import Run
from privgrad_lab.spec import REGISTRIES, MethodTable, Spec


def metadata_of(spec: Spec, records: Sequence[Record], out: Path, *, command: str) -> dict[str, Any]:
    """Return the facts of a report apart from its records; the total epsilon covers every ledger in the folder."""
    plan = spec.plan(None)
    seeds = sorted({record["seed"] for record in records if record["seed"] is not None})
    finals = {str(record["method"]): record for record in records if record["phase"] == "final"}
    moved = {m: _described("adaptive_clip", record) for m, record in finals.items()}
    norms = {m: f"{record['max_grad_norm']:g}" for m, record in finals.items()}
    norms |= {m: f"{norms[m]}, moved by {rule}" for m, rule in moved.items() if rule != "none"}
    averages = {m: _described("filter", record) for m, record in finals.items()}
    groups = {m.name: str(1 if m.non_private else m.group_size) for m in spec.methods}
    private = [record for record in records if not record.get("non_private")] or records
    others = {_run(spec, record).folder(out).name for record in records if record not in private}
    paths = (path for path in sorted(out.glob("runs/*/ledger.jsonl")) if path.parent.name not in others)
    ledgers = {path.parent.name: Ledger(path, read_only=True) for path in paths}
    facts = [ledger.plan_facts for ledger in ledgers.values()]
    drawn_by = {name for fact in facts for name in str(fact["noise_generator"]).split("; ")}
    statistics = {str(fact["norm_statistic"]) for fact in facts if fact.get("norm_statistic")}
    return {
        "title": spec.title,
        "command": command,
        "data": records[0]["data"],
        "model": _model(spec, records[0], out) if len(records) == 1 else None,
        "plan": {name: value for name, value in asdict(plan).items() if name != "correlation"}
        | {
            "seed": ", ".join(map(str, seeds)) or None,
            "max_grad_norm": _by_method(norms) or plan.max_grad_norm,
            "group_size": _by_method(groups),
            "epoch_steps": plan.release.epoch_steps,
            **_turns(spec, plan),
            "filter": _by_method(averages) or "none",
            "perturbation": _by_method({m.name: _place(m) for m in spec.methods}),
            "noise_generator": "; ".join(sorted(drawn_by)) or None,
            "augmentation_multiplicity": spec.run.augmentation_multiplicity,
            "ema_decay": spec.run.ema_decay or "none",
            "schedule": _by_method({m.name: _schedule(spec, m) for m in spec.methods}),
            "neighboring_relation": plan.neighboring_relation,
            "privacy_unit": plan.privacy_unit,
        }
        | ({"norm_statistic": "; ".join(sorted(statistics))} if statistics else {})
        | ({"max_rows": facts[0]["max_rows"]} if facts and facts[0].get("max_rows") else {}),  # one data set for all
        "total_epsilon": _total_epsilon(spec, private, out, ledgers),
        "doubts": doubts(list(ledgers.values())),
        "specification": spec.model_dump_json(indent=1, exclude_defaults=True),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _model(spec: Spec, record: Record, out: Path) -> str:
    if record.get("head") is not None:
        return f'load it by privgrad.Head.load("{record["head"]}")'
    path, key = _run(spec, record).folder(out) / "checkpoint.pt", "averaged" if spec.run.ema_decay else "model"
    return f'torch.load("{path}")["{key}"] is its state dict; the file is private'


def _run(spec: Spec, record: Record) -> Run:
    method = next(method for method in spec.methods if method.name == record["method"])
    return Run(method, candidate_of(record), record["seed"], record["phase"])


def _described(part: str, record: Record) -> str:
    if not (table := record.get(part)):
        return "none"
    kind = DiSK if table["rule"] == "DiSK" else REGISTRIES[part][table["rule"]]
    return repr(kind(**table["options"]))


def _place(method: MethodTable) -> str:
    if method.local is not None:
        local = method.local.options
        epochs = "an epoch" if local.get("epochs", 1) == 1 else f"{local['epochs']} epochs"
        return f"w minus its weights after {epochs} of SGD on its own examples, in batches of {local['batch_size']}"
    if method.filter is not None and method.filter.use == "DiSK":
        return "ahead of the weights (DiSK)"
    if method.perturb is None:
        return "at the weights"
    if method.perturb.use == "RawSAM":
        return "along the private batch's own mean gradient, NOT private (RawSAM)"
    return f"at moved weights ({' '.join(filter(None, (method.perturb.use, method.perturb.options.get('mode'))))})"


def _schedule(spec: Spec, method: MethodTable) -> str:
    schedule = spec.schedule_of(method) or Schedule()
    return f"{schedule.decay}, warm-up {schedule.warmup:g}" if schedule.warmup else schedule.decay


def _turns(spec: Spec, plan: PrivacyPlan) -> dict[str, str | float]:
    if all(method.bands is None for method in spec.methods):
        return {"bands": "1", "sample_rate": plan.sample_rate, "noise_multiplier": plan.noise_multiplier}
    plans = {method.name: spec.plan(None, method) for method in spec.methods}
    return {
        "bands": _by_method({name: str(own.bands) for name, own in plans.items()}),
        "sample_rate": _by_method({name: f"{own.group_rate:.4g}" for name, own in plans.items()}),
        "noise_multiplier": _by_method({name: f"{own.noise_multiplier:.4g}" for name, own in plans.items()}),
    }


def _by_method(values: Mapping[str, str]) -> str:
    if len(set(values.values())) > 1:
        return ", ".join(f"{value} ({method})" for method, value in values.items())
    return next(iter(values.values()), "")


def _total_epsilon(spec: Spec, records: Sequence[Record], out: Path, ledgers: Mapping[str, Ledger]) -> Record | None:
    """Return the total cost of all trainings in a folder, from their ledgers; None if that of a record is missing."""
    for record in records:
        run = _run(spec, record)
        tuned = replace(run, phase="tuning")  # a final run that repeats a tuning run has no folder of its own
        if not {run.folder(out).name, tuned.folder(out).name} & ledgers.keys():
            return None
    releases = [release for ledger in ledgers.values() for release in ledger.charged]
    return {
        "value": epsilon(releases, delta=spec.privacy.delta),
        "runs": len(ledgers),
        "others": any(method.non_private for method in spec.methods),
        "by_training_loss": spec.tuning is not None and spec.tuning.by == "train_loss",
        "simulated": "all" if spec.privacy.simulate > 1 else "tuning" if spec.tuning_scale > 1 else None,
    }
