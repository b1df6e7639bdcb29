"""Clip each contribution to norm C and add the results.

A clipping rule turns norms into factors. ClippingAccumulator checks the factors, multiplies and adds, and states the
sensitivity of the sum, to which the noise is in proportion.

Shape suffixes: B examples of the chunk, N parameters, K coordinates of the statistic.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from privgrad.clip.norm_statistics import NORMS, NormStatistic, rows_and_sensitivity, same_for_halves
from privgrad.errors import expected
from privgrad.gradient.factor import Dense, Factor, Factors, examples_per_block
from privgrad.types import ClippedSum

# Expected contributions above which sums are in float64. Half of it, divided by them, limits the terms of a light
# example, in C. An example whose terms add up to more than this times C is written out, because they nearly cancel.
_TERMS = 1e4
_PULLED = _TERMS * 2.0**-24  # times C: how far products with Jacobians may be rounded, about as far as a float32 total
_LOST = 1e-37  # below it a factor is 0: float32 would round it to a multiple of 1e-45

Named = Mapping[str, Tensor]  # by parameter name
_OWN_RULES = ("privgrad.clip.clipping", "privgrad.clip.rules")  # known to use each example's norms alone


class Clipping(Protocol):
    """A rule that computes, from per-example norms, factors that bound each example's contribution by max_grad_norm.

    Privacy:
        An example's factors may depend on that example's norms and on public numbers only. If a rule looked at the
        whole batch, one example more or less would change the contributions of all others. ClippingAccumulator
        checks two things. For every rule, it refuses contributions beyond the bound. For a rule of your own, it asks
        again for each half of the batch, and refuses factors that differ. It cannot detect a rule that remembers
        earlier calls: a rule must keep no state.
    """

    def factors(self, norms: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
        """Return the factors by parameter name, each of shape (B,); row i depends on row i of the norms only.

        Args:
            norms: norms_B of each parameter's gradient, by name, all finite.
            max_grad_norm: C > 0.
        Returns:
            factor_B by name, such that sqrt(sum over names of (factor * norm)**2) <= C for every example.
        """
        ...


@dataclass(frozen=True)
class Flat:
    """A rule with one norm over all parameters: g_i * min(1, C / ||g_i||).

    Privacy:
        Each example's contribution has norm at most C. Adding or removing one example changes the sum by at most C.
    Reference:
        Abadi et al. 2016 (arXiv 1607.00133), algorithm 1; docs/mathematics.md (1.9).
    """

    def factors(self, norms: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
        norm_B = joint_norm_of(norms)
        factor_B = (max_grad_norm / norm_B).clamp(max=1.0)
        return dict.fromkeys(norms, factor_B)


@dataclass(frozen=True)
class RawClipping:
    """The norms and factors of each example, in the order of the batch. PRIVATE: for diagnostics only."""

    raw_norms: Tensor  # L2 norm of each whole gradient, divided by the scales, (B,), float64; 0 if it was not finite
    raw_factors: Tensor  # the smallest factor of each example, shape (B,)
    raw_lengths: Tensor  # L2 norm of each clipped gradient, shape (B,), float64
    raw_nonfinite_examples: int  # the number of gradients that were not finite


class ClippingAccumulator:
    """An accumulator that clips every example's gradient, adds it, and returns the sum with its sensitivity.

    Computes: sum over i of factor_i * g_i / A, where factor_i clips g_i / A. It computes in float32 or wider, with or
    without autocast. An example whose norm is not finite counts as 0. In float32 this includes gradients whose squares
    overflow, from norms of about 1e19 on.

    Args:
        like: the parameters: names, shapes, devices.
        clip: the rule.
        max_grad_norm: C > 0.
        inverse_scales: 1 / A by parameter name, elementwise; missing names and None are 1. Public.
        grouped: True if the rows are means over groups of examples, with each example in one group (see
            `example_groups`).
        expected_size: the public expected number of contributions. It decides the precision of the sum (`sum_dtype`).
        statistic: of the norms, added to the sum under the name NORMS in float64; None for none.
    Privacy:
        The guarantee rests on this. If one example is added or removed, the sum changes by at most C in L2 norm, up to
        rounding (docs/rounding.md). The split into chunks does not matter, because each contribution is bounded before
        it is added to another. With groups the bound is 2C, because one contribution of norm C is replaced by another,
        perhaps its opposite. With a statistic, its `sensitivity(C)` stands in place of C: the joint length of a
        contribution and of its row.
    """

    def __init__(
        self,
        *,
        like: Mapping[str, Tensor],
        clip: Clipping,
        max_grad_norm: float,
        inverse_scales: Mapping[str, Tensor] | None = None,
        grouped: bool = False,
        expected_size: int = 1,
        statistic: NormStatistic | None = None,
    ) -> None:
        self._like, self._clip, self._bound = like, clip, max_grad_norm
        self._scales = inverse_scales or {}
        self._grouped, self._expected_size, self._statistic = grouped, expected_size, statistic
        self._sums = _Sums(max_grad_norm, self._scales, expected_size)
        self._seen: list[RawClipping] = []
        self._devices = {value.device.type for value in like.values()}

    def add(self, chunk: Factors, padded: int | None = None) -> None:
        """Clip the gradients of one part of the batch, one row per example, and add them.

        A missing parameter has gradient 0. The last `padded` rows are padding of a truncated batch: they count for
        nothing.
        """
        if not chunk:
            return
        rows = next(iter(chunk.values())).examples
        if padded:
            counted_B = torch.arange(rows, device=next(iter(self._like.values())).device) < rows - padded
            chunk = {name: factor.mask(counted_B) for name, factor in chunk.items()}
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, self._devices):
                # Under an ambient autocast, products in half precision would break the bound by more than rounding.
                stack.enter_context(torch.autocast(device, enabled=False))
            raw = _add_clipped(self._sums, chunk, self._clip, self._bound, self._scales, tuple(self._like))
        if padded:
            counted = slice(rows - padded)
            kept = raw.raw_norms[counted], raw.raw_factors[counted], raw.raw_lengths[counted]
            raw = RawClipping(*kept, raw.raw_nonfinite_examples)
        self._seen.append(raw)

    def result(self) -> tuple[ClippedSum, RawClipping]:
        """Return the sum with its sensitivity, and the PRIVATE norms and factors."""
        total = {
            name: _released_sum(self._sums.values.get(name), parameter, self._scales.get(name), self._expected_size)
            for name, parameter in self._like.items()
        }
        if len(self._seen) == 1:
            raw = self._seen[0]
        else:  # the parts of the batch in one piece
            each = [(part.raw_norms, part.raw_factors, part.raw_lengths) for part in self._seen]
            joined = map(torch.cat, zip(*each, strict=True)) if each else [torch.zeros(0, dtype=torch.float64)] * 3
            norm_B, factor_B, length_B = joined
            raw = RawClipping(norm_B, factor_B, length_B, sum(part.raw_nonfinite_examples for part in self._seen))
        sensitivity = self._bound
        if self._statistic is not None:
            device = next(iter(self._like.values())).device
            rows_BK, sensitivity = rows_and_sensitivity(self._statistic, raw.raw_norms, raw.raw_lengths, self._bound)
            total[NORMS] = rows_BK.double().sum(0).to(device)
        return ClippedSum(total, sensitivity=(1 + self._grouped) * sensitivity), raw


def sum_dtype(parameter: Tensor, expected_size: int) -> torch.dtype:
    """Return the precision of a parameter's clipped sum: float32 or wider, and float64 for many contributions."""
    # Above 1e4 contributions, the last rounding of a float32 total could alone move it by more than 1e-3 C.
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.float64 if expected_size > _TERMS else dtype


def _released_sum(total: Tensor | None, parameter: Tensor, scales: Tensor | None, expected_size: int) -> Tensor:
    """Return one parameter's sum, multiplied by the scales, in the public precision."""
    dtype = sum_dtype(parameter, expected_size)
    if total is None:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    total = total.to(torch.promote_types(total.dtype, dtype))
    return (total if scales is None else total.mul_(scales)).to(dtype)


class _Sums:
    """Weighted sums by parameter name, in float32 where rounding errors stay small.

    Privacy:
        One more example moves all later terms to other lanes of the matrix product, so the errors of ALL examples may
        change. In parts of k terms that are joined in float64, the errors of n examples are at most 2^-24 k n C, and
        their change is at most twice that. Measured changes are far smaller (docs/rounding.md). The term bound of an
        example is the sum of the norms of all its terms, after clipping; if it is above C, it replaces C here.
        - An example is light if its term bound is at most 4 C (32 C for a computed weight), or less where many
          contributions are expected. Light examples are summed in parts (`Factor.sum_in_parts`). Each other example is
          summed in float64. No other example, and no size of the batch, decides between the two.
        - If more than 1e4 contributions are expected, all are summed in float64.
        - Chunks are added to a total in float64.
    """

    def __init__(self, max_grad_norm: float, inverse_scales: Named, expected_size: int) -> None:
        self.values: dict[str, Tensor] = {}
        self._pulled: dict[str, float] = {}  # the estimated errors of products with Jacobians so far
        self._bound, self._scales, self._expected_size = max_grad_norm, inverse_scales, expected_size

    def add(self, chunk: Factors, factors: Named, terms: Named) -> None:
        """Add every example's gradient times its factor; `terms` bound the terms of each gradient."""
        term_NB = _products(factors, terms)
        # In C and public: 1.001, because else rounding would decide about an example that is clipped to C.
        most_light = max(1.001, _TERMS / (2 * self._expected_size))
        for name, term_B, most in zip(factors, term_NB, cast("list[float]", term_NB.amax(1).tolist()), strict=True):
            limit = min(chunk[name].usual_terms, most_light) * self._bound
            heavy_B = None if most <= limit else ~(term_B <= limit)  # nan is heavy
            added = self._sum(name, chunk[name], factors[name], heavy_B)
            known = self.values.get(name)
            self.values[name] = added if known is None else known.double().add_(added)

    def _sum(self, name: str, factor: Factor, factor_B: Tensor, heavy_B: Tensor | None) -> Tensor:
        """Return the sum of one chunk: of light examples in float32, of heavy ones in float64."""
        if self._expected_size > _TERMS or (heavy_B is not None and bool(heavy_B.all())):
            return factor.exact_sum(factor_B)
        light_B = factor_B if heavy_B is None else torch.where(heavy_B, 0.0, factor_B)
        total, rounded = factor.sum_and_rounding(light_B, self._scales.get(name))
        self._pulled[name] = self._pulled.get(name, 0.0) + rounded
        if not self._pulled[name] <= _PULLED * self._bound:  # nan is not
            return factor.exact_sum(factor_B)
        if heavy_B is None:
            return total
        index = heavy_B.nonzero()[:, 0]
        return total.double().add_(factor[index].exact_sum(factor_B[index]))


def _add_clipped(
    sums: _Sums, chunk: Factors, clip: Clipping, max_grad_norm: float, inverse_scales: Named, names: Sequence[str]
) -> RawClipping:
    """Clip a chunk of gradients and add it to `sums`; return its norms, 0 for unreached `names`, and its factors."""
    norms = _Norms((name, factor.norms(inverse_scales.get(name))) for name, factor in chunk.items())
    nonfinite, apart = 0, list[tuple[Tensor, RawClipping]]()
    if not math.isfinite(float(norms.joint_B.sum())):  # if the sum is finite, so is every norm
        finite_B = torch.isfinite(norms.joint_B)
        # Zero times NaN is NaN, so the gradient itself is replaced by 0, not only its factor.
        chunk = {name: factor.mask(finite_B) for name, factor in chunk.items()}
        norms = _Norms((name, torch.where(finite_B, each_B, 0.0)) for name, each_B in norms.items())
        nonfinite = int((~finite_B).sum())
    norm_B = norms.joint_B
    factors = _factors(clip, norms, max_grad_norm, names)
    terms, canceling_B = _terms(chunk, norms, factors, max_grad_norm, inverse_scales)
    if canceling_B is not None and bool(canceling_B.any()):
        # An example's gradient that is written out is one tensor with one norm, and one term of the sum.
        few = examples_per_block(sum(int(factor.shape.numel()) for factor in chunk.values()), norm_B)
        for index in cast("tuple[Tensor, ...]", canceling_B.nonzero()[:, 0].split(few)):
            alone = {name: Dense(factor[index].dense()) for name, factor in chunk.items()}
            apart.append((index, _add_clipped(sums, alone, clip, max_grad_norm, inverse_scales, names)))
        chunk = {name: factor.mask(~canceling_B) for name, factor in chunk.items()}
        norms, terms = (
            _Norms((name, torch.where(canceling_B, 0.0, each_B)) for name, each_B in found.items())
            for found in (norms, terms)
        )
        factors = _factors(clip, norms, max_grad_norm, names)
    length_B = _require_bound(factors, norms, clip, max_grad_norm)
    if nonfinite < len(norm_B):  # where a computed weight is not finite, no gradient is, and zero times NaN is NaN
        sums.add(chunk, factors, terms)
    distinct = _distinct(factors)
    smallest_B = distinct[0] if len(distinct) == 1 and not apart else torch.stack(distinct).amin(0)
    for index, raw in apart:
        norm_B[index], smallest_B[index] = raw.raw_norms, raw.raw_factors
        length_B[index] = raw.raw_lengths
        nonfinite += raw.raw_nonfinite_examples
    return RawClipping(norm_B, smallest_B, length_B, nonfinite)


def _factors(clip: Clipping, found: Named, bound: float, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the factors of the norms; refuse a user's rule that gives others for half of the examples alone."""
    norms, missing = found, [name for name in names if name not in found]
    if missing:
        norms = {**found, **dict.fromkeys(missing, torch.zeros_like(next(iter(found.values()))))}
    factors = _answer(clip, norms, bound)

    def alone(part: slice) -> Named:
        return _answer(clip, {name: norm_B[part] for name, norm_B in norms.items()}, bound)

    # Factors that are not finite are refused later, with the bound.
    if type(clip).__module__ not in _OWN_RULES and not same_for_halves(factors, alone):
        remedy, got = "use no maxima, means or quantiles of the batch", "factors that change with the rest of the batch"
        raise expected(type(clip).__name__, "factors", "to depend on one example each", got, remedy)
    return {name: factors[name] for name in found} if missing else factors


def _answer(clip: Clipping, norms: Named, max_grad_norm: float) -> dict[str, Tensor]:
    """Return the rule's factors for these norms, one for every parameter and example; negligible ones become 0."""
    factors, remedy = clip.factors(norms, max_grad_norm), "correct the rule: nothing was released"
    if factors.keys() != norms.keys():
        got = f"{sorted(factors)} for {sorted(norms)}"
        raise expected(type(clip).__name__, "factors", "for every parameter", got, remedy)
    if any(factor_B.shape != norms[name].shape for name, factor_B in factors.items()):
        dims = {factor_B.dim() for factor_B in factors.values()}
        got = f"tensors of {max(dims)} dimensions" if dims != {1} else "tensors of a different length"  # B is private
        raise expected(type(clip).__name__, "factors", "to be of shape (B,)", got, remedy)
    clipped = {id(factor_B): factor_B for factor_B in factors.values()}
    for key, factor_B in clipped.items():
        if not (len(factor_B) > 0 and float(factor_B.min()) >= _LOST):  # float32 does not hold some of them
            clipped[key] = torch.where(factor_B.abs() < _LOST, 0.0, factor_B)
    return {name: clipped[id(factor_B)] for name, factor_B in factors.items()}


def _terms(
    chunk: Factors, norms: Named, factors: Named, max_grad_norm: float, inverse_scales: Named
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the term bound of each gradient by name, and a mask of the examples whose terms cancel too far, or None.

    The rounding of such an example's own sum, which grows with the root of the number of terms, would exceed the bound.
    The measured norm is then not the norm of the gradient that is added.
    """
    terms, canceling_B = dict(norms), None  # None: each gradient is a single term
    for name, factor in chunk.items():
        terms_B = factor.term_bound(inverse_scales.get(name))
        if terms_B is not None:
            terms[name] = terms_B
            apart_B = ~(factors[name] * terms_B * factor.positions**0.5 <= _TERMS * max_grad_norm)
            canceling_B = apart_B if canceling_B is None else canceling_B | apart_B
    return terms, canceling_B


def _require_bound(factors: Named, norms: Named, clip: Clipping, bound: float) -> Tensor:
    """Return the contributions' lengths, shape (B,), by the factors of the sum; raise PrivacyError if one exceeds C."""
    used = {id(factor_B): factor_B.float().double() for factor_B in _distinct(factors)}  # as the sum rounds them
    if len(used) == 1:  # one factor for all parameters comes out of the norm
        contribution_B = next(iter(used.values())).abs() * joint_norm_of(norms)
    else:
        contribution_B = _joint_norm(used[id(factors[name])] * norm_B for name, norm_B in norms.items())
    # The 1e-6 is float32's rounding of a factor. It is charged nowhere: sigma would be 1e-6 smaller.
    # An infinite factor times a norm of zero is NaN, which is in no bound.
    if not bool((contribution_B <= bound * (1 + 1e-6)).all()):
        remedy = "correct the rule: nothing was released"
        finite = all(bool(torch.isfinite(factor_B).all()) for factor_B in used.values())
        got = "a longer contribution" if finite else "a factor that is not finite"  # its length is private
        raise expected(type(clip).__name__, "factors", f"to bound contributions by {bound}", got, remedy)
    return contribution_B


class _Norms(dict[str, Tensor]):
    """Norms by parameter name, each of shape (B,), with the joint norm of all parameters, which is computed once."""

    def __init__(self, norms: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(norms)
        self.joint_B = _joint_norm(self.values())


def joint_norm_of(norms: Named) -> Tensor:
    """Return the joint norm of norms by parameter name, shape (B,)."""
    return norms.joint_B if isinstance(norms, _Norms) else _joint_norm(norms.values())


def _products(factors: Named, norms: Named) -> Tensor:
    """Return each factor times its norm, one row per parameter and one column per example."""
    distinct = _distinct(factors)
    if len(distinct) == 1:
        return distinct[0] * torch.stack([norms[name] for name in factors])
    return torch.stack([factor_B * norms[name] for name, factor_B in factors.items()])


def _distinct(factors: Named) -> list[Tensor]:
    """Return the factors, each tensor once, because most rules give all parameters the same tensor."""
    return list({id(factor_B): factor_B for factor_B in factors.values()}.values())


def _joint_norm(norms: Iterable[Tensor]) -> Tensor:
    """Return each example's norm over all parameters, given its norm for each; shape (B,)."""
    return cast(Tensor, torch.linalg.vector_norm(torch.stack(list(norms)), dim=0))
