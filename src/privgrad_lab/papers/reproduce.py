"""Reproduce tables and figures of the papers: each is a TOML file in items/, compared with the paper's numbers."""

import inspect
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from privgrad.data import DataSet
from privgrad.errors import did_you_mean, expected, require_choice
from privgrad_lab import records as recorded
from privgrad_lab.build import autocast
from privgrad_lab.data import LOADERS
from privgrad_lab.data.fetching import source_of
from privgrad_lab.load_spec import check_spec
from privgrad_lab.papers import probes
from privgrad_lab.papers.toy_regression import Found, toy_regression
from privgrad_lab.records import Record
from privgrad_lab.report.metadata import metadata_of
from privgrad_lab.runner import checked_data, compare
from privgrad_lab.spec import DataTable, Device, MethodTable, Spec
from privgrad_lab.trial import Estimate, estimate
from privgrad_lab.tuner import judge

Announce = Callable[[str, Estimate], None]
LISTED = ("shows", "recorded", "hours")  # keys of an item that only the list of all items shows
_ITEMS = Path(__file__).with_name("items")


def items() -> list[str]:
    """Return the names of all items, as paper/item."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in _ITEMS.glob("*/*.toml"))


def reproduce(
    name: str,
    out: Path,
    *,
    data: Path | None = None,
    methods: Sequence[str] = (),
    smoke: bool = False,
    so_far: bool = False,
    device: Device = "auto",
    jobs: int = 1,
    progress: bool = True,
    announce: Announce | None = None,
    command: str = "",
) -> Found:
    """Run an item "paper/item", or resume it; return its numbers, ours and the paper's, and the same as a table.

    It writes to `out`: runs.jsonl (every run, or every measured step), table.json, table.txt, plots, and for a
    comparison the report. With `so_far`, nothing is run: the results of an interrupted comparison are shown. Each
    training may be on another device: "auto" is a GPU where there is one. `jobs` processes train at once. `announce`
    gets the name of each item, and what its trainings will take, before they start.
    """
    raw = prepared(name, data=data, smoke=smoke, methods=methods)
    probe, stands_in_for = raw.pop("probe", {}), raw.pop("stands_in_for", None)
    kind = raw.get("kind", "comparison")
    if so_far and kind not in ("comparison", "table"):
        raise expected("reproduce", "--so-far", "to be given for a comparison only", f"the item {name}")
    if kind == "table":
        own: Any = {"so_far": so_far, "progress": progress, "jobs": jobs}
        found, table = _table(raw, out, smoke=smoke, device=device, announce=announce, **own)
    elif kind in _WHOLE:
        found, table = _WHOLE[kind](raw, out, progress=progress)
    else:
        spec = _spec({key: value for key, value in raw.items() if key != "kind"}, name, device)
        if kind in _PROBES:
            if announce is not None and kind != "runtime" and not recorded.read_records(out):
                _announced(announce, name, kind, spec, out, checked_data(spec))
            with autocast(spec):
                found, table = _PROBES[kind](spec, probe, out, progress=progress)
        else:
            begin = None if announce is None else partial(_announced, announce, name, "", spec, out)
            records = _records(spec, out, so_far=so_far, begin=begin, progress=progress, jobs=jobs)
            found, table = _beside_paper(spec, records, stands_in_for)
            if recorded.in_phase(records, "final"):
                from privgrad_lab.report.page import write_report  # matplotlib is slow to import

                write_report(records, metadata_of(spec, records, out, command=command), out)
    (out / "table.json").write_text(json.dumps(found, indent=1))
    with (out / "table.txt").open("w") as file:
        Console(file=file, width=120).print(table)
    return found, table


def foretell(
    name: str,
    out: Path,
    announce: Announce,
    *,
    data: Path | None = None,
    methods: Sequence[str] = (),
    smoke: bool = False,
    device: Device = "auto",
) -> None:
    """Announce, as `reproduce`, the cost of an item's trainings that have no record in `out`; write nothing."""
    raw = prepared(name, data=data, smoke=smoke, methods=methods)
    items = [(name, raw, out)]
    if raw.get("kind") == "table":
        items = list[tuple[str, dict[str, Any], Path]]()
        for row in raw["rows"]:
            item, own = row["item"], _own_data(row["item"], raw.get("given"))
            one = prepared(item, data=own, smoke=smoke, methods=row["methods"])
            items.append((item, one, out / item.replace("/", "-")))
    for item, one, folder in items:
        kind, *_ = (one.pop(key, "") for key in ("kind", "probe", "stands_in_for"))
        if kind not in (*_WHOLE, "runtime"):
            spec = _spec(one, item, device)
            _announced(announce, item, kind, spec, folder, checked_data(spec))


def _announced(announce: Announce, name: str, kind: str, spec: Spec, out: Path, data: DataSet) -> None:
    if kind in ("moments", "cosines"):  # they measure along one training
        spec = spec.model_copy(update={"run": spec.run.model_copy(update={"seeds": spec.run.seeds[:1]})})
    found = estimate(spec, data, () if kind else recorded.read_records(out), tunes=not kind)
    if found is not None:
        announce(name, found)


# Kinds of items that read the whole file, and kinds that measure along trainings of a spec, as their [probe] says.
_WHOLE: dict[str, Callable[..., Found]] = {"noise-moments": probes.noise_moments, "toy": toy_regression}
_PROBES: dict[str, Callable[..., Found]] = {
    "moments": probes.moments,
    "cosines": probes.cosines,
    "bias": probes.clipping_bias,
    "runtime": probes.runtime,
}


def keys_of(name: str) -> dict[str, Any]:
    """Return the tables of an item's file, over those of its base."""
    raw = tomllib.loads(_ITEMS.joinpath(f"{name}.toml").read_text())
    base = raw.pop("base", None)
    if base is None:
        return raw
    # The paper's numbers and the keys of the list belong to one item, so they are not inherited.
    inherited = {key: value for key, value in keys_of(base).items() if key not in LISTED}
    return _merged(inherited | {"paper": {}}, raw)


def prepared(
    name: str, *, data: Path | None = None, smoke: bool = False, methods: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the tables of an item "paper/item", adapted to the request.

    `data` is the path of the paper's own data, and `methods` are the names of those to keep; none of them keeps all.
    A `smoke` version only shows that the item works; its numbers mean nothing.
    """
    require_choice("reproduce", "item", name, items())
    raw = {key: value for key, value in keys_of(name).items() if key not in LISTED}
    tiny, given = raw.pop("smoke", dict[str, Any]()), raw.pop("given", None)
    few = tiny.pop("only", [])
    is_table = raw.get("kind") == "table"
    if data is not None:
        if given is None and not is_table:
            raise expected("reproduce", "--data", f"to be absent for {name}", data, "it has one source of data")
        if smoke:
            raise expected("reproduce", "--data", "to be absent for --smoke", data)
    if data is not None and is_table:
        raw["given"] = str(data)
    elif data is not None and given is not None:
        raw = _merged(raw, _merged(given, {"data": {"path": str(data)}}))
        # The stand-in may have options that the paper's own data lack.
        options = {*DataTable.model_fields, *inspect.signature(LOADERS[raw["data"]["use"]]).parameters}
        raw["data"] = {key: value for key, value in raw["data"].items() if key in options}
        raw.pop("stands_in_for", None)
        # [given.changes] has the tables of some methods, by their names.
        changes = raw.pop("changes", dict[str, Any]())
        raw["methods"] = [_merged(method, changes.get(method["name"], {})) for method in raw.get("methods", [])]
    known = [method["name"] for method in raw.get("methods", [])]
    for method in methods:
        if method and method not in known:
            remedy = did_you_mean(method, known, "choose one of them" if known else "leave --method out")
            raise expected("reproduce", "--method", f"to be one of {', '.join(known) or 'none'}", repr(method), remedy)
    if smoke:
        raw = _merged(raw, tiny)
        raw["title"] = f"SMOKE, numbers mean nothing: {raw['title']}"
        if "methods" in raw:
            raw["paper"] = {}  # the paper's numbers hold for the full size only
            raw["methods"] = [_smallest(method, raw.get("tuning", {})) for method in raw["methods"]]
            if "noise_steps" in raw.get("tuning", {}) and not raw["tuning"].get("extend"):
                raw["tuning"]["noise_steps"] = raw["tuning"]["noise_steps"][:1]
            # The small data set may be the one that the full item uses as public data.
            if raw["data"].get("elsewhere", {}).get("use") == raw["data"]["use"]:
                del raw["data"]["elsewhere"]
                for method in raw["methods"]:
                    method.get("public", {}).pop("other", None)
    if kept := methods or (few if smoke else []):
        raw["methods"] = [method for method in raw["methods"] if method["name"] in kept]
    return raw


def _smallest(method: Mapping[str, Any], tuning: Mapping[str, Any]) -> dict[str, Any]:
    small, grown = dict(method), "optimizer.lr" if tuning.get("extend") else ""
    for place, values in MethodTable.model_validate(method).grids.items():
        part, _, name = place.partition(".")
        is_grid = isinstance(method[part], dict) and isinstance(method[part].get(name), list)
        if is_grid and place != grown:
            small[part] = small[part] | {name: values[:1]}
    if isinstance(method.get("max_grad_norm"), list):
        small["max_grad_norm"] = method["max_grad_norm"][:1]
    if "warm_start" in method:
        small["warm_start"] = method["warm_start"] | {"epochs": 1}
    return small


def _merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw` with `changes`: nested tables are merged, others replaced; false takes all but a boolean away."""
    merged = dict(raw)
    for key, value in changes.items():
        before = merged.get(key)
        if value is False and not isinstance(before, bool):
            merged.pop(key, None)
        elif not isinstance(value, dict) or (key == "model" and "use" in value):  # its options are other ones
            merged[key] = value
        else:
            merged[key] = _merged(before if isinstance(before, dict) else {}, value)
    return merged


def _spec(raw: Mapping[str, Any], name: str, device: Device) -> Spec:
    return check_spec({**raw, "run": raw.get("run", {}) | {"device": device}}, name)


def _records(
    spec: Spec, out: Path, *, so_far: bool, begin: Callable[[DataSet], None] | None, progress: bool, jobs: int
) -> list[Record]:
    if not so_far:
        return compare(spec, out, progress=progress, begin=begin, jobs=jobs)
    recorded.require_same(out, recorded.describe(spec))
    if not (out / "spec.json").exists():
        raise expected("reproduce", f"{out}", "to hold runs to show", "0 runs", "run it without --so-far")
    return recorded.read_records(out)


def _table(
    raw: Mapping[str, Any],
    out: Path,
    *,
    smoke: bool,
    so_far: bool,
    device: Device,
    progress: bool,
    jobs: int,
    announce: Announce | None,
) -> Found:
    # A row is an item on one data set, with the method and the paper's number, or text, for each column; "" is none. It
    # takes the paper's own data from the folder of their name in `given`, and has the stand-in if there is none.
    (recorded.require_same if so_far else recorded.claim)(out, json.dumps(raw, indent=1))
    found: dict[str, Any] = {}
    table = Table("", *raw["columns"], title=raw["title"])
    table.caption = "Mean ± standard deviation over seeds; below, the paper."
    own = {row["item"]: _own_data(row["item"], raw.get("given")) for row in raw["rows"]}
    if "given" in raw:
        if not any(own.values()):
            condition = "to hold folders that are called as in `privgrad data`: imdb, mnist, stackoverflow, amazon"
            raise expected("reproduce", "--data", condition, raw["given"])
        absent = ", ".join(row["title"] for row in raw["rows"] if own[row["item"]] is None)
        table.caption += f" Stand-ins, for want of a folder with their data: {absent or 'none'}."
    for row in raw["rows"]:
        item, data = row["item"], own[row["item"]]
        title = row["title"] if data is None else row["given"]
        base = prepared(item, data=data, smoke=smoke, methods=row["methods"])
        stands_in_for = base.pop("stands_in_for", None)
        base["paper"] = {}
        spec = _spec(base, item, device)
        folder = out / item.replace("/", "-")
        begin = None if announce is None else partial(_announced, announce, item, "", spec, folder)
        records = _records(spec, folder, so_far=so_far, begin=begin, progress=progress, jobs=jobs)
        numbers, _ = _beside_paper(spec, records, None)
        cells: list[str] = []
        found[title] = {"stands_in_for": stands_in_for}
        for column, name, theirs in zip(raw["columns"], row["methods"], row["paper"], strict=True):
            everything = numbers[name]["groups"].get("all") if name else None
            number = "loss" if everything is None or everything["accuracy"]["mean"] is None else "accuracy"
            ours = None if everything is None else everything[number]
            found[title][column] = {"method": name, number: ours, "paper": theirs}
            cells.append(_cells(everything | {"paper": {}}, number)[0] if everything else "–")
        table.add_row(title, *cells)
        paper = f"  paper ({stands_in_for})" if stands_in_for else "  paper"
        table.add_row(paper, *map(str, row["paper"]), style="dim")
    return found, table


def _own_data(item: str, given: str | None) -> Path | None:
    """Return the folder of an item's own data within that of --data; None unless each of its sources has one."""
    table = keys_of(item).get("given", {}).get("data", {})
    sources = [source_of(name) for name in (table.get("use", ""), *table)]
    places = [Path(given or "") / source.name for source in sources if source is not None]
    return places[0] if given and places and all(place.is_dir() for place in places) else None


def _beside_paper(spec: Spec, records: Sequence[Record], stands_in_for: str | None) -> Found:
    found = {method.name: _method_numbers(method, spec, records, stands_in_for) for method in spec.methods}
    return found, _comparison_table(spec, records, found, stands_in_for)


def _method_numbers(
    method: MethodTable, spec: Spec, records: Sequence[Record], stands_in_for: str | None
) -> dict[str, Any]:
    runs = [record for record in records if record["method"] == method.name]
    finals, theirs = recorded.in_phase(runs, "final"), spec.paper.get(method.name, {})
    rows: dict[str, Any] = {}
    if finals:
        tests = [{"loss": final["test_loss"], "accuracy": final["test_accuracy"]} for final in finals]
        title = {"test": "all (test)", "training": "all (training)"}[recorded.measured_on(records)]
        rows["all"] = {"title": title} | _numbers(tests, theirs.get("all", {}), stands_in_for)
    for index, group in enumerate(finals[0]["curve"][-1].get("raw_groups", []) if finals else []):
        key = f"{group['from']:g}"
        groups = [final["curve"][-1]["raw_groups"][index] for final in finals]
        sizes = key if group["to"] == group["from"] else f"{key} to {group['to']:g}"
        rows[key] = {"title": f"{group['classes']:g} x {sizes}"}
        rows[key] |= _numbers(groups, theirs.get(key, {}), stands_in_for)
    tuning = recorded.in_phase(runs, "tuning")
    by_noise = any(record["lr"] is None for record in runs)
    rate = "noise_step" if by_noise else "lr"
    tried, norms = (sorted({record[key] for record in tuning}) for key in (rate, "max_grad_norm"))
    row = recorded.summary_row(method.name, runs)
    return {
        **{key: row[key] for key in (*recorded.TUNED, "own", "raw_clip_fraction", "fraction_floored", "seeds")},
        f"{rate}s_tried": tried,
        **({"grid": judge(records, method.name, spec.tuning.by).text} if by_noise and tuning and spec.tuning else {}),
        "norms_tried": norms,
        "seeds_planned": len(spec.run.seeds),
        "raw_groups" if any(key != "all" for key in rows) else "groups": rows,
    }


def _comparison_table(
    spec: Spec, records: Sequence[Record], found: Mapping[str, Mapping[str, Any]], stands_in_for: str | None
) -> Table:
    score = next((record["score"] for record in records), None)
    shown = {"loss": "loss"} | ({} if score is None else {"accuracy": score})
    paper = f"paper,\n{stands_in_for}" if stands_in_for else "paper"
    tuned = ["max_grad_norm", *(key for key in ("lr", "noise_step") if any(row[key] for row in found.values()))]
    firsts = [spec.grid(method)[0] for method in spec.methods]
    tuned += [key for key in recorded.SOMETIMES_TUNED if any(getattr(first, key) is not None for first in firsts)]
    columns = slice(2 if spec.paper else 1)  # no columns for the paper if it has no numbers
    headers = [header for title in shown.values() for header in (title, paper)[columns]]
    title = ", ".join(tuned).replace("max_grad_norm", "C").replace("noise_step", "u").replace("_", " ")
    table = Table(title=spec.title)
    for header in ("method", title, "classes", *headers):
        table.add_column(header, overflow="fold")
    for name, numbers in found.items():
        rows = numbers.get("raw_groups") or numbers.get("groups") or {}
        for index, row in enumerate(rows.values()):
            values = ", ".join(f"{numbers[key]:g}" if numbers[key] is not None else "–" for key in tuned)
            values += f", {numbers['own']}" if numbers["own"] else ""
            first = (name, values) if index == 0 else ("", "")
            table.add_row(*first, row["title"], *(cell for n in shown for cell in _cells(row, n)[columns]))
        if not rows:
            rates = numbers.get("lrs_tried") or numbers.get("noise_steps_tried") or []
            tried = ", ".join(f"{rate:g}" for rate in rates) or "nothing"
            table.add_row(name, "–", f"no final run yet; tried {tried}")
    done, planned = (sum(row[key] for row in found.values()) for key in ("seeds", "seeds_planned"))
    sources = ", ".join(sorted({record["data"] for record in records}))
    private = any("raw_groups" in row for row in found.values()) or recorded.measured_on(records) == "training"
    groups = "; NOT PRIVATE: groups (classes x examples of each) and everything on training examples" if private else ""
    missing = f" {done} of {planned} final runs were done." if done < planned else ""
    table.caption = f"{sources}. Mean ± standard deviation over seeds{groups}.{missing}"
    return table


def _numbers(runs: Sequence[Record], paper: Mapping[str, float], stands_in_for: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"paper": dict(paper)}
    for number in ("loss", "accuracy"):
        values = [run[number] for run in runs if run[number] is not None]
        found[number] = {"mean": recorded.mean(values), "std": recorded.std(values)}
        if number in paper and values and not stands_in_for:
            found[number]["difference"] = found[number]["mean"] - paper[number]
    return found


def _cells(row: Mapping[str, Any], number: str) -> tuple[str, str]:
    form = "{:.3g}" if number == "loss" else "{:.1%}"
    ours, spread = row[number]["mean"], row[number]["std"]
    text = "–" if ours is None else form.format(ours)
    if ours is not None and spread is not None:
        text += f" ± {form.replace('3g', '1g').format(spread)}"
    return text, form.format(row["paper"][number]) if number in row["paper"] else "–"
