"""Models that treat each example by itself; also, by their names, the architectures of privgrad_lab."""

from typing import Any

from privgrad.models.layers import Activation, EachRow, SparseLinear, UnitLinear, bag_of_words, linear, mlp, ws_conv2d
from privgrad.plugins import lab_attribute

__all__ = ["Activation", "EachRow", "SparseLinear", "UnitLinear", "bag_of_words", "linear", "mlp", "ws_conv2d"]


def __getattr__(name: str) -> Any:
    return lab_attribute("models", __name__, name)
