"""Show records of trainings as plots and as one self-contained web page."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jinja2

from privgrad import optim
from privgrad.diagnostics.gradient_stats import SecondMoment, released_verdict, verdict
from privgrad.errors import expected
from privgrad.optim.debiased import Debiased
from privgrad.statement.facts import Facts
from privgrad.statement.text import written
from privgrad.types import SHUFFLED
from privgrad_lab import records as recorded
from privgrad_lab.records import Record
from privgrad_lab.report import figures, texts


def write_report(records: Iterable[Record], metadata: Mapping[str, Any], folder: str | Path) -> Path:
    """Write index.html; write accuracy, seeds, tuning, groups, diagnosis and moments.png if there is what they show.

    `metadata` is that of `metadata_of`; each of its entries may be missing. The result is the path of index.html, which
    embeds its plots and needs no other file. The results on it are NOT private for the examples on which they were
    measured.
    """
    # A run without its own sampling takes the plan's. If an old run or plan says "fixed", sampling was fixed.
    plan = metadata.get("plan") or {}
    first = {"sampling": plan.get("sampling"), "privacy_unit": plan.get("privacy_unit")}
    last = {"sampling": SHUFFLED} if plan.get("sampling") == SHUFFLED else {}
    records = [{**first, **recorded.without_raw(record), **last} for record in records]
    if not (finals := recorded.in_phase(records, "final")):
        got = f"{len(records)} runs of the phases {sorted({str(record.get('phase')) for record in records})}"
        raise expected("write_report", "records", 'to hold a run with phase "final"', got)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, total, score = recorded.summarize(records), metadata.get("total_epsilon"), recorded.score_of(records)
    names, privacy, by = recorded.tuned_names(records), _privacy(records, rows), texts.tuned_by_text(records)
    if total is not None:
        given = {key: value for key, value in total.items() if value is not None or key == "value"}
        total = texts.total_text({"runs": privacy["runs"]} | given, tuned=bool(names))
    told = texts.method_texts(records)
    said = written(_facts(records, metadata, privacy))
    headline = _headline(records, rows, protects=said.is_guarantee and privacy["covered"] is not False)
    headline = f"{headline} {texts.edge_text(rows, told)}".strip()
    return write_index(
        "page.html.j2",
        folder,
        metadata=metadata,
        plan=plan,
        on=recorded.measured_on(records),
        score=recorded.lead_of(records),
        measured=f"{score} and {'mean absolute error' if score == 'R2' else 'loss'}",
        headline=headline,
        constants=texts.constants_text(records),
        differences=texts.differences_text(rows),
        without_noise=texts.open_text(rows),
        below=texts.below_text(records, rows),
        rows=told,
        rate_title={"u": "Noise step u", "lr": "Learning rate", "rate": "Rate"}[texts.rate_title(rows)],
        counts=rows if any(row["tuning_trainings"] for row in rows) else [],
        trainings=texts.trainings_text(rows),
        images=_draw_into(folder, records),
        privacy=privacy,
        said=said,
        simulated=texts.SIMULATED,
        total=total,
        metrics=list(dict.fromkeys(name for row in told for name in row["metrics"])),
        tuned_by=by[0].upper() + by[1:],
        tuned=[texts.TUNED_TITLES[name] for name in names],
        of_users=any(map(recorded.trains_locally, records)),
        **_verdicts(records),
        lost=[run for run in finals if (run.get("updates") or plan.get("steps")) != plan.get("steps")],
        optimizers={str(record["method"]): _optimizer(record) for record in records},
        sources={str(r["method"]): r["side_information"] for r in records if r.get("side_information")},
    )


def _optimizer(record: Record) -> str | None:
    options = recorded.own_text((record.get("options") or {}).items())
    return f"{record['optimizer']} ({options})" if options and record.get("optimizer") else record.get("optimizer")


def _verdicts(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Return the verdicts on final trainings by method: from released values, and from diagnostics."""
    finals = recorded.by_method(recorded.in_phase(records, "final"))
    released = {method: runs[0]["released"] for method, runs in finals.items() if runs[0].get("released")}
    found = {
        "released": {method: released_verdict(held) for method, held in released.items()},
        "diagnoses": {
            method: verdict(recorded.diagnosis(runs), _second_moment(runs[0].get("optimizer")))
            for method, runs in recorded.diagnosed(records).items()
        },
    }
    words = {"%": " %"}
    if any(map(recorded.trains_locally, records)):  # of user-level training
        words |= {"gradients": "updates", "larger batch": "larger cohort", "fewer steps": "fewer rounds"}
    for verdicts in found.values():
        for method, old in product(verdicts, words):
            verdicts[method] = verdicts[method].replace(old, words[old])
    return found


def _second_moment(optimizer: str | None) -> SecondMoment:
    kind = optim.OPTIMIZERS.get(optimizer or "", optim.PrivateOptimizer)
    if issubclass(kind, Debiased):
        return "debiased"
    biased = (optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adagrad, optim.Yogi, optim.MicroAdam)
    if issubclass(kind, biased):
        return "biased"
    without_noise = (optim.SGD, optim.MomentumSGD, optim.RMSpropPub, optim.AdamPub, optim.MirrorDescent)
    return "none" if issubclass(kind, without_noise) else "unknown"


def _draw_into(folder: Path, records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Draw plots and write the wide ones as PNG; return, by plot, "wide" and "narrow" as SVG in base64."""
    watched, finals = recorded.diagnosed(records), recorded.by_method(recorded.in_phase(records, "final")).values()
    moves = any(all(len(run.get("curve") or ()) > 1 for run in runs) for runs in finals)
    draws = {
        "accuracy": (moves, figures.accuracy_figure),
        "seeds": (any(len(runs) > 1 for runs in finals), partial(figures.accuracy_figure, at_end=True)),
        "tuning": (recorded.tuned_names(records), figures.tuning_figure),
        "groups": (recorded.groups_of(records), figures.groups_figure),
        "diagnosis": (watched, figures.diagnosis_figure),
        "moments": (any(map(recorded.histograms, watched.values())), figures.moments_figure),
    }
    images: dict[str, dict[str, str]] = {}
    for name, (is_shown, draw) in draws.items():
        # A plot of an earlier report in this folder would show other runs.
        (folder / f"{name}.png").unlink(missing_ok=True)
        if is_shown:
            (folder / f"{name}.png").write_bytes(figures.png(partial(draw, records)))
            sizes = {"wide": False, "narrow": True}
            drawn = {size: figures.svg(partial(draw, records, narrow=narrow)) for size, narrow in sizes.items()}
            images[name] = {size: base64.b64encode(image).decode() for size, image in drawn.items()}
    return images


def write_index(name: str, folder: Path, /, **values: Any) -> Path:
    """Write index.html, which needs no other file, from the template of this name; return its path."""
    own = jinja2.PackageLoader("privgrad_lab", "report")
    loader = jinja2.ChoiceLoader([own, jinja2.PackageLoader("privgrad", "statement")])
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.filters.update(epsilon=texts.epsilon_text, short=_short)
    index = folder / "index.html"
    index.write_text(environment.get_template(name).render(values), encoding="utf-8")
    return index


def _headline(records: Sequence[Record], rows: Sequence[Mapping[str, Any]], *, protects: bool) -> str:
    """Return the result in a sentence: that of a private training, or the best mean and what is level with it."""
    on, key, name = recorded.measured_on(records), recorded.leading(records), recorded.lead_of(records)
    private = [row for row in rows if not row["non_private"]] or rows
    finite = (row for row in private if recorded.is_finite(row["lead"]["mean"]))
    ranked = sorted(finite, key=lambda row: row["lead"]["mean"], reverse=not recorded.is_cost(key))
    if not ranked:
        return f"No method has a {on} {name} for all of its final runs, so none is best."
    best, *rest = ranked
    text = texts.row_texts(best)
    if len(records) == 1 and records[0].get("seed") is None:  # a single training without a research seed
        ends = records[0].get("test_interval")
        within = "" if ends is None else f" ({texts.interval_text(ends, text['score'])})"
        if protects:
            return f"{texts.private_text(name, text['lead'], best['epsilon'])}{within}."
        return f"{best['method']} reaches a {on} {name} of {text['lead']}{within} in one training."
    over = f"{text['lead']} over {best['seeds'] if best['seeds'] > 1 else 'one'} seed{'s' * (best['seeds'] > 1)}"
    if not rest:
        return f"{best['method']} reaches a {on} {name} of {over}; there is no other method to compare it with."
    lead = f"{best['method']} has the {'lowest' if recorded.is_cost(key) else 'best'} mean {on} {name}, {over}"
    finals = recorded.by_method(recorded.in_phase(records, "final"))
    found = {row["method"]: recorded.difference(finals[best["method"]], finals[row["method"]], key) for row in rest}
    if None in found.values():
        return f"{lead}; by these seeds, the lead may be chance."
    if close := [method for method, gap in found.items() if gap and gap["verdict"] != "better"]:
        return f"{lead}: level with {' and '.join(close)}, by 95 % intervals over paired seeds."
    return f"{lead}: better than {' and '.join(found)}, by 95 % intervals over paired seeds."


def _short(value: Any) -> str:
    """Return a setting as text, with six significant digits and 1e-5 for 1e-05."""
    if value is None or isinstance(value, jinja2.Undefined):
        return "not recorded"
    return f"{value:.6g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def _privacy(records: Sequence[Record], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    records = [record for record in records if not record.get("non_private")] or records
    rows = [row for row in rows if not row["non_private"]] or rows
    epsilon = recorded.summary_row("all", records)["epsilon"]
    fixed = [row["method"] for row in rows if row["sampling"] == SHUFFLED]
    budgets = {row["epsilon"] for row in rows if row["seeds"]}
    return {
        "epsilon": epsilon,
        "simulates": recorded.simulated_epsilon(records),
        "delta": max(recorded.numbers(recorded.in_phase(records, "final"), "delta"), default=None),
        "fixed": ", ".join(fixed),
        # Runs of one plan differ in epsilon at most by rounding.
        "unequal": len(budgets) > 1 and (None in budgets or not all(e <= 1.01 * min(budgets) for e in budgets)),
        # None: not recorded
        "covered": False if fixed else all(row["sampling"] is not None for row in rows) or None,
        "runs": sum(row["trainings"] for row in rows),
        "nonfinite": sum(int(record.get("raw_nonfinite_examples") or 0) for record in records),
    }


def _facts(records: Sequence[Record], metadata: Mapping[str, Any], privacy: Mapping[str, Any]) -> Facts:
    """Return the facts of the privacy statement: on all trainings together, or on each one if no total is known."""
    total = metadata.get("total_epsilon")
    size = privacy["epsilon"] if total is None else total["value"]
    plan: dict[str, Any] = metadata.get("plan") or {}
    sources = dict.fromkeys(record["side_information"] for record in records if record.get("side_information"))
    more = {"research_seed": plan.get("seed") is not None, "side_information": "; ".join(sources) or None}
    more |= {"optimizers": [record.get("optimizer") for record in records]}
    more |= {"noise_memory": {"bands": plan["bands"]}} if str(plan.get("bands", 1)) != "1" else {}
    more |= {"simulates": plan, "noise_multiplier": 0} if privacy["simulates"] else {}
    return Facts(
        epsilon=math.inf if size is None else size,
        delta=privacy["delta"] or plan.get("delta") or math.nan,
        releases=privacy["runs"],
        covered_by_accountant=privacy["covered"],
        privacy_unit=plan.get("privacy_unit") or "example",
        num_examples=plan.get("num_examples"),
        at_least=plan.get("sampling") != "truncated",
        plans=[{**plan, **more}],
        is_each=privacy["runs"] > 1 and total is None,
        **(metadata.get("doubts") or {}),
    )
