"""Each pass sees the examples as they were, also if the loss writes to them; and random numbers of each row may stay.

Checks read the private batch again. A loss that scales its images in place would otherwise scale them once more.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.gradient.contribution import OwnExamples

N, C = 100, 0.1
IMAGES = 255 * torch.rand(N, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(1))


def in_place(model: nn.Module, batch: Any) -> Tensor:
    images, classes = batch
    images.div_(255).sub_(0.5)
    return F.cross_entropy(model(images), classes, reduction="none")


def out_of_place(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0] / 255 - 0.5), batch[1], reduction="none")


def sums(loss_fn: Any, rows: int, **options: Any) -> list[Tensor]:
    """Clipped sums of four steps with all rows: the engine checks the first, the second and the fourth."""
    torch.manual_seed(0)
    plan = make_plan(num_examples=N - 1, expected_batch_size=N - 1, sample_rate=1.0, steps=4, max_grad_norm=C)
    grad, seen = pg.PrivateGradient(nn.Linear(12, 3), loss_fn, plan, **options), []
    grad.register_raw_observer(seen.append)
    for batch in plan.batches(TensorDataset(IMAGES[:rows].clone(), CLASSES[:rows])):
        grad(batch)
    return [torch.cat([x.flatten() for x in one.raw_mean.values()]) * plan.divisor for one in seen]


@pytest.mark.parametrize("options", [{}, {"engine": "vmap"}, {"microbatch_size": 16}], ids=str)
def test_a_loss_that_writes_to_its_examples_gets_copies(options: dict[str, Any]):
    found, wanted = sums(in_place, N, **options), sums(out_of_place, N, **options)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    for one, other in zip(found, sums(in_place, N - 1, **options), strict=True):
        assert (one - other).norm() <= C * (1 + 1e-5)


def test_the_private_examples_stay_as_they_are():
    before = IMAGES.clone()
    pg.PrivateGradient(
        nn.Linear(12, 3), in_place, plan := make_plan(num_examples=N, expected_batch_size=N, sample_rate=1.0)
    )(next(iter(plan.batches(TensorDataset(IMAGES, CLASSES)))))
    assert torch.equal(IMAGES, before)


def test_a_write_that_comes_later_is_refused():
    def now_and_then(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.add_(1) if len(x) > 3 else x).squeeze(1)

    loss_fn, model = OwnExamples(now_and_then), nn.Linear(2, 1)
    loss_fn.tried(model, torch.ones(3, 2))
    with pytest.raises(pg.PrivacyError, match=r"stay as they are, got a write in place; write to a copy"):
        loss_fn(model, torch.ones(4, 2))
    given = torch.ones(4, 2)
    loss_fn(model, given)
    assert torch.equal(given, torch.ones(4, 2))


class Encoder(nn.Module):
    """A variational autoencoder, which draws in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(12, 4), nn.Linear(2, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.into(x).chunk(2, 1)
        return self.back(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def variational(model: nn.Module, x: Tensor) -> Tensor:
    output, mean, log_variance = model(x)
    return (output - x).square().sum(1) - (1 + log_variance - mean.square() - log_variance.exp()).sum(1) / 2


def diffusion(times: Callable[[int], Tensor], noise: Callable[[Tensor], Tensor] = torch.randn_like) -> Any:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        t, drawn = times(len(x))[:, None], noise(x)
        return (model(x * (1 - t) + drawn * t) - drawn).square().mean(1)

    return loss_fn


def paired(x: Tensor) -> Tensor:
    """Noise in pairs of opposite signs."""
    half = torch.randn_like(x[: len(x) // 2 + 1])
    return torch.cat([half, -half])[: len(x)]


def masked(model: nn.Module, x: Tensor) -> Tensor:
    kept = torch.rand(x.shape).argsort(1) < 6
    return (model(x * kept) - x).square().mean(1)


APART: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "variational autoencoder": (Encoder, variational),
    "diffusion": (lambda: nn.Linear(12, 12), diffusion(torch.rand)),
    "integer times": (lambda: nn.Linear(12, 12), diffusion(lambda size: torch.randint(1, 9, (size,)) / 9)),
    "random masks": (lambda: nn.Linear(12, 12), masked),
    "gumbel": (
        lambda: nn.Linear(12, 12),
        lambda model, x: (F.gumbel_softmax(model(x), hard=True) - x).square().mean(1),
    ),
}
TOGETHER: dict[str, Any] = {
    "stratified times": diffusion(lambda size: (torch.rand(1) + torch.arange(size) / size) % 1),
    "times in pairs": diffusion(lambda size: torch.cat([t := torch.rand(size // 2 + 1), 1 - t])[:size]),
    "noise in pairs": diffusion(torch.rand, paired),
    "mixup": lambda model, x: (model(x + x[torch.randperm(len(x))]) - x).square().mean(1),
    "noise of the row before": diffusion(torch.rand, lambda x: torch.randn_like(x).cumsum(0)),
}


def step(model: nn.Module, loss_fn: Any, engine: Any) -> None:
    torch.manual_seed(0)
    plan = make_plan(num_examples=40, expected_batch_size=40, sample_rate=1.0, steps=2)
    grad = pg.PrivateGradient(model, loss_fn, plan, engine=engine)
    for batch in plan.batches(TensorDataset(IMAGES[:40] / 255)):
        grad(batch)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("name", APART)
def test_random_numbers_of_each_row_train(name: str, engine: str):
    make, loss_fn = APART[name]
    step(make(), lambda model, batch: loss_fn(model, batch[0]), engine)


@pytest.mark.parametrize("only_in_training", [False, True])
@pytest.mark.parametrize("name", TOGETHER)
def test_random_numbers_that_follow_the_place_are_refused(name: str, only_in_training: bool):
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if only_in_training and not model.training:
            return (model(batch[0]) - batch[0]).square().mean(1)
        return TOGETHER[name](model, batch[0])

    with pytest.raises(pg.PrivacyError, match=r"depend on its own example|match the gradients of single"):
        step(nn.Linear(12, 12), loss_fn, "factored")
