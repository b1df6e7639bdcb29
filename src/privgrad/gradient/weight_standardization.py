"""Weight standardisation, and each example's gradient through it without writing one out.

Shape suffixes: B examples, T places of an example, O outputs, F fan-in, P a parameter's shape.
"""

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.gradient.convolution import Convolution
from privgrad.gradient.factors import Dense, Factor, Outer, cancelled, largest_scale, terms_of
from privgrad.gradient.moves import Move
from privgrad.gradient.norms import kept, short_norms, wide


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


class Combined(Factor):
    """Rows of each example's own, of a matrix that all share, and of ones: g_io = h_io + along_io y_o + level_io.

    Args:
        inner: h_i, shape (O, F).
        rows: y, shape P, which is (O, F) with F flattened.
        along_BO, level_BO: what they are multiplied with.
    """

    def __init__(self, inner: Outer, rows: Tensor, along_BO: Tensor, level_BO: Tensor) -> None:
        super().__init__(inner.examples, rows.shape)
        self.inner, self.rows, self.along_BO, self.level_BO = inner, rows, along_BO, level_BO

    def __getitem__(self, examples: slice) -> "Combined":
        return Combined(self.inner[examples], self.rows, self.along_BO[examples], self.level_BO[examples])

    def dense(self) -> Tensor:
        out_BOF = torch.addcmul(self.level_BO[:, :, None], self.along_BO[:, :, None], self.rows.flatten(1))
        return out_BOF.add_(self.inner.dense()).view(self.examples, *self.shape)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        along_O, level_O = (weight_B.to(x.dtype) @ x for x in (self.along_BO, self.level_BO))
        shared_OF = torch.addcmul(level_O[:, None], along_O[:, None], self.rows.flatten(1))
        return (self.inner.weighted_sum(weight_B) + shared_OF).view(self.shape)

    def keep(self, kept_B: Tensor) -> "Combined":
        return Combined(self.inner.keep(kept_B), self.rows, kept(self.along_BO, kept_B), kept(self.level_BO, kept_B))

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor:
        along_B = short_norms(self.along_BO * short_norms(self.rows.flatten(1)))
        level_B = short_norms(self.level_BO) * self.rows[0].numel() ** 0.5
        return largest_scale(inverse_scales) * (terms_of(self.inner, None) + along_B.double() + level_B.double())

    def of_patches(self) -> "Combined":
        """As a linear map of patches, shape (O, F)."""
        return Combined(self.inner, self.rows.flatten(1), self.along_BO, self.level_BO)

    def apply(self, x_BTI: Tensor) -> Tensor:
        shared_BTO = (x_BTI @ self.rows.mT) * self.along_BO[:, None]
        shared_BTO += x_BTI.sum(2, keepdim=True) * self.level_BO[:, None]
        return shared_BTO + self.inner.apply(x_BTI)


class Projected(Combined):
    """A gradient that came back through standardized rows, which leave it nothing along ones and little along y.

    Args:
        combined: the gradient.
        square_BO: |g_io|^2, right up to rounding of |h_io|^2.
        product_BO: <g_io, y_o>; None where the rows were not y.
    """

    def __init__(self, combined: Combined, square_BO: Tensor, product_BO: Tensor | None) -> None:
        super().__init__(combined.inner, combined.rows, combined.along_BO, combined.level_BO)
        self.square_BO, self.product_BO = square_BO, product_BO

    def __getitem__(self, examples: slice) -> "Projected":
        product_BO = None if self.product_BO is None else self.product_BO[examples]
        return Projected(super().__getitem__(examples), self.square_BO[examples], product_BO)

    def keep(self, kept_B: Tensor) -> "Projected":
        product_BO = None if self.product_BO is None else kept(self.product_BO, kept_B)
        return Projected(super().keep(kept_B), kept(self.square_BO, kept_B), product_BO)

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is not None:
            return super().norms(inverse_scales)
        square_B = self.square_BO.sum(1, dtype=torch.float64)
        norm_B = square_B.clamp(min=0).sqrt()
        again = cancelled(square_B, terms_of(self.inner, None)) | ~torch.isfinite(square_B)
        for index in cast("list[int]", again.nonzero()[:, 0].tolist()):
            norm_B[index] = Factor.norms(self[index : index + 1])[0]
        return norm_B


class StandardizedWeight:
    """A convolution's weight that WeightStandardization computes, at the parameters or at each example's own.

    Computes: rows w_o = k_o y_o with y_o = r_o (v_o - mean), r_o the inverse root of the row's variance and what is
    added to it, k_o = gain_o / sqrt(F). A gradient h_o with respect to w_o is, with respect to v_o,
        g_o = r_o k_o (h_o - mean(h_o) - y_o mean(y_o h_o)),
    and sqrt(F) mean(y_o h_o) with respect to the gain. Parameters moved by a share of such gradients have rows that are
    made of y_o, ones and what g_o is made of: nothing is written out.

    Args:
        parametrization: torch's, of the weight; see `of`.
        moves: of its parameters, by name; no parameter moves where there is none for "original".
    """

    def __init__(self, parametrization: nn.Module, moves: Mapping[str, Move]) -> None:
        self._own = dict(parametrization.named_parameters())
        v = wide(self._own["original"].detach())
        self._fan_in, self._added = v[0].numel(), _added(v[0].numel())
        rows_OF, _, inverse_O1 = torch.native_layer_norm(v.flatten(1), (self._fan_in,), None, None, self._added)
        self._rows, inverse_O = rows_OF.view(v.shape), inverse_O1[:, 0]
        gain = self._own.get("0.gain")
        self._common_O = torch.ones_like(inverse_O) if gain is None else wide(gain.detach()).flatten()
        self._common_O = self._common_O / self._fan_in**0.5
        self._inverse_BO, self._scale_BO, self._point = (
            inverse_O[None],
            self._common_O[None],
            cast("Combined | None", None),
        )
        if "original" in moves:
            g, share_B1 = cast(Projected, moves["original"].factor), moves["original"].share[:, None]
            product_BO = cast(Tensor, g.product_BO) / inverse_O
            moved_BO = inverse_O**-2 + (2 * share_B1 * product_BO + share_B1.square() * g.square_BO) / self._fan_in
            self._inverse_BO = moved_BO.clamp(min=self._added).rsqrt()
            share_BO = share_B1 * self._inverse_BO
            along_BO = self._inverse_BO / inverse_O + share_BO * g.along_BO
            self._point = Combined(_by_rows(g.inner, share_BO), self._rows, along_BO, share_BO * g.level_BO)
        if "0.gain" in moves:
            self._scale_BO = self._scale_BO + moves["0.gain"].dense().flatten(1) / self._fan_in**0.5

    @classmethod
    def of(cls, parametrization: nn.Module, moves: Mapping[str, Move]) -> "StandardizedWeight | None":
        """None where another parametrization computes the weight, or moves are not what this one pulls back."""
        steps = list(cast(nn.ModuleList, parametrization))
        if len(steps) != 1 or type(steps[0]) is not WeightStandardization:
            return None
        along = moves["original"].factor if "original" in moves else None
        known = isinstance(along, Projected) and along.product_BO is not None
        return cls(parametrization, moves) if known or not moves else None

    def takes(self, grads: Factor) -> bool:
        """Whether this is the shorter way for such gradients; if parameters move, it is the only one."""
        return self._point is not None or (isinstance(grads, Convolution) and grads.by_inner_products)

    def move(self) -> Move:
        """How far each example's weight lies from the one at the parameters."""
        point, k_BO = cast(Combined, self._point), self._scale_BO
        along_BO = k_BO * point.along_BO - self._common_O
        moved = Combined(_by_rows(point.inner, k_BO), self._rows, along_BO, k_BO * point.level_BO)
        return Move(moved, moved.along_BO.new_ones(moved.examples))

    def pull(self, grads: Factor) -> dict[Tensor, Factor]:
        """By parameter, gradients with respect to it from those with respect to the weight."""
        point, scale_BO = self._point, self._inverse_BO * self._scale_BO
        if point is not None and grads.examples != point.examples:
            grads = grads.merge(grads.examples // point.examples)
        h = cast(Convolution, grads).of_patches()
        y_BTO = h.a_BTI @ self._rows.flatten(1).mT if point is None else point.of_patches().apply(h.a_BTI)
        along_BO = (y_BTO * h.b_BTO).sum(1) / self._fan_in
        mean_BO = (h.a_BTI.sum(2, keepdim=True).mT @ h.b_BTO)[:, 0] / self._fan_in
        found: dict[str, Factor] = {}
        if "0.gain" in self._own:
            gain = self._own["0.gain"]
            found["0.gain"] = Dense((self._fan_in**0.5 * along_BO).view(-1, *gain.shape))
        # |y|^2 = F (1 - added r^2)
        lost_BO = self._added * self._inverse_BO.square()
        rest_BO = mean_BO.square() + along_BO.square() * (1 + lost_BO)
        square_BO = scale_BO.square() * (_row_squares(h) - self._fan_in * rest_BO)
        inner, along_BO, level_BO = _by_rows(h, scale_BO), -scale_BO * along_BO, -scale_BO * mean_BO
        product_BO = None
        if point is None:
            product_BO = -along_BO * lost_BO * self._fan_in
        else:
            inner = cast(Outer, inner + _by_rows(point.inner, along_BO))
            along_BO, level_BO = along_BO * point.along_BO, level_BO + along_BO * point.level_BO
        found["original"] = Projected(Combined(inner, self._rows, along_BO, level_BO), square_BO, product_BO)
        return {own: found[name] for name, own in self._own.items() if own.requires_grad}


def _row_squares(h: Outer) -> Tensor:
    """|h_io|^2, shape (B, O)."""
    return (h.a_BTI @ h.a_BTI.mT @ h.b_BTO).mul_(h.b_BTO).sum(1)


def _by_rows(factor: Outer, scale_BO: Tensor) -> Outer:
    """Every row of every example times its own number."""
    return Outer(factor.a_BTI, factor.b_BTO * scale_BO[:, None])
