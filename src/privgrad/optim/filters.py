"""Linear filters of released gradients, each with the exact noise of its output. Post-processing."""

import copy
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import expected, require_in
from privgrad.noise.banded import std_at
from privgrad.processes import blocks
from privgrad.types import NoiseMemory, NoisyGradient

__all__ = ["DOPPLER", "EMA", "Innovation", "LinearFilter"]
_STEPS, _SMALLEST = 1000, 1e-6  # for how many steps c_t is checked, and how small it may be


class LinearFilter:
    """A linear recursion over the released gradients g_t, given by its coefficients.

    Computes: m_t = sum of b_j g_{t-j} / s_{t-j} (j >= 0) - sum of a_j m_{t-j} (j >= 1), and y_t = s_t m_t / c_t, where
    s_t is the standard deviation of the noise in g_t, and c_t is the same recursion on ones, all from zeros. While the
    noise keeps its size, y_t is a weighted mean of the gradients so far, with weights that may be negative. If it
    changes, for instance with C, each gradient counts in units of its own noise. So gradients of a larger C, which are
    longer and noisier, do not outweigh those that follow.

    `noise_std` of the output is that of y_t, exactly: s_t times the root of the sum of h_k^2, over |c_t|. Here h is the
    response of m to a single gradient. This holds from the first step, and for noise that changes over time, except
    between none and some. `noise_gain` of the output says how much farther the sum of the outputs spreads than that of
    independent noise of this size. For noise with memory, s_t is its unit, the noise of w = 1, and h is the response of
    m to z.

    Args:
        b: coefficients of the gradients, from the present one backwards; at least one.
        a: coefficients of the outputs m, from the last one backwards, without the leading 1 of scipy's form.
    Raises:
        PrivacyError: a coefficient is not finite, the recursion is not stable, or c_t is 0 at some step or in the long
            run, as that of a difference is. In use: the gradient is filtered already, is the last one again, or has
            other parameters than the last one.
    Privacy:
        Post-processing.
    """

    def __init__(self, b: Sequence[float], a: Sequence[float] = ()) -> None:
        name = type(self).__name__
        self._b, self._a = tuple(map(float, b)), tuple(map(float, a))
        if not self._b or not all(map(math.isfinite, self._b + self._a)):
            raise expected(name, "b and a", "to be finite, and b not to be empty", f"b {self._b} and a {self._a}")
        radius = max((abs(root) for root in np.roots((1.0, *self._a))), default=0.0)
        if radius >= 1 - 1e-9:
            remedy = "if a is in scipy's form, leave out its leading 1" if self._a[0] == 1 else ""
            raise expected(name, "the recursion", "to be stable", f"a zero of size {radius:.4g}", remedy)
        order = max(1, len(self._a), len(self._b) - 1)
        # b_0, b_1, ... and 1, a_1, ... up to the order of the recursion
        self._padded = (
            [*self._b, *[0.0] * (order + 1 - len(self._b))],
            [1.0, *self._a, *[0.0] * (order - len(self._a))],
        )
        # One gradient moves the state: z becomes matrix @ z + entry * g.
        b_padded, a_padded = (torch.tensor(part, dtype=torch.float64) for part in self._padded)
        self._matrix = torch.diag(torch.ones(order - 1, dtype=torch.float64), 1)
        self._matrix[:, 0] -= a_padded[1:]
        self._entry = b_padded[1:] - a_padded[1:] * b_padded[0]
        # One mean of the last output and the gradient, as EMA: one pass over the numbers less.
        self._is_mean = len(self._a) == len(self._b) == 1 and math.isclose(self._b[0], 1 + self._a[0])
        ones, settled = torch.zeros_like(self._entry), sum(self._b) / (1 + sum(self._a))
        for step in range(1, _STEPS):
            correction = self._b[0] + float(ones[0])
            ones = self._matrix @ ones + self._entry
            if not abs(correction) > _SMALLEST * max(abs(settled), max(map(abs, self._b))):
                raise expected(name, f"c_{step}", "to differ from 0", correction)
        self._restart()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(b={self._b}, a={self._a})"

    is_public = True

    def begun(self) -> "LinearFilter":
        """Return a copy with fresh state, for one PrivateGradient."""
        own = copy.copy(self)
        own._restart()
        return own

    def __call__(self, gradient: NoisyGradient) -> NoisyGradient:
        """Return the filtered gradient, and move on by one step."""
        return self.moved_on(gradient, in_place=False)

    def moved_on(self, gradient: NoisyGradient, *, in_place: bool) -> NoisyGradient:
        """Do the same; with `in_place`, the gradient may be overwritten, because nobody else holds it."""
        name = type(self).__name__
        if self._last is not None and self._last() is gradient:
            remedy = "call the filter once for each released gradient, and keep what it returns"
            raise expected(name, "gradient", "to be a new one", "the last one again", remedy)
        if gradient.is_filtered:
            remedy = "multiply the polynomials of both filters, and give the products to one LinearFilter"
            raise expected(name, "gradient", "to be as it was released", "a gradient that was filtered before", remedy)
        self.require_shapes({name: value.shape for name, value in gradient.items()})
        self._last = weakref.ref(gradient)
        given_spread = self._follow(gradient.noise_memory)
        correction, spread = self._moved_on()
        values = {name: self._moved(name, gradient, correction, given_spread, in_place=in_place) for name in gradient}
        # noise_std of y_t: s_t times the root of the sum of h_k^2, over |c_t|
        given, share = gradient.noise_std, spread / abs(correction) / given_spread
        stds = given * share if isinstance(given, float | int) else {name: given[name] * share for name in gradient}
        # Once c_t has settled, the weights of one gradient in all outputs add up to 1: a sum of outputs has its noise.
        gain = gradient.noise_gain / share
        return NoisyGradient(values, stds, gradient.norm_distribution, noise_gain=gain, is_filtered=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the recursion, for a checkpoint."""
        return {
            "states": {name: [value.clone() for value in values] for name, values in self._states.items()},
            "ones": self._ones,
            "covariance": self._covariance,
            "noise": self._noise,
            "units": dict(self._units),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            PrivacyError: it is not the state of a filter of the same order, or holds NaN. The filter has not changed.
        """
        order = len(self._entry)
        ones, covariance, units = state["ones"], state["covariance"], dict(state["units"])
        coefficients, step, stream = state["noise"]
        states = {name: [value.clone() for value in values] for name, values in state["states"].items()}
        size = order + len(coefficients) - 1
        fits = units.keys() == states.keys() and (ones.shape, covariance.shape) == ((order,), (size, size))
        fits &= all(len(own) == order and len({value.shape for value in own}) == 1 for own in states.values())
        numbers = [ones, covariance, *(value for own in states.values() for value in own)]
        finite = all(bool(value.isfinite().all()) for value in numbers)
        if not (fits and finite):
            got = f"shapes {tuple(ones.shape)} and {tuple(covariance.shape)}" if finite else "NaN or inf"
            raise expected(type(self).__name__, "state", f"to be that of a filter of order {order}", got)
        self._ones, self._covariance = ones.clone(), covariance.clone()
        self._states, self._units = states, units
        self._noise = tuple(coefficients), step, stream
        self._last = None

    def require_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise PrivacyError unless these are the parameters of the last gradient."""
        held = {name: values[0].shape for name, values in self._states.items()}
        if held and held != dict(shapes):
            remedy = "use one filter per model, and freeze parameters before the first step"
            condition = f"to have the {len(held)} parameters of the last step, with their shapes"
            raise expected(type(self).__name__, "gradient", condition, f"{len(shapes)} parameters", remedy)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}  # a weak reference cannot be copied

    def _restart(self) -> None:
        self._states: dict[str, list[Tensor]] = {}  # by parameter
        self._units: dict[str, float | Tensor] = {}  # of the states, by parameter
        self._ones = torch.zeros_like(self._entry)  # the state for gradients of ones
        # Of a state and, with memory, of the last values of w, for noise of variance 1.
        self._covariance = torch.zeros_like(self._matrix)
        self._noise: tuple[tuple[float, ...], int, str] = (1.0,), -1, ""  # its coefficients, last step and stream
        self._last: weakref.ref[NoisyGradient] | None = None  # the last gradient

    def _follow(self, memory: NoiseMemory | None) -> float:
        """Take the noise's own memory into the covariance; return the standard deviation of w at this step, or 1."""
        order = len(self._entry)
        coefficients = (1.0,) if memory is None else memory.coefficients
        if coefficients != self._noise[0]:  # the filter begins here
            held, size = self._covariance, order + len(coefficients) - 1
            self._noise = coefficients, -1, ""
            self._covariance = held.new_zeros(size, size)
            self._covariance[:order, :order] = held[:order, :order]
        if memory is None:
            return 1.0
        if memory.step <= self._noise[1] or memory.stream != self._noise[2]:  # the noise begins again, with zeros
            self._noise = coefficients, -1, memory.stream
            self._covariance[order:, :] = 0.0
            self._covariance[:, order:] = 0.0
        waits = torch.zeros_like(self._entry)
        for _ in range(self._noise[1] + 1, memory.step):  # w moves on at steps without a gradient
            self._covariance = _moved(self._covariance, *_joined(torch.eye(order), waits, coefficients))
        self._noise = coefficients, memory.step, memory.stream
        return std_at(coefficients, memory.step)

    def _moved_on(self) -> tuple[float, float]:
        """Return c_t and the standard deviation of the noise in m_t, and move both recursions by one step."""
        correction = self._b[0] + float(self._ones[0])
        self._ones = self._matrix @ self._ones + self._entry
        coefficients = self._noise[0]
        matrix, entry = _joined(self._matrix, self._entry, coefficients)
        out = self._b[0] * _row(len(self._entry), coefficients)  # m_t = z_1 + b_0 w_t, as a row over the state
        out[0] += 1.0
        spread = math.sqrt(float(out @ self._covariance @ out) + (self._b[0] / coefficients[0]) ** 2)
        self._covariance = _moved(self._covariance, matrix, entry)
        return correction, spread

    def _moved(self, name: str, gradient: NoisyGradient, correction: float, spread: float, *, in_place: bool) -> Tensor:
        """Return y of one parameter after one more gradient, and move the state of the recursion."""
        # The state z holds sums of past values, times the last unit: m = b_0 g + z_1, z_i = b_i g - a_i m + z_{i+1}.
        # The memory of z_1 holds m and then the last z, so each pass moves the list on by one. A mean has the state m.
        given, order, (b, a) = gradient[name], len(self._entry), self._padded
        wide = given.to(torch.promote_types(given.dtype, torch.float32))
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = [torch.zeros_like(wide) for _ in range(order)]
        std = gradient.noise_std_of(name) / spread  # `spread` is that of w
        # 1 where there is no noise
        unit = std.where(std > 0, 1.0) if isinstance(std, Tensor) and std.dim() else float(std) or 1.0
        before = self._units.get(name, unit)
        self._units[name] = unit
        if isinstance(unit, Tensor) or isinstance(before, Tensor) or unit != before:  # the state keeps the new unit
            for value in state:
                value.mul_(unit / before)
        out = wide if in_place else torch.empty_like(wide)
        if self._is_mean:
            for g, y, m in blocks(wide, out, state[0]):
                m.lerp_(g, b[0])
                torch.mul(m, 1 / correction, out=y)
            return out.to(given.dtype)
        for g, y, *z in blocks(wide, out, *state):
            m = z[0].add_(g, alpha=b[0])
            for index in range(1, order):
                _add(z[index].sub_(m, alpha=a[index]), g, b[index])
            made = m / correction  # written last, because y may be g
            _add(m.mul_(-a[order]), g, b[order])
            y.copy_(made)
        state.append(state.pop(0))
        return out.to(given.dtype)


def _add(total: Tensor, given: Tensor, factor: float) -> None:
    """Add factor times `given` in place, without a pass over the numbers if the factor is 0."""
    if factor:
        total.add_(given, alpha=factor)


def _row(order: int, coefficients: tuple[float, ...]) -> Tensor:
    """Return how w = (z - c_1 w_1 - c_2 w_2 - ...) / c_0 depends on a filter's state and on its own last values w_i."""
    later = torch.tensor(coefficients[1:], dtype=torch.float64)
    return torch.cat([torch.zeros(order, dtype=torch.float64), -later / coefficients[0]])


def _joined(matrix: Tensor, entry: Tensor, coefficients: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return the `matrix` and `entry` of a filter, extended so that they move the last values of w by one z, too."""
    order, past = len(entry), len(coefficients) - 1
    into = torch.cat([entry, entry.new_zeros(past)])
    into[order : order + 1] = 1.0  # the newest of the last values
    whole = torch.outer(into, _row(order, coefficients))
    whole[:order, :order] += matrix
    if past > 1:
        whole[order + 1 :, order:-1] += torch.eye(past - 1)
    return whole, into / coefficients[0]


def _moved(covariance: Tensor, matrix: Tensor, entry: Tensor) -> Tensor:
    """Return the covariance of a state after one more step with noise of variance 1."""
    return matrix @ covariance @ matrix.T + torch.outer(entry, entry)


class EMA(LinearFilter):
    """An exponential moving average of the gradients, with Adam's start-up correction.

    Computes: m_t = (1 - weight) m_{t-1} + weight g_t;  y_t = m_t / (1 - (1 - weight)^t). In the long run its noise has
    the variance weight / (2 - weight) of that of a gradient.

    Args:
        weight: of the new gradient, from 1e-6 to 1.
    Raises:
        PrivacyError: weight is out of its range.
    """

    def __init__(self, weight: float) -> None:
        require_in("EMA", "weight", weight, "(0, 1]", "0.1 averages about the last 20 gradients")
        super().__init__([weight], [weight - 1])

    def __repr__(self) -> str:
        return f"EMA({self._b[0]:g})"


class Innovation(LinearFilter):
    """A filter of second order that averages the differences from the last output: FiBeR's.

    Computes: r_t = (1 - weight) r_{t-1} + weight (g_t - m_{t-1});  m_t = m_{t-1} + r_t, divided by the same recursion
    on ones. In the long run its noise has the variance (2 - weight) / (4 - 3 weight) of that of a gradient. This is
    the number that FiBeR subtracts from Adam's second moment, and so does AdamWBC behind this filter.

    Args:
        weight: of the new difference, in (0, 1].
    Raises:
        PrivacyError: weight is out of its range.
    Reference:
        FiBeR (arXiv 2605.03425). Deviation: the start-up is corrected.
    """

    def __init__(self, weight: float) -> None:
        require_in("Innovation", "weight", weight, "(0, 1]")
        super().__init__([weight], [2 * (weight - 1), 1 - weight])

    def __repr__(self) -> str:
        return f"Innovation({self._b[0]:g})"


class DOPPLER(LinearFilter):
    """A low-pass filter of first order: the paper's default.

    Computes: m_t = -a_1 m_{t-1} + b_0 g_t + b_1 g_{t-1}, divided by the same recursion on ones.

    Reference:
        Zhang et al. 2024 (arXiv 2408.13460).
    """

    def __init__(self, b: Sequence[float] = (0.1, 0.1), a: Sequence[float] = (-0.8,)) -> None:
        super().__init__(b, a)
