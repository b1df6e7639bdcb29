"""Per-example gradients kept factored: their norms and weighted sums, without one gradient an example in memory.

Shape suffixes: B examples, T positions of an example (time, pixels), I inputs, O outputs, D width, P the shape of a
parameter.
Everything here is computed in float32 or wider, and is NOT private.
"""

import math
from abc import ABC, abstractmethod
from itertools import accumulate

import torch
from torch import Tensor

from privgrad.gradient.factors.norms import (
    at_least_float32,
    examples_per_block,
    float64_norms,
    masked,
    norms_of,
)

Examples = slice | Tensor  # a range of examples, or their indices


CANCELLED = 1e-3  # below this share of its terms, a squared norm from inner products is taken from the sum itself


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
        return added_up([weights.double() @ flattened(part.dense()).double() for part, weights in pairs]).view(
            self.shape
        )

    def sum_and_rounding(
        self, weight_B: Tensor, inverse_scales: Tensor | None = None, parts: int = 1
    ) -> tuple[Tensor, float]:
        """Return the sum in parts, and an estimate of what it rounded beyond what `terms` and parts account for.

        The estimate is the norm of an error that changes with the batch, times the inverse scales if there are any.
        """
        del inverse_scales
        return self.sum_in_parts(weight_B, parts), 0.0

    @abstractmethod
    def mask(self, kept_B: Tensor) -> "Factor":
        """The same with zeros for every example that is not kept; kept_B is bool, shape (B,)."""

    @property
    def worth_keeping(self) -> bool:
        """Whether gradients written out for their norms would make the weighted sum much cheaper."""
        return False

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Bound on the terms that `weighted_sum` adds up for each g_i, shape (B,), float64; None: g_i itself.

        Far above the norm, terms cancel, and what rounding leaves of them is not bounded by the norm.
        """
        return None

    @property
    def positions(self) -> int:
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
        """Every `parts` neighboring rows are one example: the sum of their gradients."""
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
        rows_BP = flattened(self.dense())
        return rows_BP @ rows_BP.mT

    def __add__(self, other: "Factor") -> "Factor":
        """The gradient of a parameter that is used in two positions."""
        return Sum([self, other])

    def _split(self, few: int | None = None) -> "list[Factor]":
        """Parts of that many examples, or as many as the cache holds written out; at least one, perhaps empty."""
        few = examples_per_block(int(self.shape.numel())) if few is None else few
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

    def mask(self, kept_B: Tensor) -> "Scaled":
        return Scaled(self.inner.mask(kept_B), self.share)

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        terms_B = self.inner.term_bound(inverse_scales)
        return None if terms_B is None else self.share * terms_B

    @property
    def positions(self) -> int:
        return self.inner.positions

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
        self.grads_BP = at_least_float32(grads_BP)

    def __getitem__(self, examples: Examples) -> "Dense":
        return Dense(self.grads_BP[examples])

    def dense(self) -> Tensor:
        return self.grads_BP

    def written_out(self) -> "Dense":
        return self

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return (weight_B.to(self.grads_BP.dtype) @ flattened(self.grads_BP)).view(self.shape)

    def mask(self, kept_B: Tensor) -> "Dense":
        return Dense(masked(self.grads_BP, kept_B))

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        return norms_of(self.grads_BP, inverse_scales) if inverse_scales is None else super().norms(inverse_scales)

    def __add__(self, other: Factor) -> Factor:
        return Dense(self.grads_BP + other.grads_BP) if isinstance(other, Dense) else super().__add__(other)


class Sum(Factor):
    """A parameter used in several positions, whose gradients do not combine in closed form.

    Args:
        parts: factors of the same examples and shape.
    """

    def __init__(self, parts: list[Factor]) -> None:
        super().__init__(parts[0].examples, parts[0].shape)
        self.parts = parts

    def __getitem__(self, examples: Examples) -> "Sum":
        return Sum([part[examples] for part in self.parts])

    def dense(self) -> Tensor:
        return added_up([part.dense() for part in self.parts])

    def apply(self, x_BTI: Tensor) -> Tensor:
        return added_up([part.apply(x_BTI) for part in self.parts])

    def read(self, ids_BT: Tensor) -> Tensor:
        return added_up([part.read(ids_BT) for part in self.parts])

    def inner_products(self, direction: Tensor) -> Tensor:
        return added_up([part.inner_products(direction) for part in self.parts])

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return added_up([part.weighted_sum(weight_B) for part in self.parts])

    def sum_in_parts(self, weight_B: Tensor, parts: int) -> Tensor:
        return added_up([part.sum_in_parts(weight_B, parts) for part in self.parts])

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return added_up([part.exact_sum(weight_B) for part in self.parts])

    def sum_and_rounding(
        self, weight_B: Tensor, inverse_scales: Tensor | None = None, parts: int = 1
    ) -> tuple[Tensor, float]:
        found = (part.sum_and_rounding(weight_B, inverse_scales, parts) for part in self.parts)
        sums, rounded = zip(*found, strict=True)
        return added_up(list(sums)), sum(rounded)

    def mask(self, kept_B: Tensor) -> "Sum":
        return Sum([part.mask(kept_B) for part in self.parts])

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return added_up([term_bound_of(part, inverse_scales) for part in self.parts])

    @property
    def positions(self) -> int:
        return sum(part.positions for part in self.parts)

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

    def mask(self, kept_B: Tensor) -> "Placed":
        return Placed([(row, part.mask(kept_B)) for row, part in self.parts], self.shape)

    def inner_products(self, direction: Tensor) -> Tensor:
        return added_up([part.inner_products(direction[row : row + part.shape[0]]) for row, part in self.parts])

    def merge(self, parts: int) -> "Placed":
        return Placed([(row, part.merge(parts)) for row, part in self.parts], self.shape)

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


def merged(x: Tensor, parts: int) -> Tensor:
    """(B parts, T, D) -> (B, parts T, D)."""
    return x.reshape(len(x) // parts, parts * x.shape[1], x.shape[2])


def flattened(grads_BP: Tensor) -> Tensor:
    """Return one row an example, shape (B, numbers of P), also for parameters without dimensions."""
    return grads_BP.reshape(len(grads_BP), grads_BP.shape[1:].numel())


def added_up(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def term_bound_of(factor: Factor, inverse_scales: Tensor | None) -> Tensor:
    """A factor's terms; its norms where there is one term each."""
    terms = factor.term_bound(inverse_scales)
    return factor.norms(inverse_scales) if terms is None else terms


def largest_scale(inverse_scales: Tensor | None) -> float:
    """The largest of the inverse scales; 1 without any."""
    return 1.0 if inverse_scales is None or not inverse_scales.numel() else float(inverse_scales.max())


def canceled(square_B: Tensor, terms_B: Tensor) -> Tensor:
    """Which squared norms are so small a share of their terms that rounding hides them."""
    return square_B < CANCELLED * terms_B.square()
