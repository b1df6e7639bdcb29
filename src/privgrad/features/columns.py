"""Codes of one column of a table: numbers and categories, as public as the arguments that define them."""

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
        object.__setattr__(self, "edges", _rising("Bins", "edges", self.edges, 3))

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
        return cls(_equal(low, high, bins, log), missing)

    @property
    def width(self) -> int:
        """The number of codes."""
        return len(self.edges) - 1 + self.missing

    def __call__(self, numbers: Tensor | Sequence[float]) -> Tensor:
        """Return the one-hot codes of numbers, float32 (n,) -> (n, width); NaN is a missing number."""
        values, absent = _numbers("Bins", numbers, self.missing)
        places = torch.bucketize(values, torch.tensor(self.edges[1:-1], dtype=torch.float64), right=True)
        return F.one_hot(places.masked_fill(absent, len(self.edges) - 1), self.width).float()


@dataclass(frozen=True)
class Hats:
    """Codes of numbers that a linear model turns into a piecewise linear function: one code per public knot.

    A number between two knots has two codes, which sum to 1: each is larger, the nearer the number is to that knot. A
    number below the first knot counts as that knot, and a number above the last knot as the last one.

    Attributes:
        knots: at least two increasing finite numbers.
        missing: whether NaN has a code, the last one. Otherwise NaN is an error.
    Raises:
        PrivacyError: the knots are not at least two increasing finite numbers.
    Privacy:
        Knots must not come from the private numbers: quantiles of the data are not public.
    """

    knots: tuple[float, ...]
    missing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "knots", _rising("Hats", "knots", self.knots, 2))

    @classmethod
    def equal(cls, low: float, high: float, knots: int = 16, *, log: bool = False, missing: bool = False) -> "Hats":
        """Return equally spaced knots on a public range; the arguments are those of `Bins.equal`.

        Raises:
            PrivacyError: a number is out of its range.
        """
        require_integer("Hats.equal", "knots", knots, 2)
        return cls(_equal(low, high, knots - 1, log), missing)

    @property
    def width(self) -> int:
        """The number of codes."""
        return len(self.knots) + self.missing

    def __call__(self, numbers: Tensor | Sequence[float]) -> Tensor:
        """Return the codes of numbers, float32 (n,) -> (n, width); NaN is a missing number."""
        values, absent = _numbers("Hats", numbers, self.missing)
        knots, last = torch.tensor(self.knots, dtype=torch.float64), len(self.knots) - 1
        values = values.masked_fill(absent, self.knots[0]).clamp(self.knots[0], self.knots[-1])
        left = torch.bucketize(values, knots[1:-1], right=True)
        share = (values - knots[left]) / (knots[left + 1] - knots[left])
        codes = torch.zeros(len(values), self.width, dtype=torch.float64)
        codes.scatter_(1, left[:, None], (1 - share)[:, None]).scatter_(1, left[:, None] + 1, share[:, None])
        if self.missing:
            codes[absent] = F.one_hot(torch.tensor(last + 1), self.width).double()
        return codes.float()


@dataclass(frozen=True)
class OneHot:
    """One-hot codes of categories: one code per public value.

    Attributes:
        values: the public categories, at least one, all different.
        other: whether all unknown categories share a code, after those of `values`. Otherwise they are errors.
        missing: whether None has a code, the last one. Otherwise None is an error.
    Raises:
        PrivacyError: there are no values, or two are equal.
    Privacy:
        Values must not come from the private column: a category that only one person has would identify this person.
    """

    values: tuple[Hashable, ...]
    other: bool = False
    missing: bool = False

    def __post_init__(self) -> None:
        values = tuple(self.values)
        if not values or len(set(values)) < len(values):
            raise expected("OneHot", "values", "to be at least one value, all different", list(values))
        object.__setattr__(self, "values", values)

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


def _rising(function: str, name: str, numbers: Iterable[float], least: int) -> tuple[float, ...]:
    """Return numbers as a tuple; raise PrivacyError unless they are so many, increasing and finite."""
    found = tuple(map(float, numbers))
    if len(found) < least or not all(low < high for low, high in pairwise(found)) or math.inf in map(abs, found):
        words = {2: "two", 3: "three"}
        raise expected(function, name, f"to be at least {words[least]} increasing finite numbers", list(found))
    return found


def _equal(low: float, high: float, parts: int, log: bool) -> tuple[float, ...]:
    """Return the ends of so many parts of a range, of equal width; with `log`, for log(1 + x)."""
    ends = (math.log1p(low), math.log1p(high)) if log else (low, high)
    steps = [ends[0] + (ends[1] - ends[0]) * k / parts for k in range(1, parts)]
    inner = map(math.expm1, steps) if log else steps
    # Rounded, so that an edge such as 9 is not 9.000000000000002, which would move the number 9 to another bin.
    return low, *(float(f"{edge:.12g}") for edge in inner), high


def _numbers(function: str, numbers: Tensor | Sequence[float], has_missing: bool) -> tuple[Tensor, Tensor]:
    """Return numbers in float64 and which of them are missing, both (n,)."""
    values = torch.as_tensor(numbers, dtype=torch.float64)
    absent = values.isnan()
    if values.ndim != 1:
        raise expected(function, "numbers", "to have shape (n,)", tuple(values.shape))
    if not has_missing and bool(absent.any()):
        remedy = "fill it in, or set missing = True for a code of its own"
        raise expected(function, f"number {int(absent.nonzero()[0])}", "to be given", math.nan, remedy)
    return values, absent
