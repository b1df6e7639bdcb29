"""The factor of a parameter from which a layer computes its weight, by the Jacobian of that computation.

A torch parametrization such as weight_norm computes a weight this way. Clipping judges by the norm of the Jacobian how
far a sum may be rounded.

Shape suffixes: B examples, P a parameter's shape.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import vmap

from privgrad.engine.factors.conv import Convolution
from privgrad.engine.factors.outer import Combined, Outer, Rows, by_rows, largest_scale
from privgrad.gradient.autograd_graph import gradients_at, has_batched_rules
from privgrad.gradient.factor import (
    TINY,
    Dense,
    Examples,
    Factor,
    LinearMapFactor,
    added_up,
    at_least_float32,
    examples_per_block,
    flattened,
    float64_norms,
    in_one,
    masked,
    native_norms,
    norms_of,
    spoiled,
    term_bound_of,
)
from privgrad.processes import is_on_processor

_LEAST = 16  # entries of a row, with fewer of which three numbers per row say too little
_FEW = 1024  # entries of a weight whose gradients take little time to write out
_COPIES = 4  # of gradients in memory while they are multiplied with J^T
_EXACT = 64  # times the resolution of the weight: how far products may differ from those of the map
_TINY = 1e-37  # less is not normal in float32


class RowMap:
    """J^T for a weight w whose row o depends on row o of a parameter alone.

    Computes scale_o h_o + level_o <h_o> + along_o (u_o . h_o) u_o, with rows u_o along w_o, of any length, and <.> the
    mean over a row; or along_o (u_o . h_o) for a parameter that has one number per row. docs/mathematics.md (3.13) is
    for u_o of length 1.
    """

    def __init__(self, rows_OF: Tensor, numbers: tuple[Tensor, ...], shape: torch.Size) -> None:
        self.rows_OF, self.numbers, self.shape = rows_OF, numbers, shape
        self.doubt_O: Tensor | None = None  # the rows where the map is wrong, as long as nobody has looked
        self.is_wrong = False

    @property
    def is_refuted(self) -> bool:
        """Whether the map is known to be wrong; within `unread`, clipping looks: see `spoiled`."""
        self.is_wrong |= self.doubt_O is not None and spoiled(self.doubt_O) is not None
        return self.is_wrong

    @property
    def is_per_row(self) -> bool:
        return len(self.numbers) == 1

    @cached_property
    def square(self) -> Tensor:
        return self.rows_OF.square().sum(1)

    @cached_property
    def spectral_norm(self) -> Tensor:
        """The norm of J, from its eigenvalues in the plane of u and the constant row, and outside: (3.15)."""
        if self.is_per_row:
            return (self.numbers[0].abs() * self.square.sqrt()).max()
        scale_O, level_O, own_O = self.numbers
        along_O = own_O * self.square
        apart_O = (level_O - along_O).square() + 4 / self.rows_OF.shape[1] * level_O * own_O * self.rows_OF.sum(
            1
        ).square()
        in_plane_O = ((2 * scale_O + level_O + along_O).abs() + apart_O.clamp(min=0).sqrt()) / 2
        return torch.maximum(scale_O.abs(), in_plane_O).max()

    def pull(self, grads: Tensor) -> Tensor:
        """Return the products of J^T with rows of gradients, (rows, *weight.shape) -> (rows, *P)."""
        h_BOF = grads.flatten(2)
        along_BO = cast(Tensor, torch.linalg.vecdot(h_BOF, self.rows_OF))
        if self.is_per_row:
            return self.along(along_BO)
        scale_O, level_O, along_O = self.numbers
        level_BO, along_BO = h_BOF.mean(2) * level_O, along_BO * along_O
        pulled_BOF = torch.addcmul(level_BO[:, :, None], along_BO[:, :, None], self.rows_OF)
        return pulled_BOF.addcmul_(h_BOF, scale_O[:, None]).view(-1, *self.shape)

    def along(self, along_BO: Tensor) -> Tensor:
        """Return the products for a parameter with one number per row, shape (B, *P), from u_o . h_o."""
        return (along_BO * self.numbers[-1]).view(-1, *self.shape)


class Projected(Combined):
    """Gradients J^T h_i = scale_o h_io + along_io u_o + level_io by a `RowMap`; norms follow from sums over rows."""

    def __init__(self, grads: Factor, row_map: RowMap, sums: "RowSums") -> None:
        LinearMapFactor.__init__(self, grads.examples, row_map.shape)
        self.grads, self.row_map, self.sums = grads, row_map, sums
        (scale_O, level_O, along_O), rows_OF = row_map.numbers, row_map.rows_OF
        self.level_BO, self.along_BO = level_O * sums.mean, along_O * sums.along
        self._scale_O, self.rows = scale_O, rows_OF.view(row_map.shape)
        # (3.14), as level (F level + 2 F scale <h> + 2 along <u> F) + along (|u|^2 along + 2 scale u . h).
        of_level_BO = torch.addcmul(self.level_BO, scale_O, sums.mean, value=2).mul_(rows_OF.shape[1])
        of_level_BO = of_level_BO.addcmul_(self.along_BO, rows_OF.sum(1), value=2)
        of_rows_BO = torch.addcmul(self.along_BO * row_map.square, scale_O, sums.along, value=2)
        square_BO = scale_O.square() * sums.square
        self.square_BO = square_BO.addcmul_(self.level_BO, of_level_BO).addcmul_(self.along_BO, of_rows_BO)

    @cached_property
    def h(self) -> Rows:
        return rows_of(self.grads)

    @cached_property
    def inner(self) -> Rows:  # pyright: ignore[reportIncompatibleVariableOverride], computed where it is needed only
        return by_rows(self.h, self._scale_O.expand_as(self.level_BO))

    def __getitem__(self, examples: Examples) -> "Projected":
        return Projected(self.grads[examples], self.row_map, RowSums(*(x[examples] for x in self.sums)))

    def mask(self, kept_B: Tensor) -> "Projected":
        *numbers, spoiled_B = self.sums
        sums = RowSums._make([*(masked(x, kept_B) for x in numbers), spoiled_B & kept_B])
        return Projected(self.grads.mask(kept_B), self.row_map, sums)

    def _inner_sum(self, weight_B: Tensor) -> Tensor:
        return self.grads.sum_in_parts(weight_B).flatten(1) * self._scale_O[:, None]

    def _inner_terms(self) -> Tensor:
        return self.sums.bound * self._scale_O.abs().max()

    def _underflowing(self) -> Tensor:
        return self.sums.spoiled

    @property
    def positions(self) -> int:
        return self.grads.positions


def rows_of(grads: Factor) -> Rows:
    """Return gradients of a weight as rows, written out unless they are of few positions."""
    if isinstance(grads, Outer):
        return grads
    if isinstance(grads, Convolution) and grads.by_inner_products:
        return grads.of_patches()
    return Dense(grads.dense().flatten(2))


class RowSums(NamedTuple):
    """Sums over each row h_o of gradients, from which the norms of all `RowMap` products follow."""

    square: Tensor  # |h_o|^2, shape (B, O)
    mean: Tensor  # <h_o>, shape (B, O)
    along: Tensor  # u_o . h_o, shape (B, O)
    bound: Tensor  # on the norms of all terms of h, to which rounding errors are in proportion; shape (B,), float64
    spoiled: Tensor  # whether squares have under- or overflowed, shape (B,)

    @classmethod
    def of(cls, grads: Factor, unit_OF: Tensor, along_BO: Tensor | None = None) -> "RowSums":
        """Return the sums for gradients with respect to a weight, and for rows u of any length; `along_BO` if known."""
        # By inner products of patches or positions where these take fewer operations, as in docs/mathematics.md (3.6).
        of_patches = isinstance(grads, Convolution) and grads.by_inner_products
        outer = grads.has_few_positions if isinstance(grads, Outer) else of_patches
        floats = grads.positions * unit_OF.shape[1] if outer else unit_OF.numel()
        few = examples_per_block(floats, unit_OF)
        sums = list[RowSums]()
        for start in range(0, grads.examples, few) or [0]:
            part, known = slice(start, start + few), None if along_BO is None else along_BO[start : start + few]
            sums.append(cls._of_outer(grads[part], unit_OF, known) if outer else cls._of_dense(grads[part], unit_OF))
        return cls(*map(in_one, zip(*sums, strict=True)))

    @classmethod
    def _of_outer(cls, grads: Factor, unit_OF: Tensor, along_BO: Tensor | None) -> "RowSums":
        if isinstance(grads, Convolution):
            h, along_BO = grads.of_patches(), grads.row_products(unit_OF) if along_BO is None else along_BO
        else:
            h = cast(Outer, grads)
            along_BO = ((h.a_BTI @ unit_OF.mT) * h.b_BTO).sum(1)
        a_BTT = h.a_BTI @ h.a_BTI.mT
        square_BO = ((a_BTT @ h.b_BTO) * h.b_BTO).sum(1)
        mean_BO = (h.a_BTI.mean(2)[:, None] @ h.b_BTO)[:, 0]
        return cls(square_BO, mean_BO, along_BO, *h.bound(a_BTT))

    @classmethod
    def _of_dense(cls, grads: Factor, unit_OF: Tensor) -> "RowSums":
        h_BOF = grads.dense().flatten(2)
        square_BO, unit_BO = (cast(Tensor, torch.linalg.vecdot(h_BOF, other)) for other in (h_BOF, unit_OF))
        bound_B = square_BO.sum(1, dtype=torch.float64).sqrt()
        lost_B = ~((bound_B >= TINY) & torch.isfinite(bound_B))
        if not is_on_processor(lost_B):  # squares underflow, unless the gradient is zero
            lost_B &= (h_BOF != 0).flatten(1).any(1)
        elif bool(lost_B.any()):
            lost_B[lost_B.clone()] = (h_BOF[lost_B] != 0).flatten(1).any(1)
        return cls(square_BO, h_BOF.mean(2), unit_BO, bound_B, lost_B)


class SharedSums:
    """The `RowSums` of one layer's gradients, computed once for all parameters from which its weight is computed."""

    def __init__(self, grads: Factor) -> None:
        self._grads = grads
        self._found: RowSums | None = None

    def of(self, row_map: RowMap) -> RowSums:
        if self._found is None:
            self._found = RowSums.of(self._grads, row_map.rows_OF)
        return self._found


def found_map(weight: Tensor, parameter: Tensor, pull: Callable[[Tensor], Tensor], *, verified: bool) -> RowMap | None:
    """Return the map of a weight's Jacobian with respect to a parameter, or None if it has no such form.

    Computes: J^T h for a random h that is not orthogonal to u or to the constant row. Least squares give three numbers
    for the F entries of each row, and the map of these must give all entries. A Jacobian of another form may pass by
    chance for one h, but not for a second one, which is left out if the map was `verified` in an earlier step.
    """
    if weight.dim() < 2 or weight[0].numel() < _LEAST or weight.dtype != parameter.dtype:
        return None
    like_weight = parameter.shape == weight.shape
    per_row = parameter.dim() > 0 and len(parameter) == parameter.numel() == len(weight)
    if not (like_weight or per_row):
        return None
    w_OF = weight.detach().flatten(1)
    unit_OF, root = w_OF / native_norms(w_OF)[:, None], w_OF.shape[1] ** 0.5
    # Windows of one long row take less time to draw. The seed is fixed.
    row = torch.randn(sum(w_OF.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    random_OF = row.to(w_OF).unfold(0, w_OF.shape[1], 1)[: len(w_OF)]
    probe_OF = torch.add(random_OF, unit_OF, alpha=root).add_(1.0)
    pulled = pull(probe_OF.view_as(weight))
    if like_weight:
        numbers, rest_OF = _fit(unit_OF, probe_OF, pulled.flatten(1))
    else:
        numbers = (pulled.flatten() / cast(Tensor, torch.linalg.vecdot(probe_OF, unit_OF)),)
        rest_OF = (numbers[0] - numbers[0])[:, None]  # nan where a row of w is zero or not finite
    row_map = RowMap(unit_OF, numbers, parameter.shape)
    doubt_O = _beyond_rounding(rest_OF, row_map, probe_OF)
    if verified:
        row_map.doubt_O = doubt_O
        return None if row_map.is_refuted else row_map
    other_OF = random_OF.flip(1).sub_(unit_OF, alpha=2 * root).add_(3.0)
    rest_OF = row_map.pull(other_OF[None])[0] - pull(other_OF.view_as(weight))
    doubt_O |= _beyond_rounding(rest_OF.view(len(w_OF), -1), row_map, other_OF)
    return None if bool(doubt_O.any()) else row_map


def _fit(unit_OF: Tensor, h_OF: Tensor, pulled_OF: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the numbers whose map comes closest to the product, row by row, and what it leaves."""
    # The product is a combination of three rows: h, ones and u.
    rows_O4F = torch.stack([h_OF, torch.ones_like(h_OF), unit_OF, pulled_OF], 1)
    gram_O44 = (rows_O4F @ rows_O4F.mT).double()
    share_O3 = cast(Tensor, torch.linalg.solve_ex(gram_O44[:, :3, :3], gram_O44[:, :3, 3])[0])
    scale_O, level_O, along_O = share_O3.unbind(1)
    numbers = scale_O, level_O * h_OF.shape[1] / gram_O44[:, 0, 1], along_O / gram_O44[:, 0, 2]
    share_O13 = share_O3[:, None].to(h_OF.dtype)
    rest_O1F = torch.baddbmm(rows_O4F[:, 3:], share_O13, rows_O4F[:, :3], alpha=-1)
    return tuple(each.to(h_OF.dtype) for each in numbers), rest_O1F[:, 0]


def _beyond_rounding(rest_OF: Tensor, row_map: RowMap, h_OF: Tensor) -> Tensor:
    """Return in which rows a map leaves more of a product than rounding errors of its terms."""
    terms_O = native_norms(h_OF) * torch.stack([numbers.abs() for numbers in row_map.numbers]).sum(0)
    return ~(native_norms(rest_OF) <= _EXACT * torch.finfo(h_OF.dtype).eps * terms_O)


_ROUNDS, _MARGIN = 6, 2.0  # rounds of the power method, and the factor by which its result is enlarged
_STEPS, _GROWTH = 32, 1.25  # the norm of J is measured again after so many steps, or if J grew by this factor
_SHARES = random.Random()  # independent of every stream that a user seeds


@dataclass(eq=False)
class Jacobian:
    """The Jacobian J of a layer's weight with respect to a parameter from which it is computed, for every example."""

    weight: Tensor  # with its graph
    parameter: Tensor  # a leaf of that graph
    _norm: "float | Callable[[Jacobian], float]"  # an upper bound on the spectral norm of J, if there are no `rows`
    _rows: "Callable[[Jacobian], RowMap | None] | None" = None  # returns J in closed form, or None if it has none

    @cached_property
    def rows(self) -> RowMap | None:
        return None if self._rows is None else self._rows(self)

    def pull(self, grad: Tensor, *, batched: bool = False) -> Tensor:
        """Return the vector-Jacobian product J^T grad, shaped like the parameter; with `batched`, one per row."""
        grad = grad.to(self.weight.dtype)
        if self.rows is not None:
            return self.rows.pull(grad) if batched else self.rows.pull(grad[None])[0]
        return self.product(grad, batched=batched)

    def product(self, grad: Tensor, *, batched: bool = False) -> Tensor:
        if batched and self._has_batched_rules:
            return vmap(self.product)(grad)
        if batched:
            return torch.autograd.grad(self.weight, self.parameter, grad, retain_graph=True, is_grads_batched=True)[0]
        return cast(Tensor, gradients_at([self.parameter], [self.weight], [grad], keep_graph=True)[0])

    @cached_property
    def _has_batched_rules(self) -> bool:
        return has_batched_rules(self.weight)

    @cached_property
    def norm(self) -> float | Tensor:
        if self.rows is not None:
            return self.rows.spectral_norm
        return self._norm(self) if callable(self._norm) else self._norm

    def stretch(self, u: Tensor) -> float:
        """Return |J^T u| for a vector u of length 1."""
        return float(float64_norms(self.pull(u).flatten()))

    def measured_norm(self, start: Tensor) -> float:
        """Estimate twice the spectral norm of J by the power method; infinite if torch cannot compute J u."""
        # With c the share of the start along the largest direction, the largest |J^T u| / |u| is at least
        # c^(1/(2 rounds - 1)) of the norm: 0.53 in a million dimensions. Weights are public: no data can hide from it.
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

    A step may change J at once, as where a gate opens: if |J^T u| has grown for a fixed u, the norm is measured again.
    The norm decides how each example is summed, so all passes of a step have the same one: their number is private.
    """

    def __init__(self) -> None:
        self._found: dict[object, _Measured] = {}
        self._maps: dict[object, tuple[Tensor, RowMap | None]] = {}  # of this step, with the weights that they fit
        self._verified: dict[object, tuple[int, bool]] = {}  # the period, and whether there was a map
        self._step: int | None = None

    def begin_step(self) -> None:
        """Count a step of the training. Without steps, every pass compares |J^T u|."""
        self._step = 0 if self._step is None else self._step + 1
        for key, (_, found) in self._maps.items():
            if found is not None and found.is_wrong:
                self._verified[key] = self._verified[key][0], False
        self._maps.clear()

    def of(self, key: object, jacobian: Jacobian) -> float:
        step, known = self._step, self._found.get(key)
        if known is not None and known.start.shape != jacobian.weight.shape:
            known = None
        if known is not None and step is not None and known.step == step:
            return known.norm
        if known is None:  # a unit vector, drawn uniformly from the sphere with a fixed seed
            fixed = torch.Generator().manual_seed(0)
            start = torch.randn(jacobian.weight.shape, generator=fixed, dtype=torch.float64)
            start = (start / native_norms(start.flatten())).to(jacobian.weight.detach())
        else:
            start = known.start.to(jacobian.weight)
        stretch, period = jacobian.stretch(start), None if step is None else step // _STEPS
        if known is None or known.period != period or not stretch <= _GROWTH * known.stretch:
            known = _Measured(jacobian.measured_norm(start), start, stretch, period, step)
        self._found[key] = known._replace(step=step)
        return known.norm

    def rows(self, key: object, jacobian: Jacobian) -> RowMap | None:
        """Return the closed form of the key's Jacobian, or None; found in each step, and verified now and then."""
        weight, known = jacobian.weight.detach(), self._maps.get(key)
        if known is not None and torch.equal(known[0], weight):
            return known[1]
        period = None if self._step is None else self._step // _STEPS
        last, exists = self._verified.get(key, (None, False))
        recent = period is not None and last == period
        if recent and not exists:  # the next attempt is many steps later
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


class Pulled(Factor):
    """The gradients of a parameter from which a layer computes its weight: g_i = J^T h_i.

    With `apart`, J^T is multiplied with each example's gradient instead of with their sum: for backward passes that are
    not additive, for half precision, where all examples would share the rounding errors of a large sum, and for small
    gradients on other devices than the CPU, where this takes fewer kernels.
    """

    usual_terms: ClassVar[float] = 32.0  # `term_bound` is several times too large, because the norm of J is

    def __init__(self, inner: Factor, jacobian: Jacobian, *, apart: bool, sums: SharedSums | None = None) -> None:
        super().__init__(inner.examples, jacobian.parameter.shape)
        self.inner = inner
        self.jacobian = jacobian
        self.apart = apart
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
        if not self.apart and self.jacobian.rows is not None and self.jacobian.rows.is_refuted:
            self.jacobian, self._combined = replace(self.jacobian, _rows=None), None
        combined = self._combined
        return super().norms(inverse_scales) if combined is None else combined.norms(inverse_scales)

    @cached_property
    def _combined(self) -> Projected | None:
        """The gradients in closed form, if J has one and each example's product is not computed by itself."""
        rows = None if self.apart or self.examples == 0 else self.jacobian.rows
        return None if rows is None or rows.is_per_row else Projected(self.inner, rows, self.sums.of(rows))

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

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float | Tensor]:
        """Return J^T times the sum, and an estimate of the rounding errors of this product."""
        if self.apart or self.examples == 0:
            return self.weighted_sum(weight_B), 0.0
        if self._combined is not None:
            return self._combined.sum_in_parts(weight_B), 0.0
        summed = self.inner.sum_in_parts(weight_B)
        # The product with the sum times a random number differs by rounding errors. These may be far larger than |J|
        # suggests: J may be a small difference of large terms, as where weight_norm projects most of a gradient away.
        # If the sum is so small that products of terms underflow, one that is near 1 shows it.
        largest = cast(Tensor, torch.linalg.vector_norm(summed, math.inf)).clamp(min=_TINY)
        pulled, share = self.jacobian.pull(summed), (0.5 + 0.5 * _SHARES.random()) / largest
        moved = self.jacobian.pull(share * summed) / share - pulled
        rounding = norms_of(at_least_float32(moved)[None], inverse_scales)[0]
        return pulled, torch.where(self._outgrows(summed, pulled), math.inf, rounding)

    @property
    def worth_keeping(self) -> bool:
        return self.inner.worth_keeping

    @property
    def writes(self) -> int:
        """The size of the weight whose gradient is written out for each example; 0 if it is small, or none is."""
        size = self.jacobian.weight.numel()
        return size if size > _FEW and self.jacobian.rows is None else 0

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
        if self._combined is not None:
            return self._combined.term_bound(inverse_scales)
        return largest_scale(inverse_scales) * self.jacobian.norm * term_bound_of(self.inner, None)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def _outgrows(self, summed: Tensor, pulled: Tensor) -> Tensor:
        """Return whether J^T times the sum is longer than the norm of J allows: then this norm is out of date."""
        return ~(norms_of(pulled[None]) <= 1.01 * self.jacobian.norm * norms_of(summed[None]))[0]

    def _per_block(self, floats: int) -> int:  # products with J^T hold copies
        weight = self.jacobian.weight
        return examples_per_block(floats if is_on_processor(weight) else _COPIES * floats, weight)

    def _like(self, inner: Factor) -> "Pulled":
        return Pulled(inner, self.jacobian, apart=self.apart)


class PulledDense(Dense):
    """Gradients of such a parameter, multiplied with J^T one by one and written out in full."""
