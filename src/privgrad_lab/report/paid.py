"""Show a private comparison: what was paid for, and nothing else."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from privgrad.accounting.accountant import rounded_up
from privgrad.accounting.mechanisms import Release, Selection, Split
from privgrad.statement.text import Statement
from privgrad_lab.metrics import is_paid, title
from privgrad_lab.prices import Price, Way, prices_of, public_count, tunes_norm, way_of
from privgrad_lab.records import Record, in_phase, lead_of, own_text, score_of
from privgrad_lab.report.page import write_index
from privgrad_lab.report.texts import (
    below_mean_text,
    clips_hard,
    epsilon_text,
    interval_text,
    losses_text,
    number_text,
    private_text,
)
from privgrad_lab.spec import Spec, TuningTable

WAYS: dict[Way, str] = {"none": "no tuning", "trials": "small trials", "select": "repeat and select"}


def price_table(spec: Spec) -> Table:
    """Return the three ways to spend the total epsilon, as a table for the terminal. An arrow marks the chosen one."""
    total, delta = spec.privacy.total_epsilon, spec.privacy.delta
    assert total is not None
    table = Table(title=f"Ways to spend ε = {epsilon_text(total)} at δ = {rounded_up(delta)}", title_justify="left")
    table.add_column("way")
    for name in ("trainings", "σ, model", "σ, trial", "score's noise"):
        table.add_column(name, justify="right")
    for way, price in prices_of(spec).items():
        mark = " ←" if way == way_of(spec) else ""
        count = "1" if price.way == "none" else f"{price.candidates} + 1"
        if price.way == "select":  # the number is secret, and only its mean is public
            count = f"secret, {(spec.tuning or TuningTable()).mean_runs:g} on average"
        score = "–" if price.score_noise is None else f"{price.score_noise / public_count(spec):.2g}"
        trial = "–" if price.trial_noise is None else f"{price.trial_noise:.3g}"
        table.add_row(f"{WAYS[way]}{mark}", count, f"{price.noise_multiplier:.3g}", trial, score)
    return table


def result_text(outcome: Mapping[str, Any], records: Sequence[Record], *, with_norm: bool = False) -> str:
    """Return the result in sentences, for the terminal and for the page; with C if `with_norm`."""
    last = next(record for record in records if record["phase"] == "final")
    chosen = [f"C {outcome['max_grad_norm']:g}"] if with_norm else []
    chosen += [f"u {outcome['noise_step']:g}"] if outcome["noise_step"] is not None else []
    chosen += filter(None, [own_text(outcome["own"])])
    score, lead, reached = score_of(records), lead_of([last]), outcome.get("r2", outcome.get("accuracy"))
    found = {"loss": (outcome["loss"], None)} if reached is None else {score: (reached, outcome.get("interval"))}
    found |= {title(name): (one, outcome["intervals"][name]) for name, one in outcome["metrics"].items()} | found
    kinds = {name: name if name == score else "" for name in found}
    shown = {name: number_text(value, kinds[name]) for name, (value, _) in found.items()}
    text = f"{private_text(lead, shown[lead], outcome['epsilon'])}. Trained by {outcome['method']}"
    text += f" ({', '.join(chosen)})" if chosen else ""
    if reached is not None:
        told = [f"{name} {shown[name]} ({interval_text(ends, kinds[name])})" for name, (_, ends) in found.items()]
        text += f". On the test part: {'; '.join(told + ['chance has AUC 0.5'] * (lead == 'AUC'))}"
        if (share := outcome.get("most_frequent_class")) is not None:
            text += f"; the most frequent class alone has accuracy {100 * share:.1f} %"
            low, high = outcome.get("interval") or (1.0, 0.0)
            text += ", which is inside the interval" if low <= share <= high else ""
    tuned_by = sorted((record["tuning_score"] for record in in_phase(records, "tuning")), reverse=True)
    noise = max((record["score_noise_std"] for record in in_phase(records, "tuning")), default=0.0)
    if len(tuned_by) > 1 and tuned_by[0] - tuned_by[1] < noise:
        text += ". The two best scores of candidates differ by less than their noise, so the choice may be chance"
    if (constant := outcome.get("class_shares_loss")) is not None and outcome["loss"] > constant:
        text += f". {losses_text(constant, of_head=clips_hard(outcome))[:-1]}"
    text += f". {below_mean_text(last)[:-1]}" if below_mean_text(last) else ""
    tuned = {"none": "", "trials": ", trials and scores included", "select": ", selection and score included"}
    cost = f"ε = {epsilon_text(outcome['epsilon'])} at δ = {rounded_up(outcome['delta'])}"
    return f"{text}. Total {cost}{tuned[outcome['way']]}."


def write_page(
    spec: Spec,
    price: Price,
    outcome: Mapping[str, Any],
    records: Sequence[Record],
    statement: Statement,
    folder: Path,
    *,
    command: str,
) -> Path:
    """Write index.html, which needs no other file, and return its path."""
    trials = [
        {
            "method": record["method"],
            "norm": f"{record['max_grad_norm']:g}",
            "rate": f"{record['noise_step']:g}",
            "own": own_text(record["own"]),
            "score": f"{100 * record['tuning_score']:.1f} %",
            "noise": f"± {100 * record['score_noise_std']:.1f}" if record["score_noise_std"] else "exact",
        }
        for record in in_phase(records, "tuning")
    ]
    last = next(record for record in records if record["phase"] == "final")
    headline, _, result = result_text(outcome, records, with_norm=tunes_norm(spec)).partition(". ")
    return write_index(
        "paid.html.j2",
        folder,
        title=spec.title,
        headline=headline,
        result=result,
        with_norm=tunes_norm(spec),
        way=WAYS[price.way],
        paid=[line for release in price.releases for line in _lines(release, spec)],
        total=price.epsilon,
        delta=spec.privacy.delta,
        trials=trials,
        score=score_of(records),
        by=f"{records[0].get('tuning_score_by')}".replace("1 - ", "1 minus the ").replace("_", " "),
        resampled=[title(name) for name in outcome["metrics"] if not is_paid(name)],
        scored_on=None if spec.tuning is None else spec.tuning.score_on,
        winner_score=last.get("tuning_score"),
        winner_noise=last.get("score_noise_std"),
        said=statement,
        settings={
            "Data": last["data"],
            "Optimizer": last["optimizer"],
            "Clipping norm C": f"{last['max_grad_norm']:g}",
            **({} if last["noise_step"] is None else {"Noise step u": f"{last['noise_step']:g}"}),
            **({"Own options": own_text(last["own"])} if last["own"] else {}),
            "Noise multiplier σ": f"{price.noise_multiplier:.4g}",
            "Expected batch size B": spec.privacy.expected_batch_size,
            "Steps T": spec.privacy.steps,
            "Side information": last["side_information"] or "none",
            "Weights": "model.pt",
        },
        specification=spec.model_dump_json(indent=1, exclude_defaults=True),
        command=command,
    )


def _lines(release: Release | Selection | Split, spec: Spec) -> list[dict[str, str]]:
    if not isinstance(release, Split):
        return [_described(release, spec)]
    groups = zip(("training people", "people who are held out"), release.groups, strict=True)
    lines = [(who, _described(one, spec)) for who, group in groups for one in group]
    return [line | {"what": f"{line['what']}: paid by {who}"} for who, line in lines]


def _described(release: Release | Selection, spec: Spec) -> dict[str, str]:
    if isinstance(release, Selection):
        law = "Poisson" if release.shape == math.inf else f"truncated negative binomial of shape {release.shape:g}"
        inner = "; ".join(f"{one['what']}, σ {one['noise']}" for one in (_described(r, spec) for r in release.releases))
        count = f"{release.mean:g} on average, {law}"
        return {"what": f"The best of several runs ({inner})", "count": count, "noise": ""}
    noise = f"{release.noise_multiplier:.4g}"
    steps, rate = spec.privacy.steps, spec.privacy.expected_batch_size / spec.privacy.num_examples
    if release.sample_rate != rate or release.count % steps:
        return {"what": "Scores of candidates", "count": f"{release.count}", "noise": noise}
    runs = release.count // steps
    what = "A training" if runs == 1 else "Trials"
    return {"what": what, "count": f"{runs} × {steps} steps", "noise": noise}
