"""Attention and recurrent layers, whose own forward hides what a rule needs: forwards with taps."""

from typing import Any

from torch import nn


def find_adapter(module: nn.Module) -> Any:
    return None
