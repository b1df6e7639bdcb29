"""The cost of mechanisms by dp_accounting. Only this file imports it.

`accounting` and `privacy_filter` import this file when they first compute a cost. With scipy, dp_accounting takes
longer to import than all of privgrad. The privacy guarantee rests on this file, as it does on `accounting`.
"""

import functools
import logging
import math
from collections.abc import Iterable

import dp_accounting
import numpy as np
from dp_accounting import dp_event, pld, rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

from privgrad.mechanisms import Mechanism, Repeated, Truncated

RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(11, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
)
_COARSE_ORDERS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


@functools.lru_cache(maxsize=4096)
def attack_success_of(mechanisms: tuple[Mechanism, ...], alpha: float) -> float:
    """Compute `accounting.attack_success` of one group of people; cached."""
    if not mechanisms:
        return alpha
    if _lacks_noise(mechanisms):
        return 1.0
    by_pld = pld.PLDAccountant(value_discretization_interval=1e-3)
    by_rdp = rdp.RdpAccountant(RDP_ORDERS)
    has_selection = any(isinstance(mechanism, Repeated) for mechanism in mechanisms)
    if has_selection and _is_truncated(mechanisms):
        return 1.0
    if not math.isfinite(_compose(by_rdp if has_selection else by_pld, mechanisms, 1e-6)):
        return 1.0
    costs: list[float] = _safe_costs(by_rdp, mechanisms).tolist() if has_selection else []
    bound = 1.0
    for eps in np.linspace(0.0, 12.0, 121):
        delta = float(compute_delta(RDP_ORDERS, costs, eps)[0] if has_selection else by_pld.get_delta(eps))
        bound = min(bound, math.exp(eps) * alpha + delta, 1 - math.exp(-eps) * (1 - delta - alpha))
    return max(alpha, bound)


@functools.lru_cache(maxsize=4096)
def epsilon_of(mechanisms: tuple[Mechanism, ...], delta: float, accountant: str) -> float:
    """Compute the epsilon of releases, as `mechanisms_of` returns them; cached. `accounting` calls it.

    Besides the accountants of `accounting.epsilon`, it has "coarse rdp" and "coarse pld": faster and looser.
    """
    if not mechanisms:
        return 0.0
    if _lacks_noise(mechanisms):
        return math.inf
    is_coarse = accountant.startswith("coarse")
    orders = _COARSE_ORDERS if is_coarse else RDP_ORDERS
    truncated = _is_truncated(mechanisms)
    if truncated and (accountant == "rdp" or any(isinstance(mechanism, Repeated) for mechanism in mechanisms)):
        return math.inf  # RDP does not cover truncation, and PLD does not cover a Selection
    # Without the truncation, RDP is not a bound: it only guides the search, and the interval of PLD.
    covered = tuple(one.untruncated if isinstance(one, Truncated) else one for one in mechanisms)
    by_rdp = _compose(rdp.RdpAccountant(orders), covered, delta)
    if accountant.endswith("rdp") or any(isinstance(mechanism, Repeated) for mechanism in mechanisms):
        return by_rdp
    # An interval of 1e-4 is accurate enough up to epsilon 20. Above, the interval grows with epsilon to bound memory.
    finest = 1e-3 if is_coarse else 1e-4
    interval = finest * max(1.0, by_rdp / 20) if math.isfinite(by_rdp) else 1e-2
    by_pld = _compose(pld.PLDAccountant(value_discretization_interval=interval), mechanisms, delta)
    return by_pld if truncated else min(by_rdp, by_pld)


def _compose(
    accountant: "rdp.RdpAccountant | pld.PLDAccountant",
    mechanisms: tuple[Mechanism, ...],
    delta: float,
) -> float:
    """Return the epsilon of all mechanisms by one accountant; infinity if its arithmetic gives no bound."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_worth_telling)
    try:
        for mechanism in mechanisms:
            accountant.compose(_event(mechanism), mechanism[-1])
        if isinstance(accountant, rdp.RdpAccountant):
            costs = _safe_costs(accountant, mechanisms)
            if (costs != accountant.rdp).any():
                return max(0.0, float(rdp.compute_epsilon(accountant.orders.tolist(), costs.tolist(), delta)[0]))
        found = float(accountant.get_epsilon(delta))
        return math.inf if math.isnan(found) else max(0.0, found)
    except (ArithmeticError, ValueError):
        return math.inf  # beyond the accountant's arithmetic: no bound
    finally:
        logger.removeFilter(_is_worth_telling)


def renyi_costs(mechanisms: tuple[Mechanism, ...]) -> dict[float, float]:
    """Return order -> RDP of releases, as `mechanisms_of` returns them. `privacy_filter` calls it.

    An RDP is infinite if a release has no noise, or if the accountant's arithmetic gives no bound. Each kind of release
    is computed once and kept, so that one more commitment of a budget costs little time.
    """
    each = [_renyi_costs(mechanism, RDP_ORDERS) for mechanism in mechanisms]
    together = np.sum(each, axis=0) if each else np.zeros(len(RDP_ORDERS))
    return dict(zip(RDP_ORDERS, together.tolist(), strict=True))


@functools.lru_cache(maxsize=4096)
def _renyi_costs(mechanism: Mechanism, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Return the RDP of one kind of release by order, as in `renyi_costs`; cached."""
    accountant = rdp.RdpAccountant(orders)
    if _is_truncated((mechanism,)):
        return (math.inf,) * len(orders)
    if _lacks_noise((mechanism,)) or not math.isfinite(_compose(accountant, (mechanism,), 1e-6)):
        return (math.inf,) * len(orders)
    return tuple(_safe_costs(accountant, (mechanism,)).tolist())


def epsilon_at(order: float, cost: float, delta: float) -> float:
    """Return the epsilon at delta of a mechanism with this RDP of this order. `privacy_filter` calls it."""
    return max(0.0, float(rdp.compute_epsilon([order], [cost], delta)[0]))


def _event(mechanism: Mechanism) -> dp_accounting.DpEvent:
    """Return one of the releases, not its count, in dp_accounting's form."""
    if isinstance(mechanism, Repeated):
        events = [dp_accounting.SelfComposedDpEvent(_event(one), one[-1]) for one in mechanism.mechanisms]
        # Rounding may lower the RDP of one run. It is added here, because the selection multiplies it.
        rounding = dp_accounting.ZCDpEvent(rho=_rounding_rate(mechanism.mechanisms))
        run = dp_accounting.ComposedDpEvent([*events, rounding])
        return dp_event.RepeatAndSelectDpEvent(run, mechanism.mean, mechanism.shape)
    if isinstance(mechanism, Truncated):
        sigma, rate, largest, examples, _ = mechanism
        return dp_event.TruncatedSubsampledGaussianDpEvent(examples, rate, largest, sigma)
    noise_multiplier, sample_rate, _ = mechanism
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    return event if sample_rate == 1 else dp_accounting.PoissonSampledDpEvent(sample_rate, event)


def _safe_costs(accountant: rdp.RdpAccountant, mechanisms: Iterable[Mechanism]) -> np.ndarray:
    """Return the RDP of each order, or a little more if rounding may have brought one of them to zero or below.

    An RDP of zero or below would make its order cost nothing.
    """
    costs = accountant.rdp
    rounding = accountant.orders * _rounding_rate(mechanisms)
    return np.maximum(costs, 0.0) + rounding if (costs < rounding).any() else costs


def _rounding_rate(mechanisms: Iterable[Mechanism]) -> float:
    """Return by how much rounding may lower the RDP of an order, divided by the order.

    Under sampling the RDP is a sum of terms that nearly cancel. The largest term is order * sample_rate, with a
    relative error of 2^-39. This matters at rates below about 1e-10. `_event` adds that of a Selection itself.
    """
    plain = (mechanism for mechanism in mechanisms if not isinstance(mechanism, Repeated))
    return 2.0**-36 * sum(one[1] * one[-1] for one in plain if one[1] < 1)


def _lacks_noise(mechanisms: Iterable[Mechanism]) -> bool:
    """Return whether a release has no noise, or so little that its square underflows to 0."""
    return any(
        _lacks_noise(mechanism.mechanisms) if isinstance(mechanism, Repeated) else mechanism[0] < 1e-100
        for mechanism in mechanisms
    )


def _is_truncated(mechanisms: Iterable[Mechanism]) -> bool:
    """Return whether a release is from truncated batches, also one in a Selection."""
    return any(
        _is_truncated(mechanism.mechanisms) if isinstance(mechanism, Repeated) else isinstance(mechanism, Truncated)
        for mechanism in mechanisms
    )


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Return False for dp_accounting's log message that it excluded an RDP order, which only loosens the bound.

    `logging` calls it for each message. No epsilon depends on it.
    """
    return "Excluding this order" not in record.getMessage()
