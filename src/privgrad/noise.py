"""The Gaussian mechanism: turns a ClippedSum into a NoisyGradient. Only this file draws noise for a release.

`PrivateGradient` calls `noise_generator` when it is made, and `add_noise` at each step. `release_record` calls both for
its sums. `PrivacyPlan.noise_std` calls `std_of_noise`. The privacy guarantee rests on this file.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.correlation import Banded
from privgrad.errors import expected, require_integer, require_nonnegative, require_positive
from privgrad.rng import BLOCK, Stream
from privgrad.threads import AT_ONCE, in_threads, on_lists
from privgrad.types import ClippedSum, NoiseMemory, NoisyGradient

__all__ = ["Banded", "Recursion", "add_noise", "grid_of", "noise_generator", "std_of_noise"]
# Share of the sensitivity that is reserved for the rounding of norms and sums, and again for rounding to the grid.
_ROUNDING = 2.0**-10
_FAR = 2.0**51  # in grid points: the most for sum and for noise; together they stay below 2^53, where float64 is exact
_FARTHEST = 11.5  # standard deviations: no noise on a grid is larger
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900  # grid and sensitivity: far inside of float64


def noise_generator(values: Iterable[Tensor], *, on_grid: bool = False) -> str:
    """Return the name of the generator that draws the noise for these values, as ledgers and reports record it.

    PrivateGradient gives the text to `Ledger.bind`, which compares it when a run resumes: with other words here, older
    ledgers could not be resumed. The guarantee does not rest on the text.

    Args:
        values: parameters, or sums of their gradients; only their devices and dtypes are used.
        on_grid: as in add_noise.
    Raises:
        PrivacyError: on_grid is set and a value is not on the CPU.
    """
    names: set[str] = set()
    for value in values:
        if value.device.type != "cpu":
            if on_grid:
                remedy = "move the model to the CPU, or plan without noise_on_grid"
                raise expected("add_noise", "values", "to be on the CPU for noise on a grid", value.device, remedy)
            names.add(f"torch's generator on {value.device.type} (Philox): not cryptographic")
        elif on_grid:
            names.add("AES-256-CTR, Box-Muller in float64, on a grid")
        else:
            dtype = torch.promote_types(value.dtype, torch.float32)
            names.add(f"AES-256-CTR, Box-Muller in {str(dtype).removeprefix('torch.')}")
    return "; ".join(sorted(names))


class Recursion:
    """The last noises w of a stream of releases, from which the next one follows: docs/mathematics.md (6.1). SECRET.

    PrivateGradient makes one for each stream of noise, and gives it to `add_noise`. An exception inside of `add_noise`
    may leave it between two steps: make a new one, with a new stream.

    Args:
        correlation: Banded, with its coefficients.
        start: the step of the stream at which w begins. Steps from there to the first release are drawn too.
        stream: public name of the stream of z.
    Privacy:
        Who knows z and the releases knows the sums. The past noises stay in memory, and no checkpoint holds them.
    """

    def __init__(self, correlation: Banded, start: int, stream: str = "") -> None:
        self.correlation, self._start, self._next, self._stream = correlation, start, start, stream
        self._layout: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._past: dict[object, Any] = {}  # arrays on the CPU, tensors elsewhere

    def steps_to(self, step: int, values: Iterable[Tensor]) -> range:
        """Return the steps whose noise must be drawn for the release of a step.

        Raises:
            PrivacyError: the step was drawn before, or the values are not those of the last step.
        """
        layout = [(value.shape, value.dtype, value.device) for value in values]
        if self._layout and layout != self._layout:
            remedy = "freeze parameters before the first step"
            condition = "to stay the same while noise has memory"
            got = f"{len(layout)} after {len(self._layout)} parameters"
            raise expected("add_noise", "the parameters and their shapes", condition, got, remedy)
        if step < self._next:
            remedy = "release each step once, in ascending order"
            raise expected("add_noise", "step", f"to be at least {self._next}", step, remedy)
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
        remedy = "construct a new PrivateGradient"
        raise expected("Recursion", "past noise", "to have one holder", "a copy or a pickle", remedy)

    def _weights(self, step: int) -> tuple[np.ndarray, int]:
        """Return c_1, c_2, ... in the order of the rows that hold w_{t-1}, w_{t-2}, ..., and the row of the oldest."""
        later = np.array(self.correlation.chosen[1:])
        rows = (step - 1 - np.arange(len(later))) % len(later)
        rolled = np.empty_like(later)
        rolled[rows] = later
        return rolled, step % len(later)


def add_noise(
    clipped: ClippedSum,
    *,
    noise_multiplier: float,
    divisor: int,
    stream: Stream,
    step: int,
    on_grid: bool = False,
    recursion: Recursion | None = None,
) -> NoisyGradient:
    """Add one Gaussian draw to a clipped sum, then divide it by a public number.

    PrivateGradient calls this once per step, and charges the ledger before it returns the result.

    Computes: (S + sigma C z) / B with z ~ N(0, I), one independent coordinate of z for every coordinate of S, and C
    the sum's sensitivity; noise_std = sigma C / B. On a grid: (round(S / g) + round(sigma C' z / g)) g / B, where
    round is to the nearest integer, and g and C' are those of `grid_of`; noise_std = sigma C' / B. With a recursion,
    its w stands in place of z, and noise_std is that of w times as much.

    Args:
        clipped: S and its sensitivity. The noise is added in place, in the memory of its tensors. Do not use it again,
            even after an exception, which may leave part of it with noise.
        noise_multiplier: sigma >= 0. 0 adds no noise and protects nobody.
        divisor: B >= 1, public: the expected number of contributions, not the number drawn.
        stream: the noise stream. No other mechanism may draw from it.
        step: index of this release. Never use the same step for two different sums.
        on_grid: round the sum and the noise to a public grid, and add them there. Only on the CPU and with sigma > 0.
        recursion: noise with memory: the noise of this stream so far. None: independent noise.
    Returns:
        NoisyGradient with the sum's names, shapes and dtypes.
    Raises:
        PrivacyError: a number is out of its range, or on_grid is set without noise or for a sum that is not on the
            CPU.
    Privacy:
        The Gaussian mechanism with noise multiplier sigma, on a sum of the given sensitivity (add or remove one unit).
        On the CPU a cryptographic stream draws the noise in the sum's own precision. On other devices torch's
        generator draws it, which is not cryptographic (see Stream.generator).
        Off the grid, the set of possible outputs depends on the sum, and their low-order bits reveal something of it.
        On the grid, the output is a function of integers n + N. Here n is the rounded sum, and the distribution of N
        does not depend on the data. If z were exact, this would be post-processing of the Gaussian mechanism on n g,
        which one unit moves by at most C' if rounding moved the sum by at most C / 1024. A float32 sum of a batch that
        was built for it can move further, which the guarantee does not cover (docs/rounding.md). In fact z is
        Box-Muller in float64, with errors of about 1e-15. They change the probability of a value of N by a factor of
        about 1 +- 1e-12 sqrt(d) max(sigma, 1) for d coordinates (an estimate, not a proof). N never exceeds 11.5
        standard deviations.
        With memory, (S_1 + sigma C w_1, S_2 + sigma C w_2, ...) / C is F^-1 (F S / C + sigma z): post-processing of the
        Gaussian mechanism on F S / C, whose sensitivity Banded states; docs/mathematics.md (6.2). Each sum counts in
        units of its own C, so C may change from step to step.
    Reference:
        Abadi et al. 2016 (arXiv 1607.00133), algorithm 1; B is the expected, not the realized, batch size. On the
        leak of floating-point noise: Mironov 2012; Haney et al. 2022 (arXiv 2207.13793).
    """
    function = "add_noise"
    require_nonnegative(function, "noise_multiplier", noise_multiplier, "give sigma")
    require_integer(function, "divisor", divisor, 1)
    sensitivity, grid = clipped.sensitivity, None
    if on_grid:
        noise_generator(clipped.values.values(), on_grid=True)
        grid, sensitivity = grid_of(clipped, noise_multiplier)
    std_of_sum = std_of_noise(noise_multiplier, sensitivity)
    require_nonnegative(function, "noise_multiplier * sensitivity", std_of_sum, "give a finite max_grad_norm")

    # In place: to allocate new memory per step would take half as long as to draw the noise.
    values = {name: value.detach().contiguous() for name, value in clipped.values.items()}
    numbers = {"std": std_of_sum, "divisor": divisor}
    if std_of_sum == 0:
        for value in values.values():
            value.div_(divisor)
    else:
        for drawn in (step,) if recursion is None else recursion.steps_to(step, values.values()):
            for device in sorted({value.device for value in values.values()}, key=str):
                on_device = [value for value in values.values() if value.device == device]
                if device.type == "cpu":
                    add = partial(_add, **numbers) if grid is None else partial(_add_on_grid, grid=grid, **numbers)
                    _release_on_cpu(on_device, add if drawn == step else _skip, stream, drawn, recursion, on_grid)
                else:
                    add = partial(_add_on_device, **numbers) if drawn == step else _skip
                    _release_on_device(on_device, add, stream, drawn, recursion)
    gradient = NoisyGradient(values, noise_std=std_of_noise(noise_multiplier, sensitivity, divisor))
    return gradient if recursion is None else recursion.released(gradient, step)


def std_of_noise(noise_multiplier: float, sensitivity: float, divisor: int = 1) -> float:
    """Return the standard deviation of the noise in one coordinate of a clipped sum that was divided by `divisor`.

    Computes: sigma C / B, docs/mathematics.md (5.1). It is 0 for sigma = 0, even if C is infinite.

    Args:
        noise_multiplier: sigma >= 0.
        sensitivity: C > 0, of the sum.
        divisor: B >= 1.
    """
    return noise_multiplier * sensitivity / divisor if noise_multiplier > 0 else 0.0


def grid_of(clipped: ClippedSum, noise_multiplier: float) -> tuple[float, float]:
    """Return the grid spacing g for a sum, and the sensitivity C' of the sum rounded to that grid.

    Computes: g, the power of two in (x / 2, x] for x = C min(sigma, 1) / (1024 sqrt(d)), where C is the sensitivity
    and d the number of coordinates; and C' = C (1 + 1/1024) + g sqrt(d), at most C (1 + 2/1024). Rounding moves each
    coordinate of two neighboring sums by up to g / 2. The first 1/1024 is a reserve for the rounding of
    floating-point norms and sums. It does not bound the rounding of every float32 sum (docs/rounding.md).

    Args:
        clipped: the sum; only its sensitivity and its shapes are used, both public.
        noise_multiplier: sigma > 0.
    Returns:
        g and C', in gradient units.
    Raises:
        PrivacyError: noise_multiplier is 0, the sensitivity is infinite, or float64 cannot hold the sum and the noise
            as exact integers on the grid.
    Privacy:
        Depends on public numbers only. The guarantee of noise on a grid rests on C'.
    """
    remedy = "plan without noise_on_grid: there is nothing to hide without noise"
    require_positive("grid_of", "noise_multiplier", noise_multiplier, remedy)
    require_positive("grid_of", "sensitivity", clipped.sensitivity, "give a finite max_grad_norm")
    root = math.sqrt(sum(value.numel() for value in clipped.values.values()) or 1)
    _, exponent = math.frexp(_ROUNDING * clipped.sensitivity * min(noise_multiplier, 1.0) / root)
    grid = math.ldexp(1.0, exponent - 1)
    sensitivity = clipped.sensitivity * (1 + _ROUNDING) + grid * root
    if not (grid >= _SMALLEST and sensitivity <= _LARGEST):
        condition = f"to give a grid above {_SMALLEST:.0g}, and a sensitivity below {_LARGEST:.0g}"
        got, remedy = f"{grid:.3g} and {sensitivity:.3g}", "express the values in another unit"
        raise expected("grid_of", "noise_multiplier and sensitivity", condition, got, remedy)
    if not _FARTHEST * noise_multiplier * sensitivity <= _FAR * grid:
        most = _FAR * grid / _FARTHEST / sensitivity
        remedy = "plan with less noise, or for fewer values at once"
        raise expected("grid_of", "noise_multiplier", f"to be at most {most:.3g} on a grid", noise_multiplier, remedy)
    return grid, sensitivity


def _release_on_cpu(
    values: list[Tensor],
    add: Callable[[np.ndarray, np.ndarray], None],
    stream: Stream,
    step: int,
    recursion: Recursion | None,
    on_grid: bool,
) -> None:
    """Draw and add the noise block by block, so that the noise of a whole step is never in memory at once.

    `add(part of the sum, as many normals)` overwrites the part with its release. It may also overwrite the normals.
    """

    def work(blocks: Iterable[tuple[int, list[np.ndarray]]]) -> None:
        draw = {
            dtype: stream.normal_blocks(step, np.float64 if on_grid else dtype, dense=on_grid, most=most)
            for dtype in dtypes
        }
        for block, pieces in blocks:
            normals = draw[pieces[0].dtype](block, sum(piece.size for piece in pieces))
            if recursion is not None:
                recursion.moved(block, normals, step)
            for piece in pieces:
                add(piece, normals[: piece.size])
                normals = normals[piece.size :]

    blocks = _blocks(values)
    dtypes = {pieces[0].dtype for pieces in blocks}
    numbers = sum(value.numel() for value in values)
    most = min(BLOCK, numbers)
    in_threads(work, list(enumerate(blocks)), numbers=numbers)


def _add(piece: np.ndarray, normals: np.ndarray, *, std: float, divisor: int) -> None:
    """Overwrite a part of the sum with its release: add the noise, then divide."""
    normals *= std
    piece += normals
    piece /= divisor


def _add_on_grid(piece: np.ndarray, normals: np.ndarray, *, std: float, divisor: int, grid: float) -> None:
    """Add integers to integers. The release depends on the data through their sum alone."""
    normals *= std / grid
    np.rint(normals, out=normals)
    piece /= grid  # exact, because the grid spacing is a power of two
    np.rint(piece, out=piece)
    np.clip(piece, -_FAR, _FAR, out=piece)  # does not increase the distance between two sums
    normals += piece
    normals /= divisor / grid
    piece[:] = normals


def _blocks(values: list[Tensor]) -> list[list[np.ndarray]]:
    """Split the values' own memory, in order, into blocks of at most BLOCK numbers of one dtype.

    A block may hold parts of several tensors. The arrays are views: the caller writes to the tensors through them.
    """
    blocks: list[list[np.ndarray]] = []
    room = 0
    for value in values:
        flat = value.view(-1).numpy()
        if blocks and blocks[-1][0].dtype != flat.dtype:
            room = 0
        while flat.size:
            if room == 0:
                blocks.append([])
                room = BLOCK
            blocks[-1].append(flat[:room])
            flat, room = flat[room:], max(room - flat.size, 0)
    return blocks


def _release_on_device(
    values: list[Tensor],
    add: Callable[[list[Tensor], list[Tensor]], None],
    stream: Stream,
    step: int,
    recursion: Recursion | None,
) -> None:
    """Draw and add the noise on a device other than the CPU, by torch's generator there."""
    device = values[0].device
    generator = stream.generator(step, device)
    for number, group in enumerate(_groups(values)):
        sizes = [value.numel() for value in group]
        noise = torch.randn(sum(sizes), dtype=group[0].dtype, device=device, generator=generator)
        if recursion is not None:
            recursion.moved_on_device((device, number), noise, step)
        parts = cast("tuple[Tensor, ...]", noise.split(sizes))
        add(group, [part.view(value.shape) for value, part in zip(group, parts, strict=True)])


def _groups(values: list[Tensor]) -> list[list[Tensor]]:
    """Split the values, in order, into groups of one dtype that are drawn at once; a small group costs a fixed time."""
    groups, room = list[list[Tensor]](), 0
    for value in values:
        if not groups or groups[-1][0].dtype != value.dtype or value.numel() > room:
            groups.append([])
            room = AT_ONCE
        groups[-1].append(value)
        room -= value.numel()
    return groups


def _add_on_device(values: list[Tensor], noises: list[Tensor], *, std: float, divisor: int) -> None:
    """Overwrite sums with their releases."""
    on_lists._foreach_add_(values, noises, alpha=std)
    on_lists._foreach_div_(values, divisor)


def _skip(value: object, noise: object) -> None:
    """Add nothing: the noise of an earlier step, which only the recursion needs."""
