"""Read named columns: CSV, Parquet, Arrow, Feather, SQLite, a folder of Hugging Face datasets, or a DataFrame."""

import csv
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from privgrad.errors import PrivacyError, did_you_mean, expected, file_problem
from privgrad.plugins import optional

Columns = dict[str, list[Any]]
SUFFIXES = (".csv", ".parquet", ".arrow", ".feather", ".sqlite", ".db")
FRAME = "the DataFrame"  # in errors, in place of a file's name
_HF_FILES = ("state.json", "dataset_info.json")


@runtime_checkable
class Frame(Protocol):
    """The parts of a pandas DataFrame by which it is recognized, so that pandas is not imported."""

    @property
    def columns(self) -> Any: ...
    @property
    def iloc(self) -> Any: ...
    @property
    def to_numpy(self) -> Any: ...


def records_of(frame: Frame) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame by column name, with None for missing values."""
    names = [f"{name}" for name in frame.columns]
    columns = [_values(frame, place) for place in range(len(names))]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(frame: Frame, place: int) -> list[Any]:
    """Return the values of the column at a place, with None for missing values."""
    column = frame.iloc[:, place]
    return column.astype(object).where(column.notna(), None).tolist()


def is_datasets_folder(path: Path) -> bool:
    """Return whether `datasets.Dataset.save_to_disk` wrote a folder."""
    return all((path / name).is_file() for name in _HF_FILES)


def read_frame(function: str, frame: Frame, names: Sequence[str]) -> Columns:
    """Return the values of each named column of a DataFrame, as `read_columns` does of a file."""
    present = [f"{name}" for name in frame.columns]
    _require_single(function, FRAME, names, present)
    columns = {name: _values(frame, present.index(name)) for name in _required(function, FRAME, names, present)}
    if not any(columns.values()):
        raise expected(function, FRAME, "to hold at least 1 row", 0, "give one with rows")
    return columns


def read_columns(function: str, path: Path, names: Sequence[str] | None, table: str | None) -> Columns:
    """Return the values of each named column, in the order of the file; of all columns without names.

    The suffix of `path` decides its format; a folder is one of Hugging Face datasets. `table` names the table of an
    SQLite file.

    Raises:
        PrivacyError: the file is absent or damaged, lacks a column or has no rows, or a package is not installed.
    """
    suffix = path.suffix.lower()
    is_sqlite = suffix in (".sqlite", ".db")
    if not path.is_dir() and suffix not in SUFFIXES:
        raise expected(function, "file", f"to end in one of {', '.join(SUFFIXES)}", path.name, "convert it to CSV, say")
    if path.is_dir():
        if not is_datasets_folder(path):
            is_dict = (path / "dataset_dict.json").is_file()  # of DatasetDict.save_to_disk: one folder per part
            remedy = "give the folder of one part, such as mydata/train" if is_dict else "give a file"
            condition = f"to be a folder with {' and '.join(_HF_FILES)}, as save_to_disk writes it"
            raise expected(function, "the data folder", condition, path, remedy)
    elif problem := file_problem(path):
        raise expected(function, "file", "to be a readable table", f"{path}, which {problem}", "correct the path")
    if (table is not None) != is_sqlite:
        remedy = "name the table of the file" if is_sqlite else "leave it out"
        condition = f"to be {'given' if is_sqlite else 'absent'} for {path.name}"
        raise expected(function, "table", condition, repr(table), remedy)
    try:
        if path.is_dir():
            columns = _datasets(function, path, names)
        elif suffix == ".csv":
            columns = _csv(function, path, names)
        elif is_sqlite:
            columns = _sqlite(function, path, names, f"{table}")
        else:
            columns = _arrow(function, path, names)
    except PrivacyError:
        raise
    except Exception as error:  # a damaged file can raise anything
        got = f"{type(error).__name__}: {f'{error}'.splitlines()[0] if f'{error}' else 'no message'}"
        remedy = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "write the file again"
        raise expected(function, f"{path.name}", "to be a readable table", got, remedy) from error
    if not any(columns.values()):
        raise expected(function, f"{path.name}", "to hold at least 1 row", 0, "correct the path")
    return columns


def _required(function: str, source: str, names: Sequence[str] | None, present: Sequence[str]) -> Sequence[str]:
    """Return the columns to read; raise PrivacyError for the first one that a table lacks."""
    for name in names or ():
        if name not in present:
            remedy = did_you_mean(name, present, f"correct the name; the columns are {', '.join(present)[:200]}")
            raise expected(function, f"the columns of {source}", "to include every declared one", repr(name), remedy)
    return list(dict.fromkeys(present)) if names is None else names


def _require_single(function: str, source: str, names: Sequence[str], present: Sequence[str]) -> None:
    """Raise PrivacyError for the first column to read whose name a table has twice."""
    if double := [name for name in present if present.count(name) > 1 and name in names]:
        raise expected(function, f"the columns of {source}", "to differ", repr(double[0]), "rename one")


def _csv(function: str, path: Path, names: Sequence[str] | None) -> Columns:
    """Read a CSV file with a header, in UTF-8; blanks after a comma do not count."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, skipinitialspace=True, strict=True)
        header = [name.strip() for name in next(rows, list[str]())]
        if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
            got = f"the header {header[0][:60]!r}"
            raise expected(function, path.name, "to be separated by commas", got, "write it with commas")
        _require_single(function, path.name, names or (), header)
        names = _required(function, path.name, names, header)
        columns: Columns = {name: [] for name in names}
        places = [(columns[name], header.index(name)) for name in names]
        for count, row in enumerate((row for row in rows if row), start=1):  # empty lines do not count
            if len(row) != len(header):
                name, remedy = f"row {count} of {path.name}", "correct the row, or quote values that contain commas"
                raise expected(function, name, f"to have {len(header)} values, like the header", len(row), remedy)
            for column, place in places:
                column.append(row[place])
    return columns


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _sqlite(function: str, path: Path, names: Sequence[str] | None, table: str) -> Columns:
    """Read a table or view of an SQLite file, which is not changed."""
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        tables = [row[0] for row in found]
        if table not in tables:
            remedy = did_you_mean(table, tables, f"choose one of {', '.join(tables)}" if tables else "check the file")
            raise expected(function, "table", f"to be a table of {path.name}", repr(table), remedy)
        present = [row[1] for row in connection.execute(f"PRAGMA table_info({_quoted(table)})")]
        names = _required(function, f"{path.name}, table {table}", names, present)
        rows = connection.execute(f"SELECT {', '.join(map(_quoted, names))} FROM {_quoted(table)}").fetchall()
    finally:
        connection.close()
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _module(function: str, name: str, path: Path) -> Any:
    package = name.partition(".")[0]
    remedy = f"pip install 'privgrad[{'tables' if package == 'pyarrow' else package}]', or convert the data to CSV"
    return optional(function, package, name, remedy, f" for {path.name}")


def _arrow(function: str, path: Path, names: Sequence[str] | None) -> Columns:
    """Read a Parquet, Arrow or Feather file with pyarrow."""
    pa, feather, parquet = (_module(function, name, path) for name in ("pyarrow", "pyarrow.feather", "pyarrow.parquet"))
    if path.suffix.lower() == ".parquet":
        table = parquet.read_table(path)
    else:
        try:
            table = feather.read_table(path)
        except pa.ArrowInvalid:  # the format of a stream, which Hugging Face writes
            with pa.memory_map(f"{path}") as source:
                table = pa.ipc.open_stream(source).read_all()
    names = _required(function, path.name, names, table.column_names)
    return {name: table.column(name).to_pylist() for name in names}


def _datasets(function: str, path: Path, names: Sequence[str] | None) -> Columns:
    """Read a folder of Hugging Face datasets; the numbers of a ClassLabel become its names."""
    datasets = _module(function, "datasets", path)
    found = datasets.Dataset.load_from_disk(f"{path}")
    names = _required(function, path.name, names, found.column_names)
    columns: Columns = {}
    for name in names:
        values: list[Any] = list(found.with_format(None)[name])
        kind = found.features[name]
        if isinstance(kind, datasets.ClassLabel):
            values = [None if value is None or value < 0 else kind.names[value] for value in values]
        columns[name] = values
    return columns
