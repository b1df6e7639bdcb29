"""Train low-rank adapters of a causal language model privately with the Hugging Face Trainer.

Shows   PEFT with PrivateTrainer: only the adapters are trained, clipped and noised. If an adapter does not change, the
        run ends with an error that names it.
Needs   pip install '.[hf]'. Nothing is downloaded. The model is a small GPT-2 with random weights. In real use, replace
        it with GPT2LMHeadModel.from_pretrained("gpt2") and its tokenizer. Twenty seconds.
Run     python examples/lora.py
Prints  the loss on held-out sentences before and after, and epsilon.
"""

import builtins
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import privgrad as pg
from privgrad.integrations.huggingface import PrivateTrainer

LENGTH = 32  # public: the largest length of a sentence, in bytes


def sentences() -> list[dict[str, Any]]:
    """Return sentences of Python's documentation as bytes, padded to the public length. Padding is no target."""
    texts = [getattr(builtins, name).__doc__ or "" for name in dir(builtins)]
    known = sorted({line.strip() for text in texts for line in text.splitlines() if line.strip().isascii()} - {""})
    rows: list[dict[str, Any]] = []
    for sentence in known:
        ids = torch.tensor(list(sentence.encode()[:LENGTH].ljust(LENGTH)))
        mask = (torch.arange(LENGTH) < len(sentence)).long()
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return rows


def main(steps: int = 100, folder: str = "runs/lora") -> float:
    data = sentences()
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=8.0, delta=1e-4, max_grad_norm=1.0, num_examples=400, expected_batch_size=40, steps=steps
    )
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), adapters)
    trainer = PrivateTrainer(
        model,
        TrainingArguments(folder, report_to=[]),
        plan=plan,
        train_dataset=data[40:],
        eval_dataset=data[:40],
        optimizers=(pg.optim.AdamBC(model.named_parameters(), noise_step=0.05), None),  # create it after the adapters
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()  # raises an error if an adapter weight has not changed
    after = trainer.evaluate()["eval_loss"]
    print(f"loss {before:.3f} -> {after:.3f} at epsilon {trainer.private_grad.ledger.epsilon(delta=1e-4):.2f}")
    return after


if __name__ == "__main__":
    main()
