"""The jobs that test_nvflare runs in NVFlare's simulator: this file starts them, and each site runs it too."""
# pyright: reportMissingImports=false

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.client.config import TransferType
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.job_config.script_runner import ScriptRunner
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.data import by_user
from privgrad.integrations.nvflare import PrivacyNoise, PrivateController, site_update

SITES, ROUNDS = ["clinic-a", "clinic-b", "clinic-c"], 8
LOCAL = pg.federated.LocalUpdate(lr=0.5, batch_size=20)
CENTERS = 2 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)


class Consortium(PrivateController):
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"accuracy": accuracy(model)}


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    return CENTERS[labels] + 1.5 * torch.randn(count, 6, generator=generator), labels


def row(site: int) -> tuple[Tensor, ...]:
    return tuple(by_user(examples(100, site + 1), [0] * 100, cap=100).tensors)


def accuracy(model: nn.Module) -> float:
    inputs, labels = examples(500, 9)
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).float().mean().item()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan() -> pg.PrivacyPlan:
    return pg.PrivacyPlan.for_users(
        num_users=3, expected_cohort_size=2, rounds=ROUNDS, max_update_norm=1.0, delta=0.01, noise_multiplier=0.1
    )


def simulated() -> float:
    """The accuracy after the same rounds in our own simulation."""
    model = Net()
    private_grad = pg.PrivateGradient(model, loss_fn, plan(), perturb=LOCAL)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
    users = TensorDataset(*(torch.cat(parts) for parts in zip(*(row(site) for site in range(3)), strict=True)))
    for batch in plan().batches(users):
        optimizer.step(grad=private_grad(batch))
    return accuracy(model)


def site(kind: str) -> None:
    import nvflare.client as flare

    flare.init()
    mine = row(SITES.index(flare.get_site_name()))
    while flare.is_running():
        received = flare.receive()
        if received is None:
            return
        if kind != "sites":  # an ordinary script: of FedAvg, which tells no bound
            received.meta |= {"max_update_norm": 1.0, "trained": ["weight", "bias"]}
        flare.send(site_update(received, Net(), loss_fn, mine, LOCAL))


def job(kind: str, folder: Path) -> FedJob:
    made = FedJob(kind, min_clients=1)
    noise = pg.PrivacyPlan.for_users(
        num_users=1, expected_cohort_size=1, rounds=2, max_update_norm=1.0, delta=0.01, noise_multiplier=1.0
    )
    if kind == "sites":
        made.to_server(Consortium(Net(), plan(), f"{folder}", sites=SITES, timeout=60))
    else:
        made.to_server(FedAvg(num_clients=3, num_rounds=3))
        made.to_server(PTModel(Net()))
    if kind == "noise-server":
        made.to_server(PrivacyNoise(noise, f"{folder}"), tasks=["train"], filter_type=FilterType.TASK_RESULT)
    for name in SITES:
        runner = ScriptRunner(__file__, script_args=f"site {kind}", params_transfer_type=TransferType.DIFF)
        made.to(runner, name)
        if kind == "noise-clients":
            filters = PrivacyNoise(noise, f"{folder}")
            made.to(filters, name, tasks=["train"], filter_type=FilterType.TASK_RESULT)
    return made


if __name__ == "__main__":
    if sys.argv[1] == "site":
        site(sys.argv[2])
    else:
        made = job(sys.argv[1], Path(sys.argv[1]).absolute())
        sys.exit(made.simulator_run(f"{Path('workspace').absolute()}", log_config="concise"))
