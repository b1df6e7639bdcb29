"""The rules of layer, RMS, group and instance normalization, and of batch normalization with frozen statistics."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from privgrad.engine.factors.outer import sum_over
from privgrad.engine.layers.base import Moves, Rule, Weights, register_rule
from privgrad.gradient.factor import Dense, Factor, at_least_float32, examples_per_block, in_one


def standardized(x: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) over all dimensions but the first."""
    if torch.is_autocast_enabled(x.device.type):  # in float32 or wider, as torch's own normalizations
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    return cast(Tensor, _Standardize.apply(x.flatten(1), eps)).view_as(x)


class _Standardize(torch.autograd.Function):
    """y = r (x - mean), r = 1 / sqrt(variance + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, mean, r = torch.native_layer_norm(x, x.shape[1:], None, None, eps)
        ctx.save_for_backward(x, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cast(Tensor, _Derivative.apply(grad, *ctx.saved_tensors)), None


class _Derivative(torch.autograd.Function):
    """D g = r (g - mean(g) - y mean(y g)), row by row: linear and symmetric in g. docs/mathematics.md (3.3)."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(grad, x, mean, r, found := _derivative(grad, x, mean, r))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, other: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The derivatives of <h, D g>, with h (`other`) held constant: D h with respect to g. With respect to x, where
        # <.> is the mean over a row and c(g, h) the covariance, docs/mathematics.md (3.10):
        #     - r^2 (c(g, h) - <y g> <y h>) y - r (<y g> D h + <y h> D g).
        grad, x, mean, r, of_grad = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        y, of_other = (x - mean) * r, _derivative(other, x, mean, r)

        def mean_of(a: Tensor, b: Tensor) -> Tensor:
            return cast(Tensor, torch.linalg.vecdot(a, b))[:, None] / x.shape[1]

        with_grad, with_other = mean_of(y, grad), mean_of(y, other)
        covariance = mean_of(grad, other) - grad.mean(1, keepdim=True) * other.mean(1, keepdim=True)
        along_x = y.mul_(-r.square() * (covariance - with_grad * with_other))
        along_x.addcmul_(of_other, -r * with_grad).addcmul_(of_grad, -r * with_other)
        return of_other, along_x, None, None


def _derivative(grad: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
    return torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[1:], mean, r, None, None, [True, False, False])[0]


class _Normalization(Rule):
    """The common rule of normalizations: out = weight * normalized(x) + bias, elementwise."""

    has_delta = is_bilinear = True

    def bilinear(self, layer: Any, x: Tensor) -> tuple[Rule, Tensor]:
        return _ScaleAndShift(self), self.twice_differentiable(layer, x)

    def delta(self, layer: Any, displacements: Moves, x: Tensor) -> Tensor:
        def at_positions(name: str) -> Tensor:
            return self.at_positions(layer, displacements[name].for_rows(x), x)

        moved = 0.0
        if "weight" in displacements:
            moved = self.normalized(layer, at_least_float32(x)) * at_positions("weight")
        return cast(Tensor, moved + at_positions("bias") if "bias" in displacements else moved)

    def moved(self, layer: Any, parameters: Weights, displacements: Moves, x: Tensor) -> Tensor:
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

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(self.over_positions(layer, at_least_float32(grad)))
        few = examples_per_block(int(x[:1].numel()), x)
        parts: list[Tensor] = []
        for start in range(0, len(x), few):
            scaled = self.normalized(layer, at_least_float32(x[start : start + few])) * grad[start : start + few]
            parts.append(self.over_positions(layer, scaled))
        return Dense(in_one(parts))

    def over_positions(self, layer: Any, grad: Tensor) -> Tensor:
        """Sum over all dimensions except examples and channels: shape (B, C)."""
        return sum_over(grad.flatten(2), 2) if grad.dim() > 2 else grad


class _ScaleAndShift(_Normalization):
    """The rule of a normalization after its normalizing step: out = weight * x + bias."""

    def __init__(self, normalization: _Normalization) -> None:  # it knows the dimensions of the parameters
        self.at_positions, self.over_positions = normalization.at_positions, normalization.over_positions

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return self.moved(layer, parameters, {}, x)

    def normalized(self, layer: Any, x: Tensor) -> Tensor:
        return x


@register_rule(nn.LayerNorm)
class LayerNorm(_Normalization):
    """The rule of nn.LayerNorm, and of calls of F.layer_norm, for which `functional` makes it."""

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
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

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return F.rms_norm(x, list(layer.normalized_shape), parameters.get("weight"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return self.normalized(layer, x)


@register_rule(nn.GroupNorm)
class GroupNorm(_Normalization):
    """The rule of nn.GroupNorm, and of calls of F.group_norm."""

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return torch.group_norm(x, layer.num_groups, parameters.get("weight"), parameters.get("bias"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return standardized(x.reshape(len(x) * layer.num_groups, -1), layer.eps).view_as(x)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class _InstanceNorm(_Normalization):
    def supports(self, layer: Any) -> bool:
        return not layer.track_running_stats

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return F.instance_norm(x, weight=parameters.get("weight"), bias=parameters.get("bias"), eps=layer.eps)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class _FrozenBatchNorm(_Normalization):
    """The rule of batch normalization in evaluation mode, where the statistics are constants."""

    def supports(self, layer: Any) -> bool:
        return not layer.training and layer.running_mean is not None

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        mean, var = layer.running_mean, layer.running_var
        return F.batch_norm(x, mean, var, parameters.get("weight"), parameters.get("bias"), False, 0.0, layer.eps)
