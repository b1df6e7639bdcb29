"""The rounds of a server and of a site, whatever framework runs them: what counts, and what is charged."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.training.federated_rounds import SiteRounds, UserRounds, checked_update

NORM = 0.5


def make_rounds(ledger: Path | None = None, **changed: Any) -> UserRounds:
    numbers: dict[str, Any] = {"expected_cohort_size": 3, "rounds": 2, "noise_multiplier": 1.0, **changed}
    plan = pg.PrivacyPlan.for_users(num_users=3, max_update_norm=NORM, delta=1e-3, **numbers)
    model = make_model()
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
    return UserRounds("Server", model, optimizer, plan, ledger=ledger, ids=["c", "a", "b"], places="sites")


def update(rounds: UserRounds, size: float) -> dict[str, Tensor]:
    return {name: torch.full_like(p, size) for name, p in rounds.trained().items()}


def test_a_round_is_the_clipped_sum_by_the_expected_number_and_absence_lowers_it():
    rounds = make_rounds(noise_multiplier=0.0)
    before = rounds.trained()["0.weight"].clone()
    elements = sum(p.numel() for p in rounds.trained().values())
    rounds.release(rounds.draw(), [update(rounds, 0.01), update(rounds, 1e6), "no reply in time"])
    expected = (0.01 + NORM / elements**0.5) / 3
    torch.testing.assert_close(before - rounds.trained()["0.weight"], torch.full_like(before, expected))
    assert rounds.private_grad.ledger.releases == 1


def test_a_resumed_run_ends_with_the_planned_number_of_charges(tmp_path: Path):
    rounds = make_rounds(tmp_path / "ledger.jsonl")
    state = rounds.state_dict()
    rounds.release(rounds.draw(), [update(rounds, 0.01)] * 3)  # killed before the state was kept
    with pytest.raises(pg.PrivacyError, match="ledger"):  # a second server
        make_rounds(tmp_path / "ledger.jsonl")
    rounds.private_grad.ledger.close()
    again = make_rounds(tmp_path / "ledger.jsonl")
    with pytest.raises(pg.BudgetExceededError, match="the ledger to be empty"):
        again.draw()
    with pytest.warns(UserWarning, match="1 charged steps had no checkpoint"):
        again.load_state_dict(state)
    again.release(again.draw(), [update(again, 0.01)] * 3)
    with pytest.raises(pg.BudgetExceededError, match="rounds to be at most the plan's 2, got 3"):
        again.draw()
    assert again.private_grad.ledger.releases == 2


def test_a_batch_is_released_once():
    rounds = make_rounds()
    batch = rounds.draw()
    rounds.release(batch, [update(rounds, 0.01)] * 3)
    with pytest.raises(pg.SamplingError, match="to be used once"):
        rounds.release(batch, [update(rounds, 0.01)] * 3)
    assert rounds.private_grad.ledger.releases == 1


def test_a_site_that_contributes_nothing_is_named_to_the_server_alone():
    rounds = make_rounds()
    rounds.plan = replace(rounds.plan, user="site")
    found = [update(rounds, 0.01), "numbers that are not finite", update(rounds, 0.01)]
    with pytest.warns(UserWarning, match="some updates do not count: 1 x numbers that are not finite .NOT PRIVATE"):
        rounds.release(rounds.draw(), found)
    rounds.release(rounds.draw(), found)  # once is enough


def test_ids_are_one_a_user_and_keep_their_order():
    rounds = make_rounds()
    assert rounds.settle(["x", "y", "z"]) == ("c", "a", "b")
    rounds.ids = None
    with pytest.raises(pg.PrivacyError, match="Server: expected sites to be 3 different ids, one for each user"):
        rounds.settle(["x", "x", "y"])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"0.bias": torch.ones(5)}, "'0.bias' of shape (5,) of torch.float32, not (4,)"),
        ({"0.bias": torch.ones(4, dtype=torch.int64)}, "'0.bias' of shape (4,) of torch.int64"),
        ({"0.bias": torch.full((4,), torch.nan)}, "numbers that are not finite"),
        ({"more": torch.ones(1)}, "names that are not trained here ['more'] and missing names []"),
    ],
)
def test_what_is_no_update_of_the_model_is_named(changed: dict[str, Tensor], why: str):
    rounds = make_rounds()
    found = checked_update(update(rounds, 0.1) | changed, rounds.trained())
    assert isinstance(found, str)
    assert re.match(re.escape(why), found)
    assert checked_update(update(rounds, 0.0), rounds.trained()) == (
        "an update of zero, from no examples or a local training that diverged"
    )


# A site.


def make_site(folder: Path, steps: int = 3, ledger: str = "ledger.jsonl", site: str = "", **changed: Any) -> SiteRounds:
    model, plan = make_model(), make_plan(**{"steps": 5, "delta": 1e-3, **changed})
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=folder / ledger)
    optimizer = pg.optim.MomentumSGD(model.named_parameters(), lr=0.1)
    try:
        return SiteRounds("Site", private_grad, optimizer, make_data(), steps, site=site)
    except BaseException:
        private_grad.ledger.close()
        raise


def weights(site: SiteRounds) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in site.private_step.model.state_dict().items()}


def releases(folder: Path) -> int:
    return pg.Ledger(folder / "ledger.jsonl", read_only=True).releases


def killed_in_step(site: SiteRounds, number: int, sent: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a site in a step of its round, once it is charged and before the optimizer moves."""
    step, left = site.private_step.optimizer.step, [number]

    def dies(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(site.private_step.optimizer, "step", dies)
        with pytest.raises(KeyboardInterrupt):
            site.train(sent)
    site.private_step.private_grad.ledger.close()


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.filterwarnings("ignore:Site. the server's weights are those of the last round")
def test_a_killed_site_goes_on_within_its_round(seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a seed, the lost step is computed again, and the result is that of a site that was not killed."""
    monkeypatch.setattr("privgrad.training.federated_rounds._SHARE", 1e9)  # a checkpoint after each step
    other = make_site(tmp_path / "other", seed=seed)
    start = weights(other)
    other.train(start)
    site = make_site(tmp_path, seed=seed)
    killed_in_step(site, 3, start, monkeypatch)
    after_two = weights(site)
    assert releases(tmp_path) == 3
    if seed is None:
        with pytest.warns(UserWarning, match="1 charged steps had no checkpoint"):
            again = make_site(tmp_path)
    else:
        again = make_site(tmp_path, seed=seed)
    again.train(start)
    assert releases(tmp_path) == 3
    for name, value in weights(again).items():
        torch.testing.assert_close(value, (after_two if seed is None else weights(other))[name], rtol=0, atol=0)
    again.train(weights(again))
    assert releases(tmp_path) == 5
    with pytest.raises(pg.BudgetExceededError, match="Site: expected steps to be left in the plan, got 5 of 5 taken"):
        again.train(weights(again))


def test_the_same_weights_are_answered_by_the_last_answer_also_of_an_earlier_process(tmp_path: Path):
    site = make_site(tmp_path)
    start = weights(site)
    site.train(start)
    answer = weights(site)
    site.private_step.model.load_state_dict(start)  # a host evaluates the server's weights
    with pytest.warns(UserWarning, match="its answer stands; nothing is trained"):
        site.train(start)
    assert all(torch.equal(value, answer[name]) for name, value in weights(site).items())
    site.private_step.private_grad.ledger.close()
    again = make_site(tmp_path)
    with pytest.warns(UserWarning, match="its answer stands; nothing is trained"):
        again.train(start)
    assert releases(tmp_path) == 3
    for name, value in weights(again).items():
        torch.testing.assert_close(value, answer[name], rtol=0, atol=0)


def test_a_round_whose_updates_are_all_lost_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = make_site(tmp_path, steps=1)
    start = weights(site)
    killed_in_step(site, 1, start, monkeypatch)
    with pytest.warns(UserWarning, match="1 charged steps had no checkpoint"):
        again = make_site(tmp_path, steps=1)
    with (
        pytest.warns(UserWarning, match="its answer stands"),
        pytest.raises(pg.PrivacyError, match="a round to have an update, got 1 charged steps without one"),
    ):
        again.train(start)
    again.train({name: value + 0.01 for name, value in start.items()})
    assert releases(tmp_path) == 2


def test_each_site_has_files_of_its_own(tmp_path: Path):
    for name in ("a", "b"):
        site = make_site(tmp_path, ledger=f"ledger.{name}", site=name)
        site.train(weights(site))
        site.private_step.private_grad.ledger.close()
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.a", "ledger.a.pt", "ledger.b", "ledger.b.pt"}
    with pytest.raises(pg.PrivacyError, match="expected the ledger to be that of one site, got 'b' and 'a'"):
        make_site(tmp_path, ledger="ledger.a", site="b")


def test_weights_that_do_not_fit_charge_nothing_and_leave_the_last_answer(tmp_path: Path):
    site = make_site(tmp_path)
    start = weights(site)
    site.train(start)
    answer = weights(site)
    for wrong in (
        start | {"2.bias": start["2.bias"] / 0},
        start | {"2.bias": torch.ones(7)},
        start | {"more": torch.ones(1)},
        {"0.bias": start["0.bias"] + 1},
    ):
        with pytest.raises(pg.PrivacyError, match="Site: expected the server's weights to fit the site's model"):
            site.train(wrong)
    assert releases(tmp_path) == 3
    assert all(torch.equal(value, answer[name]) for name, value in weights(site).items())
