"""Federated training with privacy for users: whose data are one row, and what each computes alone.

A round is a step of PrivateGradient: `plan.batches(users)` draws a cohort, LocalTraining makes of each user an update,
which is clipped as one; sum, one noise, and the public expected cohort as divisor. What is released is the mean of
w - w_user, a gradient to any optimizer of privgrad.optim: SGD with lr 1 averages (DP-FedAvg).
"""

from typing import Any

from torch import Tensor, nn

from privgrad.errors import expected, require_positive
from privgrad.gradient.clipping import Flat, clipped_sum
from privgrad.gradient.engines.hooks import Hooks
from privgrad.gradient.local_training import LocalTraining, Reported
from privgrad.gradient.module_state import trainable
from privgrad.gradient.precondition import Preconditioner, require_scales_only
from privgrad.types import LossFunction

__all__ = ["LocalTraining", "Reported", "local_update"]


def local_update(
    model: nn.Module,
    loss_fn: LossFunction,
    user: Any,
    local: LocalTraining,
    *,
    max_update_norm: float,
    precondition: Preconditioner | None = None,
    step: int = 0,
) -> dict[str, Tensor]:
    """One user's clipped update, as the user's own device computes it.

    Args:
        model: with the round's weights; unchanged.
        loss_fn: (model, examples) -> losses, shape (B,).
        user: one row of what data.by_user makes, with leading dimension 1.
        local: how to train.
        max_update_norm: C.
        precondition: public scales; see LocalTraining.
        step: index of the round, from 0.
    Returns:
        w - w_last by parameter name, of norm at most C; zero if it is not finite.
    Privacy:
        NOT private: the server's noise is what makes it so. Clipped here so that an honest device sends no more than it
        has to; the server clips again.
    """
    require_positive("local_update", "max_update_norm", max_update_norm, "give the plan's max_grad_norm")
    own = local.begun()
    if precondition is not None:
        parameters = trainable(model)
        transform = precondition.begun(model).transform(step, epoch_steps=1, parameters=parameters, raw_mean=_refused)
        own.divide(require_scales_only(transform))
    engine = Hooks(model, own.losses(loss_fn))
    chunks = [found for _, found in own.chunks(engine, user, 1, own.radius(step))]
    clipped, _ = clipped_sum(chunks, like=trainable(model), clip=Flat(), max_grad_norm=max_update_norm)
    return dict(clipped.values)


def _refused() -> dict[str, Tensor]:
    raise expected("local_update", "precondition", "to be public", "a wish for private data", "use fixed scales")
