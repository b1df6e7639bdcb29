"""The factors of an embedding table from which each example reads weighted sums of rows (bags of words).

`Bags` is for one bag per example, and `ManyBags` for several. The rules of `layers.embedding` and `layers.linear` build
`Bags`. `privgrad.gradient.clipping` and the engines call the methods that implement `base.Factor`. `displacement` calls
`read` and `read_bags`. `local_training` calls `scaled` and `settled`.

The privacy guarantee rests on this file: a wrong norm or sum lets an example add more than the bound.

Shape suffixes: B examples, J bags of an example, T words of a bag, W different words of an example, D width, V rows of
the table.
"""

from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.gradient.factors.base import Examples, Factor, LinearMapFactor
from privgrad.gradient.factors.norms import (
    at_least_float32,
    float64_norms,
    lost_to_underflow,
    masked,
    merged,
    norms_of,
    position_norms,
    scale_rows,
)


class Bags(LinearMapFactor):
    """The gradients of a table for one bag per example: g_i = c_i r_i^T, shape (V, D).

    Here c_i holds the weights of example i's words. It is sparse; only `dense` writes it out.

    Args:
        ids_BT: words, integer, shape (B, T); the weights of a repeated word add up.
        weight_BT: the weight of each word, shape (B, T); 0 for padding.
        r_BD: gradient of each bag's output, shape (B, D).
        rows: V.
    """

    def __init__(self, ids_BT: Tensor, weight_BT: Tensor, r_BD: Tensor, rows: int) -> None:
        super().__init__(len(ids_BT), torch.Size((rows, r_BD.shape[1])))
        self.ids_BT, self.r_BD = ids_BT.long(), at_least_float32(r_BD)
        self.weight_BT = weight_BT.to(self.r_BD.dtype)

    def __getitem__(self, examples: Examples) -> "Bags":
        return Bags(self.ids_BT[examples], self.weight_BT[examples], self.r_BD[examples], self.shape[0])

    def dense(self) -> Tensor:
        return self._bags.to_dense()[:, :, None] * self.r_BD[:, None]

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        r_BD = self.r_BD * weight_B.to(self.r_BD.dtype)[:, None]
        return cast(Tensor, torch.sparse.mm(self._bags.t(), r_BD))

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self.exact_sum(weight_B)  # each part would need a whole table

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        r_BD = self.r_BD.double() * weight_B.double()[:, None]
        return cast(Tensor, torch.sparse.mm(self._bags.double().t(), r_BD))

    def read(self, ids_BT: Tensor) -> Tensor:
        same_BTS = ids_BT[:, :, None] == self.ids_BT[:, None]
        count_BT = (same_BTS.to(self.weight_BT.dtype) @ self.weight_BT[:, :, None])[:, :, 0]
        return count_BT[:, :, None] * self.r_BD[:, None]

    def mask(self, kept_B: Tensor) -> "Bags":
        return Bags(self.ids_BT, masked(self.weight_BT, kept_B), masked(self.r_BD, kept_B), self.shape[0])

    def scaled(self, scales: Tensor) -> LinearMapFactor:
        return self.merge(1).scaled(scales)

    def settled(self) -> "ManyBags":
        return self.merge(1)

    def merge(self, parts: int) -> "ManyBags":
        ids, weight, r = (z.reshape(-1, parts, z.shape[1]) for z in (self.ids_BT, self.weight_BT, self.r_BD))
        return ManyBags(ids, weight, r, self.shape[0])

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Return |c| |r|, or with scales s: sqrt(sum over v and d of c_v^2 s_vd^2 r_d^2).

        All terms are positive, so none cancel. docs/mathematics.md (1.3), and (2.4) with scales.
        """
        plain_B = self._of_bags(self._bags.values().double().square()).sqrt() * norms_of(self.r_BD)
        if inverse_scales is None:
            return plain_B
        # The largest entries are scaled to 1. Where squares underflow nevertheless, the norm is computed again below.
        largest, (r_BD, r_B), (_, c_B) = inverse_scales.max(), scale_rows(self.r_BD), scale_rows(self.weight_BT)
        scales, bags = (inverse_scales / largest).to(self.r_BD.dtype), self._bags
        c = bags.values() / c_B.to(bags.dtype)[bags.indices()[0]]
        square = torch.sparse_coo_tensor(
            bags.indices(), c.square_(), bags.shape, is_coalesced=True, check_invariants=False
        )
        square_BD = cast(Tensor, torch.sparse.mm(square, scales.square_()))
        norm_B = norms_of(square_BD.sqrt() * r_BD) * r_B * c_B * largest.double()
        for index in lost_to_underflow(norm_B, plain_B * largest.double()):
            norm_B[index] = self._scaled_norm(index, inverse_scales)
        return norm_B

    def _scaled_norm(self, index: int, inverse_scales: Tensor) -> Tensor:
        """Return one example's norm, in float64, where no square under- or overflows."""
        bag = self[index : index + 1]._bags
        columns, c_T = bag.indices()[1], bag.values().double()
        scaled_TD = c_T[:, None] * inverse_scales[columns].double() * self.r_BD[index]
        return cast(Tensor, torch.linalg.vector_norm(scaled_TD))

    def _of_bags(self, values: Tensor) -> Tensor:
        """Return the sums of values over each example's distinct words, shape (B,)."""
        return values.new_zeros(self.examples).index_add_(0, self._bags.indices()[0], values)

    @cached_property
    def _bags(self) -> Tensor:
        """The weights c, sparse, shape (B, V); the weights of repeated words are added up."""
        return _sparse(self.ids_BT, self.weight_BT, self.shape[0])


class ManyBags(LinearMapFactor):
    """The gradients of a table for several bags per example: g_i = sum over j of c_ij r_ij^T, shape (V, D).

    Under user-level privacy, for instance, a user's documents are the bags.

    Args:
        ids_BJT: words, integer, shape (B, J, T).
        weight_BJT: the weight of each word, shape (B, J, T); 0 for padding.
        r_BJD: gradients of the bags' outputs, shape (B, J, D).
        rows: V.
    """

    def __init__(self, ids_BJT: Tensor, weight_BJT: Tensor, r_BJD: Tensor, rows: int) -> None:
        super().__init__(len(ids_BJT), torch.Size((rows, r_BJD.shape[2])))
        self.ids_BJT, self.r_BJD = ids_BJT, at_least_float32(r_BJD)
        self.weight_BJT = weight_BJT.to(self.r_BJD.dtype)

    def __getitem__(self, examples: Examples) -> "ManyBags":
        return ManyBags(self.ids_BJT[examples], self.weight_BJT[examples], self.r_BJD[examples], self.shape[0])

    def dense(self) -> Tensor:
        out = self.r_BJD.new_zeros(self.examples, *self.shape)
        for index in range(self.examples):
            words_W, rows_WD = self._rows(index)
            out[index, words_W] = rows_WD
        return out

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        r_BJD = self.r_BJD * weight_B.to(self.r_BJD.dtype)[:, None, None]
        bags = _sparse(self.ids_BJT.flatten(0, 1), self.weight_BJT.flatten(0, 1), self.shape[0])
        return cast(Tensor, torch.sparse.mm(bags.t(), r_BJD.flatten(0, 1)))

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self.exact_sum(weight_B)  # each part would need a whole table

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        r_BJD = self.r_BJD.double() * weight_B.double()[:, None, None]
        bags = _sparse(self.ids_BJT.flatten(0, 1), self.weight_BJT.double().flatten(0, 1), self.shape[0])
        return cast(Tensor, torch.sparse.mm(bags.t(), r_BJD.flatten(0, 1)))

    @property
    def positions(self) -> int:
        return self.ids_BJT.shape[1]

    def read(self, ids_BT: Tensor) -> Tensor:
        return self.read_bags(ids_BT[..., None], torch.ones_like(ids_BT[..., None], dtype=self.r_BJD.dtype))

    def read_bags(self, ids_BJT: Tensor, weight_BJT: Tensor) -> Tensor:
        read = list[Tensor]()
        for index, (ids_JT, weight_JT) in enumerate(zip(ids_BJT, weight_BJT, strict=True)):
            words_W, rows_WD = self._rows(index)
            position_JT = torch.searchsorted(words_W, ids_JT).clamp(max=len(words_W) - 1)
            weight_JT = torch.where(words_W[position_JT] == ids_JT, weight_JT.to(rows_WD.dtype), 0.0)
            read.append(F.embedding_bag(position_JT, rows_WD, mode="sum", per_sample_weights=weight_JT))
        return torch.stack(read)

    def scaled(self, scales: Tensor) -> LinearMapFactor:
        if scales.shape[1] > 1:
            return super().scaled(scales)
        of_words_V = scales.expand(self.shape[0], 1)[:, 0]
        return ManyBags(self.ids_BJT, self.weight_BJT * of_words_V[self.ids_BJT], self.r_BJD, self.shape[0])

    def settled(self) -> "ManyBags":
        return self

    def mask(self, kept_B: Tensor) -> "ManyBags":
        return ManyBags(self.ids_BJT, masked(self.weight_BJT, kept_B), masked(self.r_BJD, kept_B), self.shape[0])

    def merge(self, parts: int) -> "ManyBags":
        ids, weight, r = (merged(z, parts) for z in (self.ids_BJT, self.weight_BJT, self.r_BJD))
        return ManyBags(ids, weight, r, self.shape[0])

    def __add__(self, other: Factor) -> Factor:
        if isinstance(other, Bags):
            return self + other.merge(1)
        if not isinstance(other, ManyBags) or other.ids_BJT.shape[2] != self.ids_BJT.shape[2]:
            return super().__add__(other)
        ids_BJT, weight_BJT = torch.cat([self.ids_BJT, other.ids_BJT], 1), [self.weight_BJT, other.weight_BJT]
        return ManyBags(ids_BJT, torch.cat(weight_BJT, 1), torch.cat([self.r_BJD, other.r_BJD], 1), self.shape[0])

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        weight_BJT = self.weight_BJT.abs()
        if inverse_scales is not None:
            weight_BJT = weight_BJT * inverse_scales.amax(1)[self.ids_BJT]
        return (weight_BJT.sum(2).double() * position_norms(self.r_BJD)).sum(1)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Return the norms from the rows that each example reads, after its bags have been added up."""
        norm_B = self.r_BJD.new_zeros(self.examples, dtype=torch.float64)
        for index in range(self.examples):
            words_W, rows_WD = self._rows(index)
            if inverse_scales is not None:
                rows_WD = rows_WD * inverse_scales[words_W]
            norm_B[index] = float64_norms(float64_norms(rows_WD))
        return norm_B

    def _rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an example's distinct words, sorted, and the rows of g_i for them; all other rows are zero."""
        ids_JT = self.ids_BJT[index]
        words_W, position_JT = cast("tuple[Tensor, Tensor]", torch.unique(ids_JT, return_inverse=True))
        bags = _sparse(position_JT, self.weight_BJT[index], len(words_W))
        return words_W, cast(Tensor, torch.sparse.mm(bags.t(), self.r_BJD[index]))


def _sparse(ids_JT: Tensor, weight_JT: Tensor, columns: int) -> Tensor:
    """Return bags as rows of a sparse matrix (J, columns); the weights of repeated words are added up."""
    rows_JT = torch.arange(len(ids_JT), device=ids_JT.device)[:, None].expand_as(ids_JT)
    indices, shape = torch.stack([rows_JT.flatten(), ids_JT.flatten()]), (len(ids_JT), columns)
    return torch.sparse_coo_tensor(indices, weight_JT.flatten(), shape, check_invariants=False).coalesce()
