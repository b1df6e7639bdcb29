"""What the measurements of defaults share: trainings that a file of records holds, and labeled rows with features."""

import hashlib
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import typer
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import PredefinedSplit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import privgrad as pg
from benchmarks.accuracy.run import read
from privgrad.data import part_of
from privgrad.features import unit_rows

DELTA = 1e-5
SEEDS = (0, 1, 2)
EPSILONS = (3.0, 1.0, 0.5)
TEST_SHARE = 0.2
SMALLEST = 1e-6  # probability, for the log loss
Parts = Mapping[str, Tensor]  # of "train" and "test"
Record = dict[str, Any]
T = TypeVar("T")
Losses = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


class Run(NamedTuple):
    """One training."""

    set: str
    method: str
    epsilon: float | None  # None without privacy
    seed: int


def train_missing(
    planned: Iterable[Run], out: Path, load: Callable[[str], T], record: Callable[[Run, T], Record], listed: bool
) -> None:
    """Append a line to the file for each training that it lacks; a failure does not stop the next training."""
    done = {Run(*(one[name] for name in Run._fields)) for one in read(out)}
    missing = [run for run in planned if run not in done]
    if listed:
        typer.echo("\n".join(" ".join(map(str, run)) for run in missing))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, runs in itertools.groupby(missing, lambda run: run.set):
        loaded = load(name)
        for run in runs:
            try:
                made = json.dumps(record(run, loaded))
            except Exception as error:
                typer.echo(f"NOT RUN: {' '.join(map(str, run))}: {type(error).__name__}: {error}", err=True)
                failed = True
                continue
            with out.open("a") as file:
                file.write(made + "\n")
            typer.echo(made)
    if failed:
        raise typer.Exit(1)


class Examples:
    """Labeled rows of a set, with features of several kinds that are computed when a method wants them."""

    def __init__(self, rows: Parts, labels: Parts, outputs: int, kinds: Mapping[str, Callable[[Tensor], Tensor]]):
        self.rows, self.labels, self.outputs, self.kinds = rows, labels, outputs, kinds
        self._made: dict[str, dict[str, Tensor]] = {}

    def features(self, kind: str) -> dict[str, Tensor]:
        """Return features (n, width) of norm 1."""
        if kind not in self._made:
            self._made[kind] = {part: unit_rows(self.kinds[kind](rows)) for part, rows in self.rows.items()}
        return self._made[kind]


Train = Callable[[Examples, str, float, int], tuple[Tensor, Record]]


class Method(NamedTuple):
    """A way to train on one kind of features; it returns outputs (n, classes) of test rows, and its settings."""

    kind: str
    train: Train
    private: bool = True


def split(names: Sequence[bytes], rows: int | None = None, public_share: float = 0.0) -> dict[str, Tensor]:
    """Return the places of the rows of each part, which depends on a row's name alone: rows of one name stay together.

    Args:
        names: of all rows, such as their contents.
        rows: how many to keep, the first by the SHA-256 of their names; None keeps all.
        public_share: of the rows that are taken as public.
    """
    order = sorted(range(len(names)), key=lambda row: hashlib.sha256(names[row]).digest())[:rows]
    places: dict[str, list[int]] = {"train": [], "test": []} | ({"public": []} if public_share else {})
    for row in order:
        part = part_of(names[row], test_share=TEST_SHARE, validation_share=public_share)
        places["public" if part == "validation" else part].append(row)
    return {part: torch.tensor(found) for part, found in places.items()}


def head(**options: Any) -> Train:
    """`fit_head` with its defaults, except for the options; how many rows there are counts as public."""

    def train(examples: Examples, kind: str, epsilon: float, seed: int) -> tuple[Tensor, Record]:
        rows, labels = examples.features(kind), examples.labels["train"]
        numbers: Record = {"target_epsilon": epsilon, "delta": DELTA, "num_examples": len(labels), "seed": seed}
        numbers |= {"num_classes": examples.outputs, "source": "public rows", "progress": False}
        made = pg.fit_head(rows["train"], labels, **numbers, **options)
        return made(rows["test"]), {"max_grad_norm": made.privacy["max_grad_norm"]}

    return train


def opacus_linear(examples: Examples, kind: str, epsilon: float, seed: int) -> tuple[Tensor, Record]:
    """A linear model with the settings of Opacus' examples/mnist.py."""
    rows = examples.features(kind)
    model = nn.Linear(rows["train"].shape[1], examples.outputs)
    return by_opacus_example(model, TensorDataset(rows["train"], examples.labels["train"]), epsilon)(rows["test"]), {}


def by_opacus_example(model: nn.Module, data: TensorDataset, epsilon: float) -> nn.Module:
    """Train with the settings of Opacus' examples/mnist.py: SGD 0.1, batches of 64, 10 epochs, C = 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return by_opacus(model, optimizer, data, losses, epsilon, batch_size=64, epochs=10)


def by_opacus(
    model: nn.Module,
    optimizer: Any,
    data: TensorDataset,
    losses: Losses,
    epsilon: float,
    *,
    batch_size: int,
    epochs: int,
) -> nn.Module:
    """Train a model with Opacus and C = 1, and return it."""
    from opacus import PrivacyEngine

    loader: Any = DataLoader(data, batch_size=batch_size)
    engine: Any = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            losses(private, batch).mean().backward()
            optimizer.step()
    return private.eval()


def linear(examples: Examples, kind: str, epsilon: float, seed: int) -> tuple[Tensor, Record]:
    """Logistic regression without privacy, whose penalty a fifth of the training part chooses."""
    rows: dict[str, Any] = {part: given.numpy() for part, given in examples.features(kind).items()}
    if (rows["test"] != 0).mean() < 0.1:  # counts of words
        rows = {part: csr_matrix(given) for part, given in rows.items()}
    labels = examples.labels["train"].numpy()
    folds = PredefinedSplit(np.where(np.arange(len(labels)) % 5, -1, 0))
    options: Any = {"Cs": [1, 30, 1000], "cv": folds, "max_iter": 200}
    model: Any = LogisticRegressionCV(**options).fit(rows["train"], labels)
    made = np.zeros((rows["test"].shape[0], examples.outputs))
    made[:, model.classes_] = model.predict_proba(rows["test"])
    return torch.from_numpy(made.clip(SMALLEST)).log(), {"penalty": float(np.ravel(model.C_)[0])}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch
    return F.cross_entropy(model(rows), labels, reduction="none")


def record(run: Run, method: Method, examples: Examples) -> Record:
    """Train, and return the record."""
    began, cpu = time.time(), time.process_time()
    if method.kind in examples.kinds:
        examples.features(method.kind)
    featured = time.process_time() - cpu
    torch.manual_seed(run.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of research seeds, and of solvers that stop early
        outputs, settings = method.train(examples, method.kind, run.epsilon or 0.0, run.seed)
    outputs, labels = outputs.detach().double(), examples.labels["test"]
    likely = outputs.softmax(1).clamp(min=SMALLEST)
    found: Record = run._asdict() | ({} if run.epsilon is None else {"delta": DELTA})
    found["accuracy"] = round((outputs.argmax(1) == labels).double().mean().item(), 5)
    found["log_loss"] = round(F.nll_loss(likely.log(), labels).item(), 5)
    sizes: Record = {"train_rows": len(examples.labels["train"]), "test_rows": len(labels)}
    if method.kind in examples.kinds:
        sizes["width"] = examples.features(method.kind)["test"].shape[1]
    seconds = {
        "cpu_seconds": round(time.process_time() - cpu - featured, 1),
        "features_cpu_seconds": round(featured, 1),
    }
    return found | settings | sizes | {"seconds": round(time.time() - began, 1)} | seconds


def command(names: Iterable[str], methods: Mapping[str, Method], load: Callable[[str], Examples], out: Path) -> None:
    """Read the command line, and train what is missing; methods without privacy have one seed."""
    of_sets, of_methods = (f"{', '.join(of)}; default: all" for of in (names, methods))

    def main(
        set_: Annotated[list[str] | None, typer.Option("--set", help=of_sets)] = None,
        method: Annotated[list[str] | None, typer.Option(help=of_methods)] = None,
        epsilon: Annotated[list[float] | None, typer.Option(help="default: 3, 1 and 0.5")] = None,
        seed: Annotated[list[int] | None, typer.Option(help="default: 0, 1 and 2")] = None,
        listed: Annotated[bool, typer.Option("--list", help="print what is missing, and train nothing")] = False,
        table: Annotated[bool, typer.Option("--table", help="print the means, and train nothing")] = False,
    ) -> None:
        torch.set_num_threads(1)
        if table:
            typer.echo(means(out, methods))
            return
        wanted: list[Run] = []
        for name, chosen in itertools.product(set_ or names, method or methods):
            numbers = itertools.product(epsilon or EPSILONS, seed or SEEDS) if methods[chosen].private else [(None, 0)]
            wanted += [Run(name, chosen, *pair) for pair in numbers]
        train_missing(wanted, out, load, lambda run, loaded: record(run, methods[run.method], loaded), listed)

    typer.run(main)


def means(out: Path, methods: Mapping[str, Method], metric: str = "accuracy") -> str:
    """Rows of docs/choosing-evidence.md: means over seeds at epsilon 3 / 1 / 0.5, or without privacy."""
    held, lines = read(out), list[str]()
    for name in dict.fromkeys(one["set"] for one in held):
        own = [one for one in held if one["set"] == name]
        cells = [name, f"{own[0]['train_rows']:,}"]
        for method, of in methods.items():
            found: list[str] = []
            for epsilon in EPSILONS if of.private else (None,):
                values = [one[metric] for one in own if (one["method"], one["epsilon"]) == (method, epsilon)]
                found.append(f"{np.mean(values):.3f}".removeprefix("0") if values else "–")
            cells.append("–" if set(found) == {"–"} else " / ".join(found))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
