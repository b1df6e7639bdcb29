"""Per-example gradients kept factored: their norms and weighted sums, without one gradient an example in memory.

Shape suffixes: B examples, T places of an example (time, pixels), I inputs, O outputs, D width, P a parameter's shape.
Everything here is computed in float32 or wider, and is NOT private.
"""

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from privgrad.gradient.norms import (
    TINY,
    cached,
    hidden,
    kept,
    long_norms,
    norms_of,
    place_norms,
    short_norms,
    unit,
    wide,
)
from privgrad.threads import blocks

_CANCELLED = 1e-3  # below this share of its terms, a squared norm from inner products is taken from the sum itself


class Factor(ABC):
    """The gradients g_i of B examples with respect to one parameter.

    A subclass says how one chunk of examples is written out (`dense`), and what it can do without.
    """

    def __init__(self, examples: int, shape: torch.Size) -> None:
        self.examples = examples
        self.shape = shape

    @abstractmethod
    def __getitem__(self, examples: slice) -> "Factor":
        """The same for a range of examples."""

    @abstractmethod
    def dense(self) -> Tensor:
        """grads_BP, shape (B, *P)."""

    @abstractmethod
    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        """Sum over i of weight_i * g_i, shape P. Every example's gradient must be finite."""

    def add_weighted_sum(self, total: Tensor, weight_B: Tensor) -> None:
        """Add that sum to a total of shape P, in place."""
        total += self.weighted_sum(weight_B)

    @abstractmethod
    def keep(self, kept_B: Tensor) -> "Factor":
        """The same with zeros for every example that is not kept; kept_B is bool, shape (B,)."""

    @property
    def worth_keeping(self) -> bool:
        """Whether gradients written out for their norms would make the weighted sum much cheaper."""
        return False

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Bound on the terms that `weighted_sum` adds up for each g_i, shape (B,), float64; None: g_i itself.

        Far above the norm, terms cancel, and what rounding leaves of them is not bounded by the norm.
        """
        return None

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """L2 norm of each g_i, or of g_i * inverse_scales (shape P): norms_B, shape (B,), float64."""
        return torch.cat([norms_of(part.dense(), inverse_scales) for part in self._split()])

    def written_out(self) -> "Dense":
        """The same with all gradients in memory."""
        parts = self._split()
        first = parts[0].dense()
        if len(parts) == 1:
            return Dense(first)
        # Filled in place: joined at the end, all gradients would be in memory twice.
        grads_BP, start = first.new_empty(self.examples, *self.shape), len(first)
        grads_BP[:start] = first
        for part in parts[1:]:
            grads_BP[start : start + part.examples] = part.dense()
            start += part.examples
        return Dense(grads_BP)

    def merge(self, parts: int) -> "Factor":
        """Every `parts` neighbouring rows are one example: the sum of their gradients."""
        return Dense(self.dense().reshape(self.examples // parts, parts, *self.shape).sum(1))

    def __mul__(self, share: float) -> "Factor":
        """Every gradient times a positive number."""
        return Scaled(self, share)

    def inner_products(self, direction: Tensor) -> Tensor:
        """<g_i, direction>, shape (B,): what the weighted sum along the direction owes to each weight."""
        with torch.enable_grad():
            weight_B = direction.new_zeros(self.examples).requires_grad_()
            along = (self.weighted_sum(weight_B) * direction).sum()
        return torch.autograd.grad(along, weight_B)[0]

    def apply(self, x_BTI: Tensor) -> Tensor:
        """g_i x_it for every place t: what a linear map with weight g_i, shape (O, I), makes of x, shape (B, T, O)."""
        return x_BTI @ self.dense().mT

    def read(self, ids_BT: Tensor) -> Tensor:
        """Rows ids_it of g_i, shape (V, D): what a table g_i returns, shape (B, T, D)."""
        return self.dense().gather(1, ids_BT[:, :, None].expand(-1, -1, self.shape[1]))

    def read_bags(self, ids_BJT: Tensor, weight_BJT: Tensor) -> Tensor:
        """Weighted sums of J times T rows of g_i, shape (V, D): what bags of a table g_i return, shape (B, J, D)."""
        read_BJTD = self.read(ids_BJT.flatten(1)).reshape(*ids_BJT.shape, -1)
        return (read_BJTD * weight_BJT.to(read_BJTD.dtype)[..., None]).sum(2)

    def of_patches(self) -> "Factor":
        """Of a convolution's weight, shape (O, I, *kernel): as a linear map of patches, shape (O, I kernel)."""
        return Dense(self.dense().flatten(2))

    def scaled(self, scales: Tensor) -> "Factor":
        """Every gradient times the same scales, whose shape broadcasts to P."""
        return Dense(self.dense() * scales)

    def settled(self) -> "Factor":
        """The same in the form that is cheapest to use often and to add to."""
        return self.written_out()

    def transposed(self) -> "Factor":
        """Every gradient transposed, for a weight that is stored so."""
        return Dense(self.dense().mT)

    def gram(self) -> Tensor:
        """Inner products of all pairs of examples' gradients, shape (B, B)."""
        rows_BP = self.dense().flatten(1)
        return rows_BP @ rows_BP.mT

    def __add__(self, other: "Factor") -> "Factor":
        """The gradient of a parameter that is used in two places."""
        return Sum([self, other])

    def _split(self, few: int | None = None) -> "list[Factor]":
        """Parts of that many examples, or as many as the cache holds written out; at least one, perhaps empty."""
        few = cached(int(self.shape.numel())) if few is None else few
        return [self[start : start + few] for start in range(0, self.examples, few) or [0]]


class Scaled(Factor):
    """share * g_i.

    Args:
        inner: g_i.
        share: > 0.
    """

    def __init__(self, inner: Factor, share: float) -> None:
        super().__init__(inner.examples, inner.shape)
        self.inner, self.share = inner, share

    def __getitem__(self, examples: slice) -> "Scaled":
        return Scaled(self.inner[examples], self.share)

    def dense(self) -> Tensor:
        return self.share * self.inner.dense()

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.inner.weighted_sum(self.share * weight_B)

    def add_weighted_sum(self, total: Tensor, weight_B: Tensor) -> None:
        self.inner.add_weighted_sum(total, self.share * weight_B)

    def keep(self, kept_B: Tensor) -> "Scaled":
        return Scaled(self.inner.keep(kept_B), self.share)

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        terms_B = self.inner.terms(inverse_scales)
        return None if terms_B is None else self.share * terms_B

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        return self.share * self.inner.norms(inverse_scales)

    def inner_products(self, direction: Tensor) -> Tensor:
        return self.share * self.inner.inner_products(direction)


class Dense(Factor):
    """Gradients written out, for small parameters.

    Args:
        grads_BP: shape (B, *P).
    """

    def __init__(self, grads_BP: Tensor) -> None:
        super().__init__(len(grads_BP), grads_BP.shape[1:])
        self.grads_BP = wide(grads_BP)

    def __getitem__(self, examples: slice) -> "Dense":
        return Dense(self.grads_BP[examples])

    def dense(self) -> Tensor:
        return self.grads_BP

    def written_out(self) -> "Dense":
        return self

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return (weight_B.to(self.grads_BP.dtype) @ self.grads_BP.flatten(1)).view(self.shape)

    def keep(self, kept_B: Tensor) -> "Dense":
        return Dense(kept(self.grads_BP, kept_B))

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        return norms_of(self.grads_BP, inverse_scales) if inverse_scales is None else super().norms(inverse_scales)

    def __add__(self, other: Factor) -> Factor:
        return Dense(self.grads_BP + other.grads_BP) if isinstance(other, Dense) else super().__add__(other)


class Outer(Factor):
    """The weight of a linear map: g_i = sum over t of b_it a_it^T, shape (O, I).

    Args:
        a_BTI: inputs, shape (B, T, I).
        b_BTO: gradients of the outputs, shape (B, T, O).
    """

    def __init__(self, a_BTI: Tensor, b_BTO: Tensor) -> None:
        super().__init__(len(a_BTI), torch.Size((b_BTO.shape[2], a_BTI.shape[2])))
        self.a_BTI, self.b_BTO = wide(a_BTI), wide(b_BTO)

    def __getitem__(self, examples: slice) -> "Outer":
        return Outer(self.a_BTI[examples], self.b_BTO[examples])

    def dense(self) -> Tensor:
        return self.b_BTO.mT @ self.a_BTI

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        b_TO, a_TI = self._weighted(weight_B)
        return b_TO.mT @ a_TI

    def add_weighted_sum(self, total: Tensor, weight_B: Tensor) -> None:
        b_TO, a_TI = self._weighted(weight_B)
        total.addmm_(b_TO.mT, a_TI)

    def apply(self, x_BTI: Tensor) -> Tensor:
        """By way of inner products of places, unless the parameter is smaller than these."""
        places, (outputs, inputs) = (self.a_BTI.shape[1], x_BTI.shape[1]), self.shape
        if places[0] * places[1] * (inputs + outputs) <= sum(places) * inputs * outputs:
            return (x_BTI @ self.a_BTI.mT) @ self.b_BTO
        return super().apply(x_BTI)

    def read(self, ids_BT: Tensor) -> Tensor:
        b_BTS = self.b_BTO.gather(2, ids_BT[:, None].expand(-1, self.b_BTO.shape[1], -1))
        return b_BTS.mT @ self.a_BTI

    def written_out(self) -> Dense:
        return Dense(self.dense())

    def scaled(self, scales: Tensor) -> Factor:
        if scales.shape[0] == 1:
            return Outer(self.a_BTI * scales, self.b_BTO)
        return Outer(self.a_BTI, self.b_BTO * scales.mT) if scales.shape[1] == 1 else super().scaled(scales)

    def settled(self) -> Factor:
        places, (outputs, inputs) = self.a_BTI.shape[1], self.shape
        return self if places * (inputs + outputs) < inputs * outputs else self.written_out()

    def transposed(self) -> "Outer":
        return Outer(self.b_BTO, self.a_BTI)

    def _weighted(self, weight_B: Tensor) -> tuple[Tensor, Tensor]:
        """All places of all examples in one dimension, with the weights in b."""
        a_BTI, b_BTO = self.a_BTI, self.b_BTO * weight_B.to(self.b_BTO.dtype)[:, None, None]
        if not b_BTO.is_contiguous():  # as recurrent layers leave them, time first
            a_BTI, b_BTO = a_BTI.transpose(0, 1), b_BTO.transpose(0, 1)
        return b_BTO.flatten(0, 1), a_BTI.flatten(0, 1)

    def keep(self, kept_B: Tensor) -> "Outer":
        return Outer(kept(self.a_BTI, kept_B), kept(self.b_BTO, kept_B))

    def gram(self) -> Tensor:
        if self.a_BTI.shape[1] > 1:
            return super().gram()
        a_BI, b_BO = self.a_BTI.flatten(1), self.b_BTO.flatten(1)
        return (a_BI @ a_BI.mT) * (b_BO @ b_BO.mT)

    def merge(self, parts: int) -> "Outer":
        return Outer(merged(self.a_BTI, parts), merged(self.b_BTO, parts))

    def __add__(self, other: Factor) -> Factor:
        if isinstance(other, Outer):
            return Outer(torch.cat([self.a_BTI, other.a_BTI], 1), torch.cat([self.b_BTO, other.b_BTO], 1))
        return super().__add__(other)

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        if self.a_BTI.shape[1] == 1:
            return None
        return largest_scale(inverse_scales) * (place_norms(self.a_BTI) * place_norms(self.b_BTO)).sum(1)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """By the cheapest exact formula for the shapes.

        One place (T = 1): |b| |a|, or sqrt(b^2 . W a^2) with W = inverse_scales^2. Few places against the size of the
        parameter: inner products, |g|^2 = sum over s, t of (a_s . a_t)(b_s . b_t). Otherwise written out in chunks.
        """
        places, (outputs, inputs) = self.a_BTI.shape[1], self.shape
        if places == 1 and inverse_scales is None:
            return norms_of(self.a_BTI) * norms_of(self.b_BTO)
        if places == 1:
            scales = wide(cast(Tensor, inverse_scales))
            largest, square = _unit_squares(scales)
            parts = [cast(Outer, part)._scaled_norms(square) for part in self._split(cached(inputs))]
            norm_B = torch.cat(parts) * largest
            for index in hidden(norm_B, norms_of(self.a_BTI) * norms_of(self.b_BTO) * largest):
                norm_B[index] = Factor.norms(self[index : index + 1], scales)[0]
            return norm_B
        if inverse_scales is None and places * (inputs + outputs) < inputs * outputs:
            few = self._split(cached(places**2))
            return torch.cat([cast(Outer, part).norms_by_inner_products() for part in few])
        return super().norms(inverse_scales)

    def norms_by_inner_products(self) -> Tensor:
        """From Gram matrices of places; where terms cancel, from the sum itself."""
        a_BTT, b_BTT = self.a_BTI @ self.a_BTI.mT, self.b_BTO @ self.b_BTO.mT
        a_BT, b_BT = (gram.diagonal(dim1=1, dim2=2).sqrt() for gram in (a_BTT, b_BTT))
        bound_B = (a_BT * b_BT).sum(1, dtype=torch.float64)  # sum over t of |b_t| |a_t|: at least |g|
        square_B = (a_BTT * b_BTT).sum((1, 2), dtype=torch.float64)
        # Rounding errors of terms that cancel, or squares that underflow, would hide the norm from the clipping.
        hidden_B = square_B <= _CANCELLED * bound_B.square()
        hidden_B |= self.underflowing(a_BT, b_BT)
        norm_B = square_B.clamp(min=0).sqrt()
        again = hidden_B.nonzero()[:, 0]
        if len(again) > 0:
            norm_B[again] = Factor.norms(Outer(self.a_BTI[again], self.b_BTO[again]))
        return norm_B

    def underflowing(self, a_BT: Tensor | None = None, b_BT: Tensor | None = None) -> Tensor:
        """Which examples have places whose squares underflow on one side and are large on the other, shape (B,).

        Args:
            a_BT, b_BT: norms of the places, in their own precision, where they are known.
        """
        a_BT, b_BT = (
            short_norms(self.a_BTI) if a_BT is None else a_BT,
            short_norms(self.b_BTO) if b_BT is None else b_BT,
        )
        found_B = torch.zeros(self.examples, dtype=torch.bool, device=a_BT.device)
        for x_BTD, small_BT, large_BT in ((self.a_BTI, a_BT, b_BT), (self.b_BTO, b_BT, a_BT)):
            lost_BT = (small_BT < TINY) & (large_BT > 1)
            if bool(lost_BT.any()):  # what is zero, as at places that are filled up, hides nothing
                found_B |= (lost_BT & (x_BTD != 0).any(2)).any(1)
        return found_B

    def _scaled_norms(self, square: Tensor) -> Tensor:
        """sqrt(b^2 W . a^2) for one place, with W the squared inverse scales: all terms are positive, none cancel.

        The largest entries of W and of each row of b are 1 here. Squares that underflow all the same are `hidden`.
        """
        b_BO, b_B = unit(self.b_BTO[:, 0])
        square_BI = b_BO.square_() @ square.to(b_BO.dtype)
        return norms_of(square_BI.sqrt_().mul_(self.a_BTI[:, 0])) * b_B


class Sum(Factor):
    """A parameter used in several places, whose gradients do not combine in closed form.

    Args:
        parts: factors of the same examples and shape.
    """

    def __init__(self, parts: list[Factor]) -> None:
        super().__init__(parts[0].examples, parts[0].shape)
        self.parts = parts

    def __getitem__(self, examples: slice) -> "Sum":
        return Sum([part[examples] for part in self.parts])

    def dense(self) -> Tensor:
        return _total([part.dense() for part in self.parts])

    def apply(self, x_BTI: Tensor) -> Tensor:
        return _total([part.apply(x_BTI) for part in self.parts])

    def read(self, ids_BT: Tensor) -> Tensor:
        return _total([part.read(ids_BT) for part in self.parts])

    def inner_products(self, direction: Tensor) -> Tensor:
        return _total([part.inner_products(direction) for part in self.parts])

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return _total([part.weighted_sum(weight_B) for part in self.parts])

    def keep(self, kept_B: Tensor) -> "Sum":
        return Sum([part.keep(kept_B) for part in self.parts])

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return _total([terms_of(part, inverse_scales) for part in self.parts])

    def __add__(self, other: Factor) -> Factor:
        for index, part in enumerate(self.parts):
            if type(part) is type(other):
                return Sum([*self.parts[:index], part + other, *self.parts[index + 1 :]])
        return Sum([*self.parts, other])


class Placed(Factor):
    """A factor for some rows of a parameter, zero elsewhere: the q, k and v parts of a packed projection.

    Args:
        parts: (first row, factor) of row ranges that do not overlap.
        shape: of the parameter.
    """

    def __init__(self, parts: list[tuple[int, Factor]], shape: torch.Size) -> None:
        super().__init__(parts[0][1].examples, shape)
        self.parts = parts

    def __getitem__(self, examples: slice) -> "Placed":
        return Placed([(row, part[examples]) for row, part in self.parts], self.shape)

    def dense(self) -> Tensor:
        first = self.parts[0][1].dense()
        out = first.new_zeros(self.examples, *self.shape)
        for row, part in self.parts:
            out[:, row : row + part.shape[0]] += part.dense()
        return out

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        sums = [(row, part.weighted_sum(weight_B)) for row, part in self.parts]
        out = sums[0][1].new_zeros(self.shape)
        for row, value in sums:
            out[row : row + len(value)] += value
        return out

    def keep(self, kept_B: Tensor) -> "Placed":
        return Placed([(row, part.keep(kept_B)) for row, part in self.parts], self.shape)

    def inner_products(self, direction: Tensor) -> Tensor:
        return _total([part.inner_products(direction[row : row + part.shape[0]]) for row, part in self.parts])

    def merge(self, parts: int) -> "Placed":
        return Placed([(row, part.merge(parts)) for row, part in self.parts], self.shape)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        def scales(row: int, part: Factor) -> Tensor | None:
            return None if inverse_scales is None else inverse_scales[row : row + part.shape[0]]

        norms = [part.norms(scales(row, part)) for row, part in self.parts]
        return long_norms(torch.stack(norms, dim=1))

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return largest_scale(inverse_scales) * _total([terms_of(part, None) for _, part in self.parts])

    def __add__(self, other: Factor) -> Factor:
        if not isinstance(other, Placed):
            return super().__add__(other)
        joined = dict(self.parts)
        for row, part in other.parts:
            joined[row] = joined[row] + part if row in joined else part
        return Placed(sorted(joined.items(), key=lambda pair: pair[0]), self.shape)


class Pulled(Factor):
    """A parameter from which a layer's weight is computed, the same way for every example: g_i = J^T h_i.

    Args:
        inner: h_i, gradients with respect to the weight.
        weight: the weight, with its graph.
        parameter: a leaf of that graph.
        apart: pull sums back example by example: in half precision all would share the rounding of a large sum.
    """

    def __init__(self, inner: Factor, weight: Tensor, parameter: Tensor, *, apart: bool) -> None:
        super().__init__(inner.examples, parameter.shape)
        self.inner, self.weight, self.parameter, self.apart = inner, weight, parameter, apart

    def __getitem__(self, examples: slice) -> "Pulled":
        return self._like(self.inner[examples])

    def dense(self) -> Tensor:
        grads_BP = self.inner.dense()
        if len(grads_BP) == 1:
            return wide(self._pull(grads_BP[0], batched=False)[None])
        return wide(self._pull(grads_BP, batched=True))

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        if not self.apart:
            return self._pull(self.inner.weighted_sum(weight_B), batched=False)
        parts = self._split()
        ends = accumulate(part.examples for part in parts)
        pairs = zip(parts, ends, strict=True)
        return _total([Dense(p.dense()).weighted_sum(weight_B[end - p.examples : end]) for p, end in pairs])

    def keep(self, kept_B: Tensor) -> "Pulled":
        return self._like(self.inner.keep(kept_B))

    def inner_products(self, direction: Tensor) -> Tensor:
        return torch.cat([part.dense().flatten(1) @ direction.flatten() for part in self._split()])

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return largest_scale(inverse_scales) * terms_of(self.inner, None)

    def _like(self, inner: Factor) -> "Pulled":
        return Pulled(inner, self.weight, self.parameter, apart=self.apart)

    def _pull(self, grad: Tensor, *, batched: bool) -> Tensor:
        if self.examples == 0:
            return grad.new_zeros(0, *self.shape) if batched else grad.new_zeros(self.shape)
        return torch.autograd.grad(
            self.weight, self.parameter, grad.to(self.weight.dtype), retain_graph=True, is_grads_batched=batched
        )[0]


def merged(x: Tensor, parts: int) -> Tensor:
    """(B parts, T, D) -> (B, parts T, D)."""
    return x.reshape(len(x) // parts, parts * x.shape[1], x.shape[2])


def _total(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def terms_of(factor: Factor, inverse_scales: Tensor | None) -> Tensor:
    """A factor's terms; its norms where there is one term each."""
    terms = factor.terms(inverse_scales)
    return factor.norms(inverse_scales) if terms is None else terms


def largest_scale(inverse_scales: Tensor | None) -> float:
    """The largest of the inverse scales; 1 without any."""
    return 1.0 if inverse_scales is None or not inverse_scales.numel() else float(inverse_scales.max())


def cancelled(square_B: Tensor, terms_B: Tensor) -> Tensor:
    """Which squared norms are so small a share of their terms that rounding hides them."""
    return square_B < _CANCELLED * terms_B.square()


@dataclass
class _UnitSquares:
    version: int
    largest: float
    square: Tensor


_unit_squares_of: MutableMapping[Tensor, _UnitSquares] = WeakTensorKeyDictionary()


def _unit_squares(scales: Tensor) -> tuple[float, Tensor]:
    """(largest scale, squares of the scales over it): made once while the scales stay as they are.

    Scales that are written over get new squares, in the same memory: to find fresh memory takes as long as to fill it.
    """
    known = None if scales.is_inference() else _unit_squares_of.get(scales)
    if known is None or known.version != scales._version:
        largest = largest_scale(scales)
        square = torch.empty_like(scales) if known is None else known.square
        for scale, squared in blocks(scales, square):
            torch.div(scale, largest, out=squared).square_()
        if scales.is_inference():
            return largest, square
        known = _unit_squares_of[scales] = _UnitSquares(scales._version, largest, square)
    return known.largest, known.square
