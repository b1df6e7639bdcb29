"""freeze_unused(): freeze the parameters that a loss does not reach, such as the pooler of an encoder.

Users call it before they make a PrivateGradient, which refuses such parameters. The privacy guarantee does not rest on
this file: a frozen parameter is not trained.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_callable
from privgrad.gradient.module_state import preserved, require_losses, seeded, trainable
from privgrad.types import Batch, LossFunction, count_examples


def freeze_unused(model: nn.Module, loss_fn: LossFunction, public_batch: Any) -> list[str]:
    """Set requires_grad to False for each parameter that the losses of some public examples do not reach.

    Args:
        model: the module, in the mode that it will be trained in.
        loss_fn: (model, examples) -> losses, shape (B,).
        public_batch: public examples, as loss_fn takes them, with leading dimension B >= 1. They should use all that
            the training will use: an expert to which none of them is routed is frozen, too.
    Returns:
        The names of the parameters that were frozen.
    Raises:
        PrivacyError: public_batch is a batch of a plan, the losses do not have shape (B,), or they reach no parameter.
    Privacy:
        It uses the model and public examples only.
    """
    require_callable("freeze_unused", "loss_fn", loss_fn, "give (model, examples) -> losses of shape (B,)")
    if isinstance(public_batch, Batch):
        remedy = "give public examples: which parameters are used must not depend on private ones"
        raise expected("freeze_unused", "public_batch", "to be public", "a batch of a privacy plan", remedy)
    with preserved(model), seeded(0), torch.enable_grad():
        losses = require_losses(loss_fn(model, public_batch), count_examples(public_batch))
        own = trainable(model)
        if not losses.requires_grad:
            remedy = "compute the loss from the model's output, without torch.no_grad and detach"
            got = "losses without a graph"
            raise expected("freeze_unused", "loss_fn", "to reach a trainable parameter", got, remedy)
        grads = torch.autograd.grad(losses.sum(), list(own.values()), allow_unused=True)
    # torch types the result as if allow_unused did not exist.
    pairs = zip(own, cast("Sequence[Tensor | None]", grads), strict=True)
    unused = [name for name, grad in pairs if grad is None]
    for name in unused:
        own[name].requires_grad_(False)
    return unused
