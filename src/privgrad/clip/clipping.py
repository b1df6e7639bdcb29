"""Clip each contribution to norm C and add the results.

A clipping rule turns norms into factors. ClippingAccumulator checks the factors, multiplies and adds, and states the
sensitivity of the sum, to which the noise is in proportion.

Shape suffixes: B examples of the chunk, N parameters, K coordinates of the statistic.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from privgrad.clip.norm_statistics import NORMS, NormStatistic, rows_and_sensitivity, same_for_halves
from privgrad.errors import expected
from privgrad.gradient.factor import Dense, Factor, Factors, SideBySide, examples_per_block, unread
from privgrad.processes import Sums, is_on_processor, without_autocast
from privgrad.types import ClippedSum, Place

# Expected contributions above which sums are in float64. Half of it, divided by them, limits the terms of a light
# example, in C. An example whose terms add up to more than this times C is written out, because they nearly cancel.
_TERMS = 1e4
_PULLED = _TERMS * 2.0**-24  # times C: how far products with Jacobians may be rounded, about as far as a float32 total
_LOST = 1e-37  # up to it a factor is 0: float32 would round it to a multiple of 1e-45
# Entries of a parameter whose gradients are clipped side by side with those of others. Copies leave a CPU's cache, and
# other devices take four times as many.
_SMALL = 1 << 10
# Of a factor in float32, and of a product in float32. It is charged nowhere: sigma would be 1e-6 smaller.
_ROUNDING = 1e-6

Named = Mapping[str, Tensor]  # by parameter name


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
        factor_B = (norm_B.reciprocal() * max_grad_norm).clamp(max=1.0)
        return dict.fromkeys(norms, factor_B)


@dataclass(frozen=True)
class RawClipping:
    """The norms and factors of each example, in the order of the batch. PRIVATE: for diagnostics only."""

    raw_norms: Tensor  # L2 norm of each whole gradient, divided by the scales, (B,), float64; 0 if it was not finite
    raw_factors: Tensor  # the smallest factor of each example, shape (B,)
    raw_lengths: Tensor  # L2 norm of each clipped gradient, shape (B,), float64
    raw_nonfinite_examples: int  # the number of gradients that were not finite


class Tried(NamedTuple):
    """The clipped sum of a chunk before anything is read from the device: see `ClippingAccumulator.tried`."""

    sums: dict[str, Tensor]  # by parameter name
    raw_norms: Tensor  # the first three as in RawClipping, of all rows
    raw_factors: Tensor
    raw_lengths: Tensor
    flags: Tensor  # whether an example is spoiled or heavy, shape (B,); if any is, the sums do not count


def is_own_rule(clip: Clipping) -> bool:
    """Return whether a rule is this library's: known to use each example's norms alone, and to read nothing."""
    return type(clip).__module__ in ("privgrad.clip.clipping", "privgrad.clip.rules")


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
        shards: takes the sums of sharded parameters, which have no scales; None if there are none.
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
        shards: Sums | None = None,
    ) -> None:
        self._sums = _Sums(like, clip, max_grad_norm, inverse_scales or {}, expected_size, shards)
        self.max_grad_norm, self._grouped, self._statistic = max_grad_norm, grouped, statistic
        self._seen: list[RawClipping] = []
        self._device, self._kinds = next(iter(like.values())).device, {value.device.type for value in like.values()}

    def add(self, chunk: Factors, padded: int | None = None) -> None:
        """Clip the gradients of one part of the batch, one row per example, and add them.

        A missing parameter has gradient 0. The last `padded` rows are padding of a truncated batch: they count for
        nothing.
        """
        rows, counted_B = next(iter(chunk.values())).examples if chunk else 0, None
        if rows == 0:
            return
        if padded:
            counted_B = self.counted(rows, padded)
        with without_autocast(self._kinds):  # half precision could break the bound by more than rounding
            chunk, scales = _side_by_side(self._sums, chunk, self._sums.scales)
            raw = _add_clipped(self._sums, chunk, scales, counted_B)
        self._seen.append(_counted(raw, padded) if padded else raw)

    def tried(self, chunk: Factors, counted_B: Tensor, inverse_scales: Named) -> Tried:
        """Return the clipped sum of a chunk as a function of tensors, which reads nothing and so can be compiled.

        The rule must be this library's own. Examples that are not `counted_B` count for nothing.
        """
        sums = self._sums.without_values(inverse_scales)
        with without_autocast(self._kinds):
            chunk, scales = _side_by_side(sums, chunk, inverse_scales)
            found = _norms_and_factors(sums, chunk, scales, counted_B)
            sums.add(chunk, found.factors, None)
            return Tried(sums.values, found.norms.joint_B, _smallest(found.factors), found.lengths, found.flagged())

    def take(self, tried: Tried, padded: int | None = None, apart: tuple[Tensor, Factors] | None = None) -> None:
        """Add what `tried` returned without a flag; `apart`: rows that did not count in it, and their gradients."""
        raw = RawClipping(tried.raw_norms, tried.raw_factors, tried.raw_lengths, 0)
        if apart is not None:
            index, chunk = apart
            beyond = int((index >= len(raw.raw_norms) - (padded or 0)).sum())
            self.add(chunk or without_gradient(len(index), self._sums.like), beyond)
            own, index = self._seen.pop(), index[: len(index) - beyond]
            raw = replace(raw, raw_nonfinite_examples=own.raw_nonfinite_examples)
            for name in ("raw_norms", "raw_factors", "raw_lengths"):
                getattr(raw, name)[index] = getattr(own, name).to(getattr(raw, name).dtype)
        self._sums.join(tried.sums)
        self._seen.append(_counted(raw, padded) if padded else raw)

    @property
    def inverse_scales(self) -> Named:
        """1 / A by parameter name."""
        return self._sums.scales

    def counted(self, rows: int, padded: int | None) -> Tensor:
        """Return which of the rows count: all but the last `padded`."""
        return torch.arange(rows, device=self._device) < rows - (padded or 0)

    def result(self) -> tuple[ClippedSum, RawClipping]:
        """Return the sum with its sensitivity, and the PRIVATE norms and factors."""
        (total, places), bound = self._sums.released(), self._sums.bound
        if len(self._seen) == 1:
            raw = self._seen[0]
        else:  # the parts of the batch in one piece
            each = [(part.raw_norms, part.raw_factors, part.raw_lengths) for part in self._seen]
            joined = map(torch.cat, zip(*each, strict=True)) if each else [torch.zeros(0, dtype=torch.float64)] * 3
            norm_B, factor_B, length_B = joined
            raw = RawClipping(norm_B, factor_B, length_B, sum(part.raw_nonfinite_examples for part in self._seen))
        if self._statistic is not None:
            rows_BK, bound = rows_and_sensitivity(self._statistic, raw.raw_norms, raw.raw_lengths, bound)
            total[NORMS] = rows_BK.double().sum(0).to(self._device)
        return ClippedSum(total, (1 + self._grouped) * bound, places), raw


def without_gradient(rows: int, parameters: Mapping[str, Tensor]) -> dict[str, Factor]:
    """Return the chunk of examples that reach no parameter: their gradient is 0, and they count as all others do."""
    # Otherwise one example more, with a gradient, would change what all others in its chunk contribute: their rows of
    # the norm statistic, and a shift.
    name, smallest = min(parameters.items(), key=lambda item: item[1].numel())
    return {name: Dense(smallest.new_zeros(rows, *smallest.shape))}


def _counted(raw: RawClipping, padded: int) -> RawClipping:
    """Return what was seen of a chunk, without its padding."""
    counted = slice(len(raw.raw_norms) - padded)
    kept = raw.raw_norms[counted], raw.raw_factors[counted], raw.raw_lengths[counted]
    return RawClipping(*kept, raw.raw_nonfinite_examples)


def sum_dtype(parameter: Tensor, expected_size: int) -> torch.dtype:
    """Return the precision of a parameter's clipped sum: float32 or wider, and float64 for many contributions."""
    # Above 1e4 contributions, the last rounding of a float32 total could alone move it by more than 1e-3 C.
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.float64 if expected_size > _TERMS else dtype


class _Sums:
    """Weighted sums by parameter name, in float32 where rounding errors stay small.

    Privacy:
        One more example moves all later terms to other lanes of the matrix product, so the errors of ALL examples may
        change. In parts of k terms that are joined in float64, the errors of n examples are at most 2^-24 k n C, and
        their change is at most twice that. Measured changes are far smaller (docs/rounding.md). The term bound of an
        example is the sum of the norms of all its terms, after clipping; if it is above C, it replaces C here.
        - An example is light if its term bound is at most 4 C (8 C for convolutions, 32 C for computed weights), or
          less where many contributions are expected. Light examples are summed in parts (`Factor.sum_in_parts`). Each
          other example is summed in float64. No other example, and no size of the batch, decides between the two.
        - If more than 1e4 contributions are expected, all are summed in float64.
        - Chunks are added to a total in float64. Of sharded parameters, so are the sums over processes.
    """

    def __init__(
        self,
        like: Named,
        clip: Clipping,
        max_grad_norm: float,
        inverse_scales: Named,
        expected_size: int,
        shards: Sums | None = None,
    ) -> None:
        self._shards = shards
        self.values: dict[str, Tensor] = {}
        self._pulled: dict[str, float] = {}  # the estimated errors of products with Jacobians so far
        self.like, self.clip, self.bound, self.scales = like, clip, max_grad_norm, inverse_scales
        self.is_own = is_own_rule(clip)
        self._dtype = torch.float64 if torch.float64 in {p.dtype for p in like.values()} else torch.float32
        self._expected_size, self._exact = expected_size, expected_size > _TERMS
        # In C and public: 1.001, because else rounding would decide about an example that is clipped to C.
        self._most_light = max(1.001, _TERMS / (2 * expected_size))

    def limit(self, factor: Factor) -> float:
        """Return the largest term bound of a light example whose terms do not cancel."""
        canceling, heavy = _TERMS / factor.positions**0.5, min(factor.usual_terms, self._most_light)
        return self.bound * (canceling if self._exact or canceling < heavy else heavy)

    def add(self, chunk: Factors, factors: Named, terms: Named | None) -> None:
        """Add every example's gradient times its factor; `terms` bound the terms of each, None if all are light."""
        if self._shards is None:
            self._add(chunk, factors, terms)
            return
        for name in self.like:  # in one order in all processes, and one at a time: no sum of a whole model is held
            if name in chunk:
                own = None if terms is None else {name: terms[name]}
                self._add({name: chunk[name]}, {name: factors[name]}, own)

    def _add(self, chunk: Factors, factors: Named, terms: Named | None) -> None:
        heavy = {} if terms is None or self._exact else self._heavy(chunk, factors, terms)
        found: dict[str, Tensor] = {}
        rounding: dict[str, float | Tensor] = {}
        for name, factor in chunk.items():
            if self._exact or (name in heavy and bool(heavy[name].all())):
                found[name] = factor.exact_sum(factors[name])
                heavy.pop(name, None)
                continue
            light_B = torch.where(heavy[name], 0.0, factors[name]) if name in heavy else factors[name]
            found[name], rounded = factor.sum_and_rounding(light_B, self.scales.get(name))
            if type(rounded) is not float or rounded != 0.0:
                rounding[name] = rounded
        for name in self._rounded_too_far(rounding) if rounding else ():
            found[name] = chunk[name].exact_sum(factors[name])
            heavy.pop(name, None)
        for name, heavy_B in heavy.items():
            index = heavy_B.nonzero()[:, 0]
            found[name] = found[name].double().add_(chunk[name][index].exact_sum(factors[name][index]))
        for name, factor in chunk.items():
            if type(factor) is SideBySide:
                found |= factor.apart(found.pop(name))
        self.join(found)

    def join(self, found: dict[str, Tensor]) -> None:
        """Add the sums of a chunk."""
        if self._shards is not None:
            for name in [name for name in found if name in self._shards]:
                self._shards.add(name, found.pop(name))
        for name in self.values.keys() & found.keys():
            found[name] = self.values[name].double().add_(found[name])
        self.values |= found

    def without_values(self, inverse_scales: Named) -> "_Sums":
        """Return sums of the same kind, under these scales, to which nothing was added."""
        return _Sums(self.like, self.clip, self.bound, inverse_scales, self._expected_size)

    def released(self) -> tuple[dict[str, Tensor], dict[str, Place]]:
        """Return the sums of all parameters, multiplied by the scales, in the public precision; and shards' places."""
        dtypes = {p.dtype: sum_dtype(p, self._expected_size) for p in {p.dtype: p for p in self.like.values()}.values()}
        found, places = dict[str, Tensor](), dict[str, Place]()
        for name, parameter in self.like.items():
            dtype = dtypes[parameter.dtype]
            if self._shards is not None and name in self._shards:
                found[name], places[name] = self._shards.result(name)
                continue
            if name not in self.values:
                found[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
                continue
            total = self.values[name]
            if name in self.scales:
                total = total.to(torch.promote_types(total.dtype, dtype)).mul_(self.scales[name])
            found[name] = total if total.dtype == dtype else total.to(dtype)
        return found, places

    def factors(self, found: "_Norms") -> dict[str, Tensor]:
        """Return the factors of the norms, in the precision of the products.

        It refuses a user's rule that gives others for half of the examples alone.
        """
        by_name = not self.is_own or hasattr(self.clip, "group_of")
        norms = found.with_zeros([name for name in self.like if name not in found]) if by_name else found
        factors = self._answer(norms)

        def alone(part: slice) -> Named:
            return self._answer({name: norm_B[part] for name, norm_B in norms.items()})

        # Factors that are not finite are refused later, with the bound.
        if not self.is_own and not same_for_halves(factors, alone):
            remedy = "use no maxima, means or quantiles of the batch"
            got = "factors that change with the rest of the batch"
            raise expected(type(self.clip).__name__, "factors", "to depend on one example each", got, remedy)
        return factors if norms is found else {name: factors[name] for name in found}

    def _answer(self, norms: Named) -> dict[str, Tensor]:
        """Return the rule's factors for these norms, one for every parameter and example; negligible ones become 0."""
        factors, remedy = self.clip.factors(norms, self.bound), "correct the rule: nothing was released"
        if factors.keys() != norms.keys():
            got = f"{sorted(factors)} for {sorted(norms)}"
            raise expected(type(self.clip).__name__, "factors", "for every parameter", got, remedy)
        distinct, shape = _distinct(factors), next(iter(norms.values())).shape
        if any(factor_B.shape != shape for factor_B in distinct):
            dims = {factor_B.dim() for factor_B in distinct}
            # B is private.
            got = f"tensors of {max(dims)} dimensions" if dims != {1} else "tensors of a different length"
            raise expected(type(self.clip).__name__, "factors", "to be of shape (B,)", got, remedy)
        held = [hardshrink(factor_B.to(self._dtype), _LOST) for factor_B in distinct]  # float32 holds no others
        return _in_place_of(distinct, held, factors)

    def _heavy(self, chunk: Factors, factors: Named, terms: Named) -> dict[str, Tensor]:
        """Return the masks of examples that are not light, by the parameters that have any."""
        term_NB, heavy = _products(factors, terms), dict[str, Tensor]()
        largest = cast("list[float]", term_NB.amax(1).tolist())
        for name, term_B, most in zip(factors, term_NB, largest, strict=True):
            limit = min(chunk[name].usual_terms, self._most_light) * self.bound
            if not most <= limit:  # nan is heavy
                heavy[name] = ~(term_B <= limit)
        return heavy

    def _rounded_too_far(self, rounding: Mapping[str, float | Tensor]) -> list[str]:
        """Return the parameters whose products with Jacobians are rounded too far, with those of earlier chunks."""
        found = {name: value for name, value in rounding.items() if not isinstance(value, Tensor)}
        if tensors := {name: value for name, value in rounding.items() if isinstance(value, Tensor)}:
            values = cast("list[float]", torch.stack(list(tensors.values())).tolist())
            found |= dict(zip(tensors, values, strict=True))
        for name, value in found.items():
            self._pulled[name] = self._pulled.get(name, 0.0) + value
        return [name for name in found if not self._pulled[name] <= _PULLED * self.bound]  # nan is not


def _side_by_side(sums: _Sums, chunk: Factors, inverse_scales: Named) -> tuple[Factors, Named]:
    """Join small gradients that are written out, under the name of their first parameter; return them with scales.

    All share their factors, which this library's own rules compute from the joint norm of a group of parameters.
    """
    if not sums.is_own:
        return chunk, inverse_scales
    group_of = getattr(sums.clip, "group_of", None)  # of PerLayer; others have one group
    groups: dict[tuple[object, ...], dict[str, Dense]] = {}
    dense = {name: factor for name, factor in chunk.items() if type(factor) is Dense}
    if len(dense) < 2:
        return chunk, inverse_scales
    most = _SMALL if is_on_processor(next(iter(dense.values())).grads_BP) else 4 * _SMALL
    for name, factor in dense.items():
        if factor.shape.numel() <= most:
            key = group_of and group_of(name), name in inverse_scales, factor.grads_BP.dtype
            if key not in groups:
                groups[key] = {}
            groups[key][name] = factor
    found, scales = dict(chunk), dict(inverse_scales)
    for parts in groups.values():
        first = next(iter(parts))
        if len(parts) == 1:
            continue
        if first in scales:
            scales[first] = torch.cat([scales[name].flatten() for name in parts])
        for name in parts:
            del found[name]
        found[first] = SideBySide.of(parts)
    return found, scales


class _Unread(NamedTuple):
    """The norms and factors of a chunk before anything is read from the device."""

    norms: "_Norms"
    factors: dict[str, Tensor]
    lengths: Tensor  # of the contributions
    longest: float  # that a length may be, if the norm is finite
    masks: list[Tensor]  # of norms that may be wrong, of all examples or of parts of them
    heavy: list[tuple[Tensor, float]]  # term bounds, and the most that they may be: else some examples are not light

    def numbers(self) -> Tensor:
        """Return what is to be read, in one tensor: the greatest of these, and whether a mask holds."""
        found = [self.lengths.amax(), *(bound_B.amax() for bound_B, _ in self.heavy)]
        found += [torch.cat(self.masks).any().to(found[0].dtype)] if self.masks else []
        return torch.stack(found) if len(found) > 1 else found[0][None]

    def flags(self) -> tuple[bool, bool]:
        """Return whether any example is spoiled, and whether any is heavy, by one look at the device."""
        limits = [self.longest, *(most for _, most in self.heavy), *([0.0] if self.masks else [])]
        numbers = cast("list[float]", self.numbers().tolist())
        is_finite, *within = [number <= most for number, most in zip(numbers, limits, strict=True)]  # nan is not
        return not (is_finite and all(within[len(self.heavy) :])), not all(within[: len(self.heavy)])

    def flagged(self) -> Tensor:
        """Return which examples are spoiled or heavy; a mask of some of the examples fails."""
        heavy = [~(bound_B <= most) for bound_B, most in self.heavy]
        return torch.stack([~(self.lengths <= self.longest), *heavy, *self.masks]).any(0)


def _norms_and_factors(sums: _Sums, chunk: Factors, inverse_scales: Named, counted_B: Tensor | None = None) -> _Unread:
    """Return the norms and factors by one of this library's own rules, as a function of tensors without a read.

    If no flag is set, they equal those of the checked way, bit for bit, and all examples are light.
    """
    with unread() as masks:
        norms = _Norms((name, factor.norms(inverse_scales.get(name))) for name, factor in chunk.items())
        factors = sums.factors(norms)
        if counted_B is not None:
            distinct = _distinct(factors)
            counted = [torch.where(counted_B, factor_B, 0.0) for factor_B in distinct]
            factors = _in_place_of(distinct, counted, factors)
        # The norms of the terms of parameters that have the same factors, limit and shape.
        alike: dict[tuple[int, float, int, torch.Size, torch.dtype], list[tuple[Tensor, ...]]] = {}
        for name, factor in chunk.items():
            terms = factor.term_norms(inverse_scales.get(name))
            if terms is not None:
                key = id(factors[name]), sums.limit(factor), len(terms), terms[0].shape, terms[0].dtype
                alike.setdefault(key, []).append(terms)
    length_B = _lengths(factors, norms)
    by_id = {id(factor_B): factor_B for factor_B in factors.values()}
    heavy = [
        (by_id[factor_id] * _most(terms), limit * (1 - _ROUNDING)) for (factor_id, limit, *_), terms in alike.items()
    ]
    # A norm that is not finite has no length within C: its factor is 0 or nan, and their product nan.
    return _Unread(norms, factors, length_B, sums.bound * (1 + _ROUNDING), masks, heavy)


def _most(terms: list[tuple[Tensor, ...]]) -> Tensor:
    """Return the largest term bound of each example for any of the parameters, shape (B,), float64."""
    product_NBT, *others = [_at_least_tiny(torch.stack(each)) for each in zip(*terms, strict=True)]
    for other_NBT in others:
        product_NBT = product_NBT * other_NBT
    return product_NBT.sum(2, dtype=torch.float64).amax(0)


def _at_least_tiny(norms_NBT: Tensor) -> Tensor:
    # The squares of less may underflow in float32, by up to 1e-19 for each entry of a vector.
    return norms_NBT if norms_NBT.dtype == torch.float64 else norms_NBT.clamp(min=1e-14)


def _add_clipped(sums: _Sums, chunk: Factors, inverse_scales: Named, counted_B: Tensor | None = None) -> RawClipping:
    """Clip a chunk of gradients and add it to `sums`; return its norms and factors.

    Everything that could be wrong is asked in one look at the device. Nothing is added before the answer is known. If
    it is yes, the chunk takes the checked way, which treats each example as if it were alone.
    """
    known = None
    if sums.is_own:
        found = _norms_and_factors(sums, chunk, inverse_scales, counted_B)
        is_spoiled, is_heavy = found.flags()
        if not is_spoiled and not is_heavy:
            sums.add(chunk, found.factors, None)
            return RawClipping(found.norms.joint_B, _smallest(found.factors), found.lengths, 0)
        known = None if is_spoiled or counted_B is not None else found.norms

    def added(chunk: Factors) -> RawClipping:
        return _add_clipped(sums, chunk, inverse_scales)

    if counted_B is not None:
        return added(_masked(chunk, counted_B))
    norms = known or _Norms((name, factor.norms(inverse_scales.get(name))) for name, factor in chunk.items())
    finite_B = torch.isfinite(norms.joint_B)
    if nonfinite := int((~finite_B).sum()):
        # Zero times NaN is NaN, so the gradient itself is replaced by 0, not only its factor.
        chunk = _masked(chunk, finite_B)
        norms = _Norms((name, torch.where(finite_B, each_B, 0.0)) for name, each_B in norms.items())
    factors = sums.factors(norms)
    if nonfinite == len(finite_B):  # as where a computed weight is not finite, which makes NaN of zeros
        return RawClipping(norms.joint_B, _smallest(factors), torch.zeros_like(norms.joint_B), nonfinite)
    terms, canceling_B = _terms(chunk, norms, factors, sums.bound, inverse_scales)
    if canceling_B is not None and bool(canceling_B.any()):
        raw = added(_masked(chunk, ~canceling_B))
        # An example's gradient that is written out is one tensor with one norm, and one term of the sum.
        few = examples_per_block(sum(int(factor.shape.numel()) for factor in chunk.values()), finite_B)
        for index in cast("tuple[Tensor, ...]", canceling_B.nonzero()[:, 0].split(few)):
            alone = added({name: factor[index].written_out() for name, factor in chunk.items()})
            raw.raw_norms[index], raw.raw_factors[index] = alone.raw_norms, alone.raw_factors
            raw.raw_lengths[index] = alone.raw_lengths
            nonfinite += alone.raw_nonfinite_examples
        return replace(raw, raw_nonfinite_examples=raw.raw_nonfinite_examples + nonfinite)
    length_B = _require_bound(factors, norms, sums.clip, sums.bound)
    sums.add(chunk, factors, terms)
    return RawClipping(norms.joint_B, _smallest(factors), length_B, nonfinite)


def _masked(chunk: Factors, kept_B: Tensor) -> Factors:
    """Return the gradients, with zeros for every example that is not kept."""
    return {name: factor.mask(kept_B) for name, factor in chunk.items()}


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


def _lengths(factors: Named, norms: Named) -> Tensor:
    """Return the lengths of the contributions, shape (B,), float64."""
    distinct = _distinct(factors)
    if len(distinct) == 1:  # one factor for all parameters comes out of the norm
        return distinct[0] * joint_norm_of(norms)
    return _joint_norm([factors[name] * norm_B for name, norm_B in norms.items()])


def _require_bound(factors: Named, norms: Named, clip: Clipping, bound: float) -> Tensor:
    """Return the contributions' lengths, shape (B,); raise PrivacyError if one exceeds C."""
    length_B = _lengths(factors, norms).abs()  # a user's factors may be negative
    # An infinite factor times a norm of zero is NaN, which is in no bound.
    if not bool((length_B <= bound * (1 + _ROUNDING)).all()):
        remedy = "correct the rule: nothing was released"
        finite = all(bool(torch.isfinite(factor_B).all()) for factor_B in _distinct(factors))
        got = "a longer contribution" if finite else "a factor that is not finite"  # its length is private
        raise expected(type(clip).__name__, "factors", f"to bound contributions by {bound}", got, remedy)
    return length_B


class _Norms(dict[str, Tensor]):
    """Norms by parameter name, each of shape (B,), with the joint norm of all parameters, which is computed once."""

    def __init__(self, norms: Iterable[tuple[str, Tensor]], joint_B: Tensor | None = None) -> None:
        super().__init__(norms)
        self.joint_B = _joint_norm(list(self.values())) if joint_B is None else joint_B

    def with_zeros(self, missing: Sequence[str]) -> "_Norms":
        """Return the same norms, with zeros for the missing names."""
        if not missing:
            return self
        return _Norms({**self, **dict.fromkeys(missing, torch.zeros_like(self.joint_B))}.items(), self.joint_B)


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
    return list(dict(zip(map(id, factors.values()), factors.values(), strict=True)).values())


def _in_place_of(distinct: Sequence[Tensor], others: Sequence[Tensor], factors: Named) -> dict[str, Tensor]:
    """Return factors by name, with others in place of the distinct ones."""
    if len(others) == 1:
        return dict.fromkeys(factors, others[0])
    found = dict(zip(map(id, distinct), others, strict=True))
    return {name: found[id(factor_B)] for name, factor_B in factors.items()}


def _smallest(factors: Named) -> Tensor:
    """Return the smallest factor of each example, shape (B,)."""
    distinct = _distinct(factors)
    return distinct[0] if len(distinct) == 1 else torch.stack(distinct).amin(0)


def _joint_norm(norms: Iterable[Tensor]) -> Tensor:
    """Return each example's norm over all parameters, given its norm for each; shape (B,)."""
    each = list(norms)
    return torch.hypot(*each) if len(each) == 2 else cast(Tensor, torch.linalg.vector_norm(torch.stack(each), dim=0))
