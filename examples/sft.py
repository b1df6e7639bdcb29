"""Fine-tune a language model on prompts and completions privately; the loss counts the completions alone.

Shows   PrivateTrainer with the rows that TRL's SFTTrainer takes, {"prompt": ..., "completion": ...}, without TRL. With
        TRL, take PrivateSFTTrainer of privgrad.integrations.trl. The collator pads to a public length.
Needs   pip install '.[hf]'. Nothing is downloaded. The model is a small GPT-2 with random weights, which learns the
        first line of the documentation of a function from its name, byte by byte. In real use, take the ids from
        tokenizer.apply_chat_template, and start from GPT2LMHeadModel.from_pretrained(...). Thirty seconds.
Run     python examples/sft.py
Prints  the loss on held-out completions before and after, and epsilon.
"""

import importlib
import inspect

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import privgrad as pg
from privgrad.integrations.huggingface import PrivateTrainer

LENGTH = 64  # public: prompt and completion together are cut or padded to it
MODULES = ("ast", "os", "random", "statistics", "string", "subprocess", "logging", "tarfile", "zipfile", "argparse")


def rows() -> list[dict[str, str]]:
    """Return prompts and completions."""
    found = set[tuple[str, str]]()
    for name in MODULES:
        for key, value in inspect.getmembers(importlib.import_module(name), callable):
            first = (inspect.getdoc(value) or "").partition("\n")[0]
            if first.isascii() and first:
                found.add((f"{key}: ", first))
    return [{"prompt": prompt, "completion": completion} for prompt, completion in sorted(found)]


def collate(items: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Return ids, mask and labels of shape (B, LENGTH). A label of -100 is no target: prompts and padding."""
    ids = torch.zeros(len(items), LENGTH, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, item in enumerate(items):
        both = torch.tensor(list((item["prompt"] + item["completion"]).encode()[:LENGTH]))
        start, end = min(len(item["prompt"]), LENGTH), len(both)
        ids[row, :end], mask[row, :end] = both, 1
        labels[row, start:end] = both[start:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main(steps: int = 100, folder: str = "runs/sft") -> float:
    data = rows()
    held_out, train_set = data[::8], [row for index, row in enumerate(data) if index % 8]
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=8.0, delta=1e-4, max_grad_norm=0.3, num_examples=400, expected_batch_size=80, steps=steps
    )
    sizes = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=0, eos_token_id=0, **sizes))
    trainer = PrivateTrainer(
        model,
        TrainingArguments(folder, remove_unused_columns=False, report_to=[]),  # the collator reads all columns
        plan=plan,
        train_dataset=train_set,
        eval_dataset=held_out,
        data_collator=collate,
        noise_step=0.01,  # for random weights; the default suits pretrained ones
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # README.md in the folder says which epsilon the model has
    print(f"loss {before:.3f} -> {after:.3f} at epsilon {trainer.private_grad.ledger.epsilon(delta=1e-4):.2f}")
    return after


if __name__ == "__main__":
    main()
