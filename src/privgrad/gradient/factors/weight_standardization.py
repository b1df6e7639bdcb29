"""Weight standardization, and each example's gradient through it without writing one out.

Shape suffixes: B examples, T positions of an example, O outputs, F fan-in, P a parameter's shape.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.gradient.factors.base import Dense, Examples, Factor, Sum, canceled, largest_scale, term_bound_of
from privgrad.gradient.factors.conv import Convolution
from privgrad.gradient.factors.displacement import Displacement
from privgrad.gradient.factors.norms import at_least_float32, masked, native_norms
from privgrad.gradient.factors.outer import Outer


class WeightStandardization(nn.Module):
    """A parametrization: per output channel, mean 0 and variance 1 / fan-in, times a gain.

    Args:
        channels: how many gains there are to learn, 1 at first; None for none.
    Reference:
        De et al. 2022 (arXiv 2204.13650). Deviation: (W - mean) / sqrt(fan-in var(W) + 1e-4); they take the larger of
        the two under the root.
    """

    def __init__(self, channels: int | None = None) -> None:
        super().__init__()
        self.gain = None if channels is None else nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, weight: Tensor) -> Tensor:
        # One operator and its derivative: private training may need them for each example.
        fan_in = weight[0].numel()
        unit = F.layer_norm(weight.flatten(1), (fan_in,), eps=_added(fan_in))
        weight = (unit / fan_in**0.5).view_as(weight)
        return weight if self.gain is None else self.gain * weight


def _added(fan_in: int) -> float:
    """To the variance of a row."""
    return 1e-4 / fan_in


Rows = Outer | Dense  # of a weight, shape (O, F): of few positions, or written out


class Combined(Factor):
    """Rows of each example's own, of a matrix that all share, and of ones: g_io = h_io + along_io y_o + level_io.

    Args:
        inner: h_i, shape (O, F); rows, or a sum of such.
        rows: y, shape P, which is (O, F) with F flattened.
        along_BO, level_BO: what they are multiplied with.
        square_BO: |g_io|^2 up to rounding of |h_io|^2, where it is known.
    """

    def __init__(
        self, inner: Factor, rows: Tensor, along_BO: Tensor, level_BO: Tensor, square_BO: Tensor | None = None
    ) -> None:
        super().__init__(inner.examples, rows.shape)
        self.inner, self.rows, self.along_BO, self.level_BO = inner, rows, along_BO, level_BO
        self.square_BO = square_BO

    def __getitem__(self, examples: Examples) -> "Combined":
        numbers = (None if x is None else x[examples] for x in (self.along_BO, self.level_BO, self.square_BO))
        return Combined(self.inner[examples], self.rows, *cast("Any", numbers))

    def dense(self) -> Tensor:
        out_BOF = torch.addcmul(self.level_BO[:, :, None], self.along_BO[:, :, None], self.rows.flatten(1))
        return out_BOF.add_(self.inner.dense()).view(self.examples, *self.shape)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        along_O, level_O = (weight_B.to(x.dtype) @ x for x in (self.along_BO, self.level_BO))
        shared_OF = torch.addcmul(level_O[:, None], along_O[:, None], self.rows.flatten(1))
        return (self.inner.weighted_sum(weight_B) + shared_OF).view(self.shape)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        along_O, level_O = (weight_B.double() @ x.double() for x in (self.along_BO, self.level_BO))
        shared_OF = torch.addcmul(level_O[:, None], along_O[:, None], self.rows.double().flatten(1))
        return (self.inner.exact_sum(weight_B) + shared_OF).view(self.shape)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def mask(self, kept_B: Tensor) -> "Combined":
        numbers = (None if x is None else masked(x, kept_B) for x in (self.along_BO, self.level_BO, self.square_BO))
        return Combined(self.inner.mask(kept_B), self.rows, *cast("Any", numbers))

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is not None or self.square_BO is None:
            return super().norms(inverse_scales)
        square_B = self.square_BO.sum(1, dtype=torch.float64)
        norm_B = square_B.clamp(min=0).sqrt()
        again = canceled(square_B, self.term_bound()) | ~torch.isfinite(square_B)
        for part in self.inner.parts if isinstance(self.inner, Sum) else [self.inner]:
            again |= part.underflowing() if isinstance(part, Outer) else False
        for index in cast("list[int]", again.nonzero()[:, 0].tolist()):
            norm_B[index] = Factor.norms(self[index : index + 1])[0]
        return norm_B

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor:
        along_B = native_norms(self.along_BO * native_norms(self.rows.flatten(1)))
        level_B = native_norms(self.level_BO) * self.rows[0].numel() ** 0.5
        return largest_scale(inverse_scales) * (term_bound_of(self.inner, None) + along_B.double() + level_B.double())

    def of_patches(self) -> "Combined":
        """As a linear map of patches, shape (O, F)."""
        return Combined(self.inner, self.rows.flatten(1), self.along_BO, self.level_BO)

    def apply(self, x_BTI: Tensor) -> Tensor:
        shared_BTO = (x_BTI @ self.rows.mT) * self.along_BO[:, None]
        shared_BTO += x_BTI.sum(2, keepdim=True) * self.level_BO[:, None]
        return shared_BTO + self.inner.apply(x_BTI)


class Projected(Combined):
    """A gradient that came back through standardized rows: g_io = scale_io q_io, q_io = h_io - mean_io - along_io y_o.

    Args:
        h: with respect to the weight.
        rows: y, shape P.
        scale_BO: as above.
        mean_BO: of h_io.
        along_BO: mean of y_o h_io.
        square_BO: |q_io|^2.
    """

    def __init__(
        self, h: Rows, rows: Tensor, scale_BO: Tensor, mean_BO: Tensor, along_BO: Tensor, square_BO: Tensor
    ) -> None:
        inner, square = _by_rows(h, scale_BO), scale_BO.double().square() * square_BO
        super().__init__(inner, rows, -scale_BO * along_BO, -scale_BO * mean_BO, square)
        self.parts = h, (scale_BO, mean_BO, along_BO, square_BO)

    def __getitem__(self, examples: Examples) -> "Projected":
        h, numbers = self.parts
        return Projected(h[examples], self.rows, *(x[examples] for x in numbers))

    def mask(self, kept_B: Tensor) -> "Projected":
        h, numbers = self.parts
        return Projected(h.mask(kept_B), self.rows, *(masked(x, kept_B) for x in numbers))


class StandardizedWeight:
    """A convolution's weight that WeightStandardization computes, at the parameters.

    Computes: rows w_o = k_o y_o with y_o = r_o (v_o - mean), r_o the inverse root of the row's variance and what is
    added to it, k_o = gain_o / sqrt(F). With <.> for means over a row, a gradient h_o with respect to w_o is, with
    respect to v_o,
        g_o = r_o k_o (h_o - <h_o> - y_o <y_o h_o>),
    and sqrt(F) <y_o h_o> with respect to the gain. All that follows from g is made of h, y and ones.

    Args:
        parametrization: torch's, of the weight.
    """

    def __init__(self, parametrization: nn.Module) -> None:
        self.own = dict(parametrization.named_parameters())
        v, gain = at_least_float32(self.own["original"].detach()), self.own.get("0.gain")
        self.fan_in = v[0].numel()
        rows_OF, _, inverse_O1 = torch.native_layer_norm(v.flatten(1), (self.fan_in,), None, None, _added(self.fan_in))
        self.rows, self.inverse_1O = rows_OF.view(v.shape), inverse_O1.mT
        k_O = torch.ones_like(inverse_O1) if gain is None else at_least_float32(gain.detach())
        self.k_1O = k_O.view(1, -1) / self.fan_in**0.5
        # <y>, and 1 - <y y>: up to rounding 0, and what is added times r^2.
        self.level_1O, self.lost_1O = rows_OF.mean(1)[None], 1 - rows_OF.square().mean(1)[None]

    @classmethod
    def of(cls, parametrization: nn.Module) -> "StandardizedWeight | None":
        """None where another parametrization computes the weight."""
        steps, own = list(cast(nn.ModuleList, parametrization)), dict(parametrization.named_parameters())
        if [type(step) for step in steps] != [WeightStandardization] or not own.keys() <= {"original", "0.gain"}:
            return None
        held = vars(steps[0])
        changed = "forward" in held or bool(held["_forward_hooks"]) or bool(held["_forward_pre_hooks"])
        fits = "0.gain" not in own or own["original"].dim() == own["0.gain"].dim()
        return cls(parametrization) if fits and not changed else None

    def stretch(self, parameter: Tensor) -> float:
        """Bound the spectral norm of the weight's Jacobian with respect to the parameter.

        Computes: for v, the largest of r_o k_o, as what stands behind it projects; for the gain, the root of the mean
        of y_o^2, which is at most one.
        """
        return float((self.inverse_1O * self.k_1O).abs().max()) if parameter is self.own["original"] else 1.0

    def takes(self, grads: Factor) -> bool:
        """Whether this is the shorter way for such gradients."""
        return isinstance(grads, Convolution) and grads.by_inner_products

    def moved(self, moves: Mapping[str, Displacement]) -> "MovedStandardizedWeight | None":
        """Where its parameters are moved, by name; None if not along gradients that were pulled back here."""
        few = self.knows(moves) and isinstance(self.along(moves)[0].inner, Outer)
        return MovedStandardizedWeight(self, moves) if few else None

    def knows(self, moves: Mapping[str, Displacement]) -> bool:
        """Whether these are along one gradient that was pulled back here."""
        return "original" in moves and isinstance(moves["original"].factor, Projected)

    def pull(self, grads: Factor) -> dict[Tensor, Factor]:
        """By parameter, gradients with respect to it from those with respect to the weight."""
        h = _rows_of(grads)
        mean_BO, along_BO = self._means(h)
        scale_BO = (self.inverse_1O * self.k_1O).expand_as(mean_BO)
        square_BO = _products(h, h) - self.fan_in * _taken(mean_BO, along_BO, self.level_1O, self.lost_1O)
        pulled = Projected(h, self.rows, scale_BO, mean_BO, along_BO, square_BO)
        return self.named(pulled, self.fan_in**0.5 * along_BO)

    def tangent(self, moves: Mapping[str, Displacement]) -> Displacement:
        """How far the weight moves with its parameters, to first order: k_o D u_o + (move of k_o) y_o.

        D u = r (u - y <y u>) is what y does along a u without mean.
        """
        g, share_B1, gain_BO = self.along(moves)
        scale_BO = share_B1 * self.inverse_1O * self.k_1O
        along_BO = scale_BO * (g.along_BO - self.slope(g)) + gain_BO
        moved = Combined(_by_rows(cast(Rows, g.inner), scale_BO), self.rows, along_BO, scale_BO * g.level_BO)
        return Displacement(moved, along_BO.new_ones(moved.examples))

    def bent(self, total: Factor, more: Factor | None, moves: Mapping[str, Displacement]) -> dict[Tensor, Factor]:
        """As `pull`, with the derivative of <h, tangent>, h being what g was pulled back from, as if h were constant.

        Computes: with u = s g the move of v, m that of k, and G = k h,
            - s r (r <y G> + <y g>) g + s r^2 (<y G> <y g> - <g g> / r) y + m D h along v,
            <h, D u> / sqrt(F) along the gain.

        Args:
            total: gradients with respect to the weight, with what curvature adds to them.
            more: what curvature adds by way of the layer's input.
            moves: of the parameters, by name, along g.
        """
        g, s_B1, m_BO = self.along(moves)
        h, (scale_BO, mean_BO, along_BO, square_BO) = g.parts
        r_1O, fan_in, slope_BO = self.inverse_1O, self.fan_in, self.slope(g)
        of_h_BO = m_BO * r_1O - s_B1 * r_1O * (r_1O * self.k_1O * along_BO + slope_BO) * scale_BO
        of_y_BO = r_1O * self.k_1O * along_BO * slope_BO - (scale_BO.square() * square_BO) / fan_in
        of_gain_BO = square_BO + fan_in * along_BO.square() * self.lost_1O
        of_gain_BO = s_B1 * r_1O * (scale_BO * of_gain_BO - slope_BO * fan_in * along_BO) / fan_in**0.5

        first, rest = _rows_of(total), None if more is None else _rows_of(more)
        mean_tBO, along_tBO = self._means(first)
        if rest is not None:
            mean_tBO, along_tBO = (x + y for x, y in zip((mean_tBO, along_tBO), self._means(rest), strict=True))
        inner = own = _sum(first, scale_BO, h, of_h_BO)
        inner_square_BO = _products(own, own)
        if rest is not None:
            rest = _by_rows(rest, scale_BO)
            inner_square_BO += 2 * _products(own, rest) + _products(rest, rest)
            inner = _both(own, rest)
        # The inner factor's means, of which the projections leave nothing but the part along y that is added.
        inner_mean_BO = scale_BO * mean_tBO + of_h_BO * mean_BO
        inner_along_BO = scale_BO * along_tBO + of_h_BO * along_BO
        y_BO = s_B1 * r_1O * of_y_BO - inner_along_BO
        of_rows_BO = y_BO * (1 - self.lost_1O) - 2 * inner_mean_BO * self.level_1O
        square_BO = y_BO * (2 * inner_along_BO + of_rows_BO) - inner_mean_BO.square()
        square_BO = inner_square_BO + fan_in * square_BO
        bent = Combined(inner, self.rows, y_BO, -inner_mean_BO, square_BO)
        return self.named(bent, fan_in**0.5 * along_tBO + of_gain_BO)

    def named(self, original: Factor, gain_BO: Tensor) -> dict[Tensor, Factor]:
        """By parameter, of those that are trained."""
        found = {
            name: original if name == "original" else Dense(gain_BO.view(-1, *p.shape)) for name, p in self.own.items()
        }
        return {self.own[name]: factor for name, factor in found.items() if self.own[name].requires_grad}

    def _means(self, h: Rows) -> tuple[Tensor, Tensor]:
        """(<h>, <y h>), shape (B, O)."""
        return _sums(h) / self.fan_in, _products(h, self.rows.flatten(1)) / self.fan_in

    def slope(self, g: Projected) -> Tensor:
        """<y g>."""
        scale_BO, mean_BO, along_BO, _ = g.parts[1]
        return scale_BO * (along_BO * self.lost_1O - mean_BO * self.level_1O)

    def along(self, moves: Mapping[str, Displacement]) -> tuple[Projected, Tensor, Tensor]:
        """(g, s, m): v moves by s_i g_i, k by m."""
        move, gain = moves["original"], moves.get("0.gain")
        m_BO = (
            gain.dense().flatten(1) / self.fan_in**0.5 if gain is not None else move.share.new_zeros(len(move.share), 1)
        )
        return cast(Projected, move.factor), move.share[:, None], m_BO


class MovedStandardizedWeight:
    """The same at each example's own parameters, moved along gradients g of few positions that were pulled back.

    Computes: v + s g has rows with y' = (r' / r) y + r' s g, of which the variance is known from those of v and g, and
    <v g>.
    """

    def __init__(self, common: StandardizedWeight, moves: Mapping[str, Displacement]) -> None:
        self._common = common
        g, s_B1, m_BO = common.along(moves)
        r_1O, added = common.inverse_1O, _added(common.fan_in)
        variance_BO = r_1O**-2 + s_B1 * (2 * common.slope(g) / r_1O + s_B1 * cast(Tensor, g.square_BO) / common.fan_in)
        self._inverse_BO = variance_BO.to(m_BO.dtype).clamp(min=added).rsqrt()
        self._k_BO, share_BO, of_y_BO = common.k_1O + m_BO, s_B1 * self._inverse_BO, self._inverse_BO / r_1O
        square_BO = cast(Tensor, g.square_BO).to(m_BO.dtype) / common.fan_in
        along_BO = of_y_BO + share_BO * g.along_BO
        self._level_BO = common.level_1O * along_BO  # of g, all but its part along y is level
        moved_BO = of_y_BO.square() * (1 - common.lost_1O) + share_BO * (
            2 * of_y_BO * common.slope(g) + share_BO * square_BO
        )
        self._lost_BO = 1 - moved_BO
        self._rows = Combined(_by_rows(cast(Rows, g.inner), share_BO), common.rows, along_BO, share_BO * g.level_BO)

    def move(self) -> Displacement:
        """How far each example's weight lies from the one at the parameters."""
        rows, k_BO = self._rows, self._k_BO
        along_BO = k_BO * rows.along_BO - self._common.k_1O
        moved = Combined(_by_rows(cast(Rows, rows.inner), k_BO), rows.rows, along_BO, k_BO * rows.level_BO)
        return Displacement(moved, along_BO.new_ones(moved.examples))

    def pull(self, grads: Factor) -> dict[Tensor, Factor]:
        """As that of the common weight."""
        rows, fan_in = self._rows, self._common.fan_in
        h = _rows_of(grads.merge(grads.examples // rows.examples) if grads.examples != rows.examples else grads)
        mean_BO, along_BO = _sums(h) / fan_in, _products(h, rows.of_patches()) / fan_in
        scale_BO = self._inverse_BO * self._k_BO
        square_BO = _products(h, h) - fan_in * _taken(mean_BO, along_BO, self._level_BO, self._lost_BO)
        square_BO = scale_BO.double().square() * square_BO
        y_BO = -scale_BO * along_BO
        inner = _both(_by_rows(h, scale_BO), _by_rows(cast(Rows, rows.inner), y_BO))
        level_BO = y_BO * rows.level_BO - scale_BO * mean_BO
        pulled = Combined(inner, rows.rows, y_BO * rows.along_BO, level_BO, square_BO)
        return self._common.named(pulled, fan_in**0.5 * along_BO)


def _taken(mean_BO: Tensor, along_BO: Tensor, level_BO: Tensor, lost_BO: Tensor) -> Tensor:
    """What h - <h> - y <y h> lacks of the mean square of h, by <h>, <y h>, <y> and 1 - <y y>."""
    return mean_BO.square() + along_BO.square() * (1 + lost_BO) - 2 * mean_BO * along_BO * level_BO


def _rows_of(grads: Factor) -> Rows:
    """Gradients of a convolution's weight, as rows."""
    few = isinstance(grads, Convolution) and grads.by_inner_products
    return cast(Rows, grads.of_patches() if few else Dense(grads.dense().flatten(2)))


def _by_rows(h: Rows, scale_BO: Tensor) -> Rows:
    """Every row of every example times its own number."""
    if isinstance(h, Outer):
        return Outer(h.a_BTI, h.b_BTO * scale_BO[:, None])
    return Dense(h.grads_BP * scale_BO[:, :, None])


def _both(one: Rows, other: Rows) -> Factor:
    """The sum; inputs of few positions stay where they are."""
    return one + other if isinstance(one, Dense) else Sum([one, other])


def _sum(one: Rows, one_BO: Tensor, other: Rows, other_BO: Tensor) -> Rows:
    """Both times their numbers; of the same inputs, if of few positions."""
    if isinstance(one, Outer) and isinstance(other, Outer):
        return Outer(one.a_BTI, torch.addcmul(one.b_BTO * one_BO[:, None], other.b_BTO, other_BO[:, None]))
    return Dense(torch.addcmul(one.dense() * one_BO[:, :, None], other.dense(), other_BO[:, :, None]))


def _products(h: Rows, other: Factor | Tensor) -> Tensor:
    """Inner products of rows with those of a factor, or of a matrix that all share: shape (B, O)."""
    if isinstance(h, Outer):
        found_BTO = other.apply(h.a_BTI) if isinstance(other, Factor) else h.a_BTI @ other.mT
        return (found_BTO * h.b_BTO).sum(1)
    return cast(Tensor, torch.linalg.vecdot(h.grads_BP, other.dense() if isinstance(other, Factor) else other))


def _sums(h: Rows) -> Tensor:
    """Of rows, shape (B, O)."""
    return (h.a_BTI.sum(2, keepdim=True).mT @ h.b_BTO)[:, 0] if isinstance(h, Outer) else h.grads_BP.sum(2)
