"""Where files come from: a folder the user gives, one that a package or the user filled, a public source."""

import gzip
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

from privgrad.errors import expected

_LARGEST = 1 << 30  # bytes unpacked, about ten times the largest list of Debian's

PathLike = str | os.PathLike[str]


def cache(name: str) -> Path:
    """A data set's folder in the user's cache: ${XDG_CACHE_HOME:-~/.cache}/privgrad/<name>."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "privgrad" / name


def find_folder(function: str, path: PathLike | None, usual: Path, pattern: str, remedy: str) -> Path:
    """The folder the user gives, or the usual one, seen to hold the files.

    Args:
        function: named in the error.
        path: the user's; None takes the usual one.
        usual: where a package or the user puts the files.
        pattern: glob that at least one file of the folder matches.
        remedy: for the error: the ways to get the files.
    Raises:
        PrivacyError: no such file.
    """
    folder = usual if path is None else Path(path)
    if not any(folder.glob(pattern)):
        raise expected(function, "the data", "to be found", f"no {pattern} in {folder}", remedy)
    return folder


def unpacked(path: Path) -> bytes:
    """What a gzipped file holds.

    Raises:
        OSError, EOFError, zlib.error: absent, damaged, or more than a GiB.
    """
    with gzip.open(path) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(f"more than {_LARGEST} bytes unpacked")
    return content


def download(url: str, target: Path, *, kind: str, digest: Callable[[bytes], str], checksum: str) -> None:
    """Fetch a file once; it appears under its name only if its digest, of a kind named in errors, is the checksum.

    Raises:
        OSError: it cannot be fetched.
        PrivacyError: it is another file.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = answer.read()
    if (found := digest(content)) != checksum:
        raise expected("data", f"the {kind} of {url}", f"to be {checksum}", found, "do not use this copy")
    partial = target.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(target)
