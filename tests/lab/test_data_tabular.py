"""Tables, on the real file and on small ones of the same format."""

from pathlib import Path

import pytest
import torch

import privgrad as pg
from privgrad import data
from privgrad.accounting.calibration import cache

HEAD = (
    ",age,workclass,education,education-num,marital-status,occupation,relationship,ethnicity,gender,"
    "capital-gain,capital-loss,hours-per-week,loan\n"
)
ROW = "{},45, Private, Masters,14, Divorced, Sales, Unmarried, White, Female,{},0,99, {}\n"


def write_adult(folder: Path, rows: int = 8) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (ROW.format(row, 99999 if row == 0 else 0, ">50K" if row % 3 == 0 else "<=50K") for row in range(rows))
    (folder / "census.csv").write_text(HEAD + "".join(lines))


def test_rows_are_coded_by_the_codebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(pg.PrivacyError, match=r"adult: .*privgrad data fetch adult"):
        data.adult()
    write_adult(tmp_path / "cache" / "privgrad" / "adult" / "xai" / "data")  # as the wheel is unzipped
    loaded = data.adult(validation=2)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [4, 2, 2]
    assert (loaded.num_classes, loaded.input_shape) == (2, (65,))
    inputs, labels = loaded.train.tensors
    assert labels.tolist() == [1, 0, 0, 0]  # rows 0, 1, 2, 4
    assert inputs[:, :60].sum(1).tolist() == [7.0] * 4
    assert inputs[0, [4, 9 + 12, 25, 32 + 12, 47 + 4, 53 + 4, 58]].tolist() == [1.0] * 7
    assert inputs[0, 60:].tolist() == [0.5, 14 / 16, 1.0, 0.0, 1.0]
    assert inputs[1, 62] == 0
    write_adult(tmp_path / "mine", rows=40)
    assert len(data.adult(tmp_path / "mine", limit=7).train) == 7


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Sales", "Astronaut"),
        ("45", "forty"),
        (",99,", ",100,"),
        ("loan", "income"),
        ("<=50K", "?"),
        ("Private", "P\xff"),
    ],
)
def test_a_table_of_another_kind_is_refused(tmp_path: Path, old: str, new: str):
    write_adult(tmp_path)
    path = tmp_path / "census.csv"
    path.write_bytes(path.read_text().replace(old, new).encode("latin-1"))
    with pytest.raises(pg.PrivacyError, match="to be the table of the census"):
        data.adult(tmp_path)


def test_a_table_without_rows_and_a_wrong_limit_are_refused(tmp_path: Path):
    write_adult(tmp_path, rows=0)
    with pytest.raises(pg.PrivacyError, match="0 rows"):
        data.adult(tmp_path)
    with pytest.raises(pg.PrivacyError, match="limit"):
        data.adult(tmp_path, limit=0)


@pytest.mark.skipif(not cache("adult").is_dir(), reason="needs `privgrad data fetch adult`")
def test_the_real_table():
    loaded = data.adult()
    assert (len(loaded.train), len(loaded.test)) == (24_421, 8_140)
    inputs, labels = loaded.train.tensors
    assert labels.float().mean() == pytest.approx(0.241, abs=0.005)
    assert torch.equal(inputs[:, :60].sum(1), torch.full((24_421,), 7.0))
