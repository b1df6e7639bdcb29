"""Extractors on disk: config.json and constants.safetensors, without pickle.

Users, `features.cache` and `heads` call these functions. Loading runs no code from the files. The privacy guarantee
rests on the digest: a loaded extractor computes the same features as the saved one, or is refused.
"""

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from privgrad.errors import PrivacyError, did_you_mean, expected, file_problem
from privgrad.features.extractor import EXTRACTORS, FORMAT, Extractor
from privgrad.features.frozen import Frozen
from privgrad.saved_folder import usual_mode

CONFIG, CONSTANTS = "config.json", "constants.safetensors"


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
    with usual_mode(place / CONSTANTS):
        _safetensors().save_file(
            {name: value.contiguous().clone() for name, value in constants.items()}, place / CONSTANTS
        )
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
    for name in (CONFIG, CONSTANTS):
        if problem := file_problem(place / name):
            remedy = "give the folder that save_extractor wrote"
            raise expected("load_extractor", name, "to be readable", f"{place / name}, which {problem}", remedy)
    remedy = "save the extractor again"
    try:
        content: dict[str, Any] = json.loads((place / CONFIG).read_text(encoding="utf-8"))
        version, digest, config = content["format"], str(content["digest"]), content["extractor"]
        constants = cast("dict[str, Tensor]", _safetensors().load_file(place / CONSTANTS))
    except Exception as error:  # safetensors raises errors of its own
        raise expected("load_extractor", str(place), "to hold an undamaged extractor", error, remedy) from error
    if version != FORMAT:
        raise expected("load_extractor", f"the format of {place}", f"to be {FORMAT}", version, remedy)
    try:
        made = _filled(_rebuilt(config, modules or {}), constants)
    except (AttributeError, KeyError, TypeError) as error:
        raise expected("load_extractor", f"the config in {place}", "to be undamaged", error, remedy) from error
    if made.digest() != digest:
        remedy = "give the same networks as before, and load with the version of privgrad that saved"
        raise expected("load_extractor", f"the digest of {place}", f"to be {digest}", made.digest(), remedy)
    return made


def _rebuilt(config: Mapping[str, Any], modules: Mapping[str, Extractor]) -> Extractor:
    """Return the extractor of a config, without constants."""
    name = config["options"].get("name")
    if name in modules and type(modules[name]).__name__ == config["class"]:
        return modules[name]
    if config["class"] not in EXTRACTORS:
        remedy = did_you_mean(config["class"], sorted(EXTRACTORS), "import the module that defines it")
        raise expected("load_extractor", "the class", "to be defined", config["class"], remedy)
    kind, parts = EXTRACTORS[config["class"]], {key: _rebuilt(part, modules) for key, part in config["parts"].items()}
    return kind.rebuilt(config, modules if issubclass(kind, Frozen) else parts)  # a Frozen is among modules, or refused


def _filled(extractor: Extractor, constants: Mapping[str, Tensor]) -> Extractor:
    """Register the constants, named by their paths, as buffers; return the extractor."""
    for path, value in constants.items():
        owner, _, name = path.rpartition(".")
        part = extractor.get_submodule(owner)
        part.register_buffer(name, value.clone())
    return extractor


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")  # not imported above: `import privgrad` stays fast
