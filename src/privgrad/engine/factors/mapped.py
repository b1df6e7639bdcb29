"""Per-example gradients of layers whose inputs are multiplied by a public matrix, still factored where possible.

A matrix may enlarge errors of rounding. `Mapped.term_bound` counts this, so that clipping writes an example out if its
terms cancel.

Shape suffixes: B examples, T positions of an example, O outputs, I inputs, P the shape of a parameter.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from privgrad.engine.factors.conv import Convolution
from privgrad.engine.factors.outer import Outer, RowRanges, largest_scale
from privgrad.gradient.factor import Dense, Examples, Factor, Scaled, at_least_float32, term_bound_of
from privgrad.gradient.transform import InputMap

# The mapped inputs of a chunk: layers that share inputs and a matrix, such as an attention's, map them once.
# To hold x and the matrix, the first two, keeps their memory and their identity from other tensors.
_Known = dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]


def with_mapped_inputs(chunk: Mapping[str, Factor], maps: Mapping[str, InputMap]) -> dict[str, Factor]:
    """Return a chunk's gradients after each map, by the name of a weight, has been applied to its layer's inputs."""
    found, known = dict(chunk), _Known()
    for name, own in maps.items():
        if name not in chunk:
            continue
        if own.bias is not None and own.bias not in chunk:
            own = replace(own, matrix=own.inner, bias=None)
        bias = None if own.bias is None else chunk[own.bias]
        found[name], mapped_bias = _mapped(chunk[name], bias, own, known)
        if own.bias is not None and mapped_bias is not None:
            found[own.bias] = mapped_bias
    return found


def _mapped(weight: Factor, bias: Factor | None, own: InputMap, known: _Known) -> tuple[Factor, Factor | None]:
    if isinstance(weight, Scaled) and isinstance(weight.inner, Outer | RowRanges | Convolution):
        inner, inner_bias = _mapped(weight.inner, None if bias is None else bias * (1 / weight.share), own, known)
        return inner * weight.share, None if inner_bias is None else inner_bias * weight.share
    if isinstance(weight, Outer):
        return _mapped_outer(weight, own, known)
    if isinstance(weight, RowRanges) and all(isinstance(part, Outer) for _, part in weight.parts):
        pairs = [(row, *_mapped_outer(cast(Outer, part), own, known)) for row, part in weight.parts]
        biases: list[tuple[int, Factor]] = [(row, part) for row, _, part in pairs if part is not None]
        joined = RowRanges(biases, weight.shape[:1]) if biases else None
        return RowRanges([(row, part) for row, part, _ in pairs], weight.shape), joined
    if isinstance(weight, Convolution) and (weight.by_inner_products or weight.has_fewer_patches):
        patches, patches_bias = _mapped_outer(weight.of_patches(), own, known)
        return Scaled(patches, 1.0, weight.shape), patches_bias
    mapped = Mapped(weight, bias, own)
    if bias is None:
        return mapped, None
    if isinstance(weight, Convolution):
        return mapped, Dense(_bias_of_convolution(weight, own))
    return mapped, mapped.of_bias()


def _mapped_outer(weight: Outer, own: InputMap, known: _Known) -> tuple[Outer, Dense | None]:
    x, grads = (weight.b_BTO, weight.a_BTI) if own.transposed else (weight.a_BTI, weight.b_BTO)
    views = (x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_neg(), x.is_conj())
    place = (id(own.matrix), own.bias is None, *views)
    if place not in known:
        known[place] = x, own.matrix, own.of_inputs(x)
    mapped = known[place][2]
    bias = None if own.bias is None else Dense((own.of_constant(x)[:, None] @ grads)[:, 0])
    return (Outer(grads, mapped) if own.transposed else Outer(mapped, grads)), bias


def _bias_of_convolution(weight: Convolution, own: InputMap) -> Tensor:
    """Return the mapped gradients of a convolution's bias, shape (B, O), without writing out those of its weight."""
    geometry, x, b = weight.geometry, weight.x, weight.b
    across, constant = (part.to(x) for part in own.constant)
    kernel = across.view(1, *weight.shape[1:]).expand(geometry.groups, *weight.shape[1:])
    shares = geometry.convolved(x, kernel, geometry.groups) + constant
    # The sum over positions of the output gradient times the mapped constant of the patch there.
    grads = b.reshape(len(b), geometry.groups, -1, *b.shape[2:]) * shares[:, :, None]
    return grads.reshape(weight.examples, weight.parts, weight.shape[0], -1).sum((1, 3))


class Mapped(Factor):
    """The mapped gradients of a weight, and of the map's bias, without closed form: written out, a few at a time."""

    usual_terms: ClassVar[float] = math.inf

    def __init__(self, weight: Factor, bias: Factor | None, own: InputMap) -> None:
        super().__init__(weight.examples, weight.shape)
        self.weight, self.bias, self.own = weight, bias, own

    def __getitem__(self, examples: Examples) -> "Mapped":
        return Mapped(self.weight[examples], None if self.bias is None else self.bias[examples], self.own)

    def dense(self) -> Tensor:
        bias = None if self.bias is None else at_least_float32(self.bias.dense())
        return self._of_gradients(self.weight.dense(), bias)

    def of_bias(self) -> Dense:
        found = list[Tensor]()
        for part in cast("list[Mapped]", self._split()):
            grads_BOI, bias_BO = self._inputs_last(part.weight.dense()), cast(Factor, part.bias).dense()
            across, constant = (x.to(grads_BOI) for x in self.own.constant)
            found.append(grads_BOI @ across + bias_BO * constant)
        return Dense(torch.cat(found))

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.exact_sum(weight_B).to(torch.promote_types(weight_B.dtype, torch.float32))

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        # In float64 before the matrix is applied: each gradient is then one exact term.
        bias = None if self.bias is None else self.bias.exact_sum(weight_B)[None]
        return self._of_gradients(self.weight.exact_sum(weight_B)[None], bias)[0]

    def mask(self, kept_B: Tensor) -> "Mapped":
        return Mapped(self.weight.mask(kept_B), None if self.bias is None else self.bias.mask(kept_B), self.own)

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Return |U| times the bounds of g_i and of its bias, because the product may cancel what g_i does not."""
        terms_B = term_bound_of(self.weight, None)
        if self.bias is not None:
            terms_B = terms_B + term_bound_of(self.bias, None)
        return largest_scale(inverse_scales) * self.own.bound * terms_B

    @property
    def positions(self) -> int:
        return self.weight.positions

    def _inputs_last(self, grads_BP: Tensor) -> Tensor:
        return grads_BP.mT if self.own.transposed else grads_BP.flatten(2)

    def _of_gradients(self, grads_BP: Tensor, bias_BO: Tensor | None) -> Tensor:
        mapped = self.own.of_gradients(self._inputs_last(grads_BP), bias_BO)
        return (mapped.mT if self.own.transposed else mapped).reshape(grads_BP.shape)
