"""Count what LoRA on a Llama costs in memory, and what a step does with frozen weights: `python -m benchmarks.lora`.

Two sizes of the frozen base tell whether anything grows with it. What the model itself does with its weights is the
same in the ordinary step; only what is made of frozen weights alone (copies, sums, comparisons) counts here.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.counting import Counts, as_counted, operations_of
from benchmarks.counts import BEFORE, Which
from benchmarks.measure import build
from benchmarks.methods import Setup
from benchmarks.workloads import Workload

VOCABULARY, LENGTH, EXAMPLES = 512, 32, 16


def llama(width: int, *, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> nn.Module:
    """A Llama of four layers with random weights, frozen, with an adapter on each linear layer."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    base: Any = LlamaForCausalLM(config)
    base = base.to(dtype)
    if checkpointing:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))


def next_words(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].mT.float(), target[:, 1:], reduction="none").mean(1)


def texts() -> tuple[Tensor, Tensor]:
    words = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    return words, words


@dataclass(frozen=True)
class Adapted(Setup):
    """LoRA on a Llama of some width."""

    width: int = 256
    half: bool = False
    checkpointing: bool = False

    @property
    def workload(self) -> Workload:
        dtype = torch.bfloat16 if self.half else torch.float32
        make = partial(llama, self.width, dtype=dtype, checkpointing=self.checkpointing)
        return Workload("LoRA on Llama", EXAMPLES, make, texts, next_words)


class OnFrozen(TorchDispatchMode):
    """Counts numbers that operations read and bytes that they make, where all tensors come from frozen weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.read = self.made = 0
        self._from = {p.untyped_storage()._cdata for p in model.parameters() if not p.requires_grad}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:  # the model's own
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is torch.ops.aten.take.default:  # it reads as many numbers as there are places
            self._note(given[:1], [out], out.numel())
        else:
            made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self._note(given, made, sum(x.numel() for x in given))
        return out

    def _note(self, given: list[Tensor], out: list[Tensor], read: int) -> None:
        if not given or not all(x.untyped_storage()._cdata in self._from for x in given):
            return
        if made := [x.untyped_storage() for x in out if x.untyped_storage()._cdata not in self._from]:
            self.read += read
            self.made += sum(storage.nbytes() for storage in made)
            for storage in made:  # until it is freed, and another gets its place
                self._from.add(storage._cdata)
                weakref.finalize(storage, self._from.discard, storage._cdata)


def count(setup: Adapted, method: str, step: Which, *, device_paths: bool) -> tuple[Counts, OnFrozen]:
    """Count one step of a method, and what it does with frozen weights alone."""
    counts, models = Counts(), list[nn.Module]()

    class Kept(Adapted):
        def model(self) -> nn.Module:
            models.append(super().model())
            return models[-1]

    with as_counted(device_paths=device_paths):
        taken = build(Kept(**vars(setup)), method, steps=2 if method == "ordinary" else BEFORE[step]).step
        with OnFrozen(models[-1]) as frozen:
            operations_of(taken, counts)
    return counts, frozen


def main(
    width: Annotated[list[int] | None, typer.Option(help="Hidden size, repeatable. Default: 256 and 512.")] = None,
    half: Annotated[bool, typer.Option("--half", help="Weights in bf16.")] = False,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Gradient checkpointing.")] = False,
    cpu_paths: Annotated[bool, typer.Option("--cpu-paths", help="The paths for the CPU, not for a GPU.")] = False,
) -> None:
    """Count the first, a checked and a steady step of LoRA over the ordinary step."""
    torch.set_num_threads(1)
    heads = "peak MB", "x", "operations", "made of frozen weights, kB", "numbers read"
    result = Table("width (frozen MB)", "step", *heads)
    for size in width or [256, 512]:
        setup = Adapted("LoRA on Llama", width=size, half=half, checkpointing=checkpointing)
        frozen = sum(p.nbytes for p in setup.model().parameters() if not p.requires_grad)
        ordinary, _ = count(setup, "ordinary", "steady", device_paths=not cpu_paths)
        name = f"{size} ({frozen / 2**20:.1f})"
        result.add_row(name, "ordinary", f"{ordinary.peak / 2**20:.2f}", "", str(ordinary.operations))
        for step in BEFORE:
            counts, made = count(setup, "plain", step, device_paths=not cpu_paths)
            memory = f"{counts.peak / 2**20:.2f}", f"{counts.peak / ordinary.peak:.3f}"
            result.add_row("", step, *memory, str(counts.operations), f"{made.made / 1024:.1f}", f"{made.read:,}")
    Console(width=110).print(result)


if __name__ == "__main__":
    typer.run(main)
