"""Routed experts of transformers: factors of stacked weights, equal to single examples."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from test_perturb import moved_one_by_one
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import privgrad as pg
from conftest import loss_fn, make_data, make_plan
from privgrad.engine.factored import Factored
from privgrad.engine.factors.routed import Routed, Routes, apply_routed
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
    used = [cast(Routed, factor).dense().abs().amax((2, 3)) > 0 for factor in (here, there)]
    assert (used[1] & ~used[0]).any()


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
    routes = Routes(torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 0]]), 2)
    factor, dense = Routed(routes, torch.randn(3, 3, 5), torch.randn(3, 3, 4)), Dense(torch.randn(3, 2, 4, 5))
    torch.testing.assert_close((factor + dense).dense(), factor.dense() + dense.dense())


ROUTES = [(1, 1, 1), (5, 3, 2), (12, 4, 2), (40, 4, 1), (7, 16, 3)]  # positions, experts, experts of a position


def routed(positions: int, experts: int, each: int, examples: int = 6, width: tuple[int, int] = (5, 3)) -> Routed:
    expert_BTK = torch.rand(examples, positions, experts).topk(each).indices
    expert_BTK[1] = torch.arange(each)  # one example uses few experts, another uses one far more than the others
    expert_BTK[2, :, 0] = expert_BTK[2, :, 0].where(torch.rand(positions) < 0.1, experts - 1)
    slots = positions * each
    a_BSI, b_BSO = (torch.randn(examples, slots, own, dtype=torch.float64) for own in width)
    return Routed(Routes(expert_BTK.flatten(1), experts), a_BSI, b_BSO)


def written(factor: Routed) -> Tensor:
    """The gradients, slot by slot."""
    grads = torch.zeros(factor.examples, *factor.shape, dtype=torch.float64)
    for index, row in enumerate(factor.routes.expert_BS.tolist()):
        for slot, expert in enumerate(row):
            grads[index, expert] += torch.outer(factor.b_BSO[index, slot], factor.a_BSI[index, slot])
    return grads


@pytest.mark.parametrize("width", [(5, 3), (60, 70)])  # the norms of the second are those of inner products
@pytest.mark.parametrize("sizes", ROUTES)
def test_factors_of_stacked_weights_are_exact(sizes: tuple[int, int, int], width: tuple[int, int]):
    torch.manual_seed(0)
    factor = routed(*sizes, width=width)
    wanted = written(factor)
    scales, weight_B, kept_B = torch.rand(factor.shape, dtype=torch.float64) + 0.5, torch.rand(6), torch.rand(6) < 0.5
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
    index = torch.tensor([4, 1, 1])
    for found, dense in (
        (factor, wanted),
        (factor[1:3], wanted[1:3]),
        (factor[index], wanted[index]),
        (factor.mask(kept_B), wanted * kept_B[:, None, None, None]),
        (factor.merge(2), wanted.view(3, 2, *wanted.shape[1:]).sum(1)),
        (factor + routed(*sizes, width=width).mask(torch.zeros(6, dtype=torch.bool)), wanted),
        (factor + factor, 2 * wanted),
    ):
        assert isinstance(found, Routed)
        torch.testing.assert_close(found.dense(), dense, **close)
        torch.testing.assert_close(found.norms(), dense.flatten(1).norm(dim=1), **close)
        torch.testing.assert_close(found.norms(scales), (dense * scales).flatten(1).norm(dim=1), **close)
        weights = weight_B[: found.examples].double()
        total = torch.einsum("b,beoi->eoi", weights, dense)
        for one in (found.weighted_sum, found.sum_in_parts, found.exact_sum):
            torch.testing.assert_close(one(weights), total, **close)
        torch.testing.assert_close(found.inner_products(total), torch.einsum("beoi,eoi->b", dense, total), **close)
        for bound_B, least in ((found.term_bound(), dense), (found.term_bound(scales), dense * scales)):
            assert bound_B is not None
            assert (bound_B >= least.flatten(1).norm(dim=1) * (1 - 1e-12)).all()


@pytest.mark.parametrize("way", [torch.Tensor.double, torch.Tensor.float])
def test_norms_of_experts_whose_terms_cancel_or_underflow_are_computed_again(way: Any):
    torch.manual_seed(0)
    factor = routed(5, 3, 2, width=(60, 70))
    a_BSI, b_BSO, expert_BS = factor.a_BSI.clone(), factor.b_BSO.clone(), factor.routes.expert_BS.clone()
    expert_BS[0, 1] = expert_BS[0, 0]  # two terms that cancel nearly, and all others are zero
    a_BSI[0, 2:], b_BSO[0, 2:] = 0.0, 0.0
    a_BSI[0, 1], b_BSO[0, 1] = a_BSI[0, 0], -b_BSO[0, 0] * (1 + 1e-4)
    a_BSI[3] *= 1e-30
    b_BSO[3] *= 1e28
    a_BSI[4] *= 0.0
    found = Routed(Routes(expert_BS, 3), way(a_BSI), way(b_BSO))
    exact = written(Routed(found.routes, found.a_BSI.double(), found.b_BSO.double())).flatten(1).norm(dim=1)
    torch.testing.assert_close(found.norms(), exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("positions", [1, 40])  # moved by products of slots, and by gradients that are written out
@pytest.mark.parametrize("dense", [False, True])
def test_outputs_of_moved_experts(dense: bool, positions: int):
    torch.manual_seed(0)
    factor = routed(positions, 4, 2)
    x_BSI, expert_BS = torch.randn(6, 7, 5, dtype=torch.float64), torch.randint(4, (6, 7))
    found = apply_routed(Dense(written(factor)) if dense else factor, x_BSI, expert_BS)
    wanted = torch.einsum("bsoi,bsi->bso", written(factor)[torch.arange(6)[:, None], expert_BS], x_BSI)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_neither_kernels_nor_reads_of_experts_grow_with_the_batch():
    torch.manual_seed(0)
    model, seen = Mixture("Mixtral"), dict[int, Counter[str]]()
    for size in (4, 16):
        x, engine = torch.randn(size, 7, WIDTH), Factored(model, losses_of)
        engine(x)
        with Dispatched() as counted:
            for factor in engine(x).values():
                factor.norms()
                factor.weighted_sum(torch.ones(size))
        seen[size] = counted.calls
    assert seen[4] == seen[16]


class Dispatched(TorchDispatchMode):
    """Counts the operations that are dispatched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


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
