"""The factor of a convolution's weight.

With few output positions, a convolution is treated as a linear map of patches. Otherwise torch's own kernels compute
the gradients. That of a depthwise convolution is itself a convolution, of inputs with output gradients, which takes
many times less than torch's own derivative.

Shape suffixes: B examples, I inputs, O outputs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.engine.factors.outer import SMALL, Outer, bounding_product, position_norms, unread_norms
from privgrad.gradient.factor import (
    TERMS,
    Dense,
    Examples,
    Factor,
    LinearMapFactor,
    as_linear_map,
    at_least_float32,
    examples_per_block,
    in_one,
    masked,
)
from privgrad.processes import AT_ONCE, is_on_processor

FEW = 64  # most output positions for which patches are written out
_FEWEST = 16  # most output positions for which products of patches are faster than a grouped convolution


@dataclass(frozen=True)
class Geometry:
    """The sizes that define a convolution in 1, 2 or 3 dimensions; one number per dimension of space."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def positions(self, space: Sequence[int]) -> tuple[int, ...]:
        sizes = zip(space, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * pad - apart * (k - 1) - 1) // step + 1 for n, k, step, pad, apart in sizes)

    def convolved(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        sizes, zeros = (self.stride, self.padding, self.dilation), (0,) * len(self.kernel)
        return torch.convolution(x, weight, None, *sizes, False, zeros, groups)

    def by_patches(self, positions: Sequence[int]) -> bool:
        """Return whether to write patches out, which pays off for few positions and one group."""
        return self.groups == 1 and math.prod(positions) <= FEW

    @property
    def overlap(self) -> int:
        """The most patches that contain one entry of the input."""
        sizes = zip(self.kernel, self.stride, self.dilation, strict=True)
        return math.prod(-(-k * math.gcd(step, apart) // step) for k, step, apart in sizes)

    @property
    def is_pointwise(self) -> bool:
        """Whether every patch is one position of the input, so that patches are a view of the inputs."""
        ones = (1,) * len(self.kernel)
        return self.kernel == self.stride == ones and not any(self.padding) and self.groups == 1

    def patches(self, x: Tensor) -> Tensor:
        """Return the patch of x, shape (rows, I, *space), at each position, shape (rows, positions, I * kernel)."""
        if self.is_pointwise:
            return x.flatten(2).mT
        space = x.dim() - 2
        if space <= 2 and is_on_processor(x):  # F.unfold is fast there, but only knows 2 dimensions
            flat = (1,) * (2 - space)
            kernel, stride, dilation = ((*flat, *sizes) for sizes in (self.kernel, self.stride, self.dilation))
            padding = (*(0 for _ in flat), *self.padding)
            return F.unfold(x.reshape(*x.shape[:2], *flat, *x.shape[2:]), kernel, dilation, padding, stride).mT
        return self._view(x).flatten(1, space).flatten(2)

    def patches_at(self, x: Tensor, places: Tensor) -> Tensor:
        """Return `patches(x).flatten(0, 1)[places]`, without writing out the others."""
        view = self._view(x)
        return view[torch.unravel_index(places, view.shape[: x.dim() - 1])].flatten(1)

    def _view(self, x: Tensor) -> Tensor:
        # All patches, shape (rows, *positions, I, *kernel).
        padding, space = [size for size in reversed(self.padding) for _ in range(2)], x.dim() - 2
        patches = F.pad(x, padding) if any(padding) else x
        for dim, (size, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            patches = patches.unfold(2 + dim, (size - 1) * dilation + 1, stride)[..., ::dilation]
        return patches.movedim(1, 1 + space)


def convolve(weight: Factor, x: Tensor, geometry: Geometry) -> Tensor:
    """Convolve each example's x, (B parts, I, *space), with its own weight, (O, I / groups, *kernel)."""
    size, positions = weight.examples, geometry.positions(x.shape[2:])
    if geometry.by_patches(positions):
        patches = geometry.patches(x)
        found = as_linear_map(weight).of_patches().apply(patches.reshape(size, -1, patches.shape[2]))
        return found.reshape(*patches.shape[:2], -1).mT.reshape(len(x), -1, *positions)
    # One grouped convolution: each example is a group of channels, and its parts are the batch.
    rows = x.reshape(size, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
    found = geometry.convolved(rows, weight.dense().flatten(0, 1).to(x.dtype), geometry.groups * size)
    return found.reshape(len(found), size, -1, *positions).transpose(0, 1).flatten(0, 1)


class Convolution(LinearMapFactor):
    """The gradients of a convolution's weight, shape (O, I / groups, *kernel).

    Args:
        x: inputs, shape (B parts, I, *space).
        b: gradients of the outputs, shape (B parts, O, *positions).
        geometry: of the convolution.
        parts: number of neighboring rows that belong to one example; their gradients add up.
    """

    usual_terms: ClassVar[float] = 8.0  # those of many positions cancel in part
    _terms: ClassVar[int] = 4 * TERMS  # shorter parts would take twice the time

    def __init__(self, x: Tensor, b: Tensor, geometry: Geometry, *, parts: int = 1) -> None:
        super().__init__(len(x) // parts, torch.Size((b.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)))
        self.x, self.b, self.geometry, self.parts = at_least_float32(x), at_least_float32(b), geometry, parts

    def __getitem__(self, examples: Examples) -> "Convolution":
        if isinstance(examples, Tensor):
            rows = examples[:, None] * self.parts + torch.arange(self.parts, device=examples.device)
            return self._like(self.x[rows.flatten()], self.b[rows.flatten()])
        first, end, _ = examples.indices(self.examples)
        rows = slice(first * self.parts, end * self.parts)
        return self._like(self.x[rows], self.b[rows])

    def dense(self) -> Tensor:
        if self.examples == 0:
            return self.b.new_zeros(0, *self.shape)
        few = self._few_positions and self._positions <= _FEWEST
        # A graphics card's kernels take the groups of a grouped convolution one after the other.
        small = not is_on_processor(self.b) and self.geometry.groups == 1 and self._patches <= AT_ONCE
        if self.geometry.is_pointwise or few or small:
            if not is_on_processor(self.b) and self.examples > self._per_block(int(self.shape.numel())):
                return self.written_out().grads_BP  # in parts: the patches of all take too much memory
            return self.of_patches().dense().view(self.examples, *self.shape)
        if self._is_correlation:
            return self._correlation()
        # Each example is a group of channels. Its parts are the batch, over which torch sums the gradient.
        split = (z.view(self.examples, self.parts, *z.shape[1:]) for z in (self.x.contiguous(), self.b.contiguous()))
        x, b = (z.transpose(0, 1).flatten(1, 2) for z in split)
        shape = (self.examples * self.shape[0], *self.shape[1:])
        return self._weight_gradient(x, b, shape, self.examples * self.geometry.groups).view(self.examples, *self.shape)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        if self._is_correlation:
            return Dense(self.dense()).weighted_sum(weight_B)
        b = self.b * self._of_rows(weight_B).to(self.b.dtype).view(-1, *[1] * (self.b.dim() - 1))
        return self._weight_gradient(self.x, b, tuple(self.shape), self.geometry.groups)

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return Dense(self.dense()).sum_in_parts(weight_B) if self._is_correlation else super().sum_in_parts(weight_B)

    def mask(self, kept_B: Tensor) -> "Convolution":
        rows = self._of_rows(kept_B)
        return self._like(masked(self.x, rows), masked(self.b, rows))

    def merge(self, parts: int) -> "Convolution":
        return Convolution(self.x, self.b, self.geometry, parts=self.parts * parts)

    def __add__(self, other: Factor) -> Factor:
        if (
            not isinstance(other, Convolution)
            or self.geometry != other.geometry
            or self.x.shape[2:] != other.x.shape[2:]
        ):
            return super().__add__(other)

        def joined(*pair: Tensor) -> Tensor:
            return torch.cat([z.reshape(self.examples, -1, *z.shape[1:]) for z in pair], 1).flatten(0, 1)

        x, b = joined(self.x, other.x), joined(self.b, other.b)
        return Convolution(x, b, self.geometry, parts=self.parts + other.parts)

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        of_inputs, of_outputs = self._term_norms(position_norms, inverse_scales)
        return (of_inputs * of_outputs).sum(1)

    def term_norms(self, inverse_scales: Tensor | None = None) -> tuple[Tensor, ...] | None:
        return self._term_norms(unread_norms(self.b), inverse_scales)

    def _term_norms(self, norms: Callable[[Tensor], Tensor], inverse_scales: Tensor | None) -> tuple[Tensor, Tensor]:
        x, b = self.x, self.b
        if inverse_scales is not None:
            of_outputs, of_inputs = bounding_product(inverse_scales)
            spread = (-1, *[1] * (x.dim() - 2))
            x, b = x * of_inputs.repeat(self.geometry.groups).view(spread), b * of_outputs.view(spread)
        x_BP, b_BP = (norms(z.flatten(1)).view(self.examples, self.parts) for z in (x, b))
        return x_BP, b_BP * self.geometry.overlap**0.5

    @property
    def positions(self) -> int:
        return self._positions * self.parts

    @property
    def worth_keeping(self) -> bool:
        return not self.by_inner_products

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is not None or not self.by_inner_products:
            return super().norms(inverse_scales)
        chunks = self._split(self._per_block(self._patches))
        return in_one([cast(Convolution, part).of_patches().norms_by_inner_products() for part in chunks])

    def of_patches(self) -> Outer:
        """Return the gradients as gradients of a linear map of patches, shape (O, I * kernel); for one group."""
        found = Outer(self.geometry.patches(self.x), self.b.flatten(2).mT)
        return found if self.parts == 1 else found.merge(self.parts)

    def row_products(self, rows_OF: Tensor) -> Tensor:
        """Return the inner product of each row of each gradient with the row of a common matrix, shape (B, O)."""
        # The convolution with these rows as its weight is faster than the same product with patches.
        rows = rows_OF.reshape(self.shape).to(self.x.dtype)
        outputs = self.geometry.convolved(self.x, rows, self.geometry.groups)
        return (outputs * self.b).flatten(2).sum(2).view(self.examples, self.parts, -1).sum(1)

    @property
    def _positions(self) -> int:
        return int(self.b.shape[2:].numel())

    @property
    def _few_positions(self) -> bool:
        return self.geometry.by_patches(self.b.shape[2:])

    @property
    def _patches(self) -> int:
        return self.positions * int(self.shape[1:].numel())

    def _per_block(self, floats: int) -> int:
        return examples_per_block(floats if is_on_processor(self.b) else max(floats, self._patches), self.b)

    @property
    def _is_correlation(self) -> bool:
        """Whether `_correlation` computes the gradients, for which graphics cards have no fast kernels."""
        depthwise = self.shape[1] == 1 and self.shape[0] == self.geometry.groups > 1
        return depthwise and is_on_processor(self.x) and (self.x.dim() > 3 or self.geometry.dilation == (1,))

    def _correlation(self) -> Tensor:
        """Return all gradients of a depthwise convolution, shape (B, O, 1, *kernel)."""
        # g[k] = sum over t of b[t] x[stride t + dilation k], for each row and channel by itself: a convolution of x
        # with the kernel b, where stride and dilation are exchanged.
        geometry, channels = self.geometry, len(self.x) * self.shape[0]
        x, b = self.x.reshape(1, channels, *self.x.shape[2:]), self.b.reshape(channels, 1, *self.b.shape[2:])
        found = replace(geometry, stride=geometry.dilation, dilation=geometry.stride).convolved(x, b, channels)
        for dim, size in enumerate(geometry.kernel):  # a stride that leaves a rest adds shifts beyond the kernel
            found = found.narrow(2 + dim, 0, size)
        return found.reshape(self.examples, self.parts, *self.shape).sum(1)

    @property
    def by_inner_products(self) -> bool:
        """Whether norms by inner products of patches take less time than the gradients themselves."""
        outputs, fan_in = self.shape[0], int(self.shape[1:].numel())
        fewer = self._few_positions and 2 * self._positions * self.parts * (fan_in + outputs) < fan_in * outputs
        return fewer and (outputs * fan_in > SMALL or is_on_processor(self.b))

    @property
    def has_fewer_patches(self) -> bool:
        """Whether an example has fewer patches than outputs, so that a map of its patches takes fewer operations."""
        return self._few_positions and self._positions * self.parts < self.shape[0]

    def _of_rows(self, values_B: Tensor) -> Tensor:
        return values_B if self.parts == 1 else values_B.repeat_interleave(self.parts)

    def _like(self, x: Tensor, b: Tensor) -> "Convolution":
        return Convolution(x, b, self.geometry, parts=self.parts)

    def _weight_gradient(self, x: Tensor, b: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        """Return the gradient of a weight of this shape, summed over the rows by torch's kernel."""
        stand_in = x.new_empty(1).expand(shape)  # only its shape is read
        stride, padding, dilation = self.geometry.stride, self.geometry.padding, self.geometry.dilation
        backward: Callable[..., tuple[Any, Tensor, Any]] = torch.ops.aten.convolution_backward
        mask = (False, True, False)
        return backward(b, x, stand_in, None, stride, padding, dilation, False, [0] * len(padding), groups, mask)[1]
