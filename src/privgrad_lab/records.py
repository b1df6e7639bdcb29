"""The folder of an experiment and its records, and the numbers that tables and plots show of them.

Accuracies and losses are NOT private for the examples on which they were measured.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scipy.stats import t

from privgrad.errors import PrivacyError, expected, readable
from privgrad.types import SHUFFLED
from privgrad_lab import old_spelling
from privgrad_lab.calls import imported
from privgrad_lab.metrics import title
from privgrad_lab.spec import Candidate, Spec, plain

Record = dict[str, Any]


def describe(spec: Spec) -> str:
    """Return the text of spec.json, which identifies a folder's experiment."""
    return spec.model_dump_json(indent=1, exclude_defaults=True)


def claim(out: Path, description: str) -> None:
    """Create a folder for an experiment whose spec.json has this text, or check that it holds runs of this one only."""
    require_same(out, description)
    path = out / "spec.json"
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != description:
        whole = path.with_suffix(".new")  # a process that is killed leaves no half of a file
        whole.write_text(description)
        os.replace(whole, path)


def require_same(out: Path, description: str) -> None:
    """Raise PrivacyError if `out` is a file, or holds runs of a spec of another description."""
    if out.exists() and not out.is_dir():
        raise expected("experiments", "--out", "to be a folder", f"the file {out}")
    if got := _held(out, description):
        remedy = "choose another --out, or add --restart to move the old folder aside"
        raise expected("experiments", f"{out}", "to hold runs of this spec", got, remedy)


def _held(out: Path, description: str) -> str:
    path = out / "spec.json"
    if not path.exists():
        return "runs without their spec.json" if (out / "runs.jsonl").exists() else ""
    try:
        old, new = (_of_trainings(old_spelling.canonical(json.loads(text))) for text in (path.read_text(), description))
    except (TypeError, ValueError, AttributeError, LookupError):
        return "a spec.json that cannot be read"
    # The name of a function does not count: it may have moved since. Only the function counts.
    keys = [key for key in {**old, **new} if _resolved(old.get(key)) != _resolved(new.get(key))]
    return f"runs of a spec with a different {', '.join(keys)}" if keys else ""


def _of_trainings(described: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a description that decides numbers: not what is only shown, nor in which order.

    Nor the device: noise of another generator and other rounding are as another seed, and each record names its own.
    """
    run = {name: value for name, value in described.get("run", {}).items() if name not in ("tensorboard", "device")}
    found = {name: value for name, value in described.items() if name not in ("title", "paper")}
    if "total_epsilon" not in described.get("privacy", {}):  # in a private comparison, the order decides the draw
        run["metrics"] = sorted(run.get("metrics", ()))
        found["methods"] = sorted(described.get("methods", ()), key=lambda method: method["name"])
    else:
        tables = [table for method in described["methods"] for _, table in sorted(method.items())]
        grids = [[name for name in table if type(table[name]) is list] for table in tables if type(table) is dict]
        found["order of values to try"] = grids
    return found | {"run": run}


def arranged(spec: Spec, records: Sequence[Record]) -> list[Record]:
    """Return records in the order of a spec's methods; the metrics of a comparison in the order of its metrics."""
    methods, asked = [method.name for method in spec.methods], spec.run.metrics
    for record in records:
        if (own := record.get("metrics")) and "test_interval" not in record:  # which is that of the first metric then
            record["metrics"] = {name: own[name] for name in sorted(own, key=(*asked, *own).index)}
    return sorted(records, key=lambda record: methods.index(record["method"]))


def _resolved(value: Any) -> Any:
    """Return a part of a spec with functions in place of their names "package.module:function"."""
    if isinstance(value, dict):
        return {key: _resolved(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_resolved(part) for part in value]
    if isinstance(value, str) and ":" in value:
        with suppress(PrivacyError):  # a title, say, or a module that is gone: it is compared as text
            return imported("spec.json", value)
    return value


def is_begun(out: Path) -> bool:
    """Return whether the folder holds releases, results, or the commitment of a private comparison."""
    return any(next(out.rglob(name), None) is not None for name in ("ledger.jsonl", "commitment.txt", "runs.jsonl"))


def read_records(out: Path) -> list[Record]:
    """Return the records of a folder's runs.jsonl; an empty list if there is no such file."""
    path = out / "runs.jsonl"
    if not path.exists():
        return []
    remedy = "delete the damaged line; the run then resumes from its own folder"
    with readable("experiments", f"{path}", "to be JSON lines", remedy):
        return [json.loads(line) for line in path.read_text().splitlines()]


def make_secret(folder: Path) -> None:
    """Create a folder that only its owner may open, for files that no epsilon covers."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def append(out: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a folder's runs.jsonl in one write."""
    with (out / "runs.jsonl").open("ab", buffering=0) as file:  # several processes may append
        file.write("".join(json.dumps(record) + "\n" for record in records).encode())


SOMETIMES_TUNED = ("radius", "local_lr")  # in addition to the rate and the clipping norm
TUNED = ("noise_step", "lr", "max_grad_norm", *SOMETIMES_TUNED)
_MEASURED = ("raw_train_loss", "validation_accuracy", "validation_loss")  # what tuning may compare
FEW_CLIPPED = 0.02  # a smaller share of clipped gradients means that C is too large


def summarize(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Reduce the records of runs, of phase "tuning" or "final", to one row per method, in order of first appearance.

    Mean and standard deviation (ddof = 1) are over the final runs. A mean is None unless every final run has the
    number: a mean over the other runs would flatter a method that diverged. The same holds for epsilon. The shares
    raw_clip_fraction and raw_least_clipped are NOT private, and None for private runs. "lead" is the metric asked for
    first, and "difference" compares it with that of the first method, as `difference` does; "differences" has them all.
    """
    records = list(records)
    methods, key = by_method(records), leading(records)
    keys = dict.fromkeys(["test_accuracy", "test_loss", *(one for run in records for one in run.get("metrics") or ())])
    none = {"difference": None, "differences": {}}
    rows: list[dict[str, Any]] = [summary_row(method, runs) | none for method, runs in methods.items()]
    judged = [row for row in rows if row["seeds"] and not row["non_private"]]
    finals = [in_phase(methods[f"{row['method']}"], "final") for row in judged]
    for row, runs in zip(judged[1:], finals[1:], strict=True):
        row["differences"] = {name: difference(runs, finals[0], name) for name in keys}
        row["difference"] = row["differences"][key]
    return rows


def leading(records: Sequence[Record]) -> str:
    """Return the key of the number that leads: the metric asked for first, else the score, or without one the loss."""
    asked = (name for record in records for name in record.get("metrics") or () if ":" not in name)
    is_scored = any(record.get("score", "accuracy") is not None for record in records)
    name = next(asked, "test_accuracy" if is_scored else "test_loss")
    return "test_accuracy" if any(record.get("score") == name for record in records) else name


def lead_of(records: Sequence[Record]) -> str:
    """Return the name for tables of the number that leads."""
    key = leading(records)
    return score_of(records) if key == "test_accuracy" else title(key.removeprefix("test_"))


def difference(runs: Sequence[Record], others: Sequence[Record], key: str) -> dict[str, Any] | None:
    """Return by how much final runs differ from those of another method with the same seeds, and a verdict in words.

    The 95 % interval is that of Student's t over the differences of the seeds. None without two finite differences.
    """
    pairs = (zip((run.get("seed") for run in own), numbers(own, key), strict=False) for own in (runs, others))
    ours, theirs = map(dict[Any, float], pairs)
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(gaps) < 2 or not all(map(math.isfinite, gaps)) or (gaps[0] and math.isclose(min(gaps), max(gaps))):
        return None  # equal differences would claim certainty
    center = statistics.fmean(gaps)
    half = float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    verdict = "level" if abs(center) <= half else "better" if (center > 0) != is_cost(key) else "worse"
    return {"to": others[0]["method"], "mean": center, "interval": [center - half, center + half], "verdict": verdict}


def summary_row(method: str, runs: Sequence[Record]) -> dict[str, Any]:
    """Return the row of `summarize` for the runs of one method."""
    finals = in_phase(runs, "final")
    tuning, schemes = in_phase(runs, "tuning"), {run.get("sampling") for run in runs}
    chosen = {key: _only(run.get(key) for run in finals) for key in TUNED}  # None if the final runs differ in it
    tried = {key: {run[key] for run in tuning if run.get(key) is not None} for key in TUNED}
    # A rate is at the edge of those that were tried with the same C.
    tried["lr"] = {run["lr"] for run in tuning if run.get("max_grad_norm") == chosen["max_grad_norm"]}
    clipped = numbers([without_raw(run) for run in finals], "raw_clip_fraction")
    led = numbers(finals, leading(runs))
    named = dict.fromkeys(name for run in finals for name in run.get("metrics") or ())
    return {
        "method": method,
        "score": score_of(runs),
        "non_private": any(run.get("non_private") for run in runs),
        "lead": {"metric": lead_of(runs), "mean": mean(led), "std": std(led)},
        **chosen,
        # How the rate was given or tuned; a noise_step together with an lr was measured.
        "rate": "noise_step" if all(map(is_by_noise, finals or tuning)) and runs else "lr",
        "own": _only(own_text(run.get("own") or ()) for run in finals) or "",
        "bands": _only(run.get("bands") for run in finals),
        **{f"{key}_at_edge": _at_edge(chosen[key], tried[key]) for key in ("lr", *SOMETIMES_TUNED)},
        "norm_at_edge": _at_edge(chosen["max_grad_norm"], tried["max_grad_norm"]),
        "trainings": _trainings(runs),
        "tuning_trainings": len(tuning),
        "seeds": len(finals),
        "test_accuracy_mean": mean(numbers(finals, "test_accuracy")),
        "test_accuracy_std": std(numbers(finals, "test_accuracy")),
        "test_loss_mean": mean(numbers(finals, "test_loss")),
        "test_loss_std": std(numbers(finals, "test_loss")),
        "metrics": {one: {"mean": mean(numbers(finals, one)), "std": std(numbers(finals, one))} for one in named},
        # NaN counts as the largest epsilon.
        "epsilon": max(numbers(finals, "epsilon"), key=lambda value: (math.isnan(value), value), default=None),
        "simulates_epsilon": max(numbers(finals, "simulates_epsilon"), default=None),
        "sampling": SHUFFLED if SHUFFLED in schemes else (schemes.pop() if len(schemes) == 1 else None),
        "raw_clip_fraction": mean(clipped),
        "raw_least_clipped": min(clipped, default=None),
        **{name: mean(numbers(finals, name)) for name in ("fraction_floored", "seconds", "updates")},
    }


def is_by_noise(run: Record) -> bool:
    """Return whether a run's rate was given or tuned as a noise step."""
    return run.get("lr") is None and run.get("noise_step") is not None


def without_raw(run: Record) -> Record:
    """Return a record without the keys "raw_...", computed before the noise, if its run is private, without a seed."""
    if run.get("seed") is not None:
        return run

    def shown(values: Record) -> Record:
        return {key: value for key, value in values.items() if not key.startswith("raw_")}

    return shown(run) | {"curve": list(map(shown, run.get("curve") or ()))}


def _trainings(runs: Sequence[Record]) -> int:
    """Return the number of trainings. A tuning run that also served as a final run counts once."""
    keys = ("seed", "seconds", "raw_train_loss")
    known = [run for run in in_phase(runs, "tuning") if run.get("raw_train_loss") is not None]
    tuning = {repr([run[key] for key in keys]) for run in known}
    return sum(run.get("phase") == "tuning" or repr([run.get(key) for key in keys]) not in tuning for run in runs)


def measured_on(records: Iterable[Record]) -> str:
    """Return the examples on which accuracy and loss were measured: "test", or "training" (NOT private)."""
    return "training" if any(record.get("measured_on") == "training" for record in records) else "test"


def rate_text(values: Any) -> str:
    """Return the rate of a candidate as text: "u0.06" for a noise step, or "lr0.1"."""
    return f"u{values.noise_step:g}" if values.lr is None else f"lr{values.lr:g}"


def own_text(own: Iterable[Sequence[Any]]) -> str:
    """Return the values of `tune` as text: "momentum 0.9", say."""
    return ", ".join(f"{name.rpartition('.')[2]} {_short(value)}" for name, value in own)


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _only(values: Iterable[Any]) -> Any:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _at_edge(chosen: float | None, tried: set[float]) -> bool | None:
    return chosen in (min(tried), max(tried)) if chosen is not None and len(tried) > 1 else None


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by method, in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record["method"]), []).append(record)
    return groups


def trains_locally(record: Record) -> bool:
    """Return whether each user trained on its own examples; otherwise people contribute gradients."""
    return record.get("local_lr") is not None


def in_phase(records: Iterable[Record], phase: str) -> list[Record]:
    """Return the records of one phase: "tuning" or "final"."""
    return [record for record in records if record.get("phase") == phase]


def numbers(runs: Sequence[Record], key: str) -> list[float]:
    """Return the values of one key, or of one metric, or an empty list if any run lacks it."""
    values = [{**(run.get("metrics") or {}), **run}.get(key) for run in runs]
    return [] if None in values else [float(value) for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None for no values."""
    return math.fsum(values) / len(values) if values else None


def std(values: Sequence[float]) -> float | None:
    """Return the standard deviation (ddof = 1); None for fewer than two values, NaN if one is not finite."""
    if len(values) < 2:
        return None
    # statistics.stdev raises on values that are not finite.
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def is_finite(value: float | None) -> bool:
    """Return whether the value is a finite number."""
    return value is not None and math.isfinite(value)


def tuned_by(records: Sequence[Record]) -> str:
    """Return the key of the measurement that tuning compared."""
    tuning = in_phase(records, "tuning")
    told = (run["tuned_by"] for run in tuning if run.get("tuned_by"))
    known = (key for key in _MEASURED if any(run.get(key) is not None for run in tuning))  # of records without it
    return next(told, next(known, "validation_accuracy"))


def is_cost(key: str) -> bool:
    """Return whether a smaller value of a measurement is better: of a loss or an error."""
    return key.endswith(("loss", "error"))


def candidate_of(record: Record) -> Candidate:
    """Return the tuned values of one run."""
    own = tuple((str(name), plain(value)) for name, value in record.get("own") or ())
    # A noise step together with a learning rate was measured, not tuned.
    step = record.get("noise_step") if is_by_noise(record) else None
    given: dict[str, Any] = {key: record.get(key) for key in ("max_grad_norm", "lr", *SOMETIMES_TUNED)}
    return Candidate(**given, noise_step=step, own=own)


def results(runs: Iterable[Record], key: str) -> dict[Candidate, list[float]]:
    """Return one measurement of one method's tuning runs, by candidate and seed; nan for a run without it."""
    found: dict[Candidate, list[float]] = {}
    for run in in_phase(runs, "tuning"):
        value = run.get(key)
        found.setdefault(candidate_of(run), []).append(math.nan if value is None else value)
    return found


def score_of(records: Iterable[Record]) -> str:
    """Return the name for tables of the score that records hold under the key accuracy: that or another one."""
    return next((title(record["score"]) for record in records if record.get("score")), "accuracy")


def simulated_epsilon(records: Iterable[Record]) -> float | None:
    """Return the largest finite epsilon of a plan that final runs simulate, whose own is infinite; None without any."""
    simulated = (record.get("simulates_epsilon") for record in in_phase(records, "final"))
    return max((epsilon for epsilon in simulated if epsilon is not None and is_finite(epsilon)), default=None)


def tuned_seeds(records: Sequence[Record], name: str) -> dict[str, list[tuple[float, list[float]]]]:
    """Return, by method, the tried values of one entry of TUNED in ascending order, each with the results of all seeds.

    The results are at the best of all other tuned values. Values at which a run diverged are left out.
    """
    result, key = {}, tuned_by(records)
    best = min if is_cost(key) else max
    for method, runs in by_method(in_phase(records, "tuning")).items():
        found: dict[float, list[float]] = {}
        for candidate, measured in results(runs, key).items():
            if (value := getattr(candidate, name)) is not None and all(map(math.isfinite, measured)):
                found[value] = best(found.get(value, measured), measured, key=statistics.fmean)
        result[method] = sorted(found.items())
    return result


def tuned_names(records: Sequence[Record]) -> list[str]:
    """Return the entries of TUNED for which some method tried more than one value."""
    return [name for name in TUNED if any(len(points) > 1 for points in tuned_seeds(records, name).values())]


def curve(
    runs: Sequence[Record], measured: Callable[[Record], float | None], *, along: str = "epsilon"
) -> list[tuple[float, float, float, float]]:
    """Return points (epsilon or step, mean, mean - std, mean + std) at the steps that all runs of a method recorded."""
    finite = ([p for p in run.get("curve") or () if is_finite(p.get(along)) and is_finite(measured(p))] for run in runs)
    curves = [{point["step"]: point for point in points} for points in finite]
    points = []
    for step in sorted(set.intersection(*map(set, curves))):
        values = [float(measured(curve[step]) or 0.0) for curve in curves]
        middle, spread = statistics.fmean(values), std(values) or 0.0
        place = max(curve[step][along] for curve in curves)
        points.append((place, middle, max(min(0.0, middle), middle - spread), middle + spread))
    return points


def groups_of(records: Sequence[Record]) -> list[Mapping[str, float]]:
    """Return the groups of classes by frequency, or an empty list if the runs were not measured by group."""
    points = (point for record in records for point in (record.get("curve") or ())[-1:])
    return next((point["raw_groups"] for point in points if "raw_groups" in point), [])


def diagnosed(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the final runs by method, for methods whose runs all have rows of diagnostics.RawRecorder."""
    finals = by_method(in_phase(records, "final"))
    return {
        method: runs
        for method, runs in finals.items()
        if all(any("raw_layers" in row for row in run.get("curve") or ()) for run in runs)
    }


def diagnosis(runs: Sequence[Record]) -> dict[str, float]:
    """Return RawRecorder's numbers as means over all rows of the runs; nan for a number that no row has."""
    rows = [row for run in runs for row in run["curve"] if "raw_layers" in row]
    names = ("raw_clip_fraction", "raw_kept", "raw_signal_to_noise", "noise_share")
    finite = {name: [row[name] for row in rows if is_finite(row[name])] for name in names}
    return {name: statistics.fmean(values or [math.nan]) for name, values in finite.items()}


def histograms(runs: Sequence[Record]) -> dict[str, list[float]]:
    """Return RawRecorder's last histograms over all seeds: "edges", and by kind the share of coordinates per bin."""
    last = [run["curve"][-1]["raw_moments"] for run in runs if "raw_moments" in run["curve"][-1]]
    if not last:
        return {}
    found: dict[str, list[float]] = {"edges": last[0]["edges"]}
    for kind in (kind for kind in last[0] if kind != "edges"):
        counts = [sum(column) for column in zip(*(histogram[kind] for histogram in last), strict=True)]
        found[kind] = [count / sum(counts) for count in counts]
    return found
