"""The price of a private comparison: three ways to spend one total epsilon on tuning and training."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from privgrad.accounting import accountant as accounting
from privgrad.accounting.mechanisms import Release, Selection, Split
from privgrad_lab.calls import wrong
from privgrad_lab.metrics import is_paid
from privgrad_lab.spec import Candidate, MethodTable, Spec, TuningTable

Way = Literal["none", "trials", "select"]
ScoreOn = Literal["training", "held-out", "public"]
Released = Release | Selection | Split

# Shares of the total, counted in squared inverse noise, which adds up over releases.
_SHARE_OF_TRIALS = 0.1
_SHARE_OF_SCORES = 0.05


@dataclass(frozen=True)
class Price:
    """A way to spend the total epsilon of a comparison."""

    way: Way
    candidates: int  # their number
    noise_multiplier: float  # of the training whose model is released
    trial_noise: float | None  # the noise multiplier of a trial
    score_noise: float | None  # that of a score, which is a sum over people; None if scores are free
    releases: tuple[Released, ...]  # everything that the comparison releases from the training data
    epsilon: float  # of these releases, at most the total


def candidates_of(spec: Spec) -> list[tuple[MethodTable, Candidate]]:
    """Return all candidates of all methods, in their order."""
    return [(method, candidate) for method in spec.methods for candidate in dict.fromkeys(spec.grid(method))]


def tunes_norm(spec: Spec) -> bool:
    """Return whether candidates differ in their clipping norm C."""
    return len({candidate.max_grad_norm for _, candidate in candidates_of(spec)}) > 1


def way_of(spec: Spec) -> Way:
    """Return the way that a spec chooses: that of [tuning], or "none" without it."""
    return (spec.tuning or TuningTable()).way or "none"


def price(spec: Spec, way: Way | None = None) -> Price:
    """Return the noise with which a private comparison costs its total epsilon, and all its releases.

    Reference:
        "trials": Panda et al. 2022 (arXiv 2212.04486); only the noise step is carried over. "select": Liu, Talwar 2019
        (arXiv 1811.07971); Papernot, Steinke 2021 (arXiv 2110.03620).
    """
    table, tuning, count = spec.privacy, spec.tuning or TuningTable(), len(candidates_of(spec))
    assert table.total_epsilon is not None
    rate, law = table.expected_batch_size / table.num_examples, (tuning.mean_runs, tuning.shape)
    asked = _Asked(count, table.total_epsilon, table.delta, rate, table.steps, tuning.score_on, *law)
    return _price(way or way_of(spec), asked)


def prices_of(spec: Spec) -> dict[Way, Price]:
    """Return the prices of all ways that fit a spec, the chosen one included."""
    fit_trials = way_of(spec) == "trials" or all(one.noise_step is not None for _, one in candidates_of(spec))
    ways: tuple[Way, ...] = ("none", "trials", "select") if fit_trials else ("none", "select")
    return {way: price(spec, way) for way in ways}


def public_count(spec: Spec) -> int:
    """Return the public number by which the sum of a score is divided."""
    if spec.tuning is None or spec.tuning.score_on != "held-out":
        return spec.privacy.num_examples
    # The number of people who are held out, as to expect from num_examples and the shares of [data].
    held_out, tested = (float(spec.data.options.get(f"{part}_share", 0.0)) for part in ("validation", "test"))
    return max(1, round(spec.privacy.num_examples * held_out / (1 - held_out - tested)))


@dataclass(frozen=True)
class _Asked:
    """The numbers that decide a price; `mean` and `shape` are the law of the number of trainings of "select"."""

    count: int  # of candidates
    total: float
    delta: float
    rate: float
    steps: int
    score_on: ScoreOn
    mean: float
    shape: float

    def sigma(self, rate: float, steps: int, besides: tuple[Release, ...] = ()) -> float:
        """Return the noise multiplier at which these releases, with those besides, cost the total."""
        return accounting.calibrate_noise_multiplier(
            target_epsilon=self.total, delta=self.delta, sample_rate=rate, steps=steps, besides=besides
        )

    def trainings(self, sigma: float, runs: int = 1) -> Release:
        return Release(sigma, self.rate, count=runs * self.steps)


@cache
def _price(way: Way, asked: _Asked) -> Price:
    return {"none": _plain, "trials": _trials, "select": _select}[way](asked)


def _plain(asked: _Asked) -> Price:
    sigma = asked.sigma(asked.rate, asked.steps)
    releases = (asked.trainings(sigma),)
    return Price("none", asked.count, sigma, None, None, releases, accounting.epsilon(releases, delta=asked.delta))


def _trials(asked: _Asked) -> Price:
    count = asked.count
    # Squared inverse noise adds up over releases: this noise makes all trials together cost their share of the total.
    trial = _rounded_up(asked.sigma(asked.rate, asked.steps) * math.sqrt(count / _SHARE_OF_TRIALS))
    before: tuple[Release, ...] = (asked.trainings(trial, count),)
    score = None
    if asked.score_on == "training":
        score = _rounded_up(asked.sigma(1.0, 1) * math.sqrt(count / _SHARE_OF_SCORES))
        before += _scores(score, count)
    sigma = asked.sigma(asked.rate, asked.steps, before)
    releases: tuple[Released, ...] = (*before, asked.trainings(sigma))
    if asked.score_on == "held-out":  # scores are all that these people pay for
        score = asked.sigma(1.0, count)
        releases = (Split((releases, _scores(score, count))),)
    return Price("trials", count, sigma, trial, score, releases, accounting.epsilon(releases, delta=asked.delta))


def _select(asked: _Asked) -> Price:
    # The noise of a score is a fixed multiple of that of a training, so that one number is left to calibrate.
    ratio = asked.sigma(1.0, 1) / asked.sigma(asked.rate, asked.steps) / math.sqrt(_SHARE_OF_SCORES)
    calibrate = partial(accounting.calibrate, target_epsilon=asked.total, delta=asked.delta)
    is_joint = asked.score_on == "training"

    def trained(noise: float) -> tuple[Selection, ...]:
        scores = _scores(noise * ratio if is_joint else None, 1)
        return (Selection((asked.trainings(noise), *scores), asked.mean, asked.shape),)

    def scored(noise: float) -> tuple[Selection, ...]:
        return (Selection(_scores(noise, 1), asked.mean, asked.shape),)

    sigma = calibrate(trained)
    score, releases = sigma * ratio if is_joint else None, trained(sigma)
    if asked.score_on == "held-out":
        score = calibrate(scored)
        releases = (Split((releases, scored(score))),)
    cost = accounting.epsilon(releases, delta=asked.delta)
    return Price("select", asked.count, sigma, None, score, releases, cost)


def _scores(noise: float | None, count: int) -> tuple[Release, ...]:
    return () if noise is None else (Release(noise, 1.0, count=count),)


def _rounded_up(noise: float) -> float:
    scale = 10 ** (math.floor(math.log10(noise)) - 2)
    return float(f"{math.ceil(noise / scale) * scale:.6g}")


def require_total(spec: Spec) -> None:
    """Raise PrivacyError if a spec without privacy.total_epsilon has the options of a private comparison."""
    if spec.privacy.total_epsilon is not None:
        return
    for name, value in (("tuning.way", spec.tuning and spec.tuning.way), ("privacy.budget", spec.privacy.budget)):
        if value is not None:
            other = "noise_multiplier" if spec.privacy.noise_multiplier is not None else "target_epsilon"
            remedy = f"give total_epsilon in place of {other} and run `privgrad compare`, or leave {name} out"
            raise wrong("privacy.total_epsilon", f"to be given for {name}", None, remedy)
    if spec.tuning is not None and not spec.tuning.seeds:
        remedy = "add it to [tuning] (or, for private tuning, total_epsilon and a way), such as seeds = [0, 1]"
        raise wrong("tuning.seeds", "to be given", None, remedy)
    if spec.tuning_scale > 1 and spec.privacy.simulate > 1:
        raise wrong("tuning.simulate", "to be absent with privacy.simulate", spec.tuning_scale)


def require_payable(spec: Spec) -> None:
    """Raise PrivacyError unless a spec with privacy.total_epsilon describes a comparison that this total can cover."""
    if spec.privacy.total_epsilon is None:
        return
    for place, (value, reason) in _unpaid(spec).items():
        if value is not None:
            condition = f"to be {'false' if value is True else 'absent'} with total_epsilon"
            raise wrong(place, condition, value, f"leave it out: {reason}")
    tuning, candidates = spec.tuning, candidates_of(spec)
    if tuning is not None and tuning.way is None:
        remedy = 'add way = "trials", or way = "select"; docs/private-tuning.md compares them'
        raise wrong("tuning.way", "to be given with total_epsilon", None, remedy)
    if tuning is not None and not is_paid(tuning.by):
        # A noisy mean of one value in [0, 1] per person can be paid for.
        condition = 'to be "accuracy", "recall@k", "absolute_error" or "squared_error" with total_epsilon'
        raise wrong("tuning.by", condition, tuning.by, "" if "loss" in tuning.by else "list it in run.metrics")
    if tuning is None and len(candidates) > 1:
        remedy = 'add [tuning] with way = "trials" or "select"'
        raise wrong("[tuning]", "to be given for several candidates", f"{len(candidates)} candidates", remedy)
    for method, candidate in candidates if way_of(spec) == "trials" else ():
        if candidate.noise_step is None:  # a learning rate fits one noise only, and that of trials is another one
            place, got = f"methods.{method.name}.optimizer.noise_step", f"lr = {candidate.lr:g}"
            raise wrong(place, "to be given for trials", got, 'or choose way = "select"')


def _unpaid(spec: Spec) -> dict[str, tuple[Any, str]]:
    """Return by place what no private comparison may have: its value, None if it is absent, and the reason."""
    privacy, run, tuning = spec.privacy, spec.run, spec.tuning
    total, uncovered = "total_epsilon covers tuning and training together", "RDP, which this adds up, has no bound"
    seeds = "a seed makes the noise predictable. For research, give target_epsilon and seeds"
    found: dict[str, tuple[Any, str]] = {
        "privacy.sampling": (None if privacy.sampling == "poisson" else privacy.sampling, uncovered),
        "privacy.simulate": (privacy.simulate if privacy.simulate > 1 else None, uncovered),
        "privacy.target_epsilon": (privacy.target_epsilon, total),
        "privacy.noise_multiplier": (privacy.noise_multiplier, total),
        "run.seeds": (run.seeds if "seeds" in run.model_fields_set else None, seeds),
        "run.diagnose": (run.diagnose or None, "diagnostics are computed before the noise"),
    }
    if tuning is not None:
        found |= {
            "tuning.seeds": (tuning.seeds if "seeds" in tuning.model_fields_set else None, seeds),
            "tuning.extend": (tuning.extend or None, "the number of trainings must be known before the first one"),
            "tuning.simulate": (tuning.simulate if tuning.simulate > 1 else None, uncovered),
        }
    for method in spec.methods:
        place, infinite = f"methods.{method.name}", "it has no finite epsilon"
        uses = {part: table.use for part, table in method.calls.items() if table.use.startswith(("RawSAM", "raw_"))}
        found |= {
            f"{place}.non_private": (method.non_private or None, infinite),
            f"{place}.perturb": (uses.get("perturb"), infinite),
            f"{place}.precondition": (uses.get("precondition"), infinite),
            f"{place}.bands": (method.bands, "or give target_epsilon of each training"),
        }
    return found
