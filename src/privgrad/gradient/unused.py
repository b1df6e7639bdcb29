"""freeze_unused(): freeze the parameters that a loss does not reach, such as the pooler of an encoder.

Users call it before they make a PrivateGradient, which refuses such parameters; `explanation` lists them. The privacy
guarantee does not rest on this file: a frozen parameter is not trained.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_callable
from privgrad.gradient.module_state import trainable
from privgrad.gradient.probes import losses_on_copies
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
        PrivacyError: public_batch is a batch of a plan or holds no examples, the losses do not have shape (B,), or they
            reach no parameter.
    Privacy:
        It uses the model and public examples only.
    """
    unused = unused_parameters("freeze_unused", model, loss_fn, public_batch)
    own = trainable(model)
    for name in unused:
        own[name].requires_grad_(False)
    return unused


def unused_parameters(function: str, model: nn.Module, loss_fn: LossFunction, public_batch: Any) -> list[str]:
    """Return the names of the trainable parameters that the losses do not reach; `explanation.explain` calls it too.

    Args:
        function: the name of the function that the user called.
        model: as in `freeze_unused`.
        loss_fn: as in `freeze_unused`.
        public_batch: as in `freeze_unused`.
    Raises:
        PrivacyError: as `freeze_unused`.
    """
    require_callable(function, "loss_fn", loss_fn, "give (model, examples) -> losses of shape (B,)")
    if isinstance(public_batch, Batch):
        remedy = "give public examples: what is used, and at what cost, must not depend on private ones"
        raise expected(function, "public_batch", "to be public", "a batch of a privacy plan", remedy)
    if (size := count_examples(public_batch)) == 0:
        raise expected(function, "public_batch", "to hold examples", size, "give one or more public examples")
    own = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    with torch.enable_grad():
        losses = losses_on_copies(model, loss_fn, public_batch, own)
    if not losses.requires_grad:
        remedy = "compute the loss from the model's output, without torch.no_grad and detach"
        raise expected(function, "loss_fn", "to reach a trainable parameter", "losses without a graph", remedy)
    # torch types the result as if allow_unused did not exist.
    grads = cast("Sequence[Tensor | None]", torch.autograd.grad(losses.sum(), list(own.values()), allow_unused=True))
    return [name for name, grad in zip(own, grads, strict=True) if grad is None]
