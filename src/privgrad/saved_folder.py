"""Folders of saved models: written as a whole or not at all, replaced only on request, readable as other files are.

`deployment`, `heads.head` and `features.saving` call it. The privacy guarantee does not rest on this file.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from privgrad.errors import described, expected, require_path


def require_place(
    function: str, folder: str | os.PathLike[str], *, overwrite: bool, is_own: Callable[[Path], bool]
) -> Path:
    """Return the path of a folder that may be written; raise PrivacyError for one whose files would be lost.

    Args:
        function: the public function that will write it.
        folder: its path.
        overwrite: whether a folder that this function wrote may be replaced.
        is_own: returns whether a folder holds what the function wrote, and nothing else.
    """
    require_path(function, "folder", folder, "give the path of a new folder")
    if not isinstance(overwrite, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise expected(function, "overwrite", "to be True or False", described(overwrite), "leave it out for a new one")
    place = Path(folder)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return place
    if place.is_dir() and is_own(place):
        if overwrite:
            return place.resolve()  # a link to the folder stays a link
        remedy = "choose another one, or give overwrite=True to replace what is saved there"
        raise expected(function, "folder", "to be new or empty", f"{place}, which exists", remedy)
    condition, got = "to be new or empty", f"{place}, which exists"
    if overwrite:
        condition, got = f"to be new, empty, or as {function} wrote it", f"{place}, which holds something else"
    raise expected(function, "folder", condition, got, "choose another one")


@contextmanager
def written_whole(place: Path, *, overwrite: bool) -> Generator[Path]:
    """Yield a new folder for the block to fill, which becomes `place` at the end of the block.

    If the block raises, `place` stays as it was. A reader finds the former folder, none for an instant, or the new one,
    and never a mix. The former folder of a process that is killed in that instant is next to it, under a hidden name.

    Args:
        place: as `require_place` returned it.
        overwrite: whether a folder with files is replaced. Otherwise such a folder is an error of the system.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as scratch:
        made, former = Path(scratch) / "made", Path(scratch) / "former"
        made.mkdir()
        yield made
        if overwrite and place.exists():
            place.rename(former)
        try:
            made.replace(place)
        except BaseException:
            if former.exists():
                former.rename(place)
            raise


@contextmanager
def usual_mode(path: Path) -> Generator[None]:
    """Give the file that the block writes the mode that the umask gives to new files.

    safetensors writes to a temporary file, which only its owner may read, and renames it.
    """
    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)
