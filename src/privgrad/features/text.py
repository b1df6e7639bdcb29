"""Features of texts: TF-IDF whose vocabulary and frequencies come from public texts, and texts as rows of bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import expected, require_integer
from privgrad.features.extractor import Extractor, Public, Rows, marks_of, public_rows
from privgrad.features.whitened import unit_rows
from privgrad.plugins import optional

Analyzer = Literal["word", "char", "char_wb"]


def word_sequences(counts: Tensor, n: int, length: int, *, seed: int = 0) -> Public:
    """Return sequences of word ids, each drawn by its public frequency and independent of the others.

    Args:
        counts: how often each id occurs in public text, shape (vocabulary,), >= 0, not all 0.
        n: number of sequences, >= 1.
        length: ids per sequence, >= 1.
        seed: of the random numbers. They are public, so a fixed seed is safe here.
    Returns:
        Public rows, int64 (n, length).
    Raises:
        RuntimeError: a count is negative, or all are 0; or a number is out of its range.
    """
    drawn = torch.multinomial(counts.double(), n * length, True, generator=torch.Generator().manual_seed(seed))
    return Public(drawn.view(n, length), f"{n:,} sequences of words drawn by public frequencies (seed {seed})")


def text_rows(texts: Sequence[str], length: int) -> Tensor:
    """Return texts as rows of one length, so that a data set can hold them: int8 (n, length).

    A row holds the bytes of a text in UTF-8, and then zeros. Extractors of texts take such rows in place of texts.

    Args:
        texts: n texts; a longer one is cut.
        length: the public number of bytes of a row, >= 1.
    Raises:
        PrivacyError: a row is no text, or `length` is out of its range.
    """
    require_integer("text_rows", "length", length, 1)
    rows = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        content = text.replace("\0", " ").encode("utf-8", "replace")[:length]
        row[: len(content)] = np.frombuffer(content, np.uint8)
    return torch.from_numpy(rows.view(np.int8))


def texts_of(rows: Rows) -> Sequence[str]:
    """Return the texts of rows of bytes, int8 (n, length) from `text_rows`; texts are returned as they are."""
    if not isinstance(rows, Tensor):
        return rows
    if rows.dtype != torch.int8 or rows.ndim != 2:
        got = f"{rows.dtype} of shape {tuple(rows.shape)}"
        raise expected("texts_of", "rows", "to be texts, or rows of `text_rows`, int8 (n, length)", got)
    return [row.tobytes().rstrip(b"\0").decode("utf-8", "ignore") for row in rows.cpu().numpy()]


class TfIdf(Extractor):
    """Term frequencies of public words, weighted by public document frequencies; each row has norm 1 or is zero.

    Computes: the features of scikit-learn's TfidfVectorizer, fitted on public texts.

    Args:
        public: public texts, as texts, rows of bytes or a Public. Words that they lack are ignored.
        source: where bare texts come from, for the ledger.
        vocabulary: the number of words, >= 1: the most frequent ones in the public texts.
        ngrams: the smallest and the largest number of neighboring words, or of characters, that count as one word.
        analyzer: "word"; "char" counts characters, and "char_wb" counts characters within words.
        sublinear: whether 1 + log(count) replaces the count of a word in a text.
    Raises:
        PrivacyError: scikit-learn is not installed.
        ValueError: (of scikit-learn) the public texts hold no word, or an argument is out of its range.
    Privacy:
        The vocabulary is in the saved extractor and in each prediction. A vocabulary of private texts would publish
        names that occur in a single text. `cache` and `fit_head` find such a vocabulary by hashes of the public texts.
    """

    options: ClassVar[tuple[str, ...]] = ("words", "ngrams", "analyzer", "sublinear")
    words: list[str]
    sublinear: bool

    def __init__(
        self,
        public: Public | Rows,
        source: str | None = None,
        *,
        vocabulary: int = 10_000,
        ngrams: tuple[int, int] = (1, 1),
        analyzer: Analyzer = "word",
        sublinear: bool = True,
    ) -> None:
        known = public_rows("TfIdf", public, source)
        settings: dict[str, Any] = {"ngrams": list(ngrams), "analyzer": analyzer, "sublinear": sublinear}
        counter = _counter(settings, max_features=vocabulary)
        counts = counter.fit_transform(texts_of(known.rows))
        documents = torch.from_numpy((counts > 0).sum(0)).flatten()
        idf = ((1 + len(known.rows)) / (1 + documents)).log().float() + 1
        super().__init__(known.source, idf=idf, marks=marks_of(known.rows))
        self._set({"words": counter.get_feature_names_out().tolist(), **settings})

    @classmethod
    def rebuilt(cls, config: Mapping[str, Any], parts: Mapping[str, Extractor]) -> Self:
        made = super().rebuilt(config, parts)
        made._set(config["options"])
        return made

    def _set(self, options: Mapping[str, Any]) -> None:
        for name in self.options:
            setattr(self, name, options[name])
        self._counter = _counter(options, vocabulary=options["words"])

    def features(self, rows: Rows) -> Tensor:
        """Return the features of n texts, or of rows of bytes."""
        idf = self.get_buffer("idf")
        counts = torch.from_numpy(self._counter.transform(texts_of(rows)).toarray()).to(idf)
        return unit_rows(idf * (torch.where(counts > 0, 1 + counts.log(), 0) if self.sublinear else counts))


def _counter(options: Mapping[str, Any], **more: Any) -> Any:
    module = optional("TfIdf", "scikit-learn", "sklearn.feature_extraction.text", "pip install scikit-learn")
    return module.CountVectorizer(ngram_range=tuple(options["ngrams"]), analyzer=options["analyzer"], **more)
