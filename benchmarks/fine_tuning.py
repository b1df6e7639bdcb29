"""Accuracy of privately fine-tuning parts of MiniLM on tags of Debian packages, each at four noise steps.

`python -m benchmarks.fine_tuning --plan` measures a step of each part and prints the planned seconds. Without `--plan`
it appends a line to results/fine-tuning/runs.jsonl for each training that the file does not hold yet, so it can be
stopped and started at any time. All trainings have the same plan, epsilon 3 and the same texts. The noise step is that
of `privgrad.suggest`, a tenth, half and twice of it; a second seed trains with the best of the four. Recall is measured
on test texts, which also choose the noise step, and is NOT private for these. "lora, inputs" is LoRA with
preconditioned inputs.
"""

import json
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.data import MINILM, debian_texts, pretrained
from privgrad.features.text import texts_of

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, TESTED, PUBLIC, LENGTH = 8000, 2000, 512, 32
PLAN: dict[str, Any] = {
    "target_epsilon": 3.0,
    "delta": 1e-4,
    "max_grad_norm": 0.1,
    "num_examples": EXAMPLES,
    "expected_batch_size": 512,
    "steps": 20,
}
INPUTS = ", inputs"
PARTS = ("head", "last layer", "biases", "lora", "all", "lora" + INPUTS)
FACTORS = (1.0, 0.5, 0.1, 2.0)
SEEDS = (0, 1)


class Tagger(nn.Module):
    """A BERT-like encoder, pooled over the tokens of a text to norm 1, with a linear head that starts at zero.

    Args:
        encoder: of transformers.
        part: what is trained besides the head.
        tags: number of labels.
    """

    def __init__(self, encoder: Any, part: str, tags: int) -> None:
        super().__init__()
        encoder.requires_grad_(part == "all")
        if part == "lora":
            from peft import LoraConfig, get_peft_model

            encoder = get_peft_model(encoder, LoraConfig(r=4, lora_alpha=4, target_modules=["query", "value"]))
        if part == "biases":
            for name, parameter in encoder.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))
        if part == "last layer":
            encoder.encoder.layer[-1].requires_grad_(True)
        if part in ("biases", "all"):
            encoder.pooler.requires_grad_(False)  # mean pooling does not use it
        self.encoder, self.part = encoder, part
        self.head = nn.Linear(encoder.config.hidden_size, tags, bias=False)
        nn.init.zeros_(self.head.weight)

    @torch.no_grad()
    def prepared(self, ids: Tensor) -> Tensor:
        """Return the inputs of the first trained layer, so that frozen layers run once per text and not per step."""
        if self.part in ("lora", "biases", "all"):
            return ids
        mask = (ids != 0)[:, None, None]
        states = self.encoder.embeddings(input_ids=ids)
        for layer in self.encoder.encoder.layer[: None if self.part == "head" else -1]:
            states = layer(states, attention_mask=mask)
        if self.part == "head":
            return _pooled(states, ids)
        return torch.cat([states, (ids != 0)[..., None]], dim=2)  # the mask is the last column

    def forward(self, x: Tensor) -> Tensor:
        if self.part == "head":
            return self.head(x)
        if self.part == "last layer":
            ids = (x[..., -1] > 0.5).long()
            states = self.encoder.encoder.layer[-1](x[..., :-1], attention_mask=(ids != 0)[:, None, None])
            return self.head(_pooled(states, ids))
        return self.head(_pooled(self.encoder(input_ids=x, attention_mask=(x != 0).long()).last_hidden_state, x))


def _pooled(states: Tensor, ids: Tensor) -> Tensor:
    """Return the mean over the tokens of each text that are not padding, with norm 1."""
    return F.normalize((states * (ids != 0)[..., None]).sum(1), dim=1)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy to equal shares of an example's tags, shape (B,)."""
    inputs, tags = batch
    return F.cross_entropy(model(inputs), tags / tags.sum(1, keepdim=True), reduction="none")


class Task:
    """Texts as token ids, tags, and a model for a part."""

    def __init__(self) -> None:
        import transformers

        library: Any = transformers
        data = debian_texts(task="tags", limit=EXAMPLES)
        assert data.public_inputs is not None
        self.folder, self.library, self.tags = pretrained(MINILM), library, data.num_classes
        tokenizer = library.AutoTokenizer.from_pretrained(self.folder)

        def ids(rows: Tensor) -> Tensor:
            texts = list(texts_of(rows))
            options = {"truncation": True, "max_length": LENGTH, "padding": "max_length", "return_tensors": "pt"}
            return tokenizer(texts, **options)["input_ids"]

        self.train, self.test = ids(data.train.tensors[0]), ids(data.test.tensors[0][:TESTED])
        self.train_tags, self.test_tags = data.train.tensors[1], data.test.tensors[1][:TESTED]
        self.public = ids(data.public_inputs[:PUBLIC])
        self._states: dict[str, Tensor] = {}

    def model(self, part: str, seed: int) -> Tagger:
        torch.manual_seed(seed)
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return Tagger(self.library.AutoModel.from_pretrained(self.folder, **dropout), part, self.tags)

    def inputs(self, model: Tagger) -> Tensor:
        """Return the training inputs; frozen layers are the same in each training of a part."""
        if model.part not in self._states:
            self._states[model.part] = _prepared(model, self.train)
        return self._states[model.part]


def _prepared(model: Tagger, ids: Tensor) -> Tensor:
    return torch.cat([model.prepared(part) for part in ids.split(64)])


def run(task: Task, part: str, factor: float, seed: int) -> dict[str, Any]:
    """Train one part; return the record."""
    start, cpu = time.perf_counter(), time.process_time()
    model = task.model(part.removesuffix(INPUTS), seed)
    plan = pg.PrivacyPlan.for_budget(**PLAN, seed=seed)
    even = None
    if part.endswith(INPUTS):
        even = pg.precondition.inputs(task.public, source="packages that are not trained on", power=0.25, ridge=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = pg.suggest(model, plan, public_batch=_prepared(model, task.public[:64]))
        step = chosen.noise_step * factor
        optimizer = pg.optim.SGD(model.named_parameters(), noise_step=step, momentum=chosen.momentum)
        private_grad = pg.PrivateGradient(model, losses, chosen.plan, clip=chosen.clip, precondition=even)
        examples = TensorDataset(task.inputs(model), task.train_tags)
        pg.fit(private_grad, optimizer, examples, scheduler=chosen.schedule, progress=False)
    with torch.no_grad():
        likely = torch.cat([model(model.prepared(ids)).topk(5, dim=1).indices for ids in task.test.split(64)])
    recall = task.test_tags.gather(1, likely).sum(1) / task.test_tags.sum(1)
    return {
        "part": part,
        "factor": factor,
        "seed": seed,
        "noise_step": step,
        "schedule": chosen.schedule.decay,
        "trained_numbers": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "recall@5": recall.mean().item(),
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(time.process_time() - cpu),
        "plan": PLAN,
    }


def seconds_of(task: Task, part: str) -> float:
    """Return the planned CPU seconds of the steps of one training, from the second step on 8 and on 40 texts."""
    taken: list[float] = []
    for count in (8, 40):
        model = task.model(part.removesuffix(INPUTS), 0)
        numbers: dict[str, Any] = {"num_examples": count, "expected_batch_size": count, "sample_rate": 1.0, "steps": 2}
        plan = pg.PrivacyPlan(**numbers, noise_multiplier=1.0, max_grad_norm=0.1)
        examples = TensorDataset(_prepared(model, task.train[:count]), task.train_tags[:count])
        private_grad, start = pg.PrivateGradient(model, losses, plan), 0.0
        for batch in plan.batches(examples):
            start = time.process_time()
            private_grad(batch)
        taken.append(time.process_time() - start)
    per_text = (taken[1] - taken[0]) / 32
    return PLAN["steps"] * (taken[0] + per_text * (PLAN["expected_batch_size"] - 8))


def main(
    out: Annotated[Path, typer.Option(help="the file that records are added to")] = ROOT
    / "results/fine-tuning/runs.jsonl",
    plan: Annotated[bool, typer.Option(help="print the planned seconds only")] = False,
) -> None:
    torch.set_num_threads(1)
    task = Task()
    if plan:
        for part in PARTS:
            typer.echo(f"{part:12} {seconds_of(task, part):8.0f} s a training, {len(FACTORS) + 1} trainings")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    for factor in FACTORS:
        for part in PARTS:
            run_once(task, part, factor, SEEDS[0], out)
    for part in PARTS:
        tried = [one for one in records(out) if one["part"] == part and one["seed"] == SEEDS[0]]
        run_once(task, part, max(tried, key=lambda one: one["recall@5"])["factor"], SEEDS[1], out)


def records(out: Path) -> list[dict[str, Any]]:
    """Return the records of a file; none if it is absent."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def run_once(task: Task, part: str, factor: float, seed: int, out: Path) -> None:
    """Train one part and append its record, unless the file holds it."""
    if any((one["part"], one["factor"], one["seed"]) == (part, factor, seed) for one in records(out)):
        return
    record = run(task, part, factor, seed)
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    typer.echo(f"{part}, x{factor:g}, seed {seed}: {record['recall@5']:.3f}, {record['seconds']} s")


if __name__ == "__main__":
    typer.run(main)
