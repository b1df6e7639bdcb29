"""Lower bounds on epsilon from counts of wrong guesses. Each function states its assumptions."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Release
from privgrad.accounting.mechanisms import mechanisms_of
from privgrad.errors import expected, require_delta, require_in, require_integer

_NOISES = range(-4, 17)  # k: the grid has the claimed noise times 2**(k / 8)
_FINE = 64  # steps of the noise from one power of 2 to the next, in one run


def clopper_pearson(errors: Any, trials: Any, confidence: float) -> Any:
    """Return an upper confidence bound on a probability, from how often its event happened.

    Computes: the `confidence` quantile of Beta(errors + 1, trials - errors); 1 if every trial was an error.

    Args:
        errors: number of errors, from 0 to trials; a number or an array.
        trials: number of independent trials, >= 1.
        confidence: in (0, 1): the bound holds with at least this probability.
    Returns:
        Numbers in (0, 1], with the shape of the arguments.
    Raises:
        PrivacyError: confidence is not in (0, 1).
    Reference:
        Clopper, Pearson 1934. Exact: the probability is never below the confidence, and often above it.
    """
    from scipy import stats  # in functions: it takes longer to import than all of privgrad

    require_in("clopper_pearson", "confidence", confidence, "(0, 1)")
    errors, trials = np.asarray(errors, float), np.asarray(trials, float)
    bound = stats.beta.ppf(confidence, errors + 1, np.maximum(trials - errors, 1e-9))
    return np.where(errors >= trials, 1.0, bound)


def epsilon_of_rates(false_positive: Any, false_negative: Any, delta: float) -> Any:
    """Return a lower bound on epsilon, for any mechanism, from the error rates of an attack.

    A mechanism whose outputs an attack distinguishes with at most these error rates has at least this epsilon.

    Computes: the larger of log((1 - delta - FNR) / FPR) and log((1 - delta - FPR) / FNR), and 0.

    Args:
        false_positive: upper bound on the rate of "canary present" where it is absent; (0, 1], number or array.
        false_negative: upper bound on the rate of "canary absent" where it is present; the same range.
        delta: in (0, 1).
    Returns:
        Epsilon >= 0, with the shape of the rates.
    Privacy:
        Assumes nothing about the mechanism: the bound follows from the definition of (epsilon, delta).
    Reference:
        Kairouz et al. 2015; Nasr et al. 2021 (arXiv 2101.04535), equation 2.
    """
    require_delta("epsilon_of_rates", delta)
    fpr, fnr = np.asarray(false_positive, float), np.asarray(false_negative, float)
    ratio = np.maximum((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)
    return np.log(np.maximum(ratio, 1.0))


def mu_of_rates(false_positive: Any, false_negative: Any) -> Any:
    """Return the smallest mu of a Gaussian mechanism that an attack distinguishes with at most these error rates."""
    from scipy import stats

    # -Phi^-1(FPR) - Phi^-1(FNR); at least 0
    return np.maximum(-stats.norm.ppf(false_positive) - stats.norm.ppf(false_negative), 0.0)


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian mechanism whose two outputs lie mu standard deviations apart.

    Computes: the root of Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu) = delta; 0 if no root
    is above 0.

    Args:
        mu: >= 0: the sensitivity divided by the standard deviation of the noise, 1 / sigma.
        delta: in (0, 1).
    Returns:
        Epsilon >= 0.
    Privacy:
        With mu from `mu_of_rates` the result is a lower bound on epsilon of one step at q = 1. It assumes that the
        step is a Gaussian mechanism, or post-processing of one, with any noise and sensitivity. It holds for no other
        mechanism.
    Reference:
        Balle, Wang 2018 (arXiv 1805.06530), theorem 8; in an audit: Nasr et al. 2023 (arXiv 2302.07956).
    """
    from scipy import optimize, stats

    require_delta("epsilon_of_gaussian", delta)

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + float(stats.norm.logcdf(-mu / 2 - epsilon / mu)))
        return float(stats.norm.cdf(mu / 2 - epsilon / mu)) - second - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return cast(float, optimize.brentq(excess, 0.0, mu * mu / 2 + mu * 40, xtol=1e-10))


def epsilon_of_accountant(false_positive: float, false_negative: float, release: Release, delta: float) -> float:
    """Return a lower bound on epsilon for a composition of Poisson-subsampled Gaussians, from error rates.

    Computes: the smallest sigma of a grid for which `accounting.attack_success` of `release.count` steps at rate q
    excludes the two rates; and the accountant's epsilon at that sigma.

    Args:
        false_positive: upper bound on the rate, as in `epsilon_of_rates`.
        false_negative: upper bound on the rate, as in `epsilon_of_rates`.
        release: rate and count of the steps, and the claimed noise. The grid lies around that noise, in steps of 9 %.
        delta: in (0, 1).
    Returns:
        Epsilon >= 0; 0 if the rates exclude nothing.
    Privacy:
        Assumes that the training is that composition, or post-processing of it, with this q and T. Only the noise is
        treated as unknown.
    Reference:
        Nasr et al. 2023 (arXiv 2302.07956), section 5, with the accountant's curve in place of a simulated one.
    """

    def noisier(eighths: int) -> Release:
        return replace(release, noise_multiplier=release.noise_multiplier * 2 ** (eighths / 8))

    if false_positive >= 1:
        return 0.0
    low, high = _NOISES[0] - 1, _NOISES[-1] + 1  # the curve at low allows the rates, at high it excludes them
    while high - low > 1:
        middle = (low + high) // 2
        most = accounting.attack_success([noisier(middle)], false_positive_rate=false_positive)
        low, high = (low, middle) if 1 - false_negative > most else (middle, high)
    return 0.0 if high > _NOISES[-1] else accounting.epsilon([noisier(high)], delta=delta)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of so many correct guesses in one run of an (epsilon, delta) mechanism.

    Computes, with W ~ Binomial(guesses, 1 / (1 + e^-epsilon)): P[W >= correct] + 2 m delta max over i of
    P[correct > W >= correct - i] / i. The counts are those of `epsilon_of_one_run`.

    Reference:
        Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), theorem 5.2 and appendix D.
    """
    from scipy import stats

    _require_counts("one_run_p_value", canaries, guesses, correct)
    truth = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, truth))
    if not correct:
        return min(1.0, beta)
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, truth))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def epsilon_of_one_run(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """Return the largest epsilon below which so many correct guesses have a probability under 1 - confidence.

    Args:
        canaries: m >= 1, each included by its own fair coin.
        guesses: r from 0 to m: the number of canaries with a guess; the auditor may abstain from the others.
        correct: v, from 0 to r: the number of correct guesses.
        delta: in (0, 1).
        confidence: in (0, 1).
    Returns:
        Epsilon >= 0; 0 if the guesses show nothing.
    Privacy:
        Assumes nothing about the mechanism, and no independence of the guesses. It assumes that each canary has its own
        fair coin, which decides about that canary alone.
    Reference:
        Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), algorithm 1.
    """
    from scipy import optimize

    require_delta("epsilon_of_one_run", delta)
    require_in("epsilon_of_one_run", "confidence", confidence, "(0, 1)")

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    # The root is rounded down.
    return 0.0 if excess(0.0) >= 0 else max(0.0, cast(float, optimize.brentq(excess, 0.0, 40.0, xtol=5e-7)) - 5e-7)


def epsilon_of_one_gaussian_run(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """Return the epsilon of the largest mu of Gaussian differential privacy that so many correct guesses refute.

    Computes: by bisection, the largest mu for which the guesses have a probability under 1 - confidence; and the
    epsilon at delta of a Gaussian mechanism with this mu.

    Args:
        canaries: m, as in `epsilon_of_one_run`.
        guesses: r, the same.
        correct: v, the same.
        delta: in (0, 1).
        confidence: in (0, 1).
    Returns:
        Epsilon >= 0; 0 if the guesses refute nothing.
    Privacy:
        Assumes that the errors of every attack on the mechanism are those on some Gaussian mechanism, as for one step
        at q = 1, and the coins of `epsilon_of_one_run`. It is the tighter bound then. For others it is no bound.
    Reference:
        Mahloujifar, Melis, Chaudhuri 2025 (arXiv 2410.22235), algorithm 3.
    """
    from scipy import stats

    _require_run("epsilon_of_one_gaussian_run", canaries, guesses, correct, delta, confidence)

    def is_refuted(mu: float) -> bool:
        def least(found: float) -> float:
            return float(stats.norm.cdf(stats.norm.ppf(found) - mu))

        return _refutes(canaries, guesses, correct, confidence, least)

    low, high = 0.0, 64.0
    if not correct or not is_refuted(low):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return epsilon_of_gaussian(low, delta) if low > 0 else 0.0


def epsilon_of_one_training_run(
    canaries: int, guesses: int, correct: int, release: Release, delta: float, confidence: float
) -> float:
    """Return the epsilon of a composition of subsampled Gaussians at the least noise that so many guesses refute.

    Computes: the smallest sigma of a grid whose trade-off curve, by the accountant, gives the guesses a probability
    under 1 - confidence; and the accountant's epsilon at that sigma.

    Args:
        canaries: m, as in `epsilon_of_one_run`.
        guesses: r, the same.
        correct: v, the same.
        release: rate and count of the steps, and the claimed noise. The grid lies around it, in steps of 1 %.
        delta: in (0, 1).
        confidence: in (0, 1).
    Returns:
        Epsilon >= 0; 0 if the guesses refute nothing.
    Privacy:
        Assumes that the training is that composition, or post-processing of it, with this rate and count, and the coins
        of `epsilon_of_one_run`. Only the noise is treated as unknown. It is the tighter bound then.
    Reference:
        Mahloujifar, Melis, Chaudhuri 2025 (arXiv 2410.22235), algorithm 3, with the curve of Kairouz et al. 2015.
    """
    from privgrad.accounting.composition import profile_of

    function = "epsilon_of_one_training_run"
    _require_run(function, canaries, guesses, correct, delta, confidence)

    def noisier(steps: int) -> Release:
        return replace(release, noise_multiplier=release.noise_multiplier * 2 ** (steps / _FINE))

    def is_refuted(steps: int) -> bool:
        if (profile := profile_of(mechanisms_of(function, [noisier(steps)]))) is None:
            return False
        epsilons, deltas = profile

        def least(found: float) -> float:  # both lines of `attack_success`, solved for the false positive rate
            return float(
                np.maximum((found - deltas) * np.exp(-epsilons), 1 - deltas - (1 - found) * np.exp(epsilons)).max()
            )

        return _refutes(canaries, guesses, correct, confidence, least)

    first, last = (ends * _FINE // 8 for ends in (_NOISES[0], _NOISES[-1]))
    if not correct or not is_refuted(last):
        return 0.0
    low, high = first - 1, last  # the guesses refute the noise at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_refuted(middle) else (middle, high)
    return accounting.epsilon([noisier(high)], delta=delta)


def _refutes(canaries: int, guesses: int, correct: int, confidence: float, least: Callable[[float], float]) -> bool:
    """Return whether so many correct guesses have a probability under 1 - confidence.

    `least` gives, for each true positive rate, the least false positive rate of any attack on the mechanism.
    """
    # From the assumption that exactly this many or more correct guesses have the probability 1 - confidence, the
    # least probability of each smaller number follows, one after the other. Together they must not exceed 1.
    right = (1 - confidence) * correct / canaries
    wrong = (1 - confidence) * (guesses - correct) / canaries
    for number in range(correct - 1, -1, -1):
        own = least(right)
        if own <= wrong:
            break
        right, wrong = min(1.0, right + number / (guesses - number) * (own - wrong)), own
    return right + wrong > guesses / canaries


def _require_run(function: str, canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> None:
    require_delta(function, delta)
    require_in(function, "confidence", confidence, "(0, 1)")
    _require_counts(function, canaries, guesses, correct)


def _require_counts(function: str, canaries: int, guesses: int, correct: int) -> None:
    require_integer(function, "canaries", canaries, 1)
    if not 0 <= correct <= guesses <= canaries:
        got = f"{correct}, {guesses} and {canaries}"
        raise expected(function, "correct, guesses and canaries", "to be in this order, from 0 on", got)
