"""Rows of a table or a folder that do not fit their declaration, or count a person several times. NOT private.

All that it returns is computed from the private rows without noise.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privgrad.data import schema as schemas
from privgrad.data.images import SUFFIXES, read_image, require_images, require_pillow, units_of
from privgrad.data.read_rows import read_columns
from privgrad.data.schema import OF_DATES, ROW, Schema, Text, Where
from privgrad.data.table import key_of_row, part_in_file, require_every, require_split
from privgrad.errors import PrivacyError
from privgrad.features import Bins, OneHot

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


def raw_findings(path: Path, *, table: str | None = None, **declaration: Any) -> list[RawFinding]:
    """Return what a table holds that needs a decision before a training.

    The arguments are as in `data.table`; `declaration` holds those of `schema_of`.

    Raises:
        PrivacyError: the declaration is wrong, or the file is absent, damaged or lacks a column.
    Privacy:
        NOT private. A rule that is changed because of a finding depends on the private rows; the remedies say so.
    """
    schema = schemas.schema_of(Where("doctor"), **declaration)
    read_columns("doctor", path, schema.names, table)  # its errors name declared columns
    content = read_columns("doctor", path, None, table)
    texts = {name: [text_or_kind(value) for value in content[name]] for name in schema.names}
    labels = texts[schema.label]
    rows = _where(lambda text: text not in schema.classes, labels)
    remedy = "add the class if it is public, or leave out rows without a label"
    found = _finding(schema.label, f"no declared class: {_some(labels, rows)}", rows, remedy, blocks=True)
    for name, kind in schema.columns.items():
        if not isinstance(kind, Text):
            found += _of_column(name, kind, content[name], texts[name])
    declared = list(zip(*(texts[name] for name in (*schema.columns, schema.label)), strict=True))
    remedy = "a person in several rows is protected less: leave out exact copies, or set unit to a column of persons"
    if schema.by_person:
        remedy = "harmless within one person; a person under two names is protected less"
    found += _finding("", "the same declared columns as an earlier row", _repeated(declared), remedy)
    found += _of_units(schema, texts) if schema.identifier is not None else []
    others = {name: content[name] for name in content if name not in schema.names}
    return found + ([] if schema.by_person else _persons(others))


def raw_image_findings(
    folder: Path, *, classes: Any, size: Any, channels: Any, unit: Any, max_rows: Any = None
) -> list[RawFinding]:
    """Return the images of a folder that cannot be read, all of them, and those that are copies of others.

    The arguments are as in `data.image_folder`, which checks the form of the folder.

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


def text_or_kind(value: object) -> str:
    """Return the text of a value; its kind in angle brackets, if it is no single value."""
    try:
        return schemas.text_of(value)
    except ValueError as error:
        return f"<{error}>"


def _finding(column: str, what: str, rows: Sequence[int | str], cure: str, *, blocks: bool = False) -> list[RawFinding]:
    return [RawFinding(column, what, len(rows), tuple(rows[:_SHOWN]), cure, blocks)] if rows else []


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


def _of_column(name: str, kind: Bins | OneHot, values: Sequence[Any], texts: Sequence[str]) -> list[RawFinding]:
    known: tuple[str, ...] = kind.values if isinstance(kind, OneHot) else ()  # pyright: ignore[reportAssignmentType]
    missing = _where(lambda text: schemas.is_missing(text) and text not in known, texts)
    has_code = "they have a code of their own"
    remedy = has_code if kind.missing else 'set missing = "category", or fill them in by a rule for each row alone'
    found = _finding(name, "missing", missing, remedy, blocks=not kind.missing)
    if isinstance(kind, Bins):
        found += _of_numbers(name, kind, values, texts)
    else:
        unknown = _where(lambda text: not schemas.is_missing(text) and text not in known, texts)
        remedy = "they share a code" if kind.other else "set other = true, or add values that are public"
        found += _finding(name, f"no declared value: {_some(texts, unknown)}", unknown, remedy, blocks=not kind.other)
    if len(texts) > 1 and len(set(texts)) == 1:
        remedy = "harmless; a column that is left out because of this is a choice from private rows"
        found += _finding(name, f"constant: {texts[0]!r} in all rows", list(range(1, len(texts) + 1)), remedy)
    return found


def _of_numbers(name: str, bins: Bins, values: Sequence[Any], texts: Sequence[str]) -> list[RawFinding]:
    """Return the values of a column that are no numbers, or are outside of its range."""
    numbers: list[float] = []  # with inf for what is no number
    for value, text in zip(values, texts, strict=True):
        try:
            numbers.append(math.inf if text.startswith("<") else schemas.number_of(value))
        except ValueError:
            numbers.append(math.inf)
    low, high = bins.edges[0], bins.edges[-1]
    wrong = _where(math.isinf, numbers)
    outside = _where(lambda number: not math.isinf(number) and (number < low or number > high), numbers)
    are_dates = any(schemas.is_date(texts[row - 1]) for row in wrong)
    remedy = OF_DATES if are_dates else 'correct them, or set kind = "category"'
    found = _finding(name, f"no number: {_some(texts, wrong)}", wrong, remedy, blocks=True)
    remedy = "they count as the nearest end; correct the unit, or the range from a public source"
    what = f"outside of {low:g} to {high:g}: {_some(texts, outside)}"
    return found + _finding(name, what, outside, remedy)


def _of_units(schema: Schema, texts: Mapping[str, Sequence[str]]) -> list[RawFinding]:
    """Return the rows without an identifier, repeated ids of rows, and persons with more rows than are kept."""
    name = f"{schema.identifier}"
    keys = [schemas.person_of(text) for text in texts[name]]
    missing = _where(schemas.is_nobody, keys)
    found = _finding(name, "missing", missing, "fill them in, or leave the rows out", blocks=True)
    if not schema.by_person:
        remedy = "leave copies out, or set unit to the column that identifies a person"
        return found + _finding(name, "an id that an earlier row has", _repeated(keys), remedy, blocks=True)
    counts, most = Counter(key for key in keys if not schemas.is_nobody(key)), schema.max_rows or 1
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
        keys = [schemas.person_of(text) for text in map(text_or_kind, values) if not schemas.is_nobody(text)]
        if _OF_PERSONS.search(name) and len(set(keys)) < len(keys):
            what = f"{len(set(keys))} values in {len(keys)} rows, and unit is 'row'"
            remedy = f'if it identifies persons, set unit = "{name}": several rows of a person are protected less'
            found += _finding(name, what, _repeated(keys), remedy)
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
    """Return the sizes of a table, also of one with rows that a training refuses.

    `declared` holds the arguments of `schema_of`, and `table`. `split` holds the arguments of `data.table` in SPLIT
    that were given; it is None for the file that is the test part.

    Raises:
        PrivacyError: the declaration is wrong, or the file is absent, damaged or lacks a column.
    Privacy:
        NOT private.
    """
    options = {name: value for name, value in declared.items() if name != "table"}
    schema = schemas.schema_of(Where("doctor"), **options)
    read_columns("doctor", path, schema.names, declared.get("table"))  # its errors name declared columns
    content = read_columns("doctor", path, None, declared.get("table"))
    texts = {name: [text_or_kind(value) for value in content[name]] for name in schema.names}
    if schema.identifier is None:
        keys = [key_of_row(row) for row in zip(*texts.values(), strict=True)]
    else:  # rows without an identifier are no unit
        persons = [schemas.person_of(text) for text in texts[schema.identifier]]
        keys = list(dict.fromkeys(key for key in persons if not schemas.is_nobody(key)))
    labels = texts[schema.label]
    return RawSize(
        rows=len(labels),
        kind="rows",
        units=len(keys) if schema.by_person else None,
        classes=len(set(labels) & set(schema.classes)),
        declared=len(schema.classes),
        training=None if split is None else _training(path.name, keys, schema.identifier, split),
        unused=tuple(name for name in content if name not in schema.names),
    )


def raw_folder_size(folder: Path, declared: Mapping[str, Any], split: Mapping[str, Any] | None) -> RawSize:
    """Return the sizes of a folder of images, also of one with damaged images.

    `declared` holds the arguments of `data.image_folder`; `split` is as in `raw_table_size`.

    Raises:
        PrivacyError: the folder has another form than `image_folder` takes.
    Privacy:
        NOT private.
    """
    unit, classes = declared["unit"], declared["classes"]
    units = units_of(folder, classes, unit, None)
    found = {image.label for _, images in units for image in images}
    training = None if split is None else _training(folder.name, [key for key, _ in units], None, split)
    count = sum(len(images) for _, images in units)
    return RawSize(count, "images", None if unit == ROW else len(units), len(found), len(classes), training)


def raw_count_findings(size: RawSize, num_examples: object) -> list[RawFinding]:
    """Return what is wrong with a public count for the training part of a file; nothing if it suits, or is no number.

    Privacy:
        NOT private. No remedy names a number that comes from the data.
    """
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


def _training(name: str, keys: Sequence[str | bytes], identifier: str | None, split: Mapping[str, Any]) -> int:
    where, test, every = Where("doctor"), split.get("test"), split.get("test_every")
    shares = {part: split.get(part, 0.0) for part in ("test_share", "validation_share")}
    key_of_split = split.get("split_key", "")
    require_split(where, test, **shares, split_key=key_of_split)
    require_every(where, every, identifier, test, shares["test_share"])
    parts = [part_in_file(name, key, every=every, split_key=key_of_split, **shares) for key in keys]
    return parts.count("train")
