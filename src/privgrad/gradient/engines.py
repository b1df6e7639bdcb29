"""Per-example gradients: one row an example, from the user's model and loss as they are.

Shape suffixes: B examples of the chunk, P the shape of one parameter.
"""

import warnings
from collections.abc import Callable
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from privgrad.errors import UnsupportedModuleError, expected
from privgrad.types import count_examples, map_examples

LossFunction = Callable[[nn.Module, Any], Tensor]


class BoundLoss(nn.Module):
    """loss_fn with its model as one module, so that parameters can be swapped wherever loss_fn uses them."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, examples: Any) -> Tensor:
        return self.loss_fn(self.model, examples)


def require_losses(losses: object, size: int) -> Tensor:
    """Return losses if they are a tensor of shape (size,); raise PrivacyError otherwise."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        remedy = "return one loss per example, for instance with reduction='none', averaged over all but dimension 0"
        raise expected("loss_fn", "losses", f"of shape ({size},)", got, remedy)
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; a tied parameter once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def per_sample_gradients(model: nn.Module, loss_fn: LossFunction, examples: Any) -> dict[str, Tensor]:
    """Gradient of each example's own loss: the reference engine.

    Computes: for every i, the gradient of loss_fn(model, example i alone, as a batch of one); by vmap over
    examples, or one by one where the model has an operation that vmap cannot batch.

    Args:
        model: any module. Its parameters and buffers are read, never written.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: tensor or tuple, list or dict of tensors with leading dimension B >= 1.
    Returns:
        grads_BP by parameter name: tensors of shape (B, *parameter.shape), without a graph.
    Raises:
        PrivacyError: loss_fn does not return one loss per example.
        UnsupportedModuleError: the forward pass writes to a buffer, or torch.func cannot differentiate it.
    Privacy:
        NOT private. Row i depends on example i and the model alone: each example is isolated, dropout included.
    """
    parameters = {name: parameter.detach() for name, parameter in trainable(model).items()}
    bound = BoundLoss(model, loss_fn)

    def loss_of_one(parameters: dict[str, Tensor], example: Any) -> Tensor:
        state = {f"model.{name}": tensor for name, tensor in parameters.items()}
        single = map_examples(lambda leaf: leaf.unsqueeze(0), example)
        return require_losses(functional_call(bound, state, (single,)), 1)[0]

    gradient_of_one = cast(Callable[..., dict[str, Tensor]], grad(loss_of_one))
    try:
        return vmap(gradient_of_one, in_dims=(None, 0), randomness="different")(parameters, examples)
    except RuntimeError as error:
        rows = _one_by_one(gradient_of_one, parameters, examples)
        warnings.warn(
            f"vmap cannot batch this model ({str(error).splitlines()[0][:120]}); its examples are taken one by "
            "one, which is slow and gives the same gradients",
            stacklevel=2,
        )
        return rows


def _one_by_one(
    gradient_of_one: Callable[..., dict[str, Tensor]], parameters: dict[str, Tensor], examples: Any
) -> dict[str, Tensor]:
    try:
        rows = [
            gradient_of_one(parameters, map_examples(itemgetter(index), examples))
            for index in range(count_examples(examples))
        ]
    except RuntimeError as error:
        remedy = "keep buffers as they are in training, for what is written there is private, or replace the module"
        got, kind = str(error).splitlines()[0], UnsupportedModuleError
        raise expected("PrivateGradient", "model", "to work under torch.func", got, remedy, kind) from error
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}
