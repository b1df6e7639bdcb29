"""Per-example gradients mixed with a public gradient, still factored.

`PrivateGradient` calls `shifted` and clips the result if a preconditioner keeps a share of each gradient and adds a
public average. `privgrad.gradient.clipping` calls the methods of `Shifted`, which implement `base.Factor`. It does not
need `weighted_sum`, which the interface requires.

The privacy guarantee rests on this file: a wrong norm or sum lets an example add more than the bound.

Shape suffixes: B examples, P the shape of one parameter.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from privgrad.gradient.factors.base import Dense, Examples, Factor, term_bound_of
from privgrad.gradient.factors.norms import at_least_float32, canceled, native_norms


class Shifted(Factor):
    """The gradients of another factor plus the same public tensor: g_i + s.

    Computes: |g_i + s|^2 = |g_i|^2 + 2 <g_i, s> + |s|^2, see docs/mathematics.md (2.5). Where these terms cancel, the
        gradient is written out instead.

    Args:
        inner: g_i.
        shift: s, shape P.
        kept_B: whether each example is kept, bool, shape (B,); all others are zero, without s. None keeps all.
    """

    def __init__(self, inner: Factor, shift: Tensor, kept_B: Tensor | None = None) -> None:
        super().__init__(inner.examples, inner.shape)
        self.inner, self.shift = inner, at_least_float32(shift)
        self.kept_B = torch.ones(inner.examples, dtype=torch.bool, device=shift.device) if kept_B is None else kept_B

    def __getitem__(self, examples: Examples) -> "Shifted":
        return Shifted(self.inner[examples], self.shift, self.kept_B[examples])

    def dense(self) -> Tensor:
        shift_BP = torch.where(self.kept_B.view(-1, *[1] * self.shift.dim()), self.shift, 0.0)
        return shift_BP.add_(self.inner.dense())

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.sum_and_rounding(weight_B)[0]

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float]:
        total, rounded = self.inner.sum_and_rounding(weight_B, inverse_scales)
        return total.add_(self.shift, alpha=float((weight_B * self.kept_B).sum())), rounded

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        total = self.inner.exact_sum(weight_B)
        return total.add_(self.shift.double(), alpha=float((weight_B * self.kept_B).sum()))

    def mask(self, kept_B: Tensor) -> "Shifted":
        return Shifted(self.inner.mask(kept_B), self.shift, self.kept_B & kept_B)

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor:
        return term_bound_of(self.inner, inverse_scales) + self._shift_norm(inverse_scales)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        inner_B, shift_norm = self.inner.norms(inverse_scales), self._shift_norm(inverse_scales)
        direction = self.shift if inverse_scales is None else self.shift * inverse_scales.square()
        cross_B = self.inner.inner_products(direction).double()
        square_B = inner_B.square() + 2 * cross_B + shift_norm**2
        norm_B = square_B.clamp(min=0).sqrt()
        again = canceled(square_B, inner_B + shift_norm) & self.kept_B
        for index in cast("list[int]", again.nonzero()[:, 0].tolist()):
            norm_B[index] = Factor.norms(self[index : index + 1], inverse_scales)[0]
        return torch.where(self.kept_B, norm_B, 0.0)

    def _shift_norm(self, inverse_scales: Tensor | None) -> float:
        """Return |s|, or |s * inverse_scales|."""
        shift = self.shift if inverse_scales is None else self.shift * inverse_scales
        return float(native_norms(shift.double().flatten()))


def shifted(
    chunk: Mapping[str, Factor], keep: float, shift: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Factor]:
    """Return keep * g_i + shift for every example of a chunk.

    Args:
        chunk: factors of g_i by parameter name. A parameter that no loss reaches is missing, and has g_i = 0.
        keep: share of the example's own gradient, in (0, 1].
        shift: public tensors by parameter name; a missing shift is 0.
        parameters: the model's parameters by name.
    """
    examples = next(iter(chunk.values())).examples
    found: dict[str, Factor] = {name: factor * keep for name, factor in chunk.items()}
    for name, value in shift.items():
        if name not in found:
            p = parameters[name]
            found[name] = Dense(torch.zeros(examples, *p.shape, dtype=value.dtype, device=p.device))
        found[name] = Shifted(found[name], value)
    return found
