"""The self-check of the fast engine: the program that trains, at random places; a refusal leaves nothing behind."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.checks.model_and_loss import check_loss
from privgrad.checks.randomness import find_randomness, without_randomness
from privgrad.engine.factored import Factored
from privgrad.gradient.reference import Vmap


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().mean(1)


class EarlierRows(nn.Module):
    """Adds a share of the sum of all earlier rows to each."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(3, 2), share

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.share * (x.cumsum(0) - x))


@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-5])
def test_losses_that_depend_on_earlier_rows_are_refused(share: float):
    torch.manual_seed(0)
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        check_loss(EarlierRows(share), squares, torch.randn(16, 3))


def test_gradients_that_depend_on_earlier_rows_are_refused():
    torch.manual_seed(0)
    with pytest.raises(pg.UnsupportedModuleError, match="single examples"):
        Factored(EarlierRows(0.1), squares)(torch.randn(16, 3))


def largest_eight(model: nn.Module, x: Tensor) -> Tensor:
    """Hard-example mining: the losses of all but eight examples are dropped."""
    losses = squares(model, x)
    kept = torch.zeros_like(losses).index_fill(0, losses.topk(min(8, len(x))).indices, 1.0)
    return losses * kept


def test_losses_of_the_largest_of_a_batch_are_refused():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(16, 3)
    with pytest.raises(pg.PrivacyError, match="second half of the batch"):
        check_loss(model, largest_eight, x)
    with pytest.raises(pg.PrivacyError, match="second half of the batch"):
        Factored(model, largest_eight)(x)


class MaskOfTheBatch(nn.Module):
    """Drops the features that are largest over the batch, if it has more than a few examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 8), DropLargest()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x))


class DropLargest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.3

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or len(x) <= 3:
            return x
        kept = torch.ones(8).index_fill(0, x.abs().sum(0).topk(2).indices, 0.0)
        return x * kept


def test_what_mixes_examples_only_while_it_drops_is_refused():
    torch.manual_seed(0)
    with pytest.raises(pg.PrivacyError, match="changes with the other examples"):
        check_loss(MaskOfTheBatch(), squares, torch.randn(32, 6))


class CenteredInTraining(nn.Module):
    """Mixes once it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_on = nn.Linear(6, 8), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x - x.mean(0) if self.training and self.is_on else x


@pytest.mark.parametrize("switch", ["mode", "flag"])
def test_a_model_that_computes_in_another_way_is_checked_again_at_once(switch: str):
    torch.manual_seed(0)
    model = CenteredInTraining()
    model.train(switch != "mode")
    model.is_on = switch != "flag"
    plan = make_plan(sample_rate=1.0, expected_batch_size=20, num_examples=20, steps=9)
    private_grad = pg.PrivateGradient(model, lambda m, batch: squares(m, batch[0]), plan)
    for step, batch in enumerate(plan.batches(TensorDataset(torch.randn(20, 6)))):
        if step < 4:
            private_grad(batch)
            continue
        model.train()
        model.is_on = True
        with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
            private_grad(batch)
        break
    assert private_grad.ledger.releases == 4


@pytest.mark.parametrize("frozen", ["0.bias", "0.weight"])
def test_a_parameter_may_be_frozen_between_steps(frozen: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    plan = make_plan(sample_rate=1.0, expected_batch_size=20, num_examples=20, steps=3)
    private_grad = pg.PrivateGradient(model, lambda m, batch: squares(m, batch[0]), plan)
    for step, batch in enumerate(plan.batches(TensorDataset(torch.randn(20, 6)))):
        model.get_parameter(frozen).requires_grad_(step != 2)
        assert (frozen in private_grad(batch)) == (step != 2)


def test_dropout_is_no_mixing():
    torch.manual_seed(0)
    check_loss(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)), squares, torch.randn(33, 6))


class Forces(nn.Module):
    """Energies and forces: a gradient is taken in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return force


def test_a_forward_pass_that_takes_a_gradient_is_checked_with_gradients():
    torch.manual_seed(0)
    check_loss(Forces(), squares, torch.randn(8, 4))


class SineOfLarge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("seed", range(12))
def test_an_outlier_whose_loss_is_rounding_refuses_no_batch(seed: int, row: int):
    torch.manual_seed(seed)
    x = torch.randn(16, 1, 8)
    x[row] *= 1e8
    check_loss(SineOfLarge(), squares, x)


class OneRowWrong(nn.Module):
    """A linear map whose gradient at one row of a large batch is partly its neighbor's; no loss tells."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(3, 2), row

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if len(x) <= 4:
            return y
        mixed = y.clone()
        neighbor = (self.row + 1) % len(x)
        mixed[neighbor] = y[neighbor] + y[self.row] - y[self.row].detach()
        return mixed


def refused_at(row: int, calls: int, size: int = 8) -> int | None:
    torch.manual_seed(0)
    engine, x = Factored(OneRowWrong(row), squares), torch.randn(size, 3)
    for call in range(1, calls + 1):
        try:
            engine(x)
        except pg.UnsupportedModuleError:
            return call
    return None


def test_the_first_and_the_last_row_are_always_audited():
    assert refused_at(-1, 1) == 1
    assert refused_at(0, 1) == 1


def test_each_audit_draws_other_rows():
    found = [refused_at(row, 4096, size=6) for row in range(1, 5)]
    assert all(call is not None for call in found)
    assert len(set(found)) > 1  # not all at once: other rows each time


def test_the_row_that_is_clipped_least_is_audited():
    """An example whose gradient is lost in a large batch is found at once, wherever it stands."""

    class Lost(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
            y = super().forward(input)
            kept = torch.arange(len(y)) % 5 != 2 if len(y) > 4 else torch.ones(len(y), dtype=torch.bool)
            return torch.where(kept[:, None], y, y.detach() + 0.0 * y)

    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(pg.UnsupportedModuleError, match="single examples"):
            Factored(Lost(3, 2), squares)(torch.randn(16, 3))


class CachesInEvaluation(nn.Module):
    """As models of transformers: evaluation mode switches on a cache, which is another program."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.seen = nn.Linear(3, 3), nn.Dropout(0.3), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if not self.training:
            self.seen.append(h)
            h = h + torch.cat(self.seen).sum(0)
        return self.drop(h)


def test_the_self_check_runs_in_training_mode():
    torch.manual_seed(0)
    model, x = CachesInEvaluation(), torch.randn(8, 3)
    check_loss(model, squares, x)
    rows = Factored(model, squares)(x)["layer.weight"].dense()
    assert rows.shape == (8, 3, 3)
    assert model.training
    assert model.drop.p == 0.3


class Path(nn.Module):
    """Drops whole examples, as stochastic depth does."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0.0:
            return x
        return x * (torch.rand(len(x), 1) > self.drop_prob) / (1 - self.drop_prob)


class DropPath(Path): ...


class Functional(nn.Module):
    def __init__(self, drop: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x), self.training)


def attended(x: Tensor, training: bool) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.4 * training)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[0]


def numpy_noise(x: Tensor, training: bool) -> Tensor:
    return x + torch.from_numpy(np.random.rand(*x.shape)).to(x.dtype) if training else x


RANDOM: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nothing": (lambda: nn.Linear(4, 2), "none"),
    "dropout of zero": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)), "none"),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), "dropout"),
    "dropout in place": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5, inplace=True)), "dropout"),
    "alpha dropout": (lambda: nn.Sequential(nn.Linear(4, 2), nn.AlphaDropout(0.5)), "dropout"),
    "functional": (lambda: Functional(lambda x, training: F.dropout(x, 0.5, training)), "dropout"),
    "torch's": (lambda: Functional(lambda x, training: torch.dropout(x, 0.5, training)), "dropout"),
    "attention": (lambda: Functional(attended), "dropout"),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True), "dropout"),
    "recurrent": (Recurrent, "dropout"),
    "stochastic depth": (lambda: nn.Sequential(nn.Linear(4, 2), DropPath(0.5)), "numbers"),
    "noise": (lambda: Functional(lambda x, training: x + training * torch.randn_like(x)), "numbers"),
    "noise of numpy": (lambda: Functional(numpy_noise), "numbers"),
    "unknown layer that drops": (lambda: nn.Sequential(nn.Linear(4, 2), Path(0.5)), "numbers"),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_layers_are_named_and_switched_off(name: str):
    make, kind = RANDOM[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, 1, 4) if name == "encoder layer" else torch.randn(6, 4)
    before = [dict(vars(module)) for module in model.modules()]
    found = find_randomness(model, squares, x)
    assert (found.draws, len(found.numbers)) == (kind != "none", 2 if kind == "numbers" else 0)
    for number in found.compared:
        with without_randomness(model, found, number), torch.no_grad():
            assert model.training
            assert torch.equal(squares(model, x), squares(model, x))
    assert [dict(vars(module)) for module in model.modules()] == before
    factors = Factored(model, squares)(x)
    assert {factor.examples for factor in factors.values()} == {6}


class Rescales(nn.Module):
    """Writes to its weights now and then, past autograd, as models that rescale for inference do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.div_(1.7)
        return self.layer(x)


def test_a_refusal_leaves_every_bit_of_the_weights():
    torch.manual_seed(0)
    for model, loss in ((Rescales(), squares), (nn.Linear(3, 2), largest_eight), (EarlierRows(0.1), squares)):
        model.register_buffer("kept", torch.randn(3))
        with torch.no_grad():
            next(model.parameters()).flatten()[0] = -0.0
        before = {name: value.clone() for name, value in model.state_dict().items()}
        private_grad = pg.PrivateGradient(
            model,
            lambda m, batch, loss=loss: loss(m, batch[0]),
            make_plan(sample_rate=1.0, expected_batch_size=16, num_examples=16),
        )
        with pytest.raises(pg.PrivacyError):
            private_grad(next(iter(private_grad.plan.batches(TensorDataset(torch.randn(16, 3))))))
        for name, value in model.state_dict().items():
            assert torch.equal(value.view(torch.int32), before[name].view(torch.int32)), name
        assert private_grad.ledger.releases == 0


@pytest.mark.parametrize("size", [3, 400])  # the larger one is compared at checked steps only
def test_a_write_to_a_frozen_parameter_is_refused_by_name(size: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 2))
    model[0].requires_grad_(False)
    engine, x = Factored(model, squares), torch.randn(16, size)
    engine(x)

    def writes(module: Any, *_: Any) -> None:
        module.weight.data.mul_(1.01)

    model[0].register_forward_pre_hook(writes)
    with pytest.raises(pg.UnsupportedModuleError, match=r"parameters not to be written.*got 0\.weight"):
        engine(x)


seen: list[torch.dtype] = []


class Seen(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        y = super().forward(input)
        seen.append(y.dtype)
        return y


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_an_ambient_autocast_reaches_the_forward_pass_and_not_the_sum(engine: Any):
    model = Seen(3, 2)
    plan = make_plan(sample_rate=1.0, expected_batch_size=16, num_examples=16)
    private_grad = pg.PrivateGradient(model, lambda m, batch: squares(m, batch[0]).float(), plan, engine=engine)
    sums: list[torch.dtype] = []
    private_grad.register_raw_observer(lambda step: sums.extend(value.dtype for value in step.raw_mean.values()))
    batches = iter(plan.batches(TensorDataset(torch.randn(16, 3))))
    compared = 2 if engine == "factored" else 1  # the first calls, which compare losses in float32 too
    for call in range(3):
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            private_grad(next(batches))
        assert set(seen) == {torch.bfloat16, *([torch.float32] if call < compared else [])}
    assert set(sums) == {torch.float32}


class Spoiled(nn.Module):
    """Mixes no finite examples: computes equal rows once; or divides rows by the largest number, if it is large."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "equal rows":
            rows, places = x.unique(dim=0, return_inverse=True)
            return self.last(self.first(rows)[places].tanh())
        if bool((x.abs() > 1e4).any()):
            x = x / x.abs().max()
        return self.last(self.first(x).tanh())


def test_a_finite_row_that_depends_on_infinite_rows_is_refused():
    torch.manual_seed(0)
    engine = Factored(Spoiled("large rows").double(), squares)
    with pytest.raises(pg.UnsupportedModuleError, match="not to depend on other examples"):
        engine(torch.randn(8, 4, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_an_example_that_is_not_finite_leaves_the_others_as_they_are(number: float):
    torch.manual_seed(0)
    model, x = Spoiled("equal rows").double(), torch.randn(8, 4, dtype=torch.float64)
    engine = Factored(model, squares)
    wanted = {name: factor.dense() for name, factor in engine(x).items()}
    x[3, 2] = number
    for name, factor in engine(x).items():
        for part in (slice(3), slice(4, None)):
            torch.testing.assert_close(factor.dense()[part], wanted[name][part])


class TransposesEight(nn.Module):
    """Computes the same in another layout for eight examples, which have eight numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.scale * x.T).T if len(x) == 8 else self.scale * x)


def test_a_batch_as_large_as_another_dimension_is_checked():
    torch.manual_seed(0)
    engine, x = Factored(TransposesEight().double(), squares), torch.randn(16, 8, dtype=torch.float64)
    for _ in range(2):
        engine(x)
    with pytest.raises(pg.UnsupportedModuleError, match="to match the gradients of single examples"):
        engine(x[:8])  # the third call: not audited


class Temperature(nn.Module):
    """A parameter without dimensions beside a layer, as the scale of CLIP's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.exp()


PERTURB: dict[str, pg.perturb.Contribution | None] = {
    "plain": None,
    "BAM": pg.perturb.BAM(0.1),
    "exact BAM": pg.perturb.BAM(0.1, "exact"),
    "SAT": pg.perturb.SAT(0.1),
}
CLIP = [pg.clip.Flat(), pg.clip.Automatic(), pg.clip.PerLayer({"scale": 1.0, "layer": 2.0})]


@pytest.mark.parametrize("clip", CLIP)
@pytest.mark.parametrize(
    "scales", [None, {"scale": torch.tensor(2.0)}, {"scale": torch.tensor(2.0), "layer.bias": 0.5}]
)
@pytest.mark.parametrize("perturb", PERTURB)
def test_parameters_without_dimensions_train_alike_in_both_engines(perturb: str, scales: Any, clip: Any):
    ends: list[dict[str, Tensor]] = []
    for engine in ("factored", "vmap"):
        torch.manual_seed(0)
        model = Temperature().double()
        plan = make_plan(seed=0, sample_rate=1.0, expected_batch_size=8, num_examples=8)
        precondition = None
        if scales is not None:
            precondition = pg.precondition.fixed(pg.Scales(scales, provenance="common knowledge", source="a test"))
        options: Any = {"engine": engine, "perturb": PERTURB[perturb], "precondition": precondition, "clip": clip}
        private_grad = pg.PrivateGradient(model, lambda m, batch: squares(m, batch[0]), plan, **options)
        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-2)
        data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        for batch, _ in zip(plan.batches(data), range(3), strict=False):
            optimizer.step(grad=private_grad(batch))
        ends.append({name: value.detach() for name, value in model.named_parameters()})
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-8, atol=1e-10)
    assert ends[0]["scale"].dim() == 0


def test_gram_and_inner_products_of_a_parameter_without_dimensions():
    x = torch.randn(5, 3, dtype=torch.float64)
    for engine in (Factored, Vmap):
        torch.manual_seed(0)
        factor = engine(Temperature().double(), squares)(x)["scale"]
        rows = factor.dense()
        torch.testing.assert_close(factor.gram(), rows[:, None] * rows[None])
        torch.testing.assert_close(factor.norms(), rows.abs())
        torch.testing.assert_close(factor.inner_products(torch.tensor(2.0, dtype=torch.float64)), 2 * rows)


class Casts(nn.Module):
    """A regression that casts its input, as most models of pixels do; `mixes` adds a mean over a batch."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.body, self.mixes = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)), mixes

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(0.5 * (x.to(torch.float32) + x.float())).squeeze(-1)
        return found + 1e-3 * found.mean() if self.mixes else found


@pytest.mark.parametrize("mixes", [False, True])
def test_a_model_that_casts_its_input_is_refused_only_if_it_is_wrong(mixes: bool):
    """Near the labels a squared error consists of rounding errors, which differ between a batch and its examples."""
    torch.manual_seed(0)
    model, inputs = Casts(mixes=mixes), torch.randint(0, 255, (100, 5))
    labels = model(inputs).detach() * (1 + 1e-5 * torch.randn(100))

    def squared(model: nn.Module, examples: Any) -> Tensor:
        return (model(examples[0]) - examples[1]).square()

    plan = make_plan(sample_rate=1.0, expected_batch_size=100, num_examples=100)
    private_grad = pg.PrivateGradient(model, squared, plan)
    batch = next(iter(plan.batches(TensorDataset(inputs, labels))))
    with pytest.raises(pg.PrivacyError) if mixes else nullcontext():
        private_grad(batch)
