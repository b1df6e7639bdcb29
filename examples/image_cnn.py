"""Train a small CNN on images privately, with one call of fit().

Shows   the parts of private training: public numbers, one loss for each example, an optimizer and fit().
Needs   pip install '.[experiments]' (scikit-learn contains the handwritten digits). Ten seconds.
Run     python examples/image_cnn.py
Prints  accuracy on held-out images, and the epsilon spent, at each evaluation.

privgrad.data has larger data sets, fashion_mnist() and cifar10(). Set num_examples to their size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from privgrad.data import digits


def make_model() -> nn.Module:
    """Return a CNN with GroupNorm. BatchNorm mixes the examples of a batch, so privgrad refuses it."""
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
    """Return one loss for each example, shape (B,), not their mean."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main(steps: int = 200) -> float:
    data = digits()  # 1,437 images of 8x8 to train on, 360 to test
    images, labels = data.test.tensors
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0,
        delta=1e-5,
        max_grad_norm=1.0,  # C: the gradient of each image is clipped to this norm
        num_examples=1437,  # you enter it, because it becomes public
        expected_batch_size=240,  # batches are drawn by Poisson sampling, so their sizes differ
        steps=steps,
    )
    torch.manual_seed(0)  # for the initial weights only; the noise comes from the operating system
    model = make_model()
    optimizer = pg.optim.AdamBC(model.named_parameters(), noise_step=0.01)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": (model(images).argmax(1) == labels).float().mean().item()}

    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    result = pg.fit(private_grad, optimizer, data.train, evaluate=evaluate, num_evaluations=4)
    for row in result.curve:
        print(f"step {row['step']:3}: accuracy {row['accuracy']:.3f} at epsilon {row['epsilon']:.2f}")
    return result.curve[-1]["accuracy"]


if __name__ == "__main__":
    main()
