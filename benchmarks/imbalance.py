"""What helps rare classes: loss weights, rates of classes, and decisions by class counts.

`python -m benchmarks.imbalance --task adult` appends a line to results/imbalance/runs.jsonl for each training that the
file does not hold yet; `--show` prints the means. The tasks are the incomes of Adult at epsilon 1, and the sections of
Debian packages by TF-IDF of their texts at epsilon 3. Each training also pays for two histograms: of the classes, from
which weights, rates and decisions follow, and of the right decisions for each shift of the outputs, which chooses one.
Results are measured on test rows, and are NOT private for these.
"""

import json
import math
import statistics
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks.heads import table
from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Release, calibrate_noise_multiplier
from privgrad.data import debian_texts
from privgrad.diagnostics import RawGradientStats
from privgrad.features import Public, TfIdf
from privgrad.training.defaults import head_noise_step

ROOT = Path(__file__).resolve().parents[1]
COUNTING = 50.0  # noise multiplier of the histogram: the standard deviation of a count
FLOOR = 200.0  # a class with fewer examples by the histogram counts as having this many
WORDS = 2000
SHIFTS = (-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of the outputs, times the logarithms of the classes' shares
PLANS: dict[str, dict[str, Any]] = {
    "adult": {"target_epsilon": 1.0, "delta": 1e-6, "num_examples": 24_000, "expected_batch_size": 8192, "steps": 300},
    "sections": {
        "target_epsilon": 3.0,
        "delta": 1e-5,
        "num_examples": 45_000,
        "expected_batch_size": 4500,
        "steps": 300,
    },
}
# way -> (C, power of the weights, of the rates, and of the shift of the loss); weight = (rarest / count) ** power
WAYS: dict[str, tuple[float, float, float, float]] = {
    "nothing": (0.1, 0, 0, 0),
    "nothing, C = 1.5": (1.5, 0, 0, 0),
    "weights, C = 0.1": (0.1, 1, 0, 0),
    "weights, C = 1.5": (1.5, 1, 0, 0),
    "weights to the 1/2, C = 1.5": (1.5, 0.5, 0, 0),
    "rates": (0.1, 0, 1, 0),
    "rates to the 1/2": (0.1, 0, 0.5, 0),
    "shifted loss": (0.1, 0, 0, 1),
    "shifted loss, C = 1.5": (1.5, 0, 0, 1),
}


class Task:
    """Rows of norm 1 and classes, for training and for tests."""

    def __init__(self, name: str) -> None:
        if name == "adult":
            rows, labels = table("loan")
            tested = torch.arange(len(rows)) % 4 == 3
            self.train, self.test = ((rows[part], labels[part].long()) for part in (~tested, tested))
            self.classes = 2
            return
        data = debian_texts(task="sections", limit=47_000, validation=2000)
        assert data.public_inputs is not None
        words = TfIdf(Public(data.public_inputs, "texts beyond the limit"), vocabulary=WORDS)
        parts = [(words(part.tensors[0]), part.tensors[1]) for part in (data.train, data.test)]
        self.train, self.test, self.classes = parts[0], parts[1], data.num_classes


def scores(outputs: Tensor, labels: Tensor, rare: Tensor) -> dict[str, float]:
    """Return accuracy, the mean of the classes' recalls and that of the rare classes, and the mean of their F1."""
    chosen, classes = outputs.argmax(1), outputs.shape[1]
    right = torch.bincount(labels[chosen == labels], minlength=classes).double()
    wanted, given = (torch.bincount(one, minlength=classes).double() for one in (labels, chosen))
    recall, f1 = right / wanted, 2 * right / (wanted + given)
    present = wanted > 0
    return {
        "accuracy": (right.sum() / wanted.sum()).item(),
        "recall": recall[present].mean().item(),
        "rare recall": recall[present & rare].mean().item(),
        "f1": f1[present].mean().item(),
    }


def trained(task: Task, name: str, way: str, seed: int, factor: float) -> dict[str, Any]:
    """Train once, and return the record."""
    norm, weighted, rated, shifted = WAYS[way]
    rows, labels = task.train
    began = time.process_time()
    paid: dict[str, Any] = {"noise_multiplier": COUNTING, "num_examples": PLANS[name]["num_examples"], "seed": seed}
    counts = pg.release_histogram(labels, num_bins=task.classes, ledger=pg.Ledger(), **paid).clamp(min=FLOOR)
    relative, prior = counts.min() / counts, (counts / counts.sum()).float()
    numbers = PLANS[name]
    rate = numbers["expected_batch_size"] / numbers["num_examples"]
    sigma = calibrate_noise_multiplier(
        target_epsilon=numbers["target_epsilon"],
        delta=numbers["delta"],
        sample_rate=rate,
        steps=numbers["steps"],
        besides=[Release(COUNTING, 1.0, count=2)],
    )
    plan = pg.PrivacyPlan(max_grad_norm=norm, seed=seed, sample_rate=rate, noise_multiplier=sigma, **numbers)
    weights = (relative**weighted).float()

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, classes = batch
        return F.cross_entropy(model(inputs) + shifted * prior.log(), classes, reduction="none") * weights[classes]

    model = nn.Linear(rows.shape[1], task.classes, bias=False)
    nn.init.zeros_(model.weight)
    step = factor * head_noise_step("cosine", of_numbers=False)
    optimizer = pg.optim.SGD(model.named_parameters(), noise_step=step, momentum=0.9)
    data = pg.ClassRates(TensorDataset(rows, labels), labels, (relative**rated).tolist())
    private_grad = pg.PrivateGradient(model, losses, plan)
    clipped = RawGradientStats(private_grad)
    pg.fit(private_grad, optimizer, data, scheduler="cosine", progress=False)
    learned = (prior * relative**rated * weights) ** (1 - shifted)  # the balance of classes that the outputs show
    with torch.no_grad():
        outputs, own = model(task.test[0]), model(rows)
    right = torch.stack([((own - shift * prior.log()).argmax(1) == labels).float() for shift in SHIFTS], 1)
    bins = F.one_hot(labels, task.classes)[:, :, None] * right[:, None]  # (n, classes, shifts)
    bound = math.sqrt(len(SHIFTS))
    width = task.classes * len(SHIFTS)
    found = pg.release_histogram(bins.flatten(1), num_bins=width, bound=bound, ledger=pg.Ledger(), **paid)
    chosen = SHIFTS[int((found.reshape(task.classes, -1) / counts[:, None]).mean(0).argmax())]
    share = torch.bincount(labels, minlength=task.classes) / len(labels)
    rare = share < (0.01 if task.classes > 2 else 0.5)
    decisions = {
        "argmax": outputs,
        "by counts": outputs - learned.float().log(),
        "by paid recall": outputs - chosen * prior.log(),
    }
    found_scores = {
        decision: {key: round(value, 4) for key, value in scores(shown, task.test[1], rare).items()}
        for decision, shown in decisions.items()
    }
    return {
        "task": name,
        "way": way,
        "factor": factor,
        "seed": seed,
        **found_scores,
        "shift": chosen,
        "clipped": round(clipped.summary()["raw_clip_fraction"], 3),
        "epsilon": accounting.epsilon(
            [Release(COUNTING, 1.0, count=2), *private_grad.ledger.charged], delta=PLANS[name]["delta"]
        ),
        "cpu_seconds": round(time.process_time() - began),
    }


def show(records: list[dict[str, Any]]) -> None:
    """Print the mean and the standard deviation over the seeds, as a table."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["task"], record["way"], record["factor"]].append(record)
    for (task, way, factor), runs in groups.items():
        for decision in ("argmax", "by counts", "by paid recall"):
            cells: list[str] = []
            for key in ("accuracy", "recall", "rare recall", "f1"):
                values = [run[decision][key] for run in runs]
                spread = statistics.stdev(values) if len(values) > 1 else math.nan
                cells.append(f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}")
            typer.echo(f"| {task} | {way}, {factor:g} | {decision} | {' | '.join(cells)} |")


def main(
    task: Annotated[str, typer.Option(help="adult or sections")] = "adult",
    seeds: Annotated[int, typer.Option(help="trainings for each way, with research seeds 0, 1, ...")] = 3,
    factor: Annotated[list[float] | None, typer.Option(help="times the default noise step; 1 if not given")] = None,
    out: Annotated[Path, typer.Option(help="the file that records are added to")] = ROOT
    / "results/imbalance/runs.jsonl",
    only_show: Annotated[bool, typer.Option("--show", help="print the means, and train nothing")] = False,
) -> None:
    held = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if only_show:
        show(held)
        return
    known = {(one["task"], one["way"], one["factor"], one["seed"]) for one in held}
    out.parent.mkdir(parents=True, exist_ok=True)
    data = Task(task)
    warnings.simplefilter("ignore")  # of research seeds
    for seed in range(seeds):
        for way in WAYS:
            for times in factor or [1.0]:
                if (task, way, times, seed) not in known:
                    record = trained(data, task, way, seed, times)
                    with out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
                    typer.echo(json.dumps(record))


if __name__ == "__main__":
    typer.run(main)
