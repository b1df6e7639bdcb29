"""The cost of epochs, in which each unit is in k of t steps, by PLD_accounting. Only this file imports it.

It is imported when a first epoch is paid for. Without numba it takes several times as long.
"""

import warnings
from typing import Any

import attr
from dp_accounting import dp_event, pld

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # that numba is missing
    from PLD_accounting import (
        AllocationSchemeConfig,
        BoundType,
        Direction,
        PrivacyParams,
        compose_full_pld,
        gaussian_allocation_directional_pld,
        rediscretize_dist_by_bound,
    )

_TAIL = 1e-15  # the probability that is counted as certain harm


@attr.s(frozen=True, auto_attribs=True)
class Epoch(dp_event.DpEvent):
    """A Gaussian release at each of the steps of an epoch, where each unit is in `chosen` of them, uniformly."""

    noise_multiplier: float
    steps: int
    chosen: int


class EpochAccountant(pld.PLDAccountant):
    """dp_accounting's accountant by PLD, with Epoch, whose cost is computed in the interval `own`."""

    def __init__(self, *options: Any, own: float, **more: Any) -> None:
        super().__init__(*options, **more)
        self._own = own

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        if not isinstance(event, Epoch):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            self._pld = self._pld.compose(_cost(event, count, self._own, self._value_discretization_interval))
        return None


def _cost(
    event: Epoch, count: int, own: float, interval: float
) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """Return a bound of the privacy losses of so many epochs, on a grid of this interval."""
    numbers = PrivacyParams(
        sigma=event.noise_multiplier, num_steps=event.steps, num_selected=event.chosen, num_epochs=count
    )
    coarse = AllocationSchemeConfig(loss_discretization=own)
    # The library chooses a finer grid for its result, but releases that are composed need one grid.
    bound, losses = BoundType.DOMINATES, dict[str, Any]()
    for direction in (Direction.REMOVE, Direction.ADD):
        found = gaussian_allocation_directional_pld(params=numbers, config=coarse, direction=direction)
        losses[f"{direction.value}_dist"] = rediscretize_dist_by_bound(
            dist=found, tail_truncation=_TAIL, loss_discretization=interval, bound_type=bound
        )
    return compose_full_pld(**losses, bound_type=bound)
