"""Rows of a table or a folder that do not fit their declaration, or count a person several times. NOT private.

`cli.doctor` calls `raw_findings` and `raw_image_findings`, before a training. The privacy guarantee does not rest on
this file. All that it returns is computed from the private rows without noise.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from privgrad.data.own_images import SUFFIXES, read_image, require_images, require_pillow
from privgrad.data.read_rows import read_columns
from privgrad.data.schema import OF_DATES, Schema, Text, Where, is_date, is_missing, number_of, schema_of, text_of
from privgrad.data.units import is_nobody, person_of
from privgrad.errors import PrivacyError
from privgrad.features import Bins, OneHot

_SHOWN = 5  # example rows of a finding
_OF_PERSONS = re.compile(
    r"(?:^|[\W_])(?:id|nr|person|patient|user|customer|client|member|subject|student|employee|account|name|email|ssn)s?"
    r"(?:$|[\W_])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RawFinding:
    """One kind of finding. NOT private.

    Attributes:
        column: the column, or "" for whole rows.
        what: the finding.
        count: the number of rows, or of persons.
        rows: the first few row numbers, counted from 1 without the header; or the names of files.
        remedy: what to do.
        blocks: whether a training on this file stops with an error.
    """

    column: str
    what: str
    count: int
    rows: tuple[int | str, ...]
    remedy: str
    blocks: bool = False


def raw_findings(
    path: Path,
    *,
    columns: Any,
    label: Any,
    classes: Any,
    unit: Any,
    max_rows: int | None = None,
    row_id: str | None = None,
    table: str | None = None,
) -> list[RawFinding]:
    """Return what a table holds that needs a decision before a training.

    Args:
        path: as in `own_table.table`, and so are the other arguments.
        columns: the declared columns.
        label: the column of the classes.
        classes: the label's allowed values.
        unit: "row", or the column that identifies a person.
        max_rows: the most rows kept per person.
        row_id: a column that names each row.
        table: the table of an SQLite file.
    Raises:
        PrivacyError: the declaration is wrong, or the file is absent, damaged or lacks a column.
    Privacy:
        NOT private. A rule that is changed because of a finding depends on the private rows; the remedies say so.
    """
    schema = schema_of(
        Where("doctor"), columns=columns, label=label, classes=classes, unit=unit, max_rows=max_rows, row_id=row_id
    )
    read_columns("doctor", path, schema.names, table)  # its errors name declared columns
    content = read_columns("doctor", path, None, table)
    texts = {name: [text_or_kind(value) for value in content[name]] for name in schema.names}
    found = [*_of_labels(schema, texts[schema.label])]
    for name, kind in schema.columns.items():
        if not isinstance(kind, Text):
            found += _of_column(name, kind, content[name], texts[name])
    declared = list(zip(*(texts[name] for name in (*schema.columns, schema.label)), strict=True))
    found += _copies(schema, declared)
    found += _of_units(schema, texts) if schema.identifier is not None else []
    others = {name: content[name] for name in content if name not in schema.names}
    return found + ([] if schema.by_person else _persons(others))


def raw_image_findings(
    folder: Path, *, classes: Any, size: Any, channels: Any, unit: Any, max_rows: Any = None
) -> list[RawFinding]:
    """Return the images of a folder that cannot be read, all of them, and those that are copies of others.

    Args:
        folder: as in `own_images.image_folder`, which checks its form.
        classes: as in `own_images.image_folder`, and so are the other arguments.
        size: height and width of all inputs in pixels.
        channels: 1 or 3.
        unit: "row", or the column that identifies a person.
        max_rows: the most images kept per person.
    Raises:
        PrivacyError: the declaration is wrong, or Pillow is missing.
    Privacy:
        NOT private. The number of damaged files is private too.
    """
    require_images(Where("doctor"), classes, size, channels, unit, max_rows)
    require_pillow()
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    content = [hashlib.blake2b(file.read_bytes(), digest_size=16).digest() for file in files]
    again = [files[row - 1].relative_to(folder).as_posix() for row in _repeated(content)]
    remedy = "remove copies; a person with several images needs unit, see own-data.md"
    damaged = [file.relative_to(folder).as_posix() for file in files if not _is_readable(file, channels)]
    what = "no readable image of at most 8 bits per channel"
    cure = "replace or remove them; num_examples stays a public number"
    found = [RawFinding("", what, len(damaged), tuple(damaged), cure, blocks=True)] if damaged else []
    return found + _finding("", "the same file as an earlier one", again, remedy)


def _is_readable(file: Path, channels: Literal[1, 3]) -> bool:
    """Return whether `image_folder` can read a file."""
    try:
        read_image(file, size=1, channels=channels)
    except PrivacyError:
        return False
    return True


def text_or_kind(value: object) -> str:
    """Return the text of a value; of one that is no single value, its kind. `raw_sizes` also calls it."""
    try:
        return text_of(value)
    except ValueError as error:
        return f"<{error}>"


def _finding(
    column: str, what: str, rows: Sequence[int | str], remedy: str, *, blocks: bool = False
) -> list[RawFinding]:
    """Return a finding of these rows, or nothing if there are none."""
    return [RawFinding(column, what, len(rows), tuple(rows[:_SHOWN]), remedy, blocks)] if rows else []


def _where(wrong: Callable[[Any], bool], values: Iterable[Any]) -> list[int]:
    """Return the numbers of the rows whose value is wrong, from 1."""
    return [row for row, value in enumerate(values, start=1) if wrong(value)]


def _repeated(values: Sequence[Hashable]) -> list[int]:
    """Return the numbers of the rows whose value an earlier row has."""
    seen: set[Hashable] = set()
    return _where(lambda value: value in seen or bool(seen.add(value)), values)


def _some(texts: Sequence[str], rows: Sequence[int]) -> str:
    """Return the most frequent values of some rows, for a sentence."""
    counts = Counter(texts[row - 1] for row in rows)
    return ", ".join(repr(text[:40]) for text, _ in counts.most_common(_SHOWN))


def _of_labels(schema: Schema, texts: Sequence[str]) -> list[RawFinding]:
    """Return the rows whose label is no class."""
    rows = _where(lambda text: text not in schema.classes, texts)
    remedy = "add the class if it is public, or leave out rows without a label"
    return _finding(schema.label, f"no declared class: {_some(texts, rows)}", rows, remedy, blocks=True)


def _of_column(name: str, kind: Bins | OneHot, values: Sequence[Any], texts: Sequence[str]) -> list[RawFinding]:
    """Return the findings of one column of numbers or of categories."""
    known: tuple[str, ...] = kind.values if isinstance(kind, OneHot) else ()  # pyright: ignore[reportAssignmentType]
    missing = _where(lambda text: is_missing(text) and text not in known, texts)
    has_code = "they have a code of their own"
    remedy = has_code if kind.missing else 'set missing = "category", or fill them in by a rule for each row alone'
    found = _finding(name, "missing", missing, remedy, blocks=not kind.missing)
    if isinstance(kind, Bins):
        found += _of_numbers(name, kind, values, texts)
    else:
        unknown = _where(lambda text: not is_missing(text) and text not in known, texts)
        remedy = "they share a code" if kind.other else "set other = true, or add values that are public"
        found += _finding(name, f"no declared value: {_some(texts, unknown)}", unknown, remedy, blocks=not kind.other)
    if len(texts) > 1 and len(set(texts)) == 1:
        remedy = "harmless; a column that is left out because of this is a choice from private rows"
        found += _finding(name, f"constant: {texts[0]!r} in all rows", list(range(1, len(texts) + 1)), remedy)
    return found


def _of_numbers(name: str, bins: Bins, values: Sequence[Any], texts: Sequence[str]) -> list[RawFinding]:
    """Return the values of a column that are no numbers, or are outside of its range."""
    numbers: list[float] = []
    for value, text in zip(values, texts, strict=True):
        try:
            numbers.append(math.inf if text.startswith("<") else number_of(value))
        except ValueError:
            numbers.append(math.inf)
    low, high = bins.edges[0], bins.edges[-1]
    wrong = _where(math.isinf, numbers)
    outside = _where(lambda number: not math.isinf(number) and (number < low or number > high), numbers)
    are_dates = any(is_date(texts[row - 1]) for row in wrong)
    remedy = OF_DATES if are_dates else 'correct them, or set kind = "category"'
    found = _finding(name, f"no number: {_some(texts, wrong)}", wrong, remedy, blocks=True)
    remedy = "they count as the nearest end; correct the unit, or the range from a public source"
    what = f"outside of {low:g} to {high:g}: {_some(texts, outside)}"
    return found + _finding(name, what, outside, remedy)


def _copies(schema: Schema, rows: Sequence[Hashable]) -> list[RawFinding]:
    """Return the rows that have the same declared columns as an earlier row."""
    remedy = "a person in several rows is protected less: leave out exact copies, or set unit to a column of persons"
    if schema.by_person:
        remedy = "harmless within one person; a person under two names is protected less"
    return _finding("", "the same declared columns as an earlier row", _repeated(rows), remedy)


def _of_units(schema: Schema, texts: Mapping[str, Sequence[str]]) -> list[RawFinding]:
    """Return the rows without an identifier, repeated ids of rows, and persons with more rows than are kept."""
    name = f"{schema.identifier}"
    keys = [person_of(text) for text in texts[name]]
    found = _finding(name, "missing", _where(is_nobody, keys), "fill them in, or leave the rows out", blocks=True)
    if not schema.by_person:
        remedy = "leave copies out, or set unit to the column that identifies a person"
        return found + _finding(name, "an id that an earlier row has", _repeated(keys), remedy, blocks=True)
    counts, most = Counter(key for key in keys if not is_nobody(key)), schema.max_rows or 1
    first = {key: row for row, key in reversed(list(enumerate(keys, start=1)))}
    several = [first[key] for key, count in counts.items() if count > 1]
    beyond = [first[key] for key, count in counts.items() if count > most]
    what = f"persons with several rows, of {len(counts)} persons; the most is {max(counts.values(), default=0)}"
    found += _finding(name, what, several, "unit protects them together; num_examples counts persons")
    remedy = f"rows after the first {most} are dropped; max_rows must be a public number"
    return found + _finding(name, f"persons with more than max_rows = {most} rows", beyond, remedy)


def _persons(others: Mapping[str, Sequence[Any]]) -> list[RawFinding]:
    """Return the undeclared columns that seem to identify persons with several rows, although unit is "row"."""
    found: list[RawFinding] = []
    for name, values in others.items():
        keys = [person_of(text) for text in map(text_or_kind, values) if not is_nobody(text)]
        if _OF_PERSONS.search(name) and len(set(keys)) < len(keys):
            what = f"{len(set(keys))} values in {len(keys)} rows, and unit is 'row'"
            remedy = f'if it identifies persons, set unit = "{name}": several rows of a person are protected less'
            found += _finding(name, what, _repeated(keys), remedy)
    return found
