"""Each example's own displacement of the parameters: a multiple of its gradient, or of its update so far.

BAM and local training evaluate each example's gradient at such displaced ("moved") parameters.

Shape suffixes: B examples, T positions of an example, I inputs, O outputs, P a parameter's shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from privgrad.engine.factors.conv import Geometry, convolve
from privgrad.engine.factors.outer import Outer
from privgrad.gradient.factor import Dense, Examples, Factor, as_linear_map, examples_per_block
from privgrad.gradient.functional import batched

_MANY = 8  # positions from which adding to a weight takes less time than a second product


@dataclass(frozen=True)
class Displacement:
    """The displacement of one parameter for each example: share_i g_i."""

    factor: Factor  # g_i
    share: Tensor  # share_i, shape (B,)

    def __getitem__(self, examples: Examples) -> "Displacement":
        return Displacement(self.factor[examples], self.share[examples])

    def dense(self) -> Tensor:
        return self.factor.dense() * self._share(len(self.factor.shape))

    def for_rows(self, x: Tensor) -> Tensor:
        """Return the displacement for each row of x, shape (rows, *P); an example may have several rows."""
        return _for_rows(self.dense(), x)

    def added_to(self, parameter: Tensor) -> Tensor:
        share = self._share(len(self.factor.shape))
        return torch.addcmul(parameter, self.factor.dense().to(parameter.dtype), share.to(parameter.dtype))

    def apply(self, x_BTI: Tensor) -> Tensor:
        return as_linear_map(self.factor).apply(x_BTI) * self._share(2)

    def is_faster_written_out(self, positions: int) -> bool:
        """Return whether to add the displacements to the weight, instead of `apply` to an input of these positions."""
        if isinstance(self.factor, Outer):
            return self.factor.is_faster_written_out(positions)
        return isinstance(self.factor, Dense) and positions >= _MANY

    def read(self, ids_BT: Tensor) -> Tensor:
        return as_linear_map(self.factor).read(ids_BT) * self._share(2)

    def read_bags(self, ids_BJT: Tensor, weight_BJT: Tensor) -> Tensor:
        return as_linear_map(self.factor).read_bags(ids_BJT, weight_BJT) * self._share(2)

    def transposed(self) -> "Displacement":
        return Displacement(as_linear_map(self.factor).transposed(), self.share)

    def convolve(self, x: Tensor, geometry: Geometry) -> Tensor:
        # The shares are multiplied with the outputs or with the weights, whichever are smaller.
        if geometry.by_patches(geometry.positions(x.shape[2:])):
            return convolve(self.factor, x, geometry) * _for_rows(self._share(x.dim() - 1), x)
        return convolve(Dense(self.dense()), x, geometry)

    def _share(self, dims: int) -> Tensor:
        return self.share.view(-1, *[1] * dims)


class PerSampleWeight:
    """A layer's weight that a parametrization computes from each example's own moved parameters."""

    def __init__(self, parametrization: nn.Module, displacements: Mapping[str, Displacement], weight: Tensor) -> None:
        self._parametrization = parametrization
        self._displacements = displacements
        self._weight = weight.detach()
        self._own = {name: p for name, p in parametrization.named_parameters() if p.requires_grad}

    def displacement(self) -> Displacement:
        weight = self._weight
        moved = weight.new_empty(self._examples, *weight.shape)
        with torch.no_grad():
            for part in self._parts(weight.shape):
                torch.sub(self._weights(self._points(part)), weight, out=moved[part])
        return Displacement(Dense(moved), moved.new_ones(len(moved)))

    def pull(self, grads: Factor) -> dict[Tensor, Factor]:
        size = self._examples
        pulled = {own: own.new_empty(size, *own.shape) for own in self._own.values()}
        grads = grads if grads.examples == size else grads.merge(grads.examples // size)
        for part in self._parts(grads.shape):
            points = {name: point.requires_grad_() for name, point in self._points(part).items()}
            with torch.enable_grad():
                weights = self._weights(points)
            along = grads[part].dense().to(weights.dtype)
            found = torch.autograd.grad(weights, list(points.values()), along, materialize_grads=True)
            for rows, values in zip(pulled.values(), found, strict=True):
                rows[part] = values
        return {own: Dense(rows) for own, rows in pulled.items()}

    @property
    def _examples(self) -> int:
        return next(iter(self._displacements.values())).factor.examples

    def _parts(self, shape: torch.Size) -> list[slice]:
        """Return slices of a few examples each, whose weights of this shape are written out together."""
        few = examples_per_block(int(shape.numel()), self._weight)
        return [slice(start, start + few) for start in range(0, self._examples, few)]

    def _points(self, part: slice) -> dict[str, Tensor]:
        moved = {
            name: displacement[part].added_to(self._own[name].detach())
            for name, displacement in self._displacements.items()
        }
        size = len(next(iter(moved.values())))
        return {n: moved[n] if n in moved else p.detach().expand(size, *p.shape) for n, p in self._own.items()}

    def _weights(self, points: Mapping[str, Tensor]) -> Tensor:

        def weight(*row: Tensor) -> Tensor:
            return cast(Tensor, functional_call(self._parametrization, dict(zip(points, row, strict=True)), ()))

        try:
            return batched(weight, module=self._parametrization)(*points.values())
        except Exception:  # vmap has no rule for an operation
            return torch.stack([weight(*row) for row in zip(*points.values(), strict=True)])


@dataclass(frozen=True)
class Displacements:
    """The displacements of all parameters: each example's parameters are moved by share_i g_i."""

    factors: Mapping[int, Factor]  # g_i by id of the parameter; parameters that do not move are missing
    share: Tensor  # share_i, shape (B,)

    def of(self, weights: Mapping[str, Tensor]) -> dict[str, Displacement]:
        found = {name: self.factors.get(id(weight)) for name, weight in weights.items()}
        return {name: Displacement(factor, self.share) for name, factor in found.items() if factor is not None}


def displacement_of(parameter: Tensor, displacements: Displacements | None) -> Displacement | None:
    """Return the displacement of a parameter; None if it does not move, or none does."""
    if displacements is None or (factor := displacements.factors.get(id(parameter))) is None:
        return None
    return Displacement(factor, displacements.share)


def _for_rows(values_B: Tensor, x: Tensor) -> Tensor:
    return values_B.repeat_interleave(len(x) // len(values_B), 0)
