"""Give a model's random draws, such as dropout, random numbers that nobody can guess.

A mask of dropout follows an example's place in the batch, and one person more moves the others to other places. So the
masks must be secret. torch's generator on the CPU keeps 32 bits of a seed, few enough to try them all. Here it gets a
whole state, expanded from 256 secret bits, as numpy's does. That of Python has 256 secret bits, that of a GPU 63.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from privgrad.gradient.functional import streams_kept
from privgrad.rng import device_seed, set_states

_dispatch: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class secret_draws(streams_kept):  # noqa: N801, it is called as a function is
    """Compute under a secret state of the random streams, from 32 secret bytes for this computation only."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __enter__(self) -> None:
        super().__enter__()
        # Three of torch's operations on the CPU, which dropout uses, take 31 bits from the generator for all of their
        # numbers. Inside, `_WIDE` replaces them.
        self._guard = _dispatch._IncludeDispatchKeyGuard(_KEY)
        self._guard.__enter__()
        if self._of_devices is not None:
            torch.manual_seed(device_seed(self._key))
        set_states(self._key)

    def __exit__(self, *_: object) -> None:
        self._guard.__exit__(None, None, None)
        super().__exit__()


def as_recorded() -> Any:
    """Return a context, within `secret_draws`, for a graph that was recorded there: it calls the wide draws itself."""
    return _dispatch._ExcludeDispatchKeyGuard(_dispatch.DispatchKeySet(_KEY))  # torch's compiler does not know the key


def _bernoulli(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Write ones with probability p, in steps of 2^-24, and zeros."""
    return x.copy_(_new_bernoulli(x, p, generator=generator))


def _new_bernoulli(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Return what `_bernoulli` writes, in a new tensor; under vmap, dropout calls this one."""
    return (torch.rand(x.shape, generator=generator, dtype=torch.float32) < p).to(x.dtype)


def _exponential(x: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Write exponentially distributed numbers, which are above zero."""
    drawn = -torch.log1p(-torch.rand(x.shape, generator=generator, dtype=torch.float64)) / lambd
    return x.copy_(drawn.clamp_min_(torch.finfo(x.dtype).tiny))


_WIDE: dict[str, Callable[..., Tensor]] = {
    "bernoulli_.float": _bernoulli,
    "bernoulli.p": _new_bernoulli,
    "exponential_": _exponential,
}
# torch's dispatcher asks the kernels of this key before all others, in a thread that includes it, wherever an operation
# is called: within attention, LSTM or TorchScript too. Operations without such a kernel do not notice it, so that only
# draws pass through Python. torch itself uses the key in tests of the dispatcher only.
_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = _dispatch._dispatch_key_parse(_NAME)
_OTHERS, _DRAWS = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_OTHERS.fallback(torch.library.fallthrough_kernel, _NAME)


def _registered(name: str) -> Callable[..., Tensor]:
    """Return the kernel of an operation: the wide one on the CPU, and torch's own elsewhere."""
    operation, _, overload = name.partition(".")
    own: Callable[..., Tensor] = getattr(getattr(torch.ops.aten, operation), overload or "default")

    def draw(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with as_recorded():
            return (_WIDE.get(name, own) if x.is_cpu else own)(x, *args, **kwargs)

    return draw


for _name in _WIDE:
    _DRAWS.impl(_name, _registered(_name), _NAME)
