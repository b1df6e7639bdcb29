"""Fakes of the papers' own data: files of the right format and size, with random content, in seconds each."""

import csv
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from test_data_images import python2_pickle


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


def write_cifar10(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        pixels = rng.integers(0, 256, (10_000, 3072), dtype=np.uint8)
        (folder / name).write_bytes(python2_pickle(pixels, [row % 10 for row in range(10_000)]))


def write_cifar100(folder: Path) -> None:
    """As the published files, it also has 20 coarse classes, which come after the fine ones."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, count in (("train", 50_000), ("test", 10_000)):
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        fine = python2_pickle(pixels, [row % 100 for row in range(count)], b"fine_labels")
        coarse = b"".join(b"J" + struct.pack("<i", row % 20) for row in range(count))
        (folder / part).write_bytes(fine.removesuffix(b"u.") + b"U\x0dcoarse_labels](" + coarse + b"eu.")


def write_imagenet32(folder: Path) -> None:
    """1,000 images a file in place of 128,116 or more: the whole set has 4 GB."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name in (*(f"train_data_batch_{number}" for number in range(1, 11)), "val_data"):
        pixels = rng.integers(0, 256, (1000, 3072), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", data=pixels, labels=np.arange(1, 1001), mean=np.zeros(3072))


def sentences(count: int, words: int, vocabulary: int) -> Iterator[str]:
    """Texts of random words, rare ones less often."""
    drawn = np.random.default_rng(0).random((count, words)) ** 3 * vocabulary
    return (" ".join(f"w{word}" for word in row) for row in drawn.astype(int))


def write_imdb(folder: Path) -> None:
    """Of Amazon's reviews, in a folder with this name next to it, 1,000 of 3,000,000: the file has 1.6 GB."""
    folder.mkdir(parents=True)
    products = folder.parent / "amazon"
    products.mkdir(exist_ok=True)
    with (products / "train.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, quoting=csv.QUOTE_ALL)
        rows.writerows((row % 5 + 1, 'a "title"', text + r"\n") for row, text in enumerate(sentences(1000, 30, 12_000)))
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


def tokens_of_ptb(folder: Path) -> int:
    """The training tokens where each byte is one, and a blank stands before each line."""
    return sum(1 + len(line.strip()) for line in (folder / "ptb.valid.txt").read_text().splitlines())


def write_e2e(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, count in (("trainset.csv", 42_061), ("devset.csv", 4_672)):
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["mr", "ref"])
            for row, text in enumerate(sentences(count, 20, 2_500)):
                fields = f"name[The Eagle {row}], food[French], priceRange[less than £20]"
                rows.writerow([fields, f'It\'s "{text}", yes.'])


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


def write_words_and_tags(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "stackoverflow.word_count").write_text("".join(f"w{word} {20_000 - word}\n" for word in range(12_000)))
    (folder / "stackoverflow.tag_count").write_text(json.dumps({f"t{tag}": 2_000 - tag for tag in range(1_000)}))


def write_users(path: Path, posts: Sequence[int]) -> None:
    """A file of users with their numbers of posts."""
    h5py = pytest.importorskip("h5py")
    texts = sentences(sum(posts), 12, 11_000)
    with h5py.File(path, "w") as file:
        for user, count in enumerate(posts):
            columns = {
                "title": [b"how to" for _ in range(count)],
                "tokens": [next(texts).encode() for _ in range(count)],
                "tags": [f"t{(user * post) % 500}|t{post}".encode() for post in range(count)],
            }
            for name, values in columns.items():
                file[f"examples/{user:08}/{name}"] = values


def write_stackoverflow(folder: Path) -> None:
    """The counts of words and tags are whole; of the 342,477 users there are as many as the papers take."""
    write_words_and_tags(folder)
    for part, users in (("train", 1_000), ("test", 950)):
        write_users(folder / f"stackoverflow_{part}.h5", [10 + user % 3 for user in range(users)])


def write_stackoverflow_posts(folder: Path) -> None:
    """400 users, four fifths of whose posts are the papers' 246,092 training rows, and four others."""
    write_words_and_tags(folder)
    write_users(folder / "stackoverflow_test.h5", [1])  # it must be there, but is not read
    write_users(folder / "stackoverflow_train.h5", [770] * 92 + [769] * 308 + [600] * 4)


# By the loader: training examples, whether private, public or held out, and classes; 0 is not checked. ImageNet32 has
# fewer rows than the true one, and the encoder of ptb and e2e fewer tokens: see `in_the_numbers_of_fakes`.
WRITERS: dict[str, tuple[Callable[[Path], None], int, int]] = {
    "mnist": (write_mnist, 60_000, 10),
    "barcode": (write_mnist, 23_770, 330),
    "cifar-10": (write_cifar10, 50_000, 10),
    "cifar-100": (write_cifar100, 50_000, 100),
    "imagenet32": (write_imagenet32, 10_000, 1000),
    "imdb": (write_imdb, 25_000, 2),
    "ptb": (write_ptb, 2_095, 0),
    "e2e": (write_e2e, 42_061, 257),
    "snli": (write_snli, 549_367, 3),
    "stackoverflow": (write_stackoverflow, 0, 500),
    "stackoverflow-tags": (write_stackoverflow_posts, 246_092, 500),
}
