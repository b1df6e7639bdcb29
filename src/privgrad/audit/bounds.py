"""Counts of wrong guesses -> lower bounds on epsilon. Each says what it assumes."""

import functools
import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
from scipy import optimize, stats

from privgrad import accounting
from privgrad.accounting import Release
from privgrad.errors import expected, require_delta, require_integer

_DELTAS = tuple(float(delta) for delta in np.geomspace(0.6, 1e-3, 16))  # where an accountant's curve is looked at
_NOISES = range(-4, 17)  # eighths of a power of two, from the noise that is claimed


def clopper_pearson(errors: Any, trials: Any, confidence: float) -> Any:
    """Upper bound on a probability, from how often it came true.

    Computes: the `confidence` quantile of Beta(errors + 1, trials - errors); 1 if every trial was an error.

    Args:
        errors: how many, from 0 to trials; a number or an array.
        trials: how many independent trials there were, >= 1.
        confidence: in (0, 1): the probability, at least, that the bound holds.
    Returns:
        Numbers in (0, 1], shaped as the arguments.
    Raises:
        PrivacyError: confidence is not in (0, 1).
    Reference:
        Clopper, Pearson 1934. Exact, so never below its confidence, and often above.
    """
    require_confidence("clopper_pearson", confidence)
    errors, trials = np.asarray(errors, float), np.asarray(trials, float)
    bound = stats.beta.ppf(confidence, errors + 1, np.maximum(trials - errors, 1e-9))
    return np.where(errors >= trials, 1.0, bound)


def epsilon_of_rates(false_positive: Any, false_negative: Any, delta: float) -> Any:
    """Epsilon that any mechanism must have whose outputs are told apart with at most these error rates.

    Computes: the larger of log((1 - delta - FNR) / FPR) and log((1 - delta - FPR) / FNR), and 0.

    Args:
        false_positive: upper bound on how often the canary is seen where it is not; (0, 1], number or array.
        false_negative: upper bound on how often it is missed where it is.
        delta: in (0, 1).
    Returns:
        Epsilon >= 0, shaped as the rates.
    Privacy:
        Assumes nothing of the mechanism: follows from the definition of (epsilon, delta).
    Reference:
        Kairouz et al. 2015; Nasr et al. 2021 (arXiv 2101.04535), equation 2.
    """
    require_delta("epsilon_of_rates", delta)
    one, other = np.asarray(false_positive, float), np.asarray(false_negative, float)
    ratio = np.maximum((1 - delta - other) / one, (1 - delta - one) / other)
    return np.log(np.maximum(ratio, 1.0))


def mu_of_rates(false_positive: Any, false_negative: Any) -> Any:
    """Smallest mu of a Gaussian mechanism with at most these error rates: -Phi^-1(FPR) - Phi^-1(FNR); at least 0."""
    return np.maximum(-stats.norm.ppf(false_positive) - stats.norm.ppf(false_negative), 0.0)


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism whose two outputs lie mu standard deviations apart; exact.

    Computes: the root of Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu) = delta; 0 if there is
    none above.

    Args:
        mu: >= 0: sensitivity over the noise's standard deviation, 1 / sigma.
        delta: in (0, 1).
    Returns:
        Epsilon >= 0.
    Privacy:
        With mu from `mu_of_rates` a lower bound on epsilon of one step at q = 1, assuming that the step is a Gaussian
        mechanism, or post-processing of one, of whatever noise and sensitivity. Of no other mechanism.
    Reference:
        Balle, Wang 2018 (arXiv 1805.06530), theorem 8; in an audit: Nasr et al. 2023 (arXiv 2302.07956).
    """
    require_delta("epsilon_of_gaussian", delta)

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + float(stats.norm.logcdf(-mu / 2 - epsilon / mu)))
        return float(stats.norm.cdf(mu / 2 - epsilon / mu)) - second - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return cast(float, optimize.brentq(excess, 0.0, mu * mu / 2 + mu * 40, xtol=1e-10))


def epsilon_of_accountant(false_positive: float, false_negative: float, release: Release, delta: float) -> float:
    """Epsilon of the composition of Poisson-subsampled Gaussians that must have had too little noise for the rates.

    Computes: the smallest sigma of a grid such that the trade-off curve of `release.count` steps at rate q with that
    sigma, by the accountant, excludes the two rates; and the accountant's epsilon at that sigma. The curve: for every
    delta', 1 - delta' <= e^epsilon(delta') FPR + FNR, and the same with the two exchanged.

    Args:
        false_positive, false_negative: upper bounds, as in `epsilon_of_rates`.
        release: the steps' rate and count, and the noise that is claimed; the grid lies around it, in steps of 9 %.
        delta: in (0, 1).
    Returns:
        Epsilon >= 0; 0 if the rates exclude nothing.
    Privacy:
        Assumes that the training is that composition, or post-processing of it, with this q and T; only the noise is
        taken to be unknown.
    Reference:
        Nasr et al. 2023 (arXiv 2302.07956), section 5, with the accountant's curve in place of a simulated one.
    """

    def noisier(eighths: int) -> Release:
        return replace(release, noise_multiplier=release.noise_multiplier * 2 ** (eighths / 8))

    low, high = _NOISES[0] - 1, _NOISES[-1] + 1  # at low the rates are possible, at high they are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _excluded(false_positive, false_negative, noisier(middle)) else (middle, high)
    return 0.0 if high > _NOISES[-1] else accounting.epsilon([noisier(high)], delta=delta)


def _excluded(false_positive: float, false_negative: float, release: Release) -> bool:
    """Whether some delta' of the curve excludes the rates; what it is short of is concave in delta'."""

    @functools.cache
    def excess(index: int) -> float:
        epsilon, delta = accounting.epsilon([release], delta=_DELTAS[index]), _DELTAS[index]
        smaller, larger = sorted((false_positive, false_negative))
        return 1 - delta - larger - math.exp(min(epsilon, 700.0)) * smaller

    low, high = 0, len(_DELTAS) - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if max(excess(left), excess(right)) > 0:
            return True
        low, high = (left, high) if excess(left) < excess(right) else (low, right)
    return any(excess(index) > 0 for index in range(low, high + 1))


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Probability, at most, of so many correct guesses in one run of an (epsilon, delta) mechanism.

    Computes, with W ~ Binomial(guesses, 1 / (1 + e^-epsilon)): P[W >= correct] + 2 m delta max over i of
    P[correct > W >= correct - i] / i.

    Args:
        canaries: m >= 1, each included by a fair coin of its own.
        guesses: r from 0 to m: for how many a guess was made; the auditor may abstain from the others.
        correct: v, from 0 to r.
        epsilon: >= 0.
        delta: in [0, 1].
    Returns:
        A number in [0, 1].
    Reference:
        Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), theorem 5.2 and appendix D.
    """
    require_integer("one_run_p_value", "canaries", canaries, 1)
    if not 0 <= correct <= guesses <= canaries:
        got, remedy = f"{correct} of {guesses} of {canaries}", "count again"
        raise expected("one_run_p_value", "correct <= guesses <= canaries", "to hold", got, remedy)
    truth = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, truth))
    if not correct:
        return min(1.0, beta)
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, truth))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def epsilon_of_one_run(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """Largest epsilon below which so many correct guesses have a probability under 1 - confidence.

    Args:
        canaries, guesses, correct: as in `one_run_p_value`.
        delta: in (0, 1).
        confidence: in (0, 1).
    Returns:
        Epsilon >= 0; 0 if the guesses show nothing.
    Privacy:
        Assumes nothing of the mechanism, and no independence of the guesses, but that each canary's coin is fair, is
        its own, and decides over that canary alone.
    Reference:
        Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), algorithm 1.
    """
    require_delta("epsilon_of_one_run", delta)
    require_confidence("epsilon_of_one_run", confidence)

    def unlikely(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    low, high = 0.0, 40.0
    if not unlikely(low):
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if unlikely(middle) else (low, middle)
    return low


def require_confidence(function: str, value: float) -> None:
    if not 0 < value < 1:
        raise expected(function, "confidence", "in (0, 1)", value, "0.95 is usual")
