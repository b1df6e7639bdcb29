"""The factors of a convolution's weight: by patches where there are few places, by torch's own kernels elsewhere.

Shape suffixes: B examples, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.gradient.factors import Factor, Outer, cached, kept, largest_scale, place_norms, wide


class Convolution(Factor):
    """The weight of a convolution in 1, 2 or 3 dimensions, shape (O, I / groups, *kernel).

    Args:
        x: inputs, shape (B parts, I, *space).
        b: gradients of the outputs, shape (B parts, O, *places).
        kernel, stride, padding, dilation: in space.
        groups: of channels.
        parts: how many neighbouring rows are one example, whose gradients add up.
    """

    def __init__(
        self, x: Tensor, b: Tensor, *, kernel: Sequence[int], groups: int, parts: int = 1, **options: Sequence[int]
    ) -> None:
        super().__init__(len(x) // parts, torch.Size((b.shape[1], x.shape[1] // groups, *kernel)))
        self.x, self.b, self.groups, self.parts = wide(x), wide(b), groups, parts
        self._options = options

    def __getitem__(self, examples: slice) -> "Convolution":
        first, end, _ = examples.indices(self.examples)
        rows = slice(first * self.parts, end * self.parts)
        return self._like(self.x[rows], self.b[rows])

    def dense(self) -> Tensor:
        """For few places a product of patches; else one grouped convolution, an example a group."""
        if self.examples == 0:
            return self.b.new_zeros(0, *self.shape)
        if self._few_places:
            return self.unfolded().dense().view(self.examples, *self.shape)
        # Examples are groups of channels; the parts of one are the batch, over which the gradient is a sum.
        split = (z.view(self.examples, self.parts, *z.shape[1:]) for z in (self.x.contiguous(), self.b.contiguous()))
        x, b = (z.transpose(0, 1).flatten(1, 2) for z in split)
        shape = (self.examples * self.shape[0], *self.shape[1:])
        return self._weight_gradient(x, b, shape, self.examples * self.groups).view(self.examples, *self.shape)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        b = self.b * self._of_rows(weight_B).to(self.b.dtype).view(-1, *[1] * (self.b.dim() - 1))
        return self._weight_gradient(self.x, b, tuple(self.shape), self.groups)

    def keep(self, kept_B: Tensor) -> "Convolution":
        rows = self._of_rows(kept_B)
        return self._like(kept(self.x, rows), kept(self.b, rows))

    def merge(self, parts: int) -> "Convolution":
        return Convolution(
            self.x, self.b, kernel=self.shape[2:], groups=self.groups, parts=self.parts * parts, **self._options
        )

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        x_B, b_B = place_norms(self.x.flatten(1)), place_norms(self.b.flatten(1))
        of_rows_B = (x_B * b_B).view(self.examples, self.parts).sum(1)
        return largest_scale(inverse_scales) * self.shape[2:].numel() ** 0.5 * of_rows_B

    @property
    def worth_keeping(self) -> bool:
        return not self._by_inner_products

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is not None or not self._by_inner_products:
            return super().norms(inverse_scales)
        few = self._split(cached(self._places * self.parts * int(self.shape[1:].numel())))
        return torch.cat([cast(Convolution, part).unfolded().norms_by_inner_products() for part in few])

    def unfolded(self) -> Outer:
        """The same as a linear map of patches, shape (O, I * kernel); for one group."""
        patches = F.pad(self.x, [size for size in reversed(self._options["padding"]) for _ in range(2)])
        for dim, size in enumerate(self.shape[2:]):
            stride, dilation = self._options["stride"][dim], self._options["dilation"][dim]
            patches = patches.unfold(2 + dim, (size - 1) * dilation + 1, stride)[..., ::dilation]
        space = self.b.dim() - 2
        patches = patches.movedim(1, 1 + space)
        found = Outer(patches.flatten(1, space).flatten(2), self.b.flatten(2).mT)
        return found if self.parts == 1 else found.merge(self.parts)

    @property
    def _places(self) -> int:
        return int(self.b.shape[2:].numel())

    @property
    def _few_places(self) -> bool:
        return self.groups == 1 and self._places <= 64

    @property
    def _by_inner_products(self) -> bool:
        outputs, fan_in = self.shape[0], int(self.shape[1:].numel())
        return self._few_places and 2 * self._places * self.parts * (fan_in + outputs) < fan_in * outputs

    def _of_rows(self, values_B: Tensor) -> Tensor:
        return values_B if self.parts == 1 else values_B.repeat_interleave(self.parts)

    def _like(self, x: Tensor, b: Tensor) -> "Convolution":
        return Convolution(x, b, kernel=self.shape[2:], groups=self.groups, parts=self.parts, **self._options)

    def _weight_gradient(self, x: Tensor, b: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        stand_in = x.new_empty(1).expand(shape)  # only its shape is read
        stride, padding, dilation = (self._options[name] for name in ("stride", "padding", "dilation"))
        backward = cast("Callable[..., tuple[Any, Tensor, Any]]", torch.ops.aten.convolution_backward)
        mask = (False, True, False)
        return backward(b, x, stand_in, None, stride, padding, dilation, False, [0] * len(padding), groups, mask)[1]
