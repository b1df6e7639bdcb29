"""The rules of layer, RMS, group and instance normalization, and of batch normalization with frozen statistics.

A rule computes the output (`forward`), the per-example gradients of a parameter (`factor`), and the change of the
output when each example's parameters move (`delta`). `base.find_rule` finds it by the type of the layer, and calls
`supports`. `engines.layer_call` calls the other methods that `base.Rule` declares. The privacy guarantee of the fast
engine rests on these rules: row i of a factor must depend on example i only.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.factors.displacement import Displacement
from privgrad.gradient.factors.norms import at_least_float32, examples_per_block, sum_over
from privgrad.gradient.layers.base import Rule, register_rule
from privgrad.gradient.layers.standardization import standardized


class _Normalization(Rule):
    """The common rule of normalizations: out = weight * normalized(x) + bias, elementwise.

    The methods that are not in `base.Rule` are called in this file only.
    """

    has_delta = is_bilinear = True

    def bilinear(self, layer: Any, x: Tensor) -> tuple[Rule, Tensor]:
        """Return the rule of scaling and shifting, and the normalized input; for Hessian products."""
        return _ScaleAndShift(self), self.twice_differentiable(layer, x)

    def delta(self, layer: Any, displacements: Mapping[str, Displacement], x: Tensor) -> Tensor:
        def at_positions(name: str) -> Tensor:
            return self.at_positions(layer, displacements[name].for_rows(x), x)

        moved = 0.0
        if "weight" in displacements:
            moved = self.normalized(layer, at_least_float32(x)) * at_positions("weight")
        return cast(Tensor, moved + at_positions("bias") if "bias" in displacements else moved)

    def moved(
        self, layer: Any, parameters: Mapping[str, Tensor], displacements: Mapping[str, Displacement], x: Tensor
    ) -> Tensor:
        """Return the output at moved parameters, with one normalization where forward and delta would take two."""
        output = self.normalized(layer, x)
        for name, combine in (("weight", torch.mul), ("bias", torch.add)):
            if name in parameters:
                own = parameters[name][None]
                rows = own + displacements[name].for_rows(x).to(own.dtype) if name in displacements else own
                output = combine(output, self.at_positions(layer, rows, x).to(output.dtype))
        return output

    def at_positions(self, layer: Any, values: Tensor, x: Tensor) -> Tensor:
        """Reshape values of channels, shape (rows, C), to broadcast over positions."""
        return values.view(*values.shape, *[1] * (x.dim() - 2))

    def normalized(self, layer: Any, x: Tensor) -> Tensor:
        """Return the layer's output without weight and bias."""
        return self.forward(layer, {}, x)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        """Return `normalized`, in a form of which torch can take second derivatives."""
        return self.normalized(layer, x)

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(self.over_positions(layer, at_least_float32(grad)))
        few = examples_per_block(int(x[:1].numel()), x)
        parts: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, len(x), few):
                scaled = self.normalized(layer, at_least_float32(x[start : start + few])) * grad[start : start + few]
                parts.append(self.over_positions(layer, scaled))
        return Dense(torch.cat(parts))

    def over_positions(self, layer: Any, grad: Tensor) -> Tensor:
        """Sum over all dimensions except examples and channels: shape (B, C)."""
        return sum_over(grad.flatten(2), 2) if grad.dim() > 2 else grad


class _ScaleAndShift(_Normalization):
    """The rule of a normalization after its normalizing step: out = weight * x + bias.

    Args:
        normalization: its rule, which knows the dimensions that the parameters vary over.
    """

    def __init__(self, normalization: _Normalization) -> None:
        self.at_positions, self.over_positions = normalization.at_positions, normalization.over_positions

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.moved(layer, parameters, {}, x)

    def normalized(self, layer: Any, x: Tensor) -> Tensor:
        return x


@register_rule(nn.LayerNorm)
class LayerNorm(_Normalization):
    """The rule of nn.LayerNorm, and of calls of F.layer_norm, for which `functional` makes it."""

    def forward(self, layer: nn.LayerNorm, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        shape = list(layer.normalized_shape)
        return F.layer_norm(x, shape, parameters.get("weight"), parameters.get("bias"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return standardized(x.reshape(-1, *layer.normalized_shape), layer.eps).view_as(x)

    def over_positions(self, layer: Any, grad: Tensor) -> Tensor:
        shape = tuple(layer.normalized_shape)
        return sum_over(grad.reshape(len(grad), -1, *shape), 1)

    def at_positions(self, layer: Any, values: Tensor, x: Tensor) -> Tensor:
        positions = [1] * (x.dim() - values.dim())
        return values.view(len(values), *positions, *values.shape[1:])


@register_rule(nn.RMSNorm)
class RMSNorm(LayerNorm):
    """The rule of nn.RMSNorm, and of calls of F.rms_norm."""

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.rms_norm(x, list(layer.normalized_shape), parameters.get("weight"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return self.normalized(layer, x)


@register_rule(nn.GroupNorm)
class GroupNorm(_Normalization):
    """The rule of nn.GroupNorm, and of calls of F.group_norm."""

    def forward(self, layer: nn.GroupNorm, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.group_norm(x, layer.num_groups, parameters.get("weight"), parameters.get("bias"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return standardized(x.reshape(len(x) * layer.num_groups, -1), layer.eps).view_as(x)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class _InstanceNorm(_Normalization):
    def supports(self, layer: Any) -> bool:
        return not layer.track_running_stats

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.instance_norm(x, weight=parameters.get("weight"), bias=parameters.get("bias"), eps=layer.eps)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class _FrozenBatchNorm(_Normalization):
    """The rule of batch normalization in evaluation mode, where the statistics are constants."""

    def supports(self, layer: Any) -> bool:
        return not layer.training and layer.running_mean is not None

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        mean, var = layer.running_mean, layer.running_var
        return F.batch_norm(x, mean, var, parameters.get("weight"), parameters.get("bias"), False, 0.0, layer.eps)
