"""Predict the tags of Debian packages from their words, with AdaDPS: public data scale the gradients.

Shows   side information. A few public examples, one in a hundred, estimate the size of each coordinate's gradient.
        Private gradients are divided by this estimate before they are clipped, so the noise hides rare words less. Both
        methods have the same noise step: noise alone moves a weight equally far.
Needs   Debian or Ubuntu, after `privgrad data fetch debian`. A minute.
Run     python examples/sparse_tags.py
Prints  recall@5 (the share of a package's tags among the five most likely) and epsilon, without and with AdaDPS. On
        these tags AdaDPS gains little or nothing. results/adadps-stackoverflow has four tuned methods with three seeds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.data import debian_tags
from privgrad.models import bag_of_words


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy to a distribution with equal shares for an example's tags, shape (B,)."""
    words, tags = batch
    return F.cross_entropy(model(words), tags / tags.sum(1, keepdim=True), reduction="none")


def main(examples: int = 15_000, steps: int = 300) -> dict[str, float]:
    data = debian_tags(words=10_000, length=128, limit=examples + examples // 100)  # bags of words
    words, tags = data.train.tensors
    train, public = TensorDataset(words[:examples], tags[:examples]), (words[examples:], tags[examples:])
    assert data.vocabulary is not None
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0,
        delta=1e-5,
        max_grad_norm=0.03,  # below nearly all gradient norms; a smaller C changes nothing at the same noise step
        num_examples=examples,
        expected_batch_size=examples // 30,
        steps=steps,
    )
    found: dict[str, float] = {}
    for name in ("DP-SGD", "AdaDPS"):
        model = bag_of_words(vocabulary=data.vocabulary, num_classes=data.num_classes)
        precondition = None
        if name == "AdaDPS":
            gradient = pg.PublicGradient(model, loss_fn, public, source="1 % of the packages, taken out of training")
            precondition = pg.precondition.public_rmsprop(gradient)  # the ledger records the source
        optimizer = pg.optim.SGD(model.named_parameters(), noise_step=0.25, momentum=0.9)
        private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=precondition)
        result = pg.fit(private_grad, optimizer, train)
        inputs, wanted = data.test.tensors
        with torch.no_grad():
            likeliest = model(inputs).topk(5, dim=1).indices
        found[name] = (wanted.gather(1, likeliest).sum(1) / wanted.sum(1)).mean().item()
        print(f"{name}: recall@5 {found[name]:.3f} at epsilon {result.ledger.epsilon(delta=1e-5):.2f}")
    return found


if __name__ == "__main__":
    main()
