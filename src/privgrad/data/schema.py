"""The declared schema of a table: columns, label, classes and the privacy unit, checked before a file is read."""

import math
import os
import re
import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from numbers import Number, Real
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from annotated_types import Ge
from torch import Tensor

from privgrad.errors import PrivacyError, described, did_you_mean, expected, require_integer
from privgrad.features import Bins, OneHot

_WHOLE = re.compile(r"^([+-]?\d+)\.0+$")  # tables write whole numbers with or without a fraction
# Marks of a missing value, reduced to letters and digits: those of R, pandas, SQL, JSON, spreadsheets and surveys.
_NOBODY = {
    *("na", "nan", "nana", "nat", "snan", "qnan", "1qnan", "1ind"),
    *("none", "null", "nil", "undef", "undefined", "empty", "blank"),
    *("missing", "unknown", "anonymous", "notavailable", "notapplicable"),
}
_WHOLE_MARKS = (r"\n",)  # \N of SQL dumps; "N" alone may be a name
_NAMES = ("nana",)  # a name as it is; "N/A N/A" is a mark
PathLike = str | os.PathLike[str]
# A TOML file that names a loader is checked against the types of the loader's arguments.
Natural = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
ROW = "row"  # the unit of a table whose every row is protected by itself
_KEYS = {
    "number": ("kind", "range", "bins", "edges", "log", "missing"),
    "category": ("kind", "values", "other", "missing"),
    "text": ("kind", "length"),
    "ignore": ("kind",),
}
OF_DATES = (  # a remedy
    "turn dates into numbers by a rule for each person alone, such as the month or the days since an earlier visit"
)
_MISSING = ("", "nan", "null")
_MOST_BINS = 10_000


def person_of(text: str) -> str:
    """Return the name of a unit from the text of its column: "7" for "7.0", one for texts that Unicode calls equal."""
    return _WHOLE.sub(r"\1", unicodedata.normalize("NFC", text).strip())


def is_nobody(name: str) -> bool:
    """Return whether a text marks a missing name, such as "", "NA", "<NA>", "None" or "?", in any case.

    All rows with such a text would be one unit, although they belong to many people.
    """
    lowered = unicodedata.normalize("NFKC", name).strip().casefold()
    letters = "".join(letter for letter in lowered if letter.isalnum())
    return not letters or lowered in _WHOLE_MARKS or (letters in _NOBODY and lowered not in _NAMES)


def key_of_user(user: Hashable) -> Hashable | None:
    """Return the key that all examples of a user share; None if the value names nobody.

    Texts and numbers have the key of their name in a table, so "7 ", "7.0", 7 and 7.0 are one user. A tuple has the
    keys of its parts, and each part must name something. Other values are their own keys.
    """
    value: Any = cast("Any", user).item() if isinstance(user, Tensor | np.generic) else user
    if isinstance(value, tuple):
        keys = tuple(map(key_of_user, cast("tuple[Hashable, ...]", value)))
        return None if None in keys else keys
    is_text = isinstance(value, str | Number)
    text = text_of(value) if is_text else f"{value}"
    if value is None or value != value or is_nobody(text):  # NaN and NaT differ from themselves
        return None
    return person_of(text) if is_text else value


@dataclass(frozen=True)
class Text:
    """A column of free text, as rows of bytes; see `features.text_rows`."""

    width: int  # the bytes of a row


class Where(NamedTuple):
    """The place of a declaration, for errors: the function, and what precedes the names of its arguments."""

    function: str
    prefix: str = ""

    def wrong(self, name: str, condition: str, got: object, remedy: str) -> PrivacyError:
        return expected(self.function, f"{self.prefix}{name}", condition, got, remedy)


@dataclass(frozen=True)
class Schema:
    """A checked declaration of a table; see `data.table` for its attributes."""

    columns: Mapping[str, Bins | OneHot | Text]
    label: str
    classes: tuple[str, ...]
    unit: str
    max_rows: int | None
    row_id: str | None

    @property
    def by_person(self) -> bool:
        """Whether the unit is a person with all of their rows."""
        return self.unit != ROW

    @property
    def identifier(self) -> str | None:
        """The column that names the unit; None if only the content of a row does."""
        return self.unit if self.by_person else self.row_id

    @property
    def names(self) -> list[str]:
        """The names of the columns that are read."""
        return [*self.columns, self.label, *([] if self.identifier is None else [self.identifier])]


def text_of(value: object) -> str:
    """Return the text by which values are compared, without surrounding blanks; "" for None and NaN.

    A whole number has no decimal point, and True is "true". The same value from a CSV, an SQLite or a Parquet file has
    the same text.

    Raises:
        ValueError: the value is bytes, a list or a mapping, which is no single value.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return f"{int(value)}"
    if isinstance(value, bytes | bytearray | list | tuple | Mapping | set):
        raise ValueError(f"a {type(cast(object, value)).__name__}")
    return f"{value}".strip()


def is_missing(text: str) -> bool:
    """Return whether a text is a missing value: empty, NaN or null; `is_nobody` is for names of persons."""
    return text.lower() in _MISSING


def is_date(text: str) -> bool:
    """Return whether a text is a date, with or without a time, as ISO 8601 and pandas write it."""
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def number_of(value: object) -> float:
    """Return a number, NaN if it is missing; raise ValueError for a value that is no number."""
    text = text_of(value)
    if is_missing(text):
        return math.nan
    if isinstance(value, bool) or "_" in text:
        raise ValueError(text)
    return float(text)


def schema_of(
    where: Where,
    *,
    columns: Any,
    label: Any,
    classes: Any,
    unit: Any,
    max_rows: int | None = None,
    row_id: str | None = None,
) -> Schema:
    """Return the checked schema of a table; raise PrivacyError if the declaration is incomplete or contradicts itself.

    The arguments are as in `data.table`.
    """
    shown: object = columns
    if not isinstance(columns, Mapping) or not columns:
        remedy = 'declare each input column, such as age = { kind = "number", range = [0, 100] }'
        raise where.wrong("columns", "to be a table of columns", described(shown), remedy)
    tables = cast("Mapping[str, Any]", columns)
    kinds = {name: _column(where, name, table) for name, table in tables.items()}
    read = {name: kind for name, kind in kinds.items() if kind is not None}
    if not read:
        raise where.wrong("columns", "to hold an input column", f"{len(kinds)} ignored columns", "declare one")
    texts = [name for name, kind in read.items() if isinstance(kind, Text)]
    if texts and len(read) > 1:
        remedy = 'set kind = "ignore" in the other columns, or join the texts to one column'
        raise where.wrong("columns", "to hold a column of text alone", ", ".join(read), remedy)
    if not isinstance(label, str) or not label:
        raise where.wrong("label", "to be the name of a column", described(label), "name the column of the classes")
    names = _texts(where, "classes", classes)
    if len(names) < 2:
        raise where.wrong("classes", "to be at least two values", list(names), "list the label's allowed values")
    require_unit(where, unit, max_rows, row_id)
    person = unit if unit != ROW else None
    for role, name in (("label", label), ("unit", person), ("row_id", row_id)):
        if name in read:
            remedy = f"remove it from columns: it is no input, because it is the {role}"
            raise where.wrong(role, "to be a column apart from the inputs", repr(name), remedy)
    if label in (person, row_id):
        raise where.wrong("label", "to differ from the unit", repr(label), "name the column of the classes")
    return Schema(read, label, names, unit, max_rows, row_id)


def require_unit(where: Where, unit: Any, max_rows: int | None, row_id: str | None = None) -> None:
    """Raise PrivacyError unless the unit is declared, and max_rows exactly for persons."""
    if not isinstance(unit, str) or not unit:
        remedy = 'with "row", a person with several rows is protected less; with a column, they are protected together'
        condition = 'to be "row" or the name of the column that identifies a person'
        raise where.wrong("unit", condition, described(unit), remedy)
    if unit == ROW and max_rows is not None:
        remedy = "leave it out, or name the column that identifies a person as unit"
        raise where.wrong("max_rows", 'to be absent for unit "row"', max_rows, remedy)
    if unit != ROW and (isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1):
        remedy = "give the most rows to keep per person, a public number; later rows of the file are dropped. "
        remedy += f'If each person has one row, set unit = "row", and for a table row_id = "{unit}"'
        if unit.lower() in ("rows", "example", "examples"):  # hardly a column
            remedy = f'set unit = "row" to protect each row by itself; for a column {unit!r}, give max_rows'
        raise where.wrong("max_rows", "to be a whole number >= 1 for a unit with several rows", max_rows, remedy)
    if unit != ROW and row_id is not None:
        raise where.wrong("row_id", 'to be absent unless unit is "row"', repr(row_id), "leave it out")


def _column(where: Where, name: str, table: Any) -> Bins | OneHot | Text | None:
    """Return the codes of one declared column; None for a column that is ignored."""
    place = f"columns.{name}"
    if not isinstance(table, Mapping):
        shown: object = table
        remedy = 'give a table, such as { kind = "category", values = ["yes", "no"] }'
        raise where.wrong(place, "to be a table with a kind", described(shown), remedy)
    keys = cast("Mapping[str, Any]", table)
    kind = keys.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        remedy = did_you_mean(kind, list(_KEYS), "choose one of these")
        raise where.wrong(f"{place}.kind", f"to be one of {', '.join(_KEYS)}", repr(kind), remedy)
    for key in keys:
        if key not in _KEYS[kind]:
            remedy = did_you_mean(key, _KEYS[kind], f"choose one of {', '.join(_KEYS[kind])}")
            raise where.wrong(f"keys of {place}", f"to be known for kind {kind}", repr(key), remedy)
    missing = keys.get("missing", "error")
    if missing not in ("error", "category"):
        remedy = 'with "category", missing values have a code of their own'
        raise where.wrong(f"{place}.missing", 'to be "error" or "category"', repr(missing), remedy)
    if kind == "number":
        return _bins(where, place, keys, missing=missing == "category")
    if kind == "category":
        values, other = _texts(where, f"{place}.values", keys.get("values")), keys.get("other", False)
        if not isinstance(other, bool):
            raise where.wrong(f"{place}.other", "to be true or false", described(other), "others share a code if true")
        return OneHot(values, other, missing == "category")
    if kind == "text":
        length = keys.get("length", 2048)
        require_integer(where.function, f"{where.prefix}{place}.length", length, 1)
        return Text(length)
    return None


def _bins(where: Where, place: str, keys: Mapping[str, Any], *, missing: bool) -> Bins:
    if ("range" in keys) == ("edges" in keys):
        got = "range and edges" if "range" in keys else sorted(keys)
        remedy = "give range = [low, high] with bins, or edges, from what is publicly known and not from the data"
        raise where.wrong(place, "to have exactly one of range and edges", got, remedy)
    log = keys.get("log", False)
    if not isinstance(log, bool):
        raise where.wrong(f"{place}.log", "to be true or false", described(log), "write log = true")
    if "edges" in keys:
        for key in {"bins", "log"} & keys.keys():
            raise where.wrong(f"{place}.{key}", "to be absent next to edges", keys[key], "leave one of the two out")
        edges = _numbers(where, f"{place}.edges", keys["edges"])
        if len(edges) < 3 or any(low >= high for low, high in pairwise(edges)):
            remedy = "give the ends of the range and an edge between, in rising order"
            raise where.wrong(f"{place}.edges", "to be at least three rising numbers", keys["edges"], remedy)
        return Bins(tuple(edges), missing)
    ends = _numbers(where, f"{place}.range", keys["range"])
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise where.wrong(f"{place}.range", "to be [low, high] with low < high", keys["range"], "correct it")
    bins = keys.get("bins", 16)
    require_integer(where.function, f"{where.prefix}{place}.bins", bins, 2)
    if bins > _MOST_BINS:
        raise where.wrong(f"{place}.bins", f"to be at most {_MOST_BINS}", bins, "give a number such as 16")
    if log and ends[0] < 0:
        raise where.wrong(f"{place}.range", "to begin at 0 or above for log = true", ends, "leave log out")
    return Bins.equal(ends[0], ends[1], bins, log=log, missing=missing)


def _numbers(where: Where, place: str, values: Any) -> list[float]:
    shown: object = values
    given: Sequence[Any] = cast("Sequence[Any]", values) if isinstance(values, list | tuple) else [None]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise where.wrong(place, "to be a list of finite numbers", described(shown), "correct it")
    return [float(value) for value in given]


def _texts(where: Where, place: str, values: Any) -> tuple[str, ...]:
    shown: object = values
    given: Sequence[Any] = cast("Sequence[Any]", values) if isinstance(values, list | tuple) else []
    if not given or any(not isinstance(value, str | int | float) for value in given):
        remedy = "list the allowed values from a codebook or form, not from the data"
        raise where.wrong(place, "to be a list of texts, numbers or true and false", described(shown), remedy)
    texts = tuple(text_of(value) for value in given)
    if double := [text for text in texts if texts.count(text) > 1]:
        raise where.wrong(place, "to be different values", repr(double[0]), "list each value once")
    if "" in texts:
        remedy = 'leave it out, and set missing = "category" in the column for missing values'
        raise where.wrong(place, "to be values that are not empty", list(texts), remedy)
    return texts
