"""The factored engine on whole models: equal to single examples, bounded, and safe where it cannot be exact."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engines import MODELS, Tied
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import clipped_sum, first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.clip.clipping import Clipping
from privgrad.engine.factored import Factored
from privgrad.engine.factors.outer import Outer
from privgrad.engine.layers import base
from privgrad.engine.layers.base import Rule, register_rule
from privgrad.engine.layers.linear import Linear as LinearRule
from privgrad.gradient.factor import Dense
from privgrad.gradient.reference import Vmap


def labeled(inputs: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, torch.arange(len(inputs)) % 3


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("name", MODELS)
def test_engines_agree_on_whole_models(name: str):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double()
    factors, rows = Factored(model, loss_fn)(labeled(inputs)), Vmap(model, loss_fn)(labeled(inputs))
    assert factors.keys() == rows.keys()
    for parameter, factor in factors.items():
        assert_equal_to_loop(factor, rows[parameter].dense(), 1e-10)


class Block(nn.Module):
    def __init__(self, wrap: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)), wrap

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wrap(self.inner, x)


def checkpointed(inner: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(inner, x, use_reentrant=False)


def test_checkpointing_changes_nothing():
    x = torch.randn(6, 5, dtype=torch.float64)
    model = Block(lambda inner, x: inner(x)).double()
    plain = {name: factor.dense() for name, factor in Factored(model, losses_of)(x).items()}
    model.wrap = checkpointed
    for name, factor in Factored(model, losses_of)(x).items():
        torch.testing.assert_close(factor.dense(), plain[name])


@pytest.mark.parametrize("perturb", [None, pg.perturb.BAM(0.1)])
@pytest.mark.parametrize("draw", [nn.Dropout(0.4), nn.AlphaDropout(0.3)])
def test_checkpointing_repeats_the_draws(draw: nn.Module, perturb: Any):
    """A part that is computed again in the backward pass has the masks of the forward pass, in checks too."""
    found: list[pg.NoisyGradient] = []
    for wrap in (lambda inner, x: inner(x), checkpointed):
        torch.manual_seed(0)
        model = Block(wrap).double()
        model.inner.insert(1, draw)
        plan = make_plan(noise_multiplier=0.0, seed=3)
        private_grad = pg.PrivateGradient(model, lambda m, b: losses_of(m, b[0].double()), plan, perturb=perturb)
        found.append(private_grad(first_batch(plan, make_data())))
    for name, value in found[0].items():
        assert value.abs().sum() > 0
        torch.testing.assert_close(found[1][name], value)


def test_reentrant_checkpointing_is_refused():
    model = Block(lambda inner, x: checkpoint(inner, x.requires_grad_(), use_reentrant=True))
    private_grad = pg.PrivateGradient(model, lambda m, batch: losses_of(m, batch[0]), make_plan())
    with pytest.raises(pg.UnsupportedModuleError, match="use_reentrant=False"):
        private_grad(first_batch(private_grad.plan, make_data()))


def test_a_compiled_model_is_run_as_it_was_written():
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    examples = make_data().tensors
    plain, other = Factored(model, loss_fn)(examples), Factored(cast(nn.Module, compiled), loss_fn)(examples)
    for name, factor in plain.items():
        torch.testing.assert_close(other[f"_orig_mod.{name}"].dense(), factor.dense())


@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.Automatic(), pg.clip.PerLayer({"0": 1.0, "2": 2.0})])
def test_microbatches_and_engines_give_the_same_release(clip: Clipping):
    data, results = make_data(), []
    runs: list[tuple[Any, int | None]] = [("factored", None), ("factored", 5), ("vmap", None)]
    for engine, microbatch_size in runs:
        batch = pg.Batch(data.tensors, 32, first_batch(make_plan(seed=0), data).sampling)
        plan = make_plan(seed=0, noise_multiplier=0.0)
        private_grad = pg.PrivateGradient(
            make_model(), loss_fn, plan, clip=clip, engine=engine, microbatch_size=microbatch_size
        )
        results.append(private_grad(batch))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_less_memory_means_smaller_parts_and_the_same_release(engine: Any, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    whole = {"factored": Factored, "vmap": Vmap}[engine]
    call = whole.__call__

    def counted(self: Any, examples: Any) -> Any:
        sizes.append(len(examples[0]))
        return call(self, examples)

    monkeypatch.setattr(whole, "__call__", counted)
    results = []
    for memory_mb in (None, 1e-4):
        sizes.clear()
        plan = make_plan(noise_multiplier=0.0, seed=0)
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, engine=engine, memory_mb=memory_mb)
        results.append(private_grad(first_batch(plan, make_data())))
        assert (len(sizes) > 1) == (memory_mb is not None)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value)
    with pytest.raises(pg.PrivacyError, match="memory_mb"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), memory_mb=0.0)


def test_bfloat16_autocast_keeps_norms_and_sums_in_float32():
    model = make_model()

    def half(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    examples = make_data().tensors
    factors, exact = Factored(model, half)(examples), Factored(model, loss_fn)(examples)
    for name, factor in factors.items():
        assert factor.dense().dtype == torch.float32
        torch.testing.assert_close(factor.dense(), exact[name].dense(), rtol=0.1, atol=0.02)
        torch.testing.assert_close(factor.norms(), factor.dense().flatten(1).norm(dim=1).double(), rtol=1e-5, atol=1e-6)


def test_dropout_draws_for_every_example_and_differs():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    rows = Factored(model, lambda m, x: m(x)[:, 0])(torch.ones(8, 64))["1.weight"].dense()
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 8


def test_nothing_is_left_on_the_model():
    model = make_model()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    Factored(model, loss_fn)(make_data().tensors)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert all(parameter.grad is None for parameter in model.parameters())


class FunctionalTying(Tied):
    """Uses the table's weight outside of the table."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.embedding(ids).mean(1), self.embedding.weight)


class TimeFirst(nn.Module):
    """Hands (time, batch, width) to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).mean(0)


class SubtractsTheMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


def assert_as_by_vmap(model: nn.Module, examples: Any) -> None:
    rows = Vmap(model, loss_fn)(examples)
    for parameter, factor in Factored(model, loss_fn)(examples).items():
        assert_equal_to_loop(factor, rows[parameter].dense(), 1e-10)


def test_a_parameter_may_be_used_outside_its_module():
    assert_as_by_vmap(FunctionalTying().double(), labeled(torch.randint(0, 7, (6, 3))))


class Prompted(nn.Module):
    """Two learned tokens before each example's own, which PEFT repeats and others broadcast."""

    def __init__(self, repeat: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.prompt, self.head, self.repeat = nn.Embedding(2, 4), nn.Linear(4, 3), repeat

    def forward(self, x: Tensor) -> Tensor:
        before = self.repeat(self.prompt(torch.arange(2).unsqueeze(0)), len(x))
        return self.head(torch.cat([before, x], 1).tanh().sum(1))


def test_what_is_repeated_for_each_example():
    examples = labeled(torch.randn(6, 3, 4, dtype=torch.float64))
    repeated, broadcast = (
        Prompted(repeat).double()
        for repeat in (lambda x, size: x.repeat(size, 1, 1), lambda x, size: x.expand(size, -1, -1))
    )
    broadcast.load_state_dict(repeated.state_dict())
    assert_as_by_vmap(repeated, examples)
    assert_as_by_vmap(broadcast, examples)


def test_an_error_of_the_backward_pass_is_not_taken_for_that():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError("no derivative here")

    model = Prompted(lambda x, size: cast(Tensor, Broken.apply(x)).expand(size, -1, -1))
    with pytest.raises(RuntimeError, match="no derivative here"):
        Factored(model, loss_fn)(labeled(torch.randn(6, 3, 4)))


@pytest.mark.parametrize("time", [2, 3, 6])
def test_time_first_data_is_right_even_where_time_equals_batch(time: int):
    with pytest.warns(UserWarning, match="'inner' must hold examples in dimension 0"):
        assert_as_by_vmap(TimeFirst().double(), labeled(torch.randn(6, time, 4, dtype=torch.float64)))


def test_subtracting_the_batch_mean_is_caught():
    examples = labeled(torch.randn(6, 5))
    with pytest.raises(pg.PrivacyError, match="second half of the batch"):
        Factored(SubtractsTheMean(), loss_fn)(examples)
    private_grad = pg.PrivateGradient(SubtractsTheMean(), loss_fn, make_plan(sample_rate=1.0, expected_batch_size=32))
    with pytest.raises(pg.PrivacyError, match="other examples"):
        private_grad(first_batch(private_grad.plan, make_data()))
    assert private_grad.ledger.releases == 0


def test_a_wrong_rule_is_caught_by_the_first_batch():
    class Doubling(nn.Linear):
        pass

    @register_rule(Doubling)
    class _Wrong(LinearRule):
        def factor(self, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Any:
            return super().factor(layer, name, parameters, x, 1.2 * grad)

    told = r"above 0\.005, relative; correct the rule that you registered, _Wrong; if it is right, use engine='vmap'"
    with pytest.raises(pg.UnsupportedModuleError, match=told):
        Factored(nn.Sequential(Doubling(5, 3)), loss_fn)(make_data().tensors)


def test_a_rule_may_read_a_number_from_a_weight():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.square()

    @register_rule(Scaled)
    class _Rule(Rule):
        parameters = ("scale",)

        def forward(self, layer: Any, parameters: Any, x: Tensor) -> Tensor:
            return x * parameters["scale"].square()

        def factor(self, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Dense:
            assert not torch.is_grad_enabled()
            return Dense((x * grad).flatten(1).sum(1) * (2 * float(parameters["scale"])))  # torch warns with a graph

    model, x = nn.Sequential(nn.Linear(5, 3), Scaled()), torch.randn(6, 5)
    rows = one_by_one(model, x)
    for name, factor in Factored(model, losses_of)(x).items():
        assert_equal_to_loop(factor, rows[name], 1e-4)


def test_a_registered_rule_is_used():
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) / 2

    @register_rule(Halved)
    class _HalvedRule(Rule):
        parameters = ("weight",)

        def forward(self, layer: Any, parameters: Any, x: Tensor) -> Tensor:
            return F.linear(x, parameters["weight"]) / 2

        def factor(self, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Outer:
            return Outer(x[:, None], grad[:, None] / 2)

    model, x = Halved(), torch.randn(6, 5)
    factor = Factored(model, losses_of)(x)["weight"]
    assert isinstance(factor, Outer)
    torch.testing.assert_close(factor.dense(), one_by_one(model, x)["weight"])


def test_an_input_changed_in_place_afterwards_is_refused():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y = self.inner(x)
            x += 1
            return y

    with pytest.raises(pg.UnsupportedModuleError, match="in place"):
        Factored(Overwrites(), losses_of)(torch.randn(6, 5))


def test_a_sequence_of_calls_that_depends_on_length_is_recorded_again():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(len(x), 4, dtype=x.dtype)
            for step in x.unbind(1):
                state = torch.tanh(self.cell(state) + step)
            return state

    tried = list[int]()

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        tried.append(x.shape[1])
        return losses_of(model, x)

    model = Loop().double()
    engine = Factored(model, losses)
    for length in (3, 5, 2) + 5 * (5, 3):
        x = torch.randn(6, length, 4, dtype=torch.float64)
        rows = one_by_one(model, x)
        for name, factor in engine(x).items():
            assert_equal_to_loop(factor, rows[name], 1e-10)
    assert tried[-5:] == [3, 5, 3, 5, 3]  # what is known of a length is not found out again


class Mixed(nn.Module):
    """Embedding, attention, convolution, norms, a tied head: every kind of factor at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.attend = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.convolve = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.attend(self.table(ids))
        return self.head(self.convolve(hidden.mT).mT).mean(1)


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("engine", [Factored, Vmap])
@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.Automatic(), pg.clip.PerLayer({"": 1.0, "table": 2.0})])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([1.0, 30.0]))
def test_neighboring_batches_differ_by_at_most_c(
    clip: Clipping, engine: Any, preconditioned: bool, seed: int, spread: float
):
    torch.manual_seed(seed)
    model = Mixed().double()
    with torch.no_grad():
        model.table.weight *= spread
    examples = (torch.randint(0, 6, (5, 4)), torch.arange(5) % 6)
    parameters = dict(model.named_parameters())
    inverse = {name: torch.rand_like(p) * 4 + 0.01 for name, p in parameters.items()} if preconditioned else None
    sums = []
    for size in (5, 4):
        chunk = engine(model, loss_fn)(tuple(x[:size] for x in examples))
        clipped, _ = clipped_sum([chunk], like=parameters, clip=clip, max_grad_norm=0.7, inverse_scales=inverse)
        sums.append(torch.cat([clipped.values[name].flatten() for name in parameters]))
    assert (sums[0] - sums[1]).norm() <= 0.7 * (1 + 1e-6)


def test_a_non_finite_example_contributes_zero_and_is_counted():
    for engine in ("factored", "vmap"):
        inputs, labels = make_data().tensors
        bad = copy.deepcopy(inputs)
        bad[3] = torch.inf
        results = []
        for data, rows in ((bad, range(32)), (inputs, [i for i in range(32) if i != 3])):
            plan = make_plan(noise_multiplier=0.0, seed=0, sample_rate=1.0, expected_batch_size=32)
            private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, engine=engine)
            sampling = first_batch(plan, TensorDataset(inputs, labels)).sampling
            chosen = list(rows)
            results.append(private_grad(pg.Batch((data[chosen], labels[chosen]), len(chosen), sampling)))
            assert private_grad.raw_nonfinite_examples == (1 if len(chosen) == 32 else 0)
        for name, value in results[0].items():
            torch.testing.assert_close(value, results[1][name])


class Seen(nn.Module):
    """A parameter of the whole model's own beside attention, as vision transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(3, 8), nn.Parameter(torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.embed(x) + self.positions).mean(1)


@pytest.mark.parametrize("training", [True, False])
def test_a_parameter_beside_attention_is_exact(training: bool):
    model, x = Seen().double().train(training), torch.randn(7, 5, 3, dtype=torch.float64)
    fast = torch.backends.mha.get_fastpath_enabled()
    factors, rows = Factored(model, losses_of)(x), one_by_one(model.train(), x)
    for name, factor in factors.items():
        assert_equal_to_loop(factor, rows[name], 1e-9)
    assert torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.parametrize("scale", [0.98, 1.02])
def test_a_rule_that_is_a_little_wrong_is_caught_too(scale: float):
    class Weighted(nn.Linear):
        pass

    @register_rule(Weighted)
    class Wrong(LinearRule):  # pyright: ignore[reportUnusedClass]
        def factor(self, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Any:
            return Outer(x[:, None], scale * grad[:, None]) if name == "weight" else Dense(grad)

    with pytest.raises(pg.UnsupportedModuleError, match="rule"):
        Factored(nn.Sequential(Weighted(4, 3), nn.Tanh()), losses_of)(torch.randn(6, 4))


def test_what_is_not_a_rule_is_refused():
    with pytest.raises(pg.PrivacyError, match=r"package\.module\.Class"):
        register_rule("Bilinear")(Rule)

    class Bare(nn.Linear):
        pass

    @register_rule(Bare)
    class NoFactor(LinearRule):  # pyright: ignore[reportUnusedClass]
        def factor(self, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Any:
            return grad

    with pytest.raises(pg.UnsupportedModuleError, match="to return a Factor"):
        Factored(Bare(4, 3), losses_of)(torch.randn(6, 4))


@pytest.mark.parametrize("wrong", [lambda x, grad: Dense(grad[:, :1]), lambda x, grad: Dense(grad @ grad)])
def test_a_rule_of_wrong_shapes_or_that_fails_is_named(wrong: Any):
    class Own(nn.Linear):
        pass

    @register_rule(Own)
    class Wrong(LinearRule):  # pyright: ignore[reportUnusedClass]
        def factor(self, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Any:
            return wrong(x, grad) if name == "bias" else super().factor(layer, name, parameters, x, grad)

    with pytest.raises(pg.UnsupportedModuleError, match=r"expected Wrong\.factor for '1' to .* 'bias', shape \(B, "):
        Factored(nn.Sequential(nn.Linear(4, 4), Own(4, 3)), losses_of)(torch.randn(6, 4))


@pytest.mark.parametrize("layer", [nn.Linear, nn.LSTM, "torch.nn.modules.linear.Linear"])
def test_a_rule_of_privgrad_is_replaced_on_request_only(layer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "_LAYERS", dict(base._LAYERS))

    class Own(LinearRule):
        pass

    with pytest.raises(pg.PrivacyError, match="replace=True"):
        register_rule(layer)(Own)
    register_rule(layer, replace=True)(Own)
    register_rule(layer)(Own)  # a user's own rule is replaced freely
    module = nn.LSTM(3, 3) if layer is nn.LSTM else nn.Linear(3, 3)
    assert base.find_forward(module) is None
    assert layer is nn.LSTM or type(base.find_rule(module)) is Own


def test_scales_are_taken_as_numbers_and_refused_with_a_reason():
    def private_grad(precondition: Any) -> pg.PrivateGradient:
        return pg.PrivateGradient(make_model(), loss_fn, make_plan(), precondition=precondition)

    def fixed(scale: Any) -> pg.precondition.Preconditioner:
        return pg.precondition.fixed(pg.Scales({"0.bias": scale}, provenance="common knowledge", source="a test"))

    private_grad(fixed(2.0))
    with pytest.raises(pg.PrivacyError, match=r"precondition\.fixed"):
        private_grad({"0.bias": torch.tensor(2.0)})
    with pytest.raises(pg.PrivacyError, match="to be Scales, with a provenance, got list"):
        pg.precondition.fixed(cast(Any, [2.0]))
    with pytest.raises(pg.PrivacyError, match="values from -1 to -1"):
        private_grad(fixed(torch.tensor(-1.0)))


class NearTie(nn.Module):
    """The larger of two sums that are equal but for rounding, which differs with the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if x.dtype == torch.float32 and len(x) > 1:
            h = h + torch.tensor([1e-6, 0.0])
        return h.max(1).values


def test_a_maximum_that_rounding_moves_is_no_reason_to_refuse():
    model = NearTie()
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 2.0], [2.0, 1.0 + 5e-7]]))
    engine = Factored(model, lambda model, x: model(x))
    found = engine(torch.ones(4, 2))["layer.weight"]
    assert found.dense().shape == (4, 2, 2)
