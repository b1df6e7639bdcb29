"""The output of `privgrad doctor FILE.toml`: the findings in the data that an experiment names."""

import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from privgrad import data as loaders
from privgrad.accounting.accountant import rounded_up
from privgrad.cli.console import STDOUT, print_json, print_table
from privgrad.errors import expected
from privgrad_lab import old_spelling
from privgrad_lab.build import find_loader, make_data
from privgrad_lab.data import findings
from privgrad_lab.data.findings import RawFinding, RawSize
from privgrad_lab.featuring import SCHEMA
from privgrad_lab.load_spec import check_spec, read_tables

_IMAGES = ("classes", "size", "channels", "unit", "max_rows")
_SPLIT = ("test", "test_share", "test_every", "validation_share", "split_key")  # the options that divide the units


def examine(path: Path, *, as_json: bool, rewrite: bool = False) -> int:
    """Print the findings in the data of a TOML file, or the file in the new spelling; return the exit code."""
    tables = read_tables(path)
    if rewrite:
        sys.stdout.write(old_spelling.rewritten(path.read_text()))
        return 0
    old_spelling.refuse(tables, path)
    data = tables.get("data")
    if not isinstance(data, dict):
        raise expected("privgrad doctor", f"[data] of {path.name}", "to be a table", repr(data))
    if (loader := find_loader(data, "data")) not in (loaders.table, loaders.image_folder):
        remedy = f"check it with `privgrad compare {path} --dry-run`, which loads any data"
        raise expected("privgrad doctor", "data", "to be a file or a folder", repr(data.get("use")), remedy)
    # A file with these tables says what to train, and not only on what.
    spec = check_spec(tables, path) if {"model", "privacy"} <= tables.keys() else None
    is_table = loader is loaders.table
    fits = f"each {'row fits its declaration' if is_table else 'image can be read'}, and none is repeated"
    declared = {key: data.get(key) for key in ((*SCHEMA, "table") if is_table else _IMAGES)}
    split, privacy = {key: data[key] for key in _SPLIT if key in data}, tables.get("privacy")
    counted = privacy.get("num_examples") if isinstance(privacy, dict) else None
    found: dict[str, list[RawFinding]] = {}
    sizes: dict[str, RawSize] = {}
    for name, own in ((data.get("file") or data.get("folder"), split), (data.get("test"), None)):
        if name is not None:
            place = path.parent / Path(f"{name}").expanduser()
            size, several = (findings.of_table if is_table else findings.of_folder)(place, own, **declared)
            found[place.name] = several + findings.of_count(size, counted)
            sizes[place.name] = size
    if isinstance(privacy, dict) and (too_large := _of_delta(privacy)):
        found[path.name] = too_large
    blocked = any(one.blocks for several in found.values() for one in several)
    if spec is not None and not blocked:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the findings say what it warns of
            make_data(spec)  # refuses parts that are empty, and methods that do not suit the data
    if as_json:
        listed = {name: [asdict(one) for one in several] for name, several in found.items()}
        raw = {"raw_findings": listed, "raw_sizes": {name: asdict(size) for name, size in sizes.items()}}
        print_json(raw | {"private": False})
        return int(blocked)
    for name, several in found.items():
        if name in sizes:
            STDOUT.print(f"{name}, NOT PRIVATE: {sizes[name].text()}.", highlight=False, soft_wrap=True)
            if note := sizes[name].note():
                STDOUT.print(escape(f"{name}: {note}."), highlight=False, soft_wrap=True)
        rows = [
            {
                "column": one.column,
                "finding": f"error: {one.what}" if one.blocks else one.what,
                "count": one.count,
                "first rows": ", ".join(map(str, one.rows)),
                "remedy": one.remedy,
            }
            for one in several
        ]
        if rows:
            print_table(rows, title=f"{name}: NOT PRIVATE" if name in sizes else name)
        else:
            STDOUT.print(f"{name}: {fits}.", highlight=False)
    if isinstance(counted, int):
        ill = [name for name, size in sizes.items() if findings.of_count(size, counted)]
        verdict = f"does NOT suit the training part: see {', '.join(ill)}." if ill else "suits the training part."
        STDOUT.print(f"num_examples = {counted:,} {verdict}", highlight=False)
    else:
        STDOUT.print("privacy.num_examples is not given: nothing was compared with the training part.")
    STDOUT.print(
        "NOT PRIVATE: all of this is counted without noise. Do not publish it, nor decide by it what is public."
    )
    return int(blocked)


def _of_delta(privacy: dict[str, Any]) -> list[RawFinding]:
    delta, count = privacy.get("delta"), privacy.get("num_examples")
    if "simulate" in privacy or not (isinstance(delta, float) and isinstance(count, int) and count > 0):
        return []
    what = f"delta = {rounded_up(delta)} is above 1 / num_examples = {1 / count:.3g}"
    remedy = "lower delta far below: such a delta allows a mechanism that publishes one whole record"
    return [RawFinding("", what, 1, (), remedy)] if delta > 1 / count else []
