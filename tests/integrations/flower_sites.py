"""A Flower app of three hospitals, which `flwr run` starts: digits, protected by hospital or by record.

By hospital, the server is PrivateStrategy; by record, it is FedAvg, and each hospital has a ledger of its own.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.data import by_user
from privgrad.integrations.flower import PrivateStrategy, client_app, record_client_app

SITES, ROUNDS, STEPS = 3, 6, 8
digits: Any = load_digits()
images, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
owners = torch.arange(1500) % SITES
users = by_user((images[:1500], labels[:1500]), owners.tolist(), cap=500)
LOCAL = pg.federated.LocalUpdate(lr=0.5, batch_size=25, epochs=2)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 10)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module) -> float:
    return (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()


def user_plan(**changed: Any) -> pg.PrivacyPlan:
    """Three hospitals, all in each round. So few protect each other little, at any useful noise."""
    numbers: dict[str, Any] = {"noise_multiplier": 0.2, "delta": 0.01, "max_update_norm": 3.0, **changed}
    return pg.PrivacyPlan.for_users(num_users=SITES, expected_cohort_size=SITES, rounds=ROUNDS, user="site", **numbers)


def record_plan(**changed: Any) -> pg.PrivacyPlan:
    """The plan of one hospital, for the records of its 500 patients."""
    numbers: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "steps": ROUNDS * STEPS}
    return pg.PrivacyPlan(sample_rate=0.2, expected_batch_size=100, num_examples=500, **(numbers | changed))


def make_optimizer(model: nn.Module, lr: float = 1.0) -> pg.optim.SGD:
    return pg.optim.SGD(model.named_parameters(), lr=lr)


def site_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def ledger_of(context: Context) -> Path:
    return Path(str(context.run_config["folder"])) / f"hospital-{site_of(context)}.jsonl"


def make_private_grad(context: Context, model: nn.Module) -> pg.PrivateGradient:
    return pg.PrivateGradient(model, loss_fn, record_plan(), ledger=ledger_of(context))


def records_of(context: Context) -> TensorDataset:
    own = owners == site_of(context)
    return TensorDataset(images[:1500][own], labels[:1500][own])


def largest(replies: list[RecordDict], _weighted_by: str) -> MetricRecord:
    """The largest epsilon of the hospitals."""
    return MetricRecord({"epsilon": max(one.metric_records["metrics"]["epsilon"] for one in replies)})  # pyright: ignore


by_hospital = client_app(make_model, loss_fn, lambda _, user: tuple(r[user : user + 1] for r in users.tensors), LOCAL)
by_record = record_client_app(make_model, make_private_grad, make_optimizer, records_of, steps=STEPS)
client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    return (by_record if context.run_config["protects"] == "records" else by_hospital)(message, context)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train on from what is in the folder; die by SIGKILL in the round `dies`, once it is charged."""
    folder, model = Path(str(context.run_config["folder"])), make_model()
    saved, done = folder / "state.pt", 0
    if context.run_config["protects"] == "records":
        strategy: Any = FedAvg(fraction_evaluate=0.0, min_available_nodes=SITES, train_metrics_aggr_fn=largest)
        if saved.exists():
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            done = state["round"]
    else:
        strategy = PrivateStrategy(model, make_optimizer(model), user_plan(), ledger=folder / "ledger.jsonl")
        if saved.exists():
            strategy.load_state_dict(torch.load(saved)["strategy"])
            done = strategy.private_grad.ledger.next_step

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:  # on public data
        if server_round and done + server_round == context.run_config["dies"]:
            (folder / "dying").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model.load_state_dict(arrays.to_torch_state_dict())
        own = {"strategy": strategy.state_dict()} if isinstance(strategy, PrivateStrategy) else {}
        torch.save({"model": model.state_dict(), "round": done + server_round, **own}, folder / "new.pt")
        (folder / "new.pt").replace(saved)
        return MetricRecord({"accuracy": accuracy(model)})

    arrays = ArrayRecord(model.state_dict())
    result = strategy.start(grid, arrays, num_rounds=ROUNDS - done, timeout=120, evaluate_fn=evaluate)
    epsilons = [metrics["epsilon"] for metrics in result.train_metrics_clientapp.values()]
    told = {"accuracy": accuracy(model), "epsilon": epsilons, "stopped": ""}
    try:  # one round more than planned
        if not strategy.start(grid, result.arrays, num_rounds=1, timeout=120).arrays:
            told["stopped"] = "no hospital answers"
    except pg.BudgetExceededError as error:
        told["stopped"] = f"{error}"
    if isinstance(strategy, PrivateStrategy):
        strategy.private_grad.ledger.close()
    (folder / "told.json").write_text(json.dumps(told))
