"""Train one model privately with NVFlare: a server and three sites, in its simulator.

Shows   PrivateSite under NVFlare's FedAvg, and with `sites` PrivateController, under which whole sites are protected.
Needs   pip install '.[nvflare,experiments]'.
Run     python examples/nvflare_digits.py. If it is killed, run it again: it resumes.
Prints  NVFlare's log; the accuracy on held-out digits, with the epsilon of each record, or of each site by round.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from sklearn.datasets import load_digits
from torch import Tensor, nn, tensor
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.data import by_user
from privgrad.integrations.nvflare import PrivateController, PrivateSite, site_update

SITES, ROUNDS, FOLDER = ["clinic-a", "clinic-b", "clinic-c"], 3, Path("runs/nvflare").absolute()
digits = load_digits()
images, labels = tensor(digits.data / 16).float(), tensor(digits.target)


class Net(nn.Linear):  # NVFlare makes it again, from the arguments of its constructor
    def __init__(self) -> None:
        super().__init__(64, 10)


class Consortium(PrivateController):
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:  # on public data
        return {"accuracy": accuracy(model)}


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def site(kind: str, folder: Path) -> None:
    """What each site runs."""
    import nvflare.client as flare

    flare.init()
    name = flare.get_site_name()
    mine = slice(SITES.index(name), 1400, len(SITES))  # a real site has its own data only
    model, data = Net(), TensorDataset(images[mine], labels[mine])
    if kind == "records":
        plan = pg.PrivacyPlan.for_budget(
            target_epsilon=4.0,
            delta=1e-4,
            num_examples=len(data),
            expected_batch_size=64,
            steps=ROUNDS * 20,
            max_grad_norm=1.0,
        )
        optimizer = pg.optim.SGD(model.named_parameters(), lr=2.0)
        private = PrivateSite(model, loss_fn, data, optimizer, plan, folder=folder / name, steps=20)
        while flare.is_running():
            flare.send(private.train(flare.receive()))
    else:
        row = tuple(by_user(data.tensors, [0] * len(data), cap=len(data)).tensors)
        local = pg.federated.LocalUpdate(lr=0.5, batch_size=35)
        while flare.is_running():
            flare.send(site_update(flare.receive(), model, loss_fn, row, local))


def job(kind: str, folder: Path) -> FedJob:
    """Return a job that protects each record of a site, or all records of a site together."""
    made = FedJob(f"private-{kind}", min_clients=len(SITES))
    if kind == "records":
        made.to_server(FedAvg(num_clients=len(SITES), num_rounds=ROUNDS))
        made.to_server(PTModel(Net()))
    else:
        plan = pg.PrivacyPlan.for_users(
            num_users=3, expected_cohort_size=2, rounds=ROUNDS, max_update_norm=1.0, delta=0.01, noise_multiplier=1.0
        )
        made.to_server(Consortium(Net(), plan, f"{folder}", sites=SITES, timeout=60))
    for name in SITES:
        made.to(ScriptRunner(__file__, script_args=f"{kind} {folder}"), name)
    return made


if __name__ == "__main__":
    kind, *others = sys.argv[1:] or ["records"]
    if others:  # started by NVFlare
        site(kind, Path(others[0]))
    else:
        job(kind, FOLDER / kind).simulator_run(f"{FOLDER}/workspace", log_config="concise")
        if kind == "records":
            found = torch.load(FOLDER / "workspace/server/simulate_job/app_server/FL_global_model.pt")["model"]
            model = Net()
            model.load_state_dict({name: torch.as_tensor(value) for name, value in found.items()})
            epsilon = max(
                pg.Ledger(path, read_only=True).epsilon(delta=1e-4) for path in FOLDER.glob("records/*/*.jsonl")
            )
            print(f"accuracy {accuracy(model):.3f}, epsilon {epsilon:.2f} for each record")
