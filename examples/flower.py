"""Train one model privately with Flower: one server and four devices, each in its own process.

Shows   PrivateStrategy for the ServerApp, client_app for devices. A deployment needs certificates and more devices.
Needs   pip install '.[flower,experiments]'.
Run     python examples/flower.py
Prints  Flower's log, with the accuracy on held-out digits after each round, and the user-level epsilon.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits
from torch import Tensor, nn, tensor

import privgrad as pg
from privgrad.data import by_user
from privgrad.integrations.flower import PrivateStrategy, client_app

USERS, PORT, FOLDER = 4, 18000, Path("runs/flower").absolute()
APP = f"""project = {{ name = "private-digits", version = "1.0.0" }}
[tool.flwr.app]
publisher = "privgrad"
components = {{ serverapp = "flower:server", clientapp = "flower:client" }}
config = {{ ledger = "{FOLDER / "ledger.jsonl"}" }}"""
digits = load_digits()
images, labels = tensor(digits.data / 16).float(), tensor(digits.target)
users = by_user((images[:1400], labels[:1400]), [index % USERS for index in range(1400)], cap=350)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data_of(context: Context, user: int) -> tuple[Tensor, ...]:  # a real device has the data of one user only
    return tuple(rows[user : user + 1] for rows in users.tensors)


client = client_app(lambda: nn.Linear(64, 10), loss_fn, data_of, pg.federated.LocalUpdate(lr=0.5, batch_size=35))
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    plan = pg.PrivacyPlan.for_users(
        num_users=USERS, expected_cohort_size=2, rounds=3, max_update_norm=1.0, delta=0.01, noise_multiplier=1.0
    )
    model = nn.Linear(64, 10)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
    strategy = PrivateStrategy(model, optimizer, plan, ledger=context.run_config["ledger"])

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:  # on public data
        return MetricRecord({"accuracy": (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()})

    strategy.start(grid, strategy.arrays, num_rounds=plan.steps, timeout=60, evaluate_fn=evaluate)
    print(f"epsilon {strategy.private_grad.ledger.epsilon(delta=0.01):.2f} for each user")


if __name__ == "__main__":
    FOLDER.mkdir(parents=True)
    shutil.copy(__file__, FOLDER)
    (FOLDER / "pyproject.toml").write_text(APP)
    (FOLDER / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{PORT}"\ninsecure = true\n')
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"PATH": path, "FLWR_HOME": str(FOLDER), "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
    node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{PORT}", "--port"]
    devices = ([*node, f"{PORT + 1 + user}"] for user in range(USERS))
    commands = [["flower-superlink", "--insecure", "--port", f"{PORT}"], *devices]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    try:
        while subprocess.run(["flwr", "run", str(FOLDER), "here", "--stream"], check=False).returncode:
            pass  # the SuperLink has not started yet
    finally:
        for process in processes:
            process.terminate()
