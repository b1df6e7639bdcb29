"""The factor of a parameter from which a layer computes its weight, by the Jacobian of that computation.

A torch parametrization such as weight_norm computes a weight this way. A layer's rule gives the gradients with respect
to the weight, and `Pulled` multiplies them with the transposed Jacobian. `engines.layer_call` makes these factors,
and calls `JacobianNorms.of` and `rows`. `privgrad.gradient.clipping` and the engines call the methods of `Pulled`,
which implement `base.Factor`. `shifted` calls `inner_products`.

The privacy guarantee rests on this file: on the gradients, and on the norm of the Jacobian. Clipping judges by this
norm how far a sum may be rounded. The guarantee does not rest on `worth_keeping`, which only saves time.

Shape suffixes: B examples, P a parameter's shape.
"""

import math
import random
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from privgrad.gradient.factors.base import Dense, Examples, Factor, term_bound_of
from privgrad.gradient.factors.norms import (
    added_up,
    at_least_float32,
    flattened,
    float64_norms,
    largest_scale,
    native_norms,
    norms_of,
)
from privgrad.gradient.factors.row_map import RowMap, SharedSums
from privgrad.gradient.factors.row_map import found as found_map

_ROUNDS, _MARGIN = 6, 2.0  # rounds of the power method, and the factor by which its result is enlarged
_STEPS, _GROWTH = 32, 1.25  # the norm of J is measured again after so many steps, or if J grew by this factor
_SHARES = random.Random()  # independent of every stream that a user seeds


class Jacobian:
    """The Jacobian J of a layer's weight with respect to a parameter from which it is computed.

    It is the same for every example.

    Args:
        weight: the weight, with its graph.
        parameter: a leaf of that graph.
        norm: an upper bound on the spectral norm of J, or a function that returns one; if there are no `rows`.
        rows: a function that returns J in closed form, or None if J has no such form.
    """

    def __init__(
        self,
        weight: Tensor,
        parameter: Tensor,
        norm: "float | Callable[[Jacobian], float]",
        rows: "Callable[[Jacobian], RowMap | None] | None" = None,
    ) -> None:
        self.weight, self.parameter, self._norm, self._rows = weight, parameter, norm, rows

    @cached_property
    def rows(self) -> RowMap | None:
        """J in closed form, or None."""
        return None if self._rows is None else self._rows(self)

    def pull(self, grad: Tensor, *, batched: bool = False) -> Tensor:
        """Return the vector-Jacobian product J^T grad, shaped like the parameter; with `batched`, one per row."""
        grad = grad.to(self.weight.dtype)
        if self.rows is not None:
            return self.rows.pull(grad) if batched else self.rows.pull(grad[None])[0]
        return self.product(grad, batched=batched)

    def product(self, grad: Tensor, *, batched: bool = False) -> Tensor:
        """Return what `pull` returns, by autograd."""
        return torch.autograd.grad(self.weight, self.parameter, grad, retain_graph=True, is_grads_batched=batched)[0]

    @cached_property
    def norm(self) -> float:
        """The upper bound on the spectral norm of J."""
        if self.rows is not None:
            return self.rows.spectral_norm
        return self._norm(self) if callable(self._norm) else self._norm

    def stretch(self, u: Tensor) -> float:
        """Return |J^T u| for a vector u of length 1."""
        return float(float64_norms(self.pull(u).flatten()))

    def measured_norm(self, start: Tensor) -> float:
        """Estimate twice the spectral norm of J by the power method; infinite if torch cannot compute J u.

        Computes: repeats u = J J^T u / |u| from a fixed start, and takes the largest |J^T u| / |u|. With c the share of
        the start along the largest direction, this is at least c^(1/(2 rounds - 1)) of the norm. That is 0.53 for a
        start in a million dimensions, and close to 1 if one direction dominates.

        Args:
            start: a vector drawn at random, shaped like the weight.

        Privacy:
            The estimate depends on the weights alone, which are public: no data can be built to hide from it.
        """
        u, largest = start.to(self.weight), 0.0
        try:
            with torch.enable_grad():
                for _ in range(_ROUNDS):
                    u = (u / native_norms(u.flatten())).detach().requires_grad_()
                    (pulled,) = torch.autograd.grad(self.weight, self.parameter, u, create_graph=True)
                    stretch = float(float64_norms(pulled.detach().flatten()))
                    largest = max(largest, stretch)
                    if not 0 < stretch < math.inf or not pulled.requires_grad:
                        break
                    (u,) = torch.autograd.grad(pulled, u, pulled.detach())
        except RuntimeError:  # an operation without a second derivative
            return math.inf
        return _MARGIN * largest if largest < math.inf else math.inf


class JacobianNorms:
    """A cache of what is known of Jacobians: their norms, each kept for some steps, and their closed forms.

    A step usually changes weights little, but may change J at once, for instance where a gate opens. So each step
    computes |J^T u| for a fixed u. If this has grown too much, the norm is measured again.

    Privacy:
        The norm decides how each example is summed, so all passes of a step have the same one. The number of passes is
        private. If norms were measured again after so many passes, one example could decide when.
    """

    def __init__(self) -> None:
        self._found: dict[object, _Measured] = {}
        self._maps: dict[object, tuple[Tensor, RowMap | None]] = {}  # of this step, with the weights that they fit
        self._verified: dict[object, tuple[int, bool]] = {}  # the period, and whether there was a map
        self._step: int | None = None

    def begin_step(self) -> None:
        """Count a step of the training. Without steps, every pass compares |J^T u|. `Factored.begin_step` calls it."""
        self._step = 0 if self._step is None else self._step + 1
        self._maps.clear()

    def of(self, key: object, jacobian: Jacobian) -> float:
        """Return the norm of the key's Jacobian, from the cache or measured now."""
        step, known = self._step, self._found.get(key)
        if known is not None and known.start.shape != jacobian.weight.shape:
            known = None
        if known is not None and step is not None and known.step == step:
            return known.norm
        start = _unit_vector(jacobian.weight) if known is None else known.start.to(jacobian.weight)
        stretch, period = jacobian.stretch(start), None if step is None else step // _STEPS
        if known is None or known.period != period or not stretch <= _GROWTH * known.stretch:
            known = _Measured(jacobian.measured_norm(start), start, stretch, period, step)
        self._found[key] = known._replace(step=step)
        return known.norm

    def rows(self, key: object, jacobian: Jacobian) -> RowMap | None:
        """Return the closed form of the key's Jacobian, or None; found again in each step, and verified now and then.

        If there is none, the next attempt is many steps later.
        """
        weight, known = jacobian.weight.detach(), self._maps.get(key)
        if known is not None and torch.equal(known[0], weight):
            return known[1]
        period = None if self._step is None else self._step // _STEPS
        last, exists = self._verified.get(key, (None, False))
        recent = period is not None and last == period
        if recent and not exists:
            return None
        # A weight that changes within a step is not the one that was verified.
        found = found_map(weight, jacobian.parameter, jacobian.product, verified=recent and known is None)
        if period is not None and known is None:  # later passes of a step, whose number is private, decide nothing
            self._maps[key], self._verified[key] = (weight, found), (period, found is not None)
        return found


class _Measured(NamedTuple):
    norm: float
    start: Tensor  # of length 1
    stretch: float  # |J^T start| when the norm was measured
    period: int | None  # the period of _STEPS steps in which the norm was measured
    step: int | None  # the last step that used the norm


def _unit_vector(like: Tensor) -> Tensor:
    """Return a unit vector shaped like the tensor, drawn uniformly from the sphere with a fixed seed."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn / native_norms(drawn.flatten())).to(like.detach())


class Pulled(Factor):
    """The gradients of a parameter from which a layer computes its weight: g_i = J^T h_i.

    Args:
        inner: h_i, gradients with respect to the weight.
        jacobian: J, the same for every example.
        apart: whether to multiply J^T with each example's gradient instead of with their sum. It is for backward passes
            that are not additive, and for half precision: all examples would share the rounding errors of a large sum.
        sums: shared by all parameters of the weight; None: its own.
    """

    usual_terms: ClassVar[float] = 32.0  # `term_bound` is several times too large, because the norm of J is

    def __init__(self, inner: Factor, jacobian: Jacobian, *, apart: bool, sums: SharedSums | None = None) -> None:
        super().__init__(inner.examples, jacobian.parameter.shape)
        self.inner, self.jacobian, self.apart = inner, jacobian, apart
        self.sums = SharedSums(inner) if sums is None else sums

    def __getitem__(self, examples: Examples) -> "Pulled":
        return self._like(self.inner[examples])

    def dense(self) -> Tensor:
        grads_BP = self.inner.dense()
        if self.examples == 0:
            return at_least_float32(grads_BP.new_zeros(0, *self.shape))
        if self.examples == 1:
            return at_least_float32(self.jacobian.pull(grads_BP[0])[None])
        return at_least_float32(self.jacobian.pull(grads_BP, batched=True))

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Return the norms, from sums over rows if J has a closed form, and from written-out gradients otherwise."""
        rows = self.jacobian.rows
        if inverse_scales is not None or rows is None or rows.is_per_row or self.examples == 0:
            return super().norms(inverse_scales)
        norm_B, spoiled_B = rows.norms(self.sums.of(rows))
        again = spoiled_B.nonzero()[:, 0]
        if len(again) > 0:
            norm_B[again] = Factor.norms(self[again])
        return norm_B

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        if self.examples == 0 or not self.apart:
            summed = self.inner.weighted_sum(weight_B)
            return self.jacobian.pull(summed) if self.examples else summed.new_zeros(self.shape)
        parts = self._split()
        ends = accumulate(part.examples for part in parts)
        pairs = zip(parts, ends, strict=True)
        sums = [Dense(p.dense()).sum_in_parts(weight_B[end - p.examples : end]) for p, end in pairs]
        return sums[0] if len(sums) == 1 else added_up([each.double() for each in sums])

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self.sum_and_rounding(weight_B)[0]

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float]:
        """Return J^T times the sum, and an estimate of the rounding errors of this product.

        Computes: the product twice, once with the sum times a random number. The results differ by rounding errors.
        These may be far larger than |J| suggests, because J may itself be a small difference of large terms. For
        instance, weight_norm may project nearly all of a gradient away. The estimate is infinite if the product is
        longer than the known norm of J allows, so that this norm is out of date.
        """
        if self.apart or self.examples == 0:
            return self.weighted_sum(weight_B), 0.0
        summed = self.inner.sum_in_parts(weight_B)
        pulled, share = self.jacobian.pull(summed), 0.5 + 0.5 * _SHARES.random()
        moved = self.jacobian.pull(share * summed) / share - pulled
        if self._outgrows(summed, pulled):
            return pulled, math.inf
        return pulled, float(norms_of(at_least_float32(moved)[None], inverse_scales))

    @property
    def worth_keeping(self) -> bool:
        return self.inner.worth_keeping

    def written_out(self) -> "PulledDense":
        rows = self.jacobian.rows
        if rows is not None and rows.is_per_row and self.examples > 0:
            return PulledDense(rows.along(self.sums.of(rows).along))
        return PulledDense(super().written_out().grads_BP)

    def mask(self, kept_B: Tensor) -> "Pulled":
        return self._like(self.inner.mask(kept_B))

    def inner_products(self, direction: Tensor) -> Tensor:
        return torch.cat([flattened(part.dense()) @ direction.flatten() for part in self._split()])

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Return |J| times the bound of h_i, or None if each example's product is computed by itself."""
        if self.apart:
            return None
        return largest_scale(inverse_scales) * self.jacobian.norm * term_bound_of(self.inner, None)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def _outgrows(self, summed: Tensor, pulled: Tensor) -> bool:
        """Return whether J^T times the sum is longer than the norm of J allows."""
        return not float(norms_of(pulled[None])) <= 1.01 * self.jacobian.norm * float(norms_of(summed[None]))

    def _like(self, inner: Factor) -> "Pulled":
        return Pulled(inner, self.jacobian, apart=self.apart)


class PulledDense(Dense):
    """Gradients of such a parameter, multiplied with J^T one by one and written out in full."""
