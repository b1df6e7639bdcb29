"""The file of a checkpoint: in its place whole or not at all, and refused if any byte of it has changed."""

import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import torch

from privgrad.errors import expected, file_problem

_DIGEST = "sha256"  # which processors have instructions for


def write_checkpoint(state: Mapping[str, Any], path: Path) -> None:
    """Put a checkpoint in its place: torch's file, and behind it, unseen by torch.load, a digest.

    torch does not notice changed bytes within a tensor. A process killed at any moment leaves the old file or the new
    one, on disk (fsync).
    """
    unfinished = path.with_suffix(".partial")
    with unfinished.open("w+b") as file:
        torch.save(state, file)
        file.seek(0)
        file.write(hashlib.file_digest(file, _DIGEST).digest())  # which has read to the end
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was written; runs no code.

    Raises:
        Exception: of whatever kind, for a damaged file; see `damage_refused`.
    """
    if problem := file_problem(path):
        raise ValueError(f"{path} {problem}")
    content, length = memoryview(path.read_bytes()), hashlib.new(_DIGEST).digest_size
    if hashlib.new(_DIGEST, content[:-length]).digest() != bytes(content[-length:]):
        raise ValueError("its bytes are not those that were written")
    # weights_only: a checkpoint from elsewhere must not run code.
    return torch.load(BytesIO(content), weights_only=True)


class OtherRunError(ValueError):
    """What a checkpoint has that the run that asks for it has not: whole, but another's."""


class LedgerTooShortError(ValueError):
    """The ledger has charged fewer steps than the checkpoint has taken: the ledger is damaged, not the checkpoint."""


class Record(Protocol):
    """What is asked of the ledger beside a checkpoint."""

    @property
    def releases(self) -> int: ...

    def went_through(self, head: str) -> bool: ...


def require_resumable(
    state: Mapping[str, Any], *, version: int, seed: int | None, settings: Mapping[str, str], ledger: Record
) -> None:
    """Raise ValueError, which says what differs, unless the run that is described can go on from the state.

    Args:
        state: with the keys "version", "seed", "settings", "private_grad" (of PrivateGradient), "ledger" (its head).
        version, seed, settings: of the run that asks.
        ledger: as it is now.
    Privacy:
        A state that its ledger has not charged, or that is beside another ledger, would make steps free.
    """
    if state["version"] != version:
        raise ValueError(f"version {state['version']}")
    if state["seed"] != seed:
        raise OtherRunError(f"seed {state['seed']}, now {seed}")
    if state["settings"] != settings:
        changed = [name for name, value in settings.items() if state["settings"].get(name) != value]
        was = ", ".join(f"{n} {state['settings'].get(n)}, now {settings[n]}" for n in changed)
        raise OtherRunError(was)
    if state["private_grad"]["step"] > ledger.releases:
        raise LedgerTooShortError(f"{state['private_grad']['step']} steps, more than its ledger has charged")
    if not ledger.went_through(state["ledger"]):
        raise ValueError("made beside another ledger, or one that has lost lines since")


@contextmanager
def damage_refused(function: str, what: object) -> Generator[None]:
    """Whatever goes wrong in the block, where a checkpoint is read and taken apart, becomes one PrivacyError.

    `function` and `what`, its path, are named in it.
    """
    try:
        yield
    except OtherRunError as error:
        remedy = "go on with the same, or train in a new folder and add the two epsilons up"
        raise expected(function, f"{what}", "to be of this run", f"one of {error}", remedy) from error
    except LedgerTooShortError as error:
        remedy = (
            "restore the ledger from a copy that has all its lines; without one, count every step of the checkpoint as "
            "spent and train in a new folder"
        )
        raise expected(function, f"{what}", "to have no step that is not in the ledger", f"{error}", remedy) from error
    except Exception as error:  # a damaged file fails in as many ways as there are bytes
        raise expected(
            function,
            f"{what}",
            "to be a complete checkpoint of this run",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "restore this file from a copy, never the ledger, or train in a new folder and add the two epsilons up",
        ) from error
