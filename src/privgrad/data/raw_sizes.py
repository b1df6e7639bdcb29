"""The sizes of a table or a folder and of its training part, compared with the public count. NOT private.

`cli.doctor` calls `raw_table_size`, `raw_folder_size` and `raw_count_findings`, before a training. The privacy
guarantee does not rest on this file. All that it returns is counted from the private rows without noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privgrad.data.findings import RawFinding, text_or_kind
from privgrad.data.own_images import units_of
from privgrad.data.own_table import key_of_row, part_in_file, require_every, require_split
from privgrad.data.read_rows import read_columns
from privgrad.data.schema import ROW, Schema, Where, schema_of
from privgrad.data.units import is_nobody, person_of

SPLIT = ("test", "test_share", "test_every", "validation_share", "split_key")  # the options that divide the units
_SHOWN = 10  # columns that are not used
_FAR = {True: 2, False: 4}  # times num_examples: more persons, or rows, than this waste much of the epsilon


@dataclass(frozen=True)
class RawSize:
    """The sizes of one file or folder. NOT private.

    Attributes:
        rows: the number of rows or images.
        kind: "rows" or "images".
        units: the number of persons; None if each row is a unit.
        classes: the number of declared classes that occur.
        declared: the number of declared classes.
        training: the number of units in the training part; None for a file that is the test part.
        unused: the columns of a table that are not declared.
    """

    rows: int
    kind: str
    units: int | None
    classes: int
    declared: int
    training: int | None
    unused: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the sizes as one line."""
        name = self.kind if self.units is None else "persons"
        of = "" if self.units is None else f" of {self.units:,} persons"
        part = "the test part" if self.training is None else f"{self.training:,} {name} in the training part"
        return f"{self.rows:,} {self.kind}{of} in {self.classes} of {self.declared} declared classes; {part}"

    def note(self) -> str:
        """Return a sentence on the columns that are not used, or "" if there are none."""
        more = f" and {len(self.unused) - _SHOWN:,} more" if len(self.unused) > _SHOWN else ""
        names = ", ".join(self.unused[:_SHOWN]) + more
        return f"columns that are not declared, so that no training uses them: {names}" if names else ""


def raw_table_size(path: Path, declared: Mapping[str, Any], split: Mapping[str, Any] | None) -> RawSize:
    """Return the sizes of a table, also of one with rows that a training refuses.

    Args:
        path: as in `own_table.table`.
        declared: the arguments of `schema_of`, and `table`.
        split: the arguments of `own_table.table` in SPLIT that were given; None for the file that is the test part.
    Raises:
        PrivacyError: the declaration is wrong, or the file is absent, damaged or lacks a column.
    Privacy:
        NOT private.
    """
    where, options = Where("doctor"), {name: value for name, value in declared.items() if name != "table"}
    schema = schema_of(where, **options)
    names, table = list(dict.fromkeys(schema.names)), declared.get("table")
    content = read_columns("doctor", path, None, table)
    if not content.keys() >= set(names):
        read_columns("doctor", path, names, table)  # raises the error that names the column
    texts = {name: [text_or_kind(value) for value in content[name]] for name in names}
    keys = _keys(schema, texts)
    training = None if split is None else _training(path.name, keys, schema.identifier, split)
    labels = texts[schema.label]
    found = len(set(labels) & set(schema.classes))
    units, unused = len(keys) if schema.by_person else None, tuple(name for name in content if name not in names)
    return RawSize(len(labels), "rows", units, found, len(schema.classes), training, unused)


def raw_folder_size(folder: Path, declared: Mapping[str, Any], split: Mapping[str, Any] | None) -> RawSize:
    """Return the sizes of a folder of images, also of one with damaged images.

    Args:
        folder: as in `own_images.image_folder`.
        declared: its arguments classes, unit and max_rows.
        split: as in raw_table_size.
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


def _keys(schema: Schema, texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the text of each unit that decides its part; rows without an identifier have none."""
    if schema.identifier is None:
        return [key_of_row(row) for row in zip(*texts.values(), strict=True)]
    keys = [person_of(text) for text in texts[schema.identifier]]
    return list(dict.fromkeys(key for key in keys if not is_nobody(key)))


def _training(name: str, keys: Sequence[str | bytes], identifier: str | None, split: Mapping[str, Any]) -> int:
    """Return the number of units in the training part."""
    where, test, every = Where("doctor"), split.get("test"), split.get("test_every")
    shares = {part: split.get(part, 0.0) for part in ("test_share", "validation_share")}
    key_of_split = split.get("split_key", "")
    require_split(where, test, **shares, split_key=key_of_split)
    require_every(where, every, identifier, test, shares["test_share"])
    parts = [part_in_file(name, key, every=every, split_key=key_of_split, **shares) for key in keys]
    return parts.count("train")
