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
LABELS = ("labels", "label", "label_ids")  # the names under which transformers' collators look for labels
IGNORED = -100  # the label of what has no loss


def losses_of(model: nn.Module) -> Losses:
    """Return the function that computes the loss of this transformers model, one value per example."""
    base = base_of(model)
    name, config = type(base).__name__, cast(Any, getattr(base, "config", None))
    if getattr(config, "output_router_logits", False):
        remedy = "set model.config.output_router_logits = False: the loss that balances experts mixes examples"
        raise expected("PrivateTrainer", "model", "to have one loss per example", "output_router_logits=True", remedy)
    if (losses := _known_losses(base)) is not None:
        return losses
    known = "for classes, several labels, numbers, tokens, spans of answers, images or languages"
    remedy = "give loss_fn, (model, batch) -> losses of shape (B,): this model has no loss that PrivateTrainer knows"
    raise expected("PrivateTrainer", "model", f"to be a model of transformers {known}", name, remedy)


def head_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a model for a task adds to its pretrained base model."""
    base = base_of(model)
    if _known_losses(base) not in _WITH_HEADS:
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
    label = next((name for name in LABELS if name in columns), None)
    if columns and label is None and not are_collated:  # a collator of the user's own may rename the labels
        remedy = f"rename it: dataset.rename_column({columns[-1]!r}, 'labels'), if {columns[-1]!r} has the classes"
        condition, got = "to have a column labels or label", f"columns {', '.join(columns)}"
        raise expected("PrivateTrainer", "train_dataset", condition, got, remedy)
    if label is None:
        return
    config = base_of(model).config
    is_class = config.num_labels > 1 and getattr(config, "problem_type", None) in (None, "single_label_classification")
    classes = (IGNORED, *range(config.num_labels))
    rows = cast("Any", data)
    values: Sequence[Any] = [row.get(label) for row in rows] if isinstance(data, list) else rows[label]
    for row, value in enumerate(values):
        number = cast("object", value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value)
        if isinstance(number, str | None) or (is_class and isinstance(number, int) and number not in classes):
            name = f"{label} of the example at index {row}"
            condition = f"to be a class number from 0 to {classes[-1]}" if is_class else "to be a number or numbers"
            remedy = f"correct it or leave it out; number names by dataset.class_encode_column({label!r})"
            raise expected("PrivateTrainer", name, condition, described(number), remedy)


def base_of(model: nn.Module) -> Any:
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


def _known_losses(base: nn.Module) -> Losses | None:
    """Return the losses of a model's task, by its class; None for a model of another task."""
    for task, losses in _LOSSES.items():
        for entry in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            if type(base).__name__ in ((entry,) if isinstance(entry, str) else entry):
                return losses
    return None


def classification_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute each row's loss of its class, of its several labels, or of its number, as transformers does, (B,)."""
    config, labels = base_of(model).config, batch["labels"]
    logits = model(**_inputs(batch)).logits.float()
    several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    kind = getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else several)
    if kind == "regression":
        return F.mse_loss(logits.flatten(1), labels.float().reshape(len(logits), -1), reduction="none").mean(1)
    of_several = kind == "multi_label_classification"
    if labels.shape != (logits.shape if of_several else logits.shape[:1]) or labels.is_floating_point() > of_several:
        condition = f"to be integers, one class for each row, or to have {logits.shape[1]} labels for each row"
        got = f"{labels.dtype} of shape {tuple(labels.shape)}"
        remedy = (
            "give the classes as integers; for several labels, set problem_type to 'multi_label_classification' in "
        )
        raise expected("PrivateTrainer", "labels", condition, got, f"{remedy}the model's config; or pass loss_fn")
    if of_several:
        return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
    return F.cross_entropy(logits, labels, reduction="none")


def token_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute each row's mean cross-entropy over its own tokens, without labels of -100, shape (B,)."""
    return _of_tokens(model(**batch).logits, batch["labels"])  # T5 and others make their decoder's inputs from labels


def tag_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute each row's mean cross-entropy over its own tags, without labels of -100, shape (B,)."""
    return _of_tokens(model(**_inputs(batch)).logits, batch["labels"])


def _of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def span_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the mean cross-entropy of the first and the last place of each row's answer, shape (B,)."""
    found = model(**_inputs(batch))
    losses = list[Tensor]()
    for name in ("start", "end"):
        logits = found[f"{name}_logits"].float()
        places = batch[f"{name}_positions"].clamp(0, logits.shape[1])  # an answer outside of the text has no loss
        losses.append(F.cross_entropy(logits, places, ignore_index=logits.shape[1], reduction="none"))
    return (losses[0] + losses[1]) / 2


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns without labels, whose mean loss the model need not compute."""
    return {name: value for name, value in batch.items() if name not in ("labels", "start_positions", "end_positions")}


def causal_lm_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute each sequence's mean cross-entropy over its own next tokens, without labels of -100, shape (B,)."""
    losses, counts = next_token_losses(model(**_inputs(batch)).logits, batch["labels"])
    return losses / counts.clamp(min=1)


def next_token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sequence's sum of cross-entropies of next tokens, and their number, both (B,); -100 has no loss."""
    prompt = logits.shape[1] - labels.shape[1]  # virtual tokens that PEFT prepends
    following = F.pad(labels, (prompt, 0), value=IGNORED)[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), following, reduction="none")
    return losses.sum(1), (following != IGNORED).sum(1)


def require_single_texts(eval_dataset: Any) -> None:
    """Raise PrivacyError if the first row of evaluation data, or of one of several data sets, has several texts."""
    named = cast("dict[str, Any]", eval_dataset) if isinstance(eval_dataset, dict) else {"": eval_dataset}
    for rows in named.values():
        row: Any = rows[0] if hasattr(rows, "__getitem__") and len(rows) else None
        ids = cast("Any", row).get("input_ids") if isinstance(row, Mapping) else None
        if ids is not None and np.ndim(ids[0]) > 0:
            got, remedy = f"{len(ids)} texts in the first one", "give the texts of other persons, each in its own row"
            raise expected("PrivateTrainer", "eval_dataset", "to hold one text per row", got, remedy)


_LOSSES: dict[str, Losses] = {  # by transformers' name of the task; some models are in two of its tables
    "CAUSAL_LM": causal_lm_losses,
    "SEQUENCE_CLASSIFICATION": classification_losses,
    "IMAGE_CLASSIFICATION": classification_losses,
    "TOKEN_CLASSIFICATION": tag_losses,
    "QUESTION_ANSWERING": span_losses,
    "MASKED_LM": token_losses,
    "SEQ_TO_SEQ_CAUSAL_LM": token_losses,
}
_WITH_HEADS = (classification_losses, tag_losses, span_losses)
