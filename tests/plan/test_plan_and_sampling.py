"""The plan's numbers, and what batches hold."""

import dataclasses
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import privgrad as pg
from conftest import make_data, make_plan
from privgrad.accounting.accountant import epsilon

OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ({"max_grad_norm": math.inf}, "max_grad_norm"),
    ({"max_grad_norm": 1e-12}, r"in \[1e-10, inf\), got 1e-12; .*rescale the loss"),
    ({"noise_multiplier": torch.tensor(1.0)}, "noise_multiplier"),
    ({"max_grad_norm": math.nan}, "max_grad_norm"),
    ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ({"noise_multiplier": math.inf}, "noise_multiplier"),
    ({"sample_rate": 0.0}, "sample_rate"),
    ({"sample_rate": -0.5}, "sample_rate"),
    ({"sample_rate": 1.5}, "sample_rate"),
    ({"sample_rate": math.nan}, "sample_rate"),
    ({"steps": 0}, "steps"),
    ({"steps": 1.5}, "steps"),
    ({"steps": True}, "steps"),
    ({"expected_batch_size": 0}, "expected_batch_size"),
    ({"expected_batch_size": 8.0}, "expected_batch_size"),
    ({"expected_batch_size": 16}, r"sample_rate \* num_examples = 8"),
    ({"num_examples": 0}, "num_examples"),
    ({"delta": 0.0}, "delta"),
    ({"delta": 1.0}, "delta"),
    ({"sampling": "shuffled"}, "sampling"),
]


@pytest.mark.parametrize(("changed", "message"), OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused_at_construction(changed: dict[str, Any], message: str):
    with pytest.raises(pg.PrivacyError, match=message):
        make_plan(**changed)


@pytest.mark.parametrize(
    "name", ["sample_rate", "steps", "expected_batch_size", "noise_multiplier", "max_grad_norm", "num_examples"]
)
def test_what_decides_privacy_has_no_default(name: str):
    numbers = {f.name: getattr(make_plan(), f.name) for f in dataclasses.fields(pg.PrivacyPlan)}
    del numbers[name]
    with pytest.raises(TypeError, match=name):
        pg.PrivacyPlan(**numbers)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="max_grad_nrom"):
        make_plan(max_grad_nrom=1.0)


def test_a_large_delta_warns():
    with pytest.warns(UserWarning, match="above 1 / num_examples"):
        make_plan(delta=0.1)


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_plan().noise_multiplier = 0.0  # pyright: ignore[reportAttributeAccessIssue]


def test_for_budget_meets_the_target_and_travels():
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=2.0, delta=1e-5, max_grad_norm=1.0, num_examples=1000, expected_batch_size=93, steps=30
    )
    assert plan.sample_rate == 93 / 1000
    assert 1.99 < plan.epsilon() <= 2.0
    assert plan.epsilon(steps=10) < plan.epsilon() <= plan.epsilon(accountant="rdp")
    with pytest.raises(pg.PrivacyError, match="delta"):
        make_plan().epsilon()
    assert make_plan(noise_multiplier=0.0).epsilon(delta=1e-5) == math.inf


@pytest.mark.usefixtures("by_rdp_here")
@pytest.mark.parametrize("factor", [1 / 2, 1 / 3, 1 / 120, 3 / 4, np.float64(0.25), Fraction(1, 5)])
@pytest.mark.parametrize("group_size", [1, 2])
def test_a_scaled_plan_has_the_same_noise_and_no_epsilon(factor: float, group_size: int):
    plan = pg.PrivacyPlan.for_budget(
        target_epsilon=3.0,
        delta=1e-5,
        max_grad_norm=0.7,
        num_examples=2390,
        expected_batch_size=240,
        steps=30,
        seed=4,
        group_size=group_size,
    )
    scaled = plan.scaled(factor)
    assert scaled.expected_batch_size == round(240 * factor)
    assert scaled.sample_rate == pytest.approx(plan.sample_rate * factor)
    assert scaled.noise_multiplier == pytest.approx(plan.noise_multiplier * factor)
    assert scaled.noise_std == pytest.approx(plan.noise_std, rel=1e-12)
    assert scaled.simulates == plan
    assert (scaled.target_epsilon, plan.target_epsilon) == (None, 3.0)
    assert scaled.epoch_steps == plan.epoch_steps == 10
    assert scaled.epsilon() == scaled.epsilon(steps=1) == scaled.epsilon(accountant="rdp") == math.inf
    assert plan.epsilon() <= 3.0
    assert scaled.release.noise_multiplier == scaled.public_facts["noise_multiplier"] == 0.0
    assert epsilon([scaled.release], delta=1e-5) == math.inf
    assert pickle.loads(pickle.dumps(scaled)) == dataclasses.replace(scaled) == scaled


def test_a_plan_is_simulated_on_fewer_public_examples():
    plan = make_plan(target_epsilon=3.0, delta=0.01)
    scaled = plan.scaled(1 / 2, num_examples=20)  # without a warning of delta: nothing is private here
    assert (scaled.num_examples, scaled.expected_batch_size, scaled.sample_rate) == (20, 4, 0.2)
    assert scaled.noise_std == plan.noise_std
    assert scaled.epsilon() == math.inf
    assert scaled.release.noise_multiplier == 0.0
    assert [len(batch.examples[0]) for batch in scaled.batches(make_data(20))]
    assert pickle.loads(pickle.dumps(scaled)) == dataclasses.replace(scaled) == scaled
    whole = plan.scaled(1, num_examples=20)
    assert (whole.simulates, whole.expected_batch_size, whole.epsilon()) == (plan, 8, math.inf)
    with pytest.raises(pg.PrivacyError, match=r"expected_batch_size \* factor to be at most num_examples = 3, got 4"):
        plan.scaled(1 / 2, num_examples=3)
    with pytest.raises(pg.PrivacyError, match=r"PrivacyPlan\.scaled: expected num_examples"):
        plan.scaled(1 / 2, num_examples=3.5)  # pyright: ignore[reportArgumentType]


def test_a_plan_scaled_by_one_is_the_plan():
    plan = make_plan()
    assert plan.scaled(1) is plan
    assert plan.simulates is None
    assert plan.public_facts["simulates"] is None


@pytest.mark.parametrize(
    ("changed", "factor", "message"),
    [
        ({}, 0.0, r"factor to be in \(0, 1\], got 0\.0; give a share"),
        ({}, 2, r"factor to be in \(0, 1\], got 2; "),
        ({}, True, r"factor to be in \(0, 1\], got True; "),
        ({}, math.nan, r"factor to be in \(0, 1\], got nan; "),
        ({}, "1/16", r"factor to be in \(0, 1\], got '1/16', a str; "),
        ({}, 1 / 3, r"expected_batch_size \* factor to be a whole number >= 1, got 8 \* 0\.333333 = 2\.66667\."),
        ({}, 1 / 16, r"got 8 \* 0\.0625 = 0\.5\."),
        ({"group_size": 4}, 1 / 4, r"a whole number >= 1 that group_size = 4 divides, got 8 \* 0\.25 = 2\."),
        ({"group_size": 8}, 1 / 2, r"got 8 \* 0\.5 = 4\."),
    ],
)
def test_a_factor_that_does_not_fit_is_refused(changed: dict[str, Any], factor: Any, message: str):
    plan = make_plan(**changed)
    with pytest.raises(pg.PrivacyError, match=rf"PrivacyPlan\.scaled: expected .*{message}"):
        plan.scaled(factor)


def test_a_scaled_plan_is_scaled_and_changed_through_the_plan_that_it_simulates():
    plan = make_plan()
    scaled = plan.scaled(1 / 2)
    with pytest.raises(pg.PrivacyError, match=r"batches of 4 that simulate batches of 8; .*plan\.simulates\.scaled"):
        scaled.scaled(1 / 2)
    changes: list[dict[str, Any]] = [
        {"simulates": plan},
        {"simulates": scaled},
        {"simulates": 3.0},
        {"simulates": make_plan(expected_batch_size=4, sample_rate=0.125)},
    ]
    for changed in changes:
        with pytest.raises(pg.PrivacyError, match=r"as of the simulated plan, got|expected simulates "):
            make_plan(**({"noise_multiplier": 0.5} | changed))
    with pytest.raises(pg.PrivacyError, match=r"steps to be 10, as of the simulated plan, got 20; change"):
        dataclasses.replace(scaled, steps=20)
    assert dataclasses.replace(plan, steps=20).scaled(1 / 2).steps == 20


def test_a_batch_larger_than_the_data_is_refused_by_the_name_that_was_typed():
    numbers: dict[str, Any] = {"target_epsilon": 2.0, "delta": 1e-5}
    with pytest.raises(pg.PrivacyError, match="expected_batch_size to be at most num_examples = 1000, got 2000"):
        pg.PrivacyPlan.for_budget(max_grad_norm=1.0, num_examples=1000, expected_batch_size=2000, steps=30, **numbers)
    with pytest.raises(pg.PrivacyError, match="expected_cohort_size to be at most num_users = 10, got 11"):
        pg.PrivacyPlan.for_users(num_users=10, expected_cohort_size=11, rounds=3, max_update_norm=1.0, **numbers)


@pytest.mark.parametrize("steps", [2344.0, 2343.75, 0])
def test_steps_that_are_no_whole_number_are_refused_by_the_function_that_was_called(steps: Any):
    numbers: dict[str, Any] = {"max_grad_norm": 1.0, "num_examples": 60_000, "expected_batch_size": 512}
    for sampling in ("poisson", "truncated"):
        with pytest.raises(pg.PrivacyError, match=f"^for_budget: expected steps to be an integer >= 1, got {steps}"):
            pg.PrivacyPlan.for_budget(
                target_epsilon=2.0, delta=1e-5, steps=steps, sampling=sampling, max_batch_size=700, **numbers
            )
    with pytest.raises(pg.PrivacyError, match=f"^PrivacyPlan: expected steps to be an integer >= 1, got {steps}"):
        make_plan(steps=steps)


def test_exactly_the_plans_steps_and_any_start():
    plan = make_plan(steps=7, seed=1)
    whole = list(plan.batches(make_data()))
    assert [batch.sampling.step for batch in whole] == list(range(7))
    tail = list(plan.batches(make_data(), start=5))
    for one, other in zip(whole[5:], tail, strict=True):
        assert one.sampling == other.sampling
        assert torch.equal(one.examples[0], other.examples[0])


class Dictionaries(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.full((3,), index), "label": index}


@pytest.mark.parametrize("rate", [0.25, 1e-9])
def test_any_structure_of_examples_empty_batches_included(rate: float):
    plan = make_plan(sample_rate=rate, expected_batch_size=max(1, round(32 * rate)))
    for batch in plan.batches(Dictionaries()):
        assert batch.examples["ids"].shape == (batch.size, 3)
        assert batch.examples["ids"].dtype == torch.int64
        assert torch.equal(batch.examples["ids"][:, 0], batch.examples["label"])
        assert rate > 1e-3 or batch.size == 0
    for batch in plan.batches(list(range(32)), collate=lambda items: torch.tensor(items)[:, None]):
        assert batch.examples.shape == (batch.size, 1)


def test_collating_an_example_may_not_depend_on_its_companions():
    texts = [torch.ones(1 + index % 3) for index in range(32)]
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=1)

    def to_longest(items: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)

    def to_three(items: list[Any]) -> Any:
        return torch.stack([torch.nn.functional.pad(item, (0, 3 - len(item))) for item in items])

    with pytest.raises(pg.SamplingError, match="pad to a public length"):
        list(plan.batches(texts, collate=to_longest))
    with pytest.raises(pg.SamplingError, match="one row per example"):
        list(plan.batches(texts, collate=lambda items: torch.cat([to_three(items)] * 2)))
    (batch,) = plan.batches(texts, collate=to_three)
    assert batch.examples.shape == (32, 3)


def test_a_tensor_data_set_that_hides_a_column_is_asked_for_its_items():
    class Redacted(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[:1]

    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=1)
    (batch,) = plan.batches(Redacted(*make_data().tensors))
    assert len(batch.examples) == 1


def test_full_batches_are_the_data_whatever_was_written_to_the_last_one():
    x, y = make_data(8).tensors
    dataset, kept = TensorDataset(x, y), x.clone()
    plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8, steps=4)
    batches = iter(plan.batches(dataset))
    first = next(batches).examples
    assert next(batches).examples[0] is first[0]
    first[0].mul_(2)
    assert torch.equal(dataset.tensors[0], kept)
    assert torch.equal(next(batches).examples[0], kept)
    x.add_(1)
    assert torch.equal(next(batches).examples[0], kept + 1)


def test_data_sets_that_cannot_be_sampled_are_refused():
    class Stream(IterableDataset[int]):
        def __iter__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            return iter(range(32))

    plan = make_plan()
    with pytest.raises(pg.SamplingError, match="length"):
        plan.batches(Stream())
    with pytest.raises(pg.SamplingError, match="at least one example"):
        plan.batches([])
    with pytest.raises(pg.SamplingError, match="TensorDataset"):
        plan.batches(make_data().tensors)
    with pytest.raises(pg.SamplingError, match=r"pass its \.dataset"):
        plan.batches(DataLoader(make_data()))  # pyright: ignore[reportArgumentType]
    assert sum(1 for _ in plan.batches(make_data(33))) == plan.steps


def test_rates_that_do_not_divide_evenly_keep_their_steps_and_rate():
    """Opacus loses a step, or one example of the batch, to int(1 / q) and int(n * B * (1 / n))."""
    for count, size in [(1568, 32), (93, 1), (1000, 93)]:
        rate = size / count
        plan = make_plan(sample_rate=rate, expected_batch_size=size, num_examples=count, steps=5)
        batches = list(plan.batches(TensorDataset(torch.zeros(count, 1))))
        assert len(batches) == 5
        assert all(b.sampling.sample_rate == plan.release.sample_rate == rate for b in batches)
        assert all(b.sampling.expected_batch_size == size for b in batches)


@pytest.mark.parametrize("rows", [20, 31, 33, 100])
def test_the_number_of_rows_is_no_error_of_poisson_batches_and_is_never_shown(rows: int):
    assert len(list(make_plan(steps=3).batches(make_data(rows)))) == 3
    if rows not in (31, 32):
        with pytest.raises(pg.SamplingError, match="num_examples = 32 or one fewer for truncated batches") as caught:
            make_plan(sampling="truncated", max_batch_size=20).batches(make_data(rows))
        assert str(rows) not in str(caught.value)


def test_far_fewer_rows_than_declared_warn_and_columns_are_refused():
    with pytest.warns(UserWarning, match="NOT PRIVATE: the plan declares num_examples = 32, and the data set has few"):
        make_plan().batches(make_data(15))
    with pytest.raises(pg.SamplingError, match=r"got columns of a table; pass torch\.utils\.data\.TensorDataset"):
        make_plan().batches(make_data(32).tensors)
    make_plan().batches(list(torch.randn(31, 3)))


BUDGET: dict[str, Any] = {"target_epsilon": 2.0, "delta": 1e-5, "max_grad_norm": 1.0, "num_examples": 1000}


@pytest.mark.usefixtures("by_rdp_here")
@pytest.mark.parametrize(
    ("epochs", "size", "steps"), [(3, 100, 30), (1, 93, 11), (0.5, 100, 5), (3, 10, 300), (0.001, 100, 1), (7, 1000, 7)]
)
def test_epochs_and_batch_size_are_steps_and_expected_batch_size(epochs: float, size: int, steps: int):
    plan = pg.PrivacyPlan.for_budget(**BUDGET, epochs=epochs, batch_size=size)
    assert (plan.steps, plan.expected_batch_size) == (steps, size)
    assert plan == pg.PrivacyPlan.for_budget(**BUDGET, steps=steps, expected_batch_size=size)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"epochs": 3, "steps": 5, "batch_size": 10},
            "exactly one of steps and epochs to be given, got steps 5, epochs 3",
        ),
        ({"batch_size": 10}, "exactly one of steps and epochs to be given, got steps None, epochs None"),
        ({"epochs": 0, "batch_size": 10}, "epochs to be a positive finite number"),
        (
            {"epochs": 1, "batch_size": 10, "expected_batch_size": 10},
            "exactly one of expected_batch_size and batch_size",
        ),
        ({"epochs": 1}, "exactly one of expected_batch_size and batch_size"),
        ({"epochs": 1, "batch_size": 1001}, "batch_size to be at most num_examples = 1000"),
    ],
)
def test_conflicts_of_epochs_and_batch_size_are_refused(numbers: dict[str, Any], message: str):
    with pytest.raises(pg.PrivacyError, match=message):
        pg.PrivacyPlan.for_budget(**BUDGET, **numbers)


@pytest.mark.parametrize(
    ("count", "size", "groups", "drawn"),
    [
        (1_437, 256, 1, 240),
        (60_000, 1_024, 1, 1_017),
        (60_000, 4_096, 1, 4_000),
        (1_000, 300, 1, 333),
        (100, 30, 4, 32),
    ],
)
def test_an_epoch_of_any_batch_size_has_the_nearest_whole_steps(count: int, size: int, groups: int, drawn: int):
    numbers: dict[str, Any] = {"num_examples": count, "batch_size": size, "epochs": 2, "group_size": groups}
    plan = pg.PrivacyPlan.for_budget(target_epsilon=60.0, delta=1e-5, max_grad_norm=1.0, sampling="epochs", **numbers)
    assert plan.expected_batch_size == drawn
    assert plan.steps == 2 * round(count / size)
    assert plan.sample_rate == pytest.approx(1 / round(count / size))


@pytest.mark.parametrize("name", ["fixed", "shuffled"])
def test_shuffled_batches_are_refused_and_epochs_are_named(name: Any):
    told = f"sampling to have an accountant, got '{name}'; give sampling=\"epochs\""
    users: dict[str, Any] = {"num_users": 100, "expected_cohort_size": 10, "rounds": 3, "max_update_norm": 1.0}
    calls: list[Callable[[], object]] = [
        lambda: make_plan(sampling=name),
        lambda: pg.PrivacyPlan.for_budget(**BUDGET, steps=3, batch_size=10, sampling=name),
        lambda: pg.PrivacyPlan.for_users(**users, noise_multiplier=1.0, delta=1e-3, sampling=name),
    ]
    for call in calls:
        with pytest.raises(pg.PrivacyError, match=told):
            call()
