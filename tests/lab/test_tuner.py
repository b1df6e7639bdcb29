"""The choice among candidates: what a grid shows, how grids grow together, and the same number of trainings for all."""

import copy
import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import privgrad as pg
from conftest import account_by_rdp
from privgrad.ledger.ledger import Ledger
from privgrad_lab import runner, tuner
from privgrad_lab.build import make_data
from privgrad_lab.load_spec import check_spec
from privgrad_lab.records import candidate_of
from privgrad_lab.report.metadata import metadata_of
from privgrad_lab.report.texts import total_text
from privgrad_lab.runner import Run, compare
from privgrad_lab.spec import Candidate, Spec
from privgrad_lab.tuner import best_candidate, judge, wider

Records = list[dict[str, Any]]
SPREAD = 0.1  # of two seeds at cost - SPREAD / sqrt(2) and cost + SPREAD / sqrt(2)


def record(method: str, rate: float, cost: float, *, by: str = "noise_step", **given: Any) -> dict[str, Any]:
    values = {"max_grad_norm": 1.0, "lr": None, "noise_step": None, "own": []} | {by: rate}
    return {"method": method, "phase": "tuning", "validation_loss": cost, **values, **given}


def grid(method: str, costs: Mapping[float, float], *, by: str = "noise_step", **given: Any) -> Records:
    """Two seeds of each rate."""
    shift = SPREAD / math.sqrt(2)
    return [record(method, rate, cost + way, by=by, **given) for rate, cost in costs.items() for way in (-shift, shift)]


# costs by rate; low, high, is_inside, leads_at, the text of the verdict
GRIDS: dict[str, tuple[Mapping[float, float], tuple[float, float, bool, str | None], str]] = {
    "inside": ({0.01: 3, 0.1: 1, 1.0: 3}, (0.1, 0.1, True, None), "inside 0.01 to 1"),
    "a plateau inside": (
        {0.01: 3, 0.1: 1.05, 0.3: 1, 1.0: 3},
        (0.1, 0.3, True, None),
        "inside 0.01 to 1; plateau 0.1 to 0.3",
    ),
    "a plateau that reaches the edge": (
        {0.01: 1.05, 0.1: 1, 1.0: 3},
        (0.01, 0.1, False, None),
        "not shown to be inside 0.01 to 1; plateau 0.01 to 0.1",
    ),
    "a plateau of the whole grid": (
        {0.01: 1.05, 0.1: 1.02, 1.0: 1},
        (0.01, 1.0, False, None),
        "not shown to be inside 0.01 to 1; plateau 0.01 to 1",
    ),
    "an edge that leads": ({0.01: 3, 0.1: 2, 1.0: 1}, (1.0, 1.0, False, "high"), "best at the upper edge of 0.01 to 1"),
    "the other edge": ({0.01: 1, 0.1: 2, 1.0: 3}, (0.01, 0.01, False, "low"), "best at the lower edge of 0.01 to 1"),
    "equal ends with a hill between": (
        {0.01: 1.05, 0.1: 2, 1.0: 1},
        (1.0, 1.0, False, "high"),
        "best at the upper edge of 0.01 to 1",
    ),
    "a diverged edge": ({0.01: 3, 0.1: 1, 1.0: math.inf}, (0.1, 0.1, True, None), "inside 0.01 to 1"),
    "not a number": ({0.01: 3, 0.1: 1, 1.0: math.nan}, (0.1, 0.1, True, None), "inside 0.01 to 1"),
    "diverged beyond the smallest": (
        {0.01: 1, 0.1: math.inf, 1.0: math.nan},
        (0.01, 0.01, False, "low"),
        "best at the lower edge of 0.01 to 1",
    ),
    "diverged everywhere": (
        {0.01: math.inf, 0.1: math.inf, 1.0: math.nan},
        (0.01, 0.01, False, "low"),
        "best at the lower edge of 0.01 to 1",
    ),
    "one rate": ({0.1: 1}, (0.1, 0.1, False, None), "one value tried"),
}


@pytest.mark.parametrize("by", ["noise_step", "lr"])
@pytest.mark.parametrize("name", GRIDS)
def test_what_a_grid_shows(name: str, by: str):
    costs, shown, text = GRIDS[name]
    records = grid("m", costs, by=by) + grid("other", {7.0: -9.0}, by=by)
    verdict = judge(records, "m", "loss")
    assert (verdict.low, verdict.high, verdict.is_inside, verdict.leads_at) == shown
    assert verdict.rates == tuple(costs)
    assert getattr(verdict.best, by) == min(costs, key=lambda r: (math.inf if math.isnan(costs[r]) else costs[r], r))
    assert judge(records, "m", "loss").text == text
    assert judge(list(reversed(records)), "m", "loss").leads_at == verdict.leads_at


def test_the_spread_is_pooled_over_the_better_half_of_the_candidates():
    far = [record("m", 1.0, cost) for cost in (5.0, 50.0)]
    records = grid("m", {0.01: 1.0, 0.1: 2.0}) + far + [record("m", 10.0, cost) for cost in (60.0, math.inf)]
    assert judge(records, "m", "loss").spread == pytest.approx(SPREAD)
    records = [record("m", 0.1, cost) for cost in (1.0, 1.2)] + [record("m", 1.0, cost) for cost in (2.0, 2.8)]
    assert judge(records, "m", "loss").spread == pytest.approx(math.sqrt(0.02))
    three = records + [record("m", 0.01, cost) for cost in (9.0, 10.0)]
    assert judge(three, "m", "loss").spread == pytest.approx(math.sqrt((0.02 + 0.32) / 2))


def test_one_seed_shows_the_inside_of_no_grid():
    records = [record("m", rate, cost) for rate, cost in {0.01: 3.0, 0.1: 1.0, 1.0: 3.0}.items()]
    verdict = judge(records, "m", "loss")
    assert math.isnan(verdict.spread)
    assert not verdict.is_inside
    assert judge(records, "m", "loss").text == "not shown to be inside 0.01 to 1"


def test_each_rate_is_judged_with_its_best_other_values():
    records = grid("m", {0.01: 3, 0.1: 1.4, 1.0: 2}, own=[["momentum", 0.5]])
    records += grid("m", {0.01: 4, 0.1: 5, 1.0: 1}, own=[["momentum", 0.9]])
    verdict = judge(records, "m", "loss")
    assert verdict.best == Candidate(1.0, noise_step=1.0, own=(("momentum", 0.9),))
    assert (verdict.lead_low, verdict.leads_at) == (pytest.approx(2.0), "high")
    level = records + grid("m", {0.1: 1.05}, max_grad_norm=2.0)
    assert judge(level, "m", "loss").leads_at is None


def test_an_accuracy_is_a_cost_with_a_minus():
    records = [
        r | {"validation_accuracy": -r["validation_loss"]} for r in grid("m", {0.01: -0.3, 0.1: -0.9, 1.0: -0.2})
    ]
    verdict = judge(records, "m", "accuracy")
    assert verdict.best.noise_step == 0.1
    assert verdict.lead_low == pytest.approx(0.6)
    assert judge(records, "m", "loss") == verdict


INSIDE, HIGH, LOW = {0.01: 3, 0.1: 1, 1.0: 3}, {0.01: 3, 0.1: 2, 1.0: 1}, {0.01: 1, 0.1: 2, 1.0: 3}
LEVEL = {0.01: 1.02, 0.1: 1.01, 1.0: 1.0}


def of_grids(**grids: Mapping[float, float]) -> tuple[Records, list[str]]:
    """Records of methods with noise steps; of names that begin with lr, with learning rates."""
    found = [grid(name, costs, by="lr" if name.startswith("lr") else "noise_step") for name, costs in grids.items()]
    return sum(found, Records()), list(grids)


def test_one_method_that_leads_at_an_edge_widens_the_grid_of_all():
    records, names = of_grids(a=INSIDE, b=HIGH, c=LEVEL)
    assert wider(records, names, "loss") == {"a": 10.0, "b": 10.0, "c": 10.0}
    records, names = of_grids(a=LOW, b=INSIDE)
    assert wider(records, names, "loss") == {"a": 0.001, "b": 0.001}


def test_the_majority_of_those_that_lead_decides_on_the_shared_side():
    records, names = of_grids(a=LOW, b=HIGH, c=HIGH, d=INSIDE)
    assert wider(records, names, "loss") == dict.fromkeys("abcd", 10.0)


def test_a_grid_of_rates_that_lie_close_together_grows_too():
    assert tuner._beyond([1.0, 1.01], "high") > 1.01
    assert tuner._beyond([0.995, 1.0], "low") < 0.995
    assert tuner._beyond([0.01, 0.025], "high") == 0.062


def test_a_method_with_learning_rates_grows_beyond_its_own_edge():
    low_is_nearer = {0.5: 1.4, 1.0: 1, 2.0: 3}
    records, names = of_grids(a=HIGH, lr_leads={5.0: 1, 10.0: 2, 40.0: 3}, lr_inside=low_is_nearer)
    assert wider(records, names, "loss") == {"a": 10.0, "lr_leads": 2.5, "lr_inside": 0.25}


def test_a_learning_rate_that_leads_alone_widens_the_shared_grid_at_its_nearer_edge():
    nearer_high = {0.01: 3, 0.1: 1, 1.0: 1.5}
    records, names = of_grids(a=nearer_high, b=nearer_high, c={0.01: 1.5, 0.1: 1, 1.0: 3}, lr=LOW)
    assert wider(records, names, "loss") == {"a": 10.0, "b": 10.0, "c": 10.0, "lr": 0.001}


def test_ties_of_own_values_of_any_type_are_broken():
    values = ("x", 2, 1.0, None)
    level = [run for value in values for run in grid("a", {0.1: 1}, own=[["foreach", value]])]
    assert judge(level, "a", "loss").best.own == (("foreach", 1.0),)


def test_new_rates_keep_the_distance_of_the_outermost_two():
    records, names = of_grids(a={0.004: 3, 0.01: 2, 0.025: 1})
    assert wider(records, names, "loss") == {"a": 0.062}
    records, names = of_grids(a={0.004: 1, 0.02: 2, 0.04: 3})
    assert wider(records, names, "loss") == {"a": 0.0008}


def test_no_grid_grows_when_nothing_leads():
    for grids in ({"a": INSIDE, "b": LEVEL}, {"a": LEVEL}, {"a": {0.1: 1.0}, "lr": {2.0: 1.0}}):
        records, names = of_grids(**grids)
        assert wider(records, names, "loss") is None


def test_grids_that_diverged_grow_downwards():
    diverged = dict.fromkeys((0.01, 0.1, 1.0), math.inf)
    records, names = of_grids(a=diverged, b=INSIDE, lr=diverged)
    assert wider(records, names, "loss") == {"a": 0.001, "b": 0.001, "lr": 0.001}


def test_grids_grow_to_sixteen_rates():
    def falling(count: int) -> dict[float, float]:
        return {2.0**k: -float(k) for k in range(count)}

    records, names = of_grids(a=falling(15), b=falling(15))
    assert wider(records, names, "loss") == {"a": 33000.0, "b": 33000.0}
    records, names = of_grids(a=falling(16), b=falling(16))
    assert wider(records, names, "loss") is None


TEXT = """
title = "grids"
[data]
use = "digits"
validation = 200
public = 37
[model]
use = "linear"
[privacy]
noise_multiplier = 1.0
delta = 1e-4
max_grad_norm = 0.1
num_examples = 1200
expected_batch_size = 60
steps = 5
[[methods]]
name = "momentum"
optimizer = { use = "SGD", momentum = [0.0, 0.9] }
[[methods]]
name = "Adam"
optimizer = { use = "Adam", betas = [[0.9, 0.99], [0.5, 0.99]] }
[[methods]]
name = "scaled"
optimizer = "SGD"
precondition = { use = "public_rmsprop", noise_eps = [0.1, 10.0] }
[[methods]]
name = "mirror"
optimizer = { use = "MirrorDescent", lr = [1.0, 4.0] }
max_grad_norm = [0.1, 0.2]
[[methods]]
name = "own rates"
optimizer = { use = "SGD", lr = [0.5, 1.0] }
non_private = true
[[methods]]
name = "fixed"
optimizer = { use = "SGD", noise_step = 0.02 }
[tuning]
noise_steps = [0.01, 0.04]
seeds = [100, 101]
by = "loss"
extend = true
[run]
num_evaluations = 1
"""


def tables(**changes: dict[str, Any]) -> dict[str, Any]:
    raw = tomllib.loads(TEXT)
    return raw | {name: raw[name] | change for name, change in changes.items()}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon by RDP alone, and the data loaded once."""
    pytest.importorskip("sklearn")
    account_by_rdp(monkeypatch)
    data = make_data(check_spec(tables(), "test"))
    monkeypatch.setattr(runner.build, "make_data", lambda spec: data)


def test_the_candidates_of_a_spec_survive_json():
    spec = check_spec(tables(), "test")
    assert spec.grid(spec.methods[1])[1] == Candidate(0.1, noise_step=0.01, own=(("betas", (0.5, 0.99)),))
    adam = {"use": "Adam", "eps": [1e-8, 1], "noise_step": [0.1, 0.2]}
    radii = {"perturb": {"use": "BAM", "radius": [0.0, 0.1]}, "max_grad_norm": [0.1, 1.0]}
    raw = tables() | {"methods": [{"name": "all", "optimizer": adam} | radii]}
    everything = check_spec(raw | {"tuning": {"seeds": [0]}}, "test")
    for found in (spec, everything):
        for method in found.methods:
            for candidate in found.grid(method):
                measured = 0.123 if candidate.noise_step is None else candidate.noise_step
                kept = json.loads(json.dumps(candidate._asdict() | {"noise_step": measured}))
                assert candidate_of(kept) == candidate
                assert hash(candidate_of(kept)) == hash(candidate)
    assert len(set(everything.grid(everything.methods[0]))) == 16
    older = {"max_grad_norm": 1.0, "lr": 0.5}  # as records were before there were noise steps
    assert candidate_of(older) == Candidate(1.0, 0.5)


def trainings(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(one["method"] for one in records if one["phase"] == "tuning"))


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_all_methods_of_a_comparison_get_the_same_number_of_trainings(tmp_path: Path):
    """A grid far below the best steps, which has to grow; three of the methods train for real."""
    raw = tables(tuning={"noise_steps": [0.002, 0.02]})
    raw["methods"] = [raw["methods"][0], raw["methods"][2], raw["methods"][3]]
    spec = check_spec(raw, "test")
    records = compare(spec, tmp_path, progress=False)
    found = trainings(records)
    assert set(found) == {"momentum", "scaled", "mirror"}
    assert len(set(found.values())) == 1
    assert found["momentum"] > 2 * 2 * 2
    rates = {name: judge(records, name, "loss").rates for name in found}
    assert rates["momentum"] == rates["scaled"]
    assert len(rates["mirror"]) == len(rates["momentum"]) > 2
    for one in records:
        if one["phase"] == "final":
            assert candidate_of(one) == best_candidate(records, one["method"], "loss")
            own = {name.removeprefix("precondition."): value for name, value in one["own"]}
            assert one["precondition"] is None or one["precondition"]["options"] == own
            assert one["options"] == (own if one["method"] == "momentum" else {})
    folders = [
        Run(method, candidate_of(one), one["seed"], one["phase"]).name for method in spec.methods for one in records
    ]
    assert {path.name for path in (tmp_path / "runs").iterdir()} <= set(folders)
    assert len(list((tmp_path / "runs").iterdir())) == len(records)
    assert compare(spec, tmp_path, progress=False) == records


BEST = {"momentum": 0.6, "Adam": 0.02, "scaled": 0.05, "mirror": 0.07, "own rates": 40.0, "fixed": 1.0}


class Made:
    """In place of trainings: costs with a best rate by method, and an interruption after some of them."""

    def __init__(self, stop_after: int | None) -> None:
        self.left = stop_after

    def __call__(self, spec: Spec, run: Run, *_: Any, **__: Any) -> dict[str, Any]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left = None if self.left is None else self.left - 1
        rate = run.candidate.noise_step or run.candidate.lr or 0.0
        cost = abs(math.log10(rate / BEST[run.method.name])) + 0.05 * ((run.seed or 0) % 2)
        cost += 0.01 * spec.grid(run.method).index(run.candidate) if run.candidate in spec.grid(run.method) else 0.0
        values = {"validation_loss": cost, "method": run.method.name, "seed": run.seed, "phase": run.phase}
        return {**json.loads(json.dumps(run.candidate._asdict())), **values}


@pytest.mark.usefixtures("quick")
def test_an_interrupted_comparison_ends_like_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Interrupted before, within and after the growth of the grids."""
    spec = check_spec(tables(), "test")

    def compared(folder: str, stop_after: int | None) -> Records:
        monkeypatch.setattr(runner, "_train_one", Made(stop_after))
        return compare(spec, tmp_path / folder, progress=False)

    whole = compared("whole", None)
    found = trainings(whole)
    assert found.pop("own rates") == 2 * 6
    assert found == dict.fromkeys(("momentum", "Adam", "scaled", "mirror"), 2 * 2 * 5)
    assert (
        judge(whole, "momentum", "loss").rates == judge(whole, "scaled", "loss").rates == (0.01, 0.04, 0.16, 0.64, 2.6)
    )
    assert judge(whole, "mirror", "loss").rates == (0.015, 0.062, 0.25, 1.0, 4.0)
    for stop_after in range(1, len(whole), 4):
        with pytest.raises(KeyboardInterrupt):
            compared(str(stop_after), stop_after)
        assert compared(str(stop_after), None) == whole, stop_after


@pytest.mark.usefixtures("quick")
def test_a_fixed_rate_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raw = tables()
    raw["methods"] = [raw["methods"][5] | {"max_grad_norm": [0.1, 0.2]}]
    monkeypatch.setattr(runner, "_train_one", Made(None))
    records = compare(check_spec(raw, "test"), tmp_path, progress=False)
    assert trainings(records) == {"fixed": 4}
    assert {one["noise_step"] for one in records} == {0.02}


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:NOT PRIVATE", "ignore:.*simulates a plan")
@pytest.mark.parametrize("by", ["loss", "train_loss"])
def test_tuning_by_simulation_has_smaller_batches_and_final_trainings_the_plan(tmp_path: Path, by: str):
    raw = tables(tuning={"simulate": 4, "noise_steps": [0.02, 0.04], "extend": False, "by": by}, run={"seeds": [100]})
    raw["methods"] = [raw["methods"][0]]
    spec = check_spec(raw, "test")
    records = compare(spec, tmp_path, progress=False)
    found = {phase: [one for one in records if one["phase"] == phase] for phase in ("tuning", "final")}
    assert len(found["tuning"]) == 2 * 2 * 2
    assert {one["epsilon"] for one in found["tuning"]} == {math.inf}
    simulated, epsilon = {one["simulates_epsilon"] for one in found["tuning"]}, spec.plan(None).epsilon()
    assert (simulated, [one["epsilon"] for one in found["final"]]) == ({epsilon}, [epsilon])
    sizes = {
        path.parent.name: Ledger(path, read_only=True).plan_facts["expected_batch_size"]
        for path in tmp_path.rglob("ledger.jsonl")
    }
    assert {size for name, size in sizes.items() if "-tuning-" in name} == {15}
    assert {size for name, size in sizes.items() if "-final-" in name} == {60}
    total = metadata_of(spec, records, tmp_path, command="")["total_epsilon"]
    assert total_text(total, tuned=True).endswith("no finite ε: tuning simulates the plan in smaller batches.")


def changed(method: str = "", tuning: str = "", index: int = 0) -> dict[str, Any]:
    """Return the experiment with lines added to one of its methods, or to [tuning]."""
    raw = copy.deepcopy(tables())
    raw["methods"][index] |= tomllib.loads(method)
    raw["tuning"] |= tomllib.loads(tuning)
    return raw


def without_noise(methods: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the experiment with these methods and a plan without noise."""
    return tables(privacy={"noise_multiplier": 0.0}) | {"methods": methods}


ADAM, SCALED, MIRROR, FREE = 1, 2, 3, 4
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no noise steps": (changed(tuning="noise_steps = []"), r"tuning\.noise_steps to be valid .*at least 1 item"),
    "a noise step of zero": (changed(tuning="noise_steps = [0.0, 0.1]"), r"tuning\.noise_steps.* greater than 0"),
    "one number for a grid": (changed(tuning="noise_steps = 0.1"), r"tuning\.noise_steps to be valid .*valid list"),
    "one number's name for a grid": (changed(tuning="noise_step = [0.1]"), "tuning.noise_step'; did you mean 'noise_s"),
    "one seed": (changed(tuning="seeds = [100]"), r"tuning\.seeds to hold two seeds or more, got \[100\]; the spread"),
    "one seed, twice": (changed(tuning="seeds = [7, 7]"), r"tuning\.seeds to differ, got \[7, 7\]"),
    "a final seed, twice": (tables(run={"seeds": [0, 1, 0]}), r"run\.seeds to differ, got \[0, 1, 0\]"),
    "groups of a training without clipping": (
        changed("group_size = 2", index=FREE),
        r"methods\.own rates\.group_size to be absent for non_private, got 2",
    ),
    "bands of a training without noise": (
        changed("bands = 2", index=FREE),
        r"methods\.own rates\.bands to be absent for non_private, got 2",
    ),
    "a grid's name for a method": (
        changed('optimizer = { use = "SGD", noise_steps = [0.1] }'),
        "momentum.optimizer.noise_steps'; did you mean 'noise_step'",
    ),
    "a negative noise step": (
        changed('optimizer = { use = "SGD", noise_step = -0.1 }'),
        r"methods\.momentum\.optimizer: SGD: expected noise_step to be a .* >= 0, got -0\.1",
    ),
    "both rates": (
        changed('optimizer = { use = "SGD", noise_step = 0.1, lr = 0.5 }'),
        r"methods\.momentum\.optimizer: SGD: expected .*lr",
    ),
    "a noise step without noise": (
        changed('optimizer = { use = "SGD", noise_step = 0.1 }\nnon_private = true'),
        r"noise_step to be given without this, got non_private; give lr in its place",
    ),
    "a noise step of Adagrad": (
        changed('optimizer = { use = "Adagrad", noise_step = 0.1 }'),
        r"methods\.momentum\.optimizer: Adagrad: expected noise_step to be absent",
    ),
    "a noise step of amsgrad": (
        changed('optimizer = { use = "Adam", amsgrad = true }', index=ADAM),
        r"methods\.Adam\.optimizer: Adam: expected noise_step to be absent .*amsgrad=True",
    ),
    "a noise step of momentum 1": (
        changed('optimizer = { use = "SGD", momentum = 1.0 }'),
        r"methods\.momentum\.optimizer: .*momentum=1\.0",
    ),
    "a noise step of gamma'": (
        changed('optimizer = { use = "AdamBC", gamma_prime = [1e-8, 1e-6] }'),
        r"methods\.momentum\.optimizer: .*give debias_floor in its place",
    ),
    "no grid without a noise step": (
        changed('optimizer = "Adagrad"'),
        r"methods\.momentum\.optimizer to have a rate, got None; give it an lr, or a list: it has no noise step",
    ),
    "one rate too many": (
        changed('optimizer = { use = "MirrorDescent", lr = [1.0, 2.0, 4.0] }', index=MIRROR),
        r"methods\.mirror\.optimizer\.lr to be a grid of 2 rates, because MirrorDescent has no noise step, got \[1",
    ),
    "one rate, twice": (
        changed('optimizer = { use = "MirrorDescent", lr = [1.0, 1.0] }', index=MIRROR),
        r"methods\.mirror\.optimizer\.lr to be a grid of 2 rates",
    ),
    "more values of one method": (
        changed('optimizer = { use = "SGD", momentum = [0.0, 0.5, 0.9] }'),
        r"candidates of methods to be equally many, got 6 \(momentum\), 4 \(Adam\), 4 \(scaled\), 4 \(mirror\)",
    ),
    "a value, twice": (
        changed('optimizer = { use = "SGD", momentum = [0.9, 0.9] }'),
        r"candidates of methods to be equally many, got 2 \(momentum\), 4 \(Adam\)",
    ),
    "a grid of an unknown option": (
        changed('optimizer = { use = "SGD", momentun = [0.5, 0.9] }'),
        r"got 'methods\.momentum\.optimizer\.momentun'; did you mean 'momentum'",
    ),
    "a preconditioner's unknown value": (
        changed('precondition = { use = "public_rmsprop", noise_epps = [0.1, 1.0] }', index=SCALED),
        r"got 'methods\.scaled\.precondition\.noise_epps'; did you mean 'noise_eps'",
    ),
    "nothing to tune": (
        changed('optimizer = { use = "SGD", momentum = [] }'),
        r"methods\.momentum\.optimizer\.momentum to have a value to try",
    ),
    "a table to tune": (
        changed('optimizer = { use = "SGD", maximize = [{}, { a = 1 }] }'),
        r"methods\.momentum\.optimizer\.maximize to be valid .*boolean.*, got \{\}",
    ),
    "a text for a number": (
        changed('optimizer = { use = "SGD", momentum = ["0.5", 0.9] }'),
        r"methods\.momentum\.optimizer\.momentum to be valid .*number.*, got '0\.5'",
    ),
    "a value out of its range": (
        changed('optimizer = { use = "SGD", momentum = [0.5, -0.9] }'),
        r"methods\.momentum\.optimizer: .*-0\.9",
    ),
    "both units": (
        changed('precondition = { use = "public_adam", eps = 1e-5, noise_eps = [0.1, 1.0] }', index=SCALED),
        r"methods\.scaled\.precondition: .* eps to be absent next to noise_eps",
    ),
    "a unit of zero": (
        changed('precondition = { use = "public_rmsprop", noise_eps = [0.0, 1.0] }', index=SCALED),
        r"methods\.scaled\.precondition: .*noise_eps to be a positive finite",
    ),
    "a power above 1": (
        changed(
            'optimizer = { use = "SGD", lr = 1.0 }\nprecondition = { use = "frequencies", power = 1.5 }', index=SCALED
        ),
        r"methods\.scaled\.precondition: .*power to be in \[0, 1\], got 1\.5",
    ),
    "scales by the noise of a training without": (
        changed('precondition = { use = "public_rmsprop" }', index=FREE),
        r"methods\.own rates\.precondition\.eps to be given where no noise sets the unit, got non_private",
    ),
    "scales by the noise of a plan without": (
        without_noise([tables()["methods"][2] | {"optimizer": {"use": "SGD", "lr": 1.0}}]),
        r"methods\.scaled\.precondition\.eps to be given where no noise sets the unit, got privacy\.noise",
    ),
    "a simulation of a simulation": (
        tables(privacy={"simulate": 2}, tuning={"simulate": 2}),
        r"tuning\.simulate to be absent with privacy\.simulate, got 2",
    ),
    "a noise step of a wrong noise": (
        changed('assumed_noise_std = 0.1\noptimizer = { use = "SGD", noise_step = 0.1 }'),
        r"methods\.momentum\.optimizer\.noise_step to be given without this, got assumed_noise_std; give lr",
    ),
    "noise steps of a plan without noise": (
        without_noise(tables()["methods"][:1]),
        r"privacy\.noise_multiplier to be > 0 for momentum, got 0\.0; give lr in place of noise steps",
    ),
    "a noise step of a plan without noise": (
        without_noise(tables()["methods"][5:]),
        r"privacy\.noise_multiplier to be > 0 for fixed, got 0\.0; give lr in place of noise steps",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grid_in_a_file_is_one_clear_error(name: str):
    raw, message = WRONG[name]
    with pytest.raises(pg.PrivacyError, match=f"expected .*{message}|^{message}") as caught:
        check_spec(raw, "test.toml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(": expected ") == 1


@pytest.mark.parametrize("eps", [1e-5, [1e-5, 1e-3]])
def test_scales_of_a_training_without_noise_need_eps(eps: Any):
    raw = changed(index=FREE)
    raw["methods"][FREE]["precondition"] = {"use": "public_rmsprop", "eps": eps}
    check_spec(raw, "test")
