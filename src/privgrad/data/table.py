"""A data set from a table of your own: a schema of public numbers, and parts that are decided for each unit alone."""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.checks.data import warn_of_private_bound
from privgrad.data import schema as schemas
from privgrad.data.dataset import NO_LABEL, DataSet
from privgrad.data.read_rows import FRAME, Frame, read_columns, read_frame
from privgrad.data.schema import OF_DATES, PathLike, Positive, Schema, Text, Where
from privgrad.errors import described, did_you_mean, expected, require_integer
from privgrad.features import Bins, OneHot, join, text_rows

Kind = Bins | OneHot | Text
Share = Annotated[float, Ge(0), Lt(1)]
Part = Literal["train", "validation", "test"]
_LONGEST_KEY = 64  # bytes, of BLAKE2b
_EQUAL = 1e-2  # relative difference of codes in half precision


def is_rows(values: object) -> bool:
    """Return whether values are one row by column name, or a list of such rows."""
    if isinstance(values, list | tuple):
        rows = cast("Sequence[object]", values)
        return len(rows) > 0 and isinstance(rows[0], Mapping)
    return isinstance(values, Mapping)


def row_codes(function: str, schema: Schema, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the codes of one row or n rows exactly as `table` returns those of a file: (n, width).

    Rows are by column name, and other columns than the inputs are not read. It raises PrivacyError if a row lacks a
    column, or has a value that the schema does not declare.
    """
    given = [rows] if isinstance(rows, Mapping) else rows
    for number, row in enumerate(given, start=1):
        if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = 'give each row as {"column": value, ...}'
            raise expected(function, f"row {number}", "to be a dict by column name", described(row), remedy)
        if lacking := [name for name in schema.columns if name not in row]:
            others = [f"{name}" for name in row if name not in schema.columns]
            remedy = did_you_mean(lacking[0], others, "give every input column; None is a missing value")
            got = f"no column {', '.join(map(repr, lacking))}"
            raise expected(function, f"row {number}", "to have the columns of the training", got, remedy)
    columns = {name: [row[name] for row in given] for name in schema.columns}
    texts = {name: texts_of(function, "the rows", name, values) for name, values in columns.items()}
    return encoded(function, "the rows", schema, columns, texts)


def encoded(
    function: str, source: str, schema: Schema, columns: Mapping[str, Sequence[Any]], texts: Mapping[str, Sequence[str]]
) -> Tensor:
    """Return the codes of all input columns side by side, (n, width); bytes for a column of text.

    A value of `columns` without a code raises PrivacyError, which names `source`, the file or the rows.
    """
    codes = [_codes(function, source, name, kind, columns[name], texts[name]) for name, kind in schema.columns.items()]
    return join(*codes) if codes[0].is_floating_point() else codes[0]


def texts_of(function: str, source: str, name: str, values: Sequence[Any]) -> list[str]:
    """Return the texts of a column; see `schema.text_of`."""
    texts: list[str] = []
    for row, value in enumerate(values, start=1):
        try:
            texts.append(schemas.text_of(value))
        except ValueError as error:
            place, remedy = f"row {row}, column {name!r} of {source}", "split it into columns with one value each"
            raise expected(function, place, "to be a single value", error, remedy) from error
    return texts


def _codes(function: str, source: str, name: str, kind: Kind, values: Sequence[Any], texts: Sequence[str]) -> Tensor:
    """Return the codes of a column, (n, width); raise PrivacyError for the first value that has none."""
    if isinstance(kind, Text):
        return text_rows(texts, kind.width)
    numbers: list[float] = []
    categories: list[str | None] = []
    for row, (value, text) in enumerate(zip(values, texts, strict=True), start=1):
        place = f"row {row}, column {name!r} of {source}"
        known = isinstance(kind, OneHot) and text in kind.values
        if schemas.is_missing(text) and not known and not kind.missing:
            remedy = f'fill it in with a public constant, or set missing = "category" in columns.{name} before training'
            raise expected(function, place, "to have a value", repr(text), remedy)
        if isinstance(kind, Bins):
            try:
                numbers.append(schemas.number_of(value))
            except ValueError as error:
                usual = f'correct it, or set kind = "category" in columns.{name} before training'
                remedy = OF_DATES if schemas.is_date(text) else usual
                raise expected(function, place, "to be a number", described(value), remedy) from error
            continue
        if not known and not schemas.is_missing(text) and not kind.other:
            remedy = f"add it to columns.{name}.values before training if it is public, or set other = true"
            options = [f"{choice}" for choice in kind.values]
            raise expected(function, place, "to be a declared value", repr(text), did_you_mean(text, options, remedy))
        categories.append(text if known or not schemas.is_missing(text) else None)
    if not isinstance(kind, Bins):
        return kind(categories)
    low, high = kind.edges[0], kind.edges[-1]
    if outside := sum(number < low or number > high for number in numbers):
        warnings.warn(
            f"NOT PRIVATE: {outside:,} of {len(numbers):,} values in column {name!r} of {source} are outside of "
            f"{low:g} to {high:g} and count as the nearest end. If that is not meant, correct the unit or the range",
            stacklevel=5,
        )
    return kind(numbers)


def width_of(schema: Schema) -> int:
    """Return the number of codes of a row, or the bytes of a text."""
    return sum(kind.width for kind in schema.columns.values())


def require_codes(function: str, schema: Schema, inputs: Tensor, first: int = 0) -> None:
    """Raise PrivacyError unless inputs can be codes of this schema: one code in each column, or a row of zeros.

    Inputs have shape (..., width). Codes of other columns with the same widths are not noticed, and a column of text is
    not checked. `first` is the number of the first row, for errors.
    """
    kinds = schema.columns
    if any(isinstance(kind, Text) for kind in kinds.values()):
        return
    rows = inputs.reshape(len(inputs), -1, width_of(schema)).float()
    widths = [kind.width for kind in kinds.values()]
    parts = cast("Sequence[Tensor]", rows.split(widths, dim=-1))  # pyright: ignore[reportUnknownMemberType]
    counts = torch.stack([(part != 0).sum(-1) for part in parts], -1)  # (n, rows of a person, columns)
    sizes = torch.stack([part.sum(-1) for part in parts], -1)
    are_equal = (sizes - sizes[..., :1]).abs().amax(-1) <= _EQUAL * sizes[..., 0]
    fits = ((counts == 1).all(-1) & are_equal) | (counts == 0).all(-1)
    if bool(fits.all()):
        return
    row, own = (int(place) for place in (~fits).nonzero()[0])
    column = int((counts[row, own] != 1).int().argmax())
    number = int(counts[row, own, column])
    got = f"{number} codes in the place of {list(kinds)[column]!r}" if number != 1 else "codes of several sizes"
    condition = f"to have one code for each of the columns {', '.join(kinds)}, in this order"
    remedy = f'give rows by name, such as [{{"{next(iter(kinds))}": ...}}], and the head encodes them'
    raise expected(function, f"row {first + row}", condition, got, remedy)


def declaration_of(schema: Schema) -> dict[str, Any]:
    """Return the schema for JSON, as `schema_of` takes it. All of it is declared, and so public."""
    return {
        "columns": {name: _declared(kind) for name, kind in schema.columns.items()},
        "label": schema.label,
        "classes": list(schema.classes),
        "unit": schema.unit,
        "max_rows": schema.max_rows,
        "row_id": schema.row_id,
    }


def _declared(kind: Kind) -> dict[str, Any]:
    if isinstance(kind, Text):
        return {"kind": "text", "length": kind.width}
    missing = "category" if kind.missing else "error"
    if isinstance(kind, Bins):
        return {"kind": "number", "edges": list(kind.edges), "missing": missing}
    return {"kind": "category", "values": list(kind.values), "other": kind.other, "missing": missing}


def table(
    path: PathLike | Frame,
    *,
    columns: Mapping[str, Mapping[str, Any]],
    label: str,
    classes: Sequence[str | int | bool],
    unit: str | None = None,
    max_rows: Positive | None = None,
    row_id: str | None = None,
    test: PathLike | Frame | None = None,
    test_share: Share = 0.0,
    test_every: Annotated[int, Ge(2)] | None = None,
    validation_share: Share = 0.0,
    split_key: str = "",
    table: str | None = None,
) -> DataSet:
    """Load a table of your own, by a schema that you declare; docs/own-data.md lists its rules.

    Inputs are one-hot codes of categories and of bins of numbers, side by side, scaled so that each row of the table
    has norm 1. With a person as unit, each input holds all rows of one person: (max_rows, width), with rows of zeros
    and labels NO_LABEL for rows that the person does not have. A training needs privacy unit "user" for them.

    A column of text is the only input: bytes, int8 (n, length), for the extractors of `privgrad.features`. A TOML's
    `[data] file` gives these arguments.

    Args:
        path: a file .csv, .parquet, .arrow, .feather, .sqlite or .db, a folder that `datasets` saved to disk, or a
            DataFrame of pandas, whose index is not read.
        columns: each input column by name, a table with a `kind`: "number" with `range` and `bins`, or `edges`;
            "category" with `values`; "text" with `length`; or "ignore". Columns that are not declared are not read.
        label: the column of the classes.
        classes: the label's allowed values, in the order of the class numbers.
        unit: required. "row" protects each row by itself; a person with several rows is then protected less. The name
            of a column that identifies a person protects all rows of a person together.
        max_rows: for persons: the most rows per person, a public number. The person's first rows in the file are kept.
        row_id: for rows: a column that names each row. Without it, rows of the same content share a part.
        test: a second file or DataFrame of the same columns, whose rows are the test part.
        test_share: the share of units in the test part, in [0, 1); 0 with `test` and with `test_every`.
        test_every: k >= 2: units whose id is an integer one below a multiple of k form the test part. It repeats
            published splits. Needs `row_id`, or persons with integer ids.
        validation_share: the share of units in the validation part, in [0, 1).
        split_key: a text that changes which units are in which part; at most 64 bytes.
        table: the table of an SQLite file.
    Returns:
        A data set with split "unit". A unit's part depends on a hash of this unit, and of `split_key`, only. How many
        units a part has is therefore private.
    Raises:
        PrivacyError: the declaration is incomplete, the file is absent or damaged, or a value does not fit the
            declaration. The message names the first such row.
    Privacy:
        Ranges, edges, categories, classes and max_rows must be public: taken from a codebook, not from the file. A row
        of the result depends on one unit only.
    """
    where = Where("table")
    schema = schemas.schema_of(
        where, columns=columns, label=label, classes=classes, unit=unit, max_rows=max_rows, row_id=row_id
    )
    require_split(where, test, test_share, validation_share, split_key)
    require_every(where, test_every, schema.identifier, test, test_share)
    own = _read(schema, path, table)
    chosen: dict[Part, list[list[int]]] = {"train": [], "validation": [], "test": []}
    for key, rows in own.units:
        shares = {"test_share": test_share, "validation_share": validation_share}
        chosen[part_in_file(own.name, key, every=test_every, split_key=split_key, **shares)].append(rows)
    if not chosen["train"]:
        remedy = "lower test_share and validation_share, or give a larger file"
        raise expected("table", f"the training part of {own.name}", "to hold at least 1 unit", 0, remedy)
    parts: dict[Any, Any] = {part: _tensors(schema, own, rows) for part, rows in chosen.items()}
    if test is not None:
        other = _read(schema, test, table)
        _require_apart(schema, own, other)
        parts["test"] = _tensors(schema, other, [rows for _, rows in other.units])
    return DataSet(
        name=own.name,
        **parts,
        num_classes=len(schema.classes),
        input_shape=(width_of(schema),),
        split="unit",
        classes=tuple(classes),
        by_person=schema.by_person,
        schema=schema,
    )


class _Content(NamedTuple):
    """The content of one file: inputs (rows, width), labels (rows,), and the text and the rows of each unit."""

    name: str
    inputs: Tensor
    labels: Tensor
    units: list[tuple[str, list[int]]]


def require_split(where: Where, test: object, test_share: float, validation_share: float, split_key: str) -> None:
    """Raise PrivacyError unless the shares leave a training part, and the key fits the hash."""
    for name, share in {"test_share": test_share, "validation_share": validation_share}.items():
        if not isinstance(share, int | float) or not 0 <= share < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise where.wrong(name, "to be in [0, 1)", described(share), "give a share such as 0.25")
    if test is not None and test_share > 0:
        raise where.wrong("test_share", "to be 0 if test is given", test_share, "leave one of the two out")
    if test_share + validation_share >= 1:
        got = f"{test_share} + {validation_share}"
        raise where.wrong("test_share and validation_share", "to be below 1 together", got, "lower one")
    if not isinstance(split_key, str) or len(split_key.encode()) > _LONGEST_KEY:  # pyright: ignore[reportUnnecessaryIsInstance]
        condition = f"to be a text of at most {_LONGEST_KEY} bytes"
        raise where.wrong("split_key", condition, described(split_key), "shorten it")


def require_every(where: Where, every: int | None, identifier: str | None, test: object, test_share: float) -> None:
    """Raise PrivacyError unless `test_every` is absent, or alone decides the test part of units that have an id."""
    if every is None:
        return
    require_integer(where.function, f"{where.prefix}test_every", every, 2)
    if test is not None or test_share > 0:
        got = "test" if test is not None else f"test_share = {test_share}"
        raise where.wrong("test_every", "to be given without test and test_share", got, "leave one of them out")
    if identifier is None:
        raise where.wrong("row_id", "to be given for test_every", None, "give the column of row numbers, or test_share")


def part_in_file(
    name: str, key: str | bytes, *, every: int | None, split_key: str, test_share: float, validation_share: float
) -> Part:
    """Return the part of a unit of a file; raise PrivacyError if `every` is given, and the unit's id is no integer."""
    if every is not None:
        try:
            number = int(key)
        except ValueError as error:
            condition = f"to have integer ids in {name} for test_every"
            raise expected("table", "units", condition, repr(key), "give test_share in its place") from error
        if number % every == every - 1:
            return "test"
    return _part_of(key, split_key, test_share, validation_share)


def part_of(unit: str | bytes, *, test_share: Share, validation_share: Share = 0.0, split_key: str = "") -> Part:
    """Return the part of a unit, from a keyed hash of this unit alone.

    `unit` is the name of the person, or the content of the row. The other arguments are as in `table`.

    Returns:
        "train", "validation" or "test". All rows of one person have the same part.
    Raises:
        PrivacyError: unit is neither text nor bytes, or a number is out of its range.
    Privacy:
        Adding or removing another unit does not change the part. How many units a part has is private.
    """
    require_split(Where("part_of"), None, test_share, validation_share, split_key)
    if not isinstance(unit, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise expected("part_of", "unit", "to be a text or bytes", described(unit), "give str(unit) for all rows")
    return _part_of(schemas.person_of(unit) if isinstance(unit, str) else unit, split_key, test_share, validation_share)


def _part_of(unit: str | bytes, key: str, test_share: float, validation_share: float) -> Part:
    """Return the part of a unit, as `part_of` does, for checked numbers."""
    content = unit.encode("utf-8", "surrogatepass") if isinstance(unit, str) else unit
    place = int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key.encode()).digest()) / 2**64
    if place < test_share:
        return "test"
    return "validation" if place < test_share + validation_share else "train"


def _read(schema: Schema, source: PathLike | Frame, table: str | None) -> _Content:
    """Return the content of one table; units are in the order of their first rows, with at most max_rows rows each."""
    names = list(dict.fromkeys(schema.names))
    if isinstance(source, Frame):
        if table is not None:
            raise expected("table", "table", f"to be absent for {FRAME}", repr(table), "leave it out")
        file, content = FRAME, read_frame("table", source, names)
    else:
        file, content = Path(source).name, read_columns("table", Path(source), names, table)
    texts = {name: texts_of("table", file, name, content[name]) for name in content}
    inputs = encoded("table", file, schema, content, texts)
    for name, kind in schema.columns.items():  # a saved head holds the ranges
        if isinstance(kind, Bins):
            numbers = torch.tensor([schemas.number_of(value) for value in content[name]], dtype=torch.float64)
            present = numbers[~numbers.isnan(), None]
            for end, of in ((0, "low"), (-1, "high")):
                bound = torch.tensor(float(kind.edges[end]))
                warn_of_private_bound("table", f"the {of} of columns.{name}", bound, present, is_low=end == 0)
    labels = torch.tensor(_classes(schema, file, texts[schema.label]))
    if schema.identifier is None:
        units = [(key_of_row(row), [place]) for place, row in enumerate(zip(*texts.values(), strict=True))]
        return _Content(file, inputs, labels, units)
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(texts[schema.identifier]):
        key = schemas.person_of(text)
        place = f"row {row + 1}, column {schema.identifier!r} of {file}"
        if schemas.is_nobody(key):
            raise expected("table", place, "to identify the unit", repr(key), "fill it in, or leave the row out")
        if key in rows and not schema.by_person:
            remedy = "leave the copy out, or set unit to the column that identifies a person"
            raise expected("table", place, f"to differ from row {rows[key][0] + 1}", repr(key), remedy)
        rows.setdefault(key, []).append(row)
    return _Content(file, inputs, labels, [(key, own[: schema.max_rows]) for key, own in rows.items()])


def key_of_row(texts: Sequence[str]) -> str:
    """Return the text that decides the part of a row without a name."""
    return json.dumps(texts)


def _require_apart(schema: Schema, own: _Content, other: _Content) -> None:
    """Raise PrivacyError if a unit that has a name is in both files, and so in two parts, or one file is a copy."""
    condition = f"to differ from those of {own.name}"
    remedy = f"leave them out of one file, or give test_share in place of {other.name}"
    own_keys, other_keys = ([key for key, _ in content.units] for content in (own, other))
    if schema.identifier is None:  # such rows may be equal by chance: only many that occur once, or all, are a copy
        counts = Counter(other_keys)
        once = [key for key, count in Counter(own_keys).items() if count == counts[key] == 1]
        if own_keys == other_keys or len(once) > min(len(own_keys), len(other_keys)) // 2:  # the number is private
            raise expected("table", f"rows of {other.name}", condition, "copies", remedy)
    elif shared := set(own_keys) & set(other_keys):
        raise expected("table", f"units of {other.name}", condition, f"{len(shared)} of them in both", remedy)


def _tensors(schema: Schema, content: _Content, units: Sequence[Sequence[int]]) -> TensorDataset:
    """Return inputs and labels, one row per unit: (n, width) and (n,), or for persons (n, max_rows, ...)."""
    if not schema.by_person:
        chosen = torch.tensor([row for rows in units for row in rows], dtype=torch.int64)
        return TensorDataset(content.inputs[chosen], content.labels[chosen])
    inputs = content.inputs.new_zeros(len(units), schema.max_rows or 1, content.inputs.shape[1])
    labels = torch.full(inputs.shape[:2], NO_LABEL)
    for unit, rows in enumerate(units):
        inputs[unit, : len(rows)] = content.inputs[rows]
        labels[unit, : len(rows)] = content.labels[rows]
    return TensorDataset(inputs, labels)


def _classes(schema: Schema, file: str, texts: Sequence[str]) -> list[int]:
    code = {name: index for index, name in enumerate(schema.classes)}
    for row, text in enumerate(texts, start=1):
        if text not in code:
            place = f"row {row}, column {schema.label!r} of {file}"
            remedy = did_you_mean(text, schema.classes, "add it to classes, or leave out rows without a label")
            raise expected("table", place, f"to be one of {', '.join(schema.classes)}", repr(text), remedy)
    return [code[text] for text in texts]
