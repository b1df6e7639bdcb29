"""Architectures by their published sizes."""

from typing import Any

import pytest
import torch

import privgrad as pg
from privgrad import models


@pytest.mark.parametrize(("channels", "size", "parameters"), [(3, 32, 411_466), (1, 28, 410_890)])
def test_cnn5_has_the_papers_size(channels: int, size: int, parameters: int):
    model = models.cnn5(in_channels=channels, num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model[:-1](torch.zeros(2, channels, size, size)).shape == (2, 10, 3, 3)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_mlp_and_activations():
    for activation in ("tanh", "relu", "leaky_relu"):
        options: dict[str, Any] = {"activation": activation}
        assert models.mlp(in_features=64, hidden=5, num_classes=3, **options)(torch.zeros(2, 8, 8)).shape == (2, 3)
    with pytest.raises(pg.PrivacyError, match="tanh"):
        models.mlp(in_features=1, hidden=1, num_classes=1, activation="sine")  # pyright: ignore[reportArgumentType]
