"""The rules of linear maps: dense, with a transposed weight, and for sparse inputs."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.engine.factors.displacement import Displacement
from privgrad.engine.factors.embedding import Bags
from privgrad.engine.factors.outer import Outer, sum_over
from privgrad.engine.layers.base import Moves, Rule, Weights, by_rows, in_positions, is_half, of_bags, register_rule
from privgrad.gradient.factor import Dense, Factor, at_least_float32


@register_rule(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
class Linear(Rule):
    """The rule of nn.Linear, and of calls of F.linear, for which `functional` makes it."""

    has_delta = is_bilinear = True

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return F.linear(x, parameters["weight"], parameters.get("bias"))

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(grad if grad.dim() == 2 else sum_over(at_least_float32(in_positions(grad)), 1))
        # Of one position, the same tensor as for the bias, so that its norms are computed once.
        return Outer(in_positions(x), grad if grad.dim() == 2 else in_positions(grad))

    def delta(self, layer: Any, displacements: Moves, x: Tensor) -> Tensor:
        size = len(next(iter(displacements.values())).share)
        moved = 0.0
        if "weight" in displacements:
            moved = self.oriented(displacements["weight"]).apply(at_least_float32(x).reshape(size, -1, x.shape[-1]))
        if "bias" in displacements:
            moved = moved + displacements["bias"].dense()[:, None].expand(-1, x.shape[:-1].numel() // size, -1)
        return by_rows(cast(Tensor, moved), x.shape[:-1])

    def moved(self, layer: Any, parameters: Weights, displacements: Moves, x: Tensor) -> Tensor:
        weight, size = parameters["weight"], len(next(iter(displacements.values())).share)
        x_BTI = x.reshape(size, x.shape[:-1].numel() // size, x.shape[-1])
        own = displacements.get("weight")
        if own is None or is_half(weight) or not own.is_faster_written_out(x_BTI.shape[1]):
            return super().moved(layer, parameters, displacements, x)
        weight_BIO = self.transposed(own.added_to(weight))
        if "bias" not in parameters:
            return by_rows(torch.bmm(x_BTI, weight_BIO), x.shape[:-1])
        bias = parameters["bias"]
        bias = displacements["bias"].added_to(bias)[:, None] if "bias" in displacements else bias
        return by_rows(torch.baddbmm(bias, x_BTI, weight_BIO), x.shape[:-1])

    def oriented(self, displacement: Displacement) -> Displacement:
        """Return the displacement as one of a weight of shape (O, I)."""
        return displacement

    def transposed(self, weight: Tensor) -> Tensor:
        """Return weights with the shape (..., I, O)."""
        return weight.mT


@register_rule("transformers.pytorch_utils.Conv1D")
class TransposedLinear(Linear):
    """The rule of a linear map whose weight has shape (I, O): Hugging Face's Conv1D, and calls of x @ weight."""

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return F.linear(x, parameters["weight"].T, parameters.get("bias"))

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return super().factor(layer, name, parameters, x, grad)
        return Outer(in_positions(grad), in_positions(x))

    def oriented(self, displacement: Displacement) -> Displacement:
        return displacement.transposed()

    def transposed(self, weight: Tensor) -> Tensor:
        return weight


@register_rule("privgrad.models.layers.SparseLinear")
class _SparseLinear(Rule):
    """The rule of SparseLinear: input (B, 2, L) of column numbers and values, output (B, O)."""

    has_delta = is_bilinear = True

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        weight, values = parameters["weight"], x[:, 1].to(parameters["weight"].dtype)
        return F.embedding_bag(x[:, 0].long(), weight, mode="sum", per_sample_weights=values) + parameters["bias"]

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        return Dense(grad) if name == "bias" else Bags(x[:, :1], x[:, 1:], grad[:, None], len(parameters["weight"]))

    def delta(self, layer: Any, displacements: Moves, x: Tensor) -> Tensor:
        moved = of_bags(displacements["weight"], x[:, 0].long(), x[:, 1]) if "weight" in displacements else 0.0
        if "bias" in displacements:
            moved = moved + displacements["bias"].for_rows(x)
        return cast(Tensor, moved)
