"""The losses of a training, and the measurements of its results, from the outputs of a model.

`runner`, `paid_runner`, `one_training`, `audit_spec` and `build` call it; the items of papers call `losses_for`.

The privacy guarantee rests on `losses_for`: each loss depends on one example or user. That of paid scores rests on
`unit_scores`: each score depends on one privacy unit, and is in [0, 1]. No guarantee rests on the rest of this file:
measurements are NOT private for the examples that they are made on.
"""

from collections.abc import Iterable, Iterator, Sequence
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
        images = batch[0].flatten(0, 1) if data.by_person else batch[0]
        return shift_and_flip(images, flip=flip).view(batch[0].shape), batch[1]

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

    The score is that of `label_values` for the data's own score. Without a score, the second tensor is empty.

    `runner` also calls it, for the training loss.

    Privacy:
        NOT private for `examples`: no noise is added.
    """
    losses, scores = [torch.zeros(0)], [torch.zeros(0)]
    with evaluating(model), torch.no_grad():
        for logits, labels in outputs(model, examples, data):
            labeled = ... if tokens(labels) is None else labels.flatten() != NO_LABEL
            losses.append(_losses(logits, labels, data).flatten()[labeled].cpu())
            if data.score is not None:
                scores.append(label_values(data.score, logits, labels, data).flatten()[labeled].cpu())
    return torch.cat(losses), torch.cat(scores)


def outputs(model: nn.Module, examples: TensorDataset, data: DataSet) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's outputs and the labels of batches of examples, on the model's device.

    The caller sets evaluation mode, and switches gradients off.
    """
    length = tokens(examples.tensors[1])
    rows = 256 if length is None else max(1, min(256, _MOST_LOGITS // (length * data.num_classes)))
    for batch in zip(*(tensor.split(rows) for tensor in examples.tensors), strict=True):
        inputs, labels = _beside(model, batch)
        yield model(inputs), labels


def tokens(labels: Tensor) -> int | None:
    """Return the number of labels per example if each belongs to a token or to a person's row, and None otherwise."""
    return None if labels.is_floating_point() or labels.ndim == 1 else labels[0].numel()


def label_values(name: str, logits: Tensor, labels: Tensor, data: DataSet) -> Tensor:
    """Return a measure of each label: of each example, of each token, or of each row of a person.

    Args:
        name: "loss". "accuracy": 1 for the right class, and 0 otherwise. "recall@k": whether the class is among the k
            most likely ones; for tags, the share of the example's tags among these. "squared_error": half the squared
            distance between the probabilities and the right class, in [0, 1]; (p - y)^2 for two classes. Without
            classes, the mean squared error of the outputs, which has no bound.
        logits: outputs of the model.
        labels: as in DataSet. Values of tokens without a label have no meaning.
        data: their data set.
    """
    if name == "loss":
        return _losses(logits, labels, data)
    if name == "accuracy":
        return logits.argmax(-1) == labels
    if name == "squared_error":
        if data.score is None:
            return _losses(logits, labels, data)
        chances = logits.double().softmax(-1)
        right = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return ((chances.square().sum(-1) - 2 * right + 1) / 2).clamp(0, 1)
    likely = logits.topk(min(int(name.removeprefix("recall@")), logits.shape[-1]), dim=-1).indices
    if labels.is_floating_point():
        return labels.gather(1, likely).sum(1) / labels.sum(1).clamp(min=1)
    return (likely == labels.unsqueeze(-1)).any(-1)


def unit_values(model: nn.Module, examples: TensorDataset, data: DataSet, names: Sequence[str]) -> list[Tensor]:
    """Return measures of each row of `examples`, each of shape (n,), float64: means of `label_values` over its labels.

    `metrics` and `paid_runner` call it.

    Args:
        model: in any mode.
        examples: rows of examples, of texts or of persons.
        data: their data set.
        names: as in `label_values`.
    Returns:
        By name the means; 0 for a row without labels.
    Privacy:
        NOT private for `examples`: no noise is added. A row of the result depends on one row of `examples` only.
    """
    found: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.float64)] for _ in names]
    with evaluating(model), torch.no_grad():
        for logits, labels in outputs(model, examples, data):
            for name, values in zip(names, found, strict=True):
                values.append(_row_means(label_values(name, logits, labels, data), labels).cpu())
    return [torch.cat(values) for values in found]


def _row_means(values: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of each row over its labels, shape (n,), float64; 0 for a row without labels."""
    if tokens(labels) is None:
        return values.double()
    labeled = labels.flatten(1) != NO_LABEL
    return values.double().flatten(1).where(labeled, 0.0).sum(1) / labeled.sum(1).clamp(min=1)


def unit_scores(model: nn.Module, examples: TensorDataset, data: DataSet, by: str = "accuracy") -> Tensor:
    """Return the score of each row of `examples`, shape (n,), float64 in [0, 1]; larger is better.

    Args:
        model: in any mode.
        examples: rows of examples, of texts or of persons.
        data: their data set.
        by: "accuracy" takes the data's own score. Otherwise a name of `label_values`; the score of "squared_error" is
            1 minus the error, and 0 for errors above 1.
    Returns:
        The scores; 0 for a row without labels, and for a model without finite outputs.
    Raises:
        PrivacyError: the data have no score.
    Privacy:
        NOT private for `examples`: no noise is added. A row of the result depends on one row of `examples` only.
    """
    name = data.score if by == "accuracy" else by
    if name is None:
        raise expected("unit_scores", "data", "to have a score", data.name, "measure the loss")
    (values,) = unit_values(model, examples, data, [name])
    scores = 1 - values if name == "squared_error" else values
    return scores.nan_to_num(0.0, posinf=0.0).clamp(0, 1)


def constants(examples: TensorDataset, data: DataSet) -> dict[str, float]:
    """Return what two models without inputs reach on `examples`; nothing for scores other than accuracy.

    `runner` and `paid_runner` record it with the accuracy. Each person counts once, as in `measure`.

    Returns:
        "most_frequent_class": the accuracy of a model that always says the most frequent class of `examples`.
        "class_shares_loss": the loss of a model whose probabilities are always the shares of the classes.
    Privacy:
        NOT private for `examples`: no noise is added.
    """
    labels = examples.tensors[1]
    if data.score != "accuracy" or labels.is_floating_point() or (labels.ndim > 1 and not data.by_person):
        return {}
    rows = labels.view(len(labels), -1)
    weights = (rows != NO_LABEL).double()
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    counts = torch.bincount(rows.clamp(min=0).flatten(), weights=weights.flatten(), minlength=data.num_classes)
    shares = counts / counts.sum().clamp(min=1)
    loss = -torch.special.xlogy(shares, shares).sum().item()
    return {"most_frequent_class": (counts.max() / max(1, len(rows))).item(), "class_shares_loss": loss}


def measure(model: nn.Module, held_out: TensorDataset, data: DataSet) -> dict[str, Any]:
    """Measure mean loss and score on held-out examples, and by class frequency if the data define groups.

    Means are over all labels. Where a row of the data is a person, they are over persons: each counts once.

    `runner` calls it at each evaluation.

    Privacy:
        NOT private for the held-out examples. "raw_groups" is measured on the training examples without noise: NOT
        private for these.
    """
    if data.by_person and data.score is not None:
        losses, scores = unit_values(model, held_out, data, ["loss", data.score])
    else:
        losses, scores = outcomes(model, held_out, data)
    measured: dict[str, Any] = {"loss": losses.double().mean().item()}
    if data.score is not None:
        measured["accuracy"] = scores.double().mean().item()
    if data.frequency_edges is not None:
        labels = data.train.tensors[1].flatten()
        labels = labels[labels != NO_LABEL]
        counts = torch.bincount(labels, minlength=data.num_classes)
        edges = data.frequency_edges or None
        if held_out is not data.train or data.by_person:
            losses, scores = outcomes(model, data.train, data)
        measured["raw_groups"] = by_frequency(losses, scores, labels, counts, edges=edges)
    return measured
