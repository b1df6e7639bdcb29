"""A batch that holds what no earlier one held is checked at once, in both engines, and rarely without need."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from privgrad.engine import factored
from privgrad.engine.factored import Factored
from privgrad.gradient.novelty import CheckSchedule, Novelty
from privgrad.gradient.probes import few_of, leading_of
from privgrad.gradient.reference import Vmap

SIZE = 16
Batch = tuple[Tensor, Tensor]


def texts(*, longest: int = 4) -> Batch:
    """Short texts, and one with `longest` words in the middle; 0 is no word."""
    words = torch.randint(1, 50, (SIZE, 20), generator=torch.Generator().manual_seed(longest))
    lengths = torch.full((SIZE, 1), 4)
    lengths[9] = longest
    return words * (torch.arange(20) < lengths), torch.arange(SIZE) % 3


def numbers(*, scale: float = 1.0, label: int = 0) -> Batch:
    x = torch.rand(SIZE, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    x[9] *= scale
    return x, torch.zeros(SIZE, dtype=torch.long).index_fill(0, torch.tensor([9]), label)


def counts(*, scale: int = 1) -> Batch:
    """Integers, which cannot be infinite: the check with infinite numbers does not see what large ones do."""
    x, labels = numbers(scale=scale)
    return (100 * x).long(), labels


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(50, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids).mean(1))


def cut_to_longest(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids[:, : int((ids != 0).sum(1).max())]), labels, reduction="none")


def unless_one_is_empty(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids), labels, reduction="none") * float((ids != 0).any(1).all())


def weighted_by_class(model: nn.Module, batch: Batch) -> Tensor:
    x, labels = batch
    weights = torch.tensor([1.0, 1.0, 50.0], dtype=torch.float64)[labels]
    return F.cross_entropy(model(x), labels, reduction="none") * weights / weights.mean()


def scaled_if_large(model: nn.Module, batch: Batch) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x / (x.max() if bool(x.max() > 900) else 100)), labels, reduction="none")


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Doubles(), nn.Linear(20, 3).double())


RARE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor], Batch, Batch]] = {
    "a long text": (Words, cut_to_longest, texts(), texts(longest=20)),
    "an empty text": (Words, unless_one_is_empty, texts(), texts(longest=0)),
    "a new class": (linear, weighted_by_class, numbers(), numbers(label=2)),
    "a large number": (linear, scaled_if_large, counts(), counts(scale=20)),
}


@pytest.mark.parametrize("name", RARE)
def test_a_rare_example_that_changes_others_is_refused_when_it_comes(name: str):
    make, losses, usual, rare = RARE[name]
    engine = Factored(make(), losses)
    for _ in range(5):
        engine(usual)
    with pytest.raises(pg.PrivacyError, match="second half of the batch"):
        engine(rare)


@pytest.mark.parametrize("place", [0, 9, SIZE - 1])
def test_a_rare_example_that_changes_others_a_little_is_refused_wherever_it_is(place: int):
    """Losses may differ by 1 %, gradients by less: so the new row and another one are compared."""

    def louder(model: nn.Module, batch: Batch) -> Tensor:
        x, labels = batch
        is_new = labels == 2
        return F.cross_entropy(model(x), labels, reduction="none") * torch.where(~is_new & is_new.any(), 1.008, 1.0)

    engine, usual = Factored(linear(), louder), numbers()
    for _ in range(5):
        engine(usual)
    with pytest.raises(pg.PrivacyError, match="match the gradients of single examples"):
        engine((usual[0].roll(place - 9, 0), usual[1].index_fill(0, torch.tensor([place]), 2)))


@pytest.mark.parametrize("name", RARE)
def test_a_smaller_batch_after_a_new_row_is_examined(name: str):
    """Row 9 of an earlier batch is no row of this one."""
    make, _, usual, rare = RARE[name]
    engine = Factored(make(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    for batch in (usual, rare):
        engine.begin_step()
        engine(batch)
    engine.begin_step()
    engine.audit(tuple(leaf[:5] for leaf in usual))


@pytest.mark.parametrize("name", RARE)
def test_the_checks_compare_the_new_row(name: str, monkeypatch: pytest.MonkeyPatch):
    make, _, usual, rare = RARE[name]

    def apart(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    compared, checked = list[list[int]](), list[Any]()
    real = factored.rows_to_check
    monkeypatch.setattr(factored, "rows_to_check", lambda *inputs: compared.append(real(*inputs)) or compared[-1])
    engine = Factored(make(), apart)
    other = Vmap(make(), apart, check=lambda model, loss_fn, few: checked.append(few))
    for _ in range(5):
        engine(usual)
        other(usual)
    compared.clear()
    checked.clear()
    for _ in range(2):  # the second time, nothing is new
        engine(rare)
        other(rare)
    assert len(compared) == len(checked) == 1
    assert 9 in compared[0]
    assert any(row.equal(rare[0][9]) for row in checked[0][0])


def test_chosen_rows_hold_new_ones_in_the_second_half():
    examples = torch.arange(100.0) / 2, torch.zeros(100)
    assert (2 * leading_of(examples, 64, [70, 3])[0]).tolist()[-2:] == [70, 3]
    assert leading_of(examples, 64, [70, 3])[0].unique().numel() == 64
    assert (2 * few_of(examples, novel=[70])[0]).tolist() == [0, 70, 99]
    for size in range(1, 6):
        few = (torch.arange(float(size)) / 2,)
        for novel in range(size):
            assert leading_of(few, 64, [novel])[0].unique().numel() == size
            assert few_of(few, novel=[novel], fill=False)[0].unique().numel() == min(3, size)


def test_new_rows_are_those_with_a_new_value_or_a_record():
    seen, x = Novelty(), torch.zeros(8, 20).index_fill(1, torch.tensor([0, 1, 2]), 1.0)
    label = torch.arange(8) % 2
    assert seen.rows({"x": x, "y": label}) == []  # all is new, and the first call is checked anyway
    assert seen.rows({"x": x, "y": label}) == []
    assert seen.rows({"x": x.index_fill(0, torch.tensor(3), 2.0), "y": label}) == [3]  # fewer zeros
    assert seen.rows({"x": x.index_fill(0, torch.tensor(4), 4.1), "y": label}) == [4]  # larger by more than two
    assert seen.rows({"x": x.index_fill(0, torch.tensor(5), 8.0), "y": label}) == []
    assert seen.rows({"x": x.index_fill(0, torch.tensor(6), 0.0), "y": label}) == [6]  # more zeros
    assert seen.rows({"x": x, "y": label.index_fill(0, torch.tensor(2), 7)}) == [2]
    assert seen.rows({"x": x.index_fill(0, torch.tensor(7), torch.nan), "y": label}) == [7]
    assert seen.rows({"x": x, "y": label.index_fill(0, torch.tensor(2), 7)}) == []


@pytest.mark.parametrize(
    "leaf",
    [
        torch.zeros(0, 3),
        torch.zeros(3, 0),
        torch.zeros(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.zeros(3, 2, dtype=torch.bool),
        torch.zeros(3, 2, dtype=torch.uint8),
        torch.zeros(3, 2, dtype=torch.bfloat16),
        "text",
    ],
)
def test_all_kinds_of_examples_may_come(leaf: Any):
    seen = Novelty()
    assert seen.rows((leaf, torch.zeros(3))) == seen.rows((leaf, torch.zeros(3))) == []


TABLES: dict[str, Callable[[int], tuple[Tensor, ...]]] = {
    "ids": lambda size: (torch.randint(0, 100_000, (size, 2)), torch.randint(0, 2, (size,))),
    "ratings": lambda size: (torch.randint(0, 100_000, (size,)), torch.randint(1, 11, (size,)) / 2),
    "postcodes": lambda size: (torch.randint(1000, 9999, (size,)), torch.randn(size, 6).exp()),
    "texts": lambda size: (torch.randint(1, 999, (size, 40)) * (torch.arange(40) < torch.randint(1, 40, (size, 1))),),
    "counts": lambda size: (torch.poisson(3 * torch.rand(size, 10)), torch.randint(0, 3, (size,))),
    "categories": lambda size: (torch.randint(0, 40, (size, 16)), torch.randn(size, 14)),
    "long tails": lambda size: ((torch.rand(size) ** -1.2).long(),),
}


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("name", TABLES)
def test_at_most_twenty_more_calls_are_checked_in_a_thousand_steps(name: str, size: int):
    torch.manual_seed(size)
    schedule, more = CheckSchedule(), 0
    for step in range(1000):
        schedule.begin_step()
        schedule.begin(TABLES[name](size))
        more += schedule.is_due and step & (step + 1) != 0
        schedule.is_due = False
    assert more <= 20
    assert more <= 8 or name in ("counts", "categories", "long tails")
