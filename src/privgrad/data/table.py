"""A data set from a table of your own: a schema of public numbers, and parts that are decided for each unit alone."""

import hashlib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.checks.data import warn_of_private_bound
from privgrad.data import schema as schemas
from privgrad.data.dataset import NO_LABEL, DataSet
from privgrad.data.read_rows import Frame, read_columns
from privgrad.data.schema import Column, Fault, PathLike, Positive, Schema
from privgrad.errors import PrivacyError, described, did_you_mean, expected, require_integer
from privgrad.features import join

Share = Annotated[float, Ge(0), Lt(1)]
Part = Literal["train", "validation", "test"]
Texts = Mapping[str, Sequence[str]]  # of all rows, by the name of the column
_LONGEST_KEY = 64  # bytes, of BLAKE2b
_LATER = ("bounds", "counts", "interactions")  # options that older declarations do not have
_EQUAL = 1e-2  # relative difference of codes in half precision
_OF_PERSONS = re.compile(
    r"(?:^|[\W_])(?:id|nr|person|patient|user|customer|client|member|subject|student|employee|account|name|email|ssn)s?"
    r"(?:$|[\W_])",
    re.IGNORECASE,
)


def is_rows(values: Any) -> bool:
    """Return whether values are one row by column name, or a list of such rows."""
    return schemas.is_a(values[0] if schemas.is_a(values, list, tuple) and values else values, Mapping)


def row_codes(function: str, schema: Schema, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the codes of one row or n rows by column name, exactly as `table` returns those of a file: (n, width)."""
    given = [rows] if isinstance(rows, Mapping) else rows
    for number, row in enumerate(given, start=1):
        present = list(row) if schemas.is_a(row, Mapping) else []
        if lacking := [name for name in schema.inputs if name not in present]:
            others = [f"{name}" for name in present if name not in schema.inputs]
            remedy = did_you_mean(lacking[0], others, "None is a missing value")
            got = f"no column {', '.join(map(repr, lacking))}" if present else described(row)
            raise expected(function, f"row {number}", "to be a dict with the columns of the training", got, remedy)
    texts = {name: [schemas.text_of(row[name]) for row in given] for name in schema.inputs}
    taken = {name: _taken(function, "the rows", one, texts, few=0.01) for name, one in schema.columns.items()}
    return _codes(schema, taken)


def _taken(function: str, source: str, column: Column, texts: Texts, *, few: float = 0.0) -> list[Any]:
    """Return the values of a column as `report` lets them pass, which warns if more than the share `few` are odd."""
    values, faults = column.read(texts)
    faults = [fault for fault in faults if fault.level != "warning" or len(fault.rows) > few * len(values)]
    report(function, f"column {column.name!r} of {source}", faults, column.shown(texts))
    return values


def report(function: str, place: str, faults: Sequence[Fault], shown: Sequence[str]) -> None:
    """Raise PrivacyError for the first row that stops a training, or warn of values that are perhaps not meant."""
    for fault in sorted((fault for fault in faults if fault.rows), key=lambda fault: fault.rows[0]):
        row = fault.rows[0]
        if fault.level == "error":
            raise expected(function, f"row {row + 1}, {place}", fault.condition, repr(shown[row]), fault.remedy)
        if fault.level == "warning":
            told = f"NOT PRIVATE: {len(fault.rows):,} of {len(shown):,} values in {place} are {fault.what}"
            warnings.warn(f"{told}: {fault.remedy}", stacklevel=6)


def _codes(schema: Schema, values: Mapping[str, Sequence[Any]]) -> Tensor:
    """Return the codes of all input columns side by side, (n, width); bytes for a column of text."""
    codes = [code for name, column in schema.columns.items() for code in column.encode(values[name])]
    for pair in schema.interactions:
        (first,), (second,) = (schema.columns[name].of_pair.encode(values[name]) for name in pair)
        codes.append((first[:, :, None] * second[:, None]).flatten(1))
    return join(*codes) if codes[0].is_floating_point() else codes[0]


def width_of(schema: Schema) -> int:
    """Return the number of codes of a row, or the bytes of a text."""
    return sum(width for width, _ in schema.blocks) or sum(column.width for column in schema.columns.values())


def require_codes(function: str, schema: Schema, inputs: Tensor, first: int = 0) -> None:
    """Raise PrivacyError unless inputs (..., width) can be codes of a schema: each block's sum alike, or all zeros."""
    if not schema.blocks:  # a column of text, which is not checked
        return
    widths, most = [width for width, _ in schema.blocks], torch.tensor([most for _, most in schema.blocks])
    rows: Any = inputs.reshape(len(inputs), -1, width_of(schema)).float()
    parts = rows.split(widths, dim=-1)
    counts = torch.stack([(part != 0).sum(-1) for part in parts], -1)  # (n, rows of a person, blocks)
    sizes = torch.stack([part.sum(-1) for part in parts], -1)
    are_equal = (sizes - sizes[..., :1]).abs().amax(-1) <= _EQUAL * sizes[..., 0]
    fits = (((counts >= 1) & (counts <= most.to(counts.device))).all(-1) & are_equal) | (counts == 0).all(-1)
    if not bool(fits.all()):
        row = int((~fits).nonzero()[0, 0])
        condition = f"to have the codes of the columns {', '.join(schema.columns)}, in this order"
        remedy = f'give rows by name, such as [{{"{schema.inputs[0]}": ...}}], and the head encodes them'
        raise expected(function, f"row {first + row}", condition, f"codes {counts[row].tolist()}", remedy)


def declaration_of(schema: Schema) -> dict[str, Any]:
    """Return the schema for JSON, as `schema_of` takes it. All of it is declared, and so public."""
    own = {name: value for name, value in vars(schema).items() if value or name not in _LATER}
    columns = {name: column.declared for name, column in schema.columns.items()}
    return own | {"columns": columns, "classes": list(schema.classes) or None}


def table(
    path: PathLike | Frame | Mapping[str, Sequence[Any]],
    *,
    columns: Mapping[str, Mapping[str, Any]],
    label: str,
    classes: Sequence[str | int | bool] | None = None,
    unit: str | None = None,
    max_rows: Positive | None = None,
    row_id: str | None = None,
    test: PathLike | Frame | Mapping[str, Sequence[Any]] | None = None,
    test_share: Share = 0.0,
    test_every: Annotated[int, Ge(2)] | None = None,
    validation_share: Share = 0.0,
    split_key: str = "",
    table: str | None = None,
    bounds: Sequence[float] | None = None,
    counts: bool = False,
    interactions: Sequence[Sequence[str]] = (),
) -> DataSet:
    """Load a table of your own, by a schema that you declare; docs/data-reference.md lists its rules.

    Inputs are one-hot codes of categories and hat codes of numbers (`features.Hats`), side by side, scaled so that each
    row of the table has norm 1. With a person as unit, each input holds all rows of one person: (max_rows, width), with
    rows of zeros and labels NO_LABEL for rows that the person does not have. A training needs privacy unit "user" for
    them.

    Labels that are numbers are float32, as they are in the file, and NaN for rows that a person does not have. A
    training counts those outside of `bounds` as the nearest bound.

    A column of text is the only input: bytes, int8 (n, length), for the extractors of `privgrad.features`. A TOML's
    `[data] file` gives these arguments.

    Args:
        path: a file .csv, .parquet, .arrow, .feather, .sqlite or .db, a folder that `datasets` saved to disk, a
            DataFrame of pandas or polars, whose index is not read, a Table of pyarrow, or a dict of columns.
        columns: each input column by name, a table with a `kind`: "number" with `range` and
            the number of `knots`, or a list of `knots`; for one-hot codes with `bins`, or `edges`;
            "category" with `values`; "date" with `as`, the parts of the date; "days_between" with two `dates` and a
            `range`; "text" with `length`; or "ignore". Columns that are not declared are not read.
        label: the column of the classes, or of the number to be predicted.
        classes: the label's allowed values, in the order of the class numbers. Give this or bounds.
        unit: required. "row" protects each row by itself; a person with several rows is then protected less. The name
            of a column that identifies a person protects all rows of a person together.
        max_rows: for persons: the most rows per person, a public number. The person's first rows in the file are kept.
        row_id: for rows: a column that names each row. Without it, rows of the same content share a part.
        test: a second file or table of the same columns, whose rows are the test part.
        test_share: the share of units in the test part, in [0, 1); 0 with `test` and with `test_every`.
        test_every: k >= 2: units whose id is an integer one below a multiple of k form the test part. It repeats
            published splits. Needs `row_id`, or persons with integer ids.
        validation_share: the share of units in the validation part, in [0, 1).
        split_key: a text that changes which units are in which part; at most 64 bytes.
        table: the table of an SQLite file.
        bounds: the public smallest and largest number, for a label that is a number.
        counts: whether this number is a count: heads then predict rates, by Poisson's loss.
        interactions: pairs of columns, such as [["age", "sex"]], that act together: the products of their codes are
            inputs, too, with at most 5 knots of a number.
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
    declared: dict[str, Any] = {"columns": columns, "label": label, "classes": classes, "bounds": bounds}
    declared |= {"counts": counts, "interactions": interactions}
    schema = schemas.schema_of("table", **declared, unit=unit, max_rows=max_rows, row_id=row_id)
    split = Split("table", schema.identifier, test, test_share, validation_share, split_key, test_every)
    own = _read(schema, path, table, others=_OF_PERSONS.search)
    chosen = split.parts(own.name, own.units)
    require_training("table", own.name, "unit", chosen)
    parts: dict[Any, Any] = {part: _tensors(schema, own, rows) for part, rows in chosen.items()}
    if test is not None:
        other = _read(schema, test, table)
        _require_apart(schema, own, other)
        parts["test"] = _tensors(schema, other, [rows for _, rows in other.units])
    return DataSet(
        name=own.name,
        **parts,
        num_classes=len(schema.classes) or 1,
        input_shape=(width_of(schema),),
        split="unit",
        classes=None if classes is None else tuple(classes),
        score="accuracy" if bounds is None else "r2",
        by_person=schema.by_person,
        schema=schema,
    )


def synthetic_rows(schema: Schema, count: int = 256, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw public rows of a table from its declaration alone, for `suggest` and other public statistics.

    Computes: numbers and dates evenly from their ranges, categories and labels evenly from their values.

    Args:
        schema: `DataSet.schema`, of a table without a column of text.
        count: n >= 1.
        seed: >= 0; the same seed gives the same rows.
    Returns:
        Codes (n, width), as those of `table`, and labels (n,), as `fit_head` takes them.
    Raises:
        PrivacyError: the table is a text, or a number is out of its range.
    Privacy:
        No row of the data is used. With a person as unit, each synthetic row is a row of its own.
    """
    require_integer("synthetic_rows", "count", count, 1)
    require_integer("synthetic_rows", "seed", seed, 0)
    rng = np.random.default_rng(seed)
    codes = _codes(schema, {name: column.drawn(rng, count) for name, column in schema.columns.items()})
    if schema.bounds is not None:
        return codes, torch.from_numpy(rng.uniform(*schema.bounds, size=count)).float()
    return codes, torch.from_numpy(rng.integers(len(schema.classes), size=count))


class _Content(NamedTuple):
    """The content of a table: inputs (rows, width), labels (rows,), and the text and the rows of each unit."""

    name: str
    inputs: Tensor
    labels: Tensor
    units: list[tuple[str, list[int]]]


@dataclass(frozen=True)
class Split:
    """How units are divided into parts, by the arguments of `table`."""

    function: str
    identifier: str | None  # the column that names the unit
    test: object = None
    test_share: float = 0.0
    validation_share: float = 0.0
    split_key: str = ""
    test_every: int | None = None

    def __post_init__(self) -> None:
        shares, every = (self.test_share, self.validation_share), self.test_every
        chosen = {"test": self.test is not None, "test_share": self.test_share > 0, "test_every": every is not None}
        if sum(chosen.values()) > 1:
            got = " and ".join(name for name, is_given in chosen.items() if is_given)
            raise expected(self.function, f"one of {', '.join(chosen)}", "to be given", got)
        if not (min(shares) >= 0 and sum(shares) < 1):
            got = f"{shares[0]} and {shares[1]}"
            raise expected(self.function, "test_share and validation_share", "to be >= 0, and below 1 together", got)
        if len(self.split_key.encode()) > _LONGEST_KEY:
            got = described(self.split_key)
            raise expected(self.function, "split_key", f"to be a text of at most {_LONGEST_KEY} bytes", got)
        if every is not None:
            require_integer(self.function, "test_every", every, 2)
            if self.identifier is None:
                remedy = "give the column of row numbers, or test_share"
                raise expected(self.function, "row_id", "to be given for test_every", None, remedy)

    def part(self, unit: str | bytes) -> Part:
        """Return the part of a unit from a keyed hash of this unit alone, unless `test_every` decides."""
        if self.test_every is not None and int(unit) % self.test_every == self.test_every - 1:
            return "test"
        content = unit.encode("utf-8", "surrogatepass") if isinstance(unit, str) else unit
        digest = hashlib.blake2b(content, digest_size=8, key=self.split_key.encode()).digest()
        place = int.from_bytes(digest) / 2**64
        if place < self.test_share:
            return "test"
        return "validation" if place < self.test_share + self.validation_share else "train"

    def parts(self, name: str, units: Iterable[tuple[str | bytes, Any]]) -> dict[Part, list[Any]]:
        """Return the rows of the units of each part."""
        parts: dict[Part, list[Any]] = {"train": [], "validation": [], "test": []}
        for key, rows in units:
            try:
                parts[self.part(key)].append(rows)
            except ValueError as error:  # of int
                condition = f"to have integer ids in {name} for test_every"
                raise expected("table", "units", condition, repr(key), "give test_share in its place") from error
        return parts


def require_training(function: str, name: str, unit: str, parts: Mapping[Part, Sequence[object]]) -> None:
    """Raise PrivacyError if no unit is left for training."""
    if not parts["train"]:
        remedy = "lower test_share and validation_share, or give more data"
        raise expected(function, f"the training part of {name}", f"to hold at least 1 {unit}", 0, remedy)


def part_of(unit: str | bytes, *, test_share: Share, validation_share: Share = 0.0, split_key: str = "") -> Part:
    """Return the part of a unit, from a keyed hash of this unit alone.

    `unit` is the name of the person, or the content of the row. The other arguments are as in `table`.

    Returns:
        "train", "validation" or "test". All rows of one person have the same part.
    Raises:
        PrivacyError: a number is out of its range.
    Privacy:
        Adding or removing another unit does not change the part. How many units a part has is private.
    """
    split = Split("part_of", None, None, test_share, validation_share, split_key)
    return split.part(schemas.person_of(unit) if isinstance(unit, str) else unit)


def _read(schema: Schema, given: Any, table: str | None, others: Callable[[str], object] | None = None) -> _Content:
    """Return the content of a table; units are in the order of their first rows, with at most max_rows rows each."""
    source, texts = read_columns("table", given, schema.names, table=table, others=None if schema.by_person else others)
    for name, fault in persons_in_rows(schema, texts):
        warnings.warn(f"NOT PRIVATE: column {name!r} has {fault.what}: {fault.remedy}", stacklevel=1)
    labels = _taken("table", source, schema.target, texts)
    values = {name: _taken("table", source, column, texts) for name, column in schema.columns.items()}
    for column, own in ((schema.target, labels), *((one, values[name]) for name, one in schema.columns.items())):
        warn_of_private_ends("table", column, own)  # a saved head holds them
    keys, faults = keys_of(schema, texts)
    report("table", f"column {schema.identifier!r} of {source}", faults, texts.get(f"{schema.identifier}", ()))
    units = [(key, [row]) for row, key in enumerate(keys)]
    if schema.by_person:
        units = [(key, rows[: schema.max_rows]) for key, rows in schemas.rows_by_key(keys).items()]
    return _Content(source, _codes(schema, values), torch.tensor(labels), units)


def persons_in_rows(schema: Schema, texts: Texts) -> Iterator[tuple[str, Fault]]:
    """Yield each column that is not declared and seems to name persons, with the rows of persons that came before."""
    unused = [name for name in texts if name not in schema.names]
    for name in () if schema.by_person else filter(_OF_PERSONS.search, unused):
        keys = schemas.rows_by_key(map(schemas.person_of, texts[name]))
        named = [rows for key, rows in keys.items() if not schemas.is_nobody(key)]
        if again := sorted(row for rows in named for row in rows[1:]):
            what = f"{len(named):,} values in {sum(map(len, named)):,} rows, and unit is 'row'"
            remedy = f'if it identifies persons, set unit = "{name}": several rows of a person are protected less'
            yield name, Fault(what, "to be declared as unit", again, remedy, "warning")


def warn_of_private_ends(function: str, column: Column, values: Sequence[Any]) -> None:
    """Warn if the ends of a column's range, or the bounds of a label, seem to be taken from its values."""
    if column.kind != "date" and (ends := column.ends) is not None:
        low, high = map(torch.tensor, ends)
        name = "bounds" if column.kind == "bounded" else f"columns.{column.name}"
        present = torch.tensor([one for one in values if one is not None], dtype=torch.float64)[:, None]
        warn_of_private_bound(function, f"the low of {name}", low, present, is_low=True)
        warn_of_private_bound(function, f"the high of {name}", high, present)


def keys_of(schema: Schema, texts: Texts) -> tuple[list[str], list[Fault]]:
    """Return the text that decides the part of each row, the name of its unit or its own content, and the faults."""
    if schema.identifier is not None:
        return schemas.read_names(texts[schema.identifier], unique=not schema.by_person)
    content = (texts[name] for name in dict.fromkeys(schema.names))
    return list(map(json.dumps, zip(*content, strict=True))), []


def in_both(function: str, what: str, other: str, own: str, got: str) -> PrivacyError:
    """Return the error for a test part that holds units of the training part."""
    remedy = f"leave them out of one, or give test_share in place of {other}"
    return expected(function, f"{what} of {other}", f"to differ from those of {own}", got, remedy)


def _require_apart(schema: Schema, own: _Content, other: _Content) -> None:
    """Raise PrivacyError if a unit that has a name is in both files, and so in two parts, or one file is a copy."""
    own_keys, other_keys = ([key for key, _ in content.units] for content in (own, other))
    if schema.identifier is None:  # such rows may be equal by chance: only many that occur once, or all, are a copy
        counts = Counter(other_keys)
        once = [key for key, count in Counter(own_keys).items() if count == counts[key] == 1]
        if own_keys == other_keys or len(once) > min(len(own_keys), len(other_keys)) // 2:  # the number is private
            raise in_both("table", "rows", other.name, own.name, "copies")
    elif shared := set(own_keys) & set(other_keys):
        raise in_both("table", "units", other.name, own.name, f"{len(shared)} of them in both")


def _tensors(schema: Schema, content: _Content, units: Sequence[Sequence[int]]) -> TensorDataset:
    """Return inputs and labels, one row per unit: (n, width) and (n,), or for persons (n, max_rows, ...)."""
    if not schema.by_person:
        chosen = torch.tensor([row for rows in units for row in rows], dtype=torch.int64)
        return TensorDataset(content.inputs[chosen], content.labels[chosen])
    inputs = content.inputs.new_zeros(len(units), schema.max_rows or 1, content.inputs.shape[1])
    labels = content.labels.new_full(inputs.shape[:2], NO_LABEL if schema.bounds is None else math.nan)
    for unit, rows in enumerate(units):
        inputs[unit, : len(rows)] = content.inputs[rows]
        labels[unit, : len(rows)] = content.labels[rows]
    return TensorDataset(inputs, labels)
