"""The cost of mechanisms by dp_accounting. Only this file imports it.

With scipy, it takes longer to import than all of privgrad. So this file is imported when a first cost is computed.
"""

import functools
import logging
import math
from collections.abc import Iterable

import dp_accounting
import numpy as np
from dp_accounting import dp_event, pld, rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy.stats import binom

from privgrad.accounting.mechanisms import Mechanism, Release, Selection, releases_in
from privgrad.accounting.on_disk import kept

LEAST, POINTS = 1e-10, 1000  # the last delta of a profile, and the number of its epsilons
_FINEST = 1e-4  # the interval of PLD, which is accurate enough up to epsilon 20
RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(11, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
)
# Named in every accountant: another default of dp_accounting would change each epsilon.
_NEIGHBORS = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_COARSE_ORDERS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


@functools.lru_cache(maxsize=256)
def profile_of(mechanisms: tuple[Mechanism, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return epsilons from 0 on and the delta of each, of one group of people; None if there is no bound; cached."""
    found = _profile(mechanisms)
    return None if found is None else (np.array(found[0]), np.array(found[1]))


@kept
def _profile(mechanisms: tuple[Mechanism, ...]) -> tuple[list[float], list[float]] | None:
    """Return the lists of `profile_of`."""
    has_selection = any(isinstance(one, Selection) for one in mechanisms)
    if _lacks_noise(mechanisms) or (has_selection and _is_by_pld_alone(mechanisms)):
        return None
    by_rdp, by_pld = rdp.RdpAccountant(RDP_ORDERS, _NEIGHBORS), _by_pld(mechanisms, 10 * _FINEST)
    last = _compose(by_rdp if has_selection else by_pld, mechanisms, LEAST)
    if not math.isfinite(last):
        return None
    # Many steps with little loss each need a finer grid. It has as many points as the losses allow, so it stays fast.
    if last < 10 and not has_selection and all(release.scheme != "epochs" for release in releases_in(mechanisms)):
        by_pld = _by_pld(mechanisms, _FINEST * max(1.0, last))
        last = _compose(by_pld, mechanisms, LEAST)
    epsilons = np.linspace(0.0, min(last, 700.0), POINTS).tolist()  # e^710 overflows
    if has_selection:
        costs = _safe_costs(by_rdp, mechanisms).tolist()
        return epsilons, [float(compute_delta(RDP_ORDERS, costs, each)[0]) for each in epsilons]
    return epsilons, [float(by_pld.get_delta(each)) for each in epsilons]


@functools.lru_cache(maxsize=4096)
@kept
def epsilon_of(mechanisms: tuple[Mechanism, ...], delta: float, accountant: str) -> float:
    """Compute the epsilon of releases; cached. "coarse rdp" and "coarse pld" are faster and looser accountants."""
    if not mechanisms:
        return 0.0
    if _lacks_noise(mechanisms):
        return math.inf
    is_coarse = accountant.startswith("coarse")
    orders = _COARSE_ORDERS if is_coarse else RDP_ORDERS
    has_selection = any(isinstance(one, Selection) for one in mechanisms)
    is_by_pld_alone = _is_by_pld_alone(mechanisms)
    if is_by_pld_alone and (accountant == "rdp" or has_selection):
        return math.inf  # RDP does not cover truncation, and PLD does not cover a Selection
    # Without the truncation, RDP is not a bound: it only guides the search, and the interval of PLD.
    by_rdp = _compose(rdp.RdpAccountant(orders, _NEIGHBORS), tuple(map(untruncated, mechanisms)), delta)
    if accountant.endswith("rdp") or has_selection:
        return by_rdp
    # Above epsilon 20, the interval grows with epsilon to bound memory.
    finest = 10 * _FINEST if is_coarse else _FINEST
    interval = finest * max(1.0, by_rdp / 20) if math.isfinite(by_rdp) else 1e-2
    # Any interval gives an upper bound: the discretization is pessimistic. The smaller of two is one.
    by_pld = _compose(_by_pld(mechanisms, interval), mechanisms, delta)
    return by_pld if is_by_pld_alone else min(by_rdp, by_pld)


@functools.lru_cache(maxsize=256)
def epsilon_of_rows(mechanisms: tuple[Release, ...], delta: float, rows: int) -> float:
    """Compute the epsilon of Poisson samples for a person with several rows, each drawn by itself; cached."""
    if _lacks_noise(mechanisms):
        return math.inf
    interval = 10 * _FINEST * max(1.0, rows * epsilon_of(mechanisms, delta, "rdp") / 20)
    accountant = pld.PLDAccountant(_NEIGHBORS, value_discretization_interval=min(interval, 1e-2))
    for one in mechanisms:
        chances = binom.pmf(np.arange(rows + 1), rows, one.sample_rate)
        event = dp_event.MixtureOfGaussiansDpEvent(one.noise_multiplier, range(rows + 1), chances.tolist())
        alike = dp_accounting.GaussianDpEvent(one.noise_multiplier / rows)
        accountant.compose(alike if one.sample_rate == 1 else event, one.count)
    return max(0.0, float(accountant.get_epsilon(delta)))


def _compose(
    accountant: "rdp.RdpAccountant | pld.PLDAccountant", mechanisms: tuple[Mechanism, ...], delta: float
) -> float:
    """Return the epsilon of all mechanisms by one accountant; infinity if its arithmetic gives no bound."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_worth_telling)
    try:
        for mechanism in mechanisms:
            accountant.compose(_event(mechanism), mechanism.count // _steps_of(mechanism))
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
    """Return order -> RDP of releases; infinite without noise, or if the accountant's arithmetic gives no bound."""
    # Each kind of release is computed once and kept, so that one more commitment of a budget costs little time.
    each = [_renyi_costs(mechanism, RDP_ORDERS) for mechanism in mechanisms]
    together = np.sum(each, axis=0) if each else np.zeros(len(RDP_ORDERS))
    return dict(zip(RDP_ORDERS, together.tolist(), strict=True))


@functools.lru_cache(maxsize=4096)
def _renyi_costs(mechanism: Mechanism, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Return the RDP of one kind of release by order, as in `renyi_costs`; cached."""
    accountant, one = rdp.RdpAccountant(orders, _NEIGHBORS), (mechanism,)
    if _is_by_pld_alone(one) or _lacks_noise(one) or not math.isfinite(_compose(accountant, one, 1e-6)):
        return (math.inf,) * len(orders)
    return tuple(_safe_costs(accountant, one).tolist())


def epsilon_at(order: float, cost: float, delta: float) -> float:
    """Return the epsilon at delta of a mechanism with this RDP of this order."""
    return max(0.0, float(rdp.compute_epsilon([order], [cost], delta)[0]))


def _event(mechanism: Mechanism) -> dp_accounting.DpEvent:
    """Return one of the releases, or of the epochs, not its count, in dp_accounting's form."""
    if isinstance(mechanism, Selection):
        events = [dp_accounting.SelfComposedDpEvent(_event(one), one.count) for one in mechanism.releases]
        # Rounding may lower the RDP of one run. It is added here, because the selection multiplies it.
        rounding = dp_accounting.ZCDpEvent(rho=_rounding_rate(mechanism.releases))
        run = dp_accounting.ComposedDpEvent([*events, rounding])
        return dp_event.RepeatAndSelectDpEvent(run, mechanism.mean, mechanism.shape)
    sigma, rate = mechanism.noise_multiplier, mechanism.sample_rate
    if mechanism.scheme == "epochs":
        from privgrad.accounting.allocation import Epoch

        assert mechanism.epoch_steps is not None  # `mechanisms_of` checked it
        return Epoch(sigma, mechanism.epoch_steps, round(rate * mechanism.epoch_steps))
    if mechanism.scheme == "truncated":
        # Its dataset_size is that of the larger of the two neighbors. The sampler admits n and n - 1 rows.
        examples, largest = mechanism.num_examples, mechanism.max_batch_size
        assert examples is not None  # `mechanisms_of` checked both
        assert largest is not None
        return dp_event.TruncatedSubsampledGaussianDpEvent(examples, rate, largest, sigma)
    event = dp_accounting.GaussianDpEvent(sigma)
    return event if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, event)


def _safe_costs(accountant: rdp.RdpAccountant, mechanisms: Iterable[Mechanism]) -> np.ndarray:
    """Return the RDP of each order, or a little more if rounding may have brought one of them to zero or below."""
    # An RDP of zero or below would make its order cost nothing.
    costs = accountant.rdp
    rounding = accountant.orders * _rounding_rate(mechanisms)
    return np.maximum(costs, 0.0) + rounding if (costs < rounding).any() else costs


def _rounding_rate(mechanisms: Iterable[Mechanism]) -> float:
    """Return by how much rounding may lower the RDP of an order, divided by the order."""
    # Under sampling the RDP is a sum of terms that nearly cancel. The largest term is order * sample_rate, with a
    # relative error of 2^-39. This matters at rates below about 1e-10. `_event` adds that of a Selection itself.
    sampled = (one for one in mechanisms if isinstance(one, Release) and one.sample_rate < 1)
    return 2.0**-36 * sum(one.sample_rate * one.count for one in sampled)


def _lacks_noise(mechanisms: Iterable[Mechanism]) -> bool:
    """Return whether a release has no noise, or so little that its square underflows to 0."""
    return any(release.noise_multiplier < 1e-100 for release in releases_in(mechanisms))


def _is_by_pld_alone(mechanisms: Iterable[Mechanism]) -> bool:
    """Return whether RDP does not cover a release: from a truncated batch, or in an epoch."""
    return any(release.scheme != "poisson" for release in releases_in(mechanisms))


def _steps_of(mechanism: Mechanism) -> int:
    """Return the number of releases of an event."""
    return 1 if isinstance(mechanism, Selection) or mechanism.epoch_steps is None else mechanism.epoch_steps


def _by_pld(mechanisms: tuple[Mechanism, ...], interval: float) -> pld.PLDAccountant:
    """Return an accountant by PLD, on a grid of the interval; if there are epochs, on one ten times as coarse."""
    if all(release.scheme != "epochs" for release in releases_in(mechanisms)):
        return pld.PLDAccountant(_NEIGHBORS, value_discretization_interval=interval)
    from privgrad.accounting.allocation import EpochAccountant

    # Poisson samples cost about as much. A share of this is an interval that costs 1 % of the bound, as measured.
    guess = _compose(rdp.RdpAccountant(_COARSE_ORDERS, _NEIGHBORS), tuple(map(untruncated, mechanisms)), 1e-5)
    own = min(0.1, 0.015 * guess * max(1.0, interval / _FINEST) ** 0.5)
    return EpochAccountant(_NEIGHBORS, value_discretization_interval=10 * interval, own=own)


def untruncated(mechanism: Mechanism) -> Mechanism:
    """Return Poisson samples of the same rate, whose cost is near: for truncated ones, it is a little less."""
    if isinstance(mechanism, Selection) or mechanism.scheme == "poisson":
        return mechanism
    return Release(mechanism.noise_multiplier, mechanism.sample_rate, count=mechanism.count)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Return False for dp_accounting's log message that it excluded an RDP order, which only loosens the bound."""
    return "Excluding this order" not in record.getMessage()
