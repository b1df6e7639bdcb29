"""Gaussian releases: what one unit can move, the noise, and the record that outlives the process."""

import json
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import privgrad as pg
from conftest import account_by_rdp
from privgrad import releases as release_record
from privgrad.accounting.accountant import Release, calibrate_noise_multiplier, epsilon
from privgrad.ledger.ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore:NOT PRIVATE")  # tests of the warnings ask for them
AGAIN = pytest.mark.filterwarnings("ignore:.*was released before")
NUMBERS: dict[str, Any] = {"bound": 2.0, "noise_multiplier": 1.5, "num_examples": 50}


def changed(**numbers: Any) -> dict[str, Any]:
    return NUMBERS | numbers


MANY = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    account_by_rdp(monkeypatch)


def exact(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, float]]:
    """Catch each sum before its noise, with its sensitivity."""
    seen: list[tuple[Tensor, float]] = []
    real = release_record.add_noise

    def caught(clipped: Any, **options: Any) -> Any:
        seen.append((clipped.values["sum"].clone(), clipped.sensitivity))
        return real(clipped, **options)

    monkeypatch.setattr(release_record, "add_noise", caught)
    return seen


def counts(rows: Tensor, **options: Any) -> Tensor:
    return pg.release_histogram(rows, num_bins=3, **options)


def bins(rows: Tensor, **options: Any) -> Tensor:
    """One bin a unit, from its first value."""
    del options["bound"]
    return pg.release_histogram(rows[:, 0].floor() % 5, num_bins=5, **options)


@pytest.mark.parametrize("release", [pg.release_sum, pg.release_mean, pg.release_second_moment, counts, bins])
def test_one_unit_moves_the_sum_by_its_sensitivity_at_most(
    release: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = exact(monkeypatch)
    torch.manual_seed(0)
    rows = 3 * torch.randn(20, 3)
    worst = [
        torch.tensor([1e300, -1e300, 1e300]),
        torch.tensor([100.0, 0.0, 0.0]),
        torch.tensor([1.0, 1.0, 1.0]) * 50,
        torch.tensor([math.nan, 1.0, 1.0]),
        torch.tensor([math.inf, 1.0, 1.0]),
        torch.tensor([-math.inf, math.inf, 0.0]),
        torch.tensor([2.0, 0.0, 0.0]),
        torch.tensor([1e-30, 0.0, 0.0]),
        *(10 * torch.randn(20, 3)),
    ]
    release(rows, **NUMBERS, ledger=tmp_path / "without.jsonl")
    base, sensitivity = seen[-1]
    largest = 0.0
    for number, row in enumerate(worst):
        release(torch.cat([rows, row.double()[None]]), **NUMBERS, ledger=tmp_path / f"{number}.jsonl")
        moved = float((seen[-1][0] - base).norm())
        assert moved <= sensitivity * (1 + 1e-12)
        largest = max(largest, moved)
    assert sensitivity == {pg.release_second_moment: 4.0, bins: 1.0}.get(release, 2.0)
    assert largest == pytest.approx(sensitivity)  # the bound is met


@pytest.mark.parametrize("n", [0, 3, 5000])
def test_sums_are_those_of_the_clipped_rows(n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = exact(monkeypatch)
    torch.manual_seed(0)
    rows = torch.randn(n, 4, dtype=torch.float64)
    clipped = rows / (rows.norm(dim=1, keepdim=True) / 2.0).clamp(min=1)
    pg.release_sum(rows, **NUMBERS, ledger=tmp_path / "sum.jsonl")
    torch.testing.assert_close(seen[-1][0], clipped.sum(0))
    found = pg.release_second_moment(rows, **NUMBERS, ledger=tmp_path / "moment.jsonl")
    upper = torch.triu_indices(4, 4)
    weights = torch.where(upper[0] == upper[1], 1.0, math.sqrt(2)).double()
    torch.testing.assert_close(seen[-1][0], (clipped.T @ clipped)[upper[0], upper[1]] * weights)
    assert found.shape == (4, 4)
    assert torch.equal(found, found.T)
    labels = torch.arange(n) % 3
    pg.release_histogram(labels, num_bins=3, noise_multiplier=1.0, num_examples=9, ledger=tmp_path / "bins.jsonl")
    assert seen[-1][0].tolist() == [float((labels == one).sum()) for one in range(3)]


def test_units_outside_all_bins_count_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = exact(monkeypatch)
    rows = [0.0, 1.0, 1.5, -1.0, 2.0, math.nan, math.inf, 1e30]
    with pytest.warns(UserWarning, match="NOT PRIVATE: release_histogram: 6 of 8 rows are in no bin from 0 to 1"):
        pg.release_histogram(rows, num_bins=2, noise_multiplier=1.0, num_examples=9, ledger=tmp_path / "bins.jsonl")
    assert seen[-1][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("release", [pg.release_sum, pg.release_mean, pg.release_second_moment, counts])
def test_rows_that_count_as_zero_are_told_to_the_user_alone(release: Callable[..., Tensor], tmp_path: Path):
    rows = torch.tensor([[1.0, math.nan, 0.0], [1.0, math.inf, 0.0], [1.0, 1.0, 1.0]])
    with pytest.warns(UserWarning, match="NOT PRIVATE: release_.*: 2 of 3 rows are not finite and count as zero"):
        release(rows, **NUMBERS, ledger=tmp_path / "ledger.jsonl")
    assert "2 of 3" not in (tmp_path / "ledger.jsonl").read_text()


def test_rows_above_the_bound_and_several_rows_of_a_unit_are_noticed(tmp_path: Path):
    rows = torch.eye(4) * torch.tensor([[1.0], [1.0], [1.0], [900.0]])
    with pytest.warns(UserWarning, match="1 of 4 rows are longer than bound = 2 and are scaled down"):
        pg.release_sum(rows, **NUMBERS, ledger=tmp_path / "sum.jsonl")
    numbers: dict[str, Any] = {"noise_multiplier": 1.5, "privacy_unit": "user", "num_examples": 2}
    with pytest.warns(UserWarning, match="4 rows are given for num_examples = 2. All data of a unit must be in one"):
        pg.release_histogram([0, 1, 1, 1], num_bins=2, **numbers, ledger=tmp_path / "bins.jsonl")
    with pytest.warns(UserWarning, match="4 rows are given for num_examples = 2"):
        pg.release_second_moment(rows, bound=900.0, **numbers, ledger=tmp_path / "moment.jsonl")


def test_the_noise_has_its_size(tmp_path: Path):
    rows, size = torch.zeros(3, 20_000), 20_000
    noise = pg.release_sum(rows, **NUMBERS, ledger=tmp_path / "sum.jsonl") / 3.0
    assert float(noise.std()) == pytest.approx(1.0, abs=0.025)
    assert float(noise.mean()) == pytest.approx(0.0, abs=5 / math.sqrt(size))
    mean = pg.release_mean(rows, **NUMBERS, ledger=tmp_path / "mean.jsonl") / (3.0 / 50)
    assert float(mean.std()) == pytest.approx(1.0, abs=0.025)
    moment = pg.release_second_moment(rows[:, :150], **NUMBERS, ledger=tmp_path / "moment.jsonl") / 6.0
    assert float(moment.diagonal().std()) == pytest.approx(1.0, abs=0.25)
    above = moment[torch.triu_indices(150, 150, 1).unbind()]
    assert float(above.std()) == pytest.approx(math.sqrt(0.5), abs=0.03)
    counts = pg.release_histogram(
        torch.zeros(2), num_bins=size, noise_multiplier=3.0, num_examples=5, ledger=tmp_path / "bins.jsonl"
    )
    assert float(counts.std()) == pytest.approx(3.0, rel=0.025)


def test_a_second_call_returns_the_record_and_costs_nothing(tmp_path: Path):
    path, rows = tmp_path / "mean.jsonl", torch.randn(30, 2, 2)
    found = pg.release_mean(rows, **NUMBERS, ledger=path, delta=1e-3)
    before = path.read_bytes()
    with pytest.warns(UserWarning, match=r"release_mean: .*mean.jsonl was released before; its recorded value is ret"):
        assert torch.equal(pg.release_mean(rows + 1, **NUMBERS, ledger=path, delta=1e-3), found)
    assert path.read_bytes() == before
    ledger = Ledger(path, read_only=True)
    assert ledger.charged == [Release(1.5, 1.0)]
    assert ledger.epsilon(delta=1e-3) == epsilon([Release(1.5, 1.0)], delta=1e-3)
    with pytest.raises(pg.PrivacyError, match="max_grad_norm"):
        pg.release_mean(rows, **changed(bound=3.0), ledger=path, delta=1e-3)
    with pytest.raises(pg.PrivacyError, match="released"):
        pg.release_sum(rows, **NUMBERS, ledger=path, delta=1e-3)


@AGAIN
def test_a_budget_pays_and_records(tmp_path: Path):
    numbers: dict[str, Any] = {"delta": 1e-3, "num_examples": 50, "privacy_unit": "example"}
    budget = pg.Budget(tmp_path / "budget.jsonl", total_epsilon=4.0, **numbers)
    rows = torch.randn(30, 2)
    found = pg.release_sum(rows, **NUMBERS, budget=budget, name="sum")
    with pytest.warns(UserWarning, match=r"release_sum: 'sum' of .*budget.jsonl was released before; .* another name"):
        assert torch.equal(pg.release_sum(rows, **NUMBERS, budget=budget, name="sum"), found)
    both = pg.release_sum(rows, **NUMBERS, budget=budget, name="sum", ledger=tmp_path / "sum.jsonl")
    assert torch.equal(both, found)
    assert Ledger(tmp_path / "sum.jsonl", read_only=True).releases == 1
    assert len(budget.commitments) == 1
    with pytest.raises(pg.PrivacyError, match="choose another name"):
        pg.release_mean(rows, **NUMBERS, budget=budget, name="sum")
    with pytest.raises(pg.BudgetExceededError):
        pg.release_sum(rows, **changed(noise_multiplier=0.3), budget=budget, name="more")
    with pytest.raises(pg.PrivacyError, match="to be 'example'"):
        pg.release_sum(rows, **NUMBERS, budget=budget, name="users", privacy_unit="user")
    assert not torch.equal(pg.release_sum(rows, **NUMBERS, budget=budget, name="again"), found)


def dies_at(folder: Path, call: int) -> None:
    """Release, and die without notice at one of the calls that write; else print what came out."""
    count, real = 0, os.fsync

    def counted(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == call:
            os._exit(0)
        real(descriptor)
        if -count == call:
            os._exit(0)

    os.fsync = counted
    budget = pg.Budget(folder / "budget.jsonl")
    found = pg.release_sum(torch.ones(3, 2), **NUMBERS, budget=budget, name="a", ledger=folder / "sum.jsonl")
    (folder / "found.json").write_text(json.dumps(found.tolist()))
    os._exit(1)


@AGAIN
def test_a_death_at_any_write_charges_at_least_what_was_released(tmp_path: Path):
    for call in (*range(1, 12), *range(-11, 0)):
        folder = tmp_path / str(call)
        folder.mkdir()
        numbers: dict[str, Any] = {"delta": 1e-3, "num_examples": 50, "privacy_unit": "example"}
        budget = pg.Budget(folder / "budget.jsonl", total_epsilon=9.0, **numbers)
        worker = MANY.Process(target=dies_at, args=(folder, call))
        worker.start()
        worker.join(60)
        recorded = budget.released("a")
        charged = (folder / "sum.jsonl").exists() and "values" in (folder / "sum.jsonl").read_text()
        assert recorded is None or len(budget.commitments) == 1
        assert not charged or recorded is not None
        again = pg.release_sum(torch.ones(3, 2), **NUMBERS, budget=budget, name="a", ledger=folder / "sum.jsonl")
        if recorded is not None:
            assert again.tolist() == recorded
        if worker.exitcode == 1:
            assert json.loads((folder / "found.json").read_text()) == again.tolist()
        assert Ledger(folder / "sum.jsonl", read_only=True).releases == 1
        assert len(budget.commitments) == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"bound": 0.0}, "bound"),
        ({"bound": math.inf}, "bound"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": "1"}, "noise_multiplier"),
        ({"bound": 1e160}, "bound to be in .1e-100, 1e100."),
        ({"bound": 1e-160}, "bound to be in"),
        ({"noise_multiplier": 1e-300}, "to give a grid"),
        ({"noise_multiplier": 1e12}, "noise_multiplier to be at most"),
        ({"num_examples": 0}, "num_examples"),
        ({"num_examples": 10**400}, "num_examples"),
        ({"seed": "a"}, "seed"),
        ({"privacy_unit": "row"}, "privacy_unit"),
        ({"delta": 2.0}, "delta"),
        ({"rows": torch.tensor(1.0)}, "one row per unit"),
        ({"rows": [["a"]]}, "str"),
        ({"rows": torch.zeros(3, 0)}, "one row per unit"),
        ({"ledger": None}, "ledger or budget"),
        ({"name": "a"}, "name"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, wrong: dict[str, Any], match: str):
    given: dict[str, Any] = changed(rows=torch.ones(3, 2), ledger=tmp_path / "sum.jsonl") | wrong
    with pytest.raises((pg.PrivacyError, ValueError, TypeError), match=match):
        pg.release_sum(given.pop("rows"), **given)
    assert not (tmp_path / "sum.jsonl").exists()


_TENS = st.integers(-324, 308).map(lambda exponent: float(f"1e{exponent}"))


@given(
    release=st.sampled_from([pg.release_sum, pg.release_mean, pg.release_second_moment, counts, bins]),
    bound=_TENS,
    noise_multiplier=_TENS | st.just(30.0),
    num_examples=st.integers(0, 400).map(lambda exponent: 10**exponent) | st.just(50),
)
@settings(max_examples=150, deadline=None)
def test_extreme_numbers_are_refused_before_the_commitment(
    release: Callable[..., Tensor], bound: float, noise_multiplier: float, num_examples: int
):
    with tempfile.TemporaryDirectory() as folder:
        cap: dict[str, Any] = {"total_epsilon": 1e6, "delta": 1e-200, "num_examples": 50, "privacy_unit": "example"}
        budget = pg.Budget(Path(folder) / "budget.jsonl", **cap)
        numbers = {"bound": bound, "noise_multiplier": noise_multiplier, "num_examples": num_examples}
        try:
            found = release(torch.ones(4, 3), **numbers, budget=budget, name="a")
        except pg.PrivacyError:
            assert not budget.commitments
            return
        assert len(budget.commitments) == 1
        assert bool(found.isfinite().all())
        assert bool(found.any())


@AGAIN
@pytest.mark.parametrize("size", [2**19, 2**19 + 1])
def test_a_release_fits_into_a_line_of_its_ledger(size: int, tmp_path: Path):
    numbers: dict[str, Any] = {"noise_multiplier": 1e-3, "num_examples": 5, "ledger": tmp_path / "bins.jsonl"}
    if size > 2**19:
        with pytest.raises(pg.PrivacyError, match="released values to be at most"):
            pg.release_histogram([0], num_bins=size, **numbers)
        assert not (tmp_path / "bins.jsonl").exists()
    else:
        found = pg.release_histogram([0], num_bins=size, **numbers)
        assert torch.equal(pg.release_histogram([0], num_bins=size, **numbers), found)


def test_wrong_shapes_are_refused(tmp_path: Path):
    options: dict[str, Any] = {"noise_multiplier": 1.0, "num_examples": 5, "ledger": tmp_path / "a.jsonl"}
    with pytest.raises(pg.PrivacyError, match=r"of shape \(n,\)"):
        pg.release_histogram(torch.zeros(3, 2), num_bins=2, **options)
    with pytest.raises(pg.PrivacyError, match=r"of shape \(n, 4\)"):
        pg.release_histogram(torch.zeros(3, 2), num_bins=4, bound=1.0, **options)
    with pytest.raises(pg.PrivacyError, match=r"of shape \(n, d\)"):
        pg.release_second_moment(torch.zeros(3), bound=1.0, **options)


@pytest.mark.filterwarnings("ignore:a fixed seed")
def test_a_seed_repeats_the_noise_and_is_recorded(tmp_path: Path):
    rows = np.ones((4, 2))
    one = pg.release_sum(rows, **NUMBERS, ledger=tmp_path / "a.jsonl", seed=3)
    two = pg.release_sum(rows, **NUMBERS, ledger=tmp_path / "b.jsonl", seed=3)
    assert torch.equal(one, two)
    assert not torch.equal(one, pg.release_sum(rows, **NUMBERS, ledger=tmp_path / "c.jsonl"))
    ledger = Ledger(tmp_path / "a.jsonl", read_only=True)
    assert ledger.seeded_releases == 1
    assert ledger.plan_facts["research_seed"]


def test_a_release_and_a_training_share_one_epsilon(tmp_path: Path):
    pg.release_mean(torch.ones(4, 2), **changed(noise_multiplier=8.0), ledger=tmp_path / "a.jsonl")
    besides = Ledger(tmp_path / "a.jsonl", read_only=True).charged
    sigma = calibrate_noise_multiplier(target_epsilon=3.0, delta=1e-3, sample_rate=0.1, steps=20, besides=besides)
    assert 2.99 <= epsilon([*besides, Release(sigma, 0.1, count=20)], delta=1e-3) <= 3.0


def test_a_bound_that_is_the_largest_norm_or_number_of_the_data_warns(tmp_path: Path):
    incomes = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 9e4
    rows = incomes.reshape(250, 2)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "num_examples": 50}
    suspected: list[tuple[Callable[..., Tensor], Tensor, float, str]] = [
        (pg.release_mean, incomes, float(incomes.abs().max()), "norm of a row"),
        (pg.release_sum, rows, float(rows.norm(dim=1).max()), "norm of a row"),
        (pg.release_sum, rows, float(rows.max()), "number"),
        (pg.release_second_moment, rows, float(rows.norm(dim=1).max()), "norm of a row"),
        (partial(pg.release_histogram, num_bins=2), rows, float(rows.norm(dim=1).max()), "norm of a row"),
    ]
    for index, (release, given_rows, bound, of) in enumerate(suspected):
        with pytest.warns(UserWarning, match=f"bound: this is the largest {of} of the data") as caught:
            release(given_rows, bound=bound, **options, ledger=tmp_path / f"{index}.jsonl")
        told = [str(one.message) for one in caught if "this is the" in str(one.message)]
        assert told
        assert f"{bound}"[:6] not in "".join(told)
    pg.release_mean(incomes, bound=9e4, **options, ledger=tmp_path / "a.jsonl")


def test_a_public_bound_of_many_digits_that_rows_were_scaled_to_passes(tmp_path: Path):
    rows = torch.nn.functional.normalize(torch.randn(50, 4)) * 1.23456
    pg.release_sum(rows, bound=1.23456, noise_multiplier=1.0, num_examples=50, ledger=tmp_path / "a.jsonl")


@pytest.mark.parametrize("bound", [torch.tensor(29.0), True])
def test_a_bound_that_nobody_typed_is_refused(bound: Any, tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match=r"bound to be in .1e-100, 1e100., got .*chosen without the data"):
        pg.release_sum(np.ones((4, 2)), **NUMBERS | {"bound": bound}, ledger=tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()
