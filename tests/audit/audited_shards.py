"""Jobs that audit steps of a sharded model: the first process plays, and the others take part in each release."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from conftest import make_plan
from privgrad import audit, private_gradient
from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Release
from privgrad.audit import methods
from privgrad.private_gradient import PrivateGradient
from privgrad.processes import Processes
from privgrad.types import ClippedSum

CANARIES, DELTA = 64, 1e-5
NOISE = {1.0: 0.6004775724359744, 0.5: 0.8850187024263719}  # by rate: what calibration finds for epsilon 8


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of a one-hot input, the squared error of that output: its gradient has one number, on the diagonal."""
    inputs, targets = batch
    return ((model(inputs) * inputs).sum(1) - targets).square()


def released(processes: Processes, rate: float, steps: int) -> Callable[[Any], Tensor]:
    """The diagonals of so many releases, added up. Half of its numbers are shards of either process."""
    model = nn.Sequential(nn.Linear(CANARIES, CANARIES, bias=False))
    nn.init.zeros_(model.get_parameter("0.weight"))
    fully_shard(model, mesh=init_device_mesh("cpu", (processes.count,)))
    size = round(rate * CANARIES)
    numbers = {"sample_rate": rate, "expected_batch_size": size, "num_examples": CANARIES, "steps": 10**9}
    plan = make_plan(noise_multiplier=NOISE[rate], **numbers)
    private_grad = PrivateGradient(model, losses, plan, processes=processes)
    beginning = private_grad.state_dict()

    def release(data: TensorDataset) -> Tensor:
        private_grad.load_state_dict(beginning)
        drawn = islice(plan.batches(data, processes=processes), steps)
        totals = [processes.gather_state(private_grad(batch)["0.weight"]) for batch in drawn]
        return torch.stack(totals).sum(0).diagonal().double()

    return release


def audited(processes: Processes, rate: float, steps: int, runs: int) -> dict[str, Any]:
    release = released(processes, rate, steps)
    if processes.rank > 0:
        while tensors := processes.broadcast_object(tuple[Tensor, ...]()):
            release(TensorDataset(*tensors))
        return {}

    def together(data: TensorDataset) -> Tensor:
        processes.broadcast_object(data.tensors)
        return release(data)

    claimed = Release(NOISE[rate], rate, count=steps)
    data = methods._data(replace(audit.METHODS["factored"], canaries=CANARIES), rate)
    claim = accounting.epsilon([claimed], delta=DELTA)
    game = audit.Game("shards", together, data, torch.eye(CANARIES, dtype=torch.float64), claim, DELTA, claimed)
    found = audit.distinguish(game, trials=runs * CANARIES, confidence=0.9999)
    processes.broadcast_object(())
    return found.as_record()


def audited_step(processes: Processes, folder: Path) -> dict[str, Any]:
    return audited(processes, 1.0, 1, 60)


def audited_training(processes: Processes, folder: Path) -> dict[str, Any]:
    return audited(processes, 0.5, 4, 150)


def audited_fault(processes: Processes, folder: Path) -> dict[str, Any]:
    """As `audited_step`, with half of the noise in the shards of one process."""
    honest = private_gradient.add_noise

    def less(clipped: ClippedSum, **options: Any) -> Any:
        share = 0.5 if processes.rank == 1 else 1.0
        return honest(clipped, **options | {"noise_multiplier": share * options["noise_multiplier"]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_gradient, "add_noise", less)
        return audited(processes, 1.0, 1, 150)  # more runs, because half of the canaries have all noise
