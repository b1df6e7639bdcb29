"""Private convolutional networks by `privgrad.suggest`, and at multiples of its noise step and clipping norm.

`python -m benchmarks.convolutions --task shapes --factor 1` appends a line to results/defaults/convolutions.jsonl for
each training that the file does not hold yet. A hash of a task's data decides whether it chose the rule or judged it.
Public batches are silhouettes, as in docs/migration.md. benchmarks/images.py says where the images come from; the other
data are drawn. Accuracies are on test rows. Trainings with seeds are NOT private.
"""

import hashlib
import itertools
import json
import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks import images, untuned
from benchmarks.accuracy.run import read
from benchmarks.accuracy.with_privgrad import convolutional
from benchmarks.untuned import DELTA, losses
from privgrad.features import silhouettes

OUT = Path(__file__).resolve().parents[1] / "results/defaults/convolutions.jsonl"
FORMER = OUT.with_name("convolutions-former.jsonl")  # the choosing half, by the rule that suggest had before
PUBLIC, TEST = 256, 2000
FACTORS = (0.5, 1.0, 2.0, 4.0)


class Task(NamedTuple):
    """A data set, a network and a plan at epsilon 3."""

    data: str
    network: str
    rows: int  # for training, at most
    batch: int
    steps: int
    epsilon: float = 3.0


TASKS = {
    "shapes": Task("shapes", "page", 6000, 250, 240),
    "digits": Task("digits", "page", 1437, 120, 240),
    "mnist": Task("mnist", "opacus", 4000, 400, 150),
    "clothing": Task("clothing", "strided", 4000, 400, 200),
    "animals": Task("animals", "plain3", 8000, 250, 300),
    "letters": Task("letters", "page", 8000, 400, 200),
    "textures": Task("textures", "plain2", 3000, 200, 400),
    "waves": Task("waves", "waves", 4000, 400, 100),
    "shapes, plain": Task("shapes", "plain3", 6000, 300, 200),
    "digits, plain": Task("digits", "plain2", 1437, 150, 300),
    "mnist, norms": Task("mnist", "strided", 4000, 200, 400),
    "clothing, plain": Task("clothing", "plain2", 4000, 250, 150),
    "mnist, hidden": Task("mnist", "hidden", 4000, 200, 150),
    "animals, norms": Task("animals", "strided", 8000, 400, 150),
    "letters, plain": Task("letters", "plain2", 8000, 400, 300),
    "textures, norms": Task("textures", "page", 3000, 200, 150),
    "shapes, 20 epochs": Task("shapes", "page", 6000, 120, 1000),
    "letters, 20 epochs": Task("letters", "page", 6000, 120, 1000),
}


def is_judge(name: str) -> bool:
    """Whether a hash of the data's name puts the task into the half that judges the rule."""
    order = sorted({task.data for task in TASKS.values()}, key=lambda data: hashlib.sha256(data.encode()).digest())
    return order.index(TASKS[name].data) >= len(order) // 2


def drawn(name: str, rows: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic rows with noise, and their labels."""
    draw, uniform = generator.normal, generator.uniform
    if name == "waves":  # 64 numbers: sine, square, sawtooth, chirp
        t, labels = np.linspace(0, 1, 64), generator.integers(4, size=rows)
        phase = uniform(2, 6, (rows, 1)) * t + uniform(0, 1, (rows, 1))
        kinds = [np.sin(2 * np.pi * phase), np.sign(np.sin(2 * np.pi * phase)), 2 * (phase % 1) - 1]
        kinds.append(np.sin(2 * np.pi * phase * (0.3 + t)))
        made = np.stack(kinds)[labels, np.arange(rows)]
        return (made * uniform(0.5, 1.5, (rows, 1)) + draw(0, 0.7, made.shape))[:, None], labels
    if name == "textures":  # 16 x 16 pixels in three colors: noise that is smooth along one of two diagonals
        labels, noise = generator.integers(2, size=rows), draw(0, 1, (rows, 3, 20, 20))
        along = np.stack([sum(np.roll(noise, (by, way * by), (2, 3)) for by in range(3)) for way in (1, -1)])
        made = along[labels, np.arange(rows)][..., 2:18, 2:18] / math.sqrt(3) + draw(0, 1, (rows, 3, 16, 16))
        return 0.5 + 0.15 * made * uniform(0.5, 1.5, (rows, 3, 1, 1)), labels
    if name == "shapes":  # 16 x 16 pixels: disk, square, triangle, cross, ring
        labels, (y, x) = generator.integers(5, size=rows), np.mgrid[:16, :16]
        x, y = x - uniform(5, 10, (rows, 1, 1)), y - uniform(5, 10, (rows, 1, 1))
        size, far = uniform(2.5, 5, (rows, 1, 1)), np.hypot(x, y)
        kinds = [far < size, np.maximum(abs(x), abs(y)) < size * 0.9, (abs(y) < size) & (2 * abs(x) < y + size)]
        kinds += [(np.minimum(abs(x), abs(y)) < size / 3) & (far < size), abs(far - size * 0.8) < size / 4]
        made = np.stack(kinds)[labels, np.arange(rows)] * uniform(0.4, 1, (rows, 1, 1))
        return (made + draw(0, 0.25, made.shape)).clip(0, 1)[:, None], labels
    from PIL import Image, ImageDraw, ImageFont

    labels, font, pictures = generator.integers(26, size=rows), ImageFont.load_default(24), list[Any]()
    for label in labels:  # 16 x 16 pixels
        picture = Image.new("L", (32, 32))
        ImageDraw.Draw(picture).text((16, 16), chr(65 + label), 255, font, "mm")
        turned = picture.rotate(uniform(-20, 20), Image.Resampling.BILINEAR, translate=tuple(uniform(-4, 4, 2)))
        pictures.append(np.asarray(turned.resize((16, 16), Image.Resampling.BOX), np.float32) / 255)
    return (np.stack(pictures) + draw(0, 0.15, (rows, 16, 16))).clip(0, 1)[:, None], labels


def load(task: Task) -> dict[str, tuple[Tensor, Tensor]]:
    """Return rows and labels for training and testing."""
    if task.data in ("digits", "mnist", "clothing", "animals"):
        rows, labels = images.raw(task.data)
        names = [row.numpy().tobytes() for row in rows]
        parts = untuned.split(names, 2 * task.rows if len(rows) > 2 * task.rows else None)
        if task.data == "animals":
            rows = F.avg_pool2d(rows.float(), 2)
    else:
        made = drawn(task.data, task.rows + TEST, np.random.default_rng(0))
        rows, labels = torch.from_numpy(made[0]).float(), torch.from_numpy(made[1])
        parts = {"train": torch.arange(task.rows), "test": torch.arange(task.rows, task.rows + TEST)}
    most = {"train": task.rows, "test": TEST}
    return {part: (rows[at[: most[part]]], labels[at[: most[part]]]) for part, at in parts.items()}


def network(kind: str, rows: Tensor, classes: int) -> nn.Module:
    """Return a network with random weights, after `pg.fix` if it has BatchNorm."""
    if kind == "opacus":
        return convolutional()
    channels = rows.shape[1]
    if kind == "waves":
        made = nn.Sequential(
            *(nn.Conv1d(channels, 16, 5, 2), nn.BatchNorm1d(16), nn.ReLU()),
            *(nn.Conv1d(16, 32, 5, 2), nn.BatchNorm1d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(classes)),
        )
    elif kind == "page":  # docs/migration.md
        made = nn.Sequential(
            *(nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.LazyLinear(classes)),
        )
    elif kind in ("strided", "hidden"):
        layers = list[nn.Module]()
        for inputs, outputs in itertools.pairwise((channels, 16, 32, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        units = 64 if kind == "hidden" else classes
        layers += [nn.Flatten(), nn.LazyLinear(units)]
        made = nn.Sequential(*layers, *((nn.ReLU(), nn.Linear(units, classes)) if kind == "hidden" else ()))
    else:  # without norms
        layers = list[nn.Module]()
        for inputs, outputs in itertools.pairwise((channels, 16, 32, 32)[: 1 + int(kind[-1])]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        made = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, classes))
    made(rows[:1].expand(2, *rows.shape[1:]))
    return pg.fix(made) if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in made) else made  # pyright: ignore


def public_batch(rows: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return silhouettes, or rows of them as signals, with any labels."""
    shapes: Any = silhouettes(PUBLIC, rows.shape[-1], channels=3 if rows.shape[1] == 3 else 1).rows
    return (shapes if rows.ndim == 4 else shapes[:, :, rows.shape[-1] // 2]).float(), torch.arange(PUBLIC) % classes


def record(name: str, data: dict[str, tuple[Tensor, Tensor]], factor: float, clip: float, seed: int) -> dict[str, Any]:
    """Train, and return the record."""
    task, (rows, labels) = TASKS[name], data["train"]
    began, classes = time.process_time(), int(labels.max()) + 1
    torch.manual_seed(seed)
    model = network(task.network, rows, classes)
    numbers: dict[str, Any] = {"target_epsilon": task.epsilon, "delta": DELTA, "num_examples": len(rows), "seed": seed}
    numbers |= {"expected_batch_size": task.batch, "steps": task.steps}
    plan = pg.PrivacyPlan.for_budget(max_grad_norm=1.0, **numbers)
    found = pg.suggest(model, plan, public_batch=public_batch(rows, classes), loss_fn=losses)
    plan = replace(found.plan, max_grad_norm=found.plan.max_grad_norm * clip)
    step = found.noise_step * factor
    private_grad = pg.PrivateGradient(model, losses, plan, clip=found.clip)
    optimizer = pg.optim.SGD(model.named_parameters(), noise_step=step, momentum=found.momentum)
    pg.fit(private_grad, optimizer, TensorDataset(rows, labels), scheduler=found.schedule, progress=False)
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in data["test"][0].split(500)])
    return {
        "task": name,
        "half": "judged" if is_judge(name) else "chosen",
        "factor": factor,
        "clip": clip,
        "seed": seed,
        "noise_step": step,
        "C": plan.max_grad_norm,
        "accuracy": round((outputs.argmax(1) == data["test"][1]).double().mean().item(), 4),
        "log_loss": round(F.cross_entropy(outputs, data["test"][1]).item(), 4),
        "sigma_over_B": plan.noise_multiplier / plan.expected_batch_size,
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "why": found.reasons[0],
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def table(out: Path = OUT) -> str:
    """Rows of docs/choosing-evidence.md: the accuracy at multiples of the suggested noise step, for the first seed."""
    held, lines = [one for one in read(out) if (one["clip"], one["seed"]) == (1.0, 0)], list[str]()
    for name in sorted({one["task"] for one in held}, key=list(TASKS).index):
        own = {one["factor"]: one for one in held if one["task"] == name}
        scores = [f"{own[f]['accuracy']:.3f}".removeprefix("0") if f in own else "–" for f in FACTORS]
        lines.append(f"| {name} | {own[1.0]['noise_step']:.2g} | {' | '.join(scores)} |")
    return "\n".join(lines)


def main(
    task: Annotated[list[str] | None, typer.Option(help=f"{', '.join(TASKS)}; default: all")] = None,
    factor: Annotated[list[float], typer.Option(help="multiple of the suggested noise step")] = [1.0],  # noqa: B006
    clip: Annotated[list[float], typer.Option(help="multiple of the suggested clipping norm")] = [1.0],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="research seed")] = [0],  # noqa: B006
    out: Annotated[Path, typer.Option(help="file of the records")] = OUT,
) -> None:
    """Train what is missing, and append the records."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    for name in task or TASKS:
        done = [tuple(one[key] for key in ("task", "factor", "clip", "seed")) for one in read(out)]
        missing = [one for one in itertools.product(factor, clip, seed) if (name, *one) not in done]
        data = load(TASKS[name]) if missing else {}
        for one in missing:
            made = json.dumps(record(name, data, *one))
            with out.open("a") as file:
                file.write(made + "\n")
            typer.echo(made)


if __name__ == "__main__":
    typer.run(main)
