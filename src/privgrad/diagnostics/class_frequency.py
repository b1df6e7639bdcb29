"""Loss and accuracy by how frequent a class is: where heavy tails hide."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from privgrad.errors import expected


def by_frequency(
    losses: Tensor, correct: Tensor, labels: Tensor, counts: Tensor, *, edges: Sequence[int] | None = None
) -> list[dict[str, float]]:
    """Mean loss and accuracy over the examples of each group of classes, the most frequent first.

    Args:
        losses: of each example, shape (B,).
        correct: whether each was classified right, bool, shape (B,).
        labels: class of each, integer in [0, K), shape (B,).
        counts: training examples of each class, shape (K,).
        edges: lower ends of groups of counts, in any order; None puts classes of equal count in one group.
    Returns:
        For each group that has an example: smallest and largest count ("from", "to"), "classes", "examples", "loss",
        "accuracy" (in [0, 1]).
    Raises:
        PrivacyError: shapes or labels that do not fit.
    Privacy:
        As private as what it is given: on training examples NOT private.
    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), groups by frequency.
    """
    if not len(losses) == len(correct) == len(labels):
        got = f"{len(losses)}, {len(correct)} and {len(labels)}"
        raise expected("by_frequency", "losses, correct and labels", "to be of one length", got, "give one an example")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= len(counts)):
        got = f"{int(labels.min())} to {int(labels.max())}"
        raise expected("by_frequency", "labels", f"to be in [0, {len(counts)})", got, "give a count for each class")
    keys = counts if edges is None else torch.bucketize(counts, torch.tensor(sorted(edges)), right=True)
    groups: list[dict[str, float]] = []
    for key in sorted(set(cast("list[int]", keys.tolist())), reverse=True):
        members = keys == key
        chosen = members[labels]
        if bool(chosen.any()):
            groups.append(
                {
                    "from": int(counts[members].min()),
                    "to": int(counts[members].max()),
                    "classes": int(members.sum()),
                    "examples": int(chosen.sum()),
                    "loss": float(losses[chosen].double().mean()),
                    "accuracy": float(correct[chosen].double().mean()),
                }
            )
    return groups
