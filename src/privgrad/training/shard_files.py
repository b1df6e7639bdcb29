"""Shards of a checkpoint: a folder of torch.distributed.checkpoint, in which each process has a file.

The checkpoint itself holds everything else, and names the folder. It is written after the folder, in one piece. So a
killed process leaves a checkpoint whose folder is complete. Any number of processes can read it, each its own shards.
"""

import hashlib
import io
import secrets
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed import tensor as dtensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from privgrad.errors import expected
from privgrad.processes import Processes

_ALLOWED: Any = [  # in the description of a folder. Nothing else can be read from it, so it cannot run code.
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    cast(Any, metadata)._MEM_FORMAT_ENCODING,
    cast(Any, filesystem)._StorageInfo,
]


class _Reader(filesystem.FileSystemReader):
    """A reader of a folder whose description is in the checkpoint: torch would unpickle the one in the folder."""

    def __init__(self, folder: Path, described: metadata.Metadata) -> None:
        super().__init__(folder)
        self._described = described

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._described


def write(state: Mapping[str, Any], checkpoint: Path, processes: Processes) -> dict[str, Any]:
    """Write the shards in a state to a new folder next to a checkpoint; return the state of that checkpoint.

    In the place of each shard it has a tensor of device "meta", without values. All processes must call it.
    """
    leaves, form = tree_flatten_with_path(dict(state))
    shards = {keystr(place): leaf for place, leaf in leaves if isinstance(leaf, dtensor.DTensor)}
    folder = checkpoint.with_name(processes.broadcast_object(f"{checkpoint.stem}-shards-{secrets.token_hex(4)}"))
    with processes.all_succeed():
        if processes.rank == 0:
            folder.mkdir(mode=0o700)
    with processes.all_succeed():
        if not folder.is_dir():
            remedy = "give a folder on a disk that all machines mount"
            raise expected("fit", "output_dir", "to be the same folder for all processes", checkpoint.parent, remedy)
    described = processes.save_shards(shards, folder)
    described.storage_meta = None  # paths of this machine
    names = sorted({info.relative_path for info in described.storage_data.values()})
    with processes.all_succeed():
        own = _digests(folder, names, processes)
    digests = {name: digest for found in processes.gather_objects(own) for name, digest in found.items()}
    torch.save(described, file := io.BytesIO())
    rest = [torch.empty(x.shape, dtype=x.dtype, device="meta") if keystr(place) in shards else x for place, x in leaves]
    facts = {"folder": folder.name, "digests": digests, "described": file.getvalue()}
    return {**tree_unflatten(rest, form), "shards": facts}


def read(state: Mapping[str, Any], checkpoint: Path, model: nn.Module, processes: Processes) -> dict[str, Any]:
    """Return what `write` was given: shards if the model is sharded now, and else whole tensors."""
    facts: dict[str, Any] = state["shards"]
    folder, digests = checkpoint.with_name(facts["folder"]), cast("dict[str, str]", facts["digests"])
    for name, digest in _digests(folder, sorted(digests), processes).items():
        if digest != digests[name]:
            raise ValueError(f"the bytes of {folder.name}/{name} are not those that were written")
    with torch.serialization.safe_globals(_ALLOWED):
        described = torch.load(io.BytesIO(facts["described"]), weights_only=True)
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, dtensor.DTensor)), None)

    def room(like: Tensor) -> Tensor:
        if mesh is None:
            return torch.empty(like.shape, dtype=like.dtype)
        return dtensor.empty(like.shape, dtype=like.dtype, device_mesh=mesh, placements=[dtensor.Shard(0)])

    leaves, form = tree_flatten_with_path({name: value for name, value in state.items() if name != "shards"})
    found = {keystr(place): room(x) for place, x in leaves if isinstance(x, Tensor) and x.is_meta}
    with warnings.catch_warnings(action="ignore"):  # it warns that it asks no other process, which is meant
        cast(Any, dcp).load(found, storage_reader=_Reader(folder, described), no_dist=True)
    return cast("dict[str, Any]", tree_unflatten([found.get(keystr(place), x) for place, x in leaves], form))


def _digests(folder: Path, names: Iterable[str], processes: Processes) -> dict[str, str]:
    """Return the digests of this process' part of the files."""
    found = dict[str, str]()
    for name in list(names)[processes.rank :: processes.count]:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
