"""Comparisons run under low and high constants in place of random numbers: no coin hides what mixes examples."""

import random
from collections.abc import Callable, Iterator
from random import choice
from random import random as imported_coin
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.checks.model_and_loss import check_loss
from privgrad.checks.randomness import Randomness, constant_draws, find_randomness, without_randomness
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import seeded, streams_kept

LOW, HIGH = 1e-4, 1 - 1e-4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3).double()


def batch(size: int = 24) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=drawn, dtype=torch.float64), torch.randint(3, (size,), generator=drawn)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


COINS: dict[str, Callable[[], Any]] = {
    "torch, rarely": lambda: torch.rand(()) < 0.01,
    "torch, above": lambda: torch.rand(1).item() > 0.9,
    "torch, an integer": lambda: torch.randint(0, 10, (1,)).item() == 9,
    "torch, by rate": lambda: torch.bernoulli(torch.tensor(0.02)),
    "torch, not kept": lambda: not torch.empty(()).bernoulli_(0.97),
    "torch, between": lambda: torch.empty(()).uniform_(-1, 1) < -0.95,
    "torch, a tail": lambda: torch.randn(()) > 2,
    "torch, a distribution": lambda: torch.distributions.Bernoulli(0.03).sample(),
    "numpy, rarely": lambda: np.random.rand() < 0.02,
    "numpy, above": lambda: np.random.uniform(0, 1) > 0.97,
    "numpy, an integer": lambda: np.random.randint(12) == 0,
    "numpy, the last integer": lambda: np.random.randint(0, 11) == 10,
    "numpy, a count": lambda: np.random.binomial(1, 0.02) == 1,
    "numpy, a choice": lambda: np.random.choice([True, False], p=[0.02, 0.98]),
    "Python, rarely": lambda: random.random() < 0.02,
    "Python, above": lambda: random.uniform(0, 2) > 1.95,
    "Python, an integer": lambda: random.randrange(20) == 0,
    "Python, the last integer": lambda: random.randint(1, 20) == 20,
    "Python, a choice": lambda: random.choice("ab" + 20 * "c") == "a",
    "Python, the second of three": lambda: random.choice("abc") == "b",
    "Python, the third of five": lambda: random.choice("abcde") == "c",
    "Python, a middle integer": lambda: random.randrange(4) == 1,
    "Python, a choice without an order": lambda: random.choice([{}, None, []]) is None,
    "numpy, a name": lambda: np.random.choice(["none", "mixup", "cutout"]) == "mixup",
    "numpy, a middle integer": lambda: np.random.randint(1, 6, size=2)[0] == 3,
    "torch, a share": lambda: torch.multinomial(torch.tensor([0.4, 0.2, 0.4]), 1).item() == 1,
    "torch, a rarer value": lambda: torch.multinomial(torch.tensor([0.3, 0.3, 0.1, 0.3]), 1).item() == 2,
    "torch, a categorical": lambda: torch.distributions.Categorical(torch.tensor([0.6, 0.2, 0.1, 0.1])).sample() == 2,
    "numpy, a rarer name": lambda: np.random.choice(["none", "mix", "cut"], p=[0.8, 0.1, 0.1]) == "mix",
    "Python, by weights": lambda: random.choices(["e", "mix", "d", "a", "c"], weights=[4, 1, 1, 1, 4])[0] == "a",
    "Python, several by weights": lambda: random.choices("abmc", weights=[4, 4, 1, 1], k=3)[1] == "m",
    "Python, imported": lambda: imported_coin() < 0.02,
    "Python, imported, above": lambda: imported_coin() > 0.98,
    "Python, an imported choice": lambda: choice("abcdefghi") == "i",
    "after another number": lambda: random.random() + np.random.rand() + torch.rand(()) < 0.05,
}
PARTNERS: dict[str, Callable[[int], Tensor]] = {
    "the opposite row": lambda size: torch.arange(size).flip(0),
    "torch's order": lambda size: torch.randperm(size),
    "numpy's order": lambda size: torch.from_numpy(np.random.permutation(size)),
    "Python's order": lambda size: torch.tensor(random.sample(range(size), size)),
}


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_a_coin_does_not_hide_a_mixup(coin: str, engine: Any):
    def mixed(model: nn.Module, examples: Any) -> Tensor:
        x, y = examples
        if model.training and COINS[coin]():
            x = 0.6 * x + 0.4 * x.flip(0)
        return loss(model, x, y)

    plan = make_plan(sample_rate=1.0, expected_batch_size=24, num_examples=24)
    private_grad = pg.PrivateGradient(model(), mixed, plan, engine=engine)
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        private_grad(next(iter(plan.batches(TensorDataset(*batch())))))
    assert private_grad.ledger.releases == 0


@pytest.mark.parametrize("partner", PARTNERS)
@pytest.mark.parametrize("low", [True, False])
def test_a_coin_does_not_hide_a_random_partner(partner: str, low: bool):
    def mixed(model: nn.Module, examples: Any) -> Tensor:
        x, y = examples
        if (np.random.rand() < 0.05) if low else (np.random.rand() > 0.95):
            x = 0.6 * x + 0.4 * x[PARTNERS[partner](len(x))]
        return loss(model, x, y)

    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        check_loss(model(), mixed, batch())


@pytest.mark.parametrize("draw", [torch.rand, lambda size: torch.from_numpy(np.random.rand(size))])
def test_a_row_that_is_rarely_mixed_is_refused(draw: Callable[[int], Tensor]):
    def mixed(model: nn.Module, examples: Any) -> Tensor:
        x, y = examples
        return loss(model, x, torch.where(draw(len(x)) < 0.01, y.roll(1), y))

    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        check_loss(model(), mixed, batch())


def masked(rate: float, *, of_batch: bool) -> Callable[[nn.Module, Any], Tensor]:
    """The loss of entries that a draw masks, as a mean over those of the example or of the batch."""

    def losses(model: nn.Module, examples: Any) -> Tensor:
        x, _ = examples
        mask = (torch.rand(x.shape) < rate).to(x.dtype)
        errors = ((model(x * (1 - mask)).repeat(1, 2) - x).square() * mask).sum(1)
        return errors / (mask.sum() if of_batch else mask.sum(1)).clamp(min=1)

    return losses


@pytest.mark.parametrize("rate", [0.15, 0.9])
def test_a_mean_over_what_is_masked_is_compared_where_something_is_masked(rate: float):
    found = find_randomness(model(), masked(rate, of_batch=True), batch(3))
    assert 0.77 in found.numbers if rate > 0.7 else LOW in found.numbers
    with pytest.raises(pg.PrivacyError, match="number of examples"):
        check_loss(model(), masked(rate, of_batch=True), batch())
    check_loss(model(), masked(rate, of_batch=False), batch())


def per_row_by_python(model: nn.Module, examples: Any) -> Tensor:
    x, y = examples
    return loss(model, torch.stack([row.flip(0) if random.random() < 0.5 else row for row in x]), y)


def noise_by_numpy(model: nn.Module, examples: Any) -> Tensor:
    x, y = examples
    return loss(model, x + torch.from_numpy(np.random.normal(0, 0.3, x.shape)), y)


def times_by_numpy(model: nn.Module, examples: Any) -> Tensor:
    x, y = examples
    return loss(model, x, y) * (1 + torch.from_numpy(np.random.choice(5, len(x), p=[0.1, 0.2, 0.3, 0.2, 0.2])))


def another_negative(model: nn.Module, examples: Any) -> Tensor:
    """Draws until the number is another one."""
    x, y = examples
    while bool((drawn := torch.randint(0, 3, y.shape)).eq(y).any()):
        y = torch.where(drawn == y, (y + 1) % 3, y)
    return loss(model, x, drawn)


def hidden_columns(model: nn.Module, examples: Any) -> Tensor:
    x, y = examples
    kept = torch.rand(x.shape).argsort(1)[:, :4]
    return loss(model, torch.zeros_like(x).scatter(1, kept, x.gather(1, kept)), y)


APART = [per_row_by_python, noise_by_numpy, times_by_numpy, another_negative, hidden_columns]


@pytest.mark.parametrize("losses", APART)
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_random_numbers_of_each_example_are_accepted(losses: Callable[[nn.Module, Any], Tensor]):
    plan = make_plan(sample_rate=1.0, expected_batch_size=24, num_examples=24, steps=4)
    for engine in ("factored", "vmap"):
        private_grad = pg.PrivateGradient(model(), losses, plan, engine=engine)
        for drawn in plan.batches(TensorDataset(*batch())):
            private_grad(drawn)
        assert private_grad.ledger.releases == 4


class Decoder(nn.Module):
    """Feeds its own words, or the given ones, by a coin that is drawn in evaluation mode too."""

    def __init__(self, coin: Callable[[], Any]) -> None:
        super().__init__()
        self.words, self.cell, self.out, self.coin = nn.Embedding(9, 5), nn.Linear(10, 5), nn.Linear(5, 9), coin

    def forward(self, ids: Tensor) -> Tensor:
        is_given, word, state = self.coin(), torch.zeros_like(ids[:, 0]), self.words(ids).mean(1)
        losses = list[Tensor]()
        for place in range(ids.shape[1]):
            state = torch.tanh(self.cell(torch.cat([state, self.words(word)], 1)))
            losses.append(F.cross_entropy(self.out(state), ids[:, place], reduction="none"))
            word = ids[:, place] if is_given else self.out(state).argmax(1)
        return torch.stack(losses, 1).mean(1)


def imported() -> bool:
    return imported_coin() < 0.5


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize(
    "coin",
    [
        lambda: random.random() < 0.5,
        imported,
        lambda: np.random.rand() < 0.5,
        lambda: random.choice([True, False]),
        lambda: np.random.randint(2) == 1,
    ],
)
def test_a_coin_for_all_examples_is_accepted_and_exact(coin: Callable[[], Any]):
    torch.manual_seed(0)
    model, ids = Decoder(coin).double(), torch.randint(0, 9, (8, 4))
    check_loss(model, lambda m, x: m(x), ids)
    engine = Factored(model, lambda m, x: m(x))
    for _ in range(2):
        engine(ids)
    own, kinds = dict(model.named_parameters()), set[float]()
    for seed in range(6):
        with seeded(seed):
            found = engine(ids)
        for index in range(len(ids)):
            with seeded(seed):
                one = model(ids[index : index + 1]).sum()
            grads = torch.autograd.grad(one, list(own.values()))
            for name, grad in zip(own, grads, strict=True):
                torch.testing.assert_close(found[name].dense()[index], grad, rtol=1e-8, atol=1e-10)
            kinds.add(round(one.item(), 6)) if index == 0 else None
    assert len(kinds) == 2  # both sides of the coin were compared


class Ragged(nn.Module):
    """Drops entries of rows without padding, whose masks follow the place of a row among all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.last, self.drop = kind, nn.Linear(6, 1), nn.Dropout(0.3)
        self.routes = nn.ModuleList(nn.Linear(4, 6) for _ in range(1 if kind == "words" else 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "words":
            mask = torch.arange(x.shape[1]) < (x[:, 0, 0].abs() * 3).long().clamp(1, 3)[:, None]
            h = x.new_zeros(*mask.shape, 6)
            h[mask] = self.drop(self.routes[0](x[mask]))
            return self.last(h.sum(1))
        rows, h = x.mean(1), x.new_zeros(len(x), 6)
        for number, route in enumerate(self.routes):
            places = ((rows[:, 0] > 0).long() == number).nonzero()[:, 0]
            h = h.index_add(0, places, self.drop(route(rows[places])))
        return self.last(h)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("kind", ["words", "routes"])
@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_dropout_of_ragged_rows_is_accepted(kind: str, engine: Any):
    plan = make_plan(sample_rate=1.0, expected_batch_size=24, num_examples=24, steps=2)
    for seed in range(3):
        torch.manual_seed(seed)
        private_grad = pg.PrivateGradient(Ragged(kind), lambda m, b: m(b[0]).square().squeeze(1), plan, engine=engine)
        for drawn in plan.batches(TensorDataset(torch.randn(24, 3, 4))):
            private_grad(drawn)
        assert private_grad.ledger.releases == 2


@pytest.fixture(params=[LOW, HIGH, 0.77])
def number(request: pytest.FixtureRequest) -> Iterator[float]:
    with streams_kept():
        yield request.param


def test_constants_stay_in_range(number: float):
    with constant_draws(number):
        for coin in (random.random, np.random.rand, imported_coin, lambda: float(torch.rand(()))):
            assert coin() == pytest.approx(number, abs=2e-5)
            assert coin() == pytest.approx(number, abs=2e-5)
        for order in (np.random.permutation(7).tolist(), random.sample(range(7), 7), torch.randperm(7).tolist()):
            assert sorted(order) == list(range(7))
            assert order != list(range(7))
        for integers in (torch.randint(3, 8, (5,)), torch.empty(5).random_(3, 8), np.random.randint(3, 8, 5)):
            assert len(set(integers.tolist())) == 1
            assert 3 <= integers[0] <= 7
        assert 3 <= random.randint(3, 7) <= 7
        rates = torch.tensor([0.0, 0.5, 1.0])
        assert torch.bernoulli(rates).tolist() == [0.0, float(number < 0.5), 1.0]
        chosen = torch.multinomial(torch.tensor([[0.0, 0.3, 0.7], [0.6, 0.4, 0.0]]), 2)
        assert chosen.tolist() == [[2, 1], [0, 1]]
        assert 2 <= float(torch.empty(()).uniform_(2, 3)) <= 3
        random.seed(3)
        np.random.seed(3)
        assert random.random() == pytest.approx(np.random.rand(), abs=1e-6) == pytest.approx(number, abs=2e-5)


def test_a_loop_that_waits_for_another_number_ends(number: float):
    with constant_draws(number):
        first = random.random(), np.random.rand(), float(torch.rand(()))
        while random.random() == first[0] or np.random.rand() == first[1]:
            pass
        while float(torch.rand(())) == first[2]:
            pass


def test_constants_leave_the_modules_and_the_streams_as_they_were():
    before = dict(vars(random)), dict(vars(np.random)), random.getstate(), torch.get_rng_state()
    with constant_draws(LOW):
        drawn = random.random(), np.random.rand(), float(torch.rand(1))
    assert max(drawn) <= LOW
    assert (dict(vars(random)), dict(vars(np.random)), random.getstate()) == before[:3]
    assert torch.equal(torch.get_rng_state(), before[3])


def test_a_part_that_is_computed_again_drops_nothing_either():
    x = torch.ones(64, requires_grad=True)
    with without_randomness(nn.Dropout(), Randomness(draws=True), 0.5):
        cast(Tensor, checkpoint(F.dropout, x, use_reentrant=False)).sum().backward(inputs=[x])
    assert cast(Tensor, x.grad).eq(1).all()
