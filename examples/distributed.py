"""Train one model privately in several processes, on one machine or on many.

Shows   PrivateGradient(processes=...): each process clips its own examples. The first process adds one noise to the
        sum of all and keeps the ledger. With --sharded, FSDP2 shards the model.
Needs   pip install '.[experiments]'. torchrun is part of torch. Fifteen seconds.
Run     torchrun --nproc-per-node 2 examples/distributed.py [--sharded]. Run it again after an interruption to resume,
        with any number of processes.
Prints  accuracy on held-out digits, epsilon, and the number of processes.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.training.distributed import Distributed


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    processes = Distributed()

    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    if "--sharded" in sys.argv:
        fully_shard(model)

    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0, delta=1e-4, max_grad_norm=1.0, num_examples=1400, expected_batch_size=140, steps=200
    )
    result = pg.fit(
        pg.PrivateGradient(model, loss_fn, plan, processes=processes),
        pg.optim.AdamBC(model.named_parameters(), noise_step=0.015),
        TensorDataset(images[:1400], labels[:1400]),
        evaluate=lambda model: {"accuracy": (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()},
        output_dir="runs/distributed-sharded" if "--sharded" in sys.argv else "runs/distributed",
    )
    if processes.rank == 0:
        end = result.curve[-1]
        print(f"accuracy {end['accuracy']:.3f} at epsilon {end['epsilon']:.2f}, {processes.count} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Threads of gloo may outlive the group and abort a process at its normal exit. torchrun would report an error.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
