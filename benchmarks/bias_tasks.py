"""Data and models of the comparisons in results/bias: `privgrad compare results/bias/TASK/comparison.toml`.

`sections` loads the sections of Debian packages as states of MiniLM: the mean over the tokens after the last layer, for
a head, or the tokens below the last layer, for adapters in it. States are computed once, and stored in runs/bias.

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
