"""Privacy for users: what each contributes, and that the whole of it is one unit."""

import copy
import math
import runpy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import account_by_rdp
from privgrad import cli
from privgrad.data import LOADERS, DataSet, by_user
from privgrad.models import SparseLinear
from privgrad.perturb.local_training import LocalUpdate, ReportedUpdate, local_update
from privgrad_lab.build import make_data, require_model
from privgrad_lab.load_spec import check_spec
from tests.reference.norm_slots import poured

ROOT = Path(__file__).parents[2]
OWNERS = [3] * 9 + [0] * 5 + [7] * 8 + [1] * 2 + [5] * 1


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def packed_rows(n: int) -> Tensor:
    """Columns and values, of which two may be the same column."""
    columns = torch.randint(0, 6, (n, 1, 4)).double()
    return torch.cat([columns, torch.randn(n, 1, 4, dtype=torch.float64)], dim=1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda n: torch.randn(n, 4, dtype=torch.float64)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
        lambda n: torch.randn(n, 4, dtype=torch.float64),
    ),
    "bags": (lambda: nn.EmbeddingBag(6, 3, padding_idx=0), lambda n: torch.randint(0, 6, (n, 5))),
    "sparse": (lambda: SparseLinear(6, 3), packed_rows),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 3)),
        lambda n: torch.randint(0, 6, (n, 3)),
    ),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda n: torch.randn(n, 4, dtype=torch.float64),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
        lambda n: torch.randn(n, 1, 4, 4, dtype=torch.float64),
    ),
}


def users_of(name: str, *, cap: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor], TensorDataset]:
    """A model, the examples, and these by user: nine, eight, five, two and one, of which at most `cap` are kept."""
    torch.manual_seed(5)
    make, inputs = MODELS[name]
    examples = inputs(len(OWNERS)), torch.randint(0, 3, (len(OWNERS),))
    return make().double(), examples, by_user(examples, OWNERS, cap=cap)


def plan_for(users: int, **changes: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {
        "num_users": users,
        "expected_cohort_size": users,
        "rounds": 3,
        "max_update_norm": 0.3,
        "delta": 1e-2,
        "noise_multiplier": 0.0,
    }
    return pg.PrivacyPlan.for_users(**numbers | changes)


def updates_by_loop(
    model: nn.Module, users: TensorDataset, local: LocalUpdate, scales: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """w - w_last of each user, by training a copy of the model."""
    found: list[dict[str, Tensor]] = []
    for inputs, labels, count in users:
        own = copy.deepcopy(model)
        for _ in range(local.epochs):
            for start in range(0, int(count), local.batch_size):
                part = slice(start, min(start + local.batch_size, int(count)))
                own.zero_grad()
                cross_entropy(own, (inputs[part], labels[part])).mean().backward()
                with torch.no_grad():
                    for name, parameter in own.named_parameters():
                        assert parameter.grad is not None
                        parameter -= local.lr(0) * parameter.grad / scales.get(name, 1.0)
        pairs = zip(model.named_parameters(), own.parameters(), strict=True)
        found.append({name: (before - after).detach() for (name, before), after in pairs})
    return found


def norm(update: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in update.values()))


def mean_of(updates: list[dict[str, Tensor]], bound: float, divisor: int) -> dict[str, Tensor]:
    shares = [min(1.0, bound / norm(update)) if norm(update) > 0 else 1.0 for update in updates]
    pairs = list(zip(shares, updates, strict=True))
    return {name: sum((s * u[name] for s, u in pairs), torch.zeros(())) / divisor for name in updates[0]}


def fixed(scales: dict[str, Tensor]) -> pg.precondition.Preconditioner:
    """A preconditioner with these scales."""
    return pg.precondition.fixed(pg.Scales(scales, provenance="common knowledge", source="made up"))


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "AdaDPS"])
@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("name", MODELS)
def test_updates_are_those_of_a_loop_over_users(name: str, engine: Any, scaled: bool):
    model, _, users = users_of(name)
    scales: dict[str, Tensor] = {}
    if scaled:  # one for each row, each column, each entry
        for index, (parameter, value) in enumerate(model.named_parameters()):
            shape = [value.shape[:1] + (1,) * (value.dim() - 1), value.shape, value.shape[-1:]][index % 3]
            scales[parameter] = torch.linspace(0.5, 3.0, shape.numel(), dtype=torch.float64).view(shape)
    local = LocalUpdate(0.7, batch_size=3, epochs=2)
    precondition = fixed(scales) if scales else None
    plan = plan_for(len(users))
    private_grad = pg.PrivateGradient(
        model, cross_entropy, plan, perturb=local, precondition=precondition, engine=engine, microbatch_size=2
    )
    found = private_grad(next(plan.batches(users)))
    updates = updates_by_loop(model, users, local, scales)
    assert sum(norm(update) > 0.3 for update in updates) >= 1  # some are clipped
    for parameter, wanted in mean_of(updates, 0.3, len(users)).items():
        torch.testing.assert_close(found[parameter], wanted, rtol=1e-9, atol=1e-12)
    one = tuple(tensor[1:2] for tensor in users.tensors)
    alone = local_update(model, cross_entropy, one, local, max_update_norm=0.3, precondition=precondition)
    for parameter, wanted in mean_of(updates[1:2], 0.3, 1).items():
        torch.testing.assert_close(alone[parameter], wanted, rtol=1e-9, atol=1e-12)


def test_the_distribution_of_norms_is_that_of_the_users_updates():
    model, _, users = users_of(next(iter(MODELS)))
    local = LocalUpdate(0.7, batch_size=3)
    plan = plan_for(len(users))
    private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=local, norm_bins=4)
    lengths = [min(0.3, norm(update)) for update in updates_by_loop(model, users, local, {})]
    found = private_grad(next(plan.batches(users))).norm_distribution
    assert found is not None
    wanted = torch.tensor([poured(length, 0.3, 4) for length in lengths]).sum(0).double() / 0.15 / len(users)
    torch.testing.assert_close(found.shares, wanted, rtol=1e-5, atol=1e-6)


def test_scales_of_one_are_federated_averaging_to_the_bit():
    model, _, users = users_of("mlp")
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    plan, found = plan_for(len(users)), list[dict[str, Tensor]]()
    for precondition in (None, fixed(ones)):
        local = LocalUpdate(0.5, batch_size=2)
        private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=local, precondition=precondition)
        found.append(dict(private_grad(next(plan.batches(users)))))
    assert all(torch.equal(found[0][name], found[1][name]) for name in ones)


def test_one_user_one_step_and_no_noise_is_a_gradient_step():
    model, examples, _ = users_of("mlp")
    users = by_user(examples, [0] * len(OWNERS), cap=100)
    plain = copy.deepcopy(model)
    cross_entropy(plain, examples).mean().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter -= 0.2 * parameter.grad
    plan = plan_for(1, max_update_norm=math.inf)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=1.0)
    private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=LocalUpdate(0.2, batch_size=100))
    optimizer.step(grad=private_grad(next(plan.batches(users))))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "clip", [pg.clip.Flat(), pg.clip.Automatic(), pg.clip.PerLayer({"0": 1.0, "2": 1.0, "3": 2.0})], ids=repr
)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_user_moves_the_sum_by_at_most_the_bound(clip: pg.clip.Clipping, data: st.DataObject):
    """Whatever their examples, how many, and however they train; and all others contribute as before."""
    model, (inputs, labels), _ = users_of("mlp")
    scale = 10.0 ** data.draw(st.integers(-8, 8))
    local = LocalUpdate(
        10.0 ** data.draw(st.integers(-3, 3)),
        batch_size=data.draw(st.integers(1, 9)),
        epochs=data.draw(st.integers(1, 3)),
    )
    gone = data.draw(st.sampled_from(sorted(set(OWNERS))))
    inputs = torch.where(torch.tensor([owner == gone for owner in OWNERS])[:, None], scale * inputs, inputs)
    bound, sums = 0.3, list[dict[str, Tensor]]()
    for owners in (OWNERS, [owner for owner in OWNERS if owner != gone]):
        rows = torch.tensor([owner in owners for owner in OWNERS])
        users = by_user((inputs[rows], labels[rows]), owners, cap=8)
        plan = plan_for(len(users), max_update_norm=bound)
        private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=local, clip=clip)
        released = private_grad(next(plan.batches(users)))
        sums.append({name: value * len(users) for name, value in released.items()})
    moved = {name: sums[0][name] - sums[1][name] for name in sums[0]}
    assert norm(moved) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize(("scale", "lr", "epochs"), [(1e6, 100.0, 1), (1e6, 1e6, 1), (1.0, 3.0, 10)])
def test_a_user_with_more_examples_changes_nobodys_training(engine: Any, scale: float, lr: float, epochs: int):
    """Not by what fills their rows up, where training diverges, nor by rounding of products, where it is chaotic."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    model, owners = nn.Sequential(*layers), [user for user in range(10) for _ in range(3)] + [99] * 7
    inputs, labels = torch.randn(len(owners), 4) * scale, torch.randint(0, 3, (len(owners),))
    sums = list[dict[str, Tensor]]()
    for rows in (slice(None), slice(0, 30)):
        users = by_user((inputs[rows], labels[rows]), owners[rows], cap=8)
        plan = plan_for(len(users), max_update_norm=1.0)
        local = LocalUpdate(lr, batch_size=2, epochs=epochs)
        private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=local, engine=engine)
        released = private_grad(next(plan.batches(users)))
        sums.append({name: value * len(users) for name, value in released.items()})
    assert norm({name: sums[0][name] - sums[1][name] for name in sums[0]}) <= 1 + 1e-4


def test_counts_are_believed_only_where_they_can_be_right():
    model, _, users = users_of("linear")
    plan, (inputs, labels, counts) = plan_for(5, rounds=9), users.tensors
    private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=LocalUpdate(0.1, batch_size=3))
    right = private_grad(next(plan.batches(users)))
    for dtype in (torch.uint8, torch.int8, torch.int32):
        narrow = TensorDataset(inputs, labels, counts.to(dtype))
        found = private_grad(next(plan.batches(narrow)))
        assert all(torch.equal(found[name], right[name]) for name in right)
    for wrong, message in (
        (TensorDataset(inputs, labels, counts + 1), "counts to be from 0 to 8"),
        (TensorDataset(inputs, labels, counts - 9), "counts to be from 0 to 8"),
        (TensorDataset(inputs, labels, counts > 0), "users' examples and their counts"),
        (TensorDataset(inputs, labels[:, :2], counts), "users' examples and their counts"),
    ):
        with pytest.raises(pg.PrivacyError, match=message):
            pg.PrivateGradient(model, cross_entropy, plan, perturb=LocalUpdate(0.1, batch_size=3))(
                next(plan.batches(wrong))
            )


def test_what_users_report_has_the_models_names_and_real_numbers():
    model, _, _ = users_of("linear")
    good = {name: torch.zeros(2, *p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    plan = plan_for(2)
    for updates, message in (
        (good | {"other": torch.zeros(2, 3)}, "other"),
        (good | {"bias": torch.zeros(2, 3, dtype=torch.complex64)}, "real floating-point numbers"),
        (good | {"bias": torch.zeros(2, 3, dtype=torch.int64)}, "real floating-point numbers"),
    ):
        drawn = next(plan.batches(TensorDataset(torch.arange(2))))
        with pytest.raises((pg.PrivacyError, KeyError), match=message):
            pg.PrivateGradient(model, cross_entropy, plan, perturb=ReportedUpdate())(
                pg.Batch(updates, 2, drawn.sampling)
            )


def test_a_devices_update_refuses_what_the_server_would():
    model, (inputs, labels), users = users_of("linear")
    public = pg.PublicGradient(model, cross_entropy, (inputs, labels), source="public: made up")
    one, local = tuple(tensor[:1] for tensor in users.tensors), LocalUpdate(0.1, batch_size=3)
    adam = pg.precondition.public_adam(public, keep=0.9, eps=1e-5)
    with pytest.raises(pg.PrivacyError, match="precondition to divide only"):
        local_update(model, cross_entropy, one, local, max_update_norm=1.0, precondition=adam)
    by_noise = pg.precondition.public_rmsprop(public, noise_eps=1.0)
    with pytest.raises(pg.PrivacyError, match=r"noise_std to be positive for noise_eps, got 0\.0; give eps"):
        local_update(model, cross_entropy, one, local, max_update_norm=1.0, precondition=by_noise)
    for bound in (0.0, -1.0, math.nan):
        with pytest.raises(pg.PrivacyError, match="local_update: expected max_update_norm"):
            local_update(model, cross_entropy, one, local, max_update_norm=bound)


@pytest.mark.usefixtures("by_rdp_here")
def test_the_divisor_and_the_noise_are_those_of_the_expected_cohort():
    model, _, users = users_of("linear")
    plan = plan_for(
        5, expected_cohort_size=2, noise_multiplier=3.0, rounds=400, max_update_norm=1e-6, delta=0.1, seed=2
    )
    private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=LocalUpdate(0.1, batch_size=4))
    drawn, released = list[int](), list[Tensor]()
    for batch in plan.batches(users):
        drawn.append(batch.size)
        gradient = private_grad(batch)
        assert gradient.noise_std == 3.0 * 1e-6 / 2
        released.append(torch.cat([value.flatten() for value in gradient.values()]) / 1.5e-6)
    assert {0, 1, 5} <= set(drawn)
    assert abs(sum(drawn) / 400 - 2) < 5 * math.sqrt(5 * 0.4 * 0.6 / 400)
    noise = torch.cat(released)  # and updates, a third of a deviation at most, in directions that change little
    assert abs(float(noise.square().mean()) - 1) < 0.15
    assert private_grad.ledger.plan_facts["privacy_unit"] == "user"
    assert private_grad.ledger.epsilon(delta=0.1) == pytest.approx(plan.epsilon(delta=0.1))


def test_the_noise_is_one_draw_of_its_own_whoever_took_part():
    """Where nobody has an example the noise alone is left: it is not a user's, nor the last round's."""
    model, _, users = users_of("linear")
    *tensors, counts = users.tensors
    nobodys = TensorDataset(*tensors, torch.zeros_like(counts))

    def released(data: TensorDataset, sigma: float) -> list[Tensor]:
        plan = plan_for(5, expected_cohort_size=2, noise_multiplier=sigma, seed=2)
        private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=LocalUpdate(0.1, batch_size=4))
        return [torch.cat([v.flatten() for v in private_grad(batch).values()]) for batch in plan.batches(data)]

    means, noise = released(users, 0.0), released(nobodys, 2.0)
    for both, mean, alone in zip(released(users, 2.0), means, noise, strict=True):
        torch.testing.assert_close(both, mean + alone)
    assert sum(float(mean.norm()) > 0.01 for mean in means) >= 2
    assert all(not torch.equal(noise[index], noise[index - 1]) for index in range(3))


def test_neither_cohorts_nor_noise_follow_from_the_round():
    model, _, users = users_of("linear")
    *tensors, counts = users.tensors
    nobodys = TensorDataset(*tensors, torch.zeros_like(counts))
    cohorts, noise = list[list[list[int]]](), list[Tensor]()
    for _ in range(2):
        plan = plan_for(5, expected_cohort_size=2, noise_multiplier=2.0, rounds=30)
        private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=LocalUpdate(0.1, batch_size=4))
        noise.append(private_grad(next(plan.batches(nobodys)))["weight"])
        cohorts.append([batch.examples[0].tolist() for batch in plan.batches(TensorDataset(torch.arange(5)))])
    assert cohorts[0] != cohorts[1]
    assert not torch.equal(noise[0], noise[1])


def test_reported_updates_are_clipped_again_and_nonsense_counts_as_nothing():
    model, _, _ = users_of("linear")
    good = {name: torch.full((1, *p.shape), 0.01, dtype=p.dtype) for name, p in model.named_parameters()}
    bad = [1e30, math.nan, math.inf, 0.0]
    stacked = {name: torch.cat([value, *(torch.full_like(value, b) for b in bad)]) for name, value in good.items()}
    plan = plan_for(5, max_update_norm=1.0)
    private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=ReportedUpdate())
    drawn = next(plan.batches(TensorDataset(torch.arange(5))))
    released = private_grad(pg.Batch(stacked, 5, drawn.sampling))
    total = {name: value * 5 - good[name][0] for name, value in released.items()}
    assert norm(total) == pytest.approx(1.0)  # of the huge one alone
    assert private_grad.raw_nonfinite_examples == 2


def test_a_plan_for_examples_does_not_do_for_users_nor_the_other_way_round():
    model, _, users = users_of("linear")
    for_examples = pg.PrivacyPlan(
        sample_rate=1.0, steps=1, expected_batch_size=5, noise_multiplier=1.0, max_grad_norm=1.0, num_examples=5
    )
    with pytest.raises(pg.PrivacyError, match=r"plan to be of unit 'user'.*PrivacyPlan\.for_users"):
        pg.PrivateGradient(model, cross_entropy, for_examples, perturb=LocalUpdate(0.1, batch_size=4))
    with pytest.raises(pg.PrivacyError, match="plan to be of unit 'example'"):
        pg.PrivateGradient(model, cross_entropy, plan_for(5))
    with pytest.raises(pg.PrivacyError, match="group_size to be 1 for privacy_unit 'user'"):
        replace(for_examples, privacy_unit="user", group_size=5)
    private_grad = pg.PrivateGradient(model, cross_entropy, plan_for(5), perturb=LocalUpdate(0.1, batch_size=4))
    rows = TensorDataset(*users.tensors[:2])
    with pytest.raises(pg.PrivacyError, match=r"users' examples and their counts.*data\.by_user"):
        private_grad(next(plan_for(5).batches(rows)))


def test_a_public_share_of_the_gradient_has_no_place_in_local_training():
    model, (inputs, labels), users = users_of("linear")
    public = pg.PublicGradient(model, cross_entropy, (inputs, labels), source="public: made up")
    plan, local = plan_for(len(users)), LocalUpdate(0.1, batch_size=4)
    adam = pg.precondition.public_adam(public, keep=0.9, eps=1e-5)
    with pytest.raises(pg.PrivacyError, match="precondition to divide only"):
        pg.PrivateGradient(model, cross_entropy, plan, perturb=local, precondition=adam)(next(plan.batches(users)))
    rmsprop = pg.precondition.public_rmsprop(public, eps=1e-5)
    pg.PrivateGradient(model, cross_entropy, plan, perturb=local, precondition=rmsprop)(next(plan.batches(users)))
    by_noise = pg.precondition.public_rmsprop(public)  # the noise is in units of the update, not of a local gradient
    plan = plan_for(len(users), noise_multiplier=1.0)
    with pytest.raises(pg.PrivacyError, match=r"noise_std to be positive for noise_eps, got 0\.0; give eps"):
        pg.PrivateGradient(model, cross_entropy, plan, perturb=local, precondition=by_noise)(next(plan.batches(users)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"lr": 0.0}, "lr to be a positive finite number"),
        ({"lr": -1}, "lr to be a positive finite number, got -1"),
        ({"lr": "0.1"}, "lr to be a positive finite number"),
        ({"lr": math.nan}, "lr to be a positive finite number"),
        ({"lr": lambda step: -1.0}, "lr at step 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 1.5}, "epochs"),
    ],
)
def test_local_training_refuses_what_is_no_training(options: dict[str, Any], what: str):
    numbers: dict[str, Any] = {"lr": 0.1, "batch_size": 4} | options
    with pytest.raises(pg.PrivacyError, match=f"LocalUpdate: expected {what}"):
        LocalUpdate(**numbers)


def test_plans_for_users(monkeypatch: pytest.MonkeyPatch):
    account_by_rdp(monkeypatch)
    plan = pg.PrivacyPlan.for_users(
        num_users=1000, expected_cohort_size=50, rounds=30, max_update_norm=0.5, delta=1e-3, target_epsilon=4.0
    )
    assert (plan.sample_rate, plan.divisor, plan.steps, plan.max_grad_norm) == (0.05, 50, 30, 0.5)
    assert plan.privacy_unit == "user"
    assert 3.9 < plan.epsilon() <= 4.0
    for wrong in ({"rounds": 0}, {"num_users": 2.5}, {"expected_cohort_size": 11}):
        with pytest.raises(pg.PrivacyError, match=f"for_users: expected {next(iter(wrong))}"):
            plan_for(10, **wrong)
    with pytest.raises(pg.PrivacyError, match=r"max_grad_norm to be in \[1e-10, inf\), got -1\.0"):
        plan_for(10, max_update_norm=-1.0)
    with pytest.warns(UserWarning, match=r"above 1 / num_users = 0\.1: .*one whole user"):
        plan_for(10, delta=0.5)
    for both in ({}, {"target_epsilon": 1.0, "noise_multiplier": 1.0}):
        with pytest.raises(pg.PrivacyError, match="exactly one of target_epsilon and noise_multiplier to be given"):
            plan_for(10, **{"noise_multiplier": None} | both)


def test_users_are_rows_of_their_own_examples():
    users = by_user((torch.arange(25), torch.arange(50).view(25, 2)), OWNERS, cap=8, minimum=2)
    values, pairs, counts = users.tensors
    assert counts.tolist() == [8, 8, 5, 2]
    assert values.tolist()[2] == [9, 10, 11, 12, 13, 9, 9, 9]
    assert values[0].tolist() == list(range(8))
    assert values[1].tolist() == list(range(14, 22))
    assert pairs.shape == (4, 8, 2)
    wide = by_user((torch.arange(25),), OWNERS, cap=30).tensors[0]
    assert wide.shape[1] == 30, "the largest user must not decide the length of the rows of others"
    same = by_user(TensorDataset(torch.arange(25), torch.arange(50).view(25, 2)), OWNERS, cap=8, minimum=2)
    assert all(torch.equal(one, other) for one, other in zip(users.tensors, same.tensors, strict=True))
    wrong: list[tuple[Any, str]] = [
        (((torch.zeros(3),), OWNERS), "users to have one entry per example"),
        (((torch.zeros(2),), "ab"), "the most examples of a user to be at least 2, got 1"),
        (((torch.zeros(2),), [1.0, math.nan]), "the user of example 1 to be known, got nan"),
        (((torch.zeros(2),), [None, "a"]), "the user of example 0 to be known, got None"),
        (((torch.zeros(2),), ["", "a"]), "the user of example 0 to be known, got ''"),
    ]
    for columns in ((torch.zeros(2), torch.zeros(2).numpy()), torch.zeros(2)):
        with pytest.raises((pg.PrivacyError, TypeError)):
            by_user(columns, [1, 1], cap=4, minimum=2)  # pyright: ignore[reportArgumentType]
    for arguments, message in wrong:
        with pytest.raises(pg.PrivacyError, match=f"by_user: expected .*{message}"):
            by_user(*arguments, cap=4, minimum=2)


NOBODY = [
    *(
        "",
        " ",
        "NA",
        "na ",
        "N/A",
        "#N/A N/A",
        "<NA>",
        "None",
        "NULL",
        "nil",
        "NaN",
        "-nan",
        "NaT",
        "?",
        "--",
        "(null)",
    ),
    *("\\N", "missing", "Unknown", None, math.nan, torch.tensor(math.nan), np.float32("nan"), np.datetime64("NaT")),
    *(np.str_("NA"), ("ward 3", "NA"), ("ward 3", None)),
]


@pytest.mark.parametrize("mark", NOBODY, ids=repr)
def test_people_without_a_name_are_never_one_user(mark: Any):
    """A person among them moves the sum of the common user from one clipped gradient to another: by up to 2 C."""
    with pytest.raises(pg.PrivacyError, match=r"user of example 1 to be known, got .*; leave the example out"):
        by_user((torch.zeros(3),), ["p1", mark, mark], cap=2)


def test_one_name_in_several_spellings_is_one_user_as_in_a_table():
    names = [7, "7", "7 ", "7.0", 7.0, np.int64(7), np.float32(7), torch.tensor(7), Decimal("7.00")]
    assert len(by_user((torch.zeros(9),), names, cap=9)) == 1
    assert len(by_user((torch.zeros(4),), ["Zo\u00eb", "Zoe\u0308 ", ("a", 1), ("a", "1.0")], cap=9)) == 2
    others = ["N", "Nana", "N1", "na 7", b"7", ("n", "a"), ("na1", 0), 0, -1, 1, True, "p7", "P7", 7.5]
    assert len(by_user((torch.zeros(len(others)),), others, cap=9)) == len(others)


def spec_of(unit: str = "user", model: str = "bag-of-words", **method: Any) -> dict[str, Any]:
    numbers = {"delta": 0.1, "max_grad_norm": 1.0, "num_examples": 5, "expected_batch_size": 5, "steps": 1}
    return {
        "title": "users",
        "data": {"use": "debian-maintainers"},
        "model": {"use": model},
        "privacy": numbers | {"noise_multiplier": 1.0, "privacy_unit": unit},
        "methods": [{"name": "DP-FedAvg", "optimizer": {"use": "SGD", "lr": 1.0}, **method}],
    }


def test_a_spec_says_what_of_users_is_missing_or_too_much(monkeypatch: pytest.MonkeyPatch):
    local = {"lr": 0.1, "batch_size": 3}
    for raw, message in (
        (spec_of("example", local=local), 'local to be absent for privacy_unit = "example", got .*batch_size'),
        (spec_of(local=local, perturb={"use": "BAM", "radius": 0.1}), "perturb to have the only point"),
    ):
        with pytest.raises(pg.PrivacyError, match=f"load_spec: expected methods.DP-FedAvg.{message}"):
            check_spec(raw, "a.toml")
    _, (ids, labels), users = users_of("bags")
    rows = TensorDataset(ids, labels)
    words = DataSet("made up", users, rows, rows, num_classes=3, input_shape=(5,), vocabulary=6)
    monkeypatch.setitem(LOADERS, "debian-maintainers", lambda: words)
    assert make_data(check_spec(spec_of(local=local), "a.toml")) is words
    with pytest.raises(pg.PrivacyError, match=r"methods.DP-FedAvg.local to be given for data by user, .* got None"):
        make_data(check_spec(spec_of(), "a.toml"))
    with pytest.raises(pg.PrivacyError, match="'debian-maintainers' to be by example, got data by user"):
        make_data(check_spec(spec_of("example"), "a.toml"))
    linear = check_spec(spec_of(model="linear", local=local), "a.toml")
    with pytest.raises(pg.PrivacyError, match=r"model.use to take word ids, .* got 'linear'"):
        require_model(linear, make_data(linear))
    digits = spec_of(model="linear", local=local) | {"data": {"use": "digits"}}
    with pytest.raises(pg.PrivacyError, match="'digits' to be by user, got data by example"):
        make_data(check_spec(digits, "a.toml"))


def test_the_command_line_says_whose_epsilon_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, _, users = users_of("linear")
    plan = plan_for(5, expected_cohort_size=2, noise_multiplier=2.0)
    local, path = LocalUpdate(0.1, batch_size=3), tmp_path / "ledger.jsonl"
    pg.PrivateGradient(model, cross_entropy, plan, perturb=local, ledger=path)(next(plan.batches(users)))
    monkeypatch.setattr(sys, "argv", ["privgrad", "epsilon", str(path), "--delta", "0.3"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr()
    assert "the privacy unit is a person with all of their data" in shown.err
    assert "would allow a method that publishes all data of one person" in shown.err
    assert "user" in next(line for line in shown.out.splitlines() if "privacy unit" in line)


def test_a_federated_training_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    account_by_rdp(monkeypatch)

    def trained(folder: Path, stop_at: int | None) -> tuple[dict[str, Tensor], pg.FitResult]:
        model, _, users = users_of("mlp")
        plan = plan_for(len(users), expected_cohort_size=2, rounds=6, noise_multiplier=1.0, seed=3)
        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.01)
        calls = 0

        def evaluate(model: nn.Module) -> dict[str, float]:
            nonlocal calls
            calls += 1
            if stop_at is not None and calls > stop_at:
                raise KeyboardInterrupt
            return {}

        local = LocalUpdate(0.3, batch_size=3)
        private_grad = pg.PrivateGradient(model, cross_entropy, plan, perturb=local)
        result = pg.fit(private_grad, optimizer, users, evaluate=evaluate, num_evaluations=6, output_dir=folder)
        return {name: p.detach().clone() for name, p in model.named_parameters()}, result

    whole, _ = trained(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", 3)
    resumed, result = trained(tmp_path / "parts", None)
    assert result.ledger.releases == 6
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_example_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    account_by_rdp(monkeypatch)
    names = runpy.run_path(str(ROOT / "examples/federated.py"))
    assert names["accuracy"] > 0.8
    assert "user-level epsilon" in capsys.readouterr().out
