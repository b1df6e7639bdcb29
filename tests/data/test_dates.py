"""Dates, days between two of them, labels that are numbers, and tables in memory: from rows to predictions."""

import math
import random
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from test_own_data import spec, write_csv

import privgrad as pg
from privgrad import data
from privgrad.data.table import row_codes
from privgrad_lab.data.findings import of_table
from privgrad_lab.load_spec import check_spec
from privgrad_lab.runner import train

COLUMNS: dict[str, Any] = {
    "admitted": {"kind": "date", "as": ["year", "month", "weekday"], "range": [2020, 2026], "missing": "category"},
    "stay": {"kind": "days_between", "dates": ["admitted", "left"], "range": [0, 40], "bins": 4, "missing": "category"},
    "ward": {"kind": "category", "values": ["north", "south"]},
}
OWN: dict[str, Any] = {"columns": COLUMNS, "label": "back", "classes": ["no", "yes"], "unit": "row"}
FACTS: dict[str, Any] = {"source": "a codebook", "target_epsilon": 8.0, "delta": 1e-3, "num_examples": 60, "steps": 20}


def rows_of(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    found: list[dict[str, Any]] = []
    for number in range(count):
        admitted = datetime(2021, 1, 1) + timedelta(days=draw.randint(0, 1500))
        left = admitted + timedelta(days=draw.randint(0, 39))
        dates = {"admitted": admitted.date().isoformat(), "left": left.date().isoformat()}
        found.append(
            {**dates, "ward": ("north", "south")[number % 2], "back": draw.choice(["no", "yes"]), "cost": number}
        )
    found[3]["admitted"] = ""
    return found


def load(given: Any, **changes: Any) -> data.DataSet:
    """`data.table` with OWN, and changes."""
    return data.table(given, **{**OWN, **changes})


def table(rows: list[dict[str, Any]], **changes: Any) -> data.DataSet:
    """The data set of rows in memory."""
    return load({name: [row[name] for row in rows] for name in rows[0]}, **changes)


def codes(column: dict[str, Any], *values: Any) -> list[list[int]]:
    """The places of the codes of a column's values."""
    found = load({"day": list(values), "back": ["no"] * len(values)}, columns={"day": column}).train.tensors[0]
    return [row.nonzero().flatten().tolist() for row in found]


def test_each_part_of_a_date_has_one_code():
    days = ("2024-02-29", "2020-12-31 23:59", "2026-01-01T00:00:00Z")
    assert codes({"kind": "date", "as": ["month"]}, *days) == [[1], [11], [0]]
    assert codes({"kind": "date", "as": ["day"]}, *days) == [[28], [30], [0]]
    assert codes({"kind": "date", "as": ["weekday"]}, *days) == [[3], [3], [3]]  # Thursdays
    assert codes({"kind": "date", "as": ["hour"]}, *days) == [[0], [23], [0]]
    assert codes({"kind": "date", "as": ["day_of_year"]}, *days) == [[59 // 7], [52], [0]]
    assert codes({"kind": "date", "as": ["year"], "range": [2019, 2026]}, *days) == [[5], [1], [7]]
    several = {"kind": "date", "as": ["weekday", "month"], "missing": "category"}
    assert codes(several, "2024-02-29", None) == [[3, 8 + 1], [7, 8 + 12]]
    widths = {"month": 12, "day": 31, "weekday": 7, "hour": 24, "day_of_year": 53}
    for part, width in widths.items():
        made = table(rows_of(9)[4:], columns={"left": {"kind": "date", "as": [part]}})
        assert made.input_shape == (width,)
        torch.testing.assert_close(made.train.tensors[0].norm(dim=1), torch.ones(5))


def test_years_outside_of_the_range_count_as_the_nearest_end():
    with pytest.warns(
        UserWarning, match="NOT PRIVATE: 2 of 3 values in column 'day' of the dict are outside of 2000 to"
    ):
        found = codes({"kind": "date", "as": ["year"], "range": [2000, 2009]}, "1999-12-31", "2004-01-01", "2010-01-01")
    assert found == [[0], [4], [9]]


def test_the_days_between_two_dates_are_a_number():
    days = {"kind": "days_between", "dates": ["from", "to"], "edges": [0, 1, 2, 30]}
    given: dict[str, list[Any]] = {
        "from": ["2024-02-28", "2024-03-01T12:00", "2024-03-31T00:00+02:00", "2024-01-01"],
        "to": ["2024-03-01", "2024-03-02T00:00", "2024-03-31T23:00", datetime(2024, 1, 2, 1, tzinfo=UTC)],
        "back": ["no"] * 4,
    }
    found = load(given, columns={"stay": days})  # 2, 1/2, 1 + 1/24 and 1 + 1/24 days
    assert found.train.tensors[0].argmax(1).tolist() == [2, 0, 1, 1]
    with pytest.warns(UserWarning, match="1 of 1 values in column 'stay' of the dict are outside of 0 to 30"):
        load({"from": ["2024-02-28"], "to": ["2024-02-27"], "back": ["no"]}, columns={"stay": days})


def test_a_saved_head_codes_new_dates_as_the_training(tmp_path: Path):
    rows = rows_of(240)
    loaded = load(write_csv(tmp_path / "visits.csv", rows))
    assert loaded.input_shape == (8 + 13 + 8 + 5 + 2,)
    head = pg.fit_head(*loaded.train.tensors, classes=loaded.classes, schema=loaded.schema, progress=False, **FACTS)
    head.save(tmp_path / "head")
    again = pg.Head.load(tmp_path / "head")
    assert again.schema == loaded.schema
    assert again.schema is not None
    assert torch.equal(row_codes("test", again.schema, rows), loaded.train.tensors[0])
    assert torch.equal(again.predict_proba(rows), head.predict_proba(loaded.train.tensors[0]))
    alone = {"admitted": datetime(2024, 2, 29, 13), "left": "2024-03-04", "ward": "north"}
    assert again.predict(alone).shape == (1,)
    with pytest.raises(
        pg.PrivacyError, match="row 1 to be a dict with the columns of the training, got no column 'left'"
    ):
        again.predict({name: value for name, value in alone.items() if name != "left"})
    with pytest.raises(pg.PrivacyError, match="row 1, column 'admitted' of the rows to be a date, got 'in May'"):
        again.predict(alone | {"admitted": "in May"})
    wrong = loaded.train.tensors[0].clone()
    wrong[5, 8:21] = 0
    with pytest.raises(pg.PrivacyError, match="row 5 to have the codes of the columns admitted, "):
        again.predict(wrong)


def test_all_formats_give_the_same_dates(tmp_path: Path):
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    pd, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    rows = rows_of(40)
    expected = load(write_csv(tmp_path / "a.csv", rows)).train.tensors[0]
    timed = [
        row | {name: datetime.fromisoformat(row[name]) if row[name] else None for name in ("admitted", "left")}
        for row in rows
    ]
    held = pa.Table.from_pylist(timed)
    pq.write_table(held, tmp_path / "a.parquet")
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        connection.execute("CREATE TABLE visits (admitted, 'left', ward, back)")
        connection.executemany("INSERT INTO visits VALUES (:admitted, :left, :ward, :back)", rows)
    german = [row | {name: ".".join(reversed(row[name].split("-"))) for name in ("admitted", "left")} for row in rows]
    formed = {name: column | ({"format": "%d.%m.%Y"} if name != "ward" else {}) for name, column in COLUMNS.items()}
    for given, changes in (
        (tmp_path / "a.parquet", {}),
        (tmp_path / "a.db", {"table": "visits"}),
        (write_csv(tmp_path / "b.csv", german), {"columns": formed}),
        (held, {}),
        (pd.DataFrame(timed), {}),
        (datasets.Dataset.from_list(timed), {}),
        ({name: [row[name] for row in timed] for name in rows[0]}, {}),
        (Polars(timed), {}),
    ):
        assert torch.equal(load(given, **changes).train.tensors[0], expected), given


class Polars:
    """A DataFrame as polars has it."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0])

    def __getitem__(self, name: str) -> Any:
        return pytest.importorskip("pyarrow").array([row[name] for row in self.rows])

    def to_numpy(self) -> Any:
        raise AssertionError


def test_a_head_takes_a_data_frame_of_polars():
    rows = rows_of(60)
    loaded = load(Polars(rows))
    head = pg.fit_head(*loaded.train.tensors, classes=loaded.classes, schema=loaded.schema, progress=False, **FACTS)
    assert torch.equal(head.encode(rows), loaded.train.tensors[0])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"kind": "date"}, r"columns.day.as to be a list of year, month, day, weekday, hour, day_of_year, got None"),
        ({"kind": "date", "as": []}, r"columns.day.as to be a list of year"),
        ({"kind": "date", "as": "month"}, r"columns.day.as to be a list of year"),
        ({"kind": "date", "as": ["month", "month"]}, r"columns.day.as to be a list of year"),
        ({"kind": "date", "as": ["monht"]}, r"columns.day.as to be a list of year"),
        ({"kind": "date", "as": ["year"]}, "columns.day.range to be the first and last year"),
        ({"kind": "date", "as": ["month"], "range": [2000, 2010]}, "columns.day.range to be the first and last year"),
        ({"kind": "date", "as": ["month"], "range": [0.25, 0.5]}, "columns.day.range to be the first and last year"),
        ({"kind": "date", "as": ["year"], "range": [2000.5, 2010]}, "columns.day.range to be the first and last year"),
        ({"kind": "date", "as": ["year"], "range": [2010, 2000]}, r"columns.day.range to be \[low, high\]"),
        ({"kind": "date", "as": ["year"], "range": [0, 10**6]}, "columns.day.range to be the first and last year"),
        ({"kind": "date", "as": ["month"], "format": "iso"}, "columns.day.format to be a format such as '%d"),
        ({"kind": "date", "as": ["month"], "bins": 3}, "keys of columns.day to be known for kind date, got 'bins'"),
        ({"kind": "days_between", "range": [0, 9]}, "columns.day.dates to be the names of two columns of dates"),
        ({"kind": "days_between", "dates": ["a", "a"], "range": [0, 9]}, "columns.day.dates to be the names of two"),
        ({"kind": "days_between", "dates": ["a", "b"]}, r"columns.day.range to be \[low, high\]"),
        (
            {"kind": "days_between", "dates": ["a", "back"], "range": [0, 9]},
            "label to be a column apart from the inputs",
        ),
    ],
)
def test_a_wrong_declaration_of_dates_is_one_clear_error(column: dict[str, Any], message: str):
    with pytest.raises(pg.PrivacyError, match=f"table: expected .*{message}"):
        load("absent.csv", columns={"day": column})


def test_wrong_dates_are_one_clear_error_and_a_finding_each(tmp_path: Path):
    rows = rows_of(9)
    rows[5]["left"], rows[7]["left"] = "soon", ""
    needed = {"stay": {"kind": "days_between", "dates": ["admitted", "left"], "range": [0, 40]}}
    own = {name: OWN[name] for name in ("label", "classes", "unit")}
    path = write_csv(tmp_path / "a.csv", rows)
    for columns, message in (
        (needed, "row 4, column 'stay' of a.csv to have a value, got ' to "),
        (COLUMNS, "row 6, column 'stay' of a.csv to be two dates, got '2.* to soon'; write dates as 2026-01-31"),
    ):
        with pytest.raises(pg.PrivacyError, match=message):
            load(path, columns=columns)
    found = {
        one.what.partition(":")[0]: (one.column, one.rows, one.blocks)
        for one in of_table(path, None, columns=needed, **own)[1]
    }
    assert found["missing"] == ("stay", (4, 8), True)
    assert found["no two dates"] == ("stay", (6,), True)


def test_labels_that_are_numbers_train_a_head(tmp_path: Path):
    rows = rows_of(240)
    rows[7]["cost"] = 1e9
    own: dict[str, Any] = {"label": "cost", "classes": None, "bounds": (0, 300)}
    with pytest.warns(UserWarning, match="1 of 240 values in column 'cost' of the dict are outside of 0 to 300"):
        loaded = table(rows, **own)
    inputs, numbers = loaded.train.tensors
    assert (loaded.num_classes, loaded.classes, loaded.score) == (1, None, "r2")
    assert numbers.tolist() == [float(row["cost"]) for row in rows]
    head = pg.fit_head(inputs, numbers, bounds=(0, 300), schema=loaded.schema, progress=False, **FACTS)
    head.save(tmp_path / "head")
    again = pg.Head.load(tmp_path / "head")
    assert again.schema == loaded.schema
    assert again.schema is not None
    assert again.schema.bounds == (0, 300)
    assert torch.equal(again.predict(rows), head.predict(inputs))
    del rows[7]
    persons = table([row | {"patient": k // 2} for k, row in enumerate(rows)], **own, unit="patient", max_rows=3)
    assert persons.train.tensors[1].shape == (120, 3)
    assert math.isnan(persons.train.tensors[1][0, 2])
    pg.fit_head(*persons.train.tensors, bounds=(0, 300), progress=False, **FACTS)
    for changes, message in (
        ({"bounds": None}, "classes to be given, got None; list the label's allowed values; for a number"),
        ({"classes": ["a", "b"]}, r"classes to be absent next to bounds, got \['a', 'b'\]"),
        ({"bounds": (3, 3)}, r"bounds to be \[low, high\] of finite numbers"),
        ({"label": "ward"}, "row 1, column 'ward' of the dict to be a number, got 'north'"),
    ):
        with pytest.raises(pg.PrivacyError, match=message):
            table(rows, **(own | {"columns": {"stay": COLUMNS["stay"]}} | changes))


@pytest.mark.usefixtures("by_rdp_here")
def test_an_experiment_trains_on_dates(tmp_path: Path):
    write_csv(tmp_path / "visits.csv", rows_of(60))
    made = check_spec(spec({"file": "visits.csv", **OWN, "test_share": 0.25}), tmp_path / "own.toml")
    (record,) = train(made, tmp_path / "out", progress=False)
    assert 0 <= record["test_accuracy"] <= 1
    told = of_table(tmp_path / "visits.csv", None, **OWN)[1]
    assert {one.what for one in told if one.column == "admitted"} == {"missing"}


def test_columns_of_unequal_lengths_are_refused():
    """Their rows would go to other persons, or be lost."""
    given = {"age": [10, 20, 30], "back": ["no", "yes", "no"], "pid": ["a", "b"]}
    columns = {"age": {"kind": "number", "range": [0, 100], "bins": 10}}
    options: dict[str, Any] = {"label": "back", "classes": ["no", "yes"], "unit": "pid", "max_rows": 2}
    with pytest.raises(pg.PrivacyError, match="columns of the dict to have one length"):
        data.table(given, columns=columns, **options)
