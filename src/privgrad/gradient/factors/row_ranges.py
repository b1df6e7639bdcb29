"""The factor of a parameter whose ranges of rows have factors of their own.

`layers.attention` builds it. `privgrad.gradient.clipping` and the engines call its methods, which implement
`base.Factor`. `shifted` calls `inner_products`.

The privacy guarantee rests on this file: a wrong norm or sum lets an example add more than the bound.

Shape suffixes: B examples, P a parameter's shape.
"""

import torch
from torch import Tensor

from privgrad.gradient.factors.base import Examples, Factor, term_bound_of
from privgrad.gradient.factors.norms import added_up, float64_norms


class RowRanges(Factor):
    """Factors for ranges of rows of a parameter; all other rows are zero.

    The q, k and v parts of a packed attention projection have such gradients.

    Args:
        parts: pairs (first row, factor), for row ranges that do not overlap.
        shape: shape of the parameter.
    """

    def __init__(self, parts: list[tuple[int, Factor]], shape: torch.Size) -> None:
        super().__init__(parts[0][1].examples, shape)
        self.parts = parts

    def __getitem__(self, examples: Examples) -> "RowRanges":
        return RowRanges([(row, part[examples]) for row, part in self.parts], self.shape)

    def dense(self) -> Tensor:
        first = self.parts[0][1].dense()
        out = first.new_zeros(self.examples, *self.shape)
        for row, part in self.parts:
            out[:, row : row + part.shape[0]] += part.dense()
        return out

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self._joined([part.weighted_sum(weight_B) for _, part in self.parts])

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self._joined([part.sum_in_parts(weight_B) for _, part in self.parts])

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return self._joined([part.exact_sum(weight_B) for _, part in self.parts])

    def mask(self, kept_B: Tensor) -> "RowRanges":
        return RowRanges([(row, part.mask(kept_B)) for row, part in self.parts], self.shape)

    def inner_products(self, direction: Tensor) -> Tensor:
        return added_up([part.inner_products(direction[row : row + part.shape[0]]) for row, part in self.parts])

    def merge(self, parts: int) -> "RowRanges":
        return RowRanges([(row, part.merge(parts)) for row, part in self.parts], self.shape)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        norms = [part.norms(self._scales(inverse_scales, row, part)) for row, part in self.parts]
        return float64_norms(torch.stack(norms, dim=1))

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return added_up([term_bound_of(part, self._scales(inverse_scales, row, part)) for row, part in self.parts])

    @property
    def positions(self) -> int:
        return max(part.positions for _, part in self.parts)

    def _scales(self, inverse_scales: Tensor | None, row: int, part: Factor) -> Tensor | None:
        """Return the inverse scales of the part's rows."""
        return None if inverse_scales is None else inverse_scales[row : row + part.shape[0]]

    def _joined(self, sums: list[Tensor]) -> Tensor:
        """Return the sum for the whole parameter, given the sum for each part."""
        out = sums[0].new_zeros(self.shape)
        for (row, _), value in zip(self.parts, sums, strict=True):
            out[row : row + len(value)] += value
        return out

    def __add__(self, other: Factor) -> Factor:
        if not isinstance(other, RowRanges):
            return super().__add__(other)
        joined = dict(self.parts)
        for row, part in other.parts:
            joined[row] = joined[row] + part if row in joined else part
        return RowRanges(sorted(joined.items(), key=lambda pair: pair[0]), self.shape)
