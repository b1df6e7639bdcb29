"""The factor of a linear map's weight, a sum of outer products over positions, and factors that contain it.

Shape suffixes: B examples, T positions of an example, I inputs, O outputs.
"""

from collections.abc import Callable, MutableMapping, Sequence
from functools import cached_property
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from privgrad.gradient.factor import (
    CANCELED,
    TINY,
    Dense,
    Examples,
    Factor,
    LinearMapFactor,
    Sum,
    added_up,
    as_linear_map,
    at_least_float32,
    canceled,
    examples_per_block,
    float64_norms,
    in_one,
    largest_entries,
    masked,
    native_norms,
    norms_of,
    once,
    spoiled,
    sum_of_products,
    sum_of_rows,
    term_bound_of,
)
from privgrad.processes import AT_ONCE, blocks, is_on_processor, is_slow

_LOST = 1e-12  # a norm from float32 squares that is a smaller share of its bound is computed again
_ADDED = 16  # multiplications that take as long as adding one entry of a weight in memory
SMALL = 1 << 19  # entries of a gradient that a device other than the CPU writes out while it would start few kernels


def position_norms(x: Tensor) -> Tensor:
    """Return the norm over the last dimension in float64, correct also where float32 squares under- or overflow."""
    # The number of examples must not decide how: the bounds of all others would be rounded differently.
    if not is_on_processor(x):
        if x.numel() <= AT_ONCE:
            return float64_norms(x)
        few = examples_per_block(x[:1].numel(), x)
        return torch.cat([float64_norms(x[start : start + few]) for start in range(0, x.shape[0], few)])
    norms = native_norms(x).double()
    lost = (norms < TINY) | ~torch.isfinite(norms)
    if bool(lost.any()):
        norms[lost] = float64_norms(x[lost])
    return norms


def unread_norms(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return how to compute norms like `position_norms` without a look at them, for `Factor.term_norms`."""
    return native_norms if is_on_processor(x) else position_norms


def sum_over(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension, in an order that does not depend on the rest of the batch."""
    # torch adds up a tensor in its memory order. If positions come before examples in memory, the grouping of an
    # example's positions depends on its column and on the batch size. A contiguous copy prevents this, in parts that
    # stay in the cache.
    if x.is_contiguous():
        return x.sum(dim)
    few = examples_per_block(x.shape[1:].numel(), x)
    return in_one([part.contiguous().sum(dim) for part in cast("list[Tensor]", x.split(few))])


def indices(found: Tensor | None) -> list[int]:
    """Return the indices that `spoiled` found."""
    return [] if found is None else cast("list[int]", found.tolist())


def lost_to_underflow(norm_B: Tensor, bound_B: Tensor) -> list[int]:
    """Return the indices of norms that squares may have spoiled: a tiny share of the bound, or not finite unlike it."""
    lost_B = (norm_B < _LOST * bound_B) | ~torch.isfinite(norm_B)
    return indices(spoiled(lost_B & torch.isfinite(bound_B)))


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x with each row divided by its largest absolute entry, and these entries in float64."""
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_ones(len(x), 1)
    largest = torch.where(largest > 0, largest, 1.0)
    return x / largest, largest[:, 0].double()


def largest_scale(inverse_scales: Tensor | None) -> float | Tensor:
    """Return the largest of the inverse scales, or 1 if there are none."""
    return 1.0 if inverse_scales is None or not inverse_scales.numel() else inverse_scales.max()


def merged(x: Tensor, parts: int) -> Tensor:
    """Join the positions of every `parts` neighboring rows: (B parts, T, D) -> (B, parts T, D)."""
    return x.reshape(len(x) // parts, parts * x.shape[1], x.shape[2])


class Outer(LinearMapFactor):
    """The gradients of a linear map's weight: g_i = sum over t of b_it a_it^T, shape (O, I).

    Here a are the inputs, and b the gradients of the outputs, also of shape (B, O) for one position.
    docs/mathematics.md (1.1) derives these gradients, and (1.2) to (1.5) their norms, their term bound and their
    weighted sum.
    """

    def __init__(self, a_BTI: Tensor, b_BTO: Tensor) -> None:
        super().__init__(a_BTI.shape[0], torch.Size((b_BTO.shape[-1], a_BTI.shape[2])))
        self.a_BTI, self._b = at_least_float32(a_BTI), at_least_float32(b_BTO)
        self.b_BTO = self._b if len(b_BTO.shape) == 3 else self._b[:, None]
        self.keeps = False  # whether `norms` keeps the gradients for `weighted_sum` if it writes them out
        self._kept: Tensor | None = None

    def __getitem__(self, examples: Examples) -> "Outer":
        found = Outer(self.a_BTI[examples], self.b_BTO[examples])
        found._kept = None if self._kept is None else self._kept[examples]
        return found

    def dense(self) -> Tensor:
        return self.b_BTO.mT @ self.a_BTI if self._kept is None else self._kept

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        if self._kept is not None:
            return Dense(self._kept).weighted_sum(weight_B)
        b_TO, a_TI = self._weighted(weight_B)
        return b_TO.mT @ a_TI

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        if self._kept is not None:
            return Dense(self._kept).sum_in_parts(weight_B)
        return sum_of_products(*self._weighted(weight_B))

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        total = self.a_BTI.new_zeros(self.shape, dtype=torch.float64)
        size = self._per_block(self.positions * sum(self.shape))
        for start in range(0, self.examples, size):
            part = slice(start, start + size)
            b_BTO = self.b_BTO[part].double() * weight_B[part].double()[:, None, None]
            total.addmm_(b_BTO.flatten(0, 1).mT, self.a_BTI[part].double().flatten(0, 1))
        return total

    def apply(self, x_BTI: Tensor) -> Tensor:
        positions, (outputs, inputs) = (self.a_BTI.shape[1], x_BTI.shape[1]), self.shape
        # Inner products of positions, where these take fewer operations than g_i itself: docs/mathematics.md (1.8).
        if positions[0] * positions[1] * (inputs + outputs) <= sum(positions) * inputs * outputs:
            return (x_BTI @ self.a_BTI.mT) @ self.b_BTO
        return super().apply(x_BTI)

    def is_faster_written_out(self, positions: int) -> bool:
        """Return whether g_i added to a common weight takes fewer operations than two products with an input."""
        outputs, inputs = self.shape
        products = 2 * positions * self.positions * (inputs + outputs)
        written = self.positions if self._kept is None else 0
        return products > (written + _ADDED) * inputs * outputs

    def read(self, ids_BT: Tensor) -> Tensor:
        b_BTS = self.b_BTO.gather(2, ids_BT[:, None].expand(-1, self.b_BTO.shape[1], -1))
        return b_BTS.mT @ self.a_BTI

    def written_out(self) -> Dense:
        return Dense(self.dense())

    def scaled(self, scales: Tensor) -> LinearMapFactor:
        if scales.shape[0] == 1:
            return Outer(self.a_BTI * scales, self.b_BTO)
        return Outer(self.a_BTI, self.b_BTO * scales.mT) if scales.shape[1] == 1 else super().scaled(scales)

    def settled(self) -> LinearMapFactor:
        return self if self.has_few_positions else self.written_out()

    def transposed(self) -> "Outer":
        return Outer(self.b_BTO, self.a_BTI)

    def _weighted(self, weight_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return b and a with the positions of all examples in one dimension, one of them times the weights."""
        a_BTI, b_BTO = self.a_BTI, self.b_BTO
        weight_B11 = (weight_B if weight_B.dtype == b_BTO.dtype else weight_B.to(b_BTO.dtype))[:, None, None]
        if a_BTI.shape[2] < b_BTO.shape[2]:  # the smaller one, to save time
            a_BTI = a_BTI * weight_B11
        else:
            b_BTO = b_BTO * weight_B11
        if not b_BTO.is_contiguous():  # recurrent layers keep time first in memory
            a_BTI, b_BTO = a_BTI.transpose(0, 1), b_BTO.transpose(0, 1)
        return b_BTO.flatten(0, 1), a_BTI.flatten(0, 1)

    def mask(self, kept_B: Tensor) -> "Outer":
        found = Outer(masked(self.a_BTI, kept_B), masked(self.b_BTO, kept_B))
        # The others are computed in the same way, and so rounded in the same way, whichever examples are masked.
        found._kept = None if self._kept is None else masked(self._kept, kept_B)
        return found

    def gram(self) -> Tensor:
        if self.a_BTI.shape[1] > 1:
            return super().gram()
        a_BI, b_BO = self.a_BTI.flatten(1), self.b_BTO.flatten(1)
        return (a_BI @ a_BI.mT) * (b_BO @ b_BO.mT)

    def merge(self, parts: int) -> "Outer":
        return Outer(merged(self.a_BTI, parts), merged(self.b_BTO, parts))

    def __add__(self, other: Factor) -> Factor:
        return Outer.joined([self, other]) if isinstance(other, Outer) else super().__add__(other)

    @staticmethod
    def joined(parts: "Sequence[Outer]") -> "Outer":
        """Return the sum of gradients of one weight, with the positions of all parts."""
        return Outer(torch.cat([part.a_BTI for part in parts], 1), torch.cat([part.b_BTO for part in parts], 1))

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        if self.positions == 1:
            return None
        of_inputs, of_outputs = self._term_norms(position_norms, inverse_scales)
        return (of_inputs * of_outputs).sum(1)

    def term_norms(self, inverse_scales: Tensor | None = None) -> tuple[Tensor, ...] | None:
        return None if self.a_BTI.shape[1] == 1 else self._term_norms(unread_norms(self.b_BTO), inverse_scales)

    def _term_norms(self, norms: Callable[[Tensor], Tensor], inverse_scales: Tensor | None) -> tuple[Tensor, Tensor]:
        if inverse_scales is not None:
            of_outputs, of_inputs = bounding_product(inverse_scales)
            return norms(self.a_BTI * of_inputs), norms(self.b_BTO * of_outputs)
        return once(norms, self.a_BTI), once(norms, self.b_BTO)

    @property
    def positions(self) -> int:
        return self.a_BTI.shape[1]

    @property
    def has_few_positions(self) -> bool:
        """Whether inner products of positions take fewer operations than the gradients themselves."""
        outputs, inputs = self.b_BTO.shape[2], self.a_BTI.shape[2]
        return self.a_BTI.shape[1] * (inputs + outputs) < inputs * outputs

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        # For one position (T = 1): |b| |a|, or sqrt(b^2 . W a^2) with W = inverse_scales^2. For few positions, without
        # scales: |g|^2 = sum over s, t of (a_s . a_t)(b_s . b_t). docs/mathematics.md (1.3), (2.2) and (1.2).
        positions, inputs, outputs = *self.a_BTI.shape[1:], self.b_BTO.shape[2]
        if positions == 1 and inverse_scales is None:
            return norms_of(self.a_BTI) * once(norms_of, self._b)
        if positions == 1:
            scales = at_least_float32(cast(Tensor, inverse_scales))
            largest, square = _unit_squares(scales)
            parts = [cast(Outer, part)._scaled_norms(square) for part in self._split(self._per_block(inputs))]
            norm_B = in_one(parts) * largest
            for index in lost_to_underflow(norm_B, norms_of(self.a_BTI) * norms_of(self.b_BTO) * largest):
                norm_B[index] = Factor.norms(self[index : index + 1], scales)[0]
            return norm_B
        # Other devices write a small gradient out in less time than they start further kernels. The number of examples
        # must not decide: the norms of all others would be rounded differently.
        on_processor = is_on_processor(self.b_BTO)
        if inverse_scales is None and self.has_few_positions and (is_slow(self.b_BTO) or inputs * outputs > SMALL):
            few = self._per_block(positions**2)
            if few >= self.examples:
                return self.norms_by_inner_products()
            return torch.cat([cast(Outer, part).norms_by_inner_products() for part in self._split(few)])
        if self.keeps:
            self._kept = self.dense()
            return Dense(self._kept).norms(inverse_scales)
        in_place = self._kept is None and on_processor
        return self._norms_in_place(inverse_scales) if in_place else super().norms(inverse_scales)

    def _per_block(self, floats: int) -> int:
        return examples_per_block(floats, self.b_BTO)

    def _norms_in_place(self, inverse_scales: Tensor | None) -> Tensor:
        """Return `Factor.norms` in the same memory for all chunks, since to allocate takes as long as to fill."""
        chunks, found = cast("list[Outer]", self._split()), list[Tensor]()
        scratch_BOI = self.a_BTI.new_empty(chunks[0].examples, *self.shape)
        # Scales in a wider precision must not be rounded to that of the gradients.
        is_wider = inverse_scales is not None and torch.result_type(scratch_BOI, inverse_scales) != scratch_BOI.dtype
        for chunk in chunks:
            with torch.no_grad():  # torch refuses to write into given memory where it records a graph
                grads_BOI = torch.bmm(chunk.b_BTO.mT, chunk.a_BTI, out=scratch_BOI[: chunk.examples])
                if inverse_scales is not None and not is_wider:
                    grads_BOI.mul_(inverse_scales)
            found.append(norms_of(grads_BOI, inverse_scales if is_wider else None))
        return in_one(found)

    def norms_by_inner_products(self) -> Tensor:
        """Return the norms from Gram matrices of positions, or from g_i itself where terms cancel or underflow."""
        a_BTT, b_BTT = self.a_BTI @ self.a_BTI.mT, self.b_BTO @ self.b_BTO.mT
        bound_B, lost_B = self.bound(a_BTT, b_BTT)
        square_B = (a_BTT * b_BTT).sum((1, 2), dtype=torch.float64)
        # Rounding errors of terms that cancel, or squares that underflow, would hide the norm from clipping.
        lost_B |= torch.addcmul(square_B, bound_B, bound_B, value=-CANCELED) <= 0
        norm_B = square_B.sqrt()  # nan of a negative square, which is lost
        if (again := spoiled(lost_B)) is not None:
            norm_B[again] = Factor.norms(Outer(self.a_BTI[again].double(), self.b_BTO[again].double()))
        return norm_B

    def bound(self, a_BTT: Tensor, b_BTT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum over t of |b_t| |a_t|, which is at least |g|, and `underflowing`, from Gram matrices."""
        if not is_on_processor(a_BTT):
            a_BT, b_BT = once(position_norms, self.a_BTI), once(position_norms, self.b_BTO)
        else:
            a_BT = a_BTT.diagonal(dim1=1, dim2=2).sqrt()
            b_BT = native_norms(self.b_BTO) if b_BTT is None else b_BTT.diagonal(dim1=1, dim2=2).sqrt()
        terms_BT = a_BT * b_BT
        return terms_BT.sum(1, dtype=torch.float64), self.underflowing(a_BT, b_BT, terms_BT)

    def underflowing(
        self, a_BT: Tensor | None = None, b_BT: Tensor | None = None, terms_BT: Tensor | None = None
    ) -> Tensor:
        """Return which examples have a position whose squares underflow on one side and are large on the other."""
        # Exact zeros, as at padding, hide nothing.
        if not is_on_processor(self.b_BTO):  # a look at the answer takes longer than the work; float64 shows zeros
            if terms_BT is None or terms_BT.dtype != torch.float64:
                a_BT, b_BT = once(position_norms, self.a_BTI), once(position_norms, self.b_BTO)
                terms_BT = a_BT * b_BT
            least_BT = torch.minimum(cast(Tensor, a_BT), cast(Tensor, b_BT))
            # 0 < least < TINY * largest, where terms are least * largest
            return torch.addcmul(terms_BT, least_BT, least_BT, value=-1 / TINY).gt(0).any(1)
        a_BT = native_norms(self.a_BTI) if a_BT is None else a_BT
        b_BT = native_norms(self.b_BTO) if b_BT is None else b_BT
        lost_BT = (torch.minimum(a_BT, b_BT) < TINY) & (torch.maximum(a_BT, b_BT) > 1)
        if not self.shape.numel() or not lost_BT.any().item():
            return lost_BT.any(1)
        return (lost_BT & (torch.minimum(largest_entries(self.a_BTI), largest_entries(self.b_BTO)) > 0)).any(1)

    def _scaled_norms(self, square: Tensor) -> Tensor:
        """Return sqrt(b^2 W . a^2) for one position, with W the squared inverse scales: no terms cancel."""
        b_BO, b_B = scale_rows(self.b_BTO[:, 0])
        square_BI = b_BO.square_() @ square.to(b_BO.dtype)
        return norms_of(square_BI.sqrt_().mul_(self.a_BTI[:, 0])) * b_B


def bounding_product(inverse_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return r, shape (O,), and c, shape (I,), with s_oi <= r_o c_i for scales s: docs/mathematics.md (2.3)."""
    scales_OI = inverse_scales.flatten(2).amax(2) if inverse_scales.dim() > 2 else inverse_scales
    of_outputs = scales_OI.amax(1)
    return of_outputs, (scales_OI / of_outputs[:, None]).amax(0)


# By the tensor of scales: its version, the largest scale, and the squares.
_unit_squares_of: MutableMapping[Tensor, tuple[int, Tensor, Tensor]] = WeakTensorKeyDictionary()


def _unit_squares(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest scale, and the squares of the scales divided by it; cached until the scales change."""
    known = None if scales.is_inference() else _unit_squares_of.get(scales)
    if known is not None and known[0] == scales._version:
        return known[1:]
    largest = scales.max() if scales.numel() else scales.new_ones(())
    square = torch.empty_like(scales) if known is None else known[2]
    for scale, squared in blocks(scales, square):
        torch.div(scale, largest, out=squared).square_()
    if not scales.is_inference():
        _unit_squares_of[scales] = scales._version, largest, square
    return largest, square


Rows = Outer | Dense  # gradients of a weight as rows, shape (O, F): Outer for few positions, or written out


class Combined(LinearMapFactor):
    """Gradients whose row o is g_io = h_io + along_io y_o + level_io, with rows y that are common to all examples."""

    usual_terms: ClassVar[float] = 32.0  # as for other computed weights, see `parametrized.Pulled`

    def __init__(
        self, inner: Factor, rows: Tensor, along_BO: Tensor, level_BO: Tensor, square_BO: Tensor | None = None
    ) -> None:
        super().__init__(inner.examples, rows.shape)
        self.inner, self.rows = inner, rows  # h, which is `Rows` or a sum of them, and y
        self.along_BO, self.level_BO = along_BO, level_BO
        self.square_BO = square_BO  # |g_io|^2 up to rounding errors of |h_io|^2, or None

    def __getitem__(self, examples: Examples) -> "Combined":
        square_BO = None if self.square_BO is None else self.square_BO[examples]
        return Combined(self.inner[examples], self.rows, self.along_BO[examples], self.level_BO[examples], square_BO)

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
        return self.inner.sum_in_parts(weight_B)

    def _inner_terms(self) -> Tensor:
        return term_bound_of(self.inner, None)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        along_O, level_O = (weight_B.double() @ x.double() for x in (self.along_BO, self.level_BO))
        shared_OF = torch.addcmul(level_O[:, None], along_O[:, None], self.rows.double().flatten(1))
        return (self.inner.exact_sum(weight_B) + shared_OF).view(self.shape)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def mask(self, kept_B: Tensor) -> "Combined":
        along_BO, level_BO = masked(self.along_BO, kept_B), masked(self.level_BO, kept_B)
        square_BO = None if self.square_BO is None else masked(self.square_BO, kept_B)
        return Combined(self.inner.mask(kept_B), self.rows, along_BO, level_BO, square_BO)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is not None or self.square_BO is None:
            return super().norms(inverse_scales)
        square_B = self.square_BO.sum(1, dtype=torch.float64)
        norm_B = square_B.sqrt()  # nan of a negative square, which is canceled
        again = spoiled(canceled(square_B, self._term_bound) | ~torch.isfinite(square_B) | self._underflowing())
        for index in indices(again):
            norm_B[index] = Factor.norms(self[index : index + 1])[0]
        return norm_B

    @cached_property
    def _term_bound(self) -> Tensor:
        along_B = native_norms(self.along_BO * native_norms(self.rows.flatten(1)))
        level_B = native_norms(self.level_BO) * self.rows[0].numel() ** 0.5
        return self._inner_terms() + along_B + level_B

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor:
        return largest_scale(inverse_scales) * self._term_bound

    def _underflowing(self) -> Tensor:
        lost_B = torch.zeros_like(self.along_BO[:, 0], dtype=torch.bool)
        for part in self.inner.parts if isinstance(self.inner, Sum) else [self.inner]:
            lost_B |= part.underflowing() if isinstance(part, Outer) else False
        return lost_B

    def _per_block(self, floats: int) -> int:
        return examples_per_block(floats, self.along_BO)

    def of_patches(self) -> "Combined":
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


class RowRanges(Factor):
    """Factors for disjoint ranges of rows of a parameter, by first row; all other rows are zero."""

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
        return None if inverse_scales is None else inverse_scales[row : row + part.shape[0]]

    def _joined(self, sums: list[Tensor]) -> Tensor:
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
