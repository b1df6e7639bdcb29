"""Groups of examples that are clipped as one: their means, their sensitivity of 2C, what they cost."""

from typing import Any

import pytest
import torch
from test_engines import MODELS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import clipped_sum, first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import Release, epsilon
from privgrad.clip.groups import group_means, group_of, split_by_group
from privgrad.engine.factored import Factored
from privgrad.gradient.reference import per_sample_gradients
from privgrad.rng import RandomSource
from privgrad.types import ClippedSum


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("name", MODELS)
def test_means_of_groups_of_any_layer(name: str):
    """Groups of 1, 2 and 3 examples, in no order, one of them empty."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double()
    x = torch.cat([inputs, inputs.flip(0)])[:6]
    y = torch.arange(len(x)) % 3
    group_B = torch.tensor([4, 0, 1, 4, 0, 4])[: len(x)]
    rows = per_sample_gradients(model, loss_fn, (x, y))
    wanted = {
        name: torch.stack([rows_BP[group_B == group].mean(0) for group in group_B.bincount().nonzero()[:, 0]])
        for name, rows_BP in rows.items()
    }
    found: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    for size, part in split_by_group((x, y), group_B, at_once=3):
        chunk = group_means(Factored(model, loss_fn)(part), size)
        for parameter, factor in chunk.items():
            found[parameter] = torch.cat([found.get(parameter, factor.dense()[:0]), factor.dense()])
            norms[parameter] = torch.cat([norms.get(parameter, factor.norms()[:0]), factor.norms()])
    for parameter, rows_GP in wanted.items():
        # Groups come by size: that of one, of two, of three.
        ordered = rows_GP[torch.argsort(torch.bincount(group_B)[group_B.bincount().nonzero()[:, 0]], stable=True)]
        torch.testing.assert_close(found[parameter], ordered, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(norms[parameter], ordered.flatten(1).norm(dim=1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_agrees_with_a_loop_over_groups(microbatch_size: int | None, engine: Any, adam: bool):
    """Float64, no noise, several steps; with a public share in each group's mean, and without."""
    model, data = make_model(torch.float64), make_data(dtype=torch.float64)
    numbers: dict[str, Any] = {"sample_rate": 0.5, "expected_batch_size": 16, "max_grad_norm": 0.5}
    plan = make_plan(noise_multiplier=0.0, group_size=4, seed=3, **numbers)
    public = pg.PublicGradient(model, loss_fn, (data.tensors[0][:8], data.tensors[1][:8]), source="test")
    made = pg.precondition.public_adam(public, eps=0.1, every=1) if adam else None
    private_grad = pg.PrivateGradient(
        model, loss_fn, plan, engine=engine, microbatch_size=microbatch_size, precondition=made
    )
    words = RandomSource(3).stream("groups")
    exp_avg = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    exp_avg_sq = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step, batch in enumerate(plan.batches(data)):
        rows = per_sample_gradients(model, loss_fn, batch.examples) if batch.size else {}
        group_B = [int(word) % 4 for word in words.uint64(step, batch.size)]
        h = public(0)
        for name in exp_avg:
            exp_avg[name] = 0.9 * exp_avg[name] + 0.1 * h[name]
            exp_avg_sq[name] = 0.9 * exp_avg_sq[name] + 0.1 * h[name].square()
        wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for group in set(group_B):
            members = [index for index, other in enumerate(group_B) if other == group]
            mean = {name: rows_BP[members].mean(0) for name, rows_BP in rows.items()}
            if adam:
                mean = {n: (0.9 * g + 0.1 * exp_avg[n]) / (exp_avg_sq[n].sqrt() + 0.1) for n, g in mean.items()}
            norm = torch.cat([value.flatten() for value in mean.values()]).norm()
            for name, value in mean.items():
                wanted[name] += value * min(1.0, 0.5 / float(norm)) / 4
        for name, value in private_grad(batch).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


def test_one_example_can_move_the_sum_by_2c_and_the_noise_knows():
    """A group of one example whose contribution a second one turns around."""
    model = nn.Linear(2, 1, bias=False).double()

    def linear_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return model(batch[0])[:, 0]

    x = torch.tensor([[10.0, 0.0], [-30.0, 0.0]]).double()

    def total(count: int) -> ClippedSum:
        parts = split_by_group((x[:count],), torch.zeros(count, dtype=torch.int64), at_once=8)
        chunks = [group_means(Factored(model, linear_loss)(part), size) for size, part in parts]
        like = dict(model.named_parameters())
        return clipped_sum(chunks, like=like, clip=pg.clip.Flat(), max_grad_norm=1.0, grouped=True)[0]

    moved = float((total(2).values["weight"] - total(1).values["weight"]).norm())
    assert moved == pytest.approx(2.0)
    assert total(2).sensitivity == moved

    plan = make_plan(noise_multiplier=1.5, group_size=2, max_grad_norm=0.7)
    released = pg.PrivateGradient(make_model(), loss_fn, plan)(first_batch(plan, make_data()))
    assert released.noise_std == pytest.approx(1.5 * 2 * 0.7 / (8 / 2))


def test_a_group_is_drawn_for_each_example_by_itself():
    """Without one example, all others are where they were; groups are even."""
    words = RandomSource(0).stream("groups").uint64(0, 4000)
    groups = group_of(words, 10)
    assert torch.equal(group_of(words[1:], 10), groups[1:])
    counts = torch.bincount(groups, minlength=10).double()
    assert float(((counts - 400).square() / 400).sum()) < 27.9  # chi-square, 9 degrees of freedom, 0.1 %


def test_a_group_with_a_gradient_that_is_not_finite_counts_as_nothing_and_touches_no_other():
    model, data = make_model(), make_data()
    inputs, labels = (tensor.clone() for tensor in data.tensors)
    inputs[0] = float("nan")
    plan = make_plan(noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=32, group_size=4, seed=0, steps=1)
    batch = next(plan.batches(TensorDataset(inputs, labels)))
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    released = private_grad(batch)
    assert all(bool(torch.isfinite(value).all()) for value in released.values())
    assert private_grad.raw_nonfinite_examples == 1


def test_a_resumed_run_draws_the_same_groups():
    plan = make_plan(group_size=4, seed=1)
    batches = list(plan.batches(make_data()))
    whole = pg.PrivateGradient(make_model(), loss_fn, plan)
    released = [whole(batch) for batch in batches]
    resumed = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=whole.ledger)
    resumed.load_state_dict(resumed.state_dict() | {"step": 5})
    for one, other in zip(released[5:], (resumed(batch) for batch in batches[5:]), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("n", "steps", "sigma", "of_groups", "of_records"),
    [
        (25_000, 12_500, 1.0, 1.52, 12.7),
        (60_000, 75_000, 1.0, 1.59, 13.2),
        (60_000, 75_000, 0.75, 3.00, 51.8),
        (240_000, 187_500, 0.95, 0.87, 7.9),
        (25_000, 39_063, 1.0, 2.8, 22.4),
    ],
    ids=["IMDB", "autoencoder", "autoencoder, less noise", "StackOverflow", "LSTM"],
)
def test_what_the_papers_noise_costs(n: int, steps: int, sigma: float, of_groups: float, of_records: float):
    """Claim C2: their noise is sigma C, half a multiplier. Their epsilon is that of a group, not of a record."""
    rate, delta = 64 / n, 1 / n
    plan = pg.PrivacyPlan(
        sample_rate=rate,
        steps=steps,
        expected_batch_size=64,
        noise_multiplier=sigma / 2,
        max_grad_norm=1.0,
        num_examples=n,
        delta=delta,
        group_size=4,
    )
    assert plan.epsilon(accountant="rdp") == pytest.approx(of_records, rel=0.02)
    as_they_count = Release(sigma, rate, count=steps)
    stated = epsilon([as_they_count], delta=delta, accountant="rdp")
    assert stated == pytest.approx(of_groups, rel=0.01)


@pytest.mark.parametrize("group_size", [0, 3, 2.0])
def test_a_group_size_that_does_not_divide_the_batch_is_refused(group_size: Any):
    with pytest.raises(pg.PrivacyError, match="group_size"):
        make_plan(group_size=group_size)


def test_a_ledger_is_kept_under_one_group_size():
    ledger = pg.Ledger()
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), ledger=ledger)
    with pytest.raises(pg.PrivacyError, match="group_size"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(group_size=2), ledger=ledger)
