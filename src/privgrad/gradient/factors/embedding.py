"""The factors of an embedding table, used alone or tied to an output layer.

The rule of `layers.embedding` builds `Rows`. `privgrad.gradient.clipping` and the engines call the methods that
implement `base.Factor`. `displacement` calls `apply` and `read`. `local_training` calls `scaled` and `settled`.

The privacy guarantee rests on this file: a wrong norm or sum lets an example add more than the bound.

Shape suffixes: B examples, T positions of an example, D width.
"""

from typing import cast

import torch
from torch import Tensor

from privgrad.gradient.factors.base import Examples, Factor, LinearMapFactor, Sum
from privgrad.gradient.factors.norms import (
    at_least_float32,
    canceled,
    float64_norms,
    masked,
    merged,
    position_norms,
)
from privgrad.gradient.factors.outer import Outer


class Rows(LinearMapFactor):
    """The gradients of an embedding table: row v of g_i is the sum of r_it over all t with ids_it = v.

    Args:
        ids_BT: row numbers that each example reads, integer, shape (B, T).
        r_BTD: gradients of the rows read, shape (B, T, D).
        rows: number of rows V of the table, whose shape is (V, D).
    """

    def __init__(self, ids_BT: Tensor, r_BTD: Tensor, rows: int) -> None:
        super().__init__(len(ids_BT), torch.Size((rows, r_BTD.shape[2])))
        self.ids_BT, self.r_BTD = ids_BT.long(), at_least_float32(r_BTD)

    def __getitem__(self, examples: Examples) -> "Rows":
        return Rows(self.ids_BT[examples], self.r_BTD[examples], self.shape[0])

    def dense(self) -> Tensor:
        rows, width = self.shape
        out = self.r_BTD.new_zeros(self.examples * rows, width)
        return out.index_add_(0, self._keys(), self.r_BTD.flatten(0, 1)).view(-1, rows, width)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        r_BTD = self.r_BTD * weight_B.to(self.r_BTD.dtype)[:, None, None]
        return self.r_BTD.new_zeros(self.shape).index_add_(0, self.ids_BT.flatten(), r_BTD.flatten(0, 1))

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self.exact_sum(weight_B)  # each part would need a whole table

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        total = self.r_BTD.new_zeros(self.shape, dtype=torch.float64)
        r_BTD = self.r_BTD.double() * weight_B.double()[:, None, None]
        return total.index_add_(0, self.ids_BT.flatten(), r_BTD.flatten(0, 1))

    @property
    def positions(self) -> int:
        return self.ids_BT.shape[1]

    def apply(self, x_BTI: Tensor) -> Tensor:
        products_BTS = x_BTI @ self.r_BTD.mT
        ids_BTS = self.ids_BT[:, None].expand_as(products_BTS)
        return x_BTI.new_zeros(*x_BTI.shape[:2], self.shape[0]).scatter_add(2, ids_BTS, products_BTS)

    def read(self, ids_BT: Tensor) -> Tensor:
        if self.shape.numel() < ids_BT.shape[1] * self.ids_BT.shape[1]:  # the table is smaller than the comparison
            return super().read(ids_BT)
        return (ids_BT[:, :, None] == self.ids_BT[:, None]).to(self.r_BTD.dtype) @ self.r_BTD

    def scaled(self, scales: Tensor) -> "Rows":
        return Rows(self.ids_BT, self.r_BTD * scales.expand(self.shape)[self.ids_BT], self.shape[0])

    def settled(self) -> LinearMapFactor:
        return self if self.ids_BT.shape[1] < self.shape[0] else self.written_out()

    def mask(self, kept_B: Tensor) -> "Rows":
        return Rows(self.ids_BT, masked(self.r_BTD, kept_B), self.shape[0])

    def merge(self, parts: int) -> "Rows":
        ids_BT = self.ids_BT.reshape(self.examples // parts, -1)
        return Rows(ids_BT, merged(self.r_BTD, parts), self.shape[0])

    def __add__(self, other: Factor) -> Factor:
        if isinstance(other, Rows):
            ids_BT = torch.cat([self.ids_BT, other.ids_BT], 1)
            return Rows(ids_BT, torch.cat([self.r_BTD, other.r_BTD], 1), self.shape[0])
        if isinstance(other, Outer):
            return TiedTable(other, self)
        return super().__add__(other)

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        r_BTD = self.r_BTD if inverse_scales is None else self.r_BTD * inverse_scales[self.ids_BT]
        return position_norms(r_BTD).sum(1)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Return the norms from the rows that each example reads.

        An example may read a row several times: these gradients are added up before the row's norm is taken, as in
        docs/mathematics.md (1.6).
        """
        keys, positions = cast("tuple[Tensor, Tensor]", torch.unique(self._keys(), return_inverse=True))
        rows = self.r_BTD.new_zeros(len(keys), self.shape[1]).index_add_(0, positions, self.r_BTD.flatten(0, 1))
        if inverse_scales is not None:
            rows *= inverse_scales[keys % self.shape[0]]
        square = float64_norms(rows).square()
        return square.new_zeros(self.examples).index_add_(0, keys // self.shape[0], square).sqrt()

    def _keys(self) -> Tensor:
        """Return a number that identifies each pair (example, id), shape (B T,)."""
        example_B = torch.arange(self.examples, device=self.ids_BT.device)
        return (self.ids_BT + example_B[:, None] * self.shape[0]).flatten()


class TiedTable(Sum):
    """The gradients of an embedding table that is also the output layer: Outer + Rows.

    The norms need no gradient of the size of the table for each example.

    Computes: |G + R|^2 = |G|^2 + |R|^2 + 2 <G, R>, where <G, R> = sum over s, t of b_t[id_s] (a_t . r_s). See
        docs/mathematics.md (1.7).

    Args:
        outer: gradients G from the output layer.
        rows: gradients R from the embedding.
    """

    def __init__(self, outer: Outer, rows: Rows) -> None:
        super().__init__([outer, rows])
        self.outer, self.rows = outer, rows

    def __getitem__(self, examples: Examples) -> "TiedTable":
        return TiedTable(self.outer[examples], self.rows[examples])

    def mask(self, kept_B: Tensor) -> "TiedTable":
        return TiedTable(self.outer.mask(kept_B), self.rows.mask(kept_B))

    def __add__(self, other: Factor) -> Factor:
        if isinstance(other, Outer):
            return TiedTable(cast(Outer, self.outer + other), self.rows)
        if isinstance(other, Rows):
            return TiedTable(self.outer, cast(Rows, self.rows + other))
        return super().__add__(other)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        parts_B = torch.stack([self.outer.norms(inverse_scales), self.rows.norms(inverse_scales)])
        square_B = parts_B.square().sum(0) + 2 * torch.cat(
            [cast(TiedTable, part)._inner_products(inverse_scales) for part in self._split(1)]
        )
        norm_B = square_B.clamp(min=0).sqrt()
        for index in cast("list[int]", canceled(square_B, parts_B.sum(0)).nonzero()[:, 0].tolist()):
            norm_B[index] = Factor.norms(self[index : index + 1], inverse_scales)[0]
        return norm_B

    def _inner_products(self, inverse_scales: Tensor | None) -> Tensor:
        """Return each example's <G, R>, both times the inverse scales if there are any; shape (B,), float64."""
        ids_BS, r_BSD = self.rows.ids_BT, self.rows.r_BTD
        if inverse_scales is not None:
            r_BSD = r_BSD * inverse_scales[ids_BS].square()
        b_BTS = self.outer.b_BTO.gather(2, ids_BS[:, None].expand(-1, self.outer.b_BTO.shape[1], -1))
        return (b_BTS * (self.outer.a_BTI @ r_BSD.mT)).sum((1, 2), dtype=torch.float64)
