"""Rows of an example that are apart: several views in one forward pass, against a loop over single examples."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.engine.factored import Factored
from privgrad.gradient.factor import Factor
from privgrad.gradient.reference import per_sample_gradients

pytestmark = pytest.mark.filterwarnings("ignore:vmap cannot batch this model")  # the reference

Loss = Callable[[Any, Any], Tensor]
EXAMPLES = 7


def numbers(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, dtype=torch.float64)


def labels() -> Tensor:
    return torch.randint(3, (EXAMPLES,))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def conv() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)
    return nn.Sequential(*layers)


class Text(nn.Module):
    """A language model with attention, a learned position, a time-first LSTM and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 20)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.block(self.words(ids) + self.places)
        return self.head(self.lstm(h.transpose(0, 1))[0].transpose(0, 1))


def siamese(model: Any, batch: Any) -> Tensor:
    one, other = model(torch.cat([batch[0][:, 0], batch[0][:, 1]])).chunk(2)
    return 1 - F.cosine_similarity(one, other.detach()) + F.cross_entropy(one, batch[1], reduction="none")


def three_losses(model: Any, batch: Any) -> Tensor:
    """Three views with a loss each, and the same layers on rows that are side by side."""
    x, y = batch
    one, other, noisy = model(torch.cat([x[:, 0], x[:, 1], x[:, 0] + 0.1 * x[:, 1]])).chunk(3)
    pairs = model(x.flatten(0, 1)).unflatten(0, (-1, 2))
    return (one * other).sum(1).square() + F.cross_entropy(noisy, y, reduction="none") + pairs.square().sum((1, 2))


def frames_of_views(model: Any, batch: Any) -> Tensor:
    """Two views of two frames each: groups of neighbors that are apart."""
    x, y = batch
    one, other = model(torch.cat([x.flatten(0, 1), 2 * x.flip(1).flatten(0, 1)])).chunk(2)
    one, other = one.unflatten(0, (-1, 2)).mean(1), other.unflatten(0, (-1, 2)).mean(1)
    return F.cross_entropy(one, y, reduction="none") + (one * other).sum(1)


def preferences(model: Any, batch: Any) -> Tensor:
    ids = torch.cat(batch)
    chosen, rejected = model(ids).log_softmax(2).gather(2, ids[..., None]).sum((1, 2)).chunk(2)
    return -F.logsigmoid(chosen - rejected) - 0.1 * chosen


def unequal_views(model: Any, batch: Any) -> Tensor:
    """FixMatch with two unlabeled rows for each labeled one: no order that all rows of examples share."""
    x, y, unlabeled = batch
    logits = model(torch.cat([x, unlabeled.flatten(0, 1)]))
    return F.cross_entropy(logits[: len(x)], y, reduction="none") + logits[len(x) :].unflatten(
        0, (len(x), 2)
    ).square().sum((1, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], tuple[Tensor, ...]]]] = {
    "two views": (mlp, siamese, lambda: (numbers(2, 5), labels())),
    "three views": (mlp, three_losses, lambda: (numbers(2, 5), labels())),
    "views of frames": (mlp, frames_of_views, lambda: (numbers(2, 5), labels())),
    "images": (conv, siamese, lambda: (numbers(2, 2, 5, 5), labels())),
    "texts": (Text, preferences, lambda: (torch.randint(20, (EXAMPLES, 5)), torch.randint(20, (EXAMPLES, 5)))),
}


def make(name: str) -> tuple[nn.Module, Loss, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    build, loss_fn, batch = CASES[name]
    return build().double(), loss_fn, batch()


def assert_rows(factors: dict[str, Factor], rows: dict[str, Tensor]) -> None:
    for name, wanted in rows.items():
        torch.testing.assert_close(factors[name].dense(), wanted, rtol=1e-8, atol=1e-8)
        norms = wanted.flatten(1).norm(dim=1)
        torch.testing.assert_close(factors[name].norms(), norms, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_views_are_exact_and_fast(name: str):
    model, loss_fn, batch = make(name)
    engine = Factored(model, loss_fn)
    assert_rows(engine(batch), per_sample_gradients(model, loss_fn, batch))
    assert all(use.way in ("rule", "copies") for use in engine.uses().values())
    fewer = tuple(x[:4] for x in batch)
    assert_rows(engine(fewer), per_sample_gradients(model, loss_fn, fewer))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["two views", "three views", "images"])
def test_views_at_displaced_parameters(name: str, exact: bool):
    model, loss_fn, batch = make(name)
    first = per_sample_gradients(model, loss_fn, batch)
    norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in first.values()]).norm(dim=0)
    along = {n: 0.1 * rows / norms.view(-1, *[1] * (rows.dim() - 1)) for n, rows in first.items()}
    wanted = per_sample_gradients(model, loss_fn, batch, along=along, exact=exact)
    found = Factored(model, loss_fn).moved(batch, 0.1, exact=exact)
    for parameter, rows in wanted.items():
        torch.testing.assert_close(found[parameter].dense(), rows, rtol=1e-8, atol=1e-8)


def test_views_of_unequal_size_are_taken_whole():
    torch.manual_seed(0)
    model, batch = mlp().double(), (numbers(5), labels(), numbers(2, 5))
    engine = Factored(model, unequal_views)
    found = engine(batch)
    assert {use.way for use in engine.uses().values()} == {"whole"}
    assert_rows(found, per_sample_gradients(model, unequal_views, batch))


def test_categories_that_are_equal_by_chance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, 3), nn.Tanh()).double()
    weights = torch.linspace(1, 2, 3, dtype=torch.float64)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        one, other = model(torch.cat([batch[0], batch[1]])).chunk(2)
        return ((one - 2 * other) * weights).sum(1).square()

    one, other = torch.tensor([0, 0, 1, 1, 0, 1, 0]), torch.tensor([0, 1, 1, 0, 0, 0, 1])
    for batch in ((one, other), (torch.ones_like(one), torch.ones_like(one))):  # all examples may be equal
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_rows(Factored(model, loss_fn)(batch), per_sample_gradients(model, loss_fn, batch))
