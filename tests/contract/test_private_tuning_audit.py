"""Audits of whole private comparisons: tuning, selection and scores stay below the claim, and planted faults do not.

The data hold nine people whose examples have no features, and perhaps one more: the target, with a feature of its own.
One step at sampling rate 1 makes the weights of that feature a Gaussian whose mean shows the target. An attacker sees
everything that is published: the weights of all published trainings, and the noisy scores. The likelihood ratio is its
best statistic, and the error rates bound the mu of a Gaussian mechanism from below (`audit.bounds`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.audit.bounds import clopper_pearson, epsilon_of_gaussian, epsilon_of_rates, mu_of_rates
from privgrad.data import DataSet
from privgrad.experiments import paid_runner, prices, runner
from privgrad.experiments.load_spec import check_spec
from privgrad.experiments.prices import Price, price
from privgrad.experiments.spec import Spec
from privgrad.mechanisms import Split

PEOPLE, STEP, DELTA, TOTAL = 9, 0.1, 0.05, 4.0
CONFIDENCE = 0.95


def spec_of(way: str, score_on: str = "training", total: float = TOTAL) -> Spec:
    raw: dict[str, Any] = {
        "title": "audit",
        "data": {"name": "digits"},  # replaced
        "model": {"name": "linear"},
        "privacy": {
            "total_epsilon": total,
            "delta": DELTA,
            "max_grad_norm": 0.5,
            "num_examples": PEOPLE,
            "expected_batch_size": PEOPLE,
            "steps": 1,
        },
        "methods": [{"name": "DP-SGD", "optimizer": "SGD"}],
        "tuning": {"way": way, "noise_steps": [STEP, 2 * STEP], "score_on": score_on, "mean_runs": 4.0},
    }
    return check_spec(raw, "spec.toml")


def data_of(*, present: bool, held_out: bool = False) -> DataSet:
    """Return the data with or without the target, which is trained on or held out."""
    inputs = torch.zeros(PEOPLE + 1, 2)
    inputs[-1, 0] = 1.0
    labels = torch.zeros(PEOPLE + 1, dtype=torch.int64)
    labels[-1] = 1
    others, everyone = (TensorDataset(inputs[:n], labels[:n]) for n in (PEOPLE, PEOPLE + 1))
    with_target = everyone if present else others
    train, validation = (others, with_target) if held_out else (with_target, TensorDataset(inputs[:0], labels[:0]))
    return DataSet("audit", train, validation, others, 2, (2,), split="unit")


def moved(weights: Tensor, step: float) -> float:
    """Return how far the target's feature has moved, in standard deviations of the noise."""
    return float(weights[1, 0] - weights[0, 0]) / math.sqrt(2) / step


def weights_in(folder: Path) -> Tensor:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    return next(value for value in saved["model"].values() if value.ndim == 2)


def evidence(cost: Price, out: Path, *, exact: bool = False) -> float:
    """Return the log likelihood ratio of everything that a comparison publishes, up to a constant.

    With `exact`, the attacker knows that scores have no noise.
    """
    total = 0.0
    for record in paid_runner.read_records(out):
        is_trial = record["phase"] == "tuning"
        sigma = cost.trial_noise if is_trial else cost.noise_multiplier
        assert sigma is not None
        total += moved(weights_in(out / "runs" / record["folder"]), record["noise_step"]) / sigma
        if record.get("validation_accuracy") is not None and cost.score_noise is not None:
            # Of people who are held out, the sum is divided by 1: a spec of built-in data gives no share to expect.
            divisor = 1 if isinstance(cost.releases[0], Split) else PEOPLE
            total += (record["validation_accuracy"] * divisor - PEOPLE) / (1e-3 if exact else cost.score_noise**2)
    return total


def bound_of(way: str, without: list[float], with_target: list[float]) -> float:
    """Return a lower bound on epsilon, by the best of three thresholds.

    Trials, scores and training are Gaussian mechanisms together, which gives a tighter bound than error rates alone.
    The best of a random number of runs is none.
    """
    absent, present = np.array(without), np.array(with_target)
    thresholds = np.quantile(np.concatenate([absent, present]), [0.4, 0.5, 0.6])
    confidence = 1 - (1 - CONFIDENCE) / len(thresholds) / 2
    wrong = clopper_pearson(np.array([(absent > t).sum() for t in thresholds]), len(absent), confidence)
    missed = clopper_pearson(np.array([(present <= t).sum() for t in thresholds]), len(present), confidence)
    if way == "select":
        return float(np.max(epsilon_of_rates(wrong, missed, DELTA)))
    mu = float(np.max(mu_of_rates(wrong, missed)))
    return epsilon_of_gaussian(mu, DELTA) if mu > 0 else 0.0


def audited(
    spec: Spec,
    runs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    held_out: bool = False,
    exact: bool = False,
    prepared: Callable[[DataSet], DataSet] = lambda data: data,
) -> tuple[float, float]:
    """Return the claimed epsilon, and the bound from `runs` comparisons with the target and as many without."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for present in found:
        data = prepared(data_of(present=present, held_out=held_out))
        monkeypatch.setattr(runner, "make_data", lambda _, data=data: data)
        for number in range(runs):
            out = tmp_path / f"{present}-{number}"
            paid_runner.compare(spec, out, progress=False)
            found[present].append(evidence(price(spec), out, exact=exact))
    return price(spec).epsilon, bound_of(price(spec).way, found[False], found[True])


@pytest.fixture(autouse=True)
def _heavy_trials(monkeypatch: pytest.MonkeyPatch):
    """Give trials and scores two fifths of the total each, so that a fault in them shows in few runs."""
    monkeypatch.setattr(prices, "_SHARE_OF_TRIALS", 0.4)
    monkeypatch.setattr(prices, "_SHARE_OF_SCORES", 0.4)
    prices._price.cache_clear()
    yield
    prices._price.cache_clear()


def _tuned(spec: Spec, **changes: Any) -> Spec:
    assert spec.tuning is not None
    return spec.model_copy(update={"tuning": spec.tuning.model_copy(update=changes)})


def test_scores_without_noise_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def exact(rows: Tensor, *, num_examples: int, **_: Any) -> Tensor:
        return rows.sum(0) / num_examples

    monkeypatch.setattr(paid_runner, "release_mean", exact)
    claimed, found = audited(spec_of("trials", total=1.0), 60, tmp_path, monkeypatch, exact=True)
    print(f"scores without noise: claimed {claimed:.3f}, found {found:.3f}")  # noqa: T201
    assert found > claimed


@pytest.mark.slow
@pytest.mark.parametrize("way", ["trials", "select"])
@pytest.mark.parametrize("score_on", ["training", "held-out"])
def test_five_hundred_comparisons_stay_below_their_claim(
    way: str, score_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = spec_of(way, score_on, 1.5 if way == "select" else TOTAL)
    claimed, found = audited(spec, 250, tmp_path, monkeypatch, held_out=score_on == "held-out")
    print(f"{way}, scored on {score_on}: claimed {claimed:.3f}, found {found:.3f}")  # noqa: T201
    assert found <= claimed


@pytest.mark.slow
def test_forgotten_trials_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The price counts one candidate, and eight are trained."""
    spec, every = _tuned(spec_of("trials"), noise_steps=[STEP * (1 + k / 100) for k in range(8)]), prices.candidates_of
    monkeypatch.setattr(prices, "candidates_of", lambda spec: every(spec)[:1])
    claimed, found = audited(spec, 60, tmp_path, monkeypatch)
    print(f"forgotten trials: claimed {claimed:.3f}, found {found:.3f}")  # noqa: T201
    assert found > claimed


@pytest.mark.slow
def test_held_out_people_who_are_trained_on_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def leaked(data: DataSet) -> DataSet:
        return replace(data, train=data.validation)

    spec = spec_of("trials", "held-out")
    claimed, found = audited(spec, 500, tmp_path, monkeypatch, held_out=True, prepared=leaked)
    print(f"held-out people trained on: claimed {claimed:.3f}, found {found:.3f}")  # noqa: T201
    assert found > claimed
