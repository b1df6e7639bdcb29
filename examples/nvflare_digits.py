"""Train one model privately with NVFlare: a server and three sites, in its simulator.

Shows   PrivateSite under NVFlare's FedAvg: each site protects its own records.
Needs   pip install '.[nvflare,experiments]'.
Run     python examples/nvflare_digits.py; once more only after you removed runs/nvflare.
Prints  NVFlare's log; the accuracy on held-out digits, with the epsilon of each record.
"""

import sys
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
from privgrad.integrations.nvflare import PrivateSite

SITES, ROUNDS, FOLDER = ["clinic-a", "clinic-b", "clinic-c"], 3, Path("runs/nvflare").absolute()
digits = load_digits()
images, labels = tensor(digits.data / 16).float(), tensor(digits.target)


class Net(nn.Linear):  # NVFlare makes it again, from the arguments of its constructor
    def __init__(self) -> None:
        super().__init__(64, 10)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def site(folder: Path) -> None:
    """What each site runs."""
    import nvflare.client as flare

    flare.init()
    name = flare.get_site_name()
    mine = slice(SITES.index(name), 1400, len(SITES))  # a real site has its own data only
    model, data = Net(), TensorDataset(images[mine], labels[mine])
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


if __name__ == "__main__":
    if sys.argv[1:]:  # started by NVFlare
        site(Path(sys.argv[1]))
    else:
        job = FedJob("private-records", min_clients=len(SITES))
        job.to_server(FedAvg(num_clients=len(SITES), num_rounds=ROUNDS))
        job.to_server(PTModel(Net()))
        for name in SITES:
            job.to(ScriptRunner(__file__, script_args=f"{FOLDER}"), name)
        job.simulator_run(f"{FOLDER}/workspace", log_config="concise")
        found = torch.load(FOLDER / "workspace/server/simulate_job/app_server/FL_global_model.pt")["model"]
        model = Net()
        model.load_state_dict({name: torch.as_tensor(value) for name, value in found.items()})
        accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
        spent = max(pg.Ledger(path, read_only=True).epsilon(delta=1e-4) for path in FOLDER.glob("clinic-*/*.jsonl"))
        print(f"accuracy {accuracy:.3f}, epsilon at most {spent + 0.005:.2f} for each record")
