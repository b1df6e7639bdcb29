"""The 21 models whose steps are counted: workloads, small models beside them, and architectures of tests/zoo."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architectures import Architecture
from benchmarks.methods import Setup
from benchmarks.workloads import WORKLOADS, Workload, cross_entropy, image_data, resnet9
from tests.zoo.architectures import ARCHITECTURES

MOST = 64  # examples that a small model has


class Interactions(nn.Module):
    """DLRM: tables of categories, a net for numbers, products between all of them, a net on top."""

    row: Tensor
    column: Tensor

    def __init__(self, tables: int = 8, rows: int = 2000, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + tables * (tables + 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        row, column = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("row", row)
        self.register_buffer("column", column)

    def forward(self, x: Tensor) -> Tensor:
        numbers, categories = x[:, :13], x[:, 13:].long()
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(categories[:, k]) for k, table in enumerate(self.tables))], 1)
        products = (vectors @ vectors.mT)[:, self.row, self.column]
        return self.top(torch.cat([dense, products], 1))[:, 0]


class Block(nn.Module):
    """A layer of a vision transformer as timm writes it: queries, keys and values from one Linear."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixed(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token and a position parameter, blocks, a linear head."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, image: int = 64, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def multilayer() -> nn.Sequential:
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def bert(width: int, layers: int, *, lora: bool = False) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=5000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=layers,
        intermediate_size=4 * width,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(model, adapters)  # pyright: ignore[reportArgumentType]


def over_logits(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output.logits, target)


def over_one_logit(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none")


def images(channels: int, side: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(MOST, channels, side, side), torch.randint(10, (MOST,)))


def texts() -> tuple[Tensor, Tensor]:
    return torch.randint(5000, (MOST, 64)), torch.randint(2, (MOST,))


def clicks() -> tuple[Tensor, Tensor]:
    categories = torch.randint(2000, (MOST, 8)).float()
    return torch.cat([torch.randn(MOST, 13), categories], 1), torch.randint(2, (MOST,)).float()


def barcodes() -> tuple[Tensor, Tensor]:
    """Numbers of the shape of W7's, which takes a while to make."""
    return torch.rand(MOST, 9216), torch.randint(255, (MOST,))


def plain_conv(n_in: int, n_out: int) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)


SMALL: dict[str, Workload] = {
    "softmax": Workload(
        "softmax 784 x 10", MOST, lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), images(1, 28)
    ),
    "mlp": Workload("three Linears", MOST, multilayer, images(1, 28)),
    "dlrm": Workload("DLRM, 8 tables", MOST, Interactions, clicks, over_one_logit),
    "vit": Workload("ViT, position parameter", MOST, VisionTransformer, images(3, 64)),
    "bert_tiny": Workload("BERT, 2 layers of 128", MOST, partial(bert, 128, 2), texts, over_logits),
    "lora_bert": Workload("LoRA on BERT, 4 layers", MOST, partial(bert, 256, 4, lora=True), texts, over_logits),
    "resnet9_gn": Workload("ResNet-9, GroupNorm", MOST, partial(resnet9, plain_conv), partial(image_data, MOST)),
    "W7": replace(WORKLOADS["W7"], batch_size=MOST, data=barcodes),
}
# The size of the batch does not change the counts, except where an engine loops over examples. So models that compute
# much have few.
COUNTED: dict[str, int] = {
    **dict.fromkeys(("softmax", "mlp", "dlrm", "W1", "W2", "W6", "W7"), 32),
    **dict.fromkeys(("bert_tiny", "lora_bert", "vit", "W3", "W4", "W4-custom", "W5", "resnet9_gn"), 8),
    **dict.fromkeys(("zoo:llama", "zoo:bert", "zoo:gpt2", "zoo:resnet_groupnorm", "zoo:convnext", "zoo:mixtral"), 8),
}


@dataclass(frozen=True)
class Counted(Setup):
    """A workload, or a small model."""

    @property
    def workload(self) -> Workload:
        return (WORKLOADS | SMALL)[self.name]


def setup_of(name: str, examples: int | None = None) -> Setup:
    """A counted model or workload by name, or an architecture as zoo:NAME; `examples` in place of its usual batch."""
    examples = examples or COUNTED.get(name, 8)
    if name.startswith("zoo:"):
        return Architecture(name.removeprefix("zoo:"), examples=examples)
    return Counted(name, examples=examples)


def is_known(name: str) -> bool:
    return name in WORKLOADS | SMALL or (name.startswith("zoo:") and name.removeprefix("zoo:") in ARCHITECTURES)
