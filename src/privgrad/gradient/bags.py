"""Bags of words: the gradient of an embedding table from which every example reads a weighted sum of rows.

Shape suffixes: B examples, T words of an example, D width, V rows of the table.
"""

from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from privgrad.gradient.factors import Factor
from privgrad.gradient.norms import hidden, kept, norms_of, unit, wide
from privgrad.gradient.tables import Rows


class Bags(Factor):
    """g_i = c_i r_i^T, shape (V, D), with c_i the weights of example i's words: sparse, and never written out.

    Args:
        ids_BT: words, integer, shape (B, T); one that occurs several times counts as often.
        weight_BT: what each is multiplied with, shape (B, T); 0 for padding.
        r_BD: gradient of the bag's output, shape (B, D).
        rows: V.
    """

    def __init__(self, ids_BT: Tensor, weight_BT: Tensor, r_BD: Tensor, rows: int) -> None:
        super().__init__(len(ids_BT), torch.Size((rows, r_BD.shape[1])))
        self.ids_BT, self.r_BD = ids_BT.long(), wide(r_BD)
        self.weight_BT = weight_BT.to(self.r_BD.dtype)

    def __getitem__(self, examples: slice) -> "Bags":
        return Bags(self.ids_BT[examples], self.weight_BT[examples], self.r_BD[examples], self.shape[0])

    def dense(self) -> Tensor:
        return self._bags.to_dense()[:, :, None] * self.r_BD[:, None]

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        r_BD = self.r_BD * weight_B.to(self.r_BD.dtype)[:, None]
        return cast(Tensor, torch.sparse.mm(self._bags.t(), r_BD))

    def read(self, ids_BT: Tensor) -> Tensor:
        same_BTS = ids_BT[:, :, None] == self.ids_BT[:, None]
        count_BT = (same_BTS.to(self.weight_BT.dtype) @ self.weight_BT[:, :, None])[:, :, 0]
        return count_BT[:, :, None] * self.r_BD[:, None]

    def keep(self, kept_B: Tensor) -> "Bags":
        return Bags(self.ids_BT, kept(self.weight_BT, kept_B), kept(self.r_BD, kept_B), self.shape[0])

    def merge(self, parts: int) -> Rows:
        r_BTD = self.weight_BT[..., None] * self.r_BD[:, None]
        return Rows(self.ids_BT, r_BTD, self.shape[0]).merge(parts)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """|c| |r|; with scales s: sqrt(sum over v and d of c_v^2 s_vd^2 r_d^2), whose terms are all positive."""
        plain_B = self._of_bags(self._bags.values().double().square()).sqrt() * norms_of(self.r_BD)
        if inverse_scales is None:
            return plain_B
        # The largest entries are 1 here. Squares that underflow all the same are `hidden`.
        largest, (r_BD, r_B), (_, c_B) = inverse_scales.max(), unit(self.r_BD), unit(self.weight_BT)
        scales, bags = (inverse_scales / largest).to(self.r_BD.dtype), self._bags
        c = bags.values() / c_B.to(bags.dtype)[bags.indices()[0]]
        square = torch.sparse_coo_tensor(
            bags.indices(), c.square_(), bags.shape, is_coalesced=True, check_invariants=False
        )
        square_BD = cast(Tensor, torch.sparse.mm(square, scales.square_()))
        norm_B = norms_of(square_BD.sqrt() * r_BD) * r_B * c_B * largest.double()
        for index in hidden(norm_B, plain_B * largest.double()):
            norm_B[index] = self._scaled_norm(index, inverse_scales)
        return norm_B

    def _scaled_norm(self, index: int, inverse_scales: Tensor) -> Tensor:
        """Of one example, in float64: no square of it under- or overflows."""
        bag = self[index : index + 1]._bags
        columns, c_T = bag.indices()[1], bag.values().double()
        scaled_TD = c_T[:, None] * inverse_scales[columns].double() * self.r_BD[index]
        return cast(Tensor, torch.linalg.vector_norm(scaled_TD))

    def _of_bags(self, values: Tensor) -> Tensor:
        """Sums over each example's different words."""
        return values.new_zeros(self.examples).index_add_(0, self._bags.indices()[0], values)

    @cached_property
    def _bags(self) -> Tensor:
        """c, sparse (B, V); words that occur several times are added up."""
        rows_BT = torch.arange(self.examples, device=self.ids_BT.device)[:, None].expand_as(self.ids_BT)
        indices = torch.stack([rows_BT.flatten(), self.ids_BT.flatten()])
        shape = (self.examples, self.shape[0])
        return torch.sparse_coo_tensor(indices, self.weight_BT.flatten(), shape, check_invariants=False).coalesce()
