"""Audits of gradient and norms together: an attacker sees the released gradient and all that is released with it.

One canary, whose norm is at a chosen place below or above C. Everything is put into units of its noise and projected
on the canary's direction, which is the best attack on Gaussian noise. Noise is the system's. An honest one fails by
chance with a probability below one in ten thousand.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from mutants.norms import count_for_free, noise_of_the_first_c, statistics_unchecked
from privgrad import audit, private_gradient
from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Release
from privgrad.clip.norm_statistics import NORMS, Histogram, Slots
from privgrad.private_gradient import RawStep
from privgrad.types import ClippedSum, NoisyGradient

SIGMA = 0.6004775724359744  # one step of rate 1 at epsilon 8
OTHERS = torch.tensor([[0.0, 0.3], [0.0, -2.0], [0.1, 0.0]])
Plant = Callable[[pytest.MonkeyPatch], object]


def linear_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(batch[0])[:, 0]  # its gradient is the input


def in_units_of_the_noise(values: dict[str, Tensor], shares: Tensor, released: NoisyGradient) -> Tensor:
    """One vector, whose noise has independent coordinates of standard deviation 1."""
    held = released.norm_distribution
    assert held is not None
    assert isinstance(released.noise_std, float)
    if held.edges[0].isinf():  # the shares of a histogram are sums over its bins, the last one first
        numbers = shares.flip(0).diff(prepend=shares.new_zeros(1)) / held.noise_std[-1]
    else:
        numbers = shares / held.noise_std
    return torch.cat([values["weight"].flatten().double() / released.noise_std, numbers])


def game(length: float, *, at: float = 1.0, **options: Any) -> audit.Game:
    """With and without a canary whose gradient has this length; the plan's C is 1, and has moved to `at`."""
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=10**6,
        expected_batch_size=len(OTHERS),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        num_examples=len(OTHERS),
    )
    private_grad, seen = pg.PrivateGradient(nn.Linear(2, 1, bias=False), linear_loss, plan, **options), list[RawStep]()
    private_grad.register_raw_observer(seen.append)
    beginning = private_grad.state_dict()
    if "adaptive_clip" in beginning:
        beginning["adaptive_clip"]["max_grad_norm"] = at

    def data(included: Tensor) -> TensorDataset:
        return TensorDataset(torch.cat([torch.tensor([[length, 0.0]])[included], OTHERS]))

    def release(rows: TensorDataset) -> Tensor:
        private_grad.load_state_dict(beginning)
        gradient = private_grad(next(plan.batches(rows)))
        assert gradient.norm_distribution is not None
        return in_units_of_the_noise(dict(gradient), gradient.norm_distribution.shares, gradient)

    def noiseless(rows: TensorDataset) -> Tensor:
        release(rows)
        raw = seen[-1]
        assert raw.raw_shares is not None
        return in_units_of_the_noise(dict(raw.raw_mean), raw.raw_shares, raw.released)

    claimed = Release(SIGMA, 1.0)
    directions, claim = audit.directions(noiseless, data, 1), accounting.epsilon([claimed], delta=1e-5)
    return audit.Game("norms", release, data, directions, claim, 1e-5, claimed)


QUANTILE, SQUARED = pg.clip.Quantile(count_std=0.35), pg.clip.SquaredError(weight=1.5)


@pytest.mark.parametrize(
    ("options", "length", "near"),
    [
        # A gradient of 0 is in the slots alone, one of norm C in the gradient alone: both use all of C.
        ({"norm_bins": 8}, 0.0, 0.25),
        pytest.param({"norm_bins": 8}, 0.3, 0.15, marks=pytest.mark.slow),
        ({"norm_bins": 8}, 1.0, 0.25),
        pytest.param({"norm_bins": 1}, 0.5, 0.1, marks=pytest.mark.slow),
        pytest.param({"norm_bins": 64, "clip": pg.clip.Automatic()}, 0.01, 0.15, marks=pytest.mark.slow),
        ({"adaptive_clip": pg.clip.TargetFraction(), "at": 4.0}, 50.0, 0.25),
        ({"adaptive_clip": QUANTILE}, 1.2, 0.25),
        pytest.param({"adaptive_clip": SQUARED}, 50.0, 0.25, marks=pytest.mark.slow),
    ],
)
def test_gradient_and_norms_together_stay_within_the_claim_and_come_near(
    options: dict[str, Any], length: float, near: float
):
    found = audit.distinguish(game(length, **options), trials=600, confidence=0.9999)
    assert found.passed, found
    assert found.bounds["gaussian"] > near * found.claim, found


def slots_without_noise(patch: pytest.MonkeyPatch) -> None:
    honest = private_gradient.add_noise

    def planted(clipped: ClippedSum, *, divisor: int, **options: Any) -> NoisyGradient:
        bare = clipped.values[NORMS] / divisor
        found = honest(clipped, divisor=divisor, **options)
        return NoisyGradient({**found.tensors, NORMS: bare}, found.noise_std)

    patch.setattr(private_gradient, "add_noise", planted)


def slots_beside_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Each gradient has full slots, whatever part of C it uses itself: the slots are not counted in its norm."""
    real = Slots.rows

    def planted(self: Slots, norms: Tensor, lengths: Tensor, max_grad_norm: float) -> Tensor:
        return real(self, norms, torch.zeros_like(lengths), max_grad_norm)

    statistics_unchecked(patch)
    patch.setattr(Slots, "rows", planted)


def histogram_for_free(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Histogram, max_grad_norm: float) -> float:
        del self
        return max_grad_norm

    statistics_unchecked(patch)  # the library itself would refuse it
    patch.setattr(Histogram, "sensitivity", planted)


FAULTS: dict[str, tuple[Plant, dict[str, Any], float, int]] = {
    "slots without noise": (slots_without_noise, {"norm_bins": 8}, 0.3, 600),
    "slots that are not counted in the norm": (slots_beside_the_norm, {"norm_bins": 8}, 1.0, 2000),
    "a count for free": (count_for_free, {"adaptive_clip": QUANTILE}, 50.0, 600),
    "a histogram for free": (histogram_for_free, {"adaptive_clip": SQUARED}, 50.0, 600),
    "noise of the first C": (noise_of_the_first_c, {"adaptive_clip": pg.clip.TargetFraction(), "at": 4.0}, 50.0, 600),
}


LONG = ("slots that are not counted in the norm", "a histogram for free")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in FAULTS])
def test_planted_faults_of_norms_fail_the_audit(monkeypatch: pytest.MonkeyPatch, name: str):
    plant, options, length, trials = FAULTS[name]
    plant(monkeypatch)
    found = audit.distinguish(game(length, **options), trials=trials, confidence=0.999)
    assert not found.passed, found
