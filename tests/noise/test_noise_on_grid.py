"""Noise on a public grid: what can come out does not depend on the data; and which generator drew it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan, seed_of
from privgrad.noise.gaussian import add_noise, grid_of, noise_generator
from privgrad.rng import BLOCK, RandomSource, Stream
from privgrad.types import ClippedSum

ERROR = 1e-6  # probability that a right release fails one of the statistical checks below


def test_the_record_names_what_drew_the_noise(tmp_path: Path):
    gpu = torch.zeros(2, device="meta")
    assert noise_generator([torch.zeros(2), torch.zeros(2).bfloat16()]) == "AES-256-CTR, Box-Muller in float32"
    assert "Philox" in noise_generator([gpu])
    assert "not cryptographic" in noise_generator([gpu])
    assert "float64" in noise_generator([torch.zeros(2).double(), gpu])
    for plan, name in (
        (make_plan(), "AES-256-CTR, Box-Muller in float32"),
        (make_plan(noise_on_grid=True), "AES-256-CTR, Box-Muller in float64, on a grid"),
    ):
        path = tmp_path / f"{plan.noise_on_grid}.jsonl"
        pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path).ledger.close()
        assert pg.Ledger(path, read_only=True).plan_facts["noise_generator"] == name


def test_a_ledger_kept_on_the_grid_is_not_continued_off_it():
    on, off = make_plan(noise_on_grid=True), make_plan()
    for first, second in ((on, off), (off, on)):
        ledger = pg.Ledger()
        pg.PrivateGradient(make_model(), loss_fn, first, ledger=ledger)
        pg.PrivateGradient(make_model(), loss_fn, first, ledger=ledger)
        with pytest.raises(pg.PrivacyError, match="noise_on_grid"):
            pg.PrivateGradient(make_model(), loss_fn, second, ledger=ledger)


def release(value: float, *, step: int = 0, count: int = 20_000, dtype: Any = torch.float32, **numbers: Any) -> Any:
    """The release of a sum whose coordinates are all of that value, and its noise's size."""
    numbers = {"noise_multiplier": 1.0, "divisor": 1, "on_grid": True} | numbers
    clipped = ClippedSum({"p": torch.full((count,), value, dtype=dtype)}, 1.0)
    gradient = add_noise(clipped, stream=RandomSource(seed_of(31)).stream("noise"), step=step, **numbers)
    return gradient["p"].double(), gradient.noise_std


def grid_points(released: torch.Tensor, divisor: int, grid: float) -> torch.Tensor:
    """The integers that a release is made of; that it is made of nothing else is asserted."""
    dtype = released.dtype
    points = (released.double() * divisor / grid).round()
    assert torch.equal((points / (divisor / grid)).to(dtype), released)
    return points


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_release_of_the_oracle_is_on_the_grid(engine: Any, dtype: torch.dtype):
    plan = make_plan(noise_on_grid=True, max_grad_norm=0.3, noise_multiplier=0.8)
    model, data = make_model(dtype), make_data(dtype=dtype)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, engine=engine)
    like = {name: torch.empty_like(parameter) for name, parameter in model.named_parameters()}
    grid, sensitivity = grid_of(ClippedSum(like, 0.3), 0.8)
    assert plan.divisor == 8
    for batch in plan.batches(data):
        gradient = private_grad(batch)
        assert gradient.noise_std == 0.8 * sensitivity / 8
        for value in gradient.values():
            times = value.double() * 8 / grid
            assert torch.equal(times, times.round())
            assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    plain = pg.PrivateGradient(model, loss_fn, make_plan())(first_batch(make_plan(), data))
    times = plain["0.weight"].double() * 8 / grid
    assert not torch.equal(times, times.round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [1, 7, 1000])
def test_what_leaves_is_made_of_integers_whatever_the_divisor(dtype: torch.dtype, divisor: int):
    clipped = ClippedSum({"p": torch.linspace(-3, 3, 5001, dtype=dtype)}, 1.0)
    grid, _ = grid_of(clipped, 2.0)
    stream = RandomSource(seed_of(32)).stream("noise")
    released = add_noise(clipped, noise_multiplier=2.0, divisor=divisor, stream=stream, step=0, on_grid=True)
    assert len(grid_points(released["p"], divisor, grid).unique()) > 4500


@pytest.mark.parametrize("sigma", [0.05, 1.0, 30.0])
def test_the_noise_on_the_grid_is_the_same_integers_whatever_the_sum(sigma: float):
    """Of two sums, one step's releases differ by the difference of the rounded sums, exactly."""
    grid, _ = grid_of(ClippedSum({"p": torch.empty(20_000)}, 1.0), sigma)
    sums = (0.0, 1.0, -0.123456789, 1e6, 1e30)
    noise = [
        grid_points(release(value, dtype=torch.float64, noise_multiplier=sigma)[0], 1, grid)
        - min(round(value / grid), 2**51)
        for value in sums
    ]
    assert all(torch.equal(noise[0], other) for other in noise[1:])
    assert len(noise[0].unique()) > 1000
    off, _ = release(1.0, dtype=torch.float64, noise_multiplier=sigma, on_grid=False)
    assert not torch.equal(off - 1.0, release(0.0, dtype=torch.float64, noise_multiplier=sigma, on_grid=False)[0])


def low_bits(released: torch.Tensor, unit: float) -> float:
    """The share of values that are no whole multiples of a unit."""
    return float((released / unit != (released / unit).round()).double().mean())


def test_plain_noise_tells_neighboring_sums_apart_and_noise_on_the_grid_does_not():
    """In float32, 1 + noise is always a multiple of 2^-24; 0 + noise often is not, which proves that no 1 was there."""
    unit = 2.0**-24
    assert low_bits(release(1.0, on_grid=False)[0], unit) == 0
    assert low_bits(release(0.0, on_grid=False)[0], unit) > 0.2
    # On the grid both are multiples of it, and its points are hit as often: parity and last eight bits tell nothing.
    grid, _ = grid_of(ClippedSum({"p": torch.empty(200_000)}, 1.0), 1.0)
    for value in (0.0, 1.0):
        released = release(value, count=200_000, dtype=torch.float64)[0]
        assert low_bits(released, grid) == 0
        counts = np.bincount((released / grid).numpy().astype(np.int64) % 256, minlength=256)
        assert stats.chisquare(counts).pvalue > ERROR


def test_noise_on_the_grid_has_the_stated_scale():
    for sigma in (0.3, 1.0, 7.0):
        released, noise_std = release(0.25, count=400_000, noise_multiplier=sigma, divisor=5)
        noise = (released - 0.05).numpy()
        grid, sensitivity = grid_of(ClippedSum({"p": torch.empty(400_000)}, 1.0), sigma)
        assert noise_std == sigma * sensitivity / 5
        assert 1 + 2**-10 + grid * 400_000**0.5 == pytest.approx(sensitivity, rel=1e-12)
        assert has_std(noise, noise_std)
        for twin in (0.7, 0.98, 1.02, sigma * 1.02 if sigma != 1 else 1.5):
            assert not has_std(noise * twin, noise_std)
        assert stats.kstest(noise / noise_std, "norm").pvalue > ERROR


def has_std(sample: np.ndarray, std: float) -> bool:
    low, high = stats.chi2.ppf([ERROR / 2, 1 - ERROR / 2], len(sample))
    return bool(low < np.square(sample / std).sum() < high)


@pytest.mark.parametrize("count", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("sigma", [1e-3, 0.7, 50.0])
def test_rounded_neighboring_sums_stay_within_the_sensitivity_that_is_noised(count: int, sigma: float):
    """At worst each coordinate is rounded away from the other's: C alone would be exceeded."""
    bound, like = 0.37, ClippedSum({"p": torch.empty(count)}, 0.37)
    grid, sensitivity = grid_of(like, sigma)
    assert math.frexp(grid)[0] == 0.5
    assert grid <= bound * min(sigma, 1) / 1024 / count**0.5 < 2 * grid
    assert bound * (1 + 2**-10) < sensitivity <= bound * (1 + 2**-9)
    step = np.floor(bound / count**0.5 / grid) * grid
    here, there = np.full(count, 0.499 * grid), np.full(count, 0.501 * grid + step - grid * 0.002)
    there += grid * 0.002  # from just below a half to just above one
    moved = np.rint(there / grid) * grid - np.rint(here / grid) * grid
    assert np.linalg.norm(there - here) <= bound * (1 + 1e-5)
    assert np.linalg.norm(there - here) < np.linalg.norm(moved) <= sensitivity


def test_a_grid_without_noise_or_off_the_cpu_is_refused():
    plan = make_plan(noise_on_grid=True, noise_multiplier=0.0)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    with pytest.raises(pg.PrivacyError, match="noise_multiplier"):
        private_grad(next(plan.batches(make_data())))
    assert private_grad.ledger.releases == 0
    with pytest.raises(pg.PrivacyError, match="noise_multiplier"):
        release(0.0, noise_multiplier=0.0)
    for bound in (math.inf, 0.0):
        with pytest.raises(pg.PrivacyError, match="max_grad_norm"):
            grid_of(ClippedSum({"p": torch.zeros(3)}, bound), 1.0)
    elsewhere = ClippedSum({"p": torch.zeros(3), "q": torch.zeros(3, device="meta")}, 1.0)
    with pytest.raises(pg.PrivacyError, match="to be on the CPU"):
        add_noise(elsewhere, noise_multiplier=1.0, divisor=1, stream=Stream(bytes(32)), step=0, on_grid=True)
    assert torch.equal(elsewhere.values["p"], torch.zeros(3))
    with pytest.raises(pg.PrivacyError, match="to be on the CPU"):
        pg.PrivateGradient(make_model().to("meta"), loss_fn, make_plan(noise_on_grid=True))


def test_noise_on_the_grid_takes_the_dense_normals(monkeypatch: pytest.MonkeyPatch):
    """Sparse ones would be the same numbers, but for about one pair in 2^30."""
    counters: list[int] = []
    key_stream = Stream._key_stream

    def noting(self: Stream, step: int, counter: int) -> Any:
        counters.append(counter)
        return key_stream(self, step, counter)

    monkeypatch.setattr(Stream, "_key_stream", noting)
    release(0.0)
    assert counters == [0, 1 << 63]
    release(0.0, on_grid=False)
    assert counters == [0, 1 << 63, 0]


@pytest.mark.parametrize("threads", [1, 3])
def test_noise_on_the_grid_is_the_streams_in_order_however_the_sum_is_cut(threads: int):
    sizes, stream = [3, BLOCK - 5, 3 * BLOCK + 1, 1, 0, 7], RandomSource(seed_of(33)).stream("noise")
    clipped = ClippedSum({str(i): torch.zeros(size).double() for i, size in enumerate(sizes)}, 1.0)
    grid, sensitivity = grid_of(clipped, 1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gradient = add_noise(clipped, noise_multiplier=1.0, divisor=1, stream=stream, step=9, on_grid=True)
    finally:
        torch.set_num_threads(before)
    draw, left = stream.normal_blocks(9, np.float64, dense=True), sum(sizes)
    normals = np.concatenate([draw(i, min(BLOCK, left - i * BLOCK)).copy() for i in range(-(-left // BLOCK))])
    expected = np.rint(normals * (sensitivity / grid)) * grid
    assert np.array_equal(torch.cat(list(gradient.values())).numpy(), expected)
