"""Synthetic texts from public word counts: public rows for the statistics of features and of layers.

Users and `experiments.public_inputs` call the function. The privacy guarantee rests on one fact that no code can check:
the counts do not come from private texts.
"""

import torch
from torch import Tensor

from privgrad.errors import described, expected, require_integer
from privgrad.features.extractor import Public


def word_sequences(counts: Tensor, n: int, length: int, *, seed: int = 0) -> Public:
    """Return sequences of word ids, each drawn by its public frequency and independent of the others.

    Args:
        counts: how often each id occurs in public text, shape (vocabulary,), >= 0, not all 0.
        n: number of sequences, >= 1.
        length: ids per sequence, >= 1.
        seed: of the random numbers. They are public, so a fixed seed is safe here.
    Returns:
        Public rows, int64 (n, length).
    Raises:
        PrivacyError: the counts have another shape or sign, or a number is out of its range.
    """
    require_integer("word_sequences", "n", n, 1)
    require_integer("word_sequences", "length", length, 1)
    require_integer("word_sequences", "seed", seed, 0)
    shaped = isinstance(counts, Tensor) and counts.dim() == 1  # pyright: ignore[reportUnnecessaryIsInstance]
    if not shaped or not counts.numel() or bool((counts < 0).any()) or not bool((counts > 0).any()):
        remedy = "count each id in public text"
        raise expected("word_sequences", "counts", "to be of shape (vocabulary,), >= 0", described(counts), remedy)
    drawn = torch.multinomial(counts.double(), n * length, True, generator=torch.Generator().manual_seed(seed))
    return Public(drawn.view(n, length), f"{n:,} sequences of words drawn by public frequencies (seed {seed})")
