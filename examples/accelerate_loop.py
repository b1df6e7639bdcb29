"""Train privately in a loop of your own with Accelerate, in one process or in several.

Shows   PrivateGradient in place of accelerator.backward. Accelerate starts the processes, chooses the device and splits
        the held-out data. Do not prepare the model or the optimizer: the private step adds up the processes' gradients
        itself, and DistributedDataParallel would exchange gradients without noise. With several processes, fully_shard
        (FSDP2) shards the model. If you end the loop because of its results, report plan.epsilon().
Needs   pip install '.[hf,experiments]'. Nothing is downloaded. Fifteen seconds.
Run     python examples/accelerate_loop.py, or, on GPUs or without any,
        accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py
Prints  accuracy on held-out digits and epsilon every 50 steps, and the number of processes.
"""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import privgrad as pg
from privgrad.training.distributed import Distributed


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main(steps: int = 200) -> float:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # else it connects no processes on the CPU
    several = {"processes": Distributed()} if accelerator.num_processes > 1 else {}

    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_set, held_out = TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])
    loader = accelerator.prepare(DataLoader(held_out, batch_size=100))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(accelerator.device)
    if several:
        fully_shard(model)

    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0, delta=1e-4, max_grad_norm=1.0, num_examples=1400, expected_batch_size=140, steps=steps
    )
    private_grad = pg.PrivateGradient(model, loss_fn, plan, **several)
    optimizer = pg.optim.AdamBC(model.named_parameters(), noise_step=0.015)

    accuracy = 0.0
    for step, batch in enumerate(plan.batches(train_set, **several), start=1):
        optimizer.step(grad=private_grad(batch.to(accelerator.device)))
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                right = [model(inputs).argmax(1) == targets for inputs, targets in loader]
            every = accelerator.gather_for_metrics(torch.cat(right))
            accuracy = every.float().mean().item()
            spent, count = private_grad.epsilon(steps=step), accelerator.num_processes
            accelerator.print(f"step {step}: accuracy {accuracy:.3f} at epsilon {spent:.2f}, {count} processes")
    return accuracy


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may outlive the processes' group, and abort a process at its normal exit
