"""Use DP-AdamBC in an Opacus script, and run the same training with privgrad's own engine.

Shows   connect(), the one new line with which an Opacus script can use privgrad's optimizers, and plan_of(), which
        reads the numbers of the Opacus script.
Needs   pip install '.[opacus,experiments]'. Ten seconds.
Run     python examples/opacus_bridge.py
Prints  accuracy and epsilon of both training runs.
"""

import copy

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import privgrad as pg
from privgrad.integrations.opacus import connect, plan_of


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main(epochs: int = 10) -> tuple[float, float]:
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_set = TensorDataset(images[:1400], labels[:1400])
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    ours = copy.deepcopy(model)

    def accuracy(model: nn.Module) -> float:
        return (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()

    engine = PrivacyEngine()
    private_model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=pg.optim.AdamBC(model.named_parameters(), noise_step=0.025),
        data_loader=DataLoader(train_set, batch_size=140),
        target_epsilon=3.0,
        target_delta=1e-4,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    connect(optimizer)  # the only new line
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(private_model(inputs), targets).backward()
            optimizer.step()
    print(f"Opacus: accuracy {accuracy(model):.3f} at epsilon {engine.get_epsilon(1e-4):.2f}")

    plan = plan_of(optimizer, loader, num_examples=1400, epochs=epochs, delta=1e-4)
    private_grad = pg.PrivateGradient(ours, loss_fn, plan)
    result = pg.fit(private_grad, pg.optim.AdamBC(ours.named_parameters(), noise_step=0.025), train_set, progress=False)
    print(f"privgrad: accuracy {accuracy(ours):.3f} at epsilon {result.ledger.epsilon(delta=1e-4):.2f}")
    return accuracy(model), accuracy(ours)


if __name__ == "__main__":
    main()
