"""Models of fully connected layers, also on bags of words and sparse rows.

Users make the models; `experiments.build` makes them by name, through its table MODELS. A model runs (`forward`) when a
loss function calls it in training, or `experiments.measures` in evaluations. The privacy guarantee does not rest on
this file: no model here mixes examples, and `gradient.validation` tests that before training.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.models.activations import Activation, activation_named


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


def autoencoder(*, in_features: int) -> nn.Sequential:
    """Return an autoencoder with a code of 30 numbers, (B, ...) -> (B, in_features) in (0, 1).

    Every layer except the code ends in a sigmoid.

    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963): 784-1000-500-250-30 and back, 2,837,314 parameters.
    """
    widths = [in_features, 1000, 500, 250, 30, 250, 500, 1000, in_features]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out)] if fan_out == 30 else [nn.Linear(fan_in, fan_out), nn.Sigmoid()]
    return nn.Sequential(*layers)


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
        """Return the squared norm of each row, shape (B,). `defaults.suggest` calls it."""
        return rows[:, 1].square().sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        columns, values = x[:, 0].long(), x[:, 1].to(self.weight.dtype)
        return F.embedding_bag(columns, self.weight, mode="sum", per_sample_weights=values) + self.bias
