"""Extractors on disk: config.json and constants.safetensors, without pickle: loading runs no code from the files."""

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from privgrad.errors import PrivacyError, did_you_mean, expected, readable
from privgrad.features.extractor import EXTRACTORS, FORMAT, Extractor
from privgrad.features.frozen import Frozen

CONFIG, CONSTANTS = "config.json", "constants.safetensors"


def require_place(
    function: str, folder: str | os.PathLike[str], *, overwrite: bool, is_own: Callable[[Path], bool]
) -> Path:
    """Return the path of a folder that may be written: new, empty, or with `overwrite` one that `is_own`."""
    place = Path(folder)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return place
    if (is_saved := place.is_dir() and is_own(place)) and overwrite:
        return place.resolve()  # a link to the folder stays a link
    condition = f"to be new, empty, or as {function} wrote it" if overwrite else "to be new or empty"
    got = f"{place}, which {'holds something else' if overwrite else 'exists'}"
    more = ", or give overwrite=True to replace what is saved there" if is_saved else ""
    raise expected(function, "folder", condition, got, f"choose another one{more}")


@contextmanager
def written_whole(place: Path, *, overwrite: bool) -> Generator[Path]:
    """Yield a new folder for the block to fill, which becomes `place` at the end of the block, unless that raises."""
    # A reader finds the former folder, none for an instant, or the new one, and never a mix. The former folder of a
    # process that is killed in that instant is next to it, under a hidden name.
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


def save_extractor(extractor: Extractor, folder: str | os.PathLike[str]) -> None:
    """Write an extractor into a folder: its config, its digest and its constants.

    The weights of a Frozen network are not written; the digest names them.

    Args:
        extractor: an extractor.
        folder: created if needed. An extractor in it is replaced.
    Raises:
        PrivacyError: the extractor has state that the files would not hold.
    Privacy:
        Constants and config are public, unless a private second moment was released into them, under its own charge.
    """
    constants, digest = extractor.constants(), extractor.digest()
    content = {"format": FORMAT, "digest": digest, "extractor": extractor.config()}
    frozen = {part.name: part for part in extractor.modules() if isinstance(part, Frozen)}
    try:
        made = _filled(_rebuilt(json.loads(json.dumps(content["extractor"])), frozen), constants)
        lost = sorted(set(extractor.attributes()) - set(made.attributes()))
        problem = f"no value of {lost[0]}" if lost else None if made.digest() == digest else f"digest {made.digest()}"
    except (PrivacyError, AttributeError, TypeError) as error:
        problem = str(error)
    if problem:
        remedy = "register its tensors as buffers, name its settings in options, and wrap networks in Frozen"
        raise expected("save_extractor", "the extractor", "to be rebuilt from its files", problem, remedy)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / CONFIG).unlink(missing_ok=True)  # written last: without it, the folder holds no extractor
    whole = {name: value.contiguous().clone() for name, value in constants.items()}
    (place / CONSTANTS).write_bytes(safetensors().save(whole))  # save_file would let only its owner read it
    (place / CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_extractor(folder: str | os.PathLike[str], *, modules: Mapping[str, Extractor] | None = None) -> Extractor:
    """Return the extractor that `save_extractor` wrote.

    Args:
        folder: the folder.
        modules: the Frozen extractors in it, by name, made by the same code as before.
    Raises:
        PrivacyError: the folder holds no extractor, is damaged, has another version or an unknown class, or a network
            has other weights.
    """
    place = Path(folder)
    with readable("load_extractor", f"{place}", "to hold an undamaged extractor", "give the folder of save_extractor"):
        content: dict[str, Any] = json.loads((place / CONFIG).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise expected("load_extractor", f"the format of {place}", f"to be {FORMAT}", content["format"])
        made = _filled(_rebuilt(content["extractor"], modules or {}), safetensors().load_file(place / CONSTANTS))
        if made.digest() != content["digest"]:
            remedy = "give the same networks as before, and load with the version of privgrad that saved"
            condition = f"to be {content['digest']}"
            raise expected("load_extractor", f"the digest of {place}", condition, made.digest(), remedy)
        return made


def _rebuilt(config: Mapping[str, Any], modules: Mapping[str, Extractor]) -> Extractor:
    name, kind = config["options"].get("name"), EXTRACTORS.get(config["class"])
    if name in modules and type(modules[name]).__name__ == config["class"]:
        return modules[name]
    if kind is None:
        remedy = did_you_mean(config["class"], sorted(EXTRACTORS), "import the module that defines it")
        raise expected("load_extractor", "the class", "to be defined", config["class"], remedy)
    if issubclass(kind, Frozen):  # its weights are not saved
        got = {key: type(module).__name__ for key, module in modules.items()}
        remedy = f"make it with the same code as before, and give modules={{{name!r}: Frozen(...)}}"
        raise expected("load_extractor", "modules", f"to hold the {kind.__name__} {name!r}", got, remedy)
    return kind.rebuilt(config, {key: _rebuilt(part, modules) for key, part in config["parts"].items()})


def _filled(extractor: Extractor, constants: Mapping[str, Tensor]) -> Extractor:
    """Register the constants, named by their paths, as buffers; return the extractor."""
    for path, value in constants.items():
        owner, _, name = path.rpartition(".")
        extractor.get_submodule(owner).register_buffer(name, value.clone())
    return extractor


def safetensors() -> Any:
    """Return the module `safetensors.torch`."""
    return importlib.import_module("safetensors.torch")  # not imported above: `import privgrad` stays fast
