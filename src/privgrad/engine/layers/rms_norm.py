"""The rule of RMS normalization as transformers writes it: the same forward stands in over a hundred of its classes."""

from typing import Any

import torch
from torch import Tensor

from privgrad.engine.factors.outer import sum_over
from privgrad.engine.layers.base import Weights, code_of, in_positions, register_rule
from privgrad.engine.layers.normalization import RMSNorm


def _forward(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


@register_rule(code_of(_forward))
class _RMSNorm(RMSNorm):
    parameters = ("weight",)

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return parameters["weight"] * self.normalized(layer, x)

    def normalized(self, layer: Any, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)  # from float64 too
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon)).to(x.dtype)

    def over_positions(self, layer: Any, grad: Tensor) -> Tensor:
        return sum_over(in_positions(grad), 1)
