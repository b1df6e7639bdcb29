"""Per-example gradients kept factored: their norms and weighted sums, without one gradient an example in memory.

Shape suffixes: B examples, T places of an example (time, pixels), I inputs, O outputs, D width, P a parameter's shape.
Everything here is computed in float32 or wider, and is NOT private.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, cast

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

Examples = slice | Tensor  # a range of examples, or their indices

_ROUNDS, _MARGIN = 6, 2.0  # of the power method, and what its result is multiplied with
_PASSES, _GROWTH = 32, 1.25  # after so many, or where J grew by so much, its norm is measured again
_SHARES = random.Random()  # of no stream that a user seeds
_CANCELLED = 1e-3  # below this share of its terms, a squared norm from inner products is taken from the sum itself


class Factor(ABC):
    """The gradients g_i of B examples with respect to one parameter.

    A subclass says how one chunk of examples is written out (`dense`), and what it can do without.
    """

    def __init__(self, examples: int, shape: torch.Size) -> None:
        self.examples = examples
        self.shape = shape

    @abstractmethod
    def __getitem__(self, examples: Examples) -> "Factor":
        """Return the same for some of the examples."""

    @abstractmethod
    def dense(self) -> Tensor:
        """grads_BP, shape (B, *P)."""

    @abstractmethod
    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        """Sum over i of weight_i * g_i, shape P. Every example's gradient must be finite."""

    def sum_in_parts(self, weight_B: Tensor, parts: int) -> Tensor:
        """Return that sum, of so many parts of the examples apart; these are added up in float64.

        A kernel may add one term after the other. Then each is rounded to what float32 holds of the total so far, and
        the terms of an example that are all alike are rounded the same way. A part has a smaller total.
        """
        if parts == 1:
            return self.weighted_sum(weight_B)
        total = torch.zeros(self.shape, dtype=torch.float64, device=weight_B.device)
        few = math.ceil(self.examples / parts)
        for start in range(0, self.examples, few):
            part = slice(start, start + few)
            total += self[part].weighted_sum(weight_B[part])
        return total

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        """Return that sum in float64, free of the rounding that terms of several examples share.

        Computes: each gradient written out by itself, and these added up in float64. A subclass whose terms are cheap
        in float64 adds up the terms themselves.
        """
        parts = self._split()
        ends = accumulate(part.examples for part in parts)
        pairs = [(part, weight_B[end - part.examples : end]) for part, end in zip(parts, ends, strict=True)]
        return _total([weights.double() @ _flat(part.dense()).double() for part, weights in pairs]).view(self.shape)

    @property
    def is_pulled(self) -> bool:
        """Whether sums are pulled back through a Jacobian, which rounds in its own way."""
        return False

    def sum_and_rounding(
        self, weight_B: Tensor, inverse_scales: Tensor | None = None, parts: int = 1
    ) -> tuple[Tensor, float]:
        """Return the sum in parts, and an estimate of what it rounded beyond what `terms` and parts account for.

        The estimate is the norm of an error that changes with the batch, times the inverse scales if there are any.
        """
        del inverse_scales
        return self.sum_in_parts(weight_B, parts), 0.0

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

    @property
    def places(self) -> int:
        """Number of terms that each g_i is the sum of; their rounding errors grow with its root."""
        return 1

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
        rows_BP = _flat(self.dense())
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

    def __getitem__(self, examples: Examples) -> "Scaled":
        return Scaled(self.inner[examples], self.share)

    def dense(self) -> Tensor:
        return self.share * self.inner.dense()

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.inner.weighted_sum(self.share * weight_B)

    def sum_in_parts(self, weight_B: Tensor, parts: int) -> Tensor:
        return self.inner.sum_in_parts(self.share * weight_B, parts)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return self.inner.exact_sum(self.share * weight_B)

    def sum_and_rounding(
        self, weight_B: Tensor, inverse_scales: Tensor | None = None, parts: int = 1
    ) -> tuple[Tensor, float]:
        return self.inner.sum_and_rounding(self.share * weight_B, inverse_scales, parts)

    @property
    def is_pulled(self) -> bool:
        return self.inner.is_pulled

    def keep(self, kept_B: Tensor) -> "Scaled":
        return Scaled(self.inner.keep(kept_B), self.share)

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        terms_B = self.inner.terms(inverse_scales)
        return None if terms_B is None else self.share * terms_B

    @property
    def places(self) -> int:
        return self.inner.places

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

    def __getitem__(self, examples: Examples) -> "Dense":
        return Dense(self.grads_BP[examples])

    def dense(self) -> Tensor:
        return self.grads_BP

    def written_out(self) -> "Dense":
        return self

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return (weight_B.to(self.grads_BP.dtype) @ _flat(self.grads_BP)).view(self.shape)

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

    def __getitem__(self, examples: Examples) -> "Outer":
        return Outer(self.a_BTI[examples], self.b_BTO[examples])

    def dense(self) -> Tensor:
        return self.b_BTO.mT @ self.a_BTI

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        b_TO, a_TI = self._weighted(weight_B)
        return b_TO.mT @ a_TI

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        total = self.a_BTI.new_zeros(self.shape, dtype=torch.float64)
        few = cached(self.places * sum(self.shape))
        for start in range(0, self.examples, few):
            part = slice(start, start + few)
            b_BTO = self.b_BTO[part].double() * weight_B[part].double()[:, None, None]
            total.addmm_(b_BTO.flatten(0, 1).mT, self.a_BTI[part].double().flatten(0, 1))
        return total

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
        if self.places == 1:
            return None
        a_BTI, b_BTO = self.a_BTI, self.b_BTO
        if inverse_scales is not None:
            of_outputs, of_inputs = bounding_product(inverse_scales)
            a_BTI, b_BTO = a_BTI * of_inputs, b_BTO * of_outputs
        return (place_norms(a_BTI) * place_norms(b_BTO)).sum(1)

    @property
    def places(self) -> int:
        return self.a_BTI.shape[1]

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
            norm_B[again] = Factor.norms(Outer(self.a_BTI[again].double(), self.b_BTO[again].double()))
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

    def __getitem__(self, examples: Examples) -> "Sum":
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

    def sum_in_parts(self, weight_B: Tensor, parts: int) -> Tensor:
        return _total([part.sum_in_parts(weight_B, parts) for part in self.parts])

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return _total([part.exact_sum(weight_B) for part in self.parts])

    def sum_and_rounding(
        self, weight_B: Tensor, inverse_scales: Tensor | None = None, parts: int = 1
    ) -> tuple[Tensor, float]:
        found = (part.sum_and_rounding(weight_B, inverse_scales, parts) for part in self.parts)
        sums, rounded = zip(*found, strict=True)
        return _total(list(sums)), sum(rounded)

    @property
    def is_pulled(self) -> bool:
        return any(part.is_pulled for part in self.parts)

    def keep(self, kept_B: Tensor) -> "Sum":
        return Sum([part.keep(kept_B) for part in self.parts])

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return _total([terms_of(part, inverse_scales) for part in self.parts])

    @property
    def places(self) -> int:
        return sum(part.places for part in self.parts)

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

    def __getitem__(self, examples: Examples) -> "Placed":
        return Placed([(row, part[examples]) for row, part in self.parts], self.shape)

    def dense(self) -> Tensor:
        first = self.parts[0][1].dense()
        out = first.new_zeros(self.examples, *self.shape)
        for row, part in self.parts:
            out[:, row : row + part.shape[0]] += part.dense()
        return out

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self._placed([part.weighted_sum(weight_B) for _, part in self.parts])

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return self._placed([part.exact_sum(weight_B) for _, part in self.parts])

    def keep(self, kept_B: Tensor) -> "Placed":
        return Placed([(row, part.keep(kept_B)) for row, part in self.parts], self.shape)

    def inner_products(self, direction: Tensor) -> Tensor:
        return _total([part.inner_products(direction[row : row + part.shape[0]]) for row, part in self.parts])

    def merge(self, parts: int) -> "Placed":
        return Placed([(row, part.merge(parts)) for row, part in self.parts], self.shape)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        norms = [part.norms(self._scales(inverse_scales, row, part)) for row, part in self.parts]
        return long_norms(torch.stack(norms, dim=1))

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return _total([terms_of(part, self._scales(inverse_scales, row, part)) for row, part in self.parts])

    @property
    def places(self) -> int:
        return max(part.places for _, part in self.parts)

    def _scales(self, inverse_scales: Tensor | None, row: int, part: Factor) -> Tensor | None:
        return None if inverse_scales is None else inverse_scales[row : row + part.shape[0]]

    def _placed(self, sums: list[Tensor]) -> Tensor:
        out = sums[0].new_zeros(self.shape)
        for (row, _), value in zip(self.parts, sums, strict=True):
            out[row : row + len(value)] += value
        return out

    def __add__(self, other: Factor) -> Factor:
        if not isinstance(other, Placed):
            return super().__add__(other)
        joined = dict(self.parts)
        for row, part in other.parts:
            joined[row] = joined[row] + part if row in joined else part
        return Placed(sorted(joined.items(), key=lambda pair: pair[0]), self.shape)


class Jacobian:
    """J, by which a layer's weight changes with a parameter that it is computed from, the same for every example.

    Args:
        weight: the weight, with its graph.
        parameter: a leaf of that graph.
        norm: an upper bound on the spectral norm of J, or what finds one.
    """

    def __init__(self, weight: Tensor, parameter: Tensor, norm: "float | Callable[[Jacobian], float]") -> None:
        self.weight, self.parameter, self._norm = weight, parameter, norm

    def pull(self, grad: Tensor, *, batched: bool = False) -> Tensor:
        """Return J^T grad, shaped like the parameter; with `batched` for each row of grad."""
        grad = grad.to(self.weight.dtype)
        return torch.autograd.grad(self.weight, self.parameter, grad, retain_graph=True, is_grads_batched=batched)[0]

    @cached_property
    def norm(self) -> float:
        """The bound."""
        return self._norm(self) if callable(self._norm) else self._norm

    def stretch(self, u: Tensor) -> float:
        """Return |J^T u| for a u of length 1."""
        return float(long_norms(self.pull(u).flatten()))

    def measured_norm(self, start: Tensor) -> float:
        """Estimate the spectral norm of J by the power method, times two; infinite where torch cannot take J u.

        Computes: u = J J^T u / |u| again and again, from a fixed start; the largest |J^T u| / |u|. With c the share of
        the start along the largest direction, this is at least c^(1/(2 rounds - 1)) of the norm: 0.53 for a start in a
        million dimensions, and nearly all of it where one direction stands out.

        Args:
            start: a vector drawn at random, shaped like the weight.

        Privacy:
            Made of the weights alone, which are public: no data can be built to hide from it.
        """
        u, largest = start.to(self.weight), 0.0
        try:
            with torch.enable_grad():
                for _ in range(_ROUNDS):
                    u = (u / short_norms(u.flatten())).detach().requires_grad_()
                    (pulled,) = torch.autograd.grad(self.weight, self.parameter, u, create_graph=True)
                    stretch = float(long_norms(pulled.detach().flatten()))
                    largest = max(largest, stretch)
                    if not 0 < stretch < math.inf or not pulled.requires_grad:
                        break
                    (u,) = torch.autograd.grad(pulled, u, pulled.detach())
        except RuntimeError:  # an operation whose derivative has none
            return math.inf
        return _MARGIN * largest if largest < math.inf else math.inf


class JacobianNorms:
    """Norms of Jacobians, each kept for some passes, while its J pulls a fixed vector back to no greater length.

    A step moves weights by little, but a gate that opens, say, changes J at once.
    """

    def __init__(self) -> None:
        self._found: dict[object, _Measured] = {}

    def of(self, key: object, jacobian: Jacobian) -> float:
        """Return the norm that is known for the key, or measure it."""
        known = self._found.get(key)
        if known is not None and known.start.shape != jacobian.weight.shape:
            known = None
        start = _unit_vector(jacobian.weight) if known is None else known.start.to(jacobian.weight)
        stretch = jacobian.stretch(start)
        if known is None or known.left == 0 or not stretch <= _GROWTH * known.stretch:
            known = _Measured(jacobian.measured_norm(start), start, stretch, _PASSES)
        self._found[key] = known._replace(left=known.left - 1)
        return known.norm


class _Measured(NamedTuple):
    norm: float
    start: Tensor  # of length 1
    stretch: float  # |J^T start|
    left: int  # passes


def _unit_vector(like: Tensor) -> Tensor:
    """Return a vector shaped like the tensor, the same at each call, drawn from the uniform one on the sphere."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn / short_norms(drawn.flatten())).to(like.detach())


class Pulled(Factor):
    """A parameter from which a layer's weight is computed, the same way for every example: g_i = J^T h_i.

    Args:
        inner: h_i, gradients with respect to the weight.
        jacobian: J.
        apart: pull sums back example by example: in half precision all would share the rounding of a large sum.
    """

    def __init__(self, inner: Factor, jacobian: Jacobian, *, apart: bool) -> None:
        super().__init__(inner.examples, jacobian.parameter.shape)
        self.inner, self.jacobian, self.apart = inner, jacobian, apart

    def __getitem__(self, examples: Examples) -> "Pulled":
        return self._like(self.inner[examples])

    def dense(self) -> Tensor:
        grads_BP = self.inner.dense()
        if self.examples == 0:
            return wide(grads_BP.new_zeros(0, *self.shape))
        if self.examples == 1:
            return wide(self.jacobian.pull(grads_BP[0])[None])
        return wide(self.jacobian.pull(grads_BP, batched=True))

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        if self.examples == 0 or not self.apart:
            summed = self.inner.weighted_sum(weight_B)
            return self.jacobian.pull(summed) if self.examples else summed.new_zeros(self.shape)
        parts = self._split()
        ends = accumulate(part.examples for part in parts)
        pairs = zip(parts, ends, strict=True)
        return _total([Dense(p.dense()).weighted_sum(weight_B[end - p.examples : end]) for p, end in pairs])

    @property
    def is_pulled(self) -> bool:
        return not self.apart

    def sum_and_rounding(
        self, weight_B: Tensor, inverse_scales: Tensor | None = None, parts: int = 1
    ) -> tuple[Tensor, float]:
        """Pull the sum back twice, once times a random number: the results differ by what J^T rounds on the way.

        That may be far more than |J| suggests: J may itself be a small difference of large terms, as where weight_norm
        projects nearly all of a gradient away. It is infinite where the sum shows that the norm of J is out of date.
        """
        if self.apart or self.examples == 0:
            return self.weighted_sum(weight_B), 0.0
        summed = self.inner.sum_in_parts(weight_B, parts)
        pulled, share = self.jacobian.pull(summed), 0.5 + 0.5 * _SHARES.random()
        moved = self.jacobian.pull(share * summed) / share - pulled
        if self._outgrows(summed, pulled):
            return pulled, math.inf
        return pulled, float(norms_of(wide(moved)[None], inverse_scales))

    def keep(self, kept_B: Tensor) -> "Pulled":
        return self._like(self.inner.keep(kept_B))

    def inner_products(self, direction: Tensor) -> Tensor:
        return torch.cat([_flat(part.dense()) @ direction.flatten() for part in self._split()])

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Bound the terms of J^T h_i by |J| and those of h_i; None where each is pulled back by itself."""
        if self.apart:
            return None
        return largest_scale(inverse_scales) * self.jacobian.norm * terms_of(self.inner, None)

    @property
    def places(self) -> int:
        return self.inner.places

    def _outgrows(self, summed: Tensor, pulled: Tensor) -> bool:
        """Return whether J^T has made a sum longer than the norm of J allows."""
        return not float(norms_of(pulled[None])) <= 1.01 * self.jacobian.norm * float(norms_of(summed[None]))

    def _like(self, inner: Factor) -> "Pulled":
        return Pulled(inner, self.jacobian, apart=self.apart)


def merged(x: Tensor, parts: int) -> Tensor:
    """(B parts, T, D) -> (B, parts T, D)."""
    return x.reshape(len(x) // parts, parts * x.shape[1], x.shape[2])


def _flat(grads_BP: Tensor) -> Tensor:
    """Return one row an example, shape (B, numbers of P), also for parameters without dimensions."""
    return grads_BP.reshape(len(grads_BP), grads_BP.shape[1:].numel())


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


def bounding_product(inverse_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return r, shape (O,), and c, shape (I,), with s_oi <= r_o c_i for scales s of shape (O, I, ...)."""
    scales_OI = inverse_scales.flatten(2).amax(2) if inverse_scales.dim() > 2 else inverse_scales
    of_outputs = scales_OI.amax(1)
    return of_outputs, (scales_OI / of_outputs[:, None]).amax(0)


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
