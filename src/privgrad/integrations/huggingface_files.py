"""The folder of a PrivateTrainer: its newest checkpoint, and where TensorBoard writes. `huggingface` calls this file.

The privacy guarantee does not rest on it.
"""

import time
from pathlib import Path
from typing import Any, cast

from transformers import Trainer, TrainerState
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from privgrad.errors import expected
from privgrad.ledger import Ledger

STATE = "privgrad.pt"  # the state of the private step, in the folder of a checkpoint


def write_events_in_one_folder(trainer: Trainer) -> None:
    """Let TensorBoard's callback write to a folder in output_dir from its first event on.

    By itself, the callback chooses this folder when training begins. An evaluation before that would make it write all
    events up to the end of training to `runs/` in the working directory.
    """
    for callback in cast("list[Any]", trainer.callback_handler.callbacks):
        if isinstance(callback, TensorBoardCallback) and getattr(callback, "logging_dir", "") is None:
            callback.logging_dir = str(
                Path(cast(str, trainer.args.output_dir)) / "runs" / time.strftime("%b%d_%H-%M-%S")
            )


def last_checkpoint(folder: Path) -> str:
    """Return the path of the newest complete checkpoint."""
    paths = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    for path in sorted(paths, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        try:
            TrainerState.load_from_json(str(path / "trainer_state.json"))
        except (OSError, ValueError, TypeError):
            continue  # the process was killed while it wrote
        if (path / STATE).exists():
            return str(path)
    remedy = "train without resume_from_checkpoint"
    if Ledger(folder / "ledger.jsonl", read_only=True).releases:
        remedy += " in a new folder, and add up both epsilons and both deltas: steps have been released here"
    got = f"{len(paths)} incomplete ones in {folder}" if paths else f"0 in {folder}"
    raise expected("PrivateTrainer", "resume_from_checkpoint", "to find a complete checkpoint", got, remedy)
