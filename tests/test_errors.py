"""Validators: what they let through, and that whatever else is given ends in the library's error."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

import privgrad as pg
from conftest import make_plan
from privgrad import errors

HUGE = 10**400  # no float holds it
UNWRITTEN = 10**5000  # nor does Python write it out
POSITIVE: Callable[..., None] = partial(errors.require_positive, "f", "x", remedy="give one")
NONNEGATIVE: Callable[..., None] = partial(errors.require_nonnegative, "f", "x", remedy="give one")
RATE: Callable[..., None] = partial(errors.require_rate, "f")
DELTA: Callable[..., None] = partial(errors.require_delta, "f")


@pytest.mark.parametrize("good", [1, 1.0, 1e308, 10**300, np.float32(1.0), Fraction(1, 3)])
def test_numbers_in_range_pass(good: Any):
    POSITIVE(value=good)
    NONNEGATIVE(value=good)


@pytest.mark.parametrize("check", [POSITIVE, NONNEGATIVE, RATE, DELTA])
@pytest.mark.parametrize(
    "bad",
    [HUGE, -HUGE, UNWRITTEN, Fraction(HUGE), math.inf, math.nan, -1.0, "1", None, 1j, [1.0]],
    ids=lambda bad: type(bad).__name__,
)
def test_whatever_else_is_refused(check: Callable[..., None], bad: Any):
    with pytest.raises(pg.PrivacyError, match=r"f: expected .*, got .*; .*\."):
        check(value=bad)


def test_zero_is_nonnegative_and_not_positive():
    NONNEGATIVE(value=0)
    with pytest.raises(pg.PrivacyError, match="positive finite number, got 0"):
        POSITIVE(value=0)


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "sample_rate"])
@pytest.mark.parametrize("number", [HUGE, UNWRITTEN], ids=["huge", "unwritten"])
def test_a_plan_refuses_numbers_that_no_float_holds(name: str, number: int):
    with pytest.raises(pg.PrivacyError, match=rf"PrivacyPlan: expected {name} "):
        make_plan(**{name: number})
