"""Data and models of the comparisons in results/bias: `privgrad compare results/bias/TASK/comparison.toml`.

`sections` loads the sections of Debian packages as states of MiniLM: the mean over the tokens after the last layer, for
a head, or what the last feed-forward layer gets and adds, for adapters in it. They are computed
once, and stored in runs/bias.

`python -m benchmarks.bias_tasks results/bias/words` trains the SGD of finished comparisons once more, with seed 0, and
writes the shares of coordinates whose signal exceeds the noise to raw_shares.json in each folder. NOT private.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks.bias_map import SHARES
from privgrad.data import MINILM, DataSet, debian_texts, pretrained
from privgrad.diagnostics import RawMoments
from privgrad.features.text import texts_of
from privgrad_lab import runner
from privgrad_lab.build import make_data
from privgrad_lab.load_spec import check_spec, read_tables
from privgrad_lab.records import candidate_of, read_records

STORED = Path("runs/bias")
TESTED = 2000  # test texts
TOKENS = {"head": 12, "adapters": 6}  # of a text
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


def raw_shares(folder: Path) -> dict[str, float]:
    """Return the shares of coordinates with a second moment above multiples of the noise's variance, under SGD."""
    spec = check_spec(read_tables(folder / "comparison.toml"), folder / "comparison.toml")
    found = next(r for r in read_records(folder) if (r["method"], r["phase"], r["seed"]) == ("SGD", "final", 0))
    data, method = make_data(spec), next(method for method in spec.methods if method.name == "SGD")
    made = runner.prepare(spec, runner.Run(method, candidate_of(found), 0, "final"), data)
    moments = RawMoments(made.private_grad)
    pg.fit(made.private_grad, made.optimizer, data.train, progress=False)
    over = moments.over_noise()["raw_clean"].double()
    return {f"{bound:g}": float((over > bound).double().mean()) for bound in SHARES}


def main(folders: list[Path]) -> None:
    """Write raw_shares.json in each folder."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    for folder in folders:
        (folder / "raw_shares.json").write_text(json.dumps(raw_shares(folder)) + "\n")


if __name__ == "__main__":
    typer.run(main)
