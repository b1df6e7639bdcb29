"""Write one small example of every file that privgrad keeps. tests/test_old_files.py reads them with later versions.

Run it with commit 3b053914 only: `PYTHONPATH=src:tests python tests/old_files/write.py`. The functions that make
models, plans and trainings are also those of the test, and use public names only.
"""

import json
import os
import pickle
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad import features, models
from privgrad.data import by_user, heavy_tail, table

HERE = Path(__file__).parent
# A budget holds absolute paths. What it pays for can go on at this path only, so the test copies it there.
FIXED = Path("/tmp/privgrad-old-files-3b053914")
STEPS, STOP, DELTA = 8, 4, 1e-2
CSV, TOML, ROWS = HERE / "visits.csv", HERE / "visits.toml", HERE / "rows.safetensors"


class Stopped(Exception):  # noqa: N818
    """Ends a training half way."""


def kept_rows(count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels. Files hold digests of inputs, and torch draws other bits on another machine: they are kept."""
    kept = load_file(ROWS)
    return kept[f"inputs of {count}"], kept[f"labels of {count}"]


def make_data(count: int = 32) -> TensorDataset:
    return TensorDataset(*kept_rows(count))


def make_model() -> nn.Sequential:
    generator, model = torch.Generator().manual_seed(0), nn.Sequential(nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def make_plan(**changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {"sample_rate": 0.25, "steps": STEPS, "expected_batch_size": 8, "noise_multiplier": 1.0}
    numbers |= {
        "max_grad_norm": 1.0,
        "num_examples": 32,
        "seed": 7,
    }  # without delta, fit computes no epsilon: it is fast
    return pg.PrivacyPlan(**(numbers | changed))


def users_plan() -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {"expected_cohort_size": 4, "rounds": STEPS, "noise_multiplier": 1.0, "seed": 7}
    return pg.PrivacyPlan.for_users(num_users=8, max_update_norm=0.5, delta=DELTA, **numbers)


def users_data() -> TensorDataset:
    return by_user(make_data(24).tensors, [index % 8 for index in range(24)], cap=3)


def sgd(model: nn.Module) -> Any:
    return pg.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)


def adam_bc(model: nn.Module) -> Any:
    return pg.optim.AdamBC(model.named_parameters(), noise_step=0.05)


def public_gradient(model: nn.Module) -> Any:
    return pg.PublicGradient(model, loss_fn, public_rows(), source="made-up rows", batch_size=4)


def public_rows() -> tuple[Tensor, Tensor]:
    return kept_rows(12)


def measure(model: nn.Module) -> dict[str, float]:
    return {"loss": float(loss_fn(model, public_rows()).mean())}


def private_gradient(model: nn.Module, name: str, **more: Any) -> pg.PrivateGradient:
    """The private step of a training of `TRAININGS`."""
    plan, parts = PLANS.get(name, make_plan)(), PARTS.get(name, lambda _: {})(model)
    return pg.PrivateGradient(model, loss_fn, plan, **parts, **more)


PLANS: dict[str, Callable[[], pg.PrivacyPlan]] = {
    "truncated": lambda: make_plan(sampling="truncated", max_batch_size=12),
    "groups": lambda: make_plan(group_size=2),
    "banded": lambda: make_plan(correlation=pg.noise.Banded(2, (1.0, 0.5))),
    "users": users_plan,
    "automatic": lambda: make_plan(noise_on_grid=True),
    "private": lambda: make_plan(seed=None, delta=DELTA),
    "private-banded": lambda: make_plan(seed=None, correlation=pg.noise.Banded(2, (1.0, 0.5))),
    "simulated": lambda: make_plan().scaled(0.5),
}
PARTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "adambc": lambda _: {"clip": pg.clip.PerLayer({"0.weight": 2.0, "0.bias": 1.0})},
    "automatic": lambda _: {"clip": pg.clip.Automatic()},
    "bam": lambda model: {
        "perturb": pg.perturb.BAM(0.1),
        "precondition": pg.precondition.public_rmsprop(public_gradient(model)),
    },
    "adam-scales": lambda model: {"precondition": pg.precondition.public_adam(public_gradient(model))},
    "fixed-scales": lambda model: {
        "norm_bins": 8,
        "precondition": pg.precondition.fixed(
            pg.Scales(
                {name: torch.full_like(value, 2.0) for name, value in model.named_parameters()},
                provenance="common knowledge",
                source="two",
            )
        ),
    },
    "adampub": lambda _: {"side_information": "made-up rows"},
    "target-fraction": lambda _: {"adaptive_clip": pg.clip.TargetFraction(steps=STEPS)},
    "quantile": lambda _: {
        "adaptive_clip": pg.clip.Quantile(),
        "precondition": pg.precondition.inputs(public_rows()[0], source="made-up rows"),
    },
    "squared-error": lambda _: {"adaptive_clip": pg.clip.SquaredError()},
    "disk": lambda _: {"perturb": pg.perturb.DiSK(0.7), "filter": pg.filters.EMA(0.7)},
    "sat": lambda _: {"perturb": pg.perturb.SAT(0.1), "filter": pg.filters.DOPPLER()},
    "innovation": lambda _: {"filter": pg.filters.Innovation(0.3)},
    "users": lambda _: {"perturb": pg.federated.LocalUpdate(0.1, batch_size=2)},
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adambc": adam_bc,
    "adampub": lambda model: pg.optim.AdamPub(model.named_parameters(), lr=0.05, public=public_gradient(model)),
    "disk": adam_bc,
    "innovation": lambda model: pg.optim.AdamWBC(model.named_parameters(), noise_step=0.05),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"scheduler": "cosine"},
    "adambc": {"ema_decay": 0.9, "scheduler": pg.Schedule("linear", warmup=0.25)},
}
TRAININGS = sorted({*PLANS, *PARTS, *OPTIMIZERS, *OPTIONS})


def train(folder: Path, name: str, *, stop: bool = False) -> tuple[nn.Module, pg.FitResult]:
    """Do a training of `TRAININGS`, or half of it; the same call resumes it."""
    model = make_model()
    private_grad = private_gradient(model, name)

    def on_evaluate(row: Any) -> None:
        if stop and row["step"] == STOP:
            raise Stopped

    return model, pg.fit(
        private_grad,
        OPTIMIZERS.get(name, sgd)(model),
        users_data() if name == "users" else make_data(),
        evaluate=measure,
        num_evaluations=2,
        on_evaluate=on_evaluate,
        output_dir=folder,
        progress=False,
        **OPTIONS.get(name, {}),
    )


def train_until_it_stops(folder: Path) -> pg.FitResult:
    """Train with early stopping, which ends it after its third evaluation."""
    model = make_model()
    stop = pg.EarlyStopping(monitor="score", patience=2, mode="max", data="public")
    private_grad = pg.PrivateGradient(model, loss_fn, make_plan(seed=None))
    options: dict[str, Any] = {"evaluate": lambda _: {"score": 1.0}, "num_evaluations": 4, "stop": stop}
    return pg.fit(private_grad, sgd(model), make_data(), output_dir=folder, progress=False, **options)


def own_loop(folder: Path, *, until: int = STEPS) -> tuple[nn.Module, pg.PrivateGradient]:
    """A loop of the user's own, with a checkpoint by torch.save."""
    model, path = make_model(), folder / "mine.pt"
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    private_grad = private_gradient(model, "disk", ledger=folder / "ledger.jsonl")
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        private_grad.load_state_dict(state["private_grad"])
    start = private_grad.ledger.next_step
    for batch in private_grad.plan.batches(make_data(), start=start):
        if batch.sampling.step >= until:
            break
        optimizer.step(grad=private_grad(batch))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"private_grad": private_grad.state_dict()}, path)
    private_grad.ledger.close()
    return model, private_grad


RELEASES: dict[str, Callable[..., Tensor]] = {
    "sum": pg.release_sum,
    "mean": pg.release_mean,
    "histogram": pg.release_histogram,
    "second-moment": pg.release_second_moment,
}


def release(kind: str, **where: Any) -> Tensor:
    rows = make_data().tensors[1 if kind == "histogram" else 0]
    options: dict[str, Any] = {"num_bins": 3} if kind == "histogram" else {"bound": 2.0}
    return RELEASES[kind](rows, noise_multiplier=2.0, num_examples=32, **options, **where)


def budget_training(folder: Path, *, stop: bool = False) -> tuple[pg.Budget, pg.FitResult]:
    """A training that a budget pays for."""
    budget = pg.Budget(
        folder / "budget.jsonl", total_epsilon=20.0, delta=DELTA, num_examples=32, privacy_unit="example"
    )
    plan, model = make_plan(seed=None, noise_multiplier=2.0, delta=DELTA), make_model()
    ledger = budget.open_ledger(folder / "training" / "ledger.jsonl", plan, name="training", by="a tester")
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=ledger)

    def on_evaluate(row: Any) -> None:
        if stop and row["step"] == STOP:
            raise Stopped

    options: dict[str, Any] = {"evaluate": measure, "num_evaluations": 2, "on_evaluate": on_evaluate}
    place = folder / "training"
    try:
        return budget, pg.fit(private_grad, sgd(model), make_data(), output_dir=place, progress=False, **options)
    finally:
        ledger.close()


def images() -> Tensor:
    return torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def texts() -> list[str]:
    return ["a cat sat", "a dog ran home", "the cat ran"]


def frozen() -> features.Frozen:
    return features.Frozen(make_model(), name="small", source="made-up weights")


def extractors() -> dict[str, features.Extractor]:
    """An extractor of each kind."""
    generator = torch.Generator().manual_seed(4)
    many, fourier = torch.rand(20, 1, 8, 8, generator=generator), features.RandomFourier(5, 6, bandwidth=2.0)
    public = features.Public(torch.randn(20, 5, generator=generator), "made-up rows")
    return {
        "fourier": fourier,
        "scaled": features.Scaled([-3.0] * 5, [3.0] * 5),
        "whitened": features.Whitened(fourier, public),
        "joined": features.join(fourier, (features.Scaled([-3.0] * 5, [3.0] * 5), 2.0)),
        "hog": features.Hog(places=(2,), orientations=4),
        "patches": features.Patches(many, size=3, filters=4, places=2, source="made-up images"),
        "tfidf": features.TfIdf(texts(), "made-up texts", vocabulary=8),
        "frozen": frozen(),
        "frozen-whitened": features.Whitened(frozen(), public),
    }


def rows_of(name: str) -> Any:
    return images() if name in ("hog", "patches") else texts() if name == "tfidf" else make_data(6).tensors[0]


def schema() -> dict[str, Any]:
    columns: dict[str, Any] = {"age": {"kind": "number", "range": [18, 98], "bins": 4}}
    columns["ward"] = {"kind": "category", "values": ["north", "south"], "other": True}
    return {"columns": columns, "label": "returned", "classes": ["no", "yes"], "unit": "row", "row_id": "number"}


VISITORS: list[dict[str, Any]] = [{"age": 20, "ward": "north"}, {"age": 90, "ward": "south"}, {"age": 50, "ward": "?"}]


def heads() -> dict[str, pg.Head]:
    """A head of each kind of target."""
    rows, labels = make_data().tensors
    numbers: dict[str, Any] = {"target_epsilon": 3.0, "delta": DELTA, "num_examples": 32, "steps": 4}
    numbers |= {"max_grad_norm": 0.5, "progress": False}
    fourier, visits = extractors()["fourier"], table(CSV, **schema())
    few: dict[str, Any] = {**numbers, "num_examples": 40}
    users, of_users = users_data().tensors[:2]
    many: dict[str, Any] = {**numbers, "num_examples": 8, "privacy_unit": "user", "source": "no data"}
    return {
        "class": pg.fit_head(fourier(rows), labels, classes=["a", "b", "c"], extractor=fourier, **numbers),
        "tags": pg.fit_head(rows, F.one_hot(labels, 3), num_classes=3, source="no data", **numbers),
        "number": pg.fit_head(rows, rows[:, 0], bounds=(-2.0, 2.0), source="no data", **numbers),
        "table": pg.fit_head(
            *visits.train.tensors, classes=visits.classes, schema=visits.schema, source="no data", **few
        ),
        "users": pg.fit_head(users, of_users, num_classes=3, **many),
        "frozen": pg.fit_head(frozen()(rows), labels, num_classes=3, extractor=frozen(), **numbers),
    }


def make_head_model() -> nn.Module:
    model = models.UnitLinear(5, 3)
    nn.init.ones_(model.linear.weight)
    return model


def asked_of(name: str) -> Any:
    return VISITORS if name == "table" else make_data(6).tensors[0]


def command(*arguments: str) -> None:
    """Run `python -m privgrad` in this process."""
    before, sys.argv = sys.argv, ["privgrad", *arguments]
    try:
        runpy.run_module("privgrad", run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv = before


def spec_of(kind: str) -> dict[str, Any]:
    """The tables of a comparison: "research", or a private one by its way to spend the total."""
    data = {"file": "visits.csv", "test_share": 0.25, **schema()}
    sgd_table: dict[str, Any] = {"name": "DP-SGD", "optimizer": {"use": "SGD", "momentum": 0.5}}
    at_a_rate = {"name": "DP-SGD", "optimizer": {"use": "SGD", "momentum": 0.5, "lr": 0.1}}
    adam = {"name": "DP-AdamBC", "optimizer": "AdamBC", "filter": {"use": "EMA", "weight": 0.5}}
    adam["adaptive_clip"] = "TargetFraction"
    privacy: dict[str, Any] = {"delta": DELTA, "max_grad_norm": 1.0, "num_examples": 24}
    privacy |= {"expected_batch_size": 8, "steps": 4}
    if kind == "research":
        return {
            "title": "visits",
            "data": data | {"validation_share": 0.2},
            "model": {"use": "linear"},
            "privacy": privacy | {"noise_multiplier": 2.0, "num_examples": 20},
            "methods": [at_a_rate, adam],
            "tuning": {"lr": [0.05, 0.2], "seeds": [9]},
            "run": {"seeds": [0], "num_evaluations": 1},
        }
    if kind == "named":
        return {
            "title": "named",
            "data": {"groups": 2, "log_size": 2},
            "model": {"use": "linear"},
            "privacy": privacy | {"noise_multiplier": 2.0, "num_examples": 8, "expected_batch_size": 4},
            "methods": [at_a_rate],
            "run": {"seeds": [0], "num_evaluations": 1},
        }
    return {
        "title": "visits",
        "data": data,
        "model": {"use": "linear"},
        "privacy": privacy | {"total_epsilon": 8.0},
        "methods": [sgd_table],
        "tuning": {"way": kind, "noise_steps": [0.05, 0.2]} | ({"mean_runs": 2.0} if kind == "select" else {}),
    }


COMPARISONS = ["research", "trials", "select"]


def compare(kind: str, out: Path) -> dict[str, Any]:
    """Do a comparison of `COMPARISONS`; or "named", whose data are a function of ours: spec.json has its module."""
    options: dict[str, Any] = {"data": heavy_tail} if kind == "named" else {}
    return pg.compare(spec_of(kind), out=out, progress=False, **options)


def lightning(folder: Path, *, stop: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    """A training by Lightning; checkpoint.ckpt is of its fourth step."""
    from lightning import pytorch as L

    from privgrad.integrations.lightning import PrivateStrategy

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_fn(self.net, batch)

        def configure_optimizers(self) -> Any:
            return adam_bc(self)

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if stop and trainer.global_step == STOP:
                trainer.save_checkpoint(folder / "checkpoint.ckpt")
                raise Stopped

    strategy, module = PrivateStrategy(make_plan(), device="cpu", ledger=folder / "ledger.jsonl"), Classifier()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": folder}
    trainer = L.Trainer(strategy=strategy, max_steps=STEPS, callbacks=[Stop()], **quiet)
    trainer.fit(module, strategy.batches(make_data()), **options)
    return module.net, strategy.private_grad


class Columns(nn.Module):
    """A model that takes the columns of a data set by name, for PrivateTrainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_fn(self.net, (inputs, labels)).mean()}


def hugging_face(folder: Path, *, stop: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    """A training by a Trainer of transformers, which saves a checkpoint after its fourth step."""
    from transformers import TrainerCallback, TrainingArguments

    from privgrad.integrations.huggingface import PrivateTrainer

    class Stop(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if stop:
                raise Stopped

    def of_columns(model: Any, batch: Any) -> Tensor:
        return loss_fn(model.net, (batch["inputs"], batch["labels"]))

    plan, model = make_plan(), Columns()
    numbers: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 8, "max_grad_norm": 0.0}
    numbers |= {"save_steps": STOP, "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    rows = [{"inputs": row, "labels": label} for row, label in zip(*make_data().tensors, strict=True)]
    trainer = PrivateTrainer(
        model,
        TrainingArguments(str(folder), **numbers),
        plan=plan,
        train_dataset=rows,
        optimizers=(adam_bc(model), None),
        loss_fn=of_columns,
        callbacks=[Stop()],
    )
    trainer.train(**options)
    return model.net, trainer.private_grad


def flower(folder: Path, rounds: int) -> tuple[nn.Module, Any]:
    """Some rounds of a federated training by Flower; its messages are left out."""
    from flwr.app import ArrayRecord, ConfigRecord

    from privgrad.integrations.flower import PrivateStrategy

    model, path = make_model(), folder / "state.pt"
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0, momentum=0.5)
    ledger = pg.Ledger(folder / "ledger.jsonl")
    strategy = PrivateStrategy(model, optimizer, users_plan(), ledger=ledger, nodes=range(8))
    if path.exists():
        strategy.load_state_dict(torch.load(path, weights_only=True))

    class Nobody:
        def get_node_ids(self) -> list[int]:
            return []

    grid: Any = Nobody()
    for number in range(1, rounds + 1):
        strategy.configure_train(number, ArrayRecord(model.state_dict()), ConfigRecord({}), grid)
        strategy.aggregate_train(number, [])
    torch.save(strategy.state_dict(), path)
    ledger.close()
    return model, strategy.private_grad


def weights(model: nn.Module) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


# ---- From here on, only this script: it stops trainings, and records what is in the files.


@contextmanager
def stopping(after: int) -> Generator[None]:
    """Interrupt the process at the private step of this number."""
    call, left = pg.PrivateGradient.__call__, [after]

    def counted(self: Any, batch: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return call(self, batch)

    pg.PrivateGradient.__call__ = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    except (KeyboardInterrupt, SystemExit, Stopped):
        pass
    finally:
        pg.PrivateGradient.__call__ = call  # pyright: ignore[reportAttributeAccessIssue]


def epsilons(path: Path) -> dict[str, Any]:
    ledger = pg.Ledger(path, read_only=True)
    found: dict[str, Any] = {"releases": ledger.releases, "head": ledger.head}
    is_large = {"compare", "train"} & {*path.relative_to(HERE).parts}  # the reports have their epsilons
    if ledger.plan_facts["sampling"] != "truncated" and not is_large:
        found["rdp"] = ledger.epsilon(delta=DELTA, accountant="rdp")
    if path.parent.name == "sgd":
        found["pld"] = ledger.epsilon(delta=DELTA)
    return found


def write_table() -> None:
    generator = torch.Generator().manual_seed(5)
    ages = torch.randint(18, 98, (40,), generator=generator).tolist()
    wards = torch.randint(0, 2, (40,), generator=generator).tolist()
    rows = [f"{i},{a},{('north', 'south')[w]},{('no', 'yes')[a > 60]}" for i, (a, w) in enumerate(zip(ages, wards))]  # noqa: B905
    CSV.write_text("\n".join(["number,age,ward,returned", *rows]) + "\n")
    TOML.write_text(
        f"""title = "visits"
[data]
file = "visits.csv"
unit = "row"
row_id = "number"
label = "returned"
classes = ["no", "yes"]
test_share = 0.25
[data.columns]
age = {{ kind = "number", range = [18, 98], bins = 4 }}
ward = {{ kind = "category", values = ["north", "south"], other = true }}
[model]
use = "mlp"
hidden = 4
[privacy]
noise_multiplier = 1.0
delta = {DELTA}
max_grad_norm = 1.0
num_examples = 24
expected_batch_size = 8
steps = {STEPS}
[[methods]]
name = "DP-AdamBC"
optimizer = {{ use = "AdamBC", noise_step = 0.05 }}
[run]
num_evaluations = 2
"""
    )


def write_trainings(told: dict[str, Any]) -> None:
    ends: dict[str, Any] = {}
    for name in TRAININGS:
        folder = HERE / "fit" / name
        with stopping(1000):
            train(folder, name, stop=True)
        if not name.startswith("private"):
            model, result = train(FIXED / name, name)
            ends[name] = {"weights": weights(result.averaged or model), "curve": result.curve}
    train_until_it_stops(HERE / "early-stop")
    folder = HERE / "own-loop"
    folder.mkdir()
    own_loop(folder, until=STOP)
    (FIXED / "own").mkdir()
    ends["own-loop"] = {"weights": weights(own_loop(FIXED / "own")[0])}
    told["ends"] = ends
    for kind in RELEASES:
        told[f"release {kind}"] = release(kind, ledger=HERE / "releases" / f"{kind}.jsonl", delta=DELTA).tolist()


def write_saved(told: dict[str, Any]) -> None:
    model, result = train(FIXED / "saved", "private")
    pg.save(model, HERE / "saved" / "model", ledger=result.ledger)
    told["saved"] = weights(model)
    for name, made in extractors().items():
        features.save_extractor(made, HERE / "extractors" / name)
        told[f"extractor {name}"] = made(rows_of(name)).tolist()
    rows, made = make_data().tensors[0], extractors()["fourier"]
    for folder in ("whole", "half"):
        told["cached"] = features.cache(made, rows, HERE / "cached" / folder, block=8, progress=False).tolist()
    blocks = HERE / "cached" / "half" / "blocks.jsonl"
    blocks.write_text("".join(blocks.read_text().splitlines(keepends=True)[:2]))
    for name, head in heads().items():
        head.save(HERE / "heads" / name)
        told[f"head {name}"] = {"outputs": head(asked_of(name)).tolist(), "epsilon": head.epsilon}
        told[f"head {name}"]["predicted"] = head.predict(asked_of(name)).tolist()
        if name == "class":
            (HERE / "pickles").mkdir()
            (HERE / "pickles" / "head.pickle").write_bytes(pickle.dumps(head))
    plan = make_plan(correlation=pg.noise.Banded(2, (1.0, 0.5)))
    (HERE / "pickles" / "plan.pickle").write_bytes(pickle.dumps(plan))
    torch.save(make_head_model(), HERE / "pickles" / "module.pt")
    from privgrad.estimators import PrivateLogisticRegression

    inputs, labels = (value.numpy() for value in make_data().tensors)
    options: dict[str, Any] = {"feature_bounds": (-4.0, 4.0), "steps": 4, "num_examples": 32, "delta": DELTA}
    estimator = PrivateLogisticRegression(classes=[0, 1, 2], target_epsilon=3.0, **options).fit(inputs, labels)
    (HERE / "pickles" / "estimator.pickle").write_bytes(pickle.dumps(estimator))
    told["estimator"] = estimator.predict_proba(inputs).tolist()


def write_budget(told: dict[str, Any]) -> None:
    from privgrad.mechanisms import Release, Selection, Split  # pyright: ignore

    folder = FIXED / "budget"
    with stopping(1000):
        budget_training(folder, stop=True)
    budget = pg.Budget(folder / "budget.jsonl")
    for kind in RELEASES:
        told[f"budget {kind}"] = release(kind, budget=budget, name=kind, ledger=folder / f"{kind}.jsonl").tolist()
    quiet = Release(8.0, 0.25, count=4)
    budget.commit("plain", [quiet], by="a tester")
    budget.commit("selection", [Selection((quiet,), 2.0, 1.0)], by="a tester")
    budget.commit("split", [Split(((quiet,), (Release(9.0, 1.0),)))], by="a tester")
    names = [one.name for one in budget.commitments]
    told["budget"] = {"spent": budget.spent(), "left": budget.left(), "head": budget.head, "names": names}
    shutil.copytree(folder, HERE / "budget")


def without_reports(folder: Path) -> None:
    """Delete what is written again and never read: pages and figures."""
    for path in [*folder.rglob("*.html"), *folder.rglob("*.png"), *folder.rglob("*.svg"), *folder.rglob("*.csv")]:
        path.unlink()


def write_experiments(told: dict[str, Any]) -> None:
    os.chdir(HERE)  # a spec without a file of its own has its data in the working directory
    for name, after in {"whole": 1000, "half": STOP}.items():
        with stopping(after):
            command("train", str(TOML), "--out", str(HERE / "train" / name))
    for kind in COMPARISONS:
        for name, after in {"whole": 1000, "half": 6}.items():
            folder = FIXED / "compare" / f"{kind}-{name}"
            with stopping(after):
                told[f"compare {kind}"] = json.loads(json.dumps(compare(kind, folder)))
    told["compare named"] = json.loads(json.dumps(compare("named", FIXED / "compare" / "named-whole")))
    shutil.copytree(FIXED / "compare", HERE / "compare")
    for place in ("train", "compare"):
        without_reports(HERE / place)


def write_bridges(told: dict[str, Any]) -> None:
    for name, train_by in (("lightning", lightning), ("huggingface", hugging_face)):
        for folder in (HERE / "bridges" / name, FIXED / "bridges" / name):
            folder.mkdir(parents=True)
        with stopping(1000):
            train_by(HERE / "bridges" / name, stop=True)
        told["ends"][name] = {"weights": weights(train_by(FIXED / "bridges" / name)[0])}
    for name in ("rng_state.pth", "training_args.bin"):  # of transformers, and large
        (HERE / "bridges" / "huggingface" / f"checkpoint-{STOP}" / name).unlink()
    for folder in (HERE / "bridges" / "flower", FIXED / "bridges" / "flower"):
        folder.mkdir()
    flower(HERE / "bridges" / "flower", STOP)
    told["ends"]["flower"] = {"weights": weights(flower(FIXED / "bridges" / "flower", STEPS)[0])}


def write_calibration(told: dict[str, Any]) -> None:
    told["calibrated"] = calibrated()


def calibrated() -> float:
    numbers: dict[str, Any] = {"max_grad_norm": 1.0, "num_examples": 32, "expected_batch_size": 8, "steps": 6}
    return pg.PrivacyPlan.for_budget(target_epsilon=2.5, delta=DELTA, **numbers).noise_multiplier


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for place in (FIXED, *(path for path in HERE.iterdir() if path.is_dir())):
        shutil.rmtree(place, ignore_errors=True)
    FIXED.mkdir()
    told: dict[str, Any] = {}
    write_table()
    from conftest import account_by_rdp

    with pytest.MonkeyPatch.context() as patch:
        account_by_rdp(patch)  # as the test: prices and budgets by RDP, which takes less time than PLD
        for write in (write_trainings, write_budget, write_experiments, write_bridges):
            write(told)
    for write in (write_saved, write_calibration):
        write(told)
    told["ledgers"] = {str(path.relative_to(HERE)): epsilons(path) for path in sorted(ledgers())}
    rounded = {name for name in told if name.split()[0] in ("ends", "extractor", "cached", "estimator")}
    told = {name: to_six_digits(found) if name in rounded else found for name, found in told.items()}
    (HERE / "expected.json").write_text(json.dumps(told) + "\n")
    shutil.rmtree(FIXED)


def to_six_digits(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: to_six_digits(value) for name, value in found.items()}
    if isinstance(found, list):
        return [to_six_digits(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def ledgers() -> list[Path]:
    found = [path for path in HERE.rglob("*.jsonl") if b'"plan": {' in path.read_bytes()[:60]]
    return [path for path in found if path.is_file()]


if __name__ == "__main__":
    main()
