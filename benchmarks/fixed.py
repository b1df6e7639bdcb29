"""BatchNorm replaced by `privgrad.fix`, and by other norms by hand: `python -m benchmarks.fixed`.

Trains on 12,000 images of Fashion-MNIST at epsilon 3, with the numbers of `privgrad.suggest` for public shapes. Each
training appends a line to results/fixed/runs.jsonl, and is not run again. Trainings with seeds are NOT private.
"""

import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.features import silhouettes
from privgrad_lab.data import fashion_mnist

OUT = Path(__file__).resolve().parents[1] / "results/fixed/runs.jsonl"
ROWS, PUBLIC, SEEDS = 12_000, 256, (0, 1, 2)
Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two convolutions with a skip connection, as in a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs), nn.ReLU()),
            nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)),
        )
        self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.skip(x))


def cnn(norm: Norm) -> nn.Module:
    """Three convolutions, each with a norm, and a linear layer."""
    widths, layers = (1, 16, 32, 32), list[nn.Module]()
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * 32, 10))


def resnet(norm: Norm) -> nn.Module:
    """A stem, three blocks with skip connections, the mean over positions, and a linear layer."""
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1, bias=False), norm(16), nn.ReLU())
    blocks = nn.Sequential(Block(16, 16, 2, norm), Block(16, 32, 2, norm), Block(32, 64, 1, norm))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp(norm: Norm) -> nn.Module:
    """Two hidden layers, each with a norm."""
    hidden = [nn.Linear(784, 128), norm(128), nn.ReLU(), nn.Linear(128, 64), norm(64), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


BATCH = {cnn: nn.BatchNorm2d, resnet: nn.BatchNorm2d, mlp: nn.BatchNorm1d}
METHODS: dict[str, Callable[[Any], nn.Module]] = {
    "fix": lambda make: pg.fix(make(BATCH[make])),
    "GroupNorm(8, C)": lambda make: make(lambda channels: nn.GroupNorm(8, channels)),
    "LayerNorm": lambda make: make(nn.LayerNorm if make is mlp else lambda channels: nn.GroupNorm(1, channels)),
}


def losses(model: nn.Module, batch: Any) -> Tensor:
    """The loss of each image."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def accuracy(model: nn.Module, rows: TensorDataset) -> dict[str, float]:
    """The share of images whose class is found."""
    images, labels = rows.tensors
    with torch.no_grad():
        found = torch.cat([model(some).argmax(1) for some in images.split(2000)])
    return {"accuracy": (found == labels).double().mean().item()}


def train(name: str, method: str, seed: int) -> dict[str, Any]:
    """Train one network, and return the record."""
    began, data = time.process_time(), fashion_mnist(standardize=False)
    images, labels = data.train.tensors
    rows = TensorDataset(images[:ROWS], labels[:ROWS])
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0, delta=1e-5, max_grad_norm=1.0, num_examples=ROWS, batch_size=600, epochs=15, seed=seed
    )
    torch.manual_seed(seed)
    model = METHODS[method]({"cnn": cnn, "resnet": resnet, "mlp": mlp}[name])
    shapes: Any = silhouettes(PUBLIC).rows
    public = (shapes, torch.arange(PUBLIC) % 10)  # shapes have no classes: any will do
    found = pg.suggest(model, plan, public_batch=public, loss_fn=losses)
    private_grad = pg.PrivateGradient(model, losses, found.plan, clip=found.clip)
    score = partial(accuracy, rows=data.test)
    result = pg.fit(
        private_grad,
        found.optimizer(model),
        rows,
        scheduler=found.schedule,
        evaluate=score,
        num_evaluations=1,
        progress=False,
    )
    facts = {"network": name, "method": method, "seed": seed, "noise_step": found.noise_step, "steps": plan.steps}
    made = {"epsilon": result.ledger.epsilon(delta=1e-5), "accuracy": round(result.curve[-1]["accuracy"], 4)}
    return facts | made | {"cpu_seconds": round(time.process_time() - began, 1)}


def main() -> None:
    """Train what is missing, and print a table."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    done = {(one["network"], one["method"], one["seed"]) for one in records}
    for run in ((name, method, seed) for seed in SEEDS for name in ("mlp", "cnn", "resnet") for method in METHODS):
        if run not in done:
            records.append(train(*run))
            with OUT.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
            typer.echo(records[-1])
    for name in ("mlp", "cnn", "resnet"):
        for method in METHODS:
            scores = torch.tensor(
                [one["accuracy"] for one in records if (one["network"], one["method"]) == (name, method)]
            )
            typer.echo(f"{name:8} {method:16} {scores.mean():.2%} +- {scores.std():.2%}, {len(scores)} seeds")


if __name__ == "__main__":
    main()
