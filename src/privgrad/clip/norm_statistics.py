"""Statistics of the gradients' norms, released as further coordinates of the clipped sum.

Gradient and statistic are one vector and one Gaussian release.

Shape suffixes: B contributions, K coordinates of the statistic.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from privgrad.errors import described, expected
from privgrad.types import NormDistribution

NORMS = ".norms"  # the name of a statistic in a ClippedSum: no parameter's name begins with a dot
NormBins = int | Literal["auto"] | None
_LIMIT = 1024  # a batch of 1,000 then holds 8 MiB of slots; more bins only add noise
# Of "auto": the fewest and the most bins, and the largest standard deviation of a share in one step. It is large,
# because verdicts average over the steps, and few bins count gradients near C as clipped.
_FEWEST, _MOST, _STD = 8, 64, 0.1
_RAMP = 0.1  # of an edge: norms as close to it count in part


class NormStatistic(Protocol):
    """A vector for each contribution, made from its norm, that is released together with the contribution."""

    def rows(self, norm_B: Tensor, length_B: Tensor, max_grad_norm: float) -> Tensor:
        """Return the vector of each contribution, shape (B, K), float64; row i depends on entry i only.

        norm_B are the norms before clipping, and length_B those after it: at most C up to rounding.
        """
        ...

    def sensitivity(self, max_grad_norm: float) -> float:
        """Return a bound on the joint length of any contribution and its row, where contributions have length <= C."""
        ...

    def distribution(self, released_K: Tensor, noise_std: float, max_grad_norm: float) -> NormDistribution:
        """Return the distribution that a release gives: the noisy sum of the rows, divided by B. Post-processing."""
        ...


@dataclass(frozen=True)
class Slots:
    """The unused part of C of each contribution, poured into K slots. It costs no sensitivity.

    Computes: s_k = min(h, max(0, (C - n) sqrt(K) - k h)) for k = 0 to K - 1, where n is the contribution's length and
    h = C / sqrt(K) the height of a slot.

    Privacy:
        A contribution of length n and its slots have together at most length C, which is the bound on the contribution
        alone. Proof: each slot is in [0, h] and the slots add up to (C - n) sqrt(K), so their squares add up to at
        most h (C - n) sqrt(K) = C (C - n). With n <= C, this gives n^2 + C (C - n) <= C n + C (C - n) = C^2.
    Reference:
        SlaClip: Gradient Norm Slacks can be Indicator for Adaptive Clipping in DP-SGD (ICML 2026).
    """

    bins: int  # K >= 1

    def rows(self, norm_B: Tensor, length_B: Tensor, max_grad_norm: float) -> Tensor:
        del norm_B
        height = max_grad_norm / math.sqrt(self.bins)
        left_B = (max_grad_norm - length_B.double()).clamp(min=0.0) * math.sqrt(self.bins)
        below_K = height * torch.arange(self.bins, dtype=torch.float64, device=length_B.device)
        return (left_B[:, None] - below_K).clamp(0.0, height)

    def sensitivity(self, max_grad_norm: float) -> float:
        return max_grad_norm

    def distribution(self, released_K: Tensor, noise_std: float, max_grad_norm: float) -> NormDistribution:
        height = max_grad_norm / math.sqrt(self.bins)
        edges_K = max_grad_norm * (1 - torch.arange(self.bins, dtype=torch.float64) / self.bins)
        std_K = torch.full_like(edges_K, noise_std / height)
        return NormDistribution(released_K / height, std_K, edges_K, max_grad_norm)


@dataclass(frozen=True)
class Count:
    """Whether each gradient is within C, as one number. It raises the sensitivity.

    Computes: w C (b - 1/2), where b is 1 for norms below 0.9 C, 0 for norms above 1.1 C, and linear in between.

    Privacy:
        The number is within w C / 2 of 0, so it has a length of at most C sqrt(1 + w^2 / 4) with a contribution.
        It is continuous, because rounding changes norms a little with the batch. At a step, one example more could
        move the counts of many others.
    Reference:
        Andrew et al. 2021 (arXiv 1905.03871), theorem 1: the noise multiplier of the sum, in units of C, is
        z = (z_joint^-2 - (2 sigma_b)^-2)^(-1/2) where sigma_b is the standard deviation of the noisy count. Deviation:
        norms near C count in part.
    """

    weight: float  # w > 0

    def rows(self, norm_B: Tensor, length_B: Tensor, max_grad_norm: float) -> Tensor:
        del length_B
        return (_below(norm_B, (max_grad_norm,)) - 0.5) * (self.weight * max_grad_norm)

    def sensitivity(self, max_grad_norm: float) -> float:
        return max_grad_norm * math.sqrt(1 + self.weight**2 / 4)

    def distribution(self, released_K: Tensor, noise_std: float, max_grad_norm: float) -> NormDistribution:
        unit = self.weight * max_grad_norm
        edge = torch.tensor([max_grad_norm], dtype=torch.float64)
        return NormDistribution(released_K / unit + 0.5, torch.full_like(edge, noise_std / unit), edge, max_grad_norm)


@dataclass(frozen=True)
class Histogram:
    """The bin of each gradient's norm, as a vector. It raises the sensitivity.

    Computes: w C at the bin of the norm, and 0 elsewhere. The last bin holds all larger norms. A norm within 10 % of an
    edge is in both bins in part, as in Count.

    Privacy:
        The entries are at least 0 and add up to w C. So the vector has a length of at most w C, and of at most
        C sqrt(1 + w^2) with a contribution. It is continuous in the norm; see Count for the reason.
    Reference:
        DC-SGD (arXiv 2503.22988): a histogram of norms, with a share of the privacy budget of its own. Deviation: norms
        near an edge count in part.
    """

    edges: tuple[float, ...]  # the upper ones of the bins but the last, in units of C, rising, and 1 among them
    weight: float  # w > 0

    def rows(self, norm_B: Tensor, length_B: Tensor, max_grad_norm: float) -> Tensor:
        del length_B
        below_BK = _below(norm_B, [max_grad_norm * edge for edge in self.edges])
        ends_BK = torch.nn.functional.pad(below_BK, (0, 1), value=1.0)
        return ends_BK.diff(prepend=torch.zeros_like(ends_BK[:, :1])) * (self.weight * max_grad_norm)

    def sensitivity(self, max_grad_norm: float) -> float:
        return max_grad_norm * math.sqrt(1 + self.weight**2)

    def distribution(self, released_K: Tensor, noise_std: float, max_grad_norm: float) -> NormDistribution:
        unit, count = self.weight * max_grad_norm, len(self.edges) + 1
        shares_K = (released_K / unit).cumsum(0)
        std_K = noise_std / unit * torch.arange(1, count + 1, dtype=torch.float64).sqrt()
        edges_K = torch.tensor([*(max_grad_norm * edge for edge in self.edges), math.inf], dtype=torch.float64)
        return NormDistribution(shares_K.flip(0), std_K.flip(0), edges_K.flip(0), max_grad_norm)


def rows_and_sensitivity(
    statistic: NormStatistic, norm_B: Tensor, length_B: Tensor, max_grad_norm: float
) -> tuple[Tensor, float]:
    """Return the rows of a statistic and its sensitivity; refuse rows that break the bound."""
    # Each row is compared with the stated sensitivity, whatever the proof of its class says. A class of the user's is
    # asked again for each half, since its rows may not depend on other contributions.
    rows_BK, bound = statistic.rows(norm_B, length_B, max_grad_norm), statistic.sensitivity(max_grad_norm)
    name, remedy = type(statistic).__name__, "correct the statistic: nothing was released"
    if not max_grad_norm <= bound:
        raise expected(name, "sensitivity", f"to be at least C = {max_grad_norm:g}", bound, remedy)
    if rows_BK.dim() != 2 or len(rows_BK) != len(norm_B):
        got = f"{rows_BK.dim()} dimensions" if rows_BK.dim() != 2 else "a different number of rows"  # B is private
        raise expected(name, "rows", "to be of shape (B, K)", got, remedy)
    square_B = length_B.double().square() + rows_BK.double().square().sum(1)
    if not bool((square_B <= (bound * (1 + 1e-5)) ** 2).all()):
        condition, got = f"to be within {bound:g} with their contributions", "longer rows, or inf or nan"
        raise expected(name, "rows", condition, got, remedy)

    def alone(part: slice) -> Mapping[str, Tensor]:
        return {"": statistic.rows(norm_B[part], length_B[part], max_grad_norm)}

    if type(statistic) not in (Slots, Count, Histogram) and not same_for_halves({"": rows_BK}, alone):
        got = "rows that change with the rest of the batch"
        raise expected(name, "rows", "to depend on one contribution each", got, remedy)
    return rows_BK, bound


def same_for_halves(whole: Mapping[str, Tensor], alone: Callable[[slice], Mapping[str, Tensor]]) -> bool:
    """Return whether each half of a batch has the same rows when only this half is asked for."""
    half = len(next(iter(whole.values()))) // 2
    for part in (slice(half), slice(half, None)) if half else ():
        own = alone(part)
        for name, rows in whole.items():
            is_same = own[name].shape == rows[part].shape
            if not (is_same and torch.allclose(rows[part], own[name], rtol=1e-6, atol=0.0, equal_nan=True)):
                return False
    return True


def _below(norm_B: Tensor, edges: Sequence[float]) -> Tensor:
    """Return whether each norm is below each edge: 1, 0, or a number in between near the edge; shape (B, K), float64.

    It falls with the norm and rises with the edge, so differences between rising edges are at least 0.
    """
    edges_K = torch.tensor(edges, dtype=torch.float64, device=norm_B.device)
    return ((1 + _RAMP - norm_B.double()[:, None] / edges_K) / (2 * _RAMP)).clamp(0.0, 1.0)


def require_bins(function: str, name: str, value: Any) -> None:
    """Raise PrivacyError unless value is a number of bins that PrivateGradient accepts, or "auto"."""
    is_integer = isinstance(value, Integral) and value is not True
    if value != "auto" and not (is_integer and value in range(1, _LIMIT + 1)):
        raise expected(function, name, f"to be an integer from 1 to {_LIMIT}, or 'auto'", described(value))


def chosen_slots(
    norm_bins: int | Literal["auto"], max_grad_norm: float, noise_std: float, share_std: float = _STD
) -> Slots:
    """Return the slots for `norm_bins` of PrivateGradient; noise_std is that of one coordinate of the gradient."""
    if math.isinf(max_grad_norm):
        raise expected("PrivateGradient", "the plan's max_grad_norm", "to be finite for norm_bins", math.inf)
    if norm_bins != "auto":
        require_bins("PrivateGradient", "norm_bins", norm_bins)
        return Slots(int(norm_bins))
    # The largest number from 8 to 64 at which a share has a standard deviation of at most `share_std`, or else 8.
    relative = noise_std / max_grad_norm
    return Slots(_MOST if relative == 0 else min(_MOST, max(_FEWEST, int((share_std / relative) ** 2))))
