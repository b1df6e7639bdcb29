"""Data and models of the user: tables, folders and functions, from a TOML file and in Python."""

import csv
import json
import math
import sqlite3
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import privgrad as pg
from privgrad import data, models
from privgrad.accounting.calibration import cache
from privgrad.data.dataset import NO_LABEL
from privgrad.data.schema import schema_of
from privgrad.data.table import declaration_of, require_codes, row_codes
from privgrad.features import Bins, Hats, OneHot, Splines, join, unit_rows
from privgrad_lab.build import make_data, make_model, with_public
from privgrad_lab.data.tabular import _CATEGORIES
from privgrad_lab.load_spec import check_spec, load_spec
from privgrad_lab.metrics import constants, losses_for, unit_scores, unit_values
from privgrad_lab.runner import compare, train

# Rows that are units by themselves have the column of the patients too.
pytestmark = pytest.mark.filterwarnings("ignore:NOT PRIVATE. column 'patient' has")
COLUMNS: dict[str, Any] = {
    "age": {"kind": "number", "range": [0, 100], "bins": 4},
    "ward": {"kind": "category", "values": ["north", "south"]},
}
SCHEMA: dict[str, Any] = {"columns": COLUMNS, "label": "ill", "classes": ["no", "yes"]}
BY_ROW: dict[str, Any] = SCHEMA | {"unit": "row"}
BY_PERSON: dict[str, Any] = SCHEMA | {"unit": "patient", "max_rows": 3}
PRIVACY: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "delta": 1e-3,
    "max_grad_norm": 0.1,
    "num_examples": 20,
    "expected_batch_size": 10,
    "steps": 2,
}
USERS: dict[str, Any] = PRIVACY | {"privacy_unit": "user"}
METHOD: dict[str, Any] = {"name": "DP-SGD", "optimizer": {"use": "SGD", "noise_step": 0.1}}


def visits(patients: int = 40) -> list[dict[str, Any]]:
    """Rows of patients with one to four visits, not sorted by patient."""
    return [
        {
            "patient": f"p{p}",
            "age": (7 * p + visit) % 100,
            "ward": ("north", "south")[p % 2],
            "ill": ("no", "yes")[p % 2],
        }
        for visit in range(4)
        for p in range(patients)
        if visit <= p % 4
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_sqlite(path: Path, rows: list[dict[str, Any]]) -> Path:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE visits (patient TEXT, age INTEGER, ward TEXT, ill TEXT)")
    connection.executemany("INSERT INTO visits VALUES (:patient, :age, :ward, :ill)", rows)
    connection.commit()
    connection.close()
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif path.suffix == ".feather":
        pytest.importorskip("pyarrow.feather").write_feather(table, str(path))
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return path


def write_datasets(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list(rows)
    found.cast_column("ill", datasets.ClassLabel(names=["no", "yes"])).save_to_disk(str(path))
    return path


def load_table(path: str | Path, *declared: dict[str, Any]) -> data.DataSet:
    """`data.table` with the keys of several dicts; the last one decides."""
    keys: dict[str, Any] = {}
    for table in declared:
        keys |= table
    return data.table(path, **keys)


def load_images(path: Path, *declared: dict[str, Any]) -> data.DataSet:
    keys: dict[str, Any] = {}
    for table in declared:
        keys |= table
    return data.image_folder(path, **keys)


def equal(first: data.DataSet, second: data.DataSet) -> bool:
    pairs = [(getattr(d, part).tensors for d in (first, second)) for part in ("train", "validation", "test")]
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def write_digits(folder: Path, count: int = 60, *, first: int = 0) -> Path:
    """A folder of PNGs of the real digits 0 and 1."""
    image = pytest.importorskip("PIL.Image")
    digits = pytest.importorskip("sklearn.datasets").load_digits(n_class=2)
    for name in ("zero", "one"):
        (folder / name).mkdir(parents=True)
    for index in range(first, first + count):
        pixels = (digits.images[index] * 15).astype("uint8")
        image.fromarray(pixels).save(folder / ("zero", "one")[digits.target[index]] / f"{index}.png")
    return folder


def write_people(
    folder: Path, persons: int = 40, size: int = 8, left_out: str = "", *, first: int = 0
) -> list[dict[str, Any]]:
    """A folder of PNGs of the real digits 0 and 1, of persons with one to four images, and its metadata.csv."""
    image = pytest.importorskip("PIL.Image")
    digits = pytest.importorskip("sklearn.datasets").load_digits(n_class=2)
    for name in ("zero", "one"):
        (folder / name).mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    pairs = ((p, v) for v in range(4) for p in range(persons) if v <= p % 4)
    for index, (person, visit) in enumerate(pairs, start=first):
        name = f"{('zero', 'one')[digits.target[index]]}/{index}.png"
        if f"p{person}" != left_out:
            image.fromarray((digits.images[index] * 15).astype("uint8")).resize((size, size)).save(folder / name)
            rows.append({"file_name": name, "patient": f"p{person}", "age": visit})
    write_csv(folder / "metadata.csv", rows)
    return rows


def spec(table: dict[str, Any], model: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    raw = {"title": "own", "data": table, "model": model or {"use": "linear"}, "privacy": PRIVACY, "methods": [METHOD]}
    return raw | changed


def number(**changed: Any) -> dict[str, Any]:
    """The columns of COLUMNS, with another age; None takes a key away."""
    column = {k: v for k, v in (COLUMNS["age"] | changed).items() if v is not None}
    return COLUMNS | {"age": column}


def category(**changed: Any) -> dict[str, Any]:
    return COLUMNS | {"ward": {k: v for k, v in (COLUMNS["ward"] | changed).items() if v is not None}}


# What is wrong with a declaration: the changed keys of BY_ROW, and the error after "load_spec: expected data." and
# after "table: expected ".
WRONG_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"columns": {}}, r"columns to be a table of columns, got \{\}"),
    ({"columns": {"age": {"kind": "ignore"}}}, "columns to hold an input column, got 1 ignored columns"),
    ({"columns": {"age": {}}}, "columns.age.kind to be 'number', 'days_between', .* or 'ignore', got None"),
    ({"columns": {"age": {"kind": "numbr"}}}, "columns.age.kind .* got 'numbr'; did you mean 'number'"),
    ({"columns": {"age": {"kind": ["number"]}}}, r"columns.age.kind .* got \['number'\]"),
    (
        {"columns": number(binz=3)},
        "keys of columns.age to be known for kind number with bins, got 'binz'; did you mean 'bins'",
    ),
    ({"columns": number(values=["a"])}, "keys of columns.age to be known for kind number with bins, got 'values'"),
    ({"columns": number(range=None)}, r"columns.age.range to be \[low, high\] of finite numbers, low < high, got None"),
    ({"columns": number(edges=[0, 1, 2])}, "keys of columns.age to be known for kind number with edges, got 'range'"),
    ({"columns": number(range=[90, 17])}, r"columns.age.range to be \[low, high\] of finite numbers, low < high"),
    ({"columns": number(range=[17])}, r"columns.age.range to be \[low, high\]"),
    ({"columns": number(range=["17", "90"])}, "columns.age.range to be .* of finite numbers"),
    ({"columns": number(range=[0, float("inf")])}, "columns.age.range to be .* of finite numbers"),
    ({"columns": number(range=17)}, "columns.age.range to be .* of finite numbers"),
    ({"columns": number(bins=1)}, "columns.age.bins to be an integer from 2 to 10000, got 1"),
    ({"columns": number(bins=2.5)}, "columns.age.bins to be an integer"),
    ({"columns": number(bins=True)}, "columns.age.bins to be an integer"),
    ({"columns": number(range=[-1, 9], log=True)}, "columns.age.range to begin at 0 or above for log = true"),
    ({"columns": number(log="yes")}, "columns.age.log to be true or false"),
    ({"columns": number(missing="mean")}, 'columns.age.missing to be "error" or "category", got \'mean\''),
    ({"columns": number(range=None, bins=None, edges=[1, 2])}, "columns.age.edges to be at least three rising"),
    ({"columns": number(range=None, bins=None, edges=[1, 3, 2])}, "columns.age.edges to be at least three rising"),
    (
        {"columns": number(range=None, edges=[1, 2, 3])},
        "keys of columns.age to be known for kind number with edges, got 'bins'",
    ),
    (
        {"columns": number(range=None, bins=None, log=True, edges=[1, 2, 3])},
        "keys of columns.age .* kind number with edges, got 'log'",
    ),
    ({"columns": category(values=None)}, "columns.ward.values to be a list of different texts"),
    ({"columns": category(values=[])}, "columns.ward.values to be a list of different texts"),
    ({"columns": category(values=["a", "a"])}, r"columns.ward.values to be a list of different .* got \['a', 'a'\]"),
    ({"columns": category(values=[1, "1"])}, r"columns.ward.values to be a list of different .* got \[1, '1'\]"),
    ({"columns": category(values=["a", " "])}, "columns.ward.values to be a list of .* none of them empty"),
    ({"columns": category(values="north")}, "columns.ward.values to be a list of different texts"),
    ({"columns": category(other="yes")}, "columns.ward.other to be true or false, got 'yes'"),
    ({"label": ""}, "label to be the name of a column"),
    ({"label": "age"}, "label to be a column apart from the inputs, got 'age'; remove it from columns"),
    ({"classes": ["no"]}, r"classes to be a list of at least two different .* got \['no'\]"),
    ({"classes": ["no", "no"]}, r"classes to be a list of at least two different .* got \['no', 'no'\]"),
    ({"unit": None}, 'unit to be "row" or the name of the column .* with "row", a person with several rows'),
    ({"unit": ""}, 'unit to be "row" or the name of the column'),
    ({"unit": "age", "max_rows": 2}, "unit to be a column apart from the inputs, got 'age'"),
    ({"unit": "ill", "max_rows": 2}, "label to differ from the unit, got 'ill'"),
    ({"unit": "patient"}, "max_rows to be a whole .* got None; give the most rows .* table row_id = .patient"),
    ({"unit": "rows"}, 'max_rows to be a whole .* got None; .* If each person has one row, set unit = "row"'),
    ({"max_rows": 2}, 'max_rows to be absent for unit "row", got 2'),
    ({"unit": "patient", "max_rows": 2, "row_id": "n"}, 'row_id to be absent unless unit is "row"'),
    ({"row_id": "age"}, "row_id to be a column apart from the inputs"),
    ({"test_share": 0.5, "validation_share": 0.5}, r"to be >= 0, and below 1 together"),
    ({"test_share": 0.5, "test": "b.csv"}, "one of test, test_share, test_every to be given, got test and test_share"),
    ({"counts": True}, "bounds to be given for counts, from 0 or above, got None"),
    ({"counts": "yes"}, "counts to be true or false, got 'yes'"),
    ({"classes": None, "bounds": [-1, 9], "counts": True}, "bounds to be given for counts, from 0 or above"),
    ({"interactions": ["age", "ward"]}, "interactions to be a list of pairs of different columns"),
    ({"interactions": [["age", "age"]]}, "interactions to be a list of pairs of different columns"),
    ({"interactions": [["age", "war"]]}, r"pairs of two declared numbers or categories, got \['age', 'war'\]"),
    (
        {"columns": number(bins=501), "interactions": [["age", "ward"]]},
        "at most 1,000 products of the codes of age and ward, got 1002; declare fewer values or bins",
    ),
    ({"split_key": "k" * 65}, "split_key to be a text of at most 64 bytes"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_SCHEMA)
def test_a_wrong_declaration_is_one_clear_error_before_the_file_is_read(changed: dict[str, Any], message: str):
    own: dict[str, Any] = {
        key: value for key, value in (BY_ROW | {"test_share": 0.25} | changed).items() if value is not None
    }
    if "test" in changed and "test_share" not in changed:
        del own["test_share"]
    users = own.get("unit", "row") != "row"
    with pytest.raises(pg.PrivacyError, match=f"table: expected .*{message}") as caught:
        load_table("absent.csv", own)
    assert "\n" not in str(caught.value)
    raw = spec({"file": "absent.csv", **own}, privacy=USERS if users else PRIVACY)
    # A file has values of other types and lacks values before the function of the table can refuse them.
    of_type = r"load_spec: expected data\.\w+ to be (valid|given)"
    with pytest.raises(pg.PrivacyError, match=f"^data: table: expected .*({message})|{of_type}"):
        make_data(check_spec(raw, "own.toml"))


ROWS = visits(8)


def changed_row(**values: Any) -> list[dict[str, Any]]:
    """ROWS with another third row."""
    return [row | values if index == 2 else row for index, row in enumerate(ROWS)]


# What is wrong with the content of a CSV file: text or rows, keys of `table`, and the error.
WRONG_FILES: list[tuple[str | list[dict[str, Any]], dict[str, Any], str]] = [
    ("", {}, "file to be a readable table, got .*which is empty; correct the path"),
    ("patient,age,ward,ill\n", {}, "a.csv to hold at least 1 row, got 0"),
    ("patient;age;ward;ill\np;1;north;no\n", {}, "columns of a.csv to include .* got 'age'; .* are patient;age;ward"),
    ("patient,age,age,ill,ward\np,1,1,no,north\n", {}, "columns of a.csv to differ, got 'age'"),
    ("age,ward,ill\n1,north\n", {}, "row 1 of a.csv to have 3 values, like the header, got 2"),
    ("age,ward,ill\n1,north,no\n1,north,no,x\n", {}, "row 2 of a.csv to have 3 values, like the header, got 4"),
    ('age,ward,ill\n1,"north,no\n', {}, "a.csv to be a readable table, got Error: unexpected end"),
    ("age,ward,ill\n1,n\xfcrd,no\n", {}, "a.csv to be a readable table, got UnicodeDecodeError.* write it again"),
    ("Age,ward,ill\n1,north,no\n", {}, "columns of a.csv to include .* got 'age'; did you mean 'Age'"),
    ("age,ward\n1,north\n", {}, "columns of a.csv to include every declared one, got 'ill'"),
    (ROWS, {"unit": "person", "max_rows": 2}, "columns of a.csv to include every declared one, got 'person'"),
    (ROWS, {"row_id": "id"}, "columns of a.csv to include every declared one, got 'id'"),
    (changed_row(age="forty"), {}, "row 3, column 'age' of a.csv to be a number, got 'forty'"),
    (changed_row(age="1_000"), {}, "row 3, column 'age' of a.csv to be a number, got '1_000'"),
    (changed_row(age="1,5"), {}, "row 3, column 'age' of a.csv to be a number, got '1,5'"),
    (
        changed_row(age="2026-01-05"),
        {},
        "to be a number, got '2026-01-05'; set kind = .date., or kind = .days_between.",
    ),
    (changed_row(age=""), {}, "row 3, column 'age' of a.csv to have a value, got ''; .* missing = \"category\""),
    (changed_row(age="NaN"), {}, "row 3, column 'age' of a.csv to have a value, got 'NaN'"),
    (changed_row(ward=""), {}, "row 3, column 'ward' of a.csv to have a value, got ''"),
    (changed_row(ward="null"), {}, "row 3, column 'ward' of a.csv to have a value, got 'null'"),
    (changed_row(ward="nort"), {}, "row 3, column 'ward' of a.csv to be one of north, south, got 'nort'; add it to v"),
    (changed_row(ill="maybe"), {}, "row 3, column 'ill' of a.csv to be one of no, yes, got 'maybe'"),
    (changed_row(ill=""), {}, "row 3, column 'ill' of a.csv to have a value, got ''; fill it in"),
    (changed_row(patient=""), {"unit": "patient", "max_rows": 2}, "row 3, column 'patient' .* to identify the unit"),
    *[
        (
            changed_row(patient=mark),
            {"unit": "patient", "max_rows": 2},
            "row 3, column 'patient' .* to identify the unit",
        )
        for mark in ("NA", "none", " <NA> ", "n/a", "?", "nil", "NaT", "\\N", "-", "Unknown")
    ],
    (changed_row(patient="NA"), {"row_id": "patient"}, "row 3, column 'patient' .* to identify the unit, got 'NA'"),
    (
        changed_row(patient="p0"),
        {"row_id": "patient"},
        "row 3, column 'patient' of a.csv to differ from earlier rows, got 'p0'",
    ),
    (ROWS, {"table": "visits"}, "table to be absent for a.csv, got 'visits'"),
    (ROWS, {"test_share": 0.999_999}, "training part of a.csv to hold at least 1 unit, got 0"),
    (ROWS, {"test": "none.csv"}, "file to be a readable table, got .*none.csv, which does not exist"),
    (ROWS, {"unit": "patient", "max_rows": 1, "test": "a.csv"}, "units of a.csv to differ from those of a.csv, got 8"),
    (ROWS, {"test": "a.csv", "validation_share": 0.2}, "rows of a.csv to differ from those of a.csv, got copies"),
]


@pytest.mark.parametrize(("content", "keys", "message"), WRONG_FILES)
def test_a_wrong_file_is_one_clear_error(
    content: str | list[dict[str, Any]],
    keys: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, str):
        Path("a.csv").write_bytes(content.encode("latin-1"))
    else:
        write_csv(Path("a.csv"), content)
    with pytest.raises(pg.PrivacyError, match=f"table: expected .*{message}") as caught:
        load_table("a.csv", BY_ROW, keys)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")  # of values out of the range
@pytest.mark.parametrize("declared", [{"range": [0, 198.765]}, {"range": [-3.1416, 100]}, {"edges": [0, 50, 198.765]}])
def test_a_range_that_ends_at_a_value_of_one_row_warns(tmp_path: Path, declared: dict[str, Any]):
    aged = visits()
    aged[7]["age"], aged[9]["age"] = 198.765, -3.1416
    columns = number(**({"range": None, "bins": None} if "edges" in declared else {}), **declared)
    with pytest.warns(UserWarning, match=r"table: the (low|high) of columns.age: this is the"):
        load_table(write_csv(tmp_path / "visits.csv", aged), BY_ROW | {"columns": columns})
    load_table(write_csv(tmp_path / "others.csv", visits()), BY_ROW | {"columns": columns})


def test_a_shuffled_copy_is_no_test_file_and_equal_rows_of_a_small_table_are(tmp_path: Path):
    write_csv(tmp_path / "a.csv", ROWS)
    write_csv(tmp_path / "b.csv", ROWS[::-1])
    with pytest.raises(pg.PrivacyError, match=r"rows of b\.csv to differ .* got copies"):
        load_table(tmp_path / "a.csv", BY_ROW, {"test": tmp_path / "b.csv"})
    few = [row | {"age": 30 + index % 2} for index, row in enumerate(ROWS)]
    alike = [{name: "" if name == "patient" else row[name] for name in row} for row in few]
    write_csv(tmp_path / "few.csv", alike * 9)
    write_csv(tmp_path / "same.csv", alike * 3)
    loaded = load_table(tmp_path / "few.csv", BY_ROW, {"test": tmp_path / "same.csv"})
    assert (len(loaded.train), len(loaded.test)) == (9 * len(ROWS), 3 * len(ROWS))


def test_files_of_other_formats_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets")
    write_sqlite(tmp_path / "a.db", ROWS)
    (tmp_path / "b.parquet").write_text("no parquet")
    (tmp_path / "c.feather").write_text("no feather")
    (tmp_path / "d.db").write_text("no database" * 100)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text("{}")
    write_arrow(tmp_path / "lists.parquet", [row | {"age": [1, 2]} for row in ROWS])
    write_arrow(tmp_path / "bytes.parquet", [row | {"patient": row["patient"].encode()} for row in ROWS])
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("a.xlsx", {}, "file to end in one of .csv, .parquet, .* got a.xlsx; convert it"),
        ("none.csv", {}, "file to be a readable table, got .* which does not exist"),
        ("a.db", {}, "table to be given for a.db, got None"),
        ("a.db", {"table": "visit"}, "table to be a table of a.db, got 'visit'; did you mean 'visits'"),
        ("a.db", {"table": "visits", "label": "sick"}, "columns of a.db to include .* got 'sick'"),
        ("b.parquet", {}, "b.parquet to be a readable table, got ArrowInvalid"),
        ("c.feather", {}, "c.feather to be a readable table, got "),
        ("d.db", {"table": "visits"}, "d.db to be a readable table, got DatabaseError"),
        ("folder.csv", {}, "folder.csv to be a readable table, got FileNotFoundError: No such files"),
        ("dict", {}, "dict to be a readable table, got FileNotFoundError: .* but got a `DatasetDict`"),
        ("bytes.parquet", {"unit": "patient", "max_rows": 2}, "row 1, .* to identify the unit, got '<a bytes>'"),
        ("bytes.parquet", {"row_id": "patient"}, "row 1, column 'patient' .* to identify the unit, got '<a bytes>'"),
        ("lists.parquet", {}, "row 1, column 'age' of lists.parquet to be a single value, got '<a list>'"),
    ]
    for name, keys, message in wrong:
        with pytest.raises(pg.PrivacyError, match=f"table: expected .*{message}"):
            load_table(tmp_path / name, BY_ROW, keys)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(pg.PrivacyError, match=r"pyarrow to be installed .* pip install 'privgrad\[tables\]'"):
        data.table(tmp_path / "lists.parquet", **BY_ROW)


IMAGES: dict[str, Any] = {"classes": ["zero", "one"], "size": 8, "channels": 1, "unit": "row"}


def test_an_image_is_resized_as_the_page_says(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    drawn = image.linear_gradient("L").rotate(30)
    drawn.save(tmp_path / "x.png")
    as_said = drawn.convert("L").resize((20, 20), image.Resampling.BICUBIC)
    assert data.read_image(tmp_path / "x.png", size=20, channels=1).flatten().tolist() == [*as_said.tobytes()]


def test_wrong_folders_of_images_are_one_clear_error(tmp_path: Path):
    folder = write_digits(tmp_path / "digits", 6)
    (tmp_path / "empty" / "zero").mkdir(parents=True)
    (tmp_path / "empty" / "one").mkdir()
    broken = write_digits(tmp_path / "broken", 6)
    (broken / "one" / "x.png").write_text("no image")
    deep = write_digits(tmp_path / "deep", 6)
    image = pytest.importorskip("PIL.Image")
    image.new("I;16", (8, 8)).save(deep / "one" / "x.png")
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (folder, {"unit": None}, 'unit to be "row" or the name of the column that identifies a person, got None'),
        (folder, {"max_rows": 2}, 'max_rows to be absent for unit "row", got 2'),
        (folder, {"size": 0}, "size to be an integer >= 1"),
        (folder, {"channels": 2}, "channels to be 1 or 3, got 2"),
        (folder, {"classes": ["zero"]}, "classes to be at least two different names"),
        (folder, {"classes": ["zero", "two"]}, "to be the classes zero, two, got 'one'; .*orrect its name or classes"),
        (folder, {"classes": ["zero", "one", "two"]}, "sub-folders of digits to be the classes .*, got no 'two'"),
        (
            folder,
            {"test_share": 1.0},
            "test_share and validation_share to be >= 0, and below 1 together, got 1.0 and 0.0",
        ),
        (folder, {"test_share": 0.999_999}, "training part of .*digits to hold at least 1 image"),
        (tmp_path / "none", {}, "path to be a folder .* got .*none"),
        (folder / "one" / "1.png", {}, "path to be a folder .* got .*1.png"),
        (folder, {"test": folder}, "images of .*digits to differ from those of .*digits, got copies"),
        (tmp_path / "empty", {}, "empty to hold at least 1 image, got 0"),
        (broken, {}, "one/x.png to be a readable image, got UnidentifiedImageError"),
        (deep, {}, "one/x.png to have 8 bits per channel, got mode I;16"),
    ]
    for path, keys, message in wrong:
        with pytest.raises(pg.PrivacyError, match=f"image_folder: expected .*{message}"):
            load_images(path, IMAGES, keys)


PEOPLE: dict[str, Any] = IMAGES | {"unit": "patient", "max_rows": 3}


def test_wrong_folders_of_images_by_person_are_one_clear_error(tmp_path: Path):
    rows = write_people(tmp_path / "people", 8)
    (tmp_path / "people" / "metadata.csv").unlink()
    first = rows[0]["file_name"]

    def changed(**values: Any) -> list[dict[str, Any]]:
        return [rows[0], rows[1] | values, *rows[2:]]

    wrong: list[tuple[list[dict[str, Any]] | str | None, dict[str, Any], str]] = [
        (None, {}, "file to be a readable table, got .*metadata.csv, which does not exist"),
        ("", {}, "file to be a readable table, got .*metadata.csv, which is empty"),
        (rows, {"unit": "person"}, "columns of metadata.csv to include every declared one, got 'person'"),
        ([{"file": 1, "patient": 2}], {}, "columns of metadata.csv to include every declared one, got 'file_name'"),
        (rows, {"unit": "file_name"}, "unit to be a column apart from file_name, got 'file_name'"),
        (rows, {"unit": ""}, 'unit to be "row" or the name of the column that identifies a person'),
        (rows, {"max_rows": None}, "max_rows to be a whole number >= 1 for a unit with several rows, got None"),
        (rows, {"max_rows": 0}, "max_rows to be a whole number >= 1 for a unit with several rows, got 0"),
        (changed(file_name="one/none.png"), {}, "row 2, column 'file_name' of metadata.csv of people to be an image"),
        (
            changed(file_name="../x.png"),
            {},
            "row 2, column 'file_name' .* to be an image in a class's folder, got '../",
        ),
        (
            changed(file_name=first),
            {},
            "row 2, column 'file_name' of metadata.csv of people to differ from earlier rows",
        ),
        (changed(patient=" "), {}, "row 2, column 'patient' of metadata.csv of people to identify the unit, got ''"),
        (changed(patient="NaN"), {}, "row 2, column 'patient' .* to identify the unit, got 'NaN'"),
        (changed(patient="NA"), {}, "row 2, column 'patient' .* to identify the unit, got 'NA'"),
        (
            rows[:-1],
            {},
            f"metadata.csv of people to have a row for each image, got no row for '{rows[-1]['file_name']}'",
        ),
        (
            rows,
            {"test": tmp_path / "people"},
            "persons of people to differ from those of people, got 8 of them in both",
        ),
        (rows, {"test_share": 0.999_999}, "training part of .*people to hold at least 1 person, got 0"),
    ]
    for content, keys, message in wrong:
        if content is not None:
            path = tmp_path / "people" / "metadata.csv"
            path.write_text(content) if isinstance(content, str) else write_csv(path, content)
        with pytest.raises(pg.PrivacyError, match=f"image_folder: expected .*{message}") as caught:
            load_images(tmp_path / "people", PEOPLE, keys)
        assert "\n" not in str(caught.value)


MODULE = """
from dataclasses import replace
import torch
from torch import nn
from torch.utils.data import TensorDataset
from privgrad.data import DataSet

number = 3

def rows(count: int = 30, *, scale: float = 1.0) -> DataSet:
    x = scale * torch.linspace(-1, 1, 3 * count).view(count, 3)
    whole = TensorDataset(x, torch.arange(count) % 2)
    return DataSet("mine", whole, TensorDataset(x[:4], torch.zeros(4).long()), whole, 2, (3,))

def by_unit() -> DataSet:
    return replace(rows(), split="unit")

def untested() -> DataSet:
    found = rows()
    return DataSet("mine", found.train, found.validation, TensorDataset(*found.train[:0]), 2, (3,))

def needs(count: int) -> DataSet:
    return rows(count)

def fails() -> DataSet:
    raise KeyError("column")

def returns_a_list():
    return [1]

def net(data, *, hidden: int = 4):
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, data.num_classes))

def wrong_net(data):
    return nn.Linear(3, data.num_classes + 1)

def narrow_net(data):
    return nn.Linear(4, data.num_classes)

def no_net(data):
    return "net"

def broken_net(data):
    raise RuntimeError("no weights")

def takes_nothing():
    return nn.Linear(3, 2)
"""
CLINIC: dict[str, Any] = {"use": "clinic_module:rows"}
TABLE: dict[str, Any] = {"file": "visits.csv", **BY_ROW, "test_share": 0.25}


# What is wrong with a TOML file: its tables, and the error.
WRONG_TOML: list[tuple[dict[str, Any], str]] = [
    (spec({}), 'load_spec: expected data.use to be given, got None; .* file = "people.csv"'),
    (spec({**TABLE, "use": "digits"}), "load_spec: expected data to have exactly one of use, file and folder, got"),
    (spec({**TABLE, "folder": "xrays"}), "exactly one of use, file and folder, got file, folder"),
    (
        spec({**TABLE, "unit": "patient", "max_rows": 2}),
        "data 'visits.csv' to be by example, got data by user; set privacy_unit = \"user\"",
    ),
    (spec(TABLE, privacy=USERS), "data 'visits.csv' to be by user, got data by example; set privacy_unit"),
    (spec({k: v for k, v in TABLE.items() if k != "label"}), "data.label to be given, got None; add it"),
    (spec({k: v for k, v in TABLE.items() if k != "classes"}), "data: table: expected classes to be given, got None"),
    (spec({k: v for k, v in TABLE.items() if k != "test_share"}), "test part of visits.csv to hold at least 1 example"),
    (spec({**TABLE, "validation": 5}), "data.validation to be absent for files, got 5; give validation_share"),
    (spec({**TABLE, "public": 5}), "data.public to be 0 for files"),
    (spec({**TABLE, "max_row": 5}), "options to be known, got 'data.max_row'; did you mean 'max_rows'"),
    (spec({**TABLE, "path": "a.csv"}), "options to be known, got 'data.path'"),
    (spec({**TABLE, "columns": 3}), r"data.columns to be valid \(Input should be an object"),
    (spec({**TABLE, "columns": {"age": 3}}), "data.columns.age to be valid"),
    (spec({**TABLE, "test_share": "a quarter"}), "data.test_share to be valid"),
    (spec({**TABLE, "file": 3}), "data.file to be valid"),
    (spec({**TABLE, "file": "none.csv"}), "table: expected file to be a readable table, got .*none.csv, which does"),
    (spec(TABLE, {"use": "bag-of-words"}), "data.use to be text for this model"),
    (spec(TABLE, {"use": "cnn2"}), "model.use to take inputs of shape"),
    (spec({"folder": "xrays", "unit": "row", "test_share": 0.2}), "data.classes to be given"),
    (spec({"use": "clinic_modul:rows"}), "data.use to name a module in .*ModuleNotFoundError"),
    (
        spec({"use": "clinic_module:row"}),
        "data.use to name a function of clinic_module, got 'row'; did you mean 'rows'",
    ),
    (spec({"use": "clinic_module:number"}), "data.use to name a function of clinic_module, got 'number'"),
    (spec({"use": "clinic_module:"}), "data.use to name a function of clinic_module, got ''"),
    (spec({"use": "clinic module:rows"}), "data.use to name a module in .*ModuleNotFoundError"),
    (spec({"use": "clinic_broken:rows"}), "data.use to name a module that imports, got ZeroDivisionError"),
    (spec({**CLINIC, "counts": 3}), "options to be known, got 'data.counts'; did you mean 'count'"),
    (spec({**CLINIC, "count": "3"}), "data.count to be valid"),
    (spec({"use": "clinic_module:needs"}), "data.count to be given, got None"),
    (spec({**CLINIC, "validation": 3}), "data.validation to be absent unless the function has this argument, got 3"),
    (spec({"use": "clinic_module:fails"}), "data to run, got KeyError: 'column'; correct clinic_module:fails"),
    (spec({"use": "clinic_module:returns_a_list"}), "data.use to return a DataSet, got a list"),
    (spec({"use": "clinic_module:untested"}), "test part of clinic_module:untested to hold at least 1 example, got 0"),
    (spec(CLINIC, privacy=USERS), "'clinic_module:rows' to be by user, got data by example"),
    (spec(CLINIC, {"use": "clinic_module:nets"}), "model.use to name a function of clinic_module, got 'nets'"),
    (spec(CLINIC, {"use": "clinic_module:net", "depth": 2}), "options to be known, got 'model.depth'"),
    (spec(CLINIC, {"use": "clinic_module:no_net"}), "model.use to return a torch.nn.Module, got a str"),
    (spec(CLINIC, {"use": "clinic_module:broken_net"}), "model to run, got RuntimeError: no weights"),
    (spec(CLINIC, {"use": "clinic_module:takes_nothing"}), "model.use to name a function whose arguments suit, got "),
    (
        spec(CLINIC, {"use": "clinic_module:wrong_net"}),
        r"model.use to return logits of shape \(1, 2\) for inputs of shape \(1, 3\), got \(1, 3\)",
    ),
    (spec(CLINIC, {"use": "clinic_module:narrow_net"}), "model to run, got RuntimeError: mat1 and mat2"),
    (
        spec({**TABLE, "unit": "patient", "max_rows": 2}, {"use": "autoencoder"}, privacy=USERS),
        "model.use to take the rows of a person, as 'visits.csv' has, got 'autoencoder'",
    ),
    (
        spec({**TABLE, "unit": "patient", "max_rows": 2, "reconstruct": True}, privacy=USERS),
        "data: expected reconstruct to be false for data by user",
    ),
    (spec(CLINIC, {"use": "linear", "hiden": 3}), "options to be known, got 'model.hiden'"),
    (
        spec(
            {**TABLE, "unit": "patient", "max_rows": 2},
            privacy=USERS,
            methods=[METHOD | {"local": {"lr": 1.0, "batch_size": 2}}],
        ),
        "local to be absent for data whose rows are persons",
    ),
    (
        spec(
            {**TABLE, "unit": "patient", "max_rows": 2},
            privacy=USERS,
            methods=[METHOD | {"perturb": {"use": "BAM", "radius": 0.1}}],
        ),
        "methods.DP-SGD.perturb to be absent for privacy_unit",
    ),
    (
        spec(TABLE, methods=[METHOD | {"optimizer": {"use": "SGD", "noise_step": [0.1, 0.2]}}], tuning={"seeds": [0]}),
        "validation part of visits.csv to hold at least 1 example, got 0; give validation_share",
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a table, two modules and images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_csv(tmp_path / "visits.csv", visits())
    (tmp_path / "clinic_module.py").write_text(MODULE)
    (tmp_path / "clinic_broken.py").write_text("1 / 0")
    for name in ("clinic_module", "clinic_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("table", "count"), [(TABLE, 90), (CLINIC, 31)])
def test_a_count_above_the_training_part_warns_and_tells_no_number_of_the_data(table: dict[str, Any], count: int):
    raw = spec(table, privacy=PRIVACY | {"num_examples": count})
    told = rf"fewer examples in .* than num_examples = {count}\. .* lower it to a number that is known [^0-9]+$"
    with pytest.warns(UserWarning, match=told):
        make_data(check_spec(raw, "own.toml"))


@pytest.mark.parametrize(("raw", "message"), WRONG_TOML)
def test_a_wrong_file_of_an_experiment_is_one_clear_error(raw: dict[str, Any], message: str, folder: Path):
    with pytest.raises(pg.PrivacyError, match=message) as caught:
        compare(check_spec(raw, "own.toml"), folder / "out", progress=False)
    assert "\n" not in str(caught.value)
    assert not list(folder.rglob("ledger.jsonl"))


def test_at_least_sixty_faults_are_tested():
    assert len(WRONG_SCHEMA) + len(WRONG_FILES) + len(WRONG_TOML) >= 60


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + " }"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def write_toml(path: Path, raw: dict[str, Any]) -> Path:
    lines = [f"{key} = {toml(value)}" for key, value in raw.items() if key not in ("methods", "data")]
    lines += ["[data]", *(f"{key} = {toml(value)}" for key, value in raw["data"].items())]
    for method in raw["methods"]:
        lines += ["[[methods]]", *(f"{key} = {toml(value)}" for key, value in method.items())]
    path.write_text("\n".join(lines))
    return path


WORKING: dict[str, Callable[[], dict[str, Any]]] = {
    "rows": lambda: spec({**TABLE, "columns": COLUMNS}, {"use": "mlp", "hidden": 3}),
    "persons": lambda: spec({"file": "visits.csv", **BY_PERSON, "test_share": 0.25}, privacy=USERS),
    "persons, mlp": lambda: spec(
        {"file": "visits.csv", **BY_PERSON, "test_share": 0.25}, {"use": "mlp", "hidden": 3}, privacy=USERS
    ),
    "images": lambda: spec({"folder": "digits", **IMAGES, "test_share": 0.25}),
    "images of persons": lambda: spec({"folder": "people", **PEOPLE, "test_share": 0.25}, privacy=USERS),
    "images of persons, cnn": lambda: spec(
        {"folder": "people", **PEOPLE, "size": 28, "test_share": 0.25},
        {"use": "cnn-small"},
        privacy=USERS,
        run={"augmentation_multiplicity": 2},
    ),
    "datasets": lambda: spec({"folder": "hf", **BY_ROW, "test_share": 0.25}),
    "functions": lambda: spec({**CLINIC, "scale": 2.0}, {"use": "clinic_module:net", "hidden": 5}),
    "public examples of a function": lambda: spec({"use": "clinic_module:by_unit", "public": 3}),
}


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.usefixtures("by_rdp_here")
def test_a_training_works_from_the_file_to_the_record(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    place = folder / "experiment"
    place.mkdir()
    if name == "images":
        write_digits(place / "digits")
    if "images of persons" in name:
        write_people(place / "people")
    if name == "datasets":
        write_datasets(place / "hf", visits())
    (folder / "visits.csv").rename(place / "visits.csv")  # relative to the TOML file
    made = load_spec(write_toml(place / "own.toml", WORKING[name]()))
    (record,) = train(made, folder / "out", progress=False)
    assert record["epsilon"] > 0
    assert 0 <= record["test_accuracy"] <= 1
    kind = "persons" if "persons" in name else "examples"  # the sizes of the parts are private
    assert record["data"].endswith(f": 20 training {kind}, the public count")


def test_all_formats_give_the_same_data(tmp_path: Path):
    rows = visits()
    reference = data.table(write_csv(tmp_path / "a.csv", rows), **BY_PERSON, test_share=0.3, validation_share=0.2)
    others: list[tuple[Path, dict[str, Any]]] = [
        (write_sqlite(tmp_path / "a.sqlite", rows), {"table": "visits"}),
        (write_arrow(tmp_path / "a.parquet", rows), {}),
        (write_arrow(tmp_path / "a.feather", rows), {}),
        (write_arrow(tmp_path / "a.arrow", rows), {}),
        (write_datasets(tmp_path / "hf", rows), {}),
    ]
    for path, keys in others:
        found = data.table(path, **BY_PERSON, test_share=0.3, validation_share=0.2, **keys)
        assert equal(found, reference), path
    assert min(len(reference.train), len(reference.validation), len(reference.test)) > 0


@pytest.mark.parametrize("declared", [BY_PERSON, BY_ROW], ids=["person", "row"])
def test_one_person_more_or_less_changes_nothing_for_the_others(declared: dict[str, Any], tmp_path: Path):
    def parts(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
        found = data.table(write_csv(tmp_path / "a.csv", rows), **declared, test_share=0.3, validation_share=0.2)
        pairs = {name: getattr(found, name) for name in ("train", "validation", "test")}
        return {name: sorted(f"{x.tolist()} {y.tolist()}" for x, y in part) for name, part in pairs.items()}

    rows = visits()
    everybody = parts(rows)
    for person in ("p0", "p7", "p39"):
        others = parts([row for row in rows if row["patient"] != person])
        gone = {name: len(everybody[name]) - len(others[name]) for name in others}
        own = sum(row["patient"] == person for row in rows)
        assert sorted(gone.values())[-1] >= 1
        assert sum(gone.values()) == (1 if declared is BY_PERSON else own)
        for name, held in others.items():
            left = list(everybody[name])
            for row in held:
                left.remove(row)
            assert len(left) == gone[name]
    shuffled = parts(rows[::-1] if declared is BY_ROW else [row for row in rows if row["patient"] != "p0"] + rows[:1])
    assert {name: len(part) for name, part in shuffled.items()} == {name: len(part) for name, part in everybody.items()}


def test_the_rows_of_a_person_are_one_row_of_the_batch(tmp_path: Path):
    rows = [
        {"patient": p, "age": a, "ward": "north", "ill": i}
        for p, a, i in [(1, 10, "no"), (2, 60, "yes"), (1, 30, "yes"), (1, 99, "no")]
    ]
    found = load_table(write_csv(tmp_path / "a.csv", rows), BY_PERSON, {"max_rows": 2})
    inputs, labels = found.train.tensors
    half = 2**-0.5
    assert found.by_person
    assert found.split == "unit"
    assert found.input_shape == (6,)
    expected_inputs = [
        [[half, 0, 0, 0, half, 0], [0, half, 0, 0, half, 0]],  # the first two of three visits
        [[0, 0, half, 0, half, 0], [0, 0, 0, 0, 0, 0]],
    ]
    torch.testing.assert_close(inputs, torch.tensor(expected_inputs))
    assert labels.tolist() == [[0, 1], [1, NO_LABEL]]
    made = check_spec(spec({"file": "a.csv", **BY_PERSON, "test_share": 0.1}, privacy=USERS), tmp_path / "own.toml")
    model = make_model(made, found)
    with torch.no_grad():
        next(model.parameters()).copy_(torch.arange(12.0).view(2, 6) % 5)
    losses = losses_for(found)(model, (inputs, labels))
    single = nn.functional.cross_entropy(model(inputs[0]), labels[0])
    torch.testing.assert_close(losses[0], single)
    scores = unit_scores(model, found.train, found)
    right = (model(inputs).argmax(-1) == labels).double()
    torch.testing.assert_close(scores, torch.stack([right[0].mean(), right[1, 0]]))
    (values,) = unit_values(model, found.train, found, ["accuracy"], by_label=True)
    assert values.tolist() == [right[0, 0], right[0, 1], right[1, 0]]


def test_scores_of_examples_and_of_tags():
    inputs = torch.eye(3)
    tags = torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
    examples = torch.utils.data.TensorDataset(inputs, tags)
    tagged = data.DataSet("tags", examples, examples, examples, 6, (3,), score="recall@5")
    model = nn.Linear(3, 6)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0, 0, -1)[:, None].expand(6, 3))
        model.bias.zero_()
    assert unit_scores(model, examples, tagged).tolist() == [1.0, 0.5, 0.0]
    classes = torch.utils.data.TensorDataset(inputs, torch.tensor([0, 1, 0]))
    assert unit_scores(model, classes, data.DataSet("c", classes, classes, classes, 6, (3,))).tolist() == [1, 0, 1]
    found = constants(classes, data.DataSet("c", classes, classes, classes, 6, (3,)))
    thirds = math.log(3) - math.log(4) / 3
    assert found == pytest.approx({"most_frequent_class": 2 / 3, "class_shares_loss": thirds})
    assert constants(examples, tagged) == {}
    several = torch.tensor([[1, 0, 0], [1, -100, -100], [0, 0, -100]])  # of persons, who count once each
    persons = torch.utils.data.TensorDataset(torch.zeros(3, 3, 2), several)
    owned = data.DataSet("p", persons, persons, persons, 2, (2,), by_person=True)
    assert constants(persons, owned)["most_frequent_class"] == pytest.approx((2 / 3 + 1) / 3)
    with pytest.raises(AssertionError, match="data without a score"):
        unit_scores(model, classes, data.DataSet("c", classes, classes, classes, 6, (3,), score=None))


def test_values_outside_of_the_declaration(tmp_path: Path):
    rows = [{"age": a, "ward": w, "ill": "no"} for a, w in [(-5, "north"), (250, "east"), ("", ""), ("inf", "south")]]
    columns = number(missing="category") | {"ward": COLUMNS["ward"] | {"other": True, "missing": "category"}}
    said = "NOT PRIVATE: 3 of 4 values in column 'age' of a.csv are outside of 0 to 100"
    with pytest.warns(UserWarning, match=said):
        found = load_table(write_csv(tmp_path / "a.csv", rows), BY_ROW, {"columns": columns})
    codes = found.train.tensors[0] > 0
    assert codes.nonzero()[:, 1].view(4, 2).tolist() == [[0, 5], [3, 7], [4, 8], [3, 6]]


def test_values_of_other_types_have_the_same_text(tmp_path: Path):
    rows = [{"age": 1.0, "ward": True, "ill": 2.0}, {"age": 99, "ward": False, "ill": 1.0}]
    keys = {"columns": category(values=[False, True]), "classes": [1, 2]}
    first = load_table(
        write_csv(tmp_path / "a.csv", [{k: str(v).lower() for k, v in row.items()} for row in rows]),
        BY_ROW,
        keys,
        {"classes": ["1.0", "2.0"]},
    )
    second = load_table(write_arrow(tmp_path / "a.parquet", rows), BY_ROW, keys)
    assert equal(first, second)


def test_texts_of_pandas_are_the_declared_value_and_no_other_one():
    """A column with a missing value is written as 1.0; all of its rows silently had the code of other values."""
    columns = {
        "age": {"kind": "category", "values": [1, 2], "other": True},
        "ward": {"kind": "category", "values": [True, False], "other": True},
        "version": {"kind": "category", "values": ["1.0", "1"], "other": True},
    }
    rows = {
        "age": [1, "1.0", np.float32(1), "1.5"],
        "ward": [True, "True", np.True_, "TRUER"],
        "version": ["1.0", "1", "1", "x"],
        "ill": ["0", "0.0", 0.0, "1.0"],
    }
    inputs, labels = data.table(rows, columns=columns, label="ill", classes=[0, 1], unit="row").train.tensors
    places = inputs.nonzero()[:, 1].view(4, 3) - torch.tensor([0, 3, 6])
    assert places.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 1], [2, 2, 2]]
    assert labels.tolist() == [0, 0, 0, 1]


def test_images_are_gray_squares(tmp_path: Path):
    folder = write_digits(tmp_path / "digits")
    (folder / "one" / "notes.txt").write_text("not read")
    found = data.image_folder(folder, **IMAGES, test_share=0.3)
    assert found.input_shape == (1, 8, 8)
    assert len(found.train) + len(found.test) == 60
    assert found.split == "unit"
    inputs, labels = found.train.tensors
    digits = pytest.importorskip("sklearn.datasets").load_digits(n_class=2)
    first = torch.tensor(digits.images[0], dtype=torch.float32) * 15 / 127.5 - 1
    assert any(torch.allclose(image[0], first) for image in torch.cat([inputs, found.test.tensors[0]]))
    assert set(labels.tolist()) == {0, 1}
    others = write_digits(tmp_path / "others", first=60)
    color = load_images(folder, IMAGES, {"channels": 3, "size": 16, "test": others})
    assert color.input_shape == (3, 16, 16)
    assert (len(color.train), len(color.test)) == (60, 60)


def test_the_images_of_a_person_are_one_row_of_the_batch(tmp_path: Path):
    rows = write_people(tmp_path / "people")
    found = load_images(tmp_path / "people", PEOPLE)
    inputs, labels = found.train.tensors
    assert (found.by_person, found.split, found.input_shape) == (True, "unit", (1, 8, 8))
    assert inputs.shape == (40, 3, 1, 8, 8)
    alone = load_images(tmp_path / "people", IMAGES)  # by file, in the order of the names
    by_name = dict(zip((r["file_name"] for r in _by_class(rows)), zip(*alone.train.tensors, strict=True), strict=True))
    for person in range(40):
        own = [by_name[row["file_name"]] for row in rows if row["patient"] == f"p{person}"][:3]
        assert torch.equal(inputs[person, : len(own)], torch.stack([pixels for pixels, _ in own]))
        assert labels[person].tolist() == [label.item() for _, label in own] + [NO_LABEL] * (3 - len(own))
        assert inputs[person, len(own) :].abs().sum() == 0


def _by_class(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metadata.csv in the order in which a folder is read."""
    return sorted(rows, key=lambda row: (row["file_name"].startswith("one"), row["file_name"]))


def test_one_person_more_or_less_changes_no_other_persons_images(tmp_path: Path):
    def parts(folder: Path) -> dict[str, list[str]]:
        found = load_images(folder, PEOPLE, {"test_share": 0.3, "validation_share": 0.2})
        pairs = {name: getattr(found, name) for name in ("train", "validation", "test")}
        return {name: [f"{x.tolist()} {y.tolist()}" for x, y in part] for name, part in pairs.items()}

    write_people(tmp_path / "all")
    everybody = parts(tmp_path / "all")
    assert all(len(part) > 2 for part in everybody.values())
    for person in ("p0", "p7", "p39"):
        write_people(tmp_path / person, left_out=person)
        others = parts(tmp_path / person)
        gone = [row for name in others for row in everybody[name] if row not in others[name]]
        assert len(gone) == 1
        assert {n: [row for row in part if row not in gone] for n, part in everybody.items()} == others


def test_a_second_folder_of_other_persons_is_the_test_part(tmp_path: Path):
    write_people(tmp_path / "people", 12)
    rows = write_people(tmp_path / "others", 12, first=60)
    path = tmp_path / "others" / "metadata.csv"
    write_csv(path, [row | {"patient": f"other {row['patient']}"} for row in rows])
    found = load_images(tmp_path / "people", PEOPLE, {"test": tmp_path / "others"})
    assert (len(found.train), len(found.test)) == (12, 12)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_a_cnn_on_the_images_of_a_person_has_the_gradient_of_their_mean_loss(engine: Any):
    torch.manual_seed(0)
    model = models.EachRow(models.cnn_small(in_channels=1, num_classes=2))
    images, labels = (
        torch.randn(4, 3, 1, 28, 28),
        torch.tensor([[0, 1, 1], [1, NO_LABEL, NO_LABEL], [0, 0, 1], [1, 0, 1]]),
    )
    examples = torch.utils.data.TensorDataset(images, labels)
    loss_fn = losses_for(data.DataSet("p", examples, examples, examples, 2, (1, 28, 28), by_person=True))
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=1,
        expected_batch_size=4,
        noise_multiplier=1e-6,
        max_grad_norm=0.5,
        num_examples=4,
        delta=1e-2,
        privacy_unit="user",
        seed=0,
    )
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=pg.perturb.SampleGradient("user"), engine=engine)
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for person in range(4):
        kept = labels[person] != NO_LABEL
        loss = nn.functional.cross_entropy(model.model(images[person][kept]), labels[person][kept])
        grads = dict(zip(wanted, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        for name, grad in grads.items():
            wanted[name] += grad * min(1.0, 0.5 / norm.item()) / 4
    released = private_grad(next(iter(plan.batches(examples))))
    for name, grad in wanted.items():
        torch.testing.assert_close(released[name], grad, atol=2e-6, rtol=1e-4)


@pytest.mark.skipif(not cache("adult").is_dir(), reason="needs PyPI's wheel xai in the cache, see .ci/run")
@pytest.mark.slow
def test_the_census_by_its_codebook():
    columns: dict[str, Any] = {n: {"kind": "category", "values": line.split()} for n, line in _CATEGORIES.items()}
    columns |= {
        "age": {"kind": "number", "range": [17, 90]},
        "capital-gain": {"kind": "number", "range": [0, 99_999], "log": True},
        "hours-per-week": {"kind": "number", "edges": [1, 20, 35, 40, 45, 60, 99]},
    }
    path = cache("adult") / "xai" / "data" / "census.csv"
    keys: dict[str, Any] = {"columns": columns, "label": "loan", "classes": ["<=50K", ">50K"], "row_id": ""}
    found = data.table(path, **keys, unit="row", test_share=0.25)
    assert len(found.train) + len(found.test) == 32_561
    assert len(found.test) / 32_561 == pytest.approx(0.25, abs=0.01)
    assert found.input_shape == (60 + 16 + 16 + 6,)
    torch.testing.assert_close(found.train.tensors[0].norm(dim=1), torch.ones(len(found.train)))
    assert found.train.tensors[1].float().mean() == pytest.approx(0.241, abs=0.01)
    again = data.table(path, **keys, unit="row", test_share=0.25, split_key="another")
    assert len(again.test) != len(found.test)


def test_hat_codes_are_shares_of_the_two_nearest_knots():
    hats = Hats((0, 1, 3), missing=True)
    numbers = [-5.0, 0.0, 0.25, 1.0, 2.5, 3.0, 99.0, math.inf, math.nan]
    wanted = [
        *([1, 0, 0, 0], [1, 0, 0, 0], [0.75, 0.25, 0, 0], [0, 1, 0, 0], [0, 0.25, 0.75, 0]),
        *([0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]),
    ]
    assert torch.equal(hats(numbers), torch.tensor(wanted).float())
    assert (hats.width, Hats((0, 1)).width) == (4, 2)
    equal = Hats.equal(0, 99, 3, log=True)
    assert equal.knots == (0.0, 9.0, 99.0)
    assert len(Hats.equal(0, 1).knots) == 16


def test_interactions_are_products_of_codes_in_rows_of_norm_1():
    columns: dict[str, Any] = {
        "age": {"kind": "number", "range": [0, 15], "knots": 16},
        "dose": {"kind": "number", "knots": [0, 10], "missing": "category"},
        "ward": {"kind": "category", "values": ["a", "b"]},
        "seen": {"kind": "date", "as": ["weekday"]},
    }
    cells: dict[str, list[Any]] = {"age": [6, 15, 3], "dose": [None, 4, 0], "ward": ["a", "b", "a"]}
    cells |= {"seen": ["2021-03-04"] * 3, "y": [0, 1, 1]}
    pairs = [["age", "ward"], ["dose", "age"], ["seen", "ward"]]
    own: dict[str, Any] = {"columns": columns, "label": "y", "classes": [0, 1], "unit": "row"}
    found, without = data.table(cells, **own, interactions=pairs), data.table(cells, **own)
    codes, schema = found.train.tensors[0], found.schema
    assert schema is not None
    assert without.schema is not None
    torch.testing.assert_close(codes.norm(dim=1), torch.ones(3))
    few = Hats((0, 4, 8, 11, 15))([6, 15, 3])  # 5 of the 16 knots
    ward, dose = torch.tensor([[1.0, 0], [0, 1], [1, 0]]), torch.tensor([[0, 0, 1], [0.6, 0.4, 0], [1, 0, 0]])
    weekday = torch.eye(7)[[3, 3, 3]]
    products = [torch.einsum("ni,nj->nij", *both).flatten(1) for both in ((few, ward), (dose, few), (weekday, ward))]
    blocks = without.train.tensors[0].split([16, 3, 2, 7], dim=1)
    torch.testing.assert_close(codes, join(*(block / block.sum(1, keepdim=True) for block in blocks), *products))
    require_codes("test", schema, codes)
    with pytest.raises(pg.PrivacyError, match="to have the codes of the columns"):
        require_codes("test", schema, codes.roll(1, dims=1))
    require_codes("test", schema, data.synthetic_rows(schema, 100)[0])
    said = json.loads(json.dumps(declaration_of(schema)))
    again = schema_of("test", **said)
    rows = [{name: cells[name][row] for name in columns} for row in range(3)]
    assert torch.equal(row_codes("test", again, rows), codes)
    assert "interactions" not in declaration_of(without.schema)


def test_splines_are_the_hat_codes_of_all_columns():
    rows = torch.tensor([[-1.0, 3.0], [0.3, 9.0], [2.5, -7.0]])
    extractor = Splines([0.0, -4.0], [2.0, 4.0], 5)
    codes = [Hats.equal(low, high, 5)(column) for low, high, column in zip((0, -4), (2, 4), rows.T, strict=True)]
    torch.testing.assert_close(extractor(rows), join(*codes))
    with pytest.raises(pg.PrivacyError, match="Splines: expected rows to have shape"):
        extractor(rows[:, :1])
    with pytest.raises(pg.PrivacyError, match="Splines: expected knots"):
        Splines(0.0, 1.0, 1)


def test_synthetic_rows_follow_from_the_declaration_alone(tmp_path: Path):
    columns: dict[str, Any] = {
        "age": {"kind": "number", "range": [20, 80], "knots": 7, "missing": "category"},
        "cost": {"kind": "number", "edges": [0, 1, 10, 100]},
        "ward": {"kind": "category", "values": ["a", "b", "c"]},
        "seen": {"kind": "date", "as": ["year", "month"], "range": [2020, 2022]},
    }
    cells: dict[str, list[Any]] = {"age": [30, 40], "cost": [5, 7], "ward": ["a", "b"], "seen": ["2021-03-04"] * 2}
    targets: dict[str, dict[str, Any]] = {"died": {"classes": [0, 1]}, "paid": {"bounds": [0, 50]}}
    for label, target in targets.items():
        schema = data.table(cells | {label: [0, 1]}, columns=columns, label=label, unit="row", **target).schema
        assert schema is not None
        codes, labels = data.synthetic_rows(schema, 500, seed=3)
        require_codes("test", schema, codes)
        assert codes.shape == (500, 8 + 3 + 3 + 3 + 12)
        assert bool((codes.sum(0) > 0)[torch.arange(29) != 7].all())  # but for the code of missing ages
        assert (float(labels.min()), float(labels.max())) == pytest.approx(
            (0, 1) if label == "died" else (0, 50), abs=1
        )
        assert torch.equal(data.synthetic_rows(schema, 500, seed=3)[0], codes)
    texts = {"note": ["a", "b"], "y": [0, 1]}
    schema = data.table(texts, columns={"note": {"kind": "text"}}, label="y", classes=[0, 1], unit="row").schema
    assert schema is not None
    with pytest.raises(pg.PrivacyError, match="column 'note' to hold numbers, dates or categories, got text"):
        data.synthetic_rows(schema)


def test_a_linear_model_on_hat_codes_is_a_line_between_the_knots():
    hats, numbers = Hats.equal(-2, 5, 8), torch.linspace(-3, 6, 200, dtype=torch.float64)
    codes = hats(numbers)
    torch.testing.assert_close(codes.sum(1), torch.ones(200))
    torch.testing.assert_close(codes @ torch.tensor(hats.knots), numbers.clamp(-2, 5).float(), atol=1e-5, rtol=0)


def test_features():
    bins = Bins.equal(0, 99, 2, log=True, missing=True)
    assert bins.edges == pytest.approx((0, 9, 99))
    assert bins([-3, 8.9, 9, 99, 1e9, float("nan")]).argmax(1).tolist() == [0, 0, 1, 1, 1, 2]
    codes = OneHot(("a", "b"), other=True)(["b", "z", "a"])
    assert codes.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    torch.testing.assert_close(join(codes, codes).norm(dim=1), torch.ones(3))
    assert unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist() == [
        [pytest.approx(0.6), pytest.approx(0.8)],
        [0, 0],
    ]
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: Bins((1, 2)), "Bins: expected edges"),
        (lambda: Hats((1,)), "Hats: expected knots to be at least two increasing finite numbers"),
        (lambda: Hats.equal(0, 1, 1), "Hats.equal: expected knots"),
        (lambda: Hats((0, 1))([float("nan")]), "Hats: expected number 0 to be given"),
        (lambda: Bins.equal(0, 1, 1), "Bins.equal: expected bins"),
        (lambda: Bins.equal(1, 0), "Bins: expected edges"),
        (lambda: Bins.equal(0, math.inf), "Bins: expected edges"),
        (lambda: Bins((0, 1, 2))([float("nan")]), "Bins: expected number 0 to be given"),
        (lambda: Bins((0, 1, 2))(torch.zeros(2, 2)), "Bins: expected numbers to have shape"),
        (lambda: OneHot(()), "OneHot: expected values"),
        (lambda: OneHot(("a", "a")), "OneHot: expected values"),
        (lambda: OneHot(("a",))(["b"]), "OneHot: expected category 0 to be one of the values"),
        (lambda: unit_rows(torch.zeros(3)), "unit_rows: expected rows"),
    ]
    for call, message in wrong:
        with pytest.raises(pg.PrivacyError, match=message):
            call()


def test_a_plan_for_users_takes_rows_of_persons_only_if_it_is_said():
    model, plan = (
        nn.Linear(2, 2),
        pg.PrivacyPlan.for_users(
            num_users=10, expected_cohort_size=5, rounds=1, max_update_norm=1.0, delta=1e-2, noise_multiplier=1.0
        ),
    )

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().sum((1, 2))

    said = pg.perturb.SampleGradient("user")
    assert repr(said) == "SampleGradient('user')"
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=said)
    rows = torch.utils.data.TensorDataset(torch.randn(10, 3, 2))
    released = private_grad(next(iter(plan.batches(rows, collate=lambda r: torch.stack([x for (x,) in r])))))
    assert set(released) == {"weight", "bias"}
    with pytest.raises(pg.PrivacyError, match=r"to be of unit 'example'.*SampleGradient\('user'\)"):
        pg.PrivateGradient(model, loss_fn, plan)
    with pytest.raises(pg.PrivacyError, match="SampleGradient: expected privacy_unit"):
        pg.perturb.SampleGradient("person")  # pyright: ignore[reportArgumentType]
    wrong: Any
    for wrong in (0, -3, 2.5, "7", True):
        with pytest.raises(pg.PrivacyError, match="SampleGradient: expected max_rows to be an integer >= 1"):
            pg.perturb.SampleGradient("user", wrong)


def test_parts_of_units_are_public_and_those_of_a_table(tmp_path: Path):
    names = [f"patient {number}" for number in range(200)]
    lines = [f"{name},{index % 90},north,{'yes' if index % 3 else 'no'}" for index, name in enumerate(names)]
    (tmp_path / "rows.csv").write_text("\n".join(["patient,age,ward,ill", *lines]))
    shares: Any = {"test_share": 0.2, "validation_share": 0.1, "split_key": "mine"}
    table = data.table(tmp_path / "rows.csv", **(BY_PERSON | shares))
    parts = [data.part_of(name, **shares) for name in names]
    assert [parts.count(part) for part in ("train", "validation", "test")] == [
        len(held) for held in (table.train, table.validation, table.test) if held is not None
    ]
    assert parts != [data.part_of(name, **(shares | {"split_key": "other"})) for name in names]
    assert parts == [data.part_of(f" {name}\n", **shares) for name in names]  # one person, as in a table
    accents = [f"Jos\u00e9 {name}" for name in names]
    assert [data.part_of(name, **shares) for name in accents] == [
        data.part_of(unicodedata.normalize("NFD", name), **shares) for name in accents
    ]
    for wrong, words in (({"test_share": 1.0}, "test_share"), ({"split_key": 65 * "a"}, "split_key")):
        with pytest.raises(pg.PrivacyError, match=f"part_of: expected {words}"):
            data.part_of("a", **(shares | wrong))
    number: Any = 7
    with pytest.raises(TypeError):
        data.part_of(number, test_share=0.1)


def test_tuning_uses_the_validation_part_of_a_file(folder: Path):
    table = {**TABLE, "validation_share": 0.25}
    methods = [METHOD | {"optimizer": {"use": "SGD", "noise_step": [0.01, 0.1]}}]
    made = check_spec(
        spec(table, methods=methods, tuning={"seeds": [0]}, run={"num_evaluations": 1}), folder / "a.toml"
    )
    records = compare(made, folder / "out", progress=False)
    assert [record["phase"] for record in records] == ["tuning", "tuning", "final"]
    assert all(0 <= record["validation_accuracy"] <= 1 for record in records[:2])


def test_public_examples_end_the_split_by_unit(folder: Path):
    own = data.table("visits.csv", **BY_ROW)
    assert with_public(own, 5).split == "size"


def test_counts_may_be_lower_than_the_data(folder: Path):
    made = make_data(check_spec(spec(TABLE), folder / "own.toml"))
    assert len(made.train) > 20
    lower = spec({"use": "digits"}, privacy=PRIVACY | {"num_examples": 1000})
    with pytest.raises(pg.PrivacyError, match=r"privacy\.num_examples to be 1437"):
        make_data(check_spec(lower, "own.toml"))
