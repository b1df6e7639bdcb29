"""The workloads that every figure is measured on: model, fixed batch, loss per example."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.models import ws_conv2d
from privgrad_lab.data import heavy_tail

Criterion = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="none").mean(1)


@dataclass(frozen=True)
class Workload:
    """One model on one batch.

    Attributes:
        about: one line.
        batch_size: B, the whole data set.
        model: makes the model, randomly initialized.
        data: makes (inputs, targets), each with leading dimension B.
        criterion: (outputs, targets) -> losses, shape (B,).
    """

    about: str
    batch_size: int
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    criterion: Criterion = cross_entropy


def autoencoder(widths: Sequence[int]) -> nn.Sequential:
    """Linear and sigmoid from width to width."""
    layers = [(nn.Linear(n_in, n_out), nn.Sigmoid()) for n_in, n_out in pairwise(widths)]
    return nn.Sequential(*(module for pair in layers for module in pair))


def cnn() -> nn.Sequential:
    """Five 3x3 convolutions with GroupNorm; pooled after the second, third and fourth."""
    layers: list[nn.Module] = []
    for index, (n_in, n_out) in enumerate(pairwise([3, 32, 64, 64, 128, 128])):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(8, n_out), nn.ReLU()]
        if index in (1, 2, 3):
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class StandardizedConv2d(nn.Conv2d):
    """Weight standardization as a layer of its own, unknown to any engine."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        from privgrad.engine.factors.weight_standardization import WeightStandardization

        return self._conv_forward(input, WeightStandardization()(self.weight), self.bias)


def parametrized_conv(n_in: int, n_out: int) -> nn.Module:
    return ws_conv2d(n_in, n_out, 3, padding=1, bias=False, gain=False)


def custom_conv(n_in: int, n_out: int) -> nn.Module:
    return StandardizedConv2d(n_in, n_out, 3, padding=1, bias=False)


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return input + super().forward(input)


def resnet9(conv: Callable[[int, int], nn.Module]) -> nn.Sequential:
    """ResNet-9 at half width, with weight-standardized convolutions and GroupNorm."""

    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [conv(n_in, n_out), nn.GroupNorm(16, n_out), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32),
        *block(32, 64),
        nn.MaxPool2d(2),
        Residual(*block(64, 64), *block(64, 64)),
        *block(64, 128),
        nn.MaxPool2d(2),
        *block(128, 256),
        nn.MaxPool2d(2),
        Residual(*block(256, 256), *block(256, 256)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class Attention(nn.Module):
    """Multi-head self-attention from four Linears."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Transformer encoder with learned positions, mean pool and a linear head."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, hidden) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.layers(self.tokens(ids) + self.positions(positions))
        return self.head(self.norm(x).mean(1))


class LastState(nn.Module):
    """Embedding, LSTM, linear head on the last state."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, ids: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.tokens(ids))
        return self.head(outputs[:, -1])


def dense_data(count: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width), torch.randint(classes, (count,))


def image_data(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def token_data(count: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(10_000, (count, length)), torch.randint(2, (count,))


def autoencoder_data(count: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 784)
    return x, x


def heavy_tail_data() -> tuple[Tensor, Tensor]:
    inputs, labels = heavy_tail().train.tensors
    return inputs, labels


WORKLOADS: dict[str, Workload] = {
    "W1": Workload("softmax 10,000 x 500", 64, partial(nn.Linear, 10_000, 500), partial(dense_data, 64, 10_000, 500)),
    "W1-256": Workload(
        "softmax 10,000 x 500", 256, partial(nn.Linear, 10_000, 500), partial(dense_data, 256, 10_000, 500)
    ),
    "W2": Workload(
        "autoencoder",
        256,
        partial(autoencoder, [784, 1000, 500, 250, 30, 250, 500, 1000, 784]),
        partial(autoencoder_data, 256),
        squared_error,
    ),
    "W3": Workload("CNN with GroupNorm", 128, cnn, partial(image_data, 128)),
    "W4": Workload("ResNet-9, parametrized", 32, partial(resnet9, parametrized_conv), partial(image_data, 32)),
    "W4-custom": Workload("ResNet-9, custom layer", 32, partial(resnet9, custom_conv), partial(image_data, 32)),
    "W5": Workload("transformer", 64, partial(Encoder, 10_000, 64, 256, 4, 4, 1024), partial(token_data, 64, 64)),
    "W6": Workload("LSTM", 64, partial(LastState, 10_000, 64, 128), partial(token_data, 64, 128)),
    "W7": Workload("softmax 9,216 x 255, heavy tail", 8192, partial(nn.Linear, 9216, 255), heavy_tail_data),
}
