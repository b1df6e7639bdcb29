"""Fakes of the papers' own data: files of the right format and size, with random content, in seconds each."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest


def write_mnist(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 4:24:4, 4:24:4] = rng.integers(0, 256, (count, 5, 5))
        for kind, values in (("images-idx3", images), ("labels-idx1", (np.arange(count) % 10).astype(np.uint8))):
            header = struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape)
            content = gzip.compress(header + values.tobytes(), compresslevel=1)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(content)


def python2_pickle(rows: np.ndarray, labels: list[int]) -> bytes:
    """A batch as the published files have it: Python 2's protocol 2, whose strings are of bytes."""
    text = lambda word: b"U" + bytes([len(word)]) + word  # noqa: E731
    integer = lambda number: b"J" + struct.pack("<i", number)  # noqa: E731
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + integer(0) + b"\x85" + text(b"b") + b"tR"
    dtype = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN" + 2 * integer(-1) + b"K\x00tb"
    )
    shape = integer(rows.shape[0]) + integer(rows.shape[1]) + b"\x86"
    raw = b"T" + struct.pack("<i", rows.size) + rows.tobytes()
    array += b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + b"](" + b"".join(map(integer, labels)) + b"eu."


def write_cifar10(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        pixels = rng.integers(0, 256, (10_000, 3072), dtype=np.uint8)
        (folder / name).write_bytes(python2_pickle(pixels, [row % 10 for row in range(10_000)]))


def sentences(count: int, words: int, vocabulary: int) -> Iterator[str]:
    """Texts of random words, rare ones less often."""
    drawn = np.random.default_rng(0).random((count, words)) ** 3 * vocabulary
    return (" ".join(f"w{word}" for word in row) for row in drawn.astype(int))


def write_imdb(folder: Path) -> None:
    folder.mkdir(parents=True)
    texts = sentences(100_000, 30, 12_000)
    parts = [("train/pos", 9, 12_500), ("train/neg", 2, 12_500), ("test/pos", 9, 12_500), ("test/neg", 2, 12_500)]
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz", compresslevel=1) as archive:
        for place, stars, count in [*parts, ("train/unsup", 0, 50_000)]:
            for index in range(count):
                content = next(texts).encode()
                member = tarfile.TarInfo(f"aclImdb/{place}/{index}_{stars}.txt")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_ptb(folder: Path) -> None:
    """Of the true valid part's 70,390 words and 3,370 lines; 2,938 have an apostrophe, a token of its own."""
    folder.mkdir(parents=True)
    for part, count in (("train", 929_589), ("valid", 70_390), ("test", 78_669)):
        words = next(sentences(1, count, 9_000)).split()
        for index in range(0, 2_938 * 20, 20):
            words[index] = f"'{words[index]}"
        lines = [f" {' '.join(words[start : start + 21])} \n" for start in range(0, count, 21)]
        (folder / f"ptb.{part}.txt").write_text("".join(lines))


def write_snli(folder: Path) -> None:
    """549,367 training pairs with a label, and 785 without one; sentences are shorter than the true ones."""
    folder.mkdir(parents=True)
    labels = ("entailment", "neutral", "contradiction")
    for part, labeled, without in (("train", 549_367, 785), ("dev", 9_842, 158)):
        with (folder / f"snli_1.0_{part}.jsonl").open("w") as file:
            for row in range(labeled + without):
                label = labels[row % 3] if row < labeled else "-"
                pair = {"gold_label": label, "sentence1": "a cat", "sentence2": "a dog"}
                file.write(json.dumps(pair) + "\n")


def write_stackoverflow(folder: Path) -> None:
    """The counts of words and tags are whole; of the 342,477 users there are as many as the papers take."""
    h5py = pytest.importorskip("h5py")
    folder.mkdir(parents=True)
    (folder / "stackoverflow.word_count").write_text("".join(f"w{word} {20_000 - word}\n" for word in range(12_000)))
    (folder / "stackoverflow.tag_count").write_text(json.dumps({f"t{tag}": 2_000 - tag for tag in range(1_000)}))
    for part, users in (("train", 1_000), ("test", 950)):
        texts = sentences(users * 12, 12, 11_000)
        with h5py.File(folder / f"stackoverflow_{part}.h5", "w") as file:
            for user in range(users):
                posts = range(10 + user % 3)
                columns = {
                    "title": [b"how to" for _ in posts],
                    "tokens": [next(texts).encode() for _ in posts],
                    "tags": [f"t{(user * post) % 500}|t{post}".encode() for post in posts],
                }
                for name, values in columns.items():
                    file[f"examples/{user:08}/{name}"] = values


# By the loader: training examples, whether private, public or held out, and classes; 0 is not checked.
WRITERS: dict[str, tuple[Callable[[Path], None], int, int]] = {
    "mnist": (write_mnist, 60_000, 10),
    "barcode": (write_mnist, 23_770, 330),
    "cifar-10": (write_cifar10, 50_000, 10),
    "imdb": (write_imdb, 25_000, 2),
    "ptb": (write_ptb, 2_095, 0),
    "snli": (write_snli, 549_367, 3),
    "stackoverflow": (write_stackoverflow, 0, 500),
}
