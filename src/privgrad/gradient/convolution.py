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
        x: inputs, shape (B, I, *space).
        b: gradients of the outputs, shape (B, O, *places).
        kernel, stride, padding, dilation: in space.
        groups: of channels.
    """

    def __init__(self, x: Tensor, b: Tensor, *, kernel: Sequence[int], groups: int, **options: Sequence[int]) -> None:
        super().__init__(len(x), torch.Size((b.shape[1], x.shape[1] // groups, *kernel)))
        self.x, self.b, self.groups = wide(x), wide(b), groups
        self._options = options

    def __getitem__(self, examples: slice) -> "Convolution":
        return self._like(self.x[examples], self.b[examples])

    def dense(self) -> Tensor:
        """For few places a product of patches; else one grouped convolution, an example a group."""
        if self.examples == 0:
            return self.b.new_zeros(0, *self.shape)
        if self._few_places:
            return self.unfolded().dense().view(self.examples, *self.shape)
        x, b = (z.reshape(1, -1, *z.shape[2:]) for z in (self.x, self.b))
        shape = (self.examples * self.shape[0], *self.shape[1:])
        return self._weight_gradient(x, b, shape, self.examples * self.groups).view(self.examples, *self.shape)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        b = self.b * weight_B.to(self.b.dtype).view(-1, *[1] * (self.b.dim() - 1))
        return self._weight_gradient(self.x, b, tuple(self.shape), self.groups)

    def keep(self, kept_B: Tensor) -> "Convolution":
        return self._like(kept(self.x, kept_B), kept(self.b, kept_B))

    def terms(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        x_B, b_B = place_norms(self.x.flatten(1)), place_norms(self.b.flatten(1))
        return largest_scale(inverse_scales) * self.shape[2:].numel() ** 0.5 * x_B * b_B

    @property
    def worth_keeping(self) -> bool:
        return not self._by_inner_products

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is not None or not self._by_inner_products:
            return super().norms(inverse_scales)
        few = self._split(cached(self._places * int(self.shape[1:].numel())))
        return torch.cat([cast(Convolution, part).unfolded().norms_by_inner_products() for part in few])

    def unfolded(self) -> Outer:
        """The same as a linear map of patches, shape (O, I * kernel); for one group."""
        patches = F.pad(self.x, [size for size in reversed(self._options["padding"]) for _ in range(2)])
        for dim, size in enumerate(self.shape[2:]):
            stride, dilation = self._options["stride"][dim], self._options["dilation"][dim]
            patches = patches.unfold(2 + dim, (size - 1) * dilation + 1, stride)[..., ::dilation]
        space = self.b.dim() - 2
        patches = patches.movedim(1, 1 + space)
        return Outer(patches.flatten(1, space).flatten(2), self.b.flatten(2).mT)

    @property
    def _places(self) -> int:
        return int(self.b.shape[2:].numel())

    @property
    def _few_places(self) -> bool:
        return self.groups == 1 and self._places <= 64

    @property
    def _by_inner_products(self) -> bool:
        outputs, fan_in = self.shape[0], int(self.shape[1:].numel())
        return self._few_places and 2 * self._places * (fan_in + outputs) < fan_in * outputs

    def _like(self, x: Tensor, b: Tensor) -> "Convolution":
        return Convolution(x, b, kernel=self.shape[2:], groups=self.groups, **self._options)

    def _weight_gradient(self, x: Tensor, b: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        stand_in = x.new_empty(1).expand(shape)  # only its shape is read
        stride, padding, dilation = (self._options[name] for name in ("stride", "padding", "dilation"))
        backward = cast("Callable[..., tuple[Any, Tensor, Any]]", torch.ops.aten.convolution_backward)
        mask = (False, True, False)
        return backward(b, x, stand_in, None, stride, padding, dilation, False, [0] * len(padding), groups, mask)[1]
