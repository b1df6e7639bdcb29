"""fit(): checkpoint, resume, and a process killed at any moment."""

import hashlib
import io
import json
import math
import os
import random
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils._pytree import keystr, tree_flatten_with_path

import privgrad as pg
from conftest import account_by_rdp, forking, loss_fn, make_data, make_model, make_plan, seed_of
from privgrad.diagnostics import RawGradientStats
from privgrad.ledger import file as ledger_file
from privgrad.private_gradient import RawStep
from privgrad.processes import Processes
from privgrad.progress import bars, notes_only
from privgrad.training import run as training_run
from privgrad.training.checkpoint import read_checkpoint, write_checkpoint
from privgrad.training.distributed import Distributed
from privgrad.training.run import FitResult, TrainingRun

STEPS = 60


def accuracy(model: nn.Module) -> dict[str, float]:
    assert not model.training
    inputs, labels = make_data(32).tensors
    return {"accuracy": (model(inputs).argmax(1) == labels).float().mean().item()}


def run(
    folder: Path | None,
    *,
    seed: int | None = 5,
    steps: int = STEPS,
    delta: float | None = None,
    scale: float = 1.0,
    perturb: pg.perturb.Contribution | None = None,
    processes: Processes | None = None,
    sharded: bool = False,
    observers: Sequence[Callable[[RawStep], None]] = (),
    schedule: Callable[[pg.optim.PrivateOptimizer], LRScheduler] | None = None,
    **options: Any,
) -> tuple[nn.Module, FitResult]:
    """Train; without a delta no evaluation computes an epsilon, which takes longer than the training."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.Linear(4, 3))
    model.load_state_dict({k: torch.full_like(v, 0.1) for k, v in model.state_dict().items()})
    if sharded and processes is not None:
        for part in (model[0], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (processes.count,)))
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    plan = make_plan(steps=steps, seed=seed, delta=delta).scaled(scale)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=perturb, processes=processes)
    for observer in observers:
        private_grad.register_raw_observer(observer)
    if schedule is not None:
        options["scheduler"] = schedule(optimizer)
    numbers: dict[str, Any] = {"progress": False, "evaluate": accuracy, "num_evaluations": 3, "save_seconds": 0.05}
    result = pg.fit(private_grad, optimizer, make_data(), output_dir=folder, **(numbers | options))
    return model, result


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_fit_trains_evaluates_and_accounts(monkeypatch: pytest.MonkeyPatch):
    account_by_rdp(monkeypatch)
    model, result = run(None, delta=1e-5)
    assert result.updates == STEPS
    assert [row["step"] for row in result.curve] == [20, 40, 60]
    assert result.curve[-1]["epsilon"] == result.ledger.epsilon(delta=1e-5)
    assert model.training
    assert result.examples_per_second > 0


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path):
    model, first = run(tmp_path)
    again, second = run(tmp_path)
    assert equal(model, again)
    assert second.curve == first.curve
    assert second.ledger.releases == STEPS


def test_fit_says_where_it_resumes_and_what_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path, evaluate=interrupted(), progress=True)
    assert caught.value.__notes__ == [
        f"fit: saved after 20 of 60 steps in {tmp_path}; run the same program again to resume."
    ]
    last = traceback.format_exception(caught.value)[-1]
    assert last.startswith("fit: saved after 20 of 60 steps")  # the last line that a script prints
    assert "resuming" not in capsys.readouterr().err
    run(tmp_path, progress=True)
    assert capsys.readouterr().err.startswith("resuming after 20 of 60 steps\n")
    run(tmp_path, progress=True)
    assert capsys.readouterr().err.startswith("already complete: 60 of 60 steps\n")
    run(tmp_path)
    assert capsys.readouterr().err == ""


def test_without_bars_a_resumed_run_says_so_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, evaluate=interrupted(), progress=notes_only())
    run(tmp_path, progress=notes_only())
    assert capsys.readouterr().err == "resuming after 20 of 60 steps\n"


def test_rows_that_may_not_be_persons_are_asked_about_before_anything_else():
    plan = make_plan(privacy_unit="user", num_examples=12, sample_rate=2 / 3)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, perturb=pg.perturb.SampleGradient("user"))
    optimizer = pg.optim.SGD(private_grad.model.named_parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="declares 12 people"), pytest.raises(KeyboardInterrupt):
        pg.fit(private_grad, optimizer, make_data(), evaluate=interrupts, num_evaluations=1, progress=False)
    assert private_grad.ledger.releases == 0


def interrupts(model: nn.Module) -> dict[str, float]:
    raise KeyboardInterrupt


def interrupted() -> Callable[[nn.Module], dict[str, float]]:
    """An evaluation that Ctrl-C interrupts: the first one, after the trial of `fit`."""
    calls = iter(range(1))

    def evaluate(model: nn.Module) -> dict[str, float]:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return {"accuracy": 0.0}

    return evaluate


def test_examples_without_finite_gradients_are_noted_while_it_runs(capsys: pytest.CaptureFixture[str]):
    data = make_data()
    data.tensors[0][::2] = math.nan
    model = make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, make_plan())
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"NOT PRIVATE: \d+ gradients were not finite .*; do not publish") as warned:
        result = pg.fit(private_grad, optimizer, data)
    (note,) = (line for line in capsys.readouterr().err.splitlines() if "NOT PRIVATE" in line)
    assert re.fullmatch(r"NOT PRIVATE: gradients of step \d are not finite \(NaN or inf\) and count as zero", note)
    assert f" {result.raw_nonfinite_examples} " in str(warned[0].message)
    assert result.raw_nonfinite_examples > 0


def note_states(noted: Path) -> None:
    """In a child: write down each state that is saved; mark those apart that differ in a process, or were not saved."""
    save, load = TrainingRun.save, TrainingRun._load

    def digest(run: TrainingRun) -> str:
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
        leaves = tree_flatten_with_path(run.processes.gather_state(state))[0]
        values = {keystr(place): leaf.tolist() for place, leaf in leaves if isinstance(leaf, torch.Tensor)}
        every = run.processes.gather_objects(hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest())
        if len(set(every)) > 1:
            noted.with_name("apart").touch()
        return f"{run.private_grad.state_dict()['step']} {every[0]}\n"

    def saving(run: TrainingRun, **options: Any) -> None:
        line = digest(run)
        if run.processes.rank == 0:
            with noted.open("a") as file:
                file.write(line)
        save(run, **options)

    def loading(run: TrainingRun, state: Mapping[str, Any]) -> None:
        load(run, state)
        if digest(run) not in noted.read_text().splitlines(keepends=True):
            noted.with_name("apart").touch()

    patched: Any = TrainingRun
    patched.save, patched._load = saving, loading


def train_noting_releases(
    folder: Path, released: Path, begun: Event, options: dict[str, Any], rank: int, ranks: int, store: str
) -> None:
    """In a child: train slowly, and write down every gradient that leaves the private_grad, as it leaves."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        options = {**options, "processes": Distributed()}
    descriptor = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = pg.PrivateGradient.__call__
    note_states(released.with_name("states"))

    def noted(self: pg.PrivateGradient, batch: pg.Batch) -> pg.NoisyGradient:
        gradient = original(self, batch)
        os.write(descriptor, f"{batch.sampling.step}\n".encode())
        time.sleep(0.005)
        return gradient

    pg.PrivateGradient.__call__ = noted  # pyright: ignore[reportAttributeAccessIssue]
    warnings.simplefilter("ignore")  # of steps that were lost: they are what this is about
    begun.set()
    run(folder, **options)


@dataclass
class Tally:
    """What was seen over many kills.

    Attributes:
        between: kills that left a charge behind whose release was not seen to leave.
        least: the smallest charged - released after any of them.
    """

    kills: int = 0
    resumes: int = 0
    released: int = 0
    charged: int = 0
    between: int = 0
    least: int = 1 << 30


def kill_again_and_again(folder: Path, kills: int, *, ranks: Sequence[int] = (1,), **options: Any) -> Tally:
    """Start a training and SIGKILL a process of it a random moment after it began, that often; compare after each.

    `ranks` are the numbers of processes of the first starts, which then begin again. What was charged is read from the
    ledger, what was released from a file that the children append to by themselves. The other processes, if there are
    any, must end of their own accord.
    """
    released, waits, tally = folder.with_name("released"), random.Random(seed_of(0)), Tally()
    released.touch()
    context = forking()
    while tally.kills < kills:
        count = ranks[tally.kills % len(ranks)]
        begun, store = context.Event(), f"file://{folder.with_name(f'store{tally.kills}')}"
        processes = [
            context.Process(target=train_noting_releases, args=(folder, released, begun, options, rank, count, store))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        process = waits.choice(processes)
        assert begun.wait(120)
        noted, deadline = released.stat().st_size + waits.randrange(30), time.monotonic() + 120
        # In turn two amid training, and two amid opening, resuming and first steps, however busy the machine is.
        while tally.kills // 2 % 2 == 0 and released.stat().st_size <= noted and time.monotonic() < deadline:
            time.sleep(0.001)
        process.join(waits.uniform(0, 0.1))
        assert process.is_alive(), f"it ended after {tally.kills} kills: the run is too short"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        for ended in processes:
            ended.join(120)
            assert not ended.is_alive(), "it waits for one that was killed"
        tally.kills += 1
        tally.resumes += tally.released > 0
        # Without a seed a charge whose release is lost stays ahead for ever; under one its step is released again.
        ahead = tally.charged - tally.released if options["seed"] is None else 0
        steps = [int(line) for line in released.read_text().split()]
        # Under a seed, a step that is computed again is the same release: distinct steps are what was paid for.
        # Of several processes, each writes down the release that all take.
        tally.released = len(steps) if options["seed"] is None and max(ranks) == 1 else len(set(steps))
        ledger = pg.Ledger(folder / "ledger.jsonl", read_only=True) if tally.charged or steps else pg.Ledger()
        assert ledger.releases >= tally.charged, "a charge was lost"
        tally.between += ledger.releases > tally.charged and ledger.releases - tally.released > ahead
        tally.charged = ledger.releases
        tally.least = min(tally.least, tally.charged - tally.released)
        assert tally.least >= 0
        assert not released.with_name("apart").exists(), "processes of different states, or a state that none had"
        accountant = "pld" if tally.kills == kills else "rdp"  # which is quick
        paid = make_plan().epsilon(delta=1e-5, steps=tally.released, accountant=accountant)
        assert ledger.epsilon(delta=1e-5, accountant=accountant) >= paid
    return tally


KILLS = int(os.environ.get("PRIVGRAD_TEST_KILLS", "0"))


@pytest.mark.timeout(300 + 15 * KILLS)
@pytest.mark.parametrize(
    ("seed", "kills", "ranks"),
    [
        (5, KILLS or 4, (1,)),
        (None, KILLS or 4, (1,)),
        (None, KILLS or 4, (2, 1, 2, 3)),
        pytest.param(5, 20, (1,), marks=pytest.mark.slow),
        pytest.param(None, 10, (1,), marks=pytest.mark.slow),
        pytest.param(None, 20, (2, 1, 2, 3, 2, 4), marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_everything_released_was_charged(
    tmp_path: Path, kills: int, ranks: tuple[int, ...], seed: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Several processes have shards; each start has another number of them than the one before."""
    if (seed, ranks) != (None, (1,)) or kills < 10:  # one of them by PLD, which takes seconds
        account_by_rdp(monkeypatch)
    steps = 20 * kills
    tally = kill_again_and_again(tmp_path / "killed", kills, ranks=ranks, seed=seed, steps=steps, sharded=True)
    if record := os.environ.get("PRIVGRAD_TEST_KILLS_TO"):
        with open(record, "a") as file:
            print(json.dumps({"seed": seed, "ranks": ranks, **asdict(tally)}), file=file)
    assert tally.resumes >= kills // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed, result = run(tmp_path / "killed", seed=seed, steps=steps)
    assert result.ledger.releases == steps
    if seed is not None:  # nothing was lost: the end equals an uninterrupted run's
        whole, _ = run(None, seed=seed, steps=steps)
        assert result.updates == steps
        assert equal(whole, resumed)


class Stop(BaseException):
    """Ends a run as abruptly as an exception can."""


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> None:
    """Run for that many releases and end as a killed process does: without a last checkpoint."""
    with monkeypatch.context() as patched:
        original, calls = pg.PrivateGradient.__call__, iter(range(count))

        def limited(self: pg.PrivateGradient, batch: pg.Batch) -> pg.NoisyGradient:
            if next(calls, None) is None:
                patched.setattr(training_run.TrainingRun, "save", lambda *_, **__: None)
                raise Stop
            return original(self, batch)

        patched.setattr(pg.PrivateGradient, "__call__", limited)
        with pytest.raises(Stop):
            run(folder, save_seconds=1e9, **options)


def test_without_a_seed_lost_steps_stay_spent_and_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was released and not saved cannot be drawn again: the run ends with as many updates fewer."""
    stop_after(20, monkeypatch, tmp_path, seed=None)
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == 20
    with pytest.warns(UserWarning, match="20 charged steps .* 40 updates of 60"):
        _, result = run(tmp_path, seed=None)
    assert result.ledger.releases == STEPS
    assert result.updates == STEPS - 20


def test_lost_steps_leave_a_perturbation_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sat = pg.perturb.SAT(0.1)
    stop_after(20, monkeypatch, tmp_path, seed=None, perturb=sat)
    with pytest.warns(UserWarning, match="20 charged steps"):
        _, result = run(tmp_path, seed=None, perturb=sat)
    assert result.updates == STEPS - 20


def test_averaged_weights_are_evaluated_and_go_on_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, whole = run(None, ema_decay=0.9)
    plain, _ = run(None)
    assert equal(model, plain)
    assert whole.averaged is not None
    assert not equal(whole.averaged, model)
    assert whole.curve[-1]["accuracy"] == accuracy(whole.averaged.eval())["accuracy"]
    stop_after(20, monkeypatch, tmp_path, ema_decay=0.9)
    _, resumed = run(tmp_path, ema_decay=0.9)
    assert resumed.averaged is not None
    assert equal(resumed.averaged, whole.averaged)
    with pytest.raises(pg.PrivacyError, match=r"to be of this run, got a checkpoint with ema_decay 0.9"):
        run(tmp_path, ema_decay=0.99)
    with pytest.raises(pg.PrivacyError, match=r"ema_decay to be in \[0, 1\)"):
        run(None, ema_decay=1.0)


def test_an_average_without_memory_is_the_model():
    model, result = run(None, ema_decay=0.0)
    assert result.averaged is not None
    for own, averaged in zip(model.parameters(), result.averaged.parameters(), strict=True):
        torch.testing.assert_close(averaged, own)


def test_a_run_that_lost_every_step_does_not_pass_for_a_trained_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stop_after(20, monkeypatch, tmp_path, seed=None)
    with pytest.raises(pg.BudgetExceededError, match="none of their results saved"):
        run(tmp_path, seed=None, steps=20)


def test_a_second_training_on_a_ledger_without_a_folder_is_told_to_take_its_own():
    ledger = pg.Ledger()
    for _ in range(2):
        model, plan = make_model(), make_plan(steps=2)
        optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
        private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=ledger)
        if ledger.releases == 0:
            pg.fit(private_grad, optimizer, make_data(), progress=False)
        else:
            with pytest.raises(pg.BudgetExceededError, match=r"saved; give this training a ledger of its own .*Budget"):
                pg.fit(private_grad, optimizer, make_data(), progress=False)


def test_a_curve_holds_plain_numbers():
    def evaluate(model: nn.Module) -> dict[str, Any]:
        return {"tensor": next(model.parameters()).mean(), "numpy": np.float32(0.5), "plain": 1}

    _, result = run(None, steps=2, evaluate=evaluate)
    assert [type(value) for value in list(result.curve[-1].values())[2:]] == [float, float, int]
    json.dumps(result.curve)


def test_a_second_call_without_a_folder_says_that_the_training_is_complete():
    model = make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, make_plan(steps=2))
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    pg.fit(private_grad, optimizer, make_data(), progress=False)
    with pytest.raises(pg.BudgetExceededError, match=r"all 2 taken by private_grad before this call; use the model"):
        pg.fit(private_grad, optimizer, make_data(), progress=False)


def test_an_exception_loses_nothing(tmp_path: Path):
    def broken(model: nn.Module) -> dict[str, float]:
        if model[0].weight[0, 0] != 0.1:  # pyright: ignore
            raise ZeroDivisionError
        return {"accuracy": 0.0}

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, seed=None, evaluate=broken, num_evaluations=1, save_seconds=1e9)
    _, result = run(tmp_path, seed=None, num_evaluations=1)
    assert result.updates == STEPS
    assert [row["step"] for row in result.curve] == [STEPS]  # the evaluation that failed is made up


def test_what_cannot_work_is_refused_before_anything_is_spent(tmp_path: Path):
    with pytest.raises((pg.PrivacyError, AttributeError)):
        run(tmp_path / "a", evaluate=lambda model: 0.5)
    with pytest.raises(pg.PrivacyError, match="other names than step and epsilon, got epsilon"):
        run(tmp_path / "a", evaluate=lambda model: {"epsilon": 0.0})
    model = make_model()
    with pytest.raises(pg.PrivacyError, match=r"optimizer.*grad\.assign"):
        pg.fit(pg.PrivateGradient(model, loss_fn, make_plan()), torch.optim.Adam(model.parameters()), make_data())  # pyright: ignore[reportArgumentType]
    part = pg.optim.SGD(((n, p) for n, p in model.named_parameters() if n.startswith("0.")), lr=0.1)
    with pytest.raises(
        pg.PrivacyError, match=r"every trainable parameter, and no others, got an optimizer without 2\.weight, 2\.bias"
    ):
        pg.fit(pg.PrivateGradient(model, loss_fn, make_plan()), part, make_data())
    assert pg.Ledger(tmp_path / "a/ledger.jsonl", read_only=True).releases == 0


SCALES = pg.Scales({"0.bias": torch.tensor(2.0)}, provenance="common knowledge", source="a test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.5}, r"got a checkpoint with optimizer lr 0\.05, now 0\.5; resume"),
        (
            {"lr": None, "noise_step": 0.01},
            r"optimizer lr 0\.05, now 0\.01, optimizer lr_is_noise_step False, now True",
        ),
        ({"kind": pg.optim.SGD, "lr": 0.05}, "AdamBC"),
        ({"clip": pg.clip.Automatic()}, "clip"),
        ({"precondition": pg.precondition.fixed(SCALES)}, "side_information"),
    ],
)
def test_another_runs_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str):
    run(tmp_path)
    kind = options.pop("kind", pg.optim.AdamBC)
    ways = {name: options.pop(name, None) for name in ("clip", "precondition")}
    model = make_model()
    optimizer = kind(model.named_parameters(), **({"lr": 0.05} | options))
    plan = make_plan(steps=STEPS, seed=5)
    with pytest.raises(pg.PrivacyError, match=message):
        pg.fit(pg.PrivateGradient(model, loss_fn, plan, **ways), optimizer, make_data(), output_dir=tmp_path)


def test_another_noise_step_is_named_as_it_was_given(tmp_path: Path):
    for step in (0.25, 0.5):
        model = make_model()
        optimizer = pg.optim.AdamBC(model.named_parameters(), noise_step=step)
        private_grad = pg.PrivateGradient(model, loss_fn, make_plan(steps=5, seed=5))
        if step == 0.25:
            pg.fit(private_grad, optimizer, make_data(), output_dir=tmp_path, progress=False)
        else:
            with pytest.raises(
                pg.PrivacyError, match=r"optimizer noise_step 0\.25, now 0\.5; resume .*; numbers of pg\.suggest change"
            ):
                pg.fit(private_grad, optimizer, make_data(), output_dir=tmp_path, progress=False)


def test_another_clipping_norm_is_refused_with_the_remedy_for_a_suggestion():
    ledger = pg.Ledger()
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), ledger=ledger)
    with pytest.raises(pg.PrivacyError, match=r"max_grad_norm to be as .*, got 0\.9; .*pg\.suggest change"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(max_grad_norm=0.9), ledger=ledger)


def test_a_checkpoint_is_for_its_owner_alone(tmp_path: Path):
    tmp_path.joinpath("checkpoint.partial").touch(mode=0o644)  # of a killed process
    run(tmp_path)
    assert tmp_path.joinpath("checkpoint.pt").stat().st_mode & 0o077 == 0
    assert tmp_path.joinpath("ledger.jsonl").stat().st_mode & 0o044 == 0o044  # public


def test_a_seeded_rerun_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Same seed, other data: the noise would cancel between the two releases."""
    stop_after(20, monkeypatch, tmp_path)
    model = make_model()

    plan = make_plan(steps=STEPS, seed=5)
    ledger = pg.Ledger(tmp_path / "ledger.jsonl")
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=ledger)
    with pytest.raises(pg.SamplingError, match="already charged"):
        private_grad(next(plan.batches(make_data(40))))
    assert ledger.releases == 20


def test_interrupt_saves_and_resumes(tmp_path: Path):
    whole, _ = run(None)

    calls = iter(range(1))

    def interrupt(model: nn.Module) -> dict[str, float]:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return {"accuracy": 0.0}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, evaluate=interrupt, save_seconds=1e9)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["private_grad"]["step"] == 20
    resumed, _ = run(tmp_path)
    assert equal(whole, resumed)


def test_interrupted_amid_an_update_nothing_half_done_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = pg.optim.AdamBC.step

    def half(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.state and next(iter(self.state.values()))["step"] == 10:
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise KeyboardInterrupt
        original(self, *args, **kwargs)

    whole, _ = run(None)
    monkeypatch.setattr(pg.optim.AdamBC, "step", half)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, save_seconds=1e9)
    monkeypatch.undo()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["private_grad"]["step"] == 0
    resumed, result = run(tmp_path)
    assert equal(whole, resumed)
    assert result.ledger.releases == STEPS


SCHEDULES: dict[str, Callable[[pg.optim.PrivateOptimizer], Any]] = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    "linear by name": lambda optimizer: "linear",
    "cosine with warm-up": lambda optimizer: pg.Schedule("cosine", warmup=0.25),
}
# A schedule that is another one from a number on, and what is said of it on resume.
CHANGED: dict[str, tuple[Callable[[pg.optim.PrivateOptimizer], Any], str]] = {
    "one cycle": (
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS + 1),
        f"scheduler total_steps {STEPS}, now {STEPS + 1}",
    ),
    "cosine": (
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS + 1),
        f"scheduler T_max {STEPS}, now {STEPS + 1}",
    ),
    "linear by name": (
        lambda optimizer: "cosine",
        "scheduler lr_lambdas .*'decay': 'linear'.*, now .*'decay': 'cosine'",
    ),
    "cosine with warm-up": (
        lambda optimizer: pg.Schedule("cosine", warmup=0.5),
        "scheduler lr_lambdas .*'warmup_steps': 15.*, now .*'warmup_steps': 30",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_resumes_where_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, _ = run(None, schedule=SCHEDULES[name])
    assert not equal(whole, run(None)[0])

    def interrupt(model: nn.Module) -> dict[str, float]:
        if pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == 20:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, schedule=SCHEDULES[name], evaluate=interrupt, save_seconds=1e9)
    resumed, result = run(tmp_path, schedule=SCHEDULES[name])
    assert result.updates == STEPS
    assert equal(whole, resumed)
    made = SCHEDULES[name](adam())
    kind = type(made).__name__ if isinstance(made, LRScheduler) else "LambdaLR"
    with pytest.raises(pg.PrivacyError, match=rf"got a checkpoint with scheduler {kind}, now None"):
        run(tmp_path)
    schedule, message = CHANGED[name]
    with pytest.raises(pg.PrivacyError, match=rf"got a checkpoint with {message}"):
        run(tmp_path, schedule=schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_that_is_called_again_with_the_same_objects_goes_on(name: str, tmp_path: Path):
    """As in a notebook: the scheduler has moved since it was made, but it is the same."""
    model, stops = make_model(), [KeyboardInterrupt]
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    scheduler = SCHEDULES[name](optimizer)

    def interrupt(row: Any) -> None:
        if row["step"] == 20 and stops:
            raise stops.pop()

    private_grad = pg.PrivateGradient(model, loss_fn, make_plan(steps=STEPS, seed=5))
    options: dict[str, Any] = {"scheduler": scheduler, "evaluate": lambda model: {}, "on_evaluate": interrupt}
    options |= {"num_evaluations": STEPS, "output_dir": tmp_path, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        pg.fit(private_grad, optimizer, make_data(), **options)
    assert pg.fit(private_grad, optimizer, make_data(), **options).updates == STEPS


def test_lost_steps_count_in_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A schedule is of the plan's steps: one that ended early would end far from its last rate."""
    stop_after(20, monkeypatch, tmp_path, seed=None, schedule=SCHEDULES["cosine"])
    made: list[LRScheduler] = []

    def schedule(optimizer: pg.optim.PrivateOptimizer) -> LRScheduler:
        made.append(SCHEDULES["cosine"](optimizer))
        return made[0]

    with pytest.warns(UserWarning, match="20 charged steps"):
        run(tmp_path, seed=None, schedule=schedule)
    assert made[0].last_epoch == STEPS - 1


def test_lost_steps_count_in_a_schedule_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rates: list[float] = []
    step = pg.optim.AdamBC.step

    def noting(self: pg.optim.AdamBC, *args: Any, **options: Any) -> None:
        rates.append(self.param_groups[0]["lr"])
        step(self, *args, **options)

    schedule = pg.Schedule("linear", warmup=0.5)
    stop_after(20, monkeypatch, tmp_path, seed=None, scheduler=schedule)
    monkeypatch.setattr(pg.optim.AdamBC, "step", noting)
    with pytest.warns(UserWarning, match="20 charged steps"):
        run(tmp_path, seed=None, scheduler=schedule)
    after = [(s + 1) / 31 if s < 30 else 1 - (s - 30) / 30 for s in range(20, STEPS)]
    assert rates == pytest.approx([0.05 * factor for factor in after])


def adam() -> pg.optim.PrivateOptimizer:
    return pg.optim.AdamBC(make_model().named_parameters(), lr=0.05)


def test_schedulers_that_cannot_be_stepped_here_are_refused():
    optimizer = adam()
    short = "scheduler to last for all 60 steps, got total_steps = 10; give it total_steps=plan.steps"
    with pytest.raises(pg.PrivacyError, match=short):
        run(None, schedule=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10))
    with pytest.raises(pg.PrivacyError, match="to need no metric, got ReduceLROnPlateau; give one without"):
        run(None, scheduler=ReduceLROnPlateau(optimizer))
    with pytest.raises(
        pg.PrivacyError, match="scheduler to be of the same optimizer, got the scheduler of a different AdamBC"
    ):
        run(None, scheduler=CosineAnnealingLR(optimizer, T_max=3))
    names = "Schedule: expected decay to be 'constant', 'linear' or 'cosine', got 'liner'; did you mean 'linear'"
    with pytest.raises(pg.PrivacyError, match=names):
        run(None, scheduler="liner")
    with pytest.raises(AttributeError):
        run(None, scheduler=0.5)


def test_a_model_in_evaluation_mode_is_trained_in_training_mode():
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()
    modes: list[bool] = []

    def noting(model: nn.Module, batch: Any) -> torch.Tensor:
        modes.append(model.training)
        return loss_fn(model, batch)

    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    pg.fit(pg.PrivateGradient(model, noting, make_plan(steps=3)), optimizer, make_data(), progress=False)
    assert model.training
    assert modes[-1]


def test_a_private_gradient_that_was_used_is_not_recorded_anew(tmp_path: Path):
    """Its releases would be missing in the new file."""
    model, plan = make_model(), make_plan(steps=3)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    private_grad(next(plan.batches(make_data())))
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(pg.PrivacyError, match=r"ledger to be unused .*, got 1 releases, recorded in memory; give Priv"):
        pg.fit(private_grad, optimizer, make_data(), output_dir=tmp_path, progress=False)
    assert pg.fit(private_grad, optimizer, make_data(), progress=False).updates == 2


def test_fit_may_be_called_again_with_the_same_private_gradient(tmp_path: Path):
    model, plan = make_model(), make_plan(steps=3)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    for _ in range(2):
        result = pg.fit(private_grad, optimizer, make_data(), output_dir=tmp_path, progress=False)
        assert (result.updates, result.ledger.releases) == (3, 3)


def test_checkpoint_holds_no_key_and_nothing_but_state(tmp_path: Path):
    run(tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(state) == {
        *(
            "version",
            "seed",
            "settings",
            "model",
            "averaged",
            "optimizer",
            "scheduler",
            "private_grad",
            "ledger",
            "curve",
            "updates",
            "seconds",
        )
    }
    assert set(state["optimizer"]["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "exp_avg_noise_var"}
    assert state["private_grad"] == {"step": STEPS, "plan": {"research_seed": True, "simulates": None}}


def test_state_and_checkpoint_depend_on_the_released_gradients_only(tmp_path: Path):
    """Two data sets with equal clipped sums (all gradients zero) leave the same bytes behind."""
    states: list[Any] = []
    for shift in (0.0, 1.0):
        model = make_model()
        plan = make_plan(seed=1)
        inputs, labels = make_data().tensors
        data = torch.utils.data.TensorDataset(inputs + shift, labels)
        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
        folder = tmp_path / str(shift)
        private_grad = pg.PrivateGradient(model, lambda m, b: 0.0 * loss_fn(m, b), plan)
        pg.fit(private_grad, optimizer, data, output_dir=folder, progress=False)
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        del state["seconds"]
        states.append(json.dumps(state, default=lambda t: t.tolist()))
    assert states[0] == states[1]


def damage_checkpoint(folder: Path, how: str) -> None:
    path = folder / "checkpoint.pt"
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other bytes":
        path.write_bytes(b"hello" * 100)
    elif how == "absent":
        path.unlink()
    else:
        state = torch.load(path, weights_only=True)
        if how == "partial":
            del state["optimizer"]
        elif how == "other model":
            state["model"] = nn.Linear(5, 3).state_dict()
        elif how == "other version":
            state["version"] = 99
        elif how == "other seed":
            state["seed"] = 6
        elif how == "ahead of its ledger":
            state["private_grad"]["step"] = STEPS + 1
        elif how == "without its releases":
            state["ledger"] = "0" * 16
        elif how == "a curve of no rows":
            state["curve"] = [1]
        write_checkpoint(state, path)


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "empty",
        "other bytes",
        "absent",
        "partial",
        "other model",
        "other version",
        "other seed",
        "ahead of its ledger",
        "without its releases",
        "a curve of no rows",
    ],
)
def test_damaged_checkpoints_are_refused_and_charge_nothing(tmp_path: Path, how: str):
    run(tmp_path)
    damage_checkpoint(tmp_path, how)
    with pytest.raises(pg.PrivacyError, match=r"checkpoint\.pt|the ledger to hold the 61 steps of the state"):
        run(tmp_path, steps=STEPS + 10)
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == STEPS


def test_no_byte_of_a_checkpoint_changes_unseen(tmp_path: Path):
    """Torch itself loads a tensor with a bit turned over as if nothing had happened."""
    path = tmp_path / "small.pt"
    write_checkpoint({"weight": torch.ones(3)}, path)
    whole = path.read_bytes()
    changed = [whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :] for i in range(len(whole))]
    for content in changed + [whole[:length] for length in range(len(whole))]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not those that were written|is empty"):
            read_checkpoint(path)
    run(tmp_path, steps=3)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    for place in (0, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(pg.PrivacyError, match=r"checkpoint\.pt.*not those that were written"):
            run(tmp_path, steps=4)
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == 3
    path.write_bytes(whole)
    run(tmp_path, steps=4)


@pytest.mark.parametrize("moment", ["writing", "syncing", "before the rename"])
def test_killed_while_a_checkpoint_is_written_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    run(tmp_path, steps=3)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()

    def killed(*_: Any) -> None:
        raise Stop

    def half(state: Any, file: Any) -> None:
        file.write(whole[: len(whole) // 2])
        raise Stop

    with monkeypatch.context() as patched:
        if moment == "writing":
            patched.setattr(torch, "save", half)
        elif moment == "syncing":
            patched.setattr(os, "fsync", killed)
        else:
            patched.setattr(Path, "replace", killed)
        with pytest.raises(Stop):
            write_checkpoint({}, path)
    assert path.read_bytes() == whole
    assert path.with_suffix(".partial").exists()
    _, result = run(tmp_path, steps=4)
    assert result.updates == 4


@pytest.mark.parametrize("how", ["cut back", "another run's", "sealed anew"])
@pytest.mark.parametrize("seed", [5, None])
def test_a_checkpoint_is_refused_beside_a_ledger_that_is_not_its_own(tmp_path: Path, how: str, seed: int | None):
    """A ledger with fewer lines, or as many others, opens by itself: the checkpoint has seen more."""
    run(tmp_path, seed=seed)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "cut back":
        lines.pop()
    elif how == "another run's":
        run(tmp_path / "other", seed=6 if seed == 5 else None, steps=STEPS + 1)
        lines = (tmp_path / "other/ledger.jsonl").read_bytes().splitlines(keepends=True)
    else:
        # As many lines as before: only the checksums tell that one draw was exchanged for another.
        lines[5] = lines[5].replace(b'"draw": "', b'"draw": "0')
        head, sealed = "", b""
        for number, line in enumerate(lines):
            body = line.rpartition(ledger_file._SEAL)[0] + b"}"
            sealed, head = ledger_file._sealed(head, body)
            lines[number] = sealed + b"\n"
    path.write_bytes(b"".join(lines))
    assert pg.Ledger(path, read_only=True).releases >= STEPS - 1
    with pytest.raises(pg.PrivacyError, match=r"checkpoint\.pt.*ledger"):
        run(tmp_path, seed=seed, steps=STEPS + 10)
    assert path.read_bytes() == b"".join(lines)


def test_a_checkpoint_cannot_run_code(tmp_path: Path):
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harm",))

    run(tmp_path)
    write_checkpoint({"version": 1, "model": Harm()}, tmp_path / "checkpoint.pt")
    with pytest.raises(pg.PrivacyError, match=r"checkpoint.*[wW]eights.only"):
        run(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_other_numbers_on_resume_are_refused(tmp_path: Path):
    run(tmp_path)
    model = make_model()
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
    private_grad = pg.PrivateGradient(model, loss_fn, make_plan(noise_multiplier=0.5))
    with pytest.raises(pg.PrivacyError, match="noise_multiplier"):
        pg.fit(private_grad, optimizer, make_data(), output_dir=tmp_path)
    run(tmp_path)  # the refusal left no lock behind


def test_a_longer_run_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    account_by_rdp(monkeypatch)
    run(tmp_path)
    longer, result = run(tmp_path, steps=STEPS + 30)
    whole, _ = run(None, steps=STEPS + 30)
    assert result.ledger.releases == STEPS + 30
    assert equal(longer, whole)
    assert math.isclose(result.ledger.epsilon(delta=1e-5), make_plan(steps=STEPS + 30).epsilon(delta=1e-5))


def test_bad_input_leaves_the_folder_usable(tmp_path: Path):
    model = make_model()
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
    with pytest.raises(pg.SamplingError, match="at least one example"):
        pg.fit(pg.PrivateGradient(model, loss_fn, make_plan()), optimizer, [], output_dir=tmp_path)
    pg.Ledger(tmp_path / "ledger.jsonl").close()


def test_progress_bar_shows_and_prints_nothing_when_off(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    account_by_rdp(monkeypatch)
    run(None)
    assert capfd.readouterr() == ("", "")
    _, result = run(None, progress=True, delta=1e-5)
    out, shown = capfd.readouterr()
    assert out == ""
    assert "60/60" in shown
    assert "examples/s" in shown
    assert f"ε ≤ {math.ceil(100 * result.ledger.epsilon(delta=1e-5)) / 100:.2f}" in shown
    assert len(shown.strip().splitlines()) == 1  # no terminal: no flood of lines


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (1.0, r"ε ≤ \d+\.\d\d  [\d,]+ examples/s  accuracy 0\.\d+"),
        (0.5, r"ε = ∞ \(simulates \d+\.\d\d\)  accuracy 0\.\d+"),
    ],
    ids=["private", "simulation"],
)
def test_bars_of_others_show_time_left_epsilon_and_speed_at_80_columns(
    scale: float, told: str, monkeypatch: pytest.MonkeyPatch
):
    """On a terminal, under a bar of runs, amid a training: nothing is cut."""
    account_by_rdp(monkeypatch)
    bar = bars(shown=True)
    bar.live.console = Console(width=80, force_terminal=True, file=io.StringIO())
    bar.add_task("runs", total=48, completed=12, note="final  DP-AdamBC  lr 0.002  seed 100")
    lines: list[str] = []

    def look(model: nn.Module) -> dict[str, float]:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(bar.get_renderable())
        lines.extend(console.export_text().splitlines())
        return accuracy(model)

    run(None, progress=bar, delta=1e-5, evaluate=look, num_evaluations=2, scale=scale)
    runs, steps = lines[-2:]
    assert re.search(r"runs .*12/48 -:--:-- final  DP-AdamBC  lr 0.002  seed 100", runs)
    assert re.search(rf"steps .*59/60 0:00:0\d {told} *$", steps)
    assert max(map(len, lines)) <= 80
    assert len(bar.tasks) == 1  # what was added is gone


def test_a_scaled_plan_trains_resumes_and_spends_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, result = run(None, scale=0.5, delta=1e-5)
    assert not equal(whole, run(None)[0])
    assert [row["epsilon"] for row in result.curve] == [math.inf] * 3
    assert result.ledger.epsilon(delta=1e-5) == result.ledger.epsilon(delta=0.9, accountant="rdp") == math.inf
    assert result.ledger.plan_facts["simulates"] == {
        "expected_batch_size": 8,
        "sample_rate": 0.25,
        "noise_multiplier": 1.0,
    }
    stop_after(20, monkeypatch, tmp_path, scale=0.5)
    resumed, _ = run(tmp_path, scale=0.5)
    assert equal(whole, resumed)
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).epsilon(delta=1e-5) == math.inf


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (0.5, 1.0, "noise_multiplier, simulates to be as recorded .*, got .*, 1.0, None; train in a new folder: "),
        (1.0, 0.5, "noise_multiplier, simulates to be as recorded .*, got .*; train in a new folder: "),
        (0.5, 0.25, "expected_batch_size to be as recorded .*, got "),
    ],
)
def test_a_ledger_is_of_one_scale(tmp_path: Path, first: float, second: float, message: str):
    run(tmp_path, scale=first)
    with pytest.raises(pg.PrivacyError, match=message):
        run(tmp_path, scale=second)
    run(tmp_path, scale=first)


def test_a_ledger_without_noise_is_not_continued_by_a_simulation():
    """Equal in every number that is charged: what is simulated is a number of its own."""
    half = make_plan(sample_rate=0.125, expected_batch_size=4, noise_multiplier=0.0)
    ledger = pg.Ledger()
    pg.PrivateGradient(make_model(), loss_fn, half, ledger=ledger)
    with pytest.raises(pg.PrivacyError, match=r"the plan's simulates to be as recorded \(None\)"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan().scaled(0.5), ledger=ledger)


def test_the_bar_of_a_simulation_tells_no_finite_epsilon(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    account_by_rdp(monkeypatch)
    epsilon = make_plan(steps=STEPS, delta=1e-5).epsilon()
    run(None, progress=True, delta=1e-5, scale=0.5)
    shown = " ".join(capfd.readouterr().err.split())
    assert f"ε = ∞ (simulates {math.ceil(100 * epsilon) / 100:.2f}) accuracy 0." in shown
    assert "≤" not in shown
    run(None, progress=True, delta=1e-5, scale=0.5, perturb=pg.perturb.RawSAM(0.01))
    assert "no ε" in capfd.readouterr().err  # the plan in full batches would have none either


def test_each_evaluation_is_told_as_it_is_made_and_steps_are_watched():
    told: list[Any] = []
    watch, plain = RawGradientStats(), run(None)
    watched, result = run(None, on_evaluate=told.append, observers=[watch.observe])
    assert told == result.curve
    assert watch.steps == STEPS
    assert equal(watched, plain[0])


def test_an_optimizer_of_another_model_is_refused_before_anything_is_spent(tmp_path: Path):
    optimizer = pg.optim.SGD(make_model().named_parameters(), lr=0.1)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    with pytest.raises(
        pg.PrivacyError, match="optimizer to hold every trainable parameter, and no others, got an optimizer without"
    ):
        pg.fit(private_grad, optimizer, make_data(), output_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_its_ledger_is_refused_and_none_is_begun(tmp_path: Path):
    run(tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(pg.PrivacyError, match=r"ledger.jsonl to exist next to its checkpoint, .*; put it back"):
        run(tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_another_rate_of_a_group_on_resume_is_refused(tmp_path: Path):
    def train(rates: list[dict[str, float]], steps: int) -> None:
        model = make_model()
        groups = [
            {"params": [(name, parameter)], **rate}
            for (name, parameter), rate in zip(model.named_parameters(), [*rates, *rates[-1:] * 99], strict=False)
        ]
        private_grad = pg.PrivateGradient(model, loss_fn, make_plan(steps=steps))
        pg.fit(private_grad, pg.optim.SGD(groups), make_data(), output_dir=tmp_path)

    train([{"noise_step": 0.01}, {"noise_step": 0.02}], 3)
    for other in ({"noise_step": 0.05}, {"lr": 0.02}):
        with pytest.raises(pg.PrivacyError, match="optimizer rates"):
            train([{"noise_step": 0.01}, other], 6)
    train([{"noise_step": 0.01}, {"noise_step": 0.02}], 6)


def test_a_state_with_steps_that_the_ledger_has_not_charged_is_refused():
    plan = make_plan(steps=4)
    saved = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in list(plan.batches(make_data()))[:2]:
        saved(batch)
    forgetful = pg.PrivateGradient(make_model(), loss_fn, plan)
    with pytest.raises(pg.PrivacyError, match=r"the ledger to hold the 2 steps of the state, got 0 releases"):
        forgetful.load_state_dict(saved.state_dict())
    resumed = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=saved.ledger)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.state_dict()["step"] == 2


def test_a_second_call_goes_on_with_the_schedule():
    plan, model, rates = make_plan(steps=8), make_model(), list[float]()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))

    def failing(_: Any) -> dict[str, float]:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        pg.fit(private_grad, optimizer, make_data(), scheduler="linear", evaluate=failing, num_evaluations=2)
    pg.fit(private_grad, optimizer, make_data(), scheduler="linear")
    assert rates == pytest.approx([1 - step / 8 for step in range(8)])
