"""The factors of an embedding table, used alone or tied to an output layer.

Shape suffixes: B examples, T positions of an example, D width.
"""

import math
from functools import cached_property
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.engine.factors.outer import Outer, lost_to_underflow, merged, position_norms, scale_rows
from privgrad.gradient.factor import (
    Examples,
    Factor,
    LinearMapFactor,
    Sum,
    at_least_float32,
    canceled,
    examples_per_block,
    float64_norms,
    in_one,
    masked,
    norms_of,
    spoiled,
    term_bound_of,
)

_FEW = 1 << 16  # comparisons for one example that take less time than a loop over the examples


class Bags(LinearMapFactor):
    """The gradients of a table for bags of its rows: g_i = sum over j of c_ij r_ij^T, shape (V, D).

    The sparse c_ij holds the weights of the words in bag j of example i, 0 for padding. A user's documents are bags.
    """

    usual_terms: ClassVar[float] = math.inf  # a sum in parts would need a whole table for each

    def __init__(self, ids_BJT: Tensor, weight_BJT: Tensor, r_BJD: Tensor, rows: int) -> None:
        super().__init__(len(ids_BJT), torch.Size((rows, r_BJD.shape[2])))
        self.ids_BJT, self.r_BJD = ids_BJT.long(), at_least_float32(r_BJD)
        self.weight_BJT = weight_BJT.to(self.r_BJD.dtype)

    def __getitem__(self, examples: Examples) -> "Bags":
        return Bags(self.ids_BJT[examples], self.weight_BJT[examples], self.r_BJD[examples], self.shape[0])

    def dense(self) -> Tensor:
        weight_BJV = self._bags.to_dense().to(self.r_BJD.dtype).view(self.examples, self.positions, self.shape[0])
        return weight_BJV.mT @ self.r_BJD

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.exact_sum(weight_B).to(self.r_BJD.dtype)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        r_BJD = self.r_BJD * weight_B.double()[:, None, None]
        return cast(Tensor, torch.sparse.mm(self._bags.t(), r_BJD.flatten(0, 1)))

    @property
    def positions(self) -> int:
        return self.ids_BJT.shape[1]

    def read(self, ids_BT: Tensor) -> Tensor:
        if not self._compares(ids_BT.shape[1]):
            return self.read_bags(ids_BT[..., None], torch.ones_like(ids_BT[..., None], dtype=self.r_BJD.dtype))
        same_BTS = ids_BT[:, :, None] == self.ids_BJT
        return (same_BTS.to(self.weight_BJT.dtype) @ self.weight_BJT.mT) * self.r_BJD

    def read_bags(self, ids_BJT: Tensor, weight_BJT: Tensor) -> Tensor:
        if self._compares(ids_BJT.shape[1:].numel()):
            return super().read_bags(ids_BJT, weight_BJT)
        read = list[Tensor]()
        for index, (ids_JT, weight_JT) in enumerate(zip(ids_BJT, weight_BJT, strict=True)):
            words_W, rows_WD = self._rows(index, self.r_BJD.dtype)
            position_JT = torch.searchsorted(words_W, ids_JT).clamp(max=len(words_W) - 1)
            weight_JT = torch.where(words_W[position_JT] == ids_JT, weight_JT.to(rows_WD.dtype), 0.0)
            read.append(F.embedding_bag(position_JT, rows_WD, mode="sum", per_sample_weights=weight_JT))
        return torch.stack(read)

    def _compares(self, read: int) -> bool:
        """Return whether to compare each word that is read with all of the example, while that takes little memory."""
        return self.positions == 1 and read * self.ids_BJT.shape[2] <= max(_FEW, self.shape.numel())

    def scaled(self, scales: Tensor) -> LinearMapFactor:
        if scales.shape[1] > 1:
            return super().scaled(scales)
        of_words_V = scales.expand(self.shape[0], 1)[:, 0]
        return Bags(self.ids_BJT, self.weight_BJT * of_words_V[self.ids_BJT], self.r_BJD, self.shape[0])

    def settled(self) -> "Bags":
        return self

    def mask(self, kept_B: Tensor) -> "Bags":
        return Bags(self.ids_BJT, masked(self.weight_BJT, kept_B), masked(self.r_BJD, kept_B), self.shape[0])

    def merge(self, parts: int) -> "Bags":
        ids, weight, r = (merged(z, parts) for z in (self.ids_BJT, self.weight_BJT, self.r_BJD))
        return Bags(ids, weight, r, self.shape[0])

    def __add__(self, other: Factor) -> Factor:
        # A table that is used twice in a pass, or in several steps of a local training.
        if not isinstance(other, Bags) or other.ids_BJT.shape[2] != self.ids_BJT.shape[2]:
            return super().__add__(other)
        ids_BJT, weight_BJT = torch.cat([self.ids_BJT, other.ids_BJT], 1), [self.weight_BJT, other.weight_BJT]
        return Bags(ids_BJT, torch.cat(weight_BJT, 1), torch.cat([self.r_BJD, other.r_BJD], 1), self.shape[0])

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        if self.positions == 1:
            return None
        weight_BJT = self.weight_BJT.abs()
        if inverse_scales is not None:
            weight_BJT = weight_BJT * inverse_scales.amax(1)[self.ids_BJT]
        return (weight_BJT.sum(2).double() * position_norms(self.r_BJD)).sum(1)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Return |c| |r| for one bag, or with scales s: sqrt(sum over v and d of c_v^2 s_vd^2 r_d^2)."""
        # All terms are positive, so none cancel: docs/mathematics.md (1.3), and (2.4) with scales.
        if self.positions > 1:
            norm_B = self.r_BJD.new_zeros(self.examples, dtype=torch.float64)
            for index in range(self.examples):
                norm_B[index] = self._norm(index, self.r_BJD.dtype, inverse_scales)
            return norm_B
        bags, r_BD = self._bags, self.r_BJD[:, 0]
        square = bags.values().square()
        square_B = square.new_zeros(self.examples).index_add_(0, bags.indices()[0], square)
        plain_B = square_B.sqrt() * norms_of(r_BD)
        if inverse_scales is None:
            return plain_B
        # The largest entries are scaled to 1. Where squares underflow nevertheless, the norm is computed again below.
        largest, (r_BD, r_B), (_, c_B) = inverse_scales.max(), scale_rows(r_BD), scale_rows(self.weight_BJT[:, 0])
        scales = (inverse_scales / largest).to(r_BD.dtype)
        c = (bags.values() / c_B[bags.indices()[0]]).to(r_BD.dtype)
        shape = bags.shape
        square = torch.sparse_coo_tensor(bags.indices(), c.square_(), shape, is_coalesced=True, check_invariants=False)
        square_BD = cast(Tensor, torch.sparse.mm(square, scales.square_()))
        norm_B = norms_of(square_BD.sqrt() * r_BD) * r_B * c_B * largest.double()
        for index in lost_to_underflow(norm_B, plain_B * largest.double()):
            # In float64, no square under- or overflows.
            norm_B[index] = self._norm(index, torch.float64, inverse_scales)
        return norm_B

    @cached_property
    def _bags(self) -> Tensor:
        """The weights c of all bags, shape (B J, V), float64."""
        return _sparse(self.ids_BJT.flatten(0, 1), self.weight_BJT.double().flatten(0, 1), self.shape[0])

    def _norm(self, index: int, dtype: torch.dtype, inverse_scales: Tensor | None) -> Tensor:
        words_W, rows_WD = self._rows(index, dtype)
        if inverse_scales is not None:
            rows_WD = rows_WD * inverse_scales[words_W].to(dtype)
        return float64_norms(float64_norms(rows_WD))

    def _rows(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return an example's distinct words, sorted, and the rows of g_i for them; all other rows are zero."""
        words_W, position_JT = cast("tuple[Tensor, Tensor]", torch.unique(self.ids_BJT[index], return_inverse=True))
        bags = _sparse(position_JT, self.weight_BJT[index].to(dtype), len(words_W))
        return words_W, cast(Tensor, torch.sparse.mm(bags.t(), self.r_BJD[index].to(dtype)))


def _sparse(ids_JT: Tensor, weight_JT: Tensor, columns: int) -> Tensor:
    """Return bags as rows of a sparse matrix (J, columns); the weights of repeated words are added up."""
    rows_JT = torch.arange(len(ids_JT), device=ids_JT.device)[:, None].expand_as(ids_JT)
    indices, shape = torch.stack([rows_JT.flatten(), ids_JT.flatten()]), (len(ids_JT), columns)
    return torch.sparse_coo_tensor(indices, weight_JT.flatten(), shape, check_invariants=False).coalesce()


class Rows(LinearMapFactor):
    """The gradients of an embedding table, (V, D): row v of g_i is the sum of r_it over all t with ids_it = v."""

    usual_terms: ClassVar[float] = math.inf  # a sum in parts would need a whole table for each

    def __init__(self, ids_BT: Tensor, r_BTD: Tensor, rows: int) -> None:
        super().__init__(ids_BT.shape[0], torch.Size((rows, r_BTD.shape[2])))
        self.ids_BT, self.r_BTD = ids_BT.long(), at_least_float32(r_BTD)

    def __getitem__(self, examples: Examples) -> "Rows":
        return Rows(self.ids_BT[examples], self.r_BTD[examples], self.shape[0])

    def dense(self) -> Tensor:
        rows, width = self.shape
        out = self.r_BTD.new_zeros(self.examples * rows, width)
        return out.index_add_(0, _apart(self.ids_BT, rows), self.r_BTD.flatten(0, 1)).view(-1, rows, width)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        r_BTD = self.r_BTD * weight_B.to(self.r_BTD.dtype)[:, None, None]
        return self.r_BTD.new_zeros(self.shape).index_add_(0, self.ids_BT.flatten(), r_BTD.flatten(0, 1))

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        total = self.r_BTD.new_zeros(self.shape, dtype=torch.float64)
        r_BTD = self.r_BTD * weight_B.double()[:, None, None]
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
        return None if self.positions == 1 else self._position_norms(inverse_scales).sum(1)

    def apart_bound(self, inverse_scales: Tensor | None) -> Tensor:
        """Return a smaller `term_bound`: no term of one word is added to one of another, so each has its own."""
        return float64_norms(self._by_word(self._position_norms(inverse_scales)))

    def _position_norms(self, inverse_scales: Tensor | None) -> Tensor:
        return position_norms(self.r_BTD if inverse_scales is None else self.r_BTD * inverse_scales[self.ids_BT])

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        # Gradients of a row that an example reads several times are added up first: docs/mathematics.md (1.6).
        if self.shape[0] <= self.positions:
            return norms_of(self.dense(), inverse_scales)
        scales_BTD = None if inverse_scales is None else inverse_scales[self._words[0]]
        return norms_of(self._by_word(self.r_BTD), scales_BTD)

    @cached_property
    def _words(self) -> tuple[Tensor, Tensor]:
        """Each example's words in order, (B, T), and for each position the place of its word there, (B T,)."""
        ids_BT = self.ids_BT.contiguous()
        words_BT = ids_BT.sort(1).values
        return words_BT, _apart(torch.searchsorted(words_BT, ids_BT), self.positions)  # the first of equal words

    def _by_word(self, values_BT: Tensor) -> Tensor:
        """Add up the values of each word at its place in an example, and put 0 at all other places."""
        if self.positions == 1:
            return values_BT
        values = values_BT.flatten(0, 1)
        return torch.zeros_like(values).index_add_(0, self._words[1], values).view_as(values_BT)


def _apart(index_BT: Tensor, most: int) -> Tensor:
    """Return a number for each pair of an example and an index below `most`, shape (B T,)."""
    first_B = torch.arange(0, len(index_BT) * most, most, device=index_BT.device)
    return (index_BT + first_B[:, None]).flatten()


class TiedTable(Sum):
    """The gradients of an embedding table that is also the output layer: G + R, an Outer and Rows.

    |G + R|^2 = |G|^2 + |R|^2 + 2 <G, R>, <G, R> = sum over s, t of b_t[id_s] (a_t . r_s): docs/mathematics.md (1.7).
    """

    def __init__(self, outer: Outer, rows: Rows) -> None:
        super().__init__([outer, rows])
        self.outer, self.rows = outer, rows

    def __getitem__(self, examples: Examples) -> "TiedTable":
        return TiedTable(self.outer[examples], self.rows[examples])

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return term_bound_of(self.outer, inverse_scales) + self.rows.apart_bound(inverse_scales)

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
        chunks = self._split(examples_per_block(self.outer.positions * self.rows.positions, self.rows.r_BTD))
        products = [cast(TiedTable, part)._inner_products(inverse_scales) for part in chunks]
        square_B = parts_B.square().sum(0) + 2 * in_one(products)
        norm_B = square_B.sqrt()  # nan of a negative square, which is canceled
        if (again := spoiled(canceled(square_B, parts_B.sum(0)))) is not None:
            norm_B[again] = Factor.norms(self[again], inverse_scales)
        return norm_B

    def _inner_products(self, inverse_scales: Tensor | None) -> Tensor:
        """Return each example's <G, R>, both times the inverse scales if there are any; shape (B,), float64."""
        ids_BS, r_BSD = self.rows.ids_BT, self.rows.r_BTD
        if inverse_scales is not None:
            r_BSD = r_BSD * inverse_scales[ids_BS].square()
        b_BTS = self.outer.b_BTO.gather(2, ids_BS[:, None].expand(-1, self.outer.b_BTO.shape[1], -1))
        return (b_BTS * (self.outer.a_BTI @ r_BSD.mT)).sum((1, 2), dtype=torch.float64)
