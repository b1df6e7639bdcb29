"""Images: a small CNN, trained privately in one call of fit().

Shows   what any private training here consists of: public numbers, a loss for each example, an optimizer, fit().
Needs   pip install '.[experiments]' (scikit-learn, which holds the handwritten digits). Ten seconds.
Run     python examples/image_cnn.py
Prints  accuracy on held-out images after each evaluation, and the epsilon that is spent.

privgrad.data has larger sets: fashion_mnist(), cifar10(); num_examples is then theirs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from privgrad.data import digits


def make_model() -> nn.Module:
    """GroupNorm in place of BatchNorm, which would mix the examples of a batch (and is refused)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss for each example: shape (B,), not their mean."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main(steps: int = 200) -> float:
    data = digits()  # 1,437 images of 8x8 to train on, 360 to test
    images, labels = data.test.tensors
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0,
        delta=1e-5,
        max_grad_norm=1.0,  # C: each image's gradient is shortened to this
        num_examples=1437,  # typed, because it becomes public
        expected_batch_size=240,  # batches are drawn by Poisson sampling, so their sizes differ
        steps=steps,
    )
    torch.manual_seed(0)  # of the first weights; the noise comes from the operating system
    model = make_model()
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=2e-3)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": (model(images).argmax(1) == labels).float().mean().item()}

    result = pg.fit(model, loss_fn, optimizer, plan, data.train, evaluate=evaluate, evaluations=4)
    for row in result.curve:
        print(f"step {row['step']:3}: accuracy {row['accuracy']:.3f} at epsilon {row['epsilon']:.2f}")
    return result.curve[-1]["accuracy"]


if __name__ == "__main__":
    main()
