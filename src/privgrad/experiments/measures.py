"""The losses of a training, and the measurements of its results, from the outputs of a model.

`runner`, `paid_runner`, `one_training`, `audit_spec` and `build` call it; the items of papers call `losses_for`.

The privacy guarantee rests on `losses_for`: each loss depends on one example or user. That of paid scores rests on
`unit_scores`: each score depends on one privacy unit, and is in [0, 1]. No guarantee rests on the rest of this file:
measurements are NOT private for the examples that they are made on.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.augmentation import Flip, multiplicity, shift_and_flip
from privgrad.data import DataSet
from privgrad.data.dataset import NO_LABEL
from privgrad.diagnostics import by_frequency
from privgrad.errors import expected
from privgrad.gradient.module_state import evaluating
from privgrad.gradient.public_gradient import LossFunction

_MOST_LOGITS = 1 << 26  # in memory at once during an evaluation


def losses_for(data: DataSet, *, views: int = 1, flip: Flip | None = None) -> LossFunction:
    """Return the loss function for a data set: (model, examples) -> losses, shape (B,).

    The loss is the cross-entropy of the class, or its mean over an example's tokens with a label. For tags, the target
    gives equal shares to all tags of the example. For reconstruction, the loss is the mean squared error. With `views`
    above 1, each loss is the mean over that many randomly shifted views of the image, and `flip` is the
    direction in which half of them are mirrored.

    `runner`, `audit_spec` and the items of papers call it.
    """

    def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = _beside(model, batch[:2])
        losses = _losses(model(inputs), labels, data)
        return losses.sum(1) / (labels != NO_LABEL).sum(1).clamp(min=1) if losses.ndim > 1 else losses

    def moved(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return shift_and_flip(batch[0], flip=flip), batch[1]

    return multiplicity(losses_of, moved, views=views)


def _losses(logits: Tensor, labels: Tensor, data: DataSet) -> Tensor:
    """Return the loss of each example, shape (B,), or of each token, shape (B, T); 0 for a token without a label."""
    if data.score is None:
        return (logits.flatten(1) - labels.flatten(1)).square().mean(1)
    if labels.is_floating_point():
        return F.cross_entropy(logits, labels / labels.sum(1, keepdim=True), reduction="none")
    return F.cross_entropy(logits.movedim(-1, 1), labels, ignore_index=NO_LABEL, reduction="none")


def _beside(model: nn.Module, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors on the model's device."""
    device = next(model.parameters()).device
    return tuple(tensor.to(device) for tensor in tensors)


def outcomes(model: nn.Module, examples: TensorDataset, data: DataSet) -> tuple[Tensor, Tensor]:
    """Return loss and score of each example, or of each token with a label.

    The score is 1 for a correct class or token and 0 otherwise. For tags it is recall@5: the share of the example's
    tags among the five most likely ones. Without a score, the second tensor is empty.

    `runner` also calls it, for the training loss.

    Privacy:
        NOT private for `examples`: no noise is added.
    """
    losses: list[Tensor] = []
    scores: list[Tensor] = []
    tokens = _tokens(examples.tensors[1])
    rows = 256 if tokens is None else max(1, min(256, _MOST_LOGITS // (tokens * data.num_classes)))
    with evaluating(model), torch.no_grad():
        for batch in zip(*(tensor.split(rows) for tensor in examples.tensors), strict=True):
            inputs, labels = _beside(model, batch)
            logits = model(inputs)
            labeled = ... if tokens is None else labels.flatten() != NO_LABEL
            losses.append(_losses(logits, labels, data).flatten()[labeled].cpu())
            if data.score == "recall@5":
                found = labels.gather(1, logits.topk(min(5, logits.shape[1]), dim=1).indices).sum(1)
                scores.append((found / labels.sum(1)).cpu())
            elif data.score == "accuracy":
                scores.append((logits.argmax(-1) == labels).flatten()[labeled].cpu())
    return torch.cat(losses), torch.cat(scores or [torch.zeros(0)])


def _tokens(labels: Tensor) -> int | None:
    """Return the number of labels per example if each belongs to a token, and None otherwise."""
    return None if labels.is_floating_point() or labels.ndim == 1 else labels[0].numel()


def unit_scores(model: nn.Module, examples: TensorDataset, data: DataSet) -> Tensor:
    """Return the score of each row of `examples`, shape (n,), float64 in [0, 1].

    It is the mean of `outcomes` over the labels of the row, a person's rows for example; 0 for a row without labels.

    Raises:
        PrivacyError: the data have no score.
    Privacy:
        NOT private for `examples`: no noise is added. A row of the result depends on one row of `examples` only.
    """
    if data.score is None:
        raise expected("unit_scores", "data", "to have a score", data.name, "measure the loss")
    scores, labels = outcomes(model, examples, data)[1].double().nan_to_num(0.0), examples.tensors[1]
    if _tokens(labels) is None:
        return scores.clamp(0, 1)
    labeled = labels.flatten(1) != NO_LABEL
    spread = torch.zeros(labeled.shape, dtype=scores.dtype).masked_scatter_(labeled, scores)
    return (spread.sum(1) / labeled.sum(1).clamp(min=1)).clamp(0, 1)


def measure(model: nn.Module, held_out: TensorDataset, data: DataSet) -> dict[str, Any]:
    """Measure mean loss and score on held-out examples, and by class frequency if the data define groups.

    `runner` calls it at each evaluation.

    Privacy:
        NOT private for the held-out examples. "raw_groups" is measured on the training examples without noise: NOT
        private for these.
    """
    losses, scores = outcomes(model, held_out, data)
    measured: dict[str, Any] = {"loss": losses.double().mean().item()}
    if data.score is not None:
        measured["accuracy"] = scores.double().mean().item()
    if data.frequency_edges is not None:
        labels = data.train.tensors[1].flatten()
        labels = labels[labels != NO_LABEL]
        counts = torch.bincount(labels, minlength=data.num_classes)
        edges = data.frequency_edges or None
        measured["raw_groups"] = by_frequency(*outcomes(model, data.train, data), labels, counts, edges=edges)
    return measured
