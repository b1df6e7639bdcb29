"""Read the Debian package index from apt's lists.

`debian` and `debian_texts` call it. The privacy guarantee for users of `debian_maintainers` rests on `_parsed`, which
gives each package the hash of its maintainer. It does not rest on the rest of this file.
"""

import hashlib
import re
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from privgrad.data.fetching import located
from privgrad.data.sources import PathLike, unpacked
from privgrad.errors import expected

_APT_HELPER = "/usr/lib/apt/apt-helper"
_REMEDY = "run `privgrad data fetch debian`, or give a folder with the Packages and Translation-en lists"

# Facets that nearly every package has; they are left out, so that the task is harder.
_COMMON_FACETS = ("role", "implemented-in")

_FIELD = re.compile(r"^(Package|Source|Section|Description-md5): (\S+)", re.MULTILINE)
_MAINTAINER = re.compile(r"^Maintainer: (.*)$", re.MULTILINE)
_TAGS = re.compile(r"^Tag: (.*\n(?: .*\n)*)", re.MULTILINE)
_TAG = re.compile(r"(?<![\w+-])([\w+-]+)::[^\s,]+")
_DESCRIPTION = re.compile(r"^Description-md5: (\w+)\nDescription-en: (.*)\n((?: .*\n)*)", re.MULTILINE)


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


_Index = tuple[str, list[Package], list[Package]]
# The last lists that were read, by folder, sizes and times of change: a process may load several data sets from them.
_KEPT: dict[tuple[Path, tuple[tuple[int, int], ...]], _Index] = {}


def read_index(function: str, path: PathLike | None) -> _Index:
    """Return the suites, and the packages of the training part and of the test part, in a fixed order.

    Packages of one source are in the same part and next to each other.
    """
    folder = located(function, path, "debian")
    lists = [file for kind in ("Packages", "Translation-en") for file in _lists(folder, kind)]
    stats = [file.stat() for file in lists]
    version = folder, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
    if version not in _KEPT:
        parsed = _parsed(function, folder)
        _KEPT.clear()
        _KEPT[version] = parsed
    return _KEPT[version]


def tag_numbers(packages: Sequence[Package]) -> dict[str, int]:
    """Return the tags of the packages, numbered in the order of their names."""
    return {tag: index for index, tag in enumerate(sorted(set(chain.from_iterable(p.tags for p in packages))))}


def tag_labels(packages: Sequence[Package], tags: Mapping[str, int]) -> Tensor:
    """Return the tags of packages as labels, float32 (n, tags): 1 for each tag of a package that is in `tags`."""
    labels = torch.zeros(len(packages), len(tags))
    for row, package in enumerate(packages):
        labels[row, [tags[tag] for tag in package.tags if tag in tags]] = 1
    return labels


def _parsed(function: str, folder: Path) -> _Index:
    """Return the result of read_index. It is kept, so callers must not change it."""
    lists = {kind: _lists(folder, kind) for kind in ("Packages", "Translation-en")}
    descriptions: dict[str, tuple[str, str]] = {}
    for file in lists["Translation-en"]:
        for md5, synopsis, description in _DESCRIPTION.findall(_read_list(function, file)):
            descriptions[md5] = synopsis, description
    packages: dict[str, Package] = {}
    for file in lists["Packages"]:
        for paragraph in _read_list(function, file).split("\n\n"):
            fields = dict(_FIELD.findall(paragraph))
            text = descriptions.get(fields.get("Description-md5", ""))
            if text and {"Package", "Section"} <= fields.keys():
                name, tags = fields["Package"], _TAGS.search(paragraph + "\n")
                person = _MAINTAINER.search(paragraph)
                found = _TAG.finditer(tags[1]) if tags else ()
                kept = frozenset(tag[0] for tag in found if tag[1] not in _COMMON_FACETS)
                # A package with several versions keeps that of the first list: updates come before their release.
                source, maintainer = fields.get("Source", name), _digest(person[1] if person else name)
                packages.setdefault(name, Package(name, source, maintainer, fields["Section"], *text, kept))
    if not packages:
        name = f"the number of packages with descriptions in {folder}"
        raise expected(function, name, "to be at least 1", 0, _REMEDY)
    keyed = sorted((_digest(package.source), name, package) for name, package in packages.items())
    train, test = (
        [package for digest, _, package in keyed if (digest[0] < 51) == is_test]  # 51 of 256 are a fifth
        for is_test in (False, True)
    )
    suites = sorted({re.sub(r".*_dists_(.*)_main_.*", r"\1", file.name) for file in lists["Packages"]})
    return ", ".join(suites), train, test


def _digest(text: str) -> bytes:
    """Return the SHA-256 of a text: a person's name is not stored, and the order of sources is fixed."""
    return hashlib.sha256(text.encode()).digest()


def _lists(folder: Path, kind: str) -> list[Path]:
    """Return the lists of a kind in any compression, without apt's indices of differences."""
    files = folder.glob(f"*_dists_*_main_*{kind}*")
    return sorted(file for file in files if re.search(rf"_{kind}(\.[a-z0-9]+)?$", file.name))


def _read_list(function: str, path: Path) -> str:
    """Return the text of a list in any compression; raise PrivacyError if it cannot be read."""
    try:
        if path.name.endswith(("Packages", "Translation-en")):
            return path.read_text(encoding="utf-8")
        if path.suffix == ".gz":  # apt-helper does not notice a truncated .gz file
            return unpacked(path).decode()
        command = [_APT_HELPER, "cat-file", str(path)]
        return subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, subprocess.CalledProcessError) as error:
        remedy = f"fetch it again, or unpack it beforehand if {_APT_HELPER} is absent"
        raise expected(function, f"{path}", "to be a readable list of apt", error, remedy) from error
