"""Features with statistics taken out, and several blocks of features side by side, in rows of norm 1."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast, overload

import torch
from torch import Tensor

from privgrad.errors import expected, require_in, require_integer, require_positive
from privgrad.features.extractor import Extractor, Public, Rows, eigen, marks_of, public_rows
from privgrad.types import PRIVATE_MOMENT

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

    block = 4096

    def __init__(
        self, low: float | Sequence[float] | Tensor, high: float | Sequence[float] | Tensor, *, source: str = _DECLARED
    ) -> None:
        start, end = torch.as_tensor(low).float(), torch.as_tensor(high).float()
        start, end = start + torch.zeros_like(end), end + torch.zeros_like(start)  # of one shape
        if start.ndim > 1 or not bool((start.isfinite() & end.isfinite() & (start < end)).all()):
            got = f"{start.tolist()} and {end.tolist()}"
            raise expected("Scaled", "low and high", "to be finite, and low < high", got)
        super().__init__(source, low=start, high=end)

    def features(self, rows: Any) -> Tensor:
        moved = self._moved(rows)
        return unit_rows(torch.cat([moved, torch.ones(rows.shape[0], 1, device=rows.device)], dim=1))

    def _moved(self, rows: Any) -> Tensor:
        """Return columns moved to [-1, 1]."""
        low, high = self.get_buffer("low"), self.get_buffer("high")
        if low.ndim and rows.shape[1:] != low.shape:  # one column would be scaled by all bounds
            raise expected(type(self).__name__, "rows", f"to have shape (n, {len(low)})", tuple(rows.shape))
        return ((2 * rows.float() - low - high) / (high - low)).clamp(-1, 1)


class Splines(Scaled):
    """The hat codes of all columns side by side (`Hats`), with equally spaced knots on public bounds; rows of norm 1.

    A linear model on them is a sum of piecewise linear functions of the columns.

    Attributes:
        low, high, source: as in Scaled.
        knots: the number of knots of each column, >= 2.
    Raises:
        PrivacyError: as Scaled; or there are fewer than 2 knots.
    Privacy:
        As Scaled.
    """

    options = ("knots",)

    def __init__(self, low: Any, high: Any, knots: int = 16, *, source: str = _DECLARED) -> None:
        require_integer("Splines", "knots", knots, 2)
        super().__init__(low, high, source=source)
        self.knots = knots

    def features(self, rows: Any) -> Tensor:
        last = self.knots - 1
        places = (self._moved(rows) + 1) * (last / 2)  # from 0 to the last knot
        apart = (places[..., None] - torch.arange(self.knots, device=places.device)).abs()
        return unit_rows((1 - apart).clamp(min=0).flatten(1))


class Whitened(Extractor):
    """An extractor whose features are centered and whitened by public statistics, with rows of norm 1.

    Computes: x -> x / |x|; minus the public mean; coordinates in the public eigenvectors, of the `keep` largest
    eigenvalues l; times (l + ridge * mean l) ** -power; x / |x|.

    Whitening gives directions equal shares of the noise that DP-SGD adds. On Fashion-MNIST it gained one point.

    Args:
        extractor: the extractor whose features are whitened.
        public: public rows, with their source. A few thousand rows; more than `keep`.
        power: in [0, 1/2]: 0 for none, 1/2 for whitening in full.
        ridge: > 0, in mean eigenvalues: it bounds how much rare directions grow.
        keep: number of directions, at most the width of the features and the number of public rows less one.
            None: as many as possible.
        source: where bare public rows come from.
    Raises:
        PrivacyError: a number is out of its range, or bare rows have no source.
    Privacy:
        A private second moment may take the place of public rows: see `from_second_moment`.
    """

    options: ClassVar[tuple[str, ...]] = ("power", "ridge", "keep")
    extractor: Extractor
    power: float
    ridge: float
    keep: int

    def __init__(
        self,
        extractor: Extractor,
        public: Public | Rows,
        *,
        power: float = 0.375,
        ridge: float = 0.3,
        keep: int | None = None,
        source: str | None = None,
    ) -> None:
        given = public_rows("Whitened", public, source)
        rows = unit_rows(extractor(given.rows))
        mean, most = rows.mean(0), min(len(rows) - 1, rows.shape[1])
        self._finish(extractor, given.source, mean, _directions(rows - mean), most, power, ridge, keep)
        self.register_buffer("marks", marks_of(given.rows))

    @classmethod
    def from_second_moment(
        cls, extractor: Extractor, moment: Tensor, *, power: float = 0.375, ridge: float = 0.3, keep: int | None = None
    ) -> Self:
        """Return an extractor that is whitened by a private second moment, where there are no public rows.

        The arguments are as in Whitened, except `moment` in place of public rows: (width, width), from
        `release_second_moment(unit_rows(features), bound=1.0, ...)`. Its scale does not matter.

        Raises:
            PrivacyError: the moment is not a square symmetric matrix, or a number is out of its range.
        Privacy:
            The release must be charged: whiten with the result of `release_second_moment` only. The rest is
            post-processing. Nothing is subtracted, as the mean of the rows was not released.
        """
        if moment.ndim != 2 or moment.shape[0] != moment.shape[1] or not torch.equal(moment, moment.T):
            raise expected("Whitened", "moment", "to be a symmetric matrix", tuple(moment.shape))
        made = cls.__new__(cls)
        mean = torch.zeros(len(moment))
        made._finish(extractor, PRIVATE_MOMENT, mean, eigen(moment.float()), len(moment), power, ridge, keep)
        return made

    def _finish(
        self,
        extractor: Extractor,
        source: str,
        mean: Tensor,
        eigenpairs: tuple[Tensor, Tensor],
        most: int,
        power: float,
        ridge: float,
        keep: int | None,
    ) -> None:
        """Scale the directions by (l + ridge * mean l) ** -power, and keep at most `most` of them."""
        require_in("Whitened", "power", power, "[0, 0.5]")
        require_positive("Whitened", "ridge", ridge)
        chosen = most if keep is None else keep
        require_in("Whitened", "keep", chosen, f"[1, {most}]", "give more public rows for more directions")
        values, vectors = eigenpairs
        scales = (values + ridge * values.sum() / most) ** -power
        directions = (vectors * scales)[:, :chosen].contiguous()
        super().__init__(combined(extractor.source, source), mean=mean, directions=directions)
        self.extractor, self.power, self.ridge, self.keep = extractor, float(power), float(ridge), chosen

    def features(self, rows: Any) -> Tensor:
        made = unit_rows(self.extractor.features(rows).float()) - self.get_buffer("mean")
        return unit_rows(made @ self.get_buffer("directions"))


class Joined(Extractor):
    """Several extractors side by side, in rows of norm 1."""

    options: ClassVar[tuple[str, ...]] = ("weights",)
    weights: list[float | None]  # norm of each part before the whole row is scaled; None leaves it as it is

    def __init__(self, extractors: Sequence[Extractor], weights: Sequence[float | None]) -> None:
        super().__init__(combined(*(extractor.source for extractor in extractors)))
        self.weights = list(weights)
        for index, extractor in enumerate(extractors):
            self.add_module(str(index), extractor)

    def features(self, rows: Any) -> Tensor:
        parts = [cast(Extractor, self.get_submodule(str(i))).features(rows).float() for i in range(len(self.weights))]
        return _joined(parts, self.weights)


@overload
def join(*blocks: Tensor | tuple[Tensor, float]) -> Tensor: ...
@overload
def join(*blocks: Extractor | tuple[Extractor, float]) -> Extractor: ...
def join(*blocks: Any) -> Tensor | Extractor:
    """Return features side by side, in rows of norm 1: of tensors a tensor, of extractors an extractor.

    Args:
        *blocks: tensors of shape (n, width), floating point, or extractors. A pair of a block and a weight > 0 first
            scales the block's rows to norm `weight`; without a weight they stay as they are.
    Returns:
        Rows of norm 1, (n, sum of widths). For k one-hot columns, this divides each code by the square root of k.
    Raises:
        PrivacyError: a weight is not positive, or a tensor is not of floating point.
        RuntimeError: there are no blocks, or their numbers of rows differ.
        TypeError: tensors and extractors are mixed.
    """
    pairs: list[tuple[Any, float | None]] = [block if isinstance(block, tuple) else (block, None) for block in blocks]
    weights = [weight for _, weight in pairs]
    for weight in weights:
        if weight is not None:
            require_positive("join", "a weight", weight)
    parts = [part for part, _ in pairs]
    if parts and all(isinstance(part, Extractor) for part in parts):
        return Joined(parts, weights)
    return _joined(parts, weights)


def unit_rows(rows: Tensor) -> Tensor:
    """Return each row divided by its Euclidean norm, shape (n, ...); rows of zeros stay zeros.

    Args:
        rows: shape (n, ...), floating point.
    Raises:
        PrivacyError: `rows` is not a floating-point tensor of at least two dimensions.
    """
    if not rows.is_floating_point() or rows.ndim < 2:
        got = f"{rows.dtype} of shape {tuple(rows.shape)}"
        raise expected("unit_rows", "rows", "to be floating point, of shape (n, ...)", got)
    # The squares of a row in half precision would overflow above norm 256: the row would be divided by infinity.
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    norms = wide.flatten(1).square().sum(1).sqrt().view(-1, *[1] * (rows.ndim - 1))
    return (wide / torch.where(norms > 0, norms, 1.0)).to(rows.dtype)


def combined(*sources: str) -> str:
    """Return several sources as one text for the ledger; "no data" only if there is nothing else."""
    parts = dict.fromkeys(part for source in sources for part in source.split("; ") if part != "no data")
    return "; ".join(parts) or "no data"


def _directions(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of the second moment of rows, falling, and its eigenvectors as columns."""
    if len(centered) >= centered.shape[1]:
        return eigen(centered.T @ centered / len(centered))
    values, vectors = eigen(centered @ centered.T / len(centered))  # of the smaller of the two matrices
    values = values.clamp(min=1e-7 * float(values[0]))
    return values, centered.T @ (vectors / (values * len(centered)).sqrt())


def _joined(parts: Sequence[Tensor], weights: Sequence[float | None]) -> Tensor:
    """Return features side by side, each scaled to its weight, in rows of norm 1."""
    scaled = [part if weight is None else unit_rows(part) * weight for part, weight in zip(parts, weights, strict=True)]
    return unit_rows(torch.cat(scaled, dim=1))
