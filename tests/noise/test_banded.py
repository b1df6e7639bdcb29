"""Noise with memory at its surface: plans, ledgers, refusals, and what must not change without it."""

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import Release, epsilon
from privgrad.accounting.mechanisms import Participations
from privgrad.ledger.ledger import bands_of
from privgrad.noise.banded import Banded, best_coefficients, square_root
from privgrad.statement.text import statement
from privgrad.training.run import charge_unused

pytestmark = pytest.mark.usefixtures("by_rdp")


def banded(**changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {"sample_rate": 0.125, "expected_batch_size": 4, "steps": 16}
    return make_plan(**(numbers | {"correlation": Banded(4)} | changed))


def test_coefficients_have_norm_one_and_a_smaller_error_than_the_square_root():
    for bands, steps in [(2, 50), (4, 200), (16, 1000)]:
        best = Banded(bands).for_steps(steps)
        root = Banded(bands, tuple(square_root(bands)))
        assert 1 - 1e-5 * bands < sum(value**2 for value in best.chosen) <= 1
        assert best.prefix_error(steps) < root.prefix_error(steps)
        assert best.chosen == best_coefficients(bands, steps)


def test_a_smaller_error_is_not_found_nearby():
    best = Banded(4).for_steps(100)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        moved = torch.tensor(best.chosen) + 1e-2 * torch.randn(4, generator=generator)
        assert Banded(4, tuple(moved.tolist())).prefix_error(100) > best.prefix_error(100) * (1 - 1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bands": 1}, "at least 2|>= 2"),
        ({"bands": 513}, "at most 512"),
        ({"bands": 2, "coefficients": (1.0,)}, "2 finite numbers"),
        ({"bands": 2, "coefficients": (0.0, 1.0)}, "a first one and a sum above 0.001"),
        ({"bands": 2, "coefficients": (1.0, float("nan"))}, "2 finite numbers"),
        ({"bands": 2, "coefficients": ("a", "b")}, "could not convert"),
        ({"bands": 2, "coefficients": (1.0, 2.0)}, "bounded inverse"),
        ({"bands": 2, "coefficients": (1.0, -1.0)}, "a sum above 0.001"),
        ({"bands": 2, "coefficients": (1e-200, 1e-201)}, "a sum above 0.001"),
        ({"bands": 2, "coefficients": (1e300, 1e300)}, "a sum above 0.001"),
    ],
)
def test_wrong_bands_are_refused(arguments: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):  # PrivacyError is one
        Banded(**arguments)


def test_longer_coefficients_are_divided_by_their_norm():
    """Sensitivity would rise with their norm."""
    assert Banded(2, (3.0, 2.0)).chosen == pytest.approx((0.83205, 0.5547), abs=1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"correlation": Banded(16)}, "bands to be at most 8 .*, got 16"),
        ({"steps": 3}, "bands to be at most 3"),
        ({"sampling": "epochs", "steps": 16}, "to be 'poisson' for noise with memory"),
        ({"sample_rate": 0.75, "expected_batch_size": 24}, "leave correlation out"),
    ],
)
def test_plans_that_do_not_suit_are_refused(changed: dict[str, Any], words: str):
    with pytest.raises(pg.PrivacyError, match=words):
        banded(**changed)


def test_a_person_pays_for_the_steps_of_one_group():
    plan = banded(delta=1e-3)
    assert plan.release_of(16) == Release(1.0, 0.5, count=4)
    assert plan.release_of(13) == Release(1.0, 0.5, count=4)
    one_group = epsilon([Release(1.0, 0.5, count=4)], delta=1e-3)
    assert plan.epsilon() == one_group
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in plan.batches(make_data()):
        private_grad(batch)
    assert private_grad.ledger.charged == [Release(1.0, 0.5, count=4)]
    assert private_grad.ledger.epsilon(delta=1e-3) == one_group


def test_without_bands_nothing_changes():
    """Bit for bit: plan, draws and releases."""
    plans = [make_plan(seed=1, correlation=None), make_plan(seed=1)]
    assert plans[0] == plans[1]
    found = list[list[dict[str, torch.Tensor]]]()
    for plan in plans:
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
        found.append([dict(private_grad(batch)) for batch in plan.batches(make_data())])
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_auto_takes_none_for_large_batches_and_says_what_it_gains_for_small_ones():
    numbers: dict[str, Any] = {"target_epsilon": 3.0, "delta": 1e-5, "max_grad_norm": 1.0, "num_examples": 60_000}
    large = pg.PrivacyPlan.for_budget(expected_batch_size=16_384, steps=300, correlation="auto", **numbers)
    assert large.correlation is None
    assert large == pg.PrivacyPlan.for_budget(expected_batch_size=16_384, steps=300, **numbers)
    small = pg.PrivacyPlan.for_budget(expected_batch_size=1024, steps=400, correlation="auto", **numbers)
    assert small.correlation is not None
    assert "error 0.7" in repr(small.correlation)
    assert small.epsilon() <= 3.0


def test_the_ledger_is_of_one_correlation(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    first = pg.PrivateGradient(make_model(), loss_fn, banded(), ledger=path)
    first.ledger.close()
    held = pg.Ledger(path, read_only=True).plan_facts
    assert bands_of(held) == 4
    assert held["sample_rate"] == 0.5
    with closing(pg.Ledger(path)) as ledger:
        for other in (None, Banded(2), Banded(4, (1.0, 0.0, 0.0, 0.0))):
            with pytest.raises(pg.PrivacyError, match="noise_memory"):
                pg.PrivateGradient(make_model(), loss_fn, banded(correlation=other), ledger=ledger)
        remedy = r"sample_rate and correlation: was one changed\?\); correlation=Banded\(4, .* keeps its memory"
        with pytest.raises(pg.PrivacyError, match=remedy):
            pg.PrivateGradient(make_model(), loss_fn, banded(correlation=None, noise_multiplier=3.0), ledger=ledger)


def test_a_run_that_resumes_elsewhere_is_refused():
    plan = banded()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch, _ in zip(plan.batches(make_data()), range(6), strict=False):
        private_grad(batch)
    with pytest.raises(pg.SamplingError, match=r"multiple of 4 .*start=ledger.next_step"):
        next(plan.batches(make_data(), start=6))
    assert private_grad.ledger.next_step == 8
    for batch in plan.batches(make_data(), start=8):
        private_grad(batch)
    assert private_grad.ledger.charged[0].count == 4


def test_new_groups_count_again():
    """Whoever draws new groups in the middle pays for it: a person may be drawn in both."""
    plan = banded()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for step in range(4):  # of four streams, and of four groups
        private_grad(list(plan.batches(make_data()))[step])
    assert private_grad.ledger.charged[0].count == 4
    with pytest.raises(pg.BudgetExceededError, match="the plan's 16 steps, 4 of each person"):
        private_grad(next(plan.batches(make_data())))


def test_new_groups_have_new_noise():
    """Under the old noise, a person of both groups would take part twice within fewer steps than the bands."""
    plan = banded()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    first = plan.batches(make_data())
    stated = [private_grad(next(first)).noise_memory for _ in range(2)]
    stated += [private_grad(next(plan.batches(make_data(), start=4))).noise_memory]
    assert [memory and memory.step for memory in stated] == [0, 1, 0]


def test_batches_out_of_order_are_refused():
    plan = banded()
    private_grad, batches = pg.PrivateGradient(make_model(), loss_fn, plan), list(plan.batches(make_data()))
    private_grad(batches[0])
    private_grad(batches[5])
    with pytest.raises(pg.SamplingError, match="step 6 or later"):
        private_grad(batches[2])
    private_grad(batches[6])
    assert private_grad.ledger.charged[0].count == 1  # steps 0, 5 and 6 are of three groups


def test_a_step_that_is_left_out_moves_the_noise_on():
    """Two draws of a person stay as far apart in the noise as in the groups."""
    whole, partly = list[pg.NoisyGradient](), list[pg.NoisyGradient]()
    for found, left_out in ((whole, ()), (partly, (1, 2, 5))):
        plan = banded(seed=4)
        private_grad = pg.PrivateGradient(zero_model(), zero_loss, plan)
        found.extend(private_grad(b) for b in plan.batches(make_data()) if b.sampling.step not in left_out)
    kept = [gradient for step, gradient in enumerate(whole) if step not in (1, 2, 5)]
    for one, other in zip(kept, partly, strict=True):
        assert one.noise_memory == other.noise_memory
        assert torch.equal(one["weight"], other["weight"])


def zero_model() -> nn.Module:
    model = nn.Linear(5, 3, bias=False)
    nn.init.zeros_(model.weight)
    return model


def zero_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return 0.0 * model(batch[0]).sum(1)


def test_a_failed_step_never_repeats_its_noise():
    plan = banded()
    private_grad, batches = pg.PrivateGradient(make_model(), loss_fn, plan), plan.batches(make_data())
    private_grad(next(batches))
    stream = private_grad._noise_stream.public_id
    private_grad._ledger.close()
    with pytest.raises(pg.PrivacyError):
        private_grad(next(batches))
    assert private_grad._noise_stream.public_id != stream
    assert private_grad._recursion is None


def test_parameters_may_not_change_while_noise_has_memory():
    plan, model = banded(), make_model()
    private_grad, batches = pg.PrivateGradient(model, loss_fn, plan), plan.batches(make_data())
    private_grad(next(batches))
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(pg.PrivacyError, match="to stay the same while noise has memory"):
        private_grad(next(batches))


def test_a_changing_norm_keeps_the_noise_in_units_of_it():
    plan = banded(seed=2)
    rule = pg.clip.TargetFraction(0.5)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=rule)
    for batch in plan.batches(make_data()):
        bound = private_grad.max_grad_norm
        gradient = private_grad(batch)
        assert plan.correlation is not None
        assert gradient.noise_memory is not None
        unit = plan.noise_multiplier * bound / plan.expected_batch_size
        assert isinstance(gradient.noise_std, float)
        assert gradient.noise_std >= unit * plan.correlation.std(gradient.noise_memory.step) * 0.999


def test_participations():
    counted = Participations(3)
    for step in (0, 1, 2, 3):
        counted.add(f"a:{step}")
    assert (counted.count, counted.next_step) == (2, 6)
    assert counted.after("a:4") == 2
    assert counted.after("a:6") == 3
    counted.add("b:6")
    counted.add("other")
    assert counted.count == 4


class HaltedError(Exception):
    """An interruption of a training."""


def fitted(plan: pg.PrivacyPlan, **arguments: Any) -> pg.FitResult:
    model = make_model()
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    return pg.fit(private_grad, optimizer, make_data(), progress=False, num_evaluations=16, **arguments)


def test_fit_resumes_at_a_multiple_of_the_bands(tmp_path: Path):
    calls, plan = list[int](), banded()

    def halt(_: nn.Module) -> dict[str, float]:
        calls.append(0)
        if len(calls) == 7:
            raise HaltedError
        return {"loss": 1.0}

    with pytest.raises(HaltedError):
        fitted(plan, evaluate=halt, output_dir=tmp_path)
    with pytest.warns(UserWarning, match="2 steps .* noise with memory begins again: this run ends with 14 updates"):
        result = fitted(plan, evaluate=halt, output_dir=tmp_path)
    assert (result.ledger.charged[0].count, result.updates) == (4, 14)
    assert fitted(plan, output_dir=tmp_path).updates == 14
    said = str(statement([result.ledger], delta=1e-5))
    assert "each row was in one of 4 secret groups" in said
    assert "So a row took part in at most 4 of the gradients." in said


def test_an_early_stop_charges_what_all_steps_cost():
    stop = pg.EarlyStopping(monitor="loss", patience=1, mode="min", data="public")
    result = fitted(banded(), evaluate=lambda _: {"loss": 1.0}, stop=stop)
    assert result.stopped
    assert result.ledger.charged[0].count == 4


def test_an_early_stop_before_the_first_release_charges_all():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, banded())
    charge_unused(private_grad)
    assert private_grad.ledger.charged[0].count == 4
    again = pg.PrivateGradient(make_model(), loss_fn, plan := banded())
    for step in range(4):  # of four samplers: the people's turns are used up
        again(list(plan.batches(make_data()))[step])
    charge_unused(again)
    assert again.ledger.charged[0].count == 4


def test_more_bands_than_steps_are_refused_before_any_search():
    numbers: dict[str, Any] = {"delta": 1e-5, "max_grad_norm": 1.0, "num_examples": 6000, "expected_batch_size": 6}
    with pytest.raises(pg.PrivacyError, match=r"at most 24 .*, got 64"):
        pg.PrivacyPlan.for_budget(target_epsilon=3.0, steps=24, correlation=Banded(64), **numbers)


def test_past_noise_is_not_copied():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan := banded())
    private_grad(next(plan.batches(make_data())))
    with pytest.raises(pg.PrivacyError, match="past noise"):
        pickle.dumps(private_grad._recursion)


def test_one_draw_for_two_gradients_is_not_stated():
    """The same sample twice costs more than two samples."""
    plan = make_plan(delta=1e-3)
    both = [pg.PrivateGradient(make_model(), loss_fn, plan) for _ in range(2)]
    batch = next(plan.batches(make_data()))
    for private_grad in both:
        private_grad(batch)
    with pytest.raises(pg.PrivacyError, match="to share no draw, got 1 draws in two ledgers"):
        statement([private_grad.ledger for private_grad in both])
