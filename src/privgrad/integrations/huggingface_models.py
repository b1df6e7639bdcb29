"""The parts of a transformers model that PrivateTrainer asks for: losses, new layers and labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from privgrad.errors import described, expected
from privgrad.sampling.class_rates import ClassRates

Losses = Callable[[Any, Any], Tensor]
_LABELS = ("labels", "label", "label_ids")  # the names under which transformers' collators look for labels
_IGNORED = -100  # the label of what has no loss


def losses_of(model: nn.Module) -> Losses:
    """Return the function that computes the loss of this transformers model, one value per example."""
    base = _base_of(model)
    name, config = type(base).__name__, cast(Any, getattr(base, "config", None))
    if getattr(config, "output_router_logits", False):
        remedy = "set model.config.output_router_logits = False: the loss that balances experts mixes examples"
        raise expected("PrivateTrainer", "model", "to have one loss per example", "output_router_logits=True", remedy)
    if name in _names(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return causal_lm_losses
    remedy = "give loss_fn, (model, batch) -> losses of shape (B,): docs/integrations.md has a line for each task"
    if name in _names(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES):
        kind = getattr(config, "problem_type", None) or "single_label_classification"
        if kind != "single_label_classification":
            name = f"{name} for {kind.replace('_', ' ')}"
        elif config.num_labels > 1:
            return classification_losses
        else:
            name = f"{name} with num_labels=1"
            remedy = f"give num_labels of at least 2, the number of classes, to from_pretrained; else {remedy}"
    raise expected("PrivateTrainer", "model", "to be a causal language model or a classifier of texts", name, remedy)


def head_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a sequence classifier adds to its pretrained base model."""
    base = _base_of(model)
    if type(base).__name__ not in _names(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES):
        return set()
    pretrained = {id(parameter) for parameter in base.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in pretrained}


def pooler_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters of a pooler, if nothing but it and the head of the model is trained."""
    head = head_of(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in head}
    return trained if all("pooler" in name.split(".") for name in trained) else set()


# Fault: a bad row stops the training at the step that draws it, after others were paid for.
# Cost: it reads the labels once. It sees lists of dicts and datasets.Dataset only.
# Refuses wrongly: no case is known.
def require_labels(model: nn.Module, dataset: Any, *, are_collated: bool) -> None:
    """Raise PrivacyError (NOT private: it names a row) if a data set with columns lacks labels or has wrong ones."""
    data = dataset.dataset if isinstance(dataset, ClassRates) else dataset
    columns = _columns_of(data)
    label = next((name for name in _LABELS if name in columns), None)
    if columns and label is None and not are_collated:  # a collator of the user's own may rename the labels
        remedy = f"rename it: dataset.rename_column({columns[-1]!r}, 'labels'), if {columns[-1]!r} has the classes"
        condition, got = "to have a column labels or label", f"columns {', '.join(columns)}"
        raise expected("PrivateTrainer", "train_dataset", condition, got, remedy)
    if label is None:
        return
    count: int = _base_of(model).config.num_labels
    rows = cast("Any", data)
    values: Sequence[Any] = [row.get(label) for row in rows] if isinstance(data, list) else rows[label]
    for row, value in enumerate(values):
        number = cast("object", value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value)
        if isinstance(number, str | None) or (isinstance(number, int) and number not in (_IGNORED, *range(count))):
            name, condition = f"{label} of the example at index {row}", f"to be a class number from 0 to {count - 1}"
            remedy = f"correct it or leave it out; number names by dataset.class_encode_column({label!r})"
            raise expected("PrivateTrainer", name, condition, described(number), remedy)


def _base_of(model: nn.Module) -> Any:
    """Return the transformers model, without the adapters of PEFT around it."""
    return cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model


def _columns_of(data: Any) -> list[str]:
    """Return the names of the columns of a `datasets.Dataset` or a list of dicts; nothing for other data sets."""
    if isinstance(data, list):
        rows = cast("list[Any]", data)
        return list(rows[0]) if rows and all(isinstance(row, dict) for row in rows) else []
    names = getattr(data, "column_names", None)
    is_transformed = cast("Any", getattr(data, "format", {})).get("type") == "custom"  # it may make other columns
    return cast("list[str]", names) if isinstance(names, list) and not is_transformed else []


def _names(mapping: Mapping[str, Any]) -> set[str]:
    """Return the class names in one of transformers' tables; an entry is one name or several."""
    return {name for entry in mapping.values() for name in ([entry] if isinstance(entry, str) else entry)}


def classification_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the cross-entropy of each sequence's label, shape (B,)."""
    if batch["labels"].is_floating_point():  # transformers would read them as several labels per sequence
        remedy = "give one class per sequence, or pass loss_fn"
        raise expected("PrivateTrainer", "labels", "to be integers", str(batch["labels"].dtype), remedy)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")


def causal_lm_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute each sequence's mean cross-entropy over its own next tokens, without labels of -100, shape (B,)."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits.float()
    prompt = logits.shape[1] - labels.shape[1]  # virtual tokens that PEFT prepends
    following = F.pad(labels, (prompt, 0), value=_IGNORED)[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), following, reduction="none")
    return losses.sum(1) / (following != _IGNORED).sum(1).clamp(min=1)


def require_single_texts(eval_dataset: Any) -> None:
    """Raise PrivacyError if the first row of evaluation data, or of one of several data sets, has several texts."""
    named = cast("dict[str, Any]", eval_dataset) if isinstance(eval_dataset, dict) else {"": eval_dataset}
    for rows in named.values():
        row: Any = rows[0] if hasattr(rows, "__getitem__") and len(rows) else None
        ids = cast("Any", row).get("input_ids") if isinstance(row, Mapping) else None
        if ids is not None and np.ndim(ids[0]) > 0:
            got, remedy = f"{len(ids)} texts in the first one", "give the texts of other persons, each in its own row"
            raise expected("PrivateTrainer", "eval_dataset", "to hold one text per row", got, remedy)
