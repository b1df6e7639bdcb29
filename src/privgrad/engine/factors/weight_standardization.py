"""Weight standardization, and per-example gradients through it in closed form.

The general way is `parametrized.Pulled`, which must write each gradient out for its norm. Here norms, weighted sums and
moved weights follow from means and inner products of rows. docs/mathematics.md (3.1) to (3.12) derive the formulas, and
the docstrings below cite them by number.

Shape suffixes: B examples, T positions of an example, O outputs, F fan-in, P a parameter's shape.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.engine.factors.conv import Convolution
from privgrad.engine.factors.displacement import Displacement
from privgrad.engine.factors.outer import Combined, Outer, Rows, by_rows
from privgrad.engine.factors.parametrized import Jacobian, Projected, RowMap, RowSums, rows_of
from privgrad.gradient.factor import Dense, Factor, LinearMapFactor, Sum, at_least_float32

_LEAST = 1e-4  # of the factors k by which products are divided: smaller ones could have lost digits to underflow


class WeightStandardization(nn.Module):
    """A parametrization that gives each output channel mean 0 and variance 1 / fan-in, times a gain that starts at 1.

    Reference:
        De et al. 2022 (arXiv 2204.13650). Deviation: (W - mean) / sqrt(fan-in var(W) + 1e-4). The paper takes the
        larger of the two terms under the root instead of their sum.
    """

    def __init__(self, channels: int | None = None) -> None:
        super().__init__()
        self.gain = None if channels is None else nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, weight: Tensor) -> Tensor:
        # layer_norm is one operator with one derivative: private training may need them for each example.
        row = weight.shape[1:]
        weight = F.layer_norm(weight, row, eps=_added(row.numel())) / row.numel() ** 0.5
        return weight if self.gain is None else self.gain * weight


def _added(fan_in: int) -> float:
    return 1e-4 / fan_in


class StandardizedWeight:
    """A convolution's weight that WeightStandardization computes, and its derivatives in closed form.

    Computes: rows w_o = k_o y_o with y_o = r_o (v_o - mean), k_o = gain_o / sqrt(F), r_o the inverse root of the row's
    variance plus the added constant, and <.> the mean over a row. A gradient h_o with respect to w_o gives
        g_o = r_o k_o (h_o - <h_o> - y_o <y_o h_o>)
    for v_o, and sqrt(F) <y_o h_o> for the gain: (3.1) and (3.4). So g is `Combined` of h, y and ones.
    """

    def __init__(self, own: dict[str, Tensor]) -> None:
        self.own = own  # parameters by name
        self._v, self._gain = at_least_float32(self.own["original"].detach()), self.own.get("0.gain")
        self.fan_in = self._v[0].numel()

    @property
    def trained(self) -> list[Tensor]:
        return [p for p in self.own.values() if p.requires_grad]

    @cached_property
    def _rows_and_inverse(self) -> tuple[Tensor, Tensor]:
        rows_OF, _, inverse_O1 = torch.native_layer_norm(
            self._v.flatten(1), (self.fan_in,), None, None, _added(self.fan_in)
        )
        return rows_OF, inverse_O1.mT

    @property
    def rows(self) -> Tensor:
        return self._rows_and_inverse[0].view(self._v.shape)

    @property
    def inverse(self) -> Tensor:
        return self._rows_and_inverse[1]

    @cached_property
    def k(self) -> Tensor:
        gain = torch.ones_like(self.inverse) if self._gain is None else at_least_float32(self._gain.detach())
        return gain.view(1, -1) / self.fan_in**0.5

    @cached_property
    def scale(self) -> Tensor:
        """The factor r k of (3.4)."""
        return self.inverse / self.fan_in**0.5 if self._gain is None else self.inverse * self.k

    # (3.2): <y>, which is 0 up to rounding; and 1 - <y y>, which is the added constant times r^2 up to rounding.
    @cached_property
    def level(self) -> Tensor:
        return self._rows_and_inverse[0].mean(1)[None]

    @cached_property
    def lost(self) -> Tensor:
        return 1 - self._rows_and_inverse[0].square().mean(1)[None]

    @classmethod
    def of(cls, parametrization: nn.Module) -> "StandardizedWeight | None":
        """Return the weight of this parametrization, or None unless it is WeightStandardization alone, unchanged."""
        held: dict[str, Any] = vars(parametrization)
        steps: list[nn.Module] = [*held["_modules"].values()]
        if [type(step) for step in steps] != [WeightStandardization]:
            return None
        step: dict[str, Any] = vars(steps[0])
        own: dict[str, Tensor] = held["_parameters"] | {
            f"0.{name}": p for name, p in step["_parameters"].items() if p is not None
        }
        if not own.keys() <= {"original", "0.gain"}:
            return None
        changed = "forward" in step or bool(step["_forward_hooks"]) or bool(step["_forward_pre_hooks"])
        fits = "0.gain" not in own or own["original"].dim() == own["0.gain"].dim()
        return cls(own) if fits and not changed else None

    @cached_property
    def row_map(self) -> RowMap:
        """The Jacobian with respect to v in closed form."""
        scale_O = self.scale[0]
        return RowMap(self._rows_and_inverse[0], (scale_O, -scale_O, scale_O / -self.fan_in), self._v.shape)

    def rows_of(self, jacobian: Jacobian) -> RowMap:
        """Return the weight's Jacobian with respect to v or the gain in closed form, for `parametrized.Pulled`."""
        if jacobian.parameter is self.own["original"]:
            return self.row_map
        y_OF = self._rows_and_inverse[0]
        return RowMap(y_OF, (torch.full_like(y_OF[:, 0], self.fan_in**-0.5),), jacobian.parameter.shape)

    def takes(self, grads: Factor) -> bool:
        """Return whether `pull` is cheaper for these gradients than the general way, `parametrized.Pulled`."""
        return isinstance(grads, Convolution) and grads.by_inner_products

    def moved(self, displacements: Mapping[str, Displacement]) -> "MovedStandardizedWeight | None":
        """Return each example's weight at moved parameters, for displacements along gradients of few positions."""
        few = self.knows(displacements) and isinstance(self.along(displacements)[0].inner, Outer)
        return MovedStandardizedWeight(self, displacements) if few else None

    def knows(self, displacements: Mapping[str, Displacement]) -> bool:
        """Return whether the displacements are along one gradient that `pull` returned."""
        return "original" in displacements and isinstance(displacements["original"].factor, Projected)

    def pull(self, grads: Factor, products_BO: Tensor | None = None) -> dict[Tensor, Factor]:
        """Return the gradients of the parameters from h; `products_BO`: w_o . h_o of each row, if they are known."""
        h, along_BO = grads if self.takes(grads) else rows_of(grads), None
        if products_BO is not None and bool((self.k.abs() > _LEAST).all()):  # y = w / k
            along_BO = products_BO / self.k
        sums = RowSums.of(h, self.rows.flatten(1), along_BO)
        return self.named(Projected(h, self.row_map, sums), sums.along / self.fan_in**0.5)

    def tangent(self, displacements: Mapping[str, Displacement]) -> Displacement:
        """Return the displacement of the weight to first order, k D u + m y: (3.9). v moves by u, and k by m."""
        # With (3.3), D u = r (u - y <y u>) is the derivative of y along a u whose rows have mean 0.
        g, share_B1, gain_BO = self.along(displacements)
        scale_BO = share_B1 * self.inverse * self.k
        along_BO = scale_BO * (g.along_BO - self.slope(g)) + gain_BO
        moved = Combined(by_rows(g.inner, scale_BO), self.rows, along_BO, scale_BO * g.level_BO)
        return Displacement(moved, along_BO.new_ones(moved.examples))

    def curved(self, total: Factor, more: Factor | None, moves: Mapping[str, Displacement]) -> dict[Tensor, Factor]:
        """Return `pull` of the gradients, plus the curvature of the weight itself, for BAM's exact mode.

        Computes the derivative of <h, tangent> with h held constant, where `pull` made g from h. With u = s g the
        displacement of v, m that of k, and G = k h, that is (3.11) and (3.12):
            - s r (r <y G> + <y g>) g + s r^2 (<y G> <y g> - <g g> / r) y + m D h along v,
            <h, D u> / sqrt(F) along the gain.
        `more` is the term that curvature adds to the gradients through the layer's input.
        """
        g, s_B1, m_BO = self.along(moves)
        r_1O, fan_in, slope_BO = self.inverse, self.fan_in, self.slope(g)
        h, scale_BO = g.h, self.scale.expand_as(slope_BO)
        mean_BO, along_BO = g.sums.mean, g.sums.along / fan_in
        square_BO = g.sums.square - fan_in * _taken(mean_BO, along_BO, self.level, self.lost)
        of_h_BO = m_BO * r_1O - s_B1 * r_1O * (r_1O * self.k * along_BO + slope_BO) * scale_BO
        of_y_BO = r_1O * self.k * along_BO * slope_BO - (scale_BO.square() * square_BO) / fan_in
        of_gain_BO = square_BO + fan_in * along_BO.square() * self.lost
        of_gain_BO = s_B1 * r_1O * (scale_BO * of_gain_BO - slope_BO * fan_in * along_BO) / fan_in**0.5

        first, rest = rows_of(total), None if more is None else rows_of(more)
        mean_tBO, along_tBO = self._means(first)
        if rest is not None:
            mean_tBO, along_tBO = (x + y for x, y in zip((mean_tBO, along_tBO), self._means(rest), strict=True))
        inner = own = _sum(first, scale_BO, h, of_h_BO)
        inner_square_BO = _products(own, own)
        if rest is not None:
            rest = by_rows(rest, scale_BO)
            inner_square_BO += 2 * _products(own, rest) + _products(rest, rest)
            inner = _both(own, rest)
        # <inner> and <y inner>: the projection removes both; then of_y is added along y.
        inner_mean_BO = scale_BO * mean_tBO + of_h_BO * mean_BO
        inner_along_BO = scale_BO * along_tBO + of_h_BO * along_BO
        y_BO = s_B1 * r_1O * of_y_BO - inner_along_BO
        of_rows_BO = y_BO * (1 - self.lost) - 2 * inner_mean_BO * self.level
        square_BO = y_BO * (2 * inner_along_BO + of_rows_BO) - inner_mean_BO.square()
        square_BO = inner_square_BO + fan_in * square_BO
        found = Combined(inner, self.rows, y_BO, -inner_mean_BO, square_BO)
        return self.named(found, fan_in**0.5 * along_tBO + of_gain_BO)

    def named(self, original: Factor, gain_BO: Tensor) -> dict[Tensor, Factor]:
        found = {n: original if n == "original" else Dense(gain_BO.view(-1, *p.shape)) for n, p in self.own.items()}
        return {self.own[name]: factor for name, factor in found.items() if self.own[name].requires_grad}

    def _means(self, h: Rows) -> tuple[Tensor, Tensor]:
        return _sums(h) / self.fan_in, _products(h, self.rows.flatten(1)) / self.fan_in

    def slope(self, g: Projected) -> Tensor:
        """Return <y g> of (3.8), the mean over each row of y times g, shape (B, O)."""
        return self.scale * (g.sums.along / self.fan_in * self.lost - g.sums.mean * self.level)

    def along(self, displacements: Mapping[str, Displacement]) -> tuple[Projected, Tensor, Tensor]:
        """Return (g, s, m): v moves by s_i g_i, and k by m."""
        v, gain = displacements["original"], displacements.get("0.gain")
        m_BO = v.share.new_zeros(len(v.share), 1) if gain is None else gain.dense().flatten(1) / self.fan_in**0.5
        return cast(Projected, v.factor), v.share[:, None], m_BO


class MovedStandardizedWeight:
    """A standardized weight at each example's own parameters, moved along gradients g that `pull` returned.

    Computes: v + s g has the standardized rows y' = (r' / r) y + r' s g, see (3.7): again a combination of h, y and
    ones. Their r' follows from the variances of v and g and from <v g>.
    """

    def __init__(self, common: StandardizedWeight, displacements: Mapping[str, Displacement]) -> None:
        self._common = common
        g, s_B1, m_BO = common.along(displacements)
        r_1O, added = common.inverse, _added(common.fan_in)
        variance_BO = r_1O**-2 + s_B1 * (2 * common.slope(g) / r_1O + s_B1 * g.square_BO / common.fan_in)
        self._inverse_BO = variance_BO.to(m_BO.dtype).clamp(min=added).rsqrt()
        self._k_BO, share_BO, of_y_BO = common.k + m_BO, s_B1 * self._inverse_BO, self._inverse_BO / r_1O
        square_BO = g.square_BO.to(m_BO.dtype) / common.fan_in
        along_BO = of_y_BO + share_BO * g.along_BO
        self._level_BO = common.level * along_BO  # <y'>: apart from its part along y, g has mean 0
        of_g_BO = 2 * of_y_BO * common.slope(g) + share_BO * square_BO
        moved_BO = of_y_BO.square() * (1 - common.lost) + share_BO * of_g_BO
        self._lost_BO = 1 - moved_BO
        self._rows = Combined(by_rows(g.inner, share_BO), common.rows, along_BO, share_BO * g.level_BO)

    def displacement(self) -> Displacement:
        rows, k_BO = self._rows, self._k_BO
        along_BO = k_BO * rows.along_BO - self._common.k
        moved = Combined(by_rows(cast(Rows, rows.inner), k_BO), rows.rows, along_BO, k_BO * rows.level_BO)
        return Displacement(moved, along_BO.new_ones(moved.examples))

    def pull(self, grads: Factor) -> dict[Tensor, Factor]:
        rows, fan_in = self._rows, self._common.fan_in
        h = rows_of(grads.merge(grads.examples // rows.examples) if grads.examples != rows.examples else grads)
        mean_BO, along_BO = _sums(h) / fan_in, _products(h, rows.of_patches()) / fan_in
        scale_BO = self._inverse_BO * self._k_BO
        square_BO = _products(h, h) - fan_in * _taken(mean_BO, along_BO, self._level_BO, self._lost_BO)
        square_BO = scale_BO.double().square() * square_BO
        y_BO = -scale_BO * along_BO
        inner = _both(by_rows(h, scale_BO), by_rows(cast(Rows, rows.inner), y_BO))
        level_BO = y_BO * rows.level_BO - scale_BO * mean_BO
        pulled = Combined(inner, rows.rows, y_BO * rows.along_BO, level_BO, square_BO)
        return self._common.named(pulled, fan_in**0.5 * along_BO)


def _taken(mean_BO: Tensor, along_BO: Tensor, level_BO: Tensor, lost_BO: Tensor) -> Tensor:
    """Return the mean square of h less that of h - <h> - y <y h>, from <h>, <y h>, <y> and 1 - <y y>: (3.5)."""
    return mean_BO.square() + along_BO.square() * (1 + lost_BO) - 2 * mean_BO * along_BO * level_BO


def _both(one: Rows, other: Rows) -> Factor:
    """Return the sum of both; the inputs of Outer factors are not copied."""
    return one + other if isinstance(one, Dense) else Sum([one, other])


def _sum(one: Rows, one_BO: Tensor, other: Rows, other_BO: Tensor) -> Rows:
    """Return the sum of both, each row times its own number; Outer factors must have the same inputs."""
    if isinstance(one, Outer) and isinstance(other, Outer):
        return Outer(one.a_BTI, torch.addcmul(one.b_BTO * one_BO[:, None], other.b_BTO, other_BO[:, None]))
    return Dense(torch.addcmul(one.dense() * one_BO[:, :, None], other.dense(), other_BO[:, :, None]))


def _products(h: Rows, other: LinearMapFactor | Tensor) -> Tensor:
    """Return inner products of the rows of h with those of a factor or of a common matrix, shape (B, O)."""
    if isinstance(h, Outer):
        found_BTO = other.apply(h.a_BTI) if isinstance(other, LinearMapFactor) else h.a_BTI @ other.mT
        return (found_BTO * h.b_BTO).sum(1)
    return cast(Tensor, torch.linalg.vecdot(h.grads_BP, other.dense() if isinstance(other, LinearMapFactor) else other))


def _sums(h: Rows) -> Tensor:
    return (h.a_BTI.sum(2, keepdim=True).mT @ h.b_BTO)[:, 0] if isinstance(h, Outer) else h.grads_BP.sum(2)
