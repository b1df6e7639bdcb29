"""Tables and figures of the papers, each a TOML here, run and set beside the paper's numbers."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from privgrad.errors import did_you_mean, expected
from privgrad.experiments import bias, probes
from privgrad.experiments.context import context
from privgrad.experiments.records import SOMETIMES_TUNED, in_phase, mean, measured_on, std
from privgrad.experiments.runs import Record, claim, compare, describe, read_records
from privgrad.experiments.spec import Spec, check_spec
from privgrad.experiments.toy import toy


def items() -> list[str]:
    """The names of all items, as paper/item."""
    return sorted(f"{paper.name}/{item.name.removesuffix('.toml')}" for paper, item in _files())


def reproduce(
    name: str,
    out: Path,
    *,
    data: Path | None = None,
    smoke: bool = False,
    so_far: bool = False,
    progress: bool = True,
    command: str = "",
) -> tuple[dict[str, Any], Table]:
    """Run an item, or go on with it.

    Writes to out: runs.jsonl (every run, or every step looked at), table.json, table.txt, plots, and for a comparison
    the report.

    Args:
        name: paper/item.
        out: folder; a folder with an item's runs.jsonl and spec.json is gone on with.
        data: the paper's own data, where the item says it can take it; else its stand-in is used.
        smoke: a tiny version that shows that it runs; its numbers mean nothing.
        so_far: run nothing; show what an interrupted comparison has found.
        progress: show a progress bar.
        command: told in the report.
    Returns:
        The numbers, ours and the paper's; and the same as a table.
    Raises:
        PrivacyError: an unknown item, a folder of another one, or an item that cannot be so.
    """
    raw = _prepared(name, data=data, smoke=smoke)
    probe, stands_in_for = raw.pop("probe", {}), raw.pop("stands_in_for", None)
    kind = raw.get("kind", "comparison")
    if so_far and kind not in ("comparison", "table"):
        raise expected("reproduce", "--so-far", "to be for a comparison", name, "run it whole")
    if kind == "table":
        found, table = _table(raw, out, smoke=smoke, so_far=so_far, progress=progress)
    elif kind in _WHOLE:
        found, table = _WHOLE[kind](raw, out, progress=progress)
    else:
        spec = check_spec({key: value for key, value in raw.items() if key != "kind"}, name)
        if kind in _PROBES:
            found, table = _PROBES[kind](spec, probe, out, progress=progress)
        else:
            records = _records(spec, out, so_far=so_far, progress=progress)
            found, table = _beside_paper(spec, records, stands_in_for)
            _report(spec, records, out, command)
    (out / "table.json").write_text(json.dumps(found, indent=1))
    with (out / "table.txt").open("w") as file:
        Console(file=file, width=120).print(table)
    return found, table


# Kinds that read their whole file; and those that look along trainings of a spec, at what their [probe] says.
_WHOLE: dict[str, Callable[..., tuple[dict[str, Any], Table]]] = {
    "noise-moments": probes.noise_moments,
    "toy": toy,
}
_PROBES: dict[str, Callable[..., tuple[dict[str, Any], Table]]] = {
    "moments": probes.moments,
    "cosines": probes.cosines,
    "bias": bias.bias,
    "runtime": bias.runtime,
}


def _files() -> Iterator[tuple[Traversable, Traversable]]:
    for paper in resources.files("privgrad.experiments").joinpath("items").iterdir():
        for item in paper.iterdir() if paper.is_dir() else ():
            if item.name.endswith(".toml"):
                yield paper, item


def _load(name: str) -> dict[str, Any]:
    """An item's tables, over those of the item that it names as its base."""
    for paper, item in _files():
        if f"{paper.name}/{item.name}" == f"{name}.toml":
            raw = tomllib.loads(item.read_text())
            base = raw.pop("base", None)
            # The paper's numbers are those of one item only.
            return raw if base is None else _merged(_load(base) | {"paper": {}}, raw)
    remedy = did_you_mean(name, items(), "choose one")
    raise expected("reproduce", "item", f"to be one of {', '.join(items())}", repr(name), remedy)


def _prepared(
    name: str, *, data: Path | None = None, smoke: bool = False, methods: Sequence[str] = ()
) -> dict[str, Any]:
    """An item's tables with all its methods or those named; on the paper's own data or in its tiny version."""
    raw = _load(name)
    tiny, given = raw.pop("smoke", dict[str, Any]()), raw.pop("given", None)
    few = tiny.pop("only", [])
    if data is not None:
        if given is None:
            raise expected("reproduce", "--data", f"to be absent for {name}", data, "it has one source of data")
        if smoke:
            raise expected("reproduce", "--data", "to be absent for --smoke", data, "smoke takes small data of its own")
        raw = _merged(raw, _merged(given, {"data": {"path": str(data)}}))
        raw.pop("stands_in_for", None)
    if smoke:
        raw = _merged(raw, tiny)
        raw["title"] = f"SMOKE, numbers mean nothing: {raw['title']}"
        if "methods" in raw:
            raw["paper"] = {}  # its numbers are of another size
            raw["methods"] = [_smallest(method, raw.get("tuning", {})) for method in raw["methods"]]
            # The small data may be those that were to be public elsewhere.
            if raw["data"].get("elsewhere", {}).get("name") == raw["data"]["name"]:
                del raw["data"]["elsewhere"]
                for method in raw["methods"]:
                    method.get("public", {}).pop("other", None)
    wanted = methods or (few if smoke else [])
    if wanted:
        raw["methods"] = [method for method in raw["methods"] if method["name"] in wanted]
    return raw


def _smallest(method: Mapping[str, Any], tuning: Mapping[str, Any]) -> dict[str, Any]:
    """The method with one entry of each grid; of a grid that is to grow, all."""
    cut = ("max_grad_norm", "radius") if tuning.get("extend") else ("max_grad_norm", "radius", "lr")
    small = {key: value[:1] if key in cut and isinstance(value, list) else value for key, value in method.items()}
    if "warm_start" in method:
        small["warm_start"] = method["warm_start"] | {"epochs": 1}
    return small | {key: _smallest(method[key], {}) for key in ("perturb", "local") if key in method}


def _merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables within tables are merged; all else is replaced."""
    merged = dict(raw)
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def _records(spec: Spec, out: Path, *, so_far: bool, progress: bool) -> list[Record]:
    if not so_far:
        return compare(spec, out, progress=progress)
    claim(out, describe(spec), look_only=True)
    return read_records(out)


class _Row(BaseModel):
    """One data set of a table: an item, and which of its methods stands in each column."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    item: str
    methods: list[str]  # "" leaves a column empty
    paper: list[float | str]  # a string where the paper has none


class _TableItem(BaseModel):
    """An item of kind "table": methods of other items, side by side."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    title: str
    columns: list[str]
    rows: list[_Row]


def _table(
    raw: Mapping[str, Any], out: Path, *, smoke: bool, so_far: bool, progress: bool
) -> tuple[dict[str, Any], Table]:
    """Score (or loss, where there is none) of each row's methods, each row in a folder of its own."""
    item = _TableItem.model_validate(raw)
    claim(out, json.dumps(raw, indent=1), look_only=so_far)
    found: dict[str, Any] = {}
    table = Table(
        "", *item.columns, title=item.title, caption="Mean ± standard deviation over seeds; below, the paper."
    )
    for row in item.rows:
        base = _prepared(row.item, smoke=smoke, methods=row.methods)
        stands_in_for = base.pop("stands_in_for", None)
        base["paper"] = {}
        spec = check_spec(base, row.item)
        records = _records(spec, out / row.item.replace("/", "-"), so_far=so_far, progress=progress)
        numbers, _ = _beside_paper(spec, records, None)
        cells: list[str] = []
        found[row.title] = {"stands_in_for": stands_in_for}
        for column, name, theirs in zip(item.columns, row.methods, row.paper, strict=True):
            everything = numbers[name]["groups"].get("all") if name else None
            number = "loss" if everything is None or everything["accuracy"]["mean"] is None else "accuracy"
            ours = None if everything is None else everything[number]
            found[row.title][column] = {"method": name, number: ours, "paper": theirs}
            cells.append(_cells(everything | {"paper": {}}, number)[0] if everything else "–")
        table.add_row(row.title, *cells)
        table.add_row(f"  paper ({stands_in_for})" if stands_in_for else "  paper", *map(str, row.paper), style="dim")
    return found, table


def _report(spec: Spec, records: Sequence[Record], out: Path, command: str) -> None:
    if in_phase(records, "final"):
        from privgrad.experiments.report import write_report

        write_report(records, context(spec, records, out, command=command), out)


def _beside_paper(spec: Spec, records: Sequence[Record], stands_in_for: str | None) -> tuple[dict[str, Any], Table]:
    """By method, on all test examples and by group of classes: mean and spread, the paper's number, and, on the
    paper's own data, the difference.
    """
    found: dict[str, Any] = {}
    score = next((record["score"] for record in records), None)
    shown = {"loss": "loss"} | ({} if score is None else {"accuracy": score})
    paper = f"paper,\n{stands_in_for}" if stands_in_for else "paper"
    on = {"test": "all (test)", "training": "all (training)"}[measured_on(records)]
    tuned = ["max_grad_norm", "lr"]
    tuned += [key for key in SOMETIMES_TUNED if any(getattr(spec.grid(m)[0], key) is not None for m in spec.methods)]
    beside = slice(2 if spec.paper else 1)  # without the paper's numbers, no columns for them
    headers = [header for title in shown.values() for header in (title, paper)[beside]]
    title = ", ".join(tuned).replace("max_grad_norm", "C").replace("_", " ")
    table = Table(title=spec.title)
    for header in ("method", title, "classes", *headers):
        table.add_column(header, overflow="fold")
    for method in spec.methods:
        runs = [record for record in records if record["method"] == method.name]
        finals, theirs = in_phase(runs, "final"), spec.paper.get(method.name, {})
        rows: dict[str, Any] = {}
        if finals:
            tests = [{"loss": final["test_loss"], "accuracy": final["test_accuracy"]} for final in finals]
            rows["all"] = {"title": on} | _numbers(tests, theirs.get("all", {}), stands_in_for)
        for index, group in enumerate(finals[0]["curve"][-1].get("raw_groups", []) if finals else []):
            key = f"{group['from']:g}"
            groups = [final["curve"][-1]["raw_groups"][index] for final in finals]
            sizes = key if group["to"] == group["from"] else f"{key} to {group['to']:g}"
            rows[key] = {"title": f"{group['classes']:g} x {sizes}"}
            rows[key] |= _numbers(groups, theirs.get(key, {}), stands_in_for)
        tuning = in_phase(runs, "tuning")
        tried, norms = (sorted({record[key] for record in tuning}) for key in ("lr", "max_grad_norm"))
        chosen = {key: finals[0].get(key) if finals else None for key in ("max_grad_norm", "lr", *SOMETIMES_TUNED)}
        found[method.name] = {
            **chosen,
            "lrs_tried": tried,
            "norms_tried": norms,
            "seeds": len(finals),
            "seeds_planned": len(spec.run.seeds),
            "fraction_floored": mean([f["fraction_floored"] for f in finals if f["fraction_floored"] is not None]),
            "raw_groups" if any(key != "all" for key in rows) else "groups": rows,
        }
        for index, row in enumerate(rows.values()):
            told = ", ".join(f"{chosen[key]:g}" for key in tuned if chosen[key] is not None)
            first = (method.name, told) if index == 0 else ("", "")
            table.add_row(*first, row["title"], *(cell for n in shown for cell in _cells(row, n)[beside]))
        if not rows:
            table.add_row(
                method.name, "–", f"no final run yet; tried {', '.join(f'{lr:g}' for lr in tried) or 'nothing'}"
            )
    done, planned = (sum(row[key] for row in found.values()) for key in ("seeds", "seeds_planned"))
    sources = ", ".join(sorted({record["data"] for record in records}))
    spread = "Mean ± standard deviation over seeds"
    private = any("raw_groups" in row for row in found.values()) or measured_on(records) == "training"
    groups = "; classes x examples of each, and all that is on training examples: NOT PRIVATE" if private else ""
    table.caption = f"{sources}. {spread}{groups}." + (
        f" {done} of {planned} final runs were done." if done < planned else ""
    )
    return found, table


def _numbers(
    runs: Sequence[Mapping[str, Any]], paper: Mapping[str, float], stands_in_for: str | None
) -> dict[str, Any]:
    """Loss and accuracy: mean, standard deviation, and where the paper has it of the same data, the difference."""
    found: dict[str, Any] = {"paper": dict(paper)}
    for number in ("loss", "accuracy"):
        values = [run[number] for run in runs if run[number] is not None]
        found[number] = {"mean": mean(values), "std": std(values)}
        if number in paper and values and not stands_in_for:
            found[number]["difference"] = found[number]["mean"] - paper[number]
    return found


def _cells(row: Mapping[str, Any], number: str) -> tuple[str, str]:
    """Ours and the paper's, as text."""
    form = "{:.3g}" if number == "loss" else "{:.1%}"
    ours, spread = row[number]["mean"], row[number]["std"]
    told = (
        "–"
        if ours is None
        else form.format(ours) + ("" if spread is None else f" ± {form.replace('3g', '1g').format(spread)}")
    )
    return told, form.format(row["paper"][number]) if number in row["paper"] else "–"
