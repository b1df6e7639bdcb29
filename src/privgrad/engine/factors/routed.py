"""The factors of stacked weights of experts, of which each position of an example uses a few.

Shape suffixes: B examples, M positions of all examples that use one expert, E experts, I inputs, O outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from privgrad.engine.factors.outer import position_norms
from privgrad.gradient.factor import Examples, Factor, at_least_float32, masked, norms_of, sum_of_products


@dataclass(frozen=True)
class Routes:
    """The positions that use one expert, sorted by example."""

    expert: int
    example: Tensor  # of each position, int64, ascending, shape (M,)
    a: Tensor  # inputs, shape (M, I)
    b: Tensor  # gradients of the outputs, shape (M, O)

    def by_example(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (i, a_i, b_i), with shapes (T, I) and (T, O), for each example i that uses the expert."""
        found = cast("tuple[Tensor, Tensor]", torch.unique_consecutive(self.example, return_counts=True))
        examples, counts = (cast("list[int]", x.tolist()) for x in found)
        a, b = (cast("tuple[Tensor, ...]", x.split(counts)) for x in (self.a, self.b))
        yield from zip(examples, a, b, strict=True)

    def gradients(self) -> Iterator[tuple[int, Tensor]]:
        for example, a_TI, b_TO in self.by_example():
            yield example, b_TO.mT @ a_TI


class Routed(Factor):
    """The gradients of stacked weights: g_i[e] = sum over the positions of example i that use expert e of b a^T."""

    def __init__(self, routes: Sequence[Routes], examples: int, shape: torch.Size, positions: int) -> None:
        super().__init__(examples, shape)
        # At most one route for each expert. Positions are public, and count once for each expert that they use.
        self.routes, self._positions = list(routes), positions

    def __getitem__(self, examples: Examples) -> "Routed":
        chosen = torch.arange(self.examples)[examples]
        place = torch.full((self.examples,), -1)
        place[chosen] = torch.arange(len(chosen))
        routes = list[Routes]()
        for route in self.routes:
            found = place.to(route.example.device)[route.example]
            order = found.argsort(stable=True)
            order = order[found[order] >= 0]
            if len(order) > 0:
                routes.append(Routes(route.expert, found[order], route.a[order], route.b[order]))
        return Routed(routes, len(chosen), self.shape, self._positions)

    def dense(self) -> Tensor:
        grads_BEOI = self._zeros(self.examples, *self.shape)
        for route in self.routes:
            for example, grad_OI in route.gradients():
                grads_BEOI[example, route.expert] = grad_OI
        return grads_BEOI

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        total = self._zeros(*self.shape)
        for route in self.routes:
            weight_M = weight_B.to(route.b.dtype)[route.example, None]
            total[route.expert] = (route.b * weight_M).mT @ route.a
        return total

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        total = self._zeros(*self.shape).double()
        for route in self.routes:
            weight_M = weight_B.to(route.b.dtype)[route.example, None]
            total[route.expert] = sum_of_products(route.b * weight_M, route.a)
        return total

    def mask(self, kept_B: Tensor) -> "Routed":
        kept = [(r, kept_B[r.example]) for r in self.routes]
        routes = [Routes(r.expert, r.example, masked(r.a, kept_M), masked(r.b, kept_M)) for r, kept_M in kept]
        return Routed(routes, self.examples, self.shape, self._positions)

    def merge(self, parts: int) -> "Routed":
        routes = [Routes(r.expert, r.example // parts, r.a, r.b) for r in self.routes]
        return Routed(routes, self.examples // parts, self.shape, self._positions * parts)

    def __add__(self, other: Factor) -> Factor:
        if not isinstance(other, Routed):
            return super().__add__(other)
        found = {route.expert: route for route in self.routes}
        for r in other.routes:
            found[r.expert] = _joined(found[r.expert], r) if r.expert in found else r
        return Routed(list(found.values()), self.examples, self.shape, max(self._positions, other._positions))

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        total_B = torch.zeros(self.examples, dtype=torch.float64, device=self._device)
        for route in self.routes:
            largest = 1.0 if inverse_scales is None else float(inverse_scales[route.expert].max())
            terms_M = position_norms(route.a) * position_norms(route.b) * largest
            total_B.index_add_(0, route.example, terms_M)
        return total_B

    @property
    def positions(self) -> int:
        return self._positions

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        square_B = torch.zeros(self.examples, dtype=torch.float64, device=self._device)
        for route in self.routes:
            scales = None if inverse_scales is None else at_least_float32(inverse_scales[route.expert])
            for example, grad_OI in route.gradients():
                square_B[example] += norms_of(grad_OI[None], scales)[0].square()
        return square_B.sqrt()

    @property
    def _device(self) -> torch.device | None:
        return self.routes[0].a.device if self.routes else None

    def _zeros(self, *shape: int) -> Tensor:
        return self.routes[0].a.new_zeros(shape) if self.routes else torch.zeros(shape)


def _joined(one: Routes, other: Routes) -> Routes:
    """Return the positions of two uses of one expert, sorted by example."""
    example_M = torch.cat([one.example, other.example])
    order = example_M.argsort(stable=True)
    a_MI, b_MO = torch.cat([one.a, other.a]), torch.cat([one.b, other.b])
    return Routes(one.expert, example_M[order], a_MI[order], b_MO[order])
