"""Synthetic data by a published recipe.

`experiments.build` calls `heavy_tail` by name, through `data.LOADERS`; users call it directly. The privacy guarantee
does not rest on this file.
"""

import torch

from privgrad.data.dataset import DataSet, whole
from privgrad.data.sources import Natural, Positive
from privgrad.errors import expected


def heavy_tail(*, groups: Positive = 8, log_size: Natural = 10, seed: int = 0, validation: int = 0) -> DataSet:
    """Make synthetic classes of very unequal size, whose inputs say nothing about them: a model can only memorize.

    Computes: group i of G = `groups` has 2**i classes with 2**(log_size - i) examples each; n = G 2**log_size examples
        in d = n + 2**log_size dimensions, uniform in [0, 1]. 8 and 10 give n = 8192, d = 9216, 255 classes.

    Args:
        groups: G >= 1.
        log_size: at least groups - 1.
        seed: of the inputs.
        validation: 0: there is nothing to generalize to, and the training set is the test set.
    Raises:
        PrivacyError: a number is out of its range.
    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), as Tang, Zhiyanov, Lecuyer use it. Deviation: the printed sizes
        contradict each other; docs/papers/heavy-tail.md says which are used here.
    """
    if groups < 1 or log_size < groups - 1 or validation != 0:
        got, remedy = (groups, log_size, validation), "give groups=8, log_size=10, validation=0, for instance"
        condition = "to be at least 1, at least groups - 1, and exactly 0"
        raise expected("heavy_tail", "groups, log_size and validation", condition, got, remedy)
    sizes = torch.tensor([2 ** (log_size - group) for group in range(groups) for _ in range(2**group)])
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    width = len(labels) + 2**log_size
    inputs = torch.rand(len(labels), width, generator=torch.Generator().manual_seed(seed))
    return whole(f"heavy-tail synthetic, {groups} groups", inputs, labels, num_classes=len(sizes))
