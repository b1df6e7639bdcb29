"""A model that is applied to each row of a person, for models whose inputs have fixed dimensions, such as images.

Users wrap a model in it; `experiments.build` wraps its models of images. A model runs (`forward`) when a loss function
calls it in training, or `experiments.measures` in evaluations. The privacy guarantee does not rest on this file: no
model here mixes examples, and `gradient.validation` tests that before training.
"""

from torch import Tensor, nn


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
