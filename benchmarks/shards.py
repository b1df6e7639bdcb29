"""Memory of a sharded private step by allocation: all tensors that a process holds at once.

    export MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072  # resident memory without what is freed
    python -m benchmarks.shards --processes 2 --out results/shards/allocated.jsonl

The model is a transformer of 400 million parameters in float32 on the CPU, over gloo, each layer sharded by itself.
The texts are so short that activations are small; they count nevertheless. Steps 0 and 1 are checked. The limit is that
of a process with a shard of the parameters, of the sum and of the noise, and three of the largest blocks.
"""

import argparse
import gc
import json
import multiprocessing
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.training.distributed import Distributed

_WORDS, _LENGTH, _BATCH = 1000, 8, 4


class Texts(nn.Module):
    """A language model without dropout, each layer of which is sharded as soon as it is made."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(_WORDS, width), nn.Linear(width, _WORDS)
        self.layers, self.blocks = nn.ModuleList(), list[int]()
        for _ in range(layers):
            layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            self.blocks.append(_bytes(layer))
            fully_shard(layer)
            self.layers.append(layer)
        self.blocks.append(_bytes(self.words) + _bytes(self.head))
        fully_shard(self)

    def forward(self, texts: Tensor) -> Tensor:
        x = self.words(texts)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (texts,) = batch
    return nn.functional.cross_entropy(model(texts)[:, :-1].mT, texts[:, 1:], reduction="none").mean(1)


class Held(TorchDispatchMode):
    """Counts the bytes of all storages that are alive after each operation. A storage may be resized."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self._alive = dict[int, Any]()
        # DTensors have no memory of their own: what they hold is in the list too.
        self._note([x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)])
        self.before = self.peak = self._bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note([x for x in tree_leaves(out) if type(x) in (Tensor, nn.Parameter)])
        self.peak = max(self.peak, self._bytes())
        return out

    def _note(self, tensors: list[Tensor]) -> None:
        for storage in (x.untyped_storage() for x in tensors):
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = weakref.ref(storage)
                weakref.finalize(storage, self._alive.pop, storage._cdata)

    def _bytes(self) -> int:
        return sum(storage.nbytes() for own in [*self._alive.values()] if (storage := own()) is not None)


def _resident(key: str) -> int:
    """Return a number of bytes of the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10


def _work(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=given.processes)
    processes, model = Distributed(), Texts(given.width, given.layers)
    size, block = sum(model.blocks), max(model.blocks)
    limit = 3 * size / given.processes + 3 * block
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=given.steps,
        expected_batch_size=_BATCH * given.processes,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_examples=_BATCH * given.processes,
    )
    texts = torch.randint(0, _WORDS, (_BATCH * given.processes, _LENGTH), generator=torch.Generator().manual_seed(0))
    private_grad = pg.PrivateGradient(model, _losses, plan, processes=processes)
    for step, batch in enumerate(plan.batches(TensorDataset(texts), processes=processes)):
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins again
        resident = _resident("VmRSS")
        with Held() as held:
            gradient = private_grad(batch)
        del gradient
        mine = held.before, held.peak, _resident("VmHWM") - resident + held.before
        everyone: list[Any] = [None] * given.processes
        dist.all_gather_object(everyone, mine)
        before, peak, most = map(max, zip(*everyone, strict=True))
        row = {"processes": given.processes, "step": step, "parameters": size // 4, "largest_block": block // 4}
        mib = {"before": before, "peak": peak, "limit": int(limit), "resident": most}
        row |= {f"{name}_mib": number >> 20 for name, number in mib.items()}
        if rank == 0:
            print(json.dumps(row), flush=True)  # noqa: T201
            if given.out:
                with given.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("processes", 2), ("width", 1536), ("layers", 14), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given, context = parser.parse_args(), multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        each = [context.Process(target=_work, args=(rank, given, store)) for rank in range(given.processes)]
        for process in each:
            process.start()
        for process in each:
            process.join()


if __name__ == "__main__":
    main()
