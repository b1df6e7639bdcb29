"""Rows of a table or a folder that do not fit their declaration, or count a person several times. NOT private.

All that it returns is computed from the private rows without noise.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privgrad.data.images import SUFFIXES, read_image, require_images, require_pillow, units_of
from privgrad.data.read_rows import read_columns
from privgrad.data.schema import ROW, Fault, is_nobody, repeated, rows_by_key, schema_of
from privgrad.data.table import Split, keys_of, persons_in_rows, warn_of_private_ends
from privgrad.errors import PrivacyError

_SHOWN = 5  # example rows of a finding
_SHOWN_COLUMNS = 10  # columns that are not used


@dataclass(frozen=True)
class RawFinding:
    """One kind of finding. NOT private."""

    column: str  # "" for whole rows
    what: str
    count: int  # of rows, or of persons
    rows: tuple[int | str, ...]  # the first few row numbers, counted from 1 without the header; or the names of files
    remedy: str
    blocks: bool = False  # whether a training on this file stops with an error


@dataclass(frozen=True)
class RawSize:
    """The sizes of one file or folder. NOT private."""

    rows: int  # or images
    kind: str  # "rows" or "images"
    units: int | None  # the number of persons; None if each row is a unit
    classes: int  # the number of declared classes that occur
    declared: int  # the number of declared classes; 0 if the label is a number
    training: int | None  # the number of units in the training part; None for a file that is the test part
    unused: tuple[str, ...] = ()  # the columns of a table that are not declared

    def text(self) -> str:
        """Return the sizes as one line."""
        name = self.kind if self.units is None else "persons"
        of = "" if self.units is None else f" of {self.units:,} persons"
        of += f" in {self.classes} of {self.declared} declared classes" if self.declared else ", with a number as label"
        part = "the test part" if self.training is None else f"{self.training:,} {name} in the training part"
        return f"{self.rows:,} {self.kind}{of}; {part}"

    def note(self) -> str:
        """Return a sentence on the columns that are not used, or "" if there are none."""
        more = f" and {len(self.unused) - _SHOWN_COLUMNS:,} more" if len(self.unused) > _SHOWN_COLUMNS else ""
        names = ", ".join(self.unused[:_SHOWN_COLUMNS]) + more
        return f"columns that are not declared, or ignored, so that no training uses them: {names}" if names else ""


def of_table(
    path: Path, split: Mapping[str, Any] | None, *, table: str | None = None, **declared: Any
) -> tuple[RawSize, list[RawFinding]]:
    """Return the sizes of a table, also of one that a training refuses, and what needs a decision before it.

    The arguments are those of `data.table`; `split` has those that divide the units, and is None for a test part.
    """
    schema = schema_of("doctor", **declared)
    texts = read_columns("doctor", path, schema.names, table=table, others=bool)[1]
    keys, faults = keys_of(schema, texts)
    name = f"{schema.identifier}"
    found: list[RawFinding] = []
    for column in (schema.target, *schema.columns.values()):
        shown = column.shown(texts)
        values, wrong = column.read(texts)
        found += _of_faults(column.name, wrong, shown)
        if column.kind not in ("class", "text") and len(shown) > 1 and len(set(shown)) == 1:
            remedy = "harmless in an input; to leave a column out because of this is a choice from private rows"
            found += _finding(column.name, f"constant: {shown[0]!r} in all rows", range(len(shown)), remedy)
        with warnings.catch_warnings(record=True, action="always") as told:
            warn_of_private_ends("doctor", column, values)
        for one in told:
            what, _, remedy = f"{one.message}".removeprefix("NOT PRIVATE: doctor: ").partition(". If")
            found.append(RawFinding(column.name, what, 1, (), f"if{remedy}"))
    found += _of_faults(name, faults, texts.get(name, ()))
    again = repeated(zip(*(texts[each] for each in (*schema.inputs, schema.label)), strict=True))
    remedy = "a person in several rows is protected less: leave out exact copies, or set unit to a column of persons"
    if schema.by_person:
        remedy = "harmless within one person; a person under two names is protected less"
    found += _finding("", "the same declared columns as an earlier row", again, remedy)
    if schema.identifier is not None:  # rows without an identifier are no unit
        rows_of = {key: rows for key, rows in rows_by_key(keys).items() if not is_nobody(key)}
        keys = list(rows_of)
        if schema.by_person:
            found += _of_persons(name, list(rows_of.values()), schema.max_rows or 1)
    unused = [name for name in texts if name not in schema.names]
    for other, fault in persons_in_rows(schema, texts):
        found += _finding(other, fault.what, fault.rows, fault.remedy)
    size = RawSize(
        rows=len(texts[schema.label]),
        kind="rows",
        units=len(keys) if schema.by_person else None,
        classes=len(set(texts[schema.label]) & set(schema.classes)),
        declared=len(schema.classes),
        training=None if split is None else _training(path, keys, schema.identifier, split),
        unused=tuple(unused),
    )
    return size, found


def of_folder(folder: Path, split: Mapping[str, Any] | None, **declared: Any) -> tuple[RawSize, list[RawFinding]]:
    """Return the sizes of a folder of images, all that cannot be read, and those that are copies of others.

    The arguments are those of `data.image_folder`; `split` is as in `of_table`.
    """
    require_images("doctor", **declared)
    classes, unit = declared["classes"], declared["unit"]
    units = units_of(folder, classes, unit, None)
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    names = [file.relative_to(folder).as_posix() for file in files]
    content = [hashlib.blake2b(file.read_bytes(), digest_size=16).digest() for file in files]
    damaged: list[str] = []
    require_pillow()  # else every image would seem to be damaged
    for file, name in zip(files, names, strict=True):
        try:
            read_image(file, size=1, channels=declared["channels"])
        except PrivacyError:
            damaged.append(name)
    what = "no readable image of at most 8 bits per channel"
    remedy = "replace or remove them; num_examples stays a public number"
    found = [RawFinding("", what, len(damaged), tuple(damaged), remedy, blocks=True)] if damaged else []
    again = [names[row] for row in repeated(content)]
    remedy = "remove copies; a person with several images needs unit, see own-data.md"
    found += _finding("", "the same file as an earlier one", again, remedy)
    sizes = RawSize(
        rows=sum(len(images) for _, images in units),
        kind="images",
        units=None if unit == ROW else len(units),
        classes=len({image.label for _, images in units for image in images}),
        declared=len(classes),
        training=None if split is None else _training(folder, [key for key, _ in units], None, split),
    )
    return sizes, found


def of_count(size: RawSize, num_examples: object) -> list[RawFinding]:
    """Return what is wrong with a public count for a training part. NOT private; no remedy names a private number."""
    if size.training is None or not isinstance(num_examples, int):
        return []
    problem = problem_of_count(size.training, size.kind if size.units is None else "persons", num_examples)
    return [] if problem is None else [RawFinding("", problem[0], size.training, (), problem[1])]


def problem_of_count(count: int, units: str, num_examples: int) -> tuple[str, str] | None:
    """Return what is wrong with a public count for a training part of `count` units, and a remedy. NOT private."""
    far = 2 if units == "persons" else 4  # with more than this times num_examples, much of the epsilon is wasted
    if num_examples > count:
        remedy = "lower it to a number that is known without the data, or to a count with noise: release_sum of ones"
        return f"fewer {units} in the training part than num_examples = {num_examples:,}", remedy
    if count > far * num_examples:
        remedy = "a larger public number gives a better model at the same epsilon"
        return f"{units} in the training part, more than {far} times num_examples = {num_examples:,}", remedy
    return None


def _finding(column: str, what: str, rows: Sequence[int | str], remedy: str) -> list[RawFinding]:
    first = tuple(row + 1 if isinstance(row, int) else row for row in rows[:_SHOWN])
    return [RawFinding(column, what, len(rows), first, remedy)] if rows else []


def _of_faults(column: str, faults: Sequence[Fault], shown: Sequence[str]) -> list[RawFinding]:
    found: list[RawFinding] = []
    for fault in faults:
        most = Counter(shown[row][:40] for row in fault.rows).most_common(_SHOWN)
        what = fault.what if fault.what == "missing" else f"{fault.what}: {', '.join(repr(text) for text, _ in most)}"
        if fault.level == "warning" and 2 * len(fault.rows) >= len(shown):
            what = f"half of the rows or more are {what}"
        own = _finding(column, what, fault.rows, fault.remedy)
        found += [replace(one, blocks=fault.level == "error") for one in own]
    return found


def _of_persons(name: str, rows_of: Sequence[Sequence[int]], most: int) -> list[RawFinding]:
    several, beyond = ([rows[0] for rows in rows_of if len(rows) > least] for least in (1, most))
    what = f"persons with several rows, of {len(rows_of)} persons; the most is {max(map(len, rows_of), default=0)}"
    found = _finding(name, what, several, "unit protects them together; num_examples counts persons")
    remedy = f"rows after the first {most} are dropped; max_rows must be a public number"
    return found + _finding(name, f"persons with more than max_rows = {most} rows", beyond, remedy)


def _training(path: Path, keys: Iterable[str | bytes], identifier: str | None, split: Mapping[str, Any]) -> int:
    parts = Split("doctor", identifier, **split).parts(path.name, ((key, None) for key in keys))
    return len(parts["train"])
