"""Predict from a table of people who earns more than 50,000 dollars (Adult, the census of 1994).

Shows   private logistic regression on rows of numbers and categories, and the same training without privacy.
Needs   the census: privgrad data fetch adult. Ten seconds.
Run     python examples/tabular_adult.py
Prints  test accuracy of the constant answer no, of the private model (with epsilon), and of the ordinary model.

One-hot codes and scales come from the public codebook of the census. Means, ranges or categories that are computed from
the rows would be another release, and the epsilon here would not cover it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from privgrad.data import adult


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch
    return F.cross_entropy(model(rows), labels, reduction="none")


def main(steps: int = 400) -> float:
    data = adult()  # 24,421 people to train on, 8,140 to test
    rows, labels = data.test.tensors

    def accuracy(model: nn.Module) -> float:
        return (model(rows).argmax(1) == labels).float().mean().item()

    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=1.0, delta=1e-6, max_grad_norm=1.0, num_examples=24_421, expected_batch_size=1024, steps=steps
    )
    private = nn.Linear(rows.shape[1], 2)
    optimizer = pg.optim.AdamBC(private.named_parameters(), noise_step=0.1)
    result = pg.fit(pg.PrivateGradient(private, loss_fn, plan), optimizer, data.train, progress=False)

    ordinary = nn.Linear(rows.shape[1], 2)
    plain = torch.optim.Adam(ordinary.parameters(), lr=2e-2)
    for _ in range(steps):  # NOT private, for comparison only
        chosen = torch.randint(0, len(data.train), (1024,))
        plain.zero_grad()
        loss_fn(ordinary, data.train[chosen]).mean().backward()
        plain.step()

    print(f"always no: accuracy {(labels == 0).float().mean():.3f}")
    print(f"private:   accuracy {accuracy(private):.3f} at epsilon {result.ledger.epsilon(delta=1e-6):.2f}")
    print(f"ordinary:  accuracy {accuracy(ordinary):.3f} without privacy")
    return accuracy(private)


if __name__ == "__main__":
    main()
