"""What PrivateTrainer adds to a step of the bare private_grad: python -m benchmarks.trainer

Both train the same small BERT on the same batches, in turns; CPU time a step, the first twenty (with their checks) left
out. A larger model makes the difference smaller: it is the loop's, not the model's.
"""

import statistics
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import privgrad as pg
from privgrad.integrations.huggingface import PrivateTrainer
from privgrad.integrations.huggingface_models import classification_losses

EXAMPLES, BATCH, LENGTH, SKIPPED = 2000, 64, 32, 20


def make_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    return BertForSequenceClassification(BertConfig(vocab_size=1000, max_position_embeddings=LENGTH, **sizes))


def make_data() -> list[dict[str, Any]]:
    ids, mask = torch.randint(0, 1000, (EXAMPLES, LENGTH)), torch.ones(LENGTH, dtype=torch.long)
    return [{"input_ids": ids[i], "attention_mask": mask, "labels": i % 2} for i in range(EXAMPLES)]


class Clock(TrainerCallback):
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.process_time())


def bare(plan: pg.PrivacyPlan, data: list[dict[str, Any]], folder: str) -> list[float]:
    model, clock = make_model(), Clock()
    private_grad = pg.PrivateGradient(model, classification_losses, plan, ledger=Path(folder) / "bare.jsonl")
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
    for batch in plan.batches(data):
        optimizer.step(grad=private_grad(batch))
        clock.on_step_end()
    return clock.times


def under_trainer(plan: pg.PrivacyPlan, data: list[dict[str, Any]], folder: str) -> list[float]:
    model, clock = make_model(), Clock()
    options: dict[str, Any] = {"max_steps": plan.steps, "per_device_train_batch_size": BATCH, "max_grad_norm": 0.0}
    args = TrainingArguments(folder, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, **options)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
    trainer = PrivateTrainer(
        model, args, plan=plan, train_dataset=data, optimizers=(optimizer, None), callbacks=[clock]
    )
    trainer.train()
    return clock.times


def main(steps: int = 100, rounds: int = 3) -> None:
    warnings.simplefilter("ignore")
    numbers: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "num_examples": EXAMPLES, "seed": 1}
    plan = pg.PrivacyPlan(sample_rate=BATCH / EXAMPLES, expected_batch_size=BATCH, steps=SKIPPED + steps, **numbers)
    data, pooled = make_data(), {"bare": list[float](), "trainer": list[float]()}
    for _ in range(rounds):
        for name, run in (("bare", bare), ("trainer", under_trainer)):
            with tempfile.TemporaryDirectory() as folder:
                times = run(plan, data, folder)[SKIPPED - 1 :]
            pooled[name] += [after - before for before, after in pairwise(times)]
    middle = {name: statistics.median(steps) for name, steps in pooled.items()}
    typer.echo(f"bare {1e3 * middle['bare']:.1f} ms, PrivateTrainer {1e3 * middle['trainer']:.1f} ms a step (CPU time)")
    typer.echo(f"ratio of medians {middle['trainer'] / middle['bare']:.3f}")


if __name__ == "__main__":
    typer.run(main)
