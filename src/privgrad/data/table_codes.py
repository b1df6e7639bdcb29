"""The codes of rows of a table by its schema, for a whole file and for single rows; and the schema as JSON.

`own_table` encodes files with it. `heads` encodes the rows that a saved head predicts, so both have the same codes. The
privacy guarantee rests on this: the codes of a row depend on that row and on the public schema only.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from privgrad.data.schema import OF_DATES, Schema, Text, is_date, is_missing, number_of, text_of
from privgrad.errors import described, did_you_mean, expected
from privgrad.features import Bins, OneHot, join, text_rows

Kind = Bins | OneHot | Text
_EQUAL = 1e-2  # relative difference of codes in half precision


def is_rows(values: object) -> bool:
    """Return whether values are one row by column name, or a list of such rows. `heads` calls it."""
    if isinstance(values, list | tuple):
        rows = cast("Sequence[object]", values)
        return len(rows) > 0 and isinstance(rows[0], Mapping)
    return isinstance(values, Mapping)


def row_codes(function: str, schema: Schema, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the codes of rows exactly as `data.table` returns those of a file: (n, width), one row per row.

    Args:
        function: the name for errors.
        schema: of the table of the training.
        rows: one row, or n rows, by column name. Other columns than the inputs are not read.
    Raises:
        PrivacyError: a row lacks a column, or has a value that the schema does not declare.
    """
    given = [rows] if isinstance(rows, Mapping) else rows
    for number, row in enumerate(given, start=1):
        if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = 'give each row as {"column": value, ...}'
            raise expected(function, f"row {number}", "to be a dict by column name", described(row), remedy)
        if lacking := [name for name in schema.columns if name not in row]:
            names = [f"{name}" for name in row]
            remedy = "give every input column; None is a missing value"
            remedy = did_you_mean(lacking[0], [name for name in names if name not in schema.columns], remedy)
            got = f"no column {', '.join(map(repr, lacking))}"
            raise expected(function, f"row {number}", "to have the columns of the training", got, remedy)
    columns = {name: [row[name] for row in given] for name in schema.columns}
    return encoded(
        function,
        "the rows",
        schema,
        columns,
        {name: texts_of(function, "the rows", name, columns[name]) for name in columns},
    )


def encoded(
    function: str,
    source: str,
    schema: Schema,
    columns: Mapping[str, Sequence[Any]],
    texts: Mapping[str, Sequence[str]],
) -> Tensor:
    """Return the codes of all input columns side by side, (n, width); bytes for a column of text.

    Args:
        function: the name for errors.
        source: the file or the rows, for errors.
        schema: declares the columns.
        columns: the values of each column, n.
        texts: the same as texts, by `texts_of`.
    Raises:
        PrivacyError: a value has no code.
    """
    codes = [_codes(function, source, name, kind, columns[name], texts[name]) for name, kind in schema.columns.items()]
    return join(*codes) if codes[0].is_floating_point() else codes[0]


def texts_of(function: str, source: str, name: str, values: Sequence[Any]) -> list[str]:
    """Return the texts of a column; see `schema.text_of`."""
    texts: list[str] = []
    for row, value in enumerate(values, start=1):
        try:
            texts.append(text_of(value))
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
        if is_missing(text) and not known and not kind.missing:
            remedy = f'fill it in with a public constant, or set missing = "category" in columns.{name} before training'
            raise expected(function, place, "to have a value", repr(text), remedy)
        if isinstance(kind, Bins):
            try:
                numbers.append(number_of(value))
            except ValueError as error:
                remedy = f'correct it, or set kind = "category" in columns.{name} before training'
                remedy = OF_DATES if is_date(text) else remedy
                raise expected(function, place, "to be a number", described(value), remedy) from error
            continue
        if not known and not is_missing(text) and not kind.other:
            remedy = f"add it to columns.{name}.values before training if it is public, or set other = true"
            options = [f"{choice}" for choice in kind.values]
            raise expected(function, place, "to be a declared value", repr(text), did_you_mean(text, options, remedy))
        categories.append(text if known or not is_missing(text) else None)
    if not isinstance(kind, Bins):
        return kind(categories)
    _warn_of_range(source, name, kind, numbers)
    return kind(numbers)


def _warn_of_range(source: str, name: str, bins: Bins, numbers: Sequence[float]) -> None:
    """Warn of numbers outside the declared range. NOT private: the warning is printed only."""
    low, high = bins.edges[0], bins.edges[-1]
    if outside := sum(number < low or number > high for number in numbers):
        warnings.warn(
            f"NOT PRIVATE: {outside:,} of {len(numbers):,} values in column {name!r} of {source} are outside of "
            f"{low:g} to {high:g} and count as the nearest end. If that is not meant, correct the unit or the range",
            stacklevel=6,
        )


def width_of(schema: Schema) -> int:
    """Return the number of codes of a row, or the bytes of a text."""
    return sum(kind.width for kind in schema.columns.values())


def require_codes(function: str, schema: Schema, inputs: Tensor, first: int = 0) -> None:
    """Raise PrivacyError unless inputs can be codes of this schema: one code in each column, or a row of zeros.

    `heads` calls it for rows that are given as codes. Codes of other columns with the same widths are not noticed.

    Args:
        function: the name for errors.
        schema: of the training; one with a column of text is not checked.
        inputs: shape (..., width).
        first: the number of the first row, for errors.
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
    """Return the schema for JSON, as `schema.schema_of` takes it. All of it is declared, and so public."""
    return {
        "columns": {name: _declared(kind) for name, kind in schema.columns.items()},
        "label": schema.label,
        "classes": list(schema.classes),
        "unit": schema.unit,
        "max_rows": schema.max_rows,
        "row_id": schema.row_id,
    }


def _declared(kind: Kind) -> dict[str, Any]:
    """Return the declaration of one column."""
    if isinstance(kind, Text):
        return {"kind": "text", "length": kind.width}
    missing = "category" if kind.missing else "error"
    if isinstance(kind, Bins):
        return {"kind": "number", "edges": list(kind.edges), "missing": missing}
    return {"kind": "category", "values": list(kind.values), "other": kind.other, "missing": missing}
