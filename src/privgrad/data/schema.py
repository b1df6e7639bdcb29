"""The declared schema of a table: its columns, label and privacy unit, and how each of them reads a text.

Ranges, categories and codes are declared and not fitted, so a saved head codes new rows as the training coded its own.
"""

import math
import os
import re
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from itertools import pairwise
from numbers import Integral, Number, Real
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge
from torch import Tensor

from privgrad.errors import described, did_you_mean, expected, require_choice
from privgrad.features import Bins, Hats, OneHot, text_rows

PathLike = str | os.PathLike[str]
# A TOML file that names a loader is checked against the types of the loader's arguments.
Natural = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
ROW = "row"  # the unit of a table whose every row is protected by itself
_DATE = re.compile(r"\d{4}-\d\d-\d\d\b")
_WHOLE = re.compile(r"^([+-]?\d+)\.0+$")  # tables write whole numbers with or without a fraction
# Marks of a missing name, reduced to letters and digits: those of R, pandas, SQL, JSON, spreadsheets and surveys.
# All rows with one of them would be one unit, although they belong to many people.
_NOBODY = {
    *("na", "nan", "nana", "nat", "snan", "qnan", "1qnan", "1ind"),
    *("none", "null", "nil", "undef", "undefined", "empty", "blank"),
    *("missing", "unknown", "anonymous", "notavailable", "notapplicable"),
}
_WHOLE_MARKS = (r"\n",)  # \N of SQL dumps; "N" alone may be a name
_NAMES = ("nana",)  # a name as it is; "N/A N/A" is a mark
_MISSING = ("", "nan", "nat", "null")  # NaT is a date that pandas lacks
_MOST_BINS = 10_000
_MOST_PRODUCTS = 1_000  # codes of a pair of columns, and knots of a number in it
_KNOTS_OF_PAIR = 5
_SECONDS = 86_400  # of a day


def is_a(value: Any, *kinds: Any) -> bool:
    """Return what `isinstance` does, for a value whose items stay Any."""
    return isinstance(value, kinds)


def person_of(text: str) -> str:
    """Return the name of a unit from the text of its column: "7" for "7.0", one for texts that Unicode calls equal."""
    return _WHOLE.sub(r"\1", unicodedata.normalize("NFC", text).strip())


def is_nobody(name: str) -> bool:
    """Return whether a text marks a missing name, such as "", "NA", "<NA>", "None" or "?", in any case."""
    lowered = unicodedata.normalize("NFKC", name).strip().casefold()
    letters = "".join(letter for letter in lowered if letter.isalnum())
    return not letters or lowered in _WHOLE_MARKS or (letters in _NOBODY and lowered not in _NAMES)


def key_of_user(user: Hashable) -> Hashable | None:
    """Return the key of a user: the name in a table for texts and numbers; None if the value names nobody."""
    given: Any = user
    value: Any = given.item() if isinstance(user, Tensor | np.generic) else given
    if is_a(value, list, tuple):
        keys = tuple(map(key_of_user, value))
        return None if None in keys else keys
    is_text = isinstance(value, str | Number)
    text = text_of(value) if is_text else f"{value}"
    if value is None or value != value or is_nobody(text):  # NaN and NaT differ from themselves
        return None
    return person_of(text) if is_text else value


class NoText(str):
    """The kind of a value that is no single value, such as "<a list>"."""


def text_of(value: Any) -> str:
    """Return the text of a value, the same one from a CSV, an SQLite or a Parquet file; "" for None and NaN."""
    if is_a(value, np.floating, np.bool):
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return f"{int(value)}"
    if is_a(value, bytes, bytearray, list, tuple, Mapping, set):
        return NoText(f"<a {type(value).__name__}>")
    return f"{value}".strip()


def is_missing(text: str) -> bool:
    """Return whether a text is a missing value: empty, NaN or null; `is_nobody` is for names of persons."""
    return text.lower() in _MISSING


def date_of(text: str, form: str | None = None) -> datetime:
    """Return the date of a text as ISO 8601 and pandas write it, or of a format of `strptime`; else ValueError."""
    return datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)


class Fault(NamedTuple):
    """The rows of a column whose texts have no value, or perhaps not the one that is meant."""

    what: str  # for a list of findings, such as "no number"
    condition: str  # for an error, such as "to be a number"
    rows: list[int]  # from 0
    remedy: str
    level: Literal["error", "warning", "code"] = "error"  # "code": such texts have a code of their own


# The parts of a date: the smallest and the largest number, how many numbers share a code, and the number of a date.
_PARTS: dict[str, tuple[int, int, int, Callable[[datetime], int]]] = {
    "year": (0, 0, 1, lambda date: date.year),  # the range is declared
    "month": (1, 12, 1, lambda date: date.month),
    "day": (1, 31, 1, lambda date: date.day),
    "weekday": (0, 6, 1, lambda date: date.weekday()),
    "hour": (0, 23, 1, lambda date: date.hour),
    "day_of_year": (1, 366, 7, lambda date: date.timetuple().tm_yday),  # weeks from January 1
}
_OF_DATES = "write dates as 2026-01-31, or declare their format, such as format = '%d.%m.%Y'"
# Of a text without a value, by the kind of column: for a finding, for an error, and the remedy.
_WRONG: dict[str, tuple[str, str, str]] = {
    "number": ("no number", "to be a number", 'correct it, or set kind = "category" before training'),
    "bounded": ("no number", "to be a number", "correct it, or give classes in place of bounds"),
    "days_between": ("no two dates", "to be two dates", _OF_DATES),
    "date": ("no date", "to be a date", _OF_DATES),
    "category": ("no declared value", "to be one of {}", "add it to values if it is public, or set other = true"),
    "class": ("no declared class", "to be one of {}", "add it to classes, or leave out rows without a label"),
}


@dataclass(frozen=True)
class Column:
    """A declared column: `read` finds its values and its faults, and `encode` returns the codes of the values."""

    name: str  # for errors
    declared: Mapping[str, Any]  # the kind and all options, as JSON holds them; public

    @property
    def kind(self) -> str:
        return self.declared["kind"]

    @property
    def sources(self) -> Sequence[str]:
        """The columns of the table that this one reads."""
        return self.declared.get("dates", [self.name])

    @cached_property
    def blocks(self) -> list[Bins | Hats | OneHot]:
        """The codes, block by block, each with a sum of 1; none for a column of text."""
        own, missing = self.declared, self.declared.get("missing") == "category"
        if "knots" in own:
            return [Hats(own["knots"], missing)]
        if "edges" in own:
            return [Bins(own["edges"], missing)]
        if "values" in own:
            return [OneHot(own["values"], own["other"], missing)]
        found: list[Bins | Hats | OneHot] = []
        for part in own.get("as", []):
            low, high, step, _ = _PARTS[part]
            low, high = own["range"] if part == "year" else (low, high)
            edges = [number - 0.5 for number in range(low, high + 1, step)]  # a bin begins below its first number
            found.append(Bins((*edges, edges[-1] + step), missing))
        return found

    @property
    def of_pair(self) -> "Column":
        """The column as a part of a pair: of at most 5 of its knots, with both ends."""
        knots: Sequence[float] = self.declared.get("knots", ())
        if len(knots) <= _KNOTS_OF_PAIR:
            return self
        places = np.linspace(0, len(knots) - 1, _KNOTS_OF_PAIR).round().astype(int)
        return Column(self.name, {**self.declared, "knots": [knots[place] for place in places]})

    @property
    def ends(self) -> tuple[float, float] | None:
        """The smallest and the largest number that is expected, or year; None if none is declared."""
        numbers = self.declared.get("range") or self.declared.get("edges") or self.declared.get("knots")
        return None if not numbers else (numbers[0], numbers[-1])

    @property
    def width(self) -> int:
        """The number of codes of a row, or the bytes of a text."""
        return self.declared.get("length", 0) + sum(block.width for block in self.blocks)

    def encode(self, values: Sequence[Any]) -> list[Tensor]:
        """Return the codes of n values, block by block, each (n, width of the block); bytes for a column of text."""
        if self.kind in ("text", "category"):
            return [text_rows(values, self.width)] if self.kind == "text" else [self.blocks[0](values)]
        numbers = [values]
        if self.kind == "date":
            of = [_PARTS[part][-1] for part in self.declared["as"]]
            numbers = [[None if date is None else number(date) for date in values] for number in of]
        given = ([math.nan if number is None else number for number in own] for own in numbers)
        return [block(own) for block, own in zip(self.blocks, given, strict=True)]

    def read(self, table: Mapping[str, Sequence[str]]) -> tuple[list[Any], list[Fault]]:
        """Return the value of each row, None where it is missing, and all faults, from the texts of a table."""
        has_other, has_missing = self.declared.get("other"), self.declared.get("missing") == "category"
        known, value_of, is_text = self.declared.get("values", ()), self._reader(), self.kind == "text"
        values: list[Any] = []
        several, missing, wrong = list[int](), list[int](), list[int]()
        rows = list(zip(*(table[source] for source in self.sources), strict=True))
        for row, texts in enumerate(rows):
            values.append(texts[0] if has_other else None)
            if NoText in map(type, texts):
                several.append(row)
            elif not is_text and any(map(is_missing, texts)) and texts[0] not in known:
                missing.append(row)
                values[-1] = None
            else:
                try:
                    values[-1] = value_of(*texts)
                except (KeyError, ValueError, OverflowError):
                    wrong.append(row)
        cure = 'set missing = "category" before training' if "missing" in self.declared else "leave the row out"
        remedy = "they have a code of their own" if has_missing else f"fill it in with a public constant, or {cure}"
        faults = [
            Fault("no single value", "to be a single value", several, "split it into columns of one value each"),
            Fault("missing", "to have a value", missing, remedy, "code" if has_missing else "error"),
        ]
        if wrong:
            what, condition, remedy = _WRONG[self.kind]
            remedy = "they share a code" if has_other else remedy  # a similar code may be another disease
            if self.kind == "number" and _DATE.match(rows[wrong[0]][0]):
                remedy = 'set kind = "date", or kind = "days_between" for the days between two dates'
            condition = condition.format(", ".join(known))
            faults.append(Fault(what, condition, wrong, remedy, "code" if has_other else "error"))
        if (ends := self.ends) is not None:
            numbers = [value.year if isinstance(value, datetime) else value for value in values]
            outside = [row for row, one in enumerate(numbers) if one is not None and not ends[0] <= one <= ends[1]]
            remedy = "they count as the nearest end; correct the unit, or the range from a public source"
            faults.append(Fault(f"outside of {ends[0]:g} to {ends[1]:g}", "", outside, remedy, "warning"))
        return values, faults

    def drawn(self, rng: np.random.Generator, count: int) -> list[Any]:
        """Return values that are drawn evenly from what is declared."""
        if self.kind == "category":
            return [self.declared["values"][place] for place in rng.integers(len(self.declared["values"]), size=count)]
        if self.kind == "date":
            first, last = self.declared.get("range") or (2000, 2000)
            days = rng.uniform(0, (datetime(last, 12, 31) - datetime(first, 1, 1)).days + 1, size=count)
            return [datetime(first, 1, 1) + timedelta(days=one) for one in days.tolist()]
        if (ends := self.ends) is None:
            raise expected("synthetic_rows", f"column {self.name!r}", "to hold numbers, dates or categories", self.kind)
        return rng.uniform(*ends, size=count).tolist()

    def shown(self, table: Mapping[str, Sequence[str]]) -> Sequence[str]:
        """Return what each row of a table holds, for errors and findings."""
        first, *others = (table[source] for source in self.sources)
        return list(map(" to ".join, zip(first, *others, strict=True))) if others else first

    def _reader(self) -> Callable[..., Any]:
        """Return the function from the texts of a row to its value; it raises an error for texts without one."""
        values: Sequence[str] = self.declared.get("values", ())
        match self.kind:
            case "number" | "bounded":
                return partial(_number, finite=self.kind == "bounded")
            case "date":
                return partial(date_of, form=self.declared["format"])
            case "days_between":
                return partial(_days, form=self.declared["format"])
            case "category":
                return partial(_declared, dict(zip(values, values, strict=True)))
            case "class":
                return partial(_declared, {name: number for number, name in enumerate(values)})
            case _:
                return str


def _declared(values: Mapping[str, Any], text: str) -> Any:
    """Return what a declared value is; a text of pandas, "1.0" or "True", is 1 or true if not declared."""
    if text in values:
        return values[text]
    return {_as_written(value): found for value, found in values.items()}[_as_written(text)]


def _as_written(text: str) -> str:
    whole = _WHOLE.sub(r"\1", text)
    return whole.lower() if whole.lower() in ("true", "false") else whole


def _number(text: str, *, finite: bool) -> float:
    number = float(text)
    if "_" in text or math.isnan(number) or (finite and math.isinf(number)):  # "1_000" is a number for Python alone
        raise ValueError(text)
    return number


def _days(*texts: str, form: str | None) -> float:
    dates = (date_of(text, form) for text in texts)
    start, end = (date if date.tzinfo else date.replace(tzinfo=UTC) for date in dates)
    return (end - start).total_seconds() / _SECONDS


def rows_by_key(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the rows of each key, from 0."""
    found: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return found


def repeated(keys: Iterable[Any]) -> list[int]:
    """Return the rows whose key an earlier row has, from 0."""
    return sorted(row for rows in rows_by_key(keys).values() for row in rows[1:])


def read_names(texts: Sequence[str], *, unique: bool) -> tuple[list[str], list[Fault]]:
    """Return the name of the unit of each row, and the faults; repeated names are faults if each row is a unit."""
    names = list(map(person_of, texts))
    # All bytes or lists have one text, and would be one unit.
    missing = [row for row, name in enumerate(names) if is_nobody(name) or isinstance(texts[row], NoText)]
    again = [row for row in repeated(names) if unique and not is_nobody(names[row])]
    remedy = "leave copies out, or set unit to the column that identifies a person"
    return names, [
        Fault("missing", "to identify the unit", missing, "fill it in, or leave the row out"),
        Fault("an id that an earlier row has", "to differ from earlier rows", again, remedy),
    ]


@dataclass(frozen=True)
class Schema:
    """A declaration of a table; see `data.table` for its attributes. `schema_of` makes and checks it."""

    columns: Mapping[str, Column]
    label: str
    classes: tuple[str, ...]  # none for a label that is a number
    unit: str
    max_rows: int | None
    row_id: str | None
    bounds: tuple[float, float] | None = None  # of a label that is a number
    counts: bool = False  # whether this number is a count
    interactions: tuple[tuple[str, str], ...] = ()  # pairs of columns

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The width of each block of codes of a row, and how many of these codes are above 0 at most."""
        sizes = [(one.width, 2 if isinstance(one, Hats) else 1) for own in self.columns.values() for one in own.blocks]
        for pair in self.interactions:
            (first,), (second,) = (self.columns[name].of_pair.blocks for name in pair)
            hats = isinstance(first, Hats) + isinstance(second, Hats)
            sizes.append((first.width * second.width, 2**hats))
        return sizes

    @property
    def by_person(self) -> bool:
        """Whether the unit is a person with all of their rows."""
        return self.unit != ROW

    @property
    def identifier(self) -> str | None:
        """The column that names the unit; None if only the content of a row does."""
        return self.unit if self.by_person else self.row_id

    @property
    def inputs(self) -> list[str]:
        """The names of the columns of the table that are inputs, or from which inputs follow."""
        return list(dict.fromkeys(source for column in self.columns.values() for source in column.sources))

    @property
    def names(self) -> list[str]:
        """The names of the columns of the table that are read."""
        return [*self.inputs, self.label, *([] if self.identifier is None else [self.identifier])]

    @property
    def target(self) -> Column:
        """The label: a class, or a number within its bounds."""
        if self.bounds is None:
            return Column(self.label, {"kind": "class", "values": self.classes})
        return Column(self.label, {"kind": "bounded", "range": self.bounds})


def schema_of(
    function: str,
    *,
    columns: Any,
    label: Any,
    classes: Any,
    unit: Any,
    max_rows: int | None = None,
    row_id: str | None = None,
    bounds: Any = None,
    counts: Any = None,
    interactions: Any = None,
) -> Schema:
    """Return the schema of a table, by arguments of `data.table`; raise PrivacyError if they do not make one."""
    _require_option(function, "columns", "columns", columns)
    read = {name: column for name in columns if (column := _column(function, name, columns[name])) is not None}
    if not read:
        raise expected(function, "columns", "to hold an input column", f"{len(columns)} ignored columns")
    _require_option(function, "label", "label", label)
    if (classes is None) == (bounds is None):
        remedy = "list the label's allowed values; for a number, give bounds = [low, high] in its place"
        condition = "to be given" if classes is None else "to be absent next to bounds"
        raise expected(function, "classes", condition, classes, remedy)
    option = "classes" if bounds is None else "bounds"
    _require_option(function, option, option, classes if bounds is None else bounds)
    names, ends = tuple(map(text_of, classes or ())), bounds and (float(bounds[0]), float(bounds[1]))
    _require_option(function, "counts", "counts", counts or False)
    if counts and (ends is None or ends[0] < 0):
        raise expected(function, "bounds", "to be given for counts, from 0 or above", bounds)
    schema = Schema(
        read, label, names, unit, max_rows, row_id, ends, counts or False, _pairs(function, read, interactions or ())
    )
    if len(read) > 1 and any(column.kind == "text" for column in read.values()):
        remedy = 'set kind = "ignore" in the other columns, or join the texts to one column'
        raise expected(function, "columns", "to hold a column of text alone", ", ".join(read), remedy)
    require_unit(function, unit, max_rows, row_id)
    for role, name in (("label", label), ("unit", unit if schema.by_person else None), ("row_id", row_id)):
        if name in (*read, *schema.inputs):
            remedy = f"remove it from columns: it is no input, because it is the {role}"
            raise expected(function, role, "to be a column apart from the inputs", repr(name), remedy)
    if label == schema.identifier:
        raise expected(function, "label", "to differ from the unit", repr(label), "name the column of the classes")
    return schema


def _pairs(function: str, columns: Mapping[str, Column], given: Any) -> tuple[tuple[str, str], ...]:
    """Return pairs of columns; raise PrivacyError unless each has one block of codes, and their products are few."""
    _require_option(function, "interactions", "interactions", given)
    for pair in given:
        widths = [one.of_pair.blocks[0].width for one in map(columns.get, pair) if one and len(one.blocks) == 1]
        condition, got, remedy = "to be pairs of two declared numbers or categories", f"{list(pair)}", ""
        if len(widths) == 2 and (got := widths[0] * widths[1]) > _MOST_PRODUCTS:
            condition = f"to make at most {_MOST_PRODUCTS:,} products of the codes of {' and '.join(pair)}"
            remedy = "declare fewer values or bins, or leave the pair out"
        elif len(widths) == 2:
            continue
        raise expected(function, "interactions", condition, got, remedy)
    return tuple((first, second) for first, second in given)


def knots_of(num_examples: int, numbers: int) -> int:
    """Return the default knots of each of so many numbers: few examples do not find the weights of many codes.

    Source: ours, by the tables of docs/choosing-evidence.md.
    """
    return 16 if num_examples >= 10_000 else 5 if 5 * numbers <= num_examples / 5 else 2


def with_knots(columns: Mapping[str, Any], num_examples: int) -> dict[str, Any]:
    """Return declarations in which numbers have their default knots, unless they name codes of their own."""
    numbers, codes = ("number", "days_between"), {"knots", "bins", "edges"}
    declared = {name: one for name, one in columns.items() if is_a(one, Mapping) and one.get("kind") in numbers}
    knots = knots_of(num_examples, len(declared))
    return {
        name: {**one, "knots": knots} if name in declared and not codes & one.keys() else one
        for name, one in columns.items()
    }


def require_unit(function: str, unit: Any, max_rows: int | None, row_id: str | None = None) -> None:
    """Raise PrivacyError unless the unit is declared, and max_rows exactly for persons."""
    _require_option(function, "unit", "unit", unit)
    if unit == ROW and max_rows is not None:
        remedy = "leave it out, or name the column that identifies a person as unit"
        raise expected(function, "max_rows", 'to be absent for unit "row"', max_rows, remedy)
    if unit != ROW and not _is_whole(max_rows, 1):
        remedy = "give the most rows to keep per person, a public number; later rows of the file are dropped. "
        remedy += f'If each person has one row, set unit = "row", and for a table row_id = "{unit}"'
        raise expected(function, "max_rows", "to be a whole number >= 1 for a unit with several rows", max_rows, remedy)
    if unit != ROW and row_id is not None:
        raise expected(function, "row_id", 'to be absent unless unit is "row"', repr(row_id))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) <= most


def _are_rising(values: Any, least: int, most: float = math.inf) -> bool:
    """Return whether values are a list of so many finite numbers, each above the one before."""
    if not is_a(values, list, tuple) or any(isinstance(one, bool) for one in values):
        return False
    are_finite = all(isinstance(one, Real) and math.isfinite(one) for one in values)
    return are_finite and least <= len(values) <= most and all(low < high for low, high in pairwise(values))


def _are_values(values: Any, least: int = 1) -> bool:
    """Return whether values are a list of at least so many texts, numbers or bools, of which no two are one text."""
    if not is_a(values, list, tuple) or not all(isinstance(value, str | int | float) for value in values):
        return False
    texts = set(map(text_of, values))
    return len(texts) == len(values) >= least and "" not in texts


_PUBLIC = "take it from a codebook, a form or common knowledge, not from the data"
_OF_UNITS = 'with "row", a person with several rows is protected less; with a column, they are protected together'
_SUCH = 'such as age = { kind = "number", range = [0, 100] }'
_ENDS = "to be [low, high] of finite numbers, low < high"
_VALUES = "different texts, numbers or true and false, none of them empty"
# The values that each option takes, and how an error says it.
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "as": (
        lambda value: is_a(value, list, tuple) and 0 < len(value) == sum(part in value for part in _PARTS),
        f"to be a list of {', '.join(_PARTS)}",
        "",
    ),
    "bins": (lambda value: _is_whole(value, 2, _MOST_BINS), f"to be an integer from 2 to {_MOST_BINS}", ""),
    "bounds": (lambda value: _are_rising(value, 2, 2), _ENDS, _PUBLIC),
    "classes": (lambda value: _are_values(value, 2), f"to be a list of at least two {_VALUES}", _PUBLIC),
    "columns": (lambda value: is_a(value, Mapping) and len(value) > 0, "to be a table of columns", _SUCH),
    "counts": (lambda value: isinstance(value, bool), "to be true or false", ""),
    "dates": (lambda value: _are_values(value, 2) and len(value) == 2, "to be the names of two columns of dates", ""),
    "edges": (lambda value: _are_rising(value, 3), "to be at least three rising finite numbers", _PUBLIC),
    "format": (lambda value: isinstance(value, str) and "%" in value, "to be a format such as '%d.%m.%Y'", ""),
    "interactions": (
        lambda value: is_a(value, list, tuple) and all(_are_values(pair, 2) and len(pair) == 2 for pair in value),
        "to be a list of pairs of different columns",
        "such as [['age', 'sex']]",
    ),
    "knots": (
        lambda value: _is_whole(value, 2, _MOST_BINS) or _are_rising(value, 2, _MOST_BINS),
        f"to be an integer from 2 to {_MOST_BINS}, or at least two rising finite numbers",
        _PUBLIC,
    ),
    "label": (_is_name, "to be the name of a column", ""),
    "length": (lambda value: _is_whole(value, 1), "to be an integer >= 1", ""),
    "log": (lambda value: isinstance(value, bool), "to be true or false", ""),
    "missing": (lambda value: value in ("error", "category"), 'to be "error" or "category"', ""),
    "other": (lambda value: isinstance(value, bool), "to be true or false", ""),
    "range": (lambda value: _are_rising(value, 2, 2), _ENDS, _PUBLIC),
    "table": (lambda value: is_a(value, Mapping), "to be a table with a kind", _SUCH),
    "unit": (_is_name, 'to be "row" or the name of the column that identifies a person', _OF_UNITS),
    "values": (_are_values, f"to be a list of {_VALUES}", _PUBLIC),
}
# The codes of numbers, by what a declaration names: hats, unless it names bins.
_CODES: dict[str, dict[str, Any]] = {
    "": {"range": ..., "knots": 16, "log": False},
    " with knots": {"knots": ...},
    " with bins": {"range": ..., "bins": 16, "log": False},
    " with edges": {"edges": ...},
}
_NUMBER: dict[str, Any] = {"kind": "number"}
_DAYS: dict[str, Any] = {"kind": "days_between", "dates": ..., "format": None}
_MISSING_IS: dict[str, Any] = {"missing": "error"}
# The options of each kind with their defaults; ... for those that it needs.
_KINDS: dict[str, dict[str, Any]] = {
    **{f"number{by}": {**_NUMBER, **codes, **_MISSING_IS} for by, codes in _CODES.items()},
    **{f"days_between{by}": {**_DAYS, **codes, **_MISSING_IS} for by, codes in _CODES.items()},
    "category": {"kind": "category", "values": ..., "other": False, **_MISSING_IS},
    "date": {"kind": "date", "as": ..., "range": None, "format": None, **_MISSING_IS},
    "text": {"kind": "text", "length": 2048},
    "ignore": {"kind": "ignore"},
}


def _require_option(function: str, place: str, key: str, value: Any) -> None:
    suits, condition, remedy = _OPTIONS[key]
    if not suits(value):
        raise expected(function, place, condition, described(None if value is ... else value), remedy)


def _column(function: str, name: str, table: Any) -> Column | None:
    """Return a declared column, with all of its options; None for a column that is ignored."""
    place = f"columns.{name}"
    _require_option(function, place, "table", table)
    kinds, kind = [one for one in _KINDS if " " not in one], table.get("kind")
    require_choice(function, f"{place}.kind", kind, kinds)
    named = [by for by in ("edges", "knots", "bins") if by in table and f"{kind} with {by}" in _KINDS]
    named = [by for by in named if by != "knots" or is_a(table[by], list, tuple)]  # their number goes with a range
    of = f"{kind} with {named[0]}" if named else f"{kind}"
    own: dict[str, Any] = {**_KINDS[of], **table}
    for key in own:
        if key not in _KINDS[of]:
            known = [one for name, options in _KINDS.items() if name.split(" ")[0] == kind for one in options]
            remedy = did_you_mean(key, known, f"choose one of {', '.join(_KINDS[of])}")
            raise expected(function, f"keys of {place}", f"to be known for kind {of}", repr(key), remedy)
    for key, value in own.items():
        if value != _KINDS[of][key] or value is ...:
            _require_option(function, f"{place}.{key}", key, value)
    own |= {key: list(own[key]) for key in ("as", "dates") if key in own}
    years = own.get("range") if kind == "date" else None
    if kind == "date" and (
        ("year" in own["as"]) != bool(years) or any(year not in range(1, 10_000) for year in years or ())
    ):
        raise expected(function, f"{place}.range", "to be the first and last year if as has year, else absent", years)
    if kind == "category":
        own["values"] = list(map(text_of, own["values"]))
    own |= {key: list(map(float, own[key])) for key in ("edges", "knots") if is_a(own.get(key), list, tuple)}
    if "log" in own:
        (low, high), log = own.pop("range"), own.pop("log")
        if log and low < 0:
            raise expected(function, f"{place}.range", "to begin at 0 or above for log = true", low)
        if "bins" in own:
            own["edges"] = list(Bins.equal(low, high, own.pop("bins"), log=log).edges)
        else:
            own["knots"] = list(Hats.equal(low, high, own["knots"], log=log).knots)
    if years:
        own["range"] = list(map(int, years))
    return None if kind == "ignore" else Column(name, own)
