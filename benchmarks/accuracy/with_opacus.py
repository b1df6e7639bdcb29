"""Opacus on a task: `.peers/opacus/bin/python -m benchmarks.accuracy.with_opacus FOLDER VARIANT SEED`.

"example" takes model and settings from Opacus 1.6.0 itself:
- images: examples/mnist.py. Its network, SGD 0.1, batches of 64, 10 epochs, C = 1.
- texts: examples/imdb.py. Embeddings of 16 numbers, their mean, two layers; Adam 0.02, batches of 64, 10 epochs, C = 1,
  256 tokens. Its tokenizer is that of BERT, cased; here it is uncased. It turns Poisson sampling off, which the
  accounting of Opacus does not cover, so it stays on here.
- tables: Opacus has no example. A linear model with the settings of examples/mnist.py, its first complete example.
"readme" is the same with the settings of the README (SGD 0.05, batches of 1,024, C = 1), and 10 epochs.
"features" is a linear model on the features of our recipe, with the settings of examples/mnist.py.
"recipe" is our head and our settings on our features: what is left is the library.
"""

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.accuracy.task import Result, Task, main

PACKAGES = ("opacus", "torch")
MEAN, STD = 0.1307, 0.3081  # of examples/mnist.py
SETTINGS: dict[str, dict[str, Any]] = {
    "images": {"optimizer": "SGD", "lr": 0.1, "batch_size": 64, "epochs": 10, "clip": 1.0},
    "texts": {"optimizer": "Adam", "lr": 0.02, "batch_size": 64, "epochs": 10, "clip": 1.0},
    "readme": {"optimizer": "SGD", "lr": 0.05, "batch_size": 1024, "epochs": 10, "clip": 1.0},
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PHYSICAL = 512  # examples whose gradients are held at once; it changes no result


class SampleConvNet(nn.Module):
    """The network of examples/mnist.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class SampleNet(nn.Module):
    """The network of examples/imdb.py, with as many outputs as the task has."""

    def __init__(self, tokens: int, outputs: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(tokens, 16)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.pool(self.emb(x).transpose(1, 2)).squeeze(2))))


def parts(task: Task, variant: str) -> tuple[nn.Module, dict[str, Any], Tensor, Tensor]:
    """The model, the settings, and the inputs of both parts."""
    if variant == "example" and task.facts["kind"] == "images":
        pixels = [(torch.from_numpy(task.part("pixels", part)) / 255 - MEAN) / STD for part in ("train", "test")]
        return SampleConvNet(), SETTINGS["images"], pixels[0][:, None], pixels[1][:, None]
    if variant == "example" and task.facts["kind"] == "texts":
        tokens = [torch.from_numpy(task.part("tokens", part)).long() for part in ("train", "test")]
        return SampleNet(task.facts["tokens"], task.outputs), SETTINGS["texts"], tokens[0], tokens[1]
    get = task.plain if variant in ("example", "readme") else task.features
    rows = [torch.from_numpy(get(part)) for part in ("train", "test")]
    linear = nn.Linear(rows[0].shape[1], task.outputs, bias=variant != "recipe")
    if variant != "recipe":
        return linear, SETTINGS["readme" if variant == "readme" else "images"], rows[0], rows[1]
    nn.init.zeros_(linear.weight)
    numbers = {name: task.recipe[name] for name in ("batch_size", "steps", "clip", "momentum")}
    return linear, numbers | {"optimizer": "SGD"}, rows[0], rows[1]


def trained(task: Task, variant: str, seed: int) -> Result:
    """Train once, and return the outputs on the test part with the facts of the training."""
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")  # of the missing secure mode, and of hooks
    model, settings, inputs, unseen = parts(task, variant)
    model.to(DEVICE)
    data = TensorDataset(inputs, torch.from_numpy(task.targets("train")))
    loader: Any = DataLoader(data, batch_size=min(settings["batch_size"], len(data)))
    rate = 1 / len(loader)  # of Opacus: its batches have rate * n examples on average
    steps = settings.get("steps") or settings["epochs"] * len(loader)
    sigma = get_noise_multiplier(
        target_epsilon=task.epsilon, target_delta=task.delta, sample_rate=rate, steps=steps, accountant="prv"
    )
    batch = int(len(data) * rate)
    lr: float = settings.get("lr") or task.learning_rate(sigma, batch, settings["clip"])
    kind: Any = getattr(torch.optim, settings["optimizer"])
    optimizer: Any = kind(model.parameters(), lr=lr, **{k: v for k, v in settings.items() if k == "momentum"})
    engine: Any = PrivacyEngine()  # its accountant is PRV
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=settings["clip"]
    )
    taken = 0
    while taken < steps:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=PHYSICAL, optimizer=optimizer) as batches:
            for rows, targets in batches:
                if variant == "recipe":
                    optimizer.param_groups[0]["lr"] = lr * task.decay(taken)
                optimizer.zero_grad()
                F.cross_entropy(private(rows.to(DEVICE)), targets.to(DEVICE)).backward()
                optimizer.step()
                taken += not optimizer._is_last_step_skipped
                if taken == steps:
                    break
    private.eval()
    with torch.no_grad():
        outputs = torch.cat([private(rows.to(DEVICE)).cpu() for rows in unseen.split(1024)])
    return {
        "outputs": np.asarray(outputs),
        "epsilon": float(engine.get_epsilon(task.delta)),
        "delta": task.delta,
        "accountant": "PRV, add or remove one example",
        "settings": settings | {"lr": lr, "sigma": sigma, "expected_batch_size": batch, "steps": steps},
        "gpu": torch.cuda.get_device_name() if DEVICE.type == "cuda" else None,
    }


if __name__ == "__main__":
    main(trained, PACKAGES)
