"""Show records of trainings as plots and as one self-contained web page.

The command line and `papers.reproduce` call `write_report`. The privacy guarantee does not rest on this file: the page
states the guarantee of finished trainings.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from privgrad import optim
from privgrad.diagnostics.gradient_stats import SecondMoment, verdict
from privgrad.diagnostics.released_stats import released_verdict
from privgrad.errors import expected
from privgrad.experiments.metrics import title
from privgrad.experiments.records import (
    FEW_CLIPPED,
    Record,
    by_method,
    diagnosed,
    diagnosis,
    groups_of,
    histograms,
    in_phase,
    is_finite,
    measured_on,
    numbers,
    own_text,
    score_of,
    simulated_epsilon,
    summarize,
    summary_row,
    trains_locally,
    tuned_by,
    tuned_names,
    without_raw,
)
from privgrad.experiments.report import figures
from privgrad.experiments.report.texts import (
    SIMULATED,
    TUNED_TITLES,
    constants_text,
    epsilon_text,
    method_texts,
    rate_title,
    row_texts,
    total_text,
    trainings_text,
)
from privgrad.optim.debiased import Debiased
from privgrad.rounding import rounded_up
from privgrad.types import COVERED

_TUNED_BY = {
    "raw_train_loss": "Training loss (NOT PRIVATE)",
    "validation_accuracy": "Validation {score}",
    "validation_loss": "Validation loss",
}
_PLOTS = ("accuracy", "tuning", "groups", "diagnosis", "moments")


def write_report(records: Iterable[Record], metadata: Mapping[str, Any], folder: str | Path) -> Path:
    """Write index.html and accuracy.png; write tuning, groups, diagnosis and moments.png if the records allow it.

    Args:
        records: one mapping per training run; at least one with phase "final".
        metadata: title, command, data, plan, total_epsilon, machine, versions, specification; each may be missing.
        folder: the output folder; it is created if it does not exist. An earlier report in it is replaced.
    Returns:
        Path of index.html, which embeds its plots and needs no other file.
    Raises:
        PrivacyError: there is no final run.
    Privacy:
        The page states the guarantee of the runs. The results on it are NOT private for the examples on which they
        were measured.
    """
    # A run without its own sampling takes the plan's. If the run or the plan says "fixed", sampling was fixed.
    plan = metadata.get("plan") or {}
    first = {"sampling": plan.get("sampling"), "privacy_unit": plan.get("privacy_unit")}
    last = {"sampling": "fixed"} if plan.get("sampling") == "fixed" else {}
    records = [{**first, **without_raw(record), **last} for record in records]
    if not in_phase(records, "final"):
        condition, remedy = 'to hold a run with phase "final"', "add a final run, which is measured on the test set"
        got = f"{len(records)} runs of the phases {sorted({str(record.get('phase')) for record in records})}"
        raise expected("write_report", "records", condition, got, remedy)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, total, score = summarize(records), metadata.get("total_epsilon"), score_of(records)
    names, privacy = tuned_names(records), _privacy(records, rows)
    of_users = any(trains_locally(record) for record in records)
    page = template("page.html.j2").render(
        metadata=metadata,
        plan=plan,
        on=measured_on(records),
        score=score,
        headline=_headline(
            rows,
            scored=any(record.get("score", "accuracy") is not None for record in records),
            on=measured_on(records),
            score=score,
            one=records[0] if len(records) == 1 and records[0].get("seed") is None else None,
        )
        + f" {constants_text(records)}".rstrip(),
        rows=method_texts(records),
        rate_title={"u": "Noise step u", "lr": "Learning rate", "rate": "Rate"}[rate_title(rows)],
        counts=rows if any(row["tuning_trainings"] for row in rows) else [],
        trainings=trainings_text(rows),
        few_clipped=_few_clipped(records),
        images=_draw_into(folder, records),
        privacy=privacy,
        simulated=SIMULATED,
        total=None if total is None else total_text({"runs": privacy["runs"]} | _given(total), tuned=bool(names)),
        metrics=list(dict.fromkeys(name for row in rows for name in map(title, row["metrics"]) if name != score)),
        tuned_by=_tuned_by(records, score),
        tuned=[TUNED_TITLES[name] for name in names],
        of_users=of_users,
        released=_released(records, of_users=of_users),
        diagnoses=_diagnoses(records, of_users=of_users),
        lost=[r for r in in_phase(records, "final") if (r.get("updates") or plan.get("steps")) != plan.get("steps")],
        optimizers={str(record["method"]): _optimizer(record) for record in records},
        sources={str(r["method"]): r["side_information"] for r in records if r.get("side_information")},
    )
    (folder / "index.html").write_text(page, encoding="utf-8")
    return folder / "index.html"


def _tuned_by(records: Sequence[Record], score: str) -> str:
    """Return the measurement that tuning compared, in words; that of a named metric has its name."""
    key = tuned_by(records)
    return _TUNED_BY.get(key, f"Validation {key.removeprefix('validation_').replace('_', ' ')}").format(score=score)


def _given(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that are not None, and "value" in any case."""
    return {key: value for key, value in facts.items() if value is not None or key == "value"}


def _few_clipped(records: Sequence[Record]) -> dict[str, str]:
    """Return, by method that clipped too few gradients, the number of such final trainings as text."""
    found: dict[str, str] = {}
    for method, runs in by_method(in_phase(records, "final")).items():
        few = [run for run in runs if (share := run.get("raw_clip_fraction")) is not None and share < FEW_CLIPPED]
        if few:
            found[method] = f"{len(few)} of {len(runs)} final trainings" if len(runs) > 1 else "its final training"
    return found


def _optimizer(record: Record) -> str | None:
    """Return the optimizer of a run with its options: "SGD (momentum 0.9)", say; None if it was not recorded."""
    options = own_text((record.get("options") or {}).items())
    return f"{record['optimizer']} ({options})" if options and record.get("optimizer") else record.get("optimizer")


def _released(records: Sequence[Record], *, of_users: bool) -> dict[str, str]:
    """Return the verdict of the first final training by method, from released values, where these were recorded."""
    first = {method: runs[0] for method, runs in by_method(in_phase(records, "final")).items()}
    held = {method: run["released"] for method, run in first.items() if run.get("released")}
    said = {method: released_verdict(found).replace("%", " %") for method, found in held.items()}
    return _of_updates(said) if of_users else said


def _diagnoses(records: Sequence[Record], *, of_users: bool) -> dict[str, str]:
    """Return the verdict of diagnostics by method; for user-level plans it speaks of updates and rounds."""
    said = {
        method: verdict(diagnosis(runs), _second_moment(runs[0].get("optimizer"))).replace("%", " %")
        for method, runs in diagnosed(records).items()
    }
    return _of_updates(said) if of_users else said


def _of_updates(said: Mapping[str, str]) -> dict[str, str]:
    """Return verdicts in the words of user-level training."""
    words = {"gradients": "updates", "larger batch": "larger cohort", "fewer steps": "fewer rounds"}
    changed = dict(said)
    for example, user in words.items():
        changed = {method: text.replace(example, user) for method, text in changed.items()}
    return changed


def _second_moment(optimizer: str | None) -> SecondMoment:
    """Return the kind of second moment that an optimizer divides by; records give the optimizer's name."""
    kind = optim.OPTIMIZERS.get(optimizer or "", optim.PrivateOptimizer)
    if issubclass(kind, Debiased):
        return "debiased"
    if issubclass(
        kind, (optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adagrad, optim.Yogi, optim.MicroAdam)
    ):
        return "biased"
    without_noise = (optim.SGD, optim.MomentumSGD, optim.RMSpropPub, optim.AdamPub, optim.MirrorDescent)
    return "none" if issubclass(kind, without_noise) else "unknown"


def _draw_into(folder: Path, records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Draw the plots that the records allow, and write the wide ones into the folder.

    Returns:
        By plot, the "wide" and the "narrow" version as base64, and the "size" on the page.
    """
    draws = {"accuracy": figures.accuracy_figure}
    if tuned_names(records):
        draws["tuning"] = figures.tuning_figure
    if groups_of(records):
        draws["groups"] = figures.groups_figure
    if watched := diagnosed(records):
        draws["diagnosis"] = figures.diagnosis_figure
        if any(map(histograms, watched.values())):
            draws["moments"] = figures.moments_figure
    # A plot of an earlier report in this folder would show other runs.
    for name in _PLOTS:
        (folder / f"{name}.png").unlink(missing_ok=True)
    images: dict[str, dict[str, str]] = {}
    for name, draw in draws.items():
        wide, narrow = (figures.png(partial(draw, records, narrow=narrow)) for narrow in (False, True))
        (folder / f"{name}.png").write_bytes(wide)
        images[name] = {
            "wide": base64.b64encode(wide).decode(),
            "narrow": base64.b64encode(narrow).decode(),
            # A plot with one column gets the width of one column of the other plots.
            "size": "whole" if int.from_bytes(wide[16:20]) > 1300 else "half",
        }
    return images


@cache
def template(name: str) -> jinja2.Template:
    """Return the template of a page with its filters. `report.paid` calls it too."""
    folder = resources.files("privgrad.experiments.report")
    loader = jinja2.FunctionLoader(lambda file: folder.joinpath(file).read_text("utf-8"))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.filters.update(epsilon=epsilon_text, short=_short)
    return environment.get_template(name)


def _headline(
    rows: Sequence[Mapping[str, Any]],
    *,
    scored: bool = True,
    on: str = "test",
    score: str = "accuracy",
    one: Record | None = None,
) -> str:
    """Return a sentence that names the best mean score, and claims no more than the spread over seeds allows.

    `one` is the record of a single training without a research seed.
    """
    ranked = sorted((r for r in rows if is_finite(r["test_accuracy_mean"])), key=lambda r: -r["test_accuracy_mean"])
    if not ranked:
        losses = sorted((r for r in rows if is_finite(r["test_loss_mean"])), key=lambda r: r["test_loss_mean"])
        if losses and all(row["test_accuracy_mean"] is None for row in rows) and not scored:
            best = losses[0]
            return f"{best['method']} has the lowest mean {on} loss, {row_texts(best)['loss']}; see the spread."
        return f"No method has a {on} {score} for all of its final runs, so none is best."
    best, *rest = ranked
    seeds = "one seed" if best["seeds"] == 1 else f"{best['seeds']} seeds"
    figures = f"{row_texts(best)['accuracy']} over {seeds}"
    if not rest and one is not None:
        ends = one.get("test_interval")
        within = "" if ends is None else f" (95 % interval {100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
        return f"{best['method']} reaches a {on} {score} of {row_texts(best)['accuracy']}{within} in one training."
    if not rest:
        return f"{best['method']} reaches a {on} {score} of {figures}; there is no other method to compare it with."
    lead = f"{best['method']} has the best mean {on} {score}, {figures}"
    second = rest[0]["method"]
    gaps = [best["test_accuracy_mean"] - row["test_accuracy_mean"] for row in rest]
    if best["test_accuracy_std"] is None or rest[0]["test_accuracy_std"] is None:
        return f"{lead}; with one seed, {100 * gaps[0]:.1f} points more than {second} may be chance."
    stds = [max(best["test_accuracy_std"], row["test_accuracy_std"] or 0.0) for row in rest]
    close = [row["method"] for row, gap, std in zip(rest, gaps, stds, strict=True) if gap <= std]
    if close:
        return f"{lead}: within one standard deviation of {' and '.join(close)}, not a clear winner."
    return (
        f"{lead}: {100 * gaps[0]:.1f} points more than {second}, which is larger than the spread over "
        f"seeds (one standard deviation is at most {100 * stds[0]:.1f} points)."
    )


def _short(value: Any) -> str:
    """Return a setting as text, as the filter `short` of the page's template.

    Floats have six significant digits, 1e-05 becomes 1e-5, and a missing value "not recorded".
    """
    if value is None or isinstance(value, jinja2.Undefined):
        return "not recorded"
    return f"{value:.6g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def _privacy(records: Sequence[Record], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the facts of the privacy statement that depend on the records."""
    epsilon = summary_row("all", records)["epsilon"]
    fixed = [row["method"] for row in rows if row["sampling"] == "fixed"]
    budgets = {row["epsilon"] for row in rows if row["seeds"]}
    return {
        "epsilon": epsilon,
        "simulates": simulated_epsilon(records),
        "factor": rounded_up(math.exp(epsilon), 3) if epsilon is not None and epsilon < 15 else None,
        "delta": max(numbers(in_phase(records, "final"), "delta"), default=None),
        "fixed": ", ".join(fixed),
        # Runs of one plan differ in epsilon at most by rounding.
        "unequal": len(budgets) > 1 and (None in budgets or not all(e <= 1.01 * min(budgets) for e in budgets)),
        "fewest_seeds": min(row["seeds"] for row in rows if row["seeds"]),
        "all_poisson": all(row["sampling"] in COVERED for row in rows),
        "runs": sum(row["trainings"] for row in rows),
        "nonfinite": sum(int(record.get("raw_nonfinite_examples") or 0) for record in records),
    }
