"""privgrad on a task: `python -m benchmarks.accuracy.with_privgrad FOLDER VARIANT SEED`.

"recipe" is the head of our recipe on its features.
"example" has none of our features, and nothing was chosen for the task. Tables and texts: `fit_head` with its defaults
on the same rows as the linear models of the other libraries (a constant rate for texts, as docs/recipes.md says).
Images: the network of Opacus' example by `privgrad.suggest`, with silhouettes as the public batch, and the batch size
and the steps of examples/recipes/clothing_network.toml.
A research seed makes the noise predictable: these trainings are not private.
"""

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks.accuracy.task import Result, Task, main
from privgrad import features as ft
from privgrad.heads.fitting import LARGEST_BATCH, MAX_GRAD_NORM, STEPS
from privgrad.training.defaults import head_noise_step

PACKAGES = ("privgrad", "torch")
NETWORK = {"expected_batch_size": 2048, "steps": 800}
PUBLIC = 256


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, targets = batch
    return F.cross_entropy(model(images), targets, reduction="none")


def network(task: Task, seed: int) -> Result:
    """The network of Opacus' example on pixels, with the settings that `suggest` finds without private data."""
    torch.manual_seed(seed)
    model = convolutional()
    train, test = (torch.from_numpy(task.part("pixels", part))[:, None] / 255 for part in ("train", "test"))
    numbers: dict[str, Any] = NETWORK | {"expected_batch_size": min(NETWORK["expected_batch_size"], len(train))}
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=task.epsilon,
        delta=task.delta,
        max_grad_norm=1.0,  # `suggest` replaces it
        num_examples=len(train),
        seed=seed,
        **numbers,
    )
    public = ft.silhouettes(PUBLIC).rows
    assert isinstance(public, Tensor)
    labels = torch.eye(task.outputs)[torch.arange(PUBLIC) % task.outputs]  # silhouettes have no classes: any will do
    found = pg.suggest(model, plan, public_batch=(public.float(), labels), loss_fn=losses)
    private_grad = pg.PrivateGradient(model, losses, found.plan, clip=found.clip)
    data = TensorDataset(train, torch.from_numpy(task.targets("train")))
    pg.fit(private_grad, found.optimizer(model), data, scheduler=found.schedule, progress=False)
    with torch.no_grad():
        outputs = torch.cat([model(images) for images in test.split(1024)])
    settings = numbers | {"clip": found.plan.max_grad_norm, "noise_step": found.noise_step}
    return facts(found.plan, outputs, settings | {"schedule": found.schedule.decay, "momentum": found.momentum})


def convolutional() -> nn.Sequential:
    """The network of Opacus' examples/mnist.py, as with_opacus has it."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()),
        *(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def head(task: Task, variant: str, seed: int) -> Result:
    """A private head: with the numbers of the recipe on its features, or with the defaults on plain rows."""
    get = task.features if variant == "recipe" else task.plain
    labels, rows = torch.from_numpy(task.labels("train")), torch.from_numpy(get("train"))
    examples: int = task.facts["num_examples"]
    if variant == "recipe":
        numbers: dict[str, Any] = {"steps": task.recipe["steps"], "max_grad_norm": task.recipe["clip"]}
        numbers |= {"expected_batch_size": min(task.recipe["batch_size"], examples)}
        options: dict[str, Any] = {"schedule": task.recipe["schedule"], "noise_step": task.recipe["noise_step"]}
    else:
        numbers = {"steps": STEPS, "max_grad_norm": MAX_GRAD_NORM, "expected_batch_size": min(LARGEST_BATCH, examples)}
        schedule: Any = "constant" if task.facts["kind"] == "texts" else "cosine"
        options = {"schedule": schedule, "noise_step": head_noise_step(schedule, of_numbers=False)}
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=task.epsilon, delta=task.delta, num_examples=examples, seed=seed, **numbers
    )
    made = pg.fit_head(
        rows, labels, num_classes=task.outputs, source="public facts of the task", plan=plan, progress=False, **options
    )
    with torch.no_grad():
        outputs = torch.cat([made(torch.from_numpy(part)) for part in np.array_split(get("test"), 16)])
    return facts(plan, outputs, numbers | options)


def facts(plan: pg.PrivacyPlan, outputs: Tensor, settings: dict[str, Any]) -> Result:
    return {
        "outputs": outputs.numpy(),
        "epsilon": plan.epsilon(),
        "delta": plan.delta,
        "accountant": "PLD, add or remove one example",
        "settings": settings | {"optimizer": "SGD", "sigma": plan.noise_multiplier},
    }


def trained(task: Task, variant: str, seed: int) -> Result:
    """Train once, and return the outputs on the test part with the facts of the training."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
        if variant == "example" and task.facts["kind"] == "images":
            return network(task, seed)
        return head(task, variant, seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(trained, PACKAGES)
