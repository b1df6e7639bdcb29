"""Metrics of a final model, by name or by a function of the user, and the criteria of tuning.

`load_spec` calls `require_names`, `build` calls `require_suited`, and `runner` and `paid_runner` call the rest. The
privacy guarantee rests on PER_PERSON only: these metrics are means of one value per person, so that a noisy one can be
paid for. All results are NOT private for the examples that they are measured on.
"""

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.data import DataSet
from privgrad.data.dataset import NO_LABEL
from privgrad.errors import PrivacyError, described, did_you_mean, expected
from privgrad.experiments.measures import outputs, tokens, unit_values
from privgrad.experiments.sources import called, imported
from privgrad.experiments.spec import Spec
from privgrad.gradient.module_state import evaluating

Kind = Literal["classes", "texts", "tags", "numbers"]

# The kinds of labels that each metric suits.
_SUITS: dict[str, tuple[Kind, ...]] = {
    "accuracy": ("classes", "texts"),
    "auc": ("classes",),
    "f1": ("classes",),
    "recall@k": ("classes", "texts", "tags"),
    "squared_error": ("classes", "texts", "numbers"),
    "a function": ("classes", "tags", "numbers"),
}
PER_PERSON = ("accuracy", "recall@k", "squared_error")
_KINDS: dict[Kind, str] = {
    "classes": "one class per label",
    "texts": "a class for each token",
    "tags": "tags",
    "numbers": "no classes",
}
_CONFIDENCE = 0.95
_RESAMPLES = 500


def family(name: str) -> str:
    """Return the key of a metric in _SUITS: "recall@k" for "recall@3"; "" for an unknown name."""
    if ":" in name:
        return "a function"
    if re.fullmatch(r"recall@[1-9]\d*", name):
        return "recall@k"
    return name if name in ("accuracy", "auc", "f1", "squared_error") else ""


def title(name: str) -> str:
    """Return the name of a metric for tables: that of the function without its module. The report calls it."""
    return name.rpartition(":")[2]


def require_names(spec: Spec) -> None:
    """Raise PrivacyError unless run.metrics and tuning.by name metrics, and functions can be imported."""
    valid = [name for name in _SUITS if name != "a function"]
    for name in spec.run.metrics:
        if ":" in name:
            imported("run.metrics", name)
        elif not family(name):
            remedy = did_you_mean(name, valid, 'choose one, such as recall@3 for k = 3, or "package.module:function"')
            raise expected("load_spec", "run.metrics", f"to hold {', '.join(valid)}", repr(name), remedy)
    titles = [title(name) for name in spec.run.metrics]
    if double := [name for name in titles if titles.count(name) > 1]:
        raise expected("load_spec", "run.metrics", "to have different names", repr(double[0]), "keep one of them")
    by, criteria = "accuracy" if spec.tuning is None else spec.tuning.by, ["loss", "train_loss", *valid]
    if by not in criteria[:2] and family(by) not in valid:
        remedy = did_you_mean(by, criteria, "choose one; a function may be in run.metrics only")
        raise expected("load_spec", "tuning.by", f"to be one of {', '.join(criteria)}", repr(by), remedy)


def is_paid(name: str) -> bool:
    """Return whether a metric is a mean of one value in [0, 1] per person, after cutting. `prices` calls it."""
    return family(name) in PER_PERSON


def require_suited(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the metrics suit the data, and functions of the user return a number.

    `build.make_data` calls it. A function is called with the labels of the test part and random outputs.
    """
    for name in spec.run.metrics:
        _require_suited("run.metrics", name, data, data.test)
    by = "accuracy" if spec.tuning is None else spec.tuning.by
    if by not in ("accuracy", "loss", "train_loss") and any(map(spec.is_tuned, spec.methods)):
        _require_suited("tuning.by", by, data, data.validation if spec.privacy.total_epsilon is None else data.test)


def _require_suited(place: str, name: str, data: DataSet, part: TensorDataset) -> None:
    """Raise PrivacyError unless one metric suits a part of the data."""
    kind, labels = _kind(data), part.tensors[1]
    if kind not in _SUITS[family(name)]:
        suited = [other for other, kinds in _SUITS.items() if kind in kinds]
        remedy = f"choose {', '.join(suited[:-1])} or {suited[-1]}" if suited[1:] else f"choose {suited[0]}"
        raise expected("make_data", place, f"to suit data with {_KINDS[kind]}", repr(name), remedy)
    if family(name) == "recall@k" and int(name.removeprefix("recall@")) >= data.num_classes:
        condition, remedy = f"to have a k below {data.num_classes}, the number of classes", "lower k"
        raise expected("make_data", place, condition, repr(name), remedy)
    if family(name) == "auc" and len(present := labels[labels != NO_LABEL].unique()) < 2:
        remedy = f'leave "auc" out of {place}, or choose parts with examples of several classes'
        where = "the test part" if part is data.test else "the validation part"
        raise expected("make_data", f"{where} of {data.name}", "to have two classes for auc", len(present), remedy)
    if family(name) in ("auc", "f1"):
        _sklearn()
    if ":" in name:
        shape = (*labels.shape, data.num_classes) if kind == "classes" else labels.shape
        random = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        _pooled(name, *_labeled(labels, random, data))


def _kind(data: DataSet) -> Kind:
    """Return the kind of labels that a data set has."""
    labels = data.test.tensors[1]
    if data.score is None:
        return "numbers"
    if labels.is_floating_point():
        return "tags"
    return "classes" if tokens(labels) is None or data.by_person else "texts"


def metrics_of(
    model: nn.Module, examples: TensorDataset, data: DataSet, names: Sequence[str], known: Mapping[str, float]
) -> dict[str, float]:
    """Return metrics of a model on some examples, by name.

    Those of PER_PERSON are means over the rows of `examples`, so that each person counts once. The other ones are
    computed from all labels together, so that each row of a person counts.

    Args:
        model: in any mode.
        examples: the test or the validation part.
        data: their data set.
        names: as in run.metrics.
        known: metrics that have been measured already, by name.
    Returns:
        The metrics; NaN for a model whose outputs are not finite.
    Raises:
        PrivacyError: a function of the user fails or returns no finite number.
    Privacy:
        NOT private for `examples`: no noise is added.
    """
    per_person = [name for name in names if is_paid(name) and name not in known]
    values = unit_values(model, examples, data, per_person) if per_person else []
    found = {name: own.mean().item() for name, own in zip(per_person, values, strict=True)} | dict(known)
    pooled = [name for name in names if not is_paid(name)]
    if pooled:
        gathered = _labeled(*_gathered(model, examples, data), data)
        found |= {name: _pooled(name, *gathered) for name in pooled}
    return {name: found[name] for name in names}


def intervals_of(
    model: nn.Module, examples: TensorDataset, data: DataSet, names: Sequence[str]
) -> dict[str, list[float] | None]:
    """Return 95 % confidence intervals of metrics, by the number of rows of `examples`; a row may be a person.

    The metrics of PER_PERSON have that of `interval`. The other ones have a percentile bootstrap over the rows, with
    500 draws and a fixed seed. It is None if a metric is undefined for one of the draws, and if all draws are equal:
    those of a perfect result would claim certainty.
    """
    per_person, pooled = ([name for name in names if is_paid(name) == paid] for paid in (True, False))
    most = math.inf if _kind(data) == "numbers" else 1.0
    values = unit_values(model, examples, data, per_person) if per_person else []
    found = {name: interval(own, most=most) for name, own in zip(per_person, values, strict=True)}
    if not pooled:
        return dict(found)
    labels, logits = _gathered(model, examples, data)

    def drawn(name: str, rows: Tensor) -> float:
        return _pooled(name, *_labeled(labels[rows], logits[rows], data))

    rest = {name: _bootstrap(partial(drawn, name), len(labels)) for name in pooled}
    return {name: (found | rest)[name] for name in names}


def interval(values: Tensor, *, most: float = 1.0) -> list[float]:
    """Return a 95 % confidence interval of the mean of per-person values in [0, most], by the number of persons.

    It is Wilson's for values of 0 and 1, and otherwise the normal approximation. `paid_runner` calls it too.
    """
    count, center = len(values), values.mean().item()
    if bool(((values == 0) | (values == 1)).all()):
        found = binomtest(int(values.sum()), count).proportion_ci(_CONFIDENCE, method="wilson")
        return [float(found.low), float(found.high)]
    half = 1.96 * values.std().item() / math.sqrt(count)
    return [max(0.0, center - half), min(most, center + half)]


def _bootstrap(drawn: Callable[[Tensor], float], count: int) -> list[float] | None:
    """Return the percentile interval of a metric of rows, given by index, over resamples of `count` rows."""
    generator = torch.Generator().manual_seed(0)
    try:
        found = [drawn(torch.randint(count, (count,), generator=generator)) for _ in range(_RESAMPLES)]
    except PrivacyError:  # a function of the user that is undefined for a draw
        return None
    low, high = (float(np.quantile(found, tail)) for tail in ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2))
    return [low, high] if math.isfinite(low + high) and not math.isclose(low, high) else None


def _gathered(model: nn.Module, examples: TensorDataset, data: DataSet) -> tuple[Tensor, Tensor]:
    """Return the labels and the model's outputs of all rows of `examples`, on the CPU."""
    with evaluating(model), torch.no_grad():
        found = [(labels.cpu(), logits.cpu()) for logits, labels in outputs(model, examples, data)]
    labels, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return labels, logits


def _labeled(labels: Tensor, logits: Tensor, data: DataSet) -> tuple[Tensor, Tensor]:
    """Return labels and outputs of the rows that the persons have, one below the other; all for other data.

    Labels that are no classes become vectors, as the outputs.
    """
    if data.score is None:
        return labels.flatten(1), logits.flatten(1)
    if not data.by_person:
        return labels, logits
    has_label = labels != NO_LABEL
    return labels[has_label], logits[has_label]


def _pooled(name: str, labels: Tensor, logits: Tensor) -> float:
    """Return a metric of all labels together; NaN if the outputs are not finite, and for auc with one class only.

    "auc" is the area under the ROC curve; for several classes, the mean over the classes that occur of each one
    against the rest. "f1" is that of class 1 for two classes, and otherwise the mean over classes. Both are computed by
    scikit-learn. A function of the user gets labels and outputs.

    Args:
        name: "auc", "f1" or "package.module:function".
        labels: shape (N,) for classes.
        logits: shape (N, classes).
    Raises:
        PrivacyError: a function of the user fails or returns no finite number.
    """
    if not bool(logits.isfinite().all()):
        return math.nan
    if ":" in name:
        made = called("run.metrics", name, imported("run.metrics", name), labels, logits)
        try:
            value = float(made)
        except (TypeError, ValueError, RuntimeError):  # no number; RuntimeError for a tensor of several
            value = math.nan
        if not math.isfinite(value):
            raise expected("metrics", f"{name}", "to return a finite number", described(made), f"correct {name}")
        return value
    binary = logits.shape[1] == 2
    if name == "f1":
        average = "binary" if binary else "macro"
        return float(_sklearn().f1_score(labels, logits.argmax(1), average=average, zero_division=0))
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[1])
    present = one_hot.any(0)
    if int(present.sum()) < 2:
        return math.nan
    if binary:
        return float(_sklearn().roc_auc_score(labels, logits[:, 1].double() - logits[:, 0].double()))
    chances = logits.double().softmax(1)
    return float(_sklearn().roc_auc_score(one_hot[:, present], chances[:, present], average="macro"))


def _sklearn() -> Any:
    """Return scikit-learn's metrics; the package is imported only here, because it is an optional extra."""
    try:
        return importlib.import_module("sklearn.metrics")
    except ImportError as error:
        remedy = "pip install 'privgrad[experiments]'"
        raise expected("metrics", "scikit-learn", "to be installed for auc and f1", error, remedy) from error
