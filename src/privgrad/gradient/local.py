"""What a user contributes: the update that training on the user's own examples makes of the model.

Shape suffixes: U users, M examples of a user, P the shape of one parameter.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_integer, require_positive
from privgrad.gradient.engines import LossFunction, require_losses
from privgrad.gradient.factors import Dense, Factor
from privgrad.gradient.perturb import Engine, Perturbation
from privgrad.types import count_examples


class LocalTraining(Perturbation):
    """Each user's update: epochs of mini-batch SGD on the user's own examples, from the model's weights.

    Computes, for every user, from w_0 = w, over the user's mini-batches in order, `epochs` times:
        w_k+1 = w_k - lr (mean gradient of mini-batch k at w_k) / A
    and gives (w - w_last), which is then clipped as one vector. A are the scales that PrivateGradient is given as
    `precondition` (AdaDPS on devices): they divide each mini-batch gradient, not the update. A server that steps by
    SGD with learning rate 1 is federated averaging.

    Args:
        lr: local learning rate, > 0: a number, or round -> number. Public.
        batch_size: examples of a local mini-batch, >= 1; the last of an epoch may be smaller.
        epochs: passes over the user's examples, >= 1.
    Raises:
        PrivacyError: a number out of its range.
    Privacy:
        A user's update depends on that user's examples and the released weights alone: clipped to C, the sum has
        sensitivity C for users.
    Reference:
        Li et al. 2022 (AdaDPS), algorithm 3; McMahan et al. 2018 (DP-FedAvg). Deviations: mini-batches are in the
        order of the user's examples in every epoch; a cohort is drawn by a cryptographic stream, the noise by
        another, and its size is no divisor.
    """

    privacy_unit = "user"
    _called, _usual = "lr", "0.1 say"

    def __init__(self, lr: float | Callable[[int], float], *, batch_size: int, epochs: int = 1) -> None:
        super().__init__(lr)
        require_integer("LocalTraining", "batch_size", batch_size, 1)
        require_integer("LocalTraining", "epochs", epochs, 1)
        self.batch_size, self.epochs = batch_size, epochs
        self._inverse_scales: Mapping[str, Tensor] = {}

    def _told(self, radius: str) -> str:
        return f"LocalTraining(lr={radius}, batch_size={self.batch_size}, epochs={self.epochs})"

    def radius(self, step: int) -> float:
        """The local learning rate of a round."""
        lr = super().radius(step)
        require_positive("LocalTraining", self._called, lr, self._usual)
        return lr

    def begun(self) -> "LocalTraining":
        return LocalTraining(self._radius, batch_size=self.batch_size, epochs=self.epochs)

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """Mean loss of each user's examples, shape (U,), from (model, users)."""

        def of_users(model: nn.Module, users: Any) -> Tensor:
            *tensors, count_U = _require_users(users)
            size = len(count_U), tensors[0].shape[1]
            rows = tuple(tensor.flatten(0, 1) for tensor in tensors)
            loss_UM = require_losses(loss_fn(model, rows), size[0] * size[1]).view(size)
            there_UM = torch.arange(size[1], device=count_U.device) < count_U[:, None]
            return torch.where(there_UM, loss_UM, 0.0).sum(1) / count_U.clamp(min=1)

        return of_users

    def divide(self, inverse_scales: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._inverse_scales = {name: _narrow(scales) for name, scales in inverse_scales.items()}
        return {}

    def gradients(self, engine: Engine, examples: Any, radius: float) -> Mapping[str, Factor]:
        *tensors, count_U = _require_users(examples)
        most, moved = int(count_U.max()), dict[str, Factor]()
        starts = [*range(0, most, self.batch_size)] or [0]
        for start in starts * self.epochs:
            # A few widths only: the engine looks closely at each that is new.
            width = min(self.batch_size, tensors[0].shape[1] - start, 1 << (max(most - start, 1) - 1).bit_length())
            part = (*(tensor[:, start : start + width] for tensor in tensors), (count_U - start).clamp(0, width))
            found = engine.at(part, moved, -radius) if moved else engine(part)
            for name, factor in found.items():
                scales = self._inverse_scales.get(name)
                step = factor if scales is None else factor.scaled(scales)
                moved[name] = (moved[name] + step if name in moved else step).settled()
        return {name: factor * radius for name, factor in moved.items()}


class Reported(Perturbation):
    """Updates that users computed themselves, as a server of real clients receives them.

    The batch holds, by parameter name, w - w_last of each user, shape (U, *P); the loss function is not used. What is
    not finite contributes nothing, what is longer than C is cut to C.
    """

    privacy_unit = "user"

    def __init__(self) -> None:
        super().__init__(0.0)

    def _told(self, radius: str) -> str:
        return "Reported()"

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """Inner products of updates with parameters: losses whose gradients the updates are."""
        del loss_fn

        def of_updates(model: nn.Module, updates: Mapping[str, Tensor]) -> Tensor:
            parameters = dict(model.named_parameters())
            return torch.stack([(updates[n] * parameters[n]).flatten(1).sum(1) for n in updates]).sum(0)

        return of_updates

    def microbatch_size(self, engine: Engine, examples: Any) -> int:
        return count_examples(examples)

    def gradients(self, engine: Engine, examples: Any, radius: float) -> Mapping[str, Factor]:
        return {name: Dense(updates_UP) for name, updates_UP in examples.items()}


def _require_users(users: Any) -> tuple[Tensor, ...]:
    """The users' tensors; the last says how many examples each has.

    Raises:
        PrivacyError: they are not made as data.by_user makes them.
    """
    held = cast("tuple[Tensor, ...]", users)
    if not isinstance(users, tuple | list) or len(held) < 2 or held[-1].dim() != 1 or held[-1].is_floating_point():
        remedy = "make the data set by privgrad.data.by_user"
        raise expected("LocalTraining", "a batch", "of users' examples and their counts", "another", remedy)
    return tuple(held)


def _narrow(scales: Tensor) -> Tensor:
    """Scales of a table or matrix, without the dimension that they do not depend on: factors then stay factors."""
    for dim in (1, 0) if scales.dim() == 2 else ():
        first = scales.narrow(dim, 0, 1)
        if bool((scales == first).all()):
            return first.contiguous()
    return scales
