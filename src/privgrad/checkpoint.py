"""Checkpoint files: written completely or not at all, and refused if any byte has changed or the run is different.

The callers are `training_run` (for `fit`), `integrations.external_loop` and `integrations.huggingface`. The privacy
guarantee rests on `require_resumable`: without it, steps that the ledger has not charged could be used. The other
functions protect a checkpoint against damage and explain a refusal; the guarantee does not rest on them.
"""

import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from privgrad.errors import SUGGESTED, expected, file_problem

_DIGEST = "sha256"  # fast, because processors have instructions for it
# The state of torch's schedulers that changes from step to step.
_MOVING = {"last_epoch", "T_cur", "T_i", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}


def write_checkpoint(state: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint: torch's file, followed by a digest that torch.load ignores.

    The digest is needed because torch does not notice changed bytes within a tensor. The new file replaces the old one
    only when it is complete and on disk (fsync). A process killed at any moment therefore leaves one of the two.

    Only the owner may read the file, because it holds the duration of the training.
    """
    unfinished = path.with_suffix(".partial")
    unfinished.unlink(missing_ok=True)  # of a killed process, with another mode perhaps
    with open(unfinished, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        torch.save(state, file)
        file.seek(0)
        file.write(hashlib.file_digest(file, _DIGEST).digest())  # file_digest has moved to the end of the file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state that `write_checkpoint` wrote. Runs no code from the file.

    Raises:
        Exception: of any class, if the file is damaged. Call this within `damage_refused`.
    """
    if problem := file_problem(path):
        raise ValueError(f"{path} {problem}")
    content, length = memoryview(path.read_bytes()), hashlib.new(_DIGEST).digest_size
    if hashlib.new(_DIGEST, content[:-length]).digest() != bytes(content[-length:]):
        raise ValueError("its bytes are not those that were written")
    # weights_only: a checkpoint from elsewhere must not run code.
    return torch.load(BytesIO(content), weights_only=True)


class OtherRunError(ValueError):
    """An error for an intact checkpoint of a different run. Its message states the differences."""


class LedgerTooShortError(ValueError):
    """An error for a ledger that has charged fewer steps than the checkpoint has taken: the ledger is damaged."""


class Record(Protocol):
    """A protocol: the part of `Ledger` that `require_resumable` uses."""

    @property
    def next_step(self) -> int: ...

    def went_through(self, head: str) -> bool: ...


def require_resumable(
    state: Mapping[str, Any], *, version: int, seed: int | None, settings: Mapping[str, str], ledger: Record
) -> None:
    """Raise ValueError unless the current run can resume from the state. The message states the difference.

    Args:
        state: a mapping with the keys "version", "seed", "settings", "private_grad" (state of PrivateGradient) and
            "ledger" (head of the ledger when the checkpoint was written).
        version: version of the checkpoint format.
        seed: seed of the current run.
        settings: settings of the current run, by name.
        ledger: ledger of the current run.
    Raises:
        OtherRunError: the seed or the settings differ.
        LedgerTooShortError: the ledger has charged fewer steps than the state has taken.
        ValueError: the version differs, or the ledger does not continue the one of the checkpoint.
    Privacy:
        Without these checks, steps of the state could be missing from the ledger and would not be counted in epsilon.
    """
    if state["version"] != version:
        raise ValueError(f"version {state['version']}")
    if state["seed"] != seed:
        raise OtherRunError(f"seed {state['seed']}, now {seed}")
    if state["settings"] != settings:
        before = state["settings"]
        changed = [name for name in {**settings, **before} if before.get(name) != settings.get(name)]
        in_noise = all(one.get("optimizer lr_is_noise_step") == "True" for one in (before, settings))
        names = {"optimizer lr": "optimizer noise_step"} if in_noise else {}
        raise OtherRunError(", ".join(f"{names.get(n, n)} {before.get(n)}, now {settings.get(n)}" for n in changed))
    if state["private_grad"]["step"] > ledger.next_step:
        steps = state["private_grad"]["step"]
        raise LedgerTooShortError(f"{steps} steps, more than its ledger has charged ({ledger.next_step})")
    if not ledger.went_through(state["ledger"]):
        raise ValueError("written with a different ledger, or the ledger has lost lines since")


def settings_of(name: str, part: object | None, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the class and each option of an optimizer or scheduler, for `settings` of `require_resumable`.

    An error then names the one option that differs. `fit` and `integrations.external_loop` call it.

    Args:
        name: "optimizer" or "scheduler".
        part: the object itself.
        options: by name. Values that a scheduler changes from step to step are left out, and so are values that are not
            plain data.
    """
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


@contextmanager
def damage_refused(function: str, what: object) -> Generator[None]:
    """Turn every exception in the block into a PrivacyError. The block reads a checkpoint and restores from it.

    Args:
        function: name of the public function, for the message.
        what: path or description of the checkpoint, for the message.
    Raises:
        PrivacyError: the block raised. The remedy depends on whether the file is damaged, the checkpoint is of a
            different run, or the ledger has lost lines.
    """
    try:
        yield
    except OtherRunError as error:
        remedy = "resume with the same settings, or train in a new folder and add up both epsilons and both deltas"
        if "noise_step" in f"{error}":
            remedy += f"; {SUGGESTED}"
        raise expected(function, f"{what}", "to be of this run", f"a checkpoint with {error}", remedy) from error
    except LedgerTooShortError as error:
        remedy = (
            "restore the ledger from a copy that has all its lines; without a copy, count every step of the checkpoint "
            "as spent and train in a new folder"
        )
        raise expected(function, f"{what}", "to have no step that is not in the ledger", f"{error}", remedy) from error
    except Exception as error:  # a damaged file can raise almost any exception
        raise expected(
            function,
            f"{what}",
            "to be a complete checkpoint of this run",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "restore this file from a copy, never the ledger, or train in a new folder and add up both epsilons and "
            "both deltas",
        ) from error
