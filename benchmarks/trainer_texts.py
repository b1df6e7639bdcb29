"""Accuracy of PrivateTrainer by its defaults on 2,000 texts of three classes, next to heads on stored states.

`python -m benchmarks.trainer_texts --data docstrings --way lora --seed 0` appends a line to
results/fine-tuning/trainer.jsonl, unless the file holds it. Defaults were chosen on `docstrings` and `tools`: sentences
of the documentation of packages, as they are installed. `packages` has descriptions of Debian packages for networks,
science and games, `tweets` those of `privgrad data fetch tweets`, and `mails` is as in benchmarks/texts.py. `mails` was
not looked at, and `tweets` for heads only. All have 1,040, 480 and 480 training texts of at most 32 tokens. MiniLM is
the model. Accuracies are on test texts; "start" is that of the head before the fine-tuning. Epsilon is 8; the noise has
no seed, so a seed draws the parts and the first weights only.

Ways: "lora" and "all" train adapters or all weights by PrivateTrainer(target_epsilon=8); "lora, no head" leaves out the
start from a head; "lora, u 0.03" has another noise step for adapters; "lora, plan" is the plan of 30 steps of 60 texts
of newcomers; "head" is `pg.fit_head` on the means of the states, and "not private" a logistic regression on them.
"""

import ast
import importlib.util
import json
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import privgrad as pg
from benchmarks.texts import MAILS, raw
from privgrad.data import pretrained
from privgrad.features import FrozenText
from privgrad.integrations import huggingface_arguments
from privgrad_lab.data.debian import read_index

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results/fine-tuning/trainer.jsonl"
FAMILIES = (("transformers", "peft", "accelerate"), ("scipy", "sklearn"), ("",))  # "" is Python's own library
SECTIONS = ("net", "science", "games")
TRAINED, TESTED = (1040, 480, 480), (312, 144, 144)
LENGTH, CHARACTERS = 32, (40, 200)
DEFAULT = huggingface_arguments.ADAPTER_NOISE_STEP
NUMBERS: dict[str, Any] = {"target_epsilon": 8.0, "delta": 1e-4, "num_examples": sum(TRAINED)}
WAYS = ("lora", "head", "not private", "lora, no head", "lora, plan", "lora, u 0.03", "all")


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


def tweets(kind: str) -> Iterator[str]:
    yield from (text for text, label, _ in raw("tweets") if label == kind)


def mails(kind: str) -> Iterator[str]:
    """Yield the beginnings of spam, of mails to a list of friends, and of mails to lists about software."""
    for file in sorted(MAILS.glob("package/data/*/*.txt")):
        head, _, body = file.read_text("latin-1").partition("\n\n")
        found = re.search(r"(?im)^(?:List-Id:|Sender:|To:)[^\n]*(fork|rpm|ilug|exmh|razor|spamassassin-)", head)
        own = "spam" if file.parent.name.startswith("spam") else "" if found is None else found[1].lower()
        if (own if own in ("spam", "fork", "") else "software") == kind:
            own_words = re.sub(r"(?m)^[>|].*$|<[^>]*>|^.* (wrote|writes|said):$", " ", body)
            yield " ".join(own_words.split())[: CHARACTERS[1]]


def load(name: str, seed: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return training and test texts with their classes."""
    chance, train, test = random.Random(seed), list[tuple[str, int]](), list[tuple[str, int]]()
    for label in range(3):
        make, kinds = SETS[name]
        low, high = CHARACTERS
        texts = sorted({text for one in make(kinds[label]) if low <= len(text := " ".join(one.split())) <= high})
        chance.shuffle(texts)
        own = [(text, label) for text in texts[: TRAINED[label] + TESTED[label]]]
        train, test = train + own[: TRAINED[label]], test + own[TRAINED[label] :]
    chance.shuffle(train)
    return train, test


SETS: dict[str, tuple[Callable[[Any], Iterator[str]], Sequence[Any]]] = {
    "docstrings": (docstrings, FAMILIES),
    "packages": (packages, SECTIONS),
    "tweets": (tweets, ("negative", "neutral", "positive")),
    "tools": (docstrings, (("torch",), ("sympy", "networkx"), ("pip", "setuptools", "pytest", "rich"))),
    "mails": (mails, ("spam", "fork", "software")),
}


def fine_tuned(way: str, seed: int, train: list[Any], test: list[Any], folder: str) -> dict[str, float]:
    """Return the accuracy and the epsilon of PrivateTrainer by its defaults, and the accuracy that it starts from."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback, TrainingArguments

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
    huggingface_arguments.ADAPTER_NOISE_STEP = 0.03 if way == "lora, u 0.03" else DEFAULT
    started: list[float] = []

    def accuracy() -> float:
        found = np.asarray(trainer.predict(held).predictions).argmax(1)  # pyright: ignore[reportArgumentType]
        return float((found == [label for _, label in test]).mean())

    class Look(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            started.append(accuracy())

    held = rows(test)
    trainer = PrivateTrainer(model, args, train_dataset=rows(train), callbacks=[Look()], **numbers)
    trainer.train()
    return {"accuracy": accuracy(), "epsilon": trainer.epsilon, "start": started[0]}


def linear(way: str, train: list[Any], test: list[Any]) -> dict[str, float | None]:
    """Return the accuracy and the epsilon of a linear model on stored states."""
    encoder = FrozenText("minilm", max_length=LENGTH, source="MiniLM, trained on public web text")
    inputs, held = (encoder([text for text, _ in part]) for part in (train, test))
    labels, own = (torch.tensor([label for _, label in part]) for part in (train, test))
    if way == "head":
        head = pg.fit_head(inputs, labels, num_classes=3, **NUMBERS, extractor=encoder, progress=False)
        return {"accuracy": float((head.model(held).argmax(1) == own).float().mean()), "epsilon": head.epsilon}
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=10, max_iter=2000).fit(inputs.numpy(), labels.numpy())
    return {"accuracy": float(model.score(held.numpy(), own.numpy())), "epsilon": None}


def table(out: Path = OUT) -> str:
    """Return the table of docs/integrations.md: means over the seeds that the file holds, and their number."""
    held = [json.loads(line) for line in out.read_text().splitlines()]
    sets = [name for name in SETS if any(one["data"] == name for one in held)]
    lines = [f"| way | {' | '.join(sets)} | CPU time |", f"|---|{'---|' * len(sets)}---|"]
    for way in WAYS:
        own = [one for one in held if one["way"] == way]
        for name in ("start", "accuracy"):
            cells = list[str]()
            for data in sets:
                found = [one[name] for one in own if one["data"] == data and name in one]
                cells.append(f"{100 * sum(found) / len(found):.1f} % ({len(found)})" if found else "")
            if any(cells):
                spent = f"{sum(one['cpu_seconds'] for one in own) / len(own):.0f} s" if name == "accuracy" else ""
                lines.append(f"| {way}{': start' if name == 'start' else ''} | {' | '.join(cells)} | {spent} |")
    return "\n".join(lines) + "\n"


def main(
    data: Annotated[list[str], typer.Option(help=", ".join(SETS))] = [],  # noqa: B006
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
            **found,
            "cpu_seconds": round(time.process_time() - began),
            "packages": {one: version(one) for one in ("torch", "transformers", "peft", "scipy")},
        }
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        typer.echo(json.dumps(record))


if __name__ == "__main__":
    typer.run(main)
