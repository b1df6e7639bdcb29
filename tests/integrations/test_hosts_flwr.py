"""Each name of hosts/flwr.py is tried: refused before the first release, called, or without effect."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg

pytest.importorskip("flwr")
from flower_job import USERS, make_plan, make_strategy
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod
from flwr.serverapp.strategy import FedAvg
from hosts.flwr import FATES
from test_flower import DirectGrid, app_of, echo, start

from conftest import make_model
from privgrad.integrations.flower import PrivateStrategy

ROOT = Path(__file__).parents[2]


def of(place: str, fate: str) -> dict[str, str]:
    """The names of a place with a fate, and what is said of it."""
    found = {name.rpartition("."): said.partition(": ") for name, said in FATES.items()}
    return {name: why for (where, _, name), (how, _, why) in found.items() if (where, how) == (place, fate)}


@pytest.mark.parametrize(("name", "remedy"), of("FedAvg", "refused").items())
def test_arguments_of_fedavg_are_refused_with_their_remedy(name: str, remedy: str):
    with pytest.raises(pg.PrivacyError, match=f"got {name}; for {name}, {re.escape(remedy)}"):
        make_strategy(make_plan(), **{name: 3})


def test_one_error_names_all_and_suggests_what_was_meant():
    got = "got fraction_train, raw_metric; \n- for fraction_train, .*;\n- for raw_metric, did you mean 'raw_metrics'"
    with pytest.raises(pg.PrivacyError, match=got):
        make_strategy(make_plan(), fraction_train=0.5, raw_metric=["loss"])


@pytest.mark.parametrize(("name", "remedy"), of("Strategy", "refused").items())
def test_overrides_that_go_around_the_private_step_are_refused(name: str, remedy: str):
    own = type("Own", (PrivateStrategy,), {name: getattr(FedAvg, name)})
    model = make_model()
    with pytest.raises(pg.PrivacyError, match=f"got {name}; for {name}, {re.escape(remedy)}"):
        own(model, pg.optim.SGD(model.named_parameters(), lr=1.0), make_plan())


def test_the_remedies_work():
    """In place of FedAvg's arguments and of overrides: the plan's numbers, evaluate_fn and raw_metrics."""
    seen = list[str]()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(arrays.object_id)
        return MetricRecord({"public": float(server_round)})

    plan, grid = make_plan(expected_cohort_size=USERS, rounds=1), DirectGrid(echo)
    strategy = make_strategy(plan, raw_metrics=["loss"])
    result = start(strategy, grid, evaluate_fn=evaluate)
    assert len(grid.sent) == USERS
    assert seen[1] == strategy.arrays.object_id != seen[0]
    assert dict(result.evaluate_metrics_serverapp[1]) == {"public": 1.0}
    assert result.train_metrics_clientapp[1]["raw_loss"] == pytest.approx((USERS - 1) / 2)


class Own(PrivateStrategy):
    """A subclass that overrides what may be overridden, and counts the calls."""

    calls: list[str]

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        self.calls.append("configure_train")
        config["lr"] = 1 / server_round
        return super().configure_train(server_round, arrays, config, grid)

    def summary(self) -> None:
        self.calls.append("summary")

    def start(self, *args: Any, **options: Any) -> Any:
        self.calls.append("start")
        return super().start(*args, **options)


class Around(PrivateStrategy):
    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        return make_strategy(make_plan()).configure_train(server_round, arrays, config, grid)


class Some(PrivateStrategy):
    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        return list(super().configure_train(server_round, arrays, config, grid))[1:]


def made(own: type[PrivateStrategy], plan: pg.PrivacyPlan) -> Any:
    model = make_model()
    return own(model, pg.optim.SGD(model.named_parameters(), lr=1.0), plan)


def test_overrides_that_are_taken_are_called():
    strategy, grid = made(Own, make_plan(rounds=2)), DirectGrid(echo)
    strategy.calls = []
    start(strategy, grid)
    assert {*strategy.calls} == of("Strategy", "taken").keys()
    sent = {(m.metadata.group_id, float(str(m.content.config_records["config"]["lr"]))) for m in grid.sent}
    assert sent == {("1", 1.0), ("2", 0.5)}
    assert strategy.private_grad.ledger.releases == 2


@pytest.mark.parametrize(
    ("own", "message"),
    [(Around, r"call super\(\).configure_train in an override"), (Some, "send all that configure_train returns")],
)
def test_an_override_that_draws_users_itself_is_refused_before_a_charge(own: type[PrivateStrategy], message: str):
    strategy = made(own, make_plan(expected_cohort_size=USERS))
    with pytest.raises(pg.PrivacyError, match=message):
        start(strategy, DirectGrid(echo))
    assert strategy.private_grad.ledger.releases == 0


def test_arguments_of_start_are_taken():
    class Timed(DirectGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            timeouts.append(timeout)
            return super().send_and_receive(messages, timeout=timeout)

    timeouts, rounds = list[Any](), list[int]()
    grid, strategy = Timed(echo), make_strategy(make_plan(noise_multiplier=0.0, rounds=2))
    values = {name: torch.ones_like(value) for name, value in strategy.arrays.to_torch_state_dict().items()}
    options: dict[str, Any] = {
        "grid": grid,
        "initial_arrays": ArrayRecord(values),
        "num_rounds": 2,
        "timeout": 7.0,
        "train_config": ConfigRecord({"lr": 0.25}),
        "evaluate_config": ConfigRecord({"lr": 0.5}),
        "evaluate_fn": lambda server_round, _: rounds.append(server_round),
    }
    assert options.keys() == (of("Strategy.start", "taken") | of("Strategy.start", "no effect by design")).keys()
    strategy.start(**options)
    first = grid.sent[0].content
    assert first.array_records["arrays"].object_id == ArrayRecord(values).object_id
    assert {*timeouts} == {7.0}
    assert rounds == [0, 1, 2]
    assert all(message.content.config_records["config"]["lr"] == 0.25 for message in grid.sent)
    assert {message.metadata.message_type for message in grid.sent} == {"train"}  # evaluate_config goes nowhere


def test_an_app_may_have_a_lifespan_and_further_functions():
    app, calls = app_of(), list[str]()

    @app.lifespan()
    def lifespan(context: Context) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
        calls.append("lifespan")
        yield

    for decorator in (app.evaluate(), app.query()):
        decorator(lambda message, _: calls.append("another") or message)
    grid = DirectGrid(app)
    start(make_strategy(make_plan(rounds=1)), grid)
    assert calls == ["lifespan"] * len(grid.sent) != []


def test_mods_work_in_an_app_that_calls_client_apps():
    calls = list[str]()

    def counted(message: Message, context: Context, call_next: Any) -> Message:
        calls.append("mod")
        return message_size_mod(message, context, call_next)

    inner, app = app_of(), ClientApp(mods=[counted])

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        return inner(message, context)

    grid = DirectGrid(app)
    start(make_strategy(make_plan(rounds=1)), grid)
    assert calls == ["mod"] * len(grid.sent) != []


@pytest.mark.parametrize(
    ("mod", "told"),
    [
        (fixedclipping_mod, "error MOD_FAILED_PRECONDITION"),
        (adaptiveclipping_mod, "error MOD_FAILED_PRECONDITION"),
        (LocalDpMod(0.1, 0.1, 8.0, 1e-3), "near the weights themselves"),
    ],
)
def test_the_page_tells_what_mods_for_weights_do(mod: Any, told: str):
    inner, app = app_of(), ClientApp(mods=[mod])
    app.train()(lambda message, context: inner(message, context))
    with pytest.warns(UserWarning, match=told):
        start(make_strategy(make_plan(rounds=1)), DirectGrid(app))


def test_a_client_of_the_old_kind_answers_with_an_error_that_the_server_counts():
    app = ClientApp(client_fn=lambda context: NumPyClient().to_client())
    with pytest.warns(UserWarning, match="8 x error CLIENT_APP_RAISED_EXCEPTION"):
        start(make_strategy(make_plan(expected_cohort_size=USERS, rounds=1)), DirectGrid(app))


def test_the_page_names_the_version_that_is_tested():
    pinned = re.search(r"^flwr==(\d+\.\d+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert pinned
    assert f"Tested with flwr {pinned[1]} " in (ROOT / "docs" / "flower.md").read_text()
