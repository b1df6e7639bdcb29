"""Rows of a table or a folder that do not fit their declaration, or count a person several times. NOT private.

All that it returns is computed from the private rows without noise.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privgrad.data.images import SUFFIXES, read_image, require_images, require_pillow, units_of
from privgrad.data.read_rows import read_columns
from privgrad.data.schema import ROW, Fault, Schema, Where, is_nobody, person_of, repeated, rows_by_key, schema_of
from privgrad.data.table import Texts, divided, keys_of, require_every, require_split
from privgrad.errors import PrivacyError

SPLIT = ("test", "test_share", "test_every", "validation_share", "split_key")  # the options that divide the units
_SHOWN = 5  # example rows of a finding
_SHOWN_COLUMNS = 10  # columns that are not used
_FAR = {True: 2, False: 4}  # times num_examples: more persons, or rows, than this waste much of the epsilon
_OF_PERSONS = re.compile(
    r"(?:^|[\W_])(?:id|nr|person|patient|user|customer|client|member|subject|student|employee|account|name|email|ssn)s?"
    r"(?:$|[\W_])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RawFinding:
    """One kind of finding. NOT private."""

    column: str  # "" for whole rows
    what: str
    count: int  # of rows, or of persons
    rows: tuple[int | str, ...]  # the first few row numbers, counted from 1 without the header; or the names of files
    remedy: str
    blocks: bool = False  # whether a training on this file stops with an error


def raw_findings(path: Path, **declaration: Any) -> list[RawFinding]:
    """Return what a table holds that needs a decision before a training; `declaration` is that of `data.table`."""
    schema, texts = _texts(path, **declaration)
    found: list[RawFinding] = []
    for column in (schema.target, *schema.columns.values()):
        shown = column.shown(texts)
        found += _of_faults(column.name, column.read(texts)[1], shown)
        if column.name in schema.columns and column.blocks and len(shown) > 1 and len(set(shown)) == 1:
            remedy = "harmless; a column that is left out because of this is a choice from private rows"
            found += _finding(column.name, f"constant: {shown[0]!r} in all rows", range(1, len(shown) + 1), remedy)
    name = f"{schema.identifier}"
    found += _of_faults(name, keys_of(schema, texts)[1], texts.get(name, ()))
    declared = list(zip(*(texts[name] for name in (*schema.inputs, schema.label)), strict=True))
    remedy = "a person in several rows is protected less: leave out exact copies, or set unit to a column of persons"
    if schema.by_person:
        remedy = "harmless within one person; a person under two names is protected less"
    rows = [row + 1 for row in repeated(declared)]
    found += _finding("", "the same declared columns as an earlier row", rows, remedy)
    return found + (_of_persons(schema, texts) if schema.by_person else _undeclared_persons(schema, texts))


def _texts(path: Path, *, table: str | None = None, **declaration: Any) -> tuple[Schema, Texts]:
    """Return the schema, and the texts of all columns of a file."""
    schema = schema_of(Where("doctor"), **declaration)
    return schema, read_columns("doctor", path, schema.names, table=table, others=True)[1]


def raw_image_findings(
    folder: Path, *, classes: Any, size: Any, channels: Any, unit: Any, max_rows: Any = None
) -> list[RawFinding]:
    """Return the images of a folder that cannot be read, all of them, and those that are copies of others."""
    require_images(Where("doctor"), classes, size, channels, unit, max_rows)
    require_pillow()
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    content = [hashlib.blake2b(file.read_bytes(), digest_size=16).digest() for file in files]
    again = [files[row].relative_to(folder).as_posix() for row in repeated(content)]
    remedy = "remove copies; a person with several images needs unit, see own-data.md"
    damaged: list[str] = []
    for file in files:
        try:
            read_image(file, size=1, channels=channels)
        except PrivacyError:
            damaged.append(file.relative_to(folder).as_posix())
    what = "no readable image of at most 8 bits per channel"
    cure = "replace or remove them; num_examples stays a public number"
    found = [RawFinding("", what, len(damaged), tuple(damaged), cure, blocks=True)] if damaged else []
    return found + _finding("", "the same file as an earlier one", again, remedy)


def _finding(column: str, what: str, rows: Sequence[int | str], remedy: str) -> list[RawFinding]:
    return [RawFinding(column, what, len(rows), tuple(rows[:_SHOWN]), remedy)] if rows else []


def _of_faults(column: str, faults: Sequence[Fault], shown: Sequence[str]) -> list[RawFinding]:
    """Return the findings of faults, with their most frequent values."""
    found: list[RawFinding] = []
    for fault in (fault for fault in faults if fault.rows):
        most = Counter(shown[row][:40] for row in fault.rows).most_common(_SHOWN)
        what = fault.what if fault.what == "missing" else f"{fault.what}: {', '.join(repr(text) for text, _ in most)}"
        rows = tuple(row + 1 for row in fault.rows[:_SHOWN])
        found.append(RawFinding(column, what, len(fault.rows), rows, fault.remedy, fault.level == "error"))
    return found


def _of_persons(schema: Schema, texts: Texts) -> list[RawFinding]:
    """Return the persons with several rows, and those with more rows than are kept."""
    name, most = schema.unit, schema.max_rows or 1
    persons = rows_by_key(map(person_of, texts[name]))
    rows_of = [rows for key, rows in persons.items() if not is_nobody(key)]
    several, beyond = ([rows[0] + 1 for rows in rows_of if len(rows) > least] for least in (1, most))
    what = f"persons with several rows, of {len(rows_of)} persons; the most is {max(map(len, rows_of), default=0)}"
    found = _finding(name, what, several, "unit protects them together; num_examples counts persons")
    remedy = f"rows after the first {most} are dropped; max_rows must be a public number"
    return found + _finding(name, f"persons with more than max_rows = {most} rows", beyond, remedy)


def _undeclared_persons(schema: Schema, texts: Texts) -> list[RawFinding]:
    """Return the undeclared columns that seem to identify persons with several rows, although unit is "row"."""
    found: list[RawFinding] = []
    for name in (name for name in texts if name not in schema.names and _OF_PERSONS.search(name)):
        keys = [person_of(text) for text in texts[name] if not is_nobody(text)]
        what = f"{len(set(keys))} values in {len(keys)} rows, and unit is 'row'"
        remedy = f'if it identifies persons, set unit = "{name}": several rows of a person are protected less'
        found += _finding(name, what, [row + 1 for row in repeated(keys)], remedy)
    return found


@dataclass(frozen=True)
class RawSize:
    """The sizes of one file or folder. NOT private."""

    rows: int  # or images
    kind: str  # "rows" or "images"
    units: int | None  # the number of persons; None if each row is a unit
    classes: int  # the number of declared classes that occur
    declared: int  # the number of declared classes
    training: int | None  # the number of units in the training part; None for a file that is the test part
    unused: tuple[str, ...] = ()  # the columns of a table that are not declared

    def text(self) -> str:
        """Return the sizes as one line."""
        name = self.kind if self.units is None else "persons"
        of = "" if self.units is None else f" of {self.units:,} persons"
        part = "the test part" if self.training is None else f"{self.training:,} {name} in the training part"
        return f"{self.rows:,} {self.kind}{of} in {self.classes} of {self.declared} declared classes; {part}"

    def note(self) -> str:
        """Return a sentence on the columns that are not used, or "" if there are none."""
        more = f" and {len(self.unused) - _SHOWN_COLUMNS:,} more" if len(self.unused) > _SHOWN_COLUMNS else ""
        names = ", ".join(self.unused[:_SHOWN_COLUMNS]) + more
        return f"columns that are not declared, so that no training uses them: {names}" if names else ""


def raw_table_size(path: Path, declared: Mapping[str, Any], split: Mapping[str, Any] | None) -> RawSize:
    """Return the sizes of a table, also of one with rows that a training refuses; `split` is None for a test part."""
    schema, texts = _texts(path, **declared)
    keys = keys_of(schema, texts)[0]
    if schema.identifier is not None:  # rows without an identifier are no unit
        keys = list(dict.fromkeys(key for key in keys if not is_nobody(key)))
    labels = texts[schema.label]
    return RawSize(
        rows=len(labels),
        kind="rows",
        units=len(keys) if schema.by_person else None,
        classes=len(set(labels) & set(schema.classes)),
        declared=len(schema.classes),
        training=None if split is None else _training(path.name, keys, schema.identifier, split),
        unused=tuple(name for name in texts if name not in schema.names),
    )


def raw_folder_size(folder: Path, declared: Mapping[str, Any], split: Mapping[str, Any] | None) -> RawSize:
    """Return the sizes of a folder of images, damaged ones too; `declared` holds the arguments of `image_folder`."""
    unit, classes = declared["unit"], declared["classes"]
    units = units_of(folder, classes, unit, None)
    found = {image.label for _, images in units for image in images}
    training = None if split is None else _training(folder.name, [key for key, _ in units], None, split)
    count = sum(len(images) for _, images in units)
    return RawSize(count, "images", None if unit == ROW else len(units), len(found), len(classes), training)


def raw_count_findings(size: RawSize, num_examples: object) -> list[RawFinding]:
    """Return what is wrong with a public count for a training part. NOT private; no remedy names a private number."""
    if size.training is None or isinstance(num_examples, bool) or not isinstance(num_examples, int):
        return []
    units, far = size.kind if size.units is None else "persons", _FAR[size.units is not None]
    if num_examples > size.training:
        what = f"fewer {units} in the training part than num_examples = {num_examples:,}"
        remedy = "lower num_examples to a number that is known without the data, or to a count with noise"
        return [RawFinding("", what, size.training, (), remedy, blocks=True)]
    if size.training > far * num_examples:
        what = f"{units} in the training part, more than {far} times num_examples = {num_examples:,}"
        remedy = "a larger public number gives a better model at the same epsilon"
        return [RawFinding("", what, size.training, (), remedy)]
    return []


def _training(name: str, keys: Iterable[str | bytes], identifier: str | None, split: Mapping[str, Any]) -> int:
    where, test, every = Where("doctor"), split.get("test"), split.get("test_every")
    by: dict[str, Any] = {"test_share": 0.0, "validation_share": 0.0, "split_key": ""}
    by |= {name: split[name] for name in by if name in split}
    require_split(where, test, **by)
    require_every(where, every, identifier, test, by["test_share"])
    return len(divided(name, ((key, None) for key in keys), every=every, **by)["train"])
