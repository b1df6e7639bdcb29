"""Standardization of rows, (x - mean) / sqrt(variance + eps), with its second derivative in closed form.

torch composes the second derivative of its normalizations from some forty operators. Here it takes six passes. The
rules of layer and group normalization (`normalization`) call `standardized` for curvature. torch calls `forward` and
`backward` of the autograd Functions. The privacy guarantee rests on one property here: a row of the result depends on
no other row.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def standardized(x: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) over all dimensions but the first.

    Under autocast it is computed in float32 or wider.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # as torch's own normalizations do
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
        """Return the derivatives of <h, D g> with respect to g and x, with h (`other`) held constant.

        Computes: D h with respect to g. With respect to x, where <.> is the mean over a row and c(g, h) the covariance,
            - r^2 (c(g, h) - <y g> <y h>) y - r (<y g> D h + <y h> D g),
        which is docs/mathematics.md (3.10).
        """
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
