"""The Debian package index as text: a stand-in for several data sets, available on every machine with apt."""

import random
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.data.dataset import DataSet, by_user, split
from privgrad.data.schema import Natural, PathLike, Positive
from privgrad.errors import expected, readable, require_choice, require_integer
from privgrad.features import text_rows
from privgrad_lab.data.fetching import located, require_counts, unpacked
from privgrad_lab.data.text import TOKEN_EDGES, ContinuationEncoder, PairEncoder, digest, padded

_APT_HELPER = "/usr/lib/apt/apt-helper"
_REMEDY = "run `privgrad data fetch debian`, or give a folder with the Packages and Translation-en lists"
_SECTION_EDGES = (4000, 1000, 250, 60, 0)
# Facets that nearly every package has; they are left out, so that the task is harder.
_COMMON_FACETS = ("role", "implemented-in")

_FIELD = re.compile(r"^(Package|Source|Section|Description-md5): (\S+)", re.MULTILINE)
_MAINTAINER = re.compile(r"^Maintainer: (.*)$", re.MULTILINE)
_TAGS = re.compile(r"^Tag: (.*\n(?: .*\n)*)", re.MULTILINE)
_TAG = re.compile(r"(?<![\w+-])([\w+-]+)::[^\s,]+")
_DESCRIPTION = re.compile(r"^Description-md5: (\w+)\nDescription-en: (.*)\n((?: .*\n)*)", re.MULTILINE)
_PARAGRAPH = re.compile(r"^ \.$", re.MULTILINE)
_WORD = re.compile(r"[a-z][a-z0-9+.-]*[a-z0-9+]|[a-z]")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class Package:
    """A binary package. Its maintainer, a person, is stored as a hash of the Maintainer field."""

    name: str
    source: str
    maintainer: bytes
    section: str
    synopsis: str
    description: str
    tags: frozenset[str]


_Numbers = Mapping[str, int]  # of words, sections or tags
_Index = tuple[str, list[Package], list[Package]]
_Lists = tuple[tuple[Path, int, int], ...]  # files with their sizes and times of change


def debian_texts(
    path: PathLike | None = None,
    *,
    task: Literal["sections", "tags"],
    length: Positive = 2048,
    limit: Positive | None = None,
    validation: int = 0,
) -> DataSet:
    """Load the tasks of debian_sections and debian_tags with texts in place of words.

    A text is "<synopsis>. <description>". Inputs, int8 (n, length): bytes of the texts, see `features.text_rows`.
    Labels and parts are those of debian_sections or debian_tags. `public_inputs` holds the texts of other packages: for
    tags, those without a tag; for sections, the packages of the training part beyond `limit`, if there is one.

    `path`, `limit` and `validation` are those of debian_sections. The `task` "sections" has one of 58 classes per
    package, "tags" has several of about 550 tags. `length` bytes are kept of a text; 2,048 cut one text in 300.

    Raises: as in debian_sections.
    Privacy:
        The list of tags comes from the training examples: NOT private. The list of sections is Debian's own.
    """
    require_choice("debian_texts", "task", task, ("sections", "tags"))
    require_counts("debian_texts", limit=limit)
    suites, *parts = read_index("debian_texts", path)
    if task == "tags":
        train, test = ([package for package in part if package.tags] for part in parts)
        train, others = train[:limit], [package for package in chain(*parts) if not package.tags]
        names = tag_numbers(train)
        test = [package for package in test if package.tags & names.keys()]
    else:
        train, test = parts
        names = {name: index for index, name in enumerate(sorted({p.section for p in train + test}))}
        train, others = train[:limit], train[len(train[:limit]) :]

    def part(packages: Sequence[Package]) -> tuple[Tensor, Tensor]:
        if task == "tags":
            labels = tag_labels(packages, names)
        else:
            labels = torch.tensor([names[package.section] for package in packages], dtype=torch.int64)
        texts = [f"{p.synopsis}. {' '.join(_PARAGRAPH.sub('', p.description).split())}" for p in packages]
        return text_rows(texts, length), labels

    loaded = split(
        f"Debian package index ({suites}), {task} from texts",
        part(train),
        part(test),
        validation,
        num_classes=len(names),
        score="recall@5" if task == "tags" else "accuracy",
    )
    return replace(loaded, public_inputs=part(others)[0]) if others else loaded


def debian_sections(
    path: PathLike | None = None,
    *,
    words: Positive = 10_000,
    length: Positive = 64,
    limit: Positive | None = None,
    validation: int = 0,
) -> DataSet:
    """Load the task: which section of Debian is a package in? Bags of words of descriptions, 58 classes.

    The stand-in for tagged questions (StackOverflow) and for sparse linear models of text (IMDB). The classes have a
    natural heavy tail of 15 to 6,700 packages. There are about 63,000 packages; the index changes at point releases.
    Packages of one source stay together: siblings have nearly the same description and must not be in both parts. One
    fifth of the sources is the test part.

    Inputs, int64 (n, length): 0 is padding, 1 to `words` are the most frequent words of the training part, by falling
    frequency. A row holds the first `length` known words of a package's synopsis and description, in order. Labels: the
    sections, sorted by name. Without privacy, logistic regression on tf-idf has an accuracy of 74 %; the largest class
    is 10 % of the test part.

    Args:
        path: folder with apt's lists of main, compressed or not; None is /var/lib/apt/lists.
        words: size of the vocabulary without the padding, >= 1.
        length: words kept of a description, >= 1.
        limit: number of training examples to keep; None keeps all.
        validation: number of these, from the end, to hold out.
    Raises:
        PrivacyError: lists or descriptions are absent, a list is damaged, or a number is out of its range.
    Privacy:
        The vocabulary is computed from the private texts: NOT private.
    """
    require_counts("debian_sections", words=words, length=length, limit=limit)
    suites, train, test = read_index("debian_sections", path)
    sections = {section: index for index, section in enumerate(sorted({package.section for package in train + test}))}
    train = train[:limit]
    ids, _ = _vocabulary(train, words)

    def part(packages: Sequence[Package]) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([sections[package.section] for package in packages], dtype=torch.int64)
        return _bags(packages, ids, length), labels

    return split(
        f"Debian package index ({suites}), sections",
        part(train),
        part(test),
        validation,
        num_classes=len(sections),
        frequency_edges=_SECTION_EDGES,
        vocabulary=len(ids) + 1,
    )


def debian_tags(
    path: PathLike | None = None,
    *,
    words: Positive = 10_000,
    length: Positive = 128,
    limit: Positive | None = None,
    other_public: Natural = 0,
    validation: int = 0,
) -> DataSet:
    """Load the task: which tags does a Debian package have? Bags of words of descriptions, with about 560 tags.

    The stand-in for StackOverflow's tags. The examples are the packages with a tag other than role:: and
    implemented-in::, about 22,000; a package has several tags. One fifth of the sources is the test part. The packages
    without such a tag, about 33,000, are public text: the vocabulary and `public_counts` come from them. Inputs as in
    debian_sections. Labels, float32 (n, tags): 1 for each tag of the package. The tags of at least one training example
    count, sorted by name.

    The arguments are those of debian_sections. In addition, `other_public` training examples, of a few maintainers,
    become public instead; the other examples of these maintainers are left out.

    Raises: as in debian_sections.
    Privacy:
        Vocabulary and counts come from the untagged packages only.
    """
    require_counts("debian_tags", words=words, length=length, limit=limit)
    require_integer("debian_tags", "other_public", other_public, 0)
    suites, *parts = read_index("debian_tags", path)
    train, test = ([package for package in part if package.tags] for part in parts)
    # Sorted by the hash of their maintainer, the first packages have few maintainers.
    other = sorted(train, key=lambda package: package.maintainer)[:other_public]
    known = {package.maintainer for package in other}
    train = [package for package in train if package.maintainer not in known][:limit]
    ids, counts = _vocabulary([package for part in parts for package in part if not package.tags], words)
    tags = tag_numbers(train)
    loaded = split(
        f"Debian package index ({suites}), tags",
        _tagged(train, ids, tags, length),
        _tagged(test, ids, tags, length),
        validation,
        num_classes=len(tags),
        vocabulary=len(ids) + 1,
        public_counts=counts,
        counts_provenance="public data",
        score="recall@5",
    )
    return replace(loaded, other_public=TensorDataset(*_tagged(other, ids, tags, length))) if other else loaded


def debian_maintainers(
    path: PathLike | None = None,
    *,
    words: Positive = 10_000,
    length: Positive = 128,
    limit: Positive | None = 400,
    minimum: Positive = 5,
    cap: Positive = 256,
    validation: int = 0,
) -> DataSet:
    """Load the tags of debian_tags by user: a user is a maintainer with their tagged packages, for user-level privacy.

    The stand-in for StackOverflow's users. The training part has the format of by_user: for each user the words of
    their packages, the tags, and the number of packages. The validation part has packages of other users. The test part
    is that of debian_tags, with packages of any maintainer. A person is a hash of the Maintainer field.

    `path`, `words` and `length` are those of debian_sections. `limit` users train, in the order of their hashes; None
    takes all but the `validation` >= 0 users that are held out. Users with fewer than `minimum` >= 1 packages are left
    out, and `cap` >= 1 packages are kept of a user.

    Raises:
        PrivacyError: as in debian_sections; or there are too few users.
    Privacy:
        Vocabulary and counts come from the untagged packages only, also those of the training users. A user's privacy
        covers their tagged packages. The list of tags comes from all users: NOT private.
    """
    require_counts("debian_maintainers", words=words, length=length, limit=limit, minimum=minimum, cap=cap)
    require_integer("debian_maintainers", "validation", validation, 0)
    suites, *parts = read_index("debian_maintainers", path)
    ids, counts = _vocabulary([package for part in parts for package in part if not package.tags], words)
    train, test = ([package for package in part if package.tags] for part in parts)
    sizes = Counter(package.maintainer for package in train)
    people = sorted(person for person, size in sizes.items() if size >= minimum)
    needed = (1 if limit is None else limit) + validation
    if len(people) < needed:
        name, remedy = f"the number of users with at least {minimum} packages", "lower limit, validation or minimum"
        raise expected("debian_maintainers", name, f"to be at least {needed}", len(people), remedy)
    held_out = set(people[len(people) - validation :])
    users = set(people[: len(people) - validation][:limit])
    own, others = ([p for p in train if p.maintainer in group] for group in (users, held_out))
    tags = tag_numbers(train)
    inputs, labels = _tagged(own, ids, tags, length)
    return DataSet(
        name=f"Debian package index ({suites}), tags by maintainer",
        train=by_user((inputs, labels), (package.maintainer for package in own), cap=cap),
        validation=TensorDataset(*_tagged(others, ids, tags, length)),
        test=TensorDataset(*_tagged(test, ids, tags, length)),
        num_classes=len(tags),
        input_shape=tuple(inputs.shape[1:]),
        vocabulary=len(ids) + 1,
        public_counts=counts,
        counts_provenance="public data",
        score="recall@5",
    )


def debian_synopses(
    path: PathLike | None = None,
    *,
    tokenizer: PathLike,
    length: Positive = 64,
    limit: Positive = 42_061,
    validation: int = 0,
) -> DataSet:
    """Load the task: write a package's synopsis, word by word, from its fields.

    The fields read "Package: 0ad | Source: 0ad | Section: games | Tags: ...". The stand-in for E2E (restaurants in
    words), with the same number of training examples. Inputs, int64 (n, length): token ids of the fields and the
    synopsis. Labels, (n, length): the next ids, of the synopsis and its end only. Packages of one source stay together;
    the test part has a quarter as many. Classes are tokens: results are grouped by a token's frequency in the training
    synopses.

    Args:
        path: folder with apt's lists, as in debian_sections.
        tokenizer: folder of a transformers tokenizer of a causal language model.
        length: tokens of an example, >= 5; longer examples lose tokens of the fields first, then of the synopsis.
        limit: number of training examples, validation included.
        validation: number of these, from the end, to hold out.
    Raises:
        PrivacyError: as in debian_sections; transformers is not installed, the tokenizer is absent, or there are too
            few packages.
    """
    require_integer("debian_synopses", "limit", limit, 4)
    encode = ContinuationEncoder("debian_synopses", tokenizer, length)
    suites, *parts = read_index("debian_synopses", path)
    if len(parts[0]) < limit or len(parts[1]) < limit // 4:
        most = min(len(parts[0]), 4 * len(parts[1]))
        raise expected("debian_synopses", "limit", f"to be at most {most}", limit)

    def fields(package: Package) -> str:
        tags = f" | Tags: {', '.join(sorted(package.tags))}" if package.tags else ""
        return f"Package: {package.name} | Source: {package.source} | Section: {package.section}{tags}"

    chosen = (part[:count] for part, count in zip(parts, (limit, limit // 4), strict=True))
    train, test = (encode.labeled([(fields(p), " | Synopsis:", f" {p.synopsis}") for p in part]) for part in chosen)
    return split(
        f"Debian package index ({suites}), fields to synopsis",
        train,
        test,
        validation,
        num_classes=encode.vocabulary,
        frequency_edges=TOKEN_EDGES,
        vocabulary=encode.vocabulary,
    )


def sentence_pairs(
    path: PathLike | None = None,
    *,
    tokenizer: PathLike,
    length: Positive = 64,
    pairs: Positive = 60_000,
    seed: int = 0,
    validation: int = 0,
) -> DataSet:
    """Load the task: is a synopsis that of a description (0), of its section (1), or of another section (2)?

    The stand-in for SNLI: three classes of equal size that need both sentences. With labels 1 and 2 the synopsis is
    that of another package, from the same section or from another one. The premise is the first two sentences of a
    package's description. Each premise comes three times, once with each label, as in SNLI, so the premise alone says
    nothing about the label. All premises are different, and the other package has another source. Premises and synopses
    of the training part come from other sources than those of the test part, which has a quarter as many pairs. Inputs,
    int64 (n, 2, length): token ids, and token type ids; padded with the tokenizer's pad id. The weighted overlap of
    words alone has an accuracy of 69 %, the hypothesis alone 36 %.

    Args:
        path: folder with apt's lists, as in debian_sections.
        tokenizer: folder of a transformers tokenizer.
        length: tokens of a pair, >= 5; a longer pair loses tokens of its longer sentence first.
        pairs: number of training pairs, validation included; a multiple of 12.
        seed: for drawing the other packages.
        validation: number of training pairs, from the end, to hold out. Their synopses may also be hypotheses of other
            packages in training.
    Raises:
        PrivacyError: as in debian_sections; transformers is not installed, the tokenizer is absent, or there are too
            few pairs.
    """
    require_integer("sentence_pairs", "pairs", pairs, 12)
    if pairs % 12:
        remedy = "round it: each premise has three pairs, and the test part is a quarter"
        raise expected("sentence_pairs", "pairs", "to be a multiple of 12", pairs, remedy)
    encode = PairEncoder("sentence_pairs", tokenizer, length)
    suites, *parts = read_index("sentence_pairs", path)
    rng, seen, counts = random.Random(seed), set[str](), (pairs, pairs // 4)
    found = [_pairs(part, count, seen, rng) for part, count in zip(parts, counts, strict=True)]
    if any(len(part) < count for part, count in zip(found, counts, strict=True)):
        most = min(len(found[0]), 4 * len(found[1])) // 12 * 12
        raise expected("sentence_pairs", "pairs", f"to be at most {most}", pairs)
    name = f"Debian package index ({suites}), sentence pairs"
    train, test = map(encode.labeled, found)
    return split(name, train, test, validation, num_classes=3, vocabulary=encode.vocabulary)


def _vocabulary(packages: Sequence[Package], words: int) -> tuple[dict[str, int], Tensor]:
    """Return the ids of the most frequent words from 1 on, and how often each id occurs; id 0 is padding."""
    counted = Counter(chain.from_iterable(_words(package) for package in packages)).most_common(words)
    ids = {word: index for index, (word, _) in enumerate(counted, start=1)}
    return ids, torch.tensor([0, *(count for _, count in counted)])


def _bags(packages: Sequence[Package], ids: _Numbers, length: int) -> Tensor:
    known = ([ids[word] for word in _words(package) if word in ids] for package in packages)
    return padded(known, len(packages), length)


def _tagged(packages: Sequence[Package], ids: _Numbers, tags: _Numbers, length: int) -> tuple[Tensor, Tensor]:
    # By the order, `debian_maintainers` knows which rows are of one person.
    packages = [package for package in packages if package.tags & tags.keys()]
    return _bags(packages, ids, length), tag_labels(packages, tags)


def _words(package: Package) -> list[str]:
    return _WORD.findall(f"{package.synopsis} {package.description}".lower())


def _pairs(packages: Sequence[Package], count: int, seen: set[str], rng: random.Random) -> list[tuple[str, str, int]]:
    sections: dict[str, list[Package]] = {}
    for package in packages:
        sections.setdefault(package.section, []).append(package)
    pairs: list[tuple[str, str, int]] = []
    for package in packages:
        if len(pairs) == count:
            break
        paragraph = " ".join(_PARAGRAPH.split(package.description)[0].split())
        premise = " ".join(_SENTENCE.split(paragraph)[:2])
        if premise and premise not in seen:
            near = _other(package, sections[package.section], rng, same_section=True)
            far = _other(package, packages, rng, same_section=False)
            if near and far:
                seen.add(premise)
                pairs += [(premise, other.synopsis, label) for label, other in enumerate((package, near, far))]
    return pairs


def _other(package: Package, pool: Sequence[Package], rng: random.Random, *, same_section: bool) -> Package | None:
    """Draw a package of the pool with another source and another synopsis; None if twenty draws find none."""
    for other in rng.choices(pool, k=20):
        alike = other.source == package.source or other.synopsis == package.synopsis
        if not alike and (other.section == package.section) == same_section:
            return other
    return None


def read_index(function: str, path: PathLike | None) -> _Index:
    """Return the suites, and the packages of both parts in the order of their sources; do not change the result."""
    folder = located(function, path, "debian")
    return _parsed(folder, _lists(folder, "Packages"), _lists(folder, "Translation-en"))


def tag_numbers(packages: Sequence[Package]) -> dict[str, int]:
    """Return the tags of the packages, numbered in the order of their names."""
    return {tag: index for index, tag in enumerate(sorted(set(chain.from_iterable(p.tags for p in packages))))}


def tag_labels(packages: Sequence[Package], tags: _Numbers) -> Tensor:
    """Return the tags of packages as labels, float32 (n, tags): 1 for each tag of a package that is in `tags`."""
    labels = torch.zeros(len(packages), len(tags))
    for row, package in enumerate(packages):
        labels[row, [tags[tag] for tag in package.tags if tag in tags]] = 1
    return labels


@lru_cache(maxsize=1)  # a process may load several data sets from the same lists
def _parsed(folder: Path, lists: _Lists, translations: _Lists) -> _Index:
    descriptions: dict[str, tuple[str, str]] = {}
    for file, *_ in translations:
        for md5, synopsis, description in _DESCRIPTION.findall(_read_list(file)):
            descriptions[md5] = synopsis, description
    packages: dict[str, Package] = {}
    for file, *_ in lists:
        for paragraph in _read_list(file).split("\n\n"):
            fields = dict(_FIELD.findall(paragraph))
            text = descriptions.get(fields.get("Description-md5", ""))
            if text and {"Package", "Section"} <= fields.keys():
                name, tags = fields["Package"], _TAGS.search(paragraph + "\n")
                person = _MAINTAINER.search(paragraph)
                found = _TAG.finditer(tags[1]) if tags else ()
                kept = frozenset(tag[0] for tag in found if tag[1] not in _COMMON_FACETS)
                # A package with several versions keeps that of the first list: updates come before their release.
                source, maintainer = fields.get("Source", name), digest(person[1] if person else name)
                packages.setdefault(name, Package(name, source, maintainer, fields["Section"], *text, kept))
    if not packages:
        raise expected("data", f"the number of packages with descriptions in {folder}", "to be at least 1", 0, _REMEDY)
    keyed = sorted((digest(package.source), name, package) for name, package in packages.items())
    # 51 of 256 are a fifth.
    train, test = ([package for key, _, package in keyed if (key[0] < 51) == is_test] for is_test in (False, True))
    suites = sorted({re.sub(r".*_dists_(.*)_main_.*", r"\1", file.name) for file, *_ in lists})
    return ", ".join(suites), train, test


def _lists(folder: Path, kind: str) -> _Lists:
    files = sorted(folder.glob(f"*_dists_*_main_*{kind}*"))
    kept = [file for file in files if re.search(rf"_{kind}(\.[a-z0-9]+)?$", file.name)]
    return tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in kept)


def _read_list(path: Path) -> str:
    remedy = f"fetch it again, or unpack it beforehand if {_APT_HELPER} is absent"
    with readable("data", f"{path}", "to be a readable list of apt", remedy):
        if path.name.endswith(("Packages", "Translation-en")):
            return path.read_text(encoding="utf-8")
        if path.suffix == ".gz":  # apt-helper does not notice a truncated .gz file
            return unpacked(path).decode()
        command = [_APT_HELPER, "cat-file", str(path)]
        return subprocess.run(command, capture_output=True, check=True).stdout.decode()
