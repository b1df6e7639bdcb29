"""Audits of a training by one run with canaries: near the claim, below it, above it where a fault is planted.

Noise is the system's. What could fail by chance does so with a probability below one in a million.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_audit import less_noise
from test_cli import ONE, Here, here, last_json
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from mutants.mutant import plant_sum
from privgrad import audit, data, private_gradient
from privgrad.accounting import Release
from privgrad.errors import PrivacyError
from privgrad.sampling import draws
from privgrad.statement import statement
from privgrad.types import ClippedSum

__all__ = ["here"]

DELTA = 1e-5
SIGMAS = {  # as calibrated
    (8.0, 1.0, 1): 0.6004775724359744,
    (3.0, 1.0, 1): 1.3912018100158097,
    (8.0, 0.5, 4): 0.8850187024263719,
    (3.0, 0.1, 10): 0.9763991911167476,
    (8.0, 240 / 1437, 200): 1.6286564989789543,
}
FULL, SAMPLED = (8.0, 1.0, 1), (8.0, 0.5, 4)  # epsilon, rate, steps


def plan_of(claim: tuple[float, float, int], count: int, **changed: Any) -> pg.PrivacyPlan:
    _, rate, steps = claim
    numbers: dict[str, Any] = {"sample_rate": rate, "steps": steps, "noise_multiplier": SIGMAS[claim], "delta": DELTA}
    return make_plan(**numbers | {"num_examples": count, "expected_batch_size": round(rate * count)} | changed)


def trained(private_grad: pg.PrivateGradient, rows: Any) -> None:
    pg.fit(private_grad, pg.optim.SGD(private_grad.model.named_parameters(), lr=0.1), rows, progress=False)


def small(claim: tuple[float, float, int] = FULL, added: Any = 32, parts: Any = None, **options: Any) -> audit.Audit:
    """An audit of a model with 39 weights."""
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan_of(claim, 32), **parts or {})
    return audit.canaries(private_grad, trained, make_data(), added, guessed=0.5, **options)


def digit_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0].flatten(1)), batch[1], reduction="none")


def on_digits(claim: tuple[float, float, int], added: Any = 1000, **options: Any) -> audit.Audit:
    pytest.importorskip("sklearn")
    rows = data.digits().train
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    private_grad = pg.PrivateGradient(model, digit_losses, plan_of(claim, len(rows), max_grad_norm=0.3))
    return audit.canaries(private_grad, trained, rows, added, **options)


def test_one_step_of_the_digits_comes_near_its_claim():
    """In 1,500 simulated runs, the bound had a mean of 4.75 and a deviation of 0.6."""
    found = [on_digits(FULL) for _ in range(5)]
    assert all(one.passed for one in found)
    assert found[0].claim == pytest.approx(8.0, abs=0.01)
    assert float(np.mean([one.bounds["gaussian"] for one in found])) > 3.4
    assert all(one.bounds["gaussian"] > 1.4 * one.bounds["one run"] for one in found)


def test_a_sampled_training_is_bounded_above_what_assumes_nothing():
    found = on_digits(SAMPLED)
    factor = found.bounds["accountant"] / found.bounds["one run"]
    assert found.passed
    assert 1.4 < factor < 2.5
    assert found.bounds["accountant"] > 1.5


def test_canary_examples_are_told_apart_though_their_gradients_overlap():
    generator = torch.Generator().manual_seed(0)
    own = TensorDataset(30 * torch.randn(300, 1, 8, 8, generator=generator), torch.arange(300) % 10)
    found = on_digits(FULL, own)
    assert found.passed
    assert found.counts["one run"][0] == 300
    assert found.bounds["gaussian"] > 0.5


PARTS: dict[str, Any] = {
    "vmap, microbatches": {"engine": "vmap", "microbatch_size": 5},
    "Automatic": {"clip": pg.clip.Automatic()},
    "PerLayer": {"clip": pg.clip.PerLayer({"0": 1.0, "2": 1.0})},
    "BAM": {"perturb": pg.perturb.BAM(0.05)},
    "SAT": {"perturb": pg.perturb.SAT(0.05)},
    "DiSK": {"perturb": pg.perturb.DiSK(0.5), "filter": pg.filters.EMA(0.5)},
    "norms": {"norm_bins": 8},
    "adaptive": {"adaptive_clip": pg.clip.TargetFraction()},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_training_is_audited_with_its_parts(name: str):
    """The noise is nearly nothing, so that guesses must be right: that is what a fault would look like."""
    quiet = plan_of(FULL, 32, steps=3, noise_multiplier=0.02)
    for added in (32, TensorDataset(3 * torch.eye(5).repeat(2, 1), torch.arange(10) % 3)):
        private_grad = pg.PrivateGradient(make_model(), loss_fn, quiet, **PARTS[name])
        found = audit.canaries(private_grad, trained, make_data(), added, guessed=0.4)
        _, guesses, correct = found.counts["one run"]
        assert correct == guesses


def test_nothing_is_found_where_nothing_is():
    def without(private_grad: pg.PrivateGradient, rows: Any) -> None:
        trained(private_grad, torch.utils.data.Subset(rows, range(32)))

    found = [
        audit.canaries(pg.PrivateGradient(make_model(), loss_fn, plan_of(FULL, 32)), without, make_data(), 32)
        for _ in range(4)
    ]
    assert all(one.bound < 3 for one in found)
    assert sum(one.bound > 0 for one in found) <= 3


def unclipped(patch: pytest.MonkeyPatch) -> None:
    def planted(honest: Any, chunks: Any, *, max_grad_norm: float, **options: Any) -> Any:
        whole, raw = honest(chunks, max_grad_norm=1e6, **options)
        return ClippedSum(whole.values, max_grad_norm), raw

    plant_sum(patch, planted)


def everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draws, "_poisson", lambda stream, step, rates, count, first: first + np.arange(count))


def the_same_noise(patch: pytest.MonkeyPatch) -> None:
    honest: Any = private_gradient.add_noise
    patch.setattr(private_gradient, "add_noise", lambda clipped, **options: honest(clipped, **options | {"step": 0}))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], tuple[float, float, int], int, float]] = {
    "half the noise": (less_noise, FULL, 4000, 0.4),
    "no clipping": (unclipped, (3.0, 1.0, 1), 1000, 0.15),
    "no sampling": (everybody, (3.0, 0.1, 10), 1000, 0.15),
    "one noise": (the_same_noise, (3.0, 0.1, 10), 1000, 0.15),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch):
    plant, claim, count, guessed = FAULTS[name]
    honest = on_digits(claim, count, guessed=guessed)
    assert honest.passed
    plant(monkeypatch)
    found = on_digits(claim, count, guessed=guessed)
    assert not found.passed


def test_a_bound_by_the_accountants_curve_is_the_gaussians_at_rate_1():
    for correct in (72, 76, 79):
        by_curve = audit.epsilon_of_one_training_run(500, 80, correct, Release(0.6, 1.0), DELTA, 0.95)
        exact = audit.epsilon_of_one_gaussian_run(500, 80, correct, DELTA, 0.95)
        assert 0.96 * exact < by_curve <= 1.002 * exact
    assert audit.epsilon_of_one_training_run(500, 80, 40, Release(0.6, 1.0), DELTA, 0.95) == 0.0


def correct_guesses(rng: np.random.Generator, claim: tuple[float, float, int], count: int, guesses: int) -> int:
    """What the best attack on one run guesses right, by the law of an honest training."""
    (_, rate, steps), sigma = claim, SIGMAS[claim]
    is_in = rng.random(count) < 0.5
    released = (rng.random((steps, count)) < rate) * is_in + sigma * rng.standard_normal((steps, count))
    score = np.log(1 - rate + rate * np.exp((released - 0.5) / sigma**2)).sum(0)
    surest = np.argsort(-np.abs(score))[:guesses]
    return int((is_in == (score > 0))[surest].sum())


@pytest.mark.parametrize("claim", [FULL, SAMPLED, (3.0, 0.1, 10)])
def test_hardly_any_of_100_honest_runs_raises_an_alarm(claim: tuple[float, float, int]):
    """The counts are those of the best attack; the real audits have no more of them."""
    rng, (epsilon, rate, steps) = np.random.default_rng(), claim
    sixth = sorted(correct_guesses(rng, claim, 1000, 150) for _ in range(100))[-6]  # bounds grow with the count
    release = Release(SIGMAS[claim], rate, count=steps)
    assert audit.epsilon_of_one_training_run(1000, 150, sixth, release, DELTA, 0.95) <= epsilon


def test_real_audits_raise_no_alarm():
    assert sum(not small().passed for _ in range(20)) <= 5


def test_the_model_of_an_audit_is_marked(tmp_path: Path):
    private_grad, used = pg.PrivateGradient(make_model(), loss_fn, plan_of(FULL, 32)), list[pg.PrivateGradient]()
    weights, copies = copy.deepcopy(private_grad.model.state_dict()), list[nn.Module]()

    def train(private_grad: pg.PrivateGradient, rows: Any) -> None:
        used.append(private_grad)
        trained(private_grad, rows)
        copies.append(copy.deepcopy(private_grad.model))

    audit.canaries(private_grad, train, make_data(), 30, ledger=tmp_path / "ledger.jsonl")
    assert private_grad.ledger.releases == 0
    for name, value in private_grad.model.state_dict().items():  # so a training may follow, and another audit
        assert torch.equal(value, weights[name])
    assert not pg.ledgers_of(private_grad.model)
    ledger = pg.Ledger(tmp_path / "ledger.jsonl", read_only=True)
    assert (ledger.plan_facts["canaries"], ledger.releases) == (30, 1)
    said = statement([ledger])
    assert "must not be released" in f"{said}"
    assert said.numbers["epsilon"] == pytest.approx(8.0, abs=0.01)
    assert "would satisfy" in f"{said}"
    for given in (ledger, pg.ledgers_of(copies[0])):
        with pytest.raises(PrivacyError, match="without canaries"):
            pg.save(copies[0], tmp_path / "model", ledger=given)
    with pytest.raises(PrivacyError):  # the ledger of an audit takes no other training
        pg.PrivateGradient(make_model(), loss_fn, plan_of(FULL, 32), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="ledger to be new"):
        audit.canaries(private_grad, train, make_data(), 30, ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="that was used"):
        audit.canaries(used[0], train, make_data(), 30)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], Any, dict[str, Any], str]] = {  # plan, parts, added, options
    "no delta": ({"delta": None}, {}, 8, {}, "a plan without delta"),
    "seed": ({"seed": 1}, {}, 8, {}, "a research seed"),
    "no noise": ({"noise_multiplier": 0.0}, {}, 8, {}, "an infinite epsilon"),
    "not public": ({}, {"perturb": pg.perturb.RawSAM(0.1)}, 8, {}, "an infinite epsilon"),
    "groups": ({"group_size": 2}, {}, 8, {}, "groups of examples"),
    "too many": ({}, {}, 40, {}, "39 weights for 40 canaries .at most one each"),
    "too few": ({}, {}, 1, {}, "canaries to be an integer >= 2"),
    "a fraction": ({}, {}, 8.5, {}, "canaries to be an integer"),
    "share": ({}, {}, 8, {"guessed": 0.0}, "guessed"),
    "confidence": ({}, {}, 8, {"confidence": 95}, "confidence"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_audited_is_refused_before_it_trains(name: str):
    changed, parts, added, options, match = BAD[name]
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan_of(FULL, 32, **changed), **parts)

    def never(*_: object) -> None:
        raise AssertionError

    with pytest.raises(PrivacyError, match=match):
        audit.canaries(private_grad, never, make_data(), added, **options)


def test_a_training_that_releases_nothing_is_refused():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan_of(FULL, 32))
    with pytest.raises(PrivacyError, match="0 releases"):
        audit.canaries(private_grad, lambda *_: None, make_data(), 8)


def test_the_command_audits_the_trainings_of_a_specification(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "one.toml").write_text(ONE.replace("target_epsilon = 1.0", "noise_multiplier = 0.6"))
    told = last_json(here("audit", "--training", "one.toml", "--canaries", 200, "--out", "out", "--json"))
    (row,) = told["audits"]
    assert row["name"] == "DP-AdamBC, one training"
    assert row["counts"]["one run"][:2] == [200, 30]
    (ledger,) = (tmp_path / "out").glob("ledger-*.jsonl")
    assert pg.Ledger(ledger, read_only=True).plan_facts["canaries"] == 200
    assert "Do not release the trained models" in (tmp_path / "out/audits.md").read_text()
    assert (
        "ledger to be new" in here("audit", "--training", "one.toml", "--out", "out", "--canaries", 200, code=2).stderr
    )
    assert "to come with a SPEC" in here("audit", "--training", code=2).stderr
    assert "method to be" in here("audit", "--training", "one.toml", "--method", "no", code=2).stderr
    (tmp_path / "one.toml").write_text(ONE.replace("target_epsilon = 1.0", "noise_multiplier = 3.0"))
    less_noise(monkeypatch, share=0.01)
    assert "NO" in here("audit", "--training", "one.toml", "--canaries", 400, code=1).stdout


@pytest.mark.slow
def test_a_long_training_of_the_digits_comes_near_its_claim():
    found = [on_digits((8.0, 240 / 1437, 200)) for _ in range(5)]
    assert all(one.passed for one in found)
    assert all(one.bounds["accountant"] > 1.4 * one.bounds["one run"] for one in found)


@pytest.mark.slow
def test_100_real_audits_raise_few_alarms():
    assert sum(not on_digits(FULL).passed for _ in range(100)) <= 5
