"""The budget of a data set: one cap, one file, whoever commits and whenever a process dies."""

import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import privgrad as pg
from conftest import account_by_rdp, loss_fn, make_data, make_model, make_plan
from privgrad.accounting import accountant as accounting
from privgrad.accounting import composition
from privgrad.accounting.accountant import Release, Selection, filter_epsilon, rounded_up
from privgrad.accounting.mechanisms import Split
from privgrad.cli import app
from privgrad.ledger import file as ledger_file
from privgrad.ledger.budget import Budget, Commitment, cost_of
from privgrad.ledger.ledger import Hold
from privgrad.statement.text import budget_statement, statement

ONE = Release(20.0, 1.0)
NUMBERS: dict[str, Any] = {"total_epsilon": 1.0, "delta": 1e-3, "num_examples": 32, "privacy_unit": "example"}
MEAN: dict[str, Any] = {"bound": 1.0, "noise_multiplier": 20.0, "num_examples": 32}
MANY = multiprocessing.get_context("fork")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    account_by_rdp(monkeypatch)


def make(tmp_path: Path, **changed: Any) -> Budget:
    return Budget(tmp_path / "budget.jsonl", **(NUMBERS | changed))


def test_one_commitment_is_accounted_by_pld_and_several_by_the_filter(tmp_path: Path):
    budget = make(tmp_path, total_epsilon=3.0)
    assert budget.spent() == 0.0
    first, second = Release(2.0, 0.1, count=20), Release(10.0, 1.0)
    budget.commit("a", [first])
    assert budget.spent() == accounting.epsilon([first], delta=1e-3)
    budget.commit("b", [second, Selection((first,), 2, float("inf"))], by="Ada")
    held = [first, second, Selection((first,), 2, float("inf"))]
    assert budget.spent() == filter_epsilon(held, first=[first], delta=1e-3, total_epsilon=3.0)
    again = Budget(budget.path)
    assert again.spent() == budget.spent()
    assert again.commitments == budget.commitments
    assert [one.by for one in again.commitments][1] == "Ada"
    assert len(again.commitments[0].date) == 10
    assert repr(again) == f"Budget({str(budget.path)!r}, total_epsilon=3.0, delta=0.001)"
    assert (again.total_epsilon, again.delta, again.num_examples, again.privacy_unit) == (3.0, 1e-3, 32, "example")


def test_a_commitment_above_the_cap_writes_nothing(tmp_path: Path):
    budget = make(tmp_path)
    budget.commit("a", [ONE])
    before = budget.path.read_bytes()
    with pytest.raises(pg.BudgetExceededError, match="to be at most 1"):
        budget.commit("b", [Release(1.0, 1.0)])
    with pytest.raises(pg.BudgetExceededError):
        budget.commit("c", [Release(0.0, 1.0)])
    with pytest.raises(pg.BudgetExceededError):
        budget.commit("c", [Release(50.0, 0.5, "fixed")])
    assert budget.path.read_bytes() == before
    with pytest.raises(pg.BudgetExceededError):
        make(tmp_path / "new").commit("b", [Release(1.0, 1.0)])


@pytest.mark.parametrize("changed", [{"name": 7}, {"name": True}, {"by": 7}, {"place": False}])
def test_a_commitment_that_could_not_be_read_again_is_not_written(tmp_path: Path, changed: dict[str, Any]):
    """It would lose the budget to everybody: no process could open the file any more."""
    budget = make(tmp_path)
    before = budget.path.read_bytes()
    arguments: dict[str, Any] = {"name": "a", "releases": [ONE], **changed}
    with pytest.raises(pg.PrivacyError, match="all arguments to be texts and finite numbers"):
        budget.commit(**arguments)
    assert budget.path.read_bytes() == before
    budget.commit("a", [ONE])
    with pytest.raises(pg.PrivacyError, match="all arguments to be texts and finite numbers"):
        budget.record("a", [math.nan])
    assert budget.record("a", [1.0]) == Budget(budget.path).released("a") == [1.0]


def test_the_same_commitment_again_costs_nothing(tmp_path: Path):
    budget = make(tmp_path)
    budget.commit("a", [ONE, ONE])
    before = budget.path.read_bytes()
    budget.commit("a", [Release(20.0, 1.0, count=2)], by="somebody else")
    assert budget.path.read_bytes() == before
    for other in ([ONE], [Release(20.0, 1.0, count=3)], [Release(21.0, 1.0, count=2)]):
        with pytest.raises(pg.PrivacyError, match="choose another name"):
            budget.commit("a", other)
    with pytest.raises(pg.PrivacyError, match="choose another name"):
        budget.commit("a", [ONE, ONE], place="elsewhere")


def test_calibrated_noise_uses_the_rest(tmp_path: Path):
    budget = make(tmp_path, total_epsilon=2.0)
    sigma = budget.calibrate(sample_rate=0.2, steps=10)
    assert sigma == pytest.approx(
        accounting.calibrate_noise_multiplier(target_epsilon=2.0, delta=1e-3, sample_rate=0.2, steps=10), rel=2e-3
    )
    budget.commit("a", [Release(2 * sigma, 0.2, count=10)])
    left = budget.left(sample_rate=0.2, steps=10)
    assert 0 < left < 2.0
    assert 0 < budget.left() < 2.0
    sigma = budget.calibrate(sample_rate=0.2, steps=10)
    with pytest.raises(pg.BudgetExceededError):
        budget.commit("b", [Release(0.99 * sigma, 0.2, count=10)])
    budget.commit("b", [Release(sigma, 0.2, count=10)])
    assert 2.0 * (1 - 2e-3) <= budget.spent() <= 2.0
    assert budget.left() < 0.2


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"total_epsilon": 0.0}, "total_epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"delta": 0.1}, "at most 1 / num_examples"),
        ({"num_examples": 0}, "num_examples"),
        ({"privacy_unit": "row"}, "privacy_unit"),
        ({"delta": None}, "to be given"),
    ],
)
def test_wrong_numbers_make_no_budget(tmp_path: Path, changed: dict[str, Any], match: str):
    with pytest.raises(pg.PrivacyError, match=match):
        make(tmp_path, **changed)
    assert not (tmp_path / "budget.jsonl").exists()


def test_an_existing_budget_keeps_its_numbers(tmp_path: Path):
    make(tmp_path)
    with pytest.raises(pg.PrivacyError, match=r"to be as recorded \(1.0\), got 8.0"):
        make(tmp_path, total_epsilon=8.0)
    with pytest.raises(pg.PrivacyError, match="to be as recorded"):
        Budget(tmp_path / "budget.jsonl", delta=1e-4)
    with pytest.raises(pg.PrivacyError, match="to be at least one"):
        make(tmp_path).commit("a", [])
    with pytest.raises(pg.PrivacyError, match="name"):
        make(tmp_path).commit("", [ONE])


def test_a_changed_line_is_found(tmp_path: Path):
    budget = make(tmp_path)
    budget.commit("a", [ONE])
    budget.path.write_text(budget.path.read_text().replace("20.0", "90.0"))
    with pytest.raises(pg.PrivacyError, match="checksum"):
        budget.spent()


HOSTILE: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "the same name again, for less": lambda line: [line, line | {"releases": [[999.0, 1.0, "poisson", 1]]}],
    "no release": lambda line: [line | {"releases": []}],
    "a release without steps": lambda line: [line | {"releases": [[20.0, 1.0, "poisson", 0]]}],
    "a negative count": lambda line: [line | {"releases": [[20.0, 1.0, "poisson", -1], [20.0, 1.0, "poisson", 1]]}],
    "a Split without groups": lambda line: [line | {"releases": [{"groups": []}]}],
    "a Split in a Split": lambda line: [line | {"releases": [{"groups": [[{"groups": [[[9.0, 1.0]]]}]]}]}],
    "a text for true": lambda line: [line | {"is_seeded": "false"}],
    "a day that is none": lambda line: [line | {"date": "yesterday"}],
    "a person who is a number": lambda line: [line | {"by": 3}],
    "a release of no shape": lambda line: [line | {"released": "mean [[]], bound 1.0"}],
    "values of another name": lambda line: [line, {"draw": "b", "values": [1.0]}],
    "values twice": lambda line: [line, *2 * [{"draw": "a", "values": [1.0]}]],
    "values that are not finite": lambda line: [line, {"draw": "a", "values": [math.inf]}],
    "the beginning of another name": lambda line: [line, {"draw": "b", "begun": True}],
}


@pytest.mark.parametrize("how", HOSTILE)
def test_lines_that_no_budget_writes_are_refused_although_their_checksums_match(how: str, tmp_path: Path):
    budget = make(tmp_path)
    budget.commit("a", [ONE])
    first, second = (json.loads(line) for line in budget.path.read_text().splitlines())
    head, text = "", b""
    for line in (first, *HOSTILE[how](second)):
        plain = {key: value for key, value in line.items() if key != "checksum"}
        sealed, head = ledger_file._sealed(head, json.dumps(plain).encode())
        text += sealed + b"\n"
    budget.path.write_bytes(text)
    with pytest.raises(pg.PrivacyError, match=r"Budget: .*to be a line of a budget"):
        budget.spent()


def test_a_budget_and_a_ledger_are_told_apart(tmp_path: Path):
    budget = make(tmp_path)
    with pytest.raises(pg.PrivacyError, match=r"got a line of a budget; .*Budget\(path\) reads this file"):
        pg.Ledger(budget.path)
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), ledger=tmp_path / "ledger.jsonl").ledger.close()
    with pytest.raises(pg.PrivacyError, match=r"got a line of a ledger; .*Ledger\(path\) reads this file"):
        pg.Budget(tmp_path / "ledger.jsonl")


def trained(ledger: pg.Ledger, plan: pg.PrivacyPlan) -> int:
    """Train until something is refused; the number of releases."""
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)
    batches = [*plan.batches(make_data()), *plan.batches(make_data())]
    with pytest.raises(pg.BudgetExceededError):
        list(map(private_grad, batches))
    return ledger.releases


def test_a_training_makes_the_committed_releases_and_no_more(tmp_path: Path, fast: None):
    budget, plan = make(tmp_path, total_epsilon=50.0), make_plan(steps=3)
    ledger = budget.open_ledger(tmp_path / "run/ledger.jsonl", plan)
    (held,) = budget.commitments
    assert held.releases == (Release(plan.noise_multiplier, plan.sample_rate, "poisson", 3),)
    assert held.ledger == held.name == str(tmp_path / "run/ledger.jsonl")
    longer = make_plan(steps=10)
    assert trained(ledger, longer) == 3
    ledger.close()
    assert len(budget.commitments) == 1
    with pytest.raises(pg.PrivacyError, match="more steps need a commitment"):  # it is not raised
        budget.open_ledger(tmp_path / "run/ledger.jsonl", longer)
    reopened = pg.Ledger(tmp_path / "run/ledger.jsonl")  # without the budget: the file holds the limit
    assert reopened.commitment == held.name
    assert trained(reopened, longer) == 3
    reopened.close()
    with budget.open_ledger(tmp_path / "run/ledger.jsonl", plan)._one_at_a_time():
        assert len(budget.commitments) == 1


@pytest.mark.parametrize("how", ["removed", "an older copy", "another budget"])
def test_a_budget_forgets_nothing_when_its_file_is_not_the_one_it_wrote(how: str, tmp_path: Path):
    budget = make(tmp_path)
    older = budget.path.read_bytes()
    budget.commit("a", [ONE])
    other = make(tmp_path / "other", total_epsilon=9.0).path.read_bytes()
    if how == "removed":
        budget.path.unlink()
    else:
        budget.path.write_bytes(older if how == "an older copy" else other)
    for use in (lambda: budget.commit("b", [ONE]), lambda: budget._note_begun("a"), budget.spent):
        with pytest.raises(pg.PrivacyError):
            use()
    assert how != "removed" or not budget.path.exists()


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"seed": 0}, "research_seed"),
        ({"privacy_unit": "user"}, "privacy_unit"),
        ({"num_examples": 33}, "num_examples"),
        ({"group_size": 2}, "group_size"),
    ],
)
def test_a_ledger_of_a_budget_takes_the_committed_plan_alone(changed: dict[str, Any], fact: str, tmp_path: Path):
    budget, plan = make(tmp_path, total_epsilon=50.0), make_plan()
    ledger = budget.open_ledger(tmp_path / "ledger.jsonl", plan)
    perturb = pg.perturb.SampleGradient("user") if fact == "privacy_unit" else None
    with pytest.raises(pg.PrivacyError, match=f"{fact} of the plan to be"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(**changed), ledger=ledger, perturb=perturb)
    pg.PrivateGradient(make_model(), loss_fn, replace(plan, max_grad_norm=2.0), ledger=ledger)


def test_the_ledger_of_a_commitment_states_no_epsilon_of_its_own(tmp_path: Path, fast: None):
    budget, plan, path = make(tmp_path, total_epsilon=50.0), make_plan(), tmp_path / "run/ledger.jsonl"
    ledger = budget.open_ledger(path, plan, name="run")
    trained(ledger, plan)
    ledger.close()
    with pytest.raises(pg.PrivacyError, match=r"part of 'run' in the budget budget\.jsonl; run `privgrad statement`"):
        statement([pg.Ledger(path, read_only=True)], delta=1e-3)
    for command in ("statement", "epsilon"):
        refused = CliRunner().invoke(app, [command, str(path), "--delta", "1e-3"])
        assert isinstance(refused.exception, pg.PrivacyError)
    alone = pg.release_mean([[1.0]], **MEAN, budget=budget, name="mean", ledger=tmp_path / "mean.jsonl")
    assert alone.shape == (1,)
    with pytest.raises(pg.PrivacyError, match="part of 'mean'"):
        statement([pg.Ledger(tmp_path / "mean.jsonl", read_only=True)], delta=1e-3)


def test_a_training_under_another_plan_is_refused(tmp_path: Path, fast: None):
    budget, plan = make(tmp_path, total_epsilon=50.0), make_plan()
    ledger = budget.open_ledger(tmp_path / "ledger.jsonl", plan)
    less = make_plan(noise_multiplier=plan.noise_multiplier / 2)
    with pytest.raises(pg.PrivacyError, match=r"noise_multiplier of the plan to be 1\.0, as committed"):
        pg.PrivateGradient(make_model(), loss_fn, less, ledger=ledger)
    assert ledger.releases == 0


def test_a_commitment_pays_for_one_ledger(tmp_path: Path, fast: None):
    budget, plan = make(tmp_path, total_epsilon=50.0), make_plan()
    ledger = budget.open_ledger(tmp_path / "a.jsonl", plan, name="run")
    ledger.close()
    with pytest.raises(pg.PrivacyError, match="which is absent"):
        budget.open_ledger(tmp_path / "b.jsonl", plan, name="run")
    pg.Ledger(tmp_path / "b.jsonl").close()
    with pytest.raises(pg.PrivacyError, match="choose another name"):
        budget.open_ledger(tmp_path / "b.jsonl", plan, name="run")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(pg.PrivacyError, match="which is absent"):
        budget.open_ledger(tmp_path / "a.jsonl", plan, name="run")
    own = pg.Ledger(tmp_path / "own.jsonl")
    pg.PrivateGradient(make_model(), loss_fn, plan, ledger=own)
    own.close()
    with pytest.raises(pg.PrivacyError, match="without a commitment"):
        budget.open_ledger(tmp_path / "own.jsonl", plan)


def test_an_empty_file_does_not_stand_for_a_lost_ledger(tmp_path: Path, fast: None):
    budget, plan, path = make(tmp_path, total_epsilon=50.0), make_plan(), tmp_path / "a.jsonl"
    budget.open_ledger(path, plan).close()
    ledger = budget.open_ledger(path, plan)  # nothing was released, so the empty file is the ledger
    pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)
    ledger.close()
    budget.open_ledger(path, plan).close()
    kept = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(pg.PrivacyError, match="which is empty; restore the ledger"):
        budget.open_ledger(path, plan)
    path.write_bytes(kept)
    budget.open_ledger(path, plan).close()
    assert len(budget.commitments) == 1


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"sampling": "epochs", "steps": 12}, "to draw Poisson batches"),
        ({"privacy_unit": "user"}, "to be 'example'"),
        ({"noise_multiplier": 0.05}, "to be at most"),
    ],
)
def test_plans_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], match: str, fast: None):
    budget = make(tmp_path, total_epsilon=20.0)
    with pytest.raises(pg.PrivacyError, match=match):
        budget.open_ledger(tmp_path / "ledger.jsonl", make_plan(**changed))
    assert not (tmp_path / "ledger.jsonl").exists()
    assert not budget.commitments


def test_simulations_and_too_many_examples_are_refused(tmp_path: Path):
    plan = make_plan()
    with pytest.raises(pg.BudgetExceededError, match=r"the epsilon of all commitments .* got inf"):
        make(tmp_path).open_ledger(tmp_path / "ledger.jsonl", plan.scaled(0.5))
    budget = Budget(tmp_path / "b.jsonl", total_epsilon=9.0, delta=0.01, num_examples=20, privacy_unit="example")
    with pytest.raises(pg.PrivacyError, match="1 / delta of the budget"):
        budget.require_covered("f", 101, "example")
    budget.require_covered("f", 100, "example")  # units have joined


def commit_until_refused(path: Path, who: int) -> None:
    done = 0
    while True:
        try:
            Budget(path).commit(f"{who}-{done}", [ONE])
        except pg.BudgetExceededError:
            return
        done += 1


def test_processes_at_once_do_not_overdraw(tmp_path: Path):
    budget = make(tmp_path)
    workers = [MANY.Process(target=commit_until_refused, args=(budget.path, who)) for who in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    held = budget.commitments
    assert budget.spent() <= 1.0
    alone = make(tmp_path / "alone")
    commit_until_refused(alone.path, 0)
    assert len(held) == len(alone.commitments)  # none was lost, and none came on top


def begin(path: Path) -> None:
    Budget(path, **NUMBERS).commit(str(os.getpid()), [ONE])


def test_processes_that_begin_a_budget_at_once_share_it(tmp_path: Path):
    workers = [MANY.Process(target=begin, args=(tmp_path / "budget.jsonl",)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert len(make(tmp_path).commitments) == 4


def die_at(call: int) -> None:
    """Let this process die without notice at one of its calls of the operating system; a write is half done then."""
    count = 0

    def counted(real: Any) -> Any:
        def called(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                if real is os.write:
                    real(args[0], args[1][: len(args[1]) // 2])
                os._exit(0)
            return real(*args)

        return called

    for name in ("open", "write", "fsync", "ftruncate"):
        setattr(ledger_file.os, name, counted(getattr(os, name)))


def dies_at(path: Path, call: int) -> None:
    die_at(call)
    Budget(path, **NUMBERS).commit("a", [ONE])
    os._exit(1)


def test_a_death_at_any_call_leaves_a_valid_file(tmp_path: Path):
    outcomes: set[int] = set()
    for call in range(1, 30):
        path = tmp_path / f"{call}.jsonl"
        worker = MANY.Process(target=dies_at, args=(path, call))
        worker.start()
        worker.join(60)
        budget = Budget(path, **NUMBERS)
        held = len(budget.commitments)
        outcomes.add(held)
        budget.commit("a", [ONE])
        budget.commit("b", [ONE])
        assert [one.name for one in Budget(path).commitments] == ["a", "b"]
        if worker.exitcode == 1:
            assert held == 1
            break
    else:
        pytest.fail("the commitment never came to its end")
    assert outcomes == {0, 1}


def train_within(folder: Path, call: int, seen: Any) -> None:
    """Charge the steps that are left, and note each in `seen` once its gradient may be released."""
    if call:
        die_at(call)
    plan = make_plan(steps=14)
    ledger = make(folder, total_epsilon=500.0).open_ledger(folder / "ledger.jsonl", plan)
    ledger.bind(plan.public_facts | {"research_seed": False})
    while ledger.releases < plan.steps:
        ledger.charge(plan.release, draw=f"{os.getpid()}:{ledger.releases}", limit=plan.steps)
        with seen.get_lock():
            seen.value += 1
    os._exit(1)


def test_a_training_that_dies_at_any_call_continues_and_costs_the_same(tmp_path: Path, fast: None):
    """Nothing is released uncharged, nothing is charged twice, and nothing is lost."""
    for call in range(1, 200):
        folder, seen = tmp_path / f"{call}", MANY.Value("i", 0)
        worker = MANY.Process(target=train_within, args=(folder, call, seen))
        worker.start()
        worker.join(60)
        path = folder / "ledger.jsonl"
        charged = path.read_bytes().count(b'"draw"') if path.exists() else 0
        assert seen.value <= charged
        before = seen.value
        again = MANY.Process(target=train_within, args=(folder, 0, seen))
        again.start()
        again.join(60)
        assert again.exitcode == 1, call
        ledger, budget = pg.Ledger(path, read_only=True), Budget(folder / "budget.jsonl")
        assert ledger.releases == 14
        assert seen.value - before == sum(draw.startswith(f"{again.pid}:") for draw in ledger.draws)
        assert [one.count for one in budget.commitments] == [14]
        if worker.exitcode == 1:
            break
    else:
        pytest.fail("the training never came to its end")
    assert call > 50


def test_a_note_that_failed_is_written_by_the_next_attempt(tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch):
    """Otherwise an emptied ledger would count as new after the training."""

    def fails(*_: Any) -> None:
        raise OSError("locked")

    budget, plan, path = make(tmp_path, total_epsilon=50.0), make_plan(steps=2), tmp_path / "a.jsonl"
    facts = plan.public_facts | {"research_seed": False}
    with monkeypatch.context() as patch:
        ledger = budget.open_ledger(path, plan)
        patch.setattr(Budget, "_opened", fails)
        with pytest.raises(OSError, match="locked"):
            ledger.bind(facts)
    ledger.limit_to(Hold(ledger.commitment or "", plan.release_of(2), "other"))  # adds nothing, takes nothing away
    ledger.bind(facts)
    ledger.charge(plan.release, draw="a:0", limit=plan.steps)
    ledger.close()
    path.write_bytes(b"")
    with pytest.raises(pg.PrivacyError, match="which is empty"):
        budget.open_ledger(path, plan)


def test_a_kill_at_a_random_moment_leaves_a_valid_file(tmp_path: Path):
    budget, draw = make(tmp_path, total_epsilon=5.0), random.Random(0)
    for who in range(5):
        worker = MANY.Process(target=commit_until_refused, args=(budget.path, who))
        worker.start()
        time.sleep(draw.uniform(0.01, 0.1))
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
        assert Budget(budget.path).spent() <= 5.0
    budget.commit("last", [Release(500.0, 1.0)])


def test_recorded_values_are_those_of_the_first(tmp_path: Path):
    budget = make(tmp_path)
    with pytest.raises(pg.PrivacyError, match="to be committed"):
        budget.record("a", [1.0])
    budget.commit("a", [ONE])
    assert budget.released("a") is None
    assert budget.record("a", [0.1, 1 / 3]) == [0.1, 1 / 3]
    assert budget.record("a", [5.0, 5.0]) == [0.1, 1 / 3] == Budget(budget.path).released("a")


def test_the_command_shows_who_spent_what(tmp_path: Path, fast: None):
    budget = make(tmp_path, total_epsilon=2.0)
    assert "nothing" in CliRunner().invoke(app, ["statement", str(budget.path)]).output.lower()
    budget.commit("imputation", [ONE], by="Ada")
    budget.commit("training", [Release(30.0, 1.0, count=2)], by="Ben")
    shown = json.loads(CliRunner().invoke(app, ["budget", str(budget.path), "--json"]).stdout)
    assert [(one["name"], one["by"], one["releases"]) for one in shown["commitments"]] == [
        ("imputation", "Ada", 1),
        ("training", "Ben", 2),
    ]
    assert shown["spent"] == budget.spent()
    assert shown["left_for_one_release"] == budget.left()
    table = CliRunner().invoke(app, ["budget", str(budget.path)]).stdout
    assert "imputation" in table
    assert f"spent: epsilon {rounded_up(budget.spent(), 4)} of 2" in table
    assert "all of them are counted by a Renyi filter" in " ".join(table.split())


def test_the_statement_on_a_budget(tmp_path: Path, fast: None):
    budget = make(tmp_path, total_epsilon=2.0)
    budget.commit("imputation", [ONE], by="Ada")
    text = str(budget_statement(budget))
    assert f"Quote epsilon = {rounded_up(budget.spent(), 4)}, with delta and the unit." in text
    assert "With a second commitment, quote the budget, epsilon = 2." in text
    budget.commit("training", [Release(30.0, 1.0, count=2)], by="Ben")
    found = CliRunner().invoke(app, ["statement", str(budget.path), "--json"])
    numbers = json.loads(found.stdout)
    assert (numbers["epsilon"], numbers["spent"]) == (2.0, budget.spent())
    text = str(budget_statement(budget))
    assert "Its 2 commitments cost" in text
    assert re.search("training: a training with up to 2 noisy gradients, by Ben on .* Alone it costs epsilon", text)
    assert "Renyi filter" in text
    size, alpha = 2.0, 0.01
    wanted = min(math.exp(size) * alpha + 1e-3, 1 - math.exp(-size) * (1 - 1e-3 - alpha))
    assert numbers["attack_success"] == pytest.approx(wanted)
    high = make(tmp_path / "high", total_epsilon=1e6)
    for name in "ab":
        high.commit(name, [ONE])
    assert budget_statement(high).numbers["attack_success"] == 1.0
    refused = CliRunner().invoke(app, ["statement", str(budget.path), str(budget.path)])
    assert isinstance(refused.exception, pg.PrivacyError)


def test_a_committed_ledger_does_not_move_to_a_file_without_its_limit(tmp_path: Path, fast: None):
    budget, plan = make(tmp_path, total_epsilon=50.0), make_plan()
    ledger = budget.open_ledger(tmp_path / "a.jsonl", plan)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)
    with pytest.raises(pg.PrivacyError, match="committed as"):
        private_grad.record_in(tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()
    private_grad.record_in(tmp_path / "a.jsonl")
    assert private_grad.ledger.commitment == ledger.commitment


def splits(count: int) -> list[Commitment]:
    """Commitments in each of which a person pays for a training or for scores; every other one has scores first."""
    pairs = [(Release(90.0 + k, 0.1, count=9), Release(99.0 + k, 1.0))[:: 1 - 2 * (k % 2)] for k in range(count)]
    return [Commitment(f"{k}", (Split(((one,), (other,))),), "", "") for k, (one, other) in enumerate(pairs)]


def test_the_work_for_two_hundred_splits_is_twice_that_for_a_hundred(monkeypatch: pytest.MonkeyPatch, fast: None):
    """A person may be in 2^200 combinations of groups."""
    real, calls = composition._renyi_costs, [0]

    def counted(*given: Any) -> Any:
        calls[0] += 1
        return real(*given)

    monkeypatch.setattr(composition, "_renyi_costs", counted)
    work: list[int] = []
    for count in (100, 200):
        calls[0] = 0
        assert 0 < cost_of(splits(count), delta=1e-3, total_epsilon=9.0) < 9.0
        work.append(calls[0])
    assert work[1] <= 2.1 * work[0] <= 2.1 * 300
    before = real.cache_info().misses
    cost_of(splits(201), delta=1e-3, total_epsilon=9.0)
    assert real.cache_info().misses - before == 2  # one more commitment computes its own releases only


@pytest.mark.parametrize("count", [1, 2, 5])
def test_splits_cost_at_least_as_much_as_every_combination_of_groups(count: int):
    held, cap = splits(count), {"delta": 1e-3, "total_epsilon": 3.0}
    each = itertools.product(*(one.releases[0].groups for one in held))  # pyright: ignore[reportAttributeAccessIssue]
    by_person = []
    for groups in each:
        releases = [release for group in groups for release in group]
        by_person.append(filter_epsilon(releases, first=held[0].releases, **cap))
    together = filter_epsilon([release for one in held for release in one.releases], first=held[0].releases, **cap)
    assert max(by_person) <= together <= 1.02 * max(by_person)
