"""Random streams: (secret root, stream name, step) -> draws, from a cryptographic generator.

Each stream has its own AES-256 key, derived from the root by BLAKE2b with the stream's name; each step starts at
its own counter. So no two streams and no two steps share output, any step can be drawn again without the ones
before it, and there is no state to save. A root from the operating system's entropy (seed None) is never written
anywhere. Draws are made on the CPU; `Stream.generator` is what other devices draw their noise from.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from privgrad.errors import expected

BLOCK = 1 << 18  # normals in a block: small enough for cache, large enough that threads seldom meet at the GIL
_SHORT = 2.0**-7  # radii below it are recomputed: one pair in 32,768
_ZEROS = bytes(8 * BLOCK)  # encrypted, they are the key stream: at most 8 bytes a normal
_forks: list[None] = []
os.register_at_fork(after_in_child=lambda: _forks.append(None))


def this_process() -> tuple[int, int]:
    """What a fork changes: the forks behind a process, and its number, which in a new namespace may be its parent's."""
    return os.getpid(), len(_forks)


class RandomSource:
    """A secret root from which named, independent streams derive.

    Args:
        seed: None for the operating system's entropy. An integer is for research only: whoever knows it can
            recompute the noise, so no privacy holds against them; warns when first used.
    """

    _warned = False

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        if seed is None:
            self._root = os.urandom(32)
            return
        self._root = hashlib.blake2b(str(int(seed)).encode(), person=b"privgrad-seed", digest_size=32).digest()
        if not RandomSource._warned:
            RandomSource._warned = True
            warnings.warn(
                "a fixed seed makes the noise predictable: for research only; use seed=None to protect anyone",
                stacklevel=2,
            )

    def stream(self, name: str) -> "Stream":
        """The stream of that name: equal for equal (root, name), independent otherwise."""
        return Stream(hashlib.blake2b(name.encode(), key=self._root, digest_size=32).digest())

    def __reduce__(self) -> str:
        remedy = "make another: two holders of one root would draw the same noise"
        raise expected("RandomSource", "a secret root", "to have one holder", "a request to copy it", remedy)


class Stream:
    """Draws by step from one key. Stateless: the same step gives the same draws.

    So that no second holder repeats them, a stream can be neither copied nor pickled, nor used in a forked process.

    Args:
        key: 32 secret bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._process = this_process()

    def __reduce__(self) -> str:
        remedy = "construct a new PrivateGradient: two copies would draw the same noise"
        raise expected("Stream", "a random stream", "to have one holder", "a request to copy it", remedy)

    @property
    def public_id(self) -> str:
        """A name for the stream that reveals nothing about its key (a one-way hash)."""
        return hashlib.blake2b(self._key, person=b"privgrad-id", digest_size=8).hexdigest()

    def uint64(self, step: int, count: int) -> np.ndarray:
        """`count` independent uniform 64-bit integers of that step."""
        return np.frombuffer(self._key_stream(step, 0).update(bytes(8 * count)), dtype=np.uint64)

    def normal(self, step: int, count: int, dtype: type[np.floating[Any]] = np.float64) -> Tensor:
        """`count` independent standard normals of that step, shape (count,): those of `normal_blocks`, in order."""
        out = np.empty(count, dtype)
        draw = self.normal_blocks(step, dtype)
        for start in range(0, count, BLOCK):
            part = out[start : start + BLOCK]
            part[:] = draw(start // BLOCK, part.size)
        return torch.from_numpy(out)

    def normal_blocks(self, step: int, dtype: Any, *, dense: bool = False) -> Callable[[int, int], np.ndarray]:
        """A function (block, count) -> the first `count` <= BLOCK standard normals of a block of that step.

        It keeps its buffers: the next call overwrites what the last one returned, and each thread takes its own.

        Computes: Box-Muller on words of the key stream; the radius from 64 bits, so the tail reaches 9.4 standard
        deviations; the angle from as many bits as the dtype has.

        Args:
            step: index of the draw.
            dtype: float32 or float64. A block serves one dtype: those of two share words.
            dense: take 32 more bits for the radius, in float64, so that its values lie closer together in the tail,
                which then reaches 11.5 standard deviations: for noise that is to reach every point of a grid.
        Privacy:
            A block's words are its own, whoever draws it and when. They are those of a cryptographic stream.
            Floating-point numbers are a grid, and the grid can leak (Mironov 2012): see add_noise.
        """
        z, size = np.empty(BLOCK, dtype), np.dtype(dtype).itemsize
        stream, tails = _room(len(_ZEROS)), _room(len(_ZEROS) // 4 if dense else 0)

        def draw(block: int, count: int) -> np.ndarray:
            pairs, tail = (count + 1) // 2, None
            zeros = memoryview(_ZEROS)[: (8 + size) * pairs]
            self._key_stream(step, block * len(_ZEROS) // 16).update_into(zeros, stream.data)
            words = stream[: 8 * pairs].view(np.int64)
            turns = stream[8 * pairs : (8 + size) * pairs].view(f"i{size}")
            if dense:  # from a half of the step's counters that is theirs
                counter = (1 << 63) + block * len(_ZEROS) // 64
                self._key_stream(step, counter).update_into(zeros[: 4 * pairs], tails.data)
                tail = tails[: 4 * pairs].view(np.uint32)
            box_muller(words, turns, z[: 2 * pairs], tail)
            return z[:count]

        return draw

    def generator(self, step: int, device: torch.device) -> torch.Generator:
        """torch's own generator on a device, for draws that should not cross the bus.

        Privacy:
            NOT cryptographic: Philox on CUDA, with 64 secret bits from the key, the step and the device; its float32
            normals end at about 6.7 standard deviations.
        """
        self._require_own_process()
        name = f"{step} {device}".encode()
        seed = hashlib.blake2b(name, key=self._key, person=b"privgrad-device", digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(seed, "big"))

    def _key_stream(self, step: int, counter: int) -> CipherContext:
        """Turns zeros into a step's key stream, from its 16-byte unit `counter` on."""
        self._require_own_process()
        nonce = step.to_bytes(8, "big") + counter.to_bytes(8, "big")
        return Cipher(algorithms.AES(self._key), modes.CTR(nonce)).encryptor()

    def _require_own_process(self) -> None:
        if this_process() != self._process:
            remedy = "construct PrivateGradient in the process that uses it: both would draw the same noise"
            raise expected("Stream", "a random stream", "to stay in its process", "use in a fork", remedy)


def _room(size: int) -> np.ndarray:
    return np.empty(size + 15, np.uint8)  # 15: older `cryptography` asks for room to spare


def box_muller(words: np.ndarray, turns: np.ndarray, z: np.ndarray, tail: np.ndarray | None = None) -> None:
    """Turn uniform integers into standard normals, in the precision of z. Overwrites the words.

    Computes: sqrt(-2 log u) * (cos a, sin a) with a = pi * (turn + 1/2) / 2^(bits - 1) and u = (|word| + h) / 2^63,
    where h = 1/2, or (tail + 1/2) / 2^32.

    Args:
        words: int64, shape (n,).
        turns: int32 or int64, as wide as z's numbers, shape (n,).
        z: float32 or float64, shape (2n,): receives the normals.
        tail: uint32, shape (n,): further digits of u; None for one half.
    Privacy:
        A normal that is exactly zero hides nothing, so none is. Small radii have their full precision: see
        `_mend_short`. Sine and cosine are not zero at any angle that occurs.
    """
    pairs = len(words)
    radius, angle = z[:pairs], z[pairs:]
    np.copyto(radius, words, casting="unsafe")
    np.abs(radius, out=radius)
    if tail is None:
        radius += 0.5  # off zero, where u has its full resolution: it lies in [2^-64, 1]
    else:
        np.add(tail, 0.5, out=angle)  # whose memory is not yet in use
        angle *= 2.0**-32
        radius += angle
    radius *= 2.0**-63
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    _mend_short(radius, words, tail)
    np.copyto(angle, turns, casting="unsafe")
    angle += 0.5  # off zero, whose sine is zero
    scratch = words.view(z.dtype)[:pairs]  # the words are spent
    if z.dtype == np.float32:
        angle *= math.pi * 2.0 ** (1 - 8 * turns.itemsize)
        np.cos(angle, out=scratch)
        np.sin(angle, out=angle)
        angle *= radius
        radius *= scratch
    else:  # both of t = tan(a / 2), for numpy's float64 sine and cosine take many times as long
        angle *= math.pi * 2.0 ** (-8 * turns.itemsize)
        np.tan(angle, out=angle)
        np.multiply(angle, angle, out=scratch)
        scratch += 1.0
        np.divide(radius, scratch, out=scratch)
        scratch *= 2.0
        angle *= scratch  # r sin a = r 2t / (1 + t^2)
        np.subtract(scratch, radius, out=radius)  # r cos a = r 2 / (1 + t^2) - r


def _mend_short(radius: np.ndarray, words: np.ndarray, tail: np.ndarray | None) -> None:
    """Recompute the shortest radii from 1 - u, which is exact where u itself rounds to 1.

    Near 1, u is a multiple of 2^-24 in float32. Without this, radii would be zero for one pair in 2^25, none would lie
    between 0 and 3.4e-4, and those above would lie on a coarse grid.
    """
    found = (radius < _SHORT).tobytes()
    place = found.find(1)  # for so few, a fraction of the time that np.flatnonzero takes
    while place >= 0:
        half = 0.5 if tail is None else (int(tail[place]) + 0.5) * 2.0**-32
        gap = abs((1 << 63) - abs(int(words[place])) - half) * 2.0**-63  # 1 - u; u > 1 for the word -2^63 alone
        radius[place] = math.sqrt(-2.0 * math.log1p(-gap))
        place = found.find(1, place + 1)
