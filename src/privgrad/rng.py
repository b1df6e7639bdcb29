"""Random streams: (secret root, stream name, step) -> draws, from a cryptographic generator on the CPU.

Each stream has its own AES-256 key, derived from the root and the stream's name by BLAKE2b. Each step starts at its own
counter. Therefore no two streams and no two steps share output. Any step can be drawn again without the steps before
it, so there is no state to save. A root from the operating system's entropy (seed None) is never written anywhere.

Two kinds of draws are not cryptographic. Devices other than the CPU draw their noise from `Stream.generator`. This is
torch's own generator for the device, with a 64-bit seed from the stream's key. Dropout and random augmentation draw
from the generators of torch, numpy and Python, with a secret state from a key (`set_states`).
"""

import ctypes
import hashlib
import math
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

from privgrad.errors import expected


def set_states(key: bytes) -> None:
    """Give the global random streams of torch (on the CPU), numpy and Python secret states from a key, for one use.

    numpy must draw from a Mersenne Twister and keep no normal, as in `numpy_and_python_kept`.
    """
    torch.default_generator.set_state(torch_state(key))
    drawn = hashlib.shake_256(derived_key(key, "numpy and Python")).digest(4 * 624 + 32)
    # Written to its memory, because `np.random.seed` takes several times as long.
    ctypes.memmove(get_bit_generator().ctypes.state_address, drawn[:-32] + _USED, _SIZE)
    random.seed(int.from_bytes(drawn[-32:]))


class numpy_and_python_kept:  # noqa: N801, it is called as a function is
    """Restore the states of numpy's and Python's global random streams after the block, in which numpy's is MT19937.

    In it, neither library keeps a normal for its next call, so that every draw changes `numpy_and_python_states`.
    """

    def __enter__(self) -> None:
        self._held, self._of_python = held, _ = get_bit_generator(), random.getstate()
        self._of_numpy: Any = None  # what `np.random.set_state` takes; None if the words are all
        if isinstance(held, np.random.MT19937):
            self._words = words = _words_of(held)
            normal = np.random.standard_normal()
            if _words_of(held) == words:  # numpy has kept it
                self._of_numpy = {**held.state, "has_gauss": 1, "gauss": normal}
            ctypes.memmove(held.ctypes.state_address, words, _SIZE)
            set_bit_generator(held)  # makes numpy forget a normal that it keeps
        else:
            self._of_numpy = np.random.get_state(legacy=False)
            set_bit_generator(np.random.MT19937(0))
        if self._of_python[2] is not None:  # the kept normal
            random.setstate((*self._of_python[:2], None))

    def __exit__(self, *_: object) -> None:
        set_bit_generator(self._held)
        if self._of_numpy is None:
            ctypes.memmove(self._held.ctypes.state_address, self._words, _SIZE)
        else:
            np.random.set_state(self._of_numpy)
        random.setstate(self._of_python)


def numpy_and_python_states() -> tuple[Any, Any]:
    """Return the states of numpy's and Python's global random streams, without normals that they keep, for `==`."""
    held = get_bit_generator()
    return _words_of(held) if isinstance(held, np.random.MT19937) else held.state, random.getstate()[1]


def _words_of(generator: Any) -> bytes:
    """Return the 624 words of numpy's MT19937 and its place among them, from its memory: `state` takes 60 us."""
    return ctypes.string_at(generator.ctypes.state_address, _SIZE)


BLOCK = 1 << 18  # normals per block: small enough for the cache, large enough that threads rarely wait for the GIL
_SHORT = 2.0**-7  # smaller radii are recomputed: one pair in 32,768
_ZEROS = bytes(8 * BLOCK)  # their encryption is the key stream: at most 8 bytes per normal
_SIZE = 4 * 625  # bytes of the words of an MT19937, and of its place among them
_USED = (624).to_bytes(4, sys.byteorder)  # the place of an MT19937 that makes new words for its next number
_STATE = torch.Generator().manual_seed(0).get_state()  # of torch's generator on the CPU, as bytes
_SEED, _WORDS = slice(0, 8), slice(24, 24 + 8 * 624)  # what a key decides of these bytes
_forks: list[None] = []
os.register_at_fork(after_in_child=lambda: _forks.append(None))


def this_process() -> tuple[int, int]:
    """Return an identity that a fork changes: the process id, and the number of forks that led to this process."""
    # In a new namespace, a child may have the same id as its parent.
    return os.getpid(), len(_forks)


class RandomSource:
    """A secret root from which named, independent streams derive. It cannot be copied or pickled.

    Args:
        seed: None for the operating system's entropy. An integer is for research only: anyone who knows it can
            recompute the noise, so it voids the privacy guarantee. The first use warns.
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
                "a fixed seed makes the noise predictable: for research only, because it protects nobody", stacklevel=2
            )

    def stream(self, name: str) -> "Stream":
        """Return the stream with this name. Equal (root, name) give equal streams; all others are independent."""
        # All names in the library: noise, dropout, groups (private_gradient); sampling, truncation, bands, epochs,
        # augmentation, workers (sampling); repetitions (accounting/selection); function and name of a release
        # (releases). No two uses share a name of one root.
        return Stream(derived_key(self._root, name))

    def __reduce__(self) -> str:
        remedy = "make a new RandomSource: two holders of one root would draw the same noise"
        raise expected("RandomSource", "a secret root", "to have one holder", "a copy or a pickle", remedy)


class Stream:
    """A stateless source of draws by step from one key of 32 secret bytes: the same step gives the same draws.

    A stream cannot be copied, pickled or used in a forked process, because a second holder would repeat its draws.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._cipher = key, algorithms.AES(key)
        self._own = threading.local()  # the cipher of each thread
        self._process = this_process()

    def __reduce__(self) -> str:
        remedy = "construct a new PrivateGradient: two copies would draw the same noise"
        raise expected("Stream", "a random stream", "to have one holder", "a copy or a pickle", remedy)

    @property
    def public_id(self) -> str:
        """A name for the stream that reveals nothing about its key (a one-way hash), for the records of draws."""
        return hashlib.blake2b(self._key, person=b"privgrad-id", digest_size=8).hexdigest()

    @property
    def shared_key(self) -> bytes:
        """The secret key, for processes of one training that each draw a part of the same numbers."""
        self._require_own_process()
        return self._key

    def uint64(self, step: int, count: int, first: int = 0) -> np.ndarray:
        """Return `count` independent uniform 64-bit integers of one step, shape (count,), in a read-only array.

        They are those from number `first` >= 0 of the step on, so that a part can be drawn alone.

        In one step, draw either integers or normals from a stream: both start at the step's first counter. In the
        library, normals come from the stream "noise" and from those of `releases` alone, and no integers do.
        """
        before = first % 2  # a counter has two words
        words = self._key_stream(step, first // 2).update(bytes(8 * (before + count)))
        return np.frombuffer(words, dtype=np.uint64)[before:]

    def key(self, step: int, size: int) -> bytes:
        """Return a key of up to 64 secret bytes for one step, independent of all that the stream draws."""
        self._require_own_process()
        return derived_key(self._key, f"step {step}", size)

    def normal_blocks(
        self, step: int, dtype: Any, *, dense: bool = False, most: int = BLOCK
    ) -> Callable[[int, int], np.ndarray]:
        """Return a function (block, count) -> the first `count` <= BLOCK standard normals of a block of the step.

        The function reuses its buffers: each call overwrites the result of the call before it. Each thread must
        therefore make its own function.

        Computes: Box-Muller on words of the key stream. The radius uses 64 bits, so the tail reaches 9.4 standard
        deviations. The angle uses as many bits as the dtype has.

        Args:
            step: index of the draw.
            dtype: float32 or float64. Draw each block in one dtype only: in two dtypes it would use the same words.
            dense: use 32 more bits for the radius, with float64. Values in the tail then lie closer together, and the
                tail reaches 11.5 standard deviations. For noise on a grid, which must reach every grid point.
            most: the largest count that the function will be called with, at most BLOCK. It decides the size of the
                buffers only.
        Privacy:
            Each block has its own words of a cryptographic stream, independently of who draws it and when.
            Floating-point numbers form a grid, and this grid can leak (Mironov 2012): see add_noise.
        """
        most += most % 2
        z, size = np.empty(most, dtype), np.dtype(dtype).itemsize
        stream, tails = _room((8 + size) // 2 * most), _room(2 * most if dense else 0)

        def draw(block: int, count: int) -> np.ndarray:
            pairs, tail = (count + 1) // 2, None
            zeros = memoryview(_ZEROS)[: (8 + size) * pairs]
            # A block reads at most (8 + 8) * BLOCK / 2 = len(_ZEROS) bytes from its own start, so blocks touch and do
            # not overlap. The counter has 64 bits, a unit 16 bytes: no block reaches the next step.
            self._key_stream(step, block * len(_ZEROS) // 16).update_into(zeros, stream.data)
            words = stream[: 8 * pairs].view(np.int64)
            turns = stream[8 * pairs : (8 + size) * pairs].view(f"i{size}")
            if dense:  # the upper half of the step's counters is reserved for these bits: 4 bytes a pair
                counter = (1 << 63) + block * len(_ZEROS) // 64
                self._key_stream(step, counter).update_into(zeros[: 4 * pairs], tails.data)
                tail = tails[: 4 * pairs].view(np.uint32)
            box_muller(words, turns, z[: 2 * pairs], tail)
            return z[:count]

        return draw

    def generator(self, step: int, device: torch.device, process: int = 0) -> torch.Generator:
        """Return a generator of torch on a device, so that noise need not be copied there from the CPU.

        Privacy:
            NOT cryptographic: Philox on CUDA, with a 64-bit secret seed from the key, step, device and process.
            Its float32 normals end at about 6.7 standard deviations, so noise adds up two of them.
        """
        self._require_own_process()
        name = f"{step} {device} {process}".encode() if process else f"{step} {device}".encode()
        seed = hashlib.blake2b(name, key=self._key, person=b"privgrad-device", digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(seed, "big"))

    def _key_stream(self, step: int, counter: int) -> CipherContext:
        """Return this thread's cipher, to encrypt zeros to the step's key stream from its 16-byte unit `counter` on.

        The next call moves it. A new cipher for each call would take 70 calls of Python.
        """
        self._require_own_process()
        nonce = step.to_bytes(8, "big") + counter.to_bytes(8, "big")
        if not hasattr(self._own, "cipher"):
            self._own.cipher = Cipher(self._cipher, modes.CTR(nonce)).encryptor()
        self._own.cipher.reset_nonce(nonce)
        return self._own.cipher

    def _require_own_process(self) -> None:
        """Raise PrivacyError in a fork of the process that made the stream."""
        if this_process() != self._process:
            remedy = "construct PrivateGradient in the process that uses it: both would draw the same noise"
            got = f"fork {os.getpid()}"
            raise expected("Stream", "a random stream", f"to stay in process {self._process[0]}", got, remedy)


def torch_state(key: bytes) -> Tensor:
    """Return a whole state for torch's generator on the CPU from a key, for one use.

    A seed would not do: torch keeps 32 bits of it, few enough to try them all.
    """
    drawn, state = np.frombuffer(hashlib.shake_256(key).digest(8 * 313), np.uint64), _STATE.clone()
    held = state.numpy()  # shares its memory
    held[_SEED] = drawn[312:].view(np.uint8)
    held[_WORDS].view(np.uint64)[:] = drawn[:312].view(np.uint32)  # each of the 624 words has eight bytes in it
    return state


def device_seed(key: bytes) -> int:
    """Return a seed of 63 bits for torch's generators on other devices, from a key, for one use."""
    return int.from_bytes(derived_key(key, "devices", 8)) >> 1


def derived_key(key: bytes, name: str, size: int = 32) -> bytes:
    """Return up to 64 secret bytes that follow from a key; those of other names are independent."""
    return hashlib.blake2b(name.encode(), key=key, digest_size=size).digest()


def _room(size: int) -> np.ndarray:
    """Return memory that a cipher can write `size` bytes to."""
    return np.empty(size + 15, np.uint8)  # older versions of `cryptography` require 15 bytes more than they write


def box_muller(words: np.ndarray, turns: np.ndarray, z: np.ndarray, tail: np.ndarray | None = None) -> None:
    """Turn uniform integers into standard normals, in the precision of z, and overwrite the words.

    Computes: sqrt(-2 log u) * (cos a, sin a) with a = pi * (turn + 1/2) / 2^(bits - 1) and u = (|word| + h) / 2^63,
    where h = 1/2, or (tail + 1/2) / 2^32.

    Args:
        words: int64, shape (n,).
        turns: int32 or int64, of the same width as z's dtype, shape (n,).
        z: float32 or float64, shape (2n,): receives the normals.
        tail: uint32, shape (n,): further binary digits of u; None for h = 1/2.
    Privacy:
        A normal that is exactly zero would hide nothing, so no normal is zero. Small radii have their full precision,
        see `_mend_short`. Sine and cosine are not zero at any angle that occurs.
    """
    pairs = len(words)
    radius, angle = z[:pairs], z[pairs:]
    np.copyto(radius, words, casting="unsafe")
    np.abs(radius, out=radius)
    if tail is None:
        radius += 0.5  # avoids zero, near which u has its full resolution: u lies in [2^-64, 1]
    else:
        np.add(tail, 0.5, out=angle)  # the memory of angle is not yet in use
        angle *= 2.0**-32
        radius += angle
    radius *= 2.0**-63
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    _mend_short(radius, words, tail)
    np.copyto(angle, turns, casting="unsafe")
    angle += 0.5  # avoids zero, whose sine is zero
    scratch = words.view(z.dtype)[:pairs]  # the words are no longer needed
    if z.dtype == np.float32:
        angle *= math.pi * 2.0 ** (1 - 8 * turns.itemsize)
        np.cos(angle, out=scratch)
        np.sin(angle, out=angle)
        angle *= radius
        radius *= scratch
    else:  # both from t = tan(a / 2), because numpy's float64 sine and cosine take many times as long
        angle *= math.pi * 2.0 ** (-8 * turns.itemsize)
        np.tan(angle, out=angle)
        np.multiply(angle, angle, out=scratch)
        scratch += 1.0
        np.divide(radius, scratch, out=scratch)
        scratch *= 2.0
        angle *= scratch  # r sin a = r 2t / (1 + t^2)
        np.subtract(scratch, radius, out=radius)  # r cos a = r 2 / (1 + t^2) - r


def _mend_short(radius: np.ndarray, words: np.ndarray, tail: np.ndarray | None) -> None:
    """Recompute the smallest radii from 1 - u, which is exact where u itself rounds to 1.

    Near 1, u is a multiple of 2^-24 in float32. Without this correction, radii would be zero for one pair in 2^25. No
    radius would lie between 0 and 3.4e-4, and radii just above 3.4e-4 would lie on a coarse grid.
    """
    found = (radius < _SHORT).tobytes()
    index = found.find(1)  # for so few hits, faster than np.flatnonzero
    while index >= 0:
        half = 0.5 if tail is None else (int(tail[index]) + 0.5) * 2.0**-32
        gap = abs((1 << 63) - abs(int(words[index])) - half) * 2.0**-63  # 1 - u; u > 1 only for the word -2^63
        radius[index] = math.sqrt(-2.0 * math.log1p(-gap))
        index = found.find(1, index + 1)
