"""How much the gradients of single examples point in the same direction, within a class and across classes."""

from typing import Any

import torch
from torch import Tensor, nn

from privgrad.engine.factored import Factored
from privgrad.errors import expected
from privgrad.gradient.functional import advanced
from privgrad.types import LossFunction


def raw_pairwise_cosines(
    model: nn.Module, loss_fn: LossFunction, examples: Any, labels: Tensor, *, parameters: list[str] | None = None
) -> dict[str, Any]:
    """Return the cosines between the gradients of all pairs of examples. NOT private.

    Args:
        model: any module.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: B examples, at least two.
        labels: the class of each example, shape (B,).
        parameters: names of the parameters to use; None is all.
    Returns:
        "order": the examples sorted by class, shape (B,); "cosines": the cosines of the pairs in that order, shape
        (B, B), 0 where a gradient is zero; "within" and "across": the mean over pairs of different examples, of one
        class and of two classes (nan if there is no such pair).
    Raises:
        PrivacyError: the labels do not fit the examples.
        KeyError: a parameter is unknown.
    Reference:
        Tang, Zhiyanov, Lecuyer (heavy-tailed class imbalance in private learning), figure 1.
    """
    with advanced(model, keep=False):
        factors = Factored(model, loss_fn)(examples)
    order = torch.argsort(labels, stable=True)
    gram = sum((factors[name].gram().double() for name in parameters or factors), torch.zeros(()))
    if len(labels) != len(gram):  # fewer ones would choose among the examples
        raise expected("raw_pairwise_cosines", "the number of labels", f"to be {len(gram)}", len(labels))
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
