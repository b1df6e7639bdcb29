"""Games between a mechanism and an attack: from each release the attack guesses which canaries were in the data."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privgrad.accounting.accountant import Release
from privgrad.audit import bounds
from privgrad.errors import expected, require_in, require_integer
from privgrad.processes import one_thread

Tick = Callable[[], object]
_CHOOSING = 6  # one run in 6 chooses the thresholds; the errors are counted on the others
_THRESHOLDS = 400


@dataclass(frozen=True)
class Game:
    """A mechanism to audit: any function from a data set to a released vector.

    Attributes:
        name: name of the audited mechanism, for reports.
        release: data set -> the released values, as one finite vector (P,), with fresh noise at every call.
        data: bool (K,), True for each canary that is in -> the data set. A canary is one privacy unit: an example, or
            all examples of a user.
        directions: how each canary moves the released vector, (K, P). This is the auditor's knowledge (see
            `directions`).
        claim: the claimed epsilon, at this delta.
        delta: in (0, 1).
        steps: the claimed form of the mechanism, for the bounds that assume one: `count` releases with this noise
            multiplier and rate. None: only bounds that assume nothing.
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
    """The result of an audit.

    Attributes:
        name, claim, delta: as in Game.
        bounds: lower bounds on epsilon, by their assumption: "any" mechanism, a "gaussian" mechanism, the composition
            of the "accountant"; "one run" assumes nothing.
        confidence: all bounds of this audit hold together with at least this probability.
        trials: number of guesses behind the bounds.
        counts: by bound, the numbers it was computed from: [wrong guesses with the canary out, trials out, wrong
            guesses with the canary in, trials in]; for "one run" [canaries, guesses, correct].
        seconds: duration of the audit.
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
        """Whether no bound exceeds the claim.

        True proves nothing. False refutes the claim, with the confidence of the audit.
        """
        return self.bound <= self.claim

    def as_record(self) -> dict[str, Any]:
        """Return all fields, for a line of JSON."""
        return asdict(self) | {"bound": self.bound, "passed": self.passed}

    def as_row(self) -> dict[str, str]:
        """Return a row of a table for people."""
        assuming = next((kind for kind in self.bounds if kind not in ("any", "one run")), "nothing")
        by_any = [bound for kind, bound in self.bounds.items() if kind in ("any", "one run")]
        return {
            "audited": self.name,
            "claim": f"{self.claim:.3f}",
            "bound": f"{self.bound:.2f}",
            "of": f"{self.bound / self.claim:.0%}" if self.claim else "–",
            "assuming": assuming,
            "any": f"{max(by_any):.2f}",
            "trials": f"{self.trials:,}",
            "passed": "yes" if self.passed else "NO",
        }


def directions(noiseless: Callable[[Any], Tensor], data: Callable[[Tensor], Any], canaries: int) -> Tensor:
    """Return how each canary, alone, moves the output of a mechanism without noise: unit vectors, shape (K, P).

    Args:
        noiseless: data set -> the vector that the mechanism would release without noise.
        data: bool (K,), True for each canary that is in -> the data set.
        canaries: K.
    Raises:
        PrivacyError: a canary moves nothing.
    """
    nothing = torch.zeros(canaries, dtype=torch.bool)
    without = noiseless(data(nothing)).double()
    rows: list[Tensor] = []
    for index in range(canaries):
        alone = nothing.clone()
        alone[index] = True
        moved = noiseless(data(alone)).double() - without
        length = math.sqrt(float(moved.square().sum()))
        if not 0 < length < math.inf:
            raise expected("directions", f"the move of canary {index}", "to have a positive finite length", length)
        rows.append(moved / length)
    return torch.stack(rows)


def distinguish(game: Game, *, trials: int = 60_000, confidence: float = 0.95, tick: Tick | None = None) -> Audit:
    """Guess from each of many runs which canaries were in, and bound epsilon by the rates of wrong guesses.

    In every run each canary is in by its own fair coin; with one canary this compares D with D plus one unit. The score
    of a canary is the projection of the released vector on its direction. The first sixth of the runs gives each
    canary's scores their center and chooses the thresholds. The error rates are counted on the other runs, and bounded
    by Clopper-Pearson.

    Args:
        game: the mechanism.
        trials: number of all guesses, >= 80; one run gives one guess per canary.
        confidence: probability that all bounds hold together, in (0, 1). The bounds share 1 - confidence evenly, and
            the two rates of each bound share its part.
        tick: called after each run.
    Returns:
        An Audit with the bound "any". For a game with `steps` also "gaussian" (one step of rate 1) or "accountant"
        (all others).
    Raises:
        PrivacyError: a number is out of its range, or a release is not finite.
    Privacy:
        NOT private: it reads the private data once per run, and charges nothing for its output. Guesses of one run
        count as independent trials. With one canary they are independent. With several they are independent if, as
        claimed, the noise of the coordinates is independent and canaries have separate coordinates.
    Reference:
        Nasr et al. 2021 (arXiv 2101.04535) and 2023 (arXiv 2302.07956).
    """
    require_in("distinguish", "confidence", confidence, "(0, 1)")
    require_integer("distinguish", "trials", trials, 80)
    began, canaries = time.perf_counter(), len(game.directions)
    runs = max(2 * _CHOOSING, math.ceil(trials / canaries))
    included = np.random.default_rng().random((runs, canaries)) < 0.5
    scores = _scores(game, included, tick)
    choosing = runs // _CHOOSING
    # Centering halfway between each canary's mean scores in and out removes noise that is the same in every run.
    sides = (included[:choosing], ~included[:choosing])
    means = [np.where(side, scores[:choosing], 0).sum(0) / np.maximum(side.sum(0), 1) for side in sides]
    scores = scores - (means[0] + means[1]) / 2
    chosen_on = _Scores.of(scores[:choosing], included[:choosing])
    counted = _Scores.of(scores[choosing:], included[choosing:])
    kinds = ["any"]
    if game.steps is not None:
        kinds.append("gaussian" if game.steps.count == 1 and game.steps.sample_rate == 1 else "accountant")
    each = 1 - (1 - confidence) / len(kinds) / 2
    found: dict[str, float] = {}
    counts: dict[str, list[int]] = {}
    for kind in kinds:
        wrong_out, wrong_in = counted.wrong(chosen_on.threshold(kind, game.delta, each))
        counts[kind] = [int(wrong_out), len(counted.out), int(wrong_in), len(counted.in_)]
        false_positive, false_negative = map(float, counted.rates(wrong_out, wrong_in, each))
        if kind == "gaussian":
            mu = float(bounds.mu_of_rates(false_positive, false_negative))
            found[kind] = bounds.epsilon_of_gaussian(mu, game.delta)
        elif kind == "accountant":
            assert game.steps is not None
            found[kind] = bounds.epsilon_of_accountant(false_positive, false_negative, game.steps, game.delta)
        else:
            found[kind] = float(bounds.epsilon_of_rates(false_positive, false_negative, game.delta))
    seconds = time.perf_counter() - began
    return Audit(game.name, game.claim, game.delta, found, confidence, len(counted), counts, seconds)


def one_run(game: Game, *, guessed: float = 0.2, confidence: float = 0.95) -> Audit:
    """Audit a single run: guess "in" for the canaries with the highest scores, and "out" for those with the lowest.

    Args:
        game: with many canaries, hundreds or more.
        guessed: share of the canaries with a guess, in (0, 1]; fixed before the run.
        confidence: in (0, 1).
    Returns:
        An Audit with the bound "one run".
    Raises:
        PrivacyError: a number is out of its range, or a release is not finite.
    Privacy:
        NOT private, as `distinguish`. The guesses need not be independent of each other.
    Reference:
        Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), algorithm 1.
    """
    require_in("one_run", "guessed", guessed, "(0, 1]")
    began, canaries = time.perf_counter(), len(game.directions)
    included = np.random.default_rng().random((1, canaries)) < 0.5
    order = np.argsort(_scores(game, included, None)[0], kind="stable")
    half = max(1, round(guessed * canaries / 2))
    guesses = 2 * half
    correct = int(included[0, order[-half:]].sum() + (~included[0, order[:half]]).sum())
    bound = bounds.epsilon_of_one_run(canaries, guesses, correct, game.delta, confidence)
    counts = {"one run": [canaries, guesses, correct]}
    seconds = time.perf_counter() - began
    return Audit(game.name, game.claim, game.delta, {"one run": bound}, confidence, guesses, counts, seconds)


def _scores(game: Game, included: np.ndarray, tick: Tick | None) -> np.ndarray:
    """Run the mechanism once for each row of `included`, and return the score of each canary in each run."""
    rows: list[Tensor] = []
    directions_KP = game.directions.double()
    with one_thread():
        for row in included:
            score_K = directions_KP @ game.release(game.data(torch.from_numpy(row))).double()
            finite_K = torch.isfinite(score_K)
            if not bool(finite_K.all()):
                # NaN and infinities would count as bad guesses here, although they would reveal their canary.
                raise expected("audit", "scores of a release", "to be finite", float(score_K[~finite_K][0]))
            rows.append(score_K)
            if tick is not None:
                tick()
    return torch.stack(rows).numpy()


@dataclass(frozen=True)
class _Scores:
    """The scores of the trials without and with their canary, each in ascending order."""

    out: Any
    in_: Any

    @classmethod
    def of(cls, scores: np.ndarray, included: np.ndarray) -> "_Scores":
        return cls(np.sort(scores[~included]), np.sort(scores[included]))

    def __len__(self) -> int:
        return len(self.out) + len(self.in_)

    def wrong(self, threshold: Any) -> tuple[Any, Any]:
        """Return how many trials without the canary score above the threshold, and how many with it do not."""
        below: Any = [np.searchsorted(scores, threshold, side="right") for scores in (self.out, self.in_)]
        return len(self.out) - below[0], below[1]

    def rates(self, wrong_out: Any, wrong_in: Any, confidence: float) -> tuple[Any, Any]:
        of_out = bounds.clopper_pearson(wrong_out, len(self.out), confidence)
        return of_out, bounds.clopper_pearson(wrong_in, len(self.in_), confidence)

    def threshold(self, kind: str, delta: float, confidence: float) -> float:
        """Return the threshold with the best bound on these trials."""
        if kind == "gaussian":
            return 0.0  # the middle of centered scores, where the error rates are estimated most precisely
        together = np.concatenate([self.out, self.in_])
        levels = 1 / (1 + np.exp(-np.linspace(-9, 9, _THRESHOLDS)))
        candidates = np.quantile(together, levels)
        value = np.zeros(len(candidates))
        for level in (confidence, 0.9, 0.5):  # few trials may show nothing at the confidence meant for many
            if not value.any():
                rates = self.rates(*self.wrong(candidates), level)
                value = bounds.epsilon_of_rates(*rates, delta) if kind == "any" else bounds.mu_of_rates(*rates)
        return float(candidates[int(np.argmax(value))])
