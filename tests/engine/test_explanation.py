"""explain() says how each gradient is computed, what the loss does not use, and what a step costs."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import privgrad as pg
from conftest import make_plan
from privgrad.engine.explanation import parts_of
from privgrad.engine.factored import Factored
from privgrad.gradient.reference import Vmap


class Net(nn.Module):
    """A rule, copies of a parameter, a part that is taken whole, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 8), nn.Parameter(torch.ones(8))
        self.repeated, self.unused = nn.Embedding(4, 8), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        return x + torch.cat([self.repeated(torch.zeros(1, dtype=torch.long))] * len(x))


class Scaled(nn.Module):
    """A parameter that meets the examples in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def losses(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().sum(1)


def dense_losses(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), torch.zeros(len(batch[0]), 8), reduction="none").sum(1)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_parts_reasons_and_costs():
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(16, 6),)
    with torch.no_grad():
        before = {name: p.clone() for name, p in model.named_parameters()}
    found = pg.explain(model, losses, batch)
    assert found.unused == ["unused.weight", "unused.bias"]
    assert all(p.requires_grad and p.equal(before[name]) for name, p in model.named_parameters())
    assert found.examples == 16
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    assert [part.path for part in found.slow] == [part.path for part in found.parts if part.way != "rule"]
    for cost in (found.seconds, found.peak_mb):
        assert cost.keys() == {"ordinary", "private"}
        assert min(cost.values()) > 0
    whole = [part for part in found.slow if part.way == "whole"]
    assert [(part.path, part.kind, len(part.parameters)) for part in whole] == [("", "Net", 4)]
    assert whole[0].why == "the uses of parameter 'repeated.weight' in cat must keep examples apart"
    for words in (
        "by itself",
        "unused.weight",
        "examples like these",
        "without noise and optimizer",
        "Python's overhead",
    ):
        assert words in str(found)
    assert 0 < found.ratios[0] <= found.ratios[1]


def test_copies_name_their_functions():
    model = nn.Sequential(nn.Linear(6, 8), Scaled())
    found = pg.explain(model, dense_losses, (torch.randn(5, 6),))
    (slow,) = found.slow
    assert (slow.path, slow.way, slow.why, slow.remedy) == ("1", "copies", "mul", "")
    assert slow.parameters == ("1.scale",)
    assert "- 1.scale, 12.5%" in str(found)
    assert [part.way for part in found.parts] == ["copies", "rule"]
    assert found.unused == []


def test_a_training_explains_its_last_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Scaled())
    data = torch.utils.data.TensorDataset(torch.randn(8, 6))
    for engine in ("factored", "vmap"):
        plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8)
        private_grad = pg.PrivateGradient(model, dense_losses, plan, engine=engine)  # pyright: ignore[reportArgumentType]
        if engine == "factored":
            with pytest.raises(pg.PrivacyError, match=r"privgrad\.explain\(model"):
                private_grad.explain()
        private_grad(next(iter(plan.batches(data))))
        ways = {part.path: part.way for part in private_grad.explain().parts}
        assert ways == ({"0": "rule", "1": "copies"} if engine == "factored" else {"": "whole"})
        assert isinstance(private_grad._engine, Vmap) == (engine == "vmap")
    found = pg.explain(model, dense_losses, (torch.randn(5, 6),), engine="vmap")
    assert found.rows()[0]["names"] == "the whole model"
    assert len(found.rows()) == 1


def test_private_batches_and_refused_models():
    plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8)
    data = torch.utils.data.TensorDataset(torch.randn(8, 6))
    model = nn.Sequential(nn.Linear(6, 8), Scaled())
    for function in (pg.explain, pg.freeze_unused):
        with pytest.raises(pg.PrivacyError, match=r"to hold examples, got 0\."):
            function(model, dense_losses, (torch.randn(0, 6),))
    with pytest.raises(pg.PrivacyError, match="to be public"):
        pg.explain(model, dense_losses, next(iter(plan.batches(data))))
    with pytest.raises(pg.PrivacyError, match="expected public_batch to be given, got None"):
        pg.explain(model, dense_losses)
    with pytest.raises(pg.PrivacyError, match="own example"):
        pg.explain(model, lambda m, b: dense_losses(m, b) / dense_losses(m, b).sum(), (torch.randn(5, 6),))
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_alone_has_all_its_problems_listed():
    hooked = nn.Linear(8, 8)
    hooked.weight.register_hook(lambda grad: grad)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), hooked, nn.BatchNorm1d(8))
    for found in (pg.explain(model), pg.explain(model, dense_losses, (torch.randn(5, 6),))):
        assert [problem.path for problem in found.problems] == ["1", "2", "3"]
        first, second, last = str(found).splitlines()
        assert first.startswith("- 1, 3: BatchNorm1d mixes the examples")
        assert "privgrad.fix(model)" in first
        assert second.startswith("- 2: Linear has a hook on weight")
        assert last == "3 modules prevent private training"
    (line,) = str(pg.explain(nn.Linear(6, 8))).splitlines()
    assert line.startswith("nothing in the model's structure prevents private training; explain(model, loss_fn, ")


class Sign(torch.autograd.Function):
    """The sign of a weight, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Signs(nn.Linear):
    """A linear layer of signs, by an autograd.Function or by torch functions."""

    own = True

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = self.weight
        signs = cast(Tensor, Sign.apply(weight)) if self.own else weight + (weight.sign() - weight).detach()
        return F.linear(x, signs, self.bias)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_an_autograd_function_is_named_and_its_remedy_is_fast():
    model = nn.Sequential(Signs(6, 8), nn.ReLU(), nn.Linear(8, 8))
    (slow,) = pg.explain(model, dense_losses, (torch.randn(5, 6),)).slow
    assert slow.why == "parameter '0.weight' must not be used in an autograd.Function"
    cast(Signs, model[0]).own = False
    assert pg.explain(model, dense_losses, (torch.randn(5, 6),)).slow == []


class Computes(nn.Module):
    """A layer, and a function of its output and a parameter of its own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.first, self.own, self.function = nn.Linear(6, 8), nn.Parameter(torch.randn(*shape) / 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


def ids(x: Tensor) -> Tensor:
    return (x > 0).long()


SLOW: dict[
    str, tuple[tuple[int, ...], Callable[[Any, Tensor], Tensor], str, Callable[[Any, Tensor], Tensor] | None]
] = {
    "lookup": ((90, 8), lambda m, x: m.own[ids(x)], "use F.embedding", lambda m, x: F.embedding(ids(x), m.own)),
    "einsum": ((8, 90), lambda m, x: torch.einsum("bd,de->be", x, m.own), "use F.linear", lambda m, x: x @ m.own),
    "einsum, swapped": (
        (90, 8),
        lambda m, x: torch.einsum("ed,...d->...e", m.own, x),
        "use F.linear",
        lambda m, x: F.linear(x, m.own),
    ),
    "summed product": (
        (8, 90),
        lambda m, x: (x[..., None] * m.own).sum(-2),
        "use F.linear if a dimension is summed afterwards",
        lambda m, x: F.linear(x, m.own.T),
    ),
    "list": (
        (1, 90, 8),
        lambda m, x: x[:, None] + torch.cat([m.own] * len(x)),
        "use expand or repeat instead",
        lambda m, x: x[:, None] + m.own.expand(len(x), -1, -1),
    ),
    # No remedy: nothing with a rule does the same.
    "experts": ((9, 8, 30), lambda m, x: (x[:, None, None] @ m.own).flatten(1), "", None),
    "positions": ((9, 8), lambda m, x: x[:, None] + F.embedding(torch.arange(9), m.own), "", None),
    "batched einsum": ((9, 8, 30), lambda m, x: torch.einsum("bd,edf->bef", x, m.own), "", None),
    "diagonal": ((8, 8), lambda m, x: torch.einsum("bd,dd->bd", x, m.own), "", None),
    "mask": ((9, 8), lambda m, x: x[:, None] * m.own, "use F.linear if a dimension is summed afterwards", None),
}


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("name", SLOW)
def test_a_remedy_makes_it_fast(name: str):
    torch.manual_seed(0)
    shape, function, remedy, better = SLOW[name]
    x, found = torch.randn(5, 6), list[Any]()
    for each in (function, better or function):
        model = Computes(each, *shape)
        engine = Factored(model, lambda m, x: m(x).flatten(1).square().sum(1))
        engine(x)
        found.append({part.path: part for part in parts_of(model, engine.uses())}[""])
    assert found[0].way in ("copies", "whole")
    assert found[0].remedy == remedy
    if better is not None:
        assert found[1].way == "rule" or found[1].why == "expand"


def test_small_copies_are_cheap_and_equal_parts_share_a_row():
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), Scaled())))
    found = pg.explain(model, dense_losses, (torch.randn(5, 8),))
    assert all(part.is_cheap and not part.remedy for part in found.slow)
    (row,) = found.rows()
    assert row["names"] == "2.scale, 5.scale and 3 more parameters"
    assert row["computed"] == "by a copy for each example, cheap"
    adapted = nn.Sequential(nn.Linear(8, 99).requires_grad_(False), nn.Linear(99, 8).requires_grad_(False), Scaled())
    assert pg.explain(adapted, dense_losses, (torch.randn(5, 8),)).slow[0].is_cheap


class LowRank(nn.Module):
    def __init__(self, *, is_product: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 64)), nn.Parameter(torch.randn(48, 2))
        self.is_product = is_product

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.b @ self.a).T if self.is_product else F.linear(F.linear(x, self.a), self.b)


@pytest.mark.parametrize("is_product", [True, False])
def test_weights_computed_from_others_are_named_with_a_remedy(is_product: bool):
    model = nn.Sequential(LowRank(is_product=is_product), nn.Linear(48, 8))
    found = pg.explain(model, dense_losses, (torch.randn(5, 64),))
    assert {part.way for part in found.parts} == {"rule"}
    assert [set(part.parameters) for part in found.slow] == ([{"0.a", "0.b"}] if is_product else [])
    assert ("apply them to the inputs one after another" in str(found)) == is_product


def test_a_computed_weight_with_a_closed_form_or_small_among_the_activations_is_fast():
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 48)), nn.Linear(48, 8))
    assert pg.explain(normed, dense_losses, (torch.randn(5, 64),)).slow == []
    wide = nn.Sequential(nn.Linear(64, 40_000), nn.Linear(40_000, 64), LowRank(is_product=True), nn.Linear(48, 8))
    for frozen in (wide[0].weight, wide[1].weight):
        frozen.requires_grad_(False)
    assert pg.explain(wide, dense_losses, (torch.randn(5, 64),)).slow == []


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0).expand(3, -1, -1)
        for layer in self.layers:
            x = layer(x)
        return x.sum(0)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_a_chain_of_modules_is_one_row():
    found = pg.explain(TimeFirst(), losses, (torch.randn(5, 6),))
    (row,) = found.rows()
    assert row["names"] == "'layers.0', 'layers.1' and 4 more modules"
    assert row["why"].endswith("must hold examples in dimension 0")
    assert row["remedy"] == "call it on all examples, in dimension 0 (batch_first=True)"


def test_a_recurrent_layer_says_why_it_is_slower():
    model = nn.LSTM(6, 8, batch_first=True)
    found = pg.explain(model, lambda m, x: m(x)[0].sum((1, 2)), torch.randn(4, 3, 6))
    assert found.slow == []
    assert "LSTM: privgrad's own forward pass replaces torch's faster one" in str(found)


class Routed(nn.Module):
    """Experts that the sign of the first feature chooses."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.experts, self.skips = nn.ModuleList(nn.Linear(6, 8) for _ in range(2)), skips

    def forward(self, x: Tensor) -> Tensor:
        chosen, rows = ids(x[:, 0]), x.new_zeros(len(x), 8)
        for index, expert in enumerate(self.experts):
            where = (chosen == index).nonzero()[:, 0]
            if len(where) or not self.skips:
                rows = rows.index_add(0, where, expert(x[where]))
        return rows


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_experts_without_examples():
    x = torch.randn(6, 6).abs()
    plan = make_plan(sample_rate=1.0, expected_batch_size=6, num_examples=6)
    batch = next(iter(plan.batches(torch.utils.data.TensorDataset(x))))
    assert pg.explain(Routed(skips=True), losses, (x,)).unused == ["experts.0.weight", "experts.0.bias"]
    with pytest.raises(pg.PrivacyError, match="with zero rows too"):
        pg.PrivateGradient(Routed(skips=True), losses, plan)(batch)
    assert pg.PrivateGradient(Routed(skips=False), losses, plan)(batch)["experts.0.weight"].isfinite().all()


@pytest.mark.parametrize("normalized", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_what_computes_weights_from_weights_is_named(normalized: Callable[[nn.Module], nn.Module]):
    model = nn.Sequential(normalized(nn.Linear(400, 400)), nn.Linear(400, 2))
    (row,) = pg.explain(model, lambda m, x: m(x).square().sum(1), torch.randn(8, 400)).rows()
    assert row["why"].endswith("; SpectralNorm computes the weights")
    assert row["remedy"] == "leave out SpectralNorm"
