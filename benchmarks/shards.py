"""Memory of a sharded private step: the peak of each process, by the kernel's account of resident memory.

    python -m benchmarks.shards --processes 2 --width 1536 --layers 13

The model is a transformer in float32 on the CPU, over gloo, each layer sharded by itself. Printed for each step: the
peak above the process without a model, in MiB and as a share of the model's size.
"""

import argparse
import ctypes
import gc
import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.training.distributed import Distributed

_WORDS, _LENGTH, _BATCH = 1000, 8, 4


class Texts(nn.Module):
    """A language model without dropout."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True}
        self.words, self.head = nn.Embedding(_WORDS, width), nn.Linear(width, _WORDS)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 8, 4 * width, **options) for _ in range(layers))

    def forward(self, texts: Tensor) -> Tensor:
        x = self.words(texts)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (texts,) = batch
    return nn.functional.cross_entropy(model(texts)[:, :-1].mT, texts[:, 1:], reduction="none").mean(1)


def _resident(key: str) -> float:
    """Return a number of the process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def _forget_peak() -> float:
    """Give freed memory back, begin the peak again, and return what is resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _work(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=given.processes)
    processes, without = Distributed(), _forget_peak()
    model = Texts(given.width, given.layers)
    size = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    largest = sum(p.numel() for p in model.layers[0].parameters()) * 4 / 2**20
    for layer in model.layers if given.processes > 1 else ():
        fully_shard(layer)
    if given.processes > 1:
        fully_shard(model)
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
    if rank == 0:
        print(f"model {size:.0f} MiB, largest block {largest:.0f}; process without it {without:.0f}", flush=True)  # noqa: T201
    for step, batch in enumerate(plan.batches(TensorDataset(texts), processes=processes)):
        before = _forget_peak() - without
        gradient = private_grad(batch)
        peak = _resident("VmHWM") - without
        del gradient
        if rank == 0:
            print(f"step {step}: before {before:.0f}, peak {peak:.0f} MiB, {peak / size:.2f} of the model", flush=True)  # noqa: T201
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("processes", 2), ("width", 512), ("layers", 8), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given, context = parser.parse_args(), multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        options = {"target": _work}
        each = [context.Process(**options, args=(r, given, f"file://{folder}/store")) for r in range(given.processes)]
        for process in each:
            process.start()
        for process in each:
            process.join()


if __name__ == "__main__":
    main()
