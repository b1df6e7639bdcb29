"""PrivateStrategy: the federated step over Flower's messages, in one process and in ten."""

import copy
import dataclasses
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_model

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
pytest.importorskip("flwr")
from flower_job import FAULTS, LOCAL, NORM, USERS, make_app, make_plan, make_strategy, make_users, row, run_everything
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from privgrad.integrations.flower import PrivateStrategy, client_app
from privgrad.ledger.ledger import Ledger
from privgrad.perturb.local_training import local_update

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower.py"
FIRST = 1000  # id of the first user's node
FROZEN = ("0.weight", "0.bias")


class DirectGrid(Grid):
    """Each message is answered at once by its node's app; `late` answers come with the next round's."""

    run = None  # pyright: ignore
    set_run = create_message = push_messages = pull_messages = None  # pyright: ignore

    def __init__(self, app: Any = None, *, nodes: int = USERS, offline: Iterable[int] = (), late: Any = ()) -> None:
        self.app = app or make_app()
        self.nodes = [FIRST + user for user in range(nodes) if user not in offline]
        self.late, self.kept = {FIRST + user for user in late}, list[Message]()
        self.sent: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers, kept, self.kept = list[Message](), self.kept, []
        for message in stamped(messages):
            self.sent.append(message)
            node = message.metadata.dst_node_id
            answer = answered(self.app, message, node)
            (self.kept if node in self.late else answers).append(answer)
        return [*kept, *reversed(answers), *answers]  # each twice, in another order


def answered(app: Any, message: Message, node: int) -> Message:
    """A device's answer; Flower's SuperNode sends an app's exception as such an error."""
    try:
        return app(message, Context(1, node, {}, RecordDict(), {}))
    except Exception as error:
        reason = f"{type(error)}:<'{error}'>"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def stamped(messages: Iterable[Message]) -> list[Message]:
    """With their ids, as Flower's grids send them."""
    messages = list(messages)
    for message in messages:
        message.metadata.__dict__["_message_id"] = message.object_id
    return messages


def echo(message: Message, context: Context) -> Message:
    """An app that trains nothing, and tells on its user."""
    config = message.content.config_records["config"]
    told = MetricRecord({"num-examples": 10**6, "loss": float(str(config["user"]))})
    return sent(message, lambda name, value: torch.full_like(value, 0.01), told=told)


def sent(message: Message, change: Callable[[str, Tensor], Tensor | None], **further: Any) -> Message:
    """An answer with what `change` makes of each array of the message."""
    arrays = message.content.array_records["arrays"].to_torch_state_dict()
    changed = {name: change(name, value) for name, value in arrays.items()}
    update = ArrayRecord({name: value for name, value in changed.items() if value is not None})
    return Message(RecordDict({"arrays": update, **further}), reply_to=message)


def simulated(
    plan: pg.PrivacyPlan,
    *,
    without: Iterable[int] = (),
    frozen: Iterable[str] = (),
    make_optimizer: Callable[[torch.nn.Module], Any] = lambda model: pg.optim.SGD(model.named_parameters(), lr=1.0),
    **options: Any,
) -> torch.nn.Module:
    """The in-process training; some users' devices send nothing."""
    model = freeze(make_model(), frozen)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=LOCAL, **options)
    optimizer = make_optimizer(model)
    *tensors, count = make_users().tensors
    count[list(without)] = 0
    for batch in plan.batches(TensorDataset(*tensors, count)):
        optimizer.step(grad=private_grad(batch))
    return model


def freeze(model: torch.nn.Module, names: Iterable[str]) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model


def make_frozen_strategy(plan: pg.PrivacyPlan, **options: Any) -> PrivateStrategy:
    model = freeze(make_model(), FROZEN)
    return PrivateStrategy(model, pg.optim.SGD(model.named_parameters(), lr=1.0), plan, **options)


def start(strategy: Any, grid: Any, **options: Any) -> Any:
    rounds = strategy.private_grad.plan.steps
    return strategy.start(grid, strategy.arrays, num_rounds=rounds, **options)


def require_equal(one: torch.nn.Module | dict[str, Tensor], other: torch.nn.Module) -> None:
    held = one.state_dict() if isinstance(one, torch.nn.Module) else one
    for name, value in other.state_dict().items():
        torch.testing.assert_close(held[name], value, rtol=0, atol=1e-6)


def played(kind: str, users: tuple[int, ...] = (2, 5)) -> tuple[Any, dict[str, Tensor]]:
    """A round without noise in which some users send what is of that kind; and the step that the others' make."""
    strategy = make_strategy(make_plan(expected_cohort_size=USERS, rounds=1, noise_multiplier=0.0))
    before = {name: value.clone() for name, value in strategy.arrays.to_torch_state_dict().items()}
    messages = stamped(strategy.configure_train(1, strategy.arrays, ConfigRecord(), DirectGrid()))
    generator, replies = torch.Generator().manual_seed(5), list[Message]()
    sums = {name: torch.zeros_like(value) for name, value in before.items()}
    for user, message in enumerate(messages):
        update = {name: 0.01 * torch.randn(value.shape, generator=generator) for name, value in before.items()}
        if user not in users:
            sums = {name: sums[name] + update[name] for name in sums}
        try:
            sent = FAULTS[kind if user in users else "none"](ArrayRecord(update))
            told = MetricRecord({"num-examples": 10**user})
            replies.append(Message(RecordDict({"arrays": sent, "told": told}), reply_to=message))
        except RuntimeError as error:  # Flower then sends what it says
            replies.append(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message))
    strategy.aggregate_train(1, replies)
    after = strategy.arrays.to_torch_state_dict()
    return strategy, {name: before[name] - after[name] - sums[name] / USERS for name in sums}


@pytest.mark.parametrize("precondition", [None, "fixed"])
def test_the_same_training_over_flower_as_in_one_process(precondition: str | None):
    scales = pg.precondition.fixed(
        pg.side_information.Scales(
            {"0.weight": torch.linspace(0.5, 2.0, 5)}, provenance="common knowledge", source="a test"
        )
    )
    own = None if precondition is None else scales
    strategy = make_strategy(make_plan())
    result = start(strategy, DirectGrid(make_app(own)))
    require_equal(simulated(make_plan(), precondition=own), strategy._model)
    require_equal(result.arrays.to_torch_state_dict(), strategy._model)
    assert strategy.private_grad.ledger.releases == 3


def test_who_is_away_or_late_contributes_nothing_and_an_answer_counts_once():
    strategy = make_strategy(make_plan(), nodes=[FIRST + user for user in range(USERS)])
    start(strategy, DirectGrid(offline=[6], late=[1, 4]))
    require_equal(simulated(make_plan(), without=[1, 4, 6]), strategy._model)
    assert strategy.private_grad.ledger.releases == 3


@pytest.mark.parametrize("kind", sorted(FAULTS.keys() - {"none", "huge", "killed"}))
@pytest.mark.filterwarnings("ignore:NOT PRIVATE")  # of the overflow
def test_nonsense_contributes_nothing_and_costs_as_any_round(kind: str):
    strategy, rest = played(kind)
    for value in rest.values():
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-7)
    assert strategy.private_grad.ledger.releases == 1


def test_a_huge_update_contributes_no_more_than_the_bound():
    _, rest = played("huge", (2,))
    length = torch.cat([value.flatten() for value in rest.values()]).norm().item()
    assert length == pytest.approx(NORM / USERS, rel=1e-4)


def test_only_an_answer_to_this_round_counts():
    strategy = make_strategy(make_plan(expected_cohort_size=USERS, rounds=2, noise_multiplier=0.0))
    grid = DirectGrid(echo)
    answers = grid.send_and_receive(strategy.configure_train(1, strategy.arrays, ConfigRecord(), grid))
    strategy.aggregate_train(1, answers)
    first = strategy.arrays
    stamped(strategy.configure_train(2, first, ConfigRecord(), grid))
    with pytest.warns(UserWarning, match="8 x no reply in time"):
        strategy.aggregate_train(2, answers)
    assert strategy.arrays.object_id == first.object_id != make_strategy(make_plan()).arrays.object_id
    with pytest.raises(pg.PrivacyError, match="to be configured first"):
        strategy.aggregate_train(2, answers)


@pytest.mark.parametrize("forged", ["sender", "message", "sender, of no message"])
def test_nobody_answers_for_another(forged: str):
    """Flower lets a device write another's id into its answer, and another message's that it would have to know."""
    strategy = make_strategy(make_plan(expected_cohort_size=USERS, rounds=1, noise_multiplier=0.0))
    before = strategy.arrays.to_torch_state_dict()
    messages = stamped(strategy.configure_train(1, strategy.arrays, ConfigRecord(), DirectGrid()))
    assert len({str(message.content.config_records["config"]["nonce"]) for message in messages}) == USERS
    still, moved = (ArrayRecord({n: torch.full_like(v, x) for n, v in before.items()}) for x in (0.0, 0.1))
    posing = Message(RecordDict({"arrays": moved}), reply_to=messages[0])
    if forged.startswith("sender"):
        posing.metadata.__dict__["_src_node_id"] = FIRST + 1
    if forged != "sender":
        known = messages[1].metadata.message_id if forged == "message" else ""
        posing.metadata.__dict__["_reply_to_message_id"] = known
    with pytest.warns(UserWarning, match="8 x an update of zero"):
        strategy.aggregate_train(1, [posing, *(Message(RecordDict({"arrays": still}), reply_to=m) for m in messages)])
    assert all(torch.equal(value, before[name]) for name, value in strategy.arrays.to_torch_state_dict().items())


def test_a_grid_that_gives_messages_no_ids_is_refused_before_a_charge():
    strategy = make_strategy(make_plan(expected_cohort_size=USERS))
    strategy.configure_train(1, strategy.arrays, ConfigRecord(), DirectGrid())
    with pytest.raises(pg.PrivacyError, match="messages to have ids once they are sent"):
        strategy.aggregate_train(1, [])
    assert strategy.private_grad.ledger.releases == 0


def test_an_empty_cohort_makes_a_noised_and_charged_round():
    numbers = {"expected_cohort_size": 1, "rounds": 1}
    seed = next(s for s in range(99) if next(make_plan(**numbers, seed=s).batches(make_users())).size == 0)
    plan, grid = make_plan(**numbers, seed=seed), DirectGrid()
    strategy = make_strategy(plan)
    start(strategy, grid)
    require_equal(simulated(plan), strategy._model)
    assert not grid.sent
    assert strategy.private_grad.ledger.releases == 1
    assert strategy.arrays.object_id != make_strategy(plan).arrays.object_id


def test_the_plan_draws_the_cohorts_and_each_node_is_one_user():
    plan, grid = make_plan(), DirectGrid(echo)
    start(make_strategy(plan), grid)
    told: Any = [(int(m.metadata.group_id), m.content.config_records["config"]) for m in grid.sent]
    drawn = [[int(user) for user in batch.examples[0]] for batch in plan.batches(TensorDataset(torch.arange(USERS)))]
    assert [[config["user"] for number, config in told if number == k] for k in (1, 2, 3)] == drawn
    assert all(config["round"] == number - 1 for number, config in told)
    assert {
        m.metadata.dst_node_id - FIRST - config["user"] for m, (_, config) in zip(grid.sent, told, strict=True)
    } == {0}
    assert {config["max-update-norm"] for _, config in told} == {NORM}


def test_it_waits_for_a_node_a_user_and_takes_no_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("privgrad.integrations.flower._POLL", 0)
    grid = DirectGrid()
    looks = iter([grid.nodes[:3], grid.nodes[:7], grid.nodes[::-1]])
    grid.get_node_ids = lambda: next(looks, grid.nodes)
    strategy = make_strategy(make_plan())
    strategy.configure_train(1, strategy.arrays, ConfigRecord(), grid)
    assert strategy._rounds.ids == tuple(grid.nodes)
    strategy = make_strategy(make_plan())
    with pytest.raises(pg.PrivacyError, match="to be 8 different ids"):
        start(strategy, DirectGrid(nodes=USERS + 1))
    assert strategy.private_grad.ledger.releases == 0


@pytest.mark.parametrize("nodes", [range(USERS - 1), [*range(USERS - 1), 0]])
def test_nodes_are_one_a_user(nodes: Any):
    with pytest.raises(pg.PrivacyError, match="nodes to be 8 different ids"):
        make_strategy(make_plan(), nodes=nodes)


def test_the_ledger_is_charged_before_a_model_leaves(tmp_path: Path):
    path, charged = tmp_path / "ledger.jsonl", list[int]()

    class Watching(DirectGrid):
        def send_and_receive(self, messages: Any, **options: Any) -> Any:
            messages = list(messages)
            if messages:
                charged.append(Ledger(path, read_only=True).releases)
            return super().send_and_receive(messages, **options)

    strategy = make_strategy(make_plan(), ledger=path)
    start(strategy, Watching(echo), evaluate_fn=lambda *_: charged.append(Ledger(path, read_only=True).releases))
    assert charged == [0, 0, 1, 1, 2, 2, 3]
    strategy.private_grad.ledger.close()
    assert Ledger(path, read_only=True).plan_facts["privacy_unit"] == "user"
    with pytest.raises(pg.BudgetExceededError, match="the ledger to be empty"):
        start(make_strategy(make_plan(), ledger=path), DirectGrid())


def test_a_stop_by_results_costs_all_planned_rounds_but_the_ledger_has_fewer():
    def evaluate(server_round: int, _arrays: ArrayRecord) -> None:
        if server_round == 1:
            raise StopIteration("good enough")

    strategy = make_strategy(make_plan())
    with pytest.raises(StopIteration):
        start(strategy, DirectGrid(echo), evaluate_fn=evaluate)
    assert strategy.private_grad.ledger.epsilon(delta=1e-3) < strategy.private_grad.plan.epsilon()


def test_no_more_rounds_than_planned():
    strategy = make_strategy(make_plan(rounds=1))
    with pytest.raises(pg.BudgetExceededError, match="at most the plan's 1"):
        strategy.start(DirectGrid(echo), strategy.arrays, num_rounds=2)
    assert strategy.private_grad.ledger.releases == 1


def test_what_clients_report_stays_unread_unless_asked_for_as_raw(caplog: pytest.LogCaptureFixture):
    logging.getLogger("flwr").addHandler(caplog.handler)
    grid = DirectGrid(echo)
    plan = make_plan(rounds=1)
    result = start(make_strategy(plan), grid)
    assert [{*metrics} for metrics in result.train_metrics_clientapp.values()] == [{"epsilon"}]
    assert not result.evaluate_metrics_clientapp
    with pytest.warns(UserWarning, match="no reply reports 'absent' of raw_metrics"):
        result = start(make_strategy(plan, raw_metrics=["loss", "absent"]), grid)
    users = next(plan.batches(TensorDataset(torch.arange(USERS)))).examples[0]
    assert {*result.train_metrics_clientapp[1]} == {"epsilon", "raw_loss"}
    assert result.train_metrics_clientapp[1]["raw_loss"] == pytest.approx(users.float().mean().item())
    logging.getLogger("flwr").removeHandler(caplog.handler)
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "loss" in line] == [line for line in told if "raw_loss" in line] != []
    assert not any("1000000" in line or "node" in line for line in told)


def told_by_strategy(warned: Any) -> list[str]:
    """Of all that was warned of, such as the fixed seed."""
    return [text for one in warned if (text := str(one.message)).startswith("PrivateStrategy")]


def test_what_the_server_freezes_is_frozen_on_devices():
    strategy = make_frozen_strategy(make_plan())
    start(strategy, DirectGrid())
    require_equal(simulated(make_plan(), frozen=FROZEN), strategy._model)


def app_of(**changed: Any) -> Any:
    parts: dict[str, Any] = {"loss_fn": loss_fn, "data_of": row, **changed}
    return client_app(make_model, parts["loss_fn"], parts["data_of"], LOCAL)


# By case: what is told of the eight users, and the grid in which it happens.
LOST: dict[str, tuple[str, Callable[[], DirectGrid]]] = {
    "offline": ("8 x not connected", lambda: DirectGrid(echo, offline=range(USERS))),
    "late": ("8 x no reply in time", lambda: DirectGrid(echo, late=range(USERS))),
    "frozen parameters, too": (
        r"8 x names that are not trained here \['0.bias', '0.weight'\] and missing names \[\]",
        lambda: DirectGrid(echo),
    ),
    "other names": (
        r"8 x names that .* \['x2.bias', 'x2.weight'\] and missing names \['2.bias', '2.weight'\]",
        lambda: DirectGrid(lambda m, _: renamed(m)),
    ),
    "other shapes": (
        r"8 x '2.weight' of shape \(1, 4\) of torch.float32, not \(3, 4\)",
        lambda: DirectGrid(lambda m, _: sent(m, lambda name, value: trained(name, value[:1]))),
    ),
    "integers": (
        r"8 x '2.weight' of shape \(3, 4\) of torch.int32, not",
        lambda: DirectGrid(lambda m, _: sent(m, lambda name, value: trained(name, value.int()))),
    ),
    "plain data": (
        "8 x error CLIENT_APP_RAISED_EXCEPTION, which the device's log explains",
        lambda: DirectGrid(app_of(data_of=lambda *_: make_users().tensors[:2])),
    ),
    "zero": (
        "8 x an update of zero, from no examples or a local training that diverged",
        lambda: DirectGrid(lambda m, _: sent(m, lambda name, value: trained(name, 0 * value))),
    ),
    "not finite": (
        "8 x numbers that are not finite",
        lambda: DirectGrid(lambda m, _: sent(m, lambda name, value: trained(name, value / 0))),
    ),
}


def trained(name: str, value: Tensor) -> Tensor | None:
    return None if name in FROZEN else value


def renamed(message: Message) -> Message:
    arrays = message.content.array_records["arrays"].to_torch_state_dict()
    update = ArrayRecord({f"x{name}": value for name, value in arrays.items() if name not in FROZEN})
    return Message(RecordDict({"arrays": update}), reply_to=message)


@pytest.mark.parametrize("case", LOST)
def test_rounds_in_which_no_update_counts_warn_once_and_end_the_run(case: str, tmp_path: Path):
    told, grid = LOST[case]
    plan, states = make_plan(expected_cohort_size=USERS, rounds=12), list[Any]()
    nodes = [FIRST + user for user in range(USERS)]
    strategy = make_frozen_strategy(plan, nodes=nodes, ledger=tmp_path / "ledger.jsonl")

    def keep(*_: object) -> None:
        states.append(copy.deepcopy(strategy.state_dict()))

    with (
        pytest.warns(UserWarning, match=f"no user's update counts in this round.*{told}") as warned,
        pytest.raises(pg.PrivacyError, match=f"users to send updates that count, got 10 rounds in a row .*{told}"),
    ):
        start(strategy, grid(), evaluate_fn=keep)
    assert len(told_by_strategy(warned)) == 1
    assert strategy.private_grad.ledger.releases == 10
    # The remedy: with another app and all devices, the run goes on, here and from a file.
    mended = DirectGrid(lambda m, _: sent(m, lambda name, value: trained(name, 0.01 * torch.randn(value.shape))))
    strategy.load_state_dict(states[-1])
    strategy.start(mended, strategy.arrays, num_rounds=1)
    strategy.private_grad.ledger.close()
    resumed = make_frozen_strategy(plan, nodes=nodes, ledger=tmp_path / "ledger.jsonl")
    resumed.load_state_dict(strategy.state_dict())
    resumed.start(mended, resumed.arrays, num_rounds=1)
    assert resumed.private_grad.ledger.releases == 12


def test_a_local_training_that_diverges_warns():
    strategy = make_strategy(make_plan(rounds=1))
    with pytest.warns(UserWarning, match="an update of zero"):
        start(strategy, DirectGrid(app_of(loss_fn=lambda model, rows: torch.nan * loss_fn(model, rows))))


def test_one_update_that_counts_ends_the_row():
    strategy = make_strategy(make_plan(expected_cohort_size=USERS, rounds=15, noise_multiplier=0.0))
    failing = [*range(1, 10), *range(11, 16)]

    def app(message: Message, context: Context) -> Message:
        if int(message.metadata.group_id) in failing or context.node_id != FIRST:
            raise ValueError
        return echo(message, context)

    with pytest.warns(UserWarning, match="8 x error CLIENT_APP_RAISED_EXCEPTION"):
        start(strategy, DirectGrid(app))
    assert strategy.private_grad.ledger.releases == 15


def test_the_text_of_an_error_is_not_told():
    def data_of(*_: object) -> Any:
        raise RuntimeError("the label of my third example is 2")

    with pytest.warns(UserWarning, match="no user's update counts") as warned:
        start(make_strategy(make_plan(expected_cohort_size=USERS, rounds=1)), DirectGrid(app_of(data_of=data_of)))
    assert "label" not in "".join(told_by_strategy(warned))


def test_weights_in_place_of_updates_warn_once():
    apps = {name: ClientApp() for name in ("weights", "updates")}

    @apps["weights"].train()
    def of_weights(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        return sent(message, lambda name, value: value + 0.1 * torch.randn(value.shape))

    @apps["updates"].train()
    def of_updates(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        return sent(message, lambda name, value: value - (value + 0.1 * torch.randn(value.shape)))

    plan = make_plan(expected_cohort_size=USERS, rounds=2)
    with pytest.warns(UserWarning, match="near the weights themselves; send w - w_last") as warned:
        start(make_strategy(plan), DirectGrid(apps["weights"]))
    assert len(told_by_strategy(warned)) == 1
    start(make_strategy(plan), DirectGrid(apps["updates"]))


def test_raw_metrics_need_an_app_that_reports_them():
    plan = make_plan(rounds=2)
    with pytest.warns(UserWarning, match="no reply reports 'loss' .* client_app reports none") as warned:
        result = start(make_strategy(plan, raw_metrics=["loss"]), DirectGrid())
    assert [{*metrics} for metrics in result.train_metrics_clientapp.values()] == 2 * [{"epsilon"}]
    assert len(told_by_strategy(warned)) == 1
    inner, app = app_of(), ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        reply = inner(message, context)
        reply.content["metrics"] = MetricRecord({"loss": 0.5})
        return reply

    result = start(make_strategy(plan, raw_metrics=["loss"]), DirectGrid(app))
    assert [result.train_metrics_clientapp[number]["raw_loss"] for number in (1, 2)] == [0.5] * 2


def test_a_run_goes_on_from_its_state(tmp_path: Path):
    strategy = make_strategy(make_plan(), ledger=tmp_path / "ledger.jsonl")
    strategy.start(DirectGrid(), strategy.arrays, num_rounds=1)
    torch.save(strategy.state_dict(), tmp_path / "state.pt")
    strategy.private_grad.ledger.close()
    strategy = make_strategy(make_plan(), ledger=tmp_path / "ledger.jsonl")
    strategy.load_state_dict(torch.load(tmp_path / "state.pt"))
    strategy.start(DirectGrid(), strategy.arrays, num_rounds=3)  # of the plan, of which two are left
    require_equal(simulated(make_plan()), strategy._model)
    assert strategy.private_grad.ledger.releases == 3


@pytest.mark.parametrize(("has_key", "rounds"), [(True, 6), (False, 5)])
def test_each_user_is_in_one_round_of_each_epoch_also_after_a_pause(tmp_path: Path, has_key: bool, rounds: int):
    plan = make_plan(sampling="epochs", rounds=6, seed=None)  # epochs of 2 rounds

    def asked(grid: DirectGrid) -> list[int]:
        return [message.metadata.dst_node_id - FIRST for message in grid.sent]

    strategy, grid = make_strategy(plan, ledger=tmp_path / "ledger.jsonl"), DirectGrid(echo)
    strategy.start(grid, strategy.arrays, num_rounds=2)
    assert sorted(asked(grid)) == list(range(USERS))
    strategy.start(grid, strategy.arrays, num_rounds=1)
    state = strategy.state_dict()
    strategy.private_grad.ledger.close()
    key = tmp_path / "_ledger.jsonl.epoch"
    assert key.exists()
    if not has_key:
        key.unlink()
    resumed = make_strategy(plan, ledger=tmp_path / "ledger.jsonl")
    with (
        nullcontext() if has_key else pytest.warns(UserWarning, match="the key of the epoch before step 4 is not here")
    ):
        resumed.load_state_dict(state)
    if has_key:
        resumed.start(grid, resumed.arrays, num_rounds=1)
        assert sorted(asked(grid)[USERS:]) == list(range(USERS))
    resumed.start(grid, resumed.arrays, num_rounds=2)
    ledger = resumed.private_grad.ledger
    assert (ledger.releases, ledger.participations) == (rounds, 6)
    with pytest.raises(pg.BudgetExceededError, match="at most the plan's 6"):
        resumed.start(grid, resumed.arrays, num_rounds=1)
    assert not key.exists()


def test_a_run_that_resumes_within_an_epoch_keeps_the_users_of_its_nodes(tmp_path: Path):
    """A device that comes back under another id is no other user, and numbers do not move."""
    plan = make_plan(sampling="epochs", rounds=6, seed=None)
    strategy = make_strategy(plan, ledger=tmp_path / "ledger.jsonl")
    strategy.start(DirectGrid(echo), strategy.arrays, num_rounds=1)
    state, nodes = strategy.state_dict(), strategy._rounds.ids
    strategy.private_grad.ledger.close()
    assert nodes is not None
    resumed = make_strategy(plan, ledger=tmp_path / "ledger.jsonl")
    resumed.load_state_dict(state | {"nodes": list(nodes)})
    assert resumed._rounds.ids == nodes
    resumed.private_grad.ledger.close()
    other = make_strategy(plan, ledger=tmp_path / "ledger.jsonl", nodes=nodes[::-1])
    with pytest.raises(pg.PrivacyError, match="nodes to be those of the run that is resumed"):
        other.load_state_dict(state)


def test_a_device_answers_with_its_clipped_update_and_nothing_else():
    app = client_app(make_model, loss_fn, row, LOCAL)
    strategy = make_strategy(make_plan(expected_cohort_size=USERS))
    message = list(strategy.configure_train(1, strategy.arrays, ConfigRecord(), DirectGrid()))[4]
    reply = app(message, Context(1, 1, {}, RecordDict(), {}))
    assert list(reply.content) == ["arrays"]
    update = reply.content.array_records["arrays"].to_torch_state_dict()
    own = local_update(make_model(), loss_fn, row(None, 4), LOCAL, max_update_norm=NORM)
    for name, value in own.items():
        torch.testing.assert_close(update[name], value, rtol=0, atol=0)
    private = pg.side_information.Scales({"0.weight": torch.ones(5)}, provenance="private-derived", source="a test")
    with pytest.raises(pg.PrivacyError, match="client_app: expected precondition to be public"):
        client_app(make_model, loss_fn, row, LOCAL, precondition=pg.precondition.fixed(private))


def test_a_plan_for_examples_is_refused():
    plan = make_plan()
    with pytest.raises(pg.PrivacyError, match="plan by PrivacyPlan"):
        make_strategy(dataclasses.replace(plan, privacy_unit="example"))


def test_the_example_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLE))
    grid = DirectGrid(example["client"], nodes=example["USERS"])
    example["server"](grid, Context(1, 1, {}, RecordDict(), {"ledger": str(tmp_path / "ledger.jsonl")}))
    assert capsys.readouterr().out.startswith("epsilon ")
    assert Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("tuple(rows[user : user + 1] for rows in users.tensors)", "for each user"),
        ("images[:20], labels[:20]", "x error CLIENT_APP_RAISED_EXCEPTION, which the device's log explains"),
    ],
)
def test_the_example_trains_over_flowers_own_commands_and_tells_of_errors(row: str, told: str, tmp_path: Path):
    text = EXAMPLE.read_text()
    assert text.count("    return tuple(rows[user : user + 1] for rows in users.tensors)\n") == 1
    script = tmp_path / "flower.py"
    script.write_text(text.replace("tuple(rows[user : user + 1] for rows in users.tensors)", row))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=590, check=False)
    assert told in done.stdout + done.stderr, (done.stdout + done.stderr)[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_train_as_one_and_killed_ones_lose_no_charge(tmp_path: Path):
    codes = run_everything(tmp_path)
    require_equal(torch.load(tmp_path / "all.pt"), simulated(make_plan()))
    assert Ledger(tmp_path / "all.jsonl", read_only=True).releases == 3
    assert sorted(code for code in codes if code is not None) == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert Ledger(tmp_path / "some.jsonl", read_only=True).releases == 2
    end, before = torch.load(tmp_path / "some.pt"), make_model().state_dict()
    moved = torch.cat([(end[name] - value).flatten() for name, value in before.items()]).norm().item()
    # Of eight, two contribute anything: at most C each, and the honest one in both rounds if it was quick enough.
    assert NORM / USERS * (1 - 1e-4) < moved <= 2 * 2 * NORM / USERS
