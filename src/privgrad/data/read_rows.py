"""The rows of a table: of CSV, Parquet, Arrow, Feather, SQLite, Hugging Face datasets, data frames, or columns."""

import csv
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from privgrad.data.schema import is_a, text_of
from privgrad.errors import did_you_mean, expected, file_problem, readable
from privgrad.plugins import optional

Columns = dict[str, list[Any]]
Choose = Callable[[list[str]], list[str]]  # from the columns that are there, those to read
SUFFIXES = (".csv", ".parquet", ".arrow", ".feather", ".sqlite", ".db")


@runtime_checkable
class Frame(Protocol):
    """The parts of a DataFrame of pandas or polars by which it is recognized, so that neither is imported."""

    @property
    def columns(self) -> Any: ...
    @property
    def to_numpy(self) -> Any: ...


def read_columns(
    function: str,
    given: Any,
    names: Sequence[str],
    *,
    table: str | None = None,
    others: Callable[[str], object] | None = None,
) -> tuple[str, dict[str, list[str]]]:
    """Return the name of a table, given as in `data.table`, and the texts of named columns and of `others`."""
    path = Path(given) if hasattr(given, "__fspath__") or isinstance(given, str) else None
    name = f"the {type(given).__name__}" if path is None else path.name
    is_sqlite = path is not None and path.suffix.lower() in (".sqlite", ".db")
    if path is not None and not path.is_dir():
        if path.suffix.lower() not in SUFFIXES:
            raise expected(function, "file", f"to end in one of {', '.join(SUFFIXES)}", name, "convert it to CSV, say")
        if problem := file_problem(path):
            raise expected(function, "file", "to be a readable table", f"{path}, which {problem}", "correct the path")
    if (table is not None) != is_sqlite:
        raise expected(function, "table", f"to be {'given' if is_sqlite else 'absent'} for {name}", repr(table))
    choose = partial(_chosen, function, name, names, others)
    with readable(function, name, "to be a readable table", "write it again, in UTF-8, or give a dict of columns"):
        if path is None:
            columns = _held(given, choose)
        elif path.is_dir():
            columns = _held(_module(function, "datasets", path).Dataset.load_from_disk(f"{path}"), choose)
        elif is_sqlite:
            columns = _sqlite(function, path, f"{table}", choose)
        elif path.suffix.lower() == ".csv":
            columns = _csv(function, path, choose)
        else:
            columns = _held(_arrow(function, path), choose)
    if not any(columns.values()):
        raise expected(function, name, "to hold at least 1 row", 0)
    first = next(iter(columns))
    for column, values in columns.items():
        if len(values) != len(columns[first]):  # rows would be mixed up; the numbers are private
            got = f"different lengths of {first!r} and {column!r}"
            raise expected(function, f"the columns of {name}", "to have one length", got)
    return name, {column: list(map(text_of, values)) for column, values in columns.items()}


def records_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame, or of columns by name, as dicts, with None for missing values."""
    columns = _held(table, lambda present: present)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _chosen(function: str, source: str, names: Sequence[str], others: Any, present: list[str]) -> list[str]:
    for name in names:
        if present.count(name) != 1:
            condition = "to differ" if name in present else "to include every declared one"
            remedy = did_you_mean(name, present, f"correct the name; the columns are {', '.join(present)[:200]}")
            remedy = "rename one" if name in present else remedy
            raise expected(function, f"the columns of {source}", condition, repr(name), remedy)
    more = [name for name in present if present.count(name) == 1 and others(name)] if others is not None else []
    return list(dict.fromkeys([*names, *more]))


def _csv(function: str, path: Path, choose: Choose) -> Columns:
    """Read a CSV file with a header, in UTF-8; blanks after a comma do not count."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, skipinitialspace=True, strict=True)
        header = [name.strip() for name in next(rows, list[str]())]
        columns: Columns = {name: [] for name in choose(header)}
        places = [(column, header.index(name)) for name, column in columns.items()]
        for count, row in enumerate((row for row in rows if row), start=1):  # empty lines do not count
            if len(row) != len(header):
                name, remedy = f"row {count} of {path.name}", "correct the row, or quote values that contain commas"
                raise expected(function, name, f"to have {len(header)} values, like the header", len(row), remedy)
            for column, place in places:
                column.append(row[place])
    return columns


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _sqlite(function: str, path: Path, table: str, choose: Choose) -> Columns:
    """Read a table or view of an SQLite file, which is not changed."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        tables = [row[0] for row in found]
        if table not in tables:
            remedy = did_you_mean(table, tables, f"choose one of {', '.join(tables)}" if tables else "check the file")
            raise expected(function, "table", f"to be a table of {path.name}", repr(table), remedy)
        names = choose([row[1] for row in connection.execute(f"PRAGMA table_info({_quoted(table)})")])
        rows = connection.execute(f"SELECT {', '.join(map(_quoted, names))} FROM {_quoted(table)}").fetchall()
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _module(function: str, name: str, path: Path) -> Any:
    package = name.partition(".")[0]
    remedy = f"pip install 'privgrad[{'tables' if package == 'pyarrow' else package}]', or convert the data to CSV"
    return optional(function, package, name, remedy, f" for {path.name}")


def _arrow(function: str, path: Path) -> Any:
    """Read a Parquet, Arrow or Feather file with pyarrow."""
    pa, feather, parquet = (_module(function, name, path) for name in ("pyarrow", "pyarrow.feather", "pyarrow.parquet"))
    if path.suffix.lower() == ".parquet":
        return parquet.read_table(path)
    try:
        return feather.read_table(path)
    except pa.ArrowInvalid:  # the format of a stream, which Hugging Face writes
        with pa.memory_map(f"{path}") as source:
            return pa.ipc.open_stream(source).read_all()


def _held(table: Any, choose: Choose) -> Columns:
    """Read a table in memory. The names of its columns may be numbers."""
    own: list[Any] = list(
        table if is_a(table, Mapping) else getattr(table, "column_names", None) or list(table.columns)
    )
    present = [f"{name}" for name in own]
    kinds = getattr(table, "features", {})  # of a Dataset
    plain = table.with_format(None) if kinds else table
    return {name: _values(plain[own[present.index(name)]], kinds.get(name)) for name in choose(present)}


def _values(column: Any, kind: Any) -> list[Any]:
    """Return the values of a column, with None for missing ones; the numbers of a ClassLabel become its names."""
    if hasattr(column, "notna"):  # of pandas
        return column.astype(object).where(column.notna(), None).tolist()
    made = next((name for name in ("to_pylist", "to_list", "tolist") if hasattr(column, name)), None)
    values = list(column) if made is None else getattr(column, made)()
    if hasattr(kind, "int2str"):  # a ClassLabel
        return [None if value is None or value < 0 else kind.names[value] for value in values]
    return values
