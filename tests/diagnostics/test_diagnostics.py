"""Diagnostics: what they measure is what the definitions say, and none of it reaches a training."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan
from privgrad import diagnostics
from privgrad.diagnostics.gradient_stats import released_verdict, verdict
from privgrad.gradient.reference import per_sample_gradients


def trained(watch: bool, steps: int = 6) -> tuple[Any, nn.Module, dict[str, Any]]:
    plan = make_plan(seed=3, steps=steps, max_grad_norm=0.5)
    model = make_model(torch.float64)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    observers = (
        {"moments": diagnostics.RawMoments(private_grad), "stats": diagnostics.RawGradientStats(private_grad)}
        if watch
        else {}
    )
    for batch in plan.batches(make_data(dtype=torch.float64)):
        optimizer.step(grad=private_grad(batch))
    return optimizer, model, observers


def test_watching_changes_nothing():
    (_, plain, _), (_, watched, _) = trained(False), trained(True)
    for mine, theirs in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_twins_are_the_moments_with_and_without_noise():
    optimizer, model, observers = trained(True)
    moments = observers["moments"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(moments.exp_avg[name], optimizer.state[parameter]["exp_avg"])
        torch.testing.assert_close(moments.exp_avg_sq[name], optimizer.state[parameter]["exp_avg_sq"])
        assert moments.noise_var[name] == pytest.approx(optimizer.state[parameter]["exp_avg_noise_var"])

    plan = make_plan(seed=3, steps=6, max_grad_norm=0.5)
    clean = make_model(torch.float64)
    private_grad = pg.PrivateGradient(clean, loss_fn, plan)
    raw: list[Any] = []
    private_grad.register_raw_observer(raw.append)
    batch = next(iter(plan.batches(make_data(dtype=torch.float64))))
    released = private_grad(batch)
    silent = pg.PrivateGradient(clean, loss_fn, make_plan(seed=3, steps=6, max_grad_norm=0.5, noise_multiplier=0.0))
    exact = silent(first_batch(silent.plan, make_data(dtype=torch.float64)))
    for name, value in exact.items():
        torch.testing.assert_close(raw[0].raw_mean[name], value)
        assert not torch.allclose(released[name], value)
    assert raw[0].step == 0
    assert len(raw[0].clipping.raw_norms) == batch.size


def test_a_parameter_that_came_later_has_its_own_start():
    """Unfrozen after three steps: its first step is its first, as for its optimizer."""
    plan = make_plan(steps=6, noise_multiplier=0.0)
    model = make_model(torch.float64)
    model[0].requires_grad_(False)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    moments = diagnostics.RawMoments(private_grad)
    for step, batch in enumerate(plan.batches(make_data(dtype=torch.float64))):
        model[0].requires_grad_(step >= 5)
        private_grad(batch)
    counts = {name: 1 if name.startswith("0") else 6 for name in moments.exp_avg}
    assert moments.steps == counts
    late = torch.cat([moments.raw_exp_avg[name].flatten() for name in moments.exp_avg if name.startswith("0")])
    updates = moments.updates()["raw_clean"]
    names = list(moments.exp_avg)
    sizes = [moments.exp_avg[name].numel() for name in names]
    parts = dict(zip(names, updates.split(sizes), strict=True))
    found = torch.cat([parts[name] for name in names if name.startswith("0")])
    torch.testing.assert_close(found[late != 0], late[late != 0].sign())  # Adam's first step is one learning rate


def test_what_clipping_leaves_by_layer():
    plan = make_plan(max_grad_norm=0.5, sample_rate=1.0, expected_batch_size=32)
    model, shares = make_model(torch.float64), {"0": 1.0, "2": 1e-3}
    private_grad = pg.PrivateGradient(model, loss_fn, plan, clip=pg.clip.PerLayer(shares))
    stats = diagnostics.RawGradientStats(private_grad)
    batch = next(iter(plan.batches(make_data(dtype=torch.float64))))
    private_grad(batch)
    rows = per_sample_gradients(model, loss_fn, batch.examples)
    kept = whole = 0.0
    for index in range(batch.size):
        square = total = 0.0
        for prefix, share in shares.items():
            norm = torch.cat([r[index].flatten() for name, r in rows.items() if name.startswith(prefix)]).norm().item()
            square += min(norm, 0.5 * share / (1 + 1e-6) ** 0.5) ** 2
            total += norm**2
        kept, whole = kept + square**0.5, whole + total**0.5
    assert stats.summary()["raw_kept"] == pytest.approx(kept / whole)


def test_diagnostics_refuse_what_they_cannot_watch():
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan())
    with pytest.raises(pg.PrivacyError, match="betas"):
        diagnostics.RawMoments(private_grad, betas=(1, 2))
    moments = diagnostics.RawMoments(private_grad)
    for ask in (moments.table, moments.updates):
        with pytest.raises(ValueError, match="non-empty"):
            ask()


def test_table_and_updates_follow_the_papers_definitions():
    _, _, observers = trained(True)
    moments = observers["moments"]
    table = moments.table()
    noisy = torch.cat([v.flatten() for v in moments.exp_avg_sq.values()])
    assert table["noisy"]["median"] == pytest.approx(float(noisy.quantile(0.5)))
    assert table["noisy"]["q1"] == pytest.approx(float(noisy.quantile(0.25)))
    assert table["noisy"]["max"] == float(noisy.max())
    assert table["raw_clean"]["mean"] < table["noisy"]["mean"]
    updates = moments.updates(gamma_prime=1e9)
    numerator = torch.cat([m.flatten() for m in moments.raw_exp_avg.values()]) / (1 - 0.9**6)
    torch.testing.assert_close(updates["raw_debiased"], numerator / math.sqrt(1e9))
    assert updates["raw_noisy"].abs().sum() < updates["raw_clean"].abs().sum()


def test_an_observer_sees_only_what_was_charged():
    plan = make_plan(steps=1)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    seen: list[Any] = []
    private_grad.register_raw_observer(seen.append)
    data = make_data()
    private_grad(first_batch(plan, data))
    with pytest.raises(pg.BudgetExceededError):
        private_grad(first_batch(plan, data))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("max_grad_norm", "noise_multiplier", "says"),
    [(1e4, 1.0, "smaller max_grad_norm"), (1e-3, 1e3, "larger batch"), (1e-3, 1e-6, "larger max_grad_norm")],
)
def test_watch_tells_noise_from_clipping(max_grad_norm: float, noise_multiplier: float, says: str):
    plan = make_plan(seed=1, steps=3, max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    stats = diagnostics.RawGradientStats(private_grad)
    assert "yet" in stats.verdict()
    for batch in plan.batches(make_data()):
        private_grad(batch)
    verdict = stats.verdict()
    assert says in verdict
    assert verdict.startswith("NOT PRIVATE")
    assert ("Adam would divide by its root, AdamBC subtracts it." in verdict) is (stats.summary()["noise_share"] > 0.5)
    assert {row["name"] for row in stats.layers()} == {name for name, _ in make_model().named_parameters()}
    assert stats.table().row_count == 4


def test_watch_measures_what_the_definitions_say():
    plan = make_plan(seed=1, steps=1, max_grad_norm=0.3, sample_rate=1.0, expected_batch_size=32)
    model, data = make_model(torch.float64), make_data(dtype=torch.float64)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    stats = diagnostics.RawGradientStats(private_grad)
    private_grad(first_batch(plan, data))
    rows = torch.cat([g.flatten(1) for g in per_sample_gradients(model, loss_fn, data.tensors).values()], 1)
    norms = rows.norm(dim=1)
    factors = (0.3 / norms).clamp(max=1)
    mean = (factors[:, None] * rows).sum(0) / 32
    found = stats.summary()
    assert found["raw_clip_fraction"] == pytest.approx(float((norms > 0.3).double().mean()))
    assert found["raw_kept"] == pytest.approx(float((factors * norms).sum() / norms.sum()))
    noise = plan.noise_multiplier * 0.3 / 32 * math.sqrt(rows.shape[1])
    assert found["raw_signal_to_noise"] == pytest.approx(float(mean.norm()) / noise)


def test_groups_by_frequency():
    labels, counts = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3]), torch.tensor([400, 20, 10, 10])
    losses = torch.tensor([1.0, 1.0, 2.0, 4.0, 3.0, 5.0, 6.0, 8.0])
    correct = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0]).bool()
    groups = diagnostics.by_frequency(losses, correct, labels, counts)
    assert [(g["from"], g["classes"], g["examples"], g["loss"], g["accuracy"]) for g in groups] == [
        (400, 1, 4, 2.0, 0.75),
        (20, 1, 2, 4.0, 0.5),
        (10, 2, 2, 7.0, 0.0),
    ]
    few = diagnostics.by_frequency(losses, correct, labels, counts, edges=[100])
    assert [(g["from"], g["to"], g["classes"]) for g in few] == [(400, 400, 1), (10, 20, 3)]
    with pytest.raises(pg.PrivacyError, match="labels"):
        diagnostics.by_frequency(losses, correct, labels + 1, counts)
    with pytest.raises((pg.PrivacyError, IndexError)):
        diagnostics.by_frequency(losses[1:], correct, labels, counts)


def test_pairwise_cosines_match_the_closed_form_of_softmax_regression():
    """cos = <r_i, r_j> <x_i, x_j> over the norms, r = p - e_y (SPEC D11)."""
    torch.manual_seed(0)
    model = nn.Linear(12, 5, bias=False).double()
    x, y = torch.rand(20, 12, dtype=torch.float64), torch.arange(20) % 5
    found = diagnostics.raw_pairwise_cosines(
        model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none"), (x, y), y
    )
    residual = F.normalize(model(x).softmax(1).detach() - F.one_hot(y, 5))
    wanted = (residual @ residual.T) * (F.normalize(x) @ F.normalize(x).T)
    order = found["order"]
    torch.testing.assert_close(found["cosines"], wanted[order][:, order])
    assert (y[order].diff() >= 0).all()
    same = y[:, None] == y
    assert found["within"] == pytest.approx(float(wanted[same & ~torch.eye(20).bool()].mean()))
    assert found["across"] == pytest.approx(float(wanted[~same].mean()))


def test_cosines_at_zero_weights_are_what_uniform_inputs_give():
    """Within a class .75, across -.75 / (c - 1): inputs uniform in [0, 1]^d, weights zero (SPEC D11)."""
    torch.manual_seed(0)
    model = nn.Linear(2000, 9, bias=False)
    nn.init.zeros_(model.weight)
    x, y = torch.rand(90, 2000), torch.arange(90) % 9
    found = diagnostics.raw_pairwise_cosines(
        model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none"), (x, y), y
    )
    assert found["within"] == pytest.approx(0.75, abs=0.01)
    assert found["across"] == pytest.approx(-0.75 / 8, abs=0.01)
    with pytest.raises((pg.PrivacyError, KeyError), match="nothing"):
        diagnostics.raw_pairwise_cosines(model, lambda m, b: m(b[0])[:, 0], (x, y), y, parameters=["nothing"])
    with pytest.raises(pg.PrivacyError, match="number of labels to be 90, got 80"):
        diagnostics.raw_pairwise_cosines(model, lambda m, b: m(b[0])[:, 0], (x, y), y[:80])


def test_released_statistics_agree_with_those_from_before_the_noise():
    """On a training with norm_bins, where the raw statistics are known; and nothing raw is needed."""
    plan = make_plan(steps=60, expected_batch_size=64, num_examples=256, noise_multiplier=0.5, max_grad_norm=0.3)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, norm_bins=64)
    raw, released = diagnostics.RawGradientStats(private_grad), diagnostics.ReleasedStats(private_grad)
    by_hand = diagnostics.ReleasedStats()
    for batch in plan.batches(make_data(256)):
        by_hand.observe(private_grad(batch))
    found, true = released.summary(), raw.summary()
    assert by_hand.summary() == found
    assert found["noise_share"] == pytest.approx(true["noise_share"], rel=1e-5)
    assert found["signal_to_noise"] == pytest.approx(true["raw_signal_to_noise"], rel=0.25)
    # Of the expected number of gradients, and one between the last edge and C counts in proportion.
    assert found["clip_fraction"] == pytest.approx(true["raw_clip_fraction"], abs=0.1)
    assert "may" not in released.verdict()
    assert released.verdict().startswith("Clipping shortened about")


@pytest.mark.parametrize(
    ("clip_fraction", "signal_to_noise", "words"),
    [
        (0.99, 3.0, "larger max_grad_norm"),
        (0.02, 0.2, "smaller max_grad_norm"),
        (0.6, 0.2, "larger batch"),
        (0.6, 3.0, "Neither dominates"),
        (math.nan, 3.0, "Neither dominates"),
        (0.6, math.inf, "no noise"),
    ],
)
def test_the_verdict_of_released_statistics(clip_fraction: float, signal_to_noise: float, words: str):
    found = {"clip_fraction": clip_fraction, "signal_to_noise": signal_to_noise, "noise_share": 0.5}
    assert words in released_verdict(found)
    if words != "no noise":  # one advice for the same numbers from before the noise
        raw = {"raw_clip_fraction": clip_fraction, "raw_signal_to_noise": signal_to_noise, "raw_kept": 0.3}
        said = words if math.isfinite(clip_fraction) else "No example"
        assert said in verdict(raw | {"noise_share": 0.5})


def test_the_verdict_knows_a_c_that_moves_and_the_noise_of_the_share():
    found = {"clip_fraction": 0.02, "clip_fraction_std": 0.01, "signal_to_noise": 0.2, "noise_share": 0.5}
    fixed = {"lowest_max_grad_norm": 0.3, "highest_max_grad_norm": 0.3}
    moved = {"lowest_max_grad_norm": 0.3, "highest_max_grad_norm": 2.0}
    assert "smaller max_grad_norm" in released_verdict(found | fixed)
    assert "smaller max_grad_norm" not in released_verdict(found | fixed | {"clip_fraction_std": 0.05})
    assert "smaller max_grad_norm" not in released_verdict(found | moved)
    assert "C moved between 0.3 and 2." in released_verdict(found | moved)
    said = released_verdict(found | moved | {"clip_fraction": 0.99, "signal_to_noise": 3.0})
    assert "larger max_grad_norm" not in said
    assert "adaptive_clip that clips fewer" in said


@pytest.mark.parametrize("rule", [pg.clip.TargetFraction(), pg.clip.Quantile(), pg.clip.SquaredError()])
def test_released_statistics_of_a_rule_give_the_share_at_c(rule: pg.clip.AdaptiveClip):
    plan = make_plan(steps=40, expected_batch_size=64, num_examples=256, noise_multiplier=0.1, max_grad_norm=0.5)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=rule)
    raw, released = diagnostics.RawGradientStats(private_grad), diagnostics.ReleasedStats(private_grad)
    for batch in plan.batches(make_data(256)):
        private_grad(batch)
    found = released.summary()
    assert found["clip_fraction"] == pytest.approx(raw.summary()["raw_clip_fraction"], abs=0.15)
    assert found["lowest_max_grad_norm"] < found["highest_max_grad_norm"]
    assert repr(released).startswith("ReleasedStats(steps=40, clip_fraction=")
    assert released.table().row_count == len(list(private_grad.model.parameters()))


def test_a_filtered_gradient_has_no_place_in_released_statistics():
    plan = make_plan(steps=2)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, filter=pg.filters.EMA(0.2))
    before, behind = diagnostics.ReleasedStats(private_grad), diagnostics.ReleasedStats()
    _, second = (private_grad(batch) for batch in plan.batches(make_data()))
    with pytest.raises(pg.PrivacyError, match="as released, without a filter, got noise_gain"):
        behind.observe(second)
    assert (before.steps, behind.steps) == (2, 0)


def test_without_gradients_there_is_no_verdict_and_other_things_are_refused():
    assert "No gradient" in diagnostics.ReleasedStats().verdict()
