"""Time and memory of TRL's trainers and of the private ones, on a model of SmolLM2's shape: `python -m benchmarks.trl`

    export OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072
    python -m benchmarks.trl --out results/bench/trl.jsonl

The weights are random and frozen, with an adapter on each linear layer. Each training is a process of its own, in
turns; both take the same rows, all of max_length, in each step. `seconds` is the median processor time of the steps
that check nothing. `kept_mib` is the resident memory after the first step above that of the imports, and `peak_mib` the
peak of the later steps above that, in which the checks of steps 2 and 4 count.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import privgrad as pg
from privgrad.integrations.trl import PrivateDPOTrainer, PrivateSFTTrainer

VOCABULARY, STEPS, PLAIN = 8192, 7, (3, 5, 6, 7)  # steps 1, 2, 4, 8, ... of a private training have checks
KINDS: dict[str, tuple[type[Any], type[Any], type[Any]]] = {
    "sft": (SFTConfig, SFTTrainer, PrivateSFTTrainer),
    "dpo": (DPOConfig, DPOTrainer, PrivateDPOTrainer),
}


def resident(key: str) -> float:
    """A number of the kernel's account of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


class Meter(TrainerCallback):
    """The processor time at the end of each step, and the memory after the first."""

    def __init__(self) -> None:
        self.times, self.kept = list[float](), 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.process_time())
        if len(self.times) == 1:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins again
            self.kept = resident("VmRSS")


def train(kind: str, is_private: bool, checkpointing: bool, given: argparse.Namespace, folder: str) -> dict[str, float]:
    """Train for a few steps, and return what a step took."""
    before, torch_random = resident("VmRSS"), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    config, ordinary, private = KINDS[kind]
    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": given.layers}
    sizes: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1, **heads, **sizes))
    ids = torch.randint(2, VOCABULARY, (given.batch, 2, given.length), generator=torch_random)
    rows: list[dict[str, Any]] = [{"input_ids": row[0].tolist()} for row in ids]
    if kind == "dpo":
        words = [[" ".join(f"w{number}" for number in answer[:-1]) for answer in row.tolist()] for row in ids]
        rows = [{"prompt": "w2", "chosen": f" {one}", "rejected": f" {other}"} for one, other in words]
    vocabulary = {"<pad>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    known = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    known.pre_tokenizer = WhitespaceSplit()
    args = config(
        folder,
        max_length=given.length,
        max_steps=STEPS,
        per_device_train_batch_size=given.batch,
        gradient_checkpointing=checkpointing,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    if kind == "dpo":
        args.precompute_ref_log_probs = True  # as in the private trainer
    size = given.batch
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=STEPS,
        expected_batch_size=size,
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        num_examples=size,
    )
    meter = Meter()
    trainer = (private if is_private else ordinary)(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", eos_token="</s>"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
        callbacks=[meter],
        **({"plan": plan} if is_private else {}),
    )
    trainer.train()
    seconds = [meter.times[step - 1] - meter.times[step - 2] for step in PLAIN]
    parameters = sum(p.numel() for p in model.parameters())
    memory = {"kept_mib": meter.kept - before, "peak_mib": resident("VmHWM") - meter.kept}
    return {"parameters": parameters, "seconds": statistics.median(seconds), **memory}


def main() -> None:
    """Measure, and append a record for each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 8), ("batch", 4), ("length", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    cases = [(kind, checkpointing) for kind in KINDS for checkpointing in (False, True)]
    for turn, (kind, checkpointing), is_private in (
        (turn, case, own) for turn in range(given.rounds) for case in cases for own in (False, True)
    ):
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(1) as process:
            found = process.apply(train, (kind, is_private, checkpointing, given, folder))
        row = {"kind": kind, "private": is_private, "checkpointing": checkpointing, "round": turn}
        row |= {
            "batch": given.batch,
            "length": given.length,
            "layers": given.layers,
            "load": os.getloadavg()[0],
            **found,
        }
        with given.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
