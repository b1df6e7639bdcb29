"""The score of a canary under noise with memory, for who knows its group.

`audit.methods` calls it. No privacy guarantee rests on it: it attacks one.
"""

import torch
from torch import Tensor

from privgrad.correlation import Banded


def scores_in_groups(released: Tensor, correlation: Banded, groups: Tensor) -> Tensor:
    """Return the score of each coordinate in its group, shape (P,), given releases of shape (T, P).

    y = S + sigma F^-1 z becomes F S + sigma z by F. With S = 1 at the steps g, g + b, ... and 0 at all others, the sum
    of F^T F y over these steps is the optimal score.
    """
    steps, bands = len(released), correlation.bands
    factor = torch.zeros(steps, steps, dtype=torch.float64)
    for back, coefficient in enumerate(correlation.chosen):
        factor += coefficient * torch.diag(torch.ones(steps - back, dtype=torch.float64), -back)
    scores = factor.T @ factor @ released
    by_group = torch.stack([scores[group::bands].sum(0) for group in range(bands)])
    return by_group.gather(0, groups[None])[0]
