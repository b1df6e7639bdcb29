"""The rules of convolutions, plain and transposed.

A rule computes the output (`forward`), the per-example gradients of a parameter (`factor`), and the change of the
output when each example's parameters move (`delta`). `base.find_rule` finds it by the type of the layer, and calls
`supports`. `engines.layer_call` calls the other methods that `base.Rule` declares. The privacy guarantee of the fast
engine rests on these rules: row i of a factor must depend on example i only.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.factors.conv import Convolution, Geometry, convolve
from privgrad.gradient.factors.displacement import Displacement
from privgrad.gradient.factors.norms import at_least_float32, sum_over
from privgrad.gradient.layers.base import Rule, is_half, of_channels, register_rule


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class _Convolution(Rule):
    has_delta = is_bilinear = True

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return layer._conv_forward(x, parameters["weight"], parameters.get("bias"))

    def supports(self, layer: Any) -> bool:
        return hasattr(layer, "_reversed_padding_repeated_twice")

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(sum_over(at_least_float32(grad).flatten(2), 2))
        x, geometry = self._padded(layer, x)
        return Convolution(x, grad, geometry)

    def delta(self, layer: Any, displacements: Mapping[str, Displacement], x: Tensor) -> Tensor:
        moved = 0.0
        if "weight" in displacements:
            moved = displacements["weight"].convolve(*self._padded(layer, at_least_float32(x)))
        if "bias" in displacements:
            moved = moved + of_channels(displacements["bias"], x)
        return cast(Tensor, moved)

    def moved(
        self, layer: Any, parameters: Mapping[str, Tensor], displacements: Mapping[str, Displacement], x: Tensor
    ) -> Tensor:
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
        if layer.padding_mode != "zeros":
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), (0,) * (x.dim() - 2)
        elif isinstance(padding, str):  # "same" may pad one side by one more
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice), (0,) * (x.dim() - 2)
        return x, _geometry(layer, padding)


class FunctionalConvolution(_Convolution):
    """The rule of a call of F.conv1d, 2d or 3d; `layer` holds the options of the call. `functional` makes it."""

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.kernel_size)]
        options = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return convolve(x, parameters["weight"], parameters.get("bias"), *options)


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class _TransposedConvolution(Rule):
    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        convolve = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(layer.kernel_size)]
        options = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return convolve(x, parameters["weight"], parameters.get("bias"), *options)

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(sum_over(at_least_float32(grad).flatten(2), 2))
        # A transposed convolution is the adjoint of a plain one: its gradient is the same with x and grad exchanged.
        return Convolution(grad, x, _geometry(layer, layer.padding))


def _geometry(layer: Any, padding: tuple[int, ...]) -> Geometry:
    return Geometry(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
