"""The checks compare examples with rare values: weights of classes may mix the examples of a rare class only."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.checks.model_and_loss import check_loss
from privgrad.engine.factored import Factored
from privgrad.gradient.probes import few_of, leading_of, rare_rows

SIZE = 400


def features() -> Tensor:
    return torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0))


def labels(*positive: int) -> Tensor:
    return torch.zeros(SIZE).index_fill_(0, torch.tensor(positive, dtype=torch.long), 1.0)


def weighted(model: nn.Module, batch: Any, least: int = 1) -> Tensor:
    """Weights the positive examples by the shares of the classes in the batch, if it has enough examples."""
    logits, y = model(batch[0])[:, 0], (batch[1].flatten() > 0).float()
    weight = (y == 0).sum() / y.sum().clamp(min=1) if len(y) >= least else torch.tensor(1.0)
    return F.binary_cross_entropy_with_logits(logits, y, pos_weight=weight, reduction="none")


weighted_if_many = partial(weighted, least=5)


def weighted_by_constant(model: nn.Module, batch: Any) -> Tensor:
    logits, weight = model(batch[0])[:, 0], torch.tensor(99.0)
    return F.binary_cross_entropy_with_logits(logits, batch[1], pos_weight=weight, reduction="none")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 1)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda y: y,
    "int64": lambda y: y.long(),
    "bool": lambda y: y.bool(),
    "column": lambda y: y.double()[:, None],
    "signs": lambda y: 2 * y - 1,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [150, 399])
def test_weights_of_a_class_of_one_example_are_refused_before_a_charge(row: int, kind: str):
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        check_loss(model(), weighted, (features(), KINDS[kind](labels(row))))


def away_from_a_class(model: nn.Module, batch: Any) -> Tensor:
    """Gives examples of class 1 a margin to class 2, if the batch has one of that."""
    logits, y = model(batch[0]), batch[1]
    if (y == 2).any():
        logits = logits + 3 * (y == 1)[:, None] * F.one_hot(torch.tensor(2), 3)
    return F.cross_entropy(logits, y, reduction="none")


def hard_if_reported(model: nn.Module, batch: Any) -> Tensor:
    """Counts the errors of class 1 twice, if the batch has a reported example."""
    losses = F.cross_entropy(model(batch[0]), batch[1] % 2, reduction="none")
    return losses * torch.where((batch[2] == 1).any() & (batch[1] == 1), 2.0, 1.0)


@pytest.mark.parametrize("loss", [away_from_a_class, hard_if_reported])
@pytest.mark.parametrize("size", [64, SIZE])
@pytest.mark.parametrize("row", [5, 40, -1])
def test_what_a_rare_row_of_the_first_batch_changes_in_others_is_refused(row: int, size: int, loss: Any):
    y, reported = torch.arange(size) % 2, torch.zeros(size)
    y[row], reported[row] = 2, 1
    torch.manual_seed(0)
    with pytest.raises(pg.PrivacyError, match="losses that change with the first half of the batch"):
        check_loss(nn.Linear(5, 3), loss, (features()[:size], y, reported))


@pytest.mark.parametrize("positive", [(150,), (150, 300), (70, 71, 72, 73)])
def test_the_first_half_holds_rare_values(positive: tuple[int, ...]):
    with pytest.raises(pg.PrivacyError, match="second half of the batch"):
        check_loss(model(), weighted_if_many, (features(), labels(*positive)))


def test_the_engine_compares_an_example_with_a_rare_value():
    engine = Factored(model(), weighted_if_many)
    engine((features(), labels()))
    with pytest.raises(pg.UnsupportedModuleError, match="single examples"):
        engine((features(), labels(150)))


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_constant_weights_of_a_rare_class_are_accepted(engine: Any):
    plan = make_plan(sample_rate=1.0, expected_batch_size=SIZE, num_examples=SIZE, steps=4)
    private_grad = pg.PrivateGradient(model(), weighted_by_constant, plan, engine=engine)
    for batch in plan.batches(TensorDataset(features(), labels(150, 300))):
        private_grad(batch)
    assert private_grad.ledger.releases == 4


def test_the_first_row_of_each_rare_value_is_found_the_rarest_first():
    classes = torch.zeros(SIZE, dtype=torch.long).index_fill_(0, torch.tensor([9, 20, 90]), 7)
    classes[[30, 31]] = -1
    tags = torch.stack([labels(300), labels()], 1)
    assert rare_rows({"x": features(), "tags": tags, "class": classes}) == [300, 30, 9]


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(SIZE),
        torch.arange(SIZE),  # numbers of the rows
        features(),
        labels(150) + 0.5,
        labels(150)[:, None].expand(SIZE, 17),  # too many columns
        torch.empty(SIZE, 0),
        torch.full((SIZE,), torch.nan),
        labels(150).to(torch.complex64),
    ],
)
def test_the_rows_are_those_of_the_order_where_no_label_differs(leaf: Tensor):
    examples = torch.arange(1.0, SIZE + 1) / 2, leaf
    assert rare_rows(examples) == []
    assert leading_of(examples[:1], 64)[0].equal(examples[0][:64])
    first, _, last = (2 * few_of(examples[:1])[0]).tolist()
    assert (first, last) == (1, SIZE)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_the_chosen_rows_are_distinct(most: int, size: int):
    for place in range(size):
        rows = torch.arange(size) / 2
        examples = rows, torch.zeros(size).index_fill_(0, torch.tensor([place]), 1)
        assert leading_of(examples, most)[0].unique().numel() == min(size, most)
        for salt in range(4):
            assert few_of(examples, salt=salt, fill=False)[0].unique().numel() == min(size, 3)


class Steps(nn.Module):
    """As many steps as an example says, and at least one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor, counts: Tensor) -> Tensor:
        return torch.stack(
            [self.out([self.embed(one[k]) for k in range(int(n))][-1]) for one, n in zip(ids, counts, strict=True)]
        )


def test_a_batch_of_one_example_is_not_compared_with_an_example_of_length_zero():
    examples = torch.tensor([[1, 2, 3]]), torch.tensor([2]), torch.tensor([1])
    model = Steps()

    def loss_fn(model: nn.Module, examples: Any) -> Tensor:
        return F.cross_entropy(model(*examples[:2]), examples[2], reduction="none")

    with pytest.warns(UserWarning, match="for each example by itself"):
        found = Factored(model, loss_fn)(examples)
    assert found["embed.weight"].examples == 1


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.nanmean(0),
    "median": lambda x: x.nanmedian(0).values,
    "first known": lambda x: torch.stack([column[~column.isnan()][:1].sum() for column in x.T]) / ~x.isnan().all(0),
}


def filled(fill: Callable[[Tensor], Tensor], model: nn.Module, batch: Any) -> Tensor:
    x = torch.where(batch[0].isnan(), fill(batch[0]), batch[0])
    return F.binary_cross_entropy_with_logits(model(x)[:, 0], batch[1], reduction="none")


def lacking() -> tuple[Tensor, Tensor]:
    x, y = features(), labels(*range(0, SIZE, 2))
    x[torch.arange(40, SIZE, 97), 3] = torch.nan
    return x, y


@pytest.mark.parametrize("kind", FILLS)
def test_missing_numbers_that_the_batch_fills_in_are_refused(kind: str):
    """Alone such a row has no loss, and a comparison with NaN is false."""
    with pytest.raises(pg.PrivacyError, match=r"each loss to depend on its own example only|of single examples"):
        Factored(model(), partial(filled, FILLS[kind]))(lacking())


def test_missing_numbers_that_a_constant_fills_in_are_accepted():
    found = Factored(model(), partial(filled, lambda x: torch.zeros_like(x[0])))(lacking())
    assert found["weight"].examples == SIZE


def test_rows_that_lack_a_number_are_rare():
    x, y = lacking()
    assert rare_rows((x, y))[0] == 40
