"""Codes of one column of a table: bins of numbers, and categories, as public as the arguments that define them."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.errors import described, expected, require_integer


@dataclass(frozen=True)
class Bins:
    """One-hot codes of numbers: one code per bin between public edges.

    A number below the first edge is in the first bin, and a number above the last edge is in the last bin. Bins contain
    their lower edge; the last bin also contains its upper edge.

    Attributes:
        edges: at least three increasing finite numbers; m + 1 edges make m bins.
        missing: whether NaN has a code, the last one. Otherwise NaN is an error.
    Raises:
        PrivacyError: the edges are not at least three increasing finite numbers.
    Privacy:
        Edges must not come from the private numbers: quantiles of the data are not public.
    """

    edges: tuple[float, ...]
    missing: bool = False

    def __post_init__(self) -> None:
        edges = tuple(map(float, self.edges))
        if len(edges) < 3 or not all(low < high for low, high in pairwise(edges)) or math.inf in map(abs, edges):
            raise expected("Bins", "edges", "to be at least three increasing finite numbers", list(edges))
        object.__setattr__(self, "edges", edges)

    @classmethod
    def equal(cls, low: float, high: float, bins: int = 16, *, log: bool = False, missing: bool = False) -> "Bins":
        """Return bins of equal width over a public range.

        Args:
            low: lower end of the range, finite.
            high: upper end of the range, finite and above `low`.
            bins: number of bins, >= 2.
            log: whether widths are equal for log(1 + x), for numbers with a heavy tail; `low` is then above -1.
            missing: as in Bins.
        Raises:
            PrivacyError: a number is out of its range.
        """
        require_integer("Bins.equal", "bins", bins, 2)
        ends = (math.log1p(low), math.log1p(high)) if log else (low, high)
        steps = [ends[0] + (ends[1] - ends[0]) * k / bins for k in range(1, bins)]
        inner = map(math.expm1, steps) if log else steps
        # Rounded, so that an edge such as 9 is not 9.000000000000002, which would move the number 9 to another bin.
        return cls((low, *(float(f"{edge:.12g}") for edge in inner), high), missing)

    @property
    def width(self) -> int:
        """The number of codes."""
        return len(self.edges) - 1 + self.missing

    def __call__(self, numbers: Tensor | Sequence[float]) -> Tensor:
        """Return the one-hot codes of numbers, float32 (n,) -> (n, width); NaN is a missing number."""
        values = torch.as_tensor(numbers, dtype=torch.float64)
        absent = values.isnan()
        if values.ndim != 1:
            raise expected("Bins", "numbers", "to have shape (n,)", tuple(values.shape))
        if not self.missing and bool(absent.any()):
            remedy = "fill it in, or set missing = True for a code of its own"
            raise expected("Bins", f"number {int(absent.nonzero()[0])}", "to be given", math.nan, remedy)
        places = torch.bucketize(values, torch.tensor(self.edges[1:-1], dtype=torch.float64), right=True)
        return F.one_hot(places.masked_fill(absent, len(self.edges) - 1), self.width).float()


@dataclass(frozen=True)
class OneHot:
    """One-hot codes of categories: one code per public value.

    Attributes:
        values: the public categories, at least one, all different.
        other: whether all unknown categories share a code, after those of `values`. Otherwise they are errors.
        missing: whether None has a code, the last one. Otherwise None is an error.
    Privacy:
        Values must not come from the private column: a category that only one person has would identify this person.
    """

    values: tuple[Hashable, ...]
    other: bool = False
    missing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))

    @property
    def width(self) -> int:
        """The number of codes."""
        return len(self.values) + self.other + self.missing

    def __call__(self, categories: Iterable[Hashable]) -> Tensor:
        """Return the one-hot codes of n categories, float32 (n, width); None is a missing category."""
        code = {value: index for index, value in enumerate(self.values)}
        if self.missing:
            code[None] = self.width - 1
        places: list[int] = []
        for index, category in enumerate(categories):
            place = code.get(category, len(self.values) if self.other and category is not None else None)
            if place is None:
                remedy = "add it to values if it is public, or set other or missing"
                raise expected("OneHot", f"category {index}", "to be one of the values", described(category), remedy)
            places.append(place)
        return F.one_hot(torch.tensor(places, dtype=torch.int64), self.width).float()
