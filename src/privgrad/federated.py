"""Federated training with user-level privacy: one row of the data holds all examples of one user.

A round is one step of PrivateGradient. `plan.batches(users)` draws a cohort, and LocalUpdate computes one update per
user. Each update is clipped as a whole. The clipped updates are summed, noised once, and divided by the public expected
cohort size. The released mean of w - w_user is a gradient for any optimizer of privgrad.optim: SGD with lr 1 averages
the users' weights (DP-FedAvg).

The privacy guarantee rests on PrivateGradient, which runs on the server. It does not rest on `local_update`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from privgrad.errors import expected, require_positive
from privgrad.gradient.clipping import ClippingAccumulator, Flat
from privgrad.gradient.engines.factored import Factored
from privgrad.gradient.local_training import LocalUpdate, ReportedUpdate
from privgrad.gradient.module_state import trainable
from privgrad.gradient.precondition import Preconditioner, require_scales_only
from privgrad.gradient.spectral_norm import advanced
from privgrad.types import LossFunction

__all__ = ["LocalUpdate", "ReportedUpdate", "local_update"]


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

    `integrations.flower.client_app` calls it; a client of another framework can call it directly.

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
    require_positive("local_update", "max_update_norm", max_update_norm, "give the plan's max_grad_norm")
    inverse_scales: Mapping[str, Tensor] = {}
    if precondition is not None:
        parameters = trainable(model)
        refused = partial(_refuse_raw_mean, precondition)
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


def _refuse_raw_mean(precondition: Preconditioner) -> dict[str, Tensor]:
    """Raise PrivacyError: a device has no mean gradient of the cohort, which would be private.

    `local_update` gives it to `Preconditioner.transform` as `raw_mean`. A preconditioner that is not public calls it.
    The guarantee rests on the server, not on this.
    """
    raise expected("local_update", "precondition", "to use public data only", repr(precondition), "use fixed scales")
