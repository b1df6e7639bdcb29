"""The privacy boundary: what it takes, what it charges, what it gives."""

import inspect
import math
import pickle
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan
from privgrad import private_gradient, processes
from privgrad.noise.gaussian import add_noise
from privgrad.rng import RandomSource
from privgrad.types import NoisyGradient


def test_a_bare_tuple_is_refused():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    with pytest.raises(pg.SamplingError, match=r"plan\.batches"):
        private_grad(make_data().tensors)  # pyright: ignore[reportArgumentType]
    assert private_grad.ledger.releases == 0


@pytest.mark.parametrize(
    "other", [{"sample_rate": 0.26}, {"expected_batch_size": 9}, {"sampling": "epochs", "steps": 12}, {"seed": 7}]
)
def test_a_batch_of_another_plan_is_refused(other: dict[str, Any]):
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    name = "scheme" if "sampling" in other else next(iter(other))
    with pytest.raises(pg.SamplingError, match=f"by the plan's {name} .*, got {name} "):
        private_grad(first_batch(make_plan(**other), make_data()))


def test_a_batch_serves_once():
    plan = make_plan()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    batch = first_batch(plan, make_data())
    private_grad(batch)
    with pytest.raises(pg.SamplingError, match="already charged"):
        private_grad(batch)
    private_grad(first_batch(plan, make_data()))  # a new draw of the same step
    seeded = make_plan(seed=1)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, seeded)
    private_grad(first_batch(seeded, make_data()))
    with pytest.raises(pg.SamplingError, match="already charged"):
        private_grad(first_batch(seeded, make_data()))  # the same draw, iterated anew


def test_a_seeded_draw_that_is_computed_again_with_other_values_is_refused(tmp_path: Path):
    """The same values are no second release; other ones are, though the seed is the same."""
    plan, model = make_plan(seed=1), make_model()
    for again in range(3):
        private_grad = pg.PrivateGradient(model, loss_fn, plan)
        with closing(pg.Ledger(tmp_path / "ledger.jsonl")) as ledger:
            private_grad.record_in(ledger)
            if again < 2:
                private_grad(first_batch(plan, make_data()))
                continue
            with torch.no_grad():
                next(iter(model.parameters())).add_(1.0)
            with pytest.raises(pg.SamplingError, match="already charged with other values"):
                private_grad(first_batch(plan, make_data()))
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == 1


@pytest.mark.parametrize("seed", [None, 1])
def test_the_remedy_for_a_used_batch_works(seed: int | None):
    plan = make_plan(steps=4, seed=seed)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    batches = plan.batches(make_data())
    batch = next(batches)
    private_grad(batch)
    with pytest.raises(pg.SamplingError, match=r"take the next batch .* start=private_grad\.ledger\.next_step"):
        private_grad(batch)
    private_grad(next(batches))
    for batch in plan.batches(make_data(), start=private_grad.ledger.next_step):
        private_grad(batch)
    assert private_grad.ledger.releases == 4


@pytest.mark.parametrize("seed", [None, 1])
def test_a_batch_of_another_plan_with_the_same_numbers_is_accepted(seed: int | None):
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan(steps=4, seed=seed))
    private_grad(first_batch(make_plan(steps=7, seed=seed), make_data()))
    assert private_grad.ledger.releases == 1


@pytest.mark.parametrize(("seed", "error"), [(None, pg.BudgetExceededError), (1, pg.SamplingError)])
def test_a_second_loop_draws_batches_that_are_refused(seed: int | None, error: type[pg.PrivacyError]):
    plan = make_plan(steps=2, seed=seed)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in plan.batches(make_data()):
        private_grad(batch)
    with pytest.raises(error):
        private_grad(next(plan.batches(make_data())))


def test_a_loss_with_swapped_arguments_is_told_the_order():
    plan = make_plan(sample_rate=1.0, expected_batch_size=32)

    def swapped(batch: Any, model: Any) -> torch.Tensor:
        return model(batch[0]).square().sum(1)

    private_grad = pg.PrivateGradient(make_model(), swapped, plan)
    with pytest.raises(TypeError, match=r"loss_fn\(model, examples\)"):
        private_grad(first_batch(plan, make_data()))
    assert private_grad.ledger.releases == 0


def test_one_draw_serves_one_release_of_all_oracles_on_a_ledger():
    plan, ledger = make_plan(), pg.Ledger()
    batch = first_batch(plan, make_data())
    pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)(batch)
    with pytest.raises(pg.SamplingError, match="already charged"):
        pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)(batch)
    assert ledger.releases == 1


def test_rolling_an_oracle_back_does_not_repeat_its_noise():
    plan, model = make_plan(sample_rate=1.0, expected_batch_size=32), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    state = private_grad.state_dict()
    one = private_grad(first_batch(plan, make_data()))
    private_grad.load_state_dict(state)
    two = private_grad(first_batch(plan, make_data()))
    assert not torch.equal(one["0.weight"], two["0.weight"])


BROKEN: dict[str, Any] = {
    "filter": lambda state: {name: value for name, value in state.items() if name != "covariance"},
    "adaptive_clip": lambda state: state | {"max_grad_norm": None},
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_refused_state_does_not_repeat_noise(part: str):
    """Of the same batch under the same weights: only the noise can differ."""
    plan, model = make_plan(sample_rate=1.0, expected_batch_size=32), make_model()
    parts: dict[str, Any] = {"filter": pg.filters.EMA(1.0), "adaptive_clip": pg.clip.TargetFraction(steps=1)}
    private_grad = pg.PrivateGradient(model, loss_fn, plan, **{part: parts[part]})
    state = private_grad.state_dict()
    one = private_grad(first_batch(plan, make_data()))
    bound = private_grad.max_grad_norm
    with pytest.raises((pg.PrivacyError, KeyError)):
        private_grad.load_state_dict(state | {part: {**BROKEN[part](state[part]), "made_by": state[part]["made_by"]}})
    two = private_grad(first_batch(plan, make_data()))
    apart = torch.cat([(two[name] - one[name]).flatten() for name in one]) / (bound * plan.noise_std)
    # Of 39 numbers: sqrt(2) for independent noise, below 0.7 by chance once in 1e6; repeated, C's change leaves 0.2.
    assert float(apart.std()) > 0.7
    assert private_grad.ledger.releases == 2


@pytest.mark.parametrize("name", ["clip", "filter", "norm_bins", "plan", "max_grad_norm"])
def test_arguments_cannot_be_changed_later(name: str):
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    with pytest.raises(pg.PrivacyError, match=f"{name} to stay as it is"):
        setattr(private_grad, name, None)


def test_no_step_draws_its_noise_twice():
    plan, model = make_plan(), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    private_grad(first_batch(plan, make_data()))
    private_grad._step = 0
    with pytest.raises(pg.PrivacyError, match="step to be above 0, whose noise was drawn"):
        private_grad(first_batch(plan, make_data()))
    assert private_grad.ledger.releases == 1


@pytest.mark.parametrize("other", [make_plan(seed=1), make_plan().scaled(1 / 2)], ids=["seed", "simulation"])
def test_a_state_of_a_run_that_is_not_private_is_refused_under_a_private_plan(other: pg.PrivacyPlan):
    model = make_model()
    theirs, ours = (pg.PrivateGradient(model, loss_fn, plan) for plan in (other, make_plan()))
    for state, into in ((theirs.state_dict(), ours), (ours.state_dict(), theirs)):
        with pytest.raises(pg.PrivacyError, match=r"state to be of a plan with .*; resume under the plan"):
            into.load_state_dict(state)


def test_threads_get_noise_of_their_own():
    plan, model = make_plan(sample_rate=1.0, expected_batch_size=32, steps=40), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    with ThreadPoolExecutor(4) as pool:
        gradients = list(pool.map(private_grad, plan.batches(make_data())))
    assert len({tuple(gradient["2.bias"].tolist()) for gradient in gradients}) == 40
    assert private_grad.ledger.releases == 40


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_oracles_of_one_model_take_turns(engine: Any):
    """Amid a step the model is not itself: another thread would take the gradient of something else."""
    plan, model = make_plan(sample_rate=1.0, expected_batch_size=32, noise_multiplier=0.0), make_model()
    within = [0, 0]

    def slow_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        within[0] += 1
        within[1] = max(within)
        time.sleep(0.02)
        losses = loss_fn(model, batch)
        within[0] -= 1
        return losses

    oracles = [pg.PrivateGradient(model, slow_loss, plan, engine=engine) for _ in range(2)]
    batches = [first_batch(plan, make_data()) for _ in oracles]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda private_grad, batch: private_grad(batch), oracles, batches)
    assert within == [0, 1]
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_processes_that_torch_hears_of_later_are_not_overlooked(monkeypatch: pytest.MonkeyPatch):
    private_grad, batch = pg.PrivateGradient(make_model(), loss_fn, make_plan()), first_batch(make_plan(), make_data())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(pg.PrivacyError, match="to be all 2 processes of torch"):
        private_grad(batch)
    assert private_grad.ledger.releases == 0


@pytest.mark.parametrize("seed", [None, 4])
def test_a_ledger_goes_on_with_a_seed_or_without_as_it_began(tmp_path: Path, seed: int | None):
    path, plan = tmp_path / "ledger.jsonl", make_plan(seed=seed)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path)
    private_grad(first_batch(plan, make_data()))
    private_grad.ledger.close()
    assert pg.Ledger(path, read_only=True).seeded_releases == (0 if seed is None else 1)
    with pytest.raises(pg.PrivacyError, match="research_seed"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(seed=4 if seed is None else None), ledger=path)


def test_noise_of_a_release_that_was_not_charged_is_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan, model = make_plan(sample_rate=1.0, expected_batch_size=32), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=tmp_path / "ledger.jsonl")
    seen: list[Any] = []

    def full(release: Any, **_: Any) -> None:
        raise pg.PrivacyError("full")

    def noted(clipped: Any, **options: Any) -> pg.NoisyGradient:
        seen.append(clipped.values)  # the noise is added in place
        return add_noise(clipped, **options)

    with monkeypatch.context() as patched:
        patched.setattr(processes, "_NUMBERS_A_THREAD", 1)
        patched.setattr(private_gradient, "add_noise", noted)
        patched.setattr(private_grad.ledger, "charge", full)
        with pytest.raises(pg.PrivacyError, match="full"):
            private_grad(first_batch(plan, make_data()))
    later = private_grad(first_batch(plan, make_data()))
    assert not torch.equal(seen[0]["0.weight"], later["0.weight"])


def test_a_step_whose_observer_raises_stays_charged(tmp_path: Path):
    """The observer has seen the released gradient, so the step cannot be free, and its noise is not drawn again."""
    plan, seen = make_plan(delta=1e-5), list[pg.NoisyGradient]()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=tmp_path / "ledger.jsonl")
    assert private_grad.ledger.epsilon(delta=1e-5) == 0

    def observe(step: Any) -> None:
        seen.append(step.released)
        raise OSError("the disk is full")

    handle, batch = private_grad.register_raw_observer(observe), first_batch(plan, make_data())
    with pytest.raises(OSError, match="the disk is full"):
        private_grad(batch)
    assert pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == private_grad.ledger.releases == 1
    assert private_grad.ledger.epsilon(delta=1e-5) == private_grad.epsilon(steps=1)
    handle.remove()
    with pytest.raises(pg.SamplingError, match="already charged"):
        private_grad(batch)
    assert private_grad.ledger.releases == private_grad.state_dict()["step"] == len(seen) == 1


def test_going_past_the_plans_steps_raises_before_release():
    plan, more = make_plan(steps=3), make_plan(steps=5)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in list(more.batches(make_data()))[:3]:
        private_grad(batch)
    with pytest.raises(pg.BudgetExceededError, match="3 steps"):
        private_grad(first_batch(more, make_data()))
    assert private_grad.ledger.releases == 3


def test_divides_by_the_public_batch_size_whatever_was_drawn():
    plan = make_plan(sample_rate=0.25, noise_multiplier=0.0, steps=30)
    model = nn.Linear(1, 1, bias=False)
    private_grad = pg.PrivateGradient(model, lambda m, x: m(x)[:, 0] * 1e3, plan)
    for batch in plan.batches([torch.ones(1)] * 32):
        # Every example's gradient is clipped to 1, so the sum is the number drawn.
        assert private_grad(batch)["weight"].item() == pytest.approx(batch.size / 8)


def test_an_empty_batch_costs_and_hides_as_much_as_any_other():
    plan = make_plan(sample_rate=1e-9, expected_batch_size=1, steps=3)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in plan.batches(make_data()):
        assert batch.size == 0
        assert all(value.abs().sum() > 0 for value in private_grad(batch).values())
    assert private_grad.ledger.releases == 3


@pytest.mark.parametrize("perturb", [None, pg.perturb.BAM(0.1), pg.perturb.SAT(0.1)], ids=repr)
@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_nothing_is_left_in_grad(engine: Any, perturb: pg.perturb.Contribution | None):
    plan, model = make_plan(steps=3), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, engine=engine, perturb=perturb)
    for batch in plan.batches(make_data()):
        private_grad(batch)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradient_carries_its_noise_and_assigns_to_any_optimizer():
    plan = make_plan(noise_multiplier=1.5, max_grad_norm=0.4)
    model = make_model()
    gradient = pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, make_data()))
    assert gradient.noise_std == pytest.approx(1.5 * 0.4 / 8)
    gradient.assign(model)
    weight = dict(model.named_parameters())["0.weight"]
    before = weight.detach().clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * gradient["0.weight"])
    with pytest.raises(pg.PrivacyError, match="without elsewhere"):
        NoisyGradient({"elsewhere": torch.zeros(1)}, 0.1).assign(model)


@pytest.mark.parametrize(
    ("changed", "noise_std"),
    [
        ({}, 1.3 * 0.7 / 8),
        ({"group_size": 2}, 1.3 * 1.4 / 4),
        ({"noise_on_grid": True}, 1.3 * 0.7 / 8),
        ({"noise_multiplier": 0.0}, 0.0),
        ({"noise_multiplier": 0.0, "max_grad_norm": math.inf}, 0.0),
    ],
    ids=str,
)
def test_a_plan_knows_the_noise_of_its_releases(changed: dict[str, Any], noise_std: float):
    plan = make_plan(**({"noise_multiplier": 1.3, "max_grad_norm": 0.7} | changed))
    assert plan.noise_std == pytest.approx(noise_std)
    released = pg.PrivateGradient(make_model(), loss_fn, plan)(first_batch(plan, make_data())).noise_std
    assert isinstance(released, float)
    if plan.noise_on_grid:
        assert plan.noise_std < released <= plan.noise_std * (1 + 1 / 500)
    else:
        assert released == plan.noise_std


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_the_gradient_is_a_mapping_in_the_order_of_the_parameters(engine: Any):
    model, plan = make_model(), make_plan()
    gradient = pg.PrivateGradient(model, loss_fn, plan, engine=engine)(first_batch(plan, make_data()))
    parameters = dict(model.named_parameters())
    assert isinstance(gradient, Mapping)
    assert list(gradient) == list(parameters)
    assert len(gradient) == len(parameters)
    assert all(value is gradient[name] for name, value in gradient.items())
    assert {name: value.shape for name, value in gradient.items()} == {n: p.shape for n, p in parameters.items()}
    assert "absent" not in gradient
    with pytest.raises(KeyError):
        gradient["absent"]
    again = pickle.loads(pickle.dumps(gradient))
    assert again.noise_std == gradient.noise_std
    assert all(torch.equal(again[name], value) for name, value in gradient.items())
    assert replace(gradient, noise_std=0.0).tensors is gradient.tensors
    with pytest.raises(FrozenInstanceError):
        gradient.noise_std = 0.0  # pyright: ignore[reportAttributeAccessIssue]


def test_frozen_parameters_get_no_gradient_and_no_noise():
    model, plan = make_model(), make_plan()
    model[0].requires_grad_(False)
    gradient = pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, make_data()))
    assert list(gradient) == ["2.weight", "2.bias"]


def test_half_precision_parameters_are_summed_and_noised_in_float32():
    plan = make_plan()
    model = make_model(torch.bfloat16)
    gradient = pg.PrivateGradient(model, lambda m, b: loss_fn(m, (b[0].bfloat16(), b[1])).float(), plan)(
        first_batch(plan, make_data())
    )
    assert all(value.dtype == torch.float32 for value in gradient.values())
    pg.optim.AdamBC(model.named_parameters(), lr=1e-3).step(grad=gradient)
    assert model[0].weight.dtype == torch.bfloat16


def test_non_finite_examples_are_counted_and_do_not_spoil_the_model():
    inputs, labels = make_data().tensors
    inputs[3], inputs[7] = math.nan, math.inf
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=2)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    for batch in plan.batches(torch.utils.data.TensorDataset(inputs, labels)):
        assert all(value.isfinite().all() for value in private_grad(batch).values())
    assert private_grad.raw_nonfinite_examples == 4


def test_the_global_random_state_is_left_alone_and_does_not_matter():
    plan, data = make_plan(seed=4), make_data()
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def release() -> NoisyGradient:
        return pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, data))

    torch.manual_seed(0)
    state = torch.get_rng_state()
    one = release()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    two = release()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_without_a_seed_the_noise_cannot_be_repeated():
    plan, model = make_plan(sample_rate=1.0, expected_batch_size=32), make_model()
    torch.manual_seed(0)
    one = pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, make_data()))
    torch.manual_seed(0)
    two = pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, make_data()))
    assert not torch.equal(one["0.weight"], two["0.weight"])


def test_a_seed_warns_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RandomSource, "_warned", False)
    with pytest.warns(UserWarning, match="research only"):
        RandomSource(0)
    RandomSource(1)


def test_noise_destroys_and_a_tiny_bound_freezes():
    """Proof that the private path ran: with absurd noise nothing is learned, with C near 0 nothing moves."""
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, noise_multiplier=0.0, max_grad_norm=1e-6)
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    private_grad, optimizer = pg.PrivateGradient(model, loss_fn, plan), pg.optim.SGD(model.named_parameters(), lr=1.0)
    for batch in plan.batches(make_data()):
        optimizer.step(grad=private_grad(batch))
    moved = max((a - b).abs().max().item() for a, b in zip(before, model.parameters(), strict=True))
    assert 0 < moved <= 1.1e-5
    loud = make_plan(noise_multiplier=1000.0, seed=0)  # 20 values without a seed miss the bound once in 600 draws
    gradient = pg.PrivateGradient(model, loss_fn, loud)(first_batch(loud, make_data()))
    assert gradient["0.weight"].std().item() == pytest.approx(1000 / 8, rel=0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the queue is emptied where there is a device")
def test_steps_leave_nothing_queued_for_devices_that_are_not_there():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    before = len(torch.cuda._queued_calls)
    for batch in private_grad.plan.batches(make_data()):
        private_grad(batch)
    assert len(torch.cuda._queued_calls) == before


def test_seeded_noise_belongs_to_the_draw_and_not_to_the_process(tmp_path: Path):
    """A second PrivateGradient on the ledger goes on with new noise, or computes the same again."""
    plan, data = make_plan(seed=4), make_data()

    def make() -> pg.PrivateGradient:
        return pg.PrivateGradient(make_model(), loss_fn, plan, ledger=tmp_path / "ledger.jsonl")

    private_grad = make()
    released = [private_grad(batch) for batch in plan.batches(data)]
    private_grad.ledger.close()
    again = make()
    for one, batch in zip(released[5:], plan.batches(data, start=5), strict=True):
        assert all(torch.equal(value, one[name]) for name, value in again(batch).items())
    assert again.ledger.releases == plan.steps


def test_what_is_printed_is_one_line_without_private_numbers():
    plan, data = make_plan(), make_data()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    batch = first_batch(plan, data)
    assert repr(batch) == "Batch(one example has shape ((5,), ()), step=0)"
    held = replace(batch, examples={"x": data.tensors[0], "more": [data.tensors[1], "a"]})
    assert repr(held) == "Batch(one example has shape {'x': (5,), 'more': [(), 'str']}, step=0)"
    released = private_grad(batch)
    assert repr(released).count("NoisyGradient") == 1
    numbers = "noise_multiplier=1.0, max_grad_norm=1.0"
    assert repr(private_grad) == f"PrivateGradient(Sequential, {numbers}, step 1 of 10)"


def test_numbers_of_numpy_become_plain(tmp_path: Path):
    """Neither a ledger nor a checkpoint could hold them."""
    plan = make_plan(noise_multiplier=np.float64(1.0), expected_batch_size=np.int64(8), max_grad_norm=np.float32(0.5))
    assert {type(plan.noise_multiplier), type(plan.max_grad_norm), type(plan.expected_batch_size)} == {float, int}
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=tmp_path / "ledger.jsonl")
    private_grad(first_batch(plan, make_data()))


def test_a_compiled_training_loop_takes_the_same_steps():
    """The step itself is not compiled. A compiled loop would trace into it, and fail."""
    plan = make_plan(seed=1, steps=2)
    eager, compiled = (pg.PrivateGradient(make_model(), loss_fn, plan) for _ in range(2))
    take = torch.compile(lambda batch: [value * 2 for value in compiled(batch).values()], backend="eager")
    for batch in plan.batches(make_data()):
        twice = take(batch)
        assert all(torch.equal(2 * value, found) for value, found in zip(eager(batch).values(), twice, strict=True))
    assert compiled.ledger.releases == 2


def test_few_of_our_frames_lie_between_a_batch_and_the_first_layer():
    """A traceback from the user's model stays short, also in a step without a self-check."""
    model, plan, found = make_model(), make_plan(seed=0), list[int]()  # no batch is too small for a check
    ours = str(Path(pg.__file__).parent)

    def count(*_: Any) -> None:
        found.append(sum(frame.filename.startswith(ours) for frame in inspect.stack(context=0)))

    next(model.children()).register_forward_pre_hook(count)
    private_grad, batches = pg.PrivateGradient(model, loss_fn, plan), plan.batches(make_data())
    for _ in range(2):
        private_grad(next(batches))
    found.clear()
    private_grad(next(batches))
    assert found == [9]  # OwnExamples is one of them


class _WithPooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = nn.Linear(5, 3), nn.Linear(5, 5)
        self.mask_token = nn.Parameter(torch.zeros(5))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_unused_parameters_are_frozen_by_name():
    model, data, plan = _WithPooler(), make_data(), make_plan()
    with pytest.raises(pg.PrivacyError, match=r"no gradient for mask_token, pooler.*privgrad\.freeze_unused"):
        pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, data))
    assert pg.freeze_unused(model, loss_fn, data[:3]) == ["mask_token", "pooler.weight", "pooler.bias"]
    assert pg.freeze_unused(model, loss_fn, data[:3]) == []
    found = pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, data))
    assert set(found.tensors) == {"body.weight", "body.bias"}
    with pytest.raises(pg.PrivacyError, match="public_batch to be public"):
        pg.freeze_unused(model, loss_fn, first_batch(plan, data))
    with pytest.raises(pg.PrivacyError, match="losses to have a gradient"):
        pg.freeze_unused(model, lambda model, batch: loss_fn(model, batch).detach(), data[:3])
