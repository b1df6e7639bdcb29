"""Rules that move C: what they release, what they cost, what they leave alone, and that C reaches all who need it."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.private_gradient import RawStep
from privgrad.types import NormDistribution

RULES: dict[str, Any] = {
    "target fraction": lambda: pg.clip.TargetFraction(),
    "quantile": lambda: pg.clip.Quantile(),
    "squared error": lambda: pg.clip.SquaredError(),
}


def linear_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Gradients that do not depend on the weights: the inputs, times a length of the example."""
    x, length = batch
    return model(x)[:, 0] * length


def lengths_data(count: int = 4000) -> TensorDataset:
    """Examples whose gradients have lengths with quantiles that are known: exp of a normal variable, times 3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(count, 5, generator=generator))
    return TensorDataset(x, 3 * torch.randn(count, generator=generator).exp())


def trained(rule: Any, start: float, steps: int = 200, **changed: Any) -> tuple[list[float], list[RawStep]]:
    numbers = {"sample_rate": 0.1, "expected_batch_size": 400, "num_examples": 4000, "steps": steps, "seed": 4}
    plan = make_plan(max_grad_norm=start, **(numbers | changed))
    private_grad = pg.PrivateGradient(nn.Linear(5, 1, bias=False), linear_loss, plan, adaptive_clip=rule)
    bounds, seen = list[float](), list[RawStep]()
    private_grad.register_raw_observer(seen.append)
    for batch in plan.batches(lengths_data()):
        bounds.append(private_grad.max_grad_norm)
        gradient = private_grad(batch)
        # The noise of each step is that of its own C.
        assert private_grad._statistic is not None
        wanted = private_grad._statistic.sensitivity(bounds[-1]) * plan.noise_multiplier / plan.divisor
        assert gradient.noise_std == pytest.approx(wanted)
    return bounds, seen


@pytest.mark.parametrize("start", [1e-3, 1e3])
@pytest.mark.parametrize("target", [0.25, 0.75])
@pytest.mark.parametrize("kind", ["slots", "count"])
def test_c_reaches_the_quantile_from_any_start(kind: str, target: float, start: float):
    """Lengths are 3 exp(N(0, 1)); the share of longer ones is the target at 3 exp(-or+ 0.674)."""
    rule = pg.clip.TargetFraction(target, steps=None) if kind == "slots" else pg.clip.Quantile(1 - target)
    bounds, seen = trained(rule, start, 300)
    quantile = 3 * math.exp(0.6745 * (1 if target < 0.5 else -1))
    late = torch.tensor(bounds[200:]).log().mean().exp()
    assert float(late) == pytest.approx(quantile, rel=0.1)
    clipped = torch.stack([(raw.clipping.raw_factors < 1).double().mean() for raw in seen[200:]]).mean()
    assert float(clipped) == pytest.approx(target, abs=0.04)


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_the_squared_error_is_near_the_smallest_that_a_bound_can_have(sigma: float):
    """Beside the true error of each bound, with the norms of all examples."""
    bounds, _ = trained(pg.clip.SquaredError(), 1.0, noise_multiplier=sigma)
    norms = lengths_data().tensors[1].double()

    def error(bound: float) -> float:
        noise = (sigma * math.sqrt(1.04) * bound / 400) ** 2 * 5
        return noise + float((norms - bound).clamp(min=0).square().mean())

    best = min(error(2.0 ** (power / 12)) for power in range(-60, 120))
    found = sum(map(error, bounds[50:])) / len(bounds[50:])
    at_start = error(1.0)
    assert found - best < 0.3 * (at_start - best)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_without_noise_still_moves_c(name: str):
    bounds, _ = trained(RULES[name](), 1e-2, steps=5, noise_multiplier=0.0)
    assert bounds[-1] > bounds[0]


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_has_the_c_of_an_uninterrupted_one(name: str):
    plan, data = make_plan(seed=2, steps=6, noise_multiplier=0.1), make_data()

    def private_grad() -> pg.PrivateGradient:
        return pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=RULES[name](), ledger=pg.Ledger())

    whole, first = private_grad(), private_grad()
    batches = list(plan.batches(data))
    released = [whole(batch) for batch in batches]
    for batch in batches[:3]:
        first(batch)
    second = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=RULES[name](), ledger=first.ledger)
    second.load_state_dict(first.state_dict())
    assert second.max_grad_norm == first.max_grad_norm != plan.max_grad_norm
    for batch, wanted in zip(batches[3:], released[3:], strict=True):
        found = second(batch)
        assert all(torch.equal(found[parameter], value) for parameter, value in wanted.items())
    assert second.max_grad_norm == whole.max_grad_norm


def test_c_stays_after_its_steps_and_a_resumed_run_counts_them():
    plan, batches = make_plan(seed=2, steps=6), list(make_plan(seed=2, steps=6).batches(make_data()))
    first = private_grad_with(pg.clip.TargetFraction(steps=3), seed=2, steps=6)
    bounds = [first.max_grad_norm]
    for batch in batches[:2]:
        first(batch)
        bounds.append(first.max_grad_norm)
    second = pg.PrivateGradient(
        make_model(), loss_fn, plan, adaptive_clip=pg.clip.TargetFraction(steps=3), ledger=first.ledger
    )
    second.load_state_dict(first.state_dict())
    for batch in batches[2:]:
        second(batch)
        bounds.append(second.max_grad_norm)
    assert len(set(bounds[:4])) == 4
    assert len(set(bounds[3:])) == 1


@pytest.mark.parametrize("bad", [-1, 1.5, True, None])
def test_a_state_with_a_wrong_number_of_steps_is_refused(bad: Any):
    private_grad = private_grad_with(pg.clip.TargetFraction())
    state = private_grad.state_dict()
    with pytest.raises(pg.PrivacyError, match="taken to be an integer >= 0"):
        private_grad.load_state_dict(state | {"adaptive_clip": state["adaptive_clip"] | {"taken": bad}})


def test_a_resumed_run_needs_the_same_rule():
    plan = make_plan()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=pg.clip.TargetFraction())
    state = private_grad.state_dict()
    for other in (None, pg.clip.TargetFraction(0.5), pg.clip.Quantile()):
        resumed = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=other)
        with pytest.raises(pg.PrivacyError, match="adaptive_clip"):
            resumed.load_state_dict(state)
    assert private_grad.settings["adaptive_clip"] == "TargetFraction(0.75, rate=0.5, steps=50)"


def test_c_of_each_step_is_in_the_ledger(tmp_path: Path):
    plan, path = make_plan(steps=4), tmp_path / "ledger.jsonl"
    rule = pg.clip.TargetFraction()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=rule, ledger=path)
    bounds = list[float]()
    for batch in plan.batches(make_data()):
        bounds.append(private_grad.max_grad_norm)
        private_grad(batch)
    first, *steps = map(json.loads, path.read_text().splitlines())
    assert [step["max_grad_norm"] for step in steps] == bounds
    assert len(set(bounds)) == 4
    assert first["plan"]["adaptive_clip"] == "TargetFraction(0.75, rate=0.5, steps=50)"
    assert first["plan"]["max_grad_norm"] == bounds[0]
    assert private_grad.ledger.epsilon(delta=1e-5) == pytest.approx(plan.epsilon(delta=1e-5))


def test_one_rule_serves_several_trainings():
    rule, plan = pg.clip.TargetFraction(), make_plan()
    one, two = (pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=rule) for _ in range(2))
    one(next(iter(plan.batches(make_data()))))
    assert one.max_grad_norm != two.max_grad_norm == plan.max_grad_norm
    used, batches = pg.clip.TargetFraction(steps=1), list(plan.batches(make_data()))[:2]
    for _ in range(2):  # a rule that another training used up begins anew
        three = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=used)
        three(batches[0])
        assert three.max_grad_norm != plan.max_grad_norm
        assert three._adaptive is not None
        used = three._adaptive


def test_a_preconditioner_gets_the_noise_of_the_step():
    """public_adam with noise_eps has an epsilon in units of the noise, which follows C."""
    model, data, plan = make_model(), make_data(), make_plan(steps=5)
    public = pg.PublicGradient(model, loss_fn, (data.tensors[0][:8], data.tensors[1][:8]), source="test")
    made, seen = pg.precondition.public_adam(public, noise_eps=1.0), list[float]()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=made, adaptive_clip=pg.clip.TargetFraction())
    held = private_grad._precondition
    assert held is not None
    real = held.transform

    def transform(step: int, *, noise_std: float, **options: Any) -> Any:
        seen.append(noise_std)
        return real(step, noise_std=noise_std, **options)

    held.transform = transform
    stds = [private_grad(batch).noise_std for batch in plan.batches(data)]
    assert seen == pytest.approx(stds)


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_c_stays_within_a_million_of_its_start(far: float):
    rule = pg.clip.TargetFraction(rate=10.0).begun(
        max_grad_norm=2.0, noise_multiplier=1.0, divisor=100, norm_bins=None, size=5
    )
    shares = torch.full((8,), far, dtype=torch.float64)
    for _ in range(20):
        rule.update(NormDistribution(shares, shares, torch.tensor([2.0] + [1.0] * 7), 2.0))
    assert rule.max_grad_norm == pytest.approx(2e-6 if far else 2e6)


@pytest.mark.parametrize(("start", "sigma", "least", "most"), [(1e-9, 1.0, 1e-10, 1e-3), (1e12, 10.0, 1e6, 1e14)])
def test_c_stays_within_the_limits_of_a_plan(start: float, sigma: float, least: float, most: float):
    for share, wanted in ((1.0, least), (0.0, most)):
        rule = pg.clip.TargetFraction(rate=10.0).begun(
            max_grad_norm=start, noise_multiplier=sigma, divisor=100, norm_bins=None, size=5
        )
        shares = torch.full((8,), share, dtype=torch.float64)
        for _ in range(20):
            rule.update(NormDistribution(shares, shares, torch.tensor([2.0] + [1.0] * 7), 2.0))
        assert rule.max_grad_norm == pytest.approx(wanted)
        make_plan(max_grad_norm=rule.max_grad_norm, noise_multiplier=sigma)


@pytest.mark.parametrize("name", RULES)
def test_the_first_c_may_be_an_integer(name: str):
    plan, model = make_plan(max_grad_norm=1, steps=2), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, adaptive_clip=RULES[name]())
    result = pg.fit(private_grad, pg.optim.SGD(model.named_parameters(), noise_step=0.01), make_data())
    assert result.ledger.releases == 2


def test_a_rule_of_the_users_has_a_name_in_the_ledger():
    class Own(pg.clip.AdaptiveClip):
        pass

    assert repr(Own()) == repr(Own()) == "Own()"


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0, 1e-300, 1e30, "2.5", None])
def test_a_state_with_a_c_that_no_rule_saves_is_refused(bad: Any):
    private_grad = private_grad_with(pg.clip.TargetFraction())
    state = private_grad.state_dict()
    with pytest.raises(pg.PrivacyError, match=r"max_grad_norm to be in \[1e-06, 1000000.0\]"):
        private_grad.load_state_dict(state | {"adaptive_clip": state["adaptive_clip"] | {"max_grad_norm": bad}})
    assert private_grad.max_grad_norm == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0, 1e-44, 1e30])
def test_a_rule_of_the_users_that_leaves_the_limits_releases_nothing(bad: float):
    class Leaving(pg.clip.TargetFraction):
        def update(self, distribution: NormDistribution) -> None:
            self.max_grad_norm = bad

    plan = make_plan()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=Leaving())
    first, second, *_ = plan.batches(make_data())
    private_grad(first)
    with pytest.raises(pg.PrivacyError, match="max_grad_norm"):
        private_grad(second)
    assert private_grad.ledger.releases == 1


@pytest.mark.parametrize("found", [3, np.float32(0.25), Fraction(1, 4)])
def test_a_rule_of_the_users_may_give_any_kind_of_number(found: Any, tmp_path: Path):
    class Giving(pg.clip.TargetFraction):
        def update(self, distribution: NormDistribution) -> None:
            self.max_grad_norm = found

    plan, path = make_plan(), tmp_path / "ledger.jsonl"
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=Giving(), ledger=path)
    first, second, *_ = plan.batches(make_data())
    private_grad(first)
    assert private_grad(second).noise_std == float(found) / 8
    private_grad.load_state_dict(private_grad.state_dict())
    assert private_grad.max_grad_norm == float(found)
    assert json.loads(path.read_text().splitlines()[-1])["max_grad_norm"] == float(found)


@pytest.mark.parametrize("name", RULES)
def test_rules_know_the_noise_of_groups(name: str):
    """The sum over groups of two examples has twice the sensitivity, and so twice the noise."""
    rule = pg.clip.Quantile(count_std=20.0) if name == "quantile" else RULES[name]()
    plan = make_plan(expected_batch_size=1000, num_examples=4000, noise_multiplier=8.0, group_size=2)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=rule)
    twice = rule.begun(max_grad_norm=1.0, noise_multiplier=16.0, divisor=500, norm_bins=None, size=39)
    assert private_grad._adaptive is not None
    assert vars(private_grad._adaptive) == vars(twice)
    if name == "quantile":
        found = private_grad(next(plan.batches(make_data(4000)))).norm_distribution
        assert found is not None
        assert float(found.noise_std) * plan.divisor == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pg.clip.TargetFraction(0.0), "target"),
        (lambda: pg.clip.TargetFraction(1.0), r"target to be in \(0, 1\), got 1.0"),
        (lambda: pg.clip.TargetFraction(True), r"target to be in \(0, 1\), got True"),
        (lambda: pg.clip.TargetFraction(rate=-1.0), "rate"),
        (lambda: pg.clip.TargetFraction(steps=0), "steps to be an integer >= 1, got 0"),
        (lambda: pg.clip.TargetFraction(steps=cast("Any", 2.5)), "steps to be an integer >= 1, got 2.5"),
        (lambda: pg.clip.Quantile(1.5), r"quantile to be in \(0, 1\), got 1.5; clip.Automatic"),
        (lambda: pg.clip.Quantile(count_std=0.0), "count_std"),
        (lambda: pg.clip.SquaredError(0.0), "weight"),
        (lambda: private_grad_with(pg.clip.Quantile(count_std=0.4)), "above sigma / 2"),
        (lambda: private_grad_with(pg.clip.Quantile(), norm_bins=5), "norm_bins"),
        (lambda: private_grad_with(pg.clip.SquaredError(), norm_bins="auto"), "norm_bins"),
        (lambda: private_grad_with(pg.clip.TargetFraction), "rule of privgrad.clip"),
        (lambda: private_grad_with(pg.clip.TargetFraction(), clip=pg.clip.Automatic()), "depend on C"),
        (lambda: private_grad_with(pg.clip.Flat()), "rule of privgrad.clip"),
        (lambda: private_grad_with(pg.clip.TargetFraction(), max_grad_norm=math.inf, noise_multiplier=0.0), "finite"),
    ],
)
def test_bad_numbers_are_refused(make: Any, words: str):
    with pytest.raises(pg.PrivacyError, match=words):
        make()


def private_grad_with(rule: Any, norm_bins: Any = None, clip: Any = None, **changed: Any) -> pg.PrivateGradient:
    options: dict[str, Any] = {"adaptive_clip": rule, "norm_bins": norm_bins, "clip": clip}
    return pg.PrivateGradient(make_model(), loss_fn, make_plan(**changed), **options)


@pytest.mark.parametrize(
    ("name", "fraction", "factor"),
    [
        *(("target fraction", 0.0, 0.69), ("target fraction", 1.0, 1.13)),
        *(("quantile", 0.0, 0.86), ("quantile", 1.0, 1.05)),
    ],
)
def test_a_rule_moves_c_by_as_much_as_the_docs_say(name: str, fraction: float, factor: float):
    numbers: dict[str, Any] = {"noise_multiplier": 1.0, "divisor": 100, "norm_bins": None, "size": 5}
    rule = RULES[name]().begun(max_grad_norm=1.0, **numbers)
    edges = torch.tensor([1.0], dtype=torch.float64)
    rule.update(NormDistribution(1 - fraction * edges, edges, edges, 1.0))
    assert rule.max_grad_norm == pytest.approx(factor, abs=0.005)


@pytest.mark.parametrize("name", RULES)
def test_the_clip_fraction_of_every_rule_is_that_at_c(name: str):
    """Without its noise. SquaredError also has edges above C, up to infinity."""
    _, seen = trained(RULES[name](), 3.0, steps=30)
    for raw in seen:
        found = raw.released.norm_distribution
        assert found is not None
        assert raw.raw_shares is not None
        assert found.max_grad_norm in found.edges.tolist()
        near = (raw.clipping.raw_norms / found.max_grad_norm - 0.9) / 0.2  # a norm near C counts in part
        longer = float(near.clamp(0.0, 1.0).sum()) / 400
        absent = 1 - len(raw.clipping.raw_norms) / 400  # shares are of the expected number of gradients
        wanted = longer + absent * (0.5 if name == "quantile" else 1)  # which counts from one half
        slack = 0.15 if name == "target fraction" else 1e-6  # slots count gradients near C in part
        assert replace(found, shares=raw.raw_shares).clip_fraction == pytest.approx(wanted, abs=slack)


def test_c_is_a_function_of_what_was_released():
    plan, data = make_plan(steps=8), make_data()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=pg.clip.TargetFraction())
    private_grad.register_raw_observer(lambda raw: None)
    again = pg.clip.TargetFraction().begun(max_grad_norm=1.0, noise_multiplier=1.0, divisor=8, norm_bins=None, size=1)
    for batch in plan.batches(data):
        assert private_grad.max_grad_norm == again.max_grad_norm
        distribution = private_grad(batch).norm_distribution
        assert distribution is not None
        again.update(distribution)
