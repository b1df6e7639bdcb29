"""Hospitals that train by Flower: noise, accountant over all rounds, epsilon per round, halt at the budget."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from conftest import make_model

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
pytest.importorskip("flwr")
pytest.importorskip("sklearn")
import flower_sites as sites
from flower_job import USERS, listens, make_plan, make_strategy
from flower_sites import LOCAL, ROUNDS, SITES, STEPS
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from test_flower import FIRST, DirectGrid, answered, echo, require_equal, sent, simulated, stamped, start

from privgrad import accounting
from privgrad.accounting.accountant import rounded_up, two_decimals_up
from privgrad.integrations.flower import LedgerAccountant, PrivateStrategy, record_client_app
from privgrad.ledger.file import is_in_use
from privgrad.ledger.ledger import Ledger
from privgrad.noise.gaussian import std_of_noise
from privgrad.statement import statement

ALL, DRAWN = SamplingMethod.NO_AMPLIFICATION, SamplingMethod.POISSON
HERE = Path(__file__).parent


def config(
    population: int = SITES, delta: float = 1e-5, method: SamplingMethod = ALL, budget: float | None = None
) -> PrivacyConfig:
    return PrivacyConfig(delta, population, NeighboringRelation.ADD_OR_REMOVE_ONE, method, budget)


class SiteGrid(DirectGrid):
    """Each hospital answers once; `change` is what becomes of the answer of hospital 0."""

    def __init__(
        self, folder: Path, protects: str, dies: int = 0, change: Callable[[Message], Message] | None = None
    ) -> None:
        super().__init__(sites.client, nodes=SITES)
        self.run_config: Any = {"folder": str(folder), "protects": protects, "dies": dies}
        self.change = change or (lambda message: message)
        self.answers = list[Message]()

    def context(self, site: int) -> Context:
        return Context(1, FIRST + site, {"partition-id": site}, RecordDict(), self.run_config)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        app = lambda message, context: self.app(message, self.context(context.node_id - FIRST))  # noqa: E731
        self.answers = [answered(app, message, message.metadata.dst_node_id) for message in stamped(messages)]
        return [self.change(one) if one.metadata.src_node_id == FIRST else one for one in self.answers]


def run(folder: Path, protects: str, dies: int = 0) -> dict[str, Any]:
    """Run the app in this process; what it tells at its end."""
    grid = SiteGrid(folder, protects, dies)
    sites.server(grid, grid.context(0))
    return json.loads((folder / "told.json").read_text())


def ask(folder: Path, model: torch.nn.Module, app: Any = sites.by_record, site: int = 0, **more: Any) -> Message:
    """The answer of one hospital, or its error, to one message."""
    grid = SiteGrid(folder, "records")
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord(more)})
    (message,) = stamped([Message(content, FIRST + site, "train")])
    return answered(lambda one, _: app(one, grid.context(site)), message, FIRST + site)


def refused(answer: Message) -> str:
    return str(answer.error.reason)


def killed(code: str) -> None:
    """Run lines in a process of their own, which must die by SIGKILL."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", f"from test_flower_sites import *\n{code}"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def ledgers(folder: Path, protects: str) -> list[Ledger]:
    names = ["ledger.jsonl"] if protects == "hospitals" else [f"hospital-{site}.jsonl" for site in range(SITES)]
    return [Ledger(folder / name, read_only=True) for name in names]


@pytest.mark.parametrize("protects", ["hospitals", "records"])
def test_the_noise_is_what_the_plan_says(protects: str, tmp_path: Path):
    """Box 1: calibrated noise. Hospitals that learn nothing send nothing else."""
    model = sites.make_model()
    if protects == "hospitals":
        plan = sites.user_plan()
        strategy = PrivateStrategy(model, sites.make_optimizer(model), plan)
        before = strategy.arrays.to_torch_state_dict()
        still = lambda message, _: sent(message, lambda name, value: torch.full_like(value, 1e-9))  # noqa: E731
        strategy.start(DirectGrid(still, nodes=SITES), strategy.arrays, num_rounds=1)
        after, expected = strategy.arrays.to_torch_state_dict(), plan.noise_std
    else:
        plan, before = sites.record_plan(steps=1), model.state_dict()

        def make_private_grad(context: Context, own: torch.nn.Module) -> pg.PrivateGradient:
            return pg.PrivateGradient(own, lambda m, b: 0 * sites.loss_fn(m, b), plan, ledger=tmp_path / "ledger.jsonl")

        app = record_client_app(sites.make_model, make_private_grad, sites.make_optimizer, sites.records_of, steps=1)
        after = ask(tmp_path, model, app).content.array_records["arrays"].to_torch_state_dict()
        expected = plan.noise_std
    moved = torch.cat([(after[name] - value).flatten() for name, value in before.items()])
    assert moved.std().item() == pytest.approx(expected, rel=0.12)  # 650 numbers: four standard errors
    assert expected == std_of_noise(plan.noise_multiplier, plan.max_grad_norm, plan.divisor)


# Population, sample, rounds, sigma and delta; our epsilon and that of flwr's accountant.
PLANS = [
    (10_000, 500, 200, 0.9, 1e-5, 5.94, 6.71),
    (10_000, 100, 500, 0.7, 1e-5, 3.60, 4.37),
    (20, 5, 100, 4.0, 1e-3, 1.84, 2.10),
]


@pytest.mark.filterwarnings("ignore:delta")
@pytest.mark.parametrize(("population", "size", "rounds", "sigma", "delta", "most", "theirs"), PLANS)
def test_the_accountant_over_all_rounds_is_tighter_than_flowers(
    population: int, size: int, rounds: int, sigma: float, delta: float, most: float, theirs: float, tmp_path: Path
):
    """Box 2: epsilon of all rounds together."""
    event = GaussianPrivacyEvent(sigma, size, population)
    of_flower = RdpAccountant(config(population, delta, DRAWN))
    ours = LedgerAccountant(config(population, delta, DRAWN))
    both: list[PrivacyAccountant] = [ours, of_flower]
    for accountant in both:
        accountant.compose(event, rounds)
    told, other = (accountant.get_privacy_spent() for accountant in both)
    assert told.num_releases == other.num_releases == rounds
    assert told.epsilon <= most
    assert other.epsilon >= theirs
    assert told.epsilon <= 0.89 * other.epsilon
    # The two directions of one curve agree, and the plan of a PrivateStrategy costs the same.
    assert delta <= ours.get_delta(told.epsilon) <= 1.01 * delta
    plan = pg.PrivacyPlan.for_users(
        num_users=population, expected_cohort_size=size, rounds=rounds, max_update_norm=1.0, delta=delta,
        noise_multiplier=sigma,
    )  # fmt: skip
    assert plan.epsilon() == told.epsilon


def test_the_page_states_the_consortiums_plan():
    page = (HERE.parents[1] / "docs" / "federations.md").read_text()
    accountant, of_flower = LedgerAccountant(config(20, budget=10.0), rounds=20), RdpAccountant(config(20))
    event = GaussianPrivacyEvent(2.4, 20, 20)
    for one in (accountant, of_flower):
        one.compose(event, 20)
    of_site = accounting.epsilon([accounting.Release(2.4, 0.1, count=20)], delta=1e-5)
    ours, theirs = accountant.get_epsilon(1e-5), of_flower.get_epsilon(1e-5)
    assert ours <= 10
    assert f"{two_decimals_up(ours)} ({two_decimals_up(theirs)} by Flower's accountant)" in page
    assert f"it is {two_decimals_up(of_site)} per patient" in page


@pytest.mark.parametrize("protects", ["hospitals", pytest.param("records", marks=pytest.mark.slow)])
def test_epsilon_of_each_round_stands_next_to_the_metrics(protects: str, tmp_path: Path):
    """Box 3, in the Result of Flower's own `start`."""
    told = run(tmp_path, protects)
    plan = sites.user_plan() if protects == "hospitals" else sites.record_plan()
    each = 1 if protects == "hospitals" else STEPS
    expected = [
        accounting.epsilon([plan.release_of(each * number)], delta=plan.delta or 0) for number in range(1, ROUNDS + 1)
    ]
    assert told["epsilon"] == pytest.approx(expected)
    assert told["epsilon"] == sorted(told["epsilon"])
    assert told["accuracy"] > 0.5
    for ledger in ledgers(tmp_path, protects):  # one statement for the consortium, or one for each hospital
        said = str(statement([ledger]))
        assert f"{rounded_up(plan.epsilon(), 4)} and delta" in said
        assert f"The {'sites' if each == 1 else 'rows'} in the training data are protected" in said


@pytest.mark.parametrize("protects", ["hospitals", pytest.param("records", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:record_client_app. the server's weights are those of the last round")
def test_training_halts_at_the_budget_also_after_a_crash(protects: str, tmp_path: Path):
    """Box 4: SIGKILL in round 3, once it is charged and before anything of it is kept."""
    killed(f"run(Path({str(tmp_path)!r}), {protects!r}, dies=3)")
    each = 1 if protects == "hospitals" else STEPS
    assert [ledger.releases for ledger in ledgers(tmp_path, protects)] == [3 * each] * len(ledgers(tmp_path, protects))
    lost = pytest.warns(UserWarning, match="1 charged steps had no checkpoint") if each == 1 else nullcontext()
    with lost:
        told = run(tmp_path, protects)
    # Rounds of hospitals count the lost one; FedAvg repeats it, and each hospital sends its last answer at no cost.
    spent = [ledger.releases for ledger in ledgers(tmp_path, protects)]
    assert spent == [ROUNDS * each] * len(spent)
    assert told["stopped"] == "no hospital answers" or "at most the plan's 6, got 7" in told["stopped"]
    assert told["accuracy"] > 0.5
    before = [(tmp_path / "told.json").read_text(), spent]
    grid = SiteGrid(tmp_path, protects)
    if protects == "records":  # asked once more, each answers with one error, and is charged nothing
        for site in range(SITES):
            error = refused(ask(tmp_path, sites.make_model(), site=site))
            assert "record_client_app: expected steps to be left in the plan, got 48 of 48 taken" in error
    else:
        strategy = PrivateStrategy(
            model := sites.make_model(),
            sites.make_optimizer(model),
            sites.user_plan(),
            ledger=tmp_path / "ledger.jsonl",
        )
        strategy.load_state_dict(torch.load(tmp_path / "state.pt")["strategy"])
        with pytest.raises(pg.BudgetExceededError, match="at most the plan's 6, got 7"):
            strategy.start(grid, strategy.arrays, num_rounds=1)
    assert before == [(tmp_path / "told.json").read_text(), [one.releases for one in ledgers(tmp_path, protects)]]


def plain(message: Message, _context: Any) -> Message:
    """A client of FedAvg: weights, and the number of its examples."""
    return sent(message, lambda name, value: value + 0.1, told=MetricRecord({"num-examples": 1}))


class Once(DirectGrid):
    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [answered(self.app, message, message.metadata.dst_node_id) for message in stamped(messages)]


def wrapped(path: Path | None, budget: float | None = 4.0, wrapper: Any = None, **options: Any) -> Any:
    """Flower's own strategy and wrapper, with our accountant."""
    accountant = LedgerAccountant(config(budget=budget), path, **options)
    fed_avg = FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES)
    wrapper = wrapper or DifferentialPrivacyServerSideFixedClipping
    return wrapper(fed_avg, 4.0, 1.0, SITES, accountant=accountant)


def begin(strategy: Any, rounds: int, evaluate_fn: Any = None) -> Any:
    arrays = ArrayRecord(make_model().state_dict())
    return strategy.start(Once(plain, nodes=SITES), arrays, num_rounds=rounds, evaluate_fn=evaluate_fn)


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def charge_and_die(path: Path) -> None:
    """Two rounds, and a third whose charge is on disk when the server dies, before Flower has the model."""
    strategy = wrapped(path)
    begin(strategy, 2)
    compose = strategy.accountant.compose
    strategy.accountant.compose = lambda event: kill(compose(event))
    begin(strategy, 1)


@pytest.mark.parametrize(
    "wrapper", [DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping]
)
def test_flowers_own_wrappers_take_the_accountant_and_stop(wrapper: Any, tmp_path: Path):
    told = list[float]()
    strategy = wrapped(tmp_path / "ledger.jsonl", wrapper=wrapper)

    def evaluate(server_round: int, _: ArrayRecord) -> MetricRecord:
        told.append(strategy.accountant.get_privacy_spent().epsilon)
        return MetricRecord({"epsilon": told[-1]})

    with pytest.raises(PrivacyBudgetExhausted):
        begin(strategy, 100, evaluate)
    most = accounting.steps_for_budget(target_epsilon=4.0, delta=1e-5, sample_rate=1.0, noise_multiplier=4.0)
    assert strategy.accountant.num_releases == len(told) - 1 == most
    assert told[-1] <= 4.0 < accounting.epsilon([accounting.Release(4.0, 1.0, count=most + 1)], delta=1e-5)
    said = str(statement([strategy.accountant.ledger]))
    assert f"epsilon = {rounded_up(told[-1], 4)}" in said
    assert "An attacker who predicts the noise: its generator is not cryptographic." in said


def misbehaves(how: str, replies: list[Message]) -> list[Message]:
    """The replies of a round in which the first hospital does something else."""
    first, arrays = replies[0], replies[0].content.array_records["arrays"].to_torch_state_dict()
    if how == "lies about its count":
        first.content["told"] = MetricRecord({"num-examples": 10**6})
    if how == "sends NaN":
        sent_nan(first)
    if how == "sends a wrong shape":
        first.content["arrays"] = ArrayRecord({name: value[:1] for name, value in arrays.items()})
    return replies[1:] if how == "drops out" else [*replies, first] if how == "answers twice" else replies


# By what a hospital does in round 2 of 3: the rounds that are charged, and how Flower's wrapper ends.
BEHAVIOR: dict[str, tuple[int, Any]] = {
    "drops out": (2, nullcontext()),
    "answers twice": (2, nullcontext()),
    "lies about its count": (1, pytest.raises(ValueError, match="equal client weights")),
    "sends a wrong shape": (3, nullcontext()),  # which numpy broadcasts
    "sends NaN": (3, nullcontext()),  # the model is lost, and the noise is charged
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("how", BEHAVIOR)
def test_under_flowers_own_wrapper_no_model_leaves_without_a_charge(how: str, tmp_path: Path):
    class Bad(Once):
        rounds = 0

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            replies = super().send_and_receive(messages, timeout=timeout)
            self.rounds += bool(replies)  # Flower also asks nobody to evaluate
            return misbehaves(how, replies) if replies and self.rounds == 2 else replies

    strategy, arrays = wrapped(tmp_path / "ledger.jsonl"), ArrayRecord(make_model().state_dict())
    given = list[ArrayRecord]()

    def evaluate(server_round: int, found: ArrayRecord) -> None:
        if server_round and (not given or found.object_id != given[-1].object_id):
            given.append(found)

    charged, ends = BEHAVIOR[how]
    with ends:
        strategy.start(Bad(plain, nodes=SITES), arrays, num_rounds=3, evaluate_fn=evaluate)
    assert 1 <= len(given) <= strategy.accountant.num_releases == charged


def test_a_killed_server_has_charged_and_its_successor_goes_on(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    killed(f"charge_and_die(Path({str(path)!r}))")
    strategy = wrapped(path)
    assert strategy.accountant.num_releases == 3
    with pytest.raises(PrivacyBudgetExhausted):
        begin(strategy, 100)
    alone = wrapped(None)
    with pytest.raises(PrivacyBudgetExhausted):
        begin(alone, 100)
    assert strategy.accountant.num_releases == alone.accountant.num_releases > 3


EVENT = GaussianPrivacyEvent(4.0, SITES, SITES)


def test_the_accountant_itself_refuses_what_would_cross_the_budget():
    """Also where a strategy does not ask would_exceed: nothing is charged, in part neither."""
    accountant = LedgerAccountant(config(budget=1.5))
    most = next(k for k in range(1, 99) if accountant.would_exceed(EVENT, count=k + 1))
    accountant.compose(EVENT, most - 1)
    for count in (2, 50):
        with pytest.raises(pg.BudgetExceededError, match=rf"at most {most}, by rounds and max_epsilon = 1.5, got"):
            accountant.compose(EVENT, count)
    assert accountant.num_releases == most - 1
    accountant.compose(EVENT)
    assert accountant.get_privacy_spent().epsilon <= 1.5
    assert accountant.would_exceed(EVENT, max_epsilon=1.5)
    assert not accountant.would_exceed(EVENT, max_epsilon=9.0)
    with pytest.raises(pg.BudgetExceededError, match="at most 0"):
        LedgerAccountant(config(budget=0.01)).compose(EVENT)
    planned = LedgerAccountant(config(budget=9.0), rounds=2, user="site")
    planned.compose(EVENT, 2)
    assert "The sites in the training data" in str(statement([planned.ledger]))
    with pytest.raises(PrivacyBudgetExhausted, match="All 2 planned rounds are released"):
        planned.would_exceed(EVENT)
    with pytest.raises(pg.BudgetExceededError, match="at most 2, by rounds"):
        planned.compose(EVENT)
    unlimited = LedgerAccountant(config())
    unlimited.compose(EVENT, 3)
    assert (unlimited.num_releases, unlimited.get_delta(0.0) < 1.0) == (3, True)
    assert (LedgerAccountant(config()).get_epsilon(1e-5), LedgerAccountant(config()).get_delta(1.0)) == (0.0, 0.0)
    assert not unlimited.would_exceed(EVENT, count=1000)


def test_what_does_not_belong_to_a_ledger_is_refused_and_charges_nothing(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    accountant = LedgerAccountant(config(budget=3.0), path)
    accountant.compose(EVENT)
    with pytest.raises(pg.PrivacyError, match=r"to have one writer, got .* locked"):  # a second server
        LedgerAccountant(config(budget=3.0), path)
    with pytest.raises(pg.PrivacyError, match="noise_multiplier to be as recorded"):
        accountant.compose(GaussianPrivacyEvent(5.0, SITES, SITES))
    with pytest.raises(pg.PrivacyError, match="expected_batch_size to be as recorded"):
        accountant.compose(GaussianPrivacyEvent(4.0, 2, SITES))
    with pytest.raises(pg.PrivacyError, match="population_size to be 3, got 4"):
        accountant.compose(GaussianPrivacyEvent(4.0, SITES, 4))
    for count in (0, -1, True):
        with pytest.raises(pg.PrivacyError, match="count"):
            accountant.compose(EVENT, count)
    assert accountant.num_releases == 1
    accountant.ledger.close()
    # Another budget, delta or population than before: each is refused when the ledger is opened, and none keeps it.
    for other in (config(budget=30.0), config(), config(delta=1e-4, budget=3.0), config(4, budget=3.0)):
        with pytest.raises(pg.PrivacyError, match="to be as recorded"):
            LedgerAccountant(other, path)
    with pytest.raises(pg.PrivacyError, match="rounds to be as recorded"):
        LedgerAccountant(config(budget=3.0), path, rounds=9)
    assert not is_in_use(path)
    assert LedgerAccountant(config(budget=3.0), path).num_releases == 1
    fixed = PrivacyConfig(1e-5, 10, NeighboringRelation.REPLACE_ONE, SamplingMethod.WITHOUT_REPLACEMENT)
    with pytest.raises(pg.PrivacyError, match="sampling_method to be poisson or no-amplification"):
        LedgerAccountant(fixed)
    with pytest.raises(pg.PrivacyError, match="rounds"):
        LedgerAccountant(config(), rounds=0)


def test_a_state_is_checked_against_the_ledger_and_an_empty_ledger_takes_it_over(tmp_path: Path):
    first = LedgerAccountant(config(), tmp_path / "first.jsonl")
    empty = json.loads(json.dumps(first.state_dict()))
    first.load_state_dict(empty)
    first.compose(EVENT, 2)
    state = json.loads(json.dumps(first.state_dict()))
    first.compose(EVENT)
    first.load_state_dict(state)  # of an earlier round: what was charged since stays charged
    assert first.num_releases == 3
    # A lost ledger, and a training that began with flwr's own accountant.
    of_flower = RdpAccountant(config())
    of_flower.compose(EVENT, 2)
    for held in (state, json.loads(json.dumps(of_flower.state_dict()))):
        other = LedgerAccountant(config())
        other.load_state_dict(held)
        assert (other.num_releases, other.get_epsilon(1e-5)) == (2, pytest.approx(first_epsilon(2)))
        with pytest.raises(pg.PrivacyError, match="state to be of this ledger"):
            other.load_state_dict(state)
        assert other.num_releases == 2
    with pytest.raises(pg.PrivacyError, match="the state's config to be"):
        LedgerAccountant(config(delta=1e-4)).load_state_dict(state)
    of_flower.compose(GaussianPrivacyEvent(5.0, SITES, SITES))
    two = LedgerAccountant(config())
    with pytest.raises(pg.PrivacyError, match="noise_multiplier to be as recorded"):
        two.load_state_dict(of_flower.state_dict())
    assert two.num_releases == 0
    for broken in ({}, {**state, "compositions": [{}]}, {**state, "config": {"target_delta": 2}}):
        with pytest.raises(pg.PrivacyError, match="state to be an accountant's state_dict"):
            LedgerAccountant(config()).load_state_dict(broken)


def first_epsilon(count: int) -> float:
    return accounting.epsilon([accounting.Release(4.0, 1.0, count=count)], delta=1e-5)


OPTIMIZERS = {
    "FedAdam": lambda model: pg.optim.Adam(model.named_parameters(), lr=0.05),
    "Yogi": lambda model: pg.optim.Yogi(model.named_parameters(), lr=0.05),
    "AdamBC": lambda model: pg.optim.AdamBC(model.named_parameters(), lr=0.05),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_server_optimizers_train_over_flower_as_in_one_process(name: str):
    model = make_model()
    strategy = PrivateStrategy(model, OPTIMIZERS[name](model), make_plan())
    start(strategy, DirectGrid())
    require_equal(simulated(make_plan(), make_optimizer=OPTIMIZERS[name]), model)


def test_a_second_server_on_one_ledger_is_refused(tmp_path: Path):
    first = make_strategy(make_plan(), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(pg.PrivacyError, match="to have one writer"):
        make_strategy(make_plan(), ledger=tmp_path / "ledger.jsonl")
    start(first, DirectGrid(echo))
    assert first.private_grad.ledger.releases == 3


def test_a_round_that_is_configured_again_is_charged_once():
    strategy, grid = make_strategy(make_plan(expected_cohort_size=USERS, rounds=2)), DirectGrid(echo)
    lost = grid.send_and_receive(strategy.configure_train(1, strategy.arrays, ConfigRecord(), grid))
    again = grid.send_and_receive(strategy.configure_train(1, strategy.arrays, ConfigRecord(), grid))
    strategy.aggregate_train(1, [*lost, *again])
    assert strategy.private_grad.ledger.releases == 1


@pytest.mark.parametrize("given", [False, True])
def test_a_resumed_run_finds_nodes_with_new_ids_unless_they_were_given(given: bool, tmp_path: Path):
    """Flower's simulation numbers its nodes anew in each run."""
    nodes = [FIRST + user for user in range(USERS)] if given else None
    strategy = make_strategy(make_plan(), ledger=tmp_path / "ledger.jsonl", nodes=nodes)
    strategy.start(DirectGrid(echo), strategy.arrays, num_rounds=1)
    state = strategy.state_dict()
    strategy.private_grad.ledger.close()
    resumed, grid = make_strategy(make_plan(), ledger=tmp_path / "ledger.jsonl", nodes=nodes), DirectGrid(echo)
    resumed.load_state_dict(state)
    grid.nodes = [node + 100 for node in grid.nodes]
    if given:
        with pytest.warns(UserWarning, match="not connected"):
            resumed.start(grid, resumed.arrays, num_rounds=2)
    else:
        resumed.start(grid, resumed.arrays, num_rounds=2)
    assert bool(grid.sent) == (not given)
    assert resumed.private_grad.ledger.releases == 3


def test_a_hospital_goes_on_from_its_ledger_whatever_it_is_asked(tmp_path: Path):
    """A repeated round, a hospital that joins twice, and weights that nobody can train from."""
    model, path = sites.make_model(), tmp_path / "hospital-0.jsonl"

    def releases() -> int:
        return Ledger(path, read_only=True).releases

    first = ask(tmp_path, model)
    with pytest.warns(UserWarning, match="the server's weights are those of the last round"):
        again = ask(tmp_path, model)
    assert releases() == STEPS
    assert first.content.array_records["arrays"].object_id == again.content.array_records["arrays"].object_id
    told = dict(again.content.metric_records["metrics"])
    assert told == {"num-examples": 500, "epsilon": Ledger(path, read_only=True).epsilon(delta=1e-4)}
    assert {*again.content} == {"arrays", "metrics"}
    held = Ledger(path)  # by a second node of this hospital, at the same time
    assert "to have one writer" in refused(ask(tmp_path, model))
    held.close()
    model.weight.data[0, 0] = torch.nan  # pyright: ignore
    assert "the server's weights to fit the site's model, got numbers that are not finite" in refused(
        ask(tmp_path, model)
    )
    assert "not (10, 64) of torch.float32" in refused(ask(tmp_path, torch.nn.Linear(3, 10)))
    assert releases() == STEPS
    assert not is_in_use(path)


def test_a_hospital_whose_ledger_would_be_forgotten_is_refused(tmp_path: Path):
    def make_private_grad(context: Context, model: torch.nn.Module) -> pg.PrivateGradient:
        return pg.PrivateGradient(model, sites.loss_fn, sites.record_plan())

    app = record_client_app(sites.make_model, make_private_grad, sites.make_optimizer, sites.records_of, steps=1)
    assert "the ledger to have a path, to last over rounds, got None" in refused(ask(tmp_path, sites.make_model(), app))
    with pytest.raises(pg.PrivacyError, match="steps"):
        record_client_app(sites.make_model, make_private_grad, sites.make_optimizer, sites.records_of, steps=0)


def test_what_a_site_says_of_its_records_stays_in_its_log(tmp_path: Path):
    def make_private_grad(context: Context, model: torch.nn.Module) -> pg.PrivateGradient:
        return pg.PrivateGradient(model, loss_fn, sites.record_plan(), ledger=tmp_path / "ledger.jsonl")

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("the label of my third patient is 2")

    app = record_client_app(sites.make_model, make_private_grad, sites.make_optimizer, sites.records_of, steps=1)
    told = refused(ask(tmp_path, sites.make_model(), app))
    assert "expected a round to end, got an error of this site; read its log" in told
    assert "patient" not in told


def test_both_at_once_protects_records_from_the_server_and_hospitals_from_all(tmp_path: Path):
    model = sites.make_model()
    strategy = PrivateStrategy(
        model, sites.make_optimizer(model), sites.user_plan(noise_multiplier=0.05, max_update_norm=5.0)
    )
    app = lambda message, context: sites.by_record(message, grid.context(context.node_id - FIRST))  # noqa: E731
    grid = SiteGrid(tmp_path, "records")
    strategy.start(Once(app, nodes=SITES), strategy.arrays, num_rounds=ROUNDS)
    assert strategy.private_grad.ledger.releases == ROUNDS
    assert [one.releases for one in ledgers(tmp_path, "records")] == [ROUNDS * STEPS] * SITES
    assert sites.accuracy(model) > 0.6
    trained = ["weight"]
    only = ask(tmp_path / "other", model, round=0, trained=trained)
    assert {*only.content} == {"arrays"}
    assert [*only.content.array_records["arrays"]] == trained


def test_one_hospital_with_nan_stops_the_others_before_they_spend(tmp_path: Path):
    """FedAvg averages anything; the hospitals then do not train on nonsense at their patients' cost."""
    grid = SiteGrid(tmp_path, "records")
    grid.change = lambda one: one if one.has_error() else sent_nan(one)
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=SITES)
    strategy.start(grid, ArrayRecord(sites.make_model().state_dict()), num_rounds=3)
    assert [one.releases for one in ledgers(tmp_path, "records")] == [STEPS] * SITES
    assert all("got numbers that are not finite" in refused(one) for one in grid.answers)


def sent_nan(reply: Message) -> Message:
    arrays = reply.content.array_records["arrays"].to_torch_state_dict()
    reply.content["arrays"] = ArrayRecord({name: value / 0 for name, value in arrays.items()})
    return reply


APP = """
[project]
name = "hospitals"
version = "1.0.0"
[tool.flwr.app]
publisher = "privgrad"
components = { serverapp = "flower_sites:server", clientapp = "flower_sites:client" }
config = { folder = "", protects = "hospitals", dies = 0 }
"""


def of_one_process(protects: str) -> float:
    """The accuracy of our own simulation, without Flower."""
    if protects == "hospitals":
        model, plan = sites.make_model(), sites.user_plan()
        private_grad = pg.PrivateGradient(model, sites.loss_fn, plan, perturb=LOCAL)
        optimizer = sites.make_optimizer(model)
        for cohort in plan.batches(sites.users):
            optimizer.step(grad=private_grad(cohort))
        return sites.accuracy(model)
    plan, average, mean = sites.record_plan(), sites.make_model().state_dict(), sites.make_model()
    models = [sites.make_model() for _ in range(SITES)]
    gradients = [pg.PrivateGradient(model, sites.loss_fn, plan) for model in models]
    contexts = [Context(1, 1, {"partition-id": site}, RecordDict(), {}) for site in range(SITES)]
    batches = [plan.batches(sites.records_of(context)) for context in contexts]
    for _ in range(ROUNDS):
        for model, private_grad, own in zip(models, gradients, batches, strict=True):
            model.load_state_dict(average)
            optimizer = sites.make_optimizer(model)
            for _ in range(STEPS):
                optimizer.step(grad=private_grad(next(own)))
        average = {name: sum(model.state_dict()[name] for model in models) / SITES for name in average}
    mean.load_state_dict(average)
    return sites.accuracy(mean)


def require_near(accuracy: float, protects: str) -> None:
    """Within four standard deviations of our own simulation, by six runs of it."""
    others = [of_one_process(protects) for _ in range(6)]
    assert abs(accuracy - statistics.mean(others)) < 4 * max(0.01, statistics.stdev(others)), others


@contextmanager
def ray_of_our_own(folder: Path) -> Generator[str]:
    """The address of a Ray with one processor, which Flower's simulation joins by RAY_ADDRESS.

    Ray gives its processes 30 seconds to start, too few on a busy machine. If it fails within `flwr run`, no hospital
    answers, and rounds are charged for noise alone.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for attempt in range(5):
        said = folder / f"ray-{attempt}"
        with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as own:  # a short path, for sockets
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
            command += ["--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={own}"]
            with said.open("w") as log:
                head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                while head.poll() is None and "Ray runtime started" not in said.read_text():
                    time.sleep(0.5)
                if head.poll() is None:
                    yield f"127.0.0.1:{port}"
                    return
            finally:
                head.terminate()
                head.wait()
    pytest.skip("Ray did not start in 5 attempts, each with 30 seconds: the machine is too busy")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("protects", ["hospitals", "records"])
def test_flwr_run_trains_three_hospitals_and_a_killed_run_goes_on(protects: str, tmp_path: Path):
    """As users start it: `flwr run`, in Flower's simulation by Ray."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'flwr[simulation]'")
    app, out = tmp_path / "app", tmp_path / "out"
    app.mkdir()
    out.mkdir()
    (app / "pyproject.toml").write_text(APP)
    (app / "flower_sites.py").write_text((HERE / "flower_sites.py").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    binaries = Path(sys.executable).parent
    own = {"FLWR_HOME": str(tmp_path), "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "OMP_NUM_THREADS": "1"}
    environment = os.environ | own | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}

    def flwr_run(dies: int) -> None:
        settings = f"folder='{out}' protects='{protects}' dies={dies}"
        federation = f"num-supernodes={SITES} client-resources-num-cpus=1"
        command = ["flwr", "run", str(app), "here", "--stream"]
        command += ["--run-config", settings, "--federation-config", federation]
        subprocess.run(command, env=environment, check=False, timeout=900)

    with ray_of_our_own(tmp_path) as environment["RAY_ADDRESS"], (tmp_path / "log").open("w") as log:
        command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
        link = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while not listens(port):
                assert link.poll() is None
                time.sleep(0.2)
            flwr_run(dies=3)
            assert (out / "dying").exists()
            flwr_run(dies=0)
        finally:
            link.terminate()
            link.wait()
    told = json.loads((out / "told.json").read_text())
    each = 1 if protects == "hospitals" else STEPS
    spent = [one.releases for one in ledgers(out, protects)]
    assert spent == [ROUNDS * each] * len(spent)
    assert told["stopped"] == "no hospital answers" or "at most the plan's 6, got 7" in told["stopped"]
    require_near(told["accuracy"], protects)
