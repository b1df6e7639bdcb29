"""Sums of many terms in float32, in short parts.

The privacy guarantee rests on this file: it keeps the rounding errors of a sum small. docs/rounding.md derives the
bound.

Shape suffixes: N terms (positions of all examples), O outputs, I inputs, B examples.
"""

import torch
from torch import Tensor

TERMS = 256  # in one part
_FEW = 32  # in one part of a narrow product
_NARROW = 32  # outputs or inputs
_JOINED = 8  # parts of a large product that are joined in float32, which costs less than a sum in float64
_SMALL = 1 << 15  # entries of a product of which all parts are computed at once


def sum_of_products(b_NO: Tensor, a_NI: Tensor) -> Tensor:
    """Return b^T a, shape (O, I), added in parts of at most 256 terms; in float64 if there are many parts.

    A kernel may add one term after the other, and rounds each time to the resolution of the total so far. With k terms
    in a part, the errors of all terms are at most 2^-24 (k + 7) of their summed norms. One more example moves all later
    terms to other places of their parts, so all of these errors may change.

    Narrow products are vector products to most libraries. These add up a few terms before they add them to the total,
    which makes errors of repeated terms many times larger. Narrow parts are shorter, because short parts cost nothing
    there.
    """
    terms, shape = len(a_NI), (b_NO.shape[1], a_NI.shape[1])
    narrow = min(shape) <= _NARROW
    size = _FEW if narrow else TERMS
    if terms <= size or a_NI.dtype == torch.float64:
        return b_NO.mT @ a_NI
    if narrow or shape[0] * shape[1] <= _SMALL:
        whole = terms // size * size
        b_PKO, a_PKI = b_NO[:whole].reshape(-1, size, shape[0]), a_NI[:whole].reshape(-1, size, shape[1])
        total = torch.bmm(b_PKO.mT, a_PKI).sum(0, dtype=torch.float64)
        return total if whole == terms else total.add_(b_NO[whole:].mT @ a_NI[whole:])
    parts = list(zip(b_NO.split(size), a_NI.split(size), strict=True))
    sums = (_joined(parts[start : start + _JOINED]) for start in range(0, len(parts), _JOINED))
    total = next(sums)
    for more in sums:
        total = total.double().add_(more)
    return total


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of b^T a over a few parts, joined in float32."""
    b_KO, a_KI = parts[0]
    total = b_KO.mT @ a_KI
    for b_KO, a_KI in parts[1:]:
        total.addmm_(b_KO.mT, a_KI)
    return total


def sum_of_rows(weight_B: Tensor, rows_BI: Tensor) -> Tensor:
    """Return the weighted sum of rows, shape (I,), like `sum_of_products`."""
    return sum_of_products(weight_B.to(rows_BI.dtype)[:, None], rows_BI)[0]
