"""Noise with memory: its covariance, the draws that it needs, and what optimizers and filters see of it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_data, seed_of
from privgrad.noise.banded import Banded, Recursion, square_root
from privgrad.noise.gaussian import _release_on_device, add_noise
from privgrad.optim import filters
from privgrad.rng import RandomSource
from privgrad.types import ClippedSum, NoisyGradient

STEPS, COORDINATES = 50, 20_000
BANDED = Banded(4).for_steps(STEPS)


class Flat(nn.Module):
    """A model whose gradients are all zero: its releases are the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COORDINATES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.0 * (self.weight.sum() + x.sum(1))


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0])


def planned(**changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {"sample_rate": 0.125, "expected_batch_size": 4, "num_examples": 32}
    numbers |= {"steps": STEPS, "noise_multiplier": 1.5, "max_grad_norm": 2.0, "seed": seed_of(3)}
    numbers |= {"correlation": BANDED} | changed
    return pg.PrivacyPlan(**numbers)


def released(private_grad: pg.PrivateGradient, start: int, end: int) -> list[NoisyGradient]:
    """The releases of steps start to end - 1."""
    found = list[NoisyGradient]()
    for batch in private_grad.plan.batches(make_data(), start=start):
        found.append(private_grad(batch))
        if len(found) == end - start:
            return found
    return found


def expected_covariance(correlation: Banded, steps: int) -> np.ndarray:
    """|c|^2 (F^T F)^-1, from the matrix itself."""
    c = np.array(correlation.chosen)
    factor = np.sum([value * np.eye(steps, k=-back) for back, value in enumerate(c)], axis=0)
    return float(c @ c) * np.linalg.inv(factor.T @ factor)


def require_covariance(noise: np.ndarray, expected: np.ndarray) -> None:
    """The covariance of rows over the columns agrees, entry by entry, to six standard errors."""
    found = noise @ noise.T / noise.shape[1]
    diagonal = np.diag(expected)
    errors = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / noise.shape[1])
    assert float((np.abs(found - expected) / errors).max()) < 6


def matrix_of(gradients: list[NoisyGradient]) -> np.ndarray:
    return torch.stack([gradient["weight"] for gradient in gradients]).double().numpy()


@pytest.mark.parametrize("changed", [{}, {"noise_on_grid": True}, {"seed": None, "steps": STEPS}])
def test_the_covariance_is_that_of_the_factor(changed: dict[str, Any]):
    plan = planned(**changed)
    gradients = released(pg.PrivateGradient(Flat(), losses, plan), 0, STEPS)
    unit = plan.noise_multiplier * plan.max_grad_norm / plan.expected_batch_size
    require_covariance(matrix_of(gradients) / unit, expected_covariance(BANDED, STEPS))
    stds = np.sqrt(np.diag(expected_covariance(BANDED, STEPS))) * unit
    stated = [gradient.noise_std for gradient in gradients]
    assert stated == pytest.approx(stds.tolist(), rel=0.003 if plan.noise_on_grid else 1e-5)


def test_other_devices_have_the_same_covariance():
    """torch's generator, tried on the CPU."""
    stream, recursion, found = RandomSource(seed_of(4)).stream("noise"), Recursion(BANDED, 0), list[torch.Tensor]()
    for step in range(STEPS):
        value = torch.zeros(COORDINATES)
        recursion.steps_to(step, [value])
        _release_on_device([value], stream, step, recursion, std=1.0, divisor=1)
        found.append(value)
    require_covariance(torch.stack(found).double().numpy(), expected_covariance(BANDED, STEPS))


def test_the_recursion_is_exact_under_autocast():
    """Rounded to half precision, w would be no linear function of z, and z would no longer hide a sum."""
    found = list[torch.Tensor]()
    for rounded in (False, True):
        normals = torch.zeros(100)
        recursion, generator = Recursion(BANDED, 0), torch.Generator().manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            for step in range(10):
                normals = torch.randn(100, generator=generator)
                recursion.moved_on_device("place", normals, step)
        found.append(normals)
    assert torch.equal(*found)


def test_a_resumed_run_draws_the_noise_of_an_uninterrupted_one():
    whole = released(pg.PrivateGradient(Flat(), losses, planned()), 0, STEPS)
    first = pg.PrivateGradient(Flat(), losses, planned())
    parts = released(first, 0, 21)
    second = pg.PrivateGradient(Flat(), losses, planned(), ledger=first.ledger)
    second.load_state_dict(first.state_dict())
    parts += released(second, 21, STEPS)
    assert np.array_equal(matrix_of(whole), matrix_of(parts))
    assert [one.noise_std for one in whole] == [one.noise_std for one in parts]
    require_covariance(matrix_of(parts) / 0.75, expected_covariance(BANDED, STEPS))


def test_without_a_seed_the_noise_begins_again_at_a_multiple_of_the_bands():
    """Nothing of the old noise is stored, and no person takes part more often than planned."""
    first = pg.PrivateGradient(Flat(), losses, planned(seed=None))
    parts = released(first, 0, 21)
    second = pg.PrivateGradient(Flat(), losses, planned(seed=None), ledger=first.ledger)
    assert first.ledger.next_step == 24
    second.load_state_dict(first.state_dict() | {"step": 24})
    parts += released(second, 24, STEPS)
    blocks = np.zeros((47, 47))
    blocks[:21, :21], blocks[21:, 21:] = expected_covariance(BANDED, 21), expected_covariance(BANDED, 26)
    require_covariance(matrix_of(parts) / 0.75, blocks)
    assert first.ledger.charged[0].count == math.ceil(STEPS / 4)


@pytest.mark.parametrize("bands", [2, 5])
def test_a_person_is_drawn_from_one_group_by_poisson(bands: int):
    """Each example is drawn at steps of one group only, at bands times the rate, and all groups are as likely."""
    count, steps = 3000, 40
    plan = pg.PrivacyPlan(
        sample_rate=0.1,
        expected_batch_size=300,
        num_examples=count,
        steps=steps,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        correlation=Banded(bands),
        seed=seed_of(5),
    )
    drawn = np.zeros((steps, count), dtype=bool)
    for step, batch in enumerate(plan.batches(TensorDataset(torch.arange(count)))):
        drawn[step, batch.examples[0].numpy()] = True
    by_group = np.stack([drawn[group::bands].sum(0) for group in range(bands)])
    assert int((by_group > 0).sum(0).max()) == 1
    own = by_group.argmax(0)[by_group.any(0)]
    shares = np.bincount(own, minlength=bands) / len(own)
    assert shares == pytest.approx(1 / bands, abs=5 * math.sqrt(1 / bands / len(own)))
    rate = by_group.sum() / (count * steps / bands)
    assert rate == pytest.approx(0.1 * bands, abs=5 * math.sqrt(0.1 * bands * bands / (count * steps)))


def gradients(signal: float, steps: int, bands: int = 8) -> list[NoisyGradient]:
    """Releases of a constant signal under noise with memory of unit 0.3."""
    stream, correlation = RandomSource(seed_of(11)).stream("noise"), Banded(bands).for_steps(steps)
    recursion = Recursion(correlation, 0)
    sums = (torch.full((COORDINATES,), signal, dtype=torch.float64) for _ in range(steps))
    return [
        add_noise(
            ClippedSum({"p": value}, sensitivity=0.3),
            noise_multiplier=1.0,
            divisor=1,
            stream=stream,
            step=step,
            recursion=recursion,
        )
        for step, value in enumerate(sums)
    ]


@pytest.mark.parametrize("signal", [0.0, 0.5])
@pytest.mark.parametrize("behind", [None, lambda: filters.EMA(0.1), filters.DOPPLER])
def test_the_second_moment_is_the_signals(signal: float, behind: Any):
    """With the noise as stated; with that of independent noise of the same sigma it is not."""
    given, found = gradients(signal, 300), list[torch.Tensor]()
    for states_memory in (True, False):
        parameter, own = nn.Parameter(torch.zeros(COORDINATES, dtype=torch.float64)), behind and behind()
        optimizer = pg.optim.AdamBC([("p", parameter)], lr=1e-3)
        for gradient in given:
            shown = gradient if states_memory else NoisyGradient(dict(gradient), 0.3)
            optimizer.step(grad=shown if own is None else own(shown))
        state = optimizer.state[parameter]
        found.append((state["exp_avg_sq"] - state["exp_avg_noise_var"]) / (1 - 0.999**300))
    right, wrong = (abs(float(each.mean()) - signal**2) / float(each.std() / len(each) ** 0.5) for each in found)
    assert right < 4 < wrong


def test_a_filter_that_misses_the_first_gradients_of_new_noise_knows_that_it_is_new():
    plan, data = planned(seed=None), make_data()
    private_grad, own = pg.PrivateGradient(Flat(), losses, plan), filters.DOPPLER()
    own(private_grad(next(plan.batches(data))))
    later = plan.batches(data, start=4)
    private_grad(next(later))  # other groups, and other noise; this gradient is not filtered
    for gradient in (private_grad(next(later)) for _ in range(3)):
        filtered = own(gradient)
        assert float(filtered["weight"].std()) == pytest.approx(filtered.noise_std, rel=0.02)


FILTERS = [filters.EMA(0.2), filters.DOPPLER(), filters.Innovation(0.5), filters.LinearFilter([0.5, 0.3, 0.2])]


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("given", FILTERS, ids=repr)
def test_noise_behind_a_filter_is_as_stated(given: filters.LinearFilter, start: int):
    """Also for a filter that begins later than the noise or misses steps, and for noise that changes or restarts."""
    stream, own = RandomSource(seed_of(13)).stream("noise"), given.begun()
    recursion = Recursion(BANDED, 0)
    for step in range(40):
        if step == 25:
            recursion = Recursion(BANDED, 25)
        gradient = add_noise(
            ClippedSum({"p": torch.zeros(100_000)}, 1.0 if step < 15 else 0.5),
            noise_multiplier=2.0,
            divisor=10,
            stream=stream,
            step=step,
            recursion=recursion,
        )
        if step >= start and step not in (11, 12, 33):
            filtered = own(gradient)
            assert float(filtered["p"].std()) == pytest.approx(filtered.noise_std, rel=0.015)


def test_the_gain_is_that_of_long_sums():
    steps = 400
    given = gradients(0.0, steps)
    total = sum((gradient["p"] for gradient in given[200:]), torch.zeros(COORDINATES, dtype=torch.float64))
    last = given[-1]
    assert isinstance(last.noise_std, float)
    predicted = last.noise_std * last.noise_gain * math.sqrt(200)
    independent = last.noise_std * math.sqrt(200)
    # Sums over a window still hold what lies beyond its ends.
    assert predicted < float(total.std()) < 1.6 * predicted < 0.6 * independent


@pytest.mark.parametrize(
    ("batch_size", "steps", "epsilon", "bands", "by_square_root", "optimized"),
    [
        (1024, 400, 3.0, 8, 0.827, 0.753),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                (1024, 400, 3.0, 2, 0.895, 0.858),
                (1024, 400, 3.0, 4, 0.840, 0.777),
                (1024, 400, 3.0, 16, 0.844, 0.777),
                (1024, 400, 8.0, 2, 0.840, 0.804),
                (1024, 400, 8.0, 4, 0.729, 0.674),
                (1024, 400, 8.0, 8, 0.655, 0.596),
                (1024, 400, 8.0, 16, 0.615, 0.566),
                (256, 1000, 3.0, 2, 0.825, None),
                (256, 1000, 3.0, 4, 0.701, None),
                (256, 1000, 3.0, 8, 0.617, None),
                (256, 1000, 3.0, 16, 0.569, None),
                (256, 1000, 8.0, 2, 0.807, None),
                (256, 1000, 8.0, 4, 0.661, None),
                (256, 1000, 8.0, 8, 0.554, None),
                (256, 1000, 8.0, 16, 0.476, None),
                (8192, 300, 3.0, 2, 1.04, 1.00),
                (8192, 300, 3.0, 4, 1.10, 1.02),
            ]
        ),
    ],
)
def test_the_error_of_prefix_sums_is_the_published_one(
    batch_size: int, steps: int, epsilon: float, bands: int, by_square_root: float, optimized: float | None
):
    """Over independent noise at the same epsilon, for 60,000 examples and delta 1e-5."""

    def error(correlation: Banded) -> float:
        plan = pg.PrivacyPlan.for_budget(
            target_epsilon=epsilon,
            delta=1e-5,
            max_grad_norm=1.0,
            num_examples=60_000,
            expected_batch_size=batch_size,
            steps=steps,
            correlation=correlation,
        )
        assert plan.correlation is not None
        assert plan.correlation.relative_error is not None
        return plan.correlation.relative_error

    assert error(Banded(bands, tuple(square_root(bands)))) == pytest.approx(by_square_root, rel=0.02)
    if optimized is not None:
        assert error(Banded(bands)) == pytest.approx(optimized, rel=0.02)
