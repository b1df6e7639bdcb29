"""Per-example gradients against a loop over single examples, and what the checks refuse."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.checks.model_and_loss import find_problems
from privgrad.gradient.reference import per_sample_gradients


class Tied(nn.Module):
    """Language model whose head is its embedding; used twice, named once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[:, None].expand(-1, 3, -1))[1][0])


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.inner = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


IMAGES = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
VECTORS = torch.randn(6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
TOKENS = torch.randint(0, 7, (6, 3), generator=torch.Generator().manual_seed(3))
MODELS: dict[str, tuple[Any, Tensor]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), VECTORS),
    "convolution, group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        ),
        IMAGES,
    ),
    "frozen batch norm": (lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3).eval()), VECTORS),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)), VECTORS),
    "tied": (Tied, TOKENS),
    "own parameter": (OwnParameter, VECTORS),
    "attention": (
        lambda: nn.Sequential(
            nn.Embedding(7, 4),
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        TOKENS,
    ),
    "recurrent, one by one": (Recurrent, VECTORS),
}


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_gradients_of_single_examples(name: str):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double()
    labels = torch.arange(6) % 3
    rows = per_sample_gradients(model, loss_fn, (inputs, labels))
    parameters = dict(model.named_parameters())
    assert rows.keys() == parameters.keys()
    for index in range(6):
        loss = loss_fn(model, (inputs[index : index + 1], labels[index : index + 1])).sum()
        single = torch.autograd.grad(loss, list(parameters.values()))
        for (parameter_name, row), expected in zip(rows.items(), single, strict=True):
            torch.testing.assert_close(row[index], expected, rtol=1e-9, atol=1e-12, msg=parameter_name)


def test_a_model_that_vmap_cannot_batch_says_so_once():
    model, plan = Recurrent(), make_plan(steps=2)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, engine="vmap")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in plan.batches(make_data()):
            private_grad(batch)
    assert sum("one by one" in str(one.message) for one in caught) == 1


def test_dropout_draws_one_mask_per_example():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    ones = torch.ones(8, 64)
    rows = per_sample_gradients(model, lambda m, x: m(x)[:, 0], ones)["1.weight"]
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 8


def test_a_forward_that_writes_to_a_buffer_is_refused():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.inner = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.sum()
            return self.inner(x)

    model, plan = Counts(), make_plan()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    with pytest.raises(pg.UnsupportedModuleError, match="buffers"):
        private_grad(first_batch(plan, make_data()))
    assert dict(model.named_buffers())["seen"].item() == 0
    assert private_grad.ledger.releases == 0


def test_one_examples_gradient_does_not_move_when_another_changes():
    model, (inputs, labels) = make_model(), make_data(8).tensors
    changed = inputs.clone()
    changed[1:] = 100.0
    before = per_sample_gradients(model, loss_fn, (inputs, labels))
    after = per_sample_gradients(model, loss_fn, (changed, labels))
    for name in before:
        torch.testing.assert_close(before[name][0], after[name][0])


class Observer(nn.Module):
    """Keeps a running maximum in an attribute, and divides by it: one example would scale all later ones."""

    def __init__(self, *, by_item: bool) -> None:
        super().__init__()
        self.inner, self.by_item = nn.Linear(5, 3), by_item
        self.largest: Any = torch.tensor(1e-3)
        self.history: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().abs().max()
        self.largest = max(float(self.largest), now.item()) if self.by_item else torch.maximum(self.largest, now)
        self.history.append(now)
        return self.inner(x / self.largest)


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.filterwarnings("ignore:the forward pass changed")
@pytest.mark.parametrize("by_item", [True, False])
@pytest.mark.parametrize("chunk", [32, 1])
def test_state_left_on_modules_ties_no_examples_and_leaves_nothing(by_item: bool, chunk: int):
    model, (inputs, labels) = Observer(by_item=by_item), make_data().tensors
    changed = inputs.clone()
    changed[0] = 100.0
    sums: list[Tensor] = []
    for data in (inputs, changed):
        parts = zip(data.split(chunk), labels.split(chunk), strict=True)
        rows = [per_sample_gradients(model, loss_fn, part)["inner.weight"] for part in parts]
        sums.append(torch.cat(rows)[1:].sum(0))
    torch.testing.assert_close(sums[0], sums[1])
    assert float(model.largest) == pytest.approx(1e-3)
    assert model.history == []


class Initialising(nn.Module):
    """Centres its bias on the first batch it sees, as ActNorm does, and keeps an example in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.inner = nn.Linear(5, 3)
        self.register_buffer("last", torch.zeros(5))
        self.started = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            self.bias.data.copy_(-x.detach().mean(0))
            self.started = True
        self.last = x.detach()[0]
        return self.inner(x + self.bias)


def test_what_a_first_forward_writes_does_not_stay():
    model, plan = Initialising(), make_plan(sample_rate=1.0, expected_batch_size=32)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    with pytest.warns(UserWarning, match="changed started"), pytest.raises(pg.PrivacyError, match="other examples"):
        private_grad(first_batch(plan, make_data()))
    assert model.bias.abs().sum().item() == 0
    assert dict(model.named_buffers())["last"].abs().sum().item() == 0
    assert not model.started
    assert private_grad.ledger.releases == 0


def test_parameters_without_a_real_type_are_refused():
    model = make_model()
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(pg.UnsupportedModuleError, match="complex64"):
        pg.PrivateGradient(model, loss_fn, make_plan())


MIXING_MODULES = {
    "batch norm": nn.BatchNorm1d(5),
    "batch norm without statistics, in eval": nn.BatchNorm1d(5, track_running_stats=False).eval(),
    "instance norm with running statistics": nn.InstanceNorm1d(5, track_running_stats=True),
    "lazy": nn.LazyLinear(3),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", MIXING_MODULES)
def test_modules_that_mix_are_refused_by_path(name: str):
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(MIXING_MODULES[name]))
    with pytest.raises(pg.UnsupportedModuleError, match=r"'1\.0'.*;"):
        pg.PrivateGradient(model, loss_fn, make_plan())
    assert [problem.path for problem in find_problems(model)] == ["1.0"]


def test_batch_norm_that_goes_back_to_training_is_refused_at_the_step():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3).eval())
    plan = make_plan()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    batch = first_batch(plan, make_data())
    private_grad(batch)
    model.train()
    with pytest.raises(pg.UnsupportedModuleError, match="BatchNorm1d at '1'"):
        private_grad(first_batch(plan, make_data()))
    assert private_grad.ledger.releases == 1


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(pg.UnsupportedModuleError, match="requires_grad_"):
        pg.PrivateGradient(make_model().requires_grad_(False), loss_fn, make_plan())


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def standardized(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs - inputs.mean(0)), labels, reduction="none")


BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "a scalar": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        r"one loss for each of B examples, got shape \(\); .*'none'",
    ),
    "a wrong shape": (lambda m, b: m(b[0]), "one loss per example"),
    "not a tensor": (lambda m, b: 1.0, "float"),
    "no gradient": (lambda m, b: cross_entropy(m, b).detach(), "without no_grad"),
    "centered by the batch": (standardized, "other examples"),
    "a balancing term": (lambda m, b: cross_entropy(m, b) + m(b[0]).mean(0).square().sum(), "other examples"),
    "divided by the batch size": (lambda m, b: cross_entropy(m, b) / len(b[1]), "number of examples"),
    "a sum, expanded": (lambda m, b: cross_entropy(m, b).sum().expand(len(b[1])), "other examples"),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_bad_losses_are_refused_before_anything_is_charged(name: str):
    bad, message = BAD_LOSSES[name]
    model, plan = make_model(), make_plan()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    private_grad = pg.PrivateGradient(model, bad, plan)
    with pytest.raises(pg.PrivacyError, match=message):
        private_grad(first_batch(plan, make_data()))
    assert private_grad.ledger.releases == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_mixing_loss_is_found_on_a_batch_of_one():
    plan = make_plan(sample_rate=1.0, expected_batch_size=1, num_examples=1)
    private_grad = pg.PrivateGradient(make_model(), standardized, plan)
    with pytest.raises(pg.PrivacyError, match="other examples"):
        private_grad(first_batch(plan, make_data(1)))


def test_dropout_is_not_mistaken_for_mixing():
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    plan = make_plan()
    pg.PrivateGradient(model, loss_fn, plan)(first_batch(plan, make_data()))
    assert model[1].training


def test_a_parameter_without_gradient_is_refused_by_name():
    model = make_model()
    model.register_parameter("orphan", nn.Parameter(torch.zeros(2)))
    plan = make_plan()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    with pytest.raises(pg.PrivacyError, match="no gradient for orphan"):
        private_grad(first_batch(plan, make_data()))
    assert private_grad.ledger.releases == 0
