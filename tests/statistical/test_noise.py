"""The noise that is really there, measured; and wrong twins that the same measurement must reject."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.noise import add_noise
from privgrad.rng import RandomSource
from privgrad.types import ClippedSum

COUNT = 400_000


def released_noise(sensitivity: float = 0.7, sigma: float = 1.3, batch: int = 5) -> tuple[torch.Tensor, float]:
    clipped = ClippedSum({"p": torch.full((COUNT,), 2.0)}, sensitivity)
    stream = RandomSource(11).stream("noise")
    gradient = add_noise(clipped, noise_multiplier=sigma, expected_batch_size=batch, stream=stream, step=4)
    assert isinstance(gradient.noise_std, float)
    return gradient.values["p"].double() - 2.0 / batch, gradient.noise_std


def has_std(sample: torch.Tensor, std: float) -> bool:
    """Two-sided chi-square test of the variance at 1e-6: rejects errors above about 0.7 % in std."""
    statistic = float((sample / std).square().sum())
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(sample))
    return low < statistic < high


def test_noise_has_the_stated_scale():
    noise, noise_std = released_noise()
    assert noise_std == pytest.approx(1.3 * 0.7 / 5)
    assert has_std(noise, noise_std)
    assert abs(noise.mean()) < 5 * noise_std / COUNT**0.5


@pytest.mark.parametrize("twin", [2 / 3, 3 / 2, 0.98, 1.02, 1 / 5, 0.7])
def test_the_measurement_rejects_wrong_scales(twin: float):
    noise, noise_std = released_noise()
    assert not has_std(noise * twin, noise_std)


def test_noise_is_gaussian_and_uncorrelated():
    noise, noise_std = released_noise()
    z = (noise / noise_std).numpy()
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert stats.kstest(np.random.default_rng(0).laplace(scale=0.5**0.5, size=COUNT), "norm").pvalue < 1e-4
    for lag in (1, 2, COUNT // 2):
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 5 / (COUNT - lag) ** 0.5


def test_tail_of_the_stream():
    z = RandomSource(0).stream("tail").normal(0, 20_000_000).abs()
    for threshold in (3.0, 4.0, 5.0):
        expected = 2 * stats.norm.sf(threshold) * len(z)
        assert abs(int((z > threshold).sum()) - expected) < 5 * expected**0.5 + 1


def test_steps_streams_and_sources_are_independent():
    source = RandomSource(5)
    noise = source.stream("noise")
    assert torch.equal(noise.normal(3, 100), source.stream("noise").normal(3, 100))
    draws = [
        noise.normal(3, 50_000),
        noise.normal(4, 50_000),
        source.stream("sampling").normal(3, 50_000),
        RandomSource(6).stream("noise").normal(3, 50_000),
        RandomSource().stream("noise").normal(3, 50_000),
        RandomSource().stream("noise").normal(3, 50_000),
    ]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlations.abs().max() < 5 / 50_000**0.5


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_stream_has_one_holder():
    """A copy, a pickle or a fork would draw the same noise for another sum."""
    oracle = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        for holder in (oracle, oracle._noise_stream):
            with pytest.raises(pg.PrivacyError, match="same noise"):
                duplicate(holder)
    child = os.fork()
    if child == 0:
        try:
            oracle._noise_stream.normal(0, 2)
        except pg.PrivacyError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_chunks_of_a_long_draw_do_not_repeat():
    z = RandomSource(0).stream("long").normal(0, (1 << 20) + 1001)
    assert len(torch.unique(z)) == len(z)
    assert torch.equal(z[:10], RandomSource(0).stream("long").normal(0, (1 << 20) + 1001)[:10])


def test_an_empty_batch_is_noised_charged_and_stepped_as_any_other():
    plan = make_plan(sample_rate=1e-9, expected_batch_size=1, steps=3000, noise_multiplier=2.0, num_examples=32)
    oracle = pg.PrivateGradient(make_model(), loss_fn, plan)
    optimizer = pg.optim.AdamBC(oracle._model.named_parameters())
    noise: list[torch.Tensor] = []
    noise_std: object = None
    for batch in plan.batches(make_data()):
        assert batch.size == 0
        gradient = oracle(batch)
        optimizer.step(grad=gradient)
        noise_std = gradient.noise_std
        noise.append(torch.cat([value.flatten() for value in gradient.values.values()]))
    assert noise_std == 2.0
    assert has_std(torch.cat(noise).double(), 2.0)
    assert oracle.ledger.releases == 3000
    assert all(state["step"] == 3000 for state in optimizer.state.values())


@pytest.mark.parametrize("microbatch_size", [None, 11])
@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.PerLayer({"0": 1.0, "2": 2.0}), pg.clip.Automatic()])
def test_noise_through_the_oracle_is_drawn_once(clip: pg.clip.Clipping, microbatch_size: int | None):
    """Same sums, other noise: half the variance of the difference of two releases is (sigma C / B)**2."""
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=1200, max_grad_norm=0.4, noise_multiplier=1.5)
    model, data = make_model(), make_data()
    oracle = pg.PrivateGradient(model, loss_fn, plan, clip=clip, microbatch_size=microbatch_size)
    rows = [torch.cat([value.flatten() for value in oracle(batch).values.values()]) for batch in plan.batches(data)]
    differences = (torch.stack(rows[::2]) - torch.stack(rows[1::2])).flatten().double() / 2**0.5
    assert has_std(differences, 1.5 * 0.4 / 32)
    assert not has_std(differences, 1.5 * 0.4 / 32 * 1.05)
