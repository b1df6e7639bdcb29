"""The noise that is really there, measured; and wrong twins that the same measurement must reject."""

import copy
import math
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan, seed_of, using_threads
from privgrad.noise import gaussian as noise
from privgrad.noise.gaussian import _release_on_device, add_noise
from privgrad.rng import BLOCK, RandomSource, Stream, box_muller
from privgrad.types import ClippedSum


def normals(stream: Stream, step: int, count: int, dtype: type[np.floating[Any]] = np.float64) -> torch.Tensor:
    """The first `count` normals of a step, shape (count,): its `normal_blocks` in order."""
    out = np.empty(count, dtype)
    draw = stream.normal_blocks(step, dtype)
    for start in range(0, count, BLOCK):
        part = out[start : start + BLOCK]
        part[:] = draw(start // BLOCK, part.size)
    return torch.from_numpy(out)


COUNT = 400_000


def released_noise(sensitivity: float = 0.7, sigma: float = 1.3, batch: int = 5) -> tuple[torch.Tensor, float]:
    clipped = ClippedSum({"p": torch.full((COUNT,), 2.0)}, sensitivity)
    stream = RandomSource(seed_of(11)).stream("noise")
    gradient = add_noise(clipped, noise_multiplier=sigma, divisor=batch, stream=stream, step=4)
    assert isinstance(gradient.noise_std, float)
    return gradient["p"].double() - 2.0 / batch, gradient.noise_std


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
    assert stats.kstest(np.random.default_rng(seed_of(0)).laplace(scale=0.5**0.5, size=COUNT), "norm").pvalue < 1e-4
    for lag in (1, 2, COUNT // 2):
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 5 / (COUNT - lag) ** 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tail_of_the_stream(dtype: Any):
    z = normals(RandomSource(seed_of(0)).stream("tail"), 0, 20_000_000, dtype).abs()
    assert abs(float(z.double().square().mean()) - 1) < 5 * (2 / len(z)) ** 0.5
    for threshold in (1e-4, 0.1, 1.0, 3.0, 4.0, 5.0):
        expected = 2 * stats.norm.sf(threshold) * len(z)
        spread = (expected * (1 - expected / len(z))) ** 0.5
        assert abs(int((z > threshold).sum()) - expected) < 5 * spread + 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_words_give_the_right_normals(dtype: Any):
    """Against the formula in Python's own floats: near zero u has its full resolution, and nothing is infinite."""
    words = [0, 1, -1, 2, 1000, 2**17, -(2**31), 2**32 - 1, 2**62, 2**63 - 1, -(2**63)]
    bits = 8 * np.dtype(dtype).itemsize
    turns = [0, 1, -1, 2 ** (bits - 2), 2 ** (bits - 1) - 1, -(2 ** (bits - 1))]
    pairs = [(word, turn) for word in words for turn in turns]
    z = np.full(2 * len(pairs), np.nan, dtype)
    gaps = [abs(2**63 - abs(word) - 0.5) / 2**63 for word, _ in pairs]  # 1 - u, which is exact near 1, as u is near 0
    wide = [-math.log((abs(word) + 0.5) / 2**63) for word, _ in pairs]
    roots = [-math.log1p(-gap) if gap < 0.5 else other for gap, other in zip(gaps, wide, strict=True)]
    radii = [math.sqrt(2 * root) for root in roots]
    angles = [math.pi * (turn + 0.5) / 2 ** (bits - 1) for _, turn in pairs]
    box_muller(np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], f"i{bits // 8}"), z)
    expected = np.concatenate([radii * np.cos(angles), radii * np.sin(angles)])
    np.testing.assert_allclose(z, expected, rtol=0, atol=5e-6 if dtype == np.float32 else 1e-13)
    assert 9.4 < max(radii) == pytest.approx(np.abs(z).max(), rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_draw_depends_neither_on_threads_nor_on_how_the_sum_is_cut(threads: int):
    """Blocks taken by whichever thread is free, across tensors, are the stream's draws in order."""
    sizes, stream = [3, BLOCK - 5, 6 * BLOCK + 1, 1, 0, 7], RandomSource(seed_of(1)).stream("noise")
    clipped = ClippedSum({str(i): torch.zeros(size) for i, size in enumerate(sizes)}, 1.0)
    with using_threads(threads):
        gradient = add_noise(clipped, noise_multiplier=1.0, divisor=1, stream=stream, step=9)
    assert torch.equal(torch.cat(list(gradient.values())), normals(stream, 9, sum(sizes), np.float32))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_threads_of_torch_do_not_spin_while_others_draw_noise(monkeypatch: pytest.MonkeyPatch):
    """They would hold the processors: with two threads, noise took as long as with one."""

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    add, during = noise._add, set[str]()

    def seen(*args: Any, **numbers: Any) -> None:
        during.update(threads())
        add(*args, **numbers)

    with using_threads(3):
        clipped, stream = ClippedSum({"p": torch.zeros(8 * BLOCK)}, 1.0), RandomSource().stream("noise")
        add_noise(clipped, noise_multiplier=1.0, divisor=1, stream=stream, step=0)
        before = threads()
        for step in (1, 2):  # torch starts its threads again
            clipped.values["p"].add_(1.0)
            begun = threads() - before
            assert len(begun) >= 2
            monkeypatch.setattr(noise, "_add", seen)
            during.clear()
            add_noise(clipped, noise_multiplier=1.0, divisor=1, stream=stream, step=step)
            assert during
            assert len(begun - during) >= 2


@pytest.mark.parametrize("failing", [0, 3])
def test_a_fault_in_one_thread_is_raised_and_no_thread_is_left(failing: int, monkeypatch: pytest.MonkeyPatch):
    """Else a sum would be released of which a part has no noise."""
    add, begun, before = noise._add, list[int](), threading.active_count()

    def wrong(pieces: list[Any], normals: Any, **numbers: Any) -> None:
        begun.append(len(begun))
        if len(begun) == failing + 1:
            raise MemoryError
        add(pieces, normals, **numbers)

    monkeypatch.setattr(noise, "_add", wrong)
    clipped, stream = ClippedSum({"p": torch.zeros(8 * BLOCK)}, 1.0), RandomSource().stream("noise")
    with using_threads(2):
        with pytest.raises(MemoryError):
            add_noise(clipped, noise_multiplier=1.0, divisor=1, stream=stream, step=0)
        assert torch.get_num_threads() == 2
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_after_noise_by_threads_draws_noise_by_threads_of_its_own():
    """Threads do not survive a fork: a pool of the parent's would wait for ever. Workers that load data are forks."""

    def released() -> torch.Tensor:
        zeros = torch.from_numpy(np.zeros(4 * BLOCK, np.float32))  # torch's own threads do not survive it either
        clipped, stream = ClippedSum({"p": zeros}, 1.0), RandomSource(seed_of(1)).stream("noise")
        return add_noise(clipped, noise_multiplier=1.0, divisor=1, stream=stream, step=0)["p"]

    with using_threads(2):
        mine = released()
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(released().numpy(), mine.numpy()) else 1)
        assert os.waitpid(child, 0)[1] == 0
        loader = DataLoader(TensorDataset(mine[:8]), batch_size=2, num_workers=1, multiprocessing_context="fork")
        assert torch.equal(torch.cat([part for (part,) in loader]), mine[:8])


def test_each_value_is_noised_in_its_own_precision_and_keeps_its_shape():
    stream = RandomSource(seed_of(1)).stream("noise")
    values = {
        "a": torch.ones(300, 7),
        "b": torch.ones(400, 5, dtype=torch.float64),
        "c": torch.ones(5, 400).t(),
        "d": torch.ones((), dtype=torch.float64),
    }
    clipped = ClippedSum(values, 2.0)
    found = add_noise(clipped, noise_multiplier=1.5, divisor=3, stream=stream, step=0)
    assert {n: (v.shape, v.dtype) for n, v in found.items()} == {n: (v.shape, v.dtype) for n, v in values.items()}
    assert not torch.equal(found["b"].float().double(), found["b"])
    flat = torch.cat([(value.double().flatten() - 1 / 3) for value in found.values()])
    assert stats.kstest(flat / (1.5 * 2.0 / 3), "norm").pvalue > 1e-4
    assert len(torch.unique(flat.float())) > 0.999 * len(flat)


def test_the_noise_of_other_devices_has_the_scale_and_its_own_seed():
    """torch's generator, tried on the CPU: keyed by stream, step and device."""
    stream, cpu = RandomSource(seed_of(1)).stream("noise"), torch.device("cpu")
    value = torch.full((COUNT,), 6.0)
    _release_on_device([value], stream, 4, None, std=1.5, divisor=3)
    assert has_std(value.double() - 2, 0.5)
    assert not has_std(value.double() - 2, 0.51)
    seeds = [stream.generator(step, cpu).initial_seed() for step in (4, 4, 5)]
    seeds.append(RandomSource(seed_of(1)).stream("other").generator(4, cpu).initial_seed())
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


def test_normals_that_end_early_are_added_up_in_pairs(monkeypatch: pytest.MonkeyPatch):
    """float32 normals of a GPU end at 6.7, which small noise would add to delta."""
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, **options: self.fill_(6.7))
    value = torch.zeros(3)
    _release_on_device([value], RandomSource().stream("noise"), 0, None, std=1.0, divisor=1)
    assert value.tolist() == pytest.approx([6.7 * math.sqrt(2)] * 3)


def test_parameters_that_other_devices_draw_at_once_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch):
    drawn, draw = list[int](), torch.Tensor.normal_
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, **key: drawn.append(len(self)) or draw(self, **key))
    monkeypatch.setattr(noise, "AT_ONCE", 50_000)  # the first two are drawn at once, and so are parts of the others
    sizes = [(20_000,), (100, 200), (20_000,), (70_000,), (20_000,), (0,), ()]
    kinds = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float32, torch.float32, torch.float32]
    values = [torch.zeros(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    stream = RandomSource(seed_of(6)).stream("noise")
    _release_on_device(values, stream, 4, None, std=1.5, divisor=3)
    assert all(value.all() for value in values)
    assert drawn == [40_000, 40_000, 20_000, 20_000, 50_000, 50_000, 40_001, 40_001]
    rows = torch.stack([value.double().flatten()[:20_000] for value in values[:5]])
    assert all(has_std(row, 0.5) for row in [*rows, values[3].double()])
    assert (torch.corrcoef(rows) - torch.eye(5)).abs().max() < 5 / math.sqrt(20_000)


def test_steps_streams_and_sources_are_independent():
    source = RandomSource(seed_of(5))
    noise = source.stream("noise")
    assert torch.equal(normals(noise, 3, 100), normals(source.stream("noise"), 3, 100))
    draws = [
        normals(noise, 3, 50_000),
        normals(noise, 4, 50_000),
        normals(source.stream("sampling"), 3, 50_000),
        normals(RandomSource(seed_of(6)).stream("noise"), 3, 50_000),
        normals(RandomSource().stream("noise"), 3, 50_000),
        normals(RandomSource().stream("noise"), 3, 50_000),
    ]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlations.abs().max() < 5 / 50_000**0.5


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_stream_has_one_holder():
    """A copy, a pickle or a fork would draw the same noise for another sum."""
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        for holder in (private_grad, private_grad._noise_stream):
            with pytest.raises(pg.PrivacyError, match="same noise"):
                duplicate(holder)
    child = os.fork()
    if child == 0:
        try:
            normals(private_grad._noise_stream, 0, 2)
        except pg.PrivacyError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_chunks_of_a_long_draw_do_not_repeat():
    z = normals(RandomSource(seed_of(0)).stream("long"), 0, 4 * BLOCK + 1001)
    assert len(torch.unique(z)) == len(z)
    assert torch.equal(z[: 2 * BLOCK], normals(RandomSource(seed_of(0)).stream("long"), 0, 2 * BLOCK))


def test_no_two_blocks_or_steps_share_words_of_the_key_stream(monkeypatch: pytest.MonkeyPatch):
    """Every stretch of the key stream that a long draw takes, in both precisions: disjoint, and within its step."""
    taken: list[tuple[int, int]] = []

    class Noting:
        def __init__(self, _: Stream, step: int, counter: int) -> None:
            assert 0 <= counter < 2**64
            self.start = 16 * ((step << 64) + counter)

        def update_into(self, zeros: memoryview, out: memoryview) -> None:
            assert zeros.nbytes % 8 == 0
            assert bytes(zeros) == bytes(zeros.nbytes)
            taken.append((self.start, zeros.nbytes))
            out[:] = bytes([1]) * out.nbytes

    monkeypatch.setattr(Stream, "_key_stream", lambda self, step, counter: Noting(self, step, counter))
    stream = RandomSource(seed_of(0)).stream("noise")
    for step, dtype in enumerate([np.float64, np.float32, np.float64]):
        normals(stream, step, 3 * BLOCK + 11, dtype)
    dense = stream.normal_blocks(3, np.float64, dense=True)
    for block in (0, 1, 2, 3, 1 << 32):
        dense(block, BLOCK)
    assert len(taken) == 22
    ends = [start + size for start, size in sorted(taken)]
    assert all(end <= start for end, (start, _) in zip(ends, sorted(taken)[1:], strict=False))


def test_a_long_draw_of_integers_is_random_to_its_end():
    words = RandomSource(seed_of(0)).stream("sampling").uint64(2, 600_001)
    assert len(np.unique(words)) == len(words) == 600_001
    assert stats.kstest(words[-100_000:] / 2.0**64, "uniform").pvalue > 1e-4


def wide_model() -> nn.Sequential:
    """As make_model, of 7,230 parameters: few releases of it hold much noise."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 30))


def test_an_empty_batch_is_noised_charged_and_stepped_as_any_other():
    plan = make_plan(sample_rate=1e-9, expected_batch_size=1, steps=20, noise_multiplier=2.0, num_examples=32)
    private_grad = pg.PrivateGradient(wide_model(), loss_fn, plan)
    optimizer = pg.optim.AdamBC(private_grad._model.named_parameters(), lr=1e-3)
    noise: list[torch.Tensor] = []
    noise_std: object = None
    for batch in plan.batches(make_data()):
        assert batch.size == 0
        gradient = private_grad(batch)
        optimizer.step(grad=gradient)
        noise_std = gradient.noise_std
        noise.append(torch.cat([value.flatten() for value in gradient.values()]))
    assert noise_std == 2.0
    assert has_std(torch.cat(noise).double(), 2.0)
    assert private_grad.ledger.releases == 20
    assert all(state["step"] == 20 for state in optimizer.state.values())


@pytest.mark.parametrize("microbatch_size", [None, 11])
@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.PerLayer({"0": 1.0, "2": 2.0}), pg.clip.Automatic()])
def test_noise_through_the_oracle_is_drawn_once(clip: pg.clip.Clipping, microbatch_size: int | None):
    """Same sums, other noise: half the variance of the difference of two releases is (sigma C / B)**2."""
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=20, max_grad_norm=0.4, noise_multiplier=1.5)
    model, data = wide_model(), make_data()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, clip=clip, microbatch_size=microbatch_size)
    rows = [torch.cat([value.flatten() for value in private_grad(batch).values()]) for batch in plan.batches(data)]
    differences = (torch.stack(rows[::2]) - torch.stack(rows[1::2])).flatten().double() / 2**0.5
    assert has_std(differences, 1.5 * 0.4 / 32)
    assert not has_std(differences, 1.5 * 0.4 / 32 * 1.05)
