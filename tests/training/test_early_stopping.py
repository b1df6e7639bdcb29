"""EarlyStopping in `fit`: it fires, survives a resume, and does not lower epsilon."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan

pytestmark = pytest.mark.usefixtures("by_rdp")
RULE: dict[str, Any] = {"monitor": "loss", "patience": 2, "mode": "min", "data": "public"}


def trained(losses: list[float], folder: Path | None = None, *, seed: int | None = None, **options: Any) -> Any:
    """Train ten steps with five evaluations, which return these losses."""
    model = make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, make_plan(delta=1e-5, seed=seed))
    optimizer = pg.optim.SGD(model.named_parameters(), noise_step=0.01)
    left = itertools.chain([losses[0]], losses)  # `evaluate` is tried once
    options = {"evaluate": lambda _: {"loss": next(left)}, "num_evaluations": 5} | options
    return pg.fit(private_grad, optimizer, make_data(), output_dir=folder, progress=False, **options)


@pytest.mark.parametrize(
    ("losses", "changed", "steps"),
    [
        ([5, 4, 3, 2, 1], {}, 10),
        ([5, 4, 4, 4, 1], {}, 8),
        ([5, 6, 7, 1, 1], {}, 6),
        ([5, 6, 4, 5, 6], {}, 10),
        ([5, 6, 6, 6, 6], {"patience": 1}, 4),
        ([5, 4.9, 4.8, 1, 1], {"min_delta": 0.5}, 6),
        ([5, 6, 7, 7, 7], {"mode": "max"}, 10),
        ([5, 4, 3, 9, 9], {"mode": "max"}, 6),
        ([float("nan")] * 5, {}, 4),
    ],
)
def test_training_stops_once_the_number_stops_improving(losses: list[float], changed: dict[str, Any], steps: int):
    result = trained(losses, stop=pg.EarlyStopping(**(RULE | changed)))
    assert (result.updates, result.curve[-1]["step"], result.stopped) == (steps, steps, steps < 10)


def test_an_early_stop_has_the_epsilon_of_all_planned_steps(tmp_path: Path):
    result = trained([5, 6, 7, 1, 1], tmp_path, stop=pg.EarlyStopping(**RULE))
    assert result.updates == 6
    assert result.ledger.epsilon(delta=1e-5) == make_plan().epsilon(delta=1e-5)
    on_disk = pg.Ledger(tmp_path / "ledger.jsonl", read_only=True)
    assert on_disk.releases == 10


def test_a_stopped_training_stays_stopped(tmp_path: Path):
    first = trained([5, 6, 7, 1, 1], tmp_path, stop=pg.EarlyStopping(**RULE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = trained([0, 0, 0, 0, 0], tmp_path, stop=pg.EarlyStopping(**RULE))
    assert (again.updates, again.curve, again.ledger.releases) == (6, first.curve, 10)


def test_under_a_research_seed_unused_steps_are_not_charged(tmp_path: Path):
    for _ in range(2):
        result = trained([5, 6, 7, 1, 1], tmp_path, seed=1, stop=pg.EarlyStopping(**RULE))
        assert (result.updates, result.ledger.releases) == (6, 6)


def test_a_training_that_was_killed_in_its_last_charges_ends_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    charge, left = pg.Ledger.charge, iter(range(7))

    def dying(self: pg.Ledger, *args: Any, **options: Any) -> None:
        next(left)  # six steps and one unused step; then StopIteration
        charge(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pg.Ledger, "charge", dying)
        with pytest.raises(StopIteration):
            trained([5, 6, 7, 1, 1], tmp_path, save_seconds=0, stop=pg.EarlyStopping(**RULE))
    with pytest.warns(UserWarning, match="1 charged steps had no checkpoint"):
        result = trained([0, 0, 0, 0, 0], tmp_path, stop=pg.EarlyStopping(**RULE))
    assert (result.updates, result.ledger.releases) == (6, 10)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": "private"}, "'public' or 'released', got 'private'; evaluate on public examples; or release a noisy"),
        ({"data": "held-out"}, "release_mean"),
        ({"patience": 0}, "patience"),
        ({"mode": "lower"}, "mode"),
        ({"min_delta": -1.0}, "min_delta"),
        ({"monitor": "raw_loss"}, "raw_ numbers are private"),
    ],
)
def test_rules_that_are_private_or_out_of_range_are_refused(changed: dict[str, Any], message: str):
    with pytest.raises(pg.PrivacyError, match=message):
        pg.EarlyStopping(**(RULE | changed))


def test_the_source_of_the_number_has_no_default():
    for name in ("monitor", "patience", "mode", "data"):
        with pytest.raises(TypeError, match=name):
            pg.EarlyStopping(**{key: value for key, value in RULE.items() if key != name})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate": None}, "evaluate's 'loss' to be a number for stop, got None; return it from evaluate"),
        ({"evaluate": lambda _: {"accuracy": 1.0}}, "or monitor one of accuracy"),
        ({"evaluate": lambda _: {"loss": torch.tensor([1.0, 2.0])}}, "'loss' to be a number for stop"),
    ],
)
def test_a_rule_without_its_number_is_refused_before_anything_is_spent(
    tmp_path: Path, options: dict[str, Any], message: str
):
    with pytest.raises(pg.PrivacyError, match=message):
        trained([1], tmp_path, stop=pg.EarlyStopping(**RULE), **options)
    assert pg.Ledger(tmp_path / "ledger.jsonl").releases == 0
