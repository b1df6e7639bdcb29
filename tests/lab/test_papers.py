"""Claims of the papers that are arithmetic, or nearly. docs/papers/claims.md names each test beside its claim."""

from typing import Any

import pytest
import torch
from test_debias import gradients, is_centered_on
from torch import Tensor, nn

import privgrad as pg
from benchmarks.heavy_tail import clipped_mean
from conftest import loss_fn
from privgrad import data
from privgrad.diagnostics import RawGradientStats

COORDINATES = 500  # of each signal


def displacement(
    kind: Any, lr: float, squares: tuple[float, float] = (0.1, 10.0), **options: Any
) -> tuple[float, float]:
    """Return the mean steps, in learning rates, for two signals with these squares, in units of Phi.

    The mean is over the last 1,000 of 5,000 steps. beta2 is so large that the second moment hardly varies.
    """
    torch.manual_seed(7)
    signal = torch.tensor(squares, dtype=torch.float64).sqrt().repeat_interleave(COORDINATES)
    parameter = nn.Parameter(torch.zeros(2 * COORDINATES, dtype=torch.float64))
    optimizer = kind([("p", parameter)], lr=lr, betas=(0.9, 0.9999), **options)
    before = torch.zeros_like(signal)
    for step in range(5000):
        if step == 4000:
            before = parameter.detach().clone()
        optimizer.step(grad=pg.NoisyGradient({"p": signal + torch.randn_like(signal)}, 1.0))
    moved = (before - parameter.detach()) / (1000 * lr)
    return float(moved[:COORDINATES].mean()), float(moved[COORDINATES:].mean())


def test_the_noise_leaves_the_first_moment_unbiased():
    """A1: the mean of the first moment is the signal."""
    parameter = nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    optimizer = pg.optim.Adam([("p", parameter)], lr=1e-3)
    for gradient in gradients(torch.full((20_000,), 0.05, dtype=torch.float64), 0.3, 30, seed=11):
        optimizer.step(grad=gradient)
    mean = optimizer.state[parameter]["exp_avg"] / (1 - 0.9**30)
    assert is_centered_on(mean, 0.05)
    assert not is_centered_on(mean, 0.06)


@pytest.mark.parametrize("lr", [1e-4, 1.0])
def test_the_biased_steps_of_two_signals_are_0302_and_0953_at_any_rate(lr: float):
    """A3 and A4: at the printed signals "about 0.1" is 0.302, and the ratio of the two steps is 3.16 at any rate."""
    small, large = displacement(pg.optim.Adam, lr)
    assert small == pytest.approx((0.1 / 1.1) ** 0.5, rel=0.02)
    assert large == pytest.approx((10 / 11) ** 0.5, rel=0.02)
    assert large / small == pytest.approx(10**0.5, rel=0.03)


def test_the_biased_steps_of_the_signals_that_are_meant_are_01_and_1():
    """A3: at 0.1 sqrt(Phi) and 10 sqrt(Phi); the print has both factors inside the root."""
    small, large = displacement(pg.optim.Adam, 1e-2, (0.01, 100.0))
    assert small == pytest.approx(0.1 / 1.01**0.5, rel=0.04)
    assert large == pytest.approx((100 / 101) ** 0.5, rel=0.02)


def test_debiased_steps_of_two_signals_are_equal():
    """A4: with the noise subtracted, and a floor far below both signals, the two steps are alike."""
    small, large = displacement(pg.optim.AdamBC, 1e-2, debias_floor=0.01)
    assert large == pytest.approx(1.0, rel=0.02)
    assert large / small == pytest.approx(1.0, abs=0.06)


def trained(
    kind: Any, *, noise_multiplier: float, max_grad_norm: float = 1.0, steps: int = 200, **options: Any
) -> tuple[Tensor, float]:
    """Return the weights of softmax regression on a small heavy tail, and the share of its clipped gradients."""
    examples = data.heavy_tail(groups=3, log_size=4)
    inputs, labels = examples.train.tensors
    model = nn.Linear(inputs.shape[1], examples.num_classes, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=steps,
        expected_batch_size=len(inputs),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        num_examples=len(inputs),
        seed=0,
    )
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    stats = RawGradientStats(private_grad)
    optimizer = kind(model.named_parameters(), **options)
    for batch in plan.batches(torch.utils.data.TensorDataset(inputs.double(), labels)):
        optimizer.step(grad=private_grad(batch))
    return model.weight.detach(), stats.summary()["raw_clip_fraction"]


@pytest.mark.parametrize(("noise_multiplier", "follows"), [(10.0, True), (0.01, False)])
def test_adam_follows_momentum_only_where_the_noise_dominates(noise_multiplier: float, follows: bool):
    """A14: at the rate lr (1 - beta1) / sqrt(Phi), the weights agree if Phi dominates, and not otherwise."""
    noise_std, lr = noise_multiplier / 48, 0.002
    adam, _ = trained(pg.optim.Adam, noise_multiplier=noise_multiplier, lr=lr)
    momentum, _ = trained(pg.optim.MomentumSGD, noise_multiplier=noise_multiplier, lr=lr * 0.1 / noise_std)
    distance = float((adam - momentum).norm() / adam.norm())
    assert distance < 0.2 if follows else distance > 1.0


@pytest.mark.parametrize("kind", [pg.optim.SGD, pg.optim.Adam, pg.optim.AdamBC])
def test_ten_times_the_norm_is_the_same_training_while_all_is_clipped(kind: Any):
    """B22: C = 0.1 and C = 1 train the same weights, up to rounding; C = 10, which nothing exceeds, does not."""
    options: dict[str, Any] = {"noise_step": 0.002, "noise_multiplier": 5.0, "steps": 30}
    (small, all_clipped), (large, also_all), (loose, none) = (
        trained(kind, max_grad_norm=norm, **options) for norm in (0.1, 1.0, 10.0)
    )
    assert (all_clipped, also_all, none) == (1.0, 1.0, 0.0)
    torch.testing.assert_close(small, large, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(small, loose, rtol=0.1)


def test_the_sizes_of_the_synthetic_classes():
    """B25: no m satisfies the printed formulas; eight groups and 2^10 give the sizes of the figure."""
    examples = data.heavy_tail()
    inputs, labels = examples.train.tensors
    counts = torch.bincount(labels)
    assert tuple(inputs.shape) == (8192, 9216)
    assert len(counts) == examples.num_classes == 255
    assert counts.unique().tolist() == [2**power for power in range(3, 11)]
    printed = [(2 ** (m + 1) - 1, m * 2**m, 2**m + m * 2**m) for m in range(1, 20)]
    assert (255, 8192, 9216) not in printed


def test_the_step_of_full_batches_is_that_of_single_examples():
    inputs, labels = data.heavy_tail(groups=3, log_size=4).train.tensors
    model = nn.Linear(inputs.shape[1], 7, bias=False, dtype=torch.float64)
    x = inputs.double()
    nn.init.zeros_(model.weight)  # then all residuals have one norm
    norm = (6 / 7) ** 0.5 * float(x.norm(dim=1).median())
    expected, factors = torch.zeros_like(model.weight), list[float]()
    for row, label in zip(x, labels, strict=True):
        loss = nn.functional.cross_entropy(model(row[None]), label[None])
        (gradient,) = torch.autograd.grad(loss, [model.weight])
        factors.append(min(1.0, norm / float(gradient.norm())))
        expected += factors[-1] * gradient / len(x)
    with torch.no_grad():
        mean, found = clipped_mean(model.weight, x, x.norm(dim=1), labels, norm)
    assert 0 < sum(factor < 1 for factor in factors) < len(x)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found, torch.tensor(factors, dtype=torch.float64))
