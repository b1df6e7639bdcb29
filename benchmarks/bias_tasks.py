"""Data and models of the comparisons in results/bias: `privgrad compare results/bias/TASK/comparison.toml`.

`sections` loads the sections of Debian packages as states of MiniLM: the mean over the tokens after the last layer, for
a head, or the tokens below the last layer, for adapters in it. States are computed once, and stored in runs/bias.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.data import MINILM, DataSet, debian_texts, pretrained
from privgrad.features.text import texts_of

STORED = Path("runs/bias")
TESTED = 2000  # test texts
TOKENS = {"head": 12, "adapters": 6}  # of a text


def sections(*, kind: str, limit: int, validation: int = 0) -> DataSet:
    """Return unit rows of MiniLM ("head") or states below its last layer ("adapters"), and one of 58 sections."""
    data = debian_texts(task="sections", length=200, limit=limit)
    found: dict[str, list[Tensor]] = {}
    for part, examples, count in (("train", data.train, limit), ("test", data.test, TESTED)):
        path = STORED / f"{kind}-{part}-{count}.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(_states(examples.tensors[0][:count], kind), path)
        found[part] = [torch.load(path), examples.tensors[1][:count]]
    (rows, labels), kept = found["train"], limit - validation
    return DataSet(
        name=f"sections, MiniLM for {kind}",
        train=TensorDataset(rows[:kept], labels[:kept]),
        validation=TensorDataset(rows[kept:], labels[kept:]),
        test=TensorDataset(*found["test"]),
        num_classes=data.num_classes,
        input_shape=tuple(rows.shape[1:]),
    )


@torch.no_grad()
def _states(rows: Tensor, kind: str) -> Tensor:
    import transformers

    library: Any = transformers
    folder = pretrained(MINILM)
    tokenizer, encoder = library.AutoTokenizer.from_pretrained(folder), library.AutoModel.from_pretrained(folder)
    layers = encoder.encoder.layer[: None if kind == "head" else -1]
    found: list[Tensor] = []
    for some in rows.split(64):
        options = {"truncation": True, "max_length": TOKENS[kind], "padding": "max_length", "return_tensors": "pt"}
        tokens = tokenizer(list(texts_of(some)), **options)
        seen = tokens["attention_mask"].float()
        states = encoder.embeddings(input_ids=tokens["input_ids"])
        for layer in layers:
            states = layer(states, _mask(seen))
        states = states * seen[..., None]
        found.append(F.normalize(states.sum(1), dim=1) if kind == "head" else states.flatten(1))
    return torch.cat(found)


def _mask(seen: Tensor) -> Tensor:
    return ((1 - seen) * torch.finfo(torch.float32).min)[:, None, None]


class Adapted(nn.Module):
    """MiniLM's last layer with LoRA of rank 4 in queries and values, mean pooling, and a head that starts at zero."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        import transformers
        from peft import LoraConfig, inject_adapter_in_model

        library: Any = transformers
        layer = library.AutoModel.from_pretrained(pretrained(MINILM), attn_implementation="eager").encoder.layer[-1]
        layer.requires_grad_(False)
        self.width = layer.output.dense.out_features
        options: Any = {"r": 4, "lora_alpha": 4, "target_modules": ["query", "value"]}
        self.layer: Any = inject_adapter_in_model(LoraConfig(**options), layer)
        self.head = nn.Linear(self.width, classes, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        states = x.view(len(x), -1, self.width)
        seen = (states != 0).any(2).to(x.dtype)
        last = self.layer(states, _mask(seen))
        return self.head(F.normalize((last * seen[..., None]).sum(1), dim=1))


def adapters(data: DataSet) -> nn.Module:
    return Adapted(data.num_classes)


class Embedded(nn.Module):
    """The mean of word embeddings, and a linear layer: word ids (B, L) -> logits (B, classes)."""

    def __init__(self, vocabulary: int, classes: int, width: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, width, mode="mean", padding_idx=0)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.words(ids)))


def embeddings(data: DataSet, *, width: int = 16) -> nn.Module:
    assert data.vocabulary is not None
    return Embedded(data.vocabulary, data.num_classes, width)
