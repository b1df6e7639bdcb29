"""Random streams: (secret root, stream name, step) -> draws, from a cryptographic generator.

Each stream has its own AES-256 key, derived from the root by BLAKE2b with the stream's name; each step starts at
its own counter. So no two streams and no two steps share output, any step can be drawn again without the ones
before it, and there is no state to save. A root from the operating system's entropy (seed None) is never written
anywhere. Draws are made on the CPU and moved to where they are needed.
"""

import hashlib
import math
import os
import warnings

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from privgrad.errors import expected

_CHUNK = 1 << 20  # normals drawn at a time: bounds the float64 scratch to some tens of MB


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


class Stream:
    """Draws by step from one key. Stateless: the same step gives the same draws.

    So that no second holder repeats them, a stream can be neither copied nor pickled, nor used in a forked process.

    Args:
        key: 32 secret bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._process = os.getpid()

    def __reduce__(self) -> str:
        remedy = "construct a new PrivateGradient: two copies would draw the same noise"
        raise expected("Stream", "a random stream", "to have one holder", "a request to copy it", remedy)

    @property
    def public_id(self) -> str:
        """A name for the stream that reveals nothing about its key (a one-way hash)."""
        return hashlib.blake2b(self._key, person=b"privgrad-id", digest_size=8).hexdigest()

    def uint64(self, step: int, count: int) -> np.ndarray:
        """`count` independent uniform 64-bit integers of that step."""
        return self._words(step, 0, count)

    def normal(self, step: int, count: int) -> Tensor:
        """`count` independent standard normals of that step, float64, shape (count,).

        Computes: Box-Muller; the radius from 64 uniform bits, so the tail reaches 9.4 standard deviations.

        Privacy:
            The draws are those of a cryptographic stream. Floating-point numbers are a grid, and the grid can
            leak (Mironov 2012): this is not covered.
        """
        out = torch.empty(count, dtype=torch.float64)
        for start in range(0, count, _CHUNK):
            stop = min(start + _CHUNK, count)
            pairs = (stop - start + 1) // 2
            words = self._words(step, start, 2 * pairs)
            # (word + 1/2) / 2^64 lies in (0, 1]: the logarithm is finite.
            radius = torch.from_numpy((words[:pairs].astype(np.float64) + 0.5) * 2.0**-64)
            radius.log_().mul_(-2.0).sqrt_()
            angle = torch.from_numpy(words[pairs:].astype(np.float64) * (2.0**-64 * 2.0 * math.pi))
            both = torch.cat([radius * angle.cos(), radius * angle.sin()])
            out[start:stop] = both[: stop - start]
        return out

    def _words(self, step: int, offset: int, count: int) -> np.ndarray:
        """Key-stream words [offset, offset + count) of a step; offset must be even (a block has two words)."""
        if os.getpid() != self._process:
            remedy = "construct PrivateGradient in the process that uses it: both would draw the same noise"
            raise expected("Stream", "a random stream", "to stay in its process", "use in a fork", remedy)
        nonce = step.to_bytes(8, "big") + (offset // 2).to_bytes(8, "big")
        encryptor = Cipher(algorithms.AES(self._key), modes.CTR(nonce)).encryptor()
        return np.frombuffer(encryptor.update(bytes(8 * count)), dtype=np.uint64)
