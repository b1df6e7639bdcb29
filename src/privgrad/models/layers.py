"""Heads, perceptrons, layers of sparse rows, and standardized convolutions."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.engine.factors.weight_standardization import WeightStandardization
from privgrad.errors import require_choice

Activation = Literal["tanh", "relu", "leaky_relu"]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}


def activation_named(name: str) -> Callable[[], nn.Module]:
    """Return the activation with this name; raise PrivacyError if there is none."""
    require_choice("models", "activation", name, tuple(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def linear(*, in_features: int, num_classes: int, input_dims: int | None = None) -> nn.Sequential:
    """Return softmax regression without bias on flattened input, (B, ...) -> logits (B, num_classes).

    The weights start at zero.

    Args:
        in_features: number of values of one input.
        num_classes: number of labels.
        input_dims: how many last dimensions to flatten; None is all except the first. Dimensions before them stay, for
            example the rows of a person: (B, rows, in_features) -> (B, rows, num_classes) with 1.
    """
    layer = nn.Linear(in_features, num_classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(_flatten(input_dims), layer)


class UnitLinear(nn.Module):
    """A linear head: each row of features divided by its norm, through a layer without bias that starts at zero.

    A row of zeros stays zero. Features may have any floating dtype. With a hidden layer, its outputs are added:
    `linear(x) + outer(relu(inner(x)))`, without biases. `inner` is drawn so that |relu(inner(x))| is about 1, and
    `outer` starts at zero.

    Args:
        in_features: number of features of a row.
        out_features: number of classes or tags, or 1 for a number.
        input_dims: how many last dimensions of the input hold the features of a row.
        hidden: number of hidden units; 0 for a linear head.
    """

    hidden = 0  # of pickles from before there were hidden layers

    def __init__(self, in_features: int, out_features: int, *, input_dims: int = 1, hidden: int = 0) -> None:
        super().__init__()
        self.input_dims, self.hidden = input_dims, hidden
        self.linear = nn.Linear(in_features, out_features, bias=False)
        nn.init.zeros_(self.linear.weight)
        if hidden:
            self.inner = nn.Linear(in_features, hidden, bias=False)
            nn.init.normal_(self.inner.weight, std=math.sqrt(2 / hidden))
            self.outer = nn.Linear(hidden, out_features, bias=False)
            nn.init.zeros_(self.outer.weight)

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs, (..., in_features) -> (..., out_features)."""
        rows = F.normalize(features.flatten(-self.input_dims).to(self.linear.weight.dtype), dim=-1)
        outputs = self.linear(rows)
        return outputs + self.outer(F.relu(self.inner(rows))) if self.hidden else outputs


def _flatten(input_dims: int | None) -> nn.Flatten:
    """Return the layer that flattens the last `input_dims` dimensions; None is all except the first."""
    return nn.Flatten() if input_dims is None else nn.Flatten(start_dim=-input_dims)


def mlp(
    *,
    in_features: int,
    hidden: int,
    num_classes: int,
    activation: Activation = "tanh",
    depth: int = 1,
    input_dims: int | None = None,
) -> nn.Sequential:
    """Return a perceptron with `depth` hidden layers on flattened input, (B, ...) -> logits (B, num_classes).

    `input_dims` is as in `linear`.
    """
    make_activation = activation_named(activation)
    layers: list[nn.Module] = [_flatten(input_dims)]
    for fan_in in (in_features, *[hidden] * (depth - 1)):
        layers += [nn.Linear(fan_in, hidden), make_activation()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))


def bag_of_words(*, vocabulary: int, num_classes: int) -> nn.EmbeddingBag:
    """Return softmax regression on mean word counts: word ids (B, L) -> logits (B, num_classes).

    Id 0 means no word. The weights start at zero.

    Args:
        vocabulary: ids are in [0, vocabulary).
        num_classes: number of labels.
    """
    layer = nn.EmbeddingBag(vocabulary, num_classes, mode="mean", padding_idx=0)
    nn.init.zeros_(layer.weight)
    return layer


class SparseLinear(nn.Module):
    """A linear map of sparse rows: (column, value) pairs (B, 2, L) from `data.packed` -> (B, out_features).

    Attributes:
        weight: shape (in_features, out_features), one row per feature. Initialized as in nn.Linear.
        bias: shape (out_features,). Initialized as in nn.Linear.

    Args:
        in_features: columns are in [0, in_features).
        out_features: width of the output.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = in_features**-0.5
        self.weight = nn.Parameter(torch.empty(in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))

    def input_squares(self, rows: Tensor) -> Tensor:
        """Return the squared norm of each row, shape (B,)."""
        return rows[:, 1].square().sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        columns, values = x[:, 0].long(), x[:, 1].to(self.weight.dtype)
        return F.embedding_bag(columns, self.weight, mode="sum", per_sample_weights=values) + self.bias


class EachRow(nn.Module):
    """A model on each row of each person: (B, rows, ...) -> (B, rows, ...).

    Attributes:
        model: the model on rows, (N, ...) -> (N, ...). It must treat each row by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def ws_conv2d(n_in: int, n_out: int, kernel: int, *, gain: bool = True, **options: Any) -> nn.Module:
    """Return a convolution with standardized weights.

    Args:
        n_in: number of input channels.
        n_out: number of output channels.
        kernel: width and height of the kernel.
        gain: whether each output channel has a trainable gain.
        options: as in nn.Conv2d, by keyword.
    """
    standardization = WeightStandardization(n_out if gain else None)
    layer = nn.Conv2d(n_in, n_out, kernel, **options)
    return parametrize.register_parametrization(layer, "weight", standardization)
