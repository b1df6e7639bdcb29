"""A private comparison: its price, its noise, what it writes, and that an interruption spends nothing twice."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import dp_event, pld, rdp
from torch import nn
from typer.testing import CliRunner

import privgrad as pg
from privgrad.accounting.accountant import Release, epsilon
from privgrad.accounting.composition import RDP_ORDERS
from privgrad.accounting.mechanisms import Split
from privgrad.cli import app
from privgrad.data import DataSet, digits
from privgrad.errors import BudgetExceededError, PrivacyError
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Ledger
from privgrad.progress import bars
from privgrad.statement.text import statement
from privgrad_lab import paid_runner, runner
from privgrad_lab.comparison import paid_report_of
from privgrad_lab.load_spec import check_spec
from privgrad_lab.paid_runner import PaidFolder, largest_total
from privgrad_lab.prices import price, prices_of
from privgrad_lab.records import claim, describe, require_same
from privgrad_lab.spec import Spec

METHOD: dict[str, Any] = {"name": "DP-SGD", "optimizer": {"use": "SGD", "momentum": 0.9}}


def at_rate(name: str = "DP-SGD", **rate: Any) -> dict[str, Any]:
    return METHOD | {"name": name, "optimizer": METHOD["optimizer"] | rate}


def spec_of(*, way: str | None = "trials", steps: int = 3, total: float = 2.0, **changes: Any) -> Spec:
    """Return the spec of a small private comparison on digits."""
    raw: dict[str, Any] = {
        "title": "small",
        "data": {"use": "digits"},
        "model": {"use": "linear"},
        "privacy": {
            "total_epsilon": total,
            "delta": 1e-4,
            "max_grad_norm": 1.0,
            "num_examples": 1437,
            "expected_batch_size": 64,
            "steps": steps,
        },
        "methods": [METHOD],
        "tuning": {"way": way, "noise_steps": [0.05, 0.2]},
    }
    if way is None:
        del raw["tuning"]
        raw["methods"] = [at_rate(noise_step=0.1)]
    for place, value in changes.items():
        table, _, key = place.partition("__")
        raw[table] = raw[table] | {key: value} if key else value
    return check_spec(raw, "spec.toml")


def outcome_of(spec: Spec, records: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    return paid_runner.outcome_of(spec, price(spec), records, PaidFolder(spec, price(spec), out))


def tree(cost: Any, spec: Spec) -> tuple[Any, Any]:
    """Return the events of a private comparison, built by hand, and the accountant that knows them."""
    table, count = spec.privacy, cost.candidates
    rate, steps = table.expected_batch_size / table.num_examples, table.steps

    def training(sigma: float) -> Any:
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
        return dp_event.SelfComposedDpEvent(event, steps)

    in_training = cost.score_noise is not None and (spec.tuning is None or spec.tuning.score_on == "training")
    scores = [dp_event.GaussianDpEvent(cost.score_noise or 0.0)] if in_training else []
    if cost.way == "select":
        assert spec.tuning is not None
        run = dp_event.ComposedDpEvent([training(cost.noise_multiplier), *scores])
        return dp_event.RepeatAndSelectDpEvent(run, spec.tuning.mean_runs, spec.tuning.shape), rdp.RdpAccountant(
            RDP_ORDERS
        )
    parts = [training(cost.noise_multiplier)]
    if cost.way == "trials":
        parts += count * [training(cost.trial_noise)] + count * scores
    return dp_event.ComposedDpEvent(parts), pld.PLDAccountant(value_discretization_interval=1e-4)


FEW = [("none", 1.0, 1, "training"), ("trials", 1.0, 2, "training"), ("select", 3.0, 2, "training")]
CASES = [
    *itertools.product(["none"], [0.5, 3.0, 8.0], [1], ["training"]),
    *itertools.product(["trials"], [0.5, 3.0, 8.0], [2, 6], ["training", "held-out", "public"]),
    *itertools.product(["select"], [1.0, 3.0], [2, 6], ["training", "held-out", "public"]),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("way", "total", "count", "score_on"), [*FEW, *SLOW])
def test_the_total_is_that_of_a_tree_of_events_built_by_hand(way: str, total: float, count: int, score_on: str):
    steps = [0.05 * (k + 1) for k in range(count)]
    tuning = {"way": way, "noise_steps": steps, "score_on": score_on}
    spec = spec_of(way=None, steps=20, total=total) if way == "none" else spec_of(steps=20, total=total, tuning=tuning)
    cost: Any = price(spec)
    event, accountant = tree(cost, spec)
    accountant.compose(event)
    by_hand = accountant.get_epsilon(spec.privacy.delta)
    if way != "select":  # the smaller of both accountants is valid
        other = rdp.RdpAccountant(RDP_ORDERS)
        other.compose(event)
        by_hand = min(by_hand, other.get_epsilon(spec.privacy.delta))
    assert cost.epsilon <= total
    assert cost.epsilon == pytest.approx(by_hand, rel=1e-3)
    assert cost.epsilon == pytest.approx(total, rel=2e-3)
    assert isinstance(event, dp_accounting.DpEvent)
    if score_on == "held-out":  # these people pay for their scores alone, and up to the same total
        score = dp_event.GaussianDpEvent(cost.score_noise)
        held = dp_event.RepeatAndSelectDpEvent(score, 8.0, 1.0) if way == "select" else score
        other = rdp.RdpAccountant(RDP_ORDERS) if way == "select" else pld.PLDAccountant()
        other.compose(held, 1 if way == "select" else count)
        assert other.get_epsilon(spec.privacy.delta) == pytest.approx(total, rel=2e-3)


def test_the_ways_are_priced_for_one_total():
    prices = prices_of(spec_of())
    assert set(prices) == {"none", "trials", "select"}
    assert prices["none"].noise_multiplier < prices["trials"].noise_multiplier < prices["select"].noise_multiplier


@pytest.mark.parametrize("way", [None, "trials", "select"])
def test_a_private_comparison_commits_first_and_publishes_what_was_paid_for(way: str | None, tmp_path: Path):
    spec = spec_of(way=way)
    records = paid_runner.compare(spec, tmp_path, progress=False)
    cost = price(spec)
    outcome = outcome_of(spec, records, tmp_path)
    assert outcome["epsilon"] == cost.epsilon <= 2.0
    assert outcome["budget_spent"] == pytest.approx(cost.epsilon)
    phases = [record["phase"] for record in records]
    assert phases == ["tuning"] * (2 if way == "trials" else 0) + ["final"]
    assert all(record["seed"] is None for record in records)
    # A score with noise, of the training people, has a name of its own: it is no accuracy on held-out people.
    scored = {"trials": records[:-1], "select": records}.get(way or "", [])
    assert [record for record in records if "tuning_score" in record] == scored
    assert all((one["tuning_score_by"], one["tuning_score_on"]) == ("accuracy", "training") for one in scored)
    assert not any("validation_accuracy" in record for record in records)
    assert [record.get("measured_on") for record in records] == [None] * (len(records) - 1) + ["test"]
    published = [path for path in tmp_path.rglob("ledger.jsonl") if "raw" not in path.relative_to(tmp_path).parts]
    releases = sum(Ledger(path, read_only=True).releases for path in published)
    expected = {None: 3, "trials": 3 * 3 + 2, "select": 3 + 1}[way]
    assert releases == expected
    text = "\n".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert "raw_" not in text
    assert (tmp_path / "model.pt").exists()
    assert (tmp_path / "raw").exists() == (way == "select")
    low, high = outcome["interval"]
    assert low < outcome["accuracy"] < high
    # The epsilon of one training that was chosen among others is no guarantee: the ledger refers to the budget.
    (held,) = Budget(tmp_path / "budget.jsonl").commitments
    for path in tmp_path.rglob("ledger.jsonl"):
        ledger = Ledger(path, read_only=True)
        assert ledger.commitment == held.name
        with pytest.raises(PrivacyError, match=r"on the budget's file, budget\.jsonl"):
            statement([ledger])
        refused = CliRunner().invoke(app, ["epsilon", str(path)])
        assert "budget.jsonl" in str(refused.exception)
        assert "epsilon_pld" not in refused.output
    again = paid_runner.compare(spec, tmp_path, progress=False)
    assert again == records


def test_the_winner_of_a_selection_is_the_run_with_the_best_score(tmp_path: Path):
    records = paid_runner.compare(spec_of(way="select"), tmp_path, progress=False)
    chosen = json.loads((tmp_path / "raw" / "selection.txt").read_text().splitlines()[0])
    scores = [
        json.loads((tmp_path / "raw" / "runs" / str(k) / "score" / "ledger.jsonl").read_text().splitlines()[1])
        for k in range(len(chosen))
    ]
    assert len(records) == 1
    best = max(value for line in scores for value in line["values"])
    assert records[0]["tuning_score"] == pytest.approx(best / 1437)
    assert (tmp_path / "raw").stat().st_mode & 0o077 == 0  # the number of trainings is secret
    assert [path.name for path in (tmp_path / "raw").glob("selection.*")] == ["selection.txt"]
    checkpoints = list(tmp_path.rglob("checkpoint.pt"))
    assert checkpoints
    assert all(path.stat().st_mode & 0o077 == 0 for path in checkpoints)


@pytest.mark.usefixtures("by_rdp_here")
def test_published_files_do_not_show_how_many_runs_a_selection_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(tuning={"way": "select", "noise_steps": [0.1], "mean_runs": 2.0})
    seen: list[set[tuple[str, int]]] = []
    for runs in (1, 4):
        monkeypatch.setattr(paid_runner, "draw_repetitions", lambda *_, runs=runs: runs)
        out = tmp_path / str(runs)
        paid_report_of(spec, paid_runner.compare(spec, out, progress=False), out, command="")
        raw = out / "raw"
        assert len(list((raw / "runs").iterdir())) == runs
        published = [out, *(path for path in out.rglob("*") if path != raw and not path.is_relative_to(raw))]
        assert {path.stat().st_mtime % 86400 for path in published} == {0.0}
        assert len({path.stat().st_mtime for path in published}) == 1
        texts = {path: path.read_bytes().count(b"\n") for path in published if path.is_file() and path.suffix != ".pt"}
        assert any(path.name == "commitment.txt" for path in texts)
        seen.append({(f"{path.relative_to(out)}", lines) for path, lines in texts.items()})
    assert seen[0] == seen[1]


@pytest.mark.parametrize("way", ["trials", "select"])
def test_a_tuned_clipping_norm_is_shown(way: str, tmp_path: Path):
    spec = spec_of(methods=[METHOD | {"max_grad_norm": [0.1, 0.5]}], way=way)
    with bars(shown=True) as bar:
        records = paid_runner.compare(spec, tmp_path, progress=bar)
        notes = [str(task.fields["note"]) for task in bar.tasks]
    assert ("DP-SGD  C0.5  u0.2" in notes) == (way == "trials")  # the last one
    outcome = paid_report_of(spec, records, tmp_path, command="")
    final = f"DP-SGD (C {records[-1]['max_grad_norm']:g}, u {outcome['noise_step']:g})."
    page = " ".join(Path(outcome["report"]).read_text().split())
    assert final in page
    assert outcome["max_grad_norm"] == records[-1]["max_grad_norm"]
    assert [trial["max_grad_norm"] for trial in outcome["trials"]] == ([0.1, 0.1, 0.5, 0.5] if way == "trials" else [])
    shown = all(f"<td>{norm}</td><td>{u}</td>" in page for norm in (0.1, 0.5) for u in (0.05, 0.2))
    assert shown == (way == "trials")
    assert ("noise step and of the clipping norm C was carried over" in page) == (way == "trials")


def test_a_single_clipping_norm_is_not_shown_with_each_trial(tmp_path: Path):
    spec = spec_of()
    records = paid_runner.compare(spec, tmp_path, progress=False)
    page = " ".join(Path(paid_report_of(spec, records, tmp_path, command="")["report"]).read_text().split())
    assert "the choice of the noise step was carried over" in page
    assert "Own options" not in page
    assert "DP-SGD (u 0." in page
    assert page.count("Clipping norm C") == 1  # in the settings


@pytest.mark.parametrize(
    "broken", ["1", "null", '{"run": null}', '{"methods": [{}]}', '{"privacy": {"total_epsilon": 1}}']
)
def test_a_damaged_spec_json_is_named(broken: str, tmp_path: Path):
    (tmp_path / "spec.json").write_text(broken)
    with pytest.raises(PrivacyError, match=r"a spec\.json that cannot be read"):
        require_same(tmp_path, describe(spec_of()))


def test_the_order_of_values_to_try_counts_within_one_epsilon_and_that_of_others_does_not(tmp_path: Path):
    """A choice in secret is kept as the number of a candidate."""
    tried = {"momentum": [0.5, 0.9], "dampening": [0.0, 0.1], "nesterov": False}
    one, other, alike = (
        spec_of(way="select", methods=[METHOD | {"optimizer": {"use": "SGD"} | {name: tried[name] for name in names}}])
        for names in (
            ("momentum", "dampening", "nesterov"),
            ("dampening", "momentum", "nesterov"),
            ("nesterov", "momentum", "dampening"),
        )
    )
    claim(tmp_path, describe(one))
    require_same(tmp_path, describe(alike))
    with pytest.raises(PrivacyError, match="runs of a spec with a different order of values to try"):
        require_same(tmp_path, describe(other))


def test_a_shared_budget_is_a_cap_on_several_comparisons(tmp_path: Path):
    budget = str(tmp_path / "budget.jsonl")
    Budget(budget, total_epsilon=3.0, delta=1e-4, num_examples=1437, privacy_unit="example")
    spec = spec_of(privacy__budget=budget)
    paid_runner.compare(spec, tmp_path / "one", progress=False)
    with pytest.raises(BudgetExceededError, match="of 3 is committed"):
        paid_runner.compare(spec, tmp_path / "two", progress=False)
    assert not list((tmp_path / "two").rglob("ledger.jsonl"))


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("lost", ["runs", "score", "raw"])
def test_a_comparison_that_has_lost_ledgers_does_not_train_again(lost: str, emptied: bool, tmp_path: Path):
    spec = spec_of(way="select" if lost == "raw" else "trials")
    paid_runner.compare(spec, tmp_path, progress=False)
    (tmp_path / "runs.jsonl").unlink()
    for path in list(tmp_path.rglob(lost)):
        files = [file for file in path.rglob("*") if file.is_file()]
        shutil.rmtree(path)
        for file in files if emptied else []:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    with pytest.raises(PrivacyError, match=f"to be kept, got {'an empty' if emptied else 'a missing'} file"):
        paid_runner.compare(spec, tmp_path, progress=False)


def test_a_copied_folder_does_not_train_again(tmp_path: Path):
    budget = str(tmp_path / "budget.jsonl")
    Budget(budget, total_epsilon=3.0, delta=1e-4, num_examples=1437, privacy_unit="example")
    spec = spec_of(privacy__budget=budget)
    paid_runner.compare(spec, tmp_path / "one", progress=False)
    (tmp_path / "two").mkdir()
    for name in ("spec.json", "commitment.txt"):
        shutil.copy(tmp_path / "one" / name, tmp_path / "two")
    with pytest.raises(PrivacyError, match="to be new in the budget"):
        paid_runner.compare(spec, tmp_path / "two", progress=False)


def test_a_comparison_killed_after_a_score_reads_it_back(tmp_path: Path):
    """The score is in its ledger, its record is not in runs.jsonl. Warnings are errors here."""
    spec = spec_of()
    records = paid_runner.compare(spec, tmp_path, progress=False)
    (tmp_path / "runs.jsonl").write_text("")
    again = paid_runner.compare(spec, tmp_path, progress=False)
    assert [record.get("tuning_score") for record in again[:2]] == [record["tuning_score"] for record in records[:2]]
    assert all(Ledger(path, read_only=True).releases == 1 for path in tmp_path.rglob("score/ledger.jsonl"))


def _compare(out: Path) -> None:
    paid_runner.compare(spec_of(steps=6), out, progress=False)


@pytest.mark.usefixtures("by_rdp_here")
@pytest.mark.filterwarnings("ignore:.*charged steps had no checkpoint", "ignore:.*charged steps came after")
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_place_it_resumes_and_costs_the_same(kills: int, tmp_path: Path):
    """Each process is killed after a random time by SIGKILL; the last one finishes."""
    spec = spec_of(steps=6)
    price(spec)  # calibrated once, before the processes
    random.seed(5)
    started = time.monotonic()
    paid_runner.compare(spec, tmp_path / "whole", progress=False)
    whole = time.monotonic() - started
    context = multiprocessing.get_context("fork")
    records, out = None, tmp_path
    while records is None:
        out = tmp_path / f"killed after {out.name}"
        for _ in range(kills):
            process = context.Process(target=_compare, args=(out,))
            process.start()
            process.join(random.uniform(0, whole))
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
        try:
            records = paid_runner.compare(spec, out, progress=False)
        except BudgetExceededError:  # killed after the last charge and before a save: a new folder is the remedy
            assert max(Ledger(path, read_only=True).releases for path in out.rglob("ledger.jsonl")) == 6
    assert [record["phase"] for record in records] == ["tuning", "tuning", "final"]
    outcome = outcome_of(spec, records, out)
    assert outcome["budget_spent"] == pytest.approx(price(spec).epsilon)
    for path in out.rglob("ledger.jsonl"):
        ledger = Ledger(path, read_only=True)
        assert ledger.releases == (1 if path.parent.name == "score" else 6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a target beside the total": ({"privacy__target_epsilon": 1.0}, "privacy.target_epsilon to be absent"),
    "a multiplier beside the total": ({"privacy__noise_multiplier": 1.0}, "privacy.noise_multiplier to be absent"),
    "a simulation": ({"privacy__simulate": 2}, "RDP, which this adds up"),
    "seeds of tuning": ({"tuning__seeds": [1]}, "tuning.seeds to be absent"),
    "seeds of the run": ({"run": {"seeds": [1]}}, "run.seeds to be absent"),
    "diagnostics": ({"run": {"diagnose": True}}, "run.diagnose to be false"),
    "a growing grid": ({"tuning__extend": True}, "tuning.extend to be false"),
    "tuning by simulation": ({"tuning__simulate": 2}, "tuning.simulate to be absent with total_epsilon"),
    "tuning by loss": ({"tuning__by": "loss"}, 'tuning.by to be "accuracy"'),
    "tuning by training loss": ({"tuning__by": "train_loss"}, 'tuning.by to be "accuracy"'),
    "no way": ({"tuning": {"noise_steps": [0.1, 0.2]}}, "tuning.way to be given"),
    "a negative total": ({"privacy__total_epsilon": -1.0}, "privacy.total_epsilon"),
    "an unknown way": ({"tuning__way": "trails"}, "did you mean 'trials'"),
    "a learning rate in trials": ({"methods": [at_rate(lr=[0.1, 1.0])]}, "noise_step to be given for trials"),
    "a method without privacy": ({"methods": [at_rate(lr=1.0) | {"non_private": True}]}, "finite epsilon"),
    "shape below zero": ({"tuning": {"way": "select", "noise_steps": [0.1, 0.2], "shape": -0.5}}, "tuning.shape"),
    "a shape with no run": ({"tuning": {"way": "select", "noise_steps": [0.1], "shape": float("inf")}}, "tuning.shape"),
    "several C outside of a method": (
        {"privacy__max_grad_norm": [0.1, 0.5]},
        "privacy.max_grad_norm to be one number, got [0.1, 0.5]; give one number here, and the values to try in "
        "[[methods]]: max_grad_norm = [0.1, 0.5]",
    ),
    "fewer than one run": ({"tuning": {"way": "select", "noise_steps": [0.1, 0.2], "mean_runs": 0.5}}, "mean_runs"),
    "several candidates without tuning": (
        {"tuning": None, "methods": [at_rate(noise_step=0.1), at_rate("b", noise_step=0.2)]},
        "[tuning] to be given for several candidates",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_spec_that_a_total_cannot_cover_is_refused(name: str):
    changes, message = REFUSED[name]
    with pytest.raises(PrivacyError) as error:
        spec_of(**changes)
    assert message in str(error.value), str(error.value)


@pytest.mark.parametrize("single", ["target_epsilon", "noise_multiplier"])
@pytest.mark.parametrize(("table", "key", "value"), [("tuning", "way", "trials"), ("privacy", "budget", "b.jsonl")])
def test_options_of_a_private_comparison_need_a_total(table: str, key: str, value: str, single: str):
    """It is the first error: without a way, the methods and the data need other keys."""
    raw = spec_of().model_dump(exclude_defaults=True)
    del raw["privacy"]["total_epsilon"], raw["tuning"]["way"]
    raw["privacy"][single] = 1.0
    raw[table][key] = value
    remedy = rf"give total_epsilon in place of {single} and run `privgrad compare`, or leave {table}\.{key} out"
    with pytest.raises(
        PrivacyError, match=rf"privacy\.total_epsilon to be given for {table}\.{key}, got None; {remedy}"
    ):
        check_spec(raw, "spec.toml")


@pytest.mark.usefixtures("by_rdp_here")
def test_public_scores_need_public_examples(tmp_path: Path):
    spec = spec_of(tuning__score_on="public")
    with pytest.raises(PrivacyError, match=r"data\.public to be positive"):
        paid_runner.compare(spec, tmp_path / "none", progress=False)
    spec = spec_of(tuning__score_on="public", data__public=37, privacy__num_examples=1400)
    records = paid_runner.compare(spec, tmp_path / "some", progress=False)
    assert all(record["score_noise_std"] == 0 for record in records if record["phase"] == "tuning")
    assert not list(tmp_path.rglob("score"))


@pytest.mark.parametrize("way", [None, "trials"])
def test_the_research_runner_refuses_a_total(way: str | None, tmp_path: Path):
    with pytest.raises(PrivacyError, match=r"total_epsilon to be absent, got 2\.0; run `privgrad compare`"):
        runner.train(spec_of(way=way), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


VISITS = """
title = "visits"
[data]
file = "visits.csv"
unit = "patient"
max_rows = 3
label = "again"
classes = ["no", "yes"]
test_share = 0.3
validation_share = SHARE
[data.columns]
age = { kind = "number", range = [0, 100], bins = 5 }
ward = { kind = "category", values = ["a", "b"] }
[model]
use = "linear"
[privacy]
total_epsilon = 4.0
delta = 1e-3
max_grad_norm = 0.1
num_examples = 90
expected_batch_size = 20
steps = 3
privacy_unit = "user"
[[methods]]
name = "DP-SGD"
optimizer = "SGD"
[tuning]
way = "WAY"
noise_steps = [0.05, 0.2]
score_on = "PEOPLE"
"""


@pytest.mark.parametrize(
    ("way", "people"),
    [
        ("trials", "held-out"),
        ("select", "training"),
        pytest.param("trials", "training", marks=pytest.mark.slow),
        pytest.param("select", "held-out", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("by_rdp_here")
def test_patients_with_several_visits_are_the_unit_of_a_private_comparison(way: str, people: str, tmp_path: Path):
    rows = [
        f"p{p},{(7 * p + v) % 100},{'ab'[p % 2]},{('no', 'yes')[p % 2]}" for p in range(200) for v in range(1 + p % 3)
    ]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ward,again", *rows]))
    text = VISITS.replace("SHARE", "0.2" if people == "held-out" else "0.0").replace("WAY", way)
    count = 90 if people == "held-out" else 130
    (tmp_path / "visits.toml").write_text(text.replace("PEOPLE", people).replace("= 90", f"= {count}"))
    outcome = pg.compare(tmp_path / "visits.toml", out=tmp_path / "out", progress=False)
    assert outcome["epsilon"] <= 4.0
    assert outcome["budget_spent"] == pytest.approx(outcome["epsilon"])
    (final,) = (tmp_path / "out" / "runs").glob("*final*/ledger.jsonl")
    ledger = Ledger(final, read_only=True)
    assert (ledger.plan_facts["privacy_unit"], ledger.plan_facts["num_examples"], ledger.releases) == ("user", count, 3)
    page = Path(outcome["report"]).read_text()
    assert "person" in page
    assert ("people who are held out" in page) == (people == "held-out")
    said = [p.read_text() for p in (Path(outcome["report"]), tmp_path / "out" / "statement.html")]
    assert all(("So held-out people have the same protection" in text) == (people == "held-out") for text in said)
    assert all(("because a number of runs is random" in text) == (way == "select") for text in said)
    assert "cap, ε = 4.00, holds for all commitments" in " ".join(page.split())
    published = "".join(
        p.read_text() for p in (tmp_path / "out").glob("*.*") if p.suffix in (".jsonl", ".html", ".json")
    )
    assert not any(f"p{p}," in published for p in range(200))
    assert f"{count} training persons, the public count" in published
    assert "On the test part: accuracy" in published  # how many persons are in it is private
    assert "test_units" not in published


@pytest.mark.usefixtures("by_rdp_here")
def test_a_number_of_people_that_is_far_too_small_is_noticed(tmp_path: Path):
    """Nobody asks whether a row holds all data of one person: `unit` has grouped them. Other warnings are errors."""
    rows = [f"p{p},50,{'ab'[p % 2]},{('no', 'yes')[p % 2]}" for p in range(400)]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ward,again", *rows]))
    text = VISITS.replace("SHARE", "0.0").replace("WAY", "trials").replace("PEOPLE", "training")
    (tmp_path / "visits.toml").write_text(text)
    told = (
        r"visits.csv has persons in the training part, more than 2 times num_examples = 90. .* a larger public number"
    )
    with pytest.warns(UserWarning, match=told):
        run = CliRunner().invoke(app, ["compare", str(tmp_path / "visits.toml"), "--dry-run"])
    assert run.exit_code == 0
    with pytest.warns(UserWarning, match=told):
        pg.compare(tmp_path / "visits.toml", out=tmp_path / "out", progress=False)


@pytest.mark.usefixtures("by_rdp_here")
def test_a_dry_run_shows_the_price_and_writes_nothing(tmp_path: Path):
    rows = [f"p{p},50,{'ab'[p % 2]},{('no', 'yes')[p % 2]}" for p in range(200)]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ward,again", *rows]))
    text = VISITS.replace("SHARE", "0.0").replace("WAY", "trials").replace("PEOPLE", "training")
    path, before = tmp_path / "visits.toml", {"visits.csv", "visits.toml"}
    path.write_text(text)
    run = CliRunner().invoke(app, ["compare", str(path), "--dry-run", "--out", str(tmp_path / "out")])
    assert "Ways to spend" in run.output
    assert "It fits the budget" in run.output.replace("fits into", "fits")
    assert {file.name for file in tmp_path.iterdir()} == before
    run = CliRunner().invoke(app, ["compare", str(path), "--dry-run"])
    assert run.exit_code == 0
    Budget(tmp_path / "b.jsonl", total_epsilon=5.0, delta=1e-3, num_examples=200, privacy_unit="user")
    path.write_text(text.replace("delta = 1e-3", 'delta = 1e-3\nbudget = "b.jsonl"'))  # relative to the TOML file
    for room in (True, False):
        run = CliRunner().invoke(app, ["compare", str(path), "--dry-run", "--json"])
        assert run.exit_code == (not room)
        answer = json.loads(run.stdout.splitlines()[-1])
        assert answer["suits"] == room
        assert answer["cap"] == 5.0
        assert (answer["spent_with_it"] <= 5.0) == room
        Budget(tmp_path / "b.jsonl").commit("another training", [Release(1.0, 1.0)])


@pytest.mark.usefixtures("by_rdp_here")
def test_the_headline_in_the_terminal_names_a_tuned_clipping_norm(tmp_path: Path):
    rows = [f"p{p},50,{'ab'[p % 2]},{('no', 'yes')[p % 2]}" for p in range(200)]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ward,again", *rows]))
    text = VISITS.replace("SHARE", "0.0").replace("WAY", "trials").replace("PEOPLE", "training")
    (tmp_path / "visits.toml").write_text(text.replace('"SGD"', '"SGD"\nmax_grad_norm = [0.1, 0.5]'))
    run = CliRunner().invoke(app, ["compare", str(tmp_path / "visits.toml"), "--out", str(tmp_path / "out")])
    told = " ".join(run.output.split())
    assert any(f"Trained by DP-SGD (C {norm}, u 0." in told for norm in (0.1, 0.5))


def test_a_restart_moves_nothing_unless_the_budget_has_room(tmp_path: Path):
    rows = [f"p{p},50,{'ab'[p % 2]},{('no', 'yes')[p % 2]}" for p in range(200)]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ward,again", *rows]))
    budget = Budget(tmp_path / "b.jsonl", total_epsilon=5.0, delta=1e-3, num_examples=200, privacy_unit="user")
    text = VISITS.replace("SHARE", "0.0").replace("WAY", "trials").replace("PEOPLE", "training")
    path, out = tmp_path / "visits.toml", tmp_path / "out"
    path.write_text(text.replace("delta = 1e-3", 'delta = 1e-3\nbudget = "b.jsonl"'))
    command = ["compare", str(path), "--out", str(out), "--json"]
    assert CliRunner().invoke(app, command).exit_code == 0
    files = sorted(tmp_path.rglob("*"))
    run = CliRunner().invoke(app, [*command, "--restart"])
    assert isinstance(run.exception, BudgetExceededError)
    assert sorted(tmp_path.rglob("*")) == files
    assert CliRunner().invoke(app, command).exit_code == 0  # the old folder is still that of its commitment
    assert len(budget.commitments) == 1


@pytest.mark.slow
def test_the_largest_total_fits_and_a_tenth_more_does_not(tmp_path: Path):
    path = tmp_path / "budget.jsonl"
    budget = Budget(path, total_epsilon=5.0, delta=1e-4, num_examples=1437, privacy_unit="example")
    budget.commit("another training", [Release(4.0, 1.0)])
    spec = spec_of(way=None, total=4.9, privacy__budget=str(path))

    def spent_with(total: float) -> float:
        privacy = spec.privacy.model_copy(update={"total_epsilon": total})
        return budget.spent(besides=price(spec.model_copy(update={"privacy": privacy})).releases)

    most = largest_total(price(spec), budget)
    assert 0 < most < 5
    assert spent_with(most) <= 5 < spent_with(1.1 * most)
    full = Budget(tmp_path / "full.jsonl", total_epsilon=3.0, delta=1e-4, num_examples=1437, privacy_unit="example")
    full.commit("planned before any result", [Release(full.calibrate(sample_rate=1.0, steps=1), 1.0)])
    assert full.spent() < 3
    assert largest_total(price(spec), full) == 0
    with pytest.raises(BudgetExceededError, match=r"10,000 to be at most 3, got 3\..* commit both as one"):
        full.calibrate(sample_rate=1.0, steps=1)


def test_a_delta_that_the_budget_would_refuse_is_refused_by_a_dry_run(tmp_path: Path):
    spec = spec_of(privacy__delta=1e-2)
    with pytest.raises(PrivacyError, match=r"privacy\.delta to be at most 1 / num_examples"):
        paid_runner.check(spec)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "to be a readable table"),
        (["patient,age,again", "p1,3,no"], "ward"),
        (["patient,age,ward,again", "p1,3,c,no"], "ward"),
    ],
)
def test_errors_of_the_data_come_before_the_prices(rows: list[str] | None, message: str, tmp_path: Path):
    if rows is not None:
        (tmp_path / "visits.csv").write_text("\n".join(rows))
    path, out = tmp_path / "visits.toml", tmp_path / "out"
    path.write_text(VISITS.replace("SHARE", "0.0").replace("WAY", "trials").replace("PEOPLE", "training"))
    run = CliRunner().invoke(app, ["compare", str(path), "--out", str(out)])
    assert isinstance(run.exception, PrivacyError)
    assert message in str(run.exception)
    assert "Ways to spend" not in run.output
    assert not out.exists()
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ward,again", *(f"p{k},3,a,no" for k in range(150))]))
    run = CliRunner().invoke(app, ["compare", str(path), "--out", str(out)])
    assert "Ways to spend" in run.output


def _few_digits() -> DataSet:
    return digits()


def _small_model(data: DataSet) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, data.num_classes))


def test_compare_takes_functions_and_resumes(tmp_path: Path):
    tables = spec_of().model_dump(exclude_defaults=True, exclude={"data", "model"})
    outcome = pg.compare(tables, out=tmp_path, data=_few_digits, model=_small_model, progress=False)
    weights = torch.load(outcome["model"], weights_only=True)
    assert weights["1.weight"].shape == (10, 64)
    again = pg.compare(tables, out=tmp_path, data=_few_digits, model=_small_model, progress=False)
    assert again == outcome
    with pytest.raises(PrivacyError, match="to be a function that its module names"):
        pg.compare(tables, out=tmp_path, data=lambda: digits(), model=_small_model)
    with pytest.raises(TypeError):
        pg.compare(3, out=tmp_path)  # pyright: ignore[reportArgumentType]


def test_groups_of_people_pay_for_their_own_releases(tmp_path: Path):
    train, score = Release(2.0, 0.1, count=50), Release(5.0, 1.0, count=3)
    one, other = (epsilon([release], delta=1e-5) for release in (train, score))
    assert epsilon([Split(((train,), (score,)))], delta=1e-5) == max(one, other)
    both = Split(((train,), (score,))), Split(((score,), (train,)))
    assert epsilon(both, delta=1e-5) == epsilon([train, train], delta=1e-5)  # a person may train both times
    budget = Budget(tmp_path / "b.jsonl", total_epsilon=9.0, delta=1e-5, num_examples=100, privacy_unit="user")
    for number, split in enumerate(both):
        budget.commit(f"{number}", [split])
    again = Budget(tmp_path / "b.jsonl")
    assert [one.releases for one in again.commitments] == [(split,) for split in both]
    assert again.spent() >= epsilon([train, train], delta=1e-5)
    with pytest.raises(PrivacyError, match="groups of people"):
        epsilon([both[0]] * 9, delta=1e-5)
