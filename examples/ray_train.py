"""Train a sharded model privately with Ray Train, which starts the processes, and starts them again if one dies.

Shows   Distributed() in the function of each worker: it finds the processes that Ray has connected. fit keeps ledger
        and checkpoint in one folder for all workers, and resumes there after a failure. Do not call prepare_model,
        which wraps the model in DistributedDataParallel, or prepare_data_loader: the plan draws the batches.
Needs   pip install '.[experiments]' 'ray[train]'. Nothing is downloaded. One minute.
Run     python examples/ray_train.py [FOLDER]. On several machines, FOLDER is on a disk that all of them mount. Run it
        again after an interruption to resume.
Prints  accuracy on held-out digits, epsilon, and the number of processes.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.training.distributed import Distributed


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def work(config: dict[str, Any]) -> None:
    """Train in one of the processes."""
    processes, device = Distributed(), get_device()
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    fully_shard(model)

    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0, delta=1e-4, max_grad_norm=1.0, num_examples=1400, expected_batch_size=140, steps=200
    )
    result = pg.fit(
        pg.PrivateGradient(model, loss_fn, plan, processes=processes),
        pg.optim.AdamBC(model.named_parameters(), noise_step=0.015),
        TensorDataset(images[:1400], labels[:1400]),
        evaluate=lambda model: {"accuracy": (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()},
        output_dir=config["folder"],
        save_seconds=5.0,
        progress=False,
    )
    if processes.rank == 0:  # what a worker prints may be lost when it ends
        end = result.curve[-1]
        said = f"accuracy {end['accuracy']:.3f} at epsilon {end['epsilon']:.2f}, {processes.count} processes"
        Path(config["folder"], "end.txt").write_text(said)


def main(folder: str = "runs/ray") -> None:
    path = Path(folder).absolute()  # each worker has a working directory of its own
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(path / "training")},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() > 1),
        run_config=RunConfig(storage_path=str(path), failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()
    print((path / "training" / "end.txt").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
