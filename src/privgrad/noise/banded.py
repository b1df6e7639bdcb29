"""Banded: noise that partly cancels over the steps, from a banded factor of the prefix sums."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import expected, require_integer
from privgrad.types import NoiseMemory, NoisyGradient

_DIGITS = 6  # of the coefficients, after the point
_LONGEST = 512  # bands
_SMALLEST = 1e-3  # c_0 and the sum of the coefficients, over their norm: w and long sums stay finite
_FLAT = 1e-9  # how far beyond 1 a root of the coefficients may lie, by rounding; their norm stays at most 1


@dataclass(frozen=True)
class Banded:
    """Noise with memory: what one step adds, later steps partly take back, so that sums over steps have less noise.

    Computes: w_t = (z_t - c_1 w_{t-1} - ... - c_{b-1} w_{t-b+1}) / c_0 with independent standard normals z, that is,
    w = F^-1 z with the lower triangular Toeplitz matrix F of the coefficients c. Step t gets the noise sigma C w_t.
    Each person is in one of b groups, drawn at random, and step t draws by Poisson from group t mod b, at b times the
    plan's rate. PrivateGradient and `plan.batches` do both.

    Args:
        bands: b >= 2, the number of coefficients, groups, and steps from one draw of a person to the next.
        coefficients: c_0, ..., c_{b-1}, with c_0 > 0. They are divided by their norm. None: PrivacyPlan chooses those
            with the smallest error of the prefix sums over its steps.
        relative_error: the root mean square error of the prefix sums, over that of independent noise at the same
            epsilon. `PrivacyPlan.for_budget` computes it. A record only.
    Raises:
        PrivacyError: a number is out of its range.
    Privacy:
        One person moves the sums of the steps that draw from its group, by C in each. In z this is a change of C times
        the columns of F of these steps. Each column has norm 1 at most. Two of them are at least b steps apart, so no
        row of F has entries in both, and they are orthogonal. The releases therefore cost as much as ceil(T / b)
        Gaussian mechanisms, each Poisson sampled at b times the plan's rate. This also holds if later sums depend on
        earlier releases. The groups are drawn independently of the data, and nobody else's group changes with a person.
        docs/mathematics.md (6.3) to (6.5) has the steps of this proof.
    Reference:
        Choquette-Choo et al. 2023 (arXiv 2306.08153), on banded factors and cyclic Poisson sampling, and 2024 (arXiv
        2405.15913), on Toeplitz ones.
    """

    bands: int
    coefficients: tuple[float, ...] | None = None
    relative_error: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check the numbers, and divide the coefficients by their norm."""
        if isinstance(self.bands, np.integer):  # ledgers cannot hold numpy scalars
            object.__setattr__(self, "bands", int(self.bands))
        require_integer("Banded", "bands", self.bands, 2)
        if self.bands > _LONGEST:
            raise expected("Banded", "bands", f"to be at most {_LONGEST}", self.bands, "4 to 32 give most of the gain")
        if self.coefficients is not None:
            object.__setattr__(self, "coefficients", _checked(self.coefficients, self.bands))

    def __repr__(self) -> str:
        gain = self.relative_error
        return f"Banded(bands={self.bands})" if gain is None else f"Banded(bands={self.bands}, error {gain:.3f})"

    def for_steps(self, steps: int) -> "Banded":
        """Return this one with coefficients: the given ones, or the best ones for T >= bands steps."""
        if self.bands > steps:
            raise expected("Banded", "bands", f"to be at most {steps}, the steps", self.bands)
        if self.coefficients is not None:
            return self
        return replace(self, coefficients=best_coefficients(self.bands, steps))

    @property
    def chosen(self) -> tuple[float, ...]:
        """The coefficients, once they are known: those of a plan always are."""
        if self.coefficients is None:
            raise expected("Banded", "coefficients", "to be those of a plan: plan.correlation", None)
        return self.coefficients

    def std(self, step: int) -> float:
        """Return the standard deviation of w at a step, from 0."""
        return std_at(self.chosen, step)

    @property
    def sum_std(self) -> float:
        """The standard deviation of a long sum of w, over the root of its number of steps; 1 for independent noise."""
        return 1 / abs(sum(self.chosen))  # docs/mathematics.md (6.8)

    def prefix_error(self, steps: int) -> float:
        """Return the root mean square of the sums w_0 + ... + w_t over t < steps; sqrt((T + 1) / 2) without memory."""
        return _prefix_error(np.array(self.chosen), steps)


def response(coefficients: Sequence[float] | np.ndarray, steps: int) -> np.ndarray:
    """Return h with w_t = sum of h_k z_{t-k}, shape (steps,): the power series of 1 / c."""
    impulse = np.zeros(steps)
    impulse[:1] = 1.0
    # scipy takes long to import, and has no types.
    return np.asarray(import_module("scipy.signal").lfilter([1.0], np.asarray(coefficients, dtype=float), impulse))


@lru_cache(maxsize=64)
def _stds(coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    """Return the standard deviation of w at each of the first steps, shape (steps,): docs/mathematics.md (6.6)."""
    return np.sqrt(np.cumsum(np.square(response(coefficients, steps))))


def std_at(coefficients: tuple[float, ...], step: int) -> float:
    """Return the standard deviation of w at a step."""
    return float(_stds(coefficients, 1 << step.bit_length())[step])


def square_root(bands: int) -> np.ndarray:
    """Return the first coefficients of (1 - x)^(-1/2), with norm 1: docs/mathematics.md (6.9)."""
    found = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, bands))])
    return found / np.linalg.norm(found)


def best_coefficients(bands: int, steps: int) -> tuple[float, ...]:
    """Return the coefficients of norm 1 with about the smallest `prefix_error`, to six digits, by L-BFGS."""
    minimize, lfilter = import_module("scipy.optimize").minimize, import_module("scipy.signal").lfilter
    left = np.arange(steps, 0, -1.0)  # number of prefix sums that hold the k-th term

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        coefficients = np.concatenate(([1.0], free))  # c_0 = 1 is held fixed
        with np.errstate(all="ignore"):  # far from the best ones the response grows without bound
            sums = np.cumsum(response(coefficients, steps))
            error = float(left @ np.square(sums))
            norm = float(coefficients @ coefficients)
            if not math.isfinite(error):
                return 1e300, np.zeros(bands - 1)
            # The response h has dh/dc_j = -(h * h), moved on by j steps: docs/mathematics.md (6.10).
            moved = np.asarray(lfilter([1.0], coefficients, sums))
            slopes = np.array([-2 * (left[j:] * sums[j:]) @ moved[: steps - j] for j in range(1, bands)])
            return math.log(error) + math.log(norm), slopes / error + 2 * free / norm

    start = square_root(bands)
    found = minimize(loss, start[1:] / start[0], jac=True, method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-13})
    best = np.concatenate(([1.0], np.asarray(found.x)))
    best /= np.linalg.norm(best)
    if _prefix_error(best, steps) > _prefix_error(start, steps):
        best = start
    return tuple((np.trunc(best * 10**_DIGITS) / 10**_DIGITS).tolist())  # towards 0: the norm stays at most 1


def _prefix_error(coefficients: np.ndarray, steps: int) -> float:
    """Return the root mean square of the prefix sums' noise for coefficients of norm 1: docs/mathematics.md (6.7)."""
    sums = np.cumsum(response(coefficients, steps))
    return math.sqrt(float(np.arange(steps, 0, -1.0) @ np.square(sums)) / steps)


def _checked(coefficients: object, bands: int) -> tuple[float, ...]:
    """Return the coefficients divided by their norm, unless it is 1 already; errors as Banded."""
    given = np.asarray(coefficients, dtype=float).reshape(-1)
    with np.errstate(all="ignore"):
        norm = float(np.linalg.norm(given))
    is_finite = len(given) == bands and 0 < norm < math.inf
    if not is_finite or not given[0] / norm > _SMALLEST or not abs((given / norm).sum()) > _SMALLEST:
        condition = f"to be {bands} finite numbers, with a first one and a sum above {_SMALLEST:g} of their norm"
        raise expected("Banded", "coefficients", condition, given.tolist())
    # 1 / c is bounded if all zeros of c(x) lie outside of the unit circle: the roots here are their inverses.
    radius = max((abs(root) for root in np.roots(given / norm)), default=0.0)
    if radius > 1 + _FLAT:
        got = f"noise that grows by {radius:.4g} per step"
        raise expected("Banded", "coefficients", "to have a bounded inverse", got)
    is_unit = 1 - bands * 10.0**-_DIGITS < norm <= 1  # as rounded coefficients are; with more, sensitivity would rise
    return tuple((given if is_unit else given / norm).tolist())


class Recursion:
    """The last noises w of a stream of releases, from which the next one follows: docs/mathematics.md (6.1). SECRET.

    w begins at the step `start` of `stream`, the name of the stream of z. Steps from there to the first release are
    drawn too.

    Privacy:
        Who knows z and the releases knows the sums. The past noises stay in memory, and no checkpoint holds them.
    """

    def __init__(self, correlation: Banded, start: int, stream: str = "") -> None:
        self.correlation, self._start, self._next, self._stream = correlation, start, start, stream
        self._layout: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._past: dict[object, Any] = {}  # arrays on the CPU, tensors elsewhere

    def steps_to(self, step: int, values: Iterable[Tensor]) -> range:
        """Return the steps whose noise must be drawn for the release of a step."""
        layout = [(value.shape, value.dtype, value.device) for value in values]
        if self._layout and layout != self._layout:
            condition, got = "to stay the same while noise has memory", f"{len(layout)} after {len(self._layout)}"
            remedy = "freeze parameters before the first step"
            raise expected("add_noise", "the parameters and their shapes", condition, got, remedy)
        if step < self._next:
            raise expected("add_noise", "step", f"to be at least {self._next}", step)
        self._layout = layout
        return range(self._next, step + 1)

    def moved(self, place: object, normals: np.ndarray, step: int) -> None:
        """Overwrite z of one step with w, for one place of the sum, and remember it."""
        rolled, row = self._weights(step)
        past = self._past.get(place)
        if past is None:
            past = self._past[place] = np.zeros((len(rolled), normals.size), normals.dtype)
        normals -= rolled.astype(normals.dtype) @ past
        normals /= self.correlation.chosen[0]
        past[row] = normals

    def moved_on_device(self, place: object, normals: Tensor, step: int) -> None:
        """Do the same as `moved` to a tensor."""
        rolled, row = self._weights(step)
        past = self._past.get(place)
        if past is None:
            past = self._past[place] = normals.new_zeros((len(rolled), *normals.shape))
        # Not by a product: an ambient autocast or TF32 would round it, and then w is no linear function of z.
        for values, weight in zip(past, rolled.tolist(), strict=True):
            normals.add_(values, alpha=-weight)
        normals.div_(self.correlation.chosen[0])
        past[row] = normals

    def released(self, gradient: NoisyGradient, step: int) -> NoisyGradient:
        """Move on after a release, and state what its noise is, given the noise_std of independent noise."""
        self._next = step + 1
        memory = NoiseMemory(self.correlation.chosen, step - self._start, self._stream)
        std = self.correlation.std(memory.step)
        independent = cast(float, gradient.noise_std)
        gain = self.correlation.sum_std / std
        return replace(gradient, noise_std=independent * std, noise_gain=gain, noise_memory=memory)

    def __reduce__(self) -> str:
        """Refuse copies and pickles: they would hold the past noises."""
        raise expected("Recursion", "past noise", "to have one holder", "a copy or a pickle")

    def _weights(self, step: int) -> tuple[np.ndarray, int]:
        """Return c_1, c_2, ... in the order of the rows that hold w_{t-1}, w_{t-2}, ..., and the row of the oldest."""
        later = np.array(self.correlation.chosen[1:])
        rows = (step - 1 - np.arange(len(later))) % len(later)
        rolled = np.empty_like(later)
        rolled[rows] = later
        return rolled, step % len(later)
