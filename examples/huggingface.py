"""Train a sequence classifier privately with the Hugging Face Trainer.

Shows   PrivateTrainer in place of the Trainer. The Trainer does the schedule, evaluation, checkpoints and resuming.
Needs   pip install '.[hf]'. Nothing is downloaded. The model has random weights and learns to tell comments from code
        in the sources of Python, byte by byte. In real use, replace it with
        BertForSequenceClassification.from_pretrained(...) and its tokenizer. Forty seconds.
Run     python examples/huggingface.py. After an interruption, add --resume: it uses the last checkpoint and the ledger.
Prints  accuracy on held-out lines after each epoch, and epsilon.
"""

import random
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, TrainingArguments

import privgrad as pg
from privgrad.integrations.huggingface import PrivateTrainer

LENGTH = 32  # public: the largest length of a line, in bytes


def lines() -> list[dict[str, Any]]:
    """Return lines as bytes, padded to the public length, as tokenizer(..., padding="max_length") does."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    stripped = {line.strip() for path in sources for line in path.read_text(errors="replace").splitlines()}
    known = [line for line in sorted(stripped) if line.isascii() and len(line) >= 16]
    random.Random(0).shuffle(known)
    comments = [(line.strip("# "), 1) for line in known if line.startswith("# ")][:6000]
    code = [(line, 0) for line in known if "#" not in line][: len(comments)]
    rows: list[dict[str, Any]] = []
    for text, label in (pair for both in zip(comments, code, strict=True) for pair in both):
        ids = np.frombuffer(text.encode()[:LENGTH].ljust(LENGTH, b"\0"), dtype=np.uint8).astype(int)
        rows.append({"input_ids": ids, "attention_mask": (ids > 0).astype(int), "label": label})
    return rows


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(1) == prediction.label_ids).mean())}


def main(steps: int = 200, folder: str = "runs/huggingface", *, resume: bool = False) -> dict[str, float]:
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=8.0, delta=1e-5, max_grad_norm=1.0, num_examples=8000, expected_batch_size=200, steps=steps
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=128, max_position_embeddings=LENGTH, **sizes)
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        folder,  # steps, batch size and clipping norm are the plan's
        eval_strategy="epoch",  # an epoch is 1 / sample_rate steps
        lr_scheduler_type="cosine",
        report_to=[],
    )
    data = lines()
    trainer = PrivateTrainer(
        model,
        args,
        plan=plan,
        train_dataset=data[:8000],
        eval_dataset=data[8000:9000],
        noise_step=0.015,  # of AdamWBC, for random weights
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=resume)
    measured = trainer.evaluate()
    print(f"accuracy {measured['eval_accuracy']:.3f} at epsilon {trainer.private_grad.ledger.epsilon(delta=1e-5):.2f}")
    return measured


if __name__ == "__main__":
    main(resume="--resume" in sys.argv)
