"""The interface of factored per-example gradients, and the factors that fit any parameter.

The rules in `privgrad.gradient.layers` build factors, and `privgrad.gradient.clipping` uses them. The guarantee rests
on this file: a wrong norm or sum lets an example add more than the bound. It does not rest on `gram`, which serves
diagnostics, nor on `worth_keeping`, which only saves time.

Shape suffixes: B examples, T positions of an example (time, pixels), I inputs, O outputs, D width, P the shape of a
parameter. Everything here is computed in float32 or wider, and is NOT private.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, cast

import torch
from torch import Tensor

from privgrad.gradient.factors.norms import (
    added_up,
    at_least_float32,
    examples_per_block,
    flattened,
    masked,
    norms_of_parts,
)
from privgrad.gradient.factors.sums import TERMS, sum_of_rows

Examples = slice | Tensor  # a range of examples, or their indices


class Factor(ABC):
    """The gradients g_i of B examples with respect to one parameter.

    A subclass implements the abstract methods, and overrides others where it knows a cheaper way than `dense`.

    `privgrad.gradient.clipping` calls `norms`, `mask`, `term_bound`, `positions`, `sum_and_rounding`, `exact_sum`,
    `dense` and `[]`. The engines call `merge`, `worth_keeping`, `written_out`, `norms`, `mask`, `dense`, `[]` and `+`.
    `example_groups` calls `merge` and `*`, `shifted` `inner_products`, and `diagnostics` `weighted_sum` and `gram`.

    Attributes:
        examples: B.
        shape: P.
        usual_terms: what clipping expects of `term_bound` at most, in C; examples with more are summed one by one.
    """

    usual_terms: ClassVar[float] = 4.0
    _terms: ClassVar[int] = TERMS  # in one part of `sum_in_parts`

    def __init__(self, examples: int, shape: torch.Size) -> None:
        self.examples, self.shape = examples, shape

    @abstractmethod
    def __getitem__(self, examples: Examples) -> "Factor":
        """Return the gradients of some of the examples."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the gradients written out in full: grads_BP, shape (B, *P)."""

    @abstractmethod
    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        """Return the sum over i of weight_i * g_i, shape P.

        Every example's gradient must be finite.
        """

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        """Return the weighted sum, in parts of few terms (at least one example) that are added up in float64.

        The size of a part is public: it depends on the shapes of one example. `sums.sum_of_products` says why parts are
        short. Errors of a part with one example do not depend on other examples.
        """
        most = max(1, self._terms // max(1, self.positions))
        if self.examples <= most:
            return self.weighted_sum(weight_B)
        total = torch.zeros(self.shape, dtype=torch.float64, device=weight_B.device)
        for start in range(0, self.examples, most):
            part = slice(start, start + most)
            total += self[part].weighted_sum(weight_B[part])
        return total

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        """Return the weighted sum in float64, without rounding errors that several examples share.

        Each gradient is written out by itself, and these are added up in float64. A subclass whose terms are cheap in
        float64 adds up the terms instead.
        """
        parts = self._split()
        weights = cast("tuple[Tensor, ...]", weight_B.double().split([part.examples for part in parts]))
        sums = [own_B @ flattened(part.dense()).double() for own_B, part in zip(weights, parts, strict=True)]
        return added_up(sums).view(self.shape)

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float]:
        """Return the sum in parts, and an estimate of its further rounding errors.

        The estimate covers errors that change with the batch and that neither `term_bound` nor the parts account for.
        It is the norm of such an error, times the inverse scales if there are any. Clipping switches to `exact_sum`
        where it is too large.
        """
        del inverse_scales
        return self.sum_in_parts(weight_B), 0.0

    @abstractmethod
    def mask(self, kept_B: Tensor) -> "Factor":
        """Return the same gradients, with zeros for every example that is not kept.

        Args:
            kept_B: bool, shape (B,).
        """

    @property
    def worth_keeping(self) -> bool:
        """Whether to keep the gradients written out for the norms, since this makes the weighted sum much cheaper."""
        return False

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Return a bound on the summed norms of the terms of each g_i, shape (B,), float64.

        The terms are those that `weighted_sum` adds up. None means that g_i itself is the only term. If the bound is
        far above the norm, the terms cancel, and the norm does not bound their rounding errors. Clipping then writes
        the gradient out or sums in float64.
        """
        return None

    @property
    def positions(self) -> int:
        """The number of terms in the sum for one g_i; rounding errors grow with its square root."""
        return 1

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Return the L2 norm of each g_i, or of each g_i * inverse_scales: norms_B, shape (B,), float64.

        The privacy guarantee rests on these norms: clipping computes each example's clip factor from them.

        Args:
            inverse_scales: 1 / A, shape P; None is 1.
        """
        return norms_of_parts((part.dense() for part in self._split()), inverse_scales)

    def written_out(self) -> "Dense":
        """Return the same gradients with all of them in memory."""
        parts = self._split()
        first = parts[0].dense()
        if len(parts) == 1:
            return Dense(first)
        # Filled in place: torch.cat would hold all gradients in memory twice.
        grads_BP, start = first.new_empty(self.examples, *self.shape), len(first)
        grads_BP[:start] = first
        for part in parts[1:]:
            grads_BP[start : start + part.examples] = part.dense()
            start += part.examples
        return Dense(grads_BP)

    def merge(self, parts: int) -> "Factor":
        """Add up the gradients of every `parts` neighboring rows, which belong to one example."""
        return Dense(self.dense().reshape(self.examples // parts, parts, *self.shape).sum(1))

    def __mul__(self, share: float) -> "Factor":
        """Return every gradient times a positive number."""
        return Scaled(self, share)

    def inner_products(self, direction: Tensor) -> Tensor:
        """Return the inner products <g_i, direction>, shape (B,).

        Computes: the derivative of <weighted sum, direction> with respect to each weight.
        """
        with torch.enable_grad():
            weight_B = direction.new_zeros(self.examples).requires_grad_()
            along = (self.weighted_sum(weight_B) * direction).sum()
        return torch.autograd.grad(along, weight_B)[0]

    def gram(self) -> Tensor:
        """Return the inner products of all pairs of examples' gradients, shape (B, B)."""
        rows_BP = flattened(self.dense())
        return rows_BP @ rows_BP.mT

    def __add__(self, other: "Factor") -> "Factor":
        """Add the gradients of a parameter that is used in two places of the model."""
        return Sum([self, other])

    def _split(self, few: int | None = None) -> "list[Factor]":
        """Split the factor into parts of `few` examples, by default as `_per_block` says: one part at least."""
        few = self._per_block(int(self.shape.numel())) if few is None else few
        return [self[start : start + few] for start in range(0, self.examples, few) or [0]]

    def _per_block(self, floats: int) -> int:
        """Return `examples_per_block` on the device of the gradients, which is the CPU unless a subclass knows."""
        return examples_per_block(floats)


class LinearMapFactor(Factor):
    """The gradients of a weight that BAM and local training also use as weights, a different one for each example.

    They compute gradients at moved parameters, and a layer's output is linear in its weight's displacement. The
    files `displacement` and `conv` call `apply`, `read`, `read_bags`, `of_patches` and `transposed`. `local_training`
    calls `scaled`, and keeps each user's update `settled`. A subclass overrides methods as for `Factor`.
    """

    def apply(self, x_BTI: Tensor) -> Tensor:
        """Return g_i x_it for every position t, shape (B, T, O).

        This is the output of a linear map with a different weight g_i, shape (O, I), for each example.
        """
        return x_BTI @ self.dense().mT

    def read(self, ids_BT: Tensor) -> Tensor:
        """Return rows ids_it of g_i, shape (B, T, D).

        This is the output of an embedding with a different table g_i, shape (V, D), for each example.
        """
        return self.dense().gather(1, ids_BT[:, :, None].expand(-1, -1, self.shape[1]))

    def read_bags(self, ids_BJT: Tensor, weight_BJT: Tensor) -> Tensor:
        """Return weighted sums of rows of g_i, shape (B, J, D).

        This is the output of an embedding bag with a different table g_i, shape (V, D), for each example. Each example
        has J bags of T rows.
        """
        read_BJTD = self.read(ids_BJT.flatten(1)).reshape(*ids_BJT.shape, -1)
        return (read_BJTD * weight_BJT.to(read_BJTD.dtype)[..., None]).sum(2)

    def of_patches(self) -> "LinearMapFactor":
        """Return the gradients of a convolution's weight as gradients of a linear map of patches.

        Their shape changes from (O, I, *kernel) to (O, I * kernel).
        """
        return Dense(self.dense().flatten(2))

    def scaled(self, scales: Tensor) -> "LinearMapFactor":
        """Return every gradient times the same scales, whose shape broadcasts to P."""
        return Dense(self.dense() * scales)

    def settled(self) -> "LinearMapFactor":
        """Return the same gradients in the form that is cheapest to use often and to add to."""
        return self.written_out()

    def transposed(self) -> "LinearMapFactor":
        """Return every gradient transposed, for a weight that is stored transposed."""
        return Dense(self.dense().mT)


def as_linear_map(factor: Factor) -> LinearMapFactor:
    """Return the factor itself if it is a LinearMapFactor, else its gradients written out in full."""
    return factor if isinstance(factor, LinearMapFactor) else factor.written_out()


class Scaled(Factor):
    """The gradients of another factor times a positive number: share * g_i.

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

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self.inner.sum_in_parts(self.share * weight_B)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return self.inner.exact_sum(self.share * weight_B)

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float]:
        return self.inner.sum_and_rounding(self.share * weight_B, inverse_scales)

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


class Dense(LinearMapFactor):
    """A factor that stores every gradient in full, for small parameters.

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

    def _per_block(self, floats: int) -> int:
        return examples_per_block(floats, self.grads_BP)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return (weight_B.to(self.grads_BP.dtype) @ flattened(self.grads_BP)).view(self.shape)

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return sum_of_rows(weight_B, flattened(self.grads_BP)).view(self.shape)

    def mask(self, kept_B: Tensor) -> "Dense":
        return Dense(masked(self.grads_BP, kept_B))

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        return norms_of_parts([self.grads_BP]) if inverse_scales is None else super().norms(inverse_scales)

    def __add__(self, other: Factor) -> Factor:
        return Dense(self.grads_BP + other.grads_BP) if isinstance(other, Dense) else super().__add__(other)


class Sum(LinearMapFactor):
    """A sum of factors, for a parameter that is used in several places of the model.

    It serves kinds of gradients that do not combine in closed form.

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
        return added_up([as_linear_map(part).apply(x_BTI) for part in self.parts])

    def read(self, ids_BT: Tensor) -> Tensor:
        return added_up([as_linear_map(part).read(ids_BT) for part in self.parts])

    def inner_products(self, direction: Tensor) -> Tensor:
        return added_up([part.inner_products(direction) for part in self.parts])

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return added_up([part.weighted_sum(weight_B) for part in self.parts])

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return added_up([part.sum_in_parts(weight_B) for part in self.parts])

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return added_up([part.exact_sum(weight_B) for part in self.parts])

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float]:
        found = (part.sum_and_rounding(weight_B, inverse_scales) for part in self.parts)
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


def term_bound_of(factor: Factor, inverse_scales: Tensor | None) -> Tensor:
    """Return the factor's term bound, or its norms if each gradient is a single term."""
    terms = factor.term_bound(inverse_scales)
    return factor.norms(inverse_scales) if terms is None else terms
