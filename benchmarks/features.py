"""Accuracy of private linear heads on features of Fashion-MNIST that need no pretrained model and no other images.

`python -m benchmarks.features --epsilon 3 --epsilon 1` appends a line to results/features/runs.jsonl for each training.
docs/choosing-evidence.md has the table. No training has a seed: a run is never repeated exactly. Accuracies are
measured on test examples, and are NOT private for these.
"""

import itertools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad import data
from privgrad import features as ft

ROOT = Path(__file__).resolve().parents[1]


def patches_and_hog(public: ft.Public) -> ft.Extractor:
    return ft.join((ft.Whitened(ft.Patches(public), public, keep=2048), 1.0), (ft.Whitened(ft.Hog(), public), 0.5))


def with_scattering(public: ft.Public) -> ft.Extractor:
    return ft.join(
        (ft.Whitened(ft.Patches(public), public, keep=1024), 1.0),
        (ft.Whitened(ft.Hog(), public), 0.5),
        (ft.Whitened(ft.Scattering(), public, keep=1024), 0.7),
    )


EXTRACTORS: dict[str, Callable[[ft.Public], ft.Extractor]] = {
    "patches + hog": patches_and_hog,
    "patches + hog + scattering": with_scattering,
    "hog": lambda public: ft.Whitened(ft.Hog(), public),
}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch
    return F.cross_entropy(model(rows.float()), labels, reduction="none")


def trained(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], epsilon: float, noise_step: float, norm: float
) -> dict[str, Any]:
    """Train a head, and return its record."""
    began, cpu = time.time(), time.process_time()
    rows, labels = train
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=epsilon,
        delta=1e-5,
        max_grad_norm=norm,
        num_examples=len(rows),
        expected_batch_size=8192,
        steps=300,
    )
    head = nn.Linear(rows.shape[1], 10, bias=False)
    nn.init.zeros_(head.weight)
    optimizer = pg.optim.SGD(head.named_parameters(), noise_step=noise_step, momentum=0.9)
    private_grad = pg.PrivateGradient(head, losses, plan)
    pg.fit(private_grad, optimizer, TensorDataset(rows, labels), scheduler="cosine", progress=False)
    with torch.no_grad():
        outputs = torch.cat([head(part.float()) for part in test[0].split(4096)])
    return {
        "accuracy": float((outputs.argmax(1) == test[1]).double().mean()),
        "log_loss": float(F.cross_entropy(outputs, test[1])),
        "max_grad_norm": norm,
        "epsilon": plan.epsilon(),
        "delta": 1e-5,
        "noise_step": noise_step,
        "width": rows.shape[1],
        "rows": len(rows),
        "training_seconds": round(time.time() - began, 1),
        "training_cpu_seconds": round(time.process_time() - cpu, 1),
    }


def main(
    extractor: Annotated[list[str], typer.Option(help=", ".join(EXTRACTORS))] = ["patches + hog"],  # noqa: B006
    epsilon: Annotated[list[float], typer.Option(help="privacy of a training")] = [3.0],  # noqa: B006
    noise_step: Annotated[float, typer.Option(help="at the peak")] = 0.15,
    max_grad_norm: Annotated[list[float], typer.Option(help="C; repeat it for several")] = [0.1],  # noqa: B006
    runs: Annotated[int, typer.Option(help="trainings of each")] = 3,
    held_out: Annotated[int, typer.Option(help="measure on the last training images, for choices")] = 0,
    out: Annotated[Path, typer.Option(help="file of the records")] = ROOT / "results/features/runs.jsonl",
) -> None:
    """Train heads, and append the records."""
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    images = data.fashion_mnist(standardize=False, validation=held_out)
    parts = images.train, images.validation if held_out else images.test
    for name in extractor:
        began, cpu = time.time(), time.process_time()
        made = EXTRACTORS[name](ft.silhouettes(6000))
        fitted = time.process_time() - cpu
        rows = [ft.cache(made, part, dtype=torch.float16, progress=False) for part in parts]
        seconds = {
            "statistics_cpu_seconds": round(fitted, 1),
            "features_cpu_seconds": round(time.process_time() - cpu - fitted, 1),
            "features_seconds": round(time.time() - began, 1),
        }
        train, test = ((part, given.tensors[1]) for part, given in zip(rows, parts, strict=True))
        for budget, norm in itertools.product(epsilon, max_grad_norm):
            for _ in range(runs):
                record = {"extractor": name, "source": made.source, "measured_on": "hold-out" if held_out else "test"}
                record |= trained(train, test, budget, noise_step, norm) | seconds
                record |= {"threads": 1, "machine": f"{platform.processor() or platform.machine()}, 2 shared cores"}
                record |= {"torch": torch.__version__, "seed": None}
                with out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                typer.echo(json.dumps(record))


if __name__ == "__main__":
    typer.run(main)
