"""Numbers within public bounds, as features.

Users and `estimators` make it. The privacy guarantee rests on this: the bounds are arguments, and each row of the
result depends on that row only.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from privgrad.errors import expected
from privgrad.features.extractor import Extractor
from privgrad.features.whitened import unit_rows

_DECLARED = "bounds as declared by the user"  # a source: nothing can check it


class Scaled(Extractor):
    """Columns moved from their public bounds to [-1, 1], next to a constant 1, in rows of norm 1.

    A number outside of its bounds counts as the nearest bound. The constant takes the place of a bias.

    Attributes:
        low, high: the bounds of each column, shape (width,), or () for all columns; buffers.
        source: where the bounds come from. The ledger and statements show it.
    Raises:
        PrivacyError: the bounds are not finite, or a low is not below its high.
    Privacy:
        Bounds must not come from the private rows: the smallest and largest number identify two of them.
    """

    options: ClassVar[tuple[str, ...]] = ()
    block = 4096

    def __init__(
        self, low: float | Sequence[float] | Tensor, high: float | Sequence[float] | Tensor, *, source: str = _DECLARED
    ) -> None:
        start, end = torch.as_tensor(low).float(), torch.as_tensor(high).float()
        start, end = start + torch.zeros_like(end), end + torch.zeros_like(start)  # of one shape
        if start.ndim > 1 or not bool((start.isfinite() & end.isfinite() & (start < end)).all()):
            got = f"{start.tolist()} and {end.tolist()}"
            raise expected("Scaled", "low and high", "to be finite, and low < high", got, "give public bounds")
        super().__init__(source, low=start, high=end)

    def features(self, rows: Any) -> Tensor:
        low, high = self.get_buffer("low"), self.get_buffer("high")
        if not isinstance(rows, Tensor):
            remedy = "give them as a tensor or a numpy array"
            raise expected("Scaled", "rows", "to be numbers", f"a {type(rows).__name__}", remedy)
        if low.ndim and rows.shape[1:] != low.shape:
            condition, remedy = f"to have shape (n, {len(low)})", "give one column for each bound"
            raise expected("Scaled", "rows", condition, tuple(rows.shape), remedy)
        moved = (2 * rows.float() - low - high) / (high - low)
        return unit_rows(torch.cat([moved.clamp(-1, 1), torch.ones(rows.shape[0], 1, device=rows.device)], dim=1))
