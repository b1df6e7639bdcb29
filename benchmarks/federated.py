"""CPU time of a round: the simulation, whose users train side by side, against a loop that trains a copy for each."""

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.data import by_user
from privgrad.perturb.local_training import LocalUpdate

ROUNDS, WARM_UP = 10, 34  # the engine looks closely at calls 1, 2, 4, 8, 16, 32
USERS, COHORTS = 300, (20, 100)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def made_up(inputs: Callable[[int], Tensor], classes: int) -> TensorDataset:
    """Users of 5 to 60 examples."""
    torch.manual_seed(0)
    owners = [user for user in range(USERS) for _ in range(5 + user % 56)]
    return by_user((inputs(len(owners)), torch.randint(0, classes, (len(owners),))), owners, cap=60)


WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int]] = {
    "linear, 64 features, 10 classes": (lambda: nn.Linear(64, 10), lambda n: torch.randn(n, 64), 10),
    "linear, 784 features, 62 classes": (lambda: nn.Linear(784, 62), lambda n: torch.randn(n, 784), 62),
    "bag of 10,000 words, 500 tags": (
        lambda: nn.EmbeddingBag(10_000, 500, padding_idx=0),
        lambda n: torch.randint(1, 10_000, (n, 60)),
        500,
    ),
    "mlp 784-128-62": (
        lambda: nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 62)),
        lambda n: torch.randn(n, 784),
        62,
    ),
}


def loop_round(model: nn.Module, cohort: Any, local: LocalUpdate, bound: float) -> dict[str, Tensor]:
    """The clipped sum of a cohort's updates, one user after the other."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    *tensors, counts = cohort
    for user, count in enumerate(counts.tolist()):
        own = copy.deepcopy(model)
        for start in range(0, count, local.batch_size):
            part = slice(start, min(start + local.batch_size, count))
            own.zero_grad()
            cross_entropy(own, tuple(tensor[user, part] for tensor in tensors)).mean().backward()
            with torch.no_grad():
                for parameter in own.parameters():
                    assert parameter.grad is not None
                    parameter -= local.lr(0) * parameter.grad
        with torch.no_grad():
            pairs = zip(model.named_parameters(), own.parameters(), strict=True)
            update = {name: before - after for (name, before), after in pairs}
            norm = float(torch.stack([value.square().sum() for value in update.values()]).sum().sqrt())
            for name, value in update.items():
                total[name] += min(1.0, bound / max(norm, 1e-12)) * value
    return total


def measured(
    cohort_size: int, make: Callable[[], nn.Module], inputs: Callable[[int], Tensor], classes: int
) -> tuple[float, float]:
    """Median CPU seconds of a round: ours, noise, charge and all; and the loop, which adds torch's own noise."""
    torch.manual_seed(0)
    model, users, local = make(), made_up(inputs, classes), LocalUpdate(0.1, batch_size=20)
    plan = pg.PrivacyPlan.for_users(
        num_users=USERS,
        expected_cohort_size=cohort_size,
        rounds=WARM_UP + ROUNDS,
        max_update_norm=1.0,
        delta=1 / USERS,
        noise_multiplier=1.0,
    )
    private_update = pg.PrivateGradient(model, cross_entropy, plan, perturb=local)
    ours, theirs = list[float](), list[float]()
    for cohort in plan.batches(users):
        began = time.process_time()
        private_update(cohort)
        middle = time.process_time()
        if cohort.sampling.step < WARM_UP:
            continue
        for value in loop_round(model, cohort.examples, local, 1.0).values():
            value.add_(torch.randn_like(value)).div_(cohort_size)
        ours.append(middle - began)
        theirs.append(time.process_time() - middle)
    return statistics.median(ours), statistics.median(theirs)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table("model", "users a round", "simulation, ms", "loop, ms", "times faster", title="One thread")
    for name, row in WORKLOADS.items():
        for cohort_size in COHORTS:
            ours, theirs = measured(cohort_size, *row)
            table.add_row(name, f"{cohort_size}", f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{theirs / ours:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
