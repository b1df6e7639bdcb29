"""How much the gradients of single examples point the same way, within a class and across classes."""

from typing import Any

import torch
from torch import Tensor, nn

from privgrad.errors import expected
from privgrad.gradient.engines.hooks import Hooks
from privgrad.types import LossFunction


def raw_pairwise_cosines(
    model: nn.Module, loss_fn: LossFunction, examples: Any, labels: Tensor, *, parameters: list[str] | None = None
) -> dict[str, Any]:
    """Cosines between the gradients of all pairs of examples. NOT private.

    Args:
        model: any module.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: B of them, at least two.
        labels: their classes, shape (B,).
        parameters: names of those that count; None is all.
    Returns:
        "order": the examples sorted by class, shape (B,); "cosines": of the pairs in that order, shape (B, B), 0 where
        a gradient is zero; "within" and "across": mean over pairs of different examples of one class and of two (nan
        if there is none).
    Raises:
        PrivacyError: labels that do not fit, or an unknown parameter.
    Reference:
        Tang, Zhiyanov, Lecuyer (heavy-tailed class imbalance in private learning), figure 1.
    """
    factors = Hooks(model, loss_fn)(examples)
    unknown = sorted(set(parameters or ()) - set(factors))
    if unknown:
        raise expected("raw_pairwise_cosines", "parameters", f"among {sorted(factors)}", unknown, "correct the names")
    order = torch.argsort(labels, stable=True)
    gram = torch.zeros(len(labels), len(labels), dtype=torch.float64)
    for name in parameters or factors:
        if factors[name].examples != len(labels):
            got = f"{len(labels)} for {factors[name].examples} examples"
            raise expected("raw_pairwise_cosines", "labels", "to be one an example", got, "give one each")
        gram += factors[name].gram().double()
    gram = gram[order][:, order]
    norms = gram.diagonal().sqrt()
    cosines = torch.where(gram == 0, 0.0, gram / (norms[:, None] * norms).clamp(min=torch.finfo(gram.dtype).tiny))
    same = labels[order][:, None] == labels[order]
    others = ~torch.eye(len(labels), dtype=torch.bool)
    return {
        "order": order,
        "cosines": cosines,
        "within": float(cosines[same & others].mean()),
        "across": float(cosines[~same].mean()),
    }
