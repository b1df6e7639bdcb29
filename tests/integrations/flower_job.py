"""What test_flower trains, with whom, and the processes it does so in."""

import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.serverapp import ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid
from flwr.superlink.runtime.run_serverapp import run_serverapp
from flwr.supernode.fleet_http_connection import http_request_response
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model
from privgrad.data.dataset import by_user
from privgrad.integrations.flower import PrivateStrategy, client_app
from privgrad.perturb.local_training import LocalUpdate

USERS, NORM = 8, 0.5
LOCAL = LocalUpdate(lambda step: 0.2 / (1 + step), batch_size=2)


def make_users() -> TensorDataset:
    return by_user(make_data(5 * USERS).tensors, [index % USERS for index in range(5 * USERS)], cap=5)


def make_plan(**changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {"expected_cohort_size": 4, "rounds": 3, "noise_multiplier": 1.0, "seed": 3, **changed}
    return pg.PrivacyPlan.for_users(num_users=USERS, max_update_norm=NORM, delta=1e-3, **numbers)


def make_strategy(plan: pg.PrivacyPlan, **options: Any) -> PrivateStrategy:
    model = make_model()
    return PrivateStrategy(model, pg.optim.SGD(model.named_parameters(), lr=1.0), plan, **options)


def row(_context: Any, user: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[user : user + 1] for tensor in make_users().tensors)


def killed(_update: ArrayRecord) -> ArrayRecord:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def failing(_update: ArrayRecord) -> ArrayRecord:
    raise RuntimeError("the label of my third example is 2")


def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[..., ArrayRecord]:
    return lambda update: ArrayRecord(change(dict(update.to_torch_state_dict())))


def first(update: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(iter(update))
    return update | {name: change(update[name])}


FAULTS: dict[str, Callable[[ArrayRecord], ArrayRecord]] = {
    "none": lambda update: update,
    "killed": killed,
    "failing": failing,
    "nan": changed(lambda update: first(update, lambda value: value.where(value != value[0, 0], torch.nan))),
    "infinite": changed(lambda update: first(update, lambda value: value / 0)),
    "huge": changed(lambda update: {name: 1e6 * value for name, value in update.items()}),
    "overflowing": changed(lambda update: {name: 1e38 * value.sign() for name, value in update.items()}),
    "wrong shape": changed(lambda update: first(update, lambda value: value[:1])),
    "integers": changed(lambda update: {name: (100 * value).int() for name, value in update.items()}),
    "missing name": changed(lambda update: dict(list(update.items())[1:])),
    "additional name": changed(lambda update: update | {"more": torch.ones(3)}),
    "other names": changed(lambda update: {f"x{name}": value for name, value in update.items()}),
    "no arrays": lambda update: ArrayRecord(),
}


def make_app(precondition: Any = None) -> ClientApp:
    """client_app, but for the fault that the round's configuration asks of a user."""
    honest, app = client_app(make_model, loss_fn, row, LOCAL, precondition=precondition), ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        config = message.content.config_records["config"]
        update = FAULTS[str(config.get(f"fault-{config['user']}", "none"))](reply.content.array_records["arrays"])
        return Message(RecordDict({"arrays": update}), reply_to=message)

    return app


server = ServerApp()


@server.main()
def main(grid: Any, context: Context) -> None:
    """Three rounds with all; then two in which of eight users two die at work, and four send nonsense."""
    folder = Path(str(context.run_config["folder"]))
    strategy = make_strategy(make_plan(), ledger=folder / "all.jsonl")
    strategy.start(grid, strategy.arrays, num_rounds=3, timeout=120)
    torch.save(strategy.state_dict()["model"], folder / "all.pt")
    strategy = make_strategy(
        make_plan(expected_cohort_size=USERS, rounds=2, noise_multiplier=0.0), ledger=folder / "some.jsonl"
    )
    kinds = ["killed", "killed", "nan", "huge", "wrong shape", "missing name", "additional name", "none"]
    faults = ConfigRecord({f"fault-{user}": kind for user, kind in enumerate(kinds)})
    strategy.start(grid, strategy.arrays, num_rounds=2, timeout=6, train_config=faults)
    torch.save(strategy.state_dict()["model"], folder / "some.pt")


def device(address: str) -> None:
    """A SuperNode that runs its app in its own process: Flower's starts another, for seconds, each time."""
    torch.set_num_threads(1)
    app = make_app()
    with http_request_response(address, insecure=True) as connection:
        node, receive, send, _, _, pull_object, push_object, confirm = connection
        TaskIdentity.task_id = TaskIdentity.node_id = node
        while True:
            while (found := receive()) is None:
                time.sleep(0.1)
            metadata, tree = found[0].metadata, found[1]
            TaskIdentity.run_id = run = metadata.run_id
            ids = [part.object_id for part in iterate_object_tree(tree)]
            contents = pull_objects(ids, pull_object_fn=lambda name, run=run: pull_object(run, name))
            confirm(run, metadata.message_id)
            message: Any = inflate_object_from_contents(metadata.message_id, contents)
            message.metadata.__dict__["_message_id"] = metadata.message_id
            reply = app(message, Context(run, node, {}, RecordDict(), {}))
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = send(reply, get_object_tree(reply), 0.0)
            for name, part in get_all_nested_objects(reply).items():
                if name in wanted:
                    push_object(run, session, name, part.deflate())


def serve(address: str, home: Path) -> None:
    """Run the next server app that is asked for, as flwr-serverapp does."""
    torch.set_num_threads(1)
    os.environ["FLWR_HOME"] = str(home)
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    # Flower's grid looks for answers every three seconds.
    http_grid.__dict__["time"] = SimpleNamespace(time=time.time, sleep=lambda _seconds: time.sleep(0.1))
    request = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    while not (task := client.AcquireTask(request)).token:
        time.sleep(0.2)
    run_serverapp(address, queue.Queue(), task.token, insecure=True)


_APP = """
[project]
name = "privgrad-test"
version = "1.0.0"
[tool.flwr.app]
publisher = "privgrad"
components = { serverapp = "started:server", clientapp = "started:client" }
config = { folder = "" }
"""
_STARTED = """
import flower_job
server = flower_job.server
client = flower_job.make_app()
"""


def run_everything(folder: Path) -> list[int | None]:
    """What `server` does, over a SuperLink of the loopback; the exit codes of server and devices, None who lives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, app = f"127.0.0.1:{port}", folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(_APP)
    (app / "started.py").write_text(_STARTED)
    (folder / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\ninsecure = true\n')
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flower_job", "torch._dynamo"])
    processes = [
        context.Process(target=serve, args=(address, folder)),
        *(context.Process(target=device, args=(address,)) for _ in range(USERS)),
    ]
    commands, environment = Path(sys.executable).parent, os.environ | {"FLWR_HOME": str(folder)}
    with (folder / "superlink.log").open("w") as log:
        command = [commands / "flower-superlink", "--insecure", "--isolation", "process", "--port", str(port)]
        link = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            for process in processes:
                process.start()
            while not listens(port):
                assert link.poll() is None
                time.sleep(0.2)
            command = [commands / "flwr", "run", app, "here", "--run-config", f"folder='{folder}'"]
            subprocess.run(command, env=environment, check=True)
            processes[0].join()
            return [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
            link.terminate()
            link.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
