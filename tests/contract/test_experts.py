"""Routed experts of transformers: factors of stacked weights, equal to single examples."""

from typing import Any

import pytest
import torch
from test_perturb import moved_one_by_one
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from privgrad.gradient.engines.factored import Factored
from privgrad.gradient.factors.base import Dense
from privgrad.gradient.factors.routed import Routed, Routes

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


def texts(size: int) -> Tensor:
    return torch.randn(size, 7, WIDTH, dtype=torch.float64)


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


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("exact", [False, True])
def test_displaced_experts_are_computed_for_each_example_by_itself(exact: bool):
    torch.manual_seed(0)
    model, x = Mixture("Mixtral").double(), texts(4)
    engine = Factored(model, losses_of)
    found = engine.moved(x, 0.05, exact=exact)
    for name, rows in moved_one_by_one(model, x, 0.05, exact=exact).items():
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
