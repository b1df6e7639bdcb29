"""`privgrad predict`: a saved head on the rows of a table, as the head itself predicts them."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import Here, here, last_json

import privgrad as pg
from privgrad import data

__all__ = ["here"]
COLUMNS: dict[str, Any] = {
    "age": {"kind": "number", "range": [0, 100]},
    "ward": {"kind": "category", "values": ["north", "south"], "missing": "category"},
}
FACTS: dict[str, Any] = {"target_epsilon": 5.0, "delta": 1e-2, "num_examples": 8, "steps": 2}
TARGETS: dict[str, dict[str, Any]] = {"ill": {"classes": ["no", "yes"]}, "cost": {"bounds": [0, 10]}}


def saved(folder: Path, label: str) -> pg.Head:
    """A head of 200 rows, in `folder`/head, and the file of new rows, in `folder`/new.csv."""
    ages = torch.linspace(1, 99, 200).tolist()
    cells: dict[str, list[Any]] = {"age": ages, "ward": ["north", "south"] * 100}
    cells |= {"ill": ["yes" if age > 50 else "no" for age in ages], "cost": [age / 10 for age in ages]}
    loaded = data.table(cells, columns=COLUMNS, label=label, unit="row", **TARGETS[label])
    facts: dict[str, Any] = {"target_epsilon": 50.0, "delta": 1e-3, "num_examples": 200, "source": "declared ranges"}
    facts |= {"bounds": (0, 10)} if label == "cost" else {"classes": loaded.classes}
    head = pg.fit_head(*loaded.train.tensors, schema=loaded.schema, progress=False, steps=60, **facts)
    head.save(folder / "head")
    with (folder / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("id", "ward", "age"), ("a1", "south", "9"), ("a2", "", "88"), ("a3", "north", "1e1")]
        )
    return head


@pytest.mark.parametrize("label", TARGETS)
def test_each_row_of_a_file_is_predicted_as_by_the_head(here: Here, tmp_path: Path, label: str):
    head = saved(tmp_path, label)
    told = here("predict", "head", "new.csv", "--out", "out.csv", "--keep", "id", "--json")
    assert last_json(told) == {"rows": 3, "out": "out.csv"}
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == ["a1", "a2", "a3"]
    rows = [{"age": 9, "ward": "south"}, {"age": 88, "ward": None}, {"age": 10, "ward": "north"}]
    if label == "cost":
        assert [float(row["prediction"]) for row in found] == pytest.approx(head.predict(rows).tolist(), rel=1e-4)
        return
    assert [row["prediction"] for row in found] == ["no", "yes", "no"]
    chances = [[float(row[f"probability of {name}"]) for name in ("no", "yes")] for row in found]
    torch.testing.assert_close(torch.tensor(chances), head.predict_proba(rows), atol=1e-4, rtol=0)


def test_bad_input_is_one_error_and_writes_nothing(here: Here, tmp_path: Path):
    saved(tmp_path, "ill")
    (tmp_path / "old.csv").write_text("mine")
    (tmp_path / "wrong.csv").write_text("age,ward\n30,west\n")
    pg.fit_head(torch.rand(8, 3), torch.arange(8) % 2, num_classes=2, source="no data", progress=False, **FACTS).save(
        tmp_path / "other"
    )
    for given, message in (
        (("head", "new.csv", "--out", "old.csv"), "--out to be a new file, got old.csv, which exists"),
        (("head", "wrong.csv", "--out", "out.csv"), "row 1, column 'ward'"),
        (("head", "new.csv", "--out", "out.csv", "--keep", "name"), "name"),
        (("other", "new.csv", "--out", "out.csv"), "to have been trained on columns of a table"),
        (("nowhere", "new.csv", "--out", "out.csv"), "nowhere"),
    ):
        assert message in " ".join(here("predict", *given, code=2).stderr.split())
    assert (tmp_path / "old.csv").read_text() == "mine"
    assert not (tmp_path / "out.csv").exists()
