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


def with_lora_on_attention(case: Case) -> Case:
    """Add an adapter to the projections of attention, and freeze the rest, experts too."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    return Case(peft.get_peft_model(case.model, config), case.examples, case.losses)


def with_checkpointing(case: Case) -> Case:
    """Compute the states of layers again in the backward pass."""
    model: Any = case.model
    model.gradient_checkpointing_enable()
    return case


VARIANTS: dict[str, Callable[[Case], Case]] = {
    "lora": with_lora,
    "lora on attention": with_lora_on_attention,
    "checkpointing": with_checkpointing,
}
