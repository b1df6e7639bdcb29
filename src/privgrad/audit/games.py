"""A mechanism, canaries, and many guesses whether each canary was there."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from privgrad.accounting import Release
from privgrad.audit.bounds import (
    clopper_pearson,
    epsilon_of_accountant,
    epsilon_of_gaussian,
    epsilon_of_one_run,
    epsilon_of_rates,
    mu_of_rates,
    require_confidence,
)
from privgrad.errors import expected, require_integer
from privgrad.threads import one_thread

Tick = Callable[[], object]

_CHOOSING = 6  # one run in so many chooses the thresholds; the others are counted
_THRESHOLDS = 400


@dataclass(frozen=True)
class Game:
    """A mechanism to audit: any function from a data set to a released vector.

    Attributes:
        name: what is audited.
        release: data set -> what leaves, as one finite vector (P,), with fresh noise at every call.
        data: which canaries are in, bool (K,) -> the data set. A canary is what the privacy unit says: an example, or
            all that a user has.
        directions: where each canary moves what is released, (K, P): the auditor's knowledge (see `directions`).
        claim: epsilon that is claimed, at this delta.
        delta: in (0, 1).
        steps: what is claimed of the mechanism, for the bounds that assume its shape: `count` releases of this noise
            multiplier and rate. None: only the bounds that assume nothing.
    """

    name: str
    release: Callable[[Any], Tensor]
    data: Callable[[Tensor], Any]
    directions: Tensor
    claim: float
    delta: float
    steps: Release | None = None


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        name: what was audited.
        claim: epsilon that is claimed.
        delta: at which.
        bounds: lower bounds on epsilon, by what they assume: "any" mechanism, a "gaussian" mechanism, the
            "accountant"'s composition; "one run" assumes nothing.
        confidence: the probability, at least, that all bounds of this audit hold together.
        trials: on how many guesses the bounds rest.
        counts: by bound, what it was made of: [wrong where the canary was out, trials out, wrong where it was in,
            trials in]; of one run [canaries, guesses, correct].
        seconds: how long it took.
    """

    name: str
    claim: float
    delta: float
    bounds: Mapping[str, float]
    confidence: float
    trials: int
    counts: Mapping[str, list[int]]
    seconds: float

    @property
    def bound(self) -> float:
        """The largest lower bound."""
        return max(self.bounds.values())

    @property
    def passed(self) -> bool:
        """Whether no bound passes the claim. True proves nothing; False refutes the claim, with the confidence."""
        return self.bound <= self.claim

    def as_record(self) -> dict[str, Any]:
        """All of it, for a line of JSON."""
        return asdict(self) | {"bound": self.bound, "passed": self.passed}


def directions(noiseless: Callable[[Any], Tensor], data: Callable[[Tensor], Any], canaries: int) -> Tensor:
    """Where each canary, alone, moves what a mechanism without noise releases; unit vectors, shape (K, P).

    Raises:
        PrivacyError: a canary that moves nothing.
    """
    nothing, rows = torch.zeros(canaries, dtype=torch.bool), list[Tensor]()
    without = noiseless(data(nothing)).double()
    for index in range(canaries):
        alone = nothing.clone()
        alone[index] = True
        moved = noiseless(data(alone)).double() - without
        length = math.sqrt(float(moved.square().sum()))
        if not 0 < length < math.inf:
            raise expected("directions", f"canary {index}", "to move what is released", length, "give it a gradient")
        rows.append(moved / length)
    return torch.stack(rows)


def distinguish(game: Game, *, trials: int = 60_000, confidence: float = 0.95, tick: Tick | None = None) -> Audit:
    """Guess from each of many runs which canaries were in, and bound epsilon by how often that is wrong.

    In every run each canary is in by a fair coin of its own; with one canary this is D against D and one more. Its
    score is the projection of what was released on its direction. The first sixth of the runs gives each canary's
    score its center and chooses thresholds; the error rates are counted on the rest, and bounded by
    Clopper-Pearson.

    Args:
        game: the mechanism.
        trials: guesses in all, >= 80; a run serves as many as there are canaries.
        confidence: that all bounds hold together, in (0, 1): what is left is shared evenly by the bounds, and within
            each by its two rates.
        tick: called after each run.
    Returns:
        Audit, with the bounds "any", and of a game that says its steps "gaussian" (one step of rate 1) or "accountant"
        (others).
    Raises:
        PrivacyError: a number out of its range, or a release that is not finite.
    Privacy:
        NOT private: it reads the private data as often as there are runs, and charges nothing for what it prints.
        Guesses of one run count as independent trials. With one canary they are; with several they are where, as is
        claimed, the noise of the coordinates is independent, and canaries have coordinates of their own.
    Reference:
        Nasr et al. 2021 (arXiv 2101.04535) and 2023 (arXiv 2302.07956).
    """
    require_confidence("distinguish", confidence)
    require_integer("distinguish", "trials", trials, 80)
    began, canaries = time.perf_counter(), len(game.directions)
    runs = max(2 * _CHOOSING, math.ceil(trials / canaries))
    included = np.random.default_rng().random((runs, canaries)) < 0.5
    scores = _scores(game, included, tick)
    choosing = runs // _CHOOSING
    scores = scores - _centers(scores[:choosing], included[:choosing])
    chosen_on = _Scores.of(scores[:choosing], included[:choosing])
    counted = _Scores.of(scores[choosing:], included[choosing:])
    kinds = ["any"] if game.steps is None else ["any", "gaussian" if _is_one_step(game.steps) else "accountant"]
    each = 1 - (1 - confidence) / len(kinds) / 2
    bounds: dict[str, float] = {}
    counts: dict[str, list[int]] = {}
    for kind in kinds:
        wrong_out, wrong_in = counted.wrong(chosen_on.threshold(kind, game.delta, each))
        counts[kind] = [int(wrong_out), len(counted.out), int(wrong_in), len(counted.in_)]
        rates = counted.rates(wrong_out, wrong_in, each)
        bounds[kind] = _bound(kind, float(rates[0]), float(rates[1]), game)
    return Audit(
        game.name, game.claim, game.delta, bounds, confidence, len(counted), counts, time.perf_counter() - began
    )


def one_run(game: Game, *, guessed: float = 0.2, confidence: float = 0.95) -> Audit:
    """Audit one single run: guess of the canaries with the highest scores that they were in, of the lowest, out.

    Args:
        game: with many canaries, hundreds or more.
        guessed: share of the canaries for which a guess is made, in (0, 1]; fixed before the run.
        confidence: in (0, 1).
    Returns:
        Audit, with the bound "one run".
    Raises:
        PrivacyError: a number out of its range, or a release that is not finite.
    Privacy:
        NOT private, as `distinguish`. No guess need be independent of another.
    Reference:
        Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), algorithm 1.
    """
    if not 0 < guessed <= 1:
        raise expected("one_run", "guessed", "in (0, 1]", guessed, "0.2 is a fifth of the canaries")
    began, canaries = time.perf_counter(), len(game.directions)
    included = np.random.default_rng().random((1, canaries)) < 0.5
    order = np.argsort(_scores(game, included, None)[0], kind="stable")
    half = max(1, round(guessed * canaries / 2))
    guesses = 2 * half
    correct = int(included[0, order[-half:]].sum() + (~included[0, order[:half]]).sum())
    bound = epsilon_of_one_run(canaries, guesses, correct, game.delta, confidence)
    counts = {"one run": [canaries, guesses, correct]}
    seconds = time.perf_counter() - began
    return Audit(game.name, game.claim, game.delta, {"one run": bound}, confidence, guesses, counts, seconds)


def _scores(game: Game, included: np.ndarray, tick: Tick | None) -> np.ndarray:
    rows: list[Tensor] = []
    directions_KP = game.directions.double()
    with one_thread():
        for row in included:
            score_K = directions_KP @ game.release(game.data(torch.from_numpy(row))).double()
            if not bool(torch.isfinite(score_K).all()):
                # Comparisons with NaN are false, and infinities have no mean: such scores would count as bad guesses.
                remedy = "let the mechanism release numbers: an infinity or NaN would tell where its canary is"
                raise expected("audit", "what is released", "to be finite", "another", remedy)
            rows.append(score_K)
            if tick is not None:
                tick()
    return torch.stack(rows).numpy()


def _centers(scores: np.ndarray, included: np.ndarray) -> np.ndarray:
    """Half way between each canary's mean scores out and in: noise that returns in every run is no protection."""
    means = [np.where(side, scores, 0).sum(0) / np.maximum(side.sum(0), 1) for side in (included, ~included)]
    return (means[0] + means[1]) / 2


def _is_one_step(steps: Release) -> bool:
    return steps.count == 1 and steps.sample_rate == 1


def _bound(kind: str, false_positive: float, false_negative: float, game: Game) -> float:
    if kind == "gaussian":
        return epsilon_of_gaussian(float(mu_of_rates(false_positive, false_negative)), game.delta)
    if kind == "accountant":
        assert game.steps is not None
        return epsilon_of_accountant(false_positive, false_negative, game.steps, game.delta)
    return float(epsilon_of_rates(false_positive, false_negative, game.delta))


@dataclass(frozen=True)
class _Scores:
    """Scores of the trials without and with their canary, each in ascending order."""

    out: np.ndarray
    in_: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, included: np.ndarray) -> "_Scores":
        return cls(np.sort(scores[~included]), np.sort(scores[included]))

    def __len__(self) -> int:
        return len(self.out) + len(self.in_)

    def wrong(self, threshold: Any) -> tuple[Any, Any]:
        """How many without the canary score above the threshold, and how many with it do not."""
        above = len(self.out) - np.searchsorted(self.out, threshold, side="right")  # pyright: ignore[reportUnknownVariableType]
        return cast(Any, above), cast(Any, np.searchsorted(self.in_, threshold, side="right"))

    def rates(self, wrong_out: Any, wrong_in: Any, confidence: float) -> tuple[Any, Any]:
        """Upper bounds on both error rates."""
        pairs = ((wrong_out, len(self.out)), (wrong_in, len(self.in_)))
        one, other = (clopper_pearson(wrong, count, confidence) for wrong, count in pairs)
        return one, other

    def threshold(self, kind: str, delta: float, confidence: float) -> float:
        """The threshold whose bound on these trials is best; of a Gaussian the middle, where rates are surest."""
        if kind == "gaussian":
            return 0.0  # scores are centered
        together = np.concatenate([self.out, self.in_])
        levels = 1 / (1 + np.exp(-np.linspace(-9, 9, _THRESHOLDS)))
        candidates = np.quantile(together, levels)
        value = np.zeros(len(candidates))
        for level in (confidence, 0.9, 0.5):  # few trials may show nothing at the confidence of the many
            if not value.any():
                rates = self.rates(*self.wrong(candidates), level)
                value = epsilon_of_rates(*rates, delta) if kind == "any" else mu_of_rates(*rates)
        return float(candidates[int(np.argmax(value))])
