"""Other ways to train the same architectures."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from .cases import Case


def with_lora(case: Case) -> Case:
    """Add an adapter to each linear layer of a model of transformers, and freeze the rest."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
    model: nn.Module = peft.get_peft_model(case.model, config)
    return Case(model, case.examples, case.losses)


def with_checkpointing(case: Case) -> Case:
    """Compute the states of layers again in the backward pass."""
    model: Any = case.model
    model.gradient_checkpointing_enable()
    return case


VARIANTS: dict[str, Callable[[Case], Case]] = {"lora": with_lora, "checkpointing": with_checkpointing}
