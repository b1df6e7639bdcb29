"""Filters of released gradients: their values, the exact noise of their output, and optimizers behind them."""

import copy
import itertools
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_noise_step import ROWS, STD, STEP, WITHOUT, made
from torch import Tensor

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan, seed_of
from privgrad.optim import filters
from privgrad.types import NoisyGradient

FILTERS: dict[str, Any] = {
    "EMA": lambda: filters.EMA(0.1),
    "EMA of one": lambda: filters.EMA(1.0),
    "DOPPLER": lambda: filters.DOPPLER(),
    "innovation": lambda: filters.Innovation(0.3),
    "moving average": lambda: filters.LinearFilter([0.25] * 4),
    "third order": lambda: filters.LinearFilter([0.5, 0.2, 0.1], [-0.3, 0.1, 0.05]),
}
AVERAGING = ["EMA", "DOPPLER", "innovation", "third order"]


def by_loop(b: tuple[float, ...], a: tuple[float, ...], values: list[Tensor], stds: list[float]) -> list[Tensor]:
    """Return y_t, by the formula, over lists."""

    def recursion(given: list[Tensor]) -> list[Tensor]:
        found = list[Tensor]()
        for t in range(len(given)):
            total = sum((b[j] * given[t - j] for j in range(len(b)) if t >= j), torch.zeros_like(given[0]))
            found.append(total - sum(a[j] * found[t - 1 - j] for j in range(len(a)) if t > j))
        return found

    ones = recursion([torch.ones_like(value) for value in values])
    in_units = recursion([value / std for value, std in zip(values, stds, strict=True)])
    return [std * m / c for m, c, std in zip(in_units, ones, stds, strict=True)]


@pytest.mark.parametrize("name", FILTERS)
def test_values_are_those_of_the_recursion(name: str):
    own = FILTERS[name]()
    values = [torch.randn(3, 2, dtype=torch.float64) for _ in range(30)]
    stds = [0.1 * 1.5**step for step in range(15)] + [0.02] * 15
    found = [own(NoisyGradient({"p": value}, std))["p"] for value, std in zip(values, stds, strict=True)]
    for one, wanted in zip(found, by_loop(own._b, own._a, values, stds), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12)


def noise_agrees(name: str, count: int, steps: list[int], tolerance: float) -> None:
    """The standard deviation over coordinates agrees with noise_std at these steps; the noise changes over time."""
    generator = torch.Generator().manual_seed(seed_of(1))
    own = FILTERS[name]()
    for step in range(1, max(steps) + 1):
        std = 1.0 + 0.5 * (step % 3 == 0)
        found = own(NoisyGradient({"p": std * torch.randn(count, generator=generator)}, std))
        if step in steps:
            assert float(found["p"].std()) == pytest.approx(found.noise_std, rel=tolerance)


@pytest.mark.parametrize("name", FILTERS)
def test_noise_is_as_stated_from_the_first_step(name: str):
    noise_agrees(name, 40_000, [1, 2, 3, 10, 50], 0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILTERS)
def test_noise_is_as_stated_after_a_thousand_steps(name: str):
    noise_agrees(name, 1_000_000, [1, 10, 100, 1000], 0.01)


def test_noise_by_parameter_and_by_coordinate_is_filtered_as_a_number_is():
    own, one = filters.DOPPLER(), filters.DOPPLER()
    for step in range(20):
        std = 1.0 + step % 3
        stds = {"a": std, "b": std * torch.tensor([1.0, 2.0, 3.0]), "c": torch.tensor(0.5 * std)}
        found = own(NoisyGradient({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(())}, stds))
        wanted = one(NoisyGradient({"a": torch.ones(2)}, std))
        number = wanted.noise_std
        assert isinstance(number, float)
        assert found.noise_std_of("a") == pytest.approx(number)
        torch.testing.assert_close(found.noise_std_of("b"), number * torch.tensor([1.0, 2.0, 3.0]))
        assert float(found.noise_std_of("c")) == pytest.approx(0.5 * number)
        assert found.noise_gain == pytest.approx(wanted.noise_gain)
        torch.testing.assert_close(found["b"], wanted["a"][:1].expand(3))  # the noise is uneven, and alike over time


@pytest.mark.parametrize("name", FILTERS)
def test_while_the_noise_keeps_its_size_an_output_is_a_weighted_mean(name: str):
    own = FILTERS[name]()
    for _ in range(20):
        torch.testing.assert_close(own(NoisyGradient({"p": torch.ones(3)}, 0.2))["p"], torch.ones(3))


@pytest.mark.parametrize("name", AVERAGING[:2])
def test_gradients_of_a_larger_clipping_norm_do_not_outweigh_those_that_follow(name: str):
    """Gradients as long as C, whose noise is in proportion to C; C falls to a thousandth."""
    own = FILTERS[name]()
    for step in range(40):
        bound = 1000.0 if step < 20 else 1.0
        length = float(own(NoisyGradient({"p": torch.full((), bound)}, 0.1 * bound))["p"])
        assert length == pytest.approx(bound, rel=1e-5)


def test_noise_may_be_given_in_another_form_at_any_step():
    own = filters.EMA(0.5)
    forms: list[Any] = [0.3, {"p": 0.3}, {"p": torch.full((2,), 0.3)}, 0.3]
    for form, variance in zip(forms, (1, 5 / 9, 21 / 49, 85 / 225), strict=True):
        found = own(NoisyGradient({"p": torch.ones(2)}, form)).noise_std_of("p")
        assert float(torch.as_tensor(found).max()) == pytest.approx(0.3 * variance**0.5)


def test_noise_of_zero_leaves_the_mean():
    own = filters.EMA(0.5)
    own(NoisyGradient({"p": torch.zeros(2)}, 0.0))
    found = own(NoisyGradient({"p": torch.full((2,), 3.0)}, 0.0))
    torch.testing.assert_close(found["p"], torch.full((2,), 2.0))
    assert found.noise_std == 0.0


@pytest.mark.parametrize("weight", [0.05, 0.3, 0.9])
def test_the_variance_that_fiber_subtracts_falls_out(weight: float):
    """A(omega) = (2 - omega) / (4 - 3 omega) of the noise, which AdamWBC behind the filter subtracts."""
    own, last = filters.Innovation(weight), NoisyGradient({}, 0.0)
    for _ in range(600):
        last = own(NoisyGradient({"p": torch.zeros(2)}, 0.3))
    assert last.noise_std == pytest.approx(0.3 * math.sqrt((2 - weight) / (4 - 3 * weight)), rel=1e-6)

    # FiBeR's recursion of residuals gives the same gradients, but for the start-up.
    ours, mine = filters.Innovation(weight), list[Tensor]()
    m, r = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(400):
        g = torch.randn(3, dtype=torch.float64)
        r = (1 - weight) * r + weight * (g - m)
        m = m + r
        mine.append(ours(NoisyGradient({"p": g}, 0.3))["p"])
    torch.testing.assert_close(mine[-1], m, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("SGD", "Adam", "AdamBC") for kind in AVERAGING),
        *(pytest.param(name, "EMA", marks=pytest.mark.slow) for name in ROWS if name not in ("SGD", "Adam", "AdamBC")),
    ],
)
def test_every_optimizer_moves_by_the_noise_step_behind_a_filter(name: str, kind: str):
    """By the displacement of 4,000 weights after many updates of pure noise."""
    made_by, options, steps, _ = ROWS[name]
    optimizer, parameter = made(made_by, 4_000, noise_step=STEP, **options)
    own, generator = FILTERS[kind](), torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.step(grad=own(NoisyGradient({"p": STD * torch.randn(4_000, generator=generator)}, STD)))
    moved = float(parameter.detach().double().square().mean()) ** 0.5 / steps**0.5
    assert moved == pytest.approx(STEP, rel=0.07)
    assert optimizer.noise_step == pytest.approx(STEP)


def test_a_learning_rate_behind_a_filter_has_the_noise_step_that_is_read():
    optimizer, parameter = made(pg.optim.SGD, 10_000, lr=0.1)
    own, generator = filters.EMA(0.2), torch.Generator().manual_seed(0)
    for _ in range(1000):
        optimizer.step(grad=own(NoisyGradient({"p": torch.randn(10_000, generator=generator)}, 1.0)))
    assert optimizer.noise_step == pytest.approx(0.1)
    assert float(parameter.detach().square().mean()) ** 0.5 / 1000**0.5 == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize("name", WITHOUT)
def test_optimizers_without_a_noise_step_refuse_one_behind_a_filter_too(name: str):
    kind, options, words = WITHOUT[name]
    with pytest.raises(pg.PrivacyError, match=words):
        made(kind, noise_step=STEP, **options)


@pytest.mark.parametrize(
    ("b", "a", "words"),
    [
        ([], [], "finite"),
        ([1.0], [math.nan], "finite"),
        ([1.0], [-1.0], "stable"),
        ([0.2], [1.0, -0.8], "leave out its leading 1"),
        (0.2, [-0.8], "not iterable"),
        (["a"], [], "could not convert"),
        ([1.0], [0.0, 1.2], "stable"),
        ([0.0, 1.0], [], "c_1 to differ from 0"),
        ([1.0, -1.0], [], "c_2 to differ from 0"),
    ],
)
def test_recursions_without_an_average_are_refused(b: Any, a: Any, words: str):
    with pytest.raises((pg.PrivacyError, TypeError, ValueError), match=words):
        filters.LinearFilter(b, a)


@pytest.mark.parametrize("kind", [filters.EMA, filters.Innovation])
@pytest.mark.parametrize("weight", [0.0, -0.1, 1.5, math.nan])
def test_weights_out_of_range_are_refused(kind: Any, weight: float):
    with pytest.raises(pg.PrivacyError, match="weight"):
        kind(weight)


def test_what_is_filtered_already_and_what_has_changed_is_refused():
    own, gradient = filters.EMA(0.1), NoisyGradient({"p": torch.zeros(3)}, 0.1)
    filtered = own(gradient)
    with pytest.raises(pg.PrivacyError, match="call the filter once for each released gradient"):
        own(gradient)
    for kind in (filters.EMA(0.1), filters.LinearFilter([1.0, 1.0, -0.5])):
        with pytest.raises(pg.PrivacyError, match="multiply the polynomials"):
            filters.EMA(0.1)(kind(replace(gradient)))
    with pytest.raises(pg.PrivacyError, match="multiply the polynomials"):
        filters.EMA(0.1)(filtered)
    with pytest.raises(pg.PrivacyError, match="1 parameters of the last step"):
        own(NoisyGradient({"p": torch.zeros(3), "q": torch.zeros(2)}, 0.1))
    with pytest.raises(AttributeError, match="is_filtered"):
        own({"p": torch.zeros(3)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(pg.PrivacyError, match="LinearFilter"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), filter=filters.EMA)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "perturb"), [*itertools.product(["EMA", "DOPPLER", "third order"], ["none", "SAT"]), ("EMA", "DiSK")]
)
def test_a_resumed_run_releases_what_an_uninterrupted_one_does(name: str, perturb: str):
    plan, data = make_plan(seed=2, steps=8), make_data()
    points: dict[str, Any] = {"none": None, "DiSK": pg.perturb.DiSK(0.1), "SAT": pg.perturb.SAT(0.1)}

    def begun(model: Any, ledger: pg.Ledger | None = None) -> tuple[pg.PrivateGradient, Any]:
        options: dict[str, Any] = {"filter": FILTERS[name](), "perturb": points[perturb], "ledger": ledger}
        private_grad = pg.PrivateGradient(model, loss_fn, plan, **options)
        return private_grad, pg.optim.AdamBC(model.named_parameters(), noise_step=0.01)

    models = make_model(), make_model()
    whole, by_whole = begun(models[0])
    first, by_first = begun(models[1])
    batches = list(plan.batches(data))
    for batch in batches:
        by_whole.step(grad=whole(batch))
    for batch in batches[:4]:
        by_first.step(grad=first(batch))
    second, by_second = begun(models[1], first.ledger)
    second.load_state_dict(first.state_dict())
    by_second.load_state_dict(by_first.state_dict())
    for batch in batches[4:]:
        by_second.step(grad=second(batch))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.settings["filter"] == repr(FILTERS[name]())


def test_the_filter_of_a_private_gradient_is_the_one_that_a_user_would_call():
    plan, data = make_plan(seed=2, steps=5), make_data()
    own = filters.EMA(0.2)
    plain = pg.PrivateGradient(make_model(), loss_fn, plan)
    filtered = pg.PrivateGradient(make_model(), loss_fn, plan, filter=own)
    mine = filters.EMA(0.2)
    for batch in plan.batches(data):
        one, other = filtered(batch), mine(plain(batch))
        assert one.noise_std == other.noise_std
        assert all(torch.equal(one[name], value) for name, value in other.items())
    assert not own._states  # one filter serves several trainings


def test_disk_computes_gradients_ahead_of_the_weights_by_their_last_update():
    """Float64, no noise: beside a loop that computes the point by itself."""
    plan, data = make_plan(noise_multiplier=0.0, max_grad_norm=1e6, seed=1), make_data(dtype=torch.float64)
    model, weight = make_model(torch.float64), 0.4
    whole = pg.perturb.DiSK(weight)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=whole, filter=filters.EMA(weight))
    unfiltered = list[NoisyGradient]()
    private_grad.register_raw_observer(lambda raw: unfiltered.append(raw.released))
    before: dict[str, Tensor] | None = None
    for batch in plan.batches(data):
        now = {name: value.detach().clone() for name, value in model.named_parameters()}
        ahead = make_model(torch.float64)
        factor = (1 - weight) / weight
        point = now if before is None else {name: now[name] + factor * (now[name] - before[name]) for name in now}
        ahead.load_state_dict(point)
        loss_fn(ahead, batch.examples).sum().backward()
        released = private_grad(batch)
        for name, parameter in ahead.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(unfiltered[-1][name], parameter.grad / plan.divisor, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(model.get_parameter(name).detach(), now[name], rtol=0, atol=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.5 * released[name]
        before = now


@pytest.mark.parametrize("other", [None, filters.EMA(0.2), filters.DOPPLER()])
def test_one_half_of_disk_is_refused(other: Any):
    point = pg.perturb.DiSK(0.7)
    with pytest.raises(pg.PrivacyError, match=r"other half of DiSK\(0.7\).*give filter=filters.EMA\(0.7\)"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), perturb=point, filter=other)
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), perturb=point, filter=filters.EMA(0.7))
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), perturb=pg.perturb.DiSK(1.0))  # DP-SGD


@pytest.mark.parametrize("weight", [0.0, 1.2, math.nan])
def test_a_weight_of_disk_out_of_range_is_refused(weight: float):
    with pytest.raises(pg.PrivacyError, match="weight"):
        pg.perturb.DiSK(weight)


def test_other_parameters_are_refused_before_the_step_is_paid():
    plan, model = make_plan(), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, filter=filters.EMA(0.2))
    batches = plan.batches(make_data())
    private_grad(next(batches))
    model[0].weight.requires_grad_(False)
    with pytest.raises(pg.PrivacyError, match="freeze parameters before the first step"):
        private_grad(next(batches))
    assert private_grad.ledger.releases == 1


BAD_STATES: dict[str, Any] = {
    "no covariance": lambda state: {name: state[name] for name in ("ones", "states", "noise")},
    "a covariance of another order": lambda state: state | {"covariance": torch.zeros(4, 4)},
    "a state without values": lambda state: state | {"states": {"p": []}},
    "values of other shapes": lambda state: state | {"states": {"p": [torch.zeros(2), torch.zeros(3), torch.zeros(3)]}},
    "NaN": lambda state: state | {"states": {"p": [torch.full((3,), math.nan)] * 3}},
    "a number for the noise": lambda state: state | {"noise": 3},
    "nothing": lambda state: {},
}


@pytest.mark.parametrize("how", BAD_STATES)
def test_a_state_that_is_none_is_refused_and_changes_nothing(how: str):
    own = FILTERS["third order"]()
    own(NoisyGradient({"p": torch.ones(3)}, 0.1))
    before = own.state_dict()
    with pytest.raises((pg.PrivacyError, KeyError, TypeError)):
        own.load_state_dict(BAD_STATES[how](before))
    after = own.state_dict()
    assert torch.equal(before["covariance"], after["covariance"])
    assert torch.equal(before["states"]["p"][0], after["states"]["p"][0])


def test_a_gradient_that_nobody_holds_is_overwritten_by_the_same_values():
    torch.manual_seed(0)
    for kind in FILTERS.values():
        one, other = kind(), kind()
        for _ in range(4):
            given = NoisyGradient({"p": torch.randn(70_000), "q": torch.randn(3).bfloat16()}, 0.1)
            copied = NoisyGradient({name: value.clone() for name, value in given.items()}, 0.1)
            kept, moved = one(given), other.moved_on(copied, in_place=True)
            assert all(torch.equal(kept[name], moved[name]) for name in kept)


def test_a_gradient_that_is_observed_stays_as_it_was_released():
    plan, seen = make_plan(), list[Any]()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, filter=filters.EMA(0.2))
    private_grad.register_raw_observer(lambda step: seen.append((step.released, step.released["0.weight"].clone())))
    for batch in itertools.islice(plan.batches(make_data()), 3):
        private_grad(batch)
    assert all(torch.equal(gradient["0.weight"], before) for gradient, before in seen)


def test_a_filter_can_be_copied_and_pickled():
    own = filters.EMA(0.1)
    own(NoisyGradient({"p": torch.ones(3)}, 0.1))
    given = NoisyGradient({"p": torch.zeros(3)}, 0.1)
    copies = copy.deepcopy(own), pickle.loads(pickle.dumps(own))
    wanted = own(given)["p"]
    assert all(torch.equal(one(given)["p"], wanted) for one in copies)


def test_muonbc_refuses_noise_that_depends_on_earlier_noise():
    """The noise of its momentum is known for independent noise only."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer, own = pg.optim.MuonBC([("p", parameter)], lr=0.1), filters.EMA(0.5)
    for gain in ("1", r"1\.34"):
        with pytest.raises(pg.PrivacyError, match=f"independent noise at each step, .*, got noise_gain = {gain}"):
            optimizer.step(grad=own(NoisyGradient({"p": torch.randn(2, 3)}, 0.1)))
    assert not parameter.any()
