"""Per-example gradients kept factored: their norms and weighted sums, without one gradient an example in memory.

Shape suffixes: B examples, T places of an example (time, pixels), I inputs, O outputs, D width, P a parameter's shape.
Everything here is computed in float32 or wider, and is NOT private.
"""

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor

from privgrad.threads import blocks

_BLOCK = 1024  # float32 entries summed before they are joined in float64
_CACHED = 1 << 20  # floats of scratch that stay in a core's cache while they are scaled and summed
_TINY = 1e-15  # the square of a norm below this loses digits in float32
_HIDDEN = 1e-12  # below this share of its bound, a norm from squares in float32 is measured again
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
        return Dense(torch.cat([part.dense() for part in self._split()]))

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
        return Outer(_merged(self.a_BTI, parts), _merged(self.b_BTO, parts))

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
            largest = scales.max() if scales.numel() else scales.new_ones(())
            square = torch.empty_like(scales)
            for scale, squared in blocks(scales, square):
                torch.div(scale, largest, out=squared).square_()
            parts = [cast(Outer, part)._scaled_norms(square) for part in self._split(cached(inputs))]
            norm_B = torch.cat(parts) * largest.double()
            for index in hidden(norm_B, norms_of(self.a_BTI) * norms_of(self.b_BTO) * largest.double()):
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
        hidden_B |= (((a_BT < _TINY) & (b_BT > 1)) | ((b_BT < _TINY) & (a_BT > 1))).any(1)
        norm_B = square_B.clamp(min=0).sqrt()
        again = hidden_B.nonzero()[:, 0]
        if len(again) > 0:
            norm_B[again] = Factor.norms(Outer(self.a_BTI[again], self.b_BTO[again]))
        return norm_B

    def _scaled_norms(self, square: Tensor) -> Tensor:
        """sqrt(b^2 W . a^2) for one place, with W the squared inverse scales: all terms are positive, none cancel.

        The largest entries of W and of each row of b are 1 here. Squares that underflow all the same are `hidden`.
        """
        b_BO, b_B = unit(self.b_BTO[:, 0])
        square_BI = b_BO.square_() @ square.to(b_BO.dtype)
        return norms_of(square_BI.sqrt_().mul_(self.a_BTI[:, 0])) * b_B


class Rows(Factor):
    """An embedding table: g_i adds r_it to row ids_it, for every t.

    Args:
        ids_BT: integer, shape (B, T).
        r_BTD: gradients of the rows read, shape (B, T, D).
        rows: number of rows V of the table, shape (V, D).
    """

    def __init__(self, ids_BT: Tensor, r_BTD: Tensor, rows: int) -> None:
        super().__init__(len(ids_BT), torch.Size((rows, r_BTD.shape[2])))
        self.ids_BT, self.r_BTD = ids_BT.long(), wide(r_BTD)

    def __getitem__(self, examples: slice) -> "Rows":
        return Rows(self.ids_BT[examples], self.r_BTD[examples], self.shape[0])

    def dense(self) -> Tensor:
        rows, width = self.shape
        out = self.r_BTD.new_zeros(self.examples * rows, width)
        return out.index_add_(0, self._keys(), self.r_BTD.flatten(0, 1)).view(-1, rows, width)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        total = self.r_BTD.new_zeros(self.shape)
        self.add_weighted_sum(total, weight_B)
        return total

    def add_weighted_sum(self, total: Tensor, weight_B: Tensor) -> None:
        r_BTD = self.r_BTD * weight_B.to(self.r_BTD.dtype)[:, None, None]
        total.index_add_(0, self.ids_BT.flatten(), r_BTD.flatten(0, 1))

    def apply(self, x_BTI: Tensor) -> Tensor:
        products_BTS = x_BTI @ self.r_BTD.mT
        ids_BTS = self.ids_BT[:, None].expand_as(products_BTS)
        return x_BTI.new_zeros(*x_BTI.shape[:2], self.shape[0]).scatter_add(2, ids_BTS, products_BTS)

    def read(self, ids_BT: Tensor) -> Tensor:
        return (ids_BT[:, :, None] == self.ids_BT[:, None]).to(self.r_BTD.dtype) @ self.r_BTD

    def keep(self, kept_B: Tensor) -> "Rows":
        return Rows(self.ids_BT, kept(self.r_BTD, kept_B), self.shape[0])

    def merge(self, parts: int) -> "Rows":
        ids_BT = self.ids_BT.reshape(self.examples // parts, -1)
        return Rows(ids_BT, _merged(self.r_BTD, parts), self.shape[0])

    def __add__(self, other: Factor) -> Factor:
        if isinstance(other, Rows):
            ids_BT = torch.cat([self.ids_BT, other.ids_BT], 1)
            return Rows(ids_BT, torch.cat([self.r_BTD, other.r_BTD], 1), self.shape[0])
        if isinstance(other, Outer):
            return TiedTable(other, self)
        return super().__add__(other)

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        r_BTD = self.r_BTD if inverse_scales is None else self.r_BTD * inverse_scales[self.ids_BT]
        return place_norms(r_BTD).sum(1)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Repeated ids of an example are added up first; then each touched row counts once."""
        keys, place = cast("tuple[Tensor, Tensor]", torch.unique(self._keys(), return_inverse=True))
        merged = self.r_BTD.new_zeros(len(keys), self.shape[1]).index_add_(0, place, self.r_BTD.flatten(0, 1))
        if inverse_scales is not None:
            merged *= inverse_scales[keys % self.shape[0]]
        square = _long_norms(merged).square()
        return square.new_zeros(self.examples).index_add_(0, keys // self.shape[0], square).sqrt()

    def _keys(self) -> Tensor:
        """One number for every (example, id), shape (B T,)."""
        example_B = torch.arange(self.examples, device=self.ids_BT.device)
        return (self.ids_BT + example_B[:, None] * self.shape[0]).flatten()


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


class TiedTable(Sum):
    """An embedding table that is also the output layer: Outer + Rows, without a table an example.

    Computes: |G + R|^2 = |G|^2 + |R|^2 + 2 <G, R>, where <G, R> = sum over s, t of b_t[id_s] (a_t . r_s).

    Args:
        outer: the output layer.
        rows: the table.
    """

    def __init__(self, outer: Outer, rows: Rows) -> None:
        super().__init__([outer, rows])
        self.outer, self.rows = outer, rows

    def __getitem__(self, examples: slice) -> "TiedTable":
        return TiedTable(self.outer[examples], self.rows[examples])

    def keep(self, kept_B: Tensor) -> "TiedTable":
        return TiedTable(self.outer.keep(kept_B), self.rows.keep(kept_B))

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
        for index in cast("list[int]", cancelled(square_B, parts_B.sum(0)).nonzero()[:, 0].tolist()):
            norm_B[index] = Factor.norms(self[index : index + 1], inverse_scales)[0]
        return norm_B

    def _inner_products(self, inverse_scales: Tensor | None) -> Tensor:
        ids_BS, r_BSD = self.rows.ids_BT, self.rows.r_BTD
        if inverse_scales is not None:
            r_BSD = r_BSD * inverse_scales[ids_BS].square()
        b_BTS = self.outer.b_BTO.gather(2, ids_BS[:, None].expand(-1, self.outer.b_BTO.shape[1], -1))
        return (b_BTS * (self.outer.a_BTI @ r_BSD.mT)).sum((1, 2), dtype=torch.float64)


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
        return _long_norms(torch.stack(norms, dim=1))

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
    """

    def __init__(self, inner: Factor, weight: Tensor, parameter: Tensor) -> None:
        super().__init__(inner.examples, parameter.shape)
        self.inner, self.weight, self.parameter = inner, weight, parameter

    def __getitem__(self, examples: slice) -> "Pulled":
        return Pulled(self.inner[examples], self.weight, self.parameter)

    def dense(self) -> Tensor:
        grads_BP = self.inner.dense()
        if len(grads_BP) == 1:
            return self._pull(grads_BP[0], batched=False)[None]
        return self._pull(grads_BP, batched=True)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self._pull(self.inner.weighted_sum(weight_B), batched=False)

    def keep(self, kept_B: Tensor) -> "Pulled":
        return Pulled(self.inner.keep(kept_B), self.weight, self.parameter)

    def inner_products(self, direction: Tensor) -> Tensor:
        return torch.cat([part.dense().flatten(1) @ direction.flatten() for part in self._split()])

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return largest_scale(inverse_scales) * terms_of(self.inner, None)

    def _pull(self, grad: Tensor, *, batched: bool) -> Tensor:
        if self.examples == 0:
            return grad.new_zeros(0, *self.shape) if batched else grad.new_zeros(self.shape)
        return torch.autograd.grad(
            self.weight, self.parameter, grad.to(self.weight.dtype), retain_graph=True, is_grads_batched=batched
        )[0]


def cached(floats: int) -> int:
    """How many examples of that many floats stay in a core's cache together, at least one."""
    return max(1, _CACHED // max(1, floats))


def wide(tensor: Tensor) -> Tensor:
    """In float32, or wider if it was."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _merged(x: Tensor, parts: int) -> Tensor:
    """(B parts, T, D) -> (B, parts T, D)."""
    return x.reshape(len(x) // parts, parts * x.shape[1], x.shape[2])


def kept(x: Tensor, kept_B: Tensor) -> Tensor:
    """x with zeros for every example that is not kept."""
    return torch.where(kept_B.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


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


def hidden(norm_B: Tensor, bound_B: Tensor) -> list[int]:
    """Which norms are so small a share of their bound, or not finite, that squares in float32 may have hidden them."""
    lost_B = (norm_B < _HIDDEN * bound_B) | ~torch.isfinite(norm_B)
    return cast("list[int]", (lost_B & torch.isfinite(bound_B)).nonzero()[:, 0].tolist())


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x over its largest entry in each row, that entry in float64)."""
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_ones(len(x), 1)
    largest = torch.where(largest > 0, largest, 1.0)
    return x / largest, largest[:, 0].double()


def _long_norms(x: Tensor) -> Tensor:
    """Norm over the last dimension, summed in float64: nothing overflows, underflows or is lost in the sum."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64))


def short_norms(x: Tensor) -> Tensor:
    """Norm over the last dimension, in its own precision."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1))


def place_norms(x: Tensor) -> Tensor:
    """As short_norms, in float64, and right where squares in float32 under- or overflow."""
    norms = short_norms(x).double()
    lost = (norms < _TINY) | ~torch.isfinite(norms)
    if bool(lost.any()):
        norms[lost] = _long_norms(x[lost])
    return norms


def norms_of(grads_BP: Tensor, inverse_scales: Tensor | None = None) -> Tensor:
    """Norm of each example's gradient, shape (B,), float64.

    Short float32 sums, joined in float64: one long float32 sum understates the norm of a gradient with many small
    entries, by 2 % at 1e8 parameters, and a float64 copy of the gradients costs half of their computation.
    """
    if inverse_scales is not None:
        grads_BP = grads_BP * inverse_scales
    grads_BP = grads_BP.reshape(len(grads_BP), grads_BP.shape[1:].numel())
    norm_B = _blockwise_norms(grads_BP)
    # Squares of entries below 1e-19 vanish in float32: rows of such once more.
    if len(norm_B) > 0 and float(norm_B.min()) < _TINY:
        tiny = (norm_B < _TINY).nonzero()[:, 0]
        norm_B[tiny] = _long_norms(grads_BP[tiny])
    return norm_B


def _blockwise_norms(grads_BP: Tensor) -> Tensor:
    whole = grads_BP.shape[1] // _BLOCK
    if whole == 0:
        return short_norms(grads_BP).double()
    blocks = grads_BP[:, : whole * _BLOCK].reshape(len(grads_BP), whole, _BLOCK)
    parts = [short_norms(blocks), short_norms(grads_BP[:, whole * _BLOCK :])[:, None]]
    return _long_norms(torch.cat(parts, dim=1))
