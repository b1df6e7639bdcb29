"""Routed experts of transformers: factors of stacked weights, equal to single examples."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from test_perturb import moved_one_by_one
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import privgrad as pg
from conftest import loss_fn, make_data, make_plan
from privgrad.engine.factored import Factored
from privgrad.engine.factors.routed import Routed, Routes
from privgrad.gradient.factor import Dense, Factor
from privgrad.gradient.functional import gradients
from privgrad.gradient.reference import Vmap
from privgrad.gradient.transform import Preconditioner, Transform

EXPERTS, WIDTH = 4, 6
OPTIONS: dict[str, Any] = {"hidden_size": WIDTH, "experts_implementation": "eager"}  # the only one in double precision
KINDS: dict[str, Any] = {
    "Mixtral": lambda: MixtralExperts(MixtralConfig(intermediate_size=5, num_local_experts=EXPERTS, **OPTIONS)),
    "OLMoE": lambda: OlmoeExperts(OlmoeConfig(intermediate_size=5, num_experts=EXPERTS, **OPTIONS)),
    "Qwen3": lambda: Qwen3MoeExperts(Qwen3MoeConfig(moe_intermediate_size=5, num_experts=EXPERTS, **OPTIONS)),
}


class Mixture(nn.Module):
    """A layer of experts with a router; two layers may share the experts."""

    def __init__(self, kind: str, *, twice: bool = False) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.twice = KINDS[kind](), twice
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(self.first(x))
        return (self.mixed(x.tanh()) if self.twice else x).sum(1)

    def mixed(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = self.router(rows).softmax(-1).topk(2)
        return self.experts(rows, index, weights).view_as(x)


def texts(size: int, length: int = 7) -> Tensor:
    return torch.randn(size, length, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_single_examples(kind: str, twice: bool, size: int):
    torch.manual_seed(0)
    model, x = Mixture(kind, twice=twice).double(), texts(size)
    found = Factored(model, losses_of)(x)
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-10)
        assert isinstance(found[name], Routed) == name.startswith("experts")


def assert_displaced(model: nn.Module, x: Tensor, radius: float) -> dict[str, Factor]:
    """The experts are computed for all examples together, and each example's gradient is that of a loop."""
    engine = Factored(model, losses_of)
    found = engine.moved(x, radius, exact=False)
    assert engine._layouts.current.displaced[False][1] == set()  # no module was computed by vmap
    for name, rows in moved_one_by_one(model, x, radius, exact=False).items():
        assert_equal_to_loop(found[name], rows, 1e-8)
    return found


@pytest.mark.parametrize("length", [7, 40])  # displacements as products of positions, and written out
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_displaced_experts(kind: str, twice: bool, length: int):
    torch.manual_seed(0)
    assert_displaced(Mixture(kind, twice=twice).double(), texts(4, length), 0.05)


def test_displaced_experts_equal_the_reference_engine():
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(3)
    found = Factored(model, losses_of).moved(x, 0.1, exact=False)
    with pytest.warns(UserWarning, match="vmap cannot batch"):
        wanted = Vmap(model, losses_of).moved(x, 0.1, exact=False)
    for name, factor in wanted.items():
        torch.testing.assert_close(found[name].dense(), factor.dense(), rtol=1e-9, atol=1e-11)


def test_a_displaced_router_may_choose_other_experts():
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(8, 2)
    there = assert_displaced(model, x, 3.0)["experts.down_proj"]
    here = Factored(model, losses_of)(x)["experts.down_proj"]
    used = [{(r.expert, int(i)) for r in cast(Routed, factor).routes for i in r.example} for factor in (here, there)]
    assert used[1] - used[0]


def test_displaced_experts_where_only_some_weights_move():
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(4)
    model.experts.gate_up_proj.requires_grad_(False)
    assert_displaced(model, x, 0.1)


def test_experts_displaced_along_given_tensors():
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(3)
    moves = {name: torch.randn(3, *p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    found = Factored(model, losses_of).at(x, {name: Dense(move) for name, move in moves.items()}, 0.1)
    for index in range(3):
        along = {name: 0.1 * move[index] for name, move in moves.items()}
        for name, wanted in gradients(model, losses_of, x[index : index + 1], along=along).items():
            torch.testing.assert_close(found[name].dense()[index], wanted, rtol=1e-8, atol=1e-10)


def test_an_example_that_is_not_finite_displaces_no_other():
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(4)
    engine = Factored(model, losses_of)
    wanted = engine.moved(x, 0.1, exact=False)
    x[1, 3] = torch.inf
    for name, factor in engine.moved(x, 0.1, exact=False).items():
        others = [0, 2, 3]
        torch.testing.assert_close(factor.dense()[others], wanted[name].dense()[others], rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_hessians_of_experts_are_computed_for_each_example_by_itself():
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(4)
    found = Factored(model, losses_of).moved(x, 0.05, exact=True)
    for name, rows in moved_one_by_one(model, x, 0.05, exact=True).items():
        assert_equal_to_loop(found[name], rows, 1e-8)


def test_frozen_weights_and_experts_that_no_example_uses():
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(3)
    model.experts.down_proj.requires_grad_(False)
    with torch.no_grad():
        model.router.bias[0] -= 100
    found = Factored(model, losses_of)(x)
    assert "experts.down_proj" not in found
    assert found["experts.gate_up_proj"].dense()[:, 0].abs().max() == 0
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-10)


def test_factors_of_other_kinds_are_added():
    torch.manual_seed(0)
    example = torch.tensor([0, 0, 2])
    routes = [Routes(1, example, torch.randn(3, 5), torch.randn(3, 4))]
    factor, dense = Routed(routes, 3, torch.Size((2, 4, 5)), 2), Dense(torch.randn(3, 2, 4, 5))
    torch.testing.assert_close((factor + dense).dense(), factor.dense() + dense.dense())
    assert Routed([], 3, torch.Size((2, 4, 5)), 2).norms().tolist() == [0.0, 0.0, 0.0]


class OneExpert(nn.Module):
    """A frozen layer, and one trained expert for examples whose first input is above 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.expert, self.other = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found, chosen = self.base(x), (x[:, 0] > 2).nonzero()[:, 0]
        return found.index_add(0, chosen, self.other(self.expert(x[chosen]))) if len(chosen) else found


PARTS: dict[str, dict[str, Any]] = {
    "plain": {"norm_bins": 4},
    "per layer": {"norm_bins": 4, "clip": pg.clip.PerLayer({"expert": 1.0, "other": 1.0})},
    "BAM": {"norm_bins": 4, "perturb": pg.perturb.BAM(0.1)},
    "BAM, exact": {"norm_bins": 4, "perturb": pg.perturb.BAM(0.1, mode="exact")},
}


@pytest.mark.filterwarnings("ignore:.*one by one:UserWarning", "ignore:.*by itself:UserWarning")
@pytest.mark.parametrize("microbatch_size", [None, 4])
@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("parts", PARTS)
def test_batches_that_reach_no_trained_parameter_have_no_gradient(parts: str, engine: Any, microbatch_size: int | None):
    torch.manual_seed(0)
    plan, model = make_plan(noise_multiplier=0.0), OneExpert()
    options: dict[str, Any] = {"engine": engine, "microbatch_size": microbatch_size} | PARTS[parts]
    private_grad = pg.PrivateGradient(model, loss_fn, plan, **options)
    x, y = torch.randn(8, 5).clamp(max=1.9), torch.zeros(8, dtype=torch.int64)
    reached = x.clone()
    reached[0, 0] = 3.0
    draws = plan.batches(make_data())
    for inputs, least in ((reached, 1), (x, 0), (reached, 1), (x, 0)):
        gradient = private_grad(pg.Batch((inputs, y), 8, next(draws).sampling))
        assert (float(gradient["expert.weight"].norm()) > 0) == bool(least)
        assert gradient.norm_distribution is not None
        assert float(gradient.norm_distribution.shares[0]) * 8 >= 8 - least - 1e-6


class Shift(Preconditioner):
    """A public shift of each gradient."""

    source = "a constant"

    def transform(self, step: int, *, parameters: Mapping[str, Tensor], **_: Any) -> Transform:
        return Transform({}, shift={"expert.weight": torch.full_like(parameters["expert.weight"], 0.01)})


def test_examples_without_a_gradient_are_shifted_as_all_others():
    plan, model = make_plan(noise_multiplier=0.0), OneExpert()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=Shift())
    x, y = torch.full((8, 5), 3.0), torch.zeros(8, dtype=torch.int64)
    draws = plan.batches(make_data())
    private_grad(pg.Batch((x, y), 8, next(draws).sampling))
    gradient = private_grad(pg.Batch((-x, y), 8, next(draws).sampling))
    torch.testing.assert_close(gradient["expert.weight"], torch.full((3, 5), 0.01))
