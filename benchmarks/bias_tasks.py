"""Data and models of the comparisons in results/bias: `privgrad compare results/bias/TASK/comparison.toml`.

`sections` loads the sections of Debian packages as states of MiniLM: the mean over the tokens after the last layer, for
a head, or what the last feed-forward layer gets and adds, for adapters in it. They are computed
once, and stored in runs/bias.
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
TOKENS = {"head": 12, "adapters": 8}  # of a text
INNER, WIDTH = 1536, 384  # of MiniLM's feed-forward layers and states


def sections(*, kind: str, limit: int, validation: int = 0) -> DataSet:
    """Return unit rows of MiniLM ("head") or what its last layer adds up ("adapters"), and one of 58 sections."""
    path = STORED / f"{kind}-{limit}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        data, found = debian_texts(task="sections", length=200, limit=limit), dict[str, Any]()
        for part, examples in (("train", data.train), ("test", data.test)):
            rows, labels = (tensor[: TESTED if part == "test" else limit] for tensor in examples.tensors)
            found[part] = _states(rows, kind), labels
        torch.save(found | {"classes": data.num_classes}, path)
    found = torch.load(path)
    (rows, labels), kept = found["train"], limit - validation
    return DataSet(
        name=f"sections, MiniLM for {kind}",
        train=TensorDataset(rows[:kept], labels[:kept]),
        validation=TensorDataset(rows[kept:], labels[kept:]),
        test=TensorDataset(*found["test"]),
        num_classes=found["classes"],
        input_shape=tuple(rows.shape[1:]),
    )


@torch.no_grad()
def _states(rows: Tensor, kind: str) -> Tensor:
    import transformers

    library: Any = transformers
    folder = pretrained(MINILM)
    tokenizer, encoder = library.AutoTokenizer.from_pretrained(folder), library.AutoModel.from_pretrained(folder)
    *layers, last = encoder.encoder.layer
    found: list[Tensor] = []
    for some in rows.split(64):
        options = {"truncation": True, "max_length": TOKENS[kind], "padding": "max_length", "return_tensors": "pt"}
        tokens = tokenizer(list(texts_of(some)), **options)
        seen = tokens["attention_mask"].float()
        mask = ((1 - seen) * torch.finfo(torch.float32).min)[:, None, None]
        states = encoder.embeddings(input_ids=tokens["input_ids"])
        for layer in layers:
            states = layer(states, mask)
        if kind == "head":
            found.append(F.normalize((last(states, mask) * seen[..., None]).sum(1), dim=1))
            continue
        attended = last.attention(states, mask)[0]
        inner = last.intermediate(attended)
        found.append(torch.cat([inner, last.output.dense(inner) + attended, seen[..., None]], dim=2).flatten(1))
    return torch.cat(found)


class Adapted(nn.Module):
    """MiniLM with LoRA of rank 4 in its last feed-forward layer, mean pooling, and a head that starts at zero.

    All before this layer is frozen, so its inputs, and what it adds without LoRA, are computed once, as examples.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        import transformers

        library: Any = transformers
        self.norm = library.AutoModel.from_pretrained(pretrained(MINILM)).encoder.layer[-1].output.LayerNorm
        self.norm.requires_grad_(False)
        self.down, self.up = nn.Linear(INNER, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, classes, bias=False)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        inner, added, seen = x.view(len(x), -1, INNER + WIDTH + 1).split([INNER, WIDTH, 1], dim=2)
        last = self.norm(added + self.up(self.down(inner)))
        return self.head(F.normalize((last * seen).sum(1), dim=1))


def adapters(data: DataSet) -> nn.Module:
    return Adapted(data.num_classes)
