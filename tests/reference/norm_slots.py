"""The slots of SlaClip, one contribution at a time: what is left of C is poured into one slot after the other."""

import math


def poured(length: float, max_grad_norm: float, bins: int) -> list[float]:
    """Return the slots of one contribution."""
    height, left = max_grad_norm / math.sqrt(bins), (max_grad_norm - length) * math.sqrt(bins)
    slots = list[float]()
    for _ in range(bins):
        slots.append(min(left, height))
        left -= slots[-1]
    return slots
