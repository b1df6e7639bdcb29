"""The Gaussian mechanism: turns a ClippedSum into a NoisyGradient. Only this file draws noise for a release."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import expected, require_integer, require_nonnegative, require_positive
from privgrad.noise.banded import Recursion
from privgrad.processes import AT_ONCE, in_threads, on_lists
from privgrad.rng import BLOCK, Stream
from privgrad.types import ClippedSum, NoisyGradient, Place

# Share of the sensitivity that is reserved for the rounding of norms and sums, and again for rounding to the grid.
_ROUNDING = 2.0**-10
_FAR = 2.0**51  # in grid points: the most for sum and for noise; together they stay below 2^53, where float64 is exact
_FARTHEST = 11.5  # standard deviations: no noise on a grid is larger
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900  # grid and sensitivity: far inside of float64


def noise_generator(values: Iterable[Tensor], *, on_grid: bool = False) -> str:
    """Return the name of the generator that draws the noise for these values, as ledgers and reports record it."""
    # `Ledger.bind` compares the text when a run resumes: with other words here, older ledgers could not be resumed.
    names: set[str] = set()
    for value in values:
        if value.device.type != "cpu":
            if on_grid:
                raise expected("add_noise", "values", "to be on the CPU for noise on a grid", value.device)
            names.add(f"torch's generator on {value.device.type} (Philox): not cryptographic")
        elif on_grid:
            names.add("AES-256-CTR, Box-Muller in float64, on a grid")
        else:
            dtype = torch.promote_types(value.dtype, torch.float32)
            names.add(f"AES-256-CTR, Box-Muller in {str(dtype).removeprefix('torch.')}")
    return "; ".join(sorted(names))


def add_noise(
    clipped: ClippedSum,
    *,
    noise_multiplier: float,
    divisor: int,
    stream: Stream,
    step: int,
    on_grid: bool = False,
    recursion: Recursion | None = None,
    charging: AbstractContextManager[object] | None = None,
    process: int = 0,
) -> NoisyGradient:
    """Add one Gaussian draw to a clipped sum, then divide it by a public number.

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
        charging: the context in which the noise is drawn. It is entered once nothing can refuse any more, and charges
            the release. None: the caller charges.
        process: the index of this process, whose shards the sum holds.
    Privacy:
        The Gaussian mechanism with noise multiplier sigma, on a sum of the given sensitivity (add or remove one unit).
        On the CPU a cryptographic stream draws the noise in the sum's own precision. On other devices torch's
        generator draws it, which is not cryptographic (see Stream.generator).
        Of a sharded sum, each process draws the noise of its shards. On the CPU, z has one order for the numbers of the
        whole sum, so processes with one stream draw z as one process does, each its part. Elsewhere each process has a
        seed of its own.
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
    require_nonnegative("add_noise", "noise_multiplier", noise_multiplier)
    require_integer("add_noise", "divisor", divisor, 1)
    sensitivity, grid = clipped.sensitivity, None
    if on_grid:
        noise_generator(clipped.values.values(), on_grid=True)
        grid, sensitivity = grid_of(clipped, noise_multiplier)
    std_of_sum = std_of_noise(noise_multiplier, sensitivity)
    require_nonnegative("add_noise", "noise_multiplier * sensitivity", std_of_sum, "give a finite max_grad_norm")

    # In place: to allocate new memory per step would take half as long as to draw the noise. A tensor that is not
    # contiguous is copied here; the noise then goes to the copy, which is what is returned.
    values = {name: value.detach().contiguous() for name, value in clipped.values.items()}
    numbers: dict[str, Any] = {"std": std_of_sum, "divisor": divisor}
    steps = [step] if recursion is None or std_of_sum == 0 else recursion.steps_to(step, values.values())
    with charging or nullcontext():
        if std_of_sum == 0:
            for value in values.values():
                value.div_(divisor)
        else:
            for drawn in steps:
                for device in sorted({value.device for value in values.values()}, key=str):
                    on_device = [value for value in values.values() if value.device == device]
                    if device.type == "cpu":
                        add = partial(_add, **numbers) if grid is None else partial(_add_on_grid, grid=grid, **numbers)
                        places = [clipped.places.get(n) for n, value in values.items() if value.device == device]
                        add = add if drawn == step else _skip
                        _release_on_cpu(on_device, add, stream, drawn, recursion, on_grid, places)
                    else:
                        own: dict[str, Any] = {"is_last": drawn == step, "process": process, **numbers}
                        _release_on_device(on_device, stream, drawn, recursion, **own)
    gradient = NoisyGradient(values, noise_std=std_of_noise(noise_multiplier, sensitivity, divisor))
    return gradient if recursion is None else recursion.released(gradient, step)


def std_of_noise(noise_multiplier: float, sensitivity: float, divisor: int = 1) -> float:
    """Return the standard deviation of the noise in one coordinate: sigma C / B, docs/mathematics.md (5.1)."""
    # 0 for sigma = 0, even if C is infinite.
    return noise_multiplier * sensitivity / divisor if noise_multiplier > 0 else 0.0


def grid_of(clipped: ClippedSum, noise_multiplier: float) -> tuple[float, float]:
    """Return the grid spacing g for a sum, and the sensitivity C' of the sum rounded to that grid.

    Computes: g, the power of two in (x / 2, x] for x = C min(sigma, 1) / (1024 sqrt(d)), where C is the sensitivity
    and d the number of coordinates; and C' = C (1 + 1/1024) + g sqrt(d), at most C (1 + 2/1024). Rounding moves each
    coordinate of two neighboring sums by up to g / 2. The first 1/1024 is a reserve for the rounding of
    floating-point norms and sums. It does not bound the rounding of every float32 sum (docs/rounding.md).

    Privacy:
        Only the sensitivity and the shapes of the sum are used, both public. The guarantee of noise on a grid rests on
        C'.
    """
    require_positive("grid_of", "noise_multiplier", noise_multiplier)
    require_positive("grid_of", "sensitivity", clipped.sensitivity, "give a finite max_grad_norm")
    places, values = clipped.places, clipped.values
    root = math.sqrt(sum(places[n].of if n in places else value.numel() for n, value in values.items()) or 1)
    _, exponent = math.frexp(_ROUNDING * clipped.sensitivity * min(noise_multiplier, 1.0) / root)
    grid = math.ldexp(1.0, exponent - 1)
    sensitivity = clipped.sensitivity * (1 + _ROUNDING) + grid * root
    if not (grid >= _SMALLEST and sensitivity <= _LARGEST):
        condition = f"to give a grid above {_SMALLEST:.0g}, and a sensitivity below {_LARGEST:.0g}"
        raise expected("grid_of", "noise_multiplier and sensitivity", condition, f"{grid:.3g} and {sensitivity:.3g}")
    if not _FARTHEST * noise_multiplier * sensitivity <= _FAR * grid:
        most = _FAR * grid / _FARTHEST / sensitivity
        raise expected("grid_of", "noise_multiplier", f"to be at most {most:.3g} on a grid", noise_multiplier)
    return grid, sensitivity


@dataclass
class _Block:
    """A block of at most BLOCK numbers of the whole sum, in order, and what of it this process has."""

    number: int
    size: int = 0
    pieces: list[tuple[int, np.ndarray]] = field(default_factory=list[tuple[int, np.ndarray]])  # places and views


def _release_on_cpu(
    values: list[Tensor],
    add: Callable[[list[tuple[int, np.ndarray]], np.ndarray], None],
    stream: Stream,
    step: int,
    recursion: Recursion | None,
    on_grid: bool,
    places: Sequence[Place | None],
) -> None:
    """Draw and add the noise block by block, so that the noise of a whole step is never in memory at once."""
    # `add(parts of the sum, normals)` overwrites the parts with their release, and perhaps the normals.
    blocks = _blocks(values, places)
    dtypes = {block.pieces[0][1].dtype for block in blocks}
    most = max([block.size for block in blocks], default=0)

    def work(own: Iterable[_Block]) -> None:
        draw = {
            dtype: stream.normal_blocks(step, np.float64 if on_grid else dtype, dense=on_grid, most=most)
            for dtype in dtypes
        }
        for block in own:
            normals = draw[block.pieces[0][1].dtype](block.number, block.size)
            if recursion is not None:
                recursion.moved(block.number, normals, step)
            add(block.pieces, normals)

    in_threads(work, blocks, numbers=sum([block.size for block in blocks]))


def _add(pieces: list[tuple[int, np.ndarray]], normals: np.ndarray, *, std: float, divisor: int) -> None:
    """Overwrite parts of the sum with their release: add the noise, then divide."""
    normals *= std
    for start, piece in pieces:
        piece += normals[start : start + piece.size]
        piece /= divisor


def _add_on_grid(
    pieces: list[tuple[int, np.ndarray]], normals: np.ndarray, *, std: float, divisor: int, grid: float
) -> None:
    """Add integers to integers. The release depends on the data through their sum alone."""
    normals *= std / grid
    np.rint(normals, out=normals)
    for start, piece in pieces:
        noise = normals[start : start + piece.size]
        piece /= grid  # exact, because the grid spacing is a power of two; beyond float32 it is infinite
        np.rint(piece, out=piece)
        np.clip(piece, -_FAR, _FAR, out=piece)  # also of infinity; does not increase the distance between two sums
        noise += piece
        noise /= divisor / grid
        piece[:] = noise


def _blocks(values: Sequence[Tensor], places: Sequence[Place | None]) -> list[_Block]:
    """Split the numbers of the whole sum, in order, into blocks of one dtype; return those of which values has any.

    One numbering for all tensors, dtypes and processes: no two numbers of a sum share words of the stream.
    """
    blocks, number, size, dtype = list[_Block](), -1, BLOCK, None  # the size of the block so far
    for value, place in zip(values, places, strict=True):
        flat = value.view(-1).numpy()
        start, of = place or Place(0, flat.size)
        if of and flat.dtype != dtype:
            dtype, size = flat.dtype, BLOCK
        done = 0  # numbers of this value
        while done < of:
            if size == BLOCK:
                number, size = number + 1, 0
            length = min(BLOCK - size, of - done)
            first, last = max(done, start), min(done + length, start + flat.size)
            if first < last:
                if not blocks or blocks[-1].number != number:
                    blocks.append(_Block(number))
                blocks[-1].pieces.append((size + first - done, flat[first - start : last - start]))
            done, size = done + length, size + length
            if blocks and blocks[-1].number == number:
                blocks[-1].size = size
    return blocks


def _release_on_device(
    values: list[Tensor],
    stream: Stream,
    step: int,
    recursion: Recursion | None,
    *,
    std: float,
    divisor: int,
    is_last: bool = True,
    process: int = 0,
) -> None:
    """Draw the noise of a step by torch's generator on a device, and add it if the step is the last one to draw."""
    device = values[0].device
    generator = stream.generator(step, device, process)
    for number, group in enumerate(_groups(values)):
        noise = group[0].new_empty(sum([value.numel() for value in group]))
        parts = on_lists._utils._unflatten_dense_tensors(noise, group)
        # float32 normals of a GPU end at 6.7: two together, at 9.5.
        if recursion is None:
            for own_divisor in (1, divisor):  # one after the other takes the memory of one
                noise.normal_(generator=generator)
                _add_on_device(group, parts, std=std * 0.5**0.5, divisor=own_divisor)
            continue
        noise.normal_(generator=generator)
        noise.add_(torch.empty_like(noise).normal_(generator=generator)).mul_(0.5**0.5)
        recursion.moved_on_device((device, number), noise, step)
        if is_last:
            _add_on_device(group, parts, std=std, divisor=divisor)


def _groups(values: list[Tensor]) -> list[list[Tensor]]:
    """Split the values, in order, into groups of one dtype that are drawn at once; a small group costs a fixed time."""
    groups, room = list[list[Tensor]](), 0
    for value in values:
        parts = [value] if value.numel() <= AT_ONCE else list(torch.split(value.view(-1), AT_ONCE))
        for part in parts:
            if not groups or groups[-1][0].dtype != part.dtype or part.numel() > room:
                groups.append([])
                room = AT_ONCE
            groups[-1].append(part)
            room -= part.numel()
    return groups


def _add_on_device(values: list[Tensor], noises: list[Tensor], *, std: float, divisor: int) -> None:
    """Overwrite sums with their releases."""
    on_lists._foreach_add_(values, noises, alpha=std)
    if divisor != 1:
        on_lists._foreach_div_(values, divisor)


def _skip(pieces: object, noise: object) -> None:
    """Add nothing: the noise of an earlier step, which only the recursion needs."""
