"""Accuracy of PrivateTrainer by its defaults on 2,000 texts of three classes, next to heads on stored states.

`python -m benchmarks.trainer_texts --data docstrings --way lora --seed 0` appends a line to
results/fine-tuning/trainer.jsonl, unless the file holds it. Defaults were chosen on `docstrings`: sentences of the
documentation of transformers, of scipy and scikit-learn, and of Python's own library, as they are installed. `packages`
was not looked at before: descriptions of Debian packages for networks, science and games. Both have 1,040, 480 and 480
training texts of at most 32 tokens. MiniLM is the model. Accuracies are on test texts. Epsilon is 8; the noise has no
seed, so a seed draws the parts and the first weights only.

Ways: "lora" and "all" train adapters or all weights by PrivateTrainer(target_epsilon=8); "lora, no head" leaves out the
start from a head; "lora, plan" is the plan of 30 steps of 60 texts that newcomers wrote; "head" is `pg.fit_head` on the
means of the states, and "not private" a logistic regression on them.
"""

import ast
import importlib.util
import json
import random
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import privgrad as pg
from privgrad.data import pretrained
from privgrad.features import FrozenText
from privgrad_lab.data.debian import read_index

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results/fine-tuning/trainer.jsonl"
FAMILIES = (("transformers", "peft", "accelerate"), ("scipy", "sklearn"), ("",))  # "" is Python's own library
SECTIONS = ("net", "science", "games")
TRAINED, TESTED = (1040, 480, 480), (312, 144, 144)
LENGTH, CHARACTERS = 32, (40, 200)
NUMBERS: dict[str, Any] = {"target_epsilon": 8.0, "delta": 1e-4, "num_examples": sum(TRAINED)}
WAYS = ("lora", "head", "not private", "lora, no head", "lora, plan", "all")


def docstrings(family: tuple[str, ...]) -> Iterator[str]:
    """Yield the first paragraphs of the documentation of classes and functions of some packages."""
    for name in family:
        found = importlib.util.find_spec(name or "ast")
        assert found is not None
        assert found.origin is not None, name
        for path in sorted(Path(found.origin).parent.rglob("*.py")):
            if "test" in f"{path}" or (not name and "site-packages" in f"{path}"):
                continue
            try:
                tree = ast.parse(path.read_text(errors="replace"))
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    yield (ast.get_docstring(node) or "").split("\n\n")[0]


def packages(section: str) -> Iterator[str]:
    _, *parts = read_index("trainer_texts", None)
    for package in (package for part in parts for package in part if package.section == section):
        yield f"{package.synopsis}. {package.description}"[: CHARACTERS[1]]


def load(name: str, seed: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return training and test texts with their classes."""
    chance, train, test = random.Random(seed), list[tuple[str, int]](), list[tuple[str, int]]()
    for label in range(3):
        raw = docstrings(FAMILIES[label]) if name == "docstrings" else packages(SECTIONS[label])
        low, high = CHARACTERS
        texts = sorted({text for one in raw if low <= len(text := " ".join(one.split())) <= high})
        chance.shuffle(texts)
        own = [(text, label) for text in texts[: TRAINED[label] + TESTED[label]]]
        train, test = train + own[: TRAINED[label]], test + own[TRAINED[label] :]
    chance.shuffle(train)
    return train, test


def fine_tuned(way: str, seed: int, train: list[Any], test: list[Any], folder: str) -> tuple[float, float]:
    """Return the accuracy and the epsilon of PrivateTrainer by its defaults."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

    from privgrad.integrations.huggingface import PrivateTrainer

    path = pretrained("minilm")
    tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def rows(pairs: list[tuple[str, int]]) -> list[dict[str, Any]]:
        options = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
        found = tokenizer([text for text, _ in pairs], **options)
        return [{name: found[name][k] for name in found} | {"label": pairs[k][1]} for k in range(len(pairs))]

    torch.manual_seed(seed)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    if way != "all":
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"]))
    numbers: dict[str, Any] = NUMBERS | {"head_first": way != "lora, no head"}
    if way == "lora, plan":
        numbers = {"plan": pg.PrivacyPlan.for_budget(**NUMBERS, max_grad_norm=0.1, expected_batch_size=60, steps=30)}
    args = TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = PrivateTrainer(model, args, train_dataset=rows(train), **numbers)
    trainer.train()
    found = np.asarray(trainer.predict(rows(test)).predictions).argmax(1)  # pyright: ignore[reportArgumentType]
    return float((found == [label for _, label in test]).mean()), trainer.epsilon


def linear(way: str, train: list[Any], test: list[Any]) -> tuple[float, float | None]:
    """Return the accuracy and the epsilon of a linear model on stored states."""
    encoder = FrozenText("minilm", max_length=LENGTH, source="MiniLM, trained on public web text")
    inputs, held = (encoder([text for text, _ in part]) for part in (train, test))
    labels, own = (torch.tensor([label for _, label in part]) for part in (train, test))
    if way == "head":
        head = pg.fit_head(inputs, labels, num_classes=3, **NUMBERS, extractor=encoder, progress=False)
        return float((head.model(held).argmax(1) == own).float().mean()), head.epsilon
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=10, max_iter=2000).fit(inputs.numpy(), labels.numpy())
    return float(model.score(held.numpy(), own.numpy())), None


def table(out: Path = OUT) -> str:
    """Return the table of docs/integrations.md: means over the seeds that the file holds, and their number."""
    held = [json.loads(line) for line in out.read_text().splitlines()]
    lines = ["| way | docstrings | packages | CPU time |", "|---|---|---|---|"]
    for way in WAYS:
        cells, spent = list[str](), [one["cpu_seconds"] for one in held if one["way"] == way]
        for data in ("docstrings", "packages"):
            found = [one["accuracy"] for one in held if (one["way"], one["data"]) == (way, data)]
            cells.append(f"{100 * sum(found) / len(found):.1f} % ({len(found)})" if found else "")
        if spent:
            lines.append(f"| {way} | {' | '.join(cells)} | {sum(spent) / len(spent):.0f} s |")
    return "\n".join(lines) + "\n"


def main(
    data: Annotated[list[str], typer.Option(help="docstrings or packages")] = [],  # noqa: B006
    way: Annotated[list[str], typer.Option(help="; ".join(WAYS))] = [],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="of the parts and the first weights")] = [0, 1, 2],  # noqa: B006
    out: Annotated[Path, typer.Option(help="file of the records")] = OUT,
) -> None:
    """Train, and append the records; without data, print the table."""
    if not data:
        typer.echo(table(out), nl=False)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for own, name, number in ((own, name, number) for number in seed for own in data for name in way):
        done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if any((one["data"], one["way"], one["seed"]) == (own, name, number) for one in done):
            continue
        train, test = load(own, number)
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            is_linear = name in ("head", "not private")
            found = linear(name, train, test) if is_linear else fine_tuned(name, number, train, test, folder)
        record = {
            "data": own,
            "way": name,
            "seed": number,
            "accuracy": found[0],
            "epsilon": found[1],
            "cpu_seconds": round(time.process_time() - began),
            "packages": {one: version(one) for one in ("torch", "transformers", "peft", "scipy")},
        }
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        typer.echo(json.dumps(record))


if __name__ == "__main__":
    typer.run(main)
