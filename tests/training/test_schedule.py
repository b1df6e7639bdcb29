"""Schedules of the learning rate: their rates, their errors, and the keys of a TOML file that make one."""

import copy
import math
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

import privgrad as pg
from conftest import account_by_rdp, loss_fn, make_data, make_model, make_plan
from privgrad_lab.load_spec import check_spec
from privgrad_lab.records import describe
from privgrad_lab.report.metadata import metadata_of
from privgrad_lab.runner import compare, train


def rates(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The learning rates of each param group, by step."""
    found = list[list[float]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps without an optimizer's
        for _ in range(steps):
            found.append([group["lr"] for group in scheduler.optimizer.param_groups])
            scheduler.step()
    return [list(rates) for rates in zip(*found, strict=True)]


def optimizer_of_two_groups() -> pg.optim.PrivateOptimizer:
    model = make_model()
    groups = [
        {"params": model[0].named_parameters(prefix="0"), "lr": 0.5},
        {"params": model[2].named_parameters(prefix="2"), "lr": 2.0},
    ]
    return pg.optim.SGD(groups, lr=1.0)


FACTORS: dict[str, tuple[pg.Schedule, list[float]]] = {
    "constant": (pg.Schedule(), [1.0] * 8),
    "linear": (pg.Schedule("linear"), [1 - t / 8 for t in range(8)]),
    "cosine": (pg.Schedule("cosine"), [(1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]),
    "constant after a warm-up": (pg.Schedule(warmup=0.25), [1 / 3, 2 / 3, *[1.0] * 6]),
    "linear after a warm-up": (pg.Schedule("linear", 0.25), [1 / 3, 2 / 3, *(1 - t / 6 for t in range(6))]),
    "cosine after a warm-up": (
        pg.Schedule("cosine", warmup=np.float64(0.25)),
        [1 / 3, 2 / 3, *((1 + math.cos(math.pi * t / 6)) / 2 for t in range(6))],
    ),
    "a warm-up to the last step": (pg.Schedule("linear", warmup=0.99), [s / 8 for s in range(1, 9)]),
}


@pytest.mark.parametrize("name", FACTORS)
def test_each_group_has_the_rates_of_the_formula(name: str):
    schedule, factors = FACTORS[name]
    found = rates(schedule.of(optimizer_of_two_groups(), 8), 8)
    assert found == [pytest.approx([peak * factor for factor in factors]) for peak in (0.5, 2.0)]


@pytest.mark.parametrize("name", FACTORS)
def test_a_scheduler_ends_at_zero_and_stays_there(name: str):
    schedule, _ = FACTORS[name]
    scheduler = schedule.of(optimizer_of_two_groups(), 8)
    rates(scheduler, 8)
    last = 1.0 if schedule.decay == "constant" else 0.0
    assert rates(scheduler, 2) == [pytest.approx([peak * last] * 2) for peak in (0.5, 2.0)]


def test_a_training_of_one_step_has_the_whole_rate():
    for schedule, _ in FACTORS.values():
        assert rates(schedule.of(optimizer_of_two_groups(), 1), 1) == [[0.5], [2.0]]


@pytest.mark.parametrize("name", FACTORS)
def test_the_state_is_plain_and_goes_on(name: str, tmp_path: Path):
    schedule, _ = FACTORS[name]
    whole = rates(schedule.of(optimizer_of_two_groups(), 8), 8)
    optimizer = optimizer_of_two_groups()
    scheduler = schedule.of(optimizer, 8)
    rates(scheduler, 3)
    torch.save([scheduler.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    state, of_optimizer = torch.load(tmp_path / "state.pt", weights_only=True)
    other = optimizer_of_two_groups()
    resumed = schedule.of(other, 8)
    other.load_state_dict(of_optimizer)
    resumed.load_state_dict(state)
    assert rates(resumed, 5) == [group[3:] for group in whole]


def test_a_private_training_follows_it_by_groups():
    model, told = make_model(), list[list[float]]()
    optimizer = pg.optim.AdamBC(
        [
            {"params": model[0].named_parameters(prefix="0"), "lr": 0.01},
            {"params": model[2].named_parameters(prefix="2"), "lr": 0.04},
        ]
    )

    def note(row: Any) -> None:
        told.append([group["lr"] for group in optimizer.param_groups])

    plan = make_plan(steps=4)
    options: dict[str, Any] = {"evaluate": lambda model: {}, "num_evaluations": 4, "on_evaluate": note}
    pg.fit(
        pg.PrivateGradient(model, loss_fn, plan), optimizer, make_data(), scheduler="linear", progress=False, **options
    )
    # Each row comes after the scheduler's step; there is none after the last.
    assert told == [pytest.approx([0.01 * f, 0.04 * f]) for f in (0.75, 0.5, 0.25, 0.25)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decay": "liner"}, "decay to be 'constant', 'linear' or 'cosine', got 'liner'; did you mean 'linear'"),
        ({"decay": "Cosine"}, "got 'Cosine'; did you mean 'cosine'"),
        ({"decay": None}, "decay to be 'constant', 'linear' or 'cosine', got None; "),
        ({"warmup": 1.0}, r"warmup to be in \[0, 1\), got 1\.0; give a share of the steps"),
        ({"warmup": -0.1}, r"warmup to be in \[0, 1\), got -0\.1; "),
        ({"warmup": math.nan}, r"warmup to be in \[0, 1\), got nan; "),
        ({"warmup": True}, r"warmup to be in \[0, 1\), got True; "),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(pg.PrivacyError, match=f"Schedule: expected .*{message}"):
        pg.Schedule(**given)


def test_a_warm_up_in_quotes_is_an_error():
    with pytest.raises(pg.PrivacyError, match=r"got '0\.05', a str"):
        pg.Schedule(warmup="0.05")  # pyright: ignore[reportArgumentType]


def test_a_schedule_is_of_a_number_of_steps():
    for steps in (0, 1.5, "8"):
        with pytest.raises(pg.PrivacyError, match=r"Schedule\.of: expected steps to be an integer >= 1, got"):
            pg.Schedule().of(optimizer_of_two_groups(), steps)  # pyright: ignore[reportArgumentType]


SPEC = tomllib.loads("""
title = "rates"
[data]
use = "digits"
[model]
use = "linear"
[privacy]
noise_multiplier = 4.0
delta = 1e-5
max_grad_norm = 1.0
num_examples = 1437
expected_batch_size = 48
steps = 4
[[methods]]
name = "DP-SGD"
optimizer = { use = "SGD", lr = 0.5 }
[run]
num_evaluations = 1
""")


def written(run: str = "", method: str = "") -> dict[str, Any]:
    """The experiment with a schedule in [run] and in its method, as TOML has them."""
    raw = copy.deepcopy(SPEC)
    raw["run"] |= tomllib.loads(run)
    raw["methods"][0] |= tomllib.loads(method)
    return raw


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of each update."""
    pytest.importorskip("sklearn")
    account_by_rdp(monkeypatch)
    found, step = list[float](), pg.optim.SGD.step

    def noting(self: pg.optim.SGD, *args: Any, **options: Any) -> None:
        found.append(self.param_groups[0]["lr"])
        step(self, *args, **options)

    monkeypatch.setattr(pg.optim.SGD, "step", noting)
    return found


LINEAR, COSINE = 'schedule = "linear"', 'schedule = { decay = "cosine", warmup = 0.25 }'
OF_COSINE = [0.25, 0.5, 0.375, 0.125]


@pytest.mark.parametrize(
    ("run", "method", "rates", "told"),
    [
        ("", "", [0.5] * 4, "constant"),
        (LINEAR, "", [0.5, 0.375, 0.25, 0.125], "linear"),
        ("", COSINE, OF_COSINE, "cosine, warm-up 0.25"),
        (LINEAR, COSINE, OF_COSINE, "cosine, warm-up 0.25"),
        (COSINE, 'schedule = "constant"', [0.5] * 4, "constant"),
        ("schedule = { warmup = 0.5 }", "", [0.5 / 3, 1 / 3, 0.5, 0.5], "constant, warm-up 0.5"),
    ],
)
def test_an_experiment_follows_its_schedule_or_its_methods(
    run: str, method: str, rates: list[float], told: str, used: list[float], tmp_path: Path
):
    spec = check_spec(written(run, method), "test")
    records = train(spec, tmp_path, seed=0, progress=False)
    assert used == pytest.approx(rates)
    assert metadata_of(spec, records, tmp_path, command="")["plan"]["schedule"] == told


def test_methods_of_a_comparison_have_schedules_of_their_own(used: list[float], tmp_path: Path):
    raw = written(LINEAR)
    raw["methods"].append(raw["methods"][0] | {"name": "other", "schedule": "constant"})
    spec = check_spec(raw, "test")
    records = compare(spec, tmp_path, progress=False)
    assert used == pytest.approx([0.5, 0.375, 0.25, 0.125, *[0.5] * 4])
    told = metadata_of(spec, records, tmp_path, command="")["plan"]["schedule"]
    assert told == "linear (DP-SGD), constant (other)"
    assert '"schedule"' in describe(spec)
    assert "schedule" not in describe(check_spec(SPEC, "test"))
    with pytest.raises(pg.PrivacyError, match="a different run"):
        compare(check_spec({**raw, "run": SPEC["run"]}, "test"), tmp_path, progress=False)


WRONG = {
    'schedule = "liner"': "{}.schedule to be one of constant, linear, cosine, got 'liner'; did you mean 'linear'",
    'schedule = { decay = "cosin" }': "{}.schedule.decay to be one of constant, .*, got 'cosin'; did you mean 'cosine'",
    "schedule = { warmup = 1.0 }": "{}.schedule.warmup to be valid .*less than 1.*, got 1.0.$",
    "schedule = { warmup = -0.1 }": "{}.schedule.warmup to be valid .*greater than or equal to 0.*, got -0.1.$",
    'schedule = { warmup = "0.05" }': "{}.schedule.warmup to be valid .*valid number.*, got '0.05'.$",
    "schedule = { warmpu = 0.05 }": "got '{}.schedule.warmpu'; did you mean 'warmup'",
    "schedule = 3": r"{}.schedule to be valid .*, got 3.$",
    'schedul = "linear"': "got '{}.schedul'; did you mean 'schedule'",
}


@pytest.mark.parametrize("place", ["run", "methods.DP-SGD"])
@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_schedule_in_a_file_is_one_clear_error(line: str, place: str):
    raw = written(line) if place == "run" else written(method=line)
    with pytest.raises(pg.PrivacyError, match=f"load_spec: expected .*{WRONG[line].format(place)}") as caught:
        check_spec(raw, "test")
    assert str(caught.value).count("expected") == 1
