"""Losses in half precision are compared in float32 too, because their own tolerance hides a dependence."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from privgrad.checks.model_and_loss import check_loss, require_same_losses_in_half
from privgrad.checks.randomness import Randomness
from privgrad.types import LossFunction


class Centered(nn.Module):
    """Subtracts a share of the batch's mean."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.first, self.last = share, nn.EmbeddingBag(50, 16), nn.Linear(16, 2)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(words) * self.scale
        return self.last(x - self.share * x.mean(0))


class Quantized(nn.Module):
    """Rounds activations to eight bits with one scale for the batch, as BitLinear with a scale per tensor does."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.first, self.last = share, nn.EmbeddingBag(50, 16), nn.Linear(16, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(words)
        scale = 127 / x.detach().abs().max()
        return self.last(x + self.share * ((x * scale).round() / scale - x).detach())


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="none")


def converted(model: nn.Module, batch: Any) -> Tensor:
    """Converts its logits in all ways."""
    logits = model(batch[0]).bfloat16().half().to(torch.bfloat16).to(dtype=torch.float16)
    return F.cross_entropy(logits, batch[1], reduction="none")


WAYS: dict[str, tuple[torch.dtype, LossFunction]] = {
    "bfloat16": (torch.bfloat16, losses),
    "float16": (torch.float16, losses),
    "autocast": (torch.float32, under_autocast),
    "bfloat16 under autocast": (torch.bfloat16, under_autocast),
    "converted": (torch.bfloat16, converted),
}


def made(kind: type[Centered | Quantized], share: float, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return kind(share).to(dtype)


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(50, (64, 6), generator=generator), torch.randint(2, (64,), generator=generator)


@pytest.mark.parametrize("kind", [Centered, Quantized])
@pytest.mark.parametrize("way", WAYS)
def test_a_dependence_that_half_precision_hides_is_refused(way: str, kind: Any):
    dtype, loss = WAYS[way]
    model = made(kind, 0.05 if kind is Centered else 1.0, dtype)
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example only"):
        check_loss(model, loss, examples())


@pytest.mark.parametrize("kind", [Centered, Quantized])
@pytest.mark.parametrize("way", WAYS)
def test_losses_of_their_own_examples_are_accepted_in_half_precision(way: str, kind: Any):
    dtype, loss = WAYS[way]
    model = made(kind, 0.0, dtype)
    check_loss(model, loss, examples())
    assert {x.dtype for x in model.state_dict().values()} == {dtype}


class Insists(Centered):
    """Takes half precision only; or computes with a tensor in half precision that is no parameter."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__(0.0)
        self.raises, self.held = raises, torch.ones((), dtype=torch.bfloat16)

    def forward(self, words: Tensor) -> Tensor:
        if self.raises and self.last.weight.dtype == torch.float32:
            raise TypeError("expected half precision")
        return super().forward(words) * self.held


@pytest.mark.parametrize("raises", [True, False])
def test_a_model_that_insists_on_half_precision_is_compared_in_it_alone(raises: bool):
    torch.manual_seed(0)
    check_loss(Insists(raises=raises).bfloat16(), losses, examples())


class Overflowing(nn.Module):
    """Looks at the other examples only if one of them is too large for single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.last(x)[:, 0]
        y = z.exp()
        if y.isinf().any():
            y = (z - z.max()).exp()
        return y


def test_mixing_in_single_precision_alone_is_no_rounding():
    torch.manual_seed(0)
    model, x = Overflowing(), torch.randn(32, 4)
    x[20] = 100 * model.last.weight.detach()[0].sign() / model.last.weight.detach().abs().sum()  # exp(100) is infinite

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) + 1).log()

    with pytest.raises(pg.PrivacyError, match="the second half of the batch"):
        require_same_losses_in_half(model, loss_fn, (x,), Randomness())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_losses_of_rounding_errors_alone_are_accepted(seed: int, autocast: bool):
    torch.manual_seed(seed)
    model, x = nn.Linear(50, 1), 1000 * torch.randn(32, 50)
    y = model(x).detach() * (1 + 1e-6 * torch.randn(32, 1))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (model(batch[0]) - batch[1]).square()[:, 0]

    require_same_losses_in_half(model, loss_fn, (x, y), Randomness())


@pytest.mark.parametrize("differentiates", [False, True])
def test_half_of_a_batch_is_compared_in_little_memory(differentiates: bool):
    """As a step takes it, because a model may do other things where gradients are switched off."""
    seen = list[tuple[int, bool]]()
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 1).double(), torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1).double()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        far = model(batch[0]) - batch[1]
        losses, held = far.square()[:, 0], weakref.ref(far)
        assert torch.is_grad_enabled()
        assert losses.requires_grad
        del far
        seen.append((len(batch[0]), held() is not None))
        if not differentiates:
            return losses
        at = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        return slope.square().sum(1) + losses

    require_same_losses_in_half(model, loss_fn, (x, y), Randomness())
    assert [held for size, held in seen if size == 16] == ([False, True] * 2 if differentiates else [False] * 2)

    def mixing(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) + batch[0].mean()

    with pytest.raises(pg.PrivacyError, match="the second half of the batch"):
        require_same_losses_in_half(model, mixing, (x, y), Randomness())
