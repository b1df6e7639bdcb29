"""What a user contributes: the update that training on the user's own examples makes of the model.

Shape suffixes: U users, M examples of a user, P the shape of one parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_integer
from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.module_state import require_losses
from privgrad.gradient.perturb import Engine, Perturbation
from privgrad.types import LossFunction, count_examples


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
        sensitivity C for users. Up to rounding: products of many users round otherwise than those of few. Training
        that is stable keeps this small; with learning rates at which it is chaotic it may grow to the size of C.
    Reference:
        Li et al. 2022 (AdaDPS), algorithm 3; McMahan et al. 2018 (DP-FedAvg). Deviations: mini-batches are in the
        order of the user's examples in every epoch; a cohort is drawn by a cryptographic stream, the noise by
        another, and its size is no divisor.
    """

    privacy_unit = "user"
    _called, _usual, _positive = "lr", "0.1 say", True

    def __init__(self, lr: float | Callable[[int], float], *, batch_size: int, epochs: int = 1) -> None:
        super().__init__(lr)
        require_integer("LocalTraining", "batch_size", batch_size, 1)
        require_integer("LocalTraining", "epochs", epochs, 1)
        self.batch_size, self.epochs = batch_size, epochs
        self._inverse_scales: Mapping[str, Tensor] = {}

    def _told(self, radius: str) -> str:
        return f"LocalTraining(lr={radius}, batch_size={self.batch_size}, epochs={self.epochs})"

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

    def chunks(
        self, engine: Engine, examples: Any, size: int, radius: float
    ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
        """Each user's update.

        In every step all who have a mini-batch left train side by side. What a user's arithmetic looks like follows
        from their own count alone: from how wide their mini-batches are, and how many.
        """
        *tensors, count_U = _require_users(examples)
        counts, most = cast("list[int]", count_U.tolist()), tensors[0].shape[1]
        if counts and not 0 <= min(counts) <= max(counts) <= most:
            remedy = (
                "make the data set by privgrad.data.by_user, whose last tensor says how many examples each user has"
            )
            raise expected("LocalTraining", "counts", f"to be from 0 to {most}", "others", remedy)
        narrow = -(-self.batch_size // 4)
        for width, least, greatest in ((narrow, 1, narrow), (self.batch_size, narrow + 1, most)):
            users = [user for user, count in enumerate(counts) if least <= count <= greatest]
            users.sort(key=lambda user: -(-counts[user] // width), reverse=True)
            for start in range(0, len(users), size):
                row_U = torch.tensor(users[start : start + size], device=count_U.device)
                yield from self._trained(engine, tensors, row_U, count_U[row_U], width, radius)

    def _trained(
        self, engine: Engine, tensors: Sequence[Tensor], row_U: Tensor, count_U: Tensor, width: int, radius: float
    ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
        """Updates of users in the order of how many mini-batches they have, most first."""
        batches_U, there, moved = -(-count_U // width), len(count_U), dict[str, Factor]()
        steps = [self.epochs * batches for batches in cast("list[int]", batches_U.tolist())]
        first_US = torch.arange(steps[0], device=count_U.device) % batches_U[:, None] * width
        left_US = (count_U[:, None] - first_US).clamp(max=width)
        first_US += row_U[:, None] * tensors[0].shape[1]
        rows, column_M = [tensor.flatten(0, 1) for tensor in tensors], torch.arange(width, device=count_U.device)
        ended: list[tuple[int, Mapping[str, Factor]]] = []
        for step in range(steps[0] + 1):
            before, there = there, sum(own > step for own in steps)
            if there < before:
                ended.append((before - there, {name: factor[there:before] * radius for name, factor in moved.items()}))
                moved = {name: factor[:there] for name, factor in moved.items()}
                # Each chunk that is clipped has a price of its own: where updates are written out, all wait.
                if there == 0 or not all(isinstance(factor, Dense) for factor in moved.values()):
                    yield from _joined(ended)
                    ended = []
            if there == 0:
                return
            left_U = left_US[:there, step]
            # What is missing of a mini-batch repeats its first example: whatever goes wrong there does so in any case.
            place_UM = torch.where(column_M < left_U[:, None], column_M, 0) + first_US[:there, step, None]
            part = (*(_taken(tensor, place_UM) for tensor in rows), left_U)
            found = engine.at(part, moved, -radius) if moved else engine(part)
            for name, factor in found.items():
                scales = self._inverse_scales.get(name)
                update = (factor if scales is None else factor.scaled(scales)).settled()
                moved[name] = (moved[name] + update).settled() if name in moved else update


def _joined(parts: list[tuple[int, Mapping[str, Factor]]]) -> list[tuple[int, Mapping[str, Factor]]]:
    """One chunk of several, the last first, if they are of the same parameters."""
    names = parts[0][1].keys()
    if len(parts) == 1 or any(part.keys() != names for _, part in parts):
        return parts
    together = {name: torch.cat([part[name].dense() for _, part in reversed(parts)]) for name in names}
    return [(sum(users for users, _ in parts), {name: Dense(values) for name, values in together.items()})]


def _taken(rows: Tensor, place_UM: Tensor) -> Tensor:
    """Shape (U, M, ...)."""
    return rows.index_select(0, place_UM.flatten()).view(*place_UM.shape, *rows.shape[1:])


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
            unknown = sorted(set(updates) - set(parameters))
            if unknown:
                remedy = "name them as model.named_parameters() does"
                raise expected("Reported", "updates", "to be of the model's parameters", ", ".join(unknown), remedy)
            _require_real(updates)
            return torch.stack([(updates[n] * parameters[n]).flatten(1).sum(1) for n in updates]).sum(0)

        return of_updates

    def microbatch_size(self, engine: Engine, examples: Any) -> int:
        return count_examples(examples)

    def gradients(self, engine: Engine, examples: Any, radius: float) -> Mapping[str, Factor]:
        _require_real(examples)
        return {name: Dense(updates_UP) for name, updates_UP in examples.items()}


def _require_real(updates: Mapping[str, Tensor]) -> None:
    if not all(updates_UP.is_floating_point() for updates_UP in updates.values()):
        raise expected("Reported", "updates", "to be real floating-point numbers", "others", "leave them out")


def _require_users(users: Any) -> tuple[Tensor, ...]:
    """The users' tensors; the last says how many examples each has.

    Raises:
        PrivacyError: they are not made as data.by_user makes them.
    """
    held = cast("tuple[Tensor, ...]", users)
    remedy = "make the data set by privgrad.data.by_user"
    if not isinstance(users, tuple | list) or len(held) < 2 or held[-1].dim() != 1 or not _counts(held[-1]):
        raise expected("LocalTraining", "a batch", "of users' examples and their counts", "another", remedy)
    *tensors, count_U = held
    shape = (len(count_U), tensors[0].shape[1] if tensors[0].dim() > 1 else -1)
    if any(tuple(tensor.shape[:2]) != shape for tensor in tensors):
        raise expected("LocalTraining", "a batch", "of tensors (users, examples, ...)", "others", remedy)
    return (*tensors, count_U.long())


def _counts(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _narrow(scales: Tensor) -> Tensor:
    """Scales of a table or matrix, without the dimension that they do not depend on: factors then stay factors."""
    for dim in (1, 0) if scales.dim() == 2 else ():
        first = scales.narrow(dim, 0, 1)
        if bool((scales == first).all()):
            return first.contiguous()
    return scales
