"""The Jacobian of a weight that a layer computes row by row, in closed form.

Weight standardization, weight_norm and the multiplication with a constant have such a Jacobian, however they are
written. `jacobian` finds it from products with random matrices, and `weight_standardization` knows it.

The privacy guarantee rests on `RowMap` and `RowSums`. It does not rest on `found`: whatever the map, it depends on the
weights alone, and it gives both the norm of an example and its share of the sum. The gradients are right only if the
map is the Jacobian. `found` verifies this by random products.

Shape suffixes: B examples, T positions of an example, O rows of the weight (outputs), F entries of a row.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.conv import Convolution
from privgrad.gradient.factors.norms import TINY, canceled, examples_per_block, native_norms
from privgrad.gradient.factors.outer import Outer

_LEAST = 16  # entries of a row, with fewer of which three numbers per row say too little
_EXACT = 64  # times the resolution of the weight: how far products may differ from those of the map


class RowMap:
    """J^T for a weight w whose row o depends on row o of a parameter alone.

    Computes, with u_o = w_o / |w_o| and <.> the mean over a row:
        scale_o h_o + level_o <h_o> + along_o (u_o . h_o) u_o,
    or along_o (u_o . h_o) for a parameter that has one number per row. docs/mathematics.md (3.13).

    Args:
        unit_OF: u.
        numbers: scale, level and along, each of shape (O,); along only, for one number per row.
        shape: P, the parameter's shape.
    """

    def __init__(self, unit_OF: Tensor, numbers: tuple[Tensor, ...], shape: torch.Size) -> None:
        self.unit_OF, self.numbers, self.shape = unit_OF, numbers, shape

    @property
    def is_per_row(self) -> bool:
        """Whether the parameter has one number per row."""
        return len(self.numbers) == 1

    @cached_property
    def spectral_norm(self) -> float:
        """The norm of J, from its eigenvalues in the plane of u and the constant row, and outside of this plane.

        docs/mathematics.md (3.15).
        """
        if self.is_per_row:
            return float(self.numbers[0].abs().max())
        scale_O, level_O, along_O = (numbers.double() for numbers in self.numbers)
        square_O = (self.unit_OF.double().sum(1).square() / self.unit_OF.shape[1]).clamp(max=1.0)
        trace_O = 2 * scale_O + level_O + along_O
        apart_O = (level_O - along_O).square() + 4 * level_O * along_O * square_O
        return float(torch.maximum(scale_O.abs(), (trace_O.abs() + apart_O.clamp(min=0).sqrt()) / 2).max())

    def pull(self, grads: Tensor) -> Tensor:
        """Return the products of J^T with rows of gradients, (rows, *weight.shape) -> (rows, *P)."""
        h_BOF = grads.flatten(2)
        unit_BO = cast(Tensor, torch.linalg.vecdot(h_BOF, self.unit_OF))
        if self.is_per_row:
            return self.along(unit_BO)
        scale_O, level_O, along_O = self.numbers
        level_BO, along_BO = h_BOF.mean(2) * level_O, unit_BO * along_O
        pulled_BOF = torch.addcmul(level_BO[:, :, None], along_BO[:, :, None], self.unit_OF)
        return pulled_BOF.addcmul_(h_BOF, scale_O[:, None]).view(-1, *self.shape)

    def along(self, unit_BO: Tensor) -> Tensor:
        """Return the products for a parameter with one number per row, shape (B, *P), from u_o . h_o."""
        return (unit_BO * self.numbers[-1]).view(-1, *self.shape)

    def norms(self, sums: "RowSums") -> tuple[Tensor, Tensor]:
        """Return the norms of the products, shape (B,), float64, and which of them rounding may have spoiled.

        docs/mathematics.md (3.14).
        """
        (scale_O, level_O, along_O), fan_in = self.numbers, self.unit_OF.shape[1]
        square_BO = scale_O.square() * sums.square + (along_O + 2 * scale_O) * along_O * sums.along.square()
        square_BO += (level_O + 2 * scale_O) * level_O * fan_in * sums.mean.square()
        square_BO += 2 * level_O * along_O * self.unit_OF.sum(1) * sums.mean * sums.along
        square_B = square_BO.sum(1, dtype=torch.float64)
        spoiled_B = sums.spoiled | canceled(square_B, self.spectral_norm * sums.bound) | ~torch.isfinite(square_B)
        return square_B.clamp(min=0).sqrt(), spoiled_B


class RowSums(NamedTuple):
    """Sums over each row h_o of gradients, from which the norms of all `RowMap` products follow.

    Attributes:
        square: |h_o|^2, shape (B, O).
        mean: <h_o>, shape (B, O).
        along: u_o . h_o, shape (B, O).
        bound: a bound on the norms of all terms of h, to which rounding errors are in proportion; shape (B,), float64.
        spoiled: whether squares have under- or overflowed, shape (B,).
    """

    square: Tensor
    mean: Tensor
    along: Tensor
    bound: Tensor
    spoiled: Tensor

    @classmethod
    def of(cls, grads: Factor, unit_OF: Tensor) -> "RowSums":
        """Return the sums for gradients with respect to a weight, and for rows u; these may have any length.

        Computes: inner products of patches or positions where these take fewer operations, as in docs/mathematics.md
        (3.6). Otherwise the gradients are written out in chunks.
        """
        outer = _is_outer(grads)
        floats = grads.positions * unit_OF.shape[1] if outer else unit_OF.numel()
        few = examples_per_block(floats, unit_OF)
        parts = [grads[start : start + few] for start in range(0, grads.examples, few) or [0]]
        sums = [cls._of_outer(part, unit_OF) if outer else cls._of_dense(part, unit_OF) for part in parts]
        return cls(*map(torch.cat, zip(*sums, strict=True)))

    @classmethod
    def _of_outer(cls, grads: Factor, unit_OF: Tensor) -> "RowSums":
        if isinstance(grads, Convolution):
            h, along_BO = grads.of_patches(), grads.row_products(unit_OF)
        else:
            h = cast(Outer, grads)
            along_BO = ((h.a_BTI @ unit_OF.mT) * h.b_BTO).sum(1)
        a_BTT = h.a_BTI @ h.a_BTI.mT
        a_BT, b_BT = a_BTT.diagonal(dim1=1, dim2=2).sqrt(), native_norms(h.b_BTO)
        square_BO = ((a_BTT @ h.b_BTO) * h.b_BTO).sum(1)
        mean_BO = (h.a_BTI.mean(2)[:, None] @ h.b_BTO)[:, 0]
        bound_B = (a_BT * b_BT).sum(1, dtype=torch.float64)
        return cls(square_BO, mean_BO, along_BO, bound_B, h.underflowing(a_BT, b_BT))

    @classmethod
    def _of_dense(cls, grads: Factor, unit_OF: Tensor) -> "RowSums":
        h_BOF = grads.dense().flatten(2)
        square_BO, unit_BO = (cast(Tensor, torch.linalg.vecdot(h_BOF, other)) for other in (h_BOF, unit_OF))
        bound_B = square_BO.sum(1, dtype=torch.float64).sqrt()
        lost_B = ~((bound_B >= TINY) & torch.isfinite(bound_B))
        if bool(lost_B.any()):  # squares underflow, unless the gradient is zero
            lost_B[lost_B.clone()] = (h_BOF[lost_B] != 0).flatten(1).any(1)
        return cls(square_BO, h_BOF.mean(2), unit_BO, bound_B, lost_B)


class SharedSums:
    """The `RowSums` of one layer's gradients, computed once for all parameters from which its weight is computed."""

    def __init__(self, grads: Factor) -> None:
        self._grads, self._found = grads, cast("RowSums | None", None)

    def of(self, row_map: RowMap) -> RowSums:
        """Return the sums for a map; those of a weight have the same u."""
        if self._found is None:
            self._found = RowSums.of(self._grads, row_map.unit_OF)
        return self._found


def _is_outer(grads: Factor) -> bool:
    """Return whether inner products take fewer operations than the gradients."""
    if isinstance(grads, Outer):
        return grads.positions * sum(grads.shape) < grads.shape.numel()
    return isinstance(grads, Convolution) and grads.by_inner_products


def found(weight: Tensor, parameter: Tensor, pull: Callable[[Tensor], Tensor], *, verified: bool) -> RowMap | None:
    """Return the map of a weight's Jacobian with respect to a parameter, or None if it has no such form.

    Computes: J^T h for a random h that is not orthogonal to u or to the constant row. Least squares give three numbers
    for the F entries of each row, and the map of these must give all entries. A Jacobian of another form may pass by
    chance for one h: for instance, if it multiplies u with the product of h and a row other than u. It does not pass
    for a second one.

    Args:
        weight: w.
        parameter: a parameter from which w is computed, shaped like w or with one number per row of w.
        pull: function from h to J^T h.
        verified: whether the second product is already known to agree, as in an earlier step.
    """
    if weight.dim() < 2 or weight[0].numel() < _LEAST or weight.dtype != parameter.dtype:
        return None
    like_weight = parameter.shape == weight.shape
    per_row = parameter.dim() > 0 and len(parameter) == parameter.numel() == len(weight)
    if not (like_weight or per_row):
        return None
    w_OF = weight.detach().flatten(1)
    length_O = native_norms(w_OF)
    if not bool((length_O > 0).all() & torch.isfinite(length_O).all()):
        return None
    unit_OF, root = w_OF / length_O[:, None], w_OF.shape[1] ** 0.5
    random_OF = _random(w_OF)
    probe_OF = torch.add(random_OF, unit_OF, alpha=root).add_(1.0)
    pulled = pull(probe_OF.view_as(weight))
    if like_weight:
        own = _solved(unit_OF, probe_OF, pulled.flatten(1))
    else:
        own = (pulled.flatten() / cast(Tensor, torch.linalg.vecdot(probe_OF, unit_OF)),)
    row_map = RowMap(unit_OF, own, parameter.shape)
    if like_weight and not _agree(row_map, probe_OF, pulled):
        return None
    if verified:
        return row_map
    other_OF = random_OF.flip(1).sub_(unit_OF, alpha=2 * root).add_(3.0)
    return row_map if _agree(row_map, other_OF, pull(other_OF.view_as(weight))) else None


def _solved(unit_OF: Tensor, h_OF: Tensor, pulled_OF: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers whose map comes closest to the product, row by row."""

    def products(a_OF: Tensor, b_OF: Tensor) -> Tensor:
        return cast(Tensor, torch.linalg.vecdot(a_OF, b_OF)).double()

    # The product is a combination of three rows: h, ones and u.
    h_O, unit_O, pulled_O = (x_OF.sum(1).double() for x_OF in (h_OF, unit_OF, pulled_OF))
    along_O, one_O = products(unit_OF, h_OF), torch.ones_like(h_O)
    gram = [[products(h_OF, h_OF), h_O, along_O], [h_O, h_OF.shape[1] * one_O, unit_O], [along_O, unit_O, one_O]]
    sides = [products(h_OF, pulled_OF), pulled_O, products(unit_OF, pulled_OF)]
    matrix_O33 = torch.stack([torch.stack(row, 1) for row in gram], 1)
    solution_O3 = cast(Tensor, torch.linalg.solve_ex(matrix_O33, torch.stack(sides, 1))[0])
    of_rows = torch.stack([one_O, h_OF.shape[1] / h_O, 1 / along_O])
    return tuple((solution_O3.mT * of_rows).to(h_OF.dtype).unbind(0))


def _agree(row_map: RowMap, h_OF: Tensor, pulled: Tensor) -> bool:
    """Return whether the map gives this product, up to rounding errors of its terms."""
    error_O = native_norms((row_map.pull(h_OF[None])[0] - pulled).view(len(h_OF), -1))
    terms_O = native_norms(h_OF) * torch.stack([numbers.abs() for numbers in row_map.numbers]).sum(0)
    return bool((error_O <= _EXACT * torch.finfo(h_OF.dtype).eps * terms_O).all())


def _random(like_OF: Tensor) -> Tensor:
    """Return rows of normal numbers, drawn with a fixed seed: windows of one long row, which take less time to draw."""
    rows, length = like_OF.shape
    drawn = torch.randn(rows + length, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return drawn.to(like_OF).unfold(0, length, 1)[:rows]
