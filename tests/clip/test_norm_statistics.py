"""Statistics of norms in the same release as the gradient: their joint sensitivity, and what they say."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_clipping import CLIPPINGS, LIKE, gradients
from torch import Tensor, nn

import privgrad as pg
from conftest import clipped_sum, loss_fn, make_data, make_model, make_plan, seed_of
from privgrad.clip.norm_statistics import NORMS, Count, Histogram, NormStatistic, Slots
from privgrad.gradient.factor import Dense
from privgrad.private_gradient import RawStep
from tests.reference.norm_slots import poured

STATISTICS: dict[str, NormStatistic] = {
    "1 slot": Slots(1),
    "3 slots": Slots(3),
    "59 slots": Slots(59),
    "count": Count(0.3),
    "histogram": Histogram((0.5, 1.0, 2.0), 0.4),
}


def released(rows: list[Any], clip: Any, statistic: NormStatistic, grouped: bool = False) -> tuple[Tensor, float]:
    """Return gradient and statistic as one vector, and the stated sensitivity."""
    stacked = torch.tensor([list(row) for row in rows], dtype=torch.float64).reshape(-1, 7)
    chunks = [{"a.weight": Dense(stacked[:, :4].reshape(-1, 2, 2)), "b": Dense(stacked[:, 4:])}] if len(rows) else []
    options: dict[str, Any] = {"like": LIKE, "clip": clip, "max_grad_norm": 1.5, "grouped": grouped}
    found, _ = clipped_sum(chunks, statistic=statistic, **options)
    return torch.cat([value.flatten() for value in found.values.values()]), found.sensitivity


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("clip", CLIPPINGS)
@given(st.lists(gradients, max_size=4), gradients, st.floats(0.0, 2.0))
@settings(deadline=None, max_examples=40)
def test_gradient_and_statistic_together_move_by_at_most_the_sensitivity(
    clip: str, statistic: str, rows: list[Any], extra: Any, length: float
):
    """One example more; also one of a length near C."""
    near = extra / (math.sqrt(sum(extra**2)) or 1.0) * 1.5 * length
    for added in (extra, near):
        after, sensitivity = released([*rows, added], CLIPPINGS[clip], STATISTICS[statistic])
        moved = after - released(rows, CLIPPINGS[clip], STATISTICS[statistic])[0]
        assert moved.norm() <= sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("statistic", STATISTICS)
@given(gradients, gradients)
@settings(deadline=None, max_examples=40)
def test_one_group_in_place_of_another_moves_both_by_at_most_the_sensitivity(statistic: str, before: Any, after: Any):
    one, sensitivity = released([before], pg.clip.Flat(), STATISTICS[statistic], grouped=True)
    moved = released([after], pg.clip.Flat(), STATISTICS[statistic], grouped=True)[0] - one
    assert moved.norm() <= sensitivity * (1 + 1e-9)


def test_slots_cost_no_sensitivity_and_counts_cost_what_their_papers_say():
    """A count with noise of 5 examples at a noise multiplier of 1: Andrew et al., theorem 1."""
    assert Slots(59).sensitivity(1.5) == 1.5
    rule = pg.clip.Quantile(count_std=5.0).begun(
        max_grad_norm=1.5, noise_multiplier=1.0, divisor=100, norm_bins=None, size=7
    )
    of_the_sum = rule.statistic.sensitivity(1.5) / 1.5
    assert of_the_sum == pytest.approx((1 - (1 / 10) ** 2) ** -0.5)
    assert isinstance(rule.statistic, Count)
    assert of_the_sum / rule.statistic.weight == pytest.approx(5.0)  # the noise of the count
    assert Histogram((1.0,), 0.2).sensitivity(1.5) == pytest.approx(1.5 * math.sqrt(1.04))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_norm_that_is_rounded_otherwise_hardly_moves_a_statistic(statistic: str):
    """Rounding depends on the batch. At a step, one example more would move the rows of all others that are near."""
    own, norms = (
        STATISTICS[statistic],
        torch.cat([1.5 * torch.tensor([0.0, 0.5, 1.0, 2.0]).double(), torch.rand(500) * 4]),
    )
    rows = [own.rows(each, each.clamp(max=1.5), 1.5) for each in (norms, norms * (1 + 3e-7), norms * (1 - 3e-7))]
    for other in rows[1:]:
        assert float((other - rows[0]).norm(dim=1).max()) < 5e-6 * own.sensitivity(1.5)


@dataclass(frozen=True)
class Changed(Slots):
    change: Callable[[Tensor, Tensor], Tensor]

    def rows(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.change(super().rows(*args, **kwargs), args[0])


class WithoutNoise(Changed):
    def sensitivity(self, max_grad_norm: float) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("statistic", "words"),
    [
        (Changed(8, lambda rows, _: 2 * rows), "rows to be within 100 with their contributions"),
        (Changed(8, lambda rows, _: math.nan * rows), "rows to be within 100 with their contributions"),
        (Changed(8, lambda rows, norms: rows * (norms / norms.max())[:, None]), "to depend on one contribution each"),
        (Changed(8, lambda rows, _: rows.mean(0, keepdim=True)), r"to be of shape \(B, K\)"),
        (WithoutNoise(8, lambda rows, _: rows), "sensitivity to be at least C = 100, got 0.0"),
    ],
)
def test_a_statistic_of_the_users_that_breaks_its_bound_releases_nothing(statistic: NormStatistic, words: str):
    class Rule(pg.clip.TargetFraction):
        def _statistic(self, max_grad_norm: float, noise_multiplier: float, divisor: int, bins: Any) -> NormStatistic:
            return statistic

    plan, data = make_plan(max_grad_norm=100.0), make_data()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=Rule())
    batch = pg.Batch(data[:], len(data), next(plan.batches(data)).sampling)
    with pytest.raises(pg.PrivacyError, match=words):
        private_grad(batch)
    assert private_grad.ledger.releases == 0


@pytest.mark.parametrize("bins", [1, 2, 7, 64])
@given(st.floats(0.0, 1.0))
@settings(deadline=None)
def test_slots_are_those_of_the_reference(bins: int, share: float):
    lengths = torch.tensor([share * 2.5], dtype=torch.float64)
    found = Slots(bins).rows(lengths, lengths, 2.5)[0]
    expected = torch.tensor(poured(share * 2.5, 2.5, bins), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_shares_are_those_of_the_lengths():
    """Lengths between the edges of four bins; each share without noise."""
    lengths = torch.tensor([0.05, 0.3, 0.3, 0.6, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = Slots(4).distribution(Slots(4).rows(lengths, lengths, 1.0).sum(0) / 8, 0.1, 1.0)
    torch.testing.assert_close(found.edges, torch.tensor([1.0, 0.75, 0.5, 0.25], dtype=torch.float64))
    # In proportion between two edges: 0.6 is 0.6 of a bin below 0.75, 0.3 is 0.8 below 0.5, and 0.05 is 0.8 below 0.25.
    wanted = torch.tensor([4 / 8, (0.6 + 3) / 8, (2 * 0.8 + 1) / 8, 0.8 / 8], dtype=torch.float64)
    torch.testing.assert_close(found.shares, wanted)
    assert found.clip_fraction == pytest.approx(0.5)
    torch.testing.assert_close(found.noise_std, torch.full((4,), 0.1 * 2, dtype=torch.float64))


def test_counts_and_histograms_give_the_shares_of_the_norms():
    norms = torch.tensor([0.2, 0.7, 0.9, 1.4, 5.0], dtype=torch.float64)
    count = Count(0.3).distribution(Count(0.3).rows(norms, norms, 1.0).sum(0) / 5, 0.03, 1.0)
    assert float(count.shares) == pytest.approx(3 / 5)
    assert float(count.noise_std) == pytest.approx(0.1)
    assert count.clip_fraction == pytest.approx(2 / 5)
    histogram = Histogram((0.5, 1.0, 2.0), 0.4)
    found = histogram.distribution(histogram.rows(norms, norms, 1.0).sum(0) / 5, 0.04, 1.0)
    torch.testing.assert_close(found.shares, torch.tensor([1.0, 4 / 5, 3 / 5, 1 / 5], dtype=torch.float64))
    torch.testing.assert_close(found.edges, torch.tensor([math.inf, 2.0, 1.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(found.noise_std**2, 0.01 * torch.tensor([4.0, 3, 2, 1], dtype=torch.float64))
    assert found.clip_fraction == pytest.approx(2 / 5)
    without_c = Histogram((0.5, 2.0), 0.4)
    assert math.isnan(without_c.distribution(torch.ones(3, dtype=torch.float64), 0.04, 1.0).clip_fraction)


def small_models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(12, 3))
    norm = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    return {"mlp": make_model(), "conv": conv, "norm": norm}


@pytest.mark.parametrize("name", ["mlp", "conv", "norm"])
def test_shares_are_within_the_stated_noise_of_the_true_ones(name: str):
    """In 95 % of steps and slots within 1.96 stated standard deviations, and the noise has that deviation."""
    data, plan = make_data(256), make_plan(expected_batch_size=64, num_examples=256, steps=300, seed=seed_of(3))
    private_grad = pg.PrivateGradient(small_models()[name], loss_fn, plan, norm_bins=5)
    errors, seen = list[Tensor](), list[RawStep]()
    private_grad.register_raw_observer(seen.append)
    for batch in plan.batches(data):
        found = private_grad(batch).norm_distribution
        assert found is not None
        raw = seen.pop()
        assert raw.raw_shares is not None
        lengths = raw.clipping.raw_lengths.tolist()
        true = torch.tensor([poured(n, 1.0, 5) for n in lengths], dtype=torch.float64).sum(0) * math.sqrt(5) / 64
        torch.testing.assert_close(raw.raw_shares, true, rtol=1e-6, atol=1e-6)
        errors.append((found.shares - true) / found.noise_std)
    within = (torch.stack(errors).abs() < 1.96).double().mean()
    assert abs(float(within) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1500)
    assert float(torch.stack(errors).std()) == pytest.approx(1.0, abs=0.08)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "vmap": {"engine": "vmap"},
    "microbatches": {"microbatch_size": 3},
    "per layer": {"clip": pg.clip.PerLayer({"0": 1.0, "2": 2.0})},
    "automatic": {"clip": pg.clip.Automatic()},
    "BAM": {"perturb": pg.perturb.BAM(0.1)},
    "SAT": {"perturb": pg.perturb.SAT(0.1)},
    "scales": {
        "precondition": pg.precondition.fixed(
            pg.Scales({"0.weight": torch.full((4, 5), 2.0)}, provenance="common knowledge", source="test")
        )
    },
}


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_is_as_without_a_distribution(name: str, group_size: int, on_grid: bool):
    """Bit by bit, under one seed (on a grid, which depends on the number of coordinates, but for the grid)."""
    plan = make_plan(seed=5, group_size=group_size, noise_on_grid=on_grid)
    batch = next(iter(plan.batches(make_data())))
    plain = pg.PrivateGradient(make_model(), loss_fn, plan, **OPTIONS[name])(batch)
    slots = pg.PrivateGradient(make_model(), loss_fn, plan, norm_bins=6, **OPTIONS[name])(batch)
    assert slots.norm_distribution is not None
    assert plain.norm_distribution is None
    assert list(slots) == list(plain)
    for parameter, value in plain.items():
        torch.testing.assert_close(slots[parameter], value, rtol=1e-2 * on_grid, atol=1e-3 * on_grid)
    assert isinstance(slots.noise_std, float)
    assert slots.noise_std == pytest.approx(plain.noise_std, rel=1e-3)
    assert float(slots.norm_distribution.noise_std[0]) == pytest.approx(slots.noise_std * math.sqrt(6), rel=1e-6)


def test_models_in_half_precision_and_empty_batches_have_distributions():
    half = make_plan(noise_multiplier=0.0)
    private_grad = pg.PrivateGradient(make_model(torch.bfloat16), bfloat_loss, half, norm_bins=4)
    distribution = private_grad(next(iter(half.batches(make_data())))).norm_distribution
    assert distribution is not None
    assert distribution.shares.dtype == torch.float64

    drawn = next(iter(half.batches(make_data()))).sampling
    empty = pg.Batch((torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), 0, drawn)
    nothing = private_grad(empty).norm_distribution
    assert nothing is not None
    assert not nothing.shares.any()


def bfloat_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return loss_fn(model, (inputs.bfloat16(), labels))


@pytest.mark.parametrize(
    ("batch_size", "sigma", "bins"), [(8192, 3.44, 64), (240, 3.44, 48), (64, 3.44, 8), (8, 1.0, 8), (8, 0.0, 64)]
)
def test_auto_takes_as_many_bins_as_the_noise_allows(batch_size: int, sigma: float, bins: int):
    plan = make_plan(
        expected_batch_size=batch_size, num_examples=4 * batch_size, noise_multiplier=sigma, max_grad_norm=0.5
    )
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, norm_bins="auto")
    assert private_grad.ledger.plan_facts["norm_statistic"] == f"Slots(bins={bins})"


@pytest.mark.parametrize("bad", [0, -1, 2.5, "many", "Auto", True, 1025, 10**9])
def test_bins_that_are_no_number_are_refused(bad: Any):
    with pytest.raises(pg.PrivacyError, match="norm_bins to be an integer from 1 to 1024, or 'auto'"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), norm_bins=bad)
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), norm_bins=1024)
    plan = make_plan(noise_multiplier=0.0, max_grad_norm=math.inf)
    with pytest.raises(pg.PrivacyError, match="to be finite"):
        pg.PrivateGradient(make_model(), loss_fn, plan, norm_bins="auto")


def test_the_ledger_records_the_statistic_and_a_resumed_run_needs_the_same(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan(), norm_bins=6, ledger=path)
    facts = json.loads(path.read_text().splitlines()[0])["plan"]
    assert facts["norm_statistic"] == "Slots(bins=6)"
    assert "float64" in facts["noise_generator"]
    private_grad.ledger.close()
    words = r"norm_statistic.* to be as recorded \(.*Slots\(bins=6\).*\), got .*None.*; give the same norm_bins"
    with pytest.raises(pg.PrivacyError, match=words):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), ledger=path)
    with pytest.raises(pg.PrivacyError, match=r"the plan's .*norm_statistic"):  # and another number of the plan
        pg.PrivateGradient(make_model(), loss_fn, make_plan(max_grad_norm=0.3), ledger=private_grad.ledger)


def test_a_ledger_of_another_rule_for_c_names_the_rule_alone(tmp_path: Path):
    path, rule = tmp_path / "ledger.jsonl", pg.clip.TargetFraction()
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), adaptive_clip=rule, ledger=path).ledger.close()
    with pytest.raises(pg.PrivacyError, match="give the same adaptive_clip") as caught:
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), ledger=path)
    assert "norm_statistic" not in str(caught.value)
    assert "noise_generator" not in str(caught.value)


def test_a_distribution_is_shown_in_one_line():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan(), norm_bins=64)
    shown = repr(private_grad(next(iter(make_plan().batches(make_data())))).norm_distribution)
    assert shown.startswith("NormDistribution(bins=64, edges from 0.01562 to 1, max_grad_norm=1, clip_fraction=")
    assert len(shown) < 120


def test_a_statistic_has_no_place_among_the_parameters():
    plan = make_plan()
    gradient = pg.PrivateGradient(make_model(), loss_fn, plan, norm_bins=6)(next(iter(plan.batches(make_data()))))
    assert NORMS not in gradient
    gradient.assign(make_model())
