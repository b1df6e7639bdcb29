"""Compute each user's update: the change of the model when it is trained on that user's own examples.

Shape suffixes: U users, M examples of a user, P the shape of one parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.clip.clipping import ClippingAccumulator, Flat
from privgrad.engine.factored import Factored
from privgrad.errors import expected, require_integer, require_positive
from privgrad.gradient.contribution import Contribution, Engine
from privgrad.gradient.factor import Dense, Factor, Factors, as_linear_map
from privgrad.gradient.functional import advanced, require_losses, trainable
from privgrad.gradient.transform import Preconditioner, require_scales_only
from privgrad.perturb.points import Schedule
from privgrad.types import LossFunction

__all__ = ["LocalUpdate", "ReportedUpdate", "local_update"]


class LocalUpdate(Contribution):
    """The update of each user: mini-batch SGD on the user's own examples, from the model's weights.

    Computes, for every user, from w_0 = w, over the user's mini-batches in order, `epochs` times:
        w_k+1 = w_k - lr (mean gradient of mini-batch k at w_k) / A
    The update is w - w_last. It is then clipped as one vector. A are the scales given to PrivateGradient as
    `precondition` (AdaDPS on devices); they divide each mini-batch gradient, not the update. If the server uses SGD
    with learning rate 1, this is federated averaging.

    Args:
        lr: the local learning rate, > 0: a number, or a function round -> number. Public.
        batch_size: the number of examples per local mini-batch, >= 1; the last of an epoch may be smaller.
        epochs: the number of passes over the user's examples, >= 1.
    Raises:
        PrivacyError: a number is out of its range.
    Privacy:
        A user's update depends on that user's examples and the released weights only. Updates are clipped to C, so
        the sum has sensitivity C for users. This holds up to rounding: matrix products over many users and over few
        users round differently. If local training is stable, the difference stays small. If the learning rate makes
        training chaotic, it may grow to the size of C.
    Reference:
        Li et al. 2022 (AdaDPS), algorithm 3; McMahan et al. 2018 (DP-FedAvg). Deviations: every epoch takes the
        mini-batches in the order of the user's examples; one cryptographic stream draws the cohort, another draws
        the noise; and the sum is not divided by the size of the drawn cohort.
    """

    privacy_unit = "user"
    keeps_order = False
    applies_scales = True

    def __init__(self, lr: float | Callable[[int], float], *, batch_size: int, epochs: int = 1) -> None:
        self.lr = Schedule("LocalUpdate", "lr", lr, positive=True)
        require_integer("LocalUpdate", "batch_size", batch_size, 1)
        require_integer("LocalUpdate", "epochs", epochs, 1)
        self.batch_size, self.epochs = batch_size, epochs

    def __repr__(self) -> str:
        return self.described(0)

    def described(self, steps: int) -> str:
        return f"LocalUpdate(lr={self.lr.described(steps)}, batch_size={self.batch_size}, epochs={self.epochs})"

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """Return a function (model, users) -> the mean loss of each user's examples, shape (U,)."""

        def of_users(model: nn.Module, users: Any) -> Tensor:
            *tensors, count_U = _require_users(users)
            size = len(count_U), tensors[0].shape[1]
            rows = tuple(tensor.flatten(0, 1) for tensor in tensors)
            loss_UM = require_losses(loss_fn(model, rows), size[0] * size[1]).view(size)
            there_UM = torch.arange(size[1], device=count_U.device) < count_U[:, None]
            return torch.where(there_UM, loss_UM, 0.0).sum(1) / count_U.clamp(min=1)

        return of_users

    def chunks(
        self, engine: Engine, examples: Any, size: int, step: int, inverse_scales: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, Factors]]:
        """Yield the updates of all users, in chunks of at most `size` users, each with its number of users."""
        *tensors, count_U = _require_users(examples)
        counts, most = cast("list[int]", count_U.tolist()), tensors[0].shape[1]
        if outside := [count for count in counts if not 0 <= count <= most]:
            raise expected("LocalUpdate", "counts", f"to be from 0 to {most}", outside[0])
        # The width and the number of a user's mini-batches depend on that user's own count only, and so does the
        # arithmetic of the update. Users with few examples have narrow mini-batches, which hold less filling.
        narrow, lr = -(-self.batch_size // 4), self.lr(step)
        scales = {name: _narrow(scale) for name, scale in inverse_scales.items()}
        for width, least, greatest in ((narrow, 1, narrow), (self.batch_size, narrow + 1, most)):
            users = [user for user, count in enumerate(counts) if least <= count <= greatest]
            users.sort(key=lambda user: -(-counts[user] // width), reverse=True)
            for start in range(0, len(users), size):
                row_U = torch.tensor(users[start : start + size], device=count_U.device)
                yield from self._trained(engine, tensors, row_U, count_U[row_U], width, lr, scales)

    def _trained(
        self,
        engine: Engine,
        tensors: Sequence[Tensor],
        row_U: Tensor,
        count_U: Tensor,
        width: int,
        lr: float,
        inverse_scales: Mapping[str, Tensor],
    ) -> Iterator[tuple[int, Factors]]:
        """Yield the updates of users, who are sorted by their number of mini-batches, largest first."""
        batches_U = -(-count_U // width)
        steps = [self.epochs * batches for batches in cast("list[int]", batches_U.tolist())]
        # Of the mini-batch of each user in each step S: its first example, and how many it holds.
        first_US = torch.arange(steps[0], device=count_U.device) % batches_U[:, None] * width
        left_US = (count_U[:, None] - first_US).clamp(max=width)
        first_US += row_U[:, None] * tensors[0].shape[1]  # now among the rows of all users
        rows = [tensor.flatten(0, 1) for tensor in tensors]
        column_M = torch.arange(width, device=count_U.device)
        there = len(count_U)  # users that have mini-batches left: they are the first rows
        moved = dict[str, Factor]()  # the sum of their gradients so far, divided by the scales
        ended: list[tuple[int, Factors]] = []
        for step in range(steps[0] + 1):
            before, there = there, sum(own > step for own in steps)
            if there < before:
                ended.append((before - there, {name: factor[there:before] * lr for name, factor in moved.items()}))
                moved = {name: factor[:there] for name, factor in moved.items()}
                # Clipping has a cost per chunk. Updates that are written out can wait, to be clipped as one chunk.
                if there == 0 or not all(isinstance(factor, Dense) for factor in moved.values()):
                    yield from _joined(ended)
                    ended = []
            if there == 0:
                return
            left_U = left_US[:there, step]
            # Fill a short mini-batch with its first example: an error on the filling would occur without it too.
            place_UM = torch.where(column_M < left_U[:, None], column_M, 0) + first_US[:there, step, None]
            taken = (t.index_select(0, place_UM.flatten()).view(*place_UM.shape, *t.shape[1:]) for t in rows)
            part = (*taken, left_U)
            found = engine.at(part, moved, -lr) if moved else engine(part)
            for name, factor in found.items():
                scales = inverse_scales.get(name)
                update = as_linear_map(factor)
                update = (update if scales is None else update.scaled(scales)).settled()
                moved[name] = as_linear_map(moved[name] + update).settled() if name in moved else update


def _joined(parts: list[tuple[int, Factors]]) -> list[tuple[int, Factors]]:
    """Join chunks into one, the last chunk first, if all have the same parameters; else return them as they are."""
    names = parts[0][1].keys()
    if len(parts) == 1 or any(part.keys() != names for _, part in parts):
        return parts
    together = {name: torch.cat([part[name].dense() for _, part in reversed(parts)]) for name in names}
    return [(sum(users for users, _ in parts), {name: Dense(values) for name, values in together.items()})]


class ReportedUpdate(Contribution):
    """A contribution that users computed themselves, as a server with real clients receives it.

    The batch holds w - w_last of each user by parameter name, shape (U, *P). The loss function is not used. An update
    that is not finite contributes nothing; an update longer than C is clipped to C.
    """

    privacy_unit = "user"

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """Return a loss function: the inner product of update and parameters, so that its gradient is the update."""

        def of_updates(model: nn.Module, updates: Mapping[str, Tensor]) -> Tensor:
            parameters = dict(model.named_parameters())
            _require_real(updates)
            return torch.stack([(updates[n] * parameters[n]).flatten(1).sum(1) for n in updates]).sum(0)

        return of_updates

    def microbatch_size(self, engine: Engine, examples: Any, usual_size: int) -> int:
        """Return the usual number of users: nothing is computed, so all can be in one chunk."""
        return usual_size

    def gradients(self, engine: Engine, examples: Any, step: int, inverse_scales: Mapping[str, Tensor]) -> Factors:
        """Return the users' updates as they are, one row per user, without the engine."""
        _require_real(examples)
        return {name: Dense(updates_UP) for name, updates_UP in examples.items()}


def _require_real(updates: Mapping[str, Tensor]) -> None:
    for name, updates_UP in updates.items():
        if not updates_UP.is_floating_point():
            raise expected("ReportedUpdate", name, "to be real floating-point numbers", updates_UP.dtype)


def _require_users(users: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a batch that data.by_user made, the last of them with each user's number of examples."""
    *tensors, count_U = users
    # Rows of different lengths would be read as those of other users, and counts of other types would be rounded.
    is_integer = not (count_U.is_floating_point() or count_U.is_complex() or count_U.dtype == torch.bool)
    sizes = {tuple(tensor.shape[:2]) for tensor in tensors}
    if len(sizes) != 1 or count_U.dim() != 1 or not is_integer or {size[0] for size in sizes} != {len(count_U)}:
        shapes = ", ".join(f"{tuple(tensor.shape[1:])}" for tensor in users)  # of one user: their number is private
        got, remedy = f"{shapes}, {count_U.dtype}", "make the data set by privgrad.data.by_user"
        raise expected("LocalUpdate", "a batch", "to hold users' examples and their counts", got, remedy)
    return (*tensors, count_U.long())


def _narrow(scales: Tensor) -> Tensor:
    """Return scales of a matrix without a dimension on which they do not depend; a factor can then stay a factor."""
    for dim in (1, 0) if scales.dim() == 2 else ():
        first = scales.narrow(dim, 0, 1)
        if bool((scales == first).all()):
            return first.contiguous()
    return scales


def local_update(
    model: nn.Module,
    loss_fn: LossFunction,
    user: Any,
    local: LocalUpdate,
    *,
    max_update_norm: float,
    precondition: Preconditioner | None = None,
    step: int = 0,
) -> dict[str, Tensor]:
    """Compute one user's clipped update on the user's own device.

    Args:
        model: holds the round's weights; unchanged.
        loss_fn: (model, examples) -> losses, shape (B,).
        user: one row of the data set that data.by_user returns, with leading dimension 1.
        local: settings of the user's local training.
        max_update_norm: C.
        precondition: public scales; see LocalUpdate.
        step: index of the round, from 0.
    Returns:
        w - w_last by parameter name, of norm at most C; zero if it is not finite.
    Raises:
        PrivacyError: max_update_norm is not positive, or precondition needs the raw mean gradient or does more than
            divide.
    Privacy:
        NOT private: only the server's noise makes it private. The update is clipped here so that an honest device sends
        no more than it must. The guarantee rests on the server, which clips again.
    """
    require_positive("local_update", "max_update_norm", max_update_norm)
    inverse_scales: Mapping[str, Tensor] = {}
    if precondition is not None:
        parameters = trainable(model)

        def refused() -> dict[str, Tensor]:  # the raw mean of a preconditioner that is not public
            raise expected("local_update", "precondition", "to use public data only", repr(precondition))

        # A device does not know the plan's noise, so scales that are measured by it are refused.
        transform = precondition.begun(model).transform(
            step, epoch_steps=1, noise_std=0.0, parameters=parameters, raw_mean=refused
        )
        inverse_scales = require_scales_only(transform)
    engine = Factored(model, local.losses(loss_fn))
    accumulator = ClippingAccumulator(like=trainable(model), clip=Flat(), max_grad_norm=max_update_norm)
    with advanced(model, keep=False):
        for _, update in local.chunks(engine, user, 1, step, inverse_scales):
            accumulator.add(update)
    clipped, _ = accumulator.result()
    return dict(clipped.values)
