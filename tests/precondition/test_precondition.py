"""AdaDPS: transformed, then clipped; public gradients; what is not private says so."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adadps import AdaDPS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engines import MODELS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import clipped_sum, first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.engine.factored import Factored
from privgrad.engine.factors.outer import Outer
from privgrad.gradient.factor import norms_of
from privgrad.gradient.transform import Shifted, shifted

RULES: dict[str, Any] = {
    "rmsprop": pg.precondition.public_rmsprop,
    "adam": pg.precondition.public_adam,
    "adagrad": pg.precondition.public_adagrad,
}


def public(model: nn.Module, count: int = 10, **options: Any) -> pg.PublicGradient:
    examples = TensorDataset(*(tensor[:count] for tensor in make_data(64).tensors))
    return pg.PublicGradient(model, loss_fn, examples, source="drawn for the test", **options)


def run(model: nn.Module, plan: pg.PrivacyPlan, **options: Any) -> list[pg.NoisyGradient]:
    private_grad = pg.PrivateGradient(model, loss_fn, plan, **options)
    return [private_grad(batch) for batch in plan.batches(make_data())]


def gradient_of(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    w = w.detach().requires_grad_()
    return torch.autograd.grad(F.cross_entropy((w @ x)[None], y[None]), w)[0]


@pytest.mark.parametrize("unit", ["eps", "noise_eps"])
@pytest.mark.parametrize(("schedule", "every"), [("step", 1), ("step", 3), ("step", None), ("epoch", None)])
@pytest.mark.parametrize("rule", RULES)
def test_agrees_with_a_loop_over_examples(rule: str, schedule: str, every: int | None, unit: str):
    """Twelve steps, float64: the gradients before their noise (which eps does not need), and the weights."""
    torch.manual_seed(0)
    x, y, px, py = torch.randn(32, 5).double(), torch.arange(32) % 3, torch.randn(11, 5).double(), torch.arange(11) % 3
    model = nn.Linear(5, 3, bias=False).double()
    w = model.weight.detach().clone()
    by_noise = unit == "noise_eps"
    clip_norm = 0.3 if by_noise else 2.0
    plan = make_plan(noise_multiplier=0.6 if by_noise else 0.0, steps=12, max_grad_norm=clip_norm, seed=0)
    gradient = pg.PublicGradient(model, loss_fn, (px, py), source="test", batch_size=4)
    decays: dict[str, dict[str, Any]] = {"rmsprop": {"alpha": 0.8}, "adam": {"betas": (0.7, 0.8)}}
    of_unit: dict[str, Any] = {"noise_eps": 4.0} if by_noise else {"eps": 1e-3}
    made = RULES[rule](gradient, **decays.get(rule, {}), **of_unit, schedule=schedule, every=every)
    private_grad, seen = pg.PrivateGradient(model, loss_fn, plan, precondition=made), list[Tensor]()
    private_grad.register_raw_observer(lambda raw: seen.append(raw.raw_mean["weight"].clone()))
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.5)
    noise = 4.0 * 0.6 * clip_norm / 8  # k sigma C / B
    plain = AdaDPS(gradient_of, px, py, batch_size=4, rule=rule, unit=unit, noise=noise)
    clipped = 0
    for step, batch in enumerate(plan.batches(TensorDataset(x, y))):
        if schedule == "step" and step % (every or 4) == 0:  # 4 is the default
            plain.see_step(w, step // (every or 4))
        elif schedule == "epoch" and step % 4 == 0:  # q = 1/4: an expected pass takes four steps
            plain.see_epoch(w, step // 4)
        inputs, labels = batch.examples
        parts = [plain.contribution(w, a, b, clip_norm) for a, b in zip(inputs, labels, strict=True)]
        clipped += sum(float(part.norm()) > 0.9995 * clip_norm for part in parts)
        wanted = sum(parts, torch.zeros(3, 5).double()) / plan.expected_batch_size
        released = private_grad(batch)
        torch.testing.assert_close(seen.pop(), wanted, rtol=1e-9, atol=1e-12)
        if not by_noise:
            torch.testing.assert_close(released["weight"], wanted, rtol=1e-9, atol=1e-12)
        optimizer.step(grad=released)
        w = w - 0.5 * released["weight"]
        torch.testing.assert_close(model.weight.detach(), w, rtol=1e-9, atol=1e-12)
    assert clipped > 0


@pytest.mark.parametrize("rule", RULES)
def test_scales_are_kept_between_public_batches(rule: str):
    model = make_model()
    made = RULES[rule](public(model, batch_size=3), every=3).begun(model)
    parameters = dict(model.named_parameters())
    found = [
        made.transform(step, epoch_steps=4, noise_std=1.0, parameters=parameters, raw_mean=dict) for step in range(7)
    ]
    assert [len({id(part) for part in found[a:b]}) for a, b in ((0, 3), (3, 6), (2, 4), (5, 7))] == [1, 1, 2, 2]


@pytest.mark.parametrize("rule", RULES)
def test_steps_between_public_batches_are_checked(rule: str):
    gradient = public(make_model())
    with pytest.raises(pg.PrivacyError, match="every to be an integer >= 1, got 0"):
        RULES[rule](gradient, every=0)
    with pytest.raises(pg.PrivacyError, match="every to be absent with schedule='epoch', got 4"):
        RULES[rule](gradient, schedule="epoch", every=4)


def test_noise_eps_divides_by_hand():
    """A = 1 + |h| / (k s) with alpha = 0: two coordinates far below and far above k s, one level with it."""
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()

    def linear(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return model(batch[0])[:, 0]

    plan = make_plan(noise_multiplier=2.0, max_grad_norm=4.0)  # s = 2 * 4 / 8 = 1
    h = torch.tensor([[0.002, 2.0, 2000.0]])
    gradient = pg.PublicGradient(model, linear, (h,), source="test")
    made = pg.precondition.public_rmsprop(gradient, alpha=0.0, noise_eps=2.0).begun(model)
    parameters = dict(model.named_parameters())

    def scales(noise_std: float) -> Tensor:
        found = made.transform(0, epoch_steps=4, noise_std=noise_std, parameters=parameters, raw_mean=dict)
        return 1 / found.inverse_scales["weight"][0]

    torch.testing.assert_close(scales(plan.noise_std), torch.tensor([1.001, 2.0, 1001.0]))


@pytest.mark.parametrize("rule", RULES)
def test_noise_eps_counts_in_units_of_the_noise(rule: str):
    """Loss and C times 8: every gradient is 8 times as large, and its noise too. With eps, other directions."""

    def released(size: float, **options: float) -> Tensor:
        model = make_model(torch.float64)

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return size * loss_fn(model, batch)

        examples = TensorDataset(*make_data(10, torch.float64).tensors)
        gradient = pg.PublicGradient(model, loss, examples, source="test")
        plan = make_plan(max_grad_norm=0.1 * size, seed=0, steps=3)
        made = RULES[rule](gradient, **options)
        private_grad = pg.PrivateGradient(model, loss, plan, precondition=made)
        found = [private_grad(batch) for batch in plan.batches(make_data(dtype=torch.float64))]
        return torch.cat([value.flatten() for step in found for value in step.values()])

    torch.testing.assert_close(released(8.0, noise_eps=0.5), 8 * released(1.0, noise_eps=0.5))
    assert not torch.allclose(released(8.0, eps=1e-2), 8 * released(1.0, eps=1e-2), rtol=1e-2)


@pytest.mark.parametrize(
    ("plan", "noise_std"),
    [
        (make_plan(noise_multiplier=0.5, max_grad_norm=2.0), 0.5 * 2.0 / 8),
        (make_plan(noise_multiplier=0.5, max_grad_norm=2.0, group_size=2), 0.5 * 2 * 2.0 / 4),
        (make_plan(noise_multiplier=0.5, max_grad_norm=2.0).scaled(0.5), 0.5 * 2.0 / 8),
        (make_plan(noise_multiplier=0.0), 0.0),
    ],
    ids=["plain", "groups", "simulation", "no noise"],
)
def test_a_preconditioner_is_told_the_noise_of_the_released_mean(plan: pg.PrivacyPlan, noise_std: float):
    told: list[tuple[float, int]] = []

    class Noting(pg.precondition.Preconditioner):
        source = "a test"

        def transform(self, step: int, *, noise_std: float, epoch_steps: int, **_: Any) -> Any:
            told.append((noise_std, epoch_steps))
            return pg.precondition.Transform()

    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=Noting())
    found = private_grad(first_batch(plan, make_data()))
    assert told == [(pytest.approx(noise_std), 4)]
    assert found.noise_std == pytest.approx(noise_std)


@pytest.mark.parametrize("rule", [*RULES, "raw"])
def test_noise_eps_is_refused_where_it_means_nothing(rule: str):
    model = make_model()

    def make(**options: Any) -> pg.precondition.Preconditioner:
        if rule == "raw":
            return pg.precondition.raw_ideal_rmsprop(**options)
        return RULES[rule](public(model), **options)

    name = "raw_ideal_rmsprop" if rule == "raw" else f"public_{rule}"
    for wrong in (0.0, -1.0, math.nan, math.inf, "1"):
        with pytest.raises(pg.PrivacyError, match=f"{name}: expected noise_eps to be a positive finite number"):
            make(noise_eps=wrong)
    with pytest.raises(pg.PrivacyError, match=rf"{name}: expected eps to be absent next to noise_eps, got 1.0"):
        make(noise_eps=2.0, eps=1.0)
    plan = make_plan(noise_multiplier=0.0)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=make())
    with pytest.raises(pg.PrivacyError, match=r"noise_std to be positive for noise_eps, got 0\.0; give eps in place"):
        private_grad(first_batch(plan, make_data()))
    assert private_grad.ledger.releases == 0


def test_noise_eps_is_ten_unless_eps_is_given_and_a_resumed_run_has_the_same():
    model, plan = make_model(), make_plan(seed=0)

    def run_with(**options: Any) -> pg.PrivateGradient:
        made = pg.precondition.public_rmsprop(public(model), **options)
        return pg.PrivateGradient(model, loss_fn, plan, precondition=made)

    batch = first_batch(plan, make_data())
    found, same, paper = (run_with(**given)(batch) for given in ({}, {"noise_eps": 10.0}, {"eps": 1e-5}))
    assert all(torch.equal(found[name], same[name]) for name in found)
    assert not torch.equal(found["0.weight"], paper["0.weight"])
    state = run_with().state_dict()
    run_with(noise_eps=10.0).load_state_dict(state)
    for options in ({"noise_eps": 9.0}, {"eps": 10.0}):
        with pytest.raises(pg.PrivacyError, match="resume with the same perturb, precondition"):
            run_with(**options).load_state_dict(state)


def fixed(scales: dict[str, Tensor]) -> pg.precondition.Preconditioner:
    """A preconditioner with these scales."""
    return pg.precondition.fixed(pg.Scales(scales, provenance="common knowledge", source="a test"))


def test_scales_of_one_change_no_bit():
    plan = make_plan(seed=0)
    ones = fixed({name: torch.ones_like(parameter) for name, parameter in make_model().named_parameters()})
    for plain, divided in zip(run(make_model(), plan), run(make_model(), plan, precondition=ones), strict=True):
        assert all(torch.equal(plain[name], divided[name]) for name in plain)


def test_without_clipping_the_noise_in_the_weights_is_proportional_to_the_scales():
    """Claim C4: A times the released gradient is the mean gradient, plus A times the noise of DP-SGD."""
    plan = make_plan(seed=0, steps=1, max_grad_norm=1e6, noise_multiplier=1e-6)
    scales = {name: torch.rand_like(p) + 0.5 for name, p in make_model(torch.float64).named_parameters()}
    means: list[dict[str, Tensor]] = []

    def released(**options: Any) -> pg.NoisyGradient:
        private_grad = pg.PrivateGradient(make_model(torch.float64), loss_fn, plan, **options)
        private_grad.register_raw_observer(lambda raw: means.append(dict(raw.raw_mean)))
        return private_grad(first_batch(plan, make_data(dtype=torch.float64)))

    plain, divided = released(), released(precondition=fixed(scales))
    for name, mean in means[0].items():
        noise = plain[name] - mean
        assert float(noise.abs().max()) > 1e-3
        torch.testing.assert_close(scales[name] * divided[name], mean + scales[name] * noise, rtol=1e-9, atol=1e-9)


def test_norms_follow_scales_that_are_written_over():
    factor = Outer(torch.randn(4, 1, 6), torch.randn(4, 1, 5))
    inverse_scales = torch.rand(5, 6) + 0.5
    for _ in range(3):
        wanted = norms_of(factor.dense(), inverse_scales)
        torch.testing.assert_close(factor.norms(inverse_scales), wanted, rtol=1e-5, atol=0.0)
        for part in inverse_scales.view(-1).split(10):
            part.mul_(torch.rand(len(part)) + 1)
    with torch.inference_mode():
        uncounted = inverse_scales.clone()
        for _ in range(2):
            uncounted.mul_(2)
            wanted = norms_of(factor.dense(), uncounted)
            torch.testing.assert_close(factor.norms(uncounted), wanted, rtol=1e-5, atol=0.0)


def test_scales_and_c_together_change_the_scale_only():
    scales = {name: torch.rand_like(p) + 0.5 for name, p in make_model().named_parameters()}
    larger = {name: 8 * scale for name, scale in scales.items()}
    some = run(make_model(), make_plan(seed=0, max_grad_norm=2.0), precondition=fixed(scales))
    others = run(make_model(), make_plan(seed=0, max_grad_norm=0.25), precondition=fixed(larger))
    for one, other in zip(some, others, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value / 8, other[name], rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_shifted_gradient_is_the_sum_written_out(name: str, preconditioned: bool):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double()
    factors = Factored(model, loss_fn)((inputs, torch.arange(len(inputs)) % 3))
    weight_B, kept_B = torch.rand(len(inputs)).double(), torch.arange(len(inputs)) != 1
    for factor in factors.values():
        shift = torch.randn(factor.shape).double()
        scales = torch.rand(factor.shape).double() + 0.1 if preconditioned else None
        found, rows_BP = Shifted(factor * 0.7, shift), 0.7 * factor.dense() + shift
        scaled_BP = rows_BP if scales is None else rows_BP * scales
        torch.testing.assert_close(found.norms(scales), scaled_BP.flatten(1).norm(dim=1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.dense(), rows_BP)
        torch.testing.assert_close(found.weighted_sum(weight_B), torch.einsum("b...,b->...", rows_BP, weight_B))
        kept = found.mask(kept_B)
        assert float(kept.norms(scales)[1]) == 0
        rest = torch.einsum("b...,b->...", rows_BP, weight_B * kept_B)
        torch.testing.assert_close(kept.weighted_sum(weight_B), rest)
        assert bool((found.term_bound(scales) * (1 + 1e-9) >= found.norms(scales)).all())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-6, 1.0, 1e4]), st.sampled_from([1e-5, 1.0]))
def test_a_shifted_contribution_stays_within_c(seed: int, size: float, eps: float):
    """One example more or less moves the sum by at most C, however large the public share; float32."""
    torch.manual_seed(seed)
    model = make_model()
    x, y = make_data().tensors
    shift = {name: size * torch.randn_like(p) for name, p in model.named_parameters()}
    inverse = {name: 1 / (torch.rand_like(p) + eps) for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())

    def total(count: int) -> dict[str, Tensor]:
        chunk = shifted(Factored(model, loss_fn)((x[:count], y[:count])), 0.9, shift, parameters)
        clip = pg.clip.Flat()
        found, _ = clipped_sum([chunk], like=parameters, clip=clip, max_grad_norm=1.0, inverse_scales=inverse)
        return dict(found.values)

    with_it, without = total(8), total(7)
    moved = torch.cat([(with_it[name] - without[name]).flatten().double() for name in with_it])
    assert float(moved.norm()) <= 1 + 1e-4


def test_a_public_share_that_cancels_the_gradient_is_clipped_all_the_same():
    """keep g + shift = 0 up to rounding, then divided by tiny scales."""
    model = nn.Linear(4, 2, bias=False)
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 0])
    factors = Factored(model, loss_fn)((x, y))
    shift = -0.9 * factors["weight"].dense()[0]
    chunk = shifted(factors, 0.9, {"weight": shift}, dict(model.named_parameters()))
    inverse = {"weight": torch.full((2, 4), 1e7)}
    found, raw = clipped_sum(
        [{"weight": chunk["weight"][:1]}],
        like=dict(model.named_parameters()),
        clip=pg.clip.Flat(),
        max_grad_norm=1.0,
        inverse_scales=inverse,
    )
    assert float(found.values["weight"].norm()) <= 1 + 1e-3
    assert float(raw.raw_factors[0]) <= 1


@pytest.mark.parametrize("schedule", ["step", "epoch"])
@pytest.mark.parametrize("rule", RULES)
def test_interrupted_and_resumed_is_uninterrupted(rule: str, schedule: str, tmp_path: Path):
    def training(folder: Path, stop_after: int | None) -> nn.Module:
        model = make_model()
        gradient = public(model, batch_size=3)
        seen = 0

        def stopping(model: nn.Module, batch: Any) -> Tensor:
            nonlocal seen
            seen += len(batch[1]) > 0
            if stop_after is not None and seen > stop_after:
                raise KeyboardInterrupt
            return loss_fn(model, batch)

        made = RULES[rule](gradient, schedule=schedule)
        optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
        private_grad = pg.PrivateGradient(model, stopping, make_plan(seed=3), precondition=made)
        pg.fit(private_grad, optimizer, make_data(), output_dir=folder, progress=False)
        return model

    whole = training(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        training(tmp_path / "parts", 9)
    resumed = training(tmp_path / "parts", None)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_that_failed_may_be_taken_again():
    model, twin = make_model(), make_model()
    failing = True

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if failing and len(batch[1]) != 3:
            raise RuntimeError("no memory")
        return loss_fn(model, batch)

    plan = make_plan(seed=0)
    private_grad = pg.PrivateGradient(model, loss, plan, precondition=RULES["rmsprop"](public(model, batch_size=3)))
    other = pg.PrivateGradient(twin, loss_fn, plan, precondition=RULES["rmsprop"](public(twin, batch_size=3)))
    batch = first_batch(plan, make_data())
    with pytest.raises(RuntimeError, match="no memory"):
        private_grad(batch)
    failing = False
    again, straight = private_grad(batch), other(copy.copy(batch))
    assert all(torch.equal(again[name], straight[name]) for name in again)


def test_what_is_made_of_the_private_batch_is_not_private():
    plan = make_plan(delta=1e-3)
    model = make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=pg.precondition.raw_ideal_rmsprop())
    for batch in plan.batches(make_data()):
        private_grad(batch)
    assert private_grad.ledger.epsilon(delta=1e-3) == private_grad.epsilon(steps=3) == math.inf
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    ideal = pg.precondition.raw_ideal_rmsprop()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=ideal)
    result = pg.fit(private_grad, optimizer, make_data(), evaluate=lambda _: {"one": 1.0}, progress=False)
    assert result.curve[-1]["epsilon"] == math.inf


def test_a_ledger_says_where_the_side_information_came_from(tmp_path: Path):
    model = make_model()
    scales = pg.Scales({"0.bias": torch.tensor(2.0)}, provenance="common knowledge", source="frequencies of words")
    private_grad = pg.PrivateGradient(
        model, loss_fn, make_plan(), precondition=pg.precondition.fixed(scales), ledger=tmp_path / "ledger.jsonl"
    )
    assert private_grad.ledger.plan_facts["side_information"] == "common knowledge: frequencies of words"
    private_grad.ledger.close()
    with pytest.raises(pg.PrivacyError, match="side_information"):
        pg.PrivateGradient(
            model, loss_fn, make_plan(), precondition=RULES["adam"](public(model)), ledger=tmp_path / "ledger.jsonl"
        )


def test_public_and_private_are_not_mixed_up():
    model = make_model()
    with pytest.raises(pg.PrivacyError, match="to be public"):
        pg.PublicGradient(model, loss_fn, first_batch(make_plan(), make_data()), source="no")
    with pytest.raises(pg.PrivacyError, match="source"):
        pg.PublicGradient(model, loss_fn, make_data(), source="")
    with pytest.raises(pg.PrivacyError, match="number of examples to be an integer >= 1, got 0"):
        pg.PublicGradient(model, loss_fn, TensorDataset(torch.zeros(0, 5), torch.zeros(0)), source="x")
    with pytest.raises(pg.PrivacyError, match="batch_size"):
        public(model, batch_size=11)
    with pytest.raises(AttributeError, match="source"):
        pg.precondition.public_rmsprop(make_data())  # pyright: ignore[reportArgumentType]
    with pytest.raises(pg.PrivacyError, match="the model object that is trained"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), precondition=RULES["adam"](public(model)))
    broken = TensorDataset(torch.full((2, 5), torch.nan), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(pg.PrivacyError, match="finite"):
        pg.PublicGradient(model, loss_fn, broken, source="x")(0)
    with pytest.raises(pg.PrivacyError, match="provenance"):
        pg.Scales({}, provenance="guess", source="x")  # pyright: ignore[reportArgumentType]
    wrong: list[dict[str, Any]] = [{"eps": 0.0}, {"alpha": 1.0}, {"schedule": "daily"}]
    for options in wrong:
        with pytest.raises(pg.PrivacyError, match=next(iter(options))):
            pg.precondition.public_rmsprop(public(model), **options)
    with pytest.raises(pg.PrivacyError, match=r"public_adam: expected betas to be two numbers in \[0, 1\), got 0.9"):
        pg.precondition.public_adam(public(model), betas=0.9)  # pyright: ignore[reportArgumentType]
    with pytest.raises(pg.PrivacyError, match="keep"):
        pg.precondition.public_adam(public(model), keep=0.0)


def test_public_batches_are_passes_in_random_order():
    model = make_model()
    gradient, again = public(model, batch_size=3), public(model, batch_size=3)
    assert len(list(gradient.one_pass(0))) == 4
    assert all(torch.equal(a, b) for a, b in zip(gradient(5).values(), again(5).values(), strict=True))
    assert not torch.equal(gradient(0)["0.weight"], gradient(3)["0.weight"])
    assert all(parameter.grad is None for parameter in model.parameters())
    whole = public(model)
    assert torch.equal(whole(0)["0.weight"], whole(7)["0.weight"])
    x, y = (tensor[:10] for tensor in make_data(64).tensors)
    wanted = torch.autograd.grad(loss_fn(model, (x, y)).mean(), list(model.parameters()))[0]
    torch.testing.assert_close(whole(0)["0.weight"], wanted)
