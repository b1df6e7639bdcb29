"""A use of a parameter that first appears at a later step is computed for each example, and moves no bound."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.private_gradient import RawStep

pytestmark = [
    pytest.mark.filterwarnings("ignore:PrivateGradient computes"),
    pytest.mark.filterwarnings("ignore:vmap cannot batch this model"),
]
BOUND, COUNT = 0.3, 9


def added(m: "Routed", h: Tensor, at: Tensor) -> Tensor:
    return h.index_add(0, at, m.routed(h[at]))


def scattered(m: "Routed", h: Tensor, at: Tensor) -> Tensor:
    return h.scatter_add(0, at[:, None].expand(-1, 8), m.routed(h[at]))


def put(m: "Routed", h: Tensor, at: Tensor) -> Tensor:
    return h.index_put((at,), m.token.expand(len(at), 8))


def assigned(m: "Routed", h: Tensor, at: Tensor) -> Tensor:
    h = h.clone()
    h[at] = m.routed(h[at])
    return h


def copied(m: "Routed", h: Tensor, at: Tensor) -> Tensor:
    return h.index_copy(0, at, m.routed(h[at]) * m.token)


def looped(m: "Routed", h: Tensor, at: Tensor) -> Tensor:
    rows = [m.routed(row) if index in at.tolist() else row for index, row in enumerate(h)]
    return torch.stack(rows)


WAYS = [added, scattered, put, assigned, copied, looped]


class Routed(nn.Module):
    """Sends the rows with a large first number through a layer of their own."""

    def __init__(self, way: Callable[["Routed", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.routed, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.token, self.way = nn.Parameter(torch.ones(8)), way

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        at = (x[:, 0] > 2).nonzero()[:, 0]
        h = self.way(self, h, at) if len(at) else h
        return self.last(h) + 0 * self.routed(h).sum(1, keepdim=True) + 0 * (h * self.token).sum(1, keepdim=True)


def losses_of(model: nn.Module, examples: Any) -> Tensor:
    return F.cross_entropy(model(examples[0]), examples[1], reduction="none")


def rows(*routed: int, count: int = COUNT) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, generator=drawn, dtype=torch.float64).clamp(-1.5, 1.5)
    for row in routed:
        x[row, 0] = 3.0
    return x, torch.randint(0, 3, (count,), generator=drawn)


def sums_of(model: nn.Module, batches: list[tuple[Tensor, ...]], **options: Any) -> list[dict[str, Tensor]]:
    """Return the clipped sums of steps, and require that each was charged once."""
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=len(batches),
        expected_batch_size=COUNT,
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        num_examples=COUNT - 1,
    )
    private_grad, seen = pg.PrivateGradient(model, losses_of, plan, **options), list[RawStep]()
    private_grad.register_raw_observer(seen.append)
    for batch in batches:
        private_grad(next(iter(plan.batches(TensorDataset(*batch)))))
    assert private_grad.ledger.releases == len(batches)
    return [{name: value.double() * plan.divisor for name, value in one.raw_mean.items()} for one in seen]


def looped_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    own = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in own.items()}
    for index in range(len(batch[0])):
        losses = losses_of(model, [leaf[index : index + 1] for leaf in batch])
        grads = torch.autograd.grad(losses.sum(), list(own.values()), allow_unused=True, materialize_grads=True)
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        for name, grad in zip(own, grads, strict=True):
            total[name] += grad * min(1.0, BOUND / norm)
    return total


@pytest.mark.parametrize("microbatch_size", [None, 4])
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_first_routed_at_a_later_step_are_exact(way: Any, microbatch_size: int | None):
    torch.manual_seed(0)
    model, usual, routed = Routed(way).double(), rows(), rows(COUNT - 1)
    batches = [usual, usual, usual, routed, usual, rows(0, 4)]
    for found, batch in zip(sums_of(model, batches, microbatch_size=microbatch_size), batches, strict=True):
        for name, wanted in looped_sum(model, batch).items():
            torch.testing.assert_close(found[name], wanted, atol=1e-8, rtol=1e-8)


def test_all_examples_of_a_step_are_computed_in_one_way():
    """The sum of float32 gradients is, bit for bit, that of a model that was taken whole from the start."""
    sums = list[dict[str, Tensor]]()
    for batches in ([rows()] * 3 + [rows(COUNT - 1)], [rows(1)] * 3 + [rows(COUNT - 1)]):
        torch.manual_seed(0)
        singles = [(x.float(), y) for x, y in batches]
        sums.append(sums_of(Routed(added), singles, microbatch_size=4)[-1])
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


@pytest.mark.parametrize("way", WAYS)
def test_batches_with_and_without_the_first_routed_row_differ_by_the_bound(way: Any):
    both = list[Tensor]()
    for last in (rows(COUNT - 1), rows(count=COUNT)):
        torch.manual_seed(0)
        kept = COUNT if float(last[0][-1, 0]) > 2 else COUNT - 1
        last = tuple(leaf[:kept] for leaf in last)
        batches = [(x.float(), y) for x, y in [rows()] * 3 + [last]]
        found = sums_of(Routed(way), batches, microbatch_size=4)[-1]
        both.append(torch.cat([value.flatten() for value in found.values()]))
    assert float((both[0] - both[1]).norm()) <= 1.005 * BOUND


def test_random_draws_of_a_step_that_starts_again_are_those_of_the_step():
    """Dropout draws from the step's secret key, so that a second attempt draws the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), Routed(added)).double()
    batches = [rows(), rows(), rows(), rows(COUNT - 1), rows()]
    for found in sums_of(model, batches, microbatch_size=4):
        assert all(bool(value.isfinite().all()) for value in found.values())
