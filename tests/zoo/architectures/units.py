"""Blocks between layers of their own, so that only the block needs another treatment; mixtures of experts."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .cases import Case, Maker, Size, built, state_losses, vectors


class RelativeBias(nn.Module):
    """Attention with a table of biases that is looked up once for all examples, below a plain residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.values = nn.Embedding(9, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        biases = self.table((places[:, None] - places).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        scores = (x @ x.transpose(1, 2))[:, None] + biases
        return (scores.softmax(-1) @ self.values(x)[:, None]).mean(1)


class Centered(RelativeBias):
    """Subtracts the mean of the batch before the attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class TimeFirst(nn.Module):
    """Hands (time, batch, width) to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.transpose(0, 1)).tanh()).transpose(0, 1)


class Latents(nn.Module):
    """Repeats learned latents for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.head = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents(torch.arange(3, device=x.device)[None]).repeat(len(x), 1, 1)
        return self.head((latents @ x.transpose(1, 2)).softmax(-1) @ x)


class Residual(nn.Module):
    """One block between layers of its own, so that only the block needs another treatment."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(4, 4), block, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        return self.after(x + self.block(x).mean(1, keepdim=True))


class Experts(nn.Module):
    """Routes each token to one expert of a list; the experts see the tokens of all examples in one tensor."""

    def __init__(self, width: int = 4, hidden: int = 6, count: int = 3) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(width, width), nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        states = self.first(x).tanh().flatten(0, 1)
        shares = self.router(states).softmax(-1)
        chosen, output = shares.argmax(-1), torch.zeros_like(states)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if len(rows):
                output = output.index_add(0, rows, expert(states[rows]) * shares[rows, index, None])
        return output.view(x.shape)


class DenseExperts(nn.Module):
    """Hands each token to all experts, whose weights are in two tensors."""

    def __init__(self, width: int, hidden: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        hidden = torch.einsum("btd,edh->bteh", x, self.up).relu()
        return x + torch.einsum("bteh,ehd,bte->btd", hidden, self.down, shares)


class Temperature(nn.Module):
    """A linear model whose temperature is used by the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.body, self.temperature = nn.Linear(size.width, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def temperature_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """Cross-entropy at a learned temperature, which only the loss uses."""
    logits = model(examples["x"]) / cast(Any, model).temperature.exp()
    return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="none")


class SpectralHead(nn.Module):
    """A feed-forward network whose last layer has a bounded spectral norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = nn.Linear(size.width, size.hidden)
        self.head = parametrizations.spectral_norm(nn.Linear(size.hidden, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu())


def residual(block: Callable[[], nn.Module]) -> Maker:
    """Make a block between two layers."""
    return built(lambda size: Residual(block()), lambda size: vectors(size, 5, 4), state_losses)


def _of_width(size: Size) -> dict[str, Tensor]:
    return vectors(size, size.width)


def _dense(size: Size) -> Case:
    layers = (DenseExperts(size.width, size.hidden) for _ in range(size.layers))
    model = nn.Sequential(nn.Linear(8, size.width), *layers, nn.Linear(size.width, 5))
    return Case(model, vectors(size, size.time, 8), state_losses)


def _routed(size: Size) -> Case:
    layers = (Experts(size.width, size.hidden) for _ in range(size.layers // 2))
    model = nn.Sequential(nn.Linear(8, size.width), *layers, nn.Linear(size.width, 5))
    return Case(model, vectors(size, size.time, 8), state_losses)


BLOCKS: dict[str, Maker] = {
    "hand_relative_bias": residual(RelativeBias),
    "hand_time_first": residual(TimeFirst),
    "hand_latents": residual(Latents),
    "hand_routed_block": residual(Experts),
}
UNITS: dict[str, Maker] = {
    "hand_moe_modulelist": _routed,
    "hand_dense_moe": _dense,
    "hand_spectral_norm_head": built(SpectralHead, _of_width, state_losses),
    "hand_loss_temperature": built(Temperature, _of_width, temperature_losses),
}


def _centered(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    return state_losses(model, {"x": examples["x"] - examples["x"].mean(0)})


def _batch_norm(size: Size) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(20), nn.Linear(20, 3))


# Their examples are coupled.
COUPLED_UNITS: dict[str, Maker] = {
    "centered_inside": residual(Centered),
    "centered_outside": built(lambda size: Residual(RelativeBias()), lambda size: vectors(size, 5, 4), _centered),
    "batch_norm": built(_batch_norm, lambda size: vectors(size, 5, 4), state_losses),
}
