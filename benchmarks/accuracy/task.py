"""A task as plain arrays, and what every script of a library shares. It needs numpy only, for any environment.

`export` writes a task into a folder, once. Each `with_NAME` trains on it in the environment of its library, and prints
one line of JSON. All libraries get the same examples, the same test part and the same public facts.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Result = dict[str, Any]


class Task:
    """One exported task: `facts` has the public facts, and the arrays are read from the folder when they are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
        self.name: str = self.facts["task"]
        self.is_tags: bool = self.facts["metric"] == "recall@5"
        self.outputs: int = self.facts["num_classes"]
        self.epsilon: float = self.facts["epsilon"]
        self.delta: float = self.facts["delta"]
        self.recipe: dict[str, Any] = self.facts["recipe"]

    def part(self, name: str, part: str) -> Array:
        """The array of a part, "train" or "test": features, labels, pixels, values or tokens."""
        return np.load(self.folder / f"{name}_{part}.npy", mmap_mode="r" if name == "features" else None)

    def features(self, part: str) -> Array:
        """The features of our recipe, each row divided by its norm."""
        rows = self.part("features", part).astype(np.float32)
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)

    def labels(self, part: str) -> Array:
        """Classes (n,), or 1 for each tag of a row (n, tags)."""
        return self.part("labels", part)

    def targets(self, part: str) -> Array:
        """The labels as shares, (n, outputs): one-hot classes, or equal shares of all tags of a row."""
        labels = self.labels(part)
        if not self.is_tags:
            return np.eye(self.outputs, dtype=np.float32)[labels]
        return (labels / np.maximum(labels.sum(1, keepdims=True), 1)).astype(np.float32)

    def codes(self, part: str) -> Array:
        """A table as most users code it: one-hot categories beside numbers that public ranges scale to [0, 1]."""
        blocks: list[Array] = []
        for values, column in zip(self.part("values", part).T, self.facts["columns"], strict=True):
            if column["kind"] == "number":
                low, high = column["edges"][0], column["edges"][-1]
                blocks.append(((values.clip(low, high) - low) / (high - low))[:, None])
            else:
                blocks.append(np.eye(len(column["values"]))[values.astype(int)])
        return np.concatenate(blocks, axis=1).astype(np.float32)

    def bins(self, part: str) -> Array:
        """A table with the number of the public bin in place of each number, (n, columns)."""
        codes = self.part("values", part).copy()
        for index, column in enumerate(self.facts["columns"]):
            if column["kind"] == "number":
                codes[:, index] = np.digitize(codes[:, index], column["edges"][1:-1])
        return codes

    def words(self, part: str) -> Array:
        """Word frequencies of a public vocabulary, weighted by public document frequencies, (n, words)."""
        rows, columns, values = (self.part(f"words-{name}", part) for name in ("rows", "columns", "values"))
        dense = np.zeros((len(self.labels(part)), self.facts["words"]), np.float32)
        dense[rows, columns] = values
        return dense

    def plain(self, part: str) -> Array:
        """The rows that a linear model of a user gets without our features."""
        return self.codes(part) if "columns" in self.facts else self.words(part)

    def score(self, outputs: Array) -> float:
        """Accuracy on the test part, or the recall of the five likeliest tags, from outputs (n, outputs)."""
        labels = self.labels("test")
        if not self.is_tags:
            return float((outputs.argmax(1) == labels).mean())
        guesses = np.argsort(-outputs, axis=1)[:, :5]
        return float((np.take_along_axis(labels, guesses, 1).sum(1) / labels.sum(1)).mean())

    def learning_rate(self, noise_multiplier: float, batch_size: float, clip: float) -> float:
        """The learning rate at which noise moves a weight by the recipe's noise step, for SGD with its momentum."""
        std = noise_multiplier * clip / batch_size
        return self.recipe["noise_step"] * (1 - self.recipe["momentum"]) / std

    def decay(self, step: int) -> float:
        """The recipe's factor of the learning rate at a step."""
        if self.recipe["schedule"] == "constant":
            return 1.0
        return (1 + math.cos(math.pi * step / self.recipe["steps"])) / 2


def save(folder: Path, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write a task. The facts come last: a folder that has them is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def main(train: Callable[[Task, str, int], Result], packages: Sequence[str]) -> None:
    """Train once as the command line says, and print the record as the last line.

    `train` returns outputs on the test part, epsilon, delta, the accountant and the settings.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("variant")
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    print(json.dumps(record(Task(given.folder), given.variant, given.seed, train, packages)), flush=True)  # noqa: T201


def record(
    task: Task, variant: str, seed: int, train: Callable[[Task, str, int], Result], packages: Sequence[str]
) -> Result:
    """Train once, and return the record."""
    began, cpu = time.time(), time.process_time()
    result = train(task, variant, seed)
    outputs = result.pop("outputs")
    return {
        "score": round(task.score(outputs), 5),
        "metric": task.facts["metric"],
        **result,
        "train_rows": len(task.labels("train")),
        "test_rows": len(task.labels("test")),
        "seconds": round(time.time() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }
