"""NVFlare's bridge: private rounds, the noise filter and private sites, in one process and in its simulator."""
# pyright: reportMissingImports=false

import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from pages import blocks
from privgrad.data.dataset import by_user

pytest.importorskip("nvflare", reason="NVFlare is not among the packages of the development environment; `make slow`")
import psutil
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from privgrad.integrations.nvflare import PrivacyNoise, PrivateController, PrivateSite, site_update
from privgrad.perturb.local_training import LocalUpdate

SITES, NORM = ["a", "b", "c"], 0.5
LOCAL = LocalUpdate(0.2, batch_size=2)
EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare_digits.py"
JOB = Path(__file__).with_name("nvflare_job.py")


def users() -> TensorDataset:
    return by_user(make_data(15).tensors, [index % 3 for index in range(15)], cap=5)


def make_rounds(**changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {"expected_cohort_size": 2, "rounds": 3, "noise_multiplier": 1.0, "seed": 3, **changed}
    return pg.PrivacyPlan.for_users(num_users=3, max_update_norm=NORM, delta=1e-3, **numbers)


def everyone(**changed: Any) -> pg.PrivacyPlan:
    return make_rounds(**{"expected_cohort_size": 3, "rounds": 1, "noise_multiplier": 0.0, **changed})


def honest(site: str, received: FLModel) -> FLModel:
    user = SITES.index(site)
    return site_update(received, make_model(), loss_fn, tuple(t[user : user + 1] for t in users().tensors), LOCAL)


class Direct(PrivateController):
    """A controller whose sites answer at once, by messages in the form in which they would come over the network."""

    def __init__(self, plan: pg.PrivacyPlan, folder: Path, answer: Any = honest, **options: Any) -> None:
        super().__init__(make_model(), plan, str(folder), **options)
        self.answer, self.online = answer, list(SITES)
        self.sent: list[tuple[FLModel, list[str]]] = []
        self.told, self.events = list[str](), list[Any]()
        self.abort_signal, self.fl_ctx = Signal(), FLContext()
        self.engine: Any = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=name) for name in self.online])

    def info(self, message: str) -> None:
        self.told.append(message)

    def fire_event_with_data(self, event: str, fl_ctx: Any, key: str, data: Any) -> None:
        self.events.append(data)

    def event(self, event_type: str) -> None: ...

    def send_model_and_wait(self, task_name: str = "train", data: Any = None, targets: Any = None, **_: Any) -> Any:
        self.sent.append((data, targets))
        found = list[FLModel]()
        for site in targets:
            received = FLModelUtils.from_shareable(FLModelUtils.to_shareable(data))
            for answer in many(self.answer(site, received)):
                result = FLModelUtils.to_shareable(answer)
                assert self._accept_train_result(site, result, self.fl_ctx)
                found.append(FLModelUtils.from_shareable(result))
                found[-1].meta["client_name"] = site
        return found

    @property
    def weights(self) -> dict[str, Tensor]:
        return self._model.state_dict()


def many(answer: FLModel | Iterable[FLModel]) -> Iterable[FLModel]:
    return [answer] if isinstance(answer, FLModel) else answer


def charged(folder: Path) -> int:
    return pg.Ledger(folder / "ledger.jsonl", read_only=True).releases


def simulated(plan: pg.PrivacyPlan, *, without: Iterable[int] = ()) -> dict[str, Tensor]:
    """Our own simulation of the same rounds; some sites' updates are none."""
    model = make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=LOCAL)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
    *tensors, count = users().tensors
    count[list(without)] = 0
    for batch in plan.batches(TensorDataset(*tensors, count)):
        optimizer.step(grad=private_grad(batch))
    return model.state_dict()


def require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=0, atol=1e-6)


def as_weights(site: str, received: FLModel) -> FLModel:
    """What an ordinary client sends, with frozen parameters, buffers and its metrics."""
    update = honest(site, received)
    params = {name: received.params[name] + value for name, value in update.params.items()}
    return FLModel(params_type=ParamsType.FULL, params=params, metrics={"loss": 3.0}, meta={"NUM_STEPS": 10**6})


@pytest.mark.parametrize("answer", [honest, as_weights])
def test_the_same_training_over_nvflare_as_in_one_process(answer: Any, tmp_path: Path):
    controller = Direct(make_rounds(), tmp_path, answer)
    controller.run()
    require_equal(controller.weights, simulated(make_rounds()))
    assert charged(tmp_path) == 3
    assert all(
        not result.metrics for result in controller.send_model_and_wait(data=controller.sent[0][0], targets=["a"])
    )


def test_epsilon_by_round_stands_with_the_results_on_public_data(tmp_path: Path):
    class Own(Direct):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"accuracy": 0.5}

    plan = make_rounds(seed=None)
    controller = Own(plan, tmp_path)
    controller.run()
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == [pytest.approx(plan.epsilon(steps=k), rel=1e-9) for k in (1, 2, 3)]
    assert [(row["round"], row["accuracy"], row["delta"]) for row in rows] == [(k, 0.5, 1e-3) for k in (1, 2, 3)]
    told = [line for line in controller.told if line.startswith("Round ")]
    assert [line.split(":")[0] for line in told] == ["Round 1 of 3", "Round 2 of 3", "Round 3 of 3"]
    assert all("at delta 0.001, accuracy 0.5" in line for line in told)
    assert [event.metrics for event in controller.events] == [{"epsilon": r["epsilon"], "accuracy": 0.5} for r in rows]
    statement = (tmp_path / "released" / "statement.txt").read_text()
    assert "- The sites in the training data are protected by differential privacy with epsilon" in statement
    assert "one site with all data of this site" in statement
    assert "was declared to have 3 sites" in statement
    assert " person " not in statement
    assert json.loads((tmp_path / "released" / "statement.json").read_text())["numbers"]["releases"] == 3


def test_the_job_stops_at_the_budget_also_when_it_is_started_again(tmp_path: Path):
    Direct(make_rounds(seed=None), tmp_path, num_rounds=2).run()
    assert charged(tmp_path) == 2
    weights = Direct(make_rounds(seed=None), tmp_path)
    weights.run()
    assert charged(tmp_path) == 3
    again = Direct(make_rounds(seed=None), tmp_path)
    again.run()
    assert again.sent == []
    assert charged(tmp_path) == 3
    require_equal(again.weights, weights.weights)
    assert again.told == ["The plan's 3 rounds are spent."]


def test_the_ledger_is_charged_before_a_model_leaves(tmp_path: Path):
    seen = list[int]()

    def watching(site: str, received: FLModel) -> FLModel:
        seen.append(charged(tmp_path))
        return honest(site, received)

    Direct(everyone(rounds=3, noise_multiplier=1.0), tmp_path, watching).run()
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("lost", ["answers", "checkpoint"])
def test_a_crash_loses_no_charge(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed while sites work, nothing is charged; killed before the checkpoint, the round is charged and lost."""
    plan = everyone(rounds=3, noise_multiplier=1.0, seed=None)
    first = Direct(plan, tmp_path, num_rounds=1)
    first.run()

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("privgrad.integrations.nvflare.UserRounds.write", killed)
        with pytest.raises(KeyboardInterrupt):
            Direct(plan, tmp_path, killed if lost == "answers" else honest).run()
    spent = 1 if lost == "answers" else 2
    assert charged(tmp_path) == spent
    resumed = Direct(plan, tmp_path)
    if lost == "checkpoint":
        with pytest.warns(UserWarning, match="charged steps had no checkpoint"):
            resumed.run()
    else:
        resumed.run()
    assert len(resumed.sent) == 3 - spent
    require_equal({name: torch.tensor(value) for name, value in resumed.sent[0][0].params.items()}, first.weights)
    assert charged(tmp_path) == 3


def test_a_job_that_is_killed_in_its_first_round_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = everyone(rounds=2, noise_multiplier=1.0, seed=None)

    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("privgrad.integrations.nvflare.UserRounds.state_dict", killed)
        with pytest.raises(KeyboardInterrupt):
            Direct(plan, tmp_path).run()
    with monkeypatch.context() as patch:
        patch.setattr("privgrad.integrations.nvflare.save", killed)
        with pytest.raises(KeyboardInterrupt):
            Direct(plan, tmp_path, num_rounds=1).run()
    Direct(plan, tmp_path).run()
    assert charged(tmp_path) == 2


def test_an_abort_charges_nothing(tmp_path: Path):
    def aborted(site: str, received: FLModel) -> FLModel:
        controller.abort_signal.trigger(True)
        return honest(site, received)

    controller = Direct(everyone(), tmp_path, aborted)
    controller.run()
    assert charged(tmp_path) == 0


def test_two_servers_do_not_share_a_ledger(tmp_path: Path):
    def other(site: str, received: FLModel) -> FLModel:
        with pytest.raises(pg.PrivacyError, match="ledger"):
            Direct(everyone(), tmp_path).run()
        return honest(site, received)

    Direct(everyone(), tmp_path, other).run()
    assert charged(tmp_path) == 1
    with pytest.raises(pg.PrivacyError, match="expected the plan's noise_multiplier to be as recorded"):
        Direct(everyone(noise_multiplier=2.0), tmp_path).run()


def of(update: FLModel, change: Callable[[str, np.ndarray], np.ndarray | None], **more: Any) -> FLModel:
    changed = {name: change(name, value) for name, value in update.params.items()}
    params = {name: value for name, value in changed.items() if value is not None}
    return FLModel(params_type=update.params_type, params=params | more)


FAULTS: dict[str, Callable[[FLModel], Any]] = {
    "no answer": lambda update: [],
    "nan": lambda update: of(update, lambda _, value: np.where(value == value.flat[0], np.nan, value)),
    "infinite": lambda update: of(update, lambda _, value: value / np.float32(1e-45)),
    "wrong shape": lambda update: of(update, lambda _, value: value[:1]),
    "integers": lambda update: of(update, lambda _, value: (100 * value).astype(np.int64)),
    "missing name": lambda update: of(update, lambda name, value: None if name == "0.bias" else value),
    "additional name": lambda update: of(update, lambda _, value: value, more=np.ones(3, np.float32)),
    "no arrays": lambda update: FLModel(params_type=ParamsType.DIFF, params={}),
    "no numbers": lambda update: of(update, lambda _, value: "nonsense"),  # pyright: ignore
    "objects": lambda update: of(update, lambda _, value: np.array([None, {}])),
    "zero": lambda update: of(update, lambda _, value: 0 * value),
}


def played(fault: Callable[[FLModel], Any], folder: Path) -> Direct:
    """A round without noise in which one of three sites has a fault."""

    def answer(site: str, received: FLModel) -> Any:
        update = honest(site, received)
        return fault(update) if site == "b" else update

    controller = Direct(everyone(), folder, answer)
    controller.run()
    return controller


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow", "ignore:invalid value")
@pytest.mark.filterwarnings("ignore:PrivateController. some updates do not count")
def test_nonsense_contributes_nothing_and_costs_as_any_round(kind: str, tmp_path: Path):
    controller = played(FAULTS[kind], tmp_path)
    require_equal(controller.weights, simulated(everyone(), without=[1]))
    assert charged(tmp_path) == 1


def test_a_huge_update_contributes_no_more_than_the_bound(tmp_path: Path):
    moved = played(lambda update: of(update, lambda _, value: 1e6 * value), tmp_path).weights
    alone = simulated(everyone(), without=[1])
    length = torch.cat([(moved[name] - alone[name]).flatten() for name in moved]).norm().item()
    assert length == pytest.approx(NORM / 3, rel=1e-4)


def test_a_site_that_answers_twice_or_lies_about_its_count_counts_once(tmp_path: Path):
    def lying(update: FLModel) -> list[FLModel]:
        update.meta["NUM_STEPS_CURRENT_ROUND"] = 10**6
        return [update, FLModel(params_type=ParamsType.DIFF, params={n: -v for n, v in update.params.items()})]

    require_equal(played(lying, tmp_path).weights, simulated(everyone()))


def test_weights_that_are_sent_as_differences_are_suspected(tmp_path: Path):
    def confused(site: str, received: FLModel) -> FLModel:
        return FLModel(params_type=ParamsType.FULL, params=honest(site, received).params)

    with pytest.warns(UserWarning, match="near the weights themselves; params_type=FULL is for w_last"):
        Direct(everyone(), tmp_path, confused).run()


@pytest.mark.filterwarnings("ignore:PrivateController. some updates do not count")
def test_sites_that_are_away_are_not_asked_and_all_away_is_a_charged_round(tmp_path: Path):
    controller = Direct(everyone(), tmp_path / "one", sites=SITES)
    controller.online = ["a", "c", "stranger"]
    controller.run()
    assert controller.sent[0][1] == ["a", "c"]
    require_equal(controller.weights, simulated(everyone(), without=[1]))
    controller = Direct(everyone(), tmp_path / "none", sites=SITES)
    controller.online = []
    with pytest.warns(UserWarning, match="3 x not connected"):
        controller.run()
    assert controller.sent == []  # to NVFlare, no targets are all sites
    assert charged(tmp_path / "none") == 1


def test_a_run_in_which_nobody_counts_ends(tmp_path: Path):
    controller = Direct(everyone(rounds=20), tmp_path, lambda site, received: [])
    with pytest.warns(UserWarning, match="3 x no usable reply in time"), pytest.raises(pg.PrivacyError, match="count"):
        controller.run()
    assert charged(tmp_path) == 10


@pytest.mark.parametrize("sites", [["a", "b"], ["a", "b", "b"]])
def test_sites_are_one_a_user(sites: list[str], tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="sites to be 3 different ids"):
        Direct(everyone(), tmp_path, sites=sites).run()


def test_it_waits_for_a_site_a_user_and_takes_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    controller = Direct(everyone(), tmp_path)
    controller.online = ["c", "a"]
    monkeypatch.setattr("privgrad.integrations.nvflare.time.sleep", lambda _: controller.online.append("b"))
    controller.run()
    assert controller.sent[0][1] == ["a", "b", "c"]
    controller = Direct(everyone(), tmp_path / "more")
    controller.online = [*SITES, "d"]
    with pytest.raises(pg.PrivacyError, match="sites to be 3 different ids"):
        controller.run()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamBC"])
def test_the_servers_optimizer_is_any_of_ours(optimizer: str, tmp_path: Path):
    controller = Direct(make_rounds(), tmp_path, optimizer=optimizer, optimizer_args={"lr": 0.1})
    controller.run()
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).optimizers[0].startswith(optimizer)
    with pytest.raises(pg.PrivacyError, match="optimizer to be one of SGD"):
        Direct(make_rounds(), tmp_path, optimizer="FedAdam")


# The noise filter.


def noise_plan(**changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {"rounds": 20, "delta": 1e-5, "noise_multiplier": 2.4, **changed}
    return pg.PrivacyPlan.for_users(num_users=1, expected_cohort_size=1, max_update_norm=1.0, **numbers)


def context(site: str, *, server: bool = False) -> FLContext:
    own, peer = FLContext(), FLContext()
    kind = ProcessType.SERVER_JOB if server else ProcessType.CLIENT_JOB
    own.set_prop(FLContextKey.PROCESS_TYPE, kind, private=True, sticky=False)
    (peer if server else own).put(key="__identity_name__", value=site, private=False, sticky=False)
    (own if server else peer).put(key="__identity_name__", value="other", private=False, sticky=False)
    own.set_peer_context(peer)
    return own


def result_of(values: dict[str, Any], kind: str = DataKind.WEIGHT_DIFF) -> Shareable:
    result = DXO(
        kind, data=values, meta={"NUM_STEPS_CURRENT_ROUND": 77, "initial_metrics": {"loss": 1.0}}
    ).to_shareable()
    result.set_return_code(ReturnCode.OK)
    return result


def sent_through(noise: PrivacyNoise, values: dict[str, Any], ctx: FLContext, kind: str = DataKind.WEIGHT_DIFF) -> DXO:
    return from_shareable(noise.process(result_of(values, kind), ctx))


def test_the_filter_clips_adds_noise_and_counts_all_rounds(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The consortium's plan, which a formula without composition stated as at most 10 per round."""
    noise, plan = PrivacyNoise(noise_plan(), str(tmp_path)), noise_plan()
    long = {"a.weight": np.full((100, 100), 5.0, np.float32), "b": torch.zeros(3)}
    drawn = list[np.ndarray]()
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            found = sent_through(noise, long, context("a"))
            assert found.meta == {"filter_history": ["PrivacyNoise"]}
            assert {name: value.shape for name, value in found.data.items()} == {"a.weight": (100, 100), "b": (3,)}
            drawn.append(found.data["a.weight"])
    values = np.stack(drawn)
    assert values.std() == pytest.approx(2.4, rel=0.02)
    assert values.mean() == pytest.approx(0.01, abs=4 * 2.4 / values.size**0.5)  # of norm 1, not 500
    assert plan.epsilon() < 9.17
    assert "epsilon 9.166 at delta 1e-05" in caplog.text
    with pytest.raises(pg.BudgetExceededError, match="at most the plan's 20 steps"):
        noise.process(result_of(long), context("a"))
    assert pg.Ledger(tmp_path / "a.jsonl", read_only=True).releases == 20


def test_the_filter_counts_on_after_a_crash_and_sites_apart_at_the_server(tmp_path: Path):
    values = {"w": np.ones(3, np.float32)}
    noise = PrivacyNoise(noise_plan(rounds=2), str(tmp_path))
    for site in ("a", "b", "a"):
        sent_through(noise, values, context(site, server=True))
    for private_grad, _ in noise._states.values():
        private_grad.ledger.close()
    again = PrivacyNoise(noise_plan(rounds=2), str(tmp_path))
    sent_through(again, values, context("b"))
    for site in ("a", "b"):
        with pytest.raises(pg.BudgetExceededError):
            again.process(result_of(values), context(site))
        assert pg.Ledger(tmp_path / f"{site}.jsonl", read_only=True).releases == 2
    with pytest.raises(pg.PrivacyError, match="ledger"):  # which `again` holds
        PrivacyNoise(noise_plan(rounds=2), str(tmp_path)).process(result_of(values), context("a"))


def test_the_filter_lets_nothing_else_pass(tmp_path: Path):
    noise, values = PrivacyNoise(noise_plan(), str(tmp_path)), {"w": np.ones(3, np.float32)}
    for kind in (DataKind.WEIGHTS, DataKind.METRICS):
        with pytest.raises(pg.PrivacyError, match=r"to be DataKind.WEIGHT_DIFF, got .*TransferType.DIFF"):
            noise.process(result_of(values, kind), context("a"))
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    failed["DXO"] = {"secret": 3}
    assert "DXO" not in noise.process(failed, context("a"))
    with pytest.raises(ValueError, match="DXO"):
        noise.process(Shareable({"secret": 3}), context("a"))
    assert not list(tmp_path.iterdir())
    sent_through(noise, values, context("a"))
    others = [
        {"w": np.ones(4, np.float32)},
        {"w": np.ones(3, np.int64)},
        values | {"v": np.ones(1, np.float32)},
        {"v": 1.0},
    ]
    for other in others:
        with pytest.raises(pg.PrivacyError, match="an update to have the form of the site's first"):
            noise.process(result_of(other), context("a"))
    nan = sent_through(noise, {"w": np.full(3, np.nan, np.float32)}, context("a"))  # that it is not finite is private
    assert np.isfinite(nan.data["w"]).all()
    assert pg.Ledger(tmp_path / "a.jsonl", read_only=True).releases == 2
    with pytest.raises(pg.PrivacyError, match="plan to be for one user, the site"):
        PrivacyNoise(make_rounds(), str(tmp_path))


# Sites that train privately.


def make_site(folder: Path, *, steps: int = 2, **changed: Any) -> tuple[PrivateSite, nn.Module]:
    model, plan = make_model(), make_plan(**{"steps": 5, "delta": 1e-3, **changed})
    optimizer = pg.optim.MomentumSGD(model.named_parameters(), lr=0.1)
    return PrivateSite(model, loss_fn, make_data(), optimizer, plan, folder=folder, steps=steps), model


def asked(number: int, model: nn.Module | None = None) -> FLModel:
    weights = (model or make_model()).state_dict()
    return FLModel(params={n: v.clone() for n, v in weights.items()}, current_round=number, total_rounds=9)


def test_a_site_trains_privately_and_stops_by_itself(tmp_path: Path):
    site, model = make_site(tmp_path)
    plan = site.private_grad.plan
    sent = list[FLModel]()
    for number, taken in enumerate([2, 4, 5]):
        sent.append(site.train(asked(number, model)))
        assert charged(tmp_path) == taken
        assert sent[-1].meta["epsilon"] == pytest.approx(plan.epsilon(steps=taken), rel=1e-6)
        assert "PRIVACY STATEMENT" in (tmp_path / "statement.txt").read_text()
    assert all(answer.params_type == ParamsType.FULL and answer.metrics is None for answer in sent)
    with pytest.raises(pg.BudgetExceededError, match="steps to be left in the plan, got 5 of 5 taken"):
        site.train(asked(3, model))
    assert charged(tmp_path) == 5


def test_a_site_trains_as_in_one_process(tmp_path: Path):
    site, model = make_site(tmp_path, seed=7, steps=2)
    for number in range(3):
        site.train(asked(number, model))
    own = make_model()
    private_grad = pg.PrivateGradient(own, loss_fn, make_plan(steps=5, seed=7))
    optimizer = pg.optim.MomentumSGD(own.named_parameters(), lr=0.1)
    for batch in private_grad.plan.batches(make_data()):
        optimizer.step(grad=private_grad(batch))
    require_equal(model.state_dict(), own.state_dict())


@pytest.mark.filterwarnings("ignore:PrivateSite. the server's weights are those of the last round")
def test_a_repeated_round_is_answered_again_at_no_cost_also_after_a_crash(tmp_path: Path):
    site, _ = make_site(tmp_path)
    first = site.train(asked(0))
    require_equal(site.train(asked(0)).params, first.params)
    site.private_grad.ledger.close()
    site, _ = make_site(tmp_path)
    require_equal(site.train(asked(0)).params, first.params)
    assert charged(tmp_path) == 2
    require_equal(site.train(asked(1)).params, first.params)  # FedAvg began again: what counts is the model
    assert charged(tmp_path) == 2
    lost = asked(1)
    lost.params["0.bias"] += torch.nan
    with pytest.raises(pg.PrivacyError, match="the server's weights to fit the site's model"):
        site.train(lost)
    assert charged(tmp_path) == 2


@pytest.mark.parametrize("arrays", [False, True])
def test_a_killed_site_keeps_its_charges_and_goes_on(arrays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site, _ = make_site(tmp_path, steps=3)

    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(site._rounds.private_step.optimizer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            site.train(asked(0))
    site.private_grad.ledger.close()
    with pytest.warns(UserWarning, match="1 charged steps had no checkpoint"):
        site, _ = make_site(tmp_path, steps=3)
    question = asked(0)
    if arrays:
        question.params = {name: value.numpy() for name, value in question.params.items()}
    answer = site.train(question)
    assert all(isinstance(value, np.ndarray) == arrays for value in answer.params.values())
    assert charged(tmp_path) == 3  # the lost step is one of the round's three
    with pytest.raises(pg.PrivacyError, match="ledger"):
        make_site(tmp_path)


# NVFlare's simulator.


def start(script: Path, *arguments: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as log:
        command = [sys.executable, str(script), *arguments]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    parent = psutil.Process(process.pid)
    for one in [*parent.children(recursive=True), parent]:
        one.kill()
    process.wait()


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_simulator_trains_as_our_own_simulation_is_killed_once_and_stops_at_the_budget(tmp_path: Path):
    job = runpy.run_path(str(JOB))
    folder = tmp_path / "sites"
    process = start(JOB, "sites", folder=tmp_path)
    while lines(folder / "rounds.jsonl") < 2:
        assert process.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        time.sleep(0.2)
    kill_all(process)
    before = charged(folder)
    assert before in (2, 3, 4)
    assert start(JOB, "sites", folder=tmp_path).wait() == 0
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert charged(folder) == job["plan"]().steps == rows[-1]["round"]
    assert rows[-1]["epsilon"] == pytest.approx(job["plan"]().epsilon(), rel=1e-6)
    accuracies = [job["simulated"]() for _ in range(5)]
    spread = max(accuracies) - min(accuracies)
    assert min(accuracies) - spread - 0.05 <= rows[-1]["accuracy"] <= max(accuracies) + spread + 0.05
    assert rows[-1]["accuracy"] > 0.6
    start(JOB, "sites", folder=tmp_path).wait()
    assert charged(folder) == job["plan"]().steps


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["clients", "server"])
def test_the_filter_works_in_the_simulator_and_stops_at_its_budget(where: str, tmp_path: Path):
    start(JOB, f"noise-{where}", folder=tmp_path).wait()
    ledgers = sorted((tmp_path / f"noise-{where}").glob("*.jsonl"))
    assert [path.stem for path in ledgers] == ["clinic-a", "clinic-b", "clinic-c"]
    assert [pg.Ledger(path, read_only=True).releases for path in ledgers] == [2, 2, 2]  # of three rounds
    log = (tmp_path / "log.txt").read_text()
    assert "BudgetExceededError" in log
    assert "at most the plan's 2 steps" in log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_trains_private_sites(tmp_path: Path):
    shutil.copy(EXAMPLE, tmp_path)
    assert start(tmp_path / EXAMPLE.name, folder=tmp_path).wait() == 0
    last = (tmp_path / "log.txt").read_text().splitlines()[-1]
    found = last.split()
    assert found[:1] == ["accuracy"], last
    assert float(found[1].rstrip(",")) > 0.7
    assert float(found[5]) <= 4.01


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pages_files_train_private_records(tmp_path: Path):
    """client.py and job.py of docs/nvflare.md, for two of their 20 rounds and in the simulator."""
    page = "docs/nvflare.md"
    smaller = {"/secure": f"{tmp_path}", "num_rounds=20": "num_rounds=2", "steps=50": "steps=10"}
    simulated = 'job.simulator_run("workspace", n_clients=3)'
    smaller['job.export_job("jobs")  # or ' + simulated] = simulated
    for block in blocks(page):
        if block.title:
            text = block.text
            for old, new in smaller.items():
                text = text.replace(old, new)
            (tmp_path / block.title).write_text(text)
    torch.save((torch.randn(8000, 30), torch.randint(0, 2, (8000,))), tmp_path / "data.pt")
    assert start(tmp_path / "job.py", folder=tmp_path).wait() == 0
    for number in (1, 2, 3):
        folder = tmp_path / f"site-{number}"
        assert charged(folder) == 20
        assert "The rows in the training data are protected by" in (folder / "statement.txt").read_text()
