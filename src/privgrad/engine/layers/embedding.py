"""The rules of embedding tables and embedding bags.

Shape suffixes: B examples, T positions of an example, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.engine.factors.embedding import Bags, Rows
from privgrad.engine.layers.base import Moves, Rule, Weights, by_rows, of_bags, register_rule
from privgrad.gradient.factor import Factor, at_least_float32


@register_rule(nn.Embedding)
class Embedding(Rule):
    """The rule of nn.Embedding; also of calls of F.embedding, see `functional`."""

    parameters = ("weight",)
    has_delta = is_bilinear = True

    def delta(self, layer: Any, displacements: Moves, x: Tensor) -> Tensor:
        return by_rows(displacements["weight"].read(x.reshape(len(displacements["weight"].share), -1)), x.shape)

    def supports(self, layer: Any) -> bool:
        return layer.max_norm is None and not layer.scale_grad_by_freq

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return F.embedding(x, parameters["weight"], layer.padding_idx)

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        ids_BT, grad_BTD = x.reshape(len(x), -1), grad.reshape(len(grad), -1, layer.embedding_dim)
        if layer.padding_idx is not None:  # its row of the table is not trained
            grad_BTD = grad_BTD * (ids_BT != layer.padding_idx)[:, :, None]
        return Rows(ids_BT, grad_BTD, layer.num_embeddings)


@register_rule(nn.EmbeddingBag)
class _EmbeddingBag(Rule):
    """The rule of nn.EmbeddingBag for bags of equal length: input (B, T), output (B, D)."""

    parameters = ("weight",)
    has_delta = is_bilinear = True

    def supports(self, layer: Any) -> bool:
        return layer.max_norm is None and not layer.scale_grad_by_freq and layer.mode in ("sum", "mean")

    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        return F.embedding_bag(x, parameters["weight"], mode=layer.mode, padding_idx=layer.padding_idx)

    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        weight_BT = self._weights(layer, x, at_least_float32(grad).dtype)
        return Bags(x[:, None], weight_BT[:, None], grad[:, None], layer.num_embeddings)

    def delta(self, layer: Any, displacements: Moves, x: Tensor) -> Tensor:
        return of_bags(displacements["weight"], x, self._weights(layer, x, displacements["weight"].share.dtype))

    def _weights(self, layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight of each row in its bag: 0 for padding, else 1; for a mean, divided by their sum."""
        weight_BT = torch.ones_like(x, dtype=dtype)
        if layer.padding_idx is not None:
            weight_BT = (x != layer.padding_idx).to(dtype)
        return weight_BT / weight_BT.sum(1, keepdim=True).clamp(min=1) if layer.mode == "mean" else weight_BT
