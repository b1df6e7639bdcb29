"""The folder of an experiment: its description, its records, and how an old one is moved aside.

`runner`, `papers` and the command line call it. The privacy guarantee rests on `restart` only: it keeps ledgers, so
that no release is forgotten.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from privgrad.errors import expected
from privgrad.experiments.spec import Spec
from privgrad.ledger_file import is_in_use

Record = dict[str, Any]


def restart(out: Path) -> Path | None:
    """Move an existing folder aside, so that no ledger is lost, and return its new path; None if there is no folder.

    The command line calls it for the option --restart.

    Raises:
        PrivacyError: a training is running in the folder.
    """
    if not out.exists():
        return None
    for path in out.rglob("ledger.jsonl"):
        if is_in_use(path):
            got, remedy = "a lock of a running training", "stop that training first"
            raise expected("experiments", f"{path}", "to be unlocked", got, remedy)
    aside = next(p for k in range(1, 10_000) if not (p := out.with_name(f"{out.name}-{k}")).exists())
    shutil.move(out, aside)
    return aside


def describe(spec: Spec) -> str:
    """Return the text of spec.json, which identifies a folder's experiment. `papers.reproduce` also calls it."""
    return spec.model_dump_json(indent=1, exclude_defaults=True)


def claim(out: Path, description: str, *, look_only: bool = False) -> None:
    """Create a folder for an experiment, or check that the folder holds runs of this experiment only.

    `papers` also calls it.

    Args:
        out: the folder.
        description: text of the folder's spec.json.
        look_only: write nothing, and refuse a folder without spec.json.
    Raises:
        PrivacyError: `out` is a file, or holds runs of another spec; with look_only also a folder without runs.
            Nothing was written.
    """
    require_same(out, description)
    path = out / "spec.json"
    if look_only:
        if not path.exists():
            raise expected("reproduce", f"{out}", "to hold runs to show", "0 runs", "run it without --so-far")
        return
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != description:
        whole = path.with_suffix(".new")  # a process that is killed leaves no half of a file
        whole.write_text(description)
        os.replace(whole, path)


def require_same(out: Path, description: str) -> None:
    """Raise PrivacyError if `out` is a file, or holds runs of another spec. `runner` calls it before it loads data.

    Args:
        out: the folder.
        description: text of the folder's spec.json.
    """
    remedy = "choose another --out, or add --restart to move the old folder aside"
    if out.exists() and not out.is_dir():
        raise expected("experiments", "--out", "to be a folder", f"the file {out}", "choose another --out")
    path = out / "spec.json"
    held = path.read_text() if path.exists() else None
    if held is None and (out / "runs.jsonl").exists():
        raise expected("experiments", f"{out}", "to hold runs of this spec", "runs without their spec.json", remedy)
    if held is not None and (difference := _difference(held, description)) is not None:
        raise expected("experiments", f"{out}", "to hold runs of this spec", difference, remedy)


def is_begun(out: Path) -> bool:
    """Return whether the folder holds releases, results, or the commitment of a private comparison.

    The command line calls it after an interruption.
    """
    return any(next(out.rglob(name), None) is not None for name in ("ledger.jsonl", "commitment.txt", "runs.jsonl"))


def _difference(held: str, description: str) -> str | None:
    """Return, for an error, the top-level keys in which two texts of spec.json differ; None if they say the same.

    The paper's numbers do not count: no training depends on them.
    """
    try:
        old, new = dict(json.loads(held)), dict(json.loads(description))
    except (TypeError, ValueError):
        return "a spec.json that cannot be read"
    keys = [key for key in {**old, **new} if key != "paper" and old.get(key) != new.get(key)]
    return f"runs of a spec with a different {', '.join(keys)}" if keys else None


def read_records(out: Path) -> list[Record]:
    """Return the records of a folder's runs.jsonl; an empty list if there is no such file.

    `papers` also calls it.

    Raises:
        PrivacyError: a line is not JSON.
    """
    path = out / "runs.jsonl"
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        remedy = "delete the damaged line; the run then resumes from its own folder"
        raise expected("experiments", f"{path}", "to be JSON lines", error, remedy) from error


def make_secret(folder: Path) -> None:
    """Create a folder that only its owner may open, for files that no epsilon covers. The runners call it for raw/."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def append(out: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a folder's runs.jsonl in one write. `papers.clipping_bias` also calls it."""
    with (out / "runs.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
