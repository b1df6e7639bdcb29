"""The rule "inputs" in a TOML file: every kind of synthetic examples, and what does not suit the data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data_text import write_lists

import privgrad as pg
from privgrad.data import LOADERS
from privgrad_lab import runner
from privgrad_lab.build import public_inputs
from privgrad_lab.load_spec import load_spec

SPEC = """
title = "preconditioned inputs"
[data]
{data}
[model]
use = "{model}"
{width} = 4
[privacy]
noise_multiplier = 1.0
delta = 1e-5
max_grad_norm = 0.1
num_examples = {count}
expected_batch_size = 8
steps = 3
[[methods]]
name = "DP-SGD"
optimizer = {{ use = "SGD", lr = 1.0 }}
precondition = {precondition}
[run]
num_evaluations = 1
"""
DIGITS: dict[str, Any] = {"data": 'use = "digits"', "model": "mlp", "width": "hidden", "count": 1437}


def digits(public: str, **options: float) -> dict[str, Any]:
    given = "".join(f", {name} = {value}" for name, value in options.items())
    return DIGITS | {"precondition": f'{{ use = "inputs", public = "{public}"{given} }}'}


def debian(folder: Path, name: str, public: str) -> dict[str, Any]:
    write_lists(folder)
    data = f'use = "{name}"\npath = "{folder}"\nwords = 20\nlength = 6'
    count = len(LOADERS[name](folder, words=20, length=6).train)
    rule = f'{{ use = "inputs", public = "{public}", every = 2 }}'
    return {"data": data, "model": "word-lstm", "width": "width", "count": count, "precondition": rule}


def trained(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a training by a file with these values."""
    (folder / "spec.toml").write_text(SPEC.format(**given))
    (record,) = runner.train(load_spec(folder / "spec.toml"), folder / "out", progress=False)
    return record


@pytest.mark.parametrize("public", ["silhouettes", "pink-noise"])
def test_synthetic_images_reach_the_ledger_with_their_options(tmp_path: Path, public: str):
    record = trained(tmp_path, digits(public, power=0.25, ridge=1.0, every=2))
    assert public.replace("-", " ") in record["side_information"]
    assert record["precondition"] == {
        "rule": "inputs",
        "options": {"power": 0.25, "ridge": 1.0, "every": 2},
        "public": public,
    }
    (ledger,) = (tmp_path / "out").rglob("ledger.jsonl")
    assert record["side_information"] in ledger.read_text()
    spec = json.loads((tmp_path / "out" / "spec.json").read_text())
    assert spec["methods"][0]["precondition"]["public"] == public


def test_synthetic_words_precondition_a_recurrent_network(tmp_path: Path):
    record = trained(tmp_path, debian(tmp_path, "debian-tags", "words"))
    assert "words" in record["side_information"]
    assert record["updates"] == 3


@pytest.mark.parametrize("standardize", [True, False])
def test_synthetic_images_have_the_datas_shape_and_range(standardize: bool):
    loaded = LOADERS["digits"](standardize=standardize)
    for kind in ("silhouettes", "pink-noise"):
        examples, source = public_inputs(kind, loaded)
        assert examples.shape == (6000, *loaded.input_shape)
        least, most = loaded.train.tensors[0].aminmax()
        torch.testing.assert_close(torch.stack(examples.aminmax()), torch.stack([least, most]), atol=1e-5, rtol=0)
        assert source.startswith("6,000 ")


def test_a_kind_that_does_not_suit_the_data_is_refused(tmp_path: Path):
    wrong = {
        "a misspelled kind": (digits("silhouette"), r"methods.DP-SGD.precondition.public.*silhouettes.*'silhouette'"),
        "words for images": (digits("words"), "precondition.public to be texts with public word counts, got digits"),
        "images for words": (
            debian(tmp_path, "debian-tags", "silhouettes"),
            "precondition.public to be square images with 1 or 3 channels and a known range, got Debian",
        ),
        "words of the examples": (debian(tmp_path, "debian-sections", "words"), "public word counts, got Debian"),
        "another rule": (
            DIGITS | {"precondition": '{ use = "public_rmsprop", public = "silhouettes" }'},
            'precondition.public to be for "inputs" only, got public_rmsprop',
        ),
        "no public examples": (DIGITS | {"precondition": '{ use = "inputs" }'}, "data.public"),
        "a power above 1": (digits("silhouettes", power=1.5), r"power to be in \(0, 1\], got 1.5"),
        "an unknown option": (digits("silhouettes", powers=0.5), "did you mean 'power'"),
    }
    for name, (given, message) in wrong.items():
        with pytest.raises(pg.PrivacyError, match=message):
            trained(tmp_path, given)
        assert not (tmp_path / "out").exists(), name  # nothing was begun, so the corrected file may use the folder
