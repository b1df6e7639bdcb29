"""Items of the papers on the papers' own data: fakes of their format and size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_files import WRITERS, tokens_of_ptb
from test_data_text import save_byte_tokenizer, save_letter_tokenizer

from privgrad_lab import build, runner, trial
from privgrad_lab.load_spec import check_spec
from privgrad_lab.papers.reproduce import items, keys_of, prepared


def given(name: str) -> str:
    """The loader of the paper's own data of an item; empty without them."""
    return keys_of(name).get("given", {}).get("data", {}).get("use", "")


GIVEN = [name for name in items() if given(name)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a data set, written at the first call."""
    root = tmp_path_factory.mktemp("papers")

    def folder(name: str) -> Path:
        write = WRITERS[name][0]
        if not (place := root / write.__name__).exists():
            write(place)
        return place

    return folder


def save_tiny_bert(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_letter_tokenizer(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.BertModel(transformers.BertConfig(vocab_size=81, **sizes)).save_pretrained(folder)


def save_tiny_gpt2(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_byte_tokenizer(folder)
    config = transformers.GPT2Config(vocab_size=257, n_positions=128, n_embd=16, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def with_encoder(tables: Any, folder: Path) -> Any:
    """Tables in which each encoder, of a method too, is that in a folder."""
    if isinstance(tables, list):
        return [with_encoder(table, folder) for table in tables]
    if not isinstance(tables, dict):
        return tables
    return {key: str(folder) if key == "encoder" else with_encoder(table, folder) for key, table in tables.items()}


def in_the_numbers_of_fakes(raw: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Training examples and classes of an item; those of its plan change where the fake has others than the paper.

    ImageNet32 has 1,000 images a file. GPT-2 has a token for each byte, so the Penn Treebank has more than 2,459
    sequences; their number is from the data.
    """
    use = raw["data"]["use"]
    _, total, classes = WRITERS[use]
    if use == "ptb" and "encoder" in raw["model"]:
        total, classes = (tokens_of_ptb(folder) - 1) // raw["data"].get("length", 35), 257
        raw["privacy"]["num_examples"] = total
    if use == "imagenet32":
        raw["privacy"]["num_examples"] = total
    return total, classes


def test_each_of_the_papers_own_data_has_a_fake():
    assert {given(name) for name in GIVEN} <= set(WRITERS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.filterwarnings("ignore:NOT PRIVATE", "ignore:delta = ", "ignore:a plan")
def test_an_item_starts_on_the_papers_own_data(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Counts, classes, plans, models, and a step of each kind of method, and no file."""
    use = given(name)
    folder = folder_of(use)
    raw: dict[str, Any] = prepared(name, data=folder)
    kind, *_ = (raw.pop(key, "") for key in ("kind", "probe"))
    assert "stands_in_for" not in raw
    total, classes = in_the_numbers_of_fakes(raw, folder)
    if "encoder" in raw["model"]:
        (save_tiny_bert if use == "snli" else save_tiny_gpt2)(tmp_path / "encoder")
        raw = with_encoder(raw, tmp_path / "encoder")
    spec = check_spec(raw, name)
    data = runner.checked_data(spec)  # it refuses a wrong number of examples, and models that the data do not suit
    assert len(data.train) == spec.privacy.num_examples
    if total:
        assert len(data.train) + len(data.validation) * (data.validation is not data.test) + spec.data.public == total
    assert data.num_classes == (classes or data.num_classes)
    if data.frequency_edges is None and not spec.data.reconstruct:
        assert torch.isfinite(data.test.tensors[0]).all()
    monkeypatch.setattr(trial, "_FIRST", 2)
    monkeypatch.setattr(trial, "_PATIENCE", 0.0)
    monkeypatch.setattr(trial, "_EVALUATED", 2)
    # Two views take the path of the papers' 16, with less to compute.
    few = spec.run.model_copy(update={"augmentation_multiplicity": min(2, spec.run.augmentation_multiplicity)})
    found = trial.estimate(spec.model_copy(update={"run": few}), data, tunes=not kind)
    assert found is not None
    assert found.trainings >= len(spec.methods)
    assert found.device == build.device_of(spec)
    assert found.seconds > 0
