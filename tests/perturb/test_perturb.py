"""Gradients at points of their own: both engines against a loop over single examples, for every rule and model."""

import copy
import dataclasses
import math
from functools import partial
from itertools import count
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from test_engines import MODELS, VECTORS, loss_fn
from test_rules import RULES, losses_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.engine import passes
from privgrad.engine.factored import Factored
from privgrad.engine.layers.base import register_rule
from privgrad.engine.layers.linear import Linear as LinearRule
from privgrad.engine.layers.normalization import standardized
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.factor import Dense, Factor
from privgrad.gradient.functional import differentiable, seeded
from privgrad.gradient.reference import Vmap, per_sample_gradients
from privgrad.ledger.ledger import Ledger

RADIUS = 0.3


def moved_one_by_one(model: nn.Module, x: Tensor, radius: float, *, exact: bool) -> dict[str, Tensor]:
    """The gradient of each example at theta + radius g / |g|; or g + radius H g / |g|."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]

    def gradient(leaves: list[Tensor], one: Tensor, **options: Any) -> tuple[Tensor, ...]:
        state = dict(zip(names, leaves, strict=True))
        loss = losses_of(cast(Any, lambda z: functional_call(model, state, (z,))), one).sum()
        return torch.autograd.grad(loss, leaves, **options)

    rows: list[list[Tensor]] = []
    with differentiable(twice=True):
        for i in range(len(x)):
            leaves = [model.get_parameter(name).detach().clone().requires_grad_() for name in names]
            grads = gradient(leaves, x[i : i + 1], create_graph=True)
            norm = torch.stack([g.detach().norm() for g in grads]).norm()
            along = [radius * g.detach() / norm for g in grads]
            if exact:
                phi = torch.stack([(g * v).sum() for g, v in zip(grads, along, strict=True)]).sum()
                more = torch.autograd.grad(phi, leaves, allow_unused=True, materialize_grads=True)
                rows.append([g.detach() + m for g, m in zip(grads, more, strict=True)])
            else:
                there = [(p.detach() + v).requires_grad_() for p, v in zip(leaves, along, strict=True)]
                rows.append(list(gradient(there, x[i : i + 1])))
    return {name: torch.stack([row[index] for row in rows]) for index, name in enumerate(names)}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("dtype", "tolerance", "exact"),
    [
        (torch.float64, 1e-8, False),
        (torch.float64, 1e-8, True),
        (torch.float32, 1e-4, False),
        pytest.param(torch.float32, 1e-4, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_a_loop_over_single_examples(name: str, dtype: torch.dtype, tolerance: float, exact: bool):
    torch.manual_seed(0)
    make, inputs = RULES[name]
    model = make().to(dtype)
    x = inputs(5)
    x = x.to(dtype) if x.is_floating_point() else x
    if exact and name.startswith("EmbeddingBag"):
        with pytest.raises(UnsupportedModuleError, match=r"second derivative.*mode='sam'"):
            Factored(model, losses_of).moved(x, RADIUS, exact=True)
        return
    factors, rows = (
        Factored(model, losses_of).moved(x, RADIUS, exact=exact),
        moved_one_by_one(model, x, RADIUS, exact=exact),
    )
    assert factors.keys() == rows.keys()
    for parameter, factor in factors.items():
        scale = rows[parameter].abs().max().item()
        torch.testing.assert_close(factor.dense(), rows[parameter], rtol=tolerance, atol=tolerance * max(scale, 1e-3))


class Hidden(Factor):
    """A factor of a user's own: it implements what is abstract, and hides the structure that moves need."""

    def __init__(self, inner: Factor) -> None:
        super().__init__(inner.examples, inner.shape)
        self.inner = inner

    def __getitem__(self, examples: Any) -> "Hidden":
        return Hidden(self.inner[examples])

    def dense(self) -> Tensor:
        return self.inner.dense()

    def weighted_sum(self, weight_B: Tensor) -> Tensor:  # noqa: N803
        return self.inner.weighted_sum(weight_B)

    def mask(self, kept_B: Tensor) -> "Hidden":  # noqa: N803
        return Hidden(self.inner.mask(kept_B))


@pytest.mark.parametrize("exact", [False, True], ids=["sam", "exact"])
def test_a_factor_that_is_no_linear_map_moves_written_out(exact: bool):
    class Own(nn.Linear):
        pass

    @register_rule(Own)
    class _OwnRule(LinearRule):
        def factor(self, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Factor:
            return Hidden(super().factor(layer, name, parameters, x, grad))

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Own(4, 3), nn.Tanh()).double(), torch.randn(5, 5).double()
    factors, rows = (
        Factored(model, losses_of).moved(x, RADIUS, exact=exact),
        moved_one_by_one(model, x, RADIUS, exact=exact),
    )
    for name, factor in factors.items():
        torch.testing.assert_close(factor.dense(), rows[name], rtol=1e-8, atol=1e-11)


@pytest.mark.filterwarnings("ignore:vmap cannot batch")
@pytest.mark.parametrize("exact", [False, True], ids=["sam", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_engines_agree_on_whole_models(name: str, exact: bool):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, examples = make().double(), (inputs, torch.arange(6) % 3)
    found = Factored(model, loss_fn).moved(examples, RADIUS, exact=exact)
    wanted = Vmap(model, loss_fn).moved(examples, RADIUS, exact=exact)
    assert found.keys() == wanted.keys()
    for parameter, factor in wanted.items():
        rows = factor.dense()
        scale = max(rows.abs().max().item(), 1e-3)
        torch.testing.assert_close(found[parameter].dense(), rows, rtol=1e-8, atol=1e-8 * scale)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def sums(perturb: pg.perturb.Contribution | None, examples: Any, **options: Any) -> dict[str, Tensor]:
    """The released gradient of one batch of all examples, without noise."""
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=1,
        noise_multiplier=0.0,
        max_grad_norm=options.pop("max_grad_norm", 0.5),
        num_examples=len(examples[0]),
        expected_batch_size=len(examples[0]),
        seed=0,
    )
    model = mlp()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=perturb, **options)
    (batch,) = plan.batches(TensorDataset(*examples))
    return dict(private_grad(batch))


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


EXAMPLES = (VECTORS, torch.arange(6) % 3)
ENGINES = ("factored", "vmap")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "perturb", [pg.perturb.BAM(0.0), pg.perturb.BAM(0.0, mode="exact"), pg.perturb.SAT(0.0)], ids=repr
)
def test_radius_zero_is_dp_sgd_to_the_bit(perturb: pg.perturb.Contribution, engine: str):
    assert largest_difference(sums(perturb, EXAMPLES, engine=engine), sums(None, EXAMPLES, engine=engine)) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_step_of_sat_is_dp_sgd(engine: str):
    assert (
        largest_difference(sums(pg.perturb.SAT(0.1), EXAMPLES, engine=engine), sums(None, EXAMPLES, engine=engine)) == 0
    )


def test_sam_differs_from_exact_by_the_square_of_the_radius():
    def difference(radius: float) -> float:
        modes = [sums(pg.perturb.BAM(radius, mode=mode), EXAMPLES, max_grad_norm=1e6) for mode in ("sam", "exact")]
        return largest_difference(*modes)

    plain = sums(None, EXAMPLES, max_grad_norm=1e6)
    assert largest_difference(sums(pg.perturb.BAM(0.1), EXAMPLES, max_grad_norm=1e6), plain) > 1e-3
    ratios = [difference(radius) / radius**2 for radius in (0.1, 0.05, 0.025, 0.0125)]
    assert max(ratios) < 1.3 * min(ratios) < 10


@pytest.mark.parametrize("engine", ENGINES)
def test_on_a_quadratic_loss_sam_is_exact(engine: str):
    def losses(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - 1).square().sum(1)

    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    kind = {"factored": Factored, "vmap": Vmap}[engine](model, losses)
    sam, exact = (kind.moved(EXAMPLES, 0.7, exact=exact) for exact in (False, True))
    for name, factor in sam.items():
        torch.testing.assert_close(factor.dense(), exact[name].dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sam", "exact"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_swapped_leaves_the_others_contributions(engine: str, mode: Any):
    """Each contributes by itself: the whole sum is that of the others plus its own, whoever the others are."""
    perturb = pg.perturb.BAM(0.2, mode=mode)
    other = (VECTORS.clone(), EXAMPLES[1].clone())
    other[0][2], other[1][2] = 7 * torch.randn(5, dtype=torch.float64), 0

    def contribution(examples: Any, index: int) -> dict[str, Tensor]:
        return sums(perturb, [part[index : index + 1] for part in examples], engine=engine)

    before, after = (sums(perturb, examples, engine=engine) for examples in (EXAMPLES, other))
    lost, gained = contribution(EXAMPLES, 2), contribution(other, 2)
    for name in before:
        torch.testing.assert_close(6 * (after[name] - before[name]), gained[name] - lost[name], rtol=1e-9, atol=1e-11)
    assert torch.stack([value.norm() for value in gained.values()]).norm() <= 0.5 * (1 + 1e-9)


@pytest.mark.parametrize(
    "clip", [pg.clip.Flat(), pg.clip.Automatic(), pg.clip.PerLayer({"0": 0.2, "2": 0.3})], ids=repr
)
@pytest.mark.parametrize("mode", ["sam", "exact"])
def test_engines_and_microbatches_agree_with_scales_and_every_clipping(mode: Any, clip: Any):
    values = {"0.weight": torch.rand(4, 5, dtype=torch.float64) + 0.3}
    scales = pg.Scales(values, provenance="common knowledge", source="a test")

    def made(**options: Any) -> dict[str, Tensor]:
        precondition = pg.precondition.fixed(scales)
        return sums(pg.perturb.BAM(0.2, mode=mode), EXAMPLES, clip=clip, precondition=precondition, **options)

    whole = made(engine="vmap")
    for options in (
        {"engine": "factored"},
        {"engine": "factored", "microbatch_size": 2},
        {"engine": "vmap", "microbatch_size": 4},
    ):
        assert largest_difference(made(**options), whole) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_without_a_finite_gradient_contributes_nothing(engine: str):
    broken = (VECTORS.clone(), EXAMPLES[1])
    broken[0][1] = math.nan
    without = [part[torch.arange(6) != 1] for part in EXAMPLES]
    found, wanted = sums(pg.perturb.BAM(0.2), broken, engine=engine), sums(pg.perturb.BAM(0.2), without, engine=engine)
    for name in found:
        torch.testing.assert_close(6 * found[name], 5 * wanted[name], rtol=1e-9, atol=1e-12)


def test_both_passes_draw_the_same_dropout():
    """With the same draws, moving by nothing to speak of changes nothing to speak of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    for engine in (Factored(model, loss_fn), Vmap(model, loss_fn)):
        engine(EXAMPLES)  # what is learned on the first batch is not to draw here
        engine.moved(EXAMPLES, 1e-9, exact=False)
        engine(EXAMPLES)
        assert_nothing_moves(engine, EXAMPLES, rtol=1e-6)


def assert_nothing_moves(engine: Factored | Vmap, examples: Any, *, rtol: float) -> None:
    """Under the same draws, gradients at points next to the weights are those at the weights."""
    with seeded(3):
        plain = engine(examples)
    with seeded(3):
        moved = engine.moved(examples, 1e-9, exact=False)
    for name, factor in plain.items():
        torch.testing.assert_close(moved[name].dense(), factor.dense(), rtol=rtol, atol=1e-7)


class SatByHand:
    """DP-SAT in a plain loop, without noise: what is released last decides where the next gradient is taken."""

    def __init__(self, radius: float) -> None:
        self.radius, self.last = radius, None

    def __call__(self, model: nn.Module, examples: Any) -> list[Tensor]:
        before = [p.detach().clone() for p in model.parameters()]
        if self.last is not None:
            norm = torch.stack([g.norm() for g in self.last]).norm()
            for p, g in zip(model.parameters(), self.last, strict=True):
                p.data += self.radius * g / norm
        rows = per_sample_gradients(model, loss_fn, examples)
        for p, held in zip(model.parameters(), before, strict=True):
            p.data = held
        norm_B = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
        factor_B = (0.5 / norm_B).clamp(max=1)
        self.last = [torch.einsum("b,b...->...", factor_B, r) / len(norm_B) for r in rows.values()]
        return self.last


def sat_plan(steps: int) -> pg.PrivacyPlan:
    return pg.PrivacyPlan(
        sample_rate=1.0,
        steps=steps,
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        num_examples=6,
        expected_batch_size=6,
        seed=0,
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_sat_equals_a_plain_loop_and_goes_on_from_a_checkpoint(engine: Any):
    plan, model, twin = sat_plan(6), mlp(), mlp()
    by_hand, ledger = SatByHand(0.4), Ledger()

    def start() -> tuple[pg.PrivateGradient, pg.optim.SGD]:
        private_grad = pg.PrivateGradient(
            model, loss_fn, plan, perturb=pg.perturb.SAT(0.4), engine=engine, microbatch_size=4, ledger=ledger
        )
        return private_grad, pg.optim.SGD(model.named_parameters(), lr=0.5)

    private_grad, optimizer = start()
    for step, batch in enumerate(plan.batches(TensorDataset(*EXAMPLES))):
        if step == 3:
            state = copy.deepcopy(private_grad.state_dict())
            private_grad, optimizer = start()
            private_grad.load_state_dict(state)
        optimizer.step(grad=private_grad(batch))
        for p, g in zip(twin.parameters(), by_hand(twin, EXAMPLES), strict=True):
            p.data -= 0.5 * g
    for p, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:fail changed between two steps")
def test_sat_puts_the_weights_back_whatever_happens():
    plan, model, fail = sat_plan(3), mlp(), []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        if fail and not torch.equal(next(model.parameters()), fail[0]):  # where SAT has moved them
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    private_grad = pg.PrivateGradient(model, losses, plan, perturb=pg.perturb.SAT(0.4))
    batches = plan.batches(TensorDataset(*EXAMPLES))
    private_grad(next(batches))
    before = [p.detach().clone() for p in model.parameters()]
    fail.append(before[0])
    with pytest.raises(KeyboardInterrupt):
        private_grad(next(batches))
    assert all(torch.equal(p, held) for p, held in zip(model.parameters(), before, strict=True))


def test_sat_goes_along_what_was_released_whatever_became_of_it():
    ends: list[dict[str, Tensor]] = []
    for spoil in (False, True):
        plan = sat_plan(2)
        private_grad = pg.PrivateGradient(mlp(), loss_fn, plan, perturb=pg.perturb.SAT(0.4))
        first, second = plan.batches(TensorDataset(*EXAMPLES))
        for value in private_grad(first).values():
            value.zero_() if spoil else value
        ends.append(dict(private_grad(second)))
    assert largest_difference(*ends) == 0


def test_sat_keeps_what_was_released_noise_and_all():
    plan = dataclasses.replace(sat_plan(2), noise_multiplier=1.0)
    private_grad = pg.PrivateGradient(mlp(), loss_fn, plan, perturb=pg.perturb.SAT(0.4))
    for batch in plan.batches(TensorDataset(*EXAMPLES)):
        released = private_grad(batch)
        kept = private_grad.state_dict()["perturb"]["direction"]
        assert all(torch.equal(kept[name], value) for name, value in released.items())


def test_sat_refuses_the_state_of_another_model():
    plan = sat_plan(2)
    private_grad = pg.PrivateGradient(mlp(), loss_fn, plan, perturb=pg.perturb.SAT(0.4))
    (batch, later) = plan.batches(TensorDataset(*EXAMPLES))
    private_grad(batch)
    state = private_grad.state_dict()
    state["perturb"]["direction"]["0.weight"] = torch.ones(1, 5)
    private_grad.load_state_dict(state)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        private_grad(later)
    for one, other in ((None, pg.perturb.SAT(0.4)), (pg.perturb.SAT(0.4), None)):
        saved = pg.PrivateGradient(mlp(), loss_fn, plan, perturb=one).state_dict()
        with pytest.raises(pg.PrivacyError, match="the state of perturb"):
            pg.PrivateGradient(mlp(), loss_fn, plan, perturb=other).load_state_dict(saved)


def test_a_subclass_of_sat_stays_what_it_is():
    class Counts(pg.perturb.SAT):
        is_public = False
        asked = 0

        def at(self, step: int, parameters: Any, raw_mean: Any) -> Any:
            Counts.asked += 1
            return super().at(step, parameters, raw_mean)

    plan = dataclasses.replace(sat_plan(2), noise_multiplier=1.0, delta=1e-5)
    private_grad = pg.PrivateGradient(mlp(), loss_fn, plan, perturb=Counts(0.4))
    for batch in plan.batches(TensorDataset(*EXAMPLES)):
        private_grad(batch)
    assert Counts.asked == 2
    assert private_grad.ledger.epsilon(delta=1e-5) == math.inf


def test_a_schedule_is_asked_once_a_step_for_that_step():
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.1

    plan = sat_plan(8)
    batches = list(plan.batches(TensorDataset(*EXAMPLES)))
    private_grad = pg.PrivateGradient(mlp(), loss_fn, plan, perturb=pg.perturb.BAM(schedule), microbatch_size=1)
    asked.clear()
    for batch in batches[5:]:
        private_grad(batch)
    assert asked == [5, 6, 7]


def test_runs_are_known_by_their_radii():
    assert repr(pg.perturb.BAM(1)) == repr(pg.perturb.BAM(1.0)) == "BAM(radius=1, mode='sam')"
    one, other = (pg.perturb.SAT(partial(decaying, rate=rate)) for rate in (0.5, 0.9))
    assert repr(one) == "SAT(radius=partial)"
    assert one.described(3).startswith("SAT(radius=1 to 0.25 in 3 steps, ")
    assert one.described(3) == pg.perturb.SAT([1.0, 0.5, 0.25].__getitem__).described(3)
    assert one.described(3) != other.described(3)
    ends = pg.perturb.BAM(lambda step: math.sqrt(1 - step / 3))
    assert ends.described(3) != ends.described(4)
    with pytest.raises(ValueError, match=r"math domain|nonnegative input"):
        ends.described(5)


def decaying(step: int, rate: float) -> float:
    return rate**step


def test_gradients_that_are_not_one_row_an_example_are_refused():
    class Twice(pg.perturb.Contribution):
        def gradients(self, engine: Any, examples: Any, step: int, inverse_scales: Any) -> Any:
            twice = {name: torch.cat([factor.dense()] * 2) for name, factor in engine(examples).items()}
            return {name: Dense(rows) for name, rows in twice.items()}

    with pytest.raises(pg.PrivacyError, match=r"Twice: expected gradients of '0.weight' to have one row per example"):
        sums(Twice(), EXAMPLES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision(engine: Any, dtype: torch.dtype):
    def losses(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0].to(dtype)).float(), batch[1], reduction="none")

    plan = sat_plan(1)
    (batch,) = plan.batches(TensorDataset(*EXAMPLES))
    half, double = mlp().to(dtype), mlp()
    with torch.no_grad():
        for p, held in zip(double.parameters(), half.parameters(), strict=True):
            p.copy_(held)
    bam = pg.perturb.BAM(0.3)
    found = pg.PrivateGradient(half, losses, plan, perturb=bam, engine=engine)(batch)
    wanted = pg.PrivateGradient(double, loss_fn, sat_plan(1), perturb=bam, engine=engine)(batch)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_other_masks_in_the_second_pass_are_refused(kind: Any, monkeypatch: pytest.MonkeyPatch):
    """A layer that is computed by vmap in the second pass only draws others."""
    monkeypatch.setattr(passes, "takes_displacements", lambda _: False)
    torch.manual_seed(0)
    model = LastState(kind(5, 4, num_layers=2, dropout=0.5, batch_first=True)).double()
    x = torch.randn(6, 3, 5).double()
    with pytest.raises(UnsupportedModuleError, match=r"random draws.*the same in both passes.*nn.Dropout between"):
        Factored(model, losses_of).moved(x, RADIUS, exact=False)
    Factored(model, losses_of).moved(x, RADIUS, exact=True)  # which has one forward pass
    Factored(model.eval(), losses_of).moved(x, RADIUS, exact=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_the_same_in_both_passes(kind: Any):
    torch.manual_seed(0)
    model = LastState(kind(5, 4, num_layers=2, dropout=0.5, batch_first=True)).double()
    x, engine = torch.randn(6, 3, 5).double(), Factored(model, losses_of)
    engine(x)
    assert_nothing_moves(engine, x, rtol=1e-5)


class LastState(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("exact", [False, True], ids=["sam", "exact"])
def test_checkpointed_parts(exact: bool):
    torch.manual_seed(0)
    model = nn.Sequential(
        Checkpointed(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    x = torch.randn(6, 5).double()
    found = Factored(model, losses_of).moved(x, RADIUS, exact=exact)
    cast(Checkpointed, model[0]).checkpoint = False
    wanted = moved_one_by_one(model, x, RADIUS, exact=exact)
    for name, rows in wanted.items():
        torch.testing.assert_close(found[name].dense(), rows, rtol=1e-8, atol=1e-8)


class Checkpointed(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.checkpoint = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        forward = super().forward
        return checkpoint(forward, input, use_reentrant=False) if self.checkpoint else forward(input)


def test_another_path_in_the_second_pass_is_taken_whole():
    entered = count()

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) if next(entered) % 2 else self.b(x) + self.a(x)

    model, x = Turns().double(), torch.randn(6, 5, dtype=torch.float64)
    with pytest.warns(UserWarning, match="the whole model.*the calls of layers must not depend on the examples"):
        found = Factored(model, losses_of).moved(x, RADIUS, exact=False)
    for name, factor in Vmap(model, losses_of).moved(x, RADIUS, exact=False).items():
        torch.testing.assert_close(found[name].dense(), factor.dense())


def test_sam_is_not_private():
    plan = dataclasses.replace(sat_plan(3), noise_multiplier=1.0, delta=1e-5)
    private_grad = pg.PrivateGradient(mlp(), loss_fn, plan, perturb=pg.perturb.RawSAM(0.05))
    private_grad(next(plan.batches(TensorDataset(*EXAMPLES))))
    assert private_grad.ledger.epsilon(delta=1e-5) == math.inf
    assert private_grad.epsilon(steps=1) == math.inf


@pytest.mark.parametrize("radius", [-0.1, math.nan, math.inf, "0.1", lambda step: -1.0])
@pytest.mark.parametrize("kind", [pg.perturb.BAM, pg.perturb.SAT, pg.perturb.RawSAM])
def test_a_radius_is_a_finite_number(kind: Any, radius: Any):
    with pytest.raises(pg.PrivacyError, match=f"{kind.__name__}: expected radius( at step 0)? to be a finite number"):
        kind(radius)


def test_a_schedule_gives_the_radius_of_each_step():
    perturb = pg.perturb.BAM(lambda step: 0.2 if step == 0 else 0.0)
    first = sums(perturb, EXAMPLES)
    assert largest_difference(first, sums(pg.perturb.BAM(0.2), EXAMPLES)) == 0
    assert perturb.radius(1) == 0


def test_what_is_no_perturbation_is_refused():
    with pytest.raises(pg.PrivacyError, match=r"perturb to be a Contribution, got 0\.1; give perturb.BAM"):
        pg.PrivateGradient(mlp(), loss_fn, sat_plan(1), perturb=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(pg.PrivacyError, match="mode to be 'sam' or 'exact'"):
        pg.perturb.BAM(0.1, mode="both")  # pyright: ignore[reportArgumentType]


def test_standardized_rows_have_their_derivatives():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(standardized(x, 1e-3), F.layer_norm(x, (7,), eps=1e-3))
    assert torch.autograd.gradcheck(partial(standardized, eps=1e-3), x)
    assert torch.autograd.gradgradcheck(partial(standardized, eps=1e-3), x)
