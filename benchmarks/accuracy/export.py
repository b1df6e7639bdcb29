"""Write a task as plain arrays for all libraries: `python -m benchmarks.accuracy.export adult`.

Data, parts, features and numbers are those of the recipes in examples/recipes. Pixels, values, tokens and words are the
same examples without our features. What describes a table, a vocabulary or a tokenizer is public, and all get it.
"""

import csv
import tomllib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.accuracy.task import Array, save
from privgrad.data import MINILM, DataSet, pretrained
from privgrad.features import TfIdf
from privgrad.features.text import texts_of
from privgrad_lab import build, featuring
from privgrad_lab.load_spec import load_spec
from privgrad_lab.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers/data"
RECIPES = {
    "fashion-mnist": ("images", "clothing.toml"),
    "adult": ("table", "adult.toml"),
    "tags": ("texts", "texts_tags.toml"),
    "sections": ("texts", "texts_sections.toml"),
}
PARTS = ("train", "test")
TOKENS = 256  # of a text, as in examples/imdb.py of Opacus
# Words of the public vocabulary. For sections it is that of the recipe. The recipe for tags has none; with 551 tags,
# 2,000 words make a linear model of 1.1 million weights.
WORDS = {"sections": 10_000, "tags": 2_000}


def export(name: str, folder: Path) -> None:
    """Write one task."""
    kind, file = RECIPES[name]
    spec = load_spec(ROOT / "examples/recipes" / file)
    data = build.make_data(spec)
    method = spec.methods[0]
    _, featured = featuring.own(spec, method, data)
    arrays: dict[str, Array] = {}
    for part in PARTS:
        rows, labels = getattr(featured, part).tensors
        arrays[f"features_{part}"] = np.asarray(rows.half() if isinstance(rows, Tensor) else rows)
        is_tags = data.score == "recall@5"
        arrays[f"labels_{part}"] = labels.to(torch.uint8 if is_tags else torch.int64).numpy()
    facts: dict[str, Any] = facts_of(name, kind, spec, data)
    if kind == "images":
        arrays |= {f"pixels_{part}": _pixels(getattr(data, part).tensors[0]) for part in PARTS}
    elif kind == "table":
        found, facts["columns"] = table(ROOT / "examples/recipes" / file)
        arrays |= {f"values_{part}": found[part][0] for part in PARTS}
        for part in PARTS:
            if not np.array_equal(found[part][1], arrays[f"labels_{part}"]):
                raise ValueError("the rows of the table are in another order than those of the recipe")
    else:
        arrays |= texts(name, data, facts)
    save(folder / name, facts, arrays)


def facts_of(name: str, kind: str, spec: Spec, data: DataSet) -> dict[str, Any]:
    """The public facts of a task, with the numbers of the recipe."""
    method, privacy = spec.methods[0], spec.privacy
    decay = getattr(method.schedule or spec.run.schedule, "decay", None) or "constant"
    return {
        "task": name,
        "kind": kind,
        "data": data.name,
        "metric": data.score,
        "num_classes": data.num_classes,
        "epsilon": privacy.target_epsilon,
        "delta": privacy.delta,
        "num_examples": privacy.num_examples,
        "recipe": {
            "batch_size": privacy.expected_batch_size,
            "steps": privacy.steps,
            "clip": privacy.max_grad_norm,
            "noise_step": method.noise_step,
            "schedule": decay,
            "momentum": method.optimizer.options["momentum"],
        },
    }


def table(recipe: Path) -> tuple[dict[str, tuple[Array, Array]], list[dict[str, Any]]]:
    """Values and labels of both parts, in the order of the file, and the declared columns; education-num is added."""
    declared = tomllib.loads(recipe.read_text())["data"]
    columns = declared["columns"] | {"education-num": {"kind": "number", "edges": [*range(1, 17)]}}
    described = [{"name": name} | column for name, column in columns.items()]
    found: dict[str, tuple[list[list[float]], list[int]]] = {part: ([], []) for part in PARTS}
    with Path(declared["file"]).expanduser().open(newline="") as file:
        for row in csv.DictReader(file, skipinitialspace=True):
            cells = {name.strip(): value.strip() for name, value in row.items()}
            part = (
                "test"
                if int(cells[declared["row_id"]]) % declared["test_every"] == declared["test_every"] - 1
                else "train"
            )
            values = [
                float(cells[c["name"]]) if c["kind"] == "number" else float(c["values"].index(cells[c["name"]]))
                for c in described
            ]
            found[part][0].append(values)
            found[part][1].append(declared["classes"].index(cells[declared["label"]]))
    return {part: (np.array(rows), np.array(labels)) for part, (rows, labels) in found.items()}, described


def texts(name: str, data: DataSet, facts: dict[str, Any]) -> dict[str, Array]:
    """Tokens, and frequencies of public words; the facts get the sizes of both vocabularies."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(pretrained(MINILM))
    assert data.public_inputs is not None
    counter = TfIdf(data.public_inputs, "texts of other packages", vocabulary=WORDS[name])
    facts |= {"tokens": len(tokenizer), "words": len(counter.words)}
    arrays: dict[str, Array] = {}
    for part in PARTS:
        rows = getattr(data, part).tensors[0]
        known = list(texts_of(rows))
        found = tokenizer(known, truncation=True, max_length=TOKENS, padding="max_length", return_tensors="np")
        arrays[f"tokens_{part}"] = found["input_ids"].astype(np.int32)
        blocks = [counter.features(block).to_sparse() for block in rows.split(1000)]
        where = [block.indices() + torch.tensor([[1000 * i], [0]]) for i, block in enumerate(blocks)]
        arrays[f"words-rows_{part}"], arrays[f"words-columns_{part}"] = (
            torch.cat([index[side] for index in where]).int().numpy() for side in (0, 1)
        )
        arrays[f"words-values_{part}"] = torch.cat([block.values() for block in blocks]).numpy()
    return arrays


def _pixels(images: Tensor) -> Array:
    """Images with pixels from 0 to 1, as bytes (n, height, width)."""
    return (images[:, 0] * 255).round().to(torch.uint8).numpy()


def main(
    task: Annotated[list[str], typer.Argument(help=", ".join(RECIPES))],
    folder: Annotated[Path, typer.Option(help="one folder in it for each task")] = FOLDER,
) -> None:
    torch.set_num_threads(1)
    for name in task:
        if not (folder / name / "facts.json").exists():
            export(name, folder)


if __name__ == "__main__":
    typer.run(main)
