"""Checkpoint files: written completely or not at all, and refused if any byte has changed or the run is different."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch

from privgrad.errors import SUGGESTED, expected, readable
from privgrad.ledger.ledger import Ledger

NEW_FOLDER = "train in a new folder and add up both epsilons and both deltas"  # a remedy
_DIGEST = "sha256"  # fast, because processors have instructions for it
# The state of torch's schedulers that changes from step to step.
_MOVING = {"last_epoch", "T_cur", "T_i", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}


def write_checkpoint(state: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint, the old file or the new one if killed: torch's, with a digest that torch.load ignores."""
    unfinished = path.with_suffix(".partial")
    unfinished.unlink(missing_ok=True)  # of a killed process, with another mode perhaps
    # Only the owner may read the file, because it holds the duration of the training.
    with open(unfinished, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        torch.save(state, file)
        file.seek(0)
        # torch does not notice changed bytes within a tensor. file_digest has moved to the end of the file.
        file.write(hashlib.file_digest(file, _DIGEST).digest())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state that `write_checkpoint` wrote. Call it in `damage_refused`: a damaged file raises anything."""
    content, length = memoryview(path.read_bytes()), hashlib.new(_DIGEST).digest_size
    if hashlib.new(_DIGEST, content[:-length]).digest() != bytes(content[-length:]):
        raise ValueError("its bytes are not those that were written")
    # weights_only: a checkpoint from elsewhere must not run code.
    return torch.load(BytesIO(content), weights_only=True)


def is_plain(path: Path) -> bool:
    """Return whether torch.save alone wrote a file, as in a loop of your own: its last bytes end an archive."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 22))
        return file.read().startswith(b"PK\5\6")


def damage_refused(function: str, what: object) -> AbstractContextManager[None]:
    """Return a context that reads and restores the checkpoint `what`: its exceptions become PrivacyErrors."""
    remedy = f"restore this file from a copy, never the ledger, or {NEW_FOLDER}"
    return readable(function, f"{what}", "to be a complete checkpoint of this run", remedy)


def require_resumable(
    function: str,
    what: object,
    state: Mapping[str, Any],
    *,
    version: int,
    seed: int | None,
    settings: Mapping[str, str],
    ledger: Ledger,
) -> None:
    """Raise an error, which states the difference, unless the run with these arguments can resume from the state."""
    if state["version"] != version:
        raise ValueError(f"version {state['version']}")
    both = [{"seed": state["seed"], **state["settings"]}, {"seed": seed, **settings}]
    if all(one.get("optimizer lr_is_noise_step") == "True" for one in both):  # the option that the user gave
        both = [{**one, "optimizer noise_step": one.get("optimizer lr"), "optimizer lr": ""} for one in both]
    require_same(function, what, *both)
    # Steps of the state that are missing from the ledger would not be counted in epsilon.
    if not ledger.went_through(state["ledger"]):
        steps = f"{state['private_grad']['step']} steps, not those of its ledger of {ledger.releases} releases"
        told = f"{steps}, which is of a different run or has lost lines"
        remedy = "restore the whole ledger; else train on from its weights in a new folder, at the cost of both"
        raise expected(function, f"{what}", "to have no step that is not in the ledger", told, remedy)


def require_same(function: str, what: object, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise PrivacyError, which tells the first differences, unless both have the same names and values."""
    if changed := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
        told = few([f"{name} {before.get(name)}, now {now.get(name)}" for name in changed])
        remedy = f"resume with the same settings, or {NEW_FOLDER}" + (f"; {SUGGESTED}" if "noise_step" in told else "")
        raise expected(function, f"{what}", "to be of this run", f"a checkpoint with {told}", remedy)


def few(texts: Sequence[str]) -> str:
    """Return the first texts of a list, for an error."""
    return f"{', '.join(texts[:3])}{', ...' if texts[3:] else ''}"


def settings_of(name: str, part: object | None, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the class and each option of an optimizer or scheduler, so that an error names the one that differs."""
    found = {f"{name} {key}": repr(value) for key, value in _plain(options).items()}
    return {name: "None" if part is None else type(part).__name__} | found


def _plain(value: Any) -> Any:
    """Return a value without what a scheduler changes; the name of its class if it is not plain data."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast("Mapping[Any, Any]", value).items() if key not in _MOVING}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast("list[Any]", value)]
    return type(value).__name__
