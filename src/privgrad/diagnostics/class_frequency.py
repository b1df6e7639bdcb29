"""Loss and accuracy by class frequency, to show the rare classes that an overall mean hides."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from privgrad.errors import expected


def by_frequency(
    losses: Tensor, correct: Tensor, labels: Tensor, counts: Tensor, *, edges: Sequence[int] | None = None
) -> list[dict[str, float]]:
    """Return mean loss and accuracy over the examples of each group of classes, the most frequent group first.

    Args:
        losses: loss of each example, shape (B,).
        correct: whether each example was classified correctly, bool, shape (B,).
        labels: class of each example, integer in [0, K), shape (B,).
        counts: number of training examples of each class, shape (K,).
        edges: lower ends of the groups of counts, in any order; None groups classes of equal count.
    Returns:
        For each group with an example: smallest and largest count ("from", "to"), "classes", "examples", "loss",
        "accuracy" (in [0, 1]).
    Raises:
        PrivacyError: labels without a count.
    Privacy:
        As private as its arguments: NOT private on training examples.
    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), groups by frequency.
    """
    if bool(((labels < 0) | (labels >= len(counts))).any()):  # a negative one would count for a class at the end
        ends = f"{int(labels.min())} to {int(labels.max())}"
        raise expected("by_frequency", "labels", f"to be in [0, {len(counts)})", ends)
    keys: Any = counts if edges is None else torch.bucketize(counts, torch.tensor(sorted(edges)), right=True)
    groups: list[dict[str, float]] = []
    for key in keys.unique().flip(0):
        members: Tensor = keys == key
        chosen = members[labels]
        if bool(chosen.any()):
            group: dict[str, float] = {
                "from": int(counts[members].min()),
                "to": int(counts[members].max()),
                "classes": int(members.sum()),
                "examples": int(chosen.sum()),
                "loss": float(losses[chosen].double().mean()),
                "accuracy": float(correct[chosen].double().mean()),
            }
            groups.append(group)
    return groups
