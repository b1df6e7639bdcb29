"""Random numbers that all examples of a microbatch share are found, and refused where a batch has several of them.

Without it, one example more moves others to the next microbatch, and so to another draw.
"""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.checks.randomness import share_draws
from privgrad.gradient.probes import few_of

ROWS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(4, 4), nn.Linear(4, 1), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + getattr(self, self.kind.replace(" ", "_"))(x)).squeeze(1)

    def a_flip(self, x: Tensor) -> Tensor:
        return self.first(-x if self.training and torch.rand(()) < 0.5 else x)

    def a_flip_by_python(self, x: Tensor) -> Tensor:
        return self.first(-x if self.training and random.random() < 0.5 else x)

    def a_skipped_layer(self, x: Tensor) -> Tensor:
        return 0 * self.first(x) if self.training and torch.rand(()) < 0.5 else self.first(self.first(x))

    def stochastic_depth(self, x: Tensor) -> Tensor:
        return self.first(x) * (torch.empty(1).bernoulli_(0.5) if self.training else 1)

    def dropped_weights(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.first.weight, 0.5, self.training), self.first.bias)

    def a_layer_never_skipped(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.0 else self.first(x)

    def noise_of_each_row(self, x: Tensor) -> Tensor:
        return self.first(x + torch.randn_like(x) if self.training else x)

    def depth_of_each_row(self, x: Tensor) -> Tensor:
        return self.first(x) * (torch.empty(len(x), 1).bernoulli_(0.5) if self.training else 1)

    def dropout(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x), 0.5, self.training)

    def nothing(self, x: Tensor) -> Tensor:
        return self.first(x)


SHARED = ["a flip", "a flip by python", "a skipped layer", "stochastic depth", "dropped weights"]
APART = ["a layer never skipped", "noise of each row", "depth of each row", "dropout", "nothing"]


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square()


def step(kind: str, **options: Any) -> pg.NoisyGradient:
    torch.manual_seed(1)
    plan = make_plan(seed=3)
    private_grad = pg.PrivateGradient(Model(kind), losses, plan, **options)
    return private_grad(next(iter(plan.batches(TensorDataset(ROWS)))))


@pytest.mark.parametrize("kind", [*SHARED, *APART])
def test_shared_draws_are_found(kind: str):
    torch.manual_seed(1)
    model, few = Model(kind), few_of((ROWS,), fill=False)
    state = torch.get_rng_state()
    assert share_draws(model, losses, few) == (kind in SHARED)
    assert torch.equal(state, torch.get_rng_state())
    assert not share_draws(model.eval(), losses, few)


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("kind", SHARED)
def test_shared_draws_are_refused_in_several_microbatches(kind: str):
    with pytest.raises(
        pg.PrivacyError, match="expected random numbers that examples share to come with one microbatch"
    ):
        step(kind, microbatch_size=4)
    others: list[dict[str, Any]] = [{}, {"microbatch_size": 16}, {"microbatch_size": 4, "engine": "vmap"}]
    for options in others:
        step(kind, **options)


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_the_refusal_of_shared_draws_does_not_say_how_many_examples_were_drawn():
    messages = set[str]()
    for count in (9, 11):
        plan = make_plan(sample_rate=1.0, expected_batch_size=9, num_examples=9)
        private_grad = pg.PrivateGradient(Model(SHARED[0]), losses, plan, microbatch_size=5)
        with pytest.raises(pg.PrivacyError) as refused:
            private_grad(next(iter(plan.batches(TensorDataset(ROWS[:count])))))
        messages.add(str(refused.value))
    assert len(messages) == 1


@pytest.mark.parametrize("kind", APART)
def test_other_draws_may_come_in_several_microbatches(kind: str):
    step(kind, microbatch_size=4)
