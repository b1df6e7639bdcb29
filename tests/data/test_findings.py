"""`privgrad doctor FILE.toml`: what is found in a table or a folder of images before a training."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import privgrad as pg
from privgrad import data
from privgrad.cli import app
from privgrad_lab.data.findings import RawFinding, of_table

VISITS = """visit,patient,age,pressure,ward,site,returned
1,p1,30,120,north,a,yes
2,p2,40,,south,a,no
2,p2,40,900,south,a,no
4,p3,abc,130,moon,a,no
5,p4,41,120,north,a,yes
5,p5,30,120,north,a,yes
7,p6,30,120,north,a,maybe
"""
SCHEMA: dict[str, Any] = {
    "label": "returned",
    "classes": ["no", "yes"],
    "columns": {
        "age": {"kind": "number", "range": [18, 100], "bins": 8},
        "pressure": {"kind": "number", "edges": [60, 100, 250]},
        "ward": {"kind": "category", "values": ["north", "south"]},
        "site": {"kind": "category", "values": ["a"]},
    },
}


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    (tmp_path / "visits.csv").write_text(VISITS)
    return tmp_path / "visits.csv"


def raw_findings(path: Path, **declared: Any) -> list[RawFinding]:
    return of_table(path, None, **declared)[1]


def by_what(found: list[RawFinding]) -> dict[tuple[str, str], tuple[Any, ...]]:
    return {(one.column, one.what.partition(":")[0]): (one.count, *one.rows, one.blocks) for one in found}


def test_each_row_that_needs_a_decision_is_found(visits: Path):
    assert by_what(raw_findings(visits, unit="row", row_id="visit", **SCHEMA)) == {
        ("returned", "no declared class"): (1, 7, True),
        ("age", "no number"): (1, 4, True),
        ("pressure", "missing"): (1, 2, True),
        ("pressure", "outside of 60 to 250"): (1, 3, False),
        ("ward", "no declared value"): (1, 4, True),
        ("site", "constant"): (7, 1, 2, 3, 4, 5, False),
        ("", "the same declared columns as an earlier row"): (1, 6, False),
        ("visit", "an id that an earlier row has"): (2, 3, 6, True),
        ("patient", "6 values in 7 rows, and unit is 'row'"): (1, 3, False),
    }


def test_dates_in_a_column_of_numbers_are_to_become_numbers(visits: Path):
    visits.write_text(VISITS.replace("abc", "2026-01-05 10:30"))
    (found,) = (one for one in raw_findings(visits, unit="row", row_id="visit", **SCHEMA) if one.column == "age")
    assert found.remedy.startswith('set kind = "date"')
    assert found.blocks


def test_persons_with_several_rows_are_counted(visits: Path):
    found = by_what(raw_findings(visits, unit="patient", max_rows=1, **SCHEMA))
    assert found["patient", "persons with several rows, of 6 persons; the most is 2"] == (1, 2, False)
    assert found["patient", "persons with more than max_rows = 1 rows"] == (1, 2, False)
    assert not any("and unit is 'row'" in what for _, what in found)
    assert ("patient", "persons with more than max_rows = 2 rows") not in by_what(
        raw_findings(visits, unit="patient", max_rows=2, **SCHEMA)
    )


def test_a_training_says_as_the_doctor_that_persons_have_several_rows(visits: Path):
    schema: dict[str, Any] = SCHEMA | {"columns": {"visit": {"kind": "number", "range": [0, 9]}}}
    visits.write_text(VISITS.replace("maybe", "yes"))
    with pytest.warns(UserWarning, match="column 'patient' has 6 values in 7 rows, and unit is 'row'") as told:
        data.table(visits, unit="row", **schema)
    assert len(told) == 1


def test_declared_codes_for_missing_and_other_values_do_not_block(visits: Path):
    columns = SCHEMA["columns"] | {
        "pressure": SCHEMA["columns"]["pressure"] | {"missing": "category"},
        "ward": SCHEMA["columns"]["ward"] | {"other": True},
    }
    schema: dict[str, Any] = SCHEMA | {"columns": columns}
    found = by_what(raw_findings(visits, unit="row", **schema))
    assert found["pressure", "missing"] == (1, 2, False)
    assert found["ward", "no declared value"] == (1, 4, False)


def test_a_table_of_sqlite_is_read_with_all_of_its_columns(tmp_path: Path):
    with closing(sqlite3.connect(tmp_path / "visits.db")) as connection, connection:
        connection.execute("CREATE TABLE v (user_id, age, returned)")
        connection.executemany("INSERT INTO v VALUES (?, ?, ?)", [(1, 30, "yes"), (1, 31, "no"), (2, 31.5, "no")])
    schema: dict[str, Any] = SCHEMA | {"columns": {"age": {"kind": "number", "range": [18, 100]}}}
    found = by_what(raw_findings(tmp_path / "visits.db", unit="row", table="v", **schema))
    assert found == {("user_id", "2 values in 3 rows, and unit is 'row'"): (1, 2, False)}


def test_a_schema_or_file_that_a_training_refuses_is_refused(visits: Path):
    schema: dict[str, Any] = SCHEMA | {"columns": {"aged": SCHEMA["columns"]["age"]}}
    with pytest.raises(pg.PrivacyError, match="did you mean 'age'"):
        raw_findings(visits, unit="row", **schema)
    with pytest.raises(pg.PrivacyError, match='unit to be "row" or the name of the column'):
        raw_findings(visits, unit=None, **SCHEMA)


def written(folder: Path, lines: str) -> str:
    (folder / "data.toml").write_text(f"[data]\n{lines}\n")
    return f"{folder / 'data.toml'}"


def test_the_command_prints_what_it_finds_and_says_that_it_is_raw(visits: Path):
    lines = 'file = "visits.csv"\nunit = "row"\nlabel = "returned"\nclasses = ["no", "yes"]\n'
    lines += 'columns = { age = { kind = "number", range = [18, 100] } }'
    path = written(visits.parent, lines)
    shown = CliRunner().invoke(app, ["doctor", path], env={"COLUMNS": "200"})
    assert shown.exit_code == 1
    for part in ("visits.csv: NOT PRIVATE", "'abc'", "Do not publish it"):
        assert part in shown.output
    told = json.loads(CliRunner().invoke(app, ["doctor", path, "--json"]).stdout.splitlines()[-1])
    assert told["private"] is False
    assert told["raw_findings"]["visits.csv"][0]["column"] == "returned"
    visits.write_text("age,returned\n30,yes\n40,no\n")
    clean = CliRunner().invoke(app, ["doctor", path])
    assert (clean.exit_code, "each row fits its declaration" in clean.output) == (0, True)


def test_copies_and_damaged_images_are_found(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    for name, color in {"ill/1.png": 1, "ill/2.png": 2, "well/3.png": 1}.items():
        (tmp_path / "xrays" / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (8, 8), color).save(tmp_path / "xrays" / name)
    path = written(tmp_path, 'folder = "xrays"\nclasses = ["ill", "well"]\nunit = "row"\nsize = 8\nchannels = 1')
    shown = CliRunner().invoke(app, ["doctor", path])
    assert (shown.exit_code, "well/3.png" in shown.output, "ill/2.png" in shown.output) == (0, True, False)
    (tmp_path / "xrays/well/3.png").unlink()
    before = (tmp_path / "data.toml").read_text()
    clean = CliRunner().invoke(app, ["doctor", path])
    assert (clean.exit_code, "each image can be read, and none is repeated" in clean.output) == (0, True)
    assert "xrays, NOT PRIVATE: 2 images in 1 of 2 declared classes; 2 images in the training part." in clean.output
    (tmp_path / "data.toml").write_text(before + PRIVACY.format(3))
    assert CliRunner().invoke(app, ["doctor", path]).exit_code == 0  # as a training, which only warns
    (tmp_path / "data.toml").write_text(before)
    (tmp_path / "xrays" / "dead").mkdir()
    with pytest.raises(pg.PrivacyError, match="sub-folders of xrays to be the classes ill, well, got 'dead'"):
        raise CliRunner().invoke(app, ["doctor", path]).exception or AssertionError
    (tmp_path / "xrays" / "dead").rmdir()
    for name in range(7):  # more than the examples of other findings
        whole = (tmp_path / "xrays/ill/1.png").read_bytes()
        (tmp_path / f"xrays/well/{name}.png").write_bytes(whole[: 40 + name])
    image.new("I;16", (8, 8)).save(tmp_path / "xrays/ill/deep.png")
    shown = CliRunner().invoke(app, ["doctor", path, "--json"])
    (finding,) = json.loads(shown.stdout.splitlines()[-1])["raw_findings"]["xrays"]
    assert shown.exit_code == 1
    assert finding["rows"] == ["ill/deep.png", *(f"well/{name}.png" for name in range(7))]
    (tmp_path / "data.toml").write_text((tmp_path / "data.toml").read_text().replace("size = 8", "size = 0"))
    refused = CliRunner().invoke(app, ["doctor", path])
    with pytest.raises(pg.PrivacyError, match="size to be an integer >= 1"):
        raise refused.exception or AssertionError(refused.output)


PRIVACY = "\n[privacy]\nnum_examples = {}"
PEOPLE = """file = "people.csv"
label = "returned"
classes = ["no", "yes", "lost"]
columns = { age = { kind = "number", range = [18, 100] } }
"""


def people(folder: Path) -> None:
    """A table of 300 rows of 100 persons."""
    rows = [f"p{row % 100},{18 + row % 80},{('no', 'yes')[row % 2]}" for row in range(300)]
    (folder / "people.csv").write_text("\n".join(["person,age,returned", *rows]))


def told(path: str) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, ["doctor", path, "--json"]).stdout.splitlines()[-1])


@pytest.mark.filterwarnings("ignore:NOT PRIVATE. column")  # of persons
@pytest.mark.parametrize(
    ("unit", "units"), [('unit = "person"\nmax_rows = 4\n', "persons"), ('unit = "row"\nrow_id = "row"\n', "rows")]
)
def test_the_public_count_is_compared_with_the_training_part(tmp_path: Path, unit: str, units: str):
    people(tmp_path)
    if units == "rows":
        lines = (tmp_path / "people.csv").read_text().splitlines()
        numbered = [f"{line},{'row' if row == 0 else row}" for row, line in enumerate(lines)]
        (tmp_path / "people.csv").write_text("\n".join(numbered))
    lines = f"{PEOPLE}{unit}test_share = 0.25\nvalidation_share = 0.125\n"
    path = written(tmp_path, lines)
    named: dict[str, Any] = (
        {"unit": "person", "max_rows": 4} if units == "persons" else {"unit": "row", "row_id": "row"}
    )
    columns = {"age": {"kind": "number", "range": [18, 100]}}
    loaded = data.table(
        tmp_path / "people.csv",
        columns=columns,
        label="returned",
        classes=["no", "yes", "lost"],
        test_share=0.25,
        validation_share=0.125,
        **named,
    )
    size = told(path)["raw_sizes"]["people.csv"]
    assert size == {
        "rows": 300,
        "kind": "rows",
        "units": 100 if units == "persons" else None,
        "classes": 2,
        "declared": 3,
        "training": len(loaded.train),
        "unused": ["person"] if units == "rows" else [],
    }
    assert 0 < size["training"] < 300
    far = 2 if units == "persons" else 4
    for count, words in {
        size["training"]: "",
        size["training"] + 1: f"fewer {units} in the training part than num_examples = {size['training'] + 1}",
        size["training"] // (far + 1): f"{units} in the training part, more than {far} times num_examples",
    }.items():
        path = written(tmp_path, lines + PRIVACY.format(count))
        shown = CliRunner().invoke(app, ["doctor", path])
        output = " ".join(shown.output.split())  # lines end elsewhere if the path is longer
        assert words in json.dumps(told(path)["raw_findings"])
        assert shown.exit_code == 0  # as a training, which only warns
        verdict = "does NOT suit the training part: see people.csv." if words else "suits the training part."
        assert f"num_examples = {count} {verdict}" in output
        assert f"{size['training']} {units} in the training part" in output


def test_a_file_that_a_training_refuses_is_refused(tmp_path: Path):
    people(tmp_path)
    end = 'unit = "person"\nmax_rows = 4\n[model]\nuse = "head"\n[privacy]\ntarget_epsilon = 3.0\ndelta = 1e-3\n'
    lines = f"{PEOPLE}{end}num_examples = 60\n"
    with pytest.raises(pg.PrivacyError, match="title to be given"):
        raise CliRunner().invoke(app, ["doctor", written(tmp_path, lines)]).exception or AssertionError
    path = tmp_path / "data.toml"
    path.write_text('title = "People"\n' + path.read_text().replace("[model]", "test_share = 0.25\n[model]"))
    with pytest.raises(pg.PrivacyError, match=r"'people.csv' to be by example, got data by user"):
        raise CliRunner().invoke(app, ["doctor", f"{path}"]).exception or AssertionError
    path.write_text(f'{path.read_text()}privacy_unit = "user"\n')
    assert CliRunner().invoke(app, ["doctor", f"{path}"]).exit_code == 0
    whole = path.read_text()
    method = '[[methods]]\nname = "m"\noptimizer = { use = "SGD", lr = 0.1 }\n'
    for text, message in {
        whole.replace("test_share = 0.25", ""): "the test part of people.csv to hold at least 1 example",
        f"{whole}[tuning]\nnoise_steps = [0.1, 0.2]\nseeds = [0, 1]\n": "the validation part of people.csv to hold",
        f"{whole}{method}warm_start = {{ lr = 0.1, epochs = 1, batch_size = 4 }}\n": "data.public to be given for 'm'",
        f"{whole}{method}local = {{ lr = 0.1, batch_size = 4 }}\n": "local to be absent for data whose rows are pers",
    }.items():
        path.write_text(text)
        with pytest.raises(pg.PrivacyError, match=message):
            raise CliRunner().invoke(app, ["doctor", f"{path}"]).exception or AssertionError


def test_a_clean_file_says_what_was_looked_at(tmp_path: Path):
    people(tmp_path)
    (tmp_path / "later.csv").write_text("person,age,returned\nq1,40,no\n")
    path = written(tmp_path, f'{PEOPLE}unit = "person"\nmax_rows = 4\ntest = "later.csv"')
    shown = CliRunner().invoke(app, ["doctor", path], env={"COLUMNS": "300"}).output
    assert "people.csv, NOT PRIVATE: 300 rows of 100 persons in 2 of 3 declared classes; 100 persons in the tr" in shown
    assert "later.csv, NOT PRIVATE: 1 rows of 1 persons in 1 of 3 declared classes; the test part." in shown
    assert "privacy.num_examples is not given: nothing was compared" in shown


def test_columns_that_are_not_declared_are_named(tmp_path: Path):
    people(tmp_path)
    path = written(tmp_path, f'{PEOPLE}unit = "row"\n')
    shown = CliRunner().invoke(app, ["doctor", path], env={"COLUMNS": "300"})
    assert shown.exit_code == 0
    assert (
        "people.csv: columns that are not declared, or ignored, so that no training uses them: person." in shown.output
    )
    assert told(path)["raw_sizes"]["people.csv"]["unused"] == ["person"]
    (tmp_path / "people.csv").write_text(f"{','.join(f'[c{k}]' for k in range(12))},age,returned\n{'1,' * 12}40,no\n")
    shown = CliRunner().invoke(app, ["doctor", path], env={"COLUMNS": "300"}).output
    assert "uses them: [c0], [c1], [c2], [c3], [c4], [c5], [c6], [c7], [c8], [c9] and 2 more." in shown
    path = written(tmp_path, f'{PEOPLE}unit = "row"\n'.replace("age =", "height ="))
    with pytest.raises(pg.PrivacyError, match="every declared one, got 'height'"):
        raise CliRunner().invoke(app, ["doctor", path]).exception or AssertionError


@pytest.mark.parametrize(
    ("delta", "more", "found"),
    [
        ("0.02", "", ["delta = 0.02 is above 1 / num_examples = 0.0167"]),
        ("0.02", "simulate = 2", []),  # it has no guarantee anyway
        ("0.016", "", []),
        ("'1e-5'", "", []),  # `privgrad train` refuses it
    ],
)
def test_a_delta_that_is_too_large_is_found(tmp_path: Path, delta: str, more: str, found: list[str]):
    people(tmp_path)
    path = written(tmp_path, f'{PEOPLE}unit = "person"\nmax_rows = 4\n{PRIVACY.format(60)}\ndelta = {delta}\n{more}')
    shown = CliRunner().invoke(app, ["doctor", path], env={"COLUMNS": "300"})
    assert shown.exit_code == 0  # as a training, which only warns
    assert [one["what"] for one in told(path)["raw_findings"].get("data.toml", [])] == found
    assert ("lower delta far below" in shown.output, "num_examples = 60 suits" in shown.output) == (bool(found), True)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (
            'use = "digits"',
            [],
            r"to be a file or a folder, got 'digits'; check it with `privgrad compare .*toml --dry-run`",
        ),
        ("", [], "exactly one|to be given"),
        ('file = "absent.csv"\nlabel = "a"', [], "columns to be a table of columns"),
        ('use = "digits"', ["--batch", "a:b"], "absent for a TOML file"),
    ],
)
def test_files_without_data_to_look_at_are_refused(tmp_path: Path, lines: str, options: list[str], message: str):
    result = CliRunner().invoke(app, ["doctor", written(tmp_path, lines), *options])
    with pytest.raises(pg.PrivacyError, match=message):
        raise result.exception or AssertionError(result.output)
