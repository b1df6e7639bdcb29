"""Gradients whose rows are combinations of an example's own rows, of rows that all examples share, and of constants.

`weight_standardization` makes them. Clipping, the engines and `displacement` call the methods of `Combined`, which
implement `base.LinearMapFactor`. The privacy guarantee rests on this file: a wrong norm or sum lets an example add more
than the bound.

Shape suffixes: B examples, T positions of an example, I inputs, O outputs, F fan-in.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from privgrad.gradient.factors.base import Dense, Examples, Factor, LinearMapFactor, Sum, as_linear_map, term_bound_of
from privgrad.gradient.factors.norms import canceled, largest_scale, masked, native_norms
from privgrad.gradient.factors.outer import Outer
from privgrad.gradient.factors.sums import sum_of_rows

Rows = Outer | Dense  # gradients of a weight as rows, shape (O, F): Outer for few positions, or written out


class Combined(LinearMapFactor):
    """Gradients whose row o is g_io = h_io + along_io y_o + level_io.

    The three terms are a row of the example's own, a multiple of a row that all examples share, and a constant.

    Args:
        inner: h_i, shape (O, F): `Rows`, or a sum of them.
        rows: y, shape P, which is (O, F) after F is flattened.
        along_BO: factors of y_o.
        level_BO: constants that are added to all entries of a row.
        square_BO: |g_io|^2 up to rounding errors of |h_io|^2, or None if it is not known.
    """

    usual_terms: ClassVar[float] = 32.0  # as for other computed weights, see `jacobian.Pulled`

    def __init__(
        self, inner: Factor, rows: Tensor, along_BO: Tensor, level_BO: Tensor, square_BO: Tensor | None = None
    ) -> None:
        super().__init__(inner.examples, rows.shape)
        self.inner, self.rows, self.along_BO, self.level_BO = inner, rows, along_BO, level_BO
        self.square_BO = square_BO

    def __getitem__(self, examples: Examples) -> "Combined":
        numbers = (None if x is None else x[examples] for x in (self.along_BO, self.level_BO, self.square_BO))
        return Combined(self.inner[examples], self.rows, *cast("Any", numbers))

    def dense(self) -> Tensor:
        out_BOF = torch.addcmul(self.level_BO[:, :, None], self.along_BO[:, :, None], self.rows.flatten(1))
        return out_BOF.add_(self.inner.dense()).view(self.examples, *self.shape)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.sum_in_parts(weight_B)

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        along_O, level_O = (sum_of_rows(weight_B, x) for x in (self.along_BO, self.level_BO))
        rows_OF = self.rows.flatten(1).to(along_O.dtype)
        shared_OF = torch.addcmul(level_O[:, None], along_O[:, None], rows_OF)
        return shared_OF.add(self._inner_sum(weight_B)).view(self.shape)

    def _inner_sum(self, weight_B: Tensor) -> Tensor:
        """Return the weighted sum of h_i in parts, shape (O, F)."""
        return self.inner.sum_in_parts(weight_B)

    def _inner_terms(self) -> Tensor:
        """Return a bound on the norms of the terms of h_i, shape (B,), float64."""
        return term_bound_of(self.inner, None)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        along_O, level_O = (weight_B.double() @ x.double() for x in (self.along_BO, self.level_BO))
        shared_OF = torch.addcmul(level_O[:, None], along_O[:, None], self.rows.double().flatten(1))
        return (self.inner.exact_sum(weight_B) + shared_OF).view(self.shape)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def mask(self, kept_B: Tensor) -> "Combined":
        numbers = (None if x is None else masked(x, kept_B) for x in (self.along_BO, self.level_BO, self.square_BO))
        return Combined(self.inner.mask(kept_B), self.rows, *cast("Any", numbers))

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is not None or self.square_BO is None:
            return super().norms(inverse_scales)
        square_B = self.square_BO.sum(1, dtype=torch.float64)
        norm_B = square_B.clamp(min=0).sqrt()
        again = canceled(square_B, self.term_bound()) | ~torch.isfinite(square_B) | self._underflowing()
        for index in cast("list[int]", again.nonzero()[:, 0].tolist()):
            norm_B[index] = Factor.norms(self[index : index + 1])[0]
        return norm_B

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor:
        along_B = native_norms(self.along_BO * native_norms(self.rows.flatten(1)))
        level_B = native_norms(self.level_BO) * self.rows[0].numel() ** 0.5
        return largest_scale(inverse_scales) * (self._inner_terms() + along_B.double() + level_B.double())

    def _underflowing(self) -> Tensor:
        """Return which examples have positions whose squares underflow, shape (B,)."""
        lost_B = torch.zeros_like(self.along_BO[:, 0], dtype=torch.bool)
        for part in self.inner.parts if isinstance(self.inner, Sum) else [self.inner]:
            lost_B |= part.underflowing() if isinstance(part, Outer) else False
        return lost_B

    def of_patches(self) -> "Combined":
        """Return the gradients as gradients of a linear map of patches, shape (O, F)."""
        return Combined(self.inner, self.rows.flatten(1), self.along_BO, self.level_BO)

    def apply(self, x_BTI: Tensor) -> Tensor:
        shared_BTO = (x_BTI @ self.rows.mT) * self.along_BO[:, None]
        shared_BTO += x_BTI.sum(2, keepdim=True) * self.level_BO[:, None]
        return shared_BTO + as_linear_map(self.inner).apply(x_BTI)


def by_rows(h: Rows, scale_BO: Tensor) -> Rows:
    """Return every row of every example times its own number."""
    if isinstance(h, Outer):
        return Outer(h.a_BTI, h.b_BTO * scale_BO[:, None])
    return Dense(h.grads_BP * scale_BO[:, :, None])
