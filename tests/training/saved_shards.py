"""Jobs on checkpoints of sharded trainings."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from by_blocks import Moved
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import privgrad as pg
from conftest import loss_fn, make_data, make_plan
from privgrad.processes import Processes
from privgrad.training.run import TrainingRun

DATA, WIDTH = make_data(dtype=torch.float64), 300


def untrained(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3)).double()


def trained(processes: Processes, folder: Path, *, steps: int, width: int = WIDTH, **numbers: Any) -> nn.Module:
    """A training to so many steps, sharded if there are several processes, with tensors in every part of its state."""
    model = untrained(width)
    if processes.count > 1:
        for part in (model[2], model):  # the last layer has fewer rows than four processes
            fully_shard(part, mesh=init_device_mesh("cpu", (processes.count,)))
    parts: dict[str, Any] = {"filter": pg.filters.EMA(0.5), "adaptive_clip": pg.clip.TargetFraction()}
    plan = make_plan(**{"seed": 4, "steps": steps} | numbers)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, processes=processes, **parts)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    pg.fit(private_grad, optimizer, DATA, output_dir=folder, save_seconds=0.0, progress=False)
    return model


def resumed(processes: Processes, folder: Path) -> dict[str, Tensor]:
    """To the step in the folder's file "steps"."""
    model = trained(processes, folder / "run", steps=int((folder / "steps").read_text()))
    return processes.gather_state({name: value.detach().clone() for name, value in model.state_dict().items()})


def saving(processes: Processes, folder: Path) -> list[int]:
    """The largest tensor of a collective in each save. To gather a tensor is an error."""
    save, largest = TrainingRun.save, list[int]()

    def noted(run: TrainingRun, **options: Any) -> None:
        with Moved() as mode, pytest.MonkeyPatch.context() as inner:
            inner.delattr(DTensor, "full_tensor")
            save(run, **options)
        largest.append(max(size for _, size in mode.seen))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "save", noted)
        trained(processes, folder / "saving", steps=2)
    return largest


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def shards_of(run: Path) -> Path:
    (found,) = run.glob("checkpoint-shards-*")
    return found


def swapped(run: Path, other: Path) -> None:
    for file in shards_of(other).glob("*.distcp"):
        shutil.copy(file, shards_of(run) / file.name)


def another(run: Path, other: Path) -> None:
    shutil.rmtree(shards_of(run))
    shutil.copytree(shards_of(other), run / shards_of(other).name)
    shutil.copy(other / "checkpoint.pt", run)


# What is done to a folder of two steps, next to that of another run, before two more steps are tried.
DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a byte": lambda run, other: changed(shards_of(run) / "__1_0.distcp"),
    "a file": lambda run, other: (shards_of(run) / "__0_0.distcp").unlink(),
    "the folder": lambda run, other: shutil.rmtree(shards_of(run)),
    "shards of another run": swapped,
    "a checkpoint of another run": another,
}


def refused(processes: Processes, folder: Path) -> Any:
    """What each process is told of each damage, and the releases that the ledger then holds."""
    run, other = folder / "first", folder / "other"
    trained(processes, run, steps=2, seed=None)
    trained(processes, other, steps=2, seed=None)
    said: dict[str, tuple[str, int]] = {}

    def tried(case: str, to: Path, **options: Any) -> None:
        dist.barrier()
        try:
            trained(processes, to, steps=4, seed=None, **options)
            told = "nothing"
        except (pg.PrivacyError, OSError) as error:
            told = f"{type(error).__name__}: {error}"
        dist.barrier()
        ledger = folder / case / "ledger.jsonl"
        said[case] = told, pg.Ledger(ledger, read_only=True).releases if ledger.exists() else 0

    def copied(case: str) -> Path:
        if processes.rank == 0:
            shutil.copytree(run, folder / case)
            DAMAGE.get(case, lambda run, other: None)(folder / case, other)
        return folder / case

    for case in DAMAGE:
        tried(case, copied(case))
    tried("other shapes", copied("other shapes"), width=WIDTH + 1)
    tried("a folder for each process", folder / "a folder for each process" / f"{processes.rank}")

    real = filesystem.FileSystemWriter.write_data

    def full(self: Any, *arguments: Any) -> Any:
        if processes.rank == 1:
            raise OSError("No space left on device")
        return real(self, *arguments)

    path = copied("a full disk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem.FileSystemWriter, "write_data", full)
        tried("a full disk", path)
    tried("undamaged", copied("undamaged"))
    if processes.rank == 0:
        shutil.copytree(folder / "a full disk", folder / "after a full disk")
    tried("after a full disk", folder / "after a full disk")
    everyone: list[Any] = [None] * processes.count
    dist.all_gather_object(everyone, said)
    return everyone
