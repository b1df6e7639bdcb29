"""Models of the sizes that people fine-tune, with random weights: rows of `benchmarks.gpu`, by `gpu_real.sh`.

32 examples, texts of 512 tokens, gradient checkpointing. In bf16 the frozen base of LoRA is in bfloat16.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lora import next_words
from benchmarks.methods import Setup
from benchmarks.workloads import Workload

EXAMPLES, LENGTH, CLASSES = 32, 512, 10


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def gpt2() -> nn.Module:
    """All 124 million parameters are trained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _checkpointed(GPT2LMHeadModel(GPT2Config(use_cache=False)))


def llama(dtype: torch.dtype) -> nn.Module:
    """The sizes of TinyLlama, 1.1 billion, frozen; adapters of rank 16 on each linear layer but the last one."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=False,
    )
    base: Any = LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]
    base.enable_input_require_grads()
    return get_peft_model(_checkpointed(base), LoraConfig(r=16, target_modules="all-linear"))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return _checkpointed(BertForSequenceClassification(BertConfig(num_labels=CLASSES)))  # pyright: ignore[reportCallIssue]


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return _checkpointed(ViTForImageClassification(ViTConfig(num_labels=CLASSES)))  # pyright: ignore[reportCallIssue]


def texts(words: int) -> tuple[Tensor, Tensor]:
    some = torch.randint(words, (EXAMPLES, LENGTH))
    return some, some


def classes(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.float(), target, reduction="none")


def labeled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.randint(CLASSES, (EXAMPLES,))


@dataclass(frozen=True)
class RealSize(Setup):
    """One of these models; `name` is its row."""

    @property
    def workload(self) -> Workload:
        return workloads(torch.bfloat16 if self.dtype == "bf16" else torch.float32)[self.name]


def workloads(dtype: torch.dtype) -> dict[str, Workload]:
    """Return them by row."""
    return {
        "gpt2-124m": Workload("GPT-2", EXAMPLES, gpt2, partial(texts, 50_257), next_words),
        "llama-1.1b-lora": Workload(
            "LoRA of rank 16 on a Llama", EXAMPLES, partial(llama, dtype), partial(texts, 32_000), next_words
        ),
        "bert-base": Workload("BERT", EXAMPLES, bert, lambda: labeled(texts(30_522)[0]), classes),
        "vit-base": Workload("ViT", EXAMPLES, vit, lambda: labeled(torch.randn(EXAMPLES, 3, 224, 224)), classes),
    }


REAL_SIZES = tuple(workloads(torch.float32))
