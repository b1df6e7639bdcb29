"""Rows by column name: the codes are those of the file, a saved head takes them, and wrong rows are one clear error."""

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import privgrad as pg
from privgrad import data
from privgrad.data import DataSet
from privgrad.data.table import row_codes
from privgrad.models import UnitLinear
from privgrad_lab.featuring import save_head

COLUMNS: dict[str, Any] = {
    "age": {"kind": "number", "range": [18, 100], "bins": 8},
    "cost": {"kind": "number", "range": [0, 50_000], "log": True, "missing": "category"},
    "stay": {"kind": "number", "edges": [0, 1, 2, 5, 30]},
    "ward": {"kind": "category", "values": ["north", "south"], "other": True},
    "smoker": {"kind": "category", "values": ["yes", "no"], "missing": "category"},
    "month": {"kind": "ignore"},
}
FACTS: dict[str, Any] = {"source": "a codebook", "target_epsilon": 8.0, "delta": 1e-3, "num_examples": 60, "steps": 20}


def rows_of(count: int) -> list[dict[str, str]]:
    """Made-up visits, as `csv.DictReader` reads them."""
    draw = random.Random(0)
    return [
        {
            "patient": f"p{number // 3}",
            "age": f"{draw.randint(10, 110)}",
            "cost": draw.choice(["", f"{draw.uniform(0, 60_000):.2f}"]),
            "stay": f" {draw.randint(0, 30)}",
            "ward": draw.choice(["north", "south ", "east"]),
            "smoker": draw.choice(["yes", "no", "nan", ""]),
            "month": "6",
            "back": draw.choice(["0", "1"]),
        }
        for number in range(count)
    ]


def made(folder: Path, rows: list[dict[str, str]], **changes: Any) -> DataSet:
    file = folder / "visits.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    own: dict[str, Any] = {"columns": COLUMNS, "label": "back", "classes": [0, 1], "unit": "patient", "max_rows": 3}
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        return data.table(file, **own | changes)


def trained(loaded: DataSet) -> pg.Head:
    named: dict[str, Any] = {"classes": loaded.classes, "schema": loaded.schema}
    return pg.fit_head(*loaded.train.tensors, **named, progress=False, **FACTS)


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_a_saved_head_gives_rows_by_name_the_codes_of_the_training(tmp_path: Path):
    rows = rows_of(240)
    loaded = made(tmp_path, rows)
    trained(loaded).save(tmp_path / "head")
    head = pg.Head.load(tmp_path / "head")
    assert head.schema == loaded.schema
    assert head.schema is not None
    codes = loaded.train.tensors[0].flatten(0, 1)  # no part is held out, so rows are in the order of the file
    assert torch.equal(row_codes("test", head.schema, rows), codes)
    assert torch.equal(head.predict_proba(rows), head.predict_proba(codes))
    assert torch.equal(head.predict_proba(rows[7]), head.predict_proba(codes[7:8]))
    typed = {"age": 71.0, "cost": None, "stay": 4, "ward": "north", "smoker": float("nan")}
    written = {"age": "71", "cost": "", "stay": "4", "ward": "north", "smoker": ""}
    assert torch.equal(head(typed), head([written]))


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_codes_of_other_columns_are_refused_and_those_of_persons_are_not(tmp_path: Path):
    loaded = made(tmp_path, rows_of(240))
    head, codes = trained(loaded), loaded.train.tensors[0]
    shorter = codes.clone()
    shorter[:, 2] = 0  # persons with two rows
    assert head(shorter).shape == (80, 3, 2)
    assert head(codes.half()).shape == (80, 3, 2)
    reverse = made(tmp_path, rows_of(240), columns=dict(reversed(COLUMNS.items()))).train.tensors[0]
    assert reverse.shape == codes.shape
    uneven = codes.clone()
    uneven[4, 1, :8] *= 3
    for wrong, row in ((reverse, 0), (uneven, 4), (codes + 0.1, 0)):
        with pytest.raises(pg.PrivacyError, match=f"row {row} to have the codes of the columns age, cost"):
            head.predict(wrong)


def test_a_head_and_the_loader_take_a_data_frame_as_the_file(tmp_path: Path):
    pd = pytest.importorskip("pandas")
    rows = rows_of(240)
    loaded = made(tmp_path, rows)
    frame = pd.read_csv(tmp_path / "visits.csv", skipinitialspace=True)
    frame["stay"] = frame["stay"].astype("Int64")
    frame["ward"] = pd.Categorical(frame["ward"])
    own: dict[str, Any] = {"columns": COLUMNS, "label": "back", "classes": [0, 1], "unit": "patient", "max_rows": 3}
    with pytest.warns(UserWarning, match="NOT PRIVATE: .* of the DataFrame are outside"):
        framed = data.table(frame, **own)
    assert all(map(torch.equal, framed.train.tensors, loaded.train.tensors))
    head = trained(loaded)
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        assert torch.equal(head.predict_proba(frame), head.predict_proba(rows))
    with pytest.raises(pg.PrivacyError, match="got no column 'age'"):
        head.predict(frame.drop(columns="age"))
    assert head.predict(frame[:0]).shape == (0,)
    head.schema = None
    with pytest.raises(pg.PrivacyError, match=r"schema to be given for rows by column name, got None") as caught:
        head.predict(frame)
    assert "north" not in str(caught.value)
    twice = pd.concat([frame, frame[["age"]]], axis=1)
    for wrong, message in (
        (frame.drop(columns="age"), "the columns of the DataFrame to include every declared one, got 'age'"),
        (twice, "the columns of the DataFrame to differ, got 'age'"),
        (frame[:0], "the DataFrame to hold at least 1 row, got 0"),
        (frame.to_dict("records"), "the list to be a readable table, .* or give a dict of columns"),
    ):
        with pytest.raises(pg.PrivacyError, match=message):
            data.table(wrong, **own)
    with pytest.raises(pg.PrivacyError, match="table to be absent for the DataFrame, got 'visits'"):
        data.table(frame, **own, table="visits")


def test_a_data_frame_of_numbers_counts_as_their_array():
    pd = pytest.importorskip("pandas")
    rows = torch.randn(60, 4)
    head = pg.fit_head(rows, torch.arange(60) % 2, classes=["no", "yes"], progress=False, **FACTS)
    assert head.classes == ["no", "yes"]
    assert torch.equal(head.predict_proba(pd.DataFrame(rows.numpy())), head.predict_proba(rows))
    with pytest.raises(pg.PrivacyError, match=r"features of shape \(n, 4\), got \(60, 2\)"):
        head.predict(pd.DataFrame(rows.numpy()[:, :2]))


def test_dates_of_a_data_frame_are_to_become_numbers():
    pd = pytest.importorskip("pandas")
    days = pd.to_datetime(["2026-01-05 10:30:00.123456789", "2026-02-06"], format="ISO8601")
    zoned, plain = pd.Series(days).dt.tz_localize("UTC"), pd.Series(days).dt.date
    for column in (days, zoned, plain):
        frame = pd.DataFrame({"stay": column, "smoker": ["yes", "no"]})
        columns = {"stay": COLUMNS["stay"]}
        with pytest.raises(pg.PrivacyError, match=r"to be a number, got .*; set kind = \"date\""):
            data.table(frame, columns=columns, label="smoker", classes=["no", "yes"], unit="row", test_share=0.2)


GOOD: dict[str, Any] = {"age": 71, "cost": 1.5, "stay": 4, "ward": "north", "smoker": "no"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({**GOOD, "smoker": "perhaps"}, "row 1, column 'smoker' of the rows to be one of yes, no, got 'perhaps'"),
        ([GOOD, {**GOOD, "age": ""}], "row 2, column 'age' of the rows to have a value"),
        ({**GOOD, "age": "old"}, "column 'age' of the rows to be a number, got 'old'"),
        ({**GOOD, "age": [71]}, "column 'age' of the rows to be a single value, got '<a list>'"),
        ({"aeg": 71, **{k: v for k, v in GOOD.items() if k != "age"}}, "got no column 'age'; did you mean 'aeg'?"),
        ([GOOD, 7], "row 2 to be a dict with the columns of the training, got 7"),
        (iter([GOOD]), r"has no len\(\)"),
        (torch.zeros(1, 5), "give a list of dicts by column name"),
    ],
)
def test_a_row_that_the_schema_does_not_declare_is_refused(rows: Any, message: str, tmp_path: Path):
    head = trained(made(tmp_path, rows_of(240)))
    with pytest.raises((pg.PrivacyError, TypeError), match=message):
        head.predict_proba(rows)


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_an_exported_head_takes_the_codes_of_encode(tmp_path: Path):
    loaded = made(tmp_path, rows_of(60), unit="row", max_rows=None)
    head = pg.fit_head(*loaded.train.tensors, num_classes=2, progress=False, **FACTS)
    with pytest.raises(pg.PrivacyError, match="to be given for rows by column name"):
        head.encode(rows_of(2))
    head.schema = loaded.schema
    codes, rows = loaded.train.tensors[0], rows_of(20)
    width = codes.shape[1]
    dynamic = ({0: torch.export.Dim("batch")},)
    module = torch.export.export(head, (torch.zeros(2, width),), dynamic_shapes=dynamic).module()
    torch.testing.assert_close(module(head.encode(rows)), head(rows))
    assert head.encode(rows[0]).shape == (1, width)


def test_a_head_without_a_schema_or_with_another_one_says_so(tmp_path: Path):
    loaded = made(tmp_path, rows_of(240))
    head = trained(loaded)
    assert loaded.schema is not None
    head.schema = replace(loaded.schema, columns=dict(list(loaded.schema.columns.items())[1:]))
    with pytest.raises(pg.PrivacyError, match=r"Head\.save: expected schema to have"):
        head.save(tmp_path / "head")
    head.schema = None
    with pytest.raises(pg.PrivacyError, match=r"head\.schema to be given for rows by column name"):
        head.predict(GOOD)
    head.save(tmp_path / "head")
    assert pg.Head.load(tmp_path / "head").schema is None
    facts = json.loads((tmp_path / "head" / "head.json").read_text())
    (tmp_path / "head" / "head.json").write_text(json.dumps(facts | {"schema": {"columns": {}, "label": "back"}}))
    with pytest.raises(pg.PrivacyError, match=r"Head\.load"):
        pg.Head.load(tmp_path / "head")


def test_a_head_of_an_experiment_keeps_the_schema_unless_the_inputs_are_others(tmp_path: Path):
    loaded = made(tmp_path, rows_of(240))
    own = UnitLinear(loaded.input_shape[0], 2)
    save_head(own, loaded, tmp_path / "own", {"epsilon": 1.0})
    assert pg.Head.load(tmp_path / "own").schema == loaded.schema
    inputs: Tensor = loaded.train.tensors[0][..., :5]
    part = torch.utils.data.TensorDataset(inputs, loaded.train.tensors[1])
    save_head(UnitLinear(5, 2), replace(loaded, train=part, input_shape=(5,)), tmp_path / "cut", {"epsilon": 1.0})
    assert pg.Head.load(tmp_path / "cut").schema is None
