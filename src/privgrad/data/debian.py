"""The Debian package index as text: what every machine with apt has, and a stand-in for several sets it has not."""

import gzip
import hashlib
import random
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from privgrad.data.dataset import DataSet, split
from privgrad.data.sources import PathLike, find_folder
from privgrad.data.text import PairEncoder
from privgrad.errors import expected, require_integer

_LISTS = Path("/var/lib/apt/lists")
_APT_HELPER = "/usr/lib/apt/apt-helper"
_REMEDY = "run `apt-get update -o Acquire::Languages=en`, or give a folder with the Packages and Translation-en lists"
_SECTION_EDGES = (4000, 1000, 250, 60, 0)

_FIELD = re.compile(r"^(Package|Source|Section|Description-md5): (\S+)", re.MULTILINE)
_DESCRIPTION = re.compile(r"^Description-md5: (\w+)\nDescription-en: (.*)\n((?: .*\n)*)", re.MULTILINE)
_WORD = re.compile(r"[a-z][a-z0-9+.-]*[a-z0-9+]|[a-z]")
_PARAGRAPH = re.compile(r"^ \.$", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class _Package:
    """A binary package. Its maintainer, a person, is not read."""

    source: str
    section: str
    synopsis: str
    description: str


def debian_sections(
    path: PathLike | None = None,
    *,
    words: int = 10_000,
    length: int = 64,
    limit: int | None = None,
    validation: int = 0,
) -> DataSet:
    """Which section of Debian is a package in? Bags of words of descriptions, 58 classes of 15 to 6,700 packages.

    The stand-in for tagged questions (StackOverflow) and for sparse linear models of text (IMDB); a natural heavy tail.
    About 63,000 packages; an index changes at point releases. Packages of one source stay together, so that siblings
    with nearly the same description are not on both sides: a fifth of the sources is the test part. Inputs, int64
    (n, length): 0 is padding, 1 to `words` the most frequent words of the training part, by falling frequency; of a
    package's synopsis and description the first `length` known words, in order. Labels: the sections, sorted by name.
    Without privacy, logistic regression on tf-idf is right on 74 %; the largest class has 10 % of the test part.

    Args:
        path: folder with apt's lists of main, compressed or not; None is /var/lib/apt/lists.
        words: size of the vocabulary without the padding, >= 1.
        length: words kept of a description, >= 1.
        limit: keep so many training examples; None keeps all.
        validation: how many of those, from the end, to hold out.
    Raises:
        PrivacyError: no lists, or without the descriptions; a damaged one; a number out of range.
    Privacy:
        The vocabulary is of the private texts: NOT private.
    """
    for name, value in (("words", words), ("length", length), ("limit", 1 if limit is None else limit)):
        require_integer("debian_sections", name, value, 1)
    suites, train, test = _read_index("debian_sections", path)
    sections = {section: index for index, section in enumerate(sorted({package.section for package in train + test}))}
    train = train[:limit]
    counts = Counter(chain.from_iterable(_words(package) for package in train))
    ids = {word: index for index, (word, _) in enumerate(counts.most_common(words), start=1)}

    def part(packages: Sequence[_Package]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.zeros(len(packages), length, dtype=torch.int64)
        for row, package in zip(inputs.numpy(), packages, strict=True):
            known = [ids[word] for word in _words(package) if word in ids][:length]
            row[: len(known)] = known
        labels = torch.tensor([sections[package.section] for package in packages], dtype=torch.int64)
        return inputs, labels

    return split(
        f"Debian package index ({suites}), sections",
        part(train),
        part(test),
        validation,
        num_classes=len(sections),
        frequency_edges=_SECTION_EDGES,
        vocabulary=len(ids) + 1,
    )


def sentence_pairs(
    path: PathLike | None = None,
    *,
    tokenizer: PathLike,
    length: int = 64,
    pairs: int = 60_000,
    seed: int = 0,
    validation: int = 0,
) -> DataSet:
    """Does a synopsis belong to a description (0), to another package of its section (1), or of another section (2)?

    The stand-in for SNLI: three classes of equal size that need both sentences. The premise is the first two sentences
    of a package's description. Each premise comes three times, once with each label, as in SNLI, so that it tells
    nothing alone. Premises are all different; the other package is of another source. Premises and synopses of the
    training part are of other sources than those of the test part, which has a quarter as many pairs. Inputs, int64
    (n, 2, length): token ids, and token type ids; where the id is the tokenizer's pad id, padding. The weighted
    overlap of words alone is right on 69 %, the hypothesis alone on 36 %.

    Args:
        path: as in debian_sections.
        tokenizer: folder of a transformers tokenizer.
        length: tokens of a pair, >= 5; a longer pair is cut, its longer sentence first.
        pairs: training pairs, validation included; a multiple of 12.
        seed: of which other packages are drawn.
        validation: how many of the training pairs, from the end, to hold out. Their synopses may also be other
            packages' hypotheses in training.
    Raises:
        PrivacyError: as in debian_sections; transformers is not installed; no tokenizer; fewer pairs than asked for.
    """
    require_integer("sentence_pairs", "pairs", pairs, 12)
    if pairs % 12:
        remedy = "round it: a premise has three pairs, and the test part is a quarter"
        raise expected("sentence_pairs", "pairs", "to be a multiple of 12", pairs, remedy)
    encode = PairEncoder("sentence_pairs", tokenizer, length)
    suites, *parts = _read_index("sentence_pairs", path)
    rng, seen, counts = random.Random(seed), set[str](), (pairs, pairs // 4)
    found = [_pairs(part, count, seen, rng) for part, count in zip(parts, counts, strict=True)]
    if any(len(part) < count for part, count in zip(found, counts, strict=True)):
        most = min(len(found[0]), 4 * len(found[1])) // 12 * 12
        raise expected("sentence_pairs", "pairs", f"to be at most {most}", pairs, "ask for fewer")
    name = f"Debian package index ({suites}), sentence pairs"
    train, test = map(encode.labelled, found)
    return split(name, train, test, validation, num_classes=3, vocabulary=encode.vocabulary)


def _words(package: _Package) -> list[str]:
    return _WORD.findall(f"{package.synopsis} {package.description}".lower())


def _premise(package: _Package) -> str:
    """The first two sentences of the first paragraph."""
    paragraph = " ".join(_PARAGRAPH.split(package.description)[0].split())
    return " ".join(_SENTENCE.split(paragraph)[:2])


def _pairs(packages: Sequence[_Package], count: int, seen: set[str], rng: random.Random) -> list[tuple[str, str, int]]:
    """Up to `count` (premise, hypothesis, label), three of each premise that is not seen yet."""
    sections: dict[str, list[_Package]] = {}
    for package in packages:
        sections.setdefault(package.section, []).append(package)
    pairs: list[tuple[str, str, int]] = []
    for package in packages:
        if len(pairs) == count:
            break
        premise = _premise(package)
        if premise and premise not in seen:
            near = _other(package, sections[package.section], rng, same_section=True)
            far = _other(package, packages, rng, same_section=False)
            if near and far:
                seen.add(premise)
                pairs += [(premise, other.synopsis, label) for label, other in enumerate((package, near, far))]
    return pairs


def _other(package: _Package, pool: Sequence[_Package], rng: random.Random, *, same_section: bool) -> _Package | None:
    """One of the pool of another source and with another synopsis; None if twenty draws find none."""
    for other in rng.choices(pool, k=20):
        alike = other.source == package.source or other.synopsis == package.synopsis
        if not alike and (other.section == package.section) == same_section:
            return other
    return None


def _read_index(function: str, path: PathLike | None) -> tuple[str, list[_Package], list[_Package]]:
    """The suites, and the packages of the training and the test part, those of a source together, in a fixed order."""
    folder = find_folder(function, path, _LISTS, "*_dists_*_main_*Translation-en*", _REMEDY)
    lists = {kind: _lists(folder, kind) for kind in ("Packages", "Translation-en")}
    descriptions: dict[str, tuple[str, str]] = {}
    for file in lists["Translation-en"]:
        for md5, synopsis, description in _DESCRIPTION.findall(_read_list(function, file)):
            descriptions[md5] = synopsis, description
    packages: dict[str, _Package] = {}
    for file in lists["Packages"]:
        for paragraph in _read_list(function, file).split("\n\n"):
            fields = dict(_FIELD.findall(paragraph))
            text = descriptions.get(fields.get("Description-md5", ""))
            if text and {"Package", "Section"} <= fields.keys():
                name = fields["Package"]
                # Of a package with several versions, the first list's: updates come before their release.
                packages.setdefault(name, _Package(fields.get("Source", name), fields["Section"], *text))
    if not packages:
        raise expected(function, f"the lists in {folder}", "to hold packages with descriptions", "none", _REMEDY)
    keyed = sorted((_digest(package.source), name, package) for name, package in packages.items())
    train, test = (
        [package for digest, _, package in keyed if (digest[0] < 51) == is_test]  # 51 of 256 are a fifth
        for is_test in (False, True)
    )
    suites = sorted({re.sub(r".*_dists_(.*)_main_.*", r"\1", file.name) for file in lists["Packages"]})
    return ", ".join(suites), train, test


def _digest(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest()


def _lists(folder: Path, kind: str) -> list[Path]:
    """The lists of a kind, whatever their compression; not apt's indices of differences."""
    files = folder.glob(f"*_dists_*_main_*{kind}*")
    return sorted(file for file in files if re.search(rf"_{kind}(\.[a-z0-9]+)?$", file.name))


def _read_list(function: str, path: Path) -> str:
    try:
        if path.name.endswith(("Packages", "Translation-en")):
            return path.read_text(encoding="utf-8")
        if path.suffix == ".gz":  # of which apt-helper does not see that an end is missing
            return gzip.decompress(path.read_bytes()).decode()
        command = [_APT_HELPER, "cat-file", str(path)]
        return subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, subprocess.CalledProcessError) as error:
        remedy = f"fetch it again; {_APT_HELPER} unpacks it, or unpack it beforehand"
        raise expected(function, f"{path}", "to be a list of apt's", error, remedy) from error
