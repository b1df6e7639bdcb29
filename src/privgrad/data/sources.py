"""Sources of data files: a folder of the user, a folder that a package or the user filled, or a public address.

The loaders that read files call `find_folder` or `download`, and `debian_index` calls `unpacked`. The privacy guarantee
does not rest on this file.
"""

import gzip
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from privgrad.errors import expected

_LARGEST = 1 << 30  # unpacked bytes, about ten times the largest list of Debian

PathLike = str | os.PathLike[str]
# A TOML file that names a loader is checked against the types of the loader's arguments.
Natural = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


def find_folder(function: str, path: PathLike | None, usual: Path, pattern: str, remedy: str) -> Path:
    """Return the folder of the user, or the usual one, after a check that it holds the files.

    Args:
        function: the name for the error.
        path: the user's folder; None takes the usual one.
        usual: the folder that a package or the user fills.
        pattern: glob that at least one file of the folder matches.
        remedy: for the error: the ways to get the files.
    Raises:
        PrivacyError: no file matches.
    """
    folder = usual if path is None else Path(path)
    if not any(folder.glob(pattern)):
        raise expected(function, "the data folder", f"to contain {pattern}", folder, remedy)
    return folder


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


def download(url: str, target: Path, *, kind: str, digest: Callable[[bytes], str], checksum: str) -> None:
    """Download a file unless it exists; keep it only if its digest equals the checksum.

    Args:
        url: the public address.
        target: the path of the file.
        kind: name of the digest, for the error.
        digest: content -> its digest.
        checksum: the expected digest.
    Raises:
        OSError: the download failed.
        PrivacyError: the digest differs, so the file is not the expected one.
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
