"""Train a Lightning module privately.

Shows   the three differences from an ordinary module: training_step returns one loss per example and logs nothing, the
        optimizer is from privgrad, and the Trainer has a PrivateStrategy, which draws the batches.
Needs   pip install '.[lightning,experiments]'. Ten seconds.
Run     python examples/lightning_module.py. With a checkpoint as argument (runs/lightning/last.ckpt), it resumes there.
Prints  accuracy on held-out digits, and epsilon.
"""

import sys
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import privgrad as pg
from privgrad.integrations.lightning import PrivateStrategy


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels, reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = pg.optim.AdamBC(self.named_parameters(), noise_step=0.025)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]


def main(steps: int = 200, folder: str = "runs/lightning", checkpoint: str | None = None) -> float:
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    held_out = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=397)
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0, delta=1e-4, max_grad_norm=1.0, num_examples=1400, expected_batch_size=140, steps=steps
    )
    strategy = PrivateStrategy(plan, ledger=f"{folder}/ledger.jsonl")
    trainer = L.Trainer(
        strategy=strategy,
        max_steps=plan.steps,
        default_root_dir=folder,
        logger=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=50, save_last=True)],
    )
    train_set = TensorDataset(images[:1400], labels[:1400])
    module = Digits()
    trainer.fit(module, strategy.batches(train_set), held_out, ckpt_path=checkpoint)
    accuracy = trainer.validate(module, held_out, verbose=False)[0]["accuracy"]
    print(f"accuracy {accuracy:.3f} at epsilon {strategy.private_grad.ledger.epsilon(delta=1e-4):.2f}")
    return accuracy


if __name__ == "__main__":
    main(checkpoint=sys.argv[1] if len(sys.argv) > 1 else None)
