"""Text: language modeling (Brown, Penn Treebank, E2E), sentence pairs (SNLI), and encoders for them."""

import csv
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privgrad.data.dataset import NO_LABEL, DataSet, split
from privgrad.data.schema import PathLike, Positive
from privgrad.errors import expected, readable, require_integer
from privgrad.plugins import optional
from privgrad_lab.data.fetching import json_lines, located

_UNKNOWN = "<unk>"
TOKEN_EDGES = (3000, 1000, 300, 100, 30, 10, 1, 0)
# Groups of the heavy-tail paper's figure 5: by magnitude above 5,000, one below 5, and 30 between, here of equal ratio.
_PAPERS_EDGES = (400_000, 20_000, *(math.ceil(5 * 1000 ** (k / 30)) for k in range(30, -1, -1)), 1, 0)
_SNLI_LABELS = ("entailment", "neutral", "contradiction")


def brown(
    path: PathLike | None = None, *, length: Positive = 35, min_count: Positive = 2, validation: int = 0
) -> DataSet:
    """Load the task: the next word in the press part of the Brown corpus (1961), the stand-in for the Penn Treebank.

    The words of the files are one stream, cut into sequences. They are lower-cased, and punctuation marks are words.
    The last tenth of the files is the test part. 44 files: 91,335 training tokens in 2,609 sequences, 9,219 test
    tokens. Inputs (n, length) are ids, labels (n, length) the next ids. Id 0 is <unk>, the others follow by falling
    frequency.

    Args:
        path: folder with the tagged files ca01, ca02, ...; None is ${XDG_CACHE_HOME:-~/.cache}/privgrad/brown.
        length: tokens of a sequence, >= 1.
        min_count: words that are rarer in the training files are <unk>, >= 1. 2 leaves 5,880 ids and makes 7 % of the
            training and 14 % of the test tokens <unk>; 1 would leave 12,451 ids.
        validation: number of training sequences, from the end, to hold out.
    Raises:
        PrivacyError: files are absent or damaged, or a number is out of its range.
    Privacy:
        The vocabulary is computed from the private text: NOT private. An example is a sequence.
    """
    require_integer("brown", "min_count", min_count, 1)
    folder = located("brown", path, "brown")
    texts = [_tagged_words(file) for file in sorted(folder.glob("ca[0-9][0-9]"))]
    held_out = max(1, len(texts) // 10)
    train, test = (list(chain.from_iterable(part)) for part in (texts[:-held_out], texts[-held_out:]))
    vocabulary = [word for word, count in Counter(train).most_common() if count >= min_count]
    return _next_words("brown", "Brown corpus, press", train, test, vocabulary, length, validation)


def ptb(
    path: PathLike | None = None, *, tokenizer: PathLike | None = None, length: Positive = 35, validation: int = 0
) -> DataSet:
    """Load the task: the next word in TinyPTB. The Penn Treebank's validation part trains, its test part tests.

    The words are from torchtext's tokenizer basic_english, as in the reference. The vocabulary comes from
    ptb.train.txt. The lines of a part are one stream, cut into sequences: inputs (n, length) are ids, labels (n,
    length) the next ids. Id 0 is <unk>, the others follow by falling frequency.

    The arguments are those of `brown`, except that `path` is the folder with ptb.train.txt, ptb.valid.txt and
    ptb.test.txt, or None for ${XDG_CACHE_HOME:-~/.cache}/privgrad/ptb, and that the ids are those of `tokenizer`, the
    folder of a transformers tokenizer, if it is given. It reads each line after a blank. Results are then grouped by
    the frequencies of the heavy-tail paper.

    Raises:
        PrivacyError: files are absent, the tokenizer is absent, or a number is out of its range.
    Privacy:
        An example is a sequence.
    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), and with GPT-2's tokenizer Tang, Zhiyanov, Lecuyer. Deviation: here
        sequences are consecutive; those of Kunstner et al. run down columns.
    """
    folder = located("ptb", path, "ptb")
    texts = (_read("ptb", folder / f"ptb.{part}.txt") for part in ("train", "valid", "test"))
    if tokenizer is not None:
        encode = ContinuationEncoder("ptb", tokenizer, length)
        _, *parts = texts
        train, test = (_sequences("ptb", encode.stream(part), length) for part in parts)
        sizes = {"num_classes": encode.vocabulary, "vocabulary": encode.vocabulary}
        return split("TinyPTB, tokens", train, test, validation, frequency_edges=_PAPERS_EDGES, **sizes)
    words, train, test = map(_basic_english, texts)
    vocabulary = [word for word, _ in Counter(words).most_common()]
    return _next_words("ptb", "TinyPTB", train, test, vocabulary, length, validation)


def e2e(path: PathLike | None = None, *, tokenizer: PathLike, length: Positive = 128, validation: int = 0) -> DataSet:
    """Load the task E2E: describe a restaurant in words, from its attributes.

    42,061 training examples; the development part, 4,672, is the test part. An example reads "name[The Eagle],
    food[French] || The Eagle serves French food." and ends with the tokenizer's end token. Inputs, int64 (n, length):
    token ids. Labels, (n, length): the next ids, of the description and its end only. Results are grouped by a token's
    frequency in the training descriptions.

    Args:
        path: folder with trainset.csv and devset.csv; None is ${XDG_CACHE_HOME:-~/.cache}/privgrad/e2e.
        tokenizer: folder of a transformers tokenizer of a causal language model.
        length: tokens of an example, >= 5; longer examples lose attributes first, then the end of the description.
        validation: number of training examples, from the end, to hold out.
    Raises:
        PrivacyError: files are absent or damaged, transformers is not installed, the tokenizer is absent, or a number
            is out of its range.
    Reference:
        Novikova, Dusek, Rieser 2017.
    """
    folder = located("e2e", path, "e2e")
    encode = ContinuationEncoder("e2e", tokenizer, length)

    def part(name: str) -> tuple[Tensor, Tensor]:
        file = folder / name
        what, remedy = "to be a CSV file with the columns mr and ref, and rows", "fetch it again"
        with readable("e2e", f"{file}", what, remedy), file.open(encoding="utf-8", newline="") as lines:
            rows = [(row["mr"], " ||", " " + row["ref"]) for row in csv.DictReader(lines, strict=True)]
            return encode.labeled(rows)

    sizes = {"num_classes": encode.vocabulary, "vocabulary": encode.vocabulary}
    train, test = part("trainset.csv"), part("devset.csv")
    return split("E2E", train, test, validation, frequency_edges=TOKEN_EDGES, **sizes)


def snli(path: PathLike | None = None, *, tokenizer: PathLike, length: Positive = 128, validation: int = 0) -> DataSet:
    """Load SNLI: does a sentence follow from another (0), is it neutral (1), or does it contradict the other (2)?

    549,367 training pairs; the development part is the test part, as in the DP-AdamBC paper. Pairs without a gold label
    are dropped. Inputs (n, 2, length): token ids, and token type ids; padded with the tokenizer's pad id.

    Args:
        path: folder with snli_1.0_train.jsonl and snli_1.0_dev.jsonl; None is
            ${XDG_CACHE_HOME:-~/.cache}/privgrad/snli.
        tokenizer: folder of a transformers tokenizer.
        length: tokens of a pair, >= 5; a longer pair loses tokens of its longer sentence first.
        validation: number of training pairs, from the end, to hold out.
    Raises:
        PrivacyError: files are absent or damaged, transformers is not installed, the tokenizer is absent, or a number
            is out of its range.
    """
    folder = located("snli", path, "snli")
    encode = PairEncoder("snli", tokenizer, length)
    files = (folder / f"snli_1.0_{part}.jsonl" for part in ("train", "dev"))
    train, test = (encode.labeled(list(json_lines("snli", file, _snli_pair))) for file in files)
    return split("SNLI", train, test, validation, num_classes=len(_SNLI_LABELS), vocabulary=encode.vocabulary)


class _Encoder:
    """A transformers tokenizer from a folder, for inputs of one length; `function` is the name for errors."""

    def __init__(self, function: str, tokenizer: PathLike, length: int) -> None:
        require_integer(function, "length", length, 5)
        library = optional(function, "transformers", "transformers", "pip install 'privgrad[hf]'")
        folder = Path(tokenizer).absolute()
        remedy = "give a folder that AutoTokenizer.from_pretrained(...).save_pretrained(folder) wrote"
        with readable(function, f"tokenizer {folder}", "to be a folder of a transformers tokenizer", remedy):
            self._tokenizer: Any = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.vocabulary = len(self._tokenizer)
        self._length = length


class PairEncoder(_Encoder):
    """A tokenizer for pairs of sentences; it cuts or pads each pair to one length."""

    def labeled(self, pairs: Sequence[tuple[str, str, int]]) -> tuple[Tensor, Tensor]:
        """Return inputs, int64 (n, 2, length): token ids, token type ids; and labels, int64 (n,)."""
        inputs = torch.empty(len(pairs), 2, self._length, dtype=torch.int64)
        labels = torch.tensor([label for *_, label in pairs], dtype=torch.int64)
        for start in range(0, len(pairs), 4096):  # so that the tokenizer's lists stay small
            few = pairs[start : start + 4096]
            encoded = self._tokenizer(
                [first for first, *_ in few],
                [second for _, second, _ in few],
                truncation=True,
                max_length=self._length,
                padding="max_length",
                return_token_type_ids=True,
                return_tensors="pt",
            )
            for row, name in enumerate(("input_ids", "token_type_ids")):
                inputs[start : start + 4096, row] = encoded[name]
        return inputs, labels


class ContinuationEncoder(_Encoder):
    """A tokenizer for a text and its continuation, whose tokens are the targets."""

    def __init__(self, function: str, tokenizer: PathLike, length: int) -> None:
        super().__init__(function, tokenizer, length)
        self._end = self._tokenizer.eos_token_id
        if self._end is None:
            remedy = "give the tokenizer of a causal language model"
            raise expected(function, "the tokenizer's eos_token_id", "to be a token id", None, remedy)

    def stream(self, text: str) -> list[int]:
        """Return the ids of a text's lines, each of which begins with a blank."""
        lines = [f" {line.strip()}" for line in text.splitlines()]
        return list(chain.from_iterable(self._tokenizer(lines, add_special_tokens=False)["input_ids"]))

    def labeled(self, texts: Sequence[tuple[str, str, str]]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, int64 (n, length), of texts (given, cue, continuation).

        Labels are the next ids, NO_LABEL before the end of the cue and after the end token. Texts that are too long
        lose tokens of `given` first, then of the continuation.
        """
        inputs = torch.full((len(texts), self._length), self._end)
        labels = torch.full_like(inputs, NO_LABEL)
        columns = (self._tokenizer([text[k] for text in texts], add_special_tokens=False) for k in range(3))
        tokens = zip(*(column["input_ids"] for column in columns), strict=True)
        for row, (given, cue, following) in enumerate(tokens):
            answer = [*following[: self._length - len(cue)], self._end]
            ids = given[: max(0, self._length + 1 - len(cue) - len(answer))] + cue + answer
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            labels[row, len(ids) - 1 - len(answer) : len(ids) - 1] = torch.tensor(answer)
        return inputs, labels


def digest(text: str) -> bytes:
    """Return the SHA-256 of a text, which fixes an order or a part, and hides a name."""
    return hashlib.sha256(text.encode()).digest()


def padded(rows: Iterable[Sequence[int]], count: int, length: int) -> Tensor:
    """Return the first ids of each row, filled up with 0: int64 (count, length)."""
    out = torch.zeros(count, length, dtype=torch.int64)
    for row, ids in zip(out.numpy(), rows, strict=True):
        row[: len(ids)] = ids[:length]
    return out


def _read(function: str, path: Path) -> str:
    with readable(function, f"{path}", "to be a text file", "fetch it again"):
        return path.read_text(encoding="utf-8")


def _tagged_words(path: Path) -> list[str]:
    tokens = [token.rpartition("/") for token in _read("brown", path).split()]
    untagged = next((tag for word, _, tag in tokens if not word), None)
    if untagged is not None:
        raise expected("brown", f"{path}", "to hold word/tag tokens", repr(untagged), "fetch it again")
    return [word.lower() for word, _, _ in tokens]


def _basic_english(text: str) -> list[str]:
    text = re.sub(r"<br />|[;:]", " ", text.lower().replace('"', ""))
    return re.sub(r"(['.,()!?])", r" \1 ", text).split()


def _next_words(
    function: str,
    name: str,
    train: Sequence[str],
    test: Sequence[str],
    words: Iterable[str],
    length: int,
    validation: int,
) -> DataSet:
    """Return a DataSet of sequences of ids, with the next ids as labels; a word that is not in `words` is <unk>."""
    ids = {word: index for index, word in enumerate(dict.fromkeys((_UNKNOWN, *words)))}
    first, last = (_sequences(function, [ids.get(word, 0) for word in stream], length) for stream in (train, test))
    return split(name, first, last, validation, num_classes=len(ids), frequency_edges=TOKEN_EDGES, vocabulary=len(ids))


def _sequences(function: str, stream: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Return a stream of ids as sequences, int64 (n, length), and the next ids, (n, length); its end is left out."""
    require_integer(function, "length", length, 1)
    end = (len(stream) - 1) // length * length
    if end < 1:
        condition = f"to be less than {len(stream)}, the tokens of a part"
        raise expected(function, "length", condition, length, "give more text")
    numbers = torch.tensor(stream, dtype=torch.int64)
    return numbers[:end].view(-1, length), numbers[1 : end + 1].view(-1, length)


def _snli_pair(pair: dict[str, Any]) -> list[tuple[str, str, int]]:
    label = pair["gold_label"]
    return [] if label == "-" else [(pair["sentence1"], pair["sentence2"], _SNLI_LABELS.index(label))]
