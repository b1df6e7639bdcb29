"""Trainings in two processes, each of which must count its releases as the other does.

A scenario takes the processes and a folder of its own. It returns the ledger of this process, and the number of
releases that it must hold.
"""

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.data import by_user
from privgrad.federated import LocalUpdate
from privgrad.noise.banded import Banded
from privgrad.perturb import SAT
from privgrad.processes import Processes

STEPS, DATA = 6, make_data()
STOP = pg.EarlyStopping(monitor="loss", patience=2, mode="min", data="public")  # after the third evaluation
AT_ONCE = pg.EarlyStopping(monitor="nothing", patience=1, mode="min", data="public")  # after the first one
Found = tuple[pg.Ledger, int]
Scenario = Callable[[Processes, Path], Found]
# Rates at which no process will have an empty batch, whose loss would not fail.
LARGE: dict[str, Any] = {"steps": STEPS, "sample_rate": 0.75, "expected_batch_size": 24}
PLAN, SEEDED = make_plan(**LARGE), make_plan(**LARGE, seed=3)
TURNS = make_plan(**LARGE | {"sample_rate": 0.5, "expected_batch_size": 16}, correlation=Banded(2))


class FailingError(Exception):
    """Of a loss."""


class Trouble:
    """A loss that fails in some processes after some steps of `fit`, or kills them."""

    def __init__(self, processes: Processes, *, after: int, ranks: tuple[int, ...] = (0, 1), kill: bool = False):
        self.evaluations, self.after, self.kill, self.here = 0, after, kill, processes.rank in ranks

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.here and self.evaluations > self.after:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise FailingError
        return loss_fn(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.evaluations += 1  # once before the first step, then after each
        return evaluate(model)


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"loss": 1.0, "nothing": float("nan")}


def made(
    processes: Processes, plan: pg.PrivacyPlan = PLAN, *, loss: Any = loss_fn, **options: Any
) -> pg.PrivateGradient:
    return pg.PrivateGradient(make_model(), loss, plan, processes=processes, **options)


def fitted(private_grad: pg.PrivateGradient, **options: Any) -> Found:
    """A whole training by `fit`."""
    optimizer = pg.optim.SGD(private_grad.model.named_parameters(), lr=0.1)
    given: dict[str, Any] = {"evaluate": evaluate, "num_evaluations": STEPS, "progress": False} | options
    return pg.fit(private_grad, optimizer, given.pop("data", DATA), **given).ledger, private_grad.plan.steps


def looped(private_grad: pg.PrivateGradient, stop: int = STEPS, *, start: int = 0, **given: Any) -> Found:
    """A loop of the user's own, to the step `stop`."""
    plan, processes = private_grad.plan, private_grad.processes
    optimizer = pg.optim.SGD(private_grad.model.named_parameters(), lr=0.1)
    for batch in plan.batches(given.get("data", DATA), processes=processes, start=start):
        if batch.sampling.step < stop:
            optimizer.step(grad=private_grad(batch))
    return private_grad.ledger, stop


def interrupted(
    processes: Processes,
    plan: pg.PrivacyPlan = PLAN,
    *,
    after: int = 3,
    ranks: tuple[int, ...] = (0, 1),
    kill: bool = False,
    **options: Any,
) -> pg.PrivateGradient:
    """A run of `fit` that a loss ends; without `save_seconds`, its steps are lost."""
    trouble = Trouble(processes, after=after, ranks=ranks, kill=kill)
    private_grad = made(processes, plan, loss=trouble.loss)
    with pytest.raises((FailingError, pg.PrivacyError)):
        fitted(private_grad, evaluate=trouble.evaluate, **options)
    return private_grad


def killed(processes: Processes, folder: Path) -> None:
    """A job of its own: the last process is killed, and the first one ends with an error."""
    (folder / "killed").mkdir(exist_ok=True)
    interrupted(processes, ranks=(1,), kill=True, output_dir=folder / "killed", save_seconds=0.0)
    os._exit(0)  # without a farewell to the others


def after_a_kill(processes: Processes, folder: Path) -> Found:
    assert (folder / "ledger.jsonl").read_text().count('"draw"') == 3
    return fitted(made(processes), output_dir=folder)


def plain(processes: Processes, folder: Path) -> Found:
    return fitted(made(processes))


def with_a_folder(processes: Processes, folder: Path) -> Found:
    return fitted(made(processes), output_dir=folder)


def early_stop(processes: Processes, folder: Path) -> Found:
    return fitted(made(processes), stop=STOP, output_dir=folder)


def stop_at_the_first_evaluation(processes: Processes, folder: Path) -> Found:
    return fitted(made(processes), stop=AT_ONCE)


def evaluation_in_one_process(processes: Processes, folder: Path) -> Found:
    """Only the first process evaluates, and never stops."""
    numbers = iter(range(100, 0, -1))

    def own(model: nn.Module) -> dict[str, float]:
        return {"loss": float(next(numbers))} if processes.rank == 0 else {}

    return fitted(made(processes), stop=STOP, evaluate=own)


def sharded_early_stop(processes: Processes, folder: Path) -> Found:
    model = make_model()
    fully_shard(model)
    return fitted(pg.PrivateGradient(model, loss_fn, PLAN, processes=processes), stop=STOP, output_dir=folder)


def failure_in_one_process(processes: Processes, folder: Path) -> Found:
    return interrupted(processes, ranks=(1,)).ledger, 3


def failure_in_all_processes(processes: Processes, folder: Path) -> Found:
    return interrupted(processes, output_dir=folder).ledger, 3


def failure_before_the_first_step(processes: Processes, folder: Path) -> Found:
    return interrupted(processes, after=0).ledger, 0


def resumed(processes: Processes, folder: Path) -> Found:
    interrupted(processes, output_dir=folder, save_seconds=0.0)
    return fitted(made(processes), output_dir=folder)


def resumed_after_an_early_stop(processes: Processes, folder: Path) -> Found:
    early_stop(processes, folder)
    return early_stop(processes, folder)


def lost_steps(processes: Processes, folder: Path) -> Found:
    interrupted(processes, output_dir=folder)
    return fitted(made(processes), output_dir=folder)


def lost_steps_and_an_early_stop(processes: Processes, folder: Path) -> Found:
    interrupted(processes, output_dir=folder, after=2)
    return fitted(made(processes), output_dir=folder, stop=AT_ONCE)


def goes_on_in_the_same_processes(processes: Processes, folder: Path) -> Found:
    trouble = Trouble(processes, after=3)
    private_grad = made(processes, loss=trouble.loss)
    with pytest.raises(FailingError):
        fitted(private_grad, evaluate=trouble.evaluate, output_dir=folder)
    trouble.here = False
    return fitted(private_grad, output_dir=folder)


def seeded_lost_steps(processes: Processes, folder: Path) -> Found:
    interrupted(processes, SEEDED, output_dir=folder)
    return fitted(made(processes, SEEDED), output_dir=folder)


def noise_with_memory(processes: Processes, folder: Path) -> Found:
    return fitted(made(processes, TURNS))


def noise_with_memory_and_lost_steps(processes: Processes, folder: Path) -> Found:
    """The groups begin again at step 4, so that five steps are taken."""
    interrupted(processes, TURNS, output_dir=folder)
    return fitted(made(processes, TURNS), output_dir=folder)[0], 5


def noise_with_memory_and_an_early_stop(processes: Processes, folder: Path) -> Found:
    """After three steps; those that are left begin with step 4."""
    return fitted(made(processes, TURNS), stop=STOP)[0], 5


def budget(processes: Processes, folder: Path) -> Found:
    plan = make_plan(steps=STEPS, delta=1e-3, num_examples=32)
    facts: dict[str, Any] = {"delta": 1e-3, "num_examples": 32, "privacy_unit": "example"}
    ledger = None
    if processes.rank == 0:
        ledger = pg.Budget(folder / "budget.jsonl", total_epsilon=50.0, **facts).open_ledger(folder / "a.jsonl", plan)
    return fitted(made(processes, plan, ledger=ledger), stop=STOP)


def users(processes: Processes, folder: Path) -> Found:
    plan = pg.PrivacyPlan.for_users(
        num_users=8, expected_cohort_size=4, rounds=STEPS, max_update_norm=0.5, delta=1e-2, noise_multiplier=1.0
    )
    inputs, labels = DATA.tensors
    data = by_user((inputs, labels), [row % 8 for row in range(32)], cap=4)
    return fitted(made(processes, plan, perturb=LocalUpdate(0.1, batch_size=2)), data=data, stop=AT_ONCE)


def own_loop(processes: Processes, folder: Path) -> Found:
    return looped(made(processes, ledger=folder / "ledger.jsonl"))


def own_loop_with_a_path_in_one_process(processes: Processes, folder: Path) -> Found:
    return looped(made(processes, ledger=folder / "ledger.jsonl" if processes.rank == 0 else None))


def own_loop_with_a_ledger_for_two_trainings(processes: Processes, folder: Path) -> Found:
    ledger = pg.Ledger()
    looped(made(processes, ledger=ledger), 2)
    return looped(made(processes, ledger=ledger), start=2)


def own_loop_resumed(processes: Processes, folder: Path) -> Found:
    private_grad = made(processes, ledger=folder / "ledger.jsonl")
    looped(private_grad, 3)
    state = private_grad.state_dict()
    private_grad.ledger.close()
    private_grad = made(processes, ledger=folder / "ledger.jsonl")
    private_grad.load_state_dict(state)
    return looped(private_grad, start=private_grad.ledger.next_step)


def own_loop_resumed_without_a_state(processes: Processes, folder: Path) -> Found:
    private_grad = made(processes, TURNS, ledger=folder / "ledger.jsonl")
    looped(private_grad, 3)
    private_grad.ledger.close()
    private_grad = made(processes, TURNS, ledger=folder / "ledger.jsonl")
    return looped(private_grad, start=private_grad.ledger.next_step)[0], 5


def budget_exceeded(processes: Processes, folder: Path) -> Found:
    private_grad = made(processes)
    looped(private_grad)
    with pytest.raises(pg.BudgetExceededError):
        looped(private_grad, 1)
    return private_grad.ledger, STEPS


def adaptive_clip(processes: Processes, folder: Path) -> Found:
    return fitted(made(processes, adaptive_clip=pg.clip.TargetFraction(), perturb=SAT(0.05)), stop=STOP)


def empty_batches(processes: Processes, folder: Path) -> Found:
    return fitted(made(processes, make_plan(steps=STEPS, sample_rate=1 / 32, expected_batch_size=1)))


def observer_that_fails(processes: Processes, folder: Path) -> Found:
    """In one process, after the charge of the last step."""

    def fail(step: object) -> None:
        if processes.rank == 1:
            raise FailingError

    private_grad = made(processes, plan := make_plan(steps=1))
    private_grad.register_raw_observer(fail)
    with suppress(FailingError):
        looped(private_grad, 1)
    return private_grad.ledger, plan.steps


SCENARIOS: list[Scenario] = [
    after_a_kill,
    plain,
    with_a_folder,
    early_stop,
    stop_at_the_first_evaluation,
    evaluation_in_one_process,
    sharded_early_stop,
    failure_in_one_process,
    failure_in_all_processes,
    failure_before_the_first_step,
    resumed,
    resumed_after_an_early_stop,
    lost_steps,
    lost_steps_and_an_early_stop,
    goes_on_in_the_same_processes,
    seeded_lost_steps,
    noise_with_memory,
    noise_with_memory_and_lost_steps,
    noise_with_memory_and_an_early_stop,
    budget,
    users,
    own_loop,
    own_loop_with_a_path_in_one_process,
    own_loop_with_a_ledger_for_two_trainings,
    own_loop_resumed,
    own_loop_resumed_without_a_state,
    budget_exceeded,
    adaptive_clip,
    empty_batches,
    observer_that_fails,
]


def counted(processes: Processes, folder: Path, scenarios: Sequence[Scenario]) -> dict[str, tuple[int, Any]]:
    """Of each scenario: how many releases there must be, and what this process states of them."""
    found: dict[str, tuple[int, Any]] = {}
    for scenario in scenarios:
        name = scenario.__name__
        own = folder / name.replace("after_a_kill", "killed")
        own.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps that are lost
            ledger, wanted = scenario(processes, own)
        epsilon = ledger.epsilon(delta=1e-3, accountant="rdp")
        stated = epsilon, ledger.releases, ledger.next_step, ledger.planned_steps, ledger.commitment, ledger.plan_facts
        found[name] = wanted, stated
    return found
