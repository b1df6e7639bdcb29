"""Every clipping rule x the bound that the guarantee rests on. Adding one is a row in CLIPPINGS."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import clipped_sum, first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.gradient.factor import Dense

CLIPPINGS: dict[str, Any] = {
    "flat": pg.clip.Flat(),
    "per layer": pg.clip.PerLayer({"a": 2.0, "b": 1.0}),
    "automatic": pg.clip.Automatic(),
}
LIKE = {"a.weight": torch.zeros(2, 2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
gradients = arrays("float64", (7,), elements=st.floats(-1e6, 1e6) | st.just(0.0))


def summed(rows: list[Any], clip: Any, max_grad_norm: float = 1.5, chunk: int = 100) -> tuple[Tensor, int]:
    stacked = torch.tensor([list(row) for row in rows], dtype=torch.float64).reshape(-1, 7)
    parts = [
        {"a.weight": Dense(part[:, :4].reshape(-1, 2, 2)), "b": Dense(part[:, 4:])}
        for part in stacked.split(chunk)
        if len(part)
    ]
    result, raw = clipped_sum(parts, like=LIKE, clip=clip, max_grad_norm=max_grad_norm)
    assert result.sensitivity == max_grad_norm
    return torch.cat([result.values["a.weight"].flatten(), result.values["b"]]), raw.raw_nonfinite_examples


@pytest.mark.parametrize("name", CLIPPINGS)
@given(st.lists(gradients, max_size=5), gradients)
@settings(deadline=None, max_examples=60)
def test_one_example_more_moves_the_sum_by_at_most_the_sensitivity(name: str, rows: list[Any], extra: Any):
    clip = CLIPPINGS[name]
    moved = summed([*rows, extra], clip)[0] - summed(rows, clip)[0]
    assert moved.norm() <= 1.5 * (1 + 1e-9)


@pytest.mark.parametrize("name", CLIPPINGS)
@given(st.lists(gradients, min_size=2, max_size=6), st.integers(1, 6), st.randoms())
@settings(deadline=None, max_examples=40)
def test_order_and_chunks_do_not_matter(name: str, rows: list[Any], chunk: int, random: Any):
    whole, _ = summed(rows, CLIPPINGS[name])
    shuffled = random.sample(rows, len(rows))
    torch.testing.assert_close(whole, summed(shuffled, CLIPPINGS[name], chunk=chunk)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CLIPPINGS)
@given(gradients, st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=40)
def test_scaling_gradients_and_bound_together_scales_the_sum(name: str, row: Any, factor: float):
    clip = pg.clip.Automatic(gamma=0.01 * factor) if name == "automatic" else CLIPPINGS[name]
    scaled = summed([row * factor], clip, 1.5 * factor)[0]
    expected = factor * summed([row], CLIPPINGS[name], 1.5)[0]
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=1e-9 * factor)


@pytest.mark.parametrize("name", CLIPPINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("chunk", [1, 100])
def test_a_non_finite_example_contributes_zero_and_is_counted(name: str, bad: float, chunk: int):
    good = [[1.0, 2, 3, 4, 5, 6, 7], [0.1] * 7]
    spoilt = [0.0, bad, 0, 0, 1, 0, 0]
    total, nonfinite = summed([good[0], spoilt, good[1]], CLIPPINGS[name], chunk=chunk)
    assert nonfinite == 1
    torch.testing.assert_close(total, summed(good, CLIPPINGS[name])[0])


def test_flat_leaves_small_gradients_and_scales_large_ones_to_the_bound():
    small, large = [0.1, 0, 0, 0, 0, 0, 0.1], [30.0, 0, 0, 0, 0, 0, 40.0]
    assert summed([small], pg.clip.Flat())[0].tolist() == small
    assert summed([large], pg.clip.Flat())[0].tolist() == pytest.approx([0.9, 0, 0, 0, 0, 0, 1.2])
    assert summed([[0.0] * 7], pg.clip.Flat())[0].tolist() == [0.0] * 7


def test_per_layer_bounds_each_group_and_reaches_the_whole():
    row = [100.0] * 7
    total, _ = summed([row], pg.clip.PerLayer({"a": 2.0, "b": 1.0}), max_grad_norm=1.5)
    assert total[:4].norm().item() == pytest.approx(1.5 * 2 / math.sqrt(5))
    assert total[4:].norm().item() == pytest.approx(1.5 * 1 / math.sqrt(5))
    assert total.norm().item() == pytest.approx(1.5)


def test_per_layer_longest_prefix_counts_and_gaps_are_refused():
    clip = pg.clip.PerLayer({"": 1.0, "a": 1.0})
    total, _ = summed([[100.0] * 7], clip, max_grad_norm=1.0)
    assert total[4:].norm().item() == pytest.approx(math.sqrt(0.5))
    with pytest.raises(pg.PrivacyError, match="the parameter 'b' without a share"):
        summed([[1.0] * 7], pg.clip.PerLayer({"a": 1.0}))
    with pytest.raises(pg.PrivacyError, match="to match a trainable parameter, got 'c'"):
        summed([[1.0] * 7], pg.clip.PerLayer({"": 1.0, "c": 1.0}))
    with pytest.raises(pg.PrivacyError, match="share"):
        pg.clip.PerLayer({"a": -1.0})
    with pytest.raises(pg.PrivacyError, match="Flat"):
        pg.clip.PerLayer({})


def test_averaging_before_clipping_would_double_the_sensitivity():
    """Why there is no group of examples here: removing one of a group can flip what is clipped (SPEC 0.4)."""
    outlier, companion = [100.0] + [0.0] * 6, [-1.0] + [0.0] * 6
    mean_with = [(a + b) / 2 for a, b in zip(outlier, companion, strict=True)]
    moved = summed([mean_with], pg.clip.Flat(), 0.5)[0] - summed([companion], pg.clip.Flat(), 0.5)[0]
    assert moved.norm().item() == pytest.approx(2 * 0.5)


@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.PerLayer({"0": 1.0, "2": 3.0}), pg.clip.Automatic()])
@pytest.mark.parametrize("microbatch_size", [1, 3, 32, 1000])
def test_microbatches_change_nothing(clip: Any, microbatch_size: int):
    plan, data = make_plan(seed=3), make_data(dtype=torch.float64)

    def release(size: int | None) -> pg.NoisyGradient:
        private_grad = pg.PrivateGradient(make_model(torch.float64), loss_fn, plan, clip=clip, microbatch_size=size)
        gradient = private_grad(first_batch(plan, data))
        assert private_grad.ledger.releases == 1
        return gradient

    whole, parts = release(None), release(microbatch_size)
    assert whole.noise_std == parts.noise_std
    for name, value in whole.items():
        torch.testing.assert_close(value, parts[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.PerLayer({"0": 1.0, "2": 3.0}), pg.clip.Automatic()])
def test_neighboring_data_sets_stay_within_the_sensitivity_through_the_oracle(clip: Any):
    """Full batch, no noise: the released means of D and D less one differ by at most C / B, for every example."""
    inputs, labels = make_data(12, torch.float64).tensors
    inputs = inputs * torch.logspace(-2, 3, 12, dtype=torch.float64)[:, None]
    plan = make_plan(sample_rate=1.0, expected_batch_size=11, num_examples=11, noise_multiplier=0.0, max_grad_norm=0.3)

    def mean(kept: list[int]) -> Tensor:
        private_grad = pg.PrivateGradient(make_model(torch.float64), loss_fn, plan, clip=clip)
        gradient = private_grad(first_batch(plan, TensorDataset(inputs[kept], labels[kept])))
        return torch.cat([value.flatten() for value in gradient.values()])

    whole = mean(list(range(12)))
    moved = [(whole - mean([i for i in range(12) if i != left])).norm().item() for left in range(12)]
    assert max(moved) <= 0.3 / 11 * (1 + 1e-9)
    assert max(moved) > 0.5 * 0.3 / 11


def test_a_gradient_of_many_small_entries_is_still_bounded():
    """One long float32 sum of squares would lose the small ones beside the large one."""
    gradient = torch.full((1, 20_000_000), 2e-4)
    gradient[0, 0] = 1.0
    total, _ = clipped_sum([{"p": Dense(gradient)}], like={"p": gradient[0]}, clip=pg.clip.Flat(), max_grad_norm=0.5)
    assert total.values["p"].double().norm().item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("entry", [1e-19, 1e16])
def test_tiny_and_huge_gradients_are_bounded(entry: float):
    gradient = torch.full((1, 3000), entry)
    total, raw = clipped_sum(
        [{"p": Dense(gradient)}], like={"p": gradient[0]}, clip=pg.clip.Flat(), max_grad_norm=1e-10
    )
    assert raw.raw_nonfinite_examples == 0
    assert total.values["p"].double().norm().item() <= 1e-10 * (1 + 1e-6)


def test_a_rule_that_breaks_the_bound_is_refused_and_not_believed():
    class Naive:
        """Each parameter to C by itself: sqrt(2) C in all."""

        def factors(self, norms: Any, max_grad_norm: float) -> dict[str, Tensor]:
            return {name: (max_grad_norm / norm).clamp(max=1.0) for name, norm in norms.items()}

    class Forgetful:
        def factors(self, norms: Any, max_grad_norm: float) -> dict[str, Tensor]:
            return {"b": pg.clip.Flat().factors(norms, max_grad_norm)["b"]}

    class Infinite:
        def factors(self, norms: Any, max_grad_norm: float) -> dict[str, Tensor]:
            return {name: torch.full_like(norm, math.inf) for name, norm in norms.items()}

    class Negative:
        """One factor for all parameters, below 0: a contribution of length 1,000 C against the gradient."""

        def factors(self, norms: Any, max_grad_norm: float) -> dict[str, Tensor]:
            joint = torch.stack(list(norms.values())).norm(dim=0)
            return dict.fromkeys(norms, -1000 * max_grad_norm / joint)

    refused = ((Naive(), "bound"), (Forgetful(), "every parameter"), (Infinite(), "bound"), (Negative(), "bound"))
    for clip, message in refused:
        with pytest.raises(pg.PrivacyError, match=message):
            summed([[100.0] * 7], clip)


def test_a_rule_that_looks_at_the_batch_is_refused_though_each_contribution_is_bounded():
    """By the largest norm of the batch, one example more would move the sum of 64 by many times C."""

    class OfTheBatch:
        def __init__(self, statistic: Callable[[Tensor], Tensor]) -> None:
            self.statistic = statistic

        def factors(self, norms: Any, max_grad_norm: float) -> dict[str, Tensor]:
            norm_B = torch.stack(list(norms.values())).norm(dim=0)
            return dict.fromkeys(norms, max_grad_norm / torch.maximum(norm_B, self.statistic(norm_B)))

    class Scalar:
        def factors(self, norms: Any, max_grad_norm: float) -> dict[str, Tensor]:
            return dict.fromkeys(norms, torch.tensor(1e-9))

    class Own(pg.clip.Flat):
        """A rule of one's own that keeps to the rules, and is asked again."""

    rows = [[float(i + 1)] * 7 for i in range(9)]
    for statistic in (torch.max, torch.mean, torch.median, lambda norms: norms.sum() / 8):
        with pytest.raises(pg.PrivacyError, match="to depend on one example each"):
            summed(rows, OfTheBatch(statistic))
    with pytest.raises(pg.PrivacyError, match=r"to be of shape \(B,\)"):
        summed(rows, Scalar())
    assert torch.equal(summed(rows, Own())[0], summed(rows, pg.clip.Flat())[0])


def test_autocast_does_not_reach_the_sum():
    """In bfloat16 one example more could move a sum of hundreds by many times C. A third is no number of bfloat16."""
    rows = [{"p": Dense(torch.full((count, 1), 1 / 3))} for count in (300, 301)]
    with torch.autocast("cpu", torch.bfloat16):
        sums = [
            clipped_sum([row], like={"p": torch.zeros(1)}, clip=pg.clip.Flat(), max_grad_norm=1.0)[0] for row in rows
        ]
    assert (sums[1].values["p"] - sums[0].values["p"]).item() == pytest.approx(1 / 3, rel=1e-4)
