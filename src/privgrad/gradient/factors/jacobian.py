"""The factor of a parameter from which a layer computes its weight, and the Jacobian of that computation.

Shape suffixes: B examples, P a parameter's shape.
"""

import math
import random
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from privgrad.gradient.factors.base import (
    Dense,
    Examples,
    Factor,
    added_up,
    flattened,
    largest_scale,
    term_bound_of,
)
from privgrad.gradient.factors.norms import (
    at_least_float32,
    float64_norms,
    native_norms,
    norms_of,
)

_ROUNDS, _MARGIN = 6, 2.0  # of the power method, and what its result is multiplied with


_PASSES, _GROWTH = 32, 1.25  # after so many, or where J grew by so much, its norm is measured again


_SHARES = random.Random()  # of no stream that a user seeds


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
        return float(float64_norms(self.pull(u).flatten()))

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
                    u = (u / native_norms(u.flatten())).detach().requires_grad_()
                    (pulled,) = torch.autograd.grad(self.weight, self.parameter, u, create_graph=True)
                    stretch = float(float64_norms(pulled.detach().flatten()))
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
    return (drawn / native_norms(drawn.flatten())).to(like.detach())


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
            return at_least_float32(grads_BP.new_zeros(0, *self.shape))
        if self.examples == 1:
            return at_least_float32(self.jacobian.pull(grads_BP[0])[None])
        return at_least_float32(self.jacobian.pull(grads_BP, batched=True))

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        if self.examples == 0 or not self.apart:
            summed = self.inner.weighted_sum(weight_B)
            return self.jacobian.pull(summed) if self.examples else summed.new_zeros(self.shape)
        parts = self._split()
        ends = accumulate(part.examples for part in parts)
        pairs = zip(parts, ends, strict=True)
        return added_up([Dense(p.dense()).weighted_sum(weight_B[end - p.examples : end]) for p, end in pairs])

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
        return pulled, float(norms_of(at_least_float32(moved)[None], inverse_scales))

    @property
    def worth_keeping(self) -> bool:
        return self.inner.worth_keeping

    def written_out(self) -> "PulledDense":
        return PulledDense(super().written_out().grads_BP)

    def mask(self, kept_B: Tensor) -> "Pulled":
        return self._like(self.inner.mask(kept_B))

    def inner_products(self, direction: Tensor) -> Tensor:
        return torch.cat([flattened(part.dense()) @ direction.flatten() for part in self._split()])

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Bound the terms of J^T h_i by |J| and those of h_i; None where each is pulled back by itself."""
        if self.apart:
            return None
        return largest_scale(inverse_scales) * self.jacobian.norm * term_bound_of(self.inner, None)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def _outgrows(self, summed: Tensor, pulled: Tensor) -> bool:
        """Return whether J^T has made a sum longer than the norm of J allows."""
        return not float(norms_of(pulled[None])) <= 1.01 * self.jacobian.norm * float(norms_of(summed[None]))

    def _like(self, inner: Factor) -> "Pulled":
        return Pulled(inner, self.jacobian, apart=self.apart)


class PulledDense(Dense):
    """Gradients that were pulled back one by one, written out."""
