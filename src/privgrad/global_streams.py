"""Keep, set and compare the states of the global random streams of torch, numpy and Python.

`gradient.secret_draws` and `loading` give them secret states, for draws of the model and for random augmentation. The
checks of `gradient` seed them. The privacy guarantee rests on this file wherever a model or a data set draws from them.
"""

import ctypes
import random
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from privgrad.rng import mersenne_words, torch_state


def set_states(key: bytes, *, of_all: bool = True) -> None:
    """Give the global random streams of torch (on the CPU), numpy and Python whole states from a key.

    `gradient.secret_draws` and `loading` call it under `numpy_and_python_kept`, and restore torch's state themselves.

    Args:
        key: 32 bytes, for one use only.
        of_all: False for torch's state only.
    Privacy:
        The guarantee rests on this wherever the forward pass or the augmentation draws random numbers.
    """
    torch.default_generator.set_state(torch_state(key))
    if of_all:
        state = _numpy_state(get_bit_generator())
        state[:624], state[624] = mersenne_words(key, "numpy"), 624
        random.setstate((random.Random.VERSION, (*mersenne_words(key, "Python").tolist(), 624), None))


@contextmanager
def numpy_and_python_kept() -> Generator[None]:
    """Restore the states of numpy's and Python's global random streams afterwards.

    Inside, numpy draws from a Mersenne Twister, also if the program has chosen another generator. Neither library keeps
    a normal for its next call, so that every draw changes `numpy_and_python_states`. `loading` and
    `gradient.module_state` call it, the latter in each step: the libraries' own functions would take 0.1 ms.
    """
    held, is_plain = get_bit_generator(), _PYTHON is not None and _PYTHON_HOLDER.gauss_next is None
    is_twister = isinstance(held, np.random.MT19937) and not _keeps_normal(_numpy_state(held))
    state: Any = _numpy_state(held).copy() if is_twister else np.random.get_state(legacy=False)
    python: Any = _PYTHON.copy() if _PYTHON is not None and is_plain else random.getstate()
    # Another generator also makes numpy forget a normal that it keeps for its next call.
    set_bit_generator(held if is_twister else np.random.MT19937(0))
    _PYTHON_HOLDER.gauss_next = None
    try:
        yield
    finally:
        set_bit_generator(held)
        if is_twister:
            _numpy_state(held)[:] = state
        else:
            np.random.set_state(state)
        if _PYTHON is not None and is_plain:
            _PYTHON[:], _PYTHON_HOLDER.gauss_next = python, None
        else:
            random.setstate(python)


def numpy_and_python_states() -> tuple[Any, Any]:
    """Return the states of numpy's and Python's global random streams, which can be compared with `==`.

    `gradient.secret_draws`, `gradient.randomness` and `engines.vmap` call it. A normal that either keeps for its next
    call is left out.
    """
    held = get_bit_generator()
    of_numpy = _numpy_state(held).tobytes() if isinstance(held, np.random.MT19937) else held.state
    return of_numpy, random.getstate() if _PYTHON is None else _PYTHON.tobytes()


@lru_cache(1)
def _numpy_state(generator: np.random.BitGenerator) -> np.ndarray:
    """Return the 624 words and the position of numpy's Mersenne Twister, uint32; writes to the array change them."""
    return _at(generator.ctypes.state_address)


def _python_state() -> np.ndarray | None:
    """Return the position and the 624 words of Python's Mersenne Twister as `_numpy_state` does.

    None if this Python does not hold them behind the head of the object, as CPython does.
    """
    if cast(Any, type(_PYTHON_HOLDER)).__base__.__basicsize__ - object.__basicsize__ < 4 * 625:
        return None
    state, (_, known, _) = _at(id(_PYTHON_HOLDER) + object.__basicsize__), random.getstate()
    return state if (*state[1:].tolist(), int(state[0])) == known else None


def _at(address: int) -> np.ndarray:
    """Return the 625 integers in the memory at an address: uint32."""
    return np.frombuffer(cast(Any, (ctypes.c_uint32 * 625).from_address(address)), np.uint32)


def _keeps_normal(state: np.ndarray) -> bool:
    """Return whether numpy keeps a normal for its next call: it draws them in pairs. The kept one is left in place.

    Args:
        state: of numpy's global generator.
    """
    before = state.copy()
    drawn = np.random.standard_normal()
    if state.tobytes() == before.tobytes():
        np.random.set_state(("MT19937", before[:624], int(before[624]), 1, drawn))
        return True
    np.random.standard_normal()  # the second one of the pair
    state[:] = before
    return False


_PYTHON_HOLDER: Any = cast(Any, random.random).__self__
_PYTHON = _python_state()
