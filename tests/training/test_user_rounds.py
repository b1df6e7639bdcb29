"""The rounds of a server, whatever framework brings the updates: who is drawn, what counts, and what is charged."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import privgrad as pg
from conftest import make_model
from privgrad.training.user_rounds import UserRounds, checked_update

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
        ({"0.bias": torch.full((4,), torch.nan)}, "an update that is not finite"),
        ({"more": torch.ones(1)}, "names that the server does not train ['more'] and missing names []"),
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
