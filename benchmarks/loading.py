"""Time to load batches of a data set that waits for each item, with and without worker processes.

`python -m benchmarks.loading` appends to results/bench/loading.jsonl, and docs/performance.md has the table. The
plan has a research seed, so that any number of workers loads the same batches; the digests in the records show it.
"""

import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import Dataset

import privgrad as pg

ROOT = Path(__file__).resolve().parents[1]
WORKERS = (0, 1, 2, 4, 8)


class Waiting(Dataset[tuple[Tensor, int]]):
    """Images of 3 x 32 x 32 random pixels. Each item waits, as for a file on a network disk.

    Args:
        seconds: to wait for each item.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 10


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def measured(plan: pg.PrivacyPlan, data: Waiting, workers: int, *, train: bool) -> dict[str, Any]:
    """Load all batches, and take a private step with each if `train` is set; return the record."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 900, 10))
    private_grad, content = pg.PrivateGradient(model, losses, plan), hashlib.sha256()
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    began, examples = time.perf_counter(), 0
    for batch in plan.batches(data, num_workers=workers):
        content.update(batch.examples[0].numpy().data)
        examples += batch.size
        if train:
            optimizer.step(grad=private_grad(batch))
    seconds = time.perf_counter() - began
    return {"workers": workers, "train": train, "seconds": seconds, "examples": examples, "draws": content.hexdigest()}


def main(
    wait: Annotated[float, typer.Option(help="Seconds to wait for each item.")] = 0.01,
    steps: Annotated[int, typer.Option(help="Batches to load.")] = 40,
    rounds: Annotated[int, typer.Option(help="Repetitions; all numbers of workers take turns.")] = 3,
    out: Annotated[Path, typer.Option(help="The file of records.")] = ROOT / "results/bench/loading.jsonl",
) -> None:
    """Measure every number of workers in turns, and append the records."""
    plan = pg.PrivacyPlan(
        sample_rate=0.032,
        steps=steps,
        expected_batch_size=32,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_examples=1_000,
        seed=1,
    )
    machine = {
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
    }
    for number in range(rounds):
        for workers in WORKERS:
            for train in (False, True):
                found = measured(plan, Waiting(wait), workers, train=train)
                record = {"round": number, "wait": wait, "steps": steps} | found | machine
                with out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                typer.echo(f"{workers} workers, train {train}: {found['seconds']:.2f} s, {found['draws'][:8]}")


if __name__ == "__main__":
    typer.run(main)
