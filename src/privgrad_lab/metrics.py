"""The losses of a training; the metrics of its model, by name or by a function of the user; the criteria of tuning.

All results are NOT private for the examples that they are measured on. Paid scores rest on `unit_scores`: each score
depends on one privacy unit, and is in [0, 1].
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.data import DataSet
from privgrad.data.dataset import NO_LABEL, has_label
from privgrad.diagnostics import by_frequency
from privgrad.errors import PrivacyError, described, expected
from privgrad.gradient.functional import evaluating
from privgrad.heads.head import Target
from privgrad.perturb.augmentation import Flip, multiplicity, shift_and_flip
from privgrad.plugins import optional
from privgrad.precondition.public_gradient import LossFunction
from privgrad_lab.calls import called, imported, unknown, wrong
from privgrad_lab.spec import Spec

_MOST_LOGITS = 1 << 26  # in memory at once during an evaluation


def losses_for(data: DataSet, *, views: int = 1, flip: Flip | None = None) -> LossFunction:
    """Return the loss function for a data set: (model, examples) -> losses, shape (B,).

    With `views` above 1, each loss is the mean over that many randomly shifted views of the image, and `flip` is the
    direction in which half of them are mirrored.
    """

    def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = _beside(model, batch[:2])
        losses = _losses(model(inputs), labels, data)
        return losses.sum(1) / has_label(labels).sum(1).clamp(min=1) if losses.ndim > 1 else losses

    def moved(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images = batch[0].flatten(0, 1) if data.by_person else batch[0]
        return shift_and_flip(images, flip=flip).view(batch[0].shape), batch[1]

    return multiplicity(losses_of, moved, views=views)


def _losses(logits: Tensor, labels: Tensor, data: DataSet) -> Tensor:
    """Return the loss of each example, shape (B,), or of each token, shape (B, T); 0 for a token without a label."""
    if data.score is None:
        return (logits.flatten(1) - labels.flatten(1)).square().mean(1)
    target = Target.of(data)
    return target.losses_of(logits, target.prepared(labels))


def _beside(model: nn.Module, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    device = next(model.parameters()).device
    return tuple(tensor.to(device) for tensor in tensors)


def outputs(model: nn.Module, examples: TensorDataset, data: DataSet) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's outputs and the labels of batches of examples, in the caller's mode."""
    labels = examples.tensors[1]
    length = 1 if labels.is_floating_point() else math.prod(labels.shape[1:])  # labels of a row
    rows = max(1, min(256, _MOST_LOGITS // (length * data.num_classes)))
    for batch in zip(*(tensor.split(rows) for tensor in examples.tensors), strict=True):
        inputs, labels = _beside(model, batch)
        yield model(inputs), labels


def label_values(name: str, logits: Tensor, labels: Tensor, data: DataSet) -> Tensor:
    """Return a measure of each label: of each example, of each token, or of each row of a person.

    "squared_error" is half the squared distance between the probabilities and the right class, in [0, 1]: (p - y)^2 for
    two classes. Without classes, it is the mean squared error of the outputs, which has no bound. "absolute_error" is
    that of a number, in the units of the label. Values of tokens without a label have no meaning.
    """
    if name == "loss" or (name == "squared_error" and data.score is None):
        return _losses(logits, labels, data)
    if name == "absolute_error":
        return (Target.of(data).decoded(logits.double()) - labels).abs()
    if name == "accuracy":
        return logits.argmax(-1) == labels
    if name == "squared_error":
        chances = logits.double().softmax(-1)
        right = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return ((chances.square().sum(-1) - 2 * right + 1) / 2).clamp(0, 1)
    likely = logits.topk(min(int(name.removeprefix("recall@")), logits.shape[-1]), dim=-1).indices
    if labels.is_floating_point():  # the share of the example's tags among these
        return labels.gather(1, likely).sum(1) / labels.sum(1).clamp(min=1)
    return (likely == labels.unsqueeze(-1)).any(-1)


def unit_values(
    model: nn.Module, examples: TensorDataset, data: DataSet, names: Sequence[str], *, by_label: bool = False
) -> list[Tensor]:
    """Return measures of each row of `examples`, each of shape (n,), float64: means of `label_values` over its labels.

    A row may be an example, a text or a person; one without labels has 0. It decides one row of the result. With
    `by_label`, the result has the value of each label in place of the means.
    """
    found: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.float64)] for _ in names]
    with evaluating(model), torch.no_grad():
        for logits, labels in outputs(model, examples, data):
            for name, rows in zip(names, found, strict=True):
                values = label_values(name, logits, labels, data).double()
                if values.shape == labels.shape:  # else the value of all tags or numbers of a row
                    known = has_label(labels).view(len(labels), -1)
                    values = values.view(known.shape)
                    values = values[known] if by_label else values.where(known, 0.0).sum(1) / known.sum(1).clamp(min=1)
                rows.append(values.cpu())
    return [torch.cat(rows) for rows in found]


def unit_scores(model: nn.Module, examples: TensorDataset, data: DataSet, by: str = "accuracy") -> Tensor:
    """Return the score of each row of `examples`, shape (n,), float64 in [0, 1]; larger is better.

    A row without labels, and a model without finite outputs, score 0. A row of the result depends on one row of
    `examples` only, and no noise is added. Of an error it is 1 minus the error; that of a number is divided by the
    distance between the bounds first.
    """
    name = scored_by(by, data)
    (values,) = unit_values(model, examples, data, [name])
    if name == "absolute_error":
        values = values / (2 * Target.of(data).half)
    scores = 1 - values if name.endswith("error") else values
    return scores.nan_to_num(0.0, posinf=0.0).clamp(0, 1)


def scored_by(by: str, data: DataSet) -> str:
    """Return the metric whose mean over persons a private comparison pays for; `by` is that of [tuning].

    Of numbers it is the absolute error: compared with the noise, candidates differ less in the squared one.
    """
    name = data.score if by == "accuracy" else by
    assert name is not None, "data without a score"
    return "absolute_error" if name == "r2" else name


def constants(examples: TensorDataset, data: DataSet) -> dict[str, float]:
    """Return what models without inputs reach on `examples`: on classes, or on counts.

    One always says the most frequent class, and the probabilities of another are the shares of the classes. Each person
    counts once, as in `measure`. Of counts it is Poisson's deviance of the labels' mean, of all labels together.
    """
    labels = examples.tensors[1]
    if data.schema and data.schema.counts:
        known = labels[has_label(labels)].double()
        return {"mean_deviance": 2 * torch.special.xlogy(known, known / known.mean().clamp(min=1e-300)).mean().item()}
    if data.score != "accuracy" or labels.is_floating_point() or (labels.ndim > 1 and not data.by_person):
        return {}
    rows = labels.view(len(labels), -1)
    weights = torch.nn.functional.normalize((rows != NO_LABEL).double(), p=1, dim=1)
    counts = torch.bincount(rows.clamp(min=0).flatten(), weights=weights.flatten(), minlength=data.num_classes)
    shares = counts / counts.sum().clamp(min=1)
    loss = -torch.special.xlogy(shares, shares).sum().item()
    return {"most_frequent_class": (counts.max() / max(1, len(rows))).item(), "class_shares_loss": loss}


def measure(model: nn.Module, held_out: TensorDataset, data: DataSet) -> dict[str, Any]:
    """Measure mean loss and score on held-out examples, and by class frequency if the data define groups.

    Means are over all labels. Where a row of the data is a person, they are over persons: each counts once.
    "raw_groups" is measured on the training examples without noise: NOT private for these.
    """
    names = ["loss", *([] if data.score in (None, "r2") else [data.score])]
    losses, *scores = unit_values(model, held_out, data, names, by_label=not data.by_person)
    measured: dict[str, Any] = {"loss": losses.mean().item()}
    if scores:
        measured["accuracy"] = scores[0].mean().item()
    elif data.score == "r2":  # of all numbers together
        found = metrics_of(model, held_out, data, OF_NUMBERS, {})
        measured |= {"accuracy": found["r2"], "absolute_error": found["absolute_error"]}
    if data.frequency_edges is not None:
        labels = data.train.tensors[1].flatten()
        labels = labels[labels != NO_LABEL]
        counts = torch.bincount(labels, minlength=data.num_classes)
        edges = data.frequency_edges or None
        if held_out is not data.train or data.by_person:
            losses, *scores = unit_values(model, data.train, data, names, by_label=True)
        measured["raw_groups"] = by_frequency(losses, scores[0], labels, counts, edges=edges)
    return measured


Kind = Literal["classes", "texts", "tags", "numbers", "vectors"]
# The kinds of labels that each metric suits.
_SUITS: dict[str, tuple[Kind, ...]] = {
    "accuracy": ("classes", "texts"),
    "auc": ("classes",),
    "f1": ("classes",),
    "recall@k": ("classes", "texts", "tags"),
    "r2": ("numbers",),
    "absolute_error": ("numbers",),
    "squared_error": ("classes", "texts", "vectors"),
    "a function": ("classes", "tags", "numbers", "vectors"),
}
_KINDS: dict[Kind, str] = {
    "classes": "one class per label",
    "texts": "a class for each token",
    "tags": "tags",
    "numbers": "a number per label",
    "vectors": "no classes",
}
_PAID = ("accuracy", "recall@k", "absolute_error", "squared_error")
OF_NUMBERS = ["r2", "absolute_error"]  # what every result on numbers has
_CONFIDENCE = 0.95
_RESAMPLES = 500


def family(name: str) -> str:
    """Return the key of a metric in _SUITS: "recall@k" for "recall@3"; "" for an unknown name."""
    if ":" in name:
        return "a function"
    if re.fullmatch(r"recall@[1-9]\d*", name):
        return "recall@k"
    return name if name in _SUITS and name.isidentifier() else ""


def title(name: str) -> str:
    """Return the name of a metric for tables: that of the function without its module."""
    return {"auc": "AUC", "r2": "R2", "absolute_error": "mean absolute error"}.get(name, name.rpartition(":")[2])


def reported(spec: Spec, data: DataSet) -> list[str]:
    """Return the metrics of final results: those of [run], and for numbers and counts those that suit them."""
    of_counts = ["sklearn.metrics:mean_poisson_deviance"] if data.schema and data.schema.counts else []
    return list(dict.fromkeys([*spec.run.metrics, *(OF_NUMBERS if data.score == "r2" else []), *of_counts]))


def require_names(spec: Spec) -> None:
    """Raise PrivacyError unless run.metrics and tuning.by name metrics, and functions can be imported."""
    valid = [name for name in _SUITS if name != "a function"]
    for name in spec.run.metrics:
        if ":" in name:
            imported("run.metrics", name)
        elif not family(name):
            remedy = 'choose one, such as recall@3 for k = 3, or "package.module:function"'
            raise unknown("run.metrics", name, valid, remedy)
    titles = [title(name) for name in spec.run.metrics]
    if double := [name for name in spec.run.metrics if titles.count(title(name)) > 1]:
        raise wrong("run.metrics", "to have different names", repr(double[0]))
    by = "loss" if spec.tuning is None else spec.tuning.by
    if by not in ("loss", "train_loss") and family(by) not in valid:
        remedy = "choose one; a function may be in run.metrics only"
        raise unknown("tuning.by", by, ("loss", "train_loss", *valid), remedy)


def is_paid(name: str) -> bool:
    """Return whether a metric is a mean of one value in [0, 1] per person, after cutting."""
    return family(name) in _PAID


def require_suited(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the metrics suit the data, and functions of the user return a number."""
    for name in reported(spec, data):
        _require_suited("run.metrics", name, data, data.test)
    tuning = spec.tuning
    if tuning is None or not (tuning.way or any(map(spec.is_tuned, spec.methods))):
        return
    by = tuning.by
    if by == "accuracy" and data.score is not None and not (data.score == "r2" and "by" in tuning.model_fields_set):
        by = scored_by(by, data) if tuning.way else data.score  # the default
    if by not in ("loss", "train_loss"):
        _require_suited("tuning.by", by, data, data.test if tuning.way else data.validation)


def _require_suited(place: str, name: str, data: DataSet, part: TensorDataset) -> None:
    kind, labels = _kind(data), part.tensors[1]
    if kind not in _SUITS[family(name)]:
        pays = place == "tuning.by" and part is data.test
        suited = [other for other, kinds in _SUITS.items() if kind in kinds and (other in _PAID or not pays)]
        remedy = f"choose {'loss or ' * (place == 'tuning.by' and not pays)}{' or '.join(suited)}"
        raise expected("make_data", place, f"to suit data with {_KINDS[kind]}", repr(name), remedy)
    if family(name) in ("auc", "r2") and len(present := labels[has_label(labels)].unique()) < 2:
        where = "the test part" if part is data.test else "the validation part"
        raise expected("make_data", f"{where} of {data.name}", f"to have two different labels for {name}", len(present))
    if family(name) in ("auc", "f1"):
        _sklearn()
    if ":" in name:  # the function is called with the labels of the part and random outputs
        shape = (*labels.shape, data.num_classes) if kind in ("classes", "numbers") else labels.shape
        random = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        _pooled(name, *_labeled(labels, random, data))


def _kind(data: DataSet) -> Kind:
    labels = data.test.tensors[1]
    if data.score is None or data.score == "r2":
        return "vectors" if data.score is None else "numbers"
    if labels.is_floating_point():
        return "tags"
    return "classes" if labels.ndim == 1 or data.by_person else "texts"


def metrics_of(
    model: nn.Module, examples: TensorDataset, data: DataSet, names: Sequence[str], known: Mapping[str, float]
) -> dict[str, float]:
    """Return metrics of a model on some examples, by name; those that are known are taken over. No noise is added.

    Those of `is_paid` are means over the rows of `examples`, so that each person counts once. The other ones are
    computed from all labels together, so that each row of a person counts.
    """
    per_person = [name for name in names if is_paid(name) and name not in known]
    values = unit_values(model, examples, data, per_person) if per_person else []
    found = {name: own.mean().item() for name, own in zip(per_person, values, strict=True)} | dict(known)
    if pooled := [name for name in names if not is_paid(name)]:
        gathered = _labeled(*_gathered(model, examples, data), data)
        found |= {name: _pooled(name, *gathered) for name in pooled}
    return {name: found[name] for name in names}


def intervals_of(
    model: nn.Module, examples: TensorDataset, data: DataSet, names: Sequence[str]
) -> dict[str, list[float] | None]:
    """Return 95 % confidence intervals of metrics, by the number of rows of `examples`; a row may be a person."""
    per_person, pooled = ([name for name in names if is_paid(name) == paid] for paid in (True, False))
    most = math.inf if _kind(data) in ("numbers", "vectors") else 1.0
    values = unit_values(model, examples, data, per_person) if per_person else []
    found: dict[str, list[float] | None] = {}
    found |= {name: interval(own, most=most) for name, own in zip(per_person, values, strict=True)}
    if pooled:
        labels, logits = _gathered(model, examples, data)
        found |= {name: _bootstrap(name, labels, logits, data) for name in pooled}
    return {name: found[name] for name in names}


def interval(values: Tensor, *, most: float = 1.0) -> list[float]:
    """Return a 95 % confidence interval of the mean of per-person values in [0, most], by the number of persons."""
    count, center = len(values), values.mean().item()
    if most == 1 and bool(((values == 0) | (values == 1)).all()):  # Wilson's; otherwise the normal approximation
        found = binomtest(int(values.sum()), count).proportion_ci(_CONFIDENCE, method="wilson")
        return [float(found.low), float(found.high)]
    half = 1.96 * values.std().item() / math.sqrt(count)
    return [max(0.0, center - half), min(most, center + half)]


def _bootstrap(name: str, labels: Tensor, logits: Tensor, data: DataSet) -> list[float] | None:
    """Return the percentile interval of a metric over resamples of the rows; None if it is undefined for one."""
    generator, count = torch.Generator().manual_seed(0), len(labels)
    draws = (torch.randint(count, (count,), generator=generator) for _ in range(_RESAMPLES))
    try:
        found = [_pooled(name, *_labeled(labels[rows], logits[rows], data)) for rows in draws]
    except PrivacyError:  # a function of the user that is undefined for a draw
        return None
    low, high = (float(np.quantile(found, tail)) for tail in ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2))
    # Equal draws are those of a perfect result, and would claim certainty.
    return [low, high] if math.isfinite(low + high) and not math.isclose(low, high) else None


def _gathered(model: nn.Module, examples: TensorDataset, data: DataSet) -> tuple[Tensor, Tensor]:
    with evaluating(model), torch.no_grad():
        found = [(labels.cpu(), logits.cpu()) for logits, labels in outputs(model, examples, data)]
    labels, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return labels, logits


def _labeled(labels: Tensor, logits: Tensor, data: DataSet) -> tuple[Tensor, Tensor]:
    """Return labels and outputs of the rows that the persons have, one below the other; all for other data."""
    if data.score is None:  # labels that are no classes become vectors, as the outputs
        return labels.flatten(1), logits.flatten(1)
    if data.score == "r2":  # predictions within the bounds, in the units of the label
        labels, logits = labels.double(), Target.of(data).decoded(logits.double())
    elif not data.by_person:
        return labels, logits
    known = has_label(labels)
    return labels[known], logits[known]


def _pooled(name: str, labels: Tensor, logits: Tensor) -> float:
    """Return a metric of all labels together; NaN if the outputs are not finite, and for auc with one class only."""
    if not bool(logits.isfinite().all()):
        return math.nan
    if ":" in name:  # a function of the user gets labels, (N,) for classes, and outputs, (N, classes)
        made = called("run.metrics", name, imported("run.metrics", name), labels, logits)
        try:
            value = float(made)
        except (TypeError, ValueError, RuntimeError):  # no number; RuntimeError for a tensor of several
            value = math.nan
        if not math.isfinite(value):
            raise expected("metrics", f"{name}", "to return a finite number", described(made))
        return value
    if name == "r2":  # the share of the labels' variance that is explained: 0 for their mean, 1 if all are right
        error, spread = ((labels - one).square().sum().item() for one in (logits, labels.mean()))
        return 1 - error / spread if spread > 0 else math.nan
    binary = logits.shape[1] == 2
    if name == "f1":  # of class 1 for two classes, and otherwise the mean over classes
        average = "binary" if binary else "macro"
        return float(_sklearn().f1_score(labels, logits.argmax(1), average=average, zero_division=0))
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[1])
    present = one_hot.any(0)
    if int(present.sum()) < 2:
        return math.nan
    if binary:
        return float(_sklearn().roc_auc_score(labels, logits[:, 1].double() - logits[:, 0].double()))
    # The mean over the classes that occur of the area under the curve of each one against the rest.
    chances = logits.double().softmax(1)
    return float(_sklearn().roc_auc_score(one_hot[:, present], chances[:, present], average="macro"))


def _sklearn() -> Any:
    remedy = "pip install 'privgrad[experiments]'"
    return optional("metrics", "scikit-learn", "sklearn.metrics", remedy, purpose=" for auc and f1")
