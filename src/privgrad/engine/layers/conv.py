"""The rules of convolutions, plain and transposed."""

import math
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.engine.factors.conv import Convolution, Geometry, convolve
from privgrad.engine.factors.outer import sum_over
from privgrad.engine.layers.base import Moves, Rule, Weights, is_half, of_channels, register_rule
from privgrad.gradient.factor import Dense, Factor, at_least_float32


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class _Convolution(Rule):
    """The rule of convolutions. At moved weights, it writes them out where that takes less time."""

    has_delta = is_bilinear = True

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return layer._conv_forward(x, parameters["weight"], parameters.get("bias"))

    def supports(self, layer: Any) -> bool:
        return hasattr(layer, "_reversed_padding_repeated_twice")

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(sum_over(at_least_float32(grad).flatten(2), 2))
        x, geometry = self._padded(layer, x)
        return Convolution(x, grad, geometry)

    def delta(self, layer: Any, displacements: Moves, x: Tensor) -> Tensor:
        moved = 0.0
        if "weight" in displacements:
            moved = displacements["weight"].convolve(*self._padded(layer, at_least_float32(x)))
        if "bias" in displacements:
            moved = moved + of_channels(displacements["bias"], x)
        return cast(Tensor, moved)

    def moved(self, layer: Any, parameters: Weights, displacements: Moves, x: Tensor) -> Tensor:
        """Return the output at moved parameters, by one convolution with these if that is faster."""
        padded, geometry = self._padded(layer, x)
        positions, weight, own = geometry.positions(padded.shape[2:]), parameters["weight"], displacements.get("weight")
        # With many positions, one convolution with the moved weights is faster than `forward` plus `delta`.
        if own is None or (
            geometry.by_patches(positions) and (is_half(weight) or not own.is_faster_written_out(math.prod(positions)))
        ):
            return super().moved(layer, parameters, displacements, x)
        output = convolve(Dense(own.added_to(weight)), padded, geometry)
        if "bias" in parameters:
            output = output + parameters["bias"].view(-1, *[1] * (x.dim() - 2))
        return output + of_channels(displacements["bias"], x).to(output.dtype) if "bias" in displacements else output

    def _padded(self, layer: Any, x: Tensor) -> tuple[Tensor, Geometry]:
        """Return the input, padded where a Geometry cannot express the padding, and the geometry."""
        padding = layer.padding
        if layer.padding_mode != "zeros" or isinstance(padding, str):  # "same" may pad one side by one more
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), (0,) * (x.dim() - 2)
        return x, _geometry(layer, padding)


class FunctionalConvolution(_Convolution):
    """The rule of a call of F.conv1d, 2d or 3d; `layer` holds the options of the call."""

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.kernel_size)]
        options = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return convolve(x, parameters["weight"], parameters.get("bias"), *options)


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class _TransposedConvolution(Rule):
    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        convolve = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(layer.kernel_size)]
        options = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return convolve(x, parameters["weight"], parameters.get("bias"), *options)

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(sum_over(at_least_float32(grad).flatten(2), 2))
        # A transposed convolution is the adjoint of a plain one: its gradient is the same with x and grad exchanged.
        return Convolution(grad, x, _geometry(layer, layer.padding))


def _geometry(layer: Any, padding: tuple[int, ...]) -> Geometry:
    return Geometry(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
