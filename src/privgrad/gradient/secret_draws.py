"""Give a model's random draws, such as dropout, random numbers that nobody can guess.

A mask of dropout follows an example's place in the batch, and one person more moves the others to other places. So the
masks must be secret. torch's generator on the CPU keeps 32 bits of a seed, few enough to try them all. Here it gets a
whole secret state, of 19,968 bits, and so do the global generators of numpy and Python.

On a GPU, torch's generator has a seed of 63 secret bits.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from privgrad.gradient.functional import streams_kept
from privgrad.rng import device_seed, numpy_and_python_states, set_states


class SecretDraws:
    """Computations under a secret state of the random streams of torch, numpy and Python.

    Privacy:
        Two of torch's operations on the CPU, which dropout uses, take 31 bits from the generator for all of their
        numbers. They are replaced if the model draws at all, which shows in the state after a computation. In the same
        way, numpy and Python get secret states if the model draws from them.
    """

    def __init__(self) -> None:
        self._draws = self._draws_elsewhere = False

    @contextmanager
    def under(self, key: bytes) -> Generator["Attempt"]:
        """Compute under the key's state. If the attempt does not hold, compute the same again, under the same key.

        An attempt fails only if the model draws for the first time. Two flags decide this, and they only rise, so the
        third attempt holds at the latest.

        Args:
            key: 32 secret bytes, for this computation only.
        """
        attempt, known = Attempt(), (self._draws, self._draws_elsewhere)
        with streams_kept() as elsewhere, _Wide() if self._draws else nullcontext():
            if torch.accelerator.is_available():
                torch.manual_seed(device_seed(key))
            set_states(key, of_all=self._draws_elsewhere)
            before = torch.get_rng_state()
            yield attempt
            self._draws = self._draws or not torch.equal(torch.get_rng_state(), before)
            self._draws_elsewhere = self._draws_elsewhere or numpy_and_python_states() != elsewhere
        attempt.holds = known == (self._draws, self._draws_elsewhere)


@dataclass
class Attempt:
    """A computation under a secret state; it holds if the state suited all that the model draws from."""

    holds: bool = False


class _Wide(TorchDispatchMode):
    """A mode in which operations on the CPU draw each number from the generator itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation; torch calls this for each one under the mode."""
        wide = _WIDE.get(func) if args and isinstance(args[0], Tensor) and args[0].is_cpu else None
        return (wide or func)(*args, **(kwargs or {}))


def _bernoulli(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Write ones with probability p, in steps of 2^-24, and zeros."""
    return x.copy_(torch.rand(x.shape, generator=generator) < p)


def _exponential(x: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Write exponentially distributed numbers, which are above zero."""
    drawn = -torch.log1p(-torch.rand(x.shape, generator=generator, dtype=torch.float64)) / lambd
    return x.copy_(drawn.clamp_min_(torch.finfo(x.dtype).tiny))


def _new_bernoulli(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Return what `_bernoulli` writes, in a new tensor; vmap calls this one."""
    return _bernoulli(torch.empty_like(x), p, generator=generator)


_WIDE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.bernoulli_.float: _bernoulli,
    torch.ops.aten.bernoulli.p: _new_bernoulli,
    torch.ops.aten.exponential_.default: _exponential,
}
