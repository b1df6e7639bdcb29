"""Audits: their bounds against exact probabilities, honest methods pass, and faults that are planted are caught.

Noise is the system's. What could fail by chance does so with a probability below one in a million.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from test_cli import ONE, Here, here, last_json
from torch import Tensor
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_model, make_plan, seed_of
from mutants.mutant import plant_sum
from privgrad import audit, optim, private_gradient
from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Release
from privgrad.audit.bounds import mu_of_rates, one_run_p_value
from privgrad.errors import PrivacyError
from privgrad.rng import Stream
from privgrad.types import ClippedSum

__all__ = ["here"]

CERTAIN = 1 - 1e-7


@pytest.mark.parametrize("confidence", [0.9, 0.999])
@pytest.mark.parametrize("truth", [0.003, 0.1, 0.5, 0.97])
def test_clopper_pearson_holds_as_often_as_it_says(truth: float, confidence: float):
    """By the exact distribution of 200 trials; the usual normal approximation must fail somewhere."""
    errors = np.arange(201)
    weights = stats.binom.pmf(errors, 200, truth)
    bounds = audit.clopper_pearson(errors, 200, confidence)
    assert weights[bounds >= truth].sum() >= confidence
    assert bounds[200] == 1.0
    assert audit.clopper_pearson(0, 200, 0.95) == pytest.approx(1 - 0.05 ** (1 / 200))
    if truth == 0.003:
        share = errors / 200
        normal = share + stats.norm.ppf(confidence) * np.sqrt(share * (1 - share) / 200)
        assert weights[normal >= truth].sum() < confidence


def test_any_mechanism_is_bounded_by_its_exact_rates():
    """Randomized response reaches its epsilon; with a revealed share delta it reaches the same at that delta."""
    wrong = 1 / (1 + math.e**2)
    assert audit.epsilon_of_rates(wrong, wrong, 1e-300) == pytest.approx(2.0)
    delta = 0.01
    assert audit.epsilon_of_rates((1 - delta) * wrong, (1 - delta) * wrong, delta) == pytest.approx(2.0)
    assert audit.epsilon_of_rates(0.5, 0.5, 1e-5) == 0.0
    assert audit.epsilon_of_rates(0.001, 0.9, 1e-5) == audit.epsilon_of_rates(0.9, 0.001, 1e-5) > 4


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_gaussian_epsilon_is_the_accountants_and_follows_from_its_rates(sigma: float):
    exact = audit.epsilon_of_gaussian(1 / sigma, 1e-5)
    claimed = accounting.epsilon([Release(sigma, 1.0)], delta=1e-5)
    assert exact <= claimed <= exact + 2e-3
    for threshold in (-1.0, 0.3, 2.0):
        rates = stats.norm.sf(threshold), stats.norm.cdf(threshold - 1 / sigma)
        assert mu_of_rates(*rates) == pytest.approx(1 / sigma)
        assert audit.epsilon_of_rates(*rates, 1e-5) <= exact
    assert audit.epsilon_of_gaussian(0.0, 1e-5) == audit.epsilon_of_gaussian(1e-6, 1e-5) == 0.0


def test_the_accountants_curve_excludes_what_needs_less_noise(monkeypatch: pytest.MonkeyPatch):
    """Of one step of rate 1 it must agree with the formula, but for its grids; what the noise allows, it leaves."""

    def exact(releases: list[Release], delta: float) -> float:
        return audit.epsilon_of_gaussian(1 / releases[0].noise_multiplier, delta)

    def success(releases: list[Release], *, false_positive_rate: float) -> float:
        return float(stats.norm.cdf(1 / releases[0].noise_multiplier + stats.norm.ppf(false_positive_rate)))

    monkeypatch.setattr(accounting, "epsilon", exact)
    monkeypatch.setattr(accounting, "attack_success", success)
    claimed, delta = Release(1.0, 1.0), 1e-5
    for mu in (0.5, 0.98, 1.1, 1.3):
        for shift in (0.0, 1.0):
            rates = float(stats.norm.sf(mu / 2 + shift)), float(stats.norm.cdf(shift - mu / 2))
            found = audit.epsilon_of_accountant(*rates, claimed, delta)
            assert audit.epsilon_of_gaussian(mu / 2 ** (3 / 8), delta) <= found <= audit.epsilon_of_gaussian(mu, delta)
            assert (found > exact([claimed], delta)) <= (mu > 1)
    assert audit.epsilon_of_accountant(0.01, 0.01, claimed, delta) > exact([claimed], delta)
    assert audit.epsilon_of_accountant(0.5, 0.5, claimed, delta) == 0.0


def test_one_run_p_value_is_the_papers_sum():
    """Against sums written out: term by term, without cumulated arrays."""
    for canaries, guesses, correct, epsilon, delta in (
        (10, 6, 5, 1.0, 0.01),
        (4, 4, 4, 0.0, 0.001),
        (50, 20, 17, 2.0, 0.0),
    ):
        truth = math.exp(epsilon) / (1 + math.exp(epsilon))
        mass = [math.comb(guesses, k) * truth**k * (1 - truth) ** (guesses - k) for k in range(guesses + 1)]
        worst = max(2 / i * sum(mass[max(0, correct - i) : correct]) for i in range(1, canaries + 1))
        expected = sum(mass[correct:]) + canaries * delta * worst
        assert one_run_p_value(canaries, guesses, correct, epsilon, delta) == pytest.approx(min(1.0, expected))


def correct_guesses(kind: str, canaries: int, epsilon: float, delta: float) -> np.ndarray:
    """Distribution of correct guesses of two (epsilon, delta) mechanisms that tell as much as they may."""
    truth, counts = 1 / (1 + math.exp(-epsilon)), np.arange(canaries + 1)
    if kind == "each bit is revealed now and then":
        return stats.binom.pmf(counts, canaries, delta + (1 - delta) * truth)
    together = (1 - delta) * stats.binom.pmf(counts, canaries, truth)
    together[canaries] += delta
    return together


@pytest.mark.parametrize("kind", ["each bit is revealed now and then", "all bits are revealed now and then"])
def test_one_run_bounds_hold_as_often_as_they_say(kind: str):
    """By exact distributions: a p-value at most alpha has a probability at most alpha; without delta's part, more."""
    canaries, epsilon, delta = 60, 1.0, 0.01
    mass = correct_guesses(kind, canaries, epsilon, delta)

    def excess(assumed: float) -> float:
        p = np.array([one_run_p_value(canaries, canaries, v, epsilon, assumed) for v in range(canaries + 1)])
        return max(float(mass[p <= alpha].sum()) / alpha for alpha in (1e-4, 1e-3, 0.005, 0.02, 0.05, 0.1))

    assert excess(delta) <= 1 + 1e-9
    assert excess(0.0) > 1
    wrong = sum(
        mass[v] for v in range(canaries + 1) if audit.epsilon_of_one_run(canaries, canaries, v, delta, 0.9) > epsilon
    )
    assert wrong <= 0.1
    assert audit.epsilon_of_one_run(canaries, canaries, canaries, 1e-6, 0.95) > 2.5


def guessed(rng: np.random.Generator, sigma: float, canaries: int, guesses: int) -> int:
    """Correct guesses of the best attack on canaries that are in by their own coins, each with its own noise."""
    coins = rng.integers(2, size=canaries)
    order = np.argsort(coins + sigma * rng.standard_normal(canaries))
    return int((coins[order[: guesses // 2]] == 0).sum() + (coins[order[-guesses // 2 :]] == 1).sum())


@pytest.mark.parametrize("guesses", [20, 160, 1000])
def test_the_bound_of_one_gaussian_run_is_true_as_often_as_it_says(guesses: int):
    mu, delta = 1.5, 1e-5
    claim, rng = audit.epsilon_of_gaussian(mu, delta), np.random.default_rng(seed_of(5))
    counts = Counter(guessed(rng, 1 / mu, 1000, guesses) for _ in range(400))
    found = {one: audit.epsilon_of_one_gaussian_run(1000, guesses, one, delta, 0.9) for one in counts}
    assert sum(count for one, count in counts.items() if found[one] > claim) <= 0.1 * 400 + 5 * math.sqrt(0.09 * 400)


def test_the_bound_of_one_gaussian_run_is_tighter_than_one_without_assumptions():
    delta, rng = 1e-5, np.random.default_rng(seed_of(6))
    sigma = next(s for s in np.arange(0.3, 3, 0.001) if audit.epsilon_of_gaussian(1 / s, delta) <= 8)
    runs = [guessed(rng, sigma, 1000, 160) for _ in range(5)]
    tight, loose = (
        np.mean([bound(1000, 160, one, delta, 0.95) for one in runs])
        for bound in (audit.epsilon_of_one_gaussian_run, audit.epsilon_of_one_run)
    )
    assert 1.3 * loose < tight < 8
    assert audit.epsilon_of_one_gaussian_run(1000, 160, 80, delta, 0.95) == 0


def users_game(noise: float) -> audit.Game:
    """No PrivateGradient and no example: the mean over users of all that each has, each user's part bounded by 1."""
    generator = np.random.default_rng()

    def release(users: list[Tensor]) -> Tensor:
        parts = (user.sum(0) for user in users)
        total = sum((part / part.norm().clamp(min=1.0) for part in parts), torch.zeros(3))
        return total + noise * torch.from_numpy(generator.normal(size=3)).float()

    def data(included: Tensor) -> list[Tensor]:
        canary = 50 * torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
        return [torch.randn(4, 3, generator=torch.Generator().manual_seed(1))] + [canary] * int(included[0])

    noiseless = users_release_without_noise(data)
    return audit.Game("users", release, data, noiseless, accounting.epsilon([Release(1.0, 1.0)], delta=1e-5), 1e-5)


def users_release_without_noise(data: Callable[[Tensor], list[Tensor]]) -> Tensor:
    def noiseless(users: list[Tensor]) -> Tensor:
        parts = (user.sum(0) for user in users)
        return sum((part / part.norm().clamp(min=1.0) for part in parts), torch.zeros(3))

    return audit.directions(noiseless, data, 1)


def test_any_function_of_a_data_set_can_be_audited():
    """Users in place of examples: an honest sum passes, half of its noise fails even the bound that assumes nothing."""
    honest = replace(users_game(1.0), steps=Release(1.0, 1.0))
    found = audit.distinguish(honest, trials=8_000, confidence=CERTAIN)
    assert found.passed
    assert found.bound == found.bounds["gaussian"] > found.claim / 2
    assert found.trials == sum(found.counts["any"][1::2]) == 8_000 - 8_000 // 6
    assert not audit.distinguish(users_game(0.1), trials=4_000, confidence=CERTAIN).passed
    assert audit.distinguish(users_game(1.0), trials=4_000, confidence=CERTAIN).bounds.keys() == {"any"}
    with pytest.raises(PrivacyError, match="the move of canary 0 to have a positive"):
        audit.directions(lambda users: torch.zeros(3), honest.data, 1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_releases_that_are_not_finite_are_no_pass(value: float):
    """Written where a canary is, they tell everything; written anywhere, they hide all other scores."""
    canaries = 16

    def release(included: Tensor) -> Tensor:
        return torch.where(included, value, torch.zeros(canaries, dtype=torch.float64))

    game = audit.Game("shouting", release, lambda included: included, torch.eye(canaries), 1.0, 1e-5)
    for attack in (lambda: audit.distinguish(game, trials=20 * canaries), lambda: audit.one_run(game)):
        with pytest.raises(PrivacyError, match="to be finite"):
            attack()


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What calibration finds for epsilon 8, looked up: to find it takes seconds. Claims are computed all the same."""
    found = {(8.0, 1e-5, 1.0, 1): 0.6004775724359744, (8.0, 1e-5, 0.5, 4): 0.8850187024263719}
    monkeypatch.setattr(accounting, "calibrate_noise_multiplier", lambda **numbers: found[tuple(numbers.values())])


def runs(game: audit.Game, count: int, confidence: float = CERTAIN) -> audit.Audit:
    return audit.distinguish(game, trials=count * len(game.directions), confidence=confidence)


# Methods whose parts others have too, and optimizers, which see released gradients only. `make audits` has all.
LONG = {
    *(
        "vmap",
        "truncated batches",
        "microbatches of 50",
        "BAM sam",
        "BAM exact",
        "BAM sam, vmap",
        "BAM exact, vmap",
        "fixed scales",
        "public_adam",
        "public_adagrad",
        "public_rmsprop",
        "PerLayer",
    ),
    *(set(optim.OPTIMIZERS) - {"Muon"}),
}


@pytest.mark.usefixtures("known_noise")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in audit.METHODS]
)
def test_one_step_of_every_method_stays_within_its_claim_and_comes_near(name: str):
    game = audit.method_game(name, "step", epsilon=8.0, canaries=64)
    runs_of, near = (60, 0.5) if len(game.directions) > 1 else (1000, 0.25)
    found = runs(game, runs_of, 0.9999)
    assert found.passed, found
    if game.steps is not None:  # a mechanism of a known form
        assert found.bounds["gaussian"] > near * found.claim, found


def test_every_optimizer_and_way_of_the_library_is_audited():
    optimizers = {method.optimizer for method in audit.METHODS.values()}
    assert optimizers == set(pg.optim.OPTIMIZERS)
    found = [method.private_grad(_model()) for method in audit.METHODS.values()]
    kinds = {type(value).__name__ for arguments in found for value in arguments.values()}
    assert {"BAM", "SAT", "PerLayer", "Automatic", "Fixed", "Moments"} <= kinds
    assert any(method.group_size > 1 for method in audit.METHODS.values())


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False))


def opposed(included: Tensor) -> TensorDataset:
    """One example that pulls far beyond C, and a canary that outdoes it: between them the sum turns around."""
    return TensorDataset(torch.ones(1 + int(included), 1), torch.tensor([1e4, -1e8])[: 1 + int(included)])


def less_noise(monkeypatch: pytest.MonkeyPatch, share: float = 0.5) -> None:
    honest = private_gradient.add_noise

    def less(clipped: ClippedSum, **options: Any) -> Any:
        return honest(clipped, **options | {"noise_multiplier": share * options["noise_multiplier"]})

    monkeypatch.setattr(private_gradient, "add_noise", less)


def clipped_after_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(honest: Any, chunks: Any, *, max_grad_norm: float, **options: Any) -> Any:
        whole, raw = honest(chunks, max_grad_norm=1e6, **options)
        norm = math.sqrt(sum(float(value.square().sum()) for value in whole.values.values()))
        share = min(1.0, max_grad_norm / norm) if norm else 1.0
        return ClippedSum({name: share * value for name, value in whole.values.items()}, max_grad_norm), raw

    plant_sum(monkeypatch, late)


def one_noise_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = pg.PrivateGradient._make_streams

    def twins(self: pg.PrivateGradient) -> None:
        honest(self)
        self._noise_stream = Stream(bytes(32))

    monkeypatch.setattr(pg.PrivateGradient, "_make_streams", twins)


def sensitivity_of_groups_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(honest: Any, chunks: Any, *, max_grad_norm: float, **options: Any) -> Any:
        whole, raw = honest(chunks, max_grad_norm=max_grad_norm, **options)
        return ClippedSum(whole.values, max_grad_norm), raw

    plant_sum(monkeypatch, forgetful)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str, int, int]] = {
    "half the noise": (less_noise, "factored", 64, 60),
    "half the noise, Adam": (less_noise, "Adam", 64, 60),
    "half the noise, BAM by vmap": (less_noise, "BAM sam, vmap", 64, 60),
    "clipped after the sum": (clipped_after_the_sum, "factored", 1, 800),
    "one noise for all": (one_noise_for_all, "factored", 64, 60),
    "one noise for all, one canary": (one_noise_for_all, "factored", 1, 250),
    "sensitivity of groups forgotten": (sensitivity_of_groups_forgotten, "groups of 2", 1, 800),
}


@pytest.mark.usefixtures("known_noise")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if "," in n else []) for n in FAULTS])
def test_planted_faults_fail_the_audit(monkeypatch: pytest.MonkeyPatch, name: str):
    plant, method, canaries, count = FAULTS[name]
    game = audit.method_game(method, "step", epsilon=8.0, canaries=canaries)
    if plant is clipped_after_the_sum:
        game = replace(game, data=opposed)
    plant(monkeypatch)
    found = runs(game, count, 0.999)
    assert not found.passed, found


@pytest.mark.usefixtures("known_noise")
def test_one_run_of_a_whole_training_is_audited(monkeypatch: pytest.MonkeyPatch):
    game = audit.method_game("factored", "training", epsilon=8.0, canaries=400)
    found = audit.one_run(game, confidence=0.99)
    assert found.passed
    assert found.bound > 0.1
    assert found.counts["one run"][:2] == [400, 80]
    less_noise(monkeypatch, share=0.05)
    assert not audit.one_run(replace(game, claim=1.0), confidence=0.99).passed


@pytest.mark.usefixtures("known_noise")
def test_a_whole_training_is_attacked_many_times():
    """Without what the accountant's curve adds, which takes seconds: the bound that assumes nothing."""
    game = replace(audit.method_game("public_adam", "training", epsilon=8.0, canaries=64), steps=None)
    found = runs(game, 60)
    assert found.passed
    assert found.bound > 0.3


@pytest.mark.slow
def test_trainings_stay_within_their_claim_by_the_accountants_curve(monkeypatch: pytest.MonkeyPatch):
    game = audit.method_game("factored", "training", epsilon=3.0)
    found = runs(game, 100)
    assert found.passed
    assert found.bounds["accountant"] > found.bounds["any"] > 0
    less_noise(monkeypatch)
    assert not runs(game, 100).passed


def test_bad_questions_are_refused():
    game = users_game(1.0)
    for call, match in (
        (lambda: audit.distinguish(game, confidence=1.0), "confidence"),
        (lambda: audit.distinguish(game, trials=79), "trials"),
        (lambda: audit.one_run(game, guessed=0.0), "guessed"),
        (lambda: audit.method_game("SDG", "step", epsilon=1.0), "method to be 'factored'"),
        (lambda: audit.rows(["SDG"]), "method to be 'factored'"),
        (lambda: audit.rows(confidence=95), "confidence"),
        (lambda: one_run_p_value(10, 5, 6, 1.0, 0.0), "correct"),
        (lambda: audit.epsilon_of_one_run(10, 5, 4, 1.5, 0.9), "delta"),
        (lambda: audit.one_step(pg.PrivateGradient(make_model(), loss_fn, make_plan(seed=1))), "seed"),
    ):
        with pytest.raises(PrivacyError, match=match):
            call()


def audits(*bounds: float) -> tuple[int, Iterator[audit.Audit]]:
    rows = [
        audit.Audit("made up", 1.0, 1e-5, {"any": bound}, 0.99, 100, {"any": [1, 50, 2, 50]}, 0.1) for bound in bounds
    ]
    return len(rows), iter(rows)


def test_the_command_fails_where_a_bound_passes_its_claim(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "rows", lambda *_, **__: audits(0.2, 0.9))
    told = last_json(here("audit", "--json", "--out", "out"))
    assert (told["passed"], [row["bound"] for row in told["audits"]]) == (True, [0.2, 0.9])
    lines = [json.loads(line) for line in (tmp_path / "out/audits.jsonl").read_text().splitlines()]
    assert [line["counts"]["any"] for line in lines] == [[1, 50, 2, 50]] * 2
    assert lines[0]["command"].startswith("privgrad audit")
    assert "| made up | 1.000 | 0.90 |" in (tmp_path / "out/audits.md").read_text()
    monkeypatch.setattr(audit, "rows", lambda *_, **__: audits(0.2, 1.1))
    assert "NO" in here("audit", "--out", "out", code=1).stdout
    assert len((tmp_path / "out/audits.jsonl").read_text().splitlines()) == 2


def test_a_specification_is_audited_with_a_canary_among_its_data(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "one.toml").write_text(ONE.replace("target_epsilon = 1.0", "noise_multiplier = 0.6"))
    told = last_json(here("audit", "one.toml", "--trials", 400, "--confidence", 0.9999, "--json"))
    (row,) = told["audits"]
    assert row["name"] == "DP-AdamBC, step"
    assert 8 < row["claim"] < 8.1
    assert row["bound"] > 0.1  # a canary that moves nothing would leave 0
    less_noise(monkeypatch, share=0.05)
    assert "NO" in here("audit", "one.toml", "--trials", 200, code=1).stdout


def test_a_specification_is_audited_with_scales_that_follow_its_noise(here: Here, tmp_path: Path):
    """Without the noise, these scales would not be those of the audited step."""
    scaled = 'lr = 0.01 }\nprecondition = "public_rmsprop"\npublic = { batch_size = 8 }\n'
    text = ONE.replace("target_epsilon = 1.0", "noise_multiplier = 0.6").replace("lr = 0.01 }\n", scaled)
    text = text.replace("num_examples = 1197", "num_examples = 1160")
    (tmp_path / "one.toml").write_text(text.replace("validation = 240", "validation = 240\npublic = 37"))
    (row,) = last_json(here("audit", "one.toml", "--trials", 400, "--confidence", 0.9999, "--json"))["audits"]
    assert row["bound"] > 0.1
    assert row["passed"]


def test_specifications_that_cannot_be_audited_are_refused(here: Here, tmp_path: Path):
    (tmp_path / "one.toml").write_text(ONE)
    assert "method to be 'DP-AdamBC'" in here("audit", "one.toml", "--method", "DP-SGD", code=2).stderr
    (tmp_path / "none.toml").write_text(ONE.replace("lr = 0.01 }\n", "lr = 0.01 }\nnon_private = true\n"))
    assert "to include a private one" in here("audit", "none.toml", code=2).stderr
    (tmp_path / "same.toml").write_text(ONE.replace("validation = 240", "validation = 240\nreconstruct = true"))
    assert "one class each" in here("audit", "same.toml", code=2).stderr
    (tmp_path / "simulation.toml").write_text(ONE.replace("steps = 6", "steps = 6\nsimulate = 2"))
    assert "privacy.simulate to be 1, got 2; leave it out" in here("audit", "simulation.toml", code=2).stderr
