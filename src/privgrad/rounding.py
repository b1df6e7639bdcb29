"""Rounding of a bound that is shown to people: epsilon, delta, an attacker's success.

Everything that shows such a number calls this file. A number that was rounded down would claim too much privacy.
"""

import math
from decimal import ROUND_CEILING, Context, Decimal


def rounded_up(bound: float, digits: int = 6) -> str:
    """Return an upper bound with at most this many significant digits, rounded up, never down."""
    if not math.isfinite(bound):
        return f"{bound:g}"
    exact = Decimal(repr(float(bound)))
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(exact)):.{digits}g}"


def two_decimals_up(bound: float) -> str:
    """Return an upper bound with two decimals, or with two significant digits below 0.1; rounded up, never down."""
    exact = Decimal(repr(float(bound)))
    places = min(-2, exact.adjusted() - 1) if exact else -2
    return f"{exact.quantize(Decimal(1).scaleb(places), ROUND_CEILING):f}"
